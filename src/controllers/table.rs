//! Which controllers there are.

use crate::{Error, config::Config, context::Controller};

const fn on(name: &'static str, start: fn(&crate::context::Context) -> crate::context::Worker) -> Controller {
    Controller { name, start, on_by_default: true }
}

/// All controllers, by upstream's names. Namespaces and identity come first: everything else needs them.
pub const CONTROLLERS: &[Controller] = &[
    on("serviceaccount-controller", crate::serviceaccount::start_accounts),
    on("serviceaccount-token-controller", crate::tokens::start),
    on("root-ca-certificate-publisher-controller", crate::serviceaccount::start_root_ca),
    on("node-ipam-controller", crate::nodeipam::start),
    on("node-lifecycle-controller", crate::nodelifecycle::start),
    on("taint-eviction-controller", crate::taint::start),
    on("certificatesigningrequest-approving-controller", crate::certificates::start_approver),
    on("certificatesigningrequest-cleaner-controller", crate::certificates::start_cleaner),
    on("replicaset-controller", crate::replicaset::start_replica_sets),
    on("replicationcontroller-controller", crate::replicaset::start_replication_controllers),
    on("deployment-controller", crate::deployment::start),
    on("job-controller", crate::job::start),
    on("cronjob-controller", crate::cronjob::start),
    on("ttl-after-finished-controller", crate::ttl::start),
    on("daemonset-controller", crate::daemonset::start),
    on("statefulset-controller", crate::statefulset::start),
    on("endpoints-controller", crate::endpoints::start),
    on("endpointslice-controller", crate::endpointslice::start),
    on("endpointslice-mirroring-controller", crate::endpointslice::mirror::start),
    on("namespace-controller", crate::namespace::start),
    on("resourcequota-controller", crate::quota::start),
    on("garbage-collector-controller", crate::gc::start),
    on("pod-garbage-collector-controller", crate::podgc::start),
    on("disruption-controller", crate::disruption::start),
    on("horizontal-pod-autoscaler-controller", crate::hpa::start),
    on("clusterrole-aggregation-controller", crate::clusterrole::start),
    on("token-cleaner-controller", crate::bootstrap::start_cleaner),
    on("bootstrap-signer-controller", crate::bootstrap::start_signer),
    on("persistentvolume-binder-controller", crate::volume::start),
    on("windlass-local-path-controller", crate::volume::local_path::start),
    on("persistentvolumeclaim-protection-controller", crate::volume::protection::start_claims),
    on("persistentvolume-protection-controller", crate::volume::protection::start_volumes),
    on("ephemeral-volume-controller", crate::volume::ephemeral::start),
];

/// Refuses a configuration that some controller could not work with, and names of controllers that do not exist.
pub fn check(config: &Config) -> Result<(), Error> {
    for entry in &config.controllers {
        let name = entry.trim_start_matches('-');
        if name != "*" && !CONTROLLERS.iter().any(|controller| controller.name == name) {
            return Err(Error::Config { field: "controllers", reason: format!("there is no controller {name:?}") });
        }
    }
    crate::nodeipam::parts(config).map(|_| ()).map_err(|reason| Error::Config { field: "clusterCidr", reason })
}
