//! Turns a container of a pod into what the runtime is asked to create. Pure.

use std::collections::{BTreeMap, HashMap};

use k8s_openapi::api::core::v1::{Container, Pod, SeccompProfile, SecurityContext};

use super::env::expand;
use super::model::{self, Kind};
use super::resources;
use super::status::Why;
use crate::runtime::{ContainerConfig, Image, Mount, Namespace, Propagation, SANDBOX_NAME, Seccomp, label};
use crate::volumes::Mounted;

/// Settings of the kubelet that show in containers.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    pub cgroup_parent: String,
    pub node_memory: i64,
    /// No container gets a lower OOM score adjustment.
    pub oom_floor: i64,
    pub pids_limit: i64,
    pub seccomp_default: bool,
    /// Where localhost profiles live.
    pub seccomp_dir: std::path::PathBuf,
    pub log_max_size: i64,
    pub log_max_files: u32,
    pub apparmor: bool,
    pub selinux: bool,
    /// The OCI runtime of the pod's RuntimeClass, where it is not the default.
    pub handler: Option<String>,
}

/// What a container is made from, beside its specification.
#[derive(Clone, Debug)]
pub struct Parts<'a> {
    pub pod: &'a Pod,
    pub container: &'a Container,
    pub kind: Kind,
    pub image: &'a Image,
    pub sandbox: &'a str,
    pub attempt: u32,
    pub env: Vec<(String, String)>,
    /// Host paths of mounts, in the order of `volumeMounts`; subpaths are resolved already.
    pub mounts: Vec<Mount>,
    pub hosts_file: Option<String>,
    pub resolv_file: Option<String>,
    /// Host path of the termination message file.
    pub termination_file: String,
    /// The container whose process namespace an ephemeral container joins.
    pub target: Option<String>,
}

fn labels(pod: &Pod, kind: &str, name: &str, attempt: u32, hash: String) -> BTreeMap<String, String> {
    // The pod's own labels are not copied: they change, a container's do not.
    BTreeMap::from([
        (label::TYPE.to_owned(), kind.to_owned()),
        (label::POD_NAME.to_owned(), model::name(pod).to_owned()),
        (label::POD_NAMESPACE.to_owned(), model::namespace(pod).to_owned()),
        (label::POD_UID.to_owned(), model::uid(pod).to_owned()),
        (label::CONTAINER_NAME.to_owned(), name.to_owned()),
        (label::ATTEMPT.to_owned(), attempt.to_string()),
        (label::HASH.to_owned(), hash),
        (label::GRACE.to_owned(), model::spec(pod).termination_grace_period_seconds.unwrap_or(30).to_string()),
    ])
}

fn unique_name(pod: &Pod, container: &str, attempt: u32) -> String {
    format!("k8s_{container}_{}_{}_{}_{attempt}", model::name(pod), model::namespace(pod), model::uid(pod))
}

/// The infra container, which holds the pod's namespaces.
pub fn sandbox(pod: &Pod, image: &str, hostname: &str, attempt: u32, settings: &Settings) -> ContainerConfig {
    let spec = model::spec(pod);
    let host = |flag: Option<bool>| if flag == Some(true) { Namespace::Host } else { Namespace::Own };
    let context = spec.security_context.as_ref();
    let sysctls = context.and_then(|c| c.sysctls.as_ref());
    ContainerConfig {
        unique_name: unique_name(pod, SANDBOX_NAME, attempt),
        labels: labels(pod, "sandbox", SANDBOX_NAME, attempt, String::new()),
        image: image.to_owned(),
        hostname: (!model::host_network(pod)).then(|| hostname.to_owned()),
        network: host(spec.host_network),
        ipc: host(spec.host_ipc),
        pid: host(spec.host_pid),
        no_new_privileges: true,
        seccomp: Seccomp::RuntimeDefault,
        resources: crate::runtime::Resources { cpu_shares: 2, ..Default::default() },
        oom_score_adj: resources::OOM_SANDBOX.max(settings.oom_floor),
        cgroup_parent: settings.cgroup_parent.clone(),
        handler: settings.handler.clone(),
        sysctls: sysctls.into_iter().flatten().map(|s| (s.name.replace('/', "."), s.value.clone())).collect(),
        log_max_size: settings.log_max_size,
        log_max_files: 1,
        ..Default::default()
    }
}

