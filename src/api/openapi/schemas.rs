//! Types of the arena, and custom schemas, as OpenAPI.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::META;
use super::describe::Descriptions;
use crate::schema::{Checks, Field, ListType, MapType, PatchStrategy, Schemas, Shape, Special, Type, TypeId};

/// Which OpenAPI a document is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    V2,
    V3,
}

impl Dialect {
    /// Where definitions are.
    pub(super) fn definitions(self) -> &'static str {
        match self {
            Dialect::V2 => "#/definitions/",
            Dialect::V3 => "#/components/schemas/",
        }
    }
}

const QUANTITY: &str = "io.k8s.apimachinery.pkg.api.resource.Quantity";
const INT_OR_STRING: &str = "io.k8s.apimachinery.pkg.util.intstr.IntOrString";
const RAW: &str = "io.k8s.apimachinery.pkg.runtime.RawExtension";

/// Writes definitions, and those that they refer to.
pub(super) struct Writer<'d> {
    dialect: Dialect,
    descriptions: &'d Descriptions,
    schemas: Arc<Schemas>,
    done: Map<String, Value>,
    queue: Vec<String>,
}

impl<'d> Writer<'d> {
    pub(super) fn new(dialect: Dialect, descriptions: &'d Descriptions) -> Self {
        Writer { dialect, descriptions, schemas: Schemas::builtin(), done: Map::new(), queue: Vec::new() }
    }

    /// Asks for a built-in definition.
    pub(super) fn need(&mut self, name: &str) {
        if !self.done.contains_key(name) {
            self.done.insert(name.to_owned(), Value::Null);
            self.queue.push(name.to_owned());
        }
    }

    /// Adds a definition as it is.
    pub(super) fn put(&mut self, name: &str, definition: Value) {
        self.done.insert(name.to_owned(), definition);
    }

    pub(super) fn pointer(&self, name: &str) -> Value {
        json!({"$ref": format!("{}{name}", self.dialect.definitions())})
    }

    /// A reference to a built-in definition, which is asked for.
    pub(super) fn reference(&mut self, name: &str) -> Value {
        self.need(name);
        self.pointer(name)
    }

    pub(super) fn finish(mut self) -> Map<String, Value> {
        while let Some(name) = self.queue.pop() {
            let definition = self.definition(&name);
            self.done.insert(name, definition);
        }
        self.done
    }

    fn definition(&mut self, name: &str) -> Value {
        let mut definition = self.odd(name).unwrap_or_else(|| {
            let schemas = self.schemas.clone();
            match schemas.named(name) {
                Some(id) => self.object(schemas.ty(id), name),
                None => json!({"type": "object"}),
            }
        });
        if let Some(text) = self.descriptions.get(name, "") {
            definition["description"] = text.into();
        }
        definition
    }

    /// Definitions of types with an encoding of their own.
    fn odd(&self, name: &str) -> Option<Value> {
        let v3 = self.dialect == Dialect::V3;
        Some(match name.strip_prefix(META) {
            Some(".Time" | ".MicroTime") => json!({"type": "string", "format": "date-time"}),
            Some(".Duration") => json!({"type": "string"}),
            Some(".FieldsV1") => json!({"type": "object"}),
            _ => match name {
                QUANTITY if v3 => json!({"oneOf": [{"type": "string"}, {"type": "number"}]}),
                QUANTITY => json!({"type": "string"}),
                INT_OR_STRING if v3 => json!({"format": "int-or-string", "oneOf": [{"type": "integer"}, {"type": "string"}]}),
                INT_OR_STRING => json!({"type": "string", "format": "int-or-string"}),
                RAW => json!({"type": "object"}),
                _ => return None,
            },
        })
    }

    fn object(&mut self, ty: &Type, name: &str) -> Value {
        if ty.special != Special::None {
            // A schema or something else: anything.
            return json!({});
        }
        let mut definition = json!({"type": "object"});
        let mut properties = Map::new();
        let mut required = Vec::new();
        for field in &ty.fields {
            let text = self.descriptions.get(name, &field.name).map(str::to_owned).or_else(|| self.common(ty, name, &field.name));
            properties.insert(field.name.to_string(), self.property(field, text.as_deref()));
            if field.required {
                required.push(Value::from(&*field.name));
            }
        }
        if !properties.is_empty() {
            definition["properties"] = properties.into();
        }
        if !required.is_empty() {
            definition["required"] = required.into();
        }
        if ty.map_type == MapType::Atomic {
            definition["x-kubernetes-map-type"] = "atomic".into();
        }
        definition
    }

    /// Texts for fields that every list has: `k8s-openapi` has no definitions of lists.
    fn common(&self, ty: &Type, name: &str, field: &str) -> Option<String> {
        let kind = name.rsplit('.').next()?.strip_suffix("List")?;
        ty.field("items")?;
        match field {
            "apiVersion" | "kind" => self.descriptions.get("io.k8s.api.core.v1.Pod", field).map(str::to_owned),
            "items" => Some(format!("The {kind} objects.")),
            "metadata" => Some("Metadata of the list.".to_owned()),
            _ => None,
        }
    }

