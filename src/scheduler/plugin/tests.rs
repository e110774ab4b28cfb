//! Whole decisions as data: a cluster and a pod in, the node or the reason out. Expectations follow from upstream's
//! formulas and words.

use std::sync::Arc;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde_json::{Value, json};
use windlass_client::informer::Key;

use crate::cluster::{Cluster, SelectorKind};
use crate::cycle::decide;
use crate::decision::{Decision, Outcome};
use crate::object::PodView;
use crate::pod::Pod;
use crate::preempt;
use crate::profile::{Profile, ProfileConfig};

fn node(name: &str, cpu: &str, more: Value) -> Value {
    let mut node = json!({
        "metadata": { "name": name, "labels": { "kubernetes.io/hostname": name } },
        "status": { "allocatable": { "cpu": cpu, "memory": "8Gi", "pods": "10" } },
    });
    merge(&mut node, more);
    node
}

fn pod(name: &str, spec: Value) -> Value {
    let mut pod = json!({ "metadata": { "name": name, "namespace": "n", "uid": name, "labels": { "app": name.split('-').next() } }, "spec": { "containers": [{ "image": "i:1" }] } });
    merge(&mut pod["spec"], spec);
    pod
}

fn cpu(amount: &str) -> Value {
    json!({ "containers": [{ "image": "i:1", "resources": { "requests": { "cpu": amount } } }] })
}

fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => from.into_iter().for_each(|(key, value)| merge(into.entry(key).or_insert(Value::Null), value)),
        (into, from) => *into = from,
    }
}

fn compile(value: Value) -> Arc<Pod> {
    Arc::new(Pod::compile(Arc::new(serde_json::from_value::<PodView>(value).unwrap())))
}

fn cluster(nodes: &[Value], placed: &[(Value, &str)]) -> Cluster {
    let mut cluster = Cluster::default();
    for node in nodes {
        cluster.set_node(&serde_json::from_value(node.clone()).unwrap());
    }
    for (pod, node) in placed {
        cluster.place(compile(pod.clone()), node);
    }
    cluster
}

fn profile() -> Profile {
    Profile::new(&ProfileConfig::default()).unwrap()
}

fn decided(cluster: &Cluster, pod: &Pod) -> Decision {
    decide(&profile(), cluster, pod, &mut 0, &mut SmallRng::seed_from_u64(7))
}

/// `expected` is the node, or else the message.
fn check(cluster: &Cluster, pod: Value, expected: &str) {
    let found = match decided(cluster, &compile(pod.clone())).outcome {
        Outcome::Chosen { node, .. } => node,
        Outcome::Unschedulable { message, .. } => message,
    };
    assert_eq!(found, expected, "{pod}");
}

fn taint(key: &str, effect: &str) -> Value {
    json!({ "spec": { "taints": [{ "key": key, "effect": effect }] } })
}

#[test]
fn room_taints_and_cordons() {
    let nodes = [
        node("small", "1", json!({})),
        node("cordoned", "64", json!({ "spec": { "unschedulable": true } })),
        node("tainted", "64", taint("gpu", "NoSchedule")),
    ];
    let cluster = cluster(&nodes, &[(pod("there", cpu("600m")), "small")]);
    check(&cluster, pod("p", cpu("400m")), "small");
    check(&cluster, pod("p", cpu("500m")), "0/3 nodes are available: 1 Insufficient cpu, 1 node(s) had untolerated taint(s), 1 node(s) were unschedulable.");
    let mut tolerant = cpu("2");
    tolerant["tolerations"] = json!([{ "key": "gpu", "operator": "Exists" }]);
    check(&cluster, pod("p", tolerant), "tainted");
    let nowhere = json!({ "nodeSelector": { "kubernetes.io/hostname": "nowhere" } });
    check(&cluster, pod("p", nowhere), "0/3 nodes are available: 1 node(s) didn't match Pod's node affinity/selector, 1 node(s) had untolerated taint(s), 1 node(s) were unschedulable.");
    check(&Cluster::default(), pod("p", json!({})), "no nodes available to schedule pods");
    check(&cluster, pod("p", json!({ "schedulingGates": [{ "name": "a" }, { "name": "b" }] })), "0/3 nodes are available: waiting for scheduling gates: [a b].");
}

