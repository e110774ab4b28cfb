//! Cells that are more than a field.

use jiff::Timestamp;
use serde_json::Value;

use super::{human, scalar, selector, since};
use crate::meta;
use crate::strategy::at::{get, items, text};

fn condition<'v>(o: &'v Value, kind: &str) -> Option<&'v Value> {
    items(o, "status.conditions").iter().find(|c| text(c, "type") == kind)
}

fn is_true(o: &Value, kind: &str) -> bool {
    condition(o, kind).is_some_and(|c| text(c, "status") == "True")
}

fn number(o: &Value, path: &str) -> i64 {
    get(o, path).as_i64().unwrap_or(0)
}

/// At most three of a list, and how many more there are.
fn some_of(list: Vec<String>, empty: &str) -> Value {
    const MAX: usize = 3;
    if list.is_empty() {
        return empty.into();
    }
    let shown = list[..list.len().min(MAX)].join(",");
    if list.len() > MAX { format!("{shown} + {} more...", list.len() - MAX).into() } else { shown.into() }
}

// === Workloads ===

pub(super) fn ready_of_replicas(o: &Value, _: Timestamp) -> Value {
    format!("{}/{}", number(o, "status.readyReplicas"), number(o, "spec.replicas")).into()
}

pub(super) fn controller(o: &Value, _: Timestamp) -> Value {
    let Some(owner) = meta::controller_of(o) else { return "<none>".into() };
    let (group, _) = meta::split_api_version(text(owner, "apiVersion"));
    let kind = crate::status::qualified(group, text(owner, "kind")).to_lowercase();
    format!("{kind}/{}", text(owner, "name")).into()
}

pub(super) fn job_status(o: &Value, _: Timestamp) -> Value {
    let deleted = meta::deletion_timestamp(o).is_some();
    let status = if is_true(o, "Complete") {
        "Complete"
    } else if is_true(o, "Failed") {
        "Failed"
    } else if deleted {
        "Terminating"
    } else if is_true(o, "Suspended") {
        "Suspended"
    } else if is_true(o, "FailureTarget") {
        "FailureTarget"
    } else if is_true(o, "SuccessCriteriaMet") {
        "SuccessCriteriaMet"
    } else {
        "Running"
    };
    status.into()
}

pub(super) fn job_completions(o: &Value, _: Timestamp) -> Value {
    let done = number(o, "status.succeeded");
    let parallel = number(o, "spec.parallelism");
    match get(o, "spec.completions").as_i64() {
        Some(n) => format!("{done}/{n}"),
        None if parallel > 1 => format!("{done}/1 of {parallel}"),
        None => format!("{done}/1"),
    }
    .into()
}

pub(super) fn job_duration(o: &Value, now: Timestamp) -> Value {
    let Some(start) = meta::parse_time(text(o, "status.startTime")) else { return "".into() };
    let end = meta::parse_time(text(o, "status.completionTime")).unwrap_or(now);
    human((end - start).get_seconds()).into()
}

pub(super) fn suspend(o: &Value, _: Timestamp) -> Value {
    match get(o, "spec.suspend").as_bool() {
        Some(true) => "True",
        Some(false) => "False",
        None => "<unset>",
    }
    .into()
}

pub(super) fn scale_target(o: &Value, _: Timestamp) -> Value {
    format!("{}/{}", text(o, "spec.scaleTargetRef.kind"), text(o, "spec.scaleTargetRef.name")).into()
}

/// `50%` or a quantity of one metric's target and current value.
fn hpa_metric(spec: &Value, status: &Value) -> String {
    let kind = text(spec, "type");
    let field = match kind {
        "Resource" => "resource",
        "ContainerResource" => "containerResource",
        "Pods" => "pods",
        "Object" => "object",
        "External" => "external",
        _ => return "<unknown type>".into(),
    };
    let (spec, status) = (get(spec, field), get(status, field));
    let known = |v: &Value, unit: &str| match scalar(v) {
        s if s.is_empty() => "<unknown>".to_owned(),
        s => format!("{s}{unit}"),
    };
    let average = get(spec, "target.averageValue");
    match kind {
        "Resource" | "ContainerResource" => {
            let name = text(spec, "name");
            if average.is_null() {
                let current = known(get(status, "current.averageUtilization"), "%");
                let target = match get(spec, "target.averageUtilization").as_i64() {
                    Some(n) => format!("{n}%"),
                    None => "<auto>".into(),
                };
                format!("{name}: {current}/{target}")
            } else {
                format!("{name}: {}/{}", known(get(status, "current.averageValue"), ""), scalar(average))
            }
        }
        "Pods" => format!("{}/{}", known(get(status, "current.averageValue"), ""), scalar(average)),
        _ if average.is_null() => {
            format!("{}/{}", known(get(status, "current.value"), ""), scalar(get(spec, "target.value")))
        }
        _ => format!("{}/{} (avg)", known(get(status, "current.averageValue"), ""), scalar(average)),
    }
}

