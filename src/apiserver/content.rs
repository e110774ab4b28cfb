//! What a client sends and wants: media types, body limits, decompression, compression.
//!
//! Follows upstream's `endpoints/handlers/negotiation`. Everything read from a client is bounded here.

use std::io::{Read, Write};

use bytes::{Bytes, BytesMut};
use flate2::Compression;
use flate2::write::GzEncoder;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use serde_json::Value;
use windlass_api::{ApiError, protobuf};

use crate::request::truthy;
use crate::rest::query::Query;

/// Errors of bodies.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
/// Why a body broke off.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BodyError(pub BoxError);

/// Every response body of this server.
pub type ReplyBody = UnsyncBoxBody<Bytes, BodyError>;
/// A response of this server.
pub type Reply = Response<ReplyBody>;
/// Every request body, whatever transport it came by.
pub type RequestBody = UnsyncBoxBody<Bytes, BodyError>;

/// The largest request body, as upstream (`MaxRequestBodyBytes`).
pub const MAX_BODY: usize = 3 << 20;
/// Responses shorter than this are not compressed, as upstream.
pub const GZIP_THRESHOLD: usize = 128 << 10;

pub const JSON: &str = "application/json";
pub const YAML: &str = "application/yaml";
pub const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";

/// Media types that objects can be read and written in.
const OBJECT_TYPES: [&str; 3] = [JSON, YAML, PROTOBUF];
/// The same for kinds without protobuf.
const CUSTOM_TYPES: [&str; 2] = [JSON, YAML];

/// An encoding of whole documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Media {
    #[default]
    Json,
    Yaml,
    Protobuf,
}

impl Media {
    pub fn as_str(self) -> &'static str {
        match self {
            Media::Json => JSON,
            Media::Yaml => YAML,
            Media::Protobuf => PROTOBUF,
        }
    }
}

/// What kind of document stands for the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum As {
    #[default]
    Object,
    /// `meta.k8s.io` Table of this version (`v1` or `v1beta1`).
    Table(&'static str),
    PartialMetadata(&'static str),
    PartialMetadataList(&'static str),
}

/// The outcome of `Accept`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Output {
    pub media: Media,
    pub shape: As,
    pub pretty: bool,
}

/// What an endpoint can answer with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Objects in protobuf.
    pub protobuf: bool,
    /// Tables and partial metadata.
    pub transforms: bool,
    pub stream: bool,
}

impl Offer {
    fn names(self) -> &'static [&'static str] {
        if self.protobuf { &OBJECT_TYPES } else { &CUSTOM_TYPES }
    }
}

struct Clause<'a> {
    kind: &'a str,
    sub: &'a str,
    params: Vec<(&'a str, &'a str)>,
    q: f32,
}

/// The clauses of an `Accept` header, best first (equal ones in the header's order).
fn clauses(header: &str) -> Vec<Clause<'_>> {
    let mut all: Vec<Clause<'_>> = header
        .split(',')
        .take(64)
        .filter_map(|clause| {
            let mut parts = clause.split(';').map(str::trim);
            let (kind, sub) = parts.next()?.split_once('/')?;
            let mut q = 1.0;
            let mut params = Vec::new();
            for part in parts.take(16) {
                let Some((k, v)) = part.split_once('=') else { continue };
                let (k, v) = (k.trim(), v.trim().trim_matches('"'));
                if k == "q" { q = v.parse::<f32>().ok().filter(|q| q.is_finite()).unwrap_or(1.0) } else { params.push((k, v)) }
            }
            Some(Clause { kind: kind.trim(), sub: sub.trim(), params, q })
        })
        .collect();
    all.sort_by(|a, b| b.q.total_cmp(&a.q));
    all
}

/// Chooses how to answer. 406 when nothing that is accepted can be made.
pub fn negotiate(headers: &HeaderMap, query: &Query, offer: Offer) -> Result<Output, ApiError> {
    let accept = headers.get_all(header::ACCEPT).iter().filter_map(|v| v.to_str().ok()).collect::<Vec<_>>().join(",");
    let pretty = pretty(headers, query);
    if accept.is_empty() {
        return Ok(Output { pretty, ..Output::default() });
    }
    for clause in clauses(&accept) {
        for media in [Media::Json, Media::Yaml, Media::Protobuf] {
            let (kind, sub) = media.as_str().split_once('/').unwrap_or_default();
            let fits = (clause.kind == kind && (clause.sub == sub || clause.sub == "*")) || (clause.kind == "*" && clause.sub == "*");
            if !fits || (offer.stream && media == Media::Yaml) {
                continue;
            }
            if let Some(mut output) = accept_clause(&clause, media, offer) {
                output.pretty |= pretty;
                return Ok(output);
            }
        }
    }
    Err(ApiError::not_acceptable(offer.names()))
}

