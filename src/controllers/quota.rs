//! Resource quotas: what of each limit is in use. Admission refuses; this counts, above all what was given back.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{PersistentVolumeClaim, ResourceQuota, ResourceQuotaStatus, ResourceRequirements, ScopedResourceSelectorRequirement, Service},
    apimachinery::pkg::api::resource::Quantity as Text,
};
use serde::Deserialize;
use windlass_api::quantity::{Format, Quantity};
use windlass_client::{
    informer::{Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker},
    discovery::{self, Resource},
    pod::{PodView, until},
    write::{self, ApiErrorExt},
};

/// Changes that come close together are counted once.
const SETTLE: Duration = Duration::from_millis(250);

type Usage = BTreeMap<String, Quantity>;

fn one() -> Quantity {
    Quantity::from_value(1, Format::DecimalSi)
}

fn parse(text: &Text) -> Quantity {
    text.0.parse().unwrap_or(Quantity::ZERO)
}

fn add(usage: &mut Usage, name: impl Into<String>, amount: Quantity) {
    let total = usage.entry(name.into()).or_insert(Quantity::ZERO);
    *total = if total.is_zero() { amount } else { *total + amount };
}

fn merge(usage: &mut Usage, other: Usage) {
    other.into_iter().for_each(|(name, amount)| add(usage, name, amount));
}

fn side(resources: Option<&ResourceRequirements>, limits: bool) -> Usage {
    let map = resources.and_then(|resources| if limits { resources.limits.as_ref() } else { resources.requests.as_ref() });
    map.into_iter().flatten().map(|(name, amount)| (name.clone(), parse(amount))).collect()
}

fn at_least(usage: &mut Usage, other: &Usage) {
    for (name, amount) in other {
        let have = usage.entry(name.clone()).or_insert(*amount);
        *have = (*have).max(*amount);
    }
}

/// What a pod asks for (or may take): the sum of its containers, or what its init containers need at their worst.
fn pod_total(pod: &PodView, limits: bool) -> Usage {
    let mut total = Usage::new();
    for container in &pod.spec.containers {
        merge(&mut total, side(container.resources.as_deref(), limits));
    }
    let (mut sidecars, mut peak) = (Usage::new(), Usage::new());
    for container in &pod.spec.init_containers {
        let mut own = side(container.resources.as_deref(), limits);
        if container.restart_policy.as_deref() == Some("Always") {
            merge(&mut sidecars, own);
            at_least(&mut peak, &sidecars);
        } else {
            merge(&mut own, sidecars.clone());
            at_least(&mut peak, &own);
        }
    }
    merge(&mut total, sidecars);
    at_least(&mut total, &peak);
    // Limits of the whole pod replace those of its parts.
    total.extend(side(pod.spec.resources.as_deref(), limits));
    for (name, amount) in &pod.spec.overhead {
        if !limits || total.contains_key(name) {
            add(&mut total, name.clone(), parse(amount));
        }
    }
    total
}

/// Whether a pod still counts: it runs, or is on its way out within its grace.
fn is_charged(pod: &PodView, now: Timestamp) -> bool {
    let overdue = pod.metadata.deletion_timestamp.as_ref().is_some_and(|deleted| {
        until(deleted.0, pod.metadata.deletion_grace_period_seconds.unwrap_or(0), now).is_none()
    });
    !pod.finished() && !overdue
}

fn pod_usage(pod: &PodView) -> Usage {
    let mut usage = Usage::new();
    add(&mut usage, "pods", one());
    add(&mut usage, "count/pods", one());
    for (name, amount) in pod_total(pod, false) {
        if matches!(name.as_str(), "cpu" | "memory" | "ephemeral-storage") || name.starts_with("hugepages-") {
            add(&mut usage, name.clone(), amount);
        }
        add(&mut usage, format!("requests.{name}"), amount);
    }
    for (name, amount) in pod_total(pod, true) {
        add(&mut usage, format!("limits.{name}"), amount);
    }
    usage
}

fn is_best_effort(pod: &PodView) -> bool {
    let counts = |resources: Option<&ResourceRequirements>| {
        [false, true].into_iter().flat_map(|limits| side(resources, limits)).any(|(name, amount)| (name == "cpu" || name == "memory") && !amount.is_zero())
    };
    let mut containers = pod.spec.containers.iter().chain(&pod.spec.init_containers);
    !containers.any(|container| counts(container.resources.as_deref())) && !counts(pod.spec.resources.as_deref())
}

