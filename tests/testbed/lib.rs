//! The testbed: one machine plays several.
//!
//! A [`Testbed`] is a network namespace with a bridge, the *hub*, where clients run. Each [`Node`] is a network namespace
//! of its own, joined to the hub by a veth pair, with its own `dockerd`. Whatever runs on a node runs with
//! `nsenter --net`: the other namespaces, `/sys` and its cgroups included, stay the machine's.
//!
//! # Invariants
//! - Nothing is made in the machine's own network namespace; testbeds run side by side.
//! - Dropping a testbed, also by a panic, ends what it started and nothing else, and takes its mounts and files along.

mod cluster;
mod process;

use std::io::Read;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
pub use cluster::{Cluster, Kubectl, Options};
pub use process::{Process, run};
use tempfile::TempDir;

/// The programs that tests run: Windlass itself and the real clients.
#[derive(Clone, Debug)]
pub struct Programs {
    pub windlass: PathBuf,
    /// Folder of upstream's programs, see `tests/upstream/build.sh`.
    pub upstream: PathBuf,
    /// Folder of image archives, see `tests/images/build.sh`.
    pub images: PathBuf,
}

impl Programs {
    /// As the environment says: `make test` sets it.
    pub fn from_env() -> Result<Self> {
        let path = |name: &str| {
            let value = std::env::var_os(name).with_context(|| format!("{name} is not set: run the tests by `make test`"))?;
            let path = PathBuf::from(value);
            if !path.exists() {
                bail!("{name}: {} does not exist: run the tests by `make test`", path.display());
            }
            Ok(path)
        };
        Ok(Self { windlass: path("WINDLASS_BIN")?, upstream: path("WINDLASS_UPSTREAM_BIN")?, images: path("WINDLASS_IMAGES")? })
    }
}

