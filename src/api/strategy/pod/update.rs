//! What may change in a pod once it exists.

use serde_json::Value;

use super::{qos_class, restore, same_after};
use crate::meta;
use crate::strategy::Context;
use crate::strategy::at::{At, get, items, items_mut, same, set, text};
use crate::strategy::names;
use crate::strategy::pod::containers::image_padding;

const MIRROR: &str = "kubernetes.io/config.mirror";
const UPDATABLE: &str = "`spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)";

/// Update of the pod itself.
pub fn validate(_: &Context<'_>, pod: &At<'_>, old: &Value) {
    let spec = pod.at("spec");
    let old_spec = get(old, "spec");
    for list in ["containers", "initContainers"] {
        let at = spec.at(list);
        if at.len() != items(old_spec, list).len() {
            return at.forbidden("pod updates may not add or remove containers");
        }
        at.each(image_padding);
    }
    deadline(&spec.at("activeDeadlineSeconds"), get(old_spec, "activeDeadlineSeconds"));
    tolerations(&spec.at("tolerations"), items(old_spec, "tolerations"));
    gates(&spec.at("schedulingGates"), items(old_spec, "schedulingGates"));
    if same(spec.value, old_spec) {
        return;
    }
    let gated = !items(old_spec, "schedulingGates").is_empty();
    if gated {
        gated_placement(&spec, old_spec);
    }
    let unchanged = same_after(spec.value, old_spec, |copy| {
        for list in ["containers", "initContainers"] {
            for (c, o) in items_mut(copy, list).zip(items(old_spec, list)) {
                restore(c, o, "image");
            }
        }
        for field in ["activeDeadlineSeconds", "schedulingGates", "tolerations"] {
            restore(copy, old_spec, field);
        }
        let negative = get(old_spec, "terminationGracePeriodSeconds").as_i64().is_some_and(|n| n < 0);
        if negative && copy["terminationGracePeriodSeconds"] == 1 {
            restore(copy, old_spec, "terminationGracePeriodSeconds");
        }
        if gated {
            restore(copy, old_spec, "nodeSelector");
            restore(copy, old_spec, "affinity.nodeAffinity");
            if get(old_spec, "affinity").is_null() && copy["affinity"].as_object().is_some_and(serde_json::Map::is_empty)
            {
                restore(copy, old_spec, "affinity");
            }
        }
    });
    if !unchanged {
        spec.forbidden(format!(
            "pod updates may not change fields other than {UPDATABLE}\n{}",
            difference(old_spec, spec.value)
        ));
    }
}

/// Names the fields that differ, one a line.
fn difference(old: &Value, new: &Value) -> String {
    let keys = old.as_object().into_iter().chain(new.as_object()).flat_map(|m| m.keys());
    let mut out: Vec<String> = keys
        .filter(|k| !same(get(old, k), get(new, k)))
        .map(|k| format!("  {k}: {} -> {}", get(old, k), get(new, k)))
        .collect();
    out.sort();
    out.dedup();
    out.join("\n")
}

fn deadline(at: &At<'_>, old: &Value) {
    match (at.int(), old.as_i64()) {
        (Some(new), was) => {
            at.in_range(0, i64::from(i32::MAX));
            if was.is_some_and(|was| was < new) {
                at.invalid("must be less than or equal to previous value");
            }
        }
        (None, Some(_)) => at.invalid("must not update from a positive integer to nil value"),
        (None, None) => {}
    }
}

fn tolerations(at: &At<'_>, old: &[Value]) {
    for was in old {
        let kept = at.items().any(|t| {
            same_after(t.value, was, |copy| restore(copy, was, "tolerationSeconds"))
        });
        if !kept {
            at.forbidden("existing toleration can not be modified except its tolerationSeconds");
        }
    }
}

