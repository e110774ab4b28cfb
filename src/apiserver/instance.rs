//! A running API server: started from a [`Config`], served on a socket and in process.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use jiff::SignedDuration;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use windlass_api::ApiError;
use windlass_api::registry::Registry;
use windlass_daemon::health::Health;
use windlass_daemon::server::{self, Tls};
use windlass_store::{Embedded, EmbeddedConfig, Etcd, EtcdConfig, Store};

use crate::admission::chain::Chain;
use crate::allocate::{Allocators, repair};
use crate::authz::union::Union;
use crate::authz::rbac::{Kind, Rbac};
use crate::authz::{Authorizer, node::Node};
use crate::cluster::{Change, Cluster, Gr};
use crate::config::Config;
use crate::core::{Core, Limits};
use crate::documents::Documents;
use crate::hooks::Hooks;
use crate::kubelet::Kubelets;
use crate::pki::seal::ServerToken;
use crate::pki::serving::{Names, Serving};
use crate::pki::{self, Pki};
use crate::request::UserInfo;
use crate::reviews::Reviews;
use crate::server::Service;
use crate::storage::Objects;
use crate::token::request::TokenRequests;
use crate::token::{Issuer, join};
use crate::virtuals::{self, Virtuals};
use crate::{authn, bootstrap, crd, usage};

