//! The table of resources: one row per resource, built in or custom.
//!
//! Discovery, OpenAPI, REST storage, RBAC and tables read this and nothing else. A [`Registry`] is an
//! immutable snapshot; a CustomResourceDefinition that comes, changes or goes makes a new one
//! ([`Registry::with_custom`]) that shares the built-in rows.

pub mod custom;

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use serde_json::Value;

use crate::schema::{Schemas, TypeId};
use crate::strategy::Strategy;

/// A resource: a row of the table.
pub struct Resource {
    /// API group, `""` for the legacy one.
    pub group: String,
    /// The name in paths, `pods`.
    pub plural: String,
    /// `pod`.
    pub singular: String,
    /// `Pod`.
    pub kind: String,
    /// `PodList`.
    pub list_kind: String,
    /// `po`.
    pub short_names: Vec<String>,
    /// `all`.
    pub categories: Vec<String>,
    /// Whether objects live in namespaces.
    pub namespaced: bool,
    /// Served (and, for custom resources, unserved) versions, the preferred one first.
    pub versions: Vec<Version>,
    /// The version that the store holds.
    pub storage_version: String,
    /// Where objects live.
    pub storage: Storage,
    /// Another row that holds this one's objects: `events.k8s.io/events` are stored as `events`.
    /// Group and plural; objects are converted on the way in and out.
    pub stored_as: Option<(String, String)>,
    /// The rules of this kind.
    pub strategy: &'static dyn Strategy,
    /// The arena that the versions' schemas index.
    pub schemas: Arc<Schemas>,
    /// Whether this row comes from a CustomResourceDefinition.
    pub custom: bool,
    /// What only a custom resource has.
    pub definition: Option<Box<Definition>>,
}

/// What a CustomResourceDefinition says beyond the common row.
#[derive(Clone, Debug)]
pub struct Definition {
    /// Name of the CustomResourceDefinition object.
    pub name: String,
    /// Its uid.
    pub uid: String,
    /// `spec.conversion`, as written: strategy `None` or `Webhook` with its client configuration.
    pub conversion: Value,
    /// `spec.preserveUnknownFields`.
    pub preserve_unknown_fields: bool,
}

/// A version of a resource.
#[derive(Clone, Debug, Default)]
pub struct Version {
    /// `v1`.
    pub name: String,
    /// The type of its objects.
    pub schema: TypeId,
    /// The type of its lists, when there is one (built-in kinds that can be listed).
    pub list_schema: Option<TypeId>,
    /// What can be done with it, sorted.
    pub verbs: Vec<String>,
    /// `status`, `scale`, `log`, ...
    pub subresources: Vec<Subresource>,
    /// What field selectors may name, besides `metadata.name` and (if namespaced) `metadata.namespace`.
    pub selectable_fields: Vec<SelectableField>,
    /// Printer columns of a custom resource.
    pub columns: Vec<PrinterColumn>,
    /// Whether requests may name it.
    pub served: bool,
    /// Text of the `Warning` header that each request gets, when the version is deprecated.
    pub deprecated_warning: Option<String>,
    /// The schema of a custom resource as it was written, JSON text (a tree would weigh ten times as much):
    /// for OpenAPI, and for who evaluates its CEL rules.
    pub openapi: Option<Arc<str>>,
    /// The scale subresource's paths.
    pub scale: Option<ScalePaths>,
    /// What upstream's discovery calls `storageVersionHash`.
    pub storage_version_hash: Option<String>,
}

/// `spec.versions[].subresources.scale`, each path as its segments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScalePaths {
    /// `specReplicasPath`.
    pub spec_replicas: Vec<String>,
    /// `statusReplicasPath`.
    pub status_replicas: Vec<String>,
    /// `labelSelectorPath`.
    pub label_selector: Option<Vec<String>>,
}

/// A subresource of a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subresource {
    /// `status`; `proxy` stands for paths below it, too.
    pub name: String,
    /// Group of `kind` (`autoscaling` for scale, `policy` for eviction); the resource's own where discovery names none.
    pub group: String,
    /// Version of `kind`.
    pub version: String,
    /// What is sent and answered; `PodProxyOptions` and the like for connections.
    pub kind: String,
    /// What can be done with it, sorted.
    pub verbs: Vec<String>,
    /// The type of `kind`, when it has a schema.
    pub schema: Option<TypeId>,
    /// Whether discovery writes group and version out.
    pub foreign: bool,
}

