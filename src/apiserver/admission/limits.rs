//! LimitRanger: defaults and bounds of resources, per container, pod and claim.

use super::pods::{Resources, items, items_mut, object_mut, resources, text, total};
use super::{AdmissionRequest, Operation, Plugin};
use crate::cluster::{Cluster, Gr};
use async_trait::async_trait;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use windlass_api::quantity::Quantity;
use windlass_api::{ApiError, meta};

pub struct LimitRanger {
    pub cluster: Arc<dyn Cluster>,
}

impl LimitRanger {
    /// The limit ranges that bind this request; none where it is not about resources.
    fn ranges(&self, request: &AdmissionRequest<'_>) -> Vec<Arc<Value>> {
        let pods = request.is("", "pods");
        let relevant = match (request.subresource, request.operation) {
            ("resize", Operation::Update) => pods,
            ("", Operation::Create) => pods || request.is("", "persistentvolumeclaims"),
            ("", Operation::Update) => request.is("", "persistentvolumeclaims"),
            _ => false,
        };
        if !relevant || request.old.is_some_and(|old| meta::deletion_timestamp(old).is_some()) {
            return Vec::new();
        }
        self.cluster.cached_list(Gr("", "limitranges"), Some(request.namespace))
    }
}

/// Default requests and limits of the range's container rules.
fn container_defaults(range: &Value) -> (BTreeMap<String, Value>, BTreeMap<String, Value>) {
    let (mut requests, mut limits) = (BTreeMap::new(), BTreeMap::new());
    for limit in items(&range["spec"], "limits").filter(|limit| text(limit, "type") == "Container") {
        for (field, into) in [("defaultRequest", &mut requests), ("default", &mut limits)] {
            let defaults = limit[field].as_object().into_iter().flatten();
            into.extend(defaults.map(|(name, value)| (name.clone(), value.clone())));
        }
    }
    (requests, limits)
}

/// Fills in one container and tells what was filled in.
fn fill(container: &mut Value, requests: &BTreeMap<String, Value>, limits: &BTreeMap<String, Value>) -> [Vec<String>; 2] {
    let Some(own) = object_mut(container, "resources") else { return Default::default() };
    // A limit without a request is its own request, before any default counts.
    if let Some(given) = own.get("limits").and_then(Value::as_object).cloned() {
        let mut holder = Value::Object(std::mem::take(own));
        if let Some(requests) = object_mut(&mut holder, "requests") {
            for (name, value) in given {
                requests.entry(name).or_insert(value);
            }
        }
        if let Value::Object(map) = holder {
            *own = map;
        }
    }
    let mut set: [Vec<String>; 2] = Default::default();
    for (index, (field, defaults)) in [("requests", requests), ("limits", limits)].into_iter().enumerate() {
        if defaults.is_empty() {
            continue;
        }
        let slot = own.entry(field).or_insert(Value::Null);
        if slot.is_null() {
            *slot = Value::Object(serde_json::Map::new());
        }
        let Some(list) = slot.as_object_mut() else { continue };
        for (name, value) in defaults {
            if !list.contains_key(name) {
                list.insert(name.clone(), value.clone());
                set[index].push(name.clone());
            }
        }
    }
    set
}

fn apply_defaults(range: &Value, pod: &mut Value) {
    let (requests, limits) = container_defaults(range);
    let mut notes = Vec::new();
    let Some(spec) = pod.get_mut("spec") else { return };
    for (field, called) in [("containers", "container"), ("initContainers", "init container")] {
        for container in items_mut(spec, field) {
            let [set_requests, set_limits] = fill(container, &requests, &limits);
            let name = text(container, "name");
            for (what, set) in [("request", set_requests), ("limit", set_limits)] {
                if !set.is_empty() {
                    notes.push(format!("{} {what} for {called} {name}", set.join(", ")));
                }
            }
        }
    }
    if !notes.is_empty() {
        let note = format!("LimitRanger plugin set: {}", notes.join("; "));
        meta::set_annotation(pod, "kubernetes.io/limit-ranger", &note);
    }
}

struct Usage<'a> {
    kind: &'a str,
    requests: &'a Resources,
    limits: &'a Resources,
}

