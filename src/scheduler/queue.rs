//! Pods that wait: *active* ones are next, in order of priority; ones in *backoff* failed a moment ago; *unschedulable*
//! ones wait for an event that may help. Follows upstream's `backend/queue`.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::event::Events;
use crate::pod::Pod;

/// After this long a pod is tried again though nothing happened that seems to help: the net under wrong hints.
const UNSCHEDULABLE_LIMIT: Duration = Duration::from_secs(300);

/// A waiting pod.
#[derive(Clone, Debug)]
pub struct Waiting {
    pub pod: Arc<Pod>,
    /// Decisions made about it so far.
    pub attempts: u32,
    /// When it came to the queue first.
    pub since: Instant,
    /// What put it back to the active ones, for the record.
    pub released_by: &'static str,
}

#[derive(Debug)]
enum Place {
    Active { seq: u64 },
    Backoff { until: Instant },
    Unschedulable { events: Events, since: Instant },
    /// A decision about it is being made or carried out; what happened meanwhile.
    InFlight { missed: Events },
    /// Coming or going.
    Nowhere,
}

#[derive(Debug)]
struct Slot {
    waiting: Waiting,
    place: Place,
}

/// An entry of the active heap; outdated if its slot says another `seq`.
#[derive(Debug, PartialEq, Eq)]
struct Next {
    priority: i32,
    seq: u64,
    uid: String,
}

impl Ord for Next {
    fn cmp(&self, other: &Self) -> Ordering {
        // Highest priority first, then first come first served.
        self.priority.cmp(&other.priority).then(other.seq.cmp(&self.seq))
    }
}

impl PartialOrd for Next {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// How many pods wait where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    pub active: usize,
    pub backoff: usize,
    pub unschedulable: usize,
}

/// The queue: a plain value, driven with the time as an argument. No operation looks at all pods, but for an event, which
/// looks at those that wait for one.
#[derive(Debug)]
pub struct Queue {
    slots: HashMap<String, Slot>,
    heap: BinaryHeap<Next>,
    /// Deadlines of pods in back-off and of unschedulable ones; outdated if the slot says another time.
    timers: BinaryHeap<Reverse<(Instant, String)>>,
    unschedulable: HashSet<String>,
    in_flight: HashSet<String>,
    active: usize,
    backing_off: usize,
    seq: u64,
    backoff: (Duration, Duration),
}

impl Queue {
    /// `backoff` is the first and the longest wait after a failed decision.
    pub fn new(backoff: (Duration, Duration)) -> Self {
        Self {
            slots: HashMap::new(),
            heap: BinaryHeap::new(),
            timers: BinaryHeap::new(),
            unschedulable: HashSet::new(),
            in_flight: HashSet::new(),
            active: 0,
            backing_off: 0,
            seq: 0,
            backoff,
        }
    }

    /// Takes in a new or changed unbound pod. A change lets an unschedulable pod be tried again.
    pub fn set(&mut self, pod: Arc<Pod>, changed: bool, now: Instant) {
        let uid = pod.uid.clone();
        match self.slots.get_mut(&uid) {
            None => {
                let waiting = Waiting { pod, attempts: 0, since: now, released_by: "PodAdd" };
                self.slots.insert(uid.clone(), Slot { waiting, place: Place::Nowhere });
                self.activate(&uid, "PodAdd");
            }
            Some(slot) => {
                slot.waiting.pod = pod;
                if changed {
                    self.happened_to(&uid, Events::POD_UPDATE, now);
                }
            }
        }
    }

    /// Forgets a pod: it is bound, gone, or somebody else's.
    pub fn remove(&mut self, uid: &str) {
        self.put(uid, Place::Nowhere);
        self.slots.remove(uid);
    }

