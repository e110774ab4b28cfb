//! Small plugins that fill in or guard one field each.

use super::pods::{array_mut, items, object_mut, text};
use super::{AdmissionRequest, Operation, Plugin, pods};
use crate::cluster::{Cluster, Gr};
use async_trait::async_trait;
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::sync::Arc;
use windlass_api::quantity::{self, Quantity};
use windlass_api::{ApiError, meta};

const NOT_READY: &str = "node.kubernetes.io/not-ready";
const UNREACHABLE: &str = "node.kubernetes.io/unreachable";

/// A new node is not ready until its controller says so.
pub struct TaintNodesByCondition;

#[async_trait]
impl Plugin for TaintNodesByCondition {
    fn name(&self) -> &'static str {
        "TaintNodesByCondition"
    }
    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }
    async fn mutate(&self, request: &mut AdmissionRequest<'_>) -> Result<(), ApiError> {
        if !request.is_object("", "nodes") {
            return Ok(());
        }
        let Some(node) = request.object.as_mut() else { return Ok(()) };
        let tainted = items(&node["spec"], "taints")
            .any(|taint| text(taint, "key") == NOT_READY && text(taint, "effect") == "NoSchedule");
        if tainted || object_mut(node, "spec").is_none() {
            return Ok(());
        }
        if let Some(taints) = array_mut(&mut node["spec"], "taints") {
            taints.push(json!({"key": NOT_READY, "effect": "NoSchedule"}));
        }
        Ok(())
    }
}

/// Pods stay five minutes on a node that fails, unless they say otherwise.
pub struct DefaultTolerationSeconds;

#[async_trait]
impl Plugin for DefaultTolerationSeconds {
    fn name(&self) -> &'static str {
        "DefaultTolerationSeconds"
    }
    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }
    async fn mutate(&self, request: &mut AdmissionRequest<'_>) -> Result<(), ApiError> {
        if !request.is_object("", "pods") {
            return Ok(());
        }
        let Some(spec) = request.object.as_mut().and_then(|pod| pod.get_mut("spec")) else { return Ok(()) };
        for taint in [NOT_READY, UNREACHABLE] {
            let tolerated = items(spec, "tolerations").any(|toleration| {
                let (key, effect) = (text(toleration, "key"), text(toleration, "effect"));
                (key.is_empty() || key == taint) && (effect.is_empty() || effect == "NoExecute")
            });
            if tolerated {
                continue;
            }
            if let Some(tolerations) = array_mut(spec, "tolerations") {
                tolerations.push(
                    json!({"key": taint, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}),
                );
            }
        }
        Ok(())
    }
}

/// The newest class marked as default, by name among equals.
fn default_class(cluster: &dyn Cluster, kind: Gr, marks: &[&str]) -> Option<String> {
    let classes = cluster.cached_list(kind, None);
    let marked = |class: &&Arc<Value>| marks.iter().any(|mark| meta::annotation(class, mark) == Some("true"));
    let created = |class: &Value| meta::creation_timestamp(class).unwrap_or_default().to_owned();
    let newest = classes.iter().filter(marked).min_by_key(|class| (Reverse(created(class)), meta::name(class).to_owned()));
    newest.map(|class| meta::name(class).to_owned())
}

/// A claim without a class gets the default one.
pub struct DefaultStorageClass {
    pub cluster: Arc<dyn Cluster>,
}

#[async_trait]
impl Plugin for DefaultStorageClass {
    fn name(&self) -> &'static str {
        "DefaultStorageClass"
    }
    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }
    async fn mutate(&self, request: &mut AdmissionRequest<'_>) -> Result<(), ApiError> {
        if !request.is_object("", "persistentvolumeclaims") {
            return Ok(());
        }
        let Some(claim) = request.object.as_mut() else { return Ok(()) };
        let annotated = meta::annotation(claim, "volume.beta.kubernetes.io/storage-class").is_some();
        if annotated || !claim["spec"]["storageClassName"].is_null() || !claim["spec"].is_object() {
            return Ok(());
        }
        let marks = ["storageclass.kubernetes.io/is-default-class", "storageclass.beta.kubernetes.io/is-default-class"];
        if let Some(class) = default_class(self.cluster.as_ref(), Gr("storage.k8s.io", "storageclasses"), &marks) {
            claim["spec"]["storageClassName"] = class.into();
        }
        Ok(())
    }
}