impl Usage<'_> {
    fn min(&self, name: &str, bound: Quantity) -> Option<String> {
        let head = format!("minimum {name} usage per {} is {bound}", self.kind);
        let Some(request) = self.requests.get(name) else { return Some(format!("{head}.  No request is specified")) };
        if *request < bound {
            return Some(format!("{head}, but request is {request}"));
        }
        let limit = self.limits.get(name).filter(|limit| **limit < bound)?;
        Some(format!("{head}, but limit is {limit}"))
    }

    fn max(&self, name: &str, bound: Quantity) -> Option<String> {
        let head = format!("maximum {name} usage per {} is {bound}", self.kind);
        let Some(limit) = self.limits.get(name) else { return Some(format!("{head}.  No limit is specified")) };
        if *limit > bound {
            return Some(format!("{head}, but limit is {limit}"));
        }
        let request = self.requests.get(name).filter(|request| **request > bound)?;
        Some(format!("{head}, but request is {request}"))
    }

    fn max_request(&self, name: &str, bound: Quantity) -> Option<String> {
        let head = format!("maximum {name} usage per {} is {bound}", self.kind);
        match self.requests.get(name) {
            None => Some(format!("{head}.  No request is specified")),
            Some(request) if *request > bound => Some(format!("{head}, but request is {request}")),
            Some(_) => None,
        }
    }

    fn ratio(&self, name: &str, bound: Quantity) -> Option<String> {
        let head = format!("{name} max limit to request ratio per {} is {bound}", self.kind);
        let known = |list: &Resources| list.get(name).filter(|quantity| !quantity.is_zero()).copied();
        let Some(request) = known(self.requests) else {
            return Some(format!("{head}, but no request is specified or request is 0"));
        };
        let Some(limit) = known(self.limits) else {
            return Some(format!("{head}, but no limit is specified or limit is 0"));
        };
        let ratio = limit.as_f64() / request.as_f64();
        (ratio > bound.as_f64()).then(|| format!("{head}, but provided ratio is {ratio:.6}"))
    }

    /// All violations of one limit rule, in the order of upstream's checks.
    fn violations(&self, limit: &Value) -> Vec<String> {
        let mut found = Vec::new();
        found.extend(resources(&limit["min"]).iter().filter_map(|(name, bound)| self.min(name, *bound)));
        if self.kind == "PersistentVolumeClaim" {
            found.extend(resources(&limit["max"]).iter().filter_map(|(name, bound)| self.max_request(name, *bound)));
            return found;
        }
        found.extend(resources(&limit["max"]).iter().filter_map(|(name, bound)| self.max(name, *bound)));
        let ratios = resources(&limit["maxLimitRequestRatio"]);
        found.extend(ratios.iter().filter_map(|(name, bound)| self.ratio(name, *bound)));
        found
    }
}

fn check_pod(range: &Value, pod: &Value) -> Vec<String> {
    let spec = &pod["spec"];
    let mut found = Vec::new();
    for limit in items(&range["spec"], "limits") {
        match text(limit, "type") {
            "Container" => {
                for container in items(spec, "containers").chain(items(spec, "initContainers")) {
                    let own = &container["resources"];
                    let (requests, limits) = (resources(&own["requests"]), resources(&own["limits"]));
                    found.extend(Usage { kind: "Container", requests: &requests, limits: &limits }.violations(limit));
                }
            }
            "Pod" => {
                let (requests, limits) = (total(spec, "requests"), total(spec, "limits"));
                found.extend(Usage { kind: "Pod", requests: &requests, limits: &limits }.violations(limit));
            }
            _ => {}
        }
    }
    found
}

fn check_claim(range: &Value, claim: &Value) -> Vec<String> {
    let requests = resources(&claim["spec"]["resources"]["requests"]);
    let usage = Usage { kind: "PersistentVolumeClaim", requests: &requests, limits: &Resources::new() };
    let rules = items(&range["spec"], "limits").filter(|limit| text(limit, "type") == "PersistentVolumeClaim");
    rules.flat_map(|limit| usage.violations(limit)).collect()
}

#[async_trait]
impl Plugin for LimitRanger {
    fn name(&self) -> &'static str {
        "LimitRanger"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn mutate(&self, request: &mut AdmissionRequest<'_>) -> Result<(), ApiError> {
        if !request.is("", "pods") {
            return Ok(());
        }
        for range in self.ranges(request) {
            if let Some(pod) = request.object.as_mut() {
                apply_defaults(&range, pod);
            }
        }
        Ok(())
    }

    async fn validate(&self, request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        for range in self.ranges(request) {
            let mut found = match request.resource.plural.as_str() {
                "pods" => check_pod(&range, request.new_object()),
                _ => check_claim(&range, request.new_object()),
            };
            let mut seen = std::collections::BTreeSet::new();
            found.retain(|violation| seen.insert(violation.clone()));
            match found.as_slice() {
                [] => {}
                [one] => return Err(request.forbidden(one)),
                many => return Err(request.forbidden(format!("[{}]", many.join(", ")))),
            }
        }
        Ok(())
    }
}
