//! Jobs: run pods until enough of them have succeeded.

mod indexes;
pub(crate) mod plan;
mod policy;
#[cfg(test)]
mod tests;

use std::{fmt, sync::Arc};

use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::{
    batch::v1::Job,
    core::v1::{EnvVar, EnvVarSource, ObjectFieldSelector, ObjectReference, Pod},
};
use serde_json::json;
use windlass_client::{
    events::{self, EventType, Recorder},
    informer::{Change, Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker, after},
    expectations::Expectations,
    labels,
    owner::{self, Owner},
    pod::PodView,
    podcontrol::{self, PodControl, from_template, slow_start},
    write::{self, ApiErrorExt},
};
use plan::{FAILURES, FINALIZER, IGNORED, INDEX, NewPod, Plan};

const MANAGER: &str = "kubernetes.io/job-controller";

/// A unit of work.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Item {
    Job(Key),
    /// A pod that carries our finalizer and whose job is gone.
    Orphan(Key),
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Item::Job(key) => write!(f, "job {key}"),
            Item::Orphan(key) => write!(f, "orphaned pod {key}"),
        }
    }
}

struct Controller {
    client: kube::Client,
    recorder: Recorder,
    control: PodControl,
    jobs: Informer<Job>,
    pods: Informer<PodView>,
    expectations: Arc<Expectations<Key>>,
}

/// The pod of a job, for one index if it is an indexed job.
fn new_pod(job: &Job, wanted: &NewPod) -> Pod {
    let template = job.spec.as_ref().map(|spec| spec.template.clone()).unwrap_or_default();
    let mut pod = from_template(&template, &owner::reference(job));
    pod.metadata.finalizers.get_or_insert_default().push(FINALIZER.to_owned());
    let Some(index) = wanted.index else { return pod };
    let name = job.metadata.name.as_deref().unwrap_or_default();
    let suffix = format!("-{index}-");
    // Names have 63 characters as host names; five are the server's random ones.
    let prefix: String = name.chars().take(63 - 5 - suffix.len()).collect();
    pod.metadata.generate_name = Some(format!("{prefix}{suffix}"));
    pod.metadata.labels.get_or_insert_default().insert(INDEX.into(), index.to_string());
    let annotations = pod.metadata.annotations.get_or_insert_default();
    annotations.insert(INDEX.into(), index.to_string());
    if job.spec.as_ref().is_some_and(|spec| spec.backoff_limit_per_index.is_some()) {
        annotations.insert(FAILURES.into(), wanted.failures.to_string());
        if wanted.ignored > 0 {
            annotations.insert(IGNORED.into(), wanted.ignored.to_string());
        }
    }
    let spec = pod.spec.get_or_insert_default();
    let host = format!("{name}-{index}");
    if spec.hostname.is_none() && host.len() <= 63 {
        spec.hostname = Some(host);
    }
    let variable = EnvVar {
        name: "JOB_COMPLETION_INDEX".into(),
        value_from: Some(EnvVarSource {
            field_ref: Some(ObjectFieldSelector { field_path: format!("metadata.labels['{INDEX}']"), ..ObjectFieldSelector::default() }),
            ..EnvVarSource::default()
        }),
        ..EnvVar::default()
    };
    for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
        let env = container.env.get_or_insert_default();
        if !env.iter().any(|have| have.name == variable.name) {
            env.push(variable.clone());
        }
    }
    pod
}

impl Controller {
    async fn work(self: Arc<Self>, item: Item) -> Result<Action, Error> {
        match item {
            Item::Job(key) => self.sync(key).await,
            Item::Orphan(key) => self.release_orphan(key).await,
        }
    }

    async fn sync(&self, key: Key) -> Result<Action, Error> {
        let Some(job) = self.jobs.get(&key) else {
            self.expectations.forget(&key);
            return Ok(Action::Done);
        };
        let spec = job.spec.clone().unwrap_or_default();
        if spec.managed_by.as_deref().is_some_and(|manager| manager != MANAGER) {
            return Ok(Action::Done);
        }
        let pending = self.expectations.pending(&key);
        if plan::is_finished(&job) {
            // Whatever is left of ours is let go.
            let left = self.pods.by_index("owner", job.metadata.uid.as_deref().unwrap_or_default());
            return self.release(left.into_iter().filter(|pod| plan::is_tracked(pod)).collect()).await.map(|()| Action::Done);
        }
        let selector = spec.selector.clone().unwrap_or_default();
        let mut candidates = self.pods.by_index("owner", job.metadata.uid.as_deref().unwrap_or_default());
        candidates.extend(self.pods.by_index("owner", "").into_iter().filter(|pod| pod.metadata.namespace == job.metadata.namespace));
        let owner = Owner { finalizer: Some(FINALIZER), ..Owner::of(&*job) };
        let matches = |pod: &PodView| !labels::is_empty(&selector) && labels::matches(&selector, pod.labels());
        let pods = owner.claim(&self.client, candidates, matches).await?;
        let step = plan::plan(&job, &pods, Timestamp::now(), pending.is_none());
        let next = [step.next, pending].into_iter().flatten().min();
        self.apply(&key, &job, step).await?;
        Ok(after(next))
    }

