//! Disruption budgets: how many pods of an application may be evicted right now.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::{
    api::{
        apps::v1::{Deployment, ReplicaSet, StatefulSet},
        core::v1::ReplicationController,
        policy::v1::{PodDisruptionBudget, PodDisruptionBudgetStatus},
    },
    apimachinery::pkg::{
        apis::meta::v1::{Condition, OwnerReference, Time},
        util::intstr::IntOrString,
    },
};
use serde_json::Value;
use windlass_client::{
    events::{self, EventType, Recorder},
    informer::{Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker, after},
    deployment::plan::scaled,
    labels, owner,
    pod::{PodView, until},
    write::{self, ApiErrorExt},
};

/// An eviction that has not shown as a deletion after this long did not happen.
const DELETION_TIMEOUT: i64 = 120;
/// A disruption that is claimed in a pod's condition and has not ended the pod after this long did not happen.
const STALE_CONDITION: i64 = 120;

/// How many pods there should be, and how many must be healthy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wanted {
    expected: i32,
    healthy: i32,
}

/// `scale` is the total of the pods' controllers; only percentages and `maxUnavailable` need it.
fn wanted(budget: &PodDisruptionBudget, pods: i32, scale: i32) -> Wanted {
    let spec = budget.spec.clone().unwrap_or_default();
    match (&spec.max_unavailable, &spec.min_available) {
        (Some(max), _) => {
            let healthy = (scale - scaled(Some(max), scale, true)).max(0);
            Wanted { expected: scale, healthy }
        }
        (None, Some(IntOrString::Int(number))) => Wanted { expected: pods, healthy: *number },
        (None, min) => Wanted { expected: scale, healthy: scaled(min.as_ref(), scale, true) },
    }
}

fn needs_scale(budget: &PodDisruptionBudget) -> bool {
    let Some(spec) = &budget.spec else { return false };
    spec.max_unavailable.is_some() || matches!(spec.min_available, Some(IntOrString::String(_)))
}

/// Evictions that are under way: those that the pod list does not show yet, and that are not too old.
fn disrupted(budget: &PodDisruptionBudget, pods: &[Arc<PodView>], now: Timestamp) -> (BTreeMap<String, Time>, Option<Duration>) {
    let mut still = BTreeMap::new();
    let mut next: Option<Duration> = None;
    let noted = budget.status.as_ref().and_then(|status| status.disrupted_pods.clone()).unwrap_or_default();
    for (name, since) in noted {
        let waiting = pods.iter().any(|pod| pod.name() == name && !pod.deleting());
        if let Some(left) = until(since.0, DELETION_TIMEOUT, now).filter(|_| waiting) {
            still.insert(name, since);
            next = [next, Some(left)].into_iter().flatten().min();
        }
    }
    (still, next)
}

fn status_of(budget: &PodDisruptionBudget, pods: &[Arc<PodView>], wanted: Wanted, disrupted: BTreeMap<String, Time>, now: Timestamp) -> PodDisruptionBudgetStatus {
    let healthy = pods.iter().filter(|pod| pod.ready() && !pod.deleting() && !disrupted.contains_key(pod.name())).count() as i32;
    let allowed = if wanted.expected <= 0 { 0 } else { (healthy - wanted.healthy).max(0) };
    let (status, reason) = if allowed > 0 { ("True", "SufficientPods") } else { ("False", "InsufficientPods") };
    let mut conditions = budget.status.as_ref().and_then(|status| status.conditions.clone()).unwrap_or_default();
    set_condition(&mut conditions, status, reason, "", budget.metadata.generation, now);
    PodDisruptionBudgetStatus {
        conditions: Some(conditions),
        current_healthy: Some(healthy),
        desired_healthy: Some(wanted.healthy),
        disrupted_pods: (!disrupted.is_empty()).then_some(disrupted),
        disruptions_allowed: Some(allowed),
        expected_pods: Some(wanted.expected),
        observed_generation: budget.metadata.generation,
    }
}

fn set_condition(conditions: &mut Vec<Condition>, status: &str, reason: &str, message: &str, generation: Option<i64>, now: Timestamp) {
    let wanted = |since: Time| Condition {
        type_: "DisruptionAllowed".into(),
        status: status.into(),
        reason: reason.into(),
        message: message.into(),
        observed_generation: generation,
        last_transition_time: since,
    };
    match conditions.iter_mut().find(|condition| condition.type_ == "DisruptionAllowed") {
        Some(known) => {
            let since = if known.status == status { known.last_transition_time.clone() } else { Time(now) };
            *known = wanted(since);
        }
        None => conditions.push(wanted(Time(now))),
    }
}

