//! OpenAPI v3 structural schemas of CustomResourceDefinitions, checked and put into an arena.
//!
//! Follows `apiextensions-apiserver/pkg/apiserver/schema`: what makes a schema structural, how pruning is
//! inherited, and which defaults are allowed. CEL rules (`x-kubernetes-validations`) are not compiled here:
//! they stay in the version's source schema for whoever evaluates them.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::{Checks, Field, GoField, ListType, MapType, Part, PatchStrategy, Pattern, Schemas, Shape, Type, TypeId};
use crate::field::FieldError;

const OBJECT_META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta";

/// Collects the schemas of one CRD's versions into one arena, and what is wrong with them.
pub struct Builder {
    schemas: Schemas,
    errors: Vec<FieldError>,
    defaults: Vec<(String, TypeId, Arc<Value>)>,
}

#[derive(Clone, Copy, PartialEq)]
enum Level {
    Root,
    Item,
    Field,
}

impl Builder {
    /// A builder whose types may refer to those of `base`.
    pub fn new(base: Arc<Schemas>) -> Self {
        Builder { schemas: Schemas::on(base), errors: Vec::new(), defaults: Vec::new() }
    }

    /// Adds a version's schema (`openAPIV3Schema`), found at `path` in the CRD. `name` becomes the type's
    /// name in OpenAPI.
    pub fn version(&mut self, path: &str, name: &str, schema: &Value) -> TypeId {
        let preserve = schema["x-kubernetes-preserve-unknown-fields"] == true;
        let id = self.node(schema, Level::Root, preserve, path);
        if let Some(ty) = self.schemas.ty_mut(id) {
            ty.name = Some(name.into());
        }
        id
    }

    /// The arena, or everything that makes the schemas unacceptable.
    pub fn finish(mut self) -> Result<Schemas, Vec<FieldError>> {
        self.schemas.seal();
        for (path, id, default) in std::mem::take(&mut self.defaults) {
            let mut pruned = Value::clone(&default);
            for unknown in self.schemas.prune(id, &mut pruned) {
                self.errors.push(FieldError::invalid(&*path, Value::clone(&default), format!("must not contain the unknown field {unknown}")));
            }
            for error in self.schemas.validate(id, &default) {
                let place = if error.path.is_empty() || error.path == "<nil>" { path.clone() } else { format!("{path}.{}", error.path) };
                self.errors.push(FieldError { path: place, ..error });
            }
        }
        if self.errors.is_empty() { Ok(self.schemas) } else { Err(self.errors) }
    }

    fn required(&mut self, path: &str, detail: &str) {
        self.errors.push(FieldError::required(path, detail));
    }

    fn forbidden(&mut self, path: &str, detail: &str) {
        self.errors.push(FieldError::forbidden(path, detail));
    }

    fn invalid(&mut self, path: &str, value: &Value, detail: impl Into<String>) {
        self.errors.push(FieldError::invalid(path, value.clone(), detail));
    }

    /// One node of the schema. `preserving`: an object without structure keeps unknown fields.
    fn node(&mut self, schema: &Value, level: Level, preserving: bool, path: &str) -> TypeId {
        let preserve = schema["x-kubernetes-preserve-unknown-fields"] == true;
        let int_or_string = schema["x-kubernetes-int-or-string"] == true;
        let embedded = schema["x-kubernetes-embedded-resource"] == true;
        self.extensions(schema, level, path);
        let shape = match schema["type"].as_str().unwrap_or("") {
            // Whatever type it says besides.
            _ if int_or_string => Shape::IntOrString,
            "object" => self.object_shape(schema, level, preserving || preserve, path),
            "array" => self.array_shape(schema, path),
            "string" => Shape::String,
            "integer" => Shape::Integer,
            "number" => Shape::Number,
            "boolean" => Shape::Boolean,
            "" if preserve => Shape::Any,
            "" => {
                self.required(&format!("{path}.type"), match level {
                    Level::Root => "must not be empty at the root",
                    Level::Item => "must not be empty for specified array items",
                    Level::Field => "must not be empty for specified object fields",
                });
                Shape::Any
            }
            _ => {
                let supported = ["array", "boolean", "integer", "number", "object", "string"];
                self.errors.push(FieldError::not_supported(format!("{path}.type"), schema["type"].clone(), &supported));
                Shape::Any
            }
        };
        if level == Level::Root && !schema["type"].is_null() && shape != Shape::Object && !matches!(shape, Shape::Map(_)) {
            self.invalid(&format!("{path}.type"), &schema["type"], "must be object at the root");
        }
        let mut ty = Type::new(shape);
        ty.nullable = schema["nullable"] == true;
        ty.embedded = embedded;
        // Properties beside `additionalProperties: true` keep what they do not name.
        let open = schema["additionalProperties"] == true && has_properties(schema);
        ty.preserve_unknown = preserve || open || (preserving && !has_properties(schema));
        ty.list_type = self.list_type(schema, path);
        if schema["x-kubernetes-map-type"] == "atomic" {
            ty.map_type = MapType::Atomic;
        }
        if shape == Shape::Object {
            ty.fields = self.fields(schema, level, embedded, ty.preserve_unknown, path);
        }
        let mut checks = self.checks(schema, int_or_string, path);
        // A field has a flag of its own; required names without a field are checked as parts.
        checks.required = checks.required.into_iter().filter(|name| ty.field(name).is_none()).collect();
        if level == Level::Root {
            self.metadata_part(schema, &mut checks, path);
        }
        if !is_void(&checks) {
            ty.checks = Some(Box::new(checks));
        }
        self.schemas.push(ty)
    }

