//! Where a pod may run: affinity, tolerations, topology spread.

use serde_json::Value;

use crate::field::ErrorKind;
use crate::strategy::at::At;
use crate::strategy::{names, selectors};

const EFFECTS: [&str; 3] = ["NoSchedule", "PreferNoSchedule", "NoExecute"];

/// `spec.affinity`.
pub fn affinity(at: &At<'_>) {
    let node = at.at("nodeAffinity");
    let required = node.at("requiredDuringSchedulingIgnoredDuringExecution");
    if required.present() {
        selectors::node_selector(&required);
    }
    for t in node.at("preferredDuringSchedulingIgnoredDuringExecution").items() {
        weight(&t);
        selectors::node_selector_term(&t.at("preference"));
    }
    for kind in ["podAffinity", "podAntiAffinity"] {
        let pods = at.at(kind);
        for t in pods.at("requiredDuringSchedulingIgnoredDuringExecution").items() {
            pod_term(&t);
        }
        for t in pods.at("preferredDuringSchedulingIgnoredDuringExecution").items() {
            weight(&t);
            pod_term(&t.at("podAffinityTerm"));
        }
    }
}

fn weight(term: &At<'_>) {
    let w = term.at("weight");
    if !(1..=100).contains(&w.int().unwrap_or(0)) {
        w.invalid_value(w.int().unwrap_or(0), "must be in the range 1-100");
    }
}

fn pod_term(t: &At<'_>) {
    selectors::label_selector(&t.at("labelSelector"));
    selectors::label_selector(&t.at("namespaceSelector"));
    for ns in t.at("namespaces").items() {
        for msg in names::dns1123_label(ns.str()) {
            t.at("namespace").invalid_value(ns.str(), msg);
        }
    }
    match_label_keys(t);
    let key = t.at("topologyKey");
    if key.is_empty() {
        key.required("can not be empty");
    }
    key.syntax(names::qualified_name);
}

fn match_label_keys(t: &At<'_>) {
    let selector = t.at("labelSelector");
    let matched = t.at("matchLabelKeys");
    let mismatched = t.at("mismatchLabelKeys");
    for keys in [&matched, &mismatched] {
        if keys.is_empty() {
            continue;
        }
        if selector.present() {
            keys.each(|k| k.syntax(names::qualified_name));
        } else {
            keys.forbidden("must not be specified when labelSelector is not set");
        }
    }
    for k in matched.items() {
        if mismatched.items().any(|m| m.value == k.value) {
            k.invalid("exists in both matchLabelKeys and mismatchLabelKeys");
        }
    }
}

/// `spec.tolerations`.
pub fn tolerations(at: &At<'_>) {
    for t in at.items() {
        let (key, operator, effect) = (t.at("key"), t.at("operator"), t.at("effect"));
        if key.is_empty() {
            if operator.str() != "Exists" {
                operator.invalid_value(
                    operator.str(),
                    "operator must be Exists when `key` is empty, which means \"match all values and all keys\"",
                );
            }
        } else {
            key.syntax(names::qualified_name);
        }
        if t.has("tolerationSeconds") && effect.str() != "NoExecute" {
            effect.invalid_value(effect.str(), "effect must be 'NoExecute' when `tolerationSeconds` is set");
        }
        let value = t.text("value");
        match operator.str() {
            "" | "Equal" => {
                let bad = names::label_value(value);
                if !bad.is_empty() {
                    operator.invalid_value(value, bad.join(";"));
                }
            }
            "Exists" if !value.is_empty() => {
                operator.invalid_value(value, "value must be empty when `operator` is 'Exists'");
            }
            "Exists" => {}
            "Lt" | "Gt" => {
                if value.parse::<i64>().is_err() {
                    t.at("value").invalid_value(value, "must be a valid decimal integer in canonical form");
                }
            }
            _ => operator.not_supported(&["Equal", "Exists"]),
        }
        if !effect.is_empty() {
            effect.one_of(&EFFECTS);
        }
    }
}

/// `spec.taints` of a node.
pub fn taints(at: &At<'_>) {
    let mut seen: Vec<(&str, &str)> = Vec::new();
    for t in at.items() {
        t.at("key").syntax(names::qualified_name);
        let value = t.at("value");
        let bad = names::label_value(value.str());
        if !bad.is_empty() {
            value.invalid(bad.join(";"));
        }
        t.at("effect").one_of(&EFFECTS);
        let id = (crate::strategy::at::text(t.value, "key"), crate::strategy::at::text(t.value, "effect"));
        if seen.contains(&id) {
            t.error(
                ErrorKind::Duplicate,
                Some(t.value.clone()),
                "taints must be unique by key and effect pair",
            );
        }
        seen.push(id);
    }
}

/// `spec.topologySpreadConstraints`.
pub fn spread(at: &At<'_>) {
    let list: Vec<At<'_>> = at.items().collect();
    for (i, c) in list.iter().enumerate() {
        let skew = c.at("maxSkew");
        if skew.int().unwrap_or(0) <= 0 {
            skew.invalid_value(skew.int().unwrap_or(0), "must be greater than zero");
        }
        let key = c.at("topologyKey");
        if key.is_empty() {
            key.required("can not be empty");
        }
        let action = c.at("whenUnsatisfiable");
        if !matches!(action.str(), "DoNotSchedule" | "ScheduleAnyway") {
            action.error(
                ErrorKind::NotSupported,
                Some(action.str().into()),
                "supported values: \"DoNotSchedule\", \"ScheduleAnyway\"",
            );
        }
        let repeats = list[i + 1..]
            .iter()
            .any(|o| o.text("topologyKey") == key.str() && o.text("whenUnsatisfiable") == action.str());
        if repeats {
            c.at("{topologyKey, whenUnsatisfiable}").error(
                ErrorKind::Duplicate,
                Some(Value::from(format!("{{{}, {}}}", key.str(), action.str()))),
                "",
            );
        }
        let min = c.at("minDomains");
        min.positive();
        if min.present() && action.str() != "DoNotSchedule" {
            min.invalid(format!(
                "can only use minDomains if whenUnsatisfiable=DoNotSchedule, not {}",
                action.str()
            ));
        }
        for policy in ["nodeAffinityPolicy", "nodeTaintsPolicy"] {
            c.at(policy).optional_one_of(&["Honor", "Ignore"]);
        }
        match_label_keys(c);
        selectors::label_selector(&c.at("labelSelector"));
    }
}
