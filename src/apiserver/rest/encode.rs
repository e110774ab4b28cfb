//! Objects to bytes: single objects, lists, tables and watch frames, in JSON, YAML and protobuf.
//!
//! What is stored is JSON in the storage version, so that form costs nothing; any other is made once per object and kept
//! beside it. Lists are concatenated while they are sent, never built in memory.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};
use windlass_api::schema::Schemas;
use windlass_api::{ApiError, meta, protobuf, table};

use super::{Answer, Call, packed};
use crate::cache::stored::{Encoding, Form, Stored};
use crate::content::{self, As, Gzip, Media, Output, Reply};

/// Chunks of streamed lists are about this long.
const CHUNK: usize = 64 << 10;
const META_V1: &str = "meta.k8s.io/v1";

/// The form that a request wants objects in.
pub(crate) fn form(call: &Call, output: Output) -> Form {
    let encoding = if output.media == Media::Protobuf { Encoding::Protobuf } else { Encoding::Json };
    match output.shape {
        As::PartialMetadata(v) | As::PartialMetadataList(v) => Form { api_version: format!("meta.k8s.io/{v}").into(), encoding, metadata_only: true },
        _ => Form { api_version: call.api_version().into(), encoding, metadata_only: false },
    }
}

/// An object in a form: from its stored bytes, from what somebody made before, or made now and kept.
pub(crate) fn item(call: &Call, object: &Stored, form: &Form) -> Result<Bytes, ApiError> {
    if form.encoding == Encoding::Json && !form.metadata_only && call.is_storage_version() {
        return Ok(object.bytes.clone());
    }
    if let Some(bytes) = object.form(form) {
        return Ok(bytes);
    }
    let bytes = make(call, object, form)?;
    object.keep_form(form.clone(), bytes.clone());
    Ok(bytes)
}

fn make(call: &Call, object: &Stored, form: &Form) -> Result<Bytes, ApiError> {
    match (form.metadata_only, form.encoding) {
        (true, Encoding::Json) => {
            let metadata = object.metadata_json();
            let head = format!("{{\"kind\":\"PartialObjectMetadata\",\"apiVersion\":\"{}\",\"metadata\":", form.api_version);
            let mut bytes = BytesMut::with_capacity(head.len() + metadata.len() + 1);
            bytes.put_slice(head.as_bytes());
            bytes.put_slice(metadata);
            bytes.put_u8(b'}');
            Ok(bytes.freeze())
        }
        (true, Encoding::Protobuf) => {
            let value = json!({"metadata": object.value()["metadata"]});
            meta_message("PartialObjectMetadata", &value)
        }
        (false, Encoding::Json) => {
            let value = call.from_storage(&object.value())?;
            serde_json::to_vec(&value).map(Bytes::from).map_err(ApiError::internal)
        }
        (false, Encoding::Protobuf) => {
            let value = object.value();
            if call.is_storage_version() {
                return message(call, &value);
            }
            message(call, &call.from_storage(&value)?)
        }
    }
}

/// An object of the request's version as a bare protobuf message.
fn message(call: &Call, value: &Value) -> Result<Bytes, ApiError> {
    protobuf::encode_message(&call.resource.schemas, call.version().schema, value).map(Bytes::from).map_err(ApiError::internal)
}

/// A message of one of the kinds that all groups share.
fn meta_message(kind: &str, value: &Value) -> Result<Bytes, ApiError> {
    let schemas = Schemas::builtin();
    let ty = protobuf::type_of(&schemas, META_V1, kind).ok_or_else(|| ApiError::internal(format!("{kind} has no schema")))?;
    protobuf::encode_message(&schemas, ty, value).map(Bytes::from).map_err(ApiError::internal)
}

/// A handler's answer as a response.
pub(crate) fn respond(call: &Call, answer: Answer) -> Result<Reply, ApiError> {
    match answer {
        Answer::Raw(reply) => Ok(reply),
        Answer::Document(status, value) => document(call, status, &value),
        Answer::Stored(status, object) => object_reply(call, status, &object),
        Answer::Value(status, value) => {
            let raw = serde_json::to_vec(&value).map_err(ApiError::internal)?;
            // Not stored, so it has no revision of its own; what it says about one is part of it.
            let cache = call.core.objects.require_cache(&call.stored_as)?;
            let key = crate::storage::object_key(&call.stored_as, call.namespace(), meta::name(&value));
            let object = Stored::unversioned(&key, raw.into(), cache.paths_ref())
                .ok_or_else(|| ApiError::internal("the result is not an object"))?;
            object_reply(call, status, &object)
        }
    }
}

