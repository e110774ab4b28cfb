//! The garbage collector: what an owner leaves behind goes with it (or before it, or stays, as the deletion asked).
//!
//! It watches the metadata of everything that can be deleted, custom resources as they come and go, and keeps the graph of
//! owner references. Before it deletes anything it asks the API, not its graph.

mod graph;
mod meta;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fmt,
    sync::Arc,
    time::Duration,
};

use futures::StreamExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{
    Api,
    api::ApiResource,
    runtime::{WatchStreamExt, watcher},
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use windlass_client::queue::{Action, Queue};

use crate::{
    Error,
    context::{Context, Worker},
    discovery::{self, Resource},
    write::{self, ApiErrorExt, Delete},
};
use meta::Meta;
use graph::{FOREGROUND, Graph, GroupResource, ORPHAN, Owner, Task, Verdict, judge, policy};

/// Between the first sign of a new kind of resource and the look at what there is: several come at once.
const SETTLE: Duration = Duration::from_millis(500);
const RETRY: Duration = Duration::from_secs(10);

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Task::Examine(uid) => write!(f, "examine {uid}"),
            Task::Orphan(uid) => write!(f, "orphan dependents of {uid}"),
        }
    }
}

impl std::hash::Hash for Task {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        std::mem::discriminant(self).hash(state);
        match self {
            Task::Examine(uid) | Task::Orphan(uid) => uid.hash(state),
        }
    }
}

/// A watch on one collection.
struct Monitor {
    stop: CancellationToken,
    synced: watch::Receiver<bool>,
}

struct Collector {
    client: kube::Client,
    graph: Mutex<Graph>,
    /// Objects in the graph.
    size: prometheus::IntGauge,
    queue: Queue<Task>,
    /// What discovery last said, by group and kind: how references become paths.
    kinds: Mutex<HashMap<(String, String), Resource>>,
    resources: Mutex<BTreeMap<GroupResource, Resource>>,
    monitors: Mutex<HashMap<GroupResource, Monitor>>,
    /// Set once discovery has answered.
    discovered: watch::Sender<bool>,
    /// Rung when custom resource definitions or API services change.
    changed: Notify,
    /// Tells who counts objects that one came or went in a namespace.
    announce: Box<dyn Fn(&str) + Send + Sync>,
}

fn group_of(api_version: &str) -> &str {
    api_version.rsplit_once('/').map_or("", |(group, _)| group)
}

/// Events are many, short-lived, and own nothing.
fn is_collected(resource: &Resource) -> bool {
    resource.has(&["list", "watch", "delete"]) && resource.plural != "events"
}

impl Collector {
    fn enqueue(&self, tasks: Vec<Task>) {
        tasks.into_iter().for_each(|task| self.queue.add(task));
    }

    /// Follows discovery: starts a watch for each new collection, ends those of collections that are gone.
    async fn follow(self: &Arc<Self>, shutdown: &CancellationToken) -> Result<(), Error> {
        let found = discovery::discover(&self.client).await?;
        let collected: BTreeMap<GroupResource, Resource> = found.resources.into_iter().filter(is_collected).map(|resource| {
            (GroupResource { group: resource.group.clone(), plural: resource.plural.clone() }, resource)
        }).collect();
        let unknown: HashSet<String> = found.missing.iter().map(|api_version| group_of(api_version).to_owned()).collect();
        *self.kinds.lock() = collected.values().map(|resource| ((resource.group.clone(), resource.kind.clone()), resource.clone())).collect();
        let mut monitors = self.monitors.lock();
        monitors.retain(|id, monitor| {
            let keep = collected.contains_key(id) || unknown.contains(&id.group);
            if !keep {
                monitor.stop.cancel();
            }
            keep
        });
        for (id, resource) in &collected {
            if !monitors.contains_key(id) {
                let (sender, synced) = watch::channel(false);
                let stop = shutdown.child_token();
                tokio::spawn(self.clone().monitor(id.clone(), resource.clone(), stop.clone(), sender));
                monitors.insert(id.clone(), Monitor { stop, synced });
            }
        }
        drop(monitors);
        *self.resources.lock() = collected;
        self.discovered.send_replace(true);
        Ok(())
    }

