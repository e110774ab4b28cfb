//! The API server's own certificate: made at start, renewed before it ends, swapped without a restart.

use super::authority::{Authority, Identity, Purpose};
use super::{Error, Pki};
use jiff::{SignedDuration, Timestamp};
use parking_lot::RwLock;
use rustls::RootCertStore;
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// How long a serving certificate is valid; renewed after two thirds of it.
const LIFETIME: SignedDuration = SignedDuration::from_hours(24 * 365);

/// Under which names and addresses the server is reached.
#[derive(Clone, Debug, Default)]
pub struct Names {
    pub hostname: String,
    /// `cluster.local` by default.
    pub cluster_domain: String,
    /// The advertise address, the first service address, and what else the configuration names.
    pub addresses: Vec<IpAddr>,
    pub extra_names: Vec<String>,
}

impl Names {
    fn dns(&self) -> Vec<String> {
        let domain = &self.cluster_domain;
        let mut names = vec![
            "localhost".to_owned(),
            "kubernetes".to_owned(),
            "kubernetes.default".to_owned(),
            "kubernetes.default.svc".to_owned(),
            format!("kubernetes.default.svc.{domain}"),
            self.hostname.clone(),
        ];
        names.extend(self.extra_names.iter().cloned());
        names.retain(|name| !name.is_empty());
        names.sort();
        names.dedup();
        names
    }

    fn addresses(&self) -> Vec<IpAddr> {
        let mut addresses = vec![IpAddr::from([127, 0, 0, 1]), IpAddr::from(std::net::Ipv6Addr::LOCALHOST)];
        addresses.extend(self.addresses.iter().filter(|address| !address.is_unspecified()));
        addresses.sort();
        addresses.dedup();
        addresses
    }
}

/// The certificate in use; rustls asks it at each handshake.
#[derive(Debug)]
pub struct Serving {
    current: RwLock<(Arc<CertifiedKey>, Timestamp)>,
}

fn certified(identity: &Identity) -> Result<Arc<CertifiedKey>, Error> {
    let key = rustls::crypto::ring::sign::any_supported_type(&identity.private_key()).map_err(Error::Tls)?;
    Ok(Arc::new(CertifiedKey::new(vec![identity.certificate.clone()], key)))
}

fn issue(authority: &Authority, names: &Names) -> Result<(Arc<CertifiedKey>, Timestamp), Error> {
    let purpose = Purpose::Server {
        common_name: "kube-apiserver".to_owned(),
        names: names.dns(),
        addresses: names.addresses(),
    };
    let identity = authority.identity(&purpose, LIFETIME, Timestamp::now())?;
    Ok((certified(&identity)?, identity.not_after))
}

impl Serving {
    /// Issues the first certificate and keeps it fresh until shut down.
    pub fn start(pki: &Pki, names: Names, shutdown: CancellationToken) -> Result<Arc<Serving>, Error> {
        let serving = Arc::new(Serving { current: RwLock::new(issue(&pki.cluster, &names)?) });
        tokio::spawn(renew(serving.clone(), pki.cluster.clone(), names, shutdown));
        Ok(serving)
    }

    /// The TLS configuration: this certificate, and client certificates of the cluster's and the front proxy's
    /// authorities where a client has one.
    pub fn tls(self: &Arc<Self>, pki: &Pki) -> Result<rustls::ServerConfig, Error> {
        let mut roots = RootCertStore::empty();
        roots.add(pki.cluster.certificate().clone()).map_err(Error::Tls)?;
        roots.add(pki.front_proxy.certificate().clone()).map_err(Error::Tls)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
            .allow_unauthenticated()
            .build()
            .map_err(|error| Error::Damaged(format!("client authorities: {error}")))?;
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(Error::Tls)?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(self.clone());
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(config)
    }
}

impl ResolvesServerCert for Serving {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.read().0.clone())
    }
}

/// Waits for two thirds of the lifetime, renews, and so on.
async fn renew(serving: Arc<Serving>, authority: Arc<Authority>, names: Names, shutdown: CancellationToken) {
    loop {
        let not_after = serving.current.read().1;
        let left = not_after.duration_since(Timestamp::now());
        let third = LIFETIME / 3;
        let wait = Duration::try_from(left - third).unwrap_or(Duration::from_secs(60));
        // A timer of months would not survive a suspended machine: look at the clock once a day.
        let wait = wait.clamp(Duration::from_secs(60), Duration::from_secs(24 * 3600));
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = shutdown.cancelled() => return,
        }
        if not_after.duration_since(Timestamp::now()) > third {
            continue;
        }
        match issue(&authority, &names) {
            Ok(fresh) => {
                tracing::info!(until = %fresh.1, "renewed the serving certificate");
                *serving.current.write() = fresh;
            }
            Err(error) => tracing::error!(%error, "could not renew the serving certificate; trying again"),
        }
    }
}
