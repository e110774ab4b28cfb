//! CronJobs: jobs by the clock. Each has one deadline pending; nothing looks at the clock in between.

mod schedule;

use std::{sync::Arc, time::Duration};

use jiff::{Timestamp, tz::TimeZone};
use k8s_openapi::{
    api::{
        batch::v1::{CronJob, CronJobStatus, Job},
        core::v1::ObjectReference,
    },
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
};
use windlass_client::{
    events::{self, EventType, Recorder},
    informer::{Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker, after},
    job::plan::{holds, is_finished},
    owner,
    pod::until,
    write::{self, ApiErrorExt, Delete},
};
use schedule::Schedule;

const SCHEDULED: &str = "batch.kubernetes.io/cronjob-scheduled-timestamp";
/// Missed starts from which on the user is told that something is wrong.
const MANY: usize = 100;

/// The last due time that has not been served, how many were missed (as far as counted), and the next one.
#[derive(Debug, PartialEq, Eq)]
struct Due {
    last: Option<Timestamp>,
    missed: usize,
    next: Option<Timestamp>,
}

fn due(schedule: &Schedule, zone: &TimeZone, since: Timestamp, now: Timestamp) -> Due {
    let mut at = since;
    let mut missed = 0;
    let mut last = None;
    while missed <= MANY {
        match schedule.next(at, zone) {
            Some(next) if next <= now => {
                (at, last, missed) = (next, Some(next), missed + 1);
            }
            next => return Due { last, missed, next },
        }
    }
    // Too many to walk through: look back from now in growing steps for the last one.
    let mut back = jiff::SignedDuration::from_mins(2);
    loop {
        let from = now.checked_sub(back).unwrap_or(since).max(since);
        let mut at = from;
        let mut found = None;
        while let Some(next) = schedule.next(at, zone).filter(|next| *next <= now) {
            (at, found) = (next, Some(next));
        }
        if found.is_some() || from == since {
            return Due { last: found.or(last), missed, next: schedule.next(now, zone) };
        }
        back = back.saturating_mul(8);
    }
}

fn zone_of(cron: &CronJob) -> Result<TimeZone, String> {
    match cron.spec.time_zone.as_deref() {
        None => Ok(TimeZone::UTC),
        Some(name) => TimeZone::get(name).map_err(|_| format!("unknown time zone {name}")),
    }
}

/// From when on starts are owed.
fn owed_since(cron: &CronJob, now: Timestamp) -> Timestamp {
    let created = cron.metadata.creation_timestamp.as_ref().map_or(now, |time| time.0);
    let last = cron.status.as_ref().and_then(|status| status.last_schedule_time.as_ref()).map(|time| time.0);
    let since = last.unwrap_or(created);
    match cron.spec.starting_deadline_seconds {
        Some(seconds) => since.max(now.checked_sub(jiff::SignedDuration::from_secs(seconds)).unwrap_or(since)),
        None => since,
    }
}

fn job_name(cron: &CronJob, at: Timestamp) -> String {
    format!("{}-{}", cron.metadata.name.as_deref().unwrap_or_default(), at.as_second() / 60)
}

fn new_job(cron: &CronJob, at: Timestamp, zone: &TimeZone) -> Job {
    let template = cron.spec.job_template.clone();
    let metadata = template.metadata.unwrap_or_default();
    let mut annotations = metadata.annotations.unwrap_or_default();
    annotations.insert(SCHEDULED.into(), at.to_zoned(zone.clone()).strftime("%Y-%m-%dT%H:%M:%S%:z").to_string().replace("+00:00", "Z"));
    Job {
        metadata: ObjectMeta {
            name: Some(job_name(cron, at)),
            namespace: cron.metadata.namespace.clone(),
            labels: metadata.labels,
            annotations: Some(annotations),
            owner_references: Some(vec![owner::reference(cron)]),
            creation_timestamp: Some(Time(at)),
            ..ObjectMeta::default()
        },
        spec: template.spec,
        status: None,
    }
}

