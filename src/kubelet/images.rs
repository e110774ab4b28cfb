//! Images for containers: pull policies, secrets, back-off; and which images were used when.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container, Pod};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use windlass_client::events::EventType;

use crate::metrics;
use crate::pod::model;
use crate::pod::plan::Backoff;
use crate::pod::status::Why;
use crate::registry_auth;
use crate::runtime::reference::Reference;
use crate::runtime::{Error, Image, Runtime};
use crate::shared::Shared;

/// Pulls that one image may fail before its back-off reaches five minutes are counted from ten seconds.
const BACKOFF: SignedDuration = SignedDuration::from_secs(10);
const BACKOFF_MAX: SignedDuration = SignedDuration::from_secs(300);

pub struct Images {
    runtime: Arc<dyn Runtime>,
    pulls: Semaphore,
    backoff: Mutex<Backoff>,
    failures: Mutex<HashMap<String, (Timestamp, String)>>,
    /// When an image was last used or seen in use, by id.
    used: Mutex<HashMap<String, Timestamp>>,
    /// When an image was first seen on the node, by id.
    seen: Mutex<HashMap<String, Timestamp>>,
}

/// The policy that applies when the container names none.
pub fn policy(container: &Container) -> &str {
    match container.image_pull_policy.as_deref() {
        Some(policy) if !policy.is_empty() => policy,
        _ => {
            let latest = Reference::parse(container.image.as_deref().unwrap_or("")).is_ok_and(|r| r.is_latest());
            if latest { "Always" } else { "IfNotPresent" }
        }
    }
}

impl Images {
    pub fn new(runtime: Arc<dyn Runtime>, parallel: usize) -> Self {
        Self {
            runtime,
            pulls: Semaphore::new(parallel.max(1)),
            backoff: Mutex::new(Backoff::new(BACKOFF, BACKOFF_MAX)),
            failures: Mutex::default(),
            used: Mutex::default(),
            seen: Mutex::default(),
        }
    }

    pub fn mark_used(&self, id: &str, now: Timestamp) {
        self.used.lock().insert(id.to_owned(), now);
    }

    /// When the image was last in use, for those that have been seen.
    pub fn last_used(&self, id: &str) -> Option<Timestamp> {
        self.used.lock().get(id).copied()
    }

    pub fn first_seen(&self, id: &str) -> Option<Timestamp> {
        self.seen.lock().get(id).copied()
    }

    /// Notes which images there are, and forgets those that are gone.
    pub fn retain(&self, present: &[Image], now: Timestamp) {
        let mut seen = self.seen.lock();
        seen.retain(|id, _| present.iter().any(|i| i.id == *id));
        for image in present {
            seen.entry(image.id.clone()).or_insert(now);
        }
        drop(seen);
        self.used.lock().retain(|id, _| present.iter().any(|i| i.id == *id));
    }

    /// Makes sure that the container's image is on the node.
    ///
    /// # Errors
    /// Reason and message of the container's waiting state.
    pub async fn ensure(&self, shared: &Shared, pod: &Pod, container: &Container) -> Result<Image, Why> {
        let wanted = container.image.as_deref().unwrap_or("");
        let event = |kind, reason: &str, message: String| shared.event(pod, Some(&container.name), kind, reason, message);
        let reference = Reference::parse(wanted).map_err(|e| {
            let message = format!("Failed to apply default image tag \"{wanted}\": {e}");
            event(EventType::Warning, "InspectFailed", message.clone());
            Why::new("InvalidImageName", message)
        })?;
        let present = self.runtime.image(wanted).await.map_err(|e| {
            let message = format!("Failed to inspect image \"{wanted}\": {e}");
            event(EventType::Warning, "InspectFailed", message.clone());
            Why::new("ImageInspectError", message)
        })?;
        match (policy(container), present) {
            ("Never", None) => {
                let message = format!("Container image \"{wanted}\" is not present with pull policy of Never");
                event(EventType::Warning, "ErrImageNeverPull", message.clone());
                Err(Why::new("ErrImageNeverPull", message))
            }
            ("Never" | "IfNotPresent", Some(image)) => {
                event(EventType::Normal, "Pulled", format!("Container image \"{wanted}\" already present on machine and can be accessed by the pod"));
                self.mark_used(&image.id, Timestamp::now());
                Ok(image)
            }
            _ => self.pull(shared, pod, container, wanted, &reference).await,
        }
    }

