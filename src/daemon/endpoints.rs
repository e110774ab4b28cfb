//! The endpoints that every role serves beside its own.
//!
//! | path | what | gate |
//! | --- | --- | --- |
//! | `/healthz` `/livez` `/readyz` | `ok`, or the failed checks; `?verbose`, `?exclude=NAME` | no |
//! | `/healthz/NAME` ... | one check, with its reason | yes |
//! | `/metrics` | Prometheus text | yes |
//! | `/configz` | the configuration in force | yes |
//! | `/version` | upstream's version document | yes |
//! | `/debug/pprof/` | `profile?seconds=&hz=`, `heap`, `cmdline`, `symbol` | yes |
//!
//! Text and wording follow upstream's `k8s.io/apiserver/pkg/server/healthz`, so that what parses it goes on working.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header, request::Parts};
use serde_json::{Value, json};
use warp::filters::BoxedFilter;
use warp::{Filter, Rejection};

use crate::health::{Health, Kind};
use crate::server::{PeerAddr, PeerCertificates, PeerRejected};
use crate::{metrics, profile, version};

/// Who may see what is not health. A role hands in its authentication and authorization.
#[async_trait]
pub trait Gate: Send + Sync {
    /// Lets the request pass, or says why not. `request` has the method, URI, headers, and the peer's extensions.
    async fn admit(&self, request: &Parts) -> Result<(), Denied>;
}

/// A refusal: 401 or 403 as a rule.
#[derive(Clone, Debug)]
pub struct Denied {
    pub status: StatusCode,
    pub message: String,
}

type Reply = warp::reply::Response;

/// All of the endpoints. `name` is the key of the configuration in `/configz`: upstream's `kubeletconfig`,
/// `componentconfig`, ...
pub fn routes(health: Health, configz: Value, name: &'static str, gate: Arc<dyn Gate>) -> BoxedFilter<(Reply,)> {
    let roots = [("healthz", Kind::Healthz), ("livez", Kind::Livez), ("readyz", Kind::Readyz)];
    let open = roots.map(|(path, kind)| {
        let health = health.clone();
        warp::path(path)
            .and(warp::path::end())
            .and(reading())
            .and(query())
            .map(move |query: Query| summary(&health, kind, &query))
            .boxed()
    });
    let single = roots.map(|(path, kind)| {
        let health = health.clone();
        warp::path(path)
            .and(warp::path::param::<String>())
            .and(warp::path::end())
            .and(reading())
            .and(admitted(&gate))
            .map(move |check: String| one_check(&health, kind, &check))
            .boxed()
    });
    let configz = json!({ name: configz });
    let documents = get("metrics", &gate)
        .map(|| {
            let (content_type, text) = metrics::encode();
            reply(StatusCode::OK, &content_type, text)
        })
        .or(get("configz", &gate).map(move || json_reply(StatusCode::OK, &configz)))
        .unify()
        .or(get("version", &gate).map(|| json_reply(StatusCode::OK, &json!(version::info()))))
        .unify()
        .boxed();
    let all = open.into_iter().chain(single).fold(documents, |all, route| all.or(route).unify().boxed());
    all.or(debug(gate)).unify().recover(denied).unify().boxed()
}

/// The profiles below `/debug/pprof`.
fn debug(gate: Arc<dyn Gate>) -> BoxedFilter<(Reply,)> {
    let pprof = || warp::path("debug").and(warp::path("pprof"));
    let below = |name: &'static str| pprof().and(warp::path(name)).and(warp::path::end());
    let index = pprof().and(warp::path::end()).and(reading()).and(admitted(&gate)).map(|| {
        text(StatusCode::OK, "profile: CPU, ?seconds=30&hz=99\nheap: what is allocated now\ncmdline\nsymbol\n")
    });
    let cpu = below("profile").and(reading()).and(admitted(&gate)).and(query()).then(cpu_profile);
    let heap = below("heap").and(reading()).and(admitted(&gate)).and(query()).then(heap_profile);
    let cmdline = below("cmdline").and(reading()).and(admitted(&gate)).map(|| {
        let words: Vec<String> = std::env::args_os().map(|w| w.to_string_lossy().into_owned()).collect();
        text(StatusCode::OK, words.join("\0"))
    });
    let asked = below("symbol").and(reading()).and(admitted(&gate)).and(raw_query()).map(|query: String| symbols(&query));
    let posted = below("symbol")
        .and(warp::post())
        .and(admitted(&gate))
        .and(warp::body::content_length_limit(1 << 20))
        .and(warp::body::bytes())
        .map(|body: Bytes| symbols(&String::from_utf8_lossy(&body)));
    index.or(cpu).unify().or(heap).unify().or(cmdline).unify().or(asked).unify().or(posted).unify().boxed()
}

