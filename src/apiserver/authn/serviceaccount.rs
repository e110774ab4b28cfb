//! Service account tokens: bound ones (with the objects they are bound to) and those kept in secrets.

use super::Authenticated;
use super::bearer::{Token, TokenAuthenticator};
use crate::cluster::{Cluster, Gr};
use crate::request::UserInfo;
use crate::token::Issuer;
use crate::token::legacy::SECRET_TYPE;
use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use jiff::Timestamp;
use prometheus::IntCounter;
use serde_json::Value;
use std::sync::Arc;
use windlass_api::meta;

/// Objects deleted longer ago than this (clock skew) no longer vouch for a token.
const LEEWAY_SECONDS: i64 = 60;

pub struct ServiceAccounts {
    issuer: Arc<Issuer>,
    cluster: Arc<dyn Cluster>,
    stale: IntCounter,
    valid: IntCounter,
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}

fn texts(value: &Value) -> Vec<String> {
    match value {
        Value::String(one) => vec![one.clone()],
        Value::Array(list) => list.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        _ => Vec::new(),
    }
}

impl ServiceAccounts {
    pub fn new(issuer: Arc<Issuer>, cluster: Arc<dyn Cluster>) -> ServiceAccounts {
        let counter = windlass_daemon::metrics::counter;
        ServiceAccounts {
            issuer,
            cluster,
            stale: counter("serviceaccount_stale_tokens_total", "Cumulative stale projected service account tokens used"),
            valid: counter("serviceaccount_valid_tokens_total", "Cumulative valid projected service account tokens used"),
        }
    }

    /// The issuer that a token claims, if it is a JWT at all (nothing is verified).
    fn claimed_issuer(token: &str) -> Option<String> {
        let mut parts = token.split('.');
        let (_, body, _) = (parts.next()?, parts.next()?, parts.next()?);
        if parts.next().is_some() {
            return None;
        }
        let claims: Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(body).ok()?).ok()?;
        claims["iss"].as_str().map(str::to_owned)
    }

    async fn object(&self, kind: Gr, namespace: &str, name: &str) -> Option<Arc<Value>> {
        match self.cluster.cached(kind, namespace, name) {
            Some(found) => Some(found),
            None => self.cluster.get(kind, namespace, name).await.ok().flatten(),
        }
    }

    fn deleted(object: &Value, now: Timestamp) -> bool {
        let deleted = meta::deletion_timestamp(object).and_then(meta::parse_time);
        deleted.is_some_and(|at| at.as_second() < now.as_second() - LEEWAY_SECONDS)
    }

    /// The bound object must still be there, with the same uid.
    async fn check_bound(
        &self,
        kind: Gr,
        called: &str,
        namespace: &str,
        claim: &Value,
        now: Timestamp,
    ) -> Result<(), String> {
        let gone = || "service account token has been invalidated".to_owned();
        let object = self.object(kind, namespace, text(claim, "name")).await.ok_or_else(gone)?;
        let (uid, claimed) = (meta::uid(&object), text(claim, "uid"));
        if uid != claimed {
            return Err(format!("{called} UID ({uid}) does not match service account {called} ref claim ({claimed})"));
        }
        match Self::deleted(&object, now) {
            true => Err(gone()),
            false => Ok(()),
        }
    }

    async fn check_account(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
        now: Timestamp,
    ) -> Result<Arc<Value>, String> {
        let account = self.object(Gr("", "serviceaccounts"), namespace, name).await;
        let account = account.ok_or_else(|| format!("serviceaccounts {name:?} not found"))?;
        let current = meta::uid(&account);
        if current != uid {
            return Err(format!("service account UID ({current}) does not match claim ({uid})"));
        }
        match Self::deleted(&account, now) {
            true => Err(format!("service account {namespace}/{name} has been deleted")),
            false => Ok(account),
        }
    }

    async fn bound(&self, claims: &Value, now: Timestamp) -> Result<Authenticated, String> {
        let at = |field: &str| claims[field].as_i64();
        let seconds = now.as_second();
        if at("exp").is_some_and(|end| seconds > end + LEEWAY_SECONDS) {
            return Err("service account token has expired".to_owned());
        }
        if at("nbf").is_some_and(|begin| seconds < begin - LEEWAY_SECONDS) {
            return Err("service account token is not valid yet".to_owned());
        }
        if at("iat").is_some_and(|made| seconds < made - LEEWAY_SECONDS) {
            return Err("service account token is issued in the future".to_owned());
        }
        let private = &claims["kubernetes.io"];
        let namespace = text(private, "namespace");
        let account = &private["serviceaccount"];
        let name = text(account, "name");
        if namespace.is_empty() || name.is_empty() {
            return Err("service account token has no kubernetes.io claims".to_owned());
        }
        self.check_account(namespace, name, text(account, "uid"), now).await?;
        let (pod, node) = (&private["pod"], &private["node"]);
        if private["secret"].is_object() {
            self.check_bound(Gr("", "secrets"), "secret", namespace, &private["secret"], now).await?;
        }
        if pod.is_object() {
            self.check_bound(Gr("", "pods"), "pod", namespace, pod, now).await?;
        } else if node.is_object() {
            self.check_bound(Gr("", "nodes"), "node", "", node, now).await?;
        }
        if let Some(after) = private["warnafter"].as_i64().filter(|after| *after != 0) {
            // A stale token is a matter for metrics; upstream does not bother the caller.
            let counter = if seconds > after { &self.stale } else { &self.valid };
            counter.inc();
        }
        let mut user = account_user(namespace, name, text(account, "uid"));
        let mut add = |key: &str, value: &str| {
            if !value.is_empty() {
                user.extra.insert(format!("authentication.kubernetes.io/{key}"), vec![value.to_owned()]);
            }
        };
        add("pod-name", text(pod, "name"));
        add("pod-uid", text(pod, "uid"));
        add("node-name", text(node, "name"));
        add("node-uid", text(node, "uid"));
        if !text(claims, "jti").is_empty() {
            add("credential-id", &format!("JTI={}", text(claims, "jti")));
        }
        Ok(Authenticated { user, audiences: texts(&claims["aud"]), warning: None })
    }

    async fn kept(&self, token: &str, claims: &Value, now: Timestamp) -> Result<Authenticated, String> {
        let claim = |field: &str| text(claims, &format!("kubernetes.io/serviceaccount/{field}")).to_owned();
        let (namespace, secret_name) = (claim("namespace"), claim("secret.name"));
        let (name, uid) = (claim("service-account.name"), claim("service-account.uid"));
        let missing = [(&namespace, "namespace"), (&secret_name, "secretName"), (&name, "serviceAccountName"), (&uid, "serviceAccountUID")];
        if let Some((_, called)) = missing.iter().find(|(value, _)| value.is_empty()) {
            return Err(format!("{called} claim is missing"));
        }
        if text(claims, "sub") != format!("system:serviceaccount:{namespace}:{name}") {
            return Err("sub claim is invalid".to_owned());
        }
        let secret = self.object(Gr("", "secrets"), &namespace, &secret_name).await;
        let secret = secret.filter(|secret| secret["type"] == SECRET_TYPE && meta::deletion_timestamp(secret).is_none());
        let Some(secret) = secret else { return Err("Token has been invalidated".to_owned()) };
        let stored = STANDARD.decode(text(&secret["data"], "token")).unwrap_or_default();
        if !super::same_secret(&stored, token.as_bytes()) {
            return Err("Token does not match server's copy".to_owned());
        }
        let account = self.check_account(&namespace, &name, &uid, now).await?;
        if let Some(since) = meta::label(&secret, "kubernetes.io/legacy-token-invalid-since") {
            return Err(format!(
                "the token in secret {namespace}/{secret_name} for service account {namespace}/{name} has been marked invalid since {since}. Use tokens from the TokenRequest API or manually created secret-based tokens, or remove the 'kubernetes.io/legacy-token-invalid-since' label from the secret to temporarily allow use of this token"
            ));
        }
        let listed = account["secrets"].as_array().into_iter().flatten();
        let generated = listed.into_iter().any(|known| text(known, "name") == secret_name);
        let warning = generated.then(|| {
            "Use tokens from the TokenRequest API or manually created secret-based tokens instead of auto-generated secret-based tokens.".to_owned()
        });
        Ok(Authenticated { user: account_user(&namespace, &name, &uid), audiences: self.issuer.audiences.clone(), warning })
    }
}

