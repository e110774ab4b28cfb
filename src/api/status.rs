//! API errors as `metav1.Status`: codes, reasons and wording of `k8s.io/apimachinery/pkg/api/errors`.

use std::fmt;

use serde_json::{Map, Value, json};

use crate::field::{FieldError, aggregate, quote};

/// One cause in `details.causes`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cause {
    /// Machine-readable, e.g. `FieldValueInvalid` or `FieldManagerConflict`; may be empty.
    pub reason: String,
    /// For people.
    pub message: String,
    /// The field's path, if the cause is about one.
    pub field: String,
}

/// `metav1.StatusDetails`. Empty members are left out of the answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Details {
    /// The object's name.
    pub name: String,
    /// The API group.
    pub group: String,
    /// The resource, or the kind in validation errors (as upstream).
    pub kind: String,
    /// The object's uid.
    pub uid: String,
    /// What exactly went wrong.
    pub causes: Vec<Cause>,
    /// Seconds after which a retry makes sense; also the `Retry-After` header. 0 means none.
    pub retry_after_seconds: u32,
}

/// The content of an [`ApiError`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiErrorBody {
    /// HTTP status code.
    pub code: u16,
    /// `metav1.StatusReason`.
    pub reason: &'static str,
    /// For people.
    pub message: String,
    /// Machine-readable details.
    pub details: Option<Details>,
}

/// An error that an API client is shown. One pointer wide: results that carry it stay small.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiError(pub Box<ApiErrorBody>);

impl std::ops::Deref for ApiError {
    type Target = ApiErrorBody;
    fn deref(&self) -> &ApiErrorBody {
        &self.0
    }
}

impl std::ops::DerefMut for ApiError {
    fn deref_mut(&mut self) -> &mut ApiErrorBody {
        &mut self.0
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl fmt::Debug for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.code, self.reason, self.message)
    }
}

impl std::error::Error for ApiError {}

/// The words for a write that lost a race.
pub const OPTIMISTIC_LOCK: &str =
    "the object has been modified; please apply your changes to the latest version and try again";

/// `pods`, or `deployments.apps`: upstream's `GroupResource.String()`, also for kinds.
pub fn qualified(group: &str, name: &str) -> String {
    if group.is_empty() { name.to_owned() } else { format!("{name}.{group}") }
}

fn known_reason(reason: &str) -> &'static str {
    const KNOWN: [&str; 19] = [
        "Unauthorized",
        "Forbidden",
        "NotFound",
        "AlreadyExists",
        "Conflict",
        "Gone",
        "Invalid",
        "ServerTimeout",
        "StoreReadError",
        "Timeout",
        "TooManyRequests",
        "BadRequest",
        "MethodNotAllowed",
        "NotAcceptable",
        "RequestEntityTooLarge",
        "UnsupportedMediaType",
        "InternalError",
        "Expired",
        "ServiceUnavailable",
    ];
    KNOWN.into_iter().find(|k| *k == reason).unwrap_or("")
}

