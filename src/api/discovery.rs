//! Discovery documents: pure functions of the registry.
//!
//! Legacy (`/api`, `/apis`, `/api/v1`, `/apis/G`, `/apis/G/V`) and aggregated
//! (`apidiscovery.k8s.io/v2`, KEP-3352).

#[cfg(test)]
mod tests;

use serde_json::{Value, json};

use crate::registry::custom::version_priority;
use crate::registry::{Registry, Resource, Subresource, Version};

/// `/api`: versions of the legacy group. `server` is the address that clients of any network reach us at.
pub fn api_versions(server: &str) -> Value {
    json!({
        "kind": "APIVersions",
        "versions": ["v1"],
        "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": server}],
    })
}

/// A named group and its served versions, the preferred one first.
struct Group<'r> {
    name: &'r str,
    versions: Vec<&'r str>,
}

/// Groups in the order of the table (upstream's priority), custom ones after them by name.
fn groups(registry: &Registry) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    let mut customs: Vec<&str> = Vec::new();
    for row in registry.resources() {
        let served = row.versions.iter().filter(|version| version.served).map(|version| version.name.as_str());
        let index = match groups.iter().position(|group| group.name == row.group) {
            Some(index) => index,
            None => {
                if row.custom {
                    customs.push(&row.group);
                }
                groups.push(Group { name: &row.group, versions: Vec::new() });
                groups.len() - 1
            }
        };
        for version in served {
            if !groups[index].versions.contains(&version) {
                groups[index].versions.push(version);
            }
        }
    }
    groups.retain(|group| !group.versions.is_empty());
    for group in &mut groups {
        group.versions.sort_by(|a, b| version_priority(b).cmp(&version_priority(a)).then_with(|| a.cmp(b)));
    }
    let builtin = groups.iter().position(|group| customs.contains(&group.name)).unwrap_or(groups.len());
    groups[builtin..].sort_by_key(|group| group.name);
    groups
}

fn group(group: &Group<'_>) -> Value {
    let version = |version: &&str| json!({"groupVersion": format!("{}/{version}", group.name), "version": version});
    json!({
        "name": group.name,
        "versions": group.versions.iter().map(version).collect::<Vec<_>>(),
        "preferredVersion": group.versions.first().map(version),
    })
}

/// `/apis`: all named groups.
pub fn api_group_list(registry: &Registry) -> Value {
    let groups: Vec<Value> = groups(registry).iter().filter(|group| !group.name.is_empty()).map(group).collect();
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
}

/// `/apis/G`; `None` when there is no such group.
pub fn api_group(registry: &Registry, name: &str) -> Option<Value> {
    let groups = groups(registry);
    let found = groups.iter().find(|group| group.name == name && !name.is_empty())?;
    let mut document = group(found);
    document["kind"] = "APIGroup".into();
    document["apiVersion"] = "v1".into();
    Some(document)
}

/// `/api/v1` and `/apis/G/V`; `None` when the group version has no resources.
pub fn api_resource_list(registry: &Registry, group: &str, version: &str) -> Option<Value> {
    let mut resources = Vec::new();
    for (row, version) in rows(registry, group, version) {
        resources.push(resource(row, version));
        resources.extend(version.subresources.iter().map(|sub| subresource(row, sub)));
    }
    if resources.is_empty() {
        return None;
    }
    resources.sort_by(|a, b| a["name"].as_str().cmp(&b["name"].as_str()));
    let mut document = json!({
        "kind": "APIResourceList",
        "groupVersion": crate::meta::join_api_version(group, version),
        "resources": resources,
    });
    if !group.is_empty() {
        document["apiVersion"] = "v1".into();
    }
    Some(document)
}

fn rows<'r>(registry: &'r Registry, group: &str, version: &str) -> Vec<(&'r Resource, &'r Version)> {
    let rows = registry.resources().filter(|row| row.group == group);
    rows.filter_map(|row| Some((&**row, row.version(version)?))).collect()
}

fn resource(row: &Resource, version: &Version) -> Value {
    let mut document = json!({
        "name": row.plural,
        "singularName": row.singular,
        "namespaced": row.namespaced,
        "kind": row.kind,
        "verbs": version.verbs,
    });
    if !row.short_names.is_empty() {
        document["shortNames"] = row.short_names.clone().into();
    }
    if !row.categories.is_empty() {
        document["categories"] = row.categories.clone().into();
    }
    if let Some(hash) = &version.storage_version_hash {
        document["storageVersionHash"] = hash.clone().into();
    }
    document
}

fn subresource(row: &Resource, sub: &Subresource) -> Value {
    let mut document = json!({
        "name": format!("{}/{}", row.plural, sub.name),
        "singularName": "",
        "namespaced": row.namespaced,
        "kind": sub.kind,
        "verbs": sub.verbs,
    });
    if sub.foreign {
        if !sub.group.is_empty() {
            document["group"] = sub.group.clone().into();
        }
        document["version"] = sub.version.clone().into();
    }
    document
}

/// Aggregated discovery of the named groups (`/apis`) or of the legacy one (`/api`).
pub fn aggregated(registry: &Registry, legacy: bool) -> Value {
    let groups = groups(registry);
    let items: Vec<Value> = groups
        .iter()
        .filter(|group| group.name.is_empty() == legacy)
        .map(|group| {
            let versions = group.versions.iter().map(|version| {
                let mut resources: Vec<Value> =
                    rows(registry, group.name, version).into_iter().map(|(row, version)| aggregated_resource(row, version)).collect();
                resources.sort_by(|a, b| a["resource"].as_str().cmp(&b["resource"].as_str()));
                json!({"version": version, "resources": resources, "freshness": "Current"})
            });
            let metadata = if legacy { json!({}) } else { json!({"name": group.name}) };
            json!({"metadata": metadata, "versions": versions.collect::<Vec<_>>()})
        })
        .collect();
    json!({"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items})
}

fn aggregated_resource(row: &Resource, version: &Version) -> Value {
    // Custom resources name group and version; built-in ones leave them to the list.
    let own = |kind: &str| {
        let (group, version) = if row.custom { (row.group.as_str(), version.name.as_str()) } else { ("", "") };
        json!({"group": group, "version": version, "kind": kind})
    };
    let mut document = json!({
        "resource": row.plural,
        "responseKind": own(&row.kind),
        "scope": if row.namespaced { "Namespaced" } else { "Cluster" },
        "singularResource": row.singular,
        "verbs": version.verbs,
    });
    if !row.short_names.is_empty() {
        document["shortNames"] = row.short_names.clone().into();
    }
    if !row.categories.is_empty() {
        document["categories"] = row.categories.clone().into();
    }
    if !version.subresources.is_empty() {
        let subresources = version.subresources.iter().map(|sub| {
            let kind = if sub.foreign {
                json!({"group": sub.group, "version": sub.version, "kind": sub.kind})
            } else {
                own(&sub.kind)
            };
            json!({"subresource": sub.name, "responseKind": kind, "verbs": sub.verbs})
        });
        document["subresources"] = subresources.collect::<Vec<_>>().into();
    }
    document
}
