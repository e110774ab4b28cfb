//! What is special about a kind: defaults, what a write may touch, what is valid.
//!
//! Most of it is data: a [`Rules`](rules::Rules) row per kind names its name syntax, which parts count for
//! `metadata.generation`, whether status is apart, and lists small pure functions. Kinds that need nothing have no row.
//!
//! Every function sees the object in the storage version of its resource (conversion comes first). The order, as upstream's
//! `rest.BeforeCreate`: system fields (uid, creationTimestamp, name) are set by the caller, then `prepare_create`,
//! then admission, then `validate`. On update: `prepare_update`, `validate_update`.
//! [`Strategy::defaults`] applies the schema's defaults first; [`Strategy::validate`] includes schema and metadata rules.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde_json::Value;

use crate::field::FieldError;
use crate::registry::Resource;
use crate::schema::TypeId;

pub mod access;
pub mod at;
pub mod batch;
pub mod core;
pub mod cron;
pub mod custom;
pub mod extension;
pub mod misc;
pub mod names;
pub mod network;
pub mod objectmeta;
pub mod pod;
pub mod resources;
pub mod rules;
pub mod scaling;
pub mod selectors;
pub mod service;
pub mod storage;
pub mod workloads;

mod table;

pub use table::{custom_strategy, strategy_for};

/// Who makes the request, for the few kinds that record it (CertificateSigningRequest).
#[derive(Clone, Debug, Default)]
pub struct Requester {
    /// User name.
    pub name: String,
    /// Unique id, may be empty.
    pub uid: String,
    /// Groups.
    pub groups: Vec<String>,
    /// Further attributes of the authenticator.
    pub extra: BTreeMap<String, Vec<String>>,
}

/// What a strategy knows about the request.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The resource's row.
    pub resource: &'a Resource,
    /// The version the object is in.
    pub version: &'a str,
    /// The subresource being written, e.g. `status`.
    pub subresource: Option<&'a str>,
    /// The time of the request.
    pub now: Timestamp,
    /// Who asks, if known.
    pub user: Option<&'a Requester>,
}

impl Context<'_> {
    /// The schema of the object in this version.
    pub fn schema(&self) -> Option<TypeId> {
        self.resource.versions.iter().find(|v| v.name == self.version).map(|v| v.schema)
    }

    /// Whether this is a write to `/status`.
    pub fn is_status(&self) -> bool {
        self.subresource == Some("status")
    }
}

/// The rules of one kind; pure functions on values.
pub trait Strategy: Send + Sync {
    /// Fills in what a writer may leave out: the schema's defaults, then computed ones. Idempotent.
    fn defaults(&self, ctx: &Context<'_>, obj: &mut Value) {
        rules::schema_defaults(ctx, obj);
    }

    /// Drops what a creator may not set and sets what the server owns. uid, name and creationTimestamp are already there.
    fn prepare_create(&self, _ctx: &Context<'_>, _obj: &mut Value) {}

    /// Restores from `old` what this write may not touch, and counts the generation.
    fn prepare_update(&self, _ctx: &Context<'_>, _new: &mut Value, _old: &Value) {}

    /// What is wrong with a new object.
    fn validate(&self, ctx: &Context<'_>, obj: &Value) -> Vec<FieldError> {
        rules::generic_validate(ctx, obj, names::dns1123_subdomain)
    }

    /// What is wrong with a change (includes what is wrong with the object itself).
    fn validate_update(&self, ctx: &Context<'_>, new: &Value, old: &Value) -> Vec<FieldError> {
        rules::generic_validate_update(ctx, new, old)
    }

    /// Messages for the `Warning` headers of a create or update.
    fn warnings(&self, _ctx: &Context<'_>, _obj: &Value) -> Vec<String> {
        Vec::new()
    }

    /// Seconds of grace for a deletion; `None` for kinds without graceful deletion. `Some(0)` deletes at once.
    fn graceful_delete(&self, _ctx: &Context<'_>, _obj: &mut Value, _grace: Option<i64>) -> Option<i64> {
        None
    }

    /// Whether PUT of an absent object creates it.
    fn allow_create_on_update(&self) -> bool {
        false
    }

    /// Whether PUT without `resourceVersion` overwrites.
    fn allow_unconditional_update(&self) -> bool {
        true
    }

    /// Dotted paths that a write to this (sub)resource never changes; server-side apply drops them from the
    /// manager's set.
    fn reset_fields(&self, _ctx: &Context<'_>) -> &'static [&'static str] {
        &[]
    }
}

#[cfg(test)]
mod tests;