/// One object.
fn object_reply(call: &Call, status: StatusCode, object: &Stored) -> Result<Reply, ApiError> {
    let output = call.output;
    let kind = match output.shape {
        As::Table(version) => {
            let rows = vec![row(call, object, version)?];
            let meta = json!({"resourceVersion": object.revision.to_string()});
            return Ok(table_reply(call, status, version, &meta, rows));
        }
        As::PartialMetadataList(_) => {
            let why = "you requested PartialObjectMetadataList, but the requested object is not a list";
            return Err(ApiError::new(406, "NotAcceptable", format!("{why} ({})", call.resource.kind)));
        }
        As::PartialMetadata(_) => "PartialObjectMetadata",
        As::Object => &call.resource.kind,
    };
    let form = form(call, output);
    let bytes = item(call, object, &form)?;
    Ok(match output.media {
        Media::Json if !output.pretty => content::respond(status, content::JSON, bytes, call.gzip()),
        Media::Json | Media::Yaml => {
            let value: Value = serde_json::from_slice(&bytes).map_err(ApiError::internal)?;
            content::respond(status, output.media.as_str(), content::encode_plain(&value, output.media, output.pretty), call.gzip())
        }
        Media::Protobuf => content::respond(status, content::PROTOBUF, envelope(&form.api_version, kind, &bytes), call.gzip()),
    })
}

/// A document of a built-in kind that is not stored: Status, Scale, reviews, tokens.
fn document(call: &Call, status: StatusCode, value: &Value) -> Result<Reply, ApiError> {
    let output = call.output;
    if output.media == Media::Protobuf {
        let bytes = protobuf::encode(&Schemas::builtin(), value).map_err(ApiError::internal)?;
        return Ok(content::respond(status, content::PROTOBUF, bytes.into(), false));
    }
    Ok(content::respond(status, output.media.as_str(), content::encode_plain(value, output.media, output.pretty), false))
}

// === Lists ===

/// The metadata of a list.
pub(crate) struct ListMeta {
    pub revision: u64,
    pub continue_token: Option<String>,
    pub remaining: Option<u64>,
}

impl ListMeta {
    fn to_value(&self) -> Value {
        let mut value = json!({"resourceVersion": self.revision.to_string()});
        if let Some(token) = &self.continue_token {
            value["continue"] = token.as_str().into();
        }
        if let Some(remaining) = self.remaining {
            value["remainingItemCount"] = remaining.into();
        }
        value
    }

    /// The protobuf message: resourceVersion is field 2, continue 3, remainingItemCount 4.
    fn to_message(&self) -> Bytes {
        let mut bytes = BytesMut::new();
        // selfLink is always written, as Go does.
        put_field(&mut bytes, 1, b"");
        put_field(&mut bytes, 2, self.revision.to_string().as_bytes());
        put_field(&mut bytes, 3, self.continue_token.as_deref().unwrap_or_default().as_bytes());
        if let Some(remaining) = self.remaining {
            bytes.put_u8(0x20);
            put_varint(&mut bytes, usize::try_from(remaining).unwrap_or(usize::MAX));
        }
        bytes.freeze()
    }
}

