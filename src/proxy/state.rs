//! One family's rules: the parts of all services, what is in the kernel, and the way from one to the other.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use windlass_net::conntrack::{Frontend, delete_stale_udp};
use windlass_net::iptables::{Chains, Iptables, Jump, parse_save};
use windlass_net::{Family, Result};

use crate::healthcheck::Wanted;
use crate::metrics;
use crate::model::{Protocol, ServiceName, ServicePort};
use crate::rules::{self, LARGE_CLUSTER_ENDPOINTS, Part, Settings};

#[derive(Debug)]
struct Known {
    port: ServicePort,
    part: Part,
}

/// The state of one family. Whatever it believes is in the kernel can be thrown away: a full sync looks.
#[derive(Debug)]
pub struct State {
    settings: Settings,
    iptables: Iptables,
    services: BTreeMap<ServiceName, Vec<Known>>,
    /// What the last successful sync left in the kernel; `None`: look first.
    applied: Option<Chains>,
    jumps: Vec<Jump>,
    /// UDP front ends whose flows are to be looked at after the next sync.
    stale: BTreeMap<(Option<std::net::IpAddr>, u16), BTreeSet<SocketAddr>>,
}

impl State {
    /// Nothing known, nothing applied.
    pub fn new(settings: Settings) -> State {
        let jumps = rules::jumps(&settings.prefix);
        State { iptables: Iptables::new(settings.family), services: BTreeMap::new(), applied: None, jumps, stale: BTreeMap::new(), settings }
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Changes what all rules depend on; makes all of them anew if it differs.
    pub fn set(&mut self, change: impl FnOnce(&mut Settings)) {
        let before = self.settings.clone();
        change(&mut self.settings);
        if format!("{before:?}") != format!("{:?}", self.settings) {
            self.remake();
        }
    }

    fn remake(&mut self) {
        let settings = &self.settings;
        for known in self.services.values_mut().flatten() {
            known.part = rules::service(settings, &known.port);
        }
    }

    /// Takes over a service's ports; none: it is gone.
    pub fn update(&mut self, name: &ServiceName, ports: Vec<ServicePort>) {
        let before = self.services.remove(name).unwrap_or_default();
        self.note_stale(&before, &ports);
        let made: Vec<Known> = ports
            .into_iter()
            .map(|port| match before.iter().find(|k| k.port == port) {
                Some(same) => Known { part: same.part.clone(), port },
                None => Known { part: rules::service(&self.settings, &port), port },
            })
            .collect();
        if !made.is_empty() {
            self.services.insert(name.clone(), made);
        }
        let large = self.services.values().flatten().map(|k| k.port.endpoints.len()).sum::<usize>() > LARGE_CLUSTER_ENDPOINTS;
        if large != self.settings.large {
            self.settings.large = large;
            self.remake();
        }
    }

    /// Names of all services that have rules.
    pub fn names(&self) -> Vec<ServiceName> {
        self.services.keys().cloned().collect()
    }

    /// UDP needs its stale flows deleted when an endpoint goes, and when the first one comes (packets before it went nowhere,
    /// and conntrack remembers).
    fn note_stale(&mut self, before: &[Known], after: &[ServicePort]) {
        let serving = |p: &ServicePort| p.endpoints.iter().filter(|e| e.serving).map(|e| e.address).collect::<BTreeSet<_>>();
        for port in after.iter().filter(|p| p.protocol == Protocol::Udp) {
            let now = serving(port);
            let old = before.iter().find(|k| k.port.port_name == port.port_name && k.port.protocol == port.protocol);
            let then = old.map(|k| serving(&k.port)).unwrap_or_default();
            let first = then.is_empty() && !now.is_empty();
            if !first && then.is_subset(&now) && old.is_some_and(|k| k.port.cluster_ip == port.cluster_ip) {
                continue;
            }
            let addresses = std::iter::once(&port.cluster_ip).chain(&port.load_balancer_ips).chain(&port.external_ips);
            for ip in addresses {
                self.stale.insert((Some(*ip), port.port), now.clone());
            }
            // Without endpoints any flow to that port number would match, also those that are none of ours.
            if port.node_port != 0 && !now.is_empty() {
                self.stale.insert((None, port.node_port), now.clone());
            }
        }
    }

    /// Forgets what is in the kernel: the next sync looks.
    pub fn distrust(&mut self) {
        self.applied = None;
    }

    /// Whether our chains are still there.
    pub async fn is_intact(&self) -> Result<bool> {
        let canary = format!("{}PROXY-CANARY", self.settings.prefix);
        Ok(self.iptables.chain_exists("nat", &canary).await? && self.iptables.chain_exists("filter", &canary).await?)
    }

    /// Brings the kernel in line, in one transaction that holds only chains that changed.
    pub async fn sync(&mut self) -> Result<()> {
        let start = Instant::now();
        let full = self.applied.is_none();
        let outcome = self.apply().await;
        metrics::synced(self.settings.family, full, start.elapsed(), outcome.is_ok());
        if outcome.is_ok() {
            self.count();
            self.forget_flows().await;
        } else {
            self.applied = None;
        }
        outcome
    }

    async fn apply(&mut self) -> Result<()> {
        let wanted = rules::assemble(&self.settings, self.services.values().flatten().map(|k| &k.part));
        let (before, missing) = match self.applied.take() {
            Some(applied) => (applied, Vec::new()),
            None => self.look().await?,
        };
        let document = wanted.transaction(Some(&before), &missing.iter().collect::<Vec<_>>());
        let mut written = [("filter", 0), ("nat", 0)];
        if let Some(document) = &document {
            self.iptables.restore(document).await?;
            let mut table = "";
            for line in document.lines() {
                if let Some(name) = line.strip_prefix('*') {
                    table = name;
                } else if line.starts_with("-A") {
                    written.iter_mut().filter(|(t, _)| *t == table).for_each(|(_, n)| *n += 1);
                }
            }
        }
        for (table, last) in written {
            metrics::rules(self.settings.family, table, wanted.rules(table), last);
        }
        self.applied = Some(wanted);
        Ok(())
    }

    /// Which service chains are left from before (to be removed), and which jumps are missing. All chains count as changed.
    async fn look(&self) -> Result<(Chains, Vec<Jump>)> {
        let mut left = Chains::default();
        let mut missing = Vec::new();
        for table in ["filter", "nat"] {
            let saved = parse_save(&self.iptables.save(table).await?);
            missing.extend(self.jumps.iter().filter(|j| j.table == table && !j.is_in(&saved)).cloned());
            if table == "nat" {
                for chain in saved.keys().filter(|c| rules::is_service_chain(&self.settings.prefix, c)) {
                    // A rule that we never write: the chain counts as changed if it is still wanted.
                    left.chain("nat", chain.clone()).push(String::new());
                }
            }
        }
        Ok((left, missing))
    }

    fn count(&self) {
        let parts = || self.services.values().flatten().map(|k| &k.part);
        let internal = parts().filter(|p| p.no_local_endpoints.0).count();
        let external = parts().filter(|p| p.no_local_endpoints.1).count();
        metrics::no_local_endpoints(self.settings.family, internal, external);
    }

    async fn forget_flows(&mut self) {
        let stale = std::mem::take(&mut self.stale);
        if stale.is_empty() {
            return;
        }
        let (start, mut deleted) = (Instant::now(), 0);
        for ((address, port), endpoints) in stale {
            match delete_stale_udp(self.settings.family, &Frontend { address, port, endpoints }).await {
                Ok(count) => deleted += count,
                Err(error) => {
                    tracing::warn!(%error, "stale UDP flows stay until they time out");
                    break;
                }
            }
        }
        metrics::conntrack(self.settings.family, start.elapsed(), deleted);
    }

    /// The health check ports that services ask for, with their endpoints on this node.
    pub fn health_checks(&self) -> BTreeMap<u16, Wanted> {
        let mut wanted = BTreeMap::new();
        for port in self.services.values().flatten().map(|k| &k.port).filter(|p| p.health_check_node_port != 0) {
            let ips: BTreeSet<_> = port.endpoints.iter().filter(|e| e.local && e.ready).map(|e| e.address.ip()).collect();
            let entry = wanted.entry(port.health_check_node_port).or_insert(Wanted { service: port.service.clone(), local_endpoints: 0 });
            entry.local_endpoints = entry.local_endpoints.max(ips.len());
        }
        wanted
    }
}

/// Two syncs in a row, then one per period: upstream's bounded frequency, as a token bucket.
#[derive(Debug)]
pub struct Bucket {
    period: Duration,
    tokens: f64,
    at: Instant,
}

impl Bucket {
    const BURST: f64 = 2.0;

