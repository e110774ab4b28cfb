//! The process's metrics: one registry, names as upstream's, each registered once however often it is asked for.
//!
//! A name that is asked for again gives the metric that is already there, so that two instances of a role in one process
//! add to the same series. Asking for it as another type, or with other labels, is a programming error: the caller gets a
//! metric that is not exported and an error is logged, since a metric must never stop a role.

use std::collections::HashMap;
use std::sync::LazyLock;

use bytes::Bytes;
use parking_lot::Mutex;
use prometheus::core::Collector;
use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
    Opts, TextEncoder,
};

use crate::version;

/// Upstream's `prometheus.DefBuckets`, in seconds.
pub const DEFAULT_BUCKETS: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// `count` bounds, each `factor` times the one before: upstream's `ExponentialBuckets`.
pub fn exponential_buckets(start: f64, factor: f64, count: usize) -> Vec<f64> {
    std::iter::successors(Some(start), |bound| Some(bound * factor)).take(count).collect()
}

macro_rules! kinds {
    ($($variant:ident($ty:ty)),* $(,)?) => {
        #[derive(Clone)]
        enum Known { $($variant($ty)),* }
        $(impl Metric for $ty {
            fn known(&self) -> Known { Known::$variant(self.clone()) }
            fn from_known(known: &Known) -> Option<Self> {
                match known { Known::$variant(m) => Some(m.clone()), #[allow(unreachable_patterns)] _ => None }
            }
        })*
    };
}

trait Metric: Collector + Clone + 'static {
    fn known(&self) -> Known;
    fn from_known(known: &Known) -> Option<Self>;
}

kinds!(
    CounterVec(IntCounterVec),
    Counter(IntCounter),
    IntGaugeVec(IntGaugeVec),
    IntGauge(IntGauge),
    GaugeVec(GaugeVec),
    Gauge(Gauge),
    HistogramVec(HistogramVec),
    Histogram(Histogram),
);

static KNOWN: LazyLock<Mutex<HashMap<String, Known>>> = LazyLock::new(|| {
    register_build_info();
    Mutex::default()
});

fn once<M: Metric>(name: &str, make: impl Fn() -> prometheus::Result<M>) -> M {
    let mut known = KNOWN.lock();
    if let Some(metric) = known.get(name).and_then(M::from_known) {
        return metric;
    }
    // Names and labels are literals of the program; a wrong one shows up in the first test that runs it.
    let metric = make().unwrap_or_else(|error| panic!("metric {name}: {error}"));
    match prometheus::default_registry().register(Box::new(metric.clone())) {
        Ok(()) => {
            known.insert(name.to_owned(), metric.known());
        }
        Err(error) => tracing::error!(name, %error, "metric is registered already in another shape: not exported"),
    }
    metric
}

/// A counter per combination of `labels`.
pub fn counter_vec(name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    once(name, || IntCounterVec::new(Opts::new(name, help), labels))
}

/// A counter without labels.
pub fn counter(name: &str, help: &str) -> IntCounter {
    once(name, || IntCounter::new(name, help))
}

/// A whole-number gauge per combination of `labels`.
pub fn gauge_vec(name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
    once(name, || IntGaugeVec::new(Opts::new(name, help), labels))
}

/// A whole-number gauge without labels.
pub fn gauge(name: &str, help: &str) -> IntGauge {
    once(name, || IntGauge::new(name, help))
}

/// A gauge of fractions per combination of `labels`.
pub fn float_gauge_vec(name: &str, help: &str, labels: &[&str]) -> GaugeVec {
    once(name, || GaugeVec::new(Opts::new(name, help), labels))
}

/// A gauge of fractions without labels.
pub fn float_gauge(name: &str, help: &str) -> Gauge {
    once(name, || Gauge::new(name, help))
}

/// A histogram per combination of `labels`; `buckets` are upper bounds, usually seconds.
pub fn histogram_vec(name: &str, help: &str, labels: &[&str], buckets: &[f64]) -> HistogramVec {
    once(name, || HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), labels))
}

/// A histogram without labels.
pub fn histogram(name: &str, help: &str, buckets: &[f64]) -> Histogram {
    once(name, || Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets.to_vec())))
}

fn register_build_info() {
    let info = version::info();
    let labels = [
        ("major", &info.major),
        ("minor", &info.minor),
        ("git_version", &info.git_version),
        ("git_commit", &info.git_commit),
        ("git_tree_state", &info.git_tree_state),
        ("build_date", &info.build_date),
        ("go_version", &info.go_version),
        ("compiler", &info.compiler),
        ("platform", &info.platform),
    ];
    let help = "A metric with a constant '1' value labeled by the version that Windlass was built as, its compiler, and its platform.";
    let opts = labels
        .iter()
        .fold(Opts::new("kubernetes_build_info", help), |opts, (name, value)| opts.const_label(*name, value.as_str()));
    let registered = IntGauge::with_opts(opts).and_then(|gauge| {
        gauge.set(1);
        prometheus::default_registry().register(Box::new(gauge))
    });
    if let Err(error) = registered {
        tracing::error!(%error, "kubernetes_build_info is not exported");
    }
}

/// Every metric of the process in Prometheus' text format: the content type and the text.
pub fn encode() -> (String, Bytes) {
    LazyLock::force(&KNOWN);
    let encoder = TextEncoder::new();
    let mut text = Vec::new();
    if let Err(error) = encoder.encode(&prometheus::gather(), &mut text) {
        // What was written up to the broken family is whole; the rest is missing and the log says why.
        tracing::error!(%error, "cannot encode the metrics");
    }
    (encoder.format_type().to_owned(), Bytes::from(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asked_twice_is_one_series() {
        counter_vec("t_requests_total", "h", &["code"]).with_label_values(&["200"]).inc();
        counter_vec("t_requests_total", "h", &["code"]).with_label_values(&["200"]).inc();
        histogram("t_seconds", "h", DEFAULT_BUCKETS).observe(0.3);
        let (content_type, text) = encode();
        let text = String::from_utf8(text.to_vec()).expect("text");
        assert!(content_type.starts_with("text/plain; version=0.0.4"), "{content_type}");
        for line in [
            "t_requests_total{code=\"200\"} 2",
            "t_seconds_bucket{le=\"0.5\"} 1",
            "# TYPE process_cpu_seconds_total counter",
            "# TYPE process_resident_memory_bytes gauge",
            "# TYPE process_start_time_seconds gauge",
        ] {
            assert!(text.contains(line), "{line} is missing in:\n{text}");
        }
        let build = text.lines().find(|l| l.starts_with("kubernetes_build_info{")).expect("build info");
        assert!(build.contains("git_version=\"v1.37.2+windlass\"") && build.ends_with(" 1"), "{build}");
    }

    #[test]
    fn another_shape_is_not_fatal() {
        counter("t_shape", "h").inc();
        gauge("t_shape", "h").set(5);
        let (_, text) = encode();
        assert!(String::from_utf8_lossy(&text).contains("# TYPE t_shape counter"));
    }

    #[test]
    fn buckets_grow() {
        assert_eq!(exponential_buckets(1.0, 2.0, 4), [1.0, 2.0, 4.0, 8.0]);
    }
}
