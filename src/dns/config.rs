//! The DNS role's configuration.

use std::net::{IpAddr, SocketAddr};

use hickory_server::proto::rr::Name;
use serde::{Deserialize, Serialize};

use crate::Error;

/// Configuration of the cluster DNS.
#[derive(Clone, Debug, Serialize, Deserialize, clap::Args)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Config {
    /// The cluster's domain
    #[arg(long, value_name = "DOMAIN")]
    pub cluster_domain: String,
    /// Address of the kube-system/kube-dns service, which the role keeps; empty: keep no service
    #[arg(long, value_name = "IP")]
    pub cluster_dns: String,
    /// Address to listen on, which pods reach by the service; empty: this node's address on its default route
    #[arg(long, value_name = "IP")]
    pub bind_address: String,
    /// Port to listen on, UDP and TCP; 0: one that is free
    #[arg(long, value_name = "PORT")]
    pub port: u16,
    /// Resolvers for all other names (address or address:port); none: those of resolv-conf
    #[arg(long, value_name = "RESOLVERS", value_delimiter = ',')]
    pub forward: Vec<String>,
    /// File that names the resolvers
    #[arg(long, value_name = "FILE")]
    pub resolv_conf: String,
    /// Seconds that answers about the cluster may be kept, 0 to 3600
    #[arg(long, value_name = "SECONDS")]
    pub ttl: u32,
    /// Answers of other resolvers to keep at most
    #[arg(long, value_name = "N")]
    pub cache_capacity: usize,
    /// Name of this node, if it is not the host's name
    #[arg(long, value_name = "NAME")]
    pub hostname_override: String,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            cluster_domain: "cluster.local".into(),
            cluster_dns: "10.96.0.10".into(),
            bind_address: String::new(),
            port: 0,
            forward: Vec::new(),
            resolv_conf: "/etc/resolv.conf".into(),
            ttl: 5,
            cache_capacity: 10_000,
            hostname_override: String::new(),
        }
    }
}

/// The configuration with everything parsed.
#[derive(Clone, Debug)]
pub struct Checked {
    pub domain: Name,
    pub cluster_dns: Option<IpAddr>,
    pub bind_address: Option<IpAddr>,
    pub upstreams: Vec<SocketAddr>,
    pub node: String,
}

fn bad(field: &'static str, reason: impl std::fmt::Display) -> Error {
    Error::Config { field, reason: reason.to_string() }
}

fn address(field: &'static str, text: &str) -> Result<Option<IpAddr>, Error> {
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|e| bad(field, format!("{text:?}: {e}")))
}

/// A resolver as `address` or `address:port`.
fn resolver(text: &str) -> Option<SocketAddr> {
    text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(|ip| SocketAddr::new(ip, 53)))
}

/// The `nameserver` lines of a resolv.conf.
pub fn nameservers(text: &str) -> Vec<SocketAddr> {
    text.lines()
        .filter_map(|line| line.split_whitespace().collect::<Vec<_>>().get(..2).and_then(|w| (w[0] == "nameserver").then(|| w[1].to_owned())))
        // A zone as in fe80::1%eth0 is not an address that we can use.
        .filter_map(|address| resolver(&address))
        .collect()
}

impl Config {
    /// Parses what is text, reads resolv.conf if it is to be used, and refuses what cannot be.
    pub fn check(&self) -> Result<Checked, Error> {
        let mut domain = Name::from_ascii(&self.cluster_domain).map_err(|e| bad("clusterDomain", e))?.to_lowercase();
        domain.set_fqdn(true);
        if domain.is_root() {
            return Err(bad("clusterDomain", "must not be empty"));
        }
        if self.ttl > 3600 {
            return Err(bad("ttl", "must be from 0 to 3600"));
        }
        let bind_address = address("bindAddress", &self.bind_address)?;
        if bind_address.is_some_and(|a| a.is_unspecified()) {
            // An answer must come from the address that was asked, which a socket on all addresses does not promise.
            return Err(bad("bindAddress", "must be one address of this node, not all of them"));
        }
        let upstreams = if self.forward.is_empty() {
            match std::fs::read_to_string(&self.resolv_conf) {
                Ok(text) => nameservers(&text),
                Err(error) => {
                    tracing::warn!(file = %self.resolv_conf, %error, "no resolvers: only names of the cluster will be answered");
                    Vec::new()
                }
            }
        } else {
            let parse = |text: &String| resolver(text).ok_or_else(|| bad("forward", format!("{text:?} is no address or address:port")));
            self.forward.iter().map(parse).collect::<Result<_, _>>()?
        };
        let node = if self.hostname_override.is_empty() {
            windlass_daemon::host::name().map_err(|e| bad("hostnameOverride", e))?
        } else {
            self.hostname_override.clone()
        };
        Ok(Checked { domain, cluster_dns: address("clusterDns", &self.cluster_dns)?, bind_address, upstreams, node })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_resolv_conf() {
        let got = nameservers("# c\nnameserver 10.0.0.2\n  nameserver\t::1 # x\nsearch a b\nnameserver fe80::1%eth0\nnameserver\n");
        assert_eq!(got, ["10.0.0.2:53".parse().unwrap(), "[::1]:53".parse::<SocketAddr>().unwrap()]);
    }

    #[test]
    fn refuses_what_cannot_be() {
        let check = |change: fn(&mut Config), expected: &str| {
            let mut config = Config { hostname_override: "n".into(), forward: vec!["192.0.2.1".into(), "192.0.2.2:5353".into()], ..Config::default() };
            change(&mut config);
            let got = config.check().map_or_else(|e| e.to_string(), |c| format!("{} {:?}", c.domain, c.upstreams));
            assert!(got.contains(expected), "{got}");
        };
        check(|_| (), "cluster.local. [192.0.2.1:53, 192.0.2.2:5353]");
        check(|c| c.cluster_domain = "Corp.Example.".into(), "corp.example.");
        check(|c| c.cluster_domain = String::new(), "clusterDomain");
        check(|c| c.forward = vec!["nowhere".into()], "forward");
        check(|c| c.bind_address = "0.0.0.0".into(), "not all of them");
        check(|c| c.ttl = 4000, "ttl");
    }
}
