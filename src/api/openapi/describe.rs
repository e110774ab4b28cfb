//! Descriptions of built-in types and fields: packed by the build, unpacked while a document is made.

use std::collections::HashMap;
use std::io::Read as _;

static PACKED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptions.bin"));

/// Texts by definition and field (`""`: of the definition itself).
pub(super) struct Descriptions(HashMap<String, HashMap<String, String>>);

impl Descriptions {
    pub(super) fn load() -> Self {
        let mut text = Vec::new();
        let read = flate2::read::DeflateDecoder::new(PACKED).read_to_end(&mut text);
        let parsed = read.ok().and_then(|_| serde_json::from_slice(&text).ok());
        // The build script packed it and a test unpacks it; without it documents would only lack prose.
        Descriptions(parsed.unwrap_or_default())
    }

    /// The text of a definition's field.
    pub(super) fn get(&self, definition: &str, field: &str) -> Option<&str> {
        Some(self.0.get(definition)?.get(field)?)
    }
}
