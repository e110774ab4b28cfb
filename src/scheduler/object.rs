//! What the scheduler reads of the API's objects: projections with only those fields.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, Time};
use serde::Deserialize;

windlass_client::projection! {
    /// A pod, bound or waiting.
    pub struct PodView: core::Pod {
        pub spec: PodSpecView,
        pub status: PodStatusView,
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpecView {
    pub node_name: Option<String>,
    pub scheduler_name: Option<String>,
    pub priority: Option<i32>,
    pub preemption_policy: Option<String>,
    pub host_network: Option<bool>,
    pub node_selector: BTreeMap<String, String>,
    pub affinity: Option<core::Affinity>,
    pub tolerations: Vec<core::Toleration>,
    pub topology_spread_constraints: Vec<core::TopologySpreadConstraint>,
    pub containers: Vec<ContainerView>,
    pub init_containers: Vec<ContainerView>,
    pub overhead: BTreeMap<String, Quantity>,
    pub resources: Option<ResourcesView>,
    pub volumes: Vec<VolumeView>,
    pub scheduling_gates: Vec<core::PodSchedulingGate>,
    pub resource_claims: Vec<core::PodResourceClaim>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerView {
    pub image: String,
    pub restart_policy: Option<String>,
    pub resources: ResourcesView,
    pub ports: Vec<PortView>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ResourcesView {
    pub requests: BTreeMap<String, Quantity>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PortView {
    pub host_port: Option<i32>,
    #[serde(rename = "hostIP")]
    pub host_ip: Option<String>,
    pub protocol: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeView {
    pub name: String,
    pub persistent_volume_claim: Option<ClaimRef>,
    pub ephemeral: Option<serde::de::IgnoredAny>,
    pub image: Option<ImageRef>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClaimRef {
    pub claim_name: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ImageRef {
    pub reference: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodStatusView {
    pub phase: Option<String>,
    pub nominated_node_name: Option<String>,
    pub start_time: Option<Time>,
    pub conditions: Vec<ConditionView>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ConditionView {
    #[serde(rename = "type")]
    pub type_: String,
    pub status: String,
    pub reason: Option<String>,
    pub message: Option<String>,
}

impl PodView {
    /// Whether the pod's containers have ended for good: it takes no room any more.
    pub fn is_finished(&self) -> bool {
        matches!(self.status.phase.as_deref(), Some("Succeeded" | "Failed"))
    }

    pub fn node(&self) -> Option<&str> {
        self.spec.node_name.as_deref().filter(|name| !name.is_empty())
    }
}

windlass_client::projection! {
    /// A node.
    pub struct NodeView: core::Node {
        pub spec: NodeSpecView,
        pub status: NodeStatusView,
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSpecView {
    pub unschedulable: bool,
    pub taints: Vec<core::Taint>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeStatusView {
    pub allocatable: BTreeMap<String, Quantity>,
    pub images: Vec<ImageView>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ImageView {
    pub names: Vec<String>,
    pub size_bytes: i64,
}

windlass_client::projection! {
    /// A namespace, for its labels.
    pub struct NamespaceView: core::Namespace {}
}

windlass_client::projection! {
    /// A service, for the selector that spreads its pods.
    pub struct ServiceView: core::Service {
        pub spec: MapSelectorView,
    }
}

windlass_client::projection! {
    /// A replication controller, for its selector.
    pub struct ReplicationControllerView: core::ReplicationController {
        pub spec: MapSelectorView,
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct MapSelectorView {
    pub selector: BTreeMap<String, String>,
}

windlass_client::projection! {
    /// A replica set, for its selector.
    pub struct ReplicaSetView: k8s_openapi::api::apps::v1::ReplicaSet {
        pub spec: SelectorView,
    }
}

windlass_client::projection! {
    /// A stateful set, for its selector.
    pub struct StatefulSetView: k8s_openapi::api::apps::v1::StatefulSet {
        pub spec: SelectorView,
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct SelectorView {
    pub selector: LabelSelector,
}

windlass_client::projection! {
    /// A disruption budget, for preemption.
    pub struct BudgetView: k8s_openapi::api::policy::v1::PodDisruptionBudget {
        pub spec: BudgetSpecView,
        pub status: BudgetStatusView,
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct BudgetSpecView {
    pub selector: Option<LabelSelector>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BudgetStatusView {
    pub disruptions_allowed: i32,
    pub disrupted_pods: BTreeMap<String, Time>,
}

windlass_client::projection! {
    /// A claim to a volume.
    pub struct ClaimView: core::PersistentVolumeClaim {
        pub spec: ClaimSpecView,
        pub status: ClaimStatusView,
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClaimSpecView {
    pub access_modes: Vec<String>,
    pub resources: ResourcesView,
    pub selector: Option<LabelSelector>,
    pub storage_class_name: Option<String>,
    pub volume_mode: Option<String>,
    pub volume_name: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ClaimStatusView {
    pub phase: Option<String>,
}

windlass_client::projection! {
    /// A volume.
    pub struct VolumeObjectView: core::PersistentVolume {
        pub spec: VolumeSpecView,
        pub status: ClaimStatusView,
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeSpecView {
    pub access_modes: Vec<String>,
    pub capacity: BTreeMap<String, Quantity>,
    pub claim_ref: Option<core::ObjectReference>,
    pub csi: Option<CsiView>,
    pub node_affinity: Option<core::VolumeNodeAffinity>,
    pub storage_class_name: Option<String>,
    pub volume_mode: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CsiView {
    pub driver: String,
    pub volume_handle: String,
}

windlass_client::projection! {
    /// A storage class.
    pub struct StorageClassView: k8s_openapi::api::storage::v1::StorageClass {
        pub provisioner: String,
        pub volume_binding_mode: Option<String>,
        pub allowed_topologies: Vec<core::TopologySelectorTerm>,
    }
}

windlass_client::projection! {
    /// A node's CSI drivers, for their limits.
    pub struct CsiNodeView: k8s_openapi::api::storage::v1::CSINode {
        pub spec: CsiNodeSpecView,
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct CsiNodeSpecView {
    pub drivers: Vec<CsiDriverView>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct CsiDriverView {
    pub name: String,
    pub allocatable: Option<CsiLimitView>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct CsiLimitView {
    pub count: Option<i32>,
}
