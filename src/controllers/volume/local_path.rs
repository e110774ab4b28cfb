//! The `local-path` storage class: a claim gets a directory on the node where its first pod is scheduled.
//!
//! The kubelet of that node makes the directory. When the volume is deleted, it removes the directory and then takes the
//! finalizer `windlass.dev/local-path` off the volume; if the node is gone, we do the latter.

use std::sync::Arc;

use k8s_openapi::api::{
    core::v1::{Node, PersistentVolume, PersistentVolumeClaim},
    storage::v1::StorageClass,
};
use serde_json::{Value, json};
use windlass_client::{
    events::{self, EventType, Recorder},
    informer::{Informer, Key},
    queue::{Action, Queue},
};

use super::matching::{PROVISIONED_BY, SELECTED_NODE, annotation, claim_class, volume_name};
use crate::{
    Error,
    context::{Context, Worker},
    labels,
    write::{self, ApiErrorExt, Delete},
};

pub const PROVISIONER: &str = "windlass.dev/local-path";
const FINALIZER: &str = "windlass.dev/local-path";
const NODE: &str = "windlass.dev/node";
const CLASS: &str = "local-path";

/// The class as it is made once; what users change of it later stays.
fn class() -> Value {
    json!({"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
        "metadata": {"name": CLASS, "annotations": {super::DEFAULT_CLASS: "true"}},
        "provisioner": PROVISIONER, "reclaimPolicy": "Delete", "volumeBindingMode": "WaitForFirstConsumer"})
}

/// The volume for a claim on a node, or why there can be none.
fn volume(claim: &PersistentVolumeClaim, class: &StorageClass, node: &Node, dir: &str) -> Result<Value, String> {
    let spec = claim.spec.clone().unwrap_or_default();
    if spec.volume_mode.as_deref() == Some("Block") {
        return Err("local-path volumes are directories: volumeMode Block is not supported".into());
    }
    if spec.access_modes.iter().flatten().any(|mode| mode == "ReadWriteMany" || mode == "ReadOnlyMany") {
        return Err("local-path volumes live on one node: only ReadWriteOnce and ReadWriteOncePod are supported".into());
    }
    if spec.selector.is_some() {
        return Err("claim.Spec.Selector is not supported by this provisioner".into());
    }
    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
    let (namespace, name) = (claim.metadata.namespace.as_deref().unwrap_or_default(), claim.metadata.name.as_deref().unwrap_or_default());
    let node_name = node.metadata.name.as_deref().unwrap_or_default();
    let host = labels::of(&node.metadata.labels).get("kubernetes.io/hostname").map_or(node_name, String::as_str);
    let volume = format!("pvc-{uid}");
    let requests = spec.resources.and_then(|resources| resources.requests).unwrap_or_default();
    Ok(json!({"apiVersion": "v1", "kind": "PersistentVolume",
        "metadata": {"name": volume, "finalizers": [FINALIZER], "annotations": {PROVISIONED_BY: PROVISIONER, NODE: node_name}},
        "spec": {
            "capacity": {"storage": requests.get("storage")},
            "accessModes": spec.access_modes,
            "volumeMode": "Filesystem",
            "storageClassName": class.metadata.name,
            "persistentVolumeReclaimPolicy": class.reclaim_policy.as_deref().unwrap_or("Delete"),
            "mountOptions": class.mount_options,
            "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": namespace, "name": name, "uid": uid},
            "hostPath": {"path": format!("{}/{volume}_{namespace}_{name}", dir.trim_end_matches('/')), "type": "DirectoryOrCreate"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [host]}]}]}},
        }}))
}

/// What is to be done with a volume of ours.
#[derive(Debug, PartialEq, Eq)]
enum Volume {
    Keep,
    /// Its claim is gone, and it goes, too.
    Delete,
    /// Its node is gone, so nobody else takes off the finalizer.
    Unfinalize,
}

