//! Mirrors Endpoints that somebody wrote by hand for a service without a selector into slices, which is what proxies read.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::{
    api::{
        core::v1::{EndpointAddress, Endpoints, Service},
        discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice},
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use windlass_client::{
    informer::{Informer, Key},
    queue::{Action, Queue},
};

use super::{MANAGED_BY, SERVICE_NAME, apply, managed_by, pack};
use crate::{
    Error,
    context::{Context, Worker},
    expectations::Expectations,
    labels, owner,
    write::{self, ApiErrorExt, Delete},
};
use pack::Group;

const CONTROLLER: &str = "endpointslicemirroring-controller.k8s.io";
const SKIP: &str = "endpointslice.kubernetes.io/skip-mirror";
const LEADER: &str = "control-plane.alpha.kubernetes.io/leader";
/// Addresses of one subset that are mirrored at most.
const MAX_PER_SUBSET: usize = 1000;

fn wants_mirror(endpoints: &Endpoints, service: &Service) -> bool {
    let skipped = labels::of(&endpoints.metadata.labels).get(SKIP).is_some_and(|value| value == "true");
    let lock = endpoints.metadata.annotations.as_ref().is_some_and(|annotations| annotations.contains_key(LEADER));
    let selector = service.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    !skipped && !lock && selector.is_none_or(BTreeMap::is_empty)
}

fn endpoint(address: &EndpointAddress, ready: bool) -> Endpoint {
    Endpoint {
        addresses: vec![address.ip.clone()],
        conditions: Some(EndpointConditions { ready: Some(ready), ..EndpointConditions::default() }),
        hostname: address.hostname.clone(),
        node_name: address.node_name.clone(),
        target_ref: address.target_ref.clone(),
        ..Endpoint::default()
    }
}

fn groups(endpoints: &Endpoints) -> Vec<Group> {
    let mut groups: BTreeMap<(&str, String), Group> = BTreeMap::new();
    for subset in endpoints.subsets.iter().flatten() {
        let ports: Vec<EndpointPort> = subset.ports.iter().flatten().map(|port| EndpointPort {
            name: Some(port.name.clone().unwrap_or_default()),
            port: Some(port.port),
            protocol: port.protocol.clone(),
            app_protocol: port.app_protocol.clone(),
        }).collect();
        let ready = subset.addresses.iter().flatten().map(|address| (address, true));
        let not_ready = subset.not_ready_addresses.iter().flatten().map(|address| (address, false));
        for (address, ready) in ready.chain(not_ready).take(MAX_PER_SUBSET) {
            let family = if address.ip.contains(':') { "IPv6" } else { "IPv4" };
            let group = groups.entry((family, pack::ports_key(&ports))).or_insert_with(|| Group { address_type: family.into(), ports: ports.clone(), endpoints: Vec::new() });
            group.endpoints.push(endpoint(address, ready));
        }
    }
    groups.into_values().collect()
}

struct Controller {
    client: kube::Client,
    services: Informer<Service>,
    endpoints: Informer<Endpoints>,
    slices: Informer<EndpointSlice>,
    expectations: Arc<Expectations<Key>>,
}

impl Controller {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let existing: Vec<_> = self.slices.by_index("service", &key.to_string()).into_iter().filter(|slice| managed_by(slice) == CONTROLLER).collect();
        let source = self.endpoints.get(&key).filter(|endpoints| self.services.get(&key).is_some_and(|service| wants_mirror(endpoints, &service)));
        let Some(source) = source else {
            for slice in existing {
                write::delete(&self.client, &write::path(&*slice), Delete::default()).await?;
            }
            return Ok(Action::Done);
        };
        if let Some(left) = self.expectations.pending(&key) {
            return Ok(Action::RequeueAfter(left));
        }
        let mut labels = source.metadata.labels.clone().unwrap_or_default();
        labels.insert(SERVICE_NAME.into(), key.name.clone());
        labels.insert(MANAGED_BY.into(), CONTROLLER.into());
        let steps = pack::plan(&existing, groups(&source), &labels, MAX_PER_SUBSET);
        let mut annotations = source.metadata.annotations.clone().unwrap_or_default();
        annotations.retain(|key, _| !key.ends_with("last-applied-configuration"));
        let template = ObjectMeta {
            generate_name: Some(format!("{}-", key.name)),
            namespace: source.metadata.namespace.clone(),
            owner_references: Some(vec![owner::reference(&*source)]),
            labels: Some(labels),
            annotations: (!annotations.is_empty()).then_some(annotations),
            ..ObjectMeta::default()
        };
        match apply(&self.client, &self.expectations, &key, &template, steps).await {
            Err(error) if !error.is_namespace_terminating() => Err(error),
            _ => Ok(Action::Done),
        }
    }
}

/// The `endpointslice-mirroring-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("endpoint_slice_mirroring");
    let (services, endpoints, slices) = (context.services(), context.endpoints(), context.endpoint_slices());
    let expectations: Arc<Expectations<Key>> = Arc::default();
    super::wake(&services, &queue);
    super::wake(&endpoints, &queue);
    super::watch_slices(&slices, &queue, &expectations, CONTROLLER);
    let state = Arc::new(Controller { client: context.client.clone(), services, endpoints, slices, expectations });
    context.worker(queue, 5, state, Controller::sync)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn subsets_become_groups() {
        let endpoints: Endpoints = serde_json::from_value(json!({"metadata": {"name": "e"}, "subsets": [
            {"addresses": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}], "notReadyAddresses": [{"ip": "10.0.0.2"}], "ports": [{"port": 80}]}]})).expect("endpoints");
        let shown: Vec<_> = groups(&endpoints).iter().map(|g| (g.address_type.clone(), g.endpoints.iter().map(|e| e.conditions.as_ref().and_then(|c| c.ready)).collect::<Vec<_>>())).collect();
        assert_eq!(shown, [("IPv4".to_string(), vec![Some(true), Some(false)]), ("IPv6".to_string(), vec![Some(true)])]);
    }

    #[test]
    fn only_hand_written_endpoints_are_mirrored() {
        let endpoints = |labels: serde_json::Value| serde_json::from_value::<Endpoints>(json!({"metadata": {"name": "e", "labels": labels}})).expect("endpoints");
        let service = |selector: serde_json::Value| serde_json::from_value::<Service>(json!({"metadata": {"name": "e"}, "spec": {"selector": selector}})).expect("a service");
        assert!(wants_mirror(&endpoints(json!({})), &service(json!(null))));
        assert!(!wants_mirror(&endpoints(json!({})), &service(json!({"a": "b"}))));
        assert!(!wants_mirror(&endpoints(json!({SKIP: "true"})), &service(json!(null))));
    }
}
