//! kill -9 is a supported way to stop, at a bad moment too. What was acknowledged is there
//! afterwards, what runs is left alone, nothing leaks.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use windlass_testbed::{Cluster, Kubectl, eventually, run};

const SETTLED: Duration = Duration::from_secs(60);

fn deployment(name: &str, replicas: u32) -> String {
    format!(
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: {name}}}\nspec:\n  replicas: {replicas}\n  selector: {{matchLabels: {{app: {name}}}}}\n  template:\n    metadata: {{labels: {{app: {name}}}}}\n    spec:\n      terminationGracePeriodSeconds: 1\n      containers: [{{name: main, image: 'windlass.test/busybox:1', command: [sh, -c, 'trap exit TERM; while true; do sleep 0.1; done'], env: [{{name: ROUND, value: '0'}}]}}]\n"
    )
}

/// Container id by pod, for pods with a label.
fn containers(k: &Kubectl, selector: &str) -> Result<BTreeMap<String, String>> {
    let template = "{range .items[*]}{.metadata.name} {.status.containerStatuses[0].containerID} {.status.containerStatuses[0].restartCount}{\"\\n\"}{end}";
    let text = k.run(&["get", "pods", "-l", selector, "-o", &format!("jsonpath={template}")])?;
    Ok(text.lines().filter_map(|line| line.split_once(' ')).map(|(pod, rest)| (pod.to_owned(), rest.to_owned())).collect())
}

fn available(k: &Kubectl, name: &str, replicas: u32) -> Result<()> {
    eventually(SETTLED, || {
        let path = "jsonpath={.status.updatedReplicas} {.status.availableReplicas} {.status.replicas} {.metadata.generation} {.status.observedGeneration}";
        let text = k.run(&["get", "deployment", name, "-o", path])?;
        let numbers: Vec<&str> = text.split_whitespace().collect();
        let want = replicas.to_string();
        ensure!(numbers.len() == 5 && numbers[..3].iter().all(|n| *n == want) && numbers[3] == numbers[4], "{name}: {text}");
        Ok(())
    })
}

/// Links, mounts and rules of pods on a node, counted.
fn footprint(cluster: &Cluster, node: usize) -> Result<(usize, usize, usize)> {
    let node = cluster.bed.node(node);
    let links = run(node.command("ip").args(["-o", "link", "show", "type", "veth"]))?.lines().count();
    let mounts = std::fs::read_to_string("/proc/self/mounts")?;
    let mounts = mounts.lines().filter(|line| line.contains(&format!("{}/", node.dir.display())) && line.contains("/pods/")).count();
    let rules = run(&mut node.command("iptables-save"))?.lines().filter(|line| line.starts_with("-A")).count();
    Ok((links, mounts, rules))
}

/// kill -9 of `up` in the middle of a rollout; writes that were acknowledged are still there.
#[test]
fn up_is_killed() -> Result<()> {
    let mut cluster = Cluster::single()?;
    let before = footprint(&cluster, 0)?;
    cluster.kubectl().apply(&deployment("steady", 2))?;
    cluster.kubectl().apply(&deployment("moving", 3))?;
    available(&cluster.kubectl(), "steady", 2)?;
    available(&cluster.kubectl(), "moving", 3)?;
    let steady = containers(&cluster.kubectl(), "app=steady")?;

    cluster.kubectl().run(&["set", "env", "deployment/moving", "ROUND=1"])?;
    let mut acknowledged = Vec::new();
    for number in 0..20 {
        let name = format!("ack-{number}");
        cluster.kubectl().run(&["create", "configmap", &name, &format!("--from-literal=n={number}")])?;
        acknowledged.push(name);
    }
    cluster.kill_up()?;
    cluster.start_up()?;
    let k = cluster.kubectl();
    available(&k, "moving", 3)?;
    for name in &acknowledged {
        k.run(&["get", "configmap", name]).with_context(|| format!("{name} was acknowledged"))?;
    }
    ensure!(containers(&k, "app=steady")? == steady, "running containers were touched by the crash of up");

    k.run(&["delete", "deployment", "steady", "moving", "--timeout=60s"])?;
    eventually(SETTLED, || {
        let now = footprint(&cluster, 0)?;
        ensure!(now == before, "links, mounts and rules: {before:?} before, {now:?} after");
        Ok(())
    })
}
