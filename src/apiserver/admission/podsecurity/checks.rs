//! The checks of the Pod Security Standards, each with the versions it holds for.

use super::super::pods::{containers, items, text};
use super::{Level, Minor};
use serde_json::Value;
use std::collections::BTreeSet;

/// Why a pod fails a check, in upstream's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    pub reason: String,
    pub detail: String,
}

struct Pod<'a> {
    metadata: &'a Value,
    spec: &'a Value,
    version: Minor,
}

type CheckFn = fn(&Pod<'_>) -> Option<Violation>;

struct Check {
    id: &'static str,
    /// The first minor version in which it is applied.
    since: Minor,
    run: CheckFn,
    /// Baseline checks that this restricted check stands in for (from `since` on).
    overrides: Option<&'static str>,
}

const fn check(id: &'static str, since: Minor, run: CheckFn) -> Check {
    Check { id, since, run, overrides: None }
}

const fn over(id: &'static str, since: Minor, run: CheckFn, overrides: &'static str) -> Check {
    Check { id, since, run, overrides: Some(overrides) }
}

/// In the order of their ids, as upstream reports them.
const BASELINE: [Check; 12] = [
    check("appArmorProfile", 0, app_armor),
    check("capabilities_baseline", 0, capabilities_baseline),
    check("hostNamespaces", 0, host_namespaces),
    check("hostPathVolumes", 0, host_path_volumes),
    check("hostPorts", 0, host_ports),
    check("hostProbesAndHostLifecycle", 34, host_probes),
    check("privileged", 0, privileged),
    check("procMount", 0, proc_mount_baseline),
    check("seLinuxOptions", 0, se_linux),
    check("seccompProfile_baseline", 0, seccomp_baseline),
    check("sysctls", 0, sysctls),
    check("windowsHostProcess", 0, host_process),
];

const RESTRICTED: [Check; 7] = [
    check("allowPrivilegeEscalation", 8, privilege_escalation),
    over("capabilities_restricted", 22, capabilities_restricted, "capabilities_baseline"),
    over("procMount_restricted", 35, proc_mount, "procMount"),
    over("restrictedVolumes", 0, restricted_volumes, "hostPathVolumes"),
    check("runAsNonRoot", 0, run_as_non_root),
    check("runAsUser", 23, run_as_user),
    over("seccompProfile_restricted", 19, seccomp_restricted, "seccompProfile_baseline"),
];


/// All violations of a level at a version of the standards.
pub fn evaluate(level: Level, version: Minor, metadata: &Value, spec: &Value) -> Vec<Violation> {
    let pod = Pod { metadata, spec, version };
    let restricted: &[Check] = if level == Level::Restricted { &RESTRICTED } else { &[] };
    let active = || restricted.iter().filter(|check| check.since <= version);
    let baseline: &[Check] = if level == Level::Privileged { &[] } else { &BASELINE };
    let kept = baseline
        .iter()
        .filter(|check| check.since <= version && !active().any(|other| other.overrides == Some(check.id)));
    kept.chain(active()).filter_map(|check| (check.run)(&pod)).collect()
}

fn violation(reason: &str, detail: String) -> Option<Violation> {
    Some(Violation { reason: reason.to_owned(), detail })
}

fn plural<'a>(one: &'a str, many: &'a str, count: usize) -> &'a str {
    if count == 1 { one } else { many }
}

fn quoted<T: AsRef<str>>(list: impl IntoIterator<Item = T>) -> String {
    list.into_iter().map(|item| format!("\"{}\"", item.as_ref())).collect::<Vec<_>>().join(", ")
}

/// `container "a"` or `containers "a", "b"`.
fn named(bad: &[&str]) -> String {
    format!("{} {}", plural("container", "containers", bad.len()), quoted(bad))
}

/// `pod and containers "a", "b"`: who set something, the pod first.
fn setters(pod: bool, bad: &[&str]) -> Vec<String> {
    let mut setters = Vec::new();
    if pod {
        setters.push("pod".to_owned());
    }
    if !bad.is_empty() {
        setters.push(named(bad));
    }
    setters
}

impl<'a> Pod<'a> {
    fn containers(&self) -> impl Iterator<Item = (&'a str, &'a Value)> + use<'a> {
        containers(self.spec).map(|(_, container)| (text(container, "name"), container))
    }

    fn bad(&self, bad: impl Fn(&Value) -> bool) -> Vec<&'a str> {
        self.containers().filter(|(_, container)| bad(container)).map(|(name, _)| name).collect()
    }

    fn security(&self) -> &'a Value {
        &self.spec["securityContext"]
    }

    fn windows(&self) -> bool {
        self.spec["os"]["name"] == "windows"
    }

    /// From 1.35 on some checks are relaxed for pods in a user namespace.
    fn relaxed(&self) -> bool {
        self.version >= 35 && self.spec["hostUsers"] == false
    }

    fn annotations(&self) -> impl Iterator<Item = (&'a String, &'a str)> + use<'a> {
        let all = self.metadata["annotations"].as_object().into_iter().flatten();
        all.filter_map(|(key, value)| Some((key, value.as_str()?)))
    }
}

