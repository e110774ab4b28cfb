//! A Deployment's status and conditions.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::{
    api::apps::v1::{Deployment, DeploymentCondition, DeploymentStatus, ReplicaSet},
    apimachinery::pkg::apis::meta::v1::Time,
};

use super::plan;
use crate::pod::until;

pub const NEW_SET: &str = "NewReplicaSetCreated";
pub const FOUND_SET: &str = "FoundNewReplicaSet";
pub const CREATE_ERROR: &str = "ReplicaSetCreateError";
const AVAILABLE: &str = "NewReplicaSetAvailable";
const UPDATED: &str = "ReplicaSetUpdated";
const TIMED_OUT: &str = "ProgressDeadlineExceeded";
const PAUSED: &str = "DeploymentPaused";
const RESUMED: &str = "DeploymentResumed";

/// A condition as of now.
pub fn condition(kind: &str, status: &str, reason: &str, message: String, now: Timestamp) -> DeploymentCondition {
    DeploymentCondition {
        type_: Some(kind.into()),
        status: Some(status.into()),
        reason: Some(reason.into()),
        message: Some(message),
        last_update_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
    }
}

/// The condition of this type.
pub fn find<'a>(status: &'a DeploymentStatus, kind: &str) -> Option<&'a DeploymentCondition> {
    status.conditions.iter().flatten().find(|condition| condition.type_.as_deref() == Some(kind))
}

/// Adds or replaces a condition; one with the same status and reason stays as it is.
pub fn set(status: &mut DeploymentStatus, mut condition: DeploymentCondition) {
    let kind = condition.type_.clone().unwrap_or_default();
    if let Some(current) = find(status, &kind) {
        if current.status == condition.status && current.reason == condition.reason {
            return;
        }
        if current.status == condition.status {
            condition.last_transition_time = current.last_transition_time.clone();
        }
    }
    remove(status, &kind);
    status.conditions.get_or_insert_default().push(condition);
}

fn remove(status: &mut DeploymentStatus, kind: &str) {
    if let Some(conditions) = &mut status.conditions {
        conditions.retain(|condition| condition.type_.as_deref() != Some(kind));
    }
    if status.conditions.as_ref().is_some_and(Vec::is_empty) {
        status.conditions = None;
    }
}

/// The deadline for progress, if there is one.
pub fn deadline(deployment: &Deployment) -> Option<i32> {
    deployment.spec.progress_deadline_seconds.filter(|seconds| *seconds != i32::MAX)
}

fn paused(deployment: &Deployment) -> bool {
    deployment.spec.paused.unwrap_or(false)
}

/// The condition that tells of a pause that has begun or ended, so that no deadline runs out over it.
pub fn pause_change(deployment: &Deployment, now: Timestamp) -> Option<DeploymentCondition> {
    deadline(deployment)?;
    let status = deployment.status.clone().unwrap_or_default();
    let reason = find(&status, "Progressing").and_then(|condition| condition.reason.as_deref());
    match (paused(deployment), reason) {
        (_, Some(TIMED_OUT)) => None,
        (true, reason) if reason != Some(PAUSED) => Some(condition("Progressing", "Unknown", PAUSED, "Deployment is paused".into(), now)),
        (false, Some(PAUSED)) => Some(condition("Progressing", "Unknown", RESUMED, "Deployment is resumed".into(), now)),
        _ => None,
    }
}

/// The counts and the Available condition.
pub fn counts(deployment: &Deployment, new: Option<&Arc<ReplicaSet>>, old: &[Arc<ReplicaSet>], now: Timestamp) -> DeploymentStatus {
    let sets = || old.iter().chain(new);
    let sum = |field: fn(&k8s_openapi::api::apps::v1::ReplicaSetStatus) -> i32| -> i32 {
        sets().filter_map(|set| set.status.as_ref()).map(field).sum()
    };
    let some = |number: i32| (number != 0).then_some(number);
    let available = sum(|status| status.available_replicas.unwrap_or(0));
    let asked: i32 = sets().map(|set| plan::size(set)).sum();
    let known = deployment.status.clone().unwrap_or_default();
    let terminating = sets().filter_map(|set| set.status.as_ref()).filter(|status| status.observed_generation.unwrap_or(0) > 0);
    let mut status = DeploymentStatus {
        observed_generation: deployment.metadata.generation,
        replicas: some(sum(|status| status.replicas)),
        updated_replicas: some(new.and_then(|set| set.status.as_ref()).map_or(0, |status| status.replicas)),
        ready_replicas: some(sum(|status| status.ready_replicas.unwrap_or(0))),
        available_replicas: some(available),
        unavailable_replicas: some((asked - available).max(0)),
        terminating_replicas: terminating.map(|status| status.terminating_replicas).sum(),
        collision_count: known.collision_count,
        conditions: known.conditions,
    };
    let enough = available >= plan::replicas(deployment) - plan::max_unavailable(deployment);
    let (value, reason, message) = if enough {
        ("True", "MinimumReplicasAvailable", "Deployment has minimum availability.")
    } else {
        ("False", "MinimumReplicasUnavailable", "Deployment does not have minimum availability.")
    };
    set(&mut status, condition("Available", value, reason, message.into(), now));
    status
}

