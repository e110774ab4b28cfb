//! Where a DaemonSet's pods belong, and which come and go next. Pure.

use std::{collections::BTreeMap, sync::Arc};

use jiff::Timestamp;
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Node, NodeAffinity, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Pod, PodTemplateSpec, Toleration},
};

use crate::{deployment::plan::scaled, labels, pod::PodView, revision};

/// Taints that daemons stay with, and their effects.
const TOLERATED: [(&str, &str); 6] = [
    ("node.kubernetes.io/not-ready", "NoExecute"),
    ("node.kubernetes.io/unreachable", "NoExecute"),
    ("node.kubernetes.io/disk-pressure", "NoSchedule"),
    ("node.kubernetes.io/memory-pressure", "NoSchedule"),
    ("node.kubernetes.io/pid-pressure", "NoSchedule"),
    ("node.kubernetes.io/unschedulable", "NoSchedule"),
];
const NETWORK_UNAVAILABLE: (&str, &str) = ("node.kubernetes.io/network-unavailable", "NoSchedule");

/// The tolerations of a template, with those of every daemon.
pub fn tolerations(template: &PodTemplateSpec) -> Vec<Toleration> {
    let spec = template.spec.as_ref();
    let mut all = spec.and_then(|spec| spec.tolerations.clone()).unwrap_or_default();
    let host = spec.and_then(|spec| spec.host_network).unwrap_or(false).then_some(NETWORK_UNAVAILABLE);
    for (key, effect) in TOLERATED.into_iter().chain(host) {
        let toleration = Toleration { key: Some(key.into()), operator: Some("Exists".into()), effect: Some(effect.into()), ..Toleration::default() };
        if !all.contains(&toleration) {
            all.push(toleration);
        }
    }
    all
}

/// Whether a pod should be made for a node, and whether one that is there may stay.
pub fn eligible(set: &DaemonSet, node: &Node) -> (bool, bool) {
    let template = &set.spec.template;
    let Some(spec) = &template.spec else { return (false, false) };
    let name = node.metadata.name.as_deref().unwrap_or_default();
    let node_labels = labels::of(&node.metadata.labels);
    let named = spec.node_name.as_deref().is_none_or(|wanted| wanted.is_empty() || wanted == name);
    let selected = spec.node_selector.iter().flatten().all(|(key, value)| node_labels.get(key) == Some(value));
    let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref()?.required_during_scheduling_ignored_during_execution.as_ref());
    if !named || !selected || affinity.is_some_and(|affinity| !labels::node_matches(affinity, node_labels, name)) {
        return (false, false);
    }
    let tolerations = tolerations(template);
    let untolerated = |effects: &[&str]| labels::untolerated(labels::taints(node), &tolerations, effects).is_some();
    (!untolerated(&["NoSchedule", "NoExecute"]), !untolerated(&["NoExecute"]))
}

/// The node that a daemon pod is for: where it runs, or the only one where it may.
pub fn target(pod: &PodView) -> Option<&str> {
    if !pod.node().is_empty() {
        return Some(pod.node());
    }
    let affinity = pod.spec.affinity.as_ref()?.node_affinity.as_ref()?.required_during_scheduling_ignored_during_execution.as_ref()?;
    let fields = affinity.node_selector_terms.iter().flat_map(|term| term.match_fields.iter().flatten());
    fields.filter(|field| field.key == "metadata.name" && field.operator == "In").find_map(|field| field.values.as_ref()?.first().map(String::as_str))
}

/// Ties a pod to a node: its affinity then allows no other.
pub fn bind(pod: &mut Pod, node: &str) {
    let requirement = NodeSelectorRequirement { key: "metadata.name".into(), operator: "In".into(), values: Some(vec![node.to_owned()]) };
    let spec = pod.spec.get_or_insert_default();
    let affinity: &mut NodeAffinity = spec.affinity.get_or_insert_default().node_affinity.get_or_insert_default();
    match &mut affinity.required_during_scheduling_ignored_during_execution {
        Some(required) if !required.node_selector_terms.is_empty() => {
            required.node_selector_terms.iter_mut().for_each(|term| term.match_fields = Some(vec![requirement.clone()]));
        }
        required => {
            let term = NodeSelectorTerm { match_fields: Some(vec![requirement]), match_expressions: None };
            *required = Some(NodeSelector { node_selector_terms: vec![term] });
        }
    }
}

/// A node and its daemon pods.
#[derive(Clone, Debug)]
pub struct Place {
    pub node: Arc<Node>,
    pub pods: Vec<Arc<PodView>>,
}

impl Place {
    pub fn name(&self) -> &str {
        self.node.metadata.name.as_deref().unwrap_or_default()
    }
}

/// Pods to make, by node, and pods to delete.
#[derive(Debug, Default)]
pub struct Plan {
    pub create: Vec<String>,
    pub delete: Vec<Arc<PodView>>,
    /// Finished pods to delete (with back-off, and an event).
    pub replace: Vec<Arc<PodView>>,
}

