//! Who is asking: from a request's head to a [`UserInfo`].
//!
//! Invariants:
//! - An authenticator reads the head of a request and caches only; it never reads a body.
//! - A credential that is recognised but bad ends in 401 (with anonymous access it does not fall back to it).
//! - Caches of verified tokens are bounded in number and in time, and hold digests, never tokens.
//! - Deliberately absent: OIDC issuers and webhook token review (an error in the configuration, not ignored).
//!
//! Code map: [`x509`] client certificates; [`bearer`] the union of token kinds and its cache;
//! [`serviceaccount`] own JWTs and legacy secret tokens; [`static_tokens`]; [`bootstrap_token`];
//! [`request_header`] front proxies; [`mod@impersonate`]; [`reviews`] TokenReview and SelfSubjectReview.

pub mod bearer;
pub mod bootstrap_token;
pub mod impersonate;
pub mod request_header;
pub mod reviews;
pub mod serviceaccount;
pub mod static_tokens;
pub mod x509;

use async_trait::async_trait;
use bearer::{Bearer, TokenAuthenticator};
use http::request::Parts;
use std::path::PathBuf;
use std::sync::Arc;
use windlass_api::ApiError;

use crate::cluster::Cluster;
use crate::pki::Pki;
use crate::token::Issuer;

pub use crate::request::UserInfo;

/// Groups and names that authentication itself hands out.
pub const ANONYMOUS: &str = "system:anonymous";
pub const UNAUTHENTICATED: &str = "system:unauthenticated";
pub const AUTHENTICATED: &str = "system:authenticated";
/// Members of this group are above authorization.
pub const MASTERS: &str = "system:masters";

/// A proven identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Authenticated {
    pub user: UserInfo,
    /// Audiences of this server for which the credential is good; empty when the credential has none (certificates).
    pub audiences: Vec<String>,
    /// What the caller should be told (a `Warning` header's text), such as an old token.
    pub warning: Option<String>,
}

/// Proves who sent a request, from its head and the connection's extensions.
#[async_trait]
pub trait Authenticator: Send + Sync + 'static {
    /// `Ok(None)`: nothing here that this authenticator knows. `Err`: a credential that is refused (401).
    async fn authenticate(&self, parts: &Parts) -> Result<Option<Authenticated>, ApiError>;
}

/// What of authentication is configurable.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// `--token-auth-file`.
    pub token_file: Option<PathBuf>,
    /// `--requestheader-allowed-names`; any if empty.
    pub request_header_names: Vec<String>,
    /// `--anonymous-auth`: whether requests without credentials may see health, version and issuer documents.
    pub anonymous: bool,
}

/// Why authentication cannot start.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    #[error(transparent)]
    TokenFile(#[from] static_tokens::FileError),
    #[error(transparent)]
    Pki(#[from] crate::pki::Error),
}

/// All authenticators in upstream's order: request header, client certificate, bearer token, anonymous.
pub struct Authn {
    chain: Vec<Arc<dyn Authenticator>>,
    /// Shared with TokenReview.
    pub bearer: Arc<Bearer>,
    anonymous: bool,
    attempts: prometheus::IntCounterVec,
}

/// Builds the union of authenticators.
pub fn build(options: &Options, cluster: &Arc<dyn Cluster>, pki: &Pki, issuer: &Arc<Issuer>) -> Result<Authn, SetupError> {
    let mut kinds: Vec<Arc<dyn TokenAuthenticator>> = Vec::new();
    if let Some(path) = &options.token_file {
        kinds.push(Arc::new(static_tokens::StaticTokens::load(path)?));
    }
    kinds.push(Arc::new(serviceaccount::ServiceAccounts::new(issuer.clone(), cluster.clone())));
    kinds.push(Arc::new(bootstrap_token::BootstrapTokens { cluster: cluster.clone() }));
    let bearer = Arc::new(Bearer::new(kinds, issuer.audiences.clone())?);
    let chain: Vec<Arc<dyn Authenticator>> = vec![
        Arc::new(request_header::RequestHeader {
            authority: pki.front_proxy.clone(),
            allowed_names: options.request_header_names.clone(),
        }),
        Arc::new(x509::ClientCertificates::new(pki.cluster.clone())),
        bearer.clone(),
    ];
    let attempts = windlass_daemon::metrics::counter_vec(
        "authentication_attempts",
        "Counter of authenticated attempts.",
        &["result"],
    );
    Ok(Authn { chain, bearer, anonymous: options.anonymous, attempts })
}

/// Paths that may be asked for without credentials (authorization still decides).
fn is_public(path: &str) -> bool {
    let under = |root: &str| path == root || path.strip_prefix(root).is_some_and(|rest| rest.starts_with('/'));
    ["/healthz", "/livez", "/readyz", "/version"].into_iter().any(under)
        || matches!(path, "/.well-known/openid-configuration" | "/openid/v1/jwks")
}

/// Adds `system:authenticated`, unless the user says that it is not.
pub(crate) fn add_authenticated(user: &mut UserInfo) {
    let said = user.groups.iter().any(|group| group == AUTHENTICATED || group == UNAUTHENTICATED);
    if !said {
        user.groups.push(AUTHENTICATED.to_owned());
    }
}

/// Whether two secrets are equal, in a time that depends on their lengths only.
pub(crate) fn same_secret(a: &[u8], b: &[u8]) -> bool {
    let differs = a.iter().zip(b).fold(0u8, |sum, (a, b)| sum | (a ^ b));
    a.len() == b.len() && differs == 0
}

impl Authn {
    /// Who sent the request: the first authenticator that knows; else the anonymous user on public paths; else 401.
    pub async fn authenticate(&self, parts: &Parts) -> Result<Authenticated, ApiError> {
        let mut refused = false;
        for authenticator in &self.chain {
            match authenticator.authenticate(parts).await {
                Ok(Some(mut found)) => {
                    add_authenticated(&mut found.user);
                    self.attempts.with_label_values(&["success"]).inc();
                    return Ok(found);
                }
                Ok(None) => {}
                Err(_) => refused = true,
            }
        }
        if !refused && self.anonymous && is_public(parts.uri.path()) {
            let user = UserInfo { name: ANONYMOUS.to_owned(), groups: vec![UNAUTHENTICATED.to_owned()], ..UserInfo::default() };
            return Ok(Authenticated { user, audiences: Vec::new(), warning: None });
        }
        self.attempts.with_label_values(&["failure"]).inc();
        Err(ApiError::unauthorized("Unauthorized"))
    }
}

#[async_trait]
impl Authenticator for Authn {
    async fn authenticate(&self, parts: &Parts) -> Result<Option<Authenticated>, ApiError> {
        Authn::authenticate(self, parts).await.map(Some)
    }
}

#[cfg(test)]
mod tests;
