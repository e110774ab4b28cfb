//! Node IPAM: every node gets its part of the cluster CIDR.
//!
//! Which parts are taken is read from the nodes themselves, so a restart hands nothing out twice.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use k8s_openapi::api::core::v1::Node;
use parking_lot::Mutex;
use serde_json::json;
use windlass_client::{
    events::{self, EventType, Recorder},
    informer::{Change, Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    config::Config,
    context::{Context, Worker},
    write,
};

/// Parts that one set can have; beyond it a set would not fit in memory for nothing.
const MAX_PARTS_LOG2: u8 = 16;

/// An address range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    /// The first address, as a number; IPv4 in the low 32 bits.
    base: u128,
    prefix: u8,
    v6: bool,
}

impl Cidr {
    /// Parses `10.0.0.0/8`.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (address, prefix) = text.trim().split_once('/').ok_or_else(|| format!("{text:?} is not of the form address/prefix"))?;
        let address: IpAddr = address.parse().map_err(|_| format!("{address:?} is not an IP address"))?;
        let prefix: u8 = prefix.parse().map_err(|_| format!("{prefix:?} is not a prefix length"))?;
        let (base, v6) = match address {
            IpAddr::V4(v4) => (u128::from(u32::from(v4)), false),
            IpAddr::V6(v6) => (u128::from(v6), true),
        };
        if prefix > Self::bits(v6) {
            return Err(format!("prefix length {prefix} of {text:?} is too large"));
        }
        let cidr = Cidr { base, prefix, v6 };
        Ok(Cidr { base: base - base % cidr.size(), ..cidr })
    }

    fn bits(v6: bool) -> u8 {
        if v6 { 128 } else { 32 }
    }

    /// Addresses in the range; saturates for `::/0`.
    fn size(self) -> u128 {
        1u128.checked_shl(u32::from(Self::bits(self.v6) - self.prefix)).unwrap_or(u128::MAX)
    }

    fn overlaps(self, other: Cidr) -> bool {
        self.v6 == other.v6 && self.base < other.base.saturating_add(other.size()) && other.base < self.base.saturating_add(self.size())
    }
}

impl std::fmt::Display for Cidr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let address = if self.v6 { IpAddr::V6(Ipv6Addr::from(self.base)) } else { IpAddr::V4(Ipv4Addr::from(self.base as u32)) };
        write!(f, "{address}/{}", self.prefix)
    }
}

/// The parts of one range, and which are taken. Parts are handed out in turn, so that one just freed rests a while.
#[derive(Debug)]
pub struct Parts {
    range: Cidr,
    prefix: u8,
    taken: Vec<bool>,
    next: usize,
}

impl Parts {
    /// Divides `range` into parts with this prefix length.
    ///
    /// # Errors
    /// When the parts are larger than the range, or too many.
    pub fn new(range: Cidr, prefix: u8) -> Result<Self, String> {
        if prefix < range.prefix || prefix > Cidr::bits(range.v6) {
            return Err(format!("the node mask size {prefix} must lie between the prefix length of {range} and {}", Cidr::bits(range.v6)));
        }
        if prefix - range.prefix > MAX_PARTS_LOG2 {
            return Err(format!("{range} has more than {} parts of /{prefix}", 1 << MAX_PARTS_LOG2));
        }
        Ok(Parts { range, prefix, taken: vec![false; 1 << (prefix - range.prefix)], next: 0 })
    }

    fn part(&self, index: usize) -> Cidr {
        let size = Cidr { prefix: self.prefix, ..self.range }.size();
        Cidr { base: self.range.base + size * index as u128, prefix: self.prefix, v6: self.range.v6 }
    }

    /// Marks every part that overlaps `cidr` as taken or free.
    pub fn mark(&mut self, cidr: Cidr, taken: bool) {
        if !self.range.overlaps(cidr) {
            return;
        }
        let size = self.part(0).size();
        let first = cidr.base.saturating_sub(self.range.base) / size;
        let last = (cidr.base.saturating_add(cidr.size() - 1)).saturating_sub(self.range.base) / size;
        for index in first..=last.min(self.taken.len() as u128 - 1) {
            self.taken[index as usize] = taken;
        }
    }

