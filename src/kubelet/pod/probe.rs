//! Probes: when they run, what their results add up to, and the task that runs those of one container.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Probe};
use rand::Rng;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::check::{Checker, Outcome};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProbeKind {
    Startup,
    Liveness,
    Readiness,
}

impl ProbeKind {
    /// As events and metrics name it.
    pub fn title(self) -> &'static str {
        match self {
            Self::Startup => "Startup",
            Self::Liveness => "Liveness",
            Self::Readiness => "Readiness",
        }
    }
}

/// Adds up single results to verdicts by the probe's thresholds. Pure.
#[derive(Clone, Debug)]
pub struct Machine {
    success_threshold: u32,
    failure_threshold: u32,
    last: Option<bool>,
    run: u32,
}

impl Machine {
    pub fn new(probe: &Probe) -> Self {
        let positive = |v: Option<i32>, default: u32| v.and_then(|v| u32::try_from(v).ok()).filter(|v| *v > 0).unwrap_or(default);
        Self {
            success_threshold: positive(probe.success_threshold, 1),
            failure_threshold: positive(probe.failure_threshold, 3),
            last: None,
            run: 0,
        }
    }

    /// The verdict after one more result, `None` while it is below its threshold.
    pub fn observe(&mut self, success: bool) -> Option<bool> {
        if self.last == Some(success) {
            self.run = self.run.saturating_add(1);
        } else {
            self.last = Some(success);
            self.run = 1;
        }
        let threshold = if success { self.success_threshold } else { self.failure_threshold };
        (self.run >= threshold).then_some(success)
    }
}

/// A change of a container's verdict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    pub container: String,
    pub kind: ProbeKind,
    pub healthy: bool,
}

/// Receives results that did not pass, for events.
pub type Unhealthy = Arc<dyn Fn(ProbeKind, &Outcome) + Send + Sync>;

/// One container's probes.
pub struct Subject {
    /// The runtime's id.
    pub id: String,
    pub container: Container,
    pub started_at: Timestamp,
    /// It was already running when this kubelet started: its startup is over if it was before, its first probe is jittered.
    pub adopted: bool,
    pub already_started: bool,
    pub checker: Checker,
    pub unhealthy: Unhealthy,
}

/// Runs the probes of one container until it is cancelled: the startup probe first, then liveness and readiness.
pub async fn run(subject: Subject, reports: mpsc::Sender<Report>, stop: CancellationToken) {
    let work = async {
        if let Some(probe) = &subject.container.startup_probe
            && !subject.already_started
        {
            // A failed startup is final: the container will be restarted, with a new task.
            if !watch(&subject, ProbeKind::Startup, probe, &reports).await {
                return;
            }
        }
        let liveness = async {
            if let Some(probe) = &subject.container.liveness_probe {
                watch(&subject, ProbeKind::Liveness, probe, &reports).await;
            }
        };
        let readiness = async {
            if let Some(probe) = &subject.container.readiness_probe {
                watch(&subject, ProbeKind::Readiness, probe, &reports).await;
            }
        };
        tokio::join!(liveness, readiness);
    };
    tokio::select! { () = work => {}, () = stop.cancelled() => {} }
}

fn seconds(value: Option<i32>, default: u64) -> Duration {
    Duration::from_secs(value.and_then(|v| u64::try_from(v).ok()).filter(|v| *v > 0).unwrap_or(default))
}

/// Probes until a verdict ends it: any for startup, a failure for liveness, never for readiness.
async fn watch(subject: &Subject, kind: ProbeKind, probe: &Probe, reports: &mpsc::Sender<Report>) -> bool {
    let period = seconds(probe.period_seconds, 10);
    let timeout = seconds(probe.timeout_seconds, 1);
    let delay = Duration::from_secs(u64::try_from(probe.initial_delay_seconds.unwrap_or(0)).unwrap_or(0));
    let running = Timestamp::now().duration_since(subject.started_at);
    let running = Duration::try_from(running).unwrap_or_default();
    let mut next = Instant::now() + delay.saturating_sub(running);
    if subject.adopted {
        next += period.mul_f64(rand::rng().random_range(0.0..1.0));
    }
    let mut machine = Machine::new(probe);
    let mut told = None;
    loop {
        sleep_until(next).await;
        next = (next + period).max(Instant::now());
        let outcome = subject.checker.check(&subject.container, probe, timeout).await;
        crate::metrics::probe_result(kind, &outcome, &subject.checker, &subject.container.name);
        if !matches!(outcome, Outcome::Success) {
            (subject.unhealthy)(kind, &outcome);
        }
        let success = match &outcome {
            Outcome::Success | Outcome::Warning(_) => true,
            Outcome::Failure(_) => false,
            // The probe itself could not run: no result.
            Outcome::Error(_) => continue,
        };
        let Some(verdict) = machine.observe(success) else { continue };
        if told != Some(verdict) {
            told = Some(verdict);
            let report = Report { container: subject.id.clone(), kind, healthy: verdict };
            if reports.send(report).await.is_err() {
                return verdict;
            }
        }
        match kind {
            ProbeKind::Startup => return verdict,
            ProbeKind::Liveness if !verdict => return false,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(success: i32, failure: i32, results: &str, expected: &str) {
        let probe = Probe { success_threshold: Some(success), failure_threshold: Some(failure), ..Default::default() };
        let mut machine = Machine::new(&probe);
        let verdicts: String = results
            .chars()
            .map(|c| match machine.observe(c == '+') {
                Some(true) => '+',
                Some(false) => '-',
                None => '.',
            })
            .collect();
        assert_eq!(verdicts, expected, "{success} {failure} {results}");
    }

    #[test]
    fn thresholds() {
        check(1, 3, "---+--+", "..-+..+");
        check(2, 1, "+-++", ".-.+");
        check(0, 0, "--", "..");
        check(1, 1, "+-", "+-");
    }
}
