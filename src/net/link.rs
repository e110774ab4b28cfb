//! Links, addresses, routes and neighbours of one network namespace, over one rtnetlink socket.
//!
//! Everything is `ensure_*` (idempotent: brings about a state) or `list`; "already there" and "already gone" are not
//! errors.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::path::Path;

use futures::TryStreamExt;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags, AddressHeaderFlags};
use rtnetlink::packet_route::link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};
use rtnetlink::packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope};
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::{Handle, IpVersion, LinkBridge, LinkBridgePort, LinkUnspec, LinkVeth, LinkVxlan, RouteMessageBuilder};

use crate::cidr::{Cidr, Family};
use crate::error::{Error, Result};
use crate::netns;

/// A MAC address.
pub type Mac = [u8; 6];

/// What we want to know of a link.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    pub index: u32,
    pub name: String,
    /// `veth`, `bridge`, `vxlan`, ...; empty for hardware and loopback.
    pub kind: String,
    /// Index of the bridge that it is a port of; 0 if none.
    pub controller: u32,
    /// Index of the other end (veth) in its namespace; 0 if none.
    pub peer: u32,
    pub mtu: u32,
    pub up: bool,
    pub mac: Vec<u8>,
    pub alias: String,
}

/// An address on a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub link: u32,
    pub ip: IpAddr,
    pub prefix_len: u8,
}

/// A route of the main table.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Route {
    pub destination: Cidr,
    pub gateway: Option<IpAddr>,
    pub link: u32,
    /// The gateway is taken to be on the link even if no prefix says so.
    pub on_link: bool,
}

/// One rtnetlink socket. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Netlink {
    handle: Handle,
}

fn no_such(error: &rtnetlink::Error) -> bool {
    matches!(error, rtnetlink::Error::NetlinkError(m)
        if [libc::ENODEV, libc::ENOENT, libc::ESRCH, libc::EADDRNOTAVAIL].contains(&m.raw_code().abs()))
}

fn exists(error: &rtnetlink::Error) -> bool {
    matches!(error, rtnetlink::Error::NetlinkError(m) if m.raw_code().abs() == libc::EEXIST)
}

/// Treats errors for which `benign` holds as success.
fn settle(result: std::result::Result<(), rtnetlink::Error>, benign: fn(&rtnetlink::Error) -> bool, what: impl FnOnce() -> String) -> Result<()> {
    match result {
        Err(e) if !benign(&e) => Err(Error::netlink(what(), e)),
        _ => Ok(()),
    }
}

impl Netlink {
    /// A socket in the calling thread's namespace. Must be called within a Tokio runtime.
    pub fn open() -> Result<Netlink> {
        let (connection, handle, _) = rtnetlink::new_connection().map_err(|source| Error::Namespace {
            path: netns::CURRENT.into(),
            action: "open a netlink socket in",
            source,
        })?;
        tokio::spawn(connection);
        Ok(Netlink { handle })
    }

    /// A socket in the namespace at `path`.
    pub async fn open_in(path: &Path) -> Result<Netlink> {
        netns::call(path, Netlink::open).await?
    }

    /// All links.
    pub async fn links(&self) -> Result<Vec<Link>> {
        let messages: Vec<LinkMessage> =
            self.handle.link().get().execute().try_collect().await.map_err(|e| Error::netlink("list links", e))?;
        Ok(messages.iter().map(to_link).collect())
    }

    /// The link of that name.
    pub async fn link(&self, name: &str) -> Result<Option<Link>> {
        let mut stream = Box::pin(self.handle.link().get().match_name(name).execute());
        match stream.try_next().await {
            Ok(found) => Ok(found.as_ref().map(to_link)),
            Err(e) if no_such(&e) => Ok(None),
            Err(e) => Err(Error::netlink(format!("look up link {name}"), e)),
        }
    }

