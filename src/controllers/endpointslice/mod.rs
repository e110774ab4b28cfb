//! EndpointSlices: a service's addresses in pieces, so that one change of one pod rewrites one piece.

pub mod mirror;
pub(crate) mod pack;

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::{
    api::{
        core::v1::{Node, ObjectReference, Service, ServicePort},
        discovery::v1::{Endpoint, EndpointConditions, EndpointHints, EndpointPort, EndpointSlice, ForNode, ForZone},
    },
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, util::intstr::IntOrString},
};
use windlass_client::{
    events::{self, EventType, Recorder},
    informer::{Cached, Change, Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker},
    expectations::Expectations,
    labels, owner,
    pod::PodView,
    write::{self, ApiErrorExt, Delete},
};
use pack::{Group, Step};

const SERVICE_NAME: &str = "kubernetes.io/service-name";
const MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";
const CONTROLLER: &str = "endpointslice-controller.k8s.io";
const HEADLESS: &str = "service.kubernetes.io/headless";
const ZONE: &str = "topology.kubernetes.io/zone";

/// The service of a slice, as `namespace/name`.
pub fn service_of(slice: &EndpointSlice) -> Option<String> {
    let name = labels::of(&slice.metadata.labels).get(SERVICE_NAME)?;
    Some(format!("{}/{name}", slice.metadata.namespace.as_deref().unwrap_or_default()))
}

pub(crate) fn managed_by<'a>(slice: &'a EndpointSlice) -> &'a str {
    labels::of(&slice.metadata.labels).get(MANAGED_BY).map_or("", String::as_str)
}

pub(crate) fn publishes_not_ready(service: &Service) -> bool {
    service.spec.as_ref().and_then(|spec| spec.publish_not_ready_addresses).unwrap_or(false)
}

/// The pod's address of a family.
pub(crate) fn pod_ip(pod: &PodView, v6: bool) -> Option<&str> {
    let listed = pod.status.pod_ips.iter().map(|ip| ip.ip.as_str()).find(|ip| ip.contains(':') == v6);
    listed.or_else(|| pod.status.pod_ip.as_deref().filter(|ip| !ip.is_empty() && ip.contains(':') == v6))
}

/// The pod behind an endpoint.
pub(crate) fn pod_reference(pod: &PodView) -> ObjectReference {
    ObjectReference {
        kind: Some("Pod".into()),
        namespace: pod.metadata.namespace.clone(),
        name: pod.metadata.name.clone(),
        uid: pod.metadata.uid.clone(),
        ..ObjectReference::default()
    }
}

/// The name by which DNS knows a pod of this service.
pub(crate) fn hostname(service: &Service, pod: &PodView) -> Option<String> {
    let named = pod.spec.hostname.as_ref().filter(|name| !name.is_empty())?;
    let same = pod.spec.subdomain.is_some() && pod.spec.subdomain == service.metadata.name && pod.metadata.namespace == service.metadata.namespace;
    same.then(|| named.clone())
}

/// The number of a service's target port on a pod; none if the pod has no port of that name.
pub(crate) fn resolve_port(port: &ServicePort, pod: &PodView) -> Option<i32> {
    match &port.target_port {
        None => Some(port.port),
        Some(IntOrString::Int(0)) => Some(port.port),
        Some(IntOrString::Int(number)) => Some(*number),
        Some(IntOrString::String(name)) => {
            let protocol = port.protocol.as_deref().unwrap_or("TCP");
            let sidecars = pod.spec.init_containers.iter().filter(|container| container.restart_policy.as_deref() == Some("Always"));
            let mut offered = pod.spec.containers.iter().chain(sidecars).flat_map(|container| &container.ports);
            let same = |have: &&crate::pod::Port| have.name.as_deref() == Some(name) && have.protocol.as_deref().unwrap_or("TCP") == protocol;
            offered.find(same).map(|port| port.container_port)
        }
    }
}