fn gates(at: &At<'_>, old: &[Value]) {
    for g in at.items() {
        let name = g.text("name");
        if !old.iter().any(|o| text(o, "name") == name) {
            g.at("name").forbidden(format!("only deletion is allowed, but found new scheduling gate '{name}'"));
        }
    }
}

/// While a pod is gated its node selector and affinity may become stricter.
fn gated_placement(spec: &At<'_>, old: &Value) {
    let selector = spec.at("nodeSelector");
    for (key, value) in get(old, "nodeSelector").as_object().into_iter().flatten() {
        if selector.value.get(key) != Some(value) {
            selector.invalid("only additions to spec.nodeSelector are allowed (no mutations or deletions)");
            break;
        }
    }
    let affinity = spec.at("affinity.nodeAffinity");
    let required = affinity.at("requiredDuringSchedulingIgnoredDuringExecution");
    let was = get(old, "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution");
    if was.is_null() {
        return;
    }
    let terms = required.at("nodeSelectorTerms");
    let old_terms = items(was, "nodeSelectorTerms");
    if terms.len() != old_terms.len() {
        return terms.invalid("no additions/deletions to non-empty NodeSelectorTerms list are allowed");
    }
    for (t, o) in terms.items().zip(old_terms) {
        let only_more = ["matchExpressions", "matchFields"].iter().all(|list| {
            let (new, old) = (items(t.value, list), items(o, list));
            new.len() >= old.len() && new.iter().zip(old).all(|(a, b)| same(a, b))
        });
        if !only_more || (crate::strategy::at::is_empty(o) && !t.is_empty()) {
            t.invalid("only additions are allowed (no mutations or deletions)");
        }
    }
}

/// Update of `/status`.
pub fn validate_status(_: &Context<'_>, pod: &At<'_>, old: &Value) {
    let status = pod.at("status");
    if pod.text("spec.nodeName") != text(old, "spec.nodeName") {
        status.at("nodeName").forbidden("may not be changed directly");
    }
    let nominated = status.at("nominatedNodeName");
    if !nominated.is_empty() && nominated.str() != text(old, "status.nominatedNodeName") {
        nominated.syntax(names::dns1123_subdomain);
    }
    for list in ["containerStatuses", "initContainerStatuses"] {
        restarts(&status.at(list), old, list, pod);
    }
    pod_ips(&status);
    if !same(status.at("qosClass").value, get(old, "status.qosClass")) {
        status.at("qosClass").invalid("field is immutable");
    }
    for c in status.at("conditions").items() {
        let generation = c.at("observedGeneration");
        generation.non_negative();
    }
    let generation = status.at("observedGeneration");
    if generation.int().is_some_and(|n| n < 0) {
        generation.invalid("must be a non-negative integer");
    }
}

/// A container that ended and that the restart policy does not restart stays ended.
fn restarts(at: &At<'_>, old: &Value, list: &str, pod: &At<'_>) {
    let policy = pod.text("spec.restartPolicy");
    if policy == "Always" {
        return;
    }
    for was in items(get(old, "status"), list) {
        let name = text(was, "name");
        let code = get(was, "state.terminated.exitCode").as_i64();
        let spec_list = if list == "containerStatuses" { "spec.containers" } else { "spec.initContainers" };
        let own = items(pod.value, spec_list).iter().find(|c| text(c, "name") == name);
        let restartable = own.is_some_and(|c| !c["restartPolicy"].is_null() || !items(c, "restartPolicyRules").is_empty());
        let stays = match code {
            None => false,
            Some(code) => !restartable && (policy == "Never" || code == 0),
        };
        if !stays {
            continue;
        }
        for s in at.items() {
            if s.text("name") == name && !s.has("state.terminated") {
                s.at("state").forbidden("may not be transitioned to non-terminated state");
            }
        }
    }
}