#[test]
fn host_ports() {
    let port = |ip: Option<&str>| json!({ "containers": [{ "ports": [{ "hostPort": 80, "hostIP": ip }] }] });
    let cluster = cluster(&[node("a", "4", json!({}))], &[(pod("there", port(Some("127.0.0.1"))), "a")]);
    check(&cluster, pod("p", port(Some("127.0.0.2"))), "a");
    check(&cluster, pod("p", port(None)), "0/1 nodes are available: 1 node(s) didn't have free ports for the requested pod ports.");
}

#[test]
fn node_affinity() {
    let label = |value: &str| json!({ "metadata": { "labels": { "disk": value } } });
    let cluster = cluster(&[node("a", "4", label("ssd")), node("b", "4", label("hdd"))], &[]);
    let affinity = |kind: &str, rule: Value| json!({ "affinity": { "nodeAffinity": { kind: rule } } });
    let term = |operator: &str, value: &str| json!({ "matchExpressions": [{ "key": "disk", "operator": operator, "values": [value] }] });
    let required = |terms: Value| affinity("requiredDuringSchedulingIgnoredDuringExecution", json!({ "nodeSelectorTerms": terms }));
    check(&cluster, pod("p", required(json!([term("In", "hdd")]))), "b");
    check(&cluster, pod("p", required(json!([term("In", "tape"), term("NotIn", "hdd")]))), "a");
    check(&cluster, pod("p", required(json!([{}]))), "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.");
    let named = json!([{ "matchFields": [{ "key": "metadata.name", "operator": "In", "values": ["b"] }] }]);
    check(&cluster, pod("p", required(named)), "b");
    check(&cluster, pod("p", affinity("preferredDuringSchedulingIgnoredDuringExecution", json!([{ "weight": 100, "preference": term("In", "ssd") }]))), "a");
}

#[test]
fn scores_of_resources() {
    // Half of node `a` is asked for, a quarter of `b`: upstream's formulas by hand.
    let cluster = cluster(&[node("a", "2", json!({})), node("b", "4", json!({}))], &[]);
    let asking = compile(pod("p", json!({ "containers": [{ "resources": { "requests": { "cpu": "1", "memory": "4Gi" } } }] })));
    let decision = decided(&cluster, &asking);
    let scores = decision.scores.unwrap();
    let of = |name: &str| {
        let number = profile().entries.iter().position(|entry| entry.plugin.name() == name).unwrap();
        scores.by_plugin.iter().find(|(n, _)| *n == number).map(|(_, scores)| scores.clone())
    };
    assert_eq!(scores.nodes, ["a", "b"]);
    assert_eq!(of("NodeResourcesFit"), Some(vec![50, 62]));
    // a: (1-0)·100 stays 100, so 50 + (50 + 100 - 100) / 2; b: deviation |1/4 - 1/2| / 2 = 1/8, so 50 + (50 + 87 - 100) / 2.
    assert_eq!(of("NodeResourcesBalancedAllocation"), Some(vec![75, 68]));
    assert_eq!(scores.totals, [125, 130]);
    assert_eq!(of("ImageLocality"), None, "no node has the image");
}

#[test]
fn images_draw_pods() {
    let image = json!({ "status": { "images": [{ "names": ["i:1"], "sizeBytes": 2_000_000_000u64 }] } });
    let cluster = cluster(&[node("a", "4", json!({})), node("b", "4", image)], &[]);
    // Half of 2 GB: (1e9 - 23 MiB) of (1000 MiB - 23 MiB).
    check(&cluster, pod("p", json!({})), "b");
}

#[test]
fn soft_taints_repel() {
    let cluster = cluster(&[node("a", "4", taint("x", "PreferNoSchedule")), node("b", "4", json!({}))], &[]);
    check(&cluster, pod("p", json!({})), "b");
}

