//! Cluster DNS, straight from the informers, with hickory-server.
//!
//! Answers the names of the Kubernetes DNS specification 1.1.0 and forwards all others. It runs on the node, at any port;
//! pods reach it by the service `kube-system/kube-dns`, which it keeps through the API.
//!
//! # Invariants
//! - The zone is a pure function of Services, EndpointSlices and Namespaces ([`zone`]); an answer is computed when it is
//!   asked for, and nothing about the cluster is cached besides the informers.
//! - It listens on one address, not on all: an answer leaves from the address that was asked.
//! - Forwarding is bounded: questions under way, answers kept, time per try. A loop is found and stopped.
//! - Deliberately absent: zone transfers, DNSSEC signing, pod records that are checked against pods (CoreDNS' mode
//!   `verified`), search by wildcard.
//!
//! # Code map
//! - [`config`]: flags; [`model`]: what is read of the API; [`zone`]: names to records
//! - [`forward`], [`cache`]: other resolvers; [`handler`]: request to response
//! - [`publish`]: the service and its slice; `run`: the role

pub mod cache;
pub mod config;
pub mod forward;
pub mod handler;
mod metrics;
pub mod model;
pub mod publish;
mod run;
pub mod zone;

pub use config::Config;
pub use run::run;

/// Everything this crate reports.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A configuration field's value cannot be.
    #[error("dns configuration: {field}: {reason}")]
    Config { field: &'static str, reason: String },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source} (choose another --bind-address or --port)")]
    Listen { address: std::net::SocketAddr, source: std::io::Error },
    /// Serving ended.
    #[error("the DNS server on {listen} ended: {reason}")]
    Server { listen: std::net::SocketAddr, reason: String },
}
