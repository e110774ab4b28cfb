//! The difference of two statuses as a strategic merge patch. Pure.

use k8s_openapi::api::core::v1::PodStatus;
use serde_json::{Map, Value, json};

/// The patch of `/status` that turns `old` into `new`, `None` if they are the same. It holds only for the pod of this uid.
///
/// Conditions are merged by type, so that those of other writers stay; lists of containers are replaced as a whole.
pub fn status_patch(uid: &str, old: &PodStatus, new: &PodStatus) -> Option<Value> {
    let value = |status: &PodStatus| serde_json::to_value(status).unwrap_or_default();
    let (Value::Object(old), Value::Object(new)) = (value(old), value(new)) else { return None };
    let mut status = Map::new();
    for (key, value) in &new {
        let before = old.get(key);
        if before == Some(value) {
            continue;
        }
        let change = match key.as_str() {
            "conditions" => match conditions(before, value) {
                Value::Array(list) if list.is_empty() => continue,
                list => list,
            },
            "podIPs" | "hostIPs" => replaced(value),
            "resourceClaimStatuses" => continue,
            _ => value.clone(),
        };
        status.insert(key.clone(), change);
    }
    for key in old.keys().filter(|k| !new.contains_key(*k)) {
        let ours = !matches!(key.as_str(), "resourceClaimStatuses" | "nominatedNodeName" | "extendedResourceClaimStatus" | "nodeAllocatableResourceClaimStatuses");
        if ours {
            let gone = if matches!(key.as_str(), "podIPs" | "hostIPs") { replaced(&json!([])) } else { Value::Null };
            status.insert(key.clone(), gone);
        }
    }
    (!status.is_empty()).then(|| json!({"metadata": {"uid": uid}, "status": status}))
}

fn replaced(list: &Value) -> Value {
    let mut all = vec![json!({"$patch": "replace"})];
    all.extend(list.as_array().into_iter().flatten().cloned());
    Value::Array(all)
}

fn conditions(old: Option<&Value>, new: &Value) -> Value {
    let old: Vec<&Value> = old.and_then(Value::as_array).into_iter().flatten().collect();
    let mut changed = Vec::new();
    for condition in new.as_array().into_iter().flatten() {
        let before = old.iter().find(|o| o["type"] == condition["type"]);
        if before == Some(&condition) {
            continue;
        }
        let mut entry = condition.clone();
        if let (Some(Value::Object(before)), Some(entry)) = (before.copied(), entry.as_object_mut()) {
            for key in before.keys() {
                entry.entry(key.clone()).or_insert(Value::Null);
            }
        }
        changed.push(entry);
    }
    // Only ours are ever taken back.
    for condition in old.iter().filter(|c| matches!(c["type"].as_str(), Some("PodResizePending" | "PodResizeInProgress"))) {
        let kept = new.as_array().into_iter().flatten().any(|n| n["type"] == condition["type"]);
        if !kept {
            changed.push(json!({"type": condition["type"], "$patch": "delete"}));
        }
    }
    Value::Array(changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(old: Value, new: Value, expected: Option<Value>) {
        let parse = |v: Value| serde_json::from_value::<PodStatus>(v).expect("status");
        let got = status_patch("u", &parse(old), &parse(new)).map(|p| p["status"].clone());
        assert_eq!(got, expected);
    }

    #[test]
    fn patches() {
        check(json!({"phase": "Running"}), json!({"phase": "Running"}), None);
        check(json!({"phase": "Pending", "message": "m"}), json!({"phase": "Running"}), Some(json!({"phase": "Running", "message": null})));
        check(
            json!({"conditions": [{"type": "Ready", "status": "False", "reason": "x"}, {"type": "Other", "status": "True"}]}),
            json!({"conditions": [{"type": "Ready", "status": "True"}, {"type": "Other", "status": "True"}]}),
            Some(json!({"conditions": [{"type": "Ready", "status": "True", "reason": null}]})),
        );
        check(
            json!({"podIPs": [{"ip": "1"}]}),
            json!({"podIPs": [{"ip": "2"}]}),
            Some(json!({"podIPs": [{"$patch": "replace"}, {"ip": "2"}]})),
        );
        check(
            json!({"conditions": [{"type": "PodResizePending", "status": "True"}, {"type": "X", "status": "True"}]}),
            json!({"conditions": [{"type": "X", "status": "True"}]}),
            Some(json!({"conditions": [{"type": "PodResizePending", "$patch": "delete"}]})),
        );
        check(json!({"conditions": [{"type": "X", "status": "True"}]}), json!({"conditions": []}), None);
        check(json!({"podIPs": [{"ip": "1"}]}), json!({}), Some(json!({"podIPs": [{"$patch": "replace"}]})));
    }
}
