//! A pod as the scheduler thinks of it: everything that plugins ask for, worked out once when the pod is read.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use windlass_api::selector::{LabelSelector, Operator, Requirement};
use windlass_client::informer::Key;

use crate::object::PodView;
use crate::resources::{Resources, pod_requests};

pub type Labels = BTreeMap<String, String>;

/// A pod, compiled. Immutable: a changed pod is compiled anew.
#[derive(Debug)]
pub struct Pod {
    pub key: Key,
    pub uid: String,
    pub view: Arc<PodView>,
    pub priority: i32,
    pub requests: Resources,
    /// Requests with defaults for containers that make none; scoring uses these.
    pub non_zero: Resources,
    pub host_ports: Vec<HostPort>,
    pub node_selection: NodeSelection,
    /// Preferred node terms with their weights.
    pub node_preferences: Vec<(i64, NodeTerm)>,
    pub affinity: Terms,
    pub anti_affinity: Terms,
    pub spread: Vec<Spread>,
    /// Names as nodes list them.
    pub images: Vec<String>,
    /// Claims by name, with whether the volume is an ephemeral one of the pod's own.
    pub claims: Vec<(String, bool)>,
    /// Why the pod cannot be scheduled at all: a selector that the API server should not have admitted.
    pub broken: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort {
    /// None for all addresses.
    pub ip: Option<IpAddr>,
    pub protocol: String,
    pub port: i32,
}

impl HostPort {
    pub fn conflicts(&self, other: &Self) -> bool {
        let same_address = self.ip.is_none() || other.ip.is_none() || self.ip == other.ip;
        self.port == other.port && self.protocol == other.protocol && same_address
    }
}

/// `nodeSelector` and required node affinity: the pod fits a node that matches both.
#[derive(Debug, Default)]
pub struct NodeSelection {
    pub labels: Vec<(String, String)>,
    /// Any of these, if there are some. `Some([])` matches no node.
    pub terms: Option<Vec<NodeTerm>>,
}

impl NodeSelection {
    pub fn matches(&self, name: &str, labels: &Labels) -> bool {
        self.labels.iter().all(|(key, value)| labels.get(key) == Some(value))
            && self.terms.as_ref().is_none_or(|terms| terms.iter().any(|term| term.matches(name, labels)))
    }

    pub fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.terms.is_none()
    }

    /// The only nodes that can match, if every term names its nodes, as those of daemon sets do.
    pub fn names(&self) -> Option<Vec<String>> {
        let terms = self.terms.as_ref().filter(|terms| !terms.is_empty())?;
        let mut names = Vec::new();
        for term in terms {
            let named = term.names.iter().find(|r| r.operator == Operator::In)?;
            names.extend(named.values.iter().cloned());
        }
        Some(names)
    }

    /// Compiles `terms` of a required node selector.
    pub fn of_terms(terms: &[core::NodeSelectorTerm]) -> Result<Self, String> {
        let terms = terms.iter().map(NodeTerm::compile).collect::<Result<_, _>>()?;
        Ok(Self { labels: Vec::new(), terms: Some(terms) })
    }
}

/// Requirements on a node's labels and its name that all must hold; without any, no node matches.
#[derive(Debug)]
pub struct NodeTerm {
    labels: Vec<Requirement>,
    names: Vec<Requirement>,
}

impl NodeTerm {
    pub fn compile(term: &core::NodeSelectorTerm) -> Result<Self, String> {
        let requirements = |list: &Option<Vec<core::NodeSelectorRequirement>>| {
            let list = list.iter().flatten();
            list.map(|r| Requirement::new(&r.key, operator(&r.operator)?, r.values.clone().unwrap_or_default())).collect::<Result<Vec<_>, String>>()
        };
        Ok(Self { labels: requirements(&term.match_expressions)?, names: requirements(&term.match_fields)? })
    }

    pub fn matches(&self, name: &str, labels: &Labels) -> bool {
        (!self.labels.is_empty() || !self.names.is_empty())
            && self.labels.iter().all(|r| r.matches(labels.get(&r.key).map(String::as_str)))
            // `metadata.name` is the only field there is.
            && self.names.iter().all(|r| r.matches(Some(name)))
    }
}

