//! Lists, pages, watches and tables, over the in-process service.


use crate::common::{Server, contains};
use serde_json::{Value, json};

const CM: &str = "/api/v1/namespaces/default/configmaps";

async fn make(s: &Server, names: &[&str]) {
    for name in names {
        s.check(&format!("POST {CM}"), json!({"metadata": {"name": name, "labels": {"n": name}}}), 201, json!({})).await;
    }
}

fn names(list: &Value) -> Vec<&str> {
    list["items"].as_array().into_iter().flatten().filter_map(|i| i["metadata"]["name"].as_str()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_show_one_moment() {
    let s = Server::start().await;
    make(&s, &["a", "b", "c", "d", "e"]).await;
    let first = s.check(&format!("GET {CM}?limit=2"), Value::Null, 200, json!({"metadata": {"remainingItemCount": 3}})).await;
    assert_eq!(names(&first), ["a", "b"]);
    let (token, revision) = (first["metadata"]["continue"].as_str().expect("a token").to_owned(), first["metadata"]["resourceVersion"].clone());
    // What happens meanwhile is not on the later pages.
    s.check(&format!("DELETE {CM}/c"), Value::Null, 200, json!({})).await;
    make(&s, &["ca", "f"]).await;
    s.check(&format!("PATCH {CM}/d?type=merge"), json!({"data": {"new": "1"}}), 200, json!({})).await;
    let second = s.check(&format!("GET {CM}?limit=2&continue={token}"), Value::Null, 200, json!({"metadata": {"resourceVersion": revision, "remainingItemCount": 1}})).await;
    assert_eq!(names(&second), ["c", "d"]);
    assert!(second["items"][1].get("data").is_none(), "{second:#}");
    let token = second["metadata"]["continue"].as_str().expect("a token");
    let third = s.check(&format!("GET {CM}?limit=2&continue={token}"), Value::Null, 200, json!({})).await;
    assert_eq!(names(&third), ["e"]);
    assert!(third["metadata"].get("continue").is_none());
    // All namespaces, exact versions, and versions that do not exist yet.
    let all = s.check("GET /api/v1/configmaps?limit=1", Value::Null, 200, json!({})).await;
    let token = all["metadata"]["continue"].as_str().expect("a token");
    s.check(&format!("GET /api/v1/configmaps?limit=1&continue={token}"), Value::Null, 200, json!({})).await;
    let revision = first["metadata"]["resourceVersion"].as_str().expect("a version");
    let exact = s.check(&format!("GET {CM}?resourceVersion={revision}&resourceVersionMatch=Exact"), Value::Null, 200, json!({"metadata": {"resourceVersion": revision}})).await;
    assert_eq!(names(&exact), ["a", "b", "c", "d", "e"]);
    let newer = s.check(&format!("GET {CM}?resourceVersion={revision}&resourceVersionMatch=NotOlderThan"), Value::Null, 200, json!({})).await;
    assert_eq!(names(&newer), ["a", "b", "ca", "d", "e", "f"]);
    s.check(&format!("GET {CM}?resourceVersion=99999999"), Value::Null, 504, json!({"reason": "Timeout", "message": "~Too large resource version"})).await;
    s.check(&format!("GET {CM}?continue=***"), Value::Null, 400, json!({"message": "~continue key is not valid"})).await;
    s.check(&format!("GET {CM}?resourceVersion=abc"), Value::Null, 422, json!({})).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn selectors() {
    let s = Server::start().await;
    make(&s, &["a", "b", "c"]).await;
    for (selector, want) in [("n%3Da", vec!["a"]), ("n!%3Da", vec!["b", "c"]), ("n%20in%20(a,c)", vec!["a", "c"]), ("!n", vec![]), ("n", vec!["a", "b", "c"])] {
        let list = s.check(&format!("GET {CM}?labelSelector={selector}"), Value::Null, 200, json!({"kind": "ConfigMapList", "apiVersion": "v1"})).await;
        assert_eq!(names(&list), want, "{selector}");
    }
    let one = s.check(&format!("GET {CM}?fieldSelector=metadata.name%3Db"), Value::Null, 200, json!({})).await;
    assert_eq!(names(&one), ["b"]);
    s.check(&format!("GET {CM}?labelSelector=n%3D%3D%3Da"), Value::Null, 400, json!({})).await;
    s.check(&format!("GET {CM}?fieldSelector=data%3Db"), Value::Null, 400, json!({})).await;
    // Events under both of their groups.
    let event = json!({"metadata": {"name": "e"}, "involvedObject": {"kind": "Pod", "name": "p", "namespace": "default"}, "reason": "Tested", "message": "m", "type": "Normal"});
    s.check("POST /api/v1/namespaces/default/events", event, 201, json!({})).await;
    s.check("GET /apis/events.k8s.io/v1/namespaces/default/events/e", Value::Null, 200, json!({"apiVersion": "events.k8s.io/v1", "regarding": {"name": "p"}, "note": "m"})).await;
    s.check("GET /apis/events.k8s.io/v1/events", Value::Null, 200, json!({"kind": "EventList", "apiVersion": "events.k8s.io/v1", "items": [{"note": "m"}]})).await;
    for (selector, count) in [("involvedObject.name%3Dp", 1), ("involvedObject.name%3Dq", 0), ("reason%3DTested,type%3DNormal", 1)] {
        let list = s.check(&format!("GET /api/v1/events?fieldSelector={selector}"), Value::Null, 200, json!({})).await;
        assert_eq!(names(&list).len(), count, "{selector}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watches() {
    let s = Server::start().await;
    make(&s, &["a"]).await;
    let list = s.check(&format!("GET {CM}"), Value::Null, 200, json!({})).await;
    let revision = list["metadata"]["resourceVersion"].as_str().expect("a version").to_owned();
    let mut from = s.watch(&format!("{CM}?watch=1&resourceVersion={revision}")).await;
    let mut fresh = s.watch(&format!("{CM}?watch=1")).await;
    let mut named = s.watch(&format!("{CM}?watch=1&fieldSelector=metadata.name%3Db&resourceVersion={revision}")).await;
    let mut labelled = s.watch(&format!("{CM}?watch=1&labelSelector=mark&resourceVersion={revision}")).await;
    let mut whole = s.watch("/api/v1/configmaps?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true").await;
    assert_eq!(fresh.short().await, "ADDED a");
    make(&s, &["b"]).await;
    s.check(&format!("PATCH {CM}/a?type=merge"), json!({"metadata": {"labels": {"mark": "1"}}}), 200, json!({})).await;
    s.check(&format!("PATCH {CM}/a?type=merge"), json!({"data": {"x": "y"}}), 200, json!({})).await;
    s.check(&format!("PATCH {CM}/a?type=merge"), json!({"metadata": {"labels": {"mark": null}}}), 200, json!({})).await;
    s.check(&format!("DELETE {CM}/b"), Value::Null, 200, json!({})).await;
    for want in ["ADDED b", "MODIFIED a", "MODIFIED a", "MODIFIED a", "DELETED b"] {
        assert_eq!(from.short().await, want);
        assert_eq!(fresh.short().await, want);
    }
    for want in ["ADDED b", "DELETED b"] {
        assert_eq!(named.short().await, want);
    }
    // Entering and leaving a selection; what left is shown as it was, at the new version.
    let entered = labelled.next().await.expect("an event");
    contains(&entered, &json!({"type": "ADDED", "object": {"metadata": {"labels": {"mark": "1"}}}}), "").expect("entered");
    assert_eq!(labelled.short().await, "MODIFIED a");
    let left = labelled.next().await.expect("an event");
    contains(&left, &json!({"type": "DELETED", "object": {"metadata": {"labels": {"mark": "1"}}, "data": {"x": "y"}}}), "").expect("left");
    assert_ne!(left["object"]["metadata"]["resourceVersion"], entered["object"]["metadata"]["resourceVersion"]);
    // Initial objects end with a bookmark that says so.
    loop {
        let event = whole.next().await.expect("an event");
        if event["type"] == "BOOKMARK" {
            contains(&event["object"], &json!({"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"annotations": {"k8s.io/initial-events-end": "true"}}}), "").expect("a bookmark");
            break;
        }
        assert_eq!(event["type"], "ADDED");
    }
    assert_eq!(whole.short().await, "ADDED b");
    // A time limit ends a watch, an ancient version does at once.
    let mut short = s.watch(&format!("{CM}?watch=1&timeoutSeconds=1&resourceVersion={revision}")).await;
    while short.next().await.is_some() {}
    let mut old = s.watch(&format!("{CM}?watch=1&resourceVersion=1")).await;
    contains(&old.next().await.expect("an event"), &json!({"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}), "").expect("too old");
    assert!(old.next().await.is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tables_and_metadata() {
    let s = Server::start().await;
    make(&s, &["a", "b"]).await;
    let table = [("accept", "application/json;as=Table;v=v1;g=meta.k8s.io,application/json")];
    let got = s.call("GET", CM, &table, "").await.json();
    contains(&got, &json!({"kind": "Table", "apiVersion": "meta.k8s.io/v1", "rows": [
        {"cells": ["a", 0, "0s"], "object": {"kind": "PartialObjectMetadata", "metadata": {"name": "a"}}}, {"object": {"metadata": {"name": "b"}}},
    ]}), "").unwrap_or_else(|e| panic!("{e}\n{got:#}"));
    assert_eq!(got["columnDefinitions"][0]["name"], "Name");
    let got = s.call("GET", &format!("{CM}/a?includeObject=Object"), &table, "").await.json();
    contains(&got, &json!({"rows": [{"object": {"kind": "ConfigMap"}}]}), "").unwrap_or_else(|e| panic!("{e}\n{got:#}"));
    let partial = [("accept", "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io")];
    let got = s.call("GET", CM, &partial, "").await.json();
    contains(&got, &json!({"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "items": [{"kind": "PartialObjectMetadata", "metadata": {"name": "a"}}, {}]}), "").unwrap_or_else(|e| panic!("{e}\n{got:#}"));
    assert!(got["items"][0].get("data").is_none());
    let proto = [("accept", "application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io")];
    let got = s.call("GET", CM, &proto, "").await;
    assert!(got.body.starts_with(b"k8s\0"), "{:?}", got.body);
    assert_eq!(s.call("GET", &format!("{CM}/a"), &partial, "").await.status, 406);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_lists_are_whole_and_compressed() {
    use std::io::Read;
    let s = Server::start().await;
    let data = "x".repeat(9_000);
    for i in 0..40 {
        s.check(&format!("POST {CM}"), json!({"metadata": {"name": format!("big-{i:03}")}, "data": {"k": data}}), 201, json!({})).await;
    }
    let plain = s.call("GET", CM, &[], "").await;
    assert_eq!(names(&plain.json()).len(), 40);
    assert_eq!(plain.header("content-length"), plain.body.len().to_string());
    let small = s.call("GET", CM, &[("accept-encoding", "gzip")], "").await;
    assert_eq!(small.header("content-encoding"), "gzip");
    let mut text = Vec::new();
    flate2::read::GzDecoder::new(&small.body[..]).read_to_end(&mut text).expect("gzip");
    assert_eq!(text, plain.body);
}
