//! Namespaces, nodes, accounts, configuration, quotas, events, endpoints.

use std::net::IpAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use crate::field::FieldError;
use crate::meta;
use crate::strategy::at::{At, default_text, get, items, items_mut, remove, same, set, text};
use crate::strategy::pod::containers::port_number;
use crate::strategy::pod::scheduling;
use crate::strategy::rules::Rules;
use crate::strategy::{Context, names, resources, service};

/// Limit on the data of a Secret or a ConfigMap, in bytes.
pub const MAX_DATA: usize = 1024 * 1024;
const IMMUTABLE_SET: &str = "field is immutable when `immutable` is set";
const IP_MSG: &str = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";

// === Namespace ===

/// Namespaces.
pub static NAMESPACE: Rules = Rules {
    name: names::dns1123_label,
    defaults: &[|_, o| {
        let name = meta::name(o).to_owned();
        if !name.is_empty() {
            meta::set_label(o, "kubernetes.io/metadata.name", &name);
        }
        if o["status"].is_object() {
            default_text(o, "status.phase", "Active");
        }
    }],
    create: &[|_, o| {
        set(o, "status", json!({"phase": "Active"}));
        // `generateName` had no name to label before.
        let name = meta::name(o).to_owned();
        if !name.is_empty() {
            meta::set_label(o, "kubernetes.io/metadata.name", &name);
        }
        let mut finalizers = items(o, "spec.finalizers").to_vec();
        if !finalizers.contains(&json!("kubernetes")) {
            finalizers.push(json!("kubernetes"));
        }
        set(o, "spec.finalizers", finalizers.into());
    }],
    update: &[|_, new, old| set(new, "spec", old["spec"].clone())],
    validate: &[|_, o| {
        for f in o.at("spec.finalizers").items() {
            let at = o.at("spec.finalizers");
            for msg in names::qualified_name(f.str()) {
                at.invalid_value(f.str(), msg);
            }
            if !f.str().contains('/') && !matches!(f.str(), "kubernetes" | "orphan" | "foregroundDeletion") {
                at.invalid_value(f.str(), "name is neither a standard finalizer name nor is it fully qualified");
            }
        }
    }],
    validate_status: &[|_, o, _| {
        let (want, msg) = if o.has("metadata.deletionTimestamp") {
            ("Terminating", "may only be 'Terminating' if `deletionTimestamp` is not empty")
        } else {
            ("Active", "may only be 'Active' if `deletionTimestamp` is empty")
        };
        if o.text("status.phase") != want {
            o.at("status.Phase").invalid_value(o.text("status.phase"), msg);
        }
    }],
    ..Rules::STATUS
};

// === Node ===

/// Nodes: the kubelet registers them with their status.
pub static NODE: Rules = Rules {
    keep_status_on_create: true,
    defaults: &[|_, o| {
        let capacity = get(o, "status.capacity").clone();
        if !capacity.is_null() && get(o, "status.allocatable").is_null() {
            set(o, "status.allocatable", capacity);
        }
        // `podCIDR` and the first of `podCIDRs` are one.
        let (one, many) = (text(o, "spec.podCIDR").to_owned(), items(o, "spec.podCIDRs").first().cloned());
        match (one.is_empty(), many) {
            (false, None) => set(o, "spec.podCIDRs", json!([one])),
            (true, Some(first)) => set(o, "spec.podCIDR", first),
            _ => {}
        }
    }],
    validate: &[|_, o| {
        scheduling::taints(&o.at("metadata.taints").with(get(o.value, "spec.taints")));
        node_resources(o);
        let cidrs = o.at("spec.podCIDRs");
        let (mut bad, mut families) = (false, Vec::new());
        for c in cidrs.items() {
            if cidr(c.str()) {
                families.push(c.str().contains(':'));
            } else {
                bad = true;
                c.invalid("must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)");
            }
        }
        let twice = !bad && families.len() == 2 && families[0] == families[1];
        if cidrs.len() > 2 || twice {
            cidrs.invalid("may specify no more than one CIDR for each IP family");
        }
    }],
    validate_update: &[node_update],
    validate_status: &[|ctx, o, old| {
        node_resources(o);
        node_update(ctx, o, old);
    }],
    ..Rules::STATUS
};

