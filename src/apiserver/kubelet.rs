//! Connections out of the API server: to kubelets (with a client certificate) and to pods.
//!
//! One connection per request: these are sessions (exec, logs, port-forward) or rare. An upgrade becomes a pipe of bytes, so
//! WebSocket and SPDY both pass without being understood here.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderName, Request, Response, StatusCode, Uri, header};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use windlass_api::{ApiError, meta};
use windlass_client::any_server::AnyServer;

use crate::content::{self, Reply, RequestBody};
use crate::storage::Objects;

/// How long a connection may take to stand.
const DIAL: Duration = Duration::from_secs(10);
const KUBELET_PORT: u16 = 10250;

/// Where a request goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Name or address.
    pub host: String,
    pub port: u16,
    pub transport: Transport,
}

/// How to speak to a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TLS with this server's client certificate.
    Kubelet,
    /// TLS without checking who answers, as upstream proxies to pods.
    Https,
    Http,
}

/// Dials kubelets and pods.
pub struct Kubelets {
    kubelet: Arc<rustls::ClientConfig>,
    anonymous: Arc<rustls::ClientConfig>,
    /// Kinds of node addresses, the preferred one first (`--kubelet-preferred-address-types`).
    address_types: Vec<String>,
}

impl Kubelets {
    /// `identity` is shown to kubelets. Their serving certificates are checked against `authority` when there is one, and taken as they
    /// are otherwise (as upstream without `--kubelet-certificate-authority`).
    pub fn new(
        identity: (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>),
        authority: Option<Arc<rustls::RootCertStore>>,
        address_types: Vec<String>,
    ) -> Result<Kubelets, rustls::Error> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = || rustls::ClientConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions();
        // Who answers at a pod's address is not for the API server to say.
        let any = || builder().map(|b| b.dangerous().with_custom_certificate_verifier(Arc::new(AnyServer::new(provider.clone()))));
        let kubelet = match authority {
            Some(roots) => builder()?.with_root_certificates(roots).with_client_auth_cert(identity.0, identity.1)?,
            None => any()?.with_client_auth_cert(identity.0, identity.1)?,
        };
        Ok(Kubelets { kubelet: Arc::new(kubelet), anonymous: Arc::new(any()?.with_no_client_auth()), address_types })
    }

    /// The kubelet of a node.
    pub fn of_node(&self, objects: &Objects, node: &str) -> Result<Target, ApiError> {
        let resource = objects.resource("", "nodes").ok_or_else(|| ApiError::internal("nodes are not registered"))?;
        let object = objects.cached(&resource, "", node).ok_or_else(|| ApiError::not_found("", "nodes", node))?;
        let value = object.value();
        let host = self.address(&value).ok_or_else(|| {
            ApiError::internal(format!("no preferred addresses found; known addresses: {}", value["status"]["addresses"]))
        })?;
        Ok(Target { host: host.to_owned(), port: kubelet_port(&value), transport: Transport::Kubelet })
    }

    /// A node's preferred address.
    pub fn address<'a>(&self, node: &'a Value) -> Option<&'a str> {
        let addresses = node["status"]["addresses"].as_array()?;
        self.address_types.iter().find_map(|kind| addresses.iter().find(|a| a["type"] == kind.as_str())?["address"].as_str())
    }

    /// Sends a request and returns the response's head and body; the response may be an upgrade.
    pub async fn send(&self, target: &Target, request: Request<RequestBody>) -> Result<Response<Incoming>, ApiError> {
        let dial_error = |e: &dyn std::fmt::Display| ApiError::internal(format!("error dialing backend: {}:{}: {e}", target.host, target.port));
        let dial = async {
            let tcp = TcpStream::connect((target.host.trim_matches(['[', ']']), target.port)).await.map_err(|e| dial_error(&e))?;
            let _ = tcp.set_nodelay(true);
            let config = match target.transport {
                Transport::Http => return handshake(tcp).await.map_err(|e| dial_error(&e)),
                Transport::Https => &self.anonymous,
                Transport::Kubelet => &self.kubelet,
            };
            let name = ServerName::try_from(target.host.trim_matches(['[', ']']).to_owned()).map_err(|e| dial_error(&e))?;
            let tls = TlsConnector::from(config.clone()).connect(name, tcp).await.map_err(|e| dial_error(&e))?;
            handshake(tls).await.map_err(|e| dial_error(&e))
        };
        let mut sender = tokio::time::timeout(DIAL, dial).await.map_err(|_| dial_error(&"timed out"))??;
        sender.send_request(request).await.map_err(|e| ApiError::internal(format!("error proxying to {}:{}: {e}", target.host, target.port)))
    }

    /// Passes a request on and its response back; an upgrade on both sides becomes a pipe.
    pub async fn forward(&self, target: &Target, mut request: Request<RequestBody>) -> Result<Reply, ApiError> {
        let upgrade = is_upgrade(request.headers());
        let client = upgrade.then(|| request.extensions_mut().remove::<hyper::upgrade::OnUpgrade>()).flatten();
        if upgrade && client.is_none() {
            return Err(ApiError::bad_request("this connection cannot be upgraded; use HTTP/1.1"));
        }
        strip(request.headers_mut(), upgrade);
        let authority = format!("{}:{}", target.host, target.port);
        if let Ok(host) = authority.parse() {
            request.headers_mut().insert(header::HOST, host);
        }
        request.extensions_mut().clear();
        *request.version_mut() = http::Version::HTTP_11;
        let mut response = self.send(target, request).await?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            let (mut parts, body) = response.into_parts();
            strip(&mut parts.headers, false);
            parts.version = http::Version::HTTP_11;
            parts.extensions.clear();
            return Ok(Response::from_parts(parts, content::request_body(body)));
        }
        let Some(client) = client else {
            return Err(ApiError::internal("the backend switched protocols without being asked to"));
        };
        let backend = hyper::upgrade::on(&mut response);
        tokio::spawn(pipe(client, backend));
        let (parts, _) = response.into_parts();
        let mut reply = Response::new(content::full(bytes::Bytes::new()));
        *reply.status_mut() = parts.status;
        *reply.headers_mut() = parts.headers;
        Ok(reply)
    }
}

