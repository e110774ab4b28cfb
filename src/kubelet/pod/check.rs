//! One probe or HTTP hook, carried out: exec, HTTP GET, TCP connect, gRPC health check.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes};
use http::{Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::api::core::v1::{Container, GRPCAction, HTTPGetAction, Probe};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tokio::net::TcpStream;
use windlass_client::any_server::AnyServer;

use super::env::expand;
use crate::runtime::{Error as RuntimeError, Runtime};

/// Of an exec probe's or response's output, this much is kept.
const OUTPUT_LIMIT: usize = 10 * 1024;
const MAX_REDIRECTS: usize = 10;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Success,
    /// Passed, with something to say (a redirect to another host).
    Warning(String),
    Failure(String),
    /// The probe could not be carried out.
    Error(String),
}

/// What probes of one container are sent to.
#[derive(Clone)]
pub struct Checker {
    pub runtime: Arc<dyn Runtime>,
    /// The runtime's id of the container.
    pub id: String,
    pub pod_ip: String,
    pub pod: String,
    pub namespace: String,
    pub uid: String,
}

impl Checker {
    pub async fn check(&self, container: &Container, probe: &Probe, timeout: Duration) -> Outcome {
        if let Some(exec) = &probe.exec {
            return self.exec(container, exec.command.as_deref().unwrap_or_default(), timeout).await;
        }
        if let Some(get) = &probe.http_get {
            return match http_target(get, container, &self.pod_ip) {
                Ok(target) => limit(timeout, &target.0.to_string(), http_get(target)).await,
                Err(e) => Outcome::Error(e),
            };
        }
        if let Some(tcp) = &probe.tcp_socket {
            let host = tcp.host.as_deref().filter(|h| !h.is_empty()).unwrap_or(&self.pod_ip).to_owned();
            return match port(&tcp.port, container) {
                Ok(port) => limit(timeout, &format!("dial tcp {host}:{port}"), dial_only(host.clone(), port)).await,
                Err(e) => Outcome::Error(e),
            };
        }
        if let Some(grpc) = &probe.grpc {
            let target = format!("{}:{}", self.pod_ip, grpc.port);
            return match tokio::time::timeout(timeout, grpc_check(&self.pod_ip, grpc)).await {
                Ok(outcome) => outcome,
                Err(_) => Outcome::Failure(format!("timeout: failed to connect service \"{target}\" within {timeout:?}: context deadline exceeded")),
            };
        }
        Outcome::Error(format!("missing probe handler for {}:{}", self.pod, container.name))
    }

    async fn exec(&self, container: &Container, command: &[String], timeout: Duration) -> Outcome {
        // Only literal variables are known here, as upstream.
        let lookup = |name: &str| {
            let var = container.env.iter().flatten().find(|v| v.name == name)?;
            var.value.clone()
        };
        let command: Vec<String> = command.iter().map(|c| expand(c, &lookup)).collect();
        match self.runtime.exec_sync(&self.id, &command, timeout, OUTPUT_LIMIT).await {
            Ok(result) if result.exit_code == 0 => Outcome::Success,
            Ok(result) => {
                let mut text = result.stdout;
                text.extend(result.stderr);
                text.truncate(OUTPUT_LIMIT);
                Outcome::Failure(String::from_utf8_lossy(&text).into_owned())
            }
            Err(RuntimeError::Timeout { .. }) => Outcome::Failure(format!("command timed out: \"{}\" timed out after {timeout:?}", command.join(" "))),
            // The command could not be started (126, 127): that is a failure of the container, not of the probe.
            Err(RuntimeError::Refused { message, .. }) => Outcome::Failure(message),
            Err(e) => Outcome::Error(e.to_string()),
        }
    }
}

async fn limit(timeout: Duration, what: &str, work: impl Future<Output = Outcome>) -> Outcome {
    tokio::time::timeout(timeout, work).await.unwrap_or_else(|_| {
        let text = if what.starts_with("dial") {
            format!("{what}: i/o timeout")
        } else {
            format!("Get \"{what}\": context deadline exceeded (Client.Timeout exceeded while awaiting headers)")
        };
        Outcome::Failure(text)
    })
}

