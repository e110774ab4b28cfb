//! Writes a set of files so that a reader sees the old set or the new one, never a mixture.
//!
//! As upstream: the files live in a fresh directory `..<time>`, the link `..data` is swapped to it in one rename, and
//! what users see are links through `..data`.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};

const DATA: &str = "..data";
const DATA_NEW: &str = "..data_tmp";

/// A file to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    pub data: Vec<u8>,
    /// Permission bits.
    pub mode: u32,
    /// Owner, where it is not the kubelet's.
    pub owner: Option<u32>,
}

pub type Payload = BTreeMap<String, File>;

/// Whether `path` may name a file below a volume: relative, without `..`, not hidden by our own names.
pub fn valid_path(path: &str) -> bool {
    !path.is_empty()
        && path.len() <= 4096
        && Path::new(path).components().all(|c| matches!(c, Component::Normal(_)))
        && !path.split('/').any(|part| part == "..")
        && !path.starts_with("..")
}

/// Makes `dir` hold exactly `payload`. Returns whether anything changed.
///
/// # Errors
/// An invalid path in the payload, or what the file system says.
pub fn write(dir: &Path, payload: &Payload, prepare: impl Fn(&Path) -> io::Result<()>) -> io::Result<bool> {
    if let Some(bad) = payload.keys().find(|p| !valid_path(p)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("invalid path in volume: {bad:?}")));
    }
    fs::create_dir_all(dir)?;
    let data = dir.join(DATA);
    let current = fs::read_link(&data).ok().map(|name| dir.join(name));
    if let Some(current) = &current
        && same(current, payload)
        && links_present(dir, payload)
    {
        return Ok(false);
    }
    let fresh = fresh_dir(dir)?;
    for (path, file) in payload {
        write_file(&fresh, path, file)?;
    }
    prepare(&fresh)?;
    let name = fresh.file_name().map(PathBuf::from).unwrap_or_default();
    let swap = dir.join(DATA_NEW);
    let _ = fs::remove_file(&swap);
    symlink(&name, &swap)?;
    fs::rename(&swap, &data)?;
    link_visible(dir, payload)?;
    unlink_gone(dir, payload)?;
    if let Some(old) = current.filter(|old| *old != fresh) {
        fs::remove_dir_all(old)?;
    }
    Ok(true)
}

fn fresh_dir(dir: &Path) -> io::Result<PathBuf> {
    let now = jiff::Timestamp::now().as_nanosecond();
    for attempt in 0..100 {
        let path = dir.join(format!("..{}", now + attempt));
        match fs::create_dir(&path) {
            Ok(()) => {
                fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
                return Ok(path);
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e),
        }
    }
    Err(io::Error::new(io::ErrorKind::AlreadyExists, "no free name for the volume's data directory"))
}

fn write_file(root: &Path, path: &str, file: &File) -> io::Result<()> {
    let target = root.join(path);
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent)?;
    }
    let mut handle = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&target)?;
    handle.write_all(&file.data)?;
    if let Some(uid) = file.owner {
        std::os::unix::fs::chown(&target, Some(uid), None)?;
    }
    // After the write, since the umask does not apply to chmod.
    handle.set_permissions(fs::Permissions::from_mode(file.mode & 0o7777))
}

fn same(current: &Path, payload: &Payload) -> bool {
    let mut found = 0;
    let mut pending = vec![current.to_owned()];
    while let Some(dir) = pending.pop() {
        let Ok(entries) = fs::read_dir(&dir) else { return false };
        for entry in entries.flatten() {
            let path = entry.path();
            if path.is_dir() {
                pending.push(path);
                continue;
            }
            let relative = path.strip_prefix(current).map(|p| p.to_string_lossy().into_owned()).unwrap_or_default();
            let Some(file) = payload.get(&relative) else { return false };
            if fs::read(&path).map_or(true, |data| data != file.data) {
                return false;
            }
            found += 1;
        }
    }
    found == payload.len()
}

fn tops(payload: &Payload) -> impl Iterator<Item = &str> {
    payload.keys().filter_map(|p| p.split('/').next())
}

fn links_present(dir: &Path, payload: &Payload) -> bool {
    tops(payload).all(|top| fs::symlink_metadata(dir.join(top)).is_ok())
}

fn link_visible(dir: &Path, payload: &Payload) -> io::Result<()> {
    for top in tops(payload) {
        let link = dir.join(top);
        if fs::symlink_metadata(&link).is_err() {
            symlink(Path::new(DATA).join(top), &link)?;
        }
    }
    Ok(())
}

fn unlink_gone(dir: &Path, payload: &Payload) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("..") || tops(payload).any(|top| top == name) {
            continue;
        }
        let points_into_data = fs::read_link(entry.path()).is_ok_and(|to| to.starts_with(DATA));
        if points_into_data {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payload(files: &[(&str, &str)]) -> Payload {
        files.iter().map(|(path, data)| ((*path).to_owned(), File { data: data.as_bytes().to_vec(), mode: 0o640, owner: None })).collect()
    }

    /// What a container sees: `path=content`, sorted.
    fn seen(dir: &Path) -> Vec<String> {
        fn walk(root: &Path, dir: &Path, out: &mut Vec<String>) {
            for entry in fs::read_dir(dir).expect("read").flatten() {
                let path = entry.path();
                if entry.file_name().to_string_lossy().starts_with("..") {
                    continue;
                }
                if path.is_dir() {
                    walk(root, &path, out);
                } else {
                    let name = path.strip_prefix(root).expect("below").display().to_string();
                    out.push(format!("{name}={}", fs::read_to_string(&path).expect("text")));
                }
            }
        }
        let mut out = Vec::new();
        walk(dir, dir, &mut out);
        out.sort();
        out
    }

    #[test]
    fn updates_swap_the_whole_set() {
        let temp = tempfile::tempdir().expect("temp");
        let dir = temp.path();
        let put = |files: &[(&str, &str)]| write(dir, &payload(files), |_| Ok(())).expect("write");
        assert!(put(&[("a", "1"), ("sub/b", "2")]));
        assert_eq!(seen(dir), ["a=1", "sub/b=2"]);
        let first = fs::read_link(dir.join(DATA)).expect("link");
        assert!(!put(&[("a", "1"), ("sub/b", "2")]), "unchanged");
        assert_eq!(fs::read_link(dir.join(DATA)).expect("link"), first);
        assert!(put(&[("a", "9"), ("c", "3")]));
        assert_eq!(seen(dir), ["a=9", "c=3"]);
        assert!(!dir.join(&first).exists(), "the old set is removed");
        assert_eq!(fs::metadata(dir.join("a")).expect("file").permissions().mode() & 0o777, 0o640);
        assert!(put(&[]));
        assert!(seen(dir).is_empty());
    }

    #[test]
    fn bad_paths_are_refused() {
        for (path, good) in [("a", true), ("a/b", true), ("..", false), ("a/../b", false), ("/a", false), ("", false), ("..a", false), ("a/..b", true)] {
            assert_eq!(valid_path(path), good, "{path}");
        }
        let temp = tempfile::tempdir().expect("temp");
        assert!(write(temp.path(), &payload(&[("../x", "1")]), |_| Ok(())).is_err());
    }
}
