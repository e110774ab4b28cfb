//! Volumes: where bound ones can be reached, which free ones would do, how many a node can attach.

use std::collections::HashSet;
use std::sync::Arc;

use windlass_client::informer::Key;

use crate::cluster::{Cluster, Node};
use crate::event::Events;
use crate::object::{ClaimView, StorageClassView, VolumeObjectView};
use crate::plugin::{Check, Plugin, Prepared, Rejection};
use crate::pod::{NodeSelection, Pod, compile_selector};

/// Set on a claim to tell its provisioner where the volume is needed.
const NO_PROVISIONER: &str = "kubernetes.io/no-provisioner";
const ZONE_LABELS: [&str; 4] = [
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
];

/// Claims are bound to volumes that the node can reach, or can be when the pod comes (`WaitForFirstConsumer`).
pub struct VolumeBinding;

/// A claim of the pod, as far as it matters where the pod goes.
enum Claimed<'a> {
    Bound { volume: Option<&'a Arc<VolumeObjectView>> },
    /// To be bound once the node is known.
    Delayed { key: Key, claim: &'a Arc<ClaimView>, class: &'a Arc<StorageClassView> },
}

impl Plugin for VolumeBinding {
    fn name(&self) -> &'static str {
        "VolumeBinding"
    }

    fn events(&self) -> Events {
        Events::CLAIM | Events::VOLUME | Events::STORAGE_CLASS | Events::NODE_ADD | Events::NODE_UPDATE | Events::CSI_NODE
    }

    fn prepare<'a>(&'a self, cluster: &'a Cluster, pod: &'a Pod) -> Prepared<'a> {
        if pod.claims.is_empty() {
            return Prepared::Skip;
        }
        match claimed(cluster, pod) {
            Ok(claims) => Prepared::Check(Box::new(Reach { cluster, claims })),
            Err(rejection) => Prepared::Reject(rejection),
        }
    }
}

fn claimed<'a>(cluster: &'a Cluster, pod: &'a Pod) -> Result<Vec<Claimed<'a>>, Rejection> {
    let mut claims = Vec::new();
    for (name, ephemeral) in &pod.claims {
        let key = Key::new(pod.key.ns(), name);
        let Some(claim) = cluster.claims.get(&key) else {
            return Err(Rejection::unresolvable(if *ephemeral {
                format!("waiting for ephemeral volume controller to create the persistentvolumeclaim {name:?}")
            } else {
                format!("persistentvolumeclaim {name:?} not found")
            }));
        };
        if claim.metadata.deletion_timestamp.is_some() {
            return Err(Rejection::unresolvable(format!("persistentvolumeclaim {name:?} is being deleted")));
        }
        if claim.status.phase.as_deref() == Some("Lost") {
            return Err(Rejection::unresolvable(format!(
                "persistentvolumeclaim {name:?} bound to non-existent persistentvolume {:?}",
                claim.spec.volume_name.as_deref().unwrap_or_default()
            )));
        }
        let annotations = claim.metadata.annotations.as_ref();
        let complete = annotations.is_some_and(|a| a.contains_key("pv.kubernetes.io/bind-completed"));
        if let Some(volume) = claim.spec.volume_name.as_deref().filter(|name| !name.is_empty() && complete) {
            claims.push(Claimed::Bound { volume: cluster.volumes.get(volume) });
            continue;
        }
        let class = claim.spec.storage_class_name.as_deref().and_then(|class| cluster.classes.get(class));
        match class.filter(|class| class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer")) {
            Some(class) => claims.push(Claimed::Delayed { key, claim, class }),
            None => return Err(Rejection::unresolvable("pod has unbound immediate PersistentVolumeClaims")),
        }
    }
    Ok(claims)
}

struct Reach<'a> {
    cluster: &'a Cluster,
    claims: Vec<Claimed<'a>>,
}

impl Check for Reach<'_> {
    fn check(&self, node: &Node) -> Result<(), Rejection> {
        plan(self.cluster, &self.claims, node).map(drop)
    }
}

/// What binding a pod to its node does to its claims.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ClaimPlan {
    /// Volumes to be bound, with their claims.
    pub bind: Vec<(String, Key)>,
    /// Claims whose provisioner is to be told the node.
    pub provision: Vec<Key>,
}

/// Plans the claims of a pod that was decided to go to `node`.
pub fn plan_claims(cluster: &Cluster, pod: &Pod, node: &Node) -> Result<ClaimPlan, Rejection> {
    plan(cluster, &claimed(cluster, pod)?, node)
}

