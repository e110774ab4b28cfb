//! Deletion: preconditions, finalizers, propagation and grace, as upstream's generic store does it
//! (`registry/generic/registry/store.go`, `registry/rest/delete.go`).

use http::StatusCode;
use serde_json::{Value, json};
use windlass_api::{ApiError, meta};

use super::query::{DeleteOptions, ListOptions, Propagation};
use super::{Answer, Call, decode};
use crate::admission::Operation;
use crate::cache::Filter;
use crate::storage::{Current, Swap};

const ORPHAN: &str = "orphan";
const FOREGROUND: &str = "foregroundDeletion";
const ATTEMPTS: usize = 100;
/// Objects that one deletecollection works on at once.
const WORKERS: usize = 8;

/// DELETE of one object.
pub async fn delete(call: &Call, body: &[u8]) -> Result<Answer, ApiError> {
    let options = options(call, body)?;
    let outcome = delete_object(call, call.name(), &options).await?;
    let accepted = !outcome.gone && options.orphan_dependents == Some(false);
    let status = if accepted { StatusCode::ACCEPTED } else { StatusCode::OK };
    Ok(outcome.answer(call, status))
}

fn options(call: &Call, body: &[u8]) -> Result<DeleteOptions, ApiError> {
    match decode::delete_options(call, body)? {
        Some(document) => DeleteOptions::from_document(document),
        None => DeleteOptions::from_query(&call.query),
    }
}

/// What a deletion left.
pub(crate) struct Outcome {
    /// The object is gone (or would be, in a dry run).
    pub gone: bool,
    /// Its last state.
    pub object: Value,
    stored: Option<std::sync::Arc<crate::storage::Stored>>,
}

impl Outcome {
    fn answer(self, call: &Call, status: StatusCode) -> Answer {
        if self.gone && !returns_object(call) {
            let details = json!({"name": meta::name(&self.object), "group": call.resource.group, "kind": call.resource.plural, "uid": meta::uid(&self.object)});
            let mut document = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details});
            if call.resource.group.is_empty()
                && let Some(details) = document["details"].as_object_mut()
            {
                details.remove("group");
            }
            return Answer::Document(status, document);
        }
        match self.stored {
            Some(stored) => Answer::Stored(status, stored),
            None => Answer::Value(status, self.object),
        }
    }
}

/// Kinds whose deletion answers the object instead of a Status, as upstream's stores set `ReturnDeletedObject`.
fn returns_object(call: &Call) -> bool {
    matches!(
        (call.resource.group.as_str(), call.resource.plural.as_str()),
        (
            "",
            "pods" | "services" | "persistentvolumeclaims" | "persistentvolumes" | "serviceaccounts" | "resourcequotas" | "podtemplates"
        ) | ("storage.k8s.io", "storageclasses" | "volumeattachments" | "csidrivers" | "csinodes" | "volumeattributesclasses")
            | ("policy", "podsecuritypolicies")
            | ("resource.k8s.io", "resourceclaims" | "resourceclaimtemplates" | "deviceclasses" | "resourceslices" | "devicetaintrules")
    )
}

/// What is to be done with one object.
enum Step {
    /// Remove it now.
    Remove,
    /// Store this (a deletion timestamp, finalizers), perhaps removing it right after.
    Mark { object: Value, then_remove: bool },
    /// It is on its way already.
    Nothing,
}

/// Deletes one object by name.
pub(crate) async fn delete_object(call: &Call, name: &str, options: &DeleteOptions) -> Result<Outcome, ApiError> {
    let objects = &call.core.objects;
    let resource = &call.stored_as;
    let not_found = || ApiError::not_found(&call.resource.group, &call.resource.plural, name);
    let mut current = objects.current(resource, call.namespace(), name).await?.ok_or_else(not_found)?;
    for _ in 0..ATTEMPTS {
        let step = match step(call, name, &current, options).await {
            Ok(step) => step,
            Err(_) if !current.fresh => {
                current = objects.fresh(resource, call.namespace(), name).await?.ok_or_else(not_found)?;
                continue;
            }
            Err(error) => return Err(error),
        };
        let done = |stored: std::sync::Arc<crate::storage::Stored>, gone| Outcome { gone, object: (*stored.value()).clone(), stored: Some(stored) };
        let swap = match step {
            Step::Nothing => return Ok(done(current.stored, false)),
            Step::Remove if options.dry_run => return Ok(done(current.stored, true)),
            Step::Mark { object, then_remove } if options.dry_run => return Ok(Outcome { gone: then_remove, object, stored: None }),
            Step::Remove => match objects.remove(resource, &current).await? {
                Swap::Done(last) => {
                    call.core.hooks.after_delete(call, &last).await;
                    return Ok(done(last, true));
                }
                lost => lost,
            },
            Step::Mark { object, then_remove } => match objects.replace(resource, &current, object).await? {
                Swap::Done(stored) if then_remove => {
                    // Its grace is over: the marked object is removed at once, whoever does it.
                    current = Current { stored, fresh: true };
                    match objects.remove(resource, &current).await? {
                        Swap::Done(last) => {
                            call.core.hooks.after_delete(call, &last).await;
                            return Ok(done(last, true));
                        }
                        Swap::Gone => return Ok(done(current.stored, true)),
                        lost => lost,
                    }
                }
                Swap::Done(stored) => return Ok(done(stored, false)),
                lost => lost,
            },
        };
        match swap {
            Swap::Lost(now) => current = now,
            Swap::Gone => return Err(not_found()),
            Swap::Done(stored) => return Ok(done(stored, true)),
        }
    }
    Err(objects.contended(resource, name))
}

