//! The file: made, opened, refused, and opened anew after an I/O error.

use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use parking_lot::RwLock;
use redb::{Builder, Database, DatabaseError, ReadTransaction, ReadableDatabase, StorageError, TableError, WriteTransaction};

use super::fault::{Fault, Outcome, no_room};
use super::records::{FORMAT, INDEX, LOG, META, TTL, meta};
use crate::Error;

/// Files up to this size have every page's checksum verified at each open (some 0.1 s); larger ones after a crash only.
const CHECKED_SIZE: u64 = 128 << 20;

/// The database, which the writer may close and open anew while readers come and go.
pub(super) struct Slot {
    path: PathBuf,
    cache: usize,
    database: RwLock<Option<Database>>,
}

/// How to open.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Check {
    /// Verify what is quick to verify.
    BySize,
    /// Verify everything: something went wrong before.
    All,
}

// === impl Slot ===

impl Slot {
    /// Opens the file, or makes a new one when there is none.
    pub(super) fn open(path: &Path, cache: usize) -> Result<Self, Error> {
        if !path.exists() {
            create(path)?;
        }
        let database = open(path, cache, Check::BySize)?;
        Ok(Self { path: path.to_owned(), cache, database: RwLock::new(Some(database)) })
    }

    /// The file's name, for errors.
    pub(super) fn what(&self) -> String {
        self.path.display().to_string()
    }

    /// Bytes that the file takes on disk.
    pub(super) fn bytes(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        fs::metadata(&self.path).map_or(0, |m| m.blocks() * 512)
    }

    /// Bytes that are free on the file's disk, for us; `None` when that cannot be told.
    pub(super) fn free(&self) -> Option<u64> {
        let folder = self.path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let stat = nix::sys::statvfs::statvfs(folder).ok()?;
        Some(stat.blocks_available().saturating_mul(stat.fragment_size()))
    }

    /// Runs `read` on a snapshot. Tried once more when the writer opened the file anew under it.
    pub(super) fn read<T>(&self, read: impl Fn(&ReadTransaction) -> Outcome<T>) -> Result<T, Error> {
        let once = || {
            let guarded = AssertUnwindSafe(|| {
                let txn = match &*self.database.read() {
                    Some(database) => database.begin_read()?,
                    None => return Err(Fault::Told(self.closed())),
                };
                read(&txn)
            });
            // redb may panic on a page that something else wrote: that is damage, not our end.
            catch_unwind(guarded).unwrap_or_else(|_| Err(Fault::Row("a page could not be read")))
        };
        match once() {
            Err(fault) if fault.is_closed() => once(),
            other => other,
        }
        .map_err(|fault| fault.tell(&self.what()))
    }

    pub(super) fn begin_write(&self) -> Outcome<WriteTransaction> {
        match &*self.database.read() {
            Some(database) => Ok(database.begin_write()?),
            None => Err(Fault::Told(self.closed())),
        }
    }

    /// Closes and opens the file again: after an I/O error redb serves no more. While this fails, reads fail too.
    pub(super) fn reopen(&self) -> Result<(), Error> {
        let mut database = self.database.write();
        if let Some(old) = database.take() {
            // Its own error is the one that brought us here.
            let _ = catch_unwind(AssertUnwindSafe(|| drop(old)));
        }
        *database = Some(open(&self.path, self.cache, Check::All)?);
        Ok(())
    }

    /// Closes the file. Nothing can be read any more.
    pub(super) fn close(&self) {
        if let Some(database) = self.database.write().take()
            && let Err(error) = database.close()
        {
            tracing::warn!(file = self.what(), %error, "the store was not closed cleanly: the next start checks it");
        }
    }

    fn closed(&self) -> Error {
        Error::Unavailable { detail: format!("{} is closed", self.what()) }
    }
}

