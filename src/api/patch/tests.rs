//! Patches as tables: what is there, the patch, what becomes of it. Expectations are what upstream's server answers.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::apply::Writer;
use super::*;
use crate::registry::{Registry, Resource};

fn yaml(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

#[test]
fn json_patches() {
    let table: [(&str, &str, Option<&str>); 7] = [
        ("{a: 1}", "[{op: add, path: /b, value: 2}]", Some("{a: 1, b: 2}")),
        ("{a: [1, 3]}", "[{op: add, path: /a/1, value: 2}, {op: add, path: /a/-, value: 4}]", Some("{a: [1, 2, 3, 4]}")),
        ("{a: {b: 1}}", "[{op: move, from: /a/b, path: /c}, {op: remove, path: /a}]", Some("{c: 1}")),
        ("{a: 1}", "[{op: test, path: /a, value: 1}, {op: replace, path: /a, value: 2}]", Some("{a: 2}")),
        ("{a: 1}", "[{op: test, path: /a, value: 2}]", None),
        ("{a: 1}", "[{op: remove, path: /b}]", None),
        ("{a: 1}", "[{op: frob, path: /b}]", None),
    ];
    for (object, patch, want) in table {
        let mut got = yaml(object);
        match (json_patch(&mut got, &yaml(patch)), want) {
            (Ok(()), Some(want)) => assert_eq!(got, yaml(want), "{patch}"),
            (Err(e), None) => assert_eq!((e.code, e.reason), (422, "Invalid"), "{patch}"),
            (got, _) => panic!("{patch}: {got:?}"),
        }
    }
}

#[test]
fn json_patches_are_bounded() {
    let many: Vec<Value> = (0..=MAX_OPERATIONS).map(|_| json!({"op": "add", "path": "/a", "value": 1})).collect();
    let error = json_patch(&mut json!({}), &many.into()).expect_err("too many");
    assert_eq!(error.code, 413);
    // Each copy doubles the object.
    let double: Vec<Value> = (0..64).map(|i| json!({"op": "copy", "from": "", "path": format!("/c{i}")})).collect();
    let mut object = json!({"a": "x".repeat(1000)});
    let error = json_patch(&mut object, &double.into()).expect_err("too large");
    assert_eq!(error.code, 422);
}

#[test]
fn merge_patches() {
    let table = [
        ("{a: 1, b: {c: 1, d: 2}}", "{a: null, b: {c: null, e: 3}}", "{b: {d: 2, e: 3}}"),
        ("{a: [1, 2]}", "{a: [3]}", "{a: [3]}"),
        ("{a: 1}", "{a: {b: {c: null}}}", "{a: {b: {}}}"),
    ];
    for (object, patch, want) in table {
        let mut got = yaml(object);
        merge_patch(&mut got, &yaml(patch)).expect("a fitting patch");
        assert_eq!(got, yaml(want), "{patch}");
    }
}

fn resource(api_version: &str, kind: &str) -> std::sync::Arc<Resource> {
    let (group, version) = crate::meta::split_api_version(api_version);
    Registry::builtin().find_kind(group, version, kind).expect("a built-in kind")
}

fn pod(spec: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": yaml(spec)})
}

#[test]
fn strategic_patches() {
    let table = [
        // Lists with a merge key are merged by it, the others replaced.
        (
            "{containers: [{name: a, image: x}, {name: b, args: [u, v]}]}",
            "{containers: [{name: b, image: z, args: [w]}]}",
            "{containers: [{name: a, image: x}, {name: b, image: z, args: [w]}]}",
        ),
        ("{containers: [{name: a}, {name: b}]}", "{containers: [{name: a, $patch: delete}]}", "{containers: [{name: b}]}"),
        (
            "{containers: [{name: a}, {name: b}]}",
            "{containers: [{$patch: replace}, {name: c, image: x}]}",
            "{containers: [{name: c, image: x}]}",
        ),
        ("{nodeSelector: {a: b, c: d}}", "{nodeSelector: {$patch: replace, e: f}}", "{nodeSelector: {e: f}}"),
        ("{nodeSelector: {a: b, c: d}}", "{nodeSelector: {a: null}}", "{nodeSelector: {c: d}}"),
        (
            "{containers: [{name: a}, {name: b}]}",
            "{$setElementOrder/containers: [{name: c}, {name: b}, {name: a}], containers: [{name: c}]}",
            "{containers: [{name: c}, {name: b}, {name: a}]}",
        ),
        (
            "{volumes: [{name: v, emptyDir: {}}]}",
            "{volumes: [{name: v, $retainKeys: [name, hostPath], hostPath: {path: /x}}]}",
            "{volumes: [{name: v, hostPath: {path: /x}}]}",
        ),
        (
            "{containers: [{name: a, ports: [{containerPort: 80}, {containerPort: 81, name: x}]}]}",
            "{containers: [{name: a, ports: [{containerPort: 81, protocol: UDP}]}]}",
            "{containers: [{name: a, ports: [{containerPort: 80}, {containerPort: 81, name: x, protocol: UDP}]}]}",
        ),
    ];
    let r = resource("v1", "Pod");
    for (object, patch, want) in table {
        let patch = json!({"spec": yaml(patch)});
        let got = strategic_merge(&r.schemas, r.stored().schema, &pod(object), &patch).expect("a fitting patch");
        assert_eq!(got, pod(want), "{patch}");
    }
    let finalizers = json!({"metadata": {"finalizers": ["a", "b"]}});
    let patch = yaml("{metadata: {$deleteFromPrimitiveList/finalizers: [a], finalizers: [c]}}");
    let got = strategic_merge(&r.schemas, r.stored().schema, &finalizers, &patch).expect("a fitting patch");
    let mut left: Vec<_> = got["metadata"]["finalizers"].as_array().into_iter().flatten().collect();
    left.sort_by_key(|v| v.to_string());
    assert_eq!(left, ["b", "c"]);
}

/// A manager at work on one kind, at second `at`.
fn writer<'a>(r: &'a Resource, manager: &'a str, subresource: Option<&'a str>, at: i64) -> Writer<'a> {
    Writer {
        schemas: &r.schemas,
        ty: r.stored().schema,
        api_version: if r.group.is_empty() { "v1" } else { "apps/v1" },
        custom: r.custom,
        manager,
        subresource,
        now: Timestamp::from_second(1_700_000_000 + at).expect("in range"),
        reset: if subresource.is_none() { &["status"] } else { &[] },
    }
}

