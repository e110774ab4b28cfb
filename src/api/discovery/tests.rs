//! Discovery compared with the documents in the Go module `k8s.io/kubernetes`, for stable versions.

use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use super::*;
use crate::registry::Registry;

fn documents() -> PathBuf {
    let go = |arguments: &[&str]| {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/upstream");
        let output = Command::new("go").args(arguments).current_dir(root).output().expect("Go is installed");
        assert!(output.status.success(), "go {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("a path")
    };
    let folder = PathBuf::from(go(&["env", "GOMODCACHE"]).trim()).join("k8s.io/kubernetes@v1.37.2/api/discovery");
    if !folder.exists() {
        go(&["mod", "download", "k8s.io/kubernetes"]);
    }
    folder
}

fn document(name: &str) -> Value {
    let file = documents().join(name);
    let text = std::fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    serde_json::from_slice(&text).expect("a document is JSON")
}

fn is_stable(version: &str) -> bool {
    version.strip_prefix('v').is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Upstream's list of a key's versions, without unstable ones; groups without stable versions go.
fn stable_groups(mut list: Value, key: &str) -> Value {
    let groups = list[key].as_array_mut().expect("groups");
    for group in groups.iter_mut() {
        let versions = group["versions"].as_array_mut().expect("versions");
        versions.retain(|version| is_stable(version["version"].as_str().expect("a name")));
    }
    groups.retain(|group| !group["versions"].as_array().expect("versions").is_empty());
    list
}

/// Ours without what upstream's own API server does not serve.
fn without_metrics(mut list: Value, key: &str) -> Value {
    let groups = list[key].as_array_mut().expect("groups");
    groups.retain(|group| group["name"] != "metrics.k8s.io" && group["metadata"]["name"] != "metrics.k8s.io");
    list
}

#[test]
fn groups_are_upstreams() {
    let registry = Registry::builtin();
    let expected = stable_groups(document("apis.json"), "groups");
    assert_eq!(without_metrics(api_group_list(&registry), "groups"), expected);
    let server = document("api.json")["serverAddressByClientCIDRs"][0]["serverAddress"].clone();
    assert_eq!(api_versions(server.as_str().expect("an address")), document("api.json"));
    for group in expected["groups"].as_array().expect("groups") {
        let name = group["name"].as_str().expect("a name");
        let mut expected = document(&format!("apis__{name}.json"));
        let versions = expected["versions"].as_array_mut().expect("versions");
        versions.retain(|version| is_stable(version["version"].as_str().expect("a name")));
        assert_eq!(api_group(&registry, name), Some(expected), "{name}");
    }
    assert_eq!(api_group(&registry, "none.example.com"), None);
}

#[test]
fn resources_are_upstreams() {
    let registry = Registry::builtin();
    let mut compared = 0;
    for group in groups(&registry).iter().filter(|group| group.name != "metrics.k8s.io") {
        for version in &group.versions {
            let file = if group.name.is_empty() { format!("api__{version}.json") } else { format!("apis__{}__{version}.json", group.name) };
            let ours = api_resource_list(&registry, group.name, version).expect("resources");
            let mut upstream = document(&file);
            // Subresources of unstable kinds are not served in stable versions; none are today.
            upstream["resources"].as_array_mut().expect("resources").sort_by(|a, b| a["name"].as_str().cmp(&b["name"].as_str()));
            assert_eq!(ours, upstream, "{file}");
            compared += 1;
        }
    }
    assert!(compared >= 20, "only {compared} group versions were compared");
    assert_eq!(api_resource_list(&registry, "apps", "v1beta1"), None);
}

#[test]
fn aggregated_discovery_is_upstreams() {
    let registry = Registry::builtin();
    let expected = stable_groups(document("aggregated_v2.json"), "items");
    assert_eq!(without_metrics(aggregated(&registry, false), "items")["items"], expected["items"]);
    let legacy = aggregated(&registry, true);
    assert_eq!(legacy["items"].as_array().map(Vec::len), Some(1));
    assert_eq!(legacy["items"][0]["metadata"], json!({}));
    let pods = legacy["items"][0]["versions"][0]["resources"].as_array().expect("resources");
    let pods = pods.iter().find(|resource| resource["resource"] == "pods").expect("pods");
    let eviction = json!({"subresource": "eviction", "verbs": ["create"],
        "responseKind": {"group": "policy", "kind": "Eviction", "version": "v1"}});
    assert!(pods["subresources"].as_array().expect("subresources").contains(&eviction));
}
