//! Security contexts of pods and containers.

use crate::strategy::at::At;
use crate::strategy::pod::volumes::descending;

const MAX_ID: i64 = i32::MAX as i64;
const SYSCTL_MAX: usize = 253;
const SYSCTL_FMT: &str = "^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$";

fn id(at: &At<'_>) {
    at.in_range(0, MAX_ID);
}

/// A container's `securityContext`.
pub fn container(sc: &At<'_>, host_users: bool) {
    if !sc.present() {
        return;
    }
    id(&sc.at("runAsUser"));
    id(&sc.at("runAsGroup"));
    let proc_mount = sc.at("procMount");
    if proc_mount.present() {
        if !matches!(proc_mount.str(), "Default" | "Unmasked") {
            proc_mount.not_supported(&["Default", "Unmasked"]);
        }
        if host_users && proc_mount.str() == "Unmasked" {
            proc_mount.invalid("`hostUsers` must be false to use `Unmasked`");
        }
    }
    seccomp(&sc.at("seccompProfile"));
    app_armor(&sc.at("appArmorProfile"));
    if sc.at("allowPrivilegeEscalation").value == false && sc.flag("privileged") {
        sc.invalid("cannot set `allowPrivilegeEscalation` to false and `privileged` to true");
    }
}

/// A pod's `securityContext`; `spec` tells which of the host's namespaces it shares.
pub fn pod(sc: &At<'_>, spec: &At<'_>) {
    if !sc.present() {
        return;
    }
    for field in ["fsGroup", "runAsUser", "runAsGroup"] {
        id(&sc.at(field));
    }
    sc.at("supplementalGroups").each(id);
    sysctls(&sc.at("sysctls"), spec);
    sc.at("fsGroupChangePolicy").optional_one_of(&["Always", "OnRootMismatch"]);
    seccomp(&sc.at("seccompProfile"));
    app_armor(&sc.at("appArmorProfile"));
    sc.at("supplementalGroupsPolicy").optional_one_of(&["Merge", "Strict"]);
    sc.at("seLinuxChangePolicy").optional_one_of(&["MountOption", "Recursive"]);
}

fn sysctl_name(name: &str) -> bool {
    name.len() <= SYSCTL_MAX
        && name.split(['.', '/']).all(|part| {
            let b = part.as_bytes();
            let edge = |c: &u8| c.is_ascii_lowercase() || c.is_ascii_digit();
            b.first().is_some_and(edge)
                && b.last().is_some_and(edge)
                && b.iter().all(|c| edge(c) || matches!(c, b'-' | b'_'))
        })
}

fn sysctls(at: &At<'_>, spec: &At<'_>) {
    let mut seen: Vec<String> = Vec::new();
    for s in at.items() {
        let name = s.at("name");
        if name.is_empty() {
            name.required("");
        } else if !sysctl_name(name.str()) {
            name.invalid(format!("must have at most {SYSCTL_MAX} characters and match regex {SYSCTL_FMT}"));
        } else if seen.iter().any(|n| n == name.str()) {
            name.duplicate();
        }
        let dotted = name.str().replace('/', ".");
        let ipc = dotted.starts_with("kernel.shm")
            || dotted.starts_with("kernel.msg")
            || dotted == "kernel.sem"
            || dotted.starts_with("fs.mqueue.");
        if spec.flag("hostNetwork") && dotted.starts_with("net.") {
            name.invalid("may not be specified when 'hostNetwork' is true");
        } else if spec.flag("hostIPC") && ipc {
            name.invalid("may not be specified when 'hostIPC' is true");
        }
        seen.push(name.str().to_owned());
    }
}

fn seccomp(at: &At<'_>) {
    if !at.present() {
        return;
    }
    let kind = at.at("type");
    if kind.is_empty() {
        kind.required("type is required when seccompProfile is set");
    } else {
        kind.one_of(&["Localhost", "RuntimeDefault", "Unconfined"]);
    }
    let profile = at.at("localhostProfile");
    match (kind.str() == "Localhost", profile.present()) {
        (true, false) => profile.required("must be set when seccomp type is Localhost"),
        (true, true) => descending(&profile),
        (false, true) => profile.invalid_value(at.value.clone(), "can only be set when seccomp type is Localhost"),
        (false, false) => {}
    }
}

fn app_armor(at: &At<'_>) {
    const MAX: usize = 4095;
    if !at.present() {
        return;
    }
    let (kind, profile) = (at.at("type"), at.at("localhostProfile"));
    match kind.str() {
        "Localhost" => {
            if profile.str().trim() != profile.str() {
                profile.invalid("must not be padded with whitespace");
            } else if profile.is_empty() {
                profile.required("must be set when AppArmor type is Localhost");
            }
            if profile.str().len() > MAX {
                profile.too_long(MAX);
            }
        }
        "RuntimeDefault" | "Unconfined" => {
            if profile.present() {
                profile.invalid("can only be set when AppArmor type is Localhost");
            }
        }
        "" => kind.required("type is required when appArmorProfile is set"),
        _ => kind.not_supported(&["Localhost", "RuntimeDefault", "Unconfined"]),
    }
}
