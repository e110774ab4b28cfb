//! Amounts of resources: names and quantities of requests and limits.

use std::str::FromStr;

use serde_json::Value;

use crate::field::ErrorKind;
use crate::quantity::Quantity;
use crate::strategy::at::At;
use crate::strategy::names;

const CONTAINER: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];
const STANDARD: [&str; 4] = ["cpu", "memory", "ephemeral-storage", "storage"];
const QUOTA: [&str; 17] = [
    "cpu",
    "memory",
    "ephemeral-storage",
    "requests.cpu",
    "requests.memory",
    "requests.storage",
    "requests.ephemeral-storage",
    "limits.cpu",
    "limits.memory",
    "limits.ephemeral-storage",
    "pods",
    "resourcequotas",
    "services",
    "replicationcontrollers",
    "secrets",
    "configmaps",
    "persistentvolumeclaims",
];
const QUOTA_MORE: [&str; 2] = ["services.nodeports", "services.loadbalancers"];

/// A quantity in a JSON value.
pub fn quantity(v: &Value) -> Option<Quantity> {
    match v {
        Value::String(s) => Quantity::from_str(s).ok(),
        other => crate::quantity::from_json(other).ok(),
    }
}

/// `hugepages-2Mi` and the like.
pub fn is_huge_pages(name: &str) -> bool {
    name.starts_with("hugepages-")
}

/// Whether a name belongs to Kubernetes itself.
fn is_native(name: &str) -> bool {
    !name.contains('/') || name.contains("kubernetes.io/")
}

/// Whether requests may be below limits.
pub fn is_overcommit_allowed(name: &str) -> bool {
    is_native(name) && !is_huge_pages(name)
}

/// `example.com/gpu`, not in Kubernetes' own domain.
pub fn is_extended(name: &str) -> bool {
    !is_native(name)
        && !name.starts_with("requests.")
        && names::qualified_name(&format!("requests.{name}")).is_empty()
}

/// Whether a name counts whole things: pods, services, extended resources.
pub fn is_integer(name: &str) -> bool {
    const INTEGER: [&str; 9] = [
        "pods",
        "resourcequotas",
        "services",
        "replicationcontrollers",
        "secrets",
        "configmaps",
        "persistentvolumeclaims",
        "services.nodeports",
        "services.loadbalancers",
    ];
    INTEGER.contains(&name) || is_extended(name)
}

fn standard_for_quota(name: &str) -> bool {
    QUOTA.contains(&name)
        || QUOTA_MORE.contains(&name)
        || is_huge_pages(name)
        || name.strip_prefix("requests.").is_some_and(is_huge_pages)
}

fn name_syntax(at: &At<'_>, name: &str) -> bool {
    let bad = names::qualified_name(name);
    let ok = bad.is_empty();
    for msg in bad {
        at.invalid_value(name, msg);
    }
    ok
}

/// A resource name of a container.
pub fn container_name(at: &At<'_>, name: &str) {
    if !name_syntax(at, name) {
        return;
    }
    if !name.contains('/') {
        let standard = standard_for_quota(name) || STANDARD.contains(&name);
        if !standard {
            at.invalid_value(name, "must be a standard resource type or fully qualified");
        }
        if !CONTAINER.contains(&name) && !is_huge_pages(name) {
            at.invalid_value(name, "must be a standard resource for containers");
        }
    } else if !is_native(name) && !is_extended(name) {
        at.invalid_value(name, "doesn't follow extended resource name standard");
    }
}

/// A resource name of a ResourceQuota.
pub fn quota_name(at: &At<'_>, name: &str) {
    if !name_syntax(at, name) {
        return;
    }
    if !name.contains('/') {
        if !standard_for_quota(name) && !STANDARD.contains(&name) {
            at.invalid_value(name, "must be a standard resource type or fully qualified");
        } else if !standard_for_quota(name) {
            at.invalid_value(name, "must be a standard resource for quota");
        }
    }
}

