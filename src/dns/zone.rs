//! The cluster's zone as a pure function from names to records.
//!
//! Follows the Kubernetes DNS specification 1.1.0 and, where it is silent, what CoreDNS' `kubernetes` plugin answers
//! (pods in its mode `insecure`).

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use hickory_server::proto::rr::rdata::{A, AAAA, CNAME, NS, PTR, SOA, SRV, TXT};
use hickory_server::proto::rr::{Name, RData, Record, RecordType};

use crate::model::{PortSpec, ServiceView, Source, service_of};

/// The schema's version, as `dns-version.<domain>` tells.
const SCHEMA: &str = "1.1.0";
/// SOA values as CoreDNS'.
const REFRESH: i32 = 7200;
const RETRY: i32 = 1800;
const EXPIRE: i32 = 86400;

/// What the zone says about a question.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// The records, and others that the asker will want next.
    Records(Vec<Record>, Vec<Record>),
    /// An alias to a name that this zone may or may not hold.
    Alias(Record, Name),
    /// The name exists, without records of this type.
    NoData,
    /// There is no such name.
    NoName,
    /// Not a name of ours.
    NotOurs,
}

/// The zone of one cluster.
pub struct Zone<S> {
    pub domain: Name,
    /// Seconds.
    pub ttl: u32,
    /// Where this DNS is reached, for `ns.dns.<domain>`.
    pub own_address: Option<IpAddr>,
    pub source: S,
}

/// An address below a service, of one endpoint or of the service.
struct Target {
    ip: IpAddr,
    /// The endpoint's label; `None`: the service itself.
    label: Option<String>,
    ports: Vec<PortSpec>,
}

impl<S: Source> Zone<S> {
    /// Answers a question. `name` is matched without regard to case and appears in the records as it was asked.
    pub fn lookup(&self, name: &Name, kind: RecordType) -> Answer {
        let lower = name.to_lowercase();
        if let Ok(net) = lower.parse_arpa_name() {
            let whole = net.prefix_len() == net.max_prefix_len();
            return if whole { self.reverse(name, kind, net.addr()) } else { Answer::NotOurs };
        }
        if !self.domain.zone_of(&lower) {
            return Answer::NotOurs;
        }
        let count = usize::from(lower.num_labels() - self.domain.num_labels());
        let labels: Vec<String> = lower.iter().take(count).map(|l| String::from_utf8_lossy(l).into_owned()).collect();
        let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
        // From the domain outwards: svc, namespace, service, ...
        match labels.iter().rev().copied().collect::<Vec<_>>().as_slice() {
            [] => self.apex(name, kind),
            ["dns-version"] if kind == RecordType::TXT => self.records(vec![self.record(name, RData::TXT(TXT::new(vec![SCHEMA.into()])))]),
            ["dns-version"] | ["dns"] | ["svc"] | ["pod"] => Answer::NoData,
            ["dns", "ns"] => self.addresses(name, kind, self.own_address.into_iter()),
            ["svc", namespace, rest @ ..] | ["pod", namespace, rest @ ..] if !self.source.has_namespace(namespace) => {
                let _ = rest;
                Answer::NoName
            }
            ["svc", _] | ["pod", _] => Answer::NoData,
            ["pod", _, address] => match undash(address) {
                Some(ip) => self.addresses(name, kind, std::iter::once(ip)),
                None => Answer::NoName,
            },
            ["svc", namespace, service, below @ ..] => match self.source.service(namespace, service) {
                Some(found) => self.service(name, kind, &found, below),
                None => Answer::NoName,
            },
            _ => Answer::NoName,
        }
    }

    fn apex(&self, name: &Name, kind: RecordType) -> Answer {
        match kind {
            RecordType::SOA => self.records(vec![self.soa()]),
            RecordType::NS => match self.below(&["ns", "dns"]) {
                Some(ns) => {
                    let extra = self.address_records(&ns, self.own_address.into_iter());
                    Answer::Records(vec![self.record(name, RData::NS(NS(ns)))], extra)
                }
                None => Answer::NoData,
            },
            _ => Answer::NoData,
        }
    }

