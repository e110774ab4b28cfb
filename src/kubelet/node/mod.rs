//! The node object: registered, its status and lease kept up to date; pressure and waste looked after.

pub mod collect;
pub mod eviction;
pub mod machine;
pub mod status;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{Node, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, OwnerReference};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio::time::Instant;
use windlass_client::events::EventType;

use crate::error::Error;
use crate::shared::Shared;

const LEASE_NAMESPACE: &str = "kube-node-lease";
const LEASE_SECONDS: i32 = 40;
/// Images are looked at this often; upstream's period.
const IMAGE_PERIOD: Duration = Duration::from_secs(300);

/// Creates the node object, or brings the labels of one that is there up to date.
pub async fn register(shared: &Shared) -> Result<(), Error> {
    let api: Api<Node> = Api::all(shared.client.clone());
    let name = &shared.node_name;
    let labels = labels(shared)?;
    let mut node = json!({
        "metadata": {"name": name, "labels": labels, "annotations": {"volumes.kubernetes.io/controller-managed-attach-detach": "true"}},
        "spec": {"taints": taints(&shared.config.register_with_taints)?},
    });
    if !shared.config.pod_cidr.is_empty() {
        node["spec"]["podCIDR"] = json!(shared.config.pod_cidr.split(',').next());
        node["spec"]["podCIDRs"] = json!(shared.config.pod_cidr.split(',').collect::<Vec<_>>());
    }
    let typed: Node = serde_json::from_value(node).map_err(|e| Error::Config { field: "node", value: name.clone(), reason: e.to_string() })?;
    match api.create(&PostParams::default(), &typed).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(e)) if e.code == 409 => {
            let patch = json!({"metadata": {"labels": labels}});
            api.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await.map(drop).map_err(Error::api("update the node's labels"))
        }
        Err(e) => Err(Error::api("register the node")(e)),
    }
}

fn labels(shared: &Shared) -> Result<Value, Error> {
    let arch = machine::go_arch();
    let mut labels = json!({
        "beta.kubernetes.io/arch": arch,
        "beta.kubernetes.io/os": "linux",
        "kubernetes.io/arch": arch,
        "kubernetes.io/os": "linux",
        "kubernetes.io/hostname": shared.node_name,
    });
    for pair in shared.config.node_labels.iter().filter(|p| !p.is_empty()) {
        let (key, value) = pair.split_once('=').ok_or_else(|| Error::Config { field: "node-labels", value: pair.clone(), reason: "write it as key=value".into() })?;
        labels[key] = json!(value);
    }
    Ok(labels)
}

/// Reads `key=value:effect` taints.
pub fn taints(list: &[String]) -> Result<Vec<Taint>, Error> {
    let parse = |text: &String| {
        let fail = || Error::Config { field: "register-with-taints", value: text.clone(), reason: "write it as key=value:effect, the effect one of NoSchedule, PreferNoSchedule, NoExecute".into() };
        let (pair, effect) = text.rsplit_once(':').ok_or_else(fail)?;
        if !matches!(effect, "NoSchedule" | "PreferNoSchedule" | "NoExecute") {
            return Err(fail());
        }
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        Ok(Taint { key: key.into(), value: (!value.is_empty()).then(|| value.into()), effect: effect.into(), time_added: None })
    };
    list.iter().filter(|t| !t.is_empty()).map(parse).collect()
}

/// Keeps the node's lease and status until shutdown.
pub async fn run(shared: Arc<Shared>) {
    let period = Duration::from_secs(shared.config.node_status_update_frequency.max(1));
    let mut next = Instant::now();
    let mut reporter = Reporter { images: None, last: None, written: None };
    let mut lease = LeaseState { known: false };
    let mut eviction = eviction::Manager::new(&shared.config);
    let mut images_at = Instant::now() + IMAGE_PERIOD;
    shared.node_event(EventType::Normal, "Starting", "Starting kubelet.");
    loop {
        tokio::select! {
            () = tokio::time::sleep_until(next) => {
                next = Instant::now() + period;
                lease.renew(&shared).await;
                eviction.tick(&shared).await;
                if Instant::now() >= images_at {
                    images_at = Instant::now() + IMAGE_PERIOD;
                    collect::images(&shared).await;
                }
            }
            () = shared.node_changed.notified() => {}
            () = shared.shutdown.cancelled() => return,
        }
        reporter.report(&shared).await;
    }
}

struct LeaseState {
    known: bool,
}

impl LeaseState {
    async fn renew(&mut self, shared: &Shared) {
        let api: Api<Lease> = Api::namespaced(shared.client.clone(), LEASE_NAMESPACE);
        let now = MicroTime(Timestamp::now());
        let result = if self.known {
            let patch = json!({"spec": {"renewTime": now}});
            api.patch(&shared.node_name, &PatchParams::default(), &Patch::Merge(&patch)).await.map(drop)
        } else {
            self.create(shared, &api, now).await
        };
        match result {
            Ok(()) => self.known = true,
            Err(error) => {
                self.known = false;
                tracing::warn!(%error, "cannot renew the node's lease, will try again");
            }
        }
    }

