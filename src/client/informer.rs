//! An [`Informer`] is a cache of one resource, kept by list and watch, with indexes and change handlers.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::hash::Hash;
use std::ops::Bound;
use std::sync::Arc;

use futures::StreamExt;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Resource};
use parking_lot::{Mutex, RwLock};
use prometheus::IntGauge;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Where an object lives: its namespace (none for cluster-scoped objects) and name. Prints as `namespace/name` or `name`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    pub namespace: Option<String>,
    pub name: String,
}

impl Key {
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: (!namespace.is_empty()).then(|| namespace.to_owned()), name: name.to_owned() }
    }

    pub fn cluster(name: &str) -> Self {
        Self { namespace: None, name: name.to_owned() }
    }

    pub fn of<K: Resource>(object: &K) -> Self {
        let meta = object.meta();
        Self { namespace: meta.namespace.clone(), name: meta.name.clone().unwrap_or_default() }
    }

    /// The namespace, "" for cluster-scoped objects.
    pub fn ns(&self) -> &str {
        self.namespace.as_deref().unwrap_or_default()
    }

    /// The inverse of `Display`.
    pub fn parse(text: &str) -> Self {
        match text.split_once('/') {
            Some((namespace, name)) => Self::new(namespace, name),
            None => Self::cluster(text),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{namespace}/{}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

/// One object's change. At least one side is present: no `old` means added, no `new` means gone.
///
/// Changes that happened while the watch was interrupted arrive merged: the handler sees the last known and the
/// current state.
#[derive(Clone, Debug)]
pub struct Change<K> {
    pub old: Option<Arc<K>>,
    pub new: Option<Arc<K>>,
}

impl<K> Change<K> {
    /// The newest known state.
    pub fn object(&self) -> &Arc<K> {
        self.new.as_ref().or(self.old.as_ref()).expect("a change has an old or a new side")
    }

    pub fn is_delete(&self) -> bool {
        self.new.is_none()
    }
}

type Handler<K> = Box<dyn Fn(&Change<K>) + Send + Sync>;
type IndexFn<K> = fn(&K) -> Vec<String>;

/// What can be cached: any Kubernetes type or projection.
pub trait Cached: Resource + Clone + DeserializeOwned + fmt::Debug + Send + Sync + 'static {}
impl<K: Resource + Clone + DeserializeOwned + fmt::Debug + Send + Sync + 'static> Cached for K {}

/// Builds an [`Informer`].
pub struct Builder<K: Cached> {
    api: Api<K>,
    config: watcher::Config,
    indexes: Vec<Index<K>>,
    handlers: Vec<Handler<K>>,
}

impl<K: Cached> Builder<K> {
    /// Caches only objects that match this field selector.
    pub fn fields(mut self, selector: &str) -> Self {
        self.config = self.config.fields(selector);
        self
    }

    /// Caches only objects that match this label selector.
    pub fn labels(mut self, selector: &str) -> Self {
        self.config = self.config.labels(selector);
        self
    }

    /// Adds an index: `values` tells under which values an object is found by [`Informer::by_index`].
    pub fn index(mut self, name: &'static str, values: IndexFn<K>) -> Self {
        self.indexes.push(Index { name, values, entries: HashMap::new() });
        self
    }

    /// Calls `handler` for each change, in order, after the cache holds it; the initial list counts as additions.
    /// Handlers run in the informer's task and must not block: put a key on a queue.
    pub fn on_change(mut self, handler: impl Fn(&Change<K>) + Send + Sync + 'static) -> Self {
        self.handlers.push(Box::new(handler));
        self
    }

    /// Starts the watch; it ends with `shutdown`. The cache then stays readable.
    pub fn start(self, shutdown: CancellationToken) -> Informer<K> {
        let kind = std::any::type_name::<K>().rsplit("::").next().unwrap_or("object").trim_end_matches('>');
        let informer = Informer {
            shared: Arc::new(Shared {
                cache: RwLock::new(Cache { objects: BTreeMap::new(), indexes: self.indexes }),
                handlers: Mutex::new(self.handlers),
                synced: watch::Sender::new(false),
                size: crate::connect::informer_objects().with_label_values(&[kind]),
            }),
        };
        let shared = informer.shared.clone();
        tokio::spawn(async move {
            let feed = shared.feed(self.api, self.config, kind);
            tokio::select! { () = feed => {}, () = shutdown.cancelled() => {} }
        });
        informer
    }
}

/// A live, indexed cache of one resource. Cheap to clone; all clones share the cache.
///
/// Guarantees: handlers see every state the cache goes through, in order; reads never block on the network. It does not
/// guarantee to be current: between a write and its watch event, reads are stale, and callers must cope.
/// `managedFields` are dropped.
pub struct Informer<K: Cached> {
    shared: Arc<Shared<K>>,
}

impl<K: Cached> Clone for Informer<K> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<K: Cached> Informer<K> {
    pub fn builder(api: Api<K>) -> Builder<K> {
        // Without bookmarks a quiet resource's watch would fall out of the server's window and have to list again.
        Builder { api, config: watcher::Config::default(), indexes: Vec::new(), handlers: Vec::new() }
    }

    pub fn get(&self, key: &Key) -> Option<Arc<K>> {
        self.shared.cache.read().objects.get(key).cloned()
    }

    /// `namespace` is "" for cluster-scoped resources.
    pub fn get_in(&self, namespace: &str, name: &str) -> Option<Arc<K>> {
        self.get(&Key::new(namespace, name))
    }

    /// All objects, by namespace and name.
    pub fn list(&self) -> Vec<Arc<K>> {
        self.shared.cache.read().objects.values().cloned().collect()
    }

    pub fn namespace(&self, namespace: &str) -> Vec<Arc<K>> {
        let first = Key::new(namespace, "");
        let cache = self.shared.cache.read();
        let from_first = cache.objects.range((Bound::Included(&first), Bound::Unbounded));
        from_first.take_while(|(key, _)| key.namespace == first.namespace).map(|(_, object)| object.clone()).collect()
    }

    /// The objects that the index `index` files under `value`. An index that was not declared finds nothing.
    pub fn by_index(&self, index: &str, value: &str) -> Vec<Arc<K>> {
        let cache = self.shared.cache.read();
        let Some(index) = cache.indexes.iter().find(|i| i.name == index) else {
            debug_assert!(false, "no index {index}");
            return Vec::new();
        };
        let keys = index.entries.get(value).into_iter().flatten();
        keys.filter_map(|key| cache.objects.get(key).cloned()).collect()
    }

    pub fn len(&self) -> usize {
        self.shared.cache.read().objects.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the initial list is in the cache and its handlers have run.
    pub fn has_synced(&self) -> bool {
        *self.shared.synced.borrow()
    }

    /// Returns once [`Self::has_synced`].
    pub async fn synced(&self) {
        // The sender lives in `shared`, which we hold: the channel cannot close under us.
        let _ = self.shared.synced.subscribe().wait_for(|synced| *synced).await;
    }

    /// Adds a handler to a running informer; it first gets all cached objects as additions.
    pub fn on_change(&self, handler: impl Fn(&Change<K>) + Send + Sync + 'static) {
        let mut handlers = self.shared.handlers.lock();
        for object in self.list() {
            handler(&Change { old: None, new: Some(object) });
        }
        handlers.push(Box::new(handler));
    }
}

struct Shared<K> {
    cache: RwLock<Cache<K>>,
    /// Held while a change is applied and told, so that a handler that joins late neither misses nor repeats one.
    handlers: Mutex<Vec<Handler<K>>>,
    synced: watch::Sender<bool>,
    size: IntGauge,
}

impl<K: Cached> Shared<K> {
    async fn feed(&self, api: Api<K>, config: watcher::Config, kind: &str) {
        let mut events = std::pin::pin!(watcher(api, config).default_backoff());
        let mut unseen: HashSet<Key> = HashSet::new();
        while let Some(event) = events.next().await {
            match event {
                Ok(watcher::Event::Init) => unseen = self.cache.read().objects.keys().cloned().collect(),
                Ok(watcher::Event::InitApply(object)) => {
                    unseen.remove(&Key::of(&object));
                    self.apply(object);
                }
                Ok(watcher::Event::InitDone) => {
                    for key in std::mem::take(&mut unseen) {
                        self.remove(&key);
                    }
                    self.synced.send_replace(true);
                }
                Ok(watcher::Event::Apply(object)) => self.apply(object),
                Ok(watcher::Event::Delete(object)) => self.remove(&Key::of(&object)),
                Err(error) => tracing::warn!(kind, %error, "watch interrupted, starting again"),
            }
        }
    }

    fn apply(&self, mut object: K) {
        object.meta_mut().managed_fields = None;
        let key = Key::of(&object);
        let object = Arc::new(object);
        let handlers = self.handlers.lock();
        let old = self.cache.write().insert(key, object.clone());
        self.size.set(self.cache.read().objects.len() as i64);
        let unchanged = |old: &Arc<K>| old.meta().resource_version == object.meta().resource_version;
        if !old.as_ref().is_some_and(unchanged) {
            tell(&handlers, &Change { old, new: Some(object) });
        }
    }

    fn remove(&self, key: &Key) {
        let handlers = self.handlers.lock();
        let old = self.cache.write().remove(key);
        self.size.set(self.cache.read().objects.len() as i64);
        if old.is_some() {
            tell(&handlers, &Change { old, new: None });
        }
    }
}

fn tell<K>(handlers: &[Handler<K>], change: &Change<K>) {
    for handler in handlers {
        handler(change);
    }
}

struct Cache<K> {
    objects: BTreeMap<Key, Arc<K>>,
    indexes: Vec<Index<K>>,
}

impl<K> Cache<K> {
    fn insert(&mut self, key: Key, object: Arc<K>) -> Option<Arc<K>> {
        let old = self.objects.insert(key.clone(), object.clone());
        for index in &mut self.indexes {
            index.update(&key, old.as_deref(), Some(&object));
        }
        old
    }

    fn remove(&mut self, key: &Key) -> Option<Arc<K>> {
        let old = self.objects.remove(key)?;
        for index in &mut self.indexes {
            index.update(key, Some(&old), None);
        }
        Some(old)
    }
}

struct Index<K> {
    name: &'static str,
    values: IndexFn<K>,
    entries: HashMap<String, BTreeSet<Key>>,
}

impl<K> Index<K> {
    fn update(&mut self, key: &Key, old: Option<&K>, new: Option<&K>) {
        let before = old.map(self.values).unwrap_or_default();
        let after = new.map(self.values).unwrap_or_default();
        for value in before.iter().filter(|v| !after.contains(v)) {
            remove_entry(&mut self.entries, value, key);
        }
        for value in after.into_iter().filter(|v| !before.contains(v)) {
            self.entries.entry(value).or_default().insert(key.clone());
        }
    }
}

fn remove_entry<Q: Hash + Eq + ?Sized>(entries: &mut HashMap<String, BTreeSet<Key>>, value: &Q, key: &Key)
where
    String: Borrow<Q>,
{
    let Some(keys) = entries.get_mut(value) else { return };
    keys.remove(key);
    if keys.is_empty() {
        entries.remove(value);
    }
}
