//! Which rules a resource has.

use crate::strategy::custom::Custom;
use crate::strategy::rules::Rules;
use crate::strategy::{
    Strategy, access, batch, core, extension, misc, network, pod, scaling, service, storage, workloads,
};

static PLAIN: Rules = Rules::PLAIN;
static PLAIN_SPEC_STATUS: Rules = Rules::SPEC_STATUS;
static CUSTOM: Custom = Custom;

/// (group, plural, rules); a built-in resource without a row has [`Rules::PLAIN`].
static TABLE: &[(&str, &str, &Rules)] = &[
    ("", "configmaps", &core::CONFIG_MAP),
    ("", "endpoints", &core::ENDPOINTS),
    ("", "events", &core::EVENT),
    ("", "limitranges", &core::LIMIT_RANGE),
    ("", "namespaces", &core::NAMESPACE),
    ("", "nodes", &core::NODE),
    ("", "persistentvolumeclaims", &storage::CLAIM),
    ("", "persistentvolumes", &storage::VOLUME),
    ("", "pods", &pod::RULES),
    ("", "podtemplates", &workloads::POD_TEMPLATE),
    ("", "replicationcontrollers", &workloads::REPLICATION_CONTROLLER),
    ("", "resourcequotas", &core::RESOURCE_QUOTA),
    ("", "secrets", &core::SECRET),
    ("", "serviceaccounts", &core::SERVICE_ACCOUNT),
    ("", "services", &service::RULES),
    ("admissionregistration.k8s.io", "mutatingadmissionpolicies", &extension::MUTATING_POLICY),
    ("admissionregistration.k8s.io", "mutatingadmissionpolicybindings", &extension::POLICY_BINDING),
    ("admissionregistration.k8s.io", "mutatingwebhookconfigurations", &extension::MUTATING_WEBHOOK),
    ("admissionregistration.k8s.io", "validatingadmissionpolicies", &extension::VALIDATING_POLICY),
    ("admissionregistration.k8s.io", "validatingadmissionpolicybindings", &extension::POLICY_BINDING),
    ("admissionregistration.k8s.io", "validatingwebhookconfigurations", &extension::VALIDATING_WEBHOOK),
    ("apiextensions.k8s.io", "customresourcedefinitions", &extension::CRD),
    ("apiregistration.k8s.io", "apiservices", &extension::API_SERVICE),
    ("apps", "controllerrevisions", &workloads::CONTROLLER_REVISION),
    ("apps", "daemonsets", &workloads::DAEMON_SET),
    ("apps", "deployments", &workloads::DEPLOYMENT),
    ("apps", "replicasets", &workloads::REPLICA_SET),
    ("apps", "statefulsets", &workloads::STATEFUL_SET),
    ("autoscaling", "horizontalpodautoscalers", &scaling::AUTOSCALER),
    ("batch", "cronjobs", &batch::CRON_JOB),
    ("batch", "jobs", &batch::JOB),
    ("certificates.k8s.io", "certificatesigningrequests", &access::CSR),
    ("coordination.k8s.io", "leases", &misc::LEASE),
    ("discovery.k8s.io", "endpointslices", &network::ENDPOINT_SLICE),
    ("events.k8s.io", "events", &core::EVENT),
    ("flowcontrol.apiserver.k8s.io", "flowschemas", &misc::FLOW_SCHEMA),
    ("flowcontrol.apiserver.k8s.io", "prioritylevelconfigurations", &misc::PRIORITY_LEVEL),
    ("networking.k8s.io", "ingressclasses", &network::INGRESS_CLASS),
    ("networking.k8s.io", "ingresses", &network::INGRESS),
    ("networking.k8s.io", "ipaddresses", &network::IP_ADDRESS),
    ("networking.k8s.io", "networkpolicies", &network::NETWORK_POLICY),
    ("networking.k8s.io", "servicecidrs", &network::SERVICE_CIDR),
    ("node.k8s.io", "runtimeclasses", &misc::RUNTIME_CLASS),
    ("policy", "poddisruptionbudgets", &scaling::DISRUPTION_BUDGET),
    ("rbac.authorization.k8s.io", "clusterrolebindings", &access::CLUSTER_ROLE_BINDING),
    ("rbac.authorization.k8s.io", "clusterroles", &access::CLUSTER_ROLE),
    ("rbac.authorization.k8s.io", "rolebindings", &access::ROLE_BINDING),
    ("rbac.authorization.k8s.io", "roles", &access::ROLE),
    ("resource.k8s.io", "deviceclasses", &misc::DEVICE_CLASS),
    ("resource.k8s.io", "devicetaintrules", &PLAIN_SPEC_STATUS),
    ("resource.k8s.io", "resourceclaims", &misc::RESOURCE_CLAIM),
    ("resource.k8s.io", "resourceclaimtemplates", &misc::RESOURCE_CLAIM_TEMPLATE),
    ("resource.k8s.io", "resourceslices", &misc::RESOURCE_SLICE),
    ("scheduling.k8s.io", "priorityclasses", &misc::PRIORITY_CLASS),
    ("storage.k8s.io", "csidrivers", &storage::CSI_DRIVER),
    ("storage.k8s.io", "csinodes", &storage::CSI_NODE),
    ("storage.k8s.io", "csistoragecapacities", &storage::CSI_CAPACITY),
    ("storage.k8s.io", "storageclasses", &storage::CLASS),
    ("storage.k8s.io", "volumeattachments", &storage::ATTACHMENT),
    ("storage.k8s.io", "volumeattributesclasses", &storage::ATTRIBUTES_CLASS),
    ("storagemigration.k8s.io", "storageversionmigrations", &PLAIN_SPEC_STATUS),
];

/// The rules of a built-in resource.
pub fn strategy_for(group: &str, resource: &str) -> &'static dyn Strategy {
    TABLE.iter().find(|(g, r, _)| *g == group && *r == resource).map_or(&PLAIN, |(_, _, rules)| *rules)
}

/// The rules of every custom resource.
pub fn custom_strategy() -> &'static dyn Strategy {
    &CUSTOM
}
