//! What the DNS reads of the API, and the questions that [`crate::zone`] asks of it.

use std::net::IpAddr;
use std::sync::Arc;

use serde::Deserialize;
use windlass_client::informer::{Informer, Key};
use windlass_client::projection;

projection! {
    /// What the DNS reads of a Service.
    pub struct ServiceView: k8s_openapi::api::core::v1::Service {
        pub spec: ServiceSpec,
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
    pub external_name: String,
    pub ports: Vec<PortSpec>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PortSpec {
    pub name: Option<String>,
    pub protocol: Option<String>,
    pub port: Option<u16>,
}

projection! {
    /// What the DNS reads of an EndpointSlice.
    pub struct SliceView: k8s_openapi::api::discovery::v1::EndpointSlice {
        pub endpoints: Option<Vec<EndpointSpec>>,
        pub ports: Option<Vec<PortSpec>>,
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EndpointSpec {
    pub addresses: Vec<String>,
    pub hostname: Option<String>,
    pub conditions: Option<Conditions>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Conditions {
    pub ready: Option<bool>,
}

projection! {
    /// A namespace's name is all that counts.
    pub struct NamespaceView: k8s_openapi::api::core::v1::Namespace {}
}

impl ServiceView {
    /// Whether it has no address of its own.
    pub fn is_headless(&self) -> bool {
        self.spec.cluster_ip == "None"
    }

    /// Whether it is an alias.
    pub fn is_external_name(&self) -> bool {
        self.spec.kind == "ExternalName"
    }

    /// Its addresses.
    pub fn cluster_ips(&self) -> impl Iterator<Item = IpAddr> {
        let one = std::slice::from_ref(&self.spec.cluster_ip);
        let all = if self.spec.cluster_ips.is_empty() { one } else { &self.spec.cluster_ips };
        all.iter().filter_map(|ip| ip.parse().ok())
    }
}

impl EndpointSpec {
    /// Ready, or published although not ready (the slice's controller then says ready).
    pub fn is_ready(&self) -> bool {
        self.conditions.as_ref().and_then(|c| c.ready).unwrap_or(true)
    }

    /// Its addresses with the label that names each: its hostname, or the address with dashes.
    pub fn names(&self) -> impl Iterator<Item = (IpAddr, String)> {
        self.addresses.iter().filter_map(|a| a.parse().ok()).map(|ip: IpAddr| {
            let label = self.hostname.clone().filter(|h| !h.is_empty()).map_or_else(|| dashed(ip), |h| h.to_lowercase());
            (ip, label)
        })
    }
}

/// An address as one label: `10-0-0-1`, `fd00--1`.
pub fn dashed(ip: IpAddr) -> String {
    ip.to_string().replace(['.', ':'], "-")
}

/// Where the zone's content comes from.
pub trait Source: Send + Sync + 'static {
    /// A service.
    fn service(&self, namespace: &str, name: &str) -> Option<Arc<ServiceView>>;
    /// The slices of a service.
    fn slices(&self, namespace: &str, service: &str) -> Vec<Arc<SliceView>>;
    /// Whether a namespace exists.
    fn has_namespace(&self, name: &str) -> bool;
    /// Services that have this cluster IP.
    fn services_at(&self, ip: IpAddr) -> Vec<Arc<ServiceView>>;
    /// Slices that have an endpoint at this address.
    fn slices_at(&self, ip: IpAddr) -> Vec<Arc<SliceView>>;
}

/// The label that ties a slice to its service.
pub const SERVICE_LABEL: &str = "kubernetes.io/service-name";
pub(crate) const BY_SERVICE: &str = "service";
pub(crate) const BY_ADDRESS: &str = "address";

/// The service that a slice belongs to.
pub fn service_of(slice: &SliceView) -> Option<&str> {
    slice.metadata.labels.as_ref()?.get(SERVICE_LABEL).map(String::as_str)
}

/// Index values of a slice by its service, `namespace/name`.
pub fn slice_by_service(slice: &SliceView) -> Vec<String> {
    let namespace = slice.metadata.namespace.as_deref().unwrap_or_default();
    service_of(slice).map(|s| format!("{namespace}/{s}")).into_iter().collect()
}

/// Index values of a slice by its endpoints' addresses.
pub fn slice_by_address(slice: &SliceView) -> Vec<String> {
    let addresses = slice.endpoints.iter().flatten().flat_map(|e| &e.addresses);
    addresses.filter_map(|a| a.parse::<IpAddr>().ok()).map(|ip| ip.to_string()).collect()
}

/// Index values of a service by its cluster IPs.
pub fn service_by_address(service: &ServiceView) -> Vec<String> {
    service.cluster_ips().map(|ip| ip.to_string()).collect()
}

/// The informers' caches as a source.
pub struct Caches {
    pub services: Informer<ServiceView>,
    pub slices: Informer<SliceView>,
    pub namespaces: Informer<NamespaceView>,
}

impl Source for Caches {
    fn service(&self, namespace: &str, name: &str) -> Option<Arc<ServiceView>> {
        self.services.get_in(namespace, name)
    }
    fn slices(&self, namespace: &str, service: &str) -> Vec<Arc<SliceView>> {
        self.slices.by_index(BY_SERVICE, &format!("{namespace}/{service}"))
    }
    fn has_namespace(&self, name: &str) -> bool {
        self.namespaces.get(&Key::cluster(name)).is_some()
    }
    fn services_at(&self, ip: IpAddr) -> Vec<Arc<ServiceView>> {
        self.services.by_index(BY_ADDRESS, &ip.to_string())
    }
    fn slices_at(&self, ip: IpAddr) -> Vec<Arc<SliceView>> {
        self.slices.by_index(BY_ADDRESS, &ip.to_string())
    }
}
