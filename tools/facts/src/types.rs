//! Types that stable resources are made of: Go's structs with what OpenAPI adds.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};
use regex::Regex;
use serde_json::{Map, Value, json};

use crate::discovery::{Resource, is_stable};
use crate::golang::{Definition, Field, Named, Package};
use crate::modules::Modules;

const META: &str = "k8s.io/apimachinery/pkg/apis/meta/v1";
const EXTENSIONS: &str = "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1";

/// Kinds that no resource has, but that are sent and answered.
const EXTRA: &[(&str, &str)] = &[
    (META, "APIGroup"),
    (META, "APIGroupList"),
    (META, "APIResourceList"),
    (META, "APIVersions"),
    (META, "CreateOptions"),
    (META, "DeleteOptions"),
    (META, "GetOptions"),
    (META, "ListOptions"),
    (META, "PartialObjectMetadata"),
    (META, "PartialObjectMetadataList"),
    (META, "PatchOptions"),
    (META, "Status"),
    (META, "UpdateOptions"),
    (META, "WatchEvent"),
    (META, "List"),
];

/// Values of enumerations that are written as constants of another package.
const ELSEWHERE: [(&str, &[&str]); 1] = [("io.k8s.api.discovery.v1.AddressType", &["IPv4", "IPv6"])];

/// Types with an encoding of their own, as the facts name them.
const SPECIAL: &[(&str, &str, &str)] = &[
    (META, "Time", "time"),
    (META, "MicroTime", "microtime"),
    (META, "Duration", "duration"),
    (META, "FieldsV1", "any"),
    ("k8s.io/apimachinery/pkg/runtime", "RawExtension", "any"),
    ("k8s.io/apimachinery/pkg/runtime", "Object", "any"),
    ("k8s.io/apimachinery/pkg/api/resource", "Quantity", "quantity"),
    ("k8s.io/apimachinery/pkg/util/intstr", "IntOrString", "intstr"),
    ("k8s.io/apimachinery/pkg/types", "UID", "string"),
    ("k8s.io/apimachinery/pkg/types", "NodeName", "string"),
    (EXTENSIONS, "JSON", "any"),
];

/// Go structs that are "a schema or something else".
const UNIONS: [(&str, &str); 3] = [
    ("JSONSchemaPropsOrArray", "schemaOrArray"),
    ("JSONSchemaPropsOrBool", "schemaOrBool"),
    ("JSONSchemaPropsOrStringArray", "schemaOrStrings"),
];

struct Collector {
    packages: BTreeMap<String, Package>,
    openapi: BTreeMap<String, Value>,
    done: BTreeMap<String, Value>,
    queue: Vec<(String, String)>,
    seen: BTreeSet<(String, String)>,
    stage: Regex,
}

/// `types.json`.
pub fn types(modules: &Modules, resources: &[Resource]) -> Result<Value> {
    let mut collector = Collector {
        packages: packages(modules)?,
        openapi: openapi(modules)?,
        done: BTreeMap::new(),
        queue: Vec::new(),
        seen: BTreeSet::new(),
        stage: Regex::new(r"^k8s:(?:alpha|beta)\([^)]*\)=\+(.*)$")?,
    };
    for resource in resources {
        let package = package_of(&resource.group, &resource.version);
        collector.enqueue(&package, &resource.kind)?;
        let verbs = resource.document["verbs"].as_array();
        if verbs.is_some_and(|verbs| verbs.iter().any(|verb| verb == "list")) {
            collector.enqueue(&package, &format!("{}List", resource.kind))?;
        }
        for sub in &resource.subresources {
            let kind = sub["kind"].as_str().unwrap_or_default();
            let group = sub["group"].as_str().unwrap_or(&resource.group);
            let version = sub["version"].as_str().unwrap_or(&resource.version);
            // Options of connections travel in the query.
            if !kind.ends_with("Options") && is_stable(version) {
                collector.enqueue(&package_of(group, version), kind)?;
            }
        }
    }
    for (package, kind) in EXTRA {
        collector.enqueue(package, kind)?;
    }
    while let Some((package, name)) = collector.queue.pop() {
        collector.collect(&package, &name).with_context(|| format!("collecting {package}.{name}"))?;
    }
    Ok(collector.done.into_iter().collect::<Map<_, _>>().into())
}

