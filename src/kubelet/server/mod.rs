//! The kubelet's server on port 10250: what the API server, monitoring and people ask a node.

mod auth;
mod logs;
mod metrics_text;
pub mod stats;
mod streams;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use windlass_client::Role;
use windlass_client::identity::{self, Wanted};
use windlass_daemon::endpoints::{self, Gate as _};
use windlass_daemon::server::{self, Limits, Tls};

use self::auth::Auth;
use crate::error::Error;
use crate::metrics;
use crate::pod::model;
use crate::shared::{Shared, View};

pub type Body = UnsyncBoxBody<Bytes, io::Error>;
pub type Answer = Response<Body>;

const SERVING_SIGNER: &str = "kubernetes.io/kubelet-serving";

pub fn text(status: StatusCode, message: impl Into<String>) -> Answer {
    let body = Full::new(Bytes::from(message.into())).map_err(|e| match e {});
    let mut answer = Response::new(UnsyncBoxBody::new(body));
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, http::HeaderValue::from_static("text/plain; charset=utf-8"));
    answer
}

pub fn json_answer(value: &Value) -> Answer {
    let mut answer = text(StatusCode::OK, value.to_string());
    answer.headers_mut().insert(header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    answer
}

/// Query parameters, in order; a name may come several times.
pub struct Query(Vec<(String, String)>);

impl Query {
    pub fn parse(query: Option<&str>) -> Self {
        let decode = |text: &str| {
            let plus = text.replace('+', " ");
            percent_decode(&plus)
        };
        Self(query.unwrap_or("").split('&').filter(|p| !p.is_empty()).map(|p| p.split_once('=').unwrap_or((p, ""))).map(|(k, v)| (decode(k), decode(v))).collect())
    }

    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    pub fn all(&self, name: &str) -> Vec<String> {
        self.0.iter().filter(|(n, _)| n == name).map(|(_, v)| v.clone()).collect()
    }

    /// `1` or `true` under any of these names.
    pub fn flag(&self, names: &[&str]) -> bool {
        names.iter().any(|n| matches!(self.get(n), Some("1" | "true" | "True")))
    }
}

fn percent_decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while i < bytes.len() {
        let hex = bytes.get(i + 1..i + 3).filter(|_| bytes[i] == b'%').and_then(|h| std::str::from_utf8(h).ok()).and_then(|h| u8::from_str_radix(h, 16).ok());
        match hex {
            Some(byte) => {
                out.push(byte);
                i += 3;
            }
            None => {
                out.push(bytes[i]);
                i += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[derive(Clone)]
struct Service {
    inner: Arc<Inner>,
}

pub struct Inner {
    pub shared: Arc<Shared>,
    auth: Auth,
    endpoints: warp::filters::BoxedFilter<(warp::reply::Response,)>,
    stats: stats::Collector,
}

impl tower::Service<Request<Incoming>> for Service {
    type Response = Answer;
    type Error = Infallible;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Answer, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Incoming>) -> Self::Future {
        let inner = self.inner.clone();
        Box::pin(async move {
            let first = request.uri().path().trim_start_matches('/').split('/').next().unwrap_or("").to_owned();
            let path = if KNOWN.contains(&first.as_str()) { first.as_str() } else { "other" };
            let long = matches!(path, "exec" | "attach" | "portForward") || request.uri().query().is_some_and(|q| q.contains("follow=true"));
            let labels = [request.method().as_str().to_owned(), path.to_owned(), "readwrite".to_owned(), long.to_string()];
            let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
            metrics::HTTP_REQUESTS.with_label_values(&labels).inc();
            metrics::HTTP_INFLIGHT.with_label_values(&labels).inc();
            let begun = Instant::now();
            let answer = inner.answer(request).await;
            metrics::HTTP_INFLIGHT.with_label_values(&labels).dec();
            metrics::HTTP_DURATION.with_label_values(&labels).observe(begun.elapsed().as_secs_f64());
            Ok(answer)
        })
    }
}

const KNOWN: [&str; 15] = ["pods", "runningpods", "containerLogs", "exec", "attach", "portForward", "run", "stats", "metrics", "healthz", "livez", "readyz", "configz", "checkpoint", "debug"];

impl Inner {
    async fn answer(self: Arc<Self>, request: Request<Incoming>) -> Answer {
        let path = request.uri().path().to_owned();
        let parts: Vec<String> = path.split('/').filter(|p| !p.is_empty()).map(percent_decode).collect();
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        if self.is_endpoint(&parts) {
            return self.endpoint(request).await;
        }
        let (head, body) = request.into_parts();
        if let Err(denied) = self.auth.admit(&head).await {
            return text(denied.status, denied.message);
        }
        let request = Request::from_parts(head, body);
        let get = request.method() == Method::GET;
        match parts.as_slice() {
            ["pods"] if get => json_answer(&self.pods()),
            ["runningpods"] if get => json_answer(&self.running_pods()),
            ["containerLogs", namespace, pod, container] if get => {
                let query = Query::parse(request.uri().query());
                logs::serve(&self.shared, namespace, pod, container, &query).await
            }
            ["exec" | "attach" | "portForward" | "run", ..] => streams::serve(&self.shared, &parts, request).await,
            ["stats", "summary"] if get => {
                let only_cpu_and_memory = Query::parse(request.uri().query()).flag(&["only_cpu_and_memory"]);
                json_answer(&self.stats.summary(&self.shared, only_cpu_and_memory).await)
            }
            ["metrics", "resource"] if get => metrics_text::answer(metrics_text::resource(&self.shared)),
            ["metrics", "cadvisor"] if get => metrics_text::answer(metrics_text::cadvisor(&self.shared)),
            ["metrics", "probes"] if get => metrics_text::answer(metrics_text::probes()),
            ["checkpoint", ..] => text(StatusCode::NOT_IMPLEMENTED, "checkpoints are not supported by this node's container runtime integration"),
            ["logs", ..] => text(StatusCode::NOT_IMPLEMENTED, "the node's own log files are not served; read them with journalctl on the node"),
            ["pods" | "runningpods" | "containerLogs" | "stats" | "metrics", ..] if !get => text(StatusCode::METHOD_NOT_ALLOWED, "method not allowed"),
            _ => text(StatusCode::NOT_FOUND, "404 page not found"),
        }
    }

    fn is_endpoint(&self, parts: &[&str]) -> bool {
        matches!(parts, ["healthz" | "livez" | "readyz" | "configz" | "debug" | "version", ..] | ["metrics"])
    }

    async fn endpoint(&self, request: Request<Incoming>) -> Answer {
        let mut service = warp::service(self.endpoints.clone());
        match tower::Service::call(&mut service, request).await {
            Ok(answer) => answer.map(|body| UnsyncBoxBody::new(body.map_err(io::Error::other))),
            Err(never) => match never {},
        }
    }

    fn pods(&self) -> Value {
        let views = self.shared.table.views();
        let items: Vec<Value> = views.iter().map(|v| serde_json::to_value(pod_of(v)).unwrap_or_default()).collect();
        json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items})
    }

    fn running_pods(&self) -> Value {
        let views = self.shared.table.views();
        let items: Vec<Value> = views
            .iter()
            .filter(|v| v.sandbox().is_some())
            .map(|v| {
                let running: Vec<Value> = v.containers.iter().filter(|c| c.running() && !c.is_sandbox()).map(|c| json!({"name": c.name, "image": c.image, "resources": {}})).collect();
                json!({"metadata": {"name": model::name(&v.pod), "namespace": model::namespace(&v.pod), "uid": model::uid(&v.pod)}, "spec": {"containers": running}, "status": {}})
            })
            .collect();
        json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items})
    }
}

