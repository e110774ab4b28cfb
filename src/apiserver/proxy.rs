//! Requests that go on to a kubelet or a pod: log, exec, attach, portforward, and the proxy subresources of pods, nodes and services.
//!
//! Deliberately absent: rewriting links in proxied HTML.

use http::{Response, StatusCode, header};
use rand::seq::IndexedRandom;
use serde_json::{Value, json};
use windlass_api::field::FieldError;
use windlass_api::{ApiError, meta};

use crate::admission::Operation;
use crate::content::{self, RequestBody};
use crate::kubelet::{self, Target, Transport};
use crate::request::percent_decode;
use crate::rest::{Answer, Call};

/// Serves a subresource that connects.
pub async fn serve(call: &mut Call, body: RequestBody) -> Result<Answer, ApiError> {
    match (call.resource.plural.as_str(), call.info.subresource.as_str()) {
        ("pods", "log") => log(call, body).await,
        ("pods", "exec") => stream(call, body, "exec").await,
        ("pods", "attach") => stream(call, body, "attach").await,
        ("pods", "portforward") => stream(call, body, "portForward").await,
        ("pods" | "nodes" | "services", "proxy") => proxy(call, body).await,
        (plural, sub) => Err(ApiError::not_implemented(format!("{plural}/{sub} cannot be connected to"))),
    }
}

async fn pod(call: &Call) -> Result<std::sync::Arc<Value>, ApiError> {
    Ok(call.core.objects.get(&call.stored_as, call.namespace(), call.name()).await?.value())
}

/// Admission of a connection.
async fn admit(call: &Call, options: &Value, old: &Value) -> Result<(), ApiError> {
    let mut request = call.admission(Operation::Connect, call.name(), Some(options.clone()), Some(old), options, false);
    call.core.admission.mutate(&mut request).await?;
    call.core.admission.validate(&request).await?;
    call.warnings.lock().append(&mut request.warnings.lock());
    Ok(())
}

/// The container that is meant: the one that is named, or the only one.
fn container<'a>(call: &Call, pod: &'a Value, named: &'a str) -> Result<&'a str, ApiError> {
    let list = |key: &str| pod["spec"][key].as_array().map(Vec::as_slice).unwrap_or_default();
    let names = |key: &str| list(key).iter().filter_map(|c| c["name"].as_str());
    if named.is_empty() {
        let mut all = names("containers");
        return match (all.next(), all.next()) {
            (Some(only), None) => Ok(only),
            (None, _) => Err(ApiError::bad_request(format!("a container name must be specified for pod {}", call.name()))),
            _ => {
                let mut message = format!(
                    "a container name must be specified for pod {}, choose one of: [{}]",
                    call.name(),
                    names("containers").collect::<Vec<_>>().join(" ")
                );
                let init: Vec<&str> = names("initContainers").collect();
                if !init.is_empty() {
                    message.push_str(&format!(" or one of the init containers: [{}]", init.join(" ")));
                }
                Err(ApiError::bad_request(message))
            }
        };
    }
    let known = ["containers", "initContainers", "ephemeralContainers"].into_iter().any(|key| names(key).any(|n| n == named));
    if known { Ok(named) } else { Err(ApiError::bad_request(format!("container {named} is not valid for pod {}", call.name()))) }
}

// === Logs ===

async fn log(call: &mut Call, body: RequestBody) -> Result<Answer, ApiError> {
    let pod = pod(call).await?;
    let query = log_query(call)?;
    let named = call.query.get("container").unwrap_or_default().to_owned();
    let container = container(call, &pod, &named)?;
    let node = match pod["spec"]["nodeName"].as_str() {
        // Not scheduled yet: no log, and no error, as upstream.
        None | Some("") => return Ok(Answer::Raw(content::respond(StatusCode::OK, "text/plain", bytes::Bytes::new(), false))),
        Some(node) => node,
    };
    let target = call.core.kubelets.of_node(&call.core.objects, node)?;
    let path = format!("/containerLogs/{}/{}/{}{query}", call.namespace(), call.name(), encode(container));
    let mut headers = http::HeaderMap::new();
    headers.insert(header::ACCEPT, http::HeaderValue::from_static("*/*"));
    let request = kubelet::redirected(http::Method::GET, headers, http::Extensions::new(), &path, body)?;
    let reply = call.core.kubelets.forward(&target, request).await?;
    if reply.status() == StatusCode::OK {
        let mut reply = reply;
        reply.headers_mut().entry(header::CONTENT_TYPE).or_insert(http::HeaderValue::from_static("text/plain"));
        return Ok(Answer::Raw(reply));
    }
    Err(kubelet_error(call, reply, "log").await)
}

