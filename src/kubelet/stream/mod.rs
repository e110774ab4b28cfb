//! Streaming over upgraded connections: SPDY/3.1 and WebSocket, each with Kubernetes' subprotocols on top.
//!
//! The API server passes the bytes of an upgraded connection through, so all protocol ends here.

mod dictionary;
pub mod exec;
pub mod portforward;
pub mod spdy;
pub mod websocket;

use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};

/// How a client wants to stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Upgrade {
    /// SPDY with this subprotocol.
    Spdy(String),
    /// WebSocket with this subprotocol.
    WebSocket(String),
}

pub const STREAM_VERSION: HeaderName = HeaderName::from_static("x-stream-protocol-version");

fn values<'a>(headers: &'a HeaderMap, name: &'a HeaderName) -> impl Iterator<Item = String> + 'a {
    headers.get_all(name).iter().filter_map(|v| v.to_str().ok()).flat_map(|v| v.split(',')).map(|v| v.trim().to_owned())
}

/// What the request asks to be upgraded to: the first of `spdy` or `web` that the client offers.
///
/// # Errors
/// The status and message of the refusal.
pub fn negotiate(parts: &Parts, spdy: &[&str], web: &[&str]) -> Result<Upgrade, (StatusCode, String)> {
    let upgrade = values(&parts.headers, &header::UPGRADE).map(|v| v.to_lowercase()).collect::<Vec<_>>();
    let has = |what: &str| upgrade.iter().any(|u| u == what);
    if has("websocket") {
        let offered: Vec<String> = values(&parts.headers, &header::SEC_WEBSOCKET_PROTOCOL).collect();
        let chosen = web.iter().find(|p| offered.iter().any(|o| o == *p)).map(|p| (*p).to_owned());
        return match chosen {
            Some(protocol) => Ok(Upgrade::WebSocket(protocol)),
            None if offered.is_empty() => Ok(Upgrade::WebSocket(String::new())),
            None => Err((StatusCode::FORBIDDEN, format!("unable to negotiate a WebSocket subprotocol: client offers {offered:?}, server has {web:?}"))),
        };
    }
    if has("spdy/3.1") {
        let offered: Vec<String> = values(&parts.headers, &STREAM_VERSION).collect();
        let chosen = spdy.iter().find(|p| offered.iter().any(|o| o == *p)).map(|p| (*p).to_owned());
        return match chosen {
            Some(protocol) => Ok(Upgrade::Spdy(protocol)),
            None if offered.is_empty() => Ok(Upgrade::Spdy(String::new())),
            None => Err((StatusCode::FORBIDDEN, format!("unable to upgrade: unable to negotiate protocol: client supports {offered:?}, server accepts {spdy:?}"))),
        };
    }
    Err((StatusCode::BAD_REQUEST, "you must specify the 'Upgrade' header: SPDY/3.1 or websocket".into()))
}

/// The answer that accepts the upgrade.
pub fn accept<B: Default>(parts: &Parts, upgrade: &Upgrade) -> Response<B> {
    let mut response = Response::new(B::default());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    match upgrade {
        Upgrade::Spdy(protocol) => {
            headers.insert(header::UPGRADE, HeaderValue::from_static("SPDY/3.1"));
            if let Ok(value) = HeaderValue::from_str(protocol) {
                headers.insert(STREAM_VERSION, value);
            }
        }
        Upgrade::WebSocket(protocol) => {
            headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
            let key = parts.headers.get(header::SEC_WEBSOCKET_KEY).map(HeaderValue::as_bytes).unwrap_or_default();
            if let Ok(value) = HeaderValue::from_str(&accept_key(key)) {
                headers.insert(header::SEC_WEBSOCKET_ACCEPT, value);
            }
            if let Some(value) = HeaderValue::from_str(protocol).ok().filter(|v| !v.is_empty()) {
                headers.insert(header::SEC_WEBSOCKET_PROTOCOL, value);
            }
        }
    }
    response
}

fn accept_key(key: &[u8]) -> String {
    tokio_tungstenite::tungstenite::handshake::derive_accept_key(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(headers: &[(&str, &str)], expected: Result<Upgrade, StatusCode>) {
        let mut request = http::Request::builder();
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (parts, ()) = request.body(()).expect("request").into_parts();
        let got = negotiate(&parts, &["v4.channel.k8s.io", "v3.channel.k8s.io"], &["v5.channel.k8s.io", "v4.channel.k8s.io"]);
        assert_eq!(got.map_err(|(status, _)| status), expected, "{headers:?}");
    }

    #[test]
    fn upgrades() {
        let spdy = |v: &str| Ok(Upgrade::Spdy(v.into()));
        let web = |v: &str| Ok(Upgrade::WebSocket(v.into()));
        check(&[("Upgrade", "SPDY/3.1"), ("X-Stream-Protocol-Version", "v3.channel.k8s.io"), ("X-Stream-Protocol-Version", "v4.channel.k8s.io")], spdy("v4.channel.k8s.io"));
        check(&[("Upgrade", "SPDY/3.1")], spdy(""));
        check(&[("Upgrade", "SPDY/3.1"), ("X-Stream-Protocol-Version", "v9")], Err(StatusCode::FORBIDDEN));
        check(&[("Upgrade", "websocket"), ("Sec-WebSocket-Protocol", "v4.channel.k8s.io, v5.channel.k8s.io")], web("v5.channel.k8s.io"));
        check(&[("Upgrade", "websocket"), ("Sec-WebSocket-Protocol", "nope")], Err(StatusCode::FORBIDDEN));
        check(&[], Err(StatusCode::BAD_REQUEST));
    }

    #[test]
    fn the_accept_key_is_rfc_6455s() {
        assert_eq!(accept_key(b"dGhlIHNhbXBsZSBub25jZQ=="), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    }
}