/// Finished jobs beyond the history limits, oldest first.
fn outdated(cron: &CronJob, jobs: &[Arc<Job>]) -> Vec<Arc<Job>> {
    let limit = |limit: Option<i32>, default: i32| usize::try_from(limit.unwrap_or(default)).unwrap_or(0);
    let of_kind = |kind: &str, limit: usize| {
        let mut ended: Vec<_> = jobs.iter().filter(|job| job.status.as_ref().is_some_and(|status| holds(status, kind).is_some())).cloned().collect();
        let started = |job: &Job| job.status.as_ref().and_then(|status| status.start_time.as_ref()).map(|time| time.0);
        ended.sort_by_key(|job| (started(job), job.metadata.name.clone()));
        let excess = ended.len().saturating_sub(limit);
        ended.truncate(excess);
        ended
    };
    let mut all = of_kind("Complete", limit(cron.spec.successful_jobs_history_limit, 3));
    all.extend(of_kind("Failed", limit(cron.spec.failed_jobs_history_limit, 1)));
    all
}

struct Controller {
    client: kube::Client,
    recorder: Recorder,
    crons: Informer<CronJob>,
    jobs: Informer<Job>,
}

impl Controller {
    fn tell(&self, cron: &CronJob, kind: EventType, reason: &str, message: String) {
        self.recorder.event(&events::reference(cron), kind, reason, message);
    }

    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(cron) = self.crons.get(&key) else { return Ok(Action::Done) };
        let jobs = self.jobs.by_index("owner", cron.metadata.uid.as_deref().unwrap_or_default());
        for job in outdated(&cron, &jobs) {
            self.delete(&cron, &job).await?;
        }
        let mut status = self.account(&cron, &jobs);
        let outcome = self.schedule(&cron, &jobs, &mut status).await;
        if Some(&status) != cron.status.as_ref() {
            let wanted = CronJob { status: Some(status), ..(*cron).clone() };
            let written: Result<CronJob, Error> = write::update_status(&self.client, &wanted).await;
            match written {
                Err(error) if !error.is_not_found() => return Err(error),
                _ => {}
            }
        }
        outcome.map(after)
    }

    /// Brings the list of active jobs up to date, and tells of those that ended.
    fn account(&self, cron: &CronJob, jobs: &[Arc<Job>]) -> CronJobStatus {
        let mut status = cron.status.clone().unwrap_or_default();
        let mut active = status.active.take().unwrap_or_default();
        for job in jobs {
            let name = job.metadata.name.clone().unwrap_or_default();
            let listed = active.iter().position(|reference| reference.uid == job.metadata.uid);
            match (is_finished(job), listed) {
                (false, None) => active.push(reference(job)),
                (true, Some(index)) => {
                    active.remove(index);
                    let ended = job.status.clone().unwrap_or_default();
                    let kind = if holds(&ended, "Complete").is_some() { "Complete" } else { "Failed" };
                    self.tell(cron, EventType::Normal, "SawCompletedJob", format!("Saw completed job: {name}, condition: {kind}"));
                }
                _ => {}
            }
            let succeeded = job.status.as_ref().filter(|status| holds(status, "Complete").is_some()).and_then(|status| status.completion_time.clone());
            if succeeded.is_some() && succeeded > status.last_successful_time {
                status.last_successful_time = succeeded;
            }
        }
        active.retain(|reference| {
            let there = jobs.iter().any(|job| job.metadata.uid == reference.uid);
            if !there {
                self.tell(cron, EventType::Normal, "MissingJob", format!("Active job went missing: {}", reference.name.as_deref().unwrap_or_default()));
            }
            there
        });
        status.active = (!active.is_empty()).then_some(active);
        status
    }

    async fn delete(&self, cron: &CronJob, job: &Job) -> Result<(), Error> {
        let how = Delete { uid: job.metadata.uid.as_deref(), propagation: Some("Background"), ..Delete::default() };
        let name = job.metadata.name.as_deref().unwrap_or_default();
        if write::delete(&self.client, &write::path(job), how).await? {
            self.tell(cron, EventType::Normal, "SuccessfulDelete", format!("Deleted job {name}"));
        }
        Ok(())
    }

    /// Starts what is due; returns the time until the next start.
    async fn schedule(&self, cron: &CronJob, jobs: &[Arc<Job>], status: &mut CronJobStatus) -> Result<Option<Duration>, Error> {
        if cron.metadata.deletion_timestamp.is_some() || cron.spec.suspend.unwrap_or(false) {
            return Ok(None);
        }
        let zone = match zone_of(cron) {
            Ok(zone) => zone,
            Err(reason) => {
                self.tell(cron, EventType::Warning, "UnknownTimeZone", format!("invalid timeZone: {:?}: {reason}", cron.spec.time_zone.as_deref().unwrap_or_default()));
                return Ok(None);
            }
        };
        let schedule = match Schedule::parse(&cron.spec.schedule) {
            Ok(schedule) => schedule,
            Err(reason) => {
                self.tell(cron, EventType::Warning, "UnparseableSchedule", format!("unparseable schedule: {:?} : {reason}", cron.spec.schedule));
                return Ok(None);
            }
        };
        let now = Timestamp::now();
        let due = due(&schedule, &zone, owed_since(cron, now), now);
        let wait = due.next.and_then(|next| until(next, 0, now)).map(|wait| wait + Duration::from_millis(100));
        if due.missed > MANY {
            let message = "too many missed start times. Set or decrease .spec.startingDeadlineSeconds or check clock skew".to_owned();
            self.tell(cron, EventType::Warning, "TooManyMissedTimes", message);
        }
        let Some(at) = due.last else { return Ok(wait) };
        if cron.spec.starting_deadline_seconds.is_some_and(|seconds| until(at, seconds, now).is_none()) {
            self.tell(cron, EventType::Warning, "MissSchedule", format!("Missed scheduled time to start a job: {}", at.strftime("%a, %d %b %Y %H:%M:%S %z")));
            return Ok(wait);
        }
        let name = job_name(cron, at);
        if jobs.iter().any(|job| job.metadata.name.as_ref() == Some(&name)) {
            status.last_schedule_time = status.last_schedule_time.clone().max(Some(Time(at)));
            return Ok(wait);
        }
        let policy = cron.spec.concurrency_policy.as_deref().unwrap_or("Allow");
        let active = status.active.clone().unwrap_or_default();
        if policy == "Forbid" && !active.is_empty() {
            let message = "Not starting job because prior execution is running and concurrency policy is Forbid".to_owned();
            self.tell(cron, EventType::Normal, "JobAlreadyActive", message);
            return Ok(wait);
        }
        if policy == "Replace" {
            for job in jobs.iter().filter(|job| active.iter().any(|reference| reference.uid == job.metadata.uid)) {
                self.delete(cron, job).await?;
            }
            status.active = None;
        }
        self.start(cron, at, &zone, status).await.map(|()| wait)
    }

    async fn start(&self, cron: &CronJob, at: Timestamp, zone: &TimeZone, status: &mut CronJobStatus) -> Result<(), Error> {
        let job = new_job(cron, at, zone);
        let namespace = job.metadata.namespace.clone().unwrap_or_default();
        let name = job.metadata.name.clone().unwrap_or_default();
        match write::create::<Job>(&self.client, &write::collection_path::<Job>(&namespace), &write::wire(&job)).await {
            Ok(created) => {
                self.tell(cron, EventType::Normal, "SuccessfulCreate", format!("Created job {name}"));
                status.active.get_or_insert_default().push(reference(&created));
            }
            // Made before, and not in the cache yet.
            Err(error) if error.is_already_exists() => {}
            Err(error) if error.is_namespace_terminating() => return Ok(()),
            Err(error) => {
                self.tell(cron, EventType::Warning, "FailedCreate", format!("Error creating job: {}", write::message(&error)));
                return Err(error);
            }
        }
        status.last_schedule_time = Some(Time(at));
        Ok(())
    }
}