/// A kubelet's refusal as a Status, as upstream's generic HTTP response checker words it.
async fn kubelet_error(call: &Call, reply: content::Reply, what: &str) -> ApiError {
    use http_body_util::{BodyExt, Limited};
    let status = reply.status();
    let text = match Limited::new(reply.into_body(), 64 << 10).collect().await {
        Ok(body) => String::from_utf8_lossy(&body.to_bytes()).trim().to_owned(),
        Err(_) => String::new(),
    };
    match status.as_u16() {
        400 => ApiError::bad_request(text),
        404 => {
            let mut error = ApiError::not_found("", &format!("pods/{what}"), call.name());
            error.message = format!("the server could not find the requested resource ( pods/{what} {})", call.name());
            error
        }
        403 => ApiError::forbidden("", &format!("pods/{what}"), call.name(), &text),
        code => ApiError::internal(format!("the kubelet answered {code}: {text}")),
    }
}

/// The log options that the kubelet is told, after checking them.
fn log_query(call: &Call) -> Result<String, ApiError> {
    let query = &call.query;
    let mut errors = Vec::new();
    let mut out = String::new();
    let mut pass = |name: &str, value: &str| {
        out.push(if out.is_empty() { '?' } else { '&' });
        out.push_str(&format!("{name}={}", encode(value)));
    };
    for name in ["follow", "previous", "timestamps", "insecureSkipTLSVerifyBackend"] {
        if content::option_bool(query.get(name)) && name != "insecureSkipTLSVerifyBackend" {
            pass(name, "true");
        }
    }
    for (name, least, detail) in [("tailLines", 0, "must be greater than or equal to 0"), ("sinceSeconds", 1, "must be greater than 0"), ("limitBytes", 1, "must be greater than 0")] {
        let Some(text) = query.get(name).filter(|t| !t.is_empty()) else { continue };
        match text.parse::<i64>() {
            Ok(n) if n >= least => pass(name, text),
            Ok(n) => errors.push(FieldError::invalid(name, n, detail)),
            Err(_) => return Err(ApiError::bad_request(format!("strconv.ParseInt: parsing {text:?}: invalid syntax"))),
        }
    }
    let since = query.get("sinceTime").filter(|t| !t.is_empty());
    if let Some(text) = since {
        if meta::parse_time(text).is_none() {
            return Err(ApiError::bad_request(format!("parsing time {text:?}: it is not RFC 3339")));
        }
        if query.get("sinceSeconds").is_some_and(|s| !s.is_empty()) {
            errors.push(FieldError::forbidden("", "at most one of `sinceTime` or `sinceSeconds` may be specified"));
        }
        pass("sinceTime", text);
    }
    if let Some(stream) = query.get("stream").filter(|s| !s.is_empty()) {
        if !matches!(stream, "All" | "Stdout" | "Stderr") {
            errors.push(FieldError::not_supported("stream", stream, &["All", "Stdout", "Stderr"]));
        } else if stream != "All" && query.get("tailLines").is_some() {
            errors.push(FieldError::forbidden("", "`tailLines` and specific `stream` are mutually exclusive for now"));
        }
        pass("stream", stream);
    }
    if errors.is_empty() { Ok(out) } else { Err(ApiError::invalid("", "PodLogOptions", call.name(), errors)) }
}

// === Exec, attach, port-forward ===

