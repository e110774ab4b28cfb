use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Full};
use hyper::client::conn;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::{PrivateKeyDer, ServerName};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::*;

struct Ca {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    der: CertificateDer<'static>,
}

struct Leaf {
    pem: String,
    key_pem: String,
    der: CertificateDer<'static>,
    key: Vec<u8>,
}

fn ca(name: &str) -> Ca {
    let mut params = CertificateParams::new(Vec::new()).expect("params");
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().expect("key");
    let cert = params.self_signed(&key).expect("self-signed");
    Ca { pem: cert.pem(), der: cert.der().clone(), issuer: Issuer::new(params, key) }
}

impl Ca {
    fn leaf(&self, name: &str) -> Leaf {
        let key = KeyPair::generate().expect("key");
        let cert = CertificateParams::new(vec![name.to_owned()]).expect("params").signed_by(&key, &self.issuer).expect("signed");
        Leaf { pem: cert.pem(), key_pem: key.serialize_pem(), der: cert.der().clone(), key: key.serialize_der() }
    }
}

fn client(trusted: &Ca, identity: Option<&Leaf>, alpn: &[u8]) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.der.clone()).expect("root");
    let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots);
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some(leaf) => builder
            .with_client_auth_cert(vec![leaf.der.clone()], PrivateKeyDer::Pkcs8(leaf.key.clone().into()))
            .expect("client certificate"),
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    config
}

async fn connect(address: SocketAddr, config: ClientConfig) -> std::io::Result<TlsStream<TcpStream>> {
    let name = ServerName::try_from("localhost").expect("name");
    TlsConnector::from(Arc::new(config)).connect(name, TcpStream::connect(address).await?).await
}

/// Says how the request came in.
async fn describe(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let who = match (request.extensions().get::<PeerCertificates>(), request.extensions().get::<PeerRejected>()) {
        (Some(chain), None) => format!("certificates={}", chain.0.len()),
        (None, Some(reason)) => format!("rejected={}", reason.0),
        _ => "nobody".to_owned(),
    };
    let peer = request.extensions().get::<PeerAddr>().is_some();
    Ok(Response::new(Full::from(format!("{:?} {who} {peer}", request.version()))))
}

struct Running {
    address: SocketAddr,
    shutdown: CancellationToken,
    done: tokio::task::JoinHandle<Result<(), ServerError>>,
}

async fn start<S, B>(tls: Option<Tls>, service: S, limits: Limits) -> Running
where
    S: Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
    B: Body + Send + 'static,
    B::Data: Buf + Send,
    B::Error: Into<BoxError>,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("address");
    let shutdown = CancellationToken::new();
    let done = tokio::spawn(serve_service(listener, tls, service, limits, shutdown.clone()));
    Running { address, shutdown, done }
}

async fn get(address: SocketAddr, config: ClientConfig) -> String {
    let h2 = config.alpn_protocols == [b"h2".to_vec()];
    let stream = TokioIo::new(connect(address, config).await.expect("connect"));
    let request = Request::builder().uri("https://localhost/").header("host", "localhost").body(Empty::<Bytes>::new());
    let request = request.expect("request");
    let reply = if h2 {
        let (mut send, connection) = conn::http2::handshake(TokioExecutor::new(), stream).await.expect("h2");
        tokio::spawn(connection);
        send.send_request(request).await
    } else {
        let (mut send, connection) = conn::http1::handshake(stream).await.expect("h1");
        tokio::spawn(connection);
        send.send_request(request).await
    };
    let body = reply.expect("reply").into_body().collect().await.expect("body").to_bytes();
    String::from_utf8(body.to_vec()).expect("text")
}

#[tokio::test]
async fn peers_and_swaps() {
    let (server_ca, known, unknown) = (ca("server"), ca("known"), ca("unknown"));
    let leaf = server_ca.leaf("localhost");
    let tls = Tls::from_pem(leaf.pem.as_bytes(), leaf.key_pem.as_bytes()).expect("tls");
    let service = tower::service_fn(describe);
    let server = start(Some(tls.clone()), service, Limits::default()).await;
    let (alice, mallory) = (known.leaf("alice"), unknown.leaf("mallory"));

    // No bundle yet: no certificate is asked for.
    assert_eq!(get(server.address, client(&server_ca, Some(&alice), b"http/1.1")).await, "HTTP/1.1 nobody true");
    tls.set_client_ca(known.pem.as_bytes()).expect("bundle");
    for (identity, alpn, want) in [
        (Some(&alice), &b"h2"[..], "HTTP/2.0 certificates=1 true"),
        (Some(&alice), b"http/1.1", "HTTP/1.1 certificates=1 true"),
        (None, b"h2", "HTTP/2.0 nobody true"),
        (Some(&mallory), b"h2", "HTTP/2.0 rejected=invalid peer certificate: UnknownIssuer true"),
    ] {
        assert_eq!(get(server.address, client(&server_ca, identity, alpn)).await, want);
    }
    tls.set_client_ca(unknown.pem.as_bytes()).expect("bundle");
    let now = get(server.address, client(&server_ca, Some(&mallory), b"h2")).await;
    assert_eq!(now, "HTTP/2.0 certificates=1 true");

    // The serving certificate is renewed under another CA.
    let next_ca = ca("next");
    let renewed = next_ca.leaf("localhost");
    tls.set_certificate(renewed.pem.as_bytes(), renewed.key_pem.as_bytes()).expect("renewed");
    assert_eq!(get(server.address, client(&next_ca, None, b"h2")).await, "HTTP/2.0 nobody true");
    assert!(connect(server.address, client(&server_ca, None, b"h2")).await.is_err());

    // A key that is not the certificate's, and no PEM at all.
    assert!(tls.set_certificate(leaf.pem.as_bytes(), renewed.key_pem.as_bytes()).is_err());
    assert!(tls.set_certificate(b"", b"").is_err());
    server.shutdown.cancel();
    server.done.await.expect("no panic").expect("clean end");
}

