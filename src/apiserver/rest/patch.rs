//! The four patch types, on the object in the request's version.

use serde_json::Value;
use windlass_api::patch;
use windlass_api::{ApiError, meta};

use super::Call;
use super::decode::{self, Expected};
use super::query::{Write, WriteOptions};
use super::write::writer;
use crate::content;

/// The media types of patches, as an error lists them.
const TYPES: [&str; 4] =
    ["application/json-patch+json", "application/merge-patch+json", "application/apply-patch+yaml", "application/strategic-merge-patch+json"];
/// Custom resources have no strategic merge patch.
const CUSTOM_TYPES: [&str; 3] = ["application/json-patch+json", "application/merge-patch+json", "application/apply-patch+yaml"];

/// A patch, parsed.
pub(crate) enum Patch {
    Json(Value),
    Merge(Value),
    Strategic(Value),
    Apply(Value),
}

impl Patch {
    /// Reads the patch and the options that go with its type.
    pub fn parse(call: &Call, body: super::Body) -> Result<(Patch, WriteOptions), ApiError> {
        let kind = content::content_type(&call.headers);
        let write = if kind == "application/apply-patch+yaml" { Write::Apply } else { Write::Patch };
        let json = || {
            let decoded = windlass_api::schema::decode_json(&body);
            decoded.map(|d| d.value).map_err(|e| ApiError::bad_request(format!("error decoding patch: {e}")))
        };
        let patch = match kind.as_str() {
            "application/json-patch+json" => Patch::Json(json()?),
            "application/merge-patch+json" => Patch::Merge(json()?),
            "application/strategic-merge-patch+json" if !call.resource.custom => Patch::Strategic(json()?),
            "application/apply-patch+yaml" => {
                let (value, duplicates) = decode::yaml(&body)?;
                if let Some(first) = duplicates.first() {
                    return Err(ApiError::bad_request(format!("error decoding YAML: key {first:?} already set in map")));
                }
                Patch::Apply(value)
            }
            _ => {
                let types: &[&str] = if call.resource.custom { &CUSTOM_TYPES } else { &TYPES };
                return Err(ApiError::unsupported_media_type(types));
            }
        };
        let options = WriteOptions::parse(&call.query, write)?;
        if let Patch::Apply(value) = &patch {
            check_applied(call, value)?;
        }
        Ok((patch, options))
    }

    pub fn is_apply(&self) -> bool {
        matches!(self, Patch::Apply(_))
    }

    /// The patched object, in the storage version, with defaults; managed fields are set only by apply.
    pub fn apply(&self, call: &Call, old: &Value, options: &WriteOptions) -> Result<Value, ApiError> {
        let live = call.from_storage(old)?;
        let mut object = match self {
            Patch::Json(patch) => {
                let mut object = live;
                patch::json_patch(&mut object, patch)?;
                object
            }
            Patch::Merge(patch) => {
                let mut object = live;
                patch::merge_patch(&mut object, patch)?;
                object
            }
            Patch::Strategic(patch) => patch::strategic_merge(&call.resource.schemas, call.version().schema, &live, patch)?,
            Patch::Apply(applied) => {
                let applied = self.applied(call, applied, options)?;
                return self.merge_applied(call, Some(old), applied, options);
            }
        };
        if meta::api_version(&object) != meta::api_version(old) && meta::api_version(&object) != call.api_version() {
            return Err(ApiError::bad_request(format!(
                "the API version in the data ({}) does not match the expected API version ({})",
                meta::api_version(&object),
                call.api_version()
            )));
        }
        object = decode::finish(call, object, Vec::new(), &Expected::object(call), options.validation)?;
        let mut object = call.to_storage(object)?;
        call.resource.strategy.defaults(&call.context(), &mut object);
        Ok(object)
    }

    /// The object that an apply makes where there is none.
    pub fn create(&self, call: &Call, options: &WriteOptions) -> Result<Value, ApiError> {
        match self {
            Patch::Apply(applied) => {
                let applied = self.applied(call, applied, options)?;
                self.merge_applied(call, None, applied, options)
            }
            _ => Err(call.not_found()),
        }
    }

    /// The applied configuration as it was sent: what is filled in would be owned by the applier.
    fn applied(&self, call: &Call, applied: &Value, options: &WriteOptions) -> Result<Value, ApiError> {
        // For the errors and warnings; unknown fields are refused by the merge itself.
        let mut decoded = decode::finish(call, applied.clone(), Vec::new(), &Expected::object(call), options.validation)?;
        super::write::match_namespace(call, &mut decoded)?;
        call.to_storage(applied.clone())
    }

    fn merge_applied(&self, call: &Call, live: Option<&Value>, applied: Value, options: &WriteOptions) -> Result<Value, ApiError> {
        let mut object = writer(call, options).apply(live, &applied, options.force)?;
        call.stored_as.schemas.normalize(call.stored_as.stored().schema, &mut object);
        super::write::match_namespace(call, &mut object)?;
        call.resource.strategy.defaults(&call.context(), &mut object);
        Ok(object)
    }
}

/// What upstream refuses in an applied configuration.
fn check_applied(call: &Call, value: &Value) -> Result<(), ApiError> {
    if !value.is_object() {
        return Err(ApiError::bad_request("error decoding YAML: an object is expected"));
    }
    let managed = &value["metadata"]["managedFields"];
    if managed.as_array().is_some_and(|m| !m.is_empty()) {
        return Err(ApiError::bad_request("metadata.managedFields must be nil"));
    }
    let name = meta::name(value);
    if name.is_empty() && meta::api_version(value).is_empty() && meta::kind(value).is_empty() {
        return Err(ApiError::bad_request("Object 'Kind' is missing"));
    }
    if !name.is_empty() && name != call.name() {
        return Err(ApiError::bad_request(format!("the name of the object ({name}) does not match the name on the URL ({})", call.name())));
    }
    if name.is_empty() {
        return Err(ApiError::bad_request(format!("the name of the object ({} based on URL) was undeterminable: name must be provided", call.name())));
    }
    Ok(())
}
