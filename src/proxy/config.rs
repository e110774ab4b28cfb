//! The proxy's configuration: upstream's flags by upstream's names, where there are such.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use windlass_net::Cidr;

use crate::Error;

/// A time span in Go's notation: `30s`, `1m30s`, `0s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = String;
    fn from_str(text: &str) -> Result<Span, String> {
        let zero = text == "0";
        let parsed: jiff::SignedDuration = if zero { jiff::SignedDuration::ZERO } else { text.parse().map_err(|e| format!("{text:?} is no duration such as 30s: {e}"))? };
        Duration::try_from(parsed).map(Span).map_err(|_| format!("{text:?} must not be negative"))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.0.as_millis();
        if ms.is_multiple_of(1000) { write!(f, "{}s", ms / 1000) } else { write!(f, "{ms}ms") }
    }
}

impl Serialize for Span {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Span, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Configuration of the service proxy.
#[derive(Clone, Debug, Serialize, Deserialize, clap::Args)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Config {
    /// Which proxy mode to use: iptables (nftables and userspace are not there yet)
    #[arg(long = "proxy-mode", value_name = "MODE")]
    pub mode: String,
    /// Name of this node, if it is not the host's name
    #[arg(long, value_name = "NAME")]
    pub hostname_override: String,
    /// This node's address; empty: the Node object's InternalIP
    #[arg(long, value_name = "IP")]
    pub bind_address: String,
    /// CIDRs of all pods of the cluster, comma separated; with detect-local-mode ClusterCIDR, traffic from them is local
    #[arg(long = "cluster-cidr", value_name = "CIDRS")]
    pub cluster_cidr: String,
    /// How local pods' traffic is recognised: ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix
    #[arg(long, value_name = "MODE")]
    pub detect_local_mode: String,
    /// The pods' bridge, for detect-local-mode BridgeInterface
    #[arg(long, value_name = "LINK")]
    pub pod_bridge_interface: String,
    /// What the names of the pods' links start with, for detect-local-mode InterfaceNamePrefix
    #[arg(long, value_name = "PREFIX")]
    pub pod_interface_name_prefix: String,
    /// SNAT all traffic to cluster IPs
    #[arg(long)]
    pub masquerade_all: bool,
    /// The bit of the packet mark that asks for SNAT, 0 to 31
    #[arg(long, value_name = "BIT")]
    pub iptables_masquerade_bit: u8,
    /// Let node ports be reached by 127.0.0.1 (IPv4)
    #[arg(long = "iptables-localhost-nodeports")]
    pub iptables_localhost_node_ports: bool,
    /// How often to look whether somebody flushed our rules
    #[arg(long, value_name = "SPAN")]
    pub iptables_sync_period: Span,
    /// The least time between two syncs, after two in a row
    #[arg(long, value_name = "SPAN")]
    pub iptables_min_sync_period: Span,
    /// CIDRs of this node's addresses that node ports are open on; none: all addresses
    #[arg(long = "nodeport-addresses", value_name = "CIDRS", value_delimiter = ',')]
    pub node_port_addresses: Vec<String>,
    /// Connections to track per core (0: leave the kernel's limit as it is)
    #[arg(long, value_name = "N")]
    pub conntrack_max_per_core: u32,
    /// Connections to track at least, if conntrack-max-per-core is not 0
    #[arg(long, value_name = "N")]
    pub conntrack_min: u32,
    /// Idle timeout of established TCP connections (0s: leave as is)
    #[arg(long, value_name = "SPAN")]
    pub conntrack_tcp_timeout_established: Span,
    /// Timeout of TCP connections in CLOSE_WAIT (0s: leave as is)
    #[arg(long, value_name = "SPAN")]
    pub conntrack_tcp_timeout_close_wait: Span,
    /// Let packets pass that conntrack calls invalid
    #[arg(long)]
    pub conntrack_tcp_be_liberal: bool,
    /// Which Windlass of this machine: names the chains; empty for the only one
    #[arg(long, value_name = "NAME")]
    pub instance: String,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            mode: "iptables".into(),
            hostname_override: String::new(),
            bind_address: String::new(),
            cluster_cidr: String::new(),
            detect_local_mode: "ClusterCIDR".into(),
            pod_bridge_interface: String::new(),
            pod_interface_name_prefix: String::new(),
            masquerade_all: false,
            iptables_masquerade_bit: 14,
            iptables_localhost_node_ports: true,
            iptables_sync_period: Span(Duration::from_secs(30)),
            iptables_min_sync_period: Span(Duration::from_secs(1)),
            node_port_addresses: Vec::new(),
            conntrack_max_per_core: 32 * 1024,
            conntrack_min: 128 * 1024,
            conntrack_tcp_timeout_established: Span(Duration::from_secs(24 * 3600)),
            conntrack_tcp_timeout_close_wait: Span(Duration::from_secs(3600)),
            conntrack_tcp_be_liberal: false,
            instance: String::new(),
        }
    }
}

/// How local traffic is recognised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DetectLocal {
    ClusterCidr(Vec<Cidr>),
    /// The Node object's pod CIDRs.
    NodeCidr,
    Link(String),
}

