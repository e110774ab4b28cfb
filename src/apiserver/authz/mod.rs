//! What they may do: RBAC, the Node authorizer, and their union, all in memory.
//!
//! Invariants:
//! - `authorize` never waits: it reads an index that watch-cache callbacks keep, so it costs lookups and no I/O.
//! - Modes are asked in the configured order; the first that allows or denies decides, silence of all is a refusal.
//! - `system:masters` is allowed before any mode is asked.
//! - Deliberately absent: ABAC, webhook authorization (refused by the configuration).
//!
//! Code map: [`rules`] a policy rule and how it covers requests and other rules; [`rbac`] the index;
//! [`node`] the graph of what a node's pods refer to; [`escalation`] the check on role and binding writes; [`reviews`].

use crate::request::{RequestInfo, UserInfo};
use windlass_api::ApiError;

/// One request, as authorizers see it. Strings are empty where they do not apply.
#[derive(Clone, Copy, Debug)]
pub struct Attributes<'a> {
    pub user: &'a UserInfo,
    pub verb: &'a str,
    pub group: &'a str,
    pub version: &'a str,
    pub resource: &'a str,
    pub subresource: &'a str,
    pub namespace: &'a str,
    pub name: &'a str,
    /// Equality requirements (path, value) of the field selector of a list, watch or deletecollection.
    pub fields: &'a [(String, String)],
    /// The path of a request that is not about a resource.
    pub path: &'a str,
    pub is_resource: bool,
}

/// An authorizer's answer; the text says why (shown in reviews and in the refusal).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    Allow(String),
    Deny(String),
    NoOpinion(String),
}

impl Decision {
    pub fn is_allowed(&self) -> bool {
        matches!(self, Decision::Allow(_))
    }
    pub fn reason(&self) -> &str {
        match self {
            Decision::Allow(reason) | Decision::Deny(reason) | Decision::NoOpinion(reason) => reason,
        }
    }
}

/// The rules that hold for a user in a namespace (`SelfSubjectRulesReview`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rules {
    pub rules: Vec<std::sync::Arc<crate::authz::rules::PolicyRule>>,
    /// An authorizer was unable to list all its rules.
    pub incomplete: bool,
    pub evaluation_error: Option<String>,
}

/// Decides requests. Synchronous and in memory.
pub trait Authorizer: Send + Sync + 'static {
    fn authorize(&self, attributes: &Attributes<'_>) -> Decision;
    fn rules_for(&self, user: &UserInfo, namespace: &str) -> Rules;
}

pub mod escalation;
pub mod node;
pub mod rbac;
pub mod reviews;
pub mod rules;
pub mod union;

impl<'a> Attributes<'a> {
    /// The attributes of a parsed request made by `user`.
    pub fn of(user: &'a UserInfo, info: &'a RequestInfo) -> Attributes<'a> {
        Attributes {
            user,
            verb: &info.verb,
            group: &info.api_group,
            version: &info.api_version,
            resource: &info.resource,
            subresource: &info.subresource,
            namespace: &info.namespace,
            name: &info.name,
            fields: &[],
            path: &info.path,
            is_resource: info.is_resource,
        }
    }

    /// Attributes of a resource request, the rest empty.
    pub fn resource(user: &'a UserInfo, verb: &'a str, group: &'a str, resource: &'a str) -> Attributes<'a> {
        Attributes {
            user,
            verb,
            group,
            version: "*",
            resource,
            subresource: "",
            namespace: "",
            name: "",
            fields: &[],
            path: "",
            is_resource: true,
        }
    }

    /// The same with the field selector's equality requirements, which the Node authorizer asks for.
    pub fn with_fields(self, fields: &'a [(String, String)]) -> Attributes<'a> {
        Attributes { fields, ..self }
    }

    /// The refusal that upstream words for these attributes (`responsewriters.Forbidden`).
    pub fn forbidden(&self, reason: &str) -> ApiError {
        let message = self.refusal();
        let message = if reason.is_empty() { message } else { format!("{message}: {reason}") };
        ApiError::forbidden(self.group, self.resource, self.name, &message)
    }

    /// `User "x" cannot list resource "pods" in API group "" in the namespace "y"`.
    pub fn refusal(&self) -> String {
        let user = &self.user.name;
        let verb = self.verb;
        if !self.is_resource {
            return format!("User {user:?} cannot {verb} path {:?}", self.path);
        }
        let resource = match self.subresource {
            "" => self.resource.to_owned(),
            sub => format!("{}/{sub}", self.resource),
        };
        let group = self.group;
        let scope = match self.namespace {
            "" => "at the cluster scope".to_owned(),
            namespace => format!("in the namespace {namespace:?}"),
        };
        format!("User {user:?} cannot {verb} resource {resource:?} in API group {group:?} {scope}")
    }
}

#[cfg(test)]
mod tests;
