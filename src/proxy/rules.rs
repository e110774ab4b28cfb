//! The rules of all services, as pure functions: chains and texts as upstream's `pkg/proxy/iptables/proxier.go` makes them.
//!
//! [`service`] makes what one service port needs, [`assemble`] puts the parts of all of them together. What has not
//! changed is not made again: the caller keeps the parts.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::IpAddr;

use sha2::{Digest, Sha256};
use windlass_net::Family;
use windlass_net::iptables::{Chains, Jump, Position};

use crate::endpoints::categorize;
use crate::model::{Endpoint, ServicePort};

/// From this many endpoints on, endpoint chains have no comments.
pub const LARGE_CLUSTER_ENDPOINTS: usize = 1000;

/// How local pods' traffic is told from other traffic; empty: it is not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalDetector {
    pub if_local: String,
    pub if_not_local: String,
}

impl LocalDetector {
    /// By a match as `-s 10.244.0.0/16`.
    pub fn new(matches: &str) -> LocalDetector {
        LocalDetector { if_local: matches.to_owned(), if_not_local: format!("! {matches}") }
    }

    fn is_implemented(&self) -> bool {
        !self.if_local.is_empty()
    }
}

/// Which addresses node ports are open on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// All of the node's.
    All,
    /// These.
    Only(Vec<IpAddr>),
}

/// What the rules depend on besides services.
#[derive(Clone, Debug)]
pub struct Settings {
    pub family: Family,
    /// [`windlass_net::iptables::chain_prefix`] of the instance: `KUBE-` for the only one.
    pub prefix: String,
    pub node: String,
    pub node_ip: Option<IpAddr>,
    pub zone: Option<String>,
    pub masquerade_all: bool,
    /// As `0x4000`.
    pub masquerade_mark: String,
    pub detector: LocalDetector,
    pub node_port_addresses: NodePortAddresses,
    /// Whether 127.0.0.1 leads to node ports (IPv4 only).
    pub localhost_node_ports: bool,
    /// The kernel accepts what conntrack calls invalid (`nf_conntrack_tcp_be_liberal`).
    pub liberal: bool,
    pub large: bool,
}

/// What one service port contributes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    nat_services: Vec<String>,
    nat_node_ports: Vec<String>,
    filter_services: Vec<String>,
    filter_external: Vec<String>,
    filter_firewall: Vec<String>,
    filter_node_ports: Vec<String>,
    chains: BTreeMap<String, Vec<String>>,
    /// Traffic policy `Local` without an endpoint here: internal, external.
    pub no_local_endpoints: (bool, bool),
}

fn base32(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
    let (mut text, mut buffer, mut bits) = (String::new(), 0u32, 0u32);
    for byte in bytes {
        buffer = (buffer << 8 | u32::from(*byte)) & 0xffff;
        bits += 8;
        while bits >= 5 {
            bits -= 5;
            text.push(char::from(ALPHABET[(buffer >> bits) as usize & 31]));
        }
    }
    text
}

/// Upstream's hash in chain names: the first 16 characters of the SHA-256 in base 32.
fn hash(parts: &[&str]) -> String {
    let mut digest = Sha256::new();
    for part in parts {
        digest.update(part.as_bytes());
    }
    // 16 characters are 80 bits.
    base32(&digest.finalize()[..10])
}

struct Names {
    cluster: String,
    local: String,
    firewall: String,
    external: String,
}

impl Names {
    fn of(prefix: &str, port: &str, protocol: &str) -> Names {
        let hash = hash(&[port, protocol]);
        let name = |kind: &str| format!("{prefix}{kind}-{hash}");
        Names { cluster: name("SVC"), local: name("SVL"), firewall: name("FW"), external: name("EXT") }
    }
}

fn endpoint_chain(settings: &Settings, port: &str, protocol: &str, endpoint: &Endpoint) -> String {
    format!("{}SEP-{}", settings.prefix, hash(&[port, protocol, &endpoint.address.to_string()]))
}

/// Whether a chain is one of those that come and go with services.
pub fn is_service_chain(prefix: &str, chain: &str) -> bool {
    chain.strip_prefix(prefix).is_some_and(|rest| ["SVC-", "SVL-", "FW-", "EXT-", "SEP-"].iter().any(|k| rest.starts_with(k)))
}

