//! Which pod of a StatefulSet is made, deleted or waited for next. Pure.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::api::{
    apps::v1::StatefulSet,
    core::v1::{PersistentVolumeClaim, PersistentVolumeClaimVolumeSource, Pod, PodTemplateSpec, Volume},
};

use crate::{deployment::plan::scaled, owner, pod::PodView, podcontrol::from_template, revision};

pub const POD_NAME: &str = "statefulset.kubernetes.io/pod-name";
pub const POD_INDEX: &str = "apps.kubernetes.io/pod-index";

fn name(set: &StatefulSet) -> &str {
    set.metadata.name.as_deref().unwrap_or_default()
}

pub fn replicas(set: &StatefulSet) -> i32 {
    set.spec.replicas.unwrap_or(1)
}

pub fn start(set: &StatefulSet) -> i32 {
    set.spec.ordinals.as_ref().and_then(|ordinals| ordinals.start).unwrap_or(0)
}

fn is_parallel(set: &StatefulSet) -> bool {
    set.spec.pod_management_policy.as_deref() == Some("Parallel")
}

fn partition(set: &StatefulSet) -> i32 {
    let rolling = set.spec.update_strategy.as_ref().and_then(|strategy| strategy.rolling_update.as_ref());
    rolling.and_then(|rolling| rolling.partition).unwrap_or(0)
}

pub fn is_on_delete(set: &StatefulSet) -> bool {
    set.spec.update_strategy.as_ref().and_then(|strategy| strategy.type_.as_deref()) == Some("OnDelete")
}

/// Pods that an update may take down at once.
fn max_unavailable(set: &StatefulSet) -> usize {
    let rolling = set.spec.update_strategy.as_ref().and_then(|strategy| strategy.rolling_update.as_ref());
    let value = rolling.and_then(|rolling| rolling.max_unavailable.as_ref());
    usize::try_from(if value.is_none() { 1 } else { scaled(value, replicas(set), true) }).unwrap_or(1).max(1)
}

/// The ordinal in a pod's name, if the name is one of this set's.
pub fn ordinal(set: &StatefulSet, pod: &PodView) -> Option<i32> {
    let (parent, ordinal) = pod.name().rsplit_once('-')?;
    if parent != name(set) || ordinal.is_empty() || !ordinal.bytes().all(|byte| byte.is_ascii_digit()) || ordinal.len() > 1 && ordinal.starts_with('0') {
        return None;
    }
    ordinal.parse().ok()
}

/// The two revisions that a set moves between.
pub struct Revisions<'a> {
    pub current: &'a str,
    pub update: &'a str,
}

/// Which revision a new pod of this ordinal gets.
pub fn revision_for<'a>(set: &StatefulSet, revisions: &Revisions<'a>, ordinal: i32) -> &'a str {
    let rolling = set.spec.update_strategy.as_ref().and_then(|strategy| strategy.rolling_update.as_ref());
    let current_replicas = set.status.as_ref().and_then(|status| status.current_replicas).unwrap_or(0);
    let stays = !is_on_delete(set)
        && match rolling {
            None => ordinal < start(set) + current_replicas,
            Some(_) => ordinal < start(set) + partition(set),
        };
    if stays { revisions.current } else { revisions.update }
}

/// Names and labels that make a pod this ordinal's.
pub fn claim_name(set: &StatefulSet, template: &PersistentVolumeClaim, ordinal: i32) -> String {
    format!("{}-{}-{ordinal}", template.metadata.name.as_deref().unwrap_or_default(), name(set))
}

/// The pod of an ordinal at a revision.
pub fn new_pod(set: &StatefulSet, template: &PodTemplateSpec, revision: &str, ordinal: i32) -> Pod {
    let mut pod = from_template(template, &owner::reference(set));
    let pod_name = format!("{}-{ordinal}", name(set));
    pod.metadata.generate_name = None;
    pod.metadata.name = Some(pod_name.clone());
    pod.metadata.namespace = set.metadata.namespace.clone();
    let labels = pod.metadata.labels.get_or_insert_default();
    labels.insert(POD_NAME.into(), pod_name.clone());
    labels.insert(POD_INDEX.into(), ordinal.to_string());
    labels.insert(revision::LABEL.into(), revision.to_owned());
    let spec = pod.spec.get_or_insert_default();
    spec.hostname = Some(pod_name);
    spec.subdomain = set.spec.service_name.clone();
    for template in set.spec.volume_claim_templates.iter().flatten() {
        let volume_name = template.metadata.name.clone().unwrap_or_default();
        let volumes = spec.volumes.get_or_insert_default();
        volumes.retain(|volume| volume.name != volume_name);
        let source = PersistentVolumeClaimVolumeSource { claim_name: claim_name(set, template, ordinal), read_only: None };
        volumes.push(Volume { name: volume_name, persistent_volume_claim: Some(source), ..Volume::default() });
    }
    pod
}

