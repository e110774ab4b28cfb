//! Endpoints: the older form of a service's addresses, one object per service.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::{
    api::core::v1::{EndpointAddress, EndpointPort, EndpointSubset, Endpoints, Service},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use serde_json::Value;
use windlass_client::{
    informer::{Change, Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker},
    endpointslice::{self, resolve_port},
    labels,
    pod::PodView,
    write::{self, ApiErrorExt},
};

/// Addresses that one object holds at most; more would make it too large.
const CAPACITY: usize = 1000;
pub(crate) const MANAGED_BY: &str = "endpoints.kubernetes.io/managed-by";
const HEADLESS: &str = "service.kubernetes.io/headless";
const OVER_CAPACITY: &str = "endpoints.kubernetes.io/over-capacity";
const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";

/// Ports of a subset, in an order that makes equal sets equal.
type Ports = Vec<(String, i32, String, Option<String>)>;

/// The subsets of a service: pods grouped by the ports they offer, parted into ready and not ready.
fn subsets(service: &Service, pods: &[Arc<PodView>]) -> (Vec<EndpointSubset>, bool) {
    let Some(spec) = &service.spec else { return (Vec::new(), false) };
    let publish_all = endpointslice::publishes_not_ready(service);
    let v6 = spec.ip_families.iter().flatten().next().is_some_and(|family| family == "IPv6");
    let mut groups: BTreeMap<Ports, (BTreeMap<String, EndpointAddress>, BTreeMap<String, EndpointAddress>)> = BTreeMap::new();
    let mut sorted: Vec<_> = pods.iter().collect();
    sorted.sort_by_key(|pod| pod.name());
    let over = sorted.len() > CAPACITY;
    for pod in sorted.into_iter().filter(|pod| !pod.finished() && (publish_all || !pod.deleting())).take(CAPACITY) {
        let Some(ip) = endpointslice::pod_ip(pod, v6) else { continue };
        let ready = publish_all || pod.ready();
        let address = EndpointAddress {
            ip: ip.to_owned(),
            hostname: endpointslice::hostname(service, pod),
            node_name: pod.spec.node_name.clone(),
            target_ref: Some(endpointslice::pod_reference(pod)),
        };
        let ports: Ports = spec.ports.iter().flatten().filter_map(|port| {
            let number = resolve_port(port, pod)?;
            let protocol = port.protocol.clone().unwrap_or_else(|| "TCP".into());
            Some((port.name.clone().unwrap_or_default(), number, protocol, port.app_protocol.clone()))
        }).collect();
        let headless = spec.cluster_ip.as_deref() == Some("None");
        if ports.is_empty() && !(headless && spec.ports.iter().flatten().next().is_none()) {
            continue;
        }
        let group = groups.entry(ports).or_default();
        if ready { &mut group.0 } else { &mut group.1 }.insert(ip.to_owned(), address);
    }
    let list = |addresses: BTreeMap<String, EndpointAddress>| (!addresses.is_empty()).then(|| addresses.into_values().collect());
    let port = |(name, port, protocol, app_protocol): (String, i32, String, Option<String>)| EndpointPort {
        name: (!name.is_empty()).then_some(name),
        port,
        protocol: Some(protocol),
        app_protocol,
    };
    let made = groups.into_iter().map(|(ports, (ready, not_ready))| EndpointSubset {
        addresses: list(ready),
        not_ready_addresses: list(not_ready),
        ports: (!ports.is_empty()).then(|| ports.into_iter().map(port).collect()),
    });
    (made.collect(), over)
}

/// The object for a service, before the server adds to it.
fn desired(service: &Service, subsets: Vec<EndpointSubset>, over: bool) -> Endpoints {
    let mut labels = service.metadata.labels.clone().unwrap_or_default();
    labels.remove(HEADLESS);
    if service.spec.as_ref().and_then(|spec| spec.cluster_ip.as_deref()) == Some("None") {
        labels.insert(HEADLESS.into(), String::new());
    }
    labels.insert(MANAGED_BY.into(), "endpoint-controller".into());
    Endpoints {
        metadata: ObjectMeta {
            name: service.metadata.name.clone(),
            namespace: service.metadata.namespace.clone(),
            labels: Some(labels),
            annotations: over.then(|| [(OVER_CAPACITY.to_owned(), "truncated".to_owned())].into()),
            ..ObjectMeta::default()
        },
        subsets: (!subsets.is_empty()).then_some(subsets),
    }
}

