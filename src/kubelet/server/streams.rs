//! `/exec`, `/attach`, `/portForward` and `/run`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;

use super::{Answer, Query, text};
use crate::pod::model;
use crate::runtime::{Container, ExecOptions};
use crate::shared::{Shared, View};
use crate::stream::{self, exec, portforward};

const RUN_TIMEOUT: Duration = Duration::from_secs(120);
const RUN_LIMIT: usize = 16 << 20;

/// The pod and container that a path names: `verb/namespace/pod[/uid]/container`.
fn target(shared: &Shared, parts: &[&str]) -> Result<(View, Container), Answer> {
    let (namespace, pod, uid, container) = match parts {
        [_, namespace, pod, container] => (*namespace, *pod, None, *container),
        [_, namespace, pod, uid, container] => (*namespace, *pod, Some(*uid), *container),
        _ => return Err(text(StatusCode::NOT_FOUND, "404 page not found")),
    };
    let view = find(shared, namespace, pod, uid)?;
    if model::find(&view.pod, container).is_none() {
        return Err(text(StatusCode::NOT_FOUND, format!("container not found (\"{container}\")")));
    }
    match view.containers.iter().find(|c| c.name == container && c.running()) {
        Some(found) => {
            let found = found.clone();
            Ok((view, found))
        }
        None => Err(text(StatusCode::INTERNAL_SERVER_ERROR, format!("container not found (\"{container}\")"))),
    }
}

fn find(shared: &Shared, namespace: &str, pod: &str, uid: Option<&str>) -> Result<View, Answer> {
    let view = shared.table.find(namespace, pod).filter(|v| uid.is_none_or(|u| u == model::uid(&v.pod) || model::annotation(&v.pod, model::HASH_ANNOTATION) == Some(u)));
    view.ok_or_else(|| text(StatusCode::NOT_FOUND, "pod does not exist"))
}

fn wanted(query: &Query) -> Result<exec::Wanted, Answer> {
    let wanted = exec::Wanted {
        stdin: query.flag(&["input", "stdin"]),
        stdout: query.flag(&["output", "stdout"]),
        stderr: query.flag(&["error", "stderr"]),
        tty: query.flag(&["tty"]),
    };
    if !(wanted.stdin || wanted.stdout || wanted.stderr) {
        return Err(text(StatusCode::BAD_REQUEST, "you must specify at least 1 of stdin, stdout, stderr"));
    }
    // On a terminal there is one output.
    Ok(exec::Wanted { stderr: wanted.stderr && !wanted.tty, ..wanted })
}

pub async fn serve(shared: &Arc<Shared>, parts: &[&str], request: Request<Incoming>) -> Answer {
    if !matches!(*request.method(), Method::GET | Method::POST) {
        return text(StatusCode::METHOD_NOT_ALLOWED, "method not allowed");
    }
    let result = match parts[0] {
        "exec" => exec_or_attach(shared, parts, request, true),
        "attach" => exec_or_attach(shared, parts, request, false),
        "portForward" => port_forward(shared, parts, request),
        _ => run(shared, parts, &request).await,
    };
    result.unwrap_or_else(|refused| refused)
}

fn exec_or_attach(shared: &Arc<Shared>, parts: &[&str], request: Request<Incoming>, is_exec: bool) -> Result<Answer, Answer> {
    let (view, container) = target(shared, parts)?;
    let query = Query::parse(request.uri().query());
    let mut wanted = wanted(&query)?;
    let command = query.all("command");
    if is_exec && command.is_empty() {
        return Err(text(StatusCode::BAD_REQUEST, "you must specify a command"));
    }
    if !is_exec {
        let (_, spec) = model::find(&view.pod, &container.name).ok_or_else(|| text(StatusCode::NOT_FOUND, "container not found"))?;
        wanted.tty = spec.tty == Some(true);
        if wanted.stdin && spec.stdin != Some(true) {
            wanted.stdin = false;
        }
    }
    let (head, _) = request.into_parts();
    let upgrade = stream::negotiate(&head, &exec::SPDY_PROTOCOLS, &exec::WEB_PROTOCOLS).map_err(|(status, message)| text(status, message))?;
    let answer = stream::accept(&head, &upgrade);
    let on_upgrade = hyper::upgrade::on(Request::from_parts(head, ()));
    let shared = shared.clone();
    tokio::spawn(async move {
        let io = match on_upgrade.await {
            Ok(io) => TokioIo::new(io),
            Err(error) => {
                tracing::debug!(%error, "connection not upgraded");
                return;
            }
        };
        let runtime = shared.runtime.clone();
        let start = async {
            let session = if is_exec {
                let options = ExecOptions { command, tty: wanted.tty, stdin: wanted.stdin, stdout: wanted.stdout, stderr: wanted.stderr };
                runtime.exec(&container.id, &options).await
            } else {
                runtime.attach(&container.id, wanted.stdin, wanted.stdout, wanted.stderr).await
            };
            session.map_err(|e| e.to_string())
        };
        tokio::select! {
            () = exec::run(io, upgrade, wanted, &shared.runtime, start) => {}
            () = shared.shutdown.cancelled() => {}
        }
    });
    Ok(answer)
}