fn is_new(pod: &PodView, hash: &str) -> bool {
    pod.label(revision::LABEL) == Some(hash)
}

struct Limits {
    surge: usize,
    unavailable: usize,
}

fn rolling(set: &DaemonSet) -> bool {
    set.spec.update_strategy.as_ref().and_then(|strategy| strategy.type_.as_deref()) != Some("OnDelete")
}

fn limits(set: &DaemonSet, desired: i32) -> Limits {
    let rolling_update = set.spec.update_strategy.as_ref().and_then(|strategy| strategy.rolling_update.as_ref());
    let surge = scaled(rolling_update.and_then(|rolling| rolling.max_surge.as_ref()), desired, true);
    let unavailable = match rolling_update.and_then(|rolling| rolling.max_unavailable.as_ref()) {
        None if surge > 0 => 0,
        None => 1,
        value => scaled(value, desired, true),
    };
    let unavailable = if surge == 0 && unavailable == 0 { 1 } else { unavailable };
    Limits { surge: usize::try_from(surge).unwrap_or(0), unavailable: usize::try_from(unavailable).unwrap_or(0) }
}

/// Puts pods where they belong. `hash`: the present revision's.
pub fn place(set: &DaemonSet, places: &[Place], strays: &[Arc<PodView>], hash: &str, now: Timestamp) -> Plan {
    let mut plan = Plan::default();
    let min_ready = set.spec.min_ready_seconds.unwrap_or(0);
    let surging = rolling(set) && limits(set, places.len() as i32).surge > 0;
    for at in places {
        let (run, stay) = eligible(set, &at.node);
        if !stay {
            plan.delete.extend(at.pods.iter().filter(|pod| !pod.deleting()).cloned());
            continue;
        }
        if at.pods.is_empty() {
            if run {
                plan.create.push(at.name().to_owned());
            }
            continue;
        }
        let alive = || at.pods.iter().filter(|pod| !pod.deleting());
        plan.replace.extend(alive().filter(|pod| pod.finished()).cloned());
        let mut running: Vec<_> = alive().filter(|pod| !pod.finished()).cloned().collect();
        // The assigned and oldest stays.
        running.sort_by_key(|pod| (pod.node().is_empty(), pod.created(), pod.name().to_owned()));
        if surging {
            let (mut new, mut old): (Vec<_>, Vec<_>) = running.into_iter().partition(|pod| is_new(pod, hash));
            let replaced = new.first().is_some_and(|pod| pod.available(min_ready, now));
            plan.delete.extend(new.drain(1.min(new.len())..));
            plan.delete.extend(old.drain(if replaced { 0 } else { 1.min(old.len()) }..));
        } else if running.len() > 1 {
            plan.delete.extend(running.drain(1..));
        }
    }
    plan.delete.extend(strays.iter().filter(|pod| !pod.deleting()).cloned());
    plan
}

/// The next step of a rolling update, once every pod is where it belongs.
pub fn roll(set: &DaemonSet, places: &[Place], hash: &str, now: Timestamp) -> Plan {
    let mut plan = Plan::default();
    if !rolling(set) {
        return plan;
    }
    let min_ready = set.spec.min_ready_seconds.unwrap_or(0);
    let running: Vec<&Place> = places.iter().filter(|at| eligible(set, &at.node).0).collect();
    let limits = limits(set, running.len() as i32);
    let available = |pod: &Arc<PodView>| pod.available(min_ready, now) && !pod.deleting();
    let sides = |at: &Place| {
        let new = at.pods.iter().find(|pod| is_new(pod, hash) && !pod.finished()).cloned();
        let old = at.pods.iter().find(|pod| !is_new(pod, hash) && !pod.finished()).cloned();
        (new, old)
    };
    if limits.surge == 0 {
        let (mut unavailable, mut candidates) = (0, Vec::new());
        for at in running {
            match sides(at) {
                (None, None) => unavailable += 1,
                (Some(new), _) => unavailable += usize::from(!available(&new)),
                (None, Some(old)) if available(&old) => candidates.push(old),
                (None, Some(old)) => {
                    unavailable += 1;
                    // It is of no use as it is: replacing it costs nothing.
                    if !old.deleting() {
                        plan.delete.push(old);
                    }
                }
            }
        }
        plan.delete.extend(candidates.into_iter().take(limits.unavailable.saturating_sub(unavailable)));
        return plan;
    }
    let (mut surge, mut candidates) = (0, Vec::new());
    for at in running {
        match sides(at) {
            (None, None) => {}
            (None, Some(old)) if old.deleting() => {}
            // The new one starts at once where the old is of no use.
            (None, Some(old)) if !available(&old) => plan.create.push(at.name().to_owned()),
            (None, Some(_)) => candidates.push(at.name().to_owned()),
            (Some(new), Some(old)) if available(&new) && !old.deleting() => plan.delete.push(old),
            (Some(_), Some(_)) => surge += 1,
            (Some(_), None) => {}
        }
    }
    plan.create.extend(candidates.into_iter().take(limits.surge.saturating_sub(surge)));
    plan
}

