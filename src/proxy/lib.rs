//! The service proxy of a node: what is sent to a service's address gets to one of its endpoints.
//!
//! Mode `iptables`: rules in the kernel, with upstream's chains and texts, so that what an operator knows of
//! kube-proxy holds here. Packets never pass through this process, and the rules stay when it stops.
//!
//! # Invariants
//! - The rules are a pure function of Services, EndpointSlices, the Node and the configuration ([`rules`]).
//! - A change is one `iptables-restore --noflush` with only the chains that differ. Established connections are not
//!   touched by any sync.
//! - What is believed of the kernel's rules can be thrown away: at the start, after an error and when the monitor finds
//!   our chains flushed, the sync looks and writes everything.
//! - Nothing polls but that monitor, at `--iptables-sync-period`.
//! - Chains of two instances on one machine never meet.
//! - Deliberately absent: the modes `nftables` and `userspace` (an error says so), IPVS, nfacct counters.
//!
//! # Code map
//! - [`config`]: flags; [`model`]: what is read of the API; [`endpoints`]: policies, topology, terminating fallback
//! - [`rules`]: texts of rules; [`state`]: one family's rules in the kernel
//! - [`healthcheck`]: `healthCheckNodePort` servers; `run`: informers to syncs

pub mod config;
pub mod endpoints;
pub mod healthcheck;
mod metrics;
pub mod model;
mod run;
pub mod rules;
pub mod state;

pub use config::Config;
pub use run::run;

use windlass_net::Family;
use windlass_net::iptables::{Iptables, chain_prefix};

/// Everything this crate reports.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A configuration field's value cannot be.
    #[error("proxy configuration: {field}: {reason}")]
    Config { field: &'static str, reason: String },
    /// The kernel or a program refused.
    #[error(transparent)]
    Net(#[from] windlass_net::Error),
}

/// Removes all rules of an instance's proxy from this network namespace (`kube-proxy --cleanup`).
pub async fn reset(instance: &str) -> Result<(), Error> {
    let prefix = chain_prefix(instance);
    for family in [Family::V4, Family::V6] {
        let iptables = Iptables::new(family);
        if iptables.usable().await.is_ok() {
            iptables.remove_chains(&["nat", "filter"], |chain| rules::is_ours(&prefix, chain)).await?;
        }
    }
    Ok(())
}