/// The pod with the status that the kubelet knows.
fn pod_of(view: &View) -> k8s_openapi::api::core::v1::Pod {
    let mut pod = (*view.pod).clone();
    pod.status = Some(view.status.clone());
    pod
}

/// Opens the port; the returned future serves until shutdown.
pub async fn start(shared: &Arc<Shared>, role: &Role) -> Result<impl Future<Output = ()> + Send + 'static + use<>, Error> {
    let config = &shared.config;
    let address: SocketAddr = format!("{}:{}", bracketed(&config.address), config.port)
        .parse()
        .map_err(|e: std::net::AddrParseError| Error::Config { field: "address", value: config.address.clone(), reason: e.to_string() })?;
    let listener = TcpListener::bind(address).await.map_err(|e| Error::Server(format!("cannot listen on {address}: {e}")))?;
    let tls = tls(shared)?;
    if let Some(path) = &config.client_ca_file {
        let bundle = std::fs::read(path).map_err(Error::file("read", path))?;
        tls.set_client_ca(&bundle).map_err(|e| Error::Server(e.to_string()))?;
    }
    let auth = Auth::new(shared);
    let configz = serde_json::to_value(config).unwrap_or_default();
    let endpoints = endpoints::routes(role.health.clone(), configz, "kubeletconfig", Arc::new(auth.clone()));
    let service = Service { inner: Arc::new(Inner { shared: shared.clone(), auth, endpoints, stats: stats::Collector::default() }) };
    let shutdown = role.shutdown.clone();
    if config.tls_cert_file.is_none() {
        tokio::spawn(renew_certificate(shared.clone(), tls.clone()));
    }
    // Logs that are followed and shells that are open do not keep a stopping kubelet.
    let limits = Limits { drain: std::time::Duration::from_secs(2), ..Limits::default() };
    Ok(async move {
        if let Err(error) = server::serve_service(listener, Some(tls), service, limits, shutdown).await {
            tracing::error!(%error, "the kubelet's server has ended");
        }
    })
}

