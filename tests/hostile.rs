//! A thousand bad requests: each is answered by a 4xx that says why, none by a 5xx, a panic, or memory that stays.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use http::{Method, Request, StatusCode};
use http_body_util::BodyExt;
use kube::client::Body;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use windlass_client::connect;
use windlass_testbed::{Process, Programs, eventually};

struct Bad {
    method: Method,
    path: String,
    content_type: &'static str,
    body: Vec<u8>,
}

const JSON: &str = "application/json";
const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
const PODS: &str = "/api/v1/namespaces/default/pods";

fn bad(method: Method, path: impl Into<String>, content_type: &'static str, body: impl Into<Vec<u8>>) -> Bad {
    Bad { method, path: path.into(), content_type, body: body.into() }
}

fn pod() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "victim", "labels": { "a": "b" } },
        "spec": { "containers": [{ "name": "c", "image": "i", "env": [{ "name": "A", "value": "b" }],
            "resources": { "requests": { "cpu": "100m" } }, "ports": [{ "containerPort": 80 }] }] }
    })
}

/// Where a value of another type does not belong.
const FIELDS: &[&str] = &[
    "/metadata",
    "/metadata/name",
    "/metadata/labels",
    "/metadata/labels/a",
    "/spec",
    "/spec/containers",
    "/spec/containers/0",
    "/spec/containers/0/name",
    "/spec/containers/0/image",
    "/spec/containers/0/env",
    "/spec/containers/0/env/0/value",
    "/spec/containers/0/resources",
    "/spec/containers/0/resources/requests",
    "/spec/containers/0/ports/0/containerPort",
];

fn wrong_type(current: &Value, random: &mut StdRng) -> Value {
    let options = [json!(random.random::<i32>() | 1), json!(true), json!("\u{0}text of no sense"), json!([[]]), json!({ "x": [{}] }), json!(1e300)];
    let others: Vec<&Value> = options
        .iter()
        .filter(|option| std::mem::discriminant(*option) != std::mem::discriminant(current))
        // Where a map of strings is expected, a map of lists is wrong too, but an empty list in a list is not always.
        .collect();
    others[random.random_range(0..others.len())].clone()
}

fn nested(open: &str, close: &str, depth: usize) -> String {
    open.repeat(depth) + &close.repeat(depth)
}

/// The `number`th bad request.
fn generate(number: usize, random: &mut StdRng) -> Bad {
    let whole = pod().to_string();
    let word: String = (0..random.random_range(1..20)).map(|_| random.random_range('a'..='z')).collect();
    match number % 20 {
        0 | 1 => {
            let mut pod = pod();
            let field = FIELDS[random.random_range(0..FIELDS.len())];
            if let Some(value) = pod.pointer_mut(field) {
                *value = wrong_type(value, random);
            }
            bad(Method::POST, PODS, JSON, pod.to_string())
        }
        2 => bad(Method::POST, PODS, JSON, &whole.as_bytes()[..random.random_range(1..whole.len() - 1)]),
        3 => {
            let mut bytes = whole.into_bytes();
            let at = bytes.windows(6).position(|w| w == b"victim").unwrap_or(0);
            bytes[at] = 0xC0 | random.random_range(0..0x20u8);
            bad(Method::POST, PODS, JSON, bytes)
        }
        4 => bad(Method::POST, PODS, JSON, nested("[", "]", random.random_range(200..200_000))),
        5 => bad(Method::POST, PODS, JSON, nested(r#"{"spec":"#, "}", random.random_range(200..100_000))),
        6 => {
            let mut pod = pod();
            pod["metadata"]["annotations"] = json!({ "huge": "x".repeat(random.random_range(300_000..2_000_000)) });
            bad(Method::POST, PODS, JSON, pod.to_string())
        }
        7 => bad(Method::GET, format!("{PODS}?labelSelector={word}%20in%20({}", "("), JSON, ""),
        8 => bad(Method::GET, format!("{PODS}?fieldSelector=spec.{word}%3Dx"), JSON, ""),
        9 => bad(Method::GET, format!("{PODS}?limit={word}"), JSON, ""),
        10 => bad(Method::GET, format!("{PODS}?continue={word}"), JSON, ""),
        11 => bad(Method::GET, format!("{PODS}?resourceVersion={word}"), JSON, ""),
        12 | 13 => {
            let mut bytes = b"k8s\0".to_vec();
            bytes.extend((0..random.random_range(0..300)).map(|_| random.random::<u8>()));
            bad(Method::POST, PODS, PROTOBUF, bytes)
        }
        14 => {
            let operations = [
                json!([{ "op": word, "path": "/metadata" }]),
                json!([{ "op": "remove", "path": format!("/{word}/no/such") }]),
                json!([{ "op": "test", "path": "/metadata/name", "value": word }]),
                json!([{ "op": "copy", "from": "/nowhere", "path": "/metadata/labels/x" }]),
                json!({ "op": "add" }),
                json!([{ "op": "replace", "path": "/spec/containers/99", "value": 1 }]),
            ];
            let body = operations[random.random_range(0..operations.len())].to_string();
            bad(Method::PATCH, "/api/v1/namespaces/default/configmaps/target", "application/json-patch+json", body)
        }
        15 => {
            let bodies = [r#"{"data":[1]}"#, r#"{"data":{"k":{"deep":1}}}"#, "[]", "7", r#"{"metadata":{"labels":{"-bad-":"x"}}}"#, r#"{"metadata":{"name":"other"}}"#];
            let kinds = ["application/merge-patch+json", "application/strategic-merge-patch+json"];
            let body = bodies[random.random_range(0..bodies.len())];
            bad(Method::PATCH, "/api/v1/namespaces/default/configmaps/target", kinds[random.random_range(0..2)], body)
        }
        16 => bad(Method::PATCH, "/api/v1/namespaces/default/configmaps/target?fieldManager=x", "application/apply-patch+yaml", format!("{word}: [unclosed")),
        17 => bad(Method::POST, PODS, "application/x-unknown", whole),
        18 => bad(Method::POST, format!("/apis/{word}.example/v9/{word}"), JSON, whole),
        _ => {
            let name = ["UPPER", "under_score", "-dash", "dot.", "a/b", "ä"][random.random_range(0..6)].to_owned() + &word.to_uppercase();
            bad(Method::POST, "/api/v1/namespaces/default/configmaps", JSON, json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name } }).to_string())
        }
    }
}

