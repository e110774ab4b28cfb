//! Resources that come and go at run time: CustomResourceDefinitions become rows of the registry.
//!
//! Invariants:
//! - A row is served before its definition says `Established`, so that whoever waited for the condition can use it.
//! - Names are taken first come, first served within a group; who loses says so in `NamesAccepted`.
//! - A definition is gone only when its objects are ([`FINALIZER`]).
//! - One task decides; it works off a set of names, at most one entry per definition.
//!
//! Also here: the APIService objects of the group versions that this server serves itself.
//! Deliberately absent: conversion webhooks and APIServices that other servers answer. Both say so in their conditions or answers.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use windlass_api::registry::{Registry, Resource};
use windlass_api::{ApiError, meta};

use crate::storage::{Change, Objects};

/// Keeps a definition until its objects are deleted.
pub const FINALIZER: &str = "customresourcecleanup.apiextensions.k8s.io";
const GROUP: &str = "apiextensions.k8s.io";
const PLURAL: &str = "customresourcedefinitions";
const AUTOMANAGED: &str = "kube-aggregator.kubernetes.io/automanaged";

/// The custom resources of this server.
pub struct Definitions(Arc<Inner>);

struct Inner {
    objects: Objects,
    definitions: Arc<Resource>,
    /// Rows in service, by the name of their definition.
    rows: Mutex<BTreeMap<String, Arc<Resource>>>,
    /// The specs that the rows were made of.
    made_of: Mutex<BTreeMap<String, Value>>,
    terminating: RwLock<HashSet<String>>,
    queue: Queue,
}

/// Names that wait for a look; the empty name stands for the APIServices.
#[derive(Default)]
struct Queue {
    names: Mutex<BTreeSet<String>>,
    filled: Notify,
}

impl Queue {
    fn add(&self, name: &str) {
        self.names.lock().insert(name.to_owned());
        self.filled.notify_one();
    }
}

impl Definitions {
    /// Serves all established definitions, then starts the task that follows changes.
    pub async fn start(objects: Objects, shutdown: CancellationToken) -> Result<Definitions, ApiError> {
        let definitions = objects.resource(GROUP, PLURAL).ok_or_else(|| ApiError::internal(format!("{PLURAL}.{GROUP} is not registered")))?;
        let inner = Arc::new(Inner {
            objects: objects.clone(),
            definitions: definitions.clone(),
            rows: Mutex::default(),
            made_of: Mutex::default(),
            terminating: RwLock::default(),
            queue: Queue::default(),
        });
        for stored in objects.cached_list(&definitions, None) {
            let definition = stored.value();
            if condition(&definition, "Established") == Some("True") {
                inner.serve(&definition).await?;
            }
        }
        let told = inner.clone();
        objects.on_change(&definitions, Arc::new(move |event| told.queue.add(event.object.name())));
        if let Some(services) = objects.resource("apiregistration.k8s.io", "apiservices") {
            let told = inner.clone();
            objects.on_change(&services, Arc::new(move |_| told.queue.add("")));
        }
        inner.queue.add("");
        tokio::spawn(inner.clone().run(shutdown));
        Ok(Definitions(inner))
    }

    /// Whether a definition is being deleted: then nothing new is created of it.
    pub fn is_terminating(&self, definition: &str) -> bool {
        self.0.terminating.read().contains(definition)
    }
}

impl Inner {
    async fn run(self: Arc<Self>, shutdown: CancellationToken) {
        while !shutdown.is_cancelled() {
            let next = self.queue.names.lock().pop_first();
            let Some(name) = next else {
                tokio::select! {
                    () = self.queue.filled.notified() => continue,
                    () = shutdown.cancelled() => return,
                }
            };
            let result = if name.is_empty() { self.reconcile_services().await } else { self.reconcile(&name).await };
            if let Err(error) = result {
                tracing::warn!(definition = name, error = error.message, "custom resource definition; trying again");
                let (later, shutdown) = (self.clone(), shutdown.clone());
                tokio::spawn(async move {
                    tokio::select! {
                        () = tokio::time::sleep(std::time::Duration::from_secs(1)) => later.queue.add(&name),
                        () = shutdown.cancelled() => {}
                    }
                });
            }
        }
    }

