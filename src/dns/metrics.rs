//! Metrics by CoreDNS' names, for the dashboards and alerts that exist.

use std::net::SocketAddr;
use std::time::Duration;

use hickory_server::net::xfer::Protocol;
use hickory_server::proto::op::ResponseCode;
use hickory_server::proto::rr::RecordType;
use windlass_daemon::metrics::{DEFAULT_BUCKETS, counter, counter_vec, exponential_buckets, gauge_vec, histogram_vec};

const SERVER: &str = "dns://:53";

/// The code as CoreDNS writes it.
pub fn rcode(code: ResponseCode) -> &'static str {
    match code {
        ResponseCode::NoError => "NOERROR",
        ResponseCode::FormErr => "FORMERR",
        ResponseCode::ServFail => "SERVFAIL",
        ResponseCode::NXDomain => "NXDOMAIN",
        ResponseCode::NotImp => "NOTIMP",
        ResponseCode::Refused => "REFUSED",
        ResponseCode::BADVERS => "BADVERS",
        _ => "other",
    }
}

/// A finished request.
pub(crate) struct Done<'a> {
    pub zone: &'a str,
    pub plugin: &'static str,
    pub protocol: Protocol,
    pub source: SocketAddr,
    pub kind: RecordType,
    pub code: ResponseCode,
    pub took: Duration,
    pub request_bytes: usize,
}

pub(crate) fn done(done: &Done<'_>) {
    let protocol = if done.protocol == Protocol::Udp { "udp" } else { "tcp" };
    let family = if done.source.is_ipv4() { "1" } else { "2" };
    let kind = match done.kind {
        RecordType::Unknown(_) => "other".to_owned(),
        known => known.to_string(),
    };
    counter_vec("coredns_dns_requests_total", "Counter of DNS requests made per zone, protocol and family.", &["server", "zone", "view", "proto", "family", "type"])
        .with_label_values(&[SERVER, done.zone, "", protocol, family, &kind])
        .inc();
    counter_vec("coredns_dns_responses_total", "Counter of response status codes.", &["server", "zone", "view", "rcode", "plugin"])
        .with_label_values(&[SERVER, done.zone, "", rcode(done.code), done.plugin])
        .inc();
    histogram_vec(
        "coredns_dns_request_duration_seconds",
        "Histogram of the time (in seconds) each request took per zone.",
        &["server", "zone", "view"],
        &exponential_buckets(0.000_25, 2.0, 16),
    )
    .with_label_values(&[SERVER, done.zone, ""])
    .observe(done.took.as_secs_f64());
    histogram_vec(
        "coredns_dns_request_size_bytes",
        "Size of the EDNS0 UDP buffer in bytes (64K for TCP) per zone and protocol.",
        &["server", "zone", "view", "proto"],
        &[0.0, 100.0, 200.0, 300.0, 400.0, 511.0, 1023.0, 2047.0, 4095.0, 8291.0, 16_000.0, 32_000.0, 48_000.0, 64_000.0],
    )
    .with_label_values(&[SERVER, done.zone, "", protocol])
    .observe(done.request_bytes as f64);
}

pub(crate) fn cache_hit(negative: bool) {
    counter_vec("coredns_cache_hits_total", "The count of cache hits.", &["server", "type"])
        .with_label_values(&[SERVER, if negative { "denial" } else { "success" }])
        .inc();
}

pub(crate) fn cache_miss() {
    counter_vec("coredns_cache_misses_total", "The count of cache misses.", &["server"]).with_label_values(&[SERVER]).inc();
}

pub(crate) fn cache_entries(count: usize) {
    gauge_vec("coredns_cache_entries", "The number of elements in the cache.", &["server", "type"])
        .with_label_values(&[SERVER, "success"])
        .set(i64::try_from(count).unwrap_or(i64::MAX));
}

pub(crate) fn rejected() {
    counter("coredns_forward_max_concurrent_rejects_total", "Counter of the number of queries rejected because the concurrent queries were at maximum.").inc();
}

pub(crate) fn forwarded(to: SocketAddr, code: ResponseCode, took: Duration) {
    histogram_vec("coredns_proxy_request_duration_seconds", "Histogram of the time each request took.", &["proxy_name", "to", "rcode"], DEFAULT_BUCKETS)
        .with_label_values(&["forward", &to.to_string(), rcode(code)])
        .observe(took.as_secs_f64());
}

pub(crate) fn forward_failed(to: SocketAddr) {
    counter_vec("coredns_proxy_request_failures_total", "Questions that a resolver did not answer.", &["proxy_name", "to"])
        .with_label_values(&["forward", &to.to_string()])
        .inc();
}