async fn step(call: &Call, name: &str, current: &Current, options: &DeleteOptions) -> Result<Step, ApiError> {
    let old = current.stored.value();
    check_preconditions(call, name, options, &old, current.stored.revision)?;
    if !options.skip_admission {
        let mut request = call.admission(Operation::Delete, name, None, Some(&old), &options.document, options.dry_run);
        call.core.admission.mutate(&mut request).await?;
        call.core.admission.validate(&request).await?;
        call.warnings.lock().append(&mut request.warnings.lock());
    }
    if call.is_namespace() {
        return Ok(namespace_step(&old, call.now));
    }
    if call.resource.group == "apiextensions.k8s.io" && meta::deletion_timestamp(&old).is_none() {
        let mut object = (*old).clone();
        crate::crd::mark_terminating(&mut object, call.now);
        return Ok(Step::Mark { object, then_remove: false });
    }
    let mut object = (*old).clone();
    let graceful = match graceful(call, &mut object, options) {
        Grace::AlreadyDeleting => return Ok(Step::Nothing),
        Grace::None => None,
        Grace::Seconds(seconds) => Some(seconds),
    };
    let finalizers = deletion_finalizers(&old, options);
    if let Some(list) = &finalizers {
        meta::set(&mut object, "finalizers", json!(list));
        if list.is_empty() {
            meta::remove(&mut object, "finalizers");
        }
    }
    let pending = meta::finalizers(&object).next().is_some();
    match graceful {
        Some(seconds) => Ok(Step::Mark { object, then_remove: seconds == 0 && !pending }),
        None if pending => {
            mark_deleting(&mut object, call.now);
            Ok(Step::Mark { object, then_remove: false })
        }
        None => Ok(Step::Remove),
    }
}

impl Call {
    fn is_namespace(&self) -> bool {
        self.resource.group.is_empty() && self.resource.plural == "namespaces"
    }
}

fn check_preconditions(call: &Call, name: &str, options: &DeleteOptions, old: &Value, revision: u64) -> Result<(), ApiError> {
    let conflict = |what: &str, want: &str, there: &str| {
        let why = format!("Precondition failed: {what} in precondition: {want}, {what} in object meta: {there}");
        Err(ApiError::conflict(&call.resource.group, &call.resource.plural, name, &why))
    };
    if let Some(uid) = &options.uid
        && uid != meta::uid(old)
    {
        return conflict("UID", uid, meta::uid(old));
    }
    if let Some(version) = &options.resource_version
        && *version != revision.to_string()
    {
        return conflict("ResourceVersion", version, &revision.to_string());
    }
    Ok(())
}

/// A namespace is first marked; its controller empties it and removes its finalizer; then it goes
/// (`registry/core/namespace/storage/storage.go`).
fn namespace_step(old: &Value, now: jiff::Timestamp) -> Step {
    let held = old["spec"]["finalizers"].as_array().is_some_and(|f| !f.is_empty()) || meta::finalizers(old).next().is_some();
    if meta::deletion_timestamp(old).is_none() {
        let mut object = old.clone();
        meta::set(&mut object, "deletionTimestamp", meta::now_rfc3339(now));
        object["status"]["phase"] = "Terminating".into();
        return Step::Mark { object, then_remove: !held };
    }
    if held { Step::Nothing } else { Step::Remove }
}

enum Grace {
    /// This kind has none.
    None,
    Seconds(i64),
    AlreadyDeleting,
}

