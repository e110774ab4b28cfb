//! The one door to objects, for handlers, admission, authorizers and the server's own loops.
//!
//! Invariants:
//! - An object is serialised once, when it is written; what the cache makes of those bytes is shared by all readers.
//! - A write returns after the caches hold it, so that whoever wrote reads its own write, and admission and RBAC have seen it.
//! - Nothing here checks rights or runs admission; [`crate::rest`] does.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::RwLock;
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use windlass_api::registry::{Registry, Resource, Storage};
use windlass_api::strategy::Context;
use windlass_api::{ApiError, meta};
use windlass_store::{Expect, Op, Outcome, Range, Store, Txn};

pub use crate::cache::{CacheEvent, Change, Listener, Stored};
use crate::cache::{Filter, Page, ResourceCache};
use crate::feed::{Feed, PendingWrites};

/// How long a write waits for the caches. They are in the same process as an embedded store, or one network hop from etcd.
const CACHE_PATIENCE: Duration = Duration::from_secs(3);
/// How often a compare-and-swap starts again before it gives up.
const MAX_ATTEMPTS: usize = 100;

type Rows = HashMap<String, HashMap<String, Arc<Resource>>>;

struct Inner {
    store: Arc<dyn Store>,
    feed: Arc<Feed>,
    registry: RwLock<Arc<Registry>>,
    /// The registry's rows by group, then by plural name.
    rows: RwLock<Rows>,
    /// No other process writes to the store: what was acknowledged is in the caches.
    exclusive: bool,
    event_ttl: Duration,
    pending: Arc<PendingWrites>,
}

/// Objects of all resources, cheap to clone.
#[derive(Clone)]
pub struct Objects(Arc<Inner>);

/// An object as a compare-and-swap sees it.
#[derive(Clone, Debug)]
pub struct Current {
    pub stored: Arc<Stored>,
    /// Read from the store itself: an error computed from it is final.
    pub fresh: bool,
}

/// How a conditional write ended.
pub enum Swap {
    Done(Arc<Stored>),
    /// Somebody else was faster; this is what is there now.
    Lost(Current),
    Gone,
}

/// A list and the revision at which it is true.
pub struct Listed {
    pub page: Page,
    pub revision: u64,
}

impl std::fmt::Debug for Objects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Objects(@{})", self.revision())
    }
}

impl Objects {
    /// Reads the store and follows it. `exclusive`: this process is the store's only writer.
    pub async fn start(
        store: Arc<dyn Store>,
        registry: Arc<Registry>,
        exclusive: bool,
        event_ttl: Duration,
        shutdown: CancellationToken,
    ) -> Result<Objects, windlass_store::Error> {
        let pending = Arc::new(PendingWrites::default());
        let stored = registry.resources().filter(|r| r.storage == Storage::Store && r.stored_as.is_none());
        let feed = Feed::start(store.clone(), stored.cloned().collect::<Vec<_>>(), pending.clone(), shutdown).await?;
        let objects = Objects(Arc::new(Inner { store, feed, rows: RwLock::new(rows(&registry)), registry: RwLock::new(registry), exclusive, event_ttl, pending }));
        Ok(objects)
    }

    /// The resources served at this moment.
    pub fn registry(&self) -> Arc<Registry> {
        self.0.registry.read().clone()
    }

    pub(crate) fn set_registry(&self, registry: Arc<Registry>) {
        *self.0.rows.write() = rows(&registry);
        *self.0.registry.write() = registry;
    }

    /// A resource by group and plural name.
    pub fn resource(&self, group: &str, plural: &str) -> Option<Arc<Resource>> {
        self.0.rows.read().get(group)?.get(plural).cloned()
    }

