//! `/containerLogs/{namespace}/{pod}/{container}`.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use futures::StreamExt;
use http::{Response, StatusCode};
use http_body_util::StreamBody;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Frame;
use jiff::{SignedDuration, Timestamp};

use super::{Answer, Query, text};
use crate::pod::model;
use crate::runtime::{Container, Error, LogChunk, LogOptions, OutputKind, State};
use crate::shared::{Shared, View};

/// The query, checked.
#[derive(Clone, Debug, Default, PartialEq)]
struct Wanted {
    options: LogOptions,
    timestamps: bool,
    previous: bool,
    limit: Option<u64>,
}

impl PartialEq for LogOptions {
    fn eq(&self, other: &Self) -> bool {
        (self.follow, self.tail, self.since, self.stdout, self.stderr) == (other.follow, other.tail, other.since, other.stdout, other.stderr)
    }
}

/// Errors are messages for a 422, as upstream answers bad log options.
fn wanted(query: &Query, now: Timestamp) -> Result<Wanted, String> {
    let number = |name: &str, least: i64| match query.get(name).filter(|v| !v.is_empty()) {
        None => Ok(None),
        Some(text) => text.parse::<i64>().ok().filter(|n| *n >= least).map(Some).ok_or_else(|| format!("{name}: Invalid value: {text}: must be greater than or equal to {least}")),
    };
    let seconds = number("sinceSeconds", 1)?;
    let time = query.get("sinceTime").filter(|v| !v.is_empty()).map(|t| t.parse::<Timestamp>().map_err(|e| format!("sinceTime: Invalid value: {t}: {e}"))).transpose()?;
    if seconds.is_some() && time.is_some() {
        return Err("at most one of `sinceTime` or `sinceSeconds` may be specified".into());
    }
    let since = match seconds {
        Some(s) => now.checked_sub(SignedDuration::from_secs(s)).ok(),
        None => time,
    };
    let (stdout, stderr) = match query.get("stream") {
        None | Some("" | "All") => (true, true),
        Some("Stdout") => (true, false),
        Some("Stderr") => (false, true),
        Some(other) => return Err(format!("stream: Unsupported value: \"{other}\": supported values: \"All\", \"Stdout\", \"Stderr\"")),
    };
    let positive = |n: Option<i64>| n.and_then(|n| u64::try_from(n).ok());
    Ok(Wanted {
        options: LogOptions { follow: query.flag(&["follow"]), tail: positive(number("tailLines", 0)?), since, stdout, stderr },
        timestamps: query.flag(&["timestamps"]),
        previous: query.flag(&["previous"]),
        limit: positive(number("limitBytes", 1)?),
    })
}

/// The container whose log is meant.
///
/// # Errors
/// The words that upstream uses for it.
fn pick<'a>(view: &'a View, name: &str, previous: bool) -> Result<&'a Container, String> {
    let pod = model::name(&view.pod);
    if model::find(&view.pod, name).is_none() {
        return Err(format!("container {name} in pod {pod} not found"));
    }
    let mut found = view.containers.iter().filter(|c| c.name == name);
    if previous {
        let latest = found.next();
        let before = match latest {
            // Before its restart, the ended container itself is the previous one.
            Some(c) if c.state == State::Exited && waits(view, name) => latest,
            _ => found.find(|c| c.state == State::Exited),
        };
        return before.ok_or_else(|| format!("previous terminated container \"{name}\" in pod \"{pod}\" not found"));
    }
    // A container that was made but never started has no log; the one before it has.
    let started = found.clone().find(|c| c.state != State::Created);
    if let Some(container) = started {
        return Ok(container);
    }
    let statuses = view.status.container_statuses.iter().flatten().chain(view.status.init_container_statuses.iter().flatten());
    let reason = statuses.filter(|s| s.name == name).find_map(|s| s.state.as_ref()?.waiting.as_ref()?.reason.clone());
    Err(match reason.as_deref() {
        Some("ErrImagePull" | "ImagePullBackOff" | "ErrImageNeverPull" | "InvalidImageName" | "ImageInspectError") => {
            format!("container \"{name}\" in pod \"{pod}\" is waiting to start: {}", if reason.as_deref() == Some("ErrImagePull") { "image can't be pulled" } else { "trying and failing to pull image" })
        }
        Some(reason) => format!("container \"{name}\" in pod \"{pod}\" is waiting to start: {reason}"),
        None => format!("container \"{name}\" in pod \"{pod}\" is not available"),
    })
}

fn waits(view: &View, name: &str) -> bool {
    view.status.container_statuses.iter().flatten().any(|s| s.name == name && s.state.as_ref().is_some_and(|s| s.waiting.is_some()))
}

/// Adds time stamps to chunks: at the beginning of each line, not inside a long one that comes in pieces.
struct Lines {
    timestamps: bool,
    /// Per output, whether the next chunk begins a line.
    fresh: [bool; 2],
}

