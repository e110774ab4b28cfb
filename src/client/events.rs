//! Records Kubernetes Events: bounded, aggregated, never blocking the caller.
//!
//! As client-go's correlator: a repeated event raises the count of the first one, and each source may tell of one
//! object 25 times at once and then once every five minutes.

use std::collections::HashMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource};
use prometheus::IntCounter;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use windlass_daemon::metrics;

/// Events that wait to be sent; more are dropped and counted.
const QUEUE: usize = 1000;
/// Events, and objects, that are remembered for counting and for limiting.
const REMEMBERED: usize = 4096;
const BURST: f64 = 25.0;
const REFILL_PER_SECOND: f64 = 1.0 / 300.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventType {
    Normal,
    Warning,
}

impl EventType {
    fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::Warning => "Warning",
        }
    }
}

/// The reference under which events about `object` are filed.
pub fn reference<K: Resource<DynamicType = ()>>(object: &K) -> ObjectReference {
    ObjectReference { resource_version: object.meta().resource_version.clone(), ..object.object_ref(&()) }
}

/// Records events of one component. Cheap to clone.
#[derive(Clone)]
pub struct Recorder {
    queue: mpsc::Sender<Told>,
    dropped: IntCounter,
}

struct Told {
    about: ObjectReference,
    event_type: EventType,
    reason: String,
    message: String,
    at: Timestamp,
}

impl Recorder {
    /// `component` is the event source's name, e.g. `kubelet`; `host` its node. What is queued at `shutdown` is still
    /// sent, for at most two seconds.
    pub fn new(client: Client, component: &str, host: Option<String>, shutdown: CancellationToken) -> Self {
        let (queue, events) = mpsc::channel(QUEUE);
        let dropped = metrics::counter_vec("windlass_events_dropped_total", "Events that were not recorded because too many waited or one object had too many", &["component"])
            .with_label_values(&[component]);
        let sender = Sender { client, component: component.to_owned(), host, counts: HashMap::new(), budgets: HashMap::new(), dropped: dropped.clone() };
        tokio::spawn(sender.run(events, shutdown));
        Self { queue, dropped }
    }

    /// Tells of `about`. `reason` is CamelCase for machines, `message` is for people (cut at 1024 bytes, the API's limit).
    pub fn event(&self, about: &ObjectReference, event_type: EventType, reason: &str, message: String) {
        let told = Told { about: about.clone(), event_type, reason: reason.to_owned(), message: cut(message), at: Timestamp::now() };
        if self.queue.try_send(told).is_err() {
            self.dropped.inc();
        }
    }
}

