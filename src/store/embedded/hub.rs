//! Watches in process: the writer publishes what it committed, watchers take it from bounded queues.
//!
//! A watch first catches up from the file, in steps, until the ring of recent events covers the rest; then it joins the
//! live watchers, under the same lock under which events are published: no event is missed or seen twice.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::file::Slot;
use super::table;
use crate::metrics::Metrics;
use crate::{Batch, Error, Event, Result, Watch};

/// Recent events that are kept for watchers who join, by number and by bytes.
const RING_EVENTS: usize = 8192;
const RING_BYTES: usize = 8 << 20;
/// What one watcher may leave waiting before it is cut off.
const QUEUE_EVENTS: usize = 65_536;
const QUEUE_BYTES: usize = 64 << 20;
/// Events that are read from the file at a time.
const STEP: usize = 512;

/// All watches of one store.
pub(super) struct Hub {
    state: Mutex<State>,
    metrics: Arc<Metrics>,
}

struct State {
    /// Everything up to here has been given to the watchers.
    published: u64,
    ring: VecDeque<Event>,
    ring_bytes: usize,
    watchers: HashMap<u64, Watcher>,
    next_id: u64,
    closed: bool,
}

struct Watcher {
    prefix: String,
    queue: mpsc::UnboundedSender<Batch>,
    load: Arc<Load>,
    /// The revision of the last batch sent.
    told: u64,
}

/// How much waits in a watcher's queue. The channel itself is unbounded; this is its bound.
#[derive(Default)]
struct Load {
    events: AtomicUsize,
    bytes: AtomicUsize,
    cut: AtomicBool,
}

/// The watcher's end. Dropping it ends the watch.
struct Live {
    id: u64,
    prefix: String,
    queue: mpsc::UnboundedReceiver<Batch>,
    load: Arc<Load>,
    hub: Arc<Hub>,
}

fn weight(event: &Event) -> usize {
    event.entry.key.len() + event.entry.value.len() + event.previous.as_ref().map_or(0, |p| p.value.len())
}

// === impl Hub ===

impl Hub {
    pub(super) fn new(published: u64, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                published,
                ring: VecDeque::new(),
                ring_bytes: 0,
                watchers: HashMap::new(),
                next_id: 0,
                closed: false,
            }),
            metrics,
        })
    }

    /// The last revision that watchers were given.
    pub(super) fn published(&self) -> u64 {
        self.state.lock().published
    }

    /// Gives committed events, in order, to every watcher whose prefix they match.
    pub(super) fn publish(&self, events: Vec<Event>) {
        let Some(last) = events.last().map(|e| e.entry.mod_revision) else { return };
        let mut state = self.state.lock();
        let state = &mut *state;
        let mut cut = Vec::new();
        for (id, watcher) in &mut state.watchers {
            let before = watcher.told;
            let mut held = true;
            for event in &events {
                if !event.entry.key.starts_with(&watcher.prefix) {
                    continue;
                }
                held = watcher.send(Batch { revision: event.entry.mod_revision, events: vec![event.clone()] });
                if !held {
                    break;
                }
            }
            if watcher.told != before {
                self.metrics.watch_backlog(&watcher.prefix, watcher.load.events.load(Ordering::Relaxed));
            }
            if !held {
                cut.push(*id);
            }
        }
        for id in cut {
            if let Some(watcher) = state.watchers.remove(&id) {
                tracing::warn!(prefix = watcher.prefix, "a store watch was too slow and was cut off");
                self.metrics.slow_watcher();
            }
        }
        state.published = last;
        for event in events {
            state.ring_bytes += weight(&event);
            state.ring.push_back(event);
        }
        while state.ring.len() > RING_EVENTS || state.ring_bytes > RING_BYTES {
            let Some(old) = state.ring.pop_front() else { break };
            state.ring_bytes -= weight(&old);
        }
        self.metrics.watchers(state.watchers.len());
    }

    /// Tells every watcher that was not told so how far the store is. Returns whether there was anybody to tell.
    pub(super) fn progress(&self) -> bool {
        let mut state = self.state.lock();
        let published = state.published;
        let mut told = false;
        for watcher in state.watchers.values_mut().filter(|w| w.told < published) {
            // An empty batch weighs nothing: this cannot cut anybody off.
            told |= watcher.send(Batch { revision: published, events: Vec::new() });
        }
        told
    }

    /// Ends every watch: the store is closing.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        state.watchers.clear();
    }

    /// Joins the live watchers after a revision, if the ring reaches back that far: the events in between come first.
    fn join(self: &Arc<Self>, prefix: &str, after: u64) -> Result<Option<Live>> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(closed());
        }
        let covered = state.ring.front().map_or(state.published, |e| e.entry.mod_revision - 1);
        if after < covered {
            return Ok(None);
        }
        let (sender, receiver) = mpsc::unbounded_channel();
        let load = Arc::new(Load::default());
        let mut watcher =
            Watcher { prefix: prefix.to_owned(), queue: sender, load: Arc::clone(&load), told: after };
        let missed = state.ring.partition_point(|e| e.entry.mod_revision <= after);
        for event in state.ring.range(missed..).filter(|e| e.entry.key.starts_with(prefix)) {
            // The ring is smaller than a queue: this cannot cut it off.
            watcher.send(Batch { revision: event.entry.mod_revision, events: vec![event.clone()] });
        }
        let id = state.next_id;
        state.next_id += 1;
        state.watchers.insert(id, watcher);
        self.metrics.watchers(state.watchers.len());
        Ok(Some(Live { id, prefix: prefix.to_owned(), queue: receiver, load, hub: Arc::clone(self) }))
    }
}

