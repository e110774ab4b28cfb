//! A node's pods on its bridge.
//!
//! [`PodNetwork::attach`] brings a pod's namespace into the pod network and is idempotent: a pod that is wired already
//! (the kubelet was restarted) is left as it is, connections and all. What exists is derived from the machine: links
//! carry the pod in their alias, addresses are in files, rules are compared with what is applied.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use crate::cidr::{Cidr, Family};
use crate::error::{Error, Result};
use crate::hostport::{self, HostPort};
use crate::ipam::{Ipam, Record};
use crate::conntrack;
use crate::iptables::{Chains, Iptables, Jump, chain_prefix, parse_save};
use crate::link::{Link, Mac, Netlink, Route, Veth};
use crate::{metrics, sysctl};

/// The pod's interface.
pub const POD_LINK: &str = "eth0";
/// The protocol number of our routes inside pods and to peers (`ip route show proto 87`).
pub const ROUTE_PROTOCOL: u8 = 87;
const CNI_DIR: &str = "/etc/cni/net.d";

/// How a node's pod network is made.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// Which Windlass of this machine: names the bridge and the chains; empty for the only one.
    pub instance: String,
    /// The node's pod CIDRs, at most one per family; may be empty until the node has one.
    pub pod_cidrs: Vec<Cidr>,
    /// The CIDRs of all pods of the cluster: traffic of pods to elsewhere gets the node's address. Empty: the node's own.
    pub cluster_cidrs: Vec<Cidr>,
    /// MTU of the pods' links, in bytes; `None`: that of the link with the default route, or 1500.
    pub mtu: Option<u32>,
    /// Where address records are kept.
    pub state_dir: PathBuf,
}

/// A pod to wire.
#[derive(Clone, Debug)]
pub struct Attach {
    pub pod_uid: String,
    pub namespace: String,
    pub name: String,
    /// The sandbox's network namespace, such as `/proc/<pid>/ns/net`.
    pub netns: PathBuf,
    pub host_ports: Vec<HostPort>,
}

/// Where a pod can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// One per family, in the order of the node's pod CIDRs: the first is `status.podIP`.
    pub ips: Vec<IpAddr>,
    /// The bridge's address of the first one's family.
    pub gateway: IpAddr,
}

/// The pod network of one node.
#[derive(Debug)]
pub struct PodNetwork {
    config: Config,
    netlink: Netlink,
    ipam: Mutex<Ipam>,
    rules: tokio::sync::Mutex<BTreeMap<Family, Applied>>,
    mtu: u32,
}

#[derive(Debug, Default)]
struct Applied {
    chains: Option<Chains>,
}

/// The bridge of an instance: `wl0`, or `wl-<instance>` cut to the kernel's 15 bytes.
pub fn bridge_name(instance: &str) -> String {
    match instance {
        "" => "wl0".to_owned(),
        i if i.len() <= 12 && i.is_ascii() => format!("wl-{i}"),
        i => format!("wl-{}", &hex(i)[..12]),
    }
}

/// The host's end of a pod's veth pair: the same for the same pod, whoever asks.
pub fn veth_name(instance: &str, pod_uid: &str) -> String {
    format!("wlv{}", &hex(&format!("{instance}/{pod_uid}"))[..12])
}

fn hex(text: &str) -> String {
    use std::fmt::Write as _;
    Sha256::digest(text.as_bytes()).iter().fold(String::with_capacity(64), |mut s, b| {
        let _ = write!(s, "{b:02x}");
        s
    })
}

/// A MAC that follows from the address: when an address comes again, the neighbours' entries for it still hold.
pub fn mac_of(ip: IpAddr) -> Mac {
    match ip {
        IpAddr::V4(a) => {
            let o = a.octets();
            [0x0a, 0x58, o[0], o[1], o[2], o[3]]
        }
        IpAddr::V6(a) => {
            let d = Sha256::digest(a.octets());
            [0x0a, 0x58, d[0], d[1], d[2], d[3]]
        }
    }
}