fn endpoint(service: &Service, pod: &PodView, ip: &str, node: Option<&Node>) -> Endpoint {
    let publish = publishes_not_ready(service);
    let serving = pod.ready();
    let terminating = pod.deleting();
    let zone = node.and_then(|node| labels::of(&node.metadata.labels).get(ZONE).cloned());
    let distribution = service.spec.as_ref().and_then(|spec| spec.traffic_distribution.as_deref());
    let for_zones = zone.as_ref().filter(|_| matches!(distribution, Some("PreferClose" | "PreferSameZone" | "PreferSameNode")));
    let for_nodes = pod.spec.node_name.as_ref().filter(|_| distribution == Some("PreferSameNode"));
    let hints = (for_zones.is_some() || for_nodes.is_some()).then(|| EndpointHints {
        for_zones: for_zones.map(|name| vec![ForZone { name: name.clone() }]),
        for_nodes: for_nodes.map(|name| vec![ForNode { name: name.clone() }]),
    });
    Endpoint {
        addresses: vec![ip.to_owned()],
        conditions: Some(EndpointConditions {
            ready: Some(publish || serving && !terminating),
            serving: Some(serving),
            terminating: Some(terminating),
        }),
        deprecated_topology: None,
        hints,
        hostname: hostname(service, pod),
        node_name: pod.spec.node_name.clone(),
        target_ref: Some(pod_reference(pod)),
        zone,
    }
}

/// The endpoints of a service, grouped by address family and by the ports that the pods offer.
fn groups(service: &Service, pods: &[Arc<PodView>], node: impl Fn(&str) -> Option<Arc<Node>>) -> Vec<Group> {
    let Some(spec) = &service.spec else { return Vec::new() };
    let families = spec.ip_families.clone().filter(|families| !families.is_empty()).unwrap_or_else(|| vec!["IPv4".into()]);
    let mut groups: BTreeMap<(String, String), Group> = BTreeMap::new();
    for family in &families {
        // A family without a pod still gets a slice, so that readers know the service is looked after.
        let mut any = false;
        for pod in pods.iter().filter(|pod| !pod.finished()) {
            let Some(ip) = pod_ip(pod, family == "IPv6") else { continue };
            let ports: Vec<EndpointPort> = spec.ports.iter().flatten().filter_map(|port| {
                Some(EndpointPort {
                    name: Some(port.name.clone().unwrap_or_default()),
                    port: Some(resolve_port(port, pod)?),
                    protocol: Some(port.protocol.clone().unwrap_or_else(|| "TCP".into())),
                    app_protocol: port.app_protocol.clone(),
                })
            }).collect();
            any = true;
            let key = (family.clone(), pack::ports_key(&ports));
            let group = groups.entry(key).or_insert_with(|| Group { address_type: family.clone(), ports, endpoints: Vec::new() });
            group.endpoints.push(endpoint(service, pod, ip, node(pod.node()).as_deref()));
        }
        if !any {
            groups.insert((family.clone(), String::new()), Group { address_type: family.clone(), ports: Vec::new(), endpoints: Vec::new() });
        }
    }
    groups.into_values().collect()
}

/// Labels of a service's slices: the service's own, and ours.
fn slice_labels(service: &Service) -> BTreeMap<String, String> {
    let mut labels = service.metadata.labels.clone().unwrap_or_default();
    labels.retain(|key, _| ![SERVICE_NAME, MANAGED_BY, HEADLESS].contains(&key.as_str()));
    if service.spec.as_ref().and_then(|spec| spec.cluster_ip.as_deref()) == Some("None") {
        labels.insert(HEADLESS.into(), String::new());
    }
    labels.insert(SERVICE_NAME.into(), service.metadata.name.clone().unwrap_or_default());
    labels.insert(MANAGED_BY.into(), CONTROLLER.into());
    labels
}

struct Controller {
    client: kube::Client,
    recorder: Recorder,
    services: Informer<Service>,
    pods: Informer<PodView>,
    nodes: Informer<Node>,
    slices: Informer<EndpointSlice>,
    expectations: Arc<Expectations<Key>>,
    per_slice: usize,
}

impl Controller {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let existing: Vec<_> = self.slices.by_index("service", &key.to_string()).into_iter().filter(|slice| managed_by(slice) == CONTROLLER).collect();
        let Some(service) = self.services.get(&key) else {
            self.expectations.forget(&key);
            // The collector follows owner references; those without one would stay.
            for slice in existing.iter().filter(|slice| slice.metadata.owner_references.is_none()) {
                write::delete(&self.client, &write::path(&**slice), Delete::default()).await?;
            }
            return Ok(Action::Done);
        };
        let selector = service.spec.as_ref().and_then(|spec| spec.selector.clone()).unwrap_or_default();
        let external = service.spec.as_ref().and_then(|spec| spec.type_.as_deref()) == Some("ExternalName");
        if selector.is_empty() || external || service.metadata.deletion_timestamp.is_some() {
            return Ok(Action::Done);
        }
        if let Some(left) = self.expectations.pending(&key) {
            return Ok(Action::RequeueAfter(left));
        }
        let pods: Vec<_> = self.pods.namespace(key.ns()).into_iter().filter(|pod| labels::matches_map(&selector, pod.labels())).collect();
        let wanted = groups(&service, &pods, |name| self.nodes.get(&Key::cluster(name)));
        let labels = slice_labels(&service);
        let steps = pack::plan(&existing, wanted, &labels, self.per_slice);
        let template = ObjectMeta {
            generate_name: Some(format!("{}-", service.metadata.name.as_deref().unwrap_or_default())),
            namespace: service.metadata.namespace.clone(),
            owner_references: Some(vec![owner::reference(&*service)]),
            labels: Some(labels),
            ..ObjectMeta::default()
        };
        let result = apply(&self.client, &self.expectations, &key, &template, steps).await;
        match result {
            Ok(()) => Ok(Action::Done),
            Err(error) if error.is_namespace_terminating() => Ok(Action::Done),
            Err(error) => {
                if !error.is_conflict() {
                    let message = format!("Error updating Endpoint Slices for Service {key}: {}", write::message(&error));
                    self.recorder.event(&events::reference(&*service), EventType::Warning, "FailedToUpdateEndpointSlices", message);
                }
                Err(error)
            }
        }
    }
}