    fn extensions(&mut self, schema: &Value, level: Level, path: &str) {
        let flag = |name: &str| schema[name] == true;
        let int_or_string = flag("x-kubernetes-int-or-string");
        if schema["x-kubernetes-preserve-unknown-fields"] == false {
            self.invalid(&format!("{path}.x-kubernetes-preserve-unknown-fields"), &Value::Bool(false), "must be true or undefined");
        }
        for name in ["x-kubernetes-preserve-unknown-fields", "x-kubernetes-embedded-resource"] {
            if int_or_string && flag(name) {
                self.invalid(&format!("{path}.{name}"), &Value::Bool(true), "must be false if x-kubernetes-int-or-string is true");
            }
        }
        let additional = !schema["additionalProperties"].is_null();
        if flag("x-kubernetes-embedded-resource") {
            let place = format!("{path}.type");
            match schema["type"].as_str().unwrap_or("") {
                "object" => {}
                "" => self.required(&place, "must be object if x-kubernetes-embedded-resource is true"),
                _ => self.invalid(&place, &schema["type"], "must be object if x-kubernetes-embedded-resource is true"),
            }
            if additional {
                self.forbidden(&format!("{path}.additionalProperties"), "must not be used if x-kubernetes-embedded-resource is set");
            }
            let empty = schema["properties"].as_object().is_none_or(Map::is_empty);
            if empty && !flag("x-kubernetes-preserve-unknown-fields") {
                self.required(
                    &format!("{path}.properties"),
                    "must not be empty if x-kubernetes-embedded-resource is true without x-kubernetes-preserve-unknown-fields",
                );
            }
        }
        if additional && level == Level::Root {
            self.forbidden(&format!("{path}.additionalProperties"), "must not be used at the root");
        }
        if additional && schema["additionalProperties"] != true && has_properties(schema) {
            self.forbidden(&format!("{path}.additionalProperties"), "additionalProperties and properties are mutual exclusive");
        }
        for name in ["$ref", "definitions", "dependencies", "patternProperties", "additionalItems", "id", "$schema"] {
            if !schema[name].is_null() && schema[name] != "" {
                self.forbidden(&format!("{path}.{name}"), &format!("{name} is not supported"));
            }
        }
        if schema["uniqueItems"] == true {
            self.forbidden(
                &format!("{path}.uniqueItems"),
                "uniqueItems cannot be set to true since the runtime complexity becomes quadratic",
            );
        }
    }

    fn object_shape(&mut self, schema: &Value, level: Level, preserving: bool, path: &str) -> Shape {
        match &schema["additionalProperties"] {
            Value::Object(_) => {
                let below = format!("{path}.additionalProperties");
                Shape::Map(self.node(&schema["additionalProperties"], Level::Field, preserving, &below))
            }
            Value::Bool(true) if level != Level::Root && !has_properties(schema) => {
                Shape::Map(self.schemas.push(Type::new(Shape::Any)))
            }
            _ => Shape::Object,
        }
    }

