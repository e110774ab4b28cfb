//! The Node authorizer: a kubelet reads what its own pods refer to, and nothing else.
//!
//! Upstream walks a general graph. Here each kind of reference is a counted map object → nodes, kept by watch-cache
//! callbacks, so that a decision is one or two lookups. Only volumes take a second step: pv → claim → node, secret → pv.

use super::rules::PolicyRule;
use super::{Attributes, Authorizer, Decision, Rules};
use crate::cluster::{Change, Cluster, Gr};
use crate::request::UserInfo;
use parking_lot::RwLock;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// The group of kubelets, and the prefix of their names.
pub const NODES_GROUP: &str = "system:nodes";
pub const NODE_PREFIX: &str = "system:node:";

/// `None`: not a node. `Some("")`: a member of the nodes' group whose name is not a node's.
pub fn node_identity(user: &UserInfo) -> Option<&str> {
    let in_group = user.groups.iter().any(|group| group == NODES_GROUP);
    user.name.strip_prefix(NODE_PREFIX).filter(|_| in_group)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Ref {
    Pod,
    Secret,
    ConfigMap,
    Claim,
    ServiceAccount,
    ResourceClaim,
    VolumeAttachment,
    ResourceSlice,
    CertificateRequest,
}

type Key = (Ref, String, String);

#[derive(Default)]
struct Graph {
    /// Which nodes may see an object, with the number of pods that are the reason.
    nodes: HashMap<Key, HashMap<String, u32>>,
    /// What each object (a pod, an attachment, ...) contributed, to be taken back.
    contributions: HashMap<Key, (String, BTreeSet<Key>)>,
    /// Volume → its claim and the secrets that the kubelet needs for it.
    volumes: HashMap<String, Volume>,
    /// Secret (namespace, name) → volumes.
    volume_secrets: HashMap<(String, String), BTreeSet<String>>,
}

#[derive(Clone, Debug)]
struct Volume {
    claim: (String, String),
    secrets: BTreeSet<(String, String)>,
}

impl Graph {
    fn replace(&mut self, owner: Key, node: &str, refs: BTreeSet<Key>) {
        self.remove(&owner);
        if node.is_empty() {
            return;
        }
        for key in &refs {
            *self.nodes.entry(key.clone()).or_default().entry(node.to_owned()).or_default() += 1;
        }
        self.contributions.insert(owner, (node.to_owned(), refs));
    }

    fn remove(&mut self, owner: &Key) {
        let Some((node, refs)) = self.contributions.remove(owner) else { return };
        for key in refs {
            if let Some(nodes) = self.nodes.get_mut(&key) {
                if let Some(count) = nodes.get_mut(&node) {
                    *count -= 1;
                    if *count == 0 {
                        nodes.remove(&node);
                    }
                }
                if nodes.is_empty() {
                    self.nodes.remove(&key);
                }
            }
        }
    }

    fn set_volume(&mut self, name: &str, volume: Option<Volume>) {
        if let Some(old) = self.volumes.remove(name) {
            for secret in old.secrets {
                if let Some(volumes) = self.volume_secrets.get_mut(&secret) {
                    volumes.remove(name);
                    if volumes.is_empty() {
                        self.volume_secrets.remove(&secret);
                    }
                }
            }
        }
        if let Some(volume) = volume {
            for secret in &volume.secrets {
                self.volume_secrets.entry(secret.clone()).or_default().insert(name.to_owned());
            }
            self.volumes.insert(name.to_owned(), volume);
        }
    }

    fn sees(&self, node: &str, kind: Ref, namespace: &str, name: &str) -> bool {
        let key = (kind, namespace.to_owned(), name.to_owned());
        self.nodes.get(&key).is_some_and(|nodes| nodes.contains_key(node))
    }

    fn sees_volume(&self, node: &str, name: &str) -> bool {
        let claim = self.volumes.get(name).map(|volume| &volume.claim);
        claim.is_some_and(|(namespace, name)| self.sees(node, Ref::Claim, namespace, name))
    }

    fn sees_secret(&self, node: &str, namespace: &str, name: &str) -> bool {
        if self.sees(node, Ref::Secret, namespace, name) {
            return true;
        }
        let volumes = self.volume_secrets.get(&(namespace.to_owned(), name.to_owned()));
        volumes.is_some_and(|volumes| volumes.iter().any(|volume| self.sees_volume(node, volume)))
    }
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Meta {
    name: String,
    namespace: String,
    annotations: Option<serde_json::Map<String, Value>>,
}

/// Just enough of any object here: its names, and its spec as a value (parsed, used, dropped).
#[derive(Deserialize, Default)]
#[serde(default)]
struct Slim {
    metadata: Meta,
    spec: Value,
    status: StatusSlim,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct StatusSlim {
    resource_claim_statuses: Option<Vec<Value>>,
    extended_resource_claim_status: Option<Value>,
}

/// Whether an update left alone all that relates nodes to objects, found out without building values.
fn unchanged(change: &Change<'_>) -> bool {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Status<'a> {
        #[serde(borrow)]
        resource_claim_statuses: Option<&'a RawValue>,
        #[serde(borrow)]
        extended_resource_claim_status: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Parts<'a> {
        #[serde(borrow)]
        spec: Option<&'a RawValue>,
        #[serde(borrow)]
        status: Option<Status<'a>>,
    }
    let (Some(old), Some(new)) = (change.old, change.new) else { return false };
    let (Ok(old), Ok(new)) = (serde_json::from_slice::<Parts<'_>>(old), serde_json::from_slice::<Parts<'_>>(new)) else {
        return false;
    };
    let text = |raw: Option<&RawValue>| raw.map(RawValue::get).unwrap_or_default().to_owned();
    let claims = |status: &Option<Status<'_>>| {
        status.as_ref().map(|status| (text(status.resource_claim_statuses), text(status.extended_resource_claim_status)))
    };
    old.spec.map(RawValue::get) == new.spec.map(RawValue::get)
        && claims(&old.status).unwrap_or_default() == claims(&new.status).unwrap_or_default()
}

fn parse(bytes: &[u8]) -> Option<Slim> {
    serde_json::from_slice(bytes).map_err(|error| tracing::error!(%error, "node authorizer: unreadable object")).ok()
}

fn items<'a>(value: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> {
    value[field].as_array().map(Vec::as_slice).unwrap_or_default().iter()
}

/// Everything that a pod on a node lets that node see.
fn pod_refs(pod: &Slim) -> BTreeSet<Key> {
    let namespace = &pod.metadata.namespace;
    let mut refs = BTreeSet::new();
    let mut add = |kind: Ref, name: &Value| {
        if let Some(name) = name.as_str().filter(|name| !name.is_empty()) {
            refs.insert((kind, namespace.clone(), name.to_owned()));
        }
    };
    add(Ref::Pod, &Value::String(pod.metadata.name.clone()));
    let mirror = pod.metadata.annotations.as_ref().is_some_and(|map| map.contains_key("kubernetes.io/config.mirror"));
    if mirror {
        return refs;
    }
    let spec = &pod.spec;
    add(Ref::ServiceAccount, &spec["serviceAccountName"]);
    items(spec, "imagePullSecrets").for_each(|secret| add(Ref::Secret, &secret["name"]));
    for list in ["initContainers", "containers", "ephemeralContainers"] {
        for container in items(spec, list) {
            for source in items(container, "envFrom") {
                add(Ref::Secret, &source["secretRef"]["name"]);
                add(Ref::ConfigMap, &source["configMapRef"]["name"]);
            }
            for var in items(container, "env") {
                add(Ref::Secret, &var["valueFrom"]["secretKeyRef"]["name"]);
                add(Ref::ConfigMap, &var["valueFrom"]["configMapKeyRef"]["name"]);
            }
        }
    }
    for volume in items(spec, "volumes") {
        add(Ref::Secret, &volume["secret"]["secretName"]);
        add(Ref::Secret, &volume["azureFile"]["secretName"]);
        add(Ref::ConfigMap, &volume["configMap"]["name"]);
        for source in ["cephfs", "cinder", "flexVolume", "rbd", "scaleIO", "iscsi", "storageos"] {
            add(Ref::Secret, &volume[source]["secretRef"]["name"]);
        }
        add(Ref::Secret, &volume["csi"]["nodePublishSecretRef"]["name"]);
        for source in items(&volume["projected"], "sources") {
            add(Ref::Secret, &source["secret"]["name"]);
            add(Ref::ConfigMap, &source["configMap"]["name"]);
        }
        add(Ref::Claim, &volume["persistentVolumeClaim"]["claimName"]);
        if let (true, Some(name)) = (volume["ephemeral"].is_object(), volume["name"].as_str()) {
            add(Ref::Claim, &Value::String(format!("{}-{name}", pod.metadata.name)));
        }
    }
    items(spec, "resourceClaims").for_each(|claim| add(Ref::ResourceClaim, &claim["resourceClaimName"]));
    for status in pod.status.resource_claim_statuses.iter().flatten() {
        add(Ref::ResourceClaim, &status["resourceClaimName"]);
    }
    if let Some(status) = &pod.status.extended_resource_claim_status {
        add(Ref::ResourceClaim, &status["resourceClaimName"]);
    }
    refs
}

/// A bound volume's claim, and the secrets that a kubelet reads to mount it.
fn volume_refs(spec: &Value) -> Option<Volume> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let claim = &spec["claimRef"];
    if !claim.is_object() {
        return None;
    }
    let claim = (text(&claim["namespace"]), text(&claim["name"]));
    let mut secrets = BTreeSet::new();
    let mut add = |namespace: &Value, name: &Value| {
        let namespace = namespace.as_str().filter(|ns| !ns.is_empty()).unwrap_or(&claim.0);
        if let Some(name) = name.as_str().filter(|name| !name.is_empty()) {
            secrets.insert((namespace.to_owned(), name.to_owned()));
        }
    };
    add(&spec["azureFile"]["secretNamespace"], &spec["azureFile"]["secretName"]);
    for source in ["cephfs", "cinder", "flexVolume", "rbd", "scaleIO", "iscsi", "storageos"] {
        let secret = &spec[source]["secretRef"];
        add(&secret["namespace"], &secret["name"]);
    }
    for field in ["nodePublishSecretRef", "nodeStageSecretRef", "nodeExpandSecretRef"] {
        let secret = &spec["csi"][field];
        add(&secret["namespace"], &secret["name"]);
    }
    Some(Volume { claim, secrets })
}

