//! Requests about resources: from a parsed path to an answer, the same way for every resource.
//!
//! Invariants:
//! - No code here knows a kind, but for the subresources that upstream wrote by hand, too ([`crate::subresources`]).
//! - Between decoding and storage an object is in its storage version; the request's version exists at the two ends.
//! - A body is parsed once; an object that is written is serialised once.
//!
//! Code map: [`query`] options; [`decode`] bodies; [`write`] create, update, patch; [`patch`] the four patch types;
//! [`delete`] deletion; [`read`] get and list; [`watch`] watches; [`encode`] objects to bytes,
//! [`packed`] compressed lists.

pub mod decode;
pub mod delete;
pub mod encode;
pub mod packed;
pub mod patch;
pub mod query;
pub mod read;
pub mod watch;
pub mod write;

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use jiff::Timestamp;
use parking_lot::Mutex;
use serde_json::Value;
use windlass_api::registry::{Resource, Version};
use windlass_api::strategy::{Context, Requester};
use windlass_api::{ApiError, convert, meta};

use crate::admission::{AdmissionRequest, Operation};
use crate::content::{self, Offer, Output, Reply};
use crate::core::Core;
use crate::request::{RequestInfo, UserInfo};
use crate::storage::Stored;
use query::Query;

/// One request about a resource.
pub struct Call {
    pub core: Arc<Core>,
    pub info: RequestInfo,
    pub user: UserInfo,
    requester: Requester,
    pub query: Query,
    pub(crate) raw_query: String,
    pub headers: HeaderMap,
    pub method: http::Method,
    /// The connection's: upgrades and peers.
    pub extensions: http::Extensions,
    pub resource: Arc<Resource>,
    /// The row that holds the objects (another one for `events.k8s.io`).
    pub stored_as: Arc<Resource>,
    version: usize,
    storage_api_version: String,
    pub output: Output,
    pub warnings: Mutex<Vec<String>>,
    pub now: Timestamp,
}

/// What a handler answers.
pub enum Answer {
    /// An object as it is stored.
    Stored(StatusCode, Arc<Stored>),
    /// An object in its storage version that is not stored (dry run).
    Value(StatusCode, Value),
    /// A document of its own kind (Status, Scale, reviews), as it is.
    Document(StatusCode, Value),
    /// Anything else.
    Raw(Reply),
}

impl Call {
    /// Finds what the request names. 404 for resources and versions that are not served here.
    pub fn new(core: Arc<Core>, info: RequestInfo, user: UserInfo, query: Query, headers: HeaderMap) -> Result<Call, ApiError> {
        let registry = core.objects.registry();
        let found = registry.find(&info.api_group, &info.api_version, &info.resource);
        let resource = found.ok_or_else(|| absent(&core, &info))?;
        let version = resource.versions.iter().position(|v| v.name == info.api_version).ok_or_else(ApiError::no_such_path)?;
        let stored_as = match &resource.stored_as {
            Some((group, plural)) => registry.find_resource(group, plural).unwrap_or_else(|| resource.clone()),
            None => resource.clone(),
        };
        let requester =
            Requester { name: user.name.clone(), uid: user.uid.clone(), groups: user.groups.clone(), extra: user.extra.clone() };
        let call = Call {
            core,
            info,
            user,
            requester,
            query,
            raw_query: String::new(),
            headers,
            method: http::Method::GET,
            extensions: http::Extensions::new(),
            storage_api_version: stored_as.api_version(&stored_as.storage_version),
            resource,
            stored_as,
            version,
            output: Output::default(),
            warnings: Mutex::default(),
            now: Timestamp::now(),
        };
        call.check_path()?;
        Ok(call)
    }

    /// Whether the path fits the resource's scope, and its parts are names.
    fn check_path(&self) -> Result<(), ApiError> {
        let info = &self.info;
        let is_namespace = info.api_group.is_empty() && info.resource == "namespaces";
        for (what, part) in [("Name", &info.name), ("Namespace", &info.namespace)] {
            if part.is_empty() {
                continue;
            }
            let problems = windlass_api::content::path_segment(part);
            if !problems.is_empty() {
                return Err(ApiError::bad_request(format!("{what} parameter invalid: {part:?}: {}", problems.join(";"))));
            }
        }
        if !self.resource.namespaced && !info.namespace.is_empty() && !is_namespace {
            return Err(ApiError::no_such_path());
        }
        let named = info.parts.len() > 1;
        if self.resource.namespaced && info.namespace.is_empty() {
            if named {
                return Err(ApiError::no_such_path());
            }
            if !matches!(info.verb.as_str(), "list" | "watch") {
                return Err(ApiError::method_not_supported(&self.resource.group, &self.resource.plural, &info.verb));
            }
        }
        let misplaced = match info.verb.as_str() {
            "update" | "patch" => !named,
            "create" => named && info.subresource.is_empty(),
            _ => false,
        };
        if misplaced {
            return Err(ApiError::method_not_supported(&self.resource.group, &self.resource.plural, &info.verb));
        }
        if info.parts.len() > 3 && info.subresource != "proxy" {
            return Err(ApiError::no_such_path());
        }
        Ok(())
    }

