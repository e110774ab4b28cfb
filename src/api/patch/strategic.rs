//! Strategic merge patch: a merge patch whose lists merge by the keys that the schema names.
//!
//! Directives: `$patch: replace|delete|merge`, `$retainKeys`, `$setElementOrder/<list>`, `$deleteFromPrimitiveList/<list>`.
//! Behaviour follows `k8s.io/apimachinery/pkg/util/strategicpatch`.

use serde_json::{Map, Value};

use crate::schema::{Field, Schemas, Shape, TypeId};
use crate::status::ApiError;

const PATCH: &str = "$patch";
const RETAIN: &str = "$retainKeys";
const ORDER: &str = "$setElementOrder/";
const DELETE: &str = "$deleteFromPrimitiveList/";

/// Applies a strategic merge patch to an object of type `ty`.
pub fn strategic_merge(schemas: &Schemas, ty: TypeId, object: &Value, patch: &Value) -> Result<Value, ApiError> {
    let Value::Object(patch) = patch else {
        return Err(ApiError::bad_request("a strategic merge patch must be a JSON object"));
    };
    let original = object.as_object().cloned().unwrap_or_default();
    merge_map(schemas, Some(ty), original, patch).map(Value::Object)
}

/// A field's type and how its values merge.
#[derive(Clone, Copy, Default)]
struct Meta<'s> {
    ty: Option<TypeId>,
    field: Option<&'s Field>,
}

fn meta_of<'s>(schemas: &'s Schemas, ty: Option<TypeId>, key: &str) -> Meta<'s> {
    let Some(ty) = ty else { return Meta::default() };
    match schemas.shape(ty) {
        Shape::Map(item) => Meta { ty: Some(*item), field: None },
        _ => {
            let field = schemas.field(ty, key);
            Meta { ty: field.map(|f| f.ty), field }
        }
    }
}

fn item_type(schemas: &Schemas, ty: Option<TypeId>) -> Option<TypeId> {
    match schemas.shape(ty?) {
        Shape::List(item) => Some(*item),
        _ => None,
    }
}

fn bad(msg: impl Into<String>) -> ApiError {
    ApiError::bad_request(msg)
}

fn merge_map(
    schemas: &Schemas,
    ty: Option<TypeId>,
    mut original: Map<String, Value>,
    patch: &Map<String, Value>,
) -> Result<Map<String, Value>, ApiError> {
    match patch.get(PATCH).map(|v| v.as_str()) {
        None => {}
        Some(Some("replace")) => {
            return Ok(patch.iter().filter(|(k, _)| *k != PATCH).map(|(k, v)| (k.clone(), v.clone())).collect());
        }
        Some(Some("delete")) => return Ok(Map::new()),
        Some(Some("merge")) => {}
        Some(other) => return Err(bad(format!("unknown patch type found: {}", other.unwrap_or("not a string")))),
    }
    retain_keys(&mut original, patch)?;
    for (key, value) in patch {
        if key == PATCH || key == RETAIN {
            continue;
        }
        if let Some(name) = key.strip_prefix(DELETE) {
            delete_primitives(&mut original, name, value)?;
        } else if let Some(name) = key.strip_prefix(ORDER) {
            // Where the patch has the list itself, its order is set after the merge.
            if !patch.contains_key(name) {
                set_order(schemas, ty, &mut original, name, value)?;
            }
        } else if value.is_null() {
            original.remove(key);
        } else {
            merge_field(schemas, ty, &mut original, key, value)?;
            if let Some(order) = patch.get(&format!("{ORDER}{key}")) {
                set_order(schemas, ty, &mut original, key, order)?;
            }
        }
    }
    Ok(original)
}

fn merge_field(
    schemas: &Schemas,
    ty: Option<TypeId>,
    original: &mut Map<String, Value>,
    key: &str,
    value: &Value,
) -> Result<(), ApiError> {
    let meta = meta_of(schemas, ty, key);
    let old = original.remove(key);
    let merged = match (old, value) {
        (Some(Value::Object(old)), Value::Object(new)) => Value::Object(merge_map(schemas, meta.ty, old, new)?),
        // New here: merge into nothing, so that directives and nulls do not get stored.
        (None | Some(Value::Null), Value::Object(new)) => {
            Value::Object(merge_map(schemas, meta.ty, Map::new(), new)?)
        }
        (old, Value::Array(new)) => {
            let strategy = meta.field.map(|f| f.patch_strategy).unwrap_or_default();
            if strategy.merge {
                let old = match old {
                    Some(Value::Array(old)) => old,
                    _ => Vec::new(),
                };
                let merge_key = meta.field.and_then(|f| f.merge_key.as_deref());
                Value::Array(merge_list(schemas, item_type(schemas, meta.ty), merge_key, old, new)?)
            } else {
                Value::Array(new.iter().filter(|v| !is_directive(v)).cloned().collect())
            }
        }
        (_, new) => new.clone(),
    };
    original.insert(key.to_owned(), merged);
    Ok(())
}

fn is_directive(v: &Value) -> bool {
    v.as_object().is_some_and(|m| m.len() == 1 && m.contains_key(PATCH))
}

