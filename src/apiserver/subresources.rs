//! Subresources: those that write the object itself take the common path; the few with rules of their own are here
//! (scale, binding, eviction), in [`crate::reviews`] (token) and in [`crate::proxy`] (log, exec, attach, portforward, proxy).

use http::StatusCode;
use serde_json::{Value, json};
use windlass_api::convert::scale;
use windlass_api::selector::LabelSelector;
use windlass_api::status::Cause;
use windlass_api::{ApiError, meta, patch};

use crate::admission::Operation;
use crate::content;
use crate::rest::decode::{self, Expected};
use crate::rest::patch::Patch;
use crate::rest::query::{DeleteOptions, Write, WriteOptions};
use crate::rest::write::{self, Source};
use crate::rest::{Answer, Call, delete, read};

/// Routes a request about a subresource.
pub async fn serve(call: &mut Call, body: content::RequestBody) -> Result<Answer, ApiError> {
    let sub = call.info.subresource.clone();
    let found = call.version().subresource(&sub).cloned().ok_or_else(ApiError::no_such_path)?;
    let verb = call.info.verb.clone();
    if !found.verbs.contains(&verb) {
        return Err(ApiError::method_not_supported(&call.resource.group, &format!("{}/{sub}", call.resource.plural), &verb));
    }
    if matches!(sub.as_str(), "log" | "exec" | "attach" | "portforward" | "proxy") {
        return crate::proxy::serve(call, body).await;
    }
    call.output = content::negotiate(&call.headers, &call.query, call.offer(false))?;
    let bytes = if verb == "get" { bytes::Bytes::new() } else { content::read_body(&call.headers, body).await? };
    match (sub.as_str(), verb.as_str()) {
        ("scale", "get") => get_scale(call).await,
        ("scale", _) => write_scale(call, bytes).await,
        ("binding", "create") => binding(call, &bytes, Some(call.name().to_owned())).await,
        ("eviction", "create") => eviction(call, &bytes).await,
        ("token", "create") => crate::reviews::token(call, &bytes).await,
        (_, "get") => read::get(call).await,
        (_, "update") => write::update(call, &bytes).await,
        (_, "patch") => write::patch(call, bytes).await,
        _ => Err(ApiError::not_implemented(format!("{} of {}/{sub} is not implemented", verb, call.resource.gr()))),
    }
}

// === Scale ===

async fn get_scale(call: &Call) -> Result<Answer, ApiError> {
    let stored = call.core.objects.get(&call.stored_as, call.namespace(), call.name()).await?;
    scale_of(call, &stored.value()).map(|s| Answer::Document(StatusCode::OK, s))
}

fn scale_of(call: &Call, object: &Value) -> Result<Value, ApiError> {
    scale::get(&call.resource, &call.info.api_version, &call.from_storage(object)?)
}

/// PUT and PATCH of a Scale: the change it makes to the object takes the common path.
async fn write_scale(call: &Call, bytes: bytes::Bytes) -> Result<Answer, ApiError> {
    let expected = Expected::subresource(&call.resource, &call.info.api_version, "scale").ok_or_else(ApiError::no_such_path)?;
    let resource = call.resource.clone();
    let version = call.info.api_version.clone();
    let (source, options) = if call.info.verb == "update" {
        let options = WriteOptions::parse(&call.query, Write::Update)?;
        let media = content::input_media(&call.headers, true)?;
        let scale = decode::object(call, &bytes, media, &expected, options.validation)?;
        write::check_name(call, &scale)?;
        check_scale(&scale)?;
        let change = move |old: &Value| {
            let mut new = old.clone();
            apply_scale(&resource, &version, &mut new, &scale)?;
            Ok(new)
        };
        (Source::Change(Box::new(change)), options)
    } else {
        let kind = content::content_type(&call.headers);
        let options = WriteOptions::parse(&call.query, if kind.contains("apply-patch") { Write::Apply } else { Write::Patch })?;
        let (document, _) = decode::yaml(&bytes)?;
        if kind == "application/apply-patch+yaml" {
            let source = Source::Patch(Patch::Apply(scale_applied(call, &resource, &version, &document)?));
            return match write::change(call, &source, &options).await? {
                Answer::Stored(status, stored) => scale_of(call, &stored.value()).map(|s| Answer::Document(status, s)),
                Answer::Value(status, object) => scale_of(call, &object).map(|s| Answer::Document(status, s)),
                other => Ok(other),
            };
        }
        let schemas = windlass_api::schema::Schemas::builtin();
        let ty = expected.ty;
        let change = move |old: &Value| {
            let mut current = scale::get(&resource, &version, old)?;
            match kind.as_str() {
                "application/json-patch+json" => patch::json_patch(&mut current, &document)?,
                "application/merge-patch+json" => patch::merge_patch(&mut current, &document)?,
                "application/strategic-merge-patch+json" => {
                    let ty = ty.ok_or_else(|| ApiError::internal("Scale has no schema"))?;
                    current = patch::strategic_merge(&schemas, ty, &current, &document)?;
                }
                _ => {
                    return Err(ApiError::unsupported_media_type(&[
                        "application/json-patch+json",
                        "application/merge-patch+json",
                        "application/strategic-merge-patch+json",
                        "application/apply-patch+yaml",
                    ]));
                }
            }
            check_scale(&current)?;
            let mut new = old.clone();
            apply_scale(&resource, &version, &mut new, &current)?;
            Ok(new)
        };
        (Source::Change(Box::new(change)), options)
    };
    match write::change(call, &source, &options).await? {
        Answer::Stored(status, stored) => scale_of(call, &stored.value()).map(|s| Answer::Document(status, s)),
        Answer::Value(status, object) => scale_of(call, &object).map(|s| Answer::Document(status, s)),
        other => Ok(other),
    }
}

