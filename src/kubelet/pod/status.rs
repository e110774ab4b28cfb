//! A pod's status from what is known about it. Pure: phase, conditions and container statuses as upstream computes them.

use std::collections::{BTreeMap, HashMap, HashSet};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    Container as Spec, ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting, ContainerStatus,
    HostIP, Pod, PodIP, PodStatus, ResourceRequirements, VolumeMountStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::conditions;
use super::model::{self, Kind};
use super::resources;
use super::plan::{Observed, Verdicts, any_regular_created, initialized};
use crate::runtime::{Container, State};

/// A reason and message, as in a waiting state or a pod's status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Why {
    pub reason: String,
    pub message: String,
}

impl Why {
    pub fn new(reason: &str, message: impl Into<String>) -> Self {
        Self { reason: reason.to_owned(), message: message.into() }
    }
}

/// What a status is computed from, beside the pod and its containers.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Prefix of container ids (`docker`).
    pub scheme: &'static str,
    pub host_ips: Vec<String>,
    /// When the kubelet first saw the pod.
    pub start_time: Option<Timestamp>,
    /// The last failure to start a container, by name.
    pub errors: HashMap<String, Why>,
    /// By container id.
    pub verdicts: HashMap<String, Verdicts>,
    /// Termination messages by container id.
    pub messages: HashMap<String, String>,
    /// The public name of an image id: a repository digest where there is one.
    pub image_refs: HashMap<String, String>,
    /// Ids of containers whose start has not finished (a PostStart hook runs): they do not count as running yet.
    pub starting: HashSet<String>,
    /// Nothing will be started again.
    pub terminal: bool,
    /// The kubelet ended the pod: phase Failed with this reason.
    pub failed: Option<Why>,
    /// Sandbox problem, empty when the sandbox is ready.
    pub sandbox_problem: &'static str,
    /// A `DisruptionTarget` condition to set, when the kubelet evicts the pod.
    pub disruption: Option<Why>,
    /// Why changed resources were not granted (`PodResizePending`).
    pub resize_pending: Option<Why>,
    /// Changed resources are being applied; the reason `Error` when that failed.
    pub resizing: Option<Why>,
}

/// The status of `pod`. `previous` is the last one known, ours or the API's.
pub fn compute(pod: &Pod, previous: &PodStatus, observed: &Observed, facts: &Facts, now: Timestamp) -> PodStatus {
    let observed = &hide_starting(observed, &facts.starting);
    let has_init = !model::init_containers(pod).is_empty();
    let regular: Vec<Spec> = model::containers(pod).to_vec();
    let ephemeral: Vec<Spec> = model::ephemeral_containers(pod).iter().map(model::as_container).collect();
    let build = |specs: &[Spec], old: &Option<Vec<ContainerStatus>>, init: bool| {
        container_statuses(pod, specs, old.as_deref().unwrap_or_default(), observed, facts, has_init, init)
    };
    let mut containers = build(&regular, &previous.container_statuses, false);
    let mut init = build(model::init_containers(pod), &previous.init_container_statuses, true);
    let mut ephemeral = build(&ephemeral, &previous.ephemeral_container_statuses, false);
    containers.sort_by(|a, b| a.name.cmp(&b.name));
    ephemeral.sort_by(|a, b| a.name.cmp(&b.name));
    for status in containers.iter_mut().chain(&mut init).chain(&mut ephemeral) {
        set_ready(pod, status, facts);
    }
    let every: Vec<ContainerStatus> = containers.iter().chain(&init).cloned().collect();
    let mut status = PodStatus {
        phase: Some(phase(pod, &every, facts.terminal, initialized(pod, observed)).to_owned()),
        qos_class: Some(model::qos_class(pod).to_owned()),
        start_time: previous.start_time.clone().or(facts.start_time.map(Time)),
        observed_generation: pod.metadata.generation,
        nominated_node_name: previous.nominated_node_name.clone(),
        resource_claim_statuses: previous.resource_claim_statuses.clone(),
        ..Default::default()
    };
    settle_phase(pod, previous, facts, &mut status);
    set_addresses(pod, observed, previous, facts, &mut status);
    status.conditions = Some(conditions::generate(pod, previous, &every, status.phase.as_deref().unwrap_or(""), facts, now));
    let list = |list: Vec<ContainerStatus>| (!list.is_empty()).then_some(list);
    status.container_statuses = list(containers);
    status.init_container_statuses = list(init);
    status.ephemeral_container_statuses = list(ephemeral);
    status
}