pub(super) fn hpa_metrics(o: &Value, _: Timestamp) -> Value {
    const MAX: usize = 2;
    let (specs, statuses) = (items(o, "spec.metrics"), items(o, "status.currentMetrics"));
    if specs.is_empty() {
        return "<none>".into();
    }
    let shown: Vec<String> = specs
        .iter()
        .enumerate()
        .take(MAX)
        .map(|(i, spec)| hpa_metric(spec, statuses.get(i).unwrap_or(&Value::Null)))
        .collect();
    let shown = shown.join(", ");
    if specs.len() > MAX { format!("{shown} + {} more...", specs.len() - MAX).into() } else { shown.into() }
}

// === Network ===

pub(super) fn cluster_ip(o: &Value, _: Timestamp) -> Value {
    items(o, "spec.clusterIPs").first().and_then(Value::as_str).unwrap_or("<none>").into()
}

/// Addresses of a load balancer, sorted.
fn balancer(o: &Value) -> Vec<String> {
    let mut list: Vec<String> = items(o, "status.loadBalancer.ingress")
        .iter()
        .map(|i| if text(i, "ip").is_empty() { text(i, "hostname") } else { text(i, "ip") })
        .filter(|s| !s.is_empty())
        .map(str::to_owned)
        .collect();
    list.sort();
    list.dedup();
    list
}

pub(super) fn load_balancer(o: &Value, _: Timestamp) -> Value {
    balancer(o).join(",").into()
}

pub(super) fn external_ip(o: &Value, _: Timestamp) -> Value {
    let external = items(o, "spec.externalIPs").iter().filter_map(Value::as_str).map(str::to_owned);
    let (mut list, none) = match text(o, "spec.type") {
        "ClusterIP" | "NodePort" => (Vec::new(), "<none>"),
        "LoadBalancer" => (balancer(o), "<pending>"),
        "ExternalName" => return text(o, "spec.externalName").into(),
        _ => return "<unknown>".into(),
    };
    list.extend(external);
    if list.is_empty() { none.into() } else { list.join(",").into() }
}

pub(super) fn service_ports(o: &Value, _: Timestamp) -> Value {
    let ports: Vec<String> = items(o, "spec.ports")
        .iter()
        .map(|p| match number(p, "nodePort") {
            0 => format!("{}/{}", number(p, "port"), text(p, "protocol")),
            node => format!("{}:{node}/{}", number(p, "port"), text(p, "protocol")),
        })
        .collect();
    if ports.is_empty() { "<none>".into() } else { ports.join(",").into() }
}

pub(super) fn ingress_hosts(o: &Value, _: Timestamp) -> Value {
    const MAX: usize = 3;
    let rules = items(o, "spec.rules");
    let (mut list, mut more) = (Vec::new(), false);
    for rule in rules {
        more |= list.len() == MAX;
        if !more && !text(rule, "host").is_empty() {
            list.push(text(rule, "host"));
        }
    }
    match (list.is_empty(), more) {
        (true, _) => "*".into(),
        (_, true) => format!("{} + {} more...", list.join(","), rules.len() - MAX).into(),
        _ => list.join(",").into(),
    }
}

pub(super) fn ingress_ports(o: &Value, _: Timestamp) -> Value {
    if items(o, "spec.tls").is_empty() { "80".into() } else { "80, 443".into() }
}

pub(super) fn ingress_class_name(o: &Value, _: Timestamp) -> Value {
    default_name(o, &["ingressclass.kubernetes.io/is-default-class"])
}

fn default_name(o: &Value, annotations: &[&str]) -> Value {
    let default = annotations.iter().any(|a| meta::annotation(o, a) == Some("true"));
    format!("{}{}", meta::name(o), if default { " (default)" } else { "" }).into()
}

pub(super) fn ingress_parameters(o: &Value, _: Timestamp) -> Value {
    let p = get(o, "spec.parameters");
    if p.is_null() {
        return "<none>".into();
    }
    format!("{}/{}", crate::status::qualified(text(p, "apiGroup"), text(p, "kind")), text(p, "name")).into()
}

