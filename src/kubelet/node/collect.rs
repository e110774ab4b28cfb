//! Garbage: images that nobody uses when the disk fills, dead containers under pressure.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use windlass_client::events::EventType;

use super::machine::{self, Disk};
use crate::metrics;
use crate::runtime::{Image, State};
use crate::shared::Shared;

/// How many bytes to free, if the disk is used beyond `high` percent: down to `low`. Pure.
pub fn to_free(disk: Disk, high: u8, low: u8) -> Option<u64> {
    if disk.capacity == 0 {
        return None;
    }
    let used_percent = 100 - (disk.available * 100 / disk.capacity).min(100);
    if used_percent < u64::from(high) {
        return None;
    }
    let wanted = disk.capacity * (100 - u64::from(low)) / 100;
    Some(wanted.saturating_sub(disk.available)).filter(|b| *b > 0)
}

/// An image that came only just now is about to be used.
const MIN_AGE: SignedDuration = SignedDuration::from_mins(2);

/// Unused images, least recently used first. Pure.
pub fn candidates(
    images: Vec<Image>,
    in_use: &HashSet<String>,
    now: Timestamp,
    seen: impl Fn(&str) -> Option<Timestamp>,
    last_used: impl Fn(&str) -> Option<Timestamp>,
) -> Vec<Image> {
    let old = |i: &Image| seen(&i.id).is_some_and(|at| now.duration_since(at) >= MIN_AGE);
    let mut unused: Vec<Image> = images.into_iter().filter(|i| !in_use.contains(&i.id) && old(i)).collect();
    unused.sort_by_key(|i| last_used(&i.id).unwrap_or(Timestamp::MIN));
    unused
}

async fn unused(shared: &Shared) -> Result<Vec<Image>, crate::runtime::Error> {
    let images = shared.runtime.images().await?;
    let now = Timestamp::now();
    let mut in_use: HashSet<String> = HashSet::new();
    for container in shared.table.views().into_iter().flat_map(|v| v.containers) {
        shared.images.mark_used(&container.image_id, now);
        in_use.insert(container.image_id);
    }
    if let Ok(Some(pause)) = shared.runtime.image(&windlass_net::pause::image_name()).await {
        in_use.insert(pause.id);
    }
    shared.images.retain(&images, now);
    Ok(candidates(images, &in_use, now, |id| shared.images.first_seen(id), |id| shared.images.last_used(id)))
}

/// Frees disk space when it is used beyond the high threshold.
pub async fn images(shared: &Arc<Shared>) {
    let disk = match machine::disk(Path::new(&shared.info.root_dir)) {
        Ok(disk) => disk,
        Err(error) => {
            tracing::warn!(%error, path = shared.info.root_dir, "cannot read how full the images' disk is");
            return;
        }
    };
    // Learns which images are in use even when there is nothing to free.
    let unused = match unused(shared).await {
        Ok(unused) => unused,
        Err(error) => {
            shared.node_event(EventType::Warning, "ImageGCFailed", error.to_string());
            return;
        }
    };
    let Some(wanted) = to_free(disk, shared.config.image_gc_high_threshold, shared.config.image_gc_low_threshold) else { return };
    let freed = remove(shared, unused, Some(wanted)).await;
    if freed < wanted {
        let message = format!("Failed to garbage collect required amount of images. Attempted to free {wanted} bytes, but only found {freed} bytes eligible to free.");
        shared.node_event(EventType::Warning, "FreeDiskSpaceFailed", message);
    }
}

/// Removes every image that no container uses.
pub async fn all_unused_images(shared: &Arc<Shared>) {
    match unused(shared).await {
        Ok(unused) => {
            remove(shared, unused, None).await;
        }
        Err(error) => tracing::warn!(%error, "cannot list images"),
    }
}

async fn remove(shared: &Shared, images: Vec<Image>, wanted: Option<u64>) -> u64 {
    let mut freed = 0;
    for image in images {
        if wanted.is_some_and(|w| freed >= w) {
            break;
        }
        match shared.runtime.remove_image(&image.id).await {
            Ok(()) => {
                freed += u64::try_from(image.size).unwrap_or(0);
                metrics::IMAGES_COLLECTED.with_label_values(&["space"]).inc();
                tracing::info!(image = image.id, size = image.size, "removed an unused image");
            }
            Err(error) => tracing::debug!(image = image.id, %error, "image not removed"),
        }
    }
    freed
}

/// Removes the dead containers of pods that have ended: under disk pressure their logs go too.
pub async fn dead_containers(shared: &Arc<Shared>) {
    for view in shared.table.views().into_iter().filter(|v| v.terminated) {
        for container in view.containers.iter().filter(|c| c.state != State::Running) {
            if let Err(error) = shared.runtime.remove(&container.id).await {
                tracing::warn!(container = container.id, %error, "cannot remove a dead container");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds() {
        let disk = |available| Disk { capacity: 1000, available, ..Default::default() };
        assert_eq!(to_free(disk(200), 85, 80), None);
        assert_eq!(to_free(disk(150), 85, 80), Some(50));
        assert_eq!(to_free(disk(10), 85, 80), Some(190));
        assert_eq!(to_free(Disk::default(), 85, 80), None);
    }

    #[test]
    fn least_recently_used_first() {
        let image = |id: &str| Image { id: id.into(), ..Default::default() };
        let second = |s| Timestamp::from_second(s).expect("time");
        let used = |id: &str| match id {
            "a" => Some(second(20)),
            "b" => Some(second(10)),
            _ => None,
        };
        let seen = |id: &str| Some(second(if id == "young" { 950 } else { 0 }));
        let images = vec![image("a"), image("b"), image("used"), image("never"), image("young")];
        let order = candidates(images, &HashSet::from(["used".to_owned()]), second(1000), seen, used);
        let names: Vec<&str> = order.iter().map(|i| i.id.as_str()).collect();
        assert_eq!(names, ["never", "b", "a"]);
    }
}
