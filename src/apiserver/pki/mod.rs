//! The cluster's keys: made once by the first API server, sealed in the store, loaded by every other.
//!
//! Invariants:
//! - Keys are created by compare-and-swap: of two first servers one wins and the other loads.
//! - What lies in the store is AES-256-GCM under a key derived from the server token, which never goes there.
//! - A wrong token or damaged keys refuse the start and say what to do; nothing is ever overwritten.
//! - The cluster authority's key stays in this process: [`signer`] signs here.
//! - Deliberately absent: keys from files, RSA (all keys are P-256).
//!
//! Code map: [`seal`] the token and the envelope; [`authority`] certificates; [`der`] how they are written; [`csr`]
//! requests; [`signer`] the CSR loop; [`serving`] the server's own certificate.

pub mod authority;
pub mod csr;
pub mod der;
pub mod seal;
pub mod serving;
pub mod signer;

use authority::{Authority, Identity, Purpose};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use jiff::{SignedDuration, Timestamp};
use seal::ServerToken;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;
use windlass_store::{Expect, Op, Outcome, Store, Txn};

/// Where the sealed keys lie in the store.
pub const STORE_KEY: &str = "/windlass/pki";

/// Why the keys are not available.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("server token file {path}: {source}; give a readable file, or remove it to have one made (new clusters only)")]
    TokenFile { path: PathBuf, source: std::io::Error },
    #[error("the server token in {path} is shorter than 16 characters; use the first server's, or remove the file to have one made (new clusters only)")]
    WeakToken { path: PathBuf },
    #[error(
        "the cluster's keys in the store ({STORE_KEY}) were sealed under another server token: copy the server token file of this cluster's first API server here, or point this server at another store"
    )]
    WrongToken,
    #[error("the cluster's keys in the store ({STORE_KEY}) are damaged ({0}); restore the store from a backup")]
    Damaged(String),
    #[error("no random numbers, or a refused cryptographic operation")]
    Random,
    #[error("TLS: {0}")]
    Tls(rustls::Error),
    #[error("reading or writing the sealed keys: {0}")]
    Store(#[from] windlass_store::Error),
}

/// Everything secret that API servers share.
#[derive(Debug)]
pub struct Pki {
    /// Signs servers and clients of the cluster.
    pub cluster: Arc<Authority>,
    /// Signs proxies that speak for others (request headers, aggregation).
    pub front_proxy: Arc<Authority>,
    /// PKCS #8 of the key that signs service account tokens.
    pub service_account_key: Vec<u8>,
    /// 32 bytes, kept for encryption at rest.
    pub encryption_key: Vec<u8>,
}

/// What is sealed: base64 of DER.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Bundle {
    cluster_certificate: String,
    cluster_key: String,
    front_proxy_certificate: String,
    front_proxy_key: String,
    service_account_key: String,
    encryption_key: String,
}

