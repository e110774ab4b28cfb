//! Keeps claims that pods use, and volumes that claims use, from going away under them.

use std::sync::Arc;

use k8s_openapi::{
    api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::Resource;
use serde::Deserialize;
use serde_json::json;
use windlass_client::{
    informer::{Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker},
    pod::{self, PodView},
    write::{self, ApiErrorExt},
};

const CLAIM_FINALIZER: &str = "kubernetes.io/pvc-protection";
const VOLUME_FINALIZER: &str = "kubernetes.io/pv-protection";

/// What happens to a finalizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Add,
    Remove,
    Keep,
}

fn change(metadata: &ObjectMeta, finalizer: &str, used: impl FnOnce() -> bool) -> Change {
    let has = metadata.finalizers.iter().flatten().any(|have| have == finalizer);
    match (metadata.deletion_timestamp.is_some(), has) {
        (false, false) => Change::Add,
        (true, true) if !used() => Change::Remove,
        _ => Change::Keep,
    }
}

async fn write<K: Resource<DynamicType = ()>>(client: &kube::Client, object: &K, finalizer: &str, change: Change) -> Result<(), Error> {
    let meta = object.meta();
    let mut finalizers = meta.finalizers.clone().unwrap_or_default();
    match change {
        Change::Keep => return Ok(()),
        Change::Add => finalizers.push(finalizer.to_owned()),
        Change::Remove => finalizers.retain(|have| have != finalizer),
    }
    let patch = json!({"metadata": {"uid": meta.uid, "resourceVersion": meta.resource_version, "finalizers": finalizers}});
    match write::merge_patch(client, &write::path(object), &patch).await {
        Err(error) if !error.is_not_found() => Err(error),
        _ => Ok(()),
    }
}

/// Whether a pod holds a claim: it has a node and has not ended.
fn holds(pod: &PodView) -> bool {
    !pod.node().is_empty() && !pod.finished()
}

#[derive(Deserialize)]
struct Pods {
    #[serde(default, deserialize_with = "crate::discovery::null_as_default")]
    items: Vec<PodView>,
}

struct Claims {
    client: kube::Client,
    claims: Informer<PersistentVolumeClaim>,
    pods: Informer<PodView>,
}

impl Claims {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(claim) = self.claims.get(&key) else { return Ok(Action::Done) };
        let name = key.to_string();
        let wanted = change(&claim.metadata, CLAIM_FINALIZER, || self.pods.by_index("claim", &name).iter().any(|pod| holds(pod)));
        if wanted == Change::Remove {
            // The cache may be behind: ask.
            let live: Option<Pods> = write::get(&self.client, &write::collection_path::<Pod>(key.ns())).await?;
            if live.is_some_and(|live| live.items.iter().any(|pod| holds(pod) && pod::claims(pod).contains(&name))) {
                return Ok(Action::Done);
            }
        }
        write(&self.client, &*claim, CLAIM_FINALIZER, wanted).await.map(|()| Action::Done)
    }
}

/// The `persistentvolumeclaim-protection-controller`.
pub fn start_claims(context: &Context) -> Worker {
    let queue = Queue::new("pvcprotection");
    let (claims, pods) = (context.claims(), context.pods());
    {
        let queue = queue.clone();
        claims.on_change(move |change| queue.add(Key::of(&**change.object())));
    }
    {
        let queue = queue.clone();
        pods.on_change(move |change| {
            let released = change.is_delete() || change.object().finished();
            let names = released.then(|| pod::claims(change.object())).into_iter().flatten();
            names.for_each(|name| queue.add(Key::parse(&name)));
        });
    }
    let state = Arc::new(Claims { client: context.client.clone(), claims, pods });
    context.worker(queue, 1, state, Claims::sync)
}

struct Volumes {
    client: kube::Client,
    volumes: Informer<PersistentVolume>,
}

impl Volumes {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(volume) = self.volumes.get(&key) else { return Ok(Action::Done) };
        let bound = || volume.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Bound");
        let wanted = change(&volume.metadata, VOLUME_FINALIZER, bound);
        write(&self.client, &*volume, VOLUME_FINALIZER, wanted).await.map(|()| Action::Done)
    }
}

/// The `persistentvolume-protection-controller`.
pub fn start_volumes(context: &Context) -> Worker {
    let queue = Queue::new("pvprotection");
    let volumes = context.volumes();
    {
        let queue = queue.clone();
        volumes.on_change(move |change| queue.add(Key::of(&**change.object())));
    }
    let state = Arc::new(Volumes { client: context.client.clone(), volumes });
    context.worker(queue, 1, state, Volumes::sync)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finalizers_come_and_go() {
        for (deleting, has, used, expected) in [
            (false, false, false, Change::Add),
            (false, true, false, Change::Keep),
            (true, true, true, Change::Keep),
            (true, true, false, Change::Remove),
            (true, false, false, Change::Keep),
        ] {
            let mut value = json!({"name": "c"});
            if deleting {
                value["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            }
            if has {
                value["finalizers"] = json!([CLAIM_FINALIZER]);
            }
            let metadata: ObjectMeta = serde_json::from_value(value).expect("metadata");
            assert_eq!(change(&metadata, CLAIM_FINALIZER, || used), expected, "{deleting} {has} {used}");
        }
    }
}
