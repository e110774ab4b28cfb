//! Plugins that look at the pod and one node alone.

use crate::cluster::{Cluster, Node};
use crate::event::Events;
use crate::plugin::{Check, MAX_SCORE, Plugin, Prepared, Rejection, Score, normalize_to_max};
use crate::pod::Pod;

/// Holds a pod back while it has scheduling gates (KEP-3521).
pub struct SchedulingGates;

impl Plugin for SchedulingGates {
    fn name(&self) -> &'static str {
        "SchedulingGates"
    }

    fn events(&self) -> Events {
        Events::POD_UPDATE
    }

    fn prepare<'a>(&'a self, _: &'a Cluster, pod: &'a Pod) -> Prepared<'a> {
        let gates = &pod.view.spec.scheduling_gates;
        if gates.is_empty() {
            return Prepared::Skip;
        }
        let names: Vec<&str> = gates.iter().map(|gate| gate.name.as_str()).collect();
        Prepared::Reject(Rejection::unresolvable(format!("waiting for scheduling gates: [{}]", names.join(" "))))
    }
}

/// A pod that names its node fits that one.
pub struct NodeName;

impl Plugin for NodeName {
    fn name(&self) -> &'static str {
        "NodeName"
    }

    fn events(&self) -> Events {
        Events::NODE_ADD | Events::NODE_UPDATE
    }

    fn prepare<'a>(&'a self, _: &'a Cluster, pod: &'a Pod) -> Prepared<'a> {
        match pod.view.node() {
            Some(name) => Prepared::Check(Box::new(Named(name))),
            None => Prepared::Skip,
        }
    }
}

struct Named<'a>(&'a str);

impl Check for Named<'_> {
    fn check(&self, node: &Node) -> Result<(), Rejection> {
        if node.name == self.0 { Ok(()) } else { Err(Rejection::unresolvable("node(s) didn't match the requested node name")) }
    }
}

/// Cordoned nodes take only pods that tolerate it.
pub struct NodeUnschedulable;

impl Plugin for NodeUnschedulable {
    fn name(&self) -> &'static str {
        "NodeUnschedulable"
    }

    fn events(&self) -> Events {
        Events::NODE_ADD | Events::NODE_UPDATE | Events::POD_UPDATE
    }

    fn prepare<'a>(&'a self, _: &'a Cluster, pod: &'a Pod) -> Prepared<'a> {
        let cordon = k8s_openapi::api::core::v1::Taint {
            key: "node.kubernetes.io/unschedulable".to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Default::default()
        };
        if pod.tolerates(&cordon) { Prepared::Skip } else { Prepared::Check(Box::new(Schedulable)) }
    }
}

struct Schedulable;

impl Check for Schedulable {
    fn check(&self, node: &Node) -> Result<(), Rejection> {
        if node.unschedulable { Err(Rejection::unresolvable("node(s) were unschedulable")) } else { Ok(()) }
    }
}

/// Taints keep pods away that do not tolerate them; `PreferNoSchedule` only lowers the score.
pub struct TaintToleration;

impl Plugin for TaintToleration {
    fn name(&self) -> &'static str {
        "TaintToleration"
    }

    fn events(&self) -> Events {
        Events::NODE_ADD | Events::NODE_UPDATE | Events::POD_UPDATE
    }

    fn prepare<'a>(&'a self, _: &'a Cluster, pod: &'a Pod) -> Prepared<'a> {
        Prepared::Check(Box::new(Tolerance(pod)))
    }

    fn scorer<'a>(&'a self, _: &'a Cluster, pod: &'a Pod, fit: &[&Node]) -> Option<Box<dyn Score + 'a>> {
        let soft = fit.iter().any(|node| node.taints.iter().any(|taint| taint.effect == "PreferNoSchedule"));
        // Without such taints all nodes get the full score, which tells none from another.
        soft.then(|| Box::new(Tolerance(pod)) as Box<dyn Score>)
    }
}

struct Tolerance<'a>(&'a Pod);

impl Check for Tolerance<'_> {
    fn check(&self, node: &Node) -> Result<(), Rejection> {
        let hard = node.taints.iter().filter(|taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute"));
        match hard.into_iter().find(|taint| !self.0.tolerates(taint)) {
            Some(_) => Err(Rejection::unresolvable("node(s) had untolerated taint(s)")),
            None => Ok(()),
        }
    }
}

impl Score for Tolerance<'_> {
    fn score(&self, node: &Node) -> i64 {
        let soft = node.taints.iter().filter(|taint| taint.effect == "PreferNoSchedule");
        soft.filter(|taint| !self.0.tolerates(taint)).count() as i64
    }

    fn normalize(&self, _: &[&Node], scores: &mut [i64]) {
        normalize_to_max(scores, true);
    }
}

/// `nodeSelector` and node affinity.
pub struct NodeAffinity;