fn app_armor(pod: &Pod<'_>) -> Option<Violation> {
    let mut values = BTreeSet::new();
    let mut forbidden = |context: &Value| {
        let profile = &context["appArmorProfile"];
        let kind = text(profile, "type");
        let bad = profile.is_object() && !matches!(kind, "RuntimeDefault" | "Localhost");
        if bad {
            values.insert(kind.to_owned());
        }
        bad
    };
    let by_pod = forbidden(pod.security());
    let mut bad = Vec::new();
    for (name, container) in pod.containers() {
        if forbidden(&container["securityContext"]) {
            bad.push(name);
        }
    }
    let mut setters = setters(by_pod, &bad);
    let mut shown: Vec<String> = values.into_iter().collect();
    let mut annotations: Vec<String> = pod
        .annotations()
        .filter(|(key, _)| key.starts_with("container.apparmor.security.beta.kubernetes.io/"))
        .filter(|(_, value)| !(value.is_empty() || *value == "runtime/default" || value.starts_with("localhost/")))
        .map(|(key, value)| format!("{key}={value:?}"))
        .collect();
    if !annotations.is_empty() {
        annotations.sort();
        setters.push(plural("annotation", "annotations", annotations.len()).to_owned());
        shown.extend(annotations);
    }
    if setters.is_empty() {
        return None;
    }
    let reason = plural("forbidden AppArmor profile", "forbidden AppArmor profiles", shown.len());
    violation(reason, format!("{} must not set AppArmor profile type to {}", setters.join(" and "), quoted(shown)))
}

const DEFAULT_CAPABILITIES: [&str; 13] = [
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
];

/// Containers that add capabilities beyond those allowed, and which.
fn added<'a>(pod: &Pod<'a>, allowed: &[&str]) -> (Vec<&'a str>, BTreeSet<&'a str>) {
    let mut all = BTreeSet::new();
    let mut bad = Vec::new();
    for (name, container) in pod.containers() {
        let capabilities = &container["securityContext"]["capabilities"];
        let added = items(capabilities, "add").filter_map(Value::as_str);
        let mut any = false;
        for capability in added.filter(|capability| !allowed.contains(capability)) {
            any = true;
            all.insert(capability);
        }
        if any {
            bad.push(name);
        }
    }
    (bad, all)
}

fn capabilities_baseline(pod: &Pod<'_>) -> Option<Violation> {
    let (bad, all) = added(pod, &DEFAULT_CAPABILITIES);
    if bad.is_empty() {
        return None;
    }
    let detail = format!("{} must not include {} in securityContext.capabilities.add", named(&bad), quoted(all));
    violation("non-default capabilities", detail)
}

fn capabilities_restricted(pod: &Pod<'_>) -> Option<Violation> {
    if pod.version >= 25 && pod.windows() {
        return None;
    }
    let keeps = |container: &Value| {
        let capabilities = &container["securityContext"]["capabilities"];
        !items(capabilities, "drop").any(|capability| capability == "ALL")
    };
    let missing = pod.bad(keeps);
    let (bad, all) = added(pod, &["NET_BIND_SERVICE"]);
    let mut details = Vec::new();
    if !missing.is_empty() {
        details.push(format!("{} must set securityContext.capabilities.drop=[\"ALL\"]", named(&missing)));
    }
    if !bad.is_empty() {
        let all = quoted(all);
        details.push(format!("{} must not include {all} in securityContext.capabilities.add", named(&bad)));
    }
    if details.is_empty() {
        return None;
    }
    violation("unrestricted capabilities", details.join("; "))
}