/// Whether a clause's parameters ask for something that can be done.
fn accept_clause(clause: &Clause<'_>, media: Media, offer: Offer) -> Option<Output> {
    let (mut kind, mut group, mut version) = ("", "", "");
    let mut pretty = false;
    for (k, v) in &clause.params {
        match *k {
            "as" => kind = v,
            "g" => group = v,
            "v" => version = v,
            "stream" if !v.is_empty() && *v != "watch" => return None,
            "sv" if !v.is_empty() => return None,
            "pretty" => pretty = *v == "1",
            _ => {}
        }
    }
    let shape = if kind.is_empty() && group.is_empty() && version.is_empty() {
        if media == Media::Protobuf && !offer.protobuf {
            return None;
        }
        As::Object
    } else {
        let version = match version {
            "v1" => "v1",
            "v1beta1" => "v1beta1",
            _ => return None,
        };
        if !offer.transforms || group != "meta.k8s.io" {
            return None;
        }
        match kind {
            "Table" => As::Table(version),
            "PartialObjectMetadata" => As::PartialMetadata(version),
            "PartialObjectMetadataList" => As::PartialMetadataList(version),
            _ => return None,
        }
    };
    Some(Output { media, shape, pretty })
}

/// Humans get indented JSON, unless they say otherwise.
fn pretty(headers: &HeaderMap, query: &Query) -> bool {
    if let Some(wish) = query.get("pretty").filter(|w| !w.is_empty()) {
        return matches!(wish, "1" | "t" | "T" | "true" | "TRUE" | "True");
    }
    let agent = headers.get(header::USER_AGENT).and_then(|v| v.to_str().ok()).unwrap_or_default();
    ["curl", "Wget", "Mozilla/5.0"].iter().any(|human| agent.starts_with(human))
}

/// The encoding of a request's body; 415 if it is none of ours.
pub fn input_media(headers: &HeaderMap, offer_protobuf: bool) -> Result<Media, ApiError> {
    let offer = Offer { protobuf: offer_protobuf, transforms: false, stream: false };
    match content_type(headers).as_str() {
        "" | JSON => Ok(Media::Json),
        YAML => Ok(Media::Yaml),
        PROTOBUF if offer_protobuf => Ok(Media::Protobuf),
        _ => Err(ApiError::unsupported_media_type(offer.names())),
    }
}

/// `Content-Type` without its parameters, in lower case.
pub fn content_type(headers: &HeaderMap) -> String {
    let value = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

/// Reads a request's body, at most [`MAX_BODY`] bytes of it before and after decompression.
pub async fn read_body(headers: &HeaderMap, body: RequestBody) -> Result<Bytes, ApiError> {
    let too_large = || ApiError::request_entity_too_large(format!("limit is {MAX_BODY}"));
    let announced = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()).and_then(|v| v.parse::<usize>().ok());
    if announced.is_some_and(|n| n > MAX_BODY) {
        return Err(too_large());
    }
    let mut body = body;
    let mut first: Option<Bytes> = None;
    let mut all = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| ApiError::bad_request(format!("unable to read the request body: {e}")))?;
        let Ok(data) = frame.into_data() else { continue };
        if all.len() + first.as_ref().map_or(0, Bytes::len) + data.len() > MAX_BODY {
            return Err(too_large());
        }
        match first.take() {
            None if all.is_empty() => first = Some(data),
            None => all.extend_from_slice(&data),
            Some(before) => {
                all.reserve(before.len() + data.len());
                all.extend_from_slice(&before);
                all.extend_from_slice(&data);
            }
        }
    }
    let bytes = first.unwrap_or_else(|| all.freeze());
    match headers.get(header::CONTENT_ENCODING).map(|v| v.as_bytes()) {
        None | Some(b"" | b"identity") => Ok(bytes),
        Some(b"gzip") => {
            let mut plain = Vec::new();
            let mut reader = flate2::read::GzDecoder::new(&bytes[..]).take(MAX_BODY as u64 + 1);
            reader.read_to_end(&mut plain).map_err(|e| ApiError::bad_request(format!("the request body is not gzip: {e}")))?;
            if plain.len() > MAX_BODY {
                return Err(too_large());
            }
            Ok(plain.into())
        }
        Some(other) => {
            Err(ApiError::new(415, "UnsupportedMediaType", format!("content encoding {:?} is not supported; use gzip or none", String::from_utf8_lossy(other))))
        }
    }
}

