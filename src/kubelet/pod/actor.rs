//! The actor of one pod: it hears of changes, plans, and starts what is to be done as tasks that tell it their outcome.
//!
//! It never waits for a slow thing itself, so that a deletion is heard at once. What it knows it can lose: a new actor
//! reads it back from the runtime, the network and the API.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use windlass_client::events::EventType;

use super::model::{self, Kind};
use super::plan::{self, Backoff, KillReason, Observed, Verdicts};
use super::probe::{self, ProbeKind, Report};
use super::start::{self, SandboxFailure};
use super::status::{self, Facts, Why};
use super::stop::{self, Ending, Order};
use crate::metrics;
use crate::runtime::{Container, State};
use crate::shared::{Shared, View};
use crate::volumes::Setup;

/// Messages that may wait for an actor; senders wait beyond it.
const MAILBOX: usize = 256;
/// After a failure that no event will tell the end of.
const RETRY: Duration = Duration::from_secs(10);
const CRASH_BACKOFF: SignedDuration = SignedDuration::from_secs(10);
const CRASH_BACKOFF_MAX: SignedDuration = SignedDuration::from_secs(300);

/// What an actor can be told.
#[derive(Debug)]
pub enum Msg {
    /// The pod as its source now has it.
    Pod(Arc<Pod>),
    /// Its source has it no more.
    Gone,
    /// The mirror pod of a static pod, as the API has it.
    Mirror(Option<Arc<Pod>>),
    /// Something happened to this container.
    Runtime(String),
    /// Events may have been missed: look at everything again.
    Relist,
    /// An object that the pod refers to has changed.
    Objects,
    /// The kubelet ends the pod.
    Fail { why: Why, grace: Option<i64>, disruption: Option<Why> },
    Probe(Report),
    // What the actor's own tasks report.
    Starting(String),
    Started { name: String, result: Result<(), Why> },
    BatchDone { retry: bool },
    Volumes(Result<Setup, String>),
    Sandbox(Result<(Vec<String>, Setup), SandboxFailure>),
    Killed { id: String, result: Result<(), String> },
    Resized { id: String, result: Result<(), String> },
    Ended(Result<(), String>),
    StatusWritten(super::report::Written),
    MirrorMade(Result<(), String>),
    CleanedUp(Result<(), String>),
}

/// How far a pod's life has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Running,
    /// Its containers are being stopped.
    Ending,
    /// Nothing runs; volumes, cgroup and containers may still be there.
    Ended,
    /// Everything is taken away; the API may still have to be told.
    Clean,
}

/// The handle by which others reach an actor.
#[derive(Clone)]
pub struct Handle {
    pub mailbox: mpsc::Sender<Msg>,
    pub view: watch::Receiver<View>,
}

pub(super) struct Actor {
    pub(super) shared: Arc<Shared>,
    pub(super) pod: Arc<Pod>,
    pub(super) mirror: Option<Arc<Pod>>,
    mailbox: mpsc::Sender<Msg>,
    view: watch::Sender<View>,
    life: Life,
    gone: bool,
    pub(super) rejected: bool,
    containers: HashMap<String, Container>,
    dirty: HashSet<String>,
    addresses: Vec<String>,
    pub(super) facts: Facts,
    /// The status as computed last.
    pub(super) status: PodStatus,
    /// The status as the API has it, as far as we know.
    pub(super) reported: PodStatus,
    pub(super) write: super::report::State,
    backoff: Backoff,
    not_before: HashMap<String, Instant>,
    wake: Option<Instant>,
    probes: HashMap<String, CancellationToken>,
    batch: Option<(JoinHandle<()>, HashSet<String>)>,
    sandbox: Option<JoinHandle<()>>,
    sandbox_retry: Option<Instant>,
    kills: HashMap<String, (String, watch::Sender<i64>)>,
    /// Containers whose resources are being changed.
    resizes: HashSet<String>,
    resize_retry: Option<Instant>,
    ending: Option<watch::Sender<i64>>,
    grace_override: Option<i64>,
    refresh: Option<Timestamp>,
    refreshing: bool,
    making_mirror: bool,
    cleaning: bool,
    first_running: bool,
    adopted: bool,
    /// The pod was over before this kubelet saw it: its status is final.
    frozen: bool,
    tidied: bool,
    /// The runtime has said which containers the pod has: nothing is decided before.
    listed: bool,
}

