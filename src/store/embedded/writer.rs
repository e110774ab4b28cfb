//! The one writer: a thread that takes all writes that wait, commits them with one fsync, publishes and answers.
//!
//! It also deletes what expired, compacts, and sweeps what compaction left. It sleeps until a write comes or the nearest
//! deadline; an idle store's writer does not wake.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::EmbeddedConfig;
use super::fault::{Fault, Outcome};
use super::file::Slot;
use super::hub::Hub;
use super::table::{self, Marks, Writing};
use crate::metrics::Metrics;
use crate::{Error, Event, Op, Result, Txn};

/// Writes in one commit at most: bounds how long the first of them waits.
const BATCH: usize = 1024;
/// Bytes of values in one commit at most.
const BATCH_BYTES: usize = 8 << 20;
/// Expired keys that are deleted in one commit.
const EXPIRE_STEP: usize = 512;
/// Revisions that are swept in a commit of its own, when nothing else is to do.
const SWEEP_STEP: u64 = 1024;
/// Revisions that a commit of writes sweeps along, at least; each write sweeps four.
const SWEEP_ALONG: u64 = 64;
/// After writes, watchers that got no event are told how far the store is, this often at most.
const PROGRESS: Duration = Duration::from_secs(1);
/// After a failed attempt to open the file anew, at least this long until the next.
const REOPEN: Duration = Duration::from_millis(250);
/// After a commit failed, writes are refused without another try for this long, or, when the disk was full, until this much
/// more is free (a limit that is lifted does not show as free space). Opening anew may take a fifth of the time.
const STALL: Duration = Duration::from_millis(500);
const STALL_MARGIN: u64 = 1 << 20;
/// Without room, what time asks for is looked at again after this long.
const REST: Duration = Duration::from_secs(1);
/// Sleeps are cut to this, so that a deadline by the wall clock survives a change of that clock.
const LONGEST_SLEEP: Duration = Duration::from_secs(3600);

/// What the writer is asked.
pub(super) enum Request {
    Write(Write),
    Compact { revision: u64, answer: oneshot::Sender<Result<()>> },
}

/// One write that waits. The permit is its share of the queue's bound.
pub(super) struct Write {
    pub txn: Txn,
    pub answer: oneshot::Sender<Result<crate::Outcome>>,
    pub permit: OwnedSemaphorePermit,
}

pub(super) struct Writer {
    pub slot: Arc<Slot>,
    pub hub: Arc<Hub>,
    pub metrics: Arc<Metrics>,
    pub config: EmbeddedConfig,
    marks: Marks,
    /// The nearest TTL deadline, in milliseconds since the epoch.
    deadline: Option<u64>,
    /// How far the store was, and when; the oldest first. A mark holds the last revision of its span.
    ages: std::collections::VecDeque<(Instant, u64)>,
    /// The span of a mark: a thirtieth of the history, which bounds their number.
    mark: Duration,
    progress_due: Option<Instant>,
    /// Set by an I/O error: the file must be opened anew before the next write.
    broken: bool,
    retry: Instant,
    /// The last commit failed: writes are refused for a while, for each try costs opening the file anew.
    stall: Option<Stall>,
    /// Nothing is expired, swept or compacted before: there was no room, or a commit failed.
    rest: Instant,
}

/// A failed commit's aftermath.
struct Stall {
    until: Instant,
    /// A full disk: over at once when this much is free.
    enough: Option<u64>,
    error: Error,
}

/// What one commit did.
struct Done {
    marks: Marks,
    events: Vec<Event>,
    outcomes: Vec<crate::Outcome>,
    deadline: Option<u64>,
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

// === impl Writer ===

impl Writer {
    pub(super) fn new(slot: Arc<Slot>, hub: Arc<Hub>, metrics: Arc<Metrics>, config: EmbeddedConfig, marks: Marks) -> Self {
        let now = Instant::now();
        Self {
            slot,
            hub,
            metrics,
            mark: config.history / 30,
            config,
            marks,
            // Unknown yet: look at once.
            deadline: Some(0),
            ages: std::iter::once((now, marks.revision)).collect(),
            progress_due: None,
            broken: false,
            retry: now,
            stall: None,
            rest: now,
        }
    }