fn get(path: &'static str, gate: &Arc<dyn Gate>) -> BoxedFilter<()> {
    warp::path(path).and(warp::path::end()).and(reading()).and(admitted(gate)).boxed()
}

// === request ===

type Query = Vec<(String, String)>;

fn reading() -> BoxedFilter<()> {
    warp::get().or(warp::head()).unify().boxed()
}

fn raw_query() -> BoxedFilter<(String,)> {
    warp::query::raw().or(warp::any().map(String::new)).unify().boxed()
}

fn query() -> BoxedFilter<(Query,)> {
    // What does not parse as a query has no parameters that we know.
    warp::query::<Query>().or(warp::any().map(Query::new)).unify().boxed()
}

#[derive(Debug)]
struct Refused(Denied);
impl warp::reject::Reject for Refused {}

/// Passes only what the gate admits.
fn admitted(gate: &Arc<dyn Gate>) -> BoxedFilter<()> {
    let gate = Arc::clone(gate);
    warp::method()
        .and(warp::path::full())
        .and(raw_query())
        .and(warp::header::headers_cloned())
        .and(warp::ext::optional::<PeerAddr>())
        .and(warp::ext::optional::<PeerCertificates>())
        .and(warp::ext::optional::<PeerRejected>())
        .and_then(
            move |method: Method,
                  path: warp::path::FullPath,
                  query: String,
                  headers: HeaderMap,
                  address: Option<PeerAddr>,
                  certificates: Option<PeerCertificates>,
                  rejected: Option<PeerRejected>| {
                let gate = Arc::clone(&gate);
                async move {
                    let uri = match query.is_empty() {
                        true => path.as_str().to_owned(),
                        false => format!("{}?{query}", path.as_str()),
                    };
                    let (mut parts, ()) = http::Request::builder()
                        .method(method)
                        .uri(uri)
                        .body(())
                        .map_err(|_| warp::reject::not_found())?
                        .into_parts();
                    parts.headers = headers;
                    address.map(|a| parts.extensions.insert(a));
                    certificates.map(|c| parts.extensions.insert(c));
                    rejected.map(|r| parts.extensions.insert(r));
                    gate.admit(&parts).await.map_err(|denied| warp::reject::custom(Refused(denied)))
                }
            },
        )
        .untuple_one()
        .boxed()
}

/// A refusal as a Kubernetes `Status`.
async fn denied(rejection: Rejection) -> Result<Reply, Rejection> {
    let Some(Refused(Denied { status, message })) = rejection.find::<Refused>() else { return Err(rejection) };
    let reason = match *status {
        StatusCode::UNAUTHORIZED => "Unauthorized",
        StatusCode::FORBIDDEN => "Forbidden",
        StatusCode::TOO_MANY_REQUESTS => "TooManyRequests",
        StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailable",
        _ => "InternalError",
    };
    Ok(json_reply(
        *status,
        &json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": message, "reason": reason, "code": status.as_u16(),
        }),
    ))
}

// === replies ===

fn reply(status: StatusCode, content_type: &str, body: impl Into<Bytes>) -> Reply {
    let mut reply = warp::reply::Reply::into_response(Response::new(body.into()));
    *reply.status_mut() = status;
    if let Ok(value) = HeaderValue::from_str(content_type) {
        reply.headers_mut().insert(header::CONTENT_TYPE, value);
    }
    reply.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    reply
}

fn text(status: StatusCode, body: impl Into<String>) -> Reply {
    reply(status, "text/plain; charset=utf-8", body.into())
}

fn json_reply(status: StatusCode, body: &Value) -> Reply {
    reply(status, "application/json", body.to_string())
}

// === health ===

fn observe(name: &str, kind: Kind, holds: bool) {
    metrics::gauge_vec(
        "kubernetes_healthcheck",
        "This metric records the result of a single healthcheck.",
        &["name", "type"],
    )
    .with_label_values(&[name, kind.name()])
    .set(i64::from(holds));
    metrics::counter_vec(
        "kubernetes_healthchecks_total",
        "This metric records the results of all healthcheck.",
        &["name", "type", "status"],
    )
    .with_label_values(&[name, kind.name(), if holds { "success" } else { "error" }])
    .inc();
}