fn crosses_namespaces(pod: &PodView) -> bool {
    let Some(affinity) = &pod.spec.affinity else { return false };
    fn has(value: &serde_json::Value) -> bool {
        match value {
            serde_json::Value::Object(map) => {
                let listed = map.get("namespaces").and_then(|list| list.as_array()).is_some_and(|list| !list.is_empty());
                listed || map.get("namespaceSelector").is_some_and(|selector| !selector.is_null()) || map.values().any(has)
            }
            serde_json::Value::Array(items) => items.iter().any(has),
            _ => false,
        }
    }
    affinity.pod_affinity.iter().chain(&affinity.pod_anti_affinity).any(has)
}

fn in_scope(pod: &PodView, scope: &ScopedResourceSelectorRequirement) -> bool {
    let terminating = pod.spec.active_deadline_seconds.is_some_and(|seconds| seconds >= 0);
    match scope.scope_name.as_str() {
        "Terminating" => terminating,
        "NotTerminating" => !terminating,
        "BestEffort" => is_best_effort(pod),
        "NotBestEffort" => !is_best_effort(pod),
        "CrossNamespacePodAffinity" => crosses_namespaces(pod),
        "PriorityClass" => {
            let class = pod.spec.priority_class_name.as_deref().filter(|class| !class.is_empty());
            let listed = class.is_some_and(|class| scope.values.iter().flatten().any(|value| value == class));
            match scope.operator.as_str() {
                "In" => listed,
                "NotIn" => !listed,
                "Exists" => class.is_some(),
                "DoesNotExist" => class.is_none(),
                _ => false,
            }
        }
        _ => false,
    }
}

/// All scopes of a quota, the short form included.
fn scopes(quota: &ResourceQuota) -> Vec<ScopedResourceSelectorRequirement> {
    let spec = quota.spec.clone().unwrap_or_default();
    let short = spec.scopes.into_iter().flatten().map(|scope_name| ScopedResourceSelectorRequirement { scope_name, operator: "Exists".into(), values: None });
    short.chain(spec.scope_selector.and_then(|selector| selector.match_expressions).into_iter().flatten()).collect()
}

fn service_usage(service: &Service) -> Usage {
    let mut usage = Usage::new();
    add(&mut usage, "services", one());
    add(&mut usage, "count/services", one());
    let Some(spec) = &service.spec else { return usage };
    let ports = spec.ports.as_deref().unwrap_or_default().len() as i64;
    match spec.type_.as_deref() {
        Some("NodePort") => add(&mut usage, "services.nodeports", Quantity::from_value(ports, Format::DecimalSi)),
        Some("LoadBalancer") => {
            add(&mut usage, "services.loadbalancers", one());
            let allocated = if spec.allocate_load_balancer_node_ports == Some(false) {
                spec.ports.iter().flatten().filter(|port| port.node_port.is_some_and(|port| port != 0)).count() as i64
            } else {
                ports
            };
            add(&mut usage, "services.nodeports", Quantity::from_value(allocated, Format::DecimalSi));
        }
        _ => {}
    }
    usage
}

fn claim_usage(claim: &PersistentVolumeClaim) -> Usage {
    let mut usage = Usage::new();
    let spec = claim.spec.as_ref();
    let class = spec.and_then(|spec| spec.storage_class_name.as_deref()).filter(|class| !class.is_empty());
    let requested = spec.and_then(|spec| spec.resources.as_ref()?.requests.as_ref()?.get("storage")).map(parse);
    add(&mut usage, "persistentvolumeclaims", one());
    add(&mut usage, "count/persistentvolumeclaims", one());
    if let Some(class) = class {
        add(&mut usage, format!("{class}.storageclass.storage.k8s.io/persistentvolumeclaims"), one());
    }
    if let Some(requested) = requested {
        add(&mut usage, "requests.storage", requested);
        if let Some(class) = class {
            add(&mut usage, format!("{class}.storageclass.storage.k8s.io/requests.storage"), requested);
        }
    }
    usage
}

/// How a name in a quota is counted.
#[derive(Debug, PartialEq, Eq)]
enum Source {
    Pods,
    Services,
    Claims,
    /// By the number of objects of this resource.
    Count { plural: String, group: String },
}

