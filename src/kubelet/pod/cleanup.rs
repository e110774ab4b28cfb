//! Takes away what a pod has left on the node.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use super::{model, report};
use crate::cgroup;
use crate::pod::resources;
use crate::shared::Shared;

/// Removes the pod's volumes, containers and cgroup; then, if `api`, the object itself.
pub async fn pod(shared: &Arc<Shared>, pod: &Pod, api: bool) -> Result<(), String> {
    let uid = model::uid(pod);
    leftovers(shared, uid).await?;
    if api && !model::is_static(pod) {
        report::delete_now(shared, pod).await?;
    }
    Ok(())
}

/// Removes everything that carries this uid. Nothing of it may run any more.
pub async fn leftovers(shared: &Arc<Shared>, uid: &str) -> Result<(), String> {
    shared.network.detach(uid).await?;
    for container in shared.runtime.list_pod(uid).await.map_err(|e| e.to_string())? {
        shared.runtime.remove(&container.id).await.map_err(|e| e.to_string())?;
    }
    shared.volumes.teardown(uid).await.map_err(|e| e.to_string())?;
    shared.images.release(uid);
    for class in ["Guaranteed", "Burstable", "BestEffort"] {
        cgroup::remove(&resources::cgroup_parent(&shared.info.cgroup_driver, &shared.config.instance, class, uid));
    }
    Ok(())
}