    async fn apply(&self, key: &Key, job: &Job, step: Plan) -> Result<(), Error> {
        let about = events::reference(job);
        // Deletions and creations first where they cannot lose a count: they concern pods that have not finished.
        let deleted = self.delete(key, &step, &about).await;
        let created = self.create(key, job, &step, &about).await;
        let mut status = step.status;
        if let Err((made, _)) = &created {
            // What was not made is not active.
            let missing = (step.create.len() - made) as i32;
            status.active = status.active.map(|active| active - missing).filter(|active| *active > 0);
        }
        if Some(&status) != job.status.as_ref() {
            let wanted = Job { status: Some(status), ..job.clone() };
            let written: Result<Job, Error> = write::update_status(&self.client, &wanted).await;
            match written {
                Ok(_) => {}
                Err(error) if error.is_not_found() => return Ok(()),
                Err(error) => return Err(error),
            }
            for (warning, reason, message) in step.events {
                self.recorder.event(&about, if warning { EventType::Warning } else { EventType::Normal }, reason, message);
            }
        }
        self.release(step.release).await?;
        deleted?;
        created.map_err(|(_, error)| error)
    }

    async fn delete(&self, key: &Key, step: &Plan, about: &ObjectReference) -> Result<(), Error> {
        self.expectations.expect_deletions(key, step.delete.iter().map(|pod| pod.uid().to_owned()));
        let results = join_all(step.delete.iter().map(|pod| async {
            let result = self.control.delete(pod, about).await;
            if result.is_err() {
                self.expectations.deletion_observed(key, pod.uid());
            }
            result
        }));
        results.await.into_iter().find(|result| result.as_ref().is_err_and(|error| !error.is_not_found())).unwrap_or(Ok(()))
    }

    async fn create(&self, key: &Key, job: &Job, step: &Plan, about: &ObjectReference) -> Result<(), (usize, Error)> {
        let count = step.create.len();
        self.expectations.expect_creations(key, count);
        let (made, error) = slow_start(count, |index| async move {
            let pod = new_pod(job, &step.create[index]);
            self.control.create(key.ns(), &pod, about).await.map(|_| ())
        })
        .await;
        for _ in made..count {
            self.expectations.creation_observed(key);
        }
        match error {
            Some(error) if !error.is_namespace_terminating() => Err((made, error)),
            _ => Ok(()),
        }
    }

    /// Takes our finalizer off pods.
    async fn release(&self, pods: Vec<Arc<PodView>>) -> Result<(), Error> {
        let results = join_all(pods.iter().map(|pod| async move {
            let patch = json!({"metadata": {"uid": pod.uid(), "$deleteFromPrimitiveList/finalizers": [FINALIZER]}});
            match write::strategic_patch(&self.client, &write::path(&**pod), &patch).await {
                Err(error) if !error.is_not_found() && !error.is_conflict() => Err(error),
                _ => Ok(()),
            }
        }));
        results.await.into_iter().collect()
    }

    async fn release_orphan(&self, key: Key) -> Result<Action, Error> {
        let Some(pod) = self.pods.get(&key).filter(|pod| plan::is_tracked(pod)) else { return Ok(Action::Done) };
        if let Some(owner) = owner::controller_of(&pod.metadata, "batch", "Job") {
            if self.jobs.get_in(key.ns(), &owner.name).is_some_and(|job| job.metadata.uid.as_ref() == Some(&owner.uid)) {
                return Ok(Action::Done);
            }
            // The cache may be behind: ask.
            let live: Option<Job> = write::get(&self.client, &write::object_path::<Job>(key.ns(), &owner.name)).await?;
            if live.is_some_and(|job| job.metadata.uid.as_ref() == Some(&owner.uid)) {
                return Ok(Action::Done);
            }
        }
        self.release(vec![pod]).await.map(|()| Action::Done)
    }
}

fn pod_changed(change: &Change<PodView>, jobs: &Informer<Job>, open: &Expectations<Key>, queue: &Queue<Item>) {
    let pod = change.object();
    if let Some(key) = podcontrol::observe(change, "batch", "Job", open, |key| queue.add(Item::Job(key))) {
        let owned = jobs.get(&key).is_some_and(|job| owner::is_controlled_by(&pod.metadata, job.metadata.uid.as_deref().unwrap_or_default()));
        if !owned && plan::is_tracked(pod) {
            queue.add(Item::Orphan(Key::of(&**pod)));
        }
        return queue.add(Item::Job(key));
    }
    if change.is_delete() || owner::controller(&pod.metadata).is_some() {
        return;
    }
    let selected = |job: &Arc<Job>| job.spec.as_ref().and_then(|spec| spec.selector.as_ref()).is_some_and(|selector| !labels::is_empty(selector) && labels::matches(selector, pod.labels()));
    jobs.namespace(pod.namespace()).into_iter().filter(selected).for_each(|job| queue.add(Item::Job(Key::of(&*job))));
}

/// The `job-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("job");
    let (jobs, pods) = (context.jobs(), context.pods());
    let expectations: Arc<Expectations<Key>> = Arc::default();
    {
        let (queue, expectations, pods) = (queue.clone(), expectations.clone(), pods.clone());
        jobs.on_change(move |change| {
            let replaced = change.old.as_ref().filter(|old| change.new.as_ref().is_none_or(|new| new.metadata.uid != old.metadata.uid));
            if let Some(old) = replaced {
                expectations.forget(&Key::of(&**old));
                let left = pods.by_index("owner", old.metadata.uid.as_deref().unwrap_or_default());
                left.iter().for_each(|pod| queue.add(Item::Orphan(Key::of(&**pod))));
            }
            queue.add(Item::Job(Key::of(&**change.object())));
        });
    }
    {
        let (queue, jobs, expectations) = (queue.clone(), jobs.clone(), expectations.clone());
        pods.on_change(move |change| pod_changed(change, &jobs, &expectations, &queue));
    }
    let recorder = context.recorder("job-controller");
    let control = PodControl { client: context.client.clone(), recorder: recorder.clone() };
    let controller = Arc::new(Controller { client: context.client.clone(), recorder, control, jobs, pods, expectations });
    context.worker(queue, context.config.concurrent_job_syncs, controller, Controller::work)
}
