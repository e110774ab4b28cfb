//! GET and LIST.

use std::sync::Arc;

use windlass_api::ApiError;

use super::query::{Continue, ListOptions, Match};
use super::{Answer, Call, encode};
use crate::cache::{Filter, Page, ResourceCache};
use crate::content::Reply;
use crate::storage::Stored;
use http::StatusCode;

/// GET of one object. `resourceVersion=0` may be answered from the cache; everything else is answered from a state no older than
/// any acknowledged write (and, if a version is given, no older than that).
pub async fn get(call: &Call) -> Result<Answer, ApiError> {
    let resource = &call.stored_as;
    let objects = &call.core.objects;
    let stored = match call.query.get("resourceVersion").unwrap_or_default() {
        "" => objects.get(resource, call.namespace(), call.name()).await.map_err(|e| if e.code == 404 { call.not_found() } else { e })?,
        text => {
            let revision: u64 = text.parse().map_err(|_| ApiError::bad_request(format!("invalid resource version {text:?}")))?;
            objects.wait_for(revision).await?;
            objects.cached(resource, call.namespace(), call.name()).ok_or_else(|| call.not_found())?
        }
    };
    Ok(Answer::Stored(StatusCode::OK, stored))
}

/// LIST of a collection.
pub async fn list(call: &Call) -> Result<Answer, ApiError> {
    let options = ListOptions::parse(&call.query, false)?;
    let cache = call.core.objects.require_cache(&call.stored_as)?;
    let filter = filter(call, &cache, &options)?;
    if !options.continue_token.is_empty() {
        return next_page(call, &cache, &filter, &options).await;
    }
    let revision = options.revision()?;
    let objects = &call.core.objects;
    let (page, revision) = match (revision, options.version_match) {
        (_, Some(Match::Exact)) => (page_at(call, &cache, &filter, revision, None, options.limit).await?, revision),
        // A limit with a version (and no match) is read at exactly that version, as upstream does.
        (1.., None) if options.limit.is_some() => (page_at(call, &cache, &filter, revision, None, options.limit).await?, revision),
        (0, _) => {
            let listed = objects.list(&cache, &filter, options.limit, options.resource_version.is_empty()).await?;
            (listed.page, listed.revision)
        }
        (_, _) => {
            objects.wait_for(revision).await?;
            let listed = objects.list(&cache, &filter, options.limit, false).await?;
            (listed.page, listed.revision)
        }
    };
    answer(call, page, revision)
}

/// The next page of a list that began before.
async fn next_page(call: &Call, cache: &ResourceCache, filter: &Filter, options: &ListOptions) -> Result<Answer, ApiError> {
    if !options.resource_version.is_empty() && options.resource_version != "0" {
        return Err(ApiError::bad_request("specifying resource version is not allowed when using continue"));
    }
    let token = Continue::decode(&options.continue_token)?;
    // A token of a list in one namespace names keys without it.
    let after = match &filter.namespace {
        Some(ns) => format!("{ns}/{}", token.after),
        None => token.after.clone(),
    };
    let revision = match token.revision {
        Some(revision) => revision,
        None => {
            call.core.objects.catch_up().await?;
            call.core.objects.revision()
        }
    };
    match page_at(call, cache, filter, revision, Some(&after), options.limit).await {
        Ok(page) => answer(call, page, revision),
        Err(error) if error.code == 410 => {
            let go_on = Continue { revision: None, after: token.after }.encode();
            let error = ApiError::expired(
                "The provided continue parameter is too old to display a consistent list result. You can start a new list without \
                 the continue parameter, or use the continue token in this response to retrieve the remainder of the results. \
                 Continuing with the provided token results in an inconsistent list - objects that were created, modified, or deleted \
                 between the time the first chunk was returned and now may show up in the list.",
            );
            let mut status = error.to_status();
            status["metadata"]["continue"] = go_on.into();
            Ok(Answer::Document(StatusCode::GONE, status))
        }
        Err(error) => Err(error),
    }
}

/// A page as of a revision: from the cache if its history reaches back that far, otherwise from the store.
async fn page_at(call: &Call, cache: &ResourceCache, filter: &Filter, revision: u64, after: Option<&str>, limit: Option<usize>) -> Result<Page, ApiError> {
    call.core.objects.wait_for(revision).await?;
    if let Some(page) = cache.page_at(revision, filter, after, limit) {
        return Ok(page);
    }
    call.core.objects.page_from_store(cache, filter, revision, after, limit).await
}

fn answer(call: &Call, page: Page, revision: u64) -> Result<Answer, ApiError> {
    let token = page.next.as_deref().map(|key| {
        let namespace = call.namespace();
        let after = if namespace.is_empty() { key } else { key.strip_prefix(namespace).map_or(key, |k| k.trim_start_matches('/')) };
        Continue { revision: Some(revision), after: after.to_owned() }.encode()
    });
    list_answer(call, page.items, revision, token, page.remaining).map(Answer::Raw)
}

/// A list as a response.
pub(crate) fn list_answer(call: &Call, items: Vec<Arc<Stored>>, revision: u64, continue_token: Option<String>, remaining: Option<u64>) -> Result<Reply, ApiError> {
    encode::list_reply(call, &items, &encode::ListMeta { revision, continue_token, remaining })
}

/// The filter of a list or watch: its selectors checked against what the resource can be selected by.
pub(crate) fn filter(call: &Call, cache: &ResourceCache, options: &ListOptions) -> Result<Filter, ApiError> {
    options.fields.check(&call.resource, &call.version().name).map_err(ApiError::bad_request)?;
    let mut fields = options.fields.clone();
    let parts_name = call.info.parts.get(1);
    if let Some(name) = parts_name {
        // `/watch/.../name` is a watch of one object.
        match fields.exact("metadata.name") {
            Some(selected) if selected != name => {
                return Err(ApiError::bad_request("fieldSelector metadata.name doesn't match requested name"));
            }
            Some(_) => {}
            None => {
                fields = windlass_api::selector::FieldSelector::parse(&format!("metadata.name={name}")).map_err(ApiError::bad_request)?;
            }
        }
    }
    Ok(Filter::new(&call.resource, cache.fields(), Some(call.namespace()), options.labels.clone(), &fields))
}