    /// Feeds the graph from one collection until stopped; then takes its objects out.
    async fn monitor(self: Arc<Self>, id: GroupResource, resource: Resource, stop: CancellationToken, synced: watch::Sender<bool>) {
        let api_resource = ApiResource {
            group: resource.group.clone(),
            version: resource.version.clone(),
            api_version: resource.api_version(),
            kind: resource.kind.clone(),
            plural: resource.plural.clone(),
        };
        let api: Api<Meta> = Api::all_with(self.client.clone(), &api_resource);
        let mut events = std::pin::pin!(watcher(api, watcher::Config::default()).default_backoff());
        let mut known: HashSet<String> = HashSet::new();
        let mut unseen: HashSet<String> = HashSet::new();
        let definitions = ["customresourcedefinitions", "apiservices"].contains(&id.plural.as_str());
        loop {
            let event = tokio::select! {
                event = events.next() => event,
                () = stop.cancelled() => break,
            };
            let tasks = match event {
                None => break,
                Some(Err(error)) => {
                    tracing::debug!(resource = resource.name(), %error, "watch will be started again");
                    continue;
                }
                Some(Ok(watcher::Event::Init)) => {
                    unseen = known.clone();
                    Vec::new()
                }
                Some(Ok(watcher::Event::InitApply(object) | watcher::Event::Apply(object))) => {
                    if definitions {
                        self.changed.notify_one();
                    }
                    if let Some(uid) = &object.metadata.uid {
                        unseen.remove(uid);
                        if known.insert(uid.clone()) {
                            (self.announce)(object.metadata.namespace.as_deref().unwrap_or_default());
                        }
                    }
                    self.graph.lock().apply(&id, &object.metadata)
                }
                Some(Ok(watcher::Event::InitDone)) => {
                    synced.send_replace(true);
                    unseen.drain().flat_map(|uid| { known.remove(&uid); self.graph.lock().remove(&uid) }).collect()
                }
                Some(Ok(watcher::Event::Delete(object))) => {
                    if definitions {
                        self.changed.notify_one();
                    }
                    (self.announce)(object.metadata.namespace.as_deref().unwrap_or_default());
                    let uid = object.metadata.uid.unwrap_or_default();
                    known.remove(&uid);
                    self.graph.lock().remove(&uid)
                }
            };
            self.enqueue(tasks);
            self.size.set(self.graph.lock().len() as i64);
        }
        let tasks: Vec<Task> = known.iter().flat_map(|uid| self.graph.lock().remove(uid)).collect();
        self.enqueue(tasks);
        synced.send_replace(true);
    }

    /// Follows discovery for as long as the collector runs.
    async fn follow_all(self: Arc<Self>, shutdown: CancellationToken) {
        loop {
            let failed = match self.follow(&shutdown).await {
                Ok(()) => false,
                Err(error) => {
                    tracing::warn!(%error, "cannot tell which resources there are; will try again");
                    true
                }
            };
            let pause = async {
                if failed {
                    tokio::time::sleep(RETRY).await;
                } else {
                    self.changed.notified().await;
                    tokio::time::sleep(SETTLE).await;
                }
            };
            tokio::select! { () = pause => {}, () = shutdown.cancelled() => return }
        }
    }

    /// Returns once every watch that there is has shown its first list.
    async fn synced(&self) {
        loop {
            let pending = self.monitors.lock().values().map(|monitor| monitor.synced.clone()).find(|synced| !*synced.borrow());
            match pending {
                // A monitor that ends drops its sender; that counts as synced.
                Some(mut synced) => drop(synced.wait_for(|synced| *synced).await),
                None => return,
            }
        }
    }

    /// The path of an owner, as one of its dependents names it.
    fn owner_path(&self, owner: &OwnerReference, namespace: &str) -> Result<String, Error> {
        let kinds = self.kinds.lock();
        let resource = kinds.get(&(group_of(&owner.api_version).to_owned(), owner.kind.clone()));
        let resource = resource.ok_or_else(|| Error::Invalid(format!("no resource of kind {} in {}", owner.kind, owner.api_version)))?;
        let scope = if resource.namespaced { namespace } else { "" };
        if resource.namespaced && namespace.is_empty() {
            return Err(Error::Invalid(format!("a cluster-scoped object names the namespaced {} {:?} as its owner", owner.kind, owner.name)));
        }
        Ok(format!("{}/{}", resource.path(scope), owner.name))
    }