async fn stream(call: &mut Call, body: RequestBody, verb: &str) -> Result<Answer, ApiError> {
    let pod = pod(call).await?;
    let options = connect_options(call, verb);
    admit(call, &options, &pod).await?;
    let (path, query) = match verb {
        "portForward" => {
            let ports: Vec<&str> = call.query.all("ports").flat_map(|p| p.split(',')).filter(|p| !p.is_empty()).collect();
            for port in &ports {
                if port.parse::<u16>().ok().filter(|p| *p != 0).is_none() {
                    return Err(ApiError::bad_request(format!("unable to parse {port:?} as a port")));
                }
            }
            let query: Vec<String> = ports.iter().map(|p| format!("port={p}")).collect();
            (format!("/portForward/{}/{}", call.namespace(), call.name()), query)
        }
        _ => {
            let named = call.query.get("container").unwrap_or_default().to_owned();
            let container = container(call, &pod, &named)?.to_owned();
            (format!("/{verb}/{}/{}/{}", call.namespace(), call.name(), encode(&container)), stream_query(call, verb)?)
        }
    };
    let target = call.core.kubelets.of_node(&call.core.objects, kubelet::node_of(&pod)?)?;
    let path = if query.is_empty() { path } else { format!("{path}?{}", query.join("&")) };
    if !kubelet::is_upgrade(&call.headers) {
        return Err(ApiError::bad_request("Upgrade request required"));
    }
    let request = kubelet::redirected(call.method.clone(), call.headers.clone(), std::mem::take(&mut call.extensions), &path, body)?;
    call.core.kubelets.forward(&target, request).await.map(Answer::Raw)
}

/// The options as an object, for admission.
fn connect_options(call: &Call, verb: &str) -> Value {
    let flag = |name: &str| content::option_bool(call.query.get(name));
    match verb {
        "portForward" => json!({"kind": "PodPortForwardOptions", "apiVersion": "v1"}),
        _ => {
            let kind = if verb == "exec" { "PodExecOptions" } else { "PodAttachOptions" };
            json!({
                "kind": kind, "apiVersion": "v1", "stdin": flag("stdin"), "stdout": flag("stdout"), "stderr": flag("stderr"), "tty": flag("tty"),
                "container": call.query.get("container").unwrap_or_default(), "command": call.query.all("command").collect::<Vec<_>>(),
            })
        }
    }
}

/// The kubelet's names for what a client of exec and attach asks for.
fn stream_query(call: &Call, verb: &str) -> Result<Vec<String>, ApiError> {
    let mut query = Vec::new();
    for (ours, theirs) in [("stdin", "input"), ("stdout", "output"), ("stderr", "error"), ("tty", "tty")] {
        if content::option_bool(call.query.get(ours)) {
            query.push(format!("{theirs}=1"));
        }
    }
    if query.iter().all(|q| q == "tty=1") {
        return Err(ApiError::bad_request("you must specify at least 1 of stdin, stdout, stderr"));
    }
    if verb == "exec" {
        let command: Vec<String> = call.query.all("command").map(|c| format!("command={}", encode(c))).collect();
        if command.is_empty() {
            return Err(ApiError::bad_request("you must specify a command to run"));
        }
        query.extend(command);
    }
    Ok(query)
}

/// Percent-encodes everything but unreserved characters.
fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for b in text.bytes() {
        match b {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(char::from(b)),
            _ => out.push_str(&format!("%{b:02X}")),
        }
    }
    out
}

// === Proxy ===

async fn proxy(call: &mut Call, body: RequestBody) -> Result<Answer, ApiError> {
    let raw = call.info.path.clone();
    let rest = raw_rest(&raw, call.info.parts.first().map_or("", String::as_str));
    let Some(rest) = rest else {
        // `.../proxy` without a slash: relative links would miss, so the client is sent to the path with it.
        if matches!(call.method, http::Method::GET | http::Method::HEAD) {
            return redirect(call, &raw).map(Answer::Raw);
        }
        return Ok(Answer::Raw(forward(call, body, "/").await?));
    };
    Ok(Answer::Raw(forward(call, body, &rest).await?))
}

