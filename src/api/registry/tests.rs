//! Tests of the registry.

use serde_json::{Value, json};

use super::*;
use crate::selector::FieldSelector;

fn crd() -> Value {
    json!({
        "metadata": {"name": "crontabs.stable.example.com", "uid": "u"},
        "spec": {
            "group": "stable.example.com",
            "names": {"plural": "crontabs", "kind": "CronTab", "shortNames": ["ct"]},
            "scope": "Namespaced",
            "versions": [
                {"name": "v1beta1", "served": true, "storage": false, "deprecated": true,
                 "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}},
                {"name": "v1", "served": true, "storage": true,
                 "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": {"type": "object", "properties": {
                     "replicas": {"type": "integer"}, "cronSpec": {"type": "string"}}}}}},
                 "selectableFields": [{"jsonPath": ".spec.cronSpec"}],
                 "additionalPrinterColumns": [{"name": "Spec", "type": "string", "jsonPath": ".spec.cronSpec"}],
                 "subresources": {"status": {}, "scale": {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}}},
            ],
        },
    })
}

#[test]
fn every_row_has_its_types() {
    let registry = Registry::builtin();
    let mut rows = 0;
    for row in registry.resources() {
        for version in &row.versions {
            let ty = row.schemas.ty(version.schema);
            let expected = crate::facts::definition_name(&row.group, &version.name, &row.kind);
            assert_eq!(ty.name.as_deref(), Some(&*expected), "{}", row.gr());
            assert_eq!(version.has_verb("list"), version.list_schema.is_some(), "{}", row.gr());
            for sub in &version.subresources {
                assert!(sub.schema.is_some() || sub.kind.ends_with("Options"), "{}/{} has no type", row.gr(), sub.name);
            }
        }
        rows += 1;
    }
    assert!(rows > 60, "only {rows} rows");
}

#[test]
fn rows_are_found() {
    let registry = Registry::builtin();
    let pods = registry.find("", "v1", "pods").expect("pods");
    assert_eq!((pods.kind.as_str(), pods.namespaced, pods.storage), ("Pod", true, Storage::Store));
    assert!(registry.find("", "v2", "pods").is_none());
    assert_eq!(registry.find_kind("apps", "v1", "DeploymentList").expect("deployments").plural, "deployments");
    let hpa = registry.find("autoscaling", "v1", "horizontalpodautoscalers").expect("autoscalers");
    assert_eq!(hpa.versions.iter().map(|version| version.name.as_str()).collect::<Vec<_>>(), ["v2", "v1"]);
    assert_eq!(hpa.storage_version, "v2");
    assert_eq!(registry.find("metrics.k8s.io", "v1beta1", "pods").expect("metrics").storage, Storage::Virtual("metrics"));
    assert_eq!(registry.find("authorization.k8s.io", "v1", "subjectaccessreviews").expect("reviews").storage, Storage::ReviewOnly);
    assert_eq!(registry.find("", "v1", "bindings").expect("bindings").storage, Storage::ReviewOnly);
}

#[test]
fn keys_are_upstreams() {
    let registry = Registry::builtin();
    let table = [
        ("", "pods", "/registry/pods/"),
        ("", "nodes", "/registry/minions/"),
        ("", "services", "/registry/services/specs/"),
        ("", "endpoints", "/registry/services/endpoints/"),
        ("", "replicationcontrollers", "/registry/controllers/"),
        ("apps", "deployments", "/registry/deployments/"),
        ("networking.k8s.io", "ingresses", "/registry/ingress/"),
        ("events.k8s.io", "events", "/registry/events/"),
        ("apiextensions.k8s.io", "customresourcedefinitions", "/registry/apiextensions.k8s.io/customresourcedefinitions/"),
    ];
    for (group, plural, expected) in table {
        assert_eq!(registry.find_resource(group, plural).expect("a row").storage_prefix(), expected);
    }
}

#[test]
fn field_selectors() {
    let registry = Registry::builtin();
    let check = |group: &str, plural: &str, selector: &str, object: Value, expected: Result<bool, &str>| {
        let row = registry.find_resource(group, plural).expect("a row");
        let selector = FieldSelector::parse(selector).expect("a selector");
        let actual = selector.check(&row, &row.storage_version).map(|()| selector.matches_object(&row, &object));
        assert_eq!(actual, expected.map_err(str::to_owned), "{plural} {selector}");
    };
    check("", "pods", "spec.nodeName=n,metadata.name=p", json!({"metadata": {"name": "p"}, "spec": {"nodeName": "n"}}), Ok(true));
    check("", "pods", "spec.nodeName=", json!({"spec": {}}), Ok(true));
    check("", "pods", "spec.hostNetwork=false", json!({}), Ok(true));
    check("", "pods", "status.podIP=1.2.3.4", json!({"status": {"podIPs": [{"ip": "1.2.3.4"}]}}), Ok(true));
    check("", "pods", "status.phase!=Running", json!({"status": {"phase": "Pending"}}), Ok(true));
    check("", "pods", "spec.image=x", json!({}), Err("field label not supported: spec.image"));
    check("", "nodes", "spec.unschedulable=true", json!({"spec": {"unschedulable": true}}), Ok(true));
    check("batch", "jobs", "status.successful=2", json!({"status": {"succeeded": 2}}), Ok(true));
    check("", "events", "source=kubelet", json!({"reportingComponent": "kubelet"}), Ok(true));
    check(
        "apps",
        "deployments",
        "spec.replicas=1",
        json!({}),
        Err("\"spec.replicas\" is not a known field selector: only \"metadata.name\", \"metadata.namespace\""),
    );
}

#[test]
fn custom_rows() {
    let row = Resource::from_crd(&crd()).expect("a good CRD");
    assert_eq!((row.singular.as_str(), row.list_kind.as_str(), row.storage_version.as_str()), ("crontab", "CronTabList", "v1"));
    assert_eq!(row.versions.iter().map(|version| version.name.as_str()).collect::<Vec<_>>(), ["v1", "v1beta1"]);
    assert_eq!(row.version("v1beta1").and_then(|v| v.deprecated_warning.as_deref()), Some("stable.example.com/v1beta1 CronTab is deprecated"));
    assert_eq!(row.storage_prefix(), "/registry/stable.example.com/crontabs/");
    let stored = row.stored();
    assert_eq!(stored.subresources.iter().map(|sub| sub.name.as_str()).collect::<Vec<_>>(), ["status", "scale"]);
    assert_eq!(stored.scale.as_ref().map(|scale| scale.spec_replicas.clone()), Some(vec!["spec".to_owned(), "replicas".to_owned()]));
    assert!(row.selectable("v1", "spec.cronSpec").is_some());

    let registry = Registry::builtin();
    let with = registry.with_custom(vec![Arc::new(row)]);
    assert!(with.find("stable.example.com", "v1", "crontabs").is_some());
    assert!(registry.find("stable.example.com", "v1", "crontabs").is_none());
    let listed = crate::discovery::api_resource_list(&with, "stable.example.com", "v1").expect("resources");
    assert_eq!(listed["resources"].as_array().map(Vec::len), Some(3));
}

#[test]
fn versions_are_ordered() {
    let mut versions = ["v1beta1", "v10", "v2alpha1", "foo", "v2", "v1", "v11alpha2", "v1beta2", "bar"];
    versions.sort_by(|a, b| custom::version_priority(b).cmp(&custom::version_priority(a)).then_with(|| a.cmp(b)));
    assert_eq!(versions, ["v10", "v2", "v1", "v1beta2", "v1beta1", "v11alpha2", "v2alpha1", "bar", "foo"]);
}
