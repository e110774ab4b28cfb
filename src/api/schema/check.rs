//! Type checks in the words of Go's JSON decoder: what a built-in object is refused with before anything else looks at it.

use serde_json::{Map, Number, Value};

use super::{Path, Schemas, Shape, Special, Type, TypeId};
use crate::quantity;

/// A value's kind as Go's decoder names it.
pub fn value_kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

impl Schemas {
    /// Whether a value can be decoded into a type; else upstream's message for the first misfit:
    /// `json: cannot unmarshal string into Go struct field PodSpec.spec.containers of type []v1.Container`.
    pub fn check_types(&self, id: TypeId, value: &Value) -> Result<(), String> {
        self.check_at(id, value, "", &Path::Root)
    }

    fn check_at(&self, id: TypeId, value: &Value, owner: &str, path: &Path<'_>) -> Result<(), String> {
        self.check_named(id, value, owner, path, None)
    }

    /// `go`: the type's name in Go, where that is not what the shape suggests (`v1.ResourceList`).
    fn check_named(&self, id: TypeId, value: &Value, owner: &str, path: &Path<'_>, go: Option<&str>) -> Result<(), String> {
        let ty = self.ty(id);
        if let Some(inner) = ty.inner {
            return self.check_alternatives(ty, inner, value, owner, path);
        }
        match (value, ty.shape) {
            (Value::Null, _) | (_, Shape::Any) => Ok(()),
            (Value::Object(map), Shape::Object) => self.check_fields(ty, map, owner, path),
            // Go's paths name the field, not the item or the key.
            (Value::Object(map), Shape::Map(item)) => map.values().try_for_each(|value| self.check_at(item, value, owner, path)),
            (Value::Array(items), Shape::List(item)) => items.iter().try_for_each(|value| self.check_at(item, value, owner, path)),
            (Value::String(_), Shape::String) | (Value::Bool(_), Shape::Boolean) | (Value::Number(_), Shape::Number) => Ok(()),
            (Value::Number(number), Shape::Integer) => self.check_integer(id, number, owner, path),
            (Value::String(_), Shape::IntOrString) => Ok(()),
            (Value::Number(number), Shape::IntOrString) => match number.as_i64().map(i32::try_from) {
                Some(Ok(_)) => Ok(()),
                _ => Err(self.misfit(id, &format!("number {number}"), owner, path, Some("int32"))),
            },
            (_, Shape::IntOrString) if ty.typed => Err(self.misfit(id, value_kind(value), owner, path, Some("int32"))),
            (_, Shape::Quantity) if ty.typed => quantity::from_json(value).map(|_| ()).map_err(|error| error.to_string()),
            (Value::String(text), Shape::Time | Shape::MicroTime) => check_time(text),
            (Value::String(text), Shape::Duration) => match super::formats::parse_go_duration(text) {
                Some(_) => Ok(()),
                None => Err(format!("time: invalid duration {}", crate::field::quote(text))),
            },
            (Value::String(text), Shape::Bytes) => check_base64(text),
            // Go takes a list of numbers for bytes, too.
            (Value::Array(items), Shape::Bytes) if items.iter().all(|item| item.as_u64().is_some_and(|item| item < 256)) => Ok(()),
            // A custom object is decoded as it is; its schema says what is wrong (see `validate`).
            _ if !ty.typed => Ok(()),
            _ => Err(self.misfit(id, value_kind(value), owner, path, go)),
        }
    }

    /// A schema, or what its place allows besides.
    fn check_alternatives(&self, ty: &Type, inner: TypeId, value: &Value, owner: &str, path: &Path<'_>) -> Result<(), String> {
        match (ty.special, value) {
            (_, Value::Null) | (Special::SchemaOrBool, Value::Bool(_)) => Ok(()),
            (_, Value::Object(_)) => self.check_at(inner, value, owner, path),
            (Special::SchemaOrArray, Value::Array(items)) => items.iter().try_for_each(|value| self.check_at(inner, value, owner, path)),
            (Special::SchemaOrStrings, Value::Array(items)) if items.iter().all(Value::is_string) => Ok(()),
            (Special::SchemaOrBool, _) => Err("boolean or JSON schema expected".to_owned()),
            (_, value) => Err(format!("json: cannot unmarshal {} into Go value of type {}", value_kind(value), self.go_type(inner))),
        }
    }

