//! What is special about the embedded back end.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use windlass_store::{Embedded, EmbeddedConfig, Error, Expect, Op, Range, Store};

use crate::suite::{self, committed, next, prefix, put, put_op, write};

async fn open(path: &Path) -> Embedded {
    Embedded::at(path).await.expect("open")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn suite_on_embedded() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    suite::run(async |number| {
        let store: Arc<dyn Store> = Arc::new(open(&folder.path().join(format!("{number}.redb"))).await);
        store
    })
    .await;
}

#[tokio::test]
async fn what_is_written_outlives_the_process() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("deep/er/store.redb");
    let store = open(&path).await;
    let start = put(&store, "/a", "1").await;
    let last = put(&store, "/b", "1").await;
    store.compact(start).await.expect("compact");
    drop(store);
    let store = open(&path).await;
    let status = store.status().await.expect("status");
    assert_eq!((status.revision, status.compacted, status.backend), (last, start, "embedded"));
    assert!(status.bytes > 0);
    let mut watch = store.watch("/", start).await.expect("watch");
    assert_eq!(next(&mut watch).await.events[0].entry.key, "/b");
    assert_eq!(put(&store, "/c", "1").await, last + 1);
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(fs::metadata(&path).expect("metadata").permissions().mode() & 0o777, 0o600);
}

#[tokio::test]
async fn deadlines_outlive_the_process() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("store.redb");
    let store = open(&path).await;
    let op = |seconds| Op::Put { value: Bytes::new(), ttl: Some(Duration::from_secs(seconds)) };
    committed(write(&store, "/soon", Expect::Any, op(1)).await);
    let last = committed(write(&store, "/late", Expect::Any, op(1000)).await);
    drop(store);
    let store = open(&path).await;
    let mut watch = store.watch("/", last).await.expect("watch");
    assert_eq!(next(&mut watch).await.events[0].entry.key, "/soon");
    assert!(store.get("/soon").await.expect("get").is_none());
    assert!(store.get("/late").await.expect("get").is_some());
}

#[tokio::test]
async fn one_process_at_a_time() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("store.redb");
    let store = open(&path).await;
    put(&store, "/a", "1").await;
    match Embedded::at(&path).await.map(drop) {
        Err(error @ Error::Locked { .. }) => assert!(error.to_string().contains("stop it"), "{error}"),
        other => panic!("{other:?}"),
    }
    drop(store);
    assert!(open(&path).await.get("/a").await.expect("get").is_some());
}

/// What `spoil` makes of a store's file is refused as `want`, told with what to do, and left as it was.
async fn check_refused(name: &str, want: fn(&Error) -> bool, spoil: impl FnOnce(&mut Vec<u8>)) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("store.redb");
    let store = open(&path).await;
    for n in 0..200 {
        put(&store, &format!("/key/{n}"), &"x".repeat(500)).await;
    }
    drop(store);
    let mut bytes = fs::read(&path).expect("read");
    spoil(&mut bytes);
    fs::write(&path, &bytes).expect("write");
    let error = match Embedded::at(&path).await {
        Ok(_) => panic!("{name}: was opened"),
        Err(error) => error,
    };
    assert!(want(&error), "{name}: {error:?}");
    let message = error.to_string();
    assert!(message.contains("left as it is") || message.contains("left as it was"), "{name}: {message}");
    assert!(message.contains("move it away") && message.contains("store.redb"), "{name}: {message}");
    let after = fs::read(&path).expect("read");
    assert_eq!(after.len(), bytes.len(), "{name}: the file changed its size");
    // redb may note in its header (the first page) that it looked; the data are not touched.
    assert!(after[after.len().min(4096)..] == bytes[bytes.len().min(4096)..], "{name}: the data were changed");
}

fn damaged(error: &Error) -> bool {
    matches!(error, Error::Damaged { .. })
}

fn foreign(error: &Error) -> bool {
    matches!(error, Error::Foreign { .. })
}

#[tokio::test]
async fn damaged_and_foreign_files_are_refused() {
    check_refused("emptied", damaged, Vec::clear).await;
    check_refused("text", foreign, |b| *b = b"hello world\n".repeat(1000)).await;
    check_refused("short text", foreign, |b| *b = b"hi".to_vec()).await;
    check_refused("zeros", foreign, |b| b.fill(0)).await;
    check_refused("half", damaged, |b| b.truncate(b.len() / 2)).await;
    check_refused("one page", damaged, |b| b.truncate(4096)).await;
    check_refused("sqlite", foreign, |b| b[..16].copy_from_slice(b"SQLite format 3\0")).await;
    check_refused("data overwritten", damaged, |b| {
        // Everything behind the header: wherever the live pages are, they are hit.
        for byte in b.iter_mut().skip(8192).step_by(97) {
            *byte ^= 0x5a;
        }
    })
    .await;
}