    /// The next pod to decide about; it stays in flight until [`Self::remove`], [`Self::failed`] or [`Self::rejected`].
    pub fn pop(&mut self, now: Instant) -> Option<Waiting> {
        self.release_due(now);
        while let Some(next) = self.heap.pop() {
            let valid = self.slots.get(&next.uid).is_some_and(|slot| matches!(slot.place, Place::Active { seq } if seq == next.seq));
            if valid {
                self.put(&next.uid, Place::InFlight { missed: Events::NONE });
                let slot = self.slots.get_mut(&next.uid)?;
                slot.waiting.attempts += 1;
                return Some(slot.waiting.clone());
            }
        }
        None
    }

    /// When [`Self::pop`] has to be called again though nothing happens.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.timers.peek().map(|Reverse((at, _))| *at)
    }

    /// Carrying out the decision failed: try again after the back-off.
    pub fn failed(&mut self, uid: &str, now: Instant) {
        if let Some(slot) = self.slots.get(uid) {
            let until = now + backoff(self.backoff, slot.waiting.attempts);
            self.put(uid, Place::Backoff { until });
        }
    }

    /// No node fits: wait for one of `events`. If one came while the decision was made, only the back-off is waited for.
    pub fn rejected(&mut self, uid: &str, events: Events, now: Instant) {
        match self.slots.get(uid).map(|slot| &slot.place) {
            Some(Place::InFlight { missed }) if missed.intersects(events) => self.failed(uid, now),
            Some(_) => self.put(uid, Place::Unschedulable { events, since: now }),
            None => {}
        }
    }

    /// Something happened in the cluster: pods that it may help are tried again.
    pub fn happened(&mut self, event: Events, now: Instant) {
        for uid in &self.in_flight {
            if let Some(Slot { place: Place::InFlight { missed }, .. }) = self.slots.get_mut(uid) {
                *missed |= event;
            }
        }
        let helped = |uid: &&String| matches!(self.slots.get(*uid), Some(Slot { place: Place::Unschedulable { events, .. }, .. }) if events.intersects(event));
        let released: Vec<String> = self.unschedulable.iter().filter(helped).cloned().collect();
        for uid in released {
            self.happened_to(&uid, event, now);
        }
    }

    fn happened_to(&mut self, uid: &str, event: Events, now: Instant) {
        let Some(slot) = self.slots.get_mut(uid) else { return };
        match &mut slot.place {
            Place::Unschedulable { since, .. } => {
                let until = *since + backoff(self.backoff, slot.waiting.attempts);
                slot.waiting.released_by = event.label();
                if until > now {
                    self.put(uid, Place::Backoff { until });
                } else {
                    self.activate(uid, event.label());
                }
            }
            Place::InFlight { missed } => *missed |= event,
            Place::Active { .. } | Place::Backoff { .. } | Place::Nowhere => {}
        }
    }

    fn release_due(&mut self, now: Instant) {
        while self.timers.peek().is_some_and(|Reverse((at, _))| *at <= now) {
            let Some(Reverse((at, uid))) = self.timers.pop() else { return };
            match self.slots.get(&uid).map(|slot| (&slot.place, slot.waiting.released_by)) {
                Some((Place::Backoff { until }, by)) if *until == at => self.activate(&uid, by),
                Some((Place::Unschedulable { since, .. }, _)) if *since + UNSCHEDULABLE_LIMIT == at => self.activate(&uid, "UnschedulableTimeout"),
                _ => {}
            }
        }
    }

    fn activate(&mut self, uid: &str, by: &'static str) {
        self.seq += 1;
        let seq = self.seq;
        self.put(uid, Place::Active { seq });
        if let Some(slot) = self.slots.get_mut(uid) {
            slot.waiting.released_by = by;
            self.heap.push(Next { priority: slot.waiting.pod.priority, seq, uid: uid.to_owned() });
        }
    }

    /// Moves a pod, and keeps what is counted of places in step.
    fn put(&mut self, uid: &str, place: Place) {
        let Some(slot) = self.slots.get_mut(uid) else { return };
        match slot.place {
            Place::Active { .. } => self.active -= 1,
            Place::Backoff { .. } => self.backing_off -= 1,
            Place::Unschedulable { .. } => _ = self.unschedulable.remove(uid),
            Place::InFlight { .. } => _ = self.in_flight.remove(uid),
            Place::Nowhere => {}
        }
        match place {
            Place::Active { .. } => self.active += 1,
            Place::Backoff { until } => {
                self.backing_off += 1;
                self.timers.push(Reverse((until, uid.to_owned())));
            }
            Place::Unschedulable { since, .. } => {
                self.unschedulable.insert(uid.to_owned());
                self.timers.push(Reverse((since + UNSCHEDULABLE_LIMIT, uid.to_owned())));
            }
            Place::InFlight { .. } => _ = self.in_flight.insert(uid.to_owned()),
            Place::Nowhere => {}
        }
        slot.place = place;
    }

    pub fn depth(&self) -> Depth {
        Depth { active: self.active, backoff: self.backing_off, unschedulable: self.unschedulable.len() }
    }
}

