//! Kernel settings of the calling thread's network namespace.

use std::path::PathBuf;

use crate::error::{Error, Result};

fn path(name: &str) -> PathBuf {
    // `net/ipv4/conf/<link>/...`: a link's name may hold dots, so names are given with slashes.
    PathBuf::from("/proc/sys").join(name)
}

/// The setting's value; `None` when this kernel does not have it.
pub fn get(name: &str) -> Option<String> {
    std::fs::read_to_string(path(name)).ok().map(|v| v.trim().to_owned())
}

/// Sets `name` (with slashes: `net/ipv4/ip_forward`), if it has another value.
pub fn set(name: &str, value: &str) -> Result<()> {
    if get(name).as_deref() == Some(value) {
        return Ok(());
    }
    std::fs::write(path(name), value).map_err(|source| Error::Sysctl { name: name.to_owned(), value: value.to_owned(), source })
}
