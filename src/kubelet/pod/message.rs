//! Termination messages: from the file that the container wrote, or the end of its log.

use futures::StreamExt;

use crate::runtime::{Container, LogOptions, Runtime, label};

const MAX_FILE: usize = 4096;
const LOG_LINES: u64 = 80;
const MAX_LOG: usize = 2048;

/// The message that a container left when it ended; empty if none.
pub async fn read(runtime: &dyn Runtime, container: &Container) -> String {
    let path = container.label(label::TERMINATION_FILE);
    let text = if path.is_empty() { String::new() } else { tail_of_file(path).await };
    let fallback = container.label(label::TERMINATION_POLICY) == "FallbackToLogsOnError";
    if !text.is_empty() || !fallback || container.exit_code == 0 {
        return text;
    }
    tail_of_log(runtime, &container.id).await
}

async fn tail_of_file(path: &str) -> String {
    // The container could have put anything there: only a regular file's first bytes are taken.
    let Ok(meta) = tokio::fs::symlink_metadata(path).await else { return String::new() };
    if !meta.is_file() {
        return String::new();
    }
    let Ok(file) = tokio::fs::File::open(path).await else { return String::new() };
    let mut data = Vec::new();
    let mut limited = tokio::io::AsyncReadExt::take(file, MAX_FILE as u64);
    if tokio::io::AsyncReadExt::read_to_end(&mut limited, &mut data).await.is_err() {
        return String::new();
    }
    String::from_utf8_lossy(&data).into_owned()
}

async fn tail_of_log(runtime: &dyn Runtime, id: &str) -> String {
    let options = LogOptions { tail: Some(LOG_LINES), stdout: true, stderr: true, ..Default::default() };
    let Ok(mut logs) = runtime.logs(id, &options).await else { return String::new() };
    let mut data = Vec::new();
    while let Some(Ok(chunk)) = logs.next().await {
        data.extend_from_slice(&chunk.data);
        if data.len() > 4 * MAX_LOG {
            data.drain(..data.len() - MAX_LOG);
        }
    }
    let from = data.len().saturating_sub(MAX_LOG);
    String::from_utf8_lossy(&data[from..]).into_owned()
}