/// Waits until `condition` yields a value, and fails with its last complaint after `limit`.
pub fn eventually<T>(limit: Duration, mut condition: impl FnMut() -> Result<T>) -> Result<T> {
    let end = Instant::now() + limit;
    loop {
        match condition() {
            Ok(value) => return Ok(value),
            Err(error) if Instant::now() >= end => return Err(error.context(format!("not so within {limit:?}"))),
            // What is waited for is another program's state, which tells nobody when it changes.
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// A hub and its nodes. Nodes are numbered from 1.
pub struct Testbed {
    // Declared first: nodes end before the hub and the folder go.
    nodes: Vec<Node>,
    hub: Namespace,
    subnet: u8,
    dir: TempDir,
    pub programs: Programs,
}

/// Testbeds of one process take different subnets; those of other processes have other namespaces anyway.
static SUBNETS: AtomicU8 = AtomicU8::new(1);

impl Testbed {
    pub fn new() -> Result<Self> {
        let programs = Programs::from_env()?;
        let dir = tempfile::Builder::new().prefix("windlass-testbed-").tempdir()?;
        let hub = Namespace::create(dir.path().join("hub.net"))?;
        let subnet = SUBNETS.fetch_add(1, Ordering::Relaxed);
        let address = format!("172.31.{subnet}.254/24");
        hub.ip(&["link", "add", "hub0", "type", "bridge"])?;
        hub.ip(&["address", "add", &address, "dev", "hub0"])?;
        hub.ip(&["link", "set", "hub0", "up"])?;
        Ok(Self { nodes: Vec::new(), hub, subnet, dir, programs })
    }

    /// Adds a node with a running Docker that has the test images.
    pub fn add_node(&mut self) -> Result<usize> {
        let number = self.nodes.len() + 1;
        let address = Ipv4Addr::new(172, 31, self.subnet, u8::try_from(number)?);
        let node = Node::start(self, number, address).with_context(|| format!("node {number}"))?;
        self.nodes.push(node);
        Ok(self.nodes.len() - 1)
    }

    pub fn node(&self, index: usize) -> &Node {
        &self.nodes[index]
    }

    pub fn node_mut(&mut self, index: usize) -> &mut Node {
        &mut self.nodes[index]
    }

    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// A command that runs in the hub, from where all nodes are reached.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        self.hub.command(program)
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Cuts a node off the network, or joins it again.
    pub fn set_link(&self, index: usize, up: bool) -> Result<()> {
        let link = format!("node{}", index + 1);
        self.hub.ip(&["link", "set", &link, if up { "up" } else { "down" }])
    }
}

/// A machine of the testbed.
pub struct Node {
    pub name: String,
    pub address: Ipv4Addr,
    pub dir: PathBuf,
    /// Declared before the namespace: it ends first.
    docker: Option<Process>,
    namespace: Namespace,
}

impl Node {
    fn start(bed: &Testbed, number: usize, address: Ipv4Addr) -> Result<Self> {
        let name = format!("node{number}");
        let dir = bed.path().join(&name);
        std::fs::create_dir_all(&dir)?;
        let namespace = Namespace::create(bed.path().join(format!("{name}.net")))?;
        // The pair is made in the hub, and its other end moved into the node by way of a process that lives there.
        let mut holder = namespace.command("sh").args(["-c", "echo; exec sleep 60"]).stdout(Stdio::piped()).spawn()?;
        let pid = holder.id().to_string();
        // Its first line says that it has got there.
        let entered = holder.stdout.take().context("piped")?.read_exact(&mut [0]);
        let holder = process::Reaped(holder);
        entered.context("the node's namespace cannot be entered")?;
        bed.hub.ip(&["link", "add", &name, "type", "veth", "peer", "name", "uplink", "netns", &pid])?;
        bed.hub.ip(&["link", "set", &name, "master", "hub0", "up"])?;
        namespace.ip(&["link", "set", "uplink", "name", "eth0"])?;
        namespace.ip(&["address", "add", &format!("{address}/24"), "dev", "eth0"])?;
        namespace.ip(&["link", "set", "eth0", "up"])?;
        namespace.ip(&["route", "add", "default", "via", &format!("172.31.{}.254", bed.subnet)])?;
        drop(holder);
        let mut node = Self { name, address, dir, docker: None, namespace };
        node.start_docker()?;
        let mut images: Vec<_> = std::fs::read_dir(&bed.programs.images)?.collect::<Result<_, _>>()?;
        images.sort_by_key(std::fs::DirEntry::file_name);
        for image in images.iter().filter(|i| i.path().extension().is_some_and(|e| e == "tar")) {
            run(node.docker_cli().arg("load").arg("--quiet").arg("--input").arg(image.path()))?;
        }
        Ok(node)
    }

    /// A command that runs on this node.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        self.namespace.command(program)
    }

    pub fn docker_socket(&self) -> PathBuf {
        self.dir.join("docker.sock")
    }

    pub fn docker_endpoint(&self) -> String {
        format!("unix://{}", self.docker_socket().display())
    }

    /// `docker`, speaking to this node's daemon.
    pub fn docker_cli(&self) -> Command {
        let mut command = Command::new("docker");
        command.arg("--host").arg(self.docker_endpoint());
        command
    }

    /// Starts the node's `dockerd`, and returns when it answers. Containers outlive it.
    pub fn start_docker(&mut self) -> Result<()> {
        let mut command = self.command("dockerd");
        let flag = |name: &str, file: &str| format!("--{name}={}", self.dir.join(file).display());
        command
            .arg("--host")
            .arg(self.docker_endpoint())
            .args([flag("data-root", "docker"), flag("exec-root", "docker-exec"), flag("pidfile", "docker.pid")])
            .args(["--bridge=none", "--iptables=false", "--ip6tables=false", "--live-restore"])
            .args(["--exec-opt=native.cgroupdriver=cgroupfs", "--log-level=warn"]);
        self.docker = Some(Process::start(command, &self.dir.join("dockerd.log"))?);
        let docker = self.docker.as_mut().context("just set")?;
        eventually(Duration::from_secs(60), || {
            docker.check()?;
            let mut cli = Command::new("docker");
            run(cli.arg("--host").arg(format!("unix://{}", self.dir.join("docker.sock").display())).args(["version", "--format", "ok"]))
        })?;
        Ok(())
    }

    /// Kills `dockerd` the hard way; its containers go on.
    pub fn kill_docker(&mut self) -> Result<()> {
        match self.docker.take() {
            Some(docker) => docker.kill(),
            None => Ok(()),
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let ids = run(self.docker_cli().args(["ps", "--all", "--quiet"])).unwrap_or_default();
        if !ids.trim().is_empty() {
            let _ = run(self.docker_cli().args(["rm", "--force"]).args(ids.split_whitespace()));
        }
        drop(self.docker.take());
        process::end_all_under(&self.dir);
        process::unmount_under(&self.dir);
    }
}

/// A network namespace, kept by a file that it is mounted on.
struct Namespace {
    file: PathBuf,
}

impl Namespace {
    fn create(file: PathBuf) -> Result<Self> {
        std::fs::write(&file, "")?;
        run(Command::new("unshare").arg(format!("--net={}", file.display())).args(["ip", "link", "set", "lo", "up"]))?;
        Ok(Self { file })
    }

    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.file.display())).arg("--").arg(program);
        command
    }

    fn ip(&self, arguments: &[&str]) -> Result<()> {
        run(self.command("ip").args(arguments)).map(drop)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(&self.file, nix::mount::MntFlags::MNT_DETACH);
    }
}
