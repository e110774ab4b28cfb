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
use super::{AdmissionRequest, Plugin};
use crate::authz::Authorizer;
use crate::authz::escalation::Escalation;
use crate::authz::rbac::Rbac;
use crate::cluster::Cluster;
use prometheus::HistogramVec;
use std::sync::Arc;
use std::time::Instant;
use windlass_api::ApiError;

/// All plugins, and the metrics about them.
pub struct Chain {
    plugins: Vec<Arc<dyn Plugin>>,
    durations: HistogramVec,
}

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
        Chain { plugins, durations }
    }

    fn observe(&self, plugin: &str, request: &AdmissionRequest<'_>, kind: &str, since: Instant, rejected: bool) {
        let rejected = if rejected { "true" } else { "false" };
        let labels = [plugin, request.operation.as_str(), rejected, kind];
        self.durations.with_label_values(&labels).observe(since.elapsed().as_secs_f64());
    }

    /// Runs the mutating half; the first refusal ends it.
    pub async fn mutate(&self, request: &mut AdmissionRequest<'_>) -> Result<(), ApiError> {
        let operation = request.operation;
        for plugin in self.plugins.iter().filter(|plugin| plugin.handles(operation)) {
            let since = Instant::now();
            let result = plugin.mutate(request).await;
            self.observe(plugin.name(), request, "admit", since, result.is_err());
            result?;
        }
        Ok(())
    }

    /// Runs the validating half; the first refusal ends it.
    pub async fn validate(&self, request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        for plugin in self.plugins.iter().filter(|plugin| plugin.handles(request.operation)) {
            let since = Instant::now();
            let result = plugin.validate(request).await;
            self.observe(plugin.name(), request, "validate", since, result.is_err());
            result?;
        }
        Ok(())
    }
}