/// Whether a chain is the proxy's.
pub fn is_ours(prefix: &str, chain: &str) -> bool {
    const FIXED: [&str; 9] = ["SERVICES", "EXTERNAL-SERVICES", "NODEPORTS", "POSTROUTING", "MARK-MASQ", "FORWARD", "PROXY-FIREWALL", "FIREWALL", "PROXY-CANARY"];
    is_service_chain(prefix, chain) || chain.strip_prefix(prefix).is_some_and(|rest| FIXED.contains(&rest))
}

/// The part of one service port.
pub fn service(settings: &Settings, port: &ServicePort) -> Part {
    Writer::new(settings, port).write()
}

struct Writer<'a> {
    settings: &'a Settings,
    port: &'a ServicePort,
    name: String,
    protocol: &'static str,
    names: Names,
    part: Part,
}

impl<'a> Writer<'a> {
    fn new(settings: &'a Settings, port: &'a ServicePort) -> Writer<'a> {
        let name = port.name();
        let protocol = port.protocol.lower();
        let names = Names::of(&settings.prefix, &name, protocol);
        Writer { settings, port, name, protocol, names, part: Part::default() }
    }

    fn chain(&mut self, name: &str) -> &mut Vec<String> {
        self.part.chains.entry(name.to_owned()).or_default()
    }

    fn to(&self, destination: IpAddr, port: u16) -> String {
        let protocol = self.protocol;
        format!("-m {protocol} -p {protocol} -d {destination} --dport {port}")
    }

    fn write(mut self) -> Part {
        let (settings, port) = (self.settings, self.port);
        let usable = categorize(port, &settings.node, settings.zone.as_deref());
        let internal_endpoints = usable.any && !(port.internal_local && usable.local.is_empty());
        let external_endpoints = usable.any && !(port.external_local && usable.local.is_empty());
        self.part.no_local_endpoints = (usable.any && !internal_endpoints, usable.any && !external_endpoints);
        let uses_external = usable.any && port.externally_accessible();
        let uses_firewall = usable.any && !port.load_balancer_ips.is_empty() && !port.source_ranges.is_empty();

        self.cluster_ip(usable.any, internal_endpoints);
        self.external_addresses(usable.any, external_endpoints, uses_firewall);
        self.node_ports(usable.any, external_endpoints);

        if internal_endpoints {
            self.masquerade_internal();
        }
        if uses_external {
            self.external_chain(external_endpoints);
        }
        if uses_firewall {
            self.firewall_chain();
        }
        if !usable.cluster.is_empty() && port.uses_cluster_endpoints() {
            self.balance(&self.names.cluster.clone(), &usable.cluster);
        }
        if !usable.local.is_empty() && port.uses_local_endpoints() {
            self.balance(&self.names.local.clone(), &usable.local);
        }
        for endpoint in &usable.reachable {
            self.endpoint(endpoint);
        }
        self.part
    }

    /// The target of packets that are not let through, and why.
    fn refusal(&self, any: bool) -> (&'static str, String) {
        if any {
            ("DROP", format!("\"{} has no local endpoints\"", self.name))
        } else {
            ("REJECT", format!("\"{} has no endpoints\"", self.name))
        }
    }

    fn cluster_ip(&mut self, any: bool, endpoints: bool) {
        let to = self.to(self.port.cluster_ip, self.port.port);
        if endpoints {
            let chain = if self.port.internal_local { &self.names.local } else { &self.names.cluster };
            let rule = format!("-m comment --comment \"{} cluster IP\" {to} -j {chain}", self.name);
            self.part.nat_services.push(rule);
        } else {
            let (target, comment) = self.refusal(any);
            self.part.filter_services.push(format!("-m comment --comment {comment} {to} -j {target}"));
        }
    }

    fn external_addresses(&mut self, any: bool, endpoints: bool, firewall: bool) {
        let port = self.port;
        let (target, comment) = self.refusal(any);
        for ip in &port.external_ips {
            let to = self.to(*ip, port.port);
            if any {
                let rule = format!("-m comment --comment \"{} external IP\" {to} -j {}", self.name, self.names.external);
                self.part.nat_services.push(rule);
            }
            if !endpoints {
                self.part.filter_external.push(format!("-m comment --comment {comment} {to} -j {target}"));
            }
        }
        for ip in &port.load_balancer_ips {
            let to = self.to(*ip, port.port);
            if any {
                let chain = if firewall { &self.names.firewall } else { &self.names.external };
                let rule = format!("-m comment --comment \"{} loadbalancer IP\" {to} -j {chain}", self.name);
                self.part.nat_services.push(rule);
            }
            if firewall {
                let rule = format!("-m comment --comment \"{} traffic not accepted by {}\" {to} -j DROP", self.name, self.names.firewall);
                self.part.filter_firewall.push(rule);
            }
            if !endpoints {
                self.part.filter_external.push(format!("-m comment --comment {comment} {to} -j {target}"));
            }
        }
    }

    fn node_ports(&mut self, any: bool, endpoints: bool) {
        let (protocol, port) = (self.protocol, self.port);
        if port.node_port != 0 {
            if any {
                let rule = format!(
                    "-m comment --comment {} -m {protocol} -p {protocol} --dport {} -j {}",
                    self.name, port.node_port, self.names.external
                );
                self.part.nat_node_ports.push(rule);
            }
            if !endpoints {
                let (target, comment) = self.refusal(any);
                self.part.filter_external.push(format!(
                    "-m comment --comment {comment} -m addrtype --dst-type LOCAL -m {protocol} -p {protocol} --dport {} -j {target}",
                    port.node_port
                ));
            }
        }
        if port.health_check_node_port != 0 {
            self.part.filter_node_ports.push(format!(
                "-m comment --comment \"{} health check node port\" -m tcp -p tcp --dport {} -j ACCEPT",
                self.name, port.health_check_node_port
            ));
        }
    }

    fn masquerade_internal(&mut self) {
        let settings = self.settings;
        let from = if settings.masquerade_all {
            String::new()
        } else if settings.detector.is_implemented() {
            // Who routes the service range to some node from outside comes in by that node, and must go back by it.
            format!(" {}", settings.detector.if_not_local)
        } else {
            return;
        };
        let to = self.to(self.port.cluster_ip, self.port.port);
        let rule = format!("-m comment --comment \"{} cluster IP\" {to}{from} -j {}MARK-MASQ", self.name, settings.prefix);
        let chain = if self.port.internal_local { self.names.local.clone() } else { self.names.cluster.clone() };
        self.chain(&chain).push(rule);
    }

    fn external_chain(&mut self, endpoints: bool) {
        let (name, prefix, detector) = (self.name.clone(), &self.settings.prefix, &self.settings.detector);
        let cluster = self.names.cluster.clone();
        let mut rules = Vec::new();
        if self.port.external_local {
            if detector.is_implemented() {
                // A pod that uses an external address gets what it would by the cluster IP.
                rules.push(format!("-m comment --comment \"pod traffic for {name} external destinations\" {} -j {cluster}", detector.if_local));
            }
            rules.push(format!(
                "-m comment --comment \"masquerade LOCAL traffic for {name} external destinations\" -m addrtype --src-type LOCAL -j {prefix}MARK-MASQ"
            ));
            rules.push(format!("-m comment --comment \"route LOCAL traffic for {name} external destinations\" -m addrtype --src-type LOCAL -j {cluster}"));
        } else {
            rules.push(format!("-m comment --comment \"masquerade traffic for {name} external destinations\" -j {prefix}MARK-MASQ"));
        }
        if endpoints {
            let policy = if self.port.external_local { &self.names.local } else { &cluster };
            rules.push(format!("-j {policy}"));
        }
        let chain = self.names.external.clone();
        *self.chain(&chain) = rules;
    }

    fn firewall_chain(&mut self) {
        let (name, external) = (&self.name, &self.names.external);
        let mut rules: Vec<String> = Vec::new();
        for range in &self.port.source_ranges {
            rules.push(format!("-m comment --comment \"{name} loadbalancer IP\" -s {range} -j {external}"));
        }
        if self.settings.node_ip.is_some_and(|ip| self.port.source_ranges.iter().any(|r| r.contains(ip))) {
            // The node's own connections to the address may have that address as their source.
            for ip in &self.port.load_balancer_ips {
                rules.push(format!("-m comment --comment \"{name} loadbalancer IP\" -s {ip} -j {external}"));
            }
        }
        rules.push(format!("-m comment --comment \"other traffic to {name} will be dropped by {}PROXY-FIREWALL\"", self.settings.prefix));
        let chain = self.names.firewall.clone();
        *self.chain(&chain) = rules;
    }

    fn balance(&mut self, chain: &str, endpoints: &[&Endpoint]) {
        let mut rules = Vec::new();
        let comment = |endpoint: &Endpoint| {
            if self.settings.large { String::new() } else { format!("-m comment --comment \"{} -> {}\" ", self.name, endpoint.address) }
        };
        let chain_of = |endpoint: &Endpoint| endpoint_chain(self.settings, &self.name, self.protocol, endpoint);
        if let Some(seconds) = self.port.sticky_seconds {
            for endpoint in endpoints {
                let target = chain_of(endpoint);
                rules.push(format!("{}-m recent --name {target} --rcheck --seconds {seconds} --reap -j {target}", comment(endpoint)));
            }
        }
        for (n, endpoint) in endpoints.iter().enumerate() {
            let mut rule = comment(endpoint);
            let left = endpoints.len() - n;
            if left > 1 {
                let _ = write!(rule, "-m statistic --mode random --probability {:.10} ", 1.0 / left as f64);
            }
            let _ = write!(rule, "-j {}", chain_of(endpoint));
            rules.push(rule);
        }
        self.chain(chain).extend(rules);
    }

    fn endpoint(&mut self, endpoint: &Endpoint) {
        let chain = endpoint_chain(self.settings, &self.name, self.protocol, endpoint);
        let comment = if self.settings.large { String::new() } else { format!("-m comment --comment {} ", self.name) };
        let protocol = self.protocol;
        let sticky = if self.port.sticky_seconds.is_some() { format!("-m recent --name {chain} --set ") } else { String::new() };
        let rules = vec![
            format!("{comment}-s {} -j {}MARK-MASQ", endpoint.address.ip(), self.settings.prefix),
            format!("{comment}{sticky}-m {protocol} -p {protocol} -j DNAT --to-destination {}", endpoint.address),
        ];
        *self.chain(&chain) = rules;
    }
}

