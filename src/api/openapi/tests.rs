//! OpenAPI compared with upstream's documents in the Go module, as far as clients read them.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use super::*;

fn documents() -> PathBuf {
    let go = |arguments: &[&str]| {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/upstream");
        let output = Command::new("go").args(arguments).current_dir(root).output().expect("Go is installed");
        assert!(output.status.success(), "go {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("a path")
    };
    let folder = PathBuf::from(go(&["env", "GOMODCACHE"]).trim()).join("k8s.io/kubernetes@v1.37.2/api/openapi-spec/v3");
    if !folder.exists() {
        go(&["mod", "download", "k8s.io/kubernetes"]);
    }
    folder
}

/// What explain, patches and server-side apply read of a property.
fn gist(property: &Value) -> Value {
    let mut property = property.clone();
    if let Some(target) = property["allOf"][0].get("$ref").cloned() {
        property["$ref"] = target;
    }
    let mut out = Map::new();
    for key in ["$ref", "type", "format", "additionalProperties", "x-kubernetes-list-map-keys", "x-kubernetes-patch-merge-key", "x-kubernetes-patch-strategy"] {
        if let Some(value) = property.get(key).filter(|value| !value.is_null()) {
            out.insert(key.to_owned(), value.clone());
        }
    }
    if let Some(items) = property.get("items").filter(|items| !items.is_null()) {
        out.insert("items".to_owned(), gist(items));
    }
    if let Some(values) = out.get_mut("additionalProperties") {
        *values = gist(values);
    }
    // Upstream does not say atomic where that is the default.
    if let Some(list) = property.get("x-kubernetes-list-type").filter(|list| *list != "atomic") {
        out.insert("x-kubernetes-list-type".to_owned(), list.clone());
    }
    out.into()
}

#[test]
fn definitions_are_upstreams() {
    let registry = Registry::builtin();
    let (mut compared, mut problems) = (0, Vec::new());
    for path in group_versions(&registry).keys().filter(|path| !path.contains("metrics")) {
        let ours = v3(&registry, path).expect("a document");
        let file = documents().join(format!("{}_openapi.json", path.replace('/', "__")));
        let upstream: Value = serde_json::from_slice(&std::fs::read(file).expect("a document")).expect("JSON");
        for (name, definition) in upstream["components"]["schemas"].as_object().expect("schemas") {
            // Named for a watch path, or one of the types that is anything.
            if name.ends_with(".WatchEvent") || name.ends_with(".RawExtension") || name.ends_with(".Patch") || name.ends_with(".v1.JSON") || name.ends_with("JSONSchemaProps") {
                continue;
            }
            let own = &ours["components"]["schemas"][name];
            if own.is_null() {
                problems.push(format!("{path}: {name} is missing"));
                continue;
            }
            compared += 1;
            if own["x-kubernetes-group-version-kind"] != definition["x-kubernetes-group-version-kind"] {
                problems.push(format!("{name}: {} instead of {}", own["x-kubernetes-group-version-kind"], definition["x-kubernetes-group-version-kind"]));
            }
            for (field, property) in definition["properties"].as_object().into_iter().flatten() {
                let own = &own["properties"][field];
                if gist(own) != gist(property) {
                    problems.push(format!("{name}.{field}: {} instead of {}", gist(own), gist(property)));
                }
                if own["description"].is_null() && !property["description"].is_null() {
                    problems.push(format!("{name}.{field} has no description"));
                }
            }
        }
        for (path, item) in upstream["paths"].as_object().expect("paths") {
            if path.contains("/watch/") || path.ends_with("/{path}") || path.ends_with('/') {
                continue;
            }
            for (method, operation) in item.as_object().into_iter().flatten().filter(|(_, operation)| operation.is_object()) {
                let own = &ours["paths"][path][method];
                for key in ["x-kubernetes-action", "x-kubernetes-group-version-kind", "operationId"] {
                    // Methods of connections that discovery does not list as verbs.
                    let listed = operation["x-kubernetes-action"] != "connect";
                    if listed && own[key] != operation[key] {
                        problems.push(format!("{path} {method} {key}: {} instead of {}", own[key], operation[key]));
                    }
                }
            }
        }
    }
    problems.sort();
    problems.dedup();
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    assert!(compared > 500, "only {compared} definitions were compared");
}

#[test]
fn index_names_every_group_version() {
    let registry = Registry::builtin();
    let index = v3_index(&registry);
    let paths = index["paths"].as_object().expect("paths");
    assert!(paths.contains_key("api/v1") && paths.contains_key("apis/apps/v1"));
    assert_eq!(index, v3_index(&registry));
    assert!(v3(&registry, "apis/none/v1").is_none());
}

#[test]
fn custom_kinds_are_published() {
    let crd = json!({"metadata": {"name": "foos.example.com"}, "spec": {
        "group": "example.com", "names": {"plural": "foos", "kind": "Foo"}, "scope": "Cluster",
        "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {
            "type": "object", "description": "Foo is one", "properties": {"spec": {"type": "object", "properties": {
                "open": {"type": "object", "x-kubernetes-preserve-unknown-fields": true, "properties": {"a": {"type": "string"}}},
                "either": {"oneOf": [{"required": ["a"]}], "type": "object"}, "n": {"type": "string", "nullable": true}}}}}}}]}});
    let row = Resource::from_crd(&crd).expect("a good CRD");
    let registry = Registry::builtin().with_custom(vec![Arc::new(row)]);
    let document = v3(&registry, "apis/example.com/v1").expect("a document");
    let definition = &document["components"]["schemas"]["com.example.v1.Foo"];
    assert_eq!(definition["description"], "Foo is one");
    assert_eq!(definition["x-kubernetes-group-version-kind"], json!([{"group": "example.com", "kind": "Foo", "version": "v1"}]));
    assert_eq!(definition["properties"]["metadata"]["$ref"], format!("#/components/schemas/{META}.ObjectMeta"));
    assert!(definition["properties"]["spec"]["properties"]["either"]["oneOf"].is_array());
    assert!(document["paths"]["/apis/example.com/v1/foos/{name}"]["patch"].is_object());
    let all = v2(&registry);
    let definition = &all["definitions"]["com.example.v1.Foo"]["properties"]["spec"]["properties"];
    assert_eq!(*definition, json!({"open": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}, "either": {"type": "object"}, "n": {}}));
    assert!(all["definitions"]["io.k8s.api.core.v1.Pod"]["properties"]["spec"]["description"].is_string());
}
