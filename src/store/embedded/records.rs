//! How rows look in the file. Numbers are big-endian, so that rows sort by them.
//!
//! | table | key | row |
//! | --- | --- | --- |
//! | `index` | key, NUL, revision | [`Head`]: what the key is as of that revision |
//! | `log` | revision | [`Record`]: the change that has this revision, with its value |
//! | `ttl` | deadline in ms since the epoch, revision | nothing: the log names the key |
//! | `meta` | name | number |

use redb::TableDefinition;

pub(super) const META: TableDefinition<'static, &str, u64> = TableDefinition::new("windlass.meta");
pub(super) const INDEX: TableDefinition<'static, &[u8], &[u8]> = TableDefinition::new("windlass.index");
pub(super) const LOG: TableDefinition<'static, u64, &[u8]> = TableDefinition::new("windlass.log");
pub(super) const TTL: TableDefinition<'static, (u64, u64), ()> = TableDefinition::new("windlass.ttl");

/// Names in `meta`.
pub(super) mod meta {
    /// Of this layout; a file with another one is refused.
    pub const FORMAT: &str = "format";
    /// Of the last write.
    pub const REVISION: &str = "revision";
    /// The oldest revision that can be read.
    pub const COMPACTED: &str = "compacted";
    /// Up to here rows that compaction made superfluous are gone.
    pub const SWEPT: &str = "swept";
    /// Random, given once: labels the metrics.
    pub const CLUSTER: &str = "cluster";
}

/// The layout that this code reads and writes.
pub(super) const FORMAT: u64 = 1;

/// What a key is as of a revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub deleted: bool,
    pub create: u64,
    /// Milliseconds since the epoch; 0 for never.
    pub expires: u64,
}

/// One change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record<'a> {
    pub deleted: bool,
    pub create: u64,
    /// The revision of what this change replaced; 0 when it created the key.
    pub prev: u64,
    pub expires: u64,
    pub key: &'a str,
    pub value: &'a [u8],
}

const HEAD_LEN: usize = 17;
const RECORD_HEAD_LEN: usize = 29;

/// A row that cannot have been written by this code.
#[derive(Debug)]
pub(super) struct BadRow(pub &'static str);

// === impl Head ===

impl Head {
    pub(super) fn encode(self) -> [u8; HEAD_LEN] {
        let mut row = [0; HEAD_LEN];
        row[0] = u8::from(self.deleted);
        row[1..9].copy_from_slice(&self.create.to_be_bytes());
        row[9..].copy_from_slice(&self.expires.to_be_bytes());
        row
    }

    pub(super) fn decode(row: &[u8]) -> Result<Self, BadRow> {
        match row.len() == HEAD_LEN && row[0] < 2 {
            true => Ok(Self { deleted: row[0] == 1, create: number(&row[1..]), expires: number(&row[9..]) }),
            false => Err(BadRow("a row of the index has a bad shape")),
        }
    }
}

// === impl Record ===

impl<'a> Record<'a> {
    /// Puts the row together in `row`, which is emptied before: one buffer serves a whole batch.
    pub(super) fn encode(&self, row: &mut Vec<u8>) {
        row.clear();
        row.reserve(RECORD_HEAD_LEN + self.key.len() + self.value.len());
        row.push(u8::from(self.deleted));
        for n in [self.create, self.prev, self.expires] {
            row.extend_from_slice(&n.to_be_bytes());
        }
        // Keys are far below 4 GiB: `check_write` bounds them.
        row.extend_from_slice(&u32::try_from(self.key.len()).unwrap_or(u32::MAX).to_be_bytes());
        row.extend_from_slice(self.key.as_bytes());
        row.extend_from_slice(self.value);
    }

    pub(super) fn decode(row: &'a [u8]) -> Result<Self, BadRow> {
        const BAD: BadRow = BadRow("a row of the log has a bad shape");
        if row.len() < RECORD_HEAD_LEN || row[0] > 1 {
            return Err(BAD);
        }
        let (head, rest) = row.split_at(RECORD_HEAD_LEN);
        let key_len = usize::try_from(u32::from_be_bytes([head[25], head[26], head[27], head[28]])).map_err(|_| BAD)?;
        let (key, value) = rest.split_at_checked(key_len).ok_or(BAD)?;
        Ok(Self {
            deleted: head[0] == 1,
            create: number(&head[1..]),
            prev: number(&head[9..]),
            expires: number(&head[17..]),
            key: std::str::from_utf8(key).map_err(|_| BAD)?,
            value,
        })
    }
}

// === keys of the index ===

/// The row key of `key` as of `revision`. Keys hold no NUL, so rows of one key stay together and sort as the keys do.
pub(super) fn index_key(key: &[u8], revision: u64, row: &mut Vec<u8>) {
    row.clear();
    row.reserve(key.len() + 9);
    row.extend_from_slice(key);
    row.push(0);
    row.extend_from_slice(&revision.to_be_bytes());
}

/// The key and the revision of a row key.
pub(super) fn split_index_key(row: &[u8]) -> Result<(&[u8], u64), BadRow> {
    match row.len().checked_sub(9) {
        Some(at) if row[at] == 0 => Ok((&row[..at], number(&row[at + 1..]))),
        _ => Err(BadRow("a key of the index has a bad shape")),
    }
}

/// The first eight bytes; callers have checked that they are there.
fn number(bytes: &[u8]) -> u64 {
    let mut eight = [0; 8];
    eight.copy_from_slice(&bytes[..8]);
    u64::from_be_bytes(eight)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back() {
        for head in [
            Head { deleted: false, create: 1, expires: 0 },
            Head { deleted: true, create: u64::MAX, expires: 1_700_000_000_000 },
        ] {
            assert_eq!(Head::decode(&head.encode()).expect("decodes"), head);
        }
        let mut row = Vec::new();
        for (key, value) in [("/registry/pods/a/b", &b"{}"[..]), ("k", b""), ("\u{e9}", &[0, 255])] {
            let record = Record { deleted: value.is_empty(), create: 5, prev: 4, expires: 9, key, value };
            record.encode(&mut row);
            assert_eq!(Record::decode(&row).expect("decodes"), record);
            for cut in 0..RECORD_HEAD_LEN + key.len() {
                assert!(Record::decode(&row[..cut]).is_err(), "cut at {cut}");
            }
        }
    }

    #[test]
    fn index_sorts_by_key_then_revision() {
        let mut rows = Vec::new();
        for (key, revision) in [("a", 1), ("a", 256), ("a/b", 2), ("a0", 1), ("b", 0)] {
            let mut row = Vec::new();
            index_key(key.as_bytes(), revision, &mut row);
            assert_eq!(split_index_key(&row).expect("splits"), (key.as_bytes(), revision));
            rows.push(row);
        }
        assert!(rows.is_sorted());
        assert!(split_index_key(b"short").is_err() && split_index_key(b"nineBytes").is_err());
    }
}
