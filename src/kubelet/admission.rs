//! Whether a pod may run on this node. Pure; reasons and messages as upstream's lifecycle handlers write them.

use k8s_openapi::api::core::v1::{Node, NodeSelectorTerm, Pod};

use crate::pod::model;
use crate::pod::status::Why;
use crate::shared::Pressure;

/// What decides.
pub struct Judge<'a> {
    pub node: Option<&'a Node>,
    /// Milli-CPU, bytes of memory, bytes of ephemeral storage.
    pub allocatable: (i64, i64, i64),
    pub max_pods: usize,
    pub pressure: Pressure,
    pub allowed_sysctls: &'a [String],
    /// The other pods that take resources here.
    pub others: &'a [std::sync::Arc<Pod>],
}

/// Sysctls that cannot harm other pods, as upstream lists them.
const SAFE_SYSCTLS: [&str; 14] = [
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
    "net.ipv4.tcp_slow_start_after_idle",
    "net.ipv4.tcp_notsent_lowat",
];

/// Why the pod is rejected, `None` if it is admitted.
pub fn judge(pod: &Pod, judge: &Judge<'_>) -> Option<Why> {
    evicted(pod, judge.pressure).or_else(|| sysctls(pod, judge.allowed_sysctls)).or_else(|| os(pod)).or_else(|| resources(pod, judge)).or_else(|| affinity(pod, judge.node)).or_else(|| ports(pod, judge.others))
}

fn evicted(pod: &Pod, pressure: Pressure) -> Option<Why> {
    if model::is_critical(pod) || !(pressure.memory || pressure.disk || pressure.pid) {
        return None;
    }
    let tolerates = model::spec(pod).tolerations.iter().flatten().any(|t| t.key.as_deref() == Some("node.kubernetes.io/memory-pressure") || (t.key.is_none() && t.operator.as_deref() == Some("Exists")));
    let only_memory = pressure.memory && !pressure.disk && !pressure.pid;
    if only_memory && (model::qos_class(pod) != "BestEffort" || tolerates) {
        return None;
    }
    let mut conditions = Vec::new();
    for (on, name) in [(pressure.disk, "DiskPressure"), (pressure.memory, "MemoryPressure"), (pressure.pid, "PIDPressure")] {
        if on {
            conditions.push(name);
        }
    }
    Some(Why::new("Evicted", format!("The node had condition: [{}]. ", conditions.join(" "))))
}

fn sysctls(pod: &Pod, allowed: &[String]) -> Option<Why> {
    let context = model::spec(pod).security_context.as_ref()?;
    for sysctl in context.sysctls.iter().flatten() {
        let name = sysctl.name.replace('/', ".");
        let listed = allowed.iter().any(|a| match a.strip_suffix('*') {
            Some(prefix) => name.starts_with(prefix),
            None => *a == name,
        });
        let namespaced_host = (name.starts_with("net.") && model::host_network(pod))
            || ((name.starts_with("kernel.shm") || name.starts_with("kernel.msg") || name == "kernel.sem" || name.starts_with("fs.mqueue.")) && model::spec(pod).host_ipc == Some(true));
        if namespaced_host || !(listed || SAFE_SYSCTLS.contains(&name.as_str())) {
            return Some(Why::new("SysctlForbidden", format!("forbidden sysctl: \"{name}\" not allowlisted")));
        }
    }
    None
}

fn os(pod: &Pod) -> Option<Why> {
    let os = model::spec(pod).os.as_ref()?;
    (os.name != "linux").then(|| Why::new("PodOSNotSupported", "Failed to admit pod as the OS field doesn't match node OS"))
}

fn resources(pod: &Pod, judge: &Judge<'_>) -> Option<Why> {
    if judge.others.len() + 1 > judge.max_pods {
        let (used, all) = (judge.others.len(), judge.max_pods);
        return Some(Why::new("OutOfpods", format!("Node didn't have enough resource: pods, requested: 1, used: {used}, capacity: {all}")));
    }
    for (resource, capacity) in [("cpu", judge.allocatable.0), ("memory", judge.allocatable.1), ("ephemeral-storage", judge.allocatable.2)] {
        let wanted = model::pod_request(pod, resource);
        let used: i64 = judge.others.iter().map(|p| model::pod_request(p, resource)).sum();
        if wanted > 0 && wanted + used > capacity {
            let message = format!("Node didn't have enough resource: {resource}, requested: {wanted}, used: {used}, capacity: {capacity}");
            return Some(Why::new(&format!("OutOf{resource}"), message));
        }
    }
    None
}

fn affinity(pod: &Pod, node: Option<&Node>) -> Option<Why> {
    let node = node.filter(|_| !model::is_static(pod))?;
    let spec = model::spec(pod);
    let labels = node.metadata.labels.clone().unwrap_or_default();
    let selected = spec.node_selector.iter().flatten().all(|(k, v)| labels.get(k) == Some(v));
    let required = spec.affinity.as_ref().and_then(|a| a.node_affinity.as_ref()).and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
    let fits = required.is_none_or(|r| r.node_selector_terms.iter().any(|t| term(t, &labels, node.metadata.name.as_deref().unwrap_or(""))));
    (!(selected && fits)).then(|| Why::new("NodeAffinity", "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector"))
}

