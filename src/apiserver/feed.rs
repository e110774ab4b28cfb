//! The feed: one watch of the whole store that drives every cache.
//!
//! Invariants:
//! - One task applies changes, revision by revision; a reader who waited for a revision sees all of it.
//! - A resource that appears at run time (a CRD) is filled at exactly the feed's revision, between two changes.
//! - When the store's watch breaks off, the feed goes on from its revision; when the store has compacted that revision away, it
//!   reads everything anew and ends all watches (their clients list again).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::StreamExt;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use windlass_api::meta;
use windlass_api::registry::Resource;
use windlass_store::{Batch, Entry, EventKind, Range, Store};

use crate::cache::{Caches, Listener, ResourceCache, Stored};

/// All objects live under this.
pub const ROOT: &str = "/registry/";
/// How long a broken watch waits before the next attempt.
const RETRY: Duration = Duration::from_millis(500);
/// How often, at most and only while changes come in, old events are let go.
const TRIM_EVERY: Duration = Duration::from_secs(30);

/// The revision up to which the caches are complete, and who waits for it.
#[derive(Default)]
pub struct Progress {
    current: AtomicU64,
    /// Nothing will come any more: the feed has ended.
    closed: AtomicBool,
    waiters: Mutex<BTreeMap<u64, Vec<oneshot::Sender<()>>>>,
}

impl Progress {
    pub fn current(&self) -> u64 {
        self.current.load(Ordering::Acquire)
    }

    fn advance(&self, revision: u64) {
        if revision <= self.current() {
            return;
        }
        self.current.store(revision, Ordering::Release);
        let mut waiters = self.waiters.lock();
        if waiters.is_empty() {
            return;
        }
        let later = waiters.split_off(&(revision + 1));
        let due = std::mem::replace(&mut *waiters, later);
        drop(waiters);
        for waiter in due.into_values().flatten() {
            let _ = waiter.send(());
        }
    }

    /// Lets everybody go who waits, and wait nobody from now on: who waits holds the store open.
    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.waiters.lock().clear();
    }

    /// Waits until the caches hold `revision`; false if that did not happen in time, or never will.
    pub async fn reach(&self, revision: u64, patience: Duration) -> bool {
        if self.current() >= revision {
            return true;
        }
        let (tell, told) = oneshot::channel();
        {
            let mut waiters = self.waiters.lock();
            // The feed may have got there, or ended, between the two looks.
            if self.current() >= revision {
                return true;
            }
            if self.closed.load(Ordering::Acquire) {
                return false;
            }
            waiters.entry(revision).or_default().push(tell);
        }
        let reached = matches!(tokio::time::timeout(patience, told).await, Ok(Ok(())));
        if !reached {
            let mut waiters = self.waiters.lock();
            if let Some(list) = waiters.get_mut(&revision) {
                list.retain(|w| !w.is_closed());
                if list.is_empty() {
                    waiters.remove(&revision);
                }
            }
        }
        reached
    }
}

/// Writes of this process that the feed has yet to see, by key: the bytes and the tree they were made of.
/// Bounded by the number of writes in flight.
#[derive(Default)]
pub struct PendingWrites(pub(crate) Mutex<HashMap<String, (Bytes, Value)>>);

enum Command {
    Add(Arc<Resource>, oneshot::Sender<Result<(), windlass_store::Error>>),
}

/// The running feed.
pub(crate) struct Feed {
    pub caches: Caches,
    pub progress: Progress,
    commands: mpsc::Sender<Command>,
    /// Held while changes are applied, so that a new listener misses nothing and hears nothing twice.
    applying: Mutex<()>,
    pending: Arc<PendingWrites>,
}

