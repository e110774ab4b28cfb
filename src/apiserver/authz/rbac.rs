//! RBAC from an index: scope (cluster or namespace) → subject → grants.
//!
//! The index is fed by watch-cache callbacks; a decision looks up the user's name and groups in two scopes
//! and reads the rules of the roles found there. Roles are resolved at decision time, so a binding may precede its role.

use super::rules::PolicyRule;
use super::{Attributes, Authorizer, Decision, Rules};
use crate::request::UserInfo;
use parking_lot::RwLock;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;

/// Which of the four RBAC kinds an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Role,
    ClusterRole,
    RoleBinding,
    ClusterRoleBinding,
}

/// One subject of one binding.
#[derive(Debug)]
struct Grant {
    /// Empty for a cluster role binding.
    namespace: String,
    binding: String,
    role_kind: String,
    role: String,
    /// `Group "system:masters"`, as shown in reasons.
    subject: String,
}

impl Grant {
    fn describe(&self) -> String {
        let (kind, name) = match self.namespace.as_str() {
            "" => ("ClusterRoleBinding", self.binding.clone()),
            namespace => ("RoleBinding", format!("{}/{namespace}", self.binding)),
        };
        format!("{kind} {name:?} of {} {:?} to {}", self.role_kind, self.role, self.subject)
    }
}

#[derive(Default)]
struct Scope {
    users: HashMap<String, Vec<Arc<Grant>>>,
    groups: HashMap<String, Vec<Arc<Grant>>>,
}

impl Scope {
    fn grants<'a>(&'a self, user: &'a UserInfo) -> impl Iterator<Item = &'a Arc<Grant>> {
        let by_name = self.users.get(&user.name).into_iter();
        let by_group = user.groups.iter().filter_map(|group| self.groups.get(group));
        by_name.chain(by_group).flatten()
    }

    fn is_empty(&self) -> bool {
        self.users.is_empty() && self.groups.is_empty()
    }
}

#[derive(Default)]
struct Index {
    /// Rules by namespace ("" for cluster roles) and name.
    roles: HashMap<String, HashMap<String, Arc<[Arc<PolicyRule>]>>>,
    /// Grants by namespace ("" for cluster role bindings).
    scopes: HashMap<String, Scope>,
}

impl Index {
    fn rules(&self, role_kind: &str, role: &str, namespace: &str) -> Result<&Arc<[Arc<PolicyRule>]>, String> {
        let (scope, plural) = match role_kind {
            "Role" => (namespace, "role"),
            "ClusterRole" => ("", "clusterrole"),
            other => return Err(format!("unsupported role reference kind: {other:?}")),
        };
        let found = self.roles.get(scope).and_then(|roles| roles.get(role));
        found.ok_or_else(|| format!("{plural}.rbac.authorization.k8s.io {role:?} not found"))
    }

    /// Calls `visit` with each rule that applies until it answers true.
    fn visit(
        &self,
        user: &UserInfo,
        namespace: &str,
        visit: &mut dyn FnMut(&Grant, Result<&Arc<PolicyRule>, String>) -> bool,
    ) {
        let scopes = [Some(""), (!namespace.is_empty()).then_some(namespace)];
        for scope in scopes.into_iter().flatten() {
            let Some(scope) = self.scopes.get(scope) else { continue };
            for grant in scope.grants(user) {
                match self.rules(&grant.role_kind, &grant.role, &grant.namespace) {
                    Ok(rules) => {
                        for rule in rules.iter() {
                            if visit(grant, Ok(rule)) {
                                return;
                            }
                        }
                    }
                    Err(error) => {
                        if visit(grant, Err(error)) {
                            return;
                        }
                    }
                }
            }
        }
    }
}

/// The RBAC authorizer (upstream's `plugin/pkg/auth/authorizer/rbac`).
#[derive(Default)]
pub struct Rbac {
    index: RwLock<Index>,
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}

/// The rules of a Role or ClusterRole.
pub fn rules_of(role: &Value) -> Vec<PolicyRule> {
    role["rules"].as_array().map(|rules| rules.iter().map(PolicyRule::from_value).collect()).unwrap_or_default()
}

enum Subject {
    User(String),
    Group(String),
}

