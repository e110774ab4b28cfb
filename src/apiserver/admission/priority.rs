//! Priority: a pod's class name becomes its priority.

use super::pods::text;
use super::{AdmissionRequest, Operation, Plugin};
use crate::cluster::{Cluster, Gr};
use async_trait::async_trait;
use serde_json::Value;
use std::sync::Arc;
use windlass_api::{ApiError, meta};

const CLASSES: Gr = Gr("scheduling.k8s.io", "priorityclasses");

pub struct Priority {
    pub cluster: Arc<dyn Cluster>,
}

fn value(class: &Value) -> i64 {
    class["value"].as_i64().unwrap_or_default()
}

impl Priority {
    /// The default class; of several (a race made them) the one of the lowest priority.
    fn default_class(&self) -> Option<Arc<Value>> {
        let classes = self.cluster.cached_list(CLASSES, None);
        classes.into_iter().filter(|class| class["globalDefault"] == true).min_by_key(|class| value(class))
    }

    async fn create(&self, request: &mut AdmissionRequest<'_>) -> Result<(), ApiError> {
        let spec = &request.new_object()["spec"];
        let name = text(spec, "priorityClassName").to_owned();
        let class = match name.as_str() {
            "" => self.default_class(),
            name => {
                let class = match self.cluster.cached(CLASSES, "", name) {
                    Some(class) => Some(class),
                    None => self.cluster.get(CLASSES, "", name).await?,
                };
                let missing = || request.forbidden(format!("no PriorityClass with name {name} was found"));
                Some(class.ok_or_else(missing)?)
            }
        };
        let (name, priority, policy) = match &class {
            Some(class) => {
                let policy = class["preemptionPolicy"].as_str();
                (meta::name(class).to_owned(), value(class), policy.map(str::to_owned))
            }
            None => (name, 0, Some("PreemptLowerPriority".to_owned())),
        };
        if let Some(given) = spec["priority"].as_i64().filter(|given| *given != priority) {
            return Err(request.forbidden(format!(
                "the integer value of priority ({given}) must not be provided in pod spec; priority admission controller computed {priority} from the given PriorityClass name"
            )));
        }
        if let (Some(given), Some(policy)) = (spec["preemptionPolicy"].as_str(), &policy) {
            if given != policy {
                return Err(request.forbidden(format!(
                    "the string value of PreemptionPolicy ({given}) must not be provided in pod spec; priority admission controller computed {policy} from the given PriorityClass name"
                )));
            }
        }
        let Some(spec) = request.object.as_mut().and_then(|pod| pod.get_mut("spec")?.as_object_mut()) else {
            return Ok(());
        };
        if !name.is_empty() {
            spec.insert("priorityClassName".to_owned(), name.into());
        }
        spec.insert("priority".to_owned(), priority.into());
        if let Some(policy) = policy {
            spec.insert("preemptionPolicy".to_owned(), policy.into());
        }
        Ok(())
    }
}

#[async_trait]
impl Plugin for Priority {
    fn name(&self) -> &'static str {
        "Priority"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn mutate(&self, request: &mut AdmissionRequest<'_>) -> Result<(), ApiError> {
        if !request.is_object("", "pods") {
            return Ok(());
        }
        if request.operation == Operation::Create {
            return self.create(request).await;
        }
        // What was set on creation stays when an update leaves it out.
        let old = request.old.map(|old| old["spec"].clone()).unwrap_or_default();
        if let Some(spec) = request.object.as_mut().and_then(|pod| pod.get_mut("spec")?.as_object_mut()) {
            for field in ["priority", "preemptionPolicy"] {
                if spec.get(field).is_none_or(Value::is_null) && !old[field].is_null() {
                    spec.insert(field.to_owned(), old[field].clone());
                }
            }
        }
        Ok(())
    }

    async fn validate(&self, request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        if !request.is_object(CLASSES.0, CLASSES.1) || request.new_object()["globalDefault"] != true {
            return Ok(());
        }
        match self.default_class() {
            Some(class)
                if request.operation == Operation::Create || meta::name(&class) != meta::name(request.new_object()) =>
            {
                let name = meta::name(&class);
                let why = format!("PriorityClass {name} is already marked as default. Only one default can exist");
                Err(request.forbidden(why))
            }
            _ => Ok(()),
        }
    }
}
