//! The few ways in which controllers talk to the API, and what its refusals mean.

use http::{
    Request,
    header::{ACCEPT, CONTENT_TYPE},
};
use kube::{Client, Resource};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::Error;

/// What a refusal means to a controller.
pub trait ApiErrorExt {
    fn code(&self) -> u16;
    /// `reason` of the Status.
    fn reason(&self) -> &str;
    fn is_not_found(&self) -> bool {
        self.code() == 404
    }
    fn is_conflict(&self) -> bool {
        self.code() == 409 && self.reason() != "AlreadyExists"
    }
    fn is_already_exists(&self) -> bool {
        self.code() == 409 && self.reason() == "AlreadyExists"
    }
    fn is_invalid(&self) -> bool {
        self.code() == 422
    }
    /// Nothing can be created in this namespace any more: not an error, the namespace goes and we go with it.
    fn is_namespace_terminating(&self) -> bool;
}

impl ApiErrorExt for kube::Error {
    fn code(&self) -> u16 {
        if let kube::Error::Api(status) = self { status.code } else { 0 }
    }

    fn reason(&self) -> &str {
        if let kube::Error::Api(status) = self { &status.reason } else { "" }
    }

    fn is_namespace_terminating(&self) -> bool {
        let kube::Error::Api(status) = self else { return false };
        status.details.iter().flat_map(|details| &details.causes).any(|cause| cause.reason == "NamespaceTerminating")
    }
}

impl ApiErrorExt for Error {
    fn code(&self) -> u16 {
        if let Error::Api { source, .. } = self { source.code() } else { 0 }
    }

    fn reason(&self) -> &str {
        if let Error::Api { source, .. } = self { source.reason() } else { "" }
    }

    fn is_namespace_terminating(&self) -> bool {
        if let Error::Api { source, .. } = self { source.is_namespace_terminating() } else { false }
    }
}

/// The text of a refusal as the server put it: what goes into events and conditions.
pub fn message(error: &Error) -> String {
    match error {
        Error::Api { source, .. } => api_message(source),
        other => other.to_string(),
    }
}

/// The server's own words, where it is the server that refused.
pub fn api_message(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => other.to_string(),
    }
}

async fn send<T: DeserializeOwned>(client: &Client, method: &str, path: &str, content: &str, body: Vec<u8>) -> Result<T, Error> {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(CONTENT_TYPE, content)
        .body(body)
        .map_err(|error| Error::Request { path: path.to_owned(), reason: error.to_string() })?;
    client.request(request).await.map_err(|source| Error::Api { what: format!("{method} {path}"), source: Box::new(source) })
}

fn bytes(body: &impl Serialize) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(body).map_err(|error| Error::Request { path: String::new(), reason: error.to_string() })
}

/// The object at `path`, none if there is none.
pub async fn get<T: DeserializeOwned>(client: &Client, path: &str) -> Result<Option<T>, Error> {
    match send(client, "GET", path, "application/json", Vec::new()).await {
        Ok(object) => Ok(Some(object)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

/// What is at `path`, in one of the forms that `accept` names; none if there is nothing.
pub async fn get_as<T: DeserializeOwned>(client: &Client, path: &str, accept: &str) -> Result<Option<T>, Error> {
    let request = Request::get(path).header(ACCEPT, accept).body(Vec::new());
    let request = request.map_err(|error| Error::Request { path: path.to_owned(), reason: error.to_string() })?;
    match client.request(request).await {
        Ok(object) => Ok(Some(object)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(source) => Err(Error::Api { what: format!("GET {path}"), source: Box::new(source) }),
    }
}

/// Creates an object in the collection at `path`.
pub async fn create<T: DeserializeOwned>(client: &Client, path: &str, object: &impl Serialize) -> Result<T, Error> {
    send(client, "POST", path, "application/json", bytes(object)?).await
}

/// Replaces the object (or its subresource) at `path`; its `resourceVersion` makes a conflict of a race.
pub async fn replace<T: DeserializeOwned>(client: &Client, path: &str, object: &impl Serialize) -> Result<T, Error> {
    send(client, "PUT", path, "application/json", bytes(object)?).await
}

/// A JSON merge patch.
pub async fn merge_patch(client: &Client, path: &str, patch: &Value) -> Result<Value, Error> {
    send(client, "PATCH", path, "application/merge-patch+json", bytes(patch)?).await
}

/// A strategic merge patch.
pub async fn strategic_patch(client: &Client, path: &str, patch: &Value) -> Result<Value, Error> {
    send(client, "PATCH", path, "application/strategic-merge-patch+json", bytes(patch)?).await
}

/// How an object is to be deleted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Delete<'a> {
    /// Only if the object still has this UID.
    pub uid: Option<&'a str>,
    pub resource_version: Option<&'a str>,
    pub grace_period_seconds: Option<i64>,
    /// `Foreground`, `Background` or `Orphan`.
    pub propagation: Option<&'a str>,
}

/// Deletes the object at `path`; that it is gone already is success (`false`).
pub async fn delete(client: &Client, path: &str, how: Delete<'_>) -> Result<bool, Error> {
    let mut options = json!({"apiVersion": "v1", "kind": "DeleteOptions"});
    if let Some(uid) = how.uid {
        options["preconditions"]["uid"] = json!(uid);
    }
    if let Some(version) = how.resource_version {
        options["preconditions"]["resourceVersion"] = json!(version);
    }
    if let Some(seconds) = how.grace_period_seconds {
        options["gracePeriodSeconds"] = json!(seconds);
    }
    if let Some(policy) = how.propagation {
        options["propagationPolicy"] = json!(policy);
    }
    match send::<Value>(client, "DELETE", path, "application/json", bytes(&options)?).await {
        Ok(_) => Ok(true),
        Err(error) if error.is_not_found() => Ok(false),
        Err(error) => Err(error),
    }
}

/// The path of an object.
pub fn path<K: Resource<DynamicType = ()>>(object: &K) -> String {
    object_path::<K>(object.meta().namespace.as_deref().unwrap_or_default(), object.meta().name.as_deref().unwrap_or_default())
}

/// The path of an object by name; `namespace` "" for cluster-scoped kinds.
pub fn object_path<K: Resource<DynamicType = ()>>(namespace: &str, name: &str) -> String {
    format!("{}/{name}", collection_path::<K>(namespace))
}

/// The path of a collection.
pub fn collection_path<K: Resource<DynamicType = ()>>(namespace: &str) -> String {
    K::url_path(&(), (!namespace.is_empty()).then_some(namespace))
}

/// An object as its wire form, with `apiVersion` and `kind`.
pub fn wire<K: Resource<DynamicType = ()> + Serialize>(object: &K) -> Value {
    let mut value = serde_json::to_value(object).unwrap_or_default();
    value["apiVersion"] = json!(K::api_version(&()));
    value["kind"] = json!(K::kind(&()));
    value
}

/// Writes the status of an object that was read from a cache and changed; a race is a conflict.
pub async fn update_status<K: Resource<DynamicType = ()> + Serialize + DeserializeOwned>(client: &Client, object: &K) -> Result<K, Error> {
    replace(client, &format!("{}/status", path(object)), &wire(object)).await
}

/// Writes an object that was read from a cache and changed; a race is a conflict.
pub async fn update<K: Resource<DynamicType = ()> + Serialize + DeserializeOwned>(client: &Client, object: &K) -> Result<K, Error> {
    replace(client, &path(object), &wire(object)).await
}
