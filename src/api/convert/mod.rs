//! Conversions between versions of one resource, and between resources that share storage.
//!
//! Functions on values, one per pair; most versions differ in nothing but `apiVersion`. A custom resource whose
//! definition asks for a webhook is converted by the API server (this crate does no I/O); without one, `apiVersion`
//! is all that changes.

use serde_json::{Map, Value};

use crate::meta;
use crate::registry::Registry;
use crate::status::ApiError;

mod autoscaling;
pub mod scale;

/// Fields of an Event in the core group and in `events.k8s.io`.
const EVENT_FIELDS: [(&str, &str); 7] = [
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
    ("reportingComponent", "reportingController"),
];

/// The object in another version. `to` is an apiVersion (`autoscaling/v2`) that the registry serves for its kind, or an
/// error says that it does not.
pub fn convert(registry: &Registry, object: &Value, to: &str) -> Result<Value, ApiError> {
    let from = meta::api_version(object);
    let kind = meta::kind(object);
    if from == to {
        return Ok(object.clone());
    }
    let ((from_group, _), (to_group, to_version)) = (meta::split_api_version(from), meta::split_api_version(to));
    let between_events = kind == "Event" && is_event_group(from_group) && is_event_group(to_group);
    if from_group != to_group && !between_events {
        return Err(ApiError::bad_request(format!("cannot convert {kind} from {from} to {to}: the groups differ")));
    }
    if registry.find_kind(to_group, to_version, kind).is_none() {
        return Err(ApiError::bad_request(format!("cannot convert {kind} from {from} to {to}: no such version")));
    }
    Ok(convert_unchecked(object.clone(), to))
}

fn is_event_group(group: &str) -> bool {
    group.is_empty() || group == "events.k8s.io"
}

/// [`convert`] for a pair that is known to be of one kind, without a copy.
pub fn convert_unchecked(mut object: Value, to: &str) -> Value {
    let from = meta::api_version(&object).to_owned();
    if from == to {
        return object;
    }
    if let Some(map) = object.as_object_mut() {
        map.insert("apiVersion".into(), to.into());
        match (from.as_str(), to, map.get("kind").and_then(Value::as_str)) {
            ("v1", "events.k8s.io/v1", Some("Event")) => rename(map, EVENT_FIELDS.iter().copied()),
            ("events.k8s.io/v1", "v1", Some("Event")) => rename(map, EVENT_FIELDS.iter().map(|(a, b)| (*b, *a))),
            ("autoscaling/v1", "autoscaling/v2", Some("HorizontalPodAutoscaler")) => autoscaling::v1_to_v2(&mut object),
            ("autoscaling/v2", "autoscaling/v1", Some("HorizontalPodAutoscaler")) => autoscaling::v2_to_v1(&mut object),
            _ => {}
        }
    }
    object
}

fn rename<'a>(map: &mut Map<String, Value>, names: impl Iterator<Item = (&'a str, &'a str)>) {
    for (from, to) in names {
        if let Some(v) = map.remove(from) {
            map.insert(to.into(), v);
        }
    }
}

#[cfg(test)]
mod tests;
