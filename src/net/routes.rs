//! Routes to the pods of other nodes.
//!
//! A peer on a network that this node is directly connected to gets a plain route by its address (host-gw). Any other
//! gets its traffic in VXLAN: one device per node, and per peer a route, a neighbour entry and a forwarding entry. Each
//! node's VXLAN MAC follows from its address, so there is nothing to exchange: Node objects say everything.
//!
//! [`Routes::reconcile`] compares with what the kernel has, by our routes' protocol number and inside the cluster's
//! CIDRs; it needs no memory of what it did before.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use sha2::{Digest, Sha256};

use crate::cidr::{Cidr, Family};
use crate::error::{Error, Result};
use crate::link::{Address, Mac, Netlink, Route, Vxlan, neighbour_destination, neighbour_mac};
use crate::pod::ROUTE_PROTOCOL;

/// Bytes that VXLAN over IPv4 adds to a packet; 20 more over IPv6.
const VXLAN_OVERHEAD: u32 = 50;

/// How packets get to other nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// Plain routes to nodes on our networks, VXLAN to the others.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    /// VXLAN to every node.
    #[serde(rename = "vxlan")]
    Vxlan,
    /// Plain routes only; a node elsewhere is an error.
    #[serde(rename = "host-gw")]
    HostGateway,
}

impl std::str::FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "vxlan" => Ok(Self::Vxlan),
            "host-gw" => Ok(Self::HostGateway),
            other => Err(format!("{other:?} is no way of routing to pods; there are auto, vxlan and host-gw")),
        }
    }
}

/// This node's part.
#[derive(Clone, Debug)]
pub struct Config {
    pub instance: String,
    pub mode: Mode,
    /// The node's address (`InternalIP`).
    pub address: IpAddr,
    pub pod_cidrs: Vec<Cidr>,
    /// Only routes inside these are ours to remove. Empty: any with our protocol number.
    pub cluster_cidrs: Vec<Cidr>,
    /// VXLAN network identifier; `None`: one derived from the instance's name, the same on all its nodes.
    pub vni: Option<u32>,
    /// VXLAN's UDP port.
    pub port: u16,
}

/// Another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    pub node: String,
    pub address: IpAddr,
    pub pod_cidrs: Vec<Cidr>,
}

/// Keeps this node's routes to its peers.
#[derive(Debug)]
pub struct Routes {
    config: Config,
    netlink: Netlink,
}

/// The VXLAN device of an instance.
pub fn vxlan_name(instance: &str) -> String {
    let digest = Sha256::digest(instance.as_bytes());
    if instance.is_empty() { "wlx0".to_owned() } else { format!("wlx{:02x}{:02x}{:02x}{:02x}", digest[0], digest[1], digest[2], digest[3]) }
}

/// The VXLAN network identifier of an instance.
pub fn vni_of(instance: &str) -> u32 {
    let digest = Sha256::digest(instance.as_bytes());
    if instance.is_empty() { 87 } else { u32::from_be_bytes([0, digest[0], digest[1], digest[2]]).max(1) }
}

/// The protocol number of an instance's routes (`ip route show proto 87`): 87, or one from 88 to 184 for a named instance.
pub fn route_protocol(instance: &str) -> u8 {
    if instance.is_empty() { ROUTE_PROTOCOL } else { 88 + Sha256::digest(instance.as_bytes())[0] % 97 }
}

fn vtep_mac(address: IpAddr) -> Mac {
    let mut mac = crate::pod::mac_of(address);
    mac[1] = 0x57;
    mac
}

/// What the kernel should hold for the peers: computed apart from doing it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Plan {
    routes: BTreeSet<Route>,
    /// By the peer's address: MAC and gateway addresses.
    tunnels: BTreeMap<IpAddr, (Mac, Vec<IpAddr>)>,
}

fn is_near(peer: IpAddr, own: &[Address]) -> bool {
    own.iter().any(|a| a.prefix_len < Family::of(a.ip).bits() && Cidr::new(a.ip, a.prefix_len).is_some_and(|c| c.contains(peer)))
}

fn plan(config: &Config, peers: &[Peer], own: &[Address], vxlan: Option<u32>) -> (Plan, Vec<Error>) {
    let mut plan = Plan::default();
    let mut errors = Vec::new();
    for peer in peers.iter().filter(|p| p.address != config.address) {
        let near = config.mode != Mode::Vxlan && is_near(peer.address, own);
        if !near && config.mode == Mode::HostGateway {
            errors.push(Error::Peer { node: peer.node.clone(), reason: format!("{} is on none of our networks, and VXLAN is off", peer.address) });
            continue;
        }
        for cidr in &peer.pod_cidrs {
            if config.pod_cidrs.iter().any(|own| own.covers(cidr) || cidr.covers(own)) {
                errors.push(Error::Peer { node: peer.node.clone(), reason: format!("its pod CIDR {cidr} overlaps with ours") });
                continue;
            }
            if near && Family::of(peer.address) == cidr.family() {
                plan.routes.insert(Route { destination: *cidr, gateway: Some(peer.address), link: 0, on_link: false });
            } else if let Some(link) = vxlan {
                // The base address of the peer's pod CIDR is nobody's: it stands for the peer's end of the tunnel.
                let gateway = cidr.base();
                plan.routes.insert(Route { destination: *cidr, gateway: Some(gateway), link, on_link: true });
                plan.tunnels.entry(peer.address).or_insert_with(|| (vtep_mac(peer.address), Vec::new())).1.push(gateway);
            }
        }
    }
    (plan, errors)
}

impl Routes {
    /// Opens a netlink socket in the calling thread's namespace.
    pub fn new(config: Config) -> Result<Routes> {
        Ok(Routes { config, netlink: Netlink::open()? })
    }

