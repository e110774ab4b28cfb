//! Pods: what a write may change, QoS class, grace.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::meta;
use crate::quantity::Quantity;
use crate::strategy::at::{At, get, items, items_mut, remove, same, set, text};
use crate::strategy::rules::Rules;
use crate::strategy::{Context, resources};

pub mod containers;
pub mod defaults;
pub mod scheduling;
pub mod security;
pub mod spec;
pub mod update;
pub mod volumes;

/// Pods.
pub static RULES: Rules = Rules {
    defaults: &[|_, pod| defaults::pod(pod)],
    create: &[prepare_create],
    update: &[keep_resources],
    status_update: &[status_update],
    subresource_update: &[("ephemeralcontainers", ephemeral_update), ("resize", resize_update)],
    validate: &[validate],
    validate_update: &[update::validate],
    validate_status: &[update::validate_status],
    subresource_validate: &[
        ("ephemeralcontainers", update::validate_ephemeral),
        ("resize", update::validate_resize),
    ],
    warnings: &[warnings],
    graceful: Some(grace),
    reset_status: &["spec", "metadata.deletionTimestamp", "metadata.ownerReferences"],
    ..Rules::SPEC_STATUS
};

fn prepare_create(ctx: &Context<'_>, pod: &mut Value) {
    let mut status = json!({"phase": "Pending"});
    if !items(pod, "spec.schedulingGates").is_empty() {
        status["conditions"] = json!([{
            "type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
            "message": "Scheduling is blocked due to non-empty scheduling gates",
            "lastProbeTime": null, "lastTransitionTime": meta::now_rfc3339(ctx.now),
        }]);
    }
    merge_label_keys(pod);
    status["qosClass"] = qos_class(pod).into();
    set(pod, "status", status);
}

fn keep_resources(_: &Context<'_>, new: &mut Value, old: &Value) {
    if get(new, "spec.resources").is_null() && !get(old, "spec.resources").is_null() {
        set(new, "spec.resources", get(old, "spec.resources").clone());
    }
}

/// A write to `/status` keeps what the kubelet may not know of.
fn status_update(_: &Context<'_>, new: &mut Value, old: &Value) {
    for field in ["metadata.deletionTimestamp", "metadata.ownerReferences", "metadata.deletionGracePeriodSeconds"] {
        set(new, field, get(old, field).clone());
    }
    const KEPT: [&str; 5] = [
        "status.qosClass",
        "status.resourceClaimStatuses",
        "status.extendedResourceClaimStatus",
        "status.nodeAllocatableResourceClaimStatuses",
        "status.observedGeneration",
    ];
    for field in KEPT {
        let empty = matches!(get(new, field), Value::Null) || get(new, field) == 0;
        if empty && !get(old, field).is_null() {
            set(new, field, get(old, field).clone());
        }
    }
    let before = items(old, "status.conditions");
    for c in items_mut(new, "status.conditions") {
        if c["observedGeneration"].is_null() || c["observedGeneration"] == 0 {
            let was = before.iter().find(|o| text(o, "type") == text(c, "type"));
            if let Some(g) = was.and_then(|o| o.get("observedGeneration")).filter(|g| !g.is_null()) {
                c["observedGeneration"] = g.clone();
            }
        }
    }
}

/// Keeps everything but what the subresource writes; of the metadata only the resource version and the managers.
fn keep_all_but(new: &mut Value, old: &Value, write: impl FnOnce(&Value, &mut Value)) {
    let mut result = old.clone();
    write(new, &mut result);
    for field in ["metadata.resourceVersion", "metadata.managedFields", "metadata.uid"] {
        if !get(new, field).is_null() {
            set(&mut result, field, get(new, field).clone());
        }
    }
    *new = result;
}

fn ephemeral_update(_: &Context<'_>, new: &mut Value, old: &Value) {
    keep_all_but(new, old, |new, result| {
        set(result, "spec.ephemeralContainers", get(new, "spec.ephemeralContainers").clone());
    });
}

fn resize_update(_: &Context<'_>, new: &mut Value, old: &Value) {
    let same_names = |list: &str| {
        let names = |pod: &Value| -> Vec<String> {
            items(pod, list).iter().map(|c| text(c, "name").to_owned()).collect()
        };
        names(new) == names(old)
    };
    if !same_names("spec.containers") || !same_names("spec.initContainers") {
        // Left as it is: validation says what is wrong.
        return;
    }
    keep_all_but(new, old, |new, result| {
        for list in ["spec.containers", "spec.initContainers"] {
            for (to, from) in items_mut(result, list).zip(items(new, list)) {
                for field in ["resources", "resizePolicy"] {
                    set(to, field, from[field].clone());
                }
            }
        }
        if !get(new, "spec.resources").is_null() {
            set(result, "spec.resources", get(new, "spec.resources").clone());
        }
    });
}

fn validate(_: &Context<'_>, pod: &At<'_>) {
    let name = pod.text("metadata.name");
    spec::validate(&pod.at("spec"), spec::Owner::Pod(name));
    let ephemeral = pod.at("spec.ephemeralContainers");
    // Only stored pods have a version.
    if !pod.has("metadata.resourceVersion") && !ephemeral.is_empty() {
        ephemeral.forbidden("cannot be set on create");
    }
}

