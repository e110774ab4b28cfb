//! Rows of rules: one `static` per kind, most of it data.

use serde_json::{Value, json};

use crate::field::FieldError;
use crate::schema::{Schemas, Shape, TypeId};
use crate::strategy::at::{At, Sink, get, remove, same, set};
use crate::strategy::names::{self, Rule};
use crate::strategy::{Context, Strategy, objectmeta};

/// Changes an object before a create, or fills defaults.
pub type Change = fn(&Context<'_>, &mut Value);
/// Changes the new object of an update, given the old one.
pub type Merge = fn(&Context<'_>, &mut Value, &Value);
/// Reports what is wrong with the object.
pub type Check = fn(&Context<'_>, &At<'_>);
/// Reports what is wrong with a change; the second is the old object.
pub type CheckUpdate = fn(&Context<'_>, &At<'_>, &Value);

/// The rules of one kind. Start from a constant ([`Rules::PLAIN`], [`Rules::SPEC_STATUS`]) and override.
pub struct Rules {
    /// Syntax of `metadata.name`.
    pub name: Rule,
    /// Parts (dotted paths) whose change counts `metadata.generation`; none means no generation.
    pub generation: &'static [&'static str],
    /// `status` is written by `/status` only, which writes nothing else.
    pub status: bool,
    /// Create takes the status that the creator gives.
    pub keep_status_on_create: bool,
    /// Whether PUT of an absent object creates it.
    pub create_on_update: bool,
    /// Whether PUT without a resourceVersion is taken.
    pub unconditional_update: bool,
    /// Run before the schema's defaults, where theirs depend on what was left out.
    pub early_defaults: &'static [Change],
    /// Computed defaults, after the schema's.
    pub defaults: &'static [Change],
    /// What create sets or drops.
    pub create: &'static [Change],
    /// What update keeps from the old object (not for subresources).
    pub update: &'static [Merge],
    /// What a write to `/status` keeps from the old object.
    pub status_update: &'static [Merge],
    /// What writes to other subresources keep from the old object, by the subresource's name.
    pub subresource_update: &'static [(&'static str, Merge)],
    /// On create, and on update of the main resource.
    pub validate: &'static [Check],
    /// On update of the main resource.
    pub validate_update: &'static [CheckUpdate],
    /// On update of `/status`.
    pub validate_status: &'static [CheckUpdate],
    /// On update of another subresource, by its name.
    pub subresource_validate: &'static [(&'static str, CheckUpdate)],
    /// Warnings on create and update.
    pub warnings: &'static [fn(&Value, &mut Vec<String>)],
    /// Seconds of grace for a deletion.
    pub graceful: Option<fn(&Value, Option<i64>) -> i64>,
    /// Paths that a write to `/status` cannot change, for server-side apply.
    pub reset_status: &'static [&'static str],
}

impl Rules {
    /// A kind with no generation and no status.
    pub const PLAIN: Self = Self {
        name: names::dns1123_subdomain,
        generation: &[],
        status: false,
        keep_status_on_create: false,
        create_on_update: false,
        unconditional_update: true,
        early_defaults: &[],
        defaults: &[],
        create: &[],
        update: &[],
        status_update: &[],
        subresource_update: &[],
        validate: &[],
        validate_update: &[],
        validate_status: &[],
        subresource_validate: &[],
        warnings: &[],
        graceful: None,
        reset_status: &["spec"],
    };
    /// A kind with a spec that counts the generation, and a status apart.
    pub const SPEC_STATUS: Self = Self { generation: &["spec"], status: true, ..Self::PLAIN };
    /// A kind with a spec that counts the generation, without a status.
    pub const SPEC: Self = Self { generation: &["spec"], ..Self::PLAIN };
    /// A status apart, no generation.
    pub const STATUS: Self = Self { status: true, ..Self::PLAIN };
}

