//! Containers of every kind: regular, init (sidecars among them) and ephemeral.

use serde_json::Value;

use crate::field::ErrorKind;
use crate::strategy::at::{At, text};
use crate::strategy::pod::security;
use crate::strategy::pod::volumes::{descending, no_backsteps};
use crate::strategy::{names, resources, selectors};

/// What the containers of a pod share.
pub struct Shared<'a> {
    /// Names of good volumes with their sources' fields.
    pub volumes: &'a [(&'a str, &'a str)],
    /// Names of `spec.resourceClaims`.
    pub claims: &'a [&'a str],
    /// `spec.terminationGracePeriodSeconds`.
    pub grace: Option<i64>,
    /// `spec.restartPolicy`.
    pub restart_policy: &'a str,
    /// `spec.hostUsers` is not false.
    pub host_users: bool,
    /// `spec.os.name`.
    pub os: &'a str,
    /// The spec is a pod's, not a template's.
    pub is_pod: bool,
}

const ENV_PATHS: [&str; 9] = [
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];
const RESOURCE_PATHS: [&str; 6] = [
    "limits.cpu",
    "limits.ephemeral-storage",
    "limits.memory",
    "requests.cpu",
    "requests.ephemeral-storage",
    "requests.memory",
];

/// `spec.containers`.
pub fn regular(at: &At<'_>, shared: &Shared<'_>) {
    if at.is_empty() {
        return at.required("");
    }
    let mut seen: Vec<&str> = Vec::new();
    let raw = at.value.as_array().map_or(&[][..], Vec::as_slice);
    for (c, raw) in at.items().zip(raw) {
        common(&c, shared);
        unique_name(&c, text(raw, "name"), &mut seen, true);
        hooks(&c, shared);
        probes(&c, shared);
        restart_rules(&c);
    }
    host_port_conflicts(at);
}

/// `spec.initContainers`; `regular` are the names they must not repeat.
pub fn init(at: &At<'_>, regular: &[&str], shared: &Shared<'_>) {
    const FORBIDDEN: &str = "may not be set for init containers without restartPolicy=Always";
    let mut seen: Vec<&str> = regular.to_vec();
    let raw = at.value.as_array().map_or(&[][..], Vec::as_slice);
    let names: Vec<&str> = raw.iter().map(|c| text(c, "name")).collect();
    for (i, c) in at.items().enumerate() {
        common(&c, shared);
        restart_rules(&c);
        let name = names[i];
        if seen.contains(&name) || names[..i].contains(&name) {
            c.at("name").duplicate();
        }
        if c.text("restartPolicy") == "Always" {
            hooks(&c, shared);
            probes(&c, shared);
        } else {
            for field in ["lifecycle", "livenessProbe", "readinessProbe", "startupProbe"] {
                if c.has(field) {
                    c.at(field).forbidden(FORBIDDEN);
                }
            }
            for p in c.at("resizePolicy").items() {
                if p.text("restartPolicy") == "RestartContainer" {
                    p.at("restartPolicy")
                        .invalid("must not be set to 'RestartContainer' for non-sidecar initContainers");
                }
            }
        }
    }
    seen.clear();
}

/// `spec.ephemeralContainers`; `others` are the names of all other containers.
pub fn ephemeral(at: &At<'_>, others: &[&str], shared: &Shared<'_>) {
    const ALLOWED: [&str; 17] = [
        "name",
        "image",
        "command",
        "args",
        "workingDir",
        "env",
        "envFrom",
        "volumeMounts",
        "volumeDevices",
        "terminationMessagePath",
        "terminationMessagePolicy",
        "imagePullPolicy",
        "securityContext",
        "stdin",
        "stdinOnce",
        "tty",
        "targetContainerName",
    ];
    const FORBIDDEN: &str = "cannot be set for an Ephemeral Container";
    let raw = at.value.as_array().map_or(&[][..], Vec::as_slice);
    let names: Vec<&str> = raw.iter().map(|c| text(c, "name")).collect();
    for (i, c) in at.items().enumerate() {
        common(&c, shared);
        if shared.is_pod {
            image_padding(&c);
        }
        if others.contains(&names[i]) || names[..i].contains(&names[i]) {
            c.at("name").duplicate();
        }
        let target = c.at("targetContainerName");
        if !target.is_empty() && !others.contains(&target.str()) {
            target.not_found();
        }
        for (field, value) in c.value.as_object().into_iter().flatten() {
            if !ALLOWED.contains(&field.as_str()) && !crate::strategy::at::is_empty(value) {
                c.at(field).forbidden(FORBIDDEN);
            }
        }
        for m in c.at("volumeMounts").items() {
            for field in ["subPath", "subPathExpr"] {
                if !m.text(field).is_empty() {
                    m.at(field).forbidden(FORBIDDEN);
                }
            }
        }
    }
}

