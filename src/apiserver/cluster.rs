//! The view of the cluster's objects that authentication, authorization, admission and allocation work through.
//!
//! They need few operations and none of the pipeline; a trait keeps them testable over a map in memory.

use crate::storage::{CacheEvent, Change as CacheChange, Objects};
use async_trait::async_trait;
use serde_json::Value;
use std::sync::Arc;
use windlass_api::registry::Resource;
use windlass_api::{ApiError, meta};

/// A group and a plural, such as `Gr("", "pods")`: an object kind in its storage version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Gr(pub &'static str, pub &'static str);

/// A change as stored bytes: `None` where the object does not exist on that side.
#[derive(Clone, Copy, Debug)]
pub struct Change<'a> {
    pub old: Option<&'a [u8]>,
    pub new: Option<&'a [u8]>,
}

/// Called with every object there is and then with every change, in order. Must not block.
pub type OnChange = Arc<dyn Fn(&Change<'_>) + Send + Sync>;

/// Changes an object in place; `Ok(false)` leaves it as it is. May be called several times.
pub type Mutate<'a> = &'a mut (dyn FnMut(&mut Value) -> Result<bool, ApiError> + Send);

/// Reads and writes of objects by the API server itself (no authorization, no admission).
#[async_trait]
pub trait Cluster: Send + Sync + 'static {
    /// From the watch cache: may lag behind the store by milliseconds.
    fn cached(&self, kind: Gr, namespace: &str, name: &str) -> Option<Arc<Value>>;
    /// From the watch cache; `None` is every namespace.
    fn cached_list(&self, kind: Gr, namespace: Option<&str>) -> Vec<Arc<Value>>;
    /// From the store.
    async fn get(&self, kind: Gr, namespace: &str, name: &str) -> Result<Option<Arc<Value>>, ApiError>;
    /// Creates the object in the namespace of its metadata; 409 `AlreadyExists`.
    async fn create(&self, kind: Gr, object: Value) -> Result<Arc<Value>, ApiError>;
    /// A compare-and-swap loop around `change`; 404 if there is no such object.
    async fn update(&self, kind: Gr, namespace: &str, name: &str, change: Mutate<'_>) -> Result<Arc<Value>, ApiError>;
    /// The same on the status subresource (no change of generation).
    async fn update_status(
        &self,
        kind: Gr,
        namespace: &str,
        name: &str,
        change: Mutate<'_>,
    ) -> Result<Arc<Value>, ApiError>;
    /// Removes the object at once; 404 if there is none.
    async fn delete(&self, kind: Gr, namespace: &str, name: &str) -> Result<(), ApiError>;
    fn on_change(&self, kind: Gr, callback: OnChange);
}

/// A row of the registry; the kinds used here are all built in, so a missing one is a fault of ours.
fn row(objects: &Objects, kind: Gr) -> Result<Arc<Resource>, ApiError> {
    let found = objects.resource(kind.0, kind.1);
    found.ok_or_else(|| ApiError::internal(format!("the registry has no resource {}.{}", kind.1, kind.0)))
}

#[async_trait]
impl Cluster for Objects {
    fn cached(&self, kind: Gr, namespace: &str, name: &str) -> Option<Arc<Value>> {
        Some(Objects::cached(self, row(self, kind).ok()?.as_ref(), namespace, name)?.value())
    }

    fn cached_list(&self, kind: Gr, namespace: Option<&str>) -> Vec<Arc<Value>> {
        let Ok(resource) = row(self, kind) else { return Vec::new() };
        Objects::cached_list(self, &resource, namespace).iter().map(|stored| stored.value()).collect()
    }

    async fn get(&self, kind: Gr, namespace: &str, name: &str) -> Result<Option<Arc<Value>>, ApiError> {
        match Objects::get(self, row(self, kind)?.as_ref(), namespace, name).await {
            Ok(stored) => Ok(Some(stored.value())),
            Err(error) if error.code == 404 => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn create(&self, kind: Gr, object: Value) -> Result<Arc<Value>, ApiError> {
        let resource = row(self, kind)?;
        let (namespace, name) = (meta::namespace(&object).to_owned(), meta::name(&object).to_owned());
        Ok(Objects::create(self, &resource, &namespace, &name, object).await?.value())
    }

    async fn update(&self, kind: Gr, namespace: &str, name: &str, change: Mutate<'_>) -> Result<Arc<Value>, ApiError> {
        let resource = row(self, kind)?;
        let apply = |mut object: Value| {
            let before = object["spec"].clone();
            if change(&mut object)? && before != object["spec"] && meta::generation(&object) > 0 {
                let next = meta::generation(&object) + 1;
                meta::set_generation(&mut object, next);
            }
            Ok(object)
        };
        Ok(self.update_with(&resource, namespace, name, apply).await?.value())
    }

    async fn update_status(
        &self,
        kind: Gr,
        namespace: &str,
        name: &str,
        change: Mutate<'_>,
    ) -> Result<Arc<Value>, ApiError> {
        let resource = row(self, kind)?;
        let apply = |mut object: Value| {
            change(&mut object)?;
            Ok(object)
        };
        Ok(self.update_with(&resource, namespace, name, apply).await?.value())
    }

    async fn delete(&self, kind: Gr, namespace: &str, name: &str) -> Result<(), ApiError> {
        match Objects::delete(self, row(self, kind)?.as_ref(), namespace, name, None).await? {
            Some(_) => Ok(()),
            None => Err(ApiError::not_found(kind.0, kind.1, name)),
        }
    }

    fn on_change(&self, kind: Gr, callback: OnChange) {
        let Ok(resource) = row(self, kind) else {
            tracing::error!(?kind, "no such resource to follow");
            return;
        };
        let listener = move |event: &CacheEvent| {
            let previous = event.previous.as_ref().map(|stored| stored.bytes.as_ref());
            callback(&match event.change {
                CacheChange::Deleted => Change { old: Some(event.object.bytes.as_ref()), new: None },
                _ => Change { old: previous, new: Some(event.object.bytes.as_ref()) },
            });
        };
        Objects::on_change(self, &resource, Arc::new(listener));
    }
}

#[cfg(test)]
pub mod testing {
    //! A cluster in memory, for the tests of this crate.
    use super::*;
    use parking_lot::Mutex;
    use std::collections::BTreeMap;

    #[derive(Default)]
    pub struct Fake {
        objects: Mutex<BTreeMap<(Gr, String, String), Arc<Value>>>,
        callbacks: Mutex<Vec<(Gr, OnChange)>>,
    }

    fn key(kind: Gr, object: &Value) -> (Gr, String, String) {
        let meta = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
        (kind, meta("namespace"), meta("name"))
    }

    impl Fake {
        pub fn new(objects: impl IntoIterator<Item = (Gr, Value)>) -> Arc<Fake> {
            let fake = Fake::default();
            for (kind, object) in objects {
                fake.put(kind, object);
            }
            Arc::new(fake)
        }

        pub fn put(&self, kind: Gr, object: Value) {
            let key = key(kind, &object);
            let old = self.objects.lock().insert(key, Arc::new(object.clone()));
            self.notify(kind, old.as_deref(), Some(&object));
        }

        fn notify(&self, kind: Gr, old: Option<&Value>, new: Option<&Value>) {
            let old = old.map(|value| value.to_string());
            let new = new.map(|value| value.to_string());
            let change = Change { old: old.as_deref().map(str::as_bytes), new: new.as_deref().map(str::as_bytes) };
            for (of, callback) in self.callbacks.lock().iter() {
                if *of == kind {
                    callback(&change);
                }
            }
        }
    }

    #[async_trait]
    impl Cluster for Fake {
        fn cached(&self, kind: Gr, namespace: &str, name: &str) -> Option<Arc<Value>> {
            self.objects.lock().get(&(kind, namespace.to_owned(), name.to_owned())).cloned()
        }
        fn cached_list(&self, kind: Gr, namespace: Option<&str>) -> Vec<Arc<Value>> {
            let objects = self.objects.lock();
            let wanted = objects.iter().filter(|((k, ns, _), _)| *k == kind && namespace.is_none_or(|want| want == ns));
            wanted.map(|(_, object)| object.clone()).collect()
        }
        async fn get(&self, kind: Gr, namespace: &str, name: &str) -> Result<Option<Arc<Value>>, ApiError> {
            Ok(self.cached(kind, namespace, name))
        }
        async fn create(&self, kind: Gr, object: Value) -> Result<Arc<Value>, ApiError> {
            let key = key(kind, &object);
            if self.objects.lock().contains_key(&key) {
                return Err(ApiError::already_exists(kind.0, kind.1, &key.2));
            }
            self.put(kind, object.clone());
            Ok(Arc::new(object))
        }
        async fn update(&self, kind: Gr, ns: &str, name: &str, change: Mutate<'_>) -> Result<Arc<Value>, ApiError> {
            let found = self.cached(kind, ns, name).ok_or_else(|| ApiError::not_found(kind.0, kind.1, name))?;
            let mut object = found.as_ref().clone();
            if change(&mut object)? {
                self.put(kind, object.clone());
            }
            Ok(Arc::new(object))
        }
        async fn update_status(
            &self,
            kind: Gr,
            ns: &str,
            name: &str,
            change: Mutate<'_>,
        ) -> Result<Arc<Value>, ApiError> {
            self.update(kind, ns, name, change).await
        }
        async fn delete(&self, kind: Gr, namespace: &str, name: &str) -> Result<(), ApiError> {
            let old = self.objects.lock().remove(&(kind, namespace.to_owned(), name.to_owned()));
            let old = old.ok_or_else(|| ApiError::not_found(kind.0, kind.1, name))?;
            self.notify(kind, Some(&old), None);
            Ok(())
        }
        fn on_change(&self, kind: Gr, callback: OnChange) {
            for object in self.cached_list(kind, None) {
                callback(&Change { old: None, new: Some(object.to_string().as_bytes()) });
            }
            self.callbacks.lock().push((kind, callback));
        }
    }
}