impl Rules {
    /// Subresources besides `/status` that write (a part of) the status: approval, finalize.
    fn subresource_writes_status(&self, subresource: Option<&str>) -> bool {
        matches!(subresource, Some("approval"))
    }
}

/// Applies the defaults that the schema knows; the structs that a Go type always has are there, maybe empty.
pub fn schema_defaults(ctx: &Context<'_>, obj: &mut Value) {
    if let Some(ty) = ctx.schema() {
        if !ctx.resource.custom {
            fill_structs(&ctx.resource.schemas, ty, obj);
        }
        ctx.resource.schemas.apply_defaults(ty, obj);
    }
}

/// Puts an empty object where Go has a struct that is not behind a pointer.
fn fill_structs(schemas: &Schemas, ty: TypeId, value: &mut Value) {
    let t = schemas.ty(ty);
    match (t.shape, value) {
        (Shape::Object, Value::Object(map)) => {
            for f in &t.fields {
                let is_struct = !f.go.pointer && matches!(schemas.shape(f.ty), Shape::Object);
                if is_struct && map.get(&*f.name).is_none_or(Value::is_null) {
                    map.insert(f.name.to_string(), Value::Object(serde_json::Map::new()));
                }
            }
            for (name, v) in map.iter_mut() {
                if (v.is_object() || v.is_array())
                    && let Some(f) = t.field(name)
                {
                    fill_structs(schemas, f.ty, v);
                }
            }
        }
        (Shape::Map(item), Value::Object(map)) => map.values_mut().for_each(|v| fill_structs(schemas, item, v)),
        (Shape::List(item), Value::Array(list)) => list.iter_mut().for_each(|v| fill_structs(schemas, item, v)),
        _ => {}
    }
}

/// Schema and metadata rules for a new object.
pub fn generic_validate(ctx: &Context<'_>, obj: &Value, name: Rule) -> Vec<FieldError> {
    let sink = Sink::default();
    objectmeta::validate(&sink.root(obj).at("metadata"), ctx.resource.namespaced, name);
    let mut errors = sink.into_errors();
    schema_errors(ctx, obj, None, &mut errors);
    errors
}

/// Schema and metadata rules for a change.
pub fn generic_validate_update(ctx: &Context<'_>, new: &Value, old: &Value) -> Vec<FieldError> {
    let sink = Sink::default();
    objectmeta::validate_update(&sink.root(new).at("metadata"), &old["metadata"]);
    let mut errors = sink.into_errors();
    schema_errors(ctx, new, Some(old), &mut errors);
    errors
}

/// Adds what the schema says, unless the same is said already. What stays as it was in `old` is not held against the
/// writer.
fn schema_errors(ctx: &Context<'_>, obj: &Value, old: Option<&Value>, errors: &mut Vec<FieldError>) {
    let Some(ty) = ctx.schema() else { return };
    let own = errors.len();
    for e in ctx.resource.schemas.validate_update(ty, obj, old) {
        // What a rule has said of a field, or of a list because of this item, is not said again.
        let said = |o: &FieldError| {
            let rest = e.path.strip_prefix(&o.path);
            rest.is_some_and(|rest| rest.is_empty() || (rest.starts_with('[') && o.kind == e.kind && o.value == e.value))
        };
        if !errors[..own].iter().any(said) {
            errors.push(e);
        }
    }
}

/// What `generation` is after a change from `old`.
pub fn count_generation(parts: &[&str], new: &mut Value, old: &Value) {
    let was = old["metadata"]["generation"].as_i64();
    let changed = parts.iter().any(|p| !same(get(new, p), get(old, p)));
    let now = match (was, changed) {
        (None, false) => Value::Null,
        (was, changed) => json!(was.unwrap_or(0) + i64::from(changed)),
    };
    set(new, "metadata.generation", now);
}

impl Strategy for Rules {
    fn defaults(&self, ctx: &Context<'_>, obj: &mut Value) {
        for f in self.early_defaults {
            f(ctx, obj);
        }
        schema_defaults(ctx, obj);
        for f in self.defaults {
            f(ctx, obj);
        }
    }