/// The port that a node's kubelet serves on.
pub fn kubelet_port(node: &Value) -> u16 {
    let port = node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"].as_u64();
    port.and_then(|p| u16::try_from(p).ok()).filter(|p| *p != 0).unwrap_or(KUBELET_PORT)
}

async fn handshake<S>(stream: S) -> Result<http1::SendRequest<RequestBody>, hyper::Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(async move {
        if let Err(error) = connection.with_upgrades().await {
            tracing::debug!(%error, "a proxied connection ended with an error");
        }
    });
    Ok(sender)
}

/// Copies both ways until both sides have closed.
async fn pipe(client: hyper::upgrade::OnUpgrade, backend: hyper::upgrade::OnUpgrade) {
    match tokio::try_join!(client, backend) {
        Ok((client, backend)) => {
            let (mut client, mut backend) = (TokioIo::new(client), TokioIo::new(backend));
            if let Err(error) = tokio::io::copy_bidirectional(&mut client, &mut backend).await {
                tracing::debug!(%error, "an upgraded connection broke off");
            }
        }
        Err(error) => tracing::debug!(%error, "an upgrade failed"),
    }
}

/// Whether a request asks to switch protocols.
pub fn is_upgrade(headers: &HeaderMap) -> bool {
    headers.get_all(header::CONNECTION).iter().filter_map(|v| v.to_str().ok()).any(|v| v.to_ascii_lowercase().contains("upgrade"))
        && headers.contains_key(header::UPGRADE)
}

/// Removes what belongs to one hop, and credentials for this server.
fn strip(headers: &mut HeaderMap, keep_upgrade: bool) {
    const HOP: [HeaderName; 6] = [
        HeaderName::from_static("keep-alive"),
        header::PROXY_AUTHENTICATE,
        header::PROXY_AUTHORIZATION,
        header::TE,
        header::TRAILER,
        header::TRANSFER_ENCODING,
    ];
    HOP.iter().for_each(|name| drop(headers.remove(name)));
    headers.remove(header::AUTHORIZATION);
    if !keep_upgrade {
        headers.remove(header::CONNECTION);
        headers.remove(header::UPGRADE);
    }
    // A WebSocket client without headers of its own sends its token as a subprotocol.
    let protocols = header::SEC_WEBSOCKET_PROTOCOL;
    let kept: Vec<String> = headers
        .get_all(&protocols)
        .iter()
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(','))
        .map(str::trim)
        .filter(|p| !p.is_empty() && !p.starts_with("base64url.bearer.authorization.k8s.io."))
        .map(str::to_owned)
        .collect();
    headers.remove(&protocols);
    if let Ok(value) = kept.join(", ").parse()
        && !kept.is_empty()
    {
        headers.insert(protocols, value);
    }
}

/// Builds the request that goes out: the incoming one with another path.
pub fn redirected(method: http::Method, headers: HeaderMap, extensions: http::Extensions, path: &str, body: RequestBody) -> Result<Request<RequestBody>, ApiError> {
    let uri: Uri = path.parse().map_err(|e| ApiError::bad_request(format!("the path cannot be proxied: {e}")))?;
    let mut request = Request::new(body);
    *request.method_mut() = method;
    *request.uri_mut() = uri;
    *request.headers_mut() = headers;
    *request.extensions_mut() = extensions;
    Ok(request)
}

/// Addresses that a client may not make this server connect to, as upstream's `proxyutil.IsProxyableIP`.
pub fn check_proxyable(host: &str) -> Result<(), ApiError> {
    let Ok(ip) = host.trim_matches(['[', ']']).parse::<IpAddr>() else { return Ok(()) };
    let link_local = match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    if ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || link_local {
        return Err(ApiError::bad_request("address not allowed"));
    }
    Ok(())
}

/// The name of the pod's node; 400 when it has none yet.
pub fn node_of(pod: &Value) -> Result<&str, ApiError> {
    let node = pod["spec"]["nodeName"].as_str().unwrap_or_default();
    if node.is_empty() {
        return Err(ApiError::bad_request(format!("pod {} does not have a host assigned", meta::name(pod))));
    }
    Ok(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxyable() {
        for (host, ok) in [("10.0.0.1", true), ("127.0.0.1", false), ("169.254.169.254", false), ("::1", false), ("[fe80::1]", false), ("0.0.0.0", false), ("224.0.0.1", false), ("node-1", true)] {
            assert_eq!(check_proxyable(host).is_ok(), ok, "{host}");
        }
    }

    #[test]
    fn credentials_do_not_leave() {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, "Bearer x".parse().expect("a header"));
        headers.insert(header::CONNECTION, "Upgrade".parse().expect("a header"));
        headers.insert(header::UPGRADE, "websocket".parse().expect("a header"));
        let token = "v5.channel.k8s.io, base64url.bearer.authorization.k8s.io.c2VjcmV0";
        headers.insert(header::SEC_WEBSOCKET_PROTOCOL, token.parse().expect("a header"));
        assert!(is_upgrade(&headers));
        strip(&mut headers, true);
        assert!(!headers.contains_key(header::AUTHORIZATION));
        assert_eq!(headers[header::SEC_WEBSOCKET_PROTOCOL], "v5.channel.k8s.io");
        strip(&mut headers, false);
        assert!(!is_upgrade(&headers));
    }
}
