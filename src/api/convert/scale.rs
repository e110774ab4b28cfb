//! The scale subresource: `autoscaling/v1` Scale out of an object and back into it.

use serde_json::{Map, Value, json};

use crate::field::FieldError;
use crate::meta;
use crate::registry::{Resource, ScalePaths};
use crate::selector::LabelSelector;
use crate::status::ApiError;

/// Where the numbers are for kinds that are built in.
fn builtin() -> ScalePaths {
    let path = |p: &str| p.split('.').map(str::to_owned).collect::<Vec<_>>();
    ScalePaths {
        spec_replicas: path("spec.replicas"),
        status_replicas: path("status.replicas"),
        label_selector: Some(path("spec.selector")),
    }
}

fn paths(resource: &Resource, version: &str) -> Result<ScalePaths, ApiError> {
    if !resource.custom {
        return Ok(builtin());
    }
    let found = resource.versions.iter().find(|v| v.name == version).and_then(|v| v.scale.clone());
    found.ok_or_else(|| ApiError::not_found(&resource.group, &resource.plural, "scale"))
}

fn find<'v>(object: &'v Value, path: &[String]) -> Option<&'v Value> {
    path.iter().try_fold(object, |v, name| v.get(name)).filter(|v| !v.is_null())
}

fn bad_type(resource: &Resource, object: &Value, path: &[String], want: &str) -> ApiError {
    ApiError::internal(format!(
        "{} {:?}: .{} is no {want}",
        resource.gr(),
        meta::name(object),
        path.join(".")
    ))
}

/// The Scale of an object.
pub fn get(resource: &Resource, version: &str, object: &Value) -> Result<Value, ApiError> {
    let paths = paths(resource, version)?;
    let number = |path: &[String]| match find(object, path) {
        None => Ok(0),
        Some(v) => v.as_i64().ok_or_else(|| bad_type(resource, object, path, "integer")),
    };
    let (desired, current) = (number(&paths.spec_replicas)?, number(&paths.status_replicas)?);
    let mut status = json!({"replicas": current});
    if let Some(path) = &paths.label_selector
        && let Some(v) = find(object, path)
    {
        let text = match v {
            Value::String(s) => s.clone(),
            // ReplicationControllers have a plain map.
            v if resource.group.is_empty() => LabelSelector::from_map(v).to_string(),
            v => LabelSelector::from_object(v).map_err(ApiError::internal)?.to_string(),
        };
        if !text.is_empty() {
            status["selector"] = text.into();
        }
    }
    let mut metadata = Map::new();
    for key in ["name", "namespace", "uid", "resourceVersion", "creationTimestamp"] {
        if let Some(v) = object["metadata"].get(key) {
            metadata.insert(key.into(), v.clone());
        }
    }
    let mut spec = Map::new();
    if desired != 0 {
        spec.insert("replicas".into(), desired.into());
    }
    Ok(json!({
        "apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": metadata, "spec": spec, "status": status,
    }))
}

/// Puts a Scale's `spec.replicas` into the object. The caller has compared uid and resourceVersion.
pub fn set(resource: &Resource, version: &str, object: &mut Value, scale: &Value) -> Result<(), ApiError> {
    let paths = paths(resource, version)?;
    let replicas = match &scale["spec"]["replicas"] {
        Value::Null => 0,
        v => v.as_i64().ok_or_else(|| ApiError::bad_request("spec.replicas must be an integer"))?,
    };
    if replicas < 0 {
        let e = FieldError::invalid("spec.replicas", replicas, "must be greater than or equal to 0");
        return Err(ApiError::invalid("autoscaling", "Scale", meta::name(object), vec![e]));
    }
    if let (Some(name), have) = (scale["metadata"]["name"].as_str(), meta::name(object))
        && name != have
    {
        return Err(ApiError::bad_request(format!(
            "the name of the object ({name}) does not match the name on the URL ({have})"
        )));
    }
    let mut slot = object;
    for name in &paths.spec_replicas {
        if slot.is_null() {
            *slot = Value::Object(Map::new());
        }
        let Some(map) = slot.as_object_mut() else {
            return Err(ApiError::internal(format!(".{} is not reachable", paths.spec_replicas.join("."))));
        };
        slot = map.entry(name.as_str()).or_insert(Value::Null);
    }
    *slot = replicas.into();
    Ok(())
}
