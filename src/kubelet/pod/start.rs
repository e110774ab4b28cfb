//! Starting a pod's sandbox and containers.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{ConfigMap, Container as Spec, Pod, Secret};
use tokio::sync::{mpsc, watch};
use windlass_client::events::EventType;

use super::actor::Msg;
use super::build::{self, Parts};
use super::env;
use super::model::{self, Kind};
use super::names;
use super::status::Why;
use super::stop::{self, Order};
use crate::cgroup;
use crate::metrics;
use crate::pod::resources;
use crate::runtime::{Error, Mount};
use crate::shared::Shared;
use crate::volumes::{self, Mounted, Setup, subpath};

/// How long a PostStart hook may take; it has no limit upstream, but ours must end some day.
const POST_START_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// What a sandbox attempt came to.
#[derive(Debug)]
pub enum SandboxFailure {
    /// A `FailedMount` event.
    Volumes(String),
    /// A `FailedCreatePodSandBox` event.
    Sandbox(String),
}

/// Sets up volumes, makes the sandbox and wires it. Returns the pod's addresses and volumes.
pub async fn sandbox(shared: &Arc<Shared>, pod: &Pod, attempt: u32) -> Result<(Vec<String>, Setup), SandboxFailure> {
    let begun = Instant::now();
    let uid = model::uid(pod);
    let io = |e: std::io::Error| SandboxFailure::Sandbox(e.to_string());
    std::fs::create_dir_all(shared.pod_dir(uid)).map_err(io)?;
    let setup = shared.volumes.setup(pod, &shared.env_runtime(&[])).await.map_err(SandboxFailure::Volumes)?;
    let made = make_sandbox(shared, pod, attempt).await;
    let handler = "";
    match made {
        Ok(addresses) => {
            metrics::RUN_SANDBOX.with_label_values(&[handler]).observe(begun.elapsed().as_secs_f64());
            Ok((addresses, setup))
        }
        Err(e) => {
            metrics::RUN_SANDBOX_ERRORS.with_label_values(&[handler]).inc();
            Err(SandboxFailure::Sandbox(e))
        }
    }
}

async fn make_sandbox(shared: &Arc<Shared>, pod: &Pod, attempt: u32) -> Result<Vec<String>, String> {
    let (hostname, _) = names::hostname(pod, &shared.config.cluster_domain, &shared.node_name)?;
    let image = shared.pause_image().await.map_err(|e| e.to_string())?;
    let settings = shared.settings_with_handler(pod).await?;
    let config = build::sandbox(pod, &image, &hostname, attempt, &settings);
    let id = match shared.runtime.create(&config).await {
        // Somebody removed the infra image: it is put back.
        Err(Error::NotFound { .. } | Error::Refused { code: 404, .. }) => {
            shared.reload_pause_image().await.map_err(|e| e.to_string())?;
            shared.runtime.create(&config).await
        }
        other => other,
    }
    .map_err(|e| format!("failed to create a sandbox for pod \"{}\": {e}", model::name(pod)))?;
    let started = start_sandbox(shared, pod, &id).await;
    if started.is_err() {
        let _ = shared.network.detach(model::uid(pod)).await;
        if let Err(error) = shared.runtime.remove(&id).await {
            tracing::warn!(pod = model::describe(pod), %error, "cannot remove a sandbox that could not be set up");
        }
    }
    started
}

async fn start_sandbox(shared: &Arc<Shared>, pod: &Pod, id: &str) -> Result<Vec<String>, String> {
    let fail = |e: Error| format!("failed to start sandbox for pod \"{}\": {e}", model::name(pod));
    shared.runtime.start(id).await.map_err(fail)?;
    let found = shared.runtime.inspect(id).await.map_err(fail)?;
    if !found.running() {
        return Err(format!("sandbox of pod \"{}\" has ended at once: exit code {} {}", model::name(pod), found.exit_code, found.error));
    }
    let limits = resources::of_pod(pod, shared.config.pod_pids_limit);
    if let Err(error) = cgroup::apply(&shared.cgroup_parent(pod), &limits) {
        tracing::warn!(pod = model::describe(pod), %error, "cannot set the limits of the pod as a whole");
    }
    if model::host_network(pod) {
        return Ok(Vec::new());
    }
    let netns = PathBuf::from(format!("/proc/{}/ns/net", found.pid));
    let wired = shared.network.attach(pod, netns).await;
    wired.map_err(|e| format!("failed to set up network for pod \"{}_{}\": {e}", model::name(pod), model::namespace(pod)))
}

