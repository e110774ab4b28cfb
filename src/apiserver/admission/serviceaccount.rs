//! ServiceAccount: every pod runs as an account of its namespace and gets that account's token and pull secrets.

use super::pods::{array_mut, containers, items, items_mut, secret_names, text};
use super::{AdmissionRequest, Operation, Plugin, pods};
use crate::cluster::{Cluster, Gr};
use async_trait::async_trait;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use windlass_api::ApiError;

const MOUNT_PATH: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const VOLUME_PREFIX: &str = "kube-api-access-";
const ENFORCE_MOUNTABLE: &str = "kubernetes.io/enforce-mountable-secrets";
/// One hour and seven seconds: tokens of exactly this lifetime are extended and only warned about (upstream's mark).
pub const TOKEN_SECONDS: i64 = 3607;

pub struct ServiceAccount {
    pub cluster: Arc<dyn Cluster>,
}

impl ServiceAccount {
    /// The account; the default one is waited for, since its controller makes it just after the namespace.
    async fn account(&self, request: &AdmissionRequest<'_>, name: &str) -> Result<Arc<Value>, ApiError> {
        let kind = Gr("", "serviceaccounts");
        if let Some(account) = self.cluster.cached(kind, request.namespace, name) {
            return Ok(account);
        }
        let attempts = if name == "default" { 10 } else { 1 };
        for attempt in 0..attempts {
            if attempt > 0 {
                tokio::time::sleep(Duration::from_millis(rand::random_range(100..200))).await;
            }
            if let Some(account) = self.cluster.get(kind, request.namespace, name).await? {
                return Ok(account);
            }
        }
        let namespace = request.namespace;
        let why = format!("error looking up service account {namespace}/{name}: serviceaccount {name:?} not found");
        Err(request.forbidden(why))
    }

    fn check_mirror(request: &AdmissionRequest<'_>, spec: &Value) -> Result<(), ApiError> {
        if !text(spec, "serviceAccountName").is_empty() {
            return Err(request.forbidden("a mirror pod may not reference service accounts"));
        }
        if !secret_names(spec).is_empty() {
            return Err(request.forbidden("a mirror pod may not reference secrets"));
        }
        let mut sources = items(spec, "volumes").flat_map(|volume| items(&volume["projected"], "sources"));
        if sources.any(|source| source["serviceAccountToken"].is_object()) {
            return Err(request.forbidden("a mirror pod may not use ServiceAccountToken volume projections"));
        }
        Ok(())
    }
}

fn enforces_mountable(account: &Value) -> bool {
    let value = text(&account["metadata"]["annotations"], ENFORCE_MOUNTABLE);
    matches!(value, "1" | "t" | "T" | "true" | "TRUE" | "True")
}

/// Only secrets that the account lists may be used (for accounts annotated so).
fn limit_secrets(account: &Value, spec: &Value, only_ephemeral: bool) -> Result<(), String> {
    let account_name = text(&account["metadata"], "name");
    let allowed = |name: &str| items(account, "secrets").any(|secret| text(secret, "name") == name);
    let tail = format!("is not allowed because service account {account_name} does not reference that secret");
    if !only_ephemeral {
        for volume in items(spec, "volumes") {
            let name = text(&volume["secret"], "secretName");
            if volume["secret"].is_object() && !allowed(name) {
                return Err(format!("volume with secret.secretName=\"{name}\" {tail}"));
            }
        }
    }
    for (field, container) in containers(spec) {
        let label = match field {
            "initContainers" => "init container",
            "ephemeralContainers" => "ephemeral container",
            _ => "container",
        };
        if (field == "ephemeralContainers") != only_ephemeral {
            continue;
        }
        let owner = text(container, "name");
        for var in items(container, "env") {
            let secret = &var["valueFrom"]["secretKeyRef"];
            let name = text(secret, "name");
            if secret.is_object() && !allowed(name) {
                let var = text(var, "name");
                return Err(format!("{label} {owner} with envVar {var} referencing secret.secretName=\"{name}\" {tail}"));
            }
        }
        for source in items(container, "envFrom") {
            let name = text(&source["secretRef"], "name");
            if source["secretRef"].is_object() && !allowed(name) {
                return Err(format!("{label} {owner} with envFrom referencing secret.secretName=\"{name}\" {tail}"));
            }
        }
    }
    if only_ephemeral {
        return Ok(());
    }
    for (index, secret) in items(spec, "imagePullSecrets").enumerate() {
        let name = text(secret, "name");
        if !items(account, "imagePullSecrets").any(|known| text(known, "name") == name) {
            return Err(format!(
                "imagePullSecrets[{index}].name=\"{name}\" is not allowed because service account {account_name} does not reference that imagePullSecret"
            ));
        }
    }
    Ok(())
}

