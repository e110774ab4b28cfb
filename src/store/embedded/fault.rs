//! What can go wrong below, and what callers are told.

use redb::{CommitError, StorageError, TableError, TransactionError};

use super::records::BadRow;
use crate::Error;

/// An error of redb or of a row, or one that is already in the store's words.
#[derive(Debug)]
pub(super) enum Fault {
    Storage(StorageError),
    Table(String),
    Row(&'static str),
    Told(Error),
}

pub(super) type Outcome<T> = std::result::Result<T, Fault>;

// === impl Fault ===

impl Fault {
    /// Whether the database was closed under a reader, to be opened anew by the writer: worth another try.
    pub(super) fn is_closed(&self) -> bool {
        matches!(self, Self::Storage(StorageError::DatabaseClosed | StorageError::PreviousIo))
    }

    /// In the store's words; `what` names the file.
    pub(super) fn tell(self, what: &str) -> Error {
        let damaged = |detail: String| Error::Damaged { what: what.to_owned(), detail };
        match self {
            Self::Told(error) => error,
            Self::Row(detail) => damaged(detail.to_owned()),
            Self::Table(detail) | Self::Storage(StorageError::Corrupted(detail)) => damaged(detail),
            Self::Storage(StorageError::Io(error)) if no_room(&error) => {
                Error::Full { detail: format!("{what}: {error}") }
            }
            Self::Storage(StorageError::ValueTooLarge(bytes)) => Error::TooLarge { bytes, limit: crate::MAX_REQUEST },
            Self::Storage(error) => Error::Unavailable { detail: format!("{what}: {error}") },
        }
    }
}

/// Disk, quota or file size limit.
pub(super) fn no_room(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded | FileTooLarge)
}

impl From<StorageError> for Fault {
    fn from(error: StorageError) -> Self {
        Self::Storage(error)
    }
}

impl From<TableError> for Fault {
    fn from(error: TableError) -> Self {
        match error {
            TableError::Storage(error) => Self::Storage(error),
            other => Self::Table(other.to_string()),
        }
    }
}

impl From<TransactionError> for Fault {
    fn from(error: TransactionError) -> Self {
        match error {
            TransactionError::Storage(error) => Self::Storage(error),
            other => Self::Table(other.to_string()),
        }
    }
}

impl From<CommitError> for Fault {
    fn from(error: CommitError) -> Self {
        match error {
            CommitError::Storage(error) => Self::Storage(error),
            other => Self::Table(other.to_string()),
        }
    }
}

impl From<BadRow> for Fault {
    fn from(row: BadRow) -> Self {
        Self::Row(row.0)
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Told(error)
    }
}