fn bracketed(address: &str) -> String {
    if address.contains(':') && !address.starts_with('[') { format!("[{address}]") } else { address.to_owned() }
}

fn tls(shared: &Shared) -> Result<Tls, Error> {
    let config = &shared.config;
    let fail = |e: windlass_daemon::server::TlsError| Error::Server(e.to_string());
    if let Some(certificate) = &config.tls_cert_file {
        let key = config.tls_private_key_file.as_ref().ok_or_else(|| Error::Config { field: "tls-private-key-file", value: String::new(), reason: "needed with --tls-cert-file".into() })?;
        let chain = std::fs::read(certificate).map_err(Error::file("read", certificate))?;
        let key = std::fs::read(key).map_err(Error::file("read", key))?;
        return Tls::from_pem(&chain, &key).map_err(fail);
    }
    // A certificate of an earlier run, or one of our own until the cluster signs one.
    if let Ok(Some(pair)) = identity::Pair::read(&pair_path(shared)) {
        return Tls::from_pem(pair.certificate.as_bytes(), pair.key.as_bytes()).map_err(fail);
    }
    let mut names = shared.host_ips.read().clone();
    names.push(shared.node_name.clone());
    let own = rcgen::generate_simple_self_signed(names).map_err(|e| Error::Server(format!("cannot make a certificate: {e}")))?;
    Tls::from_pem(own.cert.pem().as_bytes(), own.signing_key.serialize_pem().as_bytes()).map_err(fail)
}

fn pair_path(shared: &Shared) -> std::path::PathBuf {
    shared.config.root_dir.join("serving.pem")
}

/// Gets a serving certificate from the cluster, and renews it for as long as the kubelet runs.
async fn renew_certificate(shared: Arc<Shared>, tls: Tls) {
    let wanted = Wanted {
        common_name: format!("system:node:{}", shared.node_name),
        organizations: vec!["system:nodes".into()],
        signer: SERVING_SIGNER.into(),
        usages: vec!["digital signature".into(), "server auth".into()],
        names: vec![shared.node_name.clone()],
        addresses: shared.host_ips.read().iter().filter_map(|ip| ip.parse().ok()).collect(),
    };
    let path = pair_path(&shared);
    let install = {
        let (tls, path) = (tls.clone(), path.clone());
        move |pair: &identity::Pair| {
            if let Err(error) = tls.set_certificate(pair.certificate.as_bytes(), pair.key.as_bytes()) {
                tracing::warn!(%error, "a signed serving certificate cannot be used");
                return Ok(());
            }
            pair.write(&path)
        }
    };
    let mut pair = identity::Pair::read(&path).ok().flatten();
    while pair.is_none() {
        let asked = tokio::select! {
            asked = identity::request(&shared.client, &wanted) => asked,
            () = shared.shutdown.cancelled() => return,
        };
        match asked.and_then(|new| install(&new).map(|()| new)) {
            Ok(new) => pair = Some(new),
            Err(error) => {
                tracing::warn!(%error, "no serving certificate from the cluster yet; the kubelet serves with its own");
                tokio::select! {
                    () = tokio::time::sleep(std::time::Duration::from_secs(300)) => {}
                    () = shared.shutdown.cancelled() => return,
                }
            }
        }
    }
    if let Some(pair) = pair {
        identity::renew(shared.client.clone(), wanted, pair, shared.shutdown.clone(), install).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries() {
        let query = Query::parse(Some("command=sh&command=-c&command=echo+a%2Bb&stdin=true&x"));
        assert_eq!(query.all("command"), ["sh", "-c", "echo a+b"]);
        assert!(query.flag(&["input", "stdin"]) && !query.flag(&["x"]) && !query.flag(&["tty"]));
        assert_eq!(percent_decode("%zz%4"), "%zz%4");
    }
}
