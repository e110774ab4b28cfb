//! A place in an object: the value, its path, and where to report what is wrong with it.
//!
//! Rules walk objects by [`At`]. A path's text is built only when an error is reported, so that checking a valid
//! object allocates nothing.

use std::cell::RefCell;

use serde_json::Value;

use crate::field::{ErrorKind, FieldError};

/// Collects errors while rules run.
#[derive(Default)]
pub struct Sink(RefCell<Vec<FieldError>>);

impl Sink {
    /// The root of `value`, reporting here.
    pub fn root<'a>(&'a self, value: &'a Value) -> At<'a> {
        At { value, parent: None, step: Step::Root, sink: self }
    }

    /// What was reported.
    pub fn into_errors(self) -> Vec<FieldError> {
        self.0.into_inner()
    }
}

#[derive(Clone, Copy)]
enum Step<'a> {
    Root,
    Path(&'a str),
    Index(usize),
    Key(&'a str),
}

static NULL: Value = Value::Null;

/// A value inside of an object. Absent and `null` are the same: [`At::present`] is false.
#[derive(Clone, Copy)]
pub struct At<'a> {
    /// The value here; `Null` when there is none.
    pub value: &'a Value,
    parent: Option<&'a At<'a>>,
    step: Step<'a>,
    sink: &'a Sink,
}

impl<'a> At<'a> {
    /// The value at a dotted path below.
    pub fn at<'b>(&'b self, path: &'b str) -> At<'b> {
        let mut value = self.value;
        for name in path.split('.') {
            value = value.get(name).unwrap_or(&NULL);
        }
        At { value, parent: Some(self), step: Step::Path(path), sink: self.sink }
    }

    /// The value of one map key; the path shows it as `[key]`.
    pub fn key<'b>(&'b self, key: &'b str) -> At<'b> {
        let value = self.value.get(key).unwrap_or(&NULL);
        At { value, parent: Some(self), step: Step::Key(key), sink: self.sink }
    }

