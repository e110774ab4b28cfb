use serde_json::{Value,json};use windlass_api::registry::Registry;
pub fn v2(_:&Registry)->Value{json!({})} pub fn v3_index(_:&Registry)->Value{json!({})} pub fn v3(_:&Registry,_:&str)->Option<Value>{None}
