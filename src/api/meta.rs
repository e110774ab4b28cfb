//! Cheap accessors to `metadata` of an object value, and the few setters that the pipeline needs.
//!
//! A getter never fails: what is absent or of the wrong type reads as empty, because decoding has
//! already refused wrong types (see [`crate::schema::Schemas::check_types`]).

use serde_json::{Map, Value};

/// `metadata` of an object, or null.
pub fn metadata(object: &Value) -> &Value {
    &object["metadata"]
}

/// A string below `metadata`, `""` when there is none.
pub fn text<'a>(object: &'a Value, key: &str) -> &'a str {
    object["metadata"][key].as_str().unwrap_or("")
}

/// `metadata.name`.
pub fn name(object: &Value) -> &str {
    text(object, "name")
}

/// `metadata.generateName`.
pub fn generate_name(object: &Value) -> &str {
    text(object, "generateName")
}

/// `metadata.namespace`, `""` for cluster-scoped objects.
pub fn namespace(object: &Value) -> &str {
    text(object, "namespace")
}

/// `metadata.uid`.
pub fn uid(object: &Value) -> &str {
    text(object, "uid")
}

/// `metadata.creationTimestamp` as it was written.
pub fn creation_timestamp(object: &Value) -> Option<&str> {
    object["metadata"]["creationTimestamp"].as_str()
}

/// `metadata.deletionTimestamp`: present while the object waits for its finalizers or its grace period.
pub fn deletion_timestamp(object: &Value) -> Option<&str> {
    object["metadata"]["deletionTimestamp"].as_str()
}

/// `metadata.deletionGracePeriodSeconds`.
pub fn deletion_grace_period_seconds(object: &Value) -> Option<i64> {
    object["metadata"]["deletionGracePeriodSeconds"].as_i64()
}

/// `metadata.resourceVersion` as a number; `None` when absent, empty or not a number.
pub fn resource_version(object: &Value) -> Option<u64> {
    text(object, "resourceVersion").parse().ok()
}

/// `metadata.generation`, 0 when absent.
pub fn generation(object: &Value) -> i64 {
    object["metadata"]["generation"].as_i64().unwrap_or(0)
}

/// `metadata.labels`.
pub fn labels(object: &Value) -> Option<&Map<String, Value>> {
    object["metadata"]["labels"].as_object()
}

/// One label's value.
pub fn label<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    labels(object)?.get(key)?.as_str()
}

/// `metadata.annotations`.
pub fn annotations(object: &Value) -> Option<&Map<String, Value>> {
    object["metadata"]["annotations"].as_object()
}

/// One annotation's value.
pub fn annotation<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    annotations(object)?.get(key)?.as_str()
}

/// `metadata.ownerReferences`.
pub fn owner_references(object: &Value) -> &[Value] {
    list(object, "ownerReferences")
}

/// The owner reference with `controller: true`.
pub fn controller_of(object: &Value) -> Option<&Value> {
    owner_references(object).iter().find(|owner| owner["controller"] == true)
}

/// `metadata.finalizers` (strings only).
pub fn finalizers(object: &Value) -> impl Iterator<Item = &str> {
    list(object, "finalizers").iter().filter_map(Value::as_str)
}

/// `metadata.managedFields`.
pub fn managed_fields(object: &Value) -> &[Value] {
    list(object, "managedFields")
}

fn list<'a>(object: &'a Value, key: &str) -> &'a [Value] {
    object["metadata"][key].as_array().map_or(&[], Vec::as_slice)
}

/// `apiVersion`.
pub fn api_version(object: &Value) -> &str {
    object["apiVersion"].as_str().unwrap_or("")
}

/// `kind`.
pub fn kind(object: &Value) -> &str {
    object["kind"].as_str().unwrap_or("")
}

/// Splits an `apiVersion` into group and version: `apps/v1` is `("apps", "v1")`, `v1` is `("", "v1")`.
pub fn split_api_version(api_version: &str) -> (&str, &str) {
    api_version.split_once('/').unwrap_or(("", api_version))
}

/// The inverse of [`split_api_version`].
pub fn join_api_version(group: &str, version: &str) -> String {
    if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") }
}

/// `metadata` for writing. An object that is not a JSON object becomes one: callers have decoded a
/// JSON object already, so this changes nothing in practice and cannot panic.
pub fn metadata_mut(object: &mut Value) -> &mut Map<String, Value> {
    child_mut(as_map(object), "metadata")
}

