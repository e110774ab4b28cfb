//! Writes a pod's status to the API: by patch, one at a time, only what has changed; and its mirror pod.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use tokio::time::Instant;

use super::actor::{Actor, Msg};
use super::{model, patch};
use crate::metrics;
use crate::shared::Shared;

const RETRY: Duration = Duration::from_secs(2);

/// How the writing stands.
#[derive(Debug, Default)]
pub(super) struct State {
    writing: bool,
    pub(super) not_before: Option<Instant>,
    since: Option<Instant>,
}

impl State {
    /// Whether the API has the newest status.
    pub(super) fn settled(&self, reported: &PodStatus, status: &PodStatus) -> bool {
        !self.writing && patch::status_patch("", reported, status).is_none()
    }
}

/// The outcome of one write.
#[derive(Debug)]
pub enum Written {
    /// The API now has this status.
    Done(Box<PodStatus>),
    /// The pod is not there any more, or is another of the same name.
    Lost,
    Failed(String),
}

impl Actor {
    pub(super) fn new_mirror(&mut self, mirror: Option<Arc<Pod>>) {
        if let Some(mirror) = &mirror {
            self.reported = mirror.status.clone().unwrap_or_default();
        }
        self.mirror = mirror;
    }

    /// Starts a write if there is something to tell and none under way.
    pub(super) fn write_status(&mut self) {
        if self.write.writing {
            return;
        }
        if self.write.not_before.is_some_and(|at| at > Instant::now()) {
            return;
        }
        self.write.not_before = None;
        let target = if model::is_static(&self.pod) {
            match self.mirror.clone().filter(|m| mirrors(m, &self.pod)) {
                Some(mirror) => mirror,
                None => return self.make_mirror(),
            }
        } else {
            self.pod.clone()
        };
        let mut status = self.status.clone();
        if model::is_static(&self.pod) {
            status.observed_generation = target.metadata.generation;
        }
        let Some(body) = patch::status_patch(model::uid(&target), &self.reported, &status) else {
            self.write.since = None;
            return;
        };
        let since = *self.write.since.get_or_insert_with(Instant::now);
        self.write.writing = true;
        let (shared, tell) = (self.shared.clone(), self.mailbox().clone());
        tokio::spawn(async move {
            let api: Api<Pod> = Api::namespaced(shared.client.clone(), model::namespace(&target));
            let result = api.patch_status(model::name(&target), &PatchParams::default(), &Patch::Strategic(&body)).await;
            let written = match result {
                Ok(pod) => {
                    metrics::POD_STATUS_SYNC.observe(since.elapsed().as_secs_f64());
                    Written::Done(Box::new(pod.status.unwrap_or_default()))
                }
                Err(kube::Error::Api(e)) if e.code == 404 || (e.code == 409 && e.message.contains("uid")) => Written::Lost,
                Err(e) => Written::Failed(e.to_string()),
            };
            let _ = tell.send(Msg::StatusWritten(written)).await;
        });
    }

    pub(super) fn status_written(&mut self, written: Written) {
        self.write.writing = false;
        match written {
            Written::Done(status) => {
                self.reported = *status;
                self.write.since = None;
            }
            // The source will say that it is gone; until then there is nobody to tell.
            Written::Lost => self.reported = self.status.clone(),
            Written::Failed(error) => {
                tracing::warn!(pod = model::describe(&self.pod), error, "cannot write the pod's status, will try again");
                self.write.not_before = Some(Instant::now() + RETRY);
            }
        }
    }

    fn make_mirror(&mut self) {
        if self.is_making_mirror() || self.is_gone() {
            return;
        }
        let Some(node) = self.shared.node.get_in("", &self.shared.node_name) else {
            self.write.not_before = Some(Instant::now() + RETRY);
            return;
        };
        self.set_making_mirror();
        let stale = self.mirror.clone();
        let mut mirror = (*self.pod).clone();
        let hash = model::annotation(&self.pod, model::HASH_ANNOTATION).unwrap_or("").to_owned();
        mirror.metadata.annotations.get_or_insert_default().insert(model::MIRROR_ANNOTATION.into(), hash);
        mirror.metadata.uid = None;
        mirror.metadata.resource_version = None;
        mirror.status = None;
        mirror.metadata.owner_references = Some(vec![OwnerReference {
            api_version: "v1".into(),
            kind: "Node".into(),
            name: self.shared.node_name.clone(),
            uid: node.metadata.uid.clone().unwrap_or_default(),
            controller: Some(true),
            block_owner_deletion: None,
        }]);
        let (shared, tell) = (self.shared.clone(), self.mailbox().clone());
        tokio::spawn(async move {
            let result = create_mirror(&shared, stale.as_deref(), &mirror).await;
            let _ = tell.send(Msg::MirrorMade(result)).await;
        });
    }
}

fn mirrors(mirror: &Pod, pod: &Pod) -> bool {
    model::annotation(mirror, model::MIRROR_ANNOTATION) == model::annotation(pod, model::HASH_ANNOTATION) && mirror.metadata.deletion_timestamp.is_none()
}

async fn create_mirror(shared: &Shared, stale: Option<&Pod>, mirror: &Pod) -> Result<(), String> {
    if let Some(stale) = stale {
        delete_mirror(shared, stale).await?;
    }
    let api: Api<Pod> = Api::namespaced(shared.client.clone(), model::namespace(mirror));
    match api.create(&PostParams::default(), mirror).await {
        Ok(_) => Ok(()),
        // It was there already: the informer will show it.
        Err(kube::Error::Api(e)) if e.code == 409 => Ok(()),
        Err(e) => Err(e.to_string()),
    }
}

/// Deletes a mirror pod whose static pod is gone or another.
pub async fn delete_mirror(shared: &Shared, mirror: &Pod) -> Result<(), String> {
    delete_now(shared, mirror).await
}

/// Deletes the pod object at once, if it is still the one of this uid.
pub async fn delete_now(shared: &Shared, pod: &Pod) -> Result<(), String> {
    let api: Api<Pod> = Api::namespaced(shared.client.clone(), model::namespace(pod));
    let params = DeleteParams {
        grace_period_seconds: Some(0),
        preconditions: Some(Preconditions { uid: pod.metadata.uid.clone(), resource_version: None }),
        ..Default::default()
    };
    match api.delete(model::name(pod), &params).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(e)) if e.code == 404 || e.code == 409 => Ok(()),
        Err(e) => Err(e.to_string()),
    }
}
