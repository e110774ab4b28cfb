//! PodSecurity: namespaces' labels hold their pods to a level of the Pod Security Standards.
//!
//! Levels and versions as upstream's `pod-security-admission`; the checks and their wording are in [`checks`].

pub mod checks;

use super::pods::{items, text};
use super::{AdmissionRequest, Operation, Plugin};
use crate::cluster::{Cluster, Gr};
use async_trait::async_trait;
use checks::Violation;
use serde_json::Value;
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use windlass_api::field::FieldError;
use windlass_api::{ApiError, meta};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Privileged,
    Baseline,
    Restricted,
}

/// A minor version of the standards; `u32::MAX` is `latest`.
pub type Minor = u32;
pub const LATEST: Minor = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LevelVersion {
    pub level: Level,
    pub version: Minor,
}

impl fmt::Display for LevelVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = match self.level {
            Level::Privileged => "privileged",
            Level::Baseline => "baseline",
            Level::Restricted => "restricted",
        };
        match self.version {
            LATEST => write!(f, "{level}:latest"),
            minor => write!(f, "{level}:v1.{minor}"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    pub enforce: LevelVersion,
    pub audit: LevelVersion,
    pub warn: LevelVersion,
}

const PREFIX: &str = "pod-security.kubernetes.io/";

fn parse_level(text: &str) -> Option<Level> {
    match text {
        "privileged" => Some(Level::Privileged),
        "baseline" => Some(Level::Baseline),
        "restricted" => Some(Level::Restricted),
        _ => None,
    }
}

fn parse_version(text: &str) -> Option<Minor> {
    if text == "latest" {
        return Some(LATEST);
    }
    let minor = text.strip_prefix("v1.")?;
    let canonical = minor == "0" || (!minor.starts_with('0') && minor.bytes().all(|byte| byte.is_ascii_digit()));
    let canonical = canonical && !minor.is_empty();
    canonical.then(|| minor.parse().ok()).flatten().filter(|minor| *minor < LATEST)
}

impl Policy {
    /// The policy that a namespace's labels ask for, and what is wrong with them. A bad enforce label counts as
    /// `restricted`, bad audit and warn labels as `privileged`, a bad version as `latest`.
    pub fn of(namespace: &Value) -> (Policy, Vec<FieldError>) {
        let open = LevelVersion { level: Level::Privileged, version: LATEST };
        let mut policy = Policy { enforce: open, audit: open, warn: open };
        let mut errors = Vec::new();
        let label = |name: &str| meta::label(namespace, &format!("{PREFIX}{name}"));
        let mut report = |name: &str, value: &str, detail: &str| {
            errors.push(FieldError::invalid(format!("metadata.labels[{PREFIX}{name}]"), value, detail));
        };
        let levels = "must be one of privileged, baseline, restricted";
        let versions = "must be \"latest\" or \"v1.x\"";
        let mut modes = [
            ("enforce", &mut policy.enforce, Level::Restricted),
            ("audit", &mut policy.audit, Level::Privileged),
            ("warn", &mut policy.warn, Level::Privileged),
        ];
        let mut good_enforce = false;
        for (mode, slot, fallback) in &mut modes {
            if let Some(value) = label(mode) {
                slot.level = parse_level(value).unwrap_or_else(|| {
                    report(mode, value, levels);
                    *fallback
                });
                good_enforce |= *mode == "enforce" && parse_level(value).is_some();
            }
            let name = format!("{mode}-version");
            if let Some(value) = label(&name) {
                slot.version = parse_version(value).unwrap_or_else(|| {
                    report(&name, value, versions);
                    LATEST
                });
            }
        }
        // Without a warn label the warnings follow a stricter enforce level.
        if good_enforce && label("warn").is_none() && policy.enforce.level > policy.warn.level {
            policy.warn.level = policy.enforce.level;
            if label("warn-version").is_none() {
                policy.warn.version = policy.enforce.version;
            }
        }
        (policy, errors)
    }
}

/// The reasons and details of all failed checks; `None` if the pod is allowed.
fn evaluate(at: LevelVersion, metadata: &Value, spec: &Value) -> Option<Vec<Violation>> {
    let violations = checks::evaluate(at.level, at.version, metadata, spec);
    (!violations.is_empty()).then_some(violations)
}

fn detail(violations: &[Violation]) -> String {
    let shown = |violation: &Violation| match violation.detail.as_str() {
        "" => violation.reason.clone(),
        detail => format!("{} ({detail})", violation.reason),
    };
    violations.iter().map(shown).collect::<Vec<_>>().join(", ")
}

fn reason(violations: &[Violation]) -> String {
    violations.iter().map(|violation| violation.reason.as_str()).collect::<Vec<_>>().join(", ")
}

/// Metadata and spec of the pods that an object makes; `None` if it makes none.
fn template<'a>(request: &'a AdmissionRequest<'_>) -> Option<(&'a Value, &'a Value)> {
    let object = request.new_object();
    let template = match (request.resource.group.as_str(), request.resource.plural.as_str()) {
        ("", "podtemplates") => &object["template"],
        ("", "replicationcontrollers") | ("apps", "replicasets" | "deployments" | "statefulsets" | "daemonsets") => {
            &object["spec"]["template"]
        }
        ("batch", "jobs") => &object["spec"]["template"],
        ("batch", "cronjobs") => &object["spec"]["jobTemplate"]["spec"]["template"],
        _ => return None,
    };
    template.is_object().then_some((&template["metadata"], &template["spec"]))
}