    async fn reconcile(self: &Arc<Self>, name: &str) -> Result<(), ApiError> {
        let Some(stored) = self.objects.cached(&self.definitions, "", name) else {
            self.withdraw(name);
            self.look_at_group(name.split_once('.').map_or("", |(_, group)| group), name);
            return Ok(());
        };
        let definition = stored.value();
        if meta::deletion_timestamp(&definition).is_some() && meta::finalizers(&definition).any(|f| f == FINALIZER) {
            return self.clean_up(name, &definition).await;
        }
        let status = self.name_status(&definition);
        if status["established"] == true {
            self.serve(&definition).await?;
        }
        self.update_status(name, &status).await?;
        Ok(())
    }

    // === Names ===

    /// What the status says about names: accepted ones, and the two conditions (`calculateNamesAndConditions` upstream).
    fn name_status(&self, definition: &Value) -> Value {
        let (mut resources, mut kinds) = (HashSet::new(), HashSet::new());
        let group = definition["spec"]["group"].as_str().unwrap_or_default();
        for other in self.objects.cached_list(&self.definitions, None) {
            let other = other.value();
            if other["spec"]["group"] != group || meta::name(&other) == meta::name(definition) {
                continue;
            }
            let names = &other["status"]["acceptedNames"];
            let short = names["shortNames"].as_array().into_iter().flatten();
            let texts = [&names["plural"], &names["singular"]].into_iter().chain(short).filter_map(|v| v.as_str().map(str::to_owned));
            resources.extend(texts);
            kinds.extend([&names["kind"], &names["listKind"]].into_iter().filter_map(|v| v.as_str().map(str::to_owned)));
        }
        let (wanted, mut accepted) = (&definition["spec"]["names"], definition["status"]["acceptedNames"].clone());
        if !accepted.is_object() {
            accepted = json!({});
        }
        let mut problem: Option<(&str, String)> = None;
        for (field, used, reason) in [
            ("plural", &resources, "PluralConflict"),
            ("singular", &resources, "SingularConflict"),
            ("kind", &kinds, "KindConflict"),
            ("listKind", &kinds, "ListKindConflict"),
        ] {
            let (want, have) = (wanted[field].as_str().unwrap_or_default(), accepted[field].as_str().unwrap_or_default());
            if want != have && used.contains(want) {
                problem = Some((reason, format!("{want:?} is already in use")));
            } else if !want.is_empty() {
                accepted[field] = want.into();
            }
        }
        let taken: Vec<String> =
            wanted["shortNames"].as_array().into_iter().flatten().filter_map(Value::as_str).filter(|s| resources.contains(*s)).map(|s| format!("{s:?} is already in use")).collect();
        if taken.is_empty() {
            copy(&mut accepted, wanted, "shortNames");
        } else {
            problem = Some(("ShortNamesConflict", taken.join(", ")));
        }
        copy(&mut accepted, wanted, "categories");
        let was_established = condition(definition, "Established") == Some("True");
        json!({
            "acceptedNames": accepted,
            "established": was_established || problem.is_none(),
            "conflict": problem.map(|(reason, message)| json!({"reason": reason, "message": message})),
        })
    }

    async fn update_status(&self, name: &str, status: &Value) -> Result<(), ApiError> {
        let now = meta::now_rfc3339(jiff::Timestamp::now());
        let update = |mut object: Value| {
            let stored = object["spec"]["versions"].as_array().into_iter().flatten().find(|v| v["storage"] == true).map(|v| v["name"].clone());
            if !object["status"].is_object() {
                object["status"] = json!({});
            }
            object["status"]["acceptedNames"] = status["acceptedNames"].clone();
            let names = match &status["conflict"] {
                Value::Null => json!({"type": "NamesAccepted", "status": "True", "reason": "NoConflicts", "message": "no conflicts found"}),
                conflict => json!({"type": "NamesAccepted", "status": "False", "reason": conflict["reason"], "message": conflict["message"]}),
            };
            set_condition(&mut object, names, &now);
            let established = if status["established"] == true {
                json!({"type": "Established", "status": "True", "reason": "InitialNamesAccepted", "message": "the initial names have been accepted"})
            } else {
                json!({"type": "Established", "status": "False", "reason": "NotAccepted", "message": "not all names are accepted"})
            };
            set_condition(&mut object, established, &now);
            let versions = &mut object["status"]["storedVersions"];
            if !versions.is_array() {
                *versions = json!([]);
            }
            if let (Some(stored), Some(versions)) = (stored, versions.as_array_mut())
                && !versions.contains(&stored)
            {
                versions.push(stored);
            }
            Ok(object)
        };
        match self.objects.update_with(&self.definitions, "", name, update).await {
            Err(error) if error.code == 404 => Ok(()),
            other => other.map(drop),
        }
    }