/// A list as a response.
pub(crate) fn list_reply(call: &Call, items: &[Arc<Stored>], list: &ListMeta) -> Result<Reply, ApiError> {
    let output = call.output;
    let meta = list.to_value();
    let kind = match output.shape {
        As::Table(version) => {
            let rows = items.iter().map(|o| row(call, o, version)).collect::<Result<Vec<_>, _>>()?;
            return Ok(table_reply(call, StatusCode::OK, version, &meta, rows));
        }
        As::PartialMetadata(_) => {
            let why = "you requested PartialObjectMetadata, but the requested object is a list";
            return Err(ApiError::new(406, "NotAcceptable", format!("{why} ({})", call.resource.list_kind)));
        }
        As::PartialMetadataList(_) => "PartialObjectMetadataList",
        As::Object => &call.resource.list_kind,
    };
    let form = form(call, output);
    let parts = items.iter().map(|o| item(call, o, &form)).collect::<Result<Vec<_>, _>>()?;
    Ok(match output.media {
        Media::Json if !output.pretty => {
            let head = format!("{{\"kind\":\"{kind}\",\"apiVersion\":\"{}\",\"metadata\":{meta},\"items\":[", form.api_version);
            if is_worth_packing(call, &parts) {
                return Ok(packed_list(content::JSON, items, &parts, &form, head.as_bytes(), JSON_TAIL));
            }
            pieces(StatusCode::OK, content::JSON, json_list(head, parts), call.gzip())
        }
        Media::Json | Media::Yaml => {
            let parse = |b: &Bytes| serde_json::from_slice::<Value>(b).map_err(ApiError::internal);
            let items = parts.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
            let value = json!({"kind": kind, "apiVersion": &*form.api_version, "metadata": meta, "items": items});
            content::respond(StatusCode::OK, output.media.as_str(), content::encode_plain(&value, output.media, output.pretty), call.gzip())
        }
        Media::Protobuf => {
            let list_meta = list.to_message();
            if is_worth_packing(call, &parts) {
                let head = protobuf_head(&form.api_version, kind, &list_meta, &parts);
                return Ok(packed_list(content::PROTOBUF, items, &parts, &form, &head, ENVELOPE_TAIL));
            }
            pieces(StatusCode::OK, content::PROTOBUF, protobuf_list(&form.api_version, kind, &list_meta, parts), call.gzip())
        }
    })
}

/// `head` and the items with commas between them.
fn json_list(head: String, items: Vec<Bytes>) -> Vec<Bytes> {
    let mut all = Vec::with_capacity(items.len() * 2 + 2);
    all.push(head.into());
    for (i, item) in items.into_iter().enumerate() {
        if i > 0 {
            all.push(Bytes::from_static(b","));
        }
        all.push(item);
    }
    all.push(Bytes::from_static(JSON_TAIL));
    all
}

/// What closes a list.
const JSON_TAIL: &[u8] = b"]}\n";

fn is_worth_packing(call: &Call, parts: &[Bytes]) -> bool {
    parts.len() > 1 && call.gzip() && parts.iter().map(Bytes::len).sum::<usize>() > content::GZIP_THRESHOLD
}

/// A compressed list out of compressed objects. The first object goes with the head, since nothing separates it.
fn packed_list(content_type: &'static str, items: &[Arc<Stored>], parts: &[Bytes], form: &Form, head: &[u8], tail: &[u8]) -> Reply {
    let mut stretches = Vec::with_capacity(parts.len() + 1);
    for (i, (object, bytes)) in items.iter().zip(parts).enumerate() {
        let mut tag = BytesMut::new();
        let separator: &[u8] = match form.encoding {
            Encoding::Json if i == 0 => b"",
            Encoding::Json => b",",
            Encoding::Protobuf => {
                tag.put_u8(0x12);
                put_varint(&mut tag, bytes.len());
                &tag
            }
        };
        if i == 0 {
            stretches.push(Arc::new(packed::pack(&[head, separator, bytes])));
        } else {
            stretches.push(packed::object(object, form, separator, bytes));
        }
    }
    stretches.push(Arc::new(packed::pack(&[tail])));
    let mut reply = pieces(StatusCode::OK, content_type, packed::gzip(&stretches), false);
    reply.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    reply.headers_mut().insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    reply
}

/// A list message in its envelope: every list has its metadata in field 1 and its items in field 2.
fn protobuf_list(api_version: &str, kind: &str, list_meta: &[u8], items: Vec<Bytes>) -> Vec<Bytes> {
    let mut all = Vec::with_capacity(items.len() * 2 + 2);
    all.push(protobuf_head(api_version, kind, list_meta, &items));
    for item in items {
        let mut tag = BytesMut::with_capacity(11);
        tag.put_u8(0x12);
        put_varint(&mut tag, item.len());
        all.push(tag.freeze());
        all.push(item);
    }
    all.push(Bytes::from_static(ENVELOPE_TAIL));
    all
}