/// What an applied Scale says about the object: its replicas, owned like any other field.
fn scale_applied(call: &Call, resource: &windlass_api::registry::Resource, version: &str, scale: &Value) -> Result<Value, ApiError> {
    if meta::kind(scale) != "Scale" {
        let (version, kind) = (meta::api_version(scale), meta::kind(scale));
        return Err(ApiError::bad_request(format!("invalid object type: {version}, Kind={kind}")));
    }
    write::check_name(call, scale)?;
    check_scale(scale)?;
    let mut applied = serde_json::json!({
        "apiVersion": call.api_version(),
        "kind": resource.kind,
        "metadata": {"name": call.name()},
    });
    if !scale["spec"]["replicas"].is_null() {
        scale::set(resource, version, &mut applied, scale)?;
    }
    Ok(applied)
}

/// A Scale's numbers, before they are put into an object.
fn check_scale(scale: &Value) -> Result<(), ApiError> {
    match scale["spec"]["replicas"].as_i64() {
        Some(n) if n < 0 => {
            let error = windlass_api::field::FieldError::invalid("spec.replicas", n, "must be greater than or equal to 0");
            Err(ApiError::invalid("autoscaling", "Scale", meta::name(scale), vec![error]))
        }
        _ => Ok(()),
    }
}

fn apply_scale(resource: &windlass_api::registry::Resource, version: &str, object: &mut Value, scale: &Value) -> Result<(), ApiError> {
    scale::set(resource, version, object, scale)?;
    // What the Scale says about its version is about the object's.
    for key in ["uid", "resourceVersion"] {
        match scale["metadata"].get(key).filter(|v| v.as_str().is_some_and(|s| !s.is_empty())) {
            Some(value) => meta::set(object, key, value.clone()),
            None if key == "resourceVersion" => drop(meta::remove(object, key)),
            None => {}
        }
    }
    Ok(())
}

// === Binding ===

/// POST of `pods/binding`, or of a Binding whose name is the pod's.
pub async fn binding(call: &Call, bytes: &[u8], name: Option<String>) -> Result<Answer, ApiError> {
    let options = write::create_options(&call.query)?;
    let media = content::input_media(&call.headers, true)?;
    let expected = match &name {
        Some(_) => Expected::subresource(&call.resource, &call.info.api_version, "binding").ok_or_else(ApiError::no_such_path)?,
        None => Expected::object(call),
    };
    let mut binding = decode::object(call, bytes, media, &expected, options.validation)?;
    write::match_namespace(call, &mut binding)?;
    let name = match name {
        Some(name) => {
            let given = meta::name(&binding);
            if !given.is_empty() && given != name {
                return Err(ApiError::bad_request("name in URL does not match name in Binding object"));
            }
            name
        }
        None => meta::name(&binding).to_owned(),
    };
    meta::set_name(&mut binding, &name);
    check_binding(&binding, &name)?;
    let mut request = call.admission(Operation::Create, &name, Some(binding), None, &options.document, options.dry_run);
    call.core.admission.mutate(&mut request).await?;
    call.core.admission.validate(&request).await?;
    let binding = request.object.take().unwrap_or_default();
    let pods = call.core.objects.resource("", "pods").ok_or_else(|| ApiError::internal("pods are not registered"))?;
    let now = call.now;
    let bind = |pod: Value| bind(pod, &binding, &name, now);
    if options.dry_run {
        let current = call.core.objects.get(&pods, call.namespace(), &name).await?;
        bind((*current.value()).clone())?;
    } else {
        call.core.objects.update_with(&pods, call.namespace(), &name, bind).await?;
    }
    Ok(Answer::Document(StatusCode::CREATED, success(StatusCode::CREATED)))
}

