//! The cluster as the scheduler sees it: nodes in one flat array, what runs on them, and what was decided but not yet
//! confirmed. Changed by deltas; nothing is copied for a decision.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Taint;
use windlass_api::selector::LabelSelector;
use windlass_client::informer::Key;

use crate::object::{BudgetView, ClaimView, CsiNodeView, NodeView, StorageClassView, VolumeObjectView};
use crate::pod::{HostPort, Labels, Pod};
use crate::resources::Resources;

pub const HOSTNAME: &str = "kubernetes.io/hostname";

/// A node and what its pods take of it.
#[derive(Clone, Debug)]
pub struct Node {
    pub name: String,
    pub labels: Labels,
    pub taints: Vec<Taint>,
    pub unschedulable: bool,
    pub allocatable: Resources,
    pub requested: Resources,
    /// Requests with defaults for pods that make none.
    pub non_zero: Resources,
    pub pods: Vec<Arc<Pod>>,
    pub ports: Vec<HostPort>,
    /// Image sizes by name, in bytes.
    pub images: HashMap<String, i64>,
}

impl Node {
    fn new(view: &NodeView) -> Self {
        let mut node = Self {
            name: view.metadata.name.clone().unwrap_or_default(),
            labels: Labels::new(),
            taints: Vec::new(),
            unschedulable: false,
            allocatable: Resources::default(),
            requested: Resources::default(),
            non_zero: Resources::default(),
            pods: Vec::new(),
            ports: Vec::new(),
            images: HashMap::new(),
        };
        node.update(view);
        node
    }

    fn update(&mut self, view: &NodeView) {
        self.labels = view.metadata.labels.clone().unwrap_or_default();
        self.taints = view.spec.taints.clone();
        self.unschedulable = view.spec.unschedulable;
        self.allocatable = Resources::parse(&view.status.allocatable);
        self.images = view.status.images.iter().flat_map(|image| image.names.iter().map(|name| (name.clone(), image.size_bytes))).collect();
    }

    pub fn label(&self, key: &str) -> Option<&str> {
        self.labels.get(key).map(String::as_str)
    }

    pub fn add(&mut self, pod: Arc<Pod>) {
        self.requested.add(&pod.requests, 1);
        self.non_zero.add(&pod.non_zero, 1);
        self.ports.extend_from_slice(&pod.host_ports);
        self.pods.push(pod);
    }

    pub fn remove(&mut self, uid: &str) {
        let Some(at) = self.pods.iter().position(|pod| pod.uid == uid) else { return };
        let pod = self.pods.swap_remove(at);
        self.requested.add(&pod.requests, -1);
        self.non_zero.add(&pod.non_zero, -1);
        if !pod.host_ports.is_empty() {
            self.ports = self.pods.iter().flat_map(|pod| pod.host_ports.iter().cloned()).collect();
        }
    }
}

/// A pod that takes room on a node.
#[derive(Debug)]
struct Placed {
    pod: Arc<Pod>,
    node: String,
    /// Decided by us, not yet seen bound.
    assumed: bool,
}

/// The objects of a kind of workload that select pods, for spreading their pods by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SelectorKind {
    Service,
    ReplicationController,
    ReplicaSet,
    StatefulSet,
}

#[derive(Debug, Default)]
pub struct Cluster {
    nodes: Vec<Node>,
    by_name: HashMap<String, usize>,
    placed: HashMap<String, Placed>,
    /// Pods bound to nodes that are not (or no longer) known, by node.
    homeless: HashMap<String, HashSet<String>>,
    /// Pods with inter-pod affinity of any kind, by uid: others must heed it.
    with_affinity: HashSet<String>,
    /// Nodes that have an image, by image.
    image_nodes: HashMap<String, usize>,
    /// Pods for which room is being made, with the node.
    nominated: HashMap<String, (Arc<Pod>, String)>,
    pub namespaces: HashMap<String, Labels>,
    /// By namespace: who selects pods.
    pub selectors: HashMap<String, BTreeMap<(u8, String), LabelSelector>>,
    pub budgets: HashMap<Key, Arc<BudgetView>>,
    pub claims: HashMap<Key, Arc<ClaimView>>,
    pub volumes: HashMap<String, Arc<VolumeObjectView>>,
    /// Volumes that are being bound for a decided pod, by name, with the claim.
    pub reserved_volumes: HashMap<String, Key>,
    pub classes: HashMap<String, Arc<StorageClassView>>,
    pub csi_nodes: HashMap<String, Arc<CsiNodeView>>,
}

