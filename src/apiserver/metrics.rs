//! Metrics under upstream's names (`apiserver/pkg/endpoints/metrics`, `pkg/storage/cacher/metrics`).
//!
//! Every metric here is set by the pipeline; label values come from the registry, never from what a client made up,
//! so that their number is bounded.

use std::sync::LazyLock;
use std::time::Duration;

use prometheus::{HistogramVec, IntCounter, IntCounterVec, IntGaugeVec};
use windlass_daemon::metrics::{counter, counter_vec, gauge_vec, histogram_vec};

const COMPONENT: &str = "apiserver";
const DURATION_BUCKETS: &[f64] =
    &[0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0];

static REQUESTS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counter_vec(
        "apiserver_request_total",
        "Counter of apiserver requests broken out for each verb, dry run value, group, version, resource, scope, component, and HTTP response code.",
        &["verb", "dry_run", "group", "version", "resource", "subresource", "scope", "component", "code"],
    )
});
static DURATION: LazyLock<HistogramVec> = LazyLock::new(|| {
    histogram_vec(
        "apiserver_request_duration_seconds",
        "Response latency distribution in seconds for each verb, dry run value, group, version, resource, subresource, scope and component.",
        &["verb", "dry_run", "group", "version", "resource", "subresource", "scope", "component"],
        DURATION_BUCKETS,
    )
});
static SIZES: LazyLock<HistogramVec> = LazyLock::new(|| {
    histogram_vec(
        "apiserver_response_sizes",
        "Response size distribution in bytes for each group, version, verb, resource, subresource, scope and component.",
        &["verb", "group", "version", "resource", "subresource", "scope", "component"],
        &[1000.0, 10_000.0, 100_000.0, 1e6, 1e7, 1e8, 1e9],
    )
});
static INFLIGHT: LazyLock<IntGaugeVec> = LazyLock::new(|| {
    gauge_vec(
        "apiserver_current_inflight_requests",
        "Maximal number of currently used inflight request limit of this apiserver per request kind in last second.",
        &["request_kind"],
    )
});
static LONG_RUNNING: LazyLock<IntGaugeVec> = LazyLock::new(|| {
    gauge_vec(
        "apiserver_longrunning_requests",
        "Gauge of all active long-running apiserver requests broken out by verb, group, version, resource, scope and component. Not all requests are tracked this way.",
        &["verb", "group", "version", "resource", "subresource", "scope", "component"],
    )
});
static WATCH_EVENTS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counter_vec("apiserver_watch_events_total", "Number of events sent in watch clients", &["group", "version", "resource"])
});
static WATCH_SIZES: LazyLock<HistogramVec> = LazyLock::new(|| {
    histogram_vec(
        "apiserver_watch_events_sizes",
        "Watch event size distribution in bytes",
        &["group", "version", "resource"],
        &[1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131_072.0],
    )
});
static TERMINATIONS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counter_vec(
        "apiserver_request_terminations_total",
        "Number of requests which apiserver terminated in self-defense.",
        &["verb", "group", "version", "resource", "subresource", "scope", "component", "code"],
    )
});
static CUT_WATCHERS: LazyLock<IntCounter> = LazyLock::new(|| {
    counter("apiserver_terminated_watchers_total", "Counter of watchers closed due to unresponsiveness.")
});
static DEPRECATED: LazyLock<IntGaugeVec> = LazyLock::new(|| {
    gauge_vec(
        "apiserver_requested_deprecated_apis",
        "Gauge of deprecated APIs that have been requested, broken out by API group, version, resource, subresource, and removed_release.",
        &["group", "version", "resource", "subresource", "removed_release"],
    )
});
static OBJECTS: LazyLock<IntGaugeVec> = LazyLock::new(|| {
    gauge_vec("apiserver_storage_objects", "Number of stored objects at the time of last check split by kind.", &["resource"])
});
static OBJECTS_BY_GROUP: LazyLock<IntGaugeVec> = LazyLock::new(|| {
    gauge_vec("apiserver_resource_objects", "Number of stored objects at the time of last check split by kind.", &["group", "resource"])
});
static CACHE_BYTES: LazyLock<IntGaugeVec> = LazyLock::new(|| {
    gauge_vec("windlass_watch_cache_bytes", "Bytes of the objects in the watch cache, by resource.", &["group", "resource"])
});
static CACHE_EVENTS: LazyLock<IntCounterVec> = LazyLock::new(|| {
    counter_vec("apiserver_watch_cache_events_received_total", "Counter of events received in watch cache broken by resource type.", &["group", "resource"])
});
static CACHE_CAPACITY: LazyLock<IntGaugeVec> = LazyLock::new(|| {
    gauge_vec("apiserver_watch_cache_capacity", "Total capacity of watch cache broken by resource type.", &["group", "resource"])
});
static CACHE_REVISION: LazyLock<IntGaugeVec> = LazyLock::new(|| {
    gauge_vec("apiserver_watch_cache_resource_version", "Current resource version of watch cache broken by resource type.", &["group", "resource"])
});
static WATCHERS: LazyLock<IntGaugeVec> = LazyLock::new(|| {
    gauge_vec("apiserver_registered_watchers", "Number of currently registered watchers for a given resource", &["group", "version", "resource"])
});

