//! The rules at work: a node, its pods and an outside machine, each a network namespace that ends with the test.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use serde_json::{Value, json};
use windlass_net::link::{Netlink, Veth};
use windlass_net::netns::{self, Namespace};
use windlass_net::pod::{Attach, Config, PodNetwork};

use super::*;
use crate::model::{ServiceView, SliceView, service_ports};
use crate::rules::{LocalDetector, NodePortAddresses};

const NODE: &str = "192.0.2.1";

struct World {
    node: Namespace,
    outside: Namespace,
    pods: Vec<Namespace>,
    _switch: Namespace,
    _dir: tempfile::TempDir,
}

fn block<T: Send, F: Future<Output = windlass_net::Result<T>>>(ns: &Namespace, f: impl FnOnce() -> F + Send) -> T {
    netns::block_on(&ns.path(), f).expect("enter").expect("network")
}

/// A node with pods 10.88.1.2, .3, ... on its bridge, and an outside machine 192.0.2.9 on its network.
fn world(pods: usize) -> World {
    let new = || Namespace::new().expect("root");
    let world = World { node: new(), outside: new(), pods: (0..pods).map(|_| new()).collect(), _switch: new(), _dir: tempfile::tempdir().unwrap() };
    block(&world._switch, || async {
        let netlink = Netlink::open()?;
        let bridge = netlink.ensure_bridge("sw", [2, 0, 0, 0, 0, 1], 1500).await?;
        for (n, ns) in [&world.node, &world.outside].into_iter().enumerate() {
            let mac = [2, 0, 0, 0, 1, n as u8];
            let name = format!("p{n}");
            netlink.make_veth(&Veth { name: &name, bridge: bridge.index, alias: "", peer: "up0", peer_mac: mac, peer_ns: &ns.path(), mtu: 1500 }).await?;
        }
        Ok(())
    });
    for (ns, ip, gateway) in [(&world.node, NODE, "192.0.2.9"), (&world.outside, "192.0.2.9", NODE)] {
        block(ns, || async {
            let netlink = Netlink::open()?;
            netlink.set_up(netlink.need("lo").await?.index).await?;
            let up = netlink.need("up0").await?;
            netlink.set_up(up.index).await?;
            netlink.ensure_address(up.index, ip.parse().unwrap(), 24).await?;
            let default = windlass_net::link::Route { destination: "0.0.0.0/0".parse()?, gateway: Some(gateway.parse().unwrap()), link: up.index, on_link: true };
            netlink.ensure_route(&default, 4).await
        });
    }
    block(&world.node, || async {
        windlass_net::sysctl::set("net/ipv4/conf/all/route_localnet", "1")?;
        let network = PodNetwork::new(Config {
            pod_cidrs: vec!["10.88.1.0/24".parse()?, "fd88:1::/64".parse()?],
            cluster_cidrs: vec!["10.88.0.0/16".parse()?, "fd88::/16".parse()?],
            state_dir: world._dir.path().to_owned(),
            ..Config::default()
        })
        .await?;
        for (n, pod) in world.pods.iter().enumerate() {
            let attach = Attach { pod_uid: n.to_string(), namespace: "d".into(), name: "p".into(), netns: pod.path(), host_ports: vec![] };
            network.attach(&attach).await?;
        }
        Ok(())
    });
    for (n, pod) in world.pods.iter().enumerate() {
        serve(pod, &format!("pod{n}"));
    }
    world
}

