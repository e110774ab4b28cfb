//! Bad requests: each is answered by a 4xx that says why, whatever it is.


use crate::common::Server;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

/// Collections to be bad to, with an object that each of them takes.
fn targets() -> Vec<(&'static str, Value)> {
    let template = json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    vec![
        ("/api/v1/namespaces/default/configmaps", json!({"metadata": {"name": "x"}, "data": {"k": "v"}})),
        ("/api/v1/namespaces/default/pods", json!({"metadata": {"name": "x"}, "spec": {"containers": [{"name": "c", "image": "i", "ports": [{"containerPort": 80}]}]}})),
        ("/api/v1/namespaces/default/services", json!({"metadata": {"name": "x"}, "spec": {"ports": [{"port": 80}]}})),
        ("/apis/apps/v1/namespaces/default/deployments", json!({"metadata": {"name": "x"}, "spec": {"replicas": 1, "selector": {"matchLabels": {"a": "b"}}, "template": template}})),
        ("/apis/batch/v1/namespaces/default/jobs", json!({"metadata": {"name": "x"}, "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}}}})),
        ("/apis/rbac.authorization.k8s.io/v1/clusterroles", json!({"metadata": {"name": "x"}, "rules": [{"verbs": ["get"], "apiGroups": [""], "resources": ["pods"]}]})),
        ("/api/v1/nodes", json!({"metadata": {"name": "x"}, "spec": {"podCIDR": "10.0.0.0/24"}})),
        ("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", json!({"metadata": {"name": "as.x.io"}, "spec": {"group": "x.io", "scope": "Cluster", "names": {"plural": "as", "kind": "A"}, "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object"}}}]}})),
        ("/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers", json!({"metadata": {"name": "x"}, "spec": {"maxReplicas": 3, "scaleTargetRef": {"kind": "Deployment", "name": "d"}}})),
        ("/apis/networking.k8s.io/v1/namespaces/default/ingresses", json!({"metadata": {"name": "x"}, "spec": {"rules": [{"host": "a.b", "http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": {"service": {"name": "s", "port": {"number": 1}}}}]}}]}})),
    ]
}

/// Replaces one value somewhere in a tree by something that does not belong there.
fn spoil(rng: &mut StdRng, value: &mut Value) {
    let odd = |rng: &mut StdRng| match rng.random_range(0..12) {
        0 => json!(1e300),
        1 => json!(-1),
        2 => json!(9_223_372_036_854_775_807_i64),
        3 => json!("x".repeat(300)),
        4 => json!([[[]]]),
        5 => json!({"nested": {"deeper": [1, {"x": null}]}}),
        6 => json!(true),
        7 => json!("\u{0}\u{ffff}é"),
        8 => json!(["a", 1, null]),
        9 => json!("-5"),
        10 => json!({"": ""}),
        _ => json!(1.5),
    };
    let below = match value {
        Value::Object(map) => map.len(),
        Value::Array(list) => list.len(),
        _ => 0,
    };
    if below == 0 || rng.random_bool(0.25) {
        *value = odd(rng);
        return;
    }
    let n = rng.random_range(0..below);
    let child = match value {
        Value::Object(map) => map.iter_mut().nth(n).map(|(_, v)| v),
        Value::Array(list) => list.get_mut(n),
        _ => None,
    };
    if let Some(child) = child {
        spoil(rng, child);
    }
}