    fn path(&self, uid: &str) -> Result<Option<String>, Error> {
        let graph = self.graph.lock();
        let Some(node) = graph.get(uid) else { return Ok(None) };
        match (&node.resource, &node.named) {
            (Some(id), _) => {
                let resources = self.resources.lock();
                Ok(resources.get(id).map(|resource| format!("{}/{}", resource.path(&node.namespace), node.name)))
            }
            (None, Some(named)) => {
                let (named, namespace) = (named.clone(), node.namespace.clone());
                drop(graph);
                self.owner_path(&named, &namespace).map(Some)
            }
            (None, None) => Ok(None),
        }
    }

    async fn work(self: Arc<Self>, task: Task) -> Result<Action, Error> {
        match task {
            Task::Examine(uid) => self.examine(&uid).await,
            Task::Orphan(uid) => self.orphan(&uid).await,
        }
        .map(|()| Action::Done)
    }

    async fn examine(&self, uid: &str) -> Result<(), Error> {
        let (is_virtual, deleting, foreground) = match self.graph.lock().get(uid) {
            None => return Ok(()),
            Some(node) => (node.is_virtual(), node.deleting, node.foreground),
        };
        if deleting && !foreground {
            return Ok(());
        }
        let Some(path) = self.path(uid)? else { return Ok(()) };
        let live: Option<Meta> = write::get(&self.client, &path).await?;
        let Some(live) = live.filter(|live| live.metadata.uid.as_deref() == Some(uid)) else {
            if is_virtual {
                // Nobody will announce the end of what never was.
                let tasks = self.graph.lock().remove(uid);
                self.enqueue(tasks);
            }
            return Ok(());
        };
        if foreground {
            return self.finish_foreground(uid, &path, &live).await;
        }
        let mut owners = Vec::new();
        for owner in live.metadata.owner_references.iter().flatten() {
            owners.push((owner.uid.clone(), self.standing(owner, live.metadata.namespace.as_deref().unwrap_or_default()).await?));
        }
        let (has_dependents, cyclic) = {
            let graph = self.graph.lock();
            let dependents = graph.get(uid).map(|node| node.dependents.clone()).unwrap_or_default();
            (!dependents.is_empty(), dependents.iter().any(|dependent| graph.get(dependent).is_some_and(|node| node.foreground)))
        };
        let version = live.metadata.resource_version.as_deref();
        let delete = |propagation| Delete { uid: Some(uid), resource_version: version, propagation: Some(propagation), grace_period_seconds: None };
        match judge(&owners, has_dependents) {
            Verdict::Keep => {}
            Verdict::Unown(lost) => self.unown(&path, &live, &lost).await?,
            Verdict::DeleteForeground => {
                if cyclic {
                    // A dependent waits for us while we are to wait for it: let go of our owners' wait first.
                    self.unblock(&path, &live).await?;
                }
                let deleted = write::delete(&self.client, &path, Delete { resource_version: None, ..delete("Foreground") }).await;
                deleted.map(drop).or_else(ignore_replaced)?;
            }
            Verdict::Delete => {
                write::delete(&self.client, &path, delete(policy(&live.metadata))).await?;
            }
        }
        Ok(())
    }

    /// Whether an owner still stands, by asking for it.
    async fn standing(&self, owner: &OwnerReference, namespace: &str) -> Result<Owner, Error> {
        let live: Option<Meta> = write::get(&self.client, &self.owner_path(owner, namespace)?).await?;
        let Some(live) = live.filter(|live| live.metadata.uid.as_ref() == Some(&owner.uid)) else { return Ok(Owner::Dangling) };
        let waits = live.metadata.deletion_timestamp.is_some() && live.metadata.finalizers.iter().flatten().any(|finalizer| finalizer == FOREGROUND);
        Ok(if waits { Owner::Waiting } else { Owner::Solid })
    }

    /// An owner in foreground deletion: lets it go when nothing blocks it any more, else sends its dependents ahead.
    async fn finish_foreground(&self, uid: &str, path: &str, live: &Meta) -> Result<(), Error> {
        let blocking = self.graph.lock().blocking(uid);
        if blocking.is_empty() {
            return self.drop_finalizer(path, live, FOREGROUND).await;
        }
        let graph = self.graph.lock();
        let pending = blocking.into_iter().filter(|dependent| graph.get(dependent).is_some_and(|node| !node.deleting));
        pending.for_each(|dependent| self.queue.add(Task::Examine(dependent)));
        Ok(())
    }