/// The last word on a pod whose containers have all ended: what has no end of its own gets one, as upstream's
/// status manager gives it.
pub fn finalize(pod: &Pod, status: &mut PodStatus) {
    let regular_ran = status.container_statuses.iter().flatten().any(|s| s.state.as_ref().is_some_and(|s| s.waiting.is_none()));
    let initialized = model::init_containers(pod).is_empty()
        || regular_ran
        || status.init_container_statuses.iter().flatten().all(|s| s.state.as_ref().is_some_and(|s| s.terminated.as_ref().is_some_and(|t| t.exit_code == 0)));
    if initialized {
        for container in status.container_statuses.iter_mut().flatten() {
            if container.state.as_ref().is_some_and(|s| s.terminated.is_some()) {
                continue;
            }
            container.ready = false;
            container.started = Some(false);
            container.state = Some(ContainerState {
                terminated: Some(ContainerStateTerminated {
                    reason: Some("ContainerStatusUnknown".into()),
                    message: Some("The container could not be located when the pod was terminated".into()),
                    exit_code: 137,
                    ..Default::default()
                }),
                ..Default::default()
            });
        }
    }
    if !model::is_terminal_phase(status.phase.as_deref().unwrap_or("")) && !model::is_static(pod) {
        status.phase = Some("Failed".into());
    }
}

/// The status of a pod that the kubelet will not run at all.
pub fn rejected(pod: &Pod, why: &Why, now: Timestamp) -> PodStatus {
    let previous = pod.status.clone().unwrap_or_default();
    PodStatus {
        phase: Some("Failed".into()),
        reason: Some(why.reason.clone()),
        message: Some(format!("Pod was rejected: {}", why.message)),
        qos_class: Some(model::qos_class(pod).to_owned()),
        start_time: previous.start_time.clone().or(Some(Time(now))),
        observed_generation: pod.metadata.generation,
        ..previous
    }
}

fn hide_starting(observed: &Observed, starting: &HashSet<String>) -> Observed {
    let mut observed = observed.clone();
    for container in observed.containers.iter_mut().filter(|c| c.running() && starting.contains(&c.id)) {
        container.state = State::Created;
    }
    observed
}

fn settle_phase(pod: &Pod, previous: &PodStatus, facts: &Facts, status: &mut PodStatus) {
    let old = previous.phase.as_deref().unwrap_or("");
    let api = model::phase(pod);
    if !model::is_terminal_phase(status.phase.as_deref().unwrap_or("")) {
        // A terminal phase is never left.
        for terminal in [old, api] {
            if model::is_terminal_phase(terminal) {
                status.phase = Some(terminal.to_owned());
            }
        }
    }
    if status.phase.as_deref() == Some(old) {
        status.reason = previous.reason.clone();
        status.message = previous.message.clone();
    }
    if let Some(why) = &facts.failed {
        status.phase = Some("Failed".into());
        status.reason = Some(why.reason.clone());
        status.message = Some(why.message.clone());
    }
    if model::is_terminal_phase(api) {
        status.phase = Some(api.to_owned());
    }
}

fn set_addresses(pod: &Pod, observed: &Observed, previous: &PodStatus, facts: &Facts, status: &mut PodStatus) {
    status.host_ip = facts.host_ips.first().cloned().or_else(|| previous.host_ip.clone());
    status.host_ips = Some(facts.host_ips.iter().map(|ip| HostIP { ip: ip.clone() }).collect::<Vec<_>>()).filter(|l| !l.is_empty());
    let addresses: Vec<String> = if model::host_network(pod) {
        if facts.sandbox_problem.is_empty() || previous.pod_ip.is_some() || !observed.sandboxes.is_empty() { facts.host_ips.clone() } else { Vec::new() }
    } else if observed.addresses.is_empty() && model::is_terminal_phase(status.phase.as_deref().unwrap_or("")) {
        // A finished pod keeps showing the address it had.
        previous.pod_ips.iter().flatten().map(|p| p.ip.clone()).collect()
    } else {
        observed.addresses.clone()
    };
    status.pod_ip = addresses.first().cloned();
    status.pod_ips = (!addresses.is_empty()).then(|| addresses.into_iter().map(|ip| PodIP { ip }).collect());
}

