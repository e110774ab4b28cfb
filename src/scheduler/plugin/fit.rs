//! Room on nodes: whether the pod's requests fit, and where they fit best.

use smallvec::SmallVec;

use crate::cluster::{Cluster, Node};
use crate::event::Events;
use crate::plugin::{Check, MAX_SCORE, Plugin, Prepared, Rejection, Score};
use crate::pod::Pod;

/// A node must have room for the pod's requests; the emptier, the better (`LeastAllocated`, CPU and memory alike).
pub struct NodeResourcesFit;

impl Plugin for NodeResourcesFit {
    fn name(&self) -> &'static str {
        "NodeResourcesFit"
    }

    fn events(&self) -> Events {
        Events::POD_GONE | Events::NODE_ADD | Events::NODE_UPDATE | Events::POD_UPDATE
    }

    fn prepare<'a>(&'a self, _: &'a Cluster, pod: &'a Pod) -> Prepared<'a> {
        Prepared::Check(Box::new(Room(pod)))
    }

    fn scorer<'a>(&'a self, _: &'a Cluster, pod: &'a Pod, _: &[&Node]) -> Option<Box<dyn Score + 'a>> {
        Some(Box::new(LeastAllocated(pod)))
    }
}

struct Room<'a>(&'a Pod);

impl Check for Room<'_> {
    fn check(&self, node: &Node) -> Result<(), Rejection> {
        let (wants, has, used) = (&self.0.requests, &node.allocatable, &node.requested);
        let lacks = |wants: i64, has: i64, used: i64| wants > 0 && wants > has - used;
        let mut reasons = SmallVec::new();
        let mut resolvable = true;
        let mut judge = |wants: i64, has: i64, used: i64, reason: &mut dyn FnMut() -> std::borrow::Cow<'static, str>| {
            if lacks(wants, has, used) {
                reasons.push(reason());
                // More than the whole node has: no preemption helps.
                resolvable &= wants <= has;
            }
        };
        judge(1, has.pods, node.pods.len() as i64, &mut || "Too many pods".into());
        judge(wants.cpu, has.cpu, used.cpu, &mut || "Insufficient cpu".into());
        judge(wants.memory, has.memory, used.memory, &mut || "Insufficient memory".into());
        judge(wants.storage, has.storage, used.storage, &mut || "Insufficient ephemeral-storage".into());
        for (id, amount) in &wants.scalars {
            judge(*amount, has.scalar(*id), used.scalar(*id), &mut || format!("Insufficient {}", id.name()).into());
        }
        if reasons.is_empty() { Ok(()) } else { Err(Rejection { reasons, resolvable }) }
    }
}

struct LeastAllocated<'a>(&'a Pod);

impl Score for LeastAllocated<'_> {
    fn score(&self, node: &Node) -> i64 {
        let free = |has: i64, used: i64| if used > has { 0 } else { (has - used) * MAX_SCORE / has };
        let pairs = [
            (node.allocatable.cpu, node.non_zero.cpu + self.0.non_zero.cpu),
            (node.allocatable.memory, node.non_zero.memory + self.0.non_zero.memory),
        ];
        let known = pairs.iter().filter(|(has, _)| *has > 0);
        let (sum, count) = known.fold((0, 0), |(sum, count), (has, used)| (sum + free(*has, *used), count + 1));
        if count == 0 { 0 } else { sum / count }
    }
}

/// Nodes whose CPU and memory are used in like proportion are better, judged by what the pod changes.
pub struct NodeResourcesBalancedAllocation;

impl Plugin for NodeResourcesBalancedAllocation {
    fn name(&self) -> &'static str {
        "NodeResourcesBalancedAllocation"
    }

    fn events(&self) -> Events {
        Events::NONE
    }

    fn scorer<'a>(&'a self, _: &'a Cluster, pod: &'a Pod, _: &[&Node]) -> Option<Box<dyn Score + 'a>> {
        let best_effort = pod.requests.cpu == 0 && pod.requests.memory == 0;
        (!best_effort).then(|| Box::new(Balance(pod)) as Box<dyn Score>)
    }
}

struct Balance<'a>(&'a Pod);

impl Score for Balance<'_> {
    fn score(&self, node: &Node) -> i64 {
        let balance = |cpu: i64, memory: i64| {
            let share = |used: i64, has: i64| (used as f64 / has as f64).min(1.0);
            let deviation = match (node.allocatable.cpu, node.allocatable.memory) {
                (0, _) | (_, 0) => 0.0,
                (has_cpu, has_memory) => ((share(cpu, has_cpu) - share(memory, has_memory)) / 2.0).abs(),
            };
            ((1.0 - deviation) * MAX_SCORE as f64) as i64
        };
        let with = balance(node.requested.cpu + self.0.requests.cpu, node.requested.memory + self.0.requests.memory);
        let without = balance(node.requested.cpu, node.requested.memory);
        MAX_SCORE / 2 + (MAX_SCORE / 2 + with - without) / 2
    }
}
