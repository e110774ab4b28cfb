//! Small kinds: Lease, PriorityClass, RuntimeClass, flow control, resource claims.

use serde_json::{Value, json};

use crate::strategy::at::{At, default_at, default_text, get, items, items_mut, set, text};
use crate::strategy::pod::scheduling;
use crate::strategy::rules::Rules;
use crate::strategy::{Context, names, objectmeta, resources};

/// Leases.
pub static LEASE: Rules = Rules {
    create_on_update: true,
    unconditional_update: false,
    validate: &[|_, o| {
        let spec = o.at("spec");
        spec.at("leaseDurationSeconds").positive();
        spec.at("leaseTransitions").non_negative();
        if !spec.text("preferredHolder").is_empty() && spec.text("strategy").is_empty() {
            spec.at("preferredHolder").forbidden("may only be specified if `strategy` is defined");
        }
    }],
    ..Rules::PLAIN
};

/// Largest priority that users may give; above are the system's.
pub const HIGHEST_USER_PRIORITY: i64 = 1_000_000_000;
/// Priority classes of the system with their values.
pub const SYSTEM_CLASSES: [(&str, i64); 2] =
    [("system-node-critical", 2_000_001_000), ("system-cluster-critical", 2_000_000_000)];

/// PriorityClasses.
pub static PRIORITY_CLASS: Rules = Rules {
    generation: &["value"],
    defaults: &[|_, o| default_at(o, "preemptionPolicy", "PreemptLowerPriority")],
    validate: &[|_, o| {
        let name = o.at("metadata.name");
        let value = o.num("value").unwrap_or(0);
        if name.str().starts_with("system-") {
            let reserved = |why: String| {
                name.forbidden(format!(
                    "priority class names with 'system-' prefix are reserved for system use only. error: {why}"
                ));
            };
            match SYSTEM_CLASSES.iter().find(|(n, _)| *n == name.str()) {
                None => reserved(format!("{} is not a known system priority class", name.str())),
                Some((_, v)) if *v != value => reserved(format!("value of {} PriorityClass must be {v}", name.str())),
                Some(_) if o.flag("globalDefault") => {
                    reserved(format!("globalDefault of {} PriorityClass must be false", name.str()));
                }
                Some(_) => {}
            }
        } else if value > HIGHEST_USER_PRIORITY {
            o.at("value")
                .forbidden(format!("maximum allowed value of a user defined priority is {HIGHEST_USER_PRIORITY}"));
        }
        o.at("preemptionPolicy").optional_one_of(&["PreemptLowerPriority", "Never"]);
    }],
    validate_update: &[|_, o, old| {
        if o.num("value").unwrap_or(0) != old["value"].as_i64().unwrap_or(0) {
            o.at("value").forbidden("may not be changed in an update.");
        }
        o.at("preemptionPolicy").immutable(&old["preemptionPolicy"]);
    }],
    ..Rules::PLAIN
};

/// RuntimeClasses.
pub static RUNTIME_CLASS: Rules = Rules {
    unconditional_update: false,
    validate: &[|_, o| {
        let handler = o.at("handler");
        if handler.require() {
            handler.syntax(names::dns1123_label);
        }
        for (name, amount) in o.at("overhead.podFixed").entries() {
            resources::container_name(&amount, name);
            resources::value(&amount, name);
        }
        objectmeta::labels(&o.at("scheduling.nodeSelector"));
        scheduling::tolerations(&o.at("scheduling.tolerations"));
    }],
    validate_update: &[|_, o, old| o.at("handler").immutable(&old["handler"])],
    ..Rules::PLAIN
};

// === flowcontrol.apiserver.k8s.io ===

/// FlowSchemas.
pub static FLOW_SCHEMA: Rules = Rules {
    defaults: &[|_, o| {
        if o["spec"].is_object() {
            let n = get(o, "spec.matchingPrecedence").as_i64().unwrap_or(0);
            if n == 0 {
                set(o, "spec.matchingPrecedence", json!(1000));
            }
        }
    }],
    validate: &[flow_schema],
    ..Rules::SPEC_STATUS
};

