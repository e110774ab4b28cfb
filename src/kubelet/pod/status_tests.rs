use super::*;
use crate::pod::model::tests::pod;
use serde_json::{Value, json};

/// `"name:state"`: r running, w waiting, l waiting after an end with 1, a number for the exit code.
fn statuses(list: &[&str]) -> Vec<ContainerStatus> {
    let ended = |code: i32| ContainerState { terminated: Some(ContainerStateTerminated { exit_code: code, ..Default::default() }), ..Default::default() };
    let parse = |text: &&str| {
        let (name, state) = text.split_once(':').expect("name:state");
        let mut status = ContainerStatus { name: name.into(), ..Default::default() };
        match state {
            "r" => {
                status.state = Some(ContainerState { running: Some(ContainerStateRunning::default()), ..Default::default() });
                status.started = Some(true);
                status.ready = true;
            }
            "w" => status.state = Some(waiting("ContainerCreating", None)),
            "l" => {
                status.state = Some(waiting("CrashLoopBackOff", None));
                status.last_state = Some(ended(1));
            }
            code => {
                let code: i32 = code.parse().expect("code");
                status.state = Some(ended(code));
                status.ready = code == 0;
            }
        }
        status
    };
    list.iter().map(parse).collect()
}

fn check_phase(spec: Value, list: &[&str], terminal: bool, expected: &str) {
    assert_eq!(phase(&pod(spec.clone()), &statuses(list), terminal, false), expected, "{spec} {list:?}");
}

fn two(policy: &str) -> Value {
    json!({"restartPolicy": policy, "containers": [{"name": "a"}, {"name": "b"}]})
}

#[test]
fn phases_of_regular_containers() {
    check_phase(two("Always"), &[], false, "Pending");
    check_phase(two("Always"), &["a:w", "b:w"], false, "Pending");
    check_phase(two("Always"), &["a:r", "b:w"], false, "Pending");
    check_phase(two("Always"), &["a:r", "b:r"], false, "Running");
    check_phase(two("Always"), &["a:r", "b:1"], false, "Running");
    check_phase(two("Always"), &["a:r"], false, "Pending");
    check_phase(two("Always"), &["a:0", "b:0"], false, "Running");
    check_phase(two("Always"), &["a:0", "b:0"], true, "Succeeded");
    check_phase(two("Always"), &["a:0", "b:1"], true, "Failed");
    check_phase(two("Always"), &["a:l", "b:l"], false, "Running");
    check_phase(two("Never"), &["a:0", "b:0"], false, "Succeeded");
    check_phase(two("Never"), &["a:0", "b:1"], false, "Failed");
    check_phase(two("Never"), &["a:r", "b:1"], false, "Running");
    check_phase(two("OnFailure"), &["a:0", "b:0"], false, "Succeeded");
    check_phase(two("OnFailure"), &["a:0", "b:1"], false, "Running");
    check_phase(two("OnFailure"), &["a:r", "b:l"], false, "Running");
}

#[test]
fn phases_with_init_containers() {
    let spec = |policy: &str| json!({"restartPolicy": policy, "initContainers": [{"name": "i"}], "containers": [{"name": "a"}]});
    check_phase(spec("Always"), &["i:r", "a:w"], false, "Pending");
    check_phase(spec("Always"), &["i:0", "a:w"], false, "Pending");
    check_phase(spec("Always"), &["i:0", "a:r"], false, "Running");
    check_phase(spec("Never"), &["i:1", "a:w"], false, "Failed");
    check_phase(spec("Always"), &["i:l", "a:w"], false, "Pending");
    let sidecar = json!({"restartPolicy": "Never", "initContainers": [{"name": "s", "restartPolicy": "Always"}], "containers": [{"name": "a"}]});
    check_phase(sidecar.clone(), &["s:r", "a:w"], false, "Pending");
    check_phase(sidecar.clone(), &["s:r", "a:r"], false, "Running");
    check_phase(sidecar.clone(), &["s:r", "a:0"], false, "Running");
    check_phase(sidecar, &["s:137", "a:0"], false, "Succeeded");
}

fn container(name: &str, state: State, code: i32, at: i64) -> Container {
    crate::pod::plan::tests_container(name, state, code, at)
}

fn full(spec: Value, previous: PodStatus, containers: Vec<Container>, facts: Facts) -> PodStatus {
    let mut all = containers;
    all.push(container("POD", State::Running, 0, 1));
    let observed = Observed::new(all, vec!["10.1.0.2".into()]);
    compute(&pod(spec), &previous, &observed, &facts, Timestamp::from_second(100).expect("time"))
}

fn conditions(status: &PodStatus) -> String {
    let list = status.conditions.iter().flatten();
    list.map(|c| format!("{}={}{}", c.type_, &c.status[..1], c.reason.as_deref().map(|r| format!("({r})")).unwrap_or_default())).collect::<Vec<_>>().join(" ")
}

fn facts() -> Facts {
    Facts { scheme: "docker", host_ips: vec!["192.168.0.1".into()], ..Default::default() }
}

