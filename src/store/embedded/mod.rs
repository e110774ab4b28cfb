//! The embedded store: one file, one process.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{Semaphore, oneshot};

use crate::metrics::{Metrics, Timer};
use crate::{Entry, Error, Op, Outcome, Range, RangeResult, Result, Status, Store, Txn, Watch, check_key, check_write};

mod fault;
mod file;
mod hub;
mod records;
mod table;
mod writer;

use file::Slot;
use hub::Hub;
use writer::{Request, Write, Writer};

/// Ranges of up to this many entries are read on the calling thread; larger ones where blocking is allowed.
const INLINE_LIMIT: usize = 64;
/// Bytes of values that may wait for the writer, in units of 1 KiB.
const QUEUE_UNITS: usize = 64 << 10;
const UNIT: usize = 1 << 10;

/// How the embedded store behaves. [`EmbeddedConfig::new`] gives values that suit a cluster of any size.
#[derive(Clone, Debug)]
pub struct EmbeddedConfig {
    /// The file; made when it is not there.
    pub path: PathBuf,
    /// Bytes of pages that redb keeps in memory.
    pub cache: usize,
    /// History is kept this long, at least.
    pub history: Duration,
    /// ... but no more than this many revisions.
    pub history_revisions: u64,
    /// Puts are refused when fewer bytes are free on the disk.
    pub reserve: u64,
}

/// See the crate's head. Dropping it waits for writes that were taken, and closes the file; watches end.
pub struct Embedded {
    slot: Arc<Slot>,
    hub: Arc<Hub>,
    metrics: Arc<Metrics>,
    room: Arc<Semaphore>,
    requests: Option<Sender<Request>>,
    writer: Option<JoinHandle<()>>,
}

// === impl EmbeddedConfig ===

impl EmbeddedConfig {
    /// 16 MiB of cache, five minutes or 200,000 revisions of history (upstream compacts every five minutes), and a reserve
    /// of 32 MiB on the disk.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            cache: 16 << 20,
            history: Duration::from_secs(300),
            history_revisions: 200_000,
            reserve: 32 << 20,
        }
    }
}

// === impl Embedded ===

impl Embedded {
    /// Opens the file, or makes a new one. Errors: [`Error::Locked`], [`Error::Foreign`], [`Error::Damaged`],
    /// [`Error::Full`].
    pub async fn open(config: EmbeddedConfig) -> Result<Self> {
        let opened = tokio::task::spawn_blocking(move || Self::open_blocking(config)).await;
        opened.unwrap_or_else(|error| Err(Error::Unavailable { detail: format!("opening the store: {error}") }))
    }

    /// [`Embedded::open`] for callers without a runtime.
    pub fn open_blocking(config: EmbeddedConfig) -> Result<Self> {
        let slot = Arc::new(Slot::open(&config.path, config.cache)?);
        let (marks, cluster) = slot.read(|txn| Ok((table::marks(txn)?, table::cluster(txn)?)))?;
        let metrics = Arc::new(Metrics::new("embedded", &format!("{cluster:016x}")));
        metrics.size(slot.bytes());
        let hub = Hub::new(marks.revision, Arc::clone(&metrics));
        let (requests, receiver) = channel();
        let writer = Writer::new(Arc::clone(&slot), Arc::clone(&hub), Arc::clone(&metrics), config, marks);
        let writer = std::thread::Builder::new()
            .name("store-writer".into())
            .spawn(move || writer.run(&receiver))
            .map_err(|error| Error::Unavailable { detail: format!("cannot start the writer's thread: {error}") })?;
        Ok(Self {
            slot,
            hub,
            metrics,
            room: Arc::new(Semaphore::new(QUEUE_UNITS)),
            requests: Some(requests),
            writer: Some(writer),
        })
    }

    /// The same store when the path is all that is to say.
    pub async fn at(path: &Path) -> Result<Self> {
        Self::open(EmbeddedConfig::new(path)).await
    }