fn cidr(text: &str) -> bool {
    let Some((ip, len)) = text.split_once('/') else { return false };
    let max = match ip.parse::<IpAddr>() {
        Ok(IpAddr::V4(_)) => 32,
        Ok(IpAddr::V6(_)) => 128,
        Err(_) => return false,
    };
    len.parse::<u8>().is_ok_and(|n| n <= max)
}

fn node_resources(o: &At<'_>) {
    for part in ["status.capacity", "status.allocatable"] {
        for (name, amount) in o.at(part).entries() {
            resources::value(&amount, name);
        }
    }
}

fn node_update(_: &Context<'_>, o: &At<'_>, old: &Value) {
    let addresses = o.at("status.addresses");
    let mut seen: Vec<Value> = Vec::new();
    for a in addresses.items() {
        if seen.contains(a.value) {
            a.duplicate();
        }
        seen.push(a.value.clone());
    }
    let was = items(old, "spec.podCIDRs");
    if !was.is_empty() && items(o.value, "spec.podCIDRs") != was {
        o.at("spec.podCIDRs").forbidden("node updates may not change podCIDR except from \"\" to valid");
    }
    let (new_id, old_id) = (o.text("spec.providerID"), text(old, "spec.providerID"));
    let at = o.at("spec.providerID");
    match (old_id.is_empty(), new_id.is_empty()) {
        (false, false) if old_id != new_id => at.invalid_value(Value::Null, "field cannot be modified once set"),
        (false, true) => at.invalid_value(Value::Null, "field cannot be cleared once set"),
        _ => {}
    }
    if !same(get(o.value, "spec.externalID"), get(old, "spec.externalID")) {
        o.at("spec.externalID").forbidden("may not be updated");
    }
}

// === ServiceAccount, Secret, ConfigMap ===

/// ServiceAccounts.
pub static SERVICE_ACCOUNT: Rules = Rules {
    create: &[|_, o| clean_secrets(o)],
    update: &[|_, o, _| clean_secrets(o)],
    ..Rules::PLAIN
};

fn clean_secrets(o: &mut Value) {
    for s in items_mut(o, "secrets") {
        *s = json!({"name": text(s, "name")});
    }
}

/// Secrets.
pub static SECRET: Rules = Rules {
    defaults: &[|_, o| {
        if let Some(Value::Object(plain)) = remove(o, "stringData") {
            if !o["data"].is_object() {
                set(o, "data", Value::Object(Map::new()));
            }
            for (key, value) in plain {
                if let (Some(data), Some(v)) = (o["data"].as_object_mut(), value.as_str()) {
                    data.insert(key, STANDARD.encode(v).into());
                }
            }
        }
        default_text(o, "type", "Opaque");
    }],
    validate: &[secret],
    validate_update: &[|_, o, old| {
        o.at("type").immutable(&old["type"]);
        immutable_data(o, old, &["data"]);
    }],
    ..Rules::PLAIN
};

/// Length of what base64 text stands for.
fn decoded_len(text: &str) -> usize {
    let padding = text.bytes().rev().take_while(|b| *b == b'=').count();
    (text.len() / 4 * 3).saturating_sub(padding)
}

fn secret(_: &Context<'_>, o: &At<'_>) {
    let data = o.at("data");
    let mut size = 0;
    for (key, value) in data.entries() {
        for msg in names::config_key(key) {
            value.invalid_value(key, msg);
        }
        size += decoded_len(value.str());
    }
    if size > MAX_DATA {
        data.too_long(MAX_DATA);
    }
    let has = |key: &str| data.key(key).present();
    let required = |key: &str| data.key(key).required("");
    let json_key = |key: &str| {
        if !has(key) {
            return required(key);
        }
        let bytes = STANDARD.decode(data.key(key).str()).unwrap_or_default();
        if let Err(e) = serde_json::from_slice::<Map<String, Value>>(&bytes) {
            data.key(key).invalid_value("<secret contents redacted>", e.to_string());
        }
    };
    match o.text("type") {
        "kubernetes.io/service-account-token" => {
            let annotations = o.at("metadata.annotations");
            let name = annotations.key("kubernetes.io/service-account.name");
            if name.is_empty() {
                name.required("");
            }
        }
        "kubernetes.io/dockercfg" => json_key(".dockercfg"),
        "kubernetes.io/dockerconfigjson" => json_key(".dockerconfigjson"),
        "kubernetes.io/basic-auth" if !has("username") && !has("password") => {
            required("username");
            required("password");
        }
        "kubernetes.io/ssh-auth" if data.key("ssh-privatekey").is_empty() => required("ssh-privatekey"),
        "kubernetes.io/tls" => {
            for key in ["tls.crt", "tls.key"] {
                if !has(key) {
                    required(key);
                }
            }
        }
        _ => {}
    }
}

