//! Defaults of pod specs (`pkg/apis/core/v1/defaults.go`): those that no schema can say.

use serde_json::{Map, Value, json};

use crate::strategy::at::{default_at, default_text, get, get_mut, items_mut, set, text};

const CONTAINER_LISTS: [&str; 3] = ["initContainers", "containers", "ephemeralContainers"];

/// Defaults of a pod itself: those of its spec, and what templates do not get.
pub fn pod(pod: &mut Value) {
    if let Some(spec) = pod.get_mut("spec") {
        spec_defaults(spec);
        if get(spec, "terminationGracePeriodSeconds").as_i64().is_some_and(|n| n < 0) {
            set(spec, "terminationGracePeriodSeconds", json!(1));
        }
        for list in ["initContainers", "containers"] {
            for c in items_mut(spec, list) {
                requests_from_limits(c);
            }
        }
        default_at(spec, "enableServiceLinks", true);
        if get(spec, "hostNetwork") == true {
            host_ports(spec);
        }
    }
    if let Some(status) = pod.get_mut("status").filter(|s| s.is_object()) {
        pod_ips(status);
    }
}

/// `podIP` and the first of `podIPs` are one.
fn pod_ips(status: &mut Value) {
    let ip = text(status, "podIP").to_owned();
    let first = status["podIPs"][0]["ip"].as_str().unwrap_or("").to_owned();
    match (ip.is_empty(), first.is_empty()) {
        (false, _) if first != ip => set(status, "podIPs", json!([{"ip": ip}])),
        (true, false) => set(status, "podIP", first.into()),
        _ => {}
    }
}

/// Defaults of a pod template.
pub fn template(template: &mut Value) {
    if let Some(spec) = template.get_mut("spec") {
        spec_defaults(spec);
    }
}

/// Defaults of a pod spec wherever it stands.
pub fn spec_defaults(spec: &mut Value) {
    if !spec.is_object() {
        return;
    }
    let account = match text(spec, "serviceAccountName") {
        "" => text(spec, "serviceAccount").to_owned(),
        name => name.to_owned(),
    };
    if !account.is_empty() {
        set(spec, "serviceAccountName", account.clone().into());
        set(spec, "serviceAccount", account.into());
    }
    default_text(spec, "dnsPolicy", "ClusterFirst");
    default_text(spec, "restartPolicy", "Always");
    default_text(spec, "schedulerName", "default-scheduler");
    default_at(spec, "securityContext", json!({}));
    default_at(spec, "terminationGracePeriodSeconds", 30);
    for list in CONTAINER_LISTS {
        for c in items_mut(spec, list) {
            container(c);
        }
    }
    for v in items_mut(spec, "volumes") {
        volume(v);
    }
}

/// Whether a text is the name of an image, without its tag and digest.
fn is_image_name(name: &str) -> bool {
    let part = |p: &str| {
        let edge = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        p.starts_with(edge) && p.ends_with(edge) && p.chars().all(|c| edge(c) || matches!(c, '.' | '_' | '-'))
    };
    let (host, path) = match name.split_once('/') {
        Some((h, p)) if h.contains(['.', ':']) || h == "localhost" || h.bytes().any(|b| b.is_ascii_uppercase()) => {
            (Some(h), p)
        }
        _ => (None, name),
    };
    let host_ok = host.is_none_or(|h| {
        !h.is_empty() && h.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b':' | b'[' | b']'))
    });
    host_ok && name.len() <= 255 && !path.is_empty() && path.split('/').all(part)
}

/// `Always` for the tag `latest` (also when it is left out), `IfNotPresent` for others, for digests, and for what is no
/// image at all.
fn pull_policy(image: &str) -> &'static str {
    let (name, digest) = match image.split_once('@') {
        Some((n, d)) => (n, Some(d)),
        None => (image, None),
    };
    let last = name.rsplit('/').next().unwrap_or(name);
    let tag = last.split_once(':').map(|(_, t)| t);
    let bare = tag.map_or(name, |t| &name[..name.len() - t.len() - 1]);
    if !is_image_name(bare) {
        return "IfNotPresent";
    }
    match (tag, digest) {
        (Some("latest"), _) | (None, None) => "Always",
        _ => "IfNotPresent",
    }
}

