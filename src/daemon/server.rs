//! The accept loop: TLS or plain TCP, HTTP/1.1 and HTTP/2, upgrades, limits, and a drain with a deadline.
//!
//! Every request carries extensions: [`PeerAddr`] always, [`PeerCertificates`] when a client certificate was offered and
//! the bundle vouches for it, [`PeerRejected`] when it was offered and does not. hyper's `OnUpgrade` is an extension too.
//! Numbers follow upstream's `k8s.io/apiserver/pkg/server/secure_serving.go`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Buf;
use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rustls_pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::{Service, ServiceExt};

use crate::metrics;
pub use crate::tls::{Tls, TlsError};

/// The verified chain of the client, leaf first. It held when the connection began; a connection may outlive it, so
/// authentication compares `notAfter` with the clock at each request.
#[derive(Clone, Debug)]
pub struct PeerCertificates(pub Arc<[CertificateDer<'static>]>);

/// Why the certificate that the client offered does not count.
#[derive(Clone, Debug)]
pub struct PeerRejected(pub Arc<str>);

/// Where the connection comes from.
#[derive(Clone, Copy, Debug)]
pub struct PeerAddr(pub SocketAddr);

/// The bounds of one listener.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Connections at once; beyond it clients wait in the kernel's backlog.
    pub connections: usize,
    /// For the whole TLS handshake.
    pub handshake: Duration,
    /// For the head of a request, and so also how long an idle HTTP/1.1 connection is kept: upstream's idle timeout.
    pub header_read: Duration,
    /// Requests at once on an HTTP/2 connection.
    pub streams: u32,
    /// Bytes of headers of one request.
    pub header_bytes: u32,
    /// Between HTTP/2 pings on a silent connection, and, doubled, until a dead peer's connection is closed.
    pub ping: Duration,
    /// How long requests may go on after the shutdown began.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 20_000,
            handshake: Duration::from_secs(10),
            header_read: Duration::from_secs(90),
            streams: 100,
            header_bytes: 64 << 10,
            ping: Duration::from_secs(30),
            drain: Duration::from_secs(30),
        }
    }
}

/// Bytes that may be under way on one HTTP/2 stream: upstream's 99th percentile of a resource.
const STREAM_WINDOW: u32 = 256 << 10;
/// Streams reset by the peer that wait to be accepted, before the connection is closed (CVE-2023-44487).
const PENDING_RESETS: usize = 20;
/// Streams that we reset for the peer's errors, before the connection is closed.
const LOCAL_RESETS: usize = 256;

/// Why serving ended before its shutdown.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("cannot tell the listener's own address: {0}")]
    Listener(std::io::Error),
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Serves a warp filter until `shutdown`, then drains.
pub async fn serve<F, R>(
    listener: TcpListener,
    tls: Option<Tls>,
    routes: F,
    limits: Limits,
    shutdown: CancellationToken,
) -> Result<(), ServerError>
where
    F: warp::Filter<Extract = (R,)> + Clone + Send + Sync + 'static,
    F::Error: Into<warp::Rejection>,
    R: warp::Reply + 'static,
{
    use warp::Filter;
    let routes = routes.map(|reply: R| reply.into_response()).boxed();
    serve_service(listener, tls, warp::service(routes), limits, shutdown).await
}

/// Serves any tower service until `shutdown`; then accepts no more, lets requests finish for `limits.drain`, and closes
/// what is left. A connection's error ends that connection only.
pub async fn serve_service<S, B>(
    listener: TcpListener,
    tls: Option<Tls>,
    service: S,
    limits: Limits,
    shutdown: CancellationToken,
) -> Result<(), ServerError>
where
    S: Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
    B: Body + Send + 'static,
    B::Data: Buf + Send,
    B::Error: Into<BoxError>,
{
    let address = listener.local_addr().map_err(ServerError::Listener)?;
    tracing::info!(%address, tls = tls.is_some(), "serving");
    let slots = Arc::new(Semaphore::new(limits.connections));
    let tasks = TaskTracker::new();
    let shared = Arc::new(Shared { tls, limits, shutdown: shutdown.clone(), kill: CancellationToken::new() });
    let open = metrics::gauge_vec(
        "windlass_server_connections",
        "Connections that are open now, by the port they came in on.",
        &["port"],
    )
    .with_label_values(&[&address.port().to_string()]);
    loop {
        let slot = tokio::select! {
            biased;
            () = shutdown.cancelled() => break,
            slot = Arc::clone(&slots).acquire_owned() => slot,
        };
        // The semaphore lives as long as this function and is never closed.
        let Ok(slot) = slot else { break };
        let (stream, peer) = tokio::select! {
            biased;
            () = shutdown.cancelled() => break,
            accepted = accept(&listener) => accepted,
        };
        let (shared, service, open) = (Arc::clone(&shared), service.clone(), open.clone());
        open.inc();
        tasks.spawn(async move {
            connection(stream, peer, service, &shared).await;
            open.dec();
            drop(slot);
        });
    }
    drop(listener);
    tasks.close();
    if timeout(shared.limits.drain, tasks.wait()).await.is_err() {
        tracing::warn!(%address, left = tasks.len(), "drain deadline passed: closing connections");
        shared.kill.cancel();
        tasks.wait().await;
    }
    Ok(())
}

