//! windlass-store: a revisioned key-value store with watch, in etcd's semantics, small enough to have two back ends.
//!
//! - [`Embedded`]: redb in one file, one writer thread with group commit, revisions and watch in process.
//! - [`Etcd`]: an etcd cluster; many API servers may share it.
//!
//! # Invariants
//! - Never parses a value. It orders bytes under keys by revision and knows nothing of Kubernetes, except that metrics
//!   are labelled by the resource that a key of the form `/registry/...` names.
//! - A write is acknowledged only when it is durable. One write changes one key and has one revision; revisions grow by
//!   one and are never given twice, whatever happens to the process.
//! - Every event of a prefix reaches its watcher in order of revision, without gaps, or the watch ends with an error.
//! - Everything waiting is bounded: writes by bytes, watch queues by events and bytes, history by age and length.
//! - Time to live is a deadline kept in the file; nothing scans for expired keys.
//! - A file that is damaged or not ours is refused and left as it is.
//! - Deliberately absent: transactions over several keys, leases as a concept of callers, authentication of users.
//!
//! # Code map
//! | module | what |
//! | --- | --- |
//! | here | [`Store`], its types and [`Error`] |
//! | `embedded` | `file` (open, refuse, reopen), `records` (codec), `table` (reads and writes on the tables), `writer` (the thread), `hub` (watches) |
//! | `etcd` | client, `lease` (TTL buckets), `watch`, `compact` |
//! | `metrics` | upstream's `etcd_*` and `apiserver_storage_*` names |

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::Stream;
use futures::stream::BoxStream;

mod embedded;
mod etcd;
mod metrics;

pub use embedded::{Embedded, EmbeddedConfig};
pub use etcd::{Etcd, EtcdConfig};

/// The largest key and value together, in bytes: etcd's default request limit.
pub const MAX_REQUEST: usize = 1_572_864;

/// What every operation returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an operation failed, and what to do about it.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// The revision asked for is no longer in the history. List again and watch from there.
    #[error("revision {requested} has been compacted; the oldest that is kept is {compacted}: list again")]
    Compacted { requested: u64, compacted: u64 },
    /// The revision asked for does not exist yet. Seen when a store was restored from an older copy.
    #[error("revision {requested} is in the future; the store is at {current}")]
    Future { requested: u64, current: u64 },
    /// No room: nothing was written. Reads go on; writes do too as soon as there is room again.
    #[error("the store is full ({detail}): writes are refused until there is room again")]
    Full { detail: String },
    /// The data cannot be trusted. Nothing was changed.
    #[error("{what} is damaged: {detail}. It was left as it is; restore a checkpoint, or move it away to start empty")]
    Damaged { what: String, detail: String },
    /// The file holds something else. Nothing was changed.
    #[error("{what} is not a Windlass store: {detail}. It was left as it is; choose another data directory or move it away")]
    Foreign { what: String, detail: String },
    /// Another process has the file open.
    #[error("{what} is in use by another process: stop it, or choose another data directory")]
    Locked { what: String },
    /// Not reachable now. For a write: it may or may not have been done.
    #[error("the store is not available: {detail}")]
    Unavailable { detail: String },
    /// Larger than [`MAX_REQUEST`].
    #[error("request of {bytes} bytes is too large: at most {limit}")]
    TooLarge { bytes: usize, limit: usize },
    /// A key that no back end takes: empty, or with a NUL.
    #[error("bad key {key:?}: keys are not empty and hold no NUL")]
    BadKey { key: String },
    /// The watcher did not take its events in time and was cut off. List again and watch from there.
    #[error("watch of {prefix} was cut off: {waiting} events were waiting")]
    SlowWatcher { prefix: String, waiting: usize },
    /// The configuration cannot work.
    #[error("bad store configuration: {detail}")]
    Config { detail: String },
}

/// A key with its value, as of `mod_revision`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub key: String,
    /// Shared, never copied on its way to watchers.
    pub value: Bytes,
    /// Revision of the write that created the key.
    pub create_revision: u64,
    /// Revision of the write that gave it this value.
    pub mod_revision: u64,
}

/// Which keys to read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// Keys that begin with this; empty for all.
    pub prefix: String,
    /// Only keys after this one: where the page before ended.
    pub start_after: Option<String>,
    /// At most this many entries; `None` for all.
    pub limit: Option<usize>,
    /// As of this revision; `None` for now.
    pub revision: Option<u64>,
}

