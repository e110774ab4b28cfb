//! Validation by schema: required, enums, bounds, formats, uniqueness, logic; in upstream's words.
//!
//! Go types and custom types differ in two ways. In a custom object a wrong JSON type is an error here (a
//! built-in one never gets this far) and `required` means present. In a Go struct an absent field reads as
//! its zero value, so that `required` means: not empty; an absent struct is looked into as an empty one.
//! Below `status` nothing is required of Go types, as upstream requires nothing there.

use std::borrow::Cow;
use std::collections::HashSet;

use serde_json::{Map, Number, Value};

use super::{Checks, Field, ListType, Part, Path, Schemas, Shape, Type, TypeId, check, formats};
use crate::field::{ErrorKind, FieldError};

/// At most this many errors are collected: enough to repair an object, bounded for hostile ones.
const MAX_ERRORS: usize = 200;

impl Schemas {
    /// Everything that the schema finds wrong with a new object.
    pub fn validate(&self, id: TypeId, value: &Value) -> Vec<FieldError> {
        self.validate_update(id, value, None)
    }

    /// As [`Schemas::validate`] for a change: parts of a custom object that stay as they are are not held
    /// against the writer (upstream's ratcheting), and immutable fields must not change.
    pub fn validate_update(&self, id: TypeId, value: &Value, old: Option<&Value>) -> Vec<FieldError> {
        let mut walk = Walk { schemas: self, errors: Vec::new(), status: false };
        walk.value(id, value, old, &Path::Root);
        walk.errors
    }
}

struct Walk<'s> {
    schemas: &'s Schemas,
    errors: Vec<FieldError>,
    /// Inside a Go type's status.
    status: bool,
}