    fn send(&self, request: Request) -> Result<()> {
        let gone = || Error::Unavailable { detail: format!("the writer of {} has ended", self.slot.what()) };
        self.requests.as_ref().ok_or_else(gone)?.send(request).map_err(|_| gone())
    }

    async fn range_anywhere(&self, range: Range) -> Result<RangeResult> {
        if range.limit.is_some_and(|limit| limit <= INLINE_LIMIT) {
            return self.slot.read(|txn| table::range(txn, &range));
        }
        let slot = Arc::clone(&self.slot);
        tokio::task::spawn_blocking(move || slot.read(|txn| table::range(txn, &range)))
            .await
            .unwrap_or_else(|error| Err(Error::Unavailable { detail: format!("reading a range: {error}") }))
    }

    async fn write(&self, txn: Txn) -> Result<Outcome> {
        check_write(&txn)?;
        let value = if let Op::Put { value, .. } = &txn.op { value.len() } else { 0 };
        // At most MAX_REQUEST / UNIT + 1 units: far below u32 and below the queue's bound.
        let units = u32::try_from(value / UNIT + 1).unwrap_or(1);
        let permit = Arc::clone(&self.room)
            .acquire_many_owned(units)
            .await
            .map_err(|_| Error::Unavailable { detail: "the store is closing".into() })?;
        self.metrics.queue(QUEUE_UNITS - self.room.available_permits());
        let (answer, answered) = oneshot::channel();
        self.send(Request::Write(Write { txn, answer, permit }))?;
        answered.await.unwrap_or_else(|_| {
            Err(Error::Unavailable { detail: format!("the writer of {} ended during the write", self.slot.what()) })
        })
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        // Without senders the writer finishes what it has, closes the file and ends.
        self.requests = None;
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            tracing::error!(file = self.slot.what(), "the store's writer panicked");
        }
    }
}

#[async_trait]
impl Store for Embedded {
    async fn get(&self, key: &str) -> Result<Option<Entry>> {
        let timer = Timer::start();
        let result = check_key(key).and_then(|()| self.slot.read(|txn| table::get(txn, key)));
        self.metrics.request("get", key, timer, result)
    }

    async fn range(&self, range: Range) -> Result<RangeResult> {
        let timer = Timer::start();
        let prefix = range.prefix.clone();
        let result = self.range_anywhere(range).await;
        self.metrics.request("list", &prefix, timer, result)
    }

    async fn txn(&self, txn: Txn) -> Result<Outcome> {
        let timer = Timer::start();
        let (operation, key) = (crate::metrics::operation(&txn), txn.key.clone());
        let result = self.write(txn).await;
        self.metrics.request(operation, &key, timer, result)
    }

    async fn watch(&self, prefix: &str, after_revision: u64) -> Result<Watch> {
        let marks = self.slot.read(table::marks)?;
        if after_revision > marks.revision {
            return Err(Error::Future { requested: after_revision, current: marks.revision });
        }
        if after_revision < marks.compacted {
            return Err(Error::Compacted { requested: after_revision, compacted: marks.compacted });
        }
        hub::watch(&self.hub, &self.slot, prefix, after_revision)
    }

    async fn request_progress(&self) -> Result<()> {
        self.hub.progress();
        Ok(())
    }

    async fn compact(&self, revision: u64) -> Result<()> {
        let (answer, answered) = oneshot::channel();
        self.send(Request::Compact { revision, answer })?;
        answered
            .await
            .unwrap_or_else(|_| Err(Error::Unavailable { detail: "the writer ended during the compaction".into() }))
    }

    async fn status(&self) -> Result<Status> {
        let marks = self.slot.read(table::marks)?;
        Ok(Status {
            revision: marks.revision,
            compacted: marks.compacted,
            bytes: self.slot.bytes(),
            backend: "embedded",
        })
    }
}
