//! ReplicaSets and ReplicationControllers: keep a number of equal pods. One engine for both kinds.

use std::{sync::Arc, time::Duration};

use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::{
    api::{
        apps::v1::{ReplicaSet, ReplicaSetCondition, ReplicaSetStatus},
        core::v1::{ObjectReference, PodTemplateSpec, ReplicationController, ReplicationControllerCondition, ReplicationControllerStatus},
    },
    apimachinery::pkg::apis::meta::v1::{LabelSelector, Time},
};
use serde::{Serialize, de::DeserializeOwned};
use windlass_client::{
    events,
    informer::{Cached, Change, Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker},
    expectations::Expectations,
    labels,
    owner::{self, Owner},
    pod::{self, PodView},
    podcontrol::{self, PodControl, from_template, slow_start, split},
    write::{self, ApiErrorExt},
};

/// Pods that are created or deleted at most in one step.
const BURST: usize = 500;

/// A kind that the engine works for.
pub trait Workload: Cached + Serialize + DeserializeOwned + kube::Resource<DynamicType = ()> {
    const GROUP: &'static str;
    const KIND: &'static str;
    fn selector(&self) -> LabelSelector;
    fn template(&self) -> Option<PodTemplateSpec>;
    fn replicas(&self) -> i32;
    fn min_ready_seconds(&self) -> i32;
    /// The status, in the form of a ReplicaSet's.
    fn status(&self) -> ReplicaSetStatus;
    fn with_status(&self, status: ReplicaSetStatus) -> Self;
}

impl Workload for ReplicaSet {
    const GROUP: &'static str = "apps";
    const KIND: &'static str = "ReplicaSet";

    fn selector(&self) -> LabelSelector {
        self.spec.selector.clone()
    }

    fn template(&self) -> Option<PodTemplateSpec> {
        self.spec.template.clone()
    }

    fn replicas(&self) -> i32 {
        self.spec.replicas.unwrap_or(1)
    }

    fn min_ready_seconds(&self) -> i32 {
        self.spec.min_ready_seconds.unwrap_or(0)
    }

    fn status(&self) -> ReplicaSetStatus {
        self.status.clone().unwrap_or_default()
    }

    fn with_status(&self, status: ReplicaSetStatus) -> Self {
        ReplicaSet { status: Some(status), ..self.clone() }
    }
}

impl Workload for ReplicationController {
    const GROUP: &'static str = "";
    const KIND: &'static str = "ReplicationController";

    fn selector(&self) -> LabelSelector {
        LabelSelector { match_labels: self.spec.as_ref().and_then(|spec| spec.selector.clone()), match_expressions: None }
    }

    fn template(&self) -> Option<PodTemplateSpec> {
        self.spec.as_ref()?.template.clone()
    }

    fn replicas(&self) -> i32 {
        self.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1)
    }

    fn min_ready_seconds(&self) -> i32 {
        self.spec.as_ref().and_then(|spec| spec.min_ready_seconds).unwrap_or(0)
    }

    fn status(&self) -> ReplicaSetStatus {
        let status = self.status.clone().unwrap_or_default();
        let condition = |c: ReplicationControllerCondition| ReplicaSetCondition {
            last_transition_time: c.last_transition_time,
            message: c.message,
            reason: c.reason,
            status: Some(c.status),
            type_: Some(c.type_),
        };
        ReplicaSetStatus {
            available_replicas: status.available_replicas,
            conditions: status.conditions.map(|all| all.into_iter().map(condition).collect()),
            fully_labeled_replicas: status.fully_labeled_replicas,
            observed_generation: status.observed_generation,
            ready_replicas: status.ready_replicas,
            replicas: status.replicas,
            terminating_replicas: None,
        }
    }

    fn with_status(&self, status: ReplicaSetStatus) -> Self {
        let condition = |c: ReplicaSetCondition| ReplicationControllerCondition {
            last_transition_time: c.last_transition_time,
            message: c.message,
            reason: c.reason,
            status: c.status.unwrap_or_default(),
            type_: c.type_.unwrap_or_default(),
        };
        let status = ReplicationControllerStatus {
            available_replicas: status.available_replicas,
            conditions: status.conditions.map(|all| all.into_iter().map(condition).collect()),
            fully_labeled_replicas: status.fully_labeled_replicas,
            observed_generation: status.observed_generation,
            ready_replicas: status.ready_replicas,
            replicas: status.replicas,
        };
        ReplicationController { status: Some(status), ..self.clone() }
    }
}

