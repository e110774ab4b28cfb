//! Role configuration: a file in YAML or JSON, then the flags that were given, which win.
//!
//! A role's `Config` derives `Serialize`, `Deserialize` (`default`, `deny_unknown_fields`, `camelCase`) and `clap::Args`.
//! Defaults live in its `Default`, never in clap: a default of clap would win over the file. [`augment`] strips the ones
//! that slipped in, and gives booleans upstream's `--flag`, `--flag=true` and `--flag=false`.

use std::path::{Path, PathBuf};

use clap::{ArgAction, ArgMatches, Command, parser::ValueSource};
use serde::{Serialize, de::DeserializeOwned};

/// The largest configuration file that is read, in bytes.
const MAX_FILE: u64 = 4 << 20;

/// Why a configuration was refused. Every message names the file and the line, where there is one.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{}: cannot read the configuration file: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}: larger than {MAX_FILE} bytes, so hardly a configuration file", path.display())]
    TooLarge { path: PathBuf },
    #[error("{}:{line}: unknown field `{field}`; {}", path.display(), hint(nearest, known))]
    UnknownField { path: PathBuf, line: u64, field: String, nearest: Option<String>, known: Vec<String> },
    #[error("{}:{line}:{column}: {message}", path.display())]
    Parse { path: PathBuf, line: u64, column: u64, message: String },
    #[error("{0}")]
    Flags(#[from] clap::Error),
}

fn hint(nearest: &Option<String>, known: &[String]) -> String {
    match nearest {
        Some(name) => format!("did you mean `{name}`?"),
        None if known.is_empty() => "no fields are known here".to_owned(),
        None => format!("known here: {}", known.join(", ")),
    }
}

/// Adds a flag per field of `C` to `command`, ready for [`load`]: without defaults and without required flags, since the
/// file may give them, and with booleans that take an optional `=true` or `=false`, as upstream's do.
pub fn augment<C: clap::Args>(command: Command) -> Command {
    let before: Vec<String> = command.get_arguments().map(|a| a.get_id().to_string()).collect();
    C::augment_args_for_update(command).mut_args(|arg| {
        if before.iter().any(|id| arg.get_id() == id.as_str()) {
            return arg;
        }
        let arg = arg.required(false).default_value(None);
        match arg.get_action() {
            ArgAction::SetTrue | ArgAction::SetFalse => {
                let missing = if matches!(arg.get_action(), ArgAction::SetTrue) { "true" } else { "false" };
                arg.action(ArgAction::Set)
                    .num_args(0..=1)
                    .require_equals(true)
                    .default_missing_value(missing)
                    .value_parser(clap::value_parser!(bool))
                    .value_name("true|false")
            }
            _ => arg,
        }
    })
}

/// Reads `file` (or starts from `C::default()`), then applies the flags that stand on the command line or in the
/// environment. `matches` come from a command built with [`augment`].
pub fn load<C>(file: Option<&Path>, matches: &ArgMatches) -> Result<C, ConfigError>
where
    C: Default + Serialize + DeserializeOwned + clap::Args,
{
    let mut config = match file {
        Some(path) => check(path)?,
        None => C::default(),
    };
    let mut given = matches.clone();
    let defaults: Vec<String> = given
        .ids()
        .map(|id| id.as_str().to_owned())
        .filter(|id| given.value_source(id) == Some(ValueSource::DefaultValue))
        .collect();
    for id in defaults {
        // An id that came from `ids()` is known to the matches; groups are the exception and hold no value.
        let _ = given.try_clear_id(&id);
    }
    config.update_from_arg_matches_mut(&mut given)?;
    Ok(config)
}

/// Reads and checks a file without starting anything: `windlass config check`.
pub fn check<C>(file: &Path) -> Result<C, ConfigError>
where
    C: Default + DeserializeOwned,
{
    let read = |source| ConfigError::Read { path: file.to_owned(), source };
    let size = std::fs::metadata(file).map_err(read)?.len();
    if size > MAX_FILE {
        return Err(ConfigError::TooLarge { path: file.to_owned() });
    }
    parse(file, &std::fs::read_to_string(file).map_err(read)?)
}

/// [`check`] on text that was already read; `path` is only named in errors.
pub fn parse<C>(path: &Path, text: &str) -> Result<C, ConfigError>
where
    C: Default + DeserializeOwned,
{
    let blank = |line: &str| {
        let line = line.trim();
        line.is_empty() || line.starts_with('#') || line == "---"
    };
    if text.lines().all(blank) {
        return Ok(C::default());
    }
    serde_saphyr::from_str::<C>(text).map_err(|error| explain(path, text, &error))
}

fn explain(path: &Path, text: &str, error: &serde_saphyr::Error) -> ConfigError {
    use serde_saphyr::Error as Yaml;
    let error = error.without_snippet();
    let (line, column) = error.location().map_or((1, 1), |l| (l.line(), l.column()));
    match error {
        Yaml::SerdeUnknownField { field, expected, .. } => ConfigError::UnknownField {
            path: path.to_owned(),
            line: key_line(text, field, line),
            field: field.clone(),
            nearest: nearest(field, expected.iter().copied()),
            known: expected.iter().map(|s| (*s).to_owned()).collect(),
        },
        Yaml::SerdeUnknownVariant { variant, expected, .. } => ConfigError::Parse {
            path: path.to_owned(),
            line,
            column,
            message: format!(
                "unknown value `{variant}`; {}",
                match nearest(variant, expected.iter().copied()) {
                    Some(name) => format!("did you mean `{name}`?"),
                    None => format!("one of: {}", expected.join(", ")),
                }
            ),
        },
        other => ConfigError::Parse { path: path.to_owned(), line, column, message: first_line(&other.to_string()) },
    }
}

