//! The default roles and bindings, as data, and their reconciliation at start.
//!
//! `policy.txt` holds upstream's (`bootstrappolicy`, default feature gates), `windlass.txt` what Windlass adds. A line
//! that begins a role or a binding is followed by its rules, indented:
//!
//! ```text
//! clusterrole NAME [+aggregated-to ...] [=gathers ...]
//!   VERBS : RESOURCES @ GROUPS [= NAMES]      ("core" is the group without a name)
//!   VERBS : PATHS
//! role NAMESPACE/NAME
//! clusterrolebinding NAME -> clusterrole:ROLE SUBJECTS      (user:NAME group:NAME sa:NAMESPACE/NAME)
//! ```

use crate::authz::rbac::rules_of;
use crate::authz::rules::{PolicyRule, uncovered};
use crate::cluster::{Cluster, Gr};
use futures::StreamExt;
use serde_json::{Map, Value, json};
use windlass_api::{ApiError, meta};

const UPSTREAM: &str = include_str!("policy.txt");
const OWN: &str = include_str!("windlass.txt");

const GROUP: &str = "rbac.authorization.k8s.io";
const ROLES: Gr = Gr(GROUP, "roles");
const CLUSTER_ROLES: Gr = Gr(GROUP, "clusterroles");
const ROLE_BINDINGS: Gr = Gr(GROUP, "rolebindings");
const CLUSTER_ROLE_BINDINGS: Gr = Gr(GROUP, "clusterrolebindings");
const AUTO_UPDATE: &str = "rbac.authorization.kubernetes.io/autoupdate";
const AGGREGATE: &str = "rbac.authorization.k8s.io/aggregate-to-";

/// What is wrong with a policy line; the texts are compiled in and tested, so users never see it.
#[derive(Debug, thiserror::Error)]
#[error("bootstrap policy, line {line}: {what}")]
pub struct PolicyError {
    line: usize,
    what: &'static str,
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

fn metadata(name: &str, namespaced: bool) -> Value {
    let (namespace, name) = match namespaced {
        true => name.split_once('/').unwrap_or(("", name)),
        false => ("", name),
    };
    let mut metadata = json!({
        "name": name,
        "labels": {"kubernetes.io/bootstrapping": "rbac-defaults"},
        "annotations": {AUTO_UPDATE: "true"},
    });
    if !namespace.is_empty() {
        metadata["namespace"] = namespace.into();
    }
    metadata
}

fn rule(line: &str) -> Option<PolicyRule> {
    let (verbs, rest) = line.split_once(" : ")?;
    let verbs = words(verbs);
    let Some((resources, rest)) = rest.split_once(" @ ") else {
        return Some(PolicyRule { verbs, non_resource_urls: words(rest), ..PolicyRule::default() });
    };
    let (groups, names) = rest.split_once(" = ").unwrap_or((rest, ""));
    let groups = words(groups).into_iter().map(|group| if group == "core" { String::new() } else { group });
    Some(PolicyRule {
        verbs,
        resources: words(resources),
        api_groups: groups.collect(),
        resource_names: words(names),
        ..PolicyRule::default()
    })
}

fn role(kind: &str, rest: &str) -> Option<(Gr, Value)> {
    let mut parts = rest.split_whitespace();
    let name = parts.next()?;
    let (gr, kind) = if kind == "role" { (ROLES, "Role") } else { (CLUSTER_ROLES, "ClusterRole") };
    let mut object = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": metadata(name, kind == "Role"),
        "rules": [],
    });
    let mut gathered = Vec::new();
    for part in parts {
        if let Some(target) = part.strip_prefix('+') {
            object["metadata"]["labels"][format!("{AGGREGATE}{target}")] = "true".into();
        } else {
            let label = format!("{AGGREGATE}{}", part.strip_prefix('=')?);
            let mut labels = Map::new();
            labels.insert(label, "true".into());
            gathered.push(json!({"matchLabels": labels}));
        }
    }
    if !gathered.is_empty() {
        object["aggregationRule"] = json!({"clusterRoleSelectors": gathered});
    }
    Some((gr, object))
}

fn subject(text: &str) -> Option<Value> {
    match text.split_once(':')? {
        ("user", name) => Some(json!({"apiGroup": GROUP, "kind": "User", "name": name})),
        ("group", name) => Some(json!({"apiGroup": GROUP, "kind": "Group", "name": name})),
        ("sa", name) => {
            let (namespace, name) = name.split_once('/')?;
            Some(json!({"kind": "ServiceAccount", "namespace": namespace, "name": name}))
        }
        _ => None,
    }
}

fn binding(kind: &str, rest: &str) -> Option<(Gr, Value)> {
    let (name, target) = rest.split_once(" -> ")?;
    let mut parts = target.split_whitespace();
    let (role_kind, role) = parts.next()?.split_once(':')?;
    let role_kind = if role_kind == "role" { "Role" } else { "ClusterRole" };
    let subjects: Option<Vec<Value>> = parts.map(subject).collect();
    let (gr, kind) = match kind {
        "rolebinding" => (ROLE_BINDINGS, "RoleBinding"),
        _ => (CLUSTER_ROLE_BINDINGS, "ClusterRoleBinding"),
    };
    let mut object = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": metadata(name, kind == "RoleBinding"),
        "roleRef": {"apiGroup": GROUP, "kind": role_kind, "name": role},
    });
    let subjects = subjects?;
    if !subjects.is_empty() {
        object["subjects"] = subjects.into();
    }
    Some((gr, object))
}

