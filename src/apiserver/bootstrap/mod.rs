//! What a new cluster begins with, and what every start puts right: namespaces, roles and bindings, priority classes,
//! flow control, the `kubernetes` service, and the ConfigMap for extension API servers.
//!
//! Invariants:
//! - Everything here may run on several API servers at once, and again at each start: it only adds what is missing.
//! - What people changed stays: roles are completed, not replaced; an annotation takes an object out altogether.
//!
//! Code map: [`policy`] RBAC; [`flow`] priority and fairness; [`service`] the `kubernetes` service and its endpoints.

pub mod flow;
pub mod policy;
pub mod service;

use crate::allocate::Allocators;
use crate::cluster::{Cluster, Gr};
use crate::pki::Pki;
use serde_json::{Value, json};
use std::sync::Arc;
use windlass_api::ApiError;

/// Namespaces that every cluster has.
pub const NAMESPACES: [&str; 4] = ["default", "kube-system", "kube-public", "kube-node-lease"];

/// Priority classes that every cluster has, and what each is for.
const PRIORITY_CLASSES: [(&str, i64, &str); 2] = [
    (
        "system-node-critical",
        2_000_001_000,
        "Used for system critical pods that must not be moved from their current node.",
    ),
    (
        "system-cluster-critical",
        2_000_000_000,
        "Used for system critical pods that must run in the cluster, but can be moved to another node if necessary.",
    ),
];

pub(crate) async fn find(
    cluster: &dyn Cluster,
    kind: Gr,
    namespace: &str,
    name: &str,
) -> Result<Option<Arc<Value>>, ApiError> {
    match cluster.cached(kind, namespace, name) {
        Some(found) => Ok(Some(found)),
        None => cluster.get(kind, namespace, name).await,
    }
}

/// Another server may have made the same object at the same moment.
pub(crate) fn tolerate_existing(result: Result<Arc<Value>, ApiError>) -> Result<(), ApiError> {
    match result {
        Err(error) if error.reason != "AlreadyExists" => Err(error),
        _ => Ok(()),
    }
}

pub(crate) fn tolerate_missing(result: Result<(), ApiError>) -> Result<(), ApiError> {
    match result {
        Err(error) if error.code != 404 => Err(error),
        _ => Ok(()),
    }
}

async fn namespaces(cluster: &dyn Cluster) -> Result<(), ApiError> {
    for name in NAMESPACES {
        if find(cluster, Gr("", "namespaces"), "", name).await?.is_some() {
            continue;
        }
        let namespace = json!({
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name}},
            "spec": {"finalizers": ["kubernetes"]},
            "status": {"phase": "Active"},
        });
        tolerate_existing(cluster.create(Gr("", "namespaces"), namespace).await)?;
    }
    Ok(())
}

async fn priority_classes(cluster: &dyn Cluster) -> Result<(), ApiError> {
    const CLASSES: Gr = Gr("scheduling.k8s.io", "priorityclasses");
    for (name, value, description) in PRIORITY_CLASSES {
        if find(cluster, CLASSES, "", name).await?.is_some() {
            continue;
        }
        let class = json!({
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": name},
            "value": value,
            "description": description,
            "preemptionPolicy": "PreemptLowerPriority",
        });
        tolerate_existing(cluster.create(CLASSES, class).await)?;
    }
    Ok(())
}

/// How extension API servers check who calls them (`extension-apiserver-authentication`).
async fn extension_authentication(cluster: &dyn Cluster, pki: &Pki, allowed: &[String]) -> Result<(), ApiError> {
    const KIND: Gr = Gr("", "configmaps");
    const NAME: &str = "extension-apiserver-authentication";
    let data = json!({
        "client-ca-file": pki.cluster.certificate_pem(),
        "requestheader-client-ca-file": pki.front_proxy.certificate_pem(),
        "requestheader-allowed-names": json!(allowed).to_string(),
        "requestheader-extra-headers-prefix": "[\"X-Remote-Extra-\"]",
        "requestheader-group-headers": "[\"X-Remote-Group\"]",
        "requestheader-uid-headers": "[\"X-Remote-Uid\"]",
        "requestheader-username-headers": "[\"X-Remote-User\"]",
    });
    match find(cluster, KIND, "kube-system", NAME).await? {
        None => {
            let object = json!({
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": NAME, "namespace": "kube-system"},
                "data": data,
            });
            tolerate_existing(cluster.create(KIND, object).await)
        }
        Some(stored) if stored["data"] == data => Ok(()),
        Some(_) => {
            let mut change = |stored: &mut Value| {
                stored["data"] = data.clone();
                Ok(true)
            };
            cluster.update(KIND, "kube-system", NAME, &mut change).await.map(drop)
        }
    }
}

/// What the first objects depend on.
pub struct Settings<'a> {
    pub pki: &'a Pki,
    pub allocators: &'a Allocators,
    /// The port on which this server serves (the target port of the `kubernetes` service).
    pub port: u16,
    /// `--requestheader-allowed-names`.
    pub request_header_names: &'a [String],
}

/// Puts everything in place that a cluster begins with. Run at each start, before the server is ready.
pub async fn ensure(cluster: &dyn Cluster, settings: &Settings<'_>) -> Result<(), ApiError> {
    namespaces(cluster).await?;
    // At once, so that the writes share their way to the disk.
    let ((), (), (), (), ()) = futures::try_join!(
        policy::ensure(cluster),
        priority_classes(cluster),
        flow::ensure(cluster),
        extension_authentication(cluster, settings.pki, settings.request_header_names),
        service::ensure(cluster, settings.allocators, settings.port),
    )?;
    Ok(())
}
