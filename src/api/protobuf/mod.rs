//! Kubernetes' protobuf, transcoded from and to JSON values by walking the field numbers of the facts.
//!
//! Byte for byte what upstream's generated code writes: fields in order of their numbers, non-pointer
//! scalars and structs even when they are empty, maps in order of their keys. There are no generated
//! message types. Decoding a hostile message neither panics nor allocates more than a small multiple of
//! its length.
//!
//! An object on the wire is an envelope (`k8s\0` and a `runtime.Unknown` with apiVersion and kind) around
//! the message. Items of a list and the watch cache's entries are bare messages: a list is written by
//! concatenation ([`list`]), a watch event by framing ([`watch_event`]).

mod decode;
mod encode;
pub(crate) mod wire;

#[cfg(test)]
mod tests;

use serde_json::Value;

pub use decode::decode_message;
pub use encode::encode_message;

use crate::meta;
use crate::schema::{Schemas, TypeId};
use wire::{Reader, bytes_field, key, nested, varint};

/// What every enveloped object starts with.
pub const MAGIC: &[u8; 4] = b"k8s\0";

/// Media type of enveloped objects.
pub const MEDIA_TYPE: &str = "application/vnd.kubernetes.protobuf";

const META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1";

/// Why something cannot be transcoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The body does not start with `k8s\0`.
    #[error("provided data does not appear to be a protobuf message, expected prefix [107 56 115 0]")]
    Magic,
    /// The message ends in the middle of something.
    #[error("unexpected EOF in protobuf message")]
    Truncated,
    /// The message cannot be what it says it is.
    #[error("malformed protobuf message: {0}")]
    Malformed(String),
    /// Nested more deeply than is allowed.
    #[error("protobuf message is nested more than {} levels deep", crate::schema::MAX_DEPTH)]
    Depth,
    /// No built-in kind, hence no field numbers.
    #[error("no kind {kind:?} is registered for version {api_version:?} in protobuf; send JSON")]
    UnknownKind {
        /// `apps/v1`
        api_version: String,
        /// `Deployment`
        kind: String,
    },
    /// The value does not fit the type.
    #[error("cannot encode {path}: {problem}")]
    Value {
        /// Where.
        path: String,
        /// What.
        problem: String,
    },
}

/// The built-in type of a kind in a group version, options and lists included.
pub fn type_of(schemas: &Schemas, api_version: &str, kind: &str) -> Option<TypeId> {
    let (group, version) = meta::split_api_version(api_version);
    let own = schemas.named(&crate::facts::definition_name(group, version, kind));
    // These are registered in every group version.
    let common = || match kind {
        "DeleteOptions" | "CreateOptions" | "UpdateOptions" | "PatchOptions" | "ListOptions" | "GetOptions" | "WatchEvent" => true,
        "Status" | "List" | "APIGroup" | "APIGroupList" | "APIResourceList" | "APIVersions" => group.is_empty(),
        "PartialObjectMetadata" | "PartialObjectMetadataList" => group == "meta.k8s.io",
        _ => false,
    };
    own.or_else(|| if common() { schemas.named(&format!("{META}.{kind}")) } else { None })
}

/// Encodes a whole object by its own apiVersion and kind, enveloped.
pub fn encode(schemas: &Schemas, object: &Value) -> Result<Vec<u8>, Error> {
    let (api_version, kind) = (meta::api_version(object), meta::kind(object));
    let ty = type_of(schemas, api_version, kind)
        .ok_or_else(|| Error::UnknownKind { api_version: api_version.to_owned(), kind: kind.to_owned() })?;
    let message = encode_message(schemas, ty, object)?;
    Ok(envelope(api_version, kind, &message))
}

/// Decodes an enveloped object. `default` is what an envelope without apiVersion or kind holds.
pub fn decode(schemas: &Schemas, bytes: &[u8], default: Option<(&str, &str)>) -> Result<Value, Error> {
    let unknown = open(bytes)?;
    let given = |text: &str, default: Option<&str>| if text.is_empty() { default.unwrap_or("").to_owned() } else { text.to_owned() };
    let api_version = given(&unknown.api_version, default.map(|default| default.0));
    let kind = given(&unknown.kind, default.map(|default| default.1));
    let Some(ty) = type_of(schemas, &api_version, &kind) else {
        return Err(Error::UnknownKind { api_version, kind });
    };
    if !matches!(unknown.content_type.as_str(), "" | MEDIA_TYPE) || !unknown.content_encoding.is_empty() {
        return Err(Error::Malformed(format!("content type {:?} inside", unknown.content_type)));
    }
    let mut object = decode_message(schemas, ty, unknown.raw)?;
    if let Value::Object(map) = &mut object {
        map.insert("apiVersion".to_owned(), api_version.into());
        map.insert("kind".to_owned(), kind.into());
    }
    Ok(object)
}