/// Mounts the projected token volume into every container that has nothing at its path.
fn mount_token(spec: &mut Value) {
    let known = items(spec, "volumes").map(|volume| text(volume, "name"));
    let existing = known.into_iter().find(|name| name.starts_with(VOLUME_PREFIX)).map(str::to_owned);
    let name = existing.clone().unwrap_or_else(|| format!("{VOLUME_PREFIX}{}", crate::token::random_suffix(5)));
    let mut needed = false;
    for field in ["initContainers", "containers"] {
        for container in items_mut(spec, field) {
            if items(container, "volumeMounts").any(|mount| text(mount, "mountPath") == MOUNT_PATH) {
                continue;
            }
            if let Some(mounts) = array_mut(container, "volumeMounts") {
                mounts.push(json!({"name": name, "readOnly": true, "mountPath": MOUNT_PATH}));
                needed = true;
            }
        }
    }
    if existing.is_none() && needed {
        if let Some(volumes) = array_mut(spec, "volumes") {
            volumes.push(json!({"name": name, "projected": {
                "defaultMode": 420,
                "sources": [
                    {"serviceAccountToken": {"path": "token", "expirationSeconds": TOKEN_SECONDS}},
                    {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
                    {"downwardAPI": {"items": [
                        {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}},
                    ]}},
                ],
            }}));
        }
    }
}

#[async_trait]
impl Plugin for ServiceAccount {
    fn name(&self) -> &'static str {
        "ServiceAccount"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn mutate(&self, request: &mut AdmissionRequest<'_>) -> Result<(), ApiError> {
        if request.operation != Operation::Create || !request.is_object("", "pods") {
            return Ok(());
        }
        if pods::is_mirror(request.new_object()) {
            return Self::check_mirror(request, &request.new_object()["spec"]);
        }
        let name = match text(&request.new_object()["spec"], "serviceAccountName") {
            "" => "default".to_owned(),
            name => name.to_owned(),
        };
        let account = self.account(request, &name).await?;
        let Some(spec) = request.object.as_mut().and_then(|pod| pod.get_mut("spec")).filter(|spec| spec.is_object())
        else {
            return Ok(());
        };
        if text(spec, "serviceAccountName").is_empty() {
            spec["serviceAccountName"] = name.clone().into();
            spec["serviceAccount"] = name.into();
        }
        let automount = spec["automountServiceAccountToken"].as_bool();
        let automount = automount.or_else(|| account["automountServiceAccountToken"].as_bool()).unwrap_or(true);
        if automount {
            mount_token(spec);
        }
        if items(spec, "imagePullSecrets").len() == 0 {
            let secrets: Vec<Value> =
                items(&account, "imagePullSecrets").map(|secret| json!({"name": text(secret, "name")})).collect();
            if !secrets.is_empty() {
                spec["imagePullSecrets"] = secrets.into();
            }
        }
        Ok(())
    }

    async fn validate(&self, request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        let ephemeral = request.operation == Operation::Update && request.subresource == "ephemeralcontainers";
        let create = request.operation == Operation::Create && request.subresource.is_empty();
        if !request.is("", "pods") || !(ephemeral || create) {
            return Ok(());
        }
        let pod = request.new_object();
        let spec = &pod["spec"];
        if create && pods::is_mirror(pod) {
            return Self::check_mirror(request, spec);
        }
        let name = text(spec, "serviceAccountName");
        if name.is_empty() {
            let pod = text(&pod["metadata"], "name");
            return Err(request.forbidden(format!("no service account specified for pod {}/{pod}", request.namespace)));
        }
        let account = self.account(request, name).await?;
        if enforces_mountable(&account) {
            limit_secrets(&account, spec, ephemeral).map_err(|why| request.forbidden(why))?;
        }
        Ok(())
    }
}
