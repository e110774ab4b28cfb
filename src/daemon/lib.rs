//! What every Windlass role shares: configuration, TLS serving, health, metrics, profiles, logs, signals and systemd.
//!
//! # Invariants
//! - Knows nothing of Kubernetes objects and nothing of a role: it imports no other Windlass crate.
//! - Everything served here but `/healthz`, `/livez` and `/readyz` passes the [`endpoints::Gate`] of the role; there is
//!   no switch that leaves the gate out.
//! - Nothing is unbounded: connections, header bytes, HTTP/2 streams and resets, handshakes, the drain at the end and the
//!   length of a CPU profile all have limits ([`server::Limits`]).
//! - A configuration field that is not known is an error with its line, never ignored.
//! - Deliberately absent: authentication and authorization (the API server and the kubelet hand in a gate), reloading of
//!   configuration files (a role is restarted), HTTP/3.
//!
//! # Code map
//! | module | what |
//! | --- | --- |
//! | [`config`] | `--config FILE` (YAML or JSON), then flags on top |
//! | [`server`] | accept loop, HTTP/1.1 and HTTP/2, upgrades, graceful drain |
//! | [`tls`] | certificates and client CA bundles that can be swapped while serving |
//! | [`health`] | named readiness and liveness checks |
//! | [`endpoints`] | `/healthz /livez /readyz /metrics /configz /version /debug/pprof` |
//! | [`profile`] | CPU and heap profiles in pprof's format |
//! | [`metrics`] | the process's metric registry |
//! | [`host`], [`logging`], [`shutdown`], [`notify`], [`version`] | as named |

pub mod config;
pub mod endpoints;
pub mod health;
pub mod host;
pub mod logging;
pub mod metrics;
pub mod notify;
pub mod profile;
pub mod server;
pub mod shutdown;
pub mod tls;
pub mod version;