/// The Node authorizer (upstream's `plugin/pkg/auth/authorizer/node`).
pub struct Node {
    graph: RwLock<Graph>,
    /// What every node may do regardless of its pods.
    rules: Vec<PolicyRule>,
}

impl Node {
    /// Starts following the objects that relate nodes to others. `rules` are those of the role `system:node`.
    pub fn start(cluster: &dyn Cluster, rules: Vec<PolicyRule>) -> Arc<Node> {
        let node = Arc::new(Node { graph: RwLock::default(), rules });
        let follow = |kind: Gr, apply: fn(&mut Graph, &Slim, bool)| {
            let node = node.clone();
            let callback = move |change: &Change<'_>| {
                if unchanged(change) {
                    return;
                }
                let present = change.new.is_some();
                if let Some(object) = change.new.or(change.old).and_then(parse) {
                    apply(&mut node.graph.write(), &object, present);
                }
            };
            cluster.on_change(kind, Arc::new(callback));
        };
        follow(Gr("", "pods"), |graph, pod, present| {
            let owner = (Ref::Pod, pod.metadata.namespace.clone(), pod.metadata.name.clone());
            let node = pod.spec["nodeName"].as_str().filter(|_| present).unwrap_or_default();
            let refs = if node.is_empty() { BTreeSet::new() } else { pod_refs(pod) };
            graph.replace(owner, node, refs);
        });
        follow(Gr("", "persistentvolumes"), |graph, volume, present| {
            let refs = if present { volume_refs(&volume.spec) } else { None };
            graph.set_volume(&volume.metadata.name, refs);
        });
        follow(Gr("storage.k8s.io", "volumeattachments"), |graph, object, present| {
            own(graph, Ref::VolumeAttachment, object, present);
        });
        follow(Gr("resource.k8s.io", "resourceslices"), |graph, object, present| {
            own(graph, Ref::ResourceSlice, object, present);
        });
        follow(Gr("certificates.k8s.io", "podcertificaterequests"), |graph, object, present| {
            own(graph, Ref::CertificateRequest, object, present);
        });
        node
    }

    fn related(&self, node: &str, kind: Ref, request: &Attributes<'_>) -> Decision {
        if request.name.is_empty() {
            return no("No Object name found");
        }
        let graph = self.graph.read();
        let found = match kind {
            Ref::Secret => graph.sees_secret(node, request.namespace, request.name),
            _ => graph.sees(node, kind, request.namespace, request.name),
        };
        unrelated_unless(found, node)
    }

    fn get(&self, node: &str, kind: Ref, request: &Attributes<'_>) -> Decision {
        match (request.verb, request.subresource) {
            ("get", "") => self.related(node, kind, request),
            ("get", _) => no("cannot get subresource"),
            _ => no("can only get individual resources of this type"),
        }
    }

    fn read_namespaced(&self, node: &str, kind: Ref, request: &Attributes<'_>) -> Decision {
        match (request.verb, request.subresource, request.namespace) {
            ("get" | "list" | "watch", "", "") => no("can only read namespaced object of this type"),
            ("get" | "list" | "watch", "", _) => self.related(node, kind, request),
            ("get" | "list" | "watch", _, _) => no("cannot read subresource"),
            _ => no("can only read resources of this type"),
        }
    }

    fn volume(&self, node: &str, request: &Attributes<'_>) -> Decision {
        match (request.verb, request.subresource, request.name) {
            ("get", "", "") => no("No Object name found"),
            ("get", "", name) => unrelated_unless(self.graph.read().sees_volume(node, name), node),
            ("get", _, _) => no("cannot get subresource"),
            _ => no("can only get individual resources of this type"),
        }
    }

    fn claim(&self, node: &str, request: &Attributes<'_>) -> Decision {
        match (request.subresource, request.verb) {
            ("status", "update" | "patch") => self.related(node, Ref::Claim, request),
            ("status", _) => no("can only get/update/patch this type"),
            _ => self.get(node, Ref::Claim, request),
        }
    }

    fn service_account(&self, node: &str, request: &Attributes<'_>) -> Decision {
        match (request.verb, request.subresource) {
            ("get", "") => self.read_namespaced(node, Ref::ServiceAccount, request),
            ("create", "token") if !request.name.is_empty() => self.related(node, Ref::ServiceAccount, request),
            ("create", _) if !request.name.is_empty() => no("can only create token subresource of serviceaccount"),
            _ => no("can only create tokens for individual service accounts"),
        }
    }

    fn pod(&self, node: &str, request: &Attributes<'_>) -> Decision {
        match (request.subresource, request.verb) {
            ("", "get") => self.get(node, Ref::Pod, request),
            ("", "list" | "watch") if selects(request, "spec.nodeName", node) => yes(),
            ("", "list" | "watch") if !request.name.is_empty() => self.related(node, Ref::Pod, request),
            ("", "list" | "watch") => no("can only list/watch pods with spec.nodeName field selector"),
            // NodeRestriction limits these to mirror pods, and to pods bound to the node.
            ("", "create" | "delete") | ("status", "update" | "patch") | ("eviction", "create") => yes(),
            _ => no(""),
        }
    }

    fn slice(&self, node: &str, request: &Attributes<'_>) -> Decision {
        match (request.subresource, request.verb) {
            ("", "create") => yes(),
            ("", "get" | "update" | "patch" | "delete") => self.related(node, Ref::ResourceSlice, request),
            ("", "list" | "watch" | "deletecollection") if selects(request, "spec.nodeName", node) => yes(),
            ("", "list" | "watch" | "deletecollection") => {
                no("can only list/watch/deletecollection resourceslices with nodeName field selector")
            }
            ("", _) => no(
                "only the following verbs are allowed for a ResourceSlice: get, watch, list, create, update, patch, delete, deletecollection",
            ),
            _ => no("cannot authorize ResourceSlice subresources"),
        }
    }

    fn certificate_request(&self, node: &str, request: &Attributes<'_>) -> Decision {
        match (request.subresource, request.verb) {
            ("", "create") => yes(),
            ("", "get") => self.related(node, Ref::CertificateRequest, request),
            ("", "list" | "watch") if selects(request, "spec.nodeName", node) => yes(),
            ("", "list" | "watch") => no("can only list/watch podcertificaterequests with nodeName field selector"),
            ("", verb) => no(&format!("nodes may not {verb} podcertificaterequests")),
            _ => no("nodes may not access the status subresource of PodCertificateRequests"),
        }
    }
}

