//! Selectors over labels and nodes, as functions on the typed objects that the caches hold.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Taint, Toleration},
    apimachinery::pkg::apis::meta::v1::LabelSelector,
};

type Labels = BTreeMap<String, String>;

/// Whether a label selector picks these labels. An empty selector picks everything; a malformed one nothing.
pub fn matches(selector: &LabelSelector, labels: &Labels) -> bool {
    let exact = selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    exact && selector.match_expressions.iter().flatten().all(|requirement| {
        let values = requirement.values.as_deref().unwrap_or_default();
        let label = labels.get(&requirement.key);
        match requirement.operator.as_str() {
            "In" => label.is_some_and(|label| values.contains(label)),
            "NotIn" => !label.is_some_and(|label| values.contains(label)),
            "Exists" => label.is_some(),
            "DoesNotExist" => label.is_none(),
            _ => false,
        }
    })
}

/// Whether a selector picks everything.
pub fn is_empty(selector: &LabelSelector) -> bool {
    selector.match_labels.as_ref().is_none_or(BTreeMap::is_empty) && selector.match_expressions.as_ref().is_none_or(Vec::is_empty)
}

/// A selector of the older kind: a map, which picks nothing when it is empty.
pub fn matches_map(selector: &Labels, labels: &Labels) -> bool {
    !selector.is_empty() && selector.iter().all(|(key, value)| labels.get(key) == Some(value))
}

fn requirement_matches(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let compare = |greater: bool| {
        let wanted = values.first().and_then(|value| value.parse::<i64>().ok());
        match (value.and_then(|value| value.parse::<i64>().ok()), wanted) {
            (Some(have), Some(want)) => if greater { have > want } else { have < want },
            _ => false,
        }
    };
    match requirement.operator.as_str() {
        "In" => value.is_some_and(|value| values.iter().any(|wanted| wanted == value)),
        "NotIn" => !value.is_some_and(|value| values.iter().any(|wanted| wanted == value)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compare(true),
        "Lt" => compare(false),
        _ => false,
    }
}

/// One term of a node selector: all of it must hold. A term with nothing in it picks no node.
pub fn term_matches(term: &NodeSelectorTerm, labels: &Labels, name: &str) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    if expressions.is_empty() && fields.is_empty() {
        return false;
    }
    expressions.iter().all(|requirement| requirement_matches(requirement, labels.get(&requirement.key).map(String::as_str)))
        && fields.iter().all(|requirement| requirement_matches(requirement, (requirement.key == "metadata.name").then_some(name)))
}

/// Whether any term of a node selector holds for a node.
pub fn node_matches(selector: &NodeSelector, labels: &Labels, name: &str) -> bool {
    selector.node_selector_terms.iter().any(|term| term_matches(term, labels, name))
}

/// Whether a toleration covers a taint.
pub fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let effect = toleration.effect.as_deref().unwrap_or_default();
    let key = toleration.key.as_deref().unwrap_or_default();
    if !effect.is_empty() && effect != taint.effect || !key.is_empty() && key != taint.key {
        return false;
    }
    match toleration.operator.as_deref().unwrap_or("Equal") {
        "" | "Equal" => !key.is_empty() && toleration.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default(),
        "Exists" => true,
        _ => false,
    }
}

/// The first taint with one of these effects that nothing tolerates.
pub fn untolerated<'a>(taints: &'a [Taint], tolerations: &[Toleration], effects: &[&str]) -> Option<&'a Taint> {
    taints
        .iter()
        .filter(|taint| effects.contains(&taint.effect.as_str()))
        .find(|taint| !tolerations.iter().any(|toleration| tolerates(toleration, taint)))
}

/// A node's taints.
pub fn taints(node: &Node) -> &[Taint] {
    node.spec.as_ref().and_then(|spec| spec.taints.as_deref()).unwrap_or_default()
}

/// Labels, or the empty map.
pub fn of(labels: &Option<Labels>) -> &Labels {
    static EMPTY: Labels = BTreeMap::new();
    labels.as_ref().unwrap_or(&EMPTY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn check(selector: Value, labels: Value, expected: bool) {
        let parsed: LabelSelector = serde_json::from_value(selector.clone()).expect("a selector");
        let labels: Labels = serde_json::from_value(labels).expect("labels");
        assert_eq!(matches(&parsed, &labels), expected, "{selector} {labels:?}");
    }

    #[test]
    fn label_selectors() {
        check(json!({}), json!({"a": "b"}), true);
        check(json!({"matchLabels": {"a": "b"}}), json!({"a": "b", "c": "d"}), true);
        check(json!({"matchLabels": {"a": "b"}}), json!({"a": "c"}), false);
        check(json!({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["x"]}]}), json!({}), true);
        check(json!({"matchExpressions": [{"key": "a", "operator": "In", "values": ["x", "y"]}]}), json!({"a": "y"}), true);
        check(json!({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}), json!({"a": "y"}), false);
    }

    #[test]
    fn tolerations() {
        let taint: Taint = serde_json::from_value(json!({"key": "k", "value": "v", "effect": "NoSchedule"})).expect("a taint");
        for (toleration, expected) in [
            (json!({"operator": "Exists"}), true),
            (json!({"key": "k", "operator": "Exists"}), true),
            (json!({"key": "k", "value": "v"}), true),
            (json!({"key": "k", "value": "w"}), false),
            (json!({"key": "k", "operator": "Exists", "effect": "NoExecute"}), false),
        ] {
            let parsed: Toleration = serde_json::from_value(toleration.clone()).expect("a toleration");
            assert_eq!(tolerates(&parsed, &taint), expected, "{toleration}");
        }
    }

    #[test]
    fn node_terms() {
        let labels: Labels = [("zone".to_string(), "a".to_string()), ("n".to_string(), "5".to_string())].into();
        for (term, expected) in [
            (json!({}), false),
            (json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}), true),
            (json!({"matchExpressions": [{"key": "n", "operator": "Gt", "values": ["4"]}]}), true),
            (json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["other"]}]}), false),
        ] {
            let parsed: NodeSelectorTerm = serde_json::from_value(term.clone()).expect("a term");
            assert_eq!(term_matches(&parsed, &labels, "node-1"), expected, "{term}");
        }
    }
}
