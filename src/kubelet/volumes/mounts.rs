//! Mounts below a pod's directory: tmpfs for memory volumes, and taking everything away again.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// The mount points below `root` (itself included), deepest first.
pub fn below(root: &Path) -> io::Result<Vec<PathBuf>> {
    Ok(parse(&fs::read_to_string("/proc/self/mountinfo")?, root))
}

fn parse(mountinfo: &str, root: &Path) -> Vec<PathBuf> {
    let mut points: Vec<PathBuf> = mountinfo
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(|point| PathBuf::from(unescape(point)))
        .filter(|point| point.starts_with(root))
        .collect();
    points.sort_by_key(|p| std::cmp::Reverse(p.components().count()));
    points
}

/// The kernel writes blanks and backslashes in octal.
fn unescape(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len());
    let bytes = text.as_bytes();
    let mut i = 0;
    while i < bytes.len() {
        let octal = bytes.get(i + 1..i + 4).filter(|d| bytes[i] == b'\\' && d.iter().all(|c| (b'0'..=b'7').contains(c)));
        match octal {
            Some(d) => {
                out.push(((d[0] - b'0') << 6) | ((d[1] - b'0') << 3) | (d[2] - b'0'));
                i += 4;
            }
            None => {
                out.push(bytes[i]);
                i += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Makes `path` a tmpfs of at most `size` bytes (0: half of memory, the kernel's choice), if it is not a mount yet.
pub fn tmpfs(path: &Path, size: i64, mode: u32) -> io::Result<()> {
    fs::create_dir_all(path)?;
    if below(path)?.iter().any(|p| p == path) {
        return Ok(());
    }
    let options = if size > 0 { format!("size={size},mode={mode:o}") } else { format!("mode={mode:o}") };
    mount(Some("tmpfs"), path, Some("tmpfs"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some(options.as_str()))?;
    Ok(())
}

/// Makes a directory with exactly these permission bits.
pub fn dir(path: &Path, mode: u32) -> io::Result<()> {
    fs::create_dir_all(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

/// Unmounts everything below `root`, then removes it. Never reaches through a mount: if one stays, nothing is removed.
pub fn remove(root: &Path) -> io::Result<()> {
    if !root.exists() {
        return Ok(());
    }
    for point in below(root)? {
        match umount2(&point, MntFlags::MNT_DETACH) {
            Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
            Err(e) => return Err(io::Error::new(io::Error::from(e).kind(), format!("cannot unmount {}: {e}", point.display()))),
        }
    }
    if let Some(left) = below(root)?.first() {
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, format!("{} is still mounted", left.display())));
    }
    match fs::remove_dir_all(root) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo() {
        let text = "1 2 0:1 / / rw - ext4 /dev/vda rw\n3 1 0:2 / /var/pods/a rw - tmpfs tmpfs rw\n4 3 0:3 / /var/pods/a/x\\040y rw - tmpfs tmpfs rw\n5 1 0:4 / /var/podsb rw - tmpfs tmpfs rw\n";
        let points = parse(text, Path::new("/var/pods"));
        assert_eq!(points, [PathBuf::from("/var/pods/a/x y"), PathBuf::from("/var/pods/a")]);
    }

    #[test]
    fn a_tmpfs_comes_and_goes() {
        let temp = tempfile::tempdir().expect("temp");
        let root = temp.path().join("pod");
        let volume = root.join("v");
        if tmpfs(&volume, 1 << 20, 0o777).is_err() {
            return; // needs root
        }
        tmpfs(&volume, 1 << 20, 0o777).expect("again is fine");
        fs::write(volume.join("f"), "x").expect("write");
        remove(&root).expect("remove");
        assert!(!root.exists() && below(&root).expect("mounts").is_empty());
    }
}
