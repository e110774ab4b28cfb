//! The pod network in network namespaces of the test's own: they end with the test, however it ends.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use super::*;
use crate::netns::{self, Namespace};

struct Node {
    ns: Namespace,
    state: tempfile::TempDir,
}

impl Node {
    fn new() -> Node {
        let node = Node { ns: Namespace::new().expect("root"), state: tempfile::tempdir().expect("tempdir") };
        node.run(|| async {
            let netlink = Netlink::open()?;
            netlink.set_up(netlink.need("lo").await?.index).await
        });
        node
    }

    fn config(&self, instance: &str) -> Config {
        Config {
            instance: instance.to_owned(),
            pod_cidrs: vec!["10.77.1.0/24".parse().unwrap(), "fd77:1::/64".parse().unwrap()],
            cluster_cidrs: vec!["10.77.0.0/16".parse().unwrap(), "fd77::/16".parse().unwrap()],
            mtu: Some(1400),
            state_dir: self.state.path().join(format!("i{instance}")),
        }
    }

    fn run<T: Send, F: Future<Output = Result<T>>>(&self, f: impl FnOnce() -> F + Send) -> T {
        netns::block_on(&self.ns.path(), f).expect("enter").expect("network")
    }
}

fn attach(uid: &str, ns: &Namespace, host_ports: Vec<HostPort>) -> Attach {
    Attach { pod_uid: uid.into(), namespace: "default".into(), name: format!("pod-{uid}"), netns: ns.path(), host_ports }
}

/// Answers one connection at a time with the peer's address, until the namespace's last user is gone.
fn echo_peer(ns: &Namespace, address: &str) -> SocketAddr {
    let address = address.to_owned();
    let listener = netns::run(&ns.path(), || TcpListener::bind(&address).expect("bind")).expect("enter");
    let bound = listener.local_addr().expect("bound");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let peer = stream.peer_addr().map(|a| a.ip().to_string()).unwrap_or_default();
            let _ = stream.write_all(peer.as_bytes());
        }
    });
    bound
}

fn ask(from: &Namespace, to: SocketAddr) -> std::io::Result<String> {
    netns::run(&from.path(), || {
        let mut stream = TcpStream::connect_timeout(&to, Duration::from_secs(3))?;
        stream.set_read_timeout(Some(Duration::from_secs(3)))?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    })
    .expect("enter")
}

#[test]
fn pods_reach_each_other_the_node_and_themselves() {
    let node = Node::new();
    let (a, b) = (Namespace::new().unwrap(), Namespace::new().unwrap());
    let port = HostPort { protocol: hostport::Protocol::Tcp, host_port: 29080, container_port: 8080, host_ip: None };
    let (first, second) = node.run(|| async {
        let network = PodNetwork::new(node.config("")).await?;
        let first = network.attach(&attach("a", &a, vec![port.clone()])).await?;
        let second = network.attach(&attach("b", &b, vec![])).await?;
        assert_eq!(network.addresses_of("a"), Some(first.clone()));
        Ok((first, second))
    });
    assert_eq!(first.ips.iter().map(ToString::to_string).collect::<Vec<_>>(), ["10.77.1.2", "fd77:1::2"]);
    assert_eq!(first.gateway.to_string(), "10.77.1.1");
    echo_peer(&a, "[::]:8080");
    for (from, to, seen) in [
        (&b, "10.77.1.2:8080", "::ffff:10.77.1.3"),
        (&b, "[fd77:1::2]:8080", "fd77:1::3"),
        (&node.ns, "10.77.1.2:8080", "::ffff:10.77.1.1"),
        // The host port: from the node's loopback, from another pod, and from the pod itself by the node's address.
        (&node.ns, "127.0.0.1:29080", "::ffff:10.77.1.1"),
        (&b, "10.77.1.1:29080", "::ffff:10.77.1.3"),
        (&a, "10.77.1.1:29080", "::ffff:10.77.1.1"),
    ] {
        assert_eq!(ask(from, to.parse().unwrap()).unwrap_or_else(|e| e.to_string()), seen, "{to}");
    }
    assert_eq!(second.ips[0].to_string(), "10.77.1.3");
    // Pods do not reach what listens on the node's loopback only.
    let loopback = echo_peer(&node.ns, "127.0.0.1:0");
    assert!(ask(&b, SocketAddr::new("10.77.1.1".parse().unwrap(), loopback.port())).is_err());
}

#[test]
fn a_restart_adopts_and_a_reconcile_frees() {
    let node = Node::new();
    let (a, b) = (Namespace::new().unwrap(), Namespace::new().unwrap());
    let link_of = |uid: &str| veth_name("", uid);
    let before = node.run(|| async {
        let network = PodNetwork::new(node.config("")).await?;
        let port = HostPort { protocol: hostport::Protocol::Udp, host_port: 53, container_port: 53, host_ip: None };
        network.attach(&attach("a", &a, vec![])).await?;
        network.attach(&attach("b", &b, vec![port])).await?;
        Netlink::open()?.need(&link_of("a")).await
    });
    // The address records of one pod are lost: its link tells its address.
    std::fs::remove_file(node.state.path().join("i/pods/a.json")).unwrap();
    node.run(|| async {
        let network = PodNetwork::new(node.config("")).await?;
        let again = network.attach(&attach("a", &a, vec![])).await?;
        assert_eq!(again.ips[0].to_string(), "10.77.1.2");
        let netlink = Netlink::open()?;
        assert_eq!(netlink.need(&link_of("a")).await?.index, before.index, "the link was left alone");

        network.reconcile(&HashSet::from(["a".to_owned()])).await?;
        assert_eq!(netlink.link(&link_of("b")).await?, None);
        assert!(netlink.link(&link_of("a")).await?.is_some());
        let saved = Iptables::new(Family::V4).save("nat").await?;
        assert!(!saved.contains("--dport 53"), "{saved}");
        assert_eq!(network.addresses_of("b"), None);
        network.detach("a").await?;
        network.detach("a").await?;
        assert_eq!(std::fs::read_dir(node.state.path().join("i/pods")).unwrap().count(), 0);
        Ok(())
    });
}

