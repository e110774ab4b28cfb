//! Create, update and patch.
//!
//! The steps are upstream's (`endpoints/handlers/{create,update,patch}.go`, `registry/generic/registry/store.go`); create, PUT and
//! all patches differ only in where the new object comes from ([`Source`]).

use http::StatusCode;
use serde_json::Value;
use windlass_api::patch::apply::Writer;
use windlass_api::{ApiError, meta};

use super::decode::{self, Expected};
use super::patch::Patch;
use super::query::{Query, Write, WriteOptions};
use super::{Answer, Call, keep_system_fields};
use crate::admission::{AdmissionRequest, Operation};
use crate::content;
use crate::hooks::Hold;
use crate::storage::{Current, Swap, fill_identity};

/// How often a write that names no version starts again when others are faster, as upstream's patch.
const PATCH_ATTEMPTS: usize = 5;
/// How often an unconditional PUT does.
const PUT_ATTEMPTS: usize = 100;
/// How many generated names are tried.
const NAME_ATTEMPTS: usize = 8;
/// What a generated name may be long without its random end.
const NAME_BASE: usize = 58;

/// Where the new object comes from.
pub(crate) enum Source {
    /// A PUT's body, in the storage version.
    Body(Value),
    Patch(Patch),
    /// A change that a subresource with a kind of its own makes (scale): from the stored object to the new one.
    Change(Box<dyn Fn(&Value) -> Result<Value, ApiError> + Send + Sync>),
}

/// POST of an object.
pub async fn create(call: &Call, body: &[u8]) -> Result<Answer, ApiError> {
    if let Some(definition) = &call.resource.definition
        && call.core.definitions.is_terminating(&definition.name)
    {
        let mut error = ApiError::method_not_supported(&call.resource.group, &call.resource.plural, "create");
        error.message = "create not allowed while custom resource definition is terminating".into();
        return Err(error);
    }
    let options = WriteOptions::parse(&call.query, Write::Create)?;
    let media = content::input_media(&call.headers, !call.resource.custom)?;
    let mut object = decode::object(call, body, media, &Expected::object(call), options.validation)?;
    match_namespace(call, &mut object)?;
    if meta::resource_version(&object).is_some_and(|rv| rv != 0) {
        return Err(ApiError::bad_request("resourceVersion should not be set on objects to be created"));
    }
    warn_duplicate_owners(call, &mut object);
    let mut object = call.to_storage(object)?;
    wipe_system_fields(&mut object);
    call.resource.strategy.defaults(&call.context(), &mut object);
    writer(call, &options).update_managed(None, &mut object);
    create_object(call, object, &options).await
}

/// From a decoded, defaulted object to a stored one.
pub(crate) async fn create_object(call: &Call, object: Value, options: &WriteOptions) -> Result<Answer, ApiError> {
    let name = meta::name(&object).to_owned();
    let mut request = call.admission(Operation::Create, &name, Some(object), None, &options.document, options.dry_run);
    call.core.admission.mutate(&mut request).await?;
    call.warnings.lock().append(&mut request.warnings.lock());
    let object = request.object.take().unwrap_or_default();
    let generated = meta::name(&object).is_empty() && !meta::generate_name(&object).is_empty();
    let attempts = if generated { NAME_ATTEMPTS } else { 1 };
    let mut attempt = 1;
    loop {
        match create_once(call, object.clone(), options).await {
            Err(error) if error.reason == "AlreadyExists" && attempt < attempts => attempt += 1,
            Err(error) if error.reason == "AlreadyExists" && generated => {
                let base = meta::generate_name(&object);
                return Err(ApiError::generate_name_conflict(&call.resource.group, &call.resource.plural, base));
            }
            other => return other,
        }
    }
}

async fn create_once(call: &Call, mut object: Value, options: &WriteOptions) -> Result<Answer, ApiError> {
    let mut name = meta::name(&object).to_owned();
    if name.is_empty() && !meta::generate_name(&object).is_empty() {
        name = generate(meta::generate_name(&object));
    }
    fill_identity(&call.stored_as, call.namespace(), &name, call.now, &mut object);
    let hooks = &call.core.hooks;
    let hold = hooks.before_create(call, &mut object, options.dry_run).await?;
    match finish_create(call, &name, object, options).await {
        Ok(answer) => {
            hooks.commit(hold).await;
            Ok(answer)
        }
        Err(error) => {
            hooks.revert(hold).await;
            Err(error)
        }
    }
}

