//! Request headers of a front proxy: it has authenticated the user and says who it is.

use super::x509::issued_by;
use super::{Authenticated, Authenticator};
use crate::pki::authority::Authority;
use crate::request::UserInfo;
use async_trait::async_trait;
use http::request::Parts;
use jiff::Timestamp;
use std::collections::BTreeMap;
use std::sync::Arc;
use windlass_api::ApiError;
use windlass_daemon::server::PeerCertificates;

pub const USER: &str = "x-remote-user";
pub const UID: &str = "x-remote-uid";
pub const GROUP: &str = "x-remote-group";
pub const EXTRA: &str = "x-remote-extra-";

/// Believes the headers of clients whose certificate the front proxy authority issued.
pub struct RequestHeader {
    pub authority: Arc<Authority>,
    /// Common names that may speak for others; any if empty.
    pub allowed_names: Vec<String>,
}

/// Decodes `%xx`; a broken escape stays as it is.
pub fn unescape(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut index = 0;
    while index < bytes.len() {
        let escaped = (bytes[index] == b'%').then(|| text.get(index + 1..index + 3)).flatten();
        match escaped.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                index += 3;
            }
            None => {
                out.push(bytes[index]);
                index += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// The values of all headers that begin with a prefix, by what follows it.
pub fn extra(parts: &Parts, prefix: &str) -> BTreeMap<String, Vec<String>> {
    let mut extra: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, value) in &parts.headers {
        let (Some(key), Ok(value)) = (name.as_str().strip_prefix(prefix), value.to_str()) else { continue };
        extra.entry(unescape(key)).or_default().push(value.to_owned());
    }
    extra
}

#[async_trait]
impl Authenticator for RequestHeader {
    async fn authenticate(&self, parts: &Parts) -> Result<Option<Authenticated>, ApiError> {
        let Some(peer) = parts.extensions.get::<PeerCertificates>() else { return Ok(None) };
        let Some(leaf) = peer.0.first() else { return Ok(None) };
        let Some(certificate) = issued_by(leaf, &self.authority, Timestamp::now()) else { return Ok(None) };
        let name = certificate.subject().iter_common_name().last().and_then(|name| name.as_str().ok());
        let name = name.unwrap_or_default();
        if !self.allowed_names.is_empty() && !self.allowed_names.iter().any(|allowed| allowed == name) {
            return Err(ApiError::unauthorized("Unauthorized"));
        }
        let text = |header: &str| {
            parts.headers.get(header).and_then(|value| value.to_str().ok()).unwrap_or_default().trim().to_owned()
        };
        let user = text(USER);
        if user.is_empty() {
            return Ok(None);
        }
        let groups = parts.headers.get_all(GROUP).iter();
        let groups = groups.filter_map(|value| value.to_str().ok()).map(str::to_owned).collect();
        let user = UserInfo { name: user, uid: text(UID), groups, extra: extra(parts, EXTRA) };
        Ok(Some(Authenticated { user, audiences: Vec::new(), warning: None }))
    }
}