/// A list message up to its first item.
fn protobuf_head(api_version: &str, kind: &str, list_meta: &[u8], items: &[Bytes]) -> Bytes {
    let size = items.iter().fold(field_len(list_meta.len()), |size, item| size + field_len(item.len()));
    let mut head = envelope_head(api_version, kind, size);
    put_field(&mut head, 1, list_meta);
    head.freeze()
}

/// Sends pieces in chunks of a good size; compressed on the way if that is wanted and worth it.
fn pieces(status: StatusCode, content_type: &'static str, pieces: Vec<Bytes>, gzip: bool) -> Reply {
    let total: usize = pieces.iter().map(Bytes::len).sum();
    if total <= 2 * CHUNK {
        let mut all = BytesMut::with_capacity(total);
        pieces.iter().for_each(|p| all.put_slice(p));
        return content::respond(status, content_type, all.freeze(), gzip);
    }
    let mut chunks = Chunks { pieces: pieces.into_iter(), pending: None };
    let compress = gzip && total > content::GZIP_THRESHOLD;
    let body = if compress {
        let mut encoder = Some(Gzip::new());
        content::streamed(futures::stream::iter(std::iter::from_fn(move || {
            loop {
                let writer = encoder.as_mut()?;
                let out = match chunks.next() {
                    Some(chunk) => writer.chunk(&chunk),
                    None => {
                        let rest = writer.finish();
                        encoder = None;
                        rest
                    }
                };
                if !out.is_empty() {
                    return Some(Ok(out));
                }
            }
        })))
    } else {
        content::streamed(futures::stream::iter(std::iter::from_fn(move || chunks.next().map(Ok))))
    };
    let mut response = content::answer(status, content_type, body, compress);
    if !compress {
        response.headers_mut().insert(header::CONTENT_LENGTH, total.into());
    }
    response
}

/// Joins small pieces into chunks; a large piece passes as it is.
struct Chunks {
    pieces: std::vec::IntoIter<Bytes>,
    pending: Option<Bytes>,
}

impl Iterator for Chunks {
    type Item = Bytes;

    fn next(&mut self) -> Option<Bytes> {
        let mut chunk = BytesMut::new();
        loop {
            let Some(piece) = self.pending.take().or_else(|| self.pieces.next()) else {
                return (!chunk.is_empty()).then(|| chunk.freeze());
            };
            if piece.len() >= CHUNK {
                if chunk.is_empty() {
                    return Some(piece);
                }
                self.pending = Some(piece);
                return Some(chunk.freeze());
            }
            if chunk.is_empty() {
                chunk.reserve(CHUNK + (8 << 10));
            }
            chunk.put_slice(&piece);
            if chunk.len() >= CHUNK {
                return Some(chunk.freeze());
            }
        }
    }
}

// === Tables ===

/// A table's head up to its rows.
fn table_head(call: &Call, version: &str, meta: &Value, with_columns: bool) -> String {
    let columns: Vec<Value> = if with_columns {
        table::columns_for(&call.resource, &call.version().name).iter().map(table::Column::to_value).collect()
    } else {
        Vec::new()
    };
    let columns = Value::Array(columns);
    format!("{{\"kind\":\"Table\",\"apiVersion\":\"meta.k8s.io/{version}\",\"metadata\":{meta},\"columnDefinitions\":{columns},\"rows\":[")
}

/// One row.
fn row(call: &Call, object: &Stored, version: &str) -> Result<Bytes, ApiError> {
    let value = object.value();
    let converted;
    let value: &Value = if call.is_storage_version() {
        &value
    } else {
        converted = call.from_storage(&value)?;
        &converted
    };
    let mut row = json!({"cells": table::row(&call.resource, &call.version().name, value, call.now)});
    let conditions = table::row_conditions(&call.resource, value);
    if !conditions.is_empty() {
        row["conditions"] = Value::Array(conditions);
    }
    match call.query.get("includeObject").unwrap_or_default() {
        "None" => row["object"] = Value::Null,
        "Object" => row["object"] = value.clone(),
        _ => {
            row["object"] = json!({"kind": "PartialObjectMetadata", "apiVersion": format!("meta.k8s.io/{version}"), "metadata": value["metadata"]});
        }
    }
    serde_json::to_vec(&row).map(Bytes::from).map_err(ApiError::internal)
}

