//! What a list or a watch selects, ready to be asked of many objects.

use std::borrow::Cow;
use std::sync::Arc;

use windlass_api::registry::Resource;
use windlass_api::selector::{FieldSelector, LabelSelector};

use super::event::{CacheEvent, Change, Delivery};
use super::stored::{self, Stored};

/// The selectable fields of a resource that the cache finds by span.
#[derive(Clone, Debug, Default)]
pub struct Fields(Vec<Indexed>);

#[derive(Clone, Debug)]
struct Indexed {
    name: String,
    path: String,
    default: String,
}

impl Fields {
    /// The fields of the storage version whose text is one scalar at one path.
    pub fn of(resource: &Resource) -> Fields {
        let fields = resource.stored().selectable_fields.iter().filter_map(|f| match f.pointers.as_slice() {
            [pointer] if !pointer.iter().any(|key| key.contains('.')) => {
                Some(Indexed { name: f.path.clone(), path: pointer.join("."), default: f.default.clone() })
            }
            _ => None,
        });
        Fields(fields.collect())
    }

    pub(super) fn paths(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|f| f.path.as_str())
    }

    fn index(&self, name: &str) -> Option<usize> {
        self.0.iter().position(|f| f.name == name)
    }
}

/// A watcher's place in the index.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum IndexKey {
    Name(Arc<str>),
    Field(usize, Box<str>),
    Namespace(Box<str>),
}

#[derive(Clone, Debug)]
struct Term {
    what: What,
    negated: bool,
    value: String,
}

#[derive(Clone, Debug)]
enum What {
    Name,
    Namespace,
    /// By span; the default stands for an absent field.
    Indexed(usize, String),
    /// By parsing the object (fields with a fallback, fields of another version).
    Parsed(String),
}

/// A namespace, a label selector and a field selector.
#[derive(Clone, Debug)]
pub struct Filter {
    /// `None` for all namespaces.
    pub namespace: Option<String>,
    labels: LabelSelector,
    terms: Vec<Term>,
    resource: Arc<Resource>,
}

impl Filter {
    /// `fields` must have passed [`FieldSelector::check`] for `resource`, the request's; another row may hold its objects, and then
    /// `cache_fields` are that row's and are not used.
    pub fn new(resource: &Arc<Resource>, cache_fields: &Fields, namespace: Option<&str>, labels: LabelSelector, fields: &FieldSelector) -> Filter {
        let foreign = resource.stored_as.is_some();
        let terms = fields.requirements().iter().map(|r| Term {
            what: match r.path.as_str() {
                "metadata.name" => What::Name,
                "metadata.namespace" => What::Namespace,
                path => match cache_fields.index(path) {
                    Some(index) if !foreign => What::Indexed(index, cache_fields.0[index].default.clone()),
                    _ => What::Parsed(path.to_owned()),
                },
            },
            negated: r.negated,
            value: r.value.clone(),
        });
        Filter { namespace: namespace.filter(|n| !n.is_empty()).map(str::to_owned), labels, terms: terms.collect(), resource: resource.clone() }
    }

    /// Everything, or everything in a namespace.
    pub fn all(resource: &Arc<Resource>, namespace: Option<&str>) -> Filter {
        Filter::new(resource, &Fields::default(), namespace, LabelSelector::default(), &FieldSelector::default())
    }

    /// Whether more than the namespace selects.
    pub fn has_selector(&self) -> bool {
        !self.labels.is_empty() || !self.terms.is_empty()
    }

    fn exact(&self, pick: impl Fn(&What) -> bool) -> Option<&str> {
        self.terms.iter().find(|t| !t.negated && pick(&t.what)).map(|t| t.value.as_str())
    }

    /// The one key that can match, if the selector names an object.
    pub fn single_key(&self) -> Option<Arc<str>> {
        let name = self.exact(|w| matches!(w, What::Name))?;
        if !self.resource.namespaced {
            return Some(name.into());
        }
        let namespace = self.namespace.as_deref().or_else(|| self.exact(|w| matches!(w, What::Namespace)))?;
        Some(format!("{namespace}/{name}").into())
    }

    pub(super) fn index_key(&self) -> Option<IndexKey> {
        if let Some(key) = self.single_key() {
            return Some(IndexKey::Name(key));
        }
        let indexed = self.terms.iter().find_map(|t| match (&t.what, t.negated) {
            // An absent field is indexed as empty, so a term on the default's text cannot use the index.
            (What::Indexed(index, default), false) if t.value != *default || default.is_empty() => {
                Some(IndexKey::Field(*index, t.value.as_str().into()))
            }
            _ => None,
        });
        indexed.or_else(|| self.namespace.as_deref().map(|ns| IndexKey::Namespace(ns.into())))
    }

    /// Whether an object is selected.
    pub fn matches(&self, object: &Stored) -> bool {
        if self.namespace.as_deref().is_some_and(|ns| ns != object.namespace()) {
            return false;
        }
        for term in &self.terms {
            let text = match &term.what {
                What::Name => Cow::Borrowed(object.name()),
                What::Namespace => Cow::Borrowed(object.namespace()),
                What::Indexed(index, default) => match object.field(*index) {
                    text if text.is_empty() => Cow::Borrowed(default.as_str()),
                    text => text,
                },
                What::Parsed(path) => Cow::Owned(self.parsed(path, object)),
            };
            if (text == term.value) == term.negated {
                return false;
            }
        }
        if self.labels.is_empty() {
            return true;
        }
        let labels = object.labels();
        self.labels.matches(|key| stored::label(&labels, key))
    }

    fn parsed(&self, path: &str, object: &Stored) -> String {
        let resource = &self.resource;
        let Some(field) = resource.selectable(&resource.storage_version, path) else { return String::new() };
        let value = object.value();
        if resource.stored_as.is_some() {
            let own = windlass_api::convert::convert_unchecked((*value).clone(), &resource.api_version(&resource.storage_version));
            return field.text(&own).into_owned();
        }
        field.text(&value).into_owned()
    }

    /// What this watcher is told of a change, if anything: entering the selection is ADDED, leaving it DELETED.
    pub fn delivery(&self, event: &Arc<CacheEvent>) -> Option<Delivery> {
        let change = if !self.has_selector() {
            self.namespace.as_deref().is_none_or(|ns| ns == event.object.namespace()).then_some(event.change)
        } else {
            let before = event.previous.as_ref().is_some_and(|p| self.matches(p));
            match event.change {
                Change::Deleted => before.then_some(Change::Deleted),
                _ => match (before, self.matches(&event.object)) {
                    (true, true) => Some(Change::Modified),
                    (false, true) => Some(Change::Added),
                    (true, false) => Some(Change::Deleted),
                    (false, false) => None,
                },
            }
        }?;
        Some(Delivery { change, event: event.clone() })
    }
}
