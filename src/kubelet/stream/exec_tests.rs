use super::*;
use crate::stream::spdy::{Codec, Frame};
use bytes::BytesMut;
use futures::SinkExt;
use tokio::io::AsyncReadExt;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;

#[test]
fn sizes() {
    assert_eq!(size(b"{\"Width\":80,\"Height\":24}"), Some((80, 24)));
    assert_eq!(size(b"{\"Width\":80}"), None);
    assert_eq!(size(b"{\"Width\":70000,\"Height\":1}"), None);
    assert_eq!(size(b"x"), None);
}

#[test]
fn outcomes() {
    assert_eq!(outcome(&Ok(0))["status"], "Success");
    let failed = outcome(&Ok(3));
    assert_eq!(failed["reason"], "NonZeroExitCode");
    assert_eq!(failed["details"]["causes"][0], json!({"reason": "ExitCode", "message": "3"}));
    assert_eq!(outcome(&Err("no".into()))["reason"], "InternalError");
}

/// A process that repeats its input on stdout, then says "bye" on stderr and exits with 3.
fn cat() -> Session {
    let (ours, theirs) = tokio::io::duplex(1024);
    let output = async_stream(ours);
    Session { output, stdin: Some(Box::pin(theirs)), id: SessionId::Exec("x".into()) }
}

fn async_stream(mut input: tokio::io::DuplexStream) -> crate::runtime::Output {
    let (sender, receiver) = mpsc::channel(4);
    tokio::spawn(async move {
        let mut buffer = [0; 256];
        loop {
            match input.read(&mut buffer).await {
                Ok(n) if n > 0 => {
                    let _ = sender.send(Ok((OutputKind::Stdout, Bytes::copy_from_slice(&buffer[..n])))).await;
                }
                _ => break,
            }
        }
        let _ = sender.send(Ok((OutputKind::Stderr, Bytes::from_static(b"bye")))).await;
    });
    Box::pin(tokio_stream::wrappers::ReceiverStream::new(receiver))
}

#[derive(Default)]
struct Recorded(parking_lot::Mutex<Vec<(u16, u16)>>);

#[async_trait]
impl Control for Recorded {
    async fn resize(&self, _: &SessionId, width: u16, height: u16) -> Result<(), String> {
        self.0.lock().push((width, height));
        Ok(())
    }
    async fn exit_code(&self, _: &SessionId) -> Result<i32, String> {
        Ok(3)
    }
}

const ALL: Wanted = Wanted { stdin: true, stdout: true, stderr: true, tty: false };

/// What a WebSocket client hears, channel by channel, when it sends these messages.
async fn web(protocol: &str, send: Vec<Message>, start: Result<(), String>) -> HashMap<u8, String> {
    let (client, server) = tokio::io::duplex(64 * 1024);
    let upgrade = Upgrade::WebSocket(protocol.to_owned());
    let serving = tokio::spawn(async move {
        let control = Recorded::default();
        run(server, upgrade, ALL, &control, async { start.map(|()| cat()) }).await;
    });
    let mut socket = WebSocketStream::from_raw_socket(client, Role::Client, None).await;
    for message in send {
        socket.send(message).await.expect("send");
    }
    let mut heard: HashMap<u8, String> = HashMap::new();
    while let Some(Ok(message)) = socket.next().await {
        if let Some(websocket::Incoming::Data(channel, data)) = websocket::parse(&message, protocol.contains("base64")) {
            heard.entry(channel).or_default().push_str(&String::from_utf8_lossy(&data));
        }
    }
    serving.await.expect("ends");
    heard
}

fn status_of(heard: &HashMap<u8, String>) -> Value {
    serde_json::from_str(heard.get(&ERROR).map_or("null", String::as_str)).expect("a Status")
}

