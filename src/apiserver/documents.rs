//! Documents about the API itself: discovery, OpenAPI, version groups.
//!
//! Built from the registry when first asked for, kept per registry snapshot with an ETag, gone with the next snapshot.
//! OpenAPI documents are large; they are kept compressed only.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use parking_lot::Mutex;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use windlass_api::registry::Registry;
use windlass_api::{ApiError, discovery, openapi, protobuf};

use crate::content::{self, Media, Offer, Reply};
use crate::rest::query::Query;

const AGGREGATED: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

/// What OpenAPI v2 in protobuf is called in answers. Clients ask for it with an `@` instead of the dot, which is no media type.
const OPENAPI_PROTOBUF: &str = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";

/// Documents of the present registry.
pub struct Documents {
    /// The address that clients are told to use (`serverAddressByClientCIDRs`).
    server: String,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    of: Weak<Registry>,
    documents: HashMap<String, Document>,
}

#[derive(Clone)]
struct Document {
    bytes: Bytes,
    etag: Arc<str>,
    gzip: bool,
}

impl Documents {
    pub fn new(server: String) -> Documents {
        Documents { server, kept: Mutex::default() }
    }

    /// `/api`, `/apis` and what is below them without a resource. The caller may see it.
    pub fn discovery(&self, registry: &Arc<Registry>, parts: &Parts, query: &Query) -> Result<Reply, ApiError> {
        let path = parts.uri.path().trim_matches('/');
        let segments: Vec<&str> = path.split('/').collect();
        let root = matches!(segments.as_slice(), ["api" | "apis"]);
        if root && wants_aggregated(&parts.headers) {
            let document = self.get(registry, &format!("aggregated/{path}"), false, || Ok(discovery::aggregated(registry, path == "api")))?;
            return Ok(self.reply(&document, &parts.headers, AGGREGATED, true));
        }
        let value = match segments.as_slice() {
            ["api"] => Some(discovery::api_versions(&self.server)),
            ["apis"] => Some(discovery::api_group_list(registry)),
            ["api", version] => discovery::api_resource_list(registry, "", version),
            ["apis", group] => discovery::api_group(registry, group),
            ["apis", group, version] => discovery::api_resource_list(registry, group, version),
            _ => None,
        };
        let value = value.ok_or_else(ApiError::no_such_path)?;
        let output = content::negotiate(&parts.headers, query, Offer { protobuf: true, transforms: false, stream: false })?;
        if output.media == Media::Protobuf {
            let bytes = protobuf::encode(&windlass_api::schema::Schemas::builtin(), &value).map_err(ApiError::internal)?;
            return Ok(content::respond(StatusCode::OK, content::PROTOBUF, bytes.into(), false));
        }
        Ok(content::respond(StatusCode::OK, output.media.as_str(), content::encode_plain(&value, output.media, output.pretty), content::accepts_gzip(&parts.headers)))
    }

    /// `/openapi/v2`, `/openapi/v3`, `/openapi/v3/...`.
    pub fn openapi(&self, registry: &Arc<Registry>, parts: &Parts) -> Result<Reply, ApiError> {
        let path = parts.uri.path().trim_matches('/').to_owned();
        let rest: Vec<&str> = path.split('/').skip(1).collect();
        match rest.as_slice() {
            ["v2"] => {
                let accept = parts.headers.get(header::ACCEPT).and_then(|v| v.to_str().ok()).unwrap_or_default();
                if accept.contains("proto-openapi") && !accept.contains("json") && !accept.contains("*/*") {
                    let document = self.make(registry, "openapi/v2.pb", true, || Ok(openapi::gnostic::encode(&openapi::v2(registry))))?;
                    return Ok(self.reply(&document, &parts.headers, OPENAPI_PROTOBUF, false));
                }
                let document = self.get(registry, "openapi/v2", true, || Ok(openapi::v2(registry)))?;
                Ok(self.reply(&document, &parts.headers, content::JSON, false))
            }
            ["v3"] => {
                let index = self.index(registry)?;
                Ok(self.reply(&index, &parts.headers, content::JSON, false))
            }
            ["v3", gv @ ..] => {
                let gv = gv.join("/");
                let document = self.get(registry, &path, true, || openapi::v3(registry, &gv).ok_or_else(ApiError::no_such_path))?;
                Ok(self.reply(&document, &parts.headers, content::JSON, true))
            }
            _ => Err(ApiError::no_such_path()),
        }
    }