fn same(a: &PodDisruptionBudgetStatus, b: &PodDisruptionBudgetStatus) -> bool {
    let numbers = |s: &PodDisruptionBudgetStatus| [s.current_healthy, s.desired_healthy, s.disruptions_allowed, s.expected_pods].map(|number| number.unwrap_or(0));
    numbers(a) == numbers(b)
        && a.disrupted_pods.clone().unwrap_or_default() == b.disrupted_pods.clone().unwrap_or_default()
        && a.observed_generation == b.observed_generation
        && a.conditions == b.conditions
}

struct Controller {
    client: kube::Client,
    recorder: Recorder,
    budgets: Informer<PodDisruptionBudget>,
    pods: Informer<PodView>,
    sets: Informer<ReplicaSet>,
    deployments: Informer<Deployment>,
    stateful: Informer<StatefulSet>,
    replication: Informer<ReplicationController>,
    kinds: tokio::sync::Mutex<BTreeMap<(String, String), Option<crate::discovery::Resource>>>,
}

impl Controller {
    /// The workload that decides about a pod's number: the UID and its size. None if a controller cannot be scaled.
    async fn scale_of(&self, namespace: &str, owner: &OwnerReference) -> Result<Option<(String, i32)>, Error> {
        let group = owner.api_version.rsplit_once('/').map_or("", |(group, _)| group);
        let name = owner.name.as_str();
        let known = match (group, owner.kind.as_str()) {
            ("apps", "ReplicaSet") => self.sets.get_in(namespace, name).filter(|set| set.metadata.uid.as_ref() == Some(&owner.uid)).map(|set| {
                let deployment = owner::controller_of(&set.metadata, "apps", "Deployment");
                let deployment = deployment.and_then(|owner| self.deployments.get_in(namespace, &owner.name));
                match deployment {
                    Some(deployment) => (deployment.metadata.uid.clone(), deployment.spec.replicas.unwrap_or(1)),
                    None => (set.metadata.uid.clone(), set.spec.replicas.unwrap_or(1)),
                }
            }),
            ("apps", "StatefulSet") => self.stateful.get_in(namespace, name).map(|set| (set.metadata.uid.clone(), set.spec.replicas.unwrap_or(1))),
            ("", "ReplicationController") => {
                let size = |set: &ReplicationController| set.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
                self.replication.get_in(namespace, name).map(|set| (set.metadata.uid.clone(), size(&set)))
            }
            _ => return self.custom_scale(namespace, owner, group).await,
        };
        Ok(known.map(|(uid, size)| (uid.unwrap_or_default(), size)))
    }

    /// Any other kind, by its scale subresource.
    async fn custom_scale(&self, namespace: &str, owner: &OwnerReference, group: &str) -> Result<Option<(String, i32)>, Error> {
        let kind = (group.to_owned(), owner.kind.clone());
        let mut kinds = self.kinds.lock().await;
        if !kinds.contains_key(&kind) {
            let found = crate::discovery::discover(&self.client).await?;
            let resource = found.resources.into_iter().find(|resource| (resource.group.as_str(), resource.kind.as_str()) == (group, owner.kind.as_str()));
            kinds.insert(kind.clone(), resource);
        }
        let Some(resource) = kinds.get(&kind).cloned().flatten() else { return Ok(None) };
        drop(kinds);
        let scale: Option<Value> = write::get(&self.client, &format!("{}/{}/scale", resource.path(namespace), owner.name)).await?;
        let size = scale.as_ref().and_then(|scale| scale["spec"]["replicas"].as_i64()).and_then(|size| i32::try_from(size).ok());
        Ok(size.map(|size| (owner.uid.clone(), size)))
    }

