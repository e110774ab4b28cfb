//! The scheduler: decides on which node each pod runs, and records why.
//!
//! Informers change a picture of the cluster by deltas; a queue says which pod is next; a decision filters the nodes,
//! rates those that fit and takes the best; binding is carried out beside the next decisions. Names of plugins, weights,
//! formulas and words are upstream's, so that what users know stays true.
//!
//! # Invariants
//! - A decision is made under one lock on one state of the cluster, and takes the room at once: no two decisions count on
//!   the same room, however long binding takes.
//! - Everything known can be rebuilt from the API. An assumption is confirmed or corrected by a watch event, never by time.
//! - Nothing polls: a pod that fits nowhere waits for an event that its rejecting plugins named, or for a deadline.
//! - A decision allocates nothing per node that fits.
//!
//! # Code map
//! - [`object`]: what is read of API objects; [`pod`], [`resources`]: the same, compiled
//! - [`cluster`]: nodes, what runs there, what was promised
//! - [`plugin`]: the filters and scores; [`profile`]: which of them count, and how much
//! - [`cycle`]: one decision; [`preempt`]: making room; [`decision`]: the record
//! - [`queue`], [`event`]: who waits for what
//! - [`state`]: all of it behind a lock; [`feed`]: what the API tells; [`bind`]: what is told to the API

mod bind;
pub mod cluster;
pub mod cycle;
pub mod decision;
pub mod event;
mod feed;
mod metrics;
pub mod object;
pub mod plugin;
pub mod pod;
pub mod preempt;
pub mod profile;
pub mod queue;
pub mod resources;
pub mod state;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use windlass_client::Role;
use windlass_client::events::Recorder;
use windlass_client::leader::Election;

use crate::bind::Binder;
use crate::profile::{Profile, ProfileConfig};
use crate::state::{Next, Scheduler};

/// Decisions that are carried out at once; more wait, and deciding with them.
const CARRIED_OUT_AT_ONCE: usize = 512;

/// Configuration of the scheduler. Flags are upstream's where there is one.
#[derive(Clone, Debug, Serialize, Deserialize, clap::Args)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Config {
    /// Stand for election, so that of several schedulers one decides
    #[arg(long)]
    pub leader_elect: bool,
    /// Bindings per second, on average
    #[arg(long)]
    pub kube_api_qps: u32,
    /// Bindings that may come at once
    #[arg(long)]
    pub kube_api_burst: u32,
    /// First wait after a failed decision, in seconds; it doubles with each attempt
    #[arg(long)]
    pub pod_initial_backoff_seconds: u64,
    /// Longest wait after failed decisions, in seconds
    #[arg(long)]
    pub pod_max_backoff_seconds: u64,
    /// Which plugins decide for which scheduler name; only in a file
    #[arg(skip)]
    pub profiles: Vec<ProfileConfig>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            leader_elect: true,
            kube_api_qps: 2000,
            kube_api_burst: 4000,
            pod_initial_backoff_seconds: 1,
            pod_max_backoff_seconds: 10,
            profiles: vec![ProfileConfig::default()],
        }
    }
}

/// Why the scheduler does not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("configuration: {0}")]
    Config(String),
}

/// Schedules until `role.shutdown`.
pub async fn run(config: Config, role: Role) -> Result<(), Error> {
    let profiles = profiles(&config.profiles)?;
    if config.kube_api_qps == 0 || config.kube_api_burst == 0 {
        return Err(Error::Config("kubeApiQps and kubeApiBurst must be more than 0, or nothing is ever bound".to_owned()));
    }
    // Standing by is a healthy state: a scheduler that waits for the lease is ready.
    role.health.check("leader-election").ok();
    let election = Election::new("kube-scheduler");
    let profiles = Arc::new(profiles);
    let term = |shutdown: CancellationToken| schedule(config.clone(), profiles.clone(), Role { shutdown, ..role.clone() });
    if config.leader_elect {
        election.run(role.client.clone(), role.shutdown.clone(), term).await;
    } else {
        term(role.shutdown.clone()).await;
    }
    Ok(())
}

fn profiles(configs: &[ProfileConfig]) -> Result<HashMap<String, ProfileConfig>, Error> {
    let mut profiles = HashMap::new();
    for config in configs {
        Profile::new(config).map_err(Error::Config)?;
        if profiles.insert(config.scheduler_name.clone(), config.clone()).is_some() {
            return Err(Error::Config(format!("two profiles are called {:?}", config.scheduler_name)));
        }
    }
    if profiles.is_empty() {
        return Err(Error::Config("there is no profile, so no pod would ever be scheduled".to_owned()));
    }
    Ok(profiles)
}

/// One term as the leader.
async fn schedule(config: Config, profiles: Arc<HashMap<String, ProfileConfig>>, role: Role) {
    let compiled = profiles.iter().filter_map(|(name, config)| Some((name.clone(), Profile::new(config).ok()?))).collect();
    let backoff = (Duration::from_secs(config.pod_initial_backoff_seconds.max(1)), Duration::from_secs(config.pod_max_backoff_seconds.max(1)));
    let scheduler = Arc::new(Scheduler::new(compiled, backoff));
    let recorders: HashMap<String, Recorder> =
        profiles.keys().map(|name| (name.clone(), Recorder::new(role.client.clone(), name, None, role.shutdown.clone()))).collect();
    tokio::select! {
        () = feed::start(&role, &scheduler) => {}
        () = role.shutdown.cancelled() => return,
    }
    let mut bucket = Bucket::new(config.kube_api_qps, config.kube_api_burst);
    let mut running: JoinSet<()> = JoinSet::new();
    loop {
        while running.len() >= CARRIED_OUT_AT_ONCE {
            running.join_next().await;
        }
        let next = tokio::select! {
            next = scheduler.next() => next,
            Some(_) = running.join_next() => continue,
            () = role.shutdown.cancelled() => break,
        };
        let pod = match &next {
            Next::Bind { waiting, .. } => {
                bucket.take().await;
                &waiting.pod
            }
            Next::Tell { waiting, .. } => &waiting.pod,
        };
        let Some(recorder) = recorders.get(pod.scheduler_name()) else { continue };
        let binder = Binder { client: role.client.clone(), scheduler: scheduler.clone(), recorder: recorder.clone() };
        running.spawn(binder.carry_out(next));
    }
    // Bindings that are under way are finished; those that wait for claims are given up, and found again at the next start.
    let _ = tokio::time::timeout(Duration::from_secs(2), async { while running.join_next().await.is_some() {} }).await;
}

/// A token bucket.
struct Bucket {
    per_second: f64,
    burst: f64,
    tokens: f64,
    at: Instant,
}

impl Bucket {
    fn new(per_second: u32, burst: u32) -> Self {
        Self { per_second: f64::from(per_second), burst: f64::from(burst), tokens: f64::from(burst), at: Instant::now() }
    }

    /// Returns when a token is there.
    async fn take(&mut self) {
        let now = Instant::now();
        self.tokens = (self.tokens + (now - self.at).as_secs_f64() * self.per_second).min(self.burst);
        self.at = now;
        if self.tokens < 1.0 {
            tokio::time::sleep(Duration::from_secs_f64((1.0 - self.tokens) / self.per_second)).await;
            self.tokens = 1.0;
            self.at = Instant::now();
        }
        self.tokens -= 1.0;
    }
}
