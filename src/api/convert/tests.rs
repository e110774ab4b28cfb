//! Conversions there and back again.

use serde_json::{Value, json};

use super::{convert, convert_unchecked, scale};
use crate::registry::Registry;

fn yaml(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

#[test]
fn autoscalers() {
    let v2 = yaml(
        "{apiVersion: autoscaling/v2, kind: HorizontalPodAutoscaler, metadata: {name: h}, spec: {maxReplicas: 3, scaleTargetRef: {kind: Deployment, name: d, apiVersion: apps/v1}, metrics: [{type: Resource, resource: {name: cpu, target: {type: Utilization, averageUtilization: 50}}}, {type: Pods, pods: {metric: {name: qps}, target: {type: AverageValue, averageValue: '10'}}}], behavior: {scaleDown: {stabilizationWindowSeconds: 5}}}}",
    );
    let registry = Registry::builtin();
    let v1 = convert(&registry, &v2, "autoscaling/v1").expect("served");
    // The plain processor target has a field; what else there is travels in annotations.
    assert_eq!(v1["spec"]["targetCPUUtilizationPercentage"], 50);
    assert_eq!(v1["spec"].get("metrics"), None);
    let annotations = v1["metadata"]["annotations"].as_object().expect("annotations");
    let metrics = annotations["autoscaling.alpha.kubernetes.io/metrics"].as_str().expect("text");
    assert_eq!(
        serde_json::from_str::<Value>(metrics).expect("JSON"),
        json!([{"type": "Pods", "pods": {"metricName": "qps", "targetAverageValue": "10"}}])
    );
    assert!(annotations.contains_key("autoscaling.alpha.kubernetes.io/behavior"));
    let mut back = convert(&registry, &v1, "autoscaling/v2").expect("served");
    // The order of metrics is not kept, as upstream.
    let sorted = |v: &mut Value| {
        if let Some(list) = v["spec"]["metrics"].as_array_mut() {
            list.sort_by_key(|m| m["type"].to_string());
        }
    };
    let mut want = v2;
    sorted(&mut want);
    sorted(&mut back);
    if back["metadata"]["annotations"] == json!({}) {
        crate::meta::remove(&mut back, "annotations");
    }
    assert_eq!(back, want);
}

#[test]
fn events() {
    let core = yaml(
        "{apiVersion: v1, kind: Event, metadata: {name: e}, involvedObject: {name: p}, reason: R, message: m, source: {component: c}, count: 2, type: Normal}",
    );
    let new = convert_unchecked(core.clone(), "events.k8s.io/v1");
    let want = yaml(
        "{apiVersion: events.k8s.io/v1, kind: Event, metadata: {name: e}, regarding: {name: p}, reason: R, note: m, deprecatedSource: {component: c}, deprecatedCount: 2, type: Normal}",
    );
    assert_eq!(new, want);
    assert_eq!(convert_unchecked(new, "v1"), core);
}

#[test]
fn refused() {
    let registry = Registry::builtin();
    let pod = json!({"apiVersion": "v1", "kind": "Pod"});
    for to in ["v2", "apps/v1"] {
        assert_eq!(convert(&registry, &pod, to).expect_err("not served").code, 400);
    }
}

#[test]
fn scales() {
    let registry = Registry::builtin();
    let deployments = registry.find_kind("apps", "v1", "Deployment").expect("built in");
    let mut object = yaml(
        "{apiVersion: apps/v1, kind: Deployment, metadata: {name: d, namespace: x, uid: u, labels: {a: b}}, spec: {replicas: 3, selector: {matchLabels: {a: b}, matchExpressions: [{key: c, operator: Exists}]}}, status: {replicas: 2}}",
    );
    let got = scale::get(&deployments, "v1", &object).expect("a scale");
    let want = yaml(
        "{apiVersion: autoscaling/v1, kind: Scale, metadata: {name: d, namespace: x, uid: u}, spec: {replicas: 3}, status: {replicas: 2, selector: 'a=b,c'}}",
    );
    assert_eq!(got, want);
    scale::set(&deployments, "v1", &mut object, &json!({"spec": {"replicas": 5}})).expect("a number");
    assert_eq!(object["spec"]["replicas"], 5);
    assert!(scale::set(&deployments, "v1", &mut object, &json!({"spec": {"replicas": -1}})).is_err());
}