/// Answers on TCP and UDP port 80: its name and the peer's address, then echoes lines.
fn serve(ns: &Namespace, name: &str) {
    let name = name.to_owned();
    let (tcp, udp) = netns::run(&ns.path(), || (TcpListener::bind("[::]:80").unwrap(), UdpSocket::bind("0.0.0.0:80").unwrap())).unwrap();
    let for_udp = name.clone();
    std::thread::spawn(move || {
        for stream in tcp.incoming().flatten() {
            let name = name.clone();
            std::thread::spawn(move || {
                let mut stream = stream;
                let peer = stream.peer_addr().map(|a| a.ip().to_canonical().to_string()).unwrap_or_default();
                let _ = stream.write_all(format!("{name} {peer}\n").as_bytes());
                let mut byte = [0];
                while stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {}
            });
        }
    });
    std::thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((_, peer)) = udp.recv_from(&mut buffer) {
            let _ = udp.send_to(for_udp.as_bytes(), peer);
        }
    });
}

fn connect(from: &Namespace, to: &str) -> std::io::Result<(TcpStream, String)> {
    let to: SocketAddr = to.parse().unwrap();
    netns::run(&from.path(), move || {
        let mut stream = TcpStream::connect_timeout(&to, Duration::from_secs(2))?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        let (mut line, mut byte) = (String::new(), [0]);
        loop {
            stream.read_exact(&mut byte)?;
            if byte[0] == b'\n' {
                return Ok((stream, line));
            }
            line.push(char::from(byte[0]));
        }
    })
    .unwrap()
}

fn ask(from: &Namespace, to: &str) -> String {
    connect(from, to).map_or_else(|e| format!("{:?}", e.kind()), |(_, line)| line)
}

fn settings() -> Settings {
    Settings {
        family: Family::V4,
        prefix: "KUBE-".into(),
        node: "n1".into(),
        node_ip: Some(NODE.parse().unwrap()),
        zone: None,
        masquerade_all: false,
        masquerade_mark: "0x4000".into(),
        detector: LocalDetector::new("-s 10.88.0.0/16"),
        node_port_addresses: NodePortAddresses::All,
        localhost_node_ports: true,
        liberal: false,
        large: false,
    }
}

/// Changes the service `d/s` to this spec and these pods (local to n1), and syncs.
fn change(world: &World, state: &mut State, spec: &Value, pods: &[usize]) {
    let service: ServiceView = serde_json::from_value(json!({
        "metadata": {"namespace": "d", "name": "s"}, "spec": spec,
        "status": {"loadBalancer": {"ingress": spec["lb"].as_str().map(|ip| json!([{"ip": ip}])).unwrap_or_else(|| json!([]))}},
    }))
    .unwrap();
    let endpoints: Vec<Value> = pods.iter().map(|n| json!({"addresses": [format!("10.88.1.{}", n + 2)], "nodeName": "n1"})).collect();
    let slice: SliceView = serde_json::from_value(json!({
        "metadata": {"namespace": "d", "name": "s-1"}, "addressType": "IPv4", "endpoints": endpoints,
        "ports": [{"name": "", "port": 80, "protocol": "TCP"}, {"name": "u", "port": 80, "protocol": "UDP"}],
    }))
    .unwrap();
    let name = ServiceName { namespace: "d".into(), name: "s".into() };
    state.update(&name, service_ports(Family::V4, "n1", &service, [&slice]));
    block(&world.node, || async { state.sync().await });
}

fn spec(extra: Value) -> Value {
    let mut spec = json!({"type": "NodePort", "clusterIP": "10.99.0.1", "externalIPs": ["203.0.113.7"],
        "ports": [{"name": "", "port": 80, "protocol": "TCP", "nodePort": 30080}, {"name": "u", "port": 80, "protocol": "UDP"}]});
    spec.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    spec
}