fn immutable_data(o: &At<'_>, old: &Value, fields: &[&str]) {
    if old["immutable"] != true {
        return;
    }
    if !o.flag("immutable") {
        o.at("immutable").forbidden(IMMUTABLE_SET);
    }
    for f in fields {
        if !same(o.at(f).value, &old[*f]) {
            o.at(f).forbidden(IMMUTABLE_SET);
        }
    }
}

/// ConfigMaps.
pub static CONFIG_MAP: Rules = Rules {
    validate: &[|_, o| {
        let (data, binary) = (o.at("data"), o.at("binaryData"));
        let mut size = 0;
        for (key, value) in data.entries() {
            for msg in names::config_key(key) {
                value.invalid_value(key, msg);
            }
            if binary.value.get(key).is_some() {
                value.invalid_value(key, "duplicate of key present in binaryData");
            }
            size += value.str().len();
        }
        for (key, value) in binary.entries() {
            for msg in names::config_key(key) {
                value.invalid_value(key, msg);
            }
            size += decoded_len(value.str());
        }
        if size > MAX_DATA {
            o.push(FieldError::too_long("[]", MAX_DATA));
        }
    }],
    validate_update: &[|_, o, old| immutable_data(o, old, &["data", "binaryData"])],
    ..Rules::PLAIN
};

// === ResourceQuota, LimitRange ===

const SCOPES: [&str; 7] = [
    "BestEffort",
    "CrossNamespacePodAffinity",
    "NotBestEffort",
    "NotTerminating",
    "PriorityClass",
    "Terminating",
    "VolumeAttributesClass",
];

/// ResourceQuotas.
pub static RESOURCE_QUOTA: Rules = Rules {
    validate: &[|_, o| {
        let spec = o.at("spec");
        quota_amounts(&spec.at("hard"));
        quota_scopes(&spec);
    }],
    validate_update: &[|_, o, old| {
        let scopes = |v: &Value| {
            let mut l: Vec<String> =
                items(v, "spec.scopes").iter().filter_map(Value::as_str).map(str::to_owned).collect();
            l.sort();
            l
        };
        if scopes(o.value) != scopes(old) {
            o.at("spec.scopes").invalid("field is immutable");
        }
    }],
    validate_status: &[|_, o, _| {
        for part in ["status.hard", "status.used"] {
            quota_amounts(&o.at(part));
        }
    }],
    ..Rules::STATUS
};

fn quota_amounts(at: &At<'_>) {
    for (name, amount) in at.entries() {
        resources::quota_name(&amount, name);
        resources::value(&amount, name);
    }
}

/// Whether a scope can count a resource.
fn scope_fits(scope: &str, resource: &str) -> bool {
    let compute = || {
        matches!(
            resource,
            "pods" | "cpu" | "memory" | "limits.cpu" | "limits.memory" | "requests.cpu" | "requests.memory"
        ) || resources::is_extended(resource.strip_prefix("requests.").unwrap_or(resource))
    };
    match scope {
        "BestEffort" => resource == "pods",
        "Terminating" | "NotTerminating" | "NotBestEffort" | "PriorityClass" => compute(),
        "VolumeAttributesClass" => resource == "persistentvolumeclaims" || resource == "requests.storage",
        _ => true,
    }
}

