//! Node lifecycle: notices nodes that have gone silent, and puts what is wrong with a node into taints.
//!
//! A node shows life by renewing its Lease or by changing its status. What counts is when *we* saw that, not the clock of the
//! node. One deadline per node is pending at any time; nothing is scanned.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use jiff::Timestamp;
use k8s_openapi::{
    api::{
        coordination::v1::Lease,
        core::v1::{Node, NodeCondition, Taint},
    },
    apimachinery::pkg::apis::meta::v1::Time,
};
use parking_lot::Mutex;
use serde_json::json;
use windlass_client::{
    events::{self, EventType, Recorder},
    informer::{Change, Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    config::Config,
    context::{Context, Worker, after},
    labels,
    pod::PodView,
    write::{self, ApiErrorExt},
};

const NOT_READY: &str = "node.kubernetes.io/not-ready";
const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";
/// Conditions that become `NoSchedule` taints when they are True.
const CONDITION_TAINTS: [(&str, &str); 4] = [
    ("MemoryPressure", "node.kubernetes.io/memory-pressure"),
    ("DiskPressure", "node.kubernetes.io/disk-pressure"),
    ("PIDPressure", "node.kubernetes.io/pid-pressure"),
    ("NetworkUnavailable", "node.kubernetes.io/network-unavailable"),
];
/// Conditions that become Unknown when a node goes silent.
const HEARTBEAT_CONDITIONS: [&str; 4] = ["Ready", "MemoryPressure", "DiskPressure", "PIDPressure"];

fn condition<'a>(node: &'a Node, kind: &str) -> Option<&'a NodeCondition> {
    node.status.iter().flat_map(|status| status.conditions.iter().flatten()).find(|condition| condition.type_ == kind)
}

/// `True`, `False`, or `Unknown`; a node without the condition is Unknown.
fn readiness(node: &Node) -> &str {
    condition(node, "Ready").map_or("Unknown", |condition| condition.status.as_str())
}

/// The conditions of a node that has been silent too long; none when they say so already.
fn silenced(node: &Node, now: Timestamp) -> Option<Vec<NodeCondition>> {
    let mut conditions: Vec<NodeCondition> = node.status.iter().flat_map(|status| status.conditions.iter().flatten()).cloned().collect();
    let mut changed = false;
    for kind in HEARTBEAT_CONDITIONS {
        match conditions.iter_mut().find(|condition| condition.type_ == kind) {
            None => {
                conditions.push(NodeCondition {
                    type_: kind.into(),
                    status: "Unknown".into(),
                    reason: Some("NodeStatusNeverUpdated".into()),
                    message: Some("Kubelet never posted node status.".into()),
                    last_heartbeat_time: node.metadata.creation_timestamp.clone(),
                    last_transition_time: Some(Time(now)),
                });
                changed = true;
            }
            Some(condition) if condition.status != "Unknown" => {
                condition.status = "Unknown".into();
                condition.reason = Some("NodeStatusUnknown".into());
                condition.message = Some("Kubelet stopped posting node status.".into());
                condition.last_transition_time = Some(Time(now));
                changed = true;
            }
            Some(_) => {}
        }
    }
    changed.then_some(conditions)
}

fn taint(key: &str, effect: &str, now: Timestamp) -> Taint {
    Taint { key: key.into(), effect: effect.into(), value: None, time_added: Some(Time(now)) }
}

/// Whether a taint is one that this controller puts and takes.
fn is_ours(taint: &Taint) -> bool {
    let no_schedule = taint.effect == "NoSchedule"
        && ([NOT_READY, UNREACHABLE, UNSCHEDULABLE].contains(&taint.key.as_str()) || CONDITION_TAINTS.iter().any(|(_, key)| taint.key == *key));
    no_schedule || taint.effect == "NoExecute" && [NOT_READY, UNREACHABLE].contains(&taint.key.as_str())
}