fn own(graph: &mut Graph, kind: Ref, object: &Slim, present: bool) {
    let key = (kind, object.metadata.namespace.clone(), object.metadata.name.clone());
    let node = object.spec["nodeName"].as_str().filter(|_| present).unwrap_or_default();
    graph.replace(key.clone(), node, BTreeSet::from([key]));
}

fn yes() -> Decision {
    Decision::Allow(String::new())
}

fn no(reason: &str) -> Decision {
    Decision::NoOpinion(reason.to_owned())
}

fn unrelated_unless(found: bool, node: &str) -> Decision {
    match found {
        true => yes(),
        false => no(&format!("no relationship found between node '{node}' and this object")),
    }
}

fn selects(request: &Attributes<'_>, path: &str, value: &str) -> bool {
    request.fields.iter().any(|(field, wanted)| field == path && wanted == value)
}

fn lease(node: &str, request: &Attributes<'_>) -> Decision {
    match request.verb {
        "get" | "create" | "update" | "patch" | "delete" => {}
        _ => return no("can only get, create, update, patch, or delete a node lease"),
    }
    if request.namespace != "kube-node-lease" {
        return no("can only access leases in the \"kube-node-lease\" system namespace");
    }
    // On create the name is in the body: NodeRestriction looks at it there.
    if request.verb != "create" && request.name != node {
        return no("can only access node lease with the same name as the requesting node");
    }
    yes()
}