fn flow_schema(_: &Context<'_>, o: &At<'_>) {
    let spec = o.at("spec");
    let precedence = spec.at("matchingPrecedence");
    match precedence.int().unwrap_or(0) {
        n if n <= 0 => precedence.invalid_value(n, "must be a positive value"),
        n if n > 10_000 => precedence.invalid("must not be greater than 10000"),
        1 if o.text("metadata.name") != "exempt" => {
            precedence.invalid("only the schema named 'exempt' may have matchingPrecedence 1");
        }
        _ => {}
    }
    spec.at("distinguisherMethod.type").optional_one_of(&["ByNamespace", "ByUser"]);
    let level = spec.at("priorityLevelConfiguration.name");
    if level.is_empty() {
        level.required("must reference a priority level");
    } else {
        level.syntax(names::dns1123_subdomain);
    }
    for rule in spec.at("rules").items() {
        if rule.at("subjects").is_empty() {
            rule.at("subjects").required("subjects must contain at least one value");
        }
        if rule.at("resourceRules").is_empty() && rule.at("nonResourceRules").is_empty() {
            rule.required("at least one of resourceRules and nonResourceRules has to be non-empty");
        }
        for s in rule.at("subjects").items() {
            subject(&s);
        }
        for r in rule.at("resourceRules").items() {
            for list in ["verbs", "apiGroups", "resources"] {
                if r.at(list).is_empty() {
                    r.at(list).required(format!("{list} must contain at least one value"));
                }
            }
            if r.at("namespaces").is_empty() && !r.flag("clusterScope") {
                r.at("namespaces").required("resource rules that are not cluster scoped must supply at least one namespace");
            }
        }
        for r in rule.at("nonResourceRules").items() {
            for list in ["verbs", "nonResourceURLs"] {
                if r.at(list).is_empty() {
                    r.at(list).required(format!("{list} must contain at least one value"));
                }
            }
            let (urls, verbs) = (r.at("nonResourceURLs"), r.at("verbs"));
            if urls.len() > 1 && urls.items().any(|u| u.str() == "*") {
                urls.invalid("if '*' is present, must not specify other non-resource URLs");
            }
            urls.each(|u| match u.str() {
                "" => u.invalid("must not be empty"),
                "*" => {}
                s if !s.starts_with('/') => u.invalid("must start with slash"),
                s if s.contains(' ') => u.invalid("must not contain white-space"),
                s if s.contains("//") => u.invalid("must not contain double slash"),
                s if s.trim_end_matches("/*").contains('*') => u.invalid("wildcard can only do suffix matching"),
                _ => {}
            });
            flow_verbs(&verbs);
        }
    }
}

fn flow_verbs(verbs: &At<'_>) {
    const KNOWN: [&str; 9] =
        ["create", "delete", "deletecollection", "get", "list", "patch", "proxy", "update", "watch"];
    let any = verbs.items().any(|v| v.str() == "*");
    if any && verbs.len() > 1 {
        verbs.invalid("if '*' is present, must not specify other verbs");
    } else if !any && verbs.items().any(|v| !KNOWN.contains(&v.str())) {
        verbs.not_supported(&KNOWN);
    }
}

/// A subject names its kind and has that part, and no other.
fn subject(s: &At<'_>) {
    const PARTS: [(&str, &str); 3] = [("Group", "group"), ("ServiceAccount", "serviceAccount"), ("User", "user")];
    let kind = s.at("kind");
    if !PARTS.iter().any(|(k, _)| *k == kind.str()) {
        return kind.not_supported(&["Group", "ServiceAccount", "User"]);
    }
    for (of, part) in PARTS {
        let at = s.at(part);
        match (of == kind.str(), at.present()) {
            (true, false) => at.required(format!("{part} is required when subject kind is '{of}'")),
            (false, true) => at.forbidden(format!("{part} is forbidden when subject kind is not '{of}'")),
            _ => {}
        }
    }
}

