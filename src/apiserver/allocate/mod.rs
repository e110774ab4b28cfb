//! Cluster IPs and node ports of services.
//!
//! Invariants:
//! - A value is taken by creating something that can exist once: an IPAddress object, or a key of the store for a port.
//!   So several API servers never give the same value twice, and restarts forget nothing.
//! - Services are the truth: what no service has is released, what a service has is taken again ([`repair`]).
//! - IPv4 only: dual-stack fields are set to SingleStack, a demand for IPv6 is refused in upstream's words.
//!
//! Code map: [`ranges`] networks, ports and the order of assignment; [`Allocators`] the hooks around writes of services.

pub mod ranges;
pub mod repair;

use crate::cluster::{Cluster, Gr};
use bytes::Bytes;
use prometheus::{IntCounterVec, IntGaugeVec};
use ranges::{Cidr, Ports};
use serde_json::{Map, Value, json};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use windlass_api::field::FieldError;
use windlass_api::{ApiError, meta};
use windlass_store::{Expect, Op, Outcome, Store, Txn};

pub const ADDRESSES: Gr = Gr("networking.k8s.io", "ipaddresses");
pub const NETWORKS: Gr = Gr("networking.k8s.io", "servicecidrs");
pub const SERVICES: Gr = Gr("", "services");
/// Below it lie the ports that are taken: `<prefix><port>` with the service's namespace and name.
pub const PORT_PREFIX: &str = "/windlass/nodeports/";
/// The mark of addresses that are managed here (upstream's).
const MANAGER: &str = "ipallocator.k8s.io";
const MANAGED_BY: &str = "ipaddress.kubernetes.io/managed-by";

/// A value that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Taken {
    Address(Ipv4Addr),
    Port(u16),
}

/// What a write of a service took and will give back. Dropped without an end, it is a leak that [`repair`] mends.
#[must_use = "commit after the service is stored, revert if it is not"]
#[derive(Debug, Default)]
pub struct Allocation {
    taken: Vec<Taken>,
    released: Vec<Taken>,
}

/// The allocators of one cluster.
pub struct Allocators {
    cluster: Arc<dyn Cluster>,
    store: Arc<dyn Store>,
    pub network: Cidr,
    pub ports: Ports,
    allocations: IntCounterVec,
    errors: IntCounterVec,
    port_allocations: IntCounterVec,
    port_errors: IntCounterVec,
    allocated: IntGaugeVec,
    available: IntGaugeVec,
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

fn external_name(service: &Value) -> bool {
    service["spec"]["type"] == "ExternalName"
}

fn needs_ports(service: &Value) -> bool {
    match text(&service["spec"], "type") {
        "NodePort" => true,
        "LoadBalancer" => service["spec"]["allocateLoadBalancerNodePorts"] != false,
        _ => false,
    }
}

fn has_port_type(service: &Value) -> bool {
    matches!(text(&service["spec"], "type"), "NodePort" | "LoadBalancer")
}

fn needs_health_port(service: &Value) -> bool {
    service["spec"]["type"] == "LoadBalancer" && service["spec"]["externalTrafficPolicy"] == "Local"
}

/// The node ports of a service; not the one for health checks.
fn node_ports(service: &Value) -> Vec<u16> {
    let ports = service["spec"]["ports"].as_array().into_iter().flatten();
    ports.filter_map(|port| u16::try_from(port["nodePort"].as_i64()?).ok()).filter(|port| *port != 0).collect()
}

fn health_port(service: &Value) -> Option<u16> {
    u16::try_from(service["spec"]["healthCheckNodePort"].as_i64()?).ok().filter(|port| *port != 0)
}

/// Everything that a stored service holds.
pub fn held(service: &Value) -> Vec<Taken> {
    let mut held: Vec<Taken> = node_ports(service).into_iter().chain(health_port(service)).map(Taken::Port).collect();
    if !external_name(service) {
        let addresses = texts(&service["spec"]["clusterIPs"]);
        held.extend(addresses.iter().filter_map(|address| address.parse().ok()).map(Taken::Address));
    }
    held.sort();
    held.dedup();
    held
}

fn invalid(service: &Value, errors: Vec<FieldError>) -> ApiError {
    ApiError::invalid("", "Service", meta::name(service), errors)
}

impl Allocators {
    pub fn new(cluster: Arc<dyn Cluster>, store: Arc<dyn Store>, network: Cidr, ports: Ports) -> Arc<Allocators> {
        let counter = windlass_daemon::metrics::counter_vec;
        let gauge = windlass_daemon::metrics::gauge_vec;
        Arc::new(Allocators {
            cluster,
            store,
            network,
            ports,
            allocations: counter(
                "kube_apiserver_clusterip_allocator_allocation_total",
                "Number of Cluster IPs allocations",
                &["cidr", "scope"],
            ),
            errors: counter(
                "kube_apiserver_clusterip_allocator_allocation_errors_total",
                "Number of errors trying to allocate Cluster IPs",
                &["cidr", "scope"],
            ),
            port_allocations: counter(
                "kube_apiserver_nodeport_allocator_allocation_total",
                "Number of NodePort allocations",
                &["scope"],
            ),
            port_errors: counter(
                "kube_apiserver_nodeport_allocator_allocation_errors_total",
                "Number of errors trying to allocate NodePort",
                &["scope"],
            ),
            allocated: gauge(
                "kube_apiserver_clusterip_allocator_allocated_ips",
                "Gauge measuring the number of allocated IPs for Services",
                &["cidr"],
            ),
            available: gauge(
                "kube_apiserver_clusterip_allocator_available_ips",
                "Gauge measuring the number of available IPs for Services",
                &["cidr"],
            ),
        })
    }