impl ApiError {
    /// An error without details.
    pub fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self(Box::new(ApiErrorBody { code, reason, message: message.into(), details: None }))
    }

    fn about(code: u16, reason: &'static str, group: &str, kind: &str, name: &str, message: String) -> Self {
        let details =
            Details { name: name.into(), group: group.into(), kind: kind.into(), ..Details::default() };
        Self(Box::new(ApiErrorBody { code, reason, message, details: Some(details) }))
    }

    fn retry(mut self, seconds: u32) -> Self {
        self.0.details.get_or_insert_with(Details::default).retry_after_seconds = seconds;
        self
    }

    /// 404: no such object.
    pub fn not_found(group: &str, resource: &str, name: &str) -> Self {
        let m = format!("{} {} not found", qualified(group, resource), quote(name));
        Self::about(404, "NotFound", group, resource, name, m)
    }

    /// 404: no such path or resource at all.
    pub fn no_such_path() -> Self {
        Self::new(404, "NotFound", "the server could not find the requested resource").with_details(Details::default())
    }

    /// 409: an object of that name is there.
    pub fn already_exists(group: &str, resource: &str, name: &str) -> Self {
        let m = format!("{} {} already exists", qualified(group, resource), quote(name));
        Self::about(409, "AlreadyExists", group, resource, name, m)
    }

    /// 409: `generateName` drew names that exist, too often.
    pub fn generate_name_conflict(group: &str, resource: &str, name: &str) -> Self {
        let m = format!(
            "{} {} already exists, the server was not able to generate a unique name for the object",
            qualified(group, resource),
            quote(name)
        );
        Self::about(409, "AlreadyExists", group, resource, name, m).retry(1)
    }

    /// 409: a write that cannot be done on the object as it is now. See [`OPTIMISTIC_LOCK`].
    pub fn conflict(group: &str, resource: &str, name: &str, msg: &str) -> Self {
        let m = format!("Operation cannot be fulfilled on {} {}: {msg}", qualified(group, resource), quote(name));
        Self::about(409, "Conflict", group, resource, name, m)
    }

    /// 409: server-side apply met fields of other managers.
    pub fn apply_conflict(causes: Vec<Cause>, message: impl Into<String>) -> Self {
        Self::new(409, "Conflict", message).with_details(Details { causes, ..Details::default() })
    }

    /// 422: rules of the kind do not hold.
    pub fn invalid(group: &str, kind: &str, name: &str, errors: Vec<FieldError>) -> Self {
        let mut m = format!("{} {} is invalid", qualified(group, kind), quote(name));
        if !errors.is_empty() {
            m.push_str(": ");
            m.push_str(&aggregate(&errors));
        }
        let mut e = Self::about(422, "Invalid", group, kind, name, m);
        let causes = errors
            .into_iter()
            .map(|e| Cause { reason: e.kind.reason().into(), message: e.body(), field: e.path })
            .collect();
        if let Some(d) = &mut e.0.details {
            d.causes = causes;
        }
        e
    }

    /// 400: the request itself makes no sense.
    pub fn bad_request(msg: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", msg)
    }

    /// 403. With an empty `resource` the message names no object.
    pub fn forbidden(group: &str, resource: &str, name: &str, msg: &str) -> Self {
        let m = match (resource, name) {
            ("", _) => format!("forbidden: {msg}"),
            (_, "") => format!("{} is forbidden: {msg}", qualified(group, resource)),
            _ => format!("{} {} is forbidden: {msg}", qualified(group, resource), quote(name)),
        };
        Self::about(403, "Forbidden", group, resource, name, m)
    }

    /// 401. An empty message becomes upstream's `Unauthorized`.
    pub fn unauthorized(msg: &str) -> Self {
        Self::new(401, "Unauthorized", if msg.is_empty() { "Unauthorized" } else { msg })
    }

    /// 410, reason `Gone`.
    pub fn gone(msg: impl Into<String>) -> Self {
        Self::new(410, "Gone", msg)
    }

    /// 410, reason `Expired`: a resource version or continue token that is too old.
    pub fn expired(msg: impl Into<String>) -> Self {
        Self::new(410, "Expired", msg)
    }

    /// 405: e.g. `create is not supported on resources of kind "componentstatuses"`.
    pub fn method_not_supported(group: &str, resource: &str, action: &str) -> Self {
        let m = format!("{action} is not supported on resources of kind {}", quote(&qualified(group, resource)));
        Self::about(405, "MethodNotAllowed", group, resource, "", m)
    }

    /// 406: none of the media types in `Accept` can be served; `accepted` are those that can.
    pub fn not_acceptable(accepted: &[&str]) -> Self {
        let m = format!("only the following media types are accepted: {}", accepted.join(", "));
        Self::new(406, "NotAcceptable", m)
    }

    /// 415: the body's media type is not understood.
    pub fn unsupported_media_type(accepted: &[&str]) -> Self {
        let m = format!(
            "the body of the request was in an unknown format - accepted media types include: {}",
            accepted.join(", ")
        );
        Self::new(415, "UnsupportedMediaType", m)
    }

    /// 413.
    pub fn request_entity_too_large(msg: impl fmt::Display) -> Self {
        Self::new(413, "RequestEntityTooLarge", format!("Request entity too large: {msg}"))
    }

    /// 504: the request's deadline passed; the operation may still complete.
    pub fn timeout(msg: impl fmt::Display, retry_after_seconds: u32) -> Self {
        Self::new(504, "Timeout", format!("Timeout: {msg}")).retry(retry_after_seconds)
    }

    /// 500 with reason `ServerTimeout`: try again.
    pub fn server_timeout(group: &str, resource: &str, operation: &str, retry_after_seconds: u32) -> Self {
        let m = format!(
            "The {operation} operation against {} could not be completed at this time, please try again.",
            qualified(group, resource)
        );
        Self::about(500, "ServerTimeout", group, resource, operation, m).retry(retry_after_seconds)
    }

    /// 429.
    pub fn too_many_requests(msg: impl Into<String>, retry_after_seconds: u32) -> Self {
        Self::new(429, "TooManyRequests", msg).retry(retry_after_seconds)
    }

    /// 500: not the user's fault.
    pub fn internal(msg: impl fmt::Display) -> Self {
        let message = msg.to_string();
        let details =
            Details { causes: vec![Cause { message: message.clone(), ..Cause::default() }], ..Details::default() };
        Self::new(500, "InternalError", format!("Internal error occurred: {message}")).with_details(details)
    }

    /// 503.
    pub fn service_unavailable(msg: impl Into<String>) -> Self {
        Self::new(503, "ServiceUnavailable", msg)
    }

    /// 501: a part of Kubernetes that Windlass does not have.
    pub fn not_implemented(msg: impl Into<String>) -> Self {
        Self::new(501, "NotImplemented", msg)
    }

    /// Puts `details` in place of what was there.
    pub fn with_details(mut self, details: Details) -> Self {
        self.0.details = Some(details);
        self
    }

    /// Adds a cause.
    pub fn with_cause(mut self, reason: &str, message: impl Into<String>, field: &str) -> Self {
        let cause = Cause { reason: reason.into(), message: message.into(), field: field.into() };
        self.0.details.get_or_insert_with(Details::default).causes.push(cause);
        self
    }

    /// The `metav1.Status` object to answer with.
    pub fn to_status(&self) -> Value {
        let mut status = json!({
            "apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure",
            "message": self.message, "code": self.code,
        });
        if !self.reason.is_empty() {
            status["reason"] = self.reason.into();
        }
        if let Some(d) = &self.details {
            status["details"] = d.to_value();
        }
        status
    }

    /// Reads a `metav1.Status` of another server (a webhook, a virtual resource).
    pub fn from_status(v: &Value) -> Option<Self> {
        if v["status"] != "Failure" {
            return None;
        }
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        let d = &v["details"];
        let details = d.is_object().then(|| Details {
            name: text(&d["name"]),
            group: text(&d["group"]),
            kind: text(&d["kind"]),
            uid: text(&d["uid"]),
            causes: d["causes"].as_array().map_or(Vec::new(), |l| {
                l.iter()
                    .map(|c| Cause {
                        reason: text(&c["reason"]),
                        message: text(&c["message"]),
                        field: text(&c["field"]),
                    })
                    .collect()
            }),
            retry_after_seconds: d["retryAfterSeconds"].as_u64().and_then(|n| u32::try_from(n).ok()).unwrap_or(0),
        });
        let code = v["code"].as_u64().and_then(|c| u16::try_from(c).ok()).unwrap_or(500);
        let body = ApiErrorBody {
            code,
            reason: known_reason(v["reason"].as_str().unwrap_or_default()),
            message: text(&v["message"]),
            details,
        };
        Some(Self(Box::new(body)))
    }
}