fn quota_scopes(spec: &At<'_>) {
    let hard: Vec<&str> = spec.value["hard"].as_object().into_iter().flatten().map(|(k, _)| k.as_str()).collect();
    let scopes = spec.at("scopes");
    let conflicting = |list: &[&str]| {
        [("BestEffort", "NotBestEffort"), ("Terminating", "NotTerminating")]
            .iter()
            .any(|(a, b)| list.contains(a) && list.contains(b))
    };
    let names: Vec<&str> = scopes.value.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for s in &names {
        if !SCOPES.contains(s) {
            scopes.invalid("unsupported scope");
        } else if hard.iter().any(|r| !scope_fits(s, r)) {
            scopes.invalid("unsupported scope applied to resource");
        }
    }
    if conflicting(&names) {
        scopes.invalid("conflicting scopes");
    }
    let selector = spec.at("scopeSelector.matchExpressions");
    let mut selected: Vec<&str> = Vec::new();
    for (e, raw) in selector.items().zip(items(spec.value, "scopeSelector.matchExpressions")) {
        let scope = text(raw, "scopeName");
        if !SCOPES.contains(&scope) {
            selector.at("scopeName").invalid_value(scope, "unsupported scope");
        } else if hard.iter().any(|r| !scope_fits(scope, r)) {
            selector.invalid_value(spec.value["scopeSelector"].clone(), "unsupported scope applied to resource");
        }
        let operator = e.text("operator");
        let only_exists = matches!(
            scope,
            "BestEffort" | "CrossNamespacePodAffinity" | "NotBestEffort" | "NotTerminating" | "Terminating"
        );
        if only_exists && operator != "Exists" {
            selector.at("operator").invalid_value(
                operator,
                "must be 'Exists' when scope is any of ResourceQuotaScopeTerminating, ResourceQuotaScopeNotTerminating, ResourceQuotaScopeBestEffort, ResourceQuotaScopeNotBestEffort or ResourceQuotaScopeCrossNamespacePodAffinity",
            );
        }
        let values = e.at("values");
        match operator {
            "In" | "NotIn" => {
                if values.is_empty() {
                    selector
                        .at("values")
                        .required("must be at least one value when `operator` is 'In' or 'NotIn' for scope selector");
                }
            }
            "Exists" | "DoesNotExist" => {
                if !values.is_empty() {
                    selector.at("values").invalid_value(
                        values.value.clone(),
                        "must be no value when `operator` is 'Exist' or 'DoesNotExist' for scope selector",
                    );
                }
            }
            _ => selector.at("operator").invalid_value(operator, "not a valid selector operator"),
        }
        selected.push(scope);
    }
    if conflicting(&selected) {
        selector.invalid("conflicting scopes");
    }
}

/// LimitRanges.
pub static LIMIT_RANGE: Rules = Rules {
    create_on_update: true,
    create: &[|_, o| {
        if meta::name(o).is_empty() {
            set(o, "metadata.name", o["metadata"]["uid"].clone());
        }
    }],
    defaults: &[|_, o| {
        for limit in items_mut(o, "spec.limits") {
            if text(limit, "type") == "Container" {
                limit_defaults(limit);
            }
        }
    }],
    validate: &[limit_range],
    ..Rules::PLAIN
};

/// A container's limit defaults to the maximum; its request to the limit, else to the minimum.
fn limit_defaults(limit: &mut Value) {
    let fill = |limit: &mut Value, to: &str, from: &str| {
        for (name, amount) in limit[from].as_object().cloned().into_iter().flatten() {
            if limit[to][name.as_str()].is_null() {
                if !limit[to].is_object() {
                    limit[to] = json!({});
                }
                limit[to][name.as_str()] = amount;
            }
        }
    };
    fill(limit, "default", "max");
    fill(limit, "defaultRequest", "default");
    fill(limit, "defaultRequest", "min");
}

fn limit_range(_: &Context<'_>, o: &At<'_>) {
    let mut seen: Vec<String> = Vec::new();
    for limit in o.at("spec.limits").items() {
        let kind = limit.at("type");
        let bad = names::qualified_name(kind.str());
        let valid = bad.is_empty();
        for msg in bad {
            kind.invalid_value(kind.str(), msg);
        }
        if valid
            && !kind.str().contains('/')
            && !matches!(kind.str(), "Pod" | "Container" | "PersistentVolumeClaim")
        {
            kind.invalid("must be a standard limit type or fully qualified");
        }
        if seen.iter().any(|s| s == kind.str()) {
            kind.duplicate();
        }
        seen.push(kind.str().to_owned());
        let container = matches!(kind.str(), "Pod" | "Container");
        for part in ["max", "min", "default", "defaultRequest", "maxLimitRequestRatio"] {
            if kind.str() == "Pod" && part.starts_with("default") {
                if !limit.at(part).is_empty() {
                    limit.at(part).forbidden("may not be specified when `type` is 'Pod'");
                }
                continue;
            }
            for (name, amount) in limit.at(part).entries() {
                if container {
                    resources::container_name(&amount, name);
                } else {
                    resources::any_name(&amount, name);
                }
            }
        }
        if kind.str() == "PersistentVolumeClaim"
            && limit.at("min").key("storage").value.is_null()
            && limit.at("max").key("storage").value.is_null()
        {
            limit
                .at("limits")
                .required("either minimum or maximum storage value is required, but neither was provided");
        }
        limit_amounts(&limit);
    }
}

