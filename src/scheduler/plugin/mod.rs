//! The plugins: what makes a node unfit for a pod, and which of the fit ones is best.
//!
//! Names, order, weights, reasons and formulas are those of upstream's default profile (`pkg/scheduler/framework/plugins`).
//! A plugin prepares a check or a score for one pod; checks and scores then look at one node at a time and allocate
//! nothing when the node is fit.

mod affinity;
mod basic;
mod fit;
mod spread;
mod volume;

use std::borrow::Cow;

use smallvec::{SmallVec, smallvec};

use crate::cluster::{Cluster, Node};
use crate::event::Events;
use crate::pod::Pod;

/// Scores run from 0 to this, after normalisation.
pub const MAX_SCORE: i64 = 100;

/// Why a node is unfit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// In upstream's words; several where a node lacks several resources.
    pub reasons: SmallVec<[Cow<'static, str>; 1]>,
    /// Whether it could become fit by removing pods: only then preemption is tried.
    pub resolvable: bool,
}

impl Rejection {
    pub fn resolvable(reason: impl Into<Cow<'static, str>>) -> Self {
        Self { reasons: smallvec![reason.into()], resolvable: true }
    }

    pub fn unresolvable(reason: impl Into<Cow<'static, str>>) -> Self {
        Self { reasons: smallvec![reason.into()], resolvable: false }
    }
}

/// What a plugin says of a pod before it looks at nodes.
pub enum Prepared<'a> {
    /// It has nothing against any node.
    Skip,
    /// No node can do.
    Reject(Rejection),
    /// Each node must pass.
    Check(Box<dyn Check + 'a>),
    /// Only the named nodes can do, and they must pass.
    Only(Vec<String>, Box<dyn Check + 'a>),
}

/// Looks at one node for one pod.
pub trait Check {
    fn check(&self, node: &Node) -> Result<(), Rejection>;

    /// A pod is thought to have come to `node` (`sign` 1) or gone from it (-1): what was counted must follow.
    fn moved(&mut self, _pod: &Pod, _node: &Node, _sign: i64) {}
}

/// Rates fit nodes for one pod.
pub trait Score {
    fn score(&self, node: &Node) -> i64;

    /// Brings raw scores to 0..=100. `nodes` are those of `scores`.
    fn normalize(&self, _nodes: &[&Node], _scores: &mut [i64]) {}
}

pub trait Plugin: Sync {
    fn name(&self) -> &'static str;

    /// What may make a pod fit that this plugin rejected.
    fn events(&self) -> Events;

    fn prepare<'a>(&'a self, _cluster: &'a Cluster, _pod: &'a Pod) -> Prepared<'a> {
        Prepared::Skip
    }

    /// None if the plugin rates all nodes alike for this pod. `fit` are the nodes to rate.
    fn scorer<'a>(&'a self, _cluster: &'a Cluster, _pod: &'a Pod, _fit: &[&Node]) -> Option<Box<dyn Score + 'a>> {
        None
    }
}

/// A row of the table of plugins.
pub struct Row {
    pub plugin: &'static dyn Plugin,
    /// Weight of its score in the default profile; 0 if it does not score.
    pub weight: i64,
}

/// All plugins, in the order in which they filter.
pub static ALL: &[Row] = &[
    Row { plugin: &basic::SchedulingGates, weight: 0 },
    Row { plugin: &basic::NodeName, weight: 0 },
    Row { plugin: &basic::NodeUnschedulable, weight: 0 },
    Row { plugin: &basic::TaintToleration, weight: 3 },
    Row { plugin: &basic::NodeAffinity, weight: 2 },
    Row { plugin: &basic::NodePorts, weight: 0 },
    Row { plugin: &fit::NodeResourcesFit, weight: 1 },
    Row { plugin: &volume::VolumeRestrictions, weight: 0 },
    Row { plugin: &volume::NodeVolumeLimits, weight: 0 },
    Row { plugin: &volume::VolumeBinding, weight: 0 },
    Row { plugin: &volume::VolumeZone, weight: 0 },
    Row { plugin: &spread::PodTopologySpread, weight: 2 },
    Row { plugin: &affinity::InterPodAffinity, weight: 2 },
    Row { plugin: &basic::DynamicResources, weight: 0 },
    Row { plugin: &fit::NodeResourcesBalancedAllocation, weight: 1 },
    Row { plugin: &basic::ImageLocality, weight: 1 },
];

/// Scales scores so that the highest is 100; `reverse` makes low raw scores the good ones.
fn normalize_to_max(scores: &mut [i64], reverse: bool) {
    let max = scores.iter().copied().max().unwrap_or(0);
    for score in scores {
        *score = match (max, reverse) {
            (0, true) => MAX_SCORE,
            (0, false) => *score,
            (_, true) => MAX_SCORE - MAX_SCORE * *score / max,
            (_, false) => MAX_SCORE * *score / max,
        };
    }
}

pub use volume::{ClaimPlan, plan_claims};

#[cfg(test)]
mod tests;
