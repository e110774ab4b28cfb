//! Environment variables: `$(VAR)` expansion, service variables, field references. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ConfigMap, Container, EnvVar, ObjectFieldSelector, Pod, ResourceFieldSelector, Secret};

use super::model;

/// Expands `$(NAME)` references; an unknown name stays as written, `$$(NAME)` is an escaped reference.
pub fn expand(text: &str, lookup: &dyn Fn(&str) -> Option<String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        match after.chars().next() {
            Some('$') => {
                out.push('$');
                rest = &after[1..];
            }
            Some('(') => match after.find(')') {
                Some(end) => {
                    let name = &after[1..end];
                    match lookup(name) {
                        Some(value) => out.push_str(&value),
                        None => {
                            out.push_str("$(");
                            out.push_str(name);
                            out.push(')');
                        }
                    }
                    rest = &after[end + 1..];
                }
                None => {
                    out.push_str("$(");
                    rest = &after[1..];
                }
            },
            Some(other) => {
                out.push('$');
                out.push(other);
                rest = &after[other.len_utf8()..];
            }
            None => {
                out.push('$');
                rest = "";
            }
        }
    }
    out.push_str(rest);
    out
}

/// What a service contributes to the environment.
#[derive(Clone, Debug)]
pub struct ServiceFacts {
    pub name: String,
    pub cluster_ip: String,
    /// Name (may be empty), port, protocol.
    pub ports: Vec<(String, i32, String)>,
}

/// The variables `NAME_SERVICE_HOST`, `NAME_SERVICE_PORT`, `NAME_PORT...` of these services.
pub fn service_variables(services: &[ServiceFacts]) -> BTreeMap<String, String> {
    let mut vars = BTreeMap::new();
    let upper = |text: &str| text.to_uppercase().replace('-', "_");
    for service in services.iter().filter(|s| !s.ports.is_empty()) {
        let prefix = upper(&service.name);
        let bracketed = if service.cluster_ip.contains(':') { format!("[{}]", service.cluster_ip) } else { service.cluster_ip.clone() };
        vars.insert(format!("{prefix}_SERVICE_HOST"), service.cluster_ip.clone());
        vars.insert(format!("{prefix}_SERVICE_PORT"), service.ports[0].1.to_string());
        for (name, port, _) in service.ports.iter().filter(|(name, ..)| !name.is_empty()) {
            vars.insert(format!("{prefix}_SERVICE_PORT_{}", upper(name)), port.to_string());
        }
        for (index, (_, port, protocol)) in service.ports.iter().enumerate() {
            let lower = if protocol.is_empty() { "tcp".to_owned() } else { protocol.to_lowercase() };
            let url = format!("{lower}://{bracketed}:{port}");
            if index == 0 {
                vars.insert(format!("{prefix}_PORT"), url.clone());
            }
            let base = format!("{prefix}_PORT_{port}_{}", lower.to_uppercase());
            vars.insert(format!("{base}_PROTO"), lower);
            vars.insert(format!("{base}_PORT"), port.to_string());
            vars.insert(format!("{base}_ADDR"), service.cluster_ip.clone());
            vars.insert(base, url);
        }
    }
    vars
}

/// What field references need beside the pod itself.
#[derive(Clone, Debug, Default)]
pub struct Runtime {
    pub node_name: String,
    pub host_ips: Vec<String>,
    pub pod_ips: Vec<String>,
    /// The node's allocatable: the default of limits. Milli-CPU, bytes, bytes.
    pub allocatable: (i64, i64, i64),
}

