//! StatefulSets: pods with names, order and storage of their own.

mod plan;

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::{
    api::{
        apps::v1::{ControllerRevision, StatefulSet, StatefulSetStatus},
        core::v1::{PersistentVolumeClaim, PodTemplateSpec},
    },
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};
use serde_json::{Value, json};
use windlass_client::{
    events::{self, EventType, Recorder},
    informer::{Change, Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker, after},
    labels,
    owner::{self, Owner},
    pod::PodView,
    revision::{self, Current},
    write::{self, ApiErrorExt, Delete},
};
use plan::{ClaimOwner, Pods, Revisions, Step};

struct Controller {
    client: kube::Client,
    recorder: Recorder,
    sets: Informer<StatefulSet>,
    pods: Informer<PodView>,
    claims: Informer<PersistentVolumeClaim>,
    revisions: Informer<ControllerRevision>,
}

fn namespace(set: &StatefulSet) -> &str {
    set.metadata.namespace.as_deref().unwrap_or_default()
}

fn set_name(set: &StatefulSet) -> &str {
    set.metadata.name.as_deref().unwrap_or_default()
}

/// The status that follows from the pods. When an update has reached every pod, its revision becomes the current one.
fn status_of(set: &StatefulSet, pods: &Pods, revisions: &Revisions<'_>, now: Timestamp) -> StatefulSetStatus {
    let counts = plan::counts(set, pods, revisions, now);
    let known = set.status.clone().unwrap_or_default();
    let complete = !plan::is_on_delete(set) && counts.updated == plan::replicas(set) && counts.updated == counts.replicas && counts.updated == counts.ready;
    let (current, current_revision) = if complete { (counts.updated, revisions.update) } else { (counts.current, revisions.current) };
    let some = |number: i32| (number != 0).then_some(number);
    StatefulSetStatus {
        replicas: counts.replicas,
        ready_replicas: some(counts.ready),
        available_replicas: Some(counts.available),
        current_replicas: some(current),
        updated_replicas: some(counts.updated),
        current_revision: Some(current_revision.to_owned()),
        update_revision: Some(revisions.update.to_owned()),
        collision_count: Some(known.collision_count.unwrap_or(0)),
        observed_generation: set.metadata.generation,
        conditions: known.conditions,
    }
}

fn same_status(a: &StatefulSetStatus, b: &StatefulSetStatus) -> bool {
    let numbers = |s: &StatefulSetStatus| [s.ready_replicas, s.available_replicas, s.current_replicas, s.updated_replicas, s.collision_count].map(|number| number.unwrap_or(0));
    numbers(a) == numbers(b)
        && a.replicas == b.replicas
        && a.current_revision == b.current_revision
        && a.update_revision == b.update_revision
        && a.observed_generation == b.observed_generation
}