/// PriorityLevelConfigurations.
pub static PRIORITY_LEVEL: Rules = Rules {
    defaults: &[|_, o| {
        match text(o, "spec.type") {
            "Limited" => {
                default_at(o, "spec.limited.nominalConcurrencyShares", 30);
                default_at(o, "spec.limited.lendablePercent", 0);
                if text(o, "spec.limited.limitResponse.type") == "Queue" {
                    for (field, n) in [("handSize", 8), ("queues", 64), ("queueLengthLimit", 50)] {
                        default_at(o, &format!("spec.limited.limitResponse.queuing.{field}"), n);
                    }
                }
            }
            "Exempt" => {
                default_at(o, "spec.exempt.nominalConcurrencyShares", 0);
                default_at(o, "spec.exempt.lendablePercent", 0);
            }
            _ => {}
        };
    }],
    validate: &[priority_level],
    ..Rules::SPEC_STATUS
};

fn priority_level(_: &Context<'_>, o: &At<'_>) {
    let spec = o.at("spec");
    let limited = spec.at("limited");
    match spec.text("type") {
        "Exempt" => {
            if limited.present() {
                limited.forbidden("must be nil if the type is not Limited");
            }
        }
        "Limited" => {
            if spec.has("exempt") {
                spec.at("exempt").forbidden("must be nil if the type is Limited");
            }
            if !limited.present() {
                return limited.required("must not be empty when type is Limited");
            }
            limited.at("nominalConcurrencyShares").non_negative();
            limited.at("lendablePercent").in_range(0, 100);
            limited.at("borrowingLimitPercent").non_negative();
            let response = limited.at("limitResponse");
            let queuing = response.at("queuing");
            match response.text("type") {
                "Reject" if queuing.present() => {
                    queuing.forbidden("must be nil if limited.limitResponse.type is not Limited");
                }
                "Reject" => {}
                "Queue" if queuing.present() => {
                    for n in ["queues", "handSize", "queueLengthLimit"] {
                        queuing.at(n).positive();
                    }
                    let (hand, queues) = (queuing.num("handSize").unwrap_or(0), queuing.num("queues").unwrap_or(0));
                    if hand > queues {
                        queuing.at("handSize").invalid(format!("should not be greater than queues ({queues})"));
                    }
                }
                "Queue" => queuing.required("must not be empty if limited.limitResponse.type is Limited"),
                _ => response.at("type").one_of(&["Queue", "Reject"]),
            }
        }
        _ => spec.at("type").one_of(&["Exempt", "Limited"]),
    }
}

// === resource.k8s.io ===

/// DeviceClasses.
pub static DEVICE_CLASS: Rules = Rules { ..Rules::SPEC };

/// ResourceClaims: the spec never changes.
pub static RESOURCE_CLAIM: Rules = Rules {
    defaults: &[|_, o| claim_defaults(o, "spec")],
    validate_update: &[|_, o, old| o.at("spec").immutable(&old["spec"])],
    ..Rules::STATUS
};

/// ResourceClaimTemplates: never change.
pub static RESOURCE_CLAIM_TEMPLATE: Rules = Rules {
    defaults: &[|_, o| claim_defaults(o, "spec.spec")],
    validate_update: &[|_, o, old| o.at("spec").immutable(&old["spec"])],
    ..Rules::PLAIN
};

fn claim_defaults(o: &mut Value, path: &str) {
    let exact = |r: &mut Value| {
        default_text(r, "allocationMode", "ExactCount");
        if text(r, "allocationMode") == "ExactCount" {
            default_at(r, "count", 1);
        }
    };
    for r in items_mut(o, &format!("{path}.devices.requests")) {
        if let Some(e) = r.get_mut("exactly").filter(|e| e.is_object()) {
            exact(e);
        }
        for s in items_mut(r, "firstAvailable") {
            exact(s);
        }
    }
}

/// ResourceSlices: driver, pool's name and node never change.
pub static RESOURCE_SLICE: Rules = Rules {
    generation: &["spec"],
    validate_update: &[|_, o, old| {
        for field in ["spec.nodeName", "spec.driver", "spec.pool.name"] {
            o.at(field).immutable(get(old, field));
        }
    }],
    validate: &[|_, o| {
        let mut seen: Vec<String> = Vec::new();
        for d in o.at("spec.devices").items() {
            let name = d.at("name");
            if seen.iter().any(|s| s == name.str()) {
                name.duplicate();
            }
            seen.push(name.str().to_owned());
        }
        if items(o.value, "spec.devices").len() > 128 {
            o.at("spec.devices").too_many(128);
        }
    }],
    ..Rules::PLAIN
};
