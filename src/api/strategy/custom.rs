//! Objects of CustomResourceDefinitions (`apiextensions-apiserver/pkg/registry/customresource`).

use serde_json::{Value, json};

use crate::field::FieldError;
use crate::strategy::at::{get, remove, same, set};
use crate::strategy::rules::{generic_validate, generic_validate_update};
use crate::strategy::{Context, Strategy, names};

/// The rules of every custom resource: what its definition does not say.
pub struct Custom;

fn has_status(ctx: &Context<'_>) -> bool {
    let version = ctx.resource.versions.iter().find(|v| v.name == ctx.version);
    version.is_some_and(|v| v.subresources.iter().any(|s| s.name == "status"))
}

/// Whether anything but the metadata differs.
fn body_changed(new: &Value, old: &Value) -> bool {
    let (Some(a), Some(b)) = (new.as_object(), old.as_object()) else { return true };
    let differs = |key: &str| key != "metadata" && !same(&new[key], &old[key]);
    a.keys().chain(b.keys()).any(|k| differs(k))
}

impl Strategy for Custom {
    fn prepare_create(&self, ctx: &Context<'_>, obj: &mut Value) {
        if has_status(ctx) {
            remove(obj, "status");
        }
        set(obj, "metadata.generation", json!(1));
    }

    fn prepare_update(&self, ctx: &Context<'_>, new: &mut Value, old: &Value) {
        if ctx.is_status() {
            let mut result = old.clone();
            set(&mut result, "status", new["status"].clone());
            for field in ["metadata.managedFields", "metadata.resourceVersion", "metadata.uid", "metadata.name"] {
                match get(new, field) {
                    Value::Null => {
                        remove(&mut result, field);
                    }
                    v => set(&mut result, field, v.clone()),
                }
            }
            *new = result;
            return;
        }
        if has_status(ctx) {
            set(new, "status", old["status"].clone());
        }
        let was = get(old, "metadata.generation").as_i64().unwrap_or(1);
        let now = was + i64::from(body_changed(new, old));
        set(new, "metadata.generation", json!(now));
    }

    fn validate(&self, ctx: &Context<'_>, obj: &Value) -> Vec<FieldError> {
        generic_validate(ctx, obj, names::dns1123_subdomain)
    }

    fn validate_update(&self, ctx: &Context<'_>, new: &Value, old: &Value) -> Vec<FieldError> {
        generic_validate_update(ctx, new, old)
    }

    fn allow_unconditional_update(&self) -> bool {
        false
    }

    fn reset_fields(&self, ctx: &Context<'_>) -> &'static [&'static str] {
        match (has_status(ctx), ctx.subresource) {
            (true, None) => &["status"],
            (true, Some("status")) => &["spec", "metadata.labels", "metadata.annotations", "metadata.finalizers"],
            _ => &[],
        }
    }
}