/// The claims of an ordinal.
pub fn claims(set: &StatefulSet, ordinal: i32) -> Vec<PersistentVolumeClaim> {
    set.spec.volume_claim_templates.iter().flatten().map(|template| {
        let mut claim = template.clone();
        claim.metadata.name = Some(claim_name(set, template, ordinal));
        claim.metadata.namespace = set.metadata.namespace.clone();
        claim.metadata.labels.get_or_insert_default().extend(set.spec.selector.match_labels.clone().unwrap_or_default());
        claim.status = None;
        claim
    }).collect()
}

/// Whether a pod still carries what makes it its ordinal's.
pub fn identity_matches(pod: &PodView, ordinal: i32) -> bool {
    pod.label(POD_NAME) == Some(pod.name()) && pod.label(POD_INDEX) == Some(ordinal.to_string().as_str())
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make the pod of this ordinal at this revision (and its claims).
    Create { ordinal: i32, revision: String },
    /// Delete this pod.
    Delete(String),
    /// Delete a pod that ended, so that it can be made again.
    Replace(String),
    /// Put the identity labels back on this pod.
    Relabel { ordinal: i32 },
}

/// What to do now, and when to look again if only time is missing.
#[derive(Debug, Default)]
pub struct Plan {
    pub steps: Vec<Step>,
    pub next: Option<Duration>,
}

/// A set's pods, in and out of the range of its ordinals.
pub struct Pods {
    pub wanted: BTreeMap<i32, Arc<PodView>>,
    pub surplus: BTreeMap<i32, Arc<PodView>>,
}

pub fn arrange(set: &StatefulSet, pods: &[Arc<PodView>]) -> Pods {
    let range = start(set)..start(set) + replicas(set);
    let all = pods.iter().filter_map(|pod| ordinal(set, pod).map(|ordinal| (ordinal, pod.clone())));
    let (wanted, surplus): (Vec<_>, Vec<_>) = all.partition(|(ordinal, _)| range.contains(ordinal));
    Pods { wanted: wanted.into_iter().collect(), surplus: surplus.into_iter().collect() }
}

struct Walk<'a> {
    set: &'a StatefulSet,
    now: Timestamp,
    plan: Plan,
}

impl Walk<'_> {
    fn min_ready(&self) -> i32 {
        self.set.spec.min_ready_seconds.unwrap_or(0)
    }

    fn healthy(&self, pod: &PodView) -> bool {
        pod.phase() == "Running" && pod.ready() && !pod.deleting()
    }

    fn available(&self, pod: &PodView) -> bool {
        self.healthy(pod) && pod.available(self.min_ready(), self.now)
    }

    fn wait_for(&mut self, pod: &PodView) {
        if let Some(left) = pod.available_in(self.min_ready(), self.now) {
            self.plan.next = [self.plan.next, Some(left)].into_iter().flatten().min();
        }
    }

    /// Looks after one pod that should be there; true if an ordered set must wait here.
    fn tend(&mut self, ordinal: i32, pod: Option<&Arc<PodView>>, revisions: &Revisions<'_>) -> bool {
        let Some(pod) = pod else {
            let revision = revision_for(self.set, revisions, ordinal).to_owned();
            self.plan.steps.push(Step::Create { ordinal, revision });
            return true;
        };
        if pod.finished() {
            if !pod.deleting() {
                self.plan.steps.push(Step::Replace(pod.name().to_owned()));
            }
            return true;
        }
        if pod.deleting() {
            return true;
        }
        if !identity_matches(pod, ordinal) {
            self.plan.steps.push(Step::Relabel { ordinal });
        }
        if self.healthy(pod) && !self.available(pod) {
            self.wait_for(pod);
        }
        !self.available(pod)
    }
}

/// The next step of a set.
pub fn plan(set: &StatefulSet, pods: &Pods, revisions: &Revisions<'_>, now: Timestamp) -> Plan {
    let ordered = !is_parallel(set);
    let mut walk = Walk { set, now, plan: Plan::default() };
    for ordinal in start(set)..start(set) + replicas(set) {
        let blocked = walk.tend(ordinal, pods.wanted.get(&ordinal), revisions);
        if blocked && ordered {
            return walk.plan;
        }
    }
    // An ordered set shrinks only while every other pod is well.
    for pod in pods.surplus.values().rev() {
        if pod.deleting() {
            if ordered {
                return walk.plan;
            }
            continue;
        }
        walk.plan.steps.push(Step::Delete(pod.name().to_owned()));
        if ordered {
            return walk.plan;
        }
    }
    if is_on_delete(set) || !walk.plan.steps.is_empty() {
        return walk.plan;
    }
    update(&mut walk, pods, revisions, ordered);
    walk.plan
}