/// A port by number or by the name that the container gives it.
pub fn port(port: &IntOrString, container: &Container) -> Result<u16, String> {
    let number = match port {
        IntOrString::Int(n) => *n,
        IntOrString::String(name) => match container.ports.iter().flatten().find(|p| p.name.as_deref() == Some(name)) {
            Some(found) => found.container_port,
            None => name.parse().map_err(|_| format!("couldn't find port: {name} in container {}", container.name))?,
        },
    };
    u16::try_from(number).ok().filter(|p| *p > 0).ok_or_else(|| format!("invalid port number: {number}"))
}

pub type HttpTarget = (Uri, Vec<(String, String)>);

/// The URL and headers of an HTTP probe or hook.
pub fn http_target(get: &HTTPGetAction, container: &Container, pod_ip: &str) -> Result<HttpTarget, String> {
    let scheme = get.scheme.as_deref().unwrap_or("HTTP").to_lowercase();
    let host = get.host.as_deref().filter(|h| !h.is_empty()).unwrap_or(pod_ip);
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let port = port(&get.port, container)?;
    let path = get.path.as_deref().unwrap_or("");
    let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
    let uri: Uri = format!("{scheme}://{host}:{port}{path}").parse().map_err(|e| format!("probe URL {path}: {e}"))?;
    let headers = get.http_headers.iter().flatten().map(|h| (h.name.clone(), h.value.clone())).collect();
    Ok((uri, headers))
}

/// GETs `target`, following redirects on the same host.
pub async fn http_get((first, headers): HttpTarget) -> Outcome {
    let mut uri = first.clone();
    for _ in 0..=MAX_REDIRECTS {
        let (status, location, body) = match request(&uri, &headers).await {
            Ok(response) => response,
            Err(e) => return Outcome::Failure(format!("Get \"{uri}\": {e}")),
        };
        if status.is_redirection()
            && let Some(location) = location
        {
            let Some(next) = resolve(&uri, &location) else {
                return Outcome::Failure(format!("Get \"{uri}\": redirect to an invalid location {location:?}"));
            };
            if next.host() != first.host() {
                return Outcome::Warning(format!("Probe terminated redirects, Response body: {body}"));
            }
            uri = next;
            continue;
        }
        return if (200..400).contains(&status.as_u16()) {
            Outcome::Success
        } else {
            Outcome::Failure(format!("HTTP probe failed with statuscode: {}", status.as_u16()))
        };
    }
    Outcome::Failure(format!("Get \"{uri}\": stopped after {MAX_REDIRECTS} redirects"))
}

fn resolve(base: &Uri, location: &str) -> Option<Uri> {
    if location.contains("://") {
        return location.parse().ok();
    }
    let path = if location.starts_with('/') {
        location.to_owned()
    } else {
        let base_path = base.path().rsplit_once('/').map_or("", |(dir, _)| dir);
        format!("{base_path}/{location}")
    };
    format!("{}://{}{path}", base.scheme_str()?, base.authority()?).parse().ok()
}

async fn connect(uri: &Uri) -> Result<TcpStream, String> {
    let host = uri.host().unwrap_or("").trim_matches(['[', ']']).to_owned();
    let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 });
    dial(&host, port).await
}

async fn dial(host: &str, port: u16) -> Result<TcpStream, String> {
    TcpStream::connect((host, port)).await.map_err(|e| {
        let why = match e.kind() {
            std::io::ErrorKind::ConnectionRefused => "connect: connection refused".to_owned(),
            _ => format!("connect: {e}"),
        };
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        format!("dial tcp {host}:{port}: {why}")
    })
}

async fn dial_only(host: String, port: u16) -> Outcome {
    match dial(&host, port).await {
        Ok(_) => Outcome::Success,
        Err(e) => Outcome::Failure(e),
    }
}

async fn request(uri: &Uri, headers: &[(String, String)]) -> Result<(StatusCode, Option<String>, String), String> {
    let stream = connect(uri).await?;
    if uri.scheme_str() == Some("https") {
        let connector = tokio_rustls::TlsConnector::from(insecure_tls());
        let host = uri.host().unwrap_or("").trim_matches(['[', ']']).to_owned();
        let name = rustls_pki_types::ServerName::try_from(host).map_err(|e| e.to_string())?;
        let stream = connector.connect(name, stream).await.map_err(|e| e.to_string())?;
        exchange(uri, headers, TokioIo::new(stream)).await
    } else {
        exchange(uri, headers, TokioIo::new(stream)).await
    }
}

