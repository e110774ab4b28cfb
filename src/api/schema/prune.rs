//! Dropping what a type does not know, and writing what it does know as Go would.

use base64::Engine as _;
use serde_json::{Map, Value};

use super::decode::MAX_REPORTS;
use super::{Path, Schemas, Shape, Type, TypeId};
use crate::quantity;

impl Schemas {
    /// Removes fields that the type does not have and returns their paths (at most 100).
    pub fn prune(&self, id: TypeId, value: &mut Value) -> Vec<String> {
        let mut unknown = Vec::new();
        self.prune_at(id, value, &Path::Root, &mut unknown);
        unknown
    }

    fn prune_at(&self, id: TypeId, value: &mut Value, path: &Path<'_>, unknown: &mut Vec<String>) {
        let ty = self.ty(id);
        if let Some(inner) = ty.inner {
            // Go decodes these by code of their own, which says nothing of unknown fields.
            let mut unsaid = Vec::new();
            match value {
                Value::Object(_) => self.prune_at(inner, value, path, &mut unsaid),
                Value::Array(items) => items.iter_mut().for_each(|value| self.prune_at(inner, value, path, &mut unsaid)),
                _ => {}
            }
            return;
        }
        match (value, ty.shape) {
            (Value::Object(map), Shape::Object) => self.prune_fields(ty, map, path, unknown),
            (Value::Object(map), Shape::Map(item)) if self.has_structure(item) => {
                for (key, value) in map {
                    self.prune_at(item, value, &Path::Field(path, key), unknown);
                }
            }
            (Value::Array(items), Shape::List(item)) if self.has_structure(item) => {
                for (index, value) in items.iter_mut().enumerate() {
                    self.prune_at(item, value, &Path::Index(path, index), unknown);
                }
            }
            _ => {}
        }
    }

    fn has_structure(&self, id: TypeId) -> bool {
        let ty = self.ty(id);
        ty.inner.is_some() || matches!(ty.shape, Shape::Object | Shape::Map(_) | Shape::List(_))
    }

    fn prune_fields(&self, ty: &Type, map: &mut Map<String, Value>, path: &Path<'_>, unknown: &mut Vec<String>) {
        let mut fields = ty.fields.iter().peekable();
        map.retain(|key, value| {
            // Both sides are sorted: walk them together.
            while fields.next_if(|field| *field.name < **key).is_some() {}
            match fields.peek() {
                Some(field) if *field.name == **key => {
                    self.prune_at(field.ty, value, &Path::Field(path, key), unknown);
                    true
                }
                _ if ty.preserve_unknown || (ty.embedded && (key == "apiVersion" || key == "kind")) => true,
                _ => {
                    if unknown.len() < MAX_REPORTS {
                        unknown.push(Path::Field(path, key).to_string());
                    }
                    false
                }
            }
        });
    }

    /// Rewrites a decoded object as Go's decoder and encoder would: nulls and empty `omitempty` fields go,
    /// scalars without `omitempty` and structs are written even when they are empty, quantities, times and
    /// durations take their canonical form. Only Go types are touched; inside a custom resource that is its
    /// metadata.
    pub fn normalize(&self, id: TypeId, value: &mut Value) {
        let ty = self.ty(id);
        match (&mut *value, ty.shape) {
            (Value::Object(map), Shape::Object) => self.normalize_fields(ty, map),
            (Value::Object(map), Shape::Map(item)) => map.values_mut().for_each(|value| self.normalize_item(item, value)),
            (Value::Array(items), Shape::List(item)) => items.iter_mut().for_each(|value| self.normalize_item(item, value)),
            (_, shape) if ty.typed => normalize_scalar(shape, value),
            _ => {}
        }
    }

