//! `/stats/summary`: what the node and its pods use.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::cgroup::{self, Usage};
use crate::node::{eviction, machine};
use crate::pod::model;
use crate::runtime::Container;
use crate::shared::{Shared, View};

/// Rates are taken over at least this long.
const WINDOW: Duration = Duration::from_secs(10);
/// The first time, two readings are made this far apart.
const FIRST_WINDOW: Duration = Duration::from_millis(250);

#[derive(Clone, Copy)]
struct Sample {
    at: Instant,
    cpu_nanos: u64,
    /// Nanocores over the window before.
    rate: Option<u64>,
}

/// Remembers CPU readings, so that rates can be told without a loop that samples.
#[derive(Default)]
pub struct Collector {
    samples: Mutex<HashMap<String, Sample>>,
}

impl Collector {
    /// The rate of `key`, in nanocores, after one more reading.
    fn rate(&self, key: &str, cpu_nanos: u64) -> Option<u64> {
        let now = Instant::now();
        let mut samples = self.samples.lock();
        let Some(last) = samples.get(key).copied() else {
            samples.insert(key.to_owned(), Sample { at: now, cpu_nanos, rate: None });
            return None;
        };
        let elapsed = now.duration_since(last.at);
        let computed = cpu_nanos.saturating_sub(last.cpu_nanos).saturating_mul(1_000_000_000).checked_div(u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX));
        if elapsed >= WINDOW || (last.rate.is_none() && elapsed >= FIRST_WINDOW) {
            samples.insert(key.to_owned(), Sample { at: now, cpu_nanos, rate: computed });
            return computed;
        }
        last.rate
    }

    fn retain(&self, keys: &[String]) {
        self.samples.lock().retain(|k, _| keys.contains(k));
    }

    pub async fn summary(&self, shared: &Arc<Shared>, only_cpu_and_memory: bool) -> Value {
        let views: Vec<View> = shared.table.views().into_iter().filter(|v| v.sandbox().is_some()).collect();
        let fresh = self.samples.lock().is_empty();
        if fresh {
            let _ = self.collect(shared, &views, true);
            tokio::time::sleep(FIRST_WINDOW).await;
        }
        let (shared, only) = (shared.clone(), only_cpu_and_memory);
        // Reads many small files.
        let document = tokio::task::block_in_place(|| self.collect(&shared, &views, only));
        if only { document } else { self.with_disks(&shared, document, &views).await }
    }

    fn collect(&self, shared: &Shared, views: &[View], only_cpu_and_memory: bool) -> Value {
        let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default().to_string();
        let mut keys = vec!["/".to_owned()];
        let root = cgroup::root_usage();
        let mut pods = Vec::new();
        for view in views {
            let uid = model::uid(&view.pod);
            let mut containers = Vec::new();
            let mut total = Usage::default();
            for container in view.containers.iter().filter(|c| c.running()) {
                let Ok(paths) = cgroup::of_process(container.pid) else { continue };
                let usage = cgroup::usage(&paths);
                add(&mut total, &usage);
                if container.is_sandbox() {
                    continue;
                }
                keys.push(container.id.clone());
                let (cpu, memory) = self.cpu_and_memory(&container.id, &usage, &now);
                containers.push(json!({"name": container.name, "startTime": container.started_at.map(|t| t.to_string()), "cpu": cpu, "memory": memory}));
            }
            let key = format!("pod/{uid}");
            let (cpu, memory) = self.cpu_and_memory(&key, &total, &now);
            keys.push(key);
            let mut pod = json!({
                "podRef": {"name": model::name(&view.pod), "namespace": model::namespace(&view.pod), "uid": uid},
                "startTime": view.status.start_time.as_ref().map(|t| t.0.to_string()),
                "containers": containers,
                "cpu": cpu,
                "memory": memory,
                "process_stats": {"process_count": total.processes},
            });
            if !only_cpu_and_memory && !model::host_network(&view.pod) {
                pod["network"] = view.sandbox().map_or(Value::Null, |s| network(s, &now));
            }
            pods.push(pod);
        }
        let (cpu, mut memory) = self.cpu_and_memory("/", &root, &now);
        let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        memory["availableBytes"] = json!(machine::meminfo(&info, "MemAvailable"));
        self.retain(&keys);
        json!({
            "node": {"nodeName": shared.node_name, "startTime": shared.started.to_string(), "cpu": cpu, "memory": memory},
            "pods": pods,
        })
    }

    fn cpu_and_memory(&self, key: &str, usage: &Usage, now: &str) -> (Value, Value) {
        let mut cpu = json!({"time": now, "usageCoreNanoSeconds": usage.cpu_nanos});
        if let Some(rate) = self.rate(key, usage.cpu_nanos) {
            cpu["usageNanoCores"] = json!(rate);
        }
        let mut memory = json!({
            "time": now,
            "usageBytes": usage.memory,
            "workingSetBytes": usage.working_set,
            "rssBytes": usage.rss,
            "pageFaults": usage.page_faults,
            "majorPageFaults": usage.major_faults,
        });
        if usage.memory_limit > 0 {
            memory["availableBytes"] = json!(usage.memory_limit.saturating_sub(usage.working_set));
        }
        (cpu, memory)
    }

    async fn with_disks(&self, shared: &Arc<Shared>, mut document: Value, views: &[View]) -> Value {
        let now = document["node"]["cpu"]["time"].clone();
        let disk = |path: &Path| match machine::disk(path) {
            Ok(d) => json!({"time": now, "availableBytes": d.available, "capacityBytes": d.capacity, "usedBytes": d.capacity - d.available, "inodesFree": d.inodes_free, "inodes": d.inodes, "inodesUsed": d.inodes - d.inodes_free}),
            Err(_) => Value::Null,
        };
        let node = disk(&shared.config.root_dir);
        document["node"]["fs"] = node.clone();
        document["node"]["runtime"] = json!({"imageFs": disk(Path::new(&shared.info.root_dir)), "containerFs": disk(Path::new(&shared.info.root_dir))});
        document["node"]["network"] = node_network(now.as_str().unwrap_or(""));
        let limit: Option<u64> = std::fs::read_to_string("/proc/sys/kernel/pid_max").ok().and_then(|t| t.trim().parse().ok());
        let running: Option<u64> = std::fs::read_to_string("/proc/loadavg").ok().and_then(|t| t.split(' ').nth(3)?.split('/').nth(1)?.parse().ok());
        document["node"]["rlimit"] = json!({"time": now, "maxpid": limit, "curproc": running});
        let common = |used: u64| json!({"time": now, "availableBytes": node["availableBytes"], "capacityBytes": node["capacityBytes"], "usedBytes": used, "inodesFree": node["inodesFree"], "inodes": node["inodes"]});
        for (pod, view) in document["pods"].as_array_mut().into_iter().flatten().zip(views) {
            let mut total = 0;
            for entry in pod["containers"].as_array_mut().into_iter().flatten() {
                let Some(container) = view.containers.iter().find(|c| c.running() && entry["name"] == c.name.as_str()) else { continue };
                let (layer, logs) = shared.runtime.disk_usage(&container.id).await.unwrap_or_default();
                entry["rootfs"] = common(layer);
                entry["logs"] = common(logs);
                total += layer + logs;
            }
            let volumes = volumes(shared, view, &now).await;
            total += volumes.iter().filter_map(|v| v["usedBytes"].as_u64()).sum::<u64>();
            pod["volume"] = json!(volumes);
            pod["ephemeral-storage"] = common(total);
        }
        document
    }
}

