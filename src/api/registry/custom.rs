//! Rows out of CustomResourceDefinitions.

use std::sync::Arc;

use serde_json::Value;

use super::{Definition, PrinterColumn, Resource, ScalePaths, SelectableField, Storage, Subresource, Version};
use crate::field::FieldError;
use crate::meta;
use crate::schema::{Builder, Schemas};
use crate::strategy::custom_strategy;

const VERBS: [&str; 8] = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];

impl Resource {
    /// The row of an `apiextensions.k8s.io/v1` CustomResourceDefinition, or what is wrong with its schemas.
    /// Names come from `spec.names`; whether they are accepted (no conflicts) is the caller's to know.
    pub fn from_crd(crd: &Value) -> Result<Resource, Vec<FieldError>> {
        let spec = &crd["spec"];
        let names = &spec["names"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let texts = |value: &Value| value.as_array().into_iter().flatten().filter_map(|item| Some(item.as_str()?.to_owned())).collect();
        let group = text(&spec["group"]);
        let kind = text(&names["kind"]);
        let singular = match names["singular"].as_str() {
            Some(singular) if !singular.is_empty() => singular.to_owned(),
            _ => kind.to_lowercase(),
        };
        let list_kind = match names["listKind"].as_str() {
            Some(list_kind) if !list_kind.is_empty() => list_kind.to_owned(),
            _ => format!("{kind}List"),
        };
        let base = Schemas::builtin();
        let mut builder = Builder::new(base.clone());
        let mut versions = Vec::new();
        // Upstream moves a schema that all versions share to one place, and reports it there.
        let mut schemas = spec["versions"].as_array().into_iter().flatten().map(|version| &version["schema"]);
        let shared = schemas.next().is_some_and(|first| schemas.all(|other| other == first));
        for (index, version) in spec["versions"].as_array().into_iter().flatten().enumerate() {
            versions.push(custom_version(&mut builder, &base, &group, &kind, index, version, shared));
        }
        let stored = spec["versions"].as_array().into_iter().flatten().find(|version| version["storage"] == true);
        let storage_version = text(&stored.unwrap_or(&Value::Null)["name"]);
        if storage_version.is_empty() {
            return Err(vec![FieldError::invalid(
                "spec.versions",
                spec["versions"].clone(),
                "must have exactly one version marked as storage version",
            )]);
        }
        let schemas = builder.finish().map_err(|mut errors| {
            // A shared schema is read once for each version.
            let mut seen = Vec::new();
            errors.retain(|error| {
                let text = error.to_string();
                let new = !seen.contains(&text);
                seen.push(text);
                new
            });
            errors
        })?;
        versions.sort_by(|a, b| version_priority(&b.name).cmp(&version_priority(&a.name)).then_with(|| a.name.cmp(&b.name)));
        Ok(Resource {
            strategy: custom_strategy(),
            group,
            plural: text(&names["plural"]),
            singular,
            kind,
            list_kind,
            short_names: texts(&names["shortNames"]),
            categories: texts(&names["categories"]),
            namespaced: spec["scope"] == "Namespaced",
            versions,
            storage_version,
            storage: Storage::Store,
            stored_as: None,
            schemas: Arc::new(schemas),
            custom: true,
            definition: Some(Box::new(Definition {
                name: meta::name(crd).to_owned(),
                uid: meta::uid(crd).to_owned(),
                conversion: spec["conversion"].clone(),
                preserve_unknown_fields: spec["preserveUnknownFields"] == true,
            })),
        })
    }
}

fn custom_version(builder: &mut Builder, base: &Schemas, group: &str, kind: &str, index: usize, version: &Value, shared: bool) -> Version {
    let name = version["name"].as_str().unwrap_or_default();
    let schema = &version["schema"]["openAPIV3Schema"];
    let path = if shared { "spec.validation.openAPIV3Schema".to_owned() } else { format!("spec.versions[{index}].schema.openAPIV3Schema") };
    let verbs = |verbs: &[&str]| verbs.iter().map(|verb| (*verb).to_owned()).collect::<Vec<_>>();
    let ty = builder.version(&path, &definition_name(group, name, kind), schema);
    let mut subresources = Vec::new();
    let declared = &version["subresources"];
    if declared["status"].is_object() {
        subresources.push(Subresource {
            name: "status".to_owned(),
            group: group.to_owned(),
            version: name.to_owned(),
            kind: kind.to_owned(),
            verbs: verbs(&["get", "patch", "update"]),
            schema: Some(ty),
            foreign: false,
        });
    }
    let scale = declared["scale"].as_object().map(|scale| ScalePaths {
        spec_replicas: segments(scale.get("specReplicasPath")),
        status_replicas: segments(scale.get("statusReplicasPath")),
        label_selector: scale.get("labelSelectorPath").and_then(Value::as_str).filter(|path| !path.is_empty()).map(split),
    });
    if scale.is_some() {
        subresources.push(Subresource {
            name: "scale".to_owned(),
            group: "autoscaling".to_owned(),
            version: "v1".to_owned(),
            kind: "Scale".to_owned(),
            verbs: verbs(&["get", "patch", "update"]),
            schema: base.named("io.k8s.api.autoscaling.v1.Scale"),
            foreign: true,
        });
    }
    let selectable = version["selectableFields"].as_array().into_iter().flatten().filter_map(|field| {
        let path = field["jsonPath"].as_str()?;
        let path = path.strip_prefix('.').unwrap_or(path);
        Some(SelectableField { path: path.to_owned(), pointers: vec![split(path)], default: String::new() })
    });
    Version {
        name: name.to_owned(),
        schema: ty,
        list_schema: None,
        verbs: verbs(&VERBS),
        subresources,
        selectable_fields: selectable.collect(),
        columns: version["additionalPrinterColumns"].as_array().into_iter().flatten().map(column).collect(),
        served: version["served"] == true,
        deprecated_warning: deprecation(group, kind, version),
        openapi: Some(schema.to_string().into()),
        scale,
        storage_version_hash: None,
    }
}

/// What a CustomResourceDefinition asks for and does not get: texts for `Warning` headers.
pub fn warnings(crd: &Value) -> Vec<String> {
    fn has_rules(schema: &Value) -> bool {
        match schema {
            Value::Object(map) => map.iter().any(|(key, value)| key == "x-kubernetes-validations" || has_rules(value)),
            Value::Array(items) => items.iter().any(has_rules),
            _ => false,
        }
    }
    let versions = crd["spec"]["versions"].as_array().into_iter().flatten().enumerate();
    let with_rules = versions.filter(|(_, version)| has_rules(&version["schema"]["openAPIV3Schema"]));
    with_rules
        .map(|(index, _)| {
            format!("spec.versions[{index}].schema.openAPIV3Schema: x-kubernetes-validations are kept and published, but not evaluated by this server")
        })
        .collect()
}

fn column(column: &Value) -> PrinterColumn {
    let text = |name: &str| column[name].as_str().unwrap_or_default().to_owned();
    PrinterColumn {
        name: text("name"),
        kind: text("type"),
        format: text("format"),
        description: text("description"),
        priority: column["priority"].as_i64().unwrap_or(0) as i32,
        json_path: text("jsonPath"),
    }
}

fn deprecation(group: &str, kind: &str, version: &Value) -> Option<String> {
    if version["deprecated"] != true {
        return None;
    }
    let name = version["name"].as_str().unwrap_or_default();
    let own = version["deprecationWarning"].as_str().map(str::to_owned);
    Some(own.unwrap_or_else(|| format!("{group}/{name} {kind} is deprecated")))
}

fn segments(path: Option<&Value>) -> Vec<String> {
    split(path.and_then(Value::as_str).unwrap_or_default())
}

fn split(path: &str) -> Vec<String> {
    path.split('.').filter(|segment| !segment.is_empty()).map(str::to_owned).collect()
}

/// Name of a custom kind's definition in OpenAPI: the group's labels reversed, `com.example.stable.v1.CronTab`.
pub fn definition_name(group: &str, version: &str, kind: &str) -> String {
    let mut labels: Vec<&str> = group.split('.').collect();
    labels.reverse();
    format!("{}.{version}.{kind}", labels.join("."))
}

/// Kubernetes' order of versions: GA before beta before alpha, then by number, then the rest by name.
pub fn version_priority(version: &str) -> (u8, u32, u32) {
    let parse = || {
        let rest = version.strip_prefix('v')?;
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let major: u32 = rest[..digits].parse().ok()?;
        match &rest[digits..] {
            "" => Some((3, major, 0)),
            rest => {
                let (stage, minor) = match rest.strip_prefix("beta") {
                    Some(minor) => (2, minor),
                    None => (1, rest.strip_prefix("alpha")?),
                };
                Some((stage, major, minor.parse().ok()?))
            }
        }
    };
    parse().unwrap_or((0, 0, 0))
}