fn plan(cluster: &Cluster, claims: &[Claimed], node: &Node) -> Result<ClaimPlan, Rejection> {
    let mut plan = ClaimPlan::default();
    let mut taken: HashSet<&str> = HashSet::new();
    for claim in claims {
        match claim {
            Claimed::Bound { volume: None } => {
                return Err(Rejection::unresolvable("node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)"));
            }
            Claimed::Bound { volume: Some(volume) } => {
                if !reaches(volume, node) {
                    return Err(Rejection::unresolvable("node(s) didn't match PersistentVolume's node affinity"));
                }
            }
            Claimed::Delayed { key, claim, class } => {
                let fits = |volume: &&Arc<VolumeObjectView>| {
                    let name = volume.metadata.name.as_deref().unwrap_or_default();
                    !taken.contains(name) && !cluster.reserved_volumes.contains_key(name) && suits(volume, key, claim) && reaches(volume, node)
                };
                let smallest = cluster.volumes.values().filter(fits).min_by_key(|volume| storage(&volume.spec.capacity));
                if let Some(volume) = smallest {
                    let name = volume.metadata.name.as_deref().unwrap_or_default();
                    taken.insert(name);
                    plan.bind.push((name.to_owned(), key.clone()));
                } else if class.provisioner != NO_PROVISIONER && topology_allows(class, node) {
                    plan.provision.push(key.clone());
                } else {
                    return Err(Rejection::unresolvable("node(s) didn't find available persistent volumes to bind"));
                }
            }
        }
    }
    Ok(plan)
}

fn storage(list: &std::collections::BTreeMap<String, k8s_openapi::apimachinery::pkg::api::resource::Quantity>) -> i64 {
    let size = list.get("storage").and_then(|quantity| quantity.0.parse::<windlass_api::quantity::Quantity>().ok());
    size.map_or(0, |size| size.value())
}

/// Whether a free volume is what the claim asks for.
fn suits(volume: &VolumeObjectView, key: &Key, claim: &ClaimView) -> bool {
    let spec = &volume.spec;
    let free = match &spec.claim_ref {
        None => volume.status.phase.as_deref() == Some("Available"),
        // Set aside for this very claim by whoever made the volume.
        Some(reference) => {
            let named = reference.namespace.as_deref() == Some(key.ns()) && reference.name.as_deref() == Some(&key.name);
            named && reference.uid.as_ref().is_none_or(|uid| uid.is_empty() || Some(uid) == claim.metadata.uid.as_ref())
        }
    };
    let class = |name: &Option<String>| name.clone().unwrap_or_default();
    let mode = |mode: &Option<String>| mode.clone().unwrap_or_else(|| "Filesystem".to_owned());
    let selected = claim.spec.selector.as_ref().is_none_or(|selector| {
        let labels = volume.metadata.labels.clone().unwrap_or_default();
        compile_selector(selector).is_ok_and(|selector| crate::pod::selects(&selector, &labels))
    });
    free && volume.metadata.deletion_timestamp.is_none()
        && class(&spec.storage_class_name) == class(&claim.spec.storage_class_name)
        && mode(&spec.volume_mode) == mode(&claim.spec.volume_mode)
        && claim.spec.access_modes.iter().all(|wanted| spec.access_modes.contains(wanted))
        && storage(&spec.capacity) >= storage(&claim.spec.resources.requests)
        && selected
}

fn reaches(volume: &VolumeObjectView, node: &Node) -> bool {
    let required = volume.spec.node_affinity.as_ref().and_then(|affinity| affinity.required.as_ref());
    required.is_none_or(|required| NodeSelection::of_terms(&required.node_selector_terms).is_ok_and(|selection| selection.matches(&node.name, &node.labels)))
}

fn topology_allows(class: &StorageClassView, node: &Node) -> bool {
    let meets = |term: &k8s_openapi::api::core::v1::TopologySelectorTerm| {
        let expressions = term.match_label_expressions.iter().flatten();
        expressions.into_iter().all(|e| node.label(&e.key).is_some_and(|value| e.values.iter().any(|wanted| wanted == value)))
    };
    class.allowed_topologies.is_empty() || class.allowed_topologies.iter().any(meets)
}

/// The volumes that the pod's claims are bound to.
fn bound_volumes<'a>(cluster: &'a Cluster, pod: &'a Pod) -> impl Iterator<Item = &'a Arc<VolumeObjectView>> {
    let claims = pod.claims.iter().filter_map(|(name, _)| cluster.claims.get(&Key::new(pod.key.ns(), name)));
    claims.filter_map(|claim| cluster.volumes.get(claim.spec.volume_name.as_deref()?))
}

/// A volume in a zone is of use only there.
pub struct VolumeZone;

impl Plugin for VolumeZone {
    fn name(&self) -> &'static str {
        "VolumeZone"
    }

    fn events(&self) -> Events {
        Events::CLAIM | Events::VOLUME | Events::STORAGE_CLASS | Events::NODE_ADD | Events::NODE_UPDATE
    }

    fn prepare<'a>(&'a self, cluster: &'a Cluster, pod: &'a Pod) -> Prepared<'a> {
        let labels = bound_volumes(cluster, pod).flat_map(|volume| volume.metadata.labels.iter().flatten());
        let zones: Vec<_> = labels.filter(|(key, _)| ZONE_LABELS.contains(&key.as_str())).map(|(key, value)| (key.as_str(), value.as_str())).collect();
        if zones.is_empty() { Prepared::Skip } else { Prepared::Check(Box::new(Zones(zones))) }
    }
}

