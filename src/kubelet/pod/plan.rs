//! What is to be done for a pod next: [`plan`] compares its specification with what the runtime holds.
//!
//! Pure: no clock but an argument, no I/O. It decides as upstream's `computePodActions` does.

use std::collections::HashMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Container as Spec, Pod};

use super::model::{self, Kind};
use super::resources::{self, Resize};
use crate::runtime::{Container, State};

/// What the runtime holds for one pod, newest first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observed {
    pub sandboxes: Vec<Container>,
    pub containers: Vec<Container>,
    /// The addresses that the network gave the newest sandbox.
    pub addresses: Vec<String>,
}

impl Observed {
    pub fn new(all: impl IntoIterator<Item = Container>, addresses: Vec<String>) -> Self {
        let (mut sandboxes, mut containers): (Vec<_>, Vec<_>) = all.into_iter().partition(Container::is_sandbox);
        for list in [&mut sandboxes, &mut containers] {
            list.sort_by(|a, b| b.created_at.cmp(&a.created_at).then(b.attempt.cmp(&a.attempt)));
        }
        Self { sandboxes, containers, addresses }
    }

    /// The newest container of that name.
    pub fn latest(&self, name: &str) -> Option<&Container> {
        self.containers.iter().find(|c| c.name == name)
    }

    /// The newest container of that name in the newest sandbox: one from before a sandbox was replaced does not count.
    pub fn active(&self, name: &str) -> Option<&Container> {
        let sandbox = self.sandboxes.first()?;
        self.containers.iter().find(|c| c.name == name && c.sandbox == sandbox.id)
    }

    pub fn running(&self) -> impl Iterator<Item = &Container> {
        self.containers.iter().filter(|c| c.running())
    }

    pub fn sandbox(&self) -> Option<&Container> {
        self.sandboxes.first().filter(|s| s.running())
    }

    pub fn next_attempt(&self, name: &str) -> u32 {
        self.containers.iter().filter(|c| c.name == name).map(|c| c.attempt + 1).max().unwrap_or(0)
    }
}

/// The last verdict of a container's probes, by container id; `None` where there is no verdict yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verdicts {
    pub startup: Option<bool>,
    pub liveness: Option<bool>,
    pub readiness: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KillReason {
    LivenessProbe,
    StartupProbe,
    /// Its specification changed, or the whole pod ends.
    Other,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kill {
    pub id: String,
    pub name: String,
    pub message: String,
    pub reason: KillReason,
}

/// The next step for a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Stop everything in the pod, the sandbox included.
    pub kill_pod: bool,
    pub create_sandbox: bool,
    /// Why the present sandbox will not do; empty when it will.
    pub sandbox_problem: &'static str,
    pub kill: Vec<Kill>,
    /// Containers to start, in order.
    pub start: Vec<String>,
}

/// Whether a sandbox must be made, and why.
pub fn sandbox_problem(pod: &Pod, observed: &Observed) -> Option<&'static str> {
    if observed.sandboxes.iter().filter(|s| s.running()).count() > 1 {
        return Some("Multiple sandboxes are ready");
    }
    let Some(latest) = observed.sandboxes.first() else {
        return Some("No sandbox for pod can be found. Need to start a new one");
    };
    if !latest.running() {
        return Some("No ready sandbox for pod can be found. Need to start a new one");
    }
    if !model::host_network(pod) && observed.addresses.is_empty() {
        return Some("Sandbox for pod has no IP address. Need to start a new one");
    }
    None
}

