//! Leases shared by keys that die at about the same time: granting one per key would cost etcd more than the keys.
//!
//! As upstream's `leaseManager`: a lease lives a little longer than asked for (5 %, at most a minute) and serves every put
//! of the same time to live until it would end too early, or holds 1,000 keys.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use super::Link;
use crate::Result;

const MAX_OBJECTS: u64 = 1000;
const MAX_REUSE: u64 = 60;
/// Different times to live that are kept in mind; in practice there is one, that of events.
const MAX_BUCKETS: usize = 64;

pub(super) struct Leases {
    link: Arc<Link>,
    /// By time to live in seconds.
    buckets: Mutex<HashMap<u64, Bucket>>,
}

struct Bucket {
    id: i64,
    ends: Instant,
    objects: u64,
}

impl Leases {
    pub(super) fn new(link: Arc<Link>) -> Self {
        Self { link, buckets: Mutex::default() }
    }

    /// A lease that lives at least `ttl`.
    pub(super) async fn get(&self, ttl: Duration) -> Result<i64> {
        let seconds = u64::try_from(ttl.as_millis().div_ceil(1000)).unwrap_or(u64::MAX).max(1);
        let mut buckets = self.buckets.lock().await;
        let now = Instant::now();
        if let Some(bucket) = buckets.get_mut(&seconds)
            && bucket.objects < MAX_OBJECTS
            && bucket.ends > now + Duration::from_secs(seconds)
        {
            bucket.objects += 1;
            return Ok(bucket.id);
        }
        let lives = seconds.saturating_add((seconds / 20).min(MAX_REUSE));
        let granted = self.link.peers.attempt(true, |peer| {
            let mut client = peer.client.lease_client();
            async move { client.grant(super::signed(lives), None).await }
        });
        let granted = granted.await?;
        if buckets.len() >= MAX_BUCKETS {
            buckets.retain(|_, bucket| bucket.ends > now);
        }
        if buckets.len() >= MAX_BUCKETS {
            // Their leases end by themselves; they are only no longer shared.
            buckets.clear();
        }
        let fresh = Bucket { id: granted.id(), ends: now + Duration::from_secs(lives), objects: 1 };
        if let Some(full) = buckets.insert(seconds, fresh) {
            self.link.metrics.lease_closed(full.objects);
        }
        Ok(granted.id())
    }
}