/// Sorts pods by the node they are for; those for nodes that do not exist are strays.
pub fn arrange(nodes: &[Arc<Node>], pods: Vec<Arc<PodView>>) -> (Vec<Place>, Vec<Arc<PodView>>) {
    let mut by_node: BTreeMap<String, Vec<Arc<PodView>>> = BTreeMap::new();
    let mut strays = Vec::new();
    for pod in pods {
        match target(&pod) {
            Some(node) => by_node.entry(node.to_owned()).or_default().push(pod),
            None => strays.push(pod),
        }
    }
    let places = nodes.iter().map(|node| Place { node: node.clone(), pods: by_node.remove(node.metadata.name.as_deref().unwrap_or_default()).unwrap_or_default() });
    let places: Vec<Place> = places.collect();
    // A pod that waits for a node that is gone never starts; one that ran there is the pod collector's.
    strays.extend(by_node.into_values().flatten().filter(|pod| pod.node().is_empty()));
    (places, strays)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::tests::pod;
    use serde_json::{Value, json};

    fn set(strategy: Value) -> DaemonSet {
        serde_json::from_value(json!({"metadata": {"name": "d"}, "spec": {"selector": {}, "updateStrategy": strategy,
            "template": {"spec": {"containers": [], "nodeSelector": {"disk": "ssd"}}}}})).expect("a set")
    }

    fn node(name: &str, taints: Value) -> Arc<Node> {
        Arc::new(serde_json::from_value(json!({"metadata": {"name": name, "labels": {"disk": "ssd"}}, "spec": {"taints": taints}})).expect("a node"))
    }

    /// A pod `name` of revision `new` or `old`, ready or not.
    fn daemon(name: &str, hash: &str, ready: bool) -> Arc<PodView> {
        Arc::new(pod(json!({"metadata": {"name": name, "labels": {revision::LABEL: hash}}, "spec": {"nodeName": name},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" }}]}})))
    }

    fn names(pods: &[Arc<PodView>]) -> Vec<&str> {
        pods.iter().map(|pod| pod.name()).collect()
    }

    #[test]
    fn eligibility() {
        let set = set(json!({}));
        for (taints, expected) in [
            (json!([]), (true, true)),
            (json!([{"key": "k", "effect": "NoSchedule"}]), (false, true)),
            (json!([{"key": "k", "effect": "NoExecute"}]), (false, false)),
            (json!([{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]), (true, true)),
            (json!([{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]), (true, true)),
        ] {
            assert_eq!(eligible(&set, &node("n", taints.clone())), expected, "{taints}");
        }
        let mut other = (*node("n", json!([]))).clone();
        other.metadata.labels = None;
        assert_eq!(eligible(&set, &other), (false, false));
    }

    #[test]
    fn placement() {
        let now = Timestamp::UNIX_EPOCH;
        let nodes = [node("a", json!([])), node("b", json!([])), node("c", json!([{"key": "k", "effect": "NoExecute"}]))];
        let (places, strays) = arrange(&nodes, vec![daemon("a", "new", true), daemon("c", "new", true)]);
        let plan = place(&set(json!({})), &places, &strays, "new", now);
        assert_eq!((plan.create, names(&plan.delete)), (vec!["b".to_owned()], vec!["c"]));
    }

    #[test]
    fn pods_are_tied_to_nodes() {
        let mut made = Pod::default();
        bind(&mut made, "a");
        let view: PodView = serde_json::from_value(serde_json::to_value(&made).expect("json")).expect("a view");
        assert_eq!(target(&view), Some("a"));
    }

    fn check(strategy: Value, pods: &[(&str, &str, bool)], create: &[&str], delete: &[&str]) {
        let nodes: Vec<_> = pods.iter().map(|(name, ..)| node(name, json!([]))).collect();
        let (places, _) = arrange(&nodes, pods.iter().map(|(name, hash, ready)| daemon(name, hash, *ready)).collect());
        let plan = roll(&set(strategy.clone()), &places, "new", Timestamp::UNIX_EPOCH);
        assert_eq!((plan.create.iter().map(String::as_str).collect::<Vec<_>>(), names(&plan.delete)), (create.to_vec(), delete.to_vec()), "{strategy} {pods:?}");
    }

    #[test]
    fn rolling_updates() {
        let one = json!({"rollingUpdate": {"maxUnavailable": 1}});
        check(one.clone(), &[("a", "old", true), ("b", "old", true)], &[], &["a"]);
        check(one.clone(), &[("a", "new", false), ("b", "old", true)], &[], &[]);
        check(one.clone(), &[("a", "new", true), ("b", "old", true)], &[], &["b"]);
        check(one, &[("a", "old", false), ("b", "old", true)], &[], &["a"]);
        check(json!({"type": "OnDelete"}), &[("a", "old", true)], &[], &[]);
        let surge = json!({"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}});
        check(surge, &[("a", "old", true), ("b", "old", true)], &["a"], &[]);
    }
}