    async fn pull(&self, shared: &Shared, pod: &Pod, container: &Container, wanted: &str, reference: &Reference) -> Result<Image, Why> {
        let event = |kind, reason: &str, message: String| shared.event(pod, Some(&container.name), kind, reason, message);
        let key = format!("{}_{wanted}", model::uid(pod));
        let failed = self.failures.lock().get(&key).cloned();
        if let Some((at, error)) = &failed
            && self.backoff.lock().until(&key, *at, Timestamp::now()).is_some()
        {
            event(EventType::Normal, "BackOff", format!("Back-off pulling image \"{wanted}\""));
            return Err(Why::new("ImagePullBackOff", format!("Back-off pulling image \"{wanted}\": ErrImagePull: {error}")));
        }
        event(EventType::Normal, "Pulling", format!("Pulling image \"{wanted}\""));
        let begun = Instant::now();
        let result = self.pull_with_secrets(shared, pod, wanted, reference).await;
        match result {
            Ok((image, waited)) => {
                self.failures.lock().remove(&key);
                self.backoff.lock().forget(&key);
                let (pulled, total) = ((begun.elapsed().saturating_sub(waited)), begun.elapsed());
                metrics::IMAGE_PULL.with_label_values(&[metrics::size_class(image.size)]).observe(pulled.as_secs_f64());
                event(EventType::Normal, "Pulled", format!("Successfully pulled image \"{wanted}\" in {pulled:.3?} ({total:.3?} including waiting). Image size: {} bytes.", image.size));
                self.mark_used(&image.id, Timestamp::now());
                Ok(image)
            }
            Err(error) => {
                let now = Timestamp::now();
                let before = failed.map_or(now, |(at, _)| at);
                self.backoff.lock().next(&key, before, now);
                self.failures.lock().insert(key, (now, error.clone()));
                event(EventType::Warning, "Failed", format!("Failed to pull image \"{wanted}\": {error}"));
                Err(Why::new("ErrImagePull", error))
            }
        }
    }

    async fn pull_with_secrets(&self, shared: &Shared, pod: &Pod, wanted: &str, reference: &Reference) -> Result<(Image, std::time::Duration), String> {
        let mut secrets = Vec::new();
        for name in model::spec(pod).image_pull_secrets.iter().flatten().map(|s| &s.name) {
            match shared.objects.secret(model::uid(pod), model::namespace(pod), name).await {
                Ok(Some(secret)) => secrets.push(secret),
                Ok(None) | Err(_) => {
                    let message = format!("Unable to retrieve some image pull secrets ({name}); attempting to pull the image may not succeed.");
                    shared.event(pod, None, EventType::Warning, "FailedToRetrieveImagePullSecret", message);
                }
            }
        }
        let mut attempts: Vec<_> = registry_auth::matching(&secrets, reference).into_iter().map(Some).collect();
        if attempts.is_empty() {
            attempts.push(None);
        }
        let queued = Instant::now();
        let _permit = self.pulls.acquire().await.map_err(|e| e.to_string())?;
        let waited = queued.elapsed();
        let mut error = String::new();
        for credentials in attempts {
            match self.runtime.pull(wanted, credentials.as_ref()).await {
                Ok(()) => {
                    let image = self.runtime.image(wanted).await.map_err(|e| e.to_string())?;
                    return image.map(|i| (i, waited)).ok_or_else(|| format!("image \"{wanted}\" is not there after the pull"));
                }
                Err(Error::Image { message, .. }) => error = message,
                Err(e) => error = e.to_string(),
            }
        }
        Err(error)
    }

    /// The pod is gone: its pulls' back-off is forgotten.
    pub fn release(&self, pod_uid: &str) {
        let prefix = format!("{pod_uid}_");
        let mut failures = self.failures.lock();
        let mut backoff = self.backoff.lock();
        failures.retain(|key, _| {
            let keep = !key.starts_with(&prefix);
            if !keep {
                backoff.forget(key);
            }
            keep
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_policies() {
        let check = |image: &str, given: Option<&str>, expected: &str| {
            let container = Container { image: Some(image.into()), image_pull_policy: given.map(str::to_owned), ..Default::default() };
            assert_eq!(policy(&container), expected, "{image}");
        };
        check("busybox", None, "Always");
        check("busybox:latest", None, "Always");
        check("busybox:1", None, "IfNotPresent");
        check("busybox", Some("Never"), "Never");
    }
}