    /// The link of that name, or [`Error::NoLink`].
    pub async fn need(&self, name: &str) -> Result<Link> {
        self.link(name).await?.ok_or_else(|| Error::NoLink { name: name.to_owned() })
    }

    /// Makes the bridge, or adopts it; up, with this MAC (a bridge without one of its own changes its MAC with its ports,
    /// and the pods' neighbour entries go stale).
    pub async fn ensure_bridge(&self, name: &str, mac: Mac, mtu: u32) -> Result<Link> {
        if self.link(name).await?.is_none() {
            let made = self.handle.link().add(LinkBridge::new(name).address(mac.to_vec()).build()).execute().await;
            settle(made, exists, || format!("make bridge {name}"))?;
            // Until its link-local address has passed duplicate detection, a second or two, a bridge asks for no IPv6
            // neighbour. Nobody else can have that address here. A kernel without IPv6 has no such setting.
            let _ = crate::sysctl::set(&format!("net/ipv6/conf/{name}/accept_dad"), "0");
        }
        let found = self.need(name).await?;
        if found.kind != "bridge" {
            return Err(Error::Netlink {
                what: format!("adopt bridge {name}"),
                reason: format!("a link of that name exists and is a {:?}; remove it or choose another instance name", found.kind),
                errno: 0,
            });
        }
        if !found.up || found.mac != mac || found.mtu != mtu {
            let change = LinkUnspec::new_with_index(found.index).address(mac.to_vec()).mtu(mtu).up().build();
            settle(self.handle.link().change(change).execute().await, |_| false, || format!("configure bridge {name}"))?;
        }
        self.need(name).await
    }

    /// Makes a veth pair: `name` here as a port of `bridge` in hairpin mode, `peer` down in the namespace at `peer_ns`.
    pub async fn make_veth(&self, veth: &Veth<'_>) -> Result<Link> {
        let file = netns::open(veth.peer_ns)?;
        let peer = LinkUnspec::default_peer(veth, file.as_raw_fd());
        let message = LinkVeth::new(veth.name, veth.peer)
            .set_info_data(rtnetlink::packet_route::link::InfoData::Veth(rtnetlink::packet_route::link::InfoVeth::Peer(peer)))
            .controller(veth.bridge)
            .mtu(veth.mtu)
            .append_extra_attribute(LinkAttribute::IfAlias(veth.alias.to_owned()))
            .up()
            .build();
        let made = self.handle.link().add(message).execute().await;
        settle(made, |_| false, || format!("make veth {} with peer {} in {}", veth.name, veth.peer, veth.peer_ns.display()))?;
        let link = self.need(veth.name).await?;
        let port = LinkBridgePort::new(link.index).hairpin(true).build();
        settle(self.handle.link().set_port(port).execute().await, |_| false, || format!("set hairpin mode on {}", veth.name))?;
        // The kernel ignores IFLA_IFALIAS while it makes a link.
        let alias = LinkUnspec::new_with_index(link.index)
            .append_extra_attribute(LinkAttribute::IfAlias(veth.alias.to_owned()))
            .build();
        settle(self.handle.link().change(alias).execute().await, |_| false, || format!("label {}", veth.name))?;
        Ok(link)
    }

    /// Makes the VXLAN device, or adopts it if it has the same MAC; up. `local` is this node's address.
    pub async fn ensure_vxlan(&self, name: &str, vxlan: &Vxlan) -> Result<Link> {
        if let Some(found) = self.link(name).await? {
            if found.kind == "vxlan" && found.mac == vxlan.mac && found.up {
                return Ok(found);
            }
            self.delete_link(name).await?;
        }
        let mut builder = LinkVxlan::new(name, vxlan.vni).port(vxlan.port).learning(false).address(vxlan.mac.to_vec()).mtu(vxlan.mtu).up();
        builder = match vxlan.local {
            IpAddr::V4(a) => builder.local(a),
            IpAddr::V6(a) => builder.local6(a),
        };
        if vxlan.underlay != 0 {
            builder = builder.dev(vxlan.underlay);
        }
        settle(self.handle.link().add(builder.build()).execute().await, exists, || format!("make VXLAN device {name} (VNI {})", vxlan.vni))?;
        self.need(name).await
    }

