//! What `/version` and `kubernetes_build_info` tell: upstream's `k8s.io/apimachinery/pkg/version.Info`.

use serde::Serialize;

/// The Kubernetes version whose API Windlass serves, with Windlass as build metadata (semantic versioning).
pub const GIT_VERSION: &str = "v1.37.2+windlass";
/// Its first part.
pub const MAJOR: &str = "1";
/// Its second part.
pub const MINOR: &str = "37";
/// Windlass' own version.
pub const WINDLASS_VERSION: &str = env!("CARGO_PKG_VERSION");

/// Upstream's version document, field for field. `goVersion` names the Rust release, for there is no Go here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Info {
    pub major: String,
    pub minor: String,
    pub emulation_major: String,
    pub emulation_minor: String,
    pub min_compatibility_major: String,
    pub min_compatibility_minor: String,
    pub git_version: String,
    pub git_commit: String,
    pub git_tree_state: String,
    pub build_date: String,
    pub go_version: String,
    pub compiler: String,
    pub platform: String,
}

/// This build's version. `WINDLASS_GIT_COMMIT` and `WINDLASS_BUILD_DATE` are taken from the build's environment; without
/// them the commit is empty and the date is the epoch, as in upstream's builds outside a repository.
pub fn info() -> Info {
    let commit = option_env!("WINDLASS_GIT_COMMIT").unwrap_or("");
    Info {
        major: MAJOR.into(),
        minor: MINOR.into(),
        emulation_major: MAJOR.into(),
        emulation_minor: MINOR.into(),
        min_compatibility_major: MAJOR.into(),
        min_compatibility_minor: "36".into(),
        git_version: GIT_VERSION.into(),
        git_commit: commit.into(),
        git_tree_state: if commit.is_empty() { "" } else { "clean" }.into(),
        build_date: option_env!("WINDLASS_BUILD_DATE").unwrap_or("1970-01-01T00:00:00Z").into(),
        go_version: concat!("rust", env!("CARGO_PKG_RUST_VERSION")).into(),
        compiler: "rustc".into(),
        platform: format!("{}/{}", std::env::consts::OS, arch()),
    }
}

/// The machine's architecture in Go's words, which is what node labels and image platforms use.
pub fn arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        other => other,
    }
}
