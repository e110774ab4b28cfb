//! WebSocket, server side: Kubernetes' channel protocols, and a byte stream over binary messages for tunnels.

use std::io;

use base64::Engine;
use bytes::Bytes;
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream};
use tokio::sync::mpsc;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};
use tokio_util::task::AbortOnDropHandle;

/// First byte of a v5 message that closes a channel.
pub const CLOSE: u8 = 255;
const MAX_MESSAGE: usize = 4 << 20;
const TUNNEL_BUFFER: usize = 64 * 1024;
const QUEUE: usize = 64;

fn config() -> WebSocketConfig {
    WebSocketConfig::default().max_message_size(Some(MAX_MESSAGE)).max_frame_size(Some(MAX_MESSAGE))
}

/// The end that clients take for success: without a code, kubectl reports an error although all went well.
fn goodbye() -> Message {
    Message::Close(Some(CloseFrame { code: CloseCode::Normal, reason: "".into() }))
}

/// What comes in on a channel.
#[derive(Debug, PartialEq, Eq)]
pub enum Incoming {
    Data(u8, Bytes),
    /// The peer has nothing more for this channel (v5).
    Close(u8),
}

/// Reads one message of a channel protocol. `None`: nothing for a channel.
pub fn parse(message: &Message, base64: bool) -> Option<Incoming> {
    match message {
        Message::Binary(data) if !base64 => {
            let (&channel, rest) = data.split_first()?;
            if channel == CLOSE {
                return rest.first().map(|c| Incoming::Close(*c));
            }
            Some(Incoming::Data(channel, data.slice(1..)))
        }
        Message::Text(text) if !base64 => {
            // Browsers send text: the channel is still its first byte.
            let bytes = Bytes::copy_from_slice(text.as_bytes());
            let channel = *bytes.first()?;
            Some(Incoming::Data(channel.wrapping_sub(if channel >= b'0' { b'0' } else { 0 }), bytes.slice(1..)))
        }
        Message::Text(text) => {
            let (&channel, rest) = text.as_bytes().split_first()?;
            let data = base64::engine::general_purpose::STANDARD.decode(rest).ok()?;
            Some(Incoming::Data(channel.checked_sub(b'0')?, data.into()))
        }
        _ => None,
    }
}

/// Writes to the channels of one connection.
#[derive(Clone)]
pub struct Writer {
    out: mpsc::Sender<Message>,
    base64: bool,
}

impl Writer {
    pub async fn write(&self, channel: u8, data: &[u8]) -> io::Result<()> {
        let message = if self.base64 {
            let text = base64::engine::general_purpose::STANDARD.encode(data);
            Message::text(format!("{}{text}", char::from(b'0' + channel)))
        } else {
            let mut bytes = Vec::with_capacity(data.len() + 1);
            bytes.push(channel);
            bytes.extend_from_slice(data);
            Message::binary(bytes)
        };
        self.send(message).await
    }