/// What [`Store::range`] found, in order of keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeResult {
    pub entries: Vec<Entry>,
    /// The revision that the entries are of: the one asked for, or the store's at the time of reading.
    pub revision: u64,
    /// Whether the limit left keys out.
    pub more: bool,
}

/// One compare-and-swap on one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Txn {
    pub key: String,
    pub expect: Expect,
    pub op: Op,
}

/// What must hold for the write to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    Any,
    Absent,
    ModRevision(u64),
}

/// What to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// `ttl` is rounded up to whole seconds; the key is deleted that long after, unless written again before.
    Put { value: Bytes, ttl: Option<Duration> },
    /// Deleting a key that is not there changes nothing and is a success at the present revision.
    Delete,
}

/// How a [`Txn`] ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Durable. `previous` is what was there before.
    Committed { revision: u64, previous: Option<Entry> },
    /// The expectation did not hold; this is what is there.
    Conflict { current: Option<Entry> },
}

/// All events of one revision; without events it tells progress: nothing of the prefix up to `revision` is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    pub revision: u64,
    pub events: Vec<Event>,
}

/// One change of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub kind: EventKind,
    /// For a deletion: the key, no value, `mod_revision` of the deletion and `create_revision` of what was deleted.
    pub entry: Entry,
    /// What was there before; `None` when the key was created, or when the history no longer has it.
    pub previous: Option<Entry>,
}

/// What a change did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    Put { created: bool },
    Delete,
}

/// How a store stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Of the last write.
    pub revision: u64,
    /// The oldest revision that can be read; watches may begin after it.
    pub compacted: u64,
    /// On disk.
    pub bytes: u64,
    /// `embedded` or `etcd`.
    pub backend: &'static str,
}

/// The changes of a prefix, in order. Ends after the first error.
pub struct Watch {
    stream: BoxStream<'static, Result<Batch>>,
}

impl Watch {
    pub(crate) fn new(stream: impl Stream<Item = Result<Batch>> + Send + 'static) -> Self {
        Self { stream: Box::pin(stream) }
    }
}

impl Stream for Watch {
    type Item = Result<Batch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.stream.as_mut().poll_next(cx)
    }
}

/// The store. All methods may be called from many tasks at once.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// The key's value now: no write that was acknowledged before the call is missed.
    async fn get(&self, key: &str) -> Result<Option<Entry>>;

    /// The keys of a prefix at one revision. Errors: [`Error::Compacted`], [`Error::Future`].
    async fn range(&self, range: Range) -> Result<RangeResult>;

    /// One compare-and-swap; returns when it is durable. [`Error::Full`] and [`Error::TooLarge`] wrote nothing.
    async fn txn(&self, txn: Txn) -> Result<Outcome>;

    /// Every change of the prefix after a revision: what the history has, then what comes. Errors: [`Error::Compacted`]
    /// when the history no longer reaches back that far (in the stream, when a compaction overtakes it), [`Error::Future`];
    /// in the stream also [`Error::SlowWatcher`], and [`Error::Unavailable`] when the store stays away.
    async fn watch(&self, prefix: &str, after_revision: u64) -> Result<Watch>;

    /// Asks every watch of this store to tell its progress: each soon yields a batch (with events or without) at or
    /// after the revision of now.
    async fn request_progress(&self) -> Result<()>;

    /// Forgets the history before `revision`; what is readable at `revision` stays. A success without effect when that
    /// far was compacted before. Errors: [`Error::Future`].
    async fn compact(&self, revision: u64) -> Result<()>;

    /// How the store stands.
    async fn status(&self) -> Result<Status>;
}

/// Checks what both back ends demand of a write.
pub(crate) fn check_write(txn: &Txn) -> Result<()> {
    check_key(&txn.key)?;
    let bytes = txn.key.len() + if let Op::Put { value, .. } = &txn.op { value.len() } else { 0 };
    if bytes > MAX_REQUEST {
        return Err(Error::TooLarge { bytes, limit: MAX_REQUEST });
    }
    Ok(())
}

pub(crate) fn check_key(key: &str) -> Result<()> {
    match key.is_empty() || key.contains('\0') {
        true => Err(Error::BadKey { key: key.to_owned() }),
        false => Ok(()),
    }
}

/// The first byte string after every one that begins with `prefix`; `None` when there is none.
pub(crate) fn prefix_end(prefix: &[u8]) -> Option<Vec<u8>> {
    let keep = prefix.iter().rposition(|byte| *byte != u8::MAX)?;
    let mut end = prefix[..=keep].to_vec();
    end[keep] += 1;
    Some(end)
}
