//! Keyed work queues: an item waits at most once, is worked on by one worker at a time, and failures back off.
//!
//! The semantics are client-go's `workqueue`: an item added while it is being worked on is worked on again afterwards.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};
use std::fmt::Display;
use std::future::Future;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus::{Histogram, IntCounter, IntGauge};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use windlass_daemon::metrics;

/// First and longest wait after failures; each failure of an item doubles its wait.
const BACKOFF_BASE: Duration = Duration::from_millis(5);
const BACKOFF_CAP: Duration = Duration::from_secs(1000);

/// What a worker wants done with its item after success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    Done,
    /// Come back to this item at a deadline, whatever else happens.
    RequeueAfter(Duration),
}

/// A work queue. Cheap to clone; all clones are the same queue.
///
/// It holds an item at most once, so it is bounded by the number of distinct keys.
pub struct Queue<T> {
    inner: Arc<Inner<T>>,
}

impl<T> Clone for Queue<T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

struct Inner<T> {
    name: &'static str,
    state: Mutex<State<T>>,
    changed: Notify,
    metrics: Metrics,
}

struct State<T> {
    ready: VecDeque<(T, Instant)>,
    /// Items that wait for a worker or, if also in `working`, must be worked on again.
    dirty: HashSet<T>,
    working: HashSet<T>,
    delayed: BinaryHeap<Reverse<Delayed<T>>>,
    /// The earliest deadline of each delayed item; heap entries that disagree are outdated.
    deadlines: HashMap<T, Instant>,
    failures: HashMap<T, u32>,
}

struct Delayed<T> {
    due: Instant,
    item: T,
}

impl<T> PartialEq for Delayed<T> {
    fn eq(&self, other: &Self) -> bool {
        self.due == other.due
    }
}
impl<T> Eq for Delayed<T> {}
impl<T> PartialOrd for Delayed<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<T> Ord for Delayed<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.due.cmp(&other.due)
    }
}

struct Metrics {
    depth: IntGauge,
    adds: IntCounter,
    retries: IntCounter,
    queued: Histogram,
    worked: Histogram,
}

impl Metrics {
    fn new(name: &str) -> Self {
        let buckets = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0];
        let histogram = |metric, help| metrics::histogram_vec(metric, help, &["name"], &buckets).with_label_values(&[name]);
        let counter = |metric, help| metrics::counter_vec(metric, help, &["name"]).with_label_values(&[name]);
        Self {
            depth: metrics::gauge_vec("workqueue_depth", "Current depth of workqueue", &["name"]).with_label_values(&[name]),
            adds: counter("workqueue_adds_total", "Total number of adds handled by workqueue"),
            retries: counter("workqueue_retries_total", "Total number of retries handled by workqueue"),
            queued: histogram("workqueue_queue_duration_seconds", "How long in seconds an item stays in workqueue before being requested"),
            worked: histogram("workqueue_work_duration_seconds", "How long in seconds processing an item from workqueue takes"),
        }
    }
}

impl<T: Clone + Eq + Hash> Queue<T> {
    /// `name` labels the queue's `workqueue_*` metrics.
    pub fn new(name: &'static str) -> Self {
        let state = State {
            ready: VecDeque::new(),
            dirty: HashSet::new(),
            working: HashSet::new(),
            delayed: BinaryHeap::new(),
            deadlines: HashMap::new(),
            failures: HashMap::new(),
        };
        Self { inner: Arc::new(Inner { name, state: Mutex::new(state), changed: Notify::new(), metrics: Metrics::new(name) }) }
    }

    pub fn add(&self, item: T) {
        self.inner.state.lock().add(item, &self.inner.metrics);
        self.inner.changed.notify_one();
    }

    /// Adds the item after `delay`; of several delays for one item the earliest counts.
    pub fn add_after(&self, item: T, delay: Duration) {
        if delay.is_zero() {
            return self.add(item);
        }
        let due = Instant::now() + delay;
        let mut state = self.inner.state.lock();
        if state.deadlines.get(&item).is_some_and(|earlier| *earlier <= due) {
            return;
        }
        state.deadlines.insert(item.clone(), due);
        state.delayed.push(Reverse(Delayed { due, item }));
        drop(state);
        self.inner.changed.notify_one();
    }

    /// Adds the item after its back-off: 5 ms, doubled at each call until [`Self::forget`], at most 1000 s.
    pub fn add_rate_limited(&self, item: T) {
        let delay = {
            let mut state = self.inner.state.lock();
            let failures = state.failures.entry(item.clone()).or_default();
            *failures = failures.saturating_add(1);
            backoff(*failures)
        };
        self.inner.metrics.retries.inc();
        self.add_after(item, delay);
    }

    /// Ends the item's back-off.
    pub fn forget(&self, item: &T) {
        self.inner.state.lock().failures.remove(item);
    }

    /// Items that wait for a worker now.
    pub fn len(&self) -> usize {
        self.inner.state.lock().ready.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    async fn next(&self) -> T {
        loop {
            let changed = self.inner.changed.notified();
            let due = {
                let mut state = self.inner.state.lock();
                state.release_due(Instant::now(), &self.inner.metrics);
                if let Some(item) = state.take(&self.inner.metrics) {
                    return item;
                }
                state.delayed.peek().map(|Reverse(first)| first.due)
            };
            match due {
                Some(due) => tokio::select! { () = changed => {}, () = tokio::time::sleep_until(due) => {} },
                None => changed.await,
            }
        }
    }

    fn done(&self, item: &T) {
        let mut state = self.inner.state.lock();
        state.working.remove(item);
        if state.dirty.contains(item) {
            state.ready.push_back((item.clone(), Instant::now()));
            self.inner.metrics.depth.set(state.ready.len() as i64);
            drop(state);
            self.inner.changed.notify_one();
        }
    }
}

fn backoff(failures: u32) -> Duration {
    BACKOFF_BASE.saturating_mul(1u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX)).min(BACKOFF_CAP)
}

