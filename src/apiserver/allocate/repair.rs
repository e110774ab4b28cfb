//! Repair: what is taken and what services have are brought together, by events and deadlines.
//!
//! A crash between taking a value and storing its service leaks the value; a removed IPAddress takes a value away that a
//! service still has. Every change of either side schedules one look at that value: soon if a service has it, after a
//! grace if none has it (another server may be about to store the service).

use super::{ADDRESSES, Allocators, MANAGED_BY, MANAGER, PORT_PREFIX, SERVICES, Taken, held, port_key};
use crate::cluster::Change;
use futures::StreamExt;
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use windlass_api::meta;
use windlass_store::{EventKind, Expect, Op, Range, Txn};

/// How long to wait before a value is looked at.
#[derive(Clone, Copy, Debug)]
pub struct Delays {
    /// How long a value may be taken before its service is stored.
    pub grace: Duration,
    /// How long a service may be stored before the value's other half is looked for.
    pub soon: Duration,
}

impl Default for Delays {
    fn default() -> Delays {
        Delays { grace: Duration::from_secs(60), soon: Duration::from_secs(2) }
    }
}

/// Between attempts to watch the store again.
const RETRY: Duration = Duration::from_secs(1);

type Owners = HashMap<Taken, BTreeSet<String>>;

/// Values with the time of the next look. At most one entry per value, so bounded by the ranges.
#[derive(Default)]
struct Schedule {
    due: Mutex<BTreeMap<Taken, Instant>>,
    changed: Notify,
}

impl Schedule {
    fn at(&self, value: Taken, after: Duration) {
        let when = Instant::now() + after;
        let mut due = self.due.lock();
        let slot = due.entry(value).or_insert(when);
        *slot = (*slot).min(when);
        drop(due);
        self.changed.notify_one();
    }

    /// The values that are due, and when the next ones are.
    fn take(&self) -> (Vec<Taken>, Option<Instant>) {
        let now = Instant::now();
        let mut due = self.due.lock();
        let ready: Vec<Taken> = due.iter().filter(|(_, when)| **when <= now).map(|(value, _)| *value).collect();
        for value in &ready {
            due.remove(value);
        }
        (ready, due.values().min().copied())
    }
}

struct State {
    allocators: Arc<Allocators>,
    /// Which services (namespace/name) have a value.
    owners: Mutex<Owners>,
    schedule: Schedule,
    delays: Delays,
}

fn parse(bytes: Option<&[u8]>) -> Option<Value> {
    serde_json::from_slice(bytes?).ok()
}

impl State {
    fn service_changed(&self, change: &Change<'_>) {
        let (old, new) = (parse(change.old), parse(change.new));
        let mut owners = self.owners.lock();
        if let Some(old) = &old {
            let name = super::owner(old);
            for value in held(old) {
                if let Some(names) = owners.get_mut(&value) {
                    names.remove(&name);
                    if names.is_empty() {
                        owners.remove(&value);
                    }
                }
                self.schedule.at(value, self.delays.soon);
            }
        }
        if let Some(new) = &new {
            let name = super::owner(new);
            for value in held(new) {
                owners.entry(value).or_default().insert(name.clone());
                // An update that changed no values is no reason to look.
                if old.is_none() || old.as_ref().is_some_and(|old| !held(old).contains(&value)) {
                    self.schedule.at(value, self.delays.soon);
                }
            }
        }
        let allocators = &self.allocators;
        let network = allocators.network;
        let inside = owners.keys().filter(|value| matches!(value, Taken::Address(one) if network.contains(*one)));
        let (used, label) = (i64::try_from(inside.count()).unwrap_or(i64::MAX), network.to_string());
        allocators.allocated.with_label_values(&[label.as_str()]).set(used);
        allocators.available.with_label_values(&[label.as_str()]).set(i64::from(network.usable()) - used);
    }

    fn address_changed(&self, change: &Change<'_>) {
        let Some(object) = parse(change.new.or(change.old)) else { return };
        if let Ok(address) = meta::name(&object).parse::<Ipv4Addr>() {
            let after = if change.new.is_some() { self.delays.grace } else { self.delays.soon };
            self.schedule.at(Taken::Address(address), after);
        }
    }

    fn owner_of(&self, value: Taken) -> Option<(String, String)> {
        let owners = self.owners.lock();
        let first = owners.get(&value)?.first()?;
        first.split_once('/').map(|(namespace, name)| (namespace.to_owned(), name.to_owned()))
    }

