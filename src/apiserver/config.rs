//! The API server's configuration. Flags have upstream's names where upstream has the flag.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use windlass_api::schema::formats;

/// A length of time as Go writes it: `40s`, `5m0s`, `1h30m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

impl Span {
    pub const fn seconds(seconds: u64) -> Span {
        Span(Duration::from_secs(seconds))
    }
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Span, String> {
        let nanos = formats::parse_go_duration(text).and_then(|n| u64::try_from(n).ok());
        nanos.map(|n| Span(Duration::from_nanos(n))).ok_or_else(|| format!("{text:?} is not a duration such as 40s or 5m0s"))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&formats::go_duration(i64::try_from(self.0.as_nanos()).unwrap_or(i64::MAX)))
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Span, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

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
    /// Admission plugins to run. All that exist are on by default, so this only checks the names.
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
    /// The longest life of a service account token; 0s for no bound.
    #[arg(long)]
    pub service_account_max_token_expiration: Span,
    /// Whether tokens that are mounted into pods live longer than asked, to ease the way for old clients.
    #[arg(long)]
    pub service_account_extend_token_expiration: bool,

    /// How long a request may take that is not long-running.
    #[arg(long)]
    pub request_timeout: Span,
    /// How long events are kept.
    #[arg(long)]
    pub event_ttl: Span,
    /// How long history is kept in etcd (the embedded store bounds its own).
    #[arg(long)]
    pub etcd_compaction_interval: Span,
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
    /// How long connections may go on after the server was asked to stop.
    #[arg(long)]
    pub shutdown_grace: Span,
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
            service_account_max_token_expiration: Span::seconds(0),
            service_account_extend_token_expiration: true,
            request_timeout: Span::seconds(60),
            event_ttl: Span::seconds(3600),
            etcd_compaction_interval: Span::seconds(300),
            max_requests_inflight: 400,
            max_mutating_requests_inflight: 200,
            kubelet_preferred_address_types: ["InternalIP", "ExternalIP", "Hostname", "InternalDNS", "ExternalDNS"].map(String::from).into(),
            kubelet_certificate_authority: None,
            shutdown_grace: Span::seconds(10),
        }
    }
}

impl Config {
    /// The file that the cluster's keys are sealed under.
    pub fn token_file(&self) -> PathBuf {
        self.server_token_file.clone().unwrap_or_else(|| self.data_dir.join("server-token"))
    }
}