fn add(total: &mut Usage, usage: &Usage) {
    total.cpu_nanos += usage.cpu_nanos;
    total.memory += usage.memory;
    total.working_set += usage.working_set;
    total.rss += usage.rss;
    total.page_faults += usage.page_faults;
    total.major_faults += usage.major_faults;
    total.processes += usage.processes;
}

async fn volumes(shared: &Arc<Shared>, view: &View, now: &Value) -> Vec<Value> {
    let dir = shared.pod_dir(model::uid(&view.pod)).join("volumes");
    let now = now.clone();
    let work = move || {
        let mut list = Vec::new();
        for plugin in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            for volume in std::fs::read_dir(plugin.path()).into_iter().flatten().flatten() {
                let used = eviction::directory_size(&volume.path());
                let disk = machine::disk(&volume.path()).unwrap_or_default();
                list.push(json!({"name": volume.file_name().to_string_lossy(), "time": now, "usedBytes": used, "capacityBytes": disk.capacity, "availableBytes": disk.available, "inodes": disk.inodes, "inodesFree": disk.inodes_free}));
            }
        }
        list
    };
    tokio::task::spawn_blocking(work).await.unwrap_or_default()
}

/// Counters of one interface: name, received bytes and errors, sent bytes and errors. Pure.
pub fn interfaces(text: &str) -> Vec<(String, [u64; 4])> {
    let parse = |line: &str| {
        let (name, rest) = line.split_once(':')?;
        let fields: Vec<u64> = rest.split_whitespace().filter_map(|f| f.parse().ok()).collect();
        Some((name.trim().to_owned(), [*fields.first()?, *fields.get(2)?, *fields.get(8)?, *fields.get(10)?]))
    };
    text.lines().skip(2).filter_map(parse).filter(|(name, _)| name != "lo").collect()
}

fn interface(name: &str, [rx, rx_errors, tx, tx_errors]: [u64; 4]) -> Value {
    json!({"name": name, "rxBytes": rx, "rxErrors": rx_errors, "txBytes": tx, "txErrors": tx_errors})
}

/// The interfaces of a running sandbox.
pub fn sandbox_interfaces(sandbox: &Container) -> Vec<(String, [u64; 4])> {
    interfaces(&std::fs::read_to_string(format!("/proc/{}/net/dev", sandbox.pid)).unwrap_or_default())
}

fn network(sandbox: &Container, now: &str) -> Value {
    document(&sandbox_interfaces(sandbox), now)
}

fn node_network(now: &str) -> Value {
    document(&interfaces(&std::fs::read_to_string("/proc/net/dev").unwrap_or_default()), now)
}

fn document(list: &[(String, [u64; 4])], now: &str) -> Value {
    let first = list.iter().find(|(n, _)| n == "eth0").or(list.first());
    let mut value = first.map_or_else(|| json!({}), |(n, c)| interface(n, *c));
    value["time"] = json!(now);
    value["interfaces"] = json!(list.iter().map(|(n, c)| interface(n, *c)).collect::<Vec<_>>());
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn net_dev() {
        let text = "Inter-|   Receive\n face |bytes\n    lo: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n  eth0: 10 2 3 0 0 0 0 0 20 4 5 0 0 0 0 0\n";
        assert_eq!(interfaces(text), [("eth0".to_owned(), [10, 3, 20, 5])]);
    }

    #[test]
    fn rates_need_two_readings() {
        let collector = Collector::default();
        assert_eq!(collector.rate("a", 0), None);
        assert_eq!(collector.rate("a", 5), None, "too soon to tell");
    }
}
