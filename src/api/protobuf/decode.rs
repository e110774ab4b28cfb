//! Messages to JSON values.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Number, Value};

use super::wire::{Reader, expect};
use super::{Error, MAGIC};
use crate::meta;
use crate::schema::{Field, MAX_DEPTH, Schemas, Shape, Special, Type, TypeId, formats};

/// Decodes a bare message of a built-in type.
pub fn decode_message(schemas: &Schemas, ty: TypeId, bytes: &[u8]) -> Result<Value, Error> {
    let mut map = Map::new();
    Decoder { schemas }.object(schemas.ty(ty), bytes, &mut map, 0)?;
    Ok(Value::Object(map))
}

struct Decoder<'s> {
    schemas: &'s Schemas,
}

impl Decoder<'_> {
    /// Reads a message's fields into `map`; an embedded struct reads into the same map.
    fn object(&self, ty: &Type, bytes: &[u8], map: &mut Map<String, Value>, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::Depth);
        }
        let number_of = |position: u16| {
            let position = usize::from(position);
            ty.fields.get(position).map_or_else(|| ty.inline[position - ty.fields.len()].proto, |field| field.proto)
        };
        let mut reader = Reader::new(bytes);
        while let Some((number, wire)) = reader.tag()? {
            let Ok(found) = ty.wire.binary_search_by_key(&number, |position| number_of(*position)) else {
                reader.skip(wire)?;
                continue;
            };
            let position = usize::from(ty.wire[found]);
            match ty.fields.get(position) {
                Some(field) => self.field(field, &mut reader, wire, map, depth)?,
                None => {
                    let inline = ty.inline[position - ty.fields.len()];
                    self.object(self.schemas.ty(inline.ty), reader.bytes(wire)?, map, depth + 1)?;
                }
            }
        }
        Ok(())
    }

    fn field(&self, field: &Field, reader: &mut Reader<'_>, wire: u8, map: &mut Map<String, Value>, depth: usize) -> Result<(), Error> {
        let ty = self.schemas.ty(field.ty);
        match ty.shape {
            Shape::List(item) if ty.special != Special::Wrapped => {
                let entry = map.entry(&*field.name).or_insert_with(|| Value::Array(Vec::new()));
                let Value::Array(items) = entry else { return Ok(()) };
                if wire == 2 && matches!(self.schemas.ty(item).shape, Shape::Integer | Shape::Boolean) {
                    // Packed; upstream does not write it, but any encoder may.
                    let mut packed = Reader::new(reader.bytes(wire)?);
                    while !packed.is_empty() {
                        items.push(self.value(item, &mut packed, 0, depth)?);
                    }
                    return Ok(());
                }
                items.push(self.value(item, reader, wire, depth)?);
            }
            Shape::Map(item) => {
                let (name, value) = self.entry(item, reader.bytes(wire)?, depth)?;
                let entry = map.entry(&*field.name).or_insert_with(|| Value::Object(Map::new()));
                if let Value::Object(entries) = entry {
                    entries.insert(name, value);
                }
            }
            shape => {
                let value = self.value(field.ty, reader, wire, depth)?;
                let zero = match &value {
                    Value::Null => true,
                    _ if field.go.pointer || !field.go.omit_empty => false,
                    Value::String(text) => text.is_empty() && matches!(shape, Shape::String | Shape::Bytes),
                    Value::Bool(value) => !value,
                    Value::Number(number) => shape != Shape::IntOrString && number.as_f64() == Some(0.0),
                    Value::Array(items) => items.is_empty(),
                    _ => false,
                };
                if !zero {
                    map.insert(field.name.as_ref().to_owned(), value);
                }
            }
        }
        Ok(())
    }

    fn entry(&self, item: TypeId, bytes: &[u8], depth: usize) -> Result<(String, Value), Error> {
        let mut reader = Reader::new(bytes);
        let (mut name, mut value) = (String::new(), None);
        while let Some((number, wire)) = reader.tag()? {
            match number {
                1 => name = reader.text(wire)?.to_owned(),
                2 => value = Some(self.value(item, &mut reader, wire, depth + 1)?),
                _ => reader.skip(wire)?,
            }
        }
        let value = value.unwrap_or_else(|| match self.schemas.ty(item).shape {
            Shape::String | Shape::Bytes => "".into(),
            Shape::Quantity => "0".into(),
            Shape::Integer | Shape::Number => 0.into(),
            Shape::Boolean => false.into(),
            Shape::List(_) => Value::Array(Vec::new()),
            _ => Value::Object(Map::new()),
        });
        Ok((name, value))
    }

    fn value(&self, id: TypeId, reader: &mut Reader<'_>, wire: u8, depth: usize) -> Result<Value, Error> {
        let ty = self.schemas.ty(id);
        Ok(match ty.shape {
            Shape::String => Value::String(reader.text(wire)?.to_owned()),
            Shape::Integer => {
                expect(wire, 0)?;
                let value = reader.varint()? as i64;
                let narrow = ty.checks.as_ref().is_some_and(|checks| checks.format.as_deref() == Some("int32"));
                if narrow { i64::from(value as i32).into() } else { value.into() }
            }
            Shape::Boolean => {
                expect(wire, 0)?;
                Value::Bool(reader.varint()? != 0)
            }
            Shape::Number => {
                expect(wire, 1)?;
                number(reader.double()?)?
            }
            Shape::Bytes => STANDARD.encode(reader.bytes(wire)?).into(),
            Shape::Object => {
                let mut map = Map::new();
                self.object(ty, reader.bytes(wire)?, &mut map, depth + 1)?;
                Value::Object(map)
            }
            Shape::List(item) => {
                // A wrapped list: a message with the items as its field 1.
                let mut inner = Reader::new(reader.bytes(wire)?);
                let mut items = Vec::new();
                while let Some((number, wire)) = inner.tag()? {
                    match number {
                        1 => items.push(self.value(item, &mut inner, wire, depth + 1)?),
                        _ => inner.skip(wire)?,
                    }
                }
                Value::Array(items)
            }
            Shape::Map(_) => return Err(Error::Malformed("a map inside a map".to_owned())),
            Shape::IntOrString => int_or_string(reader.bytes(wire)?)?,
            Shape::Quantity => quantity(reader.bytes(wire)?)?,
            Shape::Time | Shape::MicroTime => time(reader.bytes(wire)?, ty.shape)?,
            Shape::Duration => {
                let (nanos, _) = two_varints(reader.bytes(wire)?)?;
                formats::go_duration(nanos).into()
            }
            Shape::Any => self.any(ty, reader.bytes(wire)?, depth + 1)?,
        })
    }

    fn any(&self, ty: &Type, bytes: &[u8], depth: usize) -> Result<Value, Error> {
        if depth > MAX_DEPTH {
            return Err(Error::Depth);
        }
        let mut reader = Reader::new(bytes);
        let Some(schema) = ty.inner else {
            let mut raw = None;
            while let Some((number, wire)) = reader.tag()? {
                match number {
                    1 => raw = Some(reader.bytes(wire)?),
                    _ => reader.skip(wire)?,
                }
            }
            return self.raw(raw.unwrap_or_default(), depth);
        };
        let (mut found, mut items, mut allows) = (None, Vec::new(), false);
        while let Some((number, wire)) = reader.tag()? {
            match (number, ty.special) {
                (1, Special::SchemaOrBool) => {
                    expect(wire, 0)?;
                    allows = reader.varint()? != 0;
                }
                (2, Special::SchemaOrStrings) => items.push(Value::String(reader.text(wire)?.to_owned())),
                (2, Special::SchemaOrArray) => items.push(self.value(schema, &mut reader, wire, depth + 1)?),
                (1 | 2, _) => found = Some(self.value(schema, &mut reader, wire, depth + 1)?),
                _ => reader.skip(wire)?,
            }
        }
        Ok(match (found, ty.special) {
            (Some(schema), _) => schema,
            (None, Special::SchemaOrBool) => Value::Bool(allows),
            (None, _) => Value::Array(items),
        })
    }

    /// Embedded JSON, or an enveloped object.
    fn raw(&self, bytes: &[u8], depth: usize) -> Result<Value, Error> {
        if bytes.is_empty() {
            return Ok(Value::Null);
        }
        if bytes.starts_with(MAGIC) {
            if depth > MAX_DEPTH {
                return Err(Error::Depth);
            }
            let unknown = super::open(bytes)?;
            let ty = super::type_of(self.schemas, &unknown.api_version, &unknown.kind);
            let ty = ty.ok_or_else(|| Error::UnknownKind { api_version: unknown.api_version.clone(), kind: unknown.kind.clone() })?;
            let mut map = Map::new();
            self.object(self.schemas.ty(ty), unknown.raw, &mut map, depth + 1)?;
            map.insert("apiVersion".to_owned(), unknown.api_version.into());
            map.insert("kind".to_owned(), unknown.kind.into());
            return Ok(Value::Object(map));
        }
        serde_json::from_slice(bytes).map_err(|error| Error::Malformed(format!("embedded JSON: {error}")))
    }
}

