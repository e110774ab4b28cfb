//! ResourceQuota: what a namespace may hold, charged before the object is stored.
//!
//! All quotas that match are checked first, then each is charged by compare-and-swap on its status. What a later
//! failure of the request leaves charged, the quota controller takes back when it counts again.

use super::pods::{self, Resources, items, resources, text};
use super::{AdmissionRequest, Operation, Plugin};
use crate::cluster::{Cluster, Gr};
use async_trait::async_trait;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use windlass_api::quantity::{Format, Quantity};
use windlass_api::{ApiError, meta};

const QUOTAS: Gr = Gr("", "resourcequotas");

pub struct ResourceQuota {
    pub cluster: Arc<dyn Cluster>,
}

/// Resources that are never counted.
const IGNORED: [(&str, &str); 10] = [
    ("", "bindings"),
    ("", "componentstatuses"),
    ("", "events"),
    ("events.k8s.io", "events"),
    ("authentication.k8s.io", "tokenreviews"),
    ("authentication.k8s.io", "selfsubjectreviews"),
    ("authorization.k8s.io", "subjectaccessreviews"),
    ("authorization.k8s.io", "selfsubjectaccessreviews"),
    ("authorization.k8s.io", "localsubjectaccessreviews"),
    ("authorization.k8s.io", "selfsubjectrulesreviews"),
];

/// How one kind of object is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Evaluator<'a> {
    Pods,
    Services,
    Claims,
    /// By number only: `count/<plural>.<group>`, and an old name for some.
    Count(&'a str, &'a str),
}

fn whole(count: usize) -> Quantity {
    Quantity::from_value(i64::try_from(count).unwrap_or(i64::MAX), Format::DecimalSi)
}

const POD_RESOURCES: [&str; 11] = [
    "count/pods",
    "pods",
    "cpu",
    "memory",
    "ephemeral-storage",
    "requests.cpu",
    "requests.memory",
    "requests.ephemeral-storage",
    "limits.cpu",
    "limits.memory",
    "limits.ephemeral-storage",
];

fn is_native(name: &str) -> bool {
    !name.contains('/') || name.split('/').next().is_some_and(|domain| domain.ends_with("kubernetes.io"))
}

fn is_extended(name: &str) -> bool {
    (!is_native(name) && !name.starts_with("requests.")) || name.starts_with("deviceclass.resource.kubernetes.io/")
}

/// What requests and limits count for, under the names that quotas use.
fn compute_usage(requests: &Resources, limits: &Resources) -> Resources {
    let mut usage = Resources::from([("pods".to_owned(), whole(1))]);
    for name in ["cpu", "memory", "ephemeral-storage"] {
        if let Some(request) = requests.get(name) {
            usage.insert(name.to_owned(), *request);
            usage.insert(format!("requests.{name}"), *request);
        }
        if let Some(limit) = limits.get(name) {
            usage.insert(format!("limits.{name}"), *limit);
        }
    }
    for (name, request) in requests {
        if name.starts_with("hugepages-") {
            usage.insert(name.clone(), *request);
        }
        if name.starts_with("hugepages-") || is_extended(name) {
            usage.insert(format!("requests.{name}"), *request);
        }
    }
    usage
}

fn terminating(pod: &Value) -> bool {
    pod["spec"]["activeDeadlineSeconds"].as_i64().is_some_and(|seconds| seconds >= 0)
}

fn best_effort(pod: &Value) -> bool {
    let spec = &pod["spec"];
    let set = |holder: &Value| {
        ["requests", "limits"].iter().any(|which| {
            let list = resources(&holder["resources"][which]);
            ["cpu", "memory"].iter().any(|name| list.get(*name).is_some_and(|quantity| !quantity.is_zero()))
        })
    };
    !set(spec) && !items(spec, "containers").chain(items(spec, "initContainers")).any(set)
}

fn crosses_namespaces(pod: &Value) -> bool {
    let crosses = |term: &Value| items(term, "namespaces").len() > 0 || term["namespaceSelector"].is_object();
    ["podAffinity", "podAntiAffinity"].iter().any(|kind| {
        let affinity = &pod["spec"]["affinity"][kind];
        items(affinity, "requiredDuringSchedulingIgnoredDuringExecution").any(crosses)
            || items(affinity, "preferredDuringSchedulingIgnoredDuringExecution")
                .any(|weighted| crosses(&weighted["podAffinityTerm"]))
    })
}

/// Whether values satisfy a scope's `In`, `NotIn`, `Exists` or `DoesNotExist`.
fn selects(scope: &Value, values: &[&str]) -> bool {
    let wanted = |value: &&str| items(scope, "values").any(|want| want == *value);
    match text(scope, "operator") {
        "Exists" | "" => !values.is_empty(),
        "DoesNotExist" => values.is_empty(),
        "In" => values.iter().any(wanted),
        "NotIn" => values.is_empty() || values.iter().any(|value| !wanted(value)),
        _ => false,
    }
}

