//! Generic ephemeral volumes: makes the claim that a pod carries in its own spec (KEP-1698).

use std::sync::Arc;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde_json::Value;
use windlass_client::{
    events::{self, EventType, Recorder},
    informer::{Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker},
    owner,
    pod::PodView,
    write::{self, ApiErrorExt},
};

struct Controller {
    client: kube::Client,
    recorder: Recorder,
    pods: Informer<PodView>,
    claims: Informer<PersistentVolumeClaim>,
}

/// The claims of a pod's ephemeral volumes.
fn claims(pod: &PodView) -> Vec<PersistentVolumeClaim> {
    let templates = pod.spec.volumes.iter().filter_map(|volume| Some((volume, volume.ephemeral.as_ref()?.volume_claim_template.as_ref()?)));
    templates.map(|(volume, template)| {
        let template_meta = template.metadata.clone().unwrap_or_default();
        let mut claim = PersistentVolumeClaim { spec: Some(template.spec.clone()), ..PersistentVolumeClaim::default() };
        claim.metadata.name = Some(format!("{}-{}", pod.name(), volume.name));
        claim.metadata.namespace = pod.metadata.namespace.clone();
        claim.metadata.labels = template_meta.labels;
        claim.metadata.annotations = template_meta.annotations;
        claim.metadata.owner_references = Some(vec![owner::reference(pod)]);
        claim
    }).collect()
}

impl Controller {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(pod) = self.pods.get(&key).filter(|pod| !pod.deleting() && !pod.finished()) else { return Ok(Action::Done) };
        for claim in claims(&pod) {
            let name = claim.metadata.name.clone().unwrap_or_default();
            if let Some(existing) = self.claims.get_in(key.ns(), &name) {
                if owner::is_controlled_by(&existing.metadata, pod.uid()) {
                    continue;
                }
                return Err(Error::Invalid(format!("PVC {}/{name} was not created for pod {key} (pod is not owner)", key.ns())));
            }
            match write::create::<Value>(&self.client, &write::collection_path::<PersistentVolumeClaim>(key.ns()), &write::wire(&claim)).await {
                Ok(_) => {}
                Err(error) if error.is_already_exists() || error.is_namespace_terminating() => {}
                Err(error) => {
                    let message = format!("ephemeral volume controller failed to create PVC {name}: {}", write::message(&error));
                    self.recorder.event(&events::reference(&*pod), EventType::Warning, "FailedCreate", message);
                    return Err(error);
                }
            }
        }
        Ok(Action::Done)
    }
}

/// The `ephemeral-volume-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("ephemeral_volume");
    let (pods, all) = (context.pods(), context.claims());
    {
        let queue = queue.clone();
        pods.on_change(move |change| {
            if change.old.is_none() && change.object().spec.volumes.iter().any(|volume| volume.ephemeral.is_some()) {
                queue.add(Key::of(&**change.object()));
            }
        });
    }
    {
        let (queue, pods) = (queue.clone(), pods.clone());
        all.on_change(move |change| {
            // A claim that went while its pod is still waiting for it.
            if let Some(owner) = owner::controller_of(&change.object().metadata, "", "Pod").filter(|_| change.is_delete()) {
                let key = Key::new(change.object().metadata.namespace.as_deref().unwrap_or_default(), &owner.name);
                if pods.get(&key).is_some() {
                    queue.add(key);
                }
            }
        });
    }
    let recorder = context.recorder("ephemeral_volume");
    let state = Arc::new(Controller { client: context.client.clone(), recorder, pods, claims: all });
    context.worker(queue, context.config.concurrent_ephemeralvolume_syncs, state, Controller::sync)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::tests::pod;
    use serde_json::json;

    #[test]
    fn claims_belong_to_their_pod() {
        let pod = pod(json!({"metadata": {"name": "p"}, "spec": {"volumes": [{"name": "plain"},
            {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"metadata": {"labels": {"a": "b"}}, "spec": {"accessModes": ["ReadWriteOnce"]}}}}]}}));
        let made = claims(&pod);
        assert_eq!(made.len(), 1);
        assert_eq!(made[0].metadata.name.as_deref(), Some("p-scratch"));
        assert!(owner::is_controlled_by(&made[0].metadata, "uid-p"));
        assert_eq!(crate::pod::claims(&pod), ["ns/p-scratch"]);
    }
}