impl Walk<'_> {
    fn push(&mut self, error: FieldError) {
        if self.errors.len() < MAX_ERRORS {
            self.errors.push(error);
        }
    }

    fn value(&mut self, id: TypeId, value: &Value, old: Option<&Value>, path: &Path<'_>) {
        let schemas = self.schemas;
        let ty = schemas.ty(id);
        if value.is_null() && (ty.nullable || ty.typed || ty.shape == Shape::Any) {
            return;
        }
        if !ty.typed {
            if old == Some(value) {
                return;
            }
            if let Some(expected) = mismatch(ty.shape, value) {
                self.push(wrong_type(path, value, expected));
                return;
            }
        }
        if let Some(checks) = &ty.checks {
            self.checks(checks, ty.typed, value, path);
        }
        match (value, ty.shape) {
            (Value::Object(map), Shape::Object) => self.fields(ty, map, old.and_then(Value::as_object), path),
            (Value::Object(map), Shape::Map(item)) if self.interesting(item) => {
                for (key, value) in map {
                    let old = old.and_then(|old| old.get(key));
                    self.value(item, value, old, &Path::Field(path, key));
                }
            }
            (Value::Array(items), Shape::List(item)) => self.items(ty, item, items, old, path),
            _ => {}
        }
    }

    fn interesting(&self, id: TypeId) -> bool {
        let ty = self.schemas.ty(id);
        !ty.typed || ty.checks.is_some() || matches!(ty.shape, Shape::Object | Shape::Map(_) | Shape::List(_))
    }

    fn fields(&mut self, ty: &Type, map: &Map<String, Value>, old: Option<&Map<String, Value>>, path: &Path<'_>) {
        let outer = self.status;
        // What may change in metadata is the strategies' to say: the server itself writes there.
        let metadata = ty.name.as_deref().is_some_and(|name| name.ends_with(".ObjectMeta"));
        for field in &ty.fields {
            let value = map.get(&*field.name).filter(|value| !(ty.typed && value.is_null()));
            let before = old.and_then(|old| old.get(&*field.name));
            let below = Path::Field(path, &field.name);
            if ty.typed && matches!(path, Path::Root) {
                self.status = &*field.name == "status";
            }
            if field.immutable && !metadata && let Some(before) = before.filter(|_| old.is_some()) && value != Some(before) {
                let shown = value.cloned().unwrap_or(Value::Null);
                self.push(FieldError::invalid(below.to_string(), shown, "field is immutable"));
            }
            if field.required {
                self.required(ty, field, value, &below);
            }
            if let Some(value) = value {
                self.value(field.ty, value, before, &below);
            }
            self.status = outer;
        }
        if ty.embedded {
            self.embedded(map, path);
        }
    }

    fn required(&mut self, owner: &Type, field: &Field, value: Option<&Value>, path: &Path<'_>) {
        if !owner.typed {
            if value.is_none() {
                self.push(FieldError::required(path.to_string(), ""));
            }
            return;
        }
        let inner = self.schemas.ty(field.ty);
        match (inner.shape, value) {
            _ if self.status => {}
            (Shape::String, value) if value.and_then(Value::as_str).is_none_or(str::is_empty) => {
                self.push(FieldError::required(path.to_string(), ""));
            }
            (Shape::List(_) | Shape::Map(_), value) if field.required_items && value.is_none_or(is_empty) => {
                self.push(FieldError::required(path.to_string(), ""));
            }
            (Shape::Object, None) if field.go.pointer => self.push(FieldError::required(path.to_string(), "")),
            (Shape::Object, None) => self.value(field.ty, &Value::Object(Map::new()), None, path),
            _ => {}
        }
    }

    fn embedded(&mut self, map: &Map<String, Value>, path: &Path<'_>) {
        for name in ["apiVersion", "kind"] {
            match map.get(name) {
                None => self.push(FieldError::required(Path::Field(path, name).to_string(), "must not be empty")),
                Some(Value::String(text)) if !text.is_empty() => {}
                Some(Value::String(_)) => {
                    self.push(FieldError::required(Path::Field(path, name).to_string(), "must not be empty"));
                }
                Some(other) => self.push(wrong_type(&Path::Field(path, name), other, "string")),
            }
        }
    }

    fn items(&mut self, ty: &Type, item: TypeId, items: &[Value], old: Option<&Value>, path: &Path<'_>) {
        if self.interesting(item) {
            let before = old.and_then(Value::as_array);
            for (index, value) in items.iter().enumerate() {
                let old = before.and_then(|old| match &ty.list_type {
                    ListType::Map(keys) => old.iter().find(|old| keys.iter().all(|key| old.get(key) == value.get(key))),
                    ListType::Set => old.iter().find(|old| *old == value),
                    ListType::Atomic => old.get(index),
                });
                self.value(item, value, old, &Path::Index(path, index));
            }
        }
        let unique = ty.checks.as_ref().is_some_and(|checks| checks.unique_items);
        if !ty.typed || unique {
            self.unique(ty, items, path);
        }
    }

    /// Sets and maps hold each element once. (Of Go types only where a tag says so: upstream tolerates
    /// duplicate container ports and variables.)
    fn unique(&mut self, ty: &Type, items: &[Value], path: &Path<'_>) {
        match &ty.list_type {
            ListType::Atomic => {}
            ListType::Set => {
                let mut seen = HashSet::new();
                for (index, item) in items.iter().enumerate() {
                    if !seen.insert(item.to_string()) {
                        self.push(FieldError::duplicate(Path::Index(path, index).to_string(), item.clone()));
                    }
                }
            }
            ListType::Map(keys) => {
                let mut seen = HashSet::new();
                for (index, item) in items.iter().enumerate() {
                    let key: Map<String, Value> =
                        keys.iter().filter_map(|key| Some((key.clone(), item.get(key)?.clone()))).collect();
                    let key = Value::Object(key);
                    if !seen.insert(key.to_string()) {
                        self.push(FieldError::duplicate(Path::Index(path, index).to_string(), key));
                    }
                }
            }
        }
    }

    fn checks(&mut self, checks: &Checks, typed: bool, value: &Value, path: &Path<'_>) {
        if let Some(allowed) = &checks.enum_values {
            let unset = typed && value.as_str().is_some_and(str::is_empty);
            if !unset && !allowed.iter().any(|allowed| same(allowed, value)) {
                let mut supported: Vec<Cow<'_, str>> = allowed.iter().map(text).collect();
                supported.sort();
                let supported: Vec<&str> = supported.iter().map(|text| &**text).collect();
                self.push(FieldError::not_supported(path.to_string(), value.clone(), &supported));
            }
        }
        match value {
            Value::String(text) => self.text(checks, typed, text, path),
            Value::Number(number) => self.number(checks, typed, number, path),
            Value::Array(items) => self.list(checks, typed, items, path),
            Value::Object(map) => self.object(checks, typed, map, path),
            _ => {}
        }
        if !(checks.all_of.is_empty() && checks.any_of.is_empty() && checks.one_of.is_empty() && checks.not.is_none()) {
            self.logic(checks, value, path);
        }
    }

    fn text(&mut self, checks: &Checks, typed: bool, text: &str, path: &Path<'_>) {
        if let Some(max) = checks.max_length.filter(|max| text.chars().count() as u64 > *max) {
            let error = if typed {
                FieldError::new(ErrorKind::TooLong, path.to_string(), None, format!("may not be more than {max} {}", plural(max, "character")))
            } else {
                FieldError::too_long(path.to_string(), max as usize)
            };
            self.push(error);
        }
        if let Some(max) = checks.max_bytes.filter(|max| text.len() as u64 > *max) {
            self.push(FieldError::too_long(path.to_string(), max as usize));
        }
        if let Some(min) = checks.min_length.filter(|min| (text.chars().count() as u64) < *min) {
            self.push(body(path, text.into(), format!("should be at least {min} chars long")));
        }
        if let Some(pattern) = checks.pattern.as_ref().filter(|pattern| !pattern.is_match(text)) {
            self.push(body(path, text.into(), format!("should match '{}'", pattern.source)));
        }
        if let Some(format) = &checks.format {
            if typed {
                if text.is_empty() || !format.starts_with("k8s-") {
                    return;
                }
                for detail in formats::broken(format, text) {
                    self.push(FieldError::invalid(path.to_string(), text, detail));
                }
            } else if !formats::broken(format, text).is_empty() {
                self.push(body(path, text.into(), format!("must be of type {format}: {}", crate::field::quote(text))));
            }
        }
    }

    fn number(&mut self, checks: &Checks, typed: bool, number: &Number, path: &Path<'_>) {
        let order = |bound: &Number| compare(number, bound);
        if let Some(bound) = &checks.minimum
            && (order(bound).is_lt() || (checks.exclusive_minimum && order(bound).is_eq()))
        {
            let error = match (typed, checks.exclusive_minimum) {
                (true, _) => {
                    FieldError::invalid(path.to_string(), number.clone(), format!("must be greater than or equal to {bound}"))
                }
                (false, true) => body(path, number.clone().into(), format!("should be greater than {bound}")),
                (false, false) => body(path, number.clone().into(), format!("should be greater than or equal to {bound}")),
            };
            self.push(error);
        }
        if let Some(bound) = &checks.maximum
            && (order(bound).is_gt() || (checks.exclusive_maximum && order(bound).is_eq()))
        {
            let error = match (typed, checks.exclusive_maximum) {
                (true, _) => {
                    FieldError::invalid(path.to_string(), number.clone(), format!("must be less than or equal to {bound}"))
                }
                (false, true) => body(path, number.clone().into(), format!("should be less than {bound}")),
                (false, false) => body(path, number.clone().into(), format!("should be less than or equal to {bound}")),
            };
            self.push(error);
        }
        if let Some(factor) = checks.multiple_of {
            let times = number.as_f64().unwrap_or(0.0) / factor;
            if (times - times.round()).abs() > 1e-9 {
                self.push(body(path, number.clone().into(), format!("should be a multiple of {factor}")));
            }
        }
        let fits = match checks.format.as_deref() {
            Some("int32") if !typed => number.as_i64().is_some_and(|number| i32::try_from(number).is_ok()),
            Some("int64") if !typed => number.is_i64() || number.as_f64().is_some_and(|n| n.abs() < 9.2e18),
            _ => true,
        };
        if !fits {
            let format = checks.format.as_deref().unwrap_or_default();
            self.push(body(path, number.clone().into(), format!("must be of type {format}: {number:?}")));
        }
    }

    fn list(&mut self, checks: &Checks, typed: bool, items: &[Value], path: &Path<'_>) {
        if let Some(max) = checks.max_items.filter(|max| items.len() as u64 > *max) {
            self.push(FieldError::too_many(path.to_string(), items.len(), max as usize));
        }
        if let Some(min) = checks.min_items.filter(|min| (items.len() as u64) < *min) {
            let shown = items.len().into();
            self.push(body(path, shown, format!("should have at least {min} items")));
        }
        if checks.unique_items && !typed {
            let mut seen = HashSet::new();
            if items.iter().any(|item| !seen.insert(item.to_string())) {
                self.push(body(path, "".into(), "shouldn't contain duplicates".to_owned()));
            }
        }
    }

    fn object(&mut self, checks: &Checks, typed: bool, map: &Map<String, Value>, path: &Path<'_>) {
        if let Some(max) = checks.max_properties.filter(|max| map.len() as u64 > *max) {
            self.push(FieldError::too_many(path.to_string(), map.len(), max as usize));
        }
        if let Some(min) = checks.min_properties.filter(|min| (map.len() as u64) < *min) {
            self.push(body(path, map.len().into(), format!("should have at least {min} properties")));
        }
        for name in &checks.required {
            if !map.contains_key(&**name) {
                self.push(FieldError::required(Path::Field(path, name).to_string(), ""));
            }
        }
        if !typed {
            return;
        }
        for union in &checks.unions {
            let set: Vec<&str> = union.members.iter().map(|name| &**name).filter(|name| map.get(*name).is_some_and(|v| !v.is_null())).collect();
            let members = || union.members.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            if set.len() > 1 {
                let shown = format!("{{{}}}", set.join(", "));
                self.push(FieldError::invalid(path.to_string(), shown, format!("must specify exactly one of: {}", members())));
            } else if set.is_empty() && !union.zero_allowed {
                self.push(FieldError::invalid(path.to_string(), "", format!("must specify one of: {}", members())));
            }
        }
    }

    fn logic(&mut self, checks: &Checks, value: &Value, path: &Path<'_>) {
        let mut probe = |part: &Part| {
            let mut walk = Walk { schemas: self.schemas, errors: Vec::new(), status: false };
            walk.part(part, value, path);
            walk.errors
        };
        let all: Vec<Vec<FieldError>> = checks.all_of.iter().map(&mut probe).collect();
        let any: Vec<Vec<FieldError>> = checks.any_of.iter().map(&mut probe).collect();
        let one: Vec<Vec<FieldError>> = checks.one_of.iter().map(&mut probe).collect();
        let not = checks.not.as_deref().map(&mut probe);
        let good = |results: &[Vec<FieldError>]| results.iter().filter(|errors| errors.is_empty()).count();
        let nearest = |results: Vec<Vec<FieldError>>| results.into_iter().min_by_key(Vec::len).unwrap_or_default();
        let mut say = |text: &str, details: Vec<FieldError>| {
            self.push(FieldError::invalid("<nil>", "", format!("{} {text}", crate::field::quote(&path.to_string()))));
            details.into_iter().for_each(|error| self.push(error));
        };
        if good(&all) < all.len() {
            say("must validate all the schemas (allOf)", all.into_iter().flatten().collect());
        }
        if !any.is_empty() && good(&any) == 0 {
            say("must validate at least one schema (anyOf)", nearest(any));
        }
        if !one.is_empty() {
            match good(&one) {
                1 => {}
                0 => say("must validate one and only one schema (oneOf). Found none valid", nearest(one)),
                _ => {
                    let count = good(&one);
                    say(&format!("must validate one and only one schema (oneOf). Found {count} valid alternatives"), Vec::new());
                }
            }
        }
        if not.is_some_and(|errors| errors.is_empty()) {
            say("must not validate the schema (not)", Vec::new());
        }
    }

    fn part(&mut self, part: &Part, value: &Value, path: &Path<'_>) {
        if let Some(expected) = part.kind.and_then(|shape| mismatch(shape, value)) {
            self.push(wrong_type(path, value, expected));
            return;
        }
        self.checks(&part.checks, false, value, path);
        match value {
            Value::Object(map) => {
                for (key, value) in map {
                    let below = Path::Field(path, key);
                    match part.properties.iter().find(|(name, _)| **name == **key) {
                        Some((_, part)) => self.part(part, value, &below),
                        None => {
                            if let Some(part) = &part.additional {
                                self.part(part, value, &below);
                            }
                        }
                    }
                }
            }
            Value::Array(items) => {
                if let Some(part) = &part.items {
                    for (index, value) in items.iter().enumerate() {
                        self.part(part, value, &Path::Index(path, index));
                    }
                }
            }
            _ => {}
        }
    }
}

