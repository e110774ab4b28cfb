//! Hears of pods from all sources and of containers from the runtime, and passes it on to the pods' actors.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use parking_lot::RwLock;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use windlass_client::informer::Change;

use crate::admission::{self, Judge};
use crate::metrics;
use crate::pod::actor::{self, Handle, Msg};
use crate::pod::status::Why;
use crate::pod::stop::{self, Ending};
use crate::pod::{cleanup, model, report};
use crate::runtime::{Container, Event};
use crate::shared::{Shared, View};

/// Events of sources that may wait; the senders wait beyond it.
pub const INBOX: usize = 1024;
/// Streams drop events: at this interval everything is looked at again.
const RESYNC: Duration = Duration::from_secs(600);
const RECONNECT: Duration = Duration::from_secs(1);

/// What the manager hears.
#[derive(Debug)]
pub enum Input {
    Api(Change<Pod>),
    /// The API's first list is complete.
    ApiSynced,
    /// All static pods of one source (`file`, `http`).
    Static { source: &'static str, pods: Vec<Pod> },
    Runtime(Event),
    /// The event stream is new: anything may have happened.
    Relist,
    /// An actor has ended.
    Done(String),
}

/// The actors of all pods, for whoever wants to reach one.
#[derive(Default)]
pub struct Table {
    handles: RwLock<HashMap<String, Handle>>,
}

impl Table {
    pub fn get(&self, uid: &str) -> Option<Handle> {
        self.handles.read().get(uid).cloned()
    }

    /// What is known of the pod of this name; of two, the one that lives.
    pub fn find(&self, namespace: &str, name: &str) -> Option<View> {
        let views = self.views();
        let mut matching: Vec<View> = views.into_iter().filter(|v| model::namespace(&v.pod) == namespace && model::name(&v.pod) == name).collect();
        matching.sort_by_key(|v| v.terminated);
        matching.into_iter().next()
    }

    pub fn views(&self) -> Vec<View> {
        self.handles.read().values().map(|h| h.view.borrow().clone()).collect()
    }

    pub fn uids(&self) -> HashSet<String> {
        self.handles.read().keys().cloned().collect()
    }

    /// Calls `f` with what is known of each pod.
    pub fn each(&self, mut f: impl FnMut(&View)) {
        for handle in self.handles.read().values() {
            f(&handle.view.borrow());
        }
    }

    /// Tells a pod that something it refers to has changed. A full mailbox will look at everything anyway.
    pub fn poke(&self, uid: &str) {
        if let Some(handle) = self.get(uid) {
            let _ = handle.mailbox.try_send(Msg::Objects);
        }
    }

