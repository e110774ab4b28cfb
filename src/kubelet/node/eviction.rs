//! Eviction: when memory or disk runs short, the node says so and ends the pods that use most beyond their share.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use windlass_api::quantity::{Format, Quantity};
use windlass_client::events::EventType;

use super::{collect, machine};
use crate::cgroup;
use crate::config::Config;
use crate::error::Error;
use crate::metrics;
use crate::pod::actor::Msg;
use crate::pod::model;
use crate::pod::status::Why;
use crate::shared::{Pressure, Shared, View};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Amount {
    Bytes(u64),
    Percent(f64),
}

impl Amount {
    /// The amount, out of `capacity`.
    pub fn of(self, capacity: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => (capacity as f64 * percent / 100.0) as u64,
        }
    }
}

/// Below `value`, `signal` is pressure.
#[derive(Clone, Debug, PartialEq)]
pub struct Threshold {
    pub signal: String,
    pub value: Amount,
}

const SIGNALS: [&str; 6] = ["memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available", "imagefs.inodesFree", "pid.available"];

/// Reads `signal<value` settings.
pub fn parse(list: &[String]) -> Result<Vec<Threshold>, Error> {
    let parse = |text: &String| {
        let fail = |reason: &str| Error::Config { field: "eviction-hard", value: text.clone(), reason: reason.to_owned() };
        let (signal, value) = text.split_once('<').ok_or_else(|| fail("write it as signal<value"))?;
        if !SIGNALS.contains(&signal) {
            return Err(fail(&format!("the signal is not one of {}", SIGNALS.join(", "))));
        }
        let value = match value.strip_suffix('%') {
            Some(percent) => Amount::Percent(percent.parse::<f64>().ok().filter(|p| (0.0..=100.0).contains(p)).ok_or_else(|| fail("not a percentage"))?),
            None => Amount::Bytes(value.parse::<Quantity>().ok().and_then(|q| u64::try_from(q.value()).ok()).ok_or_else(|| fail("the quantity cannot be read"))?),
        };
        Ok(Threshold { signal: signal.to_owned(), value })
    };
    list.iter().filter(|t| !t.is_empty()).map(parse).collect()
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    pub available: u64,
    pub capacity: u64,
}

/// The thresholds that are met. Pure.
pub fn met<'a>(thresholds: &'a [Threshold], readings: &HashMap<&str, Reading>) -> Vec<&'a Threshold> {
    thresholds.iter().filter(|t| readings.get(t.signal.as_str()).is_some_and(|r| r.available < t.value.of(r.capacity))).collect()
}

/// One pod, as it is ranked.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub uid: String,
    pub priority: i32,
    pub usage: u64,
    pub request: u64,
}

/// Whom to evict first, as upstream: those over their request, then low priority, then the most over the request. Pure.
pub fn rank(mut pods: Vec<Candidate>) -> Vec<Candidate> {
    let over = |c: &Candidate| i128::from(c.usage) - i128::from(c.request);
    pods.sort_by(|a, b| (over(b) > 0).cmp(&(over(a) > 0)).then(a.priority.cmp(&b.priority)).then(over(b).cmp(&over(a))));
    pods
}

pub struct Manager {
    thresholds: Vec<Threshold>,
    transition: Duration,
    seen: HashMap<&'static str, Instant>,
}

impl Manager {
    pub fn new(config: &Config) -> Self {
        // The configuration was checked at the start.
        let thresholds = parse(&config.eviction_hard).unwrap_or_default();
        Self { thresholds, transition: Duration::from_secs(config.eviction_pressure_transition_period), seen: HashMap::new() }
    }

    /// Looks at the machine, sets the node's pressure, reclaims, and evicts at most one pod.
    pub async fn tick(&mut self, shared: &Arc<Shared>) {
        local_limits(shared).await;
        let readings = readings(shared);
        let met: Vec<Threshold> = met(&self.thresholds, &readings).into_iter().cloned().collect();
        for threshold in &met {
            self.seen.insert(condition(&threshold.signal), Instant::now());
        }
        let on = |kind: &str| self.seen.get(kind).is_some_and(|at| at.elapsed() < self.transition);
        let pressure = Pressure { memory: on("memory"), disk: on("disk"), pid: on("pid") };
        let before = std::mem::replace(&mut *shared.pressure.write(), pressure);
        if before != pressure {
            shared.node_changed.notify_one();
        }
        let Some(threshold) = met.first() else { return };
        let reading = readings.get(threshold.signal.as_str()).copied().unwrap_or_default();
        shared.node_event(EventType::Warning, "EvictionThresholdMet", format!("Attempting to reclaim {}", resource(&threshold.signal)));
        if condition(&threshold.signal) == "disk" {
            collect::dead_containers(shared).await;
            collect::all_unused_images(shared).await;
            if met_now(threshold, shared) {
                evict_one(shared, threshold, reading).await;
            }
        } else {
            evict_one(shared, threshold, reading).await;
        }
    }
}

