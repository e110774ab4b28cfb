//! Makes the [`Client`] a role works with, and measures what goes through it.

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http::{Request, Response};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::client::{Body, ClientBuilder};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use prometheus::{HistogramVec, IntCounterVec, IntGaugeVec};
use rustls_pki_types::CertificateDer;
use tower::{BoxError, Layer, Service, ServiceBuilder};
use windlass_daemon::metrics;

use crate::identity::Credential;

/// Why no client could be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot use kubeconfig {path}: {source}")]
    Kubeconfig { path: String, source: kube::config::KubeconfigError },
    #[error("no kubeconfig given and none found; pass --kubeconfig: {0}")]
    Infer(#[source] kube::config::InferConfigError),
    #[error("cannot set up TLS to the API server: {0}")]
    Tls(#[from] rustls::Error),
    #[error("cannot set up the client: {0}")]
    Client(#[from] kube::Error),
    #[error("{0:?} is no address of an API server; it should look like https://10.0.0.1:6443")]
    Server(String),
}

/// A client as `path` says, or else as the environment does ($KUBECONFIG, ~/.kube/config, a pod's service account).
pub async fn from_kubeconfig(path: Option<&Path>) -> Result<Client, Error> {
    let config = match path {
        Some(path) => {
            let wrap = |source| Error::Kubeconfig { path: path.display().to_string(), source };
            let kubeconfig = Kubeconfig::read_from(path).map_err(wrap)?;
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.map_err(wrap)?
        }
        None => Config::infer().await.map_err(Error::Infer)?,
    };
    let host = config.cluster_url.authority().map(ToString::to_string).unwrap_or_default();
    Ok(ClientBuilder::try_from(config)?.with_layer(&Measured { host: host.into() }).build())
}

/// A client over a service in this process: no socket, no TLS. The service already knows who asks.
pub fn in_process<S, B>(service: S) -> Client
where
    S: Service<Request<Body>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    B: http_body::Body<Data = bytes::Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    Client::new(ServiceBuilder::new().layer(Measured { host: "in-process".into() }).service(service), "default")
}

/// A client for the API server at `server` that trusts `ca` alone and shows `credential`, always in its newest form.
pub fn to_server(server: &str, ca: &[CertificateDer<'static>], credential: &Credential) -> Result<Client, Error> {
    let uri: http::Uri = server.parse().map_err(|_| Error::Server(server.to_owned()))?;
    let (Some("https"), Some(authority)) = (uri.scheme_str(), uri.authority().cloned()) else {
        return Err(Error::Server(server.to_owned()));
    };
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_connect_timeout(Some(Duration::from_secs(10)));
    http.set_keepalive(Some(Duration::from_secs(30)));
    let connector = hyper_rustls::HttpsConnectorBuilder::new()
        .with_tls_config(credential.tls_config(ca)?)
        .https_only()
        .enable_http1()
        .wrap_connector(http);
    let client = hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build(connector);
    let token = credential.token();
    let service = ServiceBuilder::new()
        .layer(Measured { host: authority.as_str().into() })
        .map_request(move |mut request: Request<Body>| {
            let path = request.uri().path_and_query().map_or("/", |p| p.as_str());
            // Both parts were taken from valid URIs.
            if let Ok(uri) = http::Uri::builder().scheme("https").authority(authority.clone()).path_and_query(path).build() {
                *request.uri_mut() = uri;
            }
            if let Some(token) = &token {
                request.headers_mut().insert(http::header::AUTHORIZATION, token.clone());
            }
            request
        })
        .service(client);
    Ok(Client::new(service, "default"))
}

pub(crate) fn informer_objects() -> IntGaugeVec {
    metrics::gauge_vec("windlass_informer_objects", "Objects held in the informer's cache", &["kind"])
}

fn request_total() -> IntCounterVec {
    metrics::counter_vec(
        "rest_client_requests_total",
        "Number of HTTP requests, partitioned by status code, method, and host.",
        &["code", "method", "host"],
    )
}

fn request_duration() -> HistogramVec {
    metrics::histogram_vec(
        "rest_client_request_duration_seconds",
        "Request latency in seconds. Broken down by verb, and host.",
        &["verb", "host"],
        &[0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0],
    )
}

/// Counts and times requests under client-go's metric names.
#[derive(Clone)]
struct Measured {
    host: Arc<str>,
}

impl<S> Layer<S> for Measured {
    type Service = MeasuredService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        MeasuredService { inner, host: self.host.clone(), total: request_total(), duration: request_duration() }
    }
}

#[derive(Clone)]
struct MeasuredService<S> {
    inner: S,
    host: Arc<str>,
    total: IntCounterVec,
    duration: HistogramVec,
}

impl<S, B> Service<Request<Body>> for MeasuredService<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
    S::Error: 'static,
    B: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let method = request.method().clone();
        let (host, total, duration) = (self.host.clone(), self.total.clone(), self.duration.clone());
        let started = Instant::now();
        let response = self.inner.call(request);
        Box::pin(async move {
            let result = response.await;
            duration.with_label_values(&[method.as_str(), &*host]).observe(started.elapsed().as_secs_f64());
            let code = result.as_ref().map_or("<error>".to_owned(), |r| r.status().as_u16().to_string());
            total.with_label_values(&[code.as_str(), method.as_str(), &*host]).inc();
            result
        })
    }
}
