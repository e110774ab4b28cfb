//! A Windlass cluster on a testbed: `windlass up` on the first node; the others join by token, each role a process.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::{Process, Testbed, eventually, run};

const EVICTION: &str = "memory.available<50Mi";

/// How a cluster is made.
#[derive(Clone, Debug)]
pub struct Options {
    pub nodes: usize,
    /// More flags for `windlass up`.
    pub up: Vec<String>,
    /// More flags for the `windlass kubelet` of joined nodes.
    pub kubelet: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self { nodes: 1, up: Vec::new(), kubelet: Vec::new() }
    }
}

/// The processes of a node that joined.
struct Joined {
    kubelet: Option<Process>,
    proxy: Option<Process>,
}

/// A running cluster.
pub struct Cluster {
    // Declared first: Windlass ends before the machines do.
    up: Option<Process>,
    joined: Vec<Joined>,
    options: Options,
    pub bed: Testbed,
}

impl Cluster {
    /// Starts a cluster and returns when all its nodes are Ready.
    pub fn start(options: Options) -> Result<Self> {
        let mut bed = Testbed::new()?;
        for _ in 0..options.nodes {
            bed.add_node()?;
        }
        let mut cluster = Self { up: None, joined: Vec::new(), options, bed };
        cluster.start_up()?;
        for index in 1..cluster.options.nodes {
            cluster.join(index)?;
        }
        // Nodes get their pod addresses from the controllers: without those, someone else must bring them first.
        if !cluster.options.up.iter().any(|flag| flag == "--without=controller-manager") {
            cluster.wait_nodes_ready()?;
        }
        Ok(cluster)
    }

    /// A one-node cluster with the defaults.
    pub fn single() -> Result<Self> {
        Self::start(Options::default())
    }

    /// Starts `windlass up`, for the first time or again.
    pub fn start_up(&mut self) -> Result<()> {
        let node = self.bed.node(0);
        let mut command = node.command(&self.bed.programs.windlass);
        command
            .arg("up")
            .arg("--data-dir")
            .arg(node.dir.join("windlass"))
            .arg("--write-kubeconfig")
            .arg(self.kubeconfig())
            .args(["--bind-address", &node.address.to_string()])
            .args(["--docker-endpoint", &node.docker_endpoint(), "--node-name", &node.name])
            // The machine's disk is the machine's affair; a full one must not fail tests of something else.
            .args(["--eviction-hard", EVICTION])
            .args(&self.options.up);
        let up = self.up.insert(Process::start(command, &self.bed.path().join("up.log"))?);
        eventually(Duration::from_secs(60), || {
            up.check()?;
            let kubectl = Kubectl { bed: &self.bed, kubeconfig: self.bed.path().join("kubeconfig") };
            kubectl.run(&["get", "--raw", "/readyz"])
        })?;
        Ok(())
    }

    /// SIGKILL to `windlass up`.
    pub fn kill_up(&mut self) -> Result<()> {
        self.up.take().context("up does not run")?.kill()
    }

    /// SIGTERM to `windlass up`; fails if it does not end by itself.
    pub fn stop_up(&mut self) -> Result<()> {
        let mut up = self.up.take().context("up does not run")?;
        if !up.stop(Duration::from_secs(30)) {
            bail!("up did not stop within 30 s:\n{}", up.tail());
        }
        Ok(())
    }

    pub fn up_pid(&self) -> Option<u32> {
        self.up.as_ref().map(Process::pid)
    }

    /// The end of the log of `windlass up`.
    pub fn up_log(&self) -> String {
        std::fs::read_to_string(self.bed.path().join("up.log")).unwrap_or_default()
    }

    fn join(&mut self, index: usize) -> Result<()> {
        let token = run(self.bed.command(&self.bed.programs.windlass).args(["token", "create", "--kubeconfig"]).arg(self.kubeconfig()))?;
        let file = self.bed.node(index).dir.join("token");
        std::fs::write(&file, token)?;
        self.joined.push(Joined { kubelet: None, proxy: None });
        self.start_kubelet(index)?;
        self.start_proxy(index)
    }

    /// Starts the kubelet of a joined node, for the first time or again.
    pub fn start_kubelet(&mut self, index: usize) -> Result<()> {
        let node = self.bed.node(index);
        let mut command = self.role("kubelet", index);
        command
            .args(["--hostname-override", &node.name, "--node-ip", &node.address.to_string()])
            .args(["--docker-endpoint", &node.docker_endpoint(), "--instance", &node.name])
            .arg("--root-dir")
            .arg(node.dir.join("kubelet"))
            // The nodes share a disk whose fill level is not theirs.
            .args(["--eviction-hard", "memory.available<100Mi,nodefs.available<1Gi,imagefs.available<1Gi"])
            .args(["--image-gc-high-threshold", "100", "--image-gc-low-threshold", "99"])
            .args(["--eviction-hard", EVICTION, "--cluster-dns", "10.96.0.10"])
            .args(&self.options.kubelet);
        self.joined[index - 1].kubelet = Some(Process::start(command, &node.dir.join("kubelet.log"))?);
        Ok(())
    }