fn met_now(threshold: &Threshold, shared: &Shared) -> bool {
    !met(std::slice::from_ref(threshold), &readings(shared)).is_empty()
}

fn condition(signal: &str) -> &'static str {
    match signal {
        "memory.available" => "memory",
        "pid.available" => "pid",
        _ => "disk",
    }
}

fn resource(signal: &str) -> &'static str {
    match signal {
        "memory.available" => "memory",
        "pid.available" => "pids",
        "nodefs.inodesFree" | "imagefs.inodesFree" => "inodes",
        _ => "ephemeral-storage",
    }
}

fn readings(shared: &Shared) -> HashMap<&'static str, Reading> {
    let mut map = HashMap::new();
    let memory = u64::try_from(shared.machine.memory).unwrap_or(0);
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    if let Some(available) = machine::meminfo(&info, "MemAvailable") {
        map.insert("memory.available", Reading { available, capacity: memory });
    }
    for (space, inodes, path) in [("nodefs.available", "nodefs.inodesFree", shared.config.root_dir.clone()), ("imagefs.available", "imagefs.inodesFree", PathBuf::from(&shared.info.root_dir))] {
        if let Ok(disk) = machine::disk(&path) {
            map.insert(space, Reading { available: disk.available, capacity: disk.capacity });
            if disk.inodes > 0 {
                map.insert(inodes, Reading { available: disk.inodes_free, capacity: disk.inodes });
            }
        }
    }
    let max: Option<u64> = std::fs::read_to_string("/proc/sys/kernel/pid_max").ok().and_then(|t| t.trim().parse().ok());
    let running: Option<u64> = std::fs::read_to_string("/proc/loadavg").ok().and_then(|t| t.split(' ').nth(3)?.split('/').nth(1)?.parse().ok());
    if let (Some(max), Some(running)) = (max, running) {
        map.insert("pid.available", Reading { available: max.saturating_sub(running), capacity: max });
    }
    map
}

fn usage_of(shared: &Shared, view: &View, kind: &str) -> u64 {
    match kind {
        "memory" => cgroup::usage(&cgroup::of_path(&shared.cgroup_parent(&view.pod))).working_set,
        "pid" => cgroup::usage(&cgroup::of_path(&shared.cgroup_parent(&view.pod))).processes,
        _ => directory_size(&shared.pod_dir(model::uid(&view.pod))),
    }
}

/// Bytes in the files below `path`; other file systems mounted below it do not count.
pub fn directory_size(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(root) = std::fs::symlink_metadata(path) else { return 0 };
    let mut sum = 0;
    let mut pending = vec![path.to_owned()];
    while let Some(dir) = pending.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let Ok(meta) = entry.metadata() else { continue };
            if meta.dev() != root.dev() {
                continue;
            }
            sum += meta.blocks() * 512;
            if meta.is_dir() {
                pending.push(entry.path());
            }
        }
    }
    sum
}

async fn evict_one(shared: &Arc<Shared>, threshold: &Threshold, reading: Reading) {
    let kind = condition(&threshold.signal);
    let name = resource(&threshold.signal);
    let views: Vec<View> = shared.table.views().into_iter().filter(|v| !v.terminated && !v.rejected && !model::is_critical(&v.pod) && v.pod.metadata.deletion_timestamp.is_none() && v.sandbox().is_some()).collect();
    let candidates = views
        .iter()
        .map(|v| Candidate {
            uid: model::uid(&v.pod).to_owned(),
            priority: model::spec(&v.pod).priority.unwrap_or(0),
            usage: usage_of(shared, v, kind),
            request: u64::try_from(model::pod_request(&v.pod, name)).unwrap_or(0),
        })
        .collect();
    let Some(first) = rank(candidates).into_iter().next() else { return };
    let Some(view) = views.iter().find(|v| model::uid(&v.pod) == first.uid) else { return };
    let format = |bytes: u64| Quantity::from_value(i64::try_from(bytes).unwrap_or(i64::MAX), Format::BinarySi).to_string();
    let mut message = format!("The node was low on resource: {name}. Threshold quantity: {}, available: {}. ", format(threshold.value.of(reading.capacity)), format(reading.available / 1024 * 1024));
    if first.usage > first.request {
        let container = model::containers(&view.pod).first().map_or("", |c| c.name.as_str());
        message.push_str(&format!("Container {container} was using {}, request is {}, has larger consumption of {name}. ", format(first.usage / 1024 * 1024), format(first.request)));
    }
    evict(shared, view, message, &threshold.signal, 0).await;
}