    fn normalize_item(&self, id: TypeId, value: &mut Value) {
        let ty = self.ty(id);
        if value.is_null() && ty.typed {
            *value = match ty.shape {
                Shape::Object => Value::Object(Map::new()),
                Shape::String | Shape::Bytes => "".into(),
                Shape::Integer | Shape::Number | Shape::IntOrString => 0.into(),
                Shape::Quantity => "0".into(),
                Shape::Boolean => false.into(),
                _ => return,
            };
        }
        self.normalize(id, value);
    }

    fn normalize_fields(&self, ty: &Type, map: &mut Map<String, Value>) {
        let mut fields = ty.fields.iter().peekable();
        map.retain(|key, value| {
            while fields.next_if(|field| *field.name < **key).is_some() {}
            let Some(field) = fields.peek().filter(|field| *field.name == **key) else {
                return true;
            };
            let inner = self.ty(field.ty);
            if inner.typed && value.is_null() && inner.shape != Shape::Any {
                return false;
            }
            self.normalize(field.ty, value);
            let dropped = match (inner.shape, &*value) {
                (Shape::Map(_), Value::Object(map)) => !field.go.pointer && map.is_empty(),
                (_, value) => is_empty(value, field.go.pointer),
            };
            !(ty.typed && field.go.omit_empty && dropped)
        });
        for index in &ty.always {
            let field = &ty.fields[usize::from(*index)];
            if !map.contains_key(&*field.name) {
                map.insert(field.name.as_ref().to_owned(), self.zero(field.ty));
            }
        }
    }

    /// Go's zero value of a scalar or struct, as JSON.
    fn zero(&self, id: TypeId) -> Value {
        let ty = self.ty(id);
        match ty.shape {
            Shape::String => "".into(),
            Shape::Boolean => false.into(),
            Shape::Integer | Shape::Number => 0.into(),
            _ => {
                let fields = ty.always.iter().map(|index| &ty.fields[usize::from(*index)]);
                fields.map(|field| (field.name.as_ref().to_owned(), self.zero(field.ty))).collect::<Map<_, _>>().into()
            }
        }
    }
}

/// Whether Go's `omitempty` drops it. Slices and maps are not behind pointers; structs are never empty.
fn is_empty(value: &Value, pointer: bool) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !pointer && !flag,
        Value::Number(number) => !pointer && number.as_f64() == Some(0.0),
        Value::String(text) => !pointer && text.is_empty(),
        Value::Array(items) => !pointer && items.is_empty(),
        // Asked for structs with `omitzero` only.
        Value::Object(map) => !pointer && map.is_empty(),
    }
}

fn normalize_scalar(shape: Shape, value: &mut Value) {
    match shape {
        Shape::Quantity => {
            if let Ok(quantity) = quantity::from_json(value) {
                replace(value, quantity.to_string());
            }
        }
        Shape::Time => {
            let time = value.as_str().filter(|text| !is_plain_time(text)).and_then(crate::meta::parse_time);
            if let Some(time) = time {
                *value = crate::meta::now_rfc3339(time).into();
            }
        }
        Shape::MicroTime => {
            if let Some(time) = value.as_str().and_then(crate::meta::parse_time) {
                replace(value, crate::meta::now_micro(time));
            }
        }
        Shape::Bytes => {
            if let Value::Array(items) = value {
                let bytes: Vec<u8> = items.iter().filter_map(|item| u8::try_from(item.as_u64()?).ok()).collect();
                *value = base64::engine::general_purpose::STANDARD.encode(bytes).into();
            }
        }
        Shape::Duration => {
            let nanos = value.as_str().and_then(super::formats::parse_go_duration);
            if let Some(nanos) = nanos {
                replace(value, super::formats::go_duration(nanos));
            }
        }
        _ => {}
    }
}

/// `2006-01-02T15:04:05Z`: already what we would write.
fn is_plain_time(text: &str) -> bool {
    text.len() == 20 && text.ends_with('Z') && text.as_bytes()[10] == b'T'
}

fn replace(value: &mut Value, text: String) {
    if value.as_str() != Some(&text) {
        *value = Value::String(text);
    }
}