fn packages(modules: &Modules) -> Result<BTreeMap<String, Package>> {
    let mut packages = BTreeMap::new();
    let mut add = |module: &str, folder: &str| -> Result<()> {
        let package = Package::read(&modules.path(module, folder))?;
        packages.insert(format!("k8s.io/{module}/{folder}"), package);
        Ok(())
    };
    for group in modules.entries("api", "")? {
        if !modules.path("api", &group).is_dir() {
            continue;
        }
        // Unstable versions as well: stable types refer to a few of their types.
        for version in modules.entries("api", &group)?.iter().filter(|version| version.starts_with('v')) {
            add("api", &format!("{group}/{version}"))?;
        }
    }
    add("apimachinery", "pkg/apis/meta/v1")?;
    add("apiextensions-apiserver", "pkg/apis/apiextensions/v1")?;
    add("kube-aggregator", "pkg/apis/apiregistration/v1")?;
    add("metrics", "pkg/apis/metrics/v1beta1")?;
    Ok(packages)
}

/// All schemas of the OpenAPI v3 documents, by name.
fn openapi(modules: &Modules) -> Result<BTreeMap<String, Value>> {
    let mut schemas = BTreeMap::new();
    for file in modules.entries("kubernetes", "api/openapi-spec/v3")? {
        let mut document = modules.json("kubernetes", &format!("api/openapi-spec/v3/{file}"))?;
        if let Value::Object(found) = document["components"]["schemas"].take() {
            schemas.extend(found);
        }
    }
    Ok(schemas)
}

fn package_of(group: &str, version: &str) -> String {
    match group {
        "apiextensions.k8s.io" => EXTENSIONS.to_owned(),
        "apiregistration.k8s.io" => "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1".to_owned(),
        "metrics.k8s.io" => "k8s.io/metrics/pkg/apis/metrics/v1beta1".to_owned(),
        "" => format!("k8s.io/api/core/{version}"),
        group => format!("k8s.io/api/{}/{version}", group.split('.').next().unwrap_or(group)),
    }
}

/// Name of the OpenAPI definition of a Go type.
fn definition(package: &str, name: &str) -> String {
    format!("io.{}.{name}", package.trim_start_matches("k8s.io/").split('/').fold("k8s".to_owned(), |all, part| format!("{all}.{part}")))
}

impl Collector {
    fn named(&self, package: &str, name: &str) -> Result<&Named> {
        let found = self.packages.get(package).and_then(|package| package.types.get(name));
        found.with_context(|| format!("there is no type {package}.{name}"))
    }

    fn enqueue(&mut self, package: &str, name: &str) -> Result<()> {
        self.named(package, name)?;
        let key = (package.to_owned(), name.to_owned());
        if self.seen.insert(key.clone()) {
            self.queue.push(key);
        }
        Ok(())
    }

    /// A Go type as an expression of the facts; named structs are queued.
    fn expression(&mut self, package: &str, ty: &str) -> Result<String> {
        let ty = ty.trim_start_matches('*');
        if ty == "[]byte" {
            return Ok("bytes".to_owned());
        }
        if let Some(item) = ty.strip_prefix("[]") {
            return Ok(format!("[]{}", self.expression(package, item)?));
        }
        if let Some(rest) = ty.strip_prefix("map[") {
            let (_, value) = rest.split_once(']').context("a map has a key")?;
            return Ok(format!("{{}}{}", self.expression(package, value)?));
        }
        match ty {
            "string" | "bool" | "int32" | "int64" => return Ok(ty.to_owned()),
            "int" => return Ok("int64".to_owned()),
            "uint8" => return Ok("int32".to_owned()),
            "float64" => return Ok("double".to_owned()),
            "any" | "interface{}" => return Ok("any".to_owned()),
            _ => {}
        }
        let (owner, name) = match ty.split_once('.') {
            None => (package.to_owned(), ty.to_owned()),
            Some((alias, name)) => {
                let imports = &self.packages[package].imports;
                (imports.get(alias).with_context(|| format!("no import {alias}"))?.clone(), name.to_owned())
            }
        };
        if let Some((.., special)) = SPECIAL.iter().find(|(package, special, _)| *package == owner && *special == name) {
            return Ok((*special).to_owned());
        }
        let named = self.named(&owner, &name)?;
        let wraps = named.markers.iter().any(|marker| marker.starts_with("protobuf.nullable"));
        let is_enum = named.markers.iter().any(|marker| marker == "enum" || marker.ends_with("k8s:enum"));
        match &named.definition {
            Definition::Other(underlying) if !wraps && (!is_enum || underlying != "string") => {
                let underlying = underlying.clone();
                self.expression(&owner, &underlying)
            }
            _ => {
                self.enqueue(&owner, &name)?;
                Ok(definition(&owner, &name))
            }
        }
    }

