//! Server-side apply and `managedFields` (KEP-555): who set which field.
//!
//! Every write is recorded: a non-apply write by [`Writer::update_managed`], an apply by [`Writer::apply`]. The first
//! compares the trees once and touches nothing when they are equal in what counts.
//!
//! Sets of managers that wrote another version of the same resource are compared as if it were this one: versions of
//! one resource rarely rename fields, and a path that no longer exists owns nothing.

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::fieldset::FieldSet;
use super::typed::Types;
use crate::field::quote;
use crate::meta;
use crate::schema::{Schemas, TypeId};
use crate::status::{ApiError, Cause};

/// `kubectl apply`'s record of what it sent.
pub const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// Most entries for updates; older ones are merged into [`ANCIENT`].
pub const MAX_UPDATE_MANAGERS: usize = 10;
const ANCIENT: &str = "ancient-changes";
const BEFORE_FIRST_APPLY: &str = "before-first-apply";

/// System fields: nobody owns them.
pub(super) const SYSTEM: [&str; 9] = [
    "name",
    "namespace",
    "creationTimestamp",
    "selfLink",
    "uid",
    "clusterName",
    "generation",
    "managedFields",
    "resourceVersion",
];

/// One entry of `managedFields`.
#[derive(Clone, Debug, PartialEq)]
struct Entry {
    manager: String,
    applied: bool,
    api_version: String,
    subresource: String,
    time: Option<String>,
    set: FieldSet,
}

impl Entry {
    fn decode(v: &Value) -> Option<Self> {
        let text = |k: &str| v[k].as_str().unwrap_or_default().to_owned();
        if !matches!(v["fieldsType"].as_str(), None | Some("FieldsV1")) {
            return None;
        }
        Some(Self {
            manager: text("manager"),
            applied: v["operation"] == "Apply",
            api_version: text("apiVersion"),
            subresource: text("subresource"),
            time: v["time"].as_str().map(str::to_owned),
            set: FieldSet::from_value(&v["fieldsV1"]),
        })
    }

    fn encode(&self) -> Value {
        let mut m = Map::new();
        let mut put = |k: &str, v: Value| m.insert(k.to_owned(), v);
        put("apiVersion", self.api_version.as_str().into());
        put("fieldsType", "FieldsV1".into());
        put("fieldsV1", self.set.to_value());
        if !self.manager.is_empty() {
            put("manager", self.manager.as_str().into());
        }
        put("operation", if self.applied { "Apply" } else { "Update" }.into());
        if !self.subresource.is_empty() {
            put("subresource", self.subresource.as_str().into());
        }
        if let Some(t) = &self.time {
            put("time", t.as_str().into());
        }
        Value::Object(m)
    }

    fn seconds(&self) -> i64 {
        self.time.as_deref().and_then(|t| t.parse::<Timestamp>().ok()).map_or(0, Timestamp::as_second)
    }

    /// As conflict messages name a manager.
    fn print(&self) -> String {
        let mut s = quote(&self.manager);
        if !self.subresource.is_empty() {
            s.push_str(&format!(" with subresource {}", quote(&self.subresource)));
        }
        if !self.applied {
            s.push_str(&format!(" using {}", self.api_version));
        }
        s
    }
}

fn decode(object: &Value) -> Vec<Entry> {
    meta::managed_fields(object).iter().filter_map(Entry::decode).collect()
}

fn encode(mut entries: Vec<Entry>) -> Value {
    entries.sort_by(|p, q| {
        // "Apply" sorts before "Update".
        (!p.applied, p.seconds(), &p.manager, &p.api_version, &p.subresource)
            .cmp(&(!q.applied, q.seconds(), &q.manager, &q.api_version, &q.subresource))
    });
    entries.iter().map(Entry::encode).collect()
}

fn put_managed(object: &mut Value, entries: Vec<Entry>) {
    if entries.is_empty() {
        meta::remove(object, "managedFields");
    } else {
        meta::metadata_mut(object).insert("managedFields".into(), encode(entries));
    }
}

/// A list of one empty entry, or an empty list, asks to forget all managers.
fn is_reset(object: &Value) -> bool {
    match object["metadata"]["managedFields"].as_array().map(Vec::as_slice) {
        Some([]) => true,
        Some([one]) => one.as_object().is_some_and(|m| m.values().all(|v| v.is_null() || v == "")),
        _ => false,
    }
}

