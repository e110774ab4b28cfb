//! Carries decisions out: binds pods, makes their claims be bound, tells why others wait, evicts victims.

use std::sync::Arc;
use std::time::Duration;

use http::{Request, StatusCode, header};
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim, Pod as PodObject};
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::Instant;
use windlass_client::events::{EventType, Recorder, reference};

use crate::plugin::ClaimPlan;
use crate::pod::Pod;
use crate::preempt::Preemption;
use crate::queue::Waiting;
use crate::state::{Next, Scheduler};

/// How long provisioners may take.
const CLAIMS_TIMEOUT: Duration = Duration::from_secs(600);

/// Why a decision could not be carried out.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("API server: {0}")]
    Api(#[from] kube::Error),
    #[error("binding refused ({status}): {message}")]
    Refused { status: StatusCode, message: String },
    #[error("the claims of the pod were not bound within {} s", CLAIMS_TIMEOUT.as_secs())]
    Claims,
    #[error("cannot make the request: {0}")]
    Request(#[from] http::Error),
}

impl Error {
    fn is_gone(&self) -> bool {
        match self {
            Self::Refused { status, .. } => *status == StatusCode::NOT_FOUND,
            Self::Api(kube::Error::Api(status)) => status.code == 404,
            _ => false,
        }
    }
}

#[derive(Clone)]
pub struct Binder {
    pub client: Client,
    pub scheduler: Arc<Scheduler>,
    pub recorder: Recorder,
}

impl Binder {
    pub async fn carry_out(self, next: Next) {
        match next {
            Next::Bind { waiting, node, claims, since } => self.bind(waiting, &node, claims, since).await,
            Next::Tell { waiting, message, gated, preemption } => self.tell(&waiting, message, gated, preemption).await,
        }
    }

    async fn bind(&self, waiting: Waiting, node: &str, claims: ClaimPlan, since: Instant) {
        let pod = &waiting.pod;
        let result = async {
            self.bind_claims(pod, node, &claims).await?;
            self.post_binding(pod, node).await
        };
        let metrics = &self.scheduler.metrics;
        let profile = pod.scheduler_name();
        match result.await {
            Ok(()) => {
                self.scheduler.bound(&pod.uid);
                let message = format!("Successfully assigned {} to {node}", pod.key);
                self.recorder.event(&reference(&*pod.view), EventType::Normal, "Scheduled", message);
                metrics.attempts.with_label_values(&[profile, "scheduled"]).inc();
                metrics.attempt_duration.with_label_values(&[profile, "scheduled"]).observe(since.elapsed().as_secs_f64());
                let attempts = if waiting.attempts > 15 { "16+".to_owned() } else { waiting.attempts.to_string() };
                metrics.sli_duration.with_label_values(&[&attempts]).observe(waiting.since.elapsed().as_secs_f64());
            }
            Err(error) => {
                self.scheduler.not_bound(pod, error.is_gone());
                if !error.is_gone() {
                    tracing::warn!(pod = %pod.key, node, %error, "not bound, will try again");
                    self.recorder.event(&reference(&*pod.view), EventType::Warning, "FailedScheduling", error.to_string());
                }
                metrics.attempts.with_label_values(&[profile, "error"]).inc();
                metrics.attempt_duration.with_label_values(&[profile, "error"]).observe(since.elapsed().as_secs_f64());
            }
        }
    }

    async fn post_binding(&self, pod: &Pod, node: &str) -> Result<(), Error> {
        let (namespace, name) = (pod.key.ns(), &pod.key.name);
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding",
            "metadata": { "name": name, "namespace": namespace, "uid": pod.uid },
            "target": { "apiVersion": "v1", "kind": "Node", "name": node },
        });
        let request = Request::post(format!("/api/v1/namespaces/{namespace}/pods/{name}/binding"))
            .header(header::CONTENT_TYPE, "application/json")
            .body(kube::client::Body::from(binding.to_string().into_bytes()))?;
        let response = self.client.send(request).await?;
        let status = response.status();
        if status.is_success() {
            return Ok(());
        }
        let body = response.into_body().collect_bytes().await.unwrap_or_default();
        let said: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
        let message = said["message"].as_str().unwrap_or("no reason given").to_owned();
        Err(Error::Refused { status, message })
    }

    /// Reserves volumes, tells provisioners the node, and waits until all claims are bound.
    async fn bind_claims(&self, pod: &Pod, node: &str, plan: &ClaimPlan) -> Result<(), Error> {
        if plan.bind.is_empty() && plan.provision.is_empty() {
            return Ok(());
        }
        let merge = PatchParams::default();
        for (volume, claim) in &plan.bind {
            let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), claim.ns());
            let object = claims.get(&claim.name).await?;
            let patch = json!({
                "metadata": { "annotations": { "pv.kubernetes.io/bound-by-controller": "yes" } },
                "spec": { "claimRef": { "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": claim.ns(), "name": claim.name, "uid": object.metadata.uid } },
            });
            Api::<PersistentVolume>::all(self.client.clone()).patch(volume, &merge, &Patch::Merge(&patch)).await?;
        }
        for claim in &plan.provision {
            let patch = json!({ "metadata": { "annotations": { "volume.kubernetes.io/selected-node": node } } });
            Api::<PersistentVolumeClaim>::namespaced(self.client.clone(), claim.ns()).patch(&claim.name, &merge, &Patch::Merge(&patch)).await?;
        }
        let bound = async {
            loop {
                let changed = self.scheduler.claims_changed.notified();
                let mut changed = std::pin::pin!(changed);
                // Registered before looking, so that a change in between is not missed.
                changed.as_mut().enable();
                if self.scheduler.claims_bound(pod) {
                    return;
                }
                changed.await;
            }
        };
        tokio::time::timeout(CLAIMS_TIMEOUT, bound).await.map_err(|_| Error::Claims)
    }

    /// Writes into the pod's status why it waits, and evicts its victims.
    async fn tell(&self, waiting: &Waiting, message: String, gated: bool, preemption: Option<Preemption>) {
        let pod = &waiting.pod;
        if !gated {
            self.scheduler.metrics.attempts.with_label_values(&[pod.scheduler_name(), "unschedulable"]).inc();
            self.recorder.event(&reference(&*pod.view), EventType::Warning, "FailedScheduling", message.clone());
        }
        let (reason, message) = match gated {
            true => ("SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates".to_owned()),
            false => ("Unschedulable", message),
        };
        let known = pod.view.status.conditions.iter().find(|condition| condition.type_ == "PodScheduled");
        let same = known.is_some_and(|c| c.status == "False" && c.reason.as_deref() == Some(reason) && c.message.as_deref() == Some(&*message));
        if same && preemption.is_none() {
            return;
        }
        let mut condition = json!({ "type": "PodScheduled", "status": "False", "reason": reason, "message": message, "observedGeneration": pod.view.metadata.generation });
        if known.is_none_or(|condition| condition.status != "False") {
            condition["lastTransitionTime"] = json!(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::now()));
        }
        let mut status = json!({ "conditions": [condition] });
        if let Some(preemption) = &preemption {
            status["nominatedNodeName"] = json!(preemption.node);
        }
        let pods: Api<PodObject> = Api::namespaced(self.client.clone(), pod.key.ns());
        let patch = json!({ "metadata": { "uid": pod.uid }, "status": status });
        if let Err(error) = pods.patch_status(&pod.key.name, &PatchParams::default(), &Patch::Strategic(&patch)).await {
            tracing::debug!(pod = %pod.key, %error, "cannot write why the pod waits");
        }
        for victim in preemption.iter().flat_map(|p| &p.victims) {
            if let Err(error) = self.evict(victim, pod, preemption.as_ref().map_or("", |p| &p.node)).await {
                tracing::warn!(victim = %victim.key, pod = %pod.key, %error, "cannot evict");
            }
        }
    }

    async fn evict(&self, victim: &Pod, preemptor: &Pod, node: &str) -> Result<(), Error> {
        if victim.is_terminating() {
            return Ok(());
        }
        let pods: Api<PodObject> = Api::namespaced(self.client.clone(), victim.key.ns());
        let condition = json!({
            "type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler",
            "message": format!("{}: preempting to accommodate a higher priority pod", preemptor.scheduler_name()),
            "lastTransitionTime": k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::now()),
        });
        let patch = json!({ "metadata": { "uid": victim.uid }, "status": { "conditions": [condition] } });
        pods.patch_status(&victim.key.name, &PatchParams::default(), &Patch::Strategic(&patch)).await?;
        let preconditions = Preconditions { uid: Some(victim.uid.clone()), resource_version: None };
        match pods.delete(&victim.key.name, &DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() }).await {
            Ok(_) => {
                let about = ObjectReference { ..reference(&*victim.view) };
                self.recorder.event(&about, EventType::Normal, "Preempted", format!("Preempted by pod {} on node {node}", preemptor.uid));
                Ok(())
            }
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