/// The value of a `fieldRef`.
///
/// # Errors
/// When the path is not one that the downward API knows.
pub fn field(pod: &Pod, selector: &ObjectFieldSelector, runtime: &Runtime) -> Result<String, String> {
    let meta = &pod.metadata;
    let path = selector.field_path.as_str();
    if let Some((base, key)) = path.strip_suffix("']").and_then(|p| p.split_once("['")) {
        let map = match base {
            "metadata.labels" => meta.labels.as_ref(),
            "metadata.annotations" => meta.annotations.as_ref(),
            _ => return Err(format!("fieldPath \"{path}\" does not support subscript")),
        };
        return Ok(map.and_then(|m| m.get(key)).cloned().unwrap_or_default());
    }
    Ok(match path {
        "metadata.name" => model::name(pod).to_owned(),
        "metadata.namespace" => model::namespace(pod).to_owned(),
        "metadata.uid" => model::uid(pod).to_owned(),
        "metadata.labels" => format_map(meta.labels.as_ref()),
        "metadata.annotations" => format_map(meta.annotations.as_ref()),
        "spec.nodeName" => model::spec(pod).node_name.clone().unwrap_or_else(|| runtime.node_name.clone()),
        "spec.serviceAccountName" => model::spec(pod).service_account_name.clone().unwrap_or_default(),
        "status.hostIP" => runtime.host_ips.first().cloned().unwrap_or_default(),
        "status.hostIPs" => runtime.host_ips.join(","),
        "status.podIP" => runtime.pod_ips.first().cloned().unwrap_or_default(),
        "status.podIPs" => runtime.pod_ips.join(","),
        _ => return Err(format!("unsupported fieldPath: {path}")),
    })
}

/// `key="escaped value"` lines, sorted, as the downward API writes maps.
pub fn format_map(map: Option<&BTreeMap<String, String>>) -> String {
    let lines = map.into_iter().flatten().map(|(k, v)| format!("{k}={}", go_quote(v)));
    lines.collect::<Vec<_>>().join("\n")
}