    /// A full bucket.
    pub fn new(period: Duration, now: Instant) -> Bucket {
        Bucket { period, tokens: Self::BURST, at: now }
    }

    /// Takes a token; how long to wait before acting on it.
    pub fn take(&mut self, now: Instant) -> Duration {
        if self.period.is_zero() {
            return Duration::ZERO;
        }
        let gained = now.saturating_duration_since(self.at).as_secs_f64() / self.period.as_secs_f64();
        self.tokens = (self.tokens + gained).min(Self::BURST) - 1.0;
        self.at = now;
        if self.tokens >= 0.0 { Duration::ZERO } else { self.period.mul_f64(-self.tokens) }
    }
}

/// The families that the proxy may serve on this machine.
pub async fn usable_families() -> (Vec<Family>, Option<windlass_net::Error>) {
    let mut usable = Vec::new();
    let mut first_error = None;
    for family in [Family::V4, Family::V6] {
        match Iptables::new(family).usable().await {
            Ok(()) => usable.push(family),
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    (usable, first_error)
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod network_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_of_two_then_one_per_period() {
        let start = Instant::now();
        let mut bucket = Bucket::new(Duration::from_secs(1), start);
        let ms = |n| start + Duration::from_millis(n);
        let waits: Vec<u128> = [0, 0, 0, 1000, 9000].into_iter().map(|t| bucket.take(ms(t)).as_millis()).collect();
        assert_eq!(waits, [0, 0, 1000, 1000, 0]);
        assert_eq!(Bucket::new(Duration::ZERO, start).take(start), Duration::ZERO);
    }
}