/// A field that a field selector may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectableField {
    /// Its name in selectors.
    pub path: String,
    /// Where its value is: the first of these paths that holds something.
    pub pointers: Vec<Vec<String>>,
    /// Its text when nothing is there: `""`, `"false"`, `"0"`.
    pub default: String,
}

/// `additionalPrinterColumns` of a custom resource.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct PrinterColumn {
    /// Heading.
    pub name: String,
    /// `string`, `integer`, `number`, `boolean` or `date`.
    pub kind: String,
    /// OpenAPI format.
    pub format: String,
    /// Prose.
    pub description: String,
    /// 0 is always shown; more only in wide tables.
    pub priority: i32,
    /// `.spec.replicas`.
    pub json_path: String,
}

/// Where a resource's objects live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// In the store.
    Store,
    /// In another role, by its name.
    Virtual(&'static str),
    /// Nowhere: a review is answered and forgotten.
    ReviewOnly,
}

// === impl Resource ===

impl Resource {
    /// `pods` or `deployments.apps`: the name that errors, RBAC and quota use.
    pub fn gr(&self) -> String {
        if self.group.is_empty() { self.plural.clone() } else { format!("{}.{}", self.plural, self.group) }
    }

    /// A version of this resource that is served.
    pub fn version(&self, name: &str) -> Option<&Version> {
        self.versions.iter().find(|version| version.name == name && version.served)
    }

    /// The version that the store holds.
    pub fn stored(&self) -> &Version {
        let found = self.versions.iter().find(|version| version.name == self.storage_version);
        // Every constructor puts the storage version among the versions.
        found.unwrap_or(&self.versions[0])
    }

    /// `apps/v1` of one of this resource's versions.
    pub fn api_version(&self, version: &str) -> String {
        crate::meta::join_api_version(&self.group, version)
    }

    /// The key below which the store holds the objects, `/registry/pods/`, as upstream names it.
    pub fn storage_prefix(&self) -> String {
        let (group, plural) = match &self.stored_as {
            Some((group, plural)) => (group.as_str(), plural.as_str()),
            None => (self.group.as_str(), self.plural.as_str()),
        };
        if self.custom || matches!(group, "apiextensions.k8s.io" | "apiregistration.k8s.io") {
            return format!("/registry/{group}/{plural}/");
        }
        let name = match (group, plural) {
            ("", "replicationcontrollers") => "controllers",
            ("", "endpoints") => "services/endpoints",
            ("", "services") => "services/specs",
            ("", "nodes") => "minions",
            ("networking.k8s.io", "ingresses") => "ingress",
            (_, plural) => plural,
        };
        format!("/registry/{name}/")
    }

    /// The field behind a name in a field selector.
    pub fn selectable(&self, version: &str, path: &str) -> Option<Cow<'_, SelectableField>> {
        let own = self.versions.iter().find(|candidate| candidate.name == version).unwrap_or_else(|| self.stored());
        if let Some(field) = own.selectable_fields.iter().find(|field| field.path == path) {
            return Some(Cow::Borrowed(field));
        }
        let last = match path {
            "metadata.name" => "name",
            "metadata.namespace" if self.namespaced || !self.custom => "namespace",
            _ => return None,
        };
        Some(Cow::Owned(SelectableField {
            path: path.to_owned(),
            pointers: vec![vec!["metadata".to_owned(), last.to_owned()]],
            default: String::new(),
        }))
    }

    /// Why `path` cannot be selected by, in upstream's words.
    pub fn unselectable(&self, version: &str, path: &str) -> String {
        let own = self.versions.iter().find(|candidate| candidate.name == version).unwrap_or_else(|| self.stored());
        if own.selectable_fields.is_empty() && !self.custom {
            format!("\"{path}\" is not a known field selector: only \"metadata.name\", \"metadata.namespace\"")
        } else {
            format!("field label not supported: {path}")
        }
    }
}

impl fmt::Debug for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Resource({})", self.gr())
    }
}

// === impl Version ===

impl Version {
    /// A subresource by its name.
    pub fn subresource(&self, name: &str) -> Option<&Subresource> {
        self.subresources.iter().find(|subresource| subresource.name == name)
    }

