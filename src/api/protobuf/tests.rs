//! Tests against the encodings that upstream ships: `k8s.io/api/testdata/HEAD/*.{json,pb}` in the module cache.

use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use super::*;

/// The folder of upstream's golden files; downloads the module when it is missing.
fn golden() -> PathBuf {
    let go = |arguments: &[&str]| {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/upstream");
        let output = Command::new("go").args(arguments).current_dir(root).output().expect("Go is installed");
        assert!(output.status.success(), "go {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("a path")
    };
    let folder = PathBuf::from(go(&["env", "GOMODCACHE"]).trim()).join("k8s.io/api@v0.37.2/testdata/HEAD");
    if !folder.exists() {
        go(&["mod", "download", "k8s.io/api"]);
    }
    folder
}

fn is_stable(version: &str) -> bool {
    version.strip_prefix('v').is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Where two values first differ.
fn difference(path: &str, a: &Value, b: &Value) -> Option<String> {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            let keys: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            keys.into_iter().find_map(|key| {
                let (a, b) = (a.get(key).unwrap_or(&Value::Null), b.get(key).unwrap_or(&Value::Null));
                difference(&format!("{path}.{key}"), a, b)
            })
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            a.iter().zip(b).enumerate().find_map(|(index, (a, b))| difference(&format!("{path}[{index}]"), a, b))
        }
        (a, b) if a == b => None,
        (a, b) => Some(format!("{path}: ours {a}, upstream {b}")),
    }
}

#[test]
fn every_golden_object_both_ways() {
    let schemas = Schemas::builtin();
    let folder = golden();
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .expect("golden files")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".json"))
        .collect();
    names.sort();
    let (mut tested, mut problems) = (0, Vec::new());
    for name in names {
        let stem = name.trim_end_matches(".json");
        let parts: Vec<&str> = stem.rsplitn(3, '.').collect();
        let read = |extension: &str| std::fs::read(folder.join(format!("{stem}.{extension}"))).expect("a golden file");
        let object: Value = serde_json::from_slice(&read("json")).expect("JSON");
        let known = type_of(&schemas, meta::api_version(&object), meta::kind(&object)).is_some();
        // Options and admission reviews are no objects of the API; unstable versions are not served.
        if !known {
            let served = is_stable(parts[1]) && !parts[0].ends_with("Options") && !stem.contains("admission.k8s.io") && !stem.contains("imagepolicy");
            let internal = ["WatchEvent", "RangeAllocation", "SerializedReference", "PodStatusResult", "APIGroupDiscovery"];
            if served && !internal.iter().any(|kind| parts[0].starts_with(kind)) {
                problems.push(format!("{stem}: no type"));
            }
            continue;
        }
        tested += 1;
        let bytes = read("pb");
        match decode(&schemas, &bytes, None) {
            Ok(decoded) => problems.extend(difference(stem, &decoded, &object)),
            Err(error) => problems.push(format!("{stem}: {error}")),
        }
        match encode(&schemas, &object) {
            Ok(encoded) if encoded == bytes => {}
            Ok(encoded) => {
                let at = encoded.iter().zip(&bytes).position(|(a, b)| a != b).unwrap_or(encoded.len().min(bytes.len()));
                problems.push(format!("{stem}: encoding differs at byte {at} of {}/{}", encoded.len(), bytes.len()));
            }
            Err(error) => problems.push(format!("{stem}: {error}")),
        }
    }
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
    assert!(tested > 60, "only {tested} kinds were tested");
}

