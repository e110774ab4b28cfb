//! Remote commands: what exec and attach send over SPDY or WebSocket.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

use super::{Upgrade, spdy, websocket};
use crate::runtime::{OutputKind, Runtime, Session, SessionId};

/// SPDY subprotocols, the best first.
pub const SPDY_PROTOCOLS: [&str; 5] = ["v5.channel.k8s.io", "v4.channel.k8s.io", "v3.channel.k8s.io", "v2.channel.k8s.io", "channel.k8s.io"];
pub const WEB_PROTOCOLS: [&str; 6] = ["v5.channel.k8s.io", "v4.channel.k8s.io", "v4.base64.channel.k8s.io", "channel.k8s.io", "base64.channel.k8s.io", "v3.channel.k8s.io"];

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;

/// How long a client may take to open its streams.
const STREAMS_TIMEOUT: Duration = Duration::from_secs(30);
const QUEUE: usize = 16;

/// Which streams the client wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
    pub tty: bool,
}

/// What is asked of a session beside its bytes.
#[async_trait]
pub trait Control: Send + Sync {
    async fn resize(&self, session: &SessionId, width: u16, height: u16) -> Result<(), String>;
    /// The exit code of a session whose output has ended.
    async fn exit_code(&self, session: &SessionId) -> Result<i32, String>;
}

#[async_trait]
impl Control for Arc<dyn Runtime> {
    async fn resize(&self, session: &SessionId, width: u16, height: u16) -> Result<(), String> {
        Runtime::resize(&**self, session, width, height).await.map_err(|e| e.to_string())
    }
    async fn exit_code(&self, session: &SessionId) -> Result<i32, String> {
        Runtime::exit_code(&**self, session).await.map_err(|e| e.to_string())
    }
}

/// The client's side of a session, whatever the protocol.
struct Client {
    stdin: mpsc::Receiver<Bytes>,
    resize: mpsc::Receiver<(u16, u16)>,
    output: Sink,
    /// The error channel carries a Status object (v4 and later), else plain text.
    status: bool,
}

enum Sink {
    Spdy { streams: HashMap<u8, spdy::Writer>, connection: spdy::Connection },
    Web { channels: websocket::Channels },
}

impl Sink {
    async fn write(&self, channel: u8, data: Bytes) -> io::Result<()> {
        match self {
            Self::Spdy { streams, .. } => match streams.get(&channel) {
                Some(writer) => writer.write(data).await,
                None => Ok(()),
            },
            Self::Web { channels } => channels.writer.write(channel, &data).await,
        }
    }

    async fn close(self) {
        match self {
            Self::Spdy { streams, connection } => {
                for writer in streams.values() {
                    let _ = writer.finish().await;
                }
                drop(streams);
                connection.close().await;
            }
            Self::Web { channels } => channels.close().await,
        }
    }
}

/// A resize message: `{"Width":80,"Height":24}`.
fn size(data: &[u8]) -> Option<(u16, u16)> {
    let value: Value = serde_json::from_slice(data).ok()?;
    let number = |key: &str| value[key].as_u64().and_then(|n| u16::try_from(n).ok());
    Some((number("Width")?, number("Height")?))
}

async fn open<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(io: S, upgrade: &Upgrade, wanted: Wanted) -> Result<Client, String> {
    match upgrade {
        Upgrade::Spdy(protocol) => open_spdy(io, protocol, wanted).await,
        Upgrade::WebSocket(protocol) => Ok(open_web(io, protocol, wanted).await),
    }
}

async fn open_spdy<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(io: S, protocol: &str, wanted: Wanted) -> Result<Client, String> {
    let mut connection = spdy::serve(io);
    let status = matches!(protocol, "v4.channel.k8s.io" | "v5.channel.k8s.io");
    let resizes = status || protocol == "v3.channel.k8s.io";
    let stderr = wanted.stderr && !wanted.tty;
    let expected = 1 + usize::from(wanted.stdin) + usize::from(wanted.stdout) + usize::from(stderr) + usize::from(wanted.tty && resizes);
    let mut streams = HashMap::new();
    let (mut stdin, mut resize) = (None, None);
    let collect = async {
        for _ in 0..expected {
            let stream = connection.streams.recv().await.ok_or("the client closed the connection before it opened its streams")?;
            let channel = match stream.header("streamtype") {
                "error" => ERROR,
                "stdin" => STDIN,
                "stdout" => STDOUT,
                "stderr" => STDERR,
                "resize" => RESIZE,
                other => return Err(format!("unexpected stream type: \"{other}\"")),
            };
            match channel {
                STDIN => stdin = Some(stream.data),
                RESIZE => resize = Some(stream.data),
                _ => {}
            }
            streams.insert(channel, stream.writer);
        }
        Ok(())
    };
    tokio::time::timeout(STREAMS_TIMEOUT, collect).await.map_err(|_| "timed out waiting for client to create streams".to_owned())??;
    let (sizes, resized) = mpsc::channel(QUEUE);
    if let Some(mut data) = resize {
        tokio::spawn(async move {
            // Each message is a JSON object of its own, and small: one chunk.
            while let Some(chunk) = data.recv().await {
                for line in chunk.split(|b| *b == b'\n').filter(|l| !l.is_empty()) {
                    if let Some(size) = size(line)
                        && sizes.send(size).await.is_err()
                    {
                        return;
                    }
                }
            }
        });
    }
    let stdin = stdin.unwrap_or_else(|| mpsc::channel(1).1);
    Ok(Client { stdin, resize: resized, output: Sink::Spdy { streams, connection }, status })
}

