//! `metadata`: what holds for every kind (`apimachinery/pkg/api/validation/objectmeta.go`).

use serde_json::Value;

use crate::field::{FieldError, quote};
use crate::strategy::at::{At, get, items, same};
use crate::strategy::names::{self, Rule};

/// Limit on the sum of all annotations' keys and values, in bytes.
pub const ANNOTATIONS_LIMIT: usize = 256 * 1024;

const NO_NAME: &str = "name or generateName is required";

/// Checks `metadata` of a new object; `at` is the metadata itself.
pub fn validate(at: &At<'_>, namespaced: bool, rule: Rule) {
    let generate = at.at("generateName");
    if !generate.is_empty() {
        for msg in rule(&names::mask_trailing_dash(generate.str())) {
            generate.invalid(msg);
        }
    }
    let name = at.at("name");
    if name.is_empty() {
        name.required(NO_NAME);
    } else {
        name.syntax(rule);
    }
    let namespace = at.at("namespace");
    match (namespaced, namespace.is_empty()) {
        (true, true) => namespace.required(""),
        (true, false) => namespace.syntax(names::dns1123_label),
        (false, false) => namespace.forbidden("not allowed on this type"),
        (false, true) => {}
    }
    at.at("generation").non_negative();
    common(at);
    finalizers(&at.at("finalizers"));
}

/// Checks the change of `metadata`.
pub fn validate_update(at: &At<'_>, old: &Value) {
    if !get(old, "deletionTimestamp").is_null() {
        let had: Vec<&str> = items(old, "finalizers").iter().filter_map(Value::as_str).collect();
        let mut extra: Vec<&str> = at.value["finalizers"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .filter(|f| !had.contains(f))
            .collect();
        if !extra.is_empty() {
            extra.sort_unstable();
            extra.dedup();
            let list: Vec<String> = extra.iter().map(|f| quote(f)).collect();
            at.at("finalizers").forbidden(format!(
                "no new finalizers can be added if the object is being deleted, found new finalizers []string{{{}}}",
                list.join(", ")
            ));
        }
    }
    let version = at.at("resourceVersion");
    if version.is_empty() {
        version.invalid_value("", "must be specified for an update");
    }
    let generation = at.at("generation");
    generation.non_negative();
    if generation.int().unwrap_or(0) < old["generation"].as_i64().unwrap_or(0) {
        generation.invalid_value(generation.int().unwrap_or(0), "must not be decremented");
    }
    const FIXED: [&str; 6] =
        ["name", "namespace", "uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds"];
    for field in FIXED {
        at.at(field).immutable(&old[field]);
    }
    common(at);
}

fn common(at: &At<'_>) {
    labels(&at.at("labels"));
    annotations(&at.at("annotations"));
    owners(&at.at("ownerReferences"));
    managed_fields(&at.at("managedFields"));
}

/// A map of labels: keys and values.
pub fn labels(at: &At<'_>) {
    for (key, value) in at.entries() {
        for msg in names::qualified_name(key) {
            at.push(FieldError::invalid(at.path(), key, msg));
        }
        for msg in names::label_value(value.str()) {
            at.push(FieldError::invalid(at.path(), value.str(), msg));
        }
    }
}

/// A map of annotations: keys in any case, the total size.
pub fn annotations(at: &At<'_>) {
    let mut size = 0;
    for (key, value) in at.entries() {
        size += key.len() + value.str().len();
        let bad = if key.bytes().any(|b| b.is_ascii_uppercase()) {
            names::qualified_name(&key.to_lowercase())
        } else {
            names::qualified_name(key)
        };
        for msg in bad {
            at.push(FieldError::invalid(at.path(), key, msg));
        }
    }
    if size > ANNOTATIONS_LIMIT {
        at.too_long(ANNOTATIONS_LIMIT);
    }
}

fn owners(at: &At<'_>) {
    let mut controller: Option<String> = None;
    for owner in at.items() {
        let version = owner.at("apiVersion");
        if version.is_empty() {
            version.required("must not be empty");
        } else if version.str().split('/').count() > 2 || version.str().ends_with('/') {
            version.invalid("must be <group>/<version> or <version>");
        }
        for field in ["kind", "name", "uid"] {
            if owner.text(field).is_empty() {
                owner.at(field).required("must not be empty");
            }
        }
        if version.str() == "v1" && owner.text("kind") == "Event" {
            owner.invalid("/v1, Kind=Event is disallowed from being an owner");
        }
        if owner.flag("controller") {
            let this = format!("{}/{}", owner.text("kind"), owner.text("name"));
            match &controller {
                Some(first) => at.invalid(format!(
                    "Only one reference can have Controller set to true. Found \"true\" in references for {first} and {this}"
                )),
                None => controller = Some(this),
            }
        }
    }
}

/// Finalizer names, and that deletion is not asked to both orphan and delete dependents.
pub fn finalizers(at: &At<'_>) {
    let (mut orphan, mut foreground) = (false, false);
    for f in at.items() {
        for msg in names::qualified_name(f.str()) {
            at.push(FieldError::invalid(at.path(), f.str(), msg));
        }
        orphan |= f.str() == "orphan";
        foreground |= f.str() == "foregroundDeletion";
    }
    if orphan && foreground {
        at.invalid("finalizer orphan and foregroundDeletion cannot be both set");
    }
}

fn managed_fields(at: &At<'_>) {
    for entry in at.items() {
        let operation = entry.at("operation");
        if operation.is_empty() {
            operation.required("must not be empty");
        } else {
            operation.one_of(&["Apply", "Update"]);
        }
        let kind = entry.at("fieldsType");
        if !kind.is_empty() && kind.str() != "FieldsV1" {
            kind.invalid("must be `FieldsV1`");
        }
        manager(&entry.at("manager"));
        let sub = entry.at("subresource");
        if sub.str().len() > 256 {
            sub.too_long(256);
        }
    }
}

/// A field manager's name: at most 128 bytes, printable.
pub fn manager(at: &At<'_>) {
    if at.str().len() > 128 {
        at.too_long(128);
    }
    for (i, c) in at.str().char_indices() {
        if c.is_control() {
            at.invalid(format!("invalid character U+{:04X} (at position {i})", c as u32));
        }
    }
}

/// Whether two objects differ outside of `metadata.managedFields`, `resourceVersion` and `generation`:
/// a write that changes nothing keeps its revision.
pub fn unchanged(new: &Value, old: &Value) -> bool {
    let (Some(a), Some(b)) = (new.as_object(), old.as_object()) else { return new == old };
    let body = |m: &serde_json::Map<String, Value>, n: &serde_json::Map<String, Value>| {
        m.iter().all(|(k, v)| k == "metadata" || same(v, n.get(k).unwrap_or(&Value::Null)))
    };
    let meta = |m: &Value, n: &Value| {
        m.as_object().into_iter().flatten().all(|(k, v)| {
            matches!(k.as_str(), "managedFields" | "resourceVersion" | "generation") || same(v, &n[k.as_str()])
        })
    };
    body(a, b)
        && body(b, a)
        && meta(&new["metadata"], &old["metadata"])
        && meta(&old["metadata"], &new["metadata"])
}