    /// A name was given up: others of the group may have it now.
    fn look_at_group(&self, group: &str, except: &str) {
        for other in self.objects.cached_list(&self.definitions, None) {
            if other.name() != except && other.name().ends_with(group) {
                self.queue.add(other.name());
            }
        }
    }

    // === Rows ===

    /// Puts a definition's row into service, or a changed one in place of the old.
    async fn serve(self: &Arc<Self>, definition: &Value) -> Result<(), ApiError> {
        let name = meta::name(definition).to_owned();
        let resource = match Resource::from_crd(definition) {
            Ok(resource) => Arc::new(resource),
            Err(errors) => {
                return Err(ApiError::invalid(GROUP, "CustomResourceDefinition", &name, errors));
            }
        };
        if self.made_of.lock().get(&name) == Some(&definition["spec"]) {
            return Ok(());
        }
        // The objects are read anew under the changed schema; watches end, as upstream's do when a definition changes.
        self.objects.feed().caches.remove(&resource);
        self.objects.feed().add(&resource).await.map_err(|e| crate::storage::store_error(&e))?;
        if let Some(cache) = self.objects.cache(&resource) {
            let told = self.clone();
            let definition = name.clone();
            self.objects.feed().listen(
                &cache,
                Arc::new(move |event| {
                    if event.change == Change::Deleted && told.terminating.read().contains(&definition) {
                        told.queue.add(&definition);
                    }
                }),
            );
        }
        self.made_of.lock().insert(name.clone(), definition["spec"].clone());
        self.rows.lock().insert(name, resource);
        self.publish();
        Ok(())
    }

    fn withdraw(&self, name: &str) {
        self.terminating.write().remove(name);
        self.made_of.lock().remove(name);
        let Some(row) = self.rows.lock().remove(name) else { return };
        self.publish();
        self.objects.feed().caches.remove(&row);
    }

    /// Makes the present rows the registry's.
    fn publish(&self) {
        let rows: Vec<Arc<Resource>> = self.rows.lock().values().cloned().collect();
        let registry = Registry::builtin().with_custom(rows);
        self.objects.set_registry(Arc::new(registry));
        self.queue.add("");
    }

    // === Deletion ===

    /// Deletes a definition's objects; when none is left, lets the definition go.
    async fn clean_up(self: &Arc<Self>, name: &str, definition: &Value) -> Result<(), ApiError> {
        self.terminating.write().insert(name.to_owned());
        let row = self.rows.lock().get(name).cloned();
        let now = meta::now_rfc3339(jiff::Timestamp::now());
        let mut left = 0;
        if let Some(row) = row {
            for object in self.objects.cached_list(&row, None) {
                left += usize::from(!self.delete_instance(&row, &object).await?);
            }
        }
        let (reason, message) = if left > 0 {
            ("InstanceDeletionInProgress", "CustomResource deletion is in progress")
        } else {
            ("InstanceDeletionCompleted", "removed all instances")
        };
        let done = left == 0;
        let terminating = json!({"type": "Terminating", "status": if done { "False" } else { "True" }, "reason": reason, "message": message});
        let update = |mut object: Value| {
            set_condition(&mut object, terminating.clone(), &now);
            if done {
                let rest: Vec<String> = meta::finalizers(&object).filter(|f| *f != FINALIZER).map(str::to_owned).collect();
                meta::set(&mut object, "finalizers", json!(rest));
            }
            Ok(object)
        };
        let stored = match self.objects.update_with(&self.definitions, "", name, update).await {
            Err(error) if error.code == 404 => return Ok(()),
            other => other?,
        };
        if done && meta::finalizers(&stored.value()).next().is_none() {
            self.objects.delete(&self.definitions, "", name, None).await?;
            self.look_at_group(definition["spec"]["group"].as_str().unwrap_or_default(), name);
        }
        Ok(())
    }