    /// The total size of the pods' controllers; an error message if one of them has none.
    async fn total_scale(&self, pods: &[Arc<PodView>]) -> Result<Result<i32, String>, Error> {
        let mut sizes: BTreeMap<String, i32> = BTreeMap::new();
        let mut owners: BTreeMap<String, Option<(String, i32)>> = BTreeMap::new();
        for pod in pods {
            // A pod of its own counts for nothing.
            let Some(owner) = owner::controller(&pod.metadata) else { continue };
            if !owners.contains_key(&owner.uid) {
                let scale = self.scale_of(pod.namespace(), owner).await?;
                owners.insert(owner.uid.clone(), scale);
            }
            match owners.get(&owner.uid).cloned().flatten() {
                Some((uid, size)) => drop(sizes.insert(uid, size)),
                None => return Ok(Err(format!("{} {:?} does not implement the scale subresource", owner.kind, owner.name))),
            }
        }
        Ok(Ok(sizes.values().sum()))
    }

    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(budget) = self.budgets.get(&key) else { return Ok(Action::Done) };
        let selector = budget.spec.as_ref().and_then(|spec| spec.selector.clone());
        let selected = |pod: &Arc<PodView>| selector.as_ref().is_some_and(|selector| labels::matches(selector, pod.labels()));
        let pods: Vec<_> = self.pods.namespace(key.ns()).into_iter().filter(|pod| selected(pod) && !pod.finished()).collect();
        let about = events::reference(&*budget);
        if pods.is_empty() {
            self.recorder.event(&about, EventType::Normal, "NoPods", "No matching pods found".into());
        }
        let now = Timestamp::now();
        let scale = if needs_scale(&budget) { self.total_scale(&pods).await? } else { Ok(0) };
        let status = match scale {
            Ok(scale) => {
                let (disrupted, next) = disrupted(&budget, &pods, now);
                let status = status_of(&budget, &pods, wanted(&budget, pods.len() as i32, scale), disrupted, now);
                (status, next)
            }
            Err(message) => {
                // Fail safe: nothing may be disrupted.
                let message = format!("Failed to calculate the number of expected pods: {message}");
                self.recorder.event(&about, EventType::Warning, "CalculateExpectedPodCountFailed", message.clone());
                let mut status = budget.status.clone().unwrap_or_default();
                status.disruptions_allowed = Some(0);
                status.observed_generation = budget.metadata.generation;
                set_condition(status.conditions.get_or_insert_default(), "False", "SyncFailed", &message, budget.metadata.generation, now);
                (status, None)
            }
        };
        let (status, next) = status;
        if !same(&status, &budget.status.clone().unwrap_or_default()) {
            let wanted = PodDisruptionBudget { status: Some(status), ..(*budget).clone() };
            let written: Result<PodDisruptionBudget, Error> = write::update_status(&self.client, &wanted).await;
            match written {
                Err(error) if !error.is_not_found() => return Err(error),
                _ => {}
            }
        }
        Ok(after(next))
    }
}

/// A pod whose condition says that it is being disrupted, but which is not: how long until the claim is stale.
fn stale_in(pod: &PodView, now: Timestamp) -> Option<Duration> {
    if pod.deleting() || pod.finished() {
        return None;
    }
    let condition = pod.condition("DisruptionTarget").filter(|condition| condition.status == "True")?;
    Some(until(condition.last_transition_time.as_ref()?.0, STALE_CONDITION, now).unwrap_or_default())
}

struct Stale {
    client: kube::Client,
    pods: Informer<PodView>,
}

impl Stale {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(pod) = self.pods.get(&key) else { return Ok(Action::Done) };
        match stale_in(&pod, Timestamp::now()) {
            None => return Ok(Action::Done),
            Some(left) if !left.is_zero() => return Ok(Action::RequeueAfter(left)),
            Some(_) => {}
        }
        let condition = serde_json::json!({"type": "DisruptionTarget", "status": "False", "lastTransitionTime": Time(Timestamp::now())});
        let patch = serde_json::json!({"metadata": {"uid": pod.uid()}, "status": {"conditions": [condition]}});
        match write::strategic_patch(&self.client, &format!("{}/status", write::path(&*pod)), &patch).await {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(Action::Done),
        }
    }
}