async fn exchange<S>(uri: &Uri, headers: &[(String, String)], io: S) -> Result<(StatusCode, Option<String>, String), String>
where
    S: hyper::rt::Read + hyper::rt::Write + Send + Unpin + 'static,
{
    let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.map_err(|e| e.to_string())?;
    let driver = tokio::spawn(connection);
    let _abort = tokio_util::task::AbortOnDropHandle::new(driver);
    let path = uri.path_and_query().map_or("/", |p| p.as_str());
    let mut request = Request::get(path);
    let given = |name: &str| headers.iter().any(|(n, _)| n.eq_ignore_ascii_case(name));
    if !given("host") {
        request = request.header(header::HOST, uri.authority().map_or("", |a| a.as_str()));
    }
    if !given("user-agent") {
        request = request.header(header::USER_AGENT, "kube-probe/1.37");
    }
    if !given("accept") {
        request = request.header(header::ACCEPT, "*/*");
    }
    request = request.header(header::CONNECTION, "close");
    for (name, value) in headers.iter().filter(|(_, v)| !v.is_empty()) {
        request = request.header(name, value);
    }
    let request = request.body(Full::new(Bytes::new())).map_err(|e| e.to_string())?;
    let response = sender.send_request(request).await.map_err(|e| e.to_string())?;
    let status = response.status();
    let location = response.headers().get(header::LOCATION).and_then(|v| v.to_str().ok()).map(str::to_owned);
    // Beyond the limit the body does not matter.
    let body = Limited::new(response.into_body(), OUTPUT_LIMIT).collect().await.map(|b| b.to_bytes()).unwrap_or_default();
    Ok((status, location, String::from_utf8_lossy(&body).into_owned()))
}

/// Probes ask whether a server answers, not who it is: any certificate will do, as upstream.
fn insecure_tls() -> Arc<rustls::ClientConfig> {
    static CONFIG: std::sync::OnceLock<Arc<rustls::ClientConfig>> = std::sync::OnceLock::new();
    CONFIG
        .get_or_init(|| {
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let verifier = Arc::new(AnyServer::new(provider.clone()));
            let builder = rustls::ClientConfig::builder_with_provider(provider)
                .with_safe_default_protocol_versions()
                .expect("ring supports the default protocol versions");
            Arc::new(builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth())
        })
        .clone()
}

/// `grpc.health.v1.Health/Check`, over plain HTTP/2.
async fn grpc_check(host: &str, grpc: &GRPCAction) -> Outcome {
    let Ok(port) = u16::try_from(grpc.port) else {
        return Outcome::Error(format!("invalid port number: {}", grpc.port));
    };
    let address = match host.parse() {
        Ok(ip) => SocketAddr::new(ip, port),
        Err(_) => return Outcome::Error(format!("pod address {host:?} is not an IP address")),
    };
    let stream = match dial(host, port).await {
        Ok(stream) => stream,
        Err(e) => return Outcome::Failure(format!("error: this server could not be reached: {e}")),
    };
    match grpc_exchange(address, stream, grpc.service.as_deref().unwrap_or("")).await {
        Ok((0, Some(1))) => Outcome::Success,
        Ok((0, status)) => {
            let name = match status {
                Some(2) => "NOT_SERVING",
                Some(3) => "SERVICE_UNKNOWN",
                _ => "UNKNOWN",
            };
            Outcome::Failure(format!("service unhealthy (responded with \"{name}\")"))
        }
        Ok((12, _)) => Outcome::Failure("error: this server does not implement the grpc health protocol (grpc.health.v1.Health)".into()),
        Ok((code, _)) => Outcome::Failure(format!("error: health rpc failed: rpc error: code = {code}")),
        Err(e) => Outcome::Failure(format!("error: health rpc failed: {e}")),
    }
}