pub(super) fn parent_ref(o: &Value, _: Timestamp) -> Value {
    let p = get(o, "spec.parentRef");
    if p.is_null() {
        return "<none>".into();
    }
    let mut s = crate::status::qualified(text(p, "group"), text(p, "resource")).to_lowercase();
    for part in [text(p, "namespace"), text(p, "name")] {
        if !part.is_empty() {
            s.push('/');
            s.push_str(part);
        }
    }
    s.into()
}

fn host_port(ip: &str, port: i64) -> String {
    if ip.contains(':') { format!("[{ip}]:{port}") } else { format!("{ip}:{port}") }
}

pub(super) fn endpoints(o: &Value, _: Timestamp) -> Value {
    let mut list = Vec::new();
    for subset in items(o, "subsets") {
        let addresses = items(subset, "addresses");
        let ports = items(subset, "ports");
        if ports.is_empty() {
            list.extend(addresses.iter().map(|a| text(a, "ip").to_owned()));
        }
        for p in ports {
            list.extend(addresses.iter().map(|a| host_port(text(a, "ip"), number(p, "port"))));
        }
    }
    some_of(list, "<none>")
}

pub(super) fn slice_ports(o: &Value, _: Timestamp) -> Value {
    let ports = items(o, "ports").iter().map(|p| match get(p, "port").as_i64() {
        Some(n) => n.to_string(),
        None => p["name"].as_str().unwrap_or("*").to_owned(),
    });
    some_of(ports.collect(), "<unset>")
}

pub(super) fn slice_endpoints(o: &Value, _: Timestamp) -> Value {
    let list = items(o, "endpoints")
        .iter()
        .flat_map(|e| items(e, "addresses"))
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect();
    some_of(list, "<unset>")
}

// === Nodes ===

pub(super) fn node_status(o: &Value, _: Timestamp) -> Value {
    let mut status = match condition(o, "Ready").map(|c| text(c, "status")) {
        Some("True") => "Ready",
        Some(_) => "NotReady",
        None => "Unknown",
    }
    .to_owned();
    if get(o, "spec.unschedulable") == true {
        status.push_str(",SchedulingDisabled");
    }
    status.into()
}

pub(super) fn node_roles(o: &Value, _: Timestamp) -> Value {
    let mut roles: Vec<&str> = Vec::new();
    for (k, v) in meta::labels(o).into_iter().flatten() {
        match k.strip_prefix("node-role.kubernetes.io/") {
            Some(role) if !role.is_empty() => roles.push(role),
            _ if k == "kubernetes.io/role" => roles.extend(v.as_str().filter(|r| !r.is_empty())),
            _ => {}
        }
    }
    roles.sort_unstable();
    roles.dedup();
    if roles.is_empty() { "<none>".into() } else { roles.join(",").into() }
}

fn node_address(o: &Value, kind: &str) -> Value {
    let found = items(o, "status.addresses").iter().find(|a| text(a, "type") == kind);
    found.map_or("<none>", |a| text(a, "address")).into()
}

pub(super) fn node_internal_ip(o: &Value, _: Timestamp) -> Value {
    node_address(o, "InternalIP")
}

pub(super) fn node_external_ip(o: &Value, _: Timestamp) -> Value {
    node_address(o, "ExternalIP")
}

pub(super) fn node_kernel(o: &Value, _: Timestamp) -> Value {
    let kernel = match text(o, "status.nodeInfo.kernelVersion") {
        "" => "<unknown>",
        k => k,
    };
    match text(o, "status.nodeInfo.architecture") {
        "" => kernel.into(),
        arch => format!("{kernel} ({arch})").into(),
    }
}

// === Events (core and events.k8s.io) ===

fn first<'v>(o: &'v Value, paths: &[&str]) -> &'v str {
    paths.iter().map(|p| text(o, p)).find(|s| !s.is_empty()).unwrap_or("")
}

pub(super) fn event_first_seen(o: &Value, now: Timestamp) -> Value {
    let t = first(o, &["firstTimestamp", "deprecatedFirstTimestamp", "eventTime"]);
    since(Some(t), now).into()
}

pub(super) fn event_last_seen(o: &Value, now: Timestamp) -> Value {
    let last = first(o, &["series.lastObservedTime", "lastTimestamp", "deprecatedLastTimestamp"]);
    if last.is_empty() { event_first_seen(o, now) } else { since(Some(last), now).into() }
}