    // === Hooks ===

    /// Before a service is created: fills in families, address and ports. The service has its name already.
    pub async fn create(&self, service: &mut Value, dry_run: bool) -> Result<Allocation, ApiError> {
        self.families(service, None)?;
        let mut allocation = Allocation::default();
        let filled = self.fill(service, None, dry_run, &mut allocation).await;
        self.end(filled, allocation, dry_run).await
    }

    /// Before a service is updated. What the new object leaves out of the old one's values is filled in from it.
    pub async fn update(&self, new: &mut Value, old: &Value, dry_run: bool) -> Result<Allocation, ApiError> {
        inherit(new, old);
        self.families(new, Some(old))?;
        let mut allocation = Allocation::default();
        let filled = self.fill(new, Some(old), dry_run, &mut allocation).await;
        if filled.is_ok() {
            let kept = held(new);
            allocation.released = held(old).into_iter().filter(|value| !kept.contains(value)).collect();
        }
        self.end(filled, allocation, dry_run).await
    }

    /// After a service is deleted.
    pub async fn delete(&self, service: &Value) {
        for value in held(service) {
            self.release(value).await;
        }
    }

    /// After the service is stored: gives back what it no longer has.
    pub async fn commit(&self, allocation: Allocation) {
        for value in allocation.released {
            self.release(value).await;
        }
    }

    /// After the service was refused: gives back what was taken for it.
    pub async fn revert(&self, allocation: Allocation) {
        for value in allocation.taken {
            self.release(value).await;
        }
    }

    async fn end(
        &self,
        filled: Result<(), ApiError>,
        allocation: Allocation,
        dry_run: bool,
    ) -> Result<Allocation, ApiError> {
        match filled {
            Ok(()) if dry_run => Ok(Allocation::default()),
            Ok(()) => Ok(allocation),
            Err(error) => {
                self.revert(allocation).await;
                Err(error)
            }
        }
    }

    // === Filling in ===

    async fn fill(
        &self,
        service: &mut Value,
        old: Option<&Value>,
        dry_run: bool,
        allocation: &mut Allocation,
    ) -> Result<(), ApiError> {
        if !external_name(service) && old.is_none_or(external_name) {
            self.fill_address(service, dry_run, allocation).await?;
        }
        if has_port_type(service) {
            self.fill_ports(service, old, dry_run, allocation).await?;
        }
        let needed = old.is_some_and(needs_health_port);
        if needs_health_port(service) && !needed {
            let chosen = health_port(service);
            let owner = owner(service);
            let port = match chosen {
                Some(port) => self.take_port(port, &owner, dry_run).await.map(|()| port).map_err(|why| {
                    ApiError::internal(format!("failed to allocate requested HealthCheck NodePort {port}: {why}"))
                })?,
                None => self.next_port(&owner, dry_run).await?,
            };
            allocation.taken.push(Taken::Port(port));
            service["spec"]["healthCheckNodePort"] = port.into();
        }
        Ok(())
    }

