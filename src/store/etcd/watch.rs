//! A watch on etcd: previous values, progress, and reconnection from the last revision that was seen.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use etcd_client::{EventType, GetOptions, WatchOptions, WatchResponse, WatchStream};
use tokio::sync::watch::Receiver;
use tokio::time::{Instant, timeout};

use super::{Link, REQUEST_TIMEOUT, ROUNDS, revision, signed, told, unsigned};
use crate::{Batch, Entry, Error, Event, EventKind, Result, Watch, prefix_end};

/// How long a watch tries to reconnect before it ends with an error.
const PATIENCE: Duration = Duration::from_secs(60);

struct State {
    link: Arc<Link>,
    prefix: String,
    /// Everything up to here was yielded.
    seen: u64,
    stream: Option<WatchStream>,
    waiting: VecDeque<Batch>,
    progress: Receiver<u64>,
    over: bool,
}

/// Begins a watch; returns when etcd has confirmed it. etcd tells about a revision that cannot be watched only afterwards, in
/// the stream: so we ask first whether it can be read, which is the same condition.
pub(super) async fn open(link: Arc<Link>, prefix: &str, after: u64, progress: Receiver<u64>) -> Result<Watch> {
    let mut state = State {
        link,
        prefix: prefix.to_owned(),
        seen: after,
        stream: None,
        waiting: VecDeque::new(),
        progress,
        over: false,
    };
    state.progress.mark_unchanged();
    let readable = GetOptions::new().with_revision(signed(after.max(1))).with_count_only();
    if let Err(error) = state.link.peers.get(super::compact::KEY.into(), readable).await {
        return Err(state.link.about_revision(error, after).await);
    }
    let mut tried = 1;
    while let Err(error) = state.connect().await {
        if tried >= ROUNDS * state.link.peers.endpoints.len() || !matches!(error, Error::Unavailable { .. }) {
            return Err(error);
        }
        tried += 1;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(Watch::new(futures::stream::unfold(state, |mut state| async move {
        if state.over {
            return None;
        }
        let next = state.next().await;
        state.over = next.is_err();
        Some((next, state))
    })))
}

/// The revision up to which etcd is compacted, when a watch from `start` would need more history than there is.
pub(super) async fn compacted_at(link: &Link, start: u64) -> Result<u64> {
    let options = WatchOptions::new().with_start_revision(signed(start.max(1)));
    let asked = async {
        let mut stream = link.peers.current().1.watcher.clone().watch(super::compact::KEY, Some(options)).await.map_err(|e| told(&e))?;
        while let Some(response) = stream.message().await.map_err(|e| told(&e))? {
            if response.canceled() {
                return Ok(unsigned(response.compact_revision()));
            }
        }
        Err(super::odd("a watch that ended without a word"))
    };
    timeout(REQUEST_TIMEOUT, asked).await.unwrap_or_else(|_| Err(super::odd("nothing to a watch")))
}

impl State {
    async fn next(&mut self) -> Result<Batch> {
        let mut down_since: Option<Instant> = None;
        let mut pause = Duration::from_millis(50);
        loop {
            if let Some(batch) = self.waiting.pop_front() {
                self.seen = batch.revision;
                self.link.metrics.received(&self.prefix, &batch);
                return Ok(batch);
            }
            let failure = match self.message().await {
                Ok(Some(response)) => {
                    down_since = None;
                    self.take(&response)?;
                    continue;
                }
                Ok(None) => Error::Unavailable { detail: "etcd ended a watch".into() },
                Err(error @ Error::Unavailable { .. }) => error,
                Err(error) => return Err(error),
            };
            self.stream = None;
            let since = *down_since.get_or_insert_with(Instant::now);
            if since.elapsed() > PATIENCE {
                return Err(failure);
            }
            tracing::info!(prefix = self.prefix, error = %failure, "watch on etcd interrupted: connecting again");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(2));
        }
    }

    /// The next response, over a new connection when there is none. Passes requests for progress on meanwhile.
    async fn message(&mut self) -> Result<Option<WatchResponse>> {
        if self.stream.is_none() {
            self.connect().await?;
        }
        let Some(stream) = &mut self.stream else { return Ok(None) };
        loop {
            tokio::select! {
                response = stream.message() => return response.map_err(|error| told(&error)),
                // When the store itself is gone nobody asks any more, and the watch goes on.
                Ok(()) = self.progress.changed() => stream.request_progress().await.map_err(|error| told(&error))?,
            }
        }
    }

    /// Opens the stream behind what was seen.
    async fn connect(&mut self) -> Result<()> {
        let mut options =
            WatchOptions::new().with_start_revision(signed(self.seen + 1)).with_prev_key().with_progress_notify();
        let key = match prefix_end(self.prefix.as_bytes()) {
            Some(end) => {
                options = options.with_range(end);
                self.prefix.clone().into_bytes()
            }
            None => {
                options = options.with_range(vec![0]);
                vec![0]
            }
        };
        let (turn, endpoint) = self.link.peers.current();
        let mut watcher = endpoint.watcher.clone();
        let begin = async {
            let mut stream = watcher.watch(key, Some(options)).await.map_err(|error| told(&error))?;
            let response = stream.message().await.map_err(|error| told(&error))?;
            Ok((stream, response))
        };
        let begun = timeout(REQUEST_TIMEOUT, begin)
            .await
            .unwrap_or_else(|_| Err(Error::Unavailable { detail: "etcd did not confirm a watch in time".into() }));
        if matches!(begun, Err(Error::Unavailable { .. })) {
            self.link.peers.give_up(turn);
        }
        let (stream, response) = begun?;
        let response = response.ok_or_else(|| super::odd("a watch that ended at once"))?;
        self.stream = Some(stream);
        self.take(&response)
    }

    fn take(&mut self, response: &WatchResponse) -> Result<()> {
        if response.canceled() {
            let compacted = unsigned(response.compact_revision());
            if compacted > 0 {
                self.link.compacted.fetch_max(compacted, Ordering::Relaxed);
                return Err(Error::Compacted { requested: self.seen, compacted });
            }
            return Err(Error::Unavailable { detail: format!("etcd ended a watch: {}", response.cancel_reason()) });
        }
        let mut batches: Vec<Batch> = Vec::new();
        for event in response.events() {
            let event = to_event(event)?;
            match batches.last_mut() {
                Some(batch) if batch.revision == event.entry.mod_revision => batch.events.push(event),
                _ => batches.push(Batch { revision: event.entry.mod_revision, events: vec![event] }),
            }
        }
        if batches.is_empty() && !response.created() {
            // Progress: nothing up to here is missing.
            batches.push(Batch { revision: revision(response.header()), events: Vec::new() });
        }
        let seen = self.waiting.back().map_or(self.seen, |b| b.revision);
        // A progress answer may tell an older revision than the last event.
        self.waiting.extend(batches.into_iter().filter(|b| b.revision > seen || b.events.is_empty() && b.revision == seen));
        Ok(())
    }
}

fn to_event(event: &etcd_client::Event) -> Result<Event> {
    let kv = event.kv().ok_or_else(|| super::odd("an event without its key"))?;
    let entry = to_entry(kv)?;
    let previous = event.prev_kv().map(to_entry).transpose()?;
    Ok(match event.event_type() {
        EventType::Put => {
            let created = entry.create_revision == entry.mod_revision;
            Event { kind: EventKind::Put { created }, entry, previous }
        }
        EventType::Delete => {
            let create_revision = previous.as_ref().map_or(0, |p| p.create_revision);
            Event { kind: EventKind::Delete, entry: Entry { create_revision, ..entry }, previous }
        }
    })
}

fn to_entry(kv: &etcd_client::KeyValue) -> Result<Entry> {
    let key = kv.key_str().map_err(|error| Error::Damaged { what: "etcd".into(), detail: format!("a key: {error}") })?;
    Ok(Entry {
        key: key.to_owned(),
        value: Bytes::copy_from_slice(kv.value()),
        create_revision: unsigned(kv.create_revision()),
        mod_revision: unsigned(kv.mod_revision()),
    })
}