    /// Takes the next free part.
    pub fn take(&mut self) -> Option<Cidr> {
        let count = self.taken.len();
        let index = (0..count).map(|step| (self.next + step) % count).find(|index| !self.taken[*index])?;
        self.taken[index] = true;
        self.next = (index + 1) % count;
        Some(self.part(index))
    }

    fn holds(&self, cidr: Cidr) -> bool {
        self.range.overlaps(cidr)
    }
}

/// The sets of parts that the configuration asks for, the service range taken out.
///
/// # Errors
/// What cannot be used.
pub fn parts(config: &Config) -> Result<Vec<Parts>, String> {
    let mut all = Vec::new();
    for text in config.cluster_cidr.split(',').filter(|text| !text.trim().is_empty()) {
        let range = Cidr::parse(text)?;
        let mut parts = Parts::new(range, if range.v6 { 64 } else { config.node_cidr_mask_size })?;
        for service in config.service_cluster_ip_range.split(',').filter(|text| !text.trim().is_empty()) {
            parts.mark(Cidr::parse(service)?, true);
        }
        all.push(parts);
    }
    Ok(all)
}

fn cidrs(node: &Node) -> Vec<Cidr> {
    let spec = node.spec.as_ref();
    let many = spec.and_then(|spec| spec.pod_cidrs.as_deref()).unwrap_or_default();
    let texts = if many.is_empty() { spec.and_then(|spec| spec.pod_cidr.as_ref()).into_iter().collect() } else { many.iter().collect::<Vec<_>>() };
    texts.into_iter().filter_map(|text| Cidr::parse(text).ok()).collect()
}

struct Allocator {
    client: kube::Client,
    recorder: Recorder,
    nodes: Informer<Node>,
    state: Mutex<State>,
}

struct State {
    parts: Vec<Parts>,
    /// What was handed out and is not in the cache yet, by node.
    pending: HashMap<String, Vec<Cidr>>,
}

impl State {
    fn mark(&mut self, cidrs: &[Cidr], taken: bool) {
        for cidr in cidrs {
            for parts in self.parts.iter_mut().filter(|parts| parts.holds(*cidr)) {
                parts.mark(*cidr, taken);
            }
        }
    }

    /// One part of each range for a node; what it was offered before, again.
    fn offer(&mut self, node: &str) -> Option<Vec<Cidr>> {
        if let Some(offered) = self.pending.get(node) {
            return Some(offered.clone());
        }
        let taken: Vec<Option<Cidr>> = self.parts.iter_mut().map(Parts::take).collect();
        if taken.iter().any(Option::is_none) {
            let partial: Vec<Cidr> = taken.into_iter().flatten().collect();
            self.mark(&partial, false);
            return None;
        }
        let offered: Vec<Cidr> = taken.into_iter().flatten().collect();
        self.pending.insert(node.to_owned(), offered.clone());
        Some(offered)
    }

    /// Follows the nodes; true if the node needs a range, or one came free.
    fn observe(&mut self, change: &Change<Node>) {
        let name = change.object().metadata.name.clone().unwrap_or_default();
        let held = change.new.as_deref().map(cidrs).unwrap_or_default();
        if change.is_delete() {
            let mut freed = change.old.as_deref().map(cidrs).unwrap_or_default();
            freed.extend(self.pending.remove(&name).into_iter().flatten());
            self.mark(&freed, false);
        } else if !held.is_empty() {
            // A node with another range than we offered (somebody was faster): give ours back.
            if let Some(offered) = self.pending.remove(&name) {
                self.mark(&offered, false);
            }
            self.mark(&held, true);
        }
    }
}

impl Allocator {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(node) = self.nodes.get(&key).filter(|node| cidrs(node).is_empty()) else { return Ok(Action::Done) };
        let Some(offered) = self.state.lock().offer(&key.name) else {
            let message = format!("Node {} status is now: CIDRNotAvailable", key.name);
            self.recorder.event(&events::reference(&*node), EventType::Normal, "CIDRNotAvailable", message);
            return Err(Error::Invalid(format!("no part of --cluster-cidr is free for node {}: enlarge the range", key.name)));
        };
        let texts: Vec<String> = offered.iter().map(Cidr::to_string).collect();
        let patch = json!({"metadata": {"uid": node.metadata.uid}, "spec": {"podCIDR": texts[0], "podCIDRs": texts}});
        match write::strategic_patch(&self.client, &write::path(&*node), &patch).await {
            Ok(_) => Ok(Action::Done),
            // The node is gone, or has a range already: the watch will say, and the offer is then taken back.
            Err(error) if write::ApiErrorExt::is_not_found(&error) => Ok(Action::Done),
            Err(error) => Err(error),
        }
    }
}

