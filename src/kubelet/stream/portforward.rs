//! Port-forward: connections of the client's machine, carried to ports of a pod.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::{Upgrade, spdy, websocket};

pub const SPDY_PROTOCOLS: [&str; 1] = ["portforward.k8s.io"];
pub const TUNNEL: &str = "SPDY/3.1+portforward.k8s.io";
pub const WEB_PROTOCOLS: [&str; 4] = [TUNNEL, "v4.channel.k8s.io", "v4.base64.channel.k8s.io", "portforward.k8s.io"];

/// How long the second stream of a pair may take.
const PAIR_TIMEOUT: Duration = Duration::from_secs(30);
const CHUNK: usize = 32 * 1024;
/// Connections at once over one port-forward.
const MAX_CONNECTIONS: usize = 512;

/// Where the pod's ports are dialled from: its network namespace, or the node's for pods on the host network.
#[derive(Clone, Debug)]
pub struct Target {
    pub netns: Option<PathBuf>,
    pub pod: String,
}

impl Target {
    async fn dial(&self, port: u16) -> io::Result<TcpStream> {
        let mut last = None;
        // As `localhost` inside the pod: IPv4 first, then IPv6.
        for ip in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
            let address = SocketAddr::new(ip, port);
            let dialled = match &self.netns {
                Some(netns) => windlass_net::netns::dial(netns, address).await.map_err(io::Error::other),
                None => TcpStream::connect(address).await,
            };
            match dialled {
                Ok(stream) => return Ok(stream),
                Err(e) => last = last.or(Some(e)),
            }
        }
        Err(last.unwrap_or_else(|| io::ErrorKind::NotConnected.into()))
    }

    fn failure(&self, port: u16, error: &io::Error) -> String {
        format!("error forwarding port {port} to pod {}: {error}", self.pod)
    }
}

/// Serves an upgraded connection until the client closes it. `ports` are those of a WebSocket request's query.
pub async fn run<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(io: S, upgrade: Upgrade, target: Target, ports: Vec<u16>) {
    match upgrade {
        Upgrade::Spdy(_) => run_spdy(spdy::serve(io), target).await,
        Upgrade::WebSocket(protocol) if protocol == TUNNEL => run_spdy(spdy::serve(websocket::tunnel(io).await), target).await,
        Upgrade::WebSocket(protocol) => run_web(websocket::Channels::open(io, protocol.contains("base64")).await, target, ports).await,
    }
}

#[derive(Default)]
struct Pair {
    error: Option<spdy::Stream>,
    data: Option<spdy::Stream>,
    since: Option<Instant>,
}

/// Puts the error and the data stream of each connection together and serves them.
async fn run_spdy(mut connection: spdy::Connection, target: Target) {
    let mut pairs: HashMap<String, Pair> = HashMap::new();
    let mut tasks = tokio::task::JoinSet::new();
    while let Some(stream) = connection.streams.recv().await {
        while tasks.try_join_next().is_some() {}
        pairs.retain(|_, p| p.since.is_none_or(|s| s.elapsed() < PAIR_TIMEOUT));
        if tasks.len() >= MAX_CONNECTIONS {
            let _ = stream.writer.reset().await;
            continue;
        }
        let id = match stream.header("requestid") {
            "" => stream.header("port").to_owned(),
            id => id.to_owned(),
        };
        let pair = pairs.entry(id.clone()).or_default();
        pair.since.get_or_insert_with(Instant::now);
        match stream.header("streamtype") {
            "error" => pair.error = Some(stream),
            "data" => pair.data = Some(stream),
            _ => {
                let _ = stream.writer.reset().await;
                continue;
            }
        }
        if pair.error.is_some()
            && pair.data.is_some()
            && let Some(Pair { error: Some(error), data: Some(data), .. }) = pairs.remove(&id)
        {
            tasks.spawn(serve_pair(error, data, target.clone()));
        }
    }
}

async fn serve_pair(error: spdy::Stream, data: spdy::Stream, target: Target) {
    let port = data.header("port").parse::<u16>().ok().filter(|p| *p > 0);
    let result = match port {
        None => Err(format!("\"{}\" is not a port", data.header("port"))),
        Some(port) => match target.dial(port).await {
            Ok(stream) => carry(stream, data.data, &data.writer).await.map_err(|e| target.failure(port, &e)),
            Err(e) => Err(target.failure(port, &e)),
        },
    };
    if let Err(message) = result {
        let _ = error.writer.write(Bytes::from(message)).await;
    }
    let _ = error.writer.finish().await;
    let _ = data.writer.finish().await;
}

/// Copies both ways until the pod's side has ended.
async fn carry(stream: TcpStream, mut from_client: mpsc::Receiver<Bytes>, to_client: &spdy::Writer) -> io::Result<()> {
    let (mut read, mut write) = stream.into_split();
    let upstream = async {
        while let Some(data) = from_client.recv().await {
            write.write_all(&data).await?;
        }
        write.shutdown().await
    };
    let downstream = async {
        let mut buffer = vec![0; CHUNK];
        loop {
            let n = read.read(&mut buffer).await?;
            if n == 0 {
                return Ok(());
            }
            to_client.write(Bytes::copy_from_slice(&buffer[..n])).await?;
        }
    };
    tokio::pin!(upstream, downstream);
    // A client that has sent everything may still be reading.
    tokio::select! {
        result = &mut downstream => result,
        result = &mut upstream => { result?; downstream.await }
    }
}

