//! Controllers of pods: ReplicationController, ReplicaSet, Deployment, StatefulSet, DaemonSet; PodTemplate, ControllerRevision.

use serde_json::{Map, Value, json};

use crate::meta;
use crate::selector::LabelSelector;
use crate::strategy::at::{At, default_at, default_text, get, items, remove, same, set, text};
use crate::strategy::pod::{defaults, spec as podspec};
use crate::strategy::rules::Rules;
use crate::strategy::{Context, names, selectors, storage};

const NOT_MATCHING: &str = "`selector` does not match template `labels`";
const TEMPLATE_GENERATION: &str = "deprecated.daemonset.template.generation";

fn template_defaults(o: &mut Value, path: &str) {
    if let Some(t) = super::at::get_mut(o, path) {
        defaults::template(t);
    }
}

fn dns_label_warning(o: &Value, out: &mut Vec<String>) {
    let bad = names::dns1123_label(meta::name(o));
    if !bad.is_empty() {
        out.push(format!(
            "metadata.name: this is used in Pod names and hostnames, which can result in surprising behavior; a DNS label is recommended: [{}]",
            bad.join(" ")
        ));
    }
}

/// A template whose pods restart for ever, and that the selector selects.
fn long_running_template(template: &At<'_>, selector: Option<&LabelSelector>, kind: &str) {
    if !template.present() {
        return template.required("");
    }
    let labels = template.at("metadata.labels");
    if let Some(selector) = selector
        && !selector.is_empty()
        && !selector.matches(|k| labels.value.get(k).and_then(Value::as_str))
    {
        labels.invalid_value(labels.value.clone(), NOT_MATCHING);
    }
    podspec::template(template);
    let policy = template.at("spec.restartPolicy");
    if matches!(policy.str(), "OnFailure" | "Never") || (policy.present() && policy.str() != "Always") {
        policy.not_supported(&["Always"]);
    }
    let deadline = template.at("spec.activeDeadlineSeconds");
    if deadline.present() {
        deadline.forbidden(format!("activeDeadlineSeconds in {kind} is not Supported"));
    }
}

/// The selector is there, valid and not empty; parsed if it can be.
fn selector(at: &At<'_>, kind: &str) -> Option<LabelSelector> {
    if !at.present() {
        at.required("");
        return None;
    }
    selectors::label_selector(at);
    if at.at("matchLabels").is_empty() && at.at("matchExpressions").is_empty() {
        at.invalid(format!("empty selector is invalid for {kind}"));
    }
    let parsed = LabelSelector::from_object(at.value);
    match (&parsed, kind) {
        (Err(_), "statefulset") => at.invalid(""),
        (Err(_), "deployment") => at.invalid("invalid label selector"),
        _ => {}
    }
    parsed.ok()
}

/// Counters of a status are not negative, and none is above `replicas`.
fn replica_status(status: &At<'_>, counters: &[&str], below: &[&str]) {
    for c in counters {
        status.at(c).non_negative();
    }
    let all = status.num("replicas").unwrap_or(0);
    for c in below {
        if status.num(c).is_some_and(|n| n > all) {
            status.at(c).invalid("cannot be greater than status.replicas");
        }
    }
    let ready = status.num("readyReplicas").unwrap_or(0);
    if status.num("availableReplicas").is_some_and(|n| n > ready) {
        status.at("availableReplicas").invalid("cannot be greater than readyReplicas");
    }
}

fn collision_count(status: &At<'_>, old: &Value) {
    let at = status.at("collisionCount");
    at.non_negative();
    let (new, was) = (at.int(), get(old, "status.collisionCount").as_i64());
    if was.is_some_and(|was| new.unwrap_or(-1) < was) {
        at.invalid_value(new.unwrap_or(0), "cannot be decremented");
    }
}

/// A count or a percentage.
pub fn int_or_percent(at: &At<'_>) {
    match at.value {
        Value::Null => {}
        Value::String(_) => at.syntax(names::percent),
        Value::Number(_) => at.non_negative(),
        _ => at.invalid("must be an integer or percentage (e.g '5%%')"),
    }
}