fn table_reply(call: &Call, status: StatusCode, version: &str, meta: &Value, rows: Vec<Bytes>) -> Reply {
    let all = json_list(table_head(call, version, meta, true), rows);
    if call.output.media == Media::Json && !call.output.pretty {
        return pieces(status, content::JSON, all, call.gzip());
    }
    let value: Value = serde_json::from_slice(&all.concat()).unwrap_or_default();
    content::respond(status, call.output.media.as_str(), content::encode_plain(&value, call.output.media, call.output.pretty), call.gzip())
}

// === Watch frames ===

/// One event of a watch as a frame: a line of JSON, or a length and a protobuf message.
pub(crate) fn frame(kind: &str, api_version: &str, object_kind: &str, encoding: Encoding, object: &[u8]) -> Bytes {
    match encoding {
        Encoding::Json => {
            let mut frame = BytesMut::with_capacity(object.len() + kind.len() + 24);
            frame.put_slice(b"{\"type\":\"");
            frame.put_slice(kind.as_bytes());
            frame.put_slice(b"\",\"object\":");
            frame.put_slice(object);
            frame.put_slice(b"}\n");
            frame.freeze()
        }
        Encoding::Protobuf => {
            let raw = envelope(api_version, object_kind, object);
            let event = field_len(kind.len()) + field_len(field_len(raw.len()));
            let mut frame = BytesMut::with_capacity(event + 4);
            frame.put_u32(event as u32);
            put_field(&mut frame, 1, kind.as_bytes());
            frame.put_u8(0x12);
            put_varint(&mut frame, field_len(raw.len()));
            put_field(&mut frame, 1, &raw);
            frame.freeze()
        }
    }
}

/// One event of a watch of tables: a table of one row, with its columns in the first one only.
pub(crate) fn table_frame(call: &Call, kind: &str, object: &Stored, version: &str, with_columns: bool) -> Result<Bytes, ApiError> {
    let meta = json!({"resourceVersion": object.revision.to_string()});
    let table = json_list(table_head(call, version, &meta, with_columns), vec![row(call, object, version)?]).concat();
    Ok(frame(kind, "", "", Encoding::Json, table.trim_ascii_end()))
}

/// A bookmark: the kind of the objects (or of what stands for them), nothing but a revision.
pub(crate) fn bookmark(call: &Call, revision: u64, ends_initial: bool) -> Result<Bytes, ApiError> {
    let form = form(call, call.output);
    let kind = if form.metadata_only { "PartialObjectMetadata" } else { call.resource.kind.as_str() };
    let mut metadata = json!({"resourceVersion": revision.to_string()});
    if ends_initial {
        metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
    }
    let object = json!({"kind": kind, "apiVersion": &*form.api_version, "metadata": metadata});
    if let As::Table(version) = call.output.shape {
        let partial = json!({"kind": "PartialObjectMetadata", "apiVersion": META_V1, "metadata": object["metadata"]});
        let row = json!({"cells": [], "object": partial});
        let head = table_head(call, version, &json!({"resourceVersion": revision.to_string()}), false);
        let table = json_list(head, vec![row.to_string().into()]).concat();
        return Ok(frame("BOOKMARK", "", "", Encoding::Json, table.trim_ascii_end()));
    }
    let bytes = match (form.encoding, form.metadata_only) {
        (Encoding::Json, _) => Bytes::from(object.to_string()),
        (Encoding::Protobuf, true) => meta_message("PartialObjectMetadata", &object)?,
        (Encoding::Protobuf, false) => message(call, &object)?,
    };
    Ok(frame("BOOKMARK", &form.api_version, kind, form.encoding, &bytes))
}