/// The `node-ipam-controller`.
pub fn start(context: &Context) -> Worker {
    // Checked before anything starts.
    let parts = parts(&context.config).unwrap_or_default();
    if !context.config.allocate_node_cidrs || parts.is_empty() {
        return Box::pin(std::future::ready(()));
    }
    let queue = Queue::new("noderangeallocator");
    let nodes = context.nodes();
    let allocator = Arc::new(Allocator {
        client: context.client.clone(),
        recorder: context.recorder("cidrAllocator"),
        nodes: nodes.clone(),
        state: Mutex::new(State { parts, pending: HashMap::new() }),
    });
    {
        let (queue, allocator) = (queue.clone(), allocator.clone());
        nodes.on_change(move |change| {
            allocator.state.lock().observe(change);
            if change.new.as_deref().is_some_and(|node| cidrs(node).is_empty()) {
                queue.add(Key::of(&**change.object()));
            }
        });
    }
    // The first work begins after the initial list, when all that is taken is known.
    context.worker(queue, 1, allocator, Allocator::sync)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cidr(text: &str) -> Cidr {
        Cidr::parse(text).expect(text)
    }

    #[test]
    fn ranges() {
        for (text, shown) in [("10.244.0.0/16", "10.244.0.0/16"), ("10.244.3.7/24", "10.244.3.0/24"), ("fd00::1/64", "fd00::/64"), ("0.0.0.0/0", "0.0.0.0/0")] {
            assert_eq!(cidr(text).to_string(), shown);
        }
        for bad in ["10.0.0.0", "10.0.0.0/33", "x/8", "10.0.0.0/x"] {
            assert!(Cidr::parse(bad).is_err(), "{bad}");
        }
        assert!(cidr("10.0.0.0/8").overlaps(cidr("10.9.0.0/16")) && !cidr("10.0.0.0/16").overlaps(cidr("10.1.0.0/16")));
    }

    #[test]
    fn parts_are_handed_out_once_and_in_turn() {
        let mut parts = Parts::new(cidr("10.244.0.0/22"), 24).expect("parts");
        parts.mark(cidr("10.244.1.0/24"), true);
        let taken: Vec<String> = std::iter::from_fn(|| parts.take()).map(|c| c.to_string()).collect();
        assert_eq!(taken, ["10.244.0.0/24", "10.244.2.0/24", "10.244.3.0/24"]);
        parts.mark(cidr("10.244.2.0/24"), false);
        assert_eq!(parts.take().map(|c| c.to_string()).as_deref(), Some("10.244.2.0/24"));
        // a service range inside takes all it touches; one outside nothing
        let mut parts = Parts::new(cidr("10.244.0.0/23"), 24).expect("parts");
        parts.mark(cidr("10.244.0.128/25"), true);
        parts.mark(cidr("10.96.0.0/12"), true);
        assert_eq!(parts.take().map(|c| c.to_string()).as_deref(), Some("10.244.1.0/24"));
        assert!(Parts::new(cidr("10.0.0.0/24"), 16).is_err() && Parts::new(cidr("10.0.0.0/8"), 30).is_err());
    }

    #[test]
    fn offers_stay_until_the_node_shows_a_range() {
        let mut state = State { parts: vec![Parts::new(cidr("10.244.0.0/23"), 24).expect("parts")], pending: HashMap::new() };
        let node = |range: Option<&str>| {
            let mut node = Node::default();
            node.metadata.name = Some("a".into());
            node.spec.get_or_insert_default().pod_cidr = range.map(str::to_owned);
            Some(Arc::new(node))
        };
        assert_eq!(state.offer("a"), state.offer("a"));
        // another controller gave it the second part
        state.observe(&Change { old: node(None), new: node(Some("10.244.1.0/24")) });
        assert_eq!(state.offer("b").map(|all| all[0].to_string()).as_deref(), Some("10.244.0.0/24"));
        assert_eq!(state.offer("c"), None);
        state.observe(&Change { old: node(Some("10.244.1.0/24")), new: None });
        assert!(state.offer("c").is_some());
    }
}