/// The object below `key`, created when it is absent or no object.
pub fn child_mut<'a>(parent: &'a mut Map<String, Value>, key: &str) -> &'a mut Map<String, Value> {
    as_map(parent.entry(key).or_insert_with(|| Value::Object(Map::new())))
}

/// `value` as a map, replaced by an empty one when it is no object.
pub fn as_map(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(map) => map,
        _ => unreachable!("made an object above"),
    }
}

/// Sets a field of `metadata`.
pub fn set(object: &mut Value, key: &str, value: impl Into<Value>) {
    metadata_mut(object).insert(key.to_owned(), value.into());
}

/// Removes a field of `metadata`.
pub fn remove(object: &mut Value, key: &str) -> Option<Value> {
    object.get_mut("metadata")?.as_object_mut()?.remove(key)
}

/// Sets `metadata.name`.
pub fn set_name(object: &mut Value, name: &str) {
    set(object, "name", name);
}

/// Sets `metadata.namespace`, or removes it when `namespace` is empty.
pub fn set_namespace(object: &mut Value, namespace: &str) {
    if namespace.is_empty() {
        remove(object, "namespace");
    } else {
        set(object, "namespace", namespace);
    }
}

/// Sets `metadata.uid`.
pub fn set_uid(object: &mut Value, uid: &str) {
    set(object, "uid", uid);
}

/// Sets `metadata.resourceVersion`, or removes it when `revision` is 0.
pub fn set_resource_version(object: &mut Value, revision: u64) {
    if revision == 0 {
        remove(object, "resourceVersion");
    } else {
        set(object, "resourceVersion", revision.to_string());
    }
}

/// Sets `metadata.generation`.
pub fn set_generation(object: &mut Value, generation: i64) {
    set(object, "generation", generation);
}

/// Sets one label.
pub fn set_label(object: &mut Value, key: &str, value: &str) {
    child_mut(metadata_mut(object), "labels").insert(key.to_owned(), value.into());
}

/// Sets one annotation.
pub fn set_annotation(object: &mut Value, key: &str, value: &str) {
    child_mut(metadata_mut(object), "annotations").insert(key.to_owned(), value.into());
}

/// A time as `metav1.Time` writes it: UTC, whole seconds, `2006-01-02T15:04:05Z`.
pub fn now_rfc3339(now: jiff::Timestamp) -> String {
    now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// A time as `metav1.MicroTime` writes it: UTC with six digits, `2006-01-02T15:04:05.000000Z`.
pub fn now_micro(now: jiff::Timestamp) -> String {
    format!("{}.{:06}Z", now.strftime("%Y-%m-%dT%H:%M:%S"), now.subsec_nanosecond().max(0) / 1000)
}

/// Reads an RFC 3339 time, with or without a fraction and with any offset.
pub fn parse_time(text: &str) -> Option<jiff::Timestamp> {
    text.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn reads_what_is_there_and_nothing_else() {
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {
            "name": "a", "namespace": "n", "resourceVersion": "42", "labels": {"k": "v"},
            "finalizers": ["x/y"], "ownerReferences": [{"name": "o"}, {"name": "p", "controller": true}]}});
        assert_eq!((name(&pod), namespace(&pod), uid(&pod)), ("a", "n", ""));
        assert_eq!(resource_version(&pod), Some(42));
        assert_eq!(label(&pod, "k"), Some("v"));
        assert_eq!(finalizers(&pod).collect::<Vec<_>>(), ["x/y"]);
        assert_eq!(controller_of(&pod).map(|owner| &owner["name"]), Some(&json!("p")));
        assert_eq!(name(&json!([])), "");
        assert_eq!(split_api_version("apps/v1"), ("apps", "v1"));
        assert_eq!(split_api_version("v1"), ("", "v1"));
    }

    #[test]
    fn writes_create_the_way() {
        let mut object = json!({});
        set_label(&mut object, "k", "v");
        set_resource_version(&mut object, 7);
        set_namespace(&mut object, "");
        assert_eq!(object, json!({"metadata": {"labels": {"k": "v"}, "resourceVersion": "7"}}));
        set_resource_version(&mut object, 0);
        assert_eq!(object, json!({"metadata": {"labels": {"k": "v"}}}));
    }

    #[test]
    fn times() {
        let now: jiff::Timestamp = "2026-01-02T03:04:05.0678Z".parse().unwrap();
        assert_eq!(now_rfc3339(now), "2026-01-02T03:04:05Z");
        assert_eq!(now_micro(now), "2026-01-02T03:04:05.067800Z");
        assert_eq!(parse_time("2026-01-02T04:04:05+01:00").map(now_rfc3339), Some("2026-01-02T03:04:05Z".into()));
    }
}
