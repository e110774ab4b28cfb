//! DaemonSets: one pod on every node that wants it.

mod plan;

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::{
    apps::v1::{ControllerRevision, DaemonSet, DaemonSetStatus},
    core::v1::{Node, ObjectReference, Pod},
};
use parking_lot::Mutex;
use windlass_client::{
    events::{self, EventType, Recorder},
    informer::{Change, Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker, after},
    expectations::Expectations,
    labels,
    owner::{self, Owner},
    pod::PodView,
    podcontrol::{self, PodControl, from_template, slow_start},
    replicaset::next_available,
    revision::{self, Current},
    write::{self, ApiErrorExt},
};
use plan::{Place, Plan};

const BURST: usize = 250;
const GENERATION: &str = "deprecated.daemonset.template.generation";
/// First and longest wait before a pod that ended is replaced on its node.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(900));

struct Controller {
    client: kube::Client,
    recorder: Recorder,
    control: PodControl,
    sets: Informer<DaemonSet>,
    pods: Informer<PodView>,
    nodes: Informer<Node>,
    revisions: Informer<ControllerRevision>,
    expectations: Arc<Expectations<Key>>,
    /// When a pod that ended was last replaced on a node, and how long the next one waits. Bounded by sets times nodes.
    replaced: Mutex<HashMap<(String, String), (Instant, Duration)>>,
}

fn status_of(set: &DaemonSet, places: &[Place], hash: &str, now: Timestamp) -> DaemonSetStatus {
    let mut status = DaemonSetStatus {
        observed_generation: set.metadata.generation,
        collision_count: set.status.as_ref().and_then(|status| status.collision_count),
        conditions: set.status.as_ref().and_then(|status| status.conditions.clone()),
        ..DaemonSetStatus::default()
    };
    let (mut updated, mut available) = (0, 0);
    for at in places {
        let (run, _) = plan::eligible(set, &at.node);
        let scheduled = !at.pods.is_empty();
        if !run {
            status.number_misscheduled += i32::from(scheduled);
            continue;
        }
        status.desired_number_scheduled += 1;
        if !scheduled {
            continue;
        }
        status.current_number_scheduled += 1;
        let mut pods: Vec<_> = at.pods.iter().collect();
        pods.sort_by_key(|pod| pod.created());
        let best = pods.iter().find(|pod| pod.ready()).unwrap_or(&pods[0]);
        status.number_ready += i32::from(best.ready());
        available += i32::from(best.available(set.spec.min_ready_seconds.unwrap_or(0), now));
        updated += i32::from(best.label(revision::LABEL) == Some(hash));
    }
    let some = |number: i32| (number != 0).then_some(number);
    status.updated_number_scheduled = some(updated);
    status.number_available = some(available);
    status.number_unavailable = some(status.desired_number_scheduled - available);
    status
}

fn same_status(a: &DaemonSetStatus, b: &DaemonSetStatus) -> bool {
    let numbers = |s: &DaemonSetStatus| {
        let optional = [s.updated_number_scheduled, s.number_available, s.number_unavailable].map(|number| number.unwrap_or(0));
        (optional, s.desired_number_scheduled, s.current_number_scheduled, s.number_misscheduled, s.number_ready)
    };
    numbers(a) == numbers(b) && a.observed_generation == b.observed_generation && a.collision_count == b.collision_count
}