fn cut(mut message: String) -> String {
    const LIMIT: usize = 1024;
    if message.len() > LIMIT {
        message.truncate(message.floor_char_boundary(LIMIT - 3));
        message.push_str("...");
    }
    message
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Same {
    about: (String, String, String, String),
    field_path: String,
    event_type: EventType,
    reason: String,
    message: String,
}

struct Known {
    namespace: String,
    name: String,
    count: i32,
    used: Instant,
}

struct Budget {
    tokens: f64,
    at: Instant,
}

struct Sender {
    client: Client,
    component: String,
    host: Option<String>,
    counts: HashMap<Same, Known>,
    budgets: HashMap<(String, String, String, String), Budget>,
    dropped: IntCounter,
}

impl Sender {
    async fn run(mut self, mut events: mpsc::Receiver<Told>, shutdown: CancellationToken) {
        loop {
            let told = tokio::select! {
                told = events.recv() => told,
                () = shutdown.cancelled() => break,
            };
            match told {
                Some(told) => self.send(told).await,
                None => return,
            }
        }
        events.close();
        let rest = async {
            while let Some(told) = events.recv().await {
                self.send(told).await;
            }
        };
        let _ = tokio::time::timeout(Duration::from_secs(2), rest).await;
    }

    async fn send(&mut self, told: Told) {
        let about = identity(&told.about);
        if !self.spend(about.clone()) {
            self.dropped.inc();
            return;
        }
        let same = Same {
            about,
            field_path: told.about.field_path.clone().unwrap_or_default(),
            event_type: told.event_type,
            reason: told.reason.clone(),
            message: told.message.clone(),
        };
        if self.raise(&same, told.at).await {
            return;
        }
        let event = self.new_event(&told);
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let name = event.metadata.name.clone().unwrap_or_default();
        match Api::<Event>::namespaced(self.client.clone(), &namespace).create(&PostParams::default(), &event).await {
            Ok(_) => {
                make_room(&mut self.counts, |known| known.used);
                self.counts.insert(same, Known { namespace, name, count: 1, used: Instant::now() });
            }
            // Expected where the object's namespace is going away.
            Err(error) => tracing::debug!(reason = told.reason, %error, "event not recorded"),
        }
    }

    /// Counts up the event that says the same, if we know one that still exists.
    async fn raise(&mut self, same: &Same, at: Timestamp) -> bool {
        let Some(known) = self.counts.get_mut(same) else { return false };
        known.count = known.count.saturating_add(1);
        known.used = Instant::now();
        let patch = serde_json::json!({ "count": known.count, "lastTimestamp": Time(at) });
        let events: Api<Event> = Api::namespaced(self.client.clone(), &known.namespace);
        match events.patch(&known.name, &PatchParams::default(), &Patch::Merge(&patch)).await {
            Ok(_) => true,
            Err(_) => {
                self.counts.remove(same);
                false
            }
        }
    }

    fn spend(&mut self, about: (String, String, String, String)) -> bool {
        let now = Instant::now();
        if !self.budgets.contains_key(&about) {
            make_room(&mut self.budgets, |budget| budget.at);
        }
        let budget = self.budgets.entry(about).or_insert(Budget { tokens: BURST, at: now });
        budget.tokens = (budget.tokens + (now - budget.at).as_secs_f64() * REFILL_PER_SECOND).min(BURST);
        budget.at = now;
        let enough = budget.tokens >= 1.0;
        if enough {
            budget.tokens -= 1.0;
        }
        enough
    }

    fn new_event(&self, told: &Told) -> Event {
        let namespace = told.about.namespace.clone().filter(|n| !n.is_empty()).unwrap_or_else(|| "default".to_owned());
        let name = format!("{}.{:x}", told.about.name.as_deref().unwrap_or("unknown"), told.at.as_nanosecond());
        Event {
            metadata: ObjectMeta { name: Some(name), namespace: Some(namespace), ..ObjectMeta::default() },
            involved_object: told.about.clone(),
            type_: Some(told.event_type.as_str().to_owned()),
            reason: Some(told.reason.clone()),
            message: Some(told.message.clone()),
            source: Some(EventSource { component: Some(self.component.clone()), host: self.host.clone() }),
            reporting_component: Some(self.component.clone()),
            reporting_instance: Some(self.host.clone().unwrap_or_default()),
            first_timestamp: Some(Time(told.at)),
            last_timestamp: Some(Time(told.at)),
            count: Some(1),
            ..Event::default()
        }
    }
}

fn identity(about: &ObjectReference) -> (String, String, String, String) {
    let text = |field: &Option<String>| field.clone().unwrap_or_default();
    (text(&about.kind), text(&about.namespace), text(&about.name), text(&about.uid))
}

/// Forgets the longest unused entries when the map is full: a tenth at once, so that the search is rare.
fn make_room<K: Clone + Eq + std::hash::Hash, V>(map: &mut HashMap<K, V>, used: impl Fn(&V) -> Instant) {
    if map.len() < REMEMBERED {
        return;
    }
    let mut ages: Vec<Instant> = map.values().map(&used).collect();
    let (_, limit, _) = ages.select_nth_unstable(REMEMBERED / 10);
    let limit = *limit;
    map.retain(|_, value| used(value) > limit);
}
