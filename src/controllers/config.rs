//! What the controllers can be told. Flags carry upstream's names (`kube-controller-manager --help`).

use std::{fmt, str::FromStr, time::Duration};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A length of time as Go writes it: `40s`, `5m0s`, `1h30m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span(pub Duration);

impl Span {
    /// A span of whole seconds.
    pub const fn seconds(seconds: u64) -> Self {
        Span(Duration::from_secs(seconds))
    }
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = jiff::SignedDuration::from_str(text)
            .map_err(|error| format!("{text:?} is not a duration such as 40s or 5m0s: {error}"))?;
        Duration::try_from(parsed).map(Span).map_err(|_| format!("{text:?} must not be negative"))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = self.0.as_secs();
        let (hours, minutes, seconds) = (total / 3600, total / 60 % 60, total % 60);
        match (hours, minutes, self.0.subsec_millis()) {
            (0, 0, 0) => write!(f, "{seconds}s"),
            (0, 0, millis) => write!(f, "{}ms", seconds * 1000 + u64::from(millis)),
            (0, _, _) => write!(f, "{minutes}m{seconds}s"),
            _ => write!(f, "{hours}h{minutes}m{seconds}s"),
        }
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Configuration of the controllers role.
#[derive(Clone, Debug, Serialize, Deserialize, clap::Args)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Config {
    /// Controllers to run: `*` is all that are on by default, `name` turns one on, `-name` turns one off.
    #[arg(long, value_delimiter = ',', default_value = "*")]
    pub controllers: Vec<String>,
    /// Address range of the pods, of which every node gets a part. Empty: nodes get none.
    #[arg(long, default_value = "10.244.0.0/16")]
    pub cluster_cidr: String,
    /// Address range of services; never handed to a node.
    #[arg(long, default_value = "10.96.0.0/16")]
    pub service_cluster_ip_range: String,
    /// Prefix length of each node's part of the cluster CIDR.
    #[arg(long, default_value_t = 24)]
    pub node_cidr_mask_size: u8,
    /// Whether nodes get pod address ranges at all.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pub allocate_node_cidrs: bool,
    /// PEM file of the CA that goes into every namespace's `kube-root-ca.crt`. Empty: the CA of the API server's kubeconfig,
    /// which the process that starts this role hands over.
    #[arg(long, default_value = "")]
    pub root_ca_file: String,
    /// PEM text of that CA, for a role that runs in the API server's process. Never a flag.
    #[arg(skip)]
    #[serde(skip)]
    pub root_ca_pem: Option<String>,

    /// Run only while holding the Lease `kube-system/kube-controller-manager`.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pub leader_elect: bool,
    /// How long a lease that is not renewed stays valid.
    #[arg(long, default_value_t = Span::seconds(15))]
    pub leader_elect_lease_duration: Span,
    /// How long the leader tries to renew before it gives up.
    #[arg(long, default_value_t = Span::seconds(10))]
    pub leader_elect_renew_deadline: Span,
    /// Time between tries.
    #[arg(long, default_value_t = Span::seconds(2))]
    pub leader_elect_retry_period: Span,

    /// A node whose Lease is older than this is not ready.
    #[arg(long, default_value_t = Span::seconds(40))]
    pub node_monitor_grace_period: Span,
    /// A node that has never reported is given this long.
    #[arg(long, default_value_t = Span::seconds(60))]
    pub node_startup_grace_period: Span,
    /// Evictions per second from unreachable nodes.
    #[arg(long, default_value_t = 0.1)]
    pub node_eviction_rate: f32,
    /// The same when a zone is unhealthy, if the cluster is larger than `large_cluster_size_threshold`.
    #[arg(long, default_value_t = 0.01)]
    pub secondary_node_eviction_rate: f32,
    /// Fraction of not ready nodes from which on a zone is unhealthy.
    #[arg(long, default_value_t = 0.55)]
    pub unhealthy_zone_threshold: f32,
    /// Nodes from which on a cluster counts as large.
    #[arg(long, default_value_t = 50)]
    pub large_cluster_size_threshold: usize,
    /// Finished pods that are kept; 0 or less keeps all.
    #[arg(long, default_value_t = 12500, allow_hyphen_values = true)]
    pub terminated_pod_gc_threshold: i64,

    /// Deployments worked on at once.
    #[arg(long, default_value_t = 5)]
    pub concurrent_deployment_syncs: usize,
    /// ReplicaSets worked on at once.
    #[arg(long, default_value_t = 5)]
    pub concurrent_replicaset_syncs: usize,
    /// ReplicationControllers worked on at once.
    #[arg(long, default_value_t = 5)]
    pub concurrent_rc_syncs: usize,
    /// StatefulSets worked on at once.
    #[arg(long, default_value_t = 5)]
    pub concurrent_statefulset_syncs: usize,
    /// DaemonSets worked on at once.
    #[arg(long, default_value_t = 2)]
    pub concurrent_daemonset_syncs: usize,
    /// Jobs worked on at once.
    #[arg(long, default_value_t = 5)]
    pub concurrent_job_syncs: usize,
    /// CronJobs worked on at once.
    #[arg(long, default_value_t = 5)]
    pub concurrent_cron_job_syncs: usize,
    /// Endpoints worked on at once.
    #[arg(long, default_value_t = 5)]
    pub concurrent_endpoint_syncs: usize,
    /// Services whose slices are worked on at once.
    #[arg(long, default_value_t = 5)]
    pub concurrent_service_endpoint_syncs: usize,
    /// Endpoints in one slice.
    #[arg(long, default_value_t = 100)]
    pub max_endpoints_per_slice: usize,
    /// Namespaces deleted at once.
    #[arg(long, default_value_t = 10)]
    pub concurrent_namespace_syncs: usize,
    /// Garbage collector workers.
    #[arg(long, default_value_t = 20)]
    pub concurrent_gc_syncs: usize,
    /// Whether dependents of deleted owners are collected.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pub enable_garbage_collector: bool,
    /// ResourceQuotas worked on at once.
    #[arg(long, default_value_t = 5)]
    pub concurrent_resource_quota_syncs: usize,
    /// Finished jobs worked on at once.
    #[arg(long, default_value_t = 5)]
    pub concurrent_ttl_after_finished_syncs: usize,
    /// HorizontalPodAutoscalers worked on at once.
    #[arg(long, default_value_t = 5)]
    pub concurrent_horizontal_pod_autoscaler_syncs: usize,
    /// PVCs of ephemeral volumes made at once.
    #[arg(long, default_value_t = 5)]
    pub concurrent_ephemeralvolume_syncs: usize,

    /// Time between two looks at an autoscaler's metrics (metrics cannot be watched).
    #[arg(long, default_value_t = Span::seconds(15))]
    pub horizontal_pod_autoscaler_sync_period: Span,
    /// Relative distance from the target within which nothing is scaled.
    #[arg(long, default_value_t = 0.1)]
    pub horizontal_pod_autoscaler_tolerance: f64,
    /// How long an autoscaler remembers recommendations before it scales down.
    #[arg(long, default_value_t = Span::seconds(300))]
    pub horizontal_pod_autoscaler_downscale_stabilization: Span,
    /// Time after a pod's start in which its CPU samples are ignored unless it is ready.
    #[arg(long, default_value_t = Span::seconds(300))]
    pub horizontal_pod_autoscaler_cpu_initialization_period: Span,
    /// Time after a pod's start in which a change of readiness counts as its first.
    #[arg(long, default_value_t = Span::seconds(30))]
    pub horizontal_pod_autoscaler_initial_readiness_delay: Span,

    /// Directory on each node below which the local-path provisioner puts volumes.
    #[arg(long, default_value = "/var/lib/windlass/volumes")]
    pub local_path_dir: String,
}

#[derive(clap::Parser)]
struct Defaults {
    #[command(flatten)]
    config: Config,
}

impl Default for Config {
    /// The defaults of the flags: one place holds them.
    fn default() -> Self {
        use clap::Parser as _;
        Defaults::parse_from([""]).config
    }
}

impl Config {
    /// Whether the controller `name` is to run.
    pub fn enabled(&self, name: &str, on_by_default: bool) -> bool {
        let mut star = false;
        for entry in &self.controllers {
            if entry == name {
                return true;
            }
            if entry.strip_prefix('-') == Some(name) {
                return false;
            }
            star |= entry == "*";
        }
        star && on_by_default
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_written_as_go_does() {
        for (text, seconds, back) in [("40s", 40, "40s"), ("5m", 300, "5m0s"), ("1h30m", 5400, "1h30m0s"), ("5m0s", 300, "5m0s")] {
            let span: Span = text.parse().expect(text);
            assert_eq!(span, Span::seconds(seconds), "{text}");
            assert_eq!(span.to_string(), back);
        }
        assert!("forty".parse::<Span>().is_err());
        assert!("-1s".parse::<Span>().is_err());
    }

    #[test]
    fn controllers_are_chosen_as_upstream_does() {
        let with = |list: &[&str]| Config { controllers: list.iter().map(|s| s.to_string()).collect(), ..Config::default() };
        for (list, name, default, expected) in [
            (&["*"][..], "job-controller", true, true),
            (&["*"], "off", false, false),
            (&["*", "-job-controller"], "job-controller", true, false),
            (&["job-controller"], "deployment-controller", true, false),
            (&["job-controller"], "job-controller", true, true),
            (&["*", "off"], "off", false, true),
        ] {
            assert_eq!(with(list).enabled(name, default), expected, "{list:?} {name}");
        }
    }
}
