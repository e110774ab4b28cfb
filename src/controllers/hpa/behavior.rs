//! How fast, and how far, a recommendation is followed. Pure.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::autoscaling::v2::{HPAScalingRules, HorizontalPodAutoscaler};

/// A change that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    pub at: Timestamp,
    /// Positive upwards.
    pub by: i32,
}

/// What an autoscaler remembers; forgotten by a restart, as upstream's.
#[derive(Clone, Debug, Default)]
pub struct History {
    pub recommendations: Vec<(Timestamp, i32)>,
    pub changes: Vec<Change>,
}

/// Longest time that anything is remembered.
const HORIZON: i64 = 3600;

impl History {
    /// Notes the size that an autoscaler found at its first look: scaling down from it is stabilized like any other.
    pub fn begin(&mut self, now: Timestamp, current: i32) {
        if self.recommendations.is_empty() {
            self.recommendations.push((now, current));
        }
    }

    /// Forgets what no rule can ask for any more.
    pub fn prune(&mut self, now: Timestamp) {
        let oldest = back(now, HORIZON);
        self.recommendations.retain(|(at, _)| *at >= oldest);
        self.changes.retain(|change| change.at >= oldest);
    }
}

fn back(now: Timestamp, seconds: i64) -> Timestamp {
    now.checked_sub(SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MIN)
}

/// One policy: so many pods or percent in so many seconds.
#[derive(Clone, Copy, Debug)]
struct Policy {
    percent: bool,
    value: i32,
    seconds: i64,
}

struct Direction {
    window: i64,
    policies: Vec<Policy>,
    select: Select,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Select {
    Max,
    Min,
    Disabled,
}

fn direction(rules: Option<&HPAScalingRules>, window: i64, defaults: &[Policy]) -> Direction {
    let given = rules.and_then(|rules| rules.policies.as_ref()).filter(|policies| !policies.is_empty());
    let policy = |policy: &k8s_openapi::api::autoscaling::v2::HPAScalingPolicy| Policy { percent: policy.type_ == "Percent", value: policy.value, seconds: i64::from(policy.period_seconds) };
    let select = match rules.and_then(|rules| rules.select_policy.as_deref()) {
        Some("Min") => Select::Min,
        Some("Disabled") => Select::Disabled,
        _ => Select::Max,
    };
    Direction {
        window: rules.and_then(|rules| rules.stabilization_window_seconds).map_or(window, i64::from),
        policies: given.map_or_else(|| defaults.to_vec(), |given| given.iter().map(policy).collect()),
        select,
    }
}

/// The number to go to, and a condition about what limited it: reason and message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub replicas: i32,
    /// Set when stabilization held the recommendation back.
    pub stabilized: Option<(&'static str, &'static str)>,
    pub limited: Option<(&'static str, &'static str)>,
}

fn limit_up(direction: &Direction, current: i32, changes: &[Change], now: Timestamp) -> i32 {
    if direction.select == Select::Disabled {
        return current;
    }
    let limits = direction.policies.iter().map(|policy| {
        let since = back(now, policy.seconds);
        let added: i32 = changes.iter().filter(|change| change.at > since && change.by > 0).map(|change| change.by).sum();
        let removed: i32 = changes.iter().filter(|change| change.at > since && change.by < 0).map(|change| -change.by).sum();
        let start = current - added + removed;
        if policy.percent { (f64::from(start) * (1.0 + f64::from(policy.value) / 100.0)).ceil() as i32 } else { start.saturating_add(policy.value) }
    });
    let limit = if direction.select == Select::Max { limits.max() } else { limits.min() };
    limit.unwrap_or(current)
}

fn limit_down(direction: &Direction, current: i32, changes: &[Change], now: Timestamp) -> i32 {
    if direction.select == Select::Disabled {
        return current;
    }
    let limits = direction.policies.iter().map(|policy| {
        let since = back(now, policy.seconds);
        let added: i32 = changes.iter().filter(|change| change.at > since && change.by > 0).map(|change| change.by).sum();
        let removed: i32 = changes.iter().filter(|change| change.at > since && change.by < 0).map(|change| -change.by).sum();
        let start = current - added + removed;
        if policy.percent { (f64::from(start) * (1.0 - f64::from(policy.value) / 100.0)) as i32 } else { start - policy.value }
    });
    // The policy that allows most is the one with the lowest limit.
    let limit = if direction.select == Select::Max { limits.min() } else { limits.max() };
    limit.unwrap_or(current)
}

