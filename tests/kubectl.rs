//! The daily work of a Kubernetes user, with the unmodified kubectl and Helm on a one-node cluster.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use windlass_testbed::{Cluster, Kubectl, eventually, run};
use windlass_tests::contains;

const MANIFESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/manifests");

fn app(file: &str) -> String {
    format!("{MANIFESTS}/app/{file}")
}

/// Fetches the web page by the node's port.
fn visit(cluster: &Cluster) -> Result<String> {
    let url = format!("http://{}:30080/cgi-bin/visit", cluster.bed.node(0).address);
    run(cluster.bed.command("curl").args(["--silent", "--fail", "--max-time", "5", &url]))
}

/// `kubectl run` to `kubectl logs`, and what one does with a single pod.
#[test]
fn one_pod() -> Result<()> {
    let cluster = Cluster::single()?;
    let k = cluster.kubectl();
    k.run(&["run", "hello", "--image=windlass.test/busybox:1", "--restart=Never", "--command", "--", "sh", "-c", "echo hello; sleep 3600"])?;
    k.run(&["wait", "--for=condition=Ready", "pod/hello", "--timeout=60s"])?;
    contains(&k.run(&["logs", "hello"])?, "hello")?;
    contains(&k.run(&["exec", "hello", "--", "cat", "/etc/resolv.conf"])?, "default.svc.cluster.local")?;
    ensure!(k.feed(&["exec", "-i", "hello", "--", "cat"], "through stdin")? == "through stdin", "stdin of exec");
    let failed = k.output(&["exec", "hello", "--", "sh", "-c", "exit 7"], "")?;
    ensure!(failed.status.code() == Some(7), "the exit code of exec is {:?}", failed.status.code());
    k.feed(&["exec", "-i", "hello", "--", "sh", "-c", "cat > /tmp/there"], "copied")?;
    let copy = cluster.bed.path().join("copy");
    k.run(&["cp", "hello:/tmp/there", &copy.display().to_string()])?;
    ensure!(std::fs::read_to_string(&copy)? == "copied", "kubectl cp");
    k.run(&["label", "pod", "hello", "colour=blue"])?;
    k.run(&["annotate", "pod", "hello", "note=seen"])?;
    contains(&k.run(&["get", "pods", "-l", "colour=blue", "-o", "wide"])?, "hello")?;
    for (kind, patch) in [
        ("json", r#"[{"op":"add","path":"/metadata/labels/one","value":"1"}]"#),
        ("merge", r#"{"metadata":{"labels":{"two":"2"}}}"#),
        ("strategic", r#"{"metadata":{"labels":{"three":"3"}}}"#),
    ] {
        k.run(&["patch", "pod", "hello", "--type", kind, "-p", patch])?;
    }
    let labels = k.run(&["get", "pod", "hello", "-o", "jsonpath={.metadata.labels}"])?;
    for label in [r#""one":"1""#, r#""two":"2""#, r#""three":"3""#] {
        contains(&labels, label)?;
    }
    contains(&k.run(&["describe", "pod", "hello"])?, "Successfully assigned default/hello to node1")?;
    contains(&k.run(&["events", "--for", "pod/hello"])?, "Started")?;
    k.run(&["delete", "pod", "hello", "--grace-period=1"])?;
    contains(&k.refused(&["get", "pod", "hello"], "")?, "not found")
}

/// A web front end and its store, from the first `apply` to the last `delete`.
#[test]
fn two_tier_app() -> Result<()> {
    let cluster = Cluster::single()?;
    let k = cluster.kubectl();
    k.run(&["apply", "-k", &app("")])?;
    k.run(&["rollout", "status", "statefulset/store", "--timeout=90s"])?;
    k.run(&["rollout", "status", "deployment/web", "--timeout=90s"])?;
    eventually(Duration::from_secs(20), || contains(&visit(&cluster)?, "version 1 visit"))?;

    let changed = std::fs::read_to_string(app("web.yaml"))?.replace("web:1", "web:2");
    let diff = k.output(&["diff", "-f", "-"], &changed)?;
    ensure!(diff.status.code() == Some(1), "diff tells of a change: {:?}", diff.status.code());
    contains(&String::from_utf8_lossy(&diff.stdout), "+        image: windlass.test/web:2").or_else(|_| contains(&String::from_utf8_lossy(&diff.stdout), "web:2"))?;
    k.apply(&changed)?;
    k.run(&["rollout", "status", "deployment/web", "--timeout=90s"])?;
    eventually(Duration::from_secs(20), || contains(&visit(&cluster)?, "version 2 visit"))?;
    k.run(&["rollout", "undo", "deployment/web"])?;
    k.run(&["rollout", "status", "deployment/web", "--timeout=90s"])?;
    eventually(Duration::from_secs(20), || contains(&visit(&cluster)?, "version 1 visit"))?;
    k.run(&["rollout", "restart", "deployment/web"])?;
    k.run(&["rollout", "status", "deployment/web", "--timeout=90s"])?;
    contains(&k.run(&["rollout", "history", "deployment/web"])?, "REVISION")?;

    k.run(&["scale", "deployment/web", "--replicas=3"])?;
    k.run(&["wait", "deployment/web", "--for=jsonpath={.status.readyReplicas}=3", "--timeout=60s"])?;
    k.run(&["expose", "deployment/web", "--name=inside", "--port=8080"])?;
    k.run(&["autoscale", "deployment/web", "--min=1", "--max=4", "--cpu=80%"])?;
    contains(&k.run(&["get", "hpa", "web"])?, "Deployment/web")?;

    dns(&k)?;
    store_outlives_its_pod(&k)?;
    k.run(&["delete", "-k", &app(""), "--timeout=90s"])?;
    k.run(&["delete", "service,hpa", "inside", "web", "--ignore-not-found"])?;
    eventually(Duration::from_secs(30), || {
        let left = k.run(&["get", "pods,replicasets,endpointslices", "-l", "app=shop", "-o", "name"])?;
        ensure!(left.is_empty(), "left behind: {left}");
        Ok(())
    })
}

fn dns(k: &Kubectl) -> Result<()> {
    let lookup = |name: &str| k.run(&["exec", "deployment/web", "-c", "web", "--", "nslookup", name]);
    let service = k.run(&["get", "service", "inside", "-o", "jsonpath={.spec.clusterIP}"])?;
    contains(&lookup("inside.default.svc.cluster.local")?, &service)?;
    let pod = k.run(&["get", "pod", "store-0", "-o", "jsonpath={.status.podIP}"])?;
    contains(&lookup("store.default.svc.cluster.local")?, &pod)?;
    contains(&lookup("store-0.store.default.svc.cluster.local")?, &pod)
}

fn store_outlives_its_pod(k: &Kubectl) -> Result<()> {
    let count = |k: &Kubectl| k.run(&["exec", "store-0", "--", "redis-cli", "get", "visits"]);
    let before = count(k)?;
    let uid = k.run(&["get", "pod", "store-0", "-o", "jsonpath={.metadata.uid}"])?;
    k.run(&["delete", "pod", "store-0"])?;
    eventually(Duration::from_secs(60), || {
        let now = k.run(&["get", "pod", "store-0", "-o", "jsonpath={.metadata.uid}"])?;
        ensure!(now != uid, "the pod is still the old one");
        Ok(())
    })?;
    k.run(&["wait", "--for=condition=Ready", "pod/store-0", "--timeout=60s"])?;
    ensure!(count(k)? == before, "the store forgot: {before}");
    contains(&k.run(&["exec", "store-0", "--", "cat", "/etc/store/greeting"])?, "hello")?;
    contains(&k.run(&["exec", "store-0", "--", "sh", "-c", "echo $GREETING $PASSWORD"])?, "hello open-sesame")
}

/// Questions about the API, rights, certificates and nodes.
#[test]
fn the_api_explains_itself() -> Result<()> {
    let cluster = Cluster::single()?;
    let k = cluster.kubectl();
    contains(&k.run(&["version", "-o", "yaml"])?, "gitVersion: v1.37")?;
    let resources = k.run(&["api-resources"])?;
    for resource in ["pods", "deployments", "horizontalpodautoscalers", "certificatesigningrequests", "endpointslices"] {
        contains(&resources, resource)?;
    }
    for line in resources.lines().skip(1) {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let version = columns.iter().find(|c| c.contains('/') || **c == "v1").context("an API version")?;
        // What other programs serve has no document of ours.
        if !version.starts_with("metrics.k8s.io/") {
            contains(&k.run(&["explain", columns[0], "--api-version", version])?, "KIND:")?;
        }
    }
    contains(&k.run(&["explain", "pod.spec.containers.livenessProbe.httpGet.path"])?, "Path to access")?;
    contains(&k.run(&["auth", "whoami"])?, "system:masters")?;
    contains(&k.run(&["auth", "can-i", "--list"])?, "*.*")?;
    let denied = k.output(&["auth", "can-i", "get", "secrets", "--as=system:serviceaccount:default:default"], "")?;
    contains(&String::from_utf8_lossy(&denied.stdout), "no")?;
    contains(&k.refused(&["get", "secrets", "--as=nobody"], "")?, "forbidden")?;
    contains(&k.run(&["get", "--raw", "/readyz?verbose"])?, "[+]")?;
    contains(&k.run(&["cluster-info"])?, "is running at")?;
    k.run(&["taint", "node", "node1", "dedicated=yes:NoSchedule"])?;
    k.run(&["taint", "node", "node1", "dedicated-"])?;
    k.run(&["cordon", "node1"])?;
    contains(&k.run(&["get", "nodes"])?, "SchedulingDisabled")?;
    k.run(&["uncordon", "node1"])?;
    eventually(Duration::from_secs(90), || contains(&k.run(&["top", "nodes"])?, "node1"))?;
    certificate(&cluster)
}

fn certificate(cluster: &Cluster) -> Result<()> {
    let k = cluster.kubectl();
    let dir = cluster.bed.path();
    let key = dir.join("user.key");
    run(Command::new("openssl").args(["req", "-new", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=carol/O=devs", "-keyout"]).arg(&key).arg("-out").arg(dir.join("user.csr")))?;
    let request = run(Command::new("base64").arg("-w0").arg(dir.join("user.csr")))?;
    k.apply(&format!(
        "apiVersion: certificates.k8s.io/v1\nkind: CertificateSigningRequest\nmetadata: {{name: carol}}\nspec:\n  request: {request}\n  signerName: kubernetes.io/kube-apiserver-client\n  usages: [client auth]\n"
    ))?;
    contains(&k.run(&["get", "csr", "carol"])?, "Pending")?;
    k.run(&["certificate", "approve", "carol"])?;
    let certificate = eventually(Duration::from_secs(20), || {
        let certificate = k.run(&["get", "csr", "carol", "-o", "jsonpath={.status.certificate}"])?;
        ensure!(!certificate.is_empty(), "not issued yet");
        Ok(certificate)
    })?;
    let file = dir.join("user.crt.b64");
    std::fs::write(&file, certificate)?;
    std::fs::write(dir.join("user.crt"), run(Command::new("base64").arg("-d").arg(&file))?)?;
    let carol = |arguments: &[&str]| {
        let certificate = format!("--client-certificate={}", dir.join("user.crt").display());
        let key = format!("--client-key={}", key.display());
        let mut all = vec![certificate.as_str(), key.as_str()];
        all.extend(arguments);
        // The administrator's credential in the kubeconfig would win over the flags.
        k.run(&[&["--kubeconfig=/dev/null", &format!("--server=https://{}:6443", cluster.bed.node(0).address), "--insecure-skip-tls-verify"][..], &all].concat())
    };
    contains(&carol(&["auth", "whoami"])?, "carol")?;
    k.run(&["create", "rolebinding", "carol", "--clusterrole=view", "--user=carol"])?;
    eventually(Duration::from_secs(10), || carol(&["get", "pods"]))?;
    ensure!(carol(&["get", "secrets"]).is_err(), "view does not show secrets");
    Ok(())
}

/// Streams that stay open: logs -f, attach, port-forward, --watch, debug; and a drained node.
#[test]
fn streams_and_drain() -> Result<()> {
    let cluster = Cluster::single()?;
    let k = cluster.kubectl();
    let log = |name: &str| cluster.bed.path().join(name);
    let watch = k.start(&["get", "pods", "--watch"], &log("watch"))?;
    k.run(&["create", "deployment", "ticker", "--image=windlass.test/busybox:1", "--", "sh", "-c", "i=0; while true; do i=$((i+1)); echo tick $i; sleep 0.2; done"])?;
    k.run(&["create", "deployment", "page", "--image=windlass.test/web:1", "--port=8080"])?;
    k.run(&["rollout", "status", "deployment/ticker", "--timeout=60s"])?;
    k.run(&["rollout", "status", "deployment/page", "--timeout=60s"])?;
    let follow = k.start(&["logs", "-f", "deployment/ticker", "--tail=1"], &log("follow"))?;
    let attach = k.start(&["attach", "deployment/ticker"], &log("attach"))?;
    let forward = k.start(&["port-forward", "deployment/page", "18080:8080"], &log("forward"))?;
    let read = |name: &str| std::fs::read_to_string(log(name)).unwrap_or_default();
    for name in ["follow", "attach"] {
        eventually(Duration::from_secs(20), || {
            ensure!(read(name).matches("tick").count() > 5, "{name}: {}", read(name));
            Ok(())
        })?;
    }
    eventually(Duration::from_secs(20), || {
        let page = run(cluster.bed.command("curl").args(["--silent", "--fail", "http://127.0.0.1:18080/version"]))?;
        ensure!(page.trim() == "1", "{page}");
        Ok(())
    })?;
    eventually(Duration::from_secs(10), || contains(&read("watch"), "Running"))?;
    drop((follow, attach, forward, watch));

    let pod = k.run(&["get", "pods", "-l", "app=page", "-o", "jsonpath={.items[0].metadata.name}"])?;
    k.run(&["debug", &pod, "--image=windlass.test/busybox:1", "--container=probe", "--", "sh", "-c", "wget -qO- http://127.0.0.1:8080/version; sleep 60"])?;
    eventually(Duration::from_secs(30), || contains(&k.run(&["logs", &pod, "-c", "probe"])?, "1"))?;

    k.run(&["drain", "node1", "--ignore-daemonsets", "--force", "--delete-emptydir-data", "--timeout=90s"])?;
    contains(&k.run(&["get", "nodes"])?, "SchedulingDisabled")?;
    eventually(Duration::from_secs(20), || {
        let reasons = k.run(&["get", "events", "-o", "jsonpath={.items[*].message}"])?;
        contains(&reasons, "0/1 nodes are available: 1 node(s) were unschedulable")
    })?;
    k.run(&["uncordon", "node1"])?;
    k.run(&["rollout", "status", "deployment/page", "--timeout=60s"])?;
    Ok(())
}

/// Jobs, cron jobs, daemon sets, and a replace.
#[test]
fn batch_and_daemons() -> Result<()> {
    let cluster = Cluster::single()?;
    let k = cluster.kubectl();
    k.run(&["create", "job", "sum", "--image=windlass.test/busybox:1", "--", "sh", "-c", "echo $((40+2))"])?;
    k.run(&["wait", "--for=condition=Complete", "job/sum", "--timeout=60s"])?;
    contains(&k.run(&["logs", "job/sum"])?, "42")?;
    k.run(&["create", "cronjob", "later", "--image=windlass.test/busybox:1", "--schedule=0 0 1 1 *", "--", "true"])?;
    k.run(&["create", "job", "now", "--from=cronjob/later"])?;
    k.run(&["wait", "--for=condition=Complete", "job/now", "--timeout=60s"])?;
    k.apply(
        "apiVersion: apps/v1\nkind: DaemonSet\nmetadata: {name: agent}\nspec:\n  selector: {matchLabels: {app: agent}}\n  template:\n    metadata: {labels: {app: agent}}\n    spec:\n      terminationGracePeriodSeconds: 1\n      containers: [{name: agent, image: windlass.test/busybox:1, command: [sleep, '3600']}]\n",
    )?;
    k.run(&["rollout", "status", "daemonset/agent", "--timeout=60s"])?;
    let current = k.run(&["get", "daemonset", "agent", "-o", "yaml"])?;
    k.feed(&["replace", "-f", "-"], &current.replace("\"3600\"", "\"7200\"").replace("'3600'", "'7200'"))?;
    k.run(&["rollout", "status", "daemonset/agent", "--timeout=60s"])?;
    contains(&k.run(&["get", "pods", "-l", "app=agent", "-o", "jsonpath={.items[0].spec.containers[0].command}"])?, "7200")?;
    k.run(&["delete", "daemonset/agent", "job/sum", "job/now", "cronjob/later", "--timeout=60s"])?;
    eventually(Duration::from_secs(30), || {
        let left = k.run(&["get", "pods", "-o", "name"])?;
        ensure!(left.is_empty(), "left behind: {left}");
        Ok(())
    })
}

/// Helm 4: install, upgrade, rollback and uninstall of a chart with hooks and a CRD.
#[test]
fn helm() -> Result<()> {
    let cluster = Cluster::single()?;
    let k = cluster.kubectl();
    let chart = format!("{MANIFESTS}/chart");
    let helm = |arguments: &[&str]| {
        let mut command = cluster.bed.command(cluster.bed.programs.upstream.join("helm"));
        run(command.arg("--kubeconfig").arg(cluster.kubeconfig()).args(arguments).env("HOME", cluster.bed.path()))
    };
    let message = || k.run(&["get", "visitor", "shop", "-o", "jsonpath={.spec.message} {.spec.times}"]);
    helm(&["install", "shop", &chart, "--wait", "--timeout=90s"])?;
    ensure!(message()? == "first 1", "{}", message()?);
    contains(&k.run(&["get", "vis"])?, "MESSAGE")?;
    contains(&k.run(&["logs", "job/shop-hook"])?, "hooked")?;
    helm(&["upgrade", "shop", &chart, "--set", "message=second", "--wait", "--timeout=90s"])?;
    ensure!(message()? == "second 1", "{}", message()?);
    helm(&["rollback", "shop", "1", "--wait", "--timeout=90s"])?;
    ensure!(message()? == "first 1", "{}", message()?);
    contains(&helm(&["history", "shop"])?, "Rollback to 1")?;
    let refused = k.refused(&["patch", "visitor", "shop", "--type=merge", "-p", r#"{"spec":{"times":0}}"#], "")?;
    contains(&refused, "spec.times: Invalid value")?;
    helm(&["uninstall", "shop", "--wait", "--timeout=90s"])?;
    contains(&k.refused(&["get", "configmap", "shop-config"], "")?, "not found")
}