/// Whether every pod is of the new template and available.
pub fn complete(deployment: &Deployment, status: &DeploymentStatus) -> bool {
    let wanted = plan::replicas(deployment);
    [status.updated_replicas, status.replicas, status.available_replicas].iter().all(|number| number.unwrap_or(0) == wanted)
        && status.observed_generation >= deployment.metadata.generation
}

fn progressing(old: &DeploymentStatus, new: &DeploymentStatus) -> bool {
    let n = |number: Option<i32>| number.unwrap_or(0);
    n(new.updated_replicas) > n(old.updated_replicas)
        || n(new.replicas) - n(new.updated_replicas) < n(old.replicas) - n(old.updated_replicas)
        || n(new.ready_replicas) > n(old.ready_replicas)
        || n(new.available_replicas) > n(old.available_replicas)
}

fn timed_out(status: &DeploymentStatus, seconds: i32, now: Timestamp) -> bool {
    let Some(condition) = find(status, "Progressing") else { return false };
    match condition.reason.as_deref() {
        Some(AVAILABLE) => false,
        Some(TIMED_OUT) => true,
        _ => condition.last_update_time.as_ref().is_some_and(|from| until(from.0, seconds, now).is_none()),
    }
}

/// The status during a rollout: counts, and how it goes.
pub fn rollout(deployment: &Deployment, new: Option<&Arc<ReplicaSet>>, old: &[Arc<ReplicaSet>], now: Timestamp) -> DeploymentStatus {
    let mut status = counts(deployment, new, old, now);
    let known = deployment.status.clone().unwrap_or_default();
    let current = find(&known, "Progressing");
    let was_complete = status.replicas == status.updated_replicas && current.is_some_and(|condition| condition.reason.as_deref() == Some(AVAILABLE));
    match deadline(deployment) {
        None => remove(&mut status, "Progressing"),
        Some(_) if was_complete => {}
        Some(seconds) => {
            let name = |set: &Arc<ReplicaSet>| format!("ReplicaSet {:?}", set.metadata.name.as_deref().unwrap_or_default());
            let subject = new.map_or_else(|| format!("Deployment {:?}", deployment.metadata.name.as_deref().unwrap_or_default()), name);
            if complete(deployment, &status) {
                set(&mut status, condition("Progressing", "True", AVAILABLE, format!("{subject} has successfully progressed."), now));
            } else if progressing(&known, &status) {
                let mut condition = condition("Progressing", "True", UPDATED, format!("{subject} is progressing."), now);
                if let Some(current) = current.filter(|current| current.status.as_deref() == Some("True")) {
                    condition.last_transition_time = current.last_transition_time.clone();
                }
                // Progress moves the update time even when the reason stays.
                remove(&mut status, "Progressing");
                set(&mut status, condition);
            } else if timed_out(&status, seconds, now) {
                set(&mut status, condition("Progressing", "False", TIMED_OUT, format!("{subject} has timed out progressing."), now));
            }
        }
    }
    let failure = new.into_iter().chain(old).flat_map(|set| set.status.iter().flat_map(|status| status.conditions.iter().flatten()));
    match failure.into_iter().find(|condition| condition.type_.as_deref() == Some("ReplicaFailure")) {
        Some(failure) => set(&mut status, DeploymentCondition {
            type_: failure.type_.clone(),
            status: failure.status.clone(),
            reason: failure.reason.clone(),
            message: failure.message.clone(),
            last_update_time: failure.last_transition_time.clone(),
            last_transition_time: failure.last_transition_time.clone(),
        }),
        None => remove(&mut status, "ReplicaFailure"),
    }
    status
}

