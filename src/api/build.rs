//! Packs the facts (checked in as readable JSON) for the binary.

use std::io::Write as _;
use std::path::Path;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=facts");
    println!("cargo::rerun-if-changed=build.rs");
    let mut facts = serde_json::Map::new();
    for name in ["types", "resources", "selectors"] {
        let file = format!("facts/{name}.json");
        let text = fs::read(&file).unwrap_or_else(|error| panic!("{file}: {error}; run `cargo run -p windlass-facts`"));
        let value = serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{file}: {error}"));
        facts.insert(name.to_owned(), value);
    }
    let out = env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let target = fs::File::create(Path::new(&out).join("facts.bin")).expect("OUT_DIR is writable");
    let mut packed = flate2::write::DeflateEncoder::new(target, flate2::Compression::best());
    packed.write_all(&serde_json::to_vec(&facts).expect("JSON serializes")).expect("OUT_DIR is writable");
    packed.finish().expect("OUT_DIR is writable");
}