fn strip(set: &mut FieldSet) {
    for top in ["f:apiVersion", "f:kind", "f:metadata"] {
        set.remove(&[top]);
    }
    for name in SYSTEM {
        set.remove(&["f:metadata", &format!("f:{name}")]);
    }
}

/// Who writes what kind of object, and how.
#[derive(Clone, Copy)]
pub struct Writer<'a> {
    /// The arena of types.
    pub schemas: &'a Schemas,
    /// The type of the object in the version that is written.
    pub ty: TypeId,
    /// `apps/v1`.
    pub api_version: &'a str,
    /// Custom resources deduce what the schema leaves open, and know no Go structs.
    pub custom: bool,
    /// The field manager's name.
    pub manager: &'a str,
    /// The subresource that is written.
    pub subresource: Option<&'a str>,
    /// The time of the write.
    pub now: Timestamp,
    /// Dotted paths that this write cannot change ([`crate::strategy::Strategy::reset_fields`]).
    pub reset: &'a [&'a str],
}

impl Writer<'_> {
    fn types(&self) -> Types<'_> {
        Types { schemas: self.schemas, deduce: self.custom }
    }

    fn zero(&self) -> Value {
        if self.custom { json!({}) } else { self.types().zero(self.ty) }
    }

    fn time(&self) -> String {
        meta::now_rfc3339(self.now)
    }

    fn drop_reset(&self, set: &mut FieldSet) {
        for path in self.reset {
            set.remove_tree(path);
        }
    }

    /// Sets `new`'s managedFields after a write that is no apply: this manager owns what it changed, and the others
    /// lose it. `live` is `None` on create.
    pub fn update_managed(&self, live: Option<&Value>, new: &mut Value) {
        let entries = if self.subresource.is_none() {
            if is_reset(new) {
                meta::remove(new, "managedFields");
                if live.is_some() {
                    return;
                }
                Some(Vec::new())
            } else {
                // A client may edit the list itself.
                let edited = new["metadata"].get("managedFields").filter(|m| {
                    !m.as_array().is_none_or(Vec::is_empty) && live.is_none_or(|l| l["metadata"]["managedFields"] != **m)
                });
                edited.is_some().then(|| decode(new))
            }
        } else {
            None
        };
        let edited = entries.is_some();
        let lives = live.map_or(&Value::Null, |l| &l["metadata"]["managedFields"]);
        if live.is_some() && !edited && lives.as_array().is_none_or(Vec::is_empty) {
            // An object from before tracking: its fields are attributed on the first apply.
            meta::remove(new, "managedFields");
            return;
        }
        let zero;
        let before = match live {
            Some(l) => l,
            None => {
                zero = self.zero();
                &zero
            }
        };
        let mut change = self.types().compare(Some(self.ty), before, new);
        for set in [&mut change.added, &mut change.modified, &mut change.removed] {
            strip(set);
            self.drop_reset(set);
        }
        if change.is_same() {
            match entries {
                Some(entries) => put_managed(new, entries),
                None if lives.is_null() => {
                    meta::remove(new, "managedFields");
                }
                None => {
                    meta::metadata_mut(new).insert("managedFields".into(), lives.clone());
                }
            }
            return;
        }
        let mut entries = entries.unwrap_or_else(|| live.map(decode).unwrap_or_default());
        let mut taken = change.added;
        taken.extend(&change.modified);
        for e in &mut entries {
            e.set = e.set.difference(&taken).difference(&change.removed);
        }
        if !taken.is_empty() {
            let subresource = self.subresource.unwrap_or_default();
            let mine = entries.iter_mut().find(|e| {
                !e.applied
                    && e.manager == self.manager
                    && e.api_version == self.api_version
                    && e.subresource == subresource
            });
            match mine {
                Some(e) => {
                    e.set.extend(&taken);
                    e.time = Some(self.time());
                }
                None => entries.push(Entry {
                    manager: self.manager.to_owned(),
                    applied: false,
                    api_version: self.api_version.to_owned(),
                    subresource: subresource.to_owned(),
                    time: Some(self.time()),
                    set: taken,
                }),
            }
        }
        entries.retain(|e| !e.set.is_empty());
        put_managed(new, cap(entries));
    }

    /// Applies a configuration: the new object with its managedFields, equal to `live` when there is nothing to do.
    ///
    /// Without `force`, fields that other managers own with another value are conflicts (409, one cause each).
    pub fn apply(&self, live: Option<&Value>, applied: &Value, force: bool) -> Result<Value, ApiError> {
        let version = meta::api_version(applied);
        if version != self.api_version {
            return Err(ApiError::bad_request(format!(
                "Incorrect version specified in apply patch. Specified patch version: {version}, expected: {}",
                self.api_version
            )));
        }
        if applied["metadata"].get("managedFields").is_some_and(|m| !m.is_null()) {
            return Err(ApiError::bad_request("metadata.managedFields must be nil"));
        }
        let problems = self.types().problems(Some(self.ty), applied);
        if !problems.is_empty() {
            let problems = match problems.as_slice() {
                [one] => one.clone(),
                many => format!("errors:\n  {}", many.join("\n  ")),
            };
            return Err(ApiError::new(500, "", format!(
                "failed to create typed patch object ({}/{}; {}, Kind={}): {problems}",
                meta::namespace(applied),
                meta::name(applied),
                self.api_version,
                meta::kind(applied)
            )));
        }
        let attempt = match self.try_apply(live, applied, force) {
            Err(conflicts) if self.manager == "kubectl" && !force => {
                let allowed = live.map(|l| self.last_applied_set(l)).unwrap_or_default();
                let left: Vec<_> = conflicts
                    .into_iter()
                    .map(|(e, set)| (e, set.difference(&allowed)))
                    .filter(|(_, set)| !set.is_empty())
                    .collect();
                if left.is_empty() { self.try_apply(live, applied, true) } else { Err(left) }
            }
            other => other,
        };
        let mut object = attempt.map_err(conflict_error)?;
        if self.manager == "kubectl" && meta::annotation(&object, LAST_APPLIED).is_some_and(|a| !a.is_empty()) {
            let mut config = applied.clone();
            if let Some(Value::Object(a)) = config.pointer_mut("/metadata/annotations") {
                a.remove(LAST_APPLIED);
            }
            meta::set_annotation(&mut object, LAST_APPLIED, &format!("{config}\n"));
        }
        Ok(object)
    }

    fn try_apply(&self, live: Option<&Value>, applied: &Value, force: bool) -> Result<Value, Vec<(Entry, FieldSet)>> {
        let types = self.types();
        let ty = Some(self.ty);
        let mut entries = live.map(decode).unwrap_or_default();
        if let Some(live) = live
            && entries.is_empty()
        {
            let mut set = types.compare(ty, &self.zero(), live).added;
            strip(&mut set);
            if !set.is_empty() {
                entries.push(Entry {
                    manager: BEFORE_FIRST_APPLY.to_owned(),
                    applied: false,
                    api_version: self.api_version.to_owned(),
                    subresource: String::new(),
                    time: None,
                    set,
                });
            }
        }
        let empty = json!({});
        let old = live.unwrap_or(&empty);
        let merged = types.merge(ty, old, applied);

        let mut set = types.field_set(ty, applied);
        strip(&mut set);
        self.drop_reset(&mut set);
        let subresource = self.subresource.unwrap_or_default();
        let at = entries.iter().position(|e| e.applied && e.manager == self.manager && e.subresource == subresource);
        let last = at.map(|i| entries[i].set.clone());
        let mine = Entry {
            manager: self.manager.to_owned(),
            applied: true,
            api_version: self.api_version.to_owned(),
            subresource: subresource.to_owned(),
            time: at.and_then(|i| entries[i].time.clone()),
            set,
        };
        let at = at.unwrap_or(entries.len());
        if at < entries.len() {
            entries[at] = mine;
        } else {
            entries.push(mine);
        }
        let mut object = match last {
            Some(last) if !last.is_empty() => self.prune(merged, &entries, &last),
            _ => merged,
        };

        let mut change = types.compare(ty, old, &object);
        for set in [&mut change.added, &mut change.modified, &mut change.removed] {
            self.drop_reset(set);
        }
        let mut taken = change.added;
        taken.extend(&change.modified);
        let others = |i: usize| i != at;
        if !force {
            let conflicts: Vec<_> = entries
                .iter()
                .enumerate()
                .filter(|(i, _)| others(*i))
                .map(|(_, e)| (e.clone(), e.set.intersection(&taken)))
                .filter(|(_, set)| !set.is_empty())
                .collect();
            if !conflicts.is_empty() {
                return Err(conflicts);
            }
        }
        for (i, e) in entries.iter_mut().enumerate() {
            if i != at {
                e.set = e.set.difference(&taken).difference(&change.removed);
            }
        }
        strip(&mut taken);
        strip(&mut change.removed);
        let changed = !taken.is_empty() || !change.removed.is_empty();
        if changed || entries[at].time.is_none() {
            entries[at].time = Some(self.time());
        }
        entries.retain(|e| !e.set.is_empty());
        put_managed(&mut object, cap(entries));
        Ok(object)
    }

    /// Removes what this manager applied before, does not apply any more, and nobody else owns.
    fn prune(&self, merged: Value, entries: &[Entry], last: &FieldSet) -> Value {
        let types = self.types();
        let ty = Some(self.ty);
        let named = |set: &FieldSet, v: &Value| types.with_named(ty, set, v);
        let last = named(last, &merged);
        let mut owned = FieldSet::default();
        for e in entries {
            owned.extend(&e.set);
        }
        let gone = last.difference(&named(&owned, &merged));
        if gone.is_empty() {
            return merged;
        }
        let empty = json!({});
        let pruned = types.remove(ty, &merged, &last).unwrap_or_else(|| empty.clone());
        let all = named(&types.field_set(ty, &merged), &merged);
        let mut keep = named(&types.field_set(ty, &pruned), &pruned);
        keep.extend(&named(&owned, &merged));
        let pruned = types.remove(ty, &merged, &all.difference(&keep)).unwrap_or_else(|| empty.clone());
        let kept = named(&types.field_set(ty, &pruned), &pruned);
        let gone = all.difference(&kept).intersection(&last);
        types.remove(ty, &merged, &gone).unwrap_or(empty)
    }

    /// What `kubectl apply` on the client set and nobody changed since: kubectl may take these over without force.
    fn last_applied_set(&self, live: &Value) -> FieldSet {
        let Some(text) = meta::annotation(live, LAST_APPLIED) else { return FieldSet::default() };
        let Ok(config) = serde_json::from_str::<Value>(text) else { return FieldSet::default() };
        if meta::api_version(&config) != self.api_version {
            return FieldSet::default();
        }
        let types = self.types();
        let change = types.compare(Some(self.ty), &config, live);
        types
            .field_set(Some(self.ty), &config)
            .difference(&change.modified)
            .difference(&change.added)
            .difference(&change.removed)
    }
}

