//! The scheduler's memory: the cluster, the queue and the latest decisions, changed by what the API tells.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use tokio::sync::Notify;
use tokio::time::Instant;
use windlass_client::informer::{Change, Key};

use crate::cluster::Cluster;
use crate::cycle::decide;
use crate::decision::{Decision, Log, Outcome};
use crate::event::Events;
use crate::metrics::Metrics;
use crate::object::{ClaimView, NodeView, PodView};
use crate::plugin::{ClaimPlan, plan_claims};
use crate::pod::Pod;
use crate::preempt::{self, Preemption};
use crate::profile::{Profile, Rejectors};
use crate::queue::{Queue, Waiting};

/// Shared by the informers' handlers, the deciding loop and the binders.
pub struct Scheduler {
    pub profiles: HashMap<String, Profile>,
    pub metrics: Metrics,
    state: Mutex<State>,
    /// Something may have become ready in the queue.
    ready: Notify,
    /// A claim changed: binders that wait for one look again.
    pub claims_changed: Notify,
}

struct State {
    cluster: Cluster,
    queue: Queue,
    log: Log,
    /// The node to begin with at the next decision.
    start: usize,
    random: SmallRng,
}

/// What has to be done after a decision, outside the lock.
pub enum Next {
    Bind { waiting: Waiting, node: String, claims: ClaimPlan, since: Instant },
    Tell { waiting: Waiting, message: String, gated: bool, preemption: Option<Preemption> },
}

impl Scheduler {
    pub fn new(profiles: HashMap<String, Profile>, backoff: (std::time::Duration, std::time::Duration)) -> Self {
        let state = State { cluster: Cluster::default(), queue: Queue::new(backoff), log: Log::default(), start: 0, random: SmallRng::from_os_rng() };
        Self { profiles, metrics: Metrics::new(), state: Mutex::new(state), ready: Notify::new(), claims_changed: Notify::new() }
    }

    // === what the API tells ===

    /// Changes the cluster and lets pods be tried again that `event` may help.
    pub fn update(&self, event: Events, change: impl FnOnce(&mut Cluster)) {
        let mut state = self.state.lock();
        change(&mut state.cluster);
        self.happened(&mut state, event);
    }

    pub fn node_changed(&self, change: &Change<NodeView>) {
        match (&change.old, &change.new) {
            (old, Some(new)) => {
                let event = match old {
                    None => Events::NODE_ADD,
                    Some(old) if matters(old, new) => Events::NODE_UPDATE,
                    // Heartbeats change nothing that we look at.
                    Some(_) => return,
                };
                self.update(event, |cluster| cluster.set_node(new));
            }
            (Some(old), None) => self.update(Events::NONE, |cluster| cluster.remove_node(old.metadata.name.as_deref().unwrap_or_default())),
            (None, None) => {}
        }
    }

    pub fn pod_changed(&self, change: &Change<PodView>) {
        let view = change.object();
        let uid = view.metadata.uid.as_deref().unwrap_or_default();
        let mut state = self.state.lock();
        // A pod of the same name that was made anew is another pod.
        if let (Some(old), Some(_)) = (&change.old, &change.new)
            && old.metadata.uid != view.metadata.uid
        {
            self.pod_gone(&mut state, old.metadata.uid.as_deref().unwrap_or_default());
        }
        if change.is_delete() || view.is_finished() {
            self.pod_gone(&mut state, uid);
        } else if let Some(node) = view.node() {
            self.pod_bound(&mut state, view, node);
        } else {
            self.pod_waits(&mut state, change, view);
        }
    }

    fn pod_gone(&self, state: &mut State, uid: &str) {
        state.queue.remove(uid);
        state.cluster.withdraw(uid);
        if state.cluster.remove_pod(uid).is_some() {
            self.happened(state, Events::POD_GONE);
        }
    }

    fn pod_bound(&self, state: &mut State, view: &Arc<PodView>, node: &str) {
        let uid = view.metadata.uid.as_deref().unwrap_or_default();
        let known = state.cluster.placed_pod(uid).map(|pod| pod.view.clone());
        if let Some(known) = &known
            && same_for_scheduling(known, view)
            && known.node() == view.node()
        {
            return;
        }
        state.cluster.place(Arc::new(Pod::compile(view.clone())), node);
        state.queue.remove(uid);
        self.happened(state, if known.is_some() { Events::POD_UPDATE } else { Events::POD_PLACED });
    }