/// What a step does.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub create: usize,
    pub delete: Vec<Arc<PodView>>,
}

/// How many pods to create, or which to delete. `related`: pods of all sets of the same owner, which tell how crowded a node is.
pub(crate) fn plan(replicas: i32, active: &[Arc<PodView>], related: &[Arc<PodView>], now: Timestamp) -> Plan {
    let wanted = usize::try_from(replicas).unwrap_or(0);
    if active.len() <= wanted {
        return Plan { create: (wanted - active.len()).min(BURST), delete: Vec::new() };
    }
    let crowd = |node: &str| related.iter().filter(|other| other.active() && other.node() == node).count();
    let mut ranked: Vec<(Arc<PodView>, usize)> = active.iter().map(|pod| (pod.clone(), crowd(pod.node()))).collect();
    ranked.sort_by(|a, b| pod::deletion_order((&a.0, a.1), (&b.0, b.1), now));
    let surplus = (active.len() - wanted).min(BURST);
    Plan { create: 0, delete: ranked.into_iter().take(surplus).map(|(pod, _)| pod).collect() }
}

/// The status that follows from the pods; `failure` is what the step's writes ended with.
pub(crate) fn status_of<K: Workload>(
    set: &K,
    active: &[Arc<PodView>],
    terminating: usize,
    failure: Option<&Error>,
    now: Timestamp,
) -> ReplicaSetStatus {
    let old = set.status();
    let template = set.template().and_then(|template| template.metadata).and_then(|metadata| metadata.labels).unwrap_or_default();
    let labeled = |pod: &&Arc<PodView>| template.iter().all(|(key, value)| pod.label(key) == Some(value));
    let count = |number: usize| (number > 0).then_some(number as i32);
    let mut conditions = old.conditions.clone().unwrap_or_default();
    let failed = conditions.iter().any(|condition| condition.type_.as_deref() == Some("ReplicaFailure"));
    match failure {
        Some(error) if !failed => {
            let reason = if active.len() < usize::try_from(set.replicas()).unwrap_or(0) { "FailedCreate" } else { "FailedDelete" };
            conditions.push(ReplicaSetCondition {
                type_: Some("ReplicaFailure".into()),
                status: Some("True".into()),
                reason: Some(reason.into()),
                message: Some(write::message(error)),
                last_transition_time: Some(Time(now)),
            });
        }
        None if failed => conditions.retain(|condition| condition.type_.as_deref() != Some("ReplicaFailure")),
        _ => {}
    }
    ReplicaSetStatus {
        replicas: active.len() as i32,
        fully_labeled_replicas: count(active.iter().filter(labeled).count()),
        ready_replicas: count(active.iter().filter(|pod| pod.ready()).count()),
        available_replicas: count(active.iter().filter(|pod| pod.available(set.min_ready_seconds(), now)).count()),
        terminating_replicas: (K::KIND == "ReplicaSet").then_some(terminating as i32),
        observed_generation: set.meta().generation,
        conditions: (!conditions.is_empty()).then_some(conditions),
    }
}

/// When the next ready pod becomes available.
pub(crate) fn next_available(pods: &[Arc<PodView>], min_ready_seconds: i32, now: Timestamp) -> Option<Duration> {
    if min_ready_seconds <= 0 {
        return None;
    }
    pods.iter().filter_map(|pod| pod.available_in(min_ready_seconds, now)).min()
}

/// Counts absent and zero as the same: both mean none.
fn same_status(a: &ReplicaSetStatus, b: &ReplicaSetStatus) -> bool {
    let numbers = |status: &ReplicaSetStatus| {
        [status.fully_labeled_replicas, status.ready_replicas, status.available_replicas].map(|number| number.unwrap_or(0))
    };
    numbers(a) == numbers(b)
        && a.replicas == b.replicas
        && a.terminating_replicas == b.terminating_replicas
        && a.observed_generation == b.observed_generation
        && a.conditions.as_deref().unwrap_or_default() == b.conditions.as_deref().unwrap_or_default()
}

struct Engine<K: Workload> {
    sets: Informer<K>,
    pods: Informer<PodView>,
    control: PodControl,
    expectations: Arc<Expectations<Key>>,
    /// Pods of all sets with the same owner as this one.
    related: Box<dyn Fn(&K) -> Vec<Arc<PodView>> + Send + Sync>,
}