    async fn orphan(&self, uid: &str) -> Result<(), Error> {
        let dependents = self.graph.lock().get(uid).map(|node| node.dependents.clone()).unwrap_or_default();
        for dependent in dependents {
            let Some(path) = self.path(&dependent)? else { continue };
            let live: Option<Meta> = write::get(&self.client, &path).await?;
            let Some(live) = live.filter(|live| live.metadata.uid.as_deref() == Some(&dependent)) else { continue };
            self.unown(&path, &live, &[uid.to_owned()]).await?;
        }
        let Some(path) = self.path(uid)? else { return Ok(()) };
        let live: Option<Meta> = write::get(&self.client, &path).await?;
        match live.filter(|live| live.metadata.uid.as_deref() == Some(uid)) {
            Some(live) => self.drop_finalizer(&path, &live, ORPHAN).await,
            None => Ok(()),
        }
    }

    /// Writes metadata as a merge patch that holds only at the version that was read.
    async fn patch(&self, path: &str, live: &Meta, change: (&str, Value)) -> Result<(), Error> {
        let mut patch = json!({"metadata": {"uid": live.metadata.uid, "resourceVersion": live.metadata.resource_version}});
        patch["metadata"][change.0] = change.1;
        match write::merge_patch(&self.client, path, &patch).await {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }

    async fn unown(&self, path: &str, live: &Meta, lost: &[String]) -> Result<(), Error> {
        let owners = live.metadata.owner_references.as_deref().unwrap_or_default();
        let left: Vec<_> = owners.iter().filter(|owner| !lost.contains(&owner.uid)).collect();
        if left.len() == owners.len() {
            return Ok(());
        }
        self.patch(path, live, ("ownerReferences", if left.is_empty() { Value::Null } else { json!(left) })).await
    }

    async fn unblock(&self, path: &str, live: &Meta) -> Result<(), Error> {
        let mut owners = live.metadata.owner_references.clone().unwrap_or_default();
        owners.iter_mut().for_each(|owner| owner.block_owner_deletion = Some(false));
        self.patch(path, live, ("ownerReferences", json!(owners))).await
    }

    async fn drop_finalizer(&self, path: &str, live: &Meta, finalizer: &str) -> Result<(), Error> {
        let finalizers = live.metadata.finalizers.as_deref().unwrap_or_default();
        let left: Vec<_> = finalizers.iter().filter(|have| *have != finalizer).collect();
        if left.len() == finalizers.len() {
            return Ok(());
        }
        self.patch(path, live, ("finalizers", if left.is_empty() { Value::Null } else { json!(left) })).await
    }
}

/// A conflict on a deletion by UID: another object has the name by now.
fn ignore_replaced(error: Error) -> Result<(), Error> {
    if error.is_conflict() { Ok(()) } else { Err(error) }
}

/// The `garbage-collector-controller`.
pub fn start(context: &Context) -> Worker {
    if !context.config.enable_garbage_collector {
        return Box::pin(std::future::ready(()));
    }
    let queue = Queue::new("garbage_collector_attempt_to_delete");
    let collector = Arc::new(Collector {
        client: context.client.clone(),
        graph: Mutex::default(),
        size: windlass_daemon::metrics::gauge("garbage_collector_controller_graph_objects", "Number of objects in the garbage collector's graph of owners."),
        queue: queue.clone(),
        kinds: Mutex::default(),
        resources: Mutex::default(),
        monitors: Mutex::default(),
        discovered: watch::Sender::new(false),
        changed: Notify::new(),
        announce: Box::new(context.announcer()),
    });
    let shutdown = context.shutdown.clone();
    let work = context.worker(queue, context.config.concurrent_gc_syncs, collector.clone(), Collector::work);
    Box::pin(async move {
        let follower = tokio::spawn(collector.clone().follow_all(shutdown.clone()));
        // Acting on half a graph would be safe (the API is asked), but would ask much too much.
        let first = async {
            // The sender lives in the collector: the channel cannot close here.
            drop(collector.discovered.subscribe().wait_for(|discovered| *discovered).await);
            collector.synced().await;
        };
        let ready = tokio::select! { () = first => true, () = shutdown.cancelled() => false };
        if ready {
            tracing::debug!(objects = collector.graph.lock().len(), "graph of owners is complete");
            work.await;
        }
        if let Err(error) = follower.await {
            tracing::error!(%error, "the collector's follower of discovery ended by a panic");
        }
    })
}