/// What follows `RESOURCE/NAME/proxy` in the raw path, with its slash.
fn raw_rest(path: &str, resource: &str) -> Option<String> {
    let mut at = 0;
    let segments: Vec<&str> = path.split('/').collect();
    for window in 0..segments.len() {
        let here = segments.get(window).map(|s| percent_decode(s, false));
        if here.as_deref() == Some(resource) && segments.get(window + 2) == Some(&"proxy") {
            let end: usize = segments[..window + 3].iter().map(|s| s.len() + 1).sum::<usize>() - 1;
            at = end;
            break;
        }
    }
    (at > 0 && at < path.len()).then(|| path[at..].to_owned())
}

fn redirect(call: &Call, path: &str) -> Result<content::Reply, ApiError> {
    let query = call.raw_query();
    let location = if query.is_empty() { format!("{path}/") } else { format!("{path}/?{query}") };
    let mut reply = Response::new(content::full(bytes::Bytes::new()));
    *reply.status_mut() = StatusCode::MOVED_PERMANENTLY;
    reply.headers_mut().insert(header::LOCATION, location.parse().map_err(ApiError::internal)?);
    Ok(reply)
}

async fn forward(call: &mut Call, body: RequestBody, rest: &str) -> Result<content::Reply, ApiError> {
    let target = match call.resource.plural.as_str() {
        "pods" => pod_target(call).await?,
        "nodes" => node_target(call)?,
        _ => service_target(call)?,
    };
    let kind = match call.resource.plural.as_str() {
        "pods" => "PodProxyOptions",
        "nodes" => "NodeProxyOptions",
        _ => "ServiceProxyOptions",
    };
    let options = json!({"kind": kind, "apiVersion": "v1", "path": rest});
    admit(call, &options, &Value::Null).await?;
    let query = call.raw_query();
    let path = if query.is_empty() { rest.to_owned() } else { format!("{rest}?{query}") };
    let mut headers = call.headers.clone();
    if let Ok(uri) = call.info.path.parse() {
        headers.insert("x-forwarded-uri", uri);
    }
    if let Some(host) = call.headers.get(header::HOST).cloned() {
        headers.insert("x-forwarded-host", host);
    }
    headers.insert("x-forwarded-proto", http::HeaderValue::from_static("https"));
    let request = kubelet::redirected(call.method.clone(), headers, std::mem::take(&mut call.extensions), &path, body)?;
    call.core.kubelets.forward(&target, request).await
}

/// `[scheme:]name[:port]`.
fn split_name(text: &str) -> Result<(Transport, &str, &str), ApiError> {
    let bad = || ApiError::bad_request(format!("invalid proxy request {text:?}"));
    let parts: Vec<&str> = text.split(':').collect();
    let (scheme, name, port) = match parts.as_slice() {
        [name] => ("", *name, ""),
        [name, port] => ("", *name, *port),
        [scheme, name, port] => (*scheme, *name, *port),
        _ => return Err(bad()),
    };
    let transport = match scheme {
        "" | "http" => Transport::Http,
        "https" => Transport::Https,
        _ => return Err(bad()),
    };
    if name.is_empty() { Err(bad()) } else { Ok((transport, name, port)) }
}

async fn pod_target(call: &Call) -> Result<Target, ApiError> {
    let (transport, name, port) = split_name(call.name())?;
    let pod = call.core.objects.get(&call.stored_as, call.namespace(), name).await?.value();
    let ip = pod["status"]["podIP"].as_str().unwrap_or_default();
    if ip.is_empty() {
        return Err(ApiError::bad_request(format!("pod {name} does not have an IP address yet")));
    }
    kubelet::check_proxyable(ip)?;
    let ports = || pod["spec"]["containers"].as_array().into_iter().flatten().flat_map(|c| c["ports"].as_array().into_iter().flatten());
    let port = match port {
        "" => ports().next().and_then(|p| p["containerPort"].as_u64()).unwrap_or(80),
        text => match text.parse() {
            Ok(number) => number,
            Err(_) => ports()
                .find(|p| p["name"] == text)
                .and_then(|p| p["containerPort"].as_u64())
                .ok_or_else(|| ApiError::bad_request(format!("pod {name} has no port {text:?}")))?,
        },
    };
    let port = u16::try_from(port).ok().filter(|p| *p != 0).ok_or_else(|| ApiError::bad_request(format!("invalid port {port}")))?;
    Ok(Target { host: ip.to_owned(), port, transport })
}

