//! Writes every document of the built-in API below a folder, as its path: for looking at, and for diffs.
//!
//! `cargo run -p windlass-api --example dump -- FOLDER`

use std::path::Path;
use std::{env, fs, io};

use serde_json::Value;
use windlass_api::registry::Registry;
use windlass_api::{discovery, openapi};

fn write(folder: &Path, path: &str, document: &Value) -> io::Result<()> {
    let file = folder.join(path).join("index.json");
    if let Some(parent) = file.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(file, document.to_string())
}

fn main() -> io::Result<()> {
    let folder = env::args().nth(1).ok_or_else(|| io::Error::other("usage: dump FOLDER"))?;
    let folder = Path::new(&folder);
    let registry = Registry::builtin();
    write(folder, "api", &discovery::api_versions("127.0.0.1"))?;
    write(folder, "apis", &discovery::api_group_list(&registry))?;
    let document = openapi::v2(&registry);
    write(folder, "openapi/v2", &document)?;
    fs::write(folder.join("openapi/v2/document.pb"), openapi::gnostic::encode(&document))?;
    let index = openapi::v3_index(&registry);
    write(folder, "openapi/v3", &index)?;
    for path in index["paths"].as_object().into_iter().flatten().map(|(path, _)| path) {
        if let Some(document) = openapi::v3(&registry, path) {
            write(folder, &format!("openapi/v3/{path}"), &document)?;
        }
        let mut segments = path.split('/').skip(1);
        let (first, second) = (segments.next().unwrap_or_default(), segments.next());
        let (group, version) = second.map_or(("", first), |version| (first, version));
        if let Some(document) = discovery::api_resource_list(&registry, group, version) {
            write(folder, path, &document)?;
        }
    }
    Ok(())
}
