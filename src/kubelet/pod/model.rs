//! What the kubelet reads off a pod's specification. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, EphemeralContainer, Pod, PodCondition, PodSpec, Probe};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use sha2::{Digest, Sha256};
use windlass_api::quantity::Quantity;

pub const SOURCE_ANNOTATION: &str = "kubernetes.io/config.source";
pub const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";
pub const HASH_ANNOTATION: &str = "kubernetes.io/config.hash";
pub const SEEN_ANNOTATION: &str = "kubernetes.io/config.seen";

/// Priority from which a pod counts as critical to the system.
pub const SYSTEM_CRITICAL: i32 = 2_000_000_000;

static EMPTY: std::sync::LazyLock<PodSpec> = std::sync::LazyLock::new(PodSpec::default);

pub fn spec(pod: &Pod) -> &PodSpec {
    pod.spec.as_ref().unwrap_or(&EMPTY)
}

pub fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or("")
}

pub fn namespace(pod: &Pod) -> &str {
    pod.metadata.namespace.as_deref().unwrap_or("")
}

pub fn uid(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or("")
}

/// `name_namespace(uid)`, upstream's way to name a pod in messages.
pub fn describe(pod: &Pod) -> String {
    format!("{}_{}({})", name(pod), namespace(pod), uid(pod))
}

pub fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

/// From a file or URL, not from the API.
pub fn is_static(pod: &Pod) -> bool {
    annotation(pod, SOURCE_ANNOTATION).is_some_and(|source| source != "api")
}

pub fn is_mirror(pod: &Pod) -> bool {
    annotation(pod, MIRROR_ANNOTATION).is_some()
}

pub fn is_critical(pod: &Pod) -> bool {
    is_static(pod) || is_mirror(pod) || spec(pod).priority.unwrap_or(0) >= SYSTEM_CRITICAL
}

pub fn host_network(pod: &Pod) -> bool {
    spec(pod).host_network == Some(true)
}

/// A container's place in the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Init,
    /// An init container with `restartPolicy: Always`.
    Sidecar,
    Regular,
    Ephemeral,
}

/// An init container that runs beside the regular ones.
pub fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

pub fn init_containers(pod: &Pod) -> &[Container] {
    spec(pod).init_containers.as_deref().unwrap_or_default()
}

pub fn containers(pod: &Pod) -> &[Container] {
    &spec(pod).containers
}

pub fn ephemeral_containers(pod: &Pod) -> &[EphemeralContainer] {
    spec(pod).ephemeral_containers.as_deref().unwrap_or_default()
}

/// The part of an ephemeral container that is a container.
pub fn as_container(e: &EphemeralContainer) -> Container {
    Container {
        args: e.args.clone(),
        command: e.command.clone(),
        env: e.env.clone(),
        env_from: e.env_from.clone(),
        image: e.image.clone(),
        image_pull_policy: e.image_pull_policy.clone(),
        name: e.name.clone(),
        resources: e.resources.clone(),
        security_context: e.security_context.clone(),
        stdin: e.stdin,
        stdin_once: e.stdin_once,
        termination_message_path: e.termination_message_path.clone(),
        termination_message_policy: e.termination_message_policy.clone(),
        tty: e.tty,
        volume_devices: e.volume_devices.clone(),
        volume_mounts: e.volume_mounts.clone(),
        working_dir: e.working_dir.clone(),
        ..Default::default()
    }
}

/// All containers of the pod with their place, ephemeral ones first, as they are started.
pub fn all(pod: &Pod) -> Vec<(Kind, Container)> {
    let ephemeral = ephemeral_containers(pod).iter().map(|e| (Kind::Ephemeral, as_container(e)));
    let init = init_containers(pod).iter().map(|c| (if is_sidecar(c) { Kind::Sidecar } else { Kind::Init }, c.clone()));
    let regular = containers(pod).iter().map(|c| (Kind::Regular, c.clone()));
    ephemeral.chain(init).chain(regular).collect()
}

pub fn find(pod: &Pod, name: &str) -> Option<(Kind, Container)> {
    if let Some(container) = containers(pod).iter().find(|c| c.name == name) {
        return Some((Kind::Regular, container.clone()));
    }
    if let Some(container) = init_containers(pod).iter().find(|c| c.name == name) {
        return Some((if is_sidecar(container) { Kind::Sidecar } else { Kind::Init }, container.clone()));
    }
    ephemeral_containers(pod).iter().find(|c| c.name == name).map(|c| (Kind::Ephemeral, as_container(c)))
}

pub fn restart_policy(pod: &Pod) -> &str {
    spec(pod).restart_policy.as_deref().unwrap_or("Always")
}

