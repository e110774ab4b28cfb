//! Client certificates: the common name is the user, the organizations are the groups.
//!
//! TLS has verified the chain against both authorities; here it is decided which of them issued the certificate.

use super::{Authenticated, Authenticator};
use crate::pki::authority::Authority;
use crate::request::UserInfo;
use async_trait::async_trait;
use http::request::Parts;
use jiff::Timestamp;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use windlass_api::ApiError;
use windlass_daemon::server::PeerCertificates;
use x509_parser::prelude::{FromDer, X509Certificate};

/// At most so many certificates are remembered.
const REMEMBERED: usize = 4096;
/// Object identifier of the attribute that carries a user's uid (upstream's `AllowParsingUserUIDFromCertAuth`).
const UID_OID: &str = "1.3.6.1.4.1.57683.2";

/// Whether a certificate (DER) was issued by this authority, and is valid now.
pub fn issued_by<'a>(certificate: &'a [u8], authority: &Authority, now: Timestamp) -> Option<X509Certificate<'a>> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let (_, issuer) = X509Certificate::from_der(authority.certificate()).ok()?;
    let validity = parsed.validity();
    let now = now.as_second();
    let valid = validity.not_before.timestamp() <= now && now <= validity.not_after.timestamp();
    let same = parsed.issuer().as_raw() == issuer.subject().as_raw();
    (valid && same && parsed.verify_signature(Some(issuer.public_key())).is_ok()).then_some(parsed)
}

/// The user that a certificate names.
pub fn user(certificate: &X509Certificate<'_>, der: &[u8]) -> Option<UserInfo> {
    let subject = certificate.subject();
    let name = subject.iter_common_name().last()?.as_str().ok()?;
    if name.is_empty() {
        return None;
    }
    let groups = subject.iter_organization().filter_map(|group| group.as_str().ok()).map(str::to_owned).collect();
    let uid = subject.iter_attributes().find(|attribute| attribute.attr_type().to_id_string() == UID_OID);
    let uid = uid.and_then(|attribute| attribute.as_str().ok()).unwrap_or_default().to_owned();
    let digest = crate::pki::hex(ring::digest::digest(&ring::digest::SHA256, der).as_ref());
    let credential = ("authentication.kubernetes.io/credential-id".to_owned(), vec![format!("X509SHA256={digest}")]);
    Some(UserInfo { name: name.to_owned(), uid, groups, extra: BTreeMap::from([credential]) })
}

/// Authenticates by client certificates of one authority.
pub struct ClientCertificates {
    authority: Arc<Authority>,
    /// Verified certificates by digest, with their end (Unix seconds).
    known: Mutex<HashMap<[u8; 32], (Arc<UserInfo>, i64)>>,
}

impl ClientCertificates {
    pub fn new(authority: Arc<Authority>) -> ClientCertificates {
        ClientCertificates { authority, known: Mutex::default() }
    }

    fn identify(&self, der: &[u8], now: Timestamp) -> Option<Arc<UserInfo>> {
        let mut digest = [0u8; 32];
        digest.copy_from_slice(ring::digest::digest(&ring::digest::SHA256, der).as_ref());
        if let Some((user, until)) = self.known.lock().get(&digest) {
            if now.as_second() <= *until {
                return Some(user.clone());
            }
        }
        let certificate = issued_by(der, &self.authority, now)?;
        let until = certificate.validity().not_after.timestamp();
        let user = Arc::new(user(&certificate, der)?);
        let mut known = self.known.lock();
        if known.len() >= REMEMBERED {
            known.clear();
        }
        known.insert(digest, (user.clone(), until));
        Some(user)
    }
}

#[async_trait]
impl Authenticator for ClientCertificates {
    async fn authenticate(&self, parts: &Parts) -> Result<Option<Authenticated>, ApiError> {
        let Some(peer) = parts.extensions.get::<PeerCertificates>() else { return Ok(None) };
        let Some(leaf) = peer.0.first() else { return Ok(None) };
        let user = self.identify(leaf, Timestamp::now());
        Ok(user.map(|user| Authenticated { user: user.as_ref().clone(), audiences: Vec::new(), warning: None }))
    }
}