/// The number, of a percentage too.
pub fn int_or_percent_value(v: &Value) -> i64 {
    match v {
        Value::String(s) => s.strip_suffix('%').and_then(|n| n.parse().ok()).unwrap_or(0),
        other => other.as_i64().unwrap_or(0),
    }
}

/// A percentage of at most 100.
pub fn at_most_all(at: &At<'_>) {
    if at.value.is_string() && int_or_percent_value(at.value) > 100 {
        at.invalid("must not be greater than 100%");
    }
}

// === ReplicationController ===

/// ReplicationControllers.
pub static REPLICATION_CONTROLLER: Rules = Rules {
    defaults: &[|_, o| {
        template_defaults(o, "spec.template");
        let labels = get(o, "spec.template.metadata.labels").clone();
        if labels.is_object() {
            for path in ["spec.selector", "metadata.labels"] {
                if super::at::is_empty(get(o, path)) {
                    set(o, path, labels.clone());
                }
            }
        }
        default_at(o, "spec.replicas", 1);
    }],
    validate: &[|_, o| {
        let spec = o.at("spec");
        for n in ["replicas", "minReadySeconds"] {
            spec.at(n).non_negative();
        }
        if spec.at("selector").is_empty() {
            spec.at("selector").required("");
        }
        let selector = LabelSelector::from_map(spec.at("selector").value);
        long_running_template(&spec.at("template"), Some(&selector), "ReplicationController");
    }],
    validate_status: &[replica_set_status],
    warnings: &[dns_label_warning],
    ..Rules::SPEC_STATUS
};

fn replica_set_status(_: &Context<'_>, o: &At<'_>, _: &Value) {
    const COUNTERS: [&str; 6] = [
        "replicas",
        "fullyLabeledReplicas",
        "readyReplicas",
        "availableReplicas",
        "observedGeneration",
        "terminatingReplicas",
    ];
    replica_status(&o.at("status"), &COUNTERS, &["fullyLabeledReplicas", "readyReplicas", "availableReplicas"]);
}

// === ReplicaSet ===

/// ReplicaSets.
pub static REPLICA_SET: Rules = Rules {
    defaults: &[|_, o| {
        template_defaults(o, "spec.template");
        default_at(o, "spec.replicas", 1);
    }],
    create: &[|_, o| set(o, "status", json!({"replicas": 0}))],
    validate: &[|_, o| {
        let spec = o.at("spec");
        for n in ["replicas", "minReadySeconds"] {
            spec.at(n).non_negative();
        }
        let selector = selector(&spec.at("selector"), "deployment");
        long_running_template(&spec.at("template"), selector.as_ref(), "ReplicaSet");
    }],
    validate_update: &[immutable_selector],
    validate_status: &[replica_set_status],
    warnings: &[dns_label_warning],
    ..Rules::SPEC_STATUS
};

fn immutable_selector(_: &Context<'_>, o: &At<'_>, old: &Value) {
    o.at("spec.selector").immutable(get(old, "spec.selector"));
}

// === Deployment ===

/// Deployments.
pub static DEPLOYMENT: Rules = Rules {
    generation: &["spec", "metadata.annotations"],
    defaults: &[|_, o| {
        template_defaults(o, "spec.template");
        let Some(spec) = o.get_mut("spec").filter(|s| s.is_object()) else { return };
        default_at(spec, "replicas", 1);
        default_text(spec, "strategy.type", "RollingUpdate");
        if text(spec, "strategy.type") == "RollingUpdate" {
            default_at(spec, "strategy.rollingUpdate", json!({}));
            default_at(spec, "strategy.rollingUpdate.maxUnavailable", "25%");
            default_at(spec, "strategy.rollingUpdate.maxSurge", "25%");
        }
        default_at(spec, "revisionHistoryLimit", 10);
        default_at(spec, "progressDeadlineSeconds", 600);
    }],
    status_update: &[|_, new, old| set(new, "metadata.labels", get(old, "metadata.labels").clone())],
    validate: &[deployment],
    validate_update: &[immutable_selector],
    validate_status: &[|_, o, old| {
        const COUNTERS: [&str; 7] = [
            "observedGeneration",
            "replicas",
            "updatedReplicas",
            "readyReplicas",
            "availableReplicas",
            "unavailableReplicas",
            "terminatingReplicas",
        ];
        let status = o.at("status");
        replica_status(&status, &COUNTERS, &["updatedReplicas", "readyReplicas", "availableReplicas"]);
        collision_count(&status, old);
    }],
    warnings: &[dns_label_warning],
    reset_status: &["spec", "metadata.labels"],
    ..Rules::SPEC_STATUS
};

