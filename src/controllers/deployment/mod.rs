//! Deployments: roll ReplicaSets from one pod template to the next.

mod history;
pub(crate) mod plan;
mod status;

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::{
    api::{
        apps::v1::{Deployment, ReplicaSet, ReplicaSetSpec},
        core::v1::PodTemplateSpec,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use windlass_client::{
    events::{self, EventType, Recorder},
    informer::{Change, Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker, after},
    hash, labels,
    owner::{self, Owner},
    pod::PodView,
    write::{self, ApiErrorExt, Delete},
};

const HASH_LABEL: &str = "pod-template-hash";

struct Controller {
    client: kube::Client,
    recorder: Recorder,
    deployments: Informer<Deployment>,
    sets: Informer<ReplicaSet>,
    pods: Informer<PodView>,
}

/// A Deployment and its sets, parted into the one of the current template and the rest.
struct Rollout {
    deployment: Deployment,
    new: Option<Arc<ReplicaSet>>,
    old: Vec<Arc<ReplicaSet>>,
}

fn template(deployment: &Deployment) -> PodTemplateSpec {
    deployment.spec.template.clone()
}

impl Rollout {
    fn of(deployment: Deployment, mut sets: Vec<Arc<ReplicaSet>>) -> Self {
        sets.sort_by_key(|set| plan::age_key(set));
        let wanted = hash::canonical_template(&template(&deployment));
        let is_new = |set: &Arc<ReplicaSet>| {
            set.spec.template.as_ref().is_some_and(|template| hash::canonical_template(template) == wanted)
        };
        let new = sets.iter().position(is_new).map(|index| sets.remove(index));
        Rollout { deployment, new, old: sets }
    }

    fn all(&self) -> Vec<Arc<ReplicaSet>> {
        self.old.iter().chain(&self.new).cloned().collect()
    }
}

/// The name of a set: the Deployment's, shortened if it must be, and the hash.
fn set_name(deployment: &str, hash: &str) -> String {
    let room = 253 - 1 - hash.len();
    format!("{}-{hash}", deployment.get(..room.min(deployment.len())).unwrap_or(deployment))
}

/// The set for the current template; its size is filled in by the caller.
fn new_set(deployment: &Deployment, size: i32, revision: i64) -> ReplicaSet {
    let spec = deployment.spec.clone();
    let hash = hash::of_template(&spec.template, deployment.status.as_ref().and_then(|status| status.collision_count));
    let mut template = spec.template;
    let labels = template.metadata.get_or_insert_default().labels.get_or_insert_default();
    labels.insert(HASH_LABEL.into(), hash.clone());
    let labels = labels.clone();
    let mut selector = spec.selector;
    selector.match_labels.get_or_insert_default().insert(HASH_LABEL.into(), hash.clone());
    let mut annotations = std::collections::BTreeMap::new();
    history::note_current(&mut annotations, deployment, revision);
    history::note_replicas(&mut annotations, deployment);
    ReplicaSet {
        metadata: ObjectMeta {
            name: Some(set_name(deployment.metadata.name.as_deref().unwrap_or_default(), &hash)),
            namespace: deployment.metadata.namespace.clone(),
            labels: Some(labels),
            annotations: Some(annotations),
            owner_references: Some(vec![owner::reference(deployment)]),
            ..ObjectMeta::default()
        },
        spec: ReplicaSetSpec {
            replicas: Some(size),
            min_ready_seconds: spec.min_ready_seconds,
            selector,
            template: Some(template),
        },
        status: None,
    }
}

impl Controller {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(cached) = self.deployments.get(&key) else { return Ok(Action::Done) };
        let deployment = (*cached).clone();
        let selector = deployment.spec.selector.clone();
        if labels::is_empty(&selector) {
            let message = "This deployment is selecting all pods. A non-empty selector is required.".to_owned();
            self.recorder.event(&events::reference(&deployment), EventType::Warning, "SelectingAll", message);
            return Ok(Action::Done);
        }
        let candidates = self.sets.namespace(key.ns());
        let matches = |set: &ReplicaSet| labels::matches(&selector, labels::of(&set.metadata.labels));
        let sets = Owner::of(&deployment).claim(&self.client, candidates, matches).await?;
        let mut rollout = Rollout::of(deployment, sets);
        if rollout.deployment.metadata.deletion_timestamp.is_some() {
            return self.finish(rollout, false).await;
        }
        if let Some(condition) = status::pause_change(&rollout.deployment, Timestamp::now()) {
            status::set(rollout.deployment.status.get_or_insert_default(), condition);
            rollout.deployment = write::update_status(&self.client, &rollout.deployment).await?;
        }
        let paused = rollout.deployment.spec.paused.unwrap_or(false);
        if !paused && history::rollback_to(&rollout.deployment).is_some() {
            return self.roll_back(rollout).await;
        }
        if paused || plan::is_scaling_event(&rollout.deployment, &rollout.all()) {
            return self.scale(rollout, paused).await;
        }
        if plan::is_rolling(&rollout.deployment) { self.roll(rollout).await } else { self.recreate(rollout).await }
    }

    /// Makes sure that the current template's set exists (if `create`) and carries the current revision.
    async fn ensure_new(&self, rollout: &mut Rollout, create: bool) -> Result<(), Error> {
        let revision = history::max_revision(&rollout.old) + 1;
        let now = Timestamp::now();
        let Some(existing) = rollout.new.clone() else {
            return if create { self.create_new(rollout, revision).await } else { Ok(()) };
        };
        let min_ready = rollout.deployment.spec.min_ready_seconds;
        let mut set = (*existing).clone();
        let annotated = history::note_current(set.metadata.annotations.get_or_insert_default(), &rollout.deployment, revision);
        let spec = &mut set.spec;
        if annotated || spec.min_ready_seconds.unwrap_or(0) != min_ready.unwrap_or(0) {
            spec.min_ready_seconds = min_ready;
            rollout.new = Some(Arc::new(write::update(&self.client, &set).await?));
            return Ok(());
        }
        let deployment = &mut rollout.deployment;
        let mut changed = false;
        if let Some(noted) = set.metadata.annotations.as_ref().and_then(|all| all.get(history::REVISION)) {
            let had = deployment.metadata.annotations.get_or_insert_default().insert(history::REVISION.into(), noted.clone());
            changed = had.as_ref() != Some(noted);
        }
        let known = deployment.status.get_or_insert_default();
        if status::find(known, "Progressing").is_none() && deployment.spec.progress_deadline_seconds.is_some_and(|s| s != i32::MAX) {
            let message = format!("Found new replica set {:?}", set.metadata.name.as_deref().unwrap_or_default());
            status::set(known, status::condition("Progressing", "True", status::FOUND_SET, message, now));
            changed = true;
        }
        if changed {
            rollout.deployment = write::update_status(&self.client, &rollout.deployment).await?;
        }
        Ok(())
    }

    async fn create_new(&self, rollout: &mut Rollout, revision: i64) -> Result<(), Error> {
        let asked: i32 = rollout.old.iter().map(|set| plan::size(set)).sum();
        let size = plan::new_size(&rollout.deployment, asked, 0);
        let set = new_set(&rollout.deployment, size, revision);
        let name = set.metadata.name.clone().unwrap_or_default();
        let path = write::collection_path::<ReplicaSet>(set.metadata.namespace.as_deref().unwrap_or_default());
        let about = events::reference(&rollout.deployment);
        let now = Timestamp::now();
        let created: ReplicaSet = match write::create(&self.client, &path, &write::wire(&set)).await {
            Ok(created) => {
                if size > 0 {
                    self.recorder.event(&about, EventType::Normal, "ScalingReplicaSet", format!("Scaled up replica set {name} from 0 to {size}"));
                }
                created
            }
            Err(error) if error.is_already_exists() => return self.already_exists(rollout, &set, error).await,
            Err(error) if error.is_namespace_terminating() => return Err(error),
            Err(error) => {
                let message = format!("Failed to create new replica set {name:?}: {}", write::message(&error));
                self.recorder.event(&about, EventType::Warning, status::CREATE_ERROR, message.clone());
                if status::deadline(&rollout.deployment).is_some() {
                    let condition = status::condition("Progressing", "False", status::CREATE_ERROR, message, now);
                    status::set(rollout.deployment.status.get_or_insert_default(), condition);
                    let written: Result<Deployment, Error> = write::update_status(&self.client, &rollout.deployment).await;
                    if let Err(second) = written {
                        tracing::debug!(%second, "the failure could not be written into the status");
                    }
                }
                return Err(error);
            }
        };
        rollout.new = Some(Arc::new(created));
        let deployment = &mut rollout.deployment;
        deployment.metadata.annotations.get_or_insert_default().insert(history::REVISION.into(), revision.to_string());
        if status::deadline(deployment).is_some() {
            let message = format!("Created new replica set {name:?}");
            status::set(deployment.status.get_or_insert_default(), status::condition("Progressing", "True", status::NEW_SET, message, now));
        }
        rollout.deployment = write::update_status(&self.client, &rollout.deployment).await?;
        Ok(())
    }

    /// The name is taken: by our own set that the cache does not show yet, or by another template with the same hash.
    async fn already_exists(&self, rollout: &mut Rollout, wanted: &ReplicaSet, error: Error) -> Result<(), Error> {
        let existing: Option<ReplicaSet> = write::get(&self.client, &write::path(wanted)).await?;
        let Some(existing) = existing else { return Err(error) };
        let uid = rollout.deployment.metadata.uid.as_deref().unwrap_or_default();
        let same = existing.spec.template.as_ref().is_some_and(|t| hash::equal_templates(t, &template(&rollout.deployment)));
        if owner::is_controlled_by(&existing.metadata, uid) && same {
            rollout.new = Some(Arc::new(existing));
            return Ok(());
        }
        *rollout.deployment.status.get_or_insert_default().collision_count.get_or_insert(0) += 1;
        let _: Deployment = write::update_status(&self.client, &rollout.deployment).await?;
        Err(error)
    }

    /// Gives a set its size and the notes about the Deployment's; tells by event.
    async fn resize(&self, deployment: &Deployment, step: &plan::Resize) -> Result<(), Error> {
        let from = plan::size(&step.set);
        if !step.force && from == step.to {
            return Ok(());
        }
        let mut set = (*step.set).clone();
        let noted = history::note_replicas(set.metadata.annotations.get_or_insert_default(), deployment);
        if !noted && from == step.to {
            return Ok(());
        }
        set.spec.replicas = Some(step.to);
        let _: ReplicaSet = write::update(&self.client, &set).await?;
        if from != step.to {
            let direction = if from < step.to { "up" } else { "down" };
            let name = set.metadata.name.as_deref().unwrap_or_default();
            let message = format!("Scaled {direction} replica set {name} from {from} to {}", step.to);
            self.recorder.event(&events::reference(deployment), EventType::Normal, "ScalingReplicaSet", message);
        }
        Ok(())
    }

    async fn scale(&self, mut rollout: Rollout, paused: bool) -> Result<Action, Error> {
        self.ensure_new(&mut rollout, false).await?;
        for step in plan::scale(&rollout.deployment, rollout.new.as_ref(), &rollout.old) {
            self.resize(&rollout.deployment, &step).await?;
        }
        if paused && history::rollback_to(&rollout.deployment).is_none() {
            self.clean_up(&rollout).await?;
        }
        self.finish(rollout, false).await
    }

    async fn roll(&self, mut rollout: Rollout) -> Result<Action, Error> {
        self.ensure_new(&mut rollout, true).await?;
        let Some(new) = rollout.new.clone() else { return Ok(Action::Done) };
        let steps = plan::rolling(&rollout.deployment, &new, &rollout.old);
        for step in &steps {
            self.resize(&rollout.deployment, step).await?;
        }
        if steps.is_empty() {
            self.clean_up_if_complete(&rollout).await?;
        }
        self.finish(rollout, true).await
    }

    async fn recreate(&self, mut rollout: Rollout) -> Result<Action, Error> {
        self.ensure_new(&mut rollout, false).await?;
        let running: Vec<_> = rollout.old.iter().filter(|set| plan::size(set) > 0).cloned().collect();
        for set in &running {
            self.resize(&rollout.deployment, &plan::Resize { set: set.clone(), to: 0, force: false }).await?;
        }
        if !running.is_empty() || self.old_pods_running(&rollout) {
            return self.finish(rollout, true).await;
        }
        self.ensure_new(&mut rollout, true).await?;
        if let Some(set) = rollout.new.clone() {
            let to = plan::replicas(&rollout.deployment);
            self.resize(&rollout.deployment, &plan::Resize { set, to, force: false }).await?;
        }
        self.clean_up_if_complete(&rollout).await?;
        self.finish(rollout, true).await
    }

    fn old_pods_running(&self, rollout: &Rollout) -> bool {
        let counted = rollout.old.iter().any(|set| set.status.as_ref().is_some_and(|status| status.replicas > 0));
        let uids = rollout.old.iter().filter_map(|set| set.metadata.uid.as_deref());
        counted || uids.flat_map(|uid| self.pods.by_index("owner", uid)).any(|pod| !pod.finished())
    }

    async fn clean_up_if_complete(&self, rollout: &Rollout) -> Result<(), Error> {
        let known = rollout.deployment.status.clone().unwrap_or_default();
        if status::complete(&rollout.deployment, &known) { self.clean_up(rollout).await } else { Ok(()) }
    }

    async fn clean_up(&self, rollout: &Rollout) -> Result<(), Error> {
        for set in plan::surplus(&rollout.deployment, &rollout.old) {
            let how = Delete { uid: set.metadata.uid.as_deref(), ..Delete::default() };
            write::delete(&self.client, &write::path(&*set), how).await?;
        }
        Ok(())
    }

    /// Writes the status; `judge`: whether progress is judged (a rollout) or only counted (a resize, a deletion).
    async fn finish(&self, rollout: Rollout, judge: bool) -> Result<Action, Error> {
        let Rollout { mut deployment, new, old } = rollout;
        let now = Timestamp::now();
        let status = if judge { status::rollout } else { status::counts }(&deployment, new.as_ref(), &old, now);
        let next = status::check_in(&deployment, &status, now);
        if !status::same(&status, &deployment.status.clone().unwrap_or_default()) {
            deployment.status = Some(status);
            let result: Result<Deployment, Error> = write::update_status(&self.client, &deployment).await;
            match result {
                Ok(_) => {}
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(after(next))
    }

    /// `kubectl rollout undo` of old clients, by annotation.
    async fn roll_back(&self, mut rollout: Rollout) -> Result<Action, Error> {
        self.ensure_new(&mut rollout, true).await?;
        let asked = history::rollback_to(&rollout.deployment).unwrap_or(0);
        let sets = rollout.all();
        let target = if asked == 0 { history::last_revision(&sets) } else { asked };
        let about = events::reference(&rollout.deployment);
        let found = sets.iter().find(|set| target != 0 && history::revision(&set.metadata) == target);
        let mut deployment = rollout.deployment.clone();
        let name = deployment.metadata.name.clone().unwrap_or_default();
        deployment.metadata.annotations.get_or_insert_default().remove(history::ROLLBACK);
        let (kind, reason, message) = match found {
            None if target == 0 => (EventType::Warning, "DeploymentRollbackRevisionNotFound", "Unable to find last revision.".to_owned()),
            None => (EventType::Warning, "DeploymentRollbackRevisionNotFound", "Unable to find the revision to rollback to.".to_owned()),
            Some(set) => {
                let mut old = set.spec.template.clone().unwrap_or_default();
                if hash::equal_templates(&old, &template(&deployment)) {
                    let message = format!("The rollback revision contains the same template as current deployment {name:?}");
                    (EventType::Warning, "DeploymentRollbackTemplateUnchanged", message)
                } else {
                    if let Some(labels) = old.metadata.as_mut().and_then(|metadata| metadata.labels.as_mut()) {
                        labels.remove(HASH_LABEL);
                    }
                    deployment.spec.template = old;
                    let annotations = deployment.metadata.annotations.get_or_insert_default();
                    annotations.retain(|key, _| history::is_own(key));
                    let theirs = set.metadata.annotations.iter().flatten().filter(|(key, _)| !history::is_own(key));
                    annotations.extend(theirs.map(|(key, value)| (key.clone(), value.clone())));
                    (EventType::Normal, "DeploymentRollback", format!("Rolled back deployment {name:?} to revision {target}"))
                }
            }
        };
        let _: Deployment = write::update(&self.client, &deployment).await?;
        self.recorder.event(&about, kind, reason, message);
        Ok(Action::Done)
    }
}

/// Wakes the Deployment of a set, or those that may want an orphan.
fn set_changed(change: &Change<ReplicaSet>, deployments: &Informer<Deployment>, queue: &Queue<Key>) {
    let namespace = |set: &ReplicaSet| set.metadata.namespace.clone().unwrap_or_default();
    let owner_key = |set: &ReplicaSet| owner::controller_of(&set.metadata, "apps", "Deployment").map(|owner| Key::new(&namespace(set), &owner.name));
    let set = change.object();
    let keys = [change.old.as_deref().and_then(owner_key), change.new.as_deref().and_then(owner_key)];
    let mut owned = false;
    for key in keys.into_iter().flatten() {
        queue.add(key);
        owned = true;
    }
    if owned || change.is_delete() {
        return;
    }
    for deployment in deployments.namespace(&namespace(set)) {
        let selector = Some(&deployment.spec.selector);
        if selector.is_some_and(|selector| !labels::is_empty(selector) && labels::matches(selector, labels::of(&set.metadata.labels))) {
            queue.add(Key::of(&*deployment));
        }
    }
}

/// The `deployment-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("deployment");
    let (deployments, sets, pods) = (context.deployments(), context.replica_sets(), context.pods());
    {
        let queue = queue.clone();
        deployments.on_change(move |change| queue.add(Key::of(&**change.object())));
    }
    {
        let (queue, deployments) = (queue.clone(), deployments.clone());
        sets.on_change(move |change| set_changed(change, &deployments, &queue));
    }
    {
        // Only a Recreate rollout waits for pods: for the last one to be gone or finished.
        let (queue, deployments, sets) = (queue.clone(), deployments.clone(), sets.clone());
        pods.on_change(move |change| {
            let Some(old) = &change.old else { return };
            if !(change.is_delete() || change.object().finished() && !old.finished()) {
                return;
            }
            let Some(set) = owner::controller_of(&old.metadata, "apps", "ReplicaSet").and_then(|owner| sets.get_in(old.namespace(), &owner.name)) else { return };
            let Some(owner) = owner::controller_of(&set.metadata, "apps", "Deployment") else { return };
            if deployments.get_in(old.namespace(), &owner.name).is_some_and(|deployment| !plan::is_rolling(&deployment)) {
                queue.add(Key::new(old.namespace(), &owner.name));
            }
        });
    }
    let recorder = context.recorder("deployment-controller");
    let controller = Arc::new(Controller { client: context.client.clone(), recorder, deployments, sets, pods });
    context.worker(queue, context.config.concurrent_deployment_syncs, controller, Controller::sync)
}