/// All chains, from the parts of all service ports in their order.
pub fn assemble<'a>(settings: &Settings, parts: impl IntoIterator<Item = &'a Part>) -> Chains {
    let prefix = &settings.prefix;
    let mark = &settings.masquerade_mark;
    let mut chains = Chains::default();
    for (table, name) in [
        ("filter", "SERVICES"),
        ("filter", "EXTERNAL-SERVICES"),
        ("filter", "FORWARD"),
        ("filter", "NODEPORTS"),
        ("filter", "PROXY-FIREWALL"),
        ("filter", "FIREWALL"),
        ("filter", "PROXY-CANARY"),
        ("nat", "SERVICES"),
        ("nat", "NODEPORTS"),
        ("nat", "PROXY-CANARY"),
    ] {
        chains.chain(table, format!("{prefix}{name}"));
    }
    let postrouting = chains.chain("nat", format!("{prefix}POSTROUTING"));
    postrouting.push(format!("-m mark ! --mark {mark}/{mark} -j RETURN"));
    // The mark goes: a packet that comes by again (a tunnel) must not be masqueraded twice.
    postrouting.push(format!("-j MARK --xor-mark {mark}"));
    postrouting.push("-m comment --comment \"kubernetes service traffic requiring SNAT\" -j MASQUERADE --random-fully".to_owned());
    chains.chain("nat", format!("{prefix}MARK-MASQ")).push(format!("-j MARK --or-mark {mark}"));
    if settings.family == Family::V4 && settings.localhost_node_ports {
        // route_localnet opens the node's loopback to its neighbours: this closes it again.
        chains.chain("filter", format!("{prefix}FIREWALL")).push(
            "-m comment --comment \"block incoming localnet connections\" -d 127.0.0.0/8 ! -s 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP".to_owned(),
        );
    }
    for part in parts {
        chains.chain("nat", format!("{prefix}SERVICES")).extend_from_slice(&part.nat_services);
        chains.chain("nat", format!("{prefix}NODEPORTS")).extend_from_slice(&part.nat_node_ports);
        chains.chain("filter", format!("{prefix}SERVICES")).extend_from_slice(&part.filter_services);
        chains.chain("filter", format!("{prefix}EXTERNAL-SERVICES")).extend_from_slice(&part.filter_external);
        chains.chain("filter", format!("{prefix}PROXY-FIREWALL")).extend_from_slice(&part.filter_firewall);
        chains.chain("filter", format!("{prefix}NODEPORTS")).extend_from_slice(&part.filter_node_ports);
        for (name, rules) in &part.chains {
            *chains.chain("nat", name.clone()) = rules.clone();
        }
    }
    let node_ports = node_port_jumps(settings);
    chains.chain("nat", format!("{prefix}SERVICES")).extend(node_ports);
    let forward = chains.chain("filter", format!("{prefix}FORWARD"));
    if !settings.liberal {
        forward.push("-m conntrack --ctstate INVALID -j DROP".to_owned());
    }
    forward.push(format!("-m comment --comment \"kubernetes forwarding rules\" -m mark --mark {mark}/{mark} -j ACCEPT"));
    forward.push("-m comment --comment \"kubernetes forwarding conntrack rule\" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT".to_owned());
    chains
}

