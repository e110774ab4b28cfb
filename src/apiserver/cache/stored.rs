//! One object as the cache holds it: its bytes, and where in them the selectors' answers are.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::{Arc, LazyLock, Weak};

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use serde_json::Value;
use smallvec::SmallVec;

use super::scan::{self, Paths, Span};
use crate::rest::packed::Packed;

/// The form that an object takes on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    Json,
    /// The bare message, without the `k8s\0` envelope.
    Protobuf,
}

/// Which encoded form of an object: its version, its encoding, whole or only its metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Form {
    pub api_version: Arc<str>,
    pub encoding: Encoding,
    pub metadata_only: bool,
}

/// An object at one revision. Cheap to share; never changes.
pub struct Stored {
    /// `namespace/name`, or `name` when cluster-scoped.
    key: Arc<str>,
    slash: Option<u32>,
    /// JSON in the storage version, with `metadata.resourceVersion`.
    pub bytes: Bytes,
    /// The revision of the last write: `metadata.resourceVersion`.
    pub revision: u64,
    version_at: u32,
    version_len: u32,
    labels: Span,
    fields: SmallVec<[Span; 2]>,
    value: Mutex<Weak<Value>>,
    forms: Mutex<SmallVec<[(Form, Bytes); 1]>>,
    packed: Mutex<Option<Box<(Form, Arc<Packed>)>>>,
}

impl std::fmt::Debug for Stored {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stored({} @{}, {} bytes)", self.key, self.revision, self.bytes.len())
    }
}

/// The values parsed last are kept: what was just written or read is likely to be read again.
const RECENT_VALUES: usize = 256;
static RECENT: LazyLock<Mutex<VecDeque<Arc<Value>>>> = LazyLock::new(|| Mutex::new(VecDeque::new()));

fn remember(value: &Arc<Value>) {
    let mut recent = RECENT.lock();
    if recent.len() >= RECENT_VALUES {
        recent.pop_front();
    }
    recent.push_back(value.clone());
}

/// Forgets the values kept for speed alone (the feed does so when nothing was written for a while).
pub(crate) fn forget_recent() {
    *RECENT.lock() = VecDeque::new();
}

impl Stored {
    /// Takes what the store holds under `key` (without the resource's prefix) and puts the revision into it.
    /// `None` if the bytes are not an object with metadata.
    pub fn new(key: &str, raw: &[u8], revision: u64, paths: &Paths) -> Option<Stored> {
        let mut scan = scan::scan(raw, paths)?;
        let at = scan.metadata_start as usize;
        let comma = if scan.metadata_empty { "" } else { "," };
        let insert = format!("\"resourceVersion\":\"{revision}\"{comma}");
        let mut bytes = BytesMut::with_capacity(raw.len() + insert.len());
        bytes.extend_from_slice(&raw[..at]);
        bytes.extend_from_slice(insert.as_bytes());
        bytes.extend_from_slice(&raw[at..]);
        let shift = |span: &mut Span| {
            if span.0 >= at as u32 {
                span.0 += insert.len() as u32;
                span.1 += insert.len() as u32;
            }
        };
        shift(&mut scan.labels);
        scan.fields.iter_mut().for_each(shift);
        Some(Stored {
            key: key.into(),
            slash: key.find('/').map(|at| at as u32),
            bytes: bytes.freeze(),
            revision,
            version_at: at as u32,
            version_len: insert.len() as u32,
            labels: scan.labels,
            fields: scan.fields,
            value: Mutex::new(Weak::new()),
            forms: Mutex::new(SmallVec::new()),
            packed: Mutex::new(None),
        })
    }

    /// An object that is not stored (a dry run's result): its bytes as they are.
    pub fn unversioned(key: &str, raw: Bytes, paths: &Paths) -> Option<Stored> {
        let scan = scan::scan(&raw, paths)?;
        Some(Stored {
            key: key.into(),
            slash: key.find('/').map(|at| at as u32),
            bytes: raw,
            revision: 0,
            version_at: scan.metadata_start,
            version_len: 0,
            labels: scan.labels,
            fields: scan.fields,
            value: Mutex::new(Weak::new()),
            forms: Mutex::new(SmallVec::new()),
            packed: Mutex::new(None),
        })
    }

