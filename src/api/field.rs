//! One violated rule at one field, in upstream's words.
//!
//! The wording class (`Required value`, `Invalid value`, `Forbidden`, ...) and the reason in `details.causes`
//! are what `k8s.io/apimachinery/pkg/util/validation/field` prints, so that clients that match on them keep working.

use std::fmt;

use serde_json::Value;

/// Which rule a value broke. Each kind has a reason (for `details.causes`) and a wording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ErrorKind {
    /// A value is missing (absent, empty string, empty list).
    Required,
    /// A value is malformed or out of bounds, or an immutable one was changed.
    Invalid,
    /// A value that must be unique occurs twice.
    Duplicate,
    /// A reference leads nowhere.
    NotFound,
    /// A value outside an enumeration.
    NotSupported,
    /// A well-formed value that may not be set here.
    Forbidden,
    /// A string or blob above its limit; the value is not repeated in the message.
    TooLong,
    /// A list above its limit.
    TooMany,
    /// A list below its lower bound.
    TooFew,
    /// A string below its lower bound.
    TooShort,
    /// The JSON type is not the schema's.
    TypeInvalid,
    /// Not the user's fault.
    Internal,
}

impl ErrorKind {
    /// The machine-readable `reason` of a `StatusCause`.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Required => "FieldValueRequired",
            Self::Invalid => "FieldValueInvalid",
            Self::Duplicate => "FieldValueDuplicate",
            Self::NotFound => "FieldValueNotFound",
            Self::NotSupported => "FieldValueNotSupported",
            Self::Forbidden => "FieldValueForbidden",
            Self::TooLong => "FieldValueTooLong",
            Self::TooMany => "FieldValueTooMany",
            Self::TooFew => "FieldValueTooFew",
            Self::TooShort => "FieldValueTooShort",
            Self::TypeInvalid => "FieldValueTypeInvalid",
            Self::Internal => "InternalError",
        }
    }

    fn words(self) -> &'static str {
        match self {
            Self::Required => "Required value",
            Self::Invalid | Self::TypeInvalid => "Invalid value",
            Self::Duplicate => "Duplicate value",
            Self::NotFound => "Not found",
            Self::NotSupported => "Unsupported value",
            Self::Forbidden => "Forbidden",
            Self::TooLong => "Too long",
            Self::TooMany => "Too many",
            Self::TooFew => "Too few",
            Self::TooShort => "Too short",
            Self::Internal => "Internal error",
        }
    }

    fn shows_value(self) -> bool {
        !matches!(self, Self::Required | Self::Forbidden | Self::TooLong | Self::TooShort | Self::Internal)
    }
}

/// A rule that does not hold at a field. `Display` gives `path: Wording: value: detail`.
#[derive(Clone, Debug, PartialEq)]
pub struct FieldError {
    /// The rule's class.
    pub kind: ErrorKind,
    /// Where, as upstream writes paths: `spec.containers[0].name`, `metadata.labels[a/b]`.
    pub path: String,
    /// The offending value; `None` when it is not to be shown.
    pub value: Option<Value>,
    /// What would be accepted.
    pub detail: String,
}

impl FieldError {
    /// An error of any kind.
    pub fn new(kind: ErrorKind, path: impl Into<String>, value: Option<Value>, detail: impl Into<String>) -> Self {
        Self { kind, path: path.into(), value, detail: detail.into() }
    }

    /// A value is missing.
    pub fn required(path: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(ErrorKind::Required, path, None, detail)
    }

