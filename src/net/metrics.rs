//! Metrics of the pod network, in Prometheus' default registry.

use std::sync::LazyLock;

use prometheus::{Histogram, HistogramOpts, HistogramTimer, IntGaugeVec, Opts, register_histogram, register_int_gauge_vec};

// Registration fails only for a name that exists with another shape: these are registered nowhere else.
static ATTACH: LazyLock<Histogram> = LazyLock::new(|| {
    register_histogram!(HistogramOpts::new("windlass_net_pod_attach_duration_seconds", "Time to wire a pod into the network.")
        .buckets(vec![0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5]))
    .expect("unique name")
});
static PODS: LazyLock<IntGaugeVec> = LazyLock::new(|| {
    register_int_gauge_vec!(Opts::new("windlass_net_pods", "Pods that have addresses on this node."), &["instance"]).expect("unique name")
});

pub(crate) fn attach_timer() -> HistogramTimer {
    ATTACH.start_timer()
}

pub(crate) fn pods(instance: &str, count: usize) {
    PODS.with_label_values(&[instance]).set(i64::try_from(count).unwrap_or(i64::MAX));
}
