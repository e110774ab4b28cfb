//! Making and removing the pods of a workload, with the events that tell of it.

use std::{future::Future, sync::Arc};

use futures::future::join_all;
use k8s_openapi::{
    api::core::v1::{ObjectReference, Pod, PodTemplateSpec},
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};
use kube::Client;
use windlass_client::{
    events::{EventType, Recorder},
    informer::{Change, Key},
};

use crate::{
    Error,
    expectations::Expectations,
    owner,
    pod::PodView,
    write::{self, ApiErrorExt, Delete},
};

/// A pod as its template says, owned by `owner`, with a name that starts with the owner's.
pub fn from_template(template: &PodTemplateSpec, owner: &OwnerReference) -> Pod {
    let metadata = template.metadata.clone().unwrap_or_default();
    Pod {
        metadata: ObjectMeta {
            generate_name: Some(format!("{}-", owner.name)),
            labels: metadata.labels,
            annotations: metadata.annotations,
            finalizers: metadata.finalizers,
            owner_references: Some(vec![owner.clone()]),
            ..ObjectMeta::default()
        },
        spec: template.spec.clone(),
        status: None,
    }
}

/// Takes note of a pod's change on behalf of the workloads of one kind: what was expected of it has come, and an owner that
/// it left is woken. Returns the owner it has now, for the caller to wake.
pub fn observe(change: &Change<PodView>, group: &str, kind: &str, open: &Expectations<Key>, wake: impl Fn(Key)) -> Option<Key> {
    let owner_key = |pod: &PodView| owner::controller_of(&pod.metadata, group, kind).map(|owner| Key::new(pod.namespace(), &owner.name));
    let pod = change.object();
    let (before, key) = (change.old.as_deref().and_then(owner_key), owner_key(pod));
    if let Some(before) = before.filter(|before| Some(before) != key.as_ref()) {
        wake(before);
    }
    let key = key?;
    if change.old.is_none() {
        open.creation_observed(&key);
    }
    if change.is_delete() || pod.deleting() {
        open.deletion_observed(&key, pod.uid());
    }
    Some(key)
}

/// Creates and deletes pods on behalf of one kind of workload.
#[derive(Clone)]
pub struct PodControl {
    pub client: Client,
    pub recorder: Recorder,
}

impl PodControl {
    /// Creates a pod; events of the owner say how it went, except in a namespace that is going.
    pub async fn create(&self, namespace: &str, pod: &Pod, about: &ObjectReference) -> Result<PodView, Error> {
        let result: Result<PodView, Error> = write::create(&self.client, &write::collection_path::<Pod>(namespace), &write::wire(pod)).await;
        match &result {
            Ok(created) => self.recorder.event(about, EventType::Normal, "SuccessfulCreate", format!("Created pod: {}", created.name())),
            Err(error) if error.is_namespace_terminating() => {}
            Err(error) => self.recorder.event(about, EventType::Warning, "FailedCreate", format!("Error creating: {}", write::message(error))),
        }
        result
    }

    /// Deletes a pod; that it is gone already is an error that [`ApiErrorExt::is_not_found`] tells.
    pub async fn delete(&self, pod: &PodView, about: &ObjectReference) -> Result<(), Error> {
        let how = Delete { uid: Some(pod.uid()), ..Delete::default() };
        let result = write::delete(&self.client, &write::path(pod), how).await;
        match &result {
            Ok(_) => self.recorder.event(about, EventType::Normal, "SuccessfulDelete", format!("Deleted pod: {}", pod.name())),
            // Another pod has the name by now: ours is gone.
            Err(error) if error.is_conflict() => return Ok(()),
            Err(error) => self.recorder.event(about, EventType::Warning, "FailedDelete", format!("Error deleting: {}", write::message(error))),
        }
        result.map(|_| ())
    }
}

/// Runs `count` calls in batches of 1, 2, 4, ...; after a batch with a failure no further one starts. Returns the number of
/// calls that succeeded, and the first failure. So a namespace without quota costs one refusal and not hundreds.
pub async fn slow_start<F, Fut>(count: usize, call: F) -> (usize, Option<Error>)
where
    F: Fn(usize) -> Fut,
    Fut: Future<Output = Result<(), Error>>,
{
    let (mut done, mut succeeded, mut batch) = (0, 0, 1);
    while done < count {
        let size = batch.min(count - done);
        let results = join_all((done..done + size).map(&call)).await;
        succeeded += results.iter().filter(|result| result.is_ok()).count();
        if let Some(Err(error)) = results.into_iter().find(Result::is_err) {
            return (succeeded, Some(error));
        }
        done += size;
        batch *= 2;
    }
    (succeeded, None)
}

/// Splits pods into those that are active and those on their way out.
pub fn split(pods: Vec<Arc<PodView>>) -> (Vec<Arc<PodView>>, Vec<Arc<PodView>>) {
    let (active, rest): (Vec<_>, Vec<_>) = pods.into_iter().partition(|pod| pod.active());
    (active, rest.into_iter().filter(|pod| pod.terminating()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[tokio::test]
    async fn batches_double_and_stop_at_failure() {
        for (count, fail_from, calls, succeeded) in [(7, 100, 7, 7), (100, 0, 1, 0), (100, 1, 3, 1), (100, 5, 7, 5), (0, 0, 0, 0)] {
            let made = AtomicUsize::new(0);
            let (done, error) = slow_start(count, |index| {
                made.fetch_add(1, Ordering::Relaxed);
                async move { if index >= fail_from { Err(Error::Invalid("full".into())) } else { Ok(()) } }
            })
            .await;
            assert_eq!((made.into_inner(), done, error.is_some()), (calls, succeeded, succeeded < count), "{count} {fail_from}");
        }
    }
}