#[test]
fn a_sandbox_made_anew_gets_the_same_address() {
    let node = Node::new();
    let (old, new) = (Namespace::new().unwrap(), Namespace::new().unwrap());
    node.run(|| async {
        let network = PodNetwork::new(node.config("")).await?;
        let first = network.attach(&attach("a", &old, vec![])).await?;
        let second = network.attach(&attach("a", &new, vec![])).await?;
        assert_eq!(first, second);
        assert!(Netlink::open_in(&old.path()).await?.link(POD_LINK).await?.is_none());
        assert!(Netlink::open_in(&new.path()).await?.link(POD_LINK).await?.is_some());
        Ok(())
    });
}

#[test]
fn reset_leaves_nothing_of_its_instance_and_all_of_the_other() {
    let node = Node::new();
    let (a, b) = (Namespace::new().unwrap(), Namespace::new().unwrap());
    node.run(|| async {
        let one = PodNetwork::new(node.config("")).await?;
        let mut other = node.config("two");
        other.pod_cidrs = vec!["10.78.1.0/24".parse().unwrap()];
        let two = PodNetwork::new(other).await?;
        one.attach(&attach("a", &a, vec![])).await?;
        two.attach(&attach("b", &b, vec![])).await?;
        crate::reset("").await?;
        let names: Vec<String> = Netlink::open()?.links().await?.into_iter().map(|l| l.name).filter(|n| n.starts_with("wl")).collect();
        assert_eq!(names.len(), 2, "{names:?}");
        assert!(names.contains(&"wl-two".to_owned()) && names.contains(&veth_name("two", "b")));
        for table in ["nat", "filter"] {
            let saved = Iptables::new(Family::V4).save(table).await?;
            assert!(!saved.contains("KUBE-"), "{saved}");
            assert!(saved.contains(&chain_prefix("two")), "{saved}");
        }
        Ok(())
    });
}

#[test]
fn without_a_cidr_nothing_is_attached() {
    let node = Node::new();
    let pod = Namespace::new().unwrap();
    node.run(|| async {
        let mut config = node.config("");
        config.pod_cidrs.clear();
        let network = PodNetwork::new(config).await?;
        assert!(matches!(network.attach(&attach("a", &pod, vec![])).await, Err(Error::NoPodCidr)));
        network.set_pod_cidrs(&["10.77.2.0/24".parse().unwrap()]).await?;
        assert_eq!(network.attach(&attach("a", &pod, vec![])).await?.ips[0].to_string(), "10.77.2.2");
        drop(network);
        // A new process does not know the CIDR yet: what is wired stays wired.
        let mut config = node.config("");
        config.pod_cidrs.clear();
        let network = PodNetwork::new(config).await?;
        assert_eq!(network.attach(&attach("a", &pod, vec![])).await?.ips[0].to_string(), "10.77.2.2");
        // Another CIDR: the bridge gets its gateway, and keeps the old one as long as a pod needs it.
        let netlink = Netlink::open()?;
        let bridge = netlink.need("wl0").await?;
        let gateways = || async {
            let held = netlink.addresses(Some(bridge.index)).await?;
            let mut text: Vec<String> = held.iter().filter(|a| a.ip.is_ipv4()).map(|a| a.ip.to_string()).collect();
            text.sort();
            Ok::<_, Error>(text)
        };
        let third = ["10.77.3.0/24".parse().unwrap()];
        network.set_pod_cidrs(&third).await?;
        assert_eq!(gateways().await?, ["10.77.2.1", "10.77.3.1"]);
        assert_eq!(network.attach(&attach("a", &pod, vec![])).await?.ips[0].to_string(), "10.77.2.2");
        network.detach("a").await?;
        network.set_pod_cidrs(&third).await?;
        assert_eq!(gateways().await?, ["10.77.3.1"]);
        Ok(())
    });
}

#[test]
fn flushed_rules_come_back() {
    let node = Node::new();
    node.run(|| async {
        let network = PodNetwork::new(node.config("")).await?;
        assert!(!network.restore_rules().await?);
        Iptables::new(Family::V4).remove_chains(&["nat"], |c| c.starts_with("KUBE-")).await?;
        assert!(network.restore_rules().await?);
        let saved = Iptables::new(Family::V4).save("nat").await?;
        assert_eq!(saved.matches("-j KUBE-HOSTPORTS").count(), 2, "{saved}");
        assert!(!network.restore_rules().await?);
        Ok(())
    });
}

#[test]
fn names_fit_the_kernel() {
    for (instance, bridge) in [("", "wl0"), ("two", "wl-two"), ("a-very-long-instance", "")] {
        let name = bridge_name(instance);
        assert!(name.len() <= 15 && (bridge.is_empty() || name == bridge), "{name}");
        assert!(veth_name(instance, "0c6d2b9a-0000-4000-8000-000000000000").len() <= 15);
        assert!(crate::routes::vxlan_name(instance).len() <= 15);
    }
    assert_ne!(veth_name("", "x"), veth_name("two", "x"));
}