#[tokio::test]
async fn another_programs_database_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("store.redb");
    let other = redb::Database::create(&path).expect("create");
    let txn = other.begin_write().expect("begin");
    let table: redb::TableDefinition<'_, &str, u64> = redb::TableDefinition::new("theirs");
    txn.open_table(table).expect("table").insert("k", 7).expect("insert");
    txn.commit().expect("commit");
    drop(other);
    match Embedded::at(&path).await {
        Err(error @ Error::Foreign { .. }) => assert!(error.to_string().contains("another program"), "{error}"),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("was opened"),
    }
    let other = redb::Database::open(&path).expect("theirs still opens");
    use redb::ReadableDatabase;
    let txn = other.begin_read().expect("begin");
    assert_eq!(txn.open_table(table).expect("table").get("k").expect("get").expect("there").value(), 7);
}

#[tokio::test]
async fn a_path_that_is_no_file() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    match Embedded::at(folder.path()).await.map(drop) {
        Err(Error::Foreign { .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_watcher_is_cut_off_and_others_go_on() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let store = open(&folder.path().join("store.redb")).await;
    let start = store.status().await.expect("status").revision;
    let mut slow = store.watch("/big/", start).await.expect("watch");
    let mut quick = store.watch("/big/", start).await.expect("watch");
    let value = Bytes::from(vec![7; 1 << 20]);
    // 64 MiB may wait; each event also holds the value before.
    let writes = 50;
    for _ in 0..writes {
        let op = Op::Put { value: value.clone(), ttl: None };
        committed(write(&store, "/big/one", Expect::Any, op).await);
        next(&mut quick).await;
    }
    let mut seen = 0;
    let error = loop {
        match slow.next().await.expect("an error at the end") {
            Ok(batch) => seen += batch.events.len(),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::SlowWatcher { .. }), "{error:?}");
    assert!(seen > 10 && seen < writes, "{seen}");
    assert!(slow.next().await.is_none(), "over after the error");
    // From where it was, the history (longer than what is kept in memory) gives the rest.
    let mut again = store.watch("/big/", start).await.expect("watch");
    let mut revisions = Vec::new();
    while revisions.len() < writes {
        revisions.push(next(&mut again).await.revision);
    }
    assert!(revisions.is_sorted_by(|a, b| a + 1 == *b), "{revisions:?}");
    put(&store, "/big/two", "x").await;
    assert_eq!(next(&mut again).await.events[0].entry.key, "/big/two");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_is_bounded_by_length_and_by_age() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let config = EmbeddedConfig {
        history_revisions: 400,
        history: Duration::from_millis(100),
        ..EmbeddedConfig::new(folder.path().join("store.redb"))
    };
    let store = Embedded::open(EmbeddedConfig { history: Duration::from_secs(300), ..config.clone() }).await.expect("open");
    for n in 0..1000 {
        put(&store, &format!("/h/{}", n % 10), &n.to_string()).await;
    }
    let status = store.status().await.expect("status");
    assert!(status.compacted >= status.revision - 500, "by length: {status:?}");
    assert!(status.compacted <= status.revision - 400, "not more than asked: {status:?}");
    drop(store);
    let store = Embedded::open(config).await.expect("open");
    let gone = tokio::time::timeout(Duration::from_secs(20), async {
        let mut watch = store.watch("/h/", status.revision).await.expect("watch");
        while store.status().await.expect("status").compacted < status.revision {
            // Nothing is written: the compaction comes by its deadline. We look at each progress or after a while.
            let _ = tokio::time::timeout(Duration::from_millis(500), watch.next()).await;
        }
    });
    gone.await.expect("by age");
    let all = store.range(prefix("/h/")).await.expect("range");
    assert_eq!(all.entries.len(), 10);
    for entry in all.entries {
        let n: u64 = std::str::from_utf8(&entry.value).expect("text").parse().expect("number");
        assert!((990..1000).contains(&n));
    }
}

#[tokio::test]
async fn closing_ends_watches_and_refuses_writes_nothing_hangs() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let store = open(&folder.path().join("store.redb")).await;
    let mut watch = store.watch("/", 1).await.expect("watch");
    put(&store, "/a", "1").await;
    drop(store);
    let mut last = None;
    while let Some(batch) = watch.next().await {
        last = Some(batch);
    }
    assert!(matches!(last, Some(Err(Error::Unavailable { .. }))), "{last:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sweeping_gives_room_back() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let store = open(&folder.path().join("store.redb")).await;
    let value = "v".repeat(100_000);
    let mut sizes = Vec::new();
    for _ in 0..6 {
        for n in 0..40 {
            put(&store, &format!("/k/{}", n % 4), &value).await;
        }
        let status = store.status().await.expect("status");
        store.compact(status.revision).await.expect("compact");
        // A write behind the sweep: sweeping happens between writes.
        for _ in 0..3 {
            committed(write(&store, "/tick", Expect::Any, put_op("x")).await);
        }
        sizes.push(store.status().await.expect("status").bytes);
    }
    // Without sweeping, 240 writes of 100 kB would take 24 MB.
    assert!(sizes[5] <= sizes[1] * 2 && sizes[5] < 16 << 20, "{sizes:?}");
    assert_eq!(store.range(Range { limit: Some(1), ..prefix("/k/") }).await.expect("range").entries.len(), 1);
}