/// A run through the containers that are to be started, in order.
pub struct Batch {
    pub pod: Arc<Pod>,
    pub names: Vec<String>,
    pub sandbox: String,
    pub addresses: Vec<String>,
    /// Attempt number by container name.
    pub attempts: HashMap<String, u32>,
    /// Runtime ids of running containers by name, for `targetContainerName`.
    pub running: HashMap<String, String>,
}

/// Starts the containers of a batch, telling the actor of each.
pub async fn run(shared: Arc<Shared>, batch: Batch, tell: mpsc::Sender<Msg>) {
    match shared.volumes.setup(&batch.pod, &shared.env_runtime(&batch.addresses)).await {
        Err(error) => {
            shared.event(&batch.pod, None, EventType::Warning, "FailedMount", error.clone());
            let _ = tell.send(Msg::BatchDone { retry: true }).await;
        }
        Ok(setup) => {
            let _ = tell.send(Msg::Volumes(Ok(setup.clone()))).await;
            for name in &batch.names {
                let Some((kind, spec)) = model::find(&batch.pod, name) else { continue };
                let result = one(&shared, &batch, kind, &spec, &setup, &tell).await;
                count(kind, &result);
                let failed = result.is_err();
                let _ = tell.send(Msg::Started { name: name.clone(), result }).await;
                if failed && kind == Kind::Init {
                    break;
                }
            }
            let _ = tell.send(Msg::BatchDone { retry: false }).await;
        }
    }
}

fn count(kind: Kind, result: &Result<(), Why>) {
    let label = match kind {
        Kind::Init | Kind::Sidecar => "init_container",
        Kind::Regular => "container",
        Kind::Ephemeral => "ephemeral_container",
    };
    metrics::STARTED_CONTAINERS.with_label_values(&[label]).inc();
    if let Err(why) = result {
        metrics::STARTED_CONTAINERS_ERRORS.with_label_values(&[label, &why.reason]).inc();
    }
}

async fn one(shared: &Arc<Shared>, batch: &Batch, kind: Kind, spec: &Spec, setup: &Setup, tell: &mpsc::Sender<Msg>) -> Result<(), Why> {
    let pod = &batch.pod;
    let fail = |why: Why| {
        shared.event(pod, Some(&spec.name), EventType::Warning, "Failed", format!("Error: {}", if why.message.is_empty() { &why.reason } else { &why.message }));
        why
    };
    let image = match shared.images.ensure(shared, pod, spec).await {
        Ok(image) => image,
        Err(why) => {
            shared.event(pod, Some(&spec.name), EventType::Warning, "Failed", format!("Error: {}", why.reason));
            return Err(why);
        }
    };
    let attempt = batch.attempts.get(&spec.name).copied().unwrap_or(0);
    let config = prepare(shared, batch, kind, spec, setup, &image, attempt).await.map_err(fail)?;
    let id = shared.runtime.create(&config).await.map_err(|e| fail(Why::new("CreateContainerError", e.to_string())))?;
    shared.event(pod, Some(&spec.name), EventType::Normal, "Created", "Container created");
    let hook = spec.lifecycle.as_ref().and_then(|l| l.post_start.as_ref());
    if hook.is_some() {
        let _ = tell.send(Msg::Starting(id.clone())).await;
    }
    shared.runtime.start(&id).await.map_err(|e| fail(Why::new("RunContainerError", format!("failed to start container \"{id}\": {e}"))))?;
    shared.event(pod, Some(&spec.name), EventType::Normal, "Started", "Container started");
    if let Some(hook) = hook {
        let ip = batch.addresses.first().map(String::as_str).unwrap_or("");
        if let Err(error) = stop::run_hook(shared, pod, spec, &id, hook, ip, POST_START_TIMEOUT).await {
            shared.event(pod, Some(&spec.name), EventType::Warning, "FailedPostStartHook", "PostStartHook failed");
            if let Ok(container) = shared.runtime.inspect(&id).await {
                let (_keep, grace) = watch::channel(model::grace(pod));
                let order = Order { container, message: "FailedPostStartHook".into(), grace };
                if let Err(error) = stop::stop(shared, Some(pod), order, ip).await {
                    tracing::warn!(pod = model::describe(pod), container = spec.name, %error, "cannot stop a container whose PostStart hook failed");
                }
            }
            return Err(Why::new("PostStartHookError", error));
        }
    }
    Ok(())
}