async fn evict(shared: &Arc<Shared>, view: &View, message: String, signal: &str, grace: i64) {
    metrics::EVICTIONS.with_label_values(&[signal]).inc();
    shared.event(&view.pod, None, EventType::Warning, "Evicted", message.clone());
    tracing::info!(pod = model::describe(&view.pod), message, "evicting");
    if let Some(handle) = shared.table.get(model::uid(&view.pod)) {
        let disruption = Some(Why::new("TerminationByKubelet", message.clone()));
        let _ = handle.mailbox.send(Msg::Fail { why: Why::new("Evicted", message), grace: Some(grace.max(1)), disruption }).await;
    }
}

/// Pods that use more local storage than their own limits allow.
async fn local_limits(shared: &Arc<Shared>) {
    for view in shared.table.views().into_iter().filter(|v| !v.terminated && !v.rejected) {
        if let Some(message) = over_limit(shared, &view).await {
            evict(shared, &view, message, "ephemeralpodfs.limit", 0).await;
        }
    }
}

async fn over_limit(shared: &Arc<Shared>, view: &View) -> Option<String> {
    let pod = &view.pod;
    for volume in model::spec(pod).volumes.iter().flatten() {
        let Some(source) = volume.empty_dir.as_ref().filter(|e| e.medium.as_deref().unwrap_or("").is_empty()) else { continue };
        let Some(limit) = &source.size_limit else { continue };
        let bytes = limit.0.parse::<Quantity>().map_or(0, |q| q.value());
        let path = shared.pod_dir(model::uid(pod)).join("volumes/kubernetes.io~empty-dir").join(&volume.name);
        let used = tokio::task::spawn_blocking(move || directory_size(&path)).await.unwrap_or(0);
        if bytes > 0 && i64::try_from(used).unwrap_or(i64::MAX) > bytes {
            return Some(format!("Usage of EmptyDir volume \"{}\" exceeds the limit \"{}\". ", volume.name, limit.0));
        }
    }
    for spec in model::containers(pod) {
        let Some(limit) = model::limit(spec, "ephemeral-storage").filter(|q| !q.is_zero()) else { continue };
        let Some(container) = view.containers.iter().find(|c| c.name == spec.name && c.running()) else { continue };
        let (layer, logs) = shared.runtime.disk_usage(&container.id).await.unwrap_or_default();
        if i64::try_from(layer + logs).unwrap_or(i64::MAX) > limit.value() {
            return Some(format!("Container {} exceeded its local ephemeral storage limit \"{limit}\". ", spec.name));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds() {
        let list = |l: &[&str]| parse(&l.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>());
        let parsed = list(&["memory.available<100Mi", "nodefs.available<10%"]).expect("parses");
        assert_eq!(parsed[0].value, Amount::Bytes(100 << 20));
        assert_eq!(parsed[1].value.of(1000), 100);
        for bad in ["memory.available", "nope<1", "nodefs.available<101%", "memory.available<x"] {
            assert!(list(&[bad]).is_err(), "{bad}");
        }
        let readings = HashMap::from([("memory.available", Reading { available: 99 << 20, capacity: 1 << 30 }), ("nodefs.available", Reading { available: 100, capacity: 1000 })]);
        let names: Vec<&str> = met(&parsed, &readings).iter().map(|t| t.signal.as_str()).collect();
        assert_eq!(names, ["memory.available"]);
    }

    #[test]
    fn ranking() {
        let pod = |uid: &str, priority, usage, request| Candidate { uid: uid.into(), priority, usage, request };
        let order = rank(vec![pod("within", 0, 10, 20), pod("important", 9, 90, 0), pod("little", 0, 30, 20), pod("much", 0, 80, 20)]);
        let names: Vec<&str> = order.iter().map(|c| c.uid.as_str()).collect();
        assert_eq!(names, ["much", "little", "important", "within"]);
    }
}