/// How long until a rollout that does not move has run out of time.
pub fn check_in(deployment: &Deployment, status: &DeploymentStatus, now: Timestamp) -> Option<Duration> {
    let seconds = deadline(deployment)?;
    let current = find(status, "Progressing").filter(|condition| !matches!(condition.reason.as_deref(), Some(TIMED_OUT | AVAILABLE)))?;
    if complete(deployment, status) || paused(deployment) {
        return None;
    }
    let left = until(current.last_update_time.as_ref()?.0, seconds, now).unwrap_or_default();
    Some(left + Duration::from_secs(1))
}

/// Whether two statuses say the same.
pub fn same(a: &DeploymentStatus, b: &DeploymentStatus) -> bool {
    let numbers = |s: &DeploymentStatus| {
        [s.replicas, s.updated_replicas, s.ready_replicas, s.available_replicas, s.unavailable_replicas].map(|number| number.unwrap_or(0))
    };
    numbers(a) == numbers(b)
        && a.terminating_replicas == b.terminating_replicas
        && a.observed_generation == b.observed_generation
        && a.collision_count == b.collision_count
        && a.conditions.as_deref().unwrap_or_default() == b.conditions.as_deref().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + seconds).expect("a time")
    }

    fn deployment(status: Value) -> Deployment {
        serde_json::from_value(json!({"metadata": {"name": "d", "generation": 1},
            "spec": {"replicas": 2, "selector": {}, "template": {}, "progressDeadlineSeconds": 10, "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}},
            "status": status})).expect("a deployment")
    }

    fn new_set(replicas: i32, available: i32) -> Arc<ReplicaSet> {
        Arc::new(serde_json::from_value(json!({"metadata": {"name": "new"}, "spec": {"replicas": 2, "selector": {}},
            "status": {"replicas": replicas, "readyReplicas": available, "availableReplicas": available, "observedGeneration": 1, "terminatingReplicas": 0}})).expect("a set"))
    }

    fn check(status: Value, set: (i32, i32), now: i64, expected: (&str, &str), available: &str) -> DeploymentStatus {
        let status = rollout(&deployment(status), Some(&new_set(set.0, set.1)), &[], at(now));
        let progressing = find(&status, "Progressing").expect("a condition");
        assert_eq!((progressing.status.as_deref().expect("a status"), progressing.reason.as_deref().expect("a reason")), expected);
        assert_eq!(find(&status, "Available").expect("a condition").status.as_deref(), Some(available));
        status
    }

    #[test]
    fn rollouts_progress_complete_and_time_out() {
        let begun = json!({"conditions": [{"type": "Progressing", "status": "True", "reason": NEW_SET, "lastUpdateTime": at(0).to_string()}]});
        let moving = check(begun.clone(), (2, 1), 5, ("True", UPDATED), "False");
        assert_eq!((moving.replicas, moving.unavailable_replicas, moving.terminating_replicas), (Some(2), Some(1), Some(0)));
        assert_eq!(check_in(&deployment(json!({})), &moving, at(6)), Some(Duration::from_secs(10)));
        let done = check(begun, (2, 2), 5, ("True", AVAILABLE), "True");
        assert_eq!(find(&done, "Progressing").and_then(|c| c.message.as_deref()), Some("ReplicaSet \"new\" has successfully progressed."));
        assert_eq!(check_in(&deployment(json!({})), &done, at(6)), None);
        let stuck = json!({"replicas": 2, "updatedReplicas": 2, "conditions": [{"type": "Progressing", "status": "True", "reason": UPDATED, "lastUpdateTime": at(0).to_string()}]});
        check(stuck.clone(), (2, 0), 9, ("True", UPDATED), "False");
        check(stuck, (2, 0), 11, ("False", TIMED_OUT), "False");
    }

    #[test]
    fn pauses_are_told() {
        let mut paused = deployment(json!({}));
        paused.spec.paused = Some(true);
        assert_eq!(pause_change(&paused, at(0)).and_then(|c| c.reason).as_deref(), Some(PAUSED));
        let resumed = deployment(json!({"conditions": [{"type": "Progressing", "status": "Unknown", "reason": PAUSED}]}));
        assert_eq!(pause_change(&resumed, at(0)).and_then(|c| c.reason).as_deref(), Some(RESUMED));
        assert_eq!(pause_change(&deployment(json!({})), at(0)), None);
    }
}