    /// Brings the kernel's state in line with the peers. A peer that cannot be routed to does not keep the others from it:
    /// the first error is returned after all else is done.
    pub async fn reconcile(&self, peers: &[Peer]) -> Result<()> {
        let name = vxlan_name(&self.config.instance);
        let addresses = self.underlay_addresses().await?;
        let far = peers.iter().filter(|p| p.address != self.config.address && !p.pod_cidrs.is_empty()).any(|p| {
            self.config.mode == Mode::Vxlan
                || self.config.mode == Mode::Auto
                    && (!is_near(p.address, &addresses) || p.pod_cidrs.iter().any(|c| c.family() != Family::of(p.address)))
        });
        let vxlan = if far {
            Some(self.ensure_vxlan(&name, &addresses).await?)
        } else {
            self.netlink.delete_link(&name).await?;
            None
        };
        let (plan, mut errors) = plan(&self.config, peers, &addresses, vxlan);
        if let Some(link) = vxlan {
            self.tunnels(link, &plan).await?;
        }
        for family in [Family::V4, Family::V6] {
            if let Err(e) = self.routes(family, &plan).await {
                errors.push(e);
            }
        }
        errors.into_iter().next().map_or(Ok(()), Err)
    }

    /// Addresses of the links that lead to other machines: not those of our bridges and tunnels.
    async fn underlay_addresses(&self) -> Result<Vec<Address>> {
        let ours: BTreeSet<u32> = self
            .netlink
            .links()
            .await?
            .into_iter()
            .filter(|l| l.name == crate::pod::bridge_name(&self.config.instance) || l.name == vxlan_name(&self.config.instance) || l.name == "lo")
            .map(|l| l.index)
            .collect();
        let all = self.netlink.addresses(None).await?;
        Ok(all.into_iter().filter(|a| !ours.contains(&a.link)).collect())
    }

    async fn ensure_vxlan(&self, name: &str, addresses: &[Address]) -> Result<u32> {
        let underlay = addresses.iter().find(|a| a.ip == self.config.address).map_or(0, |a| a.link);
        let carrier_mtu = self.netlink.links().await?.into_iter().find(|l| l.index == underlay).map_or(1500, |l| l.mtu);
        let overhead = VXLAN_OVERHEAD + if self.config.address.is_ipv6() { 20 } else { 0 };
        let vxlan = Vxlan {
            vni: self.config.vni.unwrap_or_else(|| vni_of(&self.config.instance)),
            port: self.config.port,
            mac: vtep_mac(self.config.address),
            local: self.config.address,
            underlay,
            mtu: carrier_mtu.saturating_sub(overhead).max(1280),
        };
        let link = self.netlink.ensure_vxlan(name, &vxlan).await?;
        for cidr in &self.config.pod_cidrs {
            // The source of what this host itself sends to far pods.
            self.netlink.ensure_address(link.index, cidr.base(), cidr.family().bits()).await?;
        }
        for old in self.netlink.addresses(Some(link.index)).await? {
            let link_local = matches!(old.ip, IpAddr::V6(a) if a.is_unicast_link_local());
            if !link_local && !self.config.pod_cidrs.iter().any(|c| c.base() == old.ip) {
                self.netlink.delete_address(&old).await?;
            }
        }
        Ok(link.index)
    }

    async fn tunnels(&self, link: u32, plan: &Plan) -> Result<()> {
        let wanted_gateways: BTreeMap<IpAddr, Mac> =
            plan.tunnels.values().flat_map(|(mac, gateways)| gateways.iter().map(move |g| (*g, *mac))).collect();
        for entry in self.netlink.neighbours(link, false).await? {
            let gone = neighbour_destination(&entry).is_none_or(|ip| !wanted_gateways.contains_key(&ip));
            let permanent = entry.header.state == rtnetlink::packet_route::neighbour::NeighbourState::Permanent;
            if gone && permanent {
                self.netlink.delete_neighbour(entry).await?;
            }
        }
        for entry in self.netlink.neighbours(link, true).await? {
            let known = neighbour_destination(&entry)
                .and_then(|ip| plan.tunnels.get(&ip))
                .is_some_and(|(mac, _)| neighbour_mac(&entry) == Some(mac.as_slice()));
            if !known {
                self.netlink.delete_neighbour(entry).await?;
            }
        }
        for (address, (mac, _)) in &plan.tunnels {
            self.netlink.ensure_forwarding(link, *mac, *address).await?;
        }
        for (gateway, mac) in wanted_gateways {
            self.netlink.ensure_neighbour(link, gateway, mac).await?;
        }
        Ok(())
    }

    async fn routes(&self, family: Family, plan: &Plan) -> Result<()> {
        let have = self.netlink.routes(family, Some(self.protocol())).await?;
        let wanted: Vec<&Route> = plan.routes.iter().filter(|r| r.destination.family() == family).collect();
        let same = |a: &Route, b: &Route| {
            a.destination == b.destination && a.gateway == b.gateway && (b.link == 0 || a.link == b.link)
        };
        for old in have.iter().filter(|h| self.is_ours(h) && !wanted.iter().any(|w| w.destination == h.destination)) {
            self.netlink.delete_route(old, self.protocol()).await?;
        }
        for route in wanted.into_iter().filter(|w| !have.iter().any(|h| same(h, w))) {
            self.netlink.ensure_route(route, self.protocol()).await?;
        }
        Ok(())
    }

    fn protocol(&self) -> u8 {
        route_protocol(&self.config.instance)
    }

    fn is_ours(&self, route: &Route) -> bool {
        self.config.cluster_cidrs.is_empty() || self.config.cluster_cidrs.iter().any(|c| c.covers(&route.destination))
    }
}

#[cfg(test)]
#[path = "routes_tests.rs"]
mod tests;
