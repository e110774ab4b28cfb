//! Cells as upstream's printers fill them.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::*;
use crate::registry::Registry;

fn yaml(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// 2023-11-14T22:13:20Z
fn now() -> Timestamp {
    Timestamp::from_second(1_700_000_000).expect("in range")
}

#[test]
fn durations() {
    let table = [
        (-2, "<invalid>"),
        (-1, "0s"),
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (192, "3m12s"),
        (600, "10m"),
        (3 * 3600 - 1, "179m"),
        (3 * 3600, "3h"),
        (7 * 3600 + 300, "7h5m"),
        (8 * 3600 + 300, "8h"),
        (48 * 3600, "2d"),
        (51 * 3600, "2d3h"),
        (8 * 86400 + 3600, "8d"),
        (729 * 86400, "729d"),
        (2 * 365 * 86400, "2y"),
        (732 * 86400, "2y2d"),
        (8 * 365 * 86400 + 86400, "8y"),
    ];
    for (seconds, want) in table {
        assert_eq!(duration::human(seconds), want, "{seconds}");
    }
}

#[test]
fn paths() {
    let object = yaml(
        r#"{spec: {a.b: x, list: [{name: n1, v: 1}, {name: n2, v: 2}], n: 3}, status: {conditions: [{type: Ready, status: 'True'}, {type: Other, status: 'False'}]}}"#,
    );
    let table: [(&str, &[Value]); 9] = [
        (".spec.n", &[json!(3)]),
        ("{.spec.n}", &[json!(3)]),
        (".spec.a\\.b", &[json!("x")]),
        (".spec['a.b']", &[json!("x")]),
        (".spec.list[0].name", &[json!("n1")]),
        (".spec.list[-1].name", &[json!("n2")]),
        (".spec.list[*].v", &[json!(1), json!(2)]),
        (r#".status.conditions[?(@.type=="Ready")].status"#, &[json!("True")]),
        (".spec.missing", &[]),
    ];
    for (path, want) in table {
        let path = JsonPath::parse(path).unwrap_or_else(|| panic!("{path}"));
        assert_eq!(path.all(&object), want.iter().collect::<Vec<_>>(), "{path:?}");
    }
    for bad in ["spec.n", ".spec[", ".spec.list[?(@.x", "{.a"] {
        assert!(JsonPath::parse(bad).is_none(), "{bad}");
    }
}

fn cells(object: &Value) -> Vec<String> {
    let (group, version) = crate::meta::split_api_version(crate::meta::api_version(object));
    let r = Registry::builtin().find_kind(group, version, crate::meta::kind(object)).expect("built in");
    let cells = row(&r, version, object, now());
    assert_eq!(cells.len(), columns_for(&r, version).len());
    let show = |v: Value| match v {
        Value::String(s) => s,
        v => v.to_string(),
    };
    cells.into_iter().map(show).collect()
}

#[test]
fn pods() {
    // Name, ready, status, restarts.
    let table = [
        ("{spec: {containers: [{name: c}]}, status: {phase: Pending}}", "0/1", "Pending", "0"),
        (
            "{spec: {containers: [{name: c}]}, status: {phase: Running, conditions: [{type: Ready, status: 'True'}], containerStatuses: [{name: c, ready: true, restartCount: 0, state: {running: {}}}]}}",
            "1/1",
            "Running",
            "0",
        ),
        (
            "{spec: {containers: [{name: c}]}, status: {phase: Running, containerStatuses: [{name: c, ready: false, restartCount: 3, state: {waiting: {reason: CrashLoopBackOff}}, lastState: {terminated: {finishedAt: '2023-11-14T22:12:20Z', exitCode: 1}}}]}}",
            "0/1",
            "CrashLoopBackOff",
            "3 (60s ago)",
        ),
        (
            "{spec: {containers: [{name: c}]}, status: {phase: Failed, containerStatuses: [{name: c, restartCount: 0, state: {terminated: {exitCode: 2}}}]}}",
            "0/1",
            "ExitCode:2",
            "0",
        ),
        (
            "{spec: {containers: [{name: c}]}, status: {phase: Failed, containerStatuses: [{name: c, restartCount: 0, state: {terminated: {signal: 9}}}]}}",
            "0/1",
            "Signal:9",
            "0",
        ),
        (
            "{spec: {containers: [{name: c}]}, status: {phase: Succeeded, containerStatuses: [{name: c, restartCount: 0, state: {terminated: {reason: Completed, exitCode: 0}}}]}}",
            "0/1",
            "Completed",
            "0",
        ),
        (
            "{spec: {initContainers: [{name: i}, {name: j}], containers: [{name: c}]}, status: {phase: Pending, initContainerStatuses: [{name: i, restartCount: 0, state: {terminated: {exitCode: 0}}}, {name: j, restartCount: 0, state: {running: {}}}]}}",
            "0/1",
            "Init:1/2",
            "0",
        ),
        (
            "{spec: {initContainers: [{name: i}], containers: [{name: c}]}, status: {phase: Pending, initContainerStatuses: [{name: i, restartCount: 1, state: {waiting: {reason: CrashLoopBackOff}}}]}}",
            "0/1",
            "Init:CrashLoopBackOff",
            "1",
        ),
        (
            "{spec: {initContainers: [{name: s, restartPolicy: Always}], containers: [{name: c}]}, status: {phase: Running, conditions: [{type: Ready, status: 'True'}], initContainerStatuses: [{name: s, started: true, ready: true, restartCount: 0, state: {running: {}}}], containerStatuses: [{name: c, ready: true, restartCount: 0, state: {running: {}}}]}}",
            "2/2",
            "Running",
            "0",
        ),
        (
            "{metadata: {deletionTimestamp: '2023-11-14T22:13:20Z'}, spec: {containers: [{name: c}]}, status: {phase: Running}}",
            "0/1",
            "Terminating",
            "0",
        ),
        (
            "{metadata: {deletionTimestamp: '2023-11-14T22:13:20Z'}, spec: {containers: [{name: c}]}, status: {phase: Running, reason: NodeLost}}",
            "0/1",
            "Unknown",
            "0",
        ),
        ("{spec: {containers: [{name: c}]}, status: {phase: Failed, reason: Evicted}}", "0/1", "Evicted", "0"),
        (
            "{spec: {schedulingGates: [{name: g}], containers: [{name: c}]}, status: {phase: Pending, conditions: [{type: PodScheduled, status: 'False', reason: SchedulingGated}]}}",
            "0/1",
            "SchedulingGated",
            "0",
        ),
    ];
    for (pod, ready, status, restarts) in table {
        let mut object = yaml(pod);
        object["apiVersion"] = "v1".into();
        object["kind"] = "Pod".into();
        let got = cells(&object);
        assert_eq!(got[1..4], [ready, status, restarts], "{pod}");
    }
}

#[test]
fn other_kinds() {
    let table: [(&str, &[&str]); 7] = [
        (
            "{apiVersion: apps/v1, kind: Deployment, metadata: {name: d, creationTimestamp: '2023-11-14T22:11:20Z'}, spec: {replicas: 3, selector: {matchLabels: {a: b}}, template: {spec: {containers: [{name: c, image: x}]}}}, status: {readyReplicas: 1, updatedReplicas: 2, availableReplicas: 1}}",
            &["d", "1/3", "2", "1", "2m", "c", "x", "a=b"],
        ),
        (
            "{apiVersion: v1, kind: Service, metadata: {name: s}, spec: {type: NodePort, clusterIP: 10.0.0.1, clusterIPs: [10.0.0.1], ports: [{port: 80, nodePort: 30080, protocol: TCP}, {port: 53, protocol: UDP}], selector: {a: b}}}",
            &["s", "NodePort", "10.0.0.1", "<none>", "80:30080/TCP,53/UDP", "<unknown>", "a=b"],
        ),
        (
            "{apiVersion: v1, kind: Namespace, metadata: {name: x}, status: {phase: Active}}",
            &["x", "Active", "<unknown>"],
        ),
        (
            "{apiVersion: v1, kind: Secret, metadata: {name: x}, type: Opaque, data: {a: Yg==}}",
            &["x", "Opaque", "1", "<unknown>"],
        ),
        (
            "{apiVersion: batch/v1, kind: CronJob, metadata: {name: x}, spec: {schedule: '* * * * *', suspend: false, jobTemplate: {spec: {template: {spec: {containers: [{name: c, image: i}]}}}}}, status: {active: [{}]}}",
            &["x", "* * * * *", "<none>", "False", "1", "<none>", "<unknown>", "c", "i", "<none>"],
        ),
        (
            "{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: x, annotations: {storageclass.kubernetes.io/is-default-class: 'true'}}, provisioner: p, reclaimPolicy: Delete, volumeBindingMode: Immediate}",
            &["x (default)", "p", "Delete", "Immediate", "false", "<unknown>"],
        ),
        (
            "{apiVersion: coordination.k8s.io/v1, kind: Lease, metadata: {name: x}, spec: {holderIdentity: h}}",
            &["x", "h", "<unknown>"],
        ),
    ];
    for (object, want) in table {
        assert_eq!(cells(&yaml(object)), want, "{object}");
    }
}

#[test]
fn headings() {
    let names = |group: &str, kind: &str| -> String {
        let r = Registry::builtin().find_kind(group, "v1", kind).expect("built in");
        let shown = |c: &Column| format!("{}{}", c.name, if c.priority > 0 { "*" } else { "" });
        columns_for(&r, "v1").iter().map(shown).collect::<Vec<_>>().join(",")
    };
    assert_eq!(names("", "Pod"), "Name,Ready,Status,Restarts,Age,IP*,Node*,Nominated Node*,Readiness Gates*");
    assert_eq!(
        names("", "Node"),
        "Name,Status,Roles,Age,Version,Internal-IP*,External-IP*,OS-Image*,Kernel-Version*,Container-Runtime*"
    );
    assert_eq!(names("", "Event"), "Last Seen,Type,Reason,Object,Subobject*,Source*,Message,First Seen*,Count*,Name*");
}
