//! Impersonation: a request in another's name, each part of which the caller must be allowed to `impersonate`.

use super::{ANONYMOUS, AUTHENTICATED, UNAUTHENTICATED, request_header};
use crate::authz::{Attributes, Authorizer};
use crate::request::UserInfo;
use http::request::Parts;
use std::collections::BTreeMap;
use windlass_api::ApiError;

const USER: &str = "impersonate-user";
const UID: &str = "impersonate-uid";
const GROUP: &str = "impersonate-group";
const EXTRA: &str = "impersonate-extra-";

/// Namespace and name of a service account's user name.
pub fn split_account(user: &str) -> Option<(&str, &str)> {
    let (namespace, name) = user.strip_prefix("system:serviceaccount:")?.split_once(':')?;
    let good = |part: &str| !part.is_empty() && !part.contains(':');
    (good(namespace) && good(name)).then_some((namespace, name))
}

/// The user to act as: the caller, or the one its headers name, after every part was authorized. The headers are
/// removed, so that nobody behind sees them again.
pub fn impersonate(authorizer: &dyn Authorizer, caller: UserInfo, parts: &mut Parts) -> Result<UserInfo, ApiError> {
    let text = |header: &str| parts.headers.get(header).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let (name, uid) = (text(USER).to_owned(), text(UID).to_owned());
    let groups = parts.headers.get_all(GROUP).iter().filter_map(|value| value.to_str().ok());
    let mut groups: Vec<String> = groups.map(str::to_owned).collect();
    let extra: BTreeMap<String, Vec<String>> = request_header::extra(parts, EXTRA);
    if name.is_empty() {
        if groups.is_empty() && uid.is_empty() && extra.is_empty() {
            return Ok(caller);
        }
        return Err(ApiError::bad_request(format!(
            "requested groups {groups:?}, uid {uid:?} or extra without impersonating a user"
        )));
    }
    let allow = |attributes: Attributes<'_>| {
        let decision = authorizer.authorize(&attributes);
        match decision.is_allowed() {
            true => Ok(()),
            false => Err(attributes.forbidden(decision.reason())),
        }
    };
    let wanted = |group, resource| Attributes { version: "v1", ..Attributes::resource(&caller, "impersonate", group, resource) };
    let account = split_account(&name);
    match account {
        Some((namespace, name)) => allow(Attributes { namespace, name, ..wanted("", "serviceaccounts") })?,
        None => allow(Attributes { name: &name, ..wanted("", "users") })?,
    }
    for group in &groups {
        allow(Attributes { name: group, ..wanted("", "groups") })?;
    }
    const AUTHENTICATION: &str = "authentication.k8s.io";
    for (key, values) in &extra {
        for value in values {
            allow(Attributes { name: value, subresource: key, ..wanted(AUTHENTICATION, "userextras") })?;
        }
    }
    if !uid.is_empty() {
        allow(Attributes { name: &uid, ..wanted(AUTHENTICATION, "uids") })?;
    }
    if let (Some((namespace, _)), true) = (account, groups.is_empty()) {
        groups = vec!["system:serviceaccounts".to_owned(), format!("system:serviceaccounts:{namespace}")];
    }
    let has = |wanted: &str| groups.iter().any(|group| group == wanted);
    if name == ANONYMOUS {
        if !has(UNAUTHENTICATED) {
            groups.push(UNAUTHENTICATED.to_owned());
        }
    } else if !has(AUTHENTICATED) && !has(UNAUTHENTICATED) {
        groups.push(AUTHENTICATED.to_owned());
    }
    let headers: Vec<_> = parts.headers.keys().filter(|name| name.as_str().starts_with("impersonate-")).cloned().collect();
    for header in headers {
        parts.headers.remove(header);
    }
    Ok(UserInfo { name, uid, groups, extra })
}
