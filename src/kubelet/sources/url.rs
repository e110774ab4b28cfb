//! Static pods from a URL, fetched every 20 seconds: the one source that cannot tell when it changes.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{complete, parse};
use crate::error::Error;
use crate::manager::Input;

pub const SOURCE: &str = "http";
const PERIOD: Duration = Duration::from_secs(20);
const TIMEOUT: Duration = Duration::from_secs(10);
const MAX_BODY: usize = 10 << 20;

/// Where to fetch from.
#[derive(Clone, Debug)]
pub struct Source {
    pub uri: Uri,
    pub headers: Vec<(header::HeaderName, header::HeaderValue)>,
}

impl Source {
    /// Reads the URL and `key:value` headers of the configuration.
    pub fn parse(url: &str, headers: &[String]) -> Result<Self, Error> {
        let fail = |field: &'static str, value: &str, reason: String| Error::Config { field, value: value.to_owned(), reason };
        let uri: Uri = url.parse().map_err(|e: http::uri::InvalidUri| fail("manifest-url", url, e.to_string()))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none() {
            return Err(fail("manifest-url", url, "write it as http://host/path or https://host/path".into()));
        }
        let mut list = Vec::new();
        for text in headers.iter().filter(|h| !h.is_empty()) {
            let (key, value) = text.split_once(':').ok_or_else(|| fail("manifest-url-header", text, "write it as key:value".into()))?;
            let key = key.trim().parse().map_err(|_| fail("manifest-url-header", text, "the key is not a header name".into()))?;
            let value = value.trim().parse().map_err(|_| fail("manifest-url-header", text, "the value is not a header value".into()))?;
            list.push((key, value));
        }
        Ok(Self { uri, headers: list })
    }

    async fn fetch(&self) -> Result<String, String> {
        let host = self.uri.host().unwrap_or("").trim_matches(['[', ']']).to_owned();
        let tls = self.uri.scheme_str() == Some("https");
        let port = self.uri.port_u16().unwrap_or(if tls { 443 } else { 80 });
        let stream = TcpStream::connect((host.as_str(), port)).await.map_err(|e| e.to_string())?;
        if !tls {
            return self.get(TokioIo::new(stream)).await;
        }
        let roots = rustls::RootCertStore::from_iter(system_roots());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().map_err(|e| e.to_string())?;
        let config = config.with_root_certificates(roots).with_no_client_auth();
        let name = rustls_pki_types::ServerName::try_from(host).map_err(|e| e.to_string())?;
        let stream = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await.map_err(|e| e.to_string())?;
        self.get(TokioIo::new(stream)).await
    }

    async fn get<S: hyper::rt::Read + hyper::rt::Write + Send + Unpin + 'static>(&self, io: S) -> Result<String, String> {
        let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.map_err(|e| e.to_string())?;
        let _abort = tokio_util::task::AbortOnDropHandle::new(tokio::spawn(connection));
        let path = self.uri.path_and_query().map_or("/", |p| p.as_str());
        let mut request = Request::get(path).header(header::HOST, self.uri.authority().map_or("", |a| a.as_str())).header(header::CONNECTION, "close");
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let request = request.body(Full::new(Bytes::new())).map_err(|e| e.to_string())?;
        let response = sender.send_request(request).await.map_err(|e| e.to_string())?;
        if response.status() != http::StatusCode::OK {
            return Err(format!("the server answered {}", response.status()));
        }
        let body = Limited::new(response.into_body(), MAX_BODY).collect().await.map_err(|e| e.to_string())?;
        String::from_utf8(body.to_bytes().to_vec()).map_err(|_| "the answer is not UTF-8".to_owned())
    }
}

/// The CAs that Debian and NixOS install.
fn system_roots() -> impl Iterator<Item = rustls_pki_types::TrustAnchor<'static>> {
    let text = ["/etc/ssl/certs/ca-certificates.crt", "/etc/ssl/certs/ca-bundle.crt"].iter().find_map(|p| std::fs::read_to_string(p).ok()).unwrap_or_default();
    let certificates = windlass_client::identity::parse_certificates(&text);
    let mut store = rustls::RootCertStore::empty();
    store.add_parsable_certificates(certificates);
    store.roots.into_iter()
}

/// Fetches until shutdown. A failed fetch changes nothing: what runs goes on.
pub async fn run(source: Source, node: String, inbox: mpsc::Sender<Input>, shutdown: CancellationToken) {
    let mut last: Option<String> = None;
    loop {
        let fetched = tokio::time::timeout(TIMEOUT, source.fetch()).await.unwrap_or_else(|_| Err(format!("no answer within {} s", TIMEOUT.as_secs())));
        match fetched {
            Ok(text) if last.as_ref() != Some(&text) => match parse(&text) {
                Ok(pods) => {
                    let origin = source.uri.to_string();
                    let pods = pods.into_iter().map(|p| complete(p, SOURCE, &origin, &node)).collect();
                    last = Some(text);
                    if inbox.send(Input::Static { source: SOURCE, pods }).await.is_err() {
                        return;
                    }
                }
                Err(error) => tracing::warn!(url = %source.uri, error, "not a manifest of static pods"),
            },
            Ok(_) => {}
            Err(error) => tracing::warn!(url = %source.uri, error, "cannot fetch the manifest of static pods"),
        }
        tokio::select! {
            () = tokio::time::sleep(PERIOD) => {}
            () = shutdown.cancelled() => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings() {
        let check = |url: &str, headers: &[&str], good: bool| {
            let headers: Vec<String> = headers.iter().map(|h| (*h).to_owned()).collect();
            assert_eq!(Source::parse(url, &headers).is_ok(), good, "{url} {headers:?}");
        };
        check("http://host:1/x", &["X-A: b"], true);
        check("ftp://host", &[], false);
        check("/x", &[], false);
        check("http://host", &["nothing"], false);
    }
}
