//! Routes between nodes, each node a network namespace, joined by veth to a bridge in a third.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use super::*;
use crate::link::Veth;
use crate::netns::{self, Namespace};
use crate::pod::{Attach, PodNetwork, bridge_name};

fn config(mode: Mode, address: &str, cidr: &str) -> Config {
    Config {
        instance: String::new(),
        mode,
        address: address.parse().unwrap(),
        pod_cidrs: vec![cidr.parse().unwrap()],
        cluster_cidrs: vec!["10.79.0.0/16".parse().unwrap()],
        vni: None,
        port: 8472,
    }
}

fn peer(node: &str, address: &str, cidr: &str) -> Peer {
    Peer { node: node.into(), address: address.parse().unwrap(), pod_cidrs: vec![cidr.parse().unwrap()] }
}

#[test]
fn near_by_gateway_far_by_tunnel() {
    let own = [Address { link: 2, ip: "192.0.2.1".parse().unwrap(), prefix_len: 24 }];
    let peers = [
        peer("me", "192.0.2.1", "10.79.1.0/24"),
        peer("near", "192.0.2.2", "10.79.2.0/24"),
        peer("far", "198.51.100.3", "10.79.3.0/24"),
        peer("thief", "192.0.2.9", "10.79.1.0/24"),
    ];
    let check = |mode, routes: &[&str], tunnels: usize, errors: usize| {
        let (plan, failed) = plan(&config(mode, "192.0.2.1", "10.79.1.0/24"), &peers, &own, (mode != Mode::HostGateway).then_some(7));
        let got: Vec<String> =
            plan.routes.iter().map(|r| format!("{} via {} link {}", r.destination, r.gateway.unwrap(), r.link)).collect();
        assert_eq!(got, routes, "{mode:?}");
        assert_eq!((plan.tunnels.len(), failed.len()), (tunnels, errors), "{mode:?} {failed:?}");
    };
    check(Mode::Auto, &["10.79.2.0/24 via 192.0.2.2 link 0", "10.79.3.0/24 via 10.79.3.0 link 7"], 1, 1);
    check(Mode::Vxlan, &["10.79.2.0/24 via 10.79.2.0 link 7", "10.79.3.0/24 via 10.79.3.0 link 7"], 2, 1);
    check(Mode::HostGateway, &["10.79.2.0/24 via 192.0.2.2 link 0"], 0, 2);
}

/// Two nodes on one switch, a pod on each.
struct Pair {
    _switch: Namespace,
    nodes: [Namespace; 2],
    pods: [Namespace; 2],
    _state: tempfile::TempDir,
}

fn block<T: Send, F: Future<Output = Result<T>>>(ns: &Namespace, f: impl FnOnce() -> F + Send) -> T {
    netns::block_on(&ns.path(), f).expect("enter").expect("network")
}

fn pair() -> Pair {
    let new = || Namespace::new().expect("root");
    let pair = Pair { _switch: new(), nodes: [new(), new()], pods: [new(), new()], _state: tempfile::tempdir().unwrap() };
    block(&pair._switch, || async {
        let netlink = Netlink::open()?;
        let bridge = netlink.ensure_bridge("sw", [2, 0, 0, 0, 0, 1], 1500).await?;
        for (n, node) in pair.nodes.iter().enumerate() {
            let name = format!("port{n}");
            let mac = [2, 0, 0, 0, 1, u8::try_from(n).unwrap()];
            netlink.make_veth(&Veth { name: &name, bridge: bridge.index, alias: "", peer: "up0", peer_mac: mac, peer_ns: &node.path(), mtu: 1500 }).await?;
        }
        Ok(())
    });
    for (n, node) in pair.nodes.iter().enumerate() {
        block(node, || async {
            let netlink = Netlink::open()?;
            netlink.set_up(netlink.need("lo").await?.index).await?;
            let up = netlink.need("up0").await?;
            netlink.set_up(up.index).await?;
            netlink.ensure_address(up.index, format!("192.0.2.{}", n + 1).parse().unwrap(), 24).await?;
            let network = PodNetwork::new(crate::pod::Config {
                pod_cidrs: vec![format!("10.79.{}.0/24", n + 1).parse().unwrap()],
                cluster_cidrs: vec!["10.79.0.0/16".parse().unwrap()],
                state_dir: pair._state.path().join(n.to_string()),
                ..Default::default()
            })
            .await?;
            let pod = Attach { pod_uid: n.to_string(), namespace: "d".into(), name: "p".into(), netns: pair.pods[n].path(), host_ports: vec![] };
            network.attach(&pod).await.map(drop)
        });
    }
    pair
}