fn waiting(reason: &str, message: Option<String>) -> ContainerState {
    let reason = (!reason.is_empty()).then(|| reason.to_owned());
    ContainerState { waiting: Some(ContainerStateWaiting { reason, message: message.filter(|m| !m.is_empty()) }), ..Default::default() }
}

fn container_statuses(
    pod: &Pod,
    specs: &[Spec],
    old: &[ContainerStatus],
    observed: &Observed,
    facts: &Facts,
    has_init: bool,
    init: bool,
) -> Vec<ContainerStatus> {
    let default_reason = if has_init { "PodInitializing" } else { "ContainerCreating" };
    let of = |spec: &Spec| {
        let old = old.iter().find(|s| s.name == spec.name);
        let over = old.filter(|o| o.state.as_ref().is_some_and(|s| s.terminated.is_some()));
        if let Some(over) = over.filter(|_| model::ephemeral_containers(pod).iter().any(|e| e.name == spec.name)) {
            // An ephemeral container runs once: its end is final.
            return over.clone();
        }
        let mut found = observed.containers.iter().filter(|c| c.name == spec.name);
        let (latest, before) = (found.next(), found.next());
        let mut status = match latest {
            Some(container) => from_runtime(spec, container, before, old, facts),
            None => without_container(pod, spec, old, default_reason),
        };
        apply_failure(pod, spec, latest, observed, facts, init, &mut status);
        status
    };
    specs.iter().map(of).collect()
}

/// The status of a container that the runtime holds.
fn from_runtime(spec: &Spec, container: &Container, before: Option<&Container>, old: Option<&ContainerStatus>, facts: &Facts) -> ContainerStatus {
    let resources = spec.resources.clone().unwrap_or_default();
    let previous_end = old.filter(|o| o.container_id.as_deref() != Some(&container_id(container, facts))).and_then(|o| o.state.clone());
    let kept = old.and_then(|o| o.last_state.clone()).filter(|s| s.terminated.is_some());
    ContainerStatus {
        name: spec.name.clone(),
        image: container.image.clone(),
        image_id: facts.image_refs.get(&container.image_id).unwrap_or(&container.image_id).clone(),
        container_id: Some(container_id(container, facts)),
        restart_count: i32::try_from(container.attempt).unwrap_or(i32::MAX).max(old.map_or(0, |o| o.restart_count)),
        state: Some(state(container, facts)),
        last_state: Some(
            before
                .map(|b| state(b, facts))
                .filter(|s| s.terminated.is_some())
                .or_else(|| previous_end.filter(|s| s.terminated.is_some()))
                .or(kept)
                .unwrap_or_default(),
        ),
        allocated_resources: resources.requests.clone(),
        resources: Some(applied_resources(spec, container, old)),
        volume_mounts: volume_mounts(spec),
        ..Default::default()
    }
}

/// Resources as they are in force: until a resize has been carried out, those of before.
fn applied_resources(spec: &Spec, container: &Container, old: Option<&ContainerStatus>) -> ResourceRequirements {
    let wanted = spec.resources.clone().unwrap_or_default();
    if container.running() && resources::resize(spec, &container.resources).is_some() {
        return old.and_then(|o| o.resources.clone()).unwrap_or(wanted);
    }
    wanted
}

fn container_id(container: &Container, facts: &Facts) -> String {
    format!("{}://{}", facts.scheme, container.id)
}

fn state(container: &Container, facts: &Facts) -> ContainerState {
    match container.state {
        State::Running => ContainerState {
            running: Some(ContainerStateRunning { started_at: container.started_at.map(whole_seconds) }),
            ..Default::default()
        },
        State::Exited => ContainerState {
            terminated: Some(ContainerStateTerminated {
                container_id: Some(container_id(container, facts)),
                exit_code: container.exit_code,
                reason: Some(exit_reason(container).to_owned()),
                message: facts.messages.get(&container.id).cloned().filter(|m| !m.is_empty()),
                started_at: container.started_at.map(whole_seconds),
                finished_at: container.finished_at.map(whole_seconds),
                signal: None,
            }),
            ..Default::default()
        },
        State::Created | State::Unknown => waiting("ContainerCreating", None),
    }
}

