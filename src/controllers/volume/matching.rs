//! Which volume fits which claim. Pure.

use std::sync::Arc;

use k8s_openapi::{
    api::core::v1::{Node, ObjectReference, PersistentVolume, PersistentVolumeClaim},
    apimachinery::pkg::api::resource::Quantity as Text,
};
use windlass_api::quantity::Quantity;

use crate::labels;

pub const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";
pub const BIND_COMPLETED: &str = "pv.kubernetes.io/bind-completed";
pub const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";
pub const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
pub const PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";
pub const PROVISIONER_BETA: &str = "volume.beta.kubernetes.io/storage-provisioner";
const CLASS_ANNOTATION: &str = "volume.beta.kubernetes.io/storage-class";

pub fn annotation<'a>(metadata: &'a k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta, key: &str) -> Option<&'a str> {
    metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

/// The class of a claim; none if it does not say (which is not the same as the empty class).
pub fn claim_class(claim: &PersistentVolumeClaim) -> Option<&str> {
    annotation(&claim.metadata, CLASS_ANNOTATION).or_else(|| claim.spec.as_ref()?.storage_class_name.as_deref())
}

fn volume_class(volume: &PersistentVolume) -> &str {
    annotation(&volume.metadata, CLASS_ANNOTATION).or_else(|| volume.spec.as_ref()?.storage_class_name.as_deref()).unwrap_or_default()
}

fn amount(text: Option<&Text>) -> Quantity {
    text.and_then(|text| text.0.parse().ok()).unwrap_or(Quantity::ZERO)
}

pub fn requested(claim: &PersistentVolumeClaim) -> Quantity {
    amount(claim.spec.as_ref().and_then(|spec| spec.resources.as_ref()?.requests.as_ref()?.get("storage")))
}

pub fn capacity(volume: &PersistentVolume) -> Quantity {
    amount(volume.spec.as_ref().and_then(|spec| spec.capacity.as_ref()?.get("storage")))
}

pub fn claim_ref(volume: &PersistentVolume) -> Option<&ObjectReference> {
    volume.spec.as_ref()?.claim_ref.as_ref()
}

/// The volume that a claim names.
pub fn volume_name(claim: &PersistentVolumeClaim) -> &str {
    claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default()
}

/// Whether a volume is kept for this claim: by its name, and by its UID unless somebody reserved it by name alone.
pub fn is_for(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> bool {
    claim_ref(volume).is_some_and(|reference| {
        let named = reference.name == claim.metadata.name && reference.namespace == claim.metadata.namespace;
        named && reference.uid.as_deref().is_none_or(|uid| uid.is_empty() || Some(uid) == claim.metadata.uid.as_deref())
    })
}

/// What of a claim a volume must offer: size, modes, class. None when it does, else why not.
pub fn mismatch(volume: &PersistentVolume, claim: &PersistentVolumeClaim) -> Option<&'static str> {
    let (vspec, cspec) = (volume.spec.as_ref()?, claim.spec.as_ref()?);
    if requested(claim) > capacity(volume) {
        return Some("requested PV is too small");
    }
    if volume_class(volume) != claim_class(claim).unwrap_or_default() {
        return Some("storageClassName does not match");
    }
    let mode = |text: &Option<String>| text.clone().unwrap_or_else(|| "Filesystem".into());
    if mode(&vspec.volume_mode) != mode(&cspec.volume_mode) {
        return Some("incompatible volumeMode");
    }
    let offered = vspec.access_modes.as_deref().unwrap_or_default();
    if !cspec.access_modes.iter().flatten().all(|mode| offered.contains(mode)) {
        return Some("incompatible accessMode");
    }
    None
}

fn reachable(volume: &PersistentVolume, node: &Node) -> bool {
    let required = volume.spec.as_ref().and_then(|spec| spec.node_affinity.as_ref()?.required.as_ref());
    let name = node.metadata.name.as_deref().unwrap_or_default();
    required.is_none_or(|required| labels::node_matches(required, labels::of(&node.metadata.labels), name))
}

