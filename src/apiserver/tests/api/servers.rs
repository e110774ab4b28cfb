//! Over real sockets with TLS and credentials, and several servers on one store.


use std::sync::Arc;

use crate::common::Server;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use windlass_apiserver::{ApiServer, Config};
use windlass_daemon::health::Health;

async fn over_tls(server: &ApiServer, h2: bool, method: &str, path: &str, token: &str, body: &str) -> (StatusCode, Value) {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(server.ca_pem().as_bytes()).expect("a certificate")).expect("an authority");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![if h2 { b"h2".to_vec() } else { b"http/1.1".to_vec() }];
    let tcp = tokio::net::TcpStream::connect(server.local_addr()).await.expect("a connection");
    let name = ServerName::try_from("kubernetes.default.svc").expect("a name");
    let tls = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, tcp).await.expect("TLS");
    let uri = if h2 { format!("https://kubernetes.default.svc{path}") } else { path.to_owned() };
    let mut request = Request::builder().method(method).uri(uri);
    if !h2 {
        request = request.header("host", "kubernetes.default.svc");
    }
    if !token.is_empty() {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let request = request.body(Full::new(bytes::Bytes::from(body.to_owned()))).expect("a request");
    let response = if h2 {
        let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(tls)).await.expect("HTTP/2");
        tokio::spawn(connection);
        sender.send_request(request).await.expect("an answer")
    } else {
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(tls)).await.expect("HTTP/1.1");
        tokio::spawn(connection);
        sender.send_request(request).await.expect("an answer")
    };
    let status = response.status();
    let body = response.into_body().collect().await.expect("a body").to_bytes();
    (status, serde_json::from_slice(&body).unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&body).into_owned())))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_over_tls() {
    let tokens = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(tokens.path(), "s3cret-token,alice,42,\"system:masters\"\nother-token,bob,43\n").expect("written");
    let s = Server::with(|c| c.token_auth_file = Some(tokens.path().to_owned())).await;
    let api = Arc::new(s);
    let serving = api.clone();
    let task = tokio::spawn(async move { serving.api.serve().await });
    let cm = "/api/v1/namespaces/default/configmaps";
    for h2 in [false, true] {
        let name = format!("over-{h2}");
        let body = json!({"metadata": {"name": name}, "data": {"k": "v"}}).to_string();
        assert_eq!(over_tls(&api.api, h2, "POST", cm, "s3cret-token", &body).await.0, 201);
        let (status, got) = over_tls(&api.api, h2, "GET", &format!("{cm}/{name}"), "s3cret-token", "").await;
        assert_eq!((status.as_u16(), &got["data"]["k"]), (200, &json!("v")));
        for (path, token, want) in [(cm, "", 401), (cm, "wrong", 401), (cm, "other-token", 403), ("/healthz", "", 200), ("/metrics", "", 401), ("/version", "", 200), ("/windlass/ca.pem", "", 200), ("/healthz", "wrong", 200)] {
            let (status, got) = over_tls(&api.api, h2, "GET", path, token, "").await;
            assert_eq!(status, want, "{path} {token}: {got}");
        }
        let (_, denied) = over_tls(&api.api, h2, "GET", cm, "other-token", "").await;
        assert_eq!(denied["message"], "configmaps is forbidden: User \"bob\" cannot list resource \"configmaps\" in API group \"\" in the namespace \"default\"");
        assert_eq!(over_tls(&api.api, h2, "DELETE", &format!("{cm}/{name}"), "s3cret-token", "").await.0, 200);
    }
    api.shutdown.cancel();
    task.await.expect("no panic").expect("a clean end");
}

/// Two servers that share a store, as they would share etcd: each sees the other's writes in full.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_servers_on_one_store() {
    let dir = tempfile::tempdir().expect("a directory");
    let store: Arc<dyn windlass_store::Store> = Arc::new(windlass_store::Embedded::at(&dir.path().join("store.redb")).await.expect("a store"));
    let start = || async {
        let config = Config { data_dir: dir.path().to_owned(), bind_address: [127, 0, 0, 1].into(), secure_port: 0, ..Config::default() };
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let shutdown = CancellationToken::new();
        let api = ApiServer::start_on(config, store.clone(), false, listener, Health::new(), shutdown.clone()).await.expect("a server");
        Server::of(api, shutdown)
    };
    let (a, b) = (start().await, start().await);
    assert_eq!(a.api.ca_pem(), b.api.ca_pem());
    let cm = "/api/v1/namespaces/default/configmaps";
    let mut watch = b.watch(&format!("{cm}?watch=1")).await;
    for round in 0..20 {
        let name = format!("n{round}");
        let (one, other) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
        one.check(&format!("POST {cm}"), json!({"metadata": {"name": name}}), 201, json!({})).await;
        // Reads without a version are as fresh as the store.
        other.check(&format!("GET {cm}/{name}"), Value::Null, 200, json!({})).await;
        let list = other.check(&format!("GET {cm}"), Value::Null, 200, json!({})).await;
        assert_eq!(list["items"].as_array().map(Vec::len), Some(round + 1));
        other.check(&format!("PATCH {cm}/{name}?type=merge"), json!({"data": {"by": "other"}}), 200, json!({"data": {"by": "other"}})).await;
        one.check(&format!("PATCH {cm}/{name}?type=merge"), json!({"data": {"and": "one"}}), 200, json!({"data": {"by": "other", "and": "one"}})).await;
        for want in ["ADDED", "MODIFIED", "MODIFIED"] {
            assert_eq!(watch.short().await, format!("{want} {name}"));
        }
    }
    // Service addresses are given once, whoever gives them.
    let mut seen = std::collections::HashSet::new();
    for round in 0..6 {
        let server = if round % 2 == 0 { &a } else { &b };
        let service = server.check("POST /api/v1/namespaces/default/services", json!({"metadata": {"name": format!("s{round}")}, "spec": {"ports": [{"port": 80}]}}), 201, json!({})).await;
        assert!(seen.insert(service["spec"]["clusterIP"].as_str().expect("an address").to_owned()));
    }
}