    /// Deletes one object, or marks it when finalizers hold it; true if it is gone.
    async fn delete_instance(&self, row: &Arc<Resource>, object: &crate::storage::Stored) -> Result<bool, ApiError> {
        let (namespace, name) = (object.namespace(), object.name());
        if meta::finalizers(&object.value()).next().is_none() {
            self.objects.delete(row, namespace, name, None).await?;
            return Ok(true);
        }
        let now = meta::now_rfc3339(jiff::Timestamp::now());
        let mark = |mut object: Value| {
            if meta::deletion_timestamp(&object).is_none() {
                meta::set(&mut object, "deletionTimestamp", now.clone());
                meta::set(&mut object, "deletionGracePeriodSeconds", 0);
            }
            Ok(object)
        };
        match self.objects.update_with(row, namespace, name, mark).await {
            Ok(_) => Ok(false),
            Err(error) if error.code == 404 => Ok(true),
            Err(error) => Err(error),
        }
    }

    // === APIServices ===

    /// One APIService per group version that is served here; those of groups that are gone go.
    async fn reconcile_services(&self) -> Result<(), ApiError> {
        let Some(services) = self.objects.resource("apiregistration.k8s.io", "apiservices") else { return Ok(()) };
        let registry = self.objects.registry();
        let mut wanted: HashMap<String, (String, String, bool)> = HashMap::new();
        for resource in registry.resources() {
            for version in resource.versions.iter().filter(|v| v.served) {
                wanted.insert(format!("{}.{}", version.name, resource.group), (resource.group.clone(), version.name.clone(), resource.custom));
            }
        }
        for stored in self.objects.cached_list(&services, None) {
            let service = stored.value();
            if meta::label(&service, AUTOMANAGED).is_some() && !wanted.contains_key(stored.name()) {
                self.objects.delete(&services, "", stored.name(), None).await?;
            } else if service["spec"]["service"].is_object() {
                self.refuse_remote(&services, stored.name(), &service).await?;
            }
        }
        for (name, (group, version, custom)) in wanted {
            match self.objects.cached(&services, "", &name) {
                Some(there) if condition(&there.value(), "Available") == Some("True") => {}
                Some(there) if there.value()["spec"]["service"].is_object() => {}
                Some(_) => {
                    self.objects.update_with(&services, "", &name, |object| Ok(available(object))).await?;
                }
                None => {
                    let object = available(api_service(&name, &group, &version, custom));
                    match self.objects.create(&services, "", &name, object.clone()).await {
                        Ok(_) => {
                            self.objects.update_with(&services, "", &name, |object| Ok(available(object))).await?;
                        }
                        Err(error) if error.code == 409 => {}
                        Err(error) => return Err(error),
                    }
                }
            }
        }
        Ok(())
    }

    /// An APIService that another server should answer is not supported, and says so.
    async fn refuse_remote(&self, services: &Arc<Resource>, name: &str, service: &Value) -> Result<(), ApiError> {
        if condition(service, "Available").is_some() {
            return Ok(());
        }
        let now = meta::now_rfc3339(jiff::Timestamp::now());
        let refuse = |mut object: Value| {
            let refused = json!({
                "type": "Available", "status": "False", "reason": "NotSupported",
                "message": "this API server does not forward requests to other API servers",
            });
            set_condition(&mut object, refused, &now);
            Ok(object)
        };
        self.objects.update_with(services, "", name, refuse).await.map(drop)
    }
}

fn available(mut object: Value) -> Value {
    let condition = json!({"type": "Available", "status": "True", "reason": "Local", "message": "Local APIServices are always available"});
    set_condition(&mut object, condition, &meta::now_rfc3339(jiff::Timestamp::now()));
    object
}

