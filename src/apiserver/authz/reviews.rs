//! `authorization.k8s.io` reviews: questions to the authorizer, answered and not stored.

use super::{Attributes, Authorizer, Decision};
use crate::request::UserInfo;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use windlass_api::ApiError;
use windlass_api::field::FieldError;

const GROUP: &str = "authorization.k8s.io";

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}

fn texts(value: &Value) -> Vec<String> {
    let list = value.as_array().map(Vec::as_slice).unwrap_or_default();
    list.iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Answers one of the four review kinds by `resource` (plural). `namespace` is the request's.
pub fn review(
    authorizer: &dyn Authorizer,
    resource: &str,
    namespace: &str,
    caller: &UserInfo,
    body: Value,
) -> Result<Value, ApiError> {
    match resource {
        "subjectaccessreviews" => access(authorizer, "SubjectAccessReview", named_user(&body), body),
        "localsubjectaccessreviews" => {
            check_local(namespace, &body)?;
            access(authorizer, "LocalSubjectAccessReview", named_user(&body), body)
        }
        "selfsubjectaccessreviews" => access(authorizer, "SelfSubjectAccessReview", caller.clone(), body),
        "selfsubjectrulesreviews" => rules(authorizer, caller, body),
        other => Err(ApiError::not_found(GROUP, other, "")),
    }
}

fn named_user(body: &Value) -> UserInfo {
    let spec = &body["spec"];
    let extra = spec["extra"].as_object().map(|map| map.iter().map(|(key, value)| (key.clone(), texts(value))));
    UserInfo {
        name: text(spec, "user").to_owned(),
        uid: text(spec, "uid").to_owned(),
        groups: texts(&spec["groups"]),
        extra: extra.map(BTreeMap::from_iter).unwrap_or_default(),
    }
}

fn check_local(namespace: &str, body: &Value) -> Result<(), ApiError> {
    if text(&body["metadata"], "namespace") != namespace {
        let theirs = text(&body["metadata"], "namespace");
        return Err(ApiError::bad_request(format!("namespace {theirs:?} does not match the request's {namespace:?}")));
    }
    let mut errors = Vec::new();
    let attributes = &body["spec"]["resourceAttributes"];
    if attributes.is_object() && text(attributes, "namespace") != namespace {
        let path = "spec.resourceAttributes.namespace";
        errors.push(FieldError::invalid(path, text(attributes, "namespace"), "must match metadata.namespace"));
    }
    if body["spec"]["nonResourceAttributes"].is_object() {
        let value = body["spec"]["nonResourceAttributes"].clone();
        errors.push(FieldError::invalid("spec.nonResourceAttributes", value, "disallowed on this kind of request"));
    }
    match errors.is_empty() {
        true => Ok(()),
        false => Err(ApiError::invalid(GROUP, "LocalSubjectAccessReview", "", errors)),
    }
}

fn check_spec(kind: &str, body: &Value) -> Result<(), ApiError> {
    let spec = &body["spec"];
    let mut errors = Vec::new();
    if spec["resourceAttributes"].is_object() == spec["nonResourceAttributes"].is_object() {
        let detail = "exactly one of nonResourceAttributes or resourceAttributes must be specified";
        errors.push(FieldError::invalid("spec", spec["nonResourceAttributes"].clone(), detail));
    }
    if kind != "SelfSubjectAccessReview" && text(spec, "user").is_empty() && texts(&spec["groups"]).is_empty() {
        errors.push(FieldError::invalid("spec.user", "", "at least one of user or group must be specified"));
    }
    let mut metadata = body["metadata"].as_object().cloned().unwrap_or_default();
    metadata.remove("managedFields");
    metadata.retain(|_, value| !value.is_null());
    let detail = match kind {
        "LocalSubjectAccessReview" => {
            metadata.remove("namespace");
            "must be empty except for namespace"
        }
        _ => "must be empty",
    };
    if !metadata.is_empty() {
        errors.push(FieldError::invalid("metadata", body["metadata"].clone(), detail));
    }
    let field_selector = &spec["resourceAttributes"]["fieldSelector"];
    let label_selector = &spec["resourceAttributes"]["labelSelector"];
    for (selector, name) in [(field_selector, "fieldSelector"), (label_selector, "labelSelector")] {
        if !selector.is_object() {
            continue;
        }
        let path = format!("spec.resourceAttributes.{name}");
        let raw = !text(selector, "rawSelector").is_empty();
        let listed = selector["requirements"].as_array().is_some_and(|list| !list.is_empty());
        if raw && listed {
            let detail = "may not specified at the same time as requirements";
            errors.push(FieldError::invalid(format!("{path}.rawSelector"), text(selector, "rawSelector"), detail));
        }
        if !raw && !listed {
            let detail = format!("when {path} is specified, requirements or rawSelector is required");
            errors.push(FieldError::required(format!("{path}.requirements"), detail));
        }
    }
    match errors.is_empty() {
        true => Ok(()),
        false => Err(ApiError::invalid(GROUP, kind, "", errors)),
    }
}

/// The equality requirements of a review's field selector, and what could not be used of it.
fn selected_fields(selector: &Value) -> (Vec<(String, String)>, Option<String>) {
    let mut fields = Vec::new();
    let mut failed = false;
    let raw = text(selector, "rawSelector");
    if !raw.is_empty() {
        match windlass_api::selector::FieldSelector::parse(raw) {
            Ok(parsed) => {
                let equal = parsed.requirements().iter().filter(|requirement| !requirement.negated);
                fields.extend(equal.map(|requirement| (requirement.path.clone(), requirement.value.clone())));
            }
            Err(_) => failed = true,
        }
    }
    for requirement in selector["requirements"].as_array().into_iter().flatten() {
        match (text(requirement, "operator"), texts(&requirement["values"]).as_slice()) {
            ("In", [value]) => fields.push((text(requirement, "key").to_owned(), value.clone())),
            ("NotIn", [_]) => {}
            _ => failed = true,
        }
    }
    let partly = if fields.is_empty() { "" } else { "partially " };
    let error = failed.then(|| format!("spec.resourceAttributes.fieldSelector {partly}ignored due to parse error"));
    (fields, error)
}

fn access(authorizer: &dyn Authorizer, kind: &str, user: UserInfo, mut body: Value) -> Result<Value, ApiError> {
    check_spec(kind, &body)?;
    let spec = &body["spec"];
    let wanted = &spec["resourceAttributes"];
    let (fields, selector_error) = selected_fields(&wanted["fieldSelector"]);
    let decision = if wanted.is_object() {
        let version = text(wanted, "version");
        authorizer.authorize(&Attributes {
            version: if version.is_empty() { "*" } else { version },
            subresource: text(wanted, "subresource"),
            namespace: text(wanted, "namespace"),
            name: text(wanted, "name"),
            fields: &fields,
            ..Attributes::resource(&user, text(wanted, "verb"), text(wanted, "group"), text(wanted, "resource"))
        })
    } else {
        let path = &spec["nonResourceAttributes"];
        authorizer.authorize(&Attributes {
            is_resource: false,
            path: text(path, "path"),
            version: "",
            ..Attributes::resource(&user, text(path, "verb"), "", "")
        })
    };
    let mut status = Map::new();
    status.insert("allowed".into(), decision.is_allowed().into());
    if let Decision::Deny(_) = decision {
        status.insert("denied".into(), true.into());
    }
    if !decision.reason().is_empty() {
        status.insert("reason".into(), decision.reason().into());
    }
    if let Some(error) = selector_error {
        status.insert("evaluationError".into(), error.into());
    }
    body["status"] = Value::Object(status);
    Ok(body)
}

fn rules(authorizer: &dyn Authorizer, caller: &UserInfo, mut body: Value) -> Result<Value, ApiError> {
    let namespace = text(&body["spec"], "namespace");
    if namespace.is_empty() {
        return Err(ApiError::bad_request("no namespace on request"));
    }
    let found = authorizer.rules_for(caller, namespace);
    let (mut resources, mut paths) = (Vec::new(), Vec::new());
    for rule in &found.rules {
        if !rule.resources.is_empty() {
            let mut shown = rule.to_value();
            if let Some(map) = shown.as_object_mut() {
                map.remove("nonResourceURLs");
            }
            resources.push(shown);
        }
        if !rule.non_resource_urls.is_empty() {
            paths.push(json!({"verbs": rule.verbs, "nonResourceURLs": rule.non_resource_urls}));
        }
    }
    let mut status = json!({"resourceRules": resources, "nonResourceRules": paths, "incomplete": found.incomplete});
    if let Some(error) = found.evaluation_error {
        status["evaluationError"] = error.into();
    }
    body["spec"] = json!({});
    body["status"] = status;
    Ok(body)
}
