//! systemd's notification protocol (`Type=notify`, `WatchdogSec=`); without systemd every call does nothing.

use std::time::Duration;

use sd_notify::NotifyState;
use tokio_util::sync::CancellationToken;

use crate::health::Health;

/// The service is up.
pub fn ready() {
    send(&[NotifyState::Ready]);
}

/// The service is draining.
pub fn stopping() {
    send(&[NotifyState::Stopping]);
}

/// One line for `systemctl status`.
pub fn status(text: &str) {
    send(&[NotifyState::Status(text)]);
}

/// Sends `READY=1` when every check holds, the watchdog's pings while the process is live, and `STOPPING=1` at the end.
/// Returns when `shutdown` is cancelled. systemd then restarts a role whose liveness probes fail for `WatchdogSec=`.
pub async fn run(health: Health, shutdown: CancellationToken) {
    tokio::select! {
        () = health.wait_ready() => ready(),
        () = shutdown.cancelled() => {}
    }
    match sd_notify::watchdog_enabled() {
        Some(limit) => {
            tokio::select! {
                () = watchdog(&health, limit / 2) => {}
                () = shutdown.cancelled() => {}
            }
        }
        None => shutdown.cancelled().await,
    }
    stopping();
}

async fn watchdog(health: &Health, interval: Duration) {
    let mut ticks = tokio::time::interval(interval.max(Duration::from_millis(10)));
    loop {
        ticks.tick().await;
        if health.is_live() {
            send(&[NotifyState::Watchdog]);
        }
    }
}

fn send(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "cannot notify systemd");
    }
}