/// The configuration with everything parsed.
#[derive(Clone, Debug)]
pub struct Checked {
    pub node: String,
    pub node_ip: Option<IpAddr>,
    pub detect_local: DetectLocal,
    pub node_port_cidrs: Vec<Cidr>,
    pub masquerade_mark: String,
}

fn bad(field: &'static str, reason: impl fmt::Display) -> Error {
    Error::Config { field, reason: reason.to_string() }
}

fn cidrs<'a>(field: &'static str, texts: impl IntoIterator<Item = &'a str>) -> Result<Vec<Cidr>, Error> {
    texts.into_iter().map(str::trim).filter(|t| !t.is_empty()).map(|t| t.parse().map_err(|e| bad(field, e))).collect()
}

impl Config {
    /// Parses what is text and refuses what cannot be.
    pub fn check(&self) -> Result<Checked, Error> {
        match self.mode.as_str() {
            "" | "iptables" => {}
            "nftables" | "userspace" => return Err(bad("mode", format!("proxy mode {} is not implemented yet; use iptables", self.mode))),
            other => return Err(bad("mode", format!("unknown proxy mode {other:?}; use iptables"))),
        }
        if self.iptables_masquerade_bit > 31 {
            return Err(bad("iptablesMasqueradeBit", "must be from 0 to 31"));
        }
        if self.iptables_sync_period.0.is_zero() {
            return Err(bad("iptablesSyncPeriod", "must be greater than 0"));
        }
        if self.iptables_min_sync_period.0 > self.iptables_sync_period.0 {
            return Err(bad("iptablesMinSyncPeriod", "must not be greater than iptablesSyncPeriod"));
        }
        let detect_local = match self.detect_local_mode.as_str() {
            "" | "ClusterCIDR" => DetectLocal::ClusterCidr(cidrs("clusterCidr", self.cluster_cidr.split(','))?),
            "NodeCIDR" => DetectLocal::NodeCidr,
            "BridgeInterface" if !self.pod_bridge_interface.is_empty() => DetectLocal::Link(self.pod_bridge_interface.clone()),
            "InterfaceNamePrefix" if !self.pod_interface_name_prefix.is_empty() => DetectLocal::Link(format!("{}+", self.pod_interface_name_prefix)),
            "BridgeInterface" => return Err(bad("podBridgeInterface", "must be set with detectLocalMode BridgeInterface")),
            "InterfaceNamePrefix" => return Err(bad("podInterfaceNamePrefix", "must be set with detectLocalMode InterfaceNamePrefix")),
            other => return Err(bad("detectLocalMode", format!("unknown mode {other:?}; use ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix"))),
        };
        if let DetectLocal::Link(name) = &detect_local
            && (name.len() > 16 || !name.chars().all(|c| c.is_ascii_graphic()))
        {
            return Err(bad("podBridgeInterface", format!("{name:?} is no link's name")));
        }
        if self.node_port_addresses == ["primary"] {
            return Err(bad("nodePortAddresses", "\"primary\" is not implemented yet; give the address as a CIDR"));
        }
        let node_ip = match self.bind_address.as_str() {
            "" | "0.0.0.0" | "::" => None,
            text => Some(text.parse().map_err(|e| bad("bindAddress", format!("{text:?}: {e}")))?),
        };
        let node = if self.hostname_override.is_empty() {
            windlass_daemon::host::name().map_err(|e| bad("hostnameOverride", format!("the host's name cannot be read; set it: {e}")))?
        } else {
            self.hostname_override.trim().to_lowercase()
        };
        Ok(Checked {
            node,
            node_ip,
            detect_local,
            node_port_cidrs: cidrs("nodePortAddresses", self.node_port_addresses.iter().map(String::as_str))?,
            masquerade_mark: format!("{:#x}", 1u32 << self.iptables_masquerade_bit),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_it_cannot_do() {
        let check = |change: fn(&mut Config), expected: &str| {
            let mut config = Config { hostname_override: "N1".into(), ..Config::default() };
            change(&mut config);
            let got = config.check().map_or_else(|e| e.to_string(), |c| format!("{} {} {:?}", c.node, c.masquerade_mark, c.detect_local));
            assert!(got.contains(expected), "{got}");
        };
        check(|_| (), "n1 0x4000 ClusterCidr([])");
        check(|c| c.cluster_cidr = "10.244.0.0/16, fd00::/56".into(), "ClusterCidr([10.244.0.0/16, fd00::/56])");
        check(|c| c.mode = "nftables".into(), "not implemented yet");
        check(|c| c.mode = "ipvs".into(), "unknown proxy mode");
        check(|c| c.cluster_cidr = "x".into(), "is not a CIDR");
        check(|c| c.detect_local_mode = "BridgeInterface".into(), "must be set");
        check(|c| c.iptables_masquerade_bit = 32, "0 to 31");
        check(|c| c.bind_address = "nowhere".into(), "bindAddress");
    }

    #[test]
    fn spans_as_go_writes_them() {
        for (text, ms) in [("30s", 30_000), ("1m30s", 90_000), ("500ms", 500), ("0", 0), ("0s", 0), ("2h", 7_200_000)] {
            assert_eq!(text.parse::<Span>().map(|s| s.0.as_millis()), Ok(ms), "{text}");
        }
        assert!("-1s".parse::<Span>().is_err() && "soon".parse::<Span>().is_err());
    }
}
