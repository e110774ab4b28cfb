//! RuntimeClass: a pod's class sets its overhead and where it may run.

use super::pods::{items, object_mut, resources, text};
use super::{AdmissionRequest, Operation, Plugin};
use crate::cluster::{Cluster, Gr};
use async_trait::async_trait;
use serde_json::Value;
use std::sync::Arc;
use windlass_api::ApiError;

pub struct RuntimeClass {
    pub cluster: Arc<dyn Cluster>,
}

impl RuntimeClass {
    async fn class(&self, request: &AdmissionRequest<'_>) -> Result<Option<Arc<Value>>, ApiError> {
        let Some(name) = request.new_object()["spec"]["runtimeClassName"].as_str() else { return Ok(None) };
        let kind = Gr("node.k8s.io", "runtimeclasses");
        let class = match self.cluster.cached(kind, "", name) {
            Some(class) => Some(class),
            None => self.cluster.get(kind, "", name).await?,
        };
        match class {
            Some(class) => Ok(Some(class)),
            None => Err(request.forbidden(format!("pod rejected: RuntimeClass {name:?} not found"))),
        }
    }
}

const MISMATCH: &str = "pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead";

/// Whether `wide` tolerates all that `narrow` does.
fn covers(wide: &Value, narrow: &Value) -> bool {
    if wide == narrow {
        return true;
    }
    let (operator, effect) = (text(wide, "operator"), text(wide, "effect"));
    if text(wide, "key") != text(narrow, "key") && !(text(wide, "key").is_empty() && operator == "Exists") {
        return false;
    }
    if !effect.is_empty() && effect != text(narrow, "effect") {
        return false;
    }
    if let (true, Some(most)) = (effect == "NoExecute", wide["tolerationSeconds"].as_i64()) {
        if narrow["tolerationSeconds"].as_i64().is_none_or(|seconds| seconds > most) {
            return false;
        }
    }
    match operator {
        "" | "Equal" => {
            matches!(text(narrow, "operator"), "" | "Equal") && text(wide, "value") == text(narrow, "value")
        }
        "Exists" => true,
        _ => false,
    }
}

/// Both lists, without what another toleration covers; of equal ones the first.
fn merge(first: &Value, second: &Value, field: &str) -> Vec<Value> {
    let all: Vec<&Value> = items(first, field).chain(items(second, field)).collect();
    let mut merged: Vec<Value> = Vec::new();
    for (index, toleration) in all.iter().enumerate() {
        let covered = merged.iter().any(|known| covers(known, toleration))
            || all[index + 1..].iter().any(|later| later != toleration && covers(later, toleration));
        if !covered {
            merged.push((*toleration).clone());
        }
    }
    merged
}

#[async_trait]
impl Plugin for RuntimeClass {
    fn name(&self) -> &'static str {
        "RuntimeClass"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }

    async fn mutate(&self, request: &mut AdmissionRequest<'_>) -> Result<(), ApiError> {
        if !request.is_object("", "pods") {
            return Ok(());
        }
        let Some(class) = self.class(request).await? else { return Ok(()) };
        let spec = &request.new_object()["spec"];
        let fixed = &class["overhead"]["podFixed"];
        let given = resources(&spec["overhead"]);
        if !class["overhead"].is_null() && !given.is_empty() && given != resources(fixed) {
            return Err(request.forbidden(MISMATCH));
        }
        let scheduling = &class["scheduling"];
        for (key, value) in scheduling["nodeSelector"].as_object().into_iter().flatten() {
            let own = &spec["nodeSelector"][key];
            if !own.is_null() && own != value {
                let (value, own) = (value.as_str().unwrap_or_default(), own.as_str().unwrap_or_default());
                return Err(request.forbidden(format!(
                    "conflict: runtimeClass.scheduling.nodeSelector[{key}] = {value}; pod.spec.nodeSelector[{key}] = {own}"
                )));
            }
        }
        let Some(spec) = request.object.as_mut().and_then(|pod| pod.get_mut("spec")).filter(|spec| spec.is_object())
        else {
            return Ok(());
        };
        if fixed.is_object() {
            spec["overhead"] = fixed.clone();
        }
        if let Some(wanted) = scheduling["nodeSelector"].as_object() {
            if let Some(selector) = object_mut(spec, "nodeSelector") {
                selector.extend(wanted.clone());
            }
        }
        if scheduling.is_object() {
            let merged = merge(spec, scheduling, "tolerations");
            if !merged.is_empty() {
                spec["tolerations"] = merged.into();
            }
        }
        Ok(())
    }

    async fn validate(&self, request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        if !request.is_object("", "pods") {
            return Ok(());
        }
        let class = self.class(request).await?;
        let own = &request.new_object()["spec"]["overhead"];
        match class.filter(|class| class["overhead"].is_object()) {
            Some(class) if resources(&class["overhead"]["podFixed"]) != resources(own) => {
                Err(request.forbidden(MISMATCH))
            }
            None if !own.is_null() => Err(request
                .forbidden("pod rejected: Pod Overhead set without corresponding RuntimeClass defined Overhead")),
            _ => Ok(()),
        }
    }
}