fn success(status: StatusCode) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": status.as_u16()})
}

fn check_binding(binding: &Value, name: &str) -> Result<(), ApiError> {
    use windlass_api::field::FieldError;
    let target = &binding["target"];
    let mut errors = Vec::new();
    match target["kind"].as_str().unwrap_or_default() {
        "" | "Node" => {}
        other => errors.push(FieldError::not_supported("target.kind", other, &["Node", "<empty>"])),
    }
    if target["name"].as_str().unwrap_or_default().is_empty() {
        errors.push(FieldError::required("target.name", ""));
    }
    if errors.is_empty() { Ok(()) } else { Err(ApiError::invalid("", "Binding", name, errors)) }
}

/// The pod with its node; refused when it has one, is being deleted, or waits at a gate.
fn bind(mut pod: Value, binding: &Value, name: &str, now: jiff::Timestamp) -> Result<Value, ApiError> {
    let conflict = |why: String| ApiError::conflict("", "pods/binding", name, &why);
    for (key, what) in [("uid", "UID"), ("resourceVersion", "ResourceVersion")] {
        let (want, there) = (meta::text(binding, key), meta::text(&pod, key));
        if !want.is_empty() && want != there {
            return Err(conflict(format!("Precondition failed: {what} in precondition: {want}, {what} in object meta: {there}")));
        }
    }
    if meta::deletion_timestamp(&pod).is_some() {
        return Err(conflict(format!("pod {name} is being deleted, cannot be assigned to a host")));
    }
    if let Some(node) = pod["spec"]["nodeName"].as_str().filter(|n| !n.is_empty()) {
        return Err(conflict(format!("pod {name} is already assigned to node {node:?}")));
    }
    if pod["spec"]["schedulingGates"].as_array().is_some_and(|g| !g.is_empty()) {
        return Err(conflict(format!("pod {name} has non-empty .spec.schedulingGates")));
    }
    pod["spec"]["nodeName"] = binding["target"]["name"].clone();
    for (key, value) in meta::annotations(binding).into_iter().flatten() {
        meta::set_annotation(&mut pod, key, value.as_str().unwrap_or_default());
    }
    for (key, value) in meta::labels(binding).into_iter().flatten() {
        // Topology labels that admission put on the binding go to the pod, as upstream.
        if meta::label(&pod, key).is_none() {
            meta::set_label(&mut pod, key, value.as_str().unwrap_or_default());
        }
    }
    set_condition(&mut pod, json!({"type": "PodScheduled", "status": "True"}), now);
    Ok(pod)
}

/// Sets a pod's condition; the time of its last transition changes with its status only.
fn set_condition(pod: &mut Value, mut condition: Value, now: jiff::Timestamp) {
    condition["lastProbeTime"] = Value::Null;
    condition["lastTransitionTime"] = meta::now_rfc3339(now).into();
    let kind = condition["type"].clone();
    if !pod["status"].is_object() {
        pod["status"] = json!({});
    }
    let conditions = &mut pod["status"]["conditions"];
    if !conditions.is_array() {
        *conditions = json!([]);
    }
    let Some(conditions) = conditions.as_array_mut() else { return };
    match conditions.iter_mut().find(|c| c["type"] == kind) {
        Some(old) => {
            if old["status"] == condition["status"] {
                condition["lastTransitionTime"] = old["lastTransitionTime"].clone();
            }
            *old = condition;
        }
        None => conditions.push(condition),
    }
}

// === Eviction ===

/// POST of `pods/eviction`: a deletion that respects disruption budgets (`registry/core/pod/storage/eviction.go`).
async fn eviction(call: &Call, bytes: &[u8]) -> Result<Answer, ApiError> {
    let create = write::create_options(&call.query)?;
    let media = content::input_media(&call.headers, true)?;
    // Both versions of the kind are taken, as upstream.
    let expected = Expected::subresource(&call.resource, &call.info.api_version, "eviction").ok_or_else(ApiError::no_such_path)?;
    let mut eviction = decode::object(call, bytes, media, &expected, create.validation)?;
    write::match_namespace(call, &mut eviction)?;
    let given = meta::name(&eviction);
    if !given.is_empty() && given != call.name() {
        return Err(ApiError::bad_request("name in URL does not match name in Eviction object"));
    }
    let mut request = call.admission(Operation::Create, call.name(), Some(eviction), None, &create.document, create.dry_run);
    call.core.admission.mutate(&mut request).await?;
    call.core.admission.validate(&request).await?;
    let eviction = request.object.take().unwrap_or_default();
    let document = match &eviction["deleteOptions"] {
        Value::Null => json!({}),
        given => given.clone(),
    };
    let mut options = DeleteOptions::from_document(document)?;
    options.dry_run |= create.dry_run;
    options.skip_admission = true;
    let pod = call.core.objects.get(&call.stored_as, call.namespace(), call.name()).await?.value();
    if !ignores_budgets(&pod) {
        respect_budget(call, &pod, options.dry_run).await?;
        if !options.dry_run {
            let now = call.now;
            let mark = |mut pod: Value| {
                let condition = json!({
                    "type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "Eviction API: evicting",
                });
                set_condition(&mut pod, condition, now);
                Ok(pod)
            };
            call.core.objects.update_with(&call.stored_as, call.namespace(), call.name(), mark).await?;
        }
    }
    let mut one = call.for_object(call.namespace(), call.name());
    one.info.subresource.clear();
    one.info.verb = "delete".into();
    delete::delete_object(&one, call.name(), &options).await?;
    Ok(Answer::Document(StatusCode::CREATED, success(StatusCode::CREATED)))
}

