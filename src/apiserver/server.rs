//! The service that connections are served by: warp finds the route, the pipeline does the rest.
//!
//! The few real routes are warp's. A route that is ours resolves to an [`Endpoint`]; the request itself (with its body and what
//! belongs to its connection) does not pass through warp, so bodies stream and upgrades work as they came.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use async_trait::async_trait;
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use serde_json::Value;
use warp::Filter;
use warp::filters::BoxedFilter;
use windlass_api::ApiError;
use windlass_daemon::endpoints::{self, Denied, Gate};
use windlass_daemon::health::Health;

use crate::content::{self, Reply, RequestBody};
use crate::core::{Core, InProcess};
use crate::documents;
use crate::request::UserInfo;

/// Where a request goes.
#[derive(Clone, Copy, Debug)]
enum Endpoint {
    /// Below `/api` and `/apis`: the registry decides.
    Resources,
    OpenApi,
    Issuer,
    Keys,
    Index,
    Unknown,
}

type Routes = BoxedFilter<(warp::reply::Response,)>;

/// All routes. What the daemon serves beside the API (health, metrics, profiles, version) comes with its own handlers.
///
/// `authority` is the PEM of the cluster's authority: public, and read by nodes that join before they have any credential
/// (they compare it with the hash in their token).
pub(crate) fn routes(health: Health, configz: Value, authority: String) -> Routes {
    let to = |endpoint: Endpoint| {
        move || {
            let mut response = warp::reply::Response::default();
            response.extensions_mut().insert(endpoint);
            response
        }
    };
    let resources = warp::path("api").or(warp::path("apis")).unify().map(to(Endpoint::Resources));
    let openapi = warp::path("openapi").map(to(Endpoint::OpenApi));
    let issuer = warp::path!(".well-known" / "openid-configuration").map(to(Endpoint::Issuer));
    let keys = warp::path!("openid" / "v1" / "jwks").map(to(Endpoint::Keys));
    let index = warp::path::end().map(to(Endpoint::Index));
    let ours = resources.or(openapi).unify().or(issuer).unify().or(keys).unify().or(index).unify().boxed();
    let authority = warp::path!("windlass" / "ca.pem").map(move || {
        let mut response = warp::reply::Response::new(authority.clone().into());
        response.headers_mut().insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("application/x-pem-file"));
        response
    });
    let ours = ours.or(authority).unify().boxed();
    let beside = endpoints::routes(health, configz, "kube-apiserver", Arc::new(Guarded));
    ours.or(beside).unify().or(warp::any().map(to(Endpoint::Unknown))).unify().boxed()
}

/// [`Service::serve`] has asked [`Core::guard`] before it routes; nothing is left to ask.
struct Guarded;

#[async_trait]
impl Gate for Guarded {
    async fn admit(&self, _: &Parts) -> Result<(), Denied> {
        Ok(())
    }
}

/// Serves requests, from sockets or from within this process.
#[derive(Clone)]
pub struct Service {
    core: Arc<Core>,
    routes: Routes,
    /// Requests come from this user, who needs no credential.
    user: Option<UserInfo>,
}

impl Service {
    pub(crate) fn new(core: Arc<Core>, routes: Routes) -> Service {
        Service { core, routes, user: None }
    }

    pub(crate) fn acting_as(&self, user: UserInfo) -> Service {
        Service { user: Some(user), ..self.clone() }
    }

    async fn serve(self, mut parts: Parts, body: RequestBody) -> Reply {
        match self.user {
            Some(user) => drop(parts.extensions.insert(InProcess(user))),
            // Nobody outside can put an extension on a request, but a middleware might hand one on.
            None => drop(parts.extensions.remove::<InProcess>()),
        }
        let is_head = parts.method == http::Method::HEAD;
        if !is_api(parts.uri.path())
            && !is_open(parts.uri.path())
            && let Err(error) = self.core.guard(&parts).await
        {
            return content::error_reply(&error, &parts.headers);
        }
        let mut head = Request::new(http_body_util::Empty::<bytes::Bytes>::new());
        *head.method_mut() = parts.method.clone();
        *head.uri_mut() = parts.uri.clone();
        if !is_api(parts.uri.path()) {
            *head.headers_mut() = parts.headers.clone();
            *head.extensions_mut() = parts.extensions.clone();
        }
        let routed = tower::Service::call(&mut warp::service(self.routes), head);
        let response = match routed.await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        let Some(endpoint) = response.extensions().get::<Endpoint>().copied() else {
            let (parts, body) = response.into_parts();
            return Response::from_parts(parts, body.map_err(|e| content::BodyError(e.into())).boxed_unsync());
        };
        let core = self.core;
        if matches!(endpoint, Endpoint::Resources) {
            return core.handle(parts, body).await;
        }
        let mut reply = match document(&core, endpoint, &parts).await {
            Ok(reply) => reply,
            Err(error) => content::error_reply(&error, &parts.headers),
        };
        if is_head {
            *reply.body_mut() = content::full(bytes::Bytes::new());
        }
        reply
    }
}

/// The pipeline guards these itself, and their heads are not needed for routing.
fn is_api(path: &str) -> bool {
    matches!(path, "/api" | "/apis") || path.starts_with("/api/") || path.starts_with("/apis/")
}

/// Whoever watches over a server needs no rights to ask whether it is well, and who joins has no credential yet.
fn is_open(path: &str) -> bool {
    matches!(path, "/healthz" | "/livez" | "/readyz" | "/windlass/ca.pem")
}

async fn document(core: &Arc<Core>, endpoint: Endpoint, parts: &Parts) -> Result<Reply, ApiError> {
    let registry = core.objects.registry();
    match endpoint {
        Endpoint::OpenApi => core.documents.openapi(&registry, parts),
        Endpoint::Issuer => {
            let issuer = &core.reviews.tokens.issuer;
            let keys = format!("{}/openid/v1/jwks", core.public_address());
            Ok(documents::plain(&issuer.discovery(&keys), content::JSON))
        }
        Endpoint::Keys => Ok(documents::plain(&core.reviews.tokens.issuer.jwks(), "application/jwk-set+json")),
        Endpoint::Index => Ok(documents::plain(&documents::paths(&registry), content::JSON)),
        Endpoint::Resources | Endpoint::Unknown => {
            Ok(content::respond(StatusCode::NOT_FOUND, "text/plain; charset=utf-8", bytes::Bytes::from_static(b"404 page not found\n"), false))
        }
    }
}

impl<B> tower::Service<Request<B>> for Service
where
    B: http_body::Body + Send + 'static,
    B::Data: bytes::Buf + Send,
    B::Error: Into<content::BoxError>,
{
    type Response = Reply;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Reply, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (parts, body) = request.into_parts();
        let service = self.clone();
        Box::pin(async move { Ok(service.serve(parts, content::request_body(body)).await) })
    }
}