    async fn fill_address(
        &self,
        service: &mut Value,
        dry_run: bool,
        allocation: &mut Allocation,
    ) -> Result<(), ApiError> {
        let chosen = texts(&service["spec"]["clusterIPs"]).into_iter().next().unwrap_or_default();
        if chosen == "None" {
            return Ok(());
        }
        let address = if chosen.is_empty() {
            self.next_address(service, dry_run).await?
        } else {
            let refuse = |why: String| {
                let detail = format!("failed to allocate IP {chosen}: {why}");
                let error = FieldError::invalid("spec.clusterIPs", service["spec"]["clusterIPs"].clone(), detail);
                invalid(service, vec![error])
            };
            let address: Ipv4Addr = chosen.parse().map_err(|_| refuse("it is no IPv4 address".to_owned()))?;
            self.take_address(address, service, dry_run).await.map_err(refuse)?;
            address
        };
        if !dry_run {
            allocation.taken.push(Taken::Address(address));
        }
        service["spec"]["clusterIP"] = address.to_string().into();
        service["spec"]["clusterIPs"] = json!([address.to_string()]);
        Ok(())
    }

    async fn fill_ports(
        &self,
        service: &mut Value,
        old: Option<&Value>,
        dry_run: bool,
        allocation: &mut Allocation,
    ) -> Result<(), ApiError> {
        let owner = owner(service);
        let had = old.map(node_ports).unwrap_or_default();
        let assign = needs_ports(service);
        let count = service["spec"]["ports"].as_array().map_or(0, Vec::len);
        // Ports of several protocols with one number share a node port.
        let mut by_port: Map<String, Value> = Map::new();
        let mut mine: Vec<u16> = Vec::new();
        for index in 0..count {
            let port = &service["spec"]["ports"][index];
            let number = port["port"].to_string();
            let chosen = port["nodePort"].as_i64().unwrap_or_default();
            if chosen != 0 {
                let taken = match u16::try_from(chosen) {
                    Ok(port) if had.contains(&port) || mine.contains(&port) => Ok(()),
                    Ok(port) => {
                        let result = self.take_port(port, &owner, dry_run).await;
                        if result.is_ok() {
                            allocation.taken.push(Taken::Port(port));
                            mine.push(port);
                        }
                        result
                    }
                    Err(_) => Err(self.out_of_range()),
                };
                taken.map_err(|why| {
                    let path = format!("spec.ports[{index}].nodePort");
                    invalid(service, vec![FieldError::invalid(path, chosen, why)])
                })?;
                by_port.insert(number, chosen.into());
            }
        }
        for index in 0..count {
            let port = &service["spec"]["ports"][index];
            if !assign || port["nodePort"].as_i64().unwrap_or_default() != 0 {
                continue;
            }
            let number = port["port"].to_string();
            let shared = old.is_none().then(|| by_port.get(&number).cloned()).flatten();
            let value = match shared {
                Some(value) => value,
                None => {
                    let port = self.next_port(&owner, dry_run).await?;
                    if !dry_run {
                        allocation.taken.push(Taken::Port(port));
                    }
                    by_port.insert(number, port.into());
                    port.into()
                }
            };
            service["spec"]["ports"][index]["nodePort"] = value;
        }
        Ok(())
    }

    /// Sets the dual-stack fields, or refuses what one family cannot do (upstream's `initIPFamilyFields`).
    fn families(&self, service: &mut Value, old: Option<&Value>) -> Result<(), ApiError> {
        if external_name(service) {
            return Ok(());
        }
        if !service["spec"].is_object() {
            return Err(invalid(service, vec![FieldError::required("spec", "")]));
        }
        let mut addresses = texts(&service["spec"]["clusterIPs"]);
        let address = text(&service["spec"], "clusterIP").to_owned();
        if addresses.is_empty() && !address.is_empty() {
            addresses = vec![address];
            service["spec"]["clusterIPs"] = json!(addresses);
        }
        let headless = addresses.first().is_some_and(|address| address == "None");
        let selectorless = service["spec"]["selector"].as_object().is_none_or(Map::is_empty);
        let policy = match service["spec"]["ipFamilyPolicy"].as_str() {
            Some(policy) => policy.to_owned(),
            None => match old.and_then(|old| old["spec"]["ipFamilyPolicy"].as_str()) {
                Some(policy) => policy.to_owned(),
                None if headless && selectorless => "RequireDualStack".to_owned(),
                None => "SingleStack".to_owned(),
            },
        };
        service["spec"]["ipFamilyPolicy"] = policy.clone().into();
        let mut errors = Vec::new();
        let mut families = texts(&service["spec"]["ipFamilies"]);
        if policy == "SingleStack" {
            let both = "must be 'RequireDualStack' or 'PreferDualStack' when multiple";
            if addresses.len() == 2 {
                let detail = format!("{both} cluster IPs are specified");
                errors.push(FieldError::invalid("spec.ipFamilyPolicy", policy.clone(), detail));
            }
            if families.len() == 2 {
                let detail = format!("{both} IP families are specified");
                errors.push(FieldError::invalid("spec.ipFamilyPolicy", policy.clone(), detail));
            }
        }
        for (index, address) in addresses.iter().enumerate().skip(families.len()) {
            if matches!(address.parse(), Ok(IpAddr::V6(_))) {
                let path = format!("spec.clusterIPs[{index}]");
                let value = service["spec"]["clusterIPs"].clone();
                errors.push(FieldError::invalid(path, value, "IPv6 is not configured on this cluster"));
            }
        }
        if headless && selectorless {
            if families.is_empty() {
                families.push("IPv4".to_owned());
            }
            if families.len() < 2 && policy != "SingleStack" {
                let other = if families[0] == "IPv4" { "IPv6" } else { "IPv4" };
                families.push(other.to_owned());
            }
        } else {
            if policy == "RequireDualStack" {
                let detail = "this cluster is not configured for dual-stack services";
                errors.push(FieldError::invalid("spec.ipFamilyPolicy", policy, detail));
            }
            for (index, family) in families.iter().enumerate().filter(|(_, family)| *family != "IPv4") {
                let path = format!("spec.ipFamilies[{index}]");
                errors.push(FieldError::invalid(path, family.clone(), "not configured on this cluster"));
            }
            if families.is_empty() {
                families.push("IPv4".to_owned());
            }
        }
        if !errors.is_empty() {
            return Err(invalid(service, errors));
        }
        service["spec"]["ipFamilies"] = json!(families);
        Ok(())
    }

