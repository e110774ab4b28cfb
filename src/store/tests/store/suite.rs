//! What every back end does. Each case gets a store of its own, empty and at whatever revision.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures::StreamExt;
use windlass_store::{
    Batch, Error, Event, EventKind, Expect, MAX_REQUEST, Op, Outcome, Range, Result, Store, Txn, Watch,
};

type Case = fn(Arc<dyn Store>) -> Pin<Box<dyn Future<Output = ()> + Send>>;

/// The cases by name.
pub const CASES: &[(&str, Case)] = &[
    ("put, get and delete", |s| Box::pin(put_get_delete(s))),
    ("compare and swap", |s| Box::pin(compare_and_swap(s))),
    ("one of many wins", |s| Box::pin(one_of_many_wins(s))),
    ("range pages", |s| Box::pin(range_pages(s))),
    ("range in the past", |s| Box::pin(range_in_the_past(s))),
    ("watch live and from history", |s| Box::pin(watch_live_and_from_history(s))),
    ("watch tells previous values", |s| Box::pin(watch_tells_previous(s))),
    ("watch progress", |s| Box::pin(watch_progress(s))),
    ("watches agree under load", |s| Box::pin(watches_agree_under_load(s))),
    ("compaction", |s| Box::pin(compaction(s))),
    ("time to live", |s| Box::pin(time_to_live(s))),
    ("refusals", |s| Box::pin(refusals(s))),
    ("any bytes", |s| Box::pin(any_bytes(s))),
];

/// Runs every case, each on a store that `make` gives.
pub async fn run<F, Fut>(make: F)
where
    F: Fn(usize) -> Fut,
    Fut: Future<Output = Arc<dyn Store>>,
{
    for (number, (name, case)) in CASES.iter().enumerate() {
        eprintln!("case: {name}");
        tokio::time::timeout(Duration::from_secs(60), case(make(number).await))
            .await
            .unwrap_or_else(|_| panic!("case {name}: not done in 60 s"));
    }
}

// === words ===

pub fn put_op(value: &str) -> Op {
    Op::Put { value: Bytes::copy_from_slice(value.as_bytes()), ttl: None }
}

pub async fn write(store: &dyn Store, key: &str, expect: Expect, op: Op) -> Result<Outcome> {
    store.txn(Txn { key: key.to_owned(), expect, op }).await
}

/// Puts, and gives the revision.
pub async fn put(store: &dyn Store, key: &str, value: &str) -> u64 {
    committed(write(store, key, Expect::Any, put_op(value)).await)
}

pub async fn delete(store: &dyn Store, key: &str) -> u64 {
    committed(write(store, key, Expect::Any, Op::Delete).await)
}

pub fn committed(outcome: Result<Outcome>) -> u64 {
    match outcome.expect("the write is done") {
        Outcome::Committed { revision, .. } => revision,
        Outcome::Conflict { current } => panic!("conflict with {current:?}"),
    }
}

async fn value(store: &dyn Store, key: &str) -> Option<String> {
    let entry = store.get(key).await.expect("get");
    entry.map(|e| String::from_utf8(e.value.to_vec()).expect("text"))
}

pub fn prefix(prefix: &str) -> Range {
    Range { prefix: prefix.to_owned(), ..Range::default() }
}

async fn keys(store: &dyn Store, range: Range) -> (Vec<String>, bool) {
    let result = store.range(range).await.expect("range");
    (result.entries.into_iter().map(|e| e.key).collect(), result.more)
}

/// The next batch with events.
pub async fn next(watch: &mut Watch) -> Batch {
    loop {
        let batch = tokio::time::timeout(Duration::from_secs(20), watch.next()).await.expect("an event in 20 s");
        let batch = batch.expect("the watch goes on").expect("no error");
        if !batch.events.is_empty() {
            return batch;
        }
    }
}

