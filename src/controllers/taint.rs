//! Eviction by taint: a `NoExecute` taint ends the pods that do not tolerate it, at once or after their `tolerationSeconds`.

use std::{collections::HashMap, sync::Arc};

use jiff::Timestamp;
use k8s_openapi::{api::core::v1::{Node, Taint}, apimachinery::pkg::apis::meta::v1::Time};
use parking_lot::Mutex;
use serde_json::json;
use windlass_client::{
    events::{self, EventType, Recorder},
    informer::{Change, Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker},
    labels,
    pod::{PodView, until},
    write::{self, ApiErrorExt, Delete},
};

/// When a pod must leave because of its node's taints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Stay,
    Leave(Timestamp),
}

/// The pod must leave when the shortest of its tolerations has run out, counted from when the taint and the pod first met.
/// `taints`: the node's `NoExecute` taints with the time since when each is there.
fn fate(pod: &PodView, taints: &[(Taint, Timestamp)]) -> Fate {
    let scheduled = pod.condition("PodScheduled").and_then(|condition| condition.last_transition_time.as_ref()).map(|time| time.0);
    let arrived = scheduled.or(pod.created());
    let mut fate = Fate::Stay;
    for (taint, since) in taints {
        let met = arrived.map_or(*since, |arrived| arrived.max(*since));
        let tolerating: Vec<_> = pod.spec.tolerations.iter().filter(|toleration| labels::tolerates(toleration, taint)).collect();
        let seconds = if tolerating.is_empty() {
            Some(0)
        } else {
            // A toleration without a limit does not end; the shortest of the others counts.
            tolerating.iter().filter_map(|toleration| toleration.toleration_seconds).min().map(|seconds| seconds.max(0))
        };
        let Some(seconds) = seconds else { continue };
        let leave = met.checked_add(jiff::SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MAX);
        fate = match fate {
            Fate::Leave(earlier) if earlier <= leave => fate,
            _ => Fate::Leave(leave),
        };
    }
    fate
}

fn no_execute(node: &Node) -> impl Iterator<Item = &Taint> {
    labels::taints(node).iter().filter(|taint| taint.effect == "NoExecute")
}

struct Evictor {
    client: kube::Client,
    recorder: Recorder,
    nodes: Informer<Node>,
    pods: Informer<PodView>,
    /// Since when a taint without `timeAdded` is known: by node, then by key and value.
    seen: Mutex<HashMap<String, Vec<(String, Timestamp)>>>,
}

impl Evictor {
    fn observe(&self, change: &Change<Node>) {
        let name = change.object().metadata.name.clone().unwrap_or_default();
        let mut seen = self.seen.lock();
        let known = seen.remove(&name).unwrap_or_default();
        let Some(node) = &change.new else { return };
        let id = |taint: &Taint| format!("{}={}", taint.key, taint.value.as_deref().unwrap_or_default());
        let since = |taint: &Taint| known.iter().find(|(known, _)| *known == id(taint)).map_or_else(Timestamp::now, |(_, at)| *at);
        let current: Vec<_> = no_execute(node).map(|taint| (id(taint), since(taint))).collect();
        if !current.is_empty() {
            seen.insert(name, current);
        }
    }