/// Prepares, validates and stores an object whose name and addresses are chosen.
async fn finish_create(call: &Call, name: &str, mut object: Value, options: &WriteOptions) -> Result<Answer, ApiError> {
    let resource = &call.stored_as;
    let context = call.context();
    resource.strategy.prepare_create(&context, &mut object);
    resource.schemas.normalize(resource.stored().schema, &mut object);
    let errors = resource.strategy.validate(&context, &object);
    if !errors.is_empty() {
        return Err(ApiError::invalid(&resource.group, &resource.kind, name, errors));
    }
    resource.strategy.warnings(&context, &object).into_iter().for_each(|w| call.warn(w));
    let request = call.admission(Operation::Create, name, Some(object), None, &options.document, options.dry_run);
    call.core.admission.validate(&request).await?;
    call.warnings.lock().append(&mut request.warnings.lock());
    let object = request.object.unwrap_or_default();
    if options.dry_run {
        if call.core.objects.current(resource, call.namespace(), name).await?.is_some() {
            return Err(ApiError::already_exists(&resource.group, &resource.plural, name));
        }
        return Ok(Answer::Value(StatusCode::CREATED, object));
    }
    match call.core.objects.insert(resource, call.namespace(), name, object).await {
        Ok(stored) => Ok(Answer::Stored(StatusCode::CREATED, stored)),
        Err(mut error) => {
            if error.reason == "AlreadyExists"
                && let Some(there) = call.core.objects.cached(resource, call.namespace(), name)
                && meta::deletion_timestamp(&there.value()).is_some()
            {
                error.message = format!("object is being deleted: {}", error.message);
            }
            Err(error)
        }
    }
}

/// PUT of an object or of a subresource with the object's own kind.
pub async fn update(call: &Call, body: &[u8]) -> Result<Answer, ApiError> {
    let options = WriteOptions::parse(&call.query, Write::Update)?;
    let media = content::input_media(&call.headers, !call.resource.custom)?;
    let mut object = decode::object(call, body, media, &Expected::object(call), options.validation)?;
    check_name(call, &object)?;
    match_namespace(call, &mut object)?;
    warn_duplicate_owners(call, &mut object);
    let mut object = call.to_storage(object)?;
    call.resource.strategy.defaults(&call.context(), &mut object);
    change(call, &Source::Body(object), &options).await
}

/// PATCH of an object or of a subresource with the object's own kind.
pub async fn patch(call: &Call, body: super::Body) -> Result<Answer, ApiError> {
    let (patch, options) = Patch::parse(call, body)?;
    change(call, &Source::Patch(patch), &options).await
}

/// A PUT's object must bear the name in the path.
pub(crate) fn check_name(call: &Call, object: &Value) -> Result<(), ApiError> {
    let name = meta::name(object);
    if name.is_empty() {
        return Err(ApiError::bad_request(format!("the name of the object ({} based on URL) was undeterminable: name must be provided", call.name())));
    }
    if name != call.name() {
        return Err(ApiError::bad_request(format!("the name of the object ({name}) does not match the name on the URL ({})", call.name())));
    }
    Ok(())
}

/// The object's namespace must be the path's; one that names none gets it.
pub(crate) fn match_namespace(call: &Call, object: &mut Value) -> Result<(), ApiError> {
    let namespace = call.namespace();
    let given = meta::namespace(object).to_owned();
    if given == namespace {
        return Ok(());
    }
    if namespace.is_empty() {
        meta::remove(object, "namespace");
    } else if given.is_empty() {
        meta::set_namespace(object, namespace);
    } else {
        return Err(ApiError::bad_request("the namespace of the provided object does not match the namespace sent on the request"));
    }
    Ok(())
}

fn warn_duplicate_owners(call: &Call, object: &mut Value) {
    let duplicates = super::query::duplicate_owners(object);
    if duplicates.is_empty() {
        return;
    }
    call.warn(format!(
        ".metadata.ownerReferences contains duplicate entries; API server dedups owner references in 1.20+, and may reject such requests as early as 1.24; please fix your requests; duplicate UID(s) observed: {}",
        duplicates.join(", ")
    ));
    let mut seen = Vec::new();
    if let Some(owners) = object["metadata"]["ownerReferences"].as_array_mut() {
        owners.retain(|owner| {
            let fresh = !seen.contains(owner);
            if fresh {
                seen.push(owner.clone());
            }
            fresh
        });
    }
}

/// Who writes, for managed fields.
pub(crate) fn writer<'a>(call: &'a Call, options: &'a WriteOptions) -> Writer<'a> {
    let resource = &call.stored_as;
    Writer {
        schemas: &resource.schemas,
        ty: resource.stored().schema,
        api_version: call.storage_api_version(),
        custom: resource.custom,
        manager: call.manager(&options.field_manager),
        subresource: call.subresource(),
        now: call.now,
        reset: resource.strategy.reset_fields(&call.context()),
    }
}

fn wipe_system_fields(object: &mut Value) {
    for key in ["uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "resourceVersion", "generation"] {
        meta::remove(object, key);
    }
}