/// An ingress without a class gets the default one.
pub struct DefaultIngressClass {
    pub cluster: Arc<dyn Cluster>,
}

#[async_trait]
impl Plugin for DefaultIngressClass {
    fn name(&self) -> &'static str {
        "DefaultIngressClass"
    }
    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }
    async fn mutate(&self, request: &mut AdmissionRequest<'_>) -> Result<(), ApiError> {
        if !request.is_object("networking.k8s.io", "ingresses") {
            return Ok(());
        }
        let Some(ingress) = request.object.as_mut() else { return Ok(()) };
        let annotated = meta::annotation(ingress, "kubernetes.io/ingress.class").is_some();
        if annotated || !ingress["spec"]["ingressClassName"].is_null() {
            return Ok(());
        }
        let marks = ["ingressclass.kubernetes.io/is-default-class"];
        let kind = Gr("networking.k8s.io", "ingressclasses");
        if let Some(class) = default_class(self.cluster.as_ref(), kind, &marks) {
            if let Some(spec) = object_mut(ingress, "spec") {
                spec.insert("ingressClassName".to_owned(), class.into());
            }
        }
        Ok(())
    }
}

/// Claims, volumes and attribute classes are kept while in use, by a finalizer that their controllers remove.
pub struct StorageObjectInUseProtection;

#[async_trait]
impl Plugin for StorageObjectInUseProtection {
    fn name(&self) -> &'static str {
        "StorageObjectInUseProtection"
    }
    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }
    async fn mutate(&self, request: &mut AdmissionRequest<'_>) -> Result<(), ApiError> {
        let finalizer = match (request.resource.group.as_str(), request.resource.plural.as_str(), request.subresource) {
            ("", "persistentvolumes", "") => "kubernetes.io/pv-protection",
            ("", "persistentvolumeclaims", "") => "kubernetes.io/pvc-protection",
            ("storage.k8s.io", "volumeattributesclasses", "") => "kubernetes.io/vac-protection",
            _ => return Ok(()),
        };
        let Some(object) = request.object.as_mut() else { return Ok(()) };
        if meta::finalizers(object).any(|known| known == finalizer) || object_mut(object, "metadata").is_none() {
            return Ok(());
        }
        if let Some(finalizers) = array_mut(&mut object["metadata"], "finalizers") {
            finalizers.push(finalizer.into());
        }
        Ok(())
    }
}

/// A claim grows only when it is bound and its class allows growth.
pub struct PersistentVolumeClaimResize {
    pub cluster: Arc<dyn Cluster>,
}

fn claim_class(claim: &Value) -> &str {
    let annotated = meta::annotation(claim, "volume.beta.kubernetes.io/storage-class");
    annotated.unwrap_or_else(|| text(&claim["spec"], "storageClassName"))
}

#[async_trait]
impl Plugin for PersistentVolumeClaimResize {
    fn name(&self) -> &'static str {
        "PersistentVolumeClaimResize"
    }
    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Update
    }
    async fn validate(&self, request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        let (true, Some(old)) = (request.is_object("", "persistentvolumeclaims"), request.old) else { return Ok(()) };
        let new = request.new_object();
        let size = |claim: &Value| {
            quantity::from_json(&claim["spec"]["resources"]["requests"]["storage"]).unwrap_or(Quantity::ZERO)
        };
        if size(new) <= size(old) {
            return Ok(());
        }
        if old["status"]["phase"] != "Bound" {
            return Err(request.forbidden("Only bound persistent volume claims can be expanded"));
        }
        let class = claim_class(new);
        let stored = self.cluster.cached(Gr("storage.k8s.io", "storageclasses"), "", class);
        let allows = stored.is_some_and(|class| class["allowVolumeExpansion"] == true);
        if class.is_empty() || class != claim_class(old) || !allows {
            return Err(request.forbidden(
                "only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support resize",
            ));
        }
        Ok(())
    }
}

