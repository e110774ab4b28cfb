//! HorizontalPodAutoscaler (as autoscaling/v2) and PodDisruptionBudget.

use serde_json::json;

use crate::strategy::at::{At, default_at, get, items, set};
use crate::strategy::rules::Rules;
use crate::strategy::workloads::{at_most_all, int_or_percent};
use crate::strategy::{Context, names, resources, selectors};

/// HorizontalPodAutoscalers. The v1 form has the spec's bounds and the target in common; the rest is v2's.
pub static AUTOSCALER: Rules = Rules {
    defaults: &[|ctx, o| {
        default_at(o, "spec.minReplicas", 1);
        if ctx.version == "v1" || o["apiVersion"] == "autoscaling/v1" {
            return;
        }
        if o["spec"].is_object() && items(o, "spec.metrics").is_empty() {
            let cpu = json!([{"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}}]);
            set(o, "spec.metrics", cpu);
        }
        if get(o, "spec.behavior").is_object() {
            let percent = json!({"type": "Percent", "value": 100, "periodSeconds": 15});
            let pods = json!({"type": "Pods", "value": 4, "periodSeconds": 15});
            default_at(o, "spec.behavior.scaleUp.stabilizationWindowSeconds", 0);
            default_at(o, "spec.behavior.scaleUp.selectPolicy", "Max");
            default_at(o, "spec.behavior.scaleUp.policies", json!([pods, percent]));
            default_at(o, "spec.behavior.scaleDown.selectPolicy", "Max");
            default_at(o, "spec.behavior.scaleDown.policies", json!([percent]));
        }
    }],
    create: &[|_, o| set(o, "status", json!({"desiredReplicas": 0, "currentMetrics": null}))],
    validate: &[autoscaler],
    validate_status: &[|_, o, _| {
        for n in ["status.currentReplicas", "status.desiredReplicas"] {
            o.at(n).non_negative();
        }
    }],
    ..Rules::SPEC_STATUS
};

fn reference(r: &At<'_>) {
    for f in ["kind", "name"] {
        if r.at(f).require() {
            r.at(f).syntax(names::path_segment);
        }
    }
    let version = r.at("apiVersion");
    if version.str().split('/').count() > 2 {
        version.invalid(format!("unexpected GroupVersion string: {}", version.str()));
    }
}

/// What is scaled lies in a group, but for the one kind of the core.
fn scaled_group(r: &At<'_>, empty_ok: bool) {
    let version = r.at("apiVersion");
    let core = !version.str().contains('/');
    if !core || r.text("kind") == "ReplicationController" || (empty_ok && version.is_empty()) {
        return;
    }
    version.invalid_value(version.str(), "apiVersion must specify API group");
}

fn autoscaler(_: &Context<'_>, o: &At<'_>) {
    let spec = o.at("spec");
    let (min, max) = (spec.at("minReplicas"), spec.at("maxReplicas"));
    min.non_negative();
    match max.int().unwrap_or(0) {
        0 => max.required(""),
        n if n < 0 => max.invalid("must be greater than or equal to 1"),
        _ => {}
    }
    if min.int().is_some_and(|m| max.int().unwrap_or(0) < m) {
        max.invalid_value(max.int().unwrap_or(0), "must be greater than or equal to `minReplicas`");
    }
    let target = spec.at("scaleTargetRef");
    reference(&target);
    // What was stored before this was asked for may stay: only creators are held to it.
    if !o.has("metadata.resourceVersion") {
        scaled_group(&target, false);
    }
    let metrics = spec.at("metrics");
    metrics.each(metric);
    let zero_ok = metrics.items().any(|m| matches!(m.text("type"), "Object" | "External"));
    if min.int() == Some(0) && !zero_ok {
        metrics.forbidden("must specify at least one Object or External metric to support scaling to zero replicas");
    }
    for direction in ["scaleUp", "scaleDown"] {
        let rules = spec.at("behavior");
        let rules = rules.at(direction);
        if rules.present() {
            scaling_rules(&rules);
        }
    }
}

fn scaling_rules(r: &At<'_>) {
    let window = r.at("stabilizationWindowSeconds");
    match window.int() {
        Some(n) if n < 0 => window.invalid("must be greater than or equal to zero"),
        Some(n) if n > 3600 => window.invalid("must be less than or equal to 3600"),
        _ => {}
    }
    r.at("selectPolicy").optional_one_of(&["Disabled", "Max", "Min"]);
    let policies = r.at("policies");
    if policies.is_empty() {
        policies.required("must specify at least one Policy");
    }
    for p in policies.items() {
        if !matches!(p.text("type"), "Pods" | "Percent") {
            p.at("type").not_supported(&["Percent", "Pods"]);
        }
        for n in ["value", "periodSeconds"] {
            if p.num(n).unwrap_or(0) <= 0 {
                p.at(n).invalid_value(p.num(n).unwrap_or(0), "must be greater than zero");
            }
        }
        if p.num("periodSeconds").unwrap_or(0) > 1800 {
            p.at("periodSeconds").invalid("must be less than or equal to 1800");
        }
    }
    let tolerance = r.at("tolerance");
    if resources::quantity(tolerance.value).is_some_and(|q| q.is_negative()) {
        tolerance.invalid("must be greater than or equal to 0");
    }
}

fn metric(m: &At<'_>) {
    const TYPES: [&str; 5] = ["ContainerResource", "External", "Object", "Pods", "Resource"];
    const FIELDS: [(&str, &str); 5] = [
        ("Object", "object"),
        ("External", "external"),
        ("Pods", "pods"),
        ("Resource", "resource"),
        ("ContainerResource", "containerResource"),
    ];
    let kind = m.at("type");
    if kind.is_empty() {
        kind.required("must specify a metric source type");
    }
    if !TYPES.contains(&kind.str()) {
        kind.not_supported(&TYPES);
    }
    let mut first = true;
    for (name, field) in FIELDS {
        let source = m.at(field);
        if source.present() {
            if first {
                metric_source(name, &source);
            }
            first = false;
        }
        if kind.str() == name && !source.present() {
            source.required("must populate information for the given metric source");
        }
        if kind.str() != name && source.present() && TYPES.contains(&kind.str()) {
            source.forbidden("must populate the given metric source only");
        }
    }
}

fn metric_source(kind: &str, s: &At<'_>) {
    let target = s.at("target");
    if matches!(kind, "Resource" | "ContainerResource") {
        if s.at("name").is_empty() {
            s.at("name").required("must specify a resource name");
        } else if kind == "ContainerResource" {
            resources::container_name(&s.at("name"), s.text("name"));
        }
        if kind == "ContainerResource" {
            if s.at("container").is_empty() {
                s.at("container").required("must specify a container");
            } else {
                s.at("container").syntax(names::dns1123_label);
            }
        }
    } else {
        let metric = s.at("metric");
        if metric.at("name").is_empty() {
            metric.at("name").required("must specify a metric name");
        } else {
            metric.at("name").syntax(names::path_segment);
        }
    }
    if kind == "Object" {
        reference(&s.at("describedObject"));
    }
    metric_target(&target);
    let (value, average, utilization) =
        (target.has("value"), target.has("averageValue"), target.has("averageUtilization"));
    match kind {
        "Object" if !value && !average => {
            target.at("averageValue").required("must set either a target value or averageValue");
        }
        "External" if !value && !average => {
            target.at("averageValue").required("must set either a target value for metric or a per-pod target");
        }
        "External" if value && average => {
            target.at("value").forbidden("may not set both a target value for metric and a per-pod target");
        }
        "Pods" if !average => {
            target.at("averageValue").required("must specify a positive target averageValue");
        }
        "Resource" | "ContainerResource" => {
            if !utilization && !average {
                target
                    .at("averageUtilization")
                    .required("must set either a target raw value or a target utilization");
            }
            if utilization && average {
                target.at("averageValue").forbidden("may not set both a target raw value and a target utilization");
            }
        }
        _ => {}
    }
}

fn metric_target(t: &At<'_>) {
    let kind = t.at("type");
    if kind.is_empty() {
        kind.required("must specify a metric target type");
    }
    if !matches!(kind.str(), "Utilization" | "Value" | "AverageValue") {
        kind.invalid_value(kind.str(), "must be either Utilization, Value, or AverageValue");
    }
    for q in ["value", "averageValue"] {
        let at = t.at(q);
        if at.present() && resources::quantity(at.value).is_none_or(|v| v.is_zero() || v.is_negative()) {
            at.invalid("must be positive");
        }
    }
    let utilization = t.at("averageUtilization");
    if utilization.int().is_some_and(|n| n < 1) {
        utilization.invalid("must be greater than 0");
    }
}

// === PodDisruptionBudget ===

/// PodDisruptionBudgets.
pub static DISRUPTION_BUDGET: Rules = Rules {
    name: names::path_segment,
    unconditional_update: false,
    create: &[|_, o| {
        set(
            o,
            "status",
            json!({"disruptionsAllowed": 0, "currentHealthy": 0, "desiredHealthy": 0, "expectedPods": 0}),
        );
    }],
    validate: &[|_, o| {
        let spec = o.at("spec");
        let (min, max) = (spec.at("minAvailable"), spec.at("maxUnavailable"));
        if min.present() && max.present() {
            spec.invalid("minAvailable and maxUnavailable cannot be both set");
        }
        for at in [&min, &max] {
            int_or_percent(at);
            at_most_all(at);
        }
        selectors::label_selector(&spec.at("selector"));
        spec.at("unhealthyPodEvictionPolicy").optional_one_of(&["AlwaysAllow", "IfHealthyBudget"]);
    }],
    validate_status: &[|_, o, _| {
        for n in ["disruptionsAllowed", "currentHealthy", "desiredHealthy", "expectedPods"] {
            o.at("status").at(n).non_negative();
        }
    }],
    ..Rules::SPEC_STATUS
};