fn term(term: &NodeSelectorTerm, labels: &std::collections::BTreeMap<String, String>, name: &str) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    if expressions.is_empty() && fields.is_empty() {
        return false;
    }
    let holds = |value: Option<&str>, operator: &str, values: &[String]| {
        let listed = value.is_some_and(|v| values.iter().any(|x| x == v));
        let number = |text: Option<&str>| text.and_then(|t| t.parse::<i64>().ok());
        match operator {
            "In" => listed,
            "NotIn" => !listed,
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            "Gt" => matches!((number(value), number(values.first().map(String::as_str))), (Some(a), Some(b)) if a > b),
            "Lt" => matches!((number(value), number(values.first().map(String::as_str))), (Some(a), Some(b)) if a < b),
            _ => false,
        }
    };
    expressions.iter().all(|e| holds(labels.get(&e.key).map(String::as_str), &e.operator, e.values.as_deref().unwrap_or_default()))
        && fields.iter().all(|e| holds((e.key == "metadata.name").then_some(name), &e.operator, e.values.as_deref().unwrap_or_default()))
}

type Port<'a> = (&'a str, i32, &'a str);

fn host_ports(pod: &Pod) -> Vec<Port<'_>> {
    let all = model::init_containers(pod).iter().filter(|c| model::is_sidecar(c)).chain(model::containers(pod));
    all.flat_map(|c| c.ports.iter().flatten())
        .filter_map(|p| Some((p.protocol.as_deref().unwrap_or("TCP"), p.host_port.filter(|h| *h > 0)?, p.host_ip.as_deref().unwrap_or(""))))
        .collect()
}

fn ports(pod: &Pod, others: &[std::sync::Arc<Pod>]) -> Option<Why> {
    let any = |ip: &str| matches!(ip, "" | "0.0.0.0" | "::");
    let wanted = host_ports(pod);
    let clash = others.iter().flat_map(|p| host_ports(p)).any(|(protocol, port, ip)| {
        wanted.iter().any(|(pr, po, i)| *pr == protocol && *po == port && (*i == ip || any(i) || any(ip)))
    });
    clash.then(|| Why::new("NodePorts", "Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::model::tests::pod;
    use serde_json::{Value, json};
    use std::sync::Arc;

    fn check(spec: Value, others: &[Value], pressure: Pressure, expected: Option<&str>) {
        let node: Node = serde_json::from_value(json!({"metadata": {"name": "n1", "labels": {"zone": "a", "size": "4"}}})).expect("node");
        let others: Vec<Arc<Pod>> = others.iter().map(|o| Arc::new(pod(o.clone()))).collect();
        let allowed = ["kernel.msg*".to_owned()];
        let by = Judge { node: Some(&node), allocatable: (1000, 1 << 30, 1 << 30), max_pods: 2, pressure, allowed_sysctls: &allowed, others: &others };
        assert_eq!(judge(&pod(spec.clone()), &by).map(|w| w.reason).as_deref(), expected, "{spec}");
    }

    #[test]
    fn verdicts() {
        let calm = Pressure::default();
        let cpu = |c: &str| json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": c}}}]});
        check(cpu("1"), &[], calm, None);
        check(cpu("600m"), &[cpu("500m")], calm, Some("OutOfcpu"));
        check(cpu("1m"), &[cpu("1m"), cpu("1m")], calm, Some("OutOfpods"));
        check(json!({"containers": [], "nodeSelector": {"zone": "a"}}), &[], calm, None);
        check(json!({"containers": [], "nodeSelector": {"zone": "b"}}), &[], calm, Some("NodeAffinity"));
        let affinity = |op: &str, values: Value| json!({"containers": [], "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "size", "operator": op, "values": values}]}]}}}});
        check(affinity("Gt", json!(["3"])), &[], calm, None);
        check(affinity("Lt", json!(["3"])), &[], calm, Some("NodeAffinity"));
        let port = || json!({"containers": [{"name": "a", "ports": [{"containerPort": 80, "hostPort": 8080}]}]});
        check(port(), &[port()], calm, Some("NodePorts"));
        let sysctl = |n: &str| json!({"containers": [], "securityContext": {"sysctls": [{"name": n, "value": "1"}]}});
        check(sysctl("kernel.shm_rmid_forced"), &[], calm, None);
        check(sysctl("kernel.msgmax"), &[], calm, None);
        check(sysctl("vm.swappiness"), &[], calm, Some("SysctlForbidden"));
        check(json!({"containers": [{"name": "a"}]}), &[], Pressure { memory: true, ..calm }, Some("Evicted"));
        check(cpu("1m"), &[], Pressure { memory: true, ..calm }, None);
        check(cpu("1m"), &[], Pressure { disk: true, ..calm }, Some("Evicted"));
    }
}
