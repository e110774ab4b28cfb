//! Structured logs on standard error, as text for people or JSON for collectors.

use std::io::IsTerminal;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tracing_subscriber::EnvFilter;

/// How a log line looks: upstream's `--logging-format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// One readable line per event.
    #[default]
    Text,
    /// One JSON object per event.
    Json,
}

impl FromStr for Format {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(format!("unknown log format `{other}`: use text or json")),
        }
    }
}

/// Why logging could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum LoggingError {
    #[error("bad log level `{level}`: {message}; use error, warn, info, debug, trace, or target=level pairs with commas")]
    Level { level: String, message: String },
    #[error("logging was set up before in this process")]
    Twice,
}

/// Starts logging for the process. `level` is `info`, `debug`, ... or `tracing` directives such as
/// `info,windlass_store=debug`; the environment variable `WINDLASS_LOG`, when set, is used instead.
pub fn init(format: Format, level: &str) -> Result<(), LoggingError> {
    let directives = std::env::var("WINDLASS_LOG").unwrap_or_else(|_| level.to_owned());
    // hickory-server tells every request at level info.
    let filter = EnvFilter::try_new(format!("hickory_server=warn,{directives}"))
        .map_err(|error| LoggingError::Level { level: directives.clone(), message: error.to_string() })?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let done = match format {
        Format::Text => builder.with_ansi(std::io::stderr().is_terminal()).try_init(),
        Format::Json => builder.json().flatten_event(true).with_current_span(false).try_init(),
    };
    done.map_err(|_| LoggingError::Twice)
}

/// The level that upstream's `-v N` stands for: 0 to 3 info, 4 to 6 debug, above that trace.
pub fn level_of_verbosity(v: u32) -> &'static str {
    match v {
        0..=3 => "info",
        4..=6 => "debug",
        _ => "trace",
    }
}