fn operator(name: &str) -> Result<Operator, String> {
    Ok(match name {
        "In" => Operator::In,
        "NotIn" => Operator::NotIn,
        "Exists" => Operator::Exists,
        "DoesNotExist" => Operator::DoesNotExist,
        "Gt" => Operator::GreaterThan,
        "Lt" => Operator::LessThan,
        other => return Err(format!("{other:?} is not a valid node selector operator")),
    })
}

/// One side of inter-pod affinity.
#[derive(Debug, Default)]
pub struct Terms {
    pub required: Vec<Term>,
    pub preferred: Vec<(i64, Term)>,
}

impl Terms {
    pub fn is_empty(&self) -> bool {
        self.required.is_empty() && self.preferred.is_empty()
    }
}

/// Pods to be near to or far from, and what "near" means.
#[derive(Debug)]
pub struct Term {
    pub topology_key: String,
    selector: LabelSelector,
    /// By name; the pod's own namespace if the term names none and has no selector.
    namespaces: Vec<String>,
    namespace_selector: Option<LabelSelector>,
}

impl Term {
    fn compile(term: &core::PodAffinityTerm, namespace: &str, labels: &Labels) -> Result<Self, String> {
        let mut namespaces = term.namespaces.clone().unwrap_or_default();
        if namespaces.is_empty() && term.namespace_selector.is_none() {
            namespaces.push(namespace.to_owned());
        }
        let mut requirements = match &term.label_selector {
            Some(selector) => compile_selector(selector)?.requirements().to_vec(),
            // No selector matches no pods; an empty one matches all.
            None => return Ok(Self { topology_key: term.topology_key.clone(), selector: LabelSelector::nothing(), namespaces, namespace_selector: None }),
        };
        let same_value = |keys: &Option<Vec<String>>, operator: Operator, requirements: &mut Vec<Requirement>| -> Result<(), String> {
            for key in keys.iter().flatten() {
                if let Some(value) = labels.get(key) {
                    requirements.push(Requirement::new(key, operator, vec![value.clone()])?);
                }
            }
            Ok(())
        };
        same_value(&term.match_label_keys, Operator::In, &mut requirements)?;
        same_value(&term.mismatch_label_keys, Operator::NotIn, &mut requirements)?;
        Ok(Self {
            topology_key: term.topology_key.clone(),
            selector: LabelSelector::from_requirements(requirements),
            namespaces,
            namespace_selector: term.namespace_selector.as_ref().map(compile_selector).transpose()?,
        })
    }

    /// Whether the term means this pod. `namespace_labels` are those of the pod's namespace.
    pub fn matches(&self, pod: &Pod, namespace_labels: &Labels) -> bool {
        let named = self.namespaces.iter().any(|namespace| namespace == pod.key.ns());
        let selected = || {
            let selector = self.namespace_selector.as_ref();
            selector.is_some_and(|s| s.matches(|key| namespace_labels.get(key).map(String::as_str)))
        };
        (named || selected()) && selects(&self.selector, pod.labels())
    }
}

/// A topology spread constraint of the pod.
#[derive(Debug)]
pub struct Spread {
    pub max_skew: i64,
    pub topology_key: String,
    pub hard: bool,
    pub selector: LabelSelector,
    pub min_domains: usize,
    pub honor_affinity: bool,
    pub honor_taints: bool,
}

impl Spread {
    fn compile(constraint: &core::TopologySpreadConstraint, labels: &Labels) -> Result<Self, String> {
        let mut selector = match &constraint.label_selector {
            Some(selector) => compile_selector(selector)?,
            None => LabelSelector::nothing(),
        };
        let keys = constraint.match_label_keys.iter().flatten();
        let same: Vec<Requirement> = keys
            .filter_map(|key| labels.get(key).map(|value| Requirement::new(key, Operator::In, vec![value.clone()])))
            .collect::<Result<_, _>>()?;
        if !same.is_empty() && !selector.is_nothing() {
            selector = LabelSelector::from_requirements([selector.requirements(), &same].concat());
        }
        let honors = |policy: &Option<String>, default| policy.as_deref().map_or(default, |policy| policy == "Honor");
        Ok(Self {
            max_skew: i64::from(constraint.max_skew),
            topology_key: constraint.topology_key.clone(),
            hard: constraint.when_unsatisfiable == "DoNotSchedule",
            selector,
            min_domains: constraint.min_domains.and_then(|n| usize::try_from(n).ok()).unwrap_or(1),
            honor_affinity: honors(&constraint.node_affinity_policy, true),
            honor_taints: honors(&constraint.node_taints_policy, false),
        })
    }
}

