//! The files of configMap, secret, downwardAPI and projected volumes, as data. No I/O.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ConfigMap, DownwardAPIVolumeFile, KeyToPath, Pod, Secret};

use super::atomic::{File, Payload, valid_path};
use crate::pod::{env, model};

/// Mode of a file: its item's, or the volume's, or upstream's 0644.
pub fn mode(item: Option<i32>, default: Option<i32>) -> u32 {
    u32::try_from(item.or(default).unwrap_or(0o644)).unwrap_or(0o644)
}

fn pick(
    what: &str,
    data: &BTreeMap<String, Vec<u8>>,
    items: Option<&[KeyToPath]>,
    default: Option<i32>,
    optional: bool,
) -> Result<Payload, String> {
    let file = |data: &[u8], item: Option<i32>| File { data: data.to_vec(), mode: mode(item, default), owner: None };
    let Some(items) = items.filter(|i| !i.is_empty()) else {
        return Ok(data.iter().map(|(key, value)| (key.clone(), file(value, None))).collect());
    };
    let mut payload = Payload::new();
    for item in items {
        match data.get(&item.key) {
            Some(value) => {
                payload.insert(item.path.clone(), file(value, item.mode));
            }
            None if optional => {}
            None => return Err(format!("{what} references non-existent {what_key}: {}", item.key, what_key = if what == "configmap" { "config key" } else { "secret key" })),
        }
    }
    Ok(payload)
}

/// `None` stands for an object that does not exist.
pub fn config_map(object: Option<&ConfigMap>, name: &str, items: Option<&[KeyToPath]>, default: Option<i32>, optional: bool) -> Result<Payload, String> {
    let Some(object) = object else {
        return if optional { Ok(Payload::new()) } else { Err(format!("configmap \"{name}\" not found")) };
    };
    let mut data: BTreeMap<String, Vec<u8>> = object.data.iter().flatten().map(|(k, v)| (k.clone(), v.clone().into_bytes())).collect();
    data.extend(object.binary_data.iter().flatten().map(|(k, v)| (k.clone(), v.0.clone())));
    pick("configmap", &data, items, default, optional)
}

pub fn secret(object: Option<&Secret>, name: &str, items: Option<&[KeyToPath]>, default: Option<i32>, optional: bool) -> Result<Payload, String> {
    let Some(object) = object else {
        return if optional { Ok(Payload::new()) } else { Err(format!("secret \"{name}\" not found")) };
    };
    let data: BTreeMap<String, Vec<u8>> = object.data.iter().flatten().map(|(k, v)| (k.clone(), v.0.clone())).collect();
    pick("secret", &data, items, default, optional)
}

pub fn downward(pod: &Pod, files: &[DownwardAPIVolumeFile], default: Option<i32>, runtime: &env::Runtime) -> Result<Payload, String> {
    let mut payload = Payload::new();
    let mut errors = Vec::new();
    for item in files {
        let value = if let Some(selector) = &item.field_ref {
            env::field(pod, selector, runtime)
        } else if let Some(selector) = &item.resource_field_ref {
            let name = selector.container_name.as_deref().unwrap_or("");
            match model::find(pod, name) {
                Some((_, container)) => env::resource(pod, &container, selector, runtime),
                None => Err(format!("container {name} not found")),
            }
        } else {
            Err("neither fieldRef nor resourceFieldRef is set".to_owned())
        };
        match value {
            Ok(value) => {
                payload.insert(item.path.clone(), File { data: value.into_bytes(), mode: mode(item.mode, default), owner: None });
            }
            Err(e) => errors.push(e),
        }
    }
    if errors.is_empty() { Ok(payload) } else { Err(errors.join(", ")) }
}