    fn service(&self, name: &Name, kind: RecordType, service: &ServiceView, below: &[&str]) -> Answer {
        if service.is_external_name() {
            return match below {
                [] => self.alias(name, &service.spec.external_name),
                _ => Answer::NoName,
            };
        }
        match below {
            [] => {
                let targets = self.targets(service);
                if targets.is_empty() {
                    return Answer::NoName;
                }
                if kind == RecordType::SRV {
                    return self.srv(name, service, &targets, None);
                }
                self.addresses(name, kind, targets.iter().map(|t| t.ip))
            }
            // _protocol._port, from the service outwards; with or without their underscores, as CoreDNS takes them.
            [protocol, port] => {
                let (protocol, port) = (protocol.trim_start_matches('_'), port.trim_start_matches('_'));
                let targets: Vec<Target> =
                    self.targets(service).into_iter().filter(|t| t.ports.iter().any(|p| is_port(p, port, protocol))).collect();
                match kind {
                    _ if targets.is_empty() => Answer::NoName,
                    RecordType::SRV => self.srv(name, service, &targets, Some((port, protocol))),
                    _ => self.addresses(name, kind, targets.iter().map(|t| t.ip)),
                }
            }
            [label] => {
                let targets: Vec<Target> = self.endpoints(service).into_iter().filter(|t| t.label.as_deref() == Some(label)).collect();
                match kind {
                    _ if targets.is_empty() => Answer::NoName,
                    RecordType::SRV => self.srv(name, service, &targets, None),
                    _ => self.addresses(name, kind, targets.iter().map(|t| t.ip)),
                }
            }
            _ => Answer::NoName,
        }
    }

    /// Where a service's name leads: to its own addresses, or, headless, to its endpoints'.
    fn targets(&self, service: &ServiceView) -> Vec<Target> {
        if service.is_headless() {
            return self.endpoints(service);
        }
        service.cluster_ips().map(|ip| Target { ip, label: None, ports: service.spec.ports.clone() }).collect()
    }

    fn endpoints(&self, service: &ServiceView) -> Vec<Target> {
        let (namespace, name) = identity(service);
        let mut targets = Vec::new();
        let mut seen = BTreeSet::new();
        for slice in self.source.slices(namespace, name) {
            let ports = slice.ports.clone().unwrap_or_default();
            for (ip, label) in slice.endpoints.iter().flatten().filter(|e| e.is_ready()).flat_map(|e| e.names()) {
                // An endpoint that moves between slices may be in both for a moment.
                if seen.insert((ip, label.clone(), port_numbers(&ports))) {
                    targets.push(Target { ip, label: Some(label), ports: ports.clone() });
                }
            }
        }
        targets
    }

    fn alias(&self, name: &Name, target: &str) -> Answer {
        let Ok(mut target) = Name::from_ascii(target) else { return Answer::NoData };
        target.set_fqdn(true);
        Answer::Alias(self.record(name, RData::CNAME(CNAME(target.clone()))), target)
    }

    fn srv(&self, name: &Name, service: &ServiceView, targets: &[Target], wanted: Option<(&str, &str)>) -> Answer {
        let (namespace, service_name) = identity(service);
        let mut found: Vec<(u16, Name)> = Vec::new();
        let mut extra = Vec::new();
        for target in targets {
            let below = match &target.label {
                Some(label) => self.below(&[label, service_name, namespace, "svc"]),
                None => self.below(&[service_name, namespace, "svc"]),
            };
            let Some(host) = below else { continue };
            for port in target.ports.iter().filter(|p| wanted.is_none_or(|(port, protocol)| is_port(p, port, protocol))) {
                let pair = (port.port.unwrap_or_default(), host.clone());
                if !found.contains(&pair) {
                    found.push(pair);
                }
            }
            extra.extend(self.address_records(&host, std::iter::once(target.ip)));
        }
        if found.is_empty() {
            return Answer::NoData;
        }
        // Weights as CoreDNS': all of them together are 100.
        let weight = u16::try_from(100 / found.len().max(1)).unwrap_or(1).max(1);
        let records = found.into_iter().map(|(port, host)| self.record(name, RData::SRV(SRV::new(0, weight, port, host)))).collect();
        Answer::Records(records, extra)
    }

