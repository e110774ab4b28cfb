//! OpenAPI v2 as protobuf: what client-go's `OpenAPISchema()` asks for
//! (`application/com.github.proto-openapi.spec.v2@v1.0+protobuf`).
//!
//! Follows gnostic's `openapiv2/OpenAPIv2.proto`: messages as tables of field numbers, everything that starts
//! with `x-` as a named YAML text.

use serde_json::{Map, Value};

use crate::protobuf::wire::{bytes_field, key, nested, varint};

/// How a key of a JSON object is written.
#[derive(Clone, Copy)]
enum Kind {
    /// A string.
    Text,
    /// Strings, each on its own.
    Texts,
    /// `true` or `false`.
    Flag,
    /// An integer.
    Count,
    /// A float.
    Number,
    /// Any value, as YAML.
    Any,
    /// Any values.
    Anys,
    /// A message.
    One(&'static Message),
    /// Messages.
    Many(&'static Message),
    /// An object of named messages: a message whose field holds pairs of name and message.
    Named(u32, &'static Message),
    /// `items`: a message with the schema as its field 1.
    Items,
    /// `additionalProperties`: a schema or a flag.
    SchemaOrFlag,
    /// `type`: a message with one or more names.
    TypeNames,
    /// A response's schema: one of two.
    ResponseSchema,
    /// Parameters, body or not.
    Parameters,
    /// Responses by code.
    Responses,
    /// Security requirements.
    Requirements,
    /// Security definitions: API keys.
    ApiKeys,
}

/// A message: its fields, and the number under which extensions go.
struct Message {
    fields: &'static [(&'static str, u32, Kind)],
    extensions: u32,
}

static SCHEMA: Message = Message {
    fields: &[
        ("$ref", 1, Kind::Text),
        ("format", 2, Kind::Text),
        ("title", 3, Kind::Text),
        ("description", 4, Kind::Text),
        ("default", 5, Kind::Any),
        ("multipleOf", 6, Kind::Number),
        ("maximum", 7, Kind::Number),
        ("exclusiveMaximum", 8, Kind::Flag),
        ("minimum", 9, Kind::Number),
        ("exclusiveMinimum", 10, Kind::Flag),
        ("maxLength", 11, Kind::Count),
        ("minLength", 12, Kind::Count),
        ("pattern", 13, Kind::Text),
        ("maxItems", 14, Kind::Count),
        ("minItems", 15, Kind::Count),
        ("uniqueItems", 16, Kind::Flag),
        ("maxProperties", 17, Kind::Count),
        ("minProperties", 18, Kind::Count),
        ("required", 19, Kind::Texts),
        ("enum", 20, Kind::Anys),
        ("additionalProperties", 21, Kind::SchemaOrFlag),
        ("type", 22, Kind::TypeNames),
        ("items", 23, Kind::Items),
        ("allOf", 24, Kind::Many(&SCHEMA)),
        ("properties", 25, Kind::Named(1, &SCHEMA)),
        ("example", 30, Kind::Any),
    ],
    extensions: 31,
};

static RESPONSE: Message =
    Message { fields: &[("description", 1, Kind::Text), ("schema", 2, Kind::ResponseSchema)], extensions: 5 };

static BODY: Message = Message {
    fields: &[
        ("description", 1, Kind::Text),
        ("name", 2, Kind::Text),
        ("in", 3, Kind::Text),
        ("required", 4, Kind::Flag),
        ("schema", 5, Kind::One(&SCHEMA)),
    ],
    extensions: 6,
};

static QUERY: Message = Message {
    fields: &[
        ("required", 1, Kind::Flag),
        ("in", 2, Kind::Text),
        ("description", 3, Kind::Text),
        ("name", 4, Kind::Text),
        ("type", 6, Kind::Text),
        ("format", 7, Kind::Text),
        ("uniqueItems", 20, Kind::Flag),
    ],
    extensions: 23,
};

static PATH_PARAMETER: Message = Message {
    fields: &[
        ("required", 1, Kind::Flag),
        ("in", 2, Kind::Text),
        ("description", 3, Kind::Text),
        ("name", 4, Kind::Text),
        ("type", 5, Kind::Text),
        ("format", 6, Kind::Text),
        ("uniqueItems", 19, Kind::Flag),
    ],
    extensions: 22,
};

static OPERATION: Message = Message {
    fields: &[
        ("tags", 1, Kind::Texts),
        ("summary", 2, Kind::Text),
        ("description", 3, Kind::Text),
        ("operationId", 5, Kind::Text),
        ("produces", 6, Kind::Texts),
        ("consumes", 7, Kind::Texts),
        ("parameters", 8, Kind::Parameters),
        ("responses", 9, Kind::Responses),
        ("schemes", 10, Kind::Texts),
        ("deprecated", 11, Kind::Flag),
    ],
    extensions: 13,
};

static PATH_ITEM: Message = Message {
    fields: &[
        ("get", 2, Kind::One(&OPERATION)),
        ("put", 3, Kind::One(&OPERATION)),
        ("post", 4, Kind::One(&OPERATION)),
        ("delete", 5, Kind::One(&OPERATION)),
        ("options", 6, Kind::One(&OPERATION)),
        ("head", 7, Kind::One(&OPERATION)),
        ("patch", 8, Kind::One(&OPERATION)),
        ("parameters", 9, Kind::Parameters),
    ],
    extensions: 10,
};

static INFO: Message =
    Message { fields: &[("title", 1, Kind::Text), ("version", 2, Kind::Text), ("description", 3, Kind::Text)], extensions: 7 };

static API_KEY: Message = Message {
    fields: &[("type", 1, Kind::Text), ("name", 2, Kind::Text), ("in", 3, Kind::Text), ("description", 4, Kind::Text)],
    extensions: 5,
};

static DOCUMENT: Message = Message {
    fields: &[
        ("swagger", 1, Kind::Text),
        ("info", 2, Kind::One(&INFO)),
        ("paths", 8, Kind::Named(2, &PATH_ITEM)),
        ("definitions", 9, Kind::Named(1, &SCHEMA)),
        ("security", 12, Kind::Requirements),
        ("securityDefinitions", 13, Kind::ApiKeys),
    ],
    extensions: 16,
};

/// Media type of what [`encode`] writes.
pub const MEDIA_TYPE: &str = "application/com.github.proto-openapi.spec.v2@v1.0+protobuf";

/// An OpenAPI v2 document ([`super::v2`]) as protobuf.
pub fn encode(document: &Value) -> Vec<u8> {
    let mut out = Vec::with_capacity(1 << 20);
    if let Some(map) = document.as_object() {
        message(&DOCUMENT, map, &mut out);
    }
    out
}

/// A field that is a message written by `write`.
fn put(out: &mut Vec<u8>, number: u32, write: impl FnOnce(&mut Vec<u8>)) {
    // Writing into memory does not fail.
    let _ = nested(out, number, |out| {
        write(out);
        Ok(())
    });
}

fn any(out: &mut Vec<u8>, number: u32, value: &Value) {
    put(out, number, |out| bytes_field(out, 2, value.to_string().as_bytes()));
}

fn message(message: &Message, map: &Map<String, Value>, out: &mut Vec<u8>) {
    for (name, number, kind) in message.fields {
        if let Some(value) = map.get(*name) {
            field(*number, *kind, value, out);
        }
    }
    for (name, value) in map.iter().filter(|(name, _)| name.starts_with("x-")) {
        put(out, message.extensions, |out| {
            bytes_field(out, 1, name.as_bytes());
            any(out, 2, value);
        });
    }
}

fn object(kind: &'static Message, value: &Value, out: &mut Vec<u8>) {
    if let Some(map) = value.as_object() {
        message(kind, map, out);
    }
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn field(number: u32, kind: Kind, value: &Value, out: &mut Vec<u8>) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    match kind {
        Kind::Text => bytes_field(out, number, text(value).as_bytes()),
        Kind::Texts => items(value).for_each(|value| bytes_field(out, number, text(value).as_bytes())),
        Kind::Flag | Kind::Count => {
            let count = value.as_bool().map_or_else(|| value.as_i64().unwrap_or(0), i64::from);
            key(out, number, 0);
            varint(out, count as u64);
        }
        Kind::Number => {
            key(out, number, 1);
            out.extend_from_slice(&value.as_f64().unwrap_or(0.0).to_le_bytes());
        }
        Kind::Any => any(out, number, value),
        Kind::Anys => items(value).for_each(|value| any(out, number, value)),
        Kind::One(message) => put(out, number, |out| object(message, value, out)),
        Kind::Many(message) => items(value).for_each(|value| put(out, number, |out| object(message, value, out))),
        Kind::Named(inner, message) => put(out, number, |out| {
            for (name, value) in value.as_object().into_iter().flatten() {
                named(out, inner, name, |out| object(message, value, out));
            }
        }),
        Kind::Items => put(out, number, |out| put(out, 1, |out| object(&SCHEMA, value, out))),
        Kind::SchemaOrFlag => put(out, number, |out| match value {
            Value::Bool(_) => field(2, Kind::Flag, value, out),
            value => put(out, 1, |out| object(&SCHEMA, value, out)),
        }),
        Kind::TypeNames => put(out, number, |out| match value {
            Value::Array(_) => field(1, Kind::Texts, value, out),
            value => bytes_field(out, 1, text(value).as_bytes()),
        }),
        Kind::ResponseSchema => put(out, number, |out| put(out, 1, |out| object(&SCHEMA, value, out))),
        Kind::Parameters => items(value).for_each(|value| put(out, number, |out| put(out, 1, |out| parameter(value, out)))),
        Kind::Responses => put(out, number, |out| {
            for (code, value) in value.as_object().into_iter().flatten() {
                named(out, 1, code, |out| put(out, 1, |out| object(&RESPONSE, value, out)));
            }
        }),
        Kind::Requirements => items(value).for_each(|value| {
            put(out, number, |out| {
                for (name, scopes) in value.as_object().into_iter().flatten() {
                    named(out, 1, name, |out| field(1, Kind::Texts, scopes, out));
                }
            });
        }),
        Kind::ApiKeys => put(out, number, |out| {
            for (name, value) in value.as_object().into_iter().flatten() {
                named(out, 1, name, |out| put(out, 2, |out| object(&API_KEY, value, out)));
            }
        }),
    }
}

fn named(out: &mut Vec<u8>, number: u32, name: &str, write: impl FnOnce(&mut Vec<u8>)) {
    put(out, number, |out| {
        bytes_field(out, 1, name.as_bytes());
        put(out, 2, write);
    });
}

/// A parameter: in the body, in the path or in the query.
fn parameter(value: &Value, out: &mut Vec<u8>) {
    match value["in"].as_str() {
        Some("body") => put(out, 1, |out| object(&BODY, value, out)),
        Some("path") => put(out, 2, |out| put(out, 4, |out| object(&PATH_PARAMETER, value, out))),
        _ => put(out, 2, |out| put(out, 3, |out| object(&QUERY, value, out))),
    }
}