fn attribute_classes(claim: &Value) -> Vec<&str> {
    let names = [
        text(&claim["spec"], "volumeAttributesClassName"),
        text(&claim["status"], "currentVolumeAttributesClassName"),
        text(&claim["status"]["modifyVolumeStatus"], "targetVolumeAttributesClassName"),
    ];
    let mut names: Vec<&str> = names.into_iter().filter(|name| !name.is_empty()).collect();
    names.dedup();
    names
}

fn claim_class(claim: &Value) -> &str {
    let annotated = meta::annotation(claim, "volume.beta.kubernetes.io/storage-class");
    annotated.unwrap_or_else(|| text(&claim["spec"], "storageClassName"))
}

impl Evaluator<'_> {
    fn of<'a>(group: &'a str, plural: &'a str) -> Option<Evaluator<'a>> {
        match (group, plural) {
            ("", "pods") => Some(Evaluator::Pods),
            ("", "services") => Some(Evaluator::Services),
            ("", "persistentvolumeclaims") => Some(Evaluator::Claims),
            pair if IGNORED.contains(&pair) => None,
            (group, plural) => Some(Evaluator::Count(group, plural)),
        }
    }

    fn handles(self, request: &AdmissionRequest<'_>) -> bool {
        let (new, old) = (request.new_object(), request.old.unwrap_or(&Value::Null));
        match (self, request.subresource, request.operation) {
            (Evaluator::Count(..), "", operation) => operation == Operation::Create,
            (_, "", Operation::Create) => true,
            (Evaluator::Services | Evaluator::Claims, "", Operation::Update) => true,
            (Evaluator::Pods, "", Operation::Update) => terminating(new) != terminating(old),
            (Evaluator::Pods, "resize", Operation::Update) => true,
            (Evaluator::Claims, "status", Operation::Update) => {
                let allocated = |claim: &Value| claim["status"]["allocatedResources"]["storage"].clone();
                allocated(new) != allocated(old) || attribute_classes(new) != attribute_classes(old)
            }
            _ => false,
        }
    }

    fn counted_as(self) -> Vec<String> {
        match self {
            Evaluator::Pods => vec!["count/pods".to_owned()],
            Evaluator::Services => vec!["count/services".to_owned()],
            Evaluator::Claims => vec!["count/persistentvolumeclaims".to_owned()],
            Evaluator::Count("", plural) => {
                let mut names = vec![format!("count/{plural}")];
                if matches!(plural, "configmaps" | "resourcequotas" | "replicationcontrollers" | "secrets") {
                    names.push(plural.to_owned());
                }
                names
            }
            Evaluator::Count(group, plural) => vec![format!("count/{plural}.{group}")],
        }
    }

    /// Whether a quota's resource name is about this kind.
    fn tracks(self, name: &str) -> bool {
        match self {
            Evaluator::Pods => {
                POD_RESOURCES.contains(&name)
                    || name.starts_with("hugepages-")
                    || name.starts_with("requests.hugepages-")
                    || name.strip_prefix("requests.").is_some_and(is_extended)
            }
            Evaluator::Services => {
                matches!(name, "count/services" | "services" | "services.nodeports" | "services.loadbalancers")
            }
            Evaluator::Claims => {
                matches!(name, "count/persistentvolumeclaims" | "persistentvolumeclaims" | "requests.storage")
                    || name.ends_with(".storageclass.storage.k8s.io/persistentvolumeclaims")
                    || name.ends_with(".storageclass.storage.k8s.io/requests.storage")
            }
            Evaluator::Count(..) => self.counted_as().iter().any(|known| known == name),
        }
    }

    fn in_scope(self, scope: &Value, object: &Value) -> bool {
        match (self, text(scope, "scopeName")) {
            (Evaluator::Pods, "Terminating") => terminating(object),
            (Evaluator::Pods, "NotTerminating") => !terminating(object),
            (Evaluator::Pods, "BestEffort") => best_effort(object),
            (Evaluator::Pods, "NotBestEffort") => !best_effort(object),
            (Evaluator::Pods, "PriorityClass") => {
                let class = text(&object["spec"], "priorityClassName");
                selects(scope, if class.is_empty() { &[] } else { std::slice::from_ref(&class) })
            }
            (Evaluator::Pods, "CrossNamespacePodAffinity") => crosses_namespaces(object),
            (Evaluator::Claims, "VolumeAttributesClass") => selects(scope, &attribute_classes(object)),
            _ => false,
        }
    }

    /// The quota's tracked resource names if it is about this object at all.
    fn matched(self, quota: &Value, object: &Value) -> Option<BTreeSet<String>> {
        let hard = quota["status"]["hard"].as_object()?;
        let tracked: BTreeSet<String> = hard.keys().filter(|name| self.tracks(name)).cloned().collect();
        let plain = items(&quota["spec"], "scopes").map(|name| json!({"scopeName": name, "operator": "Exists"}));
        let selector = items(&quota["spec"]["scopeSelector"], "matchExpressions").cloned();
        let in_scopes = plain.chain(selector).all(|scope| self.in_scope(&scope, object));
        (!tracked.is_empty() && in_scopes).then_some(tracked)
    }

    fn usage(self, object: &Value) -> Resources {
        let mut usage: Resources = self.counted_as().into_iter().map(|name| (name, whole(1))).collect();
        match self {
            Evaluator::Pods => usage.extend(pod_usage(object)),
            Evaluator::Services => usage.extend(service_usage(object)),
            Evaluator::Claims => usage.extend(claim_usage(object)),
            Evaluator::Count(..) => {}
        }
        usage
    }
}