async fn prepare(
    shared: &Arc<Shared>,
    batch: &Batch,
    kind: Kind,
    spec: &Spec,
    setup: &Setup,
    image: &crate::runtime::Image,
    attempt: u32,
) -> Result<crate::runtime::ContainerConfig, Why> {
    let pod = &batch.pod;
    let config_error = |message: String| Why::new("CreateContainerConfigError", message);
    let env = environment(shared, batch, spec, &setup.volumes).await.map_err(config_error)?;
    let files = write_files(shared, batch, spec, attempt).map_err(|e| config_error(e.to_string()))?;
    let mounts = resolve_mounts(shared, pod, spec, &setup.volumes, &env)?;
    if spec.volume_devices.as_ref().is_some_and(|d| !d.is_empty()) {
        return Err(config_error("volumeDevices (block volumes) are not supported by this node".into()));
    }
    let target = match model::ephemeral_containers(pod).iter().find(|e| e.name == spec.name).and_then(|e| e.target_container_name.as_deref()).filter(|t| !t.is_empty()) {
        Some(name) => Some(batch.running.get(name).cloned().ok_or_else(|| config_error(format!("unable to find target container \"{name}\"")))?),
        None => None,
    };
    let parts = Parts {
        pod,
        container: spec,
        kind,
        image,
        sandbox: &batch.sandbox,
        attempt,
        env,
        mounts,
        hosts_file: files.hosts,
        resolv_file: Some(files.resolv),
        termination_file: files.termination,
        target,
    };
    let settings = shared.settings_with_handler(pod).await.map_err(config_error)?;
    let mut config = build::container(&parts, &settings)?;
    // Docker shows the image as it was asked for; by name where the name means this image.
    config.image = spec.image.clone().unwrap_or_default();
    Ok(config)
}

struct Files {
    hosts: Option<String>,
    resolv: String,
    termination: String,
}

/// Our own `/etc/hosts`, `/etc/resolv.conf` and termination file.
fn write_files(shared: &Shared, batch: &Batch, spec: &Spec, attempt: u32) -> std::io::Result<Files> {
    let pod = &batch.pod;
    let dir = shared.pod_dir(model::uid(pod));
    let (hostname, domain) = names::hostname(pod, &shared.config.cluster_domain, &shared.node_name).map_err(std::io::Error::other)?;
    let node_hosts = if model::host_network(pod) { std::fs::read_to_string("/etc/hosts").unwrap_or_default() } else { String::new() };
    let hosts_path = dir.join("etc-hosts");
    volumes::write_whole(&hosts_path, &names::hosts(pod, &batch.addresses, &hostname, &domain, &node_hosts), 0o644)?;
    let (dns, warnings) = names::dns(pod, &shared.host_dns, &shared.config.cluster_dns, &shared.config.cluster_domain);
    for warning in warnings {
        let reason = if warning.starts_with("kubelet does not have") { "MissingClusterDNS" } else { "DNSConfigForming" };
        shared.event(pod, None, EventType::Warning, reason, warning);
    }
    let resolv_path = dir.join("resolv.conf");
    volumes::write_whole(&resolv_path, &dns.render(), 0o644)?;
    let container_dir = dir.join("containers").join(&spec.name);
    std::fs::create_dir_all(&container_dir)?;
    let termination = container_dir.join(format!("termination-{attempt}"));
    std::fs::write(&termination, "")?;
    std::fs::set_permissions(&termination, std::os::unix::fs::PermissionsExt::from_mode(0o666))?;
    let text = |p: PathBuf| p.display().to_string();
    Ok(Files { hosts: Some(text(hosts_path)), resolv: text(resolv_path), termination: text(termination) })
}