    /// Brings both sides of one value together.
    async fn look(&self, value: Taken) -> Result<(), String> {
        let cluster = &self.allocators.cluster;
        let owner = self.owner_of(value);
        // The cache may lag: what is to be released or taken is decided on the store's service.
        let service = match &owner {
            Some((namespace, name)) => {
                let service = cluster.get(SERVICES, namespace, name).await.map_err(|error| error.message.clone())?;
                service.filter(|service| held(service).contains(&value))
            }
            None => None,
        };
        match (value, service) {
            (Taken::Address(address), Some(service)) => {
                let known = cluster.cached(ADDRESSES, "", &address.to_string()).is_some();
                let inside = self.allocators.networks().into_iter().find(|network| network.contains(address));
                if let (false, Some(network)) = (known, inside) {
                    let created = self.allocators.create_address(address, &service, network, "static").await;
                    if created.map_err(|error| error.message.clone())? {
                        tracing::info!(%address, "took again a cluster IP that a service has");
                    }
                }
            }
            (Taken::Port(port), Some(service)) => {
                let owner = super::owner(&service);
                if self.allocators.ports.contains(port)
                    && self.allocators.claim(port, &owner).await.map_err(|error| error.to_string())?
                {
                    tracing::info!(port, owner, "took again a node port that a service has");
                }
            }
            (Taken::Address(address), None) => {
                let object = cluster.cached(ADDRESSES, "", &address.to_string());
                let ours = object.filter(|object| meta::label(object, MANAGED_BY) == Some(MANAGER));
                if ours.is_some_and(|object| old_enough(&object, self.delays.grace)) {
                    tracing::info!(%address, "released a cluster IP that no service has");
                    self.allocators.release(value).await;
                }
            }
            (Taken::Port(port), None) => {
                let found = self.allocators.store.get(&port_key(port)).await.map_err(|error| error.to_string())?;
                if let Some(entry) = found {
                    let expect = Expect::ModRevision(entry.mod_revision);
                    let txn = Txn { key: port_key(port), expect, op: Op::Delete };
                    self.allocators.store.txn(txn).await.map_err(|error| error.to_string())?;
                    tracing::info!(port, "released a node port that no service has");
                }
            }
        }
        Ok(())
    }

    /// Follows the keys of taken ports.
    async fn follow_ports(self: Arc<Self>, shutdown: CancellationToken) {
        loop {
            let followed = tokio::select! {
                followed = self.follow_once() => followed,
                () = shutdown.cancelled() => return,
            };
            if let Err(error) = followed {
                tracing::warn!(%error, "following node ports; starting again");
            }
            tokio::select! {
                () = tokio::time::sleep(RETRY) => {}
                () = shutdown.cancelled() => return,
            }
        }
    }

    async fn follow_once(&self) -> Result<(), windlass_store::Error> {
        let store = &self.allocators.store;
        let range = Range { prefix: PORT_PREFIX.to_owned(), start_after: None, limit: None, revision: None };
        let listed = store.range(range).await?;
        let port = |key: &str| key.strip_prefix(PORT_PREFIX).and_then(|port| port.parse::<u16>().ok());
        for port in listed.entries.iter().filter_map(|entry| port(&entry.key)) {
            self.schedule.at(Taken::Port(port), self.delays.grace);
        }
        let mut watch = store.watch(PORT_PREFIX, listed.revision).await?;
        while let Some(batch) = watch.next().await {
            for event in batch?.events {
                let after = match event.kind {
                    EventKind::Delete => self.delays.soon,
                    _ => self.delays.grace,
                };
                if let Some(port) = port(&event.entry.key) {
                    self.schedule.at(Taken::Port(port), after);
                }
            }
        }
        Ok(())
    }
}

/// An address that was just taken may belong to a service that is about to be stored.
fn old_enough(object: &Value, grace: Duration) -> bool {
    let created = meta::creation_timestamp(object).and_then(meta::parse_time);
    let grace = i64::try_from(grace.as_secs()).unwrap_or(i64::MAX);
    created.is_none_or(|created| jiff::Timestamp::now().as_second() - created.as_second() >= grace)
}

/// Repairs until shut down.
pub async fn run(allocators: Arc<Allocators>, delays: Delays, shutdown: CancellationToken) {
    let state = Arc::new(State {
        allocators: allocators.clone(),
        owners: Mutex::default(),
        schedule: Schedule::default(),
        delays,
    });
    let (services, addresses) = (state.clone(), state.clone());
    allocators.cluster.on_change(SERVICES, Arc::new(move |change: &Change<'_>| services.service_changed(change)));
    allocators.cluster.on_change(ADDRESSES, Arc::new(move |change: &Change<'_>| addresses.address_changed(change)));
    let ports = tokio::spawn(state.clone().follow_ports(shutdown.clone()));
    loop {
        let (ready, next) = state.schedule.take();
        for value in ready {
            if let Err(error) = state.look(value).await {
                tracing::warn!(?value, error, "repair; trying again");
                state.schedule.at(value, delays.grace);
            }
        }
        let next = next.unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
        tokio::select! {
            () = state.schedule.changed.notified() => {}
            () = tokio::time::sleep_until(next) => {}
            () = shutdown.cancelled() => break,
        }
    }
    // It ends by the same token; a failure is only its panic.
    if let Err(error) = ports.await {
        tracing::error!(%error, "following node ports ended badly");
    }
}
