//! The etcd back end: upstream's way of using etcd, one key per transaction.
//!
//! One endpoint is used at a time; when it fails the next one is. Reads are retried meanwhile. A write is retried only when it surely was not sent: otherwise the caller
//! hears [`Error::Unavailable`] and reads again, as with any lost answer.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use etcd_client::{
    Certificate, Client, Compare, CompareOp, ConnectOptions, DeleteOptions, GetOptions, Identity, KeyValue, KvClient,
    PutOptions, ResponseHeader, TlsOptions, TxnOp, TxnOpResponse, WatchClient,
};
use tokio::sync::watch::Sender;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::metrics::{Metrics, Timer};
use crate::{
    Entry, Error, Expect, Op, Outcome, Range, RangeResult, Result, Status, Store, Txn, Watch, check_key, check_write,
    prefix_end,
};

mod compact;
mod lease;
mod watch;

/// For one attempt of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How often all endpoints are tried for one request.
const ROUNDS: usize = 3;
/// The largest answer, as upstream's client: a range of everything.
const MAX_ANSWER: usize = i32::MAX as usize;

/// How to reach etcd.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// `https://host:2379` or `http://...`, one or more; those that are down are passed over.
    pub endpoints: Vec<String>,
    /// The CA that signed etcd's certificates (PEM file). Needed for `https`.
    pub ca_file: Option<PathBuf>,
    /// Our client certificate and its key (PEM files), when etcd asks for one.
    pub cert_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
    /// How long history is kept; upstream's `--etcd-compaction-interval`. Zero: somebody else compacts.
    pub compaction_interval: Duration,
}

/// See the crate's head. Clones of the connection are shared by all tasks.
pub struct Etcd {
    link: Arc<Link>,
    leases: lease::Leases,
    /// Counts requests for progress: every watch looks out for it.
    progress: Sender<u64>,
    _compactor: DropGuard,
}

/// What watches and the compactor share with the store.
struct Link {
    peers: Peers,
    metrics: Arc<Metrics>,
    /// The highest compaction that we know of.
    compacted: AtomicU64,
}

/// The members of the cluster that we were told of.
struct Peers {
    endpoints: Vec<Endpoint>,
    /// Which one is in use, modulo their number.
    current: AtomicUsize,
}

/// One member of the cluster. Its clients are handles of one connection, made when first used and made again when lost.
struct Endpoint {
    address: String,
    client: Client,
    kv: KvClient,
    watcher: WatchClient,
}

// === impl EtcdConfig ===

impl EtcdConfig {
    /// Plain endpoints, and compaction every five minutes as upstream.
    pub fn new<S: Into<String>>(endpoints: impl IntoIterator<Item = S>) -> Self {
        Self {
            endpoints: endpoints.into_iter().map(Into::into).collect(),
            ca_file: None,
            cert_file: None,
            key_file: None,
            compaction_interval: Duration::from_secs(300),
        }
    }

    fn options(&self) -> Result<ConnectOptions> {
        let bad = |detail: String| Error::Config { detail };
        if self.endpoints.is_empty() {
            return Err(bad("no etcd endpoint is given".into()));
        }
        for endpoint in &self.endpoints {
            if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") {
                return Err(bad(format!("etcd endpoint {endpoint:?} must begin with https:// or http://")));
            }
        }
        let read = |path: &PathBuf| {
            std::fs::read(path).map_err(|error| bad(format!("cannot read {}: {error}", path.display())))
        };
        let options = ConnectOptions::new()
            .with_connect_timeout(Duration::from_secs(5))
            .with_keep_alive(Duration::from_secs(30), Duration::from_secs(10))
            .with_keep_alive_while_idle(true);
        if !self.endpoints.iter().any(|e| e.starts_with("https://")) {
            return Ok(options);
        }
        if self.endpoints.iter().any(|e| e.starts_with("http://")) {
            return Err(bad("either all etcd endpoints are https or all are http".into()));
        }
        let ca = self.ca_file.as_ref().ok_or_else(|| bad("https endpoints need the CA of etcd's certificates".into()))?;
        let mut tls = TlsOptions::new().ca_certificate(Certificate::from_pem(read(ca)?));
        match (&self.cert_file, &self.key_file) {
            (Some(cert), Some(key)) => tls = tls.identity(Identity::from_pem(read(cert)?, read(key)?)),
            (None, None) => {}
            _ => return Err(bad("a client certificate for etcd needs both its file and its key's".into())),
        }
        Ok(options.with_tls(tls))
    }
}

// === impl Etcd ===

