//! Network namespaces: run code in one, dial from one, make an anonymous one.
//!
//! `setns` changes one thread. Every entry therefore happens on a thread made for it, which ends afterwards;
//! no thread of a runtime ever changes its namespace. A socket stays in the namespace where it was made, so
//! what comes back from such a thread (a netlink handle, a TCP stream) can be used anywhere.

use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;

use nix::sched::{CloneFlags, setns, unshare};
use tokio::net::{TcpSocket, TcpStream};

use crate::error::{Error, Result};

/// The namespace of the calling thread.
pub const CURRENT: &str = "/proc/thread-self/ns/net";

/// The path by which a process' network namespace is entered.
pub fn of_pid(pid: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/ns/net"))
}

/// Opens a namespace: an open file keeps it alive.
pub fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|source| Error::Namespace { path: path.to_owned(), action: "open", source })
}

/// Runs `f` on a thread of its own inside the namespace at `path` and waits for it. Blocks the caller: in async
/// code use [`call`].
///
/// A Tokio runtime that the caller is in stays entered, so `f` may create Tokio sockets.
///
/// # Errors
/// When the namespace cannot be opened or entered. A panic of `f` goes on in the caller.
pub fn run<T: Send>(path: &Path, f: impl FnOnce() -> T + Send) -> Result<T> {
    let file = open(path)?;
    let runtime = tokio::runtime::Handle::try_current().ok();
    thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let _entered = runtime.as_ref().map(|r| r.enter());
            enter(path, &file)?;
            Ok(f())
        });
        worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// As [`run`], without blocking the caller's runtime.
pub async fn call<T: Send + 'static>(path: &Path, f: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let file = open(path)?;
    let owned = path.to_owned();
    let runtime = tokio::runtime::Handle::current();
    let (send, receive) = tokio::sync::oneshot::channel();
    thread::Builder::new()
        .name("netns".into())
        .spawn(move || {
            let _entered = runtime.enter();
            let outcome = enter(&owned, &file).map(|()| f());
            // The receiver is gone when the caller's future was dropped: nobody wants the outcome.
            let _ = send.send(outcome);
        })
        .map_err(|source| Error::Namespace { path: path.to_owned(), action: "start a thread for", source })?;
    receive.await.unwrap_or_else(|_| {
        let source = std::io::Error::other("the thread in the namespace panicked");
        Err(Error::Namespace { path: path.to_owned(), action: "run in", source })
    })
}

/// Runs a future to its end on a thread of its own inside the namespace, on a current-thread runtime: all that it
/// opens, spawns and writes below `/proc/sys/net` belongs to that namespace.
pub fn block_on<F: Future>(path: &Path, make: impl FnOnce() -> F + Send) -> Result<F::Output>
where
    F::Output: Send,
{
    let file = open(path)?;
    thread::scope(|scope| {
        let worker = scope.spawn(|| {
            enter(path, &file)?;
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(|source| Error::Namespace { path: path.to_owned(), action: "start a runtime for", source })?;
            Ok(runtime.block_on(make()))
        });
        worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn enter(path: &Path, file: &File) -> Result<()> {
    setns(file, CloneFlags::CLONE_NEWNET)
        .map_err(|e| Error::Namespace { path: path.to_owned(), action: "enter", source: e.into() })
}

/// Connects to `address` from inside the namespace at `path` (port-forward, probes of the pod's loopback).
pub async fn dial(path: &Path, address: SocketAddr) -> Result<TcpStream> {
    let fail = |action| {
        let path = path.to_owned();
        move |source| Error::Namespace { path, action, source }
    };
    let socket = call(path, move || if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() })
        .await?
        .map_err(fail("create a socket in"))?;
    socket.connect(address).await.map_err(fail("connect from"))
}

/// A network namespace without a name, alive as long as this value: when the process ends, however it ends, the
/// kernel removes the namespace and all links in it.
#[derive(Debug)]
pub struct Namespace {
    file: OwnedFd,
}

impl Namespace {
    /// Makes an empty namespace (loopback down).
    pub fn new() -> Result<Namespace> {
        let path = PathBuf::from(CURRENT);
        let fail = |action| {
            let path = path.clone();
            move |source: std::io::Error| Error::Namespace { path, action, source }
        };
        let file = thread::scope(|scope| {
            scope
                .spawn(|| -> std::io::Result<File> {
                    unshare(CloneFlags::CLONE_NEWNET)?;
                    File::open(CURRENT)
                })
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
        .map_err(fail("create"))?;
        Ok(Namespace { file: file.into() })
    }

    /// A path that enters this namespace, for as long as this value lives.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> PathBuf {
        std::fs::read_link(CURRENT).expect("procfs")
    }

    #[test]
    fn a_closure_runs_inside_and_the_caller_stays_outside() {
        let outside = identity();
        let ns = Namespace::new().expect("root");
        let inside = run(&ns.path(), identity).expect("enter");
        assert_ne!(inside, outside);
        assert_eq!(identity(), outside);
        assert_eq!(block_on(&ns.path(), || async { identity() }).expect("enter"), inside);
    }

    #[test]
    fn a_missing_namespace_is_named() {
        let error = run(Path::new("/nonexistent/ns"), || ()).expect_err("missing").to_string();
        assert!(error.contains("/nonexistent/ns"), "{error}");
    }

    #[tokio::test]
    async fn dials_the_loopback_of_a_namespace() {
        let ns = Namespace::new().expect("root");
        let listener = call(&ns.path(), || {
            // `ip link set lo up` by the crate's own means is tested in `link`; here a bare socket option is enough.
            std::net::TcpListener::bind("127.0.0.1:0")
        })
        .await
        .expect("enter");
        // Without `lo` up the address 127.0.0.1 does not exist there: the error says from where it was dialled.
        match listener {
            Ok(l) => {
                let error = dial(&ns.path(), l.local_addr().expect("bound")).await.expect_err("loopback is down");
                assert!(error.to_string().contains("connect from"), "{error}");
            }
            Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::AddrNotAvailable),
        }
    }
}