pub fn compile_selector(selector: &k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector) -> Result<LabelSelector, String> {
    let value = serde_json::to_value(selector).map_err(|error| error.to_string())?;
    LabelSelector::from_object(&value)
}

pub fn selects(selector: &LabelSelector, labels: &Labels) -> bool {
    selector.matches(|key| labels.get(key).map(String::as_str))
}

static NO_LABELS: Labels = Labels::new();

impl Pod {
    pub fn compile(view: Arc<PodView>) -> Self {
        let (requests, non_zero) = pod_requests(&view.spec);
        let mut pod = Self {
            key: Key::of(&*view),
            uid: view.metadata.uid.clone().unwrap_or_default(),
            priority: view.spec.priority.unwrap_or(0),
            requests,
            non_zero,
            host_ports: host_ports(&view),
            node_selection: NodeSelection::default(),
            node_preferences: Vec::new(),
            affinity: Terms::default(),
            anti_affinity: Terms::default(),
            spread: Vec::new(),
            images: view.spec.init_containers.iter().chain(&view.spec.containers).map(|c| normalized_image(&c.image)).collect(),
            claims: claims(&view),
            broken: None,
            view,
        };
        pod.images.extend(pod.view.spec.volumes.iter().filter_map(|v| v.image.as_ref()).map(|image| normalized_image(&image.reference)));
        if let Err(error) = pod.compile_rules() {
            pod.broken = Some(error);
        }
        pod
    }

    fn compile_rules(&mut self) -> Result<(), String> {
        let view = self.view.clone();
        self.node_selection.labels = view.spec.node_selector.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
        let affinity = view.spec.affinity.as_ref();
        if let Some(node) = affinity.and_then(|a| a.node_affinity.as_ref()) {
            if let Some(required) = &node.required_during_scheduling_ignored_during_execution {
                self.node_selection.terms = NodeSelection::of_terms(&required.node_selector_terms)?.terms;
            }
            for preferred in node.preferred_during_scheduling_ignored_during_execution.iter().flatten() {
                self.node_preferences.push((i64::from(preferred.weight), NodeTerm::compile(&preferred.preference)?));
            }
        }
        let (namespace, labels) = (view.metadata.namespace.as_deref().unwrap_or_default(), view.metadata.labels.as_ref().unwrap_or(&NO_LABELS));
        let terms = |required: &Option<Vec<core::PodAffinityTerm>>, preferred: &Option<Vec<core::WeightedPodAffinityTerm>>| {
            let compile = |term| Term::compile(term, namespace, labels);
            let required = required.iter().flatten().map(compile).collect::<Result<_, _>>()?;
            let preferred = preferred.iter().flatten().map(|t| Ok((i64::from(t.weight), compile(&t.pod_affinity_term)?))).collect::<Result<_, String>>()?;
            Ok::<_, String>(Terms { required, preferred })
        };
        if let Some(near) = affinity.and_then(|a| a.pod_affinity.as_ref()) {
            self.affinity = terms(&near.required_during_scheduling_ignored_during_execution, &near.preferred_during_scheduling_ignored_during_execution)?;
        }
        if let Some(far) = affinity.and_then(|a| a.pod_anti_affinity.as_ref()) {
            self.anti_affinity = terms(&far.required_during_scheduling_ignored_during_execution, &far.preferred_during_scheduling_ignored_during_execution)?;
        }
        self.spread = view.spec.topology_spread_constraints.iter().map(|c| Spread::compile(c, labels)).collect::<Result<_, _>>()?;
        Ok(())
    }

    pub fn labels(&self) -> &Labels {
        self.view.metadata.labels.as_ref().unwrap_or(&NO_LABELS)
    }

    pub fn scheduler_name(&self) -> &str {
        self.view.spec.scheduler_name.as_deref().unwrap_or("default-scheduler")
    }

    pub fn tolerates(&self, taint: &core::Taint) -> bool {
        self.view.spec.tolerations.iter().any(|toleration| tolerates(toleration, taint))
    }

    pub fn is_terminating(&self) -> bool {
        self.view.metadata.deletion_timestamp.is_some()
    }

    pub fn has_affinity(&self) -> bool {
        !self.affinity.is_empty() || !self.anti_affinity.is_empty()
    }

