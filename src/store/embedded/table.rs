//! Reads and writes on the tables: what a store means, in terms of rows.

use bytes::Bytes;
use redb::{ReadTransaction, ReadableTable, Table, WriteTransaction};

use super::fault::{Fault, Outcome};
use super::records::{Head, INDEX, LOG, META, Record, TTL, index_key, meta, split_index_key};
use crate::{Entry, Error, Event, EventKind, Expect, Op, Range, RangeResult, Txn, prefix_end};

/// The numbers in `meta`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Marks {
    pub revision: u64,
    pub compacted: u64,
    pub swept: u64,
}

// === reading ===

pub(super) fn marks(txn: &ReadTransaction) -> Outcome<Marks> {
    let table = txn.open_table(META)?;
    let number = |name| -> Outcome<u64> {
        Ok(table.get(name)?.ok_or(Fault::Row("a number in the table `windlass.meta` is missing"))?.value())
    };
    Ok(Marks {
        revision: number(meta::REVISION)?,
        compacted: number(meta::COMPACTED)?,
        swept: number(meta::SWEPT)?,
    })
}

/// The random number given when the file was made.
pub(super) fn cluster(txn: &ReadTransaction) -> Outcome<u64> {
    Ok(txn.open_table(META)?.get(meta::CLUSTER)?.map_or(0, |n| n.value()))
}

pub(super) fn get(txn: &ReadTransaction, key: &str) -> Outcome<Option<Entry>> {
    let index = txn.open_table(INDEX)?;
    let Some((revision, head)) = head(&index, key)? else { return Ok(None) };
    match head.deleted {
        true => Ok(None),
        false => entry(&txn.open_table(LOG)?, revision).map(Some),
    }
}

pub(super) fn range(txn: &ReadTransaction, asked: &Range) -> Outcome<RangeResult> {
    let marks = marks(txn)?;
    let revision = asked.revision.unwrap_or(marks.revision);
    if revision > marks.revision {
        return Err(Error::Future { requested: revision, current: marks.revision }.into());
    }
    if revision < marks.compacted {
        return Err(Error::Compacted { requested: revision, compacted: marks.compacted }.into());
    }
    let (index, log) = (txn.open_table(INDEX)?, txn.open_table(LOG)?);
    let limit = asked.limit.unwrap_or(usize::MAX);
    let mut result = RangeResult { entries: Vec::new(), revision, more: false };
    // Rows of a key come together, oldest first: the last one at or before `revision` is the key's state.
    let (mut current, mut best): (Vec<u8>, Option<u64>) = (Vec::new(), None);
    let mut rows = rows(&index, asked)?;
    loop {
        let row = rows.next().transpose()?;
        let split = match &row {
            Some((row_key, _)) => Some(split_index_key(row_key.value())?),
            None => None,
        };
        if split.is_none_or(|(key, _)| key != current) {
            if let Some(found) = best.take() {
                if result.entries.len() == limit {
                    result.more = true;
                    break;
                }
                result.entries.push(entry(&log, found)?);
            }
            let Some((key, _)) = split else { break };
            current.clear();
            current.extend_from_slice(key);
        }
        if let (Some((_, row_revision)), Some((_, head))) = (split, &row)
            && row_revision <= revision
        {
            best = (!Head::decode(head.value())?.deleted).then_some(row_revision);
        }
    }
    Ok(result)
}

fn rows<'t>(
    index: &'t impl ReadableTable<&'static [u8], &'static [u8]>,
    asked: &Range,
) -> Outcome<redb::Range<'t, &'static [u8], &'static [u8]>> {
    // Every row of a key is below the key followed by 1, for the byte after the key is 0 in all of them.
    let after = asked.start_after.as_ref().map(|key| [key.as_bytes(), &[1]].concat()).unwrap_or_default();
    let start = after.as_slice().max(asked.prefix.as_bytes());
    Ok(match prefix_end(asked.prefix.as_bytes()) {
        Some(end) if start >= end.as_slice() => index.range::<&[u8]>(start..start)?,
        Some(end) => index.range::<&[u8]>(start..end.as_slice())?,
        None => index.range::<&[u8]>(start..)?,
    })
}

/// Values that [`events`] reads at most, in bytes, beyond the last event.
const EVENTS_BYTES: usize = 4 << 20;