/// A pod's image has no space around it (templates are not checked).
pub fn image_padding(c: &At<'_>) {
    let image = c.at("image");
    if image.str().trim() != image.str() {
        image.invalid("must not have leading or trailing whitespace");
    }
}

fn unique_name<'v>(c: &At<'_>, name: &'v str, seen: &mut Vec<&'v str>, even_empty: bool) {
    if seen.contains(&name) && (even_empty || !name.is_empty()) {
        c.at("name").duplicate();
    }
    seen.push(name);
}

fn common(c: &At<'_>, shared: &Shared<'_>) {
    let name = c.at("name");
    if name.require() {
        name.syntax(names::dns1123_label);
    }
    c.at("image").require();
    c.at("terminationMessagePolicy").one_of(&["File", "FallbackToLogsOnError"]);
    ports(&c.at("ports"));
    env(&c.at("env"));
    env_from(&c.at("envFrom"));
    mounts(c, shared);
    devices(c, shared);
    c.at("imagePullPolicy").one_of(&["Always", "IfNotPresent", "Never"]);
    resources::requirements(&c.at("resources"), shared.claims);
    resize_policy(&c.at("resizePolicy"), shared);
    security::container(&c.at("securityContext"), shared.host_users);
}

fn ports(at: &At<'_>) {
    let mut seen: Vec<String> = Vec::new();
    for p in at.items() {
        let name = p.at("name");
        if !name.is_empty() {
            let bad = names::port_name(name.str());
            if bad.is_empty() {
                if seen.iter().any(|s| s == name.str()) {
                    name.duplicate();
                } else {
                    seen.push(name.str().to_owned());
                }
            }
            for msg in bad {
                name.invalid(msg);
            }
        }
        let port = p.at("containerPort");
        match port.int().unwrap_or(0) {
            0 => port.required(""),
            n => port_number(&port, n),
        }
        let host = p.at("hostPort");
        if let Some(n) = host.int().filter(|n| *n != 0) {
            port_number(&host, n);
        }
        p.at("protocol").one_of(&["SCTP", "TCP", "UDP"]);
    }
}

/// A port number in 1..=65535.
pub fn port_number(at: &At<'_>, n: i64) {
    if let Some(msg) = names::port_number(n) {
        at.invalid_value(n, msg);
    }
}

/// A port by number or by name.
pub fn port_or_name(at: &At<'_>) {
    match at.value {
        Value::String(_) => at.syntax(names::port_name),
        _ => {
            if let Some(msg) = names::port_number(at.int().unwrap_or(0)) {
                at.invalid_value(at.int().unwrap_or(0), msg);
            }
        }
    }
}

fn host_port_conflicts(at: &At<'_>) {
    let mut seen: Vec<String> = Vec::new();
    for c in at.items() {
        for p in c.at("ports").items() {
            let host = p.num("hostPort").unwrap_or(0);
            if host == 0 {
                continue;
            }
            let id = format!("{}/{}/{host}", p.text("protocol"), p.text("hostIP"));
            if seen.contains(&id) {
                p.at("hostPort").error(ErrorKind::Duplicate, Some(id.clone().into()), "");
            }
            seen.push(id);
        }
    }
}

fn env(at: &At<'_>) {
    const SOURCES: [&str; 5] = ["fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef", "fileKeyRef"];
    for e in at.items() {
        let name = e.at("name");
        if name.require() {
            name.syntax(names::env_name);
        }
        let from = e.at("valueFrom");
        if !from.present() {
            continue;
        }
        if from.has("fieldRef") {
            field_ref(&from.at("fieldRef"), &ENV_PATHS);
        }
        if from.has("resourceFieldRef") {
            resource_ref(&from.at("resourceFieldRef"), false);
        }
        for r in ["configMapKeyRef", "secretKeyRef"] {
            let r = from.at(r);
            if r.present() {
                r.at("name").syntax(names::dns1123_subdomain);
                let key = r.at("key");
                if key.require() {
                    key.syntax(names::config_key);
                }
            }
        }
        let file = from.at("fileKeyRef");
        if file.present() {
            for f in ["key", "volumeName", "path"] {
                file.at(f).require();
            }
            no_backsteps(&file.at("path"));
        }
        let count = SOURCES.iter().filter(|s| from.has(s)).count();
        if count == 0 {
            from.invalid_value(
                "",
                "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`",
            );
        } else if !e.text("value").is_empty() {
            from.invalid_value("", "may not be specified when `value` is not empty");
        } else if count > 1 {
            from.invalid_value("", "may not have more than one field specified at a time");
        }
    }
}

