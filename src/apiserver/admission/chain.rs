//! The plugins in upstream's order.

use super::certificates::{
    CertificateApproval, CertificateSigning, CertificateSubjectRestriction, ClusterTrustBundleAttest,
};
use super::defaults::{
    DefaultIngressClass, DefaultStorageClass, DefaultTolerationSeconds, PersistentVolumeClaimResize,
    PodResizeValidator, PodTopologyLabels, StorageObjectInUseProtection, TaintNodesByCondition,
};
use super::limits::LimitRanger;
use super::namespaces::NamespaceLifecycle;
use super::noderestriction::NodeRestriction;
use super::podsecurity::PodSecurity;
use super::priority::Priority;
use super::quota::ResourceQuota;
use super::runtimeclass::RuntimeClass;
use super::serviceaccount::ServiceAccount;
use super::{AdmissionRequest, Operation, Plugin};
use crate::authz::Authorizer;
use crate::authz::escalation::Escalation;
use crate::authz::rbac::Rbac;
use crate::cluster::Cluster;
use prometheus::{Histogram, HistogramVec};
use std::sync::Arc;
use std::time::Instant;
use windlass_api::ApiError;

/// All plugins, and the metrics about them.
pub struct Chain {
    plugins: Vec<Arc<dyn Plugin>>,
    durations: HistogramVec,
    /// Histograms of what was not refused, looked up once: by plugin, operation and half.
    passed: Vec<[[Histogram; 2]; 4]>,
}

/// In the order of their discriminants.
const OPERATIONS: [Operation; 4] = [Operation::Create, Operation::Update, Operation::Delete, Operation::Connect];

/// Why an admission configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum PluginError {
    #[error("admission plugin {name:?} is not known here; known are: {known}")]
    Unknown { name: String, known: String },
}

impl Chain {
    /// The plugins that upstream has on by default, and NodeRestriction. `disabled` are left out by name
    /// (`--disable-admission-plugins`).
    pub fn standard(
        cluster: &Arc<dyn Cluster>,
        authorizer: &Arc<dyn Authorizer>,
        rbac: &Arc<Rbac>,
        disabled: &[String],
    ) -> Result<Chain, PluginError> {
        let cluster = || cluster.clone();
        let authorizer = || authorizer.clone();
        let plugins: Vec<Arc<dyn Plugin>> = vec![
            Arc::new(Escalation { rbac: rbac.clone(), authorizer: authorizer(), cluster: cluster() }),
            Arc::new(NamespaceLifecycle::new(cluster())),
            Arc::new(LimitRanger { cluster: cluster() }),
            Arc::new(ServiceAccount { cluster: cluster() }),
            Arc::new(NodeRestriction { cluster: cluster(), authorizer: authorizer() }),
            Arc::new(TaintNodesByCondition),
            Arc::new(PodSecurity { cluster: cluster() }),
            Arc::new(Priority { cluster: cluster() }),
            Arc::new(DefaultTolerationSeconds),
            Arc::new(DefaultStorageClass { cluster: cluster() }),
            Arc::new(StorageObjectInUseProtection),
            Arc::new(PersistentVolumeClaimResize { cluster: cluster() }),
            Arc::new(RuntimeClass { cluster: cluster() }),
            Arc::new(CertificateApproval { authorizer: authorizer() }),
            Arc::new(CertificateSigning { authorizer: authorizer() }),
            Arc::new(ClusterTrustBundleAttest { authorizer: authorizer() }),
            Arc::new(CertificateSubjectRestriction),
            Arc::new(DefaultIngressClass { cluster: cluster() }),
            Arc::new(PodTopologyLabels { cluster: cluster() }),
            Arc::new(PodResizeValidator { cluster: cluster() }),
            // Here: MutatingAdmissionPolicy, MutatingAdmissionWebhook, ValidatingAdmissionPolicy, ValidatingAdmissionWebhook.
            Arc::new(ResourceQuota { cluster: cluster() }),
        ];
        let known: Vec<&str> = plugins.iter().map(|plugin| plugin.name()).collect();
        if let Some(name) = disabled.iter().find(|name| !known.contains(&name.as_str())) {
            return Err(PluginError::Unknown { name: name.clone(), known: known.join(", ") });
        }
        let plugins = plugins.into_iter().filter(|plugin| !disabled.iter().any(|name| name == plugin.name()));
        Ok(Chain::of(plugins.collect()))
    }

    /// A chain of the given plugins.
    pub fn of(plugins: Vec<Arc<dyn Plugin>>) -> Chain {
        let durations = windlass_daemon::metrics::histogram_vec(
            "apiserver_admission_controller_admission_duration_seconds",
            "Admission controller latency histogram in seconds, identified by name and broken out for each operation and API resource and type (validate or admit).",
            &["name", "operation", "rejected", "type"],
            &[0.005, 0.025, 0.1, 0.5, 1.0, 2.5],
        );
        let passed = |plugin: &Arc<dyn Plugin>| {
            OPERATIONS.map(|op| ["admit", "validate"].map(|half| durations.with_label_values(&[plugin.name(), op.as_str(), "false", half])))
        };
        let passed = plugins.iter().map(passed).collect();
        Chain { plugins, durations, passed }
    }

    fn observe(&self, index: usize, operation: Operation, half: usize, since: Instant, rejected: bool) {
        let took = since.elapsed().as_secs_f64();
        if !rejected {
            return self.passed[index][operation as usize][half].observe(took);
        }
        let labels = [self.plugins[index].name(), operation.as_str(), "true", ["admit", "validate"][half]];
        self.durations.with_label_values(&labels).observe(took);
    }

    /// Runs the mutating half; the first refusal ends it.
    pub async fn mutate(&self, request: &mut AdmissionRequest<'_>) -> Result<(), ApiError> {
        let operation = request.operation;
        for (index, plugin) in self.plugins.iter().enumerate().filter(|(_, plugin)| plugin.handles(operation)) {
            let since = Instant::now();
            let result = plugin.mutate(request).await;
            self.observe(index, operation, 0, since, result.is_err());
            result?;
        }
        Ok(())
    }

    /// Runs the validating half; the first refusal ends it.
    pub async fn validate(&self, request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        let operation = request.operation;
        for (index, plugin) in self.plugins.iter().enumerate().filter(|(_, plugin)| plugin.handles(operation)) {
            let since = Instant::now();
            let result = plugin.validate(request).await;
            self.observe(index, operation, 1, since, result.is_err());
            result?;
        }
        Ok(())
    }
}
