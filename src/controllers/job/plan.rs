//! What a job's next step is. Pure: the job and its pods in, a new status and actions out.
//!
//! Pods are counted exactly once although they may vanish at any time (KEP-2307): a finished pod keeps our finalizer until
//! its UID is in `status.uncountedTerminatedPods`; the UID becomes a number once the finalizer is seen to be gone.

use std::{cmp::Reverse, collections::BTreeSet, sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::{
    api::batch::v1::{Job, JobCondition, JobSpec, JobStatus, UncountedTerminatedPods},
    apimachinery::pkg::apis::meta::v1::Time,
};

use super::{
    indexes::Indexes,
    policy::{self, Failure},
};
use crate::pod::{self, PodView, until};

pub const FINALIZER: &str = "batch.kubernetes.io/job-tracking";
pub const INDEX: &str = "batch.kubernetes.io/job-completion-index";
pub const FAILURES: &str = "batch.kubernetes.io/job-index-failure-count";
pub const IGNORED: &str = "batch.kubernetes.io/job-index-ignored-failure-count";
/// Pods made or UIDs noted at most in one step.
const MAX_PODS: usize = 500;
const BACKOFF_BASE: i64 = 10;
const BACKOFF_CAP: i64 = 600;

/// A pod to make: its index and how often that index has failed, for indexed jobs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewPod {
    pub index: Option<i32>,
    pub failures: i32,
    pub ignored: i32,
}

/// One step. Order of writes: the status, then finalizers, then deletions and creations.
#[derive(Debug, Default)]
pub struct Plan {
    pub status: JobStatus,
    /// Pods that lose our finalizer after the status is written.
    pub release: Vec<Arc<PodView>>,
    pub create: Vec<NewPod>,
    pub delete: Vec<Arc<PodView>>,
    pub next: Option<Duration>,
    /// Warning or not, reason, message.
    pub events: Vec<(bool, &'static str, String)>,
}

fn text<'a>(value: &'a Option<String>) -> &'a str {
    value.as_deref().unwrap_or_default()
}

pub fn is_indexed(spec: &JobSpec) -> bool {
    text(&spec.completion_mode) == "Indexed"
}

/// The condition of this type, if it holds.
pub fn holds<'a>(status: &'a JobStatus, kind: &str) -> Option<&'a JobCondition> {
    status.conditions.iter().flatten().find(|condition| condition.type_ == kind && condition.status == "True")
}

/// Complete or failed.
pub fn is_finished(job: &Job) -> bool {
    job.status.as_ref().is_some_and(|status| holds(status, "Complete").or_else(|| holds(status, "Failed")).is_some())
}

pub fn index_of(pod: &PodView) -> Option<i32> {
    pod.annotation(INDEX)?.parse().ok()
}

pub fn is_tracked(pod: &PodView) -> bool {
    pod.metadata.finalizers.iter().flatten().any(|finalizer| finalizer == FINALIZER)
}

fn only_failed_are_replaced(spec: &JobSpec) -> bool {
    match text(&spec.pod_replacement_policy) {
        "Failed" => true,
        "TerminatingOrFailed" => false,
        _ => spec.pod_failure_policy.is_some(),
    }
}

fn is_failed(pod: &PodView, spec: &JobSpec) -> bool {
    pod.phase() == "Failed" || !only_failed_are_replaced(spec) && pod.deleting() && pod.phase() != "Succeeded"
}

/// When a pod finished, as well as its status tells.
fn finish_time(pod: &PodView, now: Timestamp) -> Timestamp {
    let ended = |status: &pod::ContainerStatus| status.state.as_ref().and_then(|state| state.terminated.as_ref()?.finished_at.as_ref()).map(|time| time.0);
    let by_container = pod.status.container_statuses.iter().filter_map(ended).max();
    let by_deletion = pod.metadata.deletion_timestamp.as_ref().map(|time| {
        let grace = jiff::SignedDuration::from_secs(pod.metadata.deletion_grace_period_seconds.unwrap_or(0));
        time.0.checked_sub(grace).unwrap_or(time.0)
    });
    let by_condition = pod.condition("Ready").filter(|condition| condition.status == "False").and_then(|condition| condition.last_transition_time.as_ref()).map(|time| time.0);
    by_container.or(by_deletion).or(by_condition).unwrap_or(now)
}

