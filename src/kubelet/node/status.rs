//! The node's status document.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};
use windlass_api::quantity::{Format, Quantity};

use super::machine::go_arch;
use crate::runtime::Image;
use crate::shared::{Pressure, Shared};

/// Images listed in the status at most, the largest first.
const MAX_IMAGES: usize = 50;
/// The Kubernetes version that this kubelet implements.
pub const KUBELET_VERSION: &str = "v1.37.2";

/// The whole status; transition times are carried over from `node`.
pub fn compute(shared: &Shared, node: &Node, images: &[Image], now: Timestamp) -> Value {
    let machine = &shared.machine;
    let (cpu, memory, storage) = machine.allocatable();
    let list = |cpu: i64, memory: i64, storage: i64| {
        json!({
            "cpu": Quantity::from_milli(cpu).to_string(),
            "memory": Quantity::from_value(memory / 1024 * 1024, Format::BinarySi).to_string(),
            "ephemeral-storage": Quantity::from_value(storage / 1024 * 1024, Format::BinarySi).to_string(),
            "hugepages-1Gi": "0",
            "hugepages-2Mi": "0",
            "pods": shared.config.max_pods.to_string(),
        })
    };
    let mut addresses: Vec<Value> = shared.host_ips.read().iter().map(|ip| json!({"type": "InternalIP", "address": ip})).collect();
    addresses.push(json!({"type": "Hostname", "address": shared.node_name}));
    let mut sorted: Vec<&Image> = images.iter().filter(|i| !i.tags.is_empty() || !i.digests.is_empty()).collect();
    sorted.sort_by(|a, b| b.size.cmp(&a.size).then(a.id.cmp(&b.id)));
    let images: Vec<Value> = sorted
        .iter()
        .take(MAX_IMAGES)
        .map(|i| json!({"names": i.digests.iter().chain(&i.tags).take(5).collect::<Vec<_>>(), "sizeBytes": i.size}))
        .collect();
    let info = &shared.info;
    json!({
        "capacity": list(machine.milli_cpu, machine.memory, machine.ephemeral_storage),
        "allocatable": list(cpu, memory, storage),
        "conditions": conditions(shared, node, now),
        "addresses": addresses,
        "daemonEndpoints": {"kubeletEndpoint": {"Port": shared.config.port}},
        "nodeInfo": {
            "machineID": machine.machine_id,
            "systemUUID": machine.system_uuid,
            "bootID": machine.boot_id,
            "kernelVersion": machine.kernel,
            "osImage": machine.os_image,
            "containerRuntimeVersion": format!("{}://{}", info.name, info.version),
            "kubeletVersion": KUBELET_VERSION,
            "kubeProxyVersion": "",
            "operatingSystem": "linux",
            "architecture": go_arch(),
        },
        "images": images,
        "runtimeHandlers": [{"name": "", "features": {"recursiveReadOnlyMounts": false, "userNamespaces": false}}],
        "features": {"supplementalGroupsPolicy": false},
    })
}

fn conditions(shared: &Shared, node: &Node, now: Timestamp) -> Vec<Value> {
    let Pressure { memory, disk, pid } = *shared.pressure.read();
    let pick = |on: bool, yes: (&'static str, &'static str), no: (&'static str, &'static str)| if on { (on, yes.0, yes.1.to_owned()) } else { (on, no.0, no.1.to_owned()) };
    let troubles: Vec<String> = shared.troubles.read().values().cloned().collect();
    let ready = if troubles.is_empty() {
        (true, "KubeletReady", "kubelet is posting ready status".to_owned())
    } else {
        (false, "KubeletNotReady", format!("[{}]", troubles.join(", ")))
    };
    let all = [
        ("MemoryPressure", pick(memory, ("KubeletHasInsufficientMemory", "kubelet has insufficient memory available"), ("KubeletHasSufficientMemory", "kubelet has sufficient memory available"))),
        ("DiskPressure", pick(disk, ("KubeletHasDiskPressure", "kubelet has disk pressure"), ("KubeletHasNoDiskPressure", "kubelet has no disk pressure"))),
        ("PIDPressure", pick(pid, ("KubeletHasInsufficientPID", "kubelet has insufficient PID available"), ("KubeletHasSufficientPID", "kubelet has sufficient PID available"))),
        ("Ready", ready),
    ];
    let time = Timestamp::from_second(now.as_second()).unwrap_or(now).to_string();
    let old = node.status.as_ref().and_then(|s| s.conditions.as_ref());
    all.into_iter()
        .map(|(kind, (on, reason, message))| {
            let status = if on { "True" } else { "False" };
            let before = old.into_iter().flatten().find(|c| c.type_ == kind && c.status == status);
            let since = before.and_then(|c| c.last_transition_time.as_ref()).map_or_else(|| time.clone(), |t| t.0.to_string());
            json!({"type": kind, "status": status, "reason": reason, "message": message, "lastHeartbeatTime": time, "lastTransitionTime": since})
        })
        .collect()
}

/// A status without the times that change at every write.
pub fn without_heartbeats(status: &Value) -> Value {
    let mut status = status.clone();
    for condition in status.get_mut("conditions").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(map) = condition.as_object_mut() {
            map.remove("lastHeartbeatTime");
            map.remove("lastTransitionTime");
        }
    }
    status
}

/// Whether every condition of `wanted` is in `have`: somebody else may have overwritten ours.
pub fn includes(have: &Value, wanted: &Value) -> bool {
    let list = |v: &Value| v["conditions"].as_array().cloned().unwrap_or_default();
    let have = list(have);
    list(wanted).iter().all(|w| have.iter().any(|h| h["type"] == w["type"] && h["status"] == w["status"]))
}
