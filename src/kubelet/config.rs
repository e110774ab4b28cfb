//! The kubelet's configuration: one field per flag, under upstream's names where there is one.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What the kubelet is told. Unknown fields are refused.
#[derive(Clone, Debug, Serialize, Deserialize, clap::Args)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Config {
    /// Name under which the node registers; the host's name when empty.
    #[arg(long = "hostname-override", default_value = "")]
    pub hostname_override: String,
    /// The node's addresses, comma-separated; found by the default route when empty.
    #[arg(long = "node-ip", default_value = "")]
    pub node_ip: String,
    /// Tells several Windlass instances on one host apart: containers, cgroups, links.
    #[arg(long = "instance", default_value = "")]
    pub instance: String,
    /// Where pods' volumes and the kubelet's own files live.
    #[arg(long = "root-dir", default_value = "/var/lib/windlass/kubelet")]
    pub root_dir: PathBuf,
    /// Docker's socket.
    #[arg(long = "docker-endpoint", default_value = "unix:///var/run/docker.sock")]
    pub docker_endpoint: String,
    /// Address of the kubelet's server.
    #[arg(long = "address", default_value = "0.0.0.0")]
    pub address: String,
    /// Port of the kubelet's server.
    #[arg(long = "port", default_value_t = 10250)]
    pub port: u16,
    /// Serving certificate (PEM); requested through the CSR API when empty.
    #[arg(long = "tls-cert-file")]
    pub tls_cert_file: Option<PathBuf>,
    #[arg(long = "tls-private-key-file")]
    pub tls_private_key_file: Option<PathBuf>,
    /// CAs (PEM) whose client certificates are accepted.
    #[arg(long = "client-ca-file")]
    pub client_ca_file: Option<PathBuf>,
    /// Directory of static pods' manifests (YAML or JSON).
    #[arg(long = "pod-manifest-path")]
    pub pod_manifest_path: Option<PathBuf>,
    /// URL of static pods' manifests, fetched every 20 s.
    #[arg(long = "manifest-url", default_value = "")]
    pub manifest_url: String,
    /// Headers (`key:value`) for the manifest URL; may be given several times.
    #[arg(long = "manifest-url-header")]
    pub manifest_url_header: Vec<String>,
    /// Addresses of the cluster's DNS.
    #[arg(long = "cluster-dns", value_delimiter = ',')]
    #[serde(rename = "clusterDNS")]
    pub cluster_dns: Vec<String>,
    /// The cluster's DNS domain.
    #[arg(long = "cluster-domain", default_value = "cluster.local")]
    pub cluster_domain: String,
    /// The resolver configuration that pods with `dnsPolicy: Default` get.
    #[arg(long = "resolv-conf", default_value = "/etc/resolv.conf")]
    pub resolv_conf: String,
    /// Pods that the node takes at most.
    #[arg(long = "max-pods", default_value_t = 110)]
    pub max_pods: u32,
    /// Processes per pod at most; 0 is no limit.
    #[arg(long = "pod-max-pids", default_value_t = 0)]
    pub pod_pids_limit: i64,
    /// Addresses of pods when the node object has no pod CIDR.
    #[arg(long = "pod-cidr", default_value = "")]
    #[serde(rename = "podCIDR")]
    pub pod_cidr: String,
    /// Addresses of all pods of the cluster, comma-separated: traffic to elsewhere leaves with the node's address.
    #[arg(long = "cluster-cidr", default_value = "10.244.0.0/16")]
    #[serde(rename = "clusterCIDR")]
    pub cluster_cidr: String,
    /// How packets reach pods on other nodes: `auto` (routes on one network, VXLAN beyond), `vxlan` or `host-gw`.
    #[arg(long = "pod-routing", default_value = "auto")]
    pub pod_routing: windlass_net::routes::Mode,
    /// Whether to create the node object.
    #[arg(long = "register-node", default_value_t = true)]
    pub register_node: bool,
    /// Taints (`key=value:effect`) of a node that registers.
    #[arg(long = "register-with-taints", value_delimiter = ',')]
    pub register_with_taints: Vec<String>,
    /// Labels (`key=value`) of a node that registers.
    #[arg(long = "node-labels", value_delimiter = ',')]
    pub node_labels: Vec<String>,
    /// Resources (`cpu=100m`) kept from pods for Kubernetes' own programs.
    #[arg(long = "kube-reserved", value_delimiter = ',')]
    pub kube_reserved: Vec<String>,
    /// Resources kept from pods for the system.
    #[arg(long = "system-reserved", value_delimiter = ',')]
    pub system_reserved: Vec<String>,
    /// Thresholds (`signal<value`) at which pods are evicted.
    #[arg(long = "eviction-hard", value_delimiter = ',', default_value = "memory.available<100Mi,nodefs.available<10%,nodefs.inodesFree<5%,imagefs.available<15%")]
    pub eviction_hard: Vec<String>,
    /// Seconds for which a node condition stays after its pressure went away.
    #[arg(long = "eviction-pressure-transition-period", default_value_t = 300)]
    pub eviction_pressure_transition_period: u64,
    /// Percent of disk in use at which unused images are removed.
    #[arg(long = "image-gc-high-threshold", default_value_t = 85)]
    #[serde(rename = "imageGCHighThresholdPercent")]
    pub image_gc_high_threshold: u8,
    /// Percent of disk in use down to which images are removed.
    #[arg(long = "image-gc-low-threshold", default_value_t = 80)]
    #[serde(rename = "imageGCLowThresholdPercent")]
    pub image_gc_low_threshold: u8,
    /// Dead containers kept per container of a pod, for `logs --previous`.
    #[arg(long = "maximum-dead-containers-per-container", default_value_t = 1)]
    pub maximum_dead_containers_per_container: usize,
    /// Seconds between writes of an unchanged node status.
    #[arg(long = "node-status-report-frequency", default_value_t = 300)]
    pub node_status_report_frequency: u64,
    /// Seconds between looks at the node's own state, and renewals of its lease.
    #[arg(long = "node-status-update-frequency", default_value_t = 10)]
    pub node_status_update_frequency: u64,
    /// Sysctls (or `prefix.*`) that pods may set though they are not safe.
    #[arg(long = "allowed-unsafe-sysctls", value_delimiter = ',')]
    pub allowed_unsafe_sysctls: Vec<String>,
    /// Use the runtime's seccomp profile where a pod names none.
    #[arg(long = "seccomp-default", default_value_t = false)]
    pub seccomp_default: bool,
    /// Bytes after which a container's log is rotated.
    #[arg(long = "container-log-max-size", default_value_t = 10 << 20)]
    pub container_log_max_size: i64,
    /// Log files kept per container.
    #[arg(long = "container-log-max-files", default_value_t = 5)]
    pub container_log_max_files: u32,
    /// Parallel image pulls at most.
    #[arg(long = "max-parallel-image-pulls", default_value_t = 5)]
    pub max_parallel_image_pulls: usize,
}

impl Default for Config {
    fn default() -> Self {
        #[derive(clap::Parser)]
        struct Defaults {
            #[command(flatten)]
            config: Config,
        }
        <Defaults as clap::Parser>::parse_from(["kubelet"]).config
    }
}

impl Config {
    /// The node's name: as configured, or the host's, in lower case.
    pub fn node_name(&self) -> String {
        match self.hostname_override.trim() {
            "" => windlass_daemon::host::name().unwrap_or_default(),
            name => name.to_lowercase(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_upstreams() {
        let config = Config::default();
        assert_eq!((config.port, config.max_pods, config.register_node, config.cluster_domain.as_str()), (10250, 110, true, "cluster.local"));
        assert_eq!(config.eviction_hard.len(), 4);
        let text = serde_json::to_string(&config).expect("serializes");
        assert_eq!(serde_json::from_str::<Config>(&text).expect("round trip").max_pods, 110);
        assert!(serde_json::from_str::<Config>("{\"maxpods\": 1}").is_err());
    }
}