async fn open_web<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(io: S, protocol: &str, wanted: Wanted) -> Client {
    let mut channels = websocket::Channels::open(io, protocol.contains("base64")).await;
    let (input, stdin) = mpsc::channel(QUEUE);
    let (sizes, resize) = mpsc::channel(QUEUE);
    let (_, nothing) = mpsc::channel(1);
    let mut incoming = std::mem::replace(&mut channels.incoming, nothing);
    tokio::spawn(async move {
        let mut input = Some(input);
        while let Some(message) = incoming.recv().await {
            match message {
                websocket::Incoming::Data(STDIN, data) if !data.is_empty() => {
                    if let Some(sender) = &input
                        && sender.send(data).await.is_err()
                    {
                        input = None;
                    }
                }
                websocket::Incoming::Data(RESIZE, data) => {
                    if let Some(size) = size(&data) {
                        let _ = sizes.try_send(size);
                    }
                }
                websocket::Incoming::Close(STDIN) => input = None,
                _ => {}
            }
        }
    });
    // Tells the client that the channels are open.
    let first = if wanted.stdout { STDOUT } else if wanted.stderr { STDERR } else { ERROR };
    let _ = channels.writer.write(first, &[]).await;
    let status = protocol.starts_with("v4.") || protocol.starts_with("v5.");
    Client { stdin, resize, output: Sink::Web { channels }, status }
}

/// The Status that a session ends with.
pub fn outcome(result: &Result<i32, String>) -> Value {
    match result {
        Ok(0) => json!({"metadata": {}, "status": "Success"}),
        Ok(code) => json!({
            "metadata": {},
            "status": "Failure",
            "message": format!("command terminated with non-zero exit code: exit status {code}"),
            "reason": "NonZeroExitCode",
            "details": {"causes": [{"reason": "ExitCode", "message": code.to_string()}]},
        }),
        Err(message) => json!({"metadata": {}, "status": "Failure", "message": message, "reason": "InternalError", "details": {"causes": [{"message": message}]}, "code": 500}),
    }
}

/// Joins a client over `io` with a session of the runtime, until the session's output ends or the client is gone.
pub async fn run<S, F>(io: S, upgrade: Upgrade, wanted: Wanted, control: &dyn Control, start: F)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Future<Output = Result<Session, String>>,
{
    let client = match open(io, &upgrade, wanted).await {
        Ok(client) => client,
        Err(error) => {
            tracing::debug!(error, "remote command not started");
            return;
        }
    };
    let Client { stdin, resize, output, status } = client;
    let result = match start.await {
        Ok(session) => pump(session, stdin, resize, &output, wanted, control).await,
        Err(e) => Some(Err(e)),
    };
    if let Some(result) = result {
        let text = match (&result, status) {
            (_, true) => outcome(&result).to_string(),
            (Ok(0), false) => String::new(),
            (Ok(code), false) => format!("command terminated with non-zero exit code: exit status {code}"),
            (Err(e), false) => e.clone(),
        };
        if !text.is_empty() {
            let _ = output.write(ERROR, Bytes::from(text)).await;
        }
    }
    output.close().await;
}

/// Returns the exit code, or `None` when the client went away.
async fn pump(
    session: Session,
    mut stdin: mpsc::Receiver<Bytes>,
    mut resize: mpsc::Receiver<(u16, u16)>,
    output: &Sink,
    wanted: Wanted,
    control: &dyn Control,
) -> Option<Result<i32, String>> {
    let Session { output: mut out, stdin: process, id } = session;
    let feed = async {
        if let Some(mut process) = process {
            while let Some(data) = stdin.recv().await {
                if process.write_all(&data).await.is_err() || process.flush().await.is_err() {
                    break;
                }
            }
            let _ = process.shutdown().await;
        }
        std::future::pending::<()>().await;
    };
    let resizing = async {
        while let Some((width, height)) = resize.recv().await {
            if wanted.tty
                && let Err(error) = control.resize(&id, width, height).await
            {
                tracing::debug!(error, "terminal not resized");
            }
        }
        std::future::pending::<()>().await;
    };
    let copy = async {
        while let Some(item) = out.next().await {
            let (kind, data) = match item {
                Ok(item) => item,
                Err(e) => return Some(Err(e.to_string())),
            };
            let channel = if kind == OutputKind::Stderr && !wanted.tty { STDERR } else { STDOUT };
            let asked = if channel == STDERR { wanted.stderr } else { wanted.stdout };
            if asked && output.write(channel, data).await.is_err() {
                return None;
            }
        }
        Some(control.exit_code(&id).await)
    };
    tokio::select! {
        result = copy => result,
        () = feed => None,
        () = resizing => None,
    }
}

#[cfg(test)]
#[path = "exec_tests.rs"]
mod tests;
