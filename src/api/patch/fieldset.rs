//! Sets of fields, as `managedFields` stores them (`fieldsV1`).
//!
//! A set is a tree. An edge is a path element in its stored form: `f:name` (a field or map key), `k:{"name":"x"}`
//! (a list item by its keys), `v:"x"` (a set's element), `i:0` (an index). A node says whether the path that ends there
//! is in the set.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::{Map, Value};

use crate::field::quote;

/// A set of paths.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FieldSet(BTreeMap<Box<str>, Node>);

/// The end of an edge.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// The path that ends here is in the set.
    pub member: bool,
    /// What is below.
    pub below: FieldSet,
}

impl Node {
    fn is_empty(&self) -> bool {
        !self.member && self.below.is_empty()
    }
}

impl FieldSet {
    /// Whether nothing is in the set.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The node at an edge.
    pub fn get(&self, edge: &str) -> Option<&Node> {
        self.0.get(edge)
    }

    /// Edges and nodes, sorted.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Node)> {
        self.0.iter().map(|(k, n)| (&**k, n))
    }

    /// The node at an edge, made if absent.
    pub fn entry(&mut self, edge: &str) -> &mut Node {
        if !self.0.contains_key(edge) {
            self.0.insert(edge.into(), Node::default());
        }
        self.0.entry(edge.into()).or_default()
    }

    /// Puts a path in the set.
    pub fn insert<'p>(&mut self, path: impl IntoIterator<Item = &'p str>) {
        let mut set = self;
        let mut path = path.into_iter().peekable();
        while let Some(edge) = path.next() {
            let node = set.entry(edge);
            if path.peek().is_none() {
                node.member = true;
                return;
            }
            set = &mut node.below;
        }
    }

    /// Paths in both.
    pub fn intersection(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a && b, |_| Self::default())
    }

    /// Paths of this set that are not in the other.
    pub fn difference(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a && !b, Self::clone)
    }

    fn zip(&self, other: &Self, member: fn(bool, bool) -> bool, alone: fn(&Self) -> Self) -> Self {
        let mut out = BTreeMap::new();
        for (edge, a) in &self.0 {
            let node = match other.0.get(edge) {
                Some(b) => Node { member: member(a.member, b.member), below: a.below.zip(&b.below, member, alone) },
                None => Node { member: a.member && member(true, false), below: alone(&a.below) },
            };
            if !node.is_empty() {
                out.insert(edge.clone(), node);
            }
        }
        Self(out)
    }

    /// Adds all paths of the other set.
    pub fn extend(&mut self, other: &Self) {
        for (edge, b) in &other.0 {
            match self.0.get_mut(edge) {
                Some(a) => {
                    a.member |= b.member;
                    a.below.extend(&b.below);
                }
                None => {
                    self.0.insert(edge.clone(), b.clone());
                }
            }
        }
    }

    /// Removes the dotted path and everything below it.
    pub fn remove_tree(&mut self, path: &str) {
        let (head, rest) = match path.split_once('.') {
            Some((h, r)) => (h, Some(r)),
            None => (path, None),
        };
        let edge = format!("f:{head}");
        match rest {
            None => {
                self.0.remove(edge.as_str());
            }
            Some(rest) => {
                if let Some(node) = self.0.get_mut(edge.as_str()) {
                    node.below.remove_tree(rest);
                    if node.is_empty() {
                        self.0.remove(edge.as_str());
                    }
                }
            }
        }
    }

    /// Removes one path, not what is below it.
    pub fn remove(&mut self, path: &[&str]) {
        let Some((head, rest)) = path.split_first() else { return };
        if let Some(node) = self.0.get_mut(*head) {
            if rest.is_empty() {
                node.member = false;
            } else {
                node.below.remove(rest);
            }
            if node.is_empty() {
                self.0.remove(*head);
            }
        }
    }

    /// Each path in the set, as upstream prints it: `.spec.containers[name="x"].image`.
    pub fn paths(&self) -> Vec<String> {
        let mut out = Vec::new();
        self.collect("", &mut out);
        out
    }

    fn collect(&self, prefix: &str, out: &mut Vec<String>) {
        for (edge, _) in self.0.iter().filter(|(_, n)| n.member) {
            out.push(format!("{prefix}{}", print_edge(edge)));
        }
        for (edge, node) in self.0.iter().filter(|(_, n)| !n.below.is_empty()) {
            node.below.collect(&format!("{prefix}{}", print_edge(edge)), out);
        }
    }

    /// The stored form.
    pub fn to_value(&self) -> Value {
        let mut map = Map::new();
        for (edge, node) in &self.0 {
            let mut value = node.below.to_value();
            if node.member
                && !node.below.is_empty()
                && let Value::Object(m) = &mut value
            {
                m.insert(".".into(), Value::Object(Map::new()));
            }
            map.insert(edge.to_string(), value);
        }
        Value::Object(map)
    }

    /// Reads the stored form; what cannot be read is left out.
    pub fn from_value(v: &Value) -> Self {
        let mut out = BTreeMap::new();
        for (edge, below) in v.as_object().into_iter().flatten() {
            if edge == "." {
                continue;
            }
            let Some(edge) = canonical(edge) else { continue };
            let member = below.as_object().is_some_and(|m| m.is_empty() || m.contains_key("."));
            let node = Node { member, below: Self::from_value(below) };
            if !node.is_empty() {
                out.insert(edge, node);
            }
        }
        Self(out)
    }
}

fn canonical(edge: &str) -> Option<Box<str>> {
    match edge.get(..2)? {
        "f:" | "i:" => Some(edge.into()),
        kind @ ("k:" | "v:") => {
            let v: Value = serde_json::from_str(&edge[2..]).ok()?;
            Some(format!("{kind}{v}").into())
        }
        _ => None,
    }
}

/// `f:a` as `.a`, `k:{"b":"c"}` as `[b="c"]`, `v:"x"` as `[="x"]`, `i:1` as `[1]`.
pub(super) fn print_edge(edge: &str) -> String {
    let (kind, rest) = edge.split_at(edge.len().min(2));
    match kind {
        "f:" => format!(".{rest}"),
        "i:" => format!("[{rest}]"),
        "v:" => {
            let v: Value = serde_json::from_str(rest).unwrap_or_default();
            format!("[={}]", print_value(&v))
        }
        _ => {
            let v: Value = serde_json::from_str(rest).unwrap_or_default();
            let mut s = String::from("[");
            for (i, (k, v)) in v.as_object().into_iter().flatten().enumerate() {
                let comma = if i > 0 { "," } else { "" };
                let _ = write!(s, "{comma}{k}={}", print_value(v));
            }
            s + "]"
        }
    }
}

fn print_value(v: &Value) -> String {
    match v {
        Value::String(s) => quote(s),
        other => other.to_string(),
    }
}
