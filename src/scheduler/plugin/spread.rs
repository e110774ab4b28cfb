//! Spreads a pod's kind over zones, nodes or other domains (KEP-895).

use std::collections::HashMap;

use windlass_api::selector::LabelSelector;

use crate::cluster::{Cluster, HOSTNAME, Node};
use crate::event::Events;
use crate::plugin::{Check, MAX_SCORE, Plugin, Prepared, Rejection, Score};
use crate::pod::{Pod, Spread, selects};

/// What is spread when the pod asks for nothing: its services' and owner's pods, over nodes and zones.
const DEFAULTS: [(&str, i64); 2] = [(HOSTNAME, 3), ("topology.kubernetes.io/zone", 5)];

pub struct PodTopologySpread;

impl Plugin for PodTopologySpread {
    fn name(&self) -> &'static str {
        "PodTopologySpread"
    }

    fn events(&self) -> Events {
        Events::POD_PLACED | Events::POD_GONE | Events::POD_UPDATE | Events::NODE_ADD | Events::NODE_UPDATE
    }

    fn prepare<'a>(&'a self, cluster: &'a Cluster, pod: &'a Pod) -> Prepared<'a> {
        let hard: Vec<&Spread> = pod.spread.iter().filter(|constraint| constraint.hard).collect();
        if hard.is_empty() {
            return Prepared::Skip;
        }
        Prepared::Check(Box::new(Skews::count(cluster, pod, hard)))
    }

    fn scorer<'a>(&'a self, cluster: &'a Cluster, pod: &'a Pod, fit: &[&Node]) -> Option<Box<dyn Score + 'a>> {
        let explicit = !pod.spread.is_empty();
        let constraints: Vec<Soft> = if explicit {
            pod.spread.iter().filter(|constraint| !constraint.hard).map(Soft::of).collect()
        } else {
            let selector = cluster.default_selector(pod)?;
            DEFAULTS.iter().map(|(key, skew)| Soft::default_of(key, *skew, &selector)).collect()
        };
        (!constraints.is_empty()).then(|| Box::new(Evenness::count(cluster, pod, fit, constraints, explicit)) as Box<dyn Score>)
    }
}

/// Pods of `pod`'s namespace on `node` that are selected and not going away.
fn selected_pods(node: &Node, selector: &LabelSelector, pod: &Pod) -> i64 {
    if selector.is_empty() {
        return 0;
    }
    let alike = |other: &&std::sync::Arc<Pod>| !other.is_terminating() && other.key.namespace == pod.key.namespace && selects(selector, other.labels());
    node.pods.iter().filter(alike).count() as i64
}

fn counts_for(node: &Node, pod: &Pod, honor_affinity: bool, honor_taints: bool) -> bool {
    if honor_affinity && !pod.node_selection.matches(&node.name, &node.labels) {
        return false;
    }
    let keeps_away = |taint: &k8s_openapi::api::core::v1::Taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute") && !pod.tolerates(taint);
    !(honor_taints && node.taints.iter().any(keeps_away))
}

/// For each hard constraint, how many pods each domain has.
struct Skews<'a> {
    pod: &'a Pod,
    constraints: Vec<(&'a Spread, HashMap<String, i64>)>,
}

impl<'a> Skews<'a> {
    fn count(cluster: &'a Cluster, pod: &'a Pod, hard: Vec<&'a Spread>) -> Self {
        let mut skews = Self { pod, constraints: hard.into_iter().map(|constraint| (constraint, HashMap::new())).collect() };
        for node in cluster.nodes() {
            if !skews.constraints.iter().all(|(constraint, _)| node.label(&constraint.topology_key).is_some()) {
                continue;
            }
            for (constraint, domains) in &mut skews.constraints {
                if counts_for(node, pod, constraint.honor_affinity, constraint.honor_taints)
                    && let Some(domain) = node.label(&constraint.topology_key)
                {
                    add(domains, domain, selected_pods(node, &constraint.selector, pod));
                }
            }
        }
        skews
    }
}

fn add(domains: &mut HashMap<String, i64>, domain: &str, count: i64) {
    match domains.get_mut(domain) {
        Some(pods) => *pods += count,
        None => {
            domains.insert(domain.to_owned(), count);
        }
    }
}

