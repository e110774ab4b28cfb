//! NodeRestriction: a kubelet writes its own node, its own pods' status, and tokens for its own pods.

use super::pods::{items, text};
use super::{AdmissionRequest, Operation, Plugin, pods};
use crate::authz::node::node_identity;
use crate::authz::{Attributes, Authorizer};
use crate::cluster::{Cluster, Gr};
use async_trait::async_trait;
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::Arc;
use windlass_api::{ApiError, meta};

pub struct NodeRestriction {
    pub cluster: Arc<dyn Cluster>,
    pub authorizer: Arc<dyn Authorizer>,
}

type Verdict = Result<(), ApiError>;

const KUBELET_LABELS: [&str; 11] = [
    "kubernetes.io/hostname",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
    "beta.kubernetes.io/instance-type",
    "node.kubernetes.io/instance-type",
    "kubernetes.io/os",
    "kubernetes.io/arch",
    "beta.kubernetes.io/os",
    "beta.kubernetes.io/arch",
];

fn in_domain(label_namespace: &str, domain: &str) -> bool {
    label_namespace == domain || label_namespace.strip_suffix(domain).is_some_and(|rest| rest.ends_with('.'))
}

/// Whether a kubelet may not set, change or remove this label on its node.
fn forbidden_label(key: &str) -> bool {
    let namespace = key.split_once('/').map(|(namespace, _)| namespace).unwrap_or_default();
    let kubernetes = in_domain(namespace, "kubernetes.io") || in_domain(namespace, "k8s.io");
    let own = KUBELET_LABELS.contains(&key)
        || in_domain(namespace, "kubelet.kubernetes.io")
        || in_domain(namespace, "node.kubernetes.io");
    in_domain(namespace, "node-restriction.kubernetes.io") || (kubernetes && !own)
}

/// Keys whose values differ between two label maps, and which a kubelet may not touch.
fn forbidden_changes(new: &Value, old: &Value) -> Vec<String> {
    let keys = |labels: &Value| labels.as_object().map(|map| map.keys().cloned().collect()).unwrap_or_default();
    let mut all: BTreeSet<String> = keys(new);
    all.extend::<BTreeSet<String>>(keys(old));
    all.into_iter().filter(|key| new.get(key) != old.get(key) && forbidden_label(key)).collect()
}

impl NodeRestriction {
    fn pod_on_node(&self, request: &AdmissionRequest<'_>, name: &str) -> Result<Arc<Value>, ApiError> {
        let pod = self.cluster.cached(Gr("", "pods"), request.namespace, name);
        pod.ok_or_else(|| ApiError::not_found("", "pods", name))
    }

    fn pod(&self, node: &str, request: &AdmissionRequest<'_>) -> Verdict {
        match request.operation {
            Operation::Create => self.create_pod(node, request),
            Operation::Delete => {
                let pod = self.pod_on_node(request, request.name)?;
                if text(&pod["spec"], "nodeName") != node {
                    let why = format!("node {node:?} can only delete pods with spec.nodeName set to itself");
                    return Err(request.forbidden(why));
                }
                Ok(())
            }
            operation => Err(request.forbidden(format!(
                "unexpected operation {:?}, node {node:?} can only create and delete mirror pods",
                operation.as_str()
            ))),
        }
    }

    fn create_pod(&self, node: &str, request: &AdmissionRequest<'_>) -> Verdict {
        let pod = request.new_object();
        let refuse = |why: String| Err(request.forbidden(why));
        if !pods::is_mirror(pod) {
            let mark = pods::MIRROR_ANNOTATION;
            return refuse(format!("pod does not have {mark:?} annotation, node {node:?} can only create mirror pods"));
        }
        if text(&pod["spec"], "nodeName") != node {
            return refuse(format!("node {node:?} can only create pods with spec.nodeName set to itself"));
        }
        let owners: Vec<&Value> = items(&pod["metadata"], "ownerReferences").collect();
        let [owner] = owners.as_slice() else {
            let which = if owners.is_empty() { "an owner reference" } else { "a single owner reference" };
            return refuse(format!("node {node:?} can only create pods with {which} set to itself"));
        };
        let names = (text(owner, "apiVersion"), text(owner, "kind"), text(owner, "name"));
        if names != ("v1", "Node", node) {
            return refuse(format!("node {node:?} can only create pods with an owner reference set to itself"));
        }
        if owner["controller"] != true {
            let why = format!("node {node:?} can only create pods with a controller owner reference set to itself");
            return refuse(why);
        }
        if owner["blockOwnerDeletion"] == true {
            return refuse(format!("node {node:?} must not set blockOwnerDeletion on an owner reference"));
        }
        let Some(own) = self.cluster.cached(Gr("", "nodes"), "", node) else {
            return Err(ApiError::not_found("", "nodes", node));
        };
        let (expected, got) = (text(owner, "uid"), text(&own["metadata"], "uid"));
        if expected != got {
            return refuse(format!("node {node} UID mismatch: expected {expected} got {got}"));
        }
        match api_reference(&pod["spec"]) {
            Some(what) => refuse(format!("node {node:?} can not create pods that reference {what}")),
            None => Ok(()),
        }
    }

