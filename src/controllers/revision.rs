//! Controller revisions: the history of pod templates of DaemonSets and StatefulSets, in the form that `kubectl rollout`
//! reads (a strategic merge patch of the workload).

use std::sync::Arc;

use k8s_openapi::{
    api::{apps::v1::ControllerRevision, core::v1::PodTemplateSpec},
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, runtime::RawExtension},
};
use kube::Resource;
use serde_json::{Value, json};

use crate::{
    Error, hash, labels,
    owner::{self, Owner},
    write::{self, ApiErrorExt, Delete},
};

/// The label that tells a pod's revision.
pub const LABEL: &str = "controller-revision-hash";

/// A template as revision data.
pub fn data(template: &PodTemplateSpec) -> Value {
    let mut template = serde_json::to_value(template).unwrap_or_default();
    hash::normalize(&mut template);
    if let Some(metadata) = template.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("creationTimestamp");
    }
    template["$patch"] = json!("replace");
    json!({"spec": {"template": template}})
}

/// The template in a revision; none if it cannot be read.
pub fn template(revision: &ControllerRevision) -> Option<PodTemplateSpec> {
    let mut template = revision.data.0.pointer("/spec/template")?.clone();
    template.as_object_mut()?.remove("$patch");
    serde_json::from_value(template).ok()
}

fn same(revision: &ControllerRevision, wanted: &Value) -> bool {
    let mut have = revision.data.0.clone();
    hash::normalize(&mut have);
    if let Some(metadata) = have.pointer_mut("/spec/template/metadata").and_then(Value::as_object_mut) {
        metadata.remove("creationTimestamp");
    }
    have == *wanted
}

fn number(revision: &ControllerRevision) -> i64 {
    revision.revision.unwrap_or(0)
}

pub fn name(revision: &ControllerRevision) -> &str {
    revision.metadata.name.as_deref().unwrap_or_default()
}

/// The hash in a revision's label.
pub fn hash_of(revision: &ControllerRevision) -> &str {
    labels::of(&revision.metadata.labels).get(LABEL).map_or("", String::as_str)
}

/// What `current` came to.
pub enum Current {
    Is(Arc<ControllerRevision>),
    /// Another revision has the name: the collision count must go up.
    Collision,
}

/// The revision of the workload's present template, made or renumbered if need be.
pub async fn current<K: Resource<DynamicType = ()>>(
    client: &kube::Client,
    workload: &K,
    template: &PodTemplateSpec,
    history: &[Arc<ControllerRevision>],
    collisions: Option<i32>,
) -> Result<Current, Error> {
    let wanted = data(template);
    let newest = history.iter().map(|revision| number(revision)).max().unwrap_or(0);
    if let Some(found) = history.iter().filter(|revision| same(revision, &wanted)).max_by_key(|revision| number(revision)) {
        if number(found) == newest {
            return Ok(Current::Is(found.clone()));
        }
        // A roll back: the old revision becomes the newest.
        let renumbered = ControllerRevision { revision: Some(newest + 1), ..(**found).clone() };
        return write::update(client, &renumbered).await.map(|revision| Current::Is(Arc::new(revision)));
    }
    let hash = hash::of(&wanted, collisions);
    let mut labels = template.metadata.as_ref().and_then(|metadata| metadata.labels.clone()).unwrap_or_default();
    labels.insert(LABEL.into(), hash.clone());
    let revision = ControllerRevision {
        metadata: ObjectMeta {
            name: Some(format!("{}-{hash}", workload.meta().name.as_deref().unwrap_or_default())),
            namespace: workload.meta().namespace.clone(),
            labels: Some(labels),
            owner_references: Some(vec![owner::reference(workload)]),
            ..ObjectMeta::default()
        },
        data: RawExtension(wanted.clone()),
        revision: Some(newest + 1),
    };
    let path = write::collection_path::<ControllerRevision>(workload.meta().namespace.as_deref().unwrap_or_default());
    match write::create::<ControllerRevision>(client, &path, &write::wire(&revision)).await {
        Ok(created) => Ok(Current::Is(Arc::new(created))),
        Err(error) if error.is_already_exists() => {
            let existing: Option<ControllerRevision> = write::get(client, &write::path(&revision)).await?;
            let ours = existing.filter(|existing| same(existing, &wanted) && owner::is_controlled_by(&existing.metadata, workload.meta().uid.as_deref().unwrap_or_default()));
            Ok(ours.map_or(Current::Collision, |revision| Current::Is(Arc::new(revision))))
        }
        Err(error) => Err(error),
    }
}

/// The revisions of a workload, orphans that match taken in.
pub async fn history<K: Resource<DynamicType = ()>>(
    client: &kube::Client,
    workload: &K,
    all: Vec<Arc<ControllerRevision>>,
    selector: &k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector,
) -> Result<Vec<Arc<ControllerRevision>>, Error> {
    let matches = |revision: &ControllerRevision| labels::matches(selector, labels::of(&revision.metadata.labels));
    Owner::of(workload).claim(client, all, matches).await
}

/// Deletes the oldest revisions beyond `limit` that nothing is at.
pub async fn trim(client: &kube::Client, history: &[Arc<ControllerRevision>], limit: i32, in_use: impl Fn(&ControllerRevision) -> bool) -> Result<(), Error> {
    let mut unused: Vec<_> = history.iter().filter(|revision| !in_use(revision)).collect();
    unused.sort_by_key(|revision| number(revision));
    let excess = unused.len().saturating_sub(usize::try_from(limit).unwrap_or(0));
    for revision in unused.into_iter().take(excess) {
        write::delete(client, &write::path(&**revision), Delete { uid: revision.metadata.uid.as_deref(), ..Delete::default() }).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_a_patch_and_comes_back() {
        let original: PodTemplateSpec = serde_json::from_value(json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}})).expect("a template");
        let revision = ControllerRevision { data: RawExtension(data(&original)), revision: Some(1), ..ControllerRevision::default() };
        assert_eq!(revision.data.0["spec"]["template"]["$patch"], "replace");
        assert!(hash::equal_templates(&template(&revision).expect("a template"), &original));
        assert!(same(&revision, &data(&original)));
    }
}
