//! A pod's row: readiness, the status word, and restarts with their age.

use jiff::Timestamp;
use serde_json::Value;

use super::{age, human};
use crate::meta;
use crate::strategy::at::{get, items, text};

fn is_sidecar(pod: &Value, name: &str) -> bool {
    items(pod, "spec.initContainers").iter().any(|c| text(c, "name") == name && text(c, "restartPolicy") == "Always")
}

fn condition<'v>(pod: &'v Value, kind: &str) -> Option<&'v Value> {
    items(pod, "status.conditions").iter().find(|c| text(c, "type") == kind)
}

fn is_true(pod: &Value, kind: &str) -> bool {
    condition(pod, kind).is_some_and(|c| text(c, "status") == "True")
}

/// Restarts and the end of the latest run before.
#[derive(Default)]
struct Restarts {
    count: i64,
    last: Option<Timestamp>,
}

impl Restarts {
    fn add(&mut self, status: &Value) {
        self.count += get(status, "restartCount").as_i64().unwrap_or(0);
        let finished = meta::parse_time(text(status, "lastState.terminated.finishedAt"));
        self.last = self.last.max(finished);
    }
}

/// Why a container ended: its reason, its signal, or its exit code.
fn ended(state: &Value) -> String {
    let code = |field: &str| get(state, field).as_i64().unwrap_or(0);
    match text(state, "reason") {
        "" if code("signal") != 0 => format!("Signal:{}", code("signal")),
        "" => format!("ExitCode:{}", code("exitCode")),
        reason => reason.to_owned(),
    }
}

struct Summary {
    ready: usize,
    total: usize,
    reason: String,
    restarts: Restarts,
}

fn init_phase(pod: &Value, s: &mut Summary, sidecars: &mut Restarts) -> bool {
    let inits = items(pod, "spec.initContainers").len();
    for (i, status) in items(pod, "status.initContainerStatuses").iter().enumerate() {
        s.restarts.add(status);
        let sidecar = is_sidecar(pod, text(status, "name"));
        if sidecar {
            sidecars.add(status);
        }
        let terminated = get(status, "state.terminated");
        if !terminated.is_null() && get(terminated, "exitCode").as_i64().unwrap_or(0) == 0 {
            continue;
        }
        if sidecar && get(status, "started") == true {
            s.ready += usize::from(get(status, "ready") == true);
            continue;
        }
        let waiting = text(status, "state.waiting.reason");
        s.reason = if !terminated.is_null() {
            format!("Init:{}", ended(terminated))
        } else if !waiting.is_empty() && waiting != "PodInitializing" {
            format!("Init:{waiting}")
        } else {
            format!("Init:{i}/{inits}")
        };
        return true;
    }
    false
}

fn main_phase(pod: &Value, s: &mut Summary) {
    let (mut running, mut error) = (false, None);
    for status in items(pod, "status.containerStatuses").iter().rev() {
        s.restarts.add(status);
        let waiting = text(status, "state.waiting.reason");
        let terminated = get(status, "state.terminated");
        if !waiting.is_empty() {
            s.reason = waiting.to_owned();
        } else if !terminated.is_null() {
            s.reason = ended(terminated);
            if get(terminated, "exitCode").as_i64().unwrap_or(0) != 0 {
                error = Some(s.reason.clone());
            }
        } else if get(status, "ready") == true && !get(status, "state.running").is_null() {
            running = true;
            s.ready += 1;
        }
    }
    if s.reason == "Completed" {
        if running && is_true(pod, "Ready") {
            s.reason = "Running".into();
        } else if let Some(error) = error {
            s.reason = error;
        } else if running {
            s.reason = "NotReady".into();
        }
    }
}

fn summarize(pod: &Value) -> Summary {
    let phase = text(pod, "status.phase");
    let reason = match text(pod, "status.reason") {
        "" => phase,
        r => r,
    };
    let gated = condition(pod, "PodScheduled").is_some_and(|c| text(c, "reason") == "SchedulingGated");
    let sidecar_count =
        items(pod, "spec.initContainers").iter().filter(|c| text(c, "restartPolicy") == "Always").count();
    let mut s = Summary {
        ready: 0,
        total: items(pod, "spec.containers").len() + sidecar_count,
        reason: if gated { "SchedulingGated" } else { reason }.to_owned(),
        restarts: Restarts::default(),
    };
    let mut sidecars = Restarts::default();
    let initializing = init_phase(pod, &mut s, &mut sidecars);
    if !initializing || is_true(pod, "Initialized") {
        s.restarts = sidecars;
        main_phase(pod, &mut s);
    }
    if meta::deletion_timestamp(pod).is_some() {
        if text(pod, "status.reason") == "NodeLost" {
            s.reason = "Unknown".into();
        } else if !matches!(phase, "Succeeded" | "Failed") {
            s.reason = "Terminating".into();
        }
    }
    s
}

pub(super) fn row(pod: &Value, now: Timestamp) -> Vec<Value> {
    let s = summarize(pod);
    let restarts = match s.restarts.last {
        Some(last) if s.restarts.count != 0 => {
            format!("{} ({} ago)", s.restarts.count, human((now - last).get_seconds()))
        }
        _ => s.restarts.count.to_string(),
    };
    let or_none = |t: &str| Value::from(if t.is_empty() { "<none>" } else { t });
    let gates = items(pod, "spec.readinessGates");
    let gates = if gates.is_empty() {
        "<none>".to_owned()
    } else {
        let ready = gates.iter().filter(|g| is_true(pod, text(g, "conditionType"))).count();
        format!("{ready}/{}", gates.len())
    };
    vec![
        meta::name(pod).into(),
        format!("{}/{}", s.ready, s.total).into(),
        s.reason.into(),
        restarts.into(),
        age(pod, now),
        or_none(items(pod, "status.podIPs").first().map_or("", |ip| text(ip, "ip"))),
        or_none(text(pod, "spec.nodeName")),
        or_none(text(pod, "status.nominatedNodeName")),
        gates.into(),
    ]
}