/// The user of a service account, with the groups of all accounts and of its namespace's.
pub fn account_user(namespace: &str, name: &str, uid: &str) -> UserInfo {
    UserInfo {
        name: format!("system:serviceaccount:{namespace}:{name}"),
        uid: uid.to_owned(),
        groups: vec!["system:serviceaccounts".to_owned(), format!("system:serviceaccounts:{namespace}")],
        extra: Default::default(),
    }
}

#[async_trait]
impl TokenAuthenticator for ServiceAccounts {
    async fn authenticate_token(&self, token: &str, wanted: &[String]) -> Token {
        let Some(claimed) = Self::claimed_issuer(token) else { return Token::Unknown };
        let legacy = claimed == "kubernetes/serviceaccount";
        if !legacy && !self.issuer.accepted.contains(&claimed) {
            return Token::Unknown;
        }
        let claims = match self.issuer.verify(token) {
            Ok(claims) => claims,
            Err(error) => return Token::Bad(format!("invalid bearer token: {error}")),
        };
        let now = Timestamp::now();
        let result = match legacy {
            true => self.kept(token, &claims, now).await,
            false => self.bound(&claims, now).await,
        };
        let mut authenticated = match result {
            Ok(authenticated) => authenticated,
            Err(why) => return Token::Bad(why),
        };
        let had = std::mem::take(&mut authenticated.audiences);
        // A token without audiences is meant for the API server.
        let had = if had.is_empty() { self.issuer.audiences.clone() } else { had };
        let good: Vec<String> = wanted.iter().filter(|audience| had.contains(audience)).cloned().collect();
        if good.is_empty() {
            let shown = crate::authz::rules::go_list;
            return Token::Bad(format!("token audiences {} is invalid for the target audiences {}", shown(&had), shown(wanted)));
        }
        authenticated.audiences = good;
        Token::Good(authenticated)
    }
}