fn zone(name: &str) -> Value {
    json!({ "metadata": { "labels": { "zone": name } } })
}

fn spread(hard: bool, min_domains: Option<i32>) -> Value {
    let when = if hard { "DoNotSchedule" } else { "ScheduleAnyway" };
    json!({ "topologySpreadConstraints": [{ "maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": when, "minDomains": min_domains, "labelSelector": { "matchLabels": { "app": "web" } } }] })
}

#[test]
fn spreading() {
    let nodes = [node("a", "4", zone("1")), node("b", "4", zone("1")), node("c", "4", zone("2"))];
    let placed = [(pod("web-1", json!({})), "a"), (pod("web-2", json!({})), "b"), (pod("web-3", json!({})), "c")];
    check(&cluster(&nodes, &placed), pod("web-4", spread(true, None)), "c");
    check(&cluster(&nodes, &placed), pod("web-4", spread(false, None)), "c");
    check(&cluster(&nodes, &placed), pod("web-4", spread(true, Some(3))), "0/3 nodes are available: 3 node(s) didn't match pod topology spread constraints.");
    let unlabelled = [node("a", "4", json!({}))];
    check(&cluster(&unlabelled, &[]), pod("web-4", spread(true, None)), "0/1 nodes are available: 1 node(s) didn't match pod topology spread constraints (missing required label).");
}

#[test]
fn pods_of_a_workload_are_spread_by_default() {
    let mut cluster = cluster(&[node("a", "4", json!({})), node("b", "4", json!({}))], &[(pod("web-1", json!({})), "a")]);
    let selector = windlass_api::selector::LabelSelector::parse("app=web").unwrap();
    cluster.set_selector(SelectorKind::Service, &Key::new("n", "web"), Some(selector));
    check(&cluster, pod("web-2", json!({})), "b");
}

fn near(kind: &str, app: &str) -> Value {
    json!({ "affinity": { kind: { "requiredDuringSchedulingIgnoredDuringExecution": [{ "topologyKey": "zone", "labelSelector": { "matchLabels": { "app": app } } }] } } })
}