fn pod_usage(pod: &Value) -> Resources {
    if matches!(text(&pod["status"], "phase"), "Failed" | "Succeeded") {
        return Resources::new();
    }
    let spec = &pod["spec"];
    let overhead = resources(&spec["overhead"]);
    let mut requests = pods::total(spec, "requests");
    pods::add(&mut requests, &overhead);
    let mut limits = pods::total(spec, "limits");
    for (name, quantity) in overhead {
        if let Some(limit) = limits.get_mut(&name).filter(|limit| !limit.is_zero()) {
            *limit += quantity;
        }
    }
    compute_usage(&requests, &limits)
}

fn service_usage(service: &Value) -> Resources {
    let spec = &service["spec"];
    let ports = items(spec, "ports").len();
    let chosen = items(spec, "ports").filter(|port| port["nodePort"].as_i64().unwrap_or_default() != 0).count();
    let (node_ports, balancers) = match text(spec, "type") {
        "NodePort" => (ports, 0),
        "LoadBalancer" if spec["allocateLoadBalancerNodePorts"] == false => (chosen, 1),
        "LoadBalancer" => (ports, 1),
        _ => (0, 0),
    };
    Resources::from([
        ("services".to_owned(), whole(1)),
        ("services.nodeports".to_owned(), whole(node_ports)),
        ("services.loadbalancers".to_owned(), whole(balancers)),
    ])
}

fn claim_usage(claim: &Value) -> Resources {
    const BY_CLASS: &str = ".storageclass.storage.k8s.io/";
    let class = claim_class(claim);
    let mut usage = Resources::from([("persistentvolumeclaims".to_owned(), whole(1))]);
    if !class.is_empty() {
        usage.insert(format!("{class}{BY_CLASS}persistentvolumeclaims"), whole(1));
    }
    let wanted = resources(&claim["spec"]["resources"]["requests"]).get("storage").copied();
    let allocated = resources(&claim["status"]["allocatedResources"]).get("storage").copied();
    if let Some(wanted) = wanted {
        let counted = allocated.filter(|allocated| *allocated > wanted).unwrap_or(wanted);
        // Storage is counted in whole bytes.
        let counted = Quantity::from_value(counted.value(), counted.format());
        usage.insert("requests.storage".to_owned(), counted);
        if !class.is_empty() {
            usage.insert(format!("{class}{BY_CLASS}requests.storage"), counted);
        }
    }
    usage
}

/// If cpu or memory is under quota, each container must say how much it takes (upstream regrets it, but keeps it).
fn unset(tracked: &BTreeSet<String>, pod: &Value) -> Option<String> {
    let spec = &pod["spec"];
    let pod_level = ["requests", "limits"].iter().any(|which| {
        let list = resources(&spec["resources"][which]);
        list.keys().any(|name| matches!(name.as_str(), "cpu" | "memory") || name.starts_with("hugepages-"))
    });
    if pod_level {
        return None;
    }
    const DEMANDED: [&str; 6] =
        ["cpu", "memory", "requests.cpu", "requests.memory", "limits.cpu", "limits.memory"];
    let mut missing: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for container in items(spec, "containers").chain(items(spec, "initContainers")) {
        let own = &container["resources"];
        let usage = compute_usage(&resources(&own["requests"]), &resources(&own["limits"]));
        for name in DEMANDED.iter().filter(|name| tracked.contains(**name) && !usage.contains_key(**name)) {
            missing.entry(name).or_default().insert(text(container, "name"));
        }
    }
    if missing.is_empty() {
        return None;
    }
    let shown = missing.into_iter().map(|(name, containers)| {
        let containers: Vec<&str> = containers.into_iter().collect();
        format!("{name} for: {}", containers.join(","))
    });
    Some(format!("must specify {}", shown.collect::<Vec<_>>().join("; ")))
}