fn warnings(pod: &Value, out: &mut Vec<String>) {
    let bad = crate::strategy::names::dns1123_label(meta::name(pod));
    if !bad.is_empty() {
        out.push(format!(
            "metadata.name: this is used in the Pod's hostname, which can result in surprising behavior; a DNS label is recommended: [{}]",
            bad.join(" ")
        ));
    }
    for (i, c) in items(pod, "spec.containers").iter().enumerate() {
        let mut seen: Vec<&str> = Vec::new();
        for (j, e) in items(c, "env").iter().enumerate() {
            let name = text(e, "name");
            if seen.contains(&name) {
                out.push(format!(
                    "spec.containers[{i}].env[{j}]: hides previous definition of {name:?}, which may cause duplicate values"
                ));
            }
            seen.push(name);
        }
    }
}

/// Seconds a pod gets: what was asked or its own, none where nothing runs.
fn grace(pod: &Value, asked: Option<i64>) -> i64 {
    let own = get(pod, "spec.terminationGracePeriodSeconds").as_i64();
    if text(pod, "spec.nodeName").is_empty() || matches!(text(pod, "status.phase"), "Failed" | "Succeeded") {
        return 0;
    }
    match asked.or(own).unwrap_or(0) {
        n if n < 0 => 1,
        n => n,
    }
}

/// `Guaranteed`, `Burstable` or `BestEffort`, from cpu and memory of all containers (or of the pod, where it sets them).
pub fn qos_class(pod: &Value) -> &'static str {
    let amounts = |r: &Value| -> BTreeMap<String, Quantity> {
        let of = |(k, v): (&String, &Value)| {
            let q = resources::quantity(v)?;
            (matches!(k.as_str(), "cpu" | "memory") && !q.is_zero()).then(|| (k.clone(), q))
        };
        r.as_object().into_iter().flatten().filter_map(of).collect()
    };
    let pod_level = get(pod, "spec.resources");
    let (pod_requests, pod_limits) = (amounts(get(pod_level, "requests")), amounts(get(pod_level, "limits")));
    if !pod_requests.is_empty() || !pod_limits.is_empty() {
        let all = pod_limits.len() == 2 && pod_requests.iter().all(|(k, q)| pod_limits.get(k) == Some(q));
        return if all && pod_requests.len() == 2 { "Guaranteed" } else { "Burstable" };
    }
    let (mut any, mut guaranteed) = (false, true);
    for list in ["spec.containers", "spec.initContainers"] {
        for c in items(pod, list) {
            let (requests, limits) = (amounts(get(c, "resources.requests")), amounts(get(c, "resources.limits")));
            any |= !requests.is_empty() || !limits.is_empty();
            let whole = limits.len() == 2 && requests.iter().all(|(k, q)| limits.get(k) == Some(q));
            guaranteed &= whole;
        }
    }
    match (any, guaranteed) {
        (false, _) => "BestEffort",
        (true, true) => "Guaranteed",
        (true, false) => "Burstable",
    }
}

/// `matchLabelKeys` and `mismatchLabelKeys` become requirements of the term's selector (KEP-3633, KEP-3243).
fn merge_label_keys(pod: &mut Value) {
    let Some(labels) = meta::labels(pod).cloned() else { return };
    let merge = |term: &mut Value| {
        if !term["labelSelector"].is_object() {
            return;
        }
        for (field, operator) in [("matchLabelKeys", "In"), ("mismatchLabelKeys", "NotIn")] {
            let keys: Vec<String> = items(term, field).iter().filter_map(Value::as_str).map(str::to_owned).collect();
            for key in keys {
                let Some(value) = labels.get(&key) else { continue };
                let selector = &mut term["labelSelector"];
                if !selector["matchExpressions"].is_array() {
                    set(selector, "matchExpressions", json!([]));
                }
                if let Some(list) = selector["matchExpressions"].as_array_mut() {
                    list.push(json!({"key": key, "operator": operator, "values": [value]}));
                }
            }
        }
    };
    for kind in ["podAffinity", "podAntiAffinity"] {
        let path = format!("spec.affinity.{kind}");
        for t in items_mut(pod, &format!("{path}.requiredDuringSchedulingIgnoredDuringExecution")) {
            merge(t);
        }
        for t in items_mut(pod, &format!("{path}.preferredDuringSchedulingIgnoredDuringExecution")) {
            if let Some(t) = t.get_mut("podAffinityTerm") {
                merge(t);
            }
        }
    }
    for c in items_mut(pod, "spec.topologySpreadConstraints") {
        merge(c);
    }
}

/// Whether two specs are the same but for the given changes, made on a copy of the new one.
fn same_after(new: &Value, old: &Value, change: impl FnOnce(&mut Value)) -> bool {
    let mut copy = new.clone();
    change(&mut copy);
    same(&copy, old)
}

/// Puts the old value of a field into `to`, or takes it away where there was none.
fn restore(to: &mut Value, from: &Value, field: &str) {
    match get(from, field) {
        Value::Null => {
            remove(to, field);
        }
        v => set(to, field, v.clone()),
    }
}
