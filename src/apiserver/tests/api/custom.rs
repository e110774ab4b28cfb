//! Custom resources, discovery and documents.


use crate::common::{Server, contains};
use serde_json::{Value, json};

const CRDS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";

fn definition(plural: &str, kind: &str) -> Value {
    json!({
        "metadata": {"name": format!("{plural}.example.com")},
        "spec": {
            "group": "example.com", "scope": "Namespaced", "names": {"plural": plural, "kind": kind, "shortNames": ["wd"]},
            "versions": [
                {"name": "v1", "served": true, "storage": true, "subresources": {"status": {}, "scale": {"specReplicasPath": ".spec.size", "statusReplicasPath": ".status.size"}},
                 "schema": {"openAPIV3Schema": {"type": "object", "properties": {
                    "spec": {"type": "object", "properties": {"size": {"type": "integer", "default": 1, "minimum": 0}, "color": {"type": "string", "enum": ["red", "blue"]}}},
                    "status": {"type": "object", "properties": {"size": {"type": "integer"}}}}}}},
                {"name": "v1beta1", "served": true, "storage": false,
                 "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}},
            ],
        },
    })
}

async fn established(s: &Server, name: &str) -> Value {
    let mut watch = s.watch(&format!("{CRDS}?watch=1&fieldSelector=metadata.name%3D{name}.example.com")).await;
    loop {
        let event = watch.next().await.expect("an event");
        let conditions = event["object"]["status"]["conditions"].as_array().cloned().unwrap_or_default();
        if conditions.iter().any(|c| c["type"] == "NamesAccepted") {
            return event["object"].clone();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn life_of_a_custom_resource() {
    let s = Server::start().await;
    s.check("GET /apis/example.com/v1/widgets", Value::Null, 404, json!({})).await;
    s.check(&format!("POST {CRDS}"), definition("widgets", "Widget"), 201, json!({})).await;
    let crd = established(&s, "widgets").await;
    contains(&crd, &json!({"status": {"acceptedNames": {"plural": "widgets", "kind": "Widget", "listKind": "WidgetList", "singular": "widget"}, "storedVersions": ["v1"],
        "conditions": [{"type": "NamesAccepted", "status": "True"}, {"type": "Established", "status": "True"}]}}), "").unwrap_or_else(|e| panic!("{e}\n{crd:#}"));
    let widgets = "/apis/example.com/v1/namespaces/default/widgets";
    s.check("GET /apis/example.com/v1", Value::Null, 200, json!({"kind": "APIResourceList"})).await;
    s.check(&format!("POST {widgets}"), json!({"apiVersion": "example.com/v1", "kind": "Widget", "metadata": {"name": "w"}, "spec": {"color": "red", "junk": 1}}), 201,
        json!({"apiVersion": "example.com/v1", "metadata": {"generation": 1}, "spec": {"color": "red", "size": 1}})).await;
    s.check(&format!("POST {widgets}"), json!({"metadata": {"name": "x"}, "spec": {"color": "green"}}), 422, json!({"details": {"causes": [{"field": "spec.color"}]}})).await;
    s.check(&format!("POST {widgets}"), json!({"metadata": {"name": "x"}, "spec": {"size": "big"}}), 422, json!({})).await;
    s.check(&format!("PATCH {widgets}/w/scale?type=merge"), json!({"spec": {"replicas": 7}}), 200, json!({"kind": "Scale", "spec": {"replicas": 7}})).await;
    s.check(&format!("PATCH {widgets}/w/status?type=merge"), json!({"status": {"size": 3}, "spec": {"size": 99}}), 200, json!({"status": {"size": 3}, "spec": {"size": 7}})).await;
    s.check(&format!("PATCH {widgets}/w?fieldManager=m&type=apply"), json!({"apiVersion": "example.com/v1", "kind": "Widget", "metadata": {"name": "w"}, "spec": {"color": "blue"}}), 409, json!({})).await;
    s.check(&format!("PATCH {widgets}/w?type=strategic"), json!({}), 415, json!({})).await;
    s.check("GET /apis/example.com/v1beta1/namespaces/default/widgets/w", Value::Null, 200, json!({"apiVersion": "example.com/v1beta1", "spec": {"size": 7}})).await;
    s.check("GET /apis/example.com/v1beta1/widgets", Value::Null, 200, json!({"apiVersion": "example.com/v1beta1", "kind": "WidgetList", "items": [{"apiVersion": "example.com/v1beta1"}]})).await;
    let proto = s.call("GET", &format!("{widgets}/w"), &[("accept", "application/vnd.kubernetes.protobuf")], "").await;
    assert_eq!(proto.status, 406);

    // A second definition that wants taken names does not get them.
    let mut rival = definition("gadgets", "Widget");
    rival["spec"]["names"]["shortNames"] = json!([]);
    s.check(&format!("POST {CRDS}"), rival, 201, json!({})).await;
    let rival = established(&s, "gadgets").await;
    contains(&rival["status"], &json!({"conditions": [{"type": "NamesAccepted", "status": "False", "reason": "ListKindConflict"}, {"type": "Established", "status": "False"}]}), "").unwrap_or_else(|e| panic!("{e}\n{rival:#}"));

    // Deletion takes the objects along, and waits for those that are held.
    s.check(&format!("PATCH {widgets}/w?type=merge"), json!({"metadata": {"finalizers": ["example.com/hold"]}}), 200, json!({})).await;
    let mut crds = s.watch(&format!("{CRDS}?watch=1&resourceVersion=0&fieldSelector=metadata.name%3Dwidgets.example.com")).await;
    s.check(&format!("DELETE {CRDS}/widgets.example.com"), Value::Null, 200, json!({"metadata": {"finalizers": ["customresourcecleanup.apiextensions.k8s.io"]}})).await;
    let mut objects = s.watch(&format!("{widgets}?watch=1&resourceVersion=0")).await;
    while objects.next().await.expect("an event")["object"]["metadata"]["deletionTimestamp"].is_null() {}
    s.check(&format!("POST {widgets}"), json!({"metadata": {"name": "late"}}), 405, json!({"message": "~terminating"})).await;
    s.check(&format!("PATCH {widgets}/w?type=merge"), json!({"metadata": {"finalizers": null}}), 200, json!({})).await;
    while crds.next().await.expect("an event")["type"] != "DELETED" {}
    assert_eq!(objects.short().await, "DELETED w");
    while objects.next().await.is_some() {}
    s.check(&format!("GET {widgets}"), Value::Null, 404, json!({})).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn definitions_survive_a_restart() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().to_owned();
    let first = Server::with(|c| c.data_dir = path.clone()).await;
    first.check(&format!("POST {CRDS}"), definition("widgets", "Widget"), 201, json!({})).await;
    established(&first, "widgets").await;
    let widgets = "/apis/example.com/v1/namespaces/default/widgets";
    let w = first.check(&format!("POST {widgets}"), json!({"metadata": {"name": "w"}}), 201, json!({})).await;
    first.shutdown.cancel();
    drop(first);
    let second = restarted(path).await;
    second.check(&format!("GET {widgets}/w"), Value::Null, 200, w).await;
}

/// The first server's tasks hold the store until they have seen the shutdown.
async fn restarted(path: std::path::PathBuf) -> Server {
    for _ in 0..200 {
        let config = windlass_apiserver::Config { data_dir: path.clone(), secure_port: 0, bind_address: [127, 0, 0, 1].into(), ..Default::default() };
        let shutdown = tokio_util::sync::CancellationToken::new();
        match windlass_apiserver::ApiServer::start(config, shutdown.clone()).await {
            Ok(api) => return Server::of(api, shutdown),
            Err(windlass_apiserver::Error::Store(windlass_store::Error::Locked { .. })) => tokio::task::yield_now().await,
            Err(error) => panic!("{error}"),
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    panic!("the store stays locked");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documents() {
    let s = Server::start().await;
    let api = s.call("GET", "/api", &[], "").await;
    assert_eq!(api.json()["versions"], json!(["v1"]));
    let aggregated = s.call("GET", "/apis", &[("accept", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json")], "").await;
    assert_eq!(aggregated.json()["kind"], "APIGroupDiscoveryList");
    assert_eq!(aggregated.header("content-type"), "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList");
    let etag = aggregated.header("etag").to_owned();
    assert!(etag.len() > 10);
    let again = s.call("GET", "/apis", &[("accept", "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"), ("if-none-match", &etag)], "").await;
    assert_eq!((again.status.as_u16(), again.body.len()), (304, 0));
    for (path, want) in [
        ("/apis", json!({"kind": "APIGroupList"})),
        ("/apis/apps", json!({"kind": "APIGroup", "name": "apps"})),
        ("/apis/apps/v1", json!({"kind": "APIResourceList", "groupVersion": "apps/v1"})),
        ("/openapi/v3", json!({})),
        ("/openapi/v3/apis/apps/v1", json!({"openapi": "3.0.0"})),
        ("/openapi/v2", json!({"swagger": "2.0"})),
        ("/version", json!({"major": "1", "minor": "37"})),
        ("/.well-known/openid-configuration", json!({"response_types_supported": ["id_token"]})),
        ("/openid/v1/jwks", json!({})),
        ("/", json!({})),
    ] {
        let answer = s.call("GET", path, &[], "").await;
        assert_eq!(answer.status, 200, "{path}");
        contains(&answer.json(), &want, path).unwrap_or_else(|e| panic!("{e}"));
    }
    let proto = s.call("GET", "/openapi/v2", &[("accept", "application/com.github.proto-openapi.spec.v2@v1.0+protobuf")], "").await;
    assert_eq!((proto.status.as_u16(), proto.header("content-type")), (200, "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"));
    s.check("GET /api/v1/componentstatuses", Value::Null, 200, json!({"kind": "ComponentStatusList", "items": [{"metadata": {"name": "etcd-0"}, "conditions": [{"type": "Healthy", "status": "True"}]}]})).await;
    s.check("GET /api/v1/componentstatuses/etcd-0", Value::Null, 200, json!({"kind": "ComponentStatus"})).await;
    s.check("GET /apis/metrics.k8s.io/v1beta1/nodes", Value::Null, 200, json!({"kind": "NodeMetricsList", "items": []})).await;
    assert_eq!(s.call("GET", "/nonsense", &[], "").await.status, 404);
    assert_eq!(s.call("GET", "/apis/nonsense", &[], "").await.status, 404);
    assert_eq!(&s.call("GET", "/healthz", &[], "").await.body[..], b"ok");
    let metrics = s.call("GET", "/metrics", &[], "").await;
    let text = String::from_utf8_lossy(&metrics.body).into_owned();
    for name in ["apiserver_request_total", "apiserver_request_duration_seconds_bucket", "apiserver_storage_objects", "apiserver_current_inflight_requests"] {
        assert!(text.contains(name), "{name}: {} {text}", metrics.status);
    }
    // Nobody without rights sees them.
    let nobody = windlass_apiserver::request::UserInfo::named("nobody", &[]);
    for (path, status) in [("/metrics", 403), ("/api/v1/nodes", 403), ("/apis", 200), ("/healthz", 200)] {
        assert_eq!(s.call_as(nobody.clone(), "GET", path, &[], "").await.status, status, "{path}");
    }
}
