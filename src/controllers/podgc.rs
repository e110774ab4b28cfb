//! Pod garbage collection: pods that nobody will ever remove. Finished ones beyond a threshold, those whose node is gone,
//! those asked to go before they had a node, and those on a node declared out of service.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::apis::meta::v1::Time};
use serde_json::{Value, json};
use windlass_client::{
    informer::{Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker},
    labels,
    pod::PodView,
    write::{self, ApiErrorExt, Delete},
};

/// A node must be gone this long before its pods are collected: it may be coming back.
const QUARANTINE: Duration = Duration::from_secs(40);
/// The key under which the number of finished pods is checked.
const THRESHOLD: &str = "(finished)";
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// Why a pod is collected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    Orphaned,
    Unscheduled,
    OutOfService,
}

impl Reason {
    /// The condition's message, for reasons that end a pod which may have been running.
    fn message(self) -> Option<&'static str> {
        match self {
            Reason::Orphaned => Some("PodGC: node no longer exists"),
            Reason::OutOfService => Some("PodGC: node is out-of-service"),
            Reason::Unscheduled => None,
        }
    }
}

fn is_out_of_service(node: &Node) -> bool {
    let ready = node.status.iter().flat_map(|status| status.conditions.iter().flatten()).any(|c| c.type_ == "Ready" && c.status == "True");
    !ready && labels::taints(node).iter().any(|taint| taint.key == OUT_OF_SERVICE)
}

/// Whether a pod is to be collected. `node`: the pod's node, if there is one of that name.
fn verdict(pod: &PodView, node: Option<&Node>) -> Option<Reason> {
    match (pod.node(), node) {
        ("", _) => pod.deleting().then_some(Reason::Unscheduled),
        (_, None) => Some(Reason::Orphaned),
        (_, Some(node)) => (pod.deleting() && is_out_of_service(node)).then_some(Reason::OutOfService),
    }
}

struct Collector {
    client: kube::Client,
    pods: Informer<PodView>,
    nodes: Informer<Node>,
    threshold: i64,
}

