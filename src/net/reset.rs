//! Removing everything that an instance put into this network namespace.

use std::path::Path;

use crate::cidr::{Cidr, Family};
use crate::error::{Error, Result};
use crate::hostport;
use crate::iptables::{Iptables, chain_prefix};
use crate::link::Netlink;
use crate::pod::{ROUTE_PROTOCOL, bridge_name};
use crate::routes::vxlan_name;

/// Removes the instance's links, routes inside `cluster_cidrs` (all of ours, if empty), pod rules and address records.
/// What is not there is no error. The proxy's own rules are removed by the proxy's cleanup.
pub async fn reset(instance: &str, cluster_cidrs: &[Cidr], state_dir: &Path) -> Result<()> {
    let netlink = Netlink::open()?;
    for family in [Family::V4, Family::V6] {
        for route in netlink.routes(family, Some(ROUTE_PROTOCOL)).await? {
            if cluster_cidrs.is_empty() || cluster_cidrs.iter().any(|c| c.covers(&route.destination)) {
                netlink.delete_route(&route, ROUTE_PROTOCOL).await?;
            }
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
    match std::fs::remove_dir_all(state_dir.join("pods")) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::File { path: state_dir.join("pods"), action: "remove", source })
        }
        _ => Ok(()),
    }
}
