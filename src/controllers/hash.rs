//! Names derived from content: the `pod-template-hash` of ReplicaSets and the hash of controller revisions.

use k8s_openapi::api::core::v1::PodTemplateSpec;
use serde_json::Value;

/// Letters without vowels and look-alikes, so that a hash never spells a word.
const ALPHABET: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";

/// Maps whose empty form means the same as their absence.
const MAPS: [&str; 6] = ["labels", "annotations", "nodeSelector", "matchLabels", "limits", "requests"];

/// Drops nulls, empty lists and empty maps of `MAPS`, so that two ways to write one object compare equal.
pub fn normalize(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.values_mut().for_each(normalize);
            map.retain(|key, value| match value {
                Value::Null => false,
                Value::Array(items) => !items.is_empty(),
                Value::Object(inner) => !(inner.is_empty() && MAPS.contains(&key.as_str())),
                _ => true,
            });
        }
        Value::Array(items) => items.iter_mut().for_each(normalize),
        _ => {}
    }
}

/// A template in the form that is compared and hashed: normalized, and without the label that the hash itself becomes.
pub fn canonical_template(template: &PodTemplateSpec) -> Value {
    let mut value = serde_json::to_value(template).unwrap_or_default();
    if let Some(labels) = value.pointer_mut("/metadata/labels").and_then(Value::as_object_mut) {
        labels.remove("pod-template-hash");
    }
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("creationTimestamp");
    }
    normalize(&mut value);
    value
}

/// Whether two templates make the same pods.
pub fn equal_templates(a: &PodTemplateSpec, b: &PodTemplateSpec) -> bool {
    canonical_template(a) == canonical_template(b)
}

fn fnv1a(bytes: &[u8], seed: u32) -> u32 {
    bytes.iter().fold(seed, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(16_777_619))
}

/// The hash of `value` (whose maps are sorted by key) and of how many times it has collided, as letters that fit a label.
pub fn of(value: &Value, collisions: Option<i32>) -> String {
    let mut hash = fnv1a(value.to_string().as_bytes(), 2_166_136_261);
    if let Some(count) = collisions {
        hash = fnv1a(&count.to_le_bytes(), hash);
    }
    hash.to_string().bytes().map(|digit| ALPHABET[usize::from(digit) % ALPHABET.len()] as char).collect()
}

/// The `pod-template-hash` of a template.
pub fn of_template(template: &PodTemplateSpec, collisions: Option<i32>) -> String {
    of(&canonical_template(template), collisions)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn template(value: Value) -> PodTemplateSpec {
        serde_json::from_value(value).expect("a template")
    }

    #[test]
    fn equal_content_has_equal_hash() {
        let plain = json!({"metadata": {"labels": {"app": "a"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
        let hashed = json!({"metadata": {"labels": {"app": "a", "pod-template-hash": "x"}, "annotations": {}}, "spec": {"containers": [{"name": "c", "image": "i", "ports": []}]}});
        let other = json!({"metadata": {"labels": {"app": "a"}}, "spec": {"containers": [{"name": "c", "image": "j"}]}});
        assert!(equal_templates(&template(plain.clone()), &template(hashed.clone())));
        assert_eq!(of_template(&template(plain.clone()), None), of_template(&template(hashed), None));
        assert_ne!(of_template(&template(plain.clone()), None), of_template(&template(other), None));
        assert_ne!(of_template(&template(plain.clone()), None), of_template(&template(plain), Some(1)));
    }

    #[test]
    fn the_hash_never_changes_between_releases() {
        let value = template(json!({"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{"name": "c", "image": "nginx"}]}}));
        assert_eq!(canonical_template(&value).to_string(), r#"{"metadata":{"labels":{"app":"web"}},"spec":{"containers":[{"image":"nginx","name":"c"}]}}"#);
        let hash = of_template(&value, None);
        assert!(hash.len() <= 10 && hash.bytes().all(|b| ALPHABET.contains(&b)), "{hash}");
    }
}