fn whole_seconds(time: Timestamp) -> Time {
    Time(Timestamp::from_second(time.as_second()).unwrap_or(time))
}

fn exit_reason(container: &Container) -> &'static str {
    match (container.oom_killed, container.started_at, container.exit_code) {
        (true, ..) => "OOMKilled",
        (_, None, _) if !container.error.is_empty() => "ContainerCannotRun",
        (_, _, 0) => "Completed",
        _ => "Error",
    }
}

fn volume_mounts(spec: &Spec) -> Option<Vec<VolumeMountStatus>> {
    let list = spec.volume_mounts.as_ref()?.iter().map(|m| VolumeMountStatus {
        name: m.name.clone(),
        mount_path: m.mount_path.clone(),
        read_only: m.read_only,
        recursive_read_only: (m.read_only == Some(true)).then(|| "Disabled".to_owned()),
        ..Default::default()
    });
    Some(list.collect())
}

/// The status of a container that the runtime does not hold: not made yet, or removed behind our back.
fn without_container(pod: &Pod, spec: &Spec, old: Option<&ContainerStatus>, default_reason: &str) -> ContainerStatus {
    let mut status = ContainerStatus {
        name: spec.name.clone(),
        image: spec.image.clone().unwrap_or_default(),
        state: Some(waiting(default_reason, None)),
        last_state: Some(ContainerState::default()),
        volume_mounts: volume_mounts(spec),
        ..Default::default()
    };
    let Some(old) = old else { return status };
    let old_state = old.state.clone().unwrap_or_default();
    if old_state.terminated.is_some() {
        return old.clone();
    }
    status.restart_count = old.restart_count;
    status.last_state = old.last_state.clone().or(status.last_state);
    if old_state.running.is_some() && status.last_state.as_ref().is_none_or(|s| s.terminated.is_none()) {
        status.last_state = Some(ContainerState {
            terminated: Some(ContainerStateTerminated {
                reason: Some("ContainerStatusUnknown".into()),
                message: Some("The container could not be located when the pod was deleted.  The container used to be Running".into()),
                exit_code: 137,
                ..Default::default()
            }),
            ..Default::default()
        });
        if pod.metadata.deletion_timestamp.is_none() {
            status.restart_count += 1;
        }
    }
    status
}

/// A container that is to be started again but could not be is waiting, with the reason of the last failure.
fn apply_failure(pod: &Pod, spec: &Spec, latest: Option<&Container>, observed: &Observed, facts: &Facts, init: bool, status: &mut ContainerStatus) {
    if init {
        if latest.is_some_and(|c| c.state == State::Exited && c.exit_code == 0) && !model::is_sidecar(spec) {
            return;
        }
        let is_waiting = status.state.as_ref().is_some_and(|s| s.waiting.is_some());
        if latest.is_none() && any_regular_created(pod, observed) && !model::is_sidecar(spec) && is_waiting {
            status.state = Some(ContainerState {
                terminated: Some(ContainerStateTerminated {
                    reason: Some("Completed".into()),
                    message: Some("Unable to get init container status from container runtime and pod has been initialized, treat it as exited normally".into()),
                    ..Default::default()
                }),
                ..Default::default()
            });
            return;
        }
    }
    if facts.terminal || latest.is_some_and(Container::running) {
        return;
    }
    let restarts = latest.is_none_or(|c| c.state != State::Exited || model::restarts_after(pod, spec, c.exit_code));
    let Some(error) = facts.errors.get(&spec.name).filter(|_| restarts) else { return };
    if let Some(ended) = status.state.take().filter(|s| s.terminated.is_some()) {
        status.last_state = Some(ended);
    }
    status.state = Some(waiting(&error.reason, Some(error.message.clone())));
}

fn set_ready(pod: &Pod, status: &mut ContainerStatus, facts: &Facts) {
    let Some((kind, spec)) = model::find(pod, &status.name) else { return };
    let state = status.state.clone().unwrap_or_default();
    let running = state.running.is_some();
    let id = status.container_id.as_deref().and_then(|id| id.split_once("://")).map(|(_, id)| id).unwrap_or("");
    let verdict = facts.verdicts.get(id).copied().unwrap_or_default();
    let started = running && (spec.startup_probe.is_none() || verdict.startup == Some(true));
    match kind {
        Kind::Init => {
            status.ready = state.terminated.is_some_and(|t| t.exit_code == 0);
            status.started = Some(started);
        }
        Kind::Ephemeral => {
            status.ready = false;
        }
        Kind::Sidecar | Kind::Regular => {
            status.started = Some(started);
            status.ready = started && (spec.readiness_probe.is_none() || verdict.readiness == Some(true));
        }
    }
}