impl PodNetwork {
    /// Sets up the bridge, the kernel's settings and the rules, and reads which pods have addresses. Runs in the network
    /// namespace of the calling thread.
    pub async fn new(config: Config) -> Result<PodNetwork> {
        warn_about_cni(Path::new(CNI_DIR));
        let netlink = Netlink::open()?;
        let mtu = match config.mtu {
            Some(mtu) => mtu,
            None => netlink.default_route_link().await?.map_or(1500, |l| l.mtu),
        };
        let ipam = Mutex::new(Ipam::open(&config.state_dir.join("pods"))?);
        let cidrs = config.pod_cidrs.clone();
        let network = PodNetwork { config, netlink, ipam, rules: tokio::sync::Mutex::default(), mtu };
        network.set_pod_cidrs(&cidrs).await?;
        Ok(network)
    }

    /// Changes the node's CIDRs: pods that have addresses keep them, the bridge gets the new gateway addresses.
    pub async fn set_pod_cidrs(&self, cidrs: &[Cidr]) -> Result<()> {
        // Pods that have addresses of an older CIDR keep their gateway.
        let cidrs = {
            let mut ipam = self.ipam.lock();
            ipam.set_cidrs(cidrs);
            ipam.cidrs_in_use()
        };
        let name = bridge_name(&self.config.instance);
        let gateways: Vec<(IpAddr, u8)> =
            cidrs.iter().filter_map(|c| Ipam::gateway(c).map(|g| (g, c.prefix_len()))).collect();
        let Some((first, _)) = gateways.first() else { return Ok(()) };
        let bridge = self.netlink.ensure_bridge(&name, mac_of(*first), self.mtu).await?;
        for (ip, len) in &gateways {
            self.netlink.ensure_address(bridge.index, *ip, *len).await?;
        }
        for old in self.netlink.addresses(Some(bridge.index)).await? {
            let link_local = matches!(old.ip, IpAddr::V6(a) if a.is_unicast_link_local());
            if !link_local && !gateways.contains(&(old.ip, old.prefix_len)) {
                self.netlink.delete_address(&old).await?;
            }
        }
        self.settings(&name, &cidrs)?;
        self.apply_rules(true).await
    }

    fn settings(&self, bridge: &str, cidrs: &[Cidr]) -> Result<()> {
        if cidrs.iter().any(|c| c.family() == Family::V4) {
            sysctl::set("net/ipv4/ip_forward", "1")?;
            // From the node's loopback to host ports and node ports; POD-FIREWALL keeps pods off our loopback.
            sysctl::set(&format!("net/ipv4/conf/{bridge}/route_localnet"), "1")?;
        }
        if cidrs.iter().any(|c| c.family() == Family::V6) {
            sysctl::set("net/ipv6/conf/all/forwarding", "1")?;
        }
        // Answers between two pods of this bridge must pass by conntrack, or a service's address never turns back.
        for name in ["net/bridge/bridge-nf-call-iptables", "net/bridge/bridge-nf-call-ip6tables"] {
            if sysctl::get(name).is_none() {
                load_br_netfilter();
            }
            match sysctl::get(name) {
                Some(_) => sysctl::set(name, "1")?,
                None => tracing::warn!(setting = name, "this kernel has no br_netfilter: a pod cannot reach a service whose endpoint is on the same node"),
            }
        }
        Ok(())
    }

    /// Wires a pod: allocates its addresses, connects its namespace, opens its host ports. Idempotent.
    ///
    /// # Errors
    /// No pod CIDR yet, no free address, a host port in use, or what the kernel refused. What was done until then stays
    /// recorded: a later attach goes on from there, [`PodNetwork::detach`] or a reconcile cleans up.
    pub async fn attach(&self, pod: &Attach) -> Result<Addresses> {
        let timer = metrics::attach_timer();
        let record = self.record_for(pod).await?;
        let gateways = record.gateways();
        if !self.is_wired(pod, &record).await? {
            self.wire(pod, &record, &gateways).await?;
        }
        if !record.host_ports.is_empty() {
            self.apply_rules(false).await?;
        }
        timer.observe_duration();
        self.count();
        let gateway = gateways.first().copied().ok_or(Error::NoPodCidr)?;
        Ok(Addresses { ips: record.ips, gateway })
    }