#[test]
fn a_running_pod() {
    let spec = json!({"containers": [{"name": "a", "image": "img"}]});
    let status = full(spec, PodStatus::default(), vec![container("a", State::Running, 0, 5)], facts());
    assert_eq!(status.phase.as_deref(), Some("Running"));
    assert_eq!(conditions(&status), "PodReadyToStartContainers=T Initialized=T Ready=T ContainersReady=T PodScheduled=T");
    assert_eq!((status.pod_ip.as_deref(), status.host_ip.as_deref()), (Some("10.1.0.2"), Some("192.168.0.1")));
    let container = &status.container_statuses.expect("statuses")[0];
    assert_eq!((container.ready, container.started, container.container_id.as_deref()), (true, Some(true), Some("docker://a-5")));
}

#[test]
fn probes_decide_readiness() {
    let spec = json!({"containers": [{"name": "a", "readinessProbe": {"exec": {"command": ["x"]}}, "startupProbe": {"exec": {"command": ["x"]}}}]});
    let check = |verdict: Verdicts, started: bool, ready: bool| {
        let mut facts = facts();
        facts.verdicts.insert("a-5".into(), verdict);
        let status = full(spec.clone(), PodStatus::default(), vec![container("a", State::Running, 0, 5)], facts);
        let c = &status.container_statuses.expect("statuses")[0];
        assert_eq!((c.started, c.ready), (Some(started), ready), "{verdict:?}");
    };
    check(Verdicts::default(), false, false);
    check(Verdicts { readiness: Some(true), ..Default::default() }, false, false);
    check(Verdicts { startup: Some(true), readiness: Some(true), liveness: None }, true, true);
    check(Verdicts { startup: Some(true), readiness: Some(false), liveness: None }, true, false);
}

#[test]
fn a_crash_loop_shows_the_last_end() {
    let spec = json!({"containers": [{"name": "a", "image": "img"}]});
    let mut facts = facts();
    facts.errors.insert("a".into(), Why::new("CrashLoopBackOff", "back-off 10s"));
    facts.messages.insert("a-5".into(), "boom".into());
    let status = full(spec, PodStatus::default(), vec![container("a", State::Exited, 3, 5)], facts);
    assert_eq!(status.phase.as_deref(), Some("Running"));
    let c = &status.container_statuses.expect("statuses")[0];
    let reason = c.state.as_ref().and_then(|s| s.waiting.as_ref()).and_then(|w| w.reason.as_deref());
    let last = c.last_state.as_ref().and_then(|s| s.terminated.as_ref()).map(|t| (t.exit_code, t.reason.as_deref(), t.message.as_deref()));
    assert_eq!((reason, last), (Some("CrashLoopBackOff"), Some((3, Some("Error"), Some("boom")))));
}

#[test]
fn a_container_whose_hook_runs_is_not_running_yet() {
    let spec = json!({"containers": [{"name": "a"}]});
    let mut facts = facts();
    facts.starting.insert("a-5".into());
    let status = full(spec, PodStatus::default(), vec![container("a", State::Running, 0, 5)], facts);
    assert_eq!(status.phase.as_deref(), Some("Pending"));
}

#[test]
fn a_terminal_phase_is_kept() {
    let previous = PodStatus { phase: Some("Failed".into()), reason: Some("Evicted".into()), ..Default::default() };
    let status = full(json!({"containers": [{"name": "a"}]}), previous, vec![container("a", State::Running, 0, 5)], facts());
    assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some("Failed"), Some("Evicted")));
}

#[test]
fn transition_times_change_with_the_status_only() {
    let spec = json!({"containers": [{"name": "a"}]});
    let first = full(spec.clone(), PodStatus::default(), vec![], facts());
    assert_eq!(conditions(&first), "PodReadyToStartContainers=T Initialized=T Ready=F(ContainersNotReady) ContainersReady=F(ContainersNotReady) PodScheduled=T");
    let mut early = first.clone();
    for c in early.conditions.iter_mut().flatten() {
        c.last_transition_time = Some(Time(Timestamp::from_second(7).expect("time")));
    }
    let second = full(spec, early, vec![container("a", State::Running, 0, 5)], facts());
    let time = |kind: &str| model::condition(second.conditions.as_ref(), kind).and_then(|c| c.last_transition_time.as_ref()).map(|t| t.0.as_second());
    assert_eq!((time("PodScheduled"), time("Ready")), (Some(7), Some(100)));
}

#[test]
fn what_never_ran_ends_unknown() {
    let spec = json!({"containers": [{"name": "a"}, {"name": "b"}]});
    let facts = Facts { terminal: true, ..facts() };
    let mut status = full(spec.clone(), PodStatus::default(), vec![container("a", State::Exited, 0, 5)], facts);
    finalize(&pod(spec), &mut status);
    let ends: Vec<(i32, Option<String>)> = status.container_statuses.iter().flatten().filter_map(|c| c.state.clone()?.terminated).map(|t| (t.exit_code, t.reason)).collect();
    assert_eq!(ends, [(0, Some("Completed".into())), (137, Some("ContainerStatusUnknown".into()))]);
    assert_eq!(status.phase.as_deref(), Some("Failed"));
}
