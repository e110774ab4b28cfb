//! Upstream's own kube-scheduler and kube-controller-manager at work on our API server: the strongest proof of an API.
//! And upstream-built load, with JSON and with protobuf bodies.

use std::time::Duration;

use anyhow::{Result, ensure};
use windlass_testbed::{Cluster, Options, Process, eventually, run};

/// Starts a peer in the hub with an administrator's rights.
fn peer(cluster: &Cluster, program: &str, port: u16, more: &[&str]) -> Result<Process> {
    let kubeconfig = cluster.kubeconfig().display().to_string();
    let mut command = cluster.bed.command(cluster.bed.programs.upstream.join(program));
    command
        .args(["--kubeconfig", &kubeconfig, "--authentication-kubeconfig", &kubeconfig, "--authorization-kubeconfig", &kubeconfig])
        .args(["--leader-elect=false", "--secure-port", &port.to_string(), "--cert-dir"])
        .arg(cluster.bed.path().join(program))
        .args(more);
    Process::start(command, &cluster.bed.path().join(format!("{program}.log")))
}

fn without(role: &str) -> Options {
    Options { up: vec![format!("--without={role}")], ..Options::default() }
}

#[test]
fn upstreams_scheduler_schedules() -> Result<()> {
    let cluster = Cluster::start(without("scheduler"))?;
    let k = cluster.kubectl();
    k.run(&["create", "deployment", "web", "--image=windlass.test/busybox:1", "--replicas=3", "--", "sleep", "3600"])?;
    let mut scheduler = peer(&cluster, "kube-scheduler", 10459, &[])?;
    k.run(&["rollout", "status", "deployment/web", "--timeout=90s"])?;
    scheduler.check()?;
    let events = k.run(&["get", "events", "-o", "jsonpath={range .items[?(@.reason==\"Scheduled\")]}{.reportingComponent}{\"\\n\"}{end}"])?;
    ensure!(events.lines().count() == 3 && events.lines().all(|line| line == "default-scheduler"), "{events}");
    Ok(())
}

#[test]
fn upstreams_controller_manager_controls() -> Result<()> {
    let cluster = Cluster::start(without("controller-manager"))?;
    let k = cluster.kubectl();
    // Controllers that need our keys stay out by themselves, since none are given: the keys stay with the API server.
    let mut manager = peer(&cluster, "kube-controller-manager", 10457, &["--allocate-node-cidrs", "--cluster-cidr=10.244.0.0/16"])?;
    k.run(&["create", "namespace", "lab"])?;
    eventually(Duration::from_secs(60), || {
        manager.check()?;
        k.run(&["-n", "lab", "get", "serviceaccount", "default"])
    })?;
    cluster.wait_nodes_ready()?;
    k.run(&["-n", "lab", "create", "deployment", "web", "--image=windlass.test/busybox:1", "--replicas=2", "--", "sleep", "3600"])?;
    k.run(&["-n", "lab", "create", "job", "sum", "--image=windlass.test/busybox:1", "--", "true"])?;
    k.run(&["-n", "lab", "rollout", "status", "deployment/web", "--timeout=90s"])?;
    k.run(&["-n", "lab", "wait", "--for=condition=Complete", "job/sum", "--timeout=90s"])?;
    k.run(&["-n", "lab", "expose", "deployment/web", "--port=80"])?;
    eventually(Duration::from_secs(30), || {
        let addresses = k.run(&["-n", "lab", "get", "endpointslices", "-o", "jsonpath={.items[*].endpoints[*].addresses[0]}"])?;
        ensure!(addresses.split_whitespace().count() == 2, "{addresses}");
        Ok(())
    })?;
    k.run(&["delete", "namespace", "lab", "--timeout=90s"])?;
    manager.check()
}

#[test]
fn load_with_both_encodings() -> Result<()> {
    // Upstream's load expects to be alone with its nodes: controllers would write between its reads and its writes.
    let cluster = Cluster::start(without("controller-manager"))?;
    cluster.kubectl().run(&["create", "serviceaccount", "default"])?;
    for encoding in [&[][..], &["-proto"]] {
        for load in [&["nodes", "-n", "50"][..], &["sched", "-n", "200"], &["patch", "-n", "200"], &["list", "-n", "5"], &["watch", "-n", "20", "-w", "10"], &["clean"]] {
            let mut command = cluster.bed.command(cluster.bed.programs.upstream.join("loadgen"));
            command.arg("-kubeconfig").arg(cluster.kubeconfig()).args(encoding).args(load);
            let said = run(&mut command)?;
            ensure!(!said.contains("FAILED"), "{encoding:?} {load:?}: {said}");
        }
    }
    Ok(())
}