fn deployment(_: &Context<'_>, o: &At<'_>) {
    let spec = o.at("spec");
    for n in ["replicas", "minReadySeconds", "revisionHistoryLimit", "progressDeadlineSeconds"] {
        spec.at(n).non_negative();
    }
    let selector = selector(&spec.at("selector"), "deployment");
    long_running_template(&spec.at("template"), selector.as_ref(), "ReplicaSet");
    let strategy = spec.at("strategy");
    let rolling = strategy.at("rollingUpdate");
    match strategy.text("type") {
        "Recreate" => {
            if rolling.present() {
                rolling.forbidden("may not be specified when strategy `type` is 'Recreate'");
            }
        }
        "RollingUpdate" => {
            let (unavailable, surge) = (rolling.at("maxUnavailable"), rolling.at("maxSurge"));
            int_or_percent(&unavailable);
            int_or_percent(&surge);
            if int_or_percent_value(unavailable.value) == 0 && int_or_percent_value(surge.value) == 0 {
                unavailable.invalid("may not be 0 when `maxSurge` is 0");
            }
            at_most_all(&unavailable);
        }
        _ => strategy.not_supported(&["Recreate", "RollingUpdate"]),
    }
    let deadline = spec.at("progressDeadlineSeconds");
    if deadline.int().is_some_and(|d| d <= spec.num("minReadySeconds").unwrap_or(0)) {
        deadline.invalid("must be greater than minReadySeconds");
    }
}

// === StatefulSet ===

/// StatefulSets.
pub static STATEFUL_SET: Rules = Rules {
    name: names::dns1123_label,
    defaults: &[|_, o| {
        template_defaults(o, "spec.template");
        let Some(spec) = o.get_mut("spec").filter(|s| s.is_object()) else { return };
        default_text(spec, "podManagementPolicy", "OrderedReady");
        if text(spec, "updateStrategy.type").is_empty() {
            set(spec, "updateStrategy.type", "RollingUpdate".into());
            default_at(spec, "updateStrategy.rollingUpdate", json!({}));
        }
        if text(spec, "updateStrategy.type") == "RollingUpdate" && !get(spec, "updateStrategy.rollingUpdate").is_null() {
            default_at(spec, "updateStrategy.rollingUpdate.partition", 0);
            default_at(spec, "updateStrategy.rollingUpdate.maxUnavailable", 1);
        }
        default_text(spec, "persistentVolumeClaimRetentionPolicy.whenDeleted", "Retain");
        default_text(spec, "persistentVolumeClaimRetentionPolicy.whenScaled", "Retain");
        default_at(spec, "replicas", 1);
        default_at(spec, "revisionHistoryLimit", 10);
        for claim in super::at::items_mut(spec, "volumeClaimTemplates") {
            default_text(claim, "apiVersion", "v1");
            default_text(claim, "kind", "PersistentVolumeClaim");
            default_text(claim, "spec.volumeMode", "Filesystem");
            default_text(claim, "status.phase", "Pending");
        }
    }],
    create: &[|_, o| set(o, "status", json!({"replicas": 0, "availableReplicas": 0}))],
    validate: &[stateful_set],
    validate_update: &[|_, o, old| {
        for field in ["selector", "volumeClaimTemplates", "serviceName", "podManagementPolicy"] {
            let path = format!("spec.{field}");
            let (new, was) = (get(o.value, &path), get(old, &path));
            let equal = match field {
                // Statuses in templates mean nothing.
                "volumeClaimTemplates" => same_claims(new, was),
                _ => same(new, was),
            };
            if !equal {
                o.at(&path).invalid("field is immutable");
            }
        }
    }],
    validate_status: &[|_, o, old| {
        const COUNTERS: [&str; 6] = [
            "replicas",
            "readyReplicas",
            "currentReplicas",
            "updatedReplicas",
            "availableReplicas",
            "observedGeneration",
        ];
        let status = o.at("status");
        replica_status(&status, &COUNTERS, &["readyReplicas", "currentReplicas", "updatedReplicas", "availableReplicas"]);
        collision_count(&status, old);
    }],
    ..Rules::SPEC_STATUS
};

