//! Finds the Go modules.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// Releases of the modules that the facts describe.
const KUBERNETES: &str = "v1.37.2";
const STAGING: &str = "v0.37.2";
/// Modules that are read besides `k8s.io/kubernetes`.
const NAMES: [&str; 5] = ["api", "apimachinery", "apiextensions-apiserver", "kube-aggregator", "metrics"];

/// The Go module cache with all that is read.
pub struct Modules {
    k8s: PathBuf,
}

impl Modules {
    /// Takes the cache given, else Go's own; downloads what is missing.
    pub fn locate(given: Option<PathBuf>) -> Result<Self> {
        let cache = match given {
            Some(cache) => cache,
            None => PathBuf::from(go(&["env", "GOMODCACHE"], Path::new("."))?.trim()),
        };
        let modules = Modules { k8s: cache.join("k8s.io") };
        let missing: Vec<String> = NAMES
            .iter()
            .map(|name| (*name, STAGING))
            .chain([("kubernetes", KUBERNETES)])
            .filter(|(name, version)| !modules.k8s.join(format!("{name}@{version}")).exists())
            .map(|(name, version)| format!("k8s.io/{name}@{version}"))
            .collect();
        if !missing.is_empty() {
            let mut arguments = vec!["mod", "download"];
            arguments.extend(missing.iter().map(String::as_str));
            go(&arguments, Path::new("tests/upstream")).with_context(|| format!("the Go modules {} are missing", missing.join(", ")))?;
        }
        Ok(modules)
    }

    /// A file or folder of a module.
    pub fn path(&self, module: &str, path: &str) -> PathBuf {
        let version = if module == "kubernetes" { KUBERNETES } else { STAGING };
        self.k8s.join(format!("{module}@{version}")).join(path)
    }

    /// A JSON document of a module.
    pub fn json(&self, module: &str, path: &str) -> Result<Value> {
        let file = self.path(module, path);
        let text = fs::read(&file).with_context(|| format!("reading {}", file.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("parsing {}", file.display()))
    }

    /// Names of a folder's entries, sorted.
    pub fn entries(&self, module: &str, path: &str) -> Result<Vec<String>> {
        let folder = self.path(module, path);
        let mut names = Vec::new();
        for entry in fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }
}

fn go(arguments: &[&str], folder: &Path) -> Result<String> {
    let output = Command::new("go").args(arguments).current_dir(folder).output().context("running go")?;
    if !output.status.success() {
        bail!("go {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8(output.stdout)?)
}