impl Feed {
    /// Reads the whole store into caches for `resources` and follows it until `shutdown`.
    pub async fn start(
        store: Arc<dyn Store>,
        resources: impl IntoIterator<Item = Arc<Resource>>,
        pending: Arc<PendingWrites>,
        shutdown: CancellationToken,
    ) -> Result<Arc<Feed>, windlass_store::Error> {
        let (commands, inbox) = mpsc::channel(64);
        let feed = Arc::new(Feed { caches: Caches::default(), progress: Progress::default(), commands, applying: Mutex::new(()), pending });
        for resource in resources {
            feed.caches.add(&resource, 0);
        }
        let all = read(&*store, ROOT, None).await?;
        feed.load(&all.0, all.1);
        feed.progress.advance(all.1);
        let following = feed.clone();
        tokio::spawn(async move {
            following.clone().follow(store, inbox, shutdown).await;
            following.progress.close();
            // Listeners hold what holds this feed; letting them go is what frees it all, and closes the store.
            following.caches.all().iter().for_each(|c| c.retire());
        });
        Ok(feed)
    }

    /// Adds a cache for a resource that appeared, filled with what the store holds of it.
    pub async fn add(&self, resource: &Arc<Resource>) -> Result<(), windlass_store::Error> {
        let (done, wait) = oneshot::channel();
        let gone = || windlass_store::Error::Unavailable { detail: "the server is stopping".into() };
        self.commands.send(Command::Add(resource.clone(), done)).await.map_err(|_| gone())?;
        wait.await.map_err(|_| gone())?
    }

    /// Registers a listener with a cache: all objects first, then every change.
    pub fn listen(&self, cache: &ResourceCache, listener: Listener) {
        let _quiet = self.applying.lock();
        cache.listen(listener);
    }

    fn load(&self, entries: &[Entry], revision: u64) {
        let _applying = self.applying.lock();
        let mut by_cache: BTreeMap<String, (Arc<ResourceCache>, Vec<Stored>)> = BTreeMap::new();
        for cache in self.caches.all() {
            by_cache.insert(cache.prefix.clone(), (cache, Vec::new()));
        }
        for entry in entries {
            let Some((cache, key)) = self.caches.owner(&entry.key) else { continue };
            if let (Some(object), Some(slot)) = (stored(&cache, key, entry), by_cache.get_mut(&cache.prefix)) {
                slot.1.push(object);
            }
        }
        for (cache, objects) in by_cache.into_values() {
            cache.fill(objects, revision);
        }
    }

