//! Who may read a role's own endpoints: the API server is asked, by TokenReview and SubjectAccessReview.
//!
//! Answers are remembered as long as upstream's delegating authorizer does: 10 s for yes, 10 s for no.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::time::Duration;

use http::StatusCode;
use http::request::Parts;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use tokio::time::Instant;
use windlass_daemon::endpoints::{Denied, Gate};
use windlass_daemon::server::PeerCertificates;
use x509_parser::prelude::{FromDer, X509Certificate};

const REMEMBER: Duration = Duration::from_secs(10);
/// Answers that are remembered of each kind.
const REMEMBERED: usize = 1024;

/// Asks the API server who a caller is and what it may do.
pub struct Delegated {
    client: Client,
    users: Memory<[u8; 32], Option<UserInfo>>,
    verdicts: Memory<String, Result<(), String>>,
}

/// What a caller wants, in the terms of a SubjectAccessReview.
#[derive(Clone, Debug)]
pub enum Wish {
    /// A path, e.g. `/metrics`, with a verb such as `get`.
    Path { path: String, verb: String },
    /// A resource, e.g. `nodes/log` of one node.
    Resource(ResourceAttributes),
}

impl Delegated {
    pub fn new(client: Client) -> Self {
        Self { client, users: Memory::new(), verdicts: Memory::new() }
    }

    /// Who sent the request: by bearer token, or else by the client certificate that the TLS layer has verified.
    pub async fn user(&self, parts: &Parts) -> Result<UserInfo, Denied> {
        let unauthorized = |message: &str| Denied { status: StatusCode::UNAUTHORIZED, message: message.to_owned() };
        let header = parts.headers.get(http::header::AUTHORIZATION).and_then(|h| h.to_str().ok());
        if let Some(token) = header.and_then(|h| h.strip_prefix("Bearer ")) {
            return self.review(token.trim()).await?.ok_or_else(|| unauthorized("the bearer token is not valid for this cluster"));
        }
        let peer = parts.extensions.get::<PeerCertificates>().and_then(|p| p.0.first());
        let user = peer.and_then(|certificate| certificate_user(certificate));
        user.ok_or_else(|| unauthorized("show a client certificate of this cluster, or a bearer token"))
    }

    /// Whether `user` may have its wish.
    pub async fn allow(&self, user: &UserInfo, wish: &Wish) -> Result<(), Denied> {
        let key = serde_json::json!([user, format!("{wish:?}")]).to_string();
        let verdict = match self.verdicts.get(&key) {
            Some(verdict) => verdict,
            None => {
                let verdict = self.ask(user, wish).await?;
                self.verdicts.put(key, verdict.clone());
                verdict
            }
        };
        verdict.map_err(|message| Denied { status: StatusCode::FORBIDDEN, message })
    }

    async fn review(&self, token: &str) -> Result<Option<UserInfo>, Denied> {
        // Tokens are not kept, only their digests.
        let key: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        if let Some(user) = self.users.get(&key) {
            return Ok(user);
        }
        let spec = TokenReviewSpec { token: token.to_owned(), audiences: None };
        let reviews: Api<TokenReview> = Api::all(self.client.clone());
        let review = reviews.create(&PostParams::default(), &TokenReview { spec, ..TokenReview::default() }).await.map_err(unavailable)?;
        let status = review.status.unwrap_or_default();
        let user = status.user.filter(|_| status.authenticated == Some(true));
        self.users.put(key, user.clone());
        Ok(user)
    }

    async fn ask(&self, user: &UserInfo, wish: &Wish) -> Result<Result<(), String>, Denied> {
        let mut spec = SubjectAccessReviewSpec {
            user: user.username.clone(),
            uid: user.uid.clone(),
            groups: user.groups.clone(),
            extra: user.extra.clone(),
            ..SubjectAccessReviewSpec::default()
        };
        let what = match wish {
            Wish::Path { path, verb } => {
                spec.non_resource_attributes = Some(NonResourceAttributes { path: Some(path.clone()), verb: Some(verb.clone()) });
                format!("{verb} path {path:?}")
            }
            Wish::Resource(attributes) => {
                spec.resource_attributes = Some(attributes.clone());
                let part = |field: &Option<String>| field.clone().unwrap_or_default();
                format!("{} resource {}/{}", part(&attributes.verb), part(&attributes.resource), part(&attributes.subresource))
            }
        };
        let reviews: Api<SubjectAccessReview> = Api::all(self.client.clone());
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let status = reviews.create(&PostParams::default(), &review).await.map_err(unavailable)?.status.unwrap_or_default();
        Ok(if status.allowed {
            Ok(())
        } else {
            Err(format!("user {:?} cannot {what}", user.username.as_deref().unwrap_or_default()))
        })
    }
}

fn unavailable(error: kube::Error) -> Denied {
    Denied { status: StatusCode::SERVICE_UNAVAILABLE, message: format!("cannot ask the API server who you are and what you may do: {error}") }
}

/// The user a verified client certificate stands for: common name and organizations, as the API server reads them.
pub fn certificate_user(der: &[u8]) -> Option<UserInfo> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let name = certificate.subject().iter_common_name().next()?.as_str().ok()?.to_owned();
    let organizations = certificate.subject().iter_organization().filter_map(|o| o.as_str().ok().map(str::to_owned));
    let groups = organizations.chain(["system:authenticated".to_owned()]).collect();
    Some(UserInfo { username: Some(name), groups: Some(groups), extra: Some(BTreeMap::new()), uid: None })
}

#[async_trait::async_trait]
impl Gate for Delegated {
    async fn admit(&self, parts: &Parts) -> Result<(), Denied> {
        let user = self.user(parts).await?;
        let verb = parts.method.as_str().to_ascii_lowercase();
        self.allow(&user, &Wish::Path { path: parts.uri.path().to_owned(), verb }).await
    }
}

/// A bounded map of answers that expire.
struct Memory<K, V> {
    answers: Mutex<HashMap<K, (V, Instant)>>,
}

impl<K: Eq + Hash, V: Clone> Memory<K, V> {
    fn new() -> Self {
        Self { answers: Mutex::new(HashMap::new()) }
    }

    fn get(&self, key: &K) -> Option<V> {
        let answers = self.answers.lock();
        answers.get(key).filter(|(_, at)| at.elapsed() < REMEMBER).map(|(value, _)| value.clone())
    }

    fn put(&self, key: K, value: V) {
        let mut answers = self.answers.lock();
        if answers.len() >= REMEMBERED {
            answers.retain(|_, (_, at)| at.elapsed() < REMEMBER);
        }
        if answers.len() >= REMEMBERED {
            answers.clear();
        }
        answers.insert(key, (value, Instant::now()));
    }
}