#[tokio::test]
async fn drain_lets_requests_finish_and_has_a_deadline() {
    let (entered, mut has_entered) = tokio::sync::mpsc::channel::<()>(4);
    let (release, _) = tokio::sync::broadcast::channel::<()>(1);
    let gate = release.clone();
    let service = tower::service_fn(move |request: Request<Incoming>| {
        let (entered, mut released) = (entered.clone(), gate.subscribe());
        async move {
            let _ = entered.send(()).await;
            if request.uri().path() == "/slow" {
                let _ = released.recv().await;
            } else {
                std::future::pending::<()>().await;
            }
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("done")))
        }
    });
    let limits = Limits { drain: Duration::from_millis(500), ..Limits::default() };
    let server = start(None, service, limits).await;
    let ask = |path: &'static str| {
        let address = server.address;
        tokio::spawn(async move {
            let mut stream = TcpStream::connect(address).await.expect("connect");
            let head = format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n");
            stream.write_all(head.as_bytes()).await.expect("write");
            let mut reply = String::new();
            // A connection closed at the deadline may also show as a reset.
            let _ = stream.read_to_string(&mut reply).await;
            reply
        })
    };
    let (slow, stuck) = (ask("/slow"), ask("/stuck"));
    has_entered.recv().await.expect("first");
    has_entered.recv().await.expect("second");
    server.shutdown.cancel();
    release.send(()).expect("a waiting request");
    assert!(slow.await.expect("slow").ends_with("done"));
    assert_eq!(stuck.await.expect("stuck"), "");
    server.done.await.expect("no panic").expect("clean end");
    assert!(TcpStream::connect(server.address).await.is_err(), "the listener is closed");
}

#[tokio::test]
async fn silence_and_slow_heads_are_cut_off() {
    let limits = Limits {
        handshake: Duration::from_millis(100),
        header_read: Duration::from_millis(100),
        ..Limits::default()
    };
    let server = start(None, tower::service_fn(describe), limits).await;
    for opening in ["", "G", "GET / HTTP/1.1\r\nhost:"] {
        let mut stream = TcpStream::connect(server.address).await.expect("connect");
        stream.write_all(opening.as_bytes()).await.expect("write");
        let mut rest = Vec::new();
        let ended = timeout(Duration::from_secs(5), stream.read_to_end(&mut rest)).await;
        assert!(ended.is_ok(), "{opening:?} was kept");
    }
    server.shutdown.cancel();
    server.done.await.expect("no panic").expect("clean end");
}

#[tokio::test]
async fn connections_are_bounded() {
    static SERVED: AtomicUsize = AtomicUsize::new(0);
    let service = tower::service_fn(|_: Request<Incoming>| async {
        SERVED.fetch_add(1, Ordering::SeqCst);
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("x")))
    });
    let server = start(None, service, Limits { connections: 1, ..Limits::default() }).await;
    let mut first = TcpStream::connect(server.address).await.expect("connect");
    let head = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
    first.write_all(head).await.expect("write");
    let mut byte = [0_u8; 1];
    first.read_exact(&mut byte).await.expect("reply");
    let mut second = TcpStream::connect(server.address).await.expect("connect");
    second.write_all(head).await.expect("write");
    assert!(timeout(Duration::from_millis(100), second.read_exact(&mut byte)).await.is_err(), "second waits");
    assert_eq!(SERVED.load(Ordering::SeqCst), 1);
    drop(first);
    timeout(Duration::from_secs(5), second.read_exact(&mut byte)).await.expect("in time").expect("reply");
    server.shutdown.cancel();
    server.done.await.expect("no panic").expect("clean end");
}

#[tokio::test]
async fn upgrades_pass() {
    let service = tower::service_fn(|mut request: Request<Incoming>| async move {
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut io = TokioIo::new(upgrade.await.expect("upgrade"));
            io.write_all(b"hello").await.expect("write");
        });
        let reply = Response::builder().status(101).header("connection", "upgrade").header("upgrade", "x");
        Ok::<_, Infallible>(reply.body(Empty::<Bytes>::new()).expect("reply"))
    });
    let server = start(None, service, Limits::default()).await;
    let mut stream = TcpStream::connect(server.address).await.expect("connect");
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n").await.expect("write");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await.expect("read");
    assert!(reply.starts_with("HTTP/1.1 101") && reply.ends_with("hello"), "{reply}");
    server.shutdown.cancel();
    server.done.await.expect("no panic").expect("clean end");
}

#[tokio::test]
async fn warp_under_the_same_loop() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("address");
    let shutdown = CancellationToken::new();
    let routes = warp::Filter::map(warp::path("hi"), || "there");
    let done = tokio::spawn(serve(listener, None, routes, Limits::default(), shutdown.clone()));
    let mut stream = TcpStream::connect(address).await.expect("connect");
    stream.write_all(b"GET /hi HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.expect("write");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await.expect("read");
    assert!(reply.ends_with("there"), "{reply}");
    shutdown.cancel();
    done.await.expect("no panic").expect("clean end");
}
