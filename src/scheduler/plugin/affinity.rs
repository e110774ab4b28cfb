//! Pods that want to be near others, or far from them, and others that want so of them.

use std::collections::HashMap;

use crate::cluster::{Cluster, Node};
use crate::event::Events;
use crate::plugin::{Check, MAX_SCORE, Plugin, Prepared, Rejection, Score};
use crate::pod::{Labels, Pod, Term};

pub struct InterPodAffinity;

/// What a required term of a running pod adds to the score of nodes near it: upstream's `hardPodAffinityWeight`.
const REQUIRED_WEIGHT: i64 = 1;

impl Plugin for InterPodAffinity {
    fn name(&self) -> &'static str {
        "InterPodAffinity"
    }

    fn events(&self) -> Events {
        Events::POD_PLACED | Events::POD_GONE | Events::POD_UPDATE | Events::NODE_ADD | Events::NODE_UPDATE | Events::NAMESPACE
    }

    fn prepare<'a>(&'a self, cluster: &'a Cluster, pod: &'a Pod) -> Prepared<'a> {
        let mut rules = Rules {
            cluster,
            pod,
            repelled: Counts::default(),
            near: vec![Counts::default(); pod.affinity.required.len()],
            far: vec![Counts::default(); pod.anti_affinity.required.len()],
        };
        for (other, node) in cluster.with_affinity() {
            rules.count_repulsion(other, node, 1);
        }
        if !rules.near.is_empty() || !rules.far.is_empty() {
            for node in cluster.nodes() {
                for other in &node.pods {
                    rules.count_attraction(other, node, 1);
                }
            }
        }
        let idle = rules.near.is_empty() && rules.far.is_empty() && rules.repelled.0.is_empty();
        if idle { Prepared::Skip } else { Prepared::Check(Box::new(rules)) }
    }

    fn scorer<'a>(&'a self, cluster: &'a Cluster, pod: &'a Pod, _: &[&Node]) -> Option<Box<dyn Score + 'a>> {
        let mut weights = Counts::default();
        let own = !pod.affinity.preferred.is_empty() || !pod.anti_affinity.preferred.is_empty();
        if own {
            for node in cluster.nodes() {
                for other in &node.pods {
                    let labels = cluster.namespace_labels(other.key.ns());
                    weights.add_matching(&pod.affinity.preferred, other, labels, node, 1);
                    weights.add_matching(&pod.anti_affinity.preferred, other, labels, node, -1);
                }
            }
        }
        let labels = cluster.namespace_labels(pod.key.ns());
        for (other, node) in cluster.with_affinity() {
            for term in other.affinity.required.iter().filter(|term| term.matches(pod, labels)) {
                weights.add(&term.topology_key, node, REQUIRED_WEIGHT);
            }
            weights.add_matching(&other.affinity.preferred, pod, labels, node, 1);
            weights.add_matching(&other.anti_affinity.preferred, pod, labels, node, -1);
        }
        (!weights.0.is_empty()).then(|| Box::new(Pull(weights)) as Box<dyn Score>)
    }
}

/// Numbers by topology key and value.
#[derive(Clone, Default)]
struct Counts(HashMap<String, HashMap<String, i64>>);

impl Counts {
    fn add(&mut self, key: &str, node: &Node, amount: i64) {
        let Some(value) = node.label(key) else { return };
        if !self.0.contains_key(key) {
            self.0.insert(key.to_owned(), HashMap::new());
        }
        let Some(values) = self.0.get_mut(key) else { return };
        match values.get_mut(value) {
            Some(count) => *count += amount,
            None => {
                values.insert(value.to_owned(), amount);
            }
        }
    }

    fn add_matching(&mut self, terms: &[(i64, Term)], pod: &Pod, namespace_labels: &Labels, node: &Node, sign: i64) {
        for (weight, term) in terms.iter().filter(|(_, term)| term.matches(pod, namespace_labels)) {
            self.add(&term.topology_key, node, sign * weight);
        }
    }