impl Check for Skews<'_> {
    fn check(&self, node: &Node) -> Result<(), Rejection> {
        for (constraint, domains) in &self.constraints {
            let Some(domain) = node.label(&constraint.topology_key) else {
                return Err(Rejection::unresolvable("node(s) didn't match pod topology spread constraints (missing required label)"));
            };
            let least = if domains.len() < constraint.min_domains { 0 } else { domains.values().copied().min().unwrap_or(0) };
            let own = i64::from(selects(&constraint.selector, self.pod.labels()));
            if domains.get(domain).copied().unwrap_or(0) + own - least > constraint.max_skew {
                return Err(Rejection::resolvable("node(s) didn't match pod topology spread constraints"));
            }
        }
        Ok(())
    }

    fn moved(&mut self, other: &Pod, node: &Node, sign: i64) {
        if other.key.namespace != self.pod.key.namespace || !self.constraints.iter().all(|(c, _)| node.label(&c.topology_key).is_some()) {
            return;
        }
        for (constraint, domains) in &mut self.constraints {
            if selects(&constraint.selector, other.labels())
                && counts_for(node, self.pod, constraint.honor_affinity, constraint.honor_taints)
                && let Some(domain) = node.label(&constraint.topology_key)
            {
                add(domains, domain, sign);
            }
        }
    }
}

/// A constraint that only lowers the score.
struct Soft {
    topology_key: String,
    max_skew: i64,
    selector: LabelSelector,
    honor_affinity: bool,
    honor_taints: bool,
    /// Pods by domain, of the domains that fit nodes are in. Not used where each node is a domain.
    domains: HashMap<String, i64>,
    /// Grows with the number of domains, so that few large ones do not drown many small ones.
    weight: f64,
}

impl Soft {
    fn of(constraint: &Spread) -> Self {
        Self {
            topology_key: constraint.topology_key.clone(),
            max_skew: constraint.max_skew,
            selector: constraint.selector.clone(),
            honor_affinity: constraint.honor_affinity,
            honor_taints: constraint.honor_taints,
            domains: HashMap::new(),
            weight: 0.0,
        }
    }

    fn default_of(key: &str, max_skew: i64, selector: &LabelSelector) -> Self {
        let selector = selector.clone();
        Self { topology_key: key.to_owned(), max_skew, selector, honor_affinity: true, honor_taints: false, domains: HashMap::new(), weight: 0.0 }
    }

    fn by_node(&self) -> bool {
        self.topology_key == HOSTNAME
    }
}

struct Evenness<'a> {
    pod: &'a Pod,
    constraints: Vec<Soft>,
    /// Whether a node must have all topology labels to be rated: not for the defaults, which suit nodes without zones.
    strict: bool,
}

impl<'a> Evenness<'a> {
    fn count(cluster: &Cluster, pod: &'a Pod, fit: &[&Node], constraints: Vec<Soft>, strict: bool) -> Self {
        let mut evenness = Self { pod, constraints, strict };
        let rated: Vec<&&Node> = fit.iter().filter(|node| evenness.rates(node)).collect();
        for constraint in &mut evenness.constraints {
            let mut count = rated.len();
            if !constraint.by_node() {
                for node in &rated {
                    let domain = node.label(&constraint.topology_key).unwrap_or_default();
                    constraint.domains.entry(domain.to_owned()).or_insert(0);
                }
                count = constraint.domains.len();
            }
            constraint.weight = ((count + 2) as f64).ln();
        }
        for node in cluster.nodes() {
            if !evenness.rates(node) {
                continue;
            }
            for constraint in &mut evenness.constraints {
                let domain = node.label(&constraint.topology_key).unwrap_or_default();
                if let Some(pods) = constraint.domains.get_mut(domain)
                    && counts_for(node, pod, constraint.honor_affinity, constraint.honor_taints)
                {
                    *pods += selected_pods(node, &constraint.selector, pod);
                }
            }
        }
        evenness
    }

    fn rates(&self, node: &Node) -> bool {
        !self.strict || self.constraints.iter().all(|constraint| node.label(&constraint.topology_key).is_some())
    }
}

impl Score for Evenness<'_> {
    fn score(&self, node: &Node) -> i64 {
        if !self.rates(node) {
            return 0;
        }
        let mut score = 0.0;
        for constraint in &self.constraints {
            let Some(domain) = node.label(&constraint.topology_key) else { continue };
            let pods = if constraint.by_node() {
                selected_pods(node, &constraint.selector, self.pod)
            } else {
                constraint.domains.get(domain).copied().unwrap_or(0)
            };
            score += pods as f64 * constraint.weight + (constraint.max_skew - 1) as f64;
        }
        score.round() as i64
    }

    fn normalize(&self, nodes: &[&Node], scores: &mut [i64]) {
        let rated = |at: &usize| self.rates(nodes[*at]);
        let bounds = (0..scores.len()).filter(rated).map(|at| scores[at]).fold(None, |bounds: Option<(i64, i64)>, score| {
            Some(bounds.map_or((score, score), |(low, high)| (low.min(score), high.max(score))))
        });
        let (low, high) = bounds.unwrap_or((0, 0));
        for at in 0..scores.len() {
            scores[at] = match high {
                _ if !rated(&at) => 0,
                0 => MAX_SCORE,
                high => MAX_SCORE * (high + low - scores[at]) / high,
            };
        }
    }
}