fn limit_amounts(limit: &At<'_>) {
    const PARTS: [&str; 5] = ["min", "max", "default", "defaultRequest", "maxLimitRequestRatio"];
    let mut keys: Vec<&str> =
        PARTS.iter().flat_map(|p| limit.value[*p].as_object().into_iter().flatten()).map(|(k, _)| k.as_str()).collect();
    keys.sort_unstable();
    keys.dedup();
    for k in keys {
        let q = |part: &str| resources::quantity(&limit.value[part][k]);
        let (min, max, default, request, ratio) =
            (q("min"), q("max"), q("default"), q("defaultRequest"), q("maxLimitRequestRatio"));
        let report = |part: &str, value: String, msg: String| limit.at(part).key(k).invalid_value(value, msg);
        if let (Some(a), Some(b)) = (&min, &max)
            && a > b
        {
            report("min", a.to_string(), format!("min value {a} is greater than max value {b}"));
        }
        if let (Some(r), Some(a)) = (&request, &min)
            && a > r
        {
            report("defaultRequest", r.to_string(), format!("min value {a} is greater than default request value {r}"));
        }
        if let (Some(r), Some(b)) = (&request, &max)
            && r > b
        {
            report("defaultRequest", r.to_string(), format!("default request value {r} is greater than max value {b}"));
        }
        if let (Some(r), Some(d)) = (&request, &default)
            && r > d
        {
            report(
                "defaultRequest",
                r.to_string(),
                format!("default request value {r} is greater than default limit value {d}"),
            );
        }
        if let (Some(d), Some(a)) = (&default, &min)
            && a > d
        {
            report("default", a.to_string(), format!("min value {a} is greater than default value {d}"));
        }
        if let (Some(d), Some(b)) = (&default, &max)
            && d > b
        {
            report("default", b.to_string(), format!("default value {d} is greater than max value {b}"));
        }
        if let Some(ratio) = &ratio {
            if ratio.milli_value() < 1000 {
                report("maxLimitRequestRatio", ratio.to_string(), format!("ratio {ratio} is less than 1"));
            }
            if let (Some(a), Some(b)) = (&min, &max) {
                let most = b.as_f64() / a.as_f64();
                if ratio.as_f64() > most {
                    report(
                        "maxLimitRequestRatio",
                        ratio.to_string(),
                        format!("ratio {ratio} is greater than max/min = {most:.6}"),
                    );
                }
            }
        }
        if let (Some(d), Some(r)) = (&default, &request)
            && d != r
            && !resources::is_overcommit_allowed(k)
        {
            report(
                "defaultRequest",
                r.to_string(),
                format!("default value {d} must equal to defaultRequest value {r} in {k}"),
            );
        }
    }
}

// === Event ===

/// Events of both groups.
pub static EVENT: Rules = Rules {
    name: names::path_segment,
    create_on_update: true,
    validate: &[event],
    validate_update: &[event_update],
    ..Rules::PLAIN
};

/// A field by its name in the core group or in `events.k8s.io`.
fn either<'a>(o: &'a At<'a>, core: &'a str, new: &'a str) -> At<'a> {
    if o.has(core) { o.at(core) } else { o.at(new) }
}

fn event(ctx: &Context<'_>, o: &At<'_>) {
    let strict = ctx.resource.group == "events.k8s.io";
    let regarding = if o.has("regarding") || strict { "regarding" } else { "involvedObject" };
    let object_ns = o.at(regarding);
    let object_ns = object_ns.text("namespace");
    let ns = o.text("metadata.namespace");
    let shown = o.at("involvedObject");
    let shown = shown.at("namespace");
    let mismatch = || shown.invalid_value(object_ns, "does not match event.namespace");
    if !o.has("eventTime") {
        let ok = if object_ns.is_empty() { ns.is_empty() || ns == "default" } else { ns == object_ns };
        if !ok {
            mismatch();
        }
    } else {
        if object_ns.is_empty() && ns != "default" && ns != "kube-system" {
            mismatch();
        }
        let controller = o.at(if strict { "reportingController" } else { "reportingComponent" });
        if controller.is_empty() {
            controller.required("");
        }
        for msg in names::qualified_name(controller.str()) {
            controller.invalid_value(controller.str(), msg);
        }
        for (field, max) in [("reportingInstance", 128), ("action", 128), ("reason", 128)] {
            let at = o.at(field);
            if at.is_empty() {
                at.required("");
            }
            if at.str().len() > max {
                at.invalid_value("", format!("can have at most {max} characters"));
            }
        }
        let message = either(o, "message", "note");
        if message.str().len() > 1024 {
            o.at("message").invalid_value("", "can have at most 1024 characters");
        }
    }
    if strict {
        strict_event(o);
    }
}