/// An event in one line.
fn line(event: &Event) -> String {
    let text = |b: &Bytes| String::from_utf8_lossy(b).into_owned();
    let previous = event.previous.as_ref().map_or("-".to_owned(), |p| text(&p.value));
    let kind = match event.kind {
        EventKind::Put { created: true } => "create",
        EventKind::Put { created: false } => "update",
        EventKind::Delete => "delete",
    };
    format!("{kind} {} {} was {previous}", event.entry.key, text(&event.entry.value))
}

async fn lines(watch: &mut Watch, count: usize) -> Vec<String> {
    let mut found = Vec::new();
    while found.len() < count {
        found.extend(next(watch).await.events.iter().map(line));
    }
    found
}

async fn revision(store: &dyn Store) -> u64 {
    store.status().await.expect("status").revision
}

// === cases ===

async fn put_get_delete(store: Arc<dyn Store>) {
    let store = &*store;
    assert_eq!(store.get("/r/a").await, Ok(None));
    let first = put(store, "/r/a", "1").await;
    let second = put(store, "/r/a", "2").await;
    assert_eq!(second, first + 1, "one revision per write");
    let entry = store.get("/r/a").await.expect("get").expect("there");
    assert_eq!((entry.key.as_str(), &entry.value[..]), ("/r/a", &b"2"[..]));
    assert_eq!((entry.create_revision, entry.mod_revision), (first, second));
    assert_eq!(store.get("/r/").await, Ok(None), "a prefix is not a key");
    assert_eq!(delete(store, "/r/a").await, second + 1);
    assert_eq!(store.get("/r/a").await, Ok(None));
    assert_eq!(delete(store, "/r/a").await, second + 1, "nothing to delete: no revision");
    let again = put(store, "/r/a", "3").await;
    let entry = store.get("/r/a").await.expect("get").expect("there");
    assert_eq!((entry.create_revision, entry.mod_revision), (again, again), "created anew");
    assert_eq!(revision(store).await, again);
}

