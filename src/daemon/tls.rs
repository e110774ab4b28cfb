//! Serving certificates and client CA bundles, both replaceable while connections are served.
//!
//! As upstream's API server, the handshake *requests* a client certificate and checks that the client holds its key, but
//! does not fail when no known CA signed it: the request still may carry a bearer token, and a refusal is better told in
//! a `Status` than in a TLS alert. The chain is checked right after the handshake; only a chain that holds becomes
//! [`PeerCertificates`](crate::server::PeerCertificates).

use std::sync::Arc;

use parking_lot::RwLock;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig, SignatureScheme};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, UnixTime};

/// Why a certificate, key or bundle was refused.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read PEM: {0}")]
    Pem(#[from] rustls_pki_types::pem::Error),
    #[error("no certificate in the PEM text")]
    NoCertificate,
    #[error("certificate or key refused: {0}")]
    Rustls(#[from] rustls::Error),
    #[error("client CA bundle refused: {0}")]
    Bundle(#[from] rustls::server::VerifierBuilderError),
}

/// TLS of one listener. Clones share the certificate and the bundle.
#[derive(Clone)]
pub struct Tls {
    config: Arc<ServerConfig>,
    served: Option<Arc<Served>>,
    peers: Option<Arc<Peers>>,
}

// === impl Tls ===

impl Tls {
    /// Serves this certificate chain (leaf first) with this key, both PEM. No client certificate is asked for until
    /// [`Tls::set_client_ca`].
    pub fn from_pem(chain: &[u8], key: &[u8]) -> Result<Self, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let served = Arc::new(Served { current: RwLock::new(certified(chain, key, &provider)?) });
        let peers = Arc::new(Peers { verifier: RwLock::new(None), provider: Arc::clone(&provider) });
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(Arc::clone(&peers) as Arc<dyn ClientCertVerifier>)
            .with_cert_resolver(Arc::clone(&served) as Arc<dyn ResolvesServerCert>);
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self { config: Arc::new(config), served: Some(served), peers: Some(peers) })
    }

    /// Replaces the certificate for connections from now on: renewal without a restart. Does nothing for a [`Tls`] made
    /// from a plain `ServerConfig`.
    pub fn set_certificate(&self, chain: &[u8], key: &[u8]) -> Result<(), TlsError> {
        let provider = ring::default_provider();
        if let Some(served) = &self.served {
            *served.current.write() = certified(chain, key, &provider)?;
        }
        Ok(())
    }

    /// Replaces the CAs that may sign client certificates (PEM, any number). An empty text: none is asked for any more.
    pub fn set_client_ca(&self, bundle: &[u8]) -> Result<(), TlsError> {
        let Some(peers) = &self.peers else { return Ok(()) };
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(bundle) {
            roots.add(certificate?)?;
        }
        let verifier = match roots.is_empty() {
            true => None,
            false => Some(
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&peers.provider)).build()?,
            ),
        };
        *peers.verifier.write() = verifier;
        Ok(())
    }

    /// The configuration to hand to an acceptor.
    pub fn config(&self) -> &Arc<ServerConfig> {
        &self.config
    }

    /// Whether the bundle of now vouches for this chain, leaf first, at this moment. The error says why not.
    pub fn verify_peer(&self, chain: &[CertificateDer<'_>]) -> Result<(), String> {
        let Some(peers) = &self.peers else {
            // The caller's own verifier has decided during the handshake.
            return Ok(());
        };
        let verifier = peers.verifier.read().clone().ok_or("no client CA is configured")?;
        let (leaf, intermediates) = chain.split_first().ok_or("empty certificate chain")?;
        verifier.verify_client_cert(leaf, intermediates, UnixTime::now()).map(drop).map_err(|e| e.to_string())
    }
}

impl From<Arc<ServerConfig>> for Tls {
    /// Uses a finished configuration: its own verifier decides about client certificates, during the handshake.
    fn from(config: Arc<ServerConfig>) -> Self {
        Self { config, served: None, peers: None }
    }
}

fn certified(chain: &[u8], key: &[u8], provider: &CryptoProvider) -> Result<Arc<CertifiedKey>, TlsError> {
    let chain = CertificateDer::pem_slice_iter(chain).collect::<Result<Vec<_>, _>>()?;
    if chain.is_empty() {
        return Err(TlsError::NoCertificate);
    }
    let key = PrivateKeyDer::from_pem_slice(key)?;
    Ok(Arc::new(CertifiedKey::from_der(chain, key, provider)?))
}

/// The certificate of now.
#[derive(Debug)]
struct Served {
    current: RwLock<Arc<CertifiedKey>>,
}

impl ResolvesServerCert for Served {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.current.read()))
    }
}

/// Asks for a client certificate and checks the proof of possession; the chain is for [`Tls::verify_peer`].
#[derive(Debug)]
struct Peers {
    verifier: RwLock<Option<Arc<dyn ClientCertVerifier>>>,
    provider: Arc<CryptoProvider>,
}

impl ClientCertVerifier for Peers {
    fn offer_client_auth(&self) -> bool {
        self.verifier.read().is_some()
    }

    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // No hints: the bundle changes at run time, and every Kubernetes client has just one certificate to offer.
        &[]
    }

    fn verify_client_cert(
        &self,
        _leaf: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