    fn pod_status(&self, node: &str, request: &AdmissionRequest<'_>) -> Verdict {
        if request.operation != Operation::Update {
            return Err(request.forbidden(format!("unexpected operation {:?}", request.operation.as_str())));
        }
        let (new, old) = (request.new_object(), request.old.unwrap_or(&Value::Null));
        if text(&old["spec"], "nodeName") != node {
            let why = format!("node {node:?} can only update pod status for pods with spec.nodeName set to itself");
            return Err(request.forbidden(why));
        }
        if !same(&new["metadata"]["labels"], &old["metadata"]["labels"]) {
            return Err(request.forbidden(format!("node {node:?} cannot update labels through pod status")));
        }
        let guarded = [
            ("resourceClaimStatuses", "resource claim statues"),
            ("extendedResourceClaimStatus", "extended resource claim status"),
            ("nodeAllocatableResourceClaimStatuses", "node allocatable resource claim statuses"),
        ];
        for (field, called) in guarded {
            if !same(&new["status"][field], &old["status"][field]) {
                return Err(request.forbidden(format!("node {node:?} cannot update {called}")));
            }
        }
        Ok(())
    }

    fn eviction(&self, node: &str, request: &AdmissionRequest<'_>) -> Verdict {
        if request.operation != Operation::Create {
            return Err(request.forbidden(format!("unexpected operation {}", request.operation.as_str())));
        }
        let name = match request.name {
            "" => text(&request.new_object()["metadata"], "name"),
            name => name,
        };
        if name.is_empty() {
            return Err(request.forbidden("could not determine pod from request data"));
        }
        if text(&self.pod_on_node(request, name)?["spec"], "nodeName") != node {
            let why = format!("node {node} can only evict pods with spec.nodeName set to itself");
            return Err(request.forbidden(why));
        }
        Ok(())
    }

