//! Admission: plugins between decoding and storage, in upstream's order.
//!
//! Invariants:
//! - Mutating runs before the strategy's defaults and validation, validating after; each plugin sees what those before it left.
//! - A plugin's own reads come from caches; a live read is made only where a stale cache would wrongly refuse.
//! - A refusal is 403 in the words of upstream's plugin, unless that plugin answers otherwise.
//! - Webhooks and CEL policies are plugins like any other; their places in the order are marked in [`Chain::standard`].
//!
//! Code map: one file per plugin, or per family of small ones ([`defaults`], [`certificates`]); [`chain`] the order.

pub mod certificates;
pub mod chain;
pub mod defaults;
pub mod limits;
pub mod namespaces;
pub mod noderestriction;
pub mod pods;
pub mod podsecurity;
pub mod priority;
pub mod quota;
pub mod runtimeclass;
pub mod serviceaccount;

pub use chain::Chain;

use async_trait::async_trait;
use serde_json::Value;
use std::sync::Arc;
use windlass_api::ApiError;
use windlass_api::registry::Resource;

use crate::request::UserInfo;

/// What a request does to its object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Create,
    Update,
    Delete,
    Connect,
}

impl Operation {
    /// Upstream's name, as in webhooks and CEL (`CREATE`).
    pub fn as_str(self) -> &'static str {
        match self {
            Operation::Create => "CREATE",
            Operation::Update => "UPDATE",
            Operation::Delete => "DELETE",
            Operation::Connect => "CONNECT",
        }
    }
}

/// A write (or a connection) on its way to storage.
#[derive(Debug)]
pub struct AdmissionRequest<'a> {
    pub operation: Operation,
    pub resource: &'a Arc<Resource>,
    /// The version that the request was made in.
    pub version: &'a str,
    /// Empty for the object itself.
    pub subresource: &'a str,
    /// Empty for cluster-scoped objects.
    pub namespace: &'a str,
    /// Empty where the server is still to generate it.
    pub name: &'a str,
    pub user: &'a UserInfo,
    /// The new object or subresource body (`None` on delete).
    pub object: Option<Value>,
    /// What is stored now (update and delete).
    pub old: Option<&'a Value>,
    /// `CreateOptions`, `UpdateOptions`, `DeleteOptions` or the connect options; `Null` if none.
    pub options: &'a Value,
    pub dry_run: bool,
    /// Texts for `Warning` headers; plugins that validate add theirs through [`AdmissionRequest::warn`].
    pub warnings: parking_lot::Mutex<Vec<String>>,
}

impl AdmissionRequest<'_> {
    pub fn is(&self, group: &str, plural: &str) -> bool {
        self.resource.group == group && self.resource.plural == plural
    }

    /// The object itself, not one of its subresources.
    pub fn is_object(&self, group: &str, plural: &str) -> bool {
        self.subresource.is_empty() && self.is(group, plural)
    }

    pub fn warn(&self, text: impl Into<String>) {
        self.warnings.lock().push(text.into());
    }

    /// The new object, `Null` when there is none.
    pub fn new_object(&self) -> &Value {
        self.object.as_ref().unwrap_or(&Value::Null)
    }

    /// A 403 about this request's object, as upstream's `admission.NewForbidden`.
    pub fn forbidden(&self, message: impl AsRef<str>) -> ApiError {
        let mut name = self.name.to_owned();
        if name.is_empty() {
            name = self.new_object()["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        }
        if name.is_empty() {
            name = self.new_object()["metadata"]["generateName"].as_str().unwrap_or_default().to_owned();
        }
        if name.is_empty() {
            name = "Unknown".to_owned();
        }
        ApiError::forbidden(&self.resource.group, &self.resource.plural, &name, message.as_ref())
    }
}

/// One admission plugin. Both methods default to agreement.
#[async_trait]
pub trait Plugin: Send + Sync + 'static {
    /// Upstream's name (`--enable-admission-plugins`).
    fn name(&self) -> &'static str;
    fn handles(&self, operation: Operation) -> bool;
    async fn mutate(&self, _request: &mut AdmissionRequest<'_>) -> Result<(), ApiError> {
        Ok(())
    }
    async fn validate(&self, _request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        Ok(())
    }
}

#[cfg(test)]
pub mod testing {
    //! Requests for the tests of plugins.
    use super::*;
    use windlass_api::registry::Registry;

    /// An owned request, with what most tests leave alone filled in.
    #[derive(Clone)]
    pub struct Request {
        pub operation: Operation,
        pub group: &'static str,
        pub plural: &'static str,
        pub subresource: &'static str,
        pub user: UserInfo,
        pub object: Option<Value>,
        pub old: Option<Value>,
        pub dry_run: bool,
    }

    impl Request {
        pub fn new(operation: Operation, group: &'static str, plural: &'static str, object: Value) -> Request {
            let user = UserInfo { name: "ann".into(), ..UserInfo::default() };
            let object = (!object.is_null()).then_some(object);
            Request { operation, group, plural, subresource: "", user, object, old: None, dry_run: false }
        }

        /// Runs a plugin's half on the request and returns its result.
        pub async fn run<T>(&self, run: impl AsyncFnOnce(&mut AdmissionRequest<'_>) -> T) -> T {
            let resource = Registry::builtin().find_resource(self.group, self.plural).expect("a built-in resource");
            let shown = self.object.as_ref().or(self.old.as_ref()).cloned().unwrap_or_default();
            let meta = |field: &str| shown["metadata"][field].as_str().unwrap_or_default().to_owned();
            let (namespace, name) = (meta("namespace"), meta("name"));
            let mut request = AdmissionRequest {
                operation: self.operation,
                resource: &resource,
                version: &resource.storage_version,
                subresource: self.subresource,
                namespace: &namespace,
                name: &name,
                user: &self.user,
                object: self.object.clone(),
                old: self.old.as_ref(),
                options: &Value::Null,
                dry_run: self.dry_run,
                warnings: Default::default(),
            };
            run(&mut request).await
        }

        /// The object after the plugin's mutation, or its refusal.
        pub async fn mutated(&self, plugin: &dyn Plugin) -> Result<Value, String> {
            self.run(async |request| {
                plugin.mutate(request).await.map_err(|error| error.message.clone())?;
                Ok(request.object.clone().unwrap_or_default())
            })
            .await
        }

        /// The warnings of the plugin's validation, or its refusal.
        pub async fn validated(&self, plugin: &dyn Plugin) -> Result<Vec<String>, String> {
            self.run(async |request| {
                plugin.validate(request).await.map_err(|error| error.message.clone())?;
                Ok(request.warnings.lock().clone())
            })
            .await
        }
    }
}

#[cfg(test)]
mod tests;
