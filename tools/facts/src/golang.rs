//! Reads Go source as far as the API's types go: gofmt-ed structs with tags and markers, named types, constants.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use regex::Regex;

/// The types of one Go package.
#[derive(Default)]
pub struct Package {
    /// Import aliases of all its files.
    pub imports: BTreeMap<String, String>,
    pub types: BTreeMap<String, Named>,
    /// Values of string constants by their type.
    pub constants: BTreeMap<String, Vec<String>>,
}

/// A type declaration.
pub struct Named {
    pub markers: Vec<String>,
    pub definition: Definition,
}

pub enum Definition {
    Struct(Vec<Field>),
    Other(String),
}

/// A field of a struct.
#[derive(Clone)]
pub struct Field {
    /// Go's name; empty when the struct is embedded.
    pub name: String,
    pub ty: String,
    pub markers: Vec<String>,
    /// `json` tag: name and options.
    pub json: Option<(String, Vec<String>)>,
    /// Number in the `protobuf` tag.
    pub proto: u32,
    pub patch_strategy: Option<String>,
    pub patch_merge_key: Option<String>,
}

impl Package {
    /// Reads all sources of a folder but tests and generated ones.
    pub fn read(folder: &Path) -> Result<Self> {
        let mut package = Package::default();
        let mut files = Vec::new();
        for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
            files.push(entry?.path());
        }
        files.sort();
        for file in files {
            let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let skipped = name.ends_with("_test.go") || name.starts_with("zz_generated") || name.starts_with("generated.");
            if name.ends_with(".go") && !skipped {
                let text = fs::read_to_string(&file)?;
                package.source(&text).with_context(|| format!("reading {}", file.display()))?;
            }
        }
        Ok(package)
    }

    fn source(&mut self, text: &str) -> Result<()> {
        let import = Regex::new(r#"^\s*(?:import\s+)?(\w+)?\s*"([^"]+)"$"#)?;
        let constant = Regex::new(r#"^\s*(?:const\s+)?\w+\s+(\w+)\s*=\s*"([^"]*)"$"#)?;
        let cast = Regex::new(r#"^\s*(?:const\s+)?\w+\s*=\s*(\w+)\("([^"]*)"\)$"#)?;
        let declared = Regex::new(r"^type\s+(\w+)\s+(=\s*)?(.+?)\s*(?://.*)?$")?;
        let comment = Regex::new(r"(?s)/\*.*?\*/")?;
        let text = comment.replace_all(text, "");
        let mut markers = Vec::new();
        let mut lines = text.lines();
        let mut importing = false;
        while let Some(line) = lines.next() {
            let trimmed = line.trim();
            if let Some(comment) = trimmed.strip_prefix("//") {
                markers.extend(comment.trim().strip_prefix('+').map(str::to_owned));
                continue;
            }
            if trimmed.is_empty() {
                continue;
            }
            if trimmed.starts_with("import") {
                importing = trimmed.ends_with('(');
            }
            if let Some(found) = import.captures(line).filter(|_| importing || trimmed.starts_with("import")) {
                let path = found[2].to_owned();
                let alias = found.get(1).map_or_else(|| path.rsplit('/').next().unwrap_or("").to_owned(), |alias| alias.as_str().to_owned());
                self.imports.insert(alias, path);
            } else if importing && trimmed == ")" {
                importing = false;
            } else if let Some(found) = constant.captures(code(trimmed)).or_else(|| cast.captures(code(trimmed))) {
                if !markers.iter().any(|marker: &String| marker.contains("k8s:enumExclude")) {
                    self.constants.entry(found[1].to_owned()).or_default().push(found[2].to_owned());
                }
            } else if let Some(found) = declared.captures(line) {
                let definition = match &found[3] {
                    "struct {" => Definition::Struct(fields(&mut lines)?),
                    "struct{}" => Definition::Struct(Vec::new()),
                    other => Definition::Other(other.to_owned()),
                };
                self.types.insert(found[1].to_owned(), Named { markers: std::mem::take(&mut markers), definition });
            }
            markers.clear();
        }
        Ok(())
    }
}

/// A line without its trailing comment.
fn code(line: &str) -> &str {
    line.split(" //").next().unwrap_or(line).trim_end()
}

fn fields<'a>(lines: &mut impl Iterator<Item = &'a str>) -> Result<Vec<Field>> {
    let mut fields = Vec::new();
    let mut markers = Vec::new();
    for line in lines.by_ref() {
        let trimmed = line.trim();
        if trimmed == "}" {
            return Ok(fields);
        }
        if let Some(comment) = trimmed.strip_prefix("//") {
            markers.extend(comment.trim().strip_prefix('+').map(str::to_owned));
            continue;
        }
        if trimmed.is_empty() {
            // Markers of fields that were removed must not reach the next field.
            markers.clear();
            continue;
        }
        let (declaration, tags) = match trimmed.split_once('`') {
            Some((declaration, rest)) => (declaration, rest.split('`').next().unwrap_or("")),
            None => (trimmed.split("//").next().unwrap_or(""), ""),
        };
        let words: Vec<&str> = declaration.split_whitespace().collect();
        let (name, ty) = match words[..] {
            [ty] => ("", ty),
            [name, ty] => (name, ty),
            _ => bail!("cannot read the field {trimmed:?}"),
        };
        let json = tag(tags, "json").map(|text| {
            let mut parts = text.split(',').map(str::to_owned);
            (parts.next().unwrap_or_default(), parts.collect())
        });
        let proto = tag(tags, "protobuf").and_then(|text| text.split(',').nth(1)?.parse().ok()).unwrap_or(0);
        fields.push(Field {
            name: name.to_owned(),
            ty: ty.to_owned(),
            markers: std::mem::take(&mut markers),
            json,
            proto,
            patch_strategy: tag(tags, "patchStrategy"),
            patch_merge_key: tag(tags, "patchMergeKey"),
        });
    }
    bail!("a struct does not end")
}

/// The value of `key:"value"` in a struct tag.
fn tag(tags: &str, key: &str) -> Option<String> {
    let mut rest = tags;
    while let Some((name, tail)) = rest.split_once(":\"") {
        let (value, after) = tail.split_once('"')?;
        if name.trim() == key {
            return Some(value.to_owned());
        }
        rest = after;
    }
    None
}