    /// Sets a link up.
    pub async fn set_up(&self, index: u32) -> Result<()> {
        let message = LinkUnspec::new_with_index(index).up().build();
        settle(self.handle.link().change(message).execute().await, |_| false, || format!("set link {index} up"))
    }

    /// Removes a link, if it is there.
    pub async fn delete_link(&self, name: &str) -> Result<()> {
        let Some(link) = self.link(name).await? else { return Ok(()) };
        settle(self.handle.link().del(link.index).execute().await, no_such, || format!("remove link {name}"))
    }

    /// All addresses, or those of one link.
    pub async fn addresses(&self, link: Option<u32>) -> Result<Vec<Address>> {
        let messages: Vec<_> =
            self.handle.address().get().execute().try_collect().await.map_err(|e| Error::netlink("list addresses", e))?;
        Ok(messages
            .iter()
            .filter(|m| link.is_none_or(|l| m.header.index == l))
            .filter_map(|m| {
                let mut remote = None;
                let mut local = None;
                for attribute in &m.attributes {
                    match attribute {
                        AddressAttribute::Address(a) => remote = Some(*a),
                        AddressAttribute::Local(a) => local = Some(*a),
                        _ => {}
                    }
                }
                let ip = local.or(remote)?;
                Some(Address { link: m.header.index, ip, prefix_len: m.header.prefix_len })
            })
            .collect())
    }

    /// Puts an address on a link, without duplicate address detection (addresses come from our own IPAM).
    pub async fn ensure_address(&self, link: u32, ip: IpAddr, prefix_len: u8) -> Result<()> {
        let mut request = self.handle.address().add(link, ip, prefix_len);
        if ip.is_ipv6() {
            let message = request.message_mut();
            message.header.flags |= AddressHeaderFlags::Nodad;
            message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
        }
        settle(request.execute().await, exists, || format!("add address {ip}/{prefix_len} to link {link}"))
    }

    /// Takes an address off a link.
    pub async fn delete_address(&self, address: &Address) -> Result<()> {
        let mut message = rtnetlink::packet_route::address::AddressMessage::default();
        message.header.family = family(Family::of(address.ip));
        message.header.index = address.link;
        message.header.prefix_len = address.prefix_len;
        message.attributes.push(AddressAttribute::Local(address.ip));
        message.attributes.push(AddressAttribute::Address(address.ip));
        settle(self.handle.address().del(message).execute().await, no_such, || format!("remove address {}", address.ip))
    }

    /// Routes of the main table, of one protocol number if given.
    pub async fn routes(&self, version: Family, protocol: Option<u8>) -> Result<Vec<Route>> {
        let mut ask = RouteMessage::default();
        ask.header.address_family = family(version);
        let messages: Vec<RouteMessage> =
            self.handle.route().get(ask).execute().try_collect().await.map_err(|e| Error::netlink("list routes", e))?;
        Ok(messages
            .iter()
            .filter(|m| m.header.table == RouteHeader::RT_TABLE_MAIN)
            .filter(|m| protocol.is_none_or(|p| u8::from(m.header.protocol) == p))
            .filter_map(|m| to_route(m, version))
            .collect())
    }

    /// Adds or replaces the route to a destination.
    pub async fn ensure_route(&self, route: &Route, protocol: u8) -> Result<()> {
        let result = self.handle.route().add(route_message(route, protocol)).replace().execute().await;
        settle(result, exists, || format!("add route to {}", route.destination))
    }

