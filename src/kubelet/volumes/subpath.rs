//! Opens a path inside a volume so that no symlink leads out of it, and pins it by a bind mount.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, mkdirat};

/// Opens `sub` below `root`, making missing directories with the root's permissions. `..` and symlinks out of `root`
/// are refused by the kernel.
///
/// # Errors
/// `InvalidInput` when the path would leave the volume; else what the file system says.
pub fn open(root: &Path, sub: &str) -> io::Result<OwnedFd> {
    let path = Path::new(sub);
    if path.is_absolute() || path.components().any(|c| !matches!(c, Component::Normal(_) | Component::CurDir)) {
        return Err(escape(sub));
    }
    let mode = fs::metadata(root)?.mode() & 0o7777;
    let base: OwnedFd = fs::File::open(root)?.into();
    let mut done = PathBuf::from(".");
    for component in path.components().filter(|c| matches!(c, Component::Normal(_))) {
        let parent = beneath(&base, &done, sub)?;
        done.push(component);
        match beneath(&base, &done, sub) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let name: &Path = component.as_ref();
                match mkdirat(parent.as_fd(), name, Mode::from_bits_truncate(mode)) {
                    Ok(()) | Err(Errno::EEXIST) => {}
                    Err(e) => return Err(e.into()),
                }
                let made = beneath(&base, &done, sub)?;
                // mkdir obeys the umask.
                nix::sys::stat::fchmodat(nix::fcntl::AT_FDCWD, &proc_path(&made), Mode::from_bits_truncate(mode), nix::sys::stat::FchmodatFlags::FollowSymlink)?;
            }
            Err(e) => return Err(e),
            Ok(_) => {}
        }
    }
    beneath(&base, &done, sub)
}

/// Opens an existing path below `root` for reading.
pub fn open_existing(root: &Path, sub: &str) -> io::Result<OwnedFd> {
    let base: OwnedFd = fs::File::open(root)?.into();
    beneath(&base, Path::new(sub), sub)
}

/// Reads at most `limit` bytes of a regular file that was opened by [`open_existing`].
pub fn read(fd: &OwnedFd, limit: u64) -> io::Result<String> {
    let file = fs::File::open(proc_path(fd))?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let mut text = String::new();
    io::Read::read_to_string(&mut io::Read::take(file, limit), &mut text)?;
    Ok(text)
}

fn escape(sub: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("subpath \"{sub}\" is not within the volume"))
}

fn beneath(base: &OwnedFd, path: &Path, sub: &str) -> io::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    openat2(base.as_fd(), path, how).map_err(|e| match e {
        Errno::EXDEV | Errno::ELOOP => escape(sub),
        other => other.into(),
    })
}

fn proc_path(fd: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Pins `sub` of the volume at `root` to `target`: what is mounted there stays what it is, whatever the volume's
/// users do to its directories. A pin that is already there is replaced.
pub fn pin(root: &Path, sub: &str, target: &Path) -> io::Result<()> {
    let fd = open(root, sub)?;
    unpin(target)?;
    let source = proc_path(&fd);
    if fs::metadata(&source)?.is_dir() {
        fs::create_dir_all(target)?;
    } else {
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::File::create(target)?;
    }
    mount(Some(&source), target, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)?;
    Ok(())
}

/// Takes a pin away; not there is fine.
pub fn unpin(target: &Path) -> io::Result<()> {
    match umount2(target, MntFlags::MNT_DETACH) {
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
        Err(e) => return Err(e.into()),
    }
    match fs::symlink_metadata(target) {
        Ok(meta) if meta.is_dir() => fs::remove_dir(target),
        Ok(_) => fs::remove_file(target),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn nothing_leads_out_of_the_volume() {
        let temp = tempfile::tempdir().expect("temp");
        let root = temp.path().join("volume");
        fs::create_dir(&root).expect("root");
        fs::create_dir(root.join("dir")).expect("dir");
        symlink("dir", root.join("inside")).expect("link");
        symlink("/etc", root.join("absolute")).expect("link");
        symlink("../..", root.join("up")).expect("link");
        let check = |sub: &str, good: bool| assert_eq!(open(&root, sub).is_ok(), good, "{sub}");
        check("", true);
        check("dir", true);
        check("dir/new/deep", true);
        check("inside/x", true);
        check("absolute", false);
        check("absolute/passwd", false);
        check("up", false);
        check("up/etc", false);
        check("../x", false);
        check("/etc", false);
        assert!(root.join("dir/x").is_dir() && root.join("dir/new/deep").is_dir());
    }

    #[test]
    fn a_pin_survives_the_removal_of_its_name() {
        let temp = tempfile::tempdir().expect("temp");
        let root = temp.path().join("volume");
        fs::create_dir(&root).expect("root");
        fs::write(root.join("file"), "one").expect("write");
        let target = temp.path().join("pins/0");
        if pin(&root, "file", &target).is_err() {
            // Mounting needs root; the escape test above runs everywhere.
            return;
        }
        fs::remove_file(root.join("file")).expect("remove");
        assert_eq!(fs::read_to_string(&target).expect("pinned"), "one");
        fs::create_dir(root.join("file")).expect("dir");
        pin(&root, "file", &target).expect("pin again");
        assert!(target.is_dir());
        unpin(&target).expect("unpin");
        assert!(!target.exists());
    }
}