fn node_target(call: &Call) -> Result<Target, ApiError> {
    let (transport, name, port) = split_name(call.name())?;
    let kubelet = call.core.kubelets.of_node(&call.core.objects, name)?;
    if port.is_empty() || port.parse() == Ok(kubelet.port) {
        return Ok(kubelet);
    }
    let port: u16 = port.parse().map_err(|_| ApiError::bad_request(format!("invalid port {port:?}")))?;
    kubelet::check_proxyable(&kubelet.host)?;
    Ok(Target { host: kubelet.host, port, transport })
}

/// One of the service's ready endpoints, at random.
fn service_target(call: &Call) -> Result<Target, ApiError> {
    let (transport, name, port) = split_name(call.name())?;
    let objects = &call.core.objects;
    let service = objects.cached(&call.stored_as, call.namespace(), name).ok_or_else(|| ApiError::not_found("", "services", name))?;
    let service = service.value();
    let ports = service["spec"]["ports"].as_array().map(Vec::as_slice).unwrap_or_default();
    let unavailable = |why: String| ApiError::service_unavailable(why);
    let wanted = match port.parse::<u64>() {
        Ok(number) => ports
            .iter()
            .find(|p| p["port"].as_u64() == Some(number))
            .ok_or_else(|| unavailable(format!("no service port {number} found for service {name:?}")))?["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned(),
        Err(_) => port.to_owned(),
    };
    let slices = objects.resource("discovery.k8s.io", "endpointslices").map(|r| objects.cached_list(&r, Some(call.namespace()))).unwrap_or_default();
    let mut found = Vec::new();
    for slice in slices {
        let slice = slice.value();
        if meta::label(&slice, "kubernetes.io/service-name") != Some(name) {
            continue;
        }
        let any = wanted.is_empty() && port.is_empty();
        let port = slice["ports"].as_array().into_iter().flatten().find(|p| any || p["name"].as_str().unwrap_or_default() == wanted);
        let Some(port) = port.and_then(|p| p["port"].as_u64()).and_then(|p| u16::try_from(p).ok()) else { continue };
        for endpoint in slice["endpoints"].as_array().into_iter().flatten() {
            if endpoint["conditions"]["ready"] != false {
                found.extend(endpoint["addresses"].as_array().into_iter().flatten().filter_map(Value::as_str).map(|a| (a.to_owned(), port)));
            }
        }
    }
    let (host, port) = found.choose(&mut rand::rng()).cloned().ok_or_else(|| unavailable(format!("no endpoints available for service {name:?}")))?;
    kubelet::check_proxyable(&host)?;
    Ok(Target { host, port, transport })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rest_of_the_path() {
        for (path, resource, want) in [
            ("/api/v1/namespaces/ns/pods/p:80/proxy/a/b", "pods", Some("/a/b")),
            ("/api/v1/namespaces/ns/pods/p/proxy/", "pods", Some("/")),
            ("/api/v1/namespaces/ns/pods/p/proxy", "pods", None),
            ("/api/v1/nodes/n/proxy/stats/summary", "nodes", Some("/stats/summary")),
            ("/api/v1/namespaces/services/services/s/proxy/x%2Fy", "services", Some("/x%2Fy")),
        ] {
            assert_eq!(raw_rest(path, resource).as_deref(), want, "{path}");
        }
    }

    #[test]
    fn names() {
        assert_eq!(split_name("https:web:443").expect("a name"), (Transport::Https, "web", "443"));
        assert_eq!(split_name("web").expect("a name"), (Transport::Http, "web", ""));
        for bad in ["a:b:c", ":80", "ftp:a:1", "a:b:c:d"] {
            assert!(split_name(bad).is_err(), "{bad}");
        }
    }
}
