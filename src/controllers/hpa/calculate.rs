//! From pods and their metrics to a number of replicas. Pure; upstream's replica calculator.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use windlass_api::quantity::Quantity;

use crate::pod::PodView;

/// One pod's sample of one resource, in thousandths.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub milli: i64,
    pub at: Timestamp,
    pub window: Duration,
}

/// What the calculation depends on beside pods and samples.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub now: Timestamp,
    /// Relative distance from the target that is no reason to scale, up and down.
    pub tolerance_up: f64,
    pub tolerance_down: f64,
    pub cpu_initialization: Duration,
    pub initial_readiness_delay: Duration,
}

impl Rules {
    fn within(&self, ratio: f64) -> bool {
        (1.0 - self.tolerance_down..=1.0 + self.tolerance_up).contains(&ratio)
    }
}

/// What a metric is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Percent of what the pods request.
    Utilization(i32),
    /// An amount per pod, in thousandths.
    Average(i64),
}

/// The outcome of one metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proposal {
    pub replicas: i32,
    /// Percent of the requests, for a utilization target.
    pub utilization: Option<i32>,
    /// Average per pod in thousandths.
    pub average: i64,
}

/// Pods by whether their samples count.
#[derive(Debug, Default)]
struct Groups<'a> {
    ready: usize,
    unready: Vec<&'a str>,
    missing: Vec<&'a str>,
    ignored: Vec<&'a str>,
}

fn passed(since: Timestamp, span: Duration, at: Timestamp) -> bool {
    jiff::SignedDuration::try_from(span).ok().and_then(|span| since.checked_add(span).ok()).is_some_and(|end| end < at)
}

fn group<'a>(pods: &'a [Arc<PodView>], samples: &BTreeMap<String, Sample>, resource: &str, rules: &Rules) -> Groups<'a> {
    let mut groups = Groups::default();
    for pod in pods {
        let name = pod.name();
        if pod.deleting() || pod.phase() == "Failed" {
            groups.ignored.push(name);
            continue;
        }
        if pod.phase() == "Pending" {
            groups.unready.push(name);
            continue;
        }
        let Some(sample) = samples.get(name) else {
            groups.missing.push(name);
            continue;
        };
        let unready = resource == "cpu" && {
            let ready = pod.condition("Ready");
            let since = ready.and_then(|condition| condition.last_transition_time.as_ref()).map(|time| time.0);
            match (ready, since, pod.status.start_time.as_ref()) {
                (Some(ready), Some(since), Some(start)) => {
                    let not_ready = ready.status == "False";
                    if passed(start.0, rules.cpu_initialization, rules.now) {
                        // Never ready since shortly after its start.
                        not_ready && !passed(start.0, rules.initial_readiness_delay, since)
                    } else {
                        not_ready || !passed(since, sample.window, sample.at)
                    }
                }
                _ => true,
            }
        };
        if unready {
            groups.unready.push(name);
        } else {
            groups.ready += 1;
        }
    }
    groups
}

/// The sum of a pod's requests of a resource in thousandths, of one container or of all.
fn requests(pod: &PodView, resource: &str, container: Option<&str>) -> Result<i64, String> {
    let mut total = 0;
    for one in pod.spec.containers.iter().filter(|one| container.is_none_or(|name| one.name == name)) {
        let request = one.resources.as_ref().and_then(|resources| resources.requests.as_ref()?.get(resource));
        match request.and_then(|text| text.0.parse::<Quantity>().ok()) {
            Some(amount) => total += amount.milli_value(),
            None => return Err(format!("missing request for {resource} in container {} of Pod {}", one.name, pod.name())),
        }
    }
    Ok(total)
}

/// The ratio of use to target over the pods that have samples, with percent (if of requests) and average.
fn ratio(samples: &BTreeMap<String, Sample>, requests: &BTreeMap<&str, i64>, target: Target) -> Result<(f64, Option<i32>, i64), String> {
    let count = samples.len().max(1) as i64;
    let used: i64 = samples.values().map(|sample| sample.milli).sum();
    match target {
        Target::Average(wanted) => Ok((used as f64 / count as f64 / wanted.max(1) as f64, None, used / count)),
        Target::Utilization(wanted) => {
            let asked: i64 = samples.keys().filter_map(|name| requests.get(name.as_str())).sum();
            if asked == 0 {
                return Err("no metrics returned matched known pods".into());
            }
            let percent = i32::try_from(used * 100 / asked).unwrap_or(i32::MAX);
            Ok((f64::from(percent) / f64::from(wanted.max(1)), Some(percent), used / count))
        }
    }
}

