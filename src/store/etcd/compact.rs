//! Compaction of a shared etcd: of all API servers (ours and upstream's) one does it, agreed on by a key.
//!
//! Upstream's protocol (`k8s.io/apiserver/pkg/storage/etcd3/compact.go`): the version of the key counts compactions, and
//! who increments it by compare-and-swap compacts to where the store was an interval ago.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, Txn, TxnOp, TxnOpResponse};
use tokio_util::sync::CancellationToken;

use super::{Link, odd, revision};
use crate::Result;

/// Upstream's key.
pub(super) const KEY: &str = "compact_rev_key";

/// What one compactor remembers between rounds.
#[derive(Default)]
struct Memory {
    /// The key's version when last seen.
    version: i64,
    /// The store's revision then.
    revision: u64,
}

/// Compacts every `interval`, as long as it is our turn, until `stop`.
pub(super) async fn run(link: Arc<Link>, interval: Duration, stop: CancellationToken) {
    let mut memory = Memory::default();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(interval) => {}
        }
        if let Err(error) = round(&link, &mut memory).await {
            tracing::warn!(%error, "etcd was not compacted: trying again at the next interval");
        }
    }
}

async fn round(link: &Link, memory: &mut Memory) -> Result<()> {
    let request = Txn::new()
        .when([Compare::version(KEY, CompareOp::Equal, memory.version)])
        .and_then([TxnOp::put(KEY, memory.revision.to_string(), None)])
        .or_else([TxnOp::get(KEY, None)]);
    let response = link.peers.attempt(false, |peer| {
        let (mut kv, request) = (peer.kv.clone(), request.clone());
        async move { kv.txn(request).await }
    });
    let response = response.await?;
    let now = revision(response.header());
    if response.succeeded() {
        let goal = std::mem::replace(memory, Memory { version: memory.version + 1, revision: now }).revision;
        return match goal {
            // The first round only takes its bearings.
            0 => Ok(()),
            goal => link.compact(goal).await,
        };
    }
    let Some(TxnOpResponse::Get(found)) = response.op_responses().into_iter().next() else {
        return Err(odd("a failed transaction without its read"));
    };
    // Somebody else's turn.
    let kv = found.kvs().first();
    if let Some(compacted) = kv.and_then(|kv| kv.value_str().ok()?.parse().ok()) {
        link.compacted.fetch_max(compacted, Ordering::Relaxed);
    }
    *memory = Memory { version: kv.map_or(0, etcd_client::KeyValue::version), revision: now };
    Ok(())
}