/// A name out of `generateName`: five letters that spell no words.
pub(crate) fn generate(base: &str) -> String {
    const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let end = (0..=base.len().min(NAME_BASE)).rev().find(|i| base.is_char_boundary(*i)).unwrap_or(0);
    let mut name = base[..end].to_owned();
    for _ in 0..5 {
        name.push(char::from(LETTERS[rand::random_range(0..LETTERS.len())]));
    }
    name
}

/// What one attempt came to.
enum Attempt {
    /// Ready to be stored in place of what was there.
    Store(Value, Hold),
    /// The last finalizer went: the object is deleted instead.
    Delete(Value),
    Create(Value),
}

/// Changes an object by compare-and-swap, creating it where that is allowed.
pub(crate) async fn change(call: &Call, source: &Source, options: &WriteOptions) -> Result<Answer, ApiError> {
    let objects = &call.core.objects;
    let hooks = &call.core.hooks;
    let resource = &call.stored_as;
    let attempts = if matches!(source, Source::Patch(_)) { PATCH_ATTEMPTS } else { PUT_ATTEMPTS };
    let mut current = objects.current(resource, call.namespace(), call.name()).await?;
    for _ in 0..attempts {
        let attempt = match &current {
            Some(there) => attempt(call, source, options, there).await,
            None => attempt_create(call, source, options).await.map(Attempt::Create),
        };
        let swap = match (attempt, &current) {
            // What was computed from a cache that lags is computed again from the store before it is believed.
            (Err(_), Some(there)) if !there.fresh => {
                current = objects.fresh(resource, call.namespace(), call.name()).await?;
                continue;
            }
            (Err(error), _) => return Err(error),
            (Ok(Attempt::Create(object)), _) => match create_object(call, object, options).await {
                // Somebody created it meanwhile: then it is an update.
                Err(error) if error.reason == "AlreadyExists" && !options.dry_run => {
                    current = objects.fresh(resource, call.namespace(), call.name()).await?;
                    if current.is_none() {
                        return Err(error);
                    }
                    continue;
                }
                other => return other,
            },
            (Ok(_), None) => return Err(call.not_found()),
            (Ok(Attempt::Store(object, hold)), Some(_)) if options.dry_run => {
                hooks.revert(hold).await;
                return Ok(Answer::Value(StatusCode::OK, object));
            }
            (Ok(Attempt::Delete(object)), Some(_)) if options.dry_run => return Ok(Answer::Value(StatusCode::OK, object)),
            (Ok(Attempt::Store(object, hold)), Some(there)) => match objects.replace(resource, there, object).await {
                Ok(Swap::Done(stored)) => {
                    hooks.commit(hold).await;
                    return Ok(Answer::Stored(StatusCode::OK, stored));
                }
                lost => {
                    hooks.revert(hold).await;
                    lost?
                }
            },
            (Ok(Attempt::Delete(object)), Some(there)) => match objects.remove(resource, there).await? {
                Swap::Done(last) => {
                    hooks.after_delete(call, &last).await;
                    return Ok(Answer::Value(StatusCode::OK, object));
                }
                Swap::Gone => return Ok(Answer::Value(StatusCode::OK, object)),
                lost => lost,
            },
        };
        current = match swap {
            Swap::Lost(now) => Some(now),
            Swap::Gone => None,
            Swap::Done(stored) => return Ok(Answer::Stored(StatusCode::OK, stored)),
        };
    }
    Err(ApiError::conflict(
        &resource.group,
        &resource.plural,
        call.name(),
        "the object has been modified; please apply your changes to the latest version and try again",
    ))
}

/// The object that an update creates where there is none: apply always, PUT for the few kinds that allow it.
async fn attempt_create(call: &Call, source: &Source, options: &WriteOptions) -> Result<Value, ApiError> {
    let allowed = match source {
        Source::Patch(patch) => patch.is_apply(),
        Source::Body(_) => call.resource.strategy.allow_create_on_update(),
        Source::Change(_) => false,
    };
    if !allowed || call.subresource().is_some() {
        return Err(call.not_found());
    }
    call.core.require(call, "create")?;
    let mut object = match source {
        Source::Body(object) => object.clone(),
        Source::Patch(patch) => patch.create(call, options)?,
        Source::Change(_) => return Err(call.not_found()),
    };
    if !meta::uid(&object).is_empty() {
        let why = format!("Precondition failed: UID in precondition: {}, UID in object meta: ", meta::uid(&object));
        return Err(ApiError::conflict(&call.resource.group, &call.resource.plural, call.name(), &why));
    }
    wipe_system_fields(&mut object);
    if matches!(source, Source::Body(_)) {
        writer(call, options).update_managed(None, &mut object);
    }
    Ok(object)
}

