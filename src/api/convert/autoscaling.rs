//! HorizontalPodAutoscaler between autoscaling/v1 and v2: what v1 has no field for travels in annotations.

use serde_json::{Map, Value, json};

use crate::meta;
use crate::strategy::at::{get, items, remove, set};

const METRICS: &str = "autoscaling.alpha.kubernetes.io/metrics";
const BEHAVIOR: &str = "autoscaling.alpha.kubernetes.io/behavior";
const STATUSES: &str = "autoscaling.alpha.kubernetes.io/current-metrics";
const CONDITIONS: &str = "autoscaling.alpha.kubernetes.io/conditions";
/// What upstream assumes when no metric is given, in percent of the request.
const DEFAULT_UTILIZATION: i64 = 80;

/// One source: its field, and pairs of (v1 field, v2 path) for the target and for the current value.
struct Source {
    field: &'static str,
    spec: &'static [(&'static str, &'static str)],
    status: &'static [(&'static str, &'static str)],
}

const SOURCES: [Source; 5] = [
    Source {
        field: "resource",
        spec: &[
            ("name", "name"),
            ("targetAverageUtilization", "target.averageUtilization"),
            ("targetAverageValue", "target.averageValue"),
        ],
        status: &[
            ("name", "name"),
            ("currentAverageUtilization", "current.averageUtilization"),
            ("currentAverageValue", "current.averageValue"),
        ],
    },
    Source {
        field: "containerResource",
        spec: &[
            ("name", "name"),
            ("container", "container"),
            ("targetAverageUtilization", "target.averageUtilization"),
            ("targetAverageValue", "target.averageValue"),
        ],
        status: &[
            ("name", "name"),
            ("container", "container"),
            ("currentAverageUtilization", "current.averageUtilization"),
            ("currentAverageValue", "current.averageValue"),
        ],
    },
    Source {
        field: "pods",
        spec: &[
            ("metricName", "metric.name"),
            ("selector", "metric.selector"),
            ("targetAverageValue", "target.averageValue"),
        ],
        status: &[
            ("metricName", "metric.name"),
            ("selector", "metric.selector"),
            ("currentAverageValue", "current.averageValue"),
        ],
    },
    Source {
        field: "object",
        spec: &[
            ("target", "describedObject"),
            ("metricName", "metric.name"),
            ("selector", "metric.selector"),
            ("targetValue", "target.value"),
            ("averageValue", "target.averageValue"),
        ],
        status: &[
            ("target", "describedObject"),
            ("metricName", "metric.name"),
            ("selector", "metric.selector"),
            ("currentValue", "current.value"),
            ("averageValue", "current.averageValue"),
        ],
    },
    Source {
        field: "external",
        spec: &[
            ("metricName", "metric.name"),
            ("metricSelector", "metric.selector"),
            ("targetValue", "target.value"),
            ("targetAverageValue", "target.averageValue"),
        ],
        status: &[
            ("metricName", "metric.name"),
            ("metricSelector", "metric.selector"),
            ("currentValue", "current.value"),
            ("currentAverageValue", "current.averageValue"),
        ],
    },
];

/// A metric's spec or status from v1 to v2.
fn metric_up(metric: &Value, status: bool) -> Value {
    let mut out = Map::new();
    if let Some(kind) = metric.get("type") {
        out.insert("type".into(), kind.clone());
    }
    for source in &SOURCES {
        let Some(old) = metric.get(source.field).filter(|v| v.is_object()) else { continue };
        let mut new = json!({});
        for (v1, v2) in if status { source.status } else { source.spec } {
            if let Some(v) = old.get(*v1).filter(|v| !v.is_null()) {
                set(&mut new, v2, v.clone());
            }
        }
        if !status {
            let target = get(&new, "target");
            let kind = if !get(target, "averageUtilization").is_null() {
                "Utilization"
            } else if !get(target, "averageValue").is_null() {
                "AverageValue"
            } else {
                "Value"
            };
            set(&mut new, "target.type", kind.into());
        }
        out.insert(source.field.into(), new);
    }
    Value::Object(out)
}

/// A metric's spec or status from v2 to v1.
fn metric_down(metric: &Value, status: bool) -> Value {
    let mut out = Map::new();
    if let Some(kind) = metric.get("type") {
        out.insert("type".into(), kind.clone());
    }
    for source in &SOURCES {
        let Some(old) = metric.get(source.field).filter(|v| v.is_object()) else { continue };
        let mut new = Map::new();
        for (v1, v2) in if status { source.status } else { source.spec } {
            let v = get(old, v2);
            if !v.is_null() {
                new.insert((*v1).into(), v.clone());
            }
        }
        out.insert(source.field.into(), Value::Object(new));
    }
    Value::Object(out)
}

