//! Tokens in secrets of type `kubernetes.io/service-account-token`, for clients that want a token that stays.
//!
//! The token is asked for by TokenRequest and bound to the secret: it is valid as long as the secret and the account are
//! there, and is renewed before it expires should the API server limit its life.

use std::{sync::Arc, time::Duration};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use jiff::Timestamp;
use k8s_openapi::{
    ByteString,
    api::core::v1::{Secret, ServiceAccount},
};
use serde_json::{Value, json};
use windlass_client::{
    informer::{Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker, after},
    serviceaccount::root_ca,
    write::{self, ApiErrorExt, Delete},
};

const ACCOUNT_NAME: &str = "kubernetes.io/service-account.name";
const ACCOUNT_UID: &str = "kubernetes.io/service-account.uid";
/// The longest life that can be asked for, in seconds.
const LONGEST: i64 = (1 << 32) - 1;

/// What a secret needs.
#[derive(Debug, PartialEq, Eq)]
enum Need {
    /// Its account is gone, or is another one than it was.
    Delete,
    /// A token, or a new one.
    Token,
    /// Nothing for now; the time until its token is renewed.
    Rest(Option<Duration>),
}

fn annotation<'a>(secret: &'a Secret, key: &str) -> &'a str {
    secret.metadata.annotations.as_ref().and_then(|annotations| annotations.get(key)).map_or("", String::as_str)
}

fn data<'a>(secret: &'a Secret, key: &str) -> &'a [u8] {
    secret.data.as_ref().and_then(|data| data.get(key)).map_or(&[], |bytes| &bytes.0)
}

/// When four fifths of a token's life are over; none for a token that does not expire.
fn renewal(token: &[u8]) -> Option<Timestamp> {
    let claims = token.split(|byte| *byte == b'.').nth(1)?;
    let claims: Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(claims).ok()?).ok()?;
    let (from, to) = (claims["iat"].as_i64()?, claims["exp"].as_i64()?);
    Timestamp::from_second(from + (to - from) / 5 * 4).ok()
}

fn need(secret: &Secret, account: Option<&ServiceAccount>, ca: &str, now: Timestamp) -> Need {
    let Some(account) = account else { return Need::Delete };
    let uid = annotation(secret, ACCOUNT_UID);
    if !uid.is_empty() && Some(uid) != account.metadata.uid.as_deref() {
        return Need::Delete;
    }
    let complete = !uid.is_empty() && !data(secret, "token").is_empty() && !data(secret, "namespace").is_empty() && data(secret, "ca.crt") == ca.as_bytes();
    let renewal = renewal(data(secret, "token"));
    if !complete || renewal.is_some_and(|at| at <= now) {
        return Need::Token;
    }
    Need::Rest(renewal.and_then(|at| crate::pod::until(at, 0, now)))
}

struct Controller {
    client: kube::Client,
    ca: String,
    secrets: Informer<Secret>,
    accounts: Informer<ServiceAccount>,
}

