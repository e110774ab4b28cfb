//! Removing everything that an instance put into this network namespace.

use crate::cidr::Family;
use crate::error::Result;
use crate::hostport;
use crate::iptables::{Iptables, chain_prefix};
use crate::link::Netlink;
use crate::pod::bridge_name;
use crate::routes::{route_protocol, vxlan_name};

/// Removes the instance's links, routes and pod rules. What is not there is no error. Address records are in the state
/// directory, which its owner removes; the proxy's own rules are removed by the proxy's reset.
pub async fn reset(instance: &str) -> Result<()> {
    let netlink = Netlink::open()?;
    let protocol = route_protocol(instance);
    for family in [Family::V4, Family::V6] {
        for route in netlink.routes(family, Some(protocol)).await? {
            netlink.delete_route(&route, protocol).await?;
        }
    }
    let bridge = netlink.link(&bridge_name(instance)).await?;
    if let Some(bridge) = bridge {
        for link in netlink.links().await?.iter().filter(|l| l.controller == bridge.index && l.name.starts_with("wlv")) {
            netlink.delete_link(&link.name).await?;
        }
        netlink.delete_link(&bridge.name).await?;
    }
    netlink.delete_link(&vxlan_name(instance)).await?;
    let prefix = chain_prefix(instance);
    for family in [Family::V4, Family::V6] {
        let iptables = Iptables::new(family);
        if iptables.usable().await.is_ok() {
            iptables.remove_chains(&["nat", "filter"], |chain| hostport::is_ours(&prefix, chain)).await?;
        }
    }
    Ok(())
}
