//! The pipeline: what every request passes through before and after its handler.
//!
//! RequestInfo → authentication (and impersonation) → authorization → in-flight limit → handler → encoding, metrics.
//! Places left: audit (around [`Core::handle`]) and priority and fairness (instead of [`Limits`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::request::Parts;
use http::{Method, header};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use windlass_api::ApiError;

use crate::admission::chain::Chain;
use crate::authn::Authn;
use crate::authz::{Attributes, Authorizer, Decision};
use crate::content::{self, Reply, RequestBody};
use crate::crd::Definitions;
use crate::documents::Documents;
use crate::hooks::Hooks;
use crate::kubelet::Kubelets;
use crate::metrics;
use crate::request::{RequestInfo, UserInfo};
use crate::rest::query::Query;
use crate::rest::{self, Call};
use crate::reviews::Reviews;
use crate::storage::Objects;
use crate::virtuals::Virtuals;

/// Set by [`crate::ApiServer::service_for`] on requests that come from within this process.
#[derive(Clone, Debug)]
pub(crate) struct InProcess(pub UserInfo);

/// Everything that handlers share.
pub struct Core {
    pub objects: Objects,
    pub authn: Authn,
    pub authorizer: Arc<dyn Authorizer>,
    pub admission: Chain,
    pub hooks: Hooks,
    pub documents: Documents,
    pub kubelets: Arc<Kubelets>,
    pub definitions: Definitions,
    pub reviews: Reviews,
    pub virtuals: Virtuals,
    pub limits: Limits,
    /// What a request may take that is not long-running.
    pub request_timeout: Duration,
    pub shutdown: CancellationToken,
    /// `https://host:port` by which members of the cluster reach this server.
    pub address: String,
}

/// The bounds on requests in flight (`--max-requests-inflight`, `--max-mutating-requests-inflight`).
pub struct Limits {
    reading: Arc<Semaphore>,
    mutating: Arc<Semaphore>,
}

impl Limits {
    /// 0 means no bound, as upstream; ours is then the most that a semaphore can count.
    pub fn new(reading: usize, mutating: usize) -> Limits {
        let bound = |n: usize| Arc::new(Semaphore::new(if n == 0 { Semaphore::MAX_PERMITS } else { n }));
        Limits { reading: bound(reading), mutating: bound(mutating) }
    }

    fn admit(&self, mutating: bool) -> Result<OwnedSemaphorePermit, ApiError> {
        let slots = if mutating { &self.mutating } else { &self.reading };
        slots.clone().try_acquire_owned().map_err(|_| ApiError::too_many_requests("Too many requests, please try again later.", 1))
    }
}

impl Core {
    /// Who asks; refuses a bad credential and, but for health, the lack of one.
    pub async fn identify(&self, parts: &mut Parts) -> Result<(UserInfo, Option<String>), ApiError> {
        if let Some(InProcess(user)) = parts.extensions.get::<InProcess>() {
            return Ok((user.clone(), None));
        }
        let who = self.authn.authenticate(parts).await?;
        let user = crate::authn::impersonate::impersonate(&*self.authorizer, who.user, parts)?;
        Ok((user, who.warning))
    }

    pub fn public_address(&self) -> &str {
        &self.address
    }

    /// May they? In memory, at once.
    pub fn authorize(&self, attributes: &Attributes<'_>) -> Result<(), ApiError> {
        match self.authorizer.authorize(attributes) {
            Decision::Allow(_) => Ok(()),
            Decision::Deny(reason) | Decision::NoOpinion(reason) => Err(attributes.forbidden(&reason)),
        }
    }

    /// Whether the caller also has another verb on the same object (create for an apply of something new).
    pub fn require(&self, call: &Call, verb: &str) -> Result<(), ApiError> {
        let mut attributes = Attributes::of(&call.user, &call.info);
        attributes.verb = verb;
        self.authorize(&attributes)
    }

    /// A request below `/api` or `/apis` that names a resource, or a discovery document.
    pub async fn handle(self: Arc<Self>, parts: Parts, body: RequestBody) -> Reply {
        let started = Instant::now();
        let info = RequestInfo::parse(&parts.method, parts.uri.path(), parts.uri.query().unwrap_or_default());
        let mut labels = metrics::Labels { verb: metrics::verb_label(&info.verb), ..metrics::Labels::default() };
        let headers = parts.headers.clone();
        let is_head = parts.method == Method::HEAD;
        let mut reply = match self.admitted(parts, body, info, &mut labels).await {
            Ok(reply) => reply,
            Err(error) => content::error_reply(&error, &headers),
        };
        labels.finished(reply.status().as_u16(), started.elapsed(), content_length(&reply));
        if is_head {
            *reply.body_mut() = content::full(bytes::Bytes::new());
        }
        reply
    }