    async fn record_for(&self, pod: &Attach) -> Result<Record> {
        let known = self.ipam.lock().get(&pod.pod_uid).cloned();
        if let Some(known) = known {
            let current = known.cidrs.iter().all(|c| self.ipam.lock().cidrs().contains(c));
            if current || self.is_wired(pod, &known).await? {
                if known.host_ports == pod.host_ports {
                    return Ok(known);
                }
                return self.ipam.lock().adopt(Record { host_ports: pod.host_ports.clone(), ..known });
            }
            // The node's CIDR changed; a sandbox made anew gets an address of the new one.
            self.detach(&pod.pod_uid).await?;
        }
        let held = self.addresses_held(pod).await?;
        let mut ipam = self.ipam.lock();
        if !held.is_empty() && held.iter().all(|(ip, _)| !ipam.is_used(*ip)) {
            let (ips, cidrs) = held.into_iter().unzip();
            return ipam.adopt(Record {
                pod_uid: pod.pod_uid.clone(),
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                ips,
                cidrs,
                host_ports: pod.host_ports.clone(),
            });
        }
        ipam.allocate(&pod.pod_uid, &pod.namespace, &pod.name, &pod.host_ports)
    }

    /// The addresses of ours that the pod's namespace already has, if its link is one that we made for it.
    async fn addresses_held(&self, pod: &Attach) -> Result<Vec<(IpAddr, Cidr)>> {
        let Some(host) = self.netlink.link(&veth_name(&self.config.instance, &pod.pod_uid)).await? else { return Ok(Vec::new()) };
        let inside = Netlink::open_in(&pod.netns).await?;
        let Some(link) = inside.link(POD_LINK).await?.filter(|l| l.peer == host.index) else { return Ok(Vec::new()) };
        let held = inside.addresses(Some(link.index)).await?;
        Ok(held.into_iter().filter_map(|a| Some((a.ip, self.cidr_of(a.ip)?))).collect())
    }

    fn cidr_of(&self, ip: IpAddr) -> Option<Cidr> {
        self.ipam.lock().cidrs().iter().find(|c| c.contains(ip)).copied()
    }

    async fn is_wired(&self, pod: &Attach, record: &Record) -> Result<bool> {
        let Some(bridge) = self.netlink.link(&bridge_name(&self.config.instance)).await? else { return Ok(false) };
        let Some(host) = self.netlink.link(&veth_name(&self.config.instance, &pod.pod_uid)).await? else { return Ok(false) };
        let inside = Netlink::open_in(&pod.netns).await?;
        let Some(link) = inside.link(POD_LINK).await? else { return Ok(false) };
        let addresses: HashSet<IpAddr> = inside.addresses(Some(link.index)).await?.into_iter().map(|a| a.ip).collect();
        let Some(first) = record.ips.first() else { return Ok(false) };
        let routed = inside.routes(Family::of(*first), Some(ROUTE_PROTOCOL)).await?;
        Ok(link.peer == host.index
            && host.peer == link.index
            && host.controller == bridge.index
            && host.up
            && link.up
            && record.ips.iter().all(|ip| addresses.contains(ip))
            && routed.iter().any(|r| r.destination.prefix_len() == 0))
    }