pub(super) fn event_object(o: &Value, _: Timestamp) -> Value {
    let r = if get(o, "involvedObject").is_null() { get(o, "regarding") } else { get(o, "involvedObject") };
    let kind = text(r, "kind").to_lowercase();
    match text(r, "name") {
        "" => kind.into(),
        name => format!("{kind}/{name}").into(),
    }
}

pub(super) fn event_subobject(o: &Value, _: Timestamp) -> Value {
    first(o, &["involvedObject.fieldPath", "regarding.fieldPath"]).into()
}

pub(super) fn event_source(o: &Value, _: Timestamp) -> Value {
    let component = first(
        o,
        &["source.component", "deprecatedSource.component", "reportingComponent", "reportingController"],
    );
    match first(o, &["source.host", "deprecatedSource.host", "reportingInstance"]) {
        "" => component.into(),
        host => format!("{component}, {host}").into(),
    }
}

pub(super) fn event_message(o: &Value, _: Timestamp) -> Value {
    first(o, &["message", "note"]).trim().into()
}

pub(super) fn event_count(o: &Value, _: Timestamp) -> Value {
    let n = ["series.count", "count", "deprecatedCount"].iter().map(|p| number(o, p)).find(|n| *n != 0);
    n.unwrap_or(1).into()
}

// === Configuration and storage ===

pub(super) fn config_data(o: &Value, _: Timestamp) -> Value {
    let len = |k: &str| o[k].as_object().map_or(0, serde_json::Map::len);
    (len("data") + len("binaryData")).into()
}

fn modes(list: &[Value]) -> String {
    const SHORT: [(&str, &str); 4] =
        [("ReadWriteOnce", "RWO"), ("ReadOnlyMany", "ROX"), ("ReadWriteMany", "RWX"), ("ReadWriteOncePod", "RWOP")];
    let has = |m: &str| list.iter().any(|v| v.as_str() == Some(m));
    SHORT.iter().filter(|(m, _)| has(m)).map(|(_, s)| *s).collect::<Vec<_>>().join(",")
}

pub(super) fn volume_modes(o: &Value, _: Timestamp) -> Value {
    modes(items(o, "spec.accessModes")).into()
}

pub(super) fn volume_status(o: &Value, _: Timestamp) -> Value {
    if meta::deletion_timestamp(o).is_some() { "Terminating" } else { text(o, "status.phase") }.into()
}

pub(super) fn volume_claim(o: &Value, _: Timestamp) -> Value {
    let r = get(o, "spec.claimRef");
    if r.is_null() { "".into() } else { format!("{}/{}", text(r, "namespace"), text(r, "name")).into() }
}

pub(super) fn storage_class(o: &Value, _: Timestamp) -> Value {
    match meta::annotation(o, "volume.beta.kubernetes.io/storage-class") {
        Some(class) => class.into(),
        None => text(o, "spec.storageClassName").into(),
    }
}

pub(super) fn claim_capacity(o: &Value, _: Timestamp) -> Value {
    if text(o, "spec.volumeName").is_empty() {
        return "".into();
    }
    match scalar(get(o, "status.capacity.storage")) {
        s if s.is_empty() => "0".into(),
        s => s.into(),
    }
}

pub(super) fn claim_modes(o: &Value, _: Timestamp) -> Value {
    if text(o, "spec.volumeName").is_empty() { "".into() } else { modes(items(o, "status.accessModes")).into() }
}

pub(super) fn storage_class_name(o: &Value, _: Timestamp) -> Value {
    default_name(
        o,
        &["storageclass.kubernetes.io/is-default-class", "storageclass.beta.kubernetes.io/is-default-class"],
    )
}

pub(super) fn token_requests(o: &Value, _: Timestamp) -> Value {
    let list = get(o, "spec.tokenRequests");
    if list.is_null() {
        return "<unset>".into();
    }
    items(o, "spec.tokenRequests").iter().map(|t| text(t, "audience")).collect::<Vec<_>>().join(",").into()
}

fn quota(o: &Value, limits: bool) -> Value {
    let mut parts = Vec::new();
    for (name, hard) in get(o, "status.hard").as_object().into_iter().flatten() {
        if name.starts_with("limits.") == limits {
            let used = match get(o, "status.used").get(name) {
                Some(v) => scalar(v),
                None => "0".into(),
            };
            parts.push(format!("{name}: {used}/{}", scalar(hard)));
        }
    }
    parts.join(", ").into()
}

pub(super) fn quota_requests(o: &Value, _: Timestamp) -> Value {
    quota(o, false)
}

pub(super) fn quota_limits(o: &Value, _: Timestamp) -> Value {
    quota(o, true)
}