    fn pod_waits(&self, state: &mut State, change: &Change<PodView>, view: &Arc<PodView>) {
        let uid = view.metadata.uid.as_deref().unwrap_or_default();
        let ours = self.profiles.contains_key(view.spec.scheduler_name.as_deref().unwrap_or("default-scheduler"));
        if !ours || view.metadata.deletion_timestamp.is_some() {
            state.queue.remove(uid);
            state.cluster.withdraw(uid);
            return;
        }
        if state.cluster.is_placed(uid) {
            return;
        }
        let pod = Arc::new(Pod::compile(view.clone()));
        if let Some(node) = view.status.nominated_node_name.as_deref().filter(|node| !node.is_empty()) {
            state.cluster.nominate(pod.clone(), node);
        }
        let changed = change.old.as_ref().is_some_and(|old| !same_for_scheduling(old, view));
        state.queue.set(pod, changed, Instant::now());
        self.wake(state);
    }

    pub fn claim_changed(&self, change: &Change<ClaimView>) {
        let key = Key::of(&**change.object());
        self.update(Events::CLAIM, |cluster| match &change.new {
            Some(claim) => {
                if claim.status.phase.as_deref() == Some("Bound") {
                    cluster.reserved_volumes.retain(|_, of| *of != key);
                }
                cluster.claims.insert(key.clone(), claim.clone());
            }
            None => {
                cluster.reserved_volumes.retain(|_, of| *of != key);
                cluster.claims.remove(&key);
            }
        });
        self.claims_changed.notify_waiters();
    }

    fn happened(&self, state: &mut State, event: Events) {
        if event != Events::NONE {
            state.queue.happened(event, Instant::now());
        }
        self.wake(state);
    }

    fn wake(&self, state: &State) {
        let depth = state.queue.depth();
        for (queue, count) in [("active", depth.active), ("backoff", depth.backoff), ("unschedulable", depth.unschedulable)] {
            self.metrics.pending.with_label_values(&[queue]).set(count as i64);
        }
        for (kind, count) in [("nodes", state.cluster.nodes().len()), ("pods", state.cluster.pods())] {
            self.metrics.cache_size.with_label_values(&[kind]).set(count as i64);
        }
        self.ready.notify_one();
    }

    // === deciding ===

    /// Waits for the next pod and decides about it.
    pub async fn next(&self) -> Next {
        loop {
            let deadline = {
                let mut state = self.state.lock();
                if let Some(waiting) = state.queue.pop(Instant::now()) {
                    if let Some(next) = self.decide(&mut state, waiting) {
                        return next;
                    }
                    continue;
                }
                state.queue.next_deadline()
            };
            match deadline {
                Some(at) => tokio::select! { () = self.ready.notified() => {}, () = tokio::time::sleep_until(at) => {} },
                None => self.ready.notified().await,
            }
        }
    }

    fn decide(&self, state: &mut State, waiting: Waiting) -> Option<Next> {
        let since = Instant::now();
        let pod = waiting.pod.clone();
        let profile = self.profiles.get(pod.scheduler_name())?;
        let State { cluster, start, random, .. } = state;
        let decision = decide(profile, cluster, &pod, start, random);
        self.metrics.algorithm_duration.observe(since.elapsed().as_secs_f64());
        let outcome = decision.outcome.clone();
        let next = match outcome {
            Outcome::Chosen { node, .. } => self.take(state, waiting, node, since),
            Outcome::Unschedulable { rejected_by, message } => self.refuse(state, profile, waiting, rejected_by, message, &decision),
        };
        state.log.push(Arc::new(decision));
        Some(next)
    }

    fn take(&self, state: &mut State, waiting: Waiting, node: String, since: Instant) -> Next {
        let plan = state.cluster.node(&node).map_or_else(|| Ok(ClaimPlan::default()), |n| {
            if waiting.pod.claims.is_empty() { Ok(ClaimPlan::default()) } else { plan_claims(&state.cluster, &waiting.pod, n) }
        });
        // The check of the claims has just passed with the same cluster.
        let claims = plan.unwrap_or_default();
        for (volume, claim) in &claims.bind {
            state.cluster.reserved_volumes.insert(volume.clone(), claim.clone());
        }
        state.cluster.assume(waiting.pod.clone(), &node);
        Next::Bind { waiting, node, claims, since }
    }