    // === Addresses ===

    /// The networks that services get addresses from: the configured one, and those of ServiceCIDR objects.
    fn networks(&self) -> Vec<Cidr> {
        let mut networks = vec![self.network];
        for object in self.cluster.cached_list(NETWORKS, None) {
            if meta::deletion_timestamp(&object).is_some() {
                continue;
            }
            let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
            let unready = conditions.into_iter().any(|one| one["type"] == "Ready" && one["status"] == "False");
            let known = texts(&object["spec"]["cidrs"]).into_iter().filter_map(|text| text.parse::<Cidr>().ok());
            networks.extend(known.filter(|_| !unready));
        }
        networks.dedup();
        networks
    }

    async fn take_address(&self, address: Ipv4Addr, service: &Value, dry_run: bool) -> Result<(), String> {
        let Some(network) = self.networks().into_iter().find(|network| network.contains(address)) else {
            let shown = self.network.to_string();
            self.errors.with_label_values(&[shown.as_str(), "static"]).inc();
            return Err(format!("the provided network does not match the current range: {address} is not in {shown}"));
        };
        if dry_run {
            return Ok(());
        }
        match self.create_address(address, service, network, "static").await {
            Ok(true) => Ok(()),
            Ok(false) => Err("provided IP is already allocated".to_owned()),
            Err(error) => Err(error.message.clone()),
        }
    }

    async fn next_address(&self, service: &Value, dry_run: bool) -> Result<Ipv4Addr, ApiError> {
        if dry_run {
            return Ok(self.network.network());
        }
        for network in self.networks() {
            for address in network.order() {
                if self.cluster.cached(ADDRESSES, "", &address.to_string()).is_some() {
                    continue;
                }
                if self.create_address(address, service, network, "dynamic").await? {
                    return Ok(address);
                }
            }
        }
        let name = meta::name(service);
        Err(ApiError::internal(format!("failed to allocate a serviceIP for Service {name:?}: range is full")))
    }

