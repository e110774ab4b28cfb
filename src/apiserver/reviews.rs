//! Review kinds: answered and forgotten. The answers are authentication's and authorization's; here is their way in and out.

use std::sync::Arc;

use http::StatusCode;
use serde_json::Value;
use windlass_api::{ApiError, meta};

use crate::admission::Operation;
use crate::authn::bearer::Bearer;
use crate::content;
use crate::rest::decode::{self, Expected};
use crate::rest::{Answer, Call, write};
use crate::token::request::TokenRequests;

/// What answers reviews and token requests.
pub struct Reviews {
    pub bearer: Arc<Bearer>,
    pub tokens: TokenRequests,
}

/// POST of a review.
pub async fn serve(call: &Call, body: content::RequestBody) -> Result<Answer, ApiError> {
    let options = write::create_options(&call.query)?;
    let media = content::input_media(&call.headers, true)?;
    let bytes = content::read_body(&call.headers, body).await?;
    if call.resource.group.is_empty() && call.resource.plural == "bindings" {
        return crate::subresources::binding(call, &bytes, None).await;
    }
    let mut object = decode::object(call, &bytes, media, &Expected::object(call), options.validation)?;
    if call.resource.namespaced {
        write::match_namespace(call, &mut object)?;
    }
    let review = admit(call, object, &options).await?;
    let answer = answer(call, review).await?;
    Ok(Answer::Document(StatusCode::CREATED, answer))
}

async fn admit(call: &Call, object: Value, options: &crate::rest::query::WriteOptions) -> Result<Value, ApiError> {
    let name = meta::name(&object).to_owned();
    let mut request = call.admission(Operation::Create, &name, Some(object), None, &options.document, options.dry_run);
    call.core.admission.mutate(&mut request).await?;
    call.core.admission.validate(&request).await?;
    call.warnings.lock().append(&mut request.warnings.lock());
    Ok(request.object.take().unwrap_or_default())
}

async fn answer(call: &Call, body: Value) -> Result<Value, ApiError> {
    match (call.resource.group.as_str(), call.resource.plural.as_str()) {
        ("authentication.k8s.io", "tokenreviews") => crate::authn::reviews::token_review(&call.core.reviews.bearer, body).await,
        ("authentication.k8s.io", "selfsubjectreviews") => Ok(crate::authn::reviews::self_subject_review(&call.user, body)),
        ("authorization.k8s.io", plural) => crate::authz::reviews::review(&*call.core.authorizer, plural, call.namespace(), &call.user, body),
        (group, plural) => Err(ApiError::not_implemented(format!("{plural}.{group} cannot be answered by this server"))),
    }
}

/// POST of `serviceaccounts/token`.
pub async fn token(call: &Call, bytes: &[u8]) -> Result<Answer, ApiError> {
    let options = write::create_options(&call.query)?;
    let media = content::input_media(&call.headers, true)?;
    let expected = Expected::subresource(&call.resource, &call.info.api_version, "token").ok_or_else(ApiError::no_such_path)?;
    let object = decode::object(call, bytes, media, &expected, options.validation)?;
    let tokens = &call.core.reviews.tokens;
    // Mutating admission sees the request as it came: a node that names no audience means the server's own.
    let mut request = call.admission(Operation::Create, call.name(), Some(object), None, &options.document, options.dry_run);
    call.core.admission.mutate(&mut request).await?;
    let object = request.object.take().unwrap_or_default();
    request.object = Some(tokens.prepare(call.namespace(), call.name(), object, call.now).await?);
    call.core.admission.validate(&request).await?;
    call.warnings.lock().append(&mut request.warnings.lock());
    let prepared = request.object.take().unwrap_or_default();
    if options.dry_run {
        return Ok(Answer::Document(StatusCode::CREATED, prepared));
    }
    let mut warnings = Vec::new();
    let issued = tokens.issue(prepared, call.now, &mut warnings).await?;
    warnings.into_iter().for_each(|w| call.warn(w));
    Ok(Answer::Document(StatusCode::CREATED, issued))
}