    async fn admitted(self: Arc<Self>, mut parts: Parts, body: RequestBody, info: RequestInfo, labels: &mut metrics::Labels) -> Result<Reply, ApiError> {
        let (user, warning) = self.identify(&mut parts).await?;
        let query = Query::parse(parts.uri.query().unwrap_or_default());
        let fields = field_attributes(&info, &query);
        self.authorize(&Attributes::of(&user, &info).with_fields(&fields))?;
        if !info.is_resource {
            return self.documents.discovery(&self.objects.registry(), &parts, &query);
        }
        let mutating = !matches!(info.verb.as_str(), "get" | "list" | "watch");
        let long = info.is_long_running();
        let mut call = Call::new(self.clone(), info, user, query, parts.headers.clone())?;
        describe(labels, &call);
        warning.into_iter().for_each(|w| call.warn(w));
        if long {
            let counted = labels.long_running();
            let reply = self.run(&mut call, parts, body).await?;
            return Ok(reply.map(|body| hold(body, counted)));
        }
        let slot = self.limits.admit(mutating).inspect_err(|_| labels.terminated(429))?;
        let counted = metrics::in_flight(mutating);
        let limit = self.time_limit(&call.query);
        let reply = match tokio::time::timeout(limit, self.run(&mut call, parts, body)).await {
            Ok(reply) => reply?,
            Err(_) => {
                labels.terminated(504);
                return Err(ApiError::timeout("request did not complete within the allotted timeout", 0));
            }
        };
        drop((slot, counted));
        Ok(reply)
    }

    /// `timeout` may shorten what a request may take, never lengthen it.
    fn time_limit(&self, query: &Query) -> Duration {
        let asked = query.get("timeout").and_then(windlass_api::schema::parse_go_duration);
        asked.and_then(|ns| u64::try_from(ns).ok()).filter(|ns| *ns > 0).map_or(self.request_timeout, |ns| Duration::from_nanos(ns).min(self.request_timeout))
    }

    async fn run(&self, call: &mut Call, parts: Parts, body: RequestBody) -> Result<Reply, ApiError> {
        call.extensions = parts.extensions;
        call.method = parts.method;
        call.raw_query = parts.uri.query().unwrap_or_default().to_owned();
        let answer = rest::serve(call, body).await;
        let result = answer.and_then(|answer| rest::encode::respond(call, answer));
        let warnings = std::mem::take(&mut *call.warnings.lock());
        let mut reply = match result {
            Ok(reply) => reply,
            // An error still carries the warnings that came before it.
            Err(error) if !warnings.is_empty() => content::error_reply(&error, &call.headers),
            Err(error) => return Err(error),
        };
        content::add_warnings(reply.headers_mut(), &warnings);
        Ok(reply)
    }
}

/// The equality terms of a field selector: the Node authorizer lets a node list only its own.
fn field_attributes(info: &RequestInfo, query: &Query) -> Vec<(String, String)> {
    if !matches!(info.verb.as_str(), "list" | "watch" | "deletecollection") {
        return Vec::new();
    }
    let selector = query.get("fieldSelector").map(windlass_api::selector::FieldSelector::parse);
    let Some(Ok(selector)) = selector else { return Vec::new() };
    selector.requirements().iter().filter(|r| !r.negated).map(|r| (r.path.clone(), r.value.clone())).collect()
}

/// Labels out of the registry, so that a client cannot invent any.
fn describe(labels: &mut metrics::Labels, call: &Call) {
    labels.group.clone_from(&call.resource.group);
    labels.version.clone_from(&call.version().name);
    labels.resource.clone_from(&call.resource.plural);
    let sub = call.version().subresource(&call.info.subresource);
    labels.subresource = sub.map(|s| s.name.clone()).unwrap_or_default();
    labels.scope = match (call.info.name.is_empty(), call.info.namespace.is_empty()) {
        (false, _) => "resource",
        (true, false) => "namespace",
        (true, true) => "cluster",
    };
    if call.query.get("dryRun").is_some() {
        labels.dry_run = "All";
    }
    if labels.verb == "PATCH" && content::content_type(&call.headers) == "application/apply-patch+yaml" {
        labels.verb = "APPLY";
    }
    if matches!(call.info.subresource.as_str(), "exec" | "attach" | "portforward" | "proxy") {
        labels.verb = "CONNECT";
    }
}

fn content_length(reply: &Reply) -> Option<u64> {
    if let Some(length) = reply.headers().get(header::CONTENT_LENGTH) {
        return length.to_str().ok()?.parse().ok();
    }
    http_body::Body::size_hint(reply.body()).exact()
}

/// Keeps something alive as long as a body is being sent.
fn hold(body: content::ReplyBody, guard: impl Send + 'static) -> content::ReplyBody {
    use http_body_util::BodyExt;
    let mut guard = Some(guard);
    let body = body.map_frame(move |frame| {
        // Owned by the closure, and so dropped with the body.
        let _ = &mut guard;
        frame
    });
    body.boxed_unsync()
}

impl Core {
    /// Guards what is not a resource: `/metrics`, `/debug`, `/version`, documents.
    pub async fn guard(&self, request: &Parts) -> Result<(), ApiError> {
        let mut parts = request.clone();
        let (user, _) = self.identify(&mut parts).await?;
        let info = RequestInfo::parse(&request.method, request.uri.path(), "");
        self.authorize(&Attributes::of(&user, &info))?;
        if request.uri.path() == "/metrics" {
            metrics::observe_caches(&self.objects.feed().caches.all(), self.objects.revision());
        }
        Ok(())
    }
}