fn source(name: &str) -> Option<Source> {
    let counted = |plural: &str, group: &str| Some(Source::Count { plural: plural.to_owned(), group: group.to_owned() });
    match name {
        "pods" | "count/pods" | "cpu" | "memory" | "ephemeral-storage" => Some(Source::Pods),
        "services" | "count/services" | "services.nodeports" | "services.loadbalancers" => Some(Source::Services),
        "persistentvolumeclaims" | "count/persistentvolumeclaims" | "requests.storage" => Some(Source::Claims),
        "configmaps" | "secrets" | "replicationcontrollers" | "resourcequotas" => counted(name, ""),
        _ if name.contains(".storageclass.storage.k8s.io/") => Some(Source::Claims),
        _ if name.starts_with("requests.") || name.starts_with("limits.") || name.starts_with("hugepages-") => Some(Source::Pods),
        _ => name.strip_prefix("count/").and_then(|rest| {
            let (plural, group) = rest.split_once('.').unwrap_or((rest, ""));
            counted(plural, group)
        }),
    }
}

#[derive(Deserialize)]
struct Metadata {
    #[serde(default, deserialize_with = "discovery::null_as_default")]
    items: Vec<serde::de::IgnoredAny>,
}

struct Controller {
    client: kube::Client,
    quotas: Informer<ResourceQuota>,
    pods: Informer<PodView>,
    services: Informer<Service>,
    claims: Informer<PersistentVolumeClaim>,
}

impl Controller {
    async fn count(&self, resources: &[Resource], plural: &str, group: &str, namespace: &str) -> Result<Option<Quantity>, Error> {
        let Some(resource) = resources.iter().find(|resource| resource.plural == plural && resource.group == group && resource.namespaced) else { return Ok(None) };
        let listed: Option<Metadata> = write::get_as(&self.client, &resource.path(namespace), crate::namespace::METADATA_LIST).await?;
        Ok(listed.map(|listed| Quantity::from_value(listed.items.len() as i64, Format::DecimalSi)))
    }

    async fn used(&self, quota: &ResourceQuota, namespace: &str) -> Result<Usage, Error> {
        let hard = quota.spec.as_ref().and_then(|spec| spec.hard.clone()).unwrap_or_default();
        let scopes = scopes(quota);
        let now = Timestamp::now();
        let mut usage = Usage::new();
        for pod in self.pods.namespace(namespace) {
            if is_charged(&pod, now) && scopes.iter().all(|scope| in_scope(&pod, scope)) {
                merge(&mut usage, pod_usage(&pod));
            }
        }
        // A scope speaks of pods: a quota with one counts nothing else.
        if scopes.is_empty() {
            self.services.namespace(namespace).iter().for_each(|service| merge(&mut usage, service_usage(service)));
            self.claims.namespace(namespace).iter().for_each(|claim| merge(&mut usage, claim_usage(claim)));
        }
        let mut known: Option<Vec<Resource>> = None;
        let mut used = Usage::new();
        for name in hard.keys() {
            let amount = match source(name) {
                Some(Source::Count { plural, group }) => {
                    if known.is_none() {
                        known = Some(discovery::discover(&self.client).await?.resources);
                    }
                    self.count(known.as_deref().unwrap_or_default(), &plural, &group, namespace).await?
                }
                Some(_) => Some(usage.get(name).copied().unwrap_or(Quantity::ZERO)),
                None => None,
            };
            used.extend(amount.map(|amount| (name.clone(), amount)));
        }
        Ok(used)
    }

    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(quota) = self.quotas.get(&key) else { return Ok(Action::Done) };
        let used = self.used(&quota, key.ns()).await?;
        let hard = quota.spec.as_ref().and_then(|spec| spec.hard.clone());
        let known = quota.status.clone().unwrap_or_default();
        let same_used = used.iter().all(|(name, amount)| known.used.as_ref().and_then(|used| used.get(name)).is_some_and(|have| parse(have) == *amount))
            && known.used.as_ref().map_or(0, BTreeMap::len) == used.len();
        if same_used && known.hard == hard {
            return Ok(Action::Done);
        }
        let used = used.into_iter().map(|(name, amount)| (name, Text(amount.to_string()))).collect();
        let wanted = ResourceQuota { status: Some(ResourceQuotaStatus { hard, used: Some(used) }), ..(*quota).clone() };
        let written: Result<ResourceQuota, Error> = write::update_status(&self.client, &wanted).await;
        match written {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(Action::Done),
        }
    }
}