impl Controller {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(set) = self.sets.get(&key) else {
            self.expectations.forget(&key);
            self.replaced.lock().retain(|(name, _), _| *name != key.to_string());
            return Ok(Action::Done);
        };
        let selector = &set.spec.selector;
        if labels::is_empty(selector) {
            let message = "This daemon set is selecting all pods. A non-empty selector is required.".to_owned();
            self.recorder.event(&events::reference(&*set), EventType::Warning, "SelectingAll", message);
            return Ok(Action::Done);
        }
        if set.metadata.deletion_timestamp.is_some() {
            return Ok(Action::Done);
        }
        let history = revision::history(&self.client, &*set, self.revisions.namespace(key.ns()), selector).await?;
        let collisions = set.status.as_ref().and_then(|status| status.collision_count);
        let current = match revision::current(&self.client, &*set, &set.spec.template, &history, collisions).await? {
            Current::Is(revision) => revision,
            Current::Collision => return self.collide(&set).await,
        };
        let hash = revision::hash_of(&current).to_owned();
        let mut candidates = self.pods.by_index("owner", set.metadata.uid.as_deref().unwrap_or_default());
        candidates.extend(self.pods.by_index("owner", "").into_iter().filter(|pod| pod.metadata.namespace == set.metadata.namespace));
        let pending = self.expectations.pending(&key);
        let pods = Owner::of(&*set).claim(&self.client, candidates, |pod: &PodView| labels::matches(selector, pod.labels())).await?;
        let (places, strays) = plan::arrange(&self.nodes.list(), pods.clone());
        let now = Timestamp::now();
        let mut result = Ok(());
        let mut next = pending;
        if pending.is_none() {
            let mut step = plan::place(&set, &places, &strays, &hash, now);
            next = self.hold_back(&key, &mut step);
            if step.create.is_empty() && step.delete.is_empty() {
                let rolling = plan::roll(&set, &places, &hash, now);
                step.create = rolling.create;
                step.delete = rolling.delete;
            }
            result = self.apply(&key, &set, step, &hash).await;
            if result.is_ok() {
                let in_use = |revision: &ControllerRevision| {
                    revision::name(revision) == revision::name(&current) || pods.iter().any(|pod| pod.label(revision::LABEL) == Some(revision::hash_of(revision)))
                };
                revision::trim(&self.client, &history, set.spec.revision_history_limit.unwrap_or(10), in_use).await?;
            }
        }
        let status = status_of(&set, &places, &hash, now);
        if !same_status(&status, &set.status.clone().unwrap_or_default()) {
            let written: Result<DaemonSet, Error> = write::update_status(&self.client, &DaemonSet { status: Some(status), ..(*set).clone() }).await;
            match written {
                Err(error) if !error.is_not_found() => return Err(result.err().unwrap_or(error)),
                _ => {}
            }
        }
        result?;
        let available = next_available(&pods, set.spec.min_ready_seconds.unwrap_or(0), now);
        Ok(after([next, available].into_iter().flatten().min()))
    }

    async fn collide(&self, set: &DaemonSet) -> Result<Action, Error> {
        let mut set = set.clone();
        *set.status.get_or_insert_default().collision_count.get_or_insert(0) += 1;
        let _: DaemonSet = write::update_status(&self.client, &set).await?;
        Ok(Action::Done)
    }

    /// Drops from the step those ended pods whose replacement has to wait; returns the shortest wait.
    fn hold_back(&self, key: &Key, step: &mut Plan) -> Option<Duration> {
        let mut replaced = self.replaced.lock();
        let now = Instant::now();
        let mut next: Option<Duration> = None;
        for pod in std::mem::take(&mut step.replace) {
            let entry = (key.to_string(), pod.node().to_owned());
            let (last, wait) = replaced.get(&entry).copied().unwrap_or((now - BACKOFF.0, Duration::ZERO));
            let left = (last + wait).saturating_duration_since(now);
            if left.is_zero() {
                // A pod that held out twice as long as the longest wait starts anew.
                let calm = now.duration_since(last) > 2 * BACKOFF.1;
                let wait = if calm || wait.is_zero() { BACKOFF.0 } else { (wait * 2).min(BACKOFF.1) };
                replaced.insert(entry, (now, wait));
                step.delete.push(pod.clone());
                step.replace.push(pod);
            } else {
                next = [next, Some(left)].into_iter().flatten().min();
            }
        }
        next
    }

    async fn apply(&self, key: &Key, set: &DaemonSet, mut step: Plan, hash: &str) -> Result<(), Error> {
        let about = events::reference(set);
        for pod in &step.replace {
            let (reason, what) = if pod.phase() == "Failed" { ("FailedDaemonPod", "failed") } else { ("SucceededDaemonPod", "succeeded") };
            let kind = if pod.phase() == "Failed" { EventType::Warning } else { EventType::Normal };
            let verb = if pod.phase() == "Failed" { "kill" } else { "delete" };
            self.recorder.event(&about, kind, reason, format!("Found {what} daemon pod {}/{} on node {}, will try to {verb} it", pod.namespace(), pod.name(), pod.node()));
        }
        step.create.truncate(BURST);
        step.delete.truncate(BURST);
        let created = self.create(key, set, &step.create, hash, &about).await;
        self.expectations.expect_deletions(key, step.delete.iter().map(|pod| pod.uid().to_owned()));
        let deletions = join_all(step.delete.iter().map(|pod| async {
            let result = self.control.delete(pod, &about).await;
            if result.is_err() {
                self.expectations.deletion_observed(key, pod.uid());
            }
            result
        }));
        let failed = deletions.await.into_iter().find(|result| result.as_ref().is_err_and(|error| !error.is_not_found()));
        created.and(failed.unwrap_or(Ok(())))
    }

    async fn create(&self, key: &Key, set: &DaemonSet, nodes: &[String], hash: &str, about: &ObjectReference) -> Result<(), Error> {
        let mut template = set.spec.template.clone();
        template.spec.get_or_insert_default().tolerations = Some(plan::tolerations(&set.spec.template));
        let mut pod: Pod = from_template(&template, &owner::reference(set));
        let pod_labels = pod.metadata.labels.get_or_insert_default();
        pod_labels.insert(revision::LABEL.into(), hash.to_owned());
        if let Some(generation) = set.metadata.annotations.as_ref().and_then(|annotations| annotations.get(GENERATION)) {
            pod_labels.insert("pod-template-generation".into(), generation.clone());
        }
        self.expectations.expect_creations(key, nodes.len());
        let pod = &pod;
        let (made, error) = slow_start(nodes.len(), |index| async move {
            let mut pod = pod.clone();
            plan::bind(&mut pod, &nodes[index]);
            self.control.create(key.ns(), &pod, about).await.map(|_| ())
        })
        .await;
        for _ in made..nodes.len() {
            self.expectations.creation_observed(key);
        }
        match error {
            Some(error) if !error.is_namespace_terminating() => Err(error),
            _ => Ok(()),
        }
    }
}