fn same_claims(a: &Value, b: &Value) -> bool {
    let bare = |v: &Value| -> Vec<Value> {
        v.as_array().into_iter().flatten().map(|c| {
            let mut c = c.clone();
            remove(&mut c, "status");
            c
        }).collect()
    };
    let (a, b) = (bare(a), bare(b));
    a.len() == b.len() && a.iter().zip(&b).all(|(x, y)| same(x, y))
}

fn stateful_set(_: &Context<'_>, o: &At<'_>) {
    let spec = o.at("spec");
    let policy = spec.at("podManagementPolicy");
    match policy.str() {
        "" => policy.required(""),
        "OrderedReady" | "Parallel" => {}
        _ => policy.invalid("must be 'OrderedReady' or 'Parallel'"),
    }
    let strategy = spec.at("updateStrategy");
    let rolling = strategy.at("rollingUpdate");
    match strategy.text("type") {
        "" => strategy.required(""),
        "OnDelete" if rolling.present() => rolling.invalid("only allowed for updateStrategy 'RollingUpdate'"),
        "OnDelete" => {}
        "RollingUpdate" => {
            rolling.at("partition").non_negative();
            let unavailable = rolling.at("maxUnavailable");
            if unavailable.present() {
                int_or_percent(&unavailable);
                if int_or_percent_value(unavailable.value) == 0 {
                    unavailable.invalid("cannot be 0");
                }
                at_most_all(&unavailable);
            }
        }
        _ => strategy.invalid("must be 'RollingUpdate' or 'OnDelete'"),
    }
    for when in ["whenDeleted", "whenScaled"] {
        spec.at("persistentVolumeClaimRetentionPolicy").at(when).optional_one_of(&["Retain", "Delete"]);
    }
    for claim in spec.at("volumeClaimTemplates").items() {
        storage::claim_spec(&claim.at("spec"));
    }
    for n in ["replicas", "minReadySeconds", "ordinals.start"] {
        spec.at(n).non_negative();
    }
    let service = spec.at("serviceName");
    if !service.is_empty() {
        service.syntax(names::dns1123_label);
    }
    let selector = selector(&spec.at("selector"), "statefulset");
    // The template is checked as the pods will be: with the claims' volumes, without names of its own.
    let mut template = spec.at("template").value.clone();
    for field in ["spec.subdomain", "spec.hostname"] {
        remove(&mut template, field);
    }
    add_claim_volumes(&mut template, items(o.value, "spec.volumeClaimTemplates"));
    let at = spec.at("template");
    long_running_template(&at.with(&template), selector.as_ref(), "StatefulSet");
}

fn add_claim_volumes(template: &mut Value, claims: &[Value]) {
    if claims.is_empty() || !template.is_object() {
        return;
    }
    let named = |n: &str| claims.iter().any(|c| meta::name(c) == n);
    let mut volumes: Vec<Value> = claims
        .iter()
        .enumerate()
        .filter(|(i, c)| !claims[..*i].iter().any(|other| meta::name(other) == meta::name(c)))
        .map(|(_, c)| json!({"name": meta::name(c), "persistentVolumeClaim": {"claimName": meta::name(c)}}))
        .collect();
    volumes.extend(items(template, "spec.volumes").iter().filter(|v| !named(text(v, "name"))).cloned());
    set(template, "spec.volumes", volumes.into());
}

// === DaemonSet ===