    /// A list's items with their places.
    pub fn items<'b>(&'b self) -> impl Iterator<Item = At<'b>> + 'b {
        let list = self.value.as_array().map_or(&[][..], Vec::as_slice);
        list.iter().enumerate().map(move |(i, value)| At {
            value,
            parent: Some(self),
            step: Step::Index(i),
            sink: self.sink,
        })
    }

    /// A map's entries; paths show `[key]`.
    pub fn entries<'b>(&'b self) -> impl Iterator<Item = (&'b str, At<'b>)> + 'b {
        self.value.as_object().into_iter().flatten().map(move |(k, value)| {
            (k.as_str(), At { value, parent: Some(self), step: Step::Key(k), sink: self.sink })
        })
    }

    /// The same place, with another value in it (the old object's, a computed one).
    pub fn with<'b>(&'b self, value: &'b Value) -> At<'b> {
        At { value, parent: self.parent, step: self.step, sink: self.sink }
    }

    /// Whether there is a value at all.
    pub fn present(&self) -> bool {
        !self.value.is_null()
    }

    /// Whether a dotted path below has a value.
    pub fn has(&self, path: &str) -> bool {
        !get(self.value, path).is_null()
    }

    /// The string here, or "".
    pub fn str(&self) -> &'a str {
        self.value.as_str().unwrap_or("")
    }

    /// The string at a dotted path below, or "".
    pub fn text(&self, path: &str) -> &'a str {
        get(self.value, path).as_str().unwrap_or("")
    }

    /// The integer here.
    pub fn int(&self) -> Option<i64> {
        self.value.as_i64()
    }

    /// The integer at a dotted path below.
    pub fn num(&self, path: &str) -> Option<i64> {
        get(self.value, path).as_i64()
    }

    /// Whether `true` is at a dotted path below.
    pub fn flag(&self, path: &str) -> bool {
        get(self.value, path).as_bool().unwrap_or(false)
    }

    /// Number of items of a list or map; 0 otherwise.
    pub fn len(&self) -> usize {
        match self.value {
            Value::Array(l) => l.len(),
            Value::Object(m) => m.len(),
            _ => 0,
        }
    }

    /// Whether it is absent or an empty string, list or map.
    pub fn is_empty(&self) -> bool {
        is_empty(self.value)
    }

    /// The path's text.
    pub fn path(&self) -> String {
        let mut s = String::new();
        self.write_path(&mut s);
        s
    }

    fn write_path(&self, out: &mut String) {
        if let Some(p) = self.parent {
            p.write_path(out);
        }
        match self.step {
            Step::Root => {}
            Step::Path(name) => {
                if !out.is_empty() {
                    out.push('.');
                }
                out.push_str(name);
            }
            Step::Index(i) => {
                out.push('[');
                out.push_str(&i.to_string());
                out.push(']');
            }
            Step::Key(k) => {
                out.push('[');
                out.push_str(k);
                out.push(']');
            }
        }
    }

    /// Reports an error made elsewhere.
    pub fn push(&self, error: FieldError) {
        self.sink.0.borrow_mut().push(error);
    }

    /// Number of errors reported so far, to tell whether a sub-check found any.
    pub fn reported(&self) -> usize {
        self.sink.0.borrow().len()
    }

    /// Missing.
    pub fn required(&self, detail: impl Into<String>) {
        self.push(FieldError::required(self.path(), detail));
    }

    /// Malformed. An absent value shows as an empty string, which it is to a decoder.
    pub fn invalid(&self, detail: impl Into<String>) {
        self.push(FieldError::invalid(self.path(), self.shown(), detail));
    }

    fn shown(&self) -> Value {
        if self.present() { self.value.clone() } else { "".into() }
    }

    /// Malformed, showing another value than the one here.
    pub fn invalid_value(&self, value: impl Into<Value>, detail: impl Into<String>) {
        self.push(FieldError::invalid(self.path(), value, detail));
    }

    /// Not allowed here.
    pub fn forbidden(&self, detail: impl Into<String>) {
        self.push(FieldError::forbidden(self.path(), detail));
    }

    /// Occurs twice.
    pub fn duplicate(&self) {
        self.push(FieldError::duplicate(self.path(), self.shown()));
    }

    /// A reference to nothing.
    pub fn not_found(&self) {
        self.push(FieldError::not_found(self.path(), self.value.clone()));
    }

    /// Not one of `supported`.
    pub fn not_supported(&self, supported: &[&str]) {
        self.push(FieldError::not_supported(self.path(), self.shown(), supported));
    }

    /// More than `max` bytes.
    pub fn too_long(&self, max: usize) {
        self.push(FieldError::too_long(self.path(), max));
    }

    /// More than `max` items.
    pub fn too_many(&self, max: usize) {
        self.push(FieldError::too_many(self.path(), self.len(), max));
    }

    /// Any other kind.
    pub fn error(&self, kind: ErrorKind, value: Option<Value>, detail: impl Into<String>) {
        self.push(FieldError::new(kind, self.path(), value, detail));
    }

    /// Reports `Required` when empty; whether something is there.
    pub fn require(&self) -> bool {
        let there = !self.is_empty();
        if !there {
            self.required("");
        }
        there
    }

    /// A string out of `allowed`: absent is `Required`, others `NotSupported`.
    pub fn one_of(&self, allowed: &[&str]) {
        if self.str().is_empty() {
            self.required("");
        } else if !allowed.contains(&self.str()) {
            self.not_supported(allowed);
        }
    }

    /// Like [`At::one_of`], absent is fine.
    pub fn optional_one_of(&self, allowed: &[&str]) {
        if self.present() && !allowed.contains(&self.str()) {
            self.not_supported(allowed);
        }
    }

    /// An integer that, where present, is not negative.
    pub fn non_negative(&self) {
        if self.int().is_some_and(|n| n < 0) {
            self.invalid("must be greater than or equal to 0");
        }
    }

    /// An integer that, where present, is above zero.
    pub fn positive(&self) {
        if self.int().is_some_and(|n| n <= 0) {
            self.invalid("must be greater than 0");
        }
    }

    /// An integer that, where present, lies in `lo..=hi`.
    pub fn in_range(&self, lo: i64, hi: i64) {
        if self.int().is_some_and(|n| n < lo || n > hi) {
            self.invalid(format!("must be between {lo} and {hi}, inclusive"));
        }
    }

    /// The value here equals the old object's at the same place.
    pub fn immutable(&self, old: &Value) {
        if same(self.value, old) {
            return;
        }
        // Go shows an absent text as empty, everything else as null.
        match self.value.is_null() && !old.is_string() {
            true => self.invalid_value(Value::Null, "field is immutable"),
            false => self.invalid("field is immutable"),
        }
    }

    /// Each string here satisfies `rule`.
    pub fn each(&self, rule: impl Fn(&At<'_>)) {
        for item in self.items() {
            rule(&item);
        }
    }

    /// Reports each message of a syntax rule as `Invalid`.
    pub fn syntax(&self, rule: impl Fn(&str) -> Vec<String>) {
        for msg in rule(self.str()) {
            self.invalid(msg);
        }
    }
}

