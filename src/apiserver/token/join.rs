//! Join tokens: how a node proves that it may join, and knows whom it joins.
//!
//! `WL1.<sha256 of the cluster authority's certificate, hex>.<id>.<secret>`: the last two are a bootstrap token, kept
//! as a secret in `kube-system` as upstream's; the hash is compared with what `/windlass/ca.pem` serves.

use super::random_suffix;
use crate::cluster::{Cluster, Gr};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use windlass_api::{ApiError, meta};

const PREFIX: &str = "WL1";
/// The group that joins nodes; bound to the CSR rights of the bootstrap policy.
pub const BOOTSTRAPPERS: &str = "system:bootstrappers:windlass:default-node-token";

/// How long a join token is good if nothing else is asked.
pub const LIFETIME: SignedDuration = SignedDuration::from_hours(24);

/// The bootstrap token secret, named by the token's id.
fn secret(id: &str, token: &str, expires: Timestamp) -> Value {
    let encode = |text: &str| STANDARD.encode(text);
    json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": format!("bootstrap-token-{id}"), "namespace": "kube-system"},
        "type": "bootstrap.kubernetes.io/token",
        "data": {
            "token-id": encode(id),
            "token-secret": encode(token),
            "expiration": encode(&meta::now_rfc3339(expires)),
            "usage-bootstrap-authentication": encode("true"),
            "usage-bootstrap-signing": encode("true"),
            "auth-extra-groups": encode(BOOTSTRAPPERS),
            "description": encode("made by windlass for joining nodes"),
        },
    })
}

/// Makes a join token that is good for `lifetime`. `ca_hash` is the authority's [`hash`](crate::pki::authority::Authority::hash).
pub async fn create(cluster: &dyn Cluster, ca_hash: &str, lifetime: SignedDuration) -> Result<String, ApiError> {
    let (id, token) = (random_suffix(6), random_suffix(16));
    let expires = Timestamp::now() + lifetime;
    cluster.create(Gr("", "secrets"), secret(&id, &token, expires)).await?;
    Ok(format!("{PREFIX}.{ca_hash}.{id}.{token}"))
}