    pub fn may_preempt(&self) -> bool {
        self.view.spec.preemption_policy.as_deref() != Some("Never")
    }

    /// When it started to run, or was created: of equal pods the one that ran the shortest is preempted.
    pub fn started(&self) -> Option<Timestamp> {
        let created = self.view.metadata.creation_timestamp.as_ref();
        self.view.status.start_time.as_ref().or(created).map(|time| time.0)
    }
}

/// As upstream's `Toleration.ToleratesTaint`.
fn tolerates(toleration: &core::Toleration, taint: &core::Taint) -> bool {
    let given = |field: &Option<String>| field.as_deref().filter(|text| !text.is_empty()).map(str::to_owned);
    if given(&toleration.effect).is_some_and(|effect| effect != taint.effect) || given(&toleration.key).is_some_and(|key| key != taint.key) {
        return false;
    }
    let (mine, its) = (toleration.value.as_deref().unwrap_or_default(), taint.value.as_deref().unwrap_or_default());
    let compare = |wanted: std::cmp::Ordering| match (its.parse::<i64>(), mine.parse::<i64>()) {
        (Ok(its), Ok(mine)) => its.cmp(&mine) == wanted,
        _ => false,
    };
    match toleration.operator.as_deref().unwrap_or_default() {
        "" | "Equal" => mine == its,
        "Exists" => true,
        "Gt" => compare(std::cmp::Ordering::Greater),
        "Lt" => compare(std::cmp::Ordering::Less),
        _ => false,
    }
}

fn host_ports(view: &PodView) -> Vec<HostPort> {
    let sidecars = view.spec.init_containers.iter().filter(|c| c.restart_policy.as_deref() == Some("Always"));
    let ports = view.spec.containers.iter().chain(sidecars).flat_map(|c| &c.ports);
    ports
        .filter_map(|port| {
            let number = port.host_port.filter(|number| *number > 0)?;
            let ip = port.host_ip.as_deref().and_then(|text| text.parse::<IpAddr>().ok()).filter(|ip| !ip.is_unspecified());
            Some(HostPort { ip, protocol: port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()), port: number })
        })
        .collect()
}

fn claims(view: &PodView) -> Vec<(String, bool)> {
    let name = view.metadata.name.as_deref().unwrap_or_default();
    let volumes = view.spec.volumes.iter();
    volumes
        .filter_map(|volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
            (Some(claim), _) => Some((claim.claim_name.clone(), false)),
            (None, Some(_)) => Some((format!("{name}-{}", volume.name), true)),
            (None, None) => None,
        })
        .collect()
}

/// Image names with their tag, as nodes list them.
fn normalized_image(name: &str) -> String {
    match (name.rfind(':'), name.rfind('/')) {
        (Some(colon), slash) if slash.is_none_or(|slash| colon > slash) => name.to_owned(),
        _ => format!("{name}:latest"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tolerations_and_taints() {
        let taint = |value: &str| core::Taint { key: "k".to_owned(), value: Some(value.to_owned()), effect: "NoSchedule".to_owned(), ..core::Taint::default() };
        let toleration = |text: &str| serde_json::from_str::<core::Toleration>(text).unwrap();
        for (text, value, expected) in [
            (r#"{"key":"k","operator":"Exists"}"#, "v", true),
            (r#"{"operator":"Exists"}"#, "v", true),
            (r#"{"key":"k","value":"v"}"#, "v", true),
            (r#"{"key":"k","value":"w"}"#, "v", false),
            (r#"{"key":"other","operator":"Exists"}"#, "v", false),
            (r#"{"key":"k","operator":"Exists","effect":"NoExecute"}"#, "v", false),
            (r#"{"key":"k","operator":"Exists","effect":"NoSchedule"}"#, "v", true),
            (r#"{"key":"k","operator":"Gt","value":"5"}"#, "6", true),
            (r#"{"key":"k","operator":"Lt","value":"5"}"#, "6", false),
        ] {
            assert_eq!(tolerates(&toleration(text), &taint(value)), expected, "{text} against {value}");
        }
    }

    #[test]
    fn image_names_get_their_tag() {
        for (name, expected) in [("a", "a:latest"), ("a:1", "a:1"), ("host:5000/a", "host:5000/a:latest"), ("host:5000/a:1", "host:5000/a:1")] {
            assert_eq!(normalized_image(name), expected);
        }
    }
}