impl Etcd {
    /// Connects, and waits until one endpoint answers. Errors: [`Error::Config`], [`Error::Unavailable`].
    pub async fn connect(config: EtcdConfig) -> Result<Self> {
        let options = config.options()?;
        let mut endpoints = Vec::new();
        for address in &config.endpoints {
            let client = Client::connect([address], Some(options.clone()))
                .await
                .map_err(|error| Error::Config { detail: format!("etcd endpoint {address}: {error}") })?;
            endpoints.push(Endpoint {
                address: address.clone(),
                kv: client.kv_client().max_decoding_message_size(MAX_ANSWER),
                watcher: client.watch_client().max_decoding_message_size(MAX_ANSWER),
                client,
            });
        }
        let peers = Peers { endpoints, current: AtomicUsize::new(0) };
        let first = peers.get(compact::KEY.into(), GetOptions::new()).await?;
        let cluster = first.header().map_or(0, ResponseHeader::cluster_id);
        let compacted = first.kvs().first().and_then(|kv| kv.value_str().ok()?.parse().ok()).unwrap_or(0);
        let metrics = Arc::new(Metrics::new("etcd", &format!("{cluster:016x}")));
        let link = Arc::new(Link { peers, metrics, compacted: AtomicU64::new(compacted) });
        let stop = CancellationToken::new();
        if !config.compaction_interval.is_zero() {
            tokio::spawn(compact::run(Arc::clone(&link), config.compaction_interval, stop.clone()));
        }
        Ok(Self {
            leases: lease::Leases::new(Arc::clone(&link)),
            link,
            progress: Sender::new(0),
            _compactor: stop.drop_guard(),
        })
    }

    async fn write(&self, txn: Txn) -> Result<Outcome> {
        check_write(&txn)?;
        let Txn { key, expect, op } = txn;
        let compares = match expect {
            Expect::Any => vec![],
            Expect::Absent => vec![Compare::mod_revision(key.clone(), CompareOp::Equal, 0)],
            Expect::ModRevision(revision) => {
                vec![Compare::mod_revision(key.clone(), CompareOp::Equal, signed(revision))]
            }
        };
        let change = match op {
            Op::Put { value, ttl } => {
                let mut options = PutOptions::new().with_prev_key();
                if let Some(ttl) = ttl {
                    options = options.with_lease(self.leases.get(ttl).await?);
                }
                TxnOp::put(key.clone(), value, Some(options))
            }
            Op::Delete => TxnOp::delete(key.clone(), Some(DeleteOptions::new().with_prev_key())),
        };
        let request = etcd_client::Txn::new().when(compares).and_then([change]).or_else([TxnOp::get(key, None)]);
        let response = self.link.peers.attempt(false, |peer| {
            let (mut kv, request) = (peer.kv.clone(), request.clone());
            async move { kv.txn(request).await }
        })
        .await?;
        let revision = revision(response.header());
        let answer = response.op_responses().into_iter().next();
        if !response.succeeded() {
            return match answer {
                Some(TxnOpResponse::Get(mut found)) => {
                    Ok(Outcome::Conflict { current: found.take_kvs().into_iter().next().map(entry).transpose()? })
                }
                _ => Err(odd("a failed transaction without its read")),
            };
        }
        let previous = match answer {
            Some(TxnOpResponse::Put(mut put)) => put.take_prev_key(),
            Some(TxnOpResponse::Delete(mut deleted)) => deleted.take_prev_kvs().into_iter().next(),
            _ => return Err(odd("a transaction without its answer")),
        };
        Ok(Outcome::Committed { revision, previous: previous.map(entry).transpose()? })
    }
}

impl Link {
    async fn range(&self, range: &Range) -> Result<RangeResult> {
        let start = match &range.start_after {
            // The first key after a key is the key with a NUL behind it.
            Some(after) if after.as_str() >= range.prefix.as_str() => [after.as_bytes(), &[0]].concat(),
            _ if range.prefix.is_empty() => vec![0],
            _ => range.prefix.clone().into_bytes(),
        };
        let end = prefix_end(range.prefix.as_bytes()).unwrap_or_else(|| vec![0]);
        let mut options = GetOptions::new().with_range(end.clone());
        if let Some(limit) = range.limit {
            options = options.with_limit(i64::try_from(limit).unwrap_or(i64::MAX));
        }
        if let Some(revision) = range.revision {
            options = options.with_revision(signed(revision));
        }
        if end != [0] && start >= end {
            options = GetOptions::new().with_limit(1);
            let none = self.peers.get(vec![0], options).await?;
            let revision = range.revision.unwrap_or(revision(none.header()));
            return Ok(RangeResult { entries: Vec::new(), revision, more: false });
        }
        let mut found = match self.peers.get(start, options).await {
            Err(error) => return Err(self.about_revision(error, range.revision.unwrap_or(0)).await),
            Ok(found) => found,
        };
        let entries = found.take_kvs().into_iter().map(entry).collect::<Result<Vec<_>>>()?;
        Ok(RangeResult {
            entries,
            revision: range.revision.unwrap_or(revision(found.header())),
            more: found.more(),
        })
    }