impl Pair {
    fn reconcile(&self, n: usize, mode: Mode, peers: &[Peer]) {
        block(&self.nodes[n], || async {
            let own = config(mode, &format!("192.0.2.{}", n + 1), &format!("10.79.{}.0/24", n + 1));
            Routes::new(own)?.reconcile(peers).await
        });
    }

    fn state(&self, n: usize) -> (Vec<String>, bool) {
        block(&self.nodes[n], || async {
            let netlink = Netlink::open()?;
            let routes = netlink.routes(Family::V4, Some(ROUTE_PROTOCOL)).await?;
            let tunnel = netlink.link(&vxlan_name("")).await?.is_some();
            Ok((routes.iter().map(|r| format!("{} via {}", r.destination, r.gateway.unwrap())).collect(), tunnel))
        })
    }

    /// The source address that pod 1 sees of pod 0, with a payload larger than a tunnel's packet.
    fn talk(&self) -> std::io::Result<String> {
        let listener = netns::run(&self.pods[1].path(), || TcpListener::bind("0.0.0.0:0")).unwrap()?;
        let port = listener.local_addr()?.port();
        let server = std::thread::spawn(move || -> std::io::Result<()> {
            let (mut stream, peer) = listener.accept()?;
            stream.write_all(peer.ip().to_string().as_bytes())?;
            stream.write_all(&[b' '; 100_000])
        });
        let got = netns::run(&self.pods[0].path(), move || {
            let mut stream = TcpStream::connect_timeout(&format!("10.79.2.2:{port}").parse().unwrap(), Duration::from_secs(3))?;
            stream.set_read_timeout(Some(Duration::from_secs(3)))?;
            let mut text = String::new();
            stream.read_to_string(&mut text).map(|_| text.trim().to_owned())
        })
        .unwrap()?;
        server.join().unwrap()?;
        Ok(got)
    }
}

#[test]
fn pods_of_two_nodes_talk_by_routes_and_by_tunnel() {
    let pair = pair();
    let peers = [peer("n1", "192.0.2.1", "10.79.1.0/24"), peer("n2", "192.0.2.2", "10.79.2.0/24")];
    for n in [0, 1] {
        pair.reconcile(n, Mode::Auto, &peers);
    }
    assert_eq!(pair.state(0), (vec!["10.79.2.0/24 via 192.0.2.2".to_owned()], false));
    assert_eq!(pair.talk().unwrap(), "10.79.1.2", "the pod's own address is kept");
    for n in [0, 1] {
        pair.reconcile(n, Mode::Vxlan, &peers);
        pair.reconcile(n, Mode::Vxlan, &peers);
    }
    assert_eq!(pair.state(0), (vec!["10.79.2.0/24 via 10.79.2.0".to_owned()], true));
    assert_eq!(pair.talk().unwrap(), "10.79.1.2");
    // The peer goes: nothing of it stays.
    pair.reconcile(0, Mode::Vxlan, &peers[..1]);
    assert_eq!(pair.state(0), (vec![], false));
    block(&pair.nodes[0], || async {
        assert!(Netlink::open()?.link(&bridge_name("")).await?.is_some());
        Ok(())
    });
}
