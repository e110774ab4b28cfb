use super::*;
use crate::pod::model::tests::pod;
use serde_json::{Value, json};

pub(crate) fn container(name: &str, state: State, code: i32, at: i64) -> Container {
    let spec = Spec { name: name.into(), image: Some("img".into()), ..Default::default() };
    let time = |s| Timestamp::from_second(s).ok();
    Container {
        id: format!("{name}-{at}"),
        name: name.into(),
        pod_uid: "u1".into(),
        pod_name: "p".into(),
        pod_namespace: "ns".into(),
        attempt: 0,
        hash: model::container_hash(&spec),
        sandbox: "POD-1".into(),
        image: "img".into(),
        image_id: "sha256:1".into(),
        state,
        pid: 0,
        created_at: time(at),
        started_at: (state != State::Created).then(|| time(at)).flatten(),
        finished_at: (state == State::Exited).then(|| time(at + 1)).flatten(),
        exit_code: code,
        oom_killed: false,
        error: String::new(),
        tty: false,
        user: String::new(),
        resources: crate::pod::resources::of_container(&spec, 0),
        labels: Default::default(),
    }
}

fn sandbox(state: State) -> Container {
    container("POD", state, 0, 1)
}

/// `"name:state"` where state is r(unning), c(reated) or an exit code.
fn observe(list: &[&str]) -> Observed {
    let all = list.iter().enumerate().map(|(i, text)| {
        let (name, state) = text.split_once(':').expect("name:state");
        let at = 1 + i as i64;
        if name == "POD" {
            return sandbox(if state == "r" { State::Running } else { State::Exited });
        }
        match state {
            "r" => container(name, State::Running, 0, at),
            "c" => container(name, State::Created, 0, at),
            code => container(name, State::Exited, code.parse().expect("code"), at),
        }
    });
    Observed::new(all.collect::<Vec<_>>(), vec!["10.0.0.1".into()])
}

fn check(spec: Value, seen: &[&str], expected: &str) {
    check_probed(spec, seen, &[], expected);
}

fn check_probed(mut spec: Value, seen: &[&str], probed: &[(&str, Verdicts)], expected: &str) {
    for list in ["containers", "initContainers", "ephemeralContainers"] {
        for c in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            c["image"] = json!("img");
        }
    }
    let observed = observe(seen);
    let verdicts = probed
        .iter()
        .filter_map(|(name, v)| Some((observed.latest(name)?.id.clone(), *v)))
        .collect();
    let plan = plan(&pod(spec.clone()), &observed, &verdicts);
    let mut words = Vec::new();
    if plan.kill_pod {
        words.push("killpod".to_owned());
    }
    if plan.create_sandbox {
        words.push("sandbox".to_owned());
    }
    words.extend(plan.kill.iter().map(|k| format!("-{}", k.name)));
    words.extend(plan.start.iter().map(|s| format!("+{s}")));
    assert_eq!(words.join(" "), expected, "{spec} {seen:?}");
}

fn simple(policy: &str) -> Value {
    json!({"restartPolicy": policy, "containers": [{"name": "a"}, {"name": "b"}]})
}

#[test]
fn regular_containers() {
    check(simple("Always"), &[], "sandbox +a +b");
    check(simple("Always"), &["POD:r"], "+a +b");
    check(simple("Always"), &["POD:r", "a:r", "b:r"], "");
    check(simple("Always"), &["POD:r", "a:r", "b:c"], "+b");
    check(simple("Always"), &["POD:r", "a:0", "b:r"], "+a");
    check(simple("OnFailure"), &["POD:r", "a:0", "b:r"], "");
    check(simple("OnFailure"), &["POD:r", "a:1", "b:r"], "+a");
    check(simple("OnFailure"), &["POD:r", "a:0", "b:0"], "killpod");
    check(simple("Never"), &["POD:r", "a:1", "b:0"], "killpod");
    check(simple("Never"), &["POD:r", "a:1", "b:r"], "");
    check(simple("Never"), &["POD:r", "a:1"], "+b");
}

#[test]
fn a_lost_sandbox() {
    check(simple("Always"), &["POD:x", "a:0", "b:0"], "killpod sandbox +a +b");
    check(simple("Never"), &["POD:x", "a:0", "b:0"], "killpod");
    check(simple("Never"), &["POD:x"], "killpod sandbox +a +b");
    check(simple("OnFailure"), &["POD:x", "a:0", "b:1"], "killpod sandbox +b");
    check(simple("OnFailure"), &["POD:x", "a:0", "b:0"], "killpod");
}

fn with_init(policy: &str) -> Value {
    json!({"restartPolicy": policy, "initContainers": [{"name": "i1"}, {"name": "i2"}], "containers": [{"name": "a"}]})
}

