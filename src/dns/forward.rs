//! Names that are not the cluster's, asked of other resolvers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hickory_server::proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_server::proto::op::Edns;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::cache::{Cache, Question, Reply};
use crate::metrics;

/// For one try at one resolver.
const TRY: Duration = Duration::from_secs(2);
/// Questions under way at once; beyond it we refuse, as `max_concurrent 1000` of CoreDNS.
const CONCURRENT: usize = 1000;
/// What we can take by UDP.
const PAYLOAD: u16 = 1232;

/// Resolvers, with the cache in front of them.
pub struct Forwarder {
    upstreams: Vec<SocketAddr>,
    /// The one that answered last.
    preferred: AtomicUsize,
    permits: Semaphore,
    cache: Cache,
    /// A resolver asks us in turn: nothing is forwarded any more.
    looping: AtomicBool,
}

impl Forwarder {
    /// Asks `upstreams`; those that are we (`own`) are left out.
    pub fn new(upstreams: &[SocketAddr], own: &[SocketAddr], cache_capacity: usize) -> Forwarder {
        let (ours, upstreams): (Vec<_>, Vec<_>) = upstreams.iter().copied().partition(|u| own.contains(u));
        if !ours.is_empty() {
            tracing::error!(resolvers = ?ours, "these resolvers are this DNS itself and are not asked; name others by --forward");
        }
        Forwarder { upstreams, preferred: AtomicUsize::new(0), permits: Semaphore::new(CONCURRENT), cache: Cache::new(cache_capacity), looping: AtomicBool::new(false) }
    }

    /// The resolvers.
    pub fn upstreams(&self) -> &[SocketAddr] {
        &self.upstreams
    }

    /// Called when our own probe came back to us.
    pub fn found_loop(&self) {
        if !self.looping.swap(true, Ordering::Relaxed) {
            tracing::error!(resolvers = ?self.upstreams, "a resolver that we forward to asks us in turn: names outside of the cluster fail; name others by --forward");
        }
    }

    /// The answer to a question, from the cache or from a resolver.
    pub async fn ask(&self, question: Question) -> Reply {
        let failed = |code| Reply { code, answers: vec![], authorities: vec![], additionals: vec![], authentic: false };
        if let Some(reply) = self.cache.get(&question, Instant::now()) {
            metrics::cache_hit(reply.answers.is_empty());
            return reply;
        }
        metrics::cache_miss();
        if self.upstreams.is_empty() || self.looping.load(Ordering::Relaxed) {
            return failed(ResponseCode::ServFail);
        }
        let Ok(_permit) = self.permits.try_acquire() else {
            metrics::rejected();
            return failed(ResponseCode::Refused);
        };
        let first = self.preferred.load(Ordering::Relaxed);
        // Every resolver once, and the first one twice: a lost packet is no outage.
        for n in 0..=self.upstreams.len() {
            let index = (first + n) % self.upstreams.len();
            let start = Instant::now();
            match exchange(self.upstreams[index], &question).await {
                Ok(reply) => {
                    metrics::forwarded(self.upstreams[index], reply.code, start.elapsed());
                    if reply.code == ResponseCode::ServFail && n < self.upstreams.len() {
                        continue;
                    }
                    self.preferred.store(index, Ordering::Relaxed);
                    metrics::cache_entries(self.cache.put(question, &reply, Instant::now()));
                    return reply;
                }
                Err(error) => {
                    metrics::forward_failed(self.upstreams[index]);
                    tracing::debug!(resolver = %self.upstreams[index], name = %question.name, %error, "no answer from a resolver");
                }
            }
        }
        failed(ResponseCode::ServFail)
    }
}

fn request(question: &Question) -> Message {
    let mut message = Message::new(rand::random(), MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    let mut query = Query::query(question.name.clone(), question.kind);
    query.set_query_class(question.class);
    message.add_query(query);
    let mut edns = Edns::new();
    edns.set_max_payload(PAYLOAD).set_version(0).set_dnssec_ok(question.dnssec);
    message.set_edns(edns);
    message
}

async fn exchange(resolver: SocketAddr, question: &Question) -> std::io::Result<Reply> {
    let request = request(question);
    let bytes = request.to_vec().map_err(std::io::Error::other)?;
    let elapsed = |_| std::io::Error::from(std::io::ErrorKind::TimedOut);
    let mut reply = timeout(TRY, by_udp(resolver, &request, &bytes)).await.map_err(elapsed)??;
    if reply.metadata.truncation {
        reply = timeout(TRY, by_tcp(resolver, &request, &bytes)).await.map_err(elapsed)??;
    }
    Ok(Reply {
        code: reply.metadata.response_code,
        authentic: reply.metadata.authentic_data,
        answers: reply.answers,
        authorities: reply.authorities,
        additionals: reply.additionals,
    })
}

/// Whether `reply` answers `request`: anybody can send us a packet.
fn answers(reply: &Message, request: &Message) -> bool {
    reply.metadata.id == request.metadata.id && reply.metadata.message_type == MessageType::Response && reply.queries == request.queries
}

async fn by_udp(resolver: SocketAddr, request: &Message, bytes: &[u8]) -> std::io::Result<Message> {
    let any = if resolver.is_ipv4() { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { IpAddr::V6(Ipv6Addr::UNSPECIFIED) };
    // A socket, and so a port, of its own for each question: a guess must hit port and identifier.
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(resolver).await?;
    socket.send(bytes).await?;
    let mut buffer = vec![0; usize::from(u16::MAX)];
    loop {
        let length = socket.recv(&mut buffer).await?;
        match Message::from_vec(&buffer[..length]) {
            Ok(reply) if answers(&reply, request) => return Ok(reply),
            _ => {}
        }
    }
}

async fn by_tcp(resolver: SocketAddr, request: &Message, bytes: &[u8]) -> std::io::Result<Message> {
    let mut stream = TcpStream::connect(resolver).await?;
    let length = u16::try_from(bytes.len()).map_err(std::io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), bytes].concat()).await?;
    let mut buffer = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut buffer).await?;
    let reply = Message::from_vec(&buffer).map_err(std::io::Error::other)?;
    if answers(&reply, request) { Ok(reply) } else { Err(std::io::Error::other("an answer to another question")) }
}