    /// The raw JSON of `metadata`.
    pub fn metadata_json(&self) -> &[u8] {
        let start = self.version_at as usize - 1;
        scan::skip_value(&self.bytes, start).map_or(b"{}", |end| &self.bytes[start..end])
    }

    /// The same object with another revision: what a deletion, or leaving a selector, reports.
    pub fn at_revision(&self, revision: u64, paths: &Paths) -> Stored {
        let (start, end) = (self.version_at as usize, (self.version_at + self.version_len) as usize);
        let mut raw = Vec::with_capacity(self.bytes.len());
        raw.extend_from_slice(&self.bytes[..start]);
        raw.extend_from_slice(&self.bytes[end..]);
        // These bytes were scanned before; only the revision's digits differ.
        Stored::new(&self.key, &raw, revision, paths).unwrap_or_else(|| Stored {
            key: self.key.clone(),
            slash: self.slash,
            bytes: self.bytes.clone(),
            revision,
            version_at: self.version_at,
            version_len: self.version_len,
            labels: self.labels,
            fields: self.fields.clone(),
            value: Mutex::new(Weak::new()),
            forms: Mutex::new(SmallVec::new()),
            packed: Mutex::new(None),
        })
    }

    pub fn key(&self) -> &Arc<str> {
        &self.key
    }

    /// Empty when cluster-scoped.
    pub fn namespace(&self) -> &str {
        self.slash.map_or("", |at| &self.key[..at as usize])
    }

    pub fn name(&self) -> &str {
        self.slash.map_or(&self.key, |at| &self.key[at as usize + 1..])
    }

    /// The object as a tree, parsed when first asked for and kept while somebody holds it (and a little longer).
    pub fn value(&self) -> Arc<Value> {
        let mut slot = self.value.lock();
        if let Some(value) = slot.upgrade() {
            return value;
        }
        let value = Arc::new(parse(&self.bytes));
        *slot = Arc::downgrade(&value);
        remember(&value);
        value
    }

    /// Spares a parse: the writer has the tree of these very bytes.
    pub(crate) fn set_value(&self, value: Arc<Value>) {
        *self.value.lock() = Arc::downgrade(&value);
        remember(&value);
    }

    /// The raw JSON of the selectable field with this index; empty if the object lacks it.
    fn span(&self, (a, b): Span) -> &[u8] {
        &self.bytes[a as usize..b as usize]
    }

    /// A selectable field by its index in the cache's paths; `""` if absent or null.
    pub fn field(&self, index: usize) -> Cow<'_, str> {
        self.fields.get(index).map_or(Cow::Borrowed(""), |span| scalar(self.span(*span)))
    }

    /// All labels.
    pub fn labels(&self) -> Labels<'_> {
        let mut labels = Labels::new();
        let raw = self.span(self.labels);
        if raw.is_empty() {
            return labels;
        }
        if !simple_labels(raw, &mut labels) {
            labels.clear();
            if let Ok(Value::Object(map)) = serde_json::from_slice(raw) {
                for (k, v) in map {
                    if let Value::String(v) = v {
                        labels.push((Cow::Owned(k), Cow::Owned(v)));
                    }
                }
            }
        }
        labels
    }

    /// An encoded form that somebody made before.
    pub fn form(&self, form: &Form) -> Option<Bytes> {
        self.forms.lock().iter().find(|(f, _)| f == form).map(|(_, b)| b.clone())
    }

    /// The object compressed, as a part of a list.
    pub(crate) fn packed(&self, form: &Form) -> Option<Arc<Packed>> {
        self.packed.lock().as_ref().filter(|p| p.0 == *form).map(|p| p.1.clone())
    }

    /// Keeps the compressed form that was asked for last.
    pub(crate) fn keep_packed(&self, form: Form, packed: Arc<Packed>) {
        *self.packed.lock() = Some(Box::new((form, packed)));
    }

    /// Keeps an encoded form for the next reader.
    pub fn keep_form(&self, form: Form, bytes: Bytes) {
        let mut forms = self.forms.lock();
        if forms.len() < 4 && !forms.iter().any(|(f, _)| *f == form) {
            forms.push((form, bytes));
        }
    }
}

