//! Persistent volumes that are directories of this node, and the removal of those that Windlass provisioned.

use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, PersistentVolume};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use windlass_client::informer::Informer;
use windlass_client::queue::{self, Action, Queue};

use super::mounts;

/// On volumes whose directory the kubelet makes and removes.
pub const FINALIZER: &str = "windlass.dev/local-path";
/// Names the node of such a volume, beside its node affinity.
pub const NODE_ANNOTATION: &str = "windlass.dev/node";
const HOSTNAME: &str = "kubernetes.io/hostname";

/// The directory of a volume; made when it is ours to make.
///
/// # Errors
/// When the volume is of a kind that is not supported, or its directory is missing.
pub fn path(volume: &PersistentVolume) -> Result<PathBuf, String> {
    let path = directory(volume).ok_or_else(|| {
        let name = volume.metadata.name.as_deref().unwrap_or("");
        format!("persistentvolume \"{name}\" is neither local nor hostPath: this node supports no other kind")
    })?;
    let ours = has_finalizer(volume);
    let create = volume.spec.as_ref().and_then(|s| s.host_path.as_ref()).and_then(|h| h.type_.as_deref());
    if ours || matches!(create, Some("DirectoryOrCreate" | "")) {
        if !path.exists() {
            mounts::dir(&path, 0o777).map_err(|e| format!("{}: {e}", path.display()))?;
        }
    } else if !path.exists() {
        return Err(format!("path \"{}\" does not exist", path.display()));
    }
    Ok(path)
}

fn directory(volume: &PersistentVolume) -> Option<PathBuf> {
    let spec = volume.spec.as_ref()?;
    let text = spec.local.as_ref().map(|l| l.path.as_str()).or(spec.host_path.as_ref().map(|h| h.path.as_str()))?;
    Some(PathBuf::from(text))
}

fn has_finalizer(volume: &PersistentVolume) -> bool {
    volume.metadata.finalizers.iter().flatten().any(|f| f == FINALIZER)
}

/// Whether the volume lives on this node.
fn is_here(volume: &PersistentVolume, node: &str, hostname: &str) -> bool {
    if volume.metadata.annotations.as_ref().and_then(|a| a.get(NODE_ANNOTATION)).is_some_and(|n| n == node) {
        return true;
    }
    let required = volume.spec.as_ref().and_then(|s| s.node_affinity.as_ref()).and_then(|a| a.required.as_ref());
    required.is_some_and(|r| {
        r.node_selector_terms.iter().any(|term| {
            let by_label = term.match_expressions.iter().flatten().any(|e| e.key == HOSTNAME && e.operator == "In" && e.values.iter().flatten().any(|v| v == hostname));
            let by_name = term.match_fields.iter().flatten().any(|e| e.key == "metadata.name" && e.values.iter().flatten().any(|v| v == node));
            by_label || by_name
        })
    })
}

/// A directory that may be removed: deep enough that a slip in a volume cannot take a system directory.
fn removable(path: &Path) -> bool {
    path.is_absolute() && path.components().filter(|c| matches!(c, Component::Normal(_))).count() >= 2 && !path.components().any(|c| c == Component::ParentDir)
}

fn to_remove(volume: &PersistentVolume, node: &str, hostname: &str) -> bool {
    volume.metadata.deletion_timestamp.is_some() && has_finalizer(volume) && is_here(volume, node, hostname)
}

/// Watches for deleted volumes of this node, removes their directories, then their finalizer.
pub async fn run(client: Client, node: Informer<Node>, node_name: String, shutdown: CancellationToken) {
    let queue: Queue<String> = Queue::new("local_path");
    let feed = queue.clone();
    let volumes = Informer::builder(Api::<PersistentVolume>::all(client.clone()))
        .on_change(move |change| {
            if let Some(volume) = change.new.as_ref().filter(|v| v.metadata.deletion_timestamp.is_some() && has_finalizer(v)) {
                feed.add(volume.metadata.name.clone().unwrap_or_default());
            }
        })
        .start(shutdown.clone());
    let work = Arc::new((client, volumes, node, node_name));
    queue::run(queue, 1, shutdown, move |name: String| {
        let work = work.clone();
        async move {
            let (client, volumes, node, node_name) = &*work;
            let Some(volume) = volumes.get_in("", &name) else { return Ok(Action::Done) };
            let hostname = node.get_in("", node_name).and_then(|n| n.metadata.labels.as_ref().and_then(|l| l.get(HOSTNAME).cloned()));
            if !to_remove(&volume, node_name, hostname.as_deref().unwrap_or(node_name)) {
                return Ok(Action::Done);
            }
            remove(client, &volume).await.map(|()| Action::Done)
        }
    })
    .await;
}

async fn remove(client: &Client, volume: &PersistentVolume) -> Result<(), String> {
    let name = volume.metadata.name.as_deref().unwrap_or("");
    let policy = volume.spec.as_ref().and_then(|s| s.persistent_volume_reclaim_policy.as_deref());
    if policy == Some("Delete")
        && let Some(path) = directory(volume)
    {
        if !removable(&path) {
            return Err(format!("persistentvolume {name}: {} is not a directory that may be removed", path.display()));
        }
        let gone = tokio::task::spawn_blocking(move || mounts::remove(&path)).await;
        gone.map_err(|e| e.to_string())?.map_err(|e| format!("persistentvolume {name}: {e}"))?;
    }
    let rest: Vec<&String> = volume.metadata.finalizers.iter().flatten().filter(|f| *f != FINALIZER).collect();
    let patch = json!({"metadata": {"resourceVersion": volume.metadata.resource_version, "finalizers": rest}});
    let api: Api<PersistentVolume> = Api::all(client.clone());
    match api.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(e) => Err(format!("persistentvolume {name}: {e}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn check(volume: Value, expected: bool) {
        let parsed: PersistentVolume = serde_json::from_value(volume.clone()).expect("volume");
        assert_eq!(to_remove(&parsed, "n1", "host1"), expected, "{volume}");
    }

    #[test]
    fn only_deleted_volumes_of_this_node() {
        let meta = |deleted: bool, finalizer: bool, node: &str| {
            json!({"deletionTimestamp": deleted.then_some("2024-01-01T00:00:00Z"), "finalizers": if finalizer { vec![FINALIZER] } else { vec![] }, "annotations": {NODE_ANNOTATION: node}})
        };
        check(json!({"metadata": meta(true, true, "n1")}), true);
        check(json!({"metadata": meta(false, true, "n1")}), false);
        check(json!({"metadata": meta(true, false, "n1")}), false);
        check(json!({"metadata": meta(true, true, "n2")}), false);
        let affinity = json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": ["host1"]}]}]}});
        check(json!({"metadata": meta(true, true, ""), "spec": {"nodeAffinity": affinity}}), true);
    }

    #[test]
    fn system_directories_are_not_removable() {
        for (path, expected) in [("/", false), ("/etc", false), ("/var/lib/x/pv", true), ("/var/../etc", false), ("rel/x", false)] {
            assert_eq!(removable(Path::new(path)), expected, "{path}");
        }
    }
}