/// Starts the actor of a pod. `rejected` is why it may not run here.
pub fn spawn(shared: Arc<Shared>, pod: Arc<Pod>, rejected: Option<Why>, done: impl FnOnce() + Send + 'static) -> Handle {
    let (mailbox, inbox) = mpsc::channel(MAILBOX);
    let status = pod.status.clone().unwrap_or_default();
    let first = View { pod: pod.clone(), status: status.clone(), containers: Vec::new(), terminated: false, rejected: rejected.is_some() };
    let (view, seen) = watch::channel(first);
    let now = Timestamp::now();
    let frozen = model::is_terminal_phase(model::phase(&pod));
    let mut actor = Actor {
        facts: Facts { scheme: shared.runtime.scheme(), start_time: Timestamp::from_second(now.as_second()).ok(), ..Default::default() },
        reported: if model::is_static(&pod) { PodStatus::default() } else { status.clone() },
        status,
        pod,
        mirror: None,
        mailbox: mailbox.clone(),
        view,
        life: Life::Running,
        gone: false,
        rejected: rejected.is_some(),
        containers: HashMap::new(),
        dirty: HashSet::new(),
        addresses: Vec::new(),
        write: Default::default(),
        backoff: Backoff::new(CRASH_BACKOFF, CRASH_BACKOFF_MAX),
        not_before: HashMap::new(),
        wake: None,
        probes: HashMap::new(),
        batch: None,
        sandbox: None,
        sandbox_retry: None,
        kills: HashMap::new(),
        resizes: HashSet::new(),
        resize_retry: None,
        ending: None,
        grace_override: None,
        refresh: None,
        refreshing: false,
        making_mirror: false,
        cleaning: false,
        first_running: false,
        adopted: false,
        frozen,
        tidied: false,
        listed: false,
        shared,
    };
    if let Some(why) = rejected {
        actor.status = status::rejected(&actor.pod, &why, now);
        actor.life = Life::Ended;
    }
    tokio::spawn(async move {
        actor.run(inbox).await;
        done();
    });
    Handle { mailbox, view: seen }
}

impl Actor {
    pub(super) fn mailbox(&self) -> &mpsc::Sender<Msg> {
        &self.mailbox
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone
    }

    pub(super) fn is_making_mirror(&self) -> bool {
        self.making_mirror
    }

    pub(super) fn set_making_mirror(&mut self) {
        self.making_mirror = true;
    }

    async fn run(mut self, mut inbox: mpsc::Receiver<Msg>) {
        let shutdown = self.shared.shutdown.clone();
        self.relist().await;
        self.adopted = !self.containers.is_empty();
        self.seed_from_previous();
        loop {
            self.look().await;
            if self.step() {
                break;
            }
            self.publish();
            let deadline = self.deadline();
            tokio::select! {
                message = inbox.recv() => match message {
                    Some(message) => self.hear(message).await,
                    None => break,
                },
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {}
                () = shutdown.cancelled() => break,
            }
            while let Ok(message) = inbox.try_recv() {
                self.hear(message).await;
            }
        }
        // A stop of the kubelet leaves containers alone: tasks are dropped, the next kubelet finds what they left.
        self.stop_tasks();
    }

    fn stop_tasks(&mut self) {
        self.probes.drain().for_each(|(_, stop)| stop.cancel());
        if let Some((task, _)) = self.batch.take() {
            task.abort();
        }
        if let Some(task) = self.sandbox.take() {
            task.abort();
        }
    }

    /// Containers that run since before this kubelet keep their readiness until their probes say otherwise.
    fn seed_from_previous(&mut self) {
        let statuses = self.status.container_statuses.iter().flatten().chain(self.status.init_container_statuses.iter().flatten());
        for status in statuses {
            let Some(id) = status.container_id.as_deref().and_then(|id| id.split_once("://")).map(|(_, id)| id.to_owned()) else { continue };
            if self.containers.get(&id).is_some_and(Container::running) {
                let verdict = Verdicts { startup: status.started.filter(|s| *s), liveness: None, readiness: status.ready.then_some(true) };
                self.facts.verdicts.insert(id, verdict);
            }
        }
    }

