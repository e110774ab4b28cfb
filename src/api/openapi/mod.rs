//! OpenAPI documents, built from the registry and the schemas when they are asked for.
//!
//! Version 3: an index with a hash per document and a document per group version (KEP-2896). Version 2: one
//! document with everything. Descriptions are unpacked for the time of building only; nothing of a document
//! stays in memory here.
//!
//! Deliberately absent: the deprecated `/watch/` paths, and prose for query parameters.

mod describe;
pub mod gnostic;
mod paths;
mod schemas;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};

use serde_json::{Map, Value, json};

use crate::meta;
use crate::registry::{Registry, Resource, Version};
use crate::schema::TypeId;
use describe::Descriptions;
use schemas::{Dialect, Writer};

/// What `info.version` says, and what the hashes of built-in documents depend on.
pub const VERSION: &str = "v1.37.2";

/// Group versions that have resources, as paths: `api/v1`, `apis/apps/v1`.
fn group_versions(registry: &Registry) -> BTreeMap<String, Vec<(&Resource, &Version)>> {
    let mut all: BTreeMap<String, Vec<(&Resource, &Version)>> = BTreeMap::new();
    for row in registry.resources() {
        for version in row.versions.iter().filter(|version| version.served) {
            all.entry(path_of(&row.group, &version.name)).or_default().push((&**row, version));
        }
    }
    all
}

fn path_of(group: &str, version: &str) -> String {
    if group.is_empty() { format!("api/{version}") } else { format!("apis/{group}/{version}") }
}

/// `/openapi/v3`: the documents that there are; a document's hash changes when its content does.
pub fn v3_index(registry: &Registry) -> Value {
    let mut paths = Map::new();
    for (path, rows) in group_versions(registry) {
        let mut hasher = std::hash::DefaultHasher::new();
        VERSION.hash(&mut hasher);
        env!("CARGO_PKG_VERSION").hash(&mut hasher);
        for (row, version) in rows {
            (&row.plural, &row.kind, row.namespaced, version.subresources.len()).hash(&mut hasher);
            if let Some(schema) = &version.openapi {
                schema.hash(&mut hasher);
            }
        }
        let url = format!("/openapi/v3/{path}?hash={:016X}", hasher.finish());
        paths.insert(path, json!({"serverRelativeURL": url}));
    }
    json!({"paths": paths})
}

/// `/openapi/v3/<path>`, where path is `api/v1` or `apis/apps/v1`; `None` when nothing is served there.
pub fn v3(registry: &Registry, path: &str) -> Option<Value> {
    let rows = group_versions(registry).remove(path)?;
    let descriptions = Descriptions::load();
    let mut document = Document::new(Dialect::V3, &descriptions);
    for (row, version) in rows {
        document.resource(row, version);
    }
    let (paths, schemas) = document.finish();
    let scheme = json!({"BearerToken": {
        "type": "apiKey", "name": "authorization", "in": "header", "description": "Bearer Token authentication"}});
    Some(json!({
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": VERSION},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": scheme},
    }))
}

/// `/openapi/v2`: everything in one document.
pub fn v2(registry: &Registry) -> Value {
    let descriptions = Descriptions::load();
    let mut document = Document::new(Dialect::V2, &descriptions);
    for (row, version) in group_versions(registry).into_values().flatten() {
        document.resource(row, version);
    }
    let (paths, definitions) = document.finish();
    json!({
        "swagger": "2.0",
        "info": {"title": "Kubernetes", "version": VERSION},
        "paths": paths,
        "definitions": definitions,
        "security": [{"BearerToken": []}],
        "securityDefinitions": {"BearerToken": {
            "type": "apiKey", "name": "authorization", "in": "header", "description": "Bearer Token authentication"}},
    })
}

/// A document in the making: paths, and the definitions that they (and each other) refer to.
struct Document<'d> {
    dialect: Dialect,
    paths: Map<String, Value>,
    writer: Writer<'d>,
    /// Group, version and kind of definitions.
    kinds: BTreeMap<String, BTreeSet<(String, String, String)>>,
}

