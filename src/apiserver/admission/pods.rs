//! What several plugins ask of a pod's spec.

use serde_json::{Map, Value};
use std::collections::BTreeMap;
use windlass_api::quantity::{self, Quantity};

pub const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";

/// Quantities by resource name.
pub type Resources = BTreeMap<String, Quantity>;

/// The elements of an array field; none if it is absent.
pub fn items<'a>(value: &'a Value, field: &str) -> std::slice::Iter<'a, Value> {
    value[field].as_array().map(Vec::as_slice).unwrap_or_default().iter()
}

/// The elements of an array field, to be changed.
pub fn items_mut<'a>(value: &'a mut Value, field: &str) -> impl Iterator<Item = &'a mut Value> {
    value.get_mut(field).and_then(Value::as_array_mut).into_iter().flatten()
}

/// A string field; empty if absent.
pub fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}

/// The object at `field`, made if absent; `None` if `value` is no object (the schema then refuses it).
pub fn object_mut<'a>(value: &'a mut Value, field: &str) -> Option<&'a mut Map<String, Value>> {
    let slot = value.as_object_mut()?.entry(field).or_insert(Value::Null);
    if slot.is_null() {
        *slot = Value::Object(Map::new());
    }
    slot.as_object_mut()
}

/// The array at `field`, made if absent; `None` if `value` is no object or the field is something else.
pub fn array_mut<'a>(value: &'a mut Value, field: &str) -> Option<&'a mut Vec<Value>> {
    let slot = value.as_object_mut()?.entry(field).or_insert(Value::Null);
    if slot.is_null() {
        *slot = Value::Array(Vec::new());
    }
    slot.as_array_mut()
}

pub fn is_mirror(pod: &Value) -> bool {
    pod["metadata"]["annotations"].get(MIRROR_ANNOTATION).is_some()
}

/// Reads a resource list. An unreadable quantity is left out: the schema has refused it.
pub fn resources(list: &Value) -> Resources {
    let entries = list.as_object().into_iter().flatten();
    entries.filter_map(|(name, value)| Some((name.clone(), quantity::from_json(value).ok()?))).collect()
}

pub fn add(into: &mut Resources, other: &Resources) {
    for (name, quantity) in other {
        match into.get_mut(name) {
            Some(sum) => *sum += *quantity,
            None => {
                into.insert(name.clone(), *quantity);
            }
        }
    }
}

pub fn max(into: &mut Resources, other: &Resources) {
    for (name, quantity) in other {
        if into.get(name).is_none_or(|known| quantity > known) {
            into.insert(name.clone(), *quantity);
        }
    }
}

/// The pod's total `requests` or `limits`: containers and sidecars together, init containers as a minimum,
/// pod-level cpu, memory and huge pages above both (upstream's `PodRequests` without overhead).
pub fn total(spec: &Value, which: &str) -> Resources {
    let of = |container: &Value| resources(&container["resources"][which]);
    let mut sum = Resources::new();
    for container in items(spec, "containers") {
        add(&mut sum, &of(container));
    }
    let (mut sidecars, mut init) = (Resources::new(), Resources::new());
    for container in items(spec, "initContainers") {
        let own = of(container);
        if text(container, "restartPolicy") == "Always" {
            add(&mut sum, &own);
            add(&mut sidecars, &own);
            max(&mut init, &sidecars);
        } else {
            let mut needed = own;
            add(&mut needed, &sidecars);
            max(&mut init, &needed);
        }
    }
    max(&mut sum, &init);
    for (name, quantity) in resources(&spec["resources"][which]) {
        if matches!(name.as_str(), "cpu" | "memory") || name.starts_with("hugepages-") {
            sum.insert(name, quantity);
        }
    }
    sum
}

/// Calls `visit` with every container of every kind and the field it stands in.
pub fn containers(spec: &Value) -> impl Iterator<Item = (&'static str, &Value)> {
    ["initContainers", "containers", "ephemeralContainers"]
        .into_iter()
        .flat_map(move |field| items(spec, field).map(move |container| (field, container)))
}

/// Names of all secrets that the spec refers to directly.
pub fn secret_names(spec: &Value) -> Vec<&str> {
    let mut names: Vec<&str> = items(spec, "imagePullSecrets").map(|secret| text(secret, "name")).collect();
    for (_, container) in containers(spec) {
        names.extend(items(container, "envFrom").map(|source| text(&source["secretRef"], "name")));
        names.extend(items(container, "env").map(|var| text(&var["valueFrom"]["secretKeyRef"], "name")));
    }
    for volume in items(spec, "volumes") {
        names.push(text(&volume["secret"], "secretName"));
        names.push(text(&volume["azureFile"], "secretName"));
        for source in ["cephfs", "cinder", "flexVolume", "rbd", "scaleIO", "iscsi", "storageos"] {
            names.push(text(&volume[source]["secretRef"], "name"));
        }
        names.push(text(&volume["csi"]["nodePublishSecretRef"], "name"));
        names.extend(items(&volume["projected"], "sources").map(|source| text(&source["secret"], "name")));
    }
    names.retain(|name| !name.is_empty());
    names
}

/// Names of all config maps that the spec refers to directly.
pub fn config_map_names(spec: &Value) -> Vec<&str> {
    let mut names = Vec::new();
    for (_, container) in containers(spec) {
        names.extend(items(container, "envFrom").map(|source| text(&source["configMapRef"], "name")));
        names.extend(items(container, "env").map(|var| text(&var["valueFrom"]["configMapKeyRef"], "name")));
    }
    for volume in items(spec, "volumes") {
        names.push(text(&volume["configMap"], "name"));
        names.extend(items(&volume["projected"], "sources").map(|source| text(&source["configMap"], "name")));
    }
    names.retain(|name| !name.is_empty());
    names
}