    fn collect(&mut self, package: &str, name: &str) -> Result<()> {
        let key = definition(package, name);
        let named = self.named(package, name)?;
        let markers = named.markers.clone();
        let mut fact = Map::new();
        match &named.definition {
            Definition::Other(underlying) if underlying == "string" => {
                let mut values = self.packages[package].constants.get(name).cloned().unwrap_or_default();
                // Values that are constants of another package are not followed.
                values.extend(ELSEWHERE.iter().filter(|(of, _)| *of == key).flat_map(|(_, v)| v.iter().map(|v| (*v).to_owned())));
                values.sort();
                values.dedup();
                if values.is_empty() {
                    bail!("an enumeration without values");
                }
                fact.insert("enum".into(), values.into());
            }
            Definition::Other(underlying) => {
                let underlying = underlying.clone();
                let inner = self.expression(package, &underlying)?;
                fact.insert("wraps".into(), inner.into());
            }
            Definition::Struct(_) if package == EXTENSIONS && UNIONS.iter().any(|(union, _)| *union == name) => {
                let special = UNIONS.iter().find(|(union, _)| *union == name).map(|(_, special)| *special);
                fact.insert("special".into(), special.into());
            }
            Definition::Struct(fields) => {
                let fields = fields.clone();
                self.structure(package, &key, &fields, &mut fact)?;
            }
        }
        let openapi = self.openapi.get(&key);
        let atomic = openapi.is_some_and(|schema| schema["x-kubernetes-map-type"] == "atomic")
            || markers.iter().any(|marker| marker == "structType=atomic" || marker == "mapType=atomic");
        if atomic {
            fact.insert("map".into(), "atomic".into());
        }
        self.done.insert(key, fact.into());
        Ok(())
    }

    fn structure(&mut self, package: &str, key: &str, fields: &[Field], fact: &mut Map<String, Value>) -> Result<()> {
        let mut facts = Map::new();
        let mut inline = Vec::new();
        let mut unions: BTreeMap<String, (Vec<String>, bool)> = BTreeMap::new();
        let discriminated = fields.iter().any(|field| field.markers.iter().any(|marker| marker.contains("unionDiscriminator")));
        for field in fields {
            let Some((name, options)) = &field.json else { continue };
            if name == "-" {
                continue;
            }
            if options.iter().any(|option| option == "inline") || (name.is_empty() && field.name.is_empty()) {
                let mut entry = json!({"type": self.expression(package, &field.ty)?});
                if field.proto > 0 {
                    entry["proto"] = field.proto.into();
                }
                if field.ty.starts_with('*') {
                    entry["pointer"] = true.into();
                }
                inline.push(entry);
                continue;
            }
            let entry = self.field(package, key, name, options, field)?;
            for marker in field.markers.iter().map(|marker| self.unwrap(marker)).filter(|_| !discriminated) {
                let optional = marker.starts_with("k8s:zeroOrOneOfMember");
                if optional || marker.starts_with("k8s:unionMember") {
                    let union = marker.split_once('(').map_or("", |(_, rest)| rest).to_owned();
                    let member = unions.entry(union).or_default();
                    member.0.push(name.clone());
                    member.1 |= optional;
                }
            }
            facts.insert(name.clone(), entry);
        }
        if !facts.is_empty() {
            fact.insert("fields".into(), facts.into());
        }
        if !inline.is_empty() {
            fact.insert("inline".into(), inline.into());
        }
        if !unions.is_empty() {
            let union = |(members, optional)| if optional { json!({"members": members, "optional": true}) } else { json!({"members": members}) };
            fact.insert("unions".into(), unions.into_values().map(union).collect());
        }
        Ok(())
    }