/// What a change of a pod means: observe it, and wake whoever may care.
fn pod_changed<K: Workload>(change: &Change<PodView>, sets: &Informer<K>, open: &Expectations<Key>, queue: &Queue<Key>) {
    let pod = change.object();
    if let Some(key) = podcontrol::observe(change, K::GROUP, K::KIND, open, |key| queue.add(key)) {
        return queue.add(key);
    }
    let relabeled = change.old.as_deref().is_none_or(|old| old.metadata.labels != pod.metadata.labels || owner::controller(&old.metadata).is_some());
    if change.is_delete() || !relabeled || owner::controller(&pod.metadata).is_some() {
        return;
    }
    for set in sets.namespace(pod.namespace()) {
        let selector = set.selector();
        if !labels::is_empty(&selector) && labels::matches(&selector, pod.labels()) {
            queue.add(Key::of(&*set));
        }
    }
}

impl<K: Workload> Engine<K> {
    fn candidates(&self, set: &K) -> Vec<Arc<PodView>> {
        let mut pods = self.pods.by_index("owner", set.meta().uid.as_deref().unwrap_or_default());
        let orphans = self.pods.by_index("owner", "");
        pods.extend(orphans.into_iter().filter(|pod| pod.metadata.namespace == set.meta().namespace));
        pods
    }

    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(set) = self.sets.get(&key) else {
            self.expectations.forget(&key);
            return Ok(Action::Done);
        };
        let pending = self.expectations.pending(&key);
        let selector = set.selector();
        if labels::is_empty(&selector) {
            return Ok(Action::Done);
        }
        let (candidates, leaving) = split(self.candidates(&set));
        let active = Owner::of(&*set).claim(&self.control.client, candidates, |pod: &PodView| labels::matches(&selector, pod.labels())).await?;
        let uid = set.meta().uid.as_deref().unwrap_or_default();
        let terminating = leaving.iter().filter(|pod| owner::is_controlled_by(&pod.metadata, uid) && labels::matches(&selector, pod.labels())).count();

        let mut failure = None;
        if pending.is_none() && set.meta().deletion_timestamp.is_none() {
            let step = plan(set.replicas(), &active, &(self.related)(&set), Timestamp::now());
            failure = self.apply(&key, &set, step).await.err();
        }
        let now = Timestamp::now();
        let status = status_of(&*set, &active, terminating, failure.as_ref(), now);
        if !same_status(&status, &set.status()) {
            match write::update_status(&self.control.client, &set.with_status(status)).await {
                Ok(_) => {}
                // The change that beat us, or the deletion, is on its way here and wakes us.
                Err(error) if error.is_conflict() || error.is_not_found() => {}
                Err(error) => return Err(failure.unwrap_or(error)),
            }
        }
        if let Some(error) = failure {
            return Err(error);
        }
        let next = [next_available(&active, set.min_ready_seconds(), now), pending].into_iter().flatten().min();
        Ok(next.map_or(Action::Done, Action::RequeueAfter))
    }

    async fn apply(&self, key: &Key, set: &K, step: Plan) -> Result<(), Error> {
        let about = events::reference(set);
        if step.create > 0 {
            return self.create(key, set, step.create, &about).await;
        }
        self.expectations.expect_deletions(key, step.delete.iter().map(|pod| pod.uid().to_owned()));
        let results = join_all(step.delete.iter().map(|pod| async {
            let result = self.control.delete(pod, &about).await;
            if result.is_err() {
                self.expectations.deletion_observed(key, pod.uid());
            }
            result
        }));
        results.await.into_iter().find(|result| result.as_ref().is_err_and(|error| !error.is_not_found())).unwrap_or(Ok(()))
    }

    async fn create(&self, key: &Key, set: &K, count: usize, about: &ObjectReference) -> Result<(), Error> {
        let Some(template) = set.template() else { return Ok(()) };
        let pod = from_template(&template, &owner::reference(set));
        self.expectations.expect_creations(key, count);
        let (made, error) = slow_start(count, |_| async {
            self.control.create(key.ns(), &pod, about).await.map(|_| ())
        })
        .await;
        for _ in made..count {
            self.expectations.creation_observed(key);
        }
        match error {
            Some(error) if !error.is_namespace_terminating() => Err(error),
            _ => Ok(()),
        }
    }
}