/// Why an API server does not start or does not go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("data directory {path}: {source}; create it, or choose another with --data-dir")]
    DataDir { path: String, source: std::io::Error },
    #[error("store: {0}")]
    Store(#[from] windlass_store::Error),
    #[error(transparent)]
    Pki(#[from] pki::Error),
    #[error(transparent)]
    Authentication(#[from] authn::SetupError),
    #[error("authorization: {0}")]
    Authorization(#[from] crate::authz::union::ModeError),
    #[error("admission: {0}")]
    Admission(#[from] crate::admission::chain::PluginError),
    #[error("--service-cluster-ip-range and --service-node-port-range: {0}")]
    Range(#[from] crate::allocate::ranges::RangeError),
    #[error("TLS towards kubelets: {0}")]
    KubeletTls(String),
    #[error("cannot listen on {address}: {source}; is another server there? choose another --secure-port")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error(transparent)]
    Serve(#[from] server::ServerError),
    #[error("first objects: {0}")]
    Bootstrap(String),
    #[error("custom resources: {0}")]
    CustomResources(String),
}

/// A running API server.
pub struct ApiServer {
    core: Arc<Core>,
    service: Service,
    pki: Arc<Pki>,
    listener: parking_lot::Mutex<Option<TcpListener>>,
    address: SocketAddr,
    tls: Tls,
    health: Health,
    grace: Duration,
    shutdown: CancellationToken,
}

impl ApiServer {
    /// Opens the store, loads the caches and the keys, listens, and starts what runs beside requests.
    pub async fn start(config: Config, shutdown: CancellationToken) -> Result<ApiServer, Error> {
        let address = SocketAddr::new(config.bind_address, config.secure_port);
        let listener = TcpListener::bind(address).await.map_err(|source| Error::Listen { address, source })?;
        let health = Health::new();
        let (store, exclusive) = open_store(&config).await?;
        ApiServer::start_on(config, store, exclusive, listener, health, shutdown).await
    }

    /// The same over a store that is open already. `exclusive`: no other server writes to it.
    pub async fn start_on(
        config: Config,
        store: Arc<dyn Store>,
        exclusive: bool,
        listener: TcpListener,
        health: Health,
        shutdown: CancellationToken,
    ) -> Result<ApiServer, Error> {
        let ready = health.check("watch-cache");
        let listening = |source| Error::Listen { address: SocketAddr::new(config.bind_address, config.secure_port), source };
        let address = listener.local_addr().map_err(listening)?;
        let token = ServerToken::load_or_create(&config.token_file())?;
        let pki = Arc::new(Pki::load_or_create(&*store, &token).await?);
        let ttl = config.event_ttl.0;
        let objects = Objects::start(store.clone(), Registry::builtin(), exclusive, ttl, shutdown.clone()).await?;
        let definitions = crd::Definitions::start(objects.clone(), shutdown.clone()).await.map_err(|e| Error::CustomResources(e.to_string()))?;
        ready.ok();

        let cluster: Arc<dyn Cluster> = Arc::new(objects.clone());
        let security = Security::start(&config, &cluster, &pki).await?;
        let advertised = config.advertise_address.unwrap_or_else(|| advertise(config.bind_address));
        let public = format!("https://{}", SocketAddr::new(advertised, address.port()));
        let allocators = Allocators::new(
            cluster.clone(),
            store.clone(),
            config.service_cluster_ip_range.parse()?,
            config.service_node_port_range.parse()?,
        );
        let kubelets = Arc::new(kubelets(&config, &pki)?);
        let core = Arc::new(Core {
            authn: security.authn,
            authorizer: security.authorizer,
            admission: security.admission,
            hooks: Hooks { services: allocators.clone() },
            documents: Documents::new(SocketAddr::new(advertised, address.port()).to_string()),
            kubelets,
            reviews: Reviews { bearer: security.bearer, tokens: security.tokens },
            virtuals: Virtuals::default(),
            definitions,
            limits: Limits::new(config.max_requests_inflight, config.max_mutating_requests_inflight),
            request_timeout: config.request_timeout.0.max(Duration::from_secs(1)),
            shutdown: shutdown.clone(),
            address: public,
            objects,
        });
        core.virtuals.register("componentstatuses", Arc::new(virtuals::Components::new(core.objects.clone())));
        core.virtuals.register("metrics", Arc::new(usage::Usage::new(core.objects.clone(), core.kubelets.clone())));

        let serving = Serving::start(&pki, names(&config, advertised), shutdown.clone())?;
        let tls = Tls::from(Arc::new(serving.tls(&pki)?));
        let configz = serde_json::to_value(&config).unwrap_or_default();
        let routes = crate::server::routes(health.clone(), configz, pki.cluster.certificate_pem());
        let server = ApiServer {
            service: Service::new(core.clone(), routes),
            core,
            listener: parking_lot::Mutex::new(Some(listener)),
            address,
            tls,
            health,
            grace: config.shutdown_grace.0,
            shutdown: shutdown.clone(),
            pki,
        };
        server.start_loops(&config, cluster.clone(), allocators, security.issuer).await?;
        let endpoints = bootstrap::service::Endpoints { cluster, store, address: advertised, port: address.port(), alone: exclusive };
        tokio::spawn(endpoints.run(shutdown));
        Ok(server)
    }

    /// What runs beside requests, each loop until shutdown.
    async fn start_loops(&self, config: &Config, cluster: Arc<dyn Cluster>, allocators: Arc<Allocators>, issuer: Arc<Issuer>) -> Result<(), Error> {
        let settings = bootstrap::Settings {
            pki: &self.pki,
            allocators: &allocators,
            port: self.address.port(),
            request_header_names: &config.requestheader_allowed_names,
        };
        let bootstrapped = self.health.check("poststarthook/bootstrap");
        bootstrap::ensure(&*cluster, &settings).await.map_err(|e| Error::Bootstrap(e.message.clone()))?;
        bootstrapped.ok();
        tokio::spawn(repair::run(allocators, repair::Delays::default(), self.shutdown.clone()));
        tokio::spawn(pki::signer::run(cluster.clone(), self.pki.cluster.clone(), self.shutdown.clone()));
        tokio::spawn(crate::token::legacy::run(cluster, issuer, self.pki.cluster.certificate_pem(), self.shutdown.clone()));
        Ok(())
    }

    /// Serves the socket until shutdown, then lets running requests end.
    pub async fn serve(&self) -> Result<(), Error> {
        let Some(listener) = self.listener.lock().take() else { return Ok(()) };
        let limits = server::Limits { drain: self.grace, ..server::Limits::default() };
        server::serve_service(listener, Some(self.tls.clone()), self.service.clone(), limits, self.shutdown.clone()).await?;
        Ok(())
    }

    /// The API without a socket, for clients in this process. Every request is `user`'s; authorization and admission hold as for any other.
    pub fn service_for(&self, user: UserInfo) -> Service {
        self.service.acting_as(user)
    }

    /// The service that the socket is served with: requests bring their credentials.
    pub fn service(&self) -> Service {
        self.service.clone()
    }

    pub fn health(&self) -> Health {
        self.health.clone()
    }

    /// Where the server listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// `https://host:port`, as members of the cluster reach this server.
    pub fn url(&self) -> &str {
        &self.core.address
    }

    /// A kubeconfig with a client certificate that may do everything.
    pub fn admin_kubeconfig(&self) -> String {
        // The authority has just been loaded; signing fails only when the system has no random numbers, and then nothing works.
        self.pki.admin_kubeconfig(self.url()).unwrap_or_else(|error| {
            tracing::error!(%error, "cannot issue the administrator's certificate");
            String::new()
        })
    }

    /// The certificate of the cluster's authority.
    pub fn ca_pem(&self) -> String {
        self.pki.cluster.certificate_pem()
    }

    pub fn pki(&self) -> &Arc<Pki> {
        &self.pki
    }

    pub fn objects(&self) -> &Objects {
        &self.core.objects
    }

    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// A token with which a node can join for a day.
    pub async fn create_join_token(&self) -> Result<String, ApiError> {
        join::create(&self.core.objects, &self.pki.cluster.hash(), SignedDuration::from_hours(24)).await
    }
}

async fn open_store(config: &Config) -> Result<(Arc<dyn Store>, bool), Error> {
    let made = std::fs::create_dir_all(&config.data_dir);
    made.map_err(|source| Error::DataDir { path: config.data_dir.display().to_string(), source })?;
    if !config.etcd_servers.is_empty() {
        let mut etcd = EtcdConfig::new(config.etcd_servers.iter().cloned());
        etcd.ca_file.clone_from(&config.etcd_cafile);
        etcd.cert_file.clone_from(&config.etcd_certfile);
        etcd.key_file.clone_from(&config.etcd_keyfile);
        etcd.compaction_interval = config.etcd_compaction_interval.0;
        return Ok((Arc::new(Etcd::connect(etcd).await?), false));
    }
    let store = Embedded::open(EmbeddedConfig::new(config.data_dir.join("store.redb"))).await?;
    Ok((Arc::new(store), true))
}

/// Authentication, authorization and admission, wired together.
struct Security {
    authn: authn::Authn,
    bearer: Arc<authn::bearer::Bearer>,
    authorizer: Arc<dyn Authorizer>,
    admission: Chain,
    issuer: Arc<Issuer>,
    tokens: TokenRequests,
}

impl Security {
    async fn start(config: &Config, cluster: &Arc<dyn Cluster>, pki: &Arc<Pki>) -> Result<Security, Error> {
        let issuer = Arc::new(Issuer::new(&pki.service_account_key, &config.service_account_issuer, &config.api_audiences)?);
        let options = authn::Options {
            token_file: config.token_auth_file.clone(),
            request_header_names: config.requestheader_allowed_names.clone(),
            anonymous: config.anonymous_auth,
        };
        let authn = authn::build(&options, cluster, pki, &issuer)?;
        let rbac = Rbac::new();
        let rules = bootstrap::policy::node_rules().map_err(|e| Error::Bootstrap(e.to_string()))?;
        let node = Node::start(&**cluster, rules);
        follow_rbac(&**cluster, &rbac);
        let authorizer: Arc<dyn Authorizer> = Arc::new(Union::new(&config.authorization_mode, node, rbac.clone())?);
        // Refuses names that are not known; all plugins that are known are on.
        Chain::standard(cluster, &authorizer, &rbac, &config.enable_admission_plugins)?;
        let admission = Chain::standard(cluster, &authorizer, &rbac, &config.disable_admission_plugins)?;
        let tokens = TokenRequests {
            issuer: issuer.clone(),
            cluster: cluster.clone(),
            max_expiration: i64::try_from(config.service_account_max_token_expiration.0.as_secs()).ok().filter(|s| *s > 0),
            extend: config.service_account_extend_token_expiration,
        };
        Ok(Security { bearer: authn.bearer.clone(), authn, authorizer, admission, issuer, tokens })
    }
}

/// Keeps the RBAC index up to date.
fn follow_rbac(cluster: &dyn Cluster, rbac: &Arc<Rbac>) {
    const GROUP: &str = "rbac.authorization.k8s.io";
    let kinds = [
        ("roles", Kind::Role),
        ("clusterroles", Kind::ClusterRole),
        ("rolebindings", Kind::RoleBinding),
        ("clusterrolebindings", Kind::ClusterRoleBinding),
    ];
    for (plural, kind) in kinds {
        let rbac = rbac.clone();
        let parse = |bytes: Option<&[u8]>| bytes.and_then(|b| serde_json::from_slice::<serde_json::Value>(b).ok());
        let callback = move |change: &Change<'_>| rbac.apply(kind, parse(change.old).as_ref(), parse(change.new).as_ref());
        cluster.on_change(Gr(GROUP, plural), Arc::new(callback));
    }
}

fn kubelets(config: &Config, pki: &Pki) -> Result<Kubelets, Error> {
    let identity = pki.kubelet_client()?;
    let authority = match &config.kubelet_certificate_authority {
        None => None,
        Some(path) => {
            let fail = |e: &dyn std::fmt::Display| Error::KubeletTls(format!("--kubelet-certificate-authority {}: {e}", path.display()));
            let pem = std::fs::read(path).map_err(|e| fail(&e))?;
            let mut roots = rustls::RootCertStore::empty();
            for certificate in <rustls_pki_types::CertificateDer as rustls_pki_types::pem::PemObject>::pem_slice_iter(&pem) {
                roots.add(certificate.map_err(|e| fail(&e))?).map_err(|e| fail(&e))?;
            }
            Some(Arc::new(roots))
        }
    };
    let chain = vec![identity.certificate.clone()];
    Kubelets::new((chain, identity.private_key()), authority, config.kubelet_preferred_address_types.clone())
        .map_err(|e| Error::KubeletTls(e.to_string()))
}

fn names(config: &Config, advertised: IpAddr) -> Names {
    let service = config.service_cluster_ip_range.parse::<crate::allocate::ranges::Cidr>().ok().map(|c| IpAddr::V4(c.first()));
    let mut addresses: Vec<IpAddr> = config.tls_san.iter().filter_map(|n| n.parse().ok()).collect();
    addresses.extend([advertised, config.bind_address]);
    addresses.extend(service);
    let hostname = windlass_daemon::host::name().unwrap_or_default();
    let extra_names = config.tls_san.iter().filter(|n| n.parse::<IpAddr>().is_err()).cloned().collect();
    Names { hostname, cluster_domain: config.cluster_domain.clone(), addresses, extra_names }
}

/// The address that others reach this machine at: the one that traffic to the outside leaves from.
fn advertise(bind: IpAddr) -> IpAddr {
    if !bind.is_unspecified() {
        return bind;
    }
    // No packet is sent: connecting a UDP socket only asks the routing table.
    let source = std::net::UdpSocket::bind(("0.0.0.0", 0)).and_then(|s| {
        s.connect(("192.0.2.1", 9))?;
        s.local_addr()
    });
    source.map(|a| a.ip()).ok().filter(|ip| !ip.is_unspecified()).unwrap_or(IpAddr::from([127, 0, 0, 1]))
}