/// A bound pod carries its node's zone and region (KEP-4742).
pub struct PodTopologyLabels {
    pub cluster: Arc<dyn Cluster>,
}

impl PodTopologyLabels {
    fn copy(&self, node: &str, object: &mut Value) {
        let Some(node) = self.cluster.cached(Gr("", "nodes"), "", node) else { return };
        for key in ["topology.kubernetes.io/zone", "topology.kubernetes.io/region"] {
            if let Some(value) = meta::label(&node, key) {
                meta::set_label(object, key, value);
            }
        }
    }
}

#[async_trait]
impl Plugin for PodTopologyLabels {
    fn name(&self) -> &'static str {
        "PodTopologyLabels"
    }
    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Create
    }
    async fn mutate(&self, request: &mut AdmissionRequest<'_>) -> Result<(), ApiError> {
        let binding = request.is_object("", "bindings") || (request.is("", "pods") && request.subresource == "binding");
        let pod = request.is_object("", "pods");
        let Some(object) = request.object.as_mut() else { return Ok(()) };
        if binding && object["target"]["kind"] == "Node" {
            let node = text(&object["target"], "name").to_owned();
            self.copy(&node, object);
        } else if pod && !text(&object["spec"], "nodeName").is_empty() {
            let node = text(&object["spec"], "nodeName").to_owned();
            self.copy(&node, object);
        }
        Ok(())
    }
}

/// A pod is resized only within what its node has.
pub struct PodResizeValidator {
    pub cluster: Arc<dyn Cluster>,
}

#[async_trait]
impl Plugin for PodResizeValidator {
    fn name(&self) -> &'static str {
        "PodResizeValidator"
    }
    fn handles(&self, operation: Operation) -> bool {
        operation == Operation::Update
    }
    async fn validate(&self, request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        if !request.is("", "pods") || request.subresource != "resize" {
            return Ok(());
        }
        let pod = request.new_object();
        let name = text(&pod["spec"], "nodeName");
        let unchanged = request.old.is_some_and(|old| old["spec"] == pod["spec"]);
        if name.is_empty() || unchanged {
            return Ok(());
        }
        let Some(node) = self.cluster.cached(Gr("", "nodes"), "", name) else {
            return Err(request.forbidden(format!("node {name:?} not found")));
        };
        let os = meta::label(&node, "kubernetes.io/os").unwrap_or("linux");
        if os != "linux" {
            let why = format!("pod resize is only supported on linux nodes, node {name:?} is {os:?}");
            return Err(request.forbidden(why).with_cause("UnsupportedPlatform", "", ""));
        }
        let mut requests = pods::total(&pod["spec"], "requests");
        pods::add(&mut requests, &pods::resources(&pod["spec"]["overhead"]));
        let allocatable = pods::resources(&node["status"]["allocatable"]);
        let of = |list: &pods::Resources, name: &str| list.get(name).copied().unwrap_or(Quantity::ZERO);
        let mut lacking = Vec::new();
        for (name, milli) in [("cpu", true), ("memory", false)] {
            let (wanted, there) = (of(&requests, name), of(&allocatable, name));
            if wanted > there {
                let shown = |amount: Quantity| if milli { amount.milli_value() } else { amount.value() };
                lacking.push(format!("{name}, requested: {}, allocatable: {}", shown(wanted), shown(there)));
            }
        }
        if lacking.is_empty() {
            return Ok(());
        }
        let why = format!("node didn't have enough allocatable resources: {}", lacking.join("; "));
        Err(request.forbidden(why).with_cause("NodeCapacity", "", ""))
    }
}