/// The events after a revision up to another, of a prefix, at most `limit` and not too many bytes; and up to which revision
/// they were read.
pub(super) fn events(
    txn: &ReadTransaction,
    prefix: &str,
    after: u64,
    upto: u64,
    limit: usize,
) -> Outcome<(Vec<Event>, u64)> {
    let marks = marks(txn)?;
    if after < marks.compacted {
        return Err(Error::Compacted { requested: after, compacted: marks.compacted }.into());
    }
    let log = txn.open_table(LOG)?;
    let (mut found, mut bytes) = (Vec::new(), 0);
    for (read, row) in log.range(after + 1..=upto)?.enumerate() {
        let (revision, row) = row?;
        let record = Record::decode(row.value())?;
        if record.key.starts_with(prefix) {
            let event = event(&log, revision.value(), &record)?;
            bytes += event.entry.value.len() + event.previous.as_ref().map_or(0, |p| p.value.len());
            found.push(event);
        }
        // A rare prefix must not keep a reader for the whole log either.
        if found.len() == limit || bytes > EVENTS_BYTES || read == limit * 16 {
            return Ok((found, revision.value()));
        }
    }
    Ok((found, upto))
}

fn event(log: &impl ReadableTable<u64, &'static [u8]>, revision: u64, record: &Record<'_>) -> Outcome<Event> {
    let previous = match record.prev {
        0 => None,
        prev => match log.get(prev)? {
            Some(row) => Some(to_entry(prev, &Record::decode(row.value())?)),
            None => None,
        },
    };
    let kind = match record.deleted {
        true => EventKind::Delete,
        false => EventKind::Put { created: record.create == revision },
    };
    Ok(Event { kind, entry: to_entry(revision, record), previous })
}

fn to_entry(revision: u64, record: &Record<'_>) -> Entry {
    Entry {
        key: record.key.to_owned(),
        value: Bytes::copy_from_slice(record.value),
        create_revision: record.create,
        mod_revision: revision,
    }
}

fn entry(log: &impl ReadableTable<u64, &'static [u8]>, revision: u64) -> Outcome<Entry> {
    let row = log.get(revision)?.ok_or(Fault::Row("the index names a revision that the log lacks"))?;
    Ok(to_entry(revision, &Record::decode(row.value())?))
}

/// The newest row of a key: its revision, and what the key is.
fn head(index: &impl ReadableTable<&'static [u8], &'static [u8]>, key: &str) -> Outcome<Option<(u64, Head)>> {
    let (mut first, mut last) = (Vec::new(), Vec::new());
    index_key(key.as_bytes(), 0, &mut first);
    index_key(key.as_bytes(), u64::MAX, &mut last);
    match index.range::<&[u8]>(first.as_slice()..=last.as_slice())?.next_back().transpose()? {
        Some((row_key, row)) => Ok(Some((split_index_key(row_key.value())?.1, Head::decode(row.value())?))),
        None => Ok(None),
    }
}

// === writing ===

/// The tables of one write transaction, and the revision so far.
pub(super) struct Writing<'t> {
    index: Table<'t, &'static [u8], &'static [u8]>,
    log: Table<'t, u64, &'static [u8]>,
    ttl: Table<'t, (u64, u64), ()>,
    pub revision: u64,
    row: Vec<u8>,
    key: Vec<u8>,
}

impl<'t> Writing<'t> {
    pub(super) fn open(txn: &'t WriteTransaction, revision: u64) -> Outcome<Self> {
        Ok(Self {
            index: txn.open_table(INDEX)?,
            log: txn.open_table(LOG)?,
            ttl: txn.open_table(TTL)?,
            revision,
            row: Vec::new(),
            key: Vec::new(),
        })
    }

