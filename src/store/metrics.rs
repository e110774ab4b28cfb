//! Metrics under upstream's names (`k8s.io/apiserver/pkg/storage/etcd3/metrics`), and under etcd's for what an etcd server
//! would tell, so that dashboards and alerts made for both go on working. Ours begin with `windlass_store_`.

use std::collections::HashMap;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus::core::Collector;
use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, exponential_buckets,
};

use crate::{Batch, Error, Expect, Op, Result, Txn};

/// Upstream's buckets of `etcd_request_duration_seconds`.
const LATENCY: &[f64] = &[
    0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0,
    45.0, 60.0,
];

/// Resources that get a label of their own; beyond that many, keys of anything count as one.
const MAX_RESOURCES: usize = 1000;

struct Families {
    latency: HistogramVec,
    requests: IntCounterVec,
    errors: IntCounterVec,
    size: IntGaugeVec,
    events: IntCounterVec,
    bookmarks: IntCounterVec,
    commit: Histogram,
    batch: Histogram,
    db_size: IntGauge,
    puts: IntCounter,
    deletes: IntCounter,
    compacted: IntGauge,
    sweep: Histogram,
    watchers: IntGauge,
    slow: IntCounter,
    backlog: IntGaugeVec,
    queue: IntGauge,
    lease_objects: Histogram,
}

static FAMILIES: LazyLock<Families> = LazyLock::new(Families::register);

/// Metrics are made of literals; a name that is taken in the process is exported by whoever came first.
fn register<C: Collector + Clone + 'static>(made: prometheus::Result<C>) -> C {
    let metric = made.unwrap_or_else(|error| panic!("a metric of the store is malformed: {error}"));
    if let Err(error) = prometheus::default_registry().register(Box::new(metric.clone())) {
        tracing::warn!(%error, "a metric of the store is not exported");
    }
    metric
}

fn counters(name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    register(IntCounterVec::new(Opts::new(name, help), labels))
}

fn counter(name: &str, help: &str) -> IntCounter {
    register(IntCounter::new(name, help))
}

fn gauge(name: &str, help: &str) -> IntGauge {
    register(IntGauge::new(name, help))
}

fn gauges(name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
    register(IntGaugeVec::new(Opts::new(name, help), labels))
}

fn histogram(name: &str, help: &str, buckets: prometheus::Result<Vec<f64>>) -> Histogram {
    register(buckets.and_then(|b| Histogram::with_opts(HistogramOpts::new(name, help).buckets(b))))
}

impl Families {
    fn register() -> Self {
        let resource = &["group", "resource"][..];
        let operation = &["operation", "group", "resource"][..];
        Self {
            latency: register(HistogramVec::new(
                HistogramOpts::new(
                    "etcd_request_duration_seconds",
                    "Etcd request latency in seconds for each operation and object type.",
                )
                .buckets(LATENCY.to_vec()),
                operation,
            )),
            requests: counters(
                "etcd_requests_total",
                "Etcd request counts for each operation and object type.",
                operation,
            ),
            errors: counters(
                "etcd_request_errors_total",
                "Etcd failed request counts for each operation and object type.",
                operation,
            ),
            size: gauges(
                "apiserver_storage_size_bytes",
                "Size of the storage database file physically allocated in bytes.",
                &["storage_cluster_id"],
            ),
            events: counters(
                "apiserver_storage_events_received_total",
                "Number of etcd events received split by kind.",
                resource,
            ),
            bookmarks: counters(
                "etcd_bookmark_total",
                "Number of etcd bookmarks (progress notify events) split by kind.",
                resource,
            ),
            commit: histogram(
                "etcd_disk_backend_commit_duration_seconds",
                "The latency distributions of commit called by backend.",
                exponential_buckets(0.001, 2.0, 14),
            ),
            batch: histogram(
                "windlass_store_commit_writes",
                "Writes made durable by one commit.",
                exponential_buckets(1.0, 2.0, 11),
            ),
            db_size: gauge(
                "etcd_mvcc_db_total_size_in_bytes",
                "Total size of the underlying database physically allocated in bytes.",
            ),
            puts: counter("etcd_mvcc_put_total", "Total number of puts seen by this member."),
            deletes: counter("etcd_mvcc_delete_total", "Total number of deletes seen by this member."),
            compacted: gauge(
                "etcd_debugging_mvcc_compact_revision",
                "The revision of the last compaction in store.",
            ),
            sweep: histogram(
                "windlass_store_sweep_duration_seconds",
                "Duration of one step of removing compacted history.",
                exponential_buckets(0.001, 2.0, 14),
            ),
            watchers: gauge("etcd_debugging_mvcc_watcher_total", "Total number of watchers."),
            slow: counter("windlass_store_slow_watchers_total", "Watches that were cut off because they were too slow."),
            backlog: gauges(
                "windlass_store_watch_backlog_events",
                "Events that wait in the queue of a watch.",
                resource,
            ),
            queue: gauge(
                "windlass_store_write_queue_kibibytes",
                "Writes that wait for the writer or for its commit, in KiB; the bound is 65536.",
            ),
            lease_objects: histogram(
                "etcd_lease_object_counts",
                "Number of objects attached to a single etcd lease.",
                Ok(vec![10.0, 50.0, 100.0, 500.0, 1000.0, 2500.0, 5000.0]),
            ),
        }
    }
}

/// When an operation began.
pub(crate) struct Timer(Instant);

impl Timer {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }
}

/// Upstream's name of a write: `create`, `update` or `delete`.
pub(crate) fn operation(txn: &Txn) -> &'static str {
    match (&txn.op, txn.expect) {
        (Op::Delete, _) => "delete",
        (Op::Put { .. }, Expect::Absent) => "create",
        (Op::Put { .. }, _) => "update",
    }
}