/// Follows the recommendation `wanted` as far as stabilization, policies and bounds allow. `down_window`: the default
/// stabilization of shrinking, in seconds.
pub fn decide(autoscaler: &HorizontalPodAutoscaler, history: &History, current: i32, wanted: i32, down_window: i64, now: Timestamp) -> Decision {
    let behavior = autoscaler.spec.behavior.as_ref();
    let up = direction(behavior.and_then(|behavior| behavior.scale_up.as_ref()), 0, &[
        Policy { percent: false, value: 4, seconds: 15 },
        Policy { percent: true, value: 100, seconds: 15 },
    ]);
    let down = direction(behavior.and_then(|behavior| behavior.scale_down.as_ref()), down_window, &[Policy { percent: true, value: 100, seconds: 15 }]);
    let min = autoscaler.spec.min_replicas.unwrap_or(1);
    let max = autoscaler.spec.max_replicas;

    // Growth goes to the least that was recommended lately, shrinking to the most.
    let within = |window: i64| history.recommendations.iter().filter(move |(at, _)| *at >= back(now, window)).map(|(_, replicas)| *replicas);
    let up_floor = within(up.window).chain([wanted]).min().unwrap_or(wanted);
    let down_ceiling = within(down.window).chain([wanted]).max().unwrap_or(wanted);
    let steady = current.max(up_floor).min(down_ceiling);
    let stabilized = (steady != wanted).then(|| {
        if wanted < steady {
            ("ScaleDownStabilized", "recent recommendations were higher than current one, applying the highest recent recommendation")
        } else {
            ("ScaleUpStabilized", "recent recommendations were lower than current one, applying the lowest recent recommendation")
        }
    });
    let (replicas, limited) = if steady > current {
        let allowed = limit_up(&up, current, &history.changes, now).max(current);
        match () {
            () if steady > max && max <= allowed => (max, Some(("TooManyReplicas", "the desired replica count is more than the maximum replica count"))),
            () if steady > allowed => (allowed.min(max), Some(("ScaleUpLimit", "the desired replica count is increasing faster than the maximum scale rate"))),
            () => (steady.min(max), None),
        }
    } else if steady < current {
        let allowed = limit_down(&down, current, &history.changes, now).min(current);
        match () {
            () if steady < min && min >= allowed => (min, Some(("TooFewReplicas", "the desired replica count is less than the minimum replica count"))),
            () if steady < allowed => (allowed.max(min), Some(("ScaleDownLimit", "the desired replica count is decreasing faster than the maximum scale rate"))),
            () => (steady.max(min), None),
        }
    } else {
        (steady, None)
    };
    let limited = limited.or_else(|| match steady {
        s if s > max => Some(("TooManyReplicas", "the desired replica count is more than the maximum replica count")),
        s if s < min => Some(("TooFewReplicas", "the desired replica count is less than the minimum replica count")),
        _ => None,
    });
    Decision { replicas: replicas.clamp(min, max), stabilized, limited }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + second).expect("a time")
    }

    fn check(behavior: Value, history: &History, current: i32, wanted: i32, expected: i32, limited: Option<&str>) {
        let autoscaler: HorizontalPodAutoscaler = serde_json::from_value(json!({"spec": {"minReplicas": 2, "maxReplicas": 50, "scaleTargetRef": {"kind": "", "name": ""}, "behavior": behavior}})).expect("an autoscaler");
        let decision = decide(&autoscaler, history, current, wanted, 300, at(0));
        assert_eq!((decision.replicas, decision.limited.map(|(reason, _)| reason)), (expected, limited), "{behavior} {current}->{wanted}");
    }

    #[test]
    fn speed_and_bounds() {
        let calm = History::default();
        check(json!(null), &calm, 3, 5, 5, None);
        check(json!(null), &calm, 3, 30, 7, Some("ScaleUpLimit"));
        check(json!(null), &calm, 20, 100, 40, Some("ScaleUpLimit"));
        check(json!(null), &calm, 30, 100, 50, Some("TooManyReplicas"));
        check(json!(null), &calm, 10, 0, 2, Some("TooFewReplicas"));
        check(json!({"scaleUp": {"policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}]}}), &calm, 3, 10, 4, Some("ScaleUpLimit"));
        let grown = History { changes: vec![Change { at: at(-30), by: 1 }], ..History::default() };
        check(json!({"scaleUp": {"policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}]}}), &grown, 4, 10, 4, Some("ScaleUpLimit"));
        check(json!({"scaleDown": {"selectPolicy": "Disabled"}}), &calm, 10, 3, 10, Some("ScaleDownLimit"));
        check(json!({"scaleDown": {"policies": [{"type": "Percent", "value": 10, "periodSeconds": 60}]}}), &calm, 20, 5, 18, Some("ScaleDownLimit"));
    }

    #[test]
    fn stabilization() {
        let high = History { recommendations: vec![(at(-100), 8)], ..History::default() };
        check(json!(null), &high, 10, 3, 8, None);
        let old = History { recommendations: vec![(at(-400), 8)], ..History::default() };
        check(json!(null), &old, 10, 3, 3, None);
        let low = History { recommendations: vec![(at(-10), 4)], ..History::default() };
        check(json!({"scaleUp": {"stabilizationWindowSeconds": 60}}), &low, 3, 6, 4, None);
    }
}