fn env_from(at: &At<'_>) {
    for e in at.items() {
        let prefix = e.at("prefix");
        if !prefix.is_empty() {
            prefix.syntax(names::env_name);
        }
        let mut count = 0;
        for r in ["configMapRef", "secretRef"] {
            let r = e.at(r);
            if r.present() {
                count += 1;
                let name = r.at("name");
                if name.require() {
                    name.syntax(|s| names::dns1123_subdomain(&names::mask_trailing_dash(s)));
                }
            }
        }
        match count {
            0 => at.invalid_value("", "must specify one of: `configMapRef` or `secretRef`"),
            1 => {}
            _ => at.invalid_value("", "may not have more than one field specified at a time"),
        }
    }
}

/// A downward API field.
pub fn field_ref(r: &At<'_>, allowed: &[&str]) {
    r.at("apiVersion").require();
    let path = r.at("fieldPath");
    path.require();
    match selectors::field_path(path.str()) {
        Some(("metadata.annotations", Some(key))) => {
            for msg in names::qualified_name(&key.to_lowercase()) {
                r.invalid_value(key, msg);
            }
        }
        Some(("metadata.labels", Some(key))) => {
            for msg in names::qualified_name(key) {
                r.invalid_value(key, msg);
            }
        }
        Some((head, Some(_))) => r.invalid_value(head, "does not support subscript"),
        Some((p, None)) if allowed.contains(&p) => {}
        _ if path.is_empty() => {}
        // The old name of `spec.nodeName`.
        Some(("spec.host", None)) if allowed.contains(&"spec.nodeName") => {}
        Some((p, None)) if !FIELD_LABELS.contains(&p) => {
            path.invalid(format!("error converting fieldPath: field label not supported: {p}"));
        }
        _ => path.not_supported(allowed),
    }
}

/// Fields of pods that have a name as a label of their own; few of them are for environments.
const FIELD_LABELS: [&str; 15] = [
    "metadata.annotations",
    "metadata.labels",
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.host",
    "spec.nodeName",
    "spec.restartPolicy",
    "spec.schedulerName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.phase",
    "status.podIP",
    "status.podIPs",
];

/// A container's resource by name. In volumes the container must be named.
pub fn resource_ref(r: &At<'_>, volume: bool) {
    let resource = r.at("resource");
    if volume && r.at("containerName").is_empty() {
        r.at("containerName").required("");
    } else if resource.is_empty() {
        resource.required("");
    } else if !RESOURCE_PATHS.contains(&resource.str())
        && !resource.str().starts_with("limits.hugepages-")
        && !resource.str().starts_with("requests.hugepages-")
    {
        resource.not_supported(&RESOURCE_PATHS);
    }
    divisor(r, resource.str());
}

fn divisor(r: &At<'_>, resource: &str) {
    const BYTES: [&str; 13] =
        ["1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei"];
    const BYTES_MSG: &str = "only divisor's values 1, 1k, 1M, 1G, 1T, 1P, 1E, 1Ki, 1Mi, 1Gi, 1Ti, 1Pi, 1Ei are supported with the";
    let at = r.at("divisor");
    let text = match at.value {
        Value::String(s) => s.clone(),
        Value::Null => return,
        other => other.to_string(),
    };
    if resources::quantity(at.value).is_some_and(|q| q.is_zero()) {
        return;
    }
    let what = resource.split_once('.').map_or("", |(_, r)| r);
    let bad = match what {
        "cpu" if !matches!(text.as_str(), "1" | "1m") => {
            Some("only divisor's values 1m and 1 are supported with the cpu resource".to_owned())
        }
        "memory" if !BYTES.contains(&text.as_str()) => Some(format!("{BYTES_MSG} memory resource")),
        "ephemeral-storage" if !BYTES.contains(&text.as_str()) => {
            Some(format!("{BYTES_MSG} local ephemeral storage resource"))
        }
        w if resources::is_huge_pages(w) && !BYTES.contains(&text.as_str()) => {
            Some(format!("{BYTES_MSG} hugepages resource"))
        }
        _ => None,
    };
    if let Some(msg) = bad {
        at.invalid_value(resource, msg);
    }
}