    async fn wire(&self, pod: &Attach, record: &Record, gateways: &[IpAddr]) -> Result<()> {
        let bridge = self.netlink.need(&bridge_name(&self.config.instance)).await?;
        let name = veth_name(&self.config.instance, &pod.pod_uid);
        // What is there belongs to a sandbox that is gone, or to an attach that was cut short.
        self.netlink.delete_link(&name).await?;
        let alias = format!("windlass pod {}/{} {}", pod.namespace, pod.name, pod.pod_uid);
        self.netlink
            .make_veth(&Veth {
                name: &name,
                bridge: bridge.index,
                alias: alias.get(..255).unwrap_or(&alias),
                peer: POD_LINK,
                peer_mac: mac_of(*record.ips.first().ok_or(Error::NoPodCidr)?),
                peer_ns: &pod.netns,
                mtu: self.mtu,
            })
            .await?;
        let inside = Netlink::open_in(&pod.netns).await?;
        let loopback = inside.need("lo").await?;
        inside.set_up(loopback.index).await?;
        let link = inside.need(POD_LINK).await?;
        inside.set_up(link.index).await?;
        for ((ip, cidr), gateway) in record.ips.iter().zip(&record.cidrs).zip(gateways) {
            inside.ensure_address(link.index, *ip, cidr.prefix_len()).await?;
            let any = Cidr::new(*ip, 0).ok_or(Error::ForeignAddress { address: *ip })?;
            let route = Route { destination: any, gateway: Some(*gateway), link: link.index, on_link: false };
            inside.ensure_route(&route, ROUTE_PROTOCOL).await?;
        }
        Ok(())
    }

    /// Takes a pod off the network: its link, its host ports, its addresses, in this order. A pod that is not there is fine.
    pub async fn detach(&self, pod_uid: &str) -> Result<()> {
        self.netlink.delete_link(&veth_name(&self.config.instance, pod_uid)).await?;
        let record = self.ipam.lock().get(pod_uid).cloned();
        if let Some(record) = record.filter(|r| !r.host_ports.is_empty()) {
            self.apply_rules_without(Some(pod_uid)).await?;
            self.forget_flows(&record).await;
        }
        self.ipam.lock().release(pod_uid)?;
        self.count();
        Ok(())
    }

    /// A UDP sender that never pauses would go on to the address of the pod that is gone.
    async fn forget_flows(&self, record: &Record) {
        for port in record.host_ports.iter().filter(|p| p.protocol != hostport::Protocol::Tcp) {
            for ip in &record.ips {
                let (number, ip_text) = (port.host_port.to_string(), ip.to_string());
                let filter = ["--dport", &number, "--reply-src", &ip_text];
                if let Err(error) = conntrack::delete_matching(Family::of(*ip), port.protocol.lower(), &filter).await {
                    tracing::warn!(%error, pod = %format!("{}/{}", record.namespace, record.name), "stale flows to a host port stay until they time out");
                }
            }
        }
    }

    /// Frees everything that belongs to pods that are not in `live`: after a restart, what was left by a kill.
    pub async fn reconcile(&self, live: &HashSet<String>) -> Result<()> {
        let dead: Vec<String> = self.ipam.lock().records().map(|r| r.pod_uid.clone()).filter(|uid| !live.contains(uid)).collect();
        for uid in dead {
            tracing::info!(pod_uid = %uid, "freeing the network of a pod that is gone");
            self.detach(&uid).await?;
        }
        let Some(bridge) = self.netlink.link(&bridge_name(&self.config.instance)).await? else { return Ok(()) };
        let known: BTreeSet<String> = live.iter().map(|uid| veth_name(&self.config.instance, uid)).collect();
        for link in self.netlink.links().await? {
            if is_pod_link(&link, bridge.index) && !known.contains(&link.name) {
                tracing::info!(link = %link.name, alias = %link.alias, "removing a link without a pod");
                self.netlink.delete_link(&link.name).await?;
            }
        }
        Ok(())
    }

    /// The addresses of a pod that is attached.
    pub fn addresses_of(&self, pod_uid: &str) -> Option<Addresses> {
        let record = self.ipam.lock().get(pod_uid).cloned()?;
        let gateway = *record.gateways().first()?;
        Some(Addresses { ips: record.ips, gateway })
    }

    /// Looks every `period` whether somebody flushed our rules (another firewall's reload), and puts them back. Never returns.
    pub async fn guard(&self, period: Duration) {
        loop {
            tokio::time::sleep(period).await;
            match self.restore_rules().await {
                Ok(false) => {}
                Ok(true) => tracing::warn!("the pods' rules were flushed by somebody and are back"),
                Err(error) => tracing::warn!(%error, "cannot look after the pods' rules"),
            }
        }
    }