/// The configuration of a container.
///
/// # Errors
/// Reason and message of its waiting state.
pub fn container(parts: &Parts<'_>, settings: &Settings) -> Result<ContainerConfig, Why> {
    let Parts { pod, container, .. } = parts;
    let spec = model::spec(pod);
    let user = user(pod, container, parts.image)?;
    let context = container.security_context.clone().unwrap_or_default();
    refuse_unsupported(pod, &context)?;
    let values: HashMap<&str, &str> = parts.env.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    let lookup = |name: &str| values.get(name).map(|v| (*v).to_owned());
    let expanded = |list: &Option<Vec<String>>| list.as_ref().filter(|l| !l.is_empty()).map(|l| l.iter().map(|t| expand(t, &lookup)).collect::<Vec<_>>());
    let share = |host: Option<bool>| if host == Some(true) { Namespace::Host } else { Namespace::Container(parts.sandbox.to_owned()) };
    let mut all_labels = labels(pod, "container", &container.name, parts.attempt, model::container_hash(container));
    all_labels.insert(label::SANDBOX.into(), parts.sandbox.into());
    all_labels.insert(label::TERMINATION_FILE.into(), parts.termination_file.clone());
    all_labels.insert(label::TERMINATION_POLICY.into(), container.termination_message_policy.clone().unwrap_or_else(|| "File".into()));
    let capabilities = context.capabilities.clone().unwrap_or_default();
    let privileged = context.privileged == Some(true);
    let working_dir = container.working_dir.clone().filter(|w| !w.is_empty());
    // With a command but no arguments, the image's own arguments are not used.
    let command = expanded(&container.command);
    let args = expanded(&container.args).or_else(|| command.is_some().then(Vec::new));
    Ok(ContainerConfig {
        unique_name: unique_name(pod, &container.name, parts.attempt),
        labels: all_labels,
        image: parts.image.id.clone(),
        command,
        args,
        env: parts.env.iter().map(|(k, v)| format!("{k}={v}")).collect(),
        working_dir,
        tty: container.tty == Some(true),
        stdin: container.stdin == Some(true),
        stdin_once: container.stdin_once == Some(true),
        user,
        groups: groups(pod),
        hostname: None,
        stop_signal: container.lifecycle.as_ref().and_then(|l| l.stop_signal.clone()),
        network: share(spec.host_network),
        ipc: share(spec.host_ipc),
        pid: process_namespace(parts),
        user_namespace_host: false,
        cap_add: capabilities.add.unwrap_or_default(),
        cap_drop: capabilities.drop.unwrap_or_default(),
        privileged,
        read_only_rootfs: context.read_only_root_filesystem == Some(true),
        no_new_privileges: no_new_privileges(&context),
        seccomp: seccomp(pod, &context, settings)?,
        selinux: if settings.selinux { selinux(pod, &context) } else { Vec::new() },
        handler: settings.handler.clone(),
        apparmor: apparmor(pod, &context, settings)?,
        unmasked_proc: context.proc_mount.as_deref() == Some("Unmasked"),
        mounts: mounts(parts),
        resources: resources::of_container(container, settings.pids_limit),
        oom_score_adj: resources::oom_score_adj(pod, container, settings.node_memory).max(settings.oom_floor),
        cgroup_parent: settings.cgroup_parent.clone(),
        sysctls: BTreeMap::new(),
        log_max_size: settings.log_max_size,
        log_max_files: settings.log_max_files,
    })
}

fn process_namespace(parts: &Parts<'_>) -> Namespace {
    let spec = model::spec(parts.pod);
    if let Some(target) = &parts.target {
        return Namespace::Container(target.clone());
    }
    if spec.host_pid == Some(true) {
        Namespace::Host
    } else if spec.share_process_namespace == Some(true) {
        Namespace::Container(parts.sandbox.to_owned())
    } else {
        Namespace::Own
    }
}

fn refuse_unsupported(pod: &Pod, context: &SecurityContext) -> Result<(), Why> {
    let spec = model::spec(pod);
    let fail = |what: &str| Err(Why::new("CreateContainerConfigError", format!("{what} is not supported by this node")));
    if spec.host_users == Some(false) {
        return fail("hostUsers: false (a user namespace per pod)");
    }
    let strict = spec.security_context.as_ref().and_then(|c| c.supplemental_groups_policy.as_deref()) == Some("Strict");
    if strict {
        return fail("supplementalGroupsPolicy: Strict");
    }
    if context.windows_options.is_some() {
        return fail("windowsOptions");
    }
    Ok(())
}

