//! The proxy's metrics, by upstream's names (`pkg/proxy/metrics`).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use windlass_daemon::metrics::{counter, counter_vec, exponential_buckets, float_gauge_vec, gauge, gauge_vec, histogram_vec};
use windlass_net::Family;

/// Buckets of upstream's network programming latency: quarters of a second, then every second to a minute, and so on.
fn programming_buckets() -> Vec<f64> {
    let steps = |start: f64, step: f64, count: u32| (0..count).map(move |n| start + step * f64::from(n));
    steps(0.25, 0.25, 2).chain(steps(1.0, 1.0, 59)).chain(steps(60.0, 5.0, 12)).chain(steps(120.0, 30.0, 7)).collect()
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

pub(crate) fn queued(family: Family) {
    float_gauge_vec("kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", "The last time a sync of proxy rules was queued", &["ip_family"])
        .with_label_values(&[&family.to_string()])
        .set(now());
}

pub(crate) fn synced(family: Family, full: bool, took: Duration, success: bool) {
    let family = family.to_string();
    let seconds = took.as_secs_f64();
    let buckets = exponential_buckets(0.001, 2.0, 15);
    histogram_vec("kubeproxy_sync_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds", &["ip_family"], &buckets)
        .with_label_values(&[&family])
        .observe(seconds);
    let (name, help) = if full {
        ("kubeproxy_sync_full_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds for full resyncs")
    } else {
        ("kubeproxy_sync_partial_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds for partial resyncs")
    };
    histogram_vec(name, help, &["ip_family"], &buckets).with_label_values(&[&family]).observe(seconds);
    let failures = counter_vec("kubeproxy_sync_proxy_rules_iptables_restore_failures_total", "Cumulative proxy iptables restore failures", &["ip_family"]);
    let partial = counter_vec(
        "kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total",
        "Cumulative proxy iptables partial restore failures",
        &["ip_family"],
    );
    if success {
        float_gauge_vec("kubeproxy_sync_proxy_rules_last_timestamp_seconds", "The last time proxy rules were successfully synced", &["ip_family"])
            .with_label_values(&[&family])
            .set(now());
    } else {
        failures.with_label_values(&[&family]).inc();
        if !full {
            partial.with_label_values(&[&family]).inc();
        }
    }
}

pub(crate) fn rules(family: Family, table: &str, total: usize, last: usize) {
    let labels = [table, &family.to_string()];
    let set = |name, help, value: usize| gauge_vec(name, help, &["table", "ip_family"]).with_label_values(&labels).set(i64::try_from(value).unwrap_or(i64::MAX));
    set("kubeproxy_sync_proxy_rules_iptables_total", "Total number of iptables rules owned by kube-proxy", total);
    set("kubeproxy_sync_proxy_rules_iptables_last", "Number of iptables rules written by kube-proxy in last sync", last);
}

pub(crate) fn no_local_endpoints(family: Family, internal: usize, external: usize) {
    let metric = gauge_vec(
        "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
        "Number of services with a Local traffic policy and no endpoints",
        &["traffic_policy", "ip_family"],
    );
    for (policy, count) in [("internal", internal), ("external", external)] {
        metric.with_label_values(&[policy, &family.to_string()]).set(i64::try_from(count).unwrap_or(i64::MAX));
    }
}

pub(crate) fn programmed(family: Family, latency: Duration) {
    histogram_vec(
        "kubeproxy_network_programming_duration_seconds",
        "In Cluster Network Programming Latency in seconds",
        &["ip_family"],
        &programming_buckets(),
    )
    .with_label_values(&[&family.to_string()])
    .observe(latency.as_secs_f64());
}

pub(crate) fn conntrack(family: Family, took: Duration, deleted: usize) {
    let family = family.to_string();
    histogram_vec(
        "kubeproxy_conntrack_reconciler_sync_duration_seconds",
        "ReconcileConntrackFlowsLatency latency in seconds",
        &["ip_family"],
        &exponential_buckets(0.001, 2.0, 15),
    )
    .with_label_values(&[&family])
    .observe(took.as_secs_f64());
    counter_vec("kubeproxy_conntrack_reconciler_deleted_entries_total", "Cumulative conntrack flows deleted by conntrack reconciler", &["ip_family"])
        .with_label_values(&[&family])
        .inc_by(deleted as u64);
}

/// What changed since the last sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Service,
    Endpoint,
}

pub(crate) fn changed(kind: Kind, pending: usize) {
    let (total, waiting) = match kind {
        Kind::Service => (
            counter("kubeproxy_sync_proxy_rules_service_changes_total", "Cumulative proxy rules Service changes"),
            gauge("kubeproxy_sync_proxy_rules_service_changes_pending", "Pending proxy rules Service changes"),
        ),
        Kind::Endpoint => (
            counter("kubeproxy_sync_proxy_rules_endpoint_changes_total", "Cumulative proxy rules Endpoint changes"),
            gauge("kubeproxy_sync_proxy_rules_endpoint_changes_pending", "Pending proxy rules Endpoint changes"),
        ),
    };
    if pending > 0 {
        total.inc();
    }
    waiting.set(i64::try_from(pending).unwrap_or(i64::MAX));
}