fn component(o: &Value) -> &Value {
    items(o, "conditions").iter().find(|c| text(c, "type") == "Healthy").unwrap_or(&Value::Null)
}

pub(super) fn component_status(o: &Value, _: Timestamp) -> Value {
    match component(o) {
        Value::Null => "Unknown",
        c if text(c, "status") == "True" => "Healthy",
        _ => "Unhealthy",
    }
    .into()
}

pub(super) fn component_message(o: &Value, _: Timestamp) -> Value {
    text(component(o), "message").into()
}

pub(super) fn component_error(o: &Value, _: Timestamp) -> Value {
    text(component(o), "error").into()
}

// === Access ===

pub(super) fn role_ref(o: &Value, _: Timestamp) -> Value {
    format!("{}/{}", text(o, "roleRef.kind"), text(o, "roleRef.name")).into()
}

fn bound(o: &Value, kind: &str) -> Value {
    let list: Vec<String> = items(o, "subjects")
        .iter()
        .filter(|s| text(s, "kind") == kind)
        .map(|s| match text(s, "namespace") {
            "" => text(s, "name").to_owned(),
            ns => format!("{ns}/{}", text(s, "name")),
        })
        .collect();
    list.join(", ").into()
}

pub(super) fn bound_users(o: &Value, _: Timestamp) -> Value {
    bound(o, "User")
}

pub(super) fn bound_groups(o: &Value, _: Timestamp) -> Value {
    bound(o, "Group")
}

pub(super) fn bound_accounts(o: &Value, _: Timestamp) -> Value {
    bound(o, "ServiceAccount")
}

pub(super) fn csr_duration(o: &Value, _: Timestamp) -> Value {
    match get(o, "spec.expirationSeconds").as_i64() {
        Some(s) => human(s).into(),
        None => "<none>".into(),
    }
}

pub(super) fn csr_condition(o: &Value, _: Timestamp) -> Value {
    let has = |kind: &str| condition(o, kind).is_some();
    let mut s = if has("Denied") {
        "Denied"
    } else if has("Approved") {
        "Approved"
    } else {
        "Pending"
    }
    .to_owned();
    if has("Failed") {
        s.push_str(",Failed");
    }
    if !text(o, "status.certificate").is_empty() {
        s.push_str(",Issued");
    }
    s.into()
}

pub(super) fn pod_certificate_state(o: &Value, _: Timestamp) -> Value {
    let found = items(o, "status.conditions").iter().rev().map(|c| text(c, "type"));
    found.into_iter().find(|t| matches!(*t, "Issued" | "Denied" | "Failed")).unwrap_or("Pending").into()
}

// === Extension ===

pub(super) fn param_kind(o: &Value, _: Timestamp) -> Value {
    let p = get(o, "spec.paramKind");
    if p.is_null() { "<unset>".into() } else { format!("{}/{}", text(p, "apiVersion"), text(p, "kind")).into() }
}

pub(super) fn param_ref(o: &Value, _: Timestamp) -> Value {
    let p = get(o, "spec.paramRef");
    match (text(p, "name"), text(p, "namespace")) {
        ("", _) if !get(p, "selector").is_null() => selector(get(p, "selector")).into(),
        ("", _) => "<unset>".into(),
        (name, "") => format!("*/{name}").into(),
        (name, ns) => format!("{ns}/{name}").into(),
    }
}

pub(super) fn missing_level(o: &Value, _: Timestamp) -> Value {
    condition(o, "Dangling").map_or("?", |c| text(c, "status")).into()
}

pub(super) fn claim_state(o: &Value, _: Timestamp) -> Value {
    let deleted = meta::deletion_timestamp(o).is_some();
    let mut states = Vec::new();
    if deleted {
        states.push("deleted");
    }
    if get(o, "status.allocation").is_null() {
        if !deleted {
            states.push("pending");
        }
    } else {
        states.push("allocated");
        if !items(o, "status.reservedFor").is_empty() {
            states.push("reserved");
        }
    }
    states.join(",").into()
}

pub(super) fn api_service(o: &Value, _: Timestamp) -> Value {
    let s = get(o, "spec.service");
    if s.is_null() { "Local".into() } else { format!("{}/{}", text(s, "namespace"), text(s, "name")).into() }
}

pub(super) fn api_available(o: &Value, _: Timestamp) -> Value {
    match condition(o, "Available") {
        None => "Unknown".into(),
        Some(c) if text(c, "status") == "True" => "True".into(),
        Some(c) => format!("{} ({})", text(c, "status"), text(c, "reason")).into(),
    }
}
