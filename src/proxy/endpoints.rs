//! Which endpoints a service port uses on this node: traffic policies, topology hints, the fallback to terminating ones.
//!
//! Follows upstream's `pkg/proxy/topology.go`, `CategorizeEndpoints` (KEP-1669, KEP-2433, KEP-3015).

use crate::model::{Endpoint, ServicePort};

/// A service port's endpoints as seen from one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usable<'a> {
    /// For the traffic policy `Cluster`; empty if it is never used.
    pub cluster: Vec<&'a Endpoint>,
    /// For the traffic policy `Local`; empty if it is never used.
    pub local: Vec<&'a Endpoint>,
    /// All of both, each once.
    pub reachable: Vec<&'a Endpoint>,
    /// Whether there is a usable endpoint on any node.
    pub any: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Topology {
    None,
    SameNode,
    SameZone,
}

fn topology(endpoints: &[Endpoint], node: &str, zone: Option<&str>) -> Topology {
    let ready: Vec<&Endpoint> = endpoints.iter().filter(|e| e.ready).collect();
    if ready.is_empty() {
        return Topology::None;
    }
    if ready.iter().all(|e| !e.nodes.is_empty()) && ready.iter().any(|e| e.nodes.contains(node)) {
        return Topology::SameNode;
    }
    let here = |e: &&Endpoint| zone.is_some_and(|z| e.zones.contains(z));
    if ready.iter().all(|e| !e.zones.is_empty()) && ready.iter().any(here) {
        return Topology::SameZone;
    }
    Topology::None
}

/// Sorts out the endpoints of `port` for the node `node` in `zone`.
pub fn categorize<'a>(port: &'a ServicePort, node: &str, zone: Option<&str>) -> Usable<'a> {
    let all = &port.endpoints;
    let mut usable = Usable::default();
    if all.is_empty() {
        return usable;
    }
    let draining = |e: &&Endpoint| e.serving && e.terminating;
    if port.uses_cluster_endpoints() {
        let mode = topology(all, node, zone);
        let near = |e: &&Endpoint| match mode {
            Topology::None => true,
            Topology::SameNode => e.nodes.contains(node),
            Topology::SameZone => zone.is_some_and(|z| e.zones.contains(z)),
        };
        usable.cluster = all.iter().filter(|e| e.ready && near(e)).collect();
        if usable.cluster.is_empty() {
            usable.cluster = all.iter().filter(draining).collect();
        }
        usable.any = !usable.cluster.is_empty();
    }
    if !port.uses_local_endpoints() {
        usable.reachable.clone_from(&usable.cluster);
        return usable;
    }
    usable.any = usable.any || all.iter().any(|e| e.ready || e.serving && e.terminating);
    usable.local = all.iter().filter(|e| e.local && e.ready).collect();
    if usable.local.is_empty() {
        usable.local = all.iter().filter(|e| e.local).filter(draining).collect();
    }
    if !port.uses_cluster_endpoints() {
        usable.reachable.clone_from(&usable.local);
        return usable;
    }
    usable.reachable = all
        .iter()
        .filter(|e| usable.cluster.iter().chain(&usable.local).any(|u| u.address == e.address))
        .collect();
    usable
}