    fn check_fields(&self, ty: &Type, map: &Map<String, Value>, owner: &str, path: &Path<'_>) -> Result<(), String> {
        let owner = ty.name.as_deref().map_or(owner, last_segment);
        let mut fields = ty.fields.iter().peekable();
        for (key, value) in map {
            while fields.next_if(|field| *field.name < **key).is_some() {}
            if let Some(field) = fields.peek().filter(|field| *field.name == **key) {
                self.check_named(field.ty, value, owner, &Path::Field(path, key), field.go_type.as_deref())?;
            }
        }
        Ok(())
    }

    fn check_integer(&self, id: TypeId, number: &Number, owner: &str, path: &Path<'_>) -> Result<(), String> {
        let ty = self.ty(id);
        if !ty.typed {
            return Ok(());
        }
        let narrow = ty.checks.as_ref().is_some_and(|checks| checks.format.as_deref() == Some("int32"));
        let fits = match number.as_i64() {
            Some(number) => !narrow || i32::try_from(number).is_ok(),
            None => false,
        };
        if fits { Ok(()) } else { Err(self.misfit(id, &format!("number {number}"), owner, path, None)) }
    }

    fn misfit(&self, id: TypeId, found: &str, owner: &str, path: &Path<'_>, go: Option<&str>) -> String {
        let ty = go.map_or_else(|| self.go_type(id), str::to_owned);
        match path {
            Path::Root => format!("json: cannot unmarshal {found} into Go value of type {ty}"),
            path => format!("json: cannot unmarshal {found} into Go struct field {owner}.{path} of type {ty}"),
        }
    }

    /// The type's name in Go, as its decoder's messages show it.
    fn go_type(&self, id: TypeId) -> String {
        let ty = self.ty(id);
        if let Some(name) = &ty.name {
            let mut segments = name.rsplit('.');
            let kind = segments.next().unwrap_or_default();
            return format!("{}.{kind}", segments.next().unwrap_or("v1"));
        }
        let checks = ty.checks.as_deref();
        match ty.shape {
            Shape::Map(item) => format!("map[string]{}", self.go_type(item)),
            Shape::List(item) => format!("[]{}", self.go_type(item)),
            Shape::String => "string".to_owned(),
            Shape::Integer => match checks.and_then(|checks| checks.format.as_deref()) {
                Some("int32") => "int32".to_owned(),
                _ => "int64".to_owned(),
            },
            Shape::Number => "float64".to_owned(),
            Shape::Boolean => "bool".to_owned(),
            Shape::IntOrString => "intstr.IntOrString".to_owned(),
            Shape::Quantity => "resource.Quantity".to_owned(),
            Shape::Time => "v1.Time".to_owned(),
            Shape::MicroTime => "v1.MicroTime".to_owned(),
            Shape::Duration => "v1.Duration".to_owned(),
            Shape::Bytes => "[]uint8".to_owned(),
            Shape::Object => "map[string]interface {}".to_owned(),
            Shape::Any => "interface {}".to_owned(),
        }
    }
}

fn last_segment(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

fn check_time(text: &str) -> Result<(), String> {
    match crate::meta::parse_time(text) {
        Some(_) if text.contains('T') => Ok(()),
        _ => {
            let quoted = crate::field::quote(text);
            Err(format!("parsing time {quoted} as \"2006-01-02T15:04:05Z07:00\": cannot parse {quoted} as \"2006\""))
        }
    }
}

fn check_base64(text: &str) -> Result<(), String> {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    let result = if text.contains(['\n', '\r']) {
        STANDARD.decode(text.replace(['\n', '\r'], "")).map(|_| ())
    } else {
        // Lengths and alphabet are all that matters; decoding costs less than a scan of our own.
        STANDARD.decode(text).map(|_| ())
    };
    result.map_err(|error| {
        let position = match error {
            base64::DecodeError::InvalidByte(position, _) => position,
            _ => text.len(),
        };
        format!("illegal base64 data at input byte {position}")
    })
}
