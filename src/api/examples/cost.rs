//! What the tables cost: memory of the registry and the documents, time of the walks over a typical pod.
//!
//! `cargo run --release -p windlass-api --example cost`

use std::hint::black_box;
use std::time::Instant;

use serde_json::{Value, json};
use windlass_api::registry::Registry;
use windlass_api::schema::{Schemas, decode_json};
use windlass_api::{openapi, protobuf};

/// Resident anonymous memory, in KiB.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap_or("0");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).unwrap_or(0)
}

fn measure<T>(name: &str, rounds: u32, mut f: impl FnMut() -> T) {
    for _ in 0..rounds / 10 {
        black_box(f());
    }
    let start = Instant::now();
    for _ in 0..rounds {
        black_box(f());
    }
    println!("{name:<40} {:>10.2} µs", start.elapsed().as_secs_f64() * 1e6 / f64::from(rounds));
}

fn pod() -> Value {
    let container = |name: &str| {
        json!({
            "name": name, "image": "registry.example.com/app:1.2.3", "imagePullPolicy": "IfNotPresent", "args": ["--a", "--b=c"],
            "ports": [{"containerPort": 8080, "name": "http", "protocol": "TCP"}],
            "env": [{"name": "A", "value": "b"}, {"name": "P", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}}],
            "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "256Mi"}},
            "livenessProbe": {"httpGet": {"path": "/healthz", "port": 8080, "scheme": "HTTP"}, "periodSeconds": 10, "timeoutSeconds": 1},
            "volumeMounts": [{"name": "config", "mountPath": "/etc/app"}, {"name": "token", "mountPath": "/var/run/secrets", "readOnly": true}],
            "securityContext": {"runAsNonRoot": true, "capabilities": {"drop": ["ALL"]}},
            "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
        })
    };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "app-6c9d5b7f4-x2x7q", "namespace": "default", "uid": "5f1d4c9e-3f0a-4f6e-9a53-0c9a7d1b2e11",
            "creationTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "12345", "labels": {"app": "app", "pod-template-hash": "6c9d5b7f4"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "app-6c9d5b7f4", "uid": "u", "controller": true, "blockOwnerDeletion": true}]},
        "spec": {
            "containers": [container("app"), container("sidecar")],
            "volumes": [{"name": "config", "configMap": {"name": "app", "defaultMode": 420}},
                {"name": "token", "projected": {"defaultMode": 420, "sources": [{"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}}]}}],
            "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}],
            "nodeName": "node-1", "restartPolicy": "Always", "dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler",
            "serviceAccountName": "app", "terminationGracePeriodSeconds": 30, "securityContext": {"fsGroup": 1000},
        },
        "status": {"phase": "Running", "podIP": "10.0.0.7", "podIPs": [{"ip": "10.0.0.7"}], "startTime": "2026-01-01T00:00:01Z",
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:05Z"}],
            "containerStatuses": [{"name": "app", "ready": true, "restartCount": 0, "image": "i", "imageID": "d", "state": {"running": {"startedAt": "2026-01-01T00:00:02Z"}}}]},
    })
}

fn main() {
    let before = resident();
    let start = Instant::now();
    let registry = Registry::builtin();
    println!("{:<40} {:>10.2} ms", "load facts", start.elapsed().as_secs_f64() * 1e3);
    println!("{:<40} {:>10} KiB", "registry and schemas, resident", resident() - before);
    println!("{:<40} {:>10}", "types", Schemas::builtin().len());

    let row = registry.find("", "v1", "pods").expect("pods");
    let (schemas, ty) = (row.schemas.clone(), row.stored().schema);
    let object = pod();
    let text = object.to_string();
    println!("{:<40} {:>10} bytes", "pod", text.len());
    measure("decode JSON (serde_json alone)", 2000, || serde_json::from_str::<Value>(&text).expect("JSON"));
    measure("decode JSON", 2000, || decode_json(text.as_bytes()).expect("JSON"));
    measure("check types", 2000, || schemas.check_types(ty, &object));
    let mut object = object;
    measure("prune", 2000, || schemas.prune(ty, &mut object));
    measure("normalize", 2000, || schemas.normalize(ty, &mut object));
    measure("default", 2000, || schemas.apply_defaults(ty, &mut object));
    measure("validate", 2000, || schemas.validate(ty, &object));
    measure("encode JSON", 2000, || serde_json::to_vec(&object).expect("JSON"));
    measure("encode protobuf", 2000, || protobuf::encode(&schemas, &object).expect("it encodes"));
    let bytes = protobuf::encode(&schemas, &object).expect("it encodes");
    measure("decode protobuf", 2000, || protobuf::decode(&schemas, &bytes, None).expect("it decodes"));

    let before = resident();
    let start = Instant::now();
    let document = openapi::v3(&registry, "api/v1").expect("a document");
    println!("{:<40} {:>10.2} ms", "OpenAPI v3 of api/v1", start.elapsed().as_secs_f64() * 1e3);
    println!("{:<40} {:>10} KiB", "  resident while it is there", resident().saturating_sub(before));
    drop(document);
    let start = Instant::now();
    let document = openapi::v2(&registry);
    println!("{:<40} {:>10.2} ms", "OpenAPI v2", start.elapsed().as_secs_f64() * 1e3);
    println!("{:<40} {:>10} KiB", "  resident while it is there", resident().saturating_sub(before));
    println!("{:<40} {:>10} bytes", "  as JSON", document.to_string().len());
}