impl Plugin for NodeAffinity {
    fn name(&self) -> &'static str {
        "NodeAffinity"
    }

    fn events(&self) -> Events {
        Events::NODE_ADD | Events::NODE_UPDATE | Events::POD_UPDATE
    }

    fn prepare<'a>(&'a self, _: &'a Cluster, pod: &'a Pod) -> Prepared<'a> {
        if pod.node_selection.is_empty() {
            return Prepared::Skip;
        }
        match pod.node_selection.names() {
            Some(names) => Prepared::Only(names, Box::new(Selected(pod))),
            None => Prepared::Check(Box::new(Selected(pod))),
        }
    }

    fn scorer<'a>(&'a self, _: &'a Cluster, pod: &'a Pod, _: &[&Node]) -> Option<Box<dyn Score + 'a>> {
        (!pod.node_preferences.is_empty()).then(|| Box::new(Preferred(pod)) as Box<dyn Score>)
    }
}

struct Selected<'a>(&'a Pod);

impl Check for Selected<'_> {
    fn check(&self, node: &Node) -> Result<(), Rejection> {
        if self.0.node_selection.matches(&node.name, &node.labels) {
            Ok(())
        } else {
            Err(Rejection::unresolvable("node(s) didn't match Pod's node affinity/selector"))
        }
    }
}

struct Preferred<'a>(&'a Pod);

impl Score for Preferred<'_> {
    fn score(&self, node: &Node) -> i64 {
        let met = self.0.node_preferences.iter().filter(|(_, term)| term.matches(&node.name, &node.labels));
        met.map(|(weight, _)| weight).sum()
    }

    fn normalize(&self, _: &[&Node], scores: &mut [i64]) {
        normalize_to_max(scores, false);
    }
}

/// A host port can be had once per node, protocol and address.
pub struct NodePorts;

impl Plugin for NodePorts {
    fn name(&self) -> &'static str {
        "NodePorts"
    }

    fn events(&self) -> Events {
        Events::POD_GONE | Events::NODE_ADD | Events::NODE_UPDATE
    }

    fn prepare<'a>(&'a self, _: &'a Cluster, pod: &'a Pod) -> Prepared<'a> {
        if pod.host_ports.is_empty() { Prepared::Skip } else { Prepared::Check(Box::new(FreePorts(pod))) }
    }
}

struct FreePorts<'a>(&'a Pod);

impl Check for FreePorts<'_> {
    fn check(&self, node: &Node) -> Result<(), Rejection> {
        let taken = self.0.host_ports.iter().any(|wanted| node.ports.iter().any(|port| port.conflicts(wanted)));
        if taken { Err(Rejection::resolvable("node(s) didn't have free ports for the requested pod ports")) } else { Ok(()) }
    }
}

/// Resource claims are not allocated yet: a pod that has some says so instead of starting without its devices.
pub struct DynamicResources;

impl Plugin for DynamicResources {
    fn name(&self) -> &'static str {
        "DynamicResources"
    }

    fn events(&self) -> Events {
        Events::POD_UPDATE
    }

    fn prepare<'a>(&'a self, _: &'a Cluster, pod: &'a Pod) -> Prepared<'a> {
        if pod.view.spec.resource_claims.is_empty() {
            return Prepared::Skip;
        }
        Prepared::Reject(Rejection::unresolvable("dynamic resource allocation is not supported: remove spec.resourceClaims"))
    }
}

/// Nodes that have the pod's images are better, the more so the larger the images and the more nodes have them.
pub struct ImageLocality;

const MIN_IMAGES: i64 = 23 << 20;
const MAX_CONTAINER_IMAGE: i64 = 1000 << 20;

impl Plugin for ImageLocality {
    fn name(&self) -> &'static str {
        "ImageLocality"
    }

    fn events(&self) -> Events {
        Events::NONE
    }

    fn scorer<'a>(&'a self, cluster: &'a Cluster, pod: &'a Pod, _: &[&Node]) -> Option<Box<dyn Score + 'a>> {
        let spreads: Vec<(&str, f64)> = pod
            .images
            .iter()
            .map(|image| (image.as_str(), cluster.nodes_with_image(image) as f64 / cluster.nodes().len().max(1) as f64))
            .filter(|(_, spread)| *spread > 0.0)
            .collect();
        let most = MAX_CONTAINER_IMAGE * pod.images.len() as i64;
        (!spreads.is_empty()).then(|| Box::new(Images { spreads, most }) as Box<dyn Score>)
    }
}

struct Images<'a> {
    /// The pod's images that some node has, with the share of nodes that have them.
    spreads: Vec<(&'a str, f64)>,
    most: i64,
}

impl Score for Images<'_> {
    fn score(&self, node: &Node) -> i64 {
        let sizes = self.spreads.iter().filter_map(|(image, spread)| node.images.get(*image).map(|size| (*size as f64 * spread) as i64));
        let sum: i64 = sizes.sum();
        MAX_SCORE * (sum.clamp(MIN_IMAGES, self.most) - MIN_IMAGES) / (self.most - MIN_IMAGES)
    }
}