fn reference(job: &Job) -> ObjectReference {
    ObjectReference { field_path: None, ..events::reference(job) }
}

/// The `cronjob-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("cronjob");
    let (crons, jobs) = (context.cron_jobs(), context.jobs());
    {
        let queue = queue.clone();
        crons.on_change(move |change| queue.add(Key::of(&**change.object())));
    }
    {
        let queue = queue.clone();
        jobs.on_change(move |change| {
            for side in change.old.iter().chain(&change.new) {
                if let Some(owner) = owner::controller_of(&side.metadata, "batch", "CronJob") {
                    queue.add(Key::new(side.metadata.namespace.as_deref().unwrap_or_default(), &owner.name));
                }
            }
        });
    }
    let recorder = context.recorder("cronjob-controller");
    let state = Arc::new(Controller { client: context.client.clone(), recorder, crons, jobs });
    context.worker(queue, context.config.concurrent_cron_job_syncs, state, Controller::sync)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn at(text: &str) -> Timestamp {
        text.parse().expect(text)
    }

    fn check(schedule: &str, since: &str, now: &str, last: Option<&str>, missed: usize, next: &str) {
        let schedule = Schedule::parse(schedule).expect("a schedule");
        let expected = Due { last: last.map(at), missed, next: Some(at(next)) };
        assert_eq!(due(&schedule, &TimeZone::UTC, at(since), at(now)), expected);
    }

    #[test]
    fn what_is_due() {
        check("0 * * * *", "2026-01-01T00:30:00Z", "2026-01-01T00:45:00Z", None, 0, "2026-01-01T01:00:00Z");
        check("0 * * * *", "2026-01-01T00:30:00Z", "2026-01-01T03:10:00Z", Some("2026-01-01T03:00:00Z"), 3, "2026-01-01T04:00:00Z");
        check("* * * * *", "2025-01-01T00:00:00Z", "2026-01-01T00:00:30Z", Some("2026-01-01T00:00:00Z"), 101, "2026-01-01T00:01:00Z");
    }

    #[test]
    fn a_starting_deadline_forgives_what_is_older() {
        let cron: CronJob = serde_json::from_value(json!({"metadata": {"name": "c", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"schedule": "* * * * *", "jobTemplate": {}, "startingDeadlineSeconds": 60}})).expect("a cron job");
        assert_eq!(owed_since(&cron, at("2026-01-01T10:00:00Z")), at("2026-01-01T09:59:00Z"));
        assert_eq!(job_name(&cron, at("1970-01-01T01:00:00Z")), "c-60");
        let job = new_job(&cron, at("2026-01-01T10:00:00Z"), &TimeZone::get("Europe/Berlin").expect("a zone"));
        assert_eq!(job.metadata.annotations.expect("annotations")[SCHEDULED], "2026-01-01T11:00:00+01:00");
    }

    #[test]
    fn history_is_limited() {
        let cron: CronJob = serde_json::from_value(json!({"spec": {"schedule": "", "jobTemplate": {}, "successfulJobsHistoryLimit": 1, "failedJobsHistoryLimit": 0}})).expect("a cron job");
        let job = |name: &str, kind: &str, start: &str| -> Arc<Job> {
            let value: Value = json!({"metadata": {"name": name}, "spec": {"template": {}}, "status": {"startTime": start, "conditions": [{"type": kind, "status": "True"}]}});
            Arc::new(serde_json::from_value(value).expect("a job"))
        };
        let jobs = [job("new", "Complete", "2026-01-02T00:00:00Z"), job("old", "Complete", "2026-01-01T00:00:00Z"), job("bad", "Failed", "2026-01-01T00:00:00Z"), job("on", "Suspended", "2026-01-01T00:00:00Z")];
        let names: Vec<_> = outdated(&cron, &jobs).iter().map(|job| job.metadata.name.clone().unwrap_or_default()).collect();
        assert_eq!(names, ["old", "bad"]);
    }
}