/// `verdicts` gives what probes say about a container id.
pub fn plan(pod: &Pod, observed: &Observed, verdicts: &HashMap<String, Verdicts>) -> Plan {
    let mut plan = Plan::default();
    if let Some(problem) = sandbox_problem(pod, observed) {
        plan.sandbox_problem = problem;
        plan_new_sandbox(pod, observed, &mut plan);
        return plan;
    }
    for container in model::ephemeral_containers(pod) {
        if observed.latest(&container.name).is_none() {
            plan.start.push(container.name.clone());
        }
    }
    let initialized = plan_init(pod, observed, verdicts, &mut plan);
    if plan.kill_pod || !initialized {
        return plan;
    }
    let mut keep = 0;
    let mut start = Vec::new();
    for container in model::containers(pod) {
        let latest = observed.latest(&container.name);
        match latest {
            Some(found) if found.running() => match unwanted(container, found, verdicts, "Container") {
                None => keep += 1,
                Some((mut kill, forced)) => {
                    let policy = container.restart_policy.as_deref().unwrap_or(model::restart_policy(pod));
                    if forced || policy != "Never" {
                        kill.message.push_str(", will be restarted");
                        start.push(container.name.clone());
                    }
                    plan.kill.push(kill);
                }
            },
            found if should_start(pod, container, found) => start.push(container.name.clone()),
            _ => {}
        }
    }
    if keep == 0 && start.is_empty() && plan.kill.is_empty() {
        plan.kill_pod = true;
        plan.start.clear();
    }
    plan.start.extend(start);
    plan
}

fn plan_new_sandbox(pod: &Pod, observed: &Observed, plan: &mut Plan) {
    plan.kill_pod = !observed.sandboxes.is_empty() || observed.running().next().is_some();
    let again = !observed.sandboxes.is_empty();
    let never = model::restart_policy(pod) == "Never" && model::containers(pod).iter().all(|c| c.restart_policy.as_deref().unwrap_or("Never") == "Never");
    if never && again && !observed.containers.is_empty() {
        return;
    }
    let mut start: Vec<String> = Vec::new();
    for container in model::containers(pod) {
        let policy = container.restart_policy.as_deref().unwrap_or(model::restart_policy(pod));
        let succeeded = observed.latest(&container.name).is_some_and(|c| c.state == State::Exited && c.exit_code == 0);
        if !(policy == "OnFailure" && succeeded) {
            start.push(container.name.clone());
        }
    }
    if start.is_empty() && any_regular_created(pod, observed) {
        return;
    }
    plan.create_sandbox = true;
    match model::init_containers(pod).first() {
        Some(first) => plan.start.push(first.name.clone()),
        None => plan.start = start,
    }
}

pub fn any_regular_created(pod: &Pod, observed: &Observed) -> bool {
    model::containers(pod).iter().any(|c| observed.latest(&c.name).is_some())
}

/// Whether a regular container has run in the present sandbox: init containers are then behind us.
pub fn initialized(pod: &Pod, observed: &Observed) -> bool {
    model::containers(pod).iter().any(|c| observed.active(&c.name).is_some_and(|c| c.state != State::Created && c.state != State::Unknown))
}

fn should_start(pod: &Pod, container: &Spec, found: Option<&Container>) -> bool {
    match found {
        None => true,
        Some(c) if c.state == State::Running => false,
        Some(c) if matches!(c.state, State::Created | State::Unknown) => true,
        Some(c) => model::restarts_after(pod, container, c.exit_code),
    }
}

/// Why a running container must be stopped; the flag says that it restarts whatever its policy.
fn unwanted(container: &Spec, found: &Container, verdicts: &HashMap<String, Verdicts>, word: &str) -> Option<(Kill, bool)> {
    let verdict = verdicts.get(&found.id).copied().unwrap_or_default();
    let (message, reason, forced) = if found.hash != model::container_hash(container) {
        (format!("{word} {} definition changed", container.name), KillReason::Other, true)
    } else if resources::resize(container, &found.resources) == Some(Resize::Restart) {
        (format!("{word} {} resize requires restart", container.name), KillReason::Other, true)
    } else if verdict.liveness == Some(false) {
        (format!("{word} {} failed liveness probe", container.name), KillReason::LivenessProbe, false)
    } else if verdict.startup == Some(false) {
        (format!("{word} {} failed startup probe", container.name), KillReason::StartupProbe, false)
    } else {
        return None;
    };
    Some((Kill { id: found.id.clone(), name: container.name.clone(), message, reason }, forced))
}

