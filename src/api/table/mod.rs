//! Tables for `kubectl get`: upstream's columns and cells (`pkg/printers/internalversion/printers.go`).
//!
//! A kind is a row of [`kinds::KINDS`]: its columns, and for each a [`Cell`] that says where its text comes from. Kinds
//! without a row print their name and creation time; custom resources print what their definition says.
//! Column descriptions, which no client shows, are left empty for built-in kinds.

use std::borrow::Cow;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::meta;
use crate::registry::Resource;
use crate::selector::LabelSelector;
use crate::strategy::at::{get, items, text};

mod cells;
mod duration;
mod jsonpath;
mod kinds;
mod pods;

pub use duration::human;
pub use jsonpath::JsonPath;

/// A column of a table (`metav1.TableColumnDefinition`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// Heading.
    pub name: Cow<'static, str>,
    /// OpenAPI type.
    pub kind: Cow<'static, str>,
    /// OpenAPI format; `name` marks the object's name.
    pub format: Cow<'static, str>,
    /// Prose.
    pub description: String,
    /// 0 is always shown; more only in wide tables.
    pub priority: i32,
}

impl Column {
    /// As in `columnDefinitions`.
    pub fn to_value(&self) -> Value {
        json!({
            "name": self.name, "type": self.kind, "format": self.format,
            "description": self.description, "priority": self.priority,
        })
    }
}