/// The `resourcequota-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("resourcequota_primary");
    let quotas = context.resource_quotas();
    {
        let queue = queue.clone();
        quotas.on_change(move |change| {
            let hard = |quota: &Option<Arc<ResourceQuota>>| quota.as_ref().map(|quota| (quota.spec.clone(), quota.status.clone().unwrap_or_default().hard));
            if hard(&change.old) != hard(&change.new) {
                queue.add(Key::of(&**change.object()));
            }
        });
    }
    // The collector's watches see every object come and go.
    let limited = {
        let quotas = quotas.clone();
        move |namespace: &str| !quotas.namespace(namespace).is_empty()
    };
    let wake = {
        let (queue, quotas) = (queue.clone(), quotas.clone());
        move |namespace: &str| {
            if !namespace.is_empty() {
                quotas.namespace(namespace).iter().for_each(|quota| queue.add_after(Key::of(&**quota), SETTLE));
            }
        }
    };
    context.on_objects(wake.clone());
    let (pods, services, claims) = (context.pods(), context.services(), context.claims());
    {
        let (wake, limited) = (wake.clone(), limited.clone());
        pods.on_change(move |change| {
            if !limited(change.object().namespace()) {
                return;
            }
            let charged = |pod: &Option<Arc<PodView>>| pod.as_ref().filter(|pod| is_charged(pod, Timestamp::now())).map(|pod| pod_usage(pod));
            if charged(&change.old) != charged(&change.new) {
                wake(change.object().namespace());
            }
        });
    }
    {
        let wake = wake.clone();
        services.on_change(move |change| {
            if change.old.as_deref().map(service_usage) != change.new.as_deref().map(service_usage) {
                wake(change.object().metadata.namespace.as_deref().unwrap_or_default());
            }
        });
    }
    claims.on_change(move |change| {
        if change.old.as_deref().map(claim_usage) != change.new.as_deref().map(claim_usage) {
            wake(change.object().metadata.namespace.as_deref().unwrap_or_default());
        }
    });
    let state = Arc::new(Controller { client: context.client.clone(), quotas, pods, services, claims });
    context.worker(queue, context.config.concurrent_resource_quota_syncs, state, Controller::sync)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::tests::pod;
    use serde_json::{Value, json};

    fn shown(usage: &Usage) -> Value {
        json!(usage.iter().map(|(name, amount)| (name.clone(), amount.to_string())).collect::<BTreeMap<_, _>>())
    }

    #[test]
    fn pods_cost_the_more_of_main_and_init() {
        let value = pod(json!({"metadata": {"name": "p"}, "spec": {
            "containers": [{"name": "a", "resources": {"requests": {"cpu": "100m"}, "limits": {"memory": "1Gi"}}}, {"name": "b", "resources": {"requests": {"cpu": "200m"}}}],
            "initContainers": [{"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "50m"}}}, {"name": "i", "resources": {"requests": {"cpu": "500m"}}}]}}));
        assert_eq!(shown(&pod_usage(&value)), json!({"pods": "1", "count/pods": "1", "cpu": "550m", "requests.cpu": "550m", "limits.memory": "1Gi"}));
    }

    #[test]
    fn scopes_pick_pods() {
        let plain = pod(json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "a"}]}}));
        let timed = pod(json!({"metadata": {"name": "p"}, "spec": {"activeDeadlineSeconds": 5, "priorityClassName": "high", "containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}}]}}));
        let scope = |name: &str, operator: &str, values: &[&str]| ScopedResourceSelectorRequirement {
            scope_name: name.into(), operator: operator.into(), values: Some(values.iter().map(|v| v.to_string()).collect()) };
        for (scope, on_plain, on_timed) in [
            (scope("Terminating", "Exists", &[]), false, true),
            (scope("NotTerminating", "Exists", &[]), true, false),
            (scope("BestEffort", "Exists", &[]), true, false),
            (scope("PriorityClass", "In", &["high"]), false, true),
            (scope("PriorityClass", "NotIn", &["high"]), true, false),
            (scope("CrossNamespacePodAffinity", "Exists", &[]), false, false),
        ] {
            assert_eq!((in_scope(&plain, &scope), in_scope(&timed, &scope)), (on_plain, on_timed), "{}", scope.scope_name);
        }
    }

    #[test]
    fn names_have_sources() {
        for (name, expected) in [
            ("requests.cpu", Some(Source::Pods)),
            ("gold.storageclass.storage.k8s.io/requests.storage", Some(Source::Claims)),
            ("count/deployments.apps", Some(Source::Count { plural: "deployments".into(), group: "apps".into() })),
            ("configmaps", Some(Source::Count { plural: "configmaps".into(), group: String::new() })),
            ("nonsense", None),
        ] {
            assert_eq!(source(name), expected, "{name}");
        }
        let service: Service = serde_json::from_value(json!({"metadata": {"name": "s"}, "spec": {"type": "LoadBalancer", "ports": [{"port": 1}, {"port": 2}]}})).expect("a service");
        assert_eq!(shown(&service_usage(&service)), json!({"services": "1", "count/services": "1", "services.loadbalancers": "1", "services.nodeports": "2"}));
    }
}