    /// Does one write, or finds that its expectation does not hold. The event is `None` when nothing changed.
    pub(super) fn apply(&mut self, txn: &Txn, now_ms: u64) -> Outcome<(crate::Outcome, Option<Event>)> {
        let found = head(&self.index, &txn.key)?.filter(|(_, head)| !head.deleted);
        let holds = match txn.expect {
            Expect::Any => true,
            Expect::Absent => found.is_none(),
            Expect::ModRevision(wanted) => found.is_some_and(|(revision, _)| revision == wanted),
        };
        let previous = match found {
            Some((revision, _)) => Some(entry(&self.log, revision)?),
            None => None,
        };
        if !holds {
            return Ok((crate::Outcome::Conflict { current: previous }, None));
        }
        if found.is_none() && txn.op == Op::Delete {
            return Ok((crate::Outcome::Committed { revision: self.revision, previous: None }, None));
        }
        self.revision += 1;
        let revision = self.revision;
        if let Some((old, head)) = found
            && head.expires != 0
        {
            self.ttl.remove((head.expires, old))?;
        }
        let (value, ttl) = match &txn.op {
            Op::Put { value, ttl } => (value.clone(), *ttl),
            Op::Delete => (Bytes::new(), None),
        };
        let expires = ttl.map_or(0, |ttl| deadline(now_ms, ttl));
        let create = found.map_or(revision, |(_, head)| head.create);
        let deleted = txn.op == Op::Delete;
        let prev = found.map_or(0, |(old, _)| old);
        Record { deleted, create, prev, expires, key: &txn.key, value: &value }.encode(&mut self.row);
        self.log.insert(revision, self.row.as_slice())?;
        index_key(txn.key.as_bytes(), revision, &mut self.key);
        self.index.insert(self.key.as_slice(), Head { deleted, create, expires }.encode().as_slice())?;
        if expires != 0 {
            self.ttl.insert((expires, revision), ())?;
        }
        let entry = Entry { key: txn.key.clone(), value, create_revision: create, mod_revision: revision };
        let kind = if deleted { EventKind::Delete } else { EventKind::Put { created: found.is_none() } };
        let event = Event { kind, entry, previous: previous.clone() };
        Ok((crate::Outcome::Committed { revision, previous }, Some(event)))
    }

    /// The keys whose deadline has passed, as deletions to apply, at most `limit`.
    pub(super) fn expired(&self, now_ms: u64, limit: usize) -> Outcome<Vec<Txn>> {
        let mut due = Vec::new();
        for row in self.ttl.range((0, 0)..=(now_ms, u64::MAX))?.take(limit) {
            let revision = row?.0.value().1;
            let record = self.log.get(revision)?.ok_or(Fault::Row("a deadline names a revision that the log lacks"))?;
            let key = Record::decode(record.value())?.key.to_owned();
            due.push(Txn { key, expect: Expect::ModRevision(revision), op: Op::Delete });
        }
        Ok(due)
    }

    /// Removes what compaction up to `compacted` made superfluous, from `swept` on, at most `limit` revisions. Returns how
    /// far it came.
    pub(super) fn sweep(&mut self, swept: u64, compacted: u64, limit: u64) -> Outcome<u64> {
        let upto = compacted.min(swept.saturating_add(limit));
        let mut gone = Vec::new();
        for row in self.log.range(swept + 1..=upto)? {
            let (revision, row) = row?;
            let record = Record::decode(row.value())?;
            if record.prev != 0 {
                gone.push((record.key.to_owned(), record.prev));
            }
            if record.deleted {
                gone.push((record.key.to_owned(), revision.value()));
            }
        }
        for (key, revision) in gone {
            self.log.remove(revision)?;
            index_key(key.as_bytes(), revision, &mut self.key);
            self.index.remove(self.key.as_slice())?;
        }
        Ok(upto)
    }

    /// The next deadline, in milliseconds since the epoch.
    pub(super) fn next_deadline(&self) -> Outcome<Option<u64>> {
        Ok(self.ttl.first()?.map(|(key, _)| key.value().0))
    }
}

/// Writes the numbers of `meta`.
pub(super) fn set_marks(txn: &WriteTransaction, marks: Marks) -> Outcome<()> {
    let mut table = txn.open_table(META)?;
    for (name, value) in [
        (meta::REVISION, marks.revision),
        (meta::COMPACTED, marks.compacted),
        (meta::SWEPT, marks.swept),
    ] {
        table.insert(name, value)?;
    }
    Ok(())
}

/// Whole seconds, rounded up, so that deadlines come in groups.
fn deadline(now_ms: u64, ttl: std::time::Duration) -> u64 {
    let ttl = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
    now_ms.saturating_add(ttl).div_ceil(1000).saturating_mul(1000)
}
