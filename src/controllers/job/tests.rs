//! Tables of jobs and pods, and what is to be done.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::Job;
use serde_json::{Value, json};

use super::plan::{FINALIZER, INDEX, Plan, plan};
use crate::pod::{PodView, tests::pod};

const NOW: i64 = 1_000_000;

fn at(offset: i64) -> Timestamp {
    Timestamp::from_second(NOW + offset).expect("a time")
}

fn job(spec: Value, status: Value) -> Job {
    let mut spec = spec;
    spec["template"] = json!({"spec": {"containers": [], "restartPolicy": "Never"}});
    serde_json::from_value(json!({"metadata": {"name": "j"}, "spec": spec, "status": status})).expect("a job")
}

/// A pod described as `name phase[*][!][#index]`: `*` with our finalizer, `!` being deleted.
fn pods(descriptions: &[&str]) -> Vec<Arc<PodView>> {
    descriptions.iter().map(|description| {
        let (name, rest) = description.split_once(' ').expect("a name and a phase");
        let (flags, index) = rest.split_once('#').unwrap_or((rest, ""));
        let mut value = json!({"metadata": {"name": name, "annotations": {}}, "spec": {"nodeName": "n"}, "status": {"phase": flags.trim_end_matches(['*', '!']),
            "containerStatuses": [{"name": "c", "state": {"terminated": {"exitCode": 1, "finishedAt": at(-3600).to_string()}}}]}});
        if flags.contains('*') {
            value["metadata"]["finalizers"] = json!([FINALIZER]);
        }
        if flags.contains('!') {
            value["metadata"]["deletionTimestamp"] = json!(at(-3600).to_string());
        }
        if !index.is_empty() {
            value["metadata"]["annotations"][INDEX] = json!(index);
        }
        Arc::new(pod(value))
    }).collect()
}

fn step(spec: Value, status: Value, descriptions: &[&str]) -> Plan {
    plan(&job(spec, status), &pods(descriptions), at(0), true)
}

fn names(pods: &[Arc<PodView>]) -> Vec<&str> {
    let mut names: Vec<&str> = pods.iter().map(|pod| pod.name()).collect();
    names.sort_unstable();
    names
}

fn conditions(plan: &Plan) -> Vec<String> {
    plan.status.conditions.iter().flatten().filter(|c| c.status == "True").map(|c| format!("{}/{}", c.type_, c.reason.clone().unwrap_or_default())).collect()
}

#[test]
fn as_many_pods_as_are_missing() {
    for (spec, pods, create, delete) in [
        (json!({"parallelism": 3, "completions": 5}), &[][..], 3, &[][..]),
        (json!({"parallelism": 3, "completions": 5}), &["a Running*"], 2, &[]),
        (json!({"parallelism": 3, "completions": 1}), &["a Running*", "b Pending*"], 0, &["b"]),
        (json!({"parallelism": 3}), &["a Succeeded*", "b Running*"], 0, &[]),
        (json!({"parallelism": 1, "suspend": true}), &["b Running*"], 0, &["b"]),
        (json!({"parallelism": 1, "completions": 1}), &["a Running*!"], 1, &[]),
        (json!({"parallelism": 1, "completions": 1, "podReplacementPolicy": "Failed"}), &["a Running*!"], 0, &[]),
    ] {
        let plan = step(spec.clone(), json!({}), pods);
        assert_eq!((plan.create.len(), names(&plan.delete)), (create, delete.to_vec()), "{spec} {pods:?}");
    }
}

#[test]
fn a_pod_is_counted_once() {
    let spec = json!({"parallelism": 1, "completions": 1});
    // Finished: noted, and released only with that write.
    let first = step(spec.clone(), json!({}), &["a Succeeded*"]);
    let noted = first.status.uncounted_terminated_pods.clone().expect("books");
    assert_eq!(noted.succeeded, Some(vec!["uid-a".to_owned()]));
    assert_eq!((names(&first.release), first.status.succeeded), (vec!["a"], None));
    assert_eq!(conditions(&first), ["SuccessCriteriaMet/CompletionsReached"]);
    // Released: now it is a number, and the job is complete.
    let status = serde_json::to_value(&first.status).expect("json");
    let second = step(spec.clone(), status.clone(), &["a Succeeded"]);
    assert_eq!(second.status.succeeded, Some(1));
    assert_eq!(second.status.uncounted_terminated_pods.clone().expect("books").succeeded, None);
    assert_eq!(conditions(&second), ["SuccessCriteriaMet/CompletionsReached", "Complete/CompletionsReached"]);
    assert!(second.status.completion_time.is_some());
    // The same if it has vanished meanwhile.
    assert_eq!(step(spec, status, &[]).status.succeeded, Some(1));
}