impl Lines {
    fn render(&mut self, chunk: &LogChunk) -> Bytes {
        let slot = usize::from(chunk.kind == OutputKind::Stderr);
        let fresh = std::mem::replace(&mut self.fresh[slot], chunk.data.ends_with(b"\n"));
        match chunk.time.filter(|_| self.timestamps && fresh) {
            None => chunk.data.clone(),
            Some(time) => {
                let mut out = BytesMut::with_capacity(chunk.data.len() + 36);
                out.put_slice(format!("{time:.9} ").as_bytes());
                out.put_slice(&chunk.data);
                out.freeze()
            }
        }
    }
}

pub async fn serve(shared: &Arc<Shared>, namespace: &str, pod: &str, container: &str, query: &Query) -> Answer {
    let wanted = match wanted(query, Timestamp::now()) {
        Ok(wanted) => wanted,
        Err(e) => return text(StatusCode::UNPROCESSABLE_ENTITY, e),
    };
    let Some(view) = shared.table.find(namespace, pod) else {
        return text(StatusCode::NOT_FOUND, format!("pod \"{pod}\" not found\n"));
    };
    let id = match pick(&view, container, wanted.previous) {
        Ok(found) => found.id.clone(),
        Err(e) => return text(if e.ends_with("not found") && !e.starts_with("previous") { StatusCode::NOT_FOUND } else { StatusCode::BAD_REQUEST }, e),
    };
    if wanted.options.tail == Some(0) && !wanted.options.follow {
        return text(StatusCode::OK, "");
    }
    let logs = match shared.runtime.logs(&id, &wanted.options).await {
        Ok(logs) => logs,
        Err(Error::NotFound { .. }) => return text(StatusCode::BAD_REQUEST, format!("unable to retrieve container logs for {}://{id}", shared.runtime.scheme())),
        Err(e) => return text(StatusCode::INTERNAL_SERVER_ERROR, e.to_string()),
    };
    let mut lines = Lines { timestamps: wanted.timestamps, fresh: [true, true] };
    let mut left = wanted.limit.unwrap_or(u64::MAX);
    let frames = logs.scan((), move |(), chunk| std::future::ready(match chunk {
        Ok(_) if left == 0 => None,
        Ok(chunk) => {
            let mut data = lines.render(&chunk);
            if (data.len() as u64) > left {
                data.truncate(usize::try_from(left).unwrap_or(usize::MAX));
            }
            left -= data.len() as u64;
            Some(Ok(Frame::data(data)))
        }
        Err(e) => Some(Err(std::io::Error::other(e.to_string()))),
    }));
    let mut answer = Response::new(UnsyncBoxBody::new(StreamBody::new(frames)));
    answer.headers_mut().insert(http::header::CONTENT_TYPE, http::HeaderValue::from_static("text/plain"));
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(query: &str, expected: Result<&str, &str>) {
        let now = Timestamp::from_second(1000).expect("time");
        let got = wanted(&Query::parse(Some(query)), now).map(|w| {
            let o = w.options;
            format!("follow={} tail={:?} since={:?} out={} err={} ts={} prev={} limit={:?}", o.follow, o.tail, o.since.map(|t| t.as_second()), o.stdout, o.stderr, w.timestamps, w.previous, w.limit)
        });
        match (got, expected) {
            (Ok(got), Ok(want)) => assert_eq!(got, want, "{query}"),
            (Err(e), Err(part)) => assert!(e.contains(part), "{e}"),
            (got, want) => panic!("{got:?} {want:?}"),
        }
    }

    #[test]
    fn options() {
        check("", Ok("follow=false tail=None since=None out=true err=true ts=false prev=false limit=None"));
        check("follow=true&tailLines=5&sinceSeconds=10&timestamps=true&limitBytes=9&previous=1&stream=Stderr", Ok("follow=true tail=Some(5) since=Some(990) out=false err=true ts=true prev=true limit=Some(9)"));
        check("sinceTime=1970-01-01T00:00:07Z", Ok("follow=false tail=None since=Some(7) out=true err=true ts=false prev=false limit=None"));
        check("tailLines=-1", Err("tailLines"));
        check("limitBytes=0", Err("limitBytes"));
        check("sinceSeconds=1&sinceTime=1970-01-01T00:00:07Z", Err("at most one"));
        check("stream=x", Err("stream"));
    }

    #[test]
    fn long_lines_get_one_time() {
        let mut lines = Lines { timestamps: true, fresh: [true, true] };
        let mut chunk = |text: &str| {
            let chunk = LogChunk { kind: OutputKind::Stdout, time: Timestamp::from_second(5).ok(), data: Bytes::copy_from_slice(text.as_bytes()) };
            String::from_utf8(lines.render(&chunk).to_vec()).expect("text")
        };
        assert_eq!(chunk("part"), "1970-01-01T00:00:05.000000000Z part");
        assert_eq!(chunk("rest\n"), "rest\n");
        assert_eq!(chunk("next\n"), "1970-01-01T00:00:05.000000000Z next\n");
    }
}