    fn property(&mut self, field: &Field, description: Option<&str>) -> Value {
        let mut property = if &*field.name == "fieldsV1" {
            self.reference(&format!("{META}.FieldsV1"))
        } else {
            self.node(field.ty)
        };
        let mut add = |key: &str, value: Value| {
            property[key] = value;
        };
        if let Some(text) = description {
            add("description", text.into());
        }
        if let Some(default) = &field.default {
            add("default", Value::clone(default));
        }
        if let Some(key) = &field.merge_key {
            add("x-kubernetes-patch-merge-key", key.to_string().into());
        }
        let patch = match field.patch_strategy {
            PatchStrategy { merge: true, retain_keys: true, .. } => "merge,retainKeys",
            PatchStrategy { merge: true, .. } => "merge",
            PatchStrategy { retain_keys: true, .. } => "retainKeys",
            PatchStrategy { replace: true, .. } => "replace",
            _ => "",
        };
        if !patch.is_empty() {
            add("x-kubernetes-patch-strategy", patch.into());
        }
        // In version 3 nothing may stand beside a reference.
        if self.dialect == Dialect::V3 && property.get("$ref").is_some() && property.as_object().is_some_and(|map| map.len() > 1) {
            let target = property["$ref"].take();
            if let Some(map) = property.as_object_mut() {
                map.remove("$ref");
            }
            property["allOf"] = json!([{"$ref": target}]);
        }
        property
    }

    fn node(&mut self, id: TypeId) -> Value {
        let schemas = self.schemas.clone();
        let ty = schemas.ty(id);
        let mut node = match ty.shape {
            Shape::Object => match &ty.name {
                Some(name) => return self.reference(name),
                None => json!({"type": "object"}),
            },
            Shape::Any if ty.inner.is_some() => match &ty.name {
                Some(name) => return self.reference(name),
                None => json!({}),
            },
            Shape::Any => return self.reference(RAW),
            Shape::Quantity => return self.reference(QUANTITY),
            Shape::IntOrString => return self.reference(INT_OR_STRING),
            Shape::Time => return self.reference(&format!("{META}.Time")),
            Shape::MicroTime => return self.reference(&format!("{META}.MicroTime")),
            Shape::Duration => return self.reference(&format!("{META}.Duration")),
            Shape::Map(item) => json!({"type": "object", "additionalProperties": self.node(item)}),
            Shape::List(item) => json!({"type": "array", "items": self.node(item)}),
            Shape::String => json!({"type": "string"}),
            Shape::Integer => json!({"type": "integer"}),
            Shape::Number => json!({"type": "number"}),
            Shape::Boolean => json!({"type": "boolean"}),
            Shape::Bytes => json!({"type": "string", "format": "byte"}),
        };
        if let Some(checks) = &ty.checks {
            restrict(&mut node, checks);
        }
        if matches!(ty.shape, Shape::List(_)) {
            let (kind, keys) = match &ty.list_type {
                ListType::Atomic => ("atomic", None),
                ListType::Set => ("set", None),
                ListType::Map(keys) => ("map", Some(keys)),
            };
            node["x-kubernetes-list-type"] = kind.into();
            if let Some(keys) = keys {
                node["x-kubernetes-list-map-keys"] = keys.clone().into();
            }
        }
        if ty.map_type == MapType::Atomic {
            node["x-kubernetes-map-type"] = "atomic".into();
        }
        node
    }

    /// A custom schema for publication: version 3 takes it as it is, version 2 what it can express.
    pub(super) fn custom(&self, schema: &Value) -> Value {
        match self.dialect {
            Dialect::V3 => schema.clone(),
            Dialect::V2 => plain(schema),
        }
    }
}

fn restrict(node: &mut Value, checks: &Checks) {
    if let Some(values) = &checks.enum_values {
        node["enum"] = values.to_vec().into();
    }
    // Formats of declarative validation are no part of the published schema upstream.
    if let Some(format) = checks.format.as_deref().filter(|format| !format.starts_with("k8s-")) {
        node["format"] = format.into();
    }
}

/// What OpenAPI v2 clients understand of a structural schema; follows upstream's `ToStructuralOpenAPIV2`:
/// no logic, no nullable; what is nullable or keeps unknown fields is left open.
fn plain(schema: &Value) -> Value {
    let Some(map) = schema.as_object() else {
        return schema.clone();
    };
    let open = map.get("x-kubernetes-preserve-unknown-fields").is_some_and(|value| value == true);
    let nullable = map.get("nullable").is_some_and(|value| value == true);
    let mut out = Map::new();
    for (key, value) in map {
        match key.as_str() {
            "allOf" | "anyOf" | "oneOf" | "not" | "nullable" | "x-kubernetes-validations" => {}
            "properties" if !open && !nullable => {
                let properties = value.as_object().into_iter().flatten();
                let properties: Map<String, Value> = properties.map(|(name, schema)| (name.clone(), plain(schema))).collect();
                out.insert(key.clone(), properties.into());
            }
            "items" | "additionalProperties" if !open && !nullable => {
                out.insert(key.clone(), plain(value));
            }
            "type" if nullable || (open && map.contains_key("properties") && value != "object") => {}
            "properties" | "items" | "additionalProperties" => {}
            "required" if open || nullable => {}
            _ => {
                out.insert(key.clone(), value.clone());
            }
        }
    }
    out.into()
}
