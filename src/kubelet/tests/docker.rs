//! The runtime on a real Docker: its own daemon, its own data, gone afterwards.
//!
//! Needs root, `dockerd` and `busybox` (Debian: docker.io, busybox-static); without them the tests fail and say so.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use futures::StreamExt;
use tokio::io::AsyncWriteExt;
use windlass_kubelet::runtime::docker::Docker;
use windlass_kubelet::runtime::{ContainerConfig, Error, ExecOptions, LogOptions, Namespace, OutputKind, Runtime, State, label};

/// A Docker daemon for one test.
struct Daemon {
    process: Child,
    dir: tempfile::TempDir,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.process.id() as i32), nix::sys::signal::Signal::SIGTERM);
        let _ = self.process.wait();
    }
}

fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let extra = ["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(extra).map(|d| d.join(name)).find(|p| p.is_file())
}

async fn daemon() -> (Daemon, Docker) {
    let dockerd = find("dockerd").expect("dockerd is not installed (Debian: docker.io)");
    assert!(find("busybox").is_some(), "busybox is not installed (Debian: busybox-static)");
    assert!(nix::unistd::geteuid().is_root(), "dockerd needs root");
    let dir = tempfile::tempdir().expect("temp");
    let at = |name: &str| dir.path().join(name);
    let socket = format!("unix://{}", at("docker.sock").display());
    let log = std::fs::File::create(at("log")).expect("log");
    let process = Command::new(dockerd)
        .args(["--host", &socket, "--bridge", "none", "--iptables=false", "--ip-forward=false"])
        .arg("--data-root").arg(at("data"))
        .arg("--exec-root").arg(at("exec"))
        .arg("--pidfile").arg(at("pid"))
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .expect("dockerd starts");
    let daemon = Daemon { process, dir };
    let begun = Instant::now();
    loop {
        match Docker::connect(&socket, "test").await {
            Ok(docker) => return (daemon, docker),
            Err(error) if begun.elapsed() > Duration::from_secs(60) => {
                let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap_or_default();
                panic!("dockerd does not answer: {error}\n{log}");
            }
            // The daemon tells nobody when it listens: its socket is asked.
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

/// An image archive with a static busybox in it.
fn busybox_image() -> Vec<u8> {
    fn tar(dir: &Path, names: &[&str]) -> Vec<u8> {
        let output = Command::new("tar").arg("-C").arg(dir).arg("-cf").arg("-").args(names).output().expect("tar");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    }
    let dir = tempfile::tempdir().expect("temp");
    let root = dir.path().join("root");
    std::fs::create_dir_all(root.join("bin")).expect("dirs");
    std::fs::create_dir_all(root.join("tmp")).expect("dirs");
    let busybox = find("busybox").expect("busybox");
    std::fs::copy(busybox, root.join("bin/busybox")).expect("copy");
    for applet in ["sh", "cat", "echo", "sleep", "true"] {
        std::os::unix::fs::symlink("busybox", root.join("bin").join(applet)).expect("link");
    }
    let layer = tar(&root, &["bin", "tmp"]);
    let digest = |bytes: &[u8]| {
        use sha2::Digest;
        sha2::Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect::<String>()
    };
    let config = serde_json::json!({
        "architecture": "amd64", "os": "linux",
        "config": {"Env": ["PATH=/bin"], "Cmd": ["sh"], "User": "7"},
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{}", digest(&layer))]},
    })
    .to_string();
    let manifest = serde_json::json!([{"Config": "config.json", "RepoTags": ["test.local/busybox:1"], "Layers": ["layer.tar"]}]).to_string();
    std::fs::write(dir.path().join("layer.tar"), layer).expect("write");
    std::fs::write(dir.path().join("config.json"), config).expect("write");
    std::fs::write(dir.path().join("manifest.json"), manifest).expect("write");
    tar(dir.path(), &["layer.tar", "config.json", "manifest.json"])
}

fn config(name: &str, script: &str) -> ContainerConfig {
    let labels = [(label::TYPE, "container"), (label::POD_UID, "u1"), (label::POD_NAME, "p"), (label::POD_NAMESPACE, "ns"), (label::CONTAINER_NAME, name), (label::ATTEMPT, "3")];
    ContainerConfig {
        unique_name: format!("k8s_{name}_p_ns_u1_3"),
        labels: labels.into_iter().map(|(k, v)| (k.to_owned(), v.to_owned())).collect::<BTreeMap<_, _>>(),
        image: "test.local/busybox:1".into(),
        command: Some(vec!["sh".into(), "-c".into(), script.into()]),
        user: Some("0".into()),
        log_max_size: 1 << 20,
        log_max_files: 2,
        ..Default::default()
    }
}

async fn logs(docker: &Docker, id: &str, options: LogOptions) -> Vec<(OutputKind, String)> {
    let mut stream = docker.logs(id, &options).await.expect("logs");
    let mut lines = Vec::new();
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.expect("chunk");
        assert!(chunk.time.is_some());
        lines.push((chunk.kind, String::from_utf8_lossy(&chunk.data).trim_end().to_owned()));
    }
    lines
}

const BOTH: LogOptions = LogOptions { follow: true, tail: None, since: None, stdout: true, stderr: true };

#[tokio::test]
async fn a_container_lives_and_dies() {
    let (_daemon, docker) = daemon().await;
    docker.load_image(busybox_image().into()).await.expect("load");
    let image = docker.image("test.local/busybox:1").await.expect("inspect").expect("loaded");
    assert_eq!((image.user.as_str(), image.tags.as_slice()), ("7", &["test.local/busybox:1".to_owned()][..]));
    assert!(docker.image("test.local/none:1").await.expect("inspect").is_none());

    let mut events = docker.events().await.expect("events");
    let id = docker.create(&config("c", "echo one; echo two >&2; echo three; exit 5")).await.expect("create");
    assert_eq!(docker.inspect(&id).await.expect("inspect").state, State::Created);
    docker.start(&id).await.expect("start");
    docker.wait(&id).await.expect("wait");
    let ended = docker.inspect(&id).await.expect("inspect");
    assert_eq!((ended.state, ended.exit_code, ended.attempt, ended.name.as_str(), ended.pod_uid.as_str()), (State::Exited, 5, 3, "c", "u1"));
    assert!(ended.finished_at >= ended.started_at && ended.image == "test.local/busybox:1");
    let mut actions = Vec::new();
    while !actions.contains(&"die".to_owned()) {
        let event = events.next().await.expect("event").expect("event");
        assert_eq!(event.pod_uid, "u1");
        actions.push(event.action);
    }

    let all = logs(&docker, &id, BOTH).await;
    let out: Vec<&str> = all.iter().filter(|(k, _)| *k == OutputKind::Stdout).map(|(_, l)| l.as_str()).collect();
    let err: Vec<&str> = all.iter().filter(|(k, _)| *k == OutputKind::Stderr).map(|(_, l)| l.as_str()).collect();
    assert_eq!((out, err), (vec!["one", "three"], vec!["two"]));
    // Which of two streams is read first is Docker's affair; the end of one is certain.
    let quiet = docker.create(&config("quiet", "echo one; echo three")).await.expect("create");
    docker.start(&quiet).await.expect("start");
    docker.wait(&quiet).await.expect("wait");
    let last = logs(&docker, &quiet, LogOptions { tail: Some(1), stdout: true, ..Default::default() }).await;
    assert_eq!(last, [(OutputKind::Stdout, "three".to_owned())]);
    docker.remove(&quiet).await.expect("remove");

    assert_eq!(docker.list_pod("u1").await.expect("list").len(), 1);
    assert!(docker.list_pod("u2").await.expect("list").is_empty());
    docker.signal(&id, None).await.expect("a signal to an ended container is no error");
    docker.remove(&id).await.expect("remove");
    docker.remove(&id).await.expect("again is fine");
    assert!(matches!(docker.inspect(&id).await, Err(Error::NotFound { .. })));
}

#[tokio::test]
async fn commands_and_namespaces() {
    let (_daemon, docker) = daemon().await;
    docker.load_image(busybox_image().into()).await.expect("load");
    docker.load_image(windlass_net::pause::image_tar().into()).await.expect("load pause");
    let mut sandbox = config("sandbox", "");
    sandbox.labels.insert(label::TYPE.into(), "sandbox".into());
    sandbox.image = windlass_net::pause::image_name();
    sandbox.command = None;
    sandbox.user = None;
    sandbox.hostname = Some("pod-host".into());
    let sandbox = docker.create(&sandbox).await.expect("create");
    docker.start(&sandbox).await.expect("start");
    assert!(docker.inspect(&sandbox).await.expect("inspect").is_sandbox());

    let mut inside = config("c", "trap 'exit 9' TERM; while true; do sleep 0.05; done");
    inside.network = Namespace::Container(sandbox.clone());
    inside.ipc = Namespace::Container(sandbox.clone());
    inside.env = vec!["X=y".into()];
    let id = docker.create(&inside).await.expect("create");
    docker.start(&id).await.expect("start");

    let run = |script: &str| vec!["sh".to_owned(), "-c".to_owned(), script.to_owned()];
    let result = docker.exec_sync(&id, &run("echo $X; cat /etc/hostname; echo bad >&2; exit 4"), Duration::from_secs(10), 100).await.expect("exec");
    assert_eq!((result.exit_code, String::from_utf8_lossy(&result.stdout).as_ref(), String::from_utf8_lossy(&result.stderr).as_ref()), (4, "y\npod-host\n", "bad\n"));
    let slow = docker.exec_sync(&id, &run("sleep 60"), Duration::from_millis(300), 100).await;
    assert!(matches!(slow, Err(Error::Timeout { .. })));

    let options = ExecOptions { command: run("cat; exit 2"), tty: false, stdin: true, stdout: true, stderr: true };
    let mut session = docker.exec(&id, &options).await.expect("exec");
    let mut stdin = session.stdin.take().expect("asked for");
    stdin.write_all(b"through and back").await.expect("write");
    stdin.shutdown().await.expect("close");
    let mut got = Vec::new();
    while let Some(item) = session.output.next().await {
        got.extend_from_slice(&item.expect("output").1);
    }
    assert_eq!((got.as_slice(), docker.exit_code(&session.id).await.expect("code")), (&b"through and back"[..], 2));

    docker.signal(&id, None).await.expect("stop signal");
    docker.wait(&id).await.expect("wait");
    assert_eq!(docker.inspect(&id).await.expect("inspect").exit_code, 9);
    docker.remove(&id).await.expect("remove");
    docker.remove(&sandbox).await.expect("remove");
}