    /// Pods that take resources of the node.
    pub fn active(&self) -> Vec<Arc<Pod>> {
        self.views().into_iter().filter(|v| !v.rejected && !v.terminated).map(|v| v.pod).collect()
    }
}

struct Manager {
    shared: Arc<Shared>,
    inbox: mpsc::Sender<Input>,
    api_synced: bool,
    static_pods: HashMap<&'static str, HashMap<String, Arc<Pod>>>,
    /// Static pods that wait for another of their name to end, by uid.
    waiting: HashMap<String, Arc<Pod>>,
    mirrors: HashMap<(String, String), Arc<Pod>>,
    /// Sources that have to be heard before anything is taken for an orphan.
    expected: HashSet<&'static str>,
    clearing: Arc<parking_lot::Mutex<HashSet<String>>>,
}

/// Runs until shutdown. `expected` names the static sources that are configured.
pub async fn run(shared: Arc<Shared>, inbox: mpsc::Sender<Input>, mut inputs: mpsc::Receiver<Input>, expected: HashSet<&'static str>) {
    let shutdown = shared.shutdown.clone();
    let mut manager = Manager {
        shared: shared.clone(),
        inbox: inbox.clone(),
        api_synced: false,
        static_pods: HashMap::new(),
        waiting: HashMap::new(),
        mirrors: HashMap::new(),
        expected,
        clearing: Arc::default(),
    };
    tokio::spawn(follow_runtime(shared.clone(), inbox, shutdown.clone()));
    loop {
        tokio::select! {
            input = inputs.recv() => match input {
                Some(input) => manager.hear(input).await,
                None => return,
            },
            () = shutdown.cancelled() => return,
        }
    }
}

/// Passes the runtime's events on, and asks for a new look whenever some may have been missed.
async fn follow_runtime(shared: Arc<Shared>, inbox: mpsc::Sender<Input>, shutdown: CancellationToken) {
    let follow = async {
        loop {
            // The stream connects only when it is read: whether the runtime is there is asked first.
            match shared.runtime.info().await {
                Ok(_) => {
                    shared.trouble("runtime", None);
                    if !read_events(&shared, &inbox).await {
                        return;
                    }
                }
                Err(error) => {
                    metrics::EVENT_STREAM_ERRORS.inc();
                    shared.trouble("runtime", Some(format!("container runtime is down: {error}")));
                }
            }
            tokio::time::sleep(RECONNECT).await;
        }
    };
    tokio::select! { () = follow => {}, () = shutdown.cancelled() => {} }
}

/// Passes events on until the stream breaks; false when nobody listens any more.
async fn read_events(shared: &Arc<Shared>, inbox: &mpsc::Sender<Input>) -> bool {
    let mut events = match shared.runtime.events().await {
        Ok(events) => events,
        Err(error) => {
            metrics::EVENT_STREAM_ERRORS.inc();
            tracing::warn!(%error, "cannot follow the runtime's events");
            return true;
        }
    };
    metrics::EVENT_STREAM.inc();
    let mut resync = tokio::time::interval(RESYNC);
    loop {
        // The first tick is at once: the list that belongs to the new stream.
        let input = tokio::select! {
            _ = resync.tick() => Input::Relist,
            event = events.next() => match event {
                Some(Ok(event)) if interesting(&event.action) => Input::Runtime(event),
                Some(Ok(_)) => continue,
                Some(Err(error)) => {
                    tracing::warn!(%error, "the runtime's event stream broke");
                    return true;
                }
                None => return true,
            },
        };
        if inbox.send(input).await.is_err() {
            return false;
        }
    }
}

fn interesting(action: &str) -> bool {
    matches!(action, "start" | "die" | "oom" | "destroy" | "update" | "pause" | "unpause" | "stop" | "kill")
}

impl Manager {
    async fn hear(&mut self, input: Input) {
        match input {
            Input::Api(change) => self.api(change).await,
            Input::ApiSynced => {
                self.api_synced = true;
                self.sweep().await;
            }
            Input::Static { source, pods } => self.statics(source, pods).await,
            Input::Runtime(event) => self.runtime(event).await,
            Input::Relist => {
                let handles: Vec<Handle> = self.shared.table.handles.read().values().cloned().collect();
                for handle in handles {
                    let _ = handle.mailbox.send(Msg::Relist).await;
                }
                self.sweep().await;
            }
            Input::Done(uid) => self.done(&uid).await,
        }
        self.count();
    }

    async fn api(&mut self, change: Change<Pod>) {
        let is_mirror = change.new.as_ref().or(change.old.as_ref()).is_some_and(|p| model::is_mirror(p));
        if is_mirror {
            return self.mirror(change).await;
        }
        let old_uid = change.old.as_ref().map(|p| model::uid(p).to_owned());
        match change.new {
            None => {
                if let Some(uid) = old_uid {
                    self.tell(&uid, Msg::Gone).await;
                }
            }
            Some(pod) => {
                // Another pod of the same name: the one before is gone.
                if let Some(uid) = old_uid.filter(|uid| uid != model::uid(&pod)) {
                    self.tell(&uid, Msg::Gone).await;
                }
                let uid = model::uid(&pod).to_owned();
                if self.shared.table.get(&uid).is_some() {
                    self.tell(&uid, Msg::Pod(pod)).await;
                } else {
                    self.spawn(pod).await;
                }
            }
        }
    }

    async fn mirror(&mut self, change: Change<Pod>) {
        let any = change.object();
        let key = (model::namespace(any).to_owned(), model::name(any).to_owned());
        match &change.new {
            Some(mirror) => self.mirrors.insert(key.clone(), mirror.clone()),
            None => self.mirrors.remove(&key),
        };
        match self.static_uid(&key) {
            Some(uid) => self.tell(&uid, Msg::Mirror(change.new)).await,
            None => {
                if let Some(mirror) = change.new.filter(|_| self.expected.is_empty()) {
                    self.delete_mirror(mirror);
                }
            }
        }
    }

