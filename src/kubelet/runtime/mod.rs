//! What the kubelet asks of a container runtime, in the kubelet's own words.
//!
//! Everything above this module speaks of [`Container`]s and [`ContainerConfig`]s and never of Docker.
//! An implementation keeps no state of its own: what it knows, it reads back from the runtime,
//! so that a kubelet killed at any moment finds its containers again by their labels.

pub mod docker;
mod docker_stream;
pub mod reference;

use std::collections::BTreeMap;
use std::pin::Pin;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::Stream;
use jiff::Timestamp;
use tokio::io::AsyncWrite;

/// Labels that every container of ours carries; adoption after a restart reads them.
pub mod label {
    /// Which Windlass instance on this host owns the container.
    pub const INSTANCE: &str = "windlass.dev/instance";
    /// `sandbox` or `container`.
    pub const TYPE: &str = "windlass.dev/type";
    pub const ATTEMPT: &str = "windlass.dev/attempt";
    /// Hash of the container's (or sandbox's) specification.
    pub const HASH: &str = "windlass.dev/hash";
    /// The sandbox that the container joined.
    pub const SANDBOX: &str = "windlass.dev/sandbox";
    /// Host path of the termination message file.
    pub const TERMINATION_FILE: &str = "windlass.dev/termination-file";
    pub const TERMINATION_POLICY: &str = "windlass.dev/termination-policy";
    /// The pod's termination grace period in seconds, for pods that are gone when their containers are found.
    pub const GRACE: &str = "windlass.dev/grace";
    pub const POD_NAME: &str = "io.kubernetes.pod.name";
    pub const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
    pub const POD_UID: &str = "io.kubernetes.pod.uid";
    pub const CONTAINER_NAME: &str = "io.kubernetes.container.name";
}