/// A rolling update: from the highest ordinal down to the partition.
fn update(walk: &mut Walk<'_>, pods: &Pods, revisions: &Revisions<'_>, ordered: bool) {
    let set = walk.set;
    let first = start(set) + partition(set);
    let unavailable = pods.wanted.values().filter(|pod| !walk.available(pod)).count() + (replicas(set).max(0) as usize).saturating_sub(pods.wanted.len());
    let mut budget = max_unavailable(set).saturating_sub(unavailable);
    let single = max_unavailable(set) == 1;
    for (ordinal, pod) in pods.wanted.iter().rev() {
        if *ordinal < first {
            break;
        }
        let outdated = pod.label(revision::LABEL) != Some(revisions.update);
        if outdated && !pod.deleting() {
            // A pod that is not well costs nothing to replace.
            if budget == 0 && walk.available(pod) {
                return;
            }
            if walk.available(pod) {
                budget -= 1;
            }
            walk.plan.steps.push(Step::Delete(pod.name().to_owned()));
            if single && ordered {
                return;
            }
        } else if !walk.available(pod) && single {
            // Wait for the pod that was updated last.
            walk.wait_for(pod);
            return;
        }
    }
}

/// Numbers for the status.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub replicas: i32,
    pub ready: i32,
    pub available: i32,
    pub current: i32,
    pub updated: i32,
}

pub fn counts(set: &StatefulSet, pods: &Pods, revisions: &Revisions<'_>, now: Timestamp) -> Counts {
    let mut counts = Counts::default();
    let min_ready = set.spec.min_ready_seconds.unwrap_or(0);
    for pod in pods.wanted.values().chain(pods.surplus.values()) {
        counts.replicas += 1;
        let healthy = pod.phase() == "Running" && pod.ready();
        counts.ready += i32::from(healthy);
        counts.available += i32::from(healthy && pod.available(min_ready, now));
        if pod.deleting() {
            continue;
        }
        let revision = pod.label(revision::LABEL);
        counts.current += i32::from(revision == Some(revisions.current));
        counts.updated += i32::from(revision == Some(revisions.update));
    }
    counts
}

/// Who a claim belongs to, by the set's retention policy: it goes with its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimOwner {
    Nobody,
    Set,
    Pod,
}

