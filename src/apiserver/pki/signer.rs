//! Signing of approved CertificateSigningRequests for the `kubernetes.io/*` signers, by upstream's rules.
//!
//! It runs inside the API server, so that the authority's key never leaves it. Approving is a controller's work.

use super::authority::{Authority, BACKDATE, Template};
use super::csr::Request;
use crate::cluster::{Change, Cluster, Gr};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::{SignedDuration, Timestamp};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use windlass_api::{ApiError, meta};

const CSRS: Gr = Gr("certificates.k8s.io", "certificatesigningrequests");
const KUBELET_SERVING: &str = "kubernetes.io/kubelet-serving";
const KUBELET_CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";
const CLIENT: &str = "kubernetes.io/kube-apiserver-client";
const LEGACY: &str = "kubernetes.io/legacy-unknown";

/// The longest lifetime, and the one of requests that ask for none (upstream's `--cluster-signing-duration`).
pub const LIFETIME: SignedDuration = SignedDuration::from_hours(24 * 365);
const SHORTEST: SignedDuration = SignedDuration::from_mins(10);
/// A certificate shorter than this is not shortened further by the backdating of its begin.
const SHORT: SignedDuration = SignedDuration::from_hours(8);

/// Usages by upstream's names: bits of the key usage extension.
const KEY_USAGES: [(&str, u8); 10] = [
    ("signing", 0),
    ("digital signature", 0),
    ("content commitment", 1),
    ("key encipherment", 2),
    ("data encipherment", 3),
    ("key agreement", 4),
    ("cert sign", 5),
    ("crl sign", 6),
    ("encipher only", 7),
    ("decipher only", 8),
];

/// Usages by upstream's names: last components of the extended key usage, below 1.3.6.1.5.5.7.3.
const EXTENDED_USAGES: [(&str, u64); 9] = [
    ("server auth", 1),
    ("client auth", 2),
    ("code signing", 3),
    ("email protection", 4),
    ("s/mime", 4),
    ("ipsec end system", 5),
    ("ipsec tunnel", 6),
    ("ipsec user", 7),
    ("timestamping", 8),
];

fn extended_usage(name: &str) -> Option<Vec<u64>> {
    let plain = EXTENDED_USAGES.iter().find(|(known, _)| *known == name);
    match name {
        "any" => Some(vec![2, 5, 29, 37, 0]),
        "ocsp signing" => Some(vec![1, 3, 6, 1, 5, 5, 7, 3, 9]),
        "microsoft sgc" => Some(vec![1, 3, 6, 1, 4, 1, 311, 10, 3, 3]),
        "netscape sgc" => Some(vec![2, 16, 840, 1, 113_730, 4, 1]),
        _ => plain.map(|(_, last)| vec![1, 3, 6, 1, 5, 5, 7, 3, *last]),
    }
}

fn check_usages(usages: &[&str], purpose: &str) -> Result<(), String> {
    let given: BTreeSet<&str> = usages.iter().copied().collect();
    let with_rsa = BTreeSet::from(["digital signature", "key encipherment", purpose]);
    let without = BTreeSet::from(["digital signature", purpose]);
    if given == with_rsa || given == without {
        return Ok(());
    }
    let wanted: Vec<&str> = with_rsa.into_iter().collect();
    Err(format!("usages did not match [{}]", wanted.join(" ")))
}

/// Whether the request is one that its signer signs; the error is for the `Failed` condition.
fn check(signer: &str, request: &Request, usages: &[&str]) -> Result<(), String> {
    let node_subject = || {
        if request.organizations != ["system:nodes"] {
            return Err("subject organization is not system:nodes".to_owned());
        }
        Ok(())
    };
    let none = |list_is_empty: bool, kind: &str| match list_is_empty {
        true => Ok(()),
        false => Err(format!("{kind} subjectAltNames are not allowed")),
    };
    let node_name = || match request.common_name.starts_with("system:node:") {
        true => Ok(()),
        false => Err("subject common name does not begin with system:node:".to_owned()),
    };
    match signer {
        KUBELET_SERVING => {
            node_subject()?;
            if request.dns_names.is_empty() && request.addresses.is_empty() {
                return Err("DNS or IP subjectAltName is required".to_owned());
            }
            none(request.emails.is_empty(), "Email")?;
            none(request.uris.is_empty(), "URI")?;
            check_usages(usages, "server auth")?;
            node_name()
        }
        KUBELET_CLIENT => {
            node_subject()?;
            none(request.dns_names.is_empty(), "DNS")?;
            none(request.emails.is_empty(), "Email")?;
            none(request.addresses.is_empty(), "IP")?;
            none(request.uris.is_empty(), "URI")?;
            node_name()?;
            check_usages(usages, "client auth")
        }
        CLIENT => {
            let allowed = ["digital signature", "key encipherment", "client auth"];
            if let Some(other) = usages.iter().find(|usage| !allowed.contains(usage)) {
                return Err(format!("invalid usage for client certificate: {other}"));
            }
            match usages.contains(&"client auth") {
                true => Ok(()),
                false => Err("missing required usage for client certificate: client auth".to_owned()),
            }
        }
        _ => Ok(()),
    }
}