fn resolve_mounts(shared: &Shared, pod: &Pod, spec: &Spec, volumes: &HashMap<String, Mounted>, env: &[(String, String)]) -> Result<Vec<Mount>, Why> {
    let mut mounts = Vec::new();
    for (index, wanted) in spec.volume_mounts.iter().flatten().enumerate() {
        let (volume, sub, mut mount) = build::volume_mount(wanted, volumes, env)?;
        if let Some(sub) = sub {
            let target = shared.pod_dir(model::uid(pod)).join("volume-subpaths").join(&wanted.name).join(&spec.name).join(index.to_string());
            subpath::pin(&volume.path, &sub, &target)
                .map_err(|e| Why::new("CreateContainerConfigError", format!("failed to prepare subPath for volumeMount \"{}\" of container \"{}\": {e}", wanted.name, spec.name)))?;
            mount.host_path = target.display().to_string();
        }
        mounts.push(mount);
    }
    Ok(mounts)
}

/// Objects that a container's environment refers to, read beforehand.
struct Read<'a> {
    config_maps: HashMap<String, Option<Arc<ConfigMap>>>,
    secrets: HashMap<String, Option<Arc<Secret>>>,
    volumes: &'a HashMap<String, Mounted>,
}

impl env::Objects for Read<'_> {
    fn config_map(&self, name: &str) -> Result<Option<Arc<ConfigMap>>, String> {
        Ok(self.config_maps.get(name).cloned().flatten())
    }
    fn secret(&self, name: &str) -> Result<Option<Arc<Secret>>, String> {
        Ok(self.secrets.get(name).cloned().flatten())
    }
    fn file_key(&self, volume: &str, path: &str, key: &str) -> Result<Option<String>, String> {
        let volume_path = &self.volumes.get(volume).ok_or_else(|| format!("cannot find the volume \"{volume}\" referenced by FileKeyRef"))?.path;
        let fd = match subpath::open_existing(volume_path, path) {
            Ok(fd) => fd,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(format!("couldn't parse env file: {e}")),
        };
        Ok(env::parse_env_file(&subpath::read(&fd, 64 * 1024).map_err(|e| format!("couldn't parse env file: {e}"))?, key))
    }
}

async fn environment(shared: &Arc<Shared>, batch: &Batch, spec: &Spec, volumes: &HashMap<String, Mounted>) -> Result<Vec<(String, String)>, String> {
    let pod = &batch.pod;
    if !model::is_static(pod) && tokio::time::timeout(Duration::from_secs(10), shared.services.synced()).await.is_err() {
        return Err("services have not yet been read at least once, cannot construct envvars".into());
    }
    let mut read = Read { config_maps: HashMap::new(), secrets: HashMap::new(), volumes };
    let sources = spec.env.iter().flatten().filter_map(|v| v.value_from.as_ref());
    let from_maps = spec.env_from.iter().flatten().filter_map(|e| e.config_map_ref.as_ref().map(|r| r.name.clone()));
    let maps: Vec<String> = sources.clone().filter_map(|s| s.config_map_key_ref.as_ref().map(|r| r.name.clone())).chain(from_maps).collect();
    let from_secrets = spec.env_from.iter().flatten().filter_map(|e| e.secret_ref.as_ref().map(|r| r.name.clone()));
    let secrets: Vec<String> = sources.filter_map(|s| s.secret_key_ref.as_ref().map(|r| r.name.clone())).chain(from_secrets).collect();
    for name in maps {
        let found = shared.objects.config_map(model::uid(pod), model::namespace(pod), &name).await?;
        read.config_maps.insert(name, found);
    }
    for name in secrets {
        let found = shared.objects.secret(model::uid(pod), model::namespace(pod), &name).await?;
        read.secrets.insert(name, found);
    }
    let services = shared.service_variables(pod);
    let addresses = if model::host_network(pod) { shared.host_ips.read().clone() } else { batch.addresses.clone() };
    env::environment(pod, spec, &services, &read, &shared.env_runtime(&addresses))
}