/// `uid[:gid]` of the container's process, with `runAsNonRoot` enforced.
fn user(pod: &Pod, container: &Container, image: &Image) -> Result<Option<String>, Why> {
    let pod_context = model::spec(pod).security_context.clone().unwrap_or_default();
    let context = container.security_context.clone().unwrap_or_default();
    let uid = context.run_as_user.or(pod_context.run_as_user);
    let gid = context.run_as_group.or(pod_context.run_as_group);
    let image_user = image.user.split(':').next().unwrap_or("");
    if context.run_as_non_root.or(pod_context.run_as_non_root) == Some(true) {
        let named = format!("(pod: \"{}\", container: {})", model::describe(pod), container.name);
        let fail = |message: String| Err(Why::new("CreateContainerConfigError", message));
        match (uid, image_user.parse::<i64>()) {
            (Some(0), _) => return fail(format!("container's runAsUser breaks non-root policy {named}")),
            (Some(_), _) => {}
            (None, Ok(0)) => return fail(format!("container has runAsNonRoot and image will run as root {named}")),
            (None, Ok(_)) => {}
            (None, Err(_)) if image_user.is_empty() => return fail(format!("container has runAsNonRoot and image will run as root {named}")),
            (None, Err(_)) => {
                return fail(format!("container has runAsNonRoot and image has non-numeric user ({image_user}), cannot verify user is non-root {named}"));
            }
        }
    }
    Ok(match (uid, gid) {
        (Some(uid), Some(gid)) => Some(format!("{uid}:{gid}")),
        (Some(uid), None) => Some(uid.to_string()),
        (None, Some(gid)) => Some(format!("{}:{gid}", if image_user.is_empty() { "0" } else { image_user })),
        (None, None) => None,
    })
}

fn groups(pod: &Pod) -> Vec<String> {
    let context = model::spec(pod).security_context.as_ref();
    let fs_group = context.and_then(|c| c.fs_group);
    let more = context.and_then(|c| c.supplemental_groups.as_ref()).into_iter().flatten().copied();
    fs_group.into_iter().chain(more).map(|g| g.to_string()).collect()
}

fn no_new_privileges(context: &SecurityContext) -> bool {
    context.allow_privilege_escalation == Some(false)
}

fn seccomp(pod: &Pod, context: &SecurityContext, settings: &Settings) -> Result<Seccomp, Why> {
    let profile: Option<&SeccompProfile> = context.seccomp_profile.as_ref().or_else(|| model::spec(pod).security_context.as_ref()?.seccomp_profile.as_ref());
    let Some(profile) = profile else {
        return Ok(if settings.seccomp_default { Seccomp::RuntimeDefault } else { Seccomp::Unconfined });
    };
    let fail = |message: String| Err(Why::new("CreateContainerConfigError", message));
    match profile.type_.as_str() {
        "RuntimeDefault" => Ok(Seccomp::RuntimeDefault),
        "Unconfined" => Ok(Seccomp::Unconfined),
        "Localhost" => {
            let name = profile.localhost_profile.as_deref().unwrap_or("");
            let relative = std::path::Path::new(name);
            let inside = !name.is_empty() && relative.components().all(|c| matches!(c, std::path::Component::Normal(_)));
            if !inside {
                return fail("localhostProfile must be set if seccompProfile type is Localhost".into());
            }
            let path = settings.seccomp_dir.join(relative);
            match std::fs::read_to_string(&path) {
                Ok(text) => Ok(Seccomp::Profile(text)),
                Err(e) => fail(format!("cannot load seccomp profile \"{}\": {e}", path.display())),
            }
        }
        other => fail(format!("seccomp profile type {other:?} is not known")),
    }
}

/// SELinux labels; a host without SELinux has no use for them, as upstream.
fn selinux(pod: &Pod, context: &SecurityContext) -> Vec<String> {
    let options = context.se_linux_options.as_ref().or_else(|| model::spec(pod).security_context.as_ref()?.se_linux_options.as_ref());
    let Some(options) = options else { return Vec::new() };
    [("user", &options.user), ("role", &options.role), ("type", &options.type_), ("level", &options.level)]
        .into_iter()
        .filter_map(|(key, value)| Some(format!("{key}:{}", value.as_deref().filter(|v| !v.is_empty())?)))
        .collect()
}

