//! Stopping containers: PreStop hook, stop signal, grace, kill.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{LifecycleHandler, Pod};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use windlass_client::events::EventType;

use super::check::{self, Outcome};
use super::{model, plan};
use crate::runtime::{Container, Error, label};
use crate::shared::Shared;

/// Even after a PreStop hook that took all the grace, the container gets this long.
const MINIMUM_GRACE: Duration = Duration::from_secs(2);
/// How long a killed container may take to be gone before its stop is tried again.
const KILL_WAIT: Duration = Duration::from_secs(30);

/// How a container is to be stopped.
#[derive(Clone)]
pub struct Order {
    pub container: Container,
    pub message: String,
    /// Seconds, and may be shortened while it runs.
    pub grace: watch::Receiver<i64>,
}

fn seconds(value: i64) -> Duration {
    Duration::from_secs(u64::try_from(value).unwrap_or(0))
}

/// Resolves once `grace` seconds since `begun` are over, whatever becomes of `grace` meanwhile.
async fn grace_over(begun: Instant, least: Duration, grace: &mut watch::Receiver<i64>) {
    loop {
        let deadline = begun + seconds(*grace.borrow_and_update()).max(least);
        tokio::select! {
            () = sleep_until(deadline) => return,
            changed = grace.changed() => if changed.is_err() {
                sleep_until(deadline).await;
                return;
            },
        }
    }
}

/// Stops one container of `pod` (`None` when nothing is known of it any more). Returns when it no longer runs.
pub async fn stop(shared: &Arc<Shared>, pod: Option<&Pod>, mut order: Order, pod_ip: &str) -> Result<(), Error> {
    let id = order.container.id.clone();
    let name = order.container.name.clone();
    if let Some(pod) = pod {
        shared.event(pod, Some(&name), EventType::Normal, "Killing", order.message.clone());
    }
    let begun = Instant::now();
    let hook = pod.and_then(|p| model::find(p, &name)).and_then(|(_, c)| Some((c.lifecycle.clone()?.pre_stop?, c)));
    let mut least = Duration::ZERO;
    if let (Some(pod), Some((hook, spec))) = (pod, hook) {
        if *order.grace.borrow() > 0 {
            let mut grace = order.grace.clone();
            tokio::select! {
                result = run_hook(shared, pod, &spec, &id, &hook, pod_ip, seconds(*order.grace.borrow())) => {
                    if let Err(error) = result {
                        tracing::warn!(pod = model::describe(pod), container = name, error, "PreStop hook failed");
                        shared.event(pod, Some(&name), EventType::Warning, "FailedPreStopHook", "PreStopHook failed");
                    }
                }
                () = grace_over(begun, Duration::ZERO, &mut grace) => {
                    tracing::warn!(pod = model::describe(pod), container = name, "PreStop hook did not end within the grace period");
                }
            }
            least = begun.elapsed() + MINIMUM_GRACE;
        }
    }
    match shared.runtime.signal(&id, None).await {
        Err(Error::NotFound { .. }) => return Ok(()),
        other => other?,
    }
    let ended = tokio::select! {
        result = shared.runtime.wait(&id) => gone(result)?,
        () = grace_over(begun, least, &mut order.grace) => false,
    };
    if !ended {
        gone(shared.runtime.signal(&id, Some("SIGKILL")).await)?;
        match tokio::time::timeout(KILL_WAIT, shared.runtime.wait(&id)).await {
            Ok(result) => gone(result)?,
            Err(_) => return Err(Error::Timeout { operation: "killing a container", after: KILL_WAIT }),
        };
    }
    Ok(())
}

/// A container that does not exist has ended.
fn gone(result: Result<(), Error>) -> Result<bool, Error> {
    match result {
        Ok(()) | Err(Error::NotFound { .. }) => Ok(true),
        Err(e) => Err(e),
    }
}