fn retain_keys(original: &mut Map<String, Value>, patch: &Map<String, Value>) -> Result<(), ApiError> {
    let Some(keep) = patch.get(RETAIN) else { return Ok(()) };
    let Some(keep) = keep.as_array() else {
        return Err(bad("invalid patch format of retainKeys: it must be a list of strings"));
    };
    let kept = |k: &str| keep.iter().any(|v| v.as_str() == Some(k));
    let unlisted = patch.iter().any(|(k, v)| !k.starts_with('$') && !v.is_null() && !kept(k));
    if unlisted {
        return Err(bad("the $retainKeys list should be a superset of the keys that are present in the patch"));
    }
    original.retain(|k, _| kept(k));
    Ok(())
}

fn delete_primitives(original: &mut Map<String, Value>, name: &str, delete: &Value) -> Result<(), ApiError> {
    let Some(delete) = delete.as_array() else {
        return Err(bad(format!("{DELETE}{name} must be a list")));
    };
    if let Some(Value::Array(list)) = original.get_mut(name) {
        list.retain(|v| !delete.contains(v));
    }
    Ok(())
}

fn merge_list(
    schemas: &Schemas,
    item: Option<TypeId>,
    merge_key: Option<&str>,
    original: Vec<Value>,
    patch: &[Value],
) -> Result<Vec<Value>, ApiError> {
    if patch.is_empty() {
        return Ok(original);
    }
    let before = original.clone();
    let Some(key) = merge_key.filter(|_| patch.iter().any(Value::is_object)) else {
        let mut merged = original;
        for v in patch {
            if !merged.contains(v) {
                merged.push(v.clone());
            }
        }
        return Ok(arrange(merged, patch, &before, None));
    };
    let mut merged = original;
    if let Some(rest) = replaces(patch) {
        return Ok(rest);
    }
    let mut plain: Vec<Value> = Vec::with_capacity(patch.len());
    for p in patch {
        let Value::Object(map) = p else {
            return Err(bad(format!("a list that merges by {key} holds objects only")));
        };
        let Some(id) = map.get(key) else {
            return Err(bad(format!("map: {p} does not contain declared merge key: {key}")));
        };
        match map.get(PATCH).map(|v| v.as_str()) {
            Some(Some("delete")) => {
                merged.retain(|v| v.get(key) != Some(id));
                continue;
            }
            None | Some(Some("merge")) => {}
            Some(other) => {
                return Err(bad(format!("unknown patch type found: {}", other.unwrap_or("not a string"))));
            }
        }
        match merged.iter().position(|v| v.get(key) == Some(id)) {
            Some(i) => {
                let old = match std::mem::take(&mut merged[i]) {
                    Value::Object(m) => m,
                    _ => Map::new(),
                };
                merged[i] = Value::Object(merge_map(schemas, item, old, map)?);
            }
            None => merged.push(Value::Object(merge_map(schemas, item, Map::new(), map)?)),
        }
        plain.push(p.clone());
    }
    Ok(arrange(merged, &plain, &before, Some(key)))
}

/// A list with `$patch: replace` in it stands for itself.
fn replaces(patch: &[Value]) -> Option<Vec<Value>> {
    let found = patch.iter().any(|p| p.get(PATCH).and_then(Value::as_str) == Some("replace"));
    found.then(|| {
        let keep = patch.iter().filter(|p| p.get(PATCH).is_none() || p.as_object().is_some_and(|m| m.len() > 1));
        keep.map(|p| match p {
            Value::Object(m) => {
                Value::Object(m.iter().filter(|(k, _)| *k != PATCH).map(|(k, v)| (k.clone(), v.clone())).collect())
            }
            other => other.clone(),
        })
        .collect()
    })
}

fn set_order(
    schemas: &Schemas,
    ty: Option<TypeId>,
    original: &mut Map<String, Value>,
    name: &str,
    order: &Value,
) -> Result<(), ApiError> {
    let Some(order) = order.as_array() else {
        return Err(bad(format!("{ORDER}{name} must be a list")));
    };
    let meta = meta_of(schemas, ty, name);
    let key = meta.field.and_then(|f| f.merge_key.as_deref()).filter(|_| order.iter().any(Value::is_object));
    if let Some(key) = key
        && order.iter().any(|v| v.get(key).is_none())
    {
        return Err(bad(format!("{ORDER}{name}: every item needs the merge key {key}")));
    }
    if let Some(Value::Array(list)) = original.get_mut(name) {
        let before = list.clone();
        let merged = std::mem::take(list);
        *list = arrange(merged, order, &before, key);
    }
    Ok(())
}

/// Orders a merged list: items that `order` names come in its order, the others keep theirs, and both interleave by
/// where they stood in `before`.
fn arrange(merged: Vec<Value>, order: &[Value], before: &[Value], key: Option<&str>) -> Vec<Value> {
    let place = |list: &[Value], v: &Value| {
        list.iter().position(|x| match key {
            Some(k) => x.get(k) == v.get(k),
            None => x == v,
        })
    };
    let (mut named, others): (Vec<_>, Vec<_>) =
        merged.into_iter().map(|v| (place(order, &v), place(before, &v), v)).partition(|(named, _, _)| named.is_some());
    named.sort_by_key(|(i, _, _)| *i);
    let mut out = Vec::with_capacity(named.len() + others.len());
    let (mut named, mut others) = (named.into_iter().peekable(), others.into_iter().peekable());
    loop {
        let other_first = match (others.peek(), named.peek()) {
            (None, None) => return out,
            (Some((_, l, _)), Some((_, r, _))) => matches!((l, r), (Some(l), Some(r)) if l < r),
            (Some(_), None) => true,
            (None, Some(_)) => false,
        };
        let next = if other_first { others.next() } else { named.next() };
        out.extend(next.map(|(_, _, v)| v));
    }
}
