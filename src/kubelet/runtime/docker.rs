//! The Docker implementation of [`Runtime`], by bollard, with the API version negotiated.

use std::collections::{BTreeMap, HashMap};
use std::pin::Pin;
use std::time::Duration;

use async_trait::async_trait;
use bollard::Docker as Client;
use bollard::errors::Error as DockerError;
use bollard::models::{
    ContainerCreateBody, ContainerInspectResponse, ContainerStateStatusEnum, ContainerUpdateBody, HostConfig,
    HostConfigLogConfig, MountBindOptions, MountBindOptionsPropagationEnum, MountType, SystemInfoCgroupDriverEnum,
};
use bollard::query_parameters as query;
use bytes::Bytes;
use futures::{Stream, StreamExt, TryStreamExt};

use super::reference::Reference;
use super::{
    Container, ContainerConfig, Credentials, Error, Event, ExecOptions, Image, LogOptions, Logs, Namespace, Propagation,
    Resources, Result, Runtime, RuntimeInfo, SANDBOX_NAME, Seccomp, Session, SessionId, State, docker_stream, label,
};
use crate::metrics;

/// Requests that should answer at once are given this long.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);
/// The oldest API that has all we use (Docker 20.10).
const OLDEST_API: (usize, usize) = (1, 41);

/// A connection to one Docker daemon, on behalf of one Windlass instance.
#[derive(Clone)]
pub struct Docker {
    client: Client,
    endpoint: String,
    instance: String,
}

impl Docker {
    /// Connects and negotiates the API version. `endpoint` is `unix:///path` or `tcp://host:port`.
    /// `instance` tells our containers from those of another Windlass on the same daemon.
    pub async fn connect(endpoint: &str, instance: &str) -> Result<Self> {
        let unreachable = |e: DockerError| Error::Unreachable { endpoint: endpoint.to_owned(), message: e.to_string() };
        let client = if endpoint.starts_with("tcp://") || endpoint.starts_with("http://") {
            Client::connect_with_http(endpoint, REQUEST_TIMEOUT.as_secs(), bollard::API_DEFAULT_VERSION)
        } else {
            let path = endpoint.strip_prefix("unix://").unwrap_or(endpoint);
            Client::connect_with_unix(path, REQUEST_TIMEOUT.as_secs(), bollard::API_DEFAULT_VERSION)
        };
        let client = client.map_err(unreachable)?.negotiate_version().await.map_err(unreachable)?;
        let version = client.client_version();
        if (version.major_version, version.minor_version) < OLDEST_API {
            return Err(Error::Unsupported(format!(
                "Docker at {endpoint} speaks API {version}; 1.41 (Docker 20.10) or newer is needed"
            )));
        }
        Ok(Self { client, endpoint: endpoint.to_owned(), instance: instance.to_owned() })
    }

    fn error(&self, what: &'static str, id: &str, error: DockerError) -> Error {
        match error {
            DockerError::DockerResponseServerError { status_code: 404, message } => {
                if message.contains("No such") { Error::NotFound { what, id: id.to_owned() } } else { Error::Refused { code: 404, message } }
            }
            DockerError::DockerResponseServerError { status_code, message } => Error::Refused { code: status_code, message },
            DockerError::RequestTimeoutError => Error::Timeout { operation: "request to Docker", after: REQUEST_TIMEOUT },
            other => Error::Unreachable { endpoint: self.endpoint.clone(), message: other.to_string() },
        }
    }

    async fn call<T>(
        &self,
        operation: &'static str,
        id: &str,
        work: impl Future<Output = std::result::Result<T, DockerError>>,
    ) -> Result<T> {
        let timer = metrics::runtime_operation(operation);
        let result = work.await.map_err(|e| self.error(if operation.ends_with("image") { "image" } else { "container" }, id, e));
        timer.done(result.is_ok());
        result
    }

