//! kill -9 is a supported way to stop: of everything, of each part, at a bad moment. What was acknowledged is there
//! afterwards, what runs is left alone, nothing leaks.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use windlass_testbed::{Cluster, Kubectl, Options, eventually, run};

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

/// kill -9 of `up` in the middle of a rollout, then of Docker; writes that were acknowledged are still there.
#[test]
fn up_and_docker_are_killed() -> Result<()> {
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

    cluster.bed.node_mut(0).kill_docker()?;
    cluster.bed.node_mut(0).start_docker()?;
    let k = cluster.kubectl();
    k.run(&["set", "env", "deployment/moving", "ROUND=2"])?;
    available(&k, "moving", 3)?;
    ensure!(containers(&k, "app=steady")? == steady, "running containers were touched by the crash of Docker");

    k.run(&["delete", "deployment", "steady", "moving", "--timeout=60s"])?;
    eventually(SETTLED, || {
        let now = footprint(&cluster, 0)?;
        ensure!(now == before, "links, mounts and rules: {before:?} before, {now:?} after");
        Ok(())
    })
}

/// Three nodes on one L2: pods reach each other, a killed kubelet and proxy come back, a lost node's pods move.
#[test]
fn nodes_come_and_go() -> Result<()> {
    let mut cluster = Cluster::start(Options { nodes: 3, ..Options::default() })?;
    let k = cluster.kubectl();
    // One pod a node, so that every pair of nodes is tried.
    k.apply("apiVersion: apps/v1\nkind: DaemonSet\nmetadata: {name: page}\nspec:\n  selector: {matchLabels: {app: page}}\n  template:\n    metadata: {labels: {app: page}}\n    spec:\n      terminationGracePeriodSeconds: 1\n      containers: [{name: main, image: 'windlass.test/web:1', ports: [{containerPort: 8080}]}]\n---\napiVersion: v1\nkind: Service\nmetadata: {name: page}\nspec:\n  selector: {app: page}\n  ports: [{port: 80, targetPort: 8080}]\n")?;
    k.run(&["rollout", "status", "daemonset/page", "--timeout=90s"])?;
    reach_all(&k)?;

    let before = containers(&k, "app=page")?;
    cluster.kill_kubelet(1)?;
    cluster.kill_proxy(1)?;
    cluster.start_kubelet(1)?;
    cluster.start_proxy(1)?;
    cluster.wait_nodes_ready()?;
    let k = cluster.kubectl();
    ensure!(containers(&k, "app=page")? == before, "running containers were touched by the crash of a kubelet");

    k.apply(&deployment("moves", 1).replace("containers:", "tolerations: [{key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 1}]\n      nodeSelector: {kubernetes.io/hostname: node3}\n      containers:"))?;
    available(&k, "moves", 1)?;
    cluster.bed.set_link(2, false)?;
    eventually(Duration::from_secs(75), || {
        let status = k.run(&["get", "node", "node3", "-o", r#"jsonpath={.status.conditions[?(@.type=="Ready")].status}"#])?;
        ensure!(status == "Unknown", "node3 is {status}");
        Ok(())
    })?;
    eventually(SETTLED, || {
        let taints = k.run(&["get", "node", "node3", "-o", "jsonpath={.spec.taints[*].key}"])?;
        ensure!(taints.contains("node.kubernetes.io/unreachable"), "{taints}");
        let doomed = k.run(&["get", "pods", "-l", "app=moves", "-o", "jsonpath={.items[*].metadata.deletionTimestamp}"])?;
        ensure!(!doomed.is_empty(), "nothing is evicted from the lost node");
        Ok(())
    })?;
    cluster.bed.set_link(2, true)?;
    cluster.wait_nodes_ready()?;
    let k = cluster.kubectl();
    available(&k, "moves", 1)?;
    reach_all(&k)
}

/// From each pod of the daemon set to each other's address, and to the service.
fn reach_all(k: &Kubectl) -> Result<()> {
    let text = k.run(&["get", "pods", "-l", "app=page", "-o", "jsonpath={range .items[*]}{.metadata.name} {.status.podIP}{\"\\n\"}{end}"])?;
    let pods: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_once(' ')).collect();
    ensure!(pods.len() == 3, "{text}");
    for (from, _) in &pods {
        for url in pods.iter().map(|(_, ip)| format!("http://{ip}:8080/version")).chain(["http://page/version".to_owned()]) {
            eventually(Duration::from_secs(20), || {
                let page = k.run(&["exec", from, "--", "wget", "-qO-", "-T", "3", &url]).with_context(|| format!("{from} to {url}"))?;
                ensure!(page.trim() == "1", "{page}");
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// The same reach when nodes are told to tunnel.
#[test]
fn pods_reach_each_other_by_vxlan() -> Result<()> {
    let tunnel = vec!["--pod-routing=vxlan".to_owned()];
    let cluster = Cluster::start(Options { nodes: 3, up: tunnel.clone(), kubelet: tunnel })?;
    let k = cluster.kubectl();
    k.apply("apiVersion: apps/v1\nkind: DaemonSet\nmetadata: {name: page}\nspec:\n  selector: {matchLabels: {app: page}}\n  template:\n    metadata: {labels: {app: page}}\n    spec:\n      terminationGracePeriodSeconds: 1\n      containers: [{name: main, image: 'windlass.test/web:1'}]\n---\napiVersion: v1\nkind: Service\nmetadata: {name: page}\nspec:\n  selector: {app: page}\n  ports: [{port: 80, targetPort: 8080}]\n")?;
    k.run(&["rollout", "status", "daemonset/page", "--timeout=90s"])?;
    reach_all(&k)
}
