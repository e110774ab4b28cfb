//! What a controller has asked for and not yet seen in its cache.
//!
//! A controller that acts again before its cache shows the last action would create or delete twice. It therefore notes what
//! it expects, and waits until the informer's handlers have cleared the note. A note expires after five minutes, so that a
//! lost event cannot stop a controller for good.

use std::{
    collections::{HashMap, HashSet},
    hash::Hash,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// Upstream's `ExpectationsTimeout`.
pub const TIMEOUT: Duration = Duration::from_secs(300);

#[derive(Debug)]
struct Note {
    creations: usize,
    deletions: HashSet<String>,
    made: Instant,
}

/// The open expectations of one controller, by the key of the object it works for.
#[derive(Debug)]
pub struct Expectations<K>(Mutex<HashMap<K, Note>>);

impl<K: Eq + Hash + Clone> Default for Expectations<K> {
    fn default() -> Self {
        Expectations(Mutex::new(HashMap::new()))
    }
}

impl<K: Eq + Hash + Clone> Expectations<K> {
    fn note(&self, key: &K, change: impl FnOnce(&mut Note)) {
        let mut notes = self.0.lock();
        let note = notes.entry(key.clone()).or_insert_with(|| Note { creations: 0, deletions: HashSet::new(), made: Instant::now() });
        note.made = Instant::now();
        change(note);
    }

    fn observe(&self, key: &K, change: impl FnOnce(&mut Note)) {
        let mut notes = self.0.lock();
        if let Some(note) = notes.get_mut(key) {
            change(note);
            if note.creations == 0 && note.deletions.is_empty() {
                notes.remove(key);
            }
        }
    }

    /// `count` objects are about to be created.
    pub fn expect_creations(&self, key: &K, count: usize) {
        if count > 0 {
            self.note(key, |note| note.creations += count);
        }
    }

    /// The objects with these UIDs are about to be deleted.
    pub fn expect_deletions(&self, key: &K, uids: impl IntoIterator<Item = String>) {
        let uids: Vec<String> = uids.into_iter().collect();
        if !uids.is_empty() {
            self.note(key, |note| note.deletions.extend(uids));
        }
    }

    /// A creation was seen, or will never happen.
    pub fn creation_observed(&self, key: &K) {
        self.observe(key, |note| note.creations = note.creations.saturating_sub(1));
    }

    /// A deletion was seen, or will never happen.
    pub fn deletion_observed(&self, key: &K, uid: &str) {
        self.observe(key, |note| {
            note.deletions.remove(uid);
        });
    }

    /// Forgets `key`: its object is gone.
    pub fn forget(&self, key: &K) {
        self.0.lock().remove(key);
    }

    /// `None` when the controller may act, else how long until the note expires.
    pub fn pending(&self, key: &K) -> Option<Duration> {
        let notes = self.0.lock();
        TIMEOUT.checked_sub(notes.get(key)?.made.elapsed()).filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cleared_by_what_was_seen() {
        let open = Expectations::<&str>::default();
        assert!(open.pending(&"a").is_none());
        open.expect_creations(&"a", 2);
        assert!(open.pending(&"a").is_some());
        open.creation_observed(&"a");
        open.expect_deletions(&"a", ["u1".to_string()]);
        open.creation_observed(&"a");
        open.creation_observed(&"a");
        assert!(open.pending(&"a").is_some());
        open.deletion_observed(&"a", "other");
        assert!(open.pending(&"a").is_some());
        open.deletion_observed(&"a", "u1");
        assert!(open.pending(&"a").is_none());
        assert!(open.pending(&"b").is_none());
    }
}
