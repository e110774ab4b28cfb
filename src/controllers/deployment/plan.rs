//! The arithmetic of rollouts: which ReplicaSet gets which size next.

use std::{cmp::Reverse, sync::Arc};

use k8s_openapi::{
    api::apps::v1::{Deployment, ReplicaSet},
    apimachinery::pkg::util::intstr::IntOrString,
};

use super::history::{DESIRED, MAX, annotation};

/// Replicas that a Deployment asks for.
pub fn replicas(deployment: &Deployment) -> i32 {
    deployment.spec.replicas.unwrap_or(1)
}

/// The size that a ReplicaSet is asked to have.
pub fn size(set: &ReplicaSet) -> i32 {
    set.spec.replicas.unwrap_or(1)
}

fn available(set: &ReplicaSet) -> i32 {
    set.status.as_ref().and_then(|status| status.available_replicas).unwrap_or(0)
}

/// A number or a percentage of `total`.
pub fn scaled(value: Option<&IntOrString>, total: i32, round_up: bool) -> i32 {
    match value {
        None => 0,
        Some(IntOrString::Int(number)) => *number,
        Some(IntOrString::String(text)) => {
            let percent: i64 = text.trim_end_matches('%').parse().unwrap_or(0);
            let hundredfold = percent * i64::from(total);
            let rounded = if round_up { (hundredfold + 99).div_euclid(100) } else { hundredfold.div_euclid(100) };
            i32::try_from(rounded).unwrap_or(i32::MAX)
        }
    }
}

/// Whether the strategy is RollingUpdate, the default.
pub fn is_rolling(deployment: &Deployment) -> bool {
    let strategy = deployment.spec.strategy.as_ref().and_then(|strategy| strategy.type_.as_deref());
    strategy != Some("Recreate")
}

/// `maxSurge` and `maxUnavailable` as numbers; never both zero, or nothing could move.
fn fence_posts(deployment: &Deployment) -> (i32, i32) {
    if !is_rolling(deployment) {
        return (0, 0);
    }
    let rolling = deployment.spec.strategy.as_ref().and_then(|strategy| strategy.rolling_update.as_ref());
    let surge = scaled(rolling.and_then(|rolling| rolling.max_surge.as_ref()), replicas(deployment), true);
    let unavailable = scaled(rolling.and_then(|rolling| rolling.max_unavailable.as_ref()), replicas(deployment), false);
    if surge == 0 && unavailable == 0 { (0, 1) } else { (surge, unavailable) }
}

/// Pods above the wanted number that a rollout may have.
pub fn max_surge(deployment: &Deployment) -> i32 {
    fence_posts(deployment).0
}

/// Pods below the wanted number that a rollout may have.
pub fn max_unavailable(deployment: &Deployment) -> i32 {
    let wanted = replicas(deployment);
    if wanted == 0 { 0 } else { fence_posts(deployment).1.min(wanted) }
}

/// A ReplicaSet and the size it is to get.
#[derive(Clone, Debug)]
pub struct Resize {
    pub set: Arc<ReplicaSet>,
    pub to: i32,
    /// Write even if only the annotations about the Deployment's size differ.
    pub force: bool,
}

fn resize(set: &Arc<ReplicaSet>, to: i32) -> Resize {
    Resize { set: set.clone(), to, force: false }
}

/// The size of a new ReplicaSet, given how many pods all sets ask for already (its own `current` included).
pub fn new_size(deployment: &Deployment, all: i32, current: i32) -> i32 {
    let wanted = replicas(deployment);
    if !is_rolling(deployment) {
        return wanted;
    }
    let limit = wanted + max_surge(deployment);
    if all >= limit { current } else { current + (limit - all).min(wanted - current) }
}

fn total(sets: &[Arc<ReplicaSet>]) -> i32 {
    sets.iter().map(|set| size(set)).sum()
}