    /// Writes the rules again if they are gone; `true` if they were.
    pub async fn restore_rules(&self) -> Result<bool> {
        let prefix = chain_prefix(&self.config.instance);
        let families: Vec<Family> = self.rules.lock().await.keys().copied().collect();
        for family in families {
            let iptables = Iptables::new(family);
            for (table, chain) in [("nat", "HOSTPORTS"), ("filter", "POD-FORWARD")] {
                if !iptables.chain_exists(table, &format!("{prefix}{chain}")).await? {
                    return self.apply_rules(true).await.map(|()| true);
                }
            }
        }
        Ok(false)
    }

    async fn apply_rules(&self, all: bool) -> Result<()> {
        if all {
            self.rules.lock().await.clear();
        }
        self.apply_rules_without(None).await
    }

    async fn apply_rules_without(&self, leaving: Option<&str>) -> Result<()> {
        let prefix = chain_prefix(&self.config.instance);
        let bridge = bridge_name(&self.config.instance);
        // Held over the whole change, so that the last one applied is the last one computed.
        let mut applied = self.rules.lock().await;
        let (cidrs, pods) = {
            let ipam = self.ipam.lock();
            let pods: Vec<(String, IpAddr, Vec<HostPort>)> = ipam
                .records()
                .filter(|r| !r.host_ports.is_empty() && Some(r.pod_uid.as_str()) != leaving)
                .flat_map(|r| r.ips.iter().map(|ip| (format!("{}/{}", r.namespace, r.name), *ip, r.host_ports.clone())))
                .collect();
            (ipam.cidrs_in_use(), pods)
        };
        let families: BTreeSet<Family> = cidrs.iter().map(Cidr::family).collect();
        for family in families {
            let input = hostport::Input { family, prefix: &prefix, bridge: &bridge, pod_cidrs: &cidrs, cluster_cidrs: &self.config.cluster_cidrs, pods: &pods };
            let wanted = hostport::chains(&input);
            let iptables = Iptables::new(family);
            let before = applied.entry(family).or_default();
            let jumps = hostport::jumps(&prefix);
            let missing = if before.chains.is_none() { missing_jumps(&iptables, &jumps).await? } else { Vec::new() };
            if let Some(document) = wanted.transaction(before.chains.as_ref(), &missing) {
                before.chains = None;
                iptables.restore(&document).await?;
            }
            before.chains = Some(wanted);
        }
        Ok(())
    }

    fn count(&self) {
        let ipam = self.ipam.lock();
        metrics::pods(&self.config.instance, ipam.records().count());
    }
}

async fn missing_jumps<'a>(iptables: &Iptables, jumps: &'a [Jump]) -> Result<Vec<&'a Jump>> {
    let mut missing = Vec::new();
    for table in ["nat", "filter"] {
        let saved = parse_save(&iptables.save(table).await?);
        missing.extend(jumps.iter().filter(|j| j.table == table && !j.is_in(&saved)));
    }
    Ok(missing)
}

fn is_pod_link(link: &Link, bridge: u32) -> bool {
    link.controller == bridge && link.kind == "veth" && link.name.starts_with("wlv")
}

/// Says that other plugins' configuration is not followed, rather than let its owner wonder.
fn warn_about_cni(dir: &Path) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    let files: Vec<String> = entries
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .filter(|n| [".conf", ".conflist", ".json"].iter().any(|x| n.ends_with(x)))
        .collect();
    if !files.is_empty() {
        tracing::warn!(dir = %dir.display(), ?files, "CNI configuration found: external CNI plugins are not supported yet, pods are wired by Windlass itself");
    }
}

fn load_br_netfilter() {
    let program = crate::iptables::find_program("modprobe").unwrap_or_else(|| "modprobe".into());
    // No module loader, or a kernel with the module built in: what counts is the setting, which the caller looks at.
    let _ = std::process::Command::new(program).arg("br_netfilter").stdin(std::process::Stdio::null()).stderr(std::process::Stdio::null()).status();
}

#[cfg(test)]
#[path = "pod_tests.rs"]
mod tests;
