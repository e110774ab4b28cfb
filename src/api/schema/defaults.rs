//! Defaulting: absent fields get the schema's default.

use serde_json::{Map, Value};

use super::{Schemas, Shape, Type, TypeId};

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
                    if let (Value::Null, Some(default), false) = (&*value, default, inner.nullable) {
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