impl Pki {
    /// Fresh keys.
    pub fn create(now: Timestamp) -> Result<Pki, Error> {
        let mut encryption_key = vec![0u8; 32];
        ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut encryption_key)
            .map_err(|_| Error::Random)?;
        Ok(Pki {
            cluster: Arc::new(Authority::create("kubernetes", now)?),
            front_proxy: Arc::new(Authority::create("front-proxy-ca", now)?),
            service_account_key: authority::generate_key()?,
            encryption_key,
        })
    }

    /// Opens the keys in the store, or creates them if there are none.
    pub async fn load_or_create(store: &dyn Store, token: &ServerToken) -> Result<Pki, Error> {
        if let Some(entry) = store.get(STORE_KEY).await? {
            return Pki::open(token, &entry.value);
        }
        let pki = Pki::create(Timestamp::now())?;
        let value = Bytes::from(seal::seal(token, &pki.to_bytes()?)?);
        let op = Op::Put { value, ttl: None };
        match store.txn(Txn { key: STORE_KEY.to_owned(), expect: Expect::Absent, op }).await? {
            Outcome::Committed { .. } => {
                tracing::info!(ca = pki.cluster.hash(), "created the cluster's keys");
                Ok(pki)
            }
            // Another server was faster: its keys are the cluster's.
            Outcome::Conflict { current: Some(entry) } => Pki::open(token, &entry.value),
            Outcome::Conflict { current: None } => {
                Err(Error::Damaged("they appeared and vanished while being created".to_owned()))
            }
        }
    }

    fn to_bytes(&self) -> Result<Vec<u8>, Error> {
        let bundle = Bundle {
            cluster_certificate: STANDARD.encode(self.cluster.certificate()),
            cluster_key: STANDARD.encode(self.cluster.pkcs8()),
            front_proxy_certificate: STANDARD.encode(self.front_proxy.certificate()),
            front_proxy_key: STANDARD.encode(self.front_proxy.pkcs8()),
            service_account_key: STANDARD.encode(&self.service_account_key),
            encryption_key: STANDARD.encode(&self.encryption_key),
        };
        serde_json::to_vec(&bundle).map_err(|error| Error::Damaged(error.to_string()))
    }

    fn open(token: &ServerToken, sealed: &[u8]) -> Result<Pki, Error> {
        let plain = seal::open(token, sealed)?;
        let bundle: Bundle = serde_json::from_slice(&plain).map_err(|error| Error::Damaged(error.to_string()))?;
        let decode = |text: &str| STANDARD.decode(text).map_err(|error| Error::Damaged(error.to_string()));
        let authority = |certificate: &str, key: &str| Authority::load(decode(certificate)?, decode(key)?);
        Ok(Pki {
            cluster: Arc::new(authority(&bundle.cluster_certificate, &bundle.cluster_key)?),
            front_proxy: Arc::new(authority(&bundle.front_proxy_certificate, &bundle.front_proxy_key)?),
            service_account_key: decode(&bundle.service_account_key)?,
            encryption_key: decode(&bundle.encryption_key)?,
        })
    }

    /// A client identity of the cluster, for a year.
    pub fn client(&self, common_name: &str, organizations: &[&str]) -> Result<Identity, Error> {
        let purpose = Purpose::Client {
            common_name: common_name.to_owned(),
            organizations: organizations.iter().map(|&name| name.to_owned()).collect(),
        };
        self.cluster.identity(&purpose, SignedDuration::from_hours(24 * 365), Timestamp::now())
    }

    /// With which the API server calls kubelets.
    pub fn kubelet_client(&self) -> Result<Identity, Error> {
        self.client("kube-apiserver-kubelet-client", &[crate::authn::MASTERS])
    }

    /// With which the API server calls the servers behind APIServices, in other users' names.
    pub fn proxy_client(&self) -> Result<Identity, Error> {
        let purpose = Purpose::Client { common_name: "front-proxy-client".to_owned(), organizations: Vec::new() };
        self.front_proxy.identity(&purpose, SignedDuration::from_hours(24 * 365), Timestamp::now())
    }

    /// A kubeconfig of the cluster's superuser. `server` is the URL of the API server.
    pub fn admin_kubeconfig(&self, server: &str) -> Result<String, Error> {
        let identity = self.client("windlass-admin", &[crate::authn::MASTERS])?;
        let (ca, certificate) = (self.cluster.certificate_pem(), identity.certificate_pem());
        Ok(kubeconfig(server, &ca, "windlass-admin", &certificate, &identity.key_pem()))
    }
}

/// A kubeconfig with everything inside.
pub fn kubeconfig(server: &str, ca: &str, user: &str, certificate: &str, key: &str) -> String {
    let (ca, certificate, key) = (STANDARD.encode(ca), STANDARD.encode(certificate), STANDARD.encode(key));
    format!(
        "apiVersion: v1\nkind: Config\nclusters:\n- name: windlass\n  cluster:\n    server: {server}\n    certificate-authority-data: {ca}\n\
         contexts:\n- name: windlass\n  context:\n    cluster: windlass\n    user: {user}\ncurrent-context: windlass\n\
         users:\n- name: {user}\n  user:\n    client-certificate-data: {certificate}\n    client-key-data: {key}\n"
    )
}

/// PEM text of DER bytes.
pub fn pem(label: &str, der: &[u8]) -> String {
    let encoded = STANDARD.encode(der);
    let mut text = format!("-----BEGIN {label}-----\n");
    let mut rest = encoded.as_str();
    while !rest.is_empty() {
        let (line, tail) = rest.split_at(rest.len().min(64));
        text.push_str(line);
        text.push('\n');
        rest = tail;
    }
    text.push_str(&format!("-----END {label}-----\n"));
    text
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests;
