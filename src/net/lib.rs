//! The network of a node: namespaces, links, addresses, routes, rules.
//!
//! The kubelet wires pods with [`pod::PodNetwork`] and keeps routes to other nodes with [`routes::Routes`]; the proxy
//! uses [`iptables`]. Everything goes over rtnetlink and `iptables-restore`; there is no `ip` command.
//!
//! # Invariants
//! - All state can be derived: from links (named after the pod, labelled by alias), from one small file per pod that is
//!   written before its address is used, and from the kernel's routes and rules. A kill at any moment leaves nothing that
//!   [`pod::PodNetwork::reconcile`] does not find.
//! - Every operation is idempotent. A pod that is wired is never touched again: its connections outlive us.
//! - A thread that enters another namespace was made for it and ends afterwards ([`netns`]).
//! - Two instances on one machine share no link, chain or VXLAN network.
//! - Deliberately absent: the Kubernetes API (callers translate), external CNI plugins (a warning says so), bandwidth
//!   limits, network policies.
//!
//! # Code map
//! - [`netns`]: run, dial and make network namespaces
//! - [`link`]: one rtnetlink socket: links, addresses, routes, neighbours
//! - [`ipam`]: the node's addresses on disk; [`cidr`]: prefixes
//! - [`pod`]: attach, detach, reconcile; [`hostport`]: the rules around pods as a pure function
//! - [`routes`]: host-gw and VXLAN to other nodes
//! - [`iptables`]: save, restore, diff; [`conntrack`]: stale flows; [`sysctl`]: kernel settings
//! - [`pause`]: the infra container's image, embedded
//! - [`reset`]: take it all away

pub mod cidr;
pub mod conntrack;
pub mod error;
pub mod hostport;
pub mod ipam;
pub mod iptables;
pub mod link;
mod metrics;
pub mod netns;
pub mod pause;
pub mod pod;
mod reset;
pub mod routes;
pub mod sysctl;

pub use cidr::{Cidr, Family};
pub use error::{Error, Result};
pub use reset::reset;