fn mounts(c: &At<'_>, shared: &Shared<'_>) {
    let list = c.at("volumeMounts");
    let mut paths: Vec<String> = Vec::new();
    let device = |field: &str, value: &str| c.at("volumeDevices").items().any(|d| d.text(field) == value);
    for m in list.items() {
        let (name, path) = (m.at("name"), m.at("mountPath"));
        name.require();
        if !shared.volumes.iter().any(|(n, _)| *n == name.str()) {
            name.error(ErrorKind::NotFound, Some(name.str().into()), "");
        }
        path.require();
        if paths.iter().any(|p| p == path.str()) {
            path.invalid("must be unique");
        }
        paths.push(path.str().to_owned());
        if device("name", name.str()) {
            name.invalid("must not already exist in volumeDevices");
        }
        if device("devicePath", path.str()) {
            path.invalid("must not already exist as a path in volumeDevices");
        }
        // Upstream reports these under the list, without an index.
        for field in ["subPath", "subPathExpr"] {
            let value = m.at(field);
            if !value.is_empty() {
                descending(&list.at(field).with(value.value));
            }
        }
        if !m.text("subPath").is_empty() && !m.text("subPathExpr").is_empty() {
            m.at("subPathExpr").invalid("subPathExpr and subPath are mutually exclusive");
        }
        propagation(c, &m, &list);
    }
}

fn propagation(c: &At<'_>, m: &At<'_>, list: &At<'_>) {
    let value = m.at("mountPropagation");
    if value.present() {
        let at = list.at("mountPropagation");
        let at = at.with(value.value);
        at.one_of(&["Bidirectional", "HostToContainer", "None"]);
        if value.str() == "Bidirectional" && !c.flag("securityContext.privileged") {
            at.forbidden("Bidirectional mount propagation is available only to privileged containers");
        }
    }
    let recursive = m.at("recursiveReadOnly");
    let at = list.at("recursiveReadOnly");
    let at = at.with(recursive.value);
    match recursive.str() {
        "" | "Disabled" => {}
        "Enabled" | "IfPossible" => {
            if !m.flag("readOnly") {
                at.forbidden("may only be specified when readOnly is true");
            }
            if !matches!(value.str(), "" | "None") {
                at.forbidden("may only be specified when mountPropagation is None or not specified");
            }
        }
        _ => at.not_supported(&["Disabled", "Enabled", "IfPossible"]),
    }
}

fn devices(c: &At<'_>, shared: &Shared<'_>) {
    let (mut names_seen, mut paths_seen): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
    let mount = |field: &str, value: &str| c.at("volumeMounts").items().any(|m| m.text(field) == value);
    for d in c.at("volumeDevices").items() {
        let (name, path) = (d.at("name"), d.at("devicePath"));
        name.require();
        if names_seen.iter().any(|n| n == name.str()) {
            name.invalid("must be unique");
        }
        match shared.volumes.iter().find(|(n, _)| *n == name.str()) {
            None => name.error(ErrorKind::NotFound, Some(name.str().into()), ""),
            Some((_, "persistentVolumeClaim" | "ephemeral")) => {}
            Some(_) => name.invalid(
                "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode",
            ),
        }
        path.require();
        if paths_seen.iter().any(|p| p == path.str()) {
            path.invalid("must be unique");
        }
        if path.str().split('/').any(|p| p == "..") {
            path.invalid("can not contain backsteps ('..')");
        } else {
            paths_seen.push(path.str().to_owned());
        }
        if mount("name", name.str()) {
            name.invalid("must not already exist in volumeMounts");
        }
        if mount("mountPath", path.str()) {
            path.invalid("must not already exist as a path in volumeMounts");
        }
        names_seen.push(name.str().to_owned());
    }
}

fn resize_policy(at: &At<'_>, shared: &Shared<'_>) {
    let mut seen: Vec<String> = Vec::new();
    for p in at.items() {
        let (resource, policy) = (p.text("resourceName"), p.text("restartPolicy"));
        if seen.iter().any(|s| s == resource) {
            p.error(ErrorKind::Duplicate, Some(resource.into()), "");
        }
        seen.push(resource.to_owned());
        let (resource_value, policy_value) = (Value::from(resource), Value::from(policy));
        at.with(&resource_value).one_of(&["cpu", "memory"]);
        at.with(&policy_value).one_of(&["NotRequired", "RestartContainer"]);
        if shared.restart_policy == "Never" && policy != "NotRequired" {
            at.invalid_value(policy, "must be 'NotRequired' when pod `restartPolicy` is 'Never'");
        }
    }
}