impl Controller {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(set) = self.sets.get(&key) else { return Ok(Action::Done) };
        let selector = &set.spec.selector;
        if labels::is_empty(selector) {
            return Ok(Action::Done);
        }
        let history = revision::history(&self.client, &*set, self.revisions.namespace(key.ns()), selector).await?;
        let mut candidates = self.pods.by_index("owner", set.metadata.uid.as_deref().unwrap_or_default());
        candidates.extend(self.pods.by_index("owner", "").into_iter().filter(|pod| pod.metadata.namespace == set.metadata.namespace));
        let matches = |pod: &PodView| labels::matches(selector, pod.labels()) && plan::ordinal(&set, pod).is_some();
        let all = Owner::of(&*set).claim(&self.client, candidates, matches).await?;
        let collisions = set.status.as_ref().and_then(|status| status.collision_count);
        let update = match revision::current(&self.client, &*set, &set.spec.template, &history, collisions).await? {
            Current::Is(revision) => revision,
            Current::Collision => return self.collide(&set).await,
        };
        let wanted = set.status.as_ref().and_then(|status| status.current_revision.as_deref()).unwrap_or_default();
        let current = history.iter().find(|revision| revision::name(revision) == wanted).unwrap_or(&update).clone();
        let revisions = Revisions { current: revision::name(&current), update: revision::name(&update) };
        let pods = plan::arrange(&set, &all);
        let now = Timestamp::now();
        self.own_claims(&set, &pods).await?;
        let mut result = Ok(());
        let mut next = None;
        if set.metadata.deletion_timestamp.is_none() {
            let step = plan::plan(&set, &pods, &revisions, now);
            next = step.next;
            for step in step.steps {
                result = self.apply(&set, &pods, step, [&current, &update]).await;
                if result.is_err() {
                    break;
                }
            }
        }
        let status = status_of(&set, &pods, &revisions, now);
        if !same_status(&status, &set.status.clone().unwrap_or_default()) {
            let written: Result<StatefulSet, Error> = write::update_status(&self.client, &StatefulSet { status: Some(status), ..(*set).clone() }).await;
            match written {
                Err(error) if !error.is_not_found() => return Err(result.err().unwrap_or(error)),
                _ => {}
            }
        }
        result?;
        let in_use = |revision: &ControllerRevision| {
            let name = revision::name(revision);
            name == revisions.current || name == revisions.update || all.iter().any(|pod| pod.label(revision::LABEL) == Some(name))
        };
        revision::trim(&self.client, &history, set.spec.revision_history_limit.unwrap_or(10), in_use).await?;
        Ok(after(next))
    }

    async fn collide(&self, set: &StatefulSet) -> Result<Action, Error> {
        let mut set = set.clone();
        *set.status.get_or_insert_default().collision_count.get_or_insert(0) += 1;
        let _: StatefulSet = write::update_status(&self.client, &set).await?;
        Ok(Action::Done)
    }

    async fn apply(&self, set: &StatefulSet, pods: &Pods, step: Step, revisions: [&Arc<ControllerRevision>; 2]) -> Result<(), Error> {
        let find = |name: &str| pods.wanted.values().chain(pods.surplus.values()).find(|pod| pod.name() == name);
        match step {
            Step::Create { ordinal, revision } => {
                let of_revision = revisions.iter().find(|candidate| revision::name(candidate) == revision).and_then(|revision| revision::template(revision));
                let template = of_revision.unwrap_or_else(|| set.spec.template.clone());
                self.create(set, &template, &revision, ordinal).await
            }
            Step::Delete(name) => match find(&name) {
                Some(pod) => self.delete(set, pod).await,
                None => Ok(()),
            },
            Step::Replace(name) => match find(&name) {
                Some(pod) => {
                    let reason = if pod.phase() == "Failed" { "RecreatingFailedPod" } else { "RecreatingTerminatedPod" };
                    let message = format!("StatefulSet {}/{} is recreating {} Pod {name}", namespace(set), set_name(set), pod.phase().to_lowercase());
                    self.recorder.event(&events::reference(set), EventType::Warning, reason, message);
                    self.delete(set, pod).await
                }
                None => Ok(()),
            },
            Step::Relabel { ordinal } => {
                let Some(pod) = pods.wanted.get(&ordinal) else { return Ok(()) };
                let patch = json!({"metadata": {"uid": pod.uid(), "labels": {plan::POD_NAME: pod.name(), plan::POD_INDEX: ordinal.to_string()}}});
                write::merge_patch(&self.client, &write::path(&**pod), &patch).await.map(drop)
            }
        }
    }

    async fn create(&self, set: &StatefulSet, template: &PodTemplateSpec, revision: &str, ordinal: i32) -> Result<(), Error> {
        let about = events::reference(set);
        let pod = plan::new_pod(set, template, revision, ordinal);
        let name = pod.metadata.name.clone().unwrap_or_default();
        for mut claim in plan::claims(set, ordinal) {
            let claim_name = claim.metadata.name.clone().unwrap_or_default();
            if let Some(existing) = self.claims.get_in(namespace(set), &claim_name) {
                if existing.metadata.deletion_timestamp.is_some() {
                    return Err(Error::Invalid(format!("pvc {claim_name} is being deleted")));
                }
                continue;
            }
            if plan::claim_owner(set, false) == ClaimOwner::Set {
                claim.metadata.owner_references = Some(vec![owner::reference(set)]);
            }
            let path = write::collection_path::<PersistentVolumeClaim>(namespace(set));
            match write::create::<Value>(&self.client, &path, &write::wire(&claim)).await {
                Ok(_) => {
                    let message = format!("create Claim {claim_name} Pod {name} in StatefulSet {} success", set_name(set));
                    self.recorder.event(&about, EventType::Normal, "SuccessfulCreate", message);
                }
                Err(error) if error.is_already_exists() => {}
                Err(error) => {
                    let message = format!("create Claim {claim_name} for Pod {name} in StatefulSet {} failed error: {}", set_name(set), write::message(&error));
                    self.recorder.event(&about, EventType::Warning, "FailedCreate", message);
                    return Err(error);
                }
            }
        }
        let path = write::collection_path::<k8s_openapi::api::core::v1::Pod>(namespace(set));
        match write::create::<Value>(&self.client, &path, &write::wire(&pod)).await {
            Ok(_) => {
                let message = format!("create Pod {name} in StatefulSet {} successful", set_name(set));
                self.recorder.event(&about, EventType::Normal, "SuccessfulCreate", message);
                Ok(())
            }
            // The cache does not show our last one yet, or one that is not ours holds the name: its going will wake us.
            Err(error) if error.is_already_exists() && self.pods.get_in(namespace(set), &name).is_none() => Ok(()),
            Err(error) if error.is_namespace_terminating() => Ok(()),
            Err(error) => {
                let message = format!("create Pod {name} in StatefulSet {} failed error: {}", set_name(set), write::message(&error));
                self.recorder.event(&about, EventType::Warning, "FailedCreate", message);
                Err(error)
            }
        }
    }

    async fn delete(&self, set: &StatefulSet, pod: &PodView) -> Result<(), Error> {
        let about = events::reference(set);
        let deleted = write::delete(&self.client, &write::path(pod), Delete { uid: Some(pod.uid()), ..Delete::default() }).await;
        match deleted {
            Ok(true) => {
                let message = format!("delete Pod {} in StatefulSet {} successful", pod.name(), set_name(set));
                self.recorder.event(&about, EventType::Normal, "SuccessfulDelete", message);
                Ok(())
            }
            Ok(false) => Ok(()),
            Err(error) => {
                let message = format!("delete Pod {} in StatefulSet {} failed error: {}", pod.name(), set_name(set), write::message(&error));
                self.recorder.event(&about, EventType::Warning, "FailedDelete", message);
                Err(error)
            }
        }
    }

    /// Makes the set's claims belong to whom the retention policy says.
    async fn own_claims(&self, set: &StatefulSet, pods: &Pods) -> Result<(), Error> {
        if set.spec.volume_claim_templates.iter().flatten().next().is_none() {
            return Ok(());
        }
        let placed = pods.wanted.iter().map(|entry| (entry, false)).chain(pods.surplus.iter().map(|entry| (entry, true)));
        for ((ordinal, pod), surplus) in placed {
            let wanted = match plan::claim_owner(set, surplus) {
                ClaimOwner::Nobody => None,
                ClaimOwner::Set => Some(owner::reference(set)),
                ClaimOwner::Pod => Some(OwnerReference { controller: None, block_owner_deletion: None, ..owner::reference(&**pod) }),
            };
            for template in set.spec.volume_claim_templates.iter().flatten() {
                let Some(claim) = self.claims.get_in(namespace(set), &plan::claim_name(set, template, *ordinal)) else { continue };
                self.own_claim(set, &claim, wanted.as_ref()).await?;
            }
        }
        Ok(())
    }

    async fn own_claim(&self, set: &StatefulSet, claim: &PersistentVolumeClaim, wanted: Option<&OwnerReference>) -> Result<(), Error> {
        let have = claim.metadata.owner_references.clone().unwrap_or_default();
        // Only references that this set (or a pod of it) put there are ours to change.
        let ours = |reference: &OwnerReference| {
            let of_set = reference.kind == "StatefulSet" && reference.name == set_name(set);
            of_set || reference.kind == "Pod" && reference.name.rsplit_once('-').is_some_and(|(parent, _)| parent == set_name(set))
        };
        let mut after: Vec<OwnerReference> = have.iter().filter(|reference| !ours(reference)).cloned().collect();
        after.extend(wanted.cloned());
        let uids = |references: &[OwnerReference]| references.iter().map(|reference| reference.uid.clone()).collect::<Vec<_>>();
        if uids(&after) == uids(&have) {
            return Ok(());
        }
        let patch = json!({"metadata": {"uid": claim.metadata.uid, "resourceVersion": claim.metadata.resource_version, "ownerReferences": after}});
        match write::merge_patch(&self.client, &write::path(claim), &patch).await {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }
}

