//! Docker's output streams turned into ours.

use std::pin::Pin;

use bollard::container::LogOutput;
use bollard::errors::Error as DockerError;
use bytes::Bytes;
use futures::{Stream, StreamExt};
use jiff::Timestamp;

use super::{Error, LogChunk, Logs, Output, OutputKind};

fn split(output: LogOutput) -> (OutputKind, Bytes) {
    match output {
        LogOutput::StdErr { message } => (OutputKind::Stderr, message),
        LogOutput::StdOut { message } | LogOutput::StdIn { message } | LogOutput::Console { message } => (OutputKind::Stdout, message),
    }
}

fn broken(e: DockerError) -> Error {
    Error::Refused { code: 500, message: format!("stream from Docker: {e}") }
}

pub(super) fn output(stream: Pin<Box<dyn Stream<Item = Result<LogOutput, DockerError>> + Send>>) -> Output {
    Box::pin(stream.map(|item| item.map(split).map_err(broken)))
}

/// Log chunks, without those before `since` (Docker's own filter knows whole seconds only).
pub(super) fn logs(stream: impl Stream<Item = Result<LogOutput, DockerError>> + Send + 'static, since: Option<Timestamp>) -> Logs {
    Box::pin(stream.filter_map(move |item| {
        let chunk = match item {
            Ok(output) => {
                let (kind, data) = split(output);
                let (time, data) = timestamp(data);
                let early = matches!((time, since), (Some(time), Some(since)) if time < since);
                (!early).then_some(Ok(LogChunk { kind, time, data }))
            }
            Err(e) => Some(Err(broken(e))),
        };
        async move { chunk }
    }))
}

/// Takes the RFC 3339 time off the front of a log line that Docker wrote with `timestamps=1`.
fn timestamp(mut data: Bytes) -> (Option<Timestamp>, Bytes) {
    let Some(space) = data.iter().take(40).position(|b| *b == b' ') else {
        return (None, data);
    };
    let time = std::str::from_utf8(&data[..space]).ok().and_then(|t| t.parse().ok());
    match time {
        Some(time) => {
            let _ = data.split_to(space + 1);
            (Some(time), data)
        }
        None => (None, data),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_are_taken_off() {
        let check = |line: &str, has_time: bool, rest: &str| {
            let (time, data) = timestamp(Bytes::copy_from_slice(line.as_bytes()));
            assert_eq!((time.is_some(), data.as_ref()), (has_time, rest.as_bytes()), "{line}");
        };
        check("2024-05-01T10:00:00.123456789Z hello world\n", true, "hello world\n");
        check("2024-05-01T10:00:00.000000000Z \n", true, "\n");
        check("no time here\n", false, "no time here\n");
        check("", false, "");
    }
}