#[test]
fn inter_pod_affinity() {
    let nodes = [node("a", "4", zone("1")), node("b", "4", zone("2"))];
    let db = [(pod("db-1", json!({})), "b")];
    check(&cluster(&nodes, &db), pod("web-1", near("podAffinity", "db")), "b");
    check(&cluster(&nodes, &db), pod("web-1", near("podAntiAffinity", "db")), "a");
    check(&cluster(&nodes, &[]), pod("web-1", near("podAffinity", "db")), "0/2 nodes are available: 2 node(s) didn't match pod affinity rules.");
    // The first of a group that wants to be together may go anywhere.
    check(&cluster(&nodes[..1], &[]), pod("web-1", near("podAffinity", "web")), "a");
    // A running pod's anti-affinity counts too.
    let loner = [(pod("loner-1", near("podAntiAffinity", "web")), "a")];
    check(&cluster(&nodes, &loner), pod("web-1", json!({})), "b");
    check(&cluster(&nodes[..1], &loner), pod("web-1", json!({})), "0/1 nodes are available: 1 node(s) didn't satisfy existing pods anti-affinity rules.");
    let preferred = json!({ "affinity": { "podAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [{ "weight": 100, "podAffinityTerm": { "topologyKey": "zone", "labelSelector": { "matchLabels": { "app": "db" } } } }] } } });
    check(&cluster(&nodes, &db), pod("web-1", preferred), "b");
}

fn with_claims(cluster: &mut Cluster, claim: Value, volumes: &[Value], class: Value) {
    cluster.claims.insert(Key::new("n", "data"), Arc::new(serde_json::from_value(claim).unwrap()));
    for volume in volumes {
        cluster.volumes.insert(volume["metadata"]["name"].as_str().unwrap().to_owned(), Arc::new(serde_json::from_value(volume.clone()).unwrap()));
    }
    cluster.classes.insert("local".to_owned(), Arc::new(serde_json::from_value(class).unwrap()));
}

#[test]
fn volumes() {
    let nodes = [node("a", "4", json!({})), node("b", "4", json!({}))];
    let user = || pod("p", json!({ "volumes": [{ "name": "v", "persistentVolumeClaim": { "claimName": "data" } }] }));
    let claim = |more: Value| {
        let mut claim = json!({ "metadata": { "name": "data", "namespace": "n", "uid": "c" }, "spec": { "storageClassName": "local", "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } } });
        merge(&mut claim, more);
        claim
    };
    let volume = |name: &str, size: &str, on: &str| {
        json!({ "metadata": { "name": name }, "status": { "phase": "Available" }, "spec": { "storageClassName": "local", "accessModes": ["ReadWriteOnce"], "capacity": { "storage": size },
            "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [{ "key": "kubernetes.io/hostname", "operator": "In", "values": [on] }] }] } } } })
    };
    let class = |provisioner: &str, mode: &str| json!({ "metadata": { "name": "local" }, "provisioner": provisioner, "volumeBindingMode": mode });
    let waits = || class("kubernetes.io/no-provisioner", "WaitForFirstConsumer");
    let bound = json!({ "metadata": { "annotations": { "pv.kubernetes.io/bind-completed": "yes" } }, "spec": { "volumeName": "v" }, "status": { "phase": "Bound" } });

    check(&cluster(&nodes, &[]), user(), "0/2 nodes are available: persistentvolumeclaim \"data\" not found.");
    for (claim, volumes, class, expected) in [
        (claim(bound), vec![volume("v", "1Gi", "b")], waits(), "b"),
        (claim(json!({})), vec![volume("v", "1Gi", "b"), volume("w", "1Mi", "a")], waits(), "b"),
        (claim(json!({})), vec![volume("v", "1Mi", "b")], waits(), "0/2 nodes are available: 2 node(s) didn't find available persistent volumes to bind."),
        (claim(json!({})), vec![], class("kubernetes.io/no-provisioner", "Immediate"), "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims."),
    ] {
        let mut cluster = cluster(&nodes, &[]);
        with_claims(&mut cluster, claim, &volumes, class);
        check(&cluster, user(), expected);
    }
}

#[test]
fn preemption_takes_the_least() {
    let spec = |priority: i32, amount: &str| {
        let mut spec = cpu(amount);
        spec["priority"] = json!(priority);
        spec
    };
    let nodes = [node("a", "1", json!({})), node("b", "1", json!({})), node("c", "1", taint("x", "NoSchedule"))];
    let placed = [(pod("x-1", spec(5, "800m")), "a"), (pod("y-1", spec(1, "300m")), "b"), (pod("y-2", spec(2, "300m")), "b"), (pod("y-3", spec(1, "300m")), "b")];
    let cluster = cluster(&nodes, &placed);
    let find = |pod: Value| {
        let pod = compile(pod);
        let decision = decided(&cluster, &pod);
        preempt::find(&profile(), &cluster, &pod, &decision, &mut SmallRng::seed_from_u64(7))
    };
    // On `b` two of priority 1 go, the one of 2 stays: less harm than the one of 5 on `a`.
    let found = find(pod("p", spec(10, "700m"))).unwrap();
    let mut victims: Vec<&str> = found.victims.iter().map(|victim| victim.key.name.as_str()).collect();
    victims.sort_unstable();
    assert_eq!((found.node.as_str(), victims), ("b", vec!["y-1", "y-3"]));
    assert_eq!(find(pod("p", spec(0, "700m"))).unwrap_err(), "0/3 nodes are available: 1 Preemption is not helpful for scheduling, 2 No preemption victims found for incoming pod.");
    let mut never = spec(10, "700m");
    never["preemptionPolicy"] = json!("Never");
    assert_eq!(find(pod("p", never)).unwrap_err(), "not eligible due to preemptionPolicy=Never.");
}