static NO_LABELS: Labels = Labels::new();

impl Cluster {
    // === nodes ===

    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    pub fn node(&self, name: &str) -> Option<&Node> {
        self.by_name.get(name).map(|at| &self.nodes[*at])
    }

    pub fn node_index(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    pub fn set_node(&mut self, view: &NodeView) {
        let name = view.metadata.name.clone().unwrap_or_default();
        match self.by_name.get(&name) {
            Some(&at) => {
                self.count_images(at, false);
                self.nodes[at].update(view);
                self.count_images(at, true);
            }
            None => {
                let mut node = Node::new(view);
                for uid in self.homeless.remove(&name).unwrap_or_default() {
                    if let Some(placed) = self.placed.get(&uid) {
                        node.add(placed.pod.clone());
                    }
                }
                self.by_name.insert(name, self.nodes.len());
                self.nodes.push(node);
                self.count_images(self.nodes.len() - 1, true);
            }
        }
    }

    pub fn remove_node(&mut self, name: &str) {
        let Some(at) = self.by_name.remove(name) else { return };
        self.count_images(at, false);
        let node = self.nodes.swap_remove(at);
        if let Some(moved) = self.nodes.get(at) {
            self.by_name.insert(moved.name.clone(), at);
        }
        if !node.pods.is_empty() {
            self.homeless.insert(node.name, node.pods.iter().map(|pod| pod.uid.clone()).collect());
        }
    }

    fn count_images(&mut self, at: usize, added: bool) {
        for name in self.nodes[at].images.keys() {
            match self.image_nodes.get_mut(name) {
                Some(count) if added => *count += 1,
                Some(count) if *count > 1 => *count -= 1,
                Some(_) => {
                    self.image_nodes.remove(name);
                }
                None if added => {
                    self.image_nodes.insert(name.clone(), 1);
                }
                None => {}
            }
        }
    }

    pub fn nodes_with_image(&self, image: &str) -> usize {
        self.image_nodes.get(image).copied().unwrap_or(0)
    }

    // === pods ===

    /// Takes in a pod that the API says is bound to `node`; an assumption about it is confirmed or corrected.
    pub fn place(&mut self, pod: Arc<Pod>, node: &str) {
        self.put(pod, node, false);
    }

    /// Takes room for a pod that is being bound to `node`.
    pub fn assume(&mut self, pod: Arc<Pod>, node: &str) {
        self.put(pod, node, true);
    }

    fn put(&mut self, pod: Arc<Pod>, node: &str, assumed: bool) {
        self.remove_pod(&pod.uid);
        self.nominated.remove(&pod.uid);
        if pod.has_affinity() {
            self.with_affinity.insert(pod.uid.clone());
        }
        match self.by_name.get(node) {
            Some(&at) => self.nodes[at].add(pod.clone()),
            None => {
                self.homeless.entry(node.to_owned()).or_default().insert(pod.uid.clone());
            }
        }
        self.placed.insert(pod.uid.clone(), Placed { pod, node: node.to_owned(), assumed });
    }

    /// Gives back a pod's room; returns the pod and whether it was only assumed.
    pub fn remove_pod(&mut self, uid: &str) -> Option<(Arc<Pod>, bool)> {
        let placed = self.placed.remove(uid)?;
        self.with_affinity.remove(uid);
        match self.by_name.get(&placed.node) {
            Some(&at) => self.nodes[at].remove(uid),
            None => {
                if let Some(pods) = self.homeless.get_mut(&placed.node) {
                    pods.remove(uid);
                    if pods.is_empty() {
                        self.homeless.remove(&placed.node);
                    }
                }
            }
        }
        Some((placed.pod, placed.assumed))
    }

    /// Gives back what was assumed, unless the API confirmed it meanwhile.
    pub fn forget(&mut self, uid: &str) -> bool {
        let assumed = self.placed.get(uid).is_some_and(|placed| placed.assumed);
        assumed && self.remove_pod(uid).is_some()
    }

    pub fn is_placed(&self, uid: &str) -> bool {
        self.placed.contains_key(uid)
    }

    pub fn placed_pod(&self, uid: &str) -> Option<&Arc<Pod>> {
        self.placed.get(uid).map(|placed| &placed.pod)
    }

    pub fn pods(&self) -> usize {
        self.placed.len()
    }

    pub fn assumed(&self) -> usize {
        self.placed.values().filter(|placed| placed.assumed).count()
    }

    /// Placed pods that have inter-pod affinity, with their nodes.
    pub fn with_affinity(&self) -> impl Iterator<Item = (&Arc<Pod>, &Node)> {
        self.with_affinity.iter().filter_map(|uid| {
            let placed = self.placed.get(uid)?;
            Some((&placed.pod, self.node(&placed.node)?))
        })
    }

    // === nominations ===

    pub fn nominate(&mut self, pod: Arc<Pod>, node: &str) {
        self.nominated.insert(pod.uid.clone(), (pod, node.to_owned()));
    }

    pub fn withdraw(&mut self, uid: &str) {
        self.nominated.remove(uid);
    }

    pub fn nominated_node(&self, uid: &str) -> Option<&str> {
        self.nominated.get(uid).map(|(_, node)| node.as_str())
    }

    pub fn has_nominations(&self) -> bool {
        !self.nominated.is_empty()
    }

    /// Pods that will get `node` once their victims are gone.
    pub fn nominated_to<'a>(&'a self, node: &'a str) -> impl Iterator<Item = &'a Arc<Pod>> {
        self.nominated.values().filter(move |(_, to)| to == node).map(|(pod, _)| pod)
    }

    // === other objects ===

    pub fn namespace_labels(&self, namespace: &str) -> &Labels {
        self.namespaces.get(namespace).unwrap_or(&NO_LABELS)
    }

    /// What selects pods of `namespace`; none takes it away.
    pub fn set_selector(&mut self, kind: SelectorKind, key: &Key, selector: Option<LabelSelector>) {
        let id = (kind as u8, key.name.clone());
        let of_namespace = self.selectors.entry(key.ns().to_owned()).or_default();
        match selector.filter(|selector| !selector.is_empty() && !selector.is_nothing()) {
            Some(selector) => {
                of_namespace.insert(id, selector);
            }
            None => {
                of_namespace.remove(&id);
                if of_namespace.is_empty() {
                    self.selectors.remove(key.ns());
                }
            }
        }
    }

    /// The pods that belong together with this one: selected by its services and by the workload that owns it.
    pub fn default_selector(&self, pod: &Pod) -> Option<LabelSelector> {
        let of_namespace = self.selectors.get(pod.key.ns())?;
        let services = of_namespace.range((SelectorKind::Service as u8, String::new())..(SelectorKind::Service as u8 + 1, String::new()));
        let services = services.map(|(_, selector)| selector).filter(|selector| crate::pod::selects(selector, pod.labels()));
        let owner = pod.view.metadata.owner_references.iter().flatten().find(|owner| owner.controller == Some(true));
        let kind = owner.and_then(|owner| match owner.kind.as_str() {
            "ReplicationController" => Some(SelectorKind::ReplicationController),
            "ReplicaSet" => Some(SelectorKind::ReplicaSet),
            "StatefulSet" => Some(SelectorKind::StatefulSet),
            _ => None,
        });
        let workload = kind.zip(owner).and_then(|(kind, owner)| of_namespace.get(&(kind as u8, owner.name.clone())));
        let requirements: Vec<_> = services.chain(workload).flat_map(|selector| selector.requirements().to_vec()).collect();
        (!requirements.is_empty()).then(|| LabelSelector::from_requirements(requirements))
    }
}
