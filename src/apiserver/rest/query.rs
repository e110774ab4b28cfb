//! The options of a request, from its query string or its body, checked as upstream checks them
//! (`apimachinery/pkg/apis/meta/v1/validation`).

use std::collections::HashSet;

use serde_json::{Value, json};
use windlass_api::ApiError;
use windlass_api::field::{ErrorKind, FieldError};
use windlass_api::selector::{FieldSelector, LabelSelector};

use crate::request::{form_urlencoded, truthy};

/// A decoded query string.
#[derive(Clone, Debug, Default)]
pub struct Query(Vec<(String, String)>);

impl Query {
    pub fn parse(query: &str) -> Query {
        Query(form_urlencoded(query).take(256).collect())
    }

    /// The first value of a parameter.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(k, _)| k == name).map(|(_, v)| v.as_str())
    }

    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(k, _)| k == name).map(|(_, v)| v.as_str())
    }

    pub fn pairs(&self) -> &[(String, String)] {
        &self.0
    }

    fn bool(&self, name: &str) -> Option<bool> {
        self.get(name).map(truthy)
    }

    fn int(&self, name: &str) -> Result<Option<i64>, ApiError> {
        match self.get(name) {
            None | Some("") => Ok(None),
            Some(text) => text.parse().map(Some).map_err(|_| {
                ApiError::bad_request(format!("strconv.ParseInt: parsing {text:?}: invalid syntax"))
            }),
        }
    }
}

/// What to do about fields that the schema does not know, and about duplicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum FieldValidation {
    Ignore,
    #[default]
    Warn,
    Strict,
}

/// CreateOptions, UpdateOptions and PatchOptions.
#[derive(Clone, Debug, Default)]
pub struct WriteOptions {
    pub dry_run: bool,
    pub field_manager: String,
    pub validation: FieldValidation,
    /// Only for apply.
    pub force: bool,
    /// The options as an object, for admission.
    pub document: Value,
}

/// Which write the options are for; decides kind and rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    Create,
    Update,
    Patch,
    Apply,
}

impl WriteOptions {
    pub fn parse(query: &Query, write: Write) -> Result<WriteOptions, ApiError> {
        let mut errors = Vec::new();
        let dry_run: Vec<&str> = query.all("dryRun").filter(|v| !v.is_empty()).collect();
        check_dry_run(&dry_run, &mut errors);
        let field_manager = query.get("fieldManager").unwrap_or_default();
        let force = query.bool("force");
        match write {
            Write::Apply if field_manager.is_empty() => {
                errors.push(field_error(ErrorKind::Required, "fieldManager", None, "is required for apply patch"));
            }
            Write::Patch if force.is_some() => {
                errors.push(field_error(ErrorKind::Forbidden, "force", None, "may not be specified for non-apply patch"));
            }
            _ => {}
        }
        check_manager(field_manager, &mut errors);
        let given = query.get("fieldValidation").unwrap_or_default();
        let validation = match given {
            "" | "Warn" => FieldValidation::Warn,
            "Ignore" => FieldValidation::Ignore,
            "Strict" => FieldValidation::Strict,
            _ => {
                let allowed = "supported values: \"\", \"Ignore\", \"Strict\", \"Warn\"";
                errors.push(field_error(ErrorKind::NotSupported, "fieldValidation", Some(given.into()), allowed));
                FieldValidation::Warn
            }
        };
        let kind = match write {
            Write::Create => "CreateOptions",
            Write::Update => "UpdateOptions",
            Write::Patch | Write::Apply => "PatchOptions",
        };
        if !errors.is_empty() {
            return Err(ApiError::invalid("meta.k8s.io", kind, "", errors));
        }
        let mut document = json!({"apiVersion": "meta.k8s.io/v1", "kind": kind});
        if !dry_run.is_empty() {
            document["dryRun"] = json!(["All"]);
        }
        if !field_manager.is_empty() {
            document["fieldManager"] = field_manager.into();
        }
        if !given.is_empty() {
            document["fieldValidation"] = given.into();
        }
        if let Some(force) = force {
            document["force"] = force.into();
        }
        Ok(WriteOptions { dry_run: !dry_run.is_empty(), field_manager: field_manager.to_owned(), validation, force: force.unwrap_or(false), document })
    }
}

fn field_error(kind: ErrorKind, path: &str, value: Option<Value>, detail: &str) -> FieldError {
    FieldError { kind, path: path.into(), value, detail: detail.into() }
}

fn check_dry_run(values: &[&str], errors: &mut Vec<FieldError>) {
    if values.iter().any(|v| *v != "All") {
        errors.push(field_error(ErrorKind::NotSupported, "dryRun", Some(json!(values)), "supported values: \"All\""));
    }
}