/// A request's labels, all of them known to the registry.
#[derive(Clone, Debug, Default)]
pub struct Labels {
    pub verb: &'static str,
    pub dry_run: &'static str,
    pub group: String,
    pub version: String,
    pub resource: String,
    pub subresource: String,
    /// `cluster`, `namespace`, `resource`, or empty for what is no resource.
    pub scope: &'static str,
}

/// Upstream's name of a verb in metrics.
pub fn verb_label(verb: &str) -> &'static str {
    match verb {
        "get" => "GET",
        "list" => "LIST",
        "watch" => "WATCH",
        "create" | "post" => "POST",
        "update" | "put" => "PUT",
        "patch" => "PATCH",
        "apply" => "APPLY",
        "delete" => "DELETE",
        "deletecollection" => "DELETECOLLECTION",
        "connect" => "CONNECT",
        "head" => "GET",
        _ => "other",
    }
}

impl Labels {
    /// A finished request.
    pub fn finished(&self, code: u16, took: Duration, size: Option<u64>) {
        let l = self;
        REQUESTS
            .with_label_values(&[l.verb, l.dry_run, &l.group, &l.version, &l.resource, &l.subresource, l.scope, COMPONENT, status_text(code)])
            .inc();
        DURATION
            .with_label_values(&[l.verb, l.dry_run, &l.group, &l.version, &l.resource, &l.subresource, l.scope, COMPONENT])
            .observe(took.as_secs_f64());
        if let (Some(size), "GET" | "LIST") = (size, l.verb) {
            SIZES.with_label_values(&[l.verb, &l.group, &l.version, &l.resource, &l.subresource, l.scope, COMPONENT]).observe(size as f64);
        }
    }

    /// A request that was refused to protect the server.
    pub fn terminated(&self, code: u16) {
        let l = self;
        TERMINATIONS
            .with_label_values(&[l.verb, &l.group, &l.version, &l.resource, &l.subresource, l.scope, COMPONENT, status_text(code)])
            .inc();
    }

    /// Counts a long-running request for as long as the guard lives.
    pub fn long_running(&self) -> Counted {
        let l = self;
        Counted::new(LONG_RUNNING.with_label_values(&[l.verb, &l.group, &l.version, &l.resource, &l.subresource, l.scope, COMPONENT]))
    }
}

/// Status codes as label values, without an allocation for those that occur.
fn status_text(code: u16) -> &'static str {
    match code {
        101 => "101",
        200 => "200",
        201 => "201",
        202 => "202",
        204 => "204",
        304 => "304",
        400 => "400",
        401 => "401",
        403 => "403",
        404 => "404",
        405 => "405",
        406 => "406",
        409 => "409",
        410 => "410",
        413 => "413",
        415 => "415",
        422 => "422",
        429 => "429",
        500 => "500",
        501 => "501",
        502 => "502",
        503 => "503",
        504 => "504",
        _ => "other",
    }
}

/// Holds a gauge up by one.
pub struct Counted(prometheus::IntGauge);

impl Counted {
    fn new(gauge: prometheus::IntGauge) -> Counted {
        gauge.inc();
        Counted(gauge)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// A request that is being worked on.
pub fn in_flight(mutating: bool) -> Counted {
    Counted::new(INFLIGHT.with_label_values(&[if mutating { "mutating" } else { "readOnly" }]))
}

/// A watch event counter with its labels looked up once per watch.
pub struct WatchCounter(IntCounter, prometheus::Histogram, #[expect(dead_code, reason = "counts while it lives")] Counted);

pub fn watch_counter(group: &str, version: &str, resource: &str) -> WatchCounter {
    WatchCounter(
        WATCH_EVENTS.with_label_values(&[group, version, resource]),
        WATCH_SIZES.with_label_values(&[group, version, resource]),
        Counted::new(WATCHERS.with_label_values(&[group, version, resource])),
    )
}

impl WatchCounter {
    pub fn sent(&self, bytes: usize) {
        self.0.inc();
        self.1.observe(bytes as f64);
    }
}

/// A watcher was cut off because it was too slow.
pub fn terminated_watcher() {
    CUT_WATCHERS.inc();
}

/// A deprecated version was asked for.
pub fn deprecated(group: &str, version: &str, resource: &str, subresource: &str) {
    DEPRECATED.with_label_values(&[group, version, resource, subresource, ""]).set(1);
}

/// Counts the changes that come into a cache.
pub fn cache_events(group: &str, resource: &str) -> IntCounter {
    CACHE_EVENTS.with_label_values(&[group, resource])
}

/// Reads the caches' sizes into the gauges; called when metrics are scraped.
pub(crate) fn observe_caches(caches: &[std::sync::Arc<crate::cache::ResourceCache>], revision: u64) {
    for cache in caches {
        let resource = cache.resource.read().clone();
        let count = i64::try_from(cache.len()).unwrap_or(i64::MAX);
        let labels = [resource.group.as_str(), resource.plural.as_str()];
        OBJECTS.with_label_values(&[&resource.gr()]).set(count);
        OBJECTS_BY_GROUP.with_label_values(&labels).set(count);
        CACHE_BYTES.with_label_values(&labels).set(i64::try_from(cache.bytes()).unwrap_or(i64::MAX));
        CACHE_CAPACITY.with_label_values(&labels).set(i64::try_from(cache.history()).unwrap_or(i64::MAX));
        CACHE_REVISION.with_label_values(&labels).set(i64::try_from(revision).unwrap_or(i64::MAX));
    }
}