/// The taints that a node should have.
///
/// `evict`: whether a node that is not ready is to lose its pods, too; `None` leaves that taint as it is for now.
fn desired_taints(node: &Node, evict: Option<bool>, now: Timestamp) -> Vec<Taint> {
    let mut wanted: Vec<(&str, &str)> = Vec::new();
    let unready = match readiness(node) {
        "True" => None,
        "False" => Some(NOT_READY),
        _ => Some(UNREACHABLE),
    };
    wanted.extend(unready.map(|key| (key, "NoSchedule")));
    let reported = |kind: &str| condition(node, kind).is_some_and(|condition| condition.status == "True");
    wanted.extend(CONDITION_TAINTS.iter().filter(|(kind, _)| reported(kind)).map(|(_, key)| (*key, "NoSchedule")));
    if node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false) {
        wanted.push((UNSCHEDULABLE, "NoSchedule"));
    }
    let has_evicting = labels::taints(node).iter().any(|taint| is_ours(taint) && taint.effect == "NoExecute");
    if let Some(key) = unready.filter(|_| evict.unwrap_or(has_evicting)) {
        wanted.push((key, "NoExecute"));
    }
    let foreign = labels::taints(node).iter().filter(|taint| !is_ours(taint)).cloned();
    let kept = |key: &str, effect: &str| labels::taints(node).iter().find(|taint| taint.key == key && taint.effect == effect).cloned();
    foreign.chain(wanted.into_iter().map(|(key, effect)| kept(key, effect).unwrap_or_else(|| taint(key, effect, now)))).collect()
}

/// How a zone fares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Zone {
    Normal,
    Partial,
    Full,
}

fn zone_state(ready: usize, not_ready: usize, threshold: f32) -> Zone {
    let share = not_ready as f32 / (ready + not_ready).max(1) as f32;
    match (ready, not_ready) {
        (0, n) if n > 0 => Zone::Full,
        (_, n) if n > 2 && share >= threshold => Zone::Partial,
        _ => Zone::Normal,
    }
}

/// Evictions per second in each zone; none at all where every zone is down: then the fault is rather ours.
fn eviction_rates(zones: &BTreeMap<String, (usize, usize)>, config: &Config) -> BTreeMap<String, f32> {
    let state = |counts: &(usize, usize)| zone_state(counts.0, counts.1, config.unhealthy_zone_threshold);
    let all_down = !zones.is_empty() && zones.values().all(|counts| state(counts) == Zone::Full);
    let rate = |counts: &(usize, usize)| match state(counts) {
        _ if all_down => 0.0,
        Zone::Normal | Zone::Full => config.node_eviction_rate,
        Zone::Partial if counts.0 + counts.1 > config.large_cluster_size_threshold => config.secondary_node_eviction_rate,
        Zone::Partial => 0.0,
    };
    zones.iter().map(|(zone, counts)| (zone.clone(), rate(counts))).collect()
}

fn zone_of(node: &Node) -> String {
    let label = |key: &str| labels::of(&node.metadata.labels).get(key).map(String::as_str).unwrap_or_default();
    format!("{}:{}", label("topology.kubernetes.io/region"), label("topology.kubernetes.io/zone"))
}

#[derive(Default)]
struct State {
    /// When we last saw each node alive.
    seen: HashMap<String, Instant>,
    /// When the next eviction in a zone may begin.
    next_eviction: HashMap<String, Instant>,
    rates: BTreeMap<String, f32>,
}

struct Controller {
    client: kube::Client,
    recorder: Recorder,
    config: Arc<Config>,
    nodes: Informer<Node>,
    pods: Informer<PodView>,
    state: Mutex<State>,
    queue: Queue<Key>,
}

/// Whether the kubelet wrote: something in the status other than what we write ourselves.
fn shows_life(old: Option<&Node>, new: &Node) -> bool {
    let beat = |node: &Node| condition(node, "Ready").and_then(|condition| condition.last_heartbeat_time.clone());
    old.is_none_or(|old| beat(old) != beat(new) || readiness(old) != "True" && readiness(new) == "True")
}

impl Controller {
    fn node_changed(&self, change: &Change<Node>) {
        let name = change.object().metadata.name.clone().unwrap_or_default();
        let about = events::reference(&**change.object());
        let Some(node) = &change.new else {
            self.state.lock().seen.remove(&name);
            self.recorder.event(&about, EventType::Normal, "RemovingNode", format!("Node {name} event: Removing Node {name} from Controller"));
            return self.zones_changed();
        };
        if change.old.is_none() {
            self.recorder.event(&about, EventType::Normal, "RegisteredNode", format!("Node {name} event: Registered Node {name} in Controller"));
        }
        if shows_life(change.old.as_deref(), node) {
            self.state.lock().seen.insert(name, Instant::now());
        }
        let moved = change.old.as_ref().is_none_or(|old| readiness(old) != readiness(node) || zone_of(old) != zone_of(node));
        if moved {
            self.zones_changed();
        }
        self.queue.add(Key::of(&**node));
    }