/// How many replicas one resource metric asks for.
///
/// # Errors
/// Why nothing can be said, in upstream's words.
pub fn propose(
    pods: &[Arc<PodView>],
    mut samples: BTreeMap<String, Sample>,
    resource: &str,
    container: Option<&str>,
    target: Target,
    current: i32,
    rules: &Rules,
) -> Result<Proposal, String> {
    if pods.is_empty() {
        return Err("no pods returned by selector while calculating replica count".into());
    }
    let groups = group(pods, &samples, resource, rules);
    samples.retain(|name, _| pods.iter().any(|pod| pod.name() == name));
    for name in groups.ignored.iter().chain(&groups.unready) {
        samples.remove(*name);
    }
    if samples.is_empty() {
        return Err("did not receive metrics for targeted pods (pods might be unready)".into());
    }
    let mut asked = BTreeMap::new();
    if matches!(target, Target::Utilization(_)) {
        for pod in pods {
            asked.insert(pod.name(), requests(pod, resource, container)?);
        }
    }
    let (use_ratio, utilization, average) = ratio(&samples, &asked, target)?;
    let stay = Proposal { replicas: current, utilization, average };
    let growing_with_unready = !groups.unready.is_empty() && use_ratio > 1.0;
    if !growing_with_unready && groups.missing.is_empty() {
        if rules.within(use_ratio) {
            return Ok(stay);
        }
        return Ok(Proposal { replicas: (use_ratio * groups.ready as f64).ceil() as i32, ..stay });
    }
    // Be cautious about what is not known: missing samples argue against the direction.
    let assume = |milli: i64| Sample { milli, at: rules.now, window: Duration::ZERO };
    for name in &groups.missing {
        let milli = match target {
            _ if use_ratio > 1.0 => 0,
            Target::Utilization(wanted) => asked.get(name).copied().unwrap_or(0) * i64::from(wanted.max(100)) / 100,
            Target::Average(wanted) => wanted,
        };
        if use_ratio != 1.0 {
            samples.insert((*name).to_owned(), assume(milli));
        }
    }
    if growing_with_unready {
        for name in &groups.unready {
            samples.insert((*name).to_owned(), assume(0));
        }
    }
    let (cautious, _, _) = ratio(&samples, &asked, target)?;
    if rules.within(cautious) || use_ratio < 1.0 && cautious > 1.0 || use_ratio > 1.0 && cautious < 1.0 {
        return Ok(stay);
    }
    let replicas = (cautious * samples.len() as f64).ceil() as i32;
    if cautious < 1.0 && replicas > current || cautious > 1.0 && replicas < current {
        return Ok(stay);
    }
    Ok(Proposal { replicas, ..stay })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::tests::pod;
    use serde_json::json;

    fn now() -> Timestamp {
        Timestamp::from_second(1_000_000).expect("a time")
    }

    fn rules() -> Rules {
        Rules { now: now(), tolerance_up: 0.1, tolerance_down: 0.1, cpu_initialization: Duration::from_secs(120), initial_readiness_delay: Duration::from_secs(10) }
    }

    /// Pods that each request 1000m and have been ready for long (`r`), are pending (`p`), or not ready (`n`).
    fn pods(kinds: &str) -> Vec<Arc<PodView>> {
        let old = Timestamp::from_second(990_000).expect("a time").to_string();
        kinds.chars().enumerate().map(|(index, kind)| Arc::new(pod(json!({
            "metadata": {"name": format!("p{index}")},
            "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]},
            "status": {"phase": if kind == 'p' { "Pending" } else { "Running" }, "startTime": old,
                "conditions": [{"type": "Ready", "status": if kind == 'n' { "False" } else { "True" }, "lastTransitionTime": old}]}})))).collect()
    }

    fn check(kinds: &str, samples: &[i64], target: Target, expected: Result<i32, &str>) {
        let pods = pods(kinds);
        let samples = samples.iter().enumerate().map(|(index, milli)| (format!("p{index}"), Sample { milli: *milli, at: now(), window: Duration::from_secs(60) })).collect();
        let replicas = propose(&pods, samples, "cpu", None, target, kinds.len() as i32, &rules()).map(|proposal| proposal.replicas);
        assert_eq!(replicas, expected.map_err(str::to_owned), "{kinds}");
    }

    /// Cases of upstream's replica calculator tests.
    #[test]
    fn proposals() {
        check("rrr", &[300, 500, 700], Target::Utilization(30), Ok(5));
        check("rrrrr", &[100, 300, 500, 250, 250], Target::Utilization(50), Ok(3));
        check("rrr", &[1000, 1010, 1020], Target::Utilization(100), Ok(3));
        // hot, one pending: as if it did nothing
        check("rrp", &[500, 700], Target::Utilization(30), Ok(4));
        check("rpp", &[2000], Target::Utilization(100), Ok(3));
        // a sample is missing: shrink as if it were at its target
        check("rrrr", &[100, 100, 100], Target::Utilization(100), Ok(2));
        check("rrr", &[1000, 1000], Target::Average(250), Ok(8));
        check("rr", &[], Target::Utilization(50), Err("did not receive metrics for targeted pods (pods might be unready)"));
        check("", &[], Target::Utilization(50), Err("no pods returned by selector while calculating replica count"));
    }
}