/// How long to wait after the `failures`-th failure in a row, the last at `last`.
fn backoff(failures: i32, last: Timestamp, now: Timestamp) -> Option<Duration> {
    if failures <= 0 {
        return None;
    }
    let seconds = (BACKOFF_BASE << (failures - 1).min(10)).min(BACKOFF_CAP);
    until(last, seconds, now)
}

fn count(number: i32) -> Option<i32> {
    (number != 0).then_some(number)
}

fn condition(kind: &str, reason: &str, message: &str, now: Timestamp) -> JobCondition {
    JobCondition {
        type_: kind.into(),
        status: "True".into(),
        reason: Some(reason.into()),
        message: Some(message.into()),
        last_probe_time: Some(Time(now)),
        last_transition_time: Some(Time(now)),
    }
}

/// Sets a condition; true if that changed something. `False` is not recorded where there was nothing.
fn set_condition(status: &mut JobStatus, wanted: JobCondition) -> bool {
    let conditions = status.conditions.get_or_insert_default();
    match conditions.iter_mut().find(|condition| condition.type_ == wanted.type_) {
        Some(known) if known.status == wanted.status && known.reason == wanted.reason && known.message == wanted.message => false,
        Some(known) => {
            *known = wanted;
            true
        }
        None if wanted.status == "False" => false,
        None => {
            conditions.push(wanted);
            true
        }
    }
}

/// Everything that the parts of a step share.
struct Step<'a> {
    job: &'a Job,
    spec: &'a JobSpec,
    pods: &'a [Arc<PodView>],
    now: Timestamp,
    /// Whether pods may be made or deleted: the cache shows what was done last.
    may_act: bool,
    succeeded_indexes: Indexes,
    failed_indexes: Indexes,
    /// Finished pods whose finalizer may go, by UID.
    settled: BTreeSet<String>,
    fail_job: Option<String>,
}

/// Plans the next step of a job that is not finished.
pub fn plan(job: &Job, pods: &[Arc<PodView>], now: Timestamp, may_act: bool) -> Plan {
    let Some(spec) = &job.spec else { return Plan::default() };
    let known = job.status.clone().unwrap_or_default();
    let completions = spec.completions.unwrap_or(0);
    let mut step = Step {
        job,
        spec,
        pods,
        now,
        may_act,
        succeeded_indexes: Indexes::parse(text(&known.completed_indexes), completions),
        failed_indexes: Indexes::parse(text(&known.failed_indexes), completions),
        settled: BTreeSet::new(),
        fail_job: None,
    };
    let mut plan = Plan { status: known, ..Plan::default() };
    let suspended = spec.suspend.unwrap_or(false);
    if plan.status.start_time.is_none() && !suspended {
        plan.status.start_time = Some(Time(now));
    }
    step.account(&mut plan.status);
    step.conclude(&mut plan);
    plan
}