    /// Recomputes the eviction rates; when they change, every node that is not ready is looked at again.
    fn zones_changed(&self) {
        let mut zones: BTreeMap<String, (usize, usize)> = BTreeMap::new();
        let nodes = self.nodes.list();
        for node in &nodes {
            let counts = zones.entry(zone_of(node)).or_default();
            if readiness(node) == "True" { counts.0 += 1 } else { counts.1 += 1 }
        }
        let rates = eviction_rates(&zones, &self.config);
        let mut state = self.state.lock();
        if state.rates == rates {
            return;
        }
        state.next_eviction.retain(|zone, _| rates.contains_key(zone));
        state.rates = rates;
        drop(state);
        nodes.iter().filter(|node| readiness(node) != "True").for_each(|node| self.queue.add(Key::of(&**node)));
    }

    /// How long the node may still be silent; zero when it has been too long.
    fn patience(&self, node: &Node, name: &str) -> Duration {
        let reported = condition(node, "Ready").is_some();
        let grace = if reported { self.config.node_monitor_grace_period.0 } else { self.config.node_startup_grace_period.0 };
        let mut state = self.state.lock();
        let seen = state.seen.entry(name.to_owned()).or_insert_with(Instant::now);
        grace.saturating_sub(seen.elapsed())
    }