fn resident(pid: u32) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let line = text.lines().find(|line| line.starts_with("Pss:")).context("no Pss line")?;
    Ok(line.split_whitespace().nth(1).context("no figure")?.parse::<u64>()? * 1024)
}

#[tokio::test]
async fn a_thousand_bad_requests() -> Result<()> {
    let programs = Programs::from_env()?;
    let dir = tempfile::tempdir()?;
    let kubeconfig = dir.path().join("kubeconfig");
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut command = std::process::Command::new(&programs.windlass);
    command.args(["apiserver", "--bind-address=127.0.0.1", &format!("--secure-port={port}"), "--data-dir"]).arg(dir.path()).arg("--write-kubeconfig").arg(&kubeconfig);
    let mut server = Process::start(command, &dir.path().join("log"))?;
    eventually(Duration::from_secs(30), || {
        server.check()?;
        ensure!(kubeconfig.exists(), "no kubeconfig yet");
        Ok(())
    })?;
    let client = connect::from_kubeconfig(Some(&kubeconfig)).await?;
    let target = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "target" }, "data": { "k": "v" } });
    let create = Request::post("/api/v1/namespaces/default/configmaps").header("content-type", JSON).body(Body::from(target.to_string().into_bytes()))?;
    ensure!(client.send(create).await?.status() == StatusCode::CREATED, "the target of patches");

    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut memory = Vec::new();
    for round in 0..2 {
        let mut random = StdRng::seed_from_u64(seed);
        for number in 0..1000 {
            let bad = generate(number, &mut random);
            let what = format!("round {round}, request {number}: {} {} {} {:?}", bad.method, bad.path, bad.content_type, String::from_utf8_lossy(&bad.body[..bad.body.len().min(300)]));
            let request = Request::builder().method(bad.method).uri(&bad.path).header("content-type", bad.content_type).body(Body::from(bad.body))?;
            let response = client.send(request).await.with_context(|| what.clone())?;
            let status = response.status();
            let body = response.into_body().collect().await.with_context(|| what.clone())?.to_bytes();
            ensure!(status.is_client_error(), "{what}: answered {status}: {}", String::from_utf8_lossy(&body));
            let said: Value = serde_json::from_slice(&body).with_context(|| format!("{what}: {status} is no Status: {}", String::from_utf8_lossy(&body)))?;
            ensure!(said["kind"] == "Status" && said["message"].as_str().is_some_and(|m| !m.is_empty()), "{what}: {said}");
        }
        memory.push(resident(server.pid())?);
    }
    server.check()?;
    // The first round warms caches and the allocator; what a second one adds would be added by each.
    ensure!(memory[1] < memory[0] + (16 << 20), "memory grew from {} to {} bytes", memory[0], memory[1]);
    ensure!(server.stop(Duration::from_secs(20)), "the server did not stop:\n{}", server.tail());
    ensure!(!server.tail().contains("panicked"), "{}", server.tail());
    Ok(())
}