impl Details {
    fn to_value(&self) -> Value {
        let mut m = Map::new();
        for (key, text) in [("name", &self.name), ("group", &self.group), ("kind", &self.kind), ("uid", &self.uid)] {
            if !text.is_empty() {
                m.insert(key.into(), text.as_str().into());
            }
        }
        if !self.causes.is_empty() {
            m.insert("causes".into(), self.causes.iter().map(Cause::to_value).collect());
        }
        if self.retry_after_seconds != 0 {
            m.insert("retryAfterSeconds".into(), self.retry_after_seconds.into());
        }
        Value::Object(m)
    }
}

impl Cause {
    fn to_value(&self) -> Value {
        let mut m = Map::new();
        for (key, text) in [("reason", &self.reason), ("message", &self.message), ("field", &self.field)] {
            if !text.is_empty() {
                m.insert(key.into(), text.as_str().into());
            }
        }
        Value::Object(m)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages() {
        let table = [
            (ApiError::not_found("", "pods", "x"), 404, "pods \"x\" not found"),
            (ApiError::not_found("apps", "deployments", "x"), 404, "deployments.apps \"x\" not found"),
            (ApiError::already_exists("", "pods", "x"), 409, "pods \"x\" already exists"),
            (
                ApiError::conflict("", "pods", "x", OPTIMISTIC_LOCK),
                409,
                "Operation cannot be fulfilled on pods \"x\": the object has been modified; please apply your changes to the latest version and try again",
            ),
            (
                ApiError::invalid("", "Pod", "x", vec![FieldError::required("spec.a", ""), FieldError::forbidden("spec.b", "no")]),
                422,
                "Pod \"x\" is invalid: [spec.a: Required value, spec.b: Forbidden: no]",
            ),
            (
                ApiError::invalid("apps", "Deployment", "x", vec![FieldError::required("spec.a", "")]),
                422,
                "Deployment.apps \"x\" is invalid: spec.a: Required value",
            ),
            (ApiError::forbidden("", "pods", "x", "no"), 403, "pods \"x\" is forbidden: no"),
            (ApiError::method_not_supported("", "pods", "fly"), 405, "fly is not supported on resources of kind \"pods\""),
        ];
        for (e, code, message) in table {
            assert_eq!((e.code, e.message.as_str()), (code, message));
            let status = e.to_status();
            assert_eq!(status["code"], code);
            assert_eq!(ApiError::from_status(&status), Some(e));
        }
    }
}