fn host_namespaces(pod: &Pod<'_>) -> Option<Violation> {
    let set: Vec<String> = ["hostNetwork", "hostPID", "hostIPC"]
        .into_iter()
        .filter(|field| pod.spec[field] == true)
        .map(|field| format!("{field}=true"))
        .collect();
    if set.is_empty() {
        return None;
    }
    violation("host namespaces", set.join(", "))
}

fn host_path_volumes(pod: &Pod<'_>) -> Option<Violation> {
    let volumes = items(pod.spec, "volumes").filter(|volume| volume["hostPath"].is_object());
    let names: Vec<&str> = volumes.map(|volume| text(volume, "name")).collect();
    if names.is_empty() {
        return None;
    }
    let detail = format!("{} {}", plural("volume", "volumes", names.len()), quoted(names));
    violation("hostPath volumes", detail)
}

fn host_ports(pod: &Pod<'_>) -> Option<Violation> {
    let of = |container: &Value| -> Vec<String> {
        let ports = items(container, "ports").filter_map(|port| port["hostPort"].as_i64());
        ports.filter(|port| *port != 0).map(|port| port.to_string()).collect()
    };
    let ports: BTreeSet<String> = pod.containers().flat_map(|(_, container)| of(container)).collect();
    let bad = pod.bad(|container| !of(container).is_empty());
    if bad.is_empty() {
        return None;
    }
    let uses = plural("uses", "use", bad.len());
    let word = plural("hostPort", "hostPorts", ports.len());
    let list = ports.into_iter().collect::<Vec<_>>().join(", ");
    violation("hostPort", format!("{} {uses} {word} {list}", named(&bad)))
}

fn host_probes(pod: &Pod<'_>) -> Option<Violation> {
    let (mut bad, mut hosts) = (BTreeSet::new(), BTreeSet::new());
    for (name, container) in pod.containers() {
        let lifecycle = &container["lifecycle"];
        let handlers = [
            &container["livenessProbe"],
            &container["readinessProbe"],
            &container["startupProbe"],
            &lifecycle["postStart"],
            &lifecycle["preStop"],
        ];
        for handler in handlers {
            for action in ["httpGet", "tcpSocket"] {
                let host = text(&handler[action], "host");
                if !host.is_empty() {
                    bad.insert(name);
                    hosts.insert(host);
                }
            }
        }
    }
    if bad.is_empty() {
        return None;
    }
    let bad: Vec<&str> = bad.into_iter().collect();
    let uses = plural("uses", "use", bad.len());
    let word = plural("probe or lifecycle host", "probe or lifecycle hosts", hosts.len());
    violation("probe or lifecycle host", format!("{} {uses} {word} {}", named(&bad), quoted(hosts)))
}

fn privileged(pod: &Pod<'_>) -> Option<Violation> {
    let bad = pod.bad(|container| container["securityContext"]["privileged"] == true);
    if bad.is_empty() {
        return None;
    }
    violation("privileged", format!("{} must not set securityContext.privileged=true", named(&bad)))
}

fn proc_mount(pod: &Pod<'_>) -> Option<Violation> {
    let mount = |container: &Value| {
        let mount = container["securityContext"]["procMount"].as_str().filter(|mount| *mount != "Default");
        mount.map(str::to_owned)
    };
    let bad = pod.bad(|container| mount(container).is_some());
    if bad.is_empty() {
        return None;
    }
    let values: BTreeSet<String> = pod.containers().filter_map(|(_, container)| mount(container)).collect();
    violation("procMount", format!("{} must not set securityContext.procMount to {}", named(&bad), quoted(values)))
}

fn proc_mount_baseline(pod: &Pod<'_>) -> Option<Violation> {
    if pod.relaxed() { None } else { proc_mount(pod) }
}

fn se_linux(pod: &Pod<'_>) -> Option<Violation> {
    let mut types = BTreeSet::new();
    let (mut user, mut role) = (false, false);
    let mut forbidden = |context: &Value| {
        let options = &context["seLinuxOptions"];
        let kind = text(options, "type");
        let allowed = matches!(kind, "" | "container_t" | "container_init_t" | "container_kvm_t")
            || (kind == "container_engine_t" && pod.version >= 31);
        if !allowed {
            types.insert(kind.to_owned());
        }
        let sets = |field: &str| !text(options, field).is_empty();
        user |= sets("user");
        role |= sets("role");
        !allowed || sets("user") || sets("role")
    };
    let by_pod = forbidden(pod.security());
    let mut bad = Vec::new();
    for (name, container) in pod.containers() {
        if forbidden(&container["securityContext"]) {
            bad.push(name);
        }
    }
    let setters = setters(by_pod, &bad);
    if setters.is_empty() {
        return None;
    }
    let mut data = Vec::new();
    if !types.is_empty() {
        data.push(format!("{} {}", plural("type", "types", types.len()), quoted(types)));
    }
    if user {
        data.push("user may not be set".to_owned());
    }
    if role {
        data.push("role may not be set".to_owned());
    }
    let detail = format!(
        "{} set forbidden securityContext.seLinuxOptions: {}",
        setters.join(" and "),
        data.join("; ")
    );
    violation("seLinuxOptions", detail)
}