fn api_service(name: &str, group: &str, version: &str, custom: bool) -> Value {
    let (group_priority, version_priority) = if custom { (1000, 100) } else { priorities(group, version) };
    json!({
        "metadata": {"name": name, "labels": {AUTOMANAGED: if custom { "true" } else { "onstart" }}},
        "spec": {"group": group, "version": version, "groupPriorityMinimum": group_priority, "versionPriority": version_priority},
    })
}

/// Priorities as upstream's `controlplane/apiserver/aggregator.go` and `controlplane/instance.go` give them.
fn priorities(group: &str, version: &str) -> (u32, u32) {
    let group_priority = match group {
        "" => 18_000,
        "apps" => 17_800,
        "events.k8s.io" => 17_750,
        "authentication.k8s.io" => 17_700,
        "authorization.k8s.io" => 17_600,
        "autoscaling" => 17_500,
        "batch" => 17_400,
        "certificates.k8s.io" => 17_300,
        "networking.k8s.io" => 17_200,
        "policy" => 17_100,
        "rbac.authorization.k8s.io" => 17_000,
        "storage.k8s.io" => 16_800,
        "apiextensions.k8s.io" | "admissionregistration.k8s.io" => 16_700,
        "scheduling.k8s.io" => 16_600,
        "coordination.k8s.io" => 16_500,
        "node.k8s.io" => 16_300,
        "discovery.k8s.io" => 16_200,
        "flowcontrol.apiserver.k8s.io" => 16_100,
        "resource.k8s.io" => 15_900,
        "storagemigration.k8s.io" => 15_800,
        _ => 1_000,
    };
    let version_priority = match (group, version) {
        ("", _) => 1,
        ("autoscaling", "v2") => 30,
        ("flowcontrol.apiserver.k8s.io", "v1") => 21,
        (_, v) if v.contains("alpha") => 9,
        (_, v) if v.contains("beta") => 12,
        _ => 15,
    };
    (group_priority, version_priority)
}

fn copy(to: &mut Value, from: &Value, field: &str) {
    match from.get(field).filter(|v| !v.is_null()) {
        Some(value) => to[field] = value.clone(),
        None => drop(to.as_object_mut().map(|m| m.remove(field))),
    }
}

/// The status of a condition.
fn condition<'a>(object: &'a Value, kind: &str) -> Option<&'a str> {
    object["status"]["conditions"].as_array()?.iter().find(|c| c["type"] == kind)?["status"].as_str()
}

/// Sets a condition; its transition time changes with its status only.
pub(crate) fn set_condition(object: &mut Value, mut condition: Value, now: &str) {
    if !object["status"].is_object() {
        object["status"] = json!({});
    }
    let conditions = &mut object["status"]["conditions"];
    if !conditions.is_array() {
        *conditions = json!([]);
    }
    let Some(conditions) = conditions.as_array_mut() else { return };
    condition["lastTransitionTime"] = now.into();
    match conditions.iter_mut().find(|c| c["type"] == condition["type"]) {
        Some(old) => {
            if old["status"] == condition["status"] {
                condition["lastTransitionTime"] = old["lastTransitionTime"].clone();
            }
            *old = condition;
        }
        None => conditions.push(condition),
    }
}

/// What a deletion of a definition writes first (`registry/customresourcedefinition/etcd.go`).
pub(crate) fn mark_terminating(object: &mut Value, now: jiff::Timestamp) {
    meta::set(object, "deletionTimestamp", meta::now_rfc3339(now));
    if !meta::finalizers(object).any(|f| f == FINALIZER) {
        let mut finalizers: Vec<String> = meta::finalizers(object).map(str::to_owned).collect();
        finalizers.push(FINALIZER.into());
        meta::set(object, "finalizers", json!(finalizers));
    }
    let condition = json!({
        "type": "Terminating", "status": "True", "reason": "InstanceDeletionPending",
        "message": "CustomResourceDefinition marked for deletion; CustomResource deletion will begin soon",
    });
    set_condition(object, condition, &meta::now_rfc3339(now));
}