fn backoff((first, longest): (Duration, Duration), attempts: u32) -> Duration {
    first.saturating_mul(1u32.checked_shl(attempts.saturating_sub(1)).unwrap_or(u32::MAX)).min(longest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::PodView;

    fn pod(name: &str, priority: i32) -> Arc<Pod> {
        let view: PodView = serde_json::from_value(serde_json::json!({ "metadata": { "name": name, "namespace": "n", "uid": name }, "spec": { "priority": priority } })).unwrap();
        Arc::new(Pod::compile(Arc::new(view)))
    }

    fn queue() -> Queue {
        Queue::new((Duration::from_secs(1), Duration::from_secs(10)))
    }

    fn order(queue: &mut Queue, now: Instant) -> Vec<String> {
        std::iter::from_fn(|| queue.pop(now)).map(|waiting| waiting.pod.key.name.clone()).collect()
    }

    #[test]
    fn by_priority_then_by_arrival() {
        let (mut queue, now) = (queue(), Instant::now());
        for (name, priority) in [("a", 0), ("b", 5), ("c", 0), ("d", 5)] {
            queue.set(pod(name, priority), false, now);
        }
        queue.remove("d");
        assert_eq!(queue.depth(), Depth { active: 3, backoff: 0, unschedulable: 0 });
        assert_eq!(order(&mut queue, now), ["b", "a", "c"]);
    }

    #[test]
    fn unschedulable_pods_wait_for_what_may_help() {
        let (mut queue, now) = (queue(), Instant::now());
        let later = |seconds| now + Duration::from_secs(seconds);
        queue.set(pod("a", 0), false, now);
        queue.pop(now);
        queue.rejected("a", Events::NODE_ADD | Events::POD_GONE, now);
        queue.happened(Events::VOLUME, later(2));
        assert!(queue.pop(later(2)).is_none(), "a volume does not help");
        queue.happened(Events::POD_GONE, later(2));
        let waiting = queue.pop(later(2)).unwrap();
        assert_eq!((waiting.released_by, waiting.attempts), ("AssignedPodDelete", 2));

        // What happens during the decision counts, after the back-off of the second attempt.
        queue.happened(Events::NODE_ADD, later(2));
        queue.rejected("a", Events::NODE_ADD, later(2));
        assert!(queue.pop(later(3)).is_none());
        assert_eq!(queue.next_deadline(), Some(later(4)));
        assert!(queue.pop(later(4)).is_some());

        // Without any event it is tried again in the end.
        queue.rejected("a", Events::NODE_ADD, later(4));
        assert!(queue.pop(later(300)).is_none());
        assert_eq!(queue.pop(later(304)).unwrap().released_by, "UnschedulableTimeout");
    }

    #[test]
    fn back_off_doubles_to_its_limit() {
        let limits = (Duration::from_secs(1), Duration::from_secs(10));
        for (attempts, seconds) in [(1, 1), (2, 2), (3, 4), (4, 8), (5, 10), (60, 10)] {
            assert_eq!(backoff(limits, attempts).as_secs(), seconds, "{attempts} attempts");
        }
    }
}