/// Name of the infra container in [`Container::name`], as upstream's dockershim had it.
pub const SANDBOX_NAME: &str = "POD";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The container or image does not exist.
    #[error("{what} {id} does not exist in the container runtime")]
    NotFound { what: &'static str, id: String },
    /// The runtime answered with an error; the message is its own.
    #[error("{message}")]
    Refused { code: u16, message: String },
    /// The runtime could not be reached or the connection broke.
    #[error("container runtime at {endpoint} cannot be reached: {message}; check that its daemon runs")]
    Unreachable { endpoint: String, message: String },
    /// The runtime is too old or lacks a feature that was asked for.
    #[error("{0}")]
    Unsupported(String),
    #[error("{operation} did not finish within {after:?}")]
    Timeout { operation: &'static str, after: Duration },
    #[error("{operation} of image \"{image}\": {message}")]
    Image { operation: &'static str, image: String, message: String },
}

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Created,
    Running,
    Exited,
    Unknown,
}

/// One container as the runtime sees it, the sandbox included.
#[derive(Clone, Debug, PartialEq)]
pub struct Container {
    pub id: String,
    /// The container's name in its pod, [`SANDBOX_NAME`] for the sandbox.
    pub name: String,
    pub pod_uid: String,
    pub pod_name: String,
    pub pod_namespace: String,
    /// How many containers of this name came before it in the pod.
    pub attempt: u32,
    pub hash: String,
    /// The sandbox joined (its own id for a sandbox).
    pub sandbox: String,
    /// The image as it was asked for.
    pub image: String,
    /// The image's id in the runtime (`sha256:...`).
    pub image_id: String,
    pub state: State,
    /// Process id of the container's first process; 0 when it does not run.
    pub pid: i32,
    pub created_at: Option<Timestamp>,
    pub started_at: Option<Timestamp>,
    pub finished_at: Option<Timestamp>,
    pub exit_code: i32,
    pub oom_killed: bool,
    /// What the runtime says went wrong.
    pub error: String,
    pub tty: bool,
    /// The user of the container's processes as configured, `uid[:gid]` or a name.
    pub user: String,
    /// Requests and limits in force.
    pub resources: Resources,
    pub labels: BTreeMap<String, String>,
}

impl Container {
    pub fn is_sandbox(&self) -> bool {
        self.name == SANDBOX_NAME
    }
    pub fn running(&self) -> bool {
        self.state == State::Running
    }
    pub fn label(&self, key: &str) -> &str {
        self.labels.get(key).map_or("", String::as_str)
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resources {
    /// cgroup v1 `cpu.shares`; the runtime converts for v2.
    pub cpu_shares: i64,
    /// Microseconds per `cpu_period`; 0 is no limit.
    pub cpu_quota: i64,
    pub cpu_period: i64,
    /// Bytes; 0 is no limit.
    pub memory: i64,
    /// 0 is no limit.
    pub pids: i64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Propagation {
    #[default]
    Private,
    HostToContainer,
    Bidirectional,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Mount {
    pub host_path: String,
    pub container_path: String,
    pub read_only: bool,
    pub propagation: Propagation,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub enum Seccomp {
    #[default]
    Unconfined,
    RuntimeDefault,
    /// The profile's JSON text.
    Profile(String),
}

/// Which namespaces are the host's or shared.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Namespace {
    /// The container's own.
    #[default]
    Own,
    /// The node's.
    Host,
    /// That of another container, by id.
    Container(String),
}

/// A container to create.
#[derive(Clone, Debug, Default)]
pub struct ContainerConfig {
    /// The runtime's name for it, unique on the host.
    pub unique_name: String,
    pub labels: BTreeMap<String, String>,
    pub image: String,
    /// Replaces the image's entrypoint.
    pub command: Option<Vec<String>>,
    pub args: Option<Vec<String>>,
    pub env: Vec<String>,
    pub working_dir: Option<String>,
    pub tty: bool,
    pub stdin: bool,
    pub stdin_once: bool,
    pub user: Option<String>,
    pub groups: Vec<String>,
    pub hostname: Option<String>,
    pub stop_signal: Option<String>,
    pub network: Namespace,
    pub ipc: Namespace,
    pub pid: Namespace,
    pub user_namespace_host: bool,
    pub cap_add: Vec<String>,
    pub cap_drop: Vec<String>,
    pub privileged: bool,
    pub read_only_rootfs: bool,
    pub no_new_privileges: bool,
    pub seccomp: Seccomp,
    /// SELinux labels (`type:...`), for hosts that have it.
    pub selinux: Vec<String>,
    /// The OCI runtime, where it is not the default.
    pub handler: Option<String>,
    /// `None` leaves it to the runtime; `Some("unconfined")` or a profile's name.
    pub apparmor: Option<String>,
    /// No masked and no read-only paths below /proc.
    pub unmasked_proc: bool,
    pub mounts: Vec<Mount>,
    pub resources: Resources,
    pub oom_score_adj: i64,
    pub cgroup_parent: String,
    pub sysctls: BTreeMap<String, String>,
    /// Log files' size in bytes and number; older output is dropped.
    pub log_max_size: i64,
    pub log_max_files: u32,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Image {
    pub id: String,
    pub tags: Vec<String>,
    pub digests: Vec<String>,
    /// Bytes on disk.
    pub size: i64,
    /// The user that the image names, "" for root.
    pub user: String,
}

/// Credentials for one registry.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Credentials {
    pub username: String,
    pub password: String,
    pub server: String,
    /// An identity token instead of a password.
    pub identity_token: String,
    pub registry_token: String,
}

#[derive(Clone, Debug, Default)]
pub struct RuntimeInfo {
    pub name: String,
    pub version: String,
    pub api_version: String,
    /// `systemd` or `cgroupfs`.
    pub cgroup_driver: String,
    pub root_dir: String,
    pub kernel_version: String,
    pub operating_system: String,
    pub architecture: String,
    pub apparmor: bool,
    pub selinux: bool,
    pub seccomp: bool,
    /// OCI runtimes that a RuntimeClass' handler may name.
    pub handlers: Vec<String>,
}

/// What happened to a container. Events only say where to look: the state itself is read by `inspect`.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    pub container: String,
    pub pod_uid: String,
    pub action: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputKind {
    Stdout,
    Stderr,
}

pub type Output = Pin<Box<dyn Stream<Item = Result<(OutputKind, Bytes)>> + Send>>;

/// Both ends of an exec or attach session. Dropping `stdin` closes the process' standard input.
pub struct Session {
    pub output: Output,
    pub stdin: Option<Pin<Box<dyn AsyncWrite + Send>>>,
    /// What `resize` and `exit_code` are asked about.
    pub id: SessionId,
}

#[derive(Clone, Debug)]
pub enum SessionId {
    Exec(String),
    Attach(String),
}

#[derive(Clone, Debug, Default)]
pub struct ExecOptions {
    pub command: Vec<String>,
    pub tty: bool,
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
}

/// The result of a command run to its end.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExecResult {
    pub exit_code: i32,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
}

#[derive(Clone, Debug, Default)]
pub struct LogOptions {
    pub follow: bool,
    /// Lines from the end; `None` for all.
    pub tail: Option<u64>,
    pub since: Option<Timestamp>,
    pub stdout: bool,
    pub stderr: bool,
}

/// A chunk of a container's log: one line, or a part of a long one.
#[derive(Clone, Debug, PartialEq)]
pub struct LogChunk {
    pub kind: OutputKind,
    pub time: Option<Timestamp>,
    pub data: Bytes,
}

pub type Logs = Pin<Box<dyn Stream<Item = Result<LogChunk>> + Send>>;

/// A container runtime. All methods may be called concurrently; none polls.
#[async_trait]
pub trait Runtime: Send + Sync + 'static {
    /// The prefix of container ids in the API (`docker`).
    fn scheme(&self) -> &'static str;
    async fn info(&self) -> Result<RuntimeInfo>;

    /// Every container of this instance, running or not, sandboxes included.
    async fn list(&self) -> Result<Vec<Container>>;
    /// The containers of one pod.
    async fn list_pod(&self, uid: &str) -> Result<Vec<Container>>;
    async fn inspect(&self, id: &str) -> Result<Container>;
    async fn create(&self, config: &ContainerConfig) -> Result<String>;
    async fn start(&self, id: &str) -> Result<()>;
    /// Sends `signal`, or the container's own stop signal. Not running is not an error.
    async fn signal(&self, id: &str, signal: Option<&str>) -> Result<()>;
    /// Returns when the container no longer runs.
    async fn wait(&self, id: &str) -> Result<()>;
    async fn remove(&self, id: &str) -> Result<()>;
    async fn update(&self, id: &str, resources: &Resources) -> Result<()>;

    async fn images(&self) -> Result<Vec<Image>>;
    /// `None` when the image is not on the node.
    async fn image(&self, reference: &str) -> Result<Option<Image>>;
    async fn pull(&self, reference: &str, credentials: Option<&Credentials>) -> Result<()>;
    async fn remove_image(&self, id: &str) -> Result<()>;
    /// Loads an image archive (`docker save` format).
    async fn load_image(&self, tar: Bytes) -> Result<()>;

    async fn exec(&self, id: &str, options: &ExecOptions) -> Result<Session>;
    async fn attach(&self, id: &str, stdin: bool, stdout: bool, stderr: bool) -> Result<Session>;
    async fn resize(&self, session: &SessionId, width: u16, height: u16) -> Result<()>;
    /// The exit code of an exec session whose output has ended.
    async fn exit_code(&self, session: &SessionId) -> Result<i32>;
    async fn logs(&self, id: &str, options: &LogOptions) -> Result<Logs>;
    /// Bytes of the container's writable layer and of its logs.
    async fn disk_usage(&self, id: &str) -> Result<(u64, u64)>;

    /// Container events from now on. The stream ends when the connection breaks: list again, then resubscribe.
    async fn events(&self) -> Result<Pin<Box<dyn Stream<Item = Result<Event>> + Send>>>;

    /// Runs a command to its end, keeping at most `limit` bytes of each output.
    async fn exec_sync(&self, id: &str, command: &[String], timeout: Duration, limit: usize) -> Result<ExecResult> {
        use futures::StreamExt;
        let options = ExecOptions { command: command.to_vec(), tty: false, stdin: false, stdout: true, stderr: true };
        let work = async {
            let mut session = self.exec(id, &options).await?;
            let mut result = ExecResult::default();
            while let Some(item) = session.output.next().await {
                let (kind, data) = item?;
                let sink = match kind {
                    OutputKind::Stdout => &mut result.stdout,
                    OutputKind::Stderr => &mut result.stderr,
                };
                let room = limit.saturating_sub(sink.len());
                sink.extend_from_slice(&data[..data.len().min(room)]);
            }
            result.exit_code = self.exit_code(&session.id).await?;
            Ok(result)
        };
        tokio::time::timeout(timeout, work)
            .await
            .unwrap_or(Err(Error::Timeout { operation: "command", after: timeout }))
    }
}