fn pod_changed(change: &Change<PodView>, sets: &Informer<DaemonSet>, open: &Expectations<Key>, queue: &Queue<Key>) {
    let pod = change.object();
    if let Some(key) = podcontrol::observe(change, "apps", "DaemonSet", open, |key| queue.add(key)) {
        return queue.add(key);
    }
    if change.is_delete() || owner::controller(&pod.metadata).is_some() {
        return;
    }
    let selected = |set: &Arc<DaemonSet>| !labels::is_empty(&set.spec.selector) && labels::matches(&set.spec.selector, pod.labels());
    sets.namespace(pod.namespace()).into_iter().filter(selected).for_each(|set| queue.add(Key::of(&*set)));
}

/// What of a node decides where daemons go.
fn node_matters(node: &Node) -> (BTreeSet<(String, String)>, Vec<(String, String, Option<String>)>) {
    let node_labels = labels::of(&node.metadata.labels).iter().map(|(key, value)| (key.clone(), value.clone())).collect();
    (node_labels, labels::taints(node).iter().map(|taint| (taint.key.clone(), taint.effect.clone(), taint.value.clone())).collect())
}

/// The `daemonset-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("daemonset");
    let (sets, pods, nodes) = (context.daemon_sets(), context.pods(), context.nodes());
    let expectations: Arc<Expectations<Key>> = Arc::default();
    {
        let (queue, expectations) = (queue.clone(), expectations.clone());
        sets.on_change(move |change| {
            if change.old.as_ref().is_some_and(|old| change.new.as_ref().is_none_or(|new| new.metadata.uid != old.metadata.uid)) {
                expectations.forget(&Key::of(&**change.object()));
            }
            queue.add(Key::of(&**change.object()));
        });
    }
    {
        let (queue, sets, expectations) = (queue.clone(), sets.clone(), expectations.clone());
        pods.on_change(move |change| pod_changed(change, &sets, &expectations, &queue));
    }
    {
        let (queue, sets) = (queue.clone(), sets.clone());
        nodes.on_change(move |change| {
            if sets.is_empty() {
                return;
            }
            if let (Some(old), Some(new)) = (&change.old, &change.new)
                && node_matters(old) == node_matters(new)
            {
                return;
            }
            for set in sets.list() {
                let sides = change.old.iter().chain(&change.new);
                let verdicts: BTreeSet<_> = sides.map(|node| plan::eligible(&set, node)).collect();
                if verdicts.len() > 1 || verdicts.contains(&(true, true)) && (change.old.is_none() || change.is_delete()) {
                    queue.add(Key::of(&*set));
                }
            }
        });
    }
    let recorder = context.recorder("daemonset-controller");
    let controller = Arc::new(Controller {
        client: context.client.clone(),
        control: PodControl { client: context.client.clone(), recorder: recorder.clone() },
        recorder,
        sets,
        pods,
        nodes,
        revisions: context.controller_revisions(),
        expectations,
        replaced: Mutex::default(),
    });
    context.worker(queue, context.config.concurrent_daemonset_syncs, controller, Controller::sync)
}
