//! Bodies to objects: JSON, YAML and protobuf, checked against the schema of the request's version.

use serde_json::Value;
use windlass_api::registry::Resource;
use windlass_api::schema::{self, Schemas, TypeId};
use windlass_api::{ApiError, meta, protobuf};

use super::Call;
use super::query::FieldValidation;
use crate::content::{self, Media};

/// What a body is expected to be.
pub struct Expected<'a> {
    pub group: &'a str,
    pub version: &'a str,
    pub kind: &'a str,
    pub schemas: &'a Schemas,
    pub ty: Option<TypeId>,
}

impl<'a> Expected<'a> {
    /// An object of the request's resource.
    pub fn object(call: &'a Call) -> Expected<'a> {
        let version = call.version();
        Expected {
            group: &call.resource.group,
            version: &version.name,
            kind: &call.resource.kind,
            schemas: &call.resource.schemas,
            ty: Some(version.schema),
        }
    }

    /// The kind that a subresource takes.
    pub fn subresource(resource: &'a Resource, version: &'a str, name: &str) -> Option<Expected<'a>> {
        let version = resource.version(version)?;
        let sub = version.subresource(name)?;
        let own = !sub.foreign;
        Some(Expected {
            group: if own { &resource.group } else { &sub.group },
            version: if own { &version.name } else { &sub.version },
            kind: &sub.kind,
            schemas: &resource.schemas,
            ty: sub.schema,
        })
    }

    fn api_version(&self) -> String {
        meta::join_api_version(self.group, self.version)
    }
}

/// Decodes a body into an object of the expected kind, in the request's version: types checked, unknown fields
/// dropped (and reported as `validation` says), written as Go would write it.
pub fn object(call: &Call, body: &[u8], media: Media, expected: &Expected<'_>, validation: FieldValidation) -> Result<Value, ApiError> {
    let (value, problems) = parse(body, media, expected)?;
    finish(call, value, problems, expected, validation)
}

/// The part of decoding that a patched object goes through as well.
pub fn finish(call: &Call, mut value: Value, problems: Vec<String>, expected: &Expected<'_>, validation: FieldValidation) -> Result<Value, ApiError> {
    check_kind(&mut value, expected)?;
    let handled = |why: &str| {
        ApiError::bad_request(format!("{kind} in version {version:?} cannot be handled as a {kind}: {why}", kind = expected.kind, version = expected.version))
    };
    let Some(ty) = expected.ty else { return Ok(value) };
    expected.schemas.check_types(ty, &value).map_err(|e| handled(&e))?;
    let unknown = expected.schemas.prune(ty, &mut value);
    let all = problems.into_iter().map(|p| format!("duplicate field {p:?}")).chain(unknown.into_iter().map(|p| format!("unknown field {p:?}")));
    match validation {
        FieldValidation::Ignore => {}
        FieldValidation::Warn => all.for_each(|text| call.warn(text)),
        FieldValidation::Strict => {
            let all: Vec<String> = all.collect();
            if !all.is_empty() {
                return Err(handled(&format!("strict decoding error: {}", all.join(", "))));
            }
        }
    }
    expected.schemas.normalize(ty, &mut value);
    Ok(value)
}

/// Bytes to a tree, and the paths of duplicate fields.
fn parse(body: &[u8], media: Media, expected: &Expected<'_>) -> Result<(Value, Vec<String>), ApiError> {
    match media {
        Media::Json => {
            let decoded = schema::decode_json(body).map_err(|e| ApiError::bad_request(e.to_string()))?;
            Ok((decoded.value, decoded.duplicates))
        }
        Media::Yaml => yaml(body),
        Media::Protobuf => {
            let value = protobuf::decode(expected.schemas, body, Some((&expected.api_version(), expected.kind)))
                .map_err(|e| ApiError::bad_request(format!("unable to decode protobuf: {e}")))?;
            Ok((value, Vec::new()))
        }
    }
}

/// YAML (or JSON, which is YAML) to a tree and the paths of duplicate fields. Aliases and depth are bounded by the parser.
pub fn yaml(body: &[u8]) -> Result<(Value, Vec<String>), ApiError> {
    if body.iter().find(|b| !b.is_ascii_whitespace()) == Some(&b'{')
        && let Ok(decoded) = schema::decode_json(body)
    {
        return Ok((decoded.value, decoded.duplicates));
    }
    let text = std::str::from_utf8(body).map_err(|e| ApiError::bad_request(format!("error converting YAML to JSON: yaml: {e}")))?;
    let value: Value = serde_saphyr::from_str(text).map_err(|e| ApiError::bad_request(format!("error converting YAML to JSON: yaml: {e}")))?;
    // Through the JSON decoder once more: the same limits of depth and numbers for both.
    let bytes = serde_json::to_vec(&value).map_err(|e| ApiError::bad_request(e.to_string()))?;
    let decoded = schema::decode_json(&bytes).map_err(|e| ApiError::bad_request(e.to_string()))?;
    Ok((decoded.value, decoded.duplicates))
}

/// The kind in the data must be the kind of the request; data that names none gets it.
fn check_kind(value: &mut Value, expected: &Expected<'_>) -> Result<(), ApiError> {
    let want = expected.api_version();
    let Value::Object(map) = &mut *value else {
        return Err(ApiError::bad_request(format!(
            "couldn't get version/kind; json parse error: json: cannot unmarshal {} into Go value of type struct {{ APIVersion string \"json:\\\"apiVersion,omitempty\\\"\"; Kind string \"json:\\\"kind,omitempty\\\"\" }}",
            schema::value_kind(value)
        )));
    };
    for (key, default) in [("apiVersion", want.as_str()), ("kind", expected.kind)] {
        match map.get(key) {
            None | Some(Value::Null) => drop(map.insert(key.into(), default.into())),
            Some(Value::String(text)) if text.is_empty() => drop(map.insert(key.into(), default.into())),
            Some(Value::String(_)) => {}
            Some(other) => {
                let kind = schema::value_kind(other);
                return Err(ApiError::bad_request(format!("couldn't get version/kind; json parse error: json: cannot unmarshal {kind} into Go struct field .{key} of type string")));
            }
        }
    }
    let (api_version, kind) = (meta::api_version(value), meta::kind(value));
    if kind != expected.kind {
        return Err(ApiError::bad_request(format!(
            "{kind} in version {:?} cannot be handled as a {}: the kind in the data does not match the expected kind",
            meta::split_api_version(api_version).1,
            expected.kind
        )));
    }
    if api_version != want {
        return Err(ApiError::bad_request(format!("the API version in the data ({api_version}) does not match the expected API version ({want})")));
    }
    Ok(())
}

/// Decodes DeleteOptions; empty for an empty body.
pub fn delete_options(call: &Call, body: &[u8]) -> Result<Option<Value>, ApiError> {
    if body.is_empty() {
        return Ok(None);
    }
    let media = content::input_media(&call.headers, true)?;
    let schemas = Schemas::builtin();
    let expected = Expected {
        group: "",
        version: "v1",
        kind: "DeleteOptions",
        ty: schemas.named("io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions"),
        schemas: &schemas,
    };
    let (mut value, _) = parse(body, media, &expected)?;
    // Clients may say v1, meta.k8s.io/v1 or the group of the resource; upstream takes all of them.
    if meta::kind(&value) == "DeleteOptions"
        && let Value::Object(map) = &mut value
    {
        map.remove("apiVersion");
    }
    finish(call, value, Vec::new(), &expected, FieldValidation::Ignore).map(Some)
}