fn strict_event(o: &At<'_>) {
    if !o.has("eventTime") {
        o.at("eventTime").required("");
    }
    series(o);
    let kind = o.text("type");
    if !matches!(kind, "Normal" | "Warning") {
        o.at("type").invalid_value("", format!("has invalid value: {kind}"));
    }
    if o.has("metadata.resourceVersion") {
        return;
    }
    for (core, new) in [
        ("firstTimestamp", "deprecatedFirstTimestamp"),
        ("lastTimestamp", "deprecatedLastTimestamp"),
        ("count", "deprecatedCount"),
        ("source", "deprecatedSource"),
    ] {
        let at = either(o, core, new);
        let blank = at.is_empty() || at.value == 0;
        if !blank {
            o.at(core).invalid_value("", "needs to be unset");
        }
    }
}

fn series(o: &At<'_>) {
    if !o.has("series") {
        return;
    }
    if o.num("series.count").unwrap_or(0) < 2 {
        o.at("series.count").invalid_value("", "should be at least 2");
    }
    if !o.has("series.lastObservedTime") {
        o.at("series.lastObservedTime").required("");
    }
}

fn event_update(ctx: &Context<'_>, o: &At<'_>, old: &Value) {
    if ctx.resource.group != "events.k8s.io" {
        return;
    }
    const FIXED: [(&str, &str); 13] = [
        ("involvedObject", "regarding"),
        ("reason", "reason"),
        ("message", "note"),
        ("source", "deprecatedSource"),
        ("firstTimestamp", "deprecatedFirstTimestamp"),
        ("lastTimestamp", "deprecatedLastTimestamp"),
        ("count", "deprecatedCount"),
        ("type", "type"),
        ("eventTime", "eventTime"),
        ("action", "action"),
        ("related", "related"),
        ("reportingComponent", "reportingController"),
        ("reportingInstance", "reportingInstance"),
    ];
    for (core, new) in FIXED {
        let field = if o.has(core) { core } else { new };
        let was = if old.get(core).is_some() { &old[core] } else { &old[new] };
        o.at(field).immutable(was);
    }
}

// === Endpoints ===

/// Endpoints.
pub static ENDPOINTS: Rules = Rules {
    create_on_update: true,
    defaults: &[|_, o| {
        for s in items_mut(o, "subsets") {
            for p in items_mut(s, "ports") {
                default_text(p, "protocol", "TCP");
            }
        }
    }],
    validate: &[endpoints],
    ..Rules::PLAIN
};

fn endpoints(_: &Context<'_>, o: &At<'_>) {
    for s in o.at("subsets").items() {
        if s.at("addresses").is_empty() && s.at("notReadyAddresses").is_empty() {
            s.required("must specify `addresses` or `notReadyAddresses`");
        }
        for list in ["addresses", "notReadyAddresses"] {
            for a in s.at(list).items() {
                let ip = a.at("ip");
                match ip.str().parse::<IpAddr>() {
                    Err(_) => {
                        ip.invalid_value(ip.str(), IP_MSG);
                        ip.invalid_value(ip.str(), "must be a valid IP address");
                    }
                    Ok(addr) => service::endpoint_ip(&ip, addr),
                }
                let host = a.at("hostname");
                if !host.is_empty() {
                    host.syntax(names::dns1123_label);
                }
                let node = a.at("nodeName");
                if node.present() {
                    node.syntax(names::dns1123_subdomain);
                }
            }
        }
        let many = s.at("ports").len() > 1;
        for p in s.at("ports").items() {
            let name = p.at("name");
            if name.is_empty() {
                if many {
                    name.required("");
                }
            } else {
                name.syntax(names::dns1123_label);
            }
            port_number(&p.at("port"), p.num("port").unwrap_or(0));
            p.at("protocol").one_of(&["SCTP", "TCP", "UDP"]);
            let app = p.at("appProtocol");
            if app.present() {
                app.syntax(names::qualified_name);
            }
        }
    }
}
