//! Namespaces: empties one that is being deleted, whatever lives in it, and lets it go.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::{StreamExt, stream};
use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{Namespace, NamespaceCondition},
    apimachinery::pkg::apis::meta::v1::Time,
};
use serde::Deserialize;
use serde_json::Value;
use windlass_client::{
    informer::{Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker},
    discovery::{self, Found, Resource},
    write::{self, ApiErrorExt},
};

pub const METADATA_LIST: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";
/// How long finalizers are given before the next look, when no deletion of a pod wakes us sooner.
const FINALIZERS: Duration = Duration::from_secs(8);
/// Resources that are emptied at once.
const PARALLEL: usize = 8;

#[derive(Deserialize)]
struct MetadataList {
    /// Go writes an empty list as null.
    #[serde(default, deserialize_with = "crate::discovery::null_as_default")]
    items: Vec<Item>,
}

#[derive(Deserialize)]
struct Item {
    metadata: k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
}

/// What is left of one resource.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Remaining {
    count: usize,
    finalizers: BTreeMap<String, usize>,
    /// The longest grace period among those that are on their way out.
    grace: Option<i64>,
}

fn remaining(list: &MetadataList) -> Remaining {
    let mut left = Remaining { count: list.items.len(), ..Remaining::default() };
    for item in &list.items {
        for finalizer in item.metadata.finalizers.iter().flatten() {
            *left.finalizers.entry(finalizer.clone()).or_default() += 1;
        }
        left.grace = left.grace.max(item.metadata.deletion_grace_period_seconds);
    }
    left
}

/// What a round found, from which the conditions follow.
#[derive(Debug, Default)]
struct Round {
    discovery_failure: Option<String>,
    content_failure: Option<String>,
    remaining: BTreeMap<String, Remaining>,
}

impl Round {
    fn is_empty(&self) -> bool {
        self.discovery_failure.is_none() && self.content_failure.is_none() && self.remaining.is_empty()
    }

    /// Upstream's conditions: type, whether it holds, reason, message.
    fn conditions(&self) -> [(&'static str, bool, &'static str, String); 5] {
        let failure = |failure: &Option<String>, bad: &'static str, good: &'static str, fine: &str| match failure {
            Some(message) => (true, bad, message.clone()),
            None => (false, good, fine.to_owned()),
        };
        let discovery = failure(&self.discovery_failure, "DiscoveryFailed", "ResourcesDiscovered", "All resources successfully discovered");
        let content = failure(&self.content_failure, "ContentDeletionFailed", "ContentDeleted", "All content successfully deleted, may be waiting on finalization");
        let parts: Vec<String> = self.remaining.iter().map(|(name, left)| format!("{name} has {} resource instances", left.count)).collect();
        let left = if parts.is_empty() {
            (false, "ContentRemoved", "All content successfully removed".to_owned())
        } else {
            (true, "SomeResourcesRemain", format!("Some resources are remaining: {}", parts.join(", ")))
        };
        let mut finalizers: BTreeMap<&str, usize> = BTreeMap::new();
        for (name, count) in self.remaining.values().flat_map(|left| &left.finalizers) {
            *finalizers.entry(name).or_default() += count;
        }
        let parts: Vec<String> = finalizers.iter().map(|(name, count)| format!("{name} in {count} resource instances")).collect();
        let finalizers = if parts.is_empty() {
            (false, "ContentHasNoFinalizers", "All content-preserving finalizers finished".to_owned())
        } else {
            (true, "SomeFinalizersRemain", format!("Some content in the namespace has finalizers remaining: {}", parts.join(", ")))
        };
        [
            ("NamespaceDeletionDiscoveryFailure", discovery.0, discovery.1, discovery.2),
            ("NamespaceDeletionGroupVersionParsingFailure", false, "ParsedGroupVersions", "All legacy kube types successfully parsed".to_owned()),
            ("NamespaceDeletionContentFailure", content.0, content.1, content.2),
            ("NamespaceContentRemaining", left.0, left.1, left.2),
            ("NamespaceFinalizersRemaining", finalizers.0, finalizers.1, finalizers.2),
        ]
    }