    async fn follow(self: Arc<Self>, store: Arc<dyn Store>, mut inbox: mpsc::Receiver<Command>, shutdown: CancellationToken) {
        let mut trimmed = Instant::now();
        'connect: loop {
            let since = self.progress.current();
            let mut watch = match store.watch(ROOT, since).await {
                Ok(watch) => watch,
                Err(windlass_store::Error::Compacted { .. }) => {
                    self.start_over(&*store, &shutdown).await;
                    if shutdown.is_cancelled() {
                        return;
                    }
                    continue;
                }
                Err(error) => {
                    tracing::warn!(%error, since, "cannot watch the store; trying again");
                    tokio::select! {
                        () = tokio::time::sleep(RETRY) => continue,
                        () = shutdown.cancelled() => return,
                    }
                }
            };
            loop {
                tokio::select! {
                    () = shutdown.cancelled() => return,
                    Some(command) = inbox.recv() => self.command(&*store, command).await,
                    batch = watch.next() => match batch {
                        Some(Ok(batch)) => {
                            self.apply(&batch);
                            if trimmed.elapsed() > TRIM_EVERY {
                                trimmed = Instant::now();
                                self.caches.all().iter().for_each(|c| c.trim());
                                crate::cache::stored::forget_recent();
                            }
                        }
                        Some(Err(error)) => {
                            tracing::warn!(%error, "the store's watch broke off; resuming");
                            continue 'connect;
                        }
                        None => continue 'connect,
                    },
                }
            }
        }
    }

    fn apply(&self, batch: &Batch) {
        {
            let _applying = self.applying.lock();
            for event in &batch.events {
                let Some((cache, key)) = self.caches.owner(&event.entry.key) else { continue };
                match event.kind {
                    EventKind::Delete => cache.apply(batch.revision, key, None),
                    _ => {
                        let mut object = stored(&cache, key, &event.entry);
                        if let (Some(object), Some(mut value)) = (&mut object, self.pending.take(&event.entry.key, &event.entry.value)) {
                            meta::set_resource_version(&mut value, object.revision);
                            object.set_value(Arc::new(value));
                        }
                        cache.apply(batch.revision, key, object);
                    }
                }
            }
        }
        self.progress.advance(batch.revision);
    }

    async fn command(&self, store: &dyn Store, command: Command) {
        match command {
            Command::Add(resource, done) => {
                let revision = self.progress.current();
                let prefix = resource.storage_prefix();
                let result = read(store, &prefix, Some(revision)).await.map(|(entries, _)| {
                    let cache = self.caches.add(&resource, revision);
                    if cache.is_empty() {
                        let objects = entries.iter().filter_map(|e| stored(&cache, e.key.strip_prefix(&prefix)?, e));
                        cache.fill(objects.collect::<Vec<_>>(), revision);
                    }
                });
                let _ = done.send(result);
            }
        }
    }

    /// The revision that the feed had is compacted away: everything is read anew, and the differences are applied as changes so that
    /// listeners stay right; watchers are ended, because they would miss what happened between.
    async fn start_over(&self, store: &dyn Store, shutdown: &CancellationToken) {
        tracing::warn!("the store has compacted the revision of the watch cache; reading everything anew");
        let (entries, revision) = loop {
            match read(store, ROOT, None).await {
                Ok(all) => break all,
                Err(error) => tracing::warn!(%error, "cannot read the store; trying again"),
            }
            tokio::select! {
                () = tokio::time::sleep(RETRY) => {}
                () = shutdown.cancelled() => return,
            }
        };
        let _applying = self.applying.lock();
        let mut seen: BTreeMap<String, HashSet<String>> = BTreeMap::new();
        for cache in self.caches.all() {
            cache.end_watches();
        }
        for entry in &entries {
            let Some((cache, key)) = self.caches.owner(&entry.key) else { continue };
            seen.entry(cache.prefix.clone()).or_default().insert(key.to_owned());
            if cache.get(key).is_none_or(|old| old.revision != entry.mod_revision) {
                cache.apply(revision, key, stored(&cache, key, entry));
            }
        }
        for cache in self.caches.all() {
            let seen = seen.remove(&cache.prefix).unwrap_or_default();
            for old in cache.all(None) {
                if !seen.contains(&**old.key()) {
                    cache.apply(revision, old.key(), None);
                }
            }
            cache.forget_history(revision);
        }
        drop(_applying);
        self.progress.advance(revision);
    }
}

fn stored(cache: &ResourceCache, key: &str, entry: &Entry) -> Option<Stored> {
    let resource = cache.resource.read().clone();
    let adapted = if resource.custom { adapt(&resource, &entry.value) } else { None };
    let raw = adapted.as_deref().unwrap_or(&entry.value);
    let object = Stored::new(key, raw, entry.mod_revision, cache.paths_ref());
    if object.is_none() {
        tracing::error!(key = entry.key, "the store holds something that is not an object; it is left alone and not served");
    }
    object
}

/// A custom resource's schema may have changed since an object was written: what is unknown now is not shown, and new defaults are.
/// `None` when nothing is to be changed.
fn adapt(resource: &Resource, raw: &[u8]) -> Option<Vec<u8>> {
    let mut value: Value = serde_json::from_slice(raw).ok()?;
    let before = value.clone();
    let ty = resource.stored().schema;
    resource.schemas.prune(ty, &mut value);
    resource.schemas.apply_defaults(ty, &mut value);
    if value == before { None } else { serde_json::to_vec(&value).ok() }
}

/// Reads everything under a prefix, page by page, at one revision.
pub(crate) async fn read(store: &dyn Store, prefix: &str, revision: Option<u64>) -> Result<(Vec<Entry>, u64), windlass_store::Error> {
    let mut range = Range { prefix: prefix.to_owned(), start_after: None, limit: Some(5_000), revision };
    let mut all = Vec::new();
    loop {
        let page = store.range(range.clone()).await?;
        range.start_after = page.entries.last().map(|e| e.key.clone());
        range.revision.get_or_insert(page.revision);
        all.extend(page.entries);
        if !page.more {
            return Ok((all, range.revision.unwrap_or(page.revision)));
        }
    }
}