/// Reads a policy text into objects.
fn parse(text: &str) -> Result<Vec<(Gr, Value)>, PolicyError> {
    let mut objects: Vec<(Gr, Value)> = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.is_empty()) {
        let wrong = |what| PolicyError { line: index + 1, what };
        if let Some(line) = line.strip_prefix("  ") {
            let rule = rule(line).ok_or_else(|| wrong("not a rule"))?;
            let rules = objects.last_mut().and_then(|(_, object)| object["rules"].as_array_mut());
            rules.ok_or_else(|| wrong("a rule without a role"))?.push(rule.to_value());
            continue;
        }
        let (kind, rest) = line.split_once(' ').ok_or_else(|| wrong("neither a role nor a binding"))?;
        let object = match kind {
            "role" | "clusterrole" => role(kind, rest),
            "rolebinding" | "clusterrolebinding" => binding(kind, rest),
            _ => None,
        };
        objects.push(object.ok_or_else(|| wrong("neither a role nor a binding"))?);
    }
    Ok(objects)
}

/// All default roles and bindings. The controllers' roles are bound to the controller manager's own user too: here one
/// client serves all of them.
pub fn objects() -> Result<Vec<(Gr, Value)>, PolicyError> {
    let mut objects = parse(UPSTREAM)?;
    let controllers: Vec<String> = objects
        .iter()
        .filter(|(kind, _)| *kind == CLUSTER_ROLES)
        .filter_map(|(_, role)| meta::name(role).strip_prefix("system:controller:").map(str::to_owned))
        .collect();
    objects.extend(parse(OWN)?);
    for controller in controllers {
        let line = format!(
            "windlass:controller:{controller} -> clusterrole:system:controller:{controller} user:system:kube-controller-manager"
        );
        objects.extend(binding("clusterrolebinding", &line));
    }
    Ok(objects)
}

/// The rules of every node (the role `system:node`), for the Node authorizer.
pub fn node_rules() -> Result<Vec<PolicyRule>, PolicyError> {
    let objects = objects()?;
    let role = objects.iter().find(|(kind, role)| *kind == CLUSTER_ROLES && meta::name(role) == "system:node");
    Ok(role.map(|(_, role)| rules_of(role)).unwrap_or_default())
}

/// Adds entries that are missing; true if any was.
fn merge_map(into: &mut Value, field: &str, wanted: &Value) -> bool {
    let mut changed = false;
    for (key, value) in wanted[field].as_object().into_iter().flatten() {
        if into[field].get(key) != Some(value) {
            if !into[field].is_object() {
                into[field] = json!({});
            }
            into[field][key] = value.clone();
            changed = true;
        }
    }
    changed
}

/// Brings a stored role or binding up to the default: what is missing is added, what was added by people stays.
fn extend(stored: &mut Value, wanted: &Value) -> bool {
    if meta::annotation(stored, AUTO_UPDATE) == Some("false") {
        return false;
    }
    let mut changed = false;
    let mut metadata = stored["metadata"].take();
    changed |= merge_map(&mut metadata, "labels", &wanted["metadata"]);
    changed |= merge_map(&mut metadata, "annotations", &wanted["metadata"]);
    stored["metadata"] = metadata;
    // The rules of an aggregated role are its controller's.
    if !wanted["aggregationRule"].is_null() {
        if stored["aggregationRule"] != wanted["aggregationRule"] {
            stored["aggregationRule"] = wanted["aggregationRule"].clone();
            changed = true;
        }
        return changed;
    }
    let missing = uncovered(rules_of(stored).iter(), &rules_of(wanted));
    if !missing.is_empty() {
        let mut rules = stored["rules"].as_array().cloned().unwrap_or_default();
        rules.extend(missing.iter().map(PolicyRule::to_value));
        stored["rules"] = rules.into();
        changed = true;
    }
    let known = stored["subjects"].as_array().cloned().unwrap_or_default();
    let same = |a: &Value, b: &Value| ["kind", "name", "namespace"].iter().all(|field| a[field] == b[field]);
    let wanted_subjects = wanted["subjects"].as_array().into_iter().flatten();
    let missing: Vec<Value> =
        wanted_subjects.filter(|wanted| !known.iter().any(|known| same(known, wanted))).cloned().collect();
    if !missing.is_empty() {
        let all: Vec<Value> = known.into_iter().chain(missing).collect();
        stored["subjects"] = all.into();
        changed = true;
    }
    changed
}

async fn ensure_one(cluster: &dyn Cluster, kind: Gr, wanted: Value) -> Result<(), ApiError> {
    let (namespace, name) = (meta::namespace(&wanted).to_owned(), meta::name(&wanted).to_owned());
    let stored = match cluster.cached(kind, &namespace, &name) {
        Some(stored) => Some(stored),
        None => cluster.get(kind, &namespace, &name).await?,
    };
    let Some(stored) = stored else {
        return super::tolerate_existing(cluster.create(kind, wanted).await);
    };
    let automatic = meta::annotation(&stored, AUTO_UPDATE) != Some("false");
    if automatic && !wanted["roleRef"].is_null() && stored["roleRef"] != wanted["roleRef"] {
        // A binding's role cannot be changed.
        super::tolerate_missing(cluster.delete(kind, &namespace, &name).await)?;
        return super::tolerate_existing(cluster.create(kind, wanted).await);
    }
    if extend(&mut stored.as_ref().clone(), &wanted) {
        cluster.update(kind, &namespace, &name, &mut |stored| Ok(extend(stored, &wanted))).await?;
    }
    Ok(())
}

/// Creates and completes all default roles and bindings. Missing namespaces must have been made before.
pub async fn ensure(cluster: &dyn Cluster) -> Result<(), ApiError> {
    let objects = objects().map_err(ApiError::internal)?;
    let mut work =
        futures::stream::iter(objects).map(|(kind, wanted)| ensure_one(cluster, kind, wanted)).buffer_unordered(64);
    while let Some(result) = work.next().await {
        result?;
    }
    Ok(())
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
