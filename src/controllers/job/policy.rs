//! What a pod's failure means, and when an indexed job has succeeded early.

use k8s_openapi::api::batch::v1::{Job, PodFailurePolicyOnExitCodesRequirement, PodFailurePolicyRule};

use super::indexes::Indexes;
use crate::pod::{ContainerStatus, PodView};

/// What a failed pod means to its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It counts towards the limits.
    Count,
    /// It counts for nothing; the pod is made again.
    Ignore,
    /// Its index has failed for good.
    FailIndex,
    /// The whole job has failed; the message says why.
    FailJob(String),
}

fn exit_code_matches<'a>(requirement: &PodFailurePolicyOnExitCodesRequirement, statuses: &'a [ContainerStatus]) -> Option<(&'a str, i32)> {
    statuses.iter().find_map(|status| {
        let code = status.state.as_ref()?.terminated.as_ref()?.exit_code;
        let named = requirement.container_name.as_ref().is_none_or(|name| *name == status.name);
        let listed = requirement.values.contains(&code);
        let matching = match requirement.operator.as_str() {
            "In" => listed,
            "NotIn" => !listed,
            _ => false,
        };
        (named && code != 0 && matching).then_some((status.name.as_str(), code))
    })
}

fn rule_matches(rule: &PodFailurePolicyRule, pod: &PodView, index: usize) -> Option<String> {
    let (namespace, name) = (pod.namespace(), pod.name());
    if let Some(requirement) = &rule.on_exit_codes {
        let found = exit_code_matches(requirement, &pod.status.container_statuses).or_else(|| exit_code_matches(requirement, &pod.status.init_container_statuses));
        let (container, code) = found?;
        return Some(format!("Container {container} for pod {namespace}/{name} failed with exit code {code} matching {} rule at index {index}", rule.action));
    }
    let patterns = rule.on_pod_conditions.as_deref()?;
    let condition = pod.status.conditions.iter().find(|condition| {
        patterns.iter().any(|pattern| pattern.type_ == condition.type_ && pattern.status.as_deref().unwrap_or("True") == condition.status)
    })?;
    Some(format!("Pod {namespace}/{name} has condition {} matching {} rule at index {index}", condition.type_, rule.action))
}

/// Applies the job's failure policy to a failed pod: the first rule that matches decides.
pub fn failure(job: &Job, pod: &PodView) -> Failure {
    let rules = job.spec.as_ref().and_then(|spec| spec.pod_failure_policy.as_ref()).map(|policy| policy.rules.as_slice()).unwrap_or_default();
    if pod.phase() != "Failed" {
        return Failure::Count;
    }
    for (index, rule) in rules.iter().enumerate() {
        if let Some(message) = rule_matches(rule, pod, index) {
            return match rule.action.as_str() {
                "Ignore" => Failure::Ignore,
                "FailIndex" => Failure::FailIndex,
                "FailJob" => Failure::FailJob(message),
                _ => Failure::Count,
            };
        }
    }
    Failure::Count
}

/// The message of the first rule of the success policy that holds.
pub fn success(job: &Job, succeeded: &Indexes) -> Option<String> {
    let spec = job.spec.as_ref()?;
    let completions = spec.completions.unwrap_or(0);
    for (index, rule) in spec.success_policy.as_ref()?.rules.iter().enumerate() {
        let met = match &rule.succeeded_indexes {
            Some(text) => {
                let required = Indexes::parse(text, completions);
                let have = required.0.intersection(&succeeded.0).count();
                let needed = rule.succeeded_count.map_or(required.len(), |count| usize::try_from(count).unwrap_or(0));
                required.len() > 0 && have >= needed
            }
            None => rule.succeeded_count.is_some_and(|count| succeeded.len() as i64 >= i64::from(count)),
        };
        if met && succeeded.len() > 0 {
            return Some(format!("Matched rules at index {index}"));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::tests::pod;
    use serde_json::{Value, json};

    fn check(rules: Value, expected: Failure) {
        let job: Job = serde_json::from_value(json!({"spec": {"template": {}, "podFailurePolicy": {"rules": rules}}})).expect("a job");
        let failed = pod(json!({"metadata": {"name": "p"}, "status": {"phase": "Failed", "conditions": [{"type": "DisruptionTarget", "status": "True"}],
            "containerStatuses": [{"name": "c", "state": {"terminated": {"exitCode": 42}}}]}}));
        assert_eq!(failure(&job, &failed), expected);
    }

    #[test]
    fn the_first_matching_rule_decides() {
        let exit = |action: &str, operator: &str, values: &[i32]| json!({"action": action, "onExitCodes": {"operator": operator, "values": values}});
        check(json!([]), Failure::Count);
        check(json!([exit("Ignore", "In", &[1]), exit("FailIndex", "In", &[42])]), Failure::FailIndex);
        check(json!([exit("FailJob", "NotIn", &[1])]), Failure::FailJob("Container c for pod ns/p failed with exit code 42 matching FailJob rule at index 0".into()));
        check(json!([{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]), Failure::Ignore);
    }

    #[test]
    fn success_policies() {
        for (rules, succeeded, expected) in [
            (json!([{"succeededIndexes": "0,2"}]), "0", None),
            (json!([{"succeededIndexes": "0,2"}]), "0,2", Some(0)),
            (json!([{"succeededIndexes": "0-3", "succeededCount": 2}]), "1,3", Some(0)),
            (json!([{"succeededIndexes": "4"}, {"succeededCount": 1}]), "1", Some(1)),
        ] {
            let job: Job = serde_json::from_value(json!({"spec": {"completions": 5, "template": {}, "successPolicy": {"rules": rules}}})).expect("a job");
            let expected = expected.map(|index| format!("Matched rules at index {index}"));
            assert_eq!(success(&job, &Indexes::parse(succeeded, 5)), expected);
        }
    }
}