fn oldest_first(sets: &[Arc<ReplicaSet>]) -> Vec<Arc<ReplicaSet>> {
    let mut sorted: Vec<_> = sets.iter().filter(|set| size(set) > 0).cloned().collect();
    sorted.sort_by(|a, b| age_key(a).cmp(&age_key(b)));
    sorted
}

/// Orders by creation, then name.
pub fn age_key(set: &ReplicaSet) -> (Option<jiff::Timestamp>, Option<String>) {
    (set.metadata.creation_timestamp.as_ref().map(|time| time.0), set.metadata.name.clone())
}

/// The next step of a rolling update: the new set grows as far as the surge allows; else the old ones shrink, unhealthy pods
/// first, as far as availability allows. Empty when nothing can move now.
pub fn rolling(deployment: &Deployment, new: &Arc<ReplicaSet>, old: &[Arc<ReplicaSet>]) -> Vec<Resize> {
    let wanted = replicas(deployment);
    let all = total(old) + size(new);
    if size(new) != wanted {
        let to = if size(new) > wanted { wanted } else { new_size(deployment, all, size(new)) };
        if to != size(new) {
            return vec![resize(new, to)];
        }
    }
    let min_available = wanted - max_unavailable(deployment);
    let new_unavailable = size(new) - available(new);
    let max_scaled_down = all - min_available - new_unavailable;
    let old = oldest_first(old);
    if old.is_empty() || max_scaled_down <= 0 {
        return Vec::new();
    }
    let mut sizes: Vec<i32> = old.iter().map(|set| size(set)).collect();
    let mut cleaned = 0;
    for (set, size) in old.iter().zip(&mut sizes) {
        let down = (max_scaled_down - cleaned).min(*size - available(set)).max(0);
        *size -= down;
        cleaned += down;
    }
    let ready: i32 = old.iter().map(|set| available(set)).sum::<i32>() + available(new);
    let mut left = (ready - min_available).max(0);
    for size in &mut sizes {
        let down = left.min(*size);
        *size -= down;
        left -= down;
    }
    old.iter().zip(sizes).filter(|(set, to)| size(set) != *to).map(|(set, to)| resize(set, to)).collect()
}

/// Sizes when the Deployment itself was resized (or is paused): all active sets share the difference in proportion.
pub fn scale(deployment: &Deployment, new: Option<&Arc<ReplicaSet>>, old: &[Arc<ReplicaSet>]) -> Vec<Resize> {
    let wanted = replicas(deployment);
    let mut active: Vec<Arc<ReplicaSet>> = old.iter().chain(new).filter(|set| size(set) > 0).cloned().collect();
    let newest = || old.iter().max_by(|a, b| age_key(a).cmp(&age_key(b)));
    let only = match active.as_slice() {
        [] => new.or_else(newest),
        [one] => Some(one),
        _ => None,
    };
    if active.len() <= 1 {
        return only.filter(|set| size(set) != wanted).map(|set| resize(set, wanted)).into_iter().collect();
    }
    if new.is_some_and(|new| saturated(deployment, new)) {
        return old.iter().filter(|set| size(set) > 0).map(|set| resize(set, 0)).collect();
    }
    if !is_rolling(deployment) {
        return Vec::new();
    }
    let allowed = if wanted > 0 { wanted + max_surge(deployment) } else { 0 };
    let to_add = allowed - total(&active);
    if to_add > 0 {
        active.sort_by_key(|set| (Reverse(size(set)), Reverse(age_key(set))));
    } else {
        active.sort_by_key(|set| (Reverse(size(set)), age_key(set)));
    }
    let mut added = 0;
    let mut sizes: Vec<i32> = Vec::with_capacity(active.len());
    for set in &active {
        let part = if to_add == 0 { 0 } else { proportion(deployment, set, to_add, added) };
        sizes.push(size(set) + part);
        added += part;
    }
    sizes[0] = (sizes[0] + to_add - added).max(0);
    active.iter().zip(sizes).map(|(set, to)| Resize { set: set.clone(), to, force: true }).collect()
}