impl Controller {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(secret) = self.secrets.get(&key).filter(|secret| secret.metadata.deletion_timestamp.is_none()) else { return Ok(Action::Done) };
        let name = annotation(&secret, ACCOUNT_NAME);
        if name.is_empty() {
            return Ok(Action::Done);
        }
        let mut account = self.accounts.get_in(key.ns(), name);
        if account.is_none() {
            // Before anything is deleted: ask.
            account = write::get(&self.client, &write::object_path::<ServiceAccount>(key.ns(), name)).await?.map(Arc::new);
        }
        match need(&secret, account.as_deref(), &self.ca, Timestamp::now()) {
            Need::Rest(next) => Ok(after(next)),
            Need::Delete => {
                let how = Delete { uid: secret.metadata.uid.as_deref(), resource_version: secret.metadata.resource_version.as_deref(), ..Delete::default() };
                write::delete(&self.client, &write::path(&*secret), how).await.map(|_| Action::Done)
            }
            Need::Token => {
                let uid = account.and_then(|account| account.metadata.uid.clone());
                self.fill(&secret, &key, name, uid).await
            }
        }
    }

    async fn fill(&self, secret: &Secret, key: &Key, account: &str, uid: Option<String>) -> Result<Action, Error> {
        let request = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": LONGEST,
            "boundObjectRef": {"apiVersion": "v1", "kind": "Secret", "name": key.name, "uid": secret.metadata.uid}}});
        let path = format!("{}/token", write::object_path::<ServiceAccount>(key.ns(), account));
        let answer: Value = match write::create(&self.client, &path, &request).await {
            Ok(answer) => answer,
            Err(error) if error.is_not_found() => return Ok(Action::Done),
            Err(error) => return Err(error),
        };
        let token = answer["status"]["token"].as_str().unwrap_or_default().as_bytes().to_vec();
        let next = renewal(&token).and_then(|at| crate::pod::until(at, 0, Timestamp::now()));
        let mut secret = secret.clone();
        secret.metadata.annotations.get_or_insert_default().extend(uid.map(|uid| (ACCOUNT_UID.to_owned(), uid)));
        let data = secret.data.get_or_insert_default();
        data.insert("token".into(), ByteString(token));
        data.insert("ca.crt".into(), ByteString(self.ca.clone().into_bytes()));
        data.insert("namespace".into(), ByteString(key.ns().as_bytes().to_vec()));
        match write::update(&self.client, &secret).await {
            Ok(_) => Ok(after(next)),
            Err(error) if error.is_not_found() => Ok(Action::Done),
            Err(error) => Err(error),
        }
    }
}

/// The `serviceaccount-token-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("serviceaccount_tokens_secret");
    let (secrets, accounts) = (context.token_secrets(), context.service_accounts());
    {
        let queue = queue.clone();
        secrets.on_change(move |change| queue.add(Key::of(&**change.object())));
    }
    {
        let (queue, secrets) = (queue.clone(), secrets.clone());
        accounts.on_change(move |change| {
            let key = Key::of(&**change.object());
            let theirs = secrets.namespace(key.ns()).into_iter().filter(|secret| annotation(secret, ACCOUNT_NAME) == key.name);
            theirs.for_each(|secret| queue.add(Key::of(&*secret)));
        });
    }
    let state = Arc::new(Controller { client: context.client.clone(), ca: root_ca(&context.config), secrets, accounts });
    context.worker(queue, 5, state, Controller::sync)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(from: i64, to: i64) -> String {
        format!("h.{}.s", URL_SAFE_NO_PAD.encode(json!({"iat": from, "exp": to}).to_string()))
    }

    fn secret(uid: &str, token: &str) -> Secret {
        let mut secret: Secret = serde_json::from_value(json!({"metadata": {"name": "s", "annotations": {ACCOUNT_NAME: "a", ACCOUNT_UID: uid}}})).expect("a secret");
        let all = [("token", token), ("ca.crt", "ca"), ("namespace", "ns")];
        secret.data = Some(all.into_iter().map(|(key, value)| (key.to_owned(), ByteString(value.as_bytes().to_vec()))).collect());
        secret
    }

    #[test]
    fn what_a_secret_needs() {
        let account: ServiceAccount = serde_json::from_value(json!({"metadata": {"name": "a", "uid": "u"}})).expect("an account");
        let now = Timestamp::from_second(1000).expect("a time");
        for (secret, account, expected) in [
            (secret("u", &token(0, 2000)), None, Need::Delete),
            (secret("former", &token(0, 2000)), Some(&account), Need::Delete),
            (secret("u", ""), Some(&account), Need::Token),
            (secret("u", &token(0, 2000)), Some(&account), Need::Rest(Some(Duration::from_secs(600)))),
            (secret("u", &token(0, 1100)), Some(&account), Need::Token),
            (secret("", &token(0, 2000)), Some(&account), Need::Token),
        ] {
            assert_eq!(need(&secret, account, "ca", now), expected);
        }
    }
}
