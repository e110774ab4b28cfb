//! Persistent volumes: binding claims to volumes, releasing them, and what protects both while they are used.

pub mod ephemeral;
pub mod local_path;
mod matching;
pub mod protection;

use std::{fmt, sync::Arc};

use k8s_openapi::api::{
    core::v1::{Node, ObjectReference, PersistentVolume, PersistentVolumeClaim},
    storage::v1::StorageClass,
};
use serde_json::json;
use windlass_client::{
    events::{self, EventType, Recorder},
    informer::{Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker},
    write::{self, ApiErrorExt},
};
use matching::{BIND_COMPLETED, BOUND_BY_CONTROLLER, PROVISIONED_BY, PROVISIONER, PROVISIONER_BETA, SELECTED_NODE, annotation, claim_class, claim_ref, volume_name};

const NO_PROVISIONER: &str = "kubernetes.io/no-provisioner";
const DEFAULT_CLASS: &str = "storageclass.kubernetes.io/is-default-class";

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Item {
    Claim(Key),
    Volume(String),
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Item::Claim(key) => write!(f, "claim {key}"),
            Item::Volume(name) => write!(f, "volume {name}"),
        }
    }
}

struct Binder {
    client: kube::Client,
    recorder: Recorder,
    claims: Informer<PersistentVolumeClaim>,
    volumes: Informer<PersistentVolume>,
    classes: Informer<StorageClass>,
    nodes: Informer<Node>,
}

fn waits_for_consumer(class: Option<&Arc<StorageClass>>) -> bool {
    class.and_then(|class| class.volume_binding_mode.as_deref()) == Some("WaitForFirstConsumer")
}

/// The newest of the classes that are marked as the default.
fn default_class(classes: &[Arc<StorageClass>]) -> Option<Arc<StorageClass>> {
    let marked = classes.iter().filter(|class| annotation(&class.metadata, DEFAULT_CLASS) == Some("true"));
    marked.max_by_key(|class| (class.metadata.creation_timestamp.as_ref().map(|time| time.0), class.metadata.name.clone())).cloned()
}

impl Binder {
    async fn work(self: Arc<Self>, item: Item) -> Result<Action, Error> {
        match item {
            Item::Claim(key) => match self.claims.get(&key) {
                Some(claim) if claim.metadata.deletion_timestamp.is_none() => self.sync_claim(&claim).await,
                _ => Ok(()),
            },
            Item::Volume(name) => match self.volumes.get(&Key::cluster(&name)) {
                Some(volume) if volume.metadata.deletion_timestamp.is_none() => self.sync_volume(&volume).await,
                _ => Ok(()),
            },
        }
        .map(|()| Action::Done)
    }

    fn tell(&self, claim: &PersistentVolumeClaim, kind: EventType, reason: &str, message: String) {
        self.recorder.event(&events::reference(claim), kind, reason, message);
    }

    async fn sync_claim(&self, claim: &PersistentVolumeClaim) -> Result<(), Error> {
        if volume_name(claim).is_empty() {
            return self.bind_new(claim).await;
        }
        let completed = annotation(&claim.metadata, BIND_COMPLETED).is_some();
        let Some(volume) = self.volumes.get(&Key::cluster(volume_name(claim))) else {
            if completed {
                return self.lose(claim, "ClaimLost", "Bound claim has lost its PersistentVolume. Data on the volume is lost!").await;
            }
            return self.claim_phase(claim, "Pending").await;
        };
        if claim_ref(&volume).is_none() || matching::is_for(&volume, claim) {
            if !completed && let Some(why) = matching::mismatch(&volume, claim) {
                let message = format!("Cannot bind to requested volume {:?}: {why}", volume_name(claim));
                self.tell(claim, EventType::Warning, "VolumeMismatch", message);
                return self.claim_phase(claim, "Pending").await;
            }
            return self.bind(&volume, claim).await;
        }
        if completed {
            return self.lose(claim, "ClaimMisbound", "Two claims are bound to the same volume, this one is bound incorrectly").await;
        }
        let message = format!("volume {:?} already bound to a different claim.", volume_name(claim));
        self.tell(claim, EventType::Warning, "FailedBinding", message);
        self.claim_phase(claim, "Pending").await
    }

