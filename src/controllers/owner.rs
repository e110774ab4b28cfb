//! Controller references: who owns whom, and taking and giving up ownership by label.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::{Client, Resource};
use serde_json::{Value, json};

use crate::{
    Error,
    write::{self, ApiErrorExt},
};

/// The reference of an object's managing controller.
pub fn controller(metadata: &ObjectMeta) -> Option<&OwnerReference> {
    metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))
}

/// The controller of an object, if it is of this kind of this group.
pub fn controller_of<'a>(metadata: &'a ObjectMeta, group: &str, kind: &str) -> Option<&'a OwnerReference> {
    let of_group = |owner: &&OwnerReference| owner.api_version.rsplit_once('/').map_or("", |(group, _)| group) == group;
    controller(metadata).filter(|owner| owner.kind == kind).filter(of_group)
}

/// Whether `owner` is the managing controller.
pub fn is_controlled_by(metadata: &ObjectMeta, owner_uid: &str) -> bool {
    controller(metadata).is_some_and(|owner| owner.uid == owner_uid)
}

/// A reference that makes `owner` the managing controller.
pub fn reference<K: Resource<DynamicType = ()>>(owner: &K) -> OwnerReference {
    OwnerReference {
        api_version: K::api_version(&()).into_owned(),
        kind: K::kind(&()).into_owned(),
        name: owner.meta().name.clone().unwrap_or_default(),
        uid: owner.meta().uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// What to do with one candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Ours.
    Keep,
    /// An orphan that matches: make it ours.
    Adopt,
    /// Ours, and no longer matching: give it up.
    Release,
    /// Not our business.
    Ignore,
}

/// Upstream's rules of adoption and release. `matches`: whether our selector picks the object.
pub fn claim(object: &ObjectMeta, matches: bool, owner_uid: &str, owner_deleting: bool) -> Claim {
    match controller(object) {
        Some(owner) if owner.uid != owner_uid => Claim::Ignore,
        Some(_) if matches => Claim::Keep,
        Some(_) if owner_deleting => Claim::Ignore,
        Some(_) => Claim::Release,
        None if owner_deleting || !matches || object.deletion_timestamp.is_some() => Claim::Ignore,
        None => Claim::Adopt,
    }
}

/// The owner on whose behalf objects are claimed.
#[derive(Clone, Debug)]
pub struct Owner {
    pub reference: OwnerReference,
    /// Path of the owner itself, to make sure before the first adoption that it still lives.
    pub path: String,
    pub deleting: bool,
    /// A finalizer that comes and goes with ownership (jobs track their pods by one).
    pub finalizer: Option<&'static str>,
}

impl Owner {
    pub fn of<K: Resource<DynamicType = ()>>(owner: &K) -> Self {
        let path = format!("{}/{}", K::url_path(&(), owner.meta().namespace.as_deref()), owner.meta().name.as_deref().unwrap_or_default());
        Owner { reference: reference(owner), path, deleting: owner.meta().deletion_timestamp.is_some(), finalizer: None }
    }

    /// An owner may adopt only if a fresh read shows the same UID and no deletion: the cache may be behind.
    async fn may_adopt(&self, client: &Client) -> Result<bool, Error> {
        let fresh: Option<Value> = write::get(client, &self.path).await?;
        Ok(fresh.is_some_and(|fresh| fresh["metadata"]["uid"] == *self.reference.uid && fresh["metadata"].get("deletionTimestamp").is_none()))
    }

    fn patch(&self, uid: &str, adopt: bool) -> Value {
        let finalizers = |key: &str| self.finalizer.map(|finalizer| (key.to_string(), json!([finalizer])));
        let mut metadata = serde_json::Map::new();
        metadata.insert("uid".into(), json!(uid));
        if adopt {
            metadata.insert("ownerReferences".into(), json!([self.reference]));
            metadata.extend(finalizers("finalizers"));
        } else {
            metadata.insert("ownerReferences".into(), json!([{"$patch": "delete", "uid": self.reference.uid}]));
            metadata.extend(finalizers("$deleteFromPrimitiveList/finalizers"));
        }
        json!({ "metadata": metadata })
    }

    /// Keeps, adopts and releases among `candidates`; returns those that are ours now.
    ///
    /// # Errors
    /// The first failure; what was claimed before stays claimed.
    pub async fn claim<'a, K: Resource<DynamicType = ()>>(
        &self,
        client: &Client,
        candidates: Vec<std::sync::Arc<K>>,
        matches: impl Fn(&K) -> bool,
    ) -> Result<Vec<std::sync::Arc<K>>, Error> {
        let mut ours = Vec::with_capacity(candidates.len());
        let mut allowed: Option<bool> = None;
        let mut failure = None;
        for candidate in candidates {
            let meta = candidate.meta();
            let action = claim(meta, matches(&candidate), &self.reference.uid, self.deleting);
            let adopt = match action {
                Claim::Keep => {
                    ours.push(candidate);
                    continue;
                }
                Claim::Ignore => continue,
                Claim::Adopt => true,
                Claim::Release => false,
            };
            if adopt && allowed.is_none() {
                allowed = Some(self.may_adopt(client).await?);
            }
            if adopt && allowed == Some(false) {
                continue;
            }
            let path = format!("{}/{}", K::url_path(&(), meta.namespace.as_deref()), meta.name.as_deref().unwrap_or_default());
            let patch = self.patch(meta.uid.as_deref().unwrap_or_default(), adopt);
            match write::strategic_patch(client, &path, &patch).await {
                Ok(_) if adopt => ours.push(candidate),
                Ok(_) => {}
                Err(error) if error.is_not_found() || (!adopt && error.is_invalid()) => {}
                Err(error) => failure = Some(error),
            }
        }
        failure.map_or(Ok(ours), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(owner: Option<&str>, deleting: bool) -> ObjectMeta {
        let mut value = json!({});
        if let Some(uid) = owner {
            value["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": uid, "controller": true}]);
        }
        if deleting {
            value["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        }
        serde_json::from_value(value).expect("metadata")
    }

    #[test]
    fn claims() {
        for (owner, deleting, matches, owner_deleting, expected) in [
            (Some("me"), false, true, false, Claim::Keep),
            (Some("me"), false, true, true, Claim::Keep),
            (Some("me"), false, false, false, Claim::Release),
            (Some("me"), false, false, true, Claim::Ignore),
            (Some("other"), false, true, false, Claim::Ignore),
            (None, false, true, false, Claim::Adopt),
            (None, true, true, false, Claim::Ignore),
            (None, false, true, true, Claim::Ignore),
            (None, false, false, false, Claim::Ignore),
        ] {
            assert_eq!(claim(&meta(owner, deleting), matches, "me", owner_deleting), expected, "{owner:?} {deleting} {matches} {owner_deleting}");
        }
    }

    #[test]
    fn owners_are_told_apart_by_group() {
        let owned = meta(Some("me"), false);
        assert!(controller_of(&owned, "apps", "ReplicaSet").is_some());
        assert!(controller_of(&owned, "", "ReplicaSet").is_none());
    }
}