#[derive(Default)]
struct Counts {
    pending_init: u32,
    pending_sidecars: u32,
    init_failed: bool,
    unknown: u32,
    running: u32,
    waiting: u32,
    stopped: u32,
    stopped_for_good: u32,
    succeeded: u32,
}

/// The pod's phase from its containers' statuses.
pub fn phase(pod: &Pod, statuses: &[ContainerStatus], terminal: bool, initialized: bool) -> &'static str {
    let by_name: BTreeMap<&str, &ContainerStatus> = statuses.iter().map(|s| (s.name.as_str(), s)).collect();
    let mut counts = Counts::default();
    for spec in model::init_containers(pod) {
        let status = by_name.get(spec.name.as_str()).copied();
        if model::is_sidecar(spec) { count_sidecar(status, &mut counts) } else { count_init(pod, spec, status, &mut counts) }
    }
    for spec in model::containers(pod) {
        count_regular(pod, spec, by_name.get(spec.name.as_str()).copied(), &mut counts);
    }
    if counts.init_failed {
        return "Failed";
    }
    let pending = counts.pending_init > 0 || (counts.pending_sidecars > 0 && !initialized) || counts.waiting > 0;
    if pending {
        return "Pending";
    }
    if counts.running > 0 && counts.unknown == 0 {
        return "Running";
    }
    if counts.running == 0 && counts.stopped > 0 && counts.unknown == 0 {
        let all_good = counts.stopped == counts.succeeded;
        let over = counts.stopped == counts.stopped_for_good || (terminal && !model::is_static(pod));
        return match (over, all_good) {
            (true, true) => "Succeeded",
            (true, false) => "Failed",
            (false, _) => "Running",
        };
    }
    "Pending"
}

fn ended(status: &ContainerStatus) -> (bool, bool, Option<i32>, bool) {
    let state = status.state.clone().unwrap_or_default();
    let last = status.last_state.clone().unwrap_or_default().terminated.map(|t| t.exit_code);
    (state.running.is_some(), state.waiting.is_some(), state.terminated.map(|t| t.exit_code).or(last), last.is_some())
}

fn count_init(pod: &Pod, spec: &Spec, status: Option<&ContainerStatus>, counts: &mut Counts) {
    let Some(status) = status else {
        counts.pending_init += 1;
        return;
    };
    let (running, waiting, code, has_last) = ended(status);
    match code {
        Some(code) if !running && (!waiting || has_last) => {
            if code != 0 && !model::restarts_after(pod, spec, code) {
                counts.init_failed = true;
            }
            // A failed one that is tried again neither blocks nor passes: it counts where upstream counts it, nowhere.
        }
        _ => counts.pending_init += 1,
    }
}

fn count_sidecar(status: Option<&ContainerStatus>, counts: &mut Counts) {
    let Some(status) = status else {
        counts.unknown += 1;
        return;
    };
    match ended(status) {
        (true, ..) => {
            counts.running += 1;
            if status.started != Some(true) {
                counts.pending_sidecars += 1;
            }
        }
        (_, true, _, false) => {
            counts.pending_sidecars += 1;
            counts.waiting += 1;
        }
        (_, true, ..) | (_, _, Some(_), _) => {}
        _ => {
            counts.pending_sidecars += 1;
            counts.unknown += 1;
        }
    }
}

fn count_regular(pod: &Pod, spec: &Spec, status: Option<&ContainerStatus>, counts: &mut Counts) {
    let Some(status) = status else {
        counts.unknown += 1;
        return;
    };
    let (running, waiting, code, has_last) = ended(status);
    if running {
        counts.running += 1;
        return;
    }
    match code {
        Some(code) if !waiting || has_last => {
            counts.stopped += 1;
            if !model::restarts_after(pod, spec, code) {
                counts.stopped_for_good += 1;
            }
            // Upstream counts a success only in the present state.
            if code == 0 && !waiting {
                counts.succeeded += 1;
            }
        }
        _ if waiting => counts.waiting += 1,
        _ => counts.unknown += 1,
    }
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
