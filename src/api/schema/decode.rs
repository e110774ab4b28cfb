//! Decoding JSON without losing sight of duplicate fields, depth and bad text.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::Path;

/// At most this many duplicate (or unknown) fields are reported, as upstream.
pub(crate) const MAX_REPORTS: usize = 100;

/// A decoded document.
#[derive(Debug, Default)]
pub struct Decoded {
    /// The value; of duplicate fields the last one counts.
    pub value: Value,
    /// Paths of fields that occurred more than once, `spec.containers[0].name`.
    pub duplicates: Vec<String>,
}

/// A text that is no JSON document.
#[derive(Debug, thiserror::Error)]
#[error("couldn't get version/kind; json parse error: {0}")]
pub struct DecodeError(#[from] serde_json::Error);

/// Decodes one JSON document: valid UTF-8, nothing after it, nested no deeper than 128 levels (a stack's bound).
pub fn decode_json(bytes: &[u8]) -> Result<Decoded, DecodeError> {
    let mut duplicates = Vec::new();
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = Node { path: &Path::Root, duplicates: &mut duplicates }.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(Decoded { value, duplicates })
}

struct Node<'p, 'd> {
    path: &'p Path<'p>,
    duplicates: &'d mut Vec<String>,
}

impl<'de> DeserializeSeed<'de> for Node<'_, '_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Node<'_, '_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        loop {
            let path = Path::Index(self.path, items.len());
            match access.next_element_seed(Node { path: &path, duplicates: self.duplicates })? {
                Some(item) => items.push(item),
                None => return Ok(Value::Array(items)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            let path = Path::Field(self.path, &key);
            let value = access.next_value_seed(Node { path: &path, duplicates: self.duplicates })?;
            if map.contains_key(&key) && self.duplicates.len() < MAX_REPORTS {
                self.duplicates.push(path.to_string());
            }
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}