    /// etcd's errors about revisions do not say which revision would do: completes them.
    async fn about_revision(&self, error: Error, requested: u64) -> Error {
        match error {
            Error::Compacted { .. } => match watch::compacted_at(self, requested).await {
                Ok(compacted) => {
                    self.compacted.fetch_max(compacted, Ordering::Relaxed);
                    Error::Compacted { requested, compacted }
                }
                Err(_) => Error::Compacted { requested, compacted: self.compacted.load(Ordering::Relaxed) },
            },
            Error::Future { .. } => match self.current().await {
                Ok(current) => Error::Future { requested, current },
                Err(error) => error,
            },
            other => other,
        }
    }

    /// The revision of now: of a read that cannot be stale.
    async fn current(&self) -> Result<u64> {
        let found = self.peers.get(compact::KEY.into(), GetOptions::new().with_count_only()).await?;
        Ok(revision(found.header()))
    }

    async fn compact(&self, to: u64) -> Result<()> {
        let done = self.peers.attempt(true, |peer| {
            let mut kv = peer.kv.clone();
            async move { kv.compact(signed(to), None).await }
        });
        match done.await {
            Ok(_) => {
                self.compacted.fetch_max(to, Ordering::Relaxed);
                self.metrics.compacted(to);
                Ok(())
            }
            // As far as that, or further, already.
            Err(Error::Compacted { .. }) => Ok(()),
            Err(error) => Err(self.about_revision(error, to).await),
        }
    }
}

#[async_trait]
impl Store for Etcd {
    async fn get(&self, key: &str) -> Result<Option<Entry>> {
        let timer = Timer::start();
        let found = match check_key(key) {
            Ok(()) => self.link.peers.get(key.into(), GetOptions::new()).await,
            Err(error) => Err(error),
        };
        let result = found.and_then(|mut found| found.take_kvs().into_iter().next().map(entry).transpose());
        self.link.metrics.request("get", key, timer, result)
    }

    async fn range(&self, range: Range) -> Result<RangeResult> {
        let timer = Timer::start();
        let result = self.link.range(&range).await;
        self.link.metrics.request("list", &range.prefix, timer, result)
    }

    async fn txn(&self, txn: Txn) -> Result<Outcome> {
        let timer = Timer::start();
        let (operation, key) = (crate::metrics::operation(&txn), txn.key.clone());
        let result = self.write(txn).await;
        self.link.metrics.request(operation, &key, timer, result)
    }

    async fn watch(&self, prefix: &str, after_revision: u64) -> Result<Watch> {
        watch::open(Arc::clone(&self.link), prefix, after_revision, self.progress.subscribe()).await
    }

    async fn request_progress(&self) -> Result<()> {
        self.progress.send_modify(|asked| *asked += 1);
        Ok(())
    }

    async fn compact(&self, revision: u64) -> Result<()> {
        self.link.compact(revision).await
    }

    async fn status(&self) -> Result<Status> {
        let revision = self.link.current().await?;
        let status = self.link.peers.attempt(true, |peer| {
            let mut client = peer.client.maintenance_client();
            async move { client.status().await }
        });
        let size = status.await?.db_size();
        let bytes = u64::try_from(size).unwrap_or(0);
        self.link.metrics.size(bytes);
        Ok(Status { revision, compacted: self.link.compacted.load(Ordering::Relaxed), bytes, backend: "etcd" })
    }
}

// === requests ===

impl Peers {
    /// The endpoint in use, and its turn, for [`Peers::give_up`].
    fn current(&self) -> (usize, &Endpoint) {
        let turn = self.current.load(Ordering::Relaxed);
        (turn, &self.endpoints[turn % self.endpoints.len()])
    }