struct Shared {
    tls: Option<Tls>,
    limits: Limits,
    shutdown: CancellationToken,
    kill: CancellationToken,
}

/// Accepts one connection. Errors are the peer's (aborted) or the machine's (no descriptors): neither ends the server.
async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    let mut pause = Duration::from_millis(5);
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_secs(1));
            }
        }
    }
}

/// What the TCP and TLS layers found out about the client.
#[derive(Clone)]
struct Peer {
    address: SocketAddr,
    certificates: Option<Result<PeerCertificates, PeerRejected>>,
}

async fn connection<S, B>(stream: TcpStream, address: SocketAddr, service: S, shared: &Shared)
where
    S: Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
    B: Body + Send + 'static,
    B::Data: Buf + Send,
    B::Error: Into<BoxError>,
{
    tune(&stream);
    let limits = &shared.limits;
    match &shared.tls {
        None => {
            let h2 = match timeout(limits.handshake, speaks_http2(&stream)).await {
                Ok(Ok(h2)) => h2,
                Ok(Err(error)) => return tracing::debug!(%address, %error, "no request came"),
                Err(_) => return tracing::debug!(%address, "no request came in time"),
            };
            exchange(stream, h2, Peer { address, certificates: None }, service, shared).await;
        }
        Some(tls) => {
            let handshake = TlsAcceptor::from(Arc::clone(tls.config())).accept(stream);
            let stream = match timeout(limits.handshake, handshake).await {
                Ok(Ok(stream)) => stream,
                failed => {
                    handshake_errors().inc();
                    let reason = failed.map_or("timed out".into(), |r| r.err().map(|e| e.to_string()).unwrap_or_default());
                    return tracing::debug!(%address, reason, "TLS handshake failed");
                }
            };
            let (_, session) = stream.get_ref();
            let h2 = session.alpn_protocol() == Some(b"h2");
            let certificates = session.peer_certificates().filter(|chain| !chain.is_empty()).map(|chain| {
                match tls.verify_peer(chain) {
                    Ok(()) => Ok(PeerCertificates(chain.iter().map(|c| c.clone().into_owned()).collect())),
                    Err(reason) => Err(PeerRejected(reason.into())),
                }
            });
            exchange(stream, h2, Peer { address, certificates }, service, shared).await;
        }
    }
}

fn handshake_errors() -> prometheus::IntCounter {
    metrics::counter(
        "apiserver_tls_handshake_errors_total",
        "Number of requests dropped with 'TLS handshake error from' error",
    )
}

/// No Nagle, and keep-alive so that a vanished peer's connection ends: after 15 s, then every 15 s, as Go's default.
fn tune(stream: &TcpStream) {
    use nix::sys::socket::{setsockopt, sockopt};
    let done = stream.set_nodelay(true).map_err(|e| e.to_string()).and_then(|()| {
        setsockopt(stream, sockopt::KeepAlive, &true)
            .and_then(|()| setsockopt(stream, sockopt::TcpKeepIdle, &15))
            .and_then(|()| setsockopt(stream, sockopt::TcpKeepInterval, &15))
            .map_err(|e| e.to_string())
    });
    if let Err(error) = done {
        tracing::debug!(error, "cannot set socket options");
    }
}

/// Whether a plain connection begins with HTTP/2's preface. hyper's own detection has no timeout, so we look first.
async fn speaks_http2(stream: &TcpStream) -> std::io::Result<bool> {
    let mut first = [0_u8; 4];
    let seen = stream.peek(&mut first).await?;
    if seen == 0 {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    Ok(first[..seen] == *b"PRI ")
}

async fn exchange<IO, S, B>(io: IO, h2: bool, peer: Peer, service: S, shared: &Shared)
where
    IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    S: Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
    B: Body + Send + 'static,
    B::Data: Buf + Send,
    B::Error: Into<BoxError>,
{
    let address = peer.address;
    let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        let extensions = request.extensions_mut();
        extensions.insert(PeerAddr(peer.address));
        match &peer.certificates {
            Some(Ok(certificates)) => drop(extensions.insert(certificates.clone())),
            Some(Err(rejected)) => drop(extensions.insert(rejected.clone())),
            None => {}
        }
        service.clone().oneshot(request)
    });
    let builder = builder(h2, &shared.limits);
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(io), service);
    tokio::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = shared.shutdown.cancelled() => {
            connection.as_mut().graceful_shutdown();
            tokio::select! {
                ended = connection.as_mut() => ended,
                () = shared.kill.cancelled() => return,
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%address, error, "connection ended with an error");
    }
}

fn builder(h2: bool, limits: &Limits) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_read)
        .max_buf_size(usize::try_from(limits.header_bytes).unwrap_or(64 << 10).max(8 << 10))
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits.streams)
        .max_pending_accept_reset_streams(PENDING_RESETS)
        .max_local_error_reset_streams(LOCAL_RESETS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(STREAM_WINDOW.saturating_mul(limits.streams).min(i32::MAX.unsigned_abs()))
        .max_frame_size(STREAM_WINDOW)
        .max_header_list_size(limits.header_bytes)
        .max_send_buf_size(256 << 10)
        .keep_alive_interval(limits.ping)
        .keep_alive_timeout(limits.ping);
    if h2 { builder.http2_only() } else { builder.http1_only() }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