    async fn hear(&mut self, message: Msg) {
        match message {
            Msg::Pod(pod) => self.new_pod(pod),
            Msg::Gone => self.gone = true,
            Msg::Mirror(mirror) => self.new_mirror(mirror),
            Msg::Runtime(id) => {
                self.dirty.insert(id);
            }
            Msg::Relist => self.relist().await,
            Msg::Objects => {
                self.not_before.clear();
                self.sandbox_retry = None;
                self.refresh = Some(Timestamp::now());
            }
            Msg::Fail { why, grace, disruption } => {
                if self.facts.failed.is_none() {
                    self.facts.failed = Some(why);
                    self.facts.disruption = disruption;
                    self.grace_override = grace;
                }
            }
            Msg::Probe(report) => self.probed(&report),
            Msg::Starting(id) => {
                self.facts.starting.insert(id);
            }
            Msg::Started { name, result } => self.started(name, result),
            Msg::BatchDone { retry } => {
                let names = self.batch.take().map(|(_, names)| names).unwrap_or_default();
                if retry {
                    let later = Instant::now() + RETRY;
                    self.not_before.extend(names.into_iter().map(|n| (n, later)));
                }
                self.relist().await;
            }
            Msg::Volumes(result) => self.refreshed(result),
            Msg::Sandbox(result) => self.sandbox_made(result).await,
            Msg::Killed { id, result } => {
                self.kills.remove(&id);
                if let Err(error) = result {
                    self.shared.event(&self.pod, None, EventType::Warning, "FailedKillPod", format!("error killing pod: {error}"));
                    self.wake_in(RETRY);
                }
                self.dirty.insert(id);
            }
            Msg::Resized { id, result } => {
                self.resizes.remove(&id);
                if let Err(error) = result {
                    self.shared.event(&self.pod, None, EventType::Warning, "ResizeError", format!("Pod resize error: {error}"));
                    self.facts.resizing = Some(Why::new("Error", error));
                    self.resize_retry = Some(Instant::now() + RETRY);
                }
                self.dirty.insert(id);
            }
            Msg::Ended(result) => self.ended(result).await,
            Msg::StatusWritten(written) => self.status_written(written),
            Msg::MirrorMade(result) => {
                self.making_mirror = false;
                if let Err(error) = result {
                    tracing::warn!(pod = model::describe(&self.pod), error, "cannot create the mirror pod");
                    self.write.not_before = Some(Instant::now() + RETRY);
                }
            }
            Msg::CleanedUp(result) => {
                self.cleaning = false;
                match result {
                    Ok(()) => self.life = Life::Clean,
                    Err(error) => {
                        tracing::warn!(pod = model::describe(&self.pod), error, "cannot clean up after the pod, will try again");
                        self.wake_in(RETRY);
                    }
                }
            }
        }
    }

    fn new_pod(&mut self, pod: Arc<Pod>) {
        if model::is_static(&pod) {
            self.pod = pod;
            return;
        }
        // The API's status is the base of the next patch: others may have written conditions.
        if let Some(status) = &pod.status {
            self.reported = status.clone();
        }
        let pod = self.allocate(pod);
        let old = std::mem::replace(&mut self.pod, pod);
        let labels_changed = old.metadata.labels != self.pod.metadata.labels || old.metadata.annotations != self.pod.metadata.annotations;
        if labels_changed {
            self.refresh = Some(Timestamp::now());
        }
        if let Some(grace) = self.pod.metadata.deletion_timestamp.as_ref().map(|_| model::grace(&self.pod)) {
            if let Some(sender) = &self.ending {
                sender.send_if_modified(|g| if grace < *g { *g = grace; true } else { false });
            }
            for (_, sender) in self.kills.values() {
                sender.send_if_modified(|g| if grace < *g { *g = grace; true } else { false });
            }
        }
    }

    fn probed(&mut self, report: &Report) {
        if !self.containers.contains_key(&report.container) {
            return;
        }
        let verdict = self.facts.verdicts.entry(report.container.clone()).or_default();
        let slot = match report.kind {
            ProbeKind::Startup => &mut verdict.startup,
            ProbeKind::Liveness => &mut verdict.liveness,
            ProbeKind::Readiness => &mut verdict.readiness,
        };
        *slot = Some(report.healthy);
    }

    fn started(&mut self, name: String, result: Result<(), Why>) {
        self.facts.starting.retain(|id| self.containers.get(id).is_some_and(|c| c.name != name));
        match result {
            Ok(()) => {
                self.facts.errors.remove(&name);
                self.not_before.remove(&name);
            }
            Err(why) => {
                self.not_before.insert(name.clone(), Instant::now() + RETRY);
                self.facts.errors.insert(name, why);
            }
        }
    }

    async fn sandbox_made(&mut self, result: Result<(Vec<String>, Setup), SandboxFailure>) {
        self.sandbox = None;
        match result {
            Ok((addresses, setup)) => {
                self.addresses = addresses;
                self.refreshed(Ok(setup));
                self.sandbox_retry = None;
            }
            Err(failure) => {
                let (reason, message) = match failure {
                    SandboxFailure::Volumes(e) => ("FailedMount", e),
                    SandboxFailure::Sandbox(e) => ("FailedCreatePodSandBox", format!("Failed to create pod sandbox: {e}")),
                };
                tracing::warn!(pod = model::describe(&self.pod), reason, message, "cannot prepare the pod");
                self.shared.event(&self.pod, None, EventType::Warning, reason, message);
                let wait = if reason == "FailedMount" { Duration::from_secs(5) } else { RETRY };
                self.sandbox_retry = Some(Instant::now() + wait);
            }
        }
        self.relist().await;
    }