impl<'d> Document<'d> {
    fn new(dialect: Dialect, descriptions: &'d Descriptions) -> Self {
        let writer = Writer::new(dialect, descriptions);
        let mut document = Document { dialect, paths: Map::new(), writer, kinds: BTreeMap::new() };
        // Kinds of other group versions, too: a StatefulSet holds PersistentVolumeClaims.
        for row in Registry::builtin().resources() {
            for version in &row.versions {
                let mut note = |ty: Option<TypeId>, group: &str, version: &str, kind: &str| {
                    if let Some(name) = ty.and_then(|ty| row.schemas.ty(ty).name.clone()) {
                        document.kind(&name, group, version, kind);
                    }
                };
                note(Some(version.schema), &row.group, &version.name, &row.kind);
                note(version.list_schema, &row.group, &version.name, &row.list_kind);
                for sub in &version.subresources {
                    note(sub.schema, &sub.group, &sub.version, &sub.kind);
                }
            }
        }
        for kind in ["Status", "DeleteOptions", "APIResourceList", "APIGroup", "APIGroupList"] {
            document.kind(&format!("{META}.{kind}"), "", "v1", kind);
        }
        document
    }

    fn kind(&mut self, definition: &str, group: &str, version: &str, kind: &str) {
        let gvk = (group.to_owned(), version.to_owned(), kind.to_owned());
        self.kinds.entry(definition.to_owned()).or_default().insert(gvk);
    }

    fn resource(&mut self, row: &Resource, version: &Version) {
        let (own, list) = match &version.openapi {
            // It was JSON when the row was made of it.
            Some(schema) => self.custom(row, version, &serde_json::from_str(schema).unwrap_or_default()),
            None => self.builtin(row, version),
        };
        self.kind(&own, &row.group, &version.name, &row.kind);
        if let Some(list) = &list {
            self.kind(list, &row.group, &version.name, &row.list_kind);
        }
        for name in ["Status", "DeleteOptions", "APIResourceList"] {
            self.writer.need(&format!("{META}.{name}"));
        }
        self.kind(&format!("{META}.DeleteOptions"), &row.group, &version.name, "DeleteOptions");
        for sub in &version.subresources {
            if let Some(name) = sub.schema.and_then(|ty| row.schemas.ty(ty).name.clone()) {
                self.writer.need(&name);
            }
        }
        let builder = paths::Builder { dialect: self.dialect, row, version, own: &own, list: list.as_deref() };
        builder.write(&mut self.paths);
    }

    fn builtin(&mut self, row: &Resource, version: &Version) -> (String, Option<String>) {
        let name = |ty| row.schemas.ty(ty).name.as_deref().unwrap_or_default().to_owned();
        let own = name(version.schema);
        let list = version.list_schema.map(name);
        self.writer.need(&own);
        if let Some(list) = &list {
            self.writer.need(list);
        }
        (own, list)
    }

    /// A custom kind's definition and its list's, as upstream's `apiextensions` publishes them.
    fn custom(&mut self, row: &Resource, version: &Version, schema: &Value) -> (String, Option<String>) {
        let own = crate::registry::custom::definition_name(&row.group, &version.name, &row.kind);
        let list = crate::registry::custom::definition_name(&row.group, &version.name, &row.list_kind);
        let mut definition = self.writer.custom(schema);
        let properties = meta::child_mut(meta::as_map(&mut definition), "properties");
        for name in ["apiVersion", "kind"] {
            properties.insert(name.to_owned(), json!({"type": "string"}));
        }
        let metadata = self.writer.reference(&format!("{META}.ObjectMeta"));
        properties.insert("metadata".to_owned(), metadata);
        definition["type"] = "object".into();
        self.writer.put(&own, definition);
        let item = self.writer.pointer(&own);
        let metadata = self.writer.reference(&format!("{META}.ListMeta"));
        let document = json!({
            "description": format!("{} is a list of {}", row.list_kind, row.kind),
            "type": "object",
            "required": ["items"],
            "properties": {
                "apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": metadata,
                "items": {"type": "array", "items": item, "description": format!("List of {}.", row.plural)},
            },
        });
        self.writer.put(&list, document);
        (own, Some(list))
    }

    fn finish(self) -> (Map<String, Value>, Map<String, Value>) {
        let mut definitions = self.writer.finish();
        for (name, kinds) in self.kinds {
            if let Some(definition) = definitions.get_mut(&name) {
                let gvk = |(group, version, kind)| json!({"group": group, "version": version, "kind": kind});
                definition["x-kubernetes-group-version-kind"] = kinds.into_iter().map(gvk).collect();
            }
        }
        (self.paths, definitions)
    }
}

const META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1";