fn node_port_jumps(settings: &Settings) -> Vec<String> {
    let comment = "-m comment --comment \"kubernetes service nodeports; NOTE: this must be the last rule in this chain\"";
    let target = format!("{}NODEPORTS", settings.prefix);
    match &settings.node_port_addresses {
        NodePortAddresses::All => {
            let except = match settings.family {
                Family::V6 => " ! -d ::1/128",
                Family::V4 if !settings.localhost_node_ports => " ! -d 127.0.0.0/8",
                Family::V4 => "",
            };
            vec![format!("{comment} -m addrtype --dst-type LOCAL{except} -j {target}")]
        }
        NodePortAddresses::Only(addresses) => addresses
            .iter()
            .filter(|a| Family::of(**a) == settings.family)
            .filter(|a| !a.is_loopback() || (settings.family == Family::V4 && settings.localhost_node_ports))
            .map(|a| format!("{comment} -d {a} -j {target}"))
            .collect(),
    }
}

/// How the built-in chains get to ours, in the order in which they are put in front.
pub fn jumps(prefix: &str) -> Vec<Jump> {
    const NEW: [&str; 4] = ["-m", "conntrack", "--ctstate", "NEW"];
    let row = |table, target: &str, chain, comment: &str, new: bool| {
        let mut words: Vec<&str> = if new { NEW.to_vec() } else { Vec::new() };
        if !comment.is_empty() {
            words.extend(["-m", "comment", "--comment", comment]);
        }
        Jump::new(table, chain, Position::First, &words, format!("{prefix}{target}"))
    };
    vec![
        row("filter", "EXTERNAL-SERVICES", "INPUT", "kubernetes externally-visible service portals", true),
        row("filter", "EXTERNAL-SERVICES", "FORWARD", "kubernetes externally-visible service portals", true),
        row("filter", "NODEPORTS", "INPUT", "kubernetes health check service ports", false),
        row("filter", "SERVICES", "FORWARD", "kubernetes service portals", true),
        row("filter", "SERVICES", "OUTPUT", "kubernetes service portals", true),
        row("filter", "FORWARD", "FORWARD", "kubernetes forwarding rules", false),
        row("filter", "PROXY-FIREWALL", "INPUT", "kubernetes load balancer firewall", true),
        row("filter", "PROXY-FIREWALL", "OUTPUT", "kubernetes load balancer firewall", true),
        row("filter", "PROXY-FIREWALL", "FORWARD", "kubernetes load balancer firewall", true),
        row("nat", "SERVICES", "OUTPUT", "kubernetes service portals", false),
        row("nat", "SERVICES", "PREROUTING", "kubernetes service portals", false),
        row("nat", "POSTROUTING", "POSTROUTING", "kubernetes postrouting rules", false),
        row("filter", "FIREWALL", "INPUT", "", false),
        row("filter", "FIREWALL", "OUTPUT", "", false),
    ]
}

#[cfg(test)]
#[path = "rules_tests.rs"]
mod tests;
