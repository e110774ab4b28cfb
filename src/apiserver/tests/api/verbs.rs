//! Create, read, update, patch and delete, over the in-process service.


use crate::common::Server;
use serde_json::{Value, json};

const CM: &str = "/api/v1/namespaces/default/configmaps";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn object_life() {
    let s = Server::start().await;
    let a = s.check(&format!("POST {CM}"), json!({"metadata": {"name": "a", "labels": {"x": "1"}}, "data": {"k": "v"}}), 201, json!({
        "kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "a", "namespace": "default", "labels": {"x": "1"}}, "data": {"k": "v"},
    })).await;
    let (uid, rv) = (a["metadata"]["uid"].as_str().expect("a uid"), a["metadata"]["resourceVersion"].as_str().expect("a version"));
    assert_eq!(uid.len(), 36);
    s.check(&format!("POST {CM}"), json!({"metadata": {"name": "a"}}), 409, json!({"reason": "AlreadyExists", "message": "configmaps \"a\" already exists", "details": {"name": "a", "kind": "configmaps"}})).await;
    s.check(&format!("GET {CM}/a"), Value::Null, 200, a.clone()).await;
    s.check(&format!("GET {CM}/b"), Value::Null, 404, json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "message": "configmaps \"b\" not found", "code": 404})).await;

    // Updates: stale and fresh versions, wrong uid, names and namespaces.
    let mut b = a.clone();
    b["data"]["k"] = "w".into();
    let b = s.check(&format!("PUT {CM}/a"), b, 200, json!({"data": {"k": "w"}, "metadata": {"uid": uid}})).await;
    assert_ne!(b["metadata"]["resourceVersion"], rv);
    s.check(&format!("PUT {CM}/a"), a.clone(), 409, json!({"reason": "Conflict", "message": "~the object has been modified; please apply your changes to the latest version and try again"})).await;
    s.check(&format!("PUT {CM}/a"), json!({"metadata": {"name": "a", "uid": "other"}}), 409, json!({"message": "~Precondition failed: UID in precondition: other"})).await;
    s.check(&format!("PUT {CM}/a"), json!({"metadata": {"name": "z"}}), 400, json!({"message": "the name of the object (z) does not match the name on the URL (a)"})).await;
    s.check(&format!("PUT {CM}/a"), json!({"metadata": {"name": "a", "namespace": "other"}}), 400, json!({"message": "~namespace of the provided object does not match"})).await;
    s.check(&format!("PUT {CM}/nope"), json!({"metadata": {"name": "nope"}}), 404, json!({})).await;
    // An update that changes nothing writes nothing.
    let same = s.check(&format!("PUT {CM}/a"), b.clone(), 200, json!({})).await;
    assert_eq!(same["metadata"]["resourceVersion"], b["metadata"]["resourceVersion"]);

    // Patches of all types.
    s.check(&format!("PATCH {CM}/a?type=merge"), json!({"data": {"k": null, "n": "1"}}), 200, json!({"data": {"n": "1"}})).await;
    s.check(&format!("PATCH {CM}/a?type=json"), json!([{"op": "test", "path": "/data/n", "value": "1"}, {"op": "add", "path": "/data/m", "value": "2"}]), 200, json!({"data": {"n": "1", "m": "2"}})).await;
    s.check(&format!("PATCH {CM}/a?type=json"), json!([{"op": "test", "path": "/data/n", "value": "9"}]), 422, json!({})).await;
    s.check(&format!("PATCH {CM}/a?type=strategic"), json!({"metadata": {"labels": {"y": "2"}}}), 200, json!({"metadata": {"labels": {"x": "1", "y": "2"}}})).await;
    s.check(&format!("PATCH {CM}/a?fieldManager=me&type=apply"), json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"n": "3"}}), 409, json!({"reason": "Conflict", "message": "~conflict"})).await;
    s.check(&format!("PATCH {CM}/a?fieldManager=me&force=true&type=apply"), json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"n": "3"}}), 200, json!({"data": {"n": "3", "m": "2"}})).await;
    s.check(&format!("PATCH {CM}/new?fieldManager=me&type=apply"), json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "new"}}), 201, json!({})).await;
    s.check(&format!("PATCH {CM}/new?type=apply"), json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "new"}}), 422, json!({"message": "~is required for apply patch"})).await;
    s.check(&format!("PATCH {CM}/a?resourceVersion=1&type=merge"), json!({"metadata": {"resourceVersion": "1"}}), 409, json!({})).await;

    // Deletion with preconditions.
    s.check(&format!("DELETE {CM}/a"), json!({"preconditions": {"uid": "other"}}), 409, json!({"message": "~Precondition failed: UID in precondition: other"})).await;
    s.check(&format!("DELETE {CM}/a?dryRun=All"), Value::Null, 200, json!({})).await;
    s.check(&format!("DELETE {CM}/a"), json!({"preconditions": {"uid": uid}}), 200, json!({"kind": "Status", "status": "Success", "details": {"name": "a", "kind": "configmaps", "uid": uid}})).await;
    s.check(&format!("DELETE {CM}/a"), Value::Null, 404, json!({})).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn options() {
    let s = Server::start().await;
    let name = s.check(&format!("POST {CM}"), json!({"metadata": {"generateName": "gen-"}}), 201, json!({})).await;
    let name = name["metadata"]["name"].as_str().expect("a name").to_owned();
    assert!(name.starts_with("gen-") && name.len() == 9, "{name}");
    s.check(&format!("POST {CM}?dryRun=All"), json!({"metadata": {"name": "dry"}}), 201, json!({"metadata": {"name": "dry"}})).await;
    s.check(&format!("GET {CM}/dry"), Value::Null, 404, json!({})).await;
    s.check(&format!("POST {CM}?dryRun=Some"), json!({"metadata": {"name": "dry"}}), 422, json!({"message": "~Unsupported value"})).await;
    s.check(&format!("POST {CM}"), json!({"metadata": {"name": "x", "resourceVersion": "5"}}), 400, json!({"message": "~resourceVersion should not be set"})).await;
    s.check(&format!("POST {CM}"), json!({"metadata": {}}), 422, json!({"message": "~name or generateName is required"})).await;
    s.check(&format!("POST {CM}"), json!({"metadata": {"name": "Bad_Name"}}), 422, json!({"reason": "Invalid", "details": {"kind": "ConfigMap", "causes": [{"field": "metadata.name"}]}})).await;
    s.check(&format!("POST {CM}"), json!({"kind": "Secret", "metadata": {"name": "x"}}), 400, json!({"message": "~Secret in version \"v1\" cannot be handled as a ConfigMap"})).await;
    s.check(&format!("POST {CM}"), json!({"apiVersion": "v2", "metadata": {"name": "x"}}), 400, json!({"message": "the API version in the data (v2) does not match the expected API version (v1)"})).await;

    // Unknown and duplicate fields.
    let odd = r#"{"metadata":{"name":"odd"},"data":{"a":"1"},"data":{"a":"2"},"unknown":1}"#;
    let answer = s.call("POST", &format!("{CM}?fieldValidation=Strict"), &[], odd).await;
    assert_eq!(answer.status, 400);
    assert!(answer.json()["message"].as_str().is_some_and(|m| m.contains("unknown field \"unknown\"") && m.contains("duplicate field \"data\"")));
    let answer = s.call("POST", &format!("{CM}?fieldValidation=Ignore&dryRun=All"), &[], odd).await;
    assert_eq!((answer.status.as_u16(), answer.warnings().len()), (201, 0));
    let answer = s.call("POST", CM, &[], odd).await;
    assert_eq!((answer.status.as_u16(), answer.warnings().len()), (201, 2), "{:?}", answer.warnings());
    assert_eq!(answer.json()["data"]["a"], "2");

    // Other encodings.
    let answer = s.call("POST", CM, &[("content-type", "application/yaml"), ("accept", "application/yaml")], "metadata:\n  name: yaml\ndata:\n  a: b\n").await;
    assert_eq!((answer.status.as_u16(), answer.header("content-type")), (201, "application/yaml"));
    assert!(String::from_utf8_lossy(&answer.body).contains("name: yaml"));
    for (kind, status) in [("text/plain", 415), ("application/vnd.kubernetes.protobuf", 400)] {
        assert_eq!(s.call("POST", CM, &[("content-type", kind)], "{}").await.status, status, "{kind}");
    }
    assert_eq!(s.call("GET", CM, &[("accept", "text/html")], "").await.status, 406);
    let answer = s.call("POST", CM, &[("content-encoding", "gzip")], "not gzip").await;
    assert_eq!(answer.status, 400);
    let answer = s.call("POST", CM, &[], vec![b' '; (3 << 20) + 1]).await;
    assert_eq!(answer.status, 413);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn protobuf_round_trip() {
    let s = Server::start().await;
    let proto = "application/vnd.kubernetes.protobuf";
    s.check(&format!("POST {CM}"), json!({"metadata": {"name": "p"}, "data": {"k": "v"}}), 201, json!({})).await;
    let got = s.call("GET", &format!("{CM}/p"), &[("accept", proto)], "").await;
    assert_eq!((got.status.as_u16(), got.header("content-type")), (200, proto));
    assert!(got.body.starts_with(b"k8s\0"));
    s.check(&format!("DELETE {CM}/p"), Value::Null, 200, json!({})).await;
    // What was read can be written again, but for its version.
    let text = got.body.to_vec();
    let put = s.call("POST", CM, &[("content-type", proto), ("accept", "application/json")], text).await;
    assert_eq!(put.status, 400, "it names a resourceVersion");
    let list = s.call("GET", &CM.replace("configmaps", "serviceaccounts"), &[("accept", proto)], "").await;
    assert!(list.status == 200 && list.body.starts_with(b"k8s\0"));
    let schemas = windlass_api::schema::Schemas::builtin();
    let decoded = windlass_api::protobuf::decode(&schemas, &list.body, None).expect("a list");
    assert_eq!((&decoded["kind"], &decoded["apiVersion"]), (&json!("ServiceAccountList"), &json!("v1")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finalizers_and_grace() {
    let s = Server::start().await;
    s.check(&format!("POST {CM}"), json!({"metadata": {"name": "f", "finalizers": ["example.com/hold"]}}), 201, json!({})).await;
    let marked = s.check(&format!("DELETE {CM}/f"), Value::Null, 200, json!({"kind": "ConfigMap", "metadata": {"deletionGracePeriodSeconds": 0}})).await;
    assert!(marked["metadata"]["deletionTimestamp"].is_string());
    s.check(&format!("PATCH {CM}/f?type=merge"), json!({"data": {"a": "b"}}), 200, json!({"data": {"a": "b"}})).await;
    s.check(&format!("PATCH {CM}/f?type=merge"), json!({"metadata": {"finalizers": ["example.com/hold", "example.com/more"]}}), 422, json!({"message": "~no new finalizers can be added if the object is being deleted"})).await;
    s.check(&format!("PATCH {CM}/f?type=merge"), json!({"metadata": {"finalizers": null}}), 200, json!({})).await;
    s.check(&format!("GET {CM}/f"), Value::Null, 404, json!({})).await;
    // Propagation adds the garbage collector's finalizers.
    s.check(&format!("POST {CM}"), json!({"metadata": {"name": "o"}}), 201, json!({})).await;
    s.check(&format!("DELETE {CM}/o"), json!({"propagationPolicy": "Foreground"}), 200, json!({"metadata": {"finalizers": ["foregroundDeletion"]}})).await;
    s.check(&format!("POST {CM}"), json!({"metadata": {"name": "q"}}), 201, json!({})).await;
    s.check(&format!("DELETE {CM}/q?propagationPolicy=Orphan"), Value::Null, 200, json!({"metadata": {"finalizers": ["orphan"]}})).await;
    s.check(&format!("DELETE {CM}/q"), json!({"propagationPolicy": "Odd"}), 422, json!({"message": "~Unsupported value"})).await;
    s.check(&format!("DELETE {CM}/q"), json!({"propagationPolicy": "Orphan", "orphanDependents": true}), 422, json!({})).await;
    // Collections.
    for name in ["c1", "c2", "c3"] {
        s.check(&format!("POST {CM}"), json!({"metadata": {"name": name, "labels": {"group": "c"}}}), 201, json!({})).await;
    }
    s.check(&format!("DELETE {CM}?labelSelector=group%3Dc"), Value::Null, 200, json!({"kind": "ConfigMapList"})).await;
    s.check(&format!("GET {CM}?labelSelector=group%3Dc"), Value::Null, 200, json!({"items": []})).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods() {
    let s = Server::start().await;
    let pods = "/api/v1/namespaces/default/pods";
    s.check("POST /api/v1/namespaces/default/serviceaccounts", json!({"metadata": {"name": "default"}}), 201, json!({})).await;
    let pod = |name: &str| json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    s.check(&format!("POST {pods}"), pod("p"), 201, json!({"spec": {"restartPolicy": "Always", "serviceAccountName": "default"}, "status": {"phase": "Pending"}})).await;
    let log = s.call("GET", &format!("{pods}/p/log"), &[], "").await;
    assert_eq!((log.status.as_u16(), log.body.len()), (200, 0), "no node, no log");
    for (path, want) in [
        ("log?tailLines=-1", 422),
        ("log?sinceSeconds=0", 422),
        ("log?container=nope", 400),
        ("exec?command=x", 400),
        ("exec?command=x&stdout=1", 400),
        ("exec?stdout=1", 400),
        ("attach?stdout=1", 400),
        ("portforward?ports=0", 400),
        ("proxy/", 400),
    ] {
        let answer = s.call("GET", &format!("{pods}/p/{path}"), &[], "").await;
        assert_eq!(answer.status, want, "{path}: {}", answer.json());
    }
    s.check("GET /api/v1/nodes/none/proxy/", Value::Null, 404, json!({})).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn binding_and_eviction() {
    let s = Server::start().await;
    let pods = "/api/v1/namespaces/default/pods";
    s.check("POST /api/v1/namespaces/default/serviceaccounts", json!({"metadata": {"name": "default"}}), 201, json!({})).await;
    for name in ["p", "q"] {
        let pod = json!({"metadata": {"name": name, "labels": {"app": "x"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
        s.check(&format!("POST {pods}"), pod, 201, json!({})).await;
    }
    let bind = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n1"}});
    s.check(&format!("POST {pods}/p/binding"), bind.clone(), 201, json!({"status": "Success"})).await;
    s.check(&format!("POST {pods}/p/binding"), bind, 409, json!({"message": "~pod p is already assigned to node \"n1\""})).await;
    s.check("POST /api/v1/namespaces/default/bindings", json!({"metadata": {"name": "q"}, "target": {"name": "n2"}}), 201, json!({})).await;
    s.check(&format!("GET {pods}?fieldSelector=spec.nodeName%3Dn1"), Value::Null, 200, json!({"items": [{"metadata": {"name": "p"}, "status": {"conditions": [{"type": "PodScheduled", "status": "True"}]}}]})).await;
    s.check(&format!("GET {pods}?fieldSelector=spec.bogus%3Dn1"), Value::Null, 400, json!({"message": "field label not supported: spec.bogus"})).await;

    // A running pod has its grace; a second delete may only shorten it.
    s.check(&format!("PATCH {pods}/p/status?type=merge"), json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}), 200, json!({"status": {"phase": "Running"}})).await;
    let pdb = "/apis/policy/v1/namespaces/default/poddisruptionbudgets";
    s.check(&format!("POST {pdb}"), json!({"metadata": {"name": "b"}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "x"}}}}), 201, json!({})).await;
    let evict = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p"}});
    s.check(&format!("POST {pods}/p/eviction"), evict.clone(), 429, json!({"reason": "TooManyRequests", "message": "Cannot evict pod as it would violate the pod's disruption budget.", "details": {"causes": [{"reason": "DisruptionBudget", "message": "The disruption budget b is still being processed by the server."}], "retryAfterSeconds": 10}})).await;
    s.check(&format!("PATCH {pdb}/b/status?type=merge"), json!({"status": {"observedGeneration": 1, "disruptionsAllowed": 0, "desiredHealthy": 1, "currentHealthy": 1, "expectedPods": 1}}), 200, json!({})).await;
    s.check(&format!("POST {pods}/p/eviction"), evict.clone(), 429, json!({"details": {"causes": [{"message": "The disruption budget b needs 1 healthy pods and has 1 currently"}]}})).await;
    s.check(&format!("PATCH {pdb}/b/status?type=merge"), json!({"status": {"disruptionsAllowed": 1}}), 200, json!({})).await;
    s.check(&format!("POST {pods}/p/eviction"), evict, 201, json!({"status": "Success"})).await;
    s.check(&format!("GET {pods}/p"), Value::Null, 200, json!({"metadata": {"deletionGracePeriodSeconds": 30}})).await;
    s.check(&format!("GET {pdb}/b"), Value::Null, 200, json!({"status": {"disruptionsAllowed": 0}})).await;
    s.check(&format!("DELETE {pods}/p"), json!({"gracePeriodSeconds": 60}), 200, json!({"metadata": {"deletionGracePeriodSeconds": 30}})).await;
    s.check(&format!("DELETE {pods}/p"), json!({"gracePeriodSeconds": 5}), 200, json!({"metadata": {"deletionGracePeriodSeconds": 5}})).await;
    s.check(&format!("DELETE {pods}/p"), json!({"gracePeriodSeconds": 0}), 200, json!({"metadata": {"name": "p"}})).await;
    s.check(&format!("GET {pods}/p"), Value::Null, 404, json!({})).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subresources() {
    let s = Server::start().await;
    let deployments = "/apis/apps/v1/namespaces/default/deployments";
    let d = json!({"metadata": {"name": "d"}, "spec": {"replicas": 2, "selector": {"matchLabels": {"a": "b"}}, "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}}});
    s.check(&format!("POST {deployments}"), d, 201, json!({"metadata": {"generation": 1}, "spec": {"progressDeadlineSeconds": 600}})).await;
    s.check(&format!("GET {deployments}/d/scale"), Value::Null, 200, json!({"kind": "Scale", "apiVersion": "autoscaling/v1", "spec": {"replicas": 2}, "status": {"selector": "a=b"}})).await;
    s.check(&format!("PATCH {deployments}/d/scale?type=merge"), json!({"spec": {"replicas": 5}}), 200, json!({"kind": "Scale", "spec": {"replicas": 5}})).await;
    s.check(&format!("PUT {deployments}/d/scale"), json!({"metadata": {"name": "d", "namespace": "default"}, "spec": {"replicas": -1}}), 422, json!({})).await;
    s.check(&format!("PATCH {deployments}/d/status?type=merge"), json!({"status": {"replicas": 3}, "spec": {"replicas": 9}}), 200, json!({"status": {"replicas": 3}, "spec": {"replicas": 5}, "metadata": {"generation": 2}})).await;
    s.check(&format!("PATCH {deployments}/d?type=merge"), json!({"status": {"replicas": 9}}), 200, json!({"status": {"replicas": 3}})).await;
    s.check(&format!("GET {deployments}/d/nonsense"), Value::Null, 404, json!({})).await;
    s.check(&format!("POST {deployments}/d/status"), json!({}), 405, json!({"reason": "MethodNotAllowed"})).await;
    s.check("POST /apis/apps/v1/deployments", json!({}), 405, json!({})).await;
    s.check("GET /apis/apps/v1/deployments/d", Value::Null, 404, json!({})).await;
    s.check("GET /apis/apps/v1/nonsense", Value::Null, 404, json!({"message": "the server could not find the requested resource"})).await;

    // Namespaces end when their finalizer is taken away.
    s.check("POST /api/v1/namespaces", json!({"metadata": {"name": "gone"}}), 201, json!({"spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}})).await;
    s.check("DELETE /api/v1/namespaces/gone", Value::Null, 200, json!({"kind": "Namespace", "status": {"phase": "Terminating"}})).await;
    s.check("POST /api/v1/namespaces/gone/configmaps", json!({"metadata": {"name": "x"}}), 403, json!({"message": "~because it is being terminated"})).await;
    s.check("PUT /api/v1/namespaces/gone/finalize", json!({"metadata": {"name": "gone"}, "spec": {"finalizers": []}}), 200, json!({})).await;
    s.check("GET /api/v1/namespaces/gone", Value::Null, 404, json!({})).await;
    s.check("DELETE /api/v1/namespaces/default", Value::Null, 403, json!({})).await;

    // Reviews and tokens.
    s.check("POST /apis/authentication.k8s.io/v1/selfsubjectreviews", json!({}), 201, json!({"status": {"userInfo": {"username": "admin"}}})).await;
    s.check("POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews", json!({"spec": {"resourceAttributes": {"verb": "get", "resource": "pods"}}}), 201, json!({"status": {"allowed": true}})).await;
    s.check("POST /api/v1/namespaces/default/serviceaccounts", json!({"metadata": {"name": "sa"}}), 201, json!({})).await;
    let token = s.check("POST /api/v1/namespaces/default/serviceaccounts/sa/token", json!({"spec": {}}), 201, json!({"kind": "TokenRequest"})).await;
    let token = token["status"]["token"].as_str().expect("a token").to_owned();
    s.check("POST /apis/authentication.k8s.io/v1/tokenreviews", json!({"spec": {"token": token}}), 201, json!({"status": {"authenticated": true, "user": {"username": "system:serviceaccount:default:sa"}}})).await;

    // Services get an address and give it back.
    let services = "/api/v1/namespaces/default/services";
    let service = s.check(&format!("POST {services}"), json!({"metadata": {"name": "web"}, "spec": {"ports": [{"port": 80}]}}), 201, json!({"spec": {"type": "ClusterIP"}})).await;
    let ip = service["spec"]["clusterIP"].as_str().expect("an address").to_owned();
    assert!(ip.starts_with("10.96."), "{ip}");
    s.check(&format!("POST {services}"), json!({"metadata": {"name": "two"}, "spec": {"clusterIP": ip, "ports": [{"port": 80}]}}), 422, json!({"message": "~provided IP is already allocated"})).await;
    s.check(&format!("DELETE {services}/web"), Value::Null, 200, json!({})).await;
    s.check(&format!("POST {services}"), json!({"metadata": {"name": "two"}, "spec": {"clusterIP": ip, "ports": [{"port": 80}]}}), 201, json!({"spec": {"clusterIP": ip}})).await;
}