impl<T: Clone + Eq + Hash> State<T> {
    fn add(&mut self, item: T, metrics: &Metrics) {
        if !self.dirty.insert(item.clone()) {
            return;
        }
        metrics.adds.inc();
        if !self.working.contains(&item) {
            self.ready.push_back((item, Instant::now()));
            metrics.depth.set(self.ready.len() as i64);
        }
    }

    fn release_due(&mut self, now: Instant, metrics: &Metrics) {
        while let Some(Reverse(first)) = self.delayed.peek()
            && first.due <= now
        {
            let Some(Reverse(Delayed { due, item })) = self.delayed.pop() else { return };
            if self.deadlines.get(&item) == Some(&due) {
                self.deadlines.remove(&item);
                self.add(item, metrics);
            }
        }
    }

    fn take(&mut self, metrics: &Metrics) -> Option<T> {
        let (item, since) = self.ready.pop_front()?;
        metrics.depth.set(self.ready.len() as i64);
        metrics.queued.observe(since.elapsed().as_secs_f64());
        self.dirty.remove(&item);
        self.working.insert(item.clone());
        Some(item)
    }
}

/// Works off the queue with up to `workers` items at a time until `shutdown`, then waits for those that run.
///
/// An error is logged and its item tried again with back-off.
pub async fn run<T, F, Fut, E>(queue: Queue<T>, workers: usize, shutdown: CancellationToken, work: F)
where
    T: Clone + Eq + Hash + Display + Send + 'static,
    F: Fn(T) -> Fut,
    Fut: Future<Output = Result<Action, E>> + Send + 'static,
    E: Display + Send + 'static,
{
    let mut running: JoinSet<()> = JoinSet::new();
    loop {
        while running.len() >= workers.max(1) {
            running.join_next().await;
        }
        let item = tokio::select! {
            item = queue.next() => item,
            Some(_) = running.join_next() => continue,
            () = shutdown.cancelled() => break,
        };
        let (queue, future) = (queue.clone(), work(item.clone()));
        running.spawn(async move {
            // A panic in `future` must neither lose the item nor leave it marked as being worked on for ever.
            let finished = Finished { queue: queue.clone(), item: item.clone() };
            let started = Instant::now();
            let result = future.await;
            queue.inner.metrics.worked.observe(started.elapsed().as_secs_f64());
            drop(finished);
            match result {
                Ok(Action::Done) => queue.forget(&item),
                Ok(Action::RequeueAfter(delay)) => {
                    queue.forget(&item);
                    queue.add_after(item, delay);
                }
                Err(error) => {
                    tracing::warn!(queue = queue.inner.name, item = %item, %error, "will try again");
                    queue.add_rate_limited(item);
                }
            }
        });
    }
    while running.join_next().await.is_some() {}
}

struct Finished<T: Clone + Eq + Hash> {
    queue: Queue<T>,
    item: T,
}

impl<T: Clone + Eq + Hash> Drop for Finished<T> {
    fn drop(&mut self) {
        self.queue.done(&self.item);
        if std::thread::panicking() {
            self.queue.add_rate_limited(self.item.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_to_its_cap() {
        for (failures, expected) in [(1, 5), (2, 10), (8, 640), (18, 655_360), (19, 1_000_000), (40, 1_000_000)] {
            assert_eq!(backoff(failures), Duration::from_millis(expected), "{failures} failures");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_item_waits_once_and_the_earliest_delay_counts() {
        let queue = Queue::new("test-once");
        queue.add("a");
        queue.add("a");
        queue.add_after("b", Duration::from_secs(9));
        queue.add_after("b", Duration::from_secs(3));
        queue.add_after("b", Duration::from_secs(6));
        let start = Instant::now();
        assert_eq!(queue.next().await, "a");
        assert_eq!(queue.next().await, "b");
        assert_eq!(start.elapsed().as_secs(), 3);
        assert!(queue.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn an_item_added_during_work_is_worked_on_again_afterwards() {
        let queue = Queue::new("test-again");
        queue.add("a");
        let item = queue.next().await;
        queue.add("a");
        assert!(queue.is_empty(), "one worker at a time");
        queue.done(&item);
        assert_eq!(queue.next().await, "a");
    }

    #[tokio::test(start_paused = true)]
    async fn failures_and_panics_do_not_lose_an_item() {
        let queue = Queue::new("test-retry");
        let shutdown = CancellationToken::new();
        queue.add("a");
        let attempts = Arc::new(Mutex::new(0));
        let work = {
            let (attempts, shutdown) = (attempts.clone(), shutdown.clone());
            move |_: &'static str| {
                let (attempts, shutdown) = (attempts.clone(), shutdown.clone());
                async move {
                    let attempt = {
                        let mut attempts = attempts.lock();
                        *attempts += 1;
                        *attempts
                    };
                    match attempt {
                        1 => Err("first"),
                        2 => panic!("second"),
                        3 => Ok(Action::RequeueAfter(Duration::from_secs(1))),
                        _ => {
                            shutdown.cancel();
                            Ok(Action::Done)
                        }
                    }
                }
            }
        };
        run(queue, 2, shutdown, work).await;
        assert_eq!(*attempts.lock(), 4);
    }
}
