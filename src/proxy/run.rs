//! From informers to syncs.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use tokio::sync::Notify;
use windlass_client::informer::{Change, Informer, Key};
use windlass_client::{Api, Role};
use windlass_net::iptables::chain_prefix;
use windlass_net::link::Netlink;
use windlass_net::{Family, sysctl};

use crate::config::{Checked, Config, DetectLocal};
use crate::healthcheck::HealthServers;
use crate::metrics::{self, Kind};
use crate::model::{NodeView, ServiceName, ServiceView, SliceView, service_ports};
use crate::rules::{LocalDetector, NodePortAddresses, Settings};
use crate::state::{Bucket, State, usable_families};
use crate::Error;

const SERVICE_LABEL: &str = "kubernetes.io/service-name";
const BY_SERVICE: &str = "service";
/// When the endpoints last changed, as the slice controller noted.
const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";
/// After a failed sync.
const RETRY: Duration = Duration::from_secs(5);

/// What happened since the last sync. Bounded by the services that exist.
#[derive(Debug, Default)]
struct Pending {
    services: HashSet<ServiceName>,
    service_changes: usize,
    endpoint_changes: usize,
    node: bool,
    /// When the oldest change of endpoints happened, if the controller said so.
    trigger: Option<SystemTime>,
}

#[derive(Debug, Default)]
struct Inbox {
    pending: Mutex<Pending>,
    wake: Notify,
}

impl Inbox {
    fn put(&self, f: impl FnOnce(&mut Pending)) {
        f(&mut self.pending.lock());
        for family in [Family::V4, Family::V6] {
            metrics::queued(family);
        }
        self.wake.notify_one();
    }
}

/// Runs the proxy until `role.shutdown`. The rules stay.
pub async fn run(config: Config, role: Role) -> Result<(), Error> {
    let checked = config.check()?;
    let ready = role.health.check("proxy-rules");
    let (families, error) = usable_families().await;
    if !families.contains(&Family::V4) {
        return Err(error.map_or_else(|| Error::Config { field: "mode", reason: "iptables does not work here".into() }, Error::Net));
    }
    prepare_kernel(&config);
    let inbox = Arc::new(Inbox::default());
    let informers = Informers::start(&role, &checked, &inbox);
    tokio::select! {
        () = informers.synced() => {}
        () = role.shutdown.cancelled() => return Ok(()),
    }
    let mut proxy = Proxy {
        states: families.iter().map(|f| State::new(settings(*f, &config, &checked))).collect(),
        health: HealthServers::new(role.shutdown.child_token()),
        config,
        checked,
        informers,
        inbox,
        v6_clean: None,
    };
    proxy.read_node().await;
    let mut bucket = Bucket::new(proxy.config.iptables_min_sync_period.0, Instant::now());
    let mut monitor = tokio::time::interval(proxy.config.iptables_sync_period.0);
    monitor.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    monitor.reset();
    let mut due = true;
    loop {
        if due {
            let wait = bucket.take(Instant::now());
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = role.shutdown.cancelled() => return Ok(()),
            }
            match proxy.sync().await {
                Ok(()) => ready.ok(),
                Err(error) => {
                    tracing::error!(%error, "the service rules could not be written, trying again");
                    ready.fail(error.to_string());
                    tokio::select! {
                        () = tokio::time::sleep(RETRY) => continue,
                        () = role.shutdown.cancelled() => return Ok(()),
                    }
                }
            }
        }
        due = tokio::select! {
            () = role.shutdown.cancelled() => return Ok(()),
            () = proxy.inbox.wake.notified() => true,
            _ = monitor.tick() => proxy.monitor().await,
        };
    }
}

/// Kernel settings by upstream's defaults. In a network namespace some belong to the host and cannot be written: the
/// proxy works without them.
fn prepare_kernel(config: &Config) {
    let set = |name: &str, value: String| {
        if let Err(error) = sysctl::set(name, &value) {
            tracing::debug!(%error, "kernel setting left as it is");
        }
    };
    if config.iptables_localhost_node_ports {
        set("net/ipv4/conf/all/route_localnet", "1".into());
    }
    if config.conntrack_max_per_core > 0 {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let wanted = u64::from(config.conntrack_max_per_core).saturating_mul(cores as u64).max(u64::from(config.conntrack_min));
        let current = sysctl::get("net/netfilter/nf_conntrack_max").and_then(|v| v.parse::<u64>().ok());
        if current.is_some_and(|c| c < wanted) {
            set("net/netfilter/nf_conntrack_max", wanted.to_string());
        }
    }
    for (name, span) in [
        ("net/netfilter/nf_conntrack_tcp_timeout_established", config.conntrack_tcp_timeout_established),
        ("net/netfilter/nf_conntrack_tcp_timeout_close_wait", config.conntrack_tcp_timeout_close_wait),
    ] {
        if !span.0.is_zero() {
            set(name, span.0.as_secs().to_string());
        }
    }
    if config.conntrack_tcp_be_liberal {
        set("net/netfilter/nf_conntrack_tcp_be_liberal", "1".into());
    }
}

