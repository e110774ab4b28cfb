//! Revisions: the annotations by which a Deployment and its ReplicaSets remember the order of rollouts.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::{
    api::apps::v1::{Deployment, ReplicaSet},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use super::plan;

pub const REVISION: &str = "deployment.kubernetes.io/revision";
pub const HISTORY: &str = "deployment.kubernetes.io/revision-history";
pub const DESIRED: &str = "deployment.kubernetes.io/desired-replicas";
pub const MAX: &str = "deployment.kubernetes.io/max-replicas";
pub const ROLLBACK: &str = "deprecated.deployment.rollback.to";
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// Characters of `HISTORY` that are kept.
const HISTORY_LIMIT: usize = 2000;

pub fn annotation<'a>(metadata: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

/// The revision of a ReplicaSet or Deployment; 0 if it has none.
pub fn revision(metadata: &ObjectMeta) -> i64 {
    annotation(metadata, REVISION).and_then(|text| text.parse().ok()).unwrap_or(0)
}

pub fn max_revision(sets: &[Arc<ReplicaSet>]) -> i64 {
    sets.iter().map(|set| revision(&set.metadata)).max().unwrap_or(0)
}

/// The second highest revision: what a rollback without a number goes to.
pub fn last_revision(sets: &[Arc<ReplicaSet>]) -> i64 {
    let mut all: Vec<i64> = sets.iter().map(|set| revision(&set.metadata)).collect();
    all.sort_unstable_by(|a, b| b.cmp(a));
    all.get(1).copied().unwrap_or(0)
}

/// The revision that a rollback is asked for by `kubectl`'s old annotation.
pub fn rollback_to(deployment: &Deployment) -> Option<i64> {
    annotation(&deployment.metadata, ROLLBACK)?.parse().ok()
}

/// Annotations that belong to one object and are not copied between a Deployment and its sets.
pub fn is_own(key: &str) -> bool {
    [LAST_APPLIED, REVISION, HISTORY, DESIRED, MAX, ROLLBACK].contains(&key)
}

/// Notes the Deployment's size on a set; true if that changed anything.
pub fn note_replicas(annotations: &mut BTreeMap<String, String>, deployment: &Deployment) -> bool {
    let wanted = plan::replicas(deployment);
    let notes = [(DESIRED, wanted.to_string()), (MAX, (wanted + plan::max_surge(deployment)).to_string())];
    let mut changed = false;
    for (key, value) in notes {
        changed |= annotations.insert(key.into(), value.clone()) != Some(value);
    }
    changed
}

/// Brings the annotations of the current set up to date: copies the Deployment's, and raises the revision, keeping the one it
/// had before as history. True if anything changed.
pub fn note_current(annotations: &mut BTreeMap<String, String>, deployment: &Deployment, revision: i64) -> bool {
    let mut changed = false;
    for (key, value) in deployment.metadata.annotations.iter().flatten().filter(|(key, _)| !is_own(key)) {
        changed |= annotations.insert(key.clone(), value.clone()).as_ref() != Some(value);
    }
    let had = annotations.get(REVISION).cloned();
    let Ok(before) = had.as_deref().unwrap_or("0").parse::<i64>() else { return changed };
    if before >= revision {
        return changed;
    }
    annotations.insert(REVISION.into(), revision.to_string());
    if let Some(had) = had {
        let history = annotations.get(HISTORY).map_or(String::new(), Clone::clone);
        let mut entries: Vec<&str> = history.split(',').filter(|entry| !entry.is_empty()).collect();
        entries.push(&had);
        while entries.len() > 1 && entries.iter().map(|entry| entry.len() + 1).sum::<usize>() > HISTORY_LIMIT + 1 {
            entries.remove(0);
        }
        let joined = entries.join(",");
        annotations.insert(HISTORY.into(), joined);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(set: serde_json::Value, revision: i64, expected: serde_json::Value, changed: bool) {
        let deployment: Deployment = serde_json::from_value(json!({"metadata": {"annotations": {"a": "b", LAST_APPLIED: "x", REVISION: "9"}}})).expect("a deployment");
        let mut annotations: BTreeMap<String, String> = serde_json::from_value(set).expect("annotations");
        assert_eq!(note_current(&mut annotations, &deployment, revision), changed);
        assert_eq!(serde_json::to_value(annotations).expect("json"), expected);
    }

    #[test]
    fn revisions_rise_and_leave_history() {
        check(json!({}), 1, json!({"a": "b", REVISION: "1"}), true);
        check(json!({"a": "b", REVISION: "1"}), 1, json!({"a": "b", REVISION: "1"}), false);
        check(json!({"a": "b", REVISION: "1"}), 3, json!({"a": "b", REVISION: "3", HISTORY: "1"}), true);
        check(json!({"a": "b", REVISION: "3", HISTORY: "1"}), 5, json!({"a": "b", REVISION: "5", HISTORY: "1,3"}), true);
        check(json!({"a": "b", REVISION: "7"}), 5, json!({"a": "b", REVISION: "7"}), false);
    }
}