    /// Writes the conditions into the status; true if that changed it.
    fn tell(&self, namespace: &mut Namespace, now: Timestamp) -> bool {
        let conditions = namespace.status.get_or_insert_default().conditions.get_or_insert_default();
        let mut changed = false;
        for (kind, holds, reason, message) in self.conditions() {
            let status = if holds { "True" } else { "False" };
            let known = conditions.iter_mut().find(|condition| condition.type_ == kind);
            let fresh = |since: Option<Time>| NamespaceCondition {
                type_: kind.into(),
                status: status.into(),
                reason: Some(reason.into()),
                message: Some(message.clone()),
                last_transition_time: since.or(Some(Time(now))),
            };
            match known {
                Some(known) if known.status == status && known.reason.as_deref() == Some(reason) && known.message.as_deref() == Some(&message) => {}
                Some(known) => {
                    let since = known.last_transition_time.clone().filter(|_| known.status == status);
                    *known = fresh(since);
                    changed = true;
                }
                None => {
                    conditions.push(fresh(None));
                    changed = true;
                }
            }
        }
        changed
    }
}

struct Controller {
    client: kube::Client,
    namespaces: Informer<Namespace>,
}

impl Controller {
    async fn list(&self, resource: &Resource, namespace: &str) -> Result<MetadataList, Error> {
        let path = resource.path(namespace);
        match write::get_as(&self.client, &path, METADATA_LIST).await {
            Ok(list) => Ok(list.unwrap_or(MetadataList { items: Vec::new() })),
            // A resource that went away between discovery and now has no content.
            Err(error) if error.code() == 405 => Ok(MetadataList { items: Vec::new() }),
            Err(error) => Err(error),
        }
    }

    /// Deletes all objects of one resource and says what is left.
    async fn empty(&self, resource: &Resource, namespace: &str) -> Result<Remaining, Error> {
        let list = self.list(resource, namespace).await?;
        if list.items.iter().all(|item| item.metadata.deletion_timestamp.is_some()) {
            return Ok(remaining(&list));
        }
        let background = write::Delete { propagation: Some("Background"), ..write::Delete::default() };
        if resource.has(&["deletecollection"]) {
            write::delete(&self.client, &resource.path(namespace), background).await?;
        } else {
            for item in &list.items {
                let path = format!("{}/{}", resource.path(namespace), item.metadata.name.as_deref().unwrap_or_default());
                write::delete(&self.client, &path, background).await?;
            }
        }
        Ok(remaining(&self.list(resource, namespace).await?))
    }

    async fn round(&self, namespace: &str) -> Result<Round, Error> {
        let Found { resources, missing } = discovery::discover(&self.client).await?;
        let mut round = Round::default();
        if !missing.is_empty() {
            round.discovery_failure = Some(format!("Discovery failed for some groups, {} failing: {}", missing.len(), missing.join(", ")));
        }
        let deletable = resources.into_iter().filter(|resource| resource.namespaced && resource.has(&["delete", "list"]));
        let (pods, others): (Vec<_>, Vec<_>) = deletable.partition(|resource| resource.group.is_empty() && resource.plural == "pods");
        // Pods first: what protects them (network policies, say) must outlive them (KEP-5080).
        for resources in [pods, others] {
            let results = stream::iter(resources).map(|resource| async move {
                let result = self.empty(&resource, namespace).await;
                (resource, result)
            });
            let results: Vec<_> = results.buffer_unordered(PARALLEL).collect().await;
            let mut failures = Vec::new();
            for (resource, result) in results {
                match result {
                    Ok(left) if left.count > 0 => drop(round.remaining.insert(format!("{}.{}", resource.plural, resource.group), left)),
                    Ok(_) => {}
                    Err(error) => failures.push(write::message(&error)),
                }
            }
            if !failures.is_empty() {
                failures.sort();
                round.content_failure = Some(format!("Failed to delete all resource types, {} remaining: {}", failures.len(), failures.join(", ")));
            }
            if !round.remaining.is_empty() || round.content_failure.is_some() {
                break;
            }
        }
        Ok(round)
    }

    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let deleting = self.namespaces.get(&key).is_some_and(|namespace| namespace.metadata.deletion_timestamp.is_some());
        if !deleting {
            return Ok(Action::Done);
        }
        let path = write::object_path::<Namespace>("", &key.name);
        let Some(mut namespace) = write::get::<Namespace>(&self.client, &path).await? else { return Ok(Action::Done) };
        if namespace.metadata.deletion_timestamp.is_none() {
            return Ok(Action::Done);
        }
        if namespace.status.as_ref().and_then(|status| status.phase.as_deref()) != Some("Terminating") {
            namespace.status.get_or_insert_default().phase = Some("Terminating".into());
            namespace = write::update_status(&self.client, &namespace).await?;
        }
        if !namespace.spec.iter().flat_map(|spec| spec.finalizers.iter().flatten()).any(|finalizer| finalizer == "kubernetes") {
            return Ok(Action::Done);
        }
        let round = self.round(&key.name).await?;
        if round.tell(&mut namespace, Timestamp::now()) {
            let written: Result<Namespace, Error> = write::update_status(&self.client, &namespace).await;
            match written {
                Ok(written) => namespace = written,
                Err(error) if error.is_not_found() => return Ok(Action::Done),
                Err(error) => return Err(error),
            }
        }
        if !round.is_empty() {
            return wait(&round);
        }
        if let Some(finalizers) = namespace.spec.get_or_insert_default().finalizers.as_mut() {
            finalizers.retain(|finalizer| finalizer != "kubernetes");
        }
        let done: Result<Value, Error> = write::replace(&self.client, &format!("{path}/finalize"), &write::wire(&namespace)).await;
        match done {
            Ok(_) => Ok(Action::Done),
            Err(error) if error.is_not_found() => Ok(Action::Done),
            Err(error) => Err(error),
        }
    }
}