#[test]
fn init_containers_run_in_order() {
    check(with_init("Always"), &[], "sandbox +i1");
    check(with_init("Always"), &["POD:r"], "+i1");
    check(with_init("Always"), &["POD:r", "i1:r"], "");
    check(with_init("Always"), &["POD:r", "i1:0"], "+i2");
    check(with_init("Always"), &["POD:r", "i1:0", "i2:0"], "+a");
    check(with_init("Always"), &["POD:r", "i1:0", "i2:0", "a:r"], "");
    check(with_init("Always"), &["POD:r", "i1:1"], "+i1");
    check(with_init("Never"), &["POD:r", "i1:1"], "killpod");
    // A removed init container does not run again once a regular one has.
    check(with_init("Always"), &["POD:r", "a:1"], "+a");
    check(with_init("Always"), &["POD:x", "i1:0", "i2:0", "a:r"], "killpod sandbox +i1");
}

#[test]
fn sidecars() {
    let spec = |policy: &str, startup: bool| {
        let mut sidecar = json!({"name": "s", "restartPolicy": "Always"});
        if startup {
            sidecar["startupProbe"] = json!({"exec": {"command": ["true"]}});
        }
        json!({"restartPolicy": policy, "initContainers": [sidecar, {"name": "i"}], "containers": [{"name": "a"}]})
    };
    check(spec("Never", false), &["POD:r", "s:r"], "+i");
    check(spec("Never", true), &["POD:r", "s:r"], "");
    let started = Verdicts { startup: Some(true), ..Default::default() };
    check_probed(spec("Never", true), &["POD:r", "s:r"], &[("s", started)], "+i");
    check(spec("Never", false), &["POD:r", "s:1"], "+s");
    check(spec("Never", false), &["POD:r", "s:r", "i:0"], "+a");
    check(spec("Never", false), &["POD:r", "s:1", "i:0", "a:r"], "+s");
    // The last regular container has ended: sidecars do not keep the pod alive.
    check(spec("Never", false), &["POD:r", "s:1", "i:0", "a:0"], "killpod");
    let failed = Verdicts { startup: Some(false), ..Default::default() };
    check_probed(spec("Never", true), &["POD:r", "s:r"], &[("s", failed)], "-s +s");
}

#[test]
fn probes_and_changes() {
    let dead = Verdicts { liveness: Some(false), ..Default::default() };
    check_probed(simple("Always"), &["POD:r", "a:r", "b:r"], &[("a", dead)], "-a +a");
    check_probed(simple("Never"), &["POD:r", "a:r", "b:r"], &[("a", dead)], "-a");
    let changed = json!({"containers": [{"name": "a"}]});
    let mut observed = observe(&["POD:r", "a:r"]);
    observed.containers[0].hash = "other".into();
    let plan = plan(&pod(changed), &observed, &HashMap::new());
    assert_eq!((plan.kill.len(), plan.start.as_slice()), (1, &["a".to_owned()][..]));
}

#[test]
fn ephemeral_containers_start_once() {
    let spec = || json!({"ephemeralContainers": [{"name": "debug"}], "containers": [{"name": "a"}]});
    check(spec(), &["POD:r", "a:r"], "+debug");
    check(spec(), &["POD:r", "a:r", "debug:1"], "");
}

#[test]
fn back_off_doubles() {
    let second = |s| Timestamp::from_second(s).expect("time");
    let mut backoff = Backoff::new(SignedDuration::from_secs(10), SignedDuration::from_secs(300));
    let mut ended = 1000;
    assert_eq!(backoff.until("a", second(ended), second(ended)), None);
    for expected in [10, 20, 40, 80, 160, 300, 300] {
        backoff.next("a", second(ended), second(ended));
        ended += 1;
        let (until, _) = backoff.until("a", second(ended), second(ended)).expect("waits");
        assert_eq!(until, second(ended + expected));
        ended += expected;
        assert_eq!(backoff.until("a", second(ended - expected), second(ended)), None);
    }
    backoff.next("a", second(ended + 1000), second(ended + 1000));
    let (until, _) = backoff.until("a", second(ended + 1001), second(ended + 1001)).expect("waits");
    assert_eq!(until, second(ended + 1011), "ten quiet minutes reset it");
}

#[test]
fn sidecars_stop_last_and_in_reverse() {
    let spec = json!({
        "initContainers": [{"name": "s1", "restartPolicy": "Always"}, {"name": "s2", "restartPolicy": "Always"}],
        "containers": [{"name": "a"}, {"name": "b"}]});
    let order = termination_order(&pod(spec), &observe(&["POD:r", "s1:r", "s2:r", "a:r", "b:0"]));
    let names: Vec<Vec<&str>> = order.iter().map(|step| step.iter().map(|c| c.name.as_str()).collect()).collect();
    assert_eq!(names, [vec!["a"], vec!["s2"], vec!["s1"]]);
}