/// A `runtime.Unknown`: the envelope's content.
#[derive(Debug, Default)]
pub struct Unknown<'b> {
    /// `apps/v1`
    pub api_version: String,
    /// `Deployment`
    pub kind: String,
    /// The message.
    pub raw: &'b [u8],
    /// Encoding of `raw`; nobody sets it.
    pub content_encoding: String,
    /// Media type of `raw`; empty for protobuf.
    pub content_type: String,
}

/// Opens an envelope without looking into the message.
pub fn open(bytes: &[u8]) -> Result<Unknown<'_>, Error> {
    let body = bytes.strip_prefix(MAGIC).ok_or(Error::Magic)?;
    let mut unknown = Unknown::default();
    let mut reader = Reader::new(body);
    while let Some((number, wire)) = reader.tag()? {
        match number {
            1 => {
                let mut inner = Reader::new(reader.bytes(wire)?);
                while let Some((number, wire)) = inner.tag()? {
                    match number {
                        1 => unknown.api_version = inner.text(wire)?.to_owned(),
                        2 => unknown.kind = inner.text(wire)?.to_owned(),
                        _ => inner.skip(wire)?,
                    }
                }
            }
            2 => unknown.raw = reader.bytes(wire)?,
            3 => unknown.content_encoding = reader.text(wire)?.to_owned(),
            4 => unknown.content_type = reader.text(wire)?.to_owned(),
            _ => reader.skip(wire)?,
        }
    }
    Ok(unknown)
}

/// Puts a message into an envelope.
pub fn envelope(api_version: &str, kind: &str, message: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(message.len() + api_version.len() + kind.len() + 24);
    out.extend_from_slice(MAGIC);
    nested(&mut out, 1, |out| {
        bytes_field(out, 1, api_version.as_bytes());
        bytes_field(out, 2, kind.as_bytes());
        Ok(())
    })
    .unwrap_or_default();
    bytes_field(&mut out, 2, message);
    bytes_field(&mut out, 3, b"");
    bytes_field(&mut out, 4, b"");
    out
}

/// `metadata` of a list.
#[derive(Clone, Copy, Debug, Default)]
pub struct ListMeta<'a> {
    /// The snapshot's revision.
    pub resource_version: &'a str,
    /// Token of the next page, empty on the last.
    pub continue_token: &'a str,
    /// How many items follow on later pages, when that is known.
    pub remaining: Option<i64>,
}

/// An enveloped list out of its items' messages: nothing is decoded.
pub fn list<'i>(api_version: &str, kind: &str, metadata: ListMeta<'_>, items: impl Iterator<Item = &'i [u8]>) -> Vec<u8> {
    let mut message = Vec::new();
    nested(&mut message, 1, |out| {
        bytes_field(out, 1, b"");
        bytes_field(out, 2, metadata.resource_version.as_bytes());
        bytes_field(out, 3, metadata.continue_token.as_bytes());
        if let Some(remaining) = metadata.remaining {
            key(out, 4, 0);
            varint(out, remaining as u64);
        }
        Ok(())
    })
    .unwrap_or_default();
    for item in items {
        bytes_field(&mut message, 2, item);
    }
    envelope(api_version, kind, &message)
}

/// A frame of a protobuf watch: length, then a bare `WatchEvent` around an enveloped object.
pub fn watch_event(kind: &str, enveloped: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(enveloped.len() + kind.len() + 24);
    out.extend_from_slice(&[0; 4]);
    bytes_field(&mut out, 1, kind.as_bytes());
    nested(&mut out, 2, |out| {
        bytes_field(out, 1, enveloped);
        Ok(())
    })
    .unwrap_or_default();
    let length = (out.len() - 4) as u32;
    out[..4].copy_from_slice(&length.to_be_bytes());
    out
}