/// A resource name of a LimitRange or of a node.
pub fn any_name(at: &At<'_>, name: &str) {
    if name_syntax(at, name) && !name.contains('/') && !standard_for_quota(name) && !STANDARD.contains(&name) {
        at.invalid_value(name, "must be a standard resource type or fully qualified");
    }
}

/// The amount is readable, not negative, and whole where the resource counts things.
pub fn value(at: &At<'_>, name: &str) {
    let Some(q) = quantity(at.value) else {
        return at.invalid("must be a quantity");
    };
    if q.is_negative() {
        at.invalid("must be greater than or equal to 0");
    }
    if is_integer(name) && q.milli_value() % 1000 != 0 {
        at.invalid("must be an integer");
    }
}

/// `resources` of a container (`claims`: names the pod declares).
pub fn requirements(at: &At<'_>, claims: &[&str]) {
    let (limits, requests) = (at.at("limits"), at.at("requests"));
    let (mut compute, mut huge) = (false, false);
    let mut look = |name: &str| {
        compute |= matches!(name, "cpu" | "memory");
        huge |= is_huge_pages(name);
    };
    for (name, amount) in limits.entries() {
        container_name(&amount, name);
        value(&amount, name);
        huge_pages_value(&amount, name);
        look(name);
    }
    for (name, amount) in requests.entries() {
        container_name(&amount, name);
        value(&amount, name);
        huge_pages_value(&amount, name);
        look(name);
        let limit = limits.key(name);
        match (quantity(amount.value), quantity(limit.value)) {
            (Some(q), Some(l)) => {
                let limit_text = limit.value.as_str().map_or_else(|| limit.value.to_string(), str::to_owned);
                if q != l && !is_overcommit_allowed(name) {
                    requests.invalid_value(amount.value.clone(), format!("must be equal to {name} limit of {limit_text}"));
                } else if q > l {
                    let m = format!("must be less than or equal to {name} limit of {limit_text}");
                    requests.invalid_value(amount.value.clone(), m);
                }
            }
            (Some(_), None) if !is_overcommit_allowed(name) => {
                limits.required("Limit must be set for non overcommitable resources");
            }
            _ => {}
        }
    }
    if huge && !compute {
        at.forbidden("HugePages require cpu or memory");
    }
    claim_names(&at.at("claims"), claims);
}

fn huge_pages_value(at: &At<'_>, name: &str) {
    let Some(page) = name.strip_prefix("hugepages-").and_then(|p| Quantity::from_str(p).ok()) else { return };
    if let Some(q) = quantity(at.value)
        && page.value() > 0
        && (q.value() % page.value() != 0 || q.milli_value() % 1000 != 0)
    {
        let text = at.value.as_str().map_or_else(|| at.value.to_string(), str::to_owned);
        at.invalid(format!("{text} is not positive integer multiple of {name}"));
    }
}

fn claim_names(at: &At<'_>, claims: &[&str]) {
    let mut seen: Vec<(String, String)> = Vec::new();
    for claim in at.items() {
        let (name, request) = (claim.text("name").to_owned(), claim.text("request").to_owned());
        if name.is_empty() {
            claim.required("");
            continue;
        }
        if !request.is_empty() {
            claim.at("request").syntax(names::dns1123_label);
        }
        let clash = seen.iter().any(|(n, r)| *n == name && (r.is_empty() || request.is_empty() || *r == request));
        if clash {
            claim.error(ErrorKind::Duplicate, Some(name.clone().into()), "");
        }
        if !claims.contains(&name.as_str()) {
            let mut detail = "must be one of the names in pod.spec.resourceClaims".to_owned();
            if claims.is_empty() {
                detail.push_str(" which is empty");
            } else {
                detail.push_str(&format!(": {}", claims.join(", ")));
            }
            claim.error(ErrorKind::NotFound, Some(name.clone().into()), detail);
        }
        seen.push((name, request));
    }
}