fn check_manager(manager: &str, errors: &mut Vec<FieldError>) {
    if manager.len() > 128 {
        errors.push(field_error(ErrorKind::TooLong, "fieldManager", None, "may not be more than 128 bytes"));
    }
    for (at, c) in manager.char_indices() {
        if c.is_control() {
            let detail = format!("invalid character U+{:04X} (at position {at})", u32::from(c));
            errors.push(field_error(ErrorKind::Invalid, "fieldManager", Some(manager.into()), &detail));
        }
    }
}

/// What happens to an object's dependents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Propagation {
    Orphan,
    Background,
    Foreground,
}

/// DeleteOptions.
#[derive(Clone, Debug, Default)]
pub struct DeleteOptions {
    pub dry_run: bool,
    pub grace: Option<i64>,
    pub uid: Option<String>,
    pub resource_version: Option<String>,
    /// From `propagationPolicy`.
    pub propagation: Option<Propagation>,
    /// The older way to say it.
    pub orphan_dependents: Option<bool>,
    /// An eviction was admitted as such.
    pub skip_admission: bool,
    pub document: Value,
}

impl DeleteOptions {
    /// From the query when there is no body.
    pub fn from_query(query: &Query) -> Result<DeleteOptions, ApiError> {
        let mut document = json!({});
        if let Some(grace) = query.int("gracePeriodSeconds")? {
            document["gracePeriodSeconds"] = grace.into();
        }
        if let Some(policy) = query.get("propagationPolicy") {
            document["propagationPolicy"] = policy.into();
        }
        if let Some(orphan) = query.bool("orphanDependents") {
            document["orphanDependents"] = orphan.into();
        }
        let dry_run: Vec<&str> = query.all("dryRun").filter(|v| !v.is_empty()).collect();
        if !dry_run.is_empty() {
            document["dryRun"] = json!(dry_run);
        }
        DeleteOptions::from_document(document)
    }

    /// From a decoded body; its types have been checked against the schema.
    pub fn from_document(mut document: Value) -> Result<DeleteOptions, ApiError> {
        let mut errors = Vec::new();
        let policy = document["propagationPolicy"].as_str().map(str::to_owned);
        let orphan_dependents = document["orphanDependents"].as_bool();
        if orphan_dependents.is_some() && policy.is_some() {
            let detail = "orphanDependents and deletionPropagation cannot be both set";
            errors.push(field_error(ErrorKind::Invalid, "propagationPolicy", policy.clone().map(Value::from), detail));
        }
        let propagation = match policy.as_deref() {
            None => None,
            Some("Orphan") => Some(Propagation::Orphan),
            Some("Background") => Some(Propagation::Background),
            Some("Foreground") => Some(Propagation::Foreground),
            Some(other) => {
                let allowed = "supported values: \"Background\", \"Foreground\", \"Orphan\", \"nil\"";
                errors.push(field_error(ErrorKind::NotSupported, "propagationPolicy", Some(other.into()), allowed));
                None
            }
        };
        let dry_run: Vec<&str> = document["dryRun"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        check_dry_run(&dry_run, &mut errors);
        let dry_run = !dry_run.is_empty();
        if !errors.is_empty() {
            return Err(ApiError::invalid("meta.k8s.io", "DeleteOptions", "", errors));
        }
        let precondition = |name: &str| document["preconditions"][name].as_str().map(str::to_owned);
        let (uid, resource_version) = (precondition("uid"), precondition("resourceVersion"));
        let grace = document["gracePeriodSeconds"].as_i64();
        document["apiVersion"] = "meta.k8s.io/v1".into();
        document["kind"] = "DeleteOptions".into();
        Ok(DeleteOptions { dry_run, grace, uid, resource_version, propagation, orphan_dependents, skip_admission: false, document })
    }
}

/// How exactly `resourceVersion` is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Match {
    Exact,
    NotOlderThan,
}

/// ListOptions.
#[derive(Clone, Debug, Default)]
pub struct ListOptions {
    pub labels: LabelSelector,
    pub fields: FieldSelector,
    pub watch: bool,
    pub bookmarks: bool,
    /// `""` and `"0"` differ: most recent, and anything.
    pub resource_version: String,
    pub version_match: Option<Match>,
    pub timeout_seconds: Option<u64>,
    pub limit: Option<usize>,
    pub continue_token: String,
    pub send_initial_events: Option<bool>,
    /// A watch from 0 or from nothing: initial objects, but no bookmark that ends them unless bookmarks were asked for.
    pub legacy_initial_events: bool,
}