fn judge(volume: &PersistentVolume, node_exists: impl Fn(&str) -> bool) -> Volume {
    if annotation(&volume.metadata, PROVISIONED_BY) != Some(PROVISIONER) {
        return Volume::Keep;
    }
    let held = volume.metadata.finalizers.iter().flatten().any(|finalizer| finalizer == FINALIZER);
    if volume.metadata.deletion_timestamp.is_some() {
        let gone = annotation(&volume.metadata, NODE).is_none_or(|node| !node_exists(node));
        return if held && gone { Volume::Unfinalize } else { Volume::Keep };
    }
    let released = volume.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Released");
    let policy = volume.spec.as_ref().and_then(|spec| spec.persistent_volume_reclaim_policy.as_deref());
    if released && policy == Some("Delete") { Volume::Delete } else { Volume::Keep }
}

struct Provisioner {
    client: kube::Client,
    recorder: Recorder,
    dir: String,
    claims: Informer<PersistentVolumeClaim>,
    volumes: Informer<PersistentVolume>,
    classes: Informer<StorageClass>,
    nodes: Informer<Node>,
}

impl Provisioner {
    async fn work(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        match key.namespace {
            Some(_) => self.provision(&key).await,
            None => self.reclaim(&key).await,
        }
        .map(|()| Action::Done)
    }