impl Collector {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        if key.name == THRESHOLD {
            return self.trim().await;
        }
        let Some(pod) = self.pods.get(&key) else { return Ok(Action::Done) };
        let node = self.nodes.get(&Key::cluster(pod.node()));
        let Some(reason) = verdict(&pod, node.as_deref()) else { return Ok(Action::Done) };
        if reason == Reason::Orphaned {
            // The cache may be behind: ask.
            let fresh: Option<Value> = write::get(&self.client, &write::object_path::<Node>("", pod.node())).await?;
            if fresh.is_some() {
                return Ok(Action::Done);
            }
        }
        self.collect(&pod, reason.message()).await?;
        Ok(Action::Done)
    }

    async fn collect(&self, pod: &PodView, message: Option<&str>) -> Result<(), Error> {
        if !pod.finished() {
            let mut patch = json!({"metadata": {"uid": pod.uid()}, "status": {"phase": "Failed"}});
            if let Some(message) = message {
                let now = Time(Timestamp::now());
                patch["status"]["conditions"] = json!([{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC", "message": message, "lastTransitionTime": now}]);
            }
            match write::strategic_patch(&self.client, &format!("{}/status", write::path(pod)), &patch).await {
                Err(error) if !error.is_not_found() => return Err(error),
                _ => {}
            }
        }
        let how = Delete { uid: Some(pod.uid()), grace_period_seconds: Some(0), ..Delete::default() };
        match write::delete(&self.client, &write::path(pod), how).await {
            Err(error) if !error.is_conflict() => Err(error),
            _ => Ok(()),
        }
    }

    /// Deletes the oldest finished pods beyond the threshold.
    async fn trim(&self) -> Result<Action, Error> {
        for pod in surplus(&self.pods.list(), self.threshold) {
            self.collect(&pod, None).await?;
        }
        Ok(Action::Done)
    }
}

/// Finished pods beyond the threshold: those already asked to go first, then the oldest.
fn surplus(pods: &[Arc<PodView>], threshold: i64) -> Vec<Arc<PodView>> {
    let mut finished: Vec<_> = pods.iter().filter(|pod| pod.finished()).cloned().collect();
    let excess = finished.len().saturating_sub(usize::try_from(threshold).unwrap_or(usize::MAX));
    finished.sort_by_key(|pod| (!pod.deleting(), pod.created(), pod.name().to_owned()));
    finished.truncate(excess);
    finished
}

/// The `pod-garbage-collector-controller`.
pub fn start(context: &Context) -> Worker {
    let queue: Queue<Key> = Queue::new("orphaned_pods_nodes");
    let (pods, nodes) = (context.pods(), context.nodes());
    let threshold = context.config.terminated_pod_gc_threshold;
    {
        let (queue, nodes) = (queue.clone(), nodes.clone());
        pods.on_change(move |change| {
            let Some(pod) = &change.new else { return };
            let was_finished = change.old.as_ref().is_some_and(|old| old.finished());
            if threshold > 0 && pod.finished() && !was_finished {
                queue.add(Key::cluster(THRESHOLD));
            }
            let node = nodes.get(&Key::cluster(pod.node()));
            match verdict(pod, node.as_deref()) {
                Some(Reason::Orphaned) => queue.add_after(Key::of(&**pod), QUARANTINE),
                Some(_) => queue.add(Key::of(&**pod)),
                None => {}
            }
        });
    }
    {
        let (queue, pods) = (queue.clone(), pods.clone());
        nodes.on_change(move |change| {
            let out_of_service = |node: &Option<Arc<Node>>| node.as_ref().is_some_and(|node| is_out_of_service(node));
            let declared = out_of_service(&change.new) && !out_of_service(&change.old);
            if !change.is_delete() && !declared {
                return;
            }
            let name = change.object().metadata.name.clone().unwrap_or_default();
            for pod in pods.by_index("node", &name) {
                queue.add_after(Key::of(&*pod), if declared { Duration::ZERO } else { QUARANTINE });
            }
        });
    }
    let state = Arc::new(Collector { client: context.client.clone(), pods, nodes, threshold });
    context.worker(queue, 8, state, Collector::sync)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::tests::pod;

    #[test]
    fn verdicts() {
        let node = |value: Value| serde_json::from_value::<Node>(value).expect("a node");
        let healthy = node(json!({"metadata": {"name": "n"}}));
        let dead = node(json!({"metadata": {"name": "n"}, "spec": {"taints": [{"key": OUT_OF_SERVICE, "effect": "NoExecute"}]}}));
        let going = "2026-01-01T00:00:00Z";
        for (pod_value, node, expected) in [
            (json!({"metadata": {"name": "p"}}), None, None),
            (json!({"metadata": {"name": "p", "deletionTimestamp": going}}), None, Some(Reason::Unscheduled)),
            (json!({"metadata": {"name": "p"}, "spec": {"nodeName": "n"}}), None, Some(Reason::Orphaned)),
            (json!({"metadata": {"name": "p"}, "spec": {"nodeName": "n"}}), Some(&healthy), None),
            (json!({"metadata": {"name": "p", "deletionTimestamp": going}, "spec": {"nodeName": "n"}}), Some(&healthy), None),
            (json!({"metadata": {"name": "p", "deletionTimestamp": going}, "spec": {"nodeName": "n"}}), Some(&dead), Some(Reason::OutOfService)),
            (json!({"metadata": {"name": "p"}, "spec": {"nodeName": "n"}}), Some(&dead), None),
        ] {
            assert_eq!(verdict(&pod(pod_value.clone()), node), expected, "{pod_value}");
        }
    }

    #[test]
    fn the_oldest_finished_pods_go() {
        let made = |name: &str, second: i64, phase: &str| {
            let created = Timestamp::from_second(second).expect("a time").to_string();
            Arc::new(pod(json!({"metadata": {"name": name, "creationTimestamp": created}, "status": {"phase": phase}})))
        };
        let pods = [made("new", 30, "Failed"), made("old", 10, "Succeeded"), made("running", 1, "Running")];
        for (threshold, expected) in [(2, &[][..]), (1, &["old"]), (0, &["old", "new"])] {
            let names: Vec<String> = surplus(&pods, threshold).iter().map(|pod| pod.name().to_owned()).collect();
            assert_eq!(names, expected);
        }
    }
}
