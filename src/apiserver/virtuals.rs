//! Resources that other parts hold: fetched when asked for, never stored.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use http::StatusCode;
use parking_lot::RwLock;
use serde_json::{Value, json};
use windlass_api::{ApiError, meta};

use crate::cache::{Filter, Stored};
use crate::cache::filter::Fields;
use crate::cache::scan::Paths;
use crate::rest::query::ListOptions;
use crate::rest::{Answer, Call, read};
use crate::storage::{Objects, object_key};

/// Who holds a resource's objects.
#[async_trait]
pub trait VirtualStorage: Send + Sync + 'static {
    /// One object, or `None`.
    async fn get(&self, plural: &str, namespace: &str, name: &str) -> Result<Option<Value>, ApiError>;
    /// The objects of a namespace, or of all (empty).
    async fn list(&self, plural: &str, namespace: &str) -> Result<Vec<Value>, ApiError>;
}

/// The parts that hold virtual resources, by the names that the registry gives them.
#[derive(Default)]
pub struct Virtuals(RwLock<HashMap<&'static str, Arc<dyn VirtualStorage>>>);

impl Virtuals {
    pub fn register(&self, owner: &'static str, storage: Arc<dyn VirtualStorage>) {
        self.0.write().insert(owner, storage);
    }

    fn find(&self, owner: &str) -> Result<Arc<dyn VirtualStorage>, ApiError> {
        self.0.read().get(owner).cloned().ok_or_else(|| ApiError::service_unavailable(format!("{owner} does not serve its objects at this moment")))
    }
}

/// `componentstatuses`: how the store is. Other components have health endpoints of their own, which nobody here may assume to reach.
pub struct Components {
    objects: Objects,
}

impl Components {
    pub fn new(objects: Objects) -> Components {
        Components { objects }
    }

    async fn store(&self) -> Value {
        let healthy = match self.objects.store().status().await {
            Ok(_) => json!({"type": "Healthy", "status": "True", "message": "ok"}),
            Err(error) => json!({"type": "Healthy", "status": "False", "message": error.to_string()}),
        };
        json!({"kind": "ComponentStatus", "apiVersion": "v1", "metadata": {"name": "etcd-0"}, "conditions": [healthy]})
    }
}

#[async_trait]
impl VirtualStorage for Components {
    async fn get(&self, _: &str, _: &str, name: &str) -> Result<Option<Value>, ApiError> {
        Ok(if name == "etcd-0" { Some(self.store().await) } else { None })
    }

    async fn list(&self, _: &str, _: &str) -> Result<Vec<Value>, ApiError> {
        Ok(vec![self.store().await])
    }
}

/// Serves get and list of a virtual resource.
pub async fn serve(call: &Call, owner: &'static str) -> Result<Answer, ApiError> {
    let storage = call.core.virtuals.find(owner)?;
    let plural = &call.resource.plural;
    match call.info.verb.as_str() {
        "get" => {
            let object = storage.get(plural, call.namespace(), call.name()).await?.ok_or_else(|| call.not_found())?;
            Ok(Answer::Stored(StatusCode::OK, Arc::new(unstored(call, &object)?)))
        }
        "list" => {
            let options = ListOptions::parse(&call.query, false)?;
            options.fields.check(&call.resource, &call.version().name).map_err(ApiError::bad_request)?;
            let filter = Filter::new(&call.resource, &Fields::default(), Some(call.namespace()), options.labels, &options.fields);
            let objects = storage.list(plural, call.namespace()).await?;
            let items = objects.iter().map(|o| unstored(call, o).map(Arc::new)).collect::<Result<Vec<_>, _>>()?;
            let items = items.into_iter().filter(|o| filter.matches(o)).collect();
            read::list_answer(call, items, call.core.objects.revision(), None, None).map(Answer::Raw)
        }
        verb => Err(ApiError::method_not_supported(&call.resource.group, plural, verb)),
    }
}

fn unstored(call: &Call, object: &Value) -> Result<Stored, ApiError> {
    let raw = serde_json::to_vec(object).map_err(ApiError::internal)?;
    let key = object_key(&call.resource, meta::namespace(object), meta::name(object));
    Stored::unversioned(&key, raw.into(), &Paths::new([])).ok_or_else(|| ApiError::internal("a virtual object has no metadata"))
}