    async fn list_filtered(&self, filters: HashMap<String, Vec<String>>) -> Result<Vec<Container>> {
        let options = query::ListContainersOptions { all: true, filters: Some(filters), ..Default::default() };
        let found = self.call("list_containers", "", self.client.list_containers(Some(options))).await?;
        let ids: Vec<String> = found.into_iter().filter_map(|c| c.id).collect();
        let mut containers = Vec::with_capacity(ids.len());
        let mut inspections = futures::stream::iter(ids)
            .map(|id| async move { self.inspect(&id).await })
            .buffer_unordered(8);
        while let Some(result) = inspections.next().await {
            match result {
                Ok(container) => containers.push(container),
                Err(Error::NotFound { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(containers)
    }

    fn filters(&self, more: &[(&str, &str)]) -> HashMap<String, Vec<String>> {
        let mut filters = HashMap::new();
        filters.insert("label".to_owned(), vec![format!("{}={}", label::INSTANCE, self.instance)]);
        for (key, value) in more {
            filters.entry((*key).to_owned()).or_insert_with(Vec::new).push((*value).to_owned());
        }
        filters
    }
}

#[async_trait]
impl Runtime for Docker {
    fn scheme(&self) -> &'static str {
        "docker"
    }

    async fn info(&self) -> Result<RuntimeInfo> {
        let info = self.call("version", "", self.client.info()).await?;
        let options = info.security_options.unwrap_or_default();
        let has = |name: &str| options.iter().any(|o| o.contains(&format!("name={name}")));
        Ok(RuntimeInfo {
            name: "docker".into(),
            version: info.server_version.unwrap_or_default(),
            api_version: self.client.client_version().to_string(),
            cgroup_driver: match info.cgroup_driver {
                Some(SystemInfoCgroupDriverEnum::SYSTEMD) => "systemd".into(),
                _ => "cgroupfs".into(),
            },
            root_dir: info.docker_root_dir.unwrap_or_default(),
            kernel_version: info.kernel_version.unwrap_or_default(),
            operating_system: info.operating_system.unwrap_or_default(),
            architecture: info.architecture.unwrap_or_default(),
            apparmor: has("apparmor"),
            selinux: has("selinux"),
            seccomp: has("seccomp"),
            handlers: info.runtimes.unwrap_or_default().into_keys().collect(),
        })
    }

    async fn list(&self) -> Result<Vec<Container>> {
        self.list_filtered(self.filters(&[])).await
    }

    async fn list_pod(&self, uid: &str) -> Result<Vec<Container>> {
        self.list_filtered(self.filters(&[("label", &format!("{}={uid}", label::POD_UID))])).await
    }

    async fn inspect(&self, id: &str) -> Result<Container> {
        let found = self.call("container_status", id, self.client.inspect_container(id, None)).await?;
        Ok(container(found))
    }

    async fn create(&self, config: &ContainerConfig) -> Result<String> {
        let options = query::CreateContainerOptions { name: Some(config.unique_name.clone()), ..Default::default() };
        let body = create_body(config, &self.instance);
        let made = self.call("create_container", &config.unique_name, self.client.create_container(Some(options.clone()), body.clone())).await;
        match made {
            // A container of that name is the rest of an attempt that was cut off before it was recorded.
            Err(Error::Refused { code: 409, message }) if message.contains("already in use") => {
                let old = self.inspect(&config.unique_name).await?;
                if old.running() {
                    return Err(Error::Refused { code: 409, message });
                }
                self.remove(&old.id).await?;
                let made = self.call("create_container", &config.unique_name, self.client.create_container(Some(options), body)).await?;
                Ok(made.id)
            }
            other => Ok(other?.id),
        }
    }

    async fn start(&self, id: &str) -> Result<()> {
        self.call("start_container", id, self.client.start_container(id, None)).await
    }

    async fn signal(&self, id: &str, signal: Option<&str>) -> Result<()> {
        let signal = match signal {
            Some(signal) => signal.to_owned(),
            None => {
                let found = self.call("container_status", id, self.client.inspect_container(id, None)).await?;
                found.config.and_then(|c| c.stop_signal).unwrap_or_else(|| "SIGTERM".into())
            }
        };
        let options = query::KillContainerOptions { signal };
        match self.call("stop_container", id, self.client.kill_container(id, Some(options))).await {
            Err(Error::Refused { code: 409, .. }) => Ok(()),
            other => other,
        }
    }

    async fn wait(&self, id: &str) -> Result<()> {
        let options = query::WaitContainerOptions { condition: "not-running".into() };
        let mut stream = std::pin::pin!(self.client.wait_container(id, Some(options)));
        match stream.next().await {
            None | Some(Ok(_)) | Some(Err(DockerError::DockerContainerWaitError { .. })) => Ok(()),
            Some(Err(e)) => Err(self.error("container", id, e)),
        }
    }

    async fn remove(&self, id: &str) -> Result<()> {
        let options = query::RemoveContainerOptions { v: true, force: true, link: false };
        match self.call("remove_container", id, self.client.remove_container(id, Some(options))).await {
            Err(Error::NotFound { .. }) => Ok(()),
            // Somebody else's removal is in progress: the same outcome.
            Err(Error::Refused { code: 409, message }) if message.contains("already in progress") => Ok(()),
            other => other,
        }
    }

    async fn update(&self, id: &str, resources: &Resources) -> Result<()> {
        let body = ContainerUpdateBody {
            cpu_shares: Some(resources.cpu_shares),
            cpu_quota: Some(if resources.cpu_quota == 0 { -1 } else { resources.cpu_quota }),
            cpu_period: Some(resources.cpu_period),
            memory: Some(resources.memory),
            memory_swap: Some(resources.memory),
            ..Default::default()
        };
        self.call("update_container", id, self.client.update_container(id, body)).await
    }

    async fn images(&self) -> Result<Vec<Image>> {
        let options = query::ListImagesOptions { all: false, digests: true, ..Default::default() };
        let found = self.call("list_images", "", self.client.list_images(Some(options))).await?;
        let named = |list: Vec<String>| list.into_iter().filter(|n| !n.contains("<none>")).collect::<Vec<_>>();
        Ok(found
            .into_iter()
            .map(|image| Image {
                id: image.id,
                tags: named(image.repo_tags),
                digests: named(image.repo_digests),
                size: image.size,
                user: String::new(),
            })
            .collect())
    }

    async fn image(&self, reference: &str) -> Result<Option<Image>> {
        match self.call("inspect_image", reference, self.client.inspect_image(reference)).await {
            Ok(found) => Ok(Some(Image {
                id: found.id.unwrap_or_default(),
                tags: found.repo_tags.unwrap_or_default(),
                digests: found.repo_digests.unwrap_or_default(),
                size: found.size.unwrap_or_default(),
                user: found.config.and_then(|c| c.user).unwrap_or_default(),
            })),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    async fn pull(&self, reference: &str, credentials: Option<&Credentials>) -> Result<()> {
        let failed = |message: String| Error::Image { operation: "pull", image: reference.to_owned(), message };
        let parsed = Reference::parse(reference).map_err(failed)?;
        let name = match &parsed.registry {
            registry if registry == "docker.io" => format!("docker.io/{}", parsed.repository),
            registry => format!("{registry}/{}", parsed.repository),
        };
        let options = query::CreateImageOptions {
            from_image: Some(name),
            tag: Some(parsed.version().to_owned()),
            ..Default::default()
        };
        let credentials = credentials.map(|c| bollard::auth::DockerCredentials {
            username: some(&c.username),
            password: some(&c.password),
            serveraddress: some(&c.server),
            identitytoken: some(&c.identity_token),
            registrytoken: some(&c.registry_token),
            ..Default::default()
        });
        let timer = metrics::runtime_operation("pull_image");
        let outcome = self.client.create_image(Some(options), None, credentials).try_for_each(|_| async { Ok(()) }).await;
        timer.done(outcome.is_ok());
        outcome.map_err(|e| match e {
            DockerError::DockerResponseServerError { message, .. } => failed(message),
            DockerError::DockerStreamError { error } => failed(error),
            other => self.error("image", reference, other),
        })
    }

    async fn remove_image(&self, id: &str) -> Result<()> {
        let options = query::RemoveImageOptions { force: true, noprune: false, ..Default::default() };
        self.call("remove_image", id, self.client.remove_image(id, Some(options), None)).await?;
        Ok(())
    }

    async fn load_image(&self, tar: Bytes) -> Result<()> {
        let options = query::ImportImageOptions { quiet: true, ..Default::default() };
        let stream = self.client.import_image(options, bollard::body_full(tar), None);
        stream
            .try_for_each(|_| async { Ok(()) })
            .await
            .map_err(|e| Error::Image { operation: "load", image: "archive".into(), message: e.to_string() })
    }

    async fn exec(&self, id: &str, options: &ExecOptions) -> Result<Session> {
        let config = bollard::exec::CreateExecOptions {
            attach_stdin: Some(options.stdin),
            attach_stdout: Some(options.stdout),
            attach_stderr: Some(options.stderr && !options.tty),
            tty: Some(options.tty),
            cmd: Some(options.command.clone()),
            ..Default::default()
        };
        let made = self.call("exec", id, self.client.create_exec(id, config)).await?;
        let start = bollard::exec::StartExecOptions { detach: false, tty: options.tty, output_capacity: None };
        let started = self.call("exec", id, self.client.start_exec(&made.id, Some(start))).await?;
        match started {
            bollard::exec::StartExecResults::Attached { output, input } => Ok(Session {
                output: docker_stream::output(output),
                stdin: options.stdin.then_some(input),
                id: SessionId::Exec(made.id),
            }),
            bollard::exec::StartExecResults::Detached => {
                Err(Error::Unsupported("Docker started the command detached although it was asked to attach".into()))
            }
        }
    }

    async fn attach(&self, id: &str, stdin: bool, stdout: bool, stderr: bool) -> Result<Session> {
        let options = query::AttachContainerOptions { stream: true, stdin, stdout, stderr, logs: false, detach_keys: None };
        let attached = self.call("attach", id, self.client.attach_container(id, Some(options))).await?;
        Ok(Session {
            output: docker_stream::output(attached.output),
            stdin: stdin.then_some(attached.input),
            id: SessionId::Attach(id.to_owned()),
        })
    }

    async fn resize(&self, session: &SessionId, width: u16, height: u16) -> Result<()> {
        match session {
            SessionId::Exec(id) => {
                let options = bollard::exec::ResizeExecOptions { height, width };
                self.call("resize", id, self.client.resize_exec(id, options)).await
            }
            SessionId::Attach(id) => {
                let options = query::ResizeContainerTTYOptions { h: height.into(), w: width.into() };
                self.call("resize", id, self.client.resize_container_tty(id, options)).await
            }
        }
    }

    async fn exit_code(&self, session: &SessionId) -> Result<i32> {
        match session {
            SessionId::Attach(_) => Ok(0),
            SessionId::Exec(id) => {
                // The output can end a moment before Docker has recorded the exit: it is asked again, briefly.
                for wait in [0_u64, 5, 10, 25, 50, 100, 250, 500, 1000, 2000] {
                    tokio::time::sleep(Duration::from_millis(wait)).await;
                    let found = self.call("exec", id, self.client.inspect_exec(id)).await?;
                    if found.running != Some(true)
                        && let Some(code) = found.exit_code
                    {
                        return Ok(i32::try_from(code).unwrap_or(-1));
                    }
                }
                Err(Error::Refused { code: 409, message: "the command has closed its output but still runs".into() })
            }
        }
    }

    async fn logs(&self, id: &str, options: &LogOptions) -> Result<Logs> {
        // A missing container must answer before the stream begins.
        self.inspect(id).await?;
        let since = options.since.map_or(0, |t| t.as_second().clamp(0, i32::MAX.into()));
        let query = query::LogsOptions {
            follow: options.follow,
            stdout: options.stdout,
            stderr: options.stderr,
            since: i32::try_from(since).unwrap_or(0),
            until: 0,
            timestamps: true,
            tail: options.tail.map_or_else(|| "all".into(), |n| n.to_string()),
        };
        Ok(docker_stream::logs(self.client.logs(id, Some(query)), options.since))
    }

    async fn disk_usage(&self, id: &str) -> Result<(u64, u64)> {
        let options = query::InspectContainerOptions { size: true };
        let found = self.call("container_stats", id, self.client.inspect_container(id, Some(options))).await?;
        let layer = u64::try_from(found.size_rw.unwrap_or(0)).unwrap_or(0);
        let mut logs = 0;
        if let Some(path) = found.log_path.filter(|p| !p.is_empty()) {
            let mut number = 0;
            let mut file = path.clone();
            while let Ok(meta) = tokio::fs::metadata(&file).await {
                logs += meta.len();
                number += 1;
                file = format!("{path}.{number}");
            }
        }
        Ok((layer, logs))
    }

    async fn events(&self) -> Result<Pin<Box<dyn Stream<Item = Result<Event>> + Send>>> {
        // The request goes out when the stream is first read: what happens until then is asked for by time.
        let now = jiff::Timestamp::now();
        let since = format!("{}.{:09}", now.as_second(), now.subsec_nanosecond());
        let filters = Some(self.filters(&[("type", "container")]));
        let options = query::EventsOptions { since: Some(since), filters, ..Default::default() };
        let docker = self.clone();
        let stream = self.client.events(Some(options)).filter_map(move |item| {
            let item = match item {
                Ok(message) => message.actor.and_then(|actor| {
                    let attributes = actor.attributes.unwrap_or_default();
                    Some(Ok(Event {
                        container: actor.id?,
                        pod_uid: attributes.get(label::POD_UID).cloned().unwrap_or_default(),
                        action: message.action.unwrap_or_default(),
                    }))
                }),
                Err(e) => Some(Err(docker.error("container", "events", e))),
            };
            async move { item }
        });
        Ok(Box::pin(stream))
    }
}

fn some(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

/// Docker writes the zero time for "never".
fn time(text: Option<&str>) -> Option<jiff::Timestamp> {
    text.filter(|t| !t.starts_with("0001-")).and_then(|t| t.parse().ok())
}

fn container(found: ContainerInspectResponse) -> Container {
    let state = found.state.unwrap_or_default();
    let config = found.config.unwrap_or_default();
    let labels: BTreeMap<String, String> = config.labels.unwrap_or_default().into_iter().collect();
    let get = |key: &str| labels.get(key).cloned().unwrap_or_default();
    let id = found.id.unwrap_or_default();
    let sandbox = get(label::TYPE) == "sandbox";
    let (started_at, finished_at) = (time(state.started_at.as_deref()), time(state.finished_at.as_deref()));
    let exited = matches!(
        state.status,
        Some(ContainerStateStatusEnum::EXITED | ContainerStateStatusEnum::DEAD | ContainerStateStatusEnum::REMOVING)
    );
    Container {
        name: if sandbox { SANDBOX_NAME.to_owned() } else { get(label::CONTAINER_NAME) },
        pod_uid: get(label::POD_UID),
        pod_name: get(label::POD_NAME),
        pod_namespace: get(label::POD_NAMESPACE),
        attempt: get(label::ATTEMPT).parse().unwrap_or(0),
        hash: get(label::HASH),
        sandbox: if sandbox { id.clone() } else { get(label::SANDBOX) },
        id,
        image: config.image.unwrap_or_default(),
        image_id: found.image.unwrap_or_default(),
        state: match state.status {
            Some(ContainerStateStatusEnum::CREATED) => State::Created,
            Some(ContainerStateStatusEnum::RUNNING | ContainerStateStatusEnum::PAUSED) => State::Running,
            _ if exited => State::Exited,
            _ => State::Unknown,
        },
        pid: state.pid.and_then(|p| i32::try_from(p).ok()).unwrap_or(0),
        created_at: time(found.created.as_deref()),
        // Docker notes the start after the process runs: one that ends at once would have ended before it began.
        started_at: if exited { started_at.min(finished_at.or(started_at)) } else { started_at },
        finished_at,
        exit_code: state.exit_code.and_then(|c| i32::try_from(c).ok()).unwrap_or(0),
        oom_killed: state.oom_killed.unwrap_or(false),
        error: state.error.unwrap_or_default(),
        tty: config.tty.unwrap_or(false),
        user: config.user.unwrap_or_default(),
        resources: found.host_config.map(|h| in_force(&h)).unwrap_or_default(),
        labels,
    }
}

fn in_force(config: &HostConfig) -> Resources {
    Resources {
        cpu_shares: config.cpu_shares.unwrap_or(0),
        // Docker's words for "no limit" after an update.
        cpu_quota: config.cpu_quota.unwrap_or(0).max(0),
        cpu_period: config.cpu_period.unwrap_or(0),
        memory: config.memory.unwrap_or(0),
        pids: config.pids_limit.unwrap_or(0).max(0),
    }
}

fn namespace(ns: &Namespace, own: &str) -> String {
    match ns {
        Namespace::Own => own.to_owned(),
        Namespace::Host => "host".to_owned(),
        Namespace::Container(id) => format!("container:{id}"),
    }
}

fn mount(mount: &super::Mount) -> bollard::models::Mount {
    let propagation = match mount.propagation {
        Propagation::Private => MountBindOptionsPropagationEnum::RPRIVATE,
        Propagation::HostToContainer => MountBindOptionsPropagationEnum::RSLAVE,
        Propagation::Bidirectional => MountBindOptionsPropagationEnum::RSHARED,
    };
    bollard::models::Mount {
        typ: Some(MountType::BIND),
        source: Some(mount.host_path.clone()),
        target: Some(mount.container_path.clone()),
        read_only: Some(mount.read_only),
        bind_options: Some(MountBindOptions { propagation: Some(propagation), ..Default::default() }),
        ..Default::default()
    }
}

fn create_body(config: &ContainerConfig, instance: &str) -> ContainerCreateBody {
    let mut labels: HashMap<String, String> = config.labels.clone().into_iter().collect();
    labels.insert(label::INSTANCE.into(), instance.into());
    ContainerCreateBody {
        hostname: config.hostname.clone(),
        user: config.user.clone(),
        tty: Some(config.tty),
        open_stdin: Some(config.stdin),
        stdin_once: Some(config.stdin_once),
        env: Some(config.env.clone()),
        cmd: config.args.clone(),
        entrypoint: config.command.clone(),
        image: Some(config.image.clone()),
        working_dir: config.working_dir.clone(),
        labels: Some(labels),
        stop_signal: config.stop_signal.clone(),
        // Kubernetes has its own probes: a HEALTHCHECK of the image is not run.
        healthcheck: Some(bollard::models::HealthConfig { test: Some(vec!["NONE".into()]), ..Default::default() }),
        host_config: Some(host_config(config)),
        ..Default::default()
    }
}

fn host_config(config: &ContainerConfig) -> HostConfig {
    let mut security = Vec::new();
    if config.no_new_privileges {
        security.push("no-new-privileges".to_owned());
    }
    match &config.seccomp {
        Seccomp::RuntimeDefault => {}
        _ if config.privileged => {}
        Seccomp::Unconfined => security.push("seccomp=unconfined".to_owned()),
        Seccomp::Profile(json) => security.push(format!("seccomp={json}")),
    }
    if let Some(profile) = &config.apparmor {
        security.push(format!("apparmor={profile}"));
    }
    security.extend(config.selinux.iter().map(|l| format!("label={l}")));
    let resources = &config.resources;
    let nonzero = |v: i64| (v != 0).then_some(v);
    let host_net = config.network == Namespace::Host;
    HostConfig {
        cpu_shares: nonzero(resources.cpu_shares),
        cpu_period: nonzero(resources.cpu_quota).and(nonzero(resources.cpu_period)),
        cpu_quota: nonzero(resources.cpu_quota),
        memory: nonzero(resources.memory),
        // No swap beyond the memory limit, as upstream.
        memory_swap: nonzero(resources.memory),
        pids_limit: nonzero(resources.pids),
        oom_score_adj: Some(config.oom_score_adj),
        cgroup_parent: Some(config.cgroup_parent.clone()),
        log_config: Some(HostConfigLogConfig {
            typ: Some("json-file".into()),
            config: Some(HashMap::from([
                ("max-size".to_owned(), config.log_max_size.to_string()),
                ("max-file".to_owned(), config.log_max_files.to_string()),
            ])),
        }),
        network_mode: Some(namespace(&config.network, "none")),
        uts_mode: host_net.then(|| "host".to_owned()),
        ipc_mode: Some(namespace(&config.ipc, "shareable")),
        pid_mode: match &config.pid {
            Namespace::Own => None,
            other => Some(namespace(other, "")),
        },
        userns_mode: config.user_namespace_host.then(|| "host".to_owned()),
        runtime: config.handler.clone(),
        mounts: Some(config.mounts.iter().map(mount).collect()),
        cap_add: Some(config.cap_add.clone()),
        cap_drop: Some(config.cap_drop.clone()),
        group_add: Some(config.groups.clone()),
        privileged: Some(config.privileged),
        readonly_rootfs: Some(config.read_only_rootfs),
        security_opt: Some(security),
        masked_paths: config.unmasked_proc.then(Vec::new),
        readonly_paths: config.unmasked_proc.then(Vec::new),
        sysctls: Some(config.sysctls.clone().into_iter().collect()),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn security_options() {
        let check = |config: ContainerConfig, expected: &[&str]| {
            assert_eq!(host_config(&config).security_opt.unwrap_or_default(), expected);
        };
        check(ContainerConfig::default(), &["seccomp=unconfined"]);
        check(ContainerConfig { seccomp: Seccomp::RuntimeDefault, no_new_privileges: true, ..Default::default() }, &["no-new-privileges"]);
        check(ContainerConfig { privileged: true, ..Default::default() }, &[]);
        check(
            ContainerConfig { seccomp: Seccomp::Profile("{}".into()), apparmor: Some("unconfined".into()), ..Default::default() },
            &["seccomp={}", "apparmor=unconfined"],
        );
    }

    #[test]
    fn never_is_no_time() {
        assert_eq!(time(Some("0001-01-01T00:00:00Z")), None);
        assert!(time(Some("2024-05-01T10:00:00.123456789Z")).is_some());
    }
}
