//! One change to one object, and the frames made of it.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::scan::Paths;
use super::stored::{Form, Stored};

/// What happened, as a watch reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    Added,
    Modified,
    Deleted,
}

impl Change {
    /// The `type` of a watch event.
    pub fn as_str(self) -> &'static str {
        match self {
            Change::Added => "ADDED",
            Change::Modified => "MODIFIED",
            Change::Deleted => "DELETED",
        }
    }
}

/// One change. Shared by the ring and by every watcher that is told.
#[derive(Debug)]
pub struct CacheEvent {
    pub change: Change,
    /// The object after the change; for a deletion its last state, with the deletion's revision.
    pub object: Arc<Stored>,
    /// The object before the change.
    pub previous: Option<Arc<Stored>>,
    pub revision: u64,
    left: OnceLock<Arc<Stored>>,
    frames: Mutex<SmallVec<[(Change, Form, Bytes); 2]>>,
}

impl CacheEvent {
    pub(crate) fn new(change: Change, object: Arc<Stored>, previous: Option<Arc<Stored>>, revision: u64) -> CacheEvent {
        CacheEvent { change, object, previous, revision, left: OnceLock::new(), frames: Mutex::default() }
    }

    /// What a watcher is shown whose selector the object no longer matches: the old object at the new revision.
    fn left(&self, paths: &Paths) -> &Arc<Stored> {
        self.left.get_or_init(|| match &self.previous {
            Some(previous) => Arc::new(previous.at_revision(self.revision, paths)),
            None => self.object.clone(),
        })
    }
}

/// A change as one watcher sees it.
#[derive(Clone, Debug)]
pub struct Delivery {
    pub change: Change,
    pub event: Arc<CacheEvent>,
}

impl Delivery {
    pub fn revision(&self) -> u64 {
        self.event.revision
    }

    /// The object to show.
    pub fn object(&self, paths: &Paths) -> Arc<Stored> {
        if self.change == Change::Deleted && self.event.change != Change::Deleted {
            self.event.left(paths).clone()
        } else {
            self.event.object.clone()
        }
    }

    /// The frame of this delivery in `form`, made by whoever needs it first.
    pub fn frame<E>(&self, form: &Form, make: impl FnOnce() -> Result<Bytes, E>) -> Result<Bytes, E> {
        let found = |frames: &[(Change, Form, Bytes)]| {
            frames.iter().find(|(c, f, _)| *c == self.change && f == form).map(|(_, _, b)| b.clone())
        };
        if let Some(frame) = found(&self.event.frames.lock()) {
            return Ok(frame);
        }
        let frame = make()?;
        let mut frames = self.event.frames.lock();
        if found(&frames).is_none() && frames.len() < 6 {
            frames.push((self.change, form.clone(), frame.clone()));
        }
        Ok(frame)
    }
}