/// Whether a container that exited with `code` is started again: its own rules, then its own policy, then the pod's.
pub fn restarts_after(pod: &Pod, container: &Container, code: i32) -> bool {
    for rule in container.restart_policy_rules.iter().flatten() {
        let Some(codes) = &rule.exit_codes else { continue };
        let listed = codes.values.iter().flatten().any(|v| *v == code);
        let hit = match codes.operator.as_str() {
            "In" => listed,
            "NotIn" => !listed,
            _ => false,
        };
        if hit && rule.action.starts_with("Restart") {
            return true;
        }
    }
    match container.restart_policy.as_deref().unwrap_or(restart_policy(pod)) {
        "Always" => true,
        "OnFailure" => code != 0,
        _ => false,
    }
}

/// Hash of what a running container cannot take over: a change restarts it. Upstream's choice: name and image.
pub fn container_hash(container: &Container) -> String {
    let mut hash = Sha256::new();
    hash.update(container.name.as_bytes());
    hash.update([0]);
    hash.update(container.image.as_deref().unwrap_or("").as_bytes());
    hash.finalize()[..8].iter().map(|b| format!("{b:02x}")).collect()
}

pub type ResourceList = BTreeMap<String, ApiQuantity>;

pub fn quantity(list: Option<&ResourceList>, resource: &str) -> Option<Quantity> {
    list?.get(resource)?.0.parse().ok()
}

pub fn request(container: &Container, resource: &str) -> Option<Quantity> {
    let resources = container.resources.as_ref()?;
    quantity(resources.requests.as_ref(), resource).or_else(|| quantity(resources.limits.as_ref(), resource))
}

pub fn limit(container: &Container, resource: &str) -> Option<Quantity> {
    quantity(container.resources.as_ref()?.limits.as_ref(), resource)
}

/// The pod's QoS class: `Guaranteed`, `Burstable` or `BestEffort`.
pub fn qos_class(pod: &Pod) -> &'static str {
    if let Some(class) = pod.status.as_ref().and_then(|s| s.qos_class.as_deref()) {
        match class {
            "Guaranteed" => return "Guaranteed",
            "Burstable" => return "Burstable",
            "BestEffort" => return "BestEffort",
            _ => {}
        }
    }
    compute_qos(pod)
}

fn compute_qos(pod: &Pod) -> &'static str {
    let spec = spec(pod);
    let positive = |list: Option<&ResourceList>, r: &str| quantity(list, r).filter(|q| !q.is_zero());
    let class = |sets: Vec<(Option<&ResourceList>, Option<&ResourceList>)>| {
        let mut any = false;
        let mut guaranteed = true;
        for (requests, limits) in sets {
            for resource in ["cpu", "memory"] {
                let request = positive(requests, resource);
                let limit = positive(limits, resource);
                any |= request.is_some() || limit.is_some();
                guaranteed &= limit.is_some() && request.is_none_or(|r| Some(r) == limit);
            }
        }
        match (any, guaranteed) {
            (false, _) => "BestEffort",
            (true, true) => "Guaranteed",
            (true, false) => "Burstable",
        }
    };
    if let Some(resources) = spec.resources.as_ref().filter(|r| r.requests.is_some() || r.limits.is_some()) {
        return class(vec![(resources.requests.as_ref(), resources.limits.as_ref())]);
    }
    class(
        init_containers(pod)
            .iter()
            .chain(containers(pod))
            .map(|c| (c.resources.as_ref().and_then(|r| r.requests.as_ref()), c.resources.as_ref().and_then(|r| r.limits.as_ref())))
            .collect(),
    )
}

/// What the pod asks for: the larger of its containers together and each init step, plus overhead. Milli-units for
/// `cpu`, whole units else.
pub fn pod_request(pod: &Pod, resource: &str) -> i64 {
    if let Some(q) = spec(pod).resources.as_ref().and_then(|r| quantity(r.requests.as_ref(), resource)) {
        return amount(&q, resource) + overhead(pod, resource);
    }
    total(pod, resource, |c| request(c, resource)).unwrap_or(0) + overhead(pod, resource)
}

/// The pod's limit, `None` if any container has none.
pub fn pod_limit(pod: &Pod, resource: &str) -> Option<i64> {
    if let Some(q) = spec(pod).resources.as_ref().and_then(|r| quantity(r.limits.as_ref(), resource)) {
        return Some(amount(&q, resource) + overhead(pod, resource));
    }
    let all_limited = containers(pod).iter().chain(init_containers(pod)).all(|c| limit(c, resource).is_some_and(|q| !q.is_zero()));
    if !all_limited {
        return None;
    }
    Some(total(pod, resource, |c| limit(c, resource))? + overhead(pod, resource))
}

pub fn amount(q: &Quantity, resource: &str) -> i64 {
    if resource == "cpu" { q.milli_value() } else { q.value() }
}

fn overhead(pod: &Pod, resource: &str) -> i64 {
    quantity(spec(pod).overhead.as_ref(), resource).map_or(0, |q| amount(&q, resource))
}