    fn refreshed(&mut self, result: Result<Setup, String>) {
        self.refreshing = false;
        match result {
            Ok(setup) => self.refresh = setup.renew,
            Err(error) => {
                self.shared.event(&self.pod, None, EventType::Warning, "FailedMount", error);
                self.refresh = Timestamp::now().checked_add(SignedDuration::from_secs(30)).ok();
            }
        }
    }

    async fn ended(&mut self, result: Result<(), String>) {
        self.ending = None;
        self.relist().await;
        match result {
            Ok(()) => self.life = Life::Ended,
            Err(error) => {
                tracing::warn!(pod = model::describe(&self.pod), error, "cannot stop the pod, will try again");
                self.shared.event(&self.pod, None, EventType::Warning, "FailedKillPod", format!("error killing pod: {error}"));
                self.life = Life::Running;
                self.wake_in(RETRY);
            }
        }
    }

    /// Reads all containers of the pod again.
    async fn relist(&mut self) {
        match self.shared.runtime.list_pod(model::uid(&self.pod)).await {
            Ok(list) => {
                self.containers = list.into_iter().map(|c| (c.id.clone(), c)).collect();
                self.dirty.clear();
                self.listed = true;
                self.after_look().await;
            }
            Err(error) => {
                tracing::warn!(pod = model::describe(&self.pod), %error, "cannot list the pod's containers");
                self.listed = false;
                self.wake_in(RETRY);
            }
        }
    }

    /// Inspects the containers that something happened to.
    async fn look(&mut self) {
        if !self.listed && self.wake.is_none_or(|w| w <= Instant::now()) {
            self.relist().await;
            return;
        }
        if self.dirty.is_empty() || !self.listed {
            return;
        }
        for id in std::mem::take(&mut self.dirty) {
            match self.shared.runtime.inspect(&id).await {
                Ok(container) => {
                    self.containers.insert(id, container);
                }
                Err(crate::runtime::Error::NotFound { .. }) => {
                    self.containers.remove(&id);
                }
                Err(error) => {
                    tracing::warn!(container = id, %error, "cannot inspect a container");
                    self.dirty.insert(id);
                    self.wake_in(RETRY);
                }
            }
        }
        self.after_look().await;
    }

    async fn after_look(&mut self) {
        self.addresses = if model::host_network(&self.pod) { Vec::new() } else { self.shared.network.addresses(model::uid(&self.pod)) };
        let ids: HashSet<&String> = self.containers.keys().collect();
        self.facts.verdicts.retain(|id, _| ids.contains(id));
        self.facts.messages.retain(|id, _| ids.contains(id));
        self.facts.starting.retain(|id| ids.contains(id) || self.batch.is_some());
        let ended: Vec<Container> = self.containers.values().filter(|c| !c.is_sandbox() && c.state == State::Exited && !self.facts.messages.contains_key(&c.id)).cloned().collect();
        for container in ended {
            let message = super::message::read(&*self.shared.runtime, &container).await;
            self.facts.messages.insert(container.id, message);
        }
        let unknown: HashSet<String> = self.containers.values().filter(|c| !c.is_sandbox()).map(|c| c.image_id.clone()).filter(|i| !self.facts.image_refs.contains_key(i)).collect();
        for id in unknown {
            let digest = match self.shared.runtime.image(&id).await {
                Ok(Some(image)) => image.digests.first().cloned(),
                _ => None,
            };
            self.facts.image_refs.insert(id.clone(), digest.unwrap_or(id));
        }
    }

    fn observed(&self) -> Observed {
        Observed::new(self.containers.values().cloned(), self.addresses.clone())
    }

    fn wake_in(&mut self, after: Duration) {
        let at = Instant::now() + after;
        self.wake = Some(self.wake.map_or(at, |w| w.min(at)));
    }

    /// The next moment at which something may have to be done without being told.
    fn deadline(&self) -> Option<Instant> {
        let at = |time: Timestamp| {
            let left = time.duration_since(Timestamp::now());
            Instant::now() + Duration::try_from(left).unwrap_or_default()
        };
        let mut all: Vec<Instant> = self.not_before.values().copied().collect();
        all.extend(self.wake);
        all.extend(self.sandbox_retry.filter(|_| self.life == Life::Running));
        all.extend(self.write.not_before);
        all.extend(self.resize_retry);
        if self.life == Life::Running && !self.refreshing {
            all.extend(self.refresh.map(at));
            all.extend(self.active_deadline().map(at));
        }
        all.into_iter().min()
    }

    fn active_deadline(&self) -> Option<Timestamp> {
        let seconds = model::spec(&self.pod).active_deadline_seconds.filter(|_| self.facts.failed.is_none())?;
        let start = self.status.start_time.as_ref()?.0;
        start.checked_add(SignedDuration::from_secs(seconds)).ok()
    }
}

#[path = "step.rs"]
mod step;