fn deployment(spec: &str) -> Value {
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": yaml(spec)})
}

/// `manager/operation` and what it owns.
fn managers(object: &Value) -> Vec<(String, Value)> {
    let entries = object["metadata"]["managedFields"].as_array().cloned().unwrap_or_default();
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    entries.iter().map(|e| (format!("{}/{}", text(&e["manager"]), text(&e["operation"])), e["fieldsV1"].clone())).collect()
}

const SMALL: &str = "{replicas: 1, selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: x}]}}}";

#[test]
fn updates_own_what_they_change() {
    let r = resource("apps/v1", "Deployment");
    let mut first = deployment(SMALL);
    writer(&r, "one", None, 0).update_managed(None, &mut first);
    // Lists that Go writes even when they are empty (containers) are nobody's; their items are.
    let want = yaml(
        r#"{"f:spec": {"f:replicas": {}, "f:selector": {}, "f:template": {"f:metadata": {"f:labels": {".": {}, "f:a": {}}}, "f:spec": {"f:containers": {'k:{"name":"c"}': {".": {}, "f:name": {}, "f:image": {}}}}}}}"#,
    );
    assert_eq!(managers(&first), [("one/Update".to_owned(), want)]);

    let mut second = first.clone();
    second["spec"]["replicas"] = 2.into();
    writer(&r, "two", None, 5).update_managed(Some(&first), &mut second);
    let got = managers(&second);
    assert_eq!(got[1], ("two/Update".to_owned(), yaml(r#"{"f:spec": {"f:replicas": {}}}"#)));
    assert_eq!(got[0].1["f:spec"].get("f:replicas"), None);

    // A write that changes nothing keeps the times; so does one of status by the main resource.
    let mut same = second.clone();
    same["status"] = json!({"replicas": 7});
    writer(&r, "three", None, 9).update_managed(Some(&second), &mut same);
    assert_eq!(same["metadata"]["managedFields"], second["metadata"]["managedFields"]);

    let mut status = second.clone();
    status["status"] = json!({"replicas": 7});
    writer(&r, "ctl", Some("status"), 9).update_managed(Some(&second), &mut status);
    let last = status["metadata"]["managedFields"][2].clone();
    assert_eq!(last["subresource"], "status");
    assert_eq!(last["time"], "2023-11-14T22:13:29Z");

    // An empty list, or one empty entry, forgets everyone.
    for reset in [json!([]), json!([{}])] {
        let mut forget = second.clone();
        forget["metadata"]["managedFields"] = reset;
        writer(&r, "one", None, 9).update_managed(Some(&second), &mut forget);
        assert_eq!(forget["metadata"].get("managedFields"), None);
    }
}

#[test]
fn old_updaters_are_merged() {
    let r = resource("v1", "ConfigMap");
    let mut live = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "b"}});
    writer(&r, "m", None, 0).update_managed(None, &mut live);
    let names: Vec<String> = (0..14).map(|i| format!("m{i:02}")).collect();
    for (i, name) in names.iter().enumerate() {
        let mut new = live.clone();
        new["data"][format!("k{i}")] = "x".into();
        writer(&r, name, None, 10 + i64::try_from(i).unwrap_or(0)).update_managed(Some(&live), &mut new);
        live = new;
    }
    let got = managers(&live);
    assert_eq!(got.len(), apply::MAX_UPDATE_MANAGERS);
    assert_eq!(got[0].0, "ancient-changes/Update");
}