/// Carries out the steps. `template`: metadata of slices that are made.
pub(crate) async fn apply(client: &kube::Client, open: &Expectations<Key>, key: &Key, template: &ObjectMeta, steps: Vec<Step>) -> Result<(), Error> {
    for step in steps {
        match step {
            Step::Create(mut slice) => {
                slice.metadata = template.clone();
                open.expect_creations(key, 1);
                let made: Result<EndpointSlice, Error> = write::create(client, &write::collection_path::<EndpointSlice>(key.ns()), &write::wire(&*slice)).await;
                if let Err(error) = made {
                    open.creation_observed(key);
                    return Err(error);
                }
            }
            Step::Update(mut slice) => {
                slice.metadata.labels = template.labels.clone();
                slice.metadata.owner_references = template.owner_references.clone();
                let _: EndpointSlice = write::update(client, &*slice).await?;
            }
            Step::Delete(slice) => {
                write::delete(client, &write::path(&*slice), Delete { uid: slice.metadata.uid.as_deref(), ..Delete::default() }).await?;
            }
        }
    }
    Ok(())
}

/// What of a pod services care about.
fn differs(old: &PodView, new: &PodView) -> bool {
    let ips = |pod: &PodView| pod.status.pod_ips.iter().map(|ip| ip.ip.clone()).collect::<Vec<_>>();
    ips(old) != ips(new)
        || old.status.pod_ip != new.status.pod_ip
        || old.node() != new.node()
        || old.ready() != new.ready()
        || old.deleting() != new.deleting()
        || old.finished() != new.finished()
        || old.metadata.labels != new.metadata.labels
        || old.metadata.uid != new.metadata.uid
}

/// Wakes services when they change, and when a pod that they select (or selected) changes in a way that matters.
pub(crate) fn wake_services(services: &Informer<Service>, pods: &Informer<PodView>, queue: &Queue<Key>) {
    {
        let queue = queue.clone();
        services.on_change(move |change| queue.add(Key::of(&**change.object())));
    }
    let (services, queue) = (services.clone(), queue.clone());
    pods.on_change(move |change| {
        if let (Some(old), Some(new)) = (&change.old, &change.new)
            && !differs(old, new)
        {
            return;
        }
        let sides: Vec<&Arc<PodView>> = change.old.iter().chain(&change.new).collect();
        for service in services.namespace(change.object().namespace()) {
            let Some(selector) = service.spec.as_ref().and_then(|spec| spec.selector.as_ref()) else { continue };
            if sides.iter().any(|pod| labels::matches_map(selector, pod.labels())) {
                queue.add(Key::of(&*service));
            }
        }
    });
}

/// Wakes the service of a slice of ours when somebody else changed it, and notes those that we made.
pub(crate) fn watch_slices(slices: &Informer<EndpointSlice>, queue: &Queue<Key>, open: &Arc<Expectations<Key>>, manager: &'static str) {
    let (queue, open) = (queue.clone(), open.clone());
    slices.on_change(move |change: &Change<EndpointSlice>| {
        let ours = change.old.iter().chain(&change.new).any(|slice| managed_by(slice) == manager);
        let Some(key) = service_of(change.object()).filter(|_| ours) else { return };
        let key = Key::parse(&key);
        if change.old.is_none() {
            open.creation_observed(&key);
        }
        queue.add(key);
    });
}

/// Wakes what depends on an object's key.
pub(crate) fn wake<K: Cached + kube::Resource>(informer: &Informer<K>, queue: &Queue<Key>) {
    let queue = queue.clone();
    informer.on_change(move |change| queue.add(Key::of(&**change.object())));
}