fn bad_seccomp(context: &Value) -> Option<&str> {
    let profile = &context["seccompProfile"];
    let kind = text(profile, "type");
    (profile.is_object() && !matches!(kind, "Localhost" | "RuntimeDefault")).then_some(kind)
}

/// Explicitly bad seccomp profiles, in the words common to both levels.
fn seccomp_explicit(pod: &Pod<'_>) -> Option<Violation> {
    let by_pod = bad_seccomp(pod.security());
    let bad = pod.bad(|container| bad_seccomp(&container["securityContext"]).is_some());
    let setters = setters(by_pod.is_some(), &bad);
    if setters.is_empty() {
        return None;
    }
    let own = pod.containers().filter_map(|(_, container)| bad_seccomp(&container["securityContext"]));
    let values: BTreeSet<&str> = by_pod.into_iter().chain(own).collect();
    let (setters, values) = (setters.join(" and "), quoted(values));
    violation("seccompProfile", format!("{setters} must not set securityContext.seccompProfile.type to {values}"))
}

fn seccomp_annotations(pod: &Pod<'_>) -> Option<Violation> {
    let own = |key: &str| {
        key == "seccomp.security.alpha.kubernetes.io/pod"
            || key
                .strip_prefix("container.seccomp.security.alpha.kubernetes.io/")
                .is_some_and(|name| pod.containers().any(|(known, _)| known == name))
    };
    let bad: BTreeSet<String> = pod
        .annotations()
        .filter(|(key, _)| own(key))
        .filter(|(_, value)| !matches!(*value, "runtime/default" | "docker/default") && !value.starts_with("localhost/"))
        .map(|(key, value)| format!("{key}={value:?}"))
        .collect();
    if bad.is_empty() {
        return None;
    }
    let word = plural("annotation", "annotations", bad.len());
    violation("seccompProfile", format!("forbidden {word} {}", bad.into_iter().collect::<Vec<_>>().join(", ")))
}

fn seccomp_baseline(pod: &Pod<'_>) -> Option<Violation> {
    if pod.version < 19 { seccomp_annotations(pod) } else { seccomp_explicit(pod) }
}

fn seccomp_restricted(pod: &Pod<'_>) -> Option<Violation> {
    if pod.version >= 25 && pod.windows() {
        return None;
    }
    if let Some(explicit) = seccomp_explicit(pod) {
        return Some(explicit);
    }
    if pod.security()["seccompProfile"].is_object() {
        return None;
    }
    let bad = pod.bad(|container| !container["securityContext"]["seccompProfile"].is_object());
    if bad.is_empty() {
        return None;
    }
    let must = "must set securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\"";
    violation("seccompProfile", format!("pod or {} {must}", named(&bad)))
}

/// Safe sysctls and the version that first allowed each.
const SYSCTLS: [(&str, Minor); 14] = [
    ("kernel.shm_rmid_forced", 0),
    ("net.ipv4.ip_local_port_range", 0),
    ("net.ipv4.tcp_syncookies", 0),
    ("net.ipv4.ping_group_range", 0),
    ("net.ipv4.ip_unprivileged_port_start", 0),
    ("net.ipv4.ip_local_reserved_ports", 27),
    ("net.ipv4.tcp_keepalive_time", 29),
    ("net.ipv4.tcp_fin_timeout", 29),
    ("net.ipv4.tcp_keepalive_intvl", 29),
    ("net.ipv4.tcp_keepalive_probes", 29),
    ("net.ipv4.tcp_rmem", 32),
    ("net.ipv4.tcp_wmem", 32),
    ("net.ipv4.tcp_slow_start_after_idle", 37),
    ("net.ipv4.tcp_notsent_lowat", 37),
];

