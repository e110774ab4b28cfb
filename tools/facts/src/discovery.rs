//! The stable resources of the discovery documents.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::modules::Modules;

/// A resource in one version, as in `resources.json`.
pub struct Resource {
    pub group: String,
    pub version: String,
    pub kind: String,
    pub document: Value,
    pub subresources: Vec<Value>,
}

/// Deprecations of stable kinds: Go code upstream (`core/v1/lifecycle.go`), so given here.
const DEPRECATED: [(&str, &str); 2] = [
    ("endpoints", "v1 Endpoints is deprecated in v1.33+; use discovery.k8s.io/v1 EndpointSlice"),
    ("componentstatuses", "v1 ComponentStatus is deprecated in v1.19+"),
];

/// Whether a version is stable: `v` and a number.
pub fn is_stable(version: &str) -> bool {
    version.strip_prefix('v').is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
}

/// All resources of stable versions, groups and versions in upstream's order of preference.
pub fn resources(modules: &Modules) -> Result<Vec<Resource>> {
    let mut all = list(modules, "", "v1", "api__v1.json")?;
    let groups = modules.json("kubernetes", "api/discovery/aggregated_v2.json")?;
    for group in groups["items"].as_array().context("aggregated_v2.json has items")? {
        let name = group["metadata"]["name"].as_str().unwrap_or_default();
        for version in group["versions"].as_array().into_iter().flatten() {
            let version = version["version"].as_str().unwrap_or_default();
            if is_stable(version) {
                all.extend(list(modules, name, version, &format!("apis__{name}__{version}.json"))?);
            }
        }
    }
    all.extend(metrics());
    Ok(all)
}

fn list(modules: &Modules, group: &str, version: &str, file: &str) -> Result<Vec<Resource>> {
    let document = modules.json("kubernetes", &format!("api/discovery/{file}"))?;
    let listed = document["resources"].as_array().with_context(|| format!("{file} has resources"))?;
    let mut resources: Vec<Resource> = Vec::new();
    for entry in listed {
        let name = entry["name"].as_str().unwrap_or_default();
        if let Some((plural, subresource)) = name.split_once('/') {
            let mut document = json!({"name": subresource, "kind": entry["kind"], "verbs": entry["verbs"]});
            for key in ["group", "version"] {
                if !entry[key].is_null() {
                    document[key] = entry[key].clone();
                }
            }
            let owner = resources.iter_mut().find(|resource| resource.document["plural"] == plural);
            let owner = owner.with_context(|| format!("{file}: {name} comes after its resource"))?;
            owner.subresources.push(document);
            continue;
        }
        let mut document = json!({
            "group": group, "version": version, "plural": name, "singular": entry["singularName"],
            "kind": entry["kind"], "namespaced": entry["namespaced"], "verbs": entry["verbs"],
        });
        for (key, from) in [("shortNames", "shortNames"), ("categories", "categories"), ("hash", "storageVersionHash")] {
            if !entry[from].is_null() {
                document[key] = entry[from].clone();
            }
        }
        if let Some((_, text)) = DEPRECATED.iter().find(|(plural, _)| group.is_empty() && *plural == name) {
            document["deprecated"] = (*text).into();
        }
        let kind = entry["kind"].as_str().unwrap_or_default().to_owned();
        resources.push(Resource { group: group.into(), version: version.into(), kind, document, subresources: Vec::new() });
    }
    Ok(resources)
}

/// The metrics API: served by the metrics server upstream, so that no discovery document lists it.
fn metrics() -> Vec<Resource> {
    [("nodes", "NodeMetrics", false), ("pods", "PodMetrics", true)]
        .into_iter()
        .map(|(plural, kind, namespaced)| Resource {
            group: "metrics.k8s.io".into(),
            version: "v1beta1".into(),
            kind: kind.into(),
            document: json!({
                "group": "metrics.k8s.io", "version": "v1beta1", "plural": plural, "singular": "",
                "kind": kind, "namespaced": namespaced, "verbs": ["get", "list"],
            }),
            subresources: Vec::new(),
        })
        .collect()
}

/// `resources.json`.
pub fn to_json(resources: &[Resource]) -> Value {
    let row = |resource: &Resource| {
        let mut document = resource.document.clone();
        if !resource.subresources.is_empty() {
            document["subresources"] = resource.subresources.clone().into();
        }
        document
    };
    resources.iter().map(row).collect()
}
