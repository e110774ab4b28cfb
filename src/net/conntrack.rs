//! Stale connection tracking entries, by the `conntrack` program.
//!
//! A UDP sender that never pauses keeps its entry alive: it would go on to an endpoint that is gone. TCP needs no help.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use crate::cidr::Family;
use crate::error::Result;
use crate::iptables::{check, find_program, run};

/// A tracked flow: what the sender sees, and who answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    pub source: SocketAddr,
    pub destination: SocketAddr,
    /// The source of the answers: after DNAT, the endpoint.
    pub reply_source: SocketAddr,
}

/// A front end whose flows are to be looked at, and the endpoints that may answer for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frontend {
    /// The service's address; `None` for a node port, which is open on every address.
    pub address: Option<IpAddr>,
    pub port: u16,
    pub endpoints: BTreeSet<SocketAddr>,
}

fn words(family: Family, verb: &str, protocol: &str) -> Vec<String> {
    let mut words = vec![verb.to_owned(), "-p".to_owned(), protocol.to_owned()];
    if family == Family::V6 {
        words.extend(["-f".to_owned(), "ipv6".to_owned()]);
    }
    words
}

async fn conntrack(words: &[String]) -> Result<String> {
    let program = find_program("conntrack").map_or_else(|| "conntrack".to_owned(), |p| p.display().to_string());
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let output = run(&program, &words, None).await?;
    // It fails when it found nothing to delete.
    if !output.status.success() && String::from_utf8_lossy(&output.stderr).contains("0 flow entries") {
        return Ok(String::new());
    }
    Ok(String::from_utf8_lossy(&check(&program, output)?.stdout).into_owned())
}

/// Deletes flows by `conntrack`'s own filter words, as `--dport 53 --reply-src 10.0.0.1`. Finding none is no error.
pub async fn delete_matching(family: Family, protocol: &str, filter: &[&str]) -> Result<()> {
    let mut all = words(family, "-D", protocol);
    all.extend(filter.iter().map(|w| (*w).to_owned()));
    conntrack(&all).await.map(drop)
}

/// Deletes the UDP flows to `frontend` that somebody other than its endpoints answers. Returns how many.
pub async fn delete_stale_udp(family: Family, frontend: &Frontend) -> Result<usize> {
    let mut list = words(family, "-L", "udp");
    list.extend(["--orig-port-dst".to_owned(), frontend.port.to_string()]);
    if let Some(address) = frontend.address {
        list.extend(["--orig-dst".to_owned(), address.to_string()]);
    }
    let stale = stale(&parse(&conntrack(&list).await?), frontend);
    for flow in &stale {
        let mut delete = words(family, "-D", "udp");
        for (option, value) in [
            ("--orig-src", flow.source.ip().to_string()),
            ("--orig-dst", flow.destination.ip().to_string()),
            ("--orig-port-src", flow.source.port().to_string()),
            ("--orig-port-dst", flow.destination.port().to_string()),
        ] {
            delete.extend([option.to_owned(), value]);
        }
        conntrack(&delete).await?;
    }
    Ok(stale.len())
}

fn stale(flows: &[Flow], frontend: &Frontend) -> Vec<Flow> {
    flows
        .iter()
        .filter(|f| f.destination.port() == frontend.port && frontend.address.is_none_or(|a| a == f.destination.ip()))
        .filter(|f| !frontend.endpoints.contains(&f.reply_source))
        .cloned()
        .collect()
}

/// Reads `conntrack -L`'s lines; what is none is skipped.
fn parse(listed: &str) -> Vec<Flow> {
    listed
        .lines()
        .filter_map(|line| {
            let values = |name: &str| line.split_whitespace().filter_map(move |w| w.strip_prefix(name)?.strip_prefix('=')).collect::<Vec<_>>();
            let (sources, destinations) = (values("src"), values("dst"));
            let (source_ports, destination_ports) = (values("sport"), values("dport"));
            let address = |ip: &[&str], port: &[&str], n: usize| Some(SocketAddr::new(ip.get(n)?.parse().ok()?, port.get(n)?.parse().ok()?));
            Some(Flow {
                source: address(&sources, &source_ports, 0)?,
                destination: address(&destinations, &destination_ports, 0)?,
                reply_source: address(&sources, &source_ports, 1)?,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_that_lead_elsewhere_are_stale() {
        let listed = "udp      17 25 src=10.244.0.9 dst=10.96.0.10 sport=40000 dport=53 [UNREPLIED] src=10.244.0.5 dst=10.244.0.9 sport=5353 dport=40000 mark=0 use=1\n\
                      udp      17 25 src=10.244.0.9 dst=10.96.0.10 sport=40001 dport=53 src=10.244.0.6 dst=10.244.0.9 sport=5353 dport=40001 [ASSURED] mark=0 use=1\n\
                      udp      17 25 src=10.244.0.9 dst=10.96.0.11 sport=40002 dport=53 src=10.244.0.5 dst=10.244.0.9 sport=5353 dport=40002 mark=0 use=1\nnoise\n";
        let flows = parse(listed);
        assert_eq!(flows.len(), 3);
        let check = |address: Option<&str>, endpoints: &[&str], expected: &[u16]| {
            let frontend = Frontend {
                address: address.map(|a| a.parse().unwrap()),
                port: 53,
                endpoints: endpoints.iter().map(|e| e.parse().unwrap()).collect(),
            };
            let got: Vec<u16> = stale(&flows, &frontend).iter().map(|f| f.source.port()).collect();
            assert_eq!(got, expected);
        };
        check(Some("10.96.0.10"), &["10.244.0.6:5353"], &[40000]);
        check(Some("10.96.0.10"), &[], &[40000, 40001]);
        check(None, &["10.244.0.6:5353"], &[40000, 40002]);
    }
}