fn sysctls(pod: &Pod<'_>) -> Option<Violation> {
    let allowed = |name: &str| SYSCTLS.iter().any(|(known, since)| *known == name && *since <= pod.version);
    let names = items(pod.security(), "sysctls").map(|sysctl| text(sysctl, "name"));
    let bad: Vec<&str> = names.filter(|name| !allowed(name)).collect();
    if bad.is_empty() {
        return None;
    }
    violation("forbidden sysctls", bad.join(", "))
}

fn host_process(pod: &Pod<'_>) -> Option<Violation> {
    let sets = |context: &Value| context["windowsOptions"]["hostProcess"] == true;
    let bad = pod.bad(|container| sets(&container["securityContext"]));
    let setters = setters(sets(pod.security()), &bad);
    if setters.is_empty() {
        return None;
    }
    let detail = format!("{} must not set securityContext.windowsOptions.hostProcess=true", setters.join(" and "));
    violation("hostProcess", detail)
}

fn privilege_escalation(pod: &Pod<'_>) -> Option<Violation> {
    if pod.version >= 25 && pod.windows() {
        return None;
    }
    let bad = pod.bad(|container| container["securityContext"]["allowPrivilegeEscalation"] != false);
    if bad.is_empty() {
        return None;
    }
    let detail = format!("{} must set securityContext.allowPrivilegeEscalation=false", named(&bad));
    violation("allowPrivilegeEscalation != false", detail)
}

const RESTRICTED_VOLUMES: [&str; 21] = [
    "hostPath",
    "gcePersistentDisk",
    "awsElasticBlockStore",
    "gitRepo",
    "nfs",
    "iscsi",
    "glusterfs",
    "rbd",
    "flexVolume",
    "cinder",
    "cephfs",
    "flocker",
    "fc",
    "azureFile",
    "vsphereVolume",
    "quobyte",
    "azureDisk",
    "photonPersistentDisk",
    "portworxVolume",
    "scaleIO",
    "storageos",
];

fn restricted_volumes(pod: &Pod<'_>) -> Option<Violation> {
    let allowed = [
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    ];
    let has = |volume: &Value, kind: &str| volume.get(kind).is_some_and(|source| !source.is_null());
    let bad: Vec<&Value> =
        items(pod.spec, "volumes").filter(|volume| !allowed.iter().any(|kind| has(volume, kind))).collect();
    if bad.is_empty() {
        return None;
    }
    let kind = |volume: &&Value| *RESTRICTED_VOLUMES.iter().find(|kind| has(volume, kind)).unwrap_or(&"unknown");
    let kinds: BTreeSet<&str> = bad.iter().map(kind).collect();
    let names: Vec<&str> = bad.iter().map(|volume| text(volume, "name")).collect();
    let volumes = plural("volume", "volumes", names.len());
    let uses = plural("uses", "use", names.len());
    let word = plural("restricted volume type", "restricted volume types", kinds.len());
    let detail = format!("{volumes} {} {uses} {word} {}", quoted(&names), quoted(kinds));
    violation("restricted volume types", detail)
}

fn run_as_non_root(pod: &Pod<'_>) -> Option<Violation> {
    if pod.relaxed() {
        return None;
    }
    let of = |context: &Value| context["runAsNonRoot"].as_bool();
    let explicit = pod.bad(|container| of(&container["securityContext"]) == Some(false));
    let setters = setters(of(pod.security()) == Some(false), &explicit);
    if !setters.is_empty() {
        let detail = format!("{} must not set securityContext.runAsNonRoot=false", setters.join(" and "));
        return violation("runAsNonRoot != true", detail);
    }
    if of(pod.security()) == Some(true) {
        return None;
    }
    let implicit = pod.bad(|container| of(&container["securityContext"]).is_none());
    if implicit.is_empty() {
        return None;
    }
    let detail = format!("pod or {} must set securityContext.runAsNonRoot=true", named(&implicit));
    violation("runAsNonRoot != true", detail)
}

fn run_as_user(pod: &Pod<'_>) -> Option<Violation> {
    if pod.relaxed() {
        return None;
    }
    let root = |context: &Value| context["runAsUser"] == 0;
    let bad = pod.bad(|container| root(&container["securityContext"]));
    let setters = setters(root(pod.security()), &bad);
    if setters.is_empty() {
        return None;
    }
    violation("runAsUser=0", format!("{} must not set runAsUser=0", setters.join(" and ")))
}