/// Labels of one object, borrowed from its bytes where they hold no escapes.
pub type Labels<'a> = SmallVec<[(Cow<'a, str>, Cow<'a, str>); 8]>;

/// Looks a label up.
pub fn label<'a>(labels: &'a Labels<'_>, key: &str) -> Option<&'a str> {
    labels.iter().find(|(k, _)| k == key).map(|(_, v)| &**v)
}

/// Reads `{"k":"v",...}` without escapes, which is what labels look like; false if it is anything else.
fn simple_labels<'a>(raw: &'a [u8], out: &mut Labels<'a>) -> bool {
    let Ok(text) = std::str::from_utf8(raw) else { return false };
    let Some(mut rest) = text.strip_prefix('{').and_then(|t| t.strip_suffix('}')) else { return false };
    if text.contains('\\') {
        return false;
    }
    fn quoted(rest: &str) -> Option<(&str, &str)> {
        rest.strip_prefix('"')?.split_once('"')
    }
    while !rest.is_empty() {
        let Some((k, after)) = quoted(rest) else { return false };
        let Some((v, after)) = after.strip_prefix(':').and_then(quoted) else { return false };
        out.push((Cow::Borrowed(k), Cow::Borrowed(v)));
        rest = match after.strip_prefix(',') {
            Some(next) => next,
            None if after.is_empty() => after,
            None => return false,
        };
    }
    true
}

/// A JSON scalar as a field selector sees it.
fn scalar(raw: &[u8]) -> Cow<'_, str> {
    match raw {
        [] | b"null" => Cow::Borrowed(""),
        [b'"', inner @ .., b'"'] if !inner.contains(&b'\\') => String::from_utf8_lossy(inner),
        [b'"', ..] => Cow::Owned(serde_json::from_slice(raw).unwrap_or_default()),
        _ => String::from_utf8_lossy(raw),
    }
}

/// Bytes that passed [`scan`](scan::scan) but are no JSON can only come from a damaged store; they read as `null`.
fn parse(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap_or_else(|error| {
        tracing::error!(%error, "an object in the store is not JSON; restore it from a checkpoint or delete its key");
        Value::Null
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(raw: &str) -> Stored {
        Stored::new("ns/p", raw.as_bytes(), 42, &Paths::new(["spec.nodeName"])).expect("an object")
    }

    #[test]
    fn revision_is_spliced_and_replaced() {
        for raw in [
            r#"{"kind":"Pod","metadata":{"labels":{"a":"b"},"name":"p"},"spec":{"nodeName":"n1"}}"#,
            r#"{"kind":"Pod","spec":{"nodeName":"n1"},"metadata":{"labels":{"a":"b"},"name":"p"}}"#,
        ] {
            let s = stored(raw);
            let later = s.at_revision(1234567, &Paths::new(["spec.nodeName"]));
            for (s, rv) in [(&s, "42"), (&later, "1234567")] {
                let mut want: Value = serde_json::from_str(raw).expect("JSON");
                want["metadata"]["resourceVersion"] = rv.into();
                assert_eq!(*s.value(), want);
                assert_eq!(s.field(0), "n1");
                assert_eq!(label(&s.labels(), "a"), Some("b"));
                assert_eq!((s.namespace(), s.name()), ("ns", "p"));
            }
        }
        assert_eq!(stored(r#"{"metadata":{}}"#).value()["metadata"]["resourceVersion"], "42");
    }

    #[test]
    fn labels_with_escapes() {
        let s = stored(r#"{"metadata":{"labels":{"a":"\u0041","b":"" , "c":"x"}}}"#);
        let labels = s.labels();
        assert_eq!((label(&labels, "a"), label(&labels, "b"), label(&labels, "z")), (Some("A"), Some(""), None));
        assert!(stored(r#"{"metadata":{"labels":null}}"#).labels().is_empty());
    }
}
