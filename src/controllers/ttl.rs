//! Finished jobs with a time to live: deleted when it has run out.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::Job;
use windlass_client::{
    informer::{Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker},
    job::plan::{holds, is_finished},
    pod::until,
    write::{self, Delete},
};

/// How long a job may stay: none if it has no limit or is not finished, zero when it is to go.
fn left(job: &Job, now: Timestamp) -> Option<Duration> {
    let seconds = job.spec.as_ref()?.ttl_seconds_after_finished?;
    let status = job.status.as_ref().filter(|_| is_finished(job) && job.metadata.deletion_timestamp.is_none())?;
    let ended = holds(status, "Complete").or_else(|| holds(status, "Failed"))?.last_transition_time.as_ref()?.0;
    Some(until(ended, seconds, now).unwrap_or_default())
}

struct Controller {
    client: kube::Client,
    jobs: Informer<Job>,
}

impl Controller {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(job) = self.jobs.get(&key) else { return Ok(Action::Done) };
        match left(&job, Timestamp::now()) {
            None => return Ok(Action::Done),
            Some(left) if !left.is_zero() => return Ok(Action::RequeueAfter(left)),
            Some(_) => {}
        }
        // The limit may have been raised a moment ago: the version that we judged must be the one that goes.
        let how = Delete {
            uid: job.metadata.uid.as_deref(),
            resource_version: job.metadata.resource_version.as_deref(),
            propagation: Some("Foreground"),
            grace_period_seconds: None,
        };
        write::delete(&self.client, &write::path(&*job), how).await?;
        Ok(Action::Done)
    }
}

/// The `ttl-after-finished-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("ttl_jobs_to_delete");
    let jobs = context.jobs();
    {
        let queue = queue.clone();
        jobs.on_change(move |change| {
            if change.new.as_deref().is_some_and(|job| left(job, Timestamp::now()).is_some()) {
                queue.add(Key::of(&**change.object()));
            }
        });
    }
    let state = Arc::new(Controller { client: context.client.clone(), jobs });
    context.worker(queue, context.config.concurrent_ttl_after_finished_syncs, state, Controller::sync)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn time_runs_from_the_end() {
        let now = Timestamp::from_second(1_000_100).expect("a time");
        let ended = Timestamp::from_second(1_000_000).expect("a time").to_string();
        for (ttl, kind, expected) in [(Some(150), "Complete", Some(50)), (Some(100), "Failed", Some(0)), (None, "Complete", None), (Some(0), "Suspended", None)] {
            let job: Job = serde_json::from_value(json!({"spec": {"template": {}, "ttlSecondsAfterFinished": ttl},
                "status": {"conditions": [{"type": kind, "status": "True", "lastTransitionTime": ended}]}})).expect("a job");
            assert_eq!(left(&job, now), expected.map(Duration::from_secs), "{ttl:?} {kind}");
        }
    }
}
