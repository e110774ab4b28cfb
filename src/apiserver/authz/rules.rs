//! One policy rule: what it allows, and what other rules it covers.

use super::Attributes;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// `rbac.authorization.k8s.io/v1` PolicyRule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyRule {
    pub verbs: Vec<String>,
    pub api_groups: Vec<String>,
    pub resources: Vec<String>,
    pub resource_names: Vec<String>,
    pub non_resource_urls: Vec<String>,
}

fn strings(value: &Value) -> Vec<String> {
    let items = value.as_array().map(Vec::as_slice).unwrap_or_default();
    items.iter().filter_map(|item| item.as_str().map(str::to_owned)).collect()
}

fn has(set: &[String], element: &str) -> bool {
    set.iter().any(|item| item == element)
}

impl PolicyRule {
    /// Reads a rule of a role; what is missing or of another type is empty (the schema has checked it).
    pub fn from_value(rule: &Value) -> PolicyRule {
        PolicyRule {
            verbs: strings(&rule["verbs"]),
            api_groups: strings(&rule["apiGroups"]),
            resources: strings(&rule["resources"]),
            resource_names: strings(&rule["resourceNames"]),
            non_resource_urls: strings(&rule["nonResourceURLs"]),
        }
    }

    pub fn to_value(&self) -> Value {
        let mut rule = serde_json::Map::new();
        let fields = [
            ("apiGroups", &self.api_groups),
            ("nonResourceURLs", &self.non_resource_urls),
            ("resourceNames", &self.resource_names),
            ("resources", &self.resources),
        ];
        for (name, list) in fields {
            if !list.is_empty() {
                rule.insert(name.to_owned(), json!(list));
            }
        }
        rule.insert("verbs".to_owned(), json!(self.verbs));
        Value::Object(rule)
    }

    /// Whether this rule allows the request.
    pub fn allows(&self, request: &Attributes<'_>) -> bool {
        if !(has(&self.verbs, "*") || has(&self.verbs, request.verb)) {
            return false;
        }
        if !request.is_resource {
            return self.non_resource_urls.iter().any(|owner| owner == "*" || url_covers(owner, request.path));
        }
        (has(&self.api_groups, "*") || has(&self.api_groups, request.group))
            && self.resources.iter().any(|rule| resource_matches(rule, request.resource, request.subresource))
            && (self.resource_names.is_empty() || has(&self.resource_names, request.name))
    }

    /// Whether everything that `part` (of at most one verb, resource, name) allows is allowed by this rule too.
    fn covers(&self, part: &PolicyRule) -> bool {
        let all = |set: &[String], wanted: &[String]| wanted.iter().all(|item| has(set, item));
        let resources = has(&self.resources, "*")
            || part.resources.iter().all(|wanted| {
                has(&self.resources, wanted)
                    || wanted.split_once('/').is_some_and(|(_, sub)| has(&self.resources, &format!("*/{sub}")))
            });
        let names = self.resource_names.is_empty()
            || (!part.resource_names.is_empty() && all(&self.resource_names, &part.resource_names));
        let urls = part
            .non_resource_urls
            .iter()
            .all(|path| self.non_resource_urls.iter().any(|owner| url_covers(owner, path)));
        (has(&self.verbs, "*") || all(&self.verbs, &part.verbs))
            && (has(&self.api_groups, "*") || all(&self.api_groups, &part.api_groups))
            && resources
            && names
            && urls
    }

    /// The rule taken apart into rules of one verb, group, resource and name each.
    fn parts(&self) -> Vec<PolicyRule> {
        let mut parts = Vec::new();
        let one = |item: &String| vec![item.clone()];
        for group in &self.api_groups {
            for resource in &self.resources {
                for verb in &self.verbs {
                    let part = PolicyRule {
                        verbs: one(verb),
                        api_groups: one(group),
                        resources: one(resource),
                        ..PolicyRule::default()
                    };
                    if self.resource_names.is_empty() {
                        parts.push(part.clone());
                    }
                    for name in &self.resource_names {
                        parts.push(PolicyRule { resource_names: one(name), ..part.clone() });
                    }
                }
            }
        }
        for url in &self.non_resource_urls {
            for verb in &self.verbs {
                parts.push(PolicyRule { verbs: one(verb), non_resource_urls: one(url), ..PolicyRule::default() });
            }
        }
        parts
    }

    /// Upstream's short form, as in escalation errors: `{APIGroups:[""], Resources:["pods"], Verbs:["get"]}`.
    pub fn compact(&self) -> String {
        let fields = [
            ("APIGroups", &self.api_groups),
            ("Resources", &self.resources),
            ("NonResourceURLs", &self.non_resource_urls),
            ("ResourceNames", &self.resource_names),
            ("Verbs", &self.verbs),
        ];
        let shown = fields.iter().filter(|(_, list)| !list.is_empty());
        let parts: Vec<String> = shown.map(|(name, list)| format!("{name}:{}", go_list(list))).collect();
        format!("{{{}}}", parts.join(", "))
    }
}

/// A list as Go's `%q` prints it: `["a" "b"]`.
pub fn go_list(list: &[String]) -> String {
    let quoted: Vec<String> = list.iter().map(|item| format!("{item:?}")).collect();
    format!("[{}]", quoted.join(" "))
}

fn resource_matches(rule: &str, resource: &str, subresource: &str) -> bool {
    if rule == "*" {
        return true;
    }
    match (rule.split_once('/'), subresource) {
        (None, "") => rule == resource,
        (Some((owner, sub)), _) if !subresource.is_empty() => sub == subresource && (owner == "*" || owner == resource),
        _ => false,
    }
}

fn url_covers(owner: &str, path: &str) -> bool {
    owner == path || (owner.ends_with('*') && path.starts_with(owner.trim_end_matches('*')))
}

/// The parts of `wanted` that no rule of `owned` covers, those that differ only by verb joined; empty if all is covered.
pub fn uncovered<'a>(owned: impl Iterator<Item = &'a PolicyRule> + Clone, wanted: &[PolicyRule]) -> Vec<PolicyRule> {
    let mut joined: BTreeMap<(String, String, Vec<String>), PolicyRule> = BTreeMap::new();
    let mut missing = Vec::new();
    for part in wanted.iter().flat_map(PolicyRule::parts) {
        if owned.clone().any(|rule| rule.covers(&part)) {
            continue;
        }
        match (part.api_groups.first(), part.resources.first()) {
            (Some(group), Some(resource)) => {
                let key = (group.clone(), resource.clone(), part.resource_names.clone());
                joined.entry(key).and_modify(|rule| rule.verbs.extend(part.verbs.clone())).or_insert(part);
            }
            _ => missing.push(part),
        }
    }
    missing.extend(joined.into_values());
    missing
}
