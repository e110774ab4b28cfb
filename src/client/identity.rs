//! Who a role is: a [`Credential`] that may change while clients use it, and how a machine comes by one.
//!
//! A machine joins with a token `WL1.<SHA-256 of the CA certificate>.<token id>.<secret>`: the hash tells that the server
//! is the right one, the rest is a bootstrap token. With it the CSR API issues a client certificate, which is kept on disk
//! and renewed long before it expires. No certificate is ever copied by hand.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::runtime::wait::await_condition;
use kube::{Api, Client};
use parking_lot::RwLock;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType};
use rustls::client::ResolvesClientCert;
use rustls::crypto::CryptoProvider;
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use sha2::{Digest, Sha256};
use tokio_util::sync::CancellationToken;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::any_server::AnyServer;
use crate::connect;

/// How long a certificate request may wait to be approved and signed.
const ISSUE_TIMEOUT: Duration = Duration::from_secs(120);

/// Why a machine has no identity.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0:?} is no join token; it looks like WL1.<hash>.<id>.<secret> and `windlass token create` on the server prints one")]
    Token(String),
    #[error("cannot fetch the cluster's CA from {server}: {reason}")]
    Discover { server: String, reason: String },
    #[error("the CA that {server} shows does not match the hash in the join token: this is another cluster, or somebody in between")]
    WrongCluster { server: String },
    #[error("certificate request {name} for {signer}: {reason}")]
    Request { name: String, signer: String, reason: String },
    #[error("{path}: {reason}; delete the file to join anew")]
    File { path: PathBuf, reason: String },
    #[error("cannot make a key or request: {0}")]
    Key(#[from] rcgen::Error),
    #[error(transparent)]
    Connect(#[from] connect::Error),
    #[error("API server: {0}")]
    Api(#[from] kube::Error),
}

/// A parsed join token.
#[derive(Clone)]
pub struct JoinToken {
    /// Lower-case hex SHA-256 of the CA certificate's DER form.
    pub ca_hash: String,
    pub id: String,
    pub secret: String,
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinToken({})", self.id)
    }
}

impl JoinToken {
    pub fn parse(text: &str) -> Result<Self, Error> {
        let text = text.trim();
        let parts: Vec<&str> = text.split('.').collect();
        match parts[..] {
            ["WL1", hash, id, secret] if hash.len() == 64 && !id.is_empty() && !secret.is_empty() => {
                Ok(Self { ca_hash: hash.to_ascii_lowercase(), id: id.to_owned(), secret: secret.to_owned() })
            }
            // The secret must not reach a log.
            _ => Err(Error::Token(text.chars().take(8).collect::<String>() + "...")),
        }
    }

    /// The bootstrap token to show the API server.
    pub fn bearer(&self) -> String {
        format!("{}.{}", self.id, self.secret)
    }
}

/// The lower-case hex SHA-256 of a certificate's DER form, as in a join token.
pub fn ca_hash(der: &[u8]) -> String {
    Sha256::digest(der).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What a client shows the server: a certificate that can be swapped while connections are made, or a token.
#[derive(Clone)]
pub struct Credential {
    certificate: Arc<Swap>,
    token: Option<HeaderValue>,
}

#[derive(Default)]
struct Swap(RwLock<Option<Arc<CertifiedKey>>>);

impl fmt::Debug for Swap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("client certificate")
    }
}

impl ResolvesClientCert for Swap {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.0.read().clone()
    }

    fn has_certs(&self) -> bool {
        self.0.read().is_some()
    }
}

impl Credential {
    /// A bearer token that stays the same.
    pub fn bearer(token: &str) -> Self {
        let header = HeaderValue::from_str(&format!("Bearer {token}")).ok().map(|mut header| {
            header.set_sensitive(true);
            header
        });
        Self { certificate: Arc::default(), token: header }
    }

    /// A client certificate, to be renewed by [`Self::replace`].
    pub fn certificate(pair: &Pair) -> Result<Self, Error> {
        let credential = Self { certificate: Arc::default(), token: None };
        credential.replace(pair)?;
        Ok(credential)
    }

    /// Connections made from now on show this certificate.
    pub fn replace(&self, pair: &Pair) -> Result<(), Error> {
        *self.certificate.0.write() = Some(Arc::new(pair.certified_key()?));
        Ok(())
    }