    fn static_uid(&self, key: &(String, String)) -> Option<String> {
        let all = self.static_pods.values().flat_map(|pods| pods.values());
        all.filter(|p| model::namespace(p) == key.0 && model::name(p) == key.1).map(|p| model::uid(p).to_owned()).next()
    }

    fn delete_mirror(&self, mirror: Arc<Pod>) {
        let shared = self.shared.clone();
        tokio::spawn(async move {
            if let Err(error) = report::delete_mirror(&shared, &mirror).await {
                tracing::warn!(pod = model::describe(&mirror), error, "cannot delete a mirror pod whose static pod is gone");
            }
        });
    }

    async fn statics(&mut self, source: &'static str, pods: Vec<Pod>) {
        self.expected.remove(source);
        let wanted: HashMap<String, Arc<Pod>> = pods.into_iter().map(|p| (model::uid(&p).to_owned(), Arc::new(p))).collect();
        let before = self.static_pods.insert(source, wanted.clone()).unwrap_or_default();
        for (uid, _) in before.iter().filter(|(uid, _)| !wanted.contains_key(*uid)) {
            self.waiting.remove(uid);
            self.tell(uid, Msg::Gone).await;
        }
        for (uid, pod) in wanted {
            if !before.contains_key(&uid) {
                self.add_static(pod).await;
            }
        }
        if self.expected.is_empty() {
            let stale: Vec<Arc<Pod>> = self.mirrors.iter().filter(|(key, _)| self.static_uid(key).is_none()).map(|(_, m)| m.clone()).collect();
            stale.into_iter().for_each(|m| self.delete_mirror(m));
            self.sweep().await;
        }
    }

    /// A static pod starts once none of its name is left.
    async fn add_static(&mut self, pod: Arc<Pod>) {
        let taken = self.shared.table.views().iter().any(|v| model::name(&v.pod) == model::name(&pod) && model::namespace(&v.pod) == model::namespace(&pod));
        if taken {
            self.waiting.insert(model::uid(&pod).to_owned(), pod);
            return;
        }
        let key = (model::namespace(&pod).to_owned(), model::name(&pod).to_owned());
        let uid = model::uid(&pod).to_owned();
        self.spawn(pod).await;
        if let Some(mirror) = self.mirrors.get(&key).cloned() {
            self.tell(&uid, Msg::Mirror(Some(mirror))).await;
        }
    }

    async fn done(&mut self, uid: &str) {
        self.shared.table.handles.write().remove(uid);
        let ready: Vec<Arc<Pod>> = self.waiting.values().cloned().collect();
        for pod in ready {
            self.waiting.remove(model::uid(&pod));
            self.add_static(pod).await;
        }
    }

    async fn runtime(&mut self, event: Event) {
        if self.shared.table.get(&event.pod_uid).is_some() {
            self.tell(&event.pod_uid, Msg::Runtime(event.container)).await;
        } else if event.action == "start" {
            self.sweep().await;
        }
    }

    async fn tell(&self, uid: &str, message: Msg) {
        if let Some(handle) = self.shared.table.get(uid) {
            // An actor that has just ended hears nothing more, and needs not.
            let _ = handle.mailbox.send(message).await;
        }
    }

    async fn spawn(&mut self, pod: Arc<Pod>) {
        let uid = model::uid(&pod).to_owned();
        let rejected = self.judge(&pod).await;
        if let Some(why) = &rejected {
            metrics::ADMISSION_REJECTIONS.with_label_values(&[&why.reason]).inc();
            self.shared.event(&pod, None, windlass_client::events::EventType::Warning, &why.reason, why.message.clone());
        }
        let (inbox, ended) = (self.inbox.clone(), uid.clone());
        let done = move || {
            tokio::spawn(async move {
                let _ = inbox.send(Input::Done(ended)).await;
            });
        };
        let handle = actor::spawn(self.shared.clone(), pod, rejected, done);
        self.shared.table.handles.write().insert(uid, handle);
    }