    /// A marker without its stage: `k8s:beta(since: "1.37")=+k8s:required` is `k8s:required`.
    fn unwrap<'m>(&self, marker: &'m str) -> &'m str {
        self.stage.captures(marker).and_then(|found| found.get(1)).map_or(marker, |inner| inner.as_str())
    }

    fn field(&mut self, package: &str, key: &str, name: &str, options: &[String], field: &Field) -> Result<Value> {
        let ty = self.expression(package, &field.ty)?;
        let mut fact = Map::new();
        if field.proto > 0 {
            fact.insert("proto".into(), field.proto.into());
        }
        if field.ty.starts_with('*') {
            fact.insert("pointer".into(), true.into());
        }
        if options.iter().any(|option| option == "omitempty" || option == "omitzero") {
            fact.insert("omitempty".into(), true.into());
        }
        if options.iter().any(|option| option == "omitzero") {
            fact.insert("omitzero".into(), true.into());
        }
        match self.openapi.get(key) {
            Some(schema) => from_openapi(schema, name, &mut fact),
            None => from_markers(field, options, &mut fact),
        }
        self.rules(&ty, field, &mut fact);
        // Go's messages name a type by its own name, even when it is but a string.
        let plain = ["string", "bool", "int32", "int64", "int", "float64"];
        let go = field.ty.trim_start_matches('*');
        let named = go.chars().all(|c| c.is_alphanumeric() || c == '.') && !plain.contains(&go) && !ty.starts_with("io.");
        if named && !SPECIAL.iter().any(|(.., special)| *special == ty && special != &"string") {
            let (owner, name) = match go.split_once('.') {
                Some((alias, name)) => (self.packages[package].imports.get(alias).map_or(alias, String::as_str), name),
                None => (package, go),
            };
            fact.insert("go".into(), format!("{}.{name}", owner.rsplit('/').next().unwrap_or(owner)).into());
        }
        fact.insert("type".into(), ty.into());
        Ok(fact.into())
    }

    /// Rules of declarative validation.
    fn rules(&self, ty: &str, field: &Field, fact: &mut Map<String, Value>) {
        let markers: Vec<&str> = field.markers.iter().map(|marker| self.unwrap(marker)).collect();
        let custom = markers.iter().any(|marker| marker.starts_with("k8s:customUnique"));
        let mut item = Map::new();
        for marker in markers {
            match marker.strip_prefix("k8s:eachVal=+") {
                Some(inner) => rule(self.unwrap(inner), &mut item),
                None => rule(marker, fact),
            }
            let unique = marker.starts_with("k8s:listType=map") || marker.starts_with("k8s:listType=set");
            if unique && !custom {
                fact.insert("unique".into(), true.into());
            }
            if marker == "k8s:required" {
                let lists = ty.starts_with("[]") || ty.starts_with("{}");
                fact.insert(if lists { "requiredItems" } else { "required" }.into(), true.into());
            }
        }
        if !item.is_empty() {
            fact.insert("item".into(), item.into());
        }
    }
}

fn rule(marker: &str, fact: &mut Map<String, Value>) {
    let Some((name, value)) = marker.split_once('=') else {
        if marker == "k8s:immutable" {
            fact.insert("immutable".into(), true.into());
        }
        return;
    };
    let key = match name {
        "k8s:format" => {
            fact.insert("format".into(), value.trim_matches('"').into());
            return;
        }
        "k8s:minimum" => "min",
        "k8s:maximum" => "max",
        "k8s:minLength" => "minLength",
        "k8s:maxLength" => "maxLength",
        "k8s:maxBytes" => "maxBytes",
        "k8s:minItems" => "minItems",
        "k8s:maxItems" => "maxItems",
        _ => return,
    };
    if let Ok(number) = value.parse::<i64>() {
        fact.insert(key.into(), number.into());
    }
}

fn from_openapi(schema: &Value, name: &str, fact: &mut Map<String, Value>) {
    let property = &schema["properties"][name];
    if schema["required"].as_array().is_some_and(|required| required.iter().any(|required| required == name)) {
        fact.insert("required".into(), true.into());
    }
    let keys = [
        ("x-kubernetes-list-type", "list"),
        ("x-kubernetes-list-map-keys", "keys"),
        ("x-kubernetes-map-type", "map"),
        ("x-kubernetes-patch-strategy", "patch"),
        ("x-kubernetes-patch-merge-key", "mergeKey"),
    ];
    for (from, to) in keys {
        if !property[from].is_null() && property[from] != "granular" {
            fact.insert(to.into(), property[from].clone());
        }
    }
    let default = &property["default"];
    let empty = default.is_null() || *default == "" || *default == 0 || *default == false || *default == json!({});
    if !empty {
        fact.insert("default".into(), default.clone());
    }
}

/// The same out of the Go source, for types that no OpenAPI document has.
fn from_markers(field: &Field, options: &[String], fact: &mut Map<String, Value>) {
    let has = |marker: &str| field.markers.iter().any(|found| found == marker);
    if !has("optional") && !options.iter().any(|option| option == "omitempty" || option == "omitzero") {
        fact.insert("required".into(), true.into());
    }
    let values = |prefix: &str| field.markers.iter().filter_map(|marker| marker.strip_prefix(prefix)).map(str::to_owned).collect::<Vec<_>>();
    if let Some(list) = values("listType=").pop() {
        fact.insert("list".into(), list.into());
    }
    let keys = values("listMapKey=");
    if !keys.is_empty() {
        fact.insert("keys".into(), keys.into());
    }
    if let Some(patch) = &field.patch_strategy {
        fact.insert("patch".into(), patch.as_str().into());
    }
    if let Some(key) = &field.patch_merge_key {
        fact.insert("mergeKey".into(), key.as_str().into());
    }
}
