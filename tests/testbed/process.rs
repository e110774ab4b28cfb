//! Processes of a test: their output in a file, their end with their owner.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Runs a command to its end and returns its standard output; fails with all that it said if it fails.
pub fn run(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {command:?}"))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!("{command:?}: {}\n{stdout}{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(stdout)
}

/// A process that runs beside the test, and ends with this value.
pub struct Process {
    child: Child,
    log: PathBuf,
    what: String,
}

impl Process {
    /// Starts the command with its output appended to `log`.
    pub fn start(mut command: Command, log: &Path) -> Result<Self> {
        let out = File::options().create(true).append(true).open(log)?;
        let what = format!("{command:?}");
        // In a process group of its own, a Ctrl-C reaches the test first, which then ends its processes in order.
        let child = command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out).process_group(0).spawn();
        Ok(Self { child: child.with_context(|| format!("cannot start {what}"))?, log: log.to_owned(), what })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Fails, with the end of its log, if the process has ended.
    pub fn check(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("{} ended: {status}\n{}", self.what, self.tail());
        }
        Ok(())
    }

    /// The last lines that it wrote.
    pub fn tail(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }

    /// SIGKILL, as a crash or a power cut would.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// SIGTERM, and SIGKILL if it has not ended within `limit`; returns whether it ended by itself.
    pub fn stop(&mut self, limit: Duration) -> bool {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return true;
        }
        let _ = kill(pid(self.child.id()), Signal::SIGTERM);
        let end = Instant::now() + limit;
        while Instant::now() < end {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        false
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop(Duration::from_secs(15));
        if std::thread::panicking() {
            eprintln!("--- {} ---\n{}", self.log.display(), self.tail());
        }
    }
}

fn pid(id: u32) -> Pid {
    Pid::from_raw(id.cast_signed())
}

/// A short-lived child that is killed when dropped.
pub(crate) struct Reaped(pub Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Ends what is left of a node: processes whose command line names its folder, such as the shims of a killed `dockerd`.
pub(crate) fn end_all_under(dir: &Path) {
    let needle = dir.display().to_string();
    for _ in 0..20 {
        let mut left = false;
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Some(id) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
            let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            if id != std::process::id() && String::from_utf8_lossy(&command).contains(&needle) {
                left = true;
                let _ = kill(pid(id), Signal::SIGKILL);
            }
        }
        if !left {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Takes away the mounts under a folder, the innermost first.
pub(crate) fn unmount_under(dir: &Path) {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let targets = mounts.lines().filter_map(|line| line.split(' ').nth(1)).map(Path::new);
    let mut targets: Vec<&Path> = targets.filter(|target| target.starts_with(dir)).collect();
    targets.sort();
    for target in targets.iter().rev() {
        let _ = nix::mount::umount2(*target, nix::mount::MntFlags::MNT_DETACH);
    }
}