fn closed() -> Error {
    Error::Unavailable { detail: "the store is closed".into() }
}

impl Watcher {
    /// Puts a batch into the queue; `false` when the watcher must be cut off.
    fn send(&mut self, batch: Batch) -> bool {
        let bytes = batch.events.iter().map(weight).sum();
        self.told = batch.revision;
        let events = self.load.events.fetch_add(batch.events.len(), Ordering::Relaxed) + batch.events.len();
        let bytes = self.load.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if events > QUEUE_EVENTS || bytes > QUEUE_BYTES {
            self.load.cut.store(true, Ordering::Release);
            return false;
        }
        // A receiver that is gone takes itself off the list when it is dropped.
        let _ = self.queue.send(batch);
        true
    }
}

impl Live {
    /// The next batch; `None` when the watch is over without an error of its own.
    async fn next(&mut self) -> Result<Batch> {
        match self.queue.recv().await {
            Some(batch) => {
                self.load.events.fetch_sub(batch.events.len(), Ordering::Relaxed);
                self.load.bytes.fetch_sub(batch.events.iter().map(weight).sum(), Ordering::Relaxed);
                Ok(batch)
            }
            None if self.load.cut.load(Ordering::Acquire) => {
                let waiting = self.load.events.load(Ordering::Relaxed);
                Err(Error::SlowWatcher { prefix: self.prefix.clone(), waiting })
            }
            None => Err(closed()),
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        let mut state = self.hub.state.lock();
        state.watchers.remove(&self.id);
        self.hub.metrics.watchers(state.watchers.len());
    }
}

// === the stream ===

enum Stage {
    /// Reading the file; everything up to here was yielded.
    CatchingUp(u64, VecDeque<Event>),
    Live(Live),
    Over,
}

/// A watch that begins after a revision, which the caller has found to be neither compacted nor in the future.
pub(super) fn watch(hub: &Arc<Hub>, slot: &Arc<Slot>, prefix: &str, after: u64) -> Result<Watch> {
    let first = match hub.join(prefix, after)? {
        Some(live) => Stage::Live(live),
        None => Stage::CatchingUp(after, VecDeque::new()),
    };
    let context = (Arc::clone(hub), Arc::clone(slot), prefix.to_owned());
    Ok(Watch::new(futures::stream::unfold((first, context), |(mut stage, context)| async move {
        loop {
            match step(stage, &context).await {
                Ok((next, Some(batch))) => {
                    context.0.metrics.received(&context.2, &batch);
                    return Some((Ok(batch), (next, context)));
                }
                Ok((Stage::Over, None)) => return None,
                Ok((next, None)) => stage = next,
                Err(error) => return Some((Err(error), (Stage::Over, context))),
            }
        }
    })))
}

async fn step(stage: Stage, context: &(Arc<Hub>, Arc<Slot>, String)) -> Result<(Stage, Option<Batch>)> {
    match stage {
        Stage::Over => Ok((Stage::Over, None)),
        Stage::Live(mut live) => {
            let batch = live.next().await?;
            Ok((Stage::Live(live), Some(batch)))
        }
        Stage::CatchingUp(at, mut waiting) => {
            if let Some(event) = waiting.pop_front() {
                let batch = Batch { revision: event.entry.mod_revision, events: vec![event] };
                return Ok((Stage::CatchingUp(at, waiting), Some(batch)));
            }
            let (hub, slot, prefix) = context;
            if let Some(live) = hub.join(prefix, at)? {
                return Ok((Stage::Live(live), None));
            }
            let (slot, prefix, upto) = (Arc::clone(slot), prefix.clone(), hub.published());
            let read = move || slot.read(|txn| table::events(txn, &prefix, at, upto, STEP));
            let (events, at) = tokio::task::spawn_blocking(read)
                .await
                .unwrap_or_else(|error| Err(Error::Unavailable { detail: format!("reading the history: {error}") }))?;
            Ok((Stage::CatchingUp(at, events.into()), None))
        }
    }
}
