//! What was decided, and why: plugins return it anyway, so nothing is worked out twice.

use std::collections::VecDeque;
use std::sync::Arc;

use jiff::Timestamp;
use windlass_client::informer::Key;

use crate::plugin::Rejection;
use crate::pod::Pod;
use crate::profile::Rejectors;

/// A node that was found unfit.
#[derive(Clone, Debug)]
pub struct Rejected {
    pub node: String,
    /// The plugin's number in the profile.
    pub plugin: usize,
    pub rejection: Rejection,
}

/// Normalised scores of the nodes that fit, by plugin (its number in the profile), and their weighted totals.
#[derive(Clone, Debug)]
pub struct Scores {
    pub nodes: Vec<String>,
    pub by_plugin: Vec<(usize, Vec<u8>)>,
    pub totals: Vec<i64>,
}

#[derive(Clone, Debug)]
pub enum Outcome {
    /// `ties` nodes had the best total; the one was drawn among them.
    Chosen { node: String, ties: usize },
    Unschedulable { rejected_by: Rejectors, message: String },
}

/// One decision about one pod.
#[derive(Clone, Debug)]
pub struct Decision {
    pub pod: Key,
    pub uid: String,
    pub at: Timestamp,
    /// Nodes there were.
    pub nodes: usize,
    pub rejected: Vec<Rejected>,
    /// None if there was nothing to choose between.
    pub scores: Option<Scores>,
    pub outcome: Outcome,
}

impl Decision {
    pub fn of(pod: &Pod) -> Self {
        Self {
            pod: pod.key.clone(),
            uid: pod.uid.clone(),
            at: Timestamp::now(),
            nodes: 0,
            rejected: Vec::new(),
            scores: None,
            outcome: Outcome::Unschedulable { rejected_by: Rejectors::default(), message: String::new() },
        }
    }

    pub fn reject(&mut self, node: &str, plugin: usize, rejection: Rejection) {
        self.rejected.push(Rejected { node: node.to_owned(), plugin, rejection });
    }

    fn size(&self) -> usize {
        let scores = self.scores.as_ref().map_or(0, |s| s.nodes.len() * (32 + 8 + s.by_plugin.len()));
        256 + self.rejected.len() * 96 + scores
    }
}

/// The latest decisions, within a bound of memory.
#[derive(Default)]
pub struct Log {
    decisions: VecDeque<Arc<Decision>>,
    bytes: usize,
}

impl Log {
    /// Bytes of decisions that are kept.
    const LIMIT: usize = 8 << 20;

    pub fn push(&mut self, decision: Arc<Decision>) {
        self.bytes += decision.size();
        self.decisions.push_back(decision);
        while self.bytes > Self::LIMIT
            && let Some(oldest) = self.decisions.pop_front()
        {
            self.bytes -= oldest.size();
        }
    }

    /// The latest decision about a pod, by its uid.
    pub fn latest(&self, uid: &str) -> Option<&Arc<Decision>> {
        self.decisions.iter().rev().find(|decision| decision.uid == uid)
    }

    pub fn len(&self) -> usize {
        self.decisions.len()
    }

    pub fn is_empty(&self) -> bool {
        self.decisions.is_empty()
    }
}