async fn compare_and_swap(store: Arc<dyn Store>) {
    let store = &*store;
    let created = committed(write(store, "k", Expect::Absent, put_op("1")).await);
    match write(store, "k", Expect::Absent, put_op("2")).await {
        Ok(Outcome::Conflict { current: Some(current) }) => assert_eq!(current.mod_revision, created),
        other => panic!("{other:?}"),
    }
    match write(store, "k", Expect::ModRevision(created), put_op("2")).await {
        Ok(Outcome::Committed { revision, previous: Some(previous) }) => {
            assert_eq!((revision, &previous.value[..]), (created + 1, &b"1"[..]));
        }
        other => panic!("{other:?}"),
    }
    for (expect, op) in [
        (Expect::ModRevision(created), put_op("3")),
        (Expect::ModRevision(created), Op::Delete),
        (Expect::ModRevision(created + 9), Op::Delete),
    ] {
        match write(store, "k", expect, op).await {
            Ok(Outcome::Conflict { current: Some(current) }) => assert_eq!(current.mod_revision, created + 1),
            other => panic!("{other:?}"),
        }
    }
    match write(store, "none", Expect::ModRevision(created), put_op("1")).await {
        Ok(Outcome::Conflict { current: None }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(value(store, "k").await.as_deref(), Some("2"));
    let deleted = committed(write(store, "k", Expect::ModRevision(created + 1), Op::Delete).await);
    assert_eq!(deleted, created + 2, "conflicts have no revision");
    committed(write(store, "k", Expect::Absent, put_op("4")).await);
}

async fn one_of_many_wins(store: Arc<dyn Store>) {
    let rounds = 20;
    let base = put(&*store, "counter", "0").await;
    let mut tasks = Vec::new();
    for _ in 0..8 {
        let store = Arc::clone(&store);
        tasks.push(tokio::spawn(async move {
            for _ in 0..rounds {
                loop {
                    let entry = store.get("counter").await.expect("get").expect("there");
                    let count: u64 = std::str::from_utf8(&entry.value).expect("text").parse().expect("number");
                    let expect = Expect::ModRevision(entry.mod_revision);
                    match write(&*store, "counter", expect, put_op(&(count + 1).to_string())).await.expect("write") {
                        Outcome::Committed { .. } => break,
                        Outcome::Conflict { current } => {
                            assert!(current.expect("there").mod_revision > entry.mod_revision);
                        }
                    }
                }
            }
        }));
    }
    for task in tasks {
        task.await.expect("no panic");
    }
    assert_eq!(value(&*store, "counter").await, Some((8 * rounds).to_string()));
    assert_eq!(revision(&*store).await, base + 8 * rounds);
}

async fn range_pages(store: Arc<dyn Store>) {
    let store = &*store;
    for key in ["/r/b/1", "/r/a/1", "/r/a", "/r/a/2", "/r/a0", "/s/x", "/r/c", "/q"] {
        put(store, key, key).await;
    }
    delete(store, "/r/c").await;
    let all = keys(store, prefix("/r/")).await;
    assert_eq!(all, (["/r/a", "/r/a/1", "/r/a/2", "/r/a0", "/r/b/1"].map(String::from).to_vec(), false));
    assert_eq!(keys(store, prefix("/r/a/")).await, (["/r/a/1", "/r/a/2"].map(String::from).to_vec(), false));
    assert_eq!(keys(store, prefix("")).await.0.len(), 7);
    assert_eq!(keys(store, prefix("/nothing/")).await, (vec![], false));
    // Page by page, at the revision of the first page, whatever is written in between.
    let first = store.range(Range { limit: Some(2), ..prefix("/r/") }).await.expect("range");
    assert!(first.more);
    let (mut found, mut more, at) = (first.entries, first.more, first.revision);
    assert_eq!(at, revision(store).await);
    while more {
        put(store, "/r/a/15", "new").await;
        delete(store, "/r/b/1").await;
        let start_after = found.last().map(|e| e.key.clone());
        let page = Range { limit: Some(2), start_after, revision: Some(at), ..prefix("/r/") };
        let page = store.range(page).await.expect("page");
        assert_eq!(page.revision, at);
        found.extend(page.entries);
        more = page.more;
    }
    assert_eq!(found.into_iter().map(|e| e.key).collect::<Vec<_>>(), all.0);
    let exactly = Range { limit: Some(5), revision: Some(at), ..prefix("/r/") };
    assert!(!keys(store, exactly).await.1, "a full page is not more");
    let outside = Range { start_after: Some("/z".into()), ..prefix("/r/") };
    assert_eq!(keys(store, outside).await, (vec![], false));
}

async fn range_in_the_past(store: Arc<dyn Store>) {
    let store = &*store;
    // Which keys there were, and with which value, after each write.
    let (mut now, mut past) = (BTreeMap::new(), Vec::new());
    for step in 0..40_u32 {
        let key = format!("/p/{}", step % 7);
        let at = if step % 5 == 4 && now.contains_key(&key) {
            now.remove(&key);
            delete(store, &key).await
        } else {
            now.insert(key.clone(), step.to_string());
            put(store, &key, &step.to_string()).await
        };
        past.push((at, now.clone()));
    }
    for (at, then) in past {
        let result = store.range(Range { revision: Some(at), ..prefix("/p/") }).await.expect("range");
        let found: BTreeMap<String, String> = result
            .entries
            .into_iter()
            .map(|e| (e.key, String::from_utf8(e.value.to_vec()).expect("text")))
            .collect();
        assert_eq!((result.revision, found), (at, then));
    }
    let future = revision(store).await + 10;
    match store.range(Range { revision: Some(future), ..prefix("/p/") }).await {
        Err(Error::Future { requested, .. }) => assert_eq!(requested, future),
        other => panic!("{other:?}"),
    }
}

async fn watch_live_and_from_history(store: Arc<dyn Store>) {
    let store = &*store;
    let start = put(store, "/w/a", "1").await;
    let mut live = store.watch("/w/", start).await.expect("watch");
    put(store, "/other/a", "x").await;
    put(store, "/w/a", "2").await;
    put(store, "/w/b", "1").await;
    let end = delete(store, "/w/a").await;
    let want = ["update /w/a 2 was 1", "create /w/b 1 was -", "delete /w/a  was 2"];
    assert_eq!(lines(&mut live, 3).await, want);
    let mut history = store.watch("/w/", start).await.expect("watch");
    assert_eq!(lines(&mut history, 3).await, want);
    let mut all = store.watch("/w/", start - 1).await.expect("watch");
    assert_eq!(lines(&mut all, 4).await[0], "create /w/a 1 was -");
    let mut later = store.watch("/w/", end).await.expect("watch");
    let revision = put(store, "/w/c", "1").await;
    for watch in [&mut live, &mut history, &mut all, &mut later] {
        let batch = next(watch).await;
        assert_eq!(batch.revision, revision);
        assert_eq!(batch.events.iter().map(line).collect::<Vec<_>>(), ["create /w/c 1 was -"]);
        assert_eq!(batch.events[0].entry.mod_revision, revision);
    }
    match store.watch("/w/", revision + 100).await.map(drop) {
        Err(Error::Future { requested, current }) => assert_eq!((requested, current), (revision + 100, revision)),
        other => panic!("{other:?}"),
    }
}

async fn watch_tells_previous(store: Arc<dyn Store>) {
    let store = &*store;
    let start = revision(store).await;
    let mut watch = store.watch("/w/", start).await.expect("watch");
    put(store, "/w/a", "1").await;
    delete(store, "/w/a").await;
    put(store, "/w/a", "2").await;
    put(store, "/w/a", "3").await;
    let want =
        ["create /w/a 1 was -", "delete /w/a  was 1", "create /w/a 2 was -", "update /w/a 3 was 2"];
    assert_eq!(lines(&mut watch, 4).await, want);
}

async fn watch_progress(store: Arc<dyn Store>) {
    let start = revision(&*store).await;
    let mut quiet = store.watch("/quiet/", start).await.expect("watch");
    let at = put(&*store, "/loud/a", "1").await;
    store.request_progress().await.expect("request");
    let told = tokio::time::timeout(Duration::from_secs(20), async {
        loop {
            let batch = quiet.next().await.expect("goes on").expect("no error");
            assert!(batch.events.is_empty());
            if batch.revision >= at {
                break batch.revision;
            }
        }
    });
    assert_eq!(told.await.expect("progress in 20 s"), at);
    // What comes later is not missed.
    let put_at = put(&*store, "/quiet/a", "1").await;
    assert_eq!(next(&mut quiet).await.revision, put_at);
}

async fn watches_agree_under_load(store: Arc<dyn Store>) {
    let start = revision(&*store).await;
    let (writers, each) = (8_u64, 60_u64);
    let total = usize::try_from(writers * each).expect("small");
    let early = store.watch("/l/", start).await.expect("watch");
    let mut tasks = Vec::new();
    for writer in 0..writers {
        let store = Arc::clone(&store);
        tasks.push(tokio::spawn(async move {
            for step in 0..each {
                put(&*store, &format!("/l/{writer}/{}", step % 5), &format!("{writer} {step}")).await;
            }
        }));
    }
    let late = store.watch("/l/", start).await.expect("watch");
    let mut seen = Vec::new();
    for mut watch in [early, late] {
        let mut events = Vec::new();
        while events.len() < total {
            let batch = next(&mut watch).await;
            assert!(batch.events.iter().all(|e| e.entry.mod_revision == batch.revision));
            events.extend(batch.events);
        }
        seen.push(events);
    }
    for task in tasks {
        task.await.expect("no panic");
    }
    assert_eq!(seen[0], seen[1]);
    let revisions: Vec<u64> = seen[0].iter().map(|e| e.entry.mod_revision).collect();
    assert!(revisions.is_sorted_by(|a, b| a < b), "in order, each once");
    let end = revision(&*store).await;
    assert_eq!(end, start + writers * each, "one revision per write");
}

async fn compaction(store: Arc<dyn Store>) {
    let store = &*store;
    let first = put(store, "/c/a", "1").await;
    put(store, "/c/b", "1").await;
    put(store, "/c/a", "2").await;
    let middle = delete(store, "/c/b").await;
    put(store, "/c/a", "3").await;
    let last = put(store, "/c/d", "1").await;
    store.compact(middle).await.expect("compact");
    assert_eq!(store.status().await.expect("status").compacted, middle);
    match store.range(Range { revision: Some(first), ..prefix("/c/") }).await {
        Err(Error::Compacted { requested, compacted }) => assert_eq!((requested, compacted), (first, middle)),
        other => panic!("{other:?}"),
    }
    match store.watch("/c/", first).await.map(drop) {
        Err(Error::Compacted { requested, compacted }) => assert_eq!((requested, compacted), (first, middle)),
        other => panic!("{other:?}"),
    }
    let then = store.range(Range { revision: Some(middle), ..prefix("/c/") }).await.expect("range");
    let then: Vec<_> = then.entries.iter().map(|e| (e.key.as_str(), &e.value[..])).collect();
    assert_eq!(then, [("/c/a", &b"2"[..])]);
    let mut watch = store.watch("/c/", middle).await.expect("watch");
    assert_eq!(lines(&mut watch, 2).await, ["update /c/a 3 was 2", "create /c/d 1 was -"]);
    store.compact(first).await.expect("further back: nothing to do");
    match store.compact(last + 100).await {
        Err(Error::Future { .. }) => {}
        other => panic!("{other:?}"),
    }
    store.compact(last).await.expect("compact all");
    assert_eq!(keys(store, prefix("/c/")).await, (["/c/a", "/c/d"].map(String::from).to_vec(), false));
    assert_eq!(value(store, "/c/a").await.as_deref(), Some("3"));
    assert_eq!(put(store, "/c/b", "4").await, last + 1);
}

async fn time_to_live(store: Arc<dyn Store>) {
    let store = &*store;
    let start = revision(store).await;
    let mut watch = store.watch("/t/", start).await.expect("watch");
    let mortal = |value: &str| Op::Put {
        value: Bytes::copy_from_slice(value.as_bytes()),
        ttl: Some(Duration::from_secs(1)),
    };
    let began = SystemTime::now();
    committed(write(store, "/t/dies", Expect::Any, mortal("1")).await);
    committed(write(store, "/t/saved", Expect::Any, mortal("1")).await);
    put(store, "/t/saved", "2").await;
    put(store, "/t/stays", "1").await;
    assert_eq!(lines(&mut watch, 4).await.len(), 4);
    assert_eq!(lines(&mut watch, 1).await, ["delete /t/dies  was 1"]);
    let took = began.elapsed().expect("clock");
    assert!(took >= Duration::from_secs(1), "{took:?}");
    assert_eq!(keys(store, prefix("/t/")).await.0, ["/t/saved", "/t/stays"]);
}

async fn refusals(store: Arc<dyn Store>) {
    let store = &*store;
    let before = revision(store).await;
    for key in ["", "a\0b"] {
        match write(store, key, Expect::Any, put_op("1")).await {
            Err(Error::BadKey { .. }) => {}
            other => panic!("{key:?}: {other:?}"),
        }
        assert!(matches!(store.get(key).await, Err(Error::BadKey { .. })));
    }
    let big = Op::Put { value: vec![0; MAX_REQUEST].into(), ttl: None };
    match write(store, "k", Expect::Any, big).await {
        Err(Error::TooLarge { limit, .. }) => assert_eq!(limit, MAX_REQUEST),
        other => panic!("{other:?}"),
    }
    assert_eq!(revision(store).await, before);
}

async fn any_bytes(store: Arc<dyn Store>) {
    let large: Vec<u8> = (0..1_000_000_u32).map(|n| (n % 251) as u8).collect();
    for (key, value) in [("\u{1f980}/\u{e9}", vec![]), ("/bytes", (0..=255).collect()), ("/large", large)] {
        let value = Bytes::from(value);
        committed(write(&*store, key, Expect::Any, Op::Put { value: value.clone(), ttl: None }).await);
        assert_eq!(store.get(key).await.expect("get").expect("there").value, value, "{key}");
    }
}