fn pod_changed(change: &Change<PodView>, sets: &Informer<StatefulSet>, queue: &Queue<Key>) {
    let owner_key = |pod: &PodView| owner::controller_of(&pod.metadata, "apps", "StatefulSet").map(|owner| Key::new(pod.namespace(), &owner.name));
    let pod = change.object();
    let keys = [change.old.as_deref().and_then(owner_key), change.new.as_deref().and_then(owner_key)];
    let mut owned = false;
    for key in keys.into_iter().flatten() {
        owned = true;
        queue.add(key);
    }
    if owned || owner::controller(&pod.metadata).is_some() {
        return;
    }
    // An orphan to adopt; or, when it goes, one that held a name of ours.
    for set in sets.namespace(pod.namespace()) {
        let selected = !labels::is_empty(&set.spec.selector) && labels::matches(&set.spec.selector, pod.labels());
        if plan::ordinal(&set, pod).is_some() && (selected || change.is_delete()) {
            queue.add(Key::of(&*set));
        }
    }
}

/// The `statefulset-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("statefulset");
    let (sets, pods, claims) = (context.stateful_sets(), context.pods(), context.claims());
    {
        let queue = queue.clone();
        sets.on_change(move |change| queue.add(Key::of(&**change.object())));
    }
    {
        let (queue, sets) = (queue.clone(), sets.clone());
        pods.on_change(move |change| pod_changed(change, &sets, &queue));
    }
    let recorder = context.recorder("statefulset-controller");
    let controller = Arc::new(Controller { client: context.client.clone(), recorder, sets, pods, claims, revisions: context.controller_revisions() });
    context.worker(queue, context.config.concurrent_statefulset_syncs, controller, Controller::sync)
}
