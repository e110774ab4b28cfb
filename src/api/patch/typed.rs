//! Values with their types: the walks that server-side apply is made of.
//!
//! Follows `sigs.k8s.io/structured-merge-diff`: what is one leaf (scalars, atomic lists and maps) and what is merged
//! item by item is told by the schema. Null counts as absent.

use std::borrow::Cow;
use std::collections::HashMap;

use serde_json::{Map, Value};

use super::fieldset::{FieldSet, print_edge};
use crate::field::quote;
use crate::schema::{ListType, MapType, Schemas, Shape, TypeId};

/// How a value is owned.
#[derive(Clone, Copy)]
pub(super) enum Kind<'s> {
    /// As a whole.
    Leaf,
    /// Field by field. The type of unknown fields is deduced when there is none.
    Map { ty: Option<TypeId>, value: Option<TypeId> },
    /// Item by item, told apart by keys; no keys means that items are their own keys.
    List { item: TypeId, keys: &'s [String] },
    /// A list without a schema.
    Atomic,
}

/// Types of one resource.
#[derive(Clone, Copy)]
pub(super) struct Types<'s> {
    pub schemas: &'s Schemas,
    /// Values without a schema are owned field by field (custom resources), not as a whole.
    pub deduce: bool,
}

/// A type, `None` when the schema does not say; atomic when the field says so.
pub(super) type Ty = Option<TypeId>;

fn present(v: Option<&Value>) -> Option<&Value> {
    v.filter(|v| !v.is_null())
}

