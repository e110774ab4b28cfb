//! The API server's configuration. Flags have upstream's names where upstream has the flag.

use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Configuration of the API server.
#[derive(Clone, Debug, Serialize, Deserialize, clap::Args)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Config {
    /// Address to listen on.
    #[arg(long)]
    pub bind_address: IpAddr,
    /// Port to serve HTTPS on; 0 takes any free one.
    #[arg(long)]
    pub secure_port: u16,
    /// Address that members of the cluster are told to reach this server at; found out if not given.
    #[arg(long)]
    pub advertise_address: Option<IpAddr>,
    /// Further names that the serving certificate is good for.
    #[arg(long, value_delimiter = ',')]
    pub tls_san: Vec<String>,
    /// The cluster's DNS domain.
    #[arg(long)]
    pub cluster_domain: String,

    /// Directory of the embedded store and the server token.
    #[arg(long)]
    pub data_dir: PathBuf,
    /// File with the token under which the cluster's keys are sealed; `DATA_DIR/server-token` if not given.
    #[arg(long)]
    pub server_token_file: Option<PathBuf>,
    /// etcd's endpoints; the embedded store is used if there are none.
    #[arg(long, value_delimiter = ',')]
    pub etcd_servers: Vec<String>,
    /// CA certificate that vouches for etcd.
    #[arg(long)]
    pub etcd_cafile: Option<PathBuf>,
    /// Client certificate for etcd.
    #[arg(long)]
    pub etcd_certfile: Option<PathBuf>,
    /// Key of the client certificate for etcd.
    #[arg(long)]
    pub etcd_keyfile: Option<PathBuf>,

    /// Network of service addresses.
    #[arg(long)]
    pub service_cluster_ip_range: String,
    /// Ports for services of type NodePort, `first-last`.
    #[arg(long)]
    pub service_node_port_range: String,

    /// File of static tokens: token,user,uid,"group,group".
    #[arg(long)]
    pub token_auth_file: Option<PathBuf>,
    /// Whether requests without credentials may see health, version and issuer documents.
    #[arg(long)]
    pub anonymous_auth: bool,
    /// Common names of proxies that may speak for users; all that the front proxy authority signs if empty.
    #[arg(long, value_delimiter = ',')]
    pub requestheader_allowed_names: Vec<String>,
    /// Modes of authorization in their order: Node, RBAC, AlwaysAllow, AlwaysDeny.
    #[arg(long, value_delimiter = ',')]
    pub authorization_mode: Vec<String>,
    /// Admission plugins to run besides those that are on by default (all that exist are; names are checked).
    #[arg(long, value_delimiter = ',')]
    pub enable_admission_plugins: Vec<String>,
    /// Admission plugins not to run.
    #[arg(long, value_delimiter = ',')]
    pub disable_admission_plugins: Vec<String>,
    /// Issuers of service account tokens: the first signs, all are accepted.
    #[arg(long)]
    pub service_account_issuer: Vec<String>,
    /// Audiences that this server answers to; the issuers if empty.
    #[arg(long, value_delimiter = ',')]
    pub api_audiences: Vec<String>,
    /// The longest life of a service account token in seconds; 0 for no bound.
    #[arg(long)]
    pub service_account_max_token_expiration_seconds: i64,
    /// Whether tokens that are mounted into pods live longer than asked, to ease the way for old clients.
    #[arg(long)]
    pub service_account_extend_token_expiration: bool,

    /// Seconds that a request may take that is not long-running.
    #[arg(long)]
    pub request_timeout_seconds: u64,
    /// Seconds that events are kept.
    #[arg(long)]
    pub event_ttl_seconds: u64,
    /// Most reading requests at once; 0 for no bound.
    #[arg(long)]
    pub max_requests_inflight: usize,
    /// Most writing requests at once; 0 for no bound.
    #[arg(long)]
    pub max_mutating_requests_inflight: usize,
    /// Kinds of node addresses by which kubelets are reached, the preferred one first.
    #[arg(long, value_delimiter = ',')]
    pub kubelet_preferred_address_types: Vec<String>,
    /// CA bundle that vouches for kubelets' serving certificates; any is accepted if not given.
    #[arg(long)]
    pub kubelet_certificate_authority: Option<PathBuf>,
    /// Seconds that connections may go on after the server was asked to stop.
    #[arg(long)]
    pub shutdown_grace_seconds: u64,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            bind_address: IpAddr::from([0, 0, 0, 0]),
            secure_port: 6443,
            advertise_address: None,
            tls_san: Vec::new(),
            cluster_domain: "cluster.local".into(),
            data_dir: "/var/lib/windlass".into(),
            server_token_file: None,
            etcd_servers: Vec::new(),
            etcd_cafile: None,
            etcd_certfile: None,
            etcd_keyfile: None,
            service_cluster_ip_range: "10.96.0.0/16".into(),
            service_node_port_range: "30000-32767".into(),
            token_auth_file: None,
            anonymous_auth: true,
            requestheader_allowed_names: Vec::new(),
            authorization_mode: vec!["Node".into(), "RBAC".into()],
            enable_admission_plugins: Vec::new(),
            disable_admission_plugins: Vec::new(),
            service_account_issuer: Vec::new(),
            api_audiences: Vec::new(),
            service_account_max_token_expiration_seconds: 0,
            service_account_extend_token_expiration: true,
            request_timeout_seconds: 60,
            event_ttl_seconds: 3600,
            max_requests_inflight: 400,
            max_mutating_requests_inflight: 200,
            kubelet_preferred_address_types: ["InternalIP", "ExternalIP", "Hostname", "InternalDNS", "ExternalDNS"].map(String::from).into(),
            kubelet_certificate_authority: None,
            shutdown_grace_seconds: 10,
        }
    }
}

impl Config {
    /// The file that the cluster's keys are sealed under.
    pub fn token_file(&self) -> PathBuf {
        self.server_token_file.clone().unwrap_or_else(|| self.data_dir.join("server-token"))
    }
}