/// An error in the middle of a watch.
pub(crate) fn error_frame(call: &Call, error: &ApiError) -> Bytes {
    let status = error.to_status();
    if call.output.media == Media::Protobuf
        && let Ok(envelope) = protobuf::encode(&Schemas::builtin(), &status)
    {
        let event = field_len(5) + field_len(field_len(envelope.len()));
        let mut frame = BytesMut::with_capacity(event + 4);
        frame.put_u32(event as u32);
        put_field(&mut frame, 1, b"ERROR");
        frame.put_u8(0x12);
        put_varint(&mut frame, field_len(envelope.len()));
        put_field(&mut frame, 1, &envelope);
        return frame.freeze();
    }
    frame("ERROR", "", "", Encoding::Json, status.to_string().as_bytes())
}

// === Protobuf's few bytes around a message ===

const MAGIC: &[u8] = b"k8s\0";
/// contentEncoding and contentType, empty.
const ENVELOPE_TAIL: &[u8] = &[0x1a, 0, 0x22, 0];

/// `runtime.Unknown` around a message.
pub(crate) fn envelope(api_version: &str, kind: &str, message: &[u8]) -> Bytes {
    let mut bytes = envelope_head(api_version, kind, message.len());
    bytes.put_slice(message);
    bytes.put_slice(ENVELOPE_TAIL);
    bytes.freeze()
}

fn envelope_head(api_version: &str, kind: &str, message_len: usize) -> BytesMut {
    let type_meta = field_len(api_version.len()) + field_len(kind.len());
    let mut bytes = BytesMut::with_capacity(MAGIC.len() + type_meta + message_len + 24);
    bytes.put_slice(MAGIC);
    bytes.put_u8(0x0a);
    put_varint(&mut bytes, type_meta);
    put_field(&mut bytes, 1, api_version.as_bytes());
    put_field(&mut bytes, 2, kind.as_bytes());
    bytes.put_u8(0x12);
    put_varint(&mut bytes, message_len);
    bytes
}

fn put_varint(bytes: &mut BytesMut, mut n: usize) {
    while n >= 0x80 {
        bytes.put_u8((n as u8) | 0x80);
        n >>= 7;
    }
    bytes.put_u8(n as u8);
}

fn varint_len(n: usize) -> usize {
    (usize::BITS - (n | 1).leading_zeros()).div_ceil(7) as usize
}

/// The length of a length-delimited field with a one-byte tag.
fn field_len(len: usize) -> usize {
    1 + varint_len(len) + len
}

fn put_field(bytes: &mut BytesMut, number: u8, data: &[u8]) {
    bytes.put_u8(number << 3 | 2);
    put_varint(bytes, data.len());
    bytes.put_slice(data);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn varints() {
        for (n, len) in [(0, 1), (1, 1), (127, 1), (128, 2), (16_383, 2), (16_384, 3), (1 << 21, 4)] {
            let mut bytes = BytesMut::new();
            put_varint(&mut bytes, n);
            assert_eq!((bytes.len(), varint_len(n)), (len, len), "{n}");
        }
    }

    #[test]
    fn chunks_keep_every_byte() {
        let sizes = [10, CHUNK, 5, CHUNK * 3, 1, CHUNK - 1, 7, 100_000, 0, 3];
        let pieces: Vec<Bytes> = sizes.iter().enumerate().map(|(i, n)| Bytes::from(vec![i as u8; *n])).collect();
        let chunks: Vec<Bytes> = Chunks { pieces: pieces.clone().into_iter(), pending: None }.collect();
        assert_eq!(chunks.concat(), pieces.concat());
        assert!(chunks.len() < sizes.len());
    }

    #[test]
    fn envelopes() {
        let bytes = envelope("v1", "Pod", b"abc");
        assert_eq!(&bytes[..], b"k8s\0\x0a\x09\x0a\x02v1\x12\x03Pod\x12\x03abc\x1a\0\x22\0");
        let list = protobuf_list("v1", "PodList", b"m", vec![Bytes::from_static(b"ab"), Bytes::from_static(b"c")]).concat();
        assert_eq!(&list[..], b"k8s\0\x0a\x0d\x0a\x02v1\x12\x07PodList\x12\x0a\x0a\x01m\x12\x02ab\x12\x01c\x1a\0\x22\0");
    }
}