    async fn send(&self, message: Message) -> io::Result<()> {
        self.out.send(message).await.map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// The channels of an upgraded connection.
pub struct Channels {
    pub incoming: mpsc::Receiver<Incoming>,
    pub writer: Writer,
    tasks: (tokio::task::JoinHandle<()>, AbortOnDropHandle<()>),
}

impl Channels {
    /// Opens the channels over `io`; `base64` for the protocols whose messages are text.
    pub async fn open<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(io: S, base64: bool) -> Self {
        let socket = WebSocketStream::from_raw_socket(io, Role::Server, Some(config())).await;
        let (sink, stream) = socket.split();
        let (out, messages) = mpsc::channel(QUEUE);
        let (sender, incoming) = mpsc::channel(QUEUE);
        let writing = tokio::spawn(write(sink, messages));
        let reading = tokio::spawn(read(stream, sender, out.downgrade(), base64));
        Self { incoming, writer: Writer { out, base64 }, tasks: (writing, AbortOnDropHandle::new(reading)) }
    }

    /// Says goodbye after everything that was written, and waits until it is on its way.
    pub async fn close(self) {
        let Self { incoming, writer, tasks: (writing, reading) } = self;
        let _ = writer.send(goodbye()).await;
        drop((incoming, writer));
        let _ = tokio::time::timeout(std::time::Duration::from_secs(5), writing).await;
        // The peer answers with its own goodbye; then the connection may go.
        let _ = tokio::time::timeout(std::time::Duration::from_secs(1), reading).await;
    }
}

async fn write<S: AsyncRead + AsyncWrite + Unpin>(mut sink: SplitSink<WebSocketStream<S>, Message>, mut messages: mpsc::Receiver<Message>) {
    while let Some(message) = messages.recv().await {
        let last = matches!(message, Message::Close(_));
        if sink.send(message).await.is_err() || last {
            return;
        }
    }
}

async fn read<S: AsyncRead + AsyncWrite + Unpin>(mut stream: SplitStream<WebSocketStream<S>>, sender: mpsc::Sender<Incoming>, out: mpsc::WeakSender<Message>, base64: bool) {
    while let Some(Ok(message)) = stream.next().await {
        match &message {
            Message::Close(_) => return,
            Message::Ping(data) => {
                // The other half does the writing: a pong goes through it, or waits for nobody.
                if let Some(out) = out.upgrade() {
                    let _ = out.send(Message::Pong(data.clone())).await;
                }
            }
            other => {
                if let Some(incoming) = parse(other, base64)
                    && sender.send(incoming).await.is_err()
                {
                    return;
                }
            }
        }
    }
}

/// The bytes of a tunnel: each binary message is a piece of them.
pub async fn tunnel<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(io: S) -> DuplexStream {
    let socket = WebSocketStream::from_raw_socket(io, Role::Server, Some(config())).await;
    let (inner, outer) = tokio::io::duplex(TUNNEL_BUFFER);
    let (mut sink, mut stream) = socket.split();
    let (mut from_inner, mut to_inner) = tokio::io::split(inner);
    let (pongs, mut replies) = mpsc::channel::<Message>(16);
    tokio::spawn(async move {
        while let Some(Ok(message)) = stream.next().await {
            match message {
                Message::Binary(data) => {
                    if to_inner.write_all(&data).await.is_err() {
                        break;
                    }
                }
                Message::Ping(data) => {
                    let _ = pongs.try_send(Message::Pong(data));
                }
                Message::Close(_) => break,
                _ => {}
            }
        }
        let _ = to_inner.shutdown().await;
    });
    tokio::spawn(async move {
        let mut buffer = vec![0; 32 * 1024];
        loop {
            let message = tokio::select! {
                read = from_inner.read(&mut buffer) => match read {
                    Ok(n) if n > 0 => Message::binary(buffer[..n].to_vec()),
                    _ => break,
                },
                Some(pong) = replies.recv() => pong,
            };
            if sink.send(message).await.is_err() {
                return;
            }
        }
        let _ = sink.send(goodbye()).await;
        let _ = sink.close().await;
    });
    outer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages() {
        let check = |message: Message, base64: bool, expected: Option<Incoming>| assert_eq!(parse(&message, base64), expected);
        let data = |c, d: &'static str| Some(Incoming::Data(c, Bytes::from_static(d.as_bytes())));
        check(Message::binary(b"\0ls\n".to_vec()), false, data(0, "ls\n"));
        check(Message::binary(vec![4]), false, data(4, ""));
        check(Message::binary(vec![CLOSE, 0]), false, Some(Incoming::Close(0)));
        check(Message::binary(vec![CLOSE]), false, None);
        check(Message::binary(Vec::new()), false, None);
        check(Message::text("0bHM="), true, data(0, "ls"));
        check(Message::text("0!"), true, None);
        check(Message::Ping(Bytes::new()), false, None);
    }

    #[tokio::test]
    async fn a_tunnel_carries_bytes() {
        let (client, server) = tokio::io::duplex(64 * 1024);
        let mut tunnel = tunnel(server).await;
        let mut socket = WebSocketStream::from_raw_socket(client, Role::Client, None).await;
        socket.send(Message::binary(b"abc".to_vec())).await.expect("send");
        socket.send(Message::binary(b"def".to_vec())).await.expect("send");
        let mut got = [0; 6];
        tunnel.read_exact(&mut got).await.expect("read");
        assert_eq!(&got, b"abcdef");
        tunnel.write_all(b"xyz").await.expect("write");
        assert_eq!(socket.next().await.expect("message").expect("ok"), Message::binary(b"xyz".to_vec()));
    }
}
