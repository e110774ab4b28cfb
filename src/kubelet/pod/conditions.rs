//! The pod conditions that the kubelet owns. Pure.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodCondition, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::model;
use super::status::Facts;

const OWNED: [&str; 8] = ["PodResizePending", "PodResizeInProgress", "PodScheduled", "PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready", "DisruptionTarget"];

struct Draft {
    kind: &'static str,
    status: bool,
    reason: &'static str,
    message: String,
}

impl Draft {
    fn yes(kind: &'static str, reason: &'static str) -> Self {
        Self { kind, status: true, reason, message: String::new() }
    }
    fn no(kind: &'static str, reason: &'static str, message: String) -> Self {
        Self { kind, status: false, reason, message }
    }
}

/// All conditions of the pod: those of others as the API has them, ours computed, with transition times carried over.
pub fn generate(pod: &Pod, previous: &PodStatus, statuses: &[ContainerStatus], phase: &str, facts: &Facts, now: Timestamp) -> Vec<PodCondition> {
    let api = pod.status.as_ref().and_then(|s| s.conditions.as_ref());
    let mut list: Vec<PodCondition> = api.into_iter().flatten().filter(|c| !OWNED.contains(&c.type_.as_str())).cloned().collect();
    if let Some(why) = &facts.disruption {
        list.push(PodCondition {
            type_: "DisruptionTarget".into(),
            status: "True".into(),
            reason: Some(why.reason.clone()),
            message: Some(why.message.clone()),
            observed_generation: pod.metadata.generation,
            ..Default::default()
        });
    } else if let Some(kept) = model::condition(previous.conditions.as_ref(), "DisruptionTarget").or(model::condition(api, "DisruptionTarget")) {
        list.push(kept.clone());
    }
    for (kind, why) in [("PodResizePending", &facts.resize_pending), ("PodResizeInProgress", &facts.resizing)] {
        if let Some(why) = why {
            list.push(PodCondition {
                type_: kind.into(),
                status: "True".into(),
                reason: (!why.reason.is_empty()).then(|| why.reason.clone()),
                message: (!why.message.is_empty()).then(|| why.message.clone()),
                observed_generation: pod.metadata.generation,
                ..Default::default()
            });
        }
    }
    let containers_ready = containers_ready(pod, statuses, phase);
    let ready = ready(pod, &list, &containers_ready);
    let drafts = [ready_to_start(facts), initialized(pod, statuses, phase), ready, containers_ready, Draft::yes("PodScheduled", "")];
    for draft in drafts {
        list.push(PodCondition {
            type_: draft.kind.into(),
            status: if draft.status { "True" } else { "False" }.into(),
            reason: (!draft.reason.is_empty()).then(|| draft.reason.into()),
            message: (!draft.message.is_empty()).then_some(draft.message),
            observed_generation: pod.metadata.generation,
            ..Default::default()
        });
    }
    for condition in &mut list {
        let old = model::condition(previous.conditions.as_ref(), &condition.type_).or(model::condition(api, &condition.type_));
        condition.last_transition_time = match old {
            Some(old) if old.status == condition.status => old.last_transition_time.clone(),
            _ => None,
        }
        .or_else(|| Some(Time(Timestamp::from_second(now.as_second()).unwrap_or(now))));
    }
    list
}

fn ready_to_start(facts: &Facts) -> Draft {
    if facts.sandbox_problem.is_empty() {
        Draft::yes("PodReadyToStartContainers", "")
    } else {
        Draft::no("PodReadyToStartContainers", "PodSandboxNotReady", facts.sandbox_problem.to_owned())
    }
}

/// A Go slice of names as `%s` prints it.
fn names(list: &[&str]) -> String {
    format!("[{}]", list.join(" "))
}

fn join(unknown: &[&str], other: &[&str], word: &str) -> String {
    let mut parts = Vec::new();
    if !unknown.is_empty() {
        parts.push(format!("containers with unknown status: {}", names(unknown)));
    }
    if !other.is_empty() {
        parts.push(format!("containers with {word} status: {}", names(other)));
    }
    parts.join(", ")
}

fn containers_ready(pod: &Pod, statuses: &[ContainerStatus], phase: &str) -> Draft {
    let kind = "ContainersReady";
    let mut unknown = Vec::new();
    let mut unready = Vec::new();
    let sidecars = model::init_containers(pod).iter().filter(|c| model::is_sidecar(c));
    for container in sidecars.chain(model::containers(pod)) {
        match statuses.iter().find(|s| s.name == container.name) {
            Some(status) if status.ready => {}
            Some(_) => unready.push(container.name.as_str()),
            None => unknown.push(container.name.as_str()),
        }
    }
    if phase == "Succeeded" && unknown.is_empty() {
        return Draft::no(kind, "PodCompleted", String::new());
    }
    if phase == "Failed" {
        return Draft::no(kind, "PodFailed", String::new());
    }
    let message = join(&unknown, &unready, "unready");
    if message.is_empty() { Draft::yes(kind, "") } else { Draft::no(kind, "ContainersNotReady", message) }
}

fn ready(pod: &Pod, others: &[PodCondition], containers: &Draft) -> Draft {
    if !containers.status {
        return Draft::no("Ready", containers.reason, containers.message.clone());
    }
    let mut problems = Vec::new();
    for gate in model::spec(pod).readiness_gates.iter().flatten() {
        let kind = &gate.condition_type;
        match others.iter().find(|c| c.type_ == *kind) {
            None => problems.push(format!("corresponding condition of pod readiness gate \"{kind}\" does not exist.")),
            Some(c) if c.status != "True" => problems.push(format!("the status of pod readiness gate \"{kind}\" is not \"True\", but {}", c.status)),
            Some(_) => {}
        }
    }
    if problems.is_empty() { Draft::yes("Ready", "") } else { Draft::no("Ready", "ReadinessGatesNotReady", problems.join(", ")) }
}

fn initialized(pod: &Pod, statuses: &[ContainerStatus], phase: &str) -> Draft {
    let kind = "Initialized";
    let mut unknown = Vec::new();
    let mut incomplete = Vec::new();
    for container in model::init_containers(pod) {
        match statuses.iter().find(|s| s.name == container.name) {
            None => unknown.push(container.name.as_str()),
            Some(status) => {
                let done = if model::is_sidecar(container) { status.started == Some(true) } else { status.ready };
                if !done {
                    incomplete.push(container.name.as_str());
                }
            }
        }
    }
    if phase == "Succeeded" && unknown.is_empty() {
        return Draft::yes(kind, "PodCompleted");
    }
    let has_run = |s: &ContainerStatus| {
        let has = |state: &Option<k8s_openapi::api::core::v1::ContainerState>| state.as_ref().is_some_and(|s| s.running.is_some() || s.terminated.is_some());
        has(&s.state) || has(&s.last_state)
    };
    let any_started = model::containers(pod).iter().any(|c| statuses.iter().any(|s| s.name == c.name && has_run(s)));
    let message = join(&unknown, &incomplete, "incomplete");
    if any_started || message.is_empty() { Draft::yes(kind, "") } else { Draft::no(kind, "ContainersNotInitialized", message) }
}
