//! Takes everything away that the kubelet of an instance has made on this machine.

use crate::cgroup;
use crate::config::Config;
use crate::error::Error;
use crate::pod::resources;
use crate::runtime::Runtime;
use crate::runtime::docker::Docker;
use crate::volumes::mounts;

/// Removes the instance's containers, mounts, directories and groups. Can be repeated; nothing there is fine.
/// Data of persistent volumes elsewhere stays. The kubelet must not run.
///
/// # Errors
/// When Docker cannot be asked, or a mount cannot be taken away.
pub async fn reset(config: &Config) -> Result<(), Error> {
    let docker = Docker::connect(&config.docker_endpoint, &config.instance).await?;
    let containers = docker.list().await?;
    // Sandboxes last: the others live in their namespaces.
    let (sandboxes, others): (Vec<_>, Vec<_>) = containers.into_iter().partition(|c| c.is_sandbox());
    for container in others.iter().chain(&sandboxes) {
        docker.remove(&container.id).await?;
    }
    let root = config.root_dir.clone();
    tokio::task::spawn_blocking(move || mounts::remove(&root))
        .await
        .map_err(|e| Error::Server(e.to_string()))?
        .map_err(Error::file("remove", &config.root_dir))?;
    cgroup::remove(&resources::cgroup_root(&config.instance));
    for uid in others.iter().chain(&sandboxes).map(|c| c.pod_uid.as_str()) {
        for class in ["Guaranteed", "Burstable", "BestEffort"] {
            cgroup::remove(&resources::cgroup_parent("systemd", &config.instance, class, uid));
        }
    }
    Ok(())
}