fn proportion(deployment: &Deployment, set: &ReplicaSet, to_add: i32, added: i32) -> i32 {
    if to_add == added {
        return 0;
    }
    let fraction = fraction(deployment, set);
    let allowed = to_add - added;
    if to_add > 0 { fraction.min(allowed) } else { fraction.max(allowed) }
}

/// How much one set grows (or shrinks) when the Deployment goes from its former to its present maximum.
fn fraction(deployment: &Deployment, set: &ReplicaSet) -> i32 {
    if replicas(deployment) == 0 {
        return -size(set);
    }
    let after = replicas(deployment) + max_surge(deployment);
    let recorded = annotation(&set.metadata, MAX).and_then(|text| text.parse::<i32>().ok()).filter(|max| *max > 0);
    let before = recorded.or_else(|| deployment.status.as_ref().and_then(|status| status.replicas)).unwrap_or(0);
    if before == 0 {
        return 0;
    }
    let share = f64::from(size(set)) * f64::from(after) / f64::from(before);
    share.round() as i32 - size(set)
}

/// Whether the new set has all the pods it should, available, for the Deployment's present size.
pub fn saturated(deployment: &Deployment, set: &ReplicaSet) -> bool {
    let wanted = replicas(deployment);
    let recorded = annotation(&set.metadata, DESIRED).and_then(|text| text.parse::<i32>().ok());
    size(set) == wanted && recorded == Some(wanted) && available(set) == wanted
}

/// Whether the Deployment was resized since its active sets were last written.
pub fn is_scaling_event(deployment: &Deployment, sets: &[Arc<ReplicaSet>]) -> bool {
    let active = sets.iter().filter(|set| size(set) > 0);
    let recorded = active.filter_map(|set| annotation(&set.metadata, DESIRED).and_then(|text| text.parse::<i32>().ok()));
    recorded.into_iter().any(|desired| desired != replicas(deployment))
}