    fn refuse(&self, state: &mut State, profile: &Profile, waiting: Waiting, rejected_by: Rejectors, mut message: String, decision: &Decision) -> Next {
        let pod = waiting.pod.clone();
        let mut events = Events::POD_UPDATE;
        let mut gated = false;
        for (number, entry) in profile.entries.iter().enumerate().filter(|(number, _)| rejected_by.contains(*number)) {
            events |= entry.plugin.events();
            gated |= entry.plugin.name() == "SchedulingGates";
            self.metrics.unschedulable.with_label_values(&[profile.entries[number].plugin.name(), pod.scheduler_name()]).inc();
        }
        if decision.nodes == 0 {
            events |= Events::NODE_ADD;
        }
        let mut preemption = None;
        if profile.preemption && !gated && decision.rejected.iter().any(|rejected| rejected.rejection.resolvable) {
            self.metrics.preemption_attempts.inc();
            match preempt::find(profile, &state.cluster, &pod, decision, &mut state.random) {
                Ok(found) => {
                    self.metrics.preemption_victims.observe(found.victims.len() as f64);
                    promise(&mut state.cluster, &pod, &found.node);
                    events |= Events::POD_GONE;
                    preemption = Some(found);
                }
                Err(reason) => message = format!("{message} preemption: {reason}"),
            }
        } else if profile.preemption && !gated && !decision.rejected.is_empty() {
            let nodes = decision.nodes;
            message = format!("{message} preemption: 0/{nodes} nodes are available: {nodes} Preemption is not helpful for scheduling.");
        }
        state.queue.rejected(&pod.uid, events, Instant::now());
        Next::Tell { waiting, message, gated, preemption }
    }

    // === what became of a decision ===

    /// The pod is bound. Its room stays assumed until the API tells the same.
    pub fn bound(&self, uid: &str) {
        self.state.lock().queue.remove(uid);
    }

    /// Binding failed: the room is free again, and the pod is tried again after a while, unless it is gone.
    pub fn not_bound(&self, pod: &Pod, gone: bool) {
        let mut state = self.state.lock();
        state.cluster.reserved_volumes.retain(|_, claim| !(claim.namespace == pod.key.namespace && pod.claims.iter().any(|(name, _)| *name == claim.name)));
        if state.cluster.forget(&pod.uid) {
            self.happened(&mut state, Events::POD_GONE);
        }
        if gone {
            state.queue.remove(&pod.uid);
        } else {
            state.queue.failed(&pod.uid, Instant::now());
        }
        self.wake(&state);
    }

    /// Whether all claims of the pod are bound.
    pub fn claims_bound(&self, pod: &Pod) -> bool {
        let state = self.state.lock();
        pod.claims.iter().all(|(name, _)| {
            let claim = state.cluster.claims.get(&Key::new(pod.key.ns(), name));
            claim.is_some_and(|claim| claim.status.phase.as_deref() == Some("Bound"))
        })
    }

    /// The latest decision about a pod, by its uid, while it is remembered.
    pub fn latest_decision(&self, uid: &str) -> Option<Arc<Decision>> {
        self.state.lock().log.latest(uid).cloned()
    }
}

/// Promises a node to a pod; lower ones that it was promised to have to look anew.
fn promise(cluster: &mut Cluster, pod: &Arc<Pod>, node: &str) {
    let outdone: Vec<String> = cluster.nominated_to(node).filter(|other| other.priority < pod.priority).map(|other| other.uid.clone()).collect();
    for uid in outdone {
        cluster.withdraw(&uid);
    }
    cluster.nominate(pod.clone(), node);
}

/// Whether a node's change is one that decisions depend on.
fn matters(old: &NodeView, new: &NodeView) -> bool {
    let images = |view: &NodeView| view.status.images.iter().map(|image| (image.names.clone(), image.size_bytes)).collect::<Vec<_>>();
    old.metadata.labels != new.metadata.labels
        || old.spec.taints != new.spec.taints
        || old.spec.unschedulable != new.spec.unschedulable
        || old.status.allocatable != new.status.allocatable
        || images(old) != images(new)
}

/// Whether two states of a pod are the same to all decisions, its own and others'.
fn same_for_scheduling(old: &PodView, new: &PodView) -> bool {
    old.metadata.labels == new.metadata.labels
        && old.metadata.generation == new.metadata.generation
        && old.metadata.deletion_timestamp.is_some() == new.metadata.deletion_timestamp.is_some()
        && old.spec.scheduling_gates.len() == new.spec.scheduling_gates.len()
        && old.spec.tolerations.len() == new.spec.tolerations.len()
}
