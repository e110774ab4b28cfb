//! Label selectors and references that many kinds share.

use crate::strategy::at::At;
use crate::strategy::names;
use crate::strategy::objectmeta;

/// A `metav1.LabelSelector`.
pub fn label_selector(at: &At<'_>) {
    objectmeta::labels(&at.at("matchLabels"));
    for r in at.at("matchExpressions").items() {
        requirement(&r);
    }
}

/// A `metav1.LabelSelector` that must be there and may not be empty.
pub fn required_selector(at: &At<'_>) {
    if !at.present() {
        return at.required("");
    }
    label_selector(at);
    if at.at("matchLabels").is_empty() && at.at("matchExpressions").is_empty() {
        at.invalid("empty selector is invalid");
    }
}

fn requirement(r: &At<'_>) {
    let values = r.at("values");
    match r.text("operator") {
        "In" | "NotIn" => {
            if values.is_empty() {
                values.required("must be specified when `operator` is 'In' or 'NotIn'");
            }
        }
        "Exists" | "DoesNotExist" => {
            if !values.is_empty() {
                values.forbidden("may not be specified when `operator` is 'Exists' or 'DoesNotExist'");
            }
        }
        _ => r.at("operator").invalid("not a valid selector operator"),
    }
    r.at("key").syntax(names::qualified_name);
    for v in values.items() {
        v.syntax(names::label_value);
    }
}

/// One `NodeSelectorRequirement`.
pub fn node_requirement(r: &At<'_>) {
    let values = r.at("values");
    match r.text("operator") {
        "In" | "NotIn" => {
            if values.is_empty() {
                values.required("must be specified when `operator` is 'In' or 'NotIn'");
            }
        }
        "Exists" | "DoesNotExist" => {
            if !values.is_empty() {
                values.forbidden("may not be specified when `operator` is 'Exists' or 'DoesNotExist'");
            }
        }
        "Gt" | "Lt" => {
            if values.len() != 1 {
                values.required("must be specified single value when `operator` is 'Lt' or 'Gt'");
            }
        }
        _ => r.at("operator").invalid("not a valid selector operator"),
    }
    r.at("key").syntax(names::qualified_name);
}

/// A `NodeSelector`: at least one term.
pub fn node_selector(at: &At<'_>) {
    let terms = at.at("nodeSelectorTerms");
    if terms.is_empty() {
        return terms.required("must have at least one node selector term");
    }
    for t in terms.items() {
        node_selector_term(&t);
    }
}

/// One `NodeSelectorTerm`.
pub fn node_selector_term(t: &At<'_>) {
    for r in t.at("matchExpressions").items() {
        node_requirement(&r);
    }
    for r in t.at("matchFields").items() {
        let values = r.at("values");
        match r.text("operator") {
            "In" | "NotIn" => {
                if values.len() != 1 {
                    values.required("must be only one value when `operator` is 'In' or 'NotIn' for node field selector");
                }
            }
            _ => r.at("operator").invalid("not a valid selector operator"),
        }
        if r.text("key") == "metadata.name" {
            for v in values.items() {
                v.syntax(names::dns1123_subdomain);
            }
        } else {
            r.at("key").invalid("not a valid field selector key");
        }
    }
}

/// Field selectors a `fieldRef` may use: `spec.nodeName` or `metadata.labels['a/b']`. Returns the path without the subscript.
pub fn field_path(path: &str) -> Option<(&str, Option<&str>)> {
    match path.split_once('[') {
        None => Some((path, None)),
        Some((head, rest)) => {
            let key = rest.strip_suffix(']')?;
            let key = key
                .strip_prefix('\'')
                .and_then(|k| k.strip_suffix('\''))
                .or_else(|| key.strip_prefix('"').and_then(|k| k.strip_suffix('"')))?;
            Some((head, Some(key)))
        }
    }
}