/// Runs a lifecycle hook.
///
/// # Errors
/// What the hook's event says.
pub async fn run_hook(
    shared: &Arc<Shared>,
    pod: &Pod,
    spec: &k8s_openapi::api::core::v1::Container,
    id: &str,
    hook: &LifecycleHandler,
    pod_ip: &str,
    timeout: Duration,
) -> Result<(), String> {
    if let Some(sleep) = &hook.sleep {
        tokio::time::sleep(seconds(sleep.seconds).min(timeout)).await;
        return Ok(());
    }
    if let Some(exec) = &hook.exec {
        let command = exec.command.clone().unwrap_or_default();
        let named = format!("Exec lifecycle hook ([{}]) for Container \"{}\" in Pod \"{}\" failed", command.join(" "), spec.name, model::describe(pod));
        return match shared.runtime.exec_sync(id, &command, timeout, 10 * 1024).await {
            Ok(result) if result.exit_code == 0 => Ok(()),
            Ok(result) => {
                let mut output = result.stdout;
                output.extend(result.stderr);
                Err(format!("{named} - error: command '{}' exited with {}: , message: \"{}\"", command.join(" "), result.exit_code, String::from_utf8_lossy(&output)))
            }
            Err(e) => Err(format!("{named} - error: {e}")),
        };
    }
    if let Some(get) = &hook.http_get {
        let target = check::http_target(get, spec, pod_ip)?;
        let path = target.0.to_string();
        return match tokio::time::timeout(timeout, check::http_get(target)).await {
            // An answer of any kind is enough, as upstream.
            Ok(Outcome::Success | Outcome::Warning(_)) => Ok(()),
            Ok(Outcome::Failure(e)) if e.starts_with("HTTP probe failed") => Ok(()),
            Ok(Outcome::Failure(e) | Outcome::Error(e)) => Err(format!("HTTP lifecycle hook ({path}) for Container \"{}\" in Pod \"{}\" failed - error: {e}", spec.name, model::describe(pod))),
            Err(_) => Err(format!("HTTP lifecycle hook ({path}) for Container \"{}\" in Pod \"{}\" timed out", spec.name, model::describe(pod))),
        };
    }
    Err("invalid handler: it has no action that this node knows".into())
}

/// Everything that ends with a pod: its containers in order, its network, its sandbox.
pub struct Ending {
    pub pod: Option<Arc<Pod>>,
    pub uid: String,
    pub reason: String,
    pub grace: watch::Receiver<i64>,
    pub pod_ip: String,
}

/// Stops all of a pod. Idempotent: what has ended is passed over.
pub async fn stop_pod(shared: &Arc<Shared>, ending: &Ending) -> Result<(), Error> {
    let found = shared.runtime.list_pod(&ending.uid).await?;
    let observed = plan::Observed::new(found, Vec::new());
    let order = match &ending.pod {
        Some(pod) => plan::termination_order(pod, &observed),
        None => vec![observed.running().cloned().collect()],
    };
    for step in order {
        let message = |c: &Container| match ending.reason.as_str() {
            "" => format!("Stopping container {}", c.name),
            reason => reason.to_owned(),
        };
        let stops = step.into_iter().map(|container| {
            let order = Order { message: message(&container), container, grace: ending.grace.clone() };
            stop(shared, ending.pod.as_deref(), order, &ending.pod_ip)
        });
        for result in futures::future::join_all(stops).await {
            result?;
        }
    }
    stop_sandboxes(shared, &ending.uid, &observed).await
}

/// Unwires and kills the sandboxes of a pod; they hold no state worth a grace period.
pub async fn stop_sandboxes(shared: &Arc<Shared>, uid: &str, observed: &plan::Observed) -> Result<(), Error> {
    if let Err(error) = shared.network.detach(uid).await {
        return Err(Error::Refused { code: 500, message: format!("pod network of {uid}: {error}") });
    }
    for sandbox in observed.sandboxes.iter().filter(|s| s.running()) {
        gone(shared.runtime.signal(&sandbox.id, Some("SIGKILL")).await)?;
        match tokio::time::timeout(KILL_WAIT, shared.runtime.wait(&sandbox.id)).await {
            Ok(result) => gone(result)?,
            Err(_) => return Err(Error::Timeout { operation: "killing a sandbox", after: KILL_WAIT }),
        };
    }
    Ok(())
}

/// The grace that a container's own labels give it, for pods that are gone.
pub fn labelled_grace(containers: &[Container]) -> i64 {
    containers.iter().filter_map(|c| c.label(label::GRACE).parse().ok()).max().unwrap_or(30)
}