/// The subjects of a binding with what to call each; unknown kinds never match.
fn subjects(binding: &Value, namespace: &str) -> Vec<(Subject, String)> {
    let list = binding["subjects"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut subjects = Vec::new();
    for subject in list {
        let name = text(subject, "name");
        match text(subject, "kind") {
            "User" => subjects.push((Subject::User(name.to_owned()), format!("User {name:?}"))),
            "Group" => subjects.push((Subject::Group(name.to_owned()), format!("Group {name:?}"))),
            "ServiceAccount" => {
                let own = text(subject, "namespace");
                let home = if own.is_empty() { namespace } else { own };
                if !home.is_empty() {
                    let user = format!("system:serviceaccount:{home}:{name}");
                    let described = format!("ServiceAccount \"{name}/{home}\"");
                    subjects.push((Subject::User(user), described));
                }
            }
            _ => {}
        }
    }
    subjects
}

impl Rbac {
    pub fn new() -> Arc<Rbac> {
        Arc::default()
    }

    /// Takes in one change of one object; `None` on the side where it does not exist.
    pub fn apply(&self, kind: Kind, old: Option<&Value>, new: Option<&Value>) {
        let mut index = self.index.write();
        match kind {
            Kind::Role | Kind::ClusterRole => {
                if let (Some(old), None) = (old, new) {
                    let scope = text(&old["metadata"], "namespace");
                    if let Some(roles) = index.roles.get_mut(scope) {
                        roles.remove(text(&old["metadata"], "name"));
                        if roles.is_empty() {
                            index.roles.remove(scope);
                        }
                    }
                }
                if let Some(new) = new {
                    let scope = text(&new["metadata"], "namespace").to_owned();
                    let rules = rules_of(new).into_iter().map(Arc::new).collect();
                    index.roles.entry(scope).or_default().insert(text(&new["metadata"], "name").to_owned(), rules);
                }
            }
            Kind::RoleBinding | Kind::ClusterRoleBinding => {
                if let Some(old) = old {
                    index.remove_binding(old);
                }
                if let Some(new) = new {
                    index.remove_binding(new);
                    index.add_binding(new);
                }
            }
        }
    }

    /// The rules of a role that a binding in `namespace` refers to.
    pub fn role_rules(&self, role_ref: &Value, namespace: &str) -> Result<Vec<PolicyRule>, String> {
        let index = self.index.read();
        let rules = index.rules(text(role_ref, "kind"), text(role_ref, "name"), namespace)?;
        Ok(rules.iter().map(|rule| rule.as_ref().clone()).collect())
    }
}

impl Index {
    fn remove_binding(&mut self, binding: &Value) {
        let namespace = text(&binding["metadata"], "namespace");
        let name = text(&binding["metadata"], "name");
        let Some(scope) = self.scopes.get_mut(namespace) else { return };
        for (subject, _) in subjects(binding, namespace) {
            let (map, key) = match &subject {
                Subject::User(user) => (&mut scope.users, user),
                Subject::Group(group) => (&mut scope.groups, group),
            };
            if let Some(grants) = map.get_mut(key) {
                grants.retain(|grant| grant.binding != name);
                if grants.is_empty() {
                    map.remove(key);
                }
            }
        }
        if scope.is_empty() {
            self.scopes.remove(namespace);
        }
    }

    fn add_binding(&mut self, binding: &Value) {
        let namespace = text(&binding["metadata"], "namespace");
        let scope = self.scopes.entry(namespace.to_owned()).or_default();
        for (subject, described) in subjects(binding, namespace) {
            let grant = Arc::new(Grant {
                namespace: namespace.to_owned(),
                binding: text(&binding["metadata"], "name").to_owned(),
                role_kind: text(&binding["roleRef"], "kind").to_owned(),
                role: text(&binding["roleRef"], "name").to_owned(),
                subject: described,
            });
            match subject {
                Subject::User(user) => scope.users.entry(user).or_default().push(grant),
                Subject::Group(group) => scope.groups.entry(group).or_default().push(grant),
            }
        }
        if scope.is_empty() {
            self.scopes.remove(namespace);
        }
    }
}

impl Authorizer for Rbac {
    fn authorize(&self, request: &Attributes<'_>) -> Decision {
        let mut allowed = None;
        let mut errors: Vec<String> = Vec::new();
        let namespace = if request.is_resource { request.namespace } else { "" };
        self.index.read().visit(request.user, namespace, &mut |grant, rule| match rule {
            Ok(rule) if rule.allows(request) => {
                allowed = Some(format!("RBAC: allowed by {}", grant.describe()));
                true
            }
            Ok(_) => false,
            Err(error) => {
                if !errors.contains(&error) {
                    errors.push(error);
                }
                false
            }
        });
        match (allowed, aggregate(&errors)) {
            (Some(reason), _) => Decision::Allow(reason),
            (None, None) => Decision::NoOpinion(String::new()),
            (None, Some(errors)) => Decision::NoOpinion(format!("RBAC: {errors}")),
        }
    }

    fn rules_for(&self, user: &UserInfo, namespace: &str) -> Rules {
        let mut rules = Rules::default();
        let mut errors: Vec<String> = Vec::new();
        self.index.read().visit(user, namespace, &mut |_, rule| {
            match rule {
                Ok(rule) => rules.rules.push(rule.clone()),
                Err(error) => {
                    if !errors.contains(&error) {
                        errors.push(error);
                    }
                }
            }
            false
        });
        rules.evaluation_error = aggregate(&errors);
        rules
    }
}

/// Several errors as Go's aggregate prints them.
fn aggregate(errors: &[String]) -> Option<String> {
    match errors {
        [] => None,
        [one] => Some(one.clone()),
        many => Some(format!("[{}]", many.join(", "))),
    }
}
