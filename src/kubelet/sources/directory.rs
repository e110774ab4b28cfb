//! Static pods from the files of a directory, read again whenever inotify says that something changed.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{complete, parse};
use crate::manager::Input;

pub const SOURCE: &str = "file";
/// inotify can lose events, and the directory may not be there yet: it is looked at this often in any case.
const RESYNC: Duration = Duration::from_secs(20);
/// Editors write a file in several steps.
const SETTLE: Duration = Duration::from_millis(50);
const MAX_FILE: u64 = 10 << 20;

/// The pods of all manifests in `dir`. A file that cannot be read is left out, with a warning: the others run.
pub fn read(dir: &Path, node: &str) -> Vec<Pod> {
    let mut paths: Vec<PathBuf> = if dir.is_file() {
        vec![dir.to_owned()]
    } else {
        fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).filter(|p| p.is_file()).collect()
    };
    // Hidden files are editors' work.
    paths.retain(|p| p.file_name().is_some_and(|n| !n.to_string_lossy().starts_with('.')));
    paths.sort();
    let mut pods = Vec::new();
    for path in paths {
        let small = fs::metadata(&path).is_ok_and(|m| m.len() <= MAX_FILE);
        let text = if small { fs::read_to_string(&path).map_err(|e| e.to_string()) } else { Err(format!("larger than {MAX_FILE} bytes")) };
        match text.and_then(|t| parse(&t)) {
            Ok(found) => pods.extend(found.into_iter().map(|p| complete(p, SOURCE, &path.display().to_string(), node))),
            Err(error) => tracing::warn!(path = %path.display(), error, "not a manifest of static pods"),
        }
    }
    pods
}

/// Tells of changes in a directory. A thread waits for them; it ends when this is dropped.
struct Watch {
    changes: mpsc::Receiver<()>,
    _stop: std::io::PipeWriter,
}

impl Watch {
    fn new(dir: &Path) -> std::io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        let flags = AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_MOVE | AddWatchFlags::IN_DELETE | AddWatchFlags::IN_CREATE | AddWatchFlags::IN_DELETE_SELF;
        inotify.add_watch(dir, flags)?;
        let (stopped, stop) = std::io::pipe()?;
        let (sender, changes) = mpsc::channel(1);
        std::thread::Builder::new().name("manifests".into()).spawn(move || {
            loop {
                let mut fds = [PollFd::new(inotify.as_fd(), PollFlags::POLLIN), PollFd::new(stopped.as_fd(), PollFlags::POLLIN)];
                match poll(&mut fds, PollTimeout::NONE) {
                    Ok(_) | Err(Errno::EINTR) => {}
                    Err(_) => return,
                }
                if fds[1].revents().is_some_and(|r| !r.is_empty()) {
                    return;
                }
                // What happened does not matter: the directory is read as a whole. A full channel has told already.
                if inotify.read_events().is_ok() {
                    let _ = sender.try_send(());
                }
            }
        })?;
        Ok(Self { changes, _stop: stop })
    }
}

/// Follows the directory until shutdown.
pub async fn run(dir: PathBuf, node: String, inbox: mpsc::Sender<Input>, shutdown: CancellationToken) {
    let mut last: Option<Vec<String>> = None;
    let mut watch = None;
    loop {
        if watch.is_none() {
            watch = match Watch::new(&dir) {
                Ok(watch) => Some(watch),
                Err(error) => {
                    if last.is_none() {
                        tracing::warn!(path = %dir.display(), %error, "cannot watch the manifest directory; it is looked at every {} s", RESYNC.as_secs());
                    }
                    None
                }
            };
        }
        let pods = read(&dir, &node);
        let uids: Vec<String> = pods.iter().filter_map(|p| p.metadata.uid.clone()).collect();
        if last.as_ref() != Some(&uids) {
            last = Some(uids);
            if inbox.send(Input::Static { source: SOURCE, pods }).await.is_err() {
                return;
            }
        }
        let changed = async {
            match &mut watch {
                Some(watch) => {
                    if watch.changes.recv().await.is_none() {
                        std::future::pending::<()>().await;
                    }
                    tokio::time::sleep(SETTLE).await;
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = changed => {}
            () = tokio::time::sleep(RESYNC) => {
                // The directory may have been replaced by another.
                watch = None;
            }
            () = shutdown.cancelled() => return,
        }
    }
}