    /// Starts the proxy of a joined node, for the first time or again.
    pub fn start_proxy(&mut self, index: usize) -> Result<()> {
        let node = self.bed.node(index);
        let mut command = self.role("proxy", index);
        command.args(["--hostname-override", &node.name, "--instance", &node.name, "--metrics-address", &node.address.to_string()]);
        self.joined[index - 1].proxy = Some(Process::start(command, &node.dir.join("proxy.log"))?);
        Ok(())
    }

    /// SIGKILL to the kubelet of a joined node.
    pub fn kill_kubelet(&mut self, index: usize) -> Result<()> {
        self.joined[index - 1].kubelet.take().context("the kubelet does not run")?.kill()
    }

    /// SIGKILL to the proxy of a joined node.
    pub fn kill_proxy(&mut self, index: usize) -> Result<()> {
        self.joined[index - 1].proxy.take().context("the proxy does not run")?.kill()
    }

    fn role(&self, role: &str, index: usize) -> Command {
        let node = self.bed.node(index);
        let mut command = node.command(&self.bed.programs.windlass);
        command
            .arg(role)
            .args(["--server", &format!("https://{}:6443", self.bed.node(0).address)])
            .arg("--join-token-file")
            .arg(node.dir.join("token"))
            .arg("--identity-dir")
            .arg(node.dir.join("identity"));
        command
    }

    pub fn wait_nodes_ready(&self) -> Result<()> {
        eventually(Duration::from_secs(60), || {
            let kubectl = self.kubectl();
            let ready = kubectl.run(&["get", "nodes", "-o", r#"jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}"#])?;
            let count = ready.split_whitespace().filter(|status| *status == "True").count();
            if count < self.options.nodes {
                bail!("{count} of {} nodes are ready", self.options.nodes);
            }
            Ok(())
        })
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.bed.path().join("kubeconfig")
    }

    pub fn kubectl(&self) -> Kubectl<'_> {
        Kubectl { bed: &self.bed, kubeconfig: self.kubeconfig() }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let kubectl = self.kubectl();
            for what in [&["get", "pods,nodes,events", "-A", "-o", "wide"][..], &["describe", "pods", "-A"]] {
                eprintln!("--- kubectl {what:?} ---\n{}", kubectl.run(what).unwrap_or_else(|error| error.to_string()));
            }
        }
    }
}

/// The real kubectl, run in the hub.
pub struct Kubectl<'a> {
    bed: &'a Testbed,
    kubeconfig: PathBuf,
}

impl Kubectl<'_> {
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.bed.command(self.bed.programs.upstream.join("kubectl"));
        command.arg("--kubeconfig").arg(&self.kubeconfig).args(arguments);
        // kubectl keeps discovery in its home; tests must not see each other's.
        command.env("HOME", self.bed.path()).env_remove("KUBECONFIG");
        command
    }

    /// Runs kubectl and returns what it printed; fails if it fails.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        run(&mut self.command(arguments))
    }

    /// The same with `input` on its standard input.
    pub fn feed(&self, arguments: &[&str], input: &str) -> Result<String> {
        let output = self.output(arguments, input)?;
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            bail!("kubectl {arguments:?}: {}\n{stdout}{}", output.status, String::from_utf8_lossy(&output.stderr));
        }
        Ok(stdout)
    }

    /// Runs kubectl whatever comes of it.
    pub fn output(&self, arguments: &[&str], input: &str) -> Result<Output> {
        let mut child = self.command(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        child.stdin.take().context("piped")?.write_all(input.as_bytes())?;
        Ok(child.wait_with_output()?)
    }

    /// Runs kubectl, which must fail; returns what it complains.
    pub fn refused(&self, arguments: &[&str], input: &str) -> Result<String> {
        let output = self.output(arguments, input)?;
        if output.status.success() {
            bail!("kubectl {arguments:?} succeeded: {}", String::from_utf8_lossy(&output.stdout));
        }
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    pub fn apply(&self, manifest: &str) -> Result<String> {
        self.feed(&["apply", "-f", "-"], manifest)
    }

    /// Starts kubectl beside the test, its output in `log`.
    pub fn start(&self, arguments: &[&str], log: &Path) -> Result<Process> {
        Process::start(self.command(arguments), log)
    }
}
