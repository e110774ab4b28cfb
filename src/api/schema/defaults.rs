//! Defaulting: absent fields get the schema's default.

use serde_json::{Map, Value};

use super::{Field, Schemas, Shape, Type, TypeId};

impl Schemas {
    /// Fills absent fields that have a default, at every depth. Null counts as absent where the type is not nullable.
    pub fn apply_defaults(&self, id: TypeId, value: &mut Value) {
        let ty = self.ty(id);
        if !ty.has_defaults {
            return;
        }
        match (value, ty.shape) {
            (Value::Object(map), Shape::Map(item)) => map.values_mut().for_each(|value| self.apply_defaults(item, value)),
            (Value::Array(items), Shape::List(item)) => items.iter_mut().for_each(|value| self.apply_defaults(item, value)),
            (Value::Object(map), _) => self.default_fields(ty, map),
            _ => {}
        }
    }

    fn default_fields(&self, ty: &Type, map: &mut Map<String, Value>) {
        for field in &ty.fields {
            let inner = self.ty(field.ty);
            if field.default.is_none() && !inner.has_defaults {
                continue;
            }
            let value = map.get_mut(&*field.name);
            match (value, &field.default) {
                (Some(value), default) => {
                    if let Some(default) = default
                        && (unset(ty, field, value) || (value.is_null() && !inner.nullable))
                    {
                        *value = Value::clone(default);
                    }
                    self.apply_defaults(field.ty, value);
                }
                (None, Some(default)) => {
                    let mut value = Value::clone(default);
                    self.apply_defaults(field.ty, &mut value);
                    map.insert(field.name.as_ref().to_owned(), value);
                }
                (None, None) => {}
            }
        }
    }
}

/// Whether Go cannot tell the value from an absent one: the zero value of a field that is not behind a pointer.
fn unset(ty: &Type, field: &Field, value: &Value) -> bool {
    ty.typed
        && !field.go.pointer
        && match value {
            Value::String(text) => text.is_empty(),
            Value::Number(number) => number.as_f64() == Some(0.0),
            Value::Bool(flag) => !flag,
            _ => false,
        }
}