    /// Whether `verb` is allowed on the resource itself.
    pub fn has_verb(&self, verb: &str) -> bool {
        self.verbs.iter().any(|candidate| candidate == verb)
    }
}

// === impl SelectableField ===

impl SelectableField {
    /// The field's text in an object: what a selector compares with.
    pub fn text<'a>(&'a self, object: &'a Value) -> Cow<'a, str> {
        for pointer in &self.pointers {
            let found = pointer.iter().try_fold(object, |value, segment| match value {
                Value::Array(items) => items.get(segment.parse::<usize>().ok()?),
                value => value.get(segment),
            });
            match found {
                Some(Value::String(text)) if !text.is_empty() => return Cow::Borrowed(text),
                Some(Value::Bool(flag)) => return Cow::Borrowed(if *flag { "true" } else { "false" }),
                Some(Value::Number(number)) => return Cow::Owned(number.to_string()),
                _ => {}
            }
        }
        Cow::Borrowed(&self.default)
    }
}

/// Rows under their keys: (group, version, plural) and (group, version, kind).
#[derive(Default)]
struct Table {
    rows: Vec<Arc<Resource>>,
    by_plural: HashMap<String, usize>,
    by_kind: HashMap<String, usize>,
}

impl Table {
    fn new(rows: Vec<Arc<Resource>>) -> Self {
        let mut table = Table { rows, ..Table::default() };
        for (index, row) in table.rows.iter().enumerate() {
            for version in row.versions.iter().filter(|version| version.served) {
                let key = |name: &str| key(&row.group, &version.name, name);
                table.by_plural.insert(key(&row.plural), index);
                table.by_kind.entry(key(&row.kind)).or_insert(index);
                if !row.list_kind.is_empty() {
                    table.by_kind.entry(key(&row.list_kind)).or_insert(index);
                }
            }
        }
        table
    }
}

fn key(group: &str, version: &str, name: &str) -> String {
    let mut key = String::with_capacity(group.len() + version.len() + name.len() + 2);
    for part in [group, "/", version, "/", name] {
        key.push_str(part);
    }
    key
}

/// A snapshot of all resources.
#[derive(Clone)]
pub struct Registry {
    builtin: Arc<Table>,
    custom: Arc<Table>,
}

// === impl Registry ===

impl Registry {
    /// The built-in resources, loaded on first use and shared.
    pub fn builtin() -> Arc<Registry> {
        static BUILTIN: std::sync::OnceLock<Arc<Registry>> = std::sync::OnceLock::new();
        BUILTIN
            .get_or_init(|| {
                Arc::new(Registry {
                    builtin: Arc::new(Table::new(crate::facts::resources())),
                    custom: Arc::new(Table::default()),
                })
            })
            .clone()
    }

    /// The built-in resources and these custom ones (instead of those that this snapshot has).
    pub fn with_custom(&self, custom: Vec<Arc<Resource>>) -> Registry {
        Registry { builtin: self.builtin.clone(), custom: Arc::new(Table::new(custom)) }
    }

    /// A served resource by its name in paths.
    pub fn find(&self, group: &str, version: &str, plural: &str) -> Option<Arc<Resource>> {
        let key = key(group, version, plural);
        [&self.builtin, &self.custom].into_iter().find_map(|table| Some(table.rows[*table.by_plural.get(&key)?].clone()))
    }

    /// A served resource by its objects' (or lists') kind.
    pub fn find_kind(&self, group: &str, version: &str, kind: &str) -> Option<Arc<Resource>> {
        let key = key(group, version, kind);
        [&self.builtin, &self.custom].into_iter().find_map(|table| Some(table.rows[*table.by_kind.get(&key)?].clone()))
    }

    /// A resource by group and plural, in whatever version.
    pub fn find_resource(&self, group: &str, plural: &str) -> Option<Arc<Resource>> {
        self.resources().find(|row| row.group == group && row.plural == plural).cloned()
    }

    /// All rows, built-in ones first.
    pub fn resources(&self) -> impl Iterator<Item = &Arc<Resource>> {
        self.builtin.rows.iter().chain(&self.custom.rows)
    }

    /// The custom rows.
    pub fn custom(&self) -> impl Iterator<Item = &Arc<Resource>> {
        self.custom.rows.iter()
    }
}
