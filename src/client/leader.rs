//! Leader election by Lease, as client-go's `leaderelection`: of several processes with one name, at most one leads.

use std::future::Future;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use windlass_daemon::metrics;

/// One candidate. Upstream's defaults for the durations are 15 s, 10 s and 2 s.
#[derive(Clone, Debug)]
pub struct Election {
    pub namespace: String,
    /// The Lease's name, e.g. `kube-scheduler`.
    pub name: String,
    /// This candidate, unique among all.
    pub identity: String,
    /// How long others wait, after the last renewal that they saw, before they take over.
    pub lease_duration: Duration,
    /// How long the leader tries to renew before it gives up; shorter than `lease_duration`.
    pub renew_deadline: Duration,
    /// Between two tries.
    pub retry_period: Duration,
}

impl Election {
    /// Upstream's durations, in `kube-system`, with an identity made of host and a random part.
    pub fn new(name: &str) -> Self {
        // A host without a name is told apart by the random part.
        let host = windlass_daemon::host::name().unwrap_or_default();
        Self {
            namespace: "kube-system".to_owned(),
            name: name.to_owned(),
            identity: format!("{host}_{:016x}", rand::random::<u64>()),
            lease_duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry_period: Duration::from_secs(2),
        }
    }

    /// Runs `lead` whenever this candidate holds the Lease; its token is cancelled when the Lease is lost, and `lead`
    /// must then return before the candidate stands again. Returns after `shutdown`, having given the Lease back.
    pub async fn run<F, Fut>(self, client: Client, shutdown: CancellationToken, lead: F)
    where
        F: Fn(CancellationToken) -> Fut,
        Fut: Future<Output = ()>,
    {
        let mut candidate = Candidate {
            leases: Api::namespaced(client, &self.namespace),
            status: metrics::gauge_vec("leader_election_master_status", "Gauge of if the reporting system is master of the relevant lease, 0 indicates backup, 1 indicates master. 'name' is the string used to identify the lease. Please make sure to group by name.", &["name"])
                .with_label_values(&[&self.name]),
            election: self,
            observed: None,
        };
        while !shutdown.is_cancelled() {
            if !candidate.wait_to_lead(&shutdown).await {
                break;
            }
            let term = shutdown.child_token();
            tokio::select! {
                () = lead(term.clone()) => {}
                () = candidate.keep(&term) => {}
            }
            term.cancel();
            candidate.status.set(0);
        }
        candidate.release().await;
    }
}

struct Candidate {
    election: Election,
    leases: Api<Lease>,
    status: prometheus::IntGauge,
    /// The Lease as last seen, and when it last changed by our clock: another machine's clock is never trusted.
    observed: Option<(Lease, Instant)>,
}

impl Candidate {
    /// Whether we lead: false when `shutdown` came first.
    async fn wait_to_lead(&mut self, shutdown: &CancellationToken) -> bool {
        loop {
            match self.try_acquire().await {
                Ok(true) => {
                    tracing::info!(lease = %self.election.name, identity = %self.election.identity, "leading");
                    self.status.set(1);
                    return true;
                }
                Ok(false) => {}
                Err(error) => tracing::warn!(lease = %self.election.name, %error, "cannot try for the lease, will try again"),
            }
            tokio::select! {
                () = tokio::time::sleep(self.election.retry_period) => {}
                () = shutdown.cancelled() => return false,
            }
        }
    }

    /// Renews until that fails for `renew_deadline` or the term ends.
    async fn keep(&mut self, term: &CancellationToken) {
        let mut renewed = Instant::now();
        loop {
            tokio::select! {
                () = tokio::time::sleep(self.election.retry_period) => {}
                () = term.cancelled() => std::future::pending().await,
            }
            let left = self.election.renew_deadline.saturating_sub(renewed.elapsed());
            match tokio::time::timeout(left, self.try_acquire()).await {
                Ok(Ok(true)) => renewed = Instant::now(),
                Ok(Ok(false)) => return tracing::warn!(lease = %self.election.name, "another took the lease"),
                Ok(Err(error)) => tracing::warn!(lease = %self.election.name, %error, "cannot renew the lease, will try again"),
                Err(_) => {}
            }
            if renewed.elapsed() >= self.election.renew_deadline {
                return tracing::warn!(lease = %self.election.name, "could not renew the lease in time");
            }
        }
    }

    /// Takes or renews the Lease if it is ours, free, or expired.
    async fn try_acquire(&mut self) -> Result<bool, kube::Error> {
        let election = &self.election;
        let Some(mut lease) = self.leases.get_opt(&election.name).await? else {
            let metadata = ObjectMeta { name: Some(election.name.clone()), ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(self.spec(None)) };
            return match self.leases.create(&PostParams::default(), &lease).await {
                Ok(lease) => Ok(self.observe(lease)),
                Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
                Err(error) => Err(error),
            };
        };
        let changed = self.observed.as_ref().is_none_or(|(seen, _)| seen.metadata.resource_version != lease.metadata.resource_version);
        if changed {
            self.observed = Some((lease.clone(), Instant::now()));
        }
        let holder = lease.spec.as_ref().and_then(|s| s.holder_identity.as_deref()).unwrap_or_default();
        let expired = self.observed.as_ref().is_none_or(|(_, at)| at.elapsed() >= self.duration_of(&lease));
        if !holder.is_empty() && holder != election.identity && !expired {
            return Ok(false);
        }
        lease.spec = Some(self.spec(lease.spec.as_ref()));
        match self.leases.replace(&election.name, &PostParams::default(), &lease).await {
            Ok(lease) => Ok(self.observe(lease)),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn observe(&mut self, lease: Lease) -> bool {
        self.observed = Some((lease, Instant::now()));
        true
    }

    fn duration_of(&self, lease: &Lease) -> Duration {
        let seconds = lease.spec.as_ref().and_then(|s| s.lease_duration_seconds).and_then(|s| u64::try_from(s).ok());
        seconds.map_or(self.election.lease_duration, Duration::from_secs)
    }

    fn spec(&self, current: Option<&LeaseSpec>) -> LeaseSpec {
        let now = Some(MicroTime(Timestamp::now()));
        let held = current.filter(|c| c.holder_identity.as_ref() == Some(&self.election.identity));
        let transitions = current.and_then(|c| c.lease_transitions).unwrap_or(0);
        LeaseSpec {
            holder_identity: Some(self.election.identity.clone()),
            lease_duration_seconds: Some(i32::try_from(self.election.lease_duration.as_secs()).unwrap_or(i32::MAX)),
            acquire_time: held.and_then(|c| c.acquire_time.clone()).or_else(|| now.clone()),
            renew_time: now,
            lease_transitions: Some(transitions.saturating_add(i32::from(current.is_some() && held.is_none()))),
            ..LeaseSpec::default()
        }
    }

    /// Gives the Lease back, so that the next leader need not wait for it to expire.
    async fn release(&mut self) {
        let Some((mut lease, _)) = self.observed.take() else { return };
        let Some(spec) = lease.spec.as_mut().filter(|s| s.holder_identity.as_ref() == Some(&self.election.identity)) else { return };
        spec.holder_identity = None;
        spec.lease_duration_seconds = Some(1);
        spec.renew_time = Some(MicroTime(Timestamp::now()));
        let replace = self.leases.replace(&self.election.name, &PostParams::default(), &lease).await;
        if let Err(error) = replace {
            tracing::info!(lease = %self.election.name, %error, "could not give the lease back; it will expire");
        }
    }
}