fn pod_ips(status: &At<'_>) {
    let ips = status.at("podIPs");
    for ip in ips.items() {
        if ip.text("ip").parse::<std::net::IpAddr>().is_err() {
            ip.invalid_value(ip.text("ip"), "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)");
        }
    }
    let list: Vec<std::net::IpAddr> = ips.items().filter_map(|i| i.text("ip").parse().ok()).collect();
    let doubled = match list.as_slice() {
        [] | [_] => false,
        [a, b] => a.is_ipv4() == b.is_ipv4(),
        _ => true,
    };
    if doubled {
        ips.invalid("may specify no more than one IP for each IP family");
    }
}

/// Update of `/ephemeralcontainers`: containers may be added, nothing else.
pub fn validate_ephemeral(_: &Context<'_>, pod: &At<'_>, old: &Value) {
    if meta::annotation(old, MIRROR).is_some() {
        return pod.at("").forbidden("static pods do not support ephemeral containers");
    }
    let at = pod.at("spec.ephemeralContainers");
    for was in items(old, "spec.ephemeralContainers") {
        let name = text(was, "name");
        match at.items().find(|c| c.text("name") == name) {
            None => at.forbidden(format!("existing ephemeral containers {name:?} may not be removed\n")),
            Some(c) if !same(c.value, was) => {
                at.forbidden(format!("existing ephemeral containers {name:?} may not be changed\n"));
            }
            Some(_) => {}
        }
    }
}

/// Update of `/resize` (KEP-1287): cpu and memory of containers.
pub fn validate_resize(_: &Context<'_>, pod: &At<'_>, old: &Value) {
    if meta::annotation(old, MIRROR).is_some() {
        return pod.at("").forbidden("static pods cannot be resized");
    }
    if text(old, "spec.os.name") == "windows" {
        return pod.at("").forbidden("windows pods cannot be resized");
    }
    let spec = pod.at("spec");
    // A node that does not report what it gave cannot give more.
    let running = items(old, "status.containerStatuses").iter().find(|c| !get(c, "state.running").is_null());
    if running.is_some_and(|c| c["resources"].is_null()) {
        return spec.forbidden("Pod running on node without support for resize");
    }
    if qos_class(pod.value) != qos_class(old) {
        spec.invalid_value(text(old, "status.qosClass"), "Pod QOS Class may not change as a result of resizing");
    }
    let old_spec = get(old, "spec");
    for list in ["containers", "initContainers"] {
        let at = spec.at(list);
        let was = items(old_spec, list);
        if at.len() != was.len() {
            return at.forbidden(format!("{list} may not be added or removed on resize"));
        }
        for (c, o) in at.items().zip(was) {
            if c.text("name") != text(o, "name") {
                return at.forbidden(format!("{list} may not be renamed or reordered on resize"));
            }
            container_resize(&c, o);
            let unchanged = same_after(c.value, o, |copy| {
                for part in ["resources.limits", "resources.requests"] {
                    for name in ["cpu", "memory"] {
                        restore(copy, o, &format!("{part}.{name}"));
                    }
                }
                restore(copy, o, "resizePolicy");
            });
            if !unchanged {
                spec.forbidden("only cpu and memory resources are mutable");
            }
            if list == "initContainers" && text(o, "restartPolicy") != "Always" && !same(&c.value["resources"], &o["resources"])
            {
                spec.forbidden("resources for non-sidecar init containers are immutable");
            }
        }
    }
    let unchanged = same_after(spec.value, old_spec, |copy| {
        for list in ["containers", "initContainers"] {
            restore(copy, old_spec, list);
        }
        set(copy, "resources", get(old_spec, "resources").clone());
    });
    if !unchanged {
        spec.forbidden("only cpu and memory resources are mutable");
    }
}

fn container_resize(c: &At<'_>, old: &Value) {
    for part in ["limits", "requests"] {
        for name in ["cpu", "memory"] {
            let was = get(old, &format!("resources.{part}.{name}"));
            if !was.is_null() && c.at("resources").at(part).key(name).value.is_null() {
                c.at("resources").at(part).forbidden(format!("resource {part} cannot be removed"));
            }
        }
    }
}
