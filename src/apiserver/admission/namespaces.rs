//! NamespaceLifecycle: nothing is created where no namespace is, or where it is going away.

use super::{AdmissionRequest, Operation, Plugin};
use crate::cluster::{Cluster, Gr};
use async_trait::async_trait;
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use windlass_api::ApiError;

/// Namespaces that nobody deletes.
pub const IMMORTAL: [&str; 3] = ["default", "kube-system", "kube-public"];

/// How long after a namespace's deletion the cache is not believed about it.
const LIVE_LOOKUP: Duration = Duration::from_secs(30);
/// At most so many recently deleted namespaces are remembered (upstream's bound).
const REMEMBERED: usize = 100;

pub struct NamespaceLifecycle {
    cluster: Arc<dyn Cluster>,
    deleted: Mutex<HashMap<String, Instant>>,
}

impl NamespaceLifecycle {
    pub fn new(cluster: Arc<dyn Cluster>) -> NamespaceLifecycle {
        NamespaceLifecycle { cluster, deleted: Mutex::default() }
    }

    fn remember(&self, name: &str) {
        let now = Instant::now();
        let mut deleted = self.deleted.lock();
        deleted.retain(|_, at| now.duration_since(*at) < LIVE_LOOKUP);
        if deleted.len() >= REMEMBERED {
            if let Some(oldest) = deleted.iter().min_by_key(|(_, at)| **at).map(|(name, _)| name.clone()) {
                deleted.remove(&oldest);
            }
        }
        deleted.insert(name.to_owned(), now);
    }

    fn doubtful(&self, name: &str) -> bool {
        self.deleted.lock().get(name).is_some_and(|at| at.elapsed() < LIVE_LOOKUP)
    }

    /// The namespace from the cache, or from the store where the cache may be wrong.
    async fn namespace(&self, name: &str) -> Result<Arc<Value>, ApiError> {
        let kind = Gr("", "namespaces");
        let cached = self.cluster.cached(kind, "", name);
        match cached {
            Some(namespace) if namespace["status"]["phase"] == "Terminating" || !self.doubtful(name) => Ok(namespace),
            _ => {
                let live = self.cluster.get(kind, "", name).await?;
                live.ok_or_else(|| ApiError::not_found("", "namespaces", name))
            }
        }
    }
}

#[async_trait]
impl Plugin for NamespaceLifecycle {
    fn name(&self) -> &'static str {
        "NamespaceLifecycle"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation != Operation::Connect
    }

    async fn mutate(&self, request: &mut AdmissionRequest<'_>) -> Result<(), ApiError> {
        if request.is("", "namespaces") {
            if request.operation == Operation::Delete {
                if IMMORTAL.contains(&request.name) {
                    let why = "this namespace may not be deleted";
                    return Err(ApiError::forbidden("", "namespaces", request.name, why));
                }
                self.remember(request.name);
            }
            return Ok(());
        }
        let reviews = request.is("authorization.k8s.io", "localsubjectaccessreviews");
        if request.operation != Operation::Create || request.namespace.is_empty() || reviews {
            return Ok(());
        }
        let namespace = self.namespace(request.namespace).await?;
        if namespace["status"]["phase"] != "Terminating" {
            return Ok(());
        }
        let name = request.namespace;
        let why = format!("unable to create new content in namespace {name} because it is being terminated");
        let cause = format!("namespace {name} is being terminated");
        Err(request.forbidden(why).with_cause("NamespaceTerminating", cause, "metadata.namespace"))
    }
}