/// Whether an update of a pod can change what the checks see: containers added or images changed.
fn significant(new: &Value, old: &Value) -> bool {
    for field in ["containers", "initContainers"] {
        let (news, olds) = (items(&new["spec"], field), items(&old["spec"], field));
        if news.len() != olds.len() || news.zip(olds).any(|(new, old)| new["image"] != old["image"]) {
            return true;
        }
    }
    items(&new["spec"], "ephemeralContainers").any(|container| {
        let mut olds = items(&old["spec"], "ephemeralContainers");
        let known = olds.find(|known| text(known, "name") == text(container, "name"));
        known.is_none_or(|known| known["image"] != container["image"])
    })
}

/// At most so many pods of a namespace are looked at when its level rises, for at most so long (upstream's bounds).
const PODS_CHECKED: usize = 3000;
const CHECK_TIME: Duration = Duration::from_secs(1);

pub struct PodSecurity {
    pub cluster: Arc<dyn Cluster>,
}

impl PodSecurity {
    fn validate_namespace(&self, request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        if !request.subresource.is_empty() {
            return Ok(());
        }
        let namespace = request.new_object();
        let (policy, errors) = Policy::of(namespace);
        let name = meta::name(namespace);
        let Some(old) = request.old else {
            return match errors.is_empty() {
                true => Ok(()),
                false => Err(ApiError::invalid("", "Namespace", name, errors)),
            };
        };
        let (old_policy, old_errors) = Policy::of(old);
        if !errors.is_empty() && errors != old_errors {
            return Err(ApiError::invalid("", "Namespace", name, errors));
        }
        let (new, before) = (policy.enforce, old_policy.enforce);
        let relaxed = new.version == before.version && new.level <= before.level;
        if new != before && new.level != Level::Privileged && !relaxed {
            self.warn_of_pods(request, name, new);
        }
        Ok(())
    }

    fn warn_of_pods(&self, request: &AdmissionRequest<'_>, namespace: &str, enforce: LevelVersion) {
        let pods = self.cluster.cached_list(Gr("", "pods"), Some(namespace));
        let total = pods.len();
        // One pod of each controller first.
        let mut seen = HashSet::new();
        let (first, rest): (Vec<_>, Vec<_>) = pods.into_iter().partition(|pod| {
            let controller = meta::controller_of(pod).map(|owner| text(owner, "uid").to_owned());
            controller.is_none_or(|uid| seen.insert(uid))
        });
        let deadline = Instant::now() + CHECK_TIME;
        let mut checked = 0;
        let mut found: BTreeMap<String, (String, usize)> = BTreeMap::new();
        for pod in first.iter().chain(&rest).take(PODS_CHECKED) {
            checked += 1;
            if let Some(violations) = evaluate(enforce, &pod["metadata"], &pod["spec"]) {
                let name = meta::name(pod);
                let entry = found.entry(reason(&violations)).or_insert_with(|| (name.to_owned(), 0));
                entry.1 += 1;
                if name < entry.0.as_str() {
                    entry.0 = name.to_owned();
                }
            }
            if Instant::now() > deadline {
                break;
            }
        }
        if checked < total {
            request.warn(format!(
                "new PodSecurity enforce level only checked against the first {checked} of {total} existing pods"
            ));
        }
        if found.is_empty() {
            return;
        }
        let level = enforce.to_string();
        request.warn(format!("existing pods in namespace {namespace:?} violate the new PodSecurity enforce level {level:?}"));
        let mut lines: Vec<String> = found
            .into_iter()
            .map(|(reason, (pod, count))| match count {
                1 => format!("{pod}: {reason}"),
                2 => format!("{pod} (and 1 other pod): {reason}"),
                count => format!("{pod} (and {} other pods): {reason}", count - 1),
            })
            .collect();
        lines.sort();
        lines.into_iter().for_each(|line| request.warn(line));
    }

    async fn policy(&self, namespace: &str) -> Result<Policy, ApiError> {
        let kind = Gr("", "namespaces");
        let namespace = match self.cluster.cached(kind, "", namespace) {
            Some(found) => found,
            None => {
                let live = self.cluster.get(kind, "", namespace).await?;
                live.ok_or_else(|| ApiError::internal(format!("failed to lookup namespace {namespace:?}")))?
            }
        };
        Ok(Policy::of(&namespace).0)
    }

    fn warn(request: &AdmissionRequest<'_>, at: LevelVersion, metadata: &Value, spec: &Value) {
        if let Some(violations) = evaluate(at, metadata, spec) {
            let level = at.to_string();
            request.warn(format!("would violate PodSecurity {level:?}: {}", detail(&violations)));
        }
    }

    async fn validate_pod(&self, request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        let ignored = ["exec", "attach", "binding", "eviction", "log", "portforward", "proxy", "status"];
        if ignored.contains(&request.subresource) {
            return Ok(());
        }
        let policy = self.policy(request.namespace).await?;
        let pod = request.new_object();
        if request.operation == Operation::Update && request.old.is_some_and(|old| !significant(pod, old)) {
            return Ok(());
        }
        if let Some(violations) = evaluate(policy.enforce, &pod["metadata"], &pod["spec"]) {
            let level = policy.enforce.to_string();
            return Err(request.forbidden(format!("violates PodSecurity {level:?}: {}", detail(&violations))));
        }
        Self::warn(request, policy.warn, &pod["metadata"], &pod["spec"]);
        Ok(())
    }
}

#[async_trait]
impl Plugin for PodSecurity {
    fn name(&self) -> &'static str {
        "PodSecurity"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn validate(&self, request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        if request.is("", "namespaces") {
            return self.validate_namespace(request);
        }
        if request.is("", "pods") {
            return self.validate_pod(request).await;
        }
        if !request.subresource.is_empty() {
            return Ok(());
        }
        if let Some((metadata, spec)) = template(request) {
            // A lost namespace must not keep a controller's object out: it only would be warned about.
            if let Ok(policy) = self.policy(request.namespace).await {
                Self::warn(request, policy.warn, metadata, spec);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