    /// The index of OpenAPI v3 with a hash for each document, by which clients cache.
    fn index(&self, registry: &Arc<Registry>) -> Result<Document, ApiError> {
        self.get(registry, "openapi/v3", false, || Ok(openapi::v3_index(registry)))
    }

    fn get(&self, registry: &Arc<Registry>, key: &str, compress: bool, make: impl FnOnce() -> Result<Value, ApiError>) -> Result<Document, ApiError> {
        self.make(registry, key, compress, || serde_json::to_vec(&make()?).map_err(ApiError::internal))
    }

    /// A kept document, made when it is first asked for.
    fn make(&self, registry: &Arc<Registry>, key: &str, compress: bool, make: impl FnOnce() -> Result<Vec<u8>, ApiError>) -> Result<Document, ApiError> {
        {
            let mut kept = self.kept.lock();
            if kept.of.as_ptr() != Arc::as_ptr(registry) {
                *kept = Kept { of: Arc::downgrade(registry), documents: HashMap::new() };
            }
            if let Some(document) = kept.documents.get(key) {
                return Ok(document.clone());
            }
        }
        let bytes = make()?;
        let digest = Sha256::digest(&bytes);
        let etag: String = digest.iter().map(|b| format!("{b:02X}")).collect();
        let bytes = if compress { content::gzip_bytes(&bytes) } else { bytes.into() };
        let document = Document { bytes, etag: format!("\"{etag}\"").into(), gzip: compress };
        let mut kept = self.kept.lock();
        // Bounded by the number of group versions; asked paths that do not exist make no document.
        if kept.of.as_ptr() == Arc::as_ptr(registry) {
            kept.documents.insert(key.to_owned(), document.clone());
        }
        Ok(document)
    }

    fn reply(&self, document: &Document, headers: &HeaderMap, content_type: &'static str, cached: bool) -> Reply {
        let matches = headers.get(header::IF_NONE_MATCH).and_then(|v| v.to_str().ok()).is_some_and(|v| v.split(',').any(|e| e.trim().trim_start_matches("W/") == &*document.etag));
        let mut reply = if matches {
            content::respond(StatusCode::NOT_MODIFIED, content_type, Bytes::new(), false)
        } else if document.gzip && content::accepts_gzip(headers) {
            let mut reply = content::respond(StatusCode::OK, content_type, document.bytes.clone(), false);
            reply.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
            reply
        } else if document.gzip {
            content::respond(StatusCode::OK, content_type, content::gunzip_bytes(&document.bytes), false)
        } else {
            content::respond(StatusCode::OK, content_type, document.bytes.clone(), content::accepts_gzip(headers))
        };
        let headers = reply.headers_mut();
        if let Ok(etag) = HeaderValue::from_str(&document.etag) {
            headers.insert(header::ETAG, etag);
        }
        headers.insert(header::VARY, HeaderValue::from_static("Accept"));
        if cached {
            headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("public"));
        }
        reply
    }
}

/// kubectl and client-go ask for all groups and resources in one document.
fn wants_aggregated(headers: &HeaderMap) -> bool {
    let accept = headers.get_all(header::ACCEPT).iter().filter_map(|v| v.to_str().ok()).collect::<Vec<_>>().join(",");
    accept.split(',').next().is_some_and(|first| {
        let has = |what: &str| first.split(';').any(|p| p.trim() == what);
        has("as=APIGroupDiscoveryList") && has("g=apidiscovery.k8s.io") && has("v=v2") && first.trim_start().starts_with("application/json")
    })
}

/// `/.well-known/openid-configuration` and `/openid/v1/jwks`.
pub fn plain(value: &Value, content_type: &'static str) -> Reply {
    let mut reply = content::respond(StatusCode::OK, content_type, content::encode_plain(value, Media::Json, false), false);
    reply.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("public, max-age=3600"));
    reply
}

/// The list of paths that `/` answers, as far as they are fixed.
pub fn paths(registry: &Registry) -> Value {
    let mut paths: Vec<String> = ["/.well-known/openid-configuration", "/api", "/api/v1", "/apis", "/healthz", "/livez", "/metrics", "/openapi/v2", "/openapi/v3", "/openid/v1/jwks", "/readyz", "/version"]
        .map(str::to_owned)
        .into();
    for resource in registry.resources().filter(|r| !r.group.is_empty()) {
        paths.push(format!("/apis/{}", resource.group));
        paths.extend(resource.versions.iter().filter(|v| v.served).map(|v| format!("/apis/{}/{}", resource.group, v.name)));
    }
    paths.sort();
    paths.dedup();
    json!({"paths": paths})
}