    fn taints(&self, node: &str) -> Vec<(Taint, Timestamp)> {
        let Some(object) = self.nodes.get(&Key::cluster(node)) else { return Vec::new() };
        let seen = self.seen.lock();
        let since = |taint: &Taint| {
            let id = format!("{}={}", taint.key, taint.value.as_deref().unwrap_or_default());
            let first = seen.get(node).into_iter().flatten().find(|(known, _)| *known == id).map_or_else(Timestamp::now, |(_, at)| *at);
            taint.time_added.as_ref().map_or(first, |time: &Time| time.0)
        };
        no_execute(&object).map(|taint| (taint.clone(), since(taint))).collect()
    }

    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(pod) = self.pods.get(&key).filter(|pod| !pod.deleting() && !pod.node().is_empty()) else { return Ok(Action::Done) };
        let Fate::Leave(at) = fate(&pod, &self.taints(pod.node())) else { return Ok(Action::Done) };
        if let Some(left) = until(at, 0, Timestamp::now()) {
            return Ok(Action::RequeueAfter(left));
        }
        self.recorder.event(&events::reference(&*pod), EventType::Normal, "TaintManagerEviction", format!("Marking for deletion Pod {key}"));
        let condition = json!({"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager",
            "message": "Taint manager: deleting due to NoExecute taint", "lastTransitionTime": Time(Timestamp::now())});
        let patch = json!({"metadata": {"uid": pod.uid()}, "status": {"conditions": [condition]}});
        match write::strategic_patch(&self.client, &format!("{}/status", write::path(&*pod)), &patch).await {
            Err(error) if !error.is_not_found() => return Err(error),
            _ => {}
        }
        write::delete(&self.client, &write::path(&*pod), Delete { uid: Some(pod.uid()), ..Delete::default() }).await?;
        Ok(Action::Done)
    }
}

/// The `taint-eviction-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("taint_eviction");
    let (nodes, pods) = (context.nodes(), context.pods());
    let recorder = context.recorder("taint-eviction-controller");
    let evictor = Arc::new(Evictor { client: context.client.clone(), recorder, nodes: nodes.clone(), pods: pods.clone(), seen: Mutex::default() });
    {
        let (queue, evictor) = (queue.clone(), evictor.clone());
        nodes.on_change(move |change| {
            let had: Vec<Taint> = change.old.iter().flat_map(|node| no_execute(node).cloned().collect::<Vec<_>>()).collect();
            let has: Vec<Taint> = change.new.iter().flat_map(|node| no_execute(node).cloned().collect::<Vec<_>>()).collect();
            if had == has {
                return;
            }
            evictor.observe(change);
            let name = change.object().metadata.name.clone().unwrap_or_default();
            evictor.pods.by_index("node", &name).iter().for_each(|pod| queue.add(Key::of(&**pod)));
        });
    }
    {
        let queue = queue.clone();
        pods.on_change(move |change| {
            let Some(pod) = change.new.as_ref().filter(|pod| !pod.node().is_empty() && !pod.deleting()) else { return };
            let moved = change.old.as_ref().is_none_or(|old| old.node() != pod.node() || old.spec.tolerations != pod.spec.tolerations);
            if moved {
                queue.add(Key::of(&**pod));
            }
        });
    }
    context.worker(queue, 8, evictor, Evictor::sync)
}


#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::tests::pod;
    use serde_json::Value;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    fn check(tolerations: Value, created: i64, tainted: i64, expected: Fate) {
        let taint: Taint = serde_json::from_value(json!({"key": "k", "effect": "NoExecute"})).expect("a taint");
        let pod = pod(json!({"metadata": {"name": "p", "creationTimestamp": at(created).to_string()}, "spec": {"nodeName": "n", "tolerations": tolerations}}));
        assert_eq!(fate(&pod, &[(taint, at(tainted))]), expected, "{tolerations}");
    }

    #[test]
    fn fates() {
        check(json!([]), 10, 100, Fate::Leave(at(100)));
        check(json!([{"key": "k", "operator": "Exists"}]), 10, 100, Fate::Stay);
        check(json!([{"key": "k", "operator": "Exists", "tolerationSeconds": 30}]), 10, 100, Fate::Leave(at(130)));
        check(json!([{"key": "k", "operator": "Exists", "tolerationSeconds": 30}]), 200, 100, Fate::Leave(at(230)));
        check(json!([{"operator": "Exists", "tolerationSeconds": 60}, {"key": "k", "operator": "Exists", "tolerationSeconds": 5}]), 0, 100, Fate::Leave(at(105)));
        check(json!([{"key": "other", "operator": "Exists"}]), 0, 100, Fate::Leave(at(100)));
        assert_eq!(until(at(130), 0, at(100)), Some(std::time::Duration::from_secs(30)));
    }
}