    pub(crate) fn token(&self) -> Option<HeaderValue> {
        self.token.clone()
    }

    pub(crate) fn tls_config(&self, ca: &[CertificateDer<'static>]) -> Result<rustls::ClientConfig, rustls::Error> {
        let mut roots = rustls::RootCertStore::empty();
        for certificate in ca {
            roots.add(certificate.clone())?;
        }
        let config = rustls::ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?;
        Ok(config.with_root_certificates(roots).with_client_cert_resolver(self.certificate.clone()))
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// A certificate chain and its key, both PEM.
#[derive(Clone)]
pub struct Pair {
    pub certificate: String,
    pub key: String,
}

impl Pair {
    /// Reads `PATH.crt` and `PATH.key`'s joint file (certificate first, then the key); none if it does not exist.
    pub fn read(path: &Path) -> Result<Option<Self>, Error> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::File { path: path.to_owned(), reason: error.to_string() }),
        };
        let key_at = text.find("-----BEGIN PRIVATE KEY-----");
        let key_at = key_at.ok_or_else(|| Error::File { path: path.to_owned(), reason: "holds no private key".to_owned() })?;
        let pair = Self { certificate: text[..key_at].to_owned(), key: text[key_at..].to_owned() };
        pair.certified_key().map_err(|error| Error::File { path: path.to_owned(), reason: error.to_string() })?;
        Ok(Some(pair))
    }

    /// Writes both to one file, readable by its owner alone; a crash leaves the old file or the new one.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let wrap = |error: std::io::Error| Error::File { path: path.to_owned(), reason: error.to_string() };
        let beside = path.with_extension("new");
        let mut file = std::fs::OpenOptions::new();
        std::os::unix::fs::OpenOptionsExt::mode(file.write(true).create(true).truncate(true), 0o600);
        let mut file = file.open(&beside).map_err(wrap)?;
        std::io::Write::write_all(&mut file, format!("{}{}", self.certificate, self.key).as_bytes()).map_err(wrap)?;
        file.sync_all().map_err(wrap)?;
        std::fs::rename(&beside, path).map_err(wrap)
    }

    /// When to renew: after 80 % of the lifetime, less up to a tenth so that a cell's nodes do not come all at once.
    pub fn renew_at(&self) -> Option<Timestamp> {
        let der = CertificateDer::from_pem_slice(self.certificate.as_bytes()).ok()?;
        let (_, parsed) = X509Certificate::from_der(&der).ok()?;
        let (start, end) = (parsed.validity().not_before.timestamp(), parsed.validity().not_after.timestamp());
        let share = 0.8 - 0.1 * rand::random::<f64>();
        Timestamp::from_second(start + ((end - start) as f64 * share) as i64).ok()
    }

    /// The parts that rustls works with.
    pub fn certified_key(&self) -> Result<CertifiedKey, Error> {
        let fail = |reason: String| Error::Request { name: "certificate".to_owned(), signer: "local".to_owned(), reason };
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(self.certificate.as_bytes()).collect();
        let chain = chain.map_err(|e| fail(e.to_string()))?;
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes()).map_err(|e| fail(e.to_string()))?;
        let key = provider().key_provider.load_private_key(key).map_err(|e| fail(e.to_string()))?;
        Ok(CertifiedKey::new(chain, key))
    }
}

/// A certificate to ask for.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub common_name: String,
    pub organizations: Vec<String>,
    /// e.g. `kubernetes.io/kube-apiserver-client-kubelet`
    pub signer: String,
    /// As in the CSR API, e.g. `client auth`.
    pub usages: Vec<String>,
    pub names: Vec<String>,
    pub addresses: Vec<std::net::IpAddr>,
}

