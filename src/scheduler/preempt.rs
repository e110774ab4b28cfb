//! Making room for a pod by evicting others of lower priority: as few, as unimportant, and with as little harm to
//! disruption budgets as possible. Follows upstream's `DefaultPreemption`.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use jiff::Timestamp;
use rand::Rng;
use windlass_client::informer::Key;

use crate::cluster::{Cluster, Node};
use crate::cycle::Checks;
use crate::decision::Decision;
use crate::pod::{Pod, compile_selector, selects};
use crate::profile::Profile;

/// Of the nodes where preemption might help, this share in percent is tried, but at least this many.
const CANDIDATE_PERCENTAGE: usize = 10;
const CANDIDATE_MINIMUM: usize = 100;

/// Where room can be made, and whose.
#[derive(Debug)]
pub struct Preemption {
    pub node: String,
    /// The most important first.
    pub victims: Vec<Arc<Pod>>,
    violations: usize,
}

/// Finds the node on which preemption does the least harm; or says why none helps, in upstream's words.
pub fn find(profile: &Profile, cluster: &Cluster, pod: &Pod, decision: &Decision, random: &mut impl Rng) -> Result<Preemption, String> {
    eligible(cluster, pod, decision)?;
    let mut helpful: Vec<&Node> = decision.rejected.iter().filter(|r| r.rejection.resolvable).filter_map(|r| cluster.node(&r.node)).collect();
    let mut failures: BTreeMap<String, usize> = BTreeMap::new();
    let hopeless = cluster.nodes().len() - helpful.len();
    if hopeless > 0 {
        failures.insert("Preemption is not helpful for scheduling".to_owned(), hopeless);
    }
    let mut candidates: Vec<Preemption> = Vec::new();
    if !helpful.is_empty() && let Ok(checks) = Checks::prepare(profile, cluster, pod) {
        let enough = (helpful.len() * CANDIDATE_PERCENTAGE / 100).max(CANDIDATE_MINIMUM);
        let offset = random.random_range(0..helpful.len());
        helpful.rotate_left(offset);
        for node in helpful {
            match victims_on(cluster, pod, &checks, node) {
                Ok(preemption) => candidates.push(preemption),
                Err(reason) => *failures.entry(reason).or_default() += 1,
            }
            let harmless = candidates.iter().any(|candidate| candidate.violations == 0);
            if candidates.len() >= enough && harmless {
                break;
            }
        }
    }
    candidates.into_iter().min_by_key(harm).ok_or_else(|| {
        let mut lines: Vec<String> = failures.into_iter().map(|(reason, count)| format!("{count} {reason}")).collect();
        lines.sort();
        format!("0/{} nodes are available: {}.", cluster.nodes().len(), lines.join(", "))
    })
}

/// A pod that may not preempt, or whose victims are still going, must wait.
fn eligible(cluster: &Cluster, pod: &Pod, decision: &Decision) -> Result<(), String> {
    if !pod.may_preempt() {
        return Err("not eligible due to preemptionPolicy=Never.".to_owned());
    }
    let Some(node) = cluster.nominated_node(&pod.uid).and_then(|name| cluster.node(name)) else { return Ok(()) };
    let lost = decision.rejected.iter().any(|r| r.node == node.name && !r.rejection.resolvable);
    let going = node.pods.iter().any(|other| other.priority < pod.priority && other.is_terminating());
    if going && !lost {
        return Err("not eligible due to a terminating pod on the nominated node.".to_owned());
    }
    Ok(())
}

/// The fewest, least important pods of `node` whose leaving makes `pod` fit.
fn victims_on(cluster: &Cluster, pod: &Pod, checks: &Checks, node: &Node) -> Result<Preemption, String> {
    let mut potential: Vec<Arc<Pod>> = node.pods.iter().filter(|other| other.priority < pod.priority).cloned().collect();
    if potential.is_empty() {
        return Err("No preemption victims found for incoming pod".to_owned());
    }
    let mut imagined = node.clone();
    for victim in &potential {
        imagined.remove(&victim.uid);
        checks.moved(victim, node, -1);
    }
    let fits = |imagined: &Node| checks.check_promised(cluster, pod, imagined).map_err(|(_, rejection)| rejection.reasons.join(", "));
    let empty = fits(&imagined);
    let mut victims = Vec::new();
    let mut violations = 0;
    if empty.is_ok() {
        potential.sort_by_key(|victim| importance(victim));
        let (violating, harmless) = by_budget(cluster, &potential);
        for (victim, violates) in violating.into_iter().map(|v| (v, true)).chain(harmless.into_iter().map(|v| (v, false))) {
            imagined.add(victim.clone());
            checks.moved(&victim, node, 1);
            if fits(&imagined).is_err() {
                imagined.remove(&victim.uid);
                checks.moved(&victim, node, -1);
                violations += usize::from(violates);
                victims.push(victim);
            }
        }
    }
    // The checks are used for other nodes: undo what was only imagined.
    let gone = if empty.is_ok() { &victims } else { &potential };
    for victim in gone {
        checks.moved(victim, node, 1);
    }
    empty?;
    victims.sort_by_key(|victim| importance(victim));
    Ok(Preemption { node: node.name.clone(), victims, violations })
}

/// Sorts the more important pod first: by priority, then by who has run longer.
fn importance(pod: &Pod) -> (Reverse<i32>, Option<Timestamp>) {
    (Reverse(pod.priority), pod.started())
}

/// Those whose eviction a disruption budget does not allow, and the others, each in the given order.
fn by_budget(cluster: &Cluster, pods: &[Arc<Pod>]) -> (Vec<Arc<Pod>>, Vec<Arc<Pod>>) {
    let mut left: HashMap<&Key, i32> = cluster.budgets.iter().map(|(key, budget)| (key, budget.status.disruptions_allowed)).collect();
    pods.iter().cloned().partition(|pod| {
        let mut violates = false;
        for (key, budget) in cluster.budgets.iter().filter(|(key, _)| key.namespace == pod.key.namespace) {
            let selector = budget.spec.selector.as_ref().and_then(|selector| compile_selector(selector).ok());
            let counts = selector.is_some_and(|selector| !selector.is_empty() && selects(&selector, pod.labels()));
            // A pod whose disruption is in progress has been counted already.
            if counts && !budget.status.disrupted_pods.contains_key(&pod.key.name) && let Some(left) = left.get_mut(key) {
                *left -= 1;
                violates |= *left < 0;
            }
        }
        violates
    })
}

/// Orders candidates by harm: budget violations, the highest priority, the sum of priorities, the number of victims, and
/// how long the most important have run.
fn harm(candidate: &Preemption) -> (usize, i32, i64, usize, Reverse<Option<Timestamp>>) {
    let highest = candidate.victims.first().map_or(i32::MIN, |victim| victim.priority);
    // Shifted to be positive, so that few negative priorities do not weigh more than many.
    let sum = candidate.victims.iter().map(|victim| i64::from(victim.priority) + i64::from(i32::MAX) + 1).sum();
    let earliest = candidate.victims.iter().filter(|victim| victim.priority == highest).filter_map(|victim| victim.started()).min();
    (candidate.violations, highest, sum, candidate.victims.len(), Reverse(earliest))
}
