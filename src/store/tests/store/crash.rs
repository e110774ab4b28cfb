//! Two hundred times: a process under load is killed at a random moment, and every write that it saw acknowledged is there.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use windlass_store::{Embedded, EmbeddedConfig, Expect, Op, Outcome, Store, Txn};

use crate::suite::prefix;

const ROUNDS: u32 = 200;
const WRITERS: u64 = 24;
const KEYS: u64 = 12;
const CHILD: &str = "WINDLASS_STORE_CRASH";
const SEED: &str = "WINDLASS_STORE_SEED";

fn config(folder: &Path) -> EmbeddedConfig {
    // Little history, so that compaction and sweeping are interrupted too.
    EmbeddedConfig { history_revisions: 300, ..EmbeddedConfig::new(folder.join("store.redb")) }
}

/// A value of several fields that belong together: writer, step, filling, and a checksum of them all.
fn value(writer: u64, step: u64) -> String {
    let filling = format!("{}", writer ^ step).repeat(usize::try_from(step % 200).expect("small"));
    let fields = format!("{writer} {step} {filling}");
    format!("{fields} {}", checksum(&fields))
}

fn checksum(text: &str) -> u64 {
    // FNV-1a.
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// The step of a value, if the value is whole.
fn step_of(value: &[u8]) -> Option<u64> {
    let (fields, sum) = std::str::from_utf8(value).ok()?.rsplit_once(' ')?;
    (sum.parse() == Ok(checksum(fields))).then_some(())?;
    let mut words = fields.split(' ');
    let (writer, step) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    (self::value(writer, step).as_bytes() == value).then_some(step)
}

/// The load. Each acknowledged write becomes a line: key, step (`-` for a deletion), revision.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child() {
    let Some(folder) = std::env::var_os(CHILD) else { return };
    let base: u64 = std::env::var(SEED).expect("set by the parent").parse().expect("number");
    let store: Arc<dyn Store> = Arc::new(Embedded::open(config(Path::new(&folder))).await.expect("open"));
    let mut tasks = Vec::new();
    for writer in 0..WRITERS {
        let store = Arc::clone(&store);
        tasks.push(tokio::spawn(async move {
            for step in base.. {
                let key = format!("/crash/{writer}/{}", step % KEYS);
                let ttl = (step % 7 == 0).then(|| Duration::from_secs(3600));
                let (op, said) = match step % 11 {
                    10 => (Op::Delete, "-".to_owned()),
                    _ => (Op::Put { value: Bytes::from(value(writer, step)), ttl }, step.to_string()),
                };
                match store.txn(Txn { key: key.clone(), expect: Expect::Any, op }).await {
                    Ok(Outcome::Committed { revision, .. }) => {
                        let line = format!("ack {key} {said} {revision}\n");
                        std::io::stdout().lock().write_all(line.as_bytes()).expect("tell the parent");
                    }
                    other => panic!("{other:?}"),
                }
            }
        }));
    }
    for task in tasks {
        task.await.expect("no panic");
    }
}

/// What the parent knows of a key: the last acknowledged write.
#[derive(Clone, Copy)]
struct Known {
    step: Option<u64>,
    revision: u64,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_acknowledged_is_lost() {
    let seed = std::env::var(SEED).ok().and_then(|s| s.parse().ok()).unwrap_or_else(|| rand::rng().random());
    println!("seed {seed} (set {SEED} to repeat)");
    let mut random = StdRng::seed_from_u64(seed);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (mut known, mut revision, mut total) = (HashMap::new(), 0, 0);
    let began = Instant::now();
    for round in 0..ROUNDS {
        let lines = kill_one(folder.path(), u64::from(round) * 1_000_000, &mut random);
        for (key, step, at) in lines {
            let newer = Known { step, revision: at };
            let entry = known.entry(key).or_insert(newer);
            if newer.revision > entry.revision {
                *entry = newer;
            }
            total += 1;
        }
        revision = verify(folder.path(), &known, revision, round).await;
    }
    println!("{ROUNDS} rounds, {total} acknowledged writes, revision {revision}, {:?}", began.elapsed());
    assert!(total > 1000, "too little load to show anything: {total}");
}

/// Runs the child, kills it at a random moment, and gives what it told before.
fn kill_one(folder: &Path, base: u64, random: &mut StdRng) -> Vec<(String, Option<u64>, u64)> {
    let mut child = Command::new(std::env::current_exe().expect("own path"))
        .args(["--exact", "crash::child", "--nocapture"])
        .env(CHILD, folder)
        .env(SEED, base.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("start the child");
    let mut output = BufReader::new(child.stdout.take().expect("piped"));
    let mut lines = Vec::new();
    let mut take = |line: &str| {
        // The last line may be cut, and the test harness has lines of its own; it may put one before our first.
        let Some((_, ack)) = line.split_once("ack ") else { return };
        let Some(ack) = ack.strip_suffix('\n') else { return };
        let words: Vec<&str> = ack.split(' ').collect();
        if let [key, step, revision] = words[..] {
            lines.push((key.to_owned(), step.parse().ok(), revision.parse().expect("revision")));
        }
    };
    // Sometimes while it opens and recovers, mostly under load.
    let (after_start, pause) = (random.random_bool(0.15), Duration::from_micros(random.random_range(0..30_000)));
    if !after_start {
        let mut line = String::new();
        while !line.contains("ack ") && output.read_line(&mut line).expect("read") > 0 {
            take(&line);
            if !line.contains("ack ") {
                line.clear();
            }
        }
    }
    // The moment of the kill is the test's randomness, not a wait for something.
    std::thread::sleep(pause);
    child.kill().expect("kill");
    child.wait().expect("wait");
    let mut line = String::new();
    while output.read_line(&mut line).expect("read") > 0 {
        take(&line);
        line.clear();
    }
    lines
}

async fn verify(folder: &Path, known: &HashMap<String, Known>, before: u64, round: u32) -> u64 {
    let store = Embedded::open(config(folder)).await.expect("opens after a kill");
    let status = store.status().await.expect("status");
    let acknowledged = known.values().map(|k| k.revision).max().unwrap_or(0);
    assert!(status.revision >= acknowledged.max(before), "round {round}: {status:?}, acknowledged {acknowledged}");
    let all = store.range(prefix("/crash/")).await.expect("range");
    let mut there = HashMap::new();
    for entry in all.entries {
        let step = step_of(&entry.value);
        assert!(step.is_some(), "round {round}: {} is not whole: {:?}", entry.key, entry.value);
        assert!(entry.mod_revision <= status.revision && entry.create_revision <= entry.mod_revision);
        there.insert(entry.key, Known { step, revision: entry.mod_revision });
    }
    for (key, last) in known {
        match there.get(key) {
            Some(found) if found.revision > last.revision => {}
            Some(found) => assert_eq!((found.revision, found.step), (last.revision, last.step), "round {round}: {key}"),
            // Gone: by the acknowledged deletion, or by one that was done and not acknowledged.
            None if last.step.is_none() => {}
            None => assert!(status.revision > last.revision, "round {round}: {key} of {} is lost", last.revision),
        }
    }
    status.revision
}