    async fn provision(&self, key: &Key) -> Result<(), Error> {
        let Some(claim) = self.claims.get(key).filter(|claim| volume_name(claim).is_empty() && claim.metadata.deletion_timestamp.is_none()) else { return Ok(()) };
        let Some(class) = claim_class(&claim).and_then(|name| self.classes.get(&Key::cluster(name))).filter(|class| class.provisioner == PROVISIONER) else { return Ok(()) };
        let about = events::reference(&*claim);
        let node = match annotation(&claim.metadata, SELECTED_NODE) {
            Some(name) => self.nodes.get(&Key::cluster(name)),
            None if super::waits_for_consumer(Some(&class)) => return Ok(()),
            None => {
                let message = "the storage class must bind by WaitForFirstConsumer: a local volume needs to know its node".to_owned();
                self.recorder.event(&about, EventType::Warning, "ProvisioningFailed", message);
                return Ok(());
            }
        };
        // A node that went away after it was chosen: the scheduler chooses again.
        let Some(node) = node else { return Ok(()) };
        let wanted = match volume(&claim, &class, &node, &self.dir) {
            Ok(wanted) => wanted,
            Err(reason) => {
                self.recorder.event(&about, EventType::Warning, "ProvisioningFailed", format!("failed to provision volume with StorageClass {CLASS:?}: {reason}"));
                return Ok(());
            }
        };
        let name = wanted["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        if self.volumes.get(&Key::cluster(&name)).is_some() {
            return Ok(());
        }
        match write::create::<Value>(&self.client, &write::collection_path::<PersistentVolume>(""), &wanted).await {
            Ok(_) => self.recorder.event(&about, EventType::Normal, "ProvisioningSucceeded", format!("Successfully provisioned volume {name}")),
            Err(error) if error.is_already_exists() => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn reclaim(&self, key: &Key) -> Result<(), Error> {
        let Some(volume) = self.volumes.get(key) else { return Ok(()) };
        match judge(&volume, |node| self.nodes.get(&Key::cluster(node)).is_some()) {
            Volume::Keep => {}
            Volume::Delete => {
                write::delete(&self.client, &write::path(&*volume), Delete { uid: volume.metadata.uid.as_deref(), ..Delete::default() }).await?;
            }
            Volume::Unfinalize => {
                let left: Vec<_> = volume.metadata.finalizers.iter().flatten().filter(|finalizer| *finalizer != FINALIZER).collect();
                let patch = json!({"metadata": {"uid": volume.metadata.uid, "resourceVersion": volume.metadata.resource_version, "finalizers": left}});
                match write::merge_patch(&self.client, &write::path(&*volume), &patch).await {
                    Err(error) if !error.is_not_found() => return Err(error),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Makes the class, unless there is one of that name.
    async fn ensure_class(&self) {
        if self.classes.get(&Key::cluster(CLASS)).is_some() {
            return;
        }
        match write::create::<Value>(&self.client, &write::collection_path::<StorageClass>(""), &class()).await {
            Err(error) if !error.is_already_exists() => tracing::error!(%error, "cannot make the storage class {CLASS}"),
            _ => {}
        }
    }
}

/// The `windlass-local-path-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("local_path_provisioner");
    let (claims, volumes, classes, nodes) = (context.claims(), context.volumes(), context.storage_classes(), context.nodes());
    {
        let queue = queue.clone();
        claims.on_change(move |change| {
            if change.new.is_some() {
                queue.add(Key::of(&**change.object()));
            }
        });
    }
    {
        let queue = queue.clone();
        volumes.on_change(move |change| {
            if change.new.is_some() {
                queue.add(Key::of(&**change.object()));
            }
        });
    }
    {
        let (queue, volumes) = (queue.clone(), volumes.clone());
        nodes.on_change(move |change| {
            if change.is_delete() {
                let name = change.object().metadata.name.as_deref().unwrap_or_default();
                let of_node = volumes.list().into_iter().filter(|volume| annotation(&volume.metadata, NODE) == Some(name));
                of_node.for_each(|volume| queue.add(Key::of(&*volume)));
            }
        });
    }
    let dir = context.config.local_path_dir.clone();
    let provisioner = Arc::new(Provisioner { client: context.client.clone(), recorder: context.recorder(PROVISIONER), dir, claims, volumes, classes, nodes });
    let work = context.worker(queue, 4, provisioner.clone(), Provisioner::work);
    Box::pin(async move {
        provisioner.ensure_class().await;
        work.await;
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(extra: Value) -> PersistentVolumeClaim {
        let mut spec = json!({"resources": {"requests": {"storage": "1Gi"}}, "accessModes": ["ReadWriteOnce"]});
        spec.as_object_mut().expect("a map").extend(extra.as_object().cloned().unwrap_or_default());
        serde_json::from_value(json!({"metadata": {"name": "data", "namespace": "ns", "uid": "u1"}, "spec": spec})).expect("a claim")
    }

    #[test]
    fn volumes_are_directories_of_one_node() {
        let class: StorageClass = serde_json::from_value(class()).expect("a class");
        let node: Node = serde_json::from_value(json!({"metadata": {"name": "n", "labels": {"kubernetes.io/hostname": "host"}}})).expect("a node");
        let made = volume(&claim(json!({})), &class, &node, "/data/").expect("a volume");
        assert_eq!(made["spec"]["hostPath"]["path"], "/data/pvc-u1_ns_data");
        assert_eq!(made["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"][0]["matchExpressions"][0]["values"], json!(["host"]));
        assert!(serde_json::from_value::<PersistentVolume>(made).is_ok());
        for refused in [json!({"volumeMode": "Block"}), json!({"accessModes": ["ReadWriteMany"]}), json!({"selector": {}})] {
            assert!(volume(&claim(refused.clone()), &class, &node, "/data").is_err(), "{refused}");
        }
    }

    #[test]
    fn volumes_go_with_their_claim() {
        let make = |by: &str, phase: &str, policy: &str, deleting: bool| -> PersistentVolume {
            let mut value = json!({"metadata": {"name": "v", "finalizers": [FINALIZER], "annotations": {PROVISIONED_BY: by, NODE: "n"}},
                "spec": {"persistentVolumeReclaimPolicy": policy}, "status": {"phase": phase}});
            if deleting {
                value["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            }
            serde_json::from_value(value).expect("a volume")
        };
        for (volume, node_exists, expected) in [
            (make(PROVISIONER, "Bound", "Delete", false), true, Volume::Keep),
            (make(PROVISIONER, "Released", "Delete", false), true, Volume::Delete),
            (make(PROVISIONER, "Released", "Retain", false), true, Volume::Keep),
            (make("other", "Released", "Delete", false), true, Volume::Keep),
            (make(PROVISIONER, "Released", "Delete", true), true, Volume::Keep),
            (make(PROVISIONER, "Released", "Delete", true), false, Volume::Unfinalize),
        ] {
            assert_eq!(judge(&volume, |_| node_exists), expected);
        }
        assert_eq!(super::super::matching::requested(&claim(json!({}))), "1Gi".parse().expect("a quantity"));
    }
}
