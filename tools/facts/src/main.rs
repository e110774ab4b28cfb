//! Generates `src/api/facts/*.json` from the documents that Kubernetes' Go modules ship.
//!
//! Facts only, no prose: names, types, protobuf numbers, list types, merge keys, defaults, validation rules
//! (`types.json`), the stable resources of discovery (`resources.json`) and field selectors
//! (`selectors.json`). `--check` changes nothing and fails when what is checked in has drifted.

mod discovery;
mod golang;
mod modules;
mod selectors;
mod types;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Parser;
use serde_json::Value;

/// Generates the facts about Kubernetes' API out of its Go modules.
#[derive(Parser)]
struct Arguments {
    /// Folder of the Go module cache that holds k8s.io/ (default: ask `go env GOMODCACHE`).
    #[arg(long)]
    modules: Option<PathBuf>,
    /// Where the facts are.
    #[arg(long, default_value = "src/api/facts")]
    out: PathBuf,
    /// Compare instead of writing.
    #[arg(long)]
    check: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let modules = modules::Modules::locate(arguments.modules)?;
    let mut drifted = Vec::new();
    for (name, value) in generate(&modules)? {
        let file = arguments.out.join(name);
        let text = pretty(&value);
        if arguments.check {
            if fs::read_to_string(&file).unwrap_or_default() != text {
                drifted.push(name);
            }
        } else {
            fs::write(&file, text).with_context(|| format!("writing {}", file.display()))?;
        }
    }
    if drifted.is_empty() {
        return Ok(());
    }
    bail!("{} no longer say what the Go modules say; run `cargo run -p windlass-facts` and look at the difference", drifted.join(", "))
}

/// All files of facts, by name.
fn generate(modules: &modules::Modules) -> Result<Vec<(&'static str, Value)>> {
    let resources = discovery::resources(modules)?;
    let types = types::types(modules, &resources)?;
    let selectors = selectors::selectors(modules)?;
    Ok(vec![("types.json", types), ("resources.json", discovery::to_json(&resources)), ("selectors.json", selectors)])
}

/// JSON that diffs well and does not sprawl: one line per innermost object.
fn pretty(value: &Value) -> String {
    fn write(value: &Value, indent: usize, depth: usize, out: &mut String) {
        let pad = " ".repeat(indent + 1);
        match value {
            Value::Object(map) if depth > 0 && !map.is_empty() => {
                out.push_str("{\n");
                for (index, (key, value)) in map.iter().enumerate() {
                    out.push_str(&pad);
                    out.push_str(&Value::from(key.as_str()).to_string());
                    out.push_str(": ");
                    write(value, indent + 1, if key == "fields" { 1 } else { depth - 1 }, out);
                    out.push_str(if index + 1 < map.len() { ",\n" } else { "\n" });
                }
                out.push_str(&" ".repeat(indent));
                out.push('}');
            }
            Value::Array(items) if depth > 0 && items.iter().any(Value::is_object) => {
                out.push_str("[\n");
                for (index, value) in items.iter().enumerate() {
                    out.push_str(&pad);
                    write(value, indent + 1, 0, out);
                    out.push_str(if index + 1 < items.len() { ",\n" } else { "\n" });
                }
                out.push_str(&" ".repeat(indent));
                out.push(']');
            }
            value => out.push_str(&value.to_string()),
        }
    }
    let mut out = String::new();
    write(value, 0, 2, &mut out);
    out.push('\n');
    out
}

#[cfg(test)]
mod tests;
