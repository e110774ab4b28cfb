//! The server over real sockets, in front of a resolver of the test's own.

use std::net::SocketAddr;
use std::time::Duration;

use hickory_server::Server;
use hickory_server::proto::op::{Message, Query};
use hickory_server::proto::rr::rdata::{A, TXT};
use hickory_server::proto::rr::{RData, RecordType as T};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

use super::*;
use crate::zone::tests::{Cluster, zone};

type Asked = Arc<parking_lot::Mutex<Vec<String>>>;

/// Answers every name: `big.` with more than a packet holds (truncated by UDP), `missing.` with NXDOMAIN, all else with 192.0.2.53.
async fn resolver() -> (SocketAddr, Asked) {
    let asked = Asked::default();
    let (udp, tcp) = crate::run::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = udp.local_addr().unwrap();
    let log = asked.clone();
    tokio::spawn(async move {
        let mut buffer = [0; 4096];
        while let Ok((length, peer)) = udp.recv_from(&mut buffer).await {
            let request = Message::from_vec(&buffer[..length]).unwrap();
            log.lock().push(request.queries[0].name.to_ascii());
            let _ = udp.send_to(&reply(&request, true).to_vec().unwrap(), peer).await;
        }
    });
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = tcp.accept().await {
            let mut bytes = vec![0; usize::from(stream.read_u16().await.unwrap())];
            stream.read_exact(&mut bytes).await.unwrap();
            let bytes = reply(&Message::from_vec(&bytes).unwrap(), false).to_vec().unwrap();
            stream.write_u16(bytes.len() as u16).await.unwrap();
            stream.write_all(&bytes).await.unwrap();
        }
    });
    (address, asked)
}

fn reply(request: &Message, udp: bool) -> Message {
    let mut reply = Message::response(request.metadata.id, OpCode::Query);
    reply.add_query(request.queries[0].clone());
    let name = request.queries[0].name.clone();
    match name.to_ascii().as_str() {
        "missing." => reply.metadata.response_code = ResponseCode::NXDomain,
        "big." if udp => reply.metadata.truncation = true,
        "big." => {
            let text = |n: u8| Record::from_rdata(name.clone(), 60, RData::TXT(TXT::new(vec![char::from(b'a' + n).to_string().repeat(200)])));
            reply.add_answers((0..20).map(text));
        }
        _ => {
            reply.add_answer(Record::from_rdata(name, 60, RData::A(A([192, 0, 2, 53].into()))));
        }
    }
    reply
}

struct Running {
    server: Server<Handler<Cluster>>,
    address: SocketAddr,
    shared: Arc<Shared<Cluster>>,
}

async fn start(upstreams: &[SocketAddr]) -> Running {
    let (udp, tcp) = crate::run::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = udp.local_addr().unwrap();
    let probe = Name::from_ascii("0123.windlass-loop-probe.").unwrap();
    let shared = Arc::new(Shared { zone: zone(), forwarder: Forwarder::new(upstreams, &[address], 100), probe });
    let mut server = Server::new(Handler { shared: shared.clone() });
    server.register_socket(udp);
    server.register_listener(tcp, Duration::from_secs(5), 32);
    Running { server, address, shared }
}