    fn prepare_create(&self, ctx: &Context<'_>, obj: &mut Value) {
        if self.status && !self.keep_status_on_create {
            remove(obj, "status");
        }
        if self.generation.is_empty() {
            remove(obj, "metadata.generation");
        } else {
            set(obj, "metadata.generation", json!(1));
        }
        for f in self.create {
            f(ctx, obj);
        }
        if self.status {
            // What a creator sees is what a decoder would fill in.
            if let Some(o) = obj.as_object_mut() {
                o.entry("status").or_insert_with(|| json!({}));
            }
            schema_defaults(ctx, obj);
        }
    }

    fn prepare_update(&self, ctx: &Context<'_>, new: &mut Value, old: &Value) {
        if self.status && ctx.is_status() {
            let keep = ctx.resource.custom || new.get("spec").is_some() || old.get("spec").is_some();
            if keep {
                set(new, "spec", old["spec"].clone());
            }
            for f in self.status_update {
                f(ctx, new, old);
            }
            set(new, "metadata.generation", old["metadata"]["generation"].clone());
            return;
        }
        let writes_status = self.subresource_writes_status(ctx.subresource);
        if self.status && !writes_status {
            set(new, "status", old["status"].clone());
        }
        match ctx.subresource {
            None | Some("scale") => {
                for f in self.update {
                    f(ctx, new, old);
                }
            }
            Some(name) => {
                for (_, f) in self.subresource_update.iter().filter(|(n, _)| *n == name) {
                    f(ctx, new, old);
                }
            }
        }
        count_generation(self.generation, new, old);
    }

    fn validate(&self, ctx: &Context<'_>, obj: &Value) -> Vec<FieldError> {
        let sink = Sink::default();
        let root = sink.root(obj);
        objectmeta::validate(&root.at("metadata"), ctx.resource.namespaced, self.name);
        for f in self.validate {
            f(ctx, &root);
        }
        let mut errors = sink.into_errors();
        schema_errors(ctx, obj, None, &mut errors);
        errors
    }

    fn validate_update(&self, ctx: &Context<'_>, new: &Value, old: &Value) -> Vec<FieldError> {
        let sink = Sink::default();
        let root = sink.root(new);
        objectmeta::validate_update(&root.at("metadata"), &old["metadata"]);
        if ctx.is_status() {
            for f in self.validate_status {
                f(ctx, &root, old);
            }
            return sink.into_errors();
        }
        match ctx.subresource {
            None | Some("scale") => {
                for f in self.validate_update {
                    f(ctx, &root, old);
                }
            }
            Some(name) => {
                for (_, f) in self.subresource_validate.iter().filter(|(n, _)| *n == name) {
                    f(ctx, &root, old);
                }
            }
        }
        for f in self.validate {
            f(ctx, &root);
        }
        let mut errors = sink.into_errors();
        schema_errors(ctx, new, Some(old), &mut errors);
        errors
    }

    fn warnings(&self, _ctx: &Context<'_>, obj: &Value) -> Vec<String> {
        let mut out = Vec::new();
        for f in self.warnings {
            f(obj, &mut out);
        }
        out
    }

    fn graceful_delete(&self, _ctx: &Context<'_>, obj: &mut Value, grace: Option<i64>) -> Option<i64> {
        self.graceful.map(|f| f(obj, grace))
    }

    fn allow_create_on_update(&self) -> bool {
        self.create_on_update
    }

    fn allow_unconditional_update(&self) -> bool {
        self.unconditional_update
    }

    fn reset_fields(&self, ctx: &Context<'_>) -> &'static [&'static str] {
        match (self.status, ctx.subresource) {
            (true, Some("status")) => self.reset_status,
            (true, None) => &["status"],
            _ => &[],
        }
    }
}