    /// Whether a node that is not ready may lose its pods now, or when to ask again.
    fn may_evict(&self, node: &Node) -> Result<bool, Option<Duration>> {
        let zone = zone_of(node);
        let mut state = self.state.lock();
        let rate = state.rates.get(&zone).copied().unwrap_or(self.config.node_eviction_rate);
        if rate <= 0.0 {
            return Ok(false);
        }
        let already = labels::taints(node).iter().any(|taint| is_ours(taint) && taint.effect == "NoExecute");
        if already {
            return Ok(true);
        }
        let now = Instant::now();
        if let Some(next) = state.next_eviction.get(&zone).filter(|next| **next > now) {
            return Err(Some(*next - now));
        }
        state.next_eviction.insert(zone, now + Duration::from_secs_f32(1.0 / rate));
        Ok(true)
    }

    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(node) = self.nodes.get(&key) else { return Ok(Action::Done) };
        let patience = self.patience(&node, &key.name);
        if patience.is_zero()
            && let Some(conditions) = silenced(&node, Timestamp::now())
        {
            let was_ready = readiness(&node) == "True";
            let patch = json!({"metadata": {"uid": node.metadata.uid, "resourceVersion": node.metadata.resource_version}, "status": {"conditions": conditions}});
            write::strategic_patch(&self.client, &format!("{}/status", write::path(&*node)), &patch).await?;
            if was_ready {
                let message = format!("Node {} status is now: NodeNotReady", key.name);
                self.recorder.event(&events::reference(&*node), EventType::Normal, "NodeNotReady", message);
            }
            // The watch brings the node back with its new condition, and then its taints are set.
            return Ok(Action::Done);
        }
        let unready = readiness(&node) != "True";
        let (evict, again) = match if unready { self.may_evict(&node) } else { Ok(false) } {
            Ok(evict) => (Some(evict), None),
            Err(again) => (None, again),
        };
        let wanted = desired_taints(&node, evict, Timestamp::now());
        if wanted != labels::taints(&node) {
            let patch = json!({"metadata": {"uid": node.metadata.uid, "resourceVersion": node.metadata.resource_version},
                "spec": {"taints": if wanted.is_empty() { serde_json::Value::Null } else { json!(wanted) }}});
            write::merge_patch(&self.client, &write::path(&*node), &patch).await?;
        }
        if unready {
            self.mark_pods(&key.name).await?;
        }
        // A silent node that is marked so already needs no deadline.
        let deadline = (!patience.is_zero()).then_some(patience);
        Ok(after([deadline, again].into_iter().flatten().min()))
    }

    /// Pods of a node that is not ready are not ready either: services must not send to them.
    async fn mark_pods(&self, node: &str) -> Result<(), Error> {
        for pod in self.pods.by_index("node", node).into_iter().filter(|pod| pod.ready()) {
            let condition = json!({"type": "Ready", "status": "False", "lastTransitionTime": Time(Timestamp::now())});
            let patch = json!({"metadata": {"uid": pod.uid()}, "status": {"conditions": [condition]}});
            match write::strategic_patch(&self.client, &format!("{}/status", write::path(&*pod)), &patch).await {
                Ok(_) => self.recorder.event(&events::reference(&*pod), EventType::Warning, "NodeNotReady", "Node is not ready".into()),
                Err(error) if error.is_not_found() || error.is_conflict() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// The `node-lifecycle-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("node_lifecycle_controller");
    let (nodes, pods, leases) = (context.nodes(), context.pods(), context.leases());
    let controller = Arc::new(Controller {
        client: context.client.clone(),
        recorder: context.recorder("node-controller"),
        config: context.config.clone(),
        nodes: nodes.clone(),
        pods,
        state: Mutex::default(),
        queue: queue.clone(),
    });
    {
        let controller = controller.clone();
        nodes.on_change(move |change| controller.node_changed(change));
    }
    {
        let controller = controller.clone();
        leases.on_change(move |change: &Change<Lease>| {
            let renewed = |lease: &Option<Arc<Lease>>| lease.as_ref().and_then(|lease| lease.spec.as_ref()?.renew_time.clone());
            let name = change.object().metadata.name.clone().unwrap_or_default();
            if change.new.is_some() && renewed(&change.old) != renewed(&change.new) && controller.nodes.get(&Key::cluster(&name)).is_some() {
                controller.state.lock().seen.insert(name, Instant::now());
            }
        });
    }
    context.worker(queue, 8, controller, Controller::sync)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn node(ready: &str, taints: Value, extra: Value) -> Node {
        let mut conditions = vec![json!({"type": "Ready", "status": ready})];
        conditions.extend(extra.as_array().cloned().unwrap_or_default());
        serde_json::from_value(json!({"metadata": {"name": "n"}, "spec": {"taints": taints}, "status": {"conditions": conditions}})).expect("a node")
    }

    fn check(node: &Node, evict: Option<bool>, expected: &[&str]) {
        let taints = desired_taints(node, evict, Timestamp::UNIX_EPOCH);
        let shown: Vec<String> = taints.iter().map(|taint| format!("{}:{}", taint.key.trim_start_matches("node.kubernetes.io/"), taint.effect)).collect();
        assert_eq!(shown, expected);
    }

    #[test]
    fn taints_follow_conditions() {
        check(&node("True", json!([]), json!([])), Some(false), &[]);
        check(&node("False", json!([]), json!([])), Some(true), &["not-ready:NoSchedule", "not-ready:NoExecute"]);
        check(&node("Unknown", json!([]), json!([])), None, &["unreachable:NoSchedule"]);
        let tainted = json!([{"key": UNREACHABLE, "effect": "NoExecute"}, {"key": "mine", "effect": "NoSchedule"}]);
        check(&node("Unknown", tainted.clone(), json!([])), None, &["mine:NoSchedule", "unreachable:NoSchedule", "unreachable:NoExecute"]);
        check(&node("Unknown", tainted.clone(), json!([])), Some(false), &["mine:NoSchedule", "unreachable:NoSchedule"]);
        check(&node("True", tainted, json!([])), Some(false), &["mine:NoSchedule"]);
        check(&node("True", json!([]), json!([{"type": "DiskPressure", "status": "True"}])), Some(false), &["disk-pressure:NoSchedule"]);
    }

    #[test]
    fn silence_is_told_once() {
        let quiet = silenced(&node("True", json!([]), json!([])), Timestamp::UNIX_EPOCH).expect("conditions");
        let ready = &quiet[0];
        assert_eq!((ready.status.as_str(), ready.reason.as_deref()), ("Unknown", Some("NodeStatusUnknown")));
        assert_eq!(quiet.len(), 4);
        let mut told = node("Unknown", json!([]), json!([]));
        told.status.get_or_insert_default().conditions = Some(quiet);
        assert_eq!(silenced(&told, Timestamp::UNIX_EPOCH), None);
    }

    #[test]
    fn zones() {
        for (ready, not_ready, expected) in [(3, 0, Zone::Normal), (0, 1, Zone::Full), (3, 2, Zone::Normal), (2, 3, Zone::Partial), (0, 0, Zone::Normal)] {
            assert_eq!(zone_state(ready, not_ready, 0.55), expected, "{ready} {not_ready}");
        }
        let config = Config::default();
        let rates = |zones: &[(&str, (usize, usize))]| eviction_rates(&zones.iter().map(|(z, c)| (z.to_string(), *c)).collect(), &config).into_values().collect::<Vec<_>>();
        assert_eq!(rates(&[("a", (0, 3))]), [0.0], "everything is down");
        assert_eq!(rates(&[("a", (0, 3)), ("b", (2, 0))]), [0.1, 0.1]);
        assert_eq!(rates(&[("a", (2, 3)), ("b", (2, 0))]), [0.0, 0.1]);
        assert_eq!(rates(&[("a", (20, 40))]), [0.01]);
    }
}
