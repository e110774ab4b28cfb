//! Requests and limits as cgroup and OOM settings. Pure, upstream's numbers.

use k8s_openapi::api::core::v1::{Container, Pod};

use super::model;
use crate::runtime::Resources;

const MIN_SHARES: i64 = 2;
const MAX_SHARES: i64 = 262_144;
const PERIOD: i64 = 100_000;
const MIN_QUOTA: i64 = 1000;

pub const OOM_SANDBOX: i64 = -998;
const OOM_GUARANTEED: i64 = -997;
const OOM_BEST_EFFORT: i64 = 1000;

pub fn shares(milli_cpu: i64) -> i64 {
    if milli_cpu <= 0 { MIN_SHARES } else { (milli_cpu * 1024 / 1000).clamp(MIN_SHARES, MAX_SHARES) }
}

pub fn quota(milli_cpu: i64) -> i64 {
    if milli_cpu <= 0 { 0 } else { (milli_cpu * PERIOD / 1000).max(MIN_QUOTA) }
}

pub fn of_container(container: &Container, pids: i64) -> Resources {
    let milli = |q: Option<windlass_api::quantity::Quantity>| q.map_or(0, |q| q.milli_value());
    let cpu_limit = milli(model::limit(container, "cpu"));
    Resources {
        cpu_shares: shares(milli(model::request(container, "cpu"))),
        cpu_quota: quota(cpu_limit),
        cpu_period: PERIOD,
        memory: model::limit(container, "memory").map_or(0, |q| q.value()),
        pids,
    }
}

/// What a container needs when its specification asks for other resources than it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resize {
    InPlace,
    /// Its resize policy wants a restart for what has changed.
    Restart,
}

/// Whether a running container's resources differ from its specification.
pub fn resize(container: &Container, now: &Resources) -> Option<Resize> {
    let wanted = of_container(container, now.pids);
    let cpu = wanted.cpu_shares != now.cpu_shares || wanted.cpu_quota != now.cpu_quota;
    let memory = wanted.memory != now.memory;
    let restarts = |resource: &str| container.resize_policy.iter().flatten().any(|p| p.resource_name == resource && p.restart_policy == "RestartContainer");
    match (cpu, memory) {
        (false, false) => None,
        (cpu, memory) if (cpu && restarts("cpu")) || (memory && restarts("memory")) => Some(Resize::Restart),
        _ => Some(Resize::InPlace),
    }
}

/// The resources of the pod as a whole: shares for what it requests, limits only where all its containers have them.
pub fn of_pod(pod: &Pod, pids: i64) -> Resources {
    let class = model::qos_class(pod);
    Resources {
        cpu_shares: if class == "BestEffort" { MIN_SHARES } else { shares(model::pod_request(pod, "cpu")) },
        cpu_quota: model::pod_limit(pod, "cpu").map_or(0, quota),
        cpu_period: PERIOD,
        memory: model::pod_limit(pod, "memory").unwrap_or(0),
        pids,
    }
}

/// How readily the kernel kills the container when memory is short.
pub fn oom_score_adj(pod: &Pod, container: &Container, node_memory: i64) -> i64 {
    if model::is_critical(pod) {
        return OOM_GUARANTEED;
    }
    match model::qos_class(pod) {
        "Guaranteed" => OOM_GUARANTEED,
        "BestEffort" => OOM_BEST_EFFORT,
        _ => {
            let own = |c: &Container| c.resources.as_ref().and_then(|r| model::quantity(r.requests.as_ref(), "memory")).map_or(0, |q| q.value());
            let score = |request: i64| 1000 - 1000 * request / node_memory.max(1);
            let mut adjust = score(own(container));
            if model::is_sidecar(container) && model::init_containers(pod).iter().any(|c| c.name == container.name) {
                // A sidecar is not killed before the containers that it serves.
                let least = model::containers(pod).iter().map(own).min().unwrap_or(0);
                adjust = adjust.min(score(least));
            }
            adjust.clamp(1000 + OOM_GUARANTEED, OOM_BEST_EFFORT - 1)
        }
    }
}