    /// False if somebody has it already.
    async fn create_address(
        &self,
        address: Ipv4Addr,
        service: &Value,
        network: Cidr,
        scope: &str,
    ) -> Result<bool, ApiError> {
        let network = network.to_string();
        let labels = [network.as_str(), scope];
        let created = self.cluster.create(ADDRESSES, address_object(address, service)).await;
        match created {
            Ok(_) => {
                self.allocations.with_label_values(&labels).inc();
                Ok(true)
            }
            Err(error) if error.reason == "AlreadyExists" => {
                self.errors.with_label_values(&labels).inc();
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    // === Ports ===

    fn out_of_range(&self) -> String {
        format!("provided port is not in the valid range. The range of valid ports is {}", self.ports)
    }

    async fn take_port(&self, port: u16, owner: &str, dry_run: bool) -> Result<(), String> {
        if !self.ports.contains(port) {
            self.port_errors.with_label_values(&["static"]).inc();
            return Err(self.out_of_range());
        }
        let free = match dry_run {
            true => self.store.get(&port_key(port)).await.map(|found| found.is_none()),
            false => self.claim(port, owner).await,
        };
        match free {
            Ok(true) => {
                self.port_allocations.with_label_values(&["static"]).inc();
                Ok(())
            }
            Ok(false) => {
                self.port_errors.with_label_values(&["static"]).inc();
                Err("provided port is already allocated".to_owned())
            }
            Err(error) => Err(error.to_string()),
        }
    }

    async fn claim(&self, port: u16, owner: &str) -> Result<bool, windlass_store::Error> {
        let op = Op::Put { value: Bytes::copy_from_slice(owner.as_bytes()), ttl: None };
        let outcome = self.store.txn(Txn { key: port_key(port), expect: Expect::Absent, op }).await?;
        Ok(matches!(outcome, Outcome::Committed { .. }))
    }

    async fn next_port(&self, owner: &str, dry_run: bool) -> Result<u16, ApiError> {
        let failed = |why: String| ApiError::internal(format!("failed to allocate a nodePort: {why}"));
        for port in self.ports.order() {
            if dry_run || self.claim(port, owner).await.map_err(|error| failed(error.to_string()))? {
                self.port_allocations.with_label_values(&["dynamic"]).inc();
                return Ok(port);
            }
        }
        self.port_errors.with_label_values(&["dynamic"]).inc();
        Err(failed("range is full".to_owned()))
    }

    // === Release ===

    async fn release(&self, value: Taken) {
        let result = match value {
            Taken::Address(address) => match self.cluster.delete(ADDRESSES, "", &address.to_string()).await {
                Err(error) if error.code != 404 => Err(error.message.clone()),
                _ => Ok(()),
            },
            Taken::Port(port) => {
                let txn = Txn { key: port_key(port), expect: Expect::Any, op: Op::Delete };
                self.store.txn(txn).await.map(drop).map_err(|error| error.to_string())
            }
        };
        if let Err(error) = result {
            tracing::warn!(?value, error, "could not release; it will be repaired");
        }
    }
}

/// What an address or a port is taken for.
fn owner(service: &Value) -> String {
    format!("{}/{}", meta::namespace(service), meta::name(service))
}

fn port_key(port: u16) -> String {
    format!("{PORT_PREFIX}{port}")
}

fn address_object(address: Ipv4Addr, service: &Value) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "IPAddress",
        "metadata": {
            "name": address.to_string(),
            "labels": {"ipaddress.kubernetes.io/ip-family": "IPv4", MANAGED_BY: MANAGER},
        },
        "spec": {"parentRef": {
            "group": "", "resource": "services", "namespace": meta::namespace(service), "name": meta::name(service),
        }},
    })
}

/// Fills the old service's values into the new one where it says nothing and still needs them (`patchAllocatedValues`).
fn inherit(new: &mut Value, old: &Value) {
    if !new["spec"].is_object() {
        return;
    }
    if !external_name(new) && !external_name(old) {
        if text(&new["spec"], "clusterIP").is_empty() {
            new["spec"]["clusterIP"] = old["spec"]["clusterIP"].clone();
        }
        let empty = new["spec"]["clusterIPs"].as_array().is_none_or(Vec::is_empty);
        if empty && new["spec"]["clusterIP"] == old["spec"]["clusterIP"] {
            new["spec"]["clusterIPs"] = old["spec"]["clusterIPs"].clone();
        }
    }
    if needs_ports(new) && has_port_type(old) {
        let key = |port: &Value| (port["protocol"].clone(), port["port"].clone());
        let mut used = node_ports(new);
        for port in new["spec"]["ports"].as_array_mut().into_iter().flatten() {
            if port["nodePort"].as_i64().unwrap_or_default() != 0 {
                continue;
            }
            let mut olds = old["spec"]["ports"].as_array().into_iter().flatten();
            let before = olds.find(|before| key(before) == key(port)).and_then(|before| before["nodePort"].as_i64());
            let before = before.and_then(|before| u16::try_from(before).ok()).filter(|before| *before != 0);
            if let Some(before) = before.filter(|before| !used.contains(before)) {
                port["nodePort"] = before.into();
                used.push(before);
            }
        }
    }
    if needs_health_port(new) && needs_health_port(old) && health_port(new).is_none() {
        if let Some(port) = health_port(old) {
            new["spec"]["healthCheckNodePort"] = port.into();
        }
    }
}

#[cfg(test)]
mod tests;
