//! The watch cache: every object of a resource at a known revision, and what happened to them lately.
//!
//! Invariants:
//! - Only the [`feed`](crate::feed) changes a cache, in the order of revisions; readers see whole revisions.
//! - An object's bytes are made once and shared by every list and every watcher.
//! - Nothing here waits for a watcher: its queue is bounded, and a full queue ends the watch.
//! - Selectors read spans of the stored bytes; an object is parsed only for a selector on a field without a span.
//!
//! Code map: [`scan`] finds spans; [`stored`] one object; [`event`] one change and its frames;
//! [`filter`] what a list or watch selects; [`watchers`] who is told; this file the snapshot and the ring.

pub mod event;
pub mod filter;
pub mod scan;
pub mod stored;
pub mod watchers;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use windlass_api::registry::Resource;

pub use event::{CacheEvent, Change, Delivery};
pub use filter::Filter;
pub use stored::{Encoding, Form, Stored};
pub use watchers::{Subscription, Watchers};

use filter::Fields;
use scan::Paths;

/// Events younger than this stay in the ring whatever their number, up to the hard bounds.
const RING_AGE: Duration = Duration::from_secs(75);
/// The ring never holds more events than this.
const RING_EVENTS: usize = 20_000;
/// Nor more bytes of objects than this (an event whose object is still current costs nothing extra).
const RING_BYTES: usize = 48 << 20;
/// Old events that stay although nothing new came: enough for a client that reconnects.
const RING_MIN: usize = 64;

/// Told of every change, in order.
pub type Listener = Arc<dyn Fn(&CacheEvent) + Send + Sync>;

/// One resource's objects.
pub struct ResourceCache {
    /// The resource as it is stored (two API groups may share a cache: events).
    pub resource: RwLock<Arc<Resource>>,
    /// Keys in the store begin with this.
    pub prefix: String,
    paths: Paths,
    fields: Fields,
    state: RwLock<State>,
    listeners: Mutex<Vec<Listener>>,
    received: prometheus::IntCounter,
}

struct State {
    objects: BTreeMap<Arc<str>, Arc<Stored>>,
    bytes: usize,
    /// The revision of the last change here.
    changed: u64,
    ring: VecDeque<(Instant, Arc<CacheEvent>)>,
    ring_bytes: usize,
    /// Every change after this revision is in the ring.
    floor: u64,
    watchers: Watchers,
    /// The resource is gone (a CRD was deleted): watches end.
    closed: bool,
}

/// One page of a list.
pub struct Page {
    pub items: Vec<Arc<Stored>>,
    /// The key of the last item, if more follow.
    pub next: Option<Arc<str>>,
    /// How many items match beyond this page, when that is known without a selector.
    pub remaining: Option<u64>,
}

/// Why a cache cannot answer for an old revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooOld {
    pub requested: u64,
    pub oldest: u64,
}

impl ResourceCache {
    pub(crate) fn new(resource: Arc<Resource>, revision: u64) -> ResourceCache {
        let fields = Fields::of(&resource);
        ResourceCache {
            received: crate::metrics::cache_events(&resource.group, &resource.plural),
            prefix: resource.storage_prefix(),
            paths: Paths::new(fields.paths()),
            fields,
            resource: RwLock::new(resource),
            state: RwLock::new(State {
                objects: BTreeMap::new(),
                bytes: 0,
                changed: revision,
                ring: VecDeque::new(),
                ring_bytes: 0,
                floor: revision,
                watchers: Watchers::default(),
                closed: false,
            }),
            listeners: Mutex::new(Vec::new()),
        }
    }

    /// The paths whose places are known in each stored object.
    pub fn paths_ref(&self) -> &Paths {
        &self.paths
    }

    /// The fields that selectors find by span.
    pub fn fields(&self) -> &Fields {
        &self.fields
    }

    pub fn get(&self, key: &str) -> Option<Arc<Stored>> {
        self.state.read().objects.get(key).cloned()
    }

