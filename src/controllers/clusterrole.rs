//! Aggregated cluster roles: their rules are those of all roles that their selectors pick.

use std::sync::Arc;

use k8s_openapi::api::rbac::v1::{ClusterRole, PolicyRule};
use serde_json::json;
use windlass_client::{
    informer::{Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    context::{Context, Worker},
    labels,
    write::{self, ApiErrorExt},
};

struct Controller {
    client: kube::Client,
    roles: Informer<ClusterRole>,
}

/// The union of the picked roles' rules, in the order of their names, each rule once. None if the role is no aggregate.
fn aggregate(role: &ClusterRole, all: &[Arc<ClusterRole>]) -> Option<Vec<PolicyRule>> {
    let selectors = role.aggregation_rule.as_ref()?.cluster_role_selectors.as_deref().unwrap_or_default();
    let mut rules: Vec<PolicyRule> = Vec::new();
    for selector in selectors {
        let mut picked: Vec<_> = all.iter().filter(|other| other.metadata.name != role.metadata.name && labels::matches(selector, labels::of(&other.metadata.labels))).collect();
        picked.sort_by_key(|role| role.metadata.name.clone());
        for rule in picked.into_iter().flat_map(|role| role.rules.iter().flatten()) {
            if !rules.contains(rule) {
                rules.push(rule.clone());
            }
        }
    }
    Some(rules)
}

impl Controller {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(role) = self.roles.get(&key) else { return Ok(Action::Done) };
        let Some(rules) = aggregate(&role, &self.roles.list()) else { return Ok(Action::Done) };
        if role.rules.as_deref().unwrap_or_default() == rules {
            return Ok(Action::Done);
        }
        let patch = json!({"metadata": {"uid": role.metadata.uid, "resourceVersion": role.metadata.resource_version}, "rules": rules});
        match write::merge_patch(&self.client, &write::path(&*role), &patch).await {
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(Action::Done),
        }
    }
}

/// The `clusterrole-aggregation-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("ClusterRoleAggregator");
    let roles = context.cluster_roles();
    {
        let (queue, all) = (queue.clone(), roles.clone());
        roles.on_change(move |change| {
            // Any role may be picked by any aggregate, by its labels of before or now.
            let sides = || change.old.iter().chain(&change.new);
            for role in all.list().into_iter().filter(|role| role.aggregation_rule.is_some()) {
                let selectors = role.aggregation_rule.iter().flat_map(|rule| rule.cluster_role_selectors.iter().flatten());
                let picks = selectors.into_iter().any(|selector| sides().any(|side| labels::matches(selector, labels::of(&side.metadata.labels))));
                if picks || role.metadata.name == change.object().metadata.name {
                    queue.add(Key::of(&*role));
                }
            }
        });
    }
    let state = Arc::new(Controller { client: context.client.clone(), roles });
    context.worker(queue, 5, state, Controller::sync)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn role(value: Value) -> Arc<ClusterRole> {
        Arc::new(serde_json::from_value(value).expect("a role"))
    }

    #[test]
    fn rules_are_united() {
        let rule = |resource: &str| json!({"apiGroups": [""], "resources": [resource], "verbs": ["get"]});
        let part = |name: &str, resource: &str| role(json!({"metadata": {"name": name, "labels": {"to": "view"}}, "rules": [rule(resource), rule("shared")]}));
        let whole = role(json!({"metadata": {"name": "view", "labels": {"to": "view"}}, "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {"to": "view"}}]}, "rules": [rule("old")]}));
        let all = [part("b", "pods"), part("a", "nodes"), whole.clone(), role(json!({"metadata": {"name": "other"}, "rules": [rule("secrets")]}))];
        let united = aggregate(&whole, &all).expect("an aggregate");
        let resources: Vec<_> = united.iter().flat_map(|rule| rule.resources.clone().unwrap_or_default()).collect();
        assert_eq!(resources, ["nodes", "shared", "pods"]);
        assert!(aggregate(&all[0], &all).is_none());
    }
}
