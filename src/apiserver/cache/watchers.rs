//! Who watches a resource, indexed so that a change costs its receivers and not every watcher.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::sync::mpsc;

use super::event::{CacheEvent, Delivery};
use super::filter::{Filter, IndexKey};
use super::scan::Paths;

/// Deliveries that may wait for one watcher; the next one ends its watch.
pub const QUEUE: usize = 4096;

/// All watchers of one resource.
#[derive(Default)]
pub struct Watchers {
    by_key: HashMap<IndexKey, Vec<Watcher>>,
    all: Vec<Watcher>,
    /// How many watchers are indexed by each field, so that a change looks up only those.
    fields: Vec<(usize, usize)>,
    count: Arc<AtomicUsize>,
}

struct Watcher {
    filter: Filter,
    queue: mpsc::Sender<Delivery>,
    cut: Arc<AtomicBool>,
    count: Arc<AtomicUsize>,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A watcher's end of its queue. Dropping it ends the watch.
pub struct Subscription {
    /// What happened between the asked revision and the start of the watch.
    pub backlog: Vec<Delivery>,
    pub queue: mpsc::Receiver<Delivery>,
    cut: Arc<AtomicBool>,
}

impl Subscription {
    /// The queue ran full: this watcher was too slow and must start over.
    pub fn was_cut(&self) -> bool {
        self.cut.load(Ordering::Acquire)
    }
}

impl Watchers {
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn subscribe(&mut self, filter: Filter, backlog: Vec<Delivery>, closed: bool) -> Subscription {
        let (queue, receiver) = mpsc::channel(QUEUE);
        let cut = Arc::new(AtomicBool::new(false));
        if !closed {
            self.count.fetch_add(1, Ordering::Relaxed);
            let key = filter.index_key();
            let watcher = Watcher { filter, queue, cut: cut.clone(), count: self.count.clone() };
            match key {
                Some(key) => {
                    if let IndexKey::Field(index, _) = key {
                        match self.fields.iter_mut().find(|(i, _)| *i == index) {
                            Some((_, n)) => *n += 1,
                            None => self.fields.push((index, 1)),
                        }
                    }
                    let list = self.by_key.entry(key).or_default();
                    list.retain(|w| !w.queue.is_closed());
                    list.push(watcher);
                }
                None => {
                    self.all.retain(|w| !w.queue.is_closed());
                    self.all.push(watcher);
                }
            }
            // Watchers that left without an event to notice it by would pile up in the index.
            if self.by_key.len() > 64 && self.by_key.len() > 4 * self.len() {
                self.by_key.retain(|_, list| {
                    list.retain(|w| !w.queue.is_closed());
                    !list.is_empty()
                });
            }
        }
        Subscription { backlog, queue: receiver, cut }
    }

    /// Tells everyone whom the change concerns.
    pub(crate) fn dispatch(&mut self, event: &Arc<CacheEvent>, _paths: &Paths) {
        if self.is_empty() {
            return;
        }
        send(&mut self.all, event);
        if self.by_key.is_empty() {
            return;
        }
        let object = &event.object;
        let mut tell = |key: IndexKey| {
            if let Some(list) = self.by_key.get_mut(&key) {
                send(list, event);
                if list.is_empty() {
                    self.by_key.remove(&key);
                }
            }
        };
        tell(IndexKey::Name(object.key().clone()));
        if !object.namespace().is_empty() {
            tell(IndexKey::Namespace(object.namespace().into()));
        }
        for (index, _) in &self.fields {
            let now = object.field(*index);
            if let Some(before) = event.previous.as_ref().map(|p| p.field(*index)).filter(|b| *b != now) {
                tell(IndexKey::Field(*index, before.as_ref().into()));
            }
            tell(IndexKey::Field(*index, now.as_ref().into()));
        }
    }
}

/// Offers the change to each watcher, dropping those that left or cannot keep up.
fn send(list: &mut Vec<Watcher>, event: &Arc<CacheEvent>) {
    list.retain(|watcher| {
        let Some(delivery) = watcher.filter.delivery(event) else { return true };
        match watcher.queue.try_send(delivery) {
            Ok(()) => true,
            Err(mpsc::error::TrySendError::Full(_)) => {
                watcher.cut.store(true, Ordering::Release);
                crate::metrics::terminated_watcher();
                false
            }
            Err(mpsc::error::TrySendError::Closed(_)) => false,
        }
    });
}
