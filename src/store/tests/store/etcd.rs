//! The etcd back end, against etcd itself: over TLS with client certificates, several endpoints, restarts.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use windlass_store::{Error, Etcd, EtcdConfig, Expect, Op, Range, Store};

use crate::suite::{self, committed, next, prefix, put, write};

/// Where etcd is: `WINDLASS_UPSTREAM_BIN` names its folder, else it is in the cache that `tests/upstream/build.sh` fills.
fn etcd_program() -> PathBuf {
    if let Some(folder) = std::env::var_os("WINDLASS_UPSTREAM_BIN") {
        let program = Path::new(&folder).join("etcd");
        assert!(program.is_file(), "WINDLASS_UPSTREAM_BIN holds no etcd: build it by `tests/upstream/build.sh etcd`");
        return program;
    }
    let home = std::env::var_os("HOME").expect("HOME is set");
    let cache = Path::new(&home).join(".cache/windlass/upstream");
    let built = fs::read_dir(&cache).into_iter().flatten().flatten().map(|entry| entry.path().join("etcd"));
    built
        .filter(|program| program.is_file())
        .max_by_key(|program| fs::metadata(program).and_then(|m| m.modified()).ok())
        .unwrap_or_else(|| panic!("no etcd below {}: build it by `tests/upstream/build.sh etcd`", cache.display()))
}

struct Server {
    child: Child,
    folder: PathBuf,
    port: u16,
    peer_port: u16,
    tls: bool,
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port").port()
}

impl Server {
    fn start(folder: &Path, tls: bool) -> Self {
        let (port, peer_port) = (free_port(), free_port());
        let child = Self::spawn(folder, port, peer_port, tls);
        Self { child, folder: folder.to_owned(), port, peer_port, tls }
    }