/// Old sets beyond the history limit, oldest revision first, that are empty and settled.
pub fn surplus(deployment: &Deployment, old: &[Arc<ReplicaSet>]) -> Vec<Arc<ReplicaSet>> {
    let Some(limit) = deployment.spec.revision_history_limit.filter(|limit| *limit != i32::MAX) else {
        return Vec::new();
    };
    let mut alive: Vec<_> = old.iter().filter(|set| set.metadata.deletion_timestamp.is_none()).cloned().collect();
    let excess = alive.len().saturating_sub(usize::try_from(limit).unwrap_or(0));
    alive.sort_by_key(|set| (super::history::revision(&set.metadata), age_key(set)));
    let settled = |set: &Arc<ReplicaSet>| {
        let status = set.status.as_ref();
        size(set) == 0
            && status.is_none_or(|status| status.replicas == 0)
            && set.metadata.generation.unwrap_or(0) <= status.and_then(|status| status.observed_generation).unwrap_or(0)
    };
    alive.into_iter().take(excess).filter(settled).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn deployment(replicas: i32, surge: Value, unavailable: Value) -> Deployment {
        serde_json::from_value(json!({"metadata": {"name": "d"}, "spec": {"replicas": replicas, "selector": {}, "template": {},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}}}))
        .expect("a deployment")
    }

    /// A set of this name (whose age follows the alphabet), size and available pods.
    fn set(name: &str, size: i32, available: i32, max: Option<i32>) -> Arc<ReplicaSet> {
        let mut value = json!({"metadata": {"name": name, "annotations": {"deployment.kubernetes.io/desired-replicas": "10"}},
            "spec": {"replicas": size, "selector": {}}, "status": {"replicas": size, "availableReplicas": available}});
        if let Some(max) = max {
            value["metadata"]["annotations"][MAX] = json!(max.to_string());
        }
        Arc::new(serde_json::from_value(value).expect("a set"))
    }

    fn shown(steps: Vec<Resize>) -> Vec<(String, i32)> {
        let mut shown: Vec<_> = steps.into_iter().map(|step| (step.set.metadata.name.clone().unwrap_or_default(), step.to)).collect();
        shown.sort();
        shown
    }

    fn check_rolling(d: &Deployment, new: (i32, i32), old: &[(&str, i32, i32)], expected: &[(&str, i32)]) {
        let old: Vec<_> = old.iter().map(|(name, size, available)| set(name, *size, *available, None)).collect();
        let steps = shown(rolling(d, &set("new", new.0, new.1, None), &old));
        let expected: Vec<_> = expected.iter().map(|(name, to)| (name.to_string(), *to)).collect();
        assert_eq!(steps, expected, "new {new:?}");
    }

    #[test]
    fn rolling_updates() {
        let d = deployment(10, json!(3), json!(2));
        check_rolling(&d, (0, 0), &[("a", 10, 10)], &[("new", 3)]);
        check_rolling(&d, (3, 0), &[("a", 10, 10)], &[("a", 8)]);
        check_rolling(&d, (3, 0), &[("a", 8, 8)], &[("new", 5)]);
        // the new pods never become available: nothing moves
        check_rolling(&d, (5, 0), &[("a", 8, 8)], &[]);
        check_rolling(&d, (5, 5), &[("a", 8, 8)], &[("a", 3)]);
        check_rolling(&d, (10, 10), &[("a", 3, 3)], &[("a", 0)]);
        // unhealthy pods of the oldest set go first
        check_rolling(&d, (0, 0), &[("a", 5, 0), ("b", 8, 8)], &[("a", 0)]);
        check_rolling(&d, (12, 12), &[], &[("new", 10)]);
        check_rolling(&deployment(1, json!("25%"), json!("25%")), (0, 0), &[("a", 1, 1)], &[("new", 1)]);
        check_rolling(&deployment(1, json!(0), json!("25%")), (0, 0), &[("a", 1, 1)], &[("a", 0)]);
    }

    fn check_scale(d: &Deployment, new: Option<(i32, i32)>, old: &[(&str, i32, i32)], expected: &[(&str, i32)]) {
        let old: Vec<_> = old.iter().map(|(name, size, max)| set(name, *size, *size, Some(*max))).collect();
        let new = new.map(|(size, max)| set("new", size, size, Some(max)));
        let steps = shown(scale(d, new.as_ref(), &old));
        let expected: Vec<_> = expected.iter().map(|(name, to)| (name.to_string(), *to)).collect();
        assert_eq!(steps, expected);
    }

    /// Cases of upstream's TestScale.
    #[test]
    fn proportional_scaling() {
        check_scale(&deployment(12, json!(0), json!(0)), Some((10, 10)), &[], &[("new", 12)]);
        check_scale(&deployment(5, json!(0), json!(0)), Some((10, 10)), &[], &[("new", 5)]);
        check_scale(&deployment(12, json!(0), json!(0)), Some((5, 10)), &[("b", 5, 10)], &[("b", 6), ("new", 6)]);
        check_scale(&deployment(20, json!(0), json!(0)), Some((3, 10)), &[("b", 5, 10), ("c", 2, 10)], &[("b", 10), ("c", 4), ("new", 6)]);
        check_scale(&deployment(0, json!(0), json!(0)), Some((3, 10)), &[("b", 5, 10), ("c", 2, 10)], &[("b", 0), ("c", 0), ("new", 0)]);
        check_scale(&deployment(10, json!(0), json!(0)), None, &[("b", 0, 5), ("c", 0, 5)], &[("c", 10)]);
    }

    #[test]
    fn percentages() {
        let percent = |text: &str| IntOrString::String(text.into());
        for (value, total, up, expected) in [("25%", 10, true, 3), ("25%", 10, false, 2), ("0%", 10, true, 0), ("100%", 7, false, 7), ("1%", 1, true, 1)] {
            assert_eq!(scaled(Some(&percent(value)), total, up), expected, "{value} of {total}");
        }
    }
}
