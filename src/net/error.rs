//! What can go wrong on the way to a wired pod, said with what, where and what to do.

use std::net::IpAddr;
use std::path::PathBuf;

/// Everything this crate reports.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A network namespace could not be opened or entered.
    #[error("network namespace {path}: {action} failed: {source} (does the sandbox still run, and do we have CAP_SYS_ADMIN?)")]
    Namespace { path: PathBuf, action: &'static str, source: std::io::Error },
    /// The kernel refused a netlink request.
    #[error("netlink: {what}: {reason}")]
    Netlink { what: String, reason: String, errno: i32 },
    /// A link that must be there is not.
    #[error("link {name} does not exist in this network namespace")]
    NoLink { name: String },
    /// The node has no pod CIDR yet.
    #[error("this node has no pod CIDR yet: it is set by the node IPAM controller, or by --pod-cidr")]
    NoPodCidr,
    /// All addresses of a CIDR are in use.
    #[error("no free address in {cidr}: {used} in use; delete pods or give the node a larger pod CIDR")]
    Exhausted { cidr: Cidr, used: usize },
    /// Two pods want the same port of the node.
    #[error("host port {protocol}/{port} is already used by pod {owner}")]
    HostPortConflict { protocol: Protocol, port: u16, owner: String },
    /// A text is not an address prefix.
    #[error("{text:?} is not a CIDR such as 10.244.0.0/24")]
    BadCidr { text: String },
    /// A file of ours could not be read or written.
    #[error("{path}: {action} failed: {source}")]
    File { path: PathBuf, action: &'static str, source: std::io::Error },
    /// A kernel setting could not be changed.
    #[error("sysctl {name}={value}: {source}")]
    Sysctl { name: String, value: String, source: std::io::Error },
    /// A program that we need did not start.
    #[error("{program} could not be started: {source} (install it: on Debian `apt-get install iptables conntrack`)")]
    Program { program: String, source: std::io::Error },
    /// A program that we ran failed.
    #[error("{program} failed with {status}: {stderr}")]
    ProgramFailed { program: String, status: String, stderr: String },
    /// A peer's route cannot be set up.
    #[error("node {node}: no route to its pods: {reason}")]
    Peer { node: String, reason: String },
    /// An address that should be one of ours is not.
    #[error("address {address} is in none of this node's pod CIDRs")]
    ForeignAddress { address: IpAddr },
}

/// Shorthand for this crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

use crate::cidr::Cidr;
use crate::hostport::Protocol;

impl Error {
    pub(crate) fn netlink(what: impl Into<String>, source: rtnetlink::Error) -> Error {
        let (reason, errno) = match &source {
            rtnetlink::Error::NetlinkError(m) => (m.to_io().to_string(), m.raw_code().abs()),
            other => (other.to_string(), 0),
        };
        Error::Netlink { what: what.into(), reason, errno }
    }

    /// The kernel's error number, when the kernel refused a netlink request.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Error::Netlink { errno, .. } if *errno != 0 => Some(*errno),
            _ => None,
        }
    }
}