/// Where a cell's content comes from.
#[derive(Clone, Copy)]
enum Cell {
    /// `metadata.name`.
    Name,
    /// Time since creation.
    Age,
    /// The string (or number) at a path; empty if there is none.
    Text(&'static str),
    /// The same with a text for nothing.
    TextOr(&'static str, &'static str),
    /// An integer; 0 if there is none.
    Int(&'static str),
    /// A boolean with its default.
    Bool(&'static str, bool),
    /// Number of items.
    Count(&'static str),
    /// Strings of a list, joined by commas, or a text for none.
    Join(&'static str, &'static str),
    /// Time since a time.
    Since(&'static str, &'static str),
    /// `key=value` pairs of a map.
    Labels(&'static str),
    /// A label selector.
    Selector(&'static str),
    /// Names of containers.
    Containers(&'static str),
    /// Their images.
    Images(&'static str),
    /// Anything else.
    Call(fn(&Value, Timestamp) -> Value),
}

/// One column of a kind.
struct Col {
    name: &'static str,
    kind: &'static str,
    priority: i32,
    cell: Cell,
}

const fn col(name: &'static str, cell: Cell) -> Col {
    Col { name, kind: "string", priority: 0, cell }
}

const fn wide(name: &'static str, cell: Cell) -> Col {
    Col { name, kind: "string", priority: 1, cell }
}

const fn int(name: &'static str, cell: Cell) -> Col {
    Col { name, kind: "integer", priority: 0, cell }
}

const fn boolean(name: &'static str, cell: Cell) -> Col {
    Col { name, kind: "boolean", priority: 0, cell }
}

/// A kind's columns.
type Kind = (&'static str, &'static str, &'static [Col]);

fn kind_of(resource: &Resource) -> Option<&'static [Col]> {
    if resource.custom {
        return None;
    }
    kinds::KINDS.iter().find(|(g, p, _)| *g == resource.group && *p == resource.plural).map(|(_, _, cols)| *cols)
}

/// The columns of a resource's tables.
pub fn columns_for(resource: &Resource, version: &str) -> Vec<Column> {
    if let Some(cols) = kind_of(resource) {
        let column = |c: &Col| Column {
            name: c.name.into(),
            kind: c.kind.into(),
            format: if matches!(c.cell, Cell::Name) { "name" } else { "" }.into(),
            description: String::new(),
            priority: c.priority,
        };
        return cols.iter().map(column).collect();
    }
    let name = Column {
        name: "Name".into(),
        kind: "string".into(),
        format: "name".into(),
        description: String::new(),
        priority: 0,
    };
    if !resource.custom {
        let created = Column { name: "Created At".into(), kind: "date".into(), format: "".into(), ..name.clone() };
        return vec![name, created];
    }
    let mut out = vec![name.clone()];
    let printers = resource.versions.iter().find(|v| v.name == version).map_or(&[][..], |v| v.columns.as_slice());
    if printers.is_empty() {
        out.push(Column { name: "Age".into(), kind: "date".into(), format: "".into(), ..name });
        return out;
    }
    out.extend(printers.iter().map(|p| Column {
        name: p.name.clone().into(),
        kind: p.kind.clone().into(),
        format: p.format.clone().into(),
        description: if p.description.is_empty() {
            format!("Custom resource definition column (in JSONPath format): {}", p.json_path)
        } else {
            p.description.clone()
        },
        priority: p.priority,
    }));
    out
}

/// The cells of one object, one per column of [`columns_for`].
pub fn row(resource: &Resource, version: &str, object: &Value, now: Timestamp) -> Vec<Value> {
    if let Some(cols) = kind_of(resource) {
        if resource.group.is_empty() && resource.plural == "pods" {
            return pods::row(object, now);
        }
        return cols.iter().map(|c| c.cell.render(object, now)).collect();
    }
    if !resource.custom {
        return vec![meta::name(object).into(), meta::creation_timestamp(object).unwrap_or_default().into()];
    }
    let mut out = vec![Value::from(meta::name(object))];
    let printers = resource.versions.iter().find(|v| v.name == version).map_or(&[][..], |v| v.columns.as_slice());
    if printers.is_empty() {
        out.push(age(object, now));
    }
    out.extend(printers.iter().map(|p| custom_cell(&p.kind, &p.json_path, object, now)));
    out
}

/// The row's conditions: pods that have ended are `Completed`.
pub fn row_conditions(resource: &Resource, object: &Value) -> Vec<Value> {
    if resource.custom || !resource.group.is_empty() || resource.plural != "pods" {
        return Vec::new();
    }
    let (reason, message) = match text(object, "status.phase") {
        "Succeeded" => ("Succeeded", "The pod has completed successfully."),
        "Failed" => ("Failed", "The pod failed."),
        _ => return Vec::new(),
    };
    vec![json!({"type": "Completed", "status": "True", "reason": reason, "message": message})]
}

fn custom_cell(kind: &str, path: &str, object: &Value, now: Timestamp) -> Value {
    let Some(path) = JsonPath::parse(path) else { return Value::Null };
    let Some(found) = path.first(object) else { return Value::Null };
    match kind {
        "string" => match found {
            Value::String(s) => s.as_str().into(),
            Value::Null => "<nil>".into(),
            other => other.to_string().into(),
        },
        "integer" => match found.as_i64().or_else(|| found.as_f64().map(|f| f as i64)) {
            Some(n) => n.into(),
            None => Value::Null,
        },
        "number" if found.is_number() => found.clone(),
        "boolean" if found.is_boolean() => found.clone(),
        "date" => match found.as_str() {
            Some(s) if meta::parse_time(s).is_none() => "<invalid>".into(),
            Some(s) => since(Some(s), now).into(),
            None => Value::Null,
        },
        _ => Value::Null,
    }
}

fn since(time: Option<&str>, now: Timestamp) -> String {
    match time.and_then(meta::parse_time) {
        Some(t) => human((now - t).get_seconds()),
        None => "<unknown>".into(),
    }
}

fn age(object: &Value, now: Timestamp) -> Value {
    since(meta::creation_timestamp(object), now).into()
}

/// A scalar as text.
fn scalar(v: &Value) -> Cow<'_, str> {
    match v {
        Value::String(s) => Cow::Borrowed(s),
        Value::Null => Cow::Borrowed(""),
        other => Cow::Owned(other.to_string()),
    }
}

fn labels(map: &Value) -> String {
    let pairs: Vec<String> =
        map.as_object().into_iter().flatten().map(|(k, v)| format!("{k}={}", scalar(v))).collect();
    if pairs.is_empty() { "<none>".into() } else { pairs.join(",") }
}

/// A label selector as upstream prints it: `a=b,c in (d,e),f,!g`.
fn selector(v: &Value) -> String {
    if LabelSelector::from_object(v).is_err() {
        return "<error>".into();
    }
    let mut parts: Vec<(String, String)> = Vec::new();
    for (k, v) in get(v, "matchLabels").as_object().into_iter().flatten() {
        parts.push((k.clone(), format!("{k}={}", scalar(v))));
    }
    for e in items(v, "matchExpressions") {
        let key = text(e, "key");
        let mut values: Vec<&str> = items(e, "values").iter().filter_map(Value::as_str).collect();
        values.sort_unstable();
        let values = values.join(",");
        let part = match text(e, "operator") {
            "In" => format!("{key} in ({values})"),
            "NotIn" => format!("{key} notin ({values})"),
            "Exists" => key.to_owned(),
            _ => format!("!{key}"),
        };
        parts.push((key.to_owned(), part));
    }
    parts.sort();
    if parts.is_empty() {
        return "<none>".into();
    }
    parts.into_iter().map(|(_, p)| p).collect::<Vec<_>>().join(",")
}

fn joined(list: &[Value], field: &str) -> String {
    list.iter().map(|c| text(c, field)).collect::<Vec<_>>().join(",")
}

impl Cell {
    fn render(&self, object: &Value, now: Timestamp) -> Value {
        match *self {
            Cell::Name => meta::name(object).into(),
            Cell::Age => age(object, now),
            Cell::Text(p) => scalar(get(object, p)).into(),
            Cell::TextOr(p, none) => match scalar(get(object, p)) {
                s if s.is_empty() => none.into(),
                s => s.into(),
            },
            Cell::Int(p) => get(object, p).as_i64().unwrap_or(0).into(),
            Cell::Bool(p, default) => get(object, p).as_bool().unwrap_or(default).into(),
            Cell::Count(p) => match get(object, p) {
                Value::Array(l) => l.len().into(),
                Value::Object(m) => m.len().into(),
                _ => 0.into(),
            },
            Cell::Join(p, none) => {
                let list: Vec<&str> = items(object, p).iter().filter_map(Value::as_str).collect();
                if list.is_empty() { none.into() } else { list.join(",").into() }
            }
            Cell::Since(p, none) => match get(object, p).as_str() {
                None => none.into(),
                t => since(t, now).into(),
            },
            Cell::Labels(p) => labels(get(object, p)).into(),
            Cell::Selector(p) => selector(get(object, p)).into(),
            Cell::Containers(p) => joined(items(object, p), "name").into(),
            Cell::Images(p) => joined(items(object, p), "image").into(),
            Cell::Call(f) => f(object, now),
        }
    }
}

#[cfg(test)]
mod tests;
