//! The scheduler's metrics, under upstream's names.

use prometheus::{Histogram, HistogramVec, IntCounter, IntCounterVec, IntGaugeVec};
use windlass_daemon::metrics;

#[derive(Clone)]
pub struct Metrics {
    pub attempts: IntCounterVec,
    pub attempt_duration: HistogramVec,
    pub algorithm_duration: Histogram,
    pub pending: IntGaugeVec,
    pub sli_duration: HistogramVec,
    pub preemption_attempts: IntCounter,
    pub preemption_victims: Histogram,
    pub cache_size: IntGaugeVec,
    pub unschedulable: IntCounterVec,
}

impl Metrics {
    pub fn new() -> Self {
        let latency = metrics::exponential_buckets(0.001, 2.0, 15);
        let sli = metrics::exponential_buckets(0.01, 2.0, 20);
        let victims = metrics::exponential_buckets(1.0, 2.0, 7);
        Self {
            attempts: metrics::counter_vec(
                "scheduler_schedule_attempts_total",
                "Number of attempts to schedule pods, by the result. 'unschedulable' means a pod could not be scheduled, while 'error' means an internal scheduler problem.",
                &["profile", "result"],
            ),
            attempt_duration: metrics::histogram_vec(
                "scheduler_scheduling_attempt_duration_seconds",
                "Scheduling attempt latency in seconds (scheduling algorithm + binding)",
                &["profile", "result"],
                &latency,
            ),
            algorithm_duration: metrics::histogram("scheduler_scheduling_algorithm_duration_seconds", "Scheduling algorithm latency in seconds", &latency),
            pending: metrics::gauge_vec("scheduler_pending_pods", "Number of pending pods, by the queue type.", &["queue"]),
            sli_duration: metrics::histogram_vec(
                "scheduler_pod_scheduling_sli_duration_seconds",
                "E2e latency for a pod being scheduled, from the time the pod enters the scheduling queue and might involve multiple scheduling attempts.",
                &["attempts"],
                &sli,
            ),
            preemption_attempts: metrics::counter("scheduler_preemption_attempts_total", "Total preemption attempts in the cluster till now"),
            preemption_victims: metrics::histogram("scheduler_preemption_victims", "Number of selected preemption victims", &victims),
            cache_size: metrics::gauge_vec("scheduler_cache_size", "Number of nodes, pods, and assumed (bound) pods in the scheduler cache.", &["type"]),
            unschedulable: metrics::counter_vec("scheduler_unschedulable_pods_total", "Times a plugin rejected a pod on its last node", &["plugin", "profile"]),
        }
    }
}
