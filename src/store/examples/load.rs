//! How many small puts a second the embedded store makes durable, and what each costs.
//!
//! `cargo run --release -p windlass-store --example load -- [WRITERS] [SECONDS] [VALUE BYTES] [FOLDER]`

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use windlass_store::{Embedded, EmbeddedConfig, Expect, Op, Store, Txn};

fn cpu() -> Duration {
    use nix::sys::resource::{UsageWho, getrusage};
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("getrusage of the own process");
    let time = |t: nix::sys::time::TimeVal| {
        Duration::from_secs(t.tv_sec().unsigned_abs()) + Duration::from_micros(t.tv_usec().unsigned_abs())
    };
    time(usage.user_time()) + time(usage.system_time())
}

#[tokio::main]
async fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: u64| args.get(at).map_or(default, |a| a.parse().expect("a number"));
    let (writers, seconds, bytes) = (number(0, 64), number(1, 5), number(2, 1000));
    let scratch = tempfile::tempdir().expect("a temporary folder");
    let folder = args.get(3).map_or(scratch.path().to_owned(), Into::into);
    let store = Embedded::open(EmbeddedConfig::new(folder.join("load.redb"))).await.expect("open");
    let store: Arc<dyn Store> = Arc::new(store);
    let mut watch = store.watch("/registry/pods/", 1).await.expect("watch");
    let seen = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&seen);
    let watcher = tokio::spawn(async move {
        while let Some(Ok(batch)) = futures::StreamExt::next(&mut watch).await {
            counter.fetch_add(batch.events.len() as u64, Ordering::Relaxed);
        }
    });
    let value = Bytes::from(vec![b'x'; usize::try_from(bytes).expect("small")]);
    let (began, cpu_before) = (Instant::now(), cpu());
    let end = began + Duration::from_secs(seconds);
    let mut tasks = Vec::new();
    for writer in 0..writers {
        let (store, value) = (Arc::clone(&store), value.clone());
        tasks.push(tokio::spawn(async move {
            let (mut done, mut worst, mut sum) = (0_u64, Duration::ZERO, Duration::ZERO);
            while Instant::now() < end {
                let key = format!("/registry/pods/default/pod-{writer}-{}", done % 500);
                let op = Op::Put { value: value.clone(), ttl: None };
                let start = Instant::now();
                store.txn(Txn { key, expect: Expect::Any, op }).await.expect("put");
                let took = start.elapsed();
                (done, worst, sum) = (done + 1, worst.max(took), sum + took);
            }
            (done, worst, sum)
        }));
    }
    let (mut done, mut worst, mut sum) = (0, Duration::ZERO, Duration::ZERO);
    for task in tasks {
        let (d, w, s) = task.await.expect("no panic");
        (done, worst, sum) = (done + d, worst.max(w), sum + s);
    }
    let (wall, cpu) = (began.elapsed(), cpu() - cpu_before);
    println!(
        "{writers} writers, {bytes} bytes: {:.0} puts/s, {:.1} us CPU per put, mean {:?}, worst {worst:?}, {} events seen, {:?}",
        done as f64 / wall.as_secs_f64(),
        cpu.as_secs_f64() * 1e6 / done as f64,
        sum / u32::try_from(done).unwrap_or(u32::MAX).max(1),
        seen.load(Ordering::Relaxed),
        store.status().await.expect("status"),
    );
    drop(store);
    watcher.abort();
}
