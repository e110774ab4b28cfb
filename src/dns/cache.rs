//! Answers of other resolvers, kept for as long as they say, but not longer than half a minute.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use hickory_server::proto::op::ResponseCode;
use hickory_server::proto::rr::{DNSClass, Name, RData, Record, RecordType};
use parking_lot::Mutex;

/// The longest that an answer is kept, as `cache 30` of the CoreDNS configuration that kubeadm writes.
const LONGEST: Duration = Duration::from_secs(30);

/// What is asked: the name in lower case, and whether DNSSEC records are wanted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Question {
    pub name: Name,
    pub kind: RecordType,
    pub class: DNSClass,
    pub dnssec: bool,
}

/// An answer of another resolver.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    pub code: ResponseCode,
    pub answers: Vec<Record>,
    pub authorities: Vec<Record>,
    pub additionals: Vec<Record>,
    pub authentic: bool,
}

struct Kept {
    reply: Reply,
    stored: Instant,
    until: Instant,
}

/// A cache of at most `capacity` answers.
pub struct Cache {
    capacity: usize,
    kept: Mutex<HashMap<Question, Kept>>,
}

/// How long a reply may be kept; `None`: not at all.
fn lifetime(reply: &Reply) -> Option<Duration> {
    let negative = reply.answers.is_empty();
    let seconds = match reply.code {
        ResponseCode::NoError if !negative => reply.answers.iter().map(|r| r.ttl).min()?,
        // RFC 2308: a negative answer lives as its SOA says, and without one not at all.
        ResponseCode::NoError | ResponseCode::NXDomain => reply.authorities.iter().find_map(|r| match &r.data {
            RData::SOA(soa) => Some(r.ttl.min(soa.minimum)),
            _ => None,
        })?,
        _ => return None,
    };
    (seconds > 0).then(|| Duration::from_secs(seconds.into()).min(LONGEST))
}

impl Cache {
    /// An empty cache; with capacity 0 it keeps nothing.
    pub fn new(capacity: usize) -> Cache {
        Cache { capacity, kept: Mutex::default() }
    }

    /// The reply, its TTLs reduced by its age.
    pub fn get(&self, question: &Question, now: Instant) -> Option<Reply> {
        let kept = self.kept.lock();
        let found = kept.get(question).filter(|k| k.until > now)?;
        let age = u32::try_from(now.duration_since(found.stored).as_secs()).unwrap_or(u32::MAX);
        let mut reply = found.reply.clone();
        for record in reply.answers.iter_mut().chain(&mut reply.authorities).chain(&mut reply.additionals) {
            record.ttl = record.ttl.saturating_sub(age);
        }
        Some(reply)
    }

    /// Keeps a reply, if it may be. Returns how many are kept.
    pub fn put(&self, question: Question, reply: &Reply, now: Instant) -> usize {
        let mut kept = self.kept.lock();
        if let Some(lifetime) = lifetime(reply)
            && self.capacity > 0
        {
            if kept.len() >= self.capacity {
                kept.retain(|_, k| k.until > now);
            }
            if kept.len() >= self.capacity {
                // All are fresh: those that end soonest make room, an eighth at once so that this is rare.
                let mut ends: Vec<Instant> = kept.values().map(|k| k.until).collect();
                ends.sort_unstable();
                let limit = ends[ends.len() / 8];
                let mut room = self.capacity / 8 + 1;
                kept.retain(|_, k| {
                    let goes = k.until <= limit && room > 0;
                    room -= usize::from(goes);
                    !goes
                });
            }
            kept.insert(question, Kept { reply: reply.clone(), stored: now, until: now + lifetime });
        }
        kept.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hickory_server::proto::rr::rdata::{A, SOA};

    fn question(name: &str) -> Question {
        Question { name: Name::from_ascii(name).unwrap(), kind: RecordType::A, class: DNSClass::IN, dnssec: false }
    }

    fn reply(code: ResponseCode, ttl: u32, soa: Option<u32>) -> Reply {
        let name = Name::from_ascii("x.").unwrap();
        let soa = soa.map(|min| Record::from_rdata(name.clone(), 100, RData::SOA(SOA::new(name.clone(), name.clone(), 1, 1, 1, 1, min))));
        let answers = if soa.is_none() { vec![Record::from_rdata(name, ttl, RData::A(A([192, 0, 2, 1].into())))] } else { vec![] };
        Reply { code, answers, authorities: soa.into_iter().collect(), additionals: vec![], authentic: false }
    }

    #[test]
    fn lives_as_long_as_it_says_and_not_longer_than_half_a_minute() {
        for (reply, seconds) in [
            (reply(ResponseCode::NoError, 5, None), Some(5)),
            (reply(ResponseCode::NoError, 500, None), Some(30)),
            (reply(ResponseCode::NoError, 0, None), None),
            (reply(ResponseCode::NXDomain, 0, Some(7)), Some(7)),
            (reply(ResponseCode::ServFail, 9, None), None),
            (Reply { authorities: vec![], ..reply(ResponseCode::NXDomain, 0, Some(7)) }, None),
        ] {
            assert_eq!(lifetime(&reply).map(|d| d.as_secs()), seconds, "{reply:?}");
        }
    }

    #[test]
    fn ages_and_forgets() {
        let (cache, start) = (Cache::new(8), Instant::now());
        cache.put(question("a."), &reply(ResponseCode::NoError, 10, None), start);
        let at = |s| cache.get(&question("a."), start + Duration::from_secs(s)).map(|r| r.answers[0].ttl);
        assert_eq!((at(0), at(4), at(10)), (Some(10), Some(6), None));
        for n in 0..100 {
            assert!(cache.put(question(&format!("n{n}.")), &reply(ResponseCode::NoError, 10, None), start) <= 8);
        }
        assert_eq!(Cache::new(0).put(question("a."), &reply(ResponseCode::NoError, 10, None), start), 0);
    }
}