    fn reverse(&self, name: &Name, kind: RecordType, ip: IpAddr) -> Answer {
        let mut hosts: Vec<Name> = Vec::new();
        for service in self.source.services_at(ip) {
            let (namespace, name) = identity(&service);
            hosts.extend(self.below(&[name, namespace, "svc"]));
        }
        if hosts.is_empty() {
            for slice in self.source.slices_at(ip) {
                let namespace = slice.metadata.namespace.as_deref().unwrap_or_default();
                let Some(service) = service_of(&slice) else { continue };
                if !self.source.service(namespace, service).is_some_and(|s: Arc<ServiceView>| s.is_headless()) {
                    continue;
                }
                let labels = slice.endpoints.iter().flatten().filter(|e| e.is_ready()).flat_map(|e| e.names()).filter(|(a, _)| *a == ip);
                hosts.extend(labels.filter_map(|(_, label)| self.below(&[&label, service, namespace, "svc"])));
            }
        }
        hosts.sort();
        hosts.dedup();
        match kind {
            _ if hosts.is_empty() => Answer::NotOurs,
            RecordType::PTR => self.records(hosts.into_iter().map(|h| self.record(name, RData::PTR(PTR(h)))).collect()),
            _ => Answer::NoData,
        }
    }

    fn addresses(&self, name: &Name, kind: RecordType, ips: impl Iterator<Item = IpAddr>) -> Answer {
        let wanted = |ip: &IpAddr| match kind {
            RecordType::A => ip.is_ipv4(),
            RecordType::AAAA => ip.is_ipv6(),
            RecordType::ANY => true,
            _ => false,
        };
        let mut seen = BTreeSet::new();
        let records = self.address_records(name, ips.filter(wanted).filter(|ip| seen.insert(*ip)));
        self.records(records)
    }

    fn address_records(&self, name: &Name, ips: impl Iterator<Item = IpAddr>) -> Vec<Record> {
        ips.map(|ip| {
            let data = match ip {
                IpAddr::V4(a) => RData::A(A(a)),
                IpAddr::V6(a) => RData::AAAA(AAAA(a)),
            };
            self.record(name, data)
        })
        .collect()
    }

    fn records(&self, records: Vec<Record>) -> Answer {
        if records.is_empty() { Answer::NoData } else { Answer::Records(records, Vec::new()) }
    }

    fn record(&self, name: &Name, data: RData) -> Record {
        Record::from_rdata(name.clone(), self.ttl, data)
    }

    /// A name below the domain; `None` if it would be too long.
    fn below(&self, labels: &[&str]) -> Option<Name> {
        Name::from_labels(labels.iter().map(|l| l.as_bytes())).ok()?.append_domain(&self.domain).ok()
    }

    /// The zone's SOA record, which goes with every negative answer.
    pub fn soa(&self) -> Record {
        let at = |labels: &[&str]| self.below(labels).unwrap_or_else(|| self.domain.clone());
        // Nobody transfers the zone: its serial means nothing.
        let soa = SOA::new(at(&["ns", "dns"]), at(&["hostmaster"]), 1, REFRESH, RETRY, EXPIRE, self.ttl);
        self.record(&self.domain, RData::SOA(soa))
    }
}

fn identity(service: &ServiceView) -> (&str, &str) {
    (service.metadata.namespace.as_deref().unwrap_or_default(), service.metadata.name.as_deref().unwrap_or_default())
}

fn is_port(port: &PortSpec, name: &str, protocol: &str) -> bool {
    port.name.as_deref().is_some_and(|n| !n.is_empty() && n.eq_ignore_ascii_case(name))
        && port.protocol.as_deref().unwrap_or("TCP").eq_ignore_ascii_case(protocol)
}

fn port_numbers(ports: &[PortSpec]) -> Vec<u16> {
    ports.iter().filter_map(|p| p.port).collect()
}

/// `10-0-0-1` and `fd00--1` as addresses.
fn undash(label: &str) -> Option<IpAddr> {
    if label.bytes().filter(|b| *b == b'-').count() == 3
        && let Ok(ip) = label.replace('-', ".").parse::<std::net::Ipv4Addr>()
    {
        return Some(ip.into());
    }
    label.replace('-', ":").parse::<std::net::Ipv6Addr>().ok().map(IpAddr::V6)
}

#[cfg(test)]
#[path = "zone_tests.rs"]
pub(crate) mod tests;
