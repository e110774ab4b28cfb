//! The controllers: loops that move the cluster from what is to what is wanted.
//!
//! # Invariants
//! - Nothing polls and nothing resyncs. A controller is woken by a watch event or by a deadline that it has set itself; the
//!   one exception are the autoscaler's metrics, which the API cannot watch.
//! - Reads come from shared caches, writes go through the API with a resource version or a UID, and a conflict is retried.
//! - What to do is decided by pure functions (objects in, actions out); the part that talks to the API is thin. Tests are
//!   tables on the former.
//! - No state but the caches, expectations and timers, all of which a restart rebuilds.
//! - The leader alone acts; whoever loses the lease stops at once.
//! - Deliberately absent: cloud controllers, in-tree volume attach and expand, signing of certificates (the API server does
//!   it, which alone holds the CA's key).
//!
//! # Code map
//! - `config`, `context` (shared caches), `table` (which controllers there are)
//! - `write` (API calls), `owner` (adoption), `expectations`, `podcontrol`, `pod`, `labels`, `hash`: what controllers share
//! - workloads: `replicaset` (also replication controllers), `deployment`, `daemonset`, `statefulset`, `job`, `cronjob`,
//!   `revision` (history of the two sets)
//! - services: `endpoints`, `endpointslice`
//! - nodes: `nodelifecycle`, `taint`, `nodeipam`, `podgc`
//! - namespaces and identity: `namespace`, `gc`, `serviceaccount`, `certificates`, `clusterrole`, `bootstrap`
//! - limits: `quota`, `disruption`, `hpa`, `ttl`
//! - storage: `volume`

mod bootstrap;
mod certificates;
mod clusterrole;
pub mod config;
pub mod context;
pub mod deployment;
mod cronjob;
mod daemonset;
mod discovery;
mod disruption;
pub mod endpoints;
pub mod endpointslice;
mod expectations;
mod gc;
mod hash;
mod hpa;
mod job;
mod labels;
mod namespace;
mod nodeipam;
mod nodelifecycle;
mod owner;
mod pod;
mod podcontrol;
mod podgc;
mod quota;
pub mod replicaset;
mod revision;
mod serviceaccount;
mod statefulset;
mod table;
mod taint;
mod tokens;
mod ttl;
mod volume;
mod write;

use std::{collections::BTreeSet, sync::Arc};

use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use windlass_client::{Role, leader::Election};
use windlass_daemon::health::Check;

pub use config::Config;
pub use table::CONTROLLERS;

/// Why the role, or one step of a controller, failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The API refused or could not be reached. A step is tried again with back-off.
    #[error("{what}: {}", write::api_message(source))]
    Api { what: String, source: Box<kube::Error> },
    /// A request could not be built.
    #[error("cannot build a request for {path}: {reason}")]
    Request { path: String, reason: String },
    /// An object that cannot be worked on as it is.
    #[error("{0}")]
    Invalid(String),
    /// The configuration is wrong.
    #[error("configuration field {field}: {reason}")]
    Config { field: &'static str, reason: String },
}

/// Runs the controllers until `role.shutdown`, while holding the lease if `leader_elect` says so.
///
/// # Errors
/// [`Error::Config`] at once when the configuration cannot be used.
pub async fn run(config: Config, role: Role) -> Result<(), Error> {
    table::check(&config)?;
    let config = Arc::new(config);
    let check = role.health.check("controllers");
    if !config.leader_elect {
        run_controllers(config, role.client, role.shutdown, check).await;
        return Ok(());
    }
    // One that stands by is as ready as it can be.
    check.ok();
    let election = Election {
        lease_duration: config.leader_elect_lease_duration.0,
        renew_deadline: config.leader_elect_renew_deadline.0,
        retry_period: config.leader_elect_retry_period.0,
        ..Election::new("kube-controller-manager")
    };
    let client = role.client.clone();
    let lead = move |token| run_controllers(config.clone(), client.clone(), token, check.clone());
    election.run(role.client, role.shutdown, lead).await;
    Ok(())
}

/// Runs every enabled controller until `token` is cancelled. `check` is ok once all have filled their caches.
async fn run_controllers(config: Arc<Config>, client: kube::Client, token: CancellationToken, check: Check) {
    let root = context::Context::new(client, config.clone(), token.clone());
    let waiting = Arc::new(Mutex::new(BTreeSet::new()));
    let mut running = JoinSet::new();
    for controller in CONTROLLERS.iter().filter(|controller| config.enabled(controller.name, controller.on_by_default)) {
        let context = root.fork();
        let work = (controller.start)(&context);
        waiting.lock().insert(controller.name);
        let (waiting, check, name) = (waiting.clone(), check.clone(), controller.name);
        running.spawn(async move {
            if context.synced().await {
                tracing::debug!(controller = name, "started");
                {
                    let mut waiting = waiting.lock();
                    waiting.remove(name);
                    match waiting.first() {
                        None => check.ok(),
                        Some(next) => check.fail(format!("{} controllers are filling their caches, among them {next}", waiting.len())),
                    }
                }
                work.await;
            }
        });
    }
    while let Some(result) = running.join_next().await {
        if let Err(error) = result {
            tracing::error!(%error, "a controller ended by a panic");
            check.fail(format!("a controller ended by a panic: {error}"));
        }
    }
    if token.is_cancelled() {
        check.ok();
    }
}