pub fn claim_owner(set: &StatefulSet, surplus: bool) -> ClaimOwner {
    let policy = set.spec.persistent_volume_claim_retention_policy.as_ref();
    let deleted = policy.and_then(|policy| policy.when_deleted.as_deref()) == Some("Delete");
    let scaled = policy.and_then(|policy| policy.when_scaled.as_deref()) == Some("Delete");
    match (deleted, scaled, surplus) {
        (_, true, true) => ClaimOwner::Pod,
        (true, ..) => ClaimOwner::Set,
        _ => ClaimOwner::Nobody,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::tests::pod;
    use serde_json::{Value, json};

    const REVISIONS: Revisions<'_> = Revisions { current: "old", update: "new" };

    fn set(replicas: i32, extra: Value) -> StatefulSet {
        let mut spec = json!({"replicas": replicas, "selector": {"matchLabels": {"a": "b"}}, "serviceName": "svc", "template": {"spec": {"containers": []}},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}}});
        spec.as_object_mut().expect("a map").extend(extra.as_object().cloned().unwrap_or_default());
        serde_json::from_value(json!({"metadata": {"name": "web", "namespace": "ns"}, "spec": spec})).expect("a set")
    }

    /// Pods as `ordinal revision state`, state one of ready, running, pending, failed, going.
    fn pods(set: &StatefulSet, descriptions: &[&str]) -> Pods {
        let all: Vec<_> = descriptions.iter().map(|text| {
            let parts: Vec<&str> = text.split(' ').collect();
            let name = format!("web-{}", parts[0]);
            let phase = match parts[2] { "pending" => "Pending", "failed" => "Failed", _ => "Running" };
            let mut value = json!({"metadata": {"name": name, "labels": {revision::LABEL: parts[1], POD_NAME: name, POD_INDEX: parts[0]}},
                "status": {"phase": phase, "conditions": [{"type": "Ready", "status": if matches!(parts[2], "ready" | "going") { "True" } else { "False" }}]}});
            if parts[2] == "going" {
                value["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            }
            Arc::new(pod(value))
        }).collect();
        arrange(set, &all)
    }

    fn check(set: &StatefulSet, descriptions: &[&str], expected: &[&str]) {
        let shown: Vec<String> = plan(set, &pods(set, descriptions), &REVISIONS, Timestamp::UNIX_EPOCH).steps.iter().map(|step| match step {
            Step::Create { ordinal, revision } => format!("+{ordinal} {revision}"),
            Step::Delete(name) => format!("-{}", name.trim_start_matches("web-")),
            Step::Replace(name) => format!("~{}", name.trim_start_matches("web-")),
            Step::Relabel { ordinal } => format!("={ordinal}"),
        }).collect();
        assert_eq!(shown, expected, "{descriptions:?}");
    }

    #[test]
    fn ordered_sets_go_one_by_one() {
        let three = set(3, json!({}));
        check(&three, &[], &["+0 new"]);
        check(&three, &["0 new pending"], &[]);
        check(&three, &["0 new ready"], &["+1 new"]);
        check(&three, &["0 new ready", "1 new failed"], &["~1"]);
        check(&three, &["0 new going", "1 new ready"], &[]);
        check(&set(1, json!({})), &["0 new ready", "1 new ready", "2 new ready"], &["-2"]);
        check(&set(1, json!({})), &["0 new ready", "1 new ready", "2 new going"], &[]);
        check(&set(1, json!({})), &["0 new running", "1 new ready"], &[]);
        check(&set(2, json!({"ordinals": {"start": 5}})), &["5 new ready"], &["+6 new"]);
    }

    #[test]
    fn parallel_sets_do_not_wait() {
        let parallel = set(3, json!({"podManagementPolicy": "Parallel"}));
        check(&parallel, &["1 new pending"], &["+0 new", "+2 new"]);
        check(&set(0, json!({"podManagementPolicy": "Parallel"})), &["0 new ready", "1 new ready"], &["-1", "-0"]);
    }

    #[test]
    fn updates_run_from_the_top() {
        let three = set(3, json!({}));
        check(&three, &["0 old ready", "1 old ready", "2 old ready"], &["-2"]);
        check(&three, &["0 old ready", "1 old ready", "2 new running"], &[]);
        check(&three, &["0 old ready", "1 old ready", "2 new ready"], &["-1"]);
        let partitioned = set(3, json!({"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 2}}}));
        check(&partitioned, &["0 old ready", "1 old ready", "2 new ready"], &[]);
        check(&partitioned, &["0 old ready", "2 new ready"], &["+1 old"]);
        check(&set(1, json!({"updateStrategy": {"type": "OnDelete"}})), &["0 old ready"], &[]);
        let two = set(3, json!({"podManagementPolicy": "Parallel", "updateStrategy": {"rollingUpdate": {"maxUnavailable": 2}}}));
        check(&two, &["0 old ready", "1 old ready", "2 old ready"], &["-2", "-1"]);
        check(&two, &["0 old ready", "1 old ready", "2 new running"], &["-1"]);
    }

    #[test]
    fn pods_have_identity_and_storage() {
        let set = set(1, json!({"volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": {}}]}));
        let made = new_pod(&set, &set.spec.template, "new", 0);
        let value = serde_json::to_value(&made).expect("json");
        assert_eq!(value["spec"]["volumes"], json!([{"name": "data", "persistentVolumeClaim": {"claimName": "data-web-0"}}]));
        assert_eq!((value["spec"]["hostname"].as_str(), value["spec"]["subdomain"].as_str()), (Some("web-0"), Some("svc")));
        assert_eq!(claims(&set, 0)[0].metadata.labels, Some([("a".to_owned(), "b".to_owned())].into()));
        for (name, expected) in [("web-0", Some(0)), ("web-12", Some(12)), ("web-01", None), ("web-x", None), ("other-0", None)] {
            assert_eq!(ordinal(&set, &pod(json!({"metadata": {"name": name}}))), expected, "{name}");
        }
    }

    #[test]
    fn claims_go_with_their_owner() {
        for (deleted, when_scaled, surplus, expected) in [
            ("Retain", "Retain", true, ClaimOwner::Nobody),
            ("Delete", "Retain", true, ClaimOwner::Set),
            ("Retain", "Delete", true, ClaimOwner::Pod),
            ("Retain", "Delete", false, ClaimOwner::Nobody),
            ("Delete", "Delete", true, ClaimOwner::Pod),
        ] {
            let set = set(1, json!({"persistentVolumeClaimRetentionPolicy": {"whenDeleted": deleted, "whenScaled": when_scaled}}));
            assert_eq!(claim_owner(&set, surplus), expected, "{deleted} {when_scaled} {surplus}");
        }
    }
}