    async fn create(&self, shared: &Shared, api: &Api<Lease>, now: MicroTime) -> Result<(), kube::Error> {
        let owner = shared.node.get_in("", &shared.node_name).and_then(|n| n.metadata.uid.clone()).map(|uid| {
            vec![OwnerReference { api_version: "v1".into(), kind: "Node".into(), name: shared.node_name.clone(), uid, ..Default::default() }]
        });
        let spec = LeaseSpec {
            holder_identity: Some(shared.node_name.clone()),
            lease_duration_seconds: Some(LEASE_SECONDS),
            renew_time: Some(now),
            ..Default::default()
        };
        let mut lease = Lease { spec: Some(spec.clone()), ..Default::default() };
        lease.metadata.name = Some(shared.node_name.clone());
        lease.metadata.owner_references = owner.clone();
        match api.create(&PostParams::default(), &lease).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(e)) if e.code == 409 => {
                let patch = json!({"metadata": {"ownerReferences": owner}, "spec": spec});
                api.patch(&shared.node_name, &PatchParams::default(), &Patch::Merge(&patch)).await.map(drop)
            }
            Err(e) => Err(e),
        }
    }
}

/// The list of images in the status may be this old.
const IMAGES_AGE: Duration = Duration::from_secs(30);

struct Reporter {
    images: Option<(Instant, Vec<crate::runtime::Image>)>,
    /// What was written last, without heartbeat times.
    last: Option<Value>,
    written: Option<Instant>,
}

impl Reporter {
    async fn report(&mut self, shared: &Arc<Shared>) {
        let node = shared.node.get_in("", &shared.node_name);
        let mut node = match node {
            Some(node) => (*node).clone(),
            // Not in the cache yet, or deleted behind our back.
            None => match self.reregister(shared).await {
                Some(node) => node,
                None => return,
            },
        };
        if self.images.as_ref().is_none_or(|(at, _)| at.elapsed() >= IMAGES_AGE)
            && let Ok(images) = shared.runtime.images().await
        {
            self.images = Some((Instant::now(), images));
        }
        let images = self.images.as_ref().map_or(&[][..], |(_, i)| i.as_slice());
        let next = status::compute(shared, &node, images, Timestamp::now());
        let bare = status::without_heartbeats(&next);
        let api_bare = status::without_heartbeats(&serde_json::to_value(node.status.take().unwrap_or_default()).unwrap_or_default());
        let due = self.written.is_none_or(|at| at.elapsed() >= Duration::from_secs(shared.config.node_status_report_frequency));
        let same = self.last.as_ref() == Some(&bare) && status::includes(&api_bare, &bare);
        if same && !due {
            return;
        }
        let api: Api<Node> = Api::all(shared.client.clone());
        let patch = json!({ "status": next });
        match api.patch_status(&shared.node_name, &PatchParams::default(), &Patch::Strategic(&patch)).await {
            Ok(_) => {
                self.tell_readiness(shared, &bare);
                self.last = Some(bare);
                self.written = Some(Instant::now());
            }
            Err(error) => tracing::warn!(%error, "cannot write the node's status, will try again"),
        }
    }

    async fn reregister(&self, shared: &Shared) -> Option<Node> {
        let api: Api<Node> = Api::all(shared.client.clone());
        match api.get_opt(&shared.node_name).await {
            Ok(Some(node)) => Some(node),
            Ok(None) if shared.config.register_node => {
                tracing::warn!(node = shared.node_name, "the node object is gone, registering again");
                match register(shared).await {
                    Ok(()) => api.get_opt(&shared.node_name).await.ok().flatten(),
                    Err(error) => {
                        tracing::warn!(%error, "cannot register the node");
                        None
                    }
                }
            }
            Ok(None) => None,
            Err(error) => {
                tracing::warn!(%error, "cannot read the node object");
                None
            }
        }
    }

    fn tell_readiness(&self, shared: &Shared, next: &Value) {
        let ready = |v: &Value| v["conditions"].as_array().into_iter().flatten().find(|c| c["type"] == "Ready").map(|c| c["status"].clone());
        let (before, now) = (self.last.as_ref().and_then(ready), ready(next));
        if before != now {
            let name = &shared.node_name;
            if now == Some(json!("True")) {
                shared.node_event(EventType::Normal, "NodeReady", format!("Node {name} status is now: NodeReady"));
            } else {
                shared.node_event(EventType::Normal, "NodeNotReady", format!("Node {name} status is now: NodeNotReady"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taints_are_read() {
        let check = |text: &str, expected: Option<(&str, Option<&str>, &str)>| {
            let got = taints(&[text.to_owned()]).ok().and_then(|l| l.into_iter().next());
            let got = got.as_ref().map(|t| (t.key.as_str(), t.value.as_deref(), t.effect.as_str()));
            assert_eq!(got, expected, "{text}");
        };
        check("a=b:NoSchedule", Some(("a", Some("b"), "NoSchedule")));
        check("a:NoExecute", Some(("a", None, "NoExecute")));
        check("a=b", None);
        check("a=b:Nope", None);
    }
}