/// The parser may report a position a token after the key: the key's own line is at or above it.
fn key_line(text: &str, key: &str, reported: u64) -> u64 {
    let reported_index = usize::try_from(reported).unwrap_or(usize::MAX);
    let lines: Vec<&str> = text.lines().take(reported_index).collect();
    lines
        .iter()
        .rposition(|line| line.contains(key))
        .and_then(|index| u64::try_from(index + 1).ok())
        .unwrap_or(reported)
}

fn first_line(message: &str) -> String {
    message.lines().next().unwrap_or_default().to_owned()
}

/// The known name most like `name`, if any is like it at all.
fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<String> {
    let lower = name.to_lowercase();
    known
        .map(|candidate| (strsim::jaro_winkler(&lower, &candidate.to_lowercase()), candidate))
        .filter(|(score, _)| *score >= 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate.to_owned())
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
    #[serde(default, deny_unknown_fields, rename_all = "camelCase")]
    struct Sample {
        #[arg(long)]
        cluster_dns: String,
        #[arg(long)]
        max_pods: u32,
        #[arg(long)]
        fail_swap_on: bool,
        #[arg(long, default_value = "from-clap")]
        slipped: String,
        #[command(flatten)]
        leader_election: Election,
    }

    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, clap::Args)]
    #[serde(default, deny_unknown_fields, rename_all = "camelCase")]
    struct Election {
        #[arg(long = "leader-elect-lease-duration")]
        lease_duration: u32,
    }

    impl Default for Sample {
        fn default() -> Self {
            Self {
                cluster_dns: "10.96.0.10".into(),
                max_pods: 110,
                fail_swap_on: true,
                slipped: "from-default".into(),
                leader_election: Election::default(),
            }
        }
    }

    impl Default for Election {
        fn default() -> Self {
            Self { lease_duration: 15 }
        }
    }

    /// What `text` and `flags` load to, as one line; an error as its message.
    fn check(text: &str, flags: &[&str]) -> String {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let file = dir.path().join("sample.yaml");
        std::fs::write(&file, text).expect("write the sample");
        let matches = augment::<Sample>(Command::new("t").no_binary_name(true)).try_get_matches_from(flags);
        match matches.map_err(ConfigError::from).and_then(|m| load::<Sample>(Some(&file), &m)) {
            Ok(c) => format!(
                "{} {} {} {} {}",
                c.cluster_dns, c.max_pods, c.fail_swap_on, c.slipped, c.leader_election.lease_duration
            ),
            Err(error) => error.to_string().replace(&file.display().to_string(), "F"),
        }
    }

    #[test]
    fn file_then_flags() {
        for (text, flags, want) in [
            ("", &[][..], "10.96.0.10 110 true from-default 15"),
            ("# only a comment\n---\n", &[], "10.96.0.10 110 true from-default 15"),
            ("maxPods: 5\nslipped: file\n", &[], "10.96.0.10 5 true file 15"),
            ("maxPods: 5", &["--max-pods", "7"], "10.96.0.10 7 true from-default 15"),
            ("failSwapOn: false", &[], "10.96.0.10 110 false from-default 15"),
            ("failSwapOn: false", &["--fail-swap-on"], "10.96.0.10 110 true from-default 15"),
            ("", &["--fail-swap-on=false"], "10.96.0.10 110 false from-default 15"),
            ("leaderElection:\n  leaseDuration: 3\n", &[], "10.96.0.10 110 true from-default 3"),
            ("", &["--leader-elect-lease-duration=9"], "10.96.0.10 110 true from-default 9"),
            ("{\n\t\"maxPods\": 5,\n\t\"leaderElection\": {\"leaseDuration\": 4}\n}\n", &[], "10.96.0.10 5 true from-default 4"),
        ] {
            assert_eq!(check(text, flags), want, "{text:?} {flags:?}");
        }
    }

    #[test]
    fn refusals_name_line_and_nearest() {
        for (text, want) in [
            ("maxPods: 5\nclusterDSN: x\n", "F:2: unknown field `clusterDSN`; did you mean `clusterDns`?"),
            (
                "maxPods: 5\nleaderElection:\n  leaseDuratoin: 3\n",
                "F:3: unknown field `leaseDuratoin`; did you mean `leaseDuration`?",
            ),
            (
                "{\n  \"maxPods\": 5,\n  \"maxPds\": 6\n}",
                "F:3: unknown field `maxPds`; did you mean `maxPods`?",
            ),
            (
                "zzz: 1\n",
                "F:1: unknown field `zzz`; known here: clusterDns, maxPods, failSwapOn, slipped, leaderElection",
            ),
        ] {
            assert_eq!(check(text, &[]), want, "{text:?}");
        }
        for text in ["maxPods: many\n", "maxPods: 5\nmaxPods: 6\n", "maxPods: [\n", "- 1\n"] {
            let message = check(text, &[]);
            assert!(message.starts_with("F:"), "{text:?}: {message}");
        }
    }
}