fn restart_rules(c: &At<'_>) {
    let (policy, rules) = (c.at("restartPolicy"), c.at("restartPolicyRules"));
    if !policy.present() {
        if !rules.is_empty() {
            policy.required("must specify restartPolicy when restart rules are used");
        }
    } else if !matches!(policy.str(), "Always" | "Never" | "OnFailure") {
        policy.not_supported(&["Always", "Never", "OnFailure"]);
    }
    if rules.len() > 20 {
        rules.too_many(20);
    }
    for r in rules.items() {
        if !matches!(r.text("action"), "Restart" | "RestartAllContainers") {
            r.at("action").not_supported(&["Restart", "RestartAllContainers"]);
        }
        let codes = r.at("exitCodes");
        if !codes.present() {
            codes.required("must be specified");
            continue;
        }
        if !matches!(codes.text("operator"), "In" | "NotIn") {
            codes.at("operator").not_supported(&["In", "NotIn"]);
        }
        if codes.at("values").len() > 255 {
            codes.at("values").too_many(255);
        }
    }
}

fn hooks(c: &At<'_>, shared: &Shared<'_>) {
    let lifecycle = c.at("lifecycle");
    for hook in ["postStart", "preStop"] {
        let h = lifecycle.at(hook);
        if h.present() {
            handler(&h, shared.grace);
        }
    }
    let signal = lifecycle.at("stopSignal");
    if signal.present() && shared.os.is_empty() {
        signal.forbidden("may not be set for containers with empty `spec.os.name`");
    } else if signal.present() && shared.os == "windows" && !matches!(signal.str(), "SIGKILL" | "SIGTERM") {
        signal.not_supported(&["SIGKILL", "SIGTERM"]);
    }
}

fn probes(c: &At<'_>, shared: &Shared<'_>) {
    for kind in ["livenessProbe", "readinessProbe", "startupProbe"] {
        let p = c.at(kind);
        if !p.present() {
            continue;
        }
        handler(&p, shared.grace);
        for n in ["initialDelaySeconds", "timeoutSeconds", "periodSeconds", "successThreshold", "failureThreshold"] {
            p.at(n).non_negative();
        }
        let grace = p.at("terminationGracePeriodSeconds");
        grace.positive();
        if kind == "readinessProbe" {
            if grace.present() {
                grace.invalid("must not be set for readinessProbes");
            }
        } else if p.num("successThreshold").is_some_and(|n| n != 1) {
            p.at("successThreshold").invalid("must be 1");
        }
    }
}

fn handler(h: &At<'_>, grace: Option<i64>) {
    const MORE: &str = "may not specify more than 1 handler type";
    let mut found = false;
    for kind in ["exec", "httpGet", "tcpSocket", "grpc", "sleep"] {
        let action = h.at(kind);
        if !action.present() {
            continue;
        }
        if found {
            action.forbidden(MORE);
            continue;
        }
        found = true;
        match kind {
            "exec" => {
                action.at("command").require();
            }
            "httpGet" => http_get(&action),
            "sleep" => {
                let seconds = action.num("seconds").unwrap_or(0);
                if let Some(grace) = grace.filter(|g| seconds < 0 || seconds > *g) {
                    action.invalid_value(
                        seconds,
                        format!("must be non-negative and less than terminationGracePeriodSeconds ({grace})"),
                    );
                }
            }
            _ => port_or_name(&action.at("port")),
        }
    }
    if !found {
        h.required("must specify a handler type");
    }
}

fn http_get(h: &At<'_>) {
    h.at("path").require();
    port_or_name(&h.at("port"));
    if !matches!(h.text("scheme"), "HTTP" | "HTTPS") {
        h.at("scheme").error(
            ErrorKind::NotSupported,
            Some(h.text("scheme").into()),
            "supported values: \"HTTP\", \"HTTPS\"",
        );
    }
    for header in h.at("httpHeaders").items() {
        for msg in names::http_header(header.text("name")) {
            h.at("httpHeaders").invalid_value(header.text("name"), msg);
        }
    }
}