/// When to look again at a namespace that is not empty yet.
fn wait(round: &Round) -> Result<Action, Error> {
    if let Some(message) = round.content_failure.as_ref().or(round.discovery_failure.as_ref()) {
        return Err(Error::Invalid(message.clone()));
    }
    let grace = round.remaining.values().filter_map(|left| left.grace).max().unwrap_or(0).clamp(0, 3600) as u64;
    Ok(Action::RequeueAfter(FINALIZERS.max(Duration::from_secs(grace / 2 + 1))))
}

/// The `namespace-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("namespace");
    let (namespaces, pods) = (context.namespaces(), context.pods());
    let going = |namespace: &Namespace| namespace.metadata.deletion_timestamp.is_some();
    {
        let queue = queue.clone();
        namespaces.on_change(move |change| {
            if change.new.as_deref().is_some_and(going) {
                queue.add(Key::of(&**change.object()));
            }
        });
    }
    {
        // The last pod of a namespace that goes: on with the rest at once.
        let (queue, namespaces, all) = (queue.clone(), namespaces.clone(), pods.clone());
        pods.on_change(move |change| {
            let key = Key::cluster(change.object().namespace());
            if change.is_delete() && namespaces.get(&key).is_some_and(|namespace| going(&namespace)) && all.namespace(&key.name).is_empty() {
                queue.add(key);
            }
        });
    }
    let state = Arc::new(Controller { client: context.client.clone(), namespaces });
    context.worker(queue, context.config.concurrent_namespace_syncs, state, Controller::sync)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn conditions_say_what_is_left() {
        let list: MetadataList = serde_json::from_value(json!({"items": [
            {"metadata": {"name": "a", "finalizers": ["f"], "deletionGracePeriodSeconds": 30}}, {"metadata": {"name": "b"}}]})).expect("a list");
        let round = Round { remaining: [("pods.".to_owned(), remaining(&list))].into(), ..Round::default() };
        let mut namespace = Namespace::default();
        assert!(round.tell(&mut namespace, Timestamp::UNIX_EPOCH));
        assert!(!round.tell(&mut namespace, Timestamp::now()), "nothing new");
        let shown: Vec<String> = namespace.status.iter().flat_map(|status| status.conditions.iter().flatten())
            .filter(|c| c.status == "True").map(|c| format!("{}: {}", c.type_, c.message.clone().unwrap_or_default())).collect();
        assert_eq!(shown, ["NamespaceContentRemaining: Some resources are remaining: pods. has 2 resource instances",
            "NamespaceFinalizersRemaining: Some content in the namespace has finalizers remaining: f in 1 resource instances"]);
        assert_eq!(wait(&round).expect("an action"), Action::RequeueAfter(Duration::from_secs(16)));
        assert!(Round::default().tell(&mut namespace, Timestamp::now()) && Round::default().is_empty());
    }
}