/// Plans init containers, from the last to the first, and tells whether initialization is over.
fn plan_init(pod: &Pod, observed: &Observed, verdicts: &HashMap<String, Verdicts>, plan: &mut Plan) -> bool {
    let init = model::init_containers(pod);
    if init.is_empty() {
        return true;
    }
    let mut done = initialized(pod, observed);
    let mut later_known = done;
    let mut start: Vec<usize> = Vec::new();
    for (index, container) in init.iter().enumerate().rev() {
        let sidecar = model::is_sidecar(container);
        let Some(found) = observed.active(&container.name) else {
            if later_known && sidecar {
                start.push(index);
            }
            continue;
        };
        if later_known && !sidecar {
            continue;
        }
        match found.state {
            State::Created | State::Unknown => start.push(index),
            State::Running if sidecar => {
                plan_sidecar(index, init, found, verdicts, plan, (&mut start, &mut done), later_known);
            }
            State::Running => {}
            State::Exited if sidecar => start.push(index),
            State::Exited if found.exit_code == 0 => {
                if index + 1 == init.len() {
                    done = true;
                } else {
                    start.push(index + 1);
                }
            }
            State::Exited => {
                if !model::restarts_after(pod, container, found.exit_code) {
                    plan.kill_pod = true;
                    plan.start.clear();
                    return false;
                }
                start.push(index);
            }
        }
        later_known = true;
    }
    if !later_known {
        start.push(0);
    }
    start.sort_unstable();
    start.dedup();
    plan.start.extend(start.into_iter().map(|i| init[i].name.clone()));
    done
}

fn plan_sidecar(
    index: usize,
    init: &[Spec],
    found: &Container,
    verdicts: &HashMap<String, Verdicts>,
    plan: &mut Plan,
    (start, done): (&mut Vec<usize>, &mut bool),
    later_known: bool,
) {
    let container = &init[index];
    let verdict = verdicts.get(&found.id).copied().unwrap_or_default();
    if let Some((kill, _)) = unwanted(container, found, verdicts, "Init container") {
        plan.kill.push(kill);
        start.push(index);
        return;
    }
    if container.startup_probe.is_some() && verdict.startup != Some(true) {
        return;
    }
    if index + 1 == init.len() {
        *done = true;
    } else if !later_known {
        start.push(index + 1);
    }
}

/// The back-off between restarts of one container: 10 s, doubling to five minutes, forgotten after ten quiet minutes.
#[derive(Clone, Debug)]
pub struct Backoff {
    initial: SignedDuration,
    max: SignedDuration,
    entries: HashMap<String, (SignedDuration, Timestamp)>,
}

impl Backoff {
    pub fn new(initial: SignedDuration, max: SignedDuration) -> Self {
        Self { initial, max, entries: HashMap::new() }
    }

    /// Until when `key`, which ended at `ended`, has to wait; `None` when it may go now.
    pub fn until(&self, key: &str, ended: Timestamp, now: Timestamp) -> Option<(Timestamp, SignedDuration)> {
        let (delay, updated) = self.entries.get(key)?;
        if now.duration_since(*updated) > self.max * 2 {
            return None;
        }
        let until = ended.checked_add(*delay).ok()?;
        (until > now).then_some((until, *delay))
    }

    /// Counts one more attempt, after one that ended at `ended`.
    pub fn next(&mut self, key: &str, ended: Timestamp, now: Timestamp) {
        let delay = match self.entries.get(key) {
            Some((delay, updated)) if ended.duration_since(*updated) <= self.max * 2 => (*delay * 2).min(self.max),
            _ => self.initial,
        };
        self.entries.insert(key.to_owned(), (delay, now));
    }

    pub fn forget(&mut self, key: &str) {
        self.entries.remove(key);
    }
}

/// The order in which a pod's containers are stopped: ephemeral and regular ones at once, then sidecars from the last
/// to the first. Each inner list is stopped together.
pub fn termination_order(pod: &Pod, observed: &Observed) -> Vec<Vec<Container>> {
    let running: Vec<&Container> = observed.running().collect();
    let kind = |c: &Container| model::find(pod, &c.name).map(|(kind, _)| kind);
    let first: Vec<Container> = running.iter().filter(|c| kind(c) != Some(Kind::Sidecar)).map(|c| (*c).clone()).collect();
    let mut order = vec![first];
    for sidecar in model::init_containers(pod).iter().rev().filter(|c| model::is_sidecar(c)) {
        order.push(running.iter().filter(|c| c.name == sidecar.name).map(|c| (*c).clone()).collect());
    }
    order.retain(|step| !step.is_empty());
    order
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
#[cfg(test)]
pub(crate) use tests::container as tests_container;