/// The pod's place in the cgroup tree. systemd wants slice names, each with its parents' names in front.
pub fn cgroup_parent(driver: &str, instance: &str, qos: &str, uid: &str) -> String {
    let class = match qos {
        "Burstable" => Some("burstable"),
        "BestEffort" => Some("besteffort"),
        _ => None,
    };
    if driver == "systemd" {
        let root = if instance.is_empty() { "kubepods".to_owned() } else { format!("kubepods_{}", instance.replace('-', "_")) };
        let class = class.map(|c| format!("-{c}")).unwrap_or_default();
        return format!("{root}{class}-pod{}.slice", uid.replace('-', "_"));
    }
    format!("{}{}/pod{uid}", cgroup_root(instance), class.map(|c| format!("/{c}")).unwrap_or_default())
}

/// The root of an instance's pods under the cgroupfs driver.
pub fn cgroup_root(instance: &str) -> String {
    if instance.is_empty() { "/kubepods".to_owned() } else { format!("/kubepods-{instance}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::model::tests::pod;
    use serde_json::{Value, json};

    #[test]
    fn cpu_settings() {
        // Expectations from upstream's TestMilliCPUToShares and TestMilliCPUToQuota.
        for (milli, s, q) in [(0, 2, 0), (1, 2, 1000), (2, 2, 1000), (20, 20, 2000), (200, 204, 20_000), (500, 512, 50_000), (1500, 1536, 150_000)] {
            assert_eq!((shares(milli), quota(milli)), (s, q), "{milli}");
        }
    }

    #[test]
    fn resizes() {
        let check = |container: Value, now: Resources, expected: Option<Resize>| {
            let parsed: Container = serde_json::from_value(container.clone()).expect("container");
            assert_eq!(resize(&parsed, &now), expected, "{container}");
        };
        let now = || Resources { cpu_shares: 102, cpu_quota: 10_000, cpu_period: PERIOD, memory: 1 << 20, pids: 7 };
        let with = |cpu: &str, memory: &str, policy: Value| json!({"name": "c", "resizePolicy": policy, "resources": {"limits": {"cpu": cpu, "memory": memory}}});
        check(with("100m", "1Mi", json!([])), now(), None);
        check(with("200m", "1Mi", json!([])), now(), Some(Resize::InPlace));
        check(with("200m", "1Mi", json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}])), now(), Some(Resize::InPlace));
        check(with("100m", "2Mi", json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}])), now(), Some(Resize::Restart));
    }

    #[test]
    fn oom_scores() {
        let check = |spec: Value, expected: i64| {
            let pod = pod(spec.clone());
            assert_eq!(oom_score_adj(&pod, &model::containers(&pod)[0], 8_000_000_000), expected, "{spec}");
        };
        check(json!({"containers": [{"name": "a"}]}), 1000);
        check(json!({"containers": [{"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1G"}}}]}), -997);
        check(json!({"containers": [{"name": "a", "resources": {"requests": {"memory": "4G"}}}]}), 500);
        check(json!({"containers": [{"name": "a", "resources": {"requests": {"memory": "8G"}}}]}), 3);
        check(json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}}]}), 999);
        check(json!({"containers": [{"name": "a"}], "priority": 2_000_001_000}), -997);
    }

    #[test]
    fn cgroup_names() {
        assert_eq!(cgroup_parent("cgroupfs", "", "Guaranteed", "a-b"), "/kubepods/poda-b");
        assert_eq!(cgroup_parent("cgroupfs", "x", "BestEffort", "a-b"), "/kubepods-x/besteffort/poda-b");
        assert_eq!(cgroup_parent("systemd", "", "Burstable", "a-b"), "kubepods-burstable-poda_b.slice");
    }
}