/// The best volume for an unbound claim: one reserved for it, else the smallest that is free and fits.
///
/// `delayed`: the class waits for a consumer, so that only a reserved volume is taken unless `node` was chosen.
pub fn find(claim: &PersistentVolumeClaim, volumes: &[Arc<PersistentVolume>], delayed: bool, node: Option<&Node>) -> Option<Arc<PersistentVolume>> {
    let alive = || volumes.iter().filter(|volume| volume.metadata.deletion_timestamp.is_none());
    if let Some(reserved) = alive().find(|volume| is_for(volume, claim) && mismatch(volume, claim).is_none()) {
        return Some(reserved.clone());
    }
    if delayed && node.is_none() {
        return None;
    }
    let selector = claim.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    let free = |volume: &&Arc<PersistentVolume>| {
        let phase = volume.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending");
        claim_ref(volume).is_none()
            && matches!(phase, "Available" | "Pending" | "")
            && mismatch(volume, claim).is_none()
            && selector.is_none_or(|selector| labels::matches(selector, labels::of(&volume.metadata.labels)))
            && node.is_none_or(|node| reachable(volume, node))
    };
    alive().filter(free).min_by(|a, b| capacity(a).cmp(&capacity(b)).then_with(|| a.metadata.name.cmp(&b.metadata.name))).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn volume(name: &str, size: &str, extra: Value) -> Arc<PersistentVolume> {
        let mut spec = json!({"capacity": {"storage": size}, "accessModes": ["ReadWriteOnce"], "storageClassName": "c"});
        spec.as_object_mut().expect("a map").extend(extra.as_object().cloned().unwrap_or_default());
        Arc::new(serde_json::from_value(json!({"metadata": {"name": name, "labels": {"v": name}}, "spec": spec, "status": {"phase": "Available"}})).expect("a volume"))
    }

    fn claim(size: &str, extra: Value) -> PersistentVolumeClaim {
        let mut spec = json!({"resources": {"requests": {"storage": size}}, "accessModes": ["ReadWriteOnce"], "storageClassName": "c"});
        spec.as_object_mut().expect("a map").extend(extra.as_object().cloned().unwrap_or_default());
        serde_json::from_value(json!({"metadata": {"name": "data", "namespace": "ns", "uid": "u"}, "spec": spec})).expect("a claim")
    }

    fn check(claim: &PersistentVolumeClaim, volumes: &[Arc<PersistentVolume>], delayed: bool, expected: Option<&str>) {
        let found = find(claim, volumes, delayed, None);
        assert_eq!(found.as_ref().and_then(|volume| volume.metadata.name.as_deref()), expected);
    }

    #[test]
    fn the_smallest_that_fits() {
        let volumes = [volume("big", "10Gi", json!({})), volume("small", "1Gi", json!({})), volume("mid", "5Gi", json!({}))];
        check(&claim("2Gi", json!({})), &volumes, false, Some("mid"));
        check(&claim("20Gi", json!({})), &volumes, false, None);
        check(&claim("1Gi", json!({"accessModes": ["ReadWriteMany"]})), &volumes, false, None);
        check(&claim("1Gi", json!({"storageClassName": "other"})), &volumes, false, None);
        check(&claim("1Gi", json!({"volumeMode": "Block"})), &volumes, false, None);
        check(&claim("1Gi", json!({"selector": {"matchLabels": {"v": "big"}}})), &volumes, false, Some("big"));
        check(&claim("1Gi", json!({})), &volumes, true, None);
    }

    #[test]
    fn reserved_volumes() {
        let reserved = |uid: &str| [volume("small", "1Gi", json!({})), volume("mine", "9Gi", json!({"claimRef": {"name": "data", "namespace": "ns", "uid": uid}}))];
        check(&claim("1Gi", json!({})), &reserved(""), true, Some("mine"));
        check(&claim("1Gi", json!({})), &reserved("u"), false, Some("mine"));
        check(&claim("1Gi", json!({})), &reserved("former"), false, Some("small"));
    }
}
