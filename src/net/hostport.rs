//! Host ports and the rules that pods need around them, as a pure function from the node's pods to chains.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::cidr::{Cidr, Family};
use crate::iptables::{Chains, Jump, Position};

/// A transport protocol, as in a container port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

impl Protocol {
    /// As `iptables` writes it.
    pub fn lower(self) -> &'static str {
        match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
            Protocol::Sctp => "sctp",
        }
    }

    /// From the API's word; empty means TCP, the API's default.
    pub fn parse(text: &str) -> Option<Protocol> {
        match text {
            "" | "TCP" => Some(Protocol::Tcp),
            "UDP" => Some(Protocol::Udp),
            "SCTP" => Some(Protocol::Sctp),
            _ => None,
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Protocol::Tcp => "TCP",
            Protocol::Udp => "UDP",
            Protocol::Sctp => "SCTP",
        })
    }
}

/// A port of the node that leads to a port of the pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostPort {
    pub protocol: Protocol,
    pub host_port: u16,
    pub container_port: u16,
    /// The node's address on which the port is open; `None`: all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_ip: Option<IpAddr>,
}

impl HostPort {
    /// Whether both cannot be open at once: same protocol and port on a common address.
    pub fn conflicts(&self, other: &HostPort) -> bool {
        let any = |ip: Option<IpAddr>| ip.filter(|a| !a.is_unspecified());
        self.protocol == other.protocol
            && self.host_port == other.host_port
            && match (any(self.host_ip), any(other.host_ip)) {
                (Some(a), Some(b)) => a == b,
                _ => true,
            }
    }
}

/// What the rules are made from.
#[derive(Clone, Debug)]
pub struct Input<'a> {
    pub family: Family,
    /// [`crate::iptables::chain_prefix`] of the instance.
    pub prefix: &'a str,
    pub bridge: &'a str,
    pub pod_cidrs: &'a [Cidr],
    /// Where traffic of pods keeps its source address, besides the node's own pod CIDRs.
    pub cluster_cidrs: &'a [Cidr],
    /// Pods with host ports: (`namespace/name`, address, ports).
    pub pods: &'a [(String, IpAddr, Vec<HostPort>)],
}

/// The chains: `HOSTPORTS` and `POD-MASQ` in nat, `POD-FORWARD` and `POD-FIREWALL` in filter.
pub fn chains(input: &Input<'_>) -> Chains {
    let mut chains = Chains::default();
    let of_family = |c: &&Cidr| c.family() == input.family;
    let own: Vec<&Cidr> = input.pod_cidrs.iter().filter(of_family).collect();
    let mut inside: Vec<&Cidr> = input.cluster_cidrs.iter().filter(of_family).collect();
    inside.extend(own.iter().filter(|o| !input.cluster_cidrs.iter().any(|c| c.covers(o))));
    let bridge = input.bridge;

    let ports = chains.chain("nat", format!("{}HOSTPORTS", input.prefix));
    for (pod, address, list) in input.pods.iter().filter(|(_, a, _)| Family::of(*a) == input.family) {
        for port in list {
            let protocol = port.protocol.lower();
            let destination = match port.host_ip.filter(|a| !a.is_unspecified()) {
                Some(ip) if Family::of(ip) != input.family => continue,
                Some(ip) => format!("-d {} ", Cidr::host(ip)),
                None => String::new(),
            };
            let to = std::net::SocketAddr::new(*address, port.container_port);
            ports.push(format!(
                "{destination}-p {protocol} -m comment --comment \"{pod} hostport {}\" -m {protocol} --dport {} -j DNAT --to-destination {to}",
                port.host_port, port.host_port
            ));
        }
    }

    let masquerade = chains.chain("nat", format!("{}POD-MASQ", input.prefix));
    for (_, address, _) in input.pods.iter().filter(|(_, a, _)| Family::of(*a) == input.family) {
        // A pod that reaches itself through its host port must see another source than itself.
        let host = Cidr::host(*address);
        masquerade.push(format!("-s {host} -d {host} -j MASQUERADE --random-fully"));
    }
    if input.family == Family::V4 {
        // From the node's loopback to a host port: pods cannot answer 127.0.0.1.
        masquerade.push(format!("-s 127.0.0.0/8 -o {bridge} -j MASQUERADE --random-fully"));
    }
    let multicast = if input.family == Family::V4 { "224.0.0.0/4" } else { "ff00::/8" };
    for cidr in &own {
        for near in &inside {
            masquerade.push(format!("-s {cidr} -d {near} -j RETURN"));
        }
        masquerade.push(format!("-s {cidr} -d {multicast} -j RETURN"));
        masquerade.push(format!("-s {cidr} -j MASQUERADE --random-fully"));
    }

    // Docker sets the policy of FORWARD to DROP.
    let forward = chains.chain("filter", format!("{}POD-FORWARD", input.prefix));
    forward.push(format!("-i {bridge} -j ACCEPT"));
    forward.push(format!("-o {bridge} -j ACCEPT"));

    let firewall = chains.chain("filter", format!("{}POD-FIREWALL", input.prefix));
    if input.family == Family::V4 {
        // route_localnet is on for the bridge: nobody but a redirected connection may use it to reach our loopback.
        firewall.push(format!("-i {bridge} -d 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"));
    }
    chains
}