/// DaemonSets.
pub static DAEMON_SET: Rules = Rules {
    defaults: &[|_, o| {
        template_defaults(o, "spec.template");
        let Some(spec) = o.get_mut("spec").filter(|s| s.is_object()) else { return };
        default_text(spec, "updateStrategy.type", "RollingUpdate");
        if text(spec, "updateStrategy.type") == "RollingUpdate" {
            default_at(spec, "updateStrategy.rollingUpdate", json!({}));
            default_at(spec, "updateStrategy.rollingUpdate.maxUnavailable", 1);
            default_at(spec, "updateStrategy.rollingUpdate.maxSurge", 0);
        }
        default_at(spec, "revisionHistoryLimit", 10);
    }],
    create: &[|_, o| {
        template_generation(o, 1);
        let zero = [
            "currentNumberScheduled",
            "numberMisscheduled",
            "desiredNumberScheduled",
            "numberReady",
        ];
        let status: Map<String, Value> = zero.iter().map(|k| ((*k).to_owned(), json!(0))).collect();
        set(o, "status", Value::Object(status));
    }],
    update: &[|_, new, old| {
        let was = meta::annotation(old, TEMPLATE_GENERATION).and_then(|g| g.parse::<i64>().ok()).unwrap_or(1);
        let changed = !same(get(new, "spec.template"), get(old, "spec.template"));
        template_generation(new, was + i64::from(changed));
    }],
    validate: &[daemon_set],
    validate_update: &[immutable_selector],
    validate_status: &[|_, o, old| {
        let status = o.at("status");
        for c in [
            "currentNumberScheduled",
            "numberMisscheduled",
            "desiredNumberScheduled",
            "numberReady",
            "observedGeneration",
            "updatedNumberScheduled",
            "numberAvailable",
            "numberUnavailable",
        ] {
            status.at(c).non_negative();
        }
        collision_count(&status, old);
    }],
    warnings: &[dns_label_warning],
    ..Rules::SPEC_STATUS
};

fn template_generation(o: &mut Value, n: i64) {
    meta::set_annotation(o, TEMPLATE_GENERATION, &n.to_string());
}

fn daemon_set(_: &Context<'_>, o: &At<'_>) {
    let spec = o.at("spec");
    // A selector that is not there selects nothing, the template's pods least of all.
    let selector = match spec.has("selector") {
        true => selector(&spec.at("selector"), "daemonset"),
        false => {
            spec.at("template.metadata.labels").invalid_value(get(spec.value, "template.metadata.labels").clone(), NOT_MATCHING);
            None
        }
    };
    long_running_template(&spec.at("template"), selector.as_ref(), "DaemonSet");
    for n in ["minReadySeconds", "revisionHistoryLimit"] {
        spec.at(n).non_negative();
    }
    let strategy = spec.at("updateStrategy");
    match strategy.text("type") {
        "OnDelete" => {}
        "RollingUpdate" => {
            let rolling = strategy.at("rollingUpdate");
            let (unavailable, surge) = (rolling.at("maxUnavailable"), rolling.at("maxSurge"));
            for at in [&unavailable, &surge] {
                int_or_percent(at);
                at_most_all(at);
            }
            match (int_or_percent_value(unavailable.value) != 0, int_or_percent_value(surge.value) != 0) {
                (true, true) => surge.invalid("may not be set when maxUnavailable is non-zero"),
                (false, false) => unavailable.required("cannot be 0 when maxSurge is 0"),
                _ => {}
            }
        }
        _ => strategy.not_supported(&["RollingUpdate", "OnDelete"]),
    }
}

// === PodTemplate, ControllerRevision ===

/// PodTemplates.
pub static POD_TEMPLATE: Rules = Rules {
    generation: &["template"],
    defaults: &[|_, o| template_defaults(o, "template")],
    validate: &[|_, o| podspec::template(&o.at("template"))],
    ..Rules::PLAIN
};

/// ControllerRevisions.
pub static CONTROLLER_REVISION: Rules = Rules {
    validate: &[|_, o| {
        o.at("revision").non_negative();
        let data = o.at("data");
        match data.value {
            Value::Null => data.required("data is mandatory"),
            Value::Object(_) => {}
            _ => data.required("data must be a valid JSON object"),
        }
    }],
    validate_update: &[|_, o, old| o.at("data").immutable(&old["data"])],
    ..Rules::PLAIN
};