fn start<K: Workload>(
    context: &Context,
    queue_name: &'static str,
    component: &'static str,
    workers: usize,
    sets: Informer<K>,
    related: impl Fn(&K) -> Vec<Arc<PodView>> + Send + Sync + 'static,
) -> Worker {
    let queue = Queue::new(queue_name);
    let pods = context.pods();
    let expectations = Arc::new(Expectations::default());
    {
        let (queue, expectations) = (queue.clone(), expectations.clone());
        sets.on_change(move |change| {
            // A set that was replaced under its name inherits nothing.
            if change.old.as_ref().is_some_and(|old| change.new.as_ref().is_none_or(|new| new.meta().uid != old.meta().uid)) {
                expectations.forget(&Key::of(&**change.object()));
            }
            queue.add(Key::of(&**change.object()));
        });
    }
    {
        let (queue, sets, expectations) = (queue.clone(), sets.clone(), expectations.clone());
        pods.on_change(move |change| pod_changed(change, &sets, &expectations, &queue));
    }
    let control = PodControl { client: context.client.clone(), recorder: context.recorder(component) };
    let engine = Arc::new(Engine { sets, pods, control, expectations, related: Box::new(related) });
    context.worker(queue, workers, engine, Engine::sync)
}

/// The `replicaset-controller`.
pub fn start_replica_sets(context: &Context) -> Worker {
    let (sets, pods) = (context.replica_sets(), context.pods());
    let all = sets.clone();
    let related = move |set: &ReplicaSet| {
        let siblings = match owner::controller(&set.metadata) {
            Some(owner) => all.by_index("owner", &owner.uid),
            None => vec![Arc::new(set.clone())],
        };
        siblings.iter().filter_map(|set| set.metadata.uid.as_deref()).flat_map(|uid| pods.by_index("owner", uid)).collect()
    };
    start(context, "replicaset", "replicaset-controller", context.config.concurrent_replicaset_syncs, sets, related)
}

/// The `replicationcontroller-controller`.
pub fn start_replication_controllers(context: &Context) -> Worker {
    let pods = context.pods();
    let related = move |set: &ReplicationController| pods.by_index("owner", set.metadata.uid.as_deref().unwrap_or_default());
    let sets = context.replication_controllers();
    start(context, "replicationmanager", "replication-controller", context.config.concurrent_rc_syncs, sets, related)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::tests::pod;
    use serde_json::json;

    fn pods(phases: &[&str]) -> Vec<Arc<PodView>> {
        let make = |(index, phase): (usize, &&str)| Arc::new(pod(json!({
            "metadata": {"name": format!("p{index}"), "labels": {"a": "b"}}, "spec": {"nodeName": "n"}, "status": {"phase": phase}})));
        phases.iter().enumerate().map(make).collect()
    }

    #[test]
    fn plans() {
        let now = Timestamp::from_second(1_000_000).expect("a time");
        for (replicas, phases, create, delete) in [
            (3, &["Running"][..], 2, &[][..]),
            (1, &["Running"], 0, &[]),
            (1, &["Running", "Pending"], 0, &["p1"]),
            (0, &["Running"], 0, &["p0"]),
            (1000, &[], 500, &[]),
        ] {
            let active = pods(phases);
            let step = plan(replicas, &active, &active, now);
            assert_eq!(step.create, create, "{replicas} {phases:?}");
            assert_eq!(step.delete.iter().map(|pod| pod.name()).collect::<Vec<_>>(), delete, "{replicas} {phases:?}");
        }
    }

    #[test]
    fn statuses() {
        let now = Timestamp::from_second(1_000_000).expect("a time");
        let set: ReplicaSet = serde_json::from_value(json!({
            "metadata": {"name": "r", "generation": 4},
            "spec": {"replicas": 2, "selector": {"matchLabels": {"a": "b"}}, "template": {"metadata": {"labels": {"a": "b"}}}}})).expect("a set");
        let active = pods(&["Running"]);
        let failure = Error::Invalid("no room".into());
        let status = status_of(&set, &active, 1, Some(&failure), now);
        assert_eq!((status.replicas, status.fully_labeled_replicas, status.ready_replicas), (1, Some(1), None));
        assert_eq!((status.terminating_replicas, status.observed_generation), (Some(1), Some(4)));
        let condition = &status.conditions.clone().expect("conditions")[0];
        assert_eq!((condition.reason.as_deref(), condition.message.as_deref()), (Some("FailedCreate"), Some("no room")));
        let recovered = status_of(&set.with_status(status), &active, 0, None, now);
        assert_eq!(recovered.conditions, None);
    }
}