fn conflict_error(conflicts: Vec<(Entry, FieldSet)>) -> ApiError {
    let mut by_manager: Vec<(String, Vec<String>)> =
        conflicts.into_iter().map(|(e, set)| (e.print(), set.paths())).collect();
    by_manager.sort();
    let mut causes = Vec::new();
    for (manager, paths) in &by_manager {
        for path in paths {
            causes.push(Cause {
                reason: "FieldManagerConflict".into(),
                message: format!("conflict with {manager}"),
                field: path.clone(),
            });
        }
    }
    let message = match causes.as_slice() {
        [one] => format!("Apply failed with 1 conflict: {}: {}", one.message, one.field),
        many => {
            let mut lines = Vec::new();
            for (manager, paths) in &by_manager {
                lines.push(format!("conflicts with {manager}:"));
                lines.extend(paths.iter().map(|p| format!("- {p}")));
            }
            format!("Apply failed with {} conflicts: {}", many.len(), lines.join("\n"))
        }
    };
    ApiError::apply_conflict(causes, message)
}

/// Merges the oldest entries of updates until at most [`MAX_UPDATE_MANAGERS`] are left.
fn cap(mut entries: Vec<Entry>) -> Vec<Entry> {
    let updates = |l: &[Entry]| l.iter().filter(|e| !e.applied).count();
    if updates(&entries) <= MAX_UPDATE_MANAGERS {
        return entries;
    }
    entries.sort_by(|p, q| (p.seconds(), &p.manager).cmp(&(q.seconds(), &q.manager)));
    while updates(&entries) > MAX_UPDATE_MANAGERS {
        let oldest: Vec<usize> = (0..entries.len()).filter(|i| !entries[*i].applied).collect();
        let pair = oldest.iter().enumerate().find_map(|(n, &i)| {
            let next = oldest[n + 1..].iter().find(|&&j| entries[j].api_version == entries[i].api_version)?;
            Some((i, *next))
        });
        let Some((first, second)) = pair else { return entries };
        let newer = entries.remove(second);
        let bucket = &mut entries[first];
        bucket.manager = ANCIENT.to_owned();
        bucket.subresource = String::new();
        bucket.set.extend(&newer.set);
        bucket.time = newer.time;
    }
    entries
}