impl ListOptions {
    pub fn parse(query: &Query, force_watch: bool) -> Result<ListOptions, ApiError> {
        let selector = |e: String| ApiError::bad_request(e);
        let mut options = ListOptions {
            labels: LabelSelector::parse(query.get("labelSelector").unwrap_or_default())
                .map_err(|e| selector(format!("unable to parse requirement: {e}")))?,
            fields: FieldSelector::parse(query.get("fieldSelector").unwrap_or_default()).map_err(selector)?,
            watch: force_watch || query.bool("watch").unwrap_or(false),
            bookmarks: query.bool("allowWatchBookmarks").unwrap_or(false),
            resource_version: query.get("resourceVersion").unwrap_or_default().to_owned(),
            version_match: None,
            timeout_seconds: query.int("timeoutSeconds")?.and_then(|s| u64::try_from(s).ok()).filter(|s| *s > 0),
            limit: query.int("limit")?.and_then(|l| usize::try_from(l).ok()).filter(|l| *l > 0),
            continue_token: query.get("continue").unwrap_or_default().to_owned(),
            send_initial_events: query.bool("sendInitialEvents"),
            legacy_initial_events: false,
        };
        let given = query.get("resourceVersionMatch").unwrap_or_default();
        options.set_match(given)?;
        Ok(options)
    }

    fn set_match(&mut self, given: &str) -> Result<(), ApiError> {
        let mut errors = Vec::new();
        let mut forbid = |field: &str, why: &str| errors.push(field_error(ErrorKind::Forbidden, field, None, why));
        let legacy = self.resource_version.is_empty() || self.resource_version == "0";
        self.version_match = match given {
            "Exact" => Some(Match::Exact),
            "NotOlderThan" => Some(Match::NotOlderThan),
            _ => None,
        };
        if self.watch && legacy && given.is_empty() && self.send_initial_events.is_none() {
            self.send_initial_events = Some(true);
            self.legacy_initial_events = true;
            self.version_match = Some(Match::NotOlderThan);
        } else if self.watch {
            let field = "resourceVersionMatch";
            if self.send_initial_events.is_some() && given != "NotOlderThan" {
                forbid(field, "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan");
            }
            if !given.is_empty() {
                if self.send_initial_events.is_none() {
                    forbid(field, "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided");
                }
                if !self.continue_token.is_empty() {
                    forbid(field, "resourceVersionMatch is forbidden when continue is provided");
                }
                if given != "NotOlderThan" {
                    errors.push(field_error(ErrorKind::NotSupported, field, Some(given.into()), "supported values: \"NotOlderThan\""));
                }
            }
        } else {
            let field = "resourceVersionMatch";
            if !given.is_empty() {
                if self.resource_version.is_empty() {
                    forbid(field, "resourceVersionMatch is forbidden unless resourceVersion is provided");
                }
                if !self.continue_token.is_empty() {
                    forbid(field, "resourceVersionMatch is forbidden when continue is provided");
                }
                if given == "Exact" && self.resource_version == "0" {
                    forbid(field, "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"");
                }
                if self.version_match.is_none() {
                    let allowed = "supported values: \"\", \"Exact\", \"NotOlderThan\"";
                    errors.push(field_error(ErrorKind::NotSupported, field, Some(given.into()), allowed));
                }
            }
            if self.send_initial_events.is_some() {
                errors.push(field_error(ErrorKind::Forbidden, "sendInitialEvents", None, "sendInitialEvents is forbidden for list"));
            }
        }
        if errors.is_empty() { Ok(()) } else { Err(ApiError::invalid("meta.k8s.io", "ListOptions", "", errors)) }
    }

    /// The revision that was asked for; 0 for none or any.
    pub fn revision(&self) -> Result<u64, ApiError> {
        if self.resource_version.is_empty() {
            return Ok(0);
        }
        self.resource_version.parse().map_err(|_| {
            let error = field_error(ErrorKind::Invalid, "resourceVersion", Some(self.resource_version.as_str().into()), "strconv.ParseUint: invalid syntax");
            ApiError::invalid("meta.k8s.io", "ListOptions", "", vec![error])
        })
    }
}

/// A `continue` token: upstream's form, so that what reads it there reads it here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Continue {
    /// The revision of the first page; `None` to go on at the present one.
    pub revision: Option<u64>,
    /// The key after which the next page begins.
    pub after: String,
}

impl Continue {
    pub fn encode(&self) -> String {
        use base64::Engine;
        let revision = self.revision.map_or(-1, |r| i64::try_from(r).unwrap_or(i64::MAX));
        let token = json!({"v": "meta.k8s.io/v1", "rv": revision, "start": format!("{}\u{0}", self.after)});
        base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(token.to_string())
    }