fn settings(family: Family, config: &Config, checked: &Checked) -> Settings {
    let loopback = checked.node_port_cidrs.is_empty() || checked.node_port_cidrs.iter().any(|c| c.contains(std::net::Ipv4Addr::LOCALHOST.into()));
    Settings {
        family,
        prefix: chain_prefix(&config.instance),
        node: checked.node.clone(),
        node_ip: checked.node_ip.filter(|ip| Family::of(*ip) == family),
        zone: None,
        masquerade_all: config.masquerade_all,
        masquerade_mark: checked.masquerade_mark.clone(),
        detector: detector(family, checked, &[]),
        node_port_addresses: NodePortAddresses::All,
        localhost_node_ports: config.iptables_localhost_node_ports && loopback,
        liberal: sysctl::get("net/netfilter/nf_conntrack_tcp_be_liberal").as_deref() == Some("1"),
        large: false,
    }
}

fn detector(family: Family, checked: &Checked, node_cidrs: &[String]) -> LocalDetector {
    let by_cidr = |cidr: Option<windlass_net::Cidr>| cidr.map(|c| LocalDetector::new(&format!("-s {c}"))).unwrap_or_default();
    match &checked.detect_local {
        DetectLocal::ClusterCidr(cidrs) => by_cidr(cidrs.iter().find(|c| c.family() == family).copied()),
        DetectLocal::NodeCidr => by_cidr(node_cidrs.iter().filter_map(|c| c.parse().ok()).find(|c: &windlass_net::Cidr| c.family() == family)),
        DetectLocal::Link(name) => LocalDetector::new(&format!("-i {name}")),
    }
}

struct Informers {
    services: Informer<ServiceView>,
    slices: Informer<SliceView>,
    node: Informer<NodeView>,
}

impl Informers {
    fn start(role: &Role, checked: &Checked, inbox: &Arc<Inbox>) -> Informers {
        let to = inbox.clone();
        let services = Informer::builder(Api::<ServiceView>::all(role.client.clone()))
            .labels("!service.kubernetes.io/service-proxy-name")
            .on_change(move |change: &Change<ServiceView>| {
                let key = Key::of(change.object().as_ref());
                to.put(|p| {
                    p.services.insert(ServiceName { namespace: key.ns().to_owned(), name: key.name.clone() });
                    p.service_changes += 1;
                    metrics::changed(Kind::Service, p.service_changes);
                });
            })
            .start(role.shutdown.clone());
        let to = inbox.clone();
        let slices = Informer::builder(Api::<SliceView>::all(role.client.clone()))
            .labels("!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name")
            .index(BY_SERVICE, |slice: &SliceView| service_of(slice).map(|s| s.to_string()).into_iter().collect())
            .on_change(move |change: &Change<SliceView>| {
                let names: Vec<ServiceName> = change.old.iter().chain(&change.new).filter_map(|s| service_of(s)).collect();
                let trigger = change.new.as_ref().and_then(|s| trigger_time(s));
                to.put(|p| {
                    p.services.extend(names);
                    p.endpoint_changes += 1;
                    p.trigger = p.trigger.into_iter().chain(trigger).min();
                    metrics::changed(Kind::Endpoint, p.endpoint_changes);
                });
            })
            .start(role.shutdown.clone());
        let to = inbox.clone();
        let node = Informer::builder(Api::<NodeView>::all(role.client.clone()))
            .fields(&format!("metadata.name={}", checked.node))
            .on_change(move |change: &Change<NodeView>| {
                // A node's status changes all the time: only what rules depend on counts.
                if change.old.as_deref().map(facts) != change.new.as_deref().map(facts) {
                    to.put(|p| p.node = true);
                }
            })
            .start(role.shutdown.clone());
        Informers { services, slices, node }
    }

    async fn synced(&self) {
        tokio::join!(self.services.synced(), self.slices.synced(), self.node.synced());
    }
}

fn facts(node: &NodeView) -> (Option<String>, Vec<String>, Option<std::net::IpAddr>) {
    let zone = node.metadata.labels.as_ref().and_then(|l| l.get("topology.kubernetes.io/zone")).cloned();
    let address = node.status.addresses.iter().filter(|a| a.kind == "InternalIP").find_map(|a| a.address.parse().ok());
    (zone, node.spec.pod_cidrs.clone(), address)
}

fn service_of(slice: &SliceView) -> Option<ServiceName> {
    let name = slice.metadata.labels.as_ref()?.get(SERVICE_LABEL).filter(|n| !n.is_empty())?;
    Some(ServiceName { namespace: slice.metadata.namespace.clone()?, name: name.clone() })
}