/// A string as Go's `%q` prints it.
pub fn go_quote(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{7}' => out.push_str("\\a"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\u{b}' => out.push_str("\\v"),
            c if (c as u32) < 0x20 || c as u32 == 0x7f => out.push_str(&format!("\\x{:02x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// The value of a `resourceFieldRef`.
///
/// # Errors
/// When the container, resource or divisor is not one that the downward API knows.
pub fn resource(pod: &Pod, container: &Container, selector: &ResourceFieldSelector, runtime: &Runtime) -> Result<String, String> {
    let container = match selector.container_name.as_deref().filter(|n| !n.is_empty()) {
        Some(name) => model::find(pod, name).map(|(_, c)| c).ok_or_else(|| format!("container {name} not found"))?,
        None => container.clone(),
    };
    let path = selector.resource.as_str();
    let (which, name) = path.split_once('.').ok_or_else(|| format!("unsupported container resource : {path}"))?;
    let known = matches!(name, "cpu" | "memory" | "ephemeral-storage") || name.starts_with("hugepages-");
    if !known {
        return Err(format!("unsupported container resource : {path}"));
    }
    let found = match which {
        "limits" => model::limit(&container, name),
        "requests" => container.resources.as_ref().and_then(|r| model::quantity(r.requests.as_ref(), name)),
        _ => return Err(format!("unsupported container resource : {path}")),
    };
    let default = match (which, name) {
        ("limits", "cpu") => runtime.allocatable.0,
        ("limits", "memory") => runtime.allocatable.1,
        ("limits", "ephemeral-storage") => runtime.allocatable.2,
        _ => 0,
    };
    // CPU is counted in milli-units, and so is its divisor.
    let milli = |q: &windlass_api::quantity::Quantity| if name == "cpu" { q.milli_value() } else { q.value() };
    let amount = found.as_ref().map_or(default, milli);
    let divisor = selector.divisor.as_ref().and_then(|d| d.0.parse().ok()).map_or(0, |d| milli(&d));
    let divisor = match divisor {
        0 if name == "cpu" => 1000,
        0 => 1,
        d => d,
    };
    Ok(amount.saturating_add(divisor - 1).div_euclid(divisor).to_string())
}

/// How a configuration object is found: `Ok(None)` where it does not exist.
pub trait Objects {
    fn config_map(&self, name: &str) -> Result<Option<std::sync::Arc<ConfigMap>>, String>;
    fn secret(&self, name: &str) -> Result<Option<std::sync::Arc<Secret>>, String>;
    /// Reads `key` of an env file in a mounted volume.
    fn file_key(&self, volume: &str, path: &str, key: &str) -> Result<Option<String>, String>;
}

/// The environment of a container, `NAME=value`, with the declared variables in order and the service variables last.
///
/// # Errors
/// The message of `CreateContainerConfigError`.
pub fn environment(pod: &Pod, container: &Container, services: &BTreeMap<String, String>, objects: &dyn Objects, runtime: &Runtime) -> Result<Vec<(String, String)>, String> {
    let mut env: BTreeMap<String, String> = BTreeMap::new();
    let ns = model::namespace(pod);
    for from in container.env_from.iter().flatten() {
        let prefix = from.prefix.as_deref().unwrap_or("");
        if let Some(source) = &from.config_map_ref {
            match objects.config_map(&source.name)? {
                Some(map) => env.extend(map.data.iter().flatten().map(|(k, v)| (format!("{prefix}{k}"), v.clone()))),
                None if source.optional == Some(true) => {}
                None => return Err(format!("configmap \"{}\" not found", source.name)),
            }
        } else if let Some(source) = &from.secret_ref {
            match objects.secret(&source.name)? {
                Some(secret) => env.extend(secret.data.iter().flatten().map(|(k, v)| (format!("{prefix}{k}"), String::from_utf8_lossy(&v.0).into_owned()))),
                None if source.optional == Some(true) => {}
                None => return Err(format!("secret \"{}\" not found", source.name)),
            }
        }
    }
    for var in container.env.iter().flatten() {
        let value = match (var.value.as_deref().filter(|v| !v.is_empty()), &var.value_from) {
            (Some(text), _) => {
                let lookup = |name: &str| env.get(name).or_else(|| services.get(name)).cloned();
                Some(expand(text, &lookup))
            }
            (None, Some(_)) => sourced(pod, ns, container, var, objects, runtime)?,
            (None, None) => Some(String::new()),
        };
        if let Some(value) = value {
            env.insert(var.name.clone(), value);
        }
    }
    for (name, value) in services {
        env.entry(name.clone()).or_insert_with(|| value.clone());
    }
    if let Some((name, _)) = env.iter().find(|(k, v)| k.contains('\0') || v.contains('\0')) {
        return Err(format!("environment variable {name} contains a NUL byte"));
    }
    Ok(env.into_iter().collect())
}

fn sourced(pod: &Pod, ns: &str, container: &Container, var: &EnvVar, objects: &dyn Objects, runtime: &Runtime) -> Result<Option<String>, String> {
    let Some(source) = &var.value_from else { return Ok(None) };
    if let Some(selector) = &source.field_ref {
        return field(pod, selector, runtime).map(Some);
    }
    if let Some(selector) = &source.resource_field_ref {
        return resource(pod, container, selector, runtime).map(Some);
    }
    if let Some(selector) = &source.config_map_key_ref {
        let optional = selector.optional == Some(true);
        let Some(map) = objects.config_map(&selector.name)? else {
            return if optional { Ok(None) } else { Err(format!("configmap \"{}\" not found", selector.name)) };
        };
        return match map.data.as_ref().and_then(|d| d.get(&selector.key)) {
            Some(value) => Ok(Some(value.clone())),
            None if optional => Ok(None),
            None => Err(format!("couldn't find key {} in ConfigMap {ns}/{}", selector.key, selector.name)),
        };
    }
    if let Some(selector) = &source.secret_key_ref {
        let optional = selector.optional == Some(true);
        let Some(secret) = objects.secret(&selector.name)? else {
            return if optional { Ok(None) } else { Err(format!("secret \"{}\" not found", selector.name)) };
        };
        return match secret.data.as_ref().and_then(|d| d.get(&selector.key)) {
            Some(value) => Ok(Some(String::from_utf8_lossy(&value.0).into_owned())),
            None if optional => Ok(None),
            None => Err(format!("couldn't find key {} in Secret {ns}/{}", selector.key, selector.name)),
        };
    }
    if let Some(selector) = &source.file_key_ref {
        return match objects.file_key(&selector.volume_name, &selector.path, &selector.key)? {
            Some(value) => Ok(Some(value)),
            None if selector.optional == Some(true) => Ok(None),
            None => Err(format!("environment variable key \"{}\" not found in file \"{}\"", selector.key, selector.path)),
        };
    }
    Err(format!("environment variable {} has a source that is not supported", var.name))
}

/// The value of `key` in an env file: `NAME='value'` lines, comments with `#`.
pub fn parse_env_file(text: &str, key: &str) -> Option<String> {
    text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')).find_map(|line| {
        let (name, value) = line.split_once('=')?;
        let value = value.trim();
        let value = value.strip_prefix('\'').and_then(|v| v.strip_suffix('\'')).unwrap_or(value);
        (name.trim() == key).then(|| value.to_owned())
    })
}

#[cfg(test)]
#[path = "env_tests.rs"]
mod tests;