    /// Removes a route.
    pub async fn delete_route(&self, route: &Route, protocol: u8) -> Result<()> {
        let result = self.handle.route().del(route_message(route, protocol)).execute().await;
        settle(result, no_such, || format!("remove route to {}", route.destination))
    }

    /// A permanent neighbour entry.
    pub async fn ensure_neighbour(&self, link: u32, ip: IpAddr, mac: Mac) -> Result<()> {
        let request = self.handle.neighbours().add(link, ip).link_layer_address(&mac).replace();
        settle(request.execute().await, exists, || format!("add neighbour {ip}"))
    }

    /// A permanent forwarding entry of a VXLAN device: frames to `mac` go to the node at `destination`.
    pub async fn ensure_forwarding(&self, link: u32, mac: Mac, destination: IpAddr) -> Result<()> {
        let request = self.handle.neighbours().add_bridge(link, &mac).destination(destination).flags(NeighbourFlags::Own).replace();
        settle(request.execute().await, exists, || format!("add forwarding entry to {destination}"))
    }

    /// Neighbour (or, with `forwarding`, forwarding) entries of a link, as the kernel's messages.
    pub async fn neighbours(&self, link: u32, forwarding: bool) -> Result<Vec<NeighbourMessage>> {
        let mut found = Vec::new();
        let families: &[AddressFamily] =
            if forwarding { &[AddressFamily::Bridge] } else { &[AddressFamily::Inet, AddressFamily::Inet6] };
        for family in families {
            let request = self.handle.neighbours().get().set_address_family(*family);
            let messages: Vec<NeighbourMessage> =
                request.execute().try_collect().await.map_err(|e| Error::netlink("list neighbours", e))?;
            found.extend(messages.into_iter().filter(|m| m.header.ifindex == link));
        }
        Ok(found)
    }

    /// Removes an entry that [`Netlink::neighbours`] gave.
    pub async fn delete_neighbour(&self, message: NeighbourMessage) -> Result<()> {
        settle(self.handle.neighbours().del(message).execute().await, no_such, || "remove neighbour entry".to_owned())
    }

    /// The link that holds the default route, for its MTU.
    pub async fn default_route_link(&self) -> Result<Option<Link>> {
        let mut candidates = self.routes(Family::V4, None).await?;
        candidates.extend(self.routes(Family::V6, None).await?);
        let Some(route) = candidates.iter().find(|r| r.destination.prefix_len() == 0) else { return Ok(None) };
        Ok(self.links().await?.into_iter().find(|l| l.index == route.link))
    }

    /// `IpVersion` of rtnetlink, for callers of its own API.
    pub fn version(version: Family) -> IpVersion {
        match version {
            Family::V4 => IpVersion::V4,
            Family::V6 => IpVersion::V6,
        }
    }
}

/// A veth pair to make.
#[derive(Clone, Copy, Debug)]
pub struct Veth<'a> {
    pub name: &'a str,
    /// Index of the bridge.
    pub bridge: u32,
    pub alias: &'a str,
    pub peer: &'a str,
    pub peer_mac: Mac,
    pub peer_ns: &'a Path,
    pub mtu: u32,
}

/// A VXLAN device to make.
#[derive(Clone, Copy, Debug)]
pub struct Vxlan {
    pub vni: u32,
    pub port: u16,
    pub mac: Mac,
    pub local: IpAddr,
    /// Index of the link that carries it; 0: whichever the routes say.
    pub underlay: u32,
    pub mtu: u32,
}