/// Works out the grace and marks the object accordingly, as upstream's `rest.BeforeDelete`.
fn graceful(call: &Call, object: &mut Value, options: &DeleteOptions) -> Grace {
    let asked = options.grace.map(|g| if g < 0 { 1 } else { g });
    let strategy = call.resource.strategy;
    if let Some(when) = meta::deletion_timestamp(object).map(str::to_owned) {
        // Nothing left to wait for but finalizers.
        let Some(period) = meta::deletion_grace_period_seconds(object).filter(|p| *p != 0) else { return Grace::None };
        let Some(shorter) = asked.filter(|a| *a < period) else { return Grace::AlreadyDeleting };
        // A shorter grace than before: the moment of deletion moves closer.
        let moved = meta::parse_time(&when)
            .and_then(|t| t.checked_sub(jiff::SignedDuration::from_secs(period)).ok())
            .and_then(|t| t.checked_add(jiff::SignedDuration::from_secs(shorter)).ok())
            .unwrap_or(call.now);
        meta::set(object, "deletionTimestamp", meta::now_rfc3339(moved));
        meta::set(object, "deletionGracePeriodSeconds", shorter);
        return Grace::Seconds(shorter);
    }
    let Some(seconds) = strategy.graceful_delete(&call.context(), object, asked) else { return Grace::None };
    let when = call.now.checked_add(jiff::SignedDuration::from_secs(seconds)).unwrap_or(call.now);
    meta::set(object, "deletionTimestamp", meta::now_rfc3339(when));
    meta::set(object, "deletionGracePeriodSeconds", seconds);
    bump_generation(object);
    Grace::Seconds(seconds)
}

fn bump_generation(object: &mut Value) {
    let generation = meta::generation(object);
    if generation > 0 {
        meta::set_generation(object, generation + 1);
    }
}

/// A deletion that only finalizers hold up.
fn mark_deleting(object: &mut Value, now: jiff::Timestamp) {
    if meta::deletion_timestamp(object).is_none() {
        bump_generation(object);
        meta::set(object, "deletionTimestamp", meta::now_rfc3339(now));
    }
    meta::set(object, "deletionGracePeriodSeconds", 0);
}

/// The finalizers that make the garbage collector do what the options say; `None` if they are right already.
fn deletion_finalizers(old: &Value, options: &DeleteOptions) -> Option<Vec<String>> {
    let before: Vec<&str> = meta::finalizers(old).collect();
    let orphan = match (options.orphan_dependents, options.propagation) {
        (Some(orphan), _) => orphan,
        (None, Some(policy)) => policy == Propagation::Orphan,
        (None, None) => before.contains(&ORPHAN),
    };
    let foreground = match (options.orphan_dependents, options.propagation) {
        (Some(_), _) => false,
        (None, Some(policy)) => policy == Propagation::Foreground,
        (None, None) => before.contains(&FOREGROUND) && !orphan,
    };
    let mut after: Vec<String> = before.iter().filter(|f| **f != ORPHAN && **f != FOREGROUND).map(|f| (*f).to_owned()).collect();
    if orphan {
        after.push(ORPHAN.into());
    }
    if foreground {
        after.push(FOREGROUND.into());
    }
    let same = before.len() == after.len() && before.iter().all(|f| after.iter().any(|a| a == f));
    (!same).then_some(after)
}

/// DELETE of a collection: everything that the selectors match.
pub async fn delete_collection(call: &Call, body: &[u8]) -> Result<Answer, ApiError> {
    use futures::StreamExt;
    let list = ListOptions::parse(&call.query, false)?;
    list.fields.check(&call.resource, &call.version().name).map_err(ApiError::bad_request)?;
    let options = options(call, body)?;
    let cache = call.core.objects.require_cache(&call.stored_as)?;
    let filter = Filter::new(&call.resource, cache.fields(), Some(call.namespace()), list.labels.clone(), &list.fields);
    let listed = call.core.objects.list(&cache, &filter, list.limit, true).await?;
    let items = listed.page.items;
    let mut work: Vec<futures::future::BoxFuture<'_, Result<(), ApiError>>> = Vec::with_capacity(items.len());
    for item in &items {
        work.push(Box::pin(delete_item(call, item, &options)));
    }
    let mut results = futures::stream::iter(work).buffer_unordered(WORKERS);
    let mut failure = None;
    while let Some(result) = results.next().await {
        if let Err(error) = result
            && error.code != 404
        {
            failure.get_or_insert(error);
        }
    }
    drop(results);
    if let Some(error) = failure {
        return Err(error);
    }
    super::read::list_answer(call, items, listed.revision, None, None).map(Answer::Raw)
}

async fn delete_item(call: &Call, item: &crate::storage::Stored, options: &DeleteOptions) -> Result<(), ApiError> {
    let one = call.for_object(item.namespace(), item.name());
    delete_object(&one, item.name(), options).await.map(drop)
}
