//! The kubelet's metrics, under upstream's names.

use std::sync::LazyLock;
use std::time::Instant;

use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};
use windlass_daemon::metrics as m;

use crate::pod::check::{Checker, Outcome};
use crate::pod::probe::ProbeKind;

macro_rules! metrics {
    ($($(#[$doc:meta])* $name:ident: $ty:ty = $make:expr;)*) => {
        $($(#[$doc])* pub static $name: LazyLock<$ty> = LazyLock::new(|| $make);)*
    };
}

metrics! {
    RUNTIME_OPERATIONS: IntCounterVec = m::counter_vec("kubelet_runtime_operations_total", "Cumulative number of runtime operations by operation type.", &["operation_type"]);
    RUNTIME_DURATION: HistogramVec = m::histogram_vec("kubelet_runtime_operations_duration_seconds", "Duration in seconds of runtime operations. Broken down by operation type.", &["operation_type"], &m::exponential_buckets(0.005, 2.5, 14));
    RUNTIME_ERRORS: IntCounterVec = m::counter_vec("kubelet_runtime_operations_errors_total", "Cumulative number of runtime operation errors by operation type.", &["operation_type"]);
    RUNNING_PODS: IntGauge = m::gauge("kubelet_running_pods", "Number of pods that have a running pod sandbox");
    RUNNING_CONTAINERS: IntGaugeVec = m::gauge_vec("kubelet_running_containers", "Number of containers currently running", &["container_state"]);
    DESIRED_PODS: IntGaugeVec = m::gauge_vec("kubelet_desired_pods", "The number of pods the kubelet is being instructed to run. static is true if the pod is not from the apiserver.", &["static"]);
    MIRROR_PODS: IntGauge = m::gauge("kubelet_mirror_pods", "The number of mirror pods the kubelet will try to create (one per admitted static pod)");
    WORKING_PODS: IntGauge = m::gauge("kubelet_working_pods", "Number of pods the kubelet is actually running");
    POD_START: Histogram = m::histogram("kubelet_pod_start_duration_seconds", "Duration in seconds from kubelet seeing a pod for the first time to the pod starting to run", &[0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0]);
    POD_WORKER: HistogramVec = m::histogram_vec("kubelet_pod_worker_duration_seconds", "Duration in seconds to sync a single pod. Broken down by operation type: create, update, or sync", &["operation_type"], m::DEFAULT_BUCKETS);
    POD_STATUS_SYNC: Histogram = m::histogram("kubelet_pod_status_sync_duration_seconds", "Duration in seconds to sync a pod status update. Measures time from detection of a change to pod status until the API is successfully updated for that pod, even if multiple intevening changes to pod status occur.", &[0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0]);
    RUN_SANDBOX: HistogramVec = m::histogram_vec("kubelet_run_podsandbox_duration_seconds", "Duration in seconds of the run_podsandbox operations. Broken down by RuntimeClass.Handler.", &["runtime_handler"], m::DEFAULT_BUCKETS);
    RUN_SANDBOX_ERRORS: IntCounterVec = m::counter_vec("kubelet_run_podsandbox_errors_total", "Cumulative number of the run_podsandbox operation errors by RuntimeClass.Handler.", &["runtime_handler"]);
    STARTED_PODS: IntCounter = m::counter("kubelet_started_pods_total", "Cumulative number of pods started");
    STARTED_PODS_ERRORS: IntCounter = m::counter("kubelet_started_pods_errors_total", "Cumulative number of errors when starting pods");
    STARTED_CONTAINERS: IntCounterVec = m::counter_vec("kubelet_started_containers_total", "Cumulative number of containers started", &["container_type"]);
    STARTED_CONTAINERS_ERRORS: IntCounterVec = m::counter_vec("kubelet_started_containers_errors_total", "Cumulative number of errors when starting containers", &["container_type", "code"]);
    IMAGE_PULL: HistogramVec = m::histogram_vec("kubelet_image_pull_duration_seconds", "Duration in seconds to pull an image.", &["image_size_in_bytes"], &[1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 180.0, 300.0, 600.0, 900.0, 1800.0]);
    IMAGES_COLLECTED: IntCounterVec = m::counter_vec("kubelet_image_garbage_collected_total", "Total number of images garbage collected by the kubelet, whether through disk usage or image age.", &["reason"]);
    EVICTIONS: IntCounterVec = m::counter_vec("kubelet_evictions", "Cumulative number of pod evictions by eviction signal", &["eviction_signal"]);
    ADMISSION_REJECTIONS: IntCounterVec = m::counter_vec("kubelet_admission_rejections_total", "Cumulative number pod admission rejections by the Kubelet.", &["reason"]);
    ORPHANED: IntCounter = m::counter("kubelet_orphaned_runtime_pods_total", "Number of pods that have been detected in the container runtime without being already known to the pod worker. This typically indicates the kubelet was restarted while a pod was force deleted in the API or in the local configuration, which is unusual.");
    EPHEMERAL_CONTAINERS: IntGauge = m::gauge("kubelet_managed_ephemeral_containers", "Current number of ephemeral containers in pods managed by this kubelet.");
    HTTP_REQUESTS: IntCounterVec = m::counter_vec("kubelet_http_requests_total", "Number of the http requests received since the server started", &["method", "path", "server_type", "long_running"]);
    HTTP_DURATION: HistogramVec = m::histogram_vec("kubelet_http_requests_duration_seconds", "Duration in seconds to serve http requests", &["method", "path", "server_type", "long_running"], m::DEFAULT_BUCKETS);
    HTTP_INFLIGHT: IntGaugeVec = m::gauge_vec("kubelet_http_inflight_requests", "Number of the inflight http requests", &["method", "path", "server_type", "long_running"]);
    EVENT_STREAM: IntCounter = m::counter("kubelet_evented_pleg_connection_success_count", "The number of times a streaming client was obtained to receive container events.");
    EVENT_STREAM_ERRORS: IntCounter = m::counter("kubelet_evented_pleg_connection_error_count", "The number of errors encountered during the establishment of streaming connection with the CRI runtime.");
    PROBES: IntCounterVec = m::counter_vec("prober_probe_total", "Cumulative number of a liveness, readiness or startup probe for a container by result.", &["probe_type", "result", "container", "pod", "namespace", "pod_uid"]);
    NODE_NAME: IntGaugeVec = m::gauge_vec("kubelet_node_name", "The node's name. The count is always 1.", &["node"]);
    CGROUP_VERSION: IntGauge = m::gauge("kubelet_cgroup_version", "cgroup version on the hosts.");
}

/// Times one operation of the runtime; counted when [`Operation::done`] is called.
pub struct Operation {
    name: &'static str,
    since: Instant,
}

pub fn runtime_operation(name: &'static str) -> Operation {
    RUNTIME_OPERATIONS.with_label_values(&[name]).inc();
    Operation { name, since: Instant::now() }
}

impl Operation {
    pub fn done(self, ok: bool) {
        RUNTIME_DURATION.with_label_values(&[self.name]).observe(self.since.elapsed().as_secs_f64());
        if !ok {
            RUNTIME_ERRORS.with_label_values(&[self.name]).inc();
        }
    }
}

pub fn probe_result(kind: ProbeKind, outcome: &Outcome, subject: &Checker, container: &str) {
    let result = match outcome {
        Outcome::Success | Outcome::Warning(_) => "successful",
        Outcome::Failure(_) => "failed",
        Outcome::Error(_) => "unknown",
    };
    PROBES.with_label_values(&[kind.title(), result, container, &subject.pod, &subject.namespace, &subject.uid]).inc();
}

/// Forgets the probe counters of one container: label values must not outlive what they name.
pub fn forget_probes(subject: (&str, &str, &str), container: &str) {
    let (pod, namespace, uid) = subject;
    for kind in [ProbeKind::Startup, ProbeKind::Liveness, ProbeKind::Readiness] {
        for result in ["successful", "failed", "unknown"] {
            let _ = PROBES.remove_label_values(&[kind.title(), result, container, pod, namespace, uid]);
        }
    }
}

/// Upstream's classes of image sizes.
pub fn size_class(bytes: i64) -> &'static str {
    const MIB: i64 = 1 << 20;
    const GIB: i64 = 1 << 30;
    match bytes {
        b if b < 0 => "N/A",
        b if b < 10 * MIB => "0-10MB",
        b if b < 100 * MIB => "10MB-100MB",
        b if b < 500 * MIB => "100MB-500MB",
        b if b < GIB => "500MB-1GB",
        b if b < 5 * GIB => "1GB-5GB",
        b if b < 10 * GIB => "5GB-10GB",
        b if b < 20 * GIB => "10GB-20GB",
        b if b < 30 * GIB => "20GB-30GB",
        b if b < 40 * GIB => "30GB-40GB",
        b if b < 60 * GIB => "40GB-60GB",
        b if b < 100 * GIB => "60GB-100GB",
        _ => "GT100GB",
    }
}
