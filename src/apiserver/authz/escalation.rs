//! Nobody grants through RBAC what they do not hold (unless allowed to `escalate` or `bind`).
//!
//! Upstream wraps the storage of the four RBAC kinds; here it is the first validating plugin of the chain.

use super::rbac::{Rbac, rules_of};
use super::rules::{PolicyRule, go_list, uncovered};
use super::{Attributes, Authorizer};
use crate::admission::{AdmissionRequest, Operation, Plugin};
use crate::authn::MASTERS;
use crate::cluster::{Cluster, Gr};
use crate::request::UserInfo;
use async_trait::async_trait;
use serde_json::Value;
use std::sync::Arc;
use windlass_api::ApiError;

const GROUP: &str = "rbac.authorization.k8s.io";

/// The check on writes of roles and bindings.
pub struct Escalation {
    pub rbac: Arc<Rbac>,
    pub authorizer: Arc<dyn Authorizer>,
    pub cluster: Arc<dyn Cluster>,
}

impl Escalation {
    fn allowed(&self, user: &UserInfo, verb: &str, resource: &str, namespace: &str, name: &str) -> bool {
        let attributes = Attributes { namespace, name, ..Attributes::resource(user, verb, GROUP, resource) };
        self.authorizer.authorize(&attributes).is_allowed()
    }

    /// The refusal if `wanted` goes beyond what the user holds in the namespace.
    fn confirm(&self, user: &UserInfo, namespace: &str, wanted: &[PolicyRule]) -> Result<(), String> {
        let owned = self.authorizer.rules_for(user, namespace);
        let missing = uncovered(owned.rules.iter().map(Arc::as_ref), wanted);
        if missing.is_empty() {
            return Ok(());
        }
        let mut lines: Vec<String> = missing.iter().map(PolicyRule::compact).collect();
        lines.sort();
        lines.dedup();
        let mut message = format!(
            "user {:?} (groups={}) is attempting to grant RBAC permissions not currently held:\n{}",
            user.name,
            go_list(&user.groups),
            lines.join("\n")
        );
        if let Some(error) = owned.evaluation_error {
            message.push_str(&format!("; resolution errors: [{error}]"));
        }
        Err(message)
    }

    fn check_role(&self, request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        let role = request.new_object();
        let plural = request.resource.plural.as_str();
        if self.allowed(request.user, "escalate", plural, request.namespace, request.name) {
            return Ok(());
        }
        self.confirm(request.user, request.namespace, &rules_of(role)).map_err(|why| request.forbidden(why))?;
        let gathers = |role: &Value| {
            role["aggregationRule"]["clusterRoleSelectors"].as_array().is_some_and(|list| !list.is_empty())
        };
        if gathers(role) || request.old.is_some_and(gathers) {
            let star = || vec!["*".to_owned()];
            let everything = [
                PolicyRule { verbs: star(), api_groups: star(), resources: star(), ..PolicyRule::default() },
                PolicyRule { verbs: star(), non_resource_urls: star(), ..PolicyRule::default() },
            ];
            let refusal = "must have cluster-admin privileges to use the aggregationRule";
            self.confirm(request.user, "", &everything).map_err(|_| request.forbidden(refusal))?;
        }
        Ok(())
    }

    async fn check_binding(&self, request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        let role_ref = &request.new_object()["roleRef"];
        let name = role_ref["name"].as_str().unwrap_or_default();
        let (kind, namespace) = match role_ref["kind"].as_str() {
            Some("ClusterRole") => (Gr(GROUP, "clusterroles"), ""),
            Some("Role") => (Gr(GROUP, "roles"), request.namespace),
            other => {
                let other = other.unwrap_or_default();
                return Err(request.forbidden(format!("unsupported role reference kind: {other:?}")));
            }
        };
        if self.allowed(request.user, "bind", kind.1, request.namespace, name) {
            return Ok(());
        }
        let rules = match self.rbac.role_rules(role_ref, namespace) {
            Ok(rules) => rules,
            // The role may be younger than the index.
            Err(_) => match self.cluster.get(kind, namespace, name).await? {
                Some(role) => rules_of(&role),
                None => return Err(ApiError::not_found(GROUP, kind.1, name)),
            },
        };
        self.confirm(request.user, request.namespace, &rules).map_err(|why| request.forbidden(why))
    }
}

/// Whether nothing changed but what the garbage collector changes.
fn only_gc_fields(new: &Value, old: &Value) -> bool {
    let strip = |object: &Value| {
        let mut object = object.clone();
        if let Some(meta) = object["metadata"].as_object_mut() {
            for field in ["ownerReferences", "finalizers", "managedFields", "resourceVersion", "generation"] {
                meta.remove(field);
            }
        }
        object
    };
    strip(new) == strip(old)
}

#[async_trait]
impl Plugin for Escalation {
    fn name(&self) -> &'static str {
        "RBACEscalation"
    }

    fn handles(&self, operation: Operation) -> bool {
        matches!(operation, Operation::Create | Operation::Update)
    }

    async fn validate(&self, request: &AdmissionRequest<'_>) -> Result<(), ApiError> {
        if request.resource.group != GROUP || request.user.groups.iter().any(|group| group == MASTERS) {
            return Ok(());
        }
        if request.old.is_some_and(|old| only_gc_fields(request.new_object(), old)) {
            return Ok(());
        }
        match request.resource.plural.as_str() {
            "roles" | "clusterroles" => self.check_role(request),
            "rolebindings" | "clusterrolebindings" => self.check_binding(request).await,
            _ => Ok(()),
        }
    }
}