impl Step<'_> {
    fn indexed(&self) -> bool {
        is_indexed(self.spec)
    }

    /// Moves pods through the books: settled ones become numbers, newly finished ones are noted.
    fn account(&mut self, status: &mut JobStatus) {
        let mut uncounted = status.uncounted_terminated_pods.take().unwrap_or_default();
        let mut succeeded: Vec<String> = uncounted.succeeded.take().unwrap_or_default();
        let mut failed: Vec<String> = uncounted.failed.take().unwrap_or_default();
        let tracked: BTreeSet<&str> = self.pods.iter().filter(|pod| is_tracked(pod)).map(|pod| pod.uid()).collect();
        let settle = |list: &mut Vec<String>, number: &mut Option<i32>| {
            let before = list.len();
            list.retain(|uid| tracked.contains(uid.as_str()));
            *number = count(number.unwrap_or(0) + (before - list.len()) as i32);
        };
        if !self.indexed() {
            settle(&mut succeeded, &mut status.succeeded);
        }
        settle(&mut failed, &mut status.failed);
        let per_index = self.spec.backoff_limit_per_index;
        let deleting = self.job.metadata.deletion_timestamp.is_some();
        for pod in self.pods.iter().filter(|pod| is_tracked(pod)) {
            let uid = pod.uid().to_owned();
            let index = index_of(pod).filter(|index| (0..self.spec.completions.unwrap_or(0)).contains(index));
            if pod.phase() == "Succeeded" {
                match index {
                    Some(index) if self.indexed() => {
                        self.succeeded_indexes.0.insert(index);
                    }
                    None if self.indexed() => {}
                    _ if succeeded.contains(&uid) => {}
                    _ if succeeded.len() + failed.len() < MAX_PODS => succeeded.push(uid.clone()),
                    _ => continue,
                }
                self.settled.insert(uid);
            } else if is_failed(pod, self.spec) {
                let outcome = policy::failure(self.job, pod);
                if let Failure::FailJob(message) = &outcome {
                    self.fail_job.get_or_insert_with(|| message.clone());
                }
                if let (Some(limit), Some(index)) = (per_index, index) {
                    let failures = pod.annotation(FAILURES).and_then(|text| text.parse().ok()).unwrap_or(0);
                    if outcome == Failure::FailIndex || outcome == Failure::Count && failures + 1 > limit {
                        self.failed_indexes.0.insert(index);
                    }
                }
                if outcome != Failure::Ignore && !failed.contains(&uid) {
                    if succeeded.len() + failed.len() >= MAX_PODS {
                        continue;
                    }
                    failed.push(uid.clone());
                }
                self.settled.insert(uid);
            } else if deleting && pod.finished() {
                self.settled.insert(uid);
            }
        }
        if self.indexed() {
            for index in &self.succeeded_indexes.0 {
                self.failed_indexes.0.remove(index);
            }
            status.succeeded = count(self.succeeded_indexes.len() as i32);
            status.completed_indexes = Some(self.succeeded_indexes.format()).filter(|text| !text.is_empty());
            status.failed_indexes = per_index.is_some().then(|| self.failed_indexes.format()).filter(|text| !text.is_empty() || status.failed_indexes.is_some());
        }
        let list = |uids: Vec<String>| (!uids.is_empty()).then_some(uids);
        status.uncounted_terminated_pods = Some(UncountedTerminatedPods { failed: list(failed), succeeded: list(succeeded) });
    }

    fn totals(&self, status: &JobStatus) -> (i32, i32) {
        let uncounted = status.uncounted_terminated_pods.clone().unwrap_or_default();
        let noted = |list: &Option<Vec<String>>| list.as_ref().map_or(0, Vec::len) as i32;
        let succeeded = if self.indexed() { self.succeeded_indexes.len() as i32 } else { status.succeeded.unwrap_or(0) + noted(&uncounted.succeeded) };
        (succeeded, status.failed.unwrap_or(0) + noted(&uncounted.failed))
    }

    fn restarts_exceed(&self) -> bool {
        let pod_spec = self.spec.template.spec.as_ref();
        if pod_spec.and_then(|spec| spec.restart_policy.as_deref()) != Some("OnFailure") {
            return false;
        }
        let limit = self.spec.backoff_limit.unwrap_or(6);
        let restarts = |pod: &Arc<PodView>| -> i32 {
            pod.status.container_statuses.iter().chain(&pod.status.init_container_statuses).map(|status| status.restart_count).sum()
        };
        let alive = self.pods.iter().filter(|pod| matches!(pod.phase(), "Running" | "Pending"));
        let total: i32 = alive.map(restarts).sum();
        if limit == 0 { total > 0 } else { total >= limit }
    }

    /// The condition that ends the job, if it has come to that.
    fn verdict(&self, status: &JobStatus, failed: i32, next: &mut Option<Duration>) -> Option<JobCondition> {
        if let Some(met) = holds(status, "SuccessCriteriaMet") {
            return Some(condition("SuccessCriteriaMet", text(&met.reason), text(&met.message), self.now));
        }
        let fail = |reason: &str, message: &str| Some(condition("FailureTarget", reason, message, self.now));
        if let Some(target) = holds(status, "FailureTarget") {
            return fail(text(&target.reason), text(&target.message));
        }
        if let Some(message) = &self.fail_job {
            return fail("PodFailurePolicy", message);
        }
        if failed > self.spec.backoff_limit.unwrap_or(if self.spec.backoff_limit_per_index.is_some() { i32::MAX } else { 6 }) || self.restarts_exceed() {
            return fail("BackoffLimitExceeded", "Job has reached the specified backoff limit");
        }
        if let (Some(seconds), Some(start), false) = (self.spec.active_deadline_seconds, &status.start_time, self.spec.suspend.unwrap_or(false)) {
            match until(start.0, seconds, self.now) {
                None => return fail("DeadlineExceeded", "Job was active longer than specified deadline"),
                left => *next = [*next, left].into_iter().flatten().min(),
            }
        }
        if !self.indexed() {
            return None;
        }
        let failed_indexes = self.failed_indexes.len() as i32;
        if self.spec.max_failed_indexes.is_some_and(|limit| failed_indexes > limit) {
            return fail("MaxFailedIndexesExceeded", "Job has exceeded the specified maximal number of failed indexes");
        }
        if failed_indexes > 0 && failed_indexes + self.succeeded_indexes.len() as i32 >= self.spec.completions.unwrap_or(0) {
            return fail("FailedIndexes", "Job has failed indexes");
        }
        policy::success(self.job, &self.succeeded_indexes).map(|message| condition("SuccessCriteriaMet", "SuccessPolicy", &message, self.now))
    }

    fn conclude(&self, plan: &mut Plan) {
        let (succeeded, failed) = self.totals(&plan.status);
        let active: Vec<Arc<PodView>> = self.pods.iter().filter(|pod| pod.active()).cloned().collect();
        let mut terminating = self.pods.iter().filter(|pod| pod.terminating()).count();
        let mut next = None;
        let mut verdict = self.verdict(&plan.status, failed, &mut next);
        let deleting = self.job.metadata.deletion_timestamp.is_some();
        let mut left = active.len();
        if verdict.is_some() {
            if self.may_act {
                left = 0;
                terminating += active.len();
                plan.delete = active.clone();
            }
        } else {
            if self.may_act && !deleting {
                self.manage(plan, &active, terminating, succeeded, &mut next);
                left = active.len() - plan.delete.len() + plan.create.len();
                terminating += plan.delete.len();
            }
            let complete = match self.spec.completions {
                None => succeeded > 0 && active.is_empty(),
                Some(completions) => succeeded >= completions && active.is_empty(),
            };
            if complete && plan.create.is_empty() {
                verdict = Some(condition("SuccessCriteriaMet", "CompletionsReached", "Reached expected number of succeeded pods", self.now));
            } else if self.may_act && !deleting {
                self.tell_suspension(plan);
            }
        }
        self.release(plan, verdict.is_some());
        let gone = |pod: &Arc<PodView>| plan.delete.iter().any(|deleted| deleted.uid() == pod.uid());
        plan.status.active = count(left as i32);
        plan.status.ready = Some(active.iter().filter(|pod| pod.ready() && !gone(pod)).count() as i32);
        plan.status.terminating = Some(terminating as i32);
        plan.next = next;
        if let Some(verdict) = verdict {
            let settled = !active.iter().any(|pod| pod.active()) && terminating == 0 && self.may_act;
            self.finish(plan, verdict, settled);
        }
    }

    /// Records the interim condition; the final one follows when every pod has ended and is in the numbers.
    fn finish(&self, plan: &mut Plan, verdict: JobCondition, settled: bool) {
        let (reason, message) = (text(&verdict.reason).to_owned(), text(&verdict.message).to_owned());
        let success = verdict.type_ == "SuccessCriteriaMet";
        if holds(&plan.status, &verdict.type_).is_none() {
            set_condition(&mut plan.status, verdict);
        }
        let uncounted = plan.status.uncounted_terminated_pods.clone().unwrap_or_default();
        if !settled || uncounted.failed.is_some() || uncounted.succeeded.is_some() || !plan.release.is_empty() {
            return;
        }
        let kind = if success { "Complete" } else { "Failed" };
        set_condition(&mut plan.status, condition(kind, &reason, &message, self.now));
        if success {
            plan.status.completion_time = Some(Time(self.now));
            plan.events.push((false, "Completed", "Job completed".into()));
        } else {
            let known = ["BackoffLimitExceeded", "DeadlineExceeded", "PodFailurePolicy", "MaxFailedIndexesExceeded", "FailedIndexes"];
            let reason = known.into_iter().find(|known| *known == reason).unwrap_or("Failed");
            plan.events.push((true, reason, message));
        }
    }

    fn tell_suspension(&self, plan: &mut Plan) {
        let suspended = self.spec.suspend.unwrap_or(false);
        let (status, reason, message, event) = if suspended {
            ("True", "JobSuspended", "Job suspended", "Suspended")
        } else {
            ("False", "JobResumed", "Job resumed", "Resumed")
        };
        let wanted = JobCondition { status: status.into(), ..condition("Suspended", reason, message, self.now) };
        if set_condition(&mut plan.status, wanted) {
            plan.status.start_time = (!suspended).then_some(Time(self.now));
            plan.events.push((false, event, message.into()));
        }
    }

    /// How many failures in a row the job has had, and when the last was.
    fn recent_failures(&self) -> (i32, Timestamp) {
        let mut ends: Vec<(Timestamp, bool)> = self.pods.iter().filter_map(|pod| {
            let succeeded = pod.phase() == "Succeeded";
            (succeeded || is_failed(pod, self.spec)).then(|| (finish_time(pod, self.now), succeeded))
        }).collect();
        ends.sort();
        let since_success = ends.iter().rev().take_while(|(_, succeeded)| !succeeded).count();
        (since_success as i32, ends.last().map_or(self.now, |(time, _)| *time))
    }

    fn manage(&self, plan: &mut Plan, active: &[Arc<PodView>], terminating: usize, succeeded: i32, next: &mut Option<Duration>) {
        if self.spec.suspend.unwrap_or(false) {
            plan.delete = active.to_vec();
            return;
        }
        let parallelism = self.spec.parallelism.unwrap_or(1).max(0);
        let wanted = match self.spec.completions {
            None if succeeded > 0 => active.len() as i32,
            None => parallelism,
            Some(completions) => (completions - succeeded).min(parallelism).max(0),
        };
        let wanted = usize::try_from(wanted).unwrap_or(0);
        plan.delete = self.surplus(active, wanted);
        let standing = active.len() - plan.delete.len();
        if !plan.delete.is_empty() {
            return;
        }
        let held = if only_failed_are_replaced(self.spec) { terminating } else { 0 };
        let missing = wanted.saturating_sub(standing + held).min(MAX_PODS);
        if missing == 0 {
            return;
        }
        if self.spec.backoff_limit_per_index.is_none() {
            let (failures, last) = self.recent_failures();
            if let Some(left) = backoff(failures, last, self.now) {
                *next = [*next, Some(left)].into_iter().flatten().min();
                return;
            }
        }
        if !self.indexed() {
            plan.create = vec![NewPod::default(); missing];
            return;
        }
        for pod in self.missing_indexes(active) {
            if plan.create.len() >= missing {
                break;
            }
            match self.index_backoff(&pod) {
                Some(left) => *next = [*next, Some(left)].into_iter().flatten().min(),
                None => plan.create.push(pod),
            }
        }
    }

    /// Pods beyond what is wanted: for indexed jobs first those of an index that has another or is none of the job's.
    fn surplus(&self, active: &[Arc<PodView>], wanted: usize) -> Vec<Arc<PodView>> {
        let mut keep: Vec<Arc<PodView>> = active.to_vec();
        keep.sort_by(|a, b| pod::deletion_order((b, 0), (a, 0), self.now));
        let mut surplus = Vec::new();
        if self.indexed() {
            let mut seen = BTreeSet::new();
            keep.retain(|pod| {
                let index = index_of(pod).filter(|index| (0..self.spec.completions.unwrap_or(0)).contains(index));
                let fits = index.is_some_and(|index| !self.succeeded_indexes.contains(index) && !self.failed_indexes.contains(index) && seen.insert(index));
                if !fits {
                    surplus.push(pod.clone());
                }
                fits
            });
            // Higher indexes go first.
            keep.sort_by_key(|pod| (!pod.ready(), index_of(pod)));
        }
        if keep.len() > wanted {
            surplus.extend(keep.drain(wanted..));
        }
        surplus
    }

    /// The indexes that have no pod, lowest first, with their history.
    fn missing_indexes(&self, active: &[Arc<PodView>]) -> Vec<NewPod> {
        let replaced_only_failed = only_failed_are_replaced(self.spec);
        let busy: BTreeSet<i32> = active.iter().chain(self.pods.iter().filter(|pod| replaced_only_failed && pod.terminating())).filter_map(|pod| index_of(pod)).collect();
        let free = (0..self.spec.completions.unwrap_or(0)).filter(|index| !busy.contains(index) && !self.succeeded_indexes.contains(*index) && !self.failed_indexes.contains(*index));
        free.map(|index| self.replacement(index)).collect()
    }

    fn last_failed(&self, index: i32) -> Option<&Arc<PodView>> {
        let failed = self.pods.iter().filter(|pod| index_of(pod) == Some(index) && is_failed(pod, self.spec));
        failed.max_by_key(|pod| (number(pod, FAILURES) + number(pod, IGNORED), pod.created()))
    }

    fn replacement(&self, index: i32) -> NewPod {
        let Some(last) = self.last_failed(index).filter(|_| self.spec.backoff_limit_per_index.is_some()) else {
            return NewPod { index: Some(index), ..NewPod::default() };
        };
        let ignored = policy::failure(self.job, last) == Failure::Ignore;
        NewPod {
            index: Some(index),
            failures: number(last, FAILURES) + i32::from(!ignored),
            ignored: number(last, IGNORED) + i32::from(ignored),
        }
    }

    fn index_backoff(&self, pod: &NewPod) -> Option<Duration> {
        self.spec.backoff_limit_per_index?;
        let last = self.last_failed(pod.index?)?;
        backoff(pod.failures + pod.ignored, finish_time(last, self.now), self.now)
    }

    /// Which pods lose the finalizer. With a limit per index, the last failure of an index stays until its replacement
    /// carries the count on.
    fn release(&self, plan: &mut Plan, ending: bool) {
        let carried = |pod: &Arc<PodView>| {
            let Some(index) = index_of(pod) else { return true };
            let mine = number(pod, FAILURES) + number(pod, IGNORED);
            let done = self.succeeded_indexes.contains(index) || self.failed_indexes.contains(index);
            done || self.pods.iter().any(|other| index_of(other) == Some(index) && other.uid() != pod.uid() && number(other, FAILURES) + number(other, IGNORED) > mine)
        };
        let per_index = self.spec.backoff_limit_per_index.is_some() && !ending && self.job.metadata.deletion_timestamp.is_none();
        let mut released: Vec<_> = self.pods.iter().filter(|pod| is_tracked(pod) && self.settled.contains(pod.uid())).cloned().collect();
        released.retain(|pod| !per_index || pod.phase() == "Succeeded" || carried(pod));
        released.sort_by_key(|pod| Reverse(pod.created()));
        plan.release = released;
    }
}

fn number(pod: &PodView, annotation: &str) -> i32 {
    pod.annotation(annotation).and_then(|text| text.parse().ok()).unwrap_or(0)
}