    fn node(&self, node: &str, request: &AdmissionRequest<'_>) -> Verdict {
        let new = request.new_object();
        let name = match request.name {
            "" => text(&new["metadata"], "name"),
            name => name,
        };
        let refuse = |why: String| Err(request.forbidden(why));
        if name != node {
            return refuse(format!("node {node:?} is not allowed to modify node {name:?}"));
        }
        let source = &new["spec"]["configSource"];
        match (request.operation, request.old) {
            (Operation::Create, _) => {
                if !source.is_null() {
                    return refuse(format!("node {node:?} is not allowed to create pods with a non-nil configSource"));
                }
                let forbidden = forbidden_changes(&new["metadata"]["labels"], &Value::Null);
                if !forbidden.is_empty() {
                    let labels = forbidden.join(", ");
                    return refuse(format!("node {node:?} is not allowed to set the following labels: {labels}"));
                }
            }
            (Operation::Update, Some(old)) => {
                if !source.is_null() && source != &old["spec"]["configSource"] {
                    let why = format!("node {node:?} is not allowed to update configSource to a new non-nil configSource");
                    return refuse(why);
                }
                if !same(&new["spec"]["taints"], &old["spec"]["taints"]) {
                    return refuse(format!("node {node:?} is not allowed to modify taints"));
                }
                if !same(&new["metadata"]["ownerReferences"], &old["metadata"]["ownerReferences"]) {
                    return refuse(format!("node {node:?} is not allowed to modify ownerReferences"));
                }
                let forbidden = forbidden_changes(&new["metadata"]["labels"], &old["metadata"]["labels"]);
                if !forbidden.is_empty() {
                    return refuse(format!("is not allowed to modify labels: {}", forbidden.join(", ")));
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn claim_status(&self, node: &str, request: &AdmissionRequest<'_>) -> Verdict {
        if request.operation != Operation::Update {
            return Err(request.forbidden(format!("unexpected operation {:?}", request.operation.as_str())));
        }
        let strip = |claim: &Value| {
            let mut claim = claim.clone();
            if let Some(status) = claim.get_mut("status").and_then(Value::as_object_mut) {
                for field in ["capacity", "conditions", "allocatedResources", "allocatedResourceStatuses"] {
                    status.remove(field);
                }
            }
            if let Some(meta) = claim.get_mut("metadata").and_then(Value::as_object_mut) {
                meta.remove("resourceVersion");
                meta.remove("managedFields");
            }
            claim
        };
        if strip(request.new_object()) != strip(request.old.unwrap_or(&Value::Null)) {
            return Err(request.forbidden(format!(
                "node {node:?} is not allowed to update fields other than status.quantity and status.conditions"
            )));
        }
        Ok(())
    }

    fn token(&self, node: &str, request: &AdmissionRequest<'_>) -> Verdict {
        if request.operation != Operation::Create || request.subresource != "token" {
            return Ok(());
        }
        let spec = &request.new_object()["spec"];
        let bound = &spec["boundObjectRef"];
        let (name, uid) = (text(bound, "name"), text(bound, "uid"));
        if text(bound, "apiVersion") != "v1" || text(bound, "kind") != "Pod" || name.is_empty() {
            return Err(request.forbidden("node requested token not bound to a pod"));
        }
        if uid.is_empty() {
            return Err(request.forbidden("node requested token with a pod binding without a uid"));
        }
        let pod = self.pod_on_node(request, name)?;
        if uid != text(&pod["metadata"], "uid") {
            return Err(request.forbidden(format!(
                "the UID in the bound object reference ({uid}) does not match the UID in record. The object might have been deleted and then recreated"
            )));
        }
        if text(&pod["spec"], "nodeName") != node {
            return Err(request.forbidden("node requested token bound to a pod scheduled on a different node"));
        }
        self.audience(request, &pod, spec)
    }

    /// The audience must be one that the pod's volumes ask for, or one granted by RBAC.
    fn audience(&self, request: &AdmissionRequest<'_>, pod: &Value, spec: &Value) -> Verdict {
        let audiences: Vec<&str> = items(spec, "audiences").filter_map(Value::as_str).collect();
        let audience = match audiences.as_slice() {
            [] => "",
            [one] => one,
            _ => return Err(request.forbidden("node may only request 0 or 1 audiences")),
        };
        let pod_spec = &pod["spec"];
        let mut sources = items(pod_spec, "volumes").flat_map(|volume| items(&volume["projected"], "sources"));
        let projected = |source: &Value| {
            source["serviceAccountToken"].is_object() && text(&source["serviceAccountToken"], "audience") == audience
        };
        if sources.any(projected) {
            return Ok(());
        }
        let drivers = items(pod_spec, "volumes").filter_map(|volume| self.csi_driver(request.namespace, pod, volume));
        for driver in drivers {
            let Some(driver) = self.cluster.cached(Gr("storage.k8s.io", "csidrivers"), "", &driver) else { continue };
            if items(&driver["spec"], "tokenRequests").any(|wanted| text(wanted, "audience") == audience) {
                return Ok(());
            }
        }
        let attributes = Attributes {
            namespace: request.namespace,
            name: request.name,
            ..Attributes::resource(request.user, "request-serviceaccounts-token-audience", "", audience)
        };
        if self.authorizer.authorize(&attributes).is_allowed() {
            return Ok(());
        }
        let user = &request.user.name;
        Err(request.forbidden(format!("{user} is not authorized to request tokens for audience {audience:?}")))
    }

    fn csi_driver(&self, namespace: &str, pod: &Value, volume: &Value) -> Option<String> {
        if volume["csi"].is_object() {
            return Some(text(&volume["csi"], "driver").to_owned());
        }
        let claim = match volume["ephemeral"].is_object() {
            true => format!("{}-{}", text(&pod["metadata"], "name"), text(volume, "name")),
            false => volume["persistentVolumeClaim"]["claimName"].as_str()?.to_owned(),
        };
        let claim = self.cluster.cached(Gr("", "persistentvolumeclaims"), namespace, &claim)?;
        let volume = self.cluster.cached(Gr("", "persistentvolumes"), "", text(&claim["spec"], "volumeName"))?;
        Some(volume["spec"]["csi"]["driver"].as_str()?.to_owned())
    }

    fn certificate_request(&self, node: &str, request: &AdmissionRequest<'_>) -> Verdict {
        let refuse = |why: String| Err(request.forbidden(why));
        if request.operation != Operation::Create {
            return refuse(format!("unexpected operation {}", request.operation.as_str()));
        }
        if !request.subresource.is_empty() {
            return refuse(format!("unexpected subresource {}", request.subresource));
        }
        let spec = &request.new_object()["spec"];
        let named = text(spec, "nodeName");
        if named != node {
            let why = "which is not the requesting node";
            return refuse(format!("PodCertificateRequest.Spec.NodeName={named:?}, {why} {node:?}"));
        }
        let lookups = [
            (Gr("", "nodes"), "", named, text(spec, "nodeUID"), "node"),
            (Gr("", "pods"), request.namespace, text(spec, "podName"), text(spec, "podUID"), "pod"),
            (
                Gr("", "serviceaccounts"),
                request.namespace,
                text(spec, "serviceAccountName"),
                text(spec, "serviceAccountUID"),
                "service account",
            ),
        ];
        for (kind, namespace, name, uid, called) in lookups {
            let Some(object) = self.cluster.cached(kind, namespace, name) else {
                return Err(ApiError::not_found(kind.0, kind.1, name));
            };
            if text(&object["metadata"], "uid") != uid {
                return refuse(format!("PodCertificateRequest names {called} {name:?} with UID {uid:?}, which is not the running one"));
            }
            if called == "pod" {
                if text(&object["spec"], "nodeName") != node {
                    return refuse(format!("pod {name:?} is not running on node {node:?}"));
                }
                if pods::is_mirror(&object) {
                    return refuse(format!("pod {name:?} is a mirror pod"));
                }
                if text(&object["spec"], "serviceAccountName") != text(spec, "serviceAccountName") {
                    return refuse(format!("pod {name:?} does not run as the named service account"));
                }
            }
        }
        Ok(())
    }
}

/// Equal, where absent, null and empty are the same.
fn same(a: &Value, b: &Value) -> bool {
    let empty = |value: &Value| match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    };
    a == b || (empty(a) && empty(b))
}

/// The kind of API object that a mirror pod's spec would need, if any.
fn api_reference(spec: &Value) -> Option<&'static str> {
    if !text(spec, "serviceAccountName").is_empty() {
        return Some("serviceaccounts");
    }
    if !pods::secret_names(spec).is_empty() {
        return Some("secrets");
    }
    if !pods::config_map_names(spec).is_empty() {
        return Some("configmaps");
    }
    if items(spec, "resourceClaims").len() > 0 {
        return Some("resourceclaims");
    }
    let by_volume = [
        ("configMap", "configmaps (via configmap volumes)"),
        ("secret", "secrets (via secret volumes)"),
        ("csi", "csidrivers (via CSI volumes)"),
        ("glusterfs", "endpoints (via glusterFS volumes)"),
        ("persistentVolumeClaim", "persistentvolumeclaims"),
        ("ephemeral", "persistentvolumeclaims (via ephemeral volumes)"),
        ("azureFile", "secrets (via azureFile volumes)"),
    ];
    let by_source = [
        ("configMap", "configmaps (via projected volumes)"),
        ("secret", "secrets (via projected volumes)"),
        ("serviceAccountToken", "serviceaccounts (via projected volumes)"),
        ("clusterTrustBundle", "clustertrustbundles"),
        ("podCertificate", "podcertificates"),
    ];
    for volume in items(spec, "volumes") {
        if let Some((_, what)) = by_volume.iter().find(|(field, _)| volume[field].is_object()) {
            return Some(what);
        }
        for source in items(&volume["projected"], "sources") {
            if let Some((_, what)) = by_source.iter().find(|(field, _)| source[field].is_object()) {
                return Some(what);
            }
        }
    }
    None
}

fn lease(node: &str, request: &AdmissionRequest<'_>) -> Verdict {
    if request.namespace != "kube-node-lease" {
        return Err(request.forbidden("can only access leases in the \"kube-node-lease\" system namespace"));
    }
    own_name(node, request, "node lease")
}

fn own_name(node: &str, request: &AdmissionRequest<'_>, called: &str) -> Verdict {
    let name = match request.operation {
        Operation::Create => text(&request.new_object()["metadata"], "name"),
        _ => request.name,
    };
    if name != node {
        return Err(request.forbidden(format!("can only access {called} with the same name as the requesting node")));
    }
    Ok(())
}

fn slice(node: &str, request: &AdmissionRequest<'_>) -> Verdict {
    let (object, verb) = match request.operation {
        Operation::Create => (request.new_object(), "create"),
        Operation::Delete => (request.old.unwrap_or(&Value::Null), "delete"),
        _ => return Ok(()),
    };
    if text(&object["spec"], "nodeName") != node {
        let why = format!("can only {verb} ResourceSlice with the same NodeName as the requesting node");
        return Err(request.forbidden(why));
    }
    Ok(())
}

/// The finalizer that a node takes off a volume after it removed the volume's directory, and the node's name on it.
const LOCAL_PATH: &str = "windlass.dev/local-path";
const LOCAL_NODE: &str = "windlass.dev/node";

/// Of a volume a node changes nothing but that finalizer, and that only on its own ones that are being deleted.
fn volume(node: &str, request: &AdmissionRequest<'_>) -> Verdict {
    let strip = |volume: &Value| {
        let mut volume = volume.clone();
        if let Some(meta) = volume.get_mut("metadata").and_then(Value::as_object_mut) {
            for field in ["resourceVersion", "managedFields", "generation"] {
                meta.remove(field);
            }
            let finalizers = meta.remove("finalizers").unwrap_or_default();
            let kept = finalizers.as_array().into_iter().flatten().filter(|finalizer| *finalizer != LOCAL_PATH);
            meta.insert("finalizers".to_owned(), kept.cloned().collect());
        }
        volume
    };
    let allowed = request.operation == Operation::Update
        && request.subresource.is_empty()
        && request.old.is_some_and(|old| {
            meta::deletion_timestamp(old).is_some()
                && meta::annotation(old, LOCAL_NODE) == Some(node)
                && strip(old) == strip(request.new_object())
        });
    match allowed {
        true => Ok(()),
        false => Err(request.forbidden(format!(
            "node {node:?} may only take the finalizer {LOCAL_PATH:?} off its own volumes that are being deleted"
        ))),
    }
}

fn csr(node: &str, request: &AdmissionRequest<'_>) -> Verdict {
    let spec = &request.new_object()["spec"];
    let signers = ["kubernetes.io/kubelet-serving", "kubernetes.io/kube-apiserver-client-kubelet"];
    if request.operation != Operation::Create || !signers.contains(&text(spec, "signerName")) {
        return Ok(());
    }
    let parsed = crate::pki::csr::Request::from_spec(spec)
        .map_err(|error| request.forbidden(format!("unable to parse csr: {error}")))?;
    if parsed.common_name != format!("system:node:{node}") {
        return Err(request.forbidden(format!("can only create a node CSR with CN=system:node:{node}")));
    }
    Ok(())
}

#[async_trait]
impl Plugin for NodeRestriction {
    fn name(&self) -> &'static str {
        "NodeRestriction"
    }

    fn handles(&self, operation: Operation) -> bool {
        operation != Operation::Connect
    }

    async fn mutate(&self, request: &mut AdmissionRequest<'_>) -> Result<(), ApiError> {
        let Some(node) = node_identity(request.user) else { return Ok(()) };
        if node.is_empty() {
            let user = &request.user.name;
            return Err(request.forbidden(format!("could not determine node from user {user:?}")));
        }
        match (request.resource.group.as_str(), request.resource.plural.as_str()) {
            ("", "pods") => match request.subresource {
                "" => self.pod(node, request),
                "status" => self.pod_status(node, request),
                "eviction" => self.eviction(node, request),
                other => Err(request.forbidden(format!(
                    "unexpected pod subresource {other:?}, only 'status' and 'eviction' are allowed"
                ))),
            },
            ("", "nodes") => self.node(node, request),
            ("", "persistentvolumeclaims") => match request.subresource {
                "status" => self.claim_status(node, request),
                _ => Err(request.forbidden("may only update PVC status")),
            },
            ("", "persistentvolumes") => volume(node, request),
            ("", "serviceaccounts") => self.token(node, request),
            ("certificates.k8s.io", "podcertificaterequests") => self.certificate_request(node, request),
            ("coordination.k8s.io", "leases") => lease(node, request),
            ("storage.k8s.io", "csinodes") => own_name(node, request, "CSINode"),
            ("resource.k8s.io", "resourceslices") => slice(node, request),
            ("certificates.k8s.io", "certificatesigningrequests") => csr(node, request),
            _ => Ok(()),
        }
    }
}