fn trigger_time(slice: &SliceView) -> Option<SystemTime> {
    let text = slice.metadata.annotations.as_ref()?.get(TRIGGER_TIME)?;
    text.parse::<jiff::Timestamp>().ok().map(SystemTime::from)
}

struct Proxy {
    config: Config,
    checked: Checked,
    states: Vec<State>,
    informers: Informers,
    inbox: Arc<Inbox>,
    health: HealthServers,
    /// Whether ip6tables holds nothing of ours; looked at once.
    v6_clean: Option<bool>,
}

impl Proxy {
    async fn sync(&mut self) -> Result<(), windlass_net::Error> {
        let pending = std::mem::take(&mut *self.inbox.pending.lock());
        metrics::changed(Kind::Service, 0);
        metrics::changed(Kind::Endpoint, 0);
        if pending.node {
            self.read_node().await;
        }
        for name in &pending.services {
            self.read_service(name);
        }
        let mut failed = Ok(());
        for state in &mut self.states {
            let family = state.settings().family;
            // Without services of IPv6 there is nothing to do in ip6tables, except to take away what was there before us.
            if family == Family::V6 && state.names().is_empty() {
                let clean = match self.v6_clean {
                    Some(clean) => clean,
                    None => !state.is_intact().await?,
                };
                self.v6_clean = Some(clean);
                if clean {
                    continue;
                }
            }
            if family == Family::V6 {
                self.v6_clean = Some(false);
            }
            match state.sync().await {
                Ok(()) => {
                    if let Some(latency) = pending.trigger.and_then(|t| t.elapsed().ok()) {
                        metrics::programmed(family, latency);
                    }
                }
                Err(error) => failed = Err(error),
            }
        }
        if failed.is_ok() {
            let mut wanted = std::collections::BTreeMap::new();
            for state in &self.states {
                for (port, check) in state.health_checks() {
                    wanted.entry(port).and_modify(|w: &mut crate::healthcheck::Wanted| w.local_endpoints = w.local_endpoints.max(check.local_endpoints)).or_insert(check);
                }
            }
            self.health.sync(wanted).await;
        }
        failed
    }

    fn read_service(&mut self, name: &ServiceName) {
        let service = self.informers.services.get_in(&name.namespace, &name.name);
        let slices = self.informers.slices.by_index(BY_SERVICE, &name.to_string());
        for state in &mut self.states {
            let family = state.settings().family;
            let ports = service
                .as_ref()
                .map(|s| service_ports(family, &self.checked.node, s, slices.iter().map(AsRef::as_ref)))
                .unwrap_or_default();
            state.update(name, ports);
        }
    }

    /// Takes over what rules depend on of the Node and of the machine's addresses.
    async fn read_node(&mut self) {
        let node = self.informers.node.get(&Key::cluster(&self.checked.node));
        let (zone, cidrs, address) = node.as_deref().map(facts).unwrap_or_default();
        let addresses = if self.checked.node_port_cidrs.is_empty() { NodePortAddresses::All } else { self.local_addresses().await };
        let configured = self.checked.node_ip;
        for state in &mut self.states {
            let family = state.settings().family;
            let detector = detector(family, &self.checked, &cidrs);
            state.set(|s| {
                s.zone.clone_from(&zone);
                s.node_ip = configured.or(address).filter(|ip| Family::of(*ip) == family);
                s.detector = detector;
                s.node_port_addresses = addresses.clone();
            });
        }
    }

    async fn local_addresses(&self) -> NodePortAddresses {
        if self.checked.node_port_cidrs.iter().any(|c| c.prefix_len() == 0) {
            return NodePortAddresses::All;
        }
        let found = match Netlink::open() {
            Ok(netlink) => netlink.addresses(None).await,
            Err(error) => Err(error),
        };
        match found {
            Ok(list) => NodePortAddresses::Only(
                list.into_iter().map(|a| a.ip).filter(|ip| self.checked.node_port_cidrs.iter().any(|c| c.contains(*ip))).collect(),
            ),
            Err(error) => {
                tracing::error!(%error, "this node's addresses cannot be read: node ports are closed");
                NodePortAddresses::Only(Vec::new())
            }
        }
    }

    /// Whether a sync is due because somebody flushed our rules.
    async fn monitor(&mut self) -> bool {
        let mut flushed = false;
        for state in self.states.iter_mut() {
            if state.settings().family == Family::V6 && state.names().is_empty() {
                continue;
            }
            match state.is_intact().await {
                Ok(true) => {}
                Ok(false) => {
                    tracing::warn!(family = %state.settings().family, "our rules were flushed by somebody, writing them again");
                    state.distrust();
                    flushed = true;
                }
                Err(error) => tracing::warn!(%error, "cannot look for our rules"),
            }
        }
        flushed
    }
}
