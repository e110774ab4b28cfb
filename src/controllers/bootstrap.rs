//! Bootstrap tokens: deletes those that have expired, and signs `cluster-info` with those that may.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use serde_json::json;
use windlass_client::{
    informer::{Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker, after},
    pod::until,
    write::{self, ApiErrorExt, Delete},
};

const SIGNATURE: &str = "jws-kubeconfig-";
const NAMESPACE: &str = "kube-public";
const CLUSTER_INFO: &str = "cluster-info";

fn field(secret: &Secret, name: &str) -> Option<String> {
    let bytes = secret.data.as_ref()?.get(name)?;
    String::from_utf8(bytes.0.clone()).ok()
}

/// How long a token is still valid; none if it does not expire, zero if it has (or if nobody can tell when).
fn left(secret: &Secret, now: Timestamp) -> Option<Duration> {
    let text = field(secret, "expiration").filter(|text| !text.is_empty())?;
    let expires: Option<Timestamp> = text.parse().ok();
    Some(expires.and_then(|expires| until(expires, 0, now)).unwrap_or_default())
}

/// The id and secret of a token that may sign.
fn signing_key(secret: &Secret, now: Timestamp) -> Option<(String, String)> {
    let allowed = field(secret, "usage-bootstrap-signing").as_deref() == Some("true");
    let valid = left(secret, now).is_none_or(|left| !left.is_zero());
    let (id, key) = (field(secret, "token-id")?, field(secret, "token-secret")?);
    (allowed && valid && secret.metadata.deletion_timestamp.is_none()).then_some((id, key))
}

/// A detached JWS (HS256) of `content`: header and signature, with nothing between the dots.
fn sign(content: &str, id: &str, key: &str) -> String {
    let header = URL_SAFE_NO_PAD.encode(json!({"alg": "HS256", "kid": id}).to_string());
    let payload = URL_SAFE_NO_PAD.encode(content);
    let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, format!("{id}.{key}").as_bytes());
    let signature = ring::hmac::sign(&key, format!("{header}.{payload}").as_bytes());
    format!("{header}..{}", URL_SAFE_NO_PAD.encode(signature.as_ref()))
}

/// The data of `cluster-info` with exactly the signatures of these tokens; none if it has them.
fn signed(data: &BTreeMap<String, String>, keys: &[(String, String)]) -> Option<BTreeMap<String, String>> {
    let content = data.get("kubeconfig")?;
    let mut wanted: BTreeMap<String, String> = data.iter().filter(|(name, _)| !name.starts_with(SIGNATURE)).map(|(name, value)| (name.clone(), value.clone())).collect();
    wanted.extend(keys.iter().map(|(id, key)| (format!("{SIGNATURE}{id}"), sign(content, id, key))));
    (wanted != *data).then_some(wanted)
}

struct Cleaner {
    client: kube::Client,
    secrets: Informer<Secret>,
}

impl Cleaner {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(secret) = self.secrets.get(&key) else { return Ok(Action::Done) };
        match left(&secret, Timestamp::now()) {
            Some(left) if left.is_zero() => {}
            left => return Ok(after(left)),
        }
        write::delete(&self.client, &write::path(&*secret), Delete { uid: secret.metadata.uid.as_deref(), ..Delete::default() }).await?;
        Ok(Action::Done)
    }
}

/// The `token-cleaner-controller`.
pub fn start_cleaner(context: &Context) -> Worker {
    let queue = Queue::new("token_cleaner");
    let secrets = context.bootstrap_tokens();
    {
        let queue = queue.clone();
        secrets.on_change(move |change| queue.add(Key::of(&**change.object())));
    }
    let state = Arc::new(Cleaner { client: context.client.clone(), secrets });
    context.worker(queue, 1, state, Cleaner::sync)
}

struct Signer {
    client: kube::Client,
    secrets: Informer<Secret>,
    maps: Informer<ConfigMap>,
}

impl Signer {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(map) = self.maps.get(&key) else { return Ok(Action::Done) };
        let now = Timestamp::now();
        let keys: Vec<_> = self.secrets.list().iter().filter_map(|secret| signing_key(secret, now)).collect();
        let Some(data) = map.data.as_ref().and_then(|data| signed(data, &keys)) else { return Ok(Action::Done) };
        let map = ConfigMap { data: Some(data), ..(*map).clone() };
        match write::update(&self.client, &map).await {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(Action::Done),
        }
    }
}

/// The `bootstrap-signer-controller`.
pub fn start_signer(context: &Context) -> Worker {
    let queue = Queue::new("bootstrap_signer_queue");
    let (secrets, maps) = (context.bootstrap_tokens(), context.cluster_info());
    let key = Key::new(NAMESPACE, CLUSTER_INFO);
    {
        let queue = queue.clone();
        maps.on_change(move |change| queue.add(Key::of(&**change.object())));
    }
    {
        let queue = queue.clone();
        secrets.on_change(move |_| queue.add(key.clone()));
    }
    let state = Arc::new(Signer { client: context.client.clone(), secrets, maps });
    context.worker(queue, 1, state, Signer::sync)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(fields: &[(&str, &str)]) -> Secret {
        let encode = |text: &&str| base64::engine::general_purpose::STANDARD.encode(text);
        let data: BTreeMap<_, _> = fields.iter().map(|(name, value)| (name.to_string(), encode(value))).collect();
        serde_json::from_value(json!({"metadata": {"name": "t"}, "data": data})).expect("a secret")
    }

    #[test]
    fn tokens_expire() {
        let now = Timestamp::from_second(1_767_225_600).expect("a time"); // 2026-01-01
        for (expiration, expected) in [("2026-01-01T00:01:00Z", Some(60)), ("2025-12-31T00:00:00Z", Some(0)), ("soon", Some(0)), ("", None)] {
            assert_eq!(left(&token(&[("expiration", expiration)]), now), expected.map(Duration::from_secs), "{expiration}");
        }
        assert_eq!(left(&token(&[]), now), None);
    }

    /// The vector of upstream's TestComputeDetachedSig.
    #[test]
    fn signatures_are_detached_jws() {
        let made = sign("Hello, World!", "joshua", "my-key");
        let (header, signature) = made.split_once("..").expect("detached");
        assert_eq!(URL_SAFE_NO_PAD.decode(header).expect("base64"), br#"{"alg":"HS256","kid":"joshua"}"#);
        assert_eq!(URL_SAFE_NO_PAD.decode(signature).expect("base64").len(), 32);
    }

    #[test]
    fn signatures_follow_the_tokens() {
        let data: BTreeMap<String, String> = [("kubeconfig".to_owned(), "k".to_owned()), (format!("{SIGNATURE}gone"), "x".to_owned())].into();
        let now = Timestamp::UNIX_EPOCH;
        let signer = token(&[("token-id", "abcdef"), ("token-secret", "s"), ("usage-bootstrap-signing", "true")]);
        let keys: Vec<_> = [signer, token(&[("token-id", "other"), ("token-secret", "s")])].iter().filter_map(|secret| signing_key(secret, now)).collect();
        let wanted = signed(&data, &keys).expect("a change");
        assert_eq!(wanted.keys().collect::<Vec<_>>(), ["jws-kubeconfig-abcdef", "kubeconfig"]);
        assert!(signed(&wanted, &keys).is_none());
    }
}