/// A float as Go's JSON encoder writes it: whole numbers without a fraction.
fn number(value: f64) -> Result<Value, Error> {
    if value.fract() == 0.0 && value.abs() < 9.0e15 {
        return Ok(Value::from(value as i64));
    }
    Number::from_f64(value).map(Value::Number).ok_or_else(|| Error::Malformed("a number is not finite".to_owned()))
}

fn two_varints(bytes: &[u8]) -> Result<(i64, i64), Error> {
    let mut reader = Reader::new(bytes);
    let (mut first, mut second) = (0, 0);
    while let Some((number, wire)) = reader.tag()? {
        match number {
            1 | 2 => {
                expect(wire, 0)?;
                let value = reader.varint()? as i64;
                if number == 1 { first = value } else { second = value }
            }
            _ => reader.skip(wire)?,
        }
    }
    Ok((first, second))
}

fn int_or_string(bytes: &[u8]) -> Result<Value, Error> {
    let mut reader = Reader::new(bytes);
    let (mut kind, mut number, mut text) = (0, 0, "");
    while let Some((field, wire)) = reader.tag()? {
        match field {
            1 | 2 => {
                expect(wire, 0)?;
                let value = reader.varint()? as i64;
                if field == 1 { kind = value } else { number = i64::from(value as i32) }
            }
            3 => text = reader.text(wire)?,
            _ => reader.skip(wire)?,
        }
    }
    Ok(if kind == 0 { number.into() } else { text.into() })
}

fn quantity(bytes: &[u8]) -> Result<Value, Error> {
    let mut reader = Reader::new(bytes);
    let mut text = "";
    while let Some((field, wire)) = reader.tag()? {
        match field {
            1 => text = reader.text(wire)?,
            _ => reader.skip(wire)?,
        }
    }
    if text.is_empty() {
        return Ok("0".into());
    }
    crate::quantity::canonical(text).map(Value::from).map_err(|error| Error::Malformed(error.to_string()))
}

/// A timestamp; an empty message is Go's zero time, which JSON does not show.
fn time(bytes: &[u8], shape: Shape) -> Result<Value, Error> {
    if bytes.is_empty() {
        return Ok(Value::Null);
    }
    let (seconds, nanos) = two_varints(bytes)?;
    let nanos = if shape == Shape::Time { 0 } else { nanos as i32 };
    let time = jiff::Timestamp::new(seconds, nanos.clamp(0, 999_999_999))
        .map_err(|error| Error::Malformed(format!("a time is out of range: {error}")))?;
    Ok(match shape {
        Shape::Time => meta::now_rfc3339(time).into(),
        _ => meta::now_micro(time).into(),
    })
}