fn csi_node(node: &str, request: &Attributes<'_>) -> Decision {
    match (request.subresource, request.verb) {
        ("", "get" | "create" | "update" | "patch" | "delete") => {}
        ("", _) => return no("can only get, create, update, patch, or delete a CSINode"),
        _ => return no("cannot authorize CSINode subresources"),
    }
    if request.verb != "create" && request.name != node {
        return no("can only access CSINode with the same name as the requesting node");
    }
    yes()
}

fn own_node(node: &str, request: &Attributes<'_>) -> Decision {
    match (request.subresource, request.verb) {
        ("", "create" | "update" | "patch") | ("status", "update" | "patch") => yes(),
        ("", "get" | "list" | "watch") if request.name == node => yes(),
        ("", "get" | "list" | "watch") if request.name.is_empty() => {
            no(&format!("node '{node}' cannot read all nodes, only its own Node object"))
        }
        ("", "get" | "list" | "watch") => {
            no(&format!("node '{node}' cannot read '{}', only its own Node object", request.name))
        }
        _ => no(""),
    }
}

impl Authorizer for Node {
    fn authorize(&self, request: &Attributes<'_>) -> Decision {
        let Some(node) = node_identity(request.user) else { return no("") };
        if node.is_empty() {
            return no(&format!("unknown node for user {:?}", request.user.name));
        }
        if request.is_resource {
            match (request.group, request.resource) {
                ("", "secrets") => return self.read_namespaced(node, Ref::Secret, request),
                ("", "configmaps") => return self.read_namespaced(node, Ref::ConfigMap, request),
                ("", "persistentvolumeclaims") => return self.claim(node, request),
                ("", "persistentvolumes") => return self.volume(node, request),
                ("resource.k8s.io", "resourceclaims") => return self.get(node, Ref::ResourceClaim, request),
                ("storage.k8s.io", "volumeattachments") => return self.get(node, Ref::VolumeAttachment, request),
                ("", "serviceaccounts") => return self.service_account(node, request),
                ("coordination.k8s.io", "leases") => return lease(node, request),
                ("storage.k8s.io", "csinodes") => return csi_node(node, request),
                ("resource.k8s.io", "resourceslices") => return self.slice(node, request),
                ("", "nodes") => return own_node(node, request),
                ("", "pods") => return self.pod(node, request),
                ("certificates.k8s.io", "podcertificaterequests") => return self.certificate_request(node, request),
                _ => {}
            }
        }
        match self.rules.iter().any(|rule| rule.allows(request)) {
            true => yes(),
            false => no(""),
        }
    }

    fn rules_for(&self, user: &UserInfo, _namespace: &str) -> Rules {
        match node_identity(user) {
            None => Rules::default(),
            Some(_) => Rules {
                rules: Vec::new(),
                incomplete: true,
                evaluation_error: Some("node authorizer does not support user rule resolution".to_owned()),
            },
        }
    }
}
