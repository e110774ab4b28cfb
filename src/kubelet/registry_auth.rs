//! Which credentials of a pod's pull secrets fit an image. Pure.

use base64::Engine;
use k8s_openapi::api::core::v1::Secret;
use serde_json::Value;

use crate::runtime::Credentials;
use crate::runtime::reference::Reference;

/// The credentials in `secrets` for this image, the most specific first.
pub fn matching(secrets: &[std::sync::Arc<Secret>], image: &Reference) -> Vec<Credentials> {
    let target = format!("{}/{}", image.registry, image.repository);
    let mut found: Vec<(usize, Credentials)> = Vec::new();
    for secret in secrets {
        let entries = entries(secret);
        for (key, entry) in entries {
            if let Some(length) = matches(&key, &target)
                && let Some(credentials) = credentials(&key, &entry)
            {
                found.push((length, credentials));
            }
        }
    }
    found.sort_by_key(|(length, _)| std::cmp::Reverse(*length));
    found.into_iter().map(|(_, c)| c).collect()
}

fn entries(secret: &Secret) -> Vec<(String, Value)> {
    let data = |key: &str| secret.data.as_ref().and_then(|d| d.get(key)).and_then(|v| serde_json::from_slice::<Value>(&v.0).ok());
    let map = match secret.type_.as_deref() {
        Some("kubernetes.io/dockerconfigjson") => data(".dockerconfigjson").and_then(|v| v.get("auths").cloned()),
        Some("kubernetes.io/dockercfg") => data(".dockercfg"),
        _ => None,
    };
    match map {
        Some(Value::Object(map)) => map.into_iter().collect(),
        _ => Vec::new(),
    }
}

/// How specific the key is for the target, `None` if it does not fit. Each host label may hold `*`.
fn matches(key: &str, target: &str) -> Option<usize> {
    let key = key.trim_start_matches("https://").trim_start_matches("http://");
    let (host, path) = key.split_once('/').unwrap_or((key, ""));
    let path = path.trim_end_matches('/');
    let path = if matches!(path, "v1" | "v2") { "" } else { path };
    let host = match host {
        "index.docker.io" | "registry-1.docker.io" => "docker.io",
        other => other,
    };
    let (target_host, target_path) = target.split_once('/').unwrap_or((target, ""));
    let (key_name, key_port) = host.split_once(':').unwrap_or((host, ""));
    let (name, port) = target_host.split_once(':').unwrap_or((target_host, ""));
    let key_labels: Vec<&str> = key_name.split('.').collect();
    let labels: Vec<&str> = name.split('.').collect();
    let hosts = key_port == port && key_labels.len() == labels.len() && key_labels.iter().zip(&labels).all(|(k, l)| glob(k, l));
    let paths = path.is_empty() || target_path == path || target_path.starts_with(&format!("{path}/")) || target_path.starts_with(path);
    (hosts && paths).then_some(path.len() * 1000 + host.len())
}

/// Matches a label with `*` wildcards.
fn glob(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((head, tail)) => {
            text.strip_prefix(head).is_some_and(|rest| (0..=rest.len()).filter(|i| rest.is_char_boundary(*i)).any(|i| glob(tail, &rest[i..])))
        }
    }
}

fn credentials(server: &str, entry: &Value) -> Option<Credentials> {
    let text = |key: &str| entry.get(key).and_then(Value::as_str).unwrap_or("").to_owned();
    let mut credentials = Credentials {
        username: text("username"),
        password: text("password"),
        server: server.to_owned(),
        identity_token: text("identitytoken"),
        registry_token: text("registrytoken"),
    };
    let auth = text("auth");
    if !auth.is_empty() {
        let decoded = base64::engine::general_purpose::STANDARD.decode(auth.trim()).ok()?;
        let decoded = String::from_utf8(decoded).ok()?;
        let (user, password) = decoded.split_once(':')?;
        credentials.username = user.to_owned();
        credentials.password = password.trim_end_matches('\0').to_owned();
    }
    Some(credentials)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn keys() {
        let check = |key: &str, image: &str, expected: bool| {
            let reference = Reference::parse(image).expect("reference");
            let target = format!("{}/{}", reference.registry, reference.repository);
            assert_eq!(matches(key, &target).is_some(), expected, "{key} {image}");
        };
        check("https://index.docker.io/v1/", "busybox", true);
        check("docker.io", "foo/bar", true);
        check("quay.io", "quay.io/a/b", true);
        check("quay.io/a", "quay.io/a/b", true);
        check("quay.io/x", "quay.io/a/b", false);
        check("*.example.com", "reg.example.com/a", true);
        check("*.example.com", "example.com/a", false);
        check("reg*.example.com:5000", "reg1.example.com:5000/a", true);
        check("reg.example.com", "reg.example.com:5000/a", false);
    }

    #[test]
    fn secrets() {
        let auth = base64::engine::general_purpose::STANDARD.encode("user:pa:ss");
        let config = json!({"auths": {"quay.io": {"auth": auth}, "quay.io/a": {"username": "u2", "password": "p2"}}}).to_string();
        let encoded = base64::engine::general_purpose::STANDARD.encode(config);
        let secret: Secret = serde_json::from_value(json!({"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": encoded}})).expect("secret");
        let found = matching(&[std::sync::Arc::new(secret)], &Reference::parse("quay.io/a/b").expect("reference"));
        let users: Vec<(&str, &str)> = found.iter().map(|c| (c.username.as_str(), c.password.as_str())).collect();
        assert_eq!(users, [("u2", "p2"), ("user", "pa:ss")]);
    }
}
