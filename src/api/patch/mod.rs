//! The four patch types: JSON patch, merge patch, strategic merge patch and server-side apply.
//!
//! Sizes are bounded: at most [`MAX_OPERATIONS`] operations in a JSON patch, and what its copies add up to is limited
//! by [`MAX_COPIED`] (a doubling patch would otherwise grow without end).

use json_patch::{Patch, PatchOperation};
use serde_json::{Map, Value};

use crate::status::{ApiError, Details};

pub mod apply;
pub mod fieldset;
mod strategic;
mod typed;

pub use strategic::strategic_merge;

/// Most operations in one JSON patch, as upstream.
pub const MAX_OPERATIONS: usize = 10_000;
/// Most bytes of JSON that a JSON patch's copies may add up to, as upstream.
pub const MAX_COPIED: usize = 3 * 1024 * 1024;

/// 422 for a patch that does not fit the object. Upstream does not say why.
fn unprocessable() -> ApiError {
    let mut error = ApiError::new(422, "Invalid", "the server rejected our request due to an error in our request");
    error.details = Some(Details::default());
    error
}

/// Applies an RFC 6902 patch. All of it or nothing: on an error `object` is not to be used.
pub fn json_patch(object: &mut Value, patch: &Value) -> Result<(), ApiError> {
    let count = patch.as_array().map_or(0, Vec::len);
    if count > MAX_OPERATIONS {
        return Err(ApiError::request_entity_too_large(format!(
            "The allowed maximum operations in a JSON patch is {MAX_OPERATIONS}, got {count}"
        )));
    }
    if !patch.is_array() {
        return Err(ApiError::bad_request("error decoding patch: a JSON patch is a list of operations"));
    }
    let patch: Patch = serde_json::from_value(patch.clone()).map_err(|_| unprocessable())?;
    let mut copied = 0;
    for op in &patch.0 {
        if let PatchOperation::Copy(copy) = op
            && let Some(source) = object.pointer(copy.from.as_str())
        {
            copied += size(source);
            if copied > MAX_COPIED {
                return Err(unprocessable());
            }
        }
        json_patch::patch_unsafe(object, std::slice::from_ref(op)).map_err(|_| unprocessable())?;
    }
    Ok(())
}

/// About the length of a value's JSON text, without making it.
fn size(v: &Value) -> usize {
    match v {
        Value::Null => 4,
        Value::Bool(_) => 5,
        Value::Number(_) => 8,
        Value::String(s) => s.len() + 2,
        Value::Array(l) => l.iter().map(|v| size(v) + 1).sum::<usize>() + 2,
        Value::Object(m) => m.iter().map(|(k, v)| k.len() + 4 + size(v)).sum::<usize>() + 2,
    }
}

/// Applies an RFC 7396 merge patch: null removes, objects merge, everything else replaces.
pub fn merge_patch(object: &mut Value, patch: &Value) -> Result<(), ApiError> {
    if !patch.is_object() {
        return Err(ApiError::bad_request("a merge patch must be a JSON object"));
    }
    merge_into(object, patch);
    Ok(())
}

fn merge_into(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(map) = target else { return };
    for (key, value) in patch {
        if value.is_null() {
            map.remove(key);
        } else {
            merge_into(map.entry(key.as_str()).or_insert(Value::Null), value);
        }
    }
}

#[cfg(test)]
mod tests;