    pub fn len(&self) -> usize {
        self.state.read().objects.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of all current objects.
    pub fn bytes(&self) -> usize {
        self.state.read().bytes
    }

    /// The objects of one namespace, or all.
    pub fn all(&self, namespace: Option<&str>) -> Vec<Arc<Stored>> {
        let state = self.state.read();
        match namespace {
            None => state.objects.values().cloned().collect(),
            Some(ns) => range(&state.objects, Some(ns), None).map(|(_, o)| o.clone()).collect(),
        }
    }

    /// Objects that match, from after `start`, at most `limit` of them, as they are now.
    pub fn page(&self, filter: &Filter, start: Option<&str>, limit: Option<usize>) -> Page {
        let state = self.state.read();
        if let (Some(key), None) = (filter.single_key(), start) {
            let items: Vec<_> = state.objects.get(&*key).filter(|o| filter.matches(o)).cloned().into_iter().collect();
            return Page { items, next: None, remaining: None };
        }
        collect(range(&state.objects, filter.namespace.as_deref(), start).map(|(_, o)| o.clone()), filter, limit)
    }

    /// The same page as it was at `revision`, worked out from the ring; `None` when the ring does not reach back that far.
    pub fn page_at(&self, revision: u64, filter: &Filter, start: Option<&str>, limit: Option<usize>) -> Option<Page> {
        let state = self.state.read();
        if state.changed <= revision {
            drop(state);
            return Some(self.page(filter, start, limit));
        }
        if state.floor > revision {
            return None;
        }
        // What each key changed since then held before its first change since then.
        let mut then: BTreeMap<Arc<str>, Option<Arc<Stored>>> = BTreeMap::new();
        for (_, event) in state.ring.iter().rev().take_while(|(_, e)| e.revision > revision) {
            then.insert(event.object.key().clone(), event.previous.clone());
        }
        let in_range = |key: &str| {
            filter.namespace.as_deref().is_none_or(|ns| key.strip_prefix(ns).is_some_and(|k| k.starts_with('/')))
                && start.is_none_or(|s| key > s)
        };
        let mut now = range(&state.objects, filter.namespace.as_deref(), start).filter(|(k, _)| !then.contains_key(*k)).peekable();
        let mut old = then.iter().filter(|(k, v)| v.is_some() && in_range(k)).peekable();
        let merged = std::iter::from_fn(|| match (now.peek(), old.peek()) {
            (Some((a, _)), Some((b, _))) if a < b => now.next().map(|(_, o)| o.clone()),
            (_, Some(_)) => old.next().and_then(|(_, o)| o.clone()),
            (Some(_), None) => now.next().map(|(_, o)| o.clone()),
            (None, None) => None,
        });
        Some(collect(merged, filter, limit))
    }

    /// Starts a watch. Events after `since` (or from now on) are delivered through the subscription; with
    /// `initial`, the current objects are returned as well, at the moment the subscription starts.
    pub fn watch(&self, filter: Filter, since: Option<u64>, initial: bool) -> Result<(Vec<Arc<Stored>>, Subscription), TooOld> {
        let mut state = self.state.write();
        let mut backlog = Vec::new();
        if let Some(since) = since {
            if since < state.floor {
                return Err(TooOld { requested: since, oldest: state.floor });
            }
            let first = state.ring.partition_point(|(_, e)| e.revision <= since);
            for (_, event) in state.ring.range(first..) {
                backlog.extend(filter.delivery(event));
            }
        }
        let objects = match (initial, filter.single_key()) {
            (false, _) => Vec::new(),
            (true, Some(key)) => state.objects.get(&*key).filter(|o| filter.matches(o)).cloned().into_iter().collect(),
            (true, None) => {
                let all = range(&state.objects, filter.namespace.as_deref(), None);
                all.map(|(_, o)| o).filter(|o| filter.matches(o)).cloned().collect()
            }
        };
        let closed = state.closed;
        let subscription = state.watchers.subscribe(filter, backlog, closed);
        Ok((objects, subscription))
    }

    /// Changes that can still be asked for.
    pub fn history(&self) -> usize {
        self.state.read().ring.len()
    }

    /// Watchers now connected.
    pub fn watchers(&self) -> usize {
        self.state.read().watchers.len()
    }

    /// Adds a listener after telling it of every object as added. The feed must not be applying meanwhile.
    pub(crate) fn listen(&self, listener: Listener) {
        let objects = self.all(None);
        for object in objects {
            listener(&CacheEvent::new(Change::Added, object.clone(), None, object.revision));
        }
        self.listeners.lock().push(listener);
    }

    /// Fills an empty cache at its start.
    pub(crate) fn fill(&self, objects: impl IntoIterator<Item = Stored>, revision: u64) {
        let mut state = self.state.write();
        for object in objects {
            state.bytes += object.bytes.len();
            let object = Arc::new(object);
            if let Some(old) = state.objects.insert(object.key().clone(), object) {
                state.bytes -= old.bytes.len();
            }
        }
        state.changed = revision;
        state.floor = revision;
    }

    /// Applies the changes of one revision and tells everyone. `object` is `None` for a deletion.
    pub(crate) fn apply(&self, revision: u64, key: &str, object: Option<Stored>) {
        self.received.inc();
        let event = {
            let mut state = self.state.write();
            state.changed = revision;
            let previous = state.objects.get(key).cloned();
            let event = match (object, previous) {
                (Some(object), previous) => {
                    let object = Arc::new(object);
                    state.bytes += object.bytes.len();
                    state.bytes -= previous.as_ref().map_or(0, |p| p.bytes.len());
                    state.objects.insert(object.key().clone(), object.clone());
                    let change = if previous.is_some() { Change::Modified } else { Change::Added };
                    CacheEvent::new(change, object, previous, revision)
                }
                (None, Some(previous)) => {
                    state.objects.remove(key);
                    state.bytes -= previous.bytes.len();
                    let last = Arc::new(previous.at_revision(revision, &self.paths));
                    CacheEvent::new(Change::Deleted, last, Some(previous), revision)
                }
                (None, None) => return,
            };
            let event = Arc::new(event);
            state.ring_bytes += event.object.bytes.len();
            state.ring.push_back((Instant::now(), event.clone()));
            state.trim(RING_MIN);
            event
        };
        for listener in self.listeners.lock().clone() {
            listener(&event);
        }
        self.state.write().watchers.dispatch(&event, &self.paths);
    }

    /// Lets old events go although nothing new came.
    pub(crate) fn trim(&self) {
        self.state.write().trim(RING_MIN);
    }

    /// Ends every watch; clients begin anew.
    pub(crate) fn end_watches(&self) {
        self.state.write().watchers = Watchers::default();
    }

    /// Drops the ring: nothing before `revision` can be asked for any more.
    pub(crate) fn forget_history(&self, revision: u64) {
        let mut state = self.state.write();
        state.ring = VecDeque::new();
        state.ring_bytes = 0;
        state.floor = revision;
    }

    /// The server stops: nobody is told any more.
    pub(crate) fn retire(&self) {
        self.listeners.lock().clear();
        self.end_watches();
    }

    /// Ends every watch: the resource is served no more.
    pub(crate) fn close(&self) {
        let mut state = self.state.write();
        state.closed = true;
        state.watchers = Watchers::default();
    }
}

impl State {
    fn trim(&mut self, keep: usize) {
        let now = Instant::now();
        while let Some((at, event)) = self.ring.front() {
            let old = self.ring.len() > keep && now.duration_since(*at) > RING_AGE;
            if !old && self.ring.len() <= RING_EVENTS && self.ring_bytes <= RING_BYTES {
                break;
            }
            self.ring_bytes -= event.object.bytes.len();
            self.floor = event.revision;
            self.ring.pop_front();
        }
        if self.ring.len() < self.ring.capacity() / 8 {
            self.ring.shrink_to(self.ring.len() * 2);
        }
    }
}

/// The keys of a namespace (or all), after `start`.
fn range<'a>(
    objects: &'a BTreeMap<Arc<str>, Arc<Stored>>,
    namespace: Option<&str>,
    start: Option<&str>,
) -> impl Iterator<Item = (&'a Arc<str>, &'a Arc<Stored>)> + use<'a> {
    let low = namespace.map(|ns| format!("{ns}/"));
    let high = namespace.map(|ns| format!("{ns}0"));
    let lower = match (&low, start) {
        (_, Some(start)) if low.as_deref().is_none_or(|low| start >= low) => Bound::Excluded(start),
        (Some(low), _) => Bound::Included(low.as_str()),
        (None, _) => Bound::Unbounded,
    };
    let upper = high.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
    // A start beyond the namespace would make an inverted range, which BTreeMap refuses by panic.
    let inverted = matches!((lower, upper), (Bound::Excluded(a) | Bound::Included(a), Bound::Excluded(b)) if a >= b);
    let (lower, upper) = if inverted { (Bound::Excluded(""), Bound::Included("")) } else { (lower, upper) };
    objects.range::<str, _>((lower, upper))
}