/// Whether the client takes gzip.
pub fn accepts_gzip(headers: &HeaderMap) -> bool {
    headers.get_all(header::ACCEPT_ENCODING).iter().filter_map(|v| v.to_str().ok()).flat_map(|v| v.split(',')).any(|clause| {
        let mut parts = clause.split(';').map(str::trim);
        parts.next() == Some("gzip") && !parts.any(|p| p.strip_prefix("q=").is_some_and(|q| q.parse() == Ok(0.0_f32)))
    })
}

// === Bodies ===

/// A complete body.
pub fn full(bytes: impl Into<Bytes>) -> ReplyBody {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

/// A body out of a stream of chunks.
pub fn streamed<S>(chunks: S) -> ReplyBody
where
    S: futures::Stream<Item = Result<Bytes, BodyError>> + Send + 'static,
{
    StreamBody::new(futures::StreamExt::map(chunks, |chunk| chunk.map(Frame::data))).boxed_unsync()
}

/// Wraps any body that hyper or kube hands us.
pub fn request_body<B>(body: B) -> RequestBody
where
    B: Body + Send + 'static,
    B::Data: bytes::Buf + Send,
    B::Error: Into<BoxError>,
{
    use bytes::Buf;
    body.map_frame(|f| f.map_data(|mut d| d.copy_to_bytes(d.remaining()))).map_err(|e| BodyError(e.into())).boxed_unsync()
}

/// A response with a body that is complete, compressed if that is wanted and worth it.
pub fn respond(status: StatusCode, content_type: &'static str, bytes: Bytes, gzip: bool) -> Reply {
    let compress = gzip && bytes.len() > GZIP_THRESHOLD;
    answer(status, content_type, if compress { full(gzip_all(&bytes)) } else { full(bytes) }, compress)
}

/// A response with the headers that every document has; `compressed` says what `body` is.
pub fn answer(status: StatusCode, content_type: &'static str, body: ReplyBody, compressed: bool) -> Reply {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
    if compressed {
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        headers.insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    }
    response
}

/// Compresses a document that is kept.
pub fn gzip_bytes(bytes: &[u8]) -> Bytes {
    gzip_all(bytes)
}

/// The document again; only for what [`gzip_bytes`] made.
pub fn gunzip_bytes(bytes: &[u8]) -> Bytes {
    let mut plain = Vec::new();
    let _ = flate2::read::GzDecoder::new(bytes).read_to_end(&mut plain);
    plain.into()
}

fn gzip_all(bytes: &[u8]) -> Bytes {
    let mut encoder = GzEncoder::new(Vec::with_capacity(bytes.len() / 4), Compression::fast());
    // Writing to memory does not fail.
    let _ = encoder.write_all(bytes);
    encoder.finish().unwrap_or_default().into()
}

/// Compresses chunks as they pass.
pub struct Gzip(Option<GzEncoder<Vec<u8>>>);

impl Gzip {
    pub fn new() -> Gzip {
        Gzip(Some(GzEncoder::new(Vec::new(), Compression::fast())))
    }

    /// Takes a chunk in; gives out what is ready.
    pub fn chunk(&mut self, bytes: &[u8]) -> Bytes {
        let Some(encoder) = &mut self.0 else { return Bytes::new() };
        let _ = encoder.write_all(bytes);
        std::mem::take(encoder.get_mut()).into()
    }

    /// The rest.
    pub fn finish(&mut self) -> Bytes {
        self.0.take().and_then(|e| e.finish().ok()).unwrap_or_default().into()
    }
}

impl Default for Gzip {
    fn default() -> Self {
        Self::new()
    }
}

/// Encodes a document of this server's own (Status, options, reviews) in JSON or YAML.
pub fn encode_plain(value: &Value, media: Media, pretty: bool) -> Bytes {
    let mut bytes = match media {
        Media::Yaml => match serde_saphyr::to_string(value) {
            Ok(text) => return text.into(),
            Err(_) => return Bytes::new(),
        },
        _ if pretty => serde_json::to_vec_pretty(value).unwrap_or_default(),
        _ => serde_json::to_vec(value).unwrap_or_default(),
    };
    bytes.push(b'\n');
    bytes.into()
}

/// An error as a response, in what the client accepts as far as a `Status` can be that.
pub fn error_reply(error: &ApiError, headers: &HeaderMap) -> Reply {
    let query = Query::default();
    let offer = Offer { protobuf: true, transforms: false, stream: false };
    let output = negotiate(headers, &query, offer).unwrap_or_default();
    status_reply(&error.to_status(), error.code, output)
}

/// A `Status` as a response.
pub fn status_reply(status: &Value, code: u16, output: Output) -> Reply {
    let (content_type, bytes) = match output.media {
        Media::Protobuf => match protobuf::encode(&windlass_api::schema::Schemas::builtin(), status) {
            Ok(bytes) => (PROTOBUF, Bytes::from(bytes)),
            Err(_) => (JSON, encode_plain(status, Media::Json, false)),
        },
        media => (media.as_str(), encode_plain(status, media, output.pretty)),
    };
    let code = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = respond(code, content_type, bytes, false);
    if let Some(seconds) = status["details"]["retryAfterSeconds"].as_u64() {
        response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    response
}

/// Adds `Warning` headers (RFC 7234, code 299) to a response, as upstream: no duplicates, bounded in number and size.
pub fn add_warnings(headers: &mut HeaderMap, warnings: &[String]) {
    const MOST: usize = 4 << 10;
    let mut total = 0;
    let mut seen: Vec<&str> = Vec::new();
    for warning in warnings {
        if seen.contains(&warning.as_str()) {
            continue;
        }
        seen.push(warning);
        let mut text: String = warning.chars().filter(|c| !c.is_control()).collect();
        if total + text.len() > MOST {
            let room = MOST.saturating_sub(total).min(256);
            let cut = (0..=room).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
            text.truncate(cut);
        }
        if text.is_empty() {
            break;
        }
        total += text.len();
        let quoted = text.replace('\\', "\\\\").replace('"', "\\\"");
        if let Ok(value) = HeaderValue::from_bytes(format!("299 - \"{quoted}\"").as_bytes()) {
            headers.append(header::WARNING, value);
        }
    }
}

/// Reads a boolean option as upstream's converter does.
pub fn option_bool(value: Option<&str>) -> bool {
    value.is_some_and(|v| !v.is_empty() && truthy(v))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(accept: &str, offer: Offer, want: Result<(Media, As), u16>) {
        let mut headers = HeaderMap::new();
        if !accept.is_empty() {
            headers.insert(header::ACCEPT, accept.parse().expect("a header"));
        }
        let got = negotiate(&headers, &Query::default(), offer).map(|o| (o.media, o.shape)).map_err(|e| e.code);
        assert_eq!(got, want, "{accept}");
    }

    #[test]
    fn accept() {
        let all = Offer { protobuf: true, transforms: true, stream: false };
        let custom = Offer { protobuf: false, ..all };
        let plain = Offer { protobuf: true, transforms: false, stream: false };
        check("", all, Ok((Media::Json, As::Object)));
        check("*/*", all, Ok((Media::Json, As::Object)));
        check("application/*", all, Ok((Media::Json, As::Object)));
        check("application/yaml", all, Ok((Media::Yaml, As::Object)));
        check("application/vnd.kubernetes.protobuf, application/json", all, Ok((Media::Protobuf, As::Object)));
        check("application/vnd.kubernetes.protobuf,application/json", custom, Ok((Media::Json, As::Object)));
        check("application/vnd.kubernetes.protobuf", custom, Err(406));
        check("application/json;q=0.1, application/yaml;q=0.5", all, Ok((Media::Yaml, As::Object)));
        let kubectl = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";
        check(kubectl, all, Ok((Media::Json, As::Table("v1"))));
        check(kubectl, plain, Ok((Media::Json, As::Object)));
        check("application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1", custom, Ok((Media::Protobuf, As::PartialMetadataList("v1"))));
        check("application/json;as=Nonsense;g=meta.k8s.io;v=v1", all, Err(406));
        check("text/html", all, Err(406));
        check("application/json;stream=watch", Offer { stream: true, ..all }, Ok((Media::Json, As::Object)));
        check("application/json;stream=other", all, Err(406));
    }

    #[test]
    fn warnings_are_quoted_and_bounded() {
        let mut headers = HeaderMap::new();
        add_warnings(&mut headers, &["say \"hi\"\n".into(), "say \"hi\"\n".into(), "x".repeat(5000)]);
        let got: Vec<_> = headers.get_all(header::WARNING).iter().map(|v| v.to_str().expect("ASCII").to_owned()).collect();
        assert_eq!(got[0], "299 - \"say \\\"hi\\\"\"");
        assert_eq!(got[1].len(), 8 + 256);
        assert_eq!(got.len(), 2);
    }
}