#[test]
fn services_lead_to_their_endpoints() {
    let world = world(3);
    let mut state = State::new(settings());
    change(&world, &mut state, &spec(json!({})), &[0]);
    for (from, to, expected) in [
        // A pod keeps its address, unless it reaches itself; everybody else comes as the node.
        (&world.pods[1], "10.99.0.1:80", "pod0 10.88.1.3"),
        (&world.pods[0], "10.99.0.1:80", "pod0 10.88.1.1"),
        (&world.node, "10.99.0.1:80", "pod0 10.88.1.1"),
        (&world.outside, "192.0.2.1:30080", "pod0 10.88.1.1"),
        (&world.outside, "203.0.113.7:80", "pod0 10.88.1.1"),
        (&world.node, "127.0.0.1:30080", "pod0 10.88.1.1"),
        (&world.pods[1], "192.0.2.1:30080", "pod0 10.88.1.1"),
    ] {
        assert_eq!(ask(from, to), expected, "{to}");
    }

    // An established connection outlives the change of endpoints and the loss of all of them; new ones do not go there.
    let (mut held, line) = connect(&world.pods[2], "10.99.0.1:80").unwrap();
    assert!(line.starts_with("pod0"));
    change(&world, &mut state, &spec(json!({})), &[1]);
    assert_eq!(ask(&world.pods[2], "10.99.0.1:80"), "pod1 10.88.1.4");
    change(&world, &mut state, &spec(json!({})), &[]);
    let mut echo = [0; 1];
    held.write_all(b"x").unwrap();
    held.read_exact(&mut echo).unwrap();
    assert_eq!(&echo, b"x");

    // Without endpoints: refused at once, from everywhere.
    for (from, to) in [(&world.pods[2], "10.99.0.1:80"), (&world.node, "10.99.0.1:80"), (&world.outside, "192.0.2.1:30080"), (&world.outside, "203.0.113.7:80")] {
        assert_eq!(ask(from, to), format!("{:?}", ErrorKind::ConnectionRefused), "{to}");
    }
}