/// Asks the CSR API for a certificate with a fresh key and waits for it.
pub async fn request(client: &Client, wanted: &Wanted) -> Result<Pair, Error> {
    let mut params = CertificateParams::new(wanted.names.clone())?;
    params.subject_alt_names.extend(wanted.addresses.iter().map(|address| SanType::IpAddress(*address)));
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, &wanted.common_name);
    for organization in &wanted.organizations {
        params.distinguished_name.push(DnType::OrganizationName, organization);
    }
    let key = KeyPair::generate()?;
    let csr = CertificateSigningRequest {
        metadata: ObjectMeta { generate_name: Some("csr-".to_owned()), ..ObjectMeta::default() },
        spec: CertificateSigningRequestSpec {
            request: ByteString(params.serialize_request(&key)?.pem()?.into_bytes()),
            signer_name: wanted.signer.clone(),
            usages: Some(wanted.usages.clone()),
            ..CertificateSigningRequestSpec::default()
        },
        status: None,
    };
    let requests: Api<CertificateSigningRequest> = Api::all(client.clone());
    let name = requests.create(&PostParams::default(), &csr).await?.metadata.name.unwrap_or_default();
    let fail = |reason: String| Error::Request { name: name.clone(), signer: wanted.signer.clone(), reason };
    let decided = tokio::time::timeout(ISSUE_TIMEOUT, await_condition(requests, &name, is_decided)).await;
    let decided = decided.map_err(|_| fail("nobody approved and signed it in time; see `kubectl describe csr`".to_owned()))?;
    let status = decided.map_err(|e| fail(e.to_string()))?.and_then(|csr| csr.status).unwrap_or_default();
    match status.certificate {
        Some(certificate) if !certificate.0.is_empty() => {
            let certificate = String::from_utf8(certificate.0).map_err(|_| fail("the certificate is not PEM".to_owned()))?;
            Ok(Pair { certificate, key: key.serialize_pem() })
        }
        _ => {
            let said = status.conditions.into_iter().flatten().find(|c| is_refusal(&c.type_));
            Err(fail(said.map_or_else(|| "it was deleted".to_owned(), |c| format!("{}: {}", c.type_, c.message.unwrap_or_default()))))
        }
    }
}

fn is_refusal(condition: &str) -> bool {
    matches!(condition, "Denied" | "Failed")
}

fn is_decided(csr: Option<&CertificateSigningRequest>) -> bool {
    let Some(csr) = csr else { return false };
    let Some(status) = &csr.status else { return false };
    status.certificate.as_ref().is_some_and(|c| !c.0.is_empty()) || status.conditions.iter().flatten().any(|c| is_refusal(&c.type_))
}

/// A joined machine's client: its certificate is on disk and renewed for as long as the process runs.
pub struct Joined {
    pub client: Client,
    /// The cluster's CA, PEM.
    pub ca: String,
}

/// Where a machine keeps what it got by joining.
#[derive(Clone, Debug)]
pub struct Join {
    /// e.g. `https://10.0.0.1:6443`
    pub server: String,
    /// Needed until the first certificate is there.
    pub token: Option<String>,
    /// Holds `ca.crt` and `NAME.pem`.
    pub dir: PathBuf,
    pub name: &'static str,
    pub wanted: Wanted,
}

impl Join {
    /// Joins, or goes on with the identity that an earlier run left in `dir`.
    pub async fn run(self, shutdown: CancellationToken) -> Result<Joined, Error> {
        let wrap = |error: std::io::Error| Error::File { path: self.dir.clone(), reason: error.to_string() };
        std::fs::create_dir_all(&self.dir).map_err(wrap)?;
        let (ca_path, pair_path) = (self.dir.join("ca.crt"), self.dir.join(format!("{}.pem", self.name)));
        let known = std::fs::read_to_string(&ca_path).ok();
        let kept = Pair::read(&pair_path)?.filter(|_| known.is_some());
        let (ca, pair) = match (known, kept) {
            (Some(ca), Some(pair)) => (ca, pair),
            _ => {
                let token = JoinToken::parse(self.token.as_deref().unwrap_or_default())?;
                let ca = discover(&self.server, &token.ca_hash).await?;
                let client = connect::to_server(&self.server, &parse_certificates(&ca), &Credential::bearer(&token.bearer()))?;
                let pair = request(&client, &self.wanted).await?;
                std::fs::write(&ca_path, &ca).map_err(wrap)?;
                pair.write(&pair_path)?;
                (ca, pair)
            }
        };
        let credential = Credential::certificate(&pair)?;
        let client = connect::to_server(&self.server, &parse_certificates(&ca), &credential)?;
        tokio::spawn(renew(client.clone(), self.wanted, pair, shutdown, move |pair| {
            pair.write(&pair_path)?;
            credential.replace(pair)
        }));
        Ok(Joined { client, ca })
    }
}