struct Zones<'a>(Vec<(&'a str, &'a str)>);

impl Check for Zones<'_> {
    fn check(&self, node: &Node) -> Result<(), Rejection> {
        // A node without zone labels is in a cluster without zones.
        if !ZONE_LABELS.iter().any(|key| node.label(key).is_some()) {
            return Ok(());
        }
        // Several zones in one label are joined by `__`.
        let within = |(key, zones): &(&str, &str)| node.label(key).is_some_and(|zone| zones.split("__").any(|z| z == zone));
        if self.0.iter().all(within) { Ok(()) } else { Err(Rejection::unresolvable("node(s) had no available volume zone")) }
    }
}

/// A `ReadWriteOncePod` claim serves one pod (KEP-2485).
pub struct VolumeRestrictions;

impl Plugin for VolumeRestrictions {
    fn name(&self) -> &'static str {
        "VolumeRestrictions"
    }

    fn events(&self) -> Events {
        Events::POD_GONE | Events::CLAIM
    }

    fn prepare<'a>(&'a self, cluster: &'a Cluster, pod: &'a Pod) -> Prepared<'a> {
        let exclusive = |name: &str| {
            let claim = cluster.claims.get(&Key::new(pod.key.ns(), name));
            claim.is_some_and(|claim| claim.spec.access_modes.iter().any(|mode| mode == "ReadWriteOncePod"))
        };
        let names: Vec<&str> = pod.claims.iter().map(|(name, _)| name.as_str()).filter(|name| exclusive(name)).collect();
        if names.is_empty() {
            return Prepared::Skip;
        }
        let conflicts = cluster.nodes().iter().flat_map(|node| &node.pods).map(|other| uses(other, pod, &names)).sum();
        Prepared::Check(Box::new(Exclusive { pod, names, conflicts }))
    }
}

struct Exclusive<'a> {
    pod: &'a Pod,
    names: Vec<&'a str>,
    conflicts: i64,
}

fn uses(other: &Pod, pod: &Pod, names: &[&str]) -> i64 {
    let same = other.key.namespace == pod.key.namespace && other.uid != pod.uid;
    i64::from(same && other.claims.iter().any(|(name, _)| names.contains(&name.as_str())))
}

impl Check for Exclusive<'_> {
    fn check(&self, _: &Node) -> Result<(), Rejection> {
        if self.conflicts == 0 {
            return Ok(());
        }
        Err(Rejection::resolvable("node(s) unavailable due to PersistentVolumeClaim with ReadWriteOncePod access mode already in-use by another pod"))
    }

    fn moved(&mut self, other: &Pod, _: &Node, sign: i64) {
        self.conflicts += sign * uses(other, self.pod, &self.names);
    }
}

/// A node attaches only as many volumes of a CSI driver as the driver says.
pub struct NodeVolumeLimits;

impl Plugin for NodeVolumeLimits {
    fn name(&self) -> &'static str {
        "NodeVolumeLimits"
    }

    fn events(&self) -> Events {
        Events::CSI_NODE | Events::POD_GONE | Events::CLAIM | Events::NODE_ADD
    }

    fn prepare<'a>(&'a self, cluster: &'a Cluster, pod: &'a Pod) -> Prepared<'a> {
        let wanted: HashSet<(&str, &str)> = attached(cluster, pod).collect();
        if wanted.is_empty() { Prepared::Skip } else { Prepared::Check(Box::new(Limits { cluster, wanted })) }
    }
}

/// Driver and handle of the CSI volumes of a pod.
fn attached<'a>(cluster: &'a Cluster, pod: &'a Pod) -> impl Iterator<Item = (&'a str, &'a str)> {
    bound_volumes(cluster, pod).filter_map(|volume| volume.spec.csi.as_ref().map(|csi| (csi.driver.as_str(), csi.volume_handle.as_str())))
}

struct Limits<'a> {
    cluster: &'a Cluster,
    wanted: HashSet<(&'a str, &'a str)>,
}

impl Check for Limits<'_> {
    fn check(&self, node: &Node) -> Result<(), Rejection> {
        let Some(csi) = self.cluster.csi_nodes.get(&node.name) else { return Ok(()) };
        let held: HashSet<(&str, &str)> = node.pods.iter().flat_map(|pod| attached(self.cluster, pod)).collect();
        for driver in &csi.spec.drivers {
            let Some(limit) = driver.allocatable.as_ref().and_then(|limit| limit.count) else { continue };
            let of_driver = |(name, _): &&(&str, &str)| *name == driver.name;
            let new = self.wanted.difference(&held).filter(of_driver).count();
            let count = held.iter().filter(of_driver).count() + new;
            if new > 0 && count > usize::try_from(limit).unwrap_or(0) {
                return Err(Rejection::resolvable("node(s) exceed max volume count"));
            }
        }
        Ok(())
    }
}