    pub fn decode(text: &str) -> Result<Continue, ApiError> {
        use base64::Engine;
        let bad = |why: &str| ApiError::bad_request(format!("continue key is not valid{why}"));
        let bytes = base64::engine::general_purpose::URL_SAFE_NO_PAD.decode(text).map_err(|e| bad(&format!(": {e}")))?;
        let token: Value = serde_json::from_slice(&bytes).map_err(|e| bad(&format!(": {e}")))?;
        if token["v"] != "meta.k8s.io/v1" {
            return Err(bad(": server does not recognize this encoded version"));
        }
        let revision = match token["rv"].as_i64() {
            Some(-1) => None,
            Some(rv) if rv > 0 => Some(rv.unsigned_abs()),
            _ => return Err(bad(": incorrect encoded start resourceVersion (version meta.k8s.io/v1)")),
        };
        let start = token["start"].as_str().unwrap_or_default();
        if start.is_empty() {
            return Err(bad(": encoded start key empty (version meta.k8s.io/v1)"));
        }
        if start.trim_start_matches('/').split('/').any(|part| matches!(part, "" | "." | "..")) {
            return Err(bad(&format!(": {start}")));
        }
        // The token names the first key of the next page; "a key and a zero byte" is "after that key".
        let start = start.trim_start_matches('/');
        let after = start.strip_suffix('\u{0}').map_or_else(|| predecessor(start), str::to_owned);
        Ok(Continue { revision, after })
    }
}

/// A string that sorts just before `key` for all keys that names allow.
fn predecessor(key: &str) -> String {
    let mut chars: Vec<char> = key.chars().collect();
    match chars.pop() {
        Some(last) if last > '\u{1}' => chars.extend([char::from_u32(last as u32 - 1).unwrap_or('\u{1}'), '\u{10ffff}']),
        _ => {}
    }
    chars.into_iter().collect()
}

/// Names of duplicates among owner references' uids (a warning upstream gives).
pub fn duplicate_owners(object: &Value) -> Vec<String> {
    let mut seen = HashSet::new();
    let owners = object["metadata"]["ownerReferences"].as_array();
    owners.into_iter().flatten().filter_map(|o| o["uid"].as_str()).filter(|uid| !seen.insert(*uid)).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(query: &str, want: Result<&str, &str>) {
        let got = ListOptions::parse(&Query::parse(query), false)
            .map(|o| format!("watch={} rv={:?} match={:?} initial={:?} legacy={}", o.watch, o.resource_version, o.version_match, o.send_initial_events, o.legacy_initial_events))
            .map_err(|e| e.message.clone());
        match (&got, want) {
            (Ok(got), Ok(want)) => assert_eq!(got, want, "{query}"),
            (Err(got), Err(want)) => assert!(got.contains(want), "{query}: {got}"),
            _ => panic!("{query}: {got:?}"),
        }
    }

    #[test]
    fn list_options() {
        check("", Ok("watch=false rv=\"\" match=None initial=None legacy=false"));
        check("watch=1", Ok("watch=true rv=\"\" match=Some(NotOlderThan) initial=Some(true) legacy=true"));
        check("watch=1&resourceVersion=5", Ok("watch=true rv=\"5\" match=None initial=None legacy=false"));
        check("watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan", Ok("watch=true rv=\"\" match=Some(NotOlderThan) initial=Some(true) legacy=false"));
        check("watch=true&sendInitialEvents=true", Err("sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"));
        check("sendInitialEvents=true", Err("sendInitialEvents is forbidden for list"));
        check("resourceVersionMatch=Exact", Err("forbidden unless resourceVersion is provided"));
        check("resourceVersion=0&resourceVersionMatch=Exact", Err("\"exact\" is forbidden"));
        check("resourceVersion=1&resourceVersionMatch=Odd", Err("Unsupported value"));
        check("limit=x", Err("invalid syntax"));
        check("labelSelector=a%20b%20c", Err(""));
    }

    #[test]
    fn continue_tokens() {
        let token = Continue { revision: Some(7), after: "ns/a".into() };
        assert_eq!(Continue::decode(&token.encode()).expect("own token"), token);
        let go_on = Continue { revision: None, after: "b".into() };
        assert_eq!(Continue::decode(&go_on.encode()).expect("own token"), go_on);
        use base64::Engine;
        let raw = |json: &str| base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(json);
        for bad in ["***", &raw("{}"), &raw(r#"{"v":"meta.k8s.io/v1","rv":0,"start":"a"}"#), &raw(r#"{"v":"meta.k8s.io/v1","rv":1,"start":""}"#), &raw(r#"{"v":"meta.k8s.io/v1","rv":1,"start":"../x"}"#)] {
            assert_eq!(Continue::decode(bad).expect_err("a bad token").code, 400, "{bad}");
        }
        let foreign = Continue::decode(&raw(r#"{"v":"meta.k8s.io/v1","rv":1,"start":"ns/b"}"#)).expect("a token");
        assert!(foreign.after.as_str() < "ns/b" && foreign.after.as_str() > "ns/a-z");
    }
}
