//! One decision: filter the nodes, rate those that fit, take the best.

use std::cell::RefCell;
use std::collections::BTreeMap;

use rand::Rng;

use crate::cluster::{Cluster, Node};
use crate::decision::{Decision, Outcome, Scores};
use crate::plugin::{Check, Prepared, Rejection};
use crate::pod::Pod;
use crate::profile::{Profile, Rejectors};

/// The checks of a profile, prepared for one pod.
pub struct Checks<'a> {
    /// With the number of the plugin's entry.
    checks: RefCell<Vec<(usize, Box<dyn Check + 'a>)>>,
    /// The only nodes that can do, where plugins know them beforehand.
    pub only: Option<Vec<String>>,
}

impl<'a> Checks<'a> {
    /// Fails if a plugin rejects the pod wherever it might go.
    pub fn prepare(profile: &'a Profile, cluster: &'a Cluster, pod: &'a Pod) -> Result<Self, (usize, Rejection)> {
        let mut checks = Vec::new();
        let mut only: Option<Vec<String>> = None;
        for (number, entry) in profile.entries.iter().enumerate() {
            match entry.plugin.prepare(cluster, pod) {
                Prepared::Skip => {}
                Prepared::Reject(rejection) => return Err((number, rejection)),
                Prepared::Check(check) => checks.push((number, check)),
                Prepared::Only(names, check) => {
                    only = Some(match only {
                        Some(mut before) => {
                            before.retain(|name| names.contains(name));
                            before
                        }
                        None => names,
                    });
                    checks.push((number, check));
                }
            }
        }
        Ok(Self { checks: RefCell::new(checks), only })
    }

    /// The first plugin that rejects the node, with its reason.
    pub fn check(&self, node: &Node) -> Result<(), (usize, Rejection)> {
        for (number, check) in self.checks.borrow().iter() {
            check.check(node).map_err(|rejection| (*number, rejection))?;
        }
        Ok(())
    }

    /// The same, with the pods thought to be there that the node was promised to.
    pub fn check_promised(&self, cluster: &Cluster, pod: &Pod, node: &Node) -> Result<(), (usize, Rejection)> {
        let promised: Vec<_> = if cluster.has_nominations() {
            cluster.nominated_to(&node.name).filter(|other| other.uid != pod.uid && other.priority >= pod.priority).cloned().collect()
        } else {
            Vec::new()
        };
        if !promised.is_empty() {
            let mut crowded = node.clone();
            for other in &promised {
                crowded.add(other.clone());
                self.moved(other, node, 1);
            }
            let verdict = self.check(&crowded);
            for other in &promised {
                self.moved(other, node, -1);
            }
            verdict?;
        }
        // Without them too: this pod may need to be near to nobody who is not there yet.
        self.check(node)
    }

    pub fn moved(&self, other: &Pod, node: &Node, sign: i64) {
        for (_, check) in self.checks.borrow_mut().iter_mut() {
            check.moved(other, node, sign);
        }
    }
}

/// Decides where `pod` goes. `start` is the node to begin with; it moves on, so that all nodes get their turn where not
/// all are looked at.
pub fn decide(profile: &Profile, cluster: &Cluster, pod: &Pod, start: &mut usize, random: &mut impl Rng) -> Decision {
    let mut decision = Decision::of(pod);
    if let Some(reason) = &pod.broken {
        decision.outcome = Outcome::Unschedulable { rejected_by: Rejectors::default(), message: reason.clone() };
        return decision;
    }
    let nodes = cluster.nodes();
    decision.nodes = nodes.len();
    let checks = match Checks::prepare(profile, cluster, pod) {
        Ok(checks) => checks,
        Err((number, rejection)) => {
            decision.outcome = reject_all(number, &rejection, nodes.len());
            return decision;
        }
    };
    let fit = filter(profile, cluster, pod, &checks, start, &mut decision);
    decision.outcome = match fit.len() {
        0 => unschedulable(profile, &checks, &decision),
        1 => Outcome::Chosen { node: nodes[fit[0]].name.clone(), ties: 1 },
        _ => rate(profile, cluster, pod, &fit, random, &mut decision),
    };
    decision
}

fn reject_all(number: usize, rejection: &Rejection, nodes: usize) -> Outcome {
    let mut rejected_by = Rejectors::default();
    rejected_by.insert(number);
    Outcome::Unschedulable { rejected_by, message: format!("0/{nodes} nodes are available: {}.", rejection.reasons.join(", ")) }
}