    async fn bind_new(&self, claim: &PersistentVolumeClaim) -> Result<(), Error> {
        let Some(class_name) = claim_class(claim) else {
            // No class was asked for: the default, if there is one by now (KEP-3333).
            let all = self.classes.list();
            if let Some(class) = default_class(&all) {
                let patch = json!({"metadata": {"uid": claim.metadata.uid, "resourceVersion": claim.metadata.resource_version}, "spec": {"storageClassName": class.metadata.name}});
                return write::merge_patch(&self.client, &write::path(claim), &patch).await.map(drop);
            }
            return self.match_or_wait(claim, None).await;
        };
        let class = self.classes.get(&Key::cluster(class_name));
        self.match_or_wait(claim, class).await
    }

    async fn match_or_wait(&self, claim: &PersistentVolumeClaim, class: Option<Arc<StorageClass>>) -> Result<(), Error> {
        let delayed = waits_for_consumer(class.as_ref());
        let selected = annotation(&claim.metadata, SELECTED_NODE);
        let node = selected.and_then(|name| self.nodes.get(&Key::cluster(name)));
        if let Some(volume) = matching::find(claim, &self.volumes.list(), delayed, node.as_deref()) {
            return self.bind(&volume, claim).await;
        }
        let provisioner = class.as_ref().map(|class| class.provisioner.as_str()).filter(|name| *name != NO_PROVISIONER);
        match provisioner {
            _ if delayed && selected.is_none() => {
                let message = "waiting for first consumer to be created before binding".to_owned();
                self.tell(claim, EventType::Normal, "WaitForFirstConsumer", message);
            }
            Some(provisioner) => {
                if annotation(&claim.metadata, PROVISIONER) != Some(provisioner) {
                    let patch = json!({"metadata": {"uid": claim.metadata.uid, "annotations": {PROVISIONER: provisioner, PROVISIONER_BETA: provisioner}}});
                    write::merge_patch(&self.client, &write::path(claim), &patch).await?;
                }
                let message = format!("Waiting for a volume to be created either by the external provisioner '{provisioner}' or manually by the system administrator. If volume creation is delayed, please verify that the provisioner is running and correctly registered.");
                self.tell(claim, EventType::Normal, "ExternalProvisioning", message);
            }
            None => match (claim_class(claim), &class) {
                (Some(name), None) if !name.is_empty() => {
                    self.tell(claim, EventType::Warning, "ProvisioningFailed", format!("storageclass.storage.k8s.io {name:?} not found"));
                }
                _ => self.tell(claim, EventType::Normal, "FailedBinding", "no persistent volumes available for this claim and no storage class is set".into()),
            },
        }
        self.claim_phase(claim, "Pending").await
    }

    async fn claim_phase(&self, claim: &PersistentVolumeClaim, phase: &str) -> Result<(), Error> {
        if claim.status.as_ref().and_then(|status| status.phase.as_deref()) == Some(phase) {
            return Ok(());
        }
        let patch = json!({"metadata": {"uid": claim.metadata.uid}, "status": {"phase": phase}});
        write::merge_patch(&self.client, &format!("{}/status", write::path(claim)), &patch).await.map(drop)
    }

    async fn lose(&self, claim: &PersistentVolumeClaim, reason: &str, message: &str) -> Result<(), Error> {
        if claim.status.as_ref().and_then(|status| status.phase.as_deref()) != Some("Lost") {
            self.tell(claim, EventType::Warning, reason, message.to_owned());
        }
        self.claim_phase(claim, "Lost").await
    }

