//! From a request to a response: the zone first, then the other resolvers.

use std::sync::Arc;
use std::time::Instant;

use hickory_server::net::runtime::Time;
use hickory_server::net::xfer::Protocol;
use hickory_server::proto::op::{Edns, Header, HeaderCounts, MessageType, Metadata, OpCode, ResponseCode};
use hickory_server::proto::rr::{DNSClass, Name, Record, RecordType};
use hickory_server::server::{Request, RequestHandler, ResponseHandler, ResponseInfo};
use hickory_server::zone_handler::MessageResponseBuilder;

use crate::cache::Question;
use crate::forward::Forwarder;
use crate::metrics::{self, Done};
use crate::model::Source;
use crate::zone::{Answer, Zone};

/// The largest UDP packet that we send, whatever the asker says it takes: larger ones get lost on the way.
const LARGEST_UDP: u16 = 1232;
/// How many aliases are followed.
const ALIASES: usize = 8;

/// Answers requests. Cheap to clone.
pub struct Handler<S> {
    pub shared: Arc<Shared<S>>,
}

/// What all requests use.
pub struct Shared<S> {
    pub zone: Zone<S>,
    pub forwarder: Forwarder,
    /// A name that only we know: who asks for it is a resolver that we forward to.
    pub probe: Name,
}

/// A response before it is written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    pub code: ResponseCode,
    pub authoritative: bool,
    pub authentic: bool,
    pub answers: Vec<Record>,
    pub authorities: Vec<Record>,
    pub additionals: Vec<Record>,
}

impl Outcome {
    fn failed(code: ResponseCode) -> Outcome {
        Outcome { code, ..Outcome::default() }
    }
}

impl<S: Source> Shared<S> {
    /// The response to a question.
    pub async fn answer(&self, question: &Question, name: &Name) -> Outcome {
        if question.class != DNSClass::IN {
            return Outcome::failed(ResponseCode::Refused);
        }
        if question.name == self.probe {
            self.forwarder.found_loop();
            return Outcome::failed(ResponseCode::Refused);
        }
        let mut outcome = Outcome { authoritative: true, ..Outcome::default() };
        let mut name = name.clone();
        for _ in 0..ALIASES {
            match self.zone.lookup(&name, question.kind) {
                Answer::Records(answers, additionals) => {
                    outcome.answers.extend(answers);
                    outcome.additionals.extend(additionals);
                    return outcome;
                }
                Answer::Alias(record, target) => {
                    outcome.answers.push(record);
                    if question.kind == RecordType::CNAME {
                        return outcome;
                    }
                    name = target;
                }
                negative @ (Answer::NoData | Answer::NoName) => {
                    // Behind an alias, the code tells about the alias' target (RFC 6604).
                    outcome.code = if negative == Answer::NoName { ResponseCode::NXDomain } else { ResponseCode::NoError };
                    outcome.authorities.push(self.zone.soa());
                    return outcome;
                }
                Answer::NotOurs => {
                    let asked = Question { name: name.to_lowercase(), ..question.clone() };
                    let reply = self.forwarder.ask(asked).await;
                    outcome.authoritative = !outcome.answers.is_empty();
                    outcome.authentic = reply.authentic && outcome.answers.is_empty();
                    outcome.code = reply.code;
                    outcome.answers.extend(reply.answers);
                    outcome.authorities = reply.authorities;
                    outcome.additionals = reply.additionals;
                    return outcome;
                }
            }
        }
        Outcome::failed(ResponseCode::ServFail)
    }

    /// Whether a name is answered by the zone, for metrics.
    fn zone_of(&self, name: &Name) -> (String, &'static str) {
        if self.zone.domain.zone_of(&name.to_lowercase()) { (self.zone.domain.to_ascii(), "kubernetes") } else { (".".to_owned(), "forward") }
    }
}

#[async_trait::async_trait]
impl<S: Source> RequestHandler for Handler<S> {
    async fn handle_request<R: ResponseHandler, T: Time>(&self, request: &Request, response: R) -> ResponseInfo {
        let start = Instant::now();
        let edns = request.edns.as_ref().map(|asked| {
            let mut edns = Edns::new();
            edns.set_version(0).set_dnssec_ok(asked.flags().dnssec_ok);
            edns.set_max_payload(asked.max_payload().clamp(512, LARGEST_UDP));
            edns
        });
        let info = request.request_info();
        let outcome = match &info {
            _ if request.edns.as_ref().is_some_and(|e| e.version() > 0) => Outcome::failed(ResponseCode::BADVERS),
            _ if request.metadata.message_type != MessageType::Query => Outcome::failed(ResponseCode::FormErr),
            _ if request.metadata.op_code != OpCode::Query => Outcome::failed(ResponseCode::NotImp),
            Err(_) => Outcome::failed(ResponseCode::FormErr),
            // A zone transfer is nobody's business.
            Ok(info) if matches!(info.query.query_type(), RecordType::AXFR | RecordType::IXFR) => Outcome::failed(ResponseCode::Refused),
            Ok(info) => {
                let original = info.query.original();
                let question = Question {
                    name: original.name().to_lowercase(),
                    kind: original.query_type(),
                    class: original.query_class(),
                    dnssec: request.edns.as_ref().is_some_and(|e| e.flags().dnssec_ok),
                };
                self.shared.answer(&question, original.name()).await
            }
        };
        if let Ok(info) = &info {
            let (zone, plugin) = self.shared.zone_of(info.query.original().name());
            metrics::done(&Done {
                zone: &zone,
                plugin,
                protocol: request.protocol(),
                source: request.src(),
                kind: info.query.query_type(),
                code: outcome.code,
                took: start.elapsed(),
                request_bytes: request.as_slice().len(),
            });
        }
        send(request, response, edns.as_ref(), &outcome).await
    }
}

async fn send<R: ResponseHandler>(request: &Request, mut response: R, edns: Option<&Edns>, outcome: &Outcome) -> ResponseInfo {
    let mut metadata = Metadata::response_from_request(&request.metadata);
    metadata.recursion_available = true;
    metadata.authoritative = outcome.authoritative;
    metadata.authentic_data = outcome.authentic;
    metadata.response_code = outcome.code;
    let builder = MessageResponseBuilder::new(&request.queries, edns);
    // By UDP, what is extra is left out before the answer is cut: a cut answer is asked for again by TCP.
    let small = edns.is_none() && request.protocol() == Protocol::Udp;
    let additionals = if small && outcome.answers.len() > 4 { &[][..] } else { &outcome.additionals };
    let message = builder.build(metadata, &outcome.answers, &outcome.authorities, &[], additionals);
    match response.send_response(message).await {
        Ok(info) => info,
        Err(error) => {
            tracing::debug!(%error, client = %request.src(), "a response could not be sent");
            metadata.response_code = ResponseCode::ServFail;
            ResponseInfo::from(Header { metadata, counts: HeaderCounts::default() })
        }
    }
}

#[cfg(test)]
#[path = "handler_tests.rs"]
mod tests;