/// Returns the gRPC status and the health status of the answer.
async fn grpc_exchange(address: SocketAddr, stream: TcpStream, service: &str) -> Result<(u16, Option<u8>), String> {
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.map_err(|e| e.to_string())?;
    let _abort = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(connection));
    let length = u8::try_from(service.len()).ok().filter(|l| *l < 126).ok_or("service name is too long")?;
    let mut body = vec![0, 0, 0, 0, 0];
    if length > 0 {
        body[4] = length + 2;
        body.extend([0x0a, length]);
        body.extend(service.as_bytes());
    }
    let request = Request::post(format!("http://{address}/grpc.health.v1.Health/Check"))
        .header(header::CONTENT_TYPE, "application/grpc")
        .header(header::TE, "trailers")
        .header(header::USER_AGENT, "kube-probe/1.37")
        .body(Full::new(Bytes::from(body)))
        .map_err(|e| e.to_string())?;
    let response = sender.send_request(request).await.map_err(|e| e.to_string())?;
    if response.status() != StatusCode::OK {
        return Err(format!("unexpected HTTP status {}", response.status()));
    }
    let code = |headers: &http::HeaderMap| headers.get("grpc-status").and_then(|v| v.to_str().ok()).and_then(|v| v.parse::<u16>().ok());
    if let Some(code) = code(response.headers()) {
        return Ok((code, None));
    }
    let collected = Limited::new(response.into_body(), OUTPUT_LIMIT).collect().await.map_err(|e| e.to_string())?;
    let code = collected.trailers().and_then(code).unwrap_or(2);
    let mut message = collected.to_bytes();
    let status = if message.len() > 5 {
        message.advance(5);
        // HealthCheckResponse{ status = 1 (enum) }
        (message.first() == Some(&0x08)).then(|| message.get(1).copied()).flatten()
    } else {
        Some(0)
    };
    Ok((code, status))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// Answers one connection with each of `answers`, in turn.
    async fn serve(answers: Vec<&'static str>) -> u16 {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let port = listener.local_addr().expect("bound").port();
        tokio::spawn(async move {
            for answer in answers {
                let Ok((mut stream, _)) = listener.accept().await else { return };
                let mut buffer = [0; 1024];
                let _ = stream.read(&mut buffer).await;
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
        port
    }

    async fn check(answers: Vec<&'static str>, expected: &str) {
        let port = serve(answers).await;
        let get = HTTPGetAction { port: IntOrString::Int(port.into()), path: Some("/x".into()), ..Default::default() };
        let target = http_target(&get, &Container::default(), "127.0.0.1").expect("target");
        let outcome = match http_get(target).await {
            Outcome::Success => "ok".to_owned(),
            Outcome::Warning(_) => "warning".to_owned(),
            Outcome::Failure(e) => e,
            Outcome::Error(e) => format!("error {e}"),
        };
        assert_eq!(outcome, expected);
    }

    #[tokio::test]
    async fn http_outcomes() {
        let ok = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
        check(vec![ok], "ok").await;
        check(vec!["HTTP/1.1 503 no\r\ncontent-length: 0\r\n\r\n"], "HTTP probe failed with statuscode: 503").await;
        check(vec!["HTTP/1.1 302 Found\r\nlocation: /y\r\ncontent-length: 0\r\n\r\n", ok], "ok").await;
        check(vec!["HTTP/1.1 302 Found\r\nlocation: http://example.com/\r\ncontent-length: 0\r\n\r\n"], "warning").await;
    }

    #[tokio::test]
    async fn a_refused_connection_is_a_failure() {
        let port = serve(vec![]).await;
        // The listener is dropped once there is nothing left to answer; a port without one refuses.
        let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("port").port();
        let _ = port;
        let outcome = dial_only("127.0.0.1".into(), free).await;
        assert_eq!(outcome, Outcome::Failure(format!("dial tcp 127.0.0.1:{free}: connect: connection refused")));
    }

    #[test]
    fn named_ports() {
        let container: Container = serde_json::from_value(serde_json::json!({"name": "c", "ports": [{"name": "web", "containerPort": 8080}]})).expect("container");
        let check = |p: IntOrString, expected: Option<u16>| assert_eq!(port(&p, &container).ok(), expected);
        check(IntOrString::String("web".into()), Some(8080));
        check(IntOrString::String("81".into()), Some(81));
        check(IntOrString::String("nope".into()), None);
        check(IntOrString::Int(0), None);
    }
}