/// Replaces a certificate before it expires, again and again until `shutdown`. `install` is given each new one.
pub async fn renew<F>(client: Client, wanted: Wanted, mut pair: Pair, shutdown: CancellationToken, install: F)
where
    F: Fn(&Pair) -> Result<(), Error>,
{
    const RETRY: Duration = Duration::from_secs(60);
    loop {
        let until = pair.renew_at().map_or(SignedDuration::from_secs(60), |at| at.duration_since(Timestamp::now()));
        let mut wait = Duration::try_from(until).unwrap_or_default();
        loop {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = shutdown.cancelled() => return,
            }
            match request(&client, &wanted).await.and_then(|new| install(&new).map(|()| new)) {
                Ok(new) => {
                    tracing::info!(signer = wanted.signer, name = wanted.common_name, "certificate renewed");
                    pair = new;
                    break;
                }
                Err(error) => {
                    tracing::warn!(signer = wanted.signer, %error, "cannot renew the certificate, will try again");
                    wait = RETRY;
                }
            }
        }
    }
}

/// All certificates of a PEM text.
pub fn parse_certificates(pem: &str) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem.as_bytes()).filter_map(Result::ok).collect()
}

/// Fetches the cluster's CA over a connection that proves nothing, and accepts it only if its hash is the expected one.
async fn discover(server: &str, hash: &str) -> Result<String, Error> {
    let fail = |reason: String| Error::Discover { server: server.to_owned(), reason };
    let tls = rustls::ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|e| fail(e.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyServer::new(provider())))
        .with_no_client_auth();
    let connector = hyper_rustls::HttpsConnectorBuilder::new().with_tls_config(tls).https_only().enable_http1().build();
    let client = hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new()).build(connector);
    let uri: http::Uri = format!("{}/windlass/ca.pem", server.trim_end_matches('/')).parse().map_err(|_| connect::Error::Server(server.to_owned()))?;
    let request = http::Request::get(uri).body(http_body_util::Empty::<bytes::Bytes>::new()).map_err(|e| fail(e.to_string()))?;
    let response = client.request(request).await.map_err(|e| fail(with_sources(&e)))?;
    if !response.status().is_success() {
        return Err(fail(format!("it answers {}", response.status())));
    }
    let body = http_body_util::Limited::new(response.into_body(), 1 << 20);
    let bytes = http_body_util::BodyExt::collect(body).await.map_err(|e| fail(e.to_string()))?.to_bytes();
    let pem = String::from_utf8(bytes.to_vec()).map_err(|_| fail("the answer is not PEM".to_owned()))?;
    match parse_certificates(&pem).first() {
        Some(certificate) if ca_hash(certificate) == hash => Ok(pem),
        Some(_) => Err(Error::WrongCluster { server: server.to_owned() }),
        None => Err(fail("the answer holds no certificate".to_owned())),
    }
}

fn with_sources(error: &dyn std::error::Error) -> String {
    std::iter::successors(Some(error), |e| e.source()).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn join_tokens() {
        let hash = "ab".repeat(32);
        let good = format!(" WL1.{hash}.abcdef.0123456789abcdef\n");
        assert_eq!(JoinToken::parse(&good).unwrap().bearer(), "abcdef.0123456789abcdef");
        for bad in ["", "WL1", "abcdef.0123456789abcdef", &format!("WL2.{hash}.a.b"), "WL1.short.abcdef.secretsecret", &format!("WL1.{hash}..b")] {
            let error = JoinToken::parse(bad).unwrap_err().to_string();
            assert!(error.contains("no join token"), "{bad}: {error}");
            assert!(!error.contains("secret.") && !error.contains("secretsecret"), "{error}");
        }
    }

    #[test]
    fn a_pair_survives_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("node.pem");
        assert!(Pair::read(&path).unwrap().is_none());
        let made = rcgen::generate_simple_self_signed(vec!["node".to_owned()]).unwrap();
        let pair = Pair { certificate: made.cert.pem(), key: made.signing_key.serialize_pem() };
        pair.write(&path).unwrap();
        assert_eq!(Pair::read(&path).unwrap().unwrap().certificate, pair.certificate);
        assert!(pair.renew_at().is_some());
        std::fs::write(&path, &pair.certificate).unwrap();
        assert!(Pair::read(&path).err().unwrap().to_string().contains("holds no private key"));
    }
}
