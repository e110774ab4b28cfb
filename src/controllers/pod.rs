//! What the controllers read of a pod, and the questions they ask about it.

use std::{cmp::Ordering, collections::BTreeMap, time::Duration};

use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{ContainerState, EphemeralVolumeSource, NodeAffinity, PodCondition, PodIP, ResourceRequirements, Toleration},
    apimachinery::pkg::api::resource::Quantity,
    apimachinery::pkg::apis::meta::v1::Time,
};
use serde::Deserialize;

windlass_client::projection! {
    /// The fields of a pod that controllers read. Written back only by patches.
    pub struct PodView: k8s_openapi::api::core::v1::Pod {
        pub spec: Spec,
        pub status: Status,
    }
}

macro_rules! view {
    ($($(#[$doc:meta])* struct $name:ident { $($(#[$attr:meta])* $field:ident: $ty:ty),* $(,)? })*) => {
        $($(#[$doc])*
        #[derive(Clone, Debug, Default, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        pub struct $name { $($(#[$attr])* pub $field: $ty),* })*
    };
}

view! {
    struct Spec {
        node_name: Option<String>,
        containers: Vec<Container>,
        init_containers: Vec<Container>,
        volumes: Vec<Volume>,
        tolerations: Vec<Toleration>,
        affinity: Option<Affinity>,
        node_selector: BTreeMap<String, String>,
        restart_policy: String,
        hostname: Option<String>,
        subdomain: Option<String>,
        host_network: bool,
        priority_class_name: Option<String>,
        active_deadline_seconds: Option<i64>,
        resources: Option<Box<ResourceRequirements>>,
        overhead: BTreeMap<String, Quantity>,
        scheduling_gates: Vec<Gate>,
    }
    struct Gate { name: String }
    struct Affinity { node_affinity: Option<Box<NodeAffinity>>, pod_affinity: Option<serde_json::Value>, pod_anti_affinity: Option<serde_json::Value> }
    struct Container {
        name: String,
        ports: Vec<Port>,
        resources: Option<Box<ResourceRequirements>>,
        restart_policy: Option<String>,
    }
    struct Port { name: Option<String>, container_port: i32, protocol: Option<String> }
    struct Volume { name: String, persistent_volume_claim: Option<ClaimSource>, ephemeral: Option<Box<EphemeralVolumeSource>> }
    struct ClaimSource { claim_name: String }
    struct Status {
        phase: Option<String>,
        reason: Option<String>,
        conditions: Vec<PodCondition>,
        #[serde(rename = "podIPs")]
        pod_ips: Vec<PodIP>,
        #[serde(rename = "podIP")]
        pod_ip: Option<String>,
        start_time: Option<Time>,
        container_statuses: Vec<ContainerStatus>,
        init_container_statuses: Vec<ContainerStatus>,
    }
    struct ContainerStatus { name: String, ready: bool, restart_count: i32, state: Option<Box<ContainerState>> }
}

impl PodView {
    pub fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    pub fn namespace(&self) -> &str {
        self.metadata.namespace.as_deref().unwrap_or_default()
    }

    pub fn uid(&self) -> &str {
        self.metadata.uid.as_deref().unwrap_or_default()
    }

    pub fn node(&self) -> &str {
        self.spec.node_name.as_deref().unwrap_or_default()
    }

    pub fn phase(&self) -> &str {
        self.status.phase.as_deref().unwrap_or_default()
    }

    pub fn labels(&self) -> &BTreeMap<String, String> {
        static EMPTY: BTreeMap<String, String> = BTreeMap::new();
        self.metadata.labels.as_ref().unwrap_or(&EMPTY)
    }

    pub fn label(&self, key: &str) -> Option<&str> {
        self.labels().get(key).map(String::as_str)
    }

    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.metadata.annotations.as_ref()?.get(key).map(String::as_str)
    }

    pub fn created(&self) -> Option<Timestamp> {
        self.metadata.creation_timestamp.as_ref().map(|time| time.0)
    }

    /// Asked to go: has a deletion timestamp.
    pub fn deleting(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }

    /// Succeeded or Failed.
    pub fn finished(&self) -> bool {
        matches!(self.phase(), "Succeeded" | "Failed")
    }

    /// Neither finished nor asked to go.
    pub fn active(&self) -> bool {
        !self.finished() && !self.deleting()
    }

    /// Asked to go, and still running.
    pub fn terminating(&self) -> bool {
        !self.finished() && self.deleting()
    }

    pub fn condition(&self, kind: &str) -> Option<&PodCondition> {
        self.status.conditions.iter().find(|condition| condition.type_ == kind)
    }

    pub fn ready(&self) -> bool {
        self.condition("Ready").is_some_and(|condition| condition.status == "True")
    }

    /// Since when the pod is ready; none when it is not.
    pub fn ready_since(&self) -> Option<Timestamp> {
        let condition = self.condition("Ready").filter(|condition| condition.status == "True")?;
        condition.last_transition_time.as_ref().map(|time| time.0)
    }

    /// Ready for at least `min_ready_seconds`.
    pub fn available(&self, min_ready_seconds: i32, now: Timestamp) -> bool {
        self.ready() && (min_ready_seconds <= 0 || self.ready_since().is_some_and(|since| until(since, min_ready_seconds, now).is_none()))
    }

    /// How long until a ready pod becomes available.
    pub fn available_in(&self, min_ready_seconds: i32, now: Timestamp) -> Option<Duration> {
        self.ready_since().and_then(|since| until(since, min_ready_seconds, now))
    }

    /// Restarts of the container that restarted most: among the main ones, and among the sidecars.
    pub fn restarts(&self) -> (i32, i32) {
        let main = self.status.container_statuses.iter().map(|status| status.restart_count).max().unwrap_or(0);
        let sidecar = |name: &str| self.spec.init_containers.iter().any(|c| c.name == name && c.restart_policy.as_deref() == Some("Always"));
        let statuses = self.status.init_container_statuses.iter().filter(|status| sidecar(&status.name));
        (main, statuses.map(|status| status.restart_count).max().unwrap_or(0))
    }
}

/// Time left until `seconds` after `start`; none when that is past.
pub fn until(start: Timestamp, seconds: impl Into<i64>, now: Timestamp) -> Option<Duration> {
    let left = jiff::SignedDuration::from_secs(seconds.into()) - now.duration_since(start);
    Duration::try_from(left).ok().filter(|left| !left.is_zero())
}

/// The names of the claims that a pod uses, as `namespace/name`, its ephemeral ones included.
pub fn claims(pod: &PodView) -> Vec<String> {
    let named = |volume: &Volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
        (Some(claim), _) => Some(claim.claim_name.clone()),
        (None, Some(_)) => Some(format!("{}-{}", pod.name(), volume.name)),
        (None, None) => None,
    };
    pod.spec.volumes.iter().filter_map(named).map(|claim| format!("{}/{claim}", pod.namespace())).collect()
}

fn phase_rank(phase: &str) -> u8 {
    match phase {
        "Pending" => 0,
        "Unknown" => 1,
        _ => 2,
    }
}

/// Base-2 logarithm of an age in nanoseconds, so that pods of about the same age count as equal.
fn age_rank(at: Option<Timestamp>, now: Timestamp) -> Option<i64> {
    let age = now.duration_since(at?).as_nanos();
    Some(if age > 0 { age.ilog2().into() } else { -1 })
}

fn deletion_cost(pod: &PodView) -> i32 {
    pod.annotation("controller.kubernetes.io/pod-deletion-cost").and_then(|cost| cost.parse().ok()).unwrap_or(0)
}

/// Which of two pods of one set goes first when the set shrinks: `Less` goes first. `rank` is the number of the set's
/// relatives on the pod's node. The order of upstream's `ActivePodsWithRanks`.
pub fn deletion_order(a: (&PodView, usize), b: (&PodView, usize), now: Timestamp) -> Ordering {
    let ((a, a_rank), (b, b_rank)) = (a, b);
    let by_age = |x: Option<Timestamp>, y: Option<Timestamp>| match (age_rank(x, now), age_rank(y, now)) {
        (None, None) => Ordering::Equal,
        (None, Some(_)) => Ordering::Less,
        (Some(_), None) => Ordering::Greater,
        (Some(_), Some(_)) if x == y => Ordering::Equal,
        (Some(p), Some(q)) => p.cmp(&q).then_with(|| a.uid().cmp(b.uid())),
    };
    (!a.node().is_empty())
        .cmp(&!b.node().is_empty())
        .then_with(|| phase_rank(a.phase()).cmp(&phase_rank(b.phase())))
        .then_with(|| a.ready().cmp(&b.ready()))
        .then_with(|| deletion_cost(a).cmp(&deletion_cost(b)))
        .then_with(|| b_rank.cmp(&a_rank))
        .then_with(|| if a.ready() && b.ready() { by_age(a.ready_since(), b.ready_since()) } else { Ordering::Equal })
        .then_with(|| b.restarts().cmp(&a.restarts()))
        .then_with(|| by_age(a.created(), b.created()))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// A pod from its JSON, with `metadata.namespace` "ns" unless given.
    pub fn pod(mut value: Value) -> PodView {
        let metadata = value["metadata"].as_object_mut();
        if let Some(metadata) = metadata {
            let name = metadata.get("name").cloned().unwrap_or(json!("p"));
            metadata.entry("namespace").or_insert(json!("ns"));
            metadata.entry("uid").or_insert(json!(format!("uid-{}", name.as_str().unwrap_or_default())));
        }
        serde_json::from_value(value).expect("a pod")
    }

    fn at(seconds: i64) -> String {
        Timestamp::from_second(1_000_000 + seconds).expect("a time").to_string()
    }

    #[test]
    fn the_least_useful_pod_goes_first() {
        let now = Timestamp::from_second(1_001_000).expect("a time");
        let ready = |name: &str, since: i64, cost: &str| pod(json!({
            "metadata": {"name": name, "creationTimestamp": at(0), "annotations": {"controller.kubernetes.io/pod-deletion-cost": cost}},
            "spec": {"nodeName": "n"},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": at(since)}]}}));
        let unassigned = pod(json!({"metadata": {"name": "u"}, "status": {"phase": "Pending"}}));
        let pending = pod(json!({"metadata": {"name": "p"}, "spec": {"nodeName": "n"}, "status": {"phase": "Pending"}}));
        let not_ready = pod(json!({"metadata": {"name": "r"}, "spec": {"nodeName": "n"}, "status": {"phase": "Running"}}));
        for (first, second) in [
            ((&unassigned, 0), (&pending, 0)),
            ((&pending, 0), (&not_ready, 0)),
            ((&not_ready, 0), (&ready("a", 1, "0"), 0)),
            ((&ready("a", 1, "-5"), 0), (&ready("b", 1, "5"), 9)),
            ((&ready("a", 1, "0"), 3), (&ready("b", 1, "0"), 1)),
            ((&ready("b", 990, "0"), 1), (&ready("a", 1, "0"), 1)),
        ] {
            assert_eq!(deletion_order(first, second, now), Ordering::Less, "{} {}", first.0.name(), second.0.name());
            assert_eq!(deletion_order(second, first, now), Ordering::Greater);
        }
    }

    #[test]
    fn availability_waits_for_min_ready_seconds() {
        let now = Timestamp::from_second(1_000_100).expect("a time");
        let pod = pod(json!({"metadata": {"name": "a"}, "status": {"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": at(95)}]}}));
        assert!(pod.available(0, now) && pod.available(5, now));
        assert!(!pod.available(6, now));
        assert_eq!(pod.available_in(8, now), Some(Duration::from_secs(3)));
    }
}
