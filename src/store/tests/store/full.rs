//! A full disk: writes are refused as such, reads and watches go on, and with room writes go on, without a restart.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use windlass_store::{Embedded, EmbeddedConfig, Error, Expect, Op, Store};

use crate::suite::{self, committed, next, prefix, put, write};

/// A small disk of its own, gone when dropped.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// `None` where mounting is not allowed.
    fn new(size: &str) -> Option<Self> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let options = format!("size={size}");
        match mount(Some("tmpfs"), folder.path(), Some("tmpfs"), MsFlags::empty(), Some(options.as_str())) {
            Ok(()) => Some(Self(folder)),
            Err(nix::Error::EPERM | nix::Error::EACCES) => None,
            Err(error) => panic!("mount: {error}"),
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        if let Err(error) = umount2(self.0.path(), MntFlags::MNT_DETACH) {
            eprintln!("{}: {error}", self.0.path().display());
        }
    }
}

fn large() -> Op {
    Op::Put { value: Bytes::from(vec![b'v'; 100_000]), ttl: None }
}

/// Writes until the store is full; gives the revisions of what was acknowledged.
async fn fill(store: &dyn Store) -> Vec<u64> {
    let mut acknowledged = Vec::new();
    for n in 0..2000 {
        match write(store, &format!("/fill/{n:04}"), Expect::Absent, large()).await {
            Err(error @ Error::Full { .. }) => {
                assert!(error.to_string().contains("until there is room"), "{error}");
                return acknowledged;
            }
            other => acknowledged.push(committed(other)),
        }
    }
    panic!("the disk did not get full");
}

/// Full, reading, freed by `free`, writing again.
async fn check(path: &Path, reserve: u64, free: impl FnOnce()) {
    let config = EmbeddedConfig { reserve, ..EmbeddedConfig::new(path) };
    let store: Arc<dyn Store> = Arc::new(Embedded::open(config.clone()).await.expect("open"));
    let start = put(&*store, "/small", "1").await;
    let mut watch = store.watch("/fill/", start).await.expect("watch");
    let acknowledged = fill(&*store).await;
    assert!(acknowledged.len() > 10, "{}", acknowledged.len());
    for round in 0..20 {
        match write(&*store, &format!("/more/{round}"), Expect::Any, large()).await {
            Err(Error::Full { .. }) => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(&store.get("/small").await.expect("get").expect("there").value[..], b"1");
    }
    let check_all = async |store: &dyn Store| {
        let all = store.range(prefix("/fill/")).await.expect("range");
        assert_eq!(all.entries.iter().map(|e| e.mod_revision).collect::<Vec<_>>(), acknowledged);
        assert!(all.entries.iter().all(|e| e.value.len() == 100_000));
    };
    check_all(&*store).await;
    for revision in &acknowledged {
        assert_eq!(next(&mut watch).await.revision, *revision);
    }
    free();
    // A limit that is lifted is noticed at the next try, which comes after half a second; free space at once.
    let after = tokio::time::timeout(Duration::from_secs(10), async {
        loop {
            match write(&*store, "/after", Expect::Any, suite::put_op("1")).await {
                Err(Error::Full { .. }) => tokio::time::sleep(Duration::from_millis(50)).await,
                other => break committed(other),
            }
        }
    });
    let after = after.await.expect("writes go on");
    assert!(after > *acknowledged.last().expect("some"));
    let again = committed(write(&*store, "/fill/zzzz", Expect::Absent, large()).await);
    assert_eq!(next(&mut watch).await.revision, again, "the watch was never interrupted");
    committed(write(&*store, "/fill/zzzz", Expect::Any, Op::Delete).await);
    check_all(&*store).await;
    drop((store, watch));
    let store = Embedded::open(config).await.expect("open");
    check_all(&store).await;
    assert!(store.get("/after").await.expect("get").is_some());
}

async fn on_small_disk(reserve: u64) {
    match SmallDisk::new("40m") {
        Some(disk) => {
            let ballast = disk.0.path().join("ballast");
            fs::write(&ballast, vec![1; 20 << 20]).expect("ballast");
            check(&disk.0.path().join("store.redb"), reserve, || fs::remove_file(&ballast).expect("free")).await;
        }
        None => limited_child(reserve),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_before_the_disk_is_full() {
    on_small_disk(4 << 20).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_of_the_disk_itself_are_survived() {
    on_small_disk(0).await;
}

#[test]
fn a_file_size_limit_is_survived() {
    limited_child(0);
}

const CHILD: &str = "WINDLASS_STORE_LIMITED";

/// Runs [`limited`] in a process of its own whose files may not grow beyond 12 MiB; writing more is an error, not the end.
fn limited_child(reserve: u64) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let this = std::env::current_exe().expect("own path");
    let done = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -S -f 24576; exec \"$0\" --exact full::limited --nocapture"])
        .arg(this)
        .env(CHILD, folder.path())
        .env("WINDLASS_STORE_RESERVE", reserve.to_string())
        .output()
        .expect("start the child");
    let output = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{}\n{output}", String::from_utf8_lossy(&done.stdout));
}

/// Does nothing unless started by [`limited_child`].
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limited() {
    let Some(folder) = std::env::var_os(CHILD) else { return };
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    check(&Path::new(&folder).join("store.redb"), 0, || {
        let (_, hard) = getrlimit(Resource::RLIMIT_FSIZE).expect("limit");
        setrlimit(Resource::RLIMIT_FSIZE, hard, hard).expect("lift the limit");
    })
    .await;
}
