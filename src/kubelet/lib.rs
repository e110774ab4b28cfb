//! The kubelet: runs the pods of one node.
//!
//! Pods come from three sources (the API, manifest files, a manifest URL); each has an actor that compares what its
//! specification wants with what the container runtime holds, and starts what is missing. The runtime's event stream
//! says when to look; there is no relist loop.
//!
//! # Invariants
//! - No state of its own: a kubelet that is killed at any moment finds its pods again by the labels of their containers,
//!   their addresses in the network's records, their status in the API. A running container is never touched by a restart.
//! - Deciding is pure ([`pod::plan`], [`pod::status`], [`admission`], ...): no I/O, no clock but an argument. Doing is in
//!   tasks; an actor never waits for one, so a deletion is heard at once.
//! - Everything on disk and in the kernel belongs to a pod's uid and goes when the pod goes; what belongs to no pod is
//!   swept up once every source has been heard.
//! - A pod's object is deleted only after its containers, network, volumes and groups are gone.
//! - Deliberately absent: device plugins, CSI, user namespaces, block volumes, image volumes, checkpoints, dynamic resource
//!   allocation. Pods that ask for them are told so in their status.
//!
//! # Code map
//! - [`config`], [`shared`]: what everybody here knows
//! - [`manager`]: sources and runtime events in, actors out; [`sources`]: static pods; [`admission`]: who may run
//! - [`pod`]: `actor` and `step` (the actor), `plan`, `status`, `conditions`, `patch` (decisions), `start`, `stop`,
//!   `cleanup`, `report` (deeds), `build`, `env`, `names`, `resources` (a container's configuration), `probe`, `check`
//! - [`runtime`]: the container runtime's trait, and Docker
//! - [`volumes`]: volumes on disk; [`objects`], [`tokens`]: what they are filled from; [`images`], [`registry_auth`]: images
//! - [`node`]: the node object, its lease, pressure, garbage
//! - [`server`]: port 10250; [`stream`]: SPDY, WebSocket, exec, attach, port-forward
//! - [`cgroup`]: control groups; [`reset`]: take everything away

pub mod admission;
pub mod cgroup;
pub mod config;
pub mod error;
pub mod images;
pub mod manager;
pub mod metrics;
pub mod node;
pub mod objects;
pub mod pod;
pub mod registry_auth;
mod reset;
pub mod runtime;
pub mod server;
pub mod shared;
pub mod sources;
mod start_up;
pub mod stream;
pub mod tokens;
pub mod volumes;

pub use config::Config;
pub use error::Error;
pub use reset::reset;
pub use start_up::run;