fn total(pod: &Pod, resource: &str, get: impl Fn(&Container) -> Option<Quantity>) -> Option<i64> {
    let of = |c: &Container| get(c).map_or(0, |q| amount(&q, resource));
    let mut sum: i64 = containers(pod).iter().map(&of).sum();
    let mut sidecars = 0;
    let mut init_peak = 0;
    for container in init_containers(pod) {
        if is_sidecar(container) {
            sidecars += of(container);
            init_peak = init_peak.max(sidecars);
        } else {
            init_peak = init_peak.max(sidecars + of(container));
        }
    }
    sum += sidecars;
    Some(sum.max(init_peak))
}

pub fn condition<'a>(conditions: Option<&'a Vec<PodCondition>>, kind: &str) -> Option<&'a PodCondition> {
    conditions?.iter().find(|c| c.type_ == kind)
}

pub fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|s| s.phase.as_deref()).unwrap_or("Pending")
}

pub fn is_terminal_phase(phase: &str) -> bool {
    matches!(phase, "Succeeded" | "Failed")
}

/// The grace that a pod's containers get at its end, in seconds. A forced deletion still leaves one second.
pub fn grace(pod: &Pod) -> i64 {
    let spec_grace = spec(pod).termination_grace_period_seconds.unwrap_or(30);
    let grace = match (&pod.metadata.deletion_timestamp, pod.metadata.deletion_grace_period_seconds) {
        (Some(_), Some(grace)) => grace,
        _ => spec_grace,
    };
    grace.max(1)
}

pub fn probes(container: &Container) -> [(crate::pod::probe::ProbeKind, Option<&Probe>); 3] {
    use crate::pod::probe::ProbeKind::{Liveness, Readiness, Startup};
    [
        (Startup, container.startup_probe.as_ref()),
        (Liveness, container.liveness_probe.as_ref()),
        (Readiness, container.readiness_probe.as_ref()),
    ]
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// A pod with this specification.
    pub(crate) fn pod(spec: Value) -> Pod {
        let value = json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u1", "generation": 1}, "spec": spec});
        serde_json::from_value(value).expect("test pod")
    }

    #[test]
    fn qos_classes() {
        let check = |containers: Value, expected: &str| {
            assert_eq!(qos_class(&pod(json!({ "containers": containers }))), expected, "{containers}");
        };
        check(json!([{"name": "a"}]), "BestEffort");
        check(json!([{"name": "a", "resources": {"requests": {"cpu": "1"}}}]), "Burstable");
        check(json!([{"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}]), "Guaranteed");
        check(json!([{"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1000m", "memory": "1024Mi"}}}]), "Guaranteed");
        check(json!([{"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m"}}}]), "Burstable");
        check(json!([{"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}, {"name": "b"}]), "Burstable");
        check(json!([{"name": "a", "resources": {"requests": {"example.com/gpu": "1"}}}]), "BestEffort");
    }

    #[test]
    fn totals() {
        let pod = pod(json!({
            "initContainers": [
                {"name": "i1", "resources": {"requests": {"cpu": "3"}}},
                {"name": "s1", "restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}},
                {"name": "i2", "resources": {"requests": {"cpu": "500m"}}}],
            "containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "64Mi"}}}],
            "overhead": {"cpu": "10m"}
        }));
        assert_eq!(pod_request(&pod, "cpu"), 3010);
        assert_eq!(pod_request(&pod, "memory"), 64 << 20);
        assert_eq!(pod_limit(&pod, "cpu"), None);
    }

    #[test]
    fn restart_rules() {
        let check = |pod_policy: &str, container: Value, code: i32, expected: bool| {
            let pod = pod(json!({"restartPolicy": pod_policy, "containers": [container]}));
            assert_eq!(restarts_after(&pod, &containers(&pod)[0], code), expected, "{pod_policy} {code}");
        };
        check("Always", json!({"name": "a"}), 0, true);
        check("OnFailure", json!({"name": "a"}), 0, false);
        check("OnFailure", json!({"name": "a"}), 1, true);
        check("Never", json!({"name": "a"}), 1, false);
        check("Never", json!({"name": "a", "restartPolicy": "OnFailure"}), 1, true);
        let rules = json!({"name": "a", "restartPolicy": "Never", "restartPolicyRules": [{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]});
        check("Never", rules.clone(), 42, true);
        check("Never", rules, 1, false);
    }

    #[test]
    fn grace_periods() {
        let mut p = pod(json!({"containers": [], "terminationGracePeriodSeconds": 20}));
        assert_eq!(grace(&p), 20);
        p.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH));
        p.metadata.deletion_grace_period_seconds = Some(5);
        assert_eq!(grace(&p), 5);
        p.metadata.deletion_grace_period_seconds = Some(0);
        assert_eq!(grace(&p), 1);
    }
}