fn cpu_utilization(metric: &Value) -> Option<i64> {
    if metric["type"] != "Resource" || metric["resource"]["name"] != "cpu" {
        return None;
    }
    get(metric, "resource.target.averageUtilization").as_i64()
}

fn annotation(hpa: &Value, key: &str) -> Option<Value> {
    serde_json::from_str(meta::annotation(hpa, key)?).ok()
}

fn drop_annotations(hpa: &mut Value) {
    if let Some(Value::Object(map)) = hpa.pointer_mut("/metadata/annotations") {
        for key in [METRICS, BEHAVIOR, STATUSES, CONDITIONS] {
            map.remove(key);
        }
        if map.is_empty() {
            remove(hpa, "metadata.annotations");
        }
    }
}

pub(super) fn v1_to_v2(hpa: &mut Value) {
    let list = |v: Option<Value>| v.and_then(|v| v.as_array().cloned());
    let mut metrics: Vec<Value> =
        list(annotation(hpa, METRICS)).unwrap_or_default().iter().map(|m| metric_up(m, false)).collect();
    if let Some(cpu) = remove(hpa, "spec.targetCPUUtilizationPercentage").and_then(|v| v.as_i64()) {
        metrics.push(cpu_metric(cpu));
    }
    if metrics.is_empty() {
        metrics.push(cpu_metric(DEFAULT_UTILIZATION));
    }
    set(hpa, "spec.metrics", metrics.into());
    if let Some(behavior) = annotation(hpa, BEHAVIOR).filter(|b| b.as_object().is_some_and(|m| !m.is_empty())) {
        set(hpa, "spec.behavior", behavior);
    }
    let current = remove(hpa, "status.currentCPUUtilizationPercentage").and_then(|v| v.as_i64());
    match (list(annotation(hpa, STATUSES)), current) {
        (Some(statuses), _) => {
            set(hpa, "status.currentMetrics", statuses.iter().map(|m| metric_up(m, true)).collect());
        }
        (None, Some(cpu)) => {
            let status = json!([{"type": "Resource", "resource": {"name": "cpu", "current": {"averageUtilization": cpu}}}]);
            set(hpa, "status.currentMetrics", status);
        }
        (None, None) => {}
    }
    if let Some(conditions) = annotation(hpa, CONDITIONS).filter(Value::is_array) {
        set(hpa, "status.conditions", conditions);
    }
    drop_annotations(hpa);
}

fn cpu_metric(percent: i64) -> Value {
    json!({"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": percent}}})
}

pub(super) fn v2_to_v1(hpa: &mut Value) {
    drop_annotations(hpa);
    let put = |hpa: &mut Value, key: &str, v: Value| meta::set_annotation(hpa, key, &v.to_string());
    let metrics = remove(hpa, "spec.metrics");
    let metrics = metrics.as_ref().and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    if let Some(cpu) = metrics.iter().find_map(cpu_utilization) {
        set(hpa, "spec.targetCPUUtilizationPercentage", cpu.into());
    }
    let others: Vec<Value> =
        metrics.iter().filter(|m| cpu_utilization(m).is_none()).map(|m| metric_down(m, false)).collect();
    if !others.is_empty() {
        put(hpa, METRICS, others.into());
    }
    if let Some(behavior) = remove(hpa, "spec.behavior") {
        put(hpa, BEHAVIOR, behavior);
    }
    let cpu = items(hpa, "status.currentMetrics")
        .iter()
        .filter(|m| m["type"] == "Resource" && m["resource"]["name"] == "cpu")
        .find_map(|m| get(m, "resource.current.averageUtilization").as_i64());
    if let Some(cpu) = cpu {
        set(hpa, "status.currentCPUUtilizationPercentage", cpu.into());
    }
    if let Some(Value::Array(statuses)) = remove(hpa, "status.currentMetrics")
        && !statuses.is_empty()
    {
        put(hpa, STATUSES, statuses.iter().map(|m| metric_down(m, true)).collect());
    }
    if let Some(conditions) = remove(hpa, "status.conditions")
        && !crate::strategy::at::is_empty(&conditions)
    {
        put(hpa, CONDITIONS, conditions);
    }
}