#[tokio::test]
async fn websocket_v5_closes_stdin() {
    let send = vec![Message::binary(b"\0hello".to_vec()), Message::binary(vec![websocket::CLOSE, STDIN])];
    let heard = web("v5.channel.k8s.io", send, Ok(())).await;
    assert_eq!((heard.get(&STDOUT).map(String::as_str), heard.get(&STDERR).map(String::as_str)), (Some("hello"), Some("bye")));
    assert_eq!(status_of(&heard)["details"]["causes"][0]["message"], "3");
}

#[tokio::test]
async fn websocket_base64() {
    let send = vec![Message::text("0aGk="), Message::Close(None)];
    let (client, server) = tokio::io::duplex(64 * 1024);
    let serving = tokio::spawn(async move {
        run(server, Upgrade::WebSocket("v4.base64.channel.k8s.io".into()), ALL, &Recorded::default(), async { Ok(cat()) }).await;
    });
    let mut socket = WebSocketStream::from_raw_socket(client, Role::Client, None).await;
    socket.send(send[0].clone()).await.expect("send");
    let mut echoed = None;
    while let Some(Ok(message)) = socket.next().await {
        match websocket::parse(&message, true) {
            Some(websocket::Incoming::Data(STDOUT, data)) if !data.is_empty() => {
                echoed = Some(data);
                break;
            }
            _ => {}
        }
    }
    assert_eq!(echoed.as_deref(), Some(&b"hi"[..]));
    drop(socket);
    serving.await.expect("a client that goes away ends the session");
}

#[tokio::test]
async fn a_command_that_cannot_start_is_told() {
    let heard = web("v4.channel.k8s.io", Vec::new(), Err("no such program".into())).await;
    assert_eq!(status_of(&heard)["message"], "no such program");
}

#[tokio::test]
async fn spdy_v4() {
    let (client, server) = tokio::io::duplex(64 * 1024);
    let wanted = Wanted { tty: true, stderr: false, ..ALL };
    let control = Arc::new(Recorded::default());
    let seen = control.clone();
    let serving = tokio::spawn(async move {
        run(server, Upgrade::Spdy("v4.channel.k8s.io".into()), wanted, &*control, async { Ok(cat()) }).await;
    });
    let (mut read, mut write) = tokio::io::split(client);
    let mut codec = Codec::default();
    let mut wire = BytesMut::new();
    for (stream, kind) in [(1, "error"), (3, "stdin"), (5, "stdout"), (7, "resize")] {
        let headers = vec![("streamType".to_owned(), kind.to_owned())];
        codec.encode(&Frame::Open { stream, fin: false, headers }, &mut wire).expect("encode");
    }
    for frame in [
        Frame::Data { stream: 7, fin: false, data: Bytes::from_static(b"{\"Width\":100,\"Height\":40}\n") },
        Frame::Data { stream: 3, fin: false, data: Bytes::from_static(b"typed") },
    ] {
        codec.encode(&frame, &mut wire).expect("encode");
    }
    write.write_all(&wire).await.expect("write");
    let mut got: HashMap<u32, Vec<u8>> = HashMap::new();
    let mut buffer = BytesMut::new();
    let mut closed_stdin = false;
    while read.read_buf(&mut buffer).await.expect("read") > 0 {
        while let Some(frame) = codec.decode(&mut buffer).expect("decode") {
            if let Frame::Data { stream, data, .. } = frame {
                got.entry(stream).or_default().extend_from_slice(&data);
            }
        }
        if !closed_stdin && got.contains_key(&5) {
            closed_stdin = true;
            let mut wire = BytesMut::new();
            codec.encode(&Frame::Data { stream: 3, fin: true, data: Bytes::new() }, &mut wire).expect("encode");
            write.write_all(&wire).await.expect("write");
        }
    }
    serving.await.expect("ends");
    assert_eq!(got.get(&5).map(Vec::as_slice), Some(&b"typedbye"[..]), "one output on a terminal");
    let status: Value = serde_json::from_slice(&got[&1]).expect("a Status");
    assert_eq!((status["reason"].as_str(), seen.0.lock().as_slice()), (Some("NonZeroExitCode"), &[(100, 40)][..]));
}