/// The new object, out of what is there: patched, merged, admitted, prepared, validated.
async fn attempt(call: &Call, source: &Source, options: &WriteOptions, there: &Current) -> Result<Attempt, ApiError> {
    let old = there.stored.value();
    let resource = &call.stored_as;
    let context = call.context();
    let mut new = match source {
        Source::Body(object) => object.clone(),
        Source::Patch(patch) => patch.apply(call, &old, options)?,
        Source::Change(change) => change(&old)?,
    };
    check_preconditions(call, &new, &old, there.stored.revision)?;
    keep_system_fields(&mut new, &old);
    if !matches!(source, Source::Patch(patch) if patch.is_apply()) {
        writer(call, options).update_managed(Some(&old), &mut new);
    }
    let mut request = call.admission(Operation::Update, call.name(), Some(new), Some(&old), &options.document, options.dry_run);
    call.core.admission.mutate(&mut request).await?;
    call.warnings.lock().append(&mut request.warnings.lock());
    let mut new = request.object.take().unwrap_or_default();
    let hooks = &call.core.hooks;
    let hold = hooks.before_update(call, &mut new, &old, options.dry_run).await?;
    let finalizers = (call.subresource() == Some("finalize")).then(|| new["spec"]["finalizers"].clone());
    resource.strategy.prepare_update(&context, &mut new, &old);
    resource.schemas.normalize(resource.stored().schema, &mut new);
    if let Some(finalizers) = finalizers {
        new["spec"]["finalizers"] = finalizers;
    }
    meta::set_resource_version(&mut new, there.stored.revision);
    request.object = Some(new);
    match check_update(call, &request, &old).await {
        Ok(()) => {}
        Err(error) => {
            hooks.revert(hold).await;
            return Err(error);
        }
    }
    let new = request.object.take().unwrap_or_default();
    if is_finished(resource, &new, &old) {
        hooks.revert(hold).await;
        return Ok(Attempt::Delete(new));
    }
    Ok(Attempt::Store(new, hold))
}

/// Validation, by the kind's rules and by admission.
async fn check_update(call: &Call, request: &AdmissionRequest<'_>, old: &Value) -> Result<(), ApiError> {
    let resource = &call.stored_as;
    let context = call.context();
    let new = request.new_object();
    let errors = resource.strategy.validate_update(&context, new, old);
    if !errors.is_empty() {
        return Err(ApiError::invalid(&resource.group, &resource.kind, call.name(), errors));
    }
    resource.strategy.warnings(&context, new).into_iter().for_each(|w| call.warn(w));
    call.core.admission.validate(request).await?;
    call.warnings.lock().append(&mut request.warnings.lock());
    Ok(())
}

/// `uid` and `resourceVersion` of the new object, when given, must be those of the old one.
fn check_preconditions(call: &Call, new: &Value, old: &Value, revision: u64) -> Result<(), ApiError> {
    let resource = &call.resource;
    let (given, there) = (meta::uid(new), meta::uid(old));
    if !given.is_empty() && given != there {
        let why = format!("Precondition failed: UID in precondition: {given}, UID in object meta: {there}");
        return Err(ApiError::conflict(&resource.group, &resource.plural, call.name(), &why));
    }
    match meta::text(new, "resourceVersion") {
        "" | "0" if resource.strategy.allow_unconditional_update() => Ok(()),
        "" | "0" => {
            let error = windlass_api::field::FieldError::invalid("metadata.resourceVersion", 0, "must be specified for an update");
            Err(ApiError::invalid(&resource.group, &resource.plural, call.name(), vec![error]))
        }
        text => match text.parse::<u64>() {
            Ok(given) if given == revision => Ok(()),
            Ok(_) => Err(ApiError::conflict(
                &resource.group,
                &resource.plural,
                call.name(),
                "the object has been modified; please apply your changes to the latest version and try again",
            )),
            Err(_) => {
                let error = windlass_api::field::FieldError::invalid("metadata.resourceVersion", text, "must be an unsigned integer");
                Err(ApiError::invalid(&resource.group, &resource.kind, call.name(), vec![error]))
            }
        },
    }
}

/// Whether this update removed the last thing that held a deletion up.
fn is_finished(resource: &windlass_api::registry::Resource, new: &Value, old: &Value) -> bool {
    let namespace_held = resource.group.is_empty()
        && resource.plural == "namespaces"
        && new["spec"]["finalizers"].as_array().is_some_and(|f| !f.is_empty());
    meta::finalizers(new).next().is_none()
        && !namespace_held
        && meta::deletion_timestamp(old).is_some()
        && meta::deletion_grace_period_seconds(old).unwrap_or(0) == 0
}

/// Reads the options of a write by its query alone (subresources that are written by POST).
pub(crate) fn create_options(query: &Query) -> Result<WriteOptions, ApiError> {
    WriteOptions::parse(query, Write::Create)
}