/// The peer half of a veth message.
trait PeerMessage {
    fn default_peer(veth: &Veth<'_>, netns: i32) -> LinkMessage;
}

impl PeerMessage for LinkUnspec {
    fn default_peer(veth: &Veth<'_>, netns: i32) -> LinkMessage {
        LinkUnspec::new_with_name(veth.peer).address(veth.peer_mac.to_vec()).mtu(veth.mtu).setns_by_fd(netns).build()
    }
}

/// The entry's IP destination, of neighbours and forwarding entries alike.
pub fn neighbour_destination(message: &NeighbourMessage) -> Option<IpAddr> {
    message.attributes.iter().find_map(|a| match a {
        NeighbourAttribute::Destination(NeighbourAddress::Inet(a)) => Some(IpAddr::V4(*a)),
        NeighbourAttribute::Destination(NeighbourAddress::Inet6(a)) => Some(IpAddr::V6(*a)),
        _ => None,
    })
}

/// The entry's MAC.
pub fn neighbour_mac(message: &NeighbourMessage) -> Option<&[u8]> {
    message.attributes.iter().find_map(|a| match a {
        NeighbourAttribute::LinkLayerAddress(m) => Some(m.as_slice()),
        _ => None,
    })
}

fn family(version: Family) -> AddressFamily {
    match version {
        Family::V4 => AddressFamily::Inet,
        Family::V6 => AddressFamily::Inet6,
    }
}

fn to_link(message: &LinkMessage) -> Link {
    let mut link = Link { index: message.header.index, up: message.header.flags.contains(LinkFlags::Up), ..Link::default() };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::IfAlias(alias) => link.alias.clone_from(alias),
            LinkAttribute::Controller(index) => link.controller = *index,
            LinkAttribute::Link(index) => link.peer = *index,
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::Address(mac) => link.mac.clone_from(mac),
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    if let LinkInfo::Kind(kind) = info {
                        link.kind = kind_name(kind);
                    }
                }
            }
            _ => {}
        }
    }
    link
}

fn kind_name(kind: &InfoKind) -> String {
    match kind {
        InfoKind::Veth => "veth".into(),
        InfoKind::Bridge => "bridge".into(),
        InfoKind::Vxlan => "vxlan".into(),
        other => format!("{other:?}").to_lowercase(),
    }
}

fn to_route(message: &RouteMessage, version: Family) -> Option<Route> {
    let any = match version {
        Family::V4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        Family::V6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let ip = |a: &RouteAddress| match a {
        RouteAddress::Inet(a) => Some(IpAddr::V4(*a)),
        RouteAddress::Inet6(a) => Some(IpAddr::V6(*a)),
        _ => None,
    };
    let (mut destination, mut gateway, mut link) = (any, None, 0);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(a) => destination = ip(a)?,
            RouteAttribute::Gateway(a) => gateway = ip(a),
            RouteAttribute::Oif(index) => link = *index,
            _ => {}
        }
    }
    let on_link = message.header.flags.contains(rtnetlink::packet_route::route::RouteFlags::Onlink);
    Some(Route { destination: Cidr::new(destination, message.header.destination_prefix_length)?, gateway, link, on_link })
}

fn route_message(route: &Route, protocol: u8) -> RouteMessage {
    let mut message = match (route.destination.base(), route.gateway) {
        (IpAddr::V4(base), gateway) => {
            let mut b = RouteMessageBuilder::<Ipv4Addr>::new().destination_prefix(base, route.destination.prefix_len());
            if let Some(IpAddr::V4(gateway)) = gateway {
                b = b.gateway(gateway);
            }
            b.build()
        }
        (IpAddr::V6(base), gateway) => {
            let mut b = RouteMessageBuilder::<Ipv6Addr>::new().destination_prefix(base, route.destination.prefix_len());
            if let Some(IpAddr::V6(gateway)) = gateway {
                b = b.gateway(gateway);
            }
            b.build()
        }
    };
    message.header.protocol = RouteProtocol::from(protocol);
    message.header.scope = if route.gateway.is_none() && route.destination.family() == Family::V4 {
        RouteScope::Link
    } else {
        RouteScope::Universe
    };
    if route.on_link {
        message.header.flags |= rtnetlink::packet_route::route::RouteFlags::Onlink;
    }
    if route.link != 0 {
        message.attributes.push(RouteAttribute::Oif(route.link));
    }
    message
}