/// The `endpointslice-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("endpoint_slice");
    let (services, pods, nodes, slices) = (context.services(), context.pods(), context.nodes(), context.endpoint_slices());
    let expectations: Arc<Expectations<Key>> = Arc::default();
    wake_services(&services, &pods, &queue);
    watch_slices(&slices, &queue, &expectations, CONTROLLER);
    {
        // A zone is read from the node; a node's change of zone touches the services of its pods.
        let (queue, services, pods) = (queue.clone(), services.clone(), pods.clone());
        nodes.on_change(move |change: &Change<Node>| {
            let zone = |node: &Option<Arc<Node>>| node.as_ref().and_then(|node| labels::of(&node.metadata.labels).get(ZONE).cloned());
            if zone(&change.old) == zone(&change.new) {
                return;
            }
            for pod in pods.by_index("node", change.object().metadata.name.as_deref().unwrap_or_default()) {
                for service in services.namespace(pod.namespace()) {
                    if service.spec.as_ref().and_then(|spec| spec.selector.as_ref()).is_some_and(|selector| labels::matches_map(selector, pod.labels())) {
                        queue.add(Key::of(&*service));
                    }
                }
            }
        });
    }
    let state = Arc::new(Controller {
        client: context.client.clone(),
        recorder: context.recorder("endpoint-slice-controller"),
        services,
        pods,
        nodes,
        slices,
        expectations,
        per_slice: context.config.max_endpoints_per_slice.clamp(1, 1000),
    });
    context.worker(queue, context.config.concurrent_service_endpoint_syncs, state, Controller::sync)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::tests::pod;
    use serde_json::{Value, json};

    fn check(service: Value, pods: &[Value], expected: &Value) {
        let service: Service = serde_json::from_value(service).expect("a service");
        let pods: Vec<_> = pods.iter().map(|value| Arc::new(pod(value.clone()))).collect();
        let node: Arc<Node> = Arc::new(serde_json::from_value(json!({"metadata": {"name": "n", "labels": {ZONE: "z"}}})).expect("a node"));
        let made = groups(&service, &pods, |name| (name == "n").then(|| node.clone()));
        let shown: Vec<Value> = made.iter().map(|group| json!([group.address_type, group.ports.iter().map(|p| p.port).collect::<Vec<_>>(),
            group.endpoints.iter().map(|e| {
                let c = e.conditions.clone().unwrap_or_default();
                format!("{} {}{}{} {}", e.addresses[0], if c.ready == Some(true) { "r" } else { "-" }, if c.serving == Some(true) { "s" } else { "-" }, if c.terminating == Some(true) { "t" } else { "-" }, e.zone.clone().unwrap_or_default())
            }).collect::<Vec<_>>()])).collect();
        assert_eq!(&json!(shown), expected);
    }

    fn web(name: &str, ip: &str, ready: bool, deleting: bool, port: i32) -> Value {
        let mut value = json!({"metadata": {"name": name}, "spec": {"nodeName": "n", "containers": [{"name": "c", "ports": [{"name": "http", "containerPort": port}]}]},
            "status": {"phase": "Running", "podIPs": [{"ip": ip}], "conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" }}]}});
        if deleting {
            value["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        }
        value
    }

    #[test]
    fn endpoints_of_pods() {
        let service = json!({"metadata": {"name": "s", "namespace": "ns"}, "spec": {"ipFamilies": ["IPv4"], "ports": [{"port": 80, "targetPort": "http"}]}});
        let pods = [web("a", "10.0.0.1", true, false, 8080), web("b", "10.0.0.2", false, false, 8080), web("c", "10.0.0.3", true, true, 8080), web("d", "10.0.0.4", true, false, 9090)];
        check(service.clone(), &pods, &json!([["IPv4", [8080], ["10.0.0.1 rs- z", "10.0.0.2 --- z", "10.0.0.3 -st z"]], ["IPv4", [9090], ["10.0.0.4 rs- z"]]]));
        let mut all = service.clone();
        all["spec"]["publishNotReadyAddresses"] = json!(true);
        check(all, &pods[1..3], &json!([["IPv4", [8080], ["10.0.0.2 r-- z", "10.0.0.3 rst z"]]]));
        let mut dual = service.clone();
        dual["spec"]["ipFamilies"] = json!(["IPv4", "IPv6"]);
        check(dual, &pods[..1], &json!([["IPv4", [8080], ["10.0.0.1 rs- z"]], ["IPv6", [], []]]));
        check(service, &[], &json!([["IPv4", [], []]]));
    }
}