    /// Binds in four writes, each of which may already have happened: volume, its status, claim, its status.
    async fn bind(&self, volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Result<(), Error> {
        let bound_ref = claim_ref(volume).is_some_and(|reference| reference.uid.is_some() && reference.uid == claim.metadata.uid);
        if !bound_ref {
            let mut volume = volume.clone();
            if claim_ref(&volume).is_none() {
                volume.metadata.annotations.get_or_insert_default().insert(BOUND_BY_CONTROLLER.into(), "yes".into());
            }
            volume.spec.get_or_insert_default().claim_ref = Some(ObjectReference {
                api_version: Some("v1".into()),
                kind: Some("PersistentVolumeClaim".into()),
                namespace: claim.metadata.namespace.clone(),
                name: claim.metadata.name.clone(),
                uid: claim.metadata.uid.clone(),
                resource_version: claim.metadata.resource_version.clone(),
                field_path: None,
            });
            let _: PersistentVolume = write::update(&self.client, &volume).await?;
        }
        self.volume_phase(volume, "Bound").await?;
        let named = volume_name(claim) == volume.metadata.name.as_deref().unwrap_or_default();
        if !named || annotation(&claim.metadata, BIND_COMPLETED).is_none() {
            let mut annotations = json!({BIND_COMPLETED: "yes"});
            if !named {
                annotations[BOUND_BY_CONTROLLER] = json!("yes");
            }
            let patch = json!({"metadata": {"uid": claim.metadata.uid, "resourceVersion": claim.metadata.resource_version, "annotations": annotations}, "spec": {"volumeName": volume.metadata.name}});
            write::merge_patch(&self.client, &write::path(claim), &patch).await?;
        }
        if claim.status.as_ref().and_then(|status| status.phase.as_deref()) != Some("Bound") {
            let spec = volume.spec.as_ref();
            let status = json!({"phase": "Bound", "accessModes": spec.and_then(|spec| spec.access_modes.as_ref()), "capacity": spec.and_then(|spec| spec.capacity.as_ref())});
            let patch = json!({"metadata": {"uid": claim.metadata.uid}, "status": status});
            write::merge_patch(&self.client, &format!("{}/status", write::path(claim)), &patch).await?;
        }
        Ok(())
    }

    async fn volume_phase(&self, volume: &PersistentVolume, phase: &str) -> Result<(), Error> {
        if volume.status.as_ref().and_then(|status| status.phase.as_deref()) == Some(phase) {
            return Ok(());
        }
        let patch = json!({"metadata": {"uid": volume.metadata.uid}, "status": {"phase": phase}});
        match write::merge_patch(&self.client, &format!("{}/status", write::path(volume)), &patch).await {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }

    async fn sync_volume(&self, volume: &PersistentVolume) -> Result<(), Error> {
        let Some(reference) = claim_ref(volume) else { return self.volume_phase(volume, "Available").await };
        if reference.uid.as_deref().unwrap_or_default().is_empty() {
            // Reserved: the claim binds itself when it comes.
            return self.volume_phase(volume, "Available").await;
        }
        let (namespace, name) = (reference.namespace.as_deref().unwrap_or_default(), reference.name.as_deref().unwrap_or_default());
        let same = |claim: &PersistentVolumeClaim| claim.metadata.uid == reference.uid;
        let mut claim = self.claims.get_in(namespace, name).filter(|claim| same(claim));
        if claim.is_none() {
            // Before anything is released: ask.
            let live: Option<PersistentVolumeClaim> = write::get(&self.client, &write::object_path::<PersistentVolumeClaim>(namespace, name)).await?;
            claim = live.filter(same).map(Arc::new);
        }
        match claim {
            None => self.volume_phase(volume, "Released").await,
            Some(claim) if volume_name(&claim).is_empty() => self.sync_claim(&claim).await,
            Some(claim) if Some(volume_name(&claim)) == volume.metadata.name.as_deref() => self.volume_phase(volume, "Bound").await,
            // The claim took another volume: this one is free again, or goes the way of its policy if it was made for it.
            Some(_) if annotation(&volume.metadata, PROVISIONED_BY).is_some() => self.volume_phase(volume, "Released").await,
            Some(_) => {
                let mut volume = volume.clone();
                let by_us = volume.metadata.annotations.as_mut().and_then(|annotations| annotations.remove(BOUND_BY_CONTROLLER)).is_some();
                let spec = volume.spec.get_or_insert_default();
                if by_us {
                    spec.claim_ref = None;
                } else if let Some(reference) = spec.claim_ref.as_mut() {
                    reference.uid = None;
                    reference.resource_version = None;
                }
                let updated: PersistentVolume = write::update(&self.client, &volume).await?;
                self.volume_phase(&updated, "Available").await
            }
        }
    }
}

/// The `persistentvolume-binder-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("volumes");
    let (claims, volumes, classes) = (context.claims(), context.volumes(), context.storage_classes());
    {
        let (queue, volumes) = (queue.clone(), volumes.clone());
        claims.on_change(move |change| {
            let claim = change.object();
            queue.add(Item::Claim(Key::of(&**claim)));
            let named = volume_name(claim);
            if change.is_delete() && !named.is_empty() {
                queue.add(Item::Volume(named.to_owned()));
            }
            if change.is_delete() || change.old.is_none() {
                // A volume that is bound to a claim which never learned of it.
                let of_claim = volumes.list().into_iter().filter(|volume| matching::is_for(volume, claim));
                of_claim.for_each(|volume| queue.add(Item::Volume(volume.metadata.name.clone().unwrap_or_default())));
            }
        });
    }
    {
        let (queue, claims) = (queue.clone(), claims.clone());
        volumes.on_change(move |change| {
            let volume = change.object();
            queue.add(Item::Volume(volume.metadata.name.clone().unwrap_or_default()));
            if let Some(reference) = claim_ref(volume) {
                queue.add(Item::Claim(Key::new(reference.namespace.as_deref().unwrap_or_default(), reference.name.as_deref().unwrap_or_default())));
            } else if !change.is_delete() {
                // A free volume may be what an unbound claim waits for.
                let unbound = claims.list().into_iter().filter(|claim| volume_name(claim).is_empty() && matching::mismatch(volume, claim).is_none());
                unbound.for_each(|claim| queue.add(Item::Claim(Key::of(&*claim))));
            }
            if change.is_delete() {
                let named = claims.list().into_iter().filter(|claim| Some(volume_name(claim)) == volume.metadata.name.as_deref());
                named.for_each(|claim| queue.add(Item::Claim(Key::of(&*claim))));
            }
        });
    }
    {
        let (queue, claims) = (queue.clone(), claims.clone());
        classes.on_change(move |_| {
            let unbound = claims.list().into_iter().filter(|claim| volume_name(claim).is_empty());
            unbound.for_each(|claim| queue.add(Item::Claim(Key::of(&*claim))));
        });
    }
    let recorder = context.recorder("persistentvolume-controller");
    let binder = Arc::new(Binder { client: context.client.clone(), recorder, claims, volumes, classes, nodes: context.nodes() });
    // One at a time: two claims must not take one volume.
    context.worker(queue, 1, binder, Binder::work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_default_class_counts() {
        let class = |name: &str, default: &str, created: &str| -> Arc<StorageClass> {
            Arc::new(serde_json::from_value(json!({"metadata": {"name": name, "creationTimestamp": created, "annotations": {DEFAULT_CLASS: default}}, "provisioner": "p"})).expect("a class"))
        };
        let classes = [class("a", "true", "2026-01-01T00:00:00Z"), class("b", "true", "2026-01-02T00:00:00Z"), class("c", "false", "2026-01-03T00:00:00Z")];
        assert_eq!(default_class(&classes).and_then(|class| class.metadata.name.clone()).as_deref(), Some("b"));
        assert!(default_class(&classes[2..]).is_none());
    }
}