fn lifetime(spec: &Value) -> SignedDuration {
    match spec["expirationSeconds"].as_i64() {
        None => LIFETIME,
        Some(seconds) => SignedDuration::from_secs(seconds).clamp(SHORTEST, LIFETIME),
    }
}

/// The certificate for a request's spec, as PEM; the error says why the request can never be signed.
fn sign(authority: &Authority, spec: &Value, now: Timestamp) -> Result<Result<String, String>, super::Error> {
    let usages: Vec<&str> = spec["usages"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let signer = spec["signerName"].as_str().unwrap_or_default();
    let request = match Request::from_spec(spec) {
        Ok(request) => request,
        Err(error) => return Ok(Err(format!("unable to parse csr: {error}"))),
    };
    if let Err(error) = check(signer, &request, &usages) {
        return Ok(Err(error));
    }
    let (mut key_usage, mut extended) = (Vec::new(), Vec::new());
    for usage in usages {
        match (KEY_USAGES.iter().find(|(name, _)| *name == usage), extended_usage(usage)) {
            (Some((_, bit)), _) => key_usage.push(*bit),
            (None, Some(id)) => extended.push(id),
            (None, None) => return Ok(Err(format!("unrecognized usage values: [{usage:?}]"))),
        }
    }
    let lifetime = lifetime(spec);
    let not_after = if lifetime < SHORT { now + lifetime } else { now + lifetime - BACKDATE };
    let certificate = authority.issue(Template {
        subject: request.subject,
        public_key: request.public_key,
        not_before: now - BACKDATE,
        not_after,
        key_usage,
        extended_usage: extended,
        alternative_names: request.alternative_names,
        authority: false,
    })?;
    Ok(Ok(super::pem("CERTIFICATE", &certificate)))
}

fn condition<'a>(csr: &'a Value, kind: &str) -> Option<&'a Value> {
    let conditions = csr["status"]["conditions"].as_array().into_iter().flatten();
    conditions.into_iter().find(|condition| condition["type"] == kind && condition["status"] != "False")
}

/// Whether a request waits for us: approved, not failed, not yet signed, for one of our signers.
fn waits(csr: &Value) -> bool {
    let signer = csr["spec"]["signerName"].as_str().unwrap_or_default();
    let ours = [KUBELET_SERVING, KUBELET_CLIENT, CLIENT, LEGACY].contains(&signer);
    let signed = csr["status"]["certificate"].as_str().is_some_and(|text| !text.is_empty());
    ours && !signed && condition(csr, "Approved").is_some() && condition(csr, "Failed").is_none()
        && condition(csr, "Denied").is_none()
}

/// Signs (or fails) one request object in place; false if there is nothing to do.
fn complete(authority: &Authority, csr: &mut Value, now: Timestamp) -> Result<bool, ApiError> {
    if !waits(csr) {
        return Ok(false);
    }
    let outcome = sign(authority, &csr["spec"], now).map_err(ApiError::internal)?;
    match outcome {
        Ok(certificate) => csr["status"]["certificate"] = STANDARD.encode(certificate).into(),
        Err(why) => {
            let time = meta::now_rfc3339(now);
            let failed = json!({
                "type": "Failed", "status": "True", "reason": "SignerValidationFailure", "message": why,
                "lastUpdateTime": time, "lastTransitionTime": time,
            });
            if let Some(conditions) = csr["status"]["conditions"].as_array_mut() {
                conditions.push(failed);
            }
        }
    }
    Ok(true)
}

/// Follows the requests and signs those that wait, until shut down. Its queue holds names, at most one per object.
pub async fn run(cluster: Arc<dyn Cluster>, authority: Arc<Authority>, shutdown: CancellationToken) {
    let queue = Arc::new((Mutex::new(BTreeSet::<String>::new()), Notify::new()));
    let filled = queue.clone();
    let on_change = move |change: &Change<'_>| {
        let Some(csr) = change.new.and_then(|bytes| serde_json::from_slice::<Value>(bytes).ok()) else { return };
        if waits(&csr) {
            filled.0.lock().insert(meta::name(&csr).to_owned());
            filled.1.notify_one();
        }
    };
    cluster.on_change(CSRS, Arc::new(on_change));
    loop {
        let next = queue.0.lock().pop_first();
        let Some(name) = next else {
            tokio::select! {
                () = queue.1.notified() => continue,
                () = shutdown.cancelled() => return,
            }
        };
        let mut change = |csr: &mut Value| complete(&authority, csr, Timestamp::now());
        match cluster.update_status(CSRS, "", &name, &mut change).await {
            Ok(_) => tracing::info!(csr = name, "signed certificate signing request"),
            Err(error) if error.code == 404 => {}
            Err(error) => {
                tracing::warn!(csr = name, %error, "could not sign; trying again in a second");
                queue.0.lock().insert(name);
                tokio::select! {
                    () = tokio::time::sleep(std::time::Duration::from_secs(1)) => {}
                    () = shutdown.cancelled() => return,
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "signer_tests.rs"]
mod tests;
