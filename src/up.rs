//! `windlass up`: all roles in one process, around an API server that they reach without a socket.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use windlass_apiserver::ApiServer;
use windlass_apiserver::request::UserInfo;
use windlass_client::{Role, connect};
use windlass_daemon::health::Health;
use windlass_daemon::notify;

use crate::command::{self, serve_endpoints};

pub const DEFAULT_DATA_DIR: &str = "/var/lib/windlass";
pub const DEFAULT_DOCKER: &str = "unix:///var/run/docker.sock";

/// Configuration of `windlass up`: what differs between clusters on one machine. For more, run the roles alone.
#[derive(Clone, Debug, Serialize, Deserialize, clap::Args)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Config {
    /// Where the cluster's state, keys and pod directories are kept
    #[arg(long)]
    pub data_dir: PathBuf,
    /// Where the administrator's kubeconfig is written [default: admin.kubeconfig in the data directory]
    #[arg(long)]
    pub write_kubeconfig: Option<PathBuf>,
    /// Address on which the API is served; also the node's address, unless it means all addresses
    #[arg(long)]
    pub bind_address: IpAddr,
    /// Port on which the API is served
    #[arg(long)]
    pub secure_port: u16,
    /// Docker that runs the pods
    #[arg(long)]
    pub docker_endpoint: String,
    /// Addresses of pods
    #[arg(long)]
    pub cluster_cidr: String,
    /// Addresses of services
    #[arg(long)]
    pub service_cluster_ip_range: String,
    /// Service address of the cluster's DNS [default: the tenth service address]
    #[arg(long)]
    pub cluster_dns: Option<IpAddr>,
    /// Domain of the cluster's names
    #[arg(long)]
    pub cluster_domain: String,
    /// Name of this node [default: the host's name]
    #[arg(long)]
    pub node_name: Option<String>,
    /// Keep the state in etcd instead of the data directory
    #[arg(long, value_delimiter = ',')]
    pub etcd_servers: Vec<String>,
    /// Directory with manifests of static pods
    #[arg(long)]
    pub pod_manifest_path: Option<PathBuf>,
    /// How packets reach pods on other nodes: auto, host-gw or vxlan
    #[arg(long)]
    pub pod_routing: String,
    /// Thresholds at which the kubelet evicts pods [default: little memory, or a disk that is really full]
    #[arg(long, value_delimiter = ',')]
    pub eviction_hard: Vec<String>,
    /// Roles that are not run here, since something else does their work
    #[arg(long, value_delimiter = ',')]
    pub without: Vec<String>,
    /// Port of the kubelet's API; if it is taken, any free one
    #[arg(long)]
    pub kubelet_port: u16,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            data_dir: DEFAULT_DATA_DIR.into(),
            write_kubeconfig: None,
            bind_address: Ipv4Addr::UNSPECIFIED.into(),
            secure_port: 6443,
            docker_endpoint: DEFAULT_DOCKER.to_owned(),
            cluster_cidr: "10.244.0.0/16".to_owned(),
            service_cluster_ip_range: "10.96.0.0/16".to_owned(),
            cluster_dns: None,
            cluster_domain: "cluster.local".to_owned(),
            node_name: None,
            etcd_servers: Vec::new(),
            pod_manifest_path: None,
            pod_routing: "auto".to_owned(),
            // The machine is not the cluster's alone: what share of its disk is free says nothing about our pods.
            eviction_hard: ["memory.available<100Mi", "nodefs.available<1Gi", "nodefs.inodesFree<1%", "imagefs.available<1Gi"].map(str::to_owned).to_vec(),
            without: Vec::new(),
            kubelet_port: 10250,
        }
    }
}

/// What tells several clusters on one machine apart: nothing for the default data directory, else a short hash of its
/// path. It names links, chains and containers, so that `reset` finds them by the data directory alone.
pub fn instance(data_dir: &Path) -> String {
    if data_dir == Path::new(DEFAULT_DATA_DIR) {
        return String::new();
    }
    let absolute = std::path::absolute(data_dir).unwrap_or_else(|_| data_dir.to_owned());
    windlass_client::identity::ca_hash(absolute.as_os_str().as_encoded_bytes())[..6].to_owned()
}

/// The roles beside the API server, with the user that each is at the API.
const ROLES: &[&str] = &["scheduler", "controller-manager", "kubelet", "proxy", "dns"];

