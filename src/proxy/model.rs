//! What the proxy reads of the API, and what it makes of it: service ports with their endpoints, per address family.
//!
//! Follows upstream's `pkg/proxy/serviceport.go`, `endpointslicecache.go`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use serde::Deserialize;
use windlass_client::projection;
use windlass_net::{Cidr, Family};

projection! {
    /// What the proxy reads of a Service.
    pub struct ServiceView: k8s_openapi::api::core::v1::Service {
        pub spec: ServiceSpec,
        pub status: ServiceStatus,
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServiceSpec {
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(rename = "clusterIP")]
    pub cluster_ip: String,
    #[serde(rename = "clusterIPs")]
    pub cluster_ips: Vec<String>,
    #[serde(rename = "externalIPs")]
    pub external_ips: Vec<String>,
    pub ports: Vec<PortSpec>,
    pub session_affinity: String,
    pub session_affinity_config: Option<AffinityConfig>,
    pub internal_traffic_policy: Option<String>,
    pub external_traffic_policy: Option<String>,
    pub health_check_node_port: u16,
    pub load_balancer_source_ranges: Vec<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PortSpec {
    pub name: String,
    pub protocol: String,
    pub port: u16,
    pub node_port: u16,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct AffinityConfig {
    #[serde(rename = "clientIP")]
    pub client_ip: Option<ClientIp>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ClientIp {
    pub timeout_seconds: Option<u32>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServiceStatus {
    pub load_balancer: LoadBalancer,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LoadBalancer {
    pub ingress: Vec<Ingress>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Ingress {
    pub ip: String,
    pub ip_mode: Option<String>,
}

projection! {
    /// What the proxy reads of an EndpointSlice.
    pub struct SliceView: k8s_openapi::api::discovery::v1::EndpointSlice {
        pub address_type: String,
        pub endpoints: Option<Vec<EndpointSpec>>,
        pub ports: Option<Vec<SlicePort>>,
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SlicePort {
    pub name: Option<String>,
    pub port: Option<u16>,
    pub protocol: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EndpointSpec {
    pub addresses: Vec<String>,
    pub conditions: Option<Conditions>,
    pub node_name: Option<String>,
    pub hints: Option<Hints>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Conditions {
    pub ready: Option<bool>,
    pub serving: Option<bool>,
    pub terminating: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Hints {
    pub for_zones: Option<Vec<Named>>,
    pub for_nodes: Option<Vec<Named>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub struct Named {
    pub name: String,
}

projection! {
    /// What the proxy reads of its Node.
    pub struct NodeView: k8s_openapi::api::core::v1::Node {
        pub spec: NodeSpec,
        pub status: NodeStatus,
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct NodeSpec {
    #[serde(rename = "podCIDRs")]
    pub pod_cidrs: Vec<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct NodeStatus {
    pub addresses: Vec<NodeAddress>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct NodeAddress {
    #[serde(rename = "type")]
    pub kind: String,
    pub address: String,
}

/// A transport protocol that services have.
pub use windlass_net::hostport::Protocol;

/// A service's name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceName {
    pub namespace: String,
    pub name: String,
}

impl fmt::Display for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// One port of a service, in one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    pub service: ServiceName,
    /// The port's name, may be empty.
    pub port_name: String,
    pub protocol: Protocol,
    pub cluster_ip: IpAddr,
    pub port: u16,
    /// 0: none.
    pub node_port: u16,
    pub external_ips: Vec<IpAddr>,
    pub load_balancer_ips: Vec<IpAddr>,
    pub source_ranges: Vec<Cidr>,
    /// Session affinity by client address, for this many seconds.
    pub sticky_seconds: Option<u32>,
    pub internal_local: bool,
    pub external_local: bool,
    /// 0: none.
    pub health_check_node_port: u16,
    /// Sorted by address.
    pub endpoints: Vec<Endpoint>,
}

/// An address that answers for a service port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub address: SocketAddr,
    pub local: bool,
    pub ready: bool,
    pub serving: bool,
    pub terminating: bool,
    pub zones: BTreeSet<String>,
    pub nodes: BTreeSet<String>,
}

impl ServicePort {
    /// `namespace/name:port`, as in chain names and comments.
    pub fn name(&self) -> String {
        if self.port_name.is_empty() { self.service.to_string() } else { format!("{}:{}", self.service, self.port_name) }
    }

    /// Whether anything but the cluster IP leads to it.
    pub fn externally_accessible(&self) -> bool {
        self.node_port != 0 || !self.load_balancer_ips.is_empty() || !self.external_ips.is_empty()
    }

    /// Whether traffic ever goes to all endpoints of the cluster.
    pub fn uses_cluster_endpoints(&self) -> bool {
        !self.internal_local || self.externally_accessible()
    }

    /// Whether traffic ever goes to this node's endpoints only.
    pub fn uses_local_endpoints(&self) -> bool {
        self.internal_local || (self.external_local && self.externally_accessible())
    }
}

/// The ports of a service in a family, with the endpoints that its slices tell. Empty for services that are not proxied.
pub fn service_ports<'a>(
    family: Family,
    node: &str,
    service: &ServiceView,
    slices: impl IntoIterator<Item = &'a SliceView>,
) -> Vec<ServicePort> {
    let spec = &service.spec;
    if spec.kind == "ExternalName" || spec.cluster_ip.is_empty() || spec.cluster_ip == "None" {
        return Vec::new();
    }
    let all = if spec.cluster_ips.is_empty() { std::slice::from_ref(&spec.cluster_ip) } else { &spec.cluster_ips };
    let Some(cluster_ip) = of_family(family, all).next() else { return Vec::new() };
    let name = ServiceName {
        namespace: service.metadata.namespace.clone().unwrap_or_default(),
        name: service.metadata.name.clone().unwrap_or_default(),
    };
    let mut endpoints = endpoints_by_port(family, node, slices);
    let external_local = matches!(spec.kind.as_str(), "NodePort" | "LoadBalancer") && spec.external_traffic_policy.as_deref() == Some("Local");
    let internal_local = spec.internal_traffic_policy.as_deref() == Some("Local");
    let ranges: Vec<Cidr> = spec.load_balancer_source_ranges.iter().filter_map(|r| r.trim().parse().ok()).filter(|c: &Cidr| c.family() == family).collect();
    // A prefix of no bits allows everybody: as if there were none.
    let source_ranges = if ranges.iter().any(|c| c.prefix_len() == 0) { Vec::new() } else { ranges };
    let ingress: Vec<String> = service
        .status
        .load_balancer
        .ingress
        .iter()
        .filter(|i| i.ip_mode.as_deref().is_none_or(|m| m == "VIP"))
        .map(|i| i.ip.clone())
        .collect();
    let sticky = (spec.session_affinity == "ClientIP").then(|| {
        spec.session_affinity_config.as_ref().and_then(|c| c.client_ip.as_ref()).and_then(|c| c.timeout_seconds).unwrap_or(10800)
    });
    spec.ports
        .iter()
        .filter_map(|port| {
            let protocol = Protocol::parse(&port.protocol)?;
            Some(ServicePort {
                service: name.clone(),
                port_name: port.name.clone(),
                protocol,
                cluster_ip,
                port: port.port,
                node_port: port.node_port,
                external_ips: of_family(family, &spec.external_ips).collect(),
                load_balancer_ips: of_family(family, &ingress).collect(),
                source_ranges: source_ranges.clone(),
                sticky_seconds: sticky,
                internal_local,
                external_local,
                health_check_node_port: if spec.kind == "LoadBalancer" && external_local { spec.health_check_node_port } else { 0 },
                endpoints: endpoints.remove(&(port.name.clone(), protocol)).unwrap_or_default(),
            })
        })
        .collect()
}

fn of_family(family: Family, addresses: &[String]) -> impl Iterator<Item = IpAddr> {
    addresses.iter().filter_map(|a| a.trim().parse().ok()).filter(move |a: &IpAddr| Family::of(*a) == family)
}

fn endpoints_by_port<'a>(
    family: Family,
    node: &str,
    slices: impl IntoIterator<Item = &'a SliceView>,
) -> BTreeMap<(String, Protocol), Vec<Endpoint>> {
    let mut found: BTreeMap<(String, Protocol), BTreeMap<SocketAddr, Endpoint>> = BTreeMap::new();
    for slice in slices.into_iter().filter(|s| s.address_type == family.to_string()) {
        for port in slice.ports.iter().flatten() {
            let (Some(number), Some(name)) = (port.port.filter(|p| *p != 0), &port.name) else { continue };
            let Some(protocol) = Protocol::parse(port.protocol.as_deref().unwrap_or_default()) else { continue };
            let by_address = found.entry((name.clone(), protocol)).or_default();
            for spec in slice.endpoints.iter().flatten() {
                let Some(ip) = of_family(family, spec.addresses.get(..1).unwrap_or_default()).next() else { continue };
                let endpoint = endpoint(spec, SocketAddr::new(ip, number), node);
                // The address of a pod that ends may have been given to the next one already: that one counts.
                if !by_address.contains_key(&endpoint.address) || !endpoint.terminating {
                    by_address.insert(endpoint.address, endpoint);
                }
            }
        }
    }
    found.into_iter().map(|(key, by_address)| (key, sorted(by_address))).collect()
}

/// In the order of the addresses as text, which is upstream's.
fn sorted(by_address: BTreeMap<SocketAddr, Endpoint>) -> Vec<Endpoint> {
    let mut list: Vec<(String, Endpoint)> = by_address.into_iter().map(|(a, e)| (a.to_string(), e)).collect();
    list.sort_by(|a, b| a.0.cmp(&b.0));
    list.into_iter().map(|(_, e)| e).collect()
}

fn endpoint(spec: &EndpointSpec, address: SocketAddr, node: &str) -> Endpoint {
    let conditions = spec.conditions.clone().unwrap_or_default();
    let names = |list: Option<&Vec<Named>>| list.into_iter().flatten().map(|n| n.name.clone()).collect();
    let hints = spec.hints.as_ref();
    Endpoint {
        address,
        local: !node.is_empty() && spec.node_name.as_deref() == Some(node),
        ready: conditions.ready.unwrap_or(true),
        serving: conditions.serving.unwrap_or(true),
        terminating: conditions.terminating.unwrap_or(false),
        zones: names(hints.and_then(|h| h.for_zones.as_ref())),
        nodes: names(hints.and_then(|h| h.for_nodes.as_ref())),
    }
}