/// The type that was expected, when the value has another.
fn mismatch(shape: Shape, value: &Value) -> Option<&'static str> {
    let (fits, expected) = match shape {
        Shape::Object | Shape::Map(_) => (value.is_object(), "object"),
        Shape::List(_) => (value.is_array(), "array"),
        Shape::String | Shape::Time | Shape::MicroTime | Shape::Duration | Shape::Bytes => (value.is_string(), "string"),
        Shape::Integer => (is_integer(value), "integer"),
        Shape::Number => (value.is_number(), "number"),
        Shape::Boolean => (value.is_boolean(), "boolean"),
        Shape::IntOrString => (value.is_string() || is_integer(value), "integer,string"),
        Shape::Quantity => (value.is_string() || value.is_number(), "string"),
        Shape::Any => (true, ""),
    };
    (!fits).then_some(expected)
}

fn is_integer(value: &Value) -> bool {
    value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|number| number.fract() == 0.0)
}

fn wrong_type(path: &Path<'_>, value: &Value, expected: &str) -> FieldError {
    let found = match value {
        Value::Bool(_) => "boolean",
        Value::Number(_) if is_integer(value) => "integer",
        other => check::value_kind(other),
    };
    let place = path.to_string();
    let place = if place.is_empty() { "<nil>".to_owned() } else { place };
    FieldError::type_invalid(place.clone(), found, format!("{place} in body must be of type {expected}: \"{found}\""))
}

/// `spec.x in body should ...`: the wording of custom resources' schemas.
fn body(path: &Path<'_>, value: Value, rule: String) -> FieldError {
    let place = path.to_string();
    FieldError::invalid(place.clone(), value, format!("{place} in body {rule}"))
}

fn plural(count: u64, noun: &str) -> String {
    if count == 1 { noun.to_owned() } else { format!("{noun}s") }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

fn text(value: &Value) -> Cow<'_, str> {
    match value {
        Value::String(text) => Cow::Borrowed(text),
        other => Cow::Owned(other.to_string()),
    }
}

fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => compare(a, b).is_eq(),
        (a, b) => a == b,
    }
}

fn compare(a: &Number, b: &Number) -> std::cmp::Ordering {
    match (a.as_i64(), b.as_i64()) {
        (Some(a), Some(b)) => a.cmp(&b),
        _ => a.as_f64().unwrap_or(0.0).total_cmp(&b.as_f64().unwrap_or(0.0)),
    }
}
