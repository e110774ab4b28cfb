//! Service account tokens for projected volumes: requested for the pod, kept in memory, renewed before they expire.

use std::collections::HashMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use kube::api::PostParams;
use kube::{Api, Client};
use parking_lot::Mutex;
use rand::Rng;

use crate::pod::model;

const MAX_AGE: SignedDuration = SignedDuration::from_hours(24);
const JITTER: Duration = Duration::from_secs(10);

#[derive(Clone)]
struct Token {
    value: String,
    expires: Timestamp,
    renew: Timestamp,
}

/// What a token is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    pod_uid: String,
    account: String,
    audience: String,
    seconds: i64,
}

pub struct Tokens {
    client: Client,
    known: Mutex<HashMap<Key, Token>>,
}

/// When to renew a token that lives from `now` to `expires`: after 80 % of its life, or a day.
fn renew_at(now: Timestamp, expires: Timestamp) -> Timestamp {
    let life = expires.duration_since(now);
    let share = SignedDuration::from_secs(life.as_secs() * 8 / 10);
    now.checked_add(share.min(MAX_AGE)).unwrap_or(expires)
}

impl Tokens {
    pub fn new(client: Client) -> Self {
        Self { client, known: Mutex::default() }
    }

    /// A valid token and when to come back for the next.
    ///
    /// # Errors
    /// When there is no token and the API gives none; an old one that still holds is used meanwhile.
    pub async fn get(&self, pod: &Pod, audience: &str, seconds: i64) -> Result<(String, Timestamp), String> {
        let account = model::spec(pod).service_account_name.clone().filter(|s| !s.is_empty()).unwrap_or_else(|| "default".into());
        let key = Key { pod_uid: model::uid(pod).into(), account, audience: audience.into(), seconds };
        let now = Timestamp::now();
        let old = self.known.lock().get(&key).cloned();
        if let Some(token) = &old
            && now < token.renew
        {
            return Ok((token.value.clone(), token.renew));
        }
        match self.request(pod, &key).await {
            Ok(token) => {
                self.known.lock().insert(key, token.clone());
                Ok((token.value, token.renew))
            }
            Err(error) => match old {
                Some(token) if now < token.expires => {
                    tracing::warn!(pod = model::describe(pod), error, "cannot renew a service account token, the old one is used");
                    Ok((token.value, now.checked_add(SignedDuration::from_secs(60)).unwrap_or(now)))
                }
                _ => Err(format!("failed to fetch token: {error}")),
            },
        }
    }

    async fn request(&self, pod: &Pod, key: &Key) -> Result<Token, String> {
        let api: Api<ServiceAccount> = Api::namespaced(self.client.clone(), model::namespace(pod));
        let request = TokenRequest {
            spec: Some(TokenRequestSpec {
                audiences: (!key.audience.is_empty()).then(|| vec![key.audience.clone()]),
                bound_object_ref: Some(BoundObjectReference {
                    api_version: Some("v1".into()),
                    kind: Some("Pod".into()),
                    name: pod.metadata.name.clone(),
                    uid: pod.metadata.uid.clone(),
                }),
                expiration_seconds: Some(key.seconds),
                ..Default::default()
            }),
            ..Default::default()
        };
        let answer = api.create_token_request(&key.account, &PostParams::default(), &request).await.map_err(|e| e.to_string())?;
        let status = answer.status.ok_or("the API server returned no token")?;
        let now = Timestamp::now();
        let (Some(value), Some(expires)) = (status.token, status.expiration_timestamp.map(|t| t.0)) else {
            return Err("the API server returned no token".into());
        };
        let jitter = SignedDuration::try_from(JITTER.mul_f64(rand::rng().random_range(0.0..1.0))).unwrap_or_default();
        let renew = renew_at(now, expires);
        Ok(Token { value, expires, renew: renew.checked_sub(jitter).unwrap_or(renew) })
    }

    pub fn release(&self, pod_uid: &str) {
        self.known.lock().retain(|key, _| key.pod_uid != pod_uid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renewal() {
        let at = |s| Timestamp::from_second(s).expect("time");
        let check = |life: i64, after: i64| assert_eq!(renew_at(at(0), at(life)), at(after), "{life}");
        check(3600, 2880);
        check(600, 480);
        check(30 * 86400, 86400);
    }
}
