//! JSON values to messages.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value};
use smallvec::SmallVec;

use super::Error;
use super::wire::{bytes_field, key, nested, varint};
use crate::schema::{Field, MAX_DEPTH, Path, Schemas, Shape, Special, Type, TypeId, formats};
use crate::{meta, quantity};

/// Encodes an object of a built-in type as a bare message.
pub fn encode_message(schemas: &Schemas, ty: TypeId, object: &Value) -> Result<Vec<u8>, Error> {
    let mut out = Vec::with_capacity(512);
    let encoder = Encoder { schemas };
    match (schemas.ty(ty).shape, object) {
        (Shape::Object, Value::Object(map)) => encoder.object(schemas.ty(ty), map, &mut out, &Path::Root, 0)?,
        _ => return Err(problem(&Path::Root, "an object is expected")),
    }
    Ok(out)
}

struct Encoder<'s> {
    schemas: &'s Schemas,
}

fn problem(path: &Path<'_>, problem: impl Into<String>) -> Error {
    Error::Value { path: path.to_string(), problem: problem.into() }
}

impl Encoder<'_> {
    fn object(&self, ty: &Type, map: &Map<String, Value>, out: &mut Vec<u8>, path: &Path<'_>, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::Depth);
        }
        // Fields and keys are both sorted by name: one pass finds the values, a second writes them by number.
        let mut values: SmallVec<[Option<&Value>; 32]> = SmallVec::from_elem(None, ty.fields.len());
        let mut index = 0;
        for (name, value) in map {
            while index < ty.fields.len() && *ty.fields[index].name < **name {
                index += 1;
            }
            if index < ty.fields.len() && *ty.fields[index].name == **name && !value.is_null() {
                values[index] = Some(value);
            }
        }
        for &position in &ty.wire {
            let position = usize::from(position);
            match ty.fields.get(position) {
                Some(field) => {
                    let path = Path::Field(path, &field.name);
                    match values[position] {
                        Some(value) => self.field(field.ty, field.proto, value, out, &path, depth)?,
                        None if !field.go.pointer => self.zero(field, out, depth)?,
                        None => {}
                    }
                }
                None => {
                    let inline = ty.inline[position - ty.fields.len()];
                    let inner = self.schemas.ty(inline.ty);
                    if !inline.pointer || inner.fields.iter().any(|field| map.contains_key(&*field.name)) {
                        nested(out, inline.proto, |out| self.object(inner, map, out, path, depth + 1))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// What Go writes for a field that is not behind a pointer and was never set.
    fn zero(&self, field: &Field, out: &mut Vec<u8>, depth: usize) -> Result<(), Error> {
        let ty = self.schemas.ty(field.ty);
        match ty.shape {
            Shape::List(_) | Shape::Map(_) | Shape::Bytes => {}
            Shape::String => bytes_field(out, field.proto, b""),
            Shape::Integer | Shape::Boolean => {
                key(out, field.proto, 0);
                varint(out, 0);
            }
            Shape::Number => {
                key(out, field.proto, 1);
                out.extend_from_slice(&[0; 8]);
            }
            Shape::Object => nested(out, field.proto, |out| self.object(ty, &Map::new(), out, &Path::Root, depth + 1))?,
            Shape::Time | Shape::MicroTime | Shape::Any => nested(out, field.proto, |_| Ok(()))?,
            Shape::Duration => self.field(field.ty, field.proto, &"0s".into(), out, &Path::Root, depth)?,
            Shape::Quantity => self.field(field.ty, field.proto, &"0".into(), out, &Path::Root, depth)?,
            Shape::IntOrString => self.field(field.ty, field.proto, &0.into(), out, &Path::Root, depth)?,
        }
        Ok(())
    }

    /// A field with its tag: once, or once for each item.
    fn field(&self, id: TypeId, number: u32, value: &Value, out: &mut Vec<u8>, path: &Path<'_>, depth: usize) -> Result<(), Error> {
        let ty = self.schemas.ty(id);
        match (ty.shape, value) {
            (Shape::List(item), Value::Array(items)) if ty.special == Special::Wrapped => nested(out, number, |out| {
                items.iter().try_for_each(|value| self.field(item, 1, value, out, path, depth + 1))
            }),
            (Shape::List(item), Value::Array(items)) => {
                for (index, value) in items.iter().enumerate() {
                    self.field(item, number, value, out, &Path::Index(path, index), depth)?;
                }
                Ok(())
            }
            (Shape::Map(item), Value::Object(map)) => {
                for (name, value) in map {
                    nested(out, number, |out| {
                        bytes_field(out, 1, name.as_bytes());
                        self.field(item, 2, value, out, &Path::Key(path, name), depth)
                    })?;
                }
                Ok(())
            }
            (Shape::Object, Value::Object(map)) => nested(out, number, |out| self.object(ty, map, out, path, depth + 1)),
            // Go's null is the zero value.
            (Shape::Object, Value::Null) => nested(out, number, |out| self.object(ty, &Map::new(), out, path, depth + 1)),
            _ => self.scalar(ty, number, value, out, path, depth),
        }
    }

    fn scalar(&self, ty: &Type, number: u32, value: &Value, out: &mut Vec<u8>, path: &Path<'_>, depth: usize) -> Result<(), Error> {
        let wrong = || problem(path, format!("{} does not fit {:?}", crate::schema::value_kind(value), ty.shape));
        match (ty.shape, value) {
            (Shape::String, Value::String(text)) => bytes_field(out, number, text.as_bytes()),
            (Shape::Integer, Value::Number(value)) => {
                key(out, number, 0);
                varint(out, value.as_i64().ok_or_else(wrong)? as u64);
            }
            (Shape::Boolean, Value::Bool(value)) => {
                key(out, number, 0);
                varint(out, u64::from(*value));
            }
            (Shape::Number, Value::Number(value)) => {
                key(out, number, 1);
                out.extend_from_slice(&value.as_f64().ok_or_else(wrong)?.to_le_bytes());
            }
            (Shape::Bytes, Value::String(text)) => {
                let bytes = STANDARD.decode(text).or_else(|_| STANDARD.decode(text.replace(['\n', '\r'], "")));
                bytes_field(out, number, &bytes.map_err(|error| problem(path, error.to_string()))?);
            }
            (Shape::IntOrString, Value::Number(value)) => {
                let value = value.as_i64().ok_or_else(wrong)?;
                nested(out, number, |out| int_or_string(out, 0, value, ""))?;
            }
            (Shape::IntOrString, Value::String(text)) => nested(out, number, |out| int_or_string(out, 1, 0, text))?,
            (Shape::Quantity, Value::String(_) | Value::Number(_)) => {
                let amount = quantity::from_json(value).map_err(|error| problem(path, error.to_string()))?;
                nested(out, number, |out| {
                    bytes_field(out, 1, amount.to_string().as_bytes());
                    Ok(())
                })?;
            }
            (Shape::Time | Shape::MicroTime, Value::Null) => nested(out, number, |_| Ok(()))?,
            (Shape::Time | Shape::MicroTime, Value::String(text)) => {
                let time = meta::parse_time(text).ok_or_else(|| problem(path, format!("{text:?} is no time")))?;
                let (mut seconds, mut nanos) = (time.as_second(), time.subsec_nanosecond());
                if nanos < 0 {
                    (seconds, nanos) = (seconds - 1, nanos + 1_000_000_000);
                }
                let nanos = if ty.shape == Shape::Time { 0 } else { nanos / 1000 * 1000 };
                nested(out, number, |out| {
                    timestamp(out, seconds, nanos);
                    Ok(())
                })?;
            }
            (Shape::Duration, Value::String(text)) => {
                let nanos = formats::parse_go_duration(text).ok_or_else(|| problem(path, format!("{text:?} is no duration")))?;
                nested(out, number, |out| {
                    key(out, 1, 0);
                    varint(out, nanos as u64);
                    Ok(())
                })?;
            }
            (Shape::Any, value) => nested(out, number, |out| self.any(ty, value, out, path, depth))?,
            (_, Value::Null) => {}
            _ => return Err(wrong()),
        }
        Ok(())
    }

    /// JSON text in a message, or one of a CRD schema's alternatives.
    fn any(&self, ty: &Type, value: &Value, out: &mut Vec<u8>, path: &Path<'_>, depth: usize) -> Result<(), Error> {
        let Some(schema) = ty.inner else {
            bytes_field(out, 1, value.to_string().as_bytes());
            return Ok(());
        };
        match (ty.special, value) {
            (Special::SchemaOrBool, Value::Bool(allows)) => {
                key(out, 1, 0);
                varint(out, u64::from(*allows));
                Ok(())
            }
            (Special::SchemaOrBool, Value::Object(_)) => {
                key(out, 1, 0);
                varint(out, 1);
                self.field(schema, 2, value, out, path, depth + 1)
            }
            (_, Value::Object(_)) => self.field(schema, 1, value, out, path, depth + 1),
            (Special::SchemaOrArray, Value::Array(items)) => {
                items.iter().try_for_each(|value| self.field(schema, 2, value, out, path, depth + 1))
            }
            (Special::SchemaOrStrings, Value::Array(items)) => {
                for item in items {
                    let text = item.as_str().ok_or_else(|| problem(path, "a string is expected"))?;
                    bytes_field(out, 2, text.as_bytes());
                }
                Ok(())
            }
            _ => Err(problem(path, "a schema is expected")),
        }
    }
}

fn int_or_string(out: &mut Vec<u8>, kind: u64, number: i64, text: &str) -> Result<(), Error> {
    key(out, 1, 0);
    varint(out, kind);
    key(out, 2, 0);
    varint(out, number as u64);
    bytes_field(out, 3, text.as_bytes());
    Ok(())
}

fn timestamp(out: &mut Vec<u8>, seconds: i64, nanos: i32) {
    key(out, 1, 0);
    varint(out, seconds as u64);
    key(out, 2, 0);
    varint(out, nanos as u64);
}