/// How the built-in chains get to ours.
pub fn jumps(prefix: &str) -> Vec<Jump> {
    let local = ["-m", "comment", "--comment", "kube hostport portals", "-m", "addrtype", "--dst-type", "LOCAL"];
    vec![
        Jump::new("nat", "PREROUTING", Position::Last, &local, format!("{prefix}HOSTPORTS")),
        Jump::new("nat", "OUTPUT", Position::Last, &local, format!("{prefix}HOSTPORTS")),
        Jump::new("nat", "POSTROUTING", Position::Last, &["-m", "comment", "--comment", "pod traffic to the outside"], format!("{prefix}POD-MASQ")),
        Jump::new("filter", "FORWARD", Position::Last, &["-m", "comment", "--comment", "pod traffic"], format!("{prefix}POD-FORWARD")),
        Jump::new("filter", "INPUT", Position::First, &["-m", "comment", "--comment", "pods and the node's loopback"], format!("{prefix}POD-FIREWALL")),
    ]
}

/// Whether a chain is one of those that this module makes.
pub fn is_ours(prefix: &str, chain: &str) -> bool {
    chain.strip_prefix(prefix).is_some_and(|c| ["HOSTPORTS", "POD-MASQ", "POD-FORWARD", "POD-FIREWALL"].contains(&c))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(family: Family, pods: &[(String, IpAddr, Vec<HostPort>)], table: &str, chain: &str, expected: &[&str]) {
        let cidrs: Vec<Cidr> = ["10.244.1.0/24", "fd00:1::/64"].iter().map(|c| c.parse().unwrap()).collect();
        let cluster: Vec<Cidr> = vec!["10.244.0.0/16".parse().unwrap()];
        let input = Input { family, prefix: "KUBE-", bridge: "wl0", pod_cidrs: &cidrs, cluster_cidrs: &cluster, pods };
        let got = chains(&input);
        assert_eq!(got.tables[table][chain], expected, "{chain}");
    }

    fn port(host_port: u16, host_ip: Option<&str>) -> HostPort {
        HostPort { protocol: Protocol::Tcp, host_port, container_port: 80, host_ip: host_ip.map(|a| a.parse().unwrap()) }
    }

    #[test]
    fn rules() {
        let pods = vec![("default/web".to_owned(), "10.244.1.5".parse().unwrap(), vec![port(8080, None), port(81, Some("192.0.2.1"))])];
        check(Family::V4, &pods, "nat", "KUBE-HOSTPORTS", &[
            "-p tcp -m comment --comment \"default/web hostport 8080\" -m tcp --dport 8080 -j DNAT --to-destination 10.244.1.5:80",
            "-d 192.0.2.1/32 -p tcp -m comment --comment \"default/web hostport 81\" -m tcp --dport 81 -j DNAT --to-destination 10.244.1.5:80",
        ]);
        check(Family::V4, &pods, "nat", "KUBE-POD-MASQ", &[
            "-s 10.244.1.5/32 -d 10.244.1.5/32 -j MASQUERADE --random-fully",
            "-s 127.0.0.0/8 -o wl0 -j MASQUERADE --random-fully",
            "-s 10.244.1.0/24 -d 10.244.0.0/16 -j RETURN",
            "-s 10.244.1.0/24 -d 224.0.0.0/4 -j RETURN",
            "-s 10.244.1.0/24 -j MASQUERADE --random-fully",
        ]);
        check(Family::V6, &pods, "nat", "KUBE-HOSTPORTS", &[]);
        check(Family::V6, &pods, "nat", "KUBE-POD-MASQ", &[
            "-s fd00:1::/64 -d fd00:1::/64 -j RETURN",
            "-s fd00:1::/64 -d ff00::/8 -j RETURN",
            "-s fd00:1::/64 -j MASQUERADE --random-fully",
        ]);
    }

    #[test]
    fn conflicts() {
        for (a, b, expected) in [
            (port(80, None), port(80, None), true),
            (port(80, None), port(81, None), false),
            (port(80, Some("192.0.2.1")), port(80, Some("192.0.2.2")), false),
            (port(80, Some("192.0.2.1")), port(80, Some("0.0.0.0")), true),
            (port(80, Some("192.0.2.1")), HostPort { protocol: Protocol::Udp, ..port(80, None) }, false),
        ] {
            assert_eq!(a.conflicts(&b), expected, "{a:?} {b:?}");
        }
    }
}