    pub fn version(&self) -> &Version {
        &self.resource.versions[self.version]
    }

    /// `apps/v1`: the version of the request.
    pub fn api_version(&self) -> String {
        self.resource.api_version(&self.version().name)
    }

    /// The version that the store holds.
    pub fn storage_api_version(&self) -> &str {
        &self.storage_api_version
    }

    /// The same request about one object of its collection.
    pub fn for_object(&self, namespace: &str, name: &str) -> Call {
        let mut info = self.info.clone();
        info.namespace = namespace.to_owned();
        info.name = name.to_owned();
        Call {
            core: self.core.clone(),
            info,
            user: self.user.clone(),
            requester: self.requester.clone(),
            query: self.query.clone(),
            raw_query: String::new(),
            headers: self.headers.clone(),
            method: self.method.clone(),
            extensions: http::Extensions::new(),
            resource: self.resource.clone(),
            stored_as: self.stored_as.clone(),
            version: self.version,
            storage_api_version: self.storage_api_version.clone(),
            output: self.output,
            warnings: Mutex::default(),
            now: self.now,
        }
    }

    /// The namespace of the objects; empty for cluster-scoped resources.
    pub fn namespace(&self) -> &str {
        if self.resource.namespaced { &self.info.namespace } else { "" }
    }

    pub fn name(&self) -> &str {
        &self.info.name
    }

    pub fn subresource(&self) -> Option<&str> {
        Some(self.info.subresource.as_str()).filter(|s| !s.is_empty())
    }

    /// What a strategy may know.
    pub fn context(&self) -> Context<'_> {
        Context {
            resource: &self.stored_as,
            version: &self.stored_as.storage_version,
            subresource: self.subresource(),
            now: self.now,
            user: Some(&self.requester),
        }
    }

    pub fn warn(&self, text: impl Into<String>) {
        self.warnings.lock().push(text.into());
    }

    pub fn raw_query(&self) -> &str {
        &self.raw_query
    }

    pub fn not_found(&self) -> ApiError {
        ApiError::not_found(&self.resource.group, &self.resource.plural, self.name())
    }

    pub fn gzip(&self) -> bool {
        content::accepts_gzip(&self.headers)
    }

    /// What objects of this resource can be answered as.
    pub fn offer(&self, stream: bool) -> Offer {
        Offer { protobuf: !self.resource.custom, transforms: true, stream }
    }

    /// Whether objects are stored in the version and group that the request is in.
    pub fn is_storage_version(&self) -> bool {
        self.resource.stored_as.is_none() && self.version().name == self.resource.storage_version
    }

    /// From the request's version to the storage version.
    pub fn to_storage(&self, object: Value) -> Result<Value, ApiError> {
        if self.is_storage_version() {
            return Ok(object);
        }
        self.check_conversion()?;
        convert::convert(&self.core.objects.registry(), &object, self.storage_api_version())
    }

    /// Conversion webhooks are not called; objects are then served in their storage version only.
    fn check_conversion(&self) -> Result<(), ApiError> {
        match &self.resource.definition {
            Some(definition) if definition.conversion["strategy"] == "Webhook" => Err(ApiError::not_implemented(format!(
                "{} asks for a conversion webhook, which this server does not call; use version {}",
                definition.name, self.resource.storage_version
            ))),
            _ => Ok(()),
        }
    }

    /// From the storage version to the request's version.
    pub fn from_storage(&self, object: &Value) -> Result<Value, ApiError> {
        if self.is_storage_version() {
            return Ok(object.clone());
        }
        self.check_conversion()?;
        convert::convert(&self.core.objects.registry(), object, &self.api_version())
    }

    /// A write as admission sees it.
    pub fn admission<'a>(
        &'a self,
        operation: Operation,
        name: &'a str,
        object: Option<Value>,
        old: Option<&'a Value>,
        options: &'a Value,
        dry_run: bool,
    ) -> AdmissionRequest<'a> {
        AdmissionRequest {
            operation,
            resource: &self.stored_as,
            version: &self.info.api_version,
            subresource: &self.info.subresource,
            namespace: self.admission_namespace(),
            name,
            user: &self.user,
            object,
            old,
            options,
            dry_run,
            warnings: Mutex::default(),
        }
    }

    /// A namespace object is in its own namespace, as upstream's request info has it.
    fn admission_namespace(&self) -> &str {
        &self.info.namespace
    }

    /// The name of who manages fields: what the client says, or the first word of its `User-Agent`.
    pub fn manager<'a>(&'a self, given: &'a str) -> &'a str {
        if !given.is_empty() {
            return given;
        }
        let agent = self.headers.get(http::header::USER_AGENT).and_then(|v| v.to_str().ok()).unwrap_or_default();
        let first = agent.split('/').next().unwrap_or_default();
        let end = (0..=first.len().min(128)).rev().find(|i| first.is_char_boundary(*i)).unwrap_or(0);
        if end == 0 { "unknown" } else { &first[..end] }
    }
}

