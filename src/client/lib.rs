//! The client half of every role: a Kubernetes client over sockets or in process, caches fed by watches,
//! work queues, events and leader election.
//!
//! # Invariants
//! - Only the Kubernetes API is spoken here. Nothing knows which API server answers, or whether it shares our process.
//! - A cache is filled by list and watch alone and can be thrown away at any moment.
//! - Nothing polls: waiting is for a watch event, a queue item or a deadline. There is no resync period on purpose;
//!   a handler that misses something has a bug that a resync would only hide.
//! - Every queue and buffer has a bound or is keyed by objects that exist, and shows in a metric.
//!
//! # Code map
//! - [`any_server`]: a TLS verifier that takes any server
//! - [`connect`]: make a [`Client`], with `rest_client_*` metrics around it
//! - [`informer`]: [`informer::Informer`], an indexed cache of one resource; [`projection!`] for lean object types
//! - [`queue`]: keyed work queues with back-off, and [`queue::run`] that works them off
//! - [`events`]: the recorder of Kubernetes Events
//! - [`leader`]: leader election by Lease
//! - [`gate`]: authn and authz of a role's own endpoints, delegated to the API server
//! - [`identity`]: joining a cluster by token, certificates through the CSR API, renewal

pub mod any_server;
pub mod connect;
pub mod events;
pub mod gate;
pub mod identity;
pub mod informer;
pub mod leader;
mod projection;
pub mod queue;

pub use kube::{Api, Client};
use tokio_util::sync::CancellationToken;
use windlass_daemon::health::Health;

/// What every role's `run` is given: its own identity at the API, when to stop, and where to report its health.
#[derive(Clone)]
pub struct Role {
    pub client: Client,
    /// Cancelled when the process is asked to stop; `run` then ends what it has begun and returns.
    pub shutdown: CancellationToken,
    pub health: Health,
}

#[doc(hidden)]
pub mod reexport {
    pub use crate::projection::lean_metadata;
    pub use k8s_openapi;
    pub use serde;
}