fn question(name: &str, kind: T, payload: Option<u16>) -> Vec<u8> {
    let mut message = Message::new(7, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
    if let Some(payload) = payload {
        let mut edns = Edns::new();
        edns.set_max_payload(payload);
        message.set_edns(edns);
    }
    message.to_vec().unwrap()
}

async fn by_udp(server: SocketAddr, request: &[u8]) -> Message {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.send_to(request, server).await.unwrap();
    let mut buffer = [0; 65535];
    let length = tokio::time::timeout(Duration::from_secs(10), socket.recv(&mut buffer)).await.expect("an answer").unwrap();
    Message::from_vec(&buffer[..length]).unwrap()
}

async fn by_tcp(server: SocketAddr, request: &[u8]) -> Message {
    let mut stream = TcpStream::connect(server).await.unwrap();
    stream.write_u16(request.len() as u16).await.unwrap();
    stream.write_all(request).await.unwrap();
    let mut buffer = vec![0; usize::from(stream.read_u16().await.unwrap())];
    stream.read_exact(&mut buffer).await.unwrap();
    Message::from_vec(&buffer).unwrap()
}

fn shown(message: &Message) -> String {
    let flag = |on, name| if on { name } else { "" };
    let head = format!("{}{}{}", metrics::rcode(message.metadata.response_code), flag(message.metadata.authoritative, " aa"), flag(message.metadata.truncation, " tc"));
    let mut text: Vec<String> = message.answers.iter().map(|r| r.data.to_string()).collect();
    text.insert(0, head);
    if message.authorities.iter().any(|r| r.record_type() == T::SOA) {
        text.push("SOA".into());
    }
    text.join(" ")
}

#[tokio::test]
async fn the_cluster_and_the_rest_of_the_world() {
    let (upstream, asked) = resolver().await;
    let mut running = start(&[upstream]).await;
    for (name, kind, expected) in [
        ("web.default.svc.cluster.local.", T::A, "NOERROR aa 10.96.0.20"),
        ("web.default.svc.cluster.local.", T::MX, "NOERROR aa SOA"),
        ("nobody.default.svc.cluster.local.", T::A, "NXDOMAIN aa SOA"),
        ("alias.default.svc.cluster.local.", T::A, "NOERROR aa Example.com. 192.0.2.53"),
        ("alias.default.svc.cluster.local.", T::CNAME, "NOERROR aa Example.com."),
        ("www.example.org.", T::A, "NOERROR 192.0.2.53"),
        ("WWW.example.org.", T::A, "NOERROR 192.0.2.53"),
        ("missing.", T::A, "NXDOMAIN"),
        ("cluster.local.", T::AXFR, "REFUSED"),
    ] {
        let request = question(name, kind, Some(1232));
        let got = by_udp(running.address, &request).await;
        assert_eq!(shown(&got), expected, "{name} {kind}");
        assert_eq!((got.metadata.id, got.edns.is_some(), got.metadata.recursion_available), (7, true, true));
        assert_eq!(shown(&by_tcp(running.address, &request).await), expected, "{name} {kind} by TCP");
    }
    // What the resolver was asked once is kept; what may not be kept (no SOA) is asked again.
    let count = |name: &str| asked.lock().iter().filter(|n| *n == name).count();
    assert_eq!((count("www.example.org."), count("example.com."), count("missing.")), (1, 1, 2));
    running.server.shutdown_gracefully().await.unwrap();
}

#[tokio::test]
async fn large_answers_are_cut_by_udp_and_whole_by_tcp() {
    let (upstream, _) = resolver().await;
    let mut running = start(&[upstream]).await;
    let cut = by_udp(running.address, &question("big.", T::TXT, None)).await;
    assert!(cut.metadata.truncation && cut.answers.len() < 20, "{}", shown(&cut));
    assert_eq!(by_tcp(running.address, &question("big.", T::TXT, None)).await.answers.len(), 20);
    running.server.shutdown_gracefully().await.unwrap();
}

#[tokio::test]
async fn without_a_resolver_only_the_cluster_answers() {
    // A resolver that is dead, and one that is alive: the second answers.
    let dead = UdpSocket::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let (alive, _) = resolver().await;
    let mut running = start(&[dead, alive]).await;
    assert_eq!(shown(&by_udp(running.address, &question("a.example.", T::A, None)).await), "NOERROR 192.0.2.53");
    running.server.shutdown_gracefully().await.unwrap();

    let mut alone = start(&[]).await;
    assert_eq!(shown(&by_udp(alone.address, &question("a.example.", T::A, None)).await), "SERVFAIL");
    assert_eq!(shown(&by_udp(alone.address, &question("web.default.svc.cluster.local.", T::A, None)).await), "NOERROR aa 10.96.0.20");
    alone.server.shutdown_gracefully().await.unwrap();
}

#[tokio::test]
async fn a_loop_is_found_and_stopped() {
    let mut second = start(&[]).await;
    // The resolver asks us in turn: our probe comes back.
    let mut first = start(&[second.address]).await;
    let probe = question("0123.windlass-loop-probe.", T::A, None);
    assert_eq!(shown(&by_udp(first.address, &probe).await), "REFUSED");
    assert_eq!(shown(&by_udp(first.address, &question("a.example.", T::A, None)).await), "SERVFAIL");
    assert!(Forwarder::new(&[first.address], &[first.address], 1).upstreams().is_empty());
    assert!(first.shared.forwarder.upstreams().len() == 1);
    first.server.shutdown_gracefully().await.unwrap();
    second.server.shutdown_gracefully().await.unwrap();
}

#[tokio::test]
async fn nonsense_is_refused_or_ignored_and_never_fatal() {
    let mut running = start(&[]).await;
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let valid = question("web.default.svc.cluster.local.", T::A, Some(1232));
    for length in 0..valid.len() {
        socket.send_to(&valid[..length], running.address).await.unwrap();
    }
    for byte in 2..valid.len() {
        let mut bent = valid.clone();
        bent[byte] ^= 0xff;
        socket.send_to(&bent, running.address).await.unwrap();
    }
    assert_eq!(shown(&by_udp(running.address, &valid).await), "NOERROR aa 10.96.0.20");
    running.server.shutdown_gracefully().await.unwrap();
}
