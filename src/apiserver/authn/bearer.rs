//! Bearer tokens: the union of all token kinds, behind a bounded cache of results.

use super::{Authenticated, Authenticator};
use async_trait::async_trait;
use http::header::{AUTHORIZATION, SEC_WEBSOCKET_PROTOCOL};
use http::request::Parts;
use parking_lot::Mutex;
use prometheus::IntCounterVec;
use ring::hmac;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use windlass_api::ApiError;

/// What became of a token.
#[derive(Clone, Debug)]
pub enum Token {
    /// Not of this kind.
    Unknown,
    /// Of this kind, and refused (the reason is for logs and reviews, not for the caller).
    Bad(String),
    Good(Authenticated),
}

/// One kind of token.
#[async_trait]
pub trait TokenAuthenticator: Send + Sync + 'static {
    /// `audiences` are those of which the token must have one.
    async fn authenticate_token(&self, token: &str, audiences: &[String]) -> Token;
}

/// How long a result is believed (upstream's): a deleted pod's token works at most so much longer.
const GOOD_FOR: Duration = Duration::from_secs(10);
/// At most so many results are remembered.
const REMEMBERED: usize = 8192;

/// All token kinds in order.
pub struct Bearer {
    kinds: Vec<Arc<dyn TokenAuthenticator>>,
    audiences: Vec<String>,
    /// Results by keyed digest of token and audiences.
    known: Mutex<HashMap<[u8; 32], (Authenticated, Instant)>>,
    /// Random per process, so that digests cannot be computed from outside.
    digest_key: hmac::Key,
    lookups: IntCounterVec,
}

impl Bearer {
    /// `audiences` are this API server's.
    pub fn new(kinds: Vec<Arc<dyn TokenAuthenticator>>, audiences: Vec<String>) -> Result<Bearer, crate::pki::Error> {
        let random = ring::rand::SystemRandom::new();
        let digest_key = hmac::Key::generate(hmac::HMAC_SHA256, &random).map_err(|_| crate::pki::Error::Random)?;
        let lookups = windlass_daemon::metrics::counter_vec(
            "authentication_token_cache_request_total",
            "Token cache lookups by result.",
            &["status"],
        );
        Ok(Bearer { kinds, audiences, known: Mutex::default(), digest_key, lookups })
    }

    fn digest(&self, token: &str, audiences: &[String]) -> [u8; 32] {
        let mut context = hmac::Context::with_key(&self.digest_key);
        context.update(token.as_bytes());
        for audience in audiences {
            context.update(&[0]);
            context.update(audience.as_bytes());
        }
        let mut digest = [0u8; 32];
        digest.copy_from_slice(context.sign().as_ref());
        digest
    }

    fn remembered(&self, digest: &[u8; 32]) -> Option<Authenticated> {
        let known = self.known.lock();
        let (found, until) = known.get(digest)?;
        (*until > Instant::now()).then(|| found.clone())
    }

    fn remember(&self, digest: [u8; 32], result: &Authenticated) {
        let now = Instant::now();
        let mut known = self.known.lock();
        if known.len() >= REMEMBERED {
            known.retain(|_, (_, until)| *until > now);
        }
        if known.len() >= REMEMBERED {
            known.clear();
        }
        known.insert(digest, (result.clone(), now + GOOD_FOR));
    }

    /// Checks a token for audiences (this server's if none are given); shared with TokenReview.
    pub async fn check(&self, token: &str, audiences: Option<&[String]>) -> Token {
        let audiences = audiences.filter(|list| !list.is_empty()).unwrap_or(&self.audiences);
        let digest = self.digest(token, audiences);
        if let Some(found) = self.remembered(&digest) {
            self.lookups.with_label_values(&["hit"]).inc();
            return Token::Good(found);
        }
        self.lookups.with_label_values(&["miss"]).inc();
        let mut refusals = Vec::new();
        for kind in &self.kinds {
            match kind.authenticate_token(token, audiences).await {
                Token::Good(result) => {
                    self.remember(digest, &result);
                    return Token::Good(result);
                }
                Token::Bad(why) => refusals.push(why),
                Token::Unknown => {}
            }
        }
        match refusals.as_slice() {
            [] => Token::Unknown,
            [one] => Token::Bad(one.clone()),
            many => Token::Bad(format!("[{}]", many.join(", "))),
        }
    }
}

/// The token of an `Authorization: Bearer` header, or of a WebSocket's subprotocol.
fn token_of(parts: &Parts) -> Option<String> {
    if let Some(header) = parts.headers.get(AUTHORIZATION) {
        let text = header.to_str().ok()?.trim();
        let (scheme, token) = text.split_once(' ')?;
        let token = token.trim();
        return (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then(|| token.to_owned());
    }
    const PREFIX: &str = "base64url.bearer.authorization.k8s.io.";
    let protocols = parts.headers.get_all(SEC_WEBSOCKET_PROTOCOL).iter().filter_map(|value| value.to_str().ok());
    let mut protocols = protocols.flat_map(|list| list.split(',')).map(str::trim);
    let encoded = protocols.find_map(|protocol| protocol.strip_prefix(PREFIX))?;
    use base64::Engine;
    let bytes = base64::engine::general_purpose::URL_SAFE_NO_PAD.decode(encoded).ok()?;
    String::from_utf8(bytes).ok().filter(|token| !token.is_empty())
}

#[async_trait]
impl Authenticator for Bearer {
    async fn authenticate(&self, parts: &Parts) -> Result<Option<Authenticated>, ApiError> {
        let Some(token) = token_of(parts) else { return Ok(None) };
        match self.check(&token, None).await {
            Token::Good(result) => Ok(Some(result)),
            Token::Bad(why) => {
                tracing::debug!(%why, "bearer token refused");
                Err(ApiError::unauthorized("Unauthorized"))
            }
            Token::Unknown => Err(ApiError::unauthorized("Unauthorized")),
        }
    }
}