/// The value at a dotted path; `Null` when there is none.
pub fn get<'v>(value: &'v Value, path: &str) -> &'v Value {
    let mut v = value;
    for name in path.split('.') {
        v = match v.get(name) {
            Some(v) => v,
            None => return &NULL,
        };
    }
    v
}

/// The string at a dotted path, or "".
pub fn text<'v>(value: &'v Value, path: &str) -> &'v str {
    get(value, path).as_str().unwrap_or("")
}

/// Whether there is nothing in it: absent, null, "", [], {}.
pub fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(s) => s.is_empty(),
        Value::Array(l) => l.is_empty(),
        Value::Object(m) => m.is_empty(),
        _ => false,
    }
}

/// Semantic equality: absent, null and empty lists or maps are the same, inside too.
pub fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Object(x), Value::Object(y)) => {
            x.iter().all(|(k, v)| same(v, y.get(k).unwrap_or(&NULL)))
                && y.iter().all(|(k, v)| x.contains_key(k) || is_blank(v))
        }
        (Value::Array(x), Value::Array(y)) => x.len() == y.len() && x.iter().zip(y).all(|(p, q)| same(p, q)),
        _ => a == b || (is_blank(a) && is_blank(b)),
    }
}

fn is_blank(v: &Value) -> bool {
    match v {
        Value::Null => true,
        Value::Array(l) => l.is_empty(),
        Value::Object(m) => m.values().all(is_blank),
        _ => false,
    }
}

/// Puts `value` at a dotted path unless something is there; makes the objects on the way.
pub fn default_at(object: &mut Value, path: &str, value: impl Into<Value>) {
    if let Some(slot) = slot(object, path)
        && slot.is_null()
    {
        *slot = value.into();
    }
}

/// Like [`default_at`], an empty string counts as absent.
pub fn default_text(object: &mut Value, path: &str, value: &str) {
    if let Some(slot) = slot(object, path)
        && (slot.is_null() || slot.as_str() == Some(""))
    {
        *slot = value.into();
    }
}

/// Puts `value` at a dotted path; `Null` removes.
pub fn set(object: &mut Value, path: &str, value: Value) {
    if value.is_null() {
        remove(object, path);
    } else if let Some(slot) = slot(object, path) {
        *slot = value;
    }
}

/// Removes what is at a dotted path and returns it.
pub fn remove(object: &mut Value, path: &str) -> Option<Value> {
    let (parent, name) = match path.rsplit_once('.') {
        Some((p, n)) => (get_mut(object, p)?, n),
        None => (object, path),
    };
    parent.as_object_mut()?.remove(name)
}

/// The value at a dotted path, if it is there.
pub fn get_mut<'v>(object: &'v mut Value, path: &str) -> Option<&'v mut Value> {
    let mut v = object;
    for name in path.split('.') {
        v = v.get_mut(name)?;
    }
    Some(v)
}

/// The place at a dotted path, made (as `Null`) where it is absent; `None` where something that is no object is in the way.
pub fn slot<'v>(object: &'v mut Value, path: &str) -> Option<&'v mut Value> {
    let mut v = object;
    for name in path.split('.') {
        if v.is_null() {
            *v = Value::Object(serde_json::Map::new());
        }
        v = v.as_object_mut()?.entry(name).or_insert(Value::Null);
    }
    Some(v)
}

/// The items of a list at a dotted path, to change them.
pub fn items_mut<'v>(object: &'v mut Value, path: &str) -> impl Iterator<Item = &'v mut Value> {
    get_mut(object, path).and_then(Value::as_array_mut).into_iter().flatten()
}

/// The items of a list at a dotted path.
pub fn items<'v>(object: &'v Value, path: &str) -> &'v [Value] {
    get(object, path).as_array().map_or(&[], Vec::as_slice)
}
