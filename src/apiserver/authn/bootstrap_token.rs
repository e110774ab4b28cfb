//! Bootstrap tokens: `<id>.<secret>`, kept as secrets in `kube-system` (upstream's format).

use super::Authenticated;
use super::bearer::{Token, TokenAuthenticator};
use crate::cluster::{Cluster, Gr};
use crate::request::UserInfo;
use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use serde_json::Value;
use std::sync::Arc;
use windlass_api::meta;

pub struct BootstrapTokens {
    pub cluster: Arc<dyn Cluster>,
}

/// Id and secret of `[a-z0-9]{6}.[a-z0-9]{16}`.
fn split(token: &str) -> Option<(&str, &str)> {
    let (id, secret) = token.split_once('.')?;
    let fits = |part: &str, length: usize| {
        part.len() == length && part.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
    };
    (fits(id, 6) && fits(secret, 16)).then_some((id, secret))
}

fn data(secret: &Value, key: &str) -> String {
    let bytes = STANDARD.decode(secret["data"][key].as_str().unwrap_or_default()).unwrap_or_default();
    String::from_utf8(bytes).unwrap_or_default()
}

/// `system:bootstrappers` and the extra groups; the error is a group that is not below it.
fn groups(secret: &Value) -> Result<Vec<String>, String> {
    let mut groups = vec!["system:bootstrappers".to_owned()];
    for group in data(secret, "auth-extra-groups").split(',').filter(|group| !group.is_empty()) {
        let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b':' | b'-');
        let rest = group.strip_prefix("system:bootstrappers:").unwrap_or_default();
        if rest.is_empty() || rest.len() > 255 || !rest.bytes().all(allowed) {
            return Err(format!("bootstrap group {group:?} is invalid (must match \\Asystem:bootstrappers:[a-z0-9:-]{{0,255}}[a-z0-9]\\z)"));
        }
        groups.push(group.to_owned());
    }
    groups.sort();
    groups.dedup();
    Ok(groups)
}

#[async_trait]
impl TokenAuthenticator for BootstrapTokens {
    async fn authenticate_token(&self, token: &str, audiences: &[String]) -> Token {
        let Some((id, given)) = split(token) else { return Token::Unknown };
        let name = format!("bootstrap-token-{id}");
        let Some(secret) = self.cluster.cached(Gr("", "secrets"), "kube-system", &name) else { return Token::Unknown };
        let expiration = data(&secret, "expiration");
        // An unreadable expiry counts as expired.
        let expired = !expiration.is_empty()
            && meta::parse_time(&expiration).is_none_or(|at| at <= Timestamp::now());
        let good = meta::deletion_timestamp(&secret).is_none()
            && secret["type"] == "bootstrap.kubernetes.io/token"
            && super::same_secret(data(&secret, "token-secret").as_bytes(), given.as_bytes())
            && data(&secret, "token-id") == id
            && !expired
            && data(&secret, "usage-bootstrap-authentication") == "true";
        if !good {
            return Token::Unknown;
        }
        match groups(&secret) {
            Ok(groups) => {
                let user =
                    UserInfo { name: format!("system:bootstrap:{id}"), groups, ..UserInfo::default() };
                Token::Good(Authenticated { user, audiences: audiences.to_vec(), warning: None })
            }
            Err(why) => Token::Bad(why),
        }
    }
}