/// Pods that do not run count for no budget.
fn ignores_budgets(pod: &Value) -> bool {
    matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed" | "Pending")) || meta::deletion_timestamp(pod).is_some()
}

fn is_ready(pod: &Value) -> bool {
    pod["status"]["conditions"].as_array().into_iter().flatten().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

/// Takes one disruption from the pod's budget, or refuses.
async fn respect_budget(call: &Call, pod: &Value, dry_run: bool) -> Result<(), ApiError> {
    let objects = &call.core.objects;
    let Some(resource) = objects.resource("policy", "poddisruptionbudgets") else { return Ok(()) };
    let mut budgets = Vec::new();
    for stored in objects.cached_list(&resource, Some(call.namespace())) {
        let budget = stored.value();
        // A missing selector matches nothing.
        let selector = &budget["spec"]["selector"];
        if !selector.is_null() && LabelSelector::from_object(selector).is_ok_and(|s| s.matches_object(pod)) {
            budgets.push(stored);
        }
    }
    let budget = match budgets.as_slice() {
        [] => return Ok(()),
        [one] => one,
        _ => {
            return Err(ApiError::internal("This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."));
        }
    };
    let name = budget.name().to_owned();
    let value = budget.value();
    if !is_ready(pod) {
        let status = &value["status"];
        let (healthy, desired) = (status["currentHealthy"].as_i64().unwrap_or(0), status["desiredHealthy"].as_i64().unwrap_or(0));
        let always = value["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow";
        if always || (healthy >= desired && desired > 0) {
            return Ok(());
        }
    }
    let pod_name = meta::name(pod).to_owned();
    let now = meta::now_rfc3339(call.now);
    let take = |budget: Value| take_disruption(budget, &pod_name, &now);
    if dry_run {
        return take((*value).clone()).map(drop);
    }
    objects.update_with(&resource, call.namespace(), &name, take).await.map(drop)
}

fn take_disruption(mut budget: Value, pod: &str, now: &str) -> Result<Value, ApiError> {
    let name = meta::name(&budget).to_owned();
    let refuse = |cause: String, retry: u32| {
        let mut error = ApiError::too_many_requests("Cannot evict pod as it would violate the pod's disruption budget.", retry);
        let mut details = error.details.take().unwrap_or_default();
        details.causes.push(Cause { reason: "DisruptionBudget".into(), message: cause, ..Cause::default() });
        error.details = Some(details);
        error
    };
    let status = &budget["status"];
    if status["observedGeneration"].as_i64().unwrap_or(0) < meta::generation(&budget) {
        return Err(refuse(format!("The disruption budget {name} is still being processed by the server."), 10));
    }
    let allowed = status["disruptionsAllowed"].as_i64().unwrap_or(0);
    let forbidden = |why: &str| ApiError::forbidden("policy", "poddisruptionbudgets", &name, why);
    if allowed < 0 {
        return Err(forbidden("pdb disruptions allowed is negative"));
    }
    if status["disruptedPods"].as_object().is_some_and(|d| d.len() > 2000) {
        return Err(forbidden("DisruptedPods map too big - too many evictions not confirmed by PDB controller"));
    }
    if allowed == 0 {
        let (desired, current) = (status["desiredHealthy"].as_i64().unwrap_or(0), status["currentHealthy"].as_i64().unwrap_or(0));
        return Err(refuse(format!("The disruption budget {name} needs {desired} healthy pods and has {current} currently"), 0));
    }
    let status = &mut budget["status"];
    status["disruptionsAllowed"] = (allowed - 1).into();
    if !status["disruptedPods"].is_object() {
        status["disruptedPods"] = json!({});
    }
    status["disruptedPods"][pod] = now.into();
    Ok(budget)
}
