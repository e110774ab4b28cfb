//! Secrets of type `kubernetes.io/service-account-token`: filled with a token that does not end, removed with their account.
//!
//! Upstream's tokens controller does this in the controller manager; here the signing key stays in the API server.

use super::Issuer;
use crate::cluster::{Change, Cluster, Gr};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use windlass_api::{ApiError, meta};

const SECRETS: Gr = Gr("", "secrets");
const ACCOUNTS: Gr = Gr("", "serviceaccounts");
pub const SECRET_TYPE: &str = "kubernetes.io/service-account-token";
pub const ACCOUNT_NAME: &str = "kubernetes.io/service-account.name";
pub const ACCOUNT_UID: &str = "kubernetes.io/service-account.uid";

/// What the loop has to look at: secrets by namespace and name. At most one entry per object.
#[derive(Default)]
struct Queue {
    names: Mutex<BTreeSet<(String, String)>>,
    filled: Notify,
}

impl Queue {
    fn push(&self, namespace: &str, name: &str) {
        self.names.lock().insert((namespace.to_owned(), name.to_owned()));
        self.filled.notify_one();
    }
}

/// Claims of a token kept in a secret; no expiry, no audience.
pub fn claims(namespace: &str, secret: &str, account: &Value) -> Value {
    let name = meta::name(account);
    json!({
        "iss": "kubernetes/serviceaccount",
        "sub": format!("system:serviceaccount:{namespace}:{name}"),
        "kubernetes.io/serviceaccount/namespace": namespace,
        "kubernetes.io/serviceaccount/secret.name": secret,
        "kubernetes.io/serviceaccount/service-account.name": name,
        "kubernetes.io/serviceaccount/service-account.uid": meta::uid(account),
    })
}

/// Fills what is missing or stale in a token secret; false if nothing is.
fn fill(secret: &mut Value, account: &Value, issuer: &Issuer, ca: &str) -> Result<bool, ApiError> {
    let namespace = meta::namespace(secret).to_owned();
    let data = |secret: &Value, key: &str| secret["data"][key].as_str().unwrap_or_default().to_owned();
    let (ca, encoded_namespace) = (STANDARD.encode(ca), STANDARD.encode(&namespace));
    let current = data(secret, "ca.crt") == ca
        && data(secret, "namespace") == encoded_namespace
        && !data(secret, "token").is_empty()
        && meta::annotation(secret, ACCOUNT_UID) == Some(meta::uid(account));
    if current {
        return Ok(false);
    }
    let token = match data(secret, "token") {
        token if !token.is_empty() => token,
        _ => {
            let token = issuer.sign(&claims(&namespace, meta::name(secret), account));
            STANDARD.encode(token.map_err(|error| ApiError::internal(format!("failed to generate token: {error}")))?)
        }
    };
    meta::set_annotation(secret, ACCOUNT_UID, meta::uid(account));
    if !secret["data"].is_object() {
        secret["data"] = json!({});
    }
    secret["data"]["token"] = token.into();
    secret["data"]["ca.crt"] = ca.into();
    secret["data"]["namespace"] = encoded_namespace.into();
    Ok(true)
}

async fn reconcile(cluster: &dyn Cluster, issuer: &Issuer, ca: &str, namespace: &str, name: &str) -> Result<(), ApiError> {
    let Some(secret) = cluster.get(SECRETS, namespace, name).await? else { return Ok(()) };
    if secret["type"] != SECRET_TYPE || meta::deletion_timestamp(&secret).is_some() {
        return Ok(());
    }
    let wanted = meta::annotation(&secret, ACCOUNT_NAME).unwrap_or_default().to_owned();
    let account = cluster.get(ACCOUNTS, namespace, &wanted).await?;
    let uid = meta::annotation(&secret, ACCOUNT_UID).filter(|uid| !uid.is_empty());
    let matching = account.filter(|account| uid.is_none_or(|uid| uid == meta::uid(account)));
    match matching {
        Some(account) => {
            let mut change = |secret: &mut Value| fill(secret, &account, issuer, ca);
            cluster.update(SECRETS, namespace, name, &mut change).await?;
        }
        None => {
            tracing::info!(namespace, name, account = wanted, "removing the token secret of an account that is gone");
            cluster.delete(SECRETS, namespace, name).await?;
        }
    }
    Ok(())
}

/// Follows token secrets and accounts until shut down. `ca` is the cluster authority's PEM.
pub async fn run(cluster: Arc<dyn Cluster>, issuer: Arc<Issuer>, ca: String, shutdown: CancellationToken) {
    let queue = Arc::new(Queue::default());
    let by_secret = queue.clone();
    let on_secret = move |change: &Change<'_>| {
        let Some(bytes) = change.new else { return };
        // Most secrets are of other types: look before parsing.
        if memchr(bytes, SECRET_TYPE.as_bytes()) {
            if let Ok(secret) = serde_json::from_slice::<Value>(bytes) {
                if secret["type"] == SECRET_TYPE {
                    by_secret.push(meta::namespace(&secret), meta::name(&secret));
                }
            }
        }
    };
    cluster.on_change(SECRETS, Arc::new(on_secret));
    let (by_account, view) = (queue.clone(), Arc::downgrade(&cluster));
    let on_account = move |change: &Change<'_>| {
        let (Some(bytes), None, Some(view)) = (change.old, change.new, view.upgrade()) else { return };
        let Ok(account) = serde_json::from_slice::<Value>(bytes) else { return };
        for secret in view.cached_list(SECRETS, Some(meta::namespace(&account))) {
            if secret["type"] == SECRET_TYPE && meta::annotation(&secret, ACCOUNT_NAME) == Some(meta::name(&account)) {
                by_account.push(meta::namespace(&secret), meta::name(&secret));
            }
        }
    };
    cluster.on_change(ACCOUNTS, Arc::new(on_account));
    loop {
        let next = queue.names.lock().pop_first();
        let Some((namespace, name)) = next else {
            tokio::select! {
                () = queue.filled.notified() => continue,
                () = shutdown.cancelled() => return,
            }
        };
        match reconcile(cluster.as_ref(), &issuer, &ca, &namespace, &name).await {
            Err(error) if error.code != 404 => {
                tracing::warn!(namespace, name, %error, "token secret; trying again in a second");
                queue.push(&namespace, &name);
                tokio::select! {
                    () = tokio::time::sleep(std::time::Duration::from_secs(1)) => {}
                    () = shutdown.cancelled() => return,
                }
            }
            _ => {}
        }
    }
}

fn memchr(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}