fn apparmor(pod: &Pod, context: &SecurityContext, settings: &Settings) -> Result<Option<String>, Why> {
    let profile = context.app_armor_profile.as_ref().or_else(|| model::spec(pod).security_context.as_ref()?.app_armor_profile.as_ref());
    let Some(profile) = profile else { return Ok(None) };
    match profile.type_.as_str() {
        "Unconfined" => Ok(settings.apparmor.then(|| "unconfined".to_owned())),
        _ if !settings.apparmor => Err(Why::new("CreateContainerConfigError", "cannot enforce AppArmor: AppArmor is not enabled on the host")),
        "RuntimeDefault" => Ok(None),
        "Localhost" => Ok(profile.localhost_profile.clone()),
        other => Err(Why::new("CreateContainerConfigError", format!("AppArmor profile type {other:?} is not known"))),
    }
}

fn mounts(parts: &Parts<'_>) -> Vec<Mount> {
    let mut mounts = parts.mounts.clone();
    let taken = |path: &str, mounts: &[Mount]| mounts.iter().any(|m| m.container_path.trim_end_matches('/') == path);
    let file = |host: &Option<String>, path: &str, mounts: &mut Vec<Mount>| {
        if let Some(host) = host
            && !taken(path, mounts)
        {
            mounts.push(Mount { host_path: host.clone(), container_path: path.into(), read_only: false, propagation: Propagation::Private });
        }
    };
    file(&parts.hosts_file, "/etc/hosts", &mut mounts);
    file(&parts.resolv_file, "/etc/resolv.conf", &mut mounts);
    let termination = parts.container.termination_message_path.as_deref().unwrap_or("/dev/termination-log");
    file(&Some(parts.termination_file.clone()), termination, &mut mounts);
    mounts
}

/// One `volumeMount`, before its subpath is resolved: the volume's name, the subpath and the mount's other settings.
///
/// # Errors
/// When the volume is not one of the pod's, or asks for what this node cannot do.
pub fn volume_mount(mount: &k8s_openapi::api::core::v1::VolumeMount, volumes: &HashMap<String, Mounted>, env: &[(String, String)]) -> Result<(Mounted, Option<String>, Mount), Why> {
    let fail = |message: String| Why::new("CreateContainerConfigError", message);
    let volume = volumes.get(&mount.name).ok_or_else(|| fail(format!("cannot find volume \"{}\" to mount into container", mount.name)))?;
    let sub = match mount.sub_path_expr.as_deref().filter(|e| !e.is_empty()) {
        Some(expression) => {
            let missing = std::cell::RefCell::new(None);
            let lookup = |name: &str| {
                let found = env.iter().find(|(k, _)| k == name).map(|(_, v)| v.clone());
                if found.is_none() {
                    missing.borrow_mut().get_or_insert_with(|| name.to_owned());
                }
                found
            };
            let text = expand(expression, &lookup);
            if let Some(name) = missing.into_inner() {
                return Err(fail(format!("missing value for \"{name}\"")));
            }
            Some(text)
        }
        None => mount.sub_path.clone().filter(|s| !s.is_empty()),
    };
    if let Some(sub) = &sub {
        let path = std::path::Path::new(sub);
        if path.is_absolute() || path.components().any(|c| c == std::path::Component::ParentDir) {
            return Err(fail(format!("error SubPath `{sub}` must not be an absolute path or contain `..`")));
        }
    }
    if mount.recursive_read_only.as_deref() == Some("Enabled") {
        return Err(fail("recursiveReadOnly: Enabled is not supported by this node's container runtime".into()));
    }
    let propagation = match mount.mount_propagation.as_deref() {
        Some("HostToContainer") => Propagation::HostToContainer,
        Some("Bidirectional") => Propagation::Bidirectional,
        _ => Propagation::Private,
    };
    let container_path = if mount.mount_path.starts_with('/') { mount.mount_path.clone() } else { format!("/{}", mount.mount_path) };
    let made = Mount {
        host_path: volume.path.display().to_string(),
        container_path,
        read_only: mount.read_only == Some(true) || volume.read_only,
        propagation,
    };
    Ok((volume.clone(), sub, made))
}

#[cfg(test)]
#[path = "build_tests.rs"]
mod tests;