/// Makes a new, empty store beside the path and moves it there: a crash in between leaves no half-made file.
fn create(path: &Path) -> Result<(), Error> {
    let io = |error: std::io::Error| match no_room(&error) {
        true => Error::Full { detail: format!("{}: {error}", path.display()) },
        false => Error::Unavailable { detail: format!("cannot make {}: {error}", path.display()) },
    };
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(io)?;
    let fresh = path.with_extension("new");
    OpenOptions::new().write(true).create(true).truncate(true).open(&fresh).map_err(io)?;
    fs::set_permissions(&fresh, fs::Permissions::from_mode(0o600)).map_err(io)?;
    let fill = || -> Outcome<()> {
        let database = Builder::new().create(&fresh).map_err(|error| Fault::Told(refused(&fresh, error)))?;
        let txn = database.begin_write()?;
        {
            let mut table = txn.open_table(META)?;
            for (name, value) in [
                (meta::FORMAT, FORMAT),
                // etcd begins at 1: the first write has revision 2, and 0 can mean "none".
                (meta::REVISION, 1),
                (meta::COMPACTED, 0),
                (meta::SWEPT, 0),
                (meta::CLUSTER, seed()),
            ] {
                table.insert(name, value)?;
            }
            txn.open_table(INDEX)?;
            txn.open_table(LOG)?;
            txn.open_table(TTL)?;
        }
        txn.commit()?;
        database.close().map_err(|error| Fault::Told(refused(&fresh, error)))
    };
    fill().map_err(|fault| fault.tell(&fresh.display().to_string()))?;
    fs::rename(&fresh, path).and_then(|()| File::open(folder)?.sync_all()).map_err(io)
}

fn seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::time::SystemTime::now())
}

fn open(path: &Path, cache: usize, check: Check) -> Result<Database, Error> {
    let what = || path.display().to_string();
    let size = match fs::metadata(path) {
        Ok(found) if !found.is_file() => {
            return Err(Error::Foreign { what: what(), detail: "it is not a regular file".into() });
        }
        Ok(found) => found.len(),
        Err(error) => return Err(Error::Unavailable { detail: format!("{}: {error}", what()) }),
    };
    if size == 0 {
        return Err(Error::Damaged { what: what(), detail: "the file is empty, a store never is".into() });
    }
    let mut builder = Builder::new();
    builder.set_cache_size(cache).set_check_integrity_on_open(check == Check::All || size <= CHECKED_SIZE);
    let opened = catch_unwind(AssertUnwindSafe(|| builder.open(path)));
    let database = match opened {
        Ok(Ok(database)) => database,
        Ok(Err(error)) => return Err(refused(path, error)),
        Err(_) => return Err(Error::Damaged { what: what(), detail: "its pages contradict each other".into() }),
    };
    let format = catch_unwind(AssertUnwindSafe(|| format(&database)))
        .unwrap_or(Err(Fault::Row("the list of tables could not be read")))
        .map_err(|fault| fault.tell(&what()))?;
    match format {
        Some(FORMAT) => Ok(database),
        Some(other) => Err(Error::Foreign {
            what: what(),
            detail: format!("it has layout {other}, and this version of Windlass knows layout {FORMAT}"),
        }),
        None => Err(Error::Foreign { what: what(), detail: "it is a redb database of another program".into() }),
    }
}

fn format(database: &Database) -> Outcome<Option<u64>> {
    let txn = database.begin_read()?;
    match txn.open_table(META) {
        Ok(table) => Ok(redb::ReadableTable::get(&table, meta::FORMAT)?.map(|n| n.value())),
        Err(TableError::TableDoesNotExist(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn refused(path: &Path, error: DatabaseError) -> Error {
    let what = path.display().to_string();
    match error {
        DatabaseError::DatabaseAlreadyOpen | DatabaseError::LockProtocolMismatch => Error::Locked { what },
        DatabaseError::UpgradeRequired(version) => {
            Error::Foreign { what, detail: format!("it has redb's old file format {version}") }
        }
        DatabaseError::Storage(StorageError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
            Error::Foreign { what, detail: "it is not a redb database".into() }
        }
        DatabaseError::Storage(StorageError::Io(error)) if error.kind() == ErrorKind::UnexpectedEof => {
            Error::Damaged { what, detail: "it ends too early".into() }
        }
        DatabaseError::Storage(error) => Fault::Storage(error).tell(&what),
        other => Error::Damaged { what, detail: other.to_string() },
    }
}