/// Runs the cluster until `shutdown`. Pods stay when it ends.
pub async fn run(config: Config, shutdown: CancellationToken) -> Result<()> {
    if let Some(unknown) = config.without.iter().find(|name| !ROLES.contains(&name.as_str())) {
        bail!("--without={unknown}: no role of `up` has this name; there are {}", ROLES.join(", "));
    }
    let begun = Instant::now();
    std::fs::create_dir_all(&config.data_dir).with_context(|| format!("cannot make the data directory {}", config.data_dir.display()))?;
    let server = ApiServer::start(apiserver_config(&config), shutdown.clone()).await?;
    phase("API", begun);
    let kubeconfig = config.write_kubeconfig.clone().unwrap_or_else(|| config.data_dir.join("admin.kubeconfig"));
    command::write_private(&kubeconfig, &server.admin_kubeconfig())?;

    let plan = Plan::new(&config, &server)?;
    let mut roles: JoinSet<Result<()>> = JoinSet::new();
    let mut healths = vec![server.health()];
    for name in ROLES.iter().filter(|name| !config.without.iter().any(|without| without == *name)) {
        let health = Health::new();
        healths.push(health.clone());
        let client = connect::in_process(server.service_for(plan.user(name)));
        let role = Role { client, shutdown: shutdown.child_token(), health };
        let plan = plan.clone();
        roles.spawn(async move { plan.run(name, role).await.with_context(|| format!("{name} ended")) });
    }
    let whole = healths[0].clone();
    let told = tokio::spawn(notify::run(whole, shutdown.clone()));
    tokio::spawn(announce(healths, kubeconfig, begun, shutdown.clone()));

    let serving = server.serve();
    let result = tokio::select! {
        result = serving => result.map_err(Into::into),
        // A role ends by itself only when it cannot go on; the others alone would be half a cluster.
        Some(ended) = roles.join_next() => ended.map_err(Into::into).and_then(|result| result),
    };
    shutdown.cancel();
    while let Some(ended) = roles.join_next().await {
        if let Ok(Err(error)) = ended {
            tracing::warn!(error = format!("{error:#}"), "while stopping");
        }
    }
    let _ = told.await;
    result
}

/// Tells people when the cluster can be used, and how.
async fn announce(healths: Vec<Health>, kubeconfig: PathBuf, begun: Instant, shutdown: CancellationToken) {
    let ready = async {
        for health in &healths {
            health.wait_ready().await;
        }
    };
    tokio::select! {
        () = ready => {}
        () = shutdown.cancelled() => return,
    }
    phase("node and services", begun);
    println!("kubeconfig                   {}", kubeconfig.display());
    println!("try                          kubectl --kubeconfig {} get nodes", kubeconfig.display());
}

fn phase(what: &str, begun: Instant) {
    println!("{what:<28} {:6.2} s", begun.elapsed().as_secs_f64());
}

fn apiserver_config(config: &Config) -> windlass_apiserver::Config {
    windlass_apiserver::Config {
        bind_address: config.bind_address,
        secure_port: config.secure_port,
        data_dir: config.data_dir.clone(),
        service_cluster_ip_range: config.service_cluster_ip_range.clone(),
        cluster_domain: config.cluster_domain.clone(),
        etcd_servers: config.etcd_servers.clone(),
        ..windlass_apiserver::Config::default()
    }
}

/// Everything that the roles' configurations are made of.
#[derive(Clone)]
struct Plan {
    config: Config,
    node: String,
    node_ip: Option<IpAddr>,
    cluster_dns: IpAddr,
    instance: String,
    ca: String,
}

impl Plan {
    fn new(config: &Config, server: &ApiServer) -> Result<Self> {
        let node = match &config.node_name {
            Some(name) => name.clone(),
            None => command::hostname()?,
        };
        let cluster_dns = match config.cluster_dns {
            Some(address) => address,
            None => tenth(&config.service_cluster_ip_range)?,
        };
        let node_ip = Some(config.bind_address).filter(|address| !address.is_unspecified());
        Ok(Self { config: config.clone(), node, node_ip, cluster_dns, instance: instance(&config.data_dir), ca: server.ca_pem() })
    }

    /// Who a role is at the API; its rights are those that the bootstrap policy gives this name.
    fn user(&self, role: &str) -> UserInfo {
        let (name, group) = match role {
            "scheduler" => ("system:kube-scheduler".to_owned(), None),
            "controller-manager" => ("system:kube-controller-manager".to_owned(), None),
            "kubelet" => (format!("system:node:{}", self.node), Some("system:nodes")),
            "proxy" => ("system:kube-proxy".to_owned(), None),
            _ => ("system:windlass-dns".to_owned(), None),
        };
        let groups = group.into_iter().chain(["system:authenticated"]).map(str::to_owned).collect();
        UserInfo { name, groups, ..UserInfo::default() }
    }