fn bytes(rng: &mut StdRng, good: &Value) -> Vec<u8> {
    let mut text = good.to_string().into_bytes();
    match rng.random_range(0..6) {
        0 => text.truncate(rng.random_range(0..text.len())),
        1 => {
            let at = rng.random_range(0..text.len());
            text[at] = rng.random();
        }
        2 => text = vec![b'['; rng.random_range(1..100_000)],
        3 => text.extend_from_slice(b" trailing"),
        4 => text = "{\"a\":".repeat(rng.random_range(1..20_000)).into_bytes(),
        _ => text = (0..rng.random_range(1..2_000)).map(|_| rng.random()).collect(),
    }
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_bad_requests() {
    let s = Server::start().await;
    let mut rng = StdRng::seed_from_u64(7);
    let (mut refused, mut accepted) = (0, 0);
    let targets = targets();
    for round in 0..1_000 {
        let (path, good) = &targets[round % targets.len()];
        let mut headers = vec![("content-type", "application/json")];
        let (method, target, body): (&str, String, Vec<u8>) = match rng.random_range(0..10) {
            0..=4 => {
                let mut bad = good.clone();
                for _ in 0..rng.random_range(1..3) {
                    spoil(&mut rng, &mut bad);
                }
                ("POST", format!("{path}?dryRun=All"), bad.to_string().into_bytes())
            }
            5 => ("POST", format!("{path}?dryRun=All"), bytes(&mut rng, good)),
            6 => {
                headers = vec![("content-type", "application/vnd.kubernetes.protobuf")];
                let mut body = b"k8s\0".to_vec();
                body.extend((0..rng.random_range(0..400)).map(|_| rng.random::<u8>()));
                ("POST", format!("{path}?dryRun=All"), body)
            }
            7 => {
                let kinds = ["application/json-patch+json", "application/merge-patch+json", "application/strategic-merge-patch+json", "application/apply-patch+yaml", "odd"];
                headers = vec![("content-type", kinds[rng.random_range(0..kinds.len())])];
                let mut bad = json!([{"op": "add", "path": "/a/b/c", "value": 1}, {"op": "copy", "from": "/", "path": "/x"}]);
                spoil(&mut rng, &mut bad);
                ("PATCH", format!("{path}/absent?dryRun=All&fieldManager=f"), bad.to_string().into_bytes())
            }
            8 => {
                let selectors = ["a%20in%20(", "a%3D%3D%3Db", "!!a", "%00", "a%20notin%20()", "=,=,", "-%3D-", "a%3Eb"];
                let which = if rng.random_bool(0.5) { "labelSelector" } else { "fieldSelector" };
                ("GET", format!("{path}?{which}={}", selectors[rng.random_range(0..selectors.len())]), Vec::new())
            }
            _ => {
                let queries = ["limit=-x", "resourceVersion=-1", "resourceVersion=x", "continue=AAAA", "resourceVersionMatch=Exact", "watch=1&resourceVersion=x", "sendInitialEvents=1", "timeoutSeconds=z"];
                ("GET", format!("{path}?{}", queries[rng.random_range(0..queries.len())]), Vec::new())
            }
        };
        let answer = s.call(method, &target, &headers, body.clone()).await;
        let code = answer.status.as_u16();
        let shown = || format!("{method} {target} {}: {code} {}", String::from_utf8_lossy(&body[..body.len().min(600)]), String::from_utf8_lossy(&answer.body[..answer.body.len().min(600)]));
        if answer.status.is_success() {
            accepted += 1;
            continue;
        }
        refused += 1;
        assert!((400..500).contains(&code), "{}", shown());
        let status = answer.json();
        assert!(status["message"].as_str().is_some_and(|m| !m.is_empty()), "{}", shown());
        assert_eq!(status["code"], code, "{}", shown());
    }
    assert!(refused > 700, "{refused} refused, {accepted} accepted");
    // The server is as well as before.
    s.check("POST /api/v1/namespaces/default/configmaps", json!({"metadata": {"name": "fine"}}), 201, json!({})).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn odd_paths() {
    let s = Server::start().await;
    for (method, path, want) in [
        ("GET", "/api/v1/namespaces/default/configmaps/a%2Fb", 400),
        ("GET", "/api/v1/namespaces/..%2Fx/configmaps", 400),
        ("GET", "/api/v1/namespaces/default/configmaps/%2e%2e", 400),
        ("GET", "/api/v1/configmaps/a", 404),
        ("GET", "/api/v1/namespaces/default/nodes", 404),
        ("GET", "/api/v1/namespaces/default/configmaps/a/b/c", 404),
        ("GET", "/apis//v1/x", 404),
        ("POST", "/api/v1/configmaps", 405),
        ("PUT", "/api/v1/namespaces/default/configmaps", 405),
        ("OPTIONS", "/api/v1/namespaces/default/configmaps", 405),
        ("POST", "/api/v1/namespaces/default/configmaps/a", 405),
        ("DELETE", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", 405),
    ] {
        let answer = s.call(method, path, &[], "").await;
        assert_eq!(answer.status, want, "{method} {path}: {}", String::from_utf8_lossy(&answer.body));
    }
}

/// A small request that unpacks to a large one is refused before it is unpacked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decompression_bomb() {
    use std::io::Write;
    let s = Server::start().await;
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    for _ in 0..16 {
        gzip.write_all(&[b' '; 1 << 20]).expect("memory");
    }
    let bomb = gzip.finish().expect("memory");
    assert!(bomb.len() < 1 << 20);
    let answer = s.call("POST", "/api/v1/namespaces/default/configmaps", &[("content-encoding", "gzip")], bomb).await;
    assert_eq!(answer.status, 413);
}