impl<'s> Types<'s> {
    pub fn kind(&self, ty: Ty, value: &Value) -> Kind<'s> {
        let Some(id) = ty else { return self.deduced(value) };
        let t = self.schemas.ty(id);
        match t.shape {
            Shape::Object | Shape::Map(_) if t.map_type == MapType::Atomic => Kind::Leaf,
            Shape::Object if value.is_object() => Kind::Map { ty: Some(id), value: None },
            Shape::Map(item) if value.is_object() => Kind::Map { ty: None, value: Some(item) },
            Shape::List(item) if value.is_array() => match &t.list_type {
                ListType::Atomic => Kind::Leaf,
                ListType::Set => Kind::List { item, keys: &[] },
                ListType::Map(keys) => Kind::List { item, keys },
            },
            Shape::Any if t.preserve_unknown || self.deduce => self.deduced(value),
            _ => Kind::Leaf,
        }
    }

    fn deduced(&self, value: &Value) -> Kind<'s> {
        match value {
            Value::Object(_) if self.deduce => Kind::Map { ty: None, value: None },
            Value::Array(_) => Kind::Atomic,
            _ => Kind::Leaf,
        }
    }

    /// The type of a field or map value.
    fn child(&self, kind: Kind<'s>, key: &str) -> Ty {
        match kind {
            Kind::Map { ty: Some(ty), .. } => self.schemas.field(ty, key).map(|f| f.ty),
            Kind::Map { value, .. } => value,
            _ => None,
        }
    }

    /// Whether the key is a field that the schema names (not a map's key).
    fn is_named(&self, kind: Kind<'s>, key: &str) -> bool {
        matches!(kind, Kind::Map { ty: Some(ty), .. } if self.schemas.field(ty, key).is_some())
    }

    /// Whether Go's encoder writes the field even when nothing is in it.
    fn is_written(&self, kind: Kind<'s>, key: &str) -> bool {
        match kind {
            Kind::Map { ty: Some(ty), .. } => {
                self.schemas.ty(ty).typed
                    && self.schemas.field(ty, key).is_some_and(|f| !f.go.omit_empty && !f.go.pointer)
            }
            _ => false,
        }
    }

    /// What an applied configuration cannot say: fields that the type does not have, list items that are told apart by
    /// keys and have none, or the same ones. In the words of upstream's `typed` package.
    pub fn problems(&self, ty: Ty, value: &Value) -> Vec<String> {
        let mut out = Vec::new();
        self.find_problems(ty, value, &Step::Root, &mut out);
        out
    }

    fn find_problems(&self, ty: Ty, value: &Value, path: &Step<'_>, out: &mut Vec<String>) {
        let at = |path: &Step<'_>| path.edges().iter().map(|e| print_edge(e)).collect::<String>();
        let Some(id) = ty else { return };
        let t = self.schemas.ty(id);
        match (t.shape, value) {
            (Shape::Object, Value::Object(map)) => {
                for (key, v) in map {
                    match self.schemas.field(id, key) {
                        Some(f) => self.find_problems(Some(f.ty), v, &Step::Field(path, key), out),
                        None if t.preserve_unknown => {}
                        None if matches!(&**key, "apiVersion" | "kind") && (t.embedded || matches!(path, Step::Root)) => {}
                        None => out.push(format!("{}.{key}: field not declared in schema", at(path))),
                    }
                }
            }
            (Shape::Map(item), Value::Object(map)) => {
                for (key, v) in map {
                    self.find_problems(Some(item), v, &Step::Field(path, key), out);
                }
            }
            (Shape::List(item), Value::Array(list)) => {
                let keys = match &t.list_type {
                    ListType::Map(keys) => Some(&keys[..]),
                    ListType::Set => Some(&[][..]),
                    ListType::Atomic => None,
                };
                let mut seen: Vec<String> = Vec::new();
                for (i, v) in list.iter().enumerate() {
                    let Some(keys) = keys else {
                        self.find_problems(Some(item), v, &Step::Item(path, &format!("i:{i}")), out);
                        continue;
                    };
                    if let Some(key) = keys.iter().find(|k| self.key_of(item, k, v).is_none()) {
                        out.push(format!(
                            "{}: element {i}: associative list with keys has an element that omits key field {} (and doesn't have default value)",
                            at(path),
                            quote(key)
                        ));
                        continue;
                    }
                    let edge = self.edge(item, keys, v);
                    if seen.contains(&edge) {
                        out.push(format!("{}: duplicate entries for key {}", at(path), print_edge(&edge)));
                    }
                    self.find_problems(Some(item), v, &Step::Item(path, &edge), out);
                    seen.push(edge);
                }
            }
            _ => {}
        }
    }

    /// The edge of a list item.
    fn edge(&self, item: TypeId, keys: &[String], v: &Value) -> String {
        if keys.is_empty() {
            return format!("v:{v}");
        }
        let mut map = Map::new();
        for key in keys {
            if let Some(value) = self.key_of(item, key, v) {
                map.insert(key.clone(), value.into_owned());
            }
        }
        format!("k:{}", Value::Object(map))
    }

    fn key_of<'v>(&self, item: TypeId, key: &str, v: &'v Value) -> Option<Cow<'v, Value>> {
        if let Some(found) = present(v.get(key)) {
            return Some(Cow::Borrowed(found));
        }
        let field = self.schemas.field(item, key)?;
        if let Some(default) = &field.default {
            return Some(Cow::Owned((**default).clone()));
        }
        // Go's zero value, of a field that is always written.
        let written = self.schemas.ty(item).typed && !field.go.omit_empty && !field.go.pointer;
        match self.schemas.shape(field.ty) {
            Shape::String if written => Some(Cow::Owned(Value::from(""))),
            Shape::Integer if written => Some(Cow::Owned(Value::from(0))),
            _ => None,
        }
    }

    fn same_item(&self, item: TypeId, keys: &[String], a: &Value, b: &Value) -> bool {
        if keys.is_empty() {
            return a == b;
        }
        keys.iter().all(|k| self.key_of(item, k, a) == self.key_of(item, k, b))
    }

    /// All fields of a value.
    pub fn field_set(&self, ty: Ty, value: &Value) -> FieldSet {
        let mut set = FieldSet::default();
        self.fill_set(ty, value, &mut set);
        set
    }

    /// Fills what is below; whether the value itself is a leaf (and so a member at its edge).
    fn fill_set(&self, ty: Ty, value: &Value, set: &mut FieldSet) -> bool {
        match (self.kind(ty, value), value) {
            (kind @ Kind::Map { .. }, Value::Object(map)) => {
                for (key, v) in map {
                    let node = set.entry(&format!("f:{key}"));
                    let leaf = self.fill_set(self.child(kind, key), v, &mut node.below);
                    let blank = v.is_null() || v.as_object().is_some_and(Map::is_empty);
                    node.member |= leaf || blank || !self.is_named(kind, key);
                    if !node.member && node.below.is_empty() {
                        // An empty list of a kind that is owned by item: nothing of it is owned.
                        set.remove(&[&format!("f:{key}")]);
                    }
                }
                false
            }
            (Kind::List { item, keys }, Value::Array(list)) => {
                for v in list {
                    let node = set.entry(&self.edge(item, keys, v));
                    self.fill_set(Some(item), v, &mut node.below);
                    node.member = true;
                }
                false
            }
            _ => true,
        }
    }

    /// The set with all named fields in it that have something below: what removal looks at.
    pub fn with_named(&self, ty: Ty, set: &FieldSet, value: &Value) -> FieldSet {
        let mut out = set.clone();
        self.add_named(ty, &mut out, value);
        out
    }

    fn add_named(&self, ty: Ty, set: &mut FieldSet, value: &Value) {
        // The kind follows from the type alone where there is one; a stand-in value of the right JSON type finds it.
        let kind = match ty {
            Some(id) => match self.schemas.shape(id) {
                Shape::Object | Shape::Map(_) => self.kind(ty, &Value::Object(Map::new())),
                Shape::List(_) => self.kind(ty, &Value::Array(Vec::new())),
                _ => self.kind(ty, value),
            },
            None => self.kind(ty, value),
        };
        let edges: Vec<String> = set.iter().map(|(e, _)| e.to_owned()).collect();
        for edge in edges {
            let (child, named) = match (edge.strip_prefix("f:"), kind) {
                (Some(key), _) => (self.child(kind, key), self.is_named(kind, key)),
                (None, Kind::List { item, .. }) => (Some(item), false),
                (None, _) => (None, false),
            };
            let node = set.entry(&edge);
            if node.below.is_empty() {
                continue;
            }
            node.member |= named;
            self.add_named(child, &mut node.below, &Value::Null);
        }
    }

    /// Merges `rhs` (what is applied) into `lhs` (what is there).
    pub fn merge(&self, ty: Ty, lhs: &Value, rhs: &Value) -> Value {
        match (self.kind(ty, rhs), lhs, rhs) {
            (kind @ Kind::Map { .. }, Value::Object(l), Value::Object(r)) => {
                let mut out = l.clone();
                for (key, rv) in r {
                    let merged = match l.get(key) {
                        Some(lv) => self.merge(self.child(kind, key), lv, rv),
                        None => rv.clone(),
                    };
                    out.insert(key.clone(), merged);
                }
                Value::Object(out)
            }
            (Kind::List { item, keys }, Value::Array(l), Value::Array(r)) => {
                Value::Array(self.merge_items(item, keys, l, r))
            }
            _ => rhs.clone(),
        }
    }

    /// Applied items keep their order; the others keep their places relative to those that both lists have.
    fn merge_items(&self, item: TypeId, keys: &[String], l: &[Value], r: &[Value]) -> Vec<Value> {
        let l_edges: Vec<String> = l.iter().map(|v| self.edge(item, keys, v)).collect();
        let r_edges: Vec<String> = r.iter().map(|v| self.edge(item, keys, v)).collect();
        let l_at: HashMap<&str, usize> = l_edges.iter().enumerate().rev().map(|(i, e)| (e.as_str(), i)).collect();
        let r_at: HashMap<&str, usize> = r_edges.iter().enumerate().map(|(i, e)| (e.as_str(), i)).collect();
        let mut done = vec![false; r.len()];
        let mut out = Vec::with_capacity(l.len() + r.len());
        let (mut i, mut j) = (0, 0);
        loop {
            if i < l.len() && j < r.len() && l_edges[i] == r_edges[j] {
                out.push(self.merge(Some(item), &l[i], &r[j]));
                done[j] = true;
                i += 1;
                j += 1;
                continue;
            }
            if i < l.len() {
                match r_at.get(l_edges[i].as_str()) {
                    None => {
                        out.push(l[i].clone());
                        i += 1;
                        continue;
                    }
                    Some(&at) if done[at] => {
                        i += 1;
                        continue;
                    }
                    Some(_) => {}
                }
            }
            if j >= r.len() {
                return out;
            }
            out.push(match l_at.get(r_edges[j].as_str()) {
                Some(&at) => self.merge(Some(item), &l[at], &r[j]),
                None => r[j].clone(),
            });
            if let Some(&at) = r_at.get(r_edges[j].as_str()) {
                done[at] = true;
            }
            j += 1;
        }
    }

    /// The value without the set's paths; `None` when nothing is left of it.
    pub fn remove(&self, ty: Ty, value: &Value, set: &FieldSet) -> Option<Value> {
        match (self.kind(ty, value), value) {
            (kind @ Kind::Map { .. }, Value::Object(map)) if !map.is_empty() => {
                let mut out = Map::new();
                for (key, v) in map {
                    match set.get(&format!("f:{key}")) {
                        Some(node) if node.member => {}
                        Some(node) => {
                            if let Some(v) = self.remove(self.child(kind, key), v, &node.below) {
                                out.insert(key.clone(), v);
                            }
                        }
                        None => {
                            out.insert(key.clone(), v.clone());
                        }
                    }
                }
                (!out.is_empty()).then_some(Value::Object(out))
            }
            (Kind::List { item, keys }, Value::Array(list)) if !list.is_empty() => {
                let mut out = Vec::with_capacity(list.len());
                for v in list {
                    match set.get(&self.edge(item, keys, v)) {
                        Some(node) if node.member => {}
                        Some(node) => out.extend(self.remove(Some(item), v, &node.below)),
                        None => out.push(v.clone()),
                    }
                }
                (!out.is_empty()).then_some(Value::Array(out))
            }
            _ => Some(value.clone()),
        }
    }

    /// What differs from `lhs` to `rhs`. Nothing is allocated for what is equal.
    pub fn compare(&self, ty: Ty, lhs: &Value, rhs: &Value) -> Comparison {
        let mut out = Comparison::default();
        self.diff(ty, Some(lhs), Some(rhs), &Step::Root, &mut out);
        out
    }

    fn diff(&self, ty: Ty, lhs: Option<&Value>, rhs: Option<&Value>, path: &Step<'_>, out: &mut Comparison) {
        let null = lhs.is_some_and(Value::is_null);
        let (lhs, rhs) = (present(lhs), present(rhs));
        if lhs == rhs {
            return;
        }
        let Some(sample) = rhs.or(lhs) else { return };
        let blank = |v: Option<&Value>| match v {
            Some(Value::Object(m)) => m.is_empty(),
            Some(Value::Array(l)) => l.is_empty(),
            Some(_) => false,
            None => true,
        };
        let kind = self.kind(ty, sample);
        let leaf = matches!(kind, Kind::Leaf | Kind::Atomic) || (blank(lhs) && blank(rhs));
        if !leaf {
            match kind {
                Kind::Map { .. } => self.diff_maps(kind, lhs, rhs, path, out),
                Kind::List { item, keys } => self.diff_lists(item, keys, lhs, rhs, path, out),
                Kind::Leaf | Kind::Atomic => {}
            }
        }
        match (lhs, rhs) {
            (None, Some(_)) if null && !leaf => {}
            (None, Some(_)) => out.added.insert(path.edges().iter().map(|e| &**e)),
            (Some(_), None) => out.removed.insert(path.edges().iter().map(|e| &**e)),
            (Some(_), Some(_)) if leaf => out.modified.insert(path.edges().iter().map(|e| &**e)),
            _ => {}
        }
    }

    fn diff_maps(
        &self,
        kind: Kind<'s>,
        lhs: Option<&Value>,
        rhs: Option<&Value>,
        path: &Step<'_>,
        out: &mut Comparison,
    ) {
        let (l, r) = (lhs.and_then(Value::as_object), rhs.and_then(Value::as_object));
        let system = |key: &str| match path {
            Step::Root => matches!(key, "apiVersion" | "kind"),
            Step::Field(Step::Root, "metadata") => super::apply::SYSTEM.contains(&key),
            _ => false,
        };
        for (key, lv) in l.into_iter().flatten() {
            let rv = r.and_then(|r| r.get(key));
            if rv != Some(lv) && !system(key) {
                self.diff(self.child(kind, key), Some(lv), rv, &Step::Field(path, key), out);
            }
        }
        for (key, rv) in r.into_iter().flatten() {
            if l.is_none_or(|l| !l.contains_key(key)) && !system(key) {
                // Go writes `null` for a field without `omitempty`: it is there already.
                let before = (l.is_some() && self.is_written(kind, key)).then_some(&Value::Null);
                self.diff(self.child(kind, key), before, Some(rv), &Step::Field(path, key), out);
            }
        }
    }

    fn diff_lists(
        &self,
        item: TypeId,
        keys: &[String],
        lhs: Option<&Value>,
        rhs: Option<&Value>,
        path: &Step<'_>,
        out: &mut Comparison,
    ) {
        // Long lists are matched by edge text, short ones by looking.
        let (l, r) = (lhs.and_then(Value::as_array), rhs.and_then(Value::as_array));
        let (l, r) = (l.map_or(&[][..], Vec::as_slice), r.map_or(&[][..], Vec::as_slice));
        if l.len().saturating_mul(r.len()) > 4096 {
            return self.diff_long_lists(item, keys, l, r, path, out);
        }
        let find = |list: &'_ [Value], v: &Value| list.iter().position(|x| self.same_item(item, keys, x, v));
        for lv in l {
            let rv = find(r, lv).map(|i| &r[i]);
            if rv != Some(lv) {
                let edge = self.edge(item, keys, lv);
                self.diff(Some(item), Some(lv), rv, &Step::Item(path, &edge), out);
            }
        }
        for rv in r {
            if find(l, rv).is_none() {
                let edge = self.edge(item, keys, rv);
                self.diff(Some(item), None, Some(rv), &Step::Item(path, &edge), out);
            }
        }
    }

    fn diff_long_lists(
        &self,
        item: TypeId,
        keys: &[String],
        l: &[Value],
        r: &[Value],
        path: &Step<'_>,
        out: &mut Comparison,
    ) {
        let index = |list: &[Value]| -> HashMap<String, usize> {
            list.iter().enumerate().rev().map(|(i, v)| (self.edge(item, keys, v), i)).collect()
        };
        let (l_at, r_at) = (index(l), index(r));
        for (edge, i) in &l_at {
            let rv = r_at.get(edge).map(|j| &r[*j]);
            self.diff(Some(item), Some(&l[*i]), rv, &Step::Item(path, edge), out);
        }
        for (edge, j) in r_at.iter().filter(|(edge, _)| !l_at.contains_key(*edge)) {
            self.diff(Some(item), None, Some(&r[*j]), &Step::Item(path, edge), out);
        }
    }

    /// What Go's zero value of a type shows: the structs that are not behind pointers. Their presence is nobody's.
    pub fn zero(&self, ty: TypeId) -> Value {
        self.zero_below(ty, 8)
    }

    fn zero_below(&self, ty: TypeId, depth: u8) -> Value {
        let mut map = Map::new();
        if depth == 0 {
            return Value::Object(map);
        }
        let t = self.schemas.ty(ty);
        if matches!(t.shape, Shape::Object) && t.map_type == MapType::Granular {
            for f in t.fields.iter().filter(|f| !f.go.pointer && f.map_type == MapType::Granular) {
                let below = self.schemas.ty(f.ty);
                if matches!(below.shape, Shape::Object) && below.map_type == MapType::Granular {
                    map.insert(f.name.to_string(), self.zero_below(f.ty, depth - 1));
                }
            }
        }
        Value::Object(map)
    }
}

/// What a write changed.
#[derive(Default, Debug)]
pub(super) struct Comparison {
    pub added: FieldSet,
    pub modified: FieldSet,
    pub removed: FieldSet,
}

impl Comparison {
    pub fn is_same(&self) -> bool {
        self.added.is_empty() && self.modified.is_empty() && self.removed.is_empty()
    }
}

/// A path on the stack of the walk.
enum Step<'p> {
    Root,
    Field(&'p Step<'p>, &'p str),
    Item(&'p Step<'p>, &'p str),
}

impl Step<'_> {
    fn edges(&self) -> Vec<Cow<'_, str>> {
        match self {
            Step::Root => Vec::new(),
            Step::Field(parent, key) => {
                let mut v = parent.edges();
                v.push(Cow::Owned(format!("f:{key}")));
                v
            }
            Step::Item(parent, edge) => {
                let mut v = parent.edges();
                v.push(Cow::Borrowed(edge));
                v
            }
        }
    }
}