/// The metrics of one store.
pub(crate) struct Metrics {
    backend: &'static str,
    size: IntGauge,
    /// By operation and resource prefix of the key: the three series of a request.
    requests: Mutex<HashMap<(&'static str, String), Series>>,
    /// By resource and group: events that watches received.
    events: Mutex<HashMap<String, HashMap<String, IntCounter>>>,
}

#[derive(Clone)]
struct Series {
    latency: Histogram,
    requests: IntCounter,
    errors: IntCounter,
}

// === impl Metrics ===

impl Metrics {
    pub(crate) fn new(backend: &'static str, cluster: &str) -> Self {
        Self { backend, size: FAMILIES.size.with_label_values(&[cluster]), requests: Mutex::default(), events: Mutex::default() }
    }

    /// Counts a request and passes its result on. A conflict is a result, not an error.
    pub(crate) fn request<T>(&self, operation: &'static str, key: &str, timer: Timer, result: Result<T>) -> Result<T> {
        let series = self.series(operation, key);
        series.latency.observe(timer.0.elapsed().as_secs_f64());
        series.requests.inc();
        if let Err(error) = &result {
            series.errors.inc();
            if matches!(error, Error::Damaged { .. }) {
                tracing::error!(%error, backend = self.backend, operation, "the store cannot be trusted");
            }
        }
        result
    }

    fn series(&self, operation: &'static str, key: &str) -> Series {
        let (group, resource) = resource(key);
        let place = match group.is_empty() {
            true => resource.to_owned(),
            false => format!("{group}/{resource}"),
        };
        let mut known = self.requests.lock();
        if let Some(series) = known.get(&(operation, place.clone())) {
            return series.clone();
        }
        let (group, resource) = if known.len() < MAX_RESOURCES { (group, resource) } else { ("", "other") };
        let labels = [operation, group, resource];
        let series = Series {
            latency: FAMILIES.latency.with_label_values(&labels),
            requests: FAMILIES.requests.with_label_values(&labels),
            errors: FAMILIES.errors.with_label_values(&labels),
        };
        if known.len() < MAX_RESOURCES {
            known.insert((operation, place), series.clone());
        }
        series
    }

    pub(crate) fn size(&self, bytes: u64) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.size.set(bytes);
        if self.backend == "embedded" {
            FAMILIES.db_size.set(bytes);
        }
    }

    pub(crate) fn committed(&self, took: Duration, writes: usize, bytes: u64) {
        FAMILIES.commit.observe(took.as_secs_f64());
        // Lossless up to 2^53.
        FAMILIES.batch.observe(writes as f64);
        self.size(bytes);
    }

    pub(crate) fn wrote(&self, puts: u64, deletes: u64) {
        FAMILIES.puts.inc_by(puts);
        FAMILIES.deletes.inc_by(deletes);
    }

    pub(crate) fn compacted(&self, revision: u64) {
        FAMILIES.compacted.set(i64::try_from(revision).unwrap_or(i64::MAX));
    }

    pub(crate) fn swept(&self, took: Duration) {
        FAMILIES.sweep.observe(took.as_secs_f64());
    }

    pub(crate) fn watchers(&self, count: usize) {
        FAMILIES.watchers.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(crate) fn slow_watcher(&self) {
        FAMILIES.slow.inc();
    }

    pub(crate) fn watch_backlog(&self, prefix: &str, events: usize) {
        let (group, resource) = resource(prefix);
        FAMILIES.backlog.with_label_values(&[group, resource]).set(i64::try_from(events).unwrap_or(i64::MAX));
    }

    pub(crate) fn queue(&self, kibibytes: usize) {
        FAMILIES.queue.set(i64::try_from(kibibytes).unwrap_or(i64::MAX));
    }

    /// What a watch of `prefix` received: events by the resource of their keys, or progress.
    pub(crate) fn received(&self, prefix: &str, batch: &Batch) {
        if batch.events.is_empty() {
            let (group, resource) = resource(prefix);
            FAMILIES.bookmarks.with_label_values(&[group, resource]).inc();
            return;
        }
        let mut known = self.events.lock();
        for event in &batch.events {
            let (group, resource) = resource(&event.entry.key);
            if let Some(counter) = known.get(resource).and_then(|groups| groups.get(group)) {
                counter.inc();
                continue;
            }
            match known.len() < MAX_RESOURCES {
                true => {
                    let counter = FAMILIES.events.with_label_values(&[group, resource]);
                    counter.inc();
                    known.entry(resource.to_owned()).or_default().insert(group.to_owned(), counter);
                }
                false => FAMILIES.events.with_label_values(&["", "other"]).inc(),
            }
        }
    }

    pub(crate) fn lease_closed(&self, objects: u64) {
        FAMILIES.lease_objects.observe(objects as f64);
    }
}

/// The group and resource that a key or prefix of the form `/registry/RESOURCE/...` or `/registry/GROUP/RESOURCE/...` names:
/// a group is told by its dot.
fn resource(key: &str) -> (&str, &str) {
    let mut parts = key.split('/').filter(|part| !part.is_empty()).skip(1);
    match (parts.next(), parts.next()) {
        (Some(group), Some(resource)) if group.contains('.') => (group, resource),
        (Some(resource), _) => ("", resource),
        (None, _) => ("", ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_name_resources() {
        for (key, want) in [
            ("/registry/pods/default/web", ("", "pods")),
            ("/registry/pods/", ("", "pods")),
            ("/registry/example.com/widgets/a/b", ("example.com", "widgets")),
            ("/registry/", ("", "")),
            ("", ("", "")),
        ] {
            assert_eq!(resource(key), want, "{key}");
        }
    }
}