/// A token's file may be read by its pod's user alone: by group when the pod has an fsGroup, by owner when all
/// containers run as one user, by all otherwise.
pub fn token_file(pod: &Pod, token: String, default: Option<i32>) -> File {
    let context = model::spec(pod).security_context.as_ref();
    let data = token.into_bytes();
    if context.is_some_and(|c| c.fs_group.is_some()) {
        return File { data, mode: 0o600, owner: None };
    }
    match common_user(pod) {
        Some(uid) => File { data, mode: 0o600, owner: Some(uid) },
        None => File { data, mode: mode(None, default), owner: None },
    }
}

fn common_user(pod: &Pod) -> Option<u32> {
    let pod_user = model::spec(pod).security_context.as_ref().and_then(|c| c.run_as_user);
    let mut users = model::all(pod).into_iter().map(|(_, c)| c.security_context.and_then(|s| s.run_as_user).or(pod_user));
    let first = users.next()??;
    users.all(|u| u == Some(first)).then(|| u32::try_from(first).ok()).flatten()
}

/// Every path of a payload must stay in the volume.
pub fn check(payload: &Payload) -> Result<(), String> {
    match payload.keys().find(|p| !valid_path(p)) {
        Some(bad) => Err(format!("invalid path in volume: {bad:?}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::model::tests::pod;
    use serde_json::{Value, json};

    fn show(payload: Result<Payload, String>) -> String {
        match payload {
            Ok(p) => p.iter().map(|(k, f)| format!("{k}={}:{:o}", String::from_utf8_lossy(&f.data), f.mode)).collect::<Vec<_>>().join(" "),
            Err(e) => format!("error: {e}"),
        }
    }

    fn check_map(items: Value, optional: bool, exists: bool, expected: &str) {
        let map: ConfigMap = serde_json::from_value(json!({"data": {"a": "1"}, "binaryData": {"b": "Mg=="}})).expect("map");
        let items: Vec<KeyToPath> = serde_json::from_value(items).expect("items");
        assert_eq!(show(config_map(exists.then_some(&map), "cm", Some(&items), Some(0o400), optional)), expected);
    }

    #[test]
    fn config_maps() {
        check_map(json!([]), false, true, "a=1:400 b=2:400");
        check_map(json!([{"key": "a", "path": "x/y", "mode": 0o777}]), false, true, "x/y=1:777");
        check_map(json!([{"key": "z", "path": "z"}]), true, true, "");
        check_map(json!([{"key": "z", "path": "z"}]), false, true, "error: configmap references non-existent config key: z");
        check_map(json!([]), false, false, "error: configmap \"cm\" not found");
        check_map(json!([]), true, false, "");
    }

    #[test]
    fn downward_files() {
        let pod = pod(json!({"containers": [{"name": "c", "resources": {"limits": {"cpu": "1500m"}}}]}));
        let files: Vec<DownwardAPIVolumeFile> = serde_json::from_value(json!([
            {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}},
            {"path": "cpu", "mode": 0o600, "resourceFieldRef": {"containerName": "c", "resource": "limits.cpu", "divisor": "1m"}}])).expect("files");
        assert_eq!(show(downward(&pod, &files, None, &env::Runtime::default())), "cpu=1500:600 name=p:644");
    }

    #[test]
    fn token_modes() {
        let check = |spec: Value, mode: u32, owner: Option<u32>| {
            let file = token_file(&pod(spec.clone()), "t".into(), None);
            assert_eq!((file.mode, file.owner), (mode, owner), "{spec}");
        };
        check(json!({"containers": [{"name": "a"}]}), 0o644, None);
        check(json!({"containers": [{"name": "a"}], "securityContext": {"fsGroup": 5}}), 0o600, None);
        check(json!({"containers": [{"name": "a"}, {"name": "b"}], "securityContext": {"runAsUser": 7}}), 0o600, Some(7));
        check(json!({"containers": [{"name": "a"}, {"name": "b", "securityContext": {"runAsUser": 8}}], "securityContext": {"runAsUser": 7}}), 0o644, None);
    }
}