    fn at(&self, key: &str, node: &Node) -> i64 {
        node.label(key).and_then(|value| self.0.get(key)?.get(value)).copied().unwrap_or(0)
    }

    fn any(&self, node: &Node) -> bool {
        self.0.keys().any(|key| self.at(key, node) > 0)
    }

    fn is_zero(&self) -> bool {
        self.0.values().all(|values| values.values().all(|count| *count == 0))
    }
}

struct Rules<'a> {
    cluster: &'a Cluster,
    pod: &'a Pod,
    /// Where running pods' anti-affinity keeps this pod away.
    repelled: Counts,
    /// By required term: where pods are that it means.
    near: Vec<Counts>,
    far: Vec<Counts>,
}

impl Rules<'_> {
    fn count_repulsion(&mut self, other: &Pod, node: &Node, sign: i64) {
        let labels = self.cluster.namespace_labels(self.pod.key.ns());
        for term in other.anti_affinity.required.iter().filter(|term| term.matches(self.pod, labels)) {
            self.repelled.add(&term.topology_key, node, sign);
        }
    }

    fn count_attraction(&mut self, other: &Pod, node: &Node, sign: i64) {
        let labels = self.cluster.namespace_labels(other.key.ns());
        let required = &self.pod.affinity.required;
        // Only pods that meet all the terms count for any of them.
        if !required.is_empty() && required.iter().all(|term| term.matches(other, labels)) {
            for (term, counts) in required.iter().zip(&mut self.near) {
                counts.add(&term.topology_key, node, sign);
            }
        }
        for (term, counts) in self.pod.anti_affinity.required.iter().zip(&mut self.far) {
            if term.matches(other, labels) {
                counts.add(&term.topology_key, node, sign);
            }
        }
    }

    /// The first pod of a group that wants to be together has nobody to be near to: it may go anywhere.
    fn is_first_of_its_group(&self) -> bool {
        let labels = self.cluster.namespace_labels(self.pod.key.ns());
        self.near.iter().all(Counts::is_zero) && self.pod.affinity.required.iter().all(|term| term.matches(self.pod, labels))
    }
}

impl Check for Rules<'_> {
    fn check(&self, node: &Node) -> Result<(), Rejection> {
        let required = &self.pod.affinity.required;
        let labelled = required.iter().all(|term| node.label(&term.topology_key).is_some());
        let near = || required.iter().zip(&self.near).all(|(term, counts)| counts.at(&term.topology_key, node) > 0);
        if !required.is_empty() && !(labelled && (near() || self.is_first_of_its_group())) {
            return Err(Rejection::unresolvable("node(s) didn't match pod affinity rules"));
        }
        let anti = self.pod.anti_affinity.required.iter().zip(&self.far);
        if anti.into_iter().any(|(term, counts)| counts.at(&term.topology_key, node) > 0) {
            return Err(Rejection::resolvable("node(s) didn't match pod anti-affinity rules"));
        }
        if self.repelled.any(node) {
            return Err(Rejection::resolvable("node(s) didn't satisfy existing pods anti-affinity rules"));
        }
        Ok(())
    }

    fn moved(&mut self, other: &Pod, node: &Node, sign: i64) {
        self.count_repulsion(other, node, sign);
        self.count_attraction(other, node, sign);
    }
}

struct Pull(Counts);

impl Score for Pull {
    fn score(&self, node: &Node) -> i64 {
        self.0.0.keys().map(|key| self.0.at(key, node)).sum()
    }

    fn normalize(&self, _: &[&Node], scores: &mut [i64]) {
        let (low, high) = scores.iter().fold((i64::MAX, i64::MIN), |(low, high), score| (low.min(*score), high.max(*score)));
        for score in scores {
            *score = if high > low { (MAX_SCORE as f64 * ((*score - low) as f64 / (high - low) as f64)) as i64 } else { 0 };
        }
    }
}