    fn spawn(folder: &Path, port: u16, peer_port: u16, tls: bool) -> Child {
        let scheme = if tls { "https" } else { "http" };
        let (client, peer) = (format!("{scheme}://127.0.0.1:{port}"), format!("http://127.0.0.1:{peer_port}"));
        let mut command = Command::new(etcd_program());
        command
            .args(["--name", "one", "--log-level", "error"])
            .args(["--data-dir", &folder.join("data").display().to_string()])
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("one={peer}"), "--unsafe-no-fsync"]);
        if tls {
            command.args(["--client-cert-auth"]);
            for (flag, file) in [("--cert-file", "server.crt"), ("--key-file", "server.key"), ("--trusted-ca-file", "ca.crt")] {
                command.args([flag, &folder.join(file).display().to_string()]);
            }
        }
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("start etcd")
    }

    fn endpoint(&self) -> String {
        format!("{}://127.0.0.1:{}", if self.tls { "https" } else { "http" }, self.port)
    }

    fn kill(&mut self) {
        self.child.kill().expect("kill etcd");
        self.child.wait().expect("wait for etcd");
    }

    fn restart(&mut self) {
        self.kill();
        self.child = Self::spawn(&self.folder, self.port, self.peer_port, self.tls);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may be dead already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn config(endpoints: impl IntoIterator<Item = String>) -> EtcdConfig {
    EtcdConfig { compaction_interval: Duration::ZERO, ..EtcdConfig::new(endpoints) }
}

/// Connects as soon as etcd answers.
async fn connect(config: EtcdConfig) -> Etcd {
    let mut last = None;
    for _ in 0..40 {
        match Etcd::connect(config.clone()).await {
            Ok(store) => return store,
            Err(error @ Error::Unavailable { .. }) => last = Some(error),
            Err(other) => panic!("{other}"),
        }
    }
    panic!("etcd does not come up: {last:?}");
}

/// Empties what the case before left: the cases share one etcd.
async fn emptied(store: Etcd) -> Arc<dyn Store> {
    for entry in store.range(Range::default()).await.expect("range").entries {
        committed(write(&store, &entry.key, Expect::Any, Op::Delete).await);
    }
    Arc::new(store)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn suite_on_etcd() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = Server::start(folder.path(), false);
    suite::run(async |_| emptied(connect(config([server.endpoint()])).await).await).await;
}

fn certificates(folder: &Path) {
    let ca_key = KeyPair::generate().expect("key");
    let mut params = CertificateParams::new(Vec::new()).expect("params");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, "etcd CA");
    fs::write(folder.join("ca.crt"), params.self_signed(&ca_key).expect("sign").pem()).expect("write");
    let issuer = Issuer::new(params, ca_key);
    for (name, usage) in [("server", ExtendedKeyUsagePurpose::ServerAuth), ("client", ExtendedKeyUsagePurpose::ClientAuth)] {
        let key = KeyPair::generate().expect("key");
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).expect("params");
        params.extended_key_usages = vec![usage];
        params.distinguished_name.push(DnType::CommonName, name);
        fs::write(folder.join(format!("{name}.crt")), params.signed_by(&key, &issuer).expect("sign").pem()).expect("write");
        fs::write(folder.join(format!("{name}.key")), key.serialize_pem()).expect("write");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn suite_on_etcd_over_tls_with_an_endpoint_that_is_down() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    certificates(folder.path());
    let server = Server::start(folder.path(), true);
    let dead = format!("https://127.0.0.1:{}", free_port());
    let config = EtcdConfig {
        ca_file: Some(folder.path().join("ca.crt")),
        cert_file: Some(folder.path().join("client.crt")),
        key_file: Some(folder.path().join("client.key")),
        ..config([dead, server.endpoint()])
    };
    // Without a client certificate etcd lets nobody in.
    let store = connect(config.clone()).await;
    let anonymous = EtcdConfig { cert_file: None, key_file: None, ..config.clone() };
    match Etcd::connect(anonymous).await.map(drop) {
        Err(Error::Unavailable { .. }) => {}
        other => panic!("{other:?}"),
    }
    drop(store);
    suite::run(async |_| emptied(connect(config.clone()).await).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_survives_restarts_of_etcd() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut server = Server::start(folder.path(), false);
    let store = connect(config([server.endpoint()])).await;
    let start = put(&store, "/w/a", "1").await;
    let mut watch = store.watch("/w/", start).await.expect("watch");
    let mut revisions = vec![start];
    for _ in 0..2 {
        revisions.push(put(&store, "/w/a", "2").await);
        assert_eq!(next(&mut watch).await.revision, *revisions.last().expect("some"));
        server.restart();
        // Another client, so that our watch is not helped by our writes.
        let other = connect(config([server.endpoint()])).await;
        revisions.push(put(&other, "/w/b", "3").await);
        assert_eq!(next(&mut watch).await.revision, *revisions.last().expect("some"));
    }
    assert!(revisions.is_sorted_by(|a, b| a < b));
    server.kill();
    match store.get("/w/a").await {
        Err(error @ Error::Unavailable { .. }) => assert!(error.to_string().contains("etcd"), "{error}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_of_one_time_to_live_share_a_lease() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = Server::start(folder.path(), false);
    let store = connect(config([server.endpoint()])).await;
    let mortal = |seconds| Op::Put { value: Bytes::new(), ttl: Some(Duration::from_secs(seconds)) };
    for n in 0..30 {
        committed(write(&store, &format!("/e/{n}"), Expect::Any, mortal(3600)).await);
    }
    committed(write(&store, "/e/other", Expect::Any, mortal(600)).await);
    let mut client = etcd_client::Client::connect([server.endpoint()], None).await.expect("connect");
    assert_eq!(client.leases().await.expect("leases").leases().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_several_compacts() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = Server::start(folder.path(), false);
    let interval = |millis| EtcdConfig {
        compaction_interval: Duration::from_millis(millis),
        ..EtcdConfig::new([server.endpoint()])
    };
    let first = connect(interval(200)).await;
    let second = connect(interval(200)).await;
    let start = put(&first, "/c/a", "1").await;
    let mut watch = first.watch("compact_rev_key", start).await.expect("watch");
    // The key's value is where somebody compacted to: it grows, and each step is made once.
    let mut last = 0;
    while last <= start {
        let batch = next(&mut watch).await;
        put(&first, "/c/a", "2").await;
        let to: u64 = std::str::from_utf8(&batch.events[0].entry.value).expect("text").parse().expect("number");
        assert!(to == 0 || to > last, "{to} after {last}");
        last = to;
    }
    // The put at `start` is the first of all: with it compacted, what was before cannot be watched.
    match second.watch("/c/", 1).await.map(drop) {
        Err(Error::Compacted { requested: 1, compacted }) => assert!(compacted >= start),
        other => panic!("{other:?}"),
    }
    assert_eq!(first.range(prefix("/c/")).await.expect("range").entries.len(), 1);
}

#[tokio::test]
async fn impossible_configurations() {
    for (config, want) in [
        (config([]), "no etcd endpoint"),
        (config(["127.0.0.1:2379".to_owned()]), "must begin with"),
        (config(["https://a:1".to_owned()]), "need the CA"),
        (config(["https://a:1".to_owned(), "http://b:1".to_owned()]), "all are http"),
    ] {
        match Etcd::connect(config).await.map(drop) {
            Err(error @ Error::Config { .. }) => assert!(error.to_string().contains(want), "{error}"),
            other => panic!("{want}: {other:?}"),
        }
    }
}