struct Controller {
    client: kube::Client,
    services: Informer<Service>,
    pods: Informer<PodView>,
    endpoints: Informer<Endpoints>,
}

impl Controller {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let existing = self.endpoints.get(&key);
        let Some(service) = self.services.get(&key) else {
            // A service that is gone takes its endpoints along; those that nobody made for it are the user's.
            if let Some(existing) = existing.filter(|existing| labels::of(&existing.metadata.labels).get(MANAGED_BY).is_some()) {
                write::delete(&self.client, &write::path(&*existing), write::Delete::default()).await?;
            }
            return Ok(Action::Done);
        };
        let selector = service.spec.as_ref().and_then(|spec| spec.selector.clone()).unwrap_or_default();
        let external = service.spec.as_ref().and_then(|spec| spec.type_.as_deref()) == Some("ExternalName");
        if selector.is_empty() || external {
            return Ok(Action::Done);
        }
        let pods: Vec<_> = self.pods.namespace(key.ns()).into_iter().filter(|pod| labels::matches_map(&selector, pod.labels())).collect();
        let (subsets, over) = subsets(&service, &pods);
        let mut wanted = desired(&service, subsets, over);
        let result: Result<Value, Error> = match existing {
            None => write::create(&self.client, &write::collection_path::<Endpoints>(key.ns()), &write::wire(&wanted)).await,
            Some(existing) => {
                let annotations = existing.metadata.annotations.clone().unwrap_or_default();
                let same = existing.subsets.as_deref().unwrap_or_default() == wanted.subsets.as_deref().unwrap_or_default()
                    && existing.metadata.labels == wanted.metadata.labels
                    && annotations.contains_key(OVER_CAPACITY) == over;
                if same {
                    return Ok(Action::Done);
                }
                let mut merged = annotations;
                merged.remove(OVER_CAPACITY);
                merged.remove(TRIGGER_TIME);
                merged.extend(wanted.metadata.annotations.take().unwrap_or_default());
                wanted.metadata = ObjectMeta { annotations: Some(merged), labels: wanted.metadata.labels, ..existing.metadata.clone() };
                write::replace(&self.client, &write::path(&wanted), &write::wire(&wanted)).await
            }
        };
        match result {
            Ok(_) => Ok(Action::Done),
            Err(error) if error.is_namespace_terminating() => Ok(Action::Done),
            Err(error) => Err(error),
        }
    }
}

/// The `endpoints-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("endpoint");
    let (services, pods, endpoints) = (context.services(), context.pods(), context.endpoints());
    endpointslice::wake_services(&services, &pods, &queue);
    {
        let queue = queue.clone();
        endpoints.on_change(move |change: &Change<Endpoints>| {
            // What somebody else did to an object of ours, and objects whose service went while we were away.
            queue.add(Key::of(&**change.object()));
        });
    }
    let state = Arc::new(Controller { client: context.client.clone(), services, pods, endpoints });
    context.worker(queue, context.config.concurrent_endpoint_syncs, state, Controller::sync)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::tests::pod;
    use serde_json::json;

    fn ready_pod(name: &str, ip: &str, ready: bool) -> Arc<PodView> {
        Arc::new(pod(json!({"metadata": {"name": name}, "spec": {"nodeName": "n", "containers": [{"name": "c", "ports": [{"name": "http", "containerPort": 8080}]}]},
            "status": {"phase": "Running", "podIPs": [{"ip": ip}], "conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" }}]}})))
    }

    #[test]
    fn subsets_group_by_port_and_readiness() {
        let service: Service = serde_json::from_value(json!({"metadata": {"name": "s", "namespace": "ns"}, "spec": {"clusterIP": "10.96.0.9",
            "ports": [{"name": "web", "port": 80, "targetPort": "http"}, {"name": "none", "port": 81, "targetPort": "missing"}]}})).expect("a service");
        let (made, over) = subsets(&service, &[ready_pod("b", "10.0.0.2", true), ready_pod("a", "10.0.0.1", true), ready_pod("c", "10.0.0.3", false)]);
        assert!(!over);
        let value = serde_json::to_value(&made).expect("json");
        assert_eq!(value[0]["ports"], json!([{"name": "web", "port": 8080, "protocol": "TCP"}]));
        assert_eq!(value[0]["addresses"][0]["ip"], "10.0.0.1");
        assert_eq!(value[0]["addresses"][1]["targetRef"]["name"], "b");
        assert_eq!(value[0]["notReadyAddresses"][0]["ip"], "10.0.0.3");
        assert_eq!(made.len(), 1);
    }
}