fn port_forward(shared: &Arc<Shared>, parts: &[&str], request: Request<Incoming>) -> Result<Answer, Answer> {
    let view = match parts {
        [_, namespace, pod] => find(shared, namespace, pod, None)?,
        [_, namespace, pod, uid] => find(shared, namespace, pod, Some(uid))?,
        _ => return Err(text(StatusCode::NOT_FOUND, "404 page not found")),
    };
    let sandbox = view.sandbox().ok_or_else(|| text(StatusCode::INTERNAL_SERVER_ERROR, format!("not found (\"{}\")", model::describe(&view.pod))))?;
    let netns = (!model::host_network(&view.pod)).then(|| PathBuf::from(format!("/proc/{}/ns/net", sandbox.pid)));
    let (head, _) = request.into_parts();
    let query = Query::parse(head.uri.query());
    let texts: Vec<String> = query.all("port").into_iter().chain(query.all("ports")).flat_map(|p| p.split(',').map(str::to_owned).collect::<Vec<_>>()).collect();
    let ports: Result<Vec<u16>, Answer> = texts.iter().map(|p| p.parse::<u16>().ok().filter(|p| *p > 0).ok_or_else(|| text(StatusCode::BAD_REQUEST, format!("unable to parse \"{p}\" as a port")))).collect();
    let ports = ports?;
    let upgrade = stream::negotiate(&head, &portforward::SPDY_PROTOCOLS, &portforward::WEB_PROTOCOLS).map_err(|(status, message)| text(status, message))?;
    if matches!(&upgrade, stream::Upgrade::WebSocket(p) if p != portforward::TUNNEL) && ports.is_empty() {
        return Err(text(StatusCode::BAD_REQUEST, "query parameter \"port\" is required"));
    }
    let answer = stream::accept(&head, &upgrade);
    let on_upgrade = hyper::upgrade::on(Request::from_parts(head, ()));
    let target = portforward::Target { netns, pod: model::describe(&view.pod) };
    let shutdown = shared.shutdown.clone();
    tokio::spawn(async move {
        match on_upgrade.await {
            Ok(io) => tokio::select! {
                () = portforward::run(TokioIo::new(io), upgrade, target, ports) => {}
                () = shutdown.cancelled() => {}
            },
            Err(error) => tracing::debug!(%error, "connection not upgraded"),
        }
    });
    Ok(answer)
}

/// Runs a command and answers with its output.
async fn run(shared: &Arc<Shared>, parts: &[&str], request: &Request<Incoming>) -> Result<Answer, Answer> {
    if request.method() != Method::POST {
        return Err(text(StatusCode::METHOD_NOT_ALLOWED, "method not allowed"));
    }
    let (_, container) = target(shared, parts)?;
    let query = Query::parse(request.uri().query());
    let command: Vec<String> = query.get("cmd").unwrap_or("").split(' ').filter(|w| !w.is_empty()).map(str::to_owned).collect();
    if command.is_empty() {
        return Err(text(StatusCode::BAD_REQUEST, "you must specify a command (cmd)"));
    }
    let result = shared.runtime.exec_sync(&container.id, &command, RUN_TIMEOUT, RUN_LIMIT).await.map_err(|e| text(StatusCode::INTERNAL_SERVER_ERROR, e.to_string()))?;
    let mut output = String::from_utf8_lossy(&result.stdout).into_owned();
    output.push_str(&String::from_utf8_lossy(&result.stderr));
    if result.exit_code == 0 {
        Ok(text(StatusCode::OK, output))
    } else {
        Err(text(StatusCode::INTERNAL_SERVER_ERROR, format!("command '{}' exited with {}: {output}", command.join(" "), result.exit_code)))
    }
}