/// The `disruption-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("disruption");
    let stale = Queue::new("stale_pod_disruption");
    let (budgets, pods) = (context.disruption_budgets(), context.pods());
    {
        let queue = queue.clone();
        budgets.on_change(move |change| queue.add(Key::of(&**change.object())));
    }
    {
        let (queue, stale, budgets) = (queue.clone(), stale.clone(), budgets.clone());
        pods.on_change(move |change| {
            let pod = change.object();
            if !change.is_delete() && stale_in(pod, Timestamp::now()).is_some() {
                stale.add(Key::of(&**pod));
            }
            for budget in budgets.namespace(pod.namespace()) {
                let Some(selector) = budget.spec.as_ref().and_then(|spec| spec.selector.as_ref()) else { continue };
                if change.old.iter().chain(&change.new).any(|pod| labels::matches(selector, pod.labels())) {
                    queue.add(Key::of(&*budget));
                }
            }
        });
    }
    let controller = Arc::new(Controller {
        client: context.client.clone(),
        recorder: context.recorder("controllermanager"),
        budgets: budgets.clone(),
        pods: pods.clone(),
        sets: context.replica_sets(),
        deployments: context.deployments(),
        stateful: context.stateful_sets(),
        replication: context.replication_controllers(),
        kinds: tokio::sync::Mutex::default(),
    });
    // A workload's new size changes what its budgets want.
    let resized = |queue: &Queue<Key>, budgets: &Informer<PodDisruptionBudget>, namespace: &Option<String>| {
        let scaled = budgets.namespace(namespace.as_deref().unwrap_or_default()).into_iter().filter(|budget| needs_scale(budget));
        scaled.for_each(|budget| queue.add(Key::of(&*budget)));
    };
    macro_rules! watch_size {
        ($informer:expr, $size:expr) => {{
            let (queue, budgets) = (queue.clone(), budgets.clone());
            $informer.on_change(move |change| {
                let size = $size;
                if change.old.as_deref().map(size) != change.new.as_deref().map(size) {
                    resized(&queue, &budgets, &change.object().metadata.namespace);
                }
            });
        }};
    }
    watch_size!(controller.deployments, |set: &Deployment| set.spec.replicas);
    watch_size!(controller.sets, |set: &ReplicaSet| set.spec.replicas);
    watch_size!(controller.stateful, |set: &StatefulSet| set.spec.replicas);
    let stale_state = Arc::new(Stale { client: context.client.clone(), pods });
    let (main, second) = (context.worker(queue, 5, controller, Controller::sync), context.worker(stale, 1, stale_state, Stale::sync));
    Box::pin(async move {
        futures::join!(main, second);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::tests::pod;
    use serde_json::json;

    fn budget(spec: Value, status: Value) -> PodDisruptionBudget {
        serde_json::from_value(json!({"metadata": {"name": "b", "generation": 1}, "spec": spec, "status": status})).expect("a budget")
    }

    #[test]
    fn what_a_budget_wants() {
        for (spec, pods, scale, expected, healthy) in [
            (json!({"minAvailable": 2}), 3, 0, 3, 2),
            (json!({"minAvailable": "50%"}), 3, 5, 5, 3),
            (json!({"maxUnavailable": 1}), 3, 5, 5, 4),
            (json!({"maxUnavailable": "30%"}), 3, 10, 10, 7),
            (json!({"maxUnavailable": 7}), 3, 5, 5, 0),
        ] {
            assert_eq!(wanted(&budget(spec.clone(), json!({})), pods, scale), Wanted { expected, healthy }, "{spec}");
        }
    }

    #[test]
    fn evictions_under_way_count_as_gone() {
        let now = Timestamp::from_second(1_000_000).expect("a time");
        let ago = |seconds: i64| Timestamp::from_second(1_000_000 - seconds).expect("a time").to_string();
        let healthy = |name: &str| Arc::new(pod(json!({"metadata": {"name": name}, "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}})));
        let pods = [healthy("a"), healthy("b"), healthy("c")];
        let budget = budget(json!({"minAvailable": 1}), json!({"disruptedPods": {"a": ago(20), "b": ago(200), "gone": ago(1)}}));
        let (still, next) = disrupted(&budget, &pods, now);
        assert_eq!((still.keys().map(String::as_str).collect::<Vec<_>>(), next), (vec!["a"], Some(Duration::from_secs(100))));
        let status = status_of(&budget, &pods, wanted(&budget, 3, 0), still, now);
        assert_eq!((status.current_healthy, status.disruptions_allowed), (Some(2), Some(1)));
        assert_eq!(status.conditions.expect("conditions")[0].reason, "SufficientPods");
    }
}