    /// Admission is for pods that begin: one that has run here before goes on.
    async fn judge(&self, pod: &Arc<Pod>) -> Option<Why> {
        let begun = pod.status.as_ref().is_some_and(|s| s.start_time.is_some());
        if begun || pod.metadata.deletion_timestamp.is_some() || model::is_terminal_phase(model::phase(pod)) {
            return None;
        }
        if self.shared.runtime.list_pod(model::uid(pod)).await.is_ok_and(|l| !l.is_empty()) {
            return None;
        }
        let node = self.shared.node.get_in("", &self.shared.node_name);
        let others = self.shared.table.active();
        let judge = Judge {
            node: node.as_deref(),
            allocatable: self.shared.machine.allocatable(),
            max_pods: self.shared.config.max_pods as usize,
            pressure: *self.shared.pressure.read(),
            allowed_sysctls: &self.shared.config.allowed_unsafe_sysctls,
            others: &others,
        };
        admission::judge(pod, &judge)
    }

    /// Stops and removes what belongs to no pod, once every source has been heard.
    async fn sweep(&self) {
        if !self.api_synced || !self.expected.is_empty() {
            return;
        }
        let containers = match self.shared.runtime.list().await {
            Ok(containers) => containers,
            Err(error) => {
                tracing::warn!(%error, "cannot list containers to find orphans");
                return;
            }
        };
        let mut orphans: HashMap<String, Vec<Container>> = HashMap::new();
        let known = self.shared.table.uids();
        for container in containers {
            if !known.contains(&container.pod_uid) && !self.waiting.contains_key(&container.pod_uid) {
                orphans.entry(container.pod_uid.clone()).or_default().push(container);
            }
        }
        for entry in std::fs::read_dir(&self.shared.volumes.pods_dir).into_iter().flatten().flatten() {
            let uid = entry.file_name().to_string_lossy().into_owned();
            if !known.contains(&uid) && !self.waiting.contains_key(&uid) {
                orphans.entry(uid).or_default();
            }
        }
        for (uid, containers) in orphans {
            if self.clearing.lock().insert(uid.clone()) {
                tokio::spawn(clear(self.shared.clone(), uid, containers, self.clearing.clone()));
            }
        }
    }

    fn count(&self) {
        let (mut running, mut statics, mut all, mut working, mut ephemeral) = (0, 0, 0, 0, 0);
        let mut states = HashMap::from([("running", 0), ("exited", 0), ("created", 0), ("unknown", 0)]);
        self.shared.table.each(|view| {
            all += 1;
            running += i64::from(view.sandbox().is_some());
            statics += i64::from(model::is_static(&view.pod));
            working += i64::from(!view.terminated);
            ephemeral += i64::try_from(model::ephemeral_containers(&view.pod).len()).unwrap_or(0);
            for container in view.containers.iter().filter(|c| !c.is_sandbox()) {
                let name = match container.state {
                    crate::runtime::State::Running => "running",
                    crate::runtime::State::Exited => "exited",
                    crate::runtime::State::Created => "created",
                    crate::runtime::State::Unknown => "unknown",
                };
                *states.entry(name).or_insert(0) += 1;
            }
        });
        metrics::RUNNING_PODS.set(running);
        metrics::DESIRED_PODS.with_label_values(&["true"]).set(statics);
        metrics::DESIRED_PODS.with_label_values(&["false"]).set(all - statics);
        metrics::MIRROR_PODS.set(statics);
        metrics::WORKING_PODS.set(working);
        metrics::EPHEMERAL_CONTAINERS.set(ephemeral);
        for (state, number) in states {
            metrics::RUNNING_CONTAINERS.with_label_values(&[state]).set(number);
        }
    }
}

/// Ends a pod that no source knows.
async fn clear(shared: Arc<Shared>, uid: String, containers: Vec<Container>, clearing: Arc<parking_lot::Mutex<HashSet<String>>>) {
    metrics::ORPHANED.inc();
    tracing::info!(uid, containers = containers.len(), "removing what is left of a pod that no source knows");
    let (_keep, grace) = watch::channel(stop::labelled_grace(&containers));
    let ending = Ending { pod: None, uid: uid.clone(), reason: String::new(), grace, pod_ip: String::new() };
    let result = async {
        stop::stop_pod(&shared, &ending).await.map_err(|e| e.to_string())?;
        cleanup::leftovers(&shared, &uid).await
    };
    if let Err(error) = result.await {
        tracing::warn!(uid, error, "cannot remove an orphaned pod; the next look will try again");
    }
    clearing.lock().remove(&uid);
}