fn container(c: &mut Value) {
    if text(c, "imagePullPolicy").is_empty() && c.is_object() {
        let policy = pull_policy(text(c, "image"));
        set(c, "imagePullPolicy", policy.into());
    }
    default_text(c, "terminationMessagePath", "/dev/termination-log");
    default_text(c, "terminationMessagePolicy", "File");
    default_at(c, "resources", json!({}));
    for p in items_mut(c, "ports") {
        default_text(p, "protocol", "TCP");
    }
    for e in items_mut(c, "env") {
        if let Some(from) = e.get_mut("valueFrom") {
            field_ref(from);
        }
    }
    for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
        if let Some(p) = c.get_mut(probe).filter(|p| p.is_object()) {
            for (field, value) in
                [("timeoutSeconds", 1), ("periodSeconds", 10), ("successThreshold", 1), ("failureThreshold", 3)]
            {
                if p[field].is_null() || p[field] == 0 {
                    p[field] = value.into();
                }
            }
            http_get(p);
            if let Some(grpc) = p.get_mut("grpc").filter(|g| g.is_object()) {
                default_at(grpc, "service", "");
            }
        }
    }
    for hook in ["lifecycle.postStart", "lifecycle.preStop"] {
        if let Some(h) = get_mut(c, hook) {
            http_get(h);
        }
    }
}

fn http_get(handler: &mut Value) {
    if let Some(h) = handler.get_mut("httpGet").filter(|h| h.is_object()) {
        default_text(h, "path", "/");
        default_text(h, "scheme", "HTTP");
    }
}

/// Default mode of files in volumes, 0644.
const FILE_MODE: i64 = 0o644;

pub(super) fn volume(v: &mut Value) {
    let Some(map) = v.as_object() else { return };
    if !map.iter().any(|(k, source)| k != "name" && !source.is_null()) {
        set(v, "emptyDir", json!({}));
    }
    for source in ["secret", "configMap", "downwardAPI", "projected"] {
        if let Some(s) = v.get_mut(source).filter(|s| s.is_object()) {
            default_at(s, "defaultMode", FILE_MODE);
        }
    }
    for i in items_mut(v, "downwardAPI.items") {
        field_ref(i);
    }
    for s in items_mut(v, "projected.sources") {
        if let Some(t) = s.get_mut("serviceAccountToken").filter(|t| t.is_object()) {
            default_at(t, "expirationSeconds", 3600);
        }
        for i in items_mut(s, "downwardAPI.items") {
            field_ref(i);
        }
    }
    if let Some(h) = v.get_mut("hostPath").filter(|h| h.is_object()) {
        default_at(h, "type", "");
    }
    if let Some(i) = v.get_mut("image").filter(|i| i.is_object())
        && text(i, "pullPolicy").is_empty()
    {
        let policy = pull_policy(text(i, "reference"));
        set(i, "pullPolicy", policy.into());
    }
    if let Some(spec) = get_mut(v, "ephemeral.volumeClaimTemplate.spec") {
        default_text(spec, "volumeMode", "Filesystem");
    }
    const SOURCES: [(&str, &[(&str, &str)]); 4] = [
        ("iscsi", &[("iscsiInterface", "default")]),
        ("rbd", &[("pool", "rbd"), ("user", "admin"), ("keyring", "/etc/ceph/keyring")]),
        ("azureDisk", &[("cachingMode", "ReadWrite"), ("fsType", "ext4"), ("kind", "Shared")]),
        ("scaleIO", &[("storageMode", "ThinProvisioned"), ("fsType", "xfs")]),
    ];
    for (source, fields) in SOURCES {
        if let Some(s) = v.get_mut(source).filter(|s| s.is_object()) {
            for (field, value) in fields {
                default_text(s, field, value);
            }
        }
    }
}

fn field_ref(item: &mut Value) {
    if let Some(r) = item.get_mut("fieldRef").filter(|r| r.is_object()) {
        default_text(r, "apiVersion", "v1");
    }
    if let Some(r) = item.get_mut("resourceFieldRef").filter(|r| r.is_object()) {
        default_text(r, "divisor", "0");
    }
}

fn requests_from_limits(c: &mut Value) {
    let Some(limits) = get(c, "resources.limits").as_object().filter(|m| !m.is_empty()).cloned() else { return };
    let mut requests = match get(c, "resources.requests") {
        Value::Object(m) => m.clone(),
        _ => Map::new(),
    };
    let before = requests.len();
    for (name, amount) in limits {
        requests.entry(name).or_insert(amount);
    }
    if requests.len() != before {
        set(c, "resources.requests", Value::Object(requests));
    }
}

fn host_ports(spec: &mut Value) {
    for list in ["containers", "initContainers"] {
        for c in items_mut(spec, list) {
            for p in items_mut(c, "ports") {
                let port = p["containerPort"].clone();
                if p["hostPort"].is_null() || p["hostPort"] == 0 {
                    set(p, "hostPort", port);
                }
            }
        }
    }
}