    /// Serves until every sender is gone, then closes the file.
    pub(super) fn run(mut self, requests: &Receiver<Request>) {
        loop {
            let first = match self.sleep() {
                Some(pause) => requests.recv_timeout(pause),
                None => requests.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match first {
                Ok(request) => self.serve(request, requests),
                Err(RecvTimeoutError::Timeout) => self.sweep(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
            self.due();
        }
        self.hub.close();
        self.slot.close();
    }

    /// How long to sleep at most; `None` when only a request can wake.
    fn sleep(&self) -> Option<Duration> {
        let now = Instant::now();
        if self.broken {
            return Some(self.retry.saturating_duration_since(now));
        }
        let sweep = (self.marks.swept < self.marks.compacted).then_some(Duration::ZERO);
        let ttl = self.deadline.map(|at| Duration::from_millis(at.saturating_sub(now_ms())));
        let age = self
            .ages
            .iter()
            .find(|(_, revision)| *revision > self.marks.compacted)
            .map(|(at, _)| (*at + self.config.history + self.mark).saturating_duration_since(now));
        let work = [sweep, ttl, age].into_iter().flatten().min();
        let work = work.map(|pause| pause.max(self.rest.saturating_duration_since(now)));
        let progress = self.progress_due.map(|at| at.saturating_duration_since(now));
        [work, progress].into_iter().flatten().min().map(|pause| pause.min(LONGEST_SLEEP))
    }

    /// Takes the request and all that wait behind it.
    fn serve(&mut self, first: Request, requests: &Receiver<Request>) {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        let mut next = Some(first);
        while let Some(request) = next.take() {
            match request {
                Request::Write(write) => {
                    if let Op::Put { value, .. } = &write.txn.op {
                        bytes += value.len();
                    }
                    batch.push(write);
                }
                Request::Compact { revision, answer } => {
                    self.write(std::mem::take(&mut batch));
                    // A caller that went away does not want to know.
                    let _ = answer.send(self.compact(revision));
                }
            }
            if batch.len() < BATCH && bytes < BATCH_BYTES {
                next = requests.try_recv().ok();
            }
        }
        self.write(batch);
    }

    /// What time asks for.
    fn due(&mut self) {
        let now = Instant::now();
        if self.broken && now >= self.retry {
            self.recover();
        }
        if self.progress_due.is_some_and(|at| at <= now) {
            self.progress_due = None;
            self.hub.progress();
        }
        if self.broken || now < self.rest {
            return;
        }
        let expired = self.deadline.is_some_and(|at| at <= now_ms());
        if (expired || self.marks.swept < self.marks.compacted) && !self.room().deletes {
            self.rest = now + REST;
            return;
        }
        if expired {
            // An error was logged, and the file is open again or `broken` is set.
            let _ = self.commit(&[], Some(EXPIRE_STEP));
        }
        self.forget_old();
    }

    // === writes ===

    fn write(&mut self, batch: Vec<Write>) {
        if batch.is_empty() {
            return;
        }
        if self.broken && Instant::now() >= self.retry {
            self.recover();
        }
        let room = self.room();
        let mut accepted = Vec::with_capacity(batch.len());
        for write in batch {
            match self.refusal(&room, &write.txn.op) {
                None => accepted.push(write),
                Some(error) => {
                    // A caller that went away does not want to know.
                    let _ = write.answer.send(Err(error));
                }
            }
        }
        if accepted.is_empty() {
            return;
        }
        let txns: Vec<&Txn> = accepted.iter().map(|w| &w.txn).collect();
        match self.commit(&txns, None) {
            Ok(outcomes) => {
                for (write, outcome) in accepted.into_iter().zip(outcomes) {
                    let _ = write.answer.send(Ok(outcome));
                    drop(write.permit);
                }
            }
            Err(error) => {
                for write in accepted {
                    let _ = write.answer.send(Err(error.clone()));
                }
            }
        }
    }

    /// Why a write is not even tried.
    fn refusal(&self, room: &Room, op: &Op) -> Option<Error> {
        if self.broken {
            return Some(Error::Unavailable { detail: format!("{} cannot be opened", self.slot.what()) });
        }
        let stalled = self.stall.as_ref().filter(|stall| {
            Instant::now() < stall.until && stall.enough.is_none_or(|enough| room.free < enough)
        });
        match stalled {
            Some(stall) => Some(stall.error.clone()),
            None if room.admits(op) => None,
            None => Some(room.refusal(&self.slot.what())),
        }
    }

    /// How much the disk lets us do.
    fn room(&self) -> Room {
        let free = self.slot.free().unwrap_or(u64::MAX);
        Room { free, puts: free >= self.config.reserve, deletes: free >= self.config.reserve / 4 }
    }

    /// One commit: the writes (or the expired keys when there are none), then the marks; publishes after the fsync.
    fn commit(&mut self, txns: &[&Txn], expire: Option<usize>) -> Result<Vec<crate::Outcome>> {
        let began = Instant::now();
        let guarded = AssertUnwindSafe(|| attempt(&self.slot, self.marks, txns, expire));
        let done = catch_unwind(guarded).unwrap_or(Err(Fault::Row("a page could not be written")));
        match done {
            Ok(done) => {
                let wrote = done.marks != self.marks;
                self.settle(done.marks, done.deadline, done.events);
                if wrote {
                    self.metrics.committed(began.elapsed(), txns.len(), self.slot.bytes());
                }
                Ok(done.outcomes)
            }
            Err(fault) => Err(self.failed(fault)),
        }
    }

    /// Makes what was committed the present, and shows it to the watchers.
    fn settle(&mut self, marks: Marks, deadline: Option<u64>, events: Vec<Event>) {
        let now = Instant::now();
        if marks.revision > self.marks.revision {
            self.progress_due.get_or_insert(now + PROGRESS);
            match self.ages.back_mut() {
                Some((at, revision)) if now.duration_since(*at) < self.mark => *revision = marks.revision,
                _ => self.ages.push_back((now, marks.revision)),
            }
        }
        self.marks = marks;
        self.deadline = deadline;
        let deletes = events.iter().filter(|e| e.kind == crate::EventKind::Delete).count();
        self.metrics.wrote((events.len() - deletes) as u64, deletes as u64);
        self.hub.publish(events);
    }

    fn failed(&mut self, fault: Fault) -> Error {
        let error = fault.tell(&self.slot.what());
        tracing::error!(%error, "a commit failed: opening the store anew");
        let began = Instant::now();
        self.broken = true;
        self.retry = began;
        self.recover();
        let enough = matches!(error, Error::Full { .. })
            .then(|| self.slot.free().unwrap_or(0).saturating_add(STALL_MARGIN));
        let until = Instant::now() + STALL.max(began.elapsed() * 4);
        self.stall = Some(Stall { until, enough, error: error.clone() });
        self.rest = until.max(Instant::now() + REST);
        error
    }

    /// Opens the file anew, and shows watchers what turned out to be durable although its commit reported an error.
    fn recover(&mut self) {
        let reopened = self.slot.reopen().and_then(|()| {
            self.slot.read(|txn| {
                let marks = table::marks(txn)?;
                let mut at = self.hub.published();
                let mut events = Vec::new();
                while at < marks.revision {
                    let (more, upto) = table::events(txn, "", at, marks.revision, BATCH)?;
                    events.extend(more);
                    at = upto;
                }
                Ok((marks, events))
            })
        });
        match reopened {
            Ok((marks, events)) => {
                self.broken = false;
                self.settle(marks, Some(0), events);
                tracing::info!(file = self.slot.what(), revision = marks.revision, "the store is open again");
            }
            Err(error) => {
                tracing::error!(%error, "the store cannot be opened: trying again");
                self.broken = true;
                self.retry = Instant::now() + REOPEN;
            }
        }
    }

    // === compaction ===

    fn compact(&mut self, revision: u64) -> Result<()> {
        if revision > self.marks.revision {
            return Err(Error::Future { requested: revision, current: self.marks.revision });
        }
        if revision <= self.marks.compacted {
            return Ok(());
        }
        // It is done by deletions.
        if let Some(error) = self.refusal(&self.room(), &Op::Delete) {
            return Err(error);
        }
        let marks = Marks { compacted: revision, ..self.marks };
        let done = catch_unwind(AssertUnwindSafe(|| -> Outcome<()> {
            let txn = self.slot.begin_write()?;
            table::set_marks(&txn, marks)?;
            Ok(txn.commit()?)
        }));
        match done.unwrap_or(Err(Fault::Row("a page could not be written"))) {
            Ok(()) => {
                self.marks = marks;
                self.metrics.compacted(revision);
                while self.ages.front().is_some_and(|(_, mark)| *mark <= revision) {
                    self.ages.pop_front();
                }
                Ok(())
            }
            Err(fault) => Err(self.failed(fault)),
        }
    }

    /// Compacts by age and by length.
    fn forget_old(&mut self) {
        let now = Instant::now();
        let mut goal = self.marks.revision.saturating_sub(self.config.history_revisions);
        while let Some((at, revision)) = self.ages.front()
            && *at + self.config.history + self.mark <= now
        {
            goal = goal.max(*revision);
            self.ages.pop_front();
        }
        // By length in steps, so as not to compact at every write once the bound is reached.
        let step = self.config.history_revisions / 8;
        let by_age = goal > self.marks.revision.saturating_sub(self.config.history_revisions);
        if goal > self.marks.compacted && (by_age || goal - self.marks.compacted > step)
            && let Err(error) = self.compact(goal)
        {
            tracing::warn!(%error, "history is not compacted now");
            self.ages.push_front((now, goal));
            self.rest = self.rest.max(Instant::now() + REST);
        }
    }

    /// One step of removing what compaction made superfluous.
    fn sweep(&mut self) {
        if self.marks.swept >= self.marks.compacted || self.broken || Instant::now() < self.rest || !self.room().deletes {
            return;
        }
        let began = Instant::now();
        let marks = self.marks;
        let slot = Arc::clone(&self.slot);
        let done = catch_unwind(AssertUnwindSafe(|| -> Outcome<u64> {
            let txn = slot.begin_write()?;
            let swept = Writing::open(&txn, marks.revision)?.sweep(marks.swept, marks.compacted, SWEEP_STEP)?;
            table::set_marks(&txn, Marks { swept, ..marks })?;
            txn.commit()?;
            Ok(swept)
        }));
        match done.unwrap_or(Err(Fault::Row("a page could not be written"))) {
            Ok(swept) => {
                self.marks.swept = swept;
                self.metrics.swept(began.elapsed());
            }
            Err(fault) => {
                self.failed(fault);
            }
        }
    }
}

fn attempt(slot: &Slot, marks: Marks, txns: &[&Txn], expire: Option<usize>) -> Outcome<Done> {
    let now = now_ms();
    let txn = slot.begin_write()?;
    let (mut events, mut outcomes) = (Vec::new(), Vec::with_capacity(txns.len()));
    let (revision, deadline, swept) = {
        let mut writing = Writing::open(&txn, marks.revision)?;
        let due = match expire {
            Some(limit) => writing.expired(now, limit)?,
            None => Vec::new(),
        };
        for txn in txns.iter().copied().chain(&due) {
            let (outcome, event) = writing.apply(txn, now)?;
            outcomes.push(outcome);
            events.extend(event);
        }
        let swept = match events.is_empty() || marks.swept >= marks.compacted {
            true => marks.swept,
            false => writing.sweep(marks.swept, marks.compacted, SWEEP_ALONG + 4 * events.len() as u64)?,
        };
        (writing.revision, writing.next_deadline()?, swept)
    };
    let done = Done { marks: Marks { revision, swept, ..marks }, events, outcomes, deadline };
    if done.events.is_empty() {
        // Nothing but conflicts: nothing to make durable.
        txn.abort()?;
    } else {
        table::set_marks(&txn, done.marks)?;
        txn.commit()?;
    }
    Ok(done)
}

/// What the free space of the disk allows. Deletions may use a quarter of the reserve that puts leave: they and the
/// compaction after them are how room is made.
struct Room {
    free: u64,
    puts: bool,
    deletes: bool,
}

impl Room {
    fn admits(&self, op: &Op) -> bool {
        match op {
            Op::Put { .. } => self.puts,
            Op::Delete => self.deletes,
        }
    }

    fn refusal(&self, what: &str) -> Error {
        Error::Full { detail: format!("{} bytes are free where {what} lies", self.free) }
    }
}