fn collect(objects: impl Iterator<Item = Arc<Stored>>, filter: &Filter, limit: Option<usize>) -> Page {
    let mut items = Vec::new();
    let mut next = None;
    let mut remaining = 0;
    for object in objects {
        if next.is_some() && filter.has_selector() {
            break;
        }
        if !filter.matches(&object) {
            continue;
        }
        if limit.is_some_and(|l| items.len() >= l) {
            if next.is_none() {
                next = items.last().map(|o: &Arc<Stored>| o.key().clone());
            }
            remaining += 1;
            continue;
        }
        items.push(object);
    }
    let remaining = (next.is_some() && !filter.has_selector()).then_some(remaining);
    Page { items, next, remaining }
}

/// All caches by the prefix of their keys.
#[derive(Default)]
pub(crate) struct Caches {
    by_prefix: RwLock<BTreeMap<String, Arc<ResourceCache>>>,
    /// By group, then by plural name.
    by_name: RwLock<HashMap<String, HashMap<String, Arc<ResourceCache>>>>,
}

impl Caches {
    /// The cache of a resource.
    pub fn get(&self, group: &str, plural: &str) -> Option<Arc<ResourceCache>> {
        self.by_name.read().get(group)?.get(plural).cloned()
    }

    /// The cache that a store key belongs to, and the rest of the key.
    pub fn owner<'k>(&self, key: &'k str) -> Option<(Arc<ResourceCache>, &'k str)> {
        let caches = self.by_prefix.read();
        let (prefix, cache) = caches.range::<str, _>((Bound::Unbounded, Bound::Included(key))).next_back()?;
        let rest = key.strip_prefix(prefix.as_str())?;
        Some((cache.clone(), rest))
    }

    /// Adds a cache, or a second name for the cache that has this prefix already.
    pub fn add(&self, resource: &Arc<Resource>, revision: u64) -> Arc<ResourceCache> {
        let mut by_prefix = self.by_prefix.write();
        let cache = by_prefix
            .entry(resource.storage_prefix())
            .or_insert_with(|| Arc::new(ResourceCache::new(resource.clone(), revision)))
            .clone();
        self.by_name.write().entry(resource.group.clone()).or_default().insert(resource.plural.clone(), cache.clone());
        cache
    }

    pub fn remove(&self, resource: &Resource) {
        self.by_prefix.write().remove(&resource.storage_prefix());
        let mut by_name = self.by_name.write();
        let Some(group) = by_name.get_mut(&resource.group) else { return };
        let removed = group.remove(&resource.plural);
        if group.is_empty() {
            by_name.remove(&resource.group);
        }
        if let Some(cache) = removed {
            cache.close();
        }
    }

    pub fn all(&self) -> Vec<Arc<ResourceCache>> {
        self.by_prefix.read().values().cloned().collect()
    }
}

#[cfg(test)]
mod tests;