/// Why nothing is served under a path: nothing ever was, or another server should.
fn absent(core: &Core, info: &RequestInfo) -> ApiError {
    let name = format!("{}.{}", info.api_version, info.api_group);
    let service = core.objects.resource("apiregistration.k8s.io", "apiservices").and_then(|r| core.objects.cached(&r, "", &name));
    match service {
        Some(service) if service.value()["spec"]["service"].is_object() => {
            ApiError::service_unavailable(format!("APIService {name} names another server, and this one does not forward requests"))
        }
        _ => ApiError::no_such_path(),
    }
}

/// Routes a request to its handler.
pub async fn serve(call: &mut Call, body: content::RequestBody) -> Result<Answer, ApiError> {
    use windlass_api::registry::Storage;
    if let Some(warning) = call.version().deprecated_warning.clone() {
        call.warn(warning);
        crate::metrics::deprecated(&call.resource.group, &call.version().name, &call.resource.plural, &call.info.subresource);
    }
    if call.subresource().is_some() {
        return crate::subresources::serve(call, body).await;
    }
    let verb = call.info.verb.clone();
    if !call.version().has_verb(&verb) {
        return Err(ApiError::method_not_supported(&call.resource.group, &call.resource.plural, &verb));
    }
    let stream = verb == "watch";
    call.output = content::negotiate(&call.headers, &call.query, call.offer(stream))?;
    match call.resource.storage {
        Storage::Virtual(owner) => return crate::virtuals::serve(call, owner).await,
        Storage::ReviewOnly => return crate::reviews::serve(call, body).await,
        Storage::Store => {}
    }
    match verb.as_str() {
        "get" => read::get(call).await,
        "list" => read::list(call).await,
        "watch" => watch::watch(call).await,
        "create" => {
            let bytes = content::read_body(&call.headers, body).await?;
            write::create(call, &bytes).await
        }
        "update" => {
            let bytes = content::read_body(&call.headers, body).await?;
            write::update(call, &bytes).await
        }
        "patch" => {
            let bytes = content::read_body(&call.headers, body).await?;
            write::patch(call, bytes).await
        }
        "delete" => {
            let bytes = content::read_body(&call.headers, body).await?;
            delete::delete(call, &bytes).await
        }
        "deletecollection" => {
            let bytes = content::read_body(&call.headers, body).await?;
            delete::delete_collection(call, &bytes).await
        }
        _ => Err(ApiError::method_not_supported(&call.resource.group, &call.resource.plural, &verb)),
    }
}

/// Sets the system fields that an update may leave out, and keeps those that it may not touch.
pub(crate) fn keep_system_fields(new: &mut Value, old: &Value) {
    for key in ["uid", "creationTimestamp"] {
        if meta::text(new, key).is_empty() {
            copy(new, old, key);
        }
    }
    for key in ["deletionTimestamp", "deletionGracePeriodSeconds", "generation"] {
        copy(new, old, key);
    }
    meta::remove(new, "selfLink");
}

fn copy(new: &mut Value, old: &Value, key: &str) {
    match old["metadata"].get(key) {
        Some(value) => meta::set(new, key, value.clone()),
        None => drop(meta::remove(new, key)),
    }
}

/// A body that was read in full.
pub type Body = Bytes;