    /// Goes on to the next endpoint, unless somebody else did so already.
    fn give_up(&self, turn: usize) {
        let next = turn.wrapping_add(1);
        if self.current.compare_exchange(turn, next, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            && self.endpoints.len() > 1
        {
            let to = &self.endpoints[next % self.endpoints.len()].address;
            tracing::info!(to, "an etcd endpoint does not answer: going on to the next");
        }
    }

    /// Does a request, again after failures of the connection. What is not `idempotent` is done again only when the
    /// connection was refused, so that it surely was not sent.
    async fn attempt<'a, T, Fut>(&'a self, idempotent: bool, request: impl Fn(&'a Endpoint) -> Fut) -> Result<T>
    where
        Fut: Future<Output = std::result::Result<T, etcd_client::Error>>,
    {
        let mut pause = Duration::from_millis(20);
        let mut left = ROUNDS * self.endpoints.len();
        loop {
            left -= 1;
            let (turn, endpoint) = self.current();
            let error = match tokio::time::timeout(REQUEST_TIMEOUT, request(endpoint)).await {
                Ok(Ok(done)) => return Ok(done),
                Ok(Err(error)) if is_down(&error) => {
                    self.give_up(turn);
                    if left == 0 || !(idempotent || refused(&error)) {
                        return Err(told(&error));
                    }
                    error.to_string()
                }
                Ok(Err(error)) => return Err(told(&error)),
                Err(_) => {
                    self.give_up(turn);
                    let detail = format!("etcd at {} did not answer in {REQUEST_TIMEOUT:?}", endpoint.address);
                    // One such wait is enough for any caller.
                    return Err(Error::Unavailable { detail });
                }
            };
            tracing::debug!(error, endpoint = endpoint.address, "etcd request failed: trying again");
            if (turn + 1) % self.endpoints.len() == 0 {
                tokio::time::sleep(pause).await;
                pause = (pause * 4).min(Duration::from_millis(500));
            }
        }
    }

    /// A read, tried again while endpoints fail.
    async fn get(&self, key: Vec<u8>, options: GetOptions) -> Result<etcd_client::GetResponse> {
        self.attempt(true, |peer| {
            let (mut kv, key, options) = (peer.kv.clone(), key.clone(), options.clone());
            async move { kv.get(key, Some(options)).await }
        })
        .await
    }
}

/// gRPC's codes, by number: the client does not export their type.
mod code {
    pub const INVALID_ARGUMENT: i32 = 3;
    pub const RESOURCE_EXHAUSTED: i32 = 8;
    pub const OUT_OF_RANGE: i32 = 11;
    pub const UNAVAILABLE: i32 = 14;
}

/// Whether it is the endpoint that failed, not the request.
fn is_down(error: &etcd_client::Error) -> bool {
    match error {
        etcd_client::Error::GRpcStatus(status) => status.code() as i32 == code::UNAVAILABLE,
        etcd_client::Error::TransportError(_) => true,
        _ => false,
    }
}

/// Whether the connection was never made: an I/O error of connecting is among the causes.
fn refused(error: &etcd_client::Error) -> bool {
    let etcd_client::Error::GRpcStatus(status) = error else { return false };
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        if error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::ConnectionRefused) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// In the store's words. Revisions are filled in by [`Link::about_revision`].
fn told(error: &etcd_client::Error) -> Error {
    let etcd_client::Error::GRpcStatus(status) = error else {
        return Error::Unavailable { detail: format!("etcd: {error}") };
    };
    let message = status.message();
    match status.code() as i32 {
        code::OUT_OF_RANGE if message.contains("compacted") => Error::Compacted { requested: 0, compacted: 0 },
        code::OUT_OF_RANGE if message.contains("future") => Error::Future { requested: 0, current: 0 },
        code::RESOURCE_EXHAUSTED if message.contains("space exceeded") => {
            Error::Full { detail: format!("{message}; compact and defragment etcd, then disarm its alarm") }
        }
        code::INVALID_ARGUMENT if message.contains("too large") => {
            Error::TooLarge { bytes: crate::MAX_REQUEST, limit: crate::MAX_REQUEST }
        }
        _ => Error::Unavailable { detail: format!("etcd: {message}") },
    }
}

fn odd(what: &str) -> Error {
    Error::Unavailable { detail: format!("etcd answered {what}: is this an etcd?") }
}

// === values ===

fn signed(revision: u64) -> i64 {
    i64::try_from(revision).unwrap_or(i64::MAX)
}

fn unsigned(revision: i64) -> u64 {
    u64::try_from(revision).unwrap_or(0)
}

fn revision(header: Option<&ResponseHeader>) -> u64 {
    header.map_or(0, |h| unsigned(h.revision()))
}

fn entry(kv: KeyValue) -> Result<Entry> {
    let (create_revision, mod_revision) = (unsigned(kv.create_revision()), unsigned(kv.mod_revision()));
    let (key, value) = kv.into_key_value();
    let key = String::from_utf8(key).map_err(|error| Error::Damaged {
        what: "etcd".into(),
        detail: format!("a key is not UTF-8: {error}"),
    })?;
    Ok(Entry { key, value: Bytes::from(value), create_revision, mod_revision })
}