/// Kinds that the API's test data lacks and sparse objects; written by `tools/facts/golden/main.go`.
#[test]
fn sparse_objects_and_other_modules_both_ways() {
    let schemas = Schemas::builtin();
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("protobuf/golden");
    let mut problems = Vec::new();
    for entry in std::fs::read_dir(&folder).expect("golden files") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let stem = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let object: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
        let bytes = std::fs::read(path.with_extension("pb")).expect("a file");
        match decode(&schemas, &bytes, None) {
            Ok(decoded) => problems.extend(difference(&stem, &decoded, &object)),
            Err(error) => problems.push(format!("{stem}: {error}")),
        }
        match encode(&schemas, &object) {
            Ok(encoded) if encoded == bytes => {}
            Ok(encoded) => {
                let at = encoded.iter().zip(&bytes).position(|(a, b)| a != b).unwrap_or(encoded.len().min(bytes.len()));
                problems.push(format!("{stem}: encoding differs at byte {at} of {}/{}", encoded.len(), bytes.len()));
            }
            Err(error) => problems.push(format!("{stem}: {error}")),
        }
    }
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
}

#[test]
fn truncated_and_hostile_messages_are_errors() {
    let schemas = Schemas::builtin();
    let bytes = std::fs::read(golden().join("core.v1.Pod.pb")).expect("a golden file");
    for length in (0..bytes.len()).step_by(11) {
        // Truncated messages fail or, cut between two fields, are shorter; nothing panics.
        let _ = decode(&schemas, &bytes[..length], None);
    }
    for (index, flip) in (0..bytes.len()).step_by(7).zip([0xff, 0x80, 0x01, 0x7f].into_iter().cycle()) {
        let mut bad = bytes.clone();
        bad[index] ^= flip;
        let _ = decode(&schemas, &bad, None);
    }
    // A length beyond the message, a group, a tag of zero, an endless varint.
    for message in [&[0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f][..], &[0x0b], &[0x00], &[0xff; 11]] {
        assert!(decode(&schemas, &envelope("v1", "Pod", message), None).is_err(), "{message:?} was accepted");
    }
    assert_eq!(decode(&schemas, b"{}", None), Err(Error::Magic));
    let unknown = envelope("example.com/v1", "Thing", b"");
    assert!(matches!(decode(&schemas, &unknown, None), Err(Error::UnknownKind { .. })));
}

#[test]
fn deep_schemas_are_refused() {
    let schemas = Schemas::builtin();
    // JSONSchemaProps.not nests in itself: field 27.
    let mut message = Vec::new();
    for _ in 0..1000 {
        let mut outer = Vec::new();
        bytes_field(&mut outer, 27, &message);
        message = outer;
    }
    let ty = schemas.named("io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaProps").expect("a type");
    assert_eq!(decode_message(&schemas, ty, &message), Err(Error::Depth));
}

#[test]
fn lists_are_concatenations() {
    let schemas = Schemas::builtin();
    let item = |name: &str| json!({"metadata": {"name": name}, "data": {"k": "v"}});
    let ty = type_of(&schemas, "v1", "ConfigMap").expect("a type");
    let items: Vec<Vec<u8>> = ["a", "b"].iter().map(|name| encode_message(&schemas, ty, &item(name)).expect("it encodes")).collect();
    let metadata = ListMeta { resource_version: "7", continue_token: "", remaining: Some(3) };
    let joined = list("v1", "ConfigMapList", metadata, items.iter().map(Vec::as_slice));
    let whole = json!({"apiVersion": "v1", "kind": "ConfigMapList", "metadata": {"resourceVersion": "7", "remainingItemCount": 3},
        "items": [item("a"), item("b")]});
    assert_eq!(joined, encode(&schemas, &whole).expect("it encodes"));
    assert_eq!(decode(&schemas, &joined, None).expect("it decodes"), whole);
}

#[test]
fn watch_events_are_framed() {
    let schemas = Schemas::builtin();
    let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "a"}});
    let frame = watch_event("ADDED", &encode(&schemas, &object).expect("it encodes"));
    assert_eq!(u32::from_be_bytes([frame[0], frame[1], frame[2], frame[3]]) as usize, frame.len() - 4);
    let ty = type_of(&schemas, "v1", "WatchEvent").expect("a type");
    let event = decode_message(&schemas, ty, &frame[4..]).expect("it decodes");
    assert_eq!(event["type"], "ADDED");
    assert_eq!(event["object"]["metadata"]["name"], "a");
}