#[test]
fn affinity_and_local_policy() {
    let world = world(4);
    let mut state = State::new(settings());
    let sticky = json!({"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 100}}});
    change(&world, &mut state, &spec(sticky.clone()), &[0, 1, 2]);
    let first = ask(&world.pods[3], "10.99.0.1:80");
    for _ in 0..8 {
        assert_eq!(ask(&world.pods[3], "10.99.0.1:80"), first);
    }
    // Without affinity, 40 connections find more than one of three endpoints (else one in 3^39).
    change(&world, &mut state, &spec(json!({})), &[0, 1, 2]);
    let seen: BTreeSet<String> = (0..40).map(|_| ask(&world.pods[3], "10.99.0.1:80")).collect();
    assert!(seen.len() > 1, "{seen:?}");
    // With the external policy Local, the client's address is kept.
    change(&world, &mut state, &spec(json!({"externalTrafficPolicy": "Local"})), &[0]);
    assert_eq!(ask(&world.outside, "192.0.2.1:30080"), "pod0 192.0.2.9");
    assert_eq!(ask(&world.pods[3], "192.0.2.1:30080"), "pod0 10.88.1.5");
    // Source ranges: the machine outside is not among them.
    let lb = |range: &str| json!({"type": "LoadBalancer", "lb": "203.0.113.50", "loadBalancerSourceRanges": [range]});
    change(&world, &mut state, &spec(lb("192.0.2.0/24")), &[0]);
    assert_eq!(ask(&world.outside, "203.0.113.50:80"), "pod0 10.88.1.1");
    change(&world, &mut state, &spec(lb("198.51.100.0/24")), &[0]);
    assert_eq!(ask(&world.outside, "203.0.113.50:80"), "TimedOut");
}

#[test]
fn udp_flows_follow_the_endpoints() {
    let world = world(3);
    let mut state = State::new(settings());
    change(&world, &mut state, &spec(json!({})), &[0]);
    let socket = netns::run(&world.pods[2].path(), || UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let ask = || {
        let mut buffer = [0; 16];
        socket.send_to(b"q", "10.99.0.1:80").unwrap();
        socket.recv_from(&mut buffer).map(|(n, _)| String::from_utf8_lossy(&buffer[..n]).into_owned()).map_err(|e| e.kind())
    };
    assert_eq!(ask().as_deref(), Ok("pod0"));
    change(&world, &mut state, &spec(json!({})), &[1]);
    assert_eq!(ask().as_deref(), Ok("pod1"), "the flow of the same socket moved");
}

#[test]
fn both_families_side_by_side() {
    let world = world(2);
    let mut state = State::new(Settings { family: Family::V6, node_ip: None, detector: LocalDetector::new("-s fd88::/16"), ..settings() });
    let spec = json!({"type": "NodePort", "clusterIP": "10.99.0.1", "clusterIPs": ["10.99.0.1", "fd99::1"],
        "ports": [{"name": "", "port": 80, "protocol": "TCP", "nodePort": 30080}]});
    let service: ServiceView = serde_json::from_value(json!({"metadata": {"namespace": "d", "name": "s"}, "spec": spec})).unwrap();
    let slice: SliceView = serde_json::from_value(json!({"addressType": "IPv6", "endpoints": [{"addresses": ["fd88:1::2"], "nodeName": "n1"}],
        "ports": [{"name": "", "port": 80, "protocol": "TCP"}]}))
    .unwrap();
    let name = ServiceName { namespace: "d".into(), name: "s".into() };
    block(&world.node, || async {
        // What has no route is not rejected but unreachable.
        let netlink = Netlink::open()?;
        let link = netlink.need("up0").await?.index;
        netlink.ensure_route(&windlass_net::link::Route { destination: "fd99::/64".parse()?, gateway: None, link, on_link: false }, 4).await
    });
    state.update(&name, service_ports(Family::V6, "n1", &service, [&slice]));
    block(&world.node, || async { state.sync().await });
    assert_eq!(ask(&world.pods[1], "[fd99::1]:80"), "pod0 fd88:1::3");
    assert_eq!(ask(&world.pods[0], "[fd99::1]:80"), "pod0 fd88:1::1");
    assert_eq!(ask(&world.pods[1], "[fd88:1::1]:30080"), "pod0 fd88:1::1");
    // The other family's service has no rules of this one.
    state.update(&name, service_ports(Family::V6, "n1", &service, []));
    block(&world.node, || async { state.sync().await });
    assert_eq!(ask(&world.pods[1], "[fd99::1]:80"), "ConnectionRefused");
}

#[test]
fn a_sync_writes_what_changed_and_a_restart_removes_what_is_left() {
    let world = world(1);
    let mut state = State::new(settings());
    change(&world, &mut state, &spec(json!({})), &[0]);
    let save = || block(&world.node, || async { Iptables::new(Family::V4).save("nat").await });
    let before = save();
    assert!(before.contains("KUBE-SEP-") && before.contains("-j KUBE-SERVICES"), "{before}");

    // Another process starts with another world: stale chains go, jumps are not doubled.
    let mut fresh = State::new(settings());
    change(&world, &mut fresh, &spec(json!({})), &[]);
    let after = save();
    assert!(!after.contains("KUBE-SEP-") && !after.contains("KUBE-SVC-"), "{after}");
    let jumps = |text: &str| text.lines().filter(|l| l.contains("-A PREROUTING") && l.ends_with("-j KUBE-SERVICES")).count();
    assert_eq!((jumps(&before), jumps(&after)), (1, 1));

    // Flushed by somebody: noticed, and repaired.
    block(&world.node, || async {
        assert!(fresh.is_intact().await?);
        Iptables::new(Family::V4).remove_chains(&["nat"], |c| rules::is_ours("KUBE-", c)).await?;
        assert!(!fresh.is_intact().await?);
        fresh.distrust();
        fresh.sync().await?;
        assert!(fresh.is_intact().await?);
        Ok(())
    });
    assert_eq!(jumps(&save()), 1);

    // Reset leaves nothing of the proxy and all of the pod network.
    netns::block_on(&world.node.path(), || crate::reset("")).unwrap().unwrap();
    let left = save();
    assert!(!left.contains("KUBE-SERVICES") && left.contains("KUBE-POD-MASQ"), "{left}");
}