    /// A value is malformed; `value` is repeated in the message.
    pub fn invalid(path: impl Into<String>, value: impl Into<Value>, detail: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, path, Some(value.into()), detail)
    }

    /// A value occurs twice.
    pub fn duplicate(path: impl Into<String>, value: impl Into<Value>) -> Self {
        Self::new(ErrorKind::Duplicate, path, Some(value.into()), "")
    }

    /// A reference leads nowhere.
    pub fn not_found(path: impl Into<String>, value: impl Into<Value>) -> Self {
        Self::new(ErrorKind::NotFound, path, Some(value.into()), "")
    }

    /// A value outside of `supported`, which the message lists.
    pub fn not_supported(path: impl Into<String>, value: impl Into<Value>, supported: &[&str]) -> Self {
        let detail = if supported.is_empty() {
            String::new()
        } else {
            let list: Vec<String> = supported.iter().map(|s| quote(s)).collect();
            format!("supported values: {}", list.join(", "))
        };
        Self::new(ErrorKind::NotSupported, path, Some(value.into()), detail)
    }

    /// A value that may not be set here.
    pub fn forbidden(path: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::new(ErrorKind::Forbidden, path, None, detail)
    }

    /// A string or blob of more than `max` bytes.
    pub fn too_long(path: impl Into<String>, max: usize) -> Self {
        let unit = if max == 1 { "byte" } else { "bytes" };
        Self::new(ErrorKind::TooLong, path, None, format!("may not be more than {max} {unit}"))
    }

    /// A list of `actual` items where at most `max` are allowed.
    pub fn too_many(path: impl Into<String>, actual: usize, max: usize) -> Self {
        let unit = if max == 1 { "item" } else { "items" };
        Self::new(
            ErrorKind::TooMany,
            path,
            Some(actual.into()),
            format!("must have at most {max} {unit}"),
        )
    }

    /// The JSON type is not the schema's.
    pub fn type_invalid(path: impl Into<String>, value: impl Into<Value>, detail: impl Into<String>) -> Self {
        Self::new(ErrorKind::TypeInvalid, path, Some(value.into()), detail)
    }

    /// The message without the path: what a `StatusCause` carries.
    pub fn body(&self) -> String {
        let mut s = self.kind.words().to_owned();
        if self.kind.shows_value()
            && let Some(v) = &self.value
        {
            s.push_str(": ");
            match v {
                Value::String(t) => s.push_str(&quote(t)),
                Value::Null => s.push_str("null"),
                other => s.push_str(&go_json(other)),
            }
        }
        if !self.detail.is_empty() {
            s.push_str(": ");
            s.push_str(&self.detail);
        }
        s
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.body())
    }
}

impl std::error::Error for FieldError {}

/// Go's `%q`: what upstream's messages quote strings with.
pub fn quote(s: &str) -> String {
    let mut out = String::with_capacity(s.len() + 2);
    out.push('"');
    for c in s.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            '\u{7}' => out.push_str("\\a"),
            '\u{8}' => out.push_str("\\b"),
            '\u{b}' => out.push_str("\\v"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 || c as u32 == 0x7f => out.push_str(&format!("\\x{:02x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// `encoding/json`'s text: like ours, but `<`, `>` and `&` are escaped.
fn go_json(v: &Value) -> String {
    let s = v.to_string();
    if s.contains(['<', '>', '&']) {
        s.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
    } else {
        s
    }
}

/// Upstream's aggregate of several errors: one stands alone, more are bracketed, equal ones said once.
pub fn aggregate(errors: &[FieldError]) -> String {
    let mut seen: Vec<String> = Vec::with_capacity(errors.len());
    for e in errors {
        let s = e.to_string();
        if !seen.contains(&s) {
            seen.push(s);
        }
    }
    match seen.len() {
        1 => seen.swap_remove(0),
        _ => format!("[{}]", seen.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn wording() {
        let table = [
            (FieldError::required("spec.a", ""), "spec.a: Required value"),
            (FieldError::required("spec.a", "say it"), "spec.a: Required value: say it"),
            (FieldError::invalid("a", 3, "must be even"), "a: Invalid value: 3: must be even"),
            (FieldError::invalid("a", "x\"y", "no"), "a: Invalid value: \"x\\\"y\": no"),
            (FieldError::invalid("a", json!({"b":"<"}), ""), "a: Invalid value: {\"b\":\"\\u003c\"}"),
            (FieldError::duplicate("a[1]", "x"), "a[1]: Duplicate value: \"x\""),
            (FieldError::not_supported("a", "x", &["y", "z"]), "a: Unsupported value: \"x\": supported values: \"y\", \"z\""),
            (FieldError::forbidden("a", "may not"), "a: Forbidden: may not"),
            (FieldError::too_long("a", 63), "a: Too long: may not be more than 63 bytes"),
            (FieldError::too_many("a", 3, 1), "a: Too many: 3: must have at most 1 item"),
            (FieldError::not_found("a", "v"), "a: Not found: \"v\""),
        ];
        for (e, want) in table {
            assert_eq!(e.to_string(), want);
        }
    }
}