    fn array_shape(&mut self, schema: &Value, path: &str) -> Shape {
        let below = format!("{path}.items");
        match &schema["items"] {
            Value::Object(_) => Shape::List(self.node(&schema["items"], Level::Item, false, &below)),
            Value::Array(_) => {
                self.forbidden(&below, "items must be a schema object and not an array");
                Shape::List(self.schemas.push(Type::new(Shape::Any)))
            }
            _ => {
                self.required(&below, "must be specified");
                Shape::List(self.schemas.push(Type::new(Shape::Any)))
            }
        }
    }

    fn fields(&mut self, schema: &Value, level: Level, embedded: bool, preserving: bool, path: &str) -> Box<[Field]> {
        let required: Vec<&str> = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let whole = level == Level::Root || embedded;
        let mut fields = Vec::new();
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            let below = format!("{path}.properties[{name}]");
            if whole && matches!(name.as_str(), "apiVersion" | "kind" | "metadata") {
                self.system_field(name, property, level, &below);
                continue;
            }
            let ty = self.node(property, Level::Field, preserving, &below);
            let mut field = self.field(name, ty);
            field.required = required.contains(&name.as_str());
            if let Some(default) = property.get("default") {
                let default = Arc::new(default.clone());
                self.defaults.push((format!("{below}.default"), ty, default.clone()));
                field.default = Some(default);
            }
            fields.push(field);
        }
        if whole {
            for name in ["apiVersion", "kind"] {
                let ty = self.schemas.push(Type::new(Shape::String));
                fields.push(self.field(name, ty));
            }
            if let Some(metadata) = self.schemas.named(OBJECT_META) {
                let mut field = self.field("metadata", metadata);
                field.required = required.contains(&"metadata");
                fields.push(field);
            }
        }
        fields.sort_by(|a, b| a.name.cmp(&b.name));
        fields.into()
    }

    fn field(&self, name: &str, ty: TypeId) -> Field {
        let inner = self.schemas.ty(ty);
        Field {
            name: name.into(),
            ty,
            required: false,
            required_items: false,
            immutable: false,
            list_type: inner.list_type.clone(),
            map_type: inner.map_type,
            patch_strategy: PatchStrategy::default(),
            merge_key: None,
            default: None,
            proto: 0,
            go: GoField::default(),
            go_type: None,
        }
    }

    fn system_field(&mut self, name: &str, property: &Value, level: Level, path: &str) {
        let (expected, message) = if name == "metadata" { ("object", "must be object") } else { ("string", "must be string") };
        if property["type"] != expected {
            self.invalid(&format!("{path}.type"), &property["type"], message);
        }
        if name == "metadata" && level == Level::Root {
            let allowed = ["type", "properties", "description", "default"];
            let plain = property.as_object().is_none_or(|map| map.keys().all(|key| allowed.contains(&key.as_str())));
            let inner = property["properties"].as_object();
            let names = inner.is_none_or(|map| map.keys().all(|key| key == "name" || key == "generateName"));
            if !plain || !names {
                self.forbidden(path, "must not specify anything other than name and generateName, but metadata is implicitly specified");
            }
        }
        if property.get("default").is_some() {
            self.forbidden(&format!("{path}.default"), "must not be set in top-level metadata");
        }
    }

    /// Restrictions of `metadata.name` and `generateName`.
    fn metadata_part(&mut self, schema: &Value, checks: &mut Checks, path: &str) {
        let Some(names) = schema["properties"]["metadata"]["properties"].as_object() else {
            return;
        };
        let mut properties = Vec::new();
        for (name, schema) in names {
            let below = format!("{path}.properties[metadata].properties[{name}]");
            let part = Part { checks: self.checks(schema, false, &below), ..Part::default() };
            properties.push((Arc::from(name.as_str()), part));
        }
        let metadata = Part { properties: properties.into(), ..Part::default() };
        let root = Part { properties: [(Arc::from("metadata"), metadata)].into(), ..Part::default() };
        checks.all_of = std::mem::take(&mut checks.all_of).into_iter().chain([root]).collect();
    }

    fn list_type(&mut self, schema: &Value, path: &str) -> ListType {
        let place = format!("{path}.x-kubernetes-list-type");
        let keys_at = format!("{path}.x-kubernetes-list-map-keys");
        let keys: Vec<String> =
            schema["x-kubernetes-list-map-keys"].as_array().into_iter().flatten().filter_map(|key| Some(key.as_str()?.to_owned())).collect();
        let kind = schema["x-kubernetes-list-type"].as_str();
        if kind.is_some() && schema["type"] != "array" {
            self.invalid(&format!("{path}.type"), &schema["type"], "must be array if x-kubernetes-list-type is specified");
        }
        if !keys.is_empty() && kind != Some("map") {
            let detail = "must be map if x-kubernetes-list-map-keys is non-empty";
            if kind.is_none() {
                self.required(&place, detail);
            } else {
                self.invalid(&place, &schema["x-kubernetes-list-type"], detail);
            }
        }
        match kind {
            None | Some("atomic") => ListType::Atomic,
            Some("set") => {
                let items = &schema["items"];
                let detail = "must be atomic as item of a list with x-kubernetes-list-type=set";
                let list = &items["x-kubernetes-list-type"];
                if items["type"] == "array" && !list.is_null() && *list != "atomic" {
                    self.invalid(&format!("{path}.items.x-kubernetes-list-type"), list, detail);
                }
                if items["type"] == "object" && items["x-kubernetes-map-type"] != "atomic" {
                    self.invalid(&format!("{path}.items.x-kubernetes-map-type"), list, detail);
                }
                if items["nullable"] == true {
                    self.forbidden(&format!("{path}.items.nullable"), "cannot be nullable when x-kubernetes-list-type is set");
                }
                ListType::Set
            }
            Some("map") => {
                if keys.is_empty() {
                    self.required(&keys_at, "must not be empty if x-kubernetes-list-type is map");
                }
                let items = &schema["items"];
                if items["type"] != "object" {
                    self.invalid(&format!("{path}.items.type"), &items["type"], "must be object if parent array's x-kubernetes-list-type is map");
                }
                let required: Vec<&str> = items["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
                for (index, key) in keys.iter().enumerate() {
                    let property = &items["properties"][key.as_str()];
                    if keys[..index].contains(key) {
                        self.invalid(&keys_at, &schema["x-kubernetes-list-map-keys"], "must not contain duplicate entries");
                    }
                    if property.is_null() {
                        self.invalid(&keys_at, &schema["x-kubernetes-list-map-keys"], "entries must all be names of item properties");
                    } else if matches!(property["type"].as_str(), Some("object" | "array")) {
                        self.invalid(
                            &format!("{path}.items.properties[{key}].type"),
                            &property["type"],
                            "must be a scalar type if parent array's x-kubernetes-list-type is map",
                        );
                    } else if !required.contains(&key.as_str()) && property.get("default").is_none() {
                        self.required(
                            &format!("{path}.items.properties[{key}].default"),
                            "this property is in x-kubernetes-list-map-keys, so it must have a default or be a required property",
                        );
                    }
                }
                ListType::Map(keys)
            }
            Some(_) => {
                let supported = ["atomic", "map", "set"];
                self.errors.push(FieldError::not_supported(place, schema["x-kubernetes-list-type"].clone(), &supported));
                ListType::Atomic
            }
        }
    }

    fn checks(&mut self, schema: &Value, int_or_string: bool, path: &str) -> Checks {
        let number = |name: &str| match &schema[name] {
            Value::Number(number) => Some(number.clone()),
            _ => None,
        };
        let count = |name: &str| schema[name].as_u64();
        let mut checks = Checks {
            enum_values: schema["enum"].as_array().map(|values| values.clone().into()),
            format: schema["format"].as_str().filter(|format| !format.is_empty()).map(Arc::from),
            minimum: number("minimum"),
            maximum: number("maximum"),
            exclusive_minimum: schema["exclusiveMinimum"] == true,
            exclusive_maximum: schema["exclusiveMaximum"] == true,
            multiple_of: schema["multipleOf"].as_f64().filter(|factor| *factor > 0.0),
            min_length: count("minLength"),
            max_length: count("maxLength"),
            min_items: count("minItems"),
            max_items: count("maxItems"),
            min_properties: count("minProperties"),
            max_properties: count("maxProperties"),
            required: schema["required"].as_array().into_iter().flatten().filter_map(|name| Some(name.as_str()?.into())).collect(),
            ..Checks::default()
        };
        if let Some(source) = schema["pattern"].as_str().filter(|source| !source.is_empty()) {
            match Pattern::new(source) {
                Ok(pattern) => checks.pattern = Some(Box::new(pattern)),
                Err(error) => self.invalid(
                    &format!("{path}.pattern"),
                    &schema["pattern"],
                    format!("must be a valid regular expression, but isn't: {error}"),
                ),
            }
        }
        checks.all_of = self.parts(schema, "allOf", int_or_string, path);
        checks.one_of = self.parts(schema, "oneOf", false, path);
        checks.any_of = self.parts(schema, "anyOf", int_or_string, path);
        if schema["not"].is_object() {
            checks.not = Some(Box::new(self.part(&schema["not"], false, &format!("{path}.not"))));
        }
        checks
    }

    fn parts(&mut self, schema: &Value, name: &str, int_or_string: bool, path: &str) -> Box<[Part]> {
        let parts = schema[name].as_array().into_iter().flatten().enumerate();
        let allowed = int_or_string && name == "anyOf" && is_int_or_string(&schema[name]);
        parts
            .map(|(index, part)| {
                // `allOf: [{anyOf: [{type: integer}, {type: string}]}]` is the other spelling that is allowed.
                let inner = int_or_string && name == "allOf" && index == 0;
                self.part_of(part, allowed, inner, &format!("{path}.{name}[{index}]"))
            })
            .collect()
    }

    fn part(&mut self, schema: &Value, typed: bool, path: &str) -> Part {
        self.part_of(schema, typed, false, path)
    }

    fn part_of(&mut self, schema: &Value, typed: bool, int_or_string: bool, path: &str) -> Part {
        let mut part = Part { checks: self.checks(schema, int_or_string, path), ..Part::default() };
        match schema["type"].as_str() {
            None | Some("") => {}
            Some("integer") if typed => part.kind = Some(Shape::Integer),
            Some("string") if typed => part.kind = Some(Shape::String),
            Some(_) => self.forbidden(&format!("{path}.type"), "must be empty to be structural"),
        }
        let undefined = ["additionalProperties", "default", "x-kubernetes-list-type", "x-kubernetes-map-type"];
        let empty = ["title", "description", "x-kubernetes-list-map-keys", "x-kubernetes-validations"];
        let unset = ["nullable", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-embedded-resource", "x-kubernetes-int-or-string"];
        for (names, detail) in [
            (&undefined[..], "must be undefined to be structural"),
            (&empty[..], "must be empty to be structural"),
            (&unset[..], "must be false to be structural"),
        ] {
            for name in names {
                let value = &schema[*name];
                if !value.is_null() && *value != false && *value != "" && value.as_array().is_none_or(|list| !list.is_empty()) {
                    self.forbidden(&format!("{path}.{name}"), detail);
                }
            }
        }
        let mut properties = Vec::new();
        for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
            let below = format!("{path}.properties[{name}]");
            if name == "metadata" {
                self.forbidden(&below, "must not be specified in a nested context");
            }
            properties.push((Arc::from(name.as_str()), self.part(schema, false, &below)));
        }
        part.properties = properties.into();
        if schema["items"].is_object() {
            part.items = Some(Box::new(self.part(&schema["items"], false, &format!("{path}.items"))));
        }
        part
    }
}

fn has_properties(schema: &Value) -> bool {
    schema["properties"].as_object().is_some_and(|properties| !properties.is_empty())
}

fn is_int_or_string(any_of: &Value) -> bool {
    *any_of == serde_json::json!([{"type": "integer"}, {"type": "string"}])
}

fn is_void(checks: &Checks) -> bool {
    let Checks {
        enum_values,
        format,
        pattern,
        minimum,
        maximum,
        exclusive_minimum: _,
        exclusive_maximum: _,
        multiple_of,
        min_length,
        max_length,
        max_bytes,
        min_items,
        max_items,
        unique_items,
        min_properties,
        max_properties,
        required,
        all_of,
        any_of,
        one_of,
        not,
        unions,
    } = checks;
    enum_values.is_none()
        && format.is_none()
        && pattern.is_none()
        && minimum.is_none()
        && maximum.is_none()
        && multiple_of.is_none()
        && [min_length, max_length, max_bytes, min_items, max_items, min_properties, max_properties].iter().all(|bound| bound.is_none())
        && !unique_items
        && required.is_empty()
        && all_of.is_empty()
        && any_of.is_empty()
        && one_of.is_empty()
        && not.is_none()
        && unions.is_empty()
}