#[test]
fn failures_end_a_job() {
    let spec = json!({"parallelism": 2, "completions": 2, "backoffLimit": 0});
    let first = step(spec.clone(), json!({}), &["a Failed*", "b Running*"]);
    assert_eq!((names(&first.delete), conditions(&first)), (vec!["b"], vec!["FailureTarget/BackoffLimitExceeded".to_owned()]));
    let status = serde_json::to_value(&first.status).expect("json");
    // b is on its way out: wait for it.
    let second = step(spec.clone(), status.clone(), &["a Failed", "b Running*!"]);
    assert_eq!(conditions(&second), ["FailureTarget/BackoffLimitExceeded"]);
    let status = serde_json::to_value(&second.status).expect("json");
    let third = step(spec, status, &["a Failed"]);
    assert_eq!(conditions(&third), ["FailureTarget/BackoffLimitExceeded", "Failed/BackoffLimitExceeded"]);
    assert_eq!(third.status.failed, Some(2));
    assert_eq!(third.events, [(true, "BackoffLimitExceeded", "Job has reached the specified backoff limit".to_owned())]);
}

#[test]
fn deadlines_and_backoff() {
    let spec = json!({"parallelism": 1, "completions": 1, "activeDeadlineSeconds": 60});
    let plan = step(spec.clone(), json!({"startTime": at(-10).to_string()}), &["a Running*"]);
    assert_eq!(plan.next, Some(std::time::Duration::from_secs(50)));
    let plan = step(spec, json!({"startTime": at(-60).to_string()}), &["a Running*"]);
    assert_eq!(conditions(&plan), ["FailureTarget/DeadlineExceeded"]);
    // A failure just now: its replacement waits.
    let mut failed = (*pods(&["a Failed*"])[0]).clone();
    let terminated = failed.status.container_statuses[0].state.as_mut().and_then(|state| state.terminated.as_mut()).expect("a state");
    terminated.finished_at = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at(-4)));
    let plan = plan_with(json!({"parallelism": 1, "completions": 1}), failed);
    assert_eq!((plan.create.len(), plan.next), (0, Some(std::time::Duration::from_secs(6))));
}

fn plan_with(spec: Value, pod: PodView) -> Plan {
    plan(&job(spec, json!({})), &[Arc::new(pod)], at(0), true)
}

#[test]
fn indexed_jobs() {
    let spec = json!({"parallelism": 2, "completions": 3, "completionMode": "Indexed"});
    let indexes = |plan: &Plan| plan.create.iter().map(|pod| pod.index).collect::<Vec<_>>();
    assert_eq!(indexes(&step(spec.clone(), json!({}), &[])), [Some(0), Some(1)]);
    let plan = step(spec.clone(), json!({}), &["a Succeeded*#0", "b Running*#1"]);
    assert_eq!((indexes(&plan), plan.status.completed_indexes.as_deref(), plan.status.succeeded), (vec![Some(2)], Some("0"), Some(1)));
    assert_eq!(names(&plan.release), ["a"]);
    // two pods of one index, and one of none
    let plan = step(spec, json!({}), &["a Running*#0", "b Pending*#0", "c Running*#7"]);
    assert_eq!(names(&plan.delete), ["b", "c"]);
}

#[test]
fn limits_per_index() {
    let spec = json!({"parallelism": 2, "completions": 2, "completionMode": "Indexed", "backoffLimitPerIndex": 0});
    let plan = step(spec.clone(), json!({}), &["a Failed*#0", "b Succeeded*#1"]);
    assert_eq!((plan.status.failed_indexes.as_deref(), plan.status.completed_indexes.as_deref()), (Some("0"), Some("1")));
    assert_eq!(conditions(&plan), ["FailureTarget/FailedIndexes"]);
    let spec = json!({"parallelism": 2, "completions": 2, "completionMode": "Indexed", "backoffLimitPerIndex": 1});
    let plan = step(spec, json!({}), &["a Failed*#0", "b Running*#1"]);
    assert_eq!(plan.create.iter().map(|pod| (pod.index, pod.failures)).collect::<Vec<_>>(), [(Some(0), 1)]);
    assert!(plan.release.is_empty(), "the failure stays until its replacement carries the count");
}

#[test]
fn suspension() {
    let plan = step(json!({"parallelism": 1, "suspend": true}), json!({}), &[]);
    assert_eq!((conditions(&plan), plan.status.start_time.is_none()), (vec!["Suspended/JobSuspended".to_owned()], true));
    let status = serde_json::to_value(&plan.status).expect("json");
    let resumed = step(json!({"parallelism": 1}), status, &[]);
    assert!(conditions(&resumed).is_empty() && resumed.status.start_time.is_some());
    assert_eq!(resumed.create.len(), 1);
}

#[test]
fn success_policies_end_a_job_early() {
    let spec = json!({"parallelism": 3, "completions": 3, "completionMode": "Indexed", "successPolicy": {"rules": [{"succeededIndexes": "0"}]}});
    let plan = step(spec, json!({}), &["a Succeeded*#0", "b Running*#1"]);
    assert_eq!((names(&plan.delete), conditions(&plan)), (vec!["b"], vec!["SuccessCriteriaMet/SuccessPolicy".to_owned()]));
}