/// WebSocket channels: two per port, data and error; each begins with the port's number.
async fn run_web(mut channels: websocket::Channels, target: Target, ports: Vec<u16>) {
    let writer = channels.writer.clone();
    let mut inputs: HashMap<u8, mpsc::Sender<Bytes>> = HashMap::new();
    let mut tasks = tokio::task::JoinSet::new();
    for (index, port) in ports.into_iter().enumerate().take(100) {
        let (data, error) = ((index * 2) as u8, (index * 2 + 1) as u8);
        for channel in [data, error] {
            if writer.write(channel, &port.to_le_bytes()).await.is_err() {
                return;
            }
        }
        let (sender, receiver) = mpsc::channel(64);
        inputs.insert(data, sender);
        tasks.spawn(serve_channel(target.clone(), port, receiver, writer.clone(), data, error));
    }
    loop {
        tokio::select! {
            message = channels.incoming.recv() => match message {
                Some(websocket::Incoming::Data(channel, data)) => {
                    if let Some(sender) = inputs.get(&channel) {
                        let _ = sender.send(data).await;
                    }
                }
                Some(websocket::Incoming::Close(channel)) => {
                    inputs.remove(&channel);
                }
                None => break,
            },
            done = tasks.join_next() => if done.is_none() { break },
        }
    }
    drop(writer);
    tasks.shutdown().await;
    channels.close().await;
}

async fn serve_channel(target: Target, port: u16, mut input: mpsc::Receiver<Bytes>, writer: websocket::Writer, data: u8, error: u8) {
    // Nothing is dialled before the client has something to say.
    let Some(first) = input.recv().await else { return };
    let work = async {
        let stream = target.dial(port).await?;
        let (mut read, mut write) = stream.into_split();
        write.write_all(&first).await?;
        let upstream = async {
            while let Some(bytes) = input.recv().await {
                write.write_all(&bytes).await?;
            }
            std::future::pending::<io::Result<()>>().await
        };
        let downstream = async {
            let mut buffer = vec![0; CHUNK];
            loop {
                let n = read.read(&mut buffer).await?;
                if n == 0 {
                    return Ok(());
                }
                writer.write(data, &buffer[..n]).await?;
            }
        };
        tokio::select! { r = upstream => r, r = downstream => r }
    };
    let result: io::Result<()> = work.await;
    if let Err(e) = result {
        let _ = writer.write(error, target.failure(port, &e).as_bytes()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::spdy::{Codec, Frame};
    use bytes::BytesMut;

    /// Sends `frames` as a client, reads until the connection has answered with `wanted` data, and returns what each
    /// stream got.
    async fn talk(frames: Vec<Frame>, target: Target, until: impl Fn(&HashMap<u32, Vec<u8>>) -> bool) -> HashMap<u32, Vec<u8>> {
        let (client, server) = tokio::io::duplex(64 * 1024);
        let serving = tokio::spawn(run(server, Upgrade::Spdy("portforward.k8s.io".into()), target, Vec::new()));
        let (mut read, mut write) = tokio::io::split(client);
        let mut codec = Codec::default();
        let mut wire = BytesMut::new();
        for frame in &frames {
            codec.encode(frame, &mut wire).expect("encode");
        }
        write.write_all(&wire).await.expect("write");
        let mut got: HashMap<u32, Vec<u8>> = HashMap::new();
        let mut buffer = BytesMut::new();
        while !until(&got) && read.read_buf(&mut buffer).await.expect("read") > 0 {
            while let Some(frame) = codec.decode(&mut buffer).expect("decode") {
                if let Frame::Data { stream, data, .. } = frame {
                    got.entry(stream).or_default().extend_from_slice(&data);
                }
            }
        }
        drop((read, write));
        serving.await.expect("ends with the connection");
        got
    }

    fn open(stream: u32, kind: &str, port: u16) -> Frame {
        let headers = [("streamtype", kind.to_owned()), ("port", port.to_string()), ("requestid", "1".to_owned())];
        Frame::Open { stream, fin: false, headers: headers.into_iter().map(|(n, v)| (n.to_owned(), v)).collect() }
    }

    #[tokio::test]
    async fn a_connection_is_carried() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let port = listener.local_addr().expect("bound").port();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("accept");
            let mut buffer = [0; 4];
            stream.read_exact(&mut buffer).await.expect("read");
            stream.write_all(b"pong").await.expect("write");
        });
        let target = Target { netns: None, pod: "p".into() };
        let frames = vec![open(1, "error", port), open(3, "data", port), Frame::Data { stream: 3, fin: false, data: Bytes::from_static(b"ping") }];
        let got = talk(frames, target, |got| got.get(&3).is_some_and(|d| d == b"pong")).await;
        assert_eq!(got.get(&3).map(Vec::as_slice), Some(&b"pong"[..]));
    }

    #[tokio::test]
    async fn a_refused_port_is_told() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("port").port();
        let target = Target { netns: None, pod: "p".into() };
        let frames = vec![open(1, "error", free), open(3, "data", free)];
        let got = talk(frames, target, |got| got.get(&1).is_some_and(|d| !d.is_empty())).await;
        let text = String::from_utf8_lossy(got.get(&1).map(Vec::as_slice).unwrap_or_default()).into_owned();
        assert!(text.starts_with(&format!("error forwarding port {free} to pod p")), "{text}");
    }
}