    /// The store below, for what is not an object (sealed keys, leases of servers).
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.0.store
    }

    /// The revision that the caches have reached.
    pub fn revision(&self) -> u64 {
        self.0.feed.progress.current()
    }

    pub(crate) fn feed(&self) -> &Arc<Feed> {
        &self.0.feed
    }

    /// The cache of a resource; `None` for virtual and review resources and for custom ones that are not established.
    pub fn cache(&self, resource: &Resource) -> Option<Arc<ResourceCache>> {
        match &resource.stored_as {
            None => self.0.feed.caches.get(&resource.group, &resource.plural),
            Some((group, plural)) => self.0.feed.caches.get(group, plural),
        }
    }

    pub(crate) fn require_cache(&self, resource: &Resource) -> Result<Arc<ResourceCache>, ApiError> {
        self.cache(resource).ok_or_else(|| ApiError::service_unavailable(format!("{} is not served at this moment", resource.gr())))
    }

    // === Reads ===

    /// The object as it is now, no older than any acknowledged write.
    pub async fn get(&self, resource: &Resource, namespace: &str, name: &str) -> Result<Arc<Stored>, ApiError> {
        let found = if self.0.exclusive {
            self.cached(resource, namespace, name)
        } else {
            self.fresh(resource, namespace, name).await?.map(|c| c.stored)
        };
        found.ok_or_else(|| ApiError::not_found(&resource.group, &resource.plural, name))
    }

    /// The object as the cache has it; another API server's last writes may be missing.
    pub fn cached(&self, resource: &Resource, namespace: &str, name: &str) -> Option<Arc<Stored>> {
        self.cache(resource)?.get(&object_key(resource, namespace, name))
    }

    /// All objects in the cache, of one namespace or of all.
    pub fn cached_list(&self, resource: &Resource, namespace: Option<&str>) -> Vec<Arc<Stored>> {
        self.cache(resource).map(|c| c.all(namespace)).unwrap_or_default()
    }

    /// Calls `listener` for every object there is (as added), then for every change, in order, never twice at once.
    /// It runs on the feed's task: it must be quick, and must not register further listeners.
    pub fn on_change(&self, resource: &Resource, listener: Listener) {
        if let Some(cache) = self.cache(resource) {
            self.0.feed.listen(&cache, listener);
        }
    }

    /// A page of the objects that match, true at the revision that is returned: that of the caches, which is at least that of every
    /// acknowledged write when `consistent`.
    pub(crate) async fn list(&self, cache: &ResourceCache, filter: &Filter, limit: Option<usize>, consistent: bool) -> Result<Listed, ApiError> {
        if consistent {
            self.catch_up().await?;
        }
        loop {
            let revision = self.revision();
            if let Some(page) = cache.page_at(revision, filter, None, limit) {
                return Ok(Listed { page, revision });
            }
        }
    }

    /// A page as of a revision that the cache's history does not reach back to.
    pub(crate) async fn page_from_store(
        &self,
        cache: &ResourceCache,
        filter: &Filter,
        revision: u64,
        after: Option<&str>,
        limit: Option<usize>,
    ) -> Result<Page, ApiError> {
        let expired = |error: windlass_store::Error| match error {
            windlass_store::Error::Compacted { .. } => ApiError::expired("The resourceVersion for the provided list is too old."),
            other => store_error(&other),
        };
        let prefix = match &filter.namespace {
            Some(ns) => format!("{}{ns}/", cache.prefix),
            None => cache.prefix.clone(),
        };
        let mut range = Range { prefix, start_after: after.map(|a| format!("{}{a}", cache.prefix)), limit: Some(1_000), revision: Some(revision) };
        let mut page = Page { items: Vec::new(), next: None, remaining: None };
        loop {
            let found = self.0.store.range(range.clone()).await.map_err(expired)?;
            for entry in &found.entries {
                let Some(key) = entry.key.strip_prefix(&cache.prefix) else { continue };
                let Some(object) = Stored::new(key, &entry.value, entry.mod_revision, cache.paths_ref()) else { continue };
                if !filter.matches(&object) {
                    continue;
                }
                if limit.is_some_and(|l| page.items.len() >= l) {
                    page.next = page.items.last().map(|o: &Arc<Stored>| o.key().clone());
                    return Ok(page);
                }
                page.items.push(Arc::new(object));
            }
            if !found.more {
                return Ok(page);
            }
            range.start_after = found.entries.last().map(|e| e.key.clone());
        }
    }

    /// Waits until the caches hold everything that was acknowledged before the call.
    pub(crate) async fn catch_up(&self) -> Result<(), ApiError> {
        if self.0.exclusive {
            return Ok(());
        }
        let revision = self.0.store.status().await.map_err(|e| store_error(&e))?.revision;
        if self.revision() >= revision {
            return Ok(());
        }
        self.0.store.request_progress().await.map_err(|e| store_error(&e))?;
        self.wait_for(revision).await
    }

    /// Waits until the caches hold `revision`; 504 as upstream if they do not get there.
    pub(crate) async fn wait_for(&self, revision: u64) -> Result<(), ApiError> {
        if self.0.feed.progress.reach(revision, CACHE_PATIENCE).await {
            return Ok(());
        }
        let message = format!("Too large resource version: {revision}, current: {}", self.revision());
        Err(ApiError::timeout(message, 1).with_cause("ResourceVersionTooLarge", "Too large resource version", ""))
    }

    /// What the cache has, or if it has nothing what the store has: where a compare-and-swap begins.
    pub(crate) async fn current(&self, resource: &Resource, namespace: &str, name: &str) -> Result<Option<Current>, ApiError> {
        match self.cached(resource, namespace, name) {
            Some(stored) => Ok(Some(Current { stored, fresh: false })),
            None if self.0.exclusive => Ok(None),
            None => self.fresh(resource, namespace, name).await,
        }
    }

    /// What the store has.
    pub(crate) async fn fresh(&self, resource: &Resource, namespace: &str, name: &str) -> Result<Option<Current>, ApiError> {
        let cache = self.require_cache(resource)?;
        let key = object_key(resource, namespace, name);
        let entry = self.0.store.get(&format!("{}{key}", cache.prefix)).await.map_err(|e| store_error(&e))?;
        entry.map(|e| self.adopt(&cache, &key, &e.value, e.mod_revision)).transpose()
    }

    fn adopt(&self, cache: &ResourceCache, key: &str, raw: &[u8], revision: u64) -> Result<Current, ApiError> {
        let stored = match cache.get(key) {
            Some(stored) if stored.revision == revision => stored,
            _ => Arc::new(Stored::new(key, raw, revision, cache.paths_ref()).ok_or_else(|| damaged(cache, key))?),
        };
        Ok(Current { stored, fresh: true })
    }

    // === Writes ===

    /// Creates an object after filling in what every object has (uid, creation time, defaults). No admission, no validation.
    pub async fn create(&self, resource: &Arc<Resource>, namespace: &str, name: &str, mut object: Value) -> Result<Arc<Stored>, ApiError> {
        let now = jiff::Timestamp::now();
        fill_identity(resource, namespace, name, now, &mut object);
        let context = Context { resource, version: &resource.storage_version, subresource: None, now, user: None };
        resource.strategy.defaults(&context, &mut object);
        resource.strategy.prepare_create(&context, &mut object);
        self.insert(resource, namespace, name, object).await
    }

    /// Changes an object by compare-and-swap: `f` is called with what is there until its result could be stored.
    pub async fn update_with(
        &self,
        resource: &Resource,
        namespace: &str,
        name: &str,
        mut f: impl FnMut(Value) -> Result<Value, ApiError> + Send,
    ) -> Result<Arc<Stored>, ApiError> {
        let not_found = || ApiError::not_found(&resource.group, &resource.plural, name);
        let mut current = self.current(resource, namespace, name).await?.ok_or_else(not_found)?;
        for _ in 0..MAX_ATTEMPTS {
            let new = match f((*current.stored.value()).clone()) {
                Ok(new) => new,
                Err(error) if current.fresh => return Err(error),
                Err(_) => {
                    current = self.fresh(resource, namespace, name).await?.ok_or_else(not_found)?;
                    continue;
                }
            };
            match self.replace(resource, &current, new).await? {
                Swap::Done(stored) => return Ok(stored),
                Swap::Lost(now) => current = now,
                Swap::Gone => return Err(not_found()),
            }
        }
        Err(self.contended(resource, name))
    }

    /// Deletes an object at once, whatever its finalizers; with `expect`, only at that revision.
    pub async fn delete(&self, resource: &Resource, namespace: &str, name: &str, expect: Option<u64>) -> Result<Option<Arc<Stored>>, ApiError> {
        let Some(mut current) = self.current(resource, namespace, name).await? else { return Ok(None) };
        for _ in 0..MAX_ATTEMPTS {
            if expect.is_some_and(|e| e != current.stored.revision) {
                return Err(ApiError::conflict(&resource.group, &resource.plural, name, "the object has been modified"));
            }
            match self.remove(resource, &current).await? {
                Swap::Done(stored) => return Ok(Some(stored)),
                Swap::Lost(now) => current = now,
                Swap::Gone => return Ok(None),
            }
        }
        Err(self.contended(resource, name))
    }

    pub(crate) fn contended(&self, resource: &Resource, name: &str) -> ApiError {
        ApiError::conflict(&resource.group, &resource.plural, name, "too many others are changing it; please try again")
    }

    /// Stores a complete new object; 409 if there is one.
    pub(crate) async fn insert(&self, resource: &Resource, namespace: &str, name: &str, object: Value) -> Result<Arc<Stored>, ApiError> {
        let cache = self.require_cache(resource)?;
        let key = object_key(resource, namespace, name);
        match self.put(resource, &cache, &key, Expect::Absent, object).await? {
            Ok(stored) => Ok(stored),
            Err(_) => Err(ApiError::already_exists(&resource.group, &resource.plural, name)),
        }
    }

    /// Stores `object` in place of `current`. An object that did not change is not written.
    pub(crate) async fn replace(&self, resource: &Resource, current: &Current, object: Value) -> Result<Swap, ApiError> {
        let cache = self.require_cache(resource)?;
        let key = current.stored.key().clone();
        if *current.stored.value() == object {
            if current.fresh || self.0.exclusive {
                return Ok(Swap::Done(current.stored.clone()));
            }
            let (namespace, name) = (current.stored.namespace().to_owned(), current.stored.name().to_owned());
            return Ok(match self.fresh(resource, &namespace, &name).await? {
                Some(now) if now.stored.revision == current.stored.revision => Swap::Done(now.stored),
                Some(now) => Swap::Lost(now),
                None => Swap::Gone,
            });
        }
        let expect = Expect::ModRevision(current.stored.revision);
        Ok(match self.put(resource, &cache, &key, expect, object).await? {
            Ok(stored) => Swap::Done(stored),
            Err(Some(now)) => Swap::Lost(self.adopt(&cache, &key, &now.value, now.mod_revision)?),
            Err(None) => Swap::Gone,
        })
    }

    /// Removes `current`. `Done` holds its last state, with the revision of the deletion.
    pub(crate) async fn remove(&self, resource: &Resource, current: &Current) -> Result<Swap, ApiError> {
        let cache = self.require_cache(resource)?;
        let key = current.stored.key();
        let txn = Txn { key: format!("{}{key}", cache.prefix), expect: Expect::ModRevision(current.stored.revision), op: Op::Delete };
        match self.0.store.txn(txn).await.map_err(|e| store_error(&e))? {
            Outcome::Committed { revision, .. } => {
                self.settle(revision).await;
                Ok(Swap::Done(Arc::new(current.stored.at_revision(revision, cache.paths_ref()))))
            }
            Outcome::Conflict { current: Some(now) } => Ok(Swap::Lost(self.adopt(&cache, key, &now.value, now.mod_revision)?)),
            Outcome::Conflict { current: None } => Ok(Swap::Gone),
        }
    }

    async fn put(
        &self,
        resource: &Resource,
        cache: &ResourceCache,
        key: &str,
        expect: Expect,
        mut object: Value,
    ) -> Result<Result<Arc<Stored>, Option<windlass_store::Entry>>, ApiError> {
        meta::remove(&mut object, "resourceVersion");
        meta::remove(&mut object, "selfLink");
        let bytes = Bytes::from(serde_json::to_vec(&object).map_err(ApiError::internal)?);
        let ttl = (resource.plural == "events").then_some(self.0.event_ttl).filter(|t| !t.is_zero());
        let full = format!("{}{key}", cache.prefix);
        self.0.pending.add(&full, bytes.clone(), object);
        let txn = Txn { key: full.clone(), expect, op: Op::Put { value: bytes.clone(), ttl } };
        let outcome = self.0.store.txn(txn).await;
        let revision = match outcome {
            Ok(Outcome::Committed { revision, .. }) => revision,
            Ok(Outcome::Conflict { current }) => {
                self.0.pending.remove(&full, &bytes);
                return Ok(Err(current));
            }
            Err(error) => {
                self.0.pending.remove(&full, &bytes);
                return Err(store_error(&error));
            }
        };
        self.settle(revision).await;
        if let Some(stored) = cache.get(key).filter(|s| s.revision == revision) {
            return Ok(Ok(stored));
        }
        // Overwritten already, or the caches lag: what was written is still the answer.
        self.0.pending.remove(&full, &bytes);
        let stored = Stored::new(key, &bytes, revision, cache.paths_ref()).ok_or_else(|| damaged(cache, key))?;
        Ok(Ok(Arc::new(stored)))
    }

    /// Waits until the caches hold a write, but fails no write that is durable.
    async fn settle(&self, revision: u64) {
        if !self.0.feed.progress.reach(revision, CACHE_PATIENCE).await {
            tracing::warn!(revision, at = self.revision(), "the watch cache lags behind the store");
        }
    }
}