fn pretty(list: &Resources, only: &BTreeSet<&String>) -> String {
    let shown = list.iter().filter(|(name, _)| only.contains(name));
    shown.map(|(name, quantity)| format!("{name}={quantity}")).collect::<Vec<_>>().join(",")
}

/// What the change adds to usage: on update only the growth, and only if the quota counted the old object too.
fn delta(evaluator: Evaluator<'_>, quota: &Value, request: &AdmissionRequest<'_>) -> Resources {
    let mut usage = evaluator.usage(request.new_object());
    if let (Operation::Update, Some(old)) = (request.operation, request.old) {
        if evaluator.matched(quota, old).is_some() {
            for (name, before) in evaluator.usage(old) {
                if let Some(now) = usage.get_mut(&name) {
                    *now -= before;
                }
            }
        }
    }
    usage.retain(|_, quantity| !quantity.is_zero() && !quantity.is_negative());
    usage
}

/// The quota's usage after the request; `None` if it is untouched.
fn charge(evaluator: Evaluator<'_>, quota: &Value, request: &AdmissionRequest<'_>) -> Result<Option<Resources>, ApiError> {
    let Some(tracked) = evaluator.matched(quota, request.new_object()) else { return Ok(None) };
    let name = meta::name(quota);
    if evaluator == Evaluator::Pods {
        if let Some(why) = unset(&tracked, request.new_object()) {
            return Err(request.forbidden(format!("failed quota: {name}: {why}")));
        }
    }
    let hard = resources(&quota["status"]["hard"]);
    let mut used = resources(&quota["status"]["used"]);
    if tracked.iter().any(|resource| !used.contains_key(resource)) {
        let names: Vec<&str> = tracked.iter().map(String::as_str).collect();
        let names = names.join(",");
        return Err(request.forbidden(format!("status unknown for quota: {name}, resources: {names}")));
    }
    let mut requested = delta(evaluator, quota, request);
    requested.retain(|resource, _| hard.contains_key(resource));
    if requested.is_empty() {
        return Ok(None);
    }
    let before = used.clone();
    pods::add(&mut used, &requested);
    let exceeded: BTreeSet<&String> =
        requested.keys().filter(|resource| used.get(*resource) > hard.get(*resource)).collect();
    if !exceeded.is_empty() && request.subresource != "status" {
        return Err(request.forbidden(format!(
            "exceeded quota: {name}, requested: {}, used: {}, limited: {}",
            pretty(&requested, &exceeded),
            pretty(&before, &exceeded),
            pretty(&hard, &exceeded)
        )));
    }
    Ok(Some(used))
}

fn to_value(list: &Resources) -> Value {
    list.iter().map(|(name, quantity)| (name.clone(), Value::String(quantity.to_string()))).collect()
}

#[async_trait]
impl Plugin for ResourceQuota {
    fn name(&self) -> &'static str {
        "ResourceQuota"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn validate(&self, request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        let Some(evaluator) = Evaluator::of(&request.resource.group, &request.resource.plural) else { return Ok(()) };
        if request.namespace.is_empty() || !evaluator.handles(request) {
            return Ok(());
        }
        let quotas = self.cluster.cached_list(QUOTAS, Some(request.namespace));
        if quotas.is_empty() {
            return Ok(());
        }
        let usage = evaluator.usage(request.new_object());
        let negative: Vec<&str> =
            usage.iter().filter(|(_, quantity)| quantity.is_negative()).map(|(name, _)| name.as_str()).collect();
        if !negative.is_empty() {
            let why = format!("quota usage is negative for resource(s): {}", negative.join(","));
            return Err(request.forbidden(why));
        }
        let mut charged = Vec::new();
        for quota in &quotas {
            if charge(evaluator, quota, request)?.is_some() {
                charged.push(meta::name(quota));
            }
        }
        if request.dry_run {
            return Ok(());
        }
        for name in charged {
            let mut change = |quota: &mut Value| match charge(evaluator, quota, request)? {
                Some(used) => {
                    quota["status"]["used"] = to_value(&used);
                    Ok(true)
                }
                None => Ok(false),
            };
            let updated = self.cluster.update_status(QUOTAS, request.namespace, name, &mut change).await;
            match updated {
                // A quota deleted meanwhile binds nobody.
                Err(error) if error.code == 404 => {}
                other => drop(other?),
            }
        }
        Ok(())
    }
}
