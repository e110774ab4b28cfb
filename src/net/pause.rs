//! The infra container's image, built in memory from the embedded program: pods start without a registry.

use serde_json::json;
use sha2::{Digest, Sha256};

/// The static program, as `build.rs` compiled it for this architecture.
pub const PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/pause"));

/// Where the program is in the image.
pub const PATH: &str = "/pause";

/// The image's reference, `windlass.dev/pause:<hash of the program>`: another program is another image.
pub fn image_name() -> String {
    format!("windlass.dev/pause:{}", &digest(PROGRAM)[..12])
}

/// The architecture by the OCI's name.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn digest(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    Sha256::digest(bytes).iter().fold(String::with_capacity(64), |mut s, b| {
        let _ = write!(s, "{b:02x}");
        s
    })
}

/// The image as `docker load` reads it. The same program gives the same bytes.
pub fn image_tar() -> Vec<u8> {
    let layer = tar(&[("pause", 0o755, PROGRAM)]);
    let layer_digest = digest(&layer);
    let config = json!({
        "architecture": architecture(),
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {
            "Entrypoint": [PATH],
            "User": "65535:65535",
            "StopSignal": "SIGTERM",
            "WorkingDir": "/",
            "Labels": {"windlass.dev/pause": "true"},
        },
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{layer_digest}")]},
        "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "windlass"}],
    })
    .to_string();
    let config_name = format!("{}.json", digest(config.as_bytes()));
    let layer_name = format!("{layer_digest}.tar");
    let manifest = json!([{"Config": config_name, "RepoTags": [image_name()], "Layers": [layer_name]}]).to_string();
    tar(&[(&config_name, 0o644, config.as_bytes()), (&layer_name, 0o644, &layer), ("manifest.json", 0o644, manifest.as_bytes())])
}

/// A ustar archive of regular files, all by root at the epoch. Names are shorter than a header's 100 bytes.
fn tar(files: &[(&str, u32, &[u8])]) -> Vec<u8> {
    const BLOCK: usize = 512;
    let mut archive = Vec::new();
    for (name, mode, content) in files {
        let mut header = [0u8; BLOCK];
        let mut put = |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
        put(0, name);
        put(100, &format!("{mode:07o}"));
        put(108, "0000000");
        put(116, "0000000");
        put(124, &format!("{:011o}", content.len()));
        put(136, "00000000000");
        put(148, "        ");
        put(156, "0");
        put(257, "ustar\u{0}00");
        let sum: u32 = header.iter().map(|b| u32::from(*b)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\u{0} ").as_bytes());
        archive.extend_from_slice(&header);
        archive.extend_from_slice(content);
        archive.resize(archive.len().next_multiple_of(BLOCK), 0);
    }
    archive.resize(archive.len() + 2 * BLOCK, 0);
    archive
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    #[test]
    fn the_program_is_small_and_static() {
        assert!(PROGRAM.starts_with(b"\x7fELF"));
        assert!(PROGRAM.len() < 20 * 1024, "{} bytes", PROGRAM.len());
        assert_eq!(image_tar(), image_tar());
    }

    #[test]
    fn the_program_ends_by_itself_on_sigterm() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pause");
        std::fs::write(&path, PROGRAM).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        for signal in [nix::sys::signal::SIGTERM, nix::sys::signal::SIGINT] {
            let mut child = Command::new(&path).spawn().unwrap();
            // It sleeps once it waits for signals, and not before.
            let status = format!("/proc/{}/status", child.id());
            let waits = |text: &str| text.lines().any(|l| l.starts_with("State:") && l.contains("(sleeping)"));
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
            while !waits(&std::fs::read_to_string(&status).unwrap()) {
                assert!(std::time::Instant::now() < deadline, "the program does not wait for signals");
                std::thread::yield_now();
            }
            let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).unwrap());
            nix::sys::signal::kill(pid, signal).unwrap();
            let ended = child.wait().unwrap();
            assert_eq!((ended.code(), ended.signal()), (Some(0), None), "{signal}");
        }
    }

    #[test]
    fn tar_reads_what_we_write() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image.tar");
        std::fs::write(&path, image_tar()).unwrap();
        let listed = Command::new("tar").arg("-tf").arg(&path).output().unwrap();
        assert!(listed.status.success());
        let names = String::from_utf8(listed.stdout).unwrap();
        assert!(names.lines().any(|l| l == "manifest.json"), "{names}");
        assert_eq!(names.lines().count(), 3);
    }
}