fn summary(health: &Health, kind: Kind, query: &Query) -> Reply {
    // Each excluded name, and whether a check of that name was met.
    let mut excluded: BTreeMap<&str, bool> =
        query.iter().filter(|(k, _)| k == "exclude").map(|(_, v)| (v.as_str(), false)).collect();
    let verbose = query.iter().any(|(k, _)| k == "verbose");
    let (mut lines, mut failed) = (String::new(), Vec::new());
    for verdict in health.verdicts(kind) {
        let name = verdict.name;
        if let Some(met) = excluded.get_mut(name) {
            *met = true;
            lines += &format!("[+]{name} excluded: ok\n");
            continue;
        }
        observe(name, kind, verdict.result.is_ok());
        match verdict.result {
            Ok(()) => lines += &format!("[+]{name} ok\n"),
            Err(reason) => {
                lines += &format!("[-]{name} failed: reason withheld\n");
                failed.push(format!("{name}: {reason}"));
            }
        }
    }
    let unmet: Vec<String> = excluded.iter().filter(|(_, met)| !**met).map(|(name, _)| format!("{name:?}")).collect();
    if !unmet.is_empty() {
        lines += &format!("warn: some health checks cannot be excluded: no matches for {}\n", unmet.join(", "));
    }
    if !failed.is_empty() {
        tracing::debug!(check = kind.name(), failed = failed.join("; "), "health check failed");
        return text(StatusCode::INTERNAL_SERVER_ERROR, format!("{lines}{} check failed\n", kind.name()));
    }
    match verbose {
        true => text(StatusCode::OK, format!("{lines}{} check passed\n", kind.name())),
        false => text(StatusCode::OK, "ok"),
    }
}

fn one_check(health: &Health, kind: Kind, name: &str) -> Reply {
    match health.verdicts(kind).into_iter().find(|v| v.name == name) {
        None => text(StatusCode::NOT_FOUND, "404 page not found\n"),
        Some(verdict) => {
            observe(name, kind, verdict.result.is_ok());
            match verdict.result {
                Ok(()) => text(StatusCode::OK, "ok"),
                Err(reason) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("internal server error: {reason}\n")),
            }
        }
    }
}

// === profiles ===

fn number<T: std::str::FromStr>(query: &Query, key: &str, default: T) -> Result<T, String> {
    match query.iter().find(|(k, _)| k == key) {
        None => Ok(default),
        Some((_, value)) => value.parse().map_err(|_| format!("{key}={value}: not a number in range")),
    }
}

async fn cpu_profile(query: Query) -> Reply {
    let asked = number(&query, "seconds", 30_u64).and_then(|s| Ok((s, number(&query, "hz", profile::DEFAULT_HZ)?)));
    let (seconds, hz) = match asked {
        Ok((s, hz)) if (1..=profile::MAX_SECONDS).contains(&s) && (1..=1000).contains(&hz) => (s, hz),
        Ok(_) => {
            let limits = format!("seconds must be 1 to {} and hz 1 to 1000\n", profile::MAX_SECONDS);
            return text(StatusCode::BAD_REQUEST, limits);
        }
        Err(message) => return text(StatusCode::BAD_REQUEST, message + "\n"),
    };
    profile_reply(profile::cpu(Duration::from_secs(seconds), hz).await, "profile")
}

async fn heap_profile(query: Query) -> Reply {
    if query.iter().any(|(k, _)| k == "seconds") {
        return text(
            StatusCode::BAD_REQUEST,
            "heap profiles show one moment: take two and compare them with `go tool pprof -base`\n",
        );
    }
    profile_reply(profile::heap().await, "heap")
}

fn profile_reply(taken: Result<Bytes, profile::ProfileError>, name: &'static str) -> Reply {
    match taken {
        Ok(bytes) => {
            let mut reply = reply(StatusCode::OK, "application/octet-stream", bytes);
            let disposition = format!("attachment; filename=\"{name}\"");
            if let Ok(value) = HeaderValue::from_str(&disposition) {
                reply.headers_mut().insert(header::CONTENT_DISPOSITION, value);
            }
            reply
        }
        Err(error) => {
            let status = match error {
                profile::ProfileError::Busy => StatusCode::CONFLICT,
                profile::ProfileError::HeapOff => StatusCode::NOT_IMPLEMENTED,
                _ => StatusCode::INTERNAL_SERVER_ERROR,
            };
            text(status, format!("{error}\n"))
        }
    }
}

/// Go's symbol protocol: `num_symbols: 1`, then for each `+`-separated address that is known its address and name.
fn symbols(addresses: &str) -> Reply {
    let mut lines = "num_symbols: 1\n".to_owned();
    for word in addresses.split('+').take(10_000) {
        let hex = word.trim().trim_start_matches("0x");
        let Ok(address) = usize::from_str_radix(hex, 16) else { continue };
        if let Some(name) = profile::symbol(address) {
            lines += &format!("{address:#x} {name}\n");
        }
    }
    text(StatusCode::OK, lines)
}

#[cfg(test)]
#[path = "endpoints_tests.rs"]
mod tests;