    async fn run(self, name: &'static str, role: Role) -> Result<()> {
        match name {
            "scheduler" => {
                let config = windlass_scheduler::Config { leader_elect: false, ..Default::default() };
                endpoints(name, 10259, &config, &role).await?;
                Ok(windlass_scheduler::run(config, role).await?)
            }
            "controller-manager" => {
                let config = windlass_controllers::Config {
                    leader_elect: false,
                    cluster_cidr: self.config.cluster_cidr.clone(),
                    service_cluster_ip_range: self.config.service_cluster_ip_range.clone(),
                    root_ca_pem: Some(self.ca),
                    local_path_dir: std::path::absolute(self.config.data_dir.join("volumes"))?.display().to_string(),
                    ..Default::default()
                };
                endpoints(name, 10257, &config, &role).await?;
                Ok(windlass_controllers::run(config, role).await?)
            }
            "kubelet" => Ok(windlass_kubelet::run(self.kubelet()?, role).await?),
            "proxy" => {
                let config = windlass_proxy::Config {
                    hostname_override: self.node.clone(),
                    cluster_cidr: self.config.cluster_cidr.clone(),
                    instance: self.instance.clone(),
                    ..Default::default()
                };
                endpoints(name, 10249, &config, &role).await?;
                Ok(windlass_proxy::run(config, role).await?)
            }
            _ => {
                let config = windlass_dns::Config {
                    cluster_domain: self.config.cluster_domain.clone(),
                    cluster_dns: self.cluster_dns.to_string(),
                    bind_address: self.node_ip.map(|address| address.to_string()).unwrap_or_default(),
                    port: 0,
                    hostname_override: self.node.clone(),
                    ..Default::default()
                };
                endpoints(name, 9153, &config, &role).await?;
                Ok(windlass_dns::run(config, role).await?)
            }
        }
    }

    fn kubelet(&self) -> Result<windlass_kubelet::Config> {
        let ca_file = self.config.data_dir.join("ca.crt");
        std::fs::write(&ca_file, &self.ca).with_context(|| format!("cannot write {}", ca_file.display()))?;
        Ok(windlass_kubelet::Config {
            hostname_override: self.node.clone(),
            node_ip: self.node_ip.map(|address| address.to_string()).unwrap_or_default(),
            instance: self.instance.clone(),
            root_dir: std::path::absolute(self.config.data_dir.join("kubelet"))?,
            docker_endpoint: self.config.docker_endpoint.clone(),
            port: free_port(self.config.kubelet_port)?,
            client_ca_file: Some(ca_file),
            pod_manifest_path: self.config.pod_manifest_path.clone(),
            cluster_dns: vec![self.cluster_dns.to_string()],
            cluster_domain: self.config.cluster_domain.clone(),
            cluster_cidr: self.config.cluster_cidr.clone(),
            pod_routing: self.config.pod_routing.parse().map_err(anyhow::Error::msg)?,
            eviction_hard: self.config.eviction_hard.clone(),
            // Images that no pod uses may be somebody's.
            image_gc_high_threshold: 100,
            image_gc_low_threshold: 99,
            ..Default::default()
        })
    }
}

/// Serves a role's endpoints on its usual port; a second cluster on the machine gets free ones, and says which.
async fn endpoints(name: &'static str, port: u16, config: &impl Serialize, role: &Role) -> Result<()> {
    let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), free_port(port)?);
    let bound = serve_endpoints(address, name, serde_json::to_value(config)?, role).await?;
    tracing::info!(role = name, address = %bound, "endpoints");
    Ok(())
}

/// `wanted`, or any free port if somebody else has it.
fn free_port(wanted: u16) -> Result<u16> {
    if std::net::TcpListener::bind((Ipv4Addr::UNSPECIFIED, wanted)).is_ok() {
        return Ok(wanted);
    }
    let free = std::net::TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).context("no free port")?;
    Ok(free.local_addr()?.port())
}

/// The tenth address of a range, where clusters have their DNS by custom.
fn tenth(range: &str) -> Result<IpAddr> {
    let first = range.split(',').next().unwrap_or_default();
    let network = first.split('/').next().unwrap_or_default().trim();
    match network.parse() {
        Ok(IpAddr::V4(address)) => Ok(Ipv4Addr::from(u32::from(address).wrapping_add(10)).into()),
        Ok(IpAddr::V6(address)) => Ok(std::net::Ipv6Addr::from(u128::from(address).wrapping_add(10)).into()),
        Err(_) => bail!("--service-cluster-ip-range: {range:?} is no address range such as 10.96.0.0/16"),
    }
}