fn rows(registry: &Registry) -> Rows {
    let mut rows = Rows::new();
    for resource in registry.resources() {
        rows.entry(resource.group.clone()).or_default().entry(resource.plural.clone()).or_insert_with(|| resource.clone());
    }
    rows
}

/// Sets what the server owns in a new object's metadata.
pub(crate) fn fill_identity(resource: &Resource, namespace: &str, name: &str, now: jiff::Timestamp, object: &mut Value) {
    object["apiVersion"] = resource.api_version(&resource.storage_version).into();
    object["kind"] = resource.kind.as_str().into();
    meta::set_name(object, name);
    if resource.namespaced {
        meta::set_namespace(object, namespace);
    }
    meta::set_uid(object, &uuid());
    meta::set(object, "creationTimestamp", meta::now_rfc3339(now));
}

/// A random (version 4) UUID.
pub fn uuid() -> String {
    let mut b: [u8; 16] = rand::random();
    b[6] = b[6] & 0x0f | 0x40;
    b[8] = b[8] & 0x3f | 0x80;
    let mut text = String::with_capacity(36);
    for (i, byte) in b.iter().enumerate() {
        if matches!(i, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        for digit in [byte >> 4, byte & 15] {
            text.push(char::from(b"0123456789abcdef"[usize::from(digit)]));
        }
    }
    text
}

/// The key of an object below its resource's prefix.
pub fn object_key(resource: &Resource, namespace: &str, name: &str) -> String {
    if resource.namespaced { format!("{namespace}/{name}") } else { name.to_owned() }
}

fn damaged(cache: &ResourceCache, key: &str) -> ApiError {
    ApiError::internal(format!("what the store holds under {}{key} is not an object; restore it from a checkpoint", cache.prefix))
}

/// A store's refusal as the API answers it.
pub(crate) fn store_error(error: &windlass_store::Error) -> ApiError {
    use windlass_store::Error;
    match error {
        Error::Compacted { .. } => {
            ApiError::expired("The provided continue parameter is too old to display a consistent list result.")
        }
        Error::TooLarge { .. } => ApiError::request_entity_too_large(error.to_string()),
        Error::Unavailable { .. } => ApiError::service_unavailable(error.to_string()),
        Error::Full { .. } => ApiError::internal(error),
        _ => ApiError::internal(error),
    }
}

impl PendingWrites {
    /// Announces a write, so that the feed need not parse what this process just serialised.
    pub fn add(&self, key: &str, bytes: Bytes, object: Value) {
        self.0.lock().insert(key.to_owned(), (bytes, object));
    }

    /// Withdraws it.
    pub fn remove(&self, key: &str, bytes: &Bytes) {
        let mut pending = self.0.lock();
        if pending.get(key).is_some_and(|(b, _)| b.as_ptr() == bytes.as_ptr()) {
            pending.remove(key);
        }
    }

    /// The tree of these bytes, if this process wrote them.
    pub fn take(&self, key: &str, bytes: &[u8]) -> Option<Value> {
        let mut pending = self.0.lock();
        if pending.get(key).is_some_and(|(b, _)| b == bytes) { pending.remove(key).map(|(_, v)| v) } else { None }
    }
}