/// The numbers of nodes that fit, at most as many as are enough.
fn filter(profile: &Profile, cluster: &Cluster, pod: &Pod, checks: &Checks, start: &mut usize, decision: &mut Decision) -> Vec<usize> {
    let nodes = cluster.nodes();
    // A pod that was promised a node gets it, if it still fits, without looking at the others.
    if let Some(promised) = cluster.nominated_node(&pod.uid).and_then(|name| cluster.node_index(name))
        && checks.check_promised(cluster, pod, &nodes[promised]).is_ok()
    {
        return vec![promised];
    }
    let mut fit = Vec::new();
    let mut look = |index: usize, decision: &mut Decision| match checks.check_promised(cluster, pod, &nodes[index]) {
        Ok(()) => {
            fit.push(index);
            true
        }
        Err((number, rejection)) => {
            decision.reject(&nodes[index].name, number, rejection);
            false
        }
    };
    if let Some(names) = &checks.only {
        for index in names.iter().filter_map(|name| cluster.node_index(name)) {
            look(index, decision);
        }
        return fit;
    }
    let enough = profile.enough(nodes.len());
    let (mut found, mut looked) = (0, 0);
    while looked < nodes.len() && found < enough {
        found += usize::from(look((*start + looked) % nodes.len(), decision));
        looked += 1;
    }
    if !nodes.is_empty() {
        *start = (*start + looked) % nodes.len();
    }
    fit
}

/// `0/5 nodes are available: 2 Insufficient cpu, 3 node(s) were unschedulable.`
fn unschedulable(profile: &Profile, checks: &Checks, decision: &Decision) -> Outcome {
    let mut rejected_by = Rejectors::default();
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for rejected in &decision.rejected {
        rejected_by.insert(rejected.plugin);
        for reason in &rejected.rejection.reasons {
            *reasons.entry(reason).or_default() += 1;
        }
    }
    let absent = decision.nodes - decision.rejected.len();
    let mut lines: Vec<String> = reasons.into_iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    if absent > 0 && checks.only.is_some() {
        lines.push(format!("{absent} node(s) didn't satisfy plugin(s) [NodeAffinity]"));
        if let Some(number) = profile.entries.iter().position(|entry| entry.plugin.name() == "NodeAffinity") {
            rejected_by.insert(number);
        }
    }
    lines.sort();
    let message = match (decision.nodes, lines.is_empty()) {
        (0, _) => "no nodes available to schedule pods".to_owned(),
        (nodes, true) => format!("0/{nodes} nodes are available."),
        (nodes, false) => format!("0/{nodes} nodes are available: {}.", lines.join(", ")),
    };
    Outcome::Unschedulable { rejected_by, message }
}

fn rate(profile: &Profile, cluster: &Cluster, pod: &Pod, fit: &[usize], random: &mut impl Rng, decision: &mut Decision) -> Outcome {
    let nodes: Vec<&Node> = fit.iter().map(|index| &cluster.nodes()[*index]).collect();
    let mut totals = vec![0i64; nodes.len()];
    let mut scores = Vec::new();
    for (number, entry) in profile.entries.iter().enumerate().filter(|(_, entry)| entry.weight > 0) {
        let Some(scorer) = entry.plugin.scorer(cluster, pod, &nodes) else { continue };
        let mut of_plugin: Vec<i64> = nodes.iter().map(|node| scorer.score(node)).collect();
        scorer.normalize(&nodes, &mut of_plugin);
        for (total, score) in totals.iter_mut().zip(&of_plugin) {
            *total += score * entry.weight;
        }
        // Normalised scores lie within 0..=100.
        scores.push((number, of_plugin.iter().map(|score| u8::try_from(*score).unwrap_or(u8::MAX)).collect()));
    }
    let best = totals.iter().copied().max().unwrap_or(0);
    let tied: Vec<usize> = (0..totals.len()).filter(|at| totals[*at] == best).collect();
    let chosen = tied[random.random_range(0..tied.len())];
    decision.scores = Some(Scores { nodes: nodes.iter().map(|node| node.name.clone()).collect(), by_plugin: scores, totals });
    Outcome::Chosen { node: nodes[chosen].name.clone(), ties: tied.len() }
}