#[test]
fn applying() {
    let r = resource("apps/v1", "Deployment");
    let me = |at| writer(&r, "me", None, at);
    let first = me(0).apply(None, &deployment(SMALL), false).expect("nothing to conflict with");
    assert_eq!(managers(&first).len(), 1);
    assert_eq!(managers(&first)[0].0, "me/Apply");

    // The same again changes nothing, not even the time.
    assert_eq!(me(60).apply(Some(&first), &deployment(SMALL), false).expect("no conflict"), first);

    // Another value of what somebody else owns.
    let mut scaled = first.clone();
    scaled["spec"]["replicas"] = 5.into();
    writer(&r, "kubectl-edit", None, 5).update_managed(Some(&first), &mut scaled);
    let two = deployment("{replicas: 2}");
    let error = writer(&r, "you", None, 6).apply(Some(&scaled), &two, false).expect_err("a conflict");
    assert_eq!((error.code, error.reason), (409, "Conflict"));
    assert_eq!(
        error.message,
        "Apply failed with 1 conflict: conflict with \"kubectl-edit\" using apps/v1: .spec.replicas"
    );
    let causes = &error.details.as_ref().expect("details").causes;
    assert_eq!((causes[0].reason.as_str(), causes[0].field.as_str()), ("FieldManagerConflict", ".spec.replicas"));

    // Force takes it over; the same value is shared without.
    let forced = writer(&r, "you", None, 7).apply(Some(&scaled), &two, true).expect("forced");
    assert_eq!(forced["spec"]["replicas"], 2);
    assert!(managers(&forced).iter().all(|(m, set)| m == "you/Apply" || set["f:spec"].get("f:replicas").is_none()));
    let shared = writer(&r, "they", None, 8).apply(Some(&forced), &two, false).expect("the same value");
    assert_eq!(managers(&shared).iter().filter(|(_, set)| set["f:spec"].get("f:replicas").is_some()).count(), 2);
}

#[test]
fn applying_less_removes() {
    let r = resource("apps/v1", "Deployment");
    let spec = |env: &str, more: &str| {
        deployment(&format!("{{template: {{spec: {{containers: [{{name: c, image: x, env: [{env}]}}{more}]}}}}}}"))
    };
    let me = writer(&r, "me", None, 0);
    let first = me.apply(None, &spec("{name: A, value: '1'}, {name: B, value: '2'}", ", {name: d, image: y}"), false);
    let first = first.expect("no conflict");
    // Somebody else's item stays, an item shared with somebody stays, the others go.
    let mut edited = first.clone();
    let env = edited.pointer_mut("/spec/template/spec/containers/0/env").and_then(Value::as_array_mut).expect("env");
    env.push(json!({"name": "Z", "value": "9"}));
    writer(&r, "other", None, 1).update_managed(Some(&first), &mut edited);
    let got = me.apply(Some(&edited), &spec("{name: B, value: '2'}", ""), false).expect("no conflict");
    let containers = &got["spec"]["template"]["spec"]["containers"];
    assert_eq!(containers.as_array().map(Vec::len), Some(1));
    let names: Vec<&Value> = containers[0]["env"].as_array().into_iter().flatten().map(|e| &e["name"]).collect();
    assert_eq!(names, ["B", "Z"]);
}

#[test]
fn what_cannot_be_applied() {
    let r = resource("apps/v1", "Deployment");
    let table = [
        ("{nope: 1}", ".spec.nope: field not declared in schema"),
        (
            "{template: {spec: {containers: [{name: c}, {name: c}]}}}",
            ".spec.template.spec.containers: duplicate entries for key [name=\"c\"]",
        ),
    ];
    for (spec, want) in table {
        let error = writer(&r, "me", None, 0).apply(None, &deployment(spec), false).expect_err("a misfit");
        assert_eq!(error.code, 500);
        assert_eq!(error.message, format!("failed to create typed patch object (/d; apps/v1, Kind=Deployment): {want}"));
    }
}

#[test]
fn kubectl_moves_from_client_to_server() {
    let r = resource("v1", "ConfigMap");
    let config = |data: Value| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": data});
    let mut live = config(json!({"a": "1", "b": "2"}));
    live["metadata"]["annotations"] = json!({apply::LAST_APPLIED: config(json!({"a": "1", "b": "2"})).to_string()});
    writer(&r, "kubectl-client-side-apply", None, 0).update_managed(None, &mut live);
    // What the annotation says kubectl set may be taken over without force, by kubectl alone.
    let next = config(json!({"a": "3"}));
    assert!(writer(&r, "helm", None, 1).apply(Some(&live), &next, false).is_err());
    let got = writer(&r, "kubectl", None, 1).apply(Some(&live), &next, false).expect("taken over");
    assert_eq!(got["data"]["a"], "3");
    let annotation = crate::meta::annotation(&got, apply::LAST_APPLIED).expect("kept up to date");
    assert_eq!(serde_json::from_str::<Value>(annotation).ok(), Some(next));
}

#[test]
fn untracked_objects_get_a_first_manager() {
    let r = resource("v1", "ConfigMap");
    let live = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "1"}});
    let applied = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "2"}});
    let error = writer(&r, "me", None, 1).apply(Some(&live), &applied, false).expect_err("a conflict");
    assert_eq!(error.message, "Apply failed with 1 conflict: conflict with \"before-first-apply\" using v1: .data.a");
}
