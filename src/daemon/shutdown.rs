//! SIGTERM and SIGINT become one token; a second signal ends the process at once.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A token that is cancelled by the first SIGTERM or SIGINT. The second one ends the process with status 1, as upstream's
/// `SetupSignalHandler` does, for the user who will not wait for the drain. Must be called inside a tokio runtime.
pub fn on_signals() -> CancellationToken {
    let token = CancellationToken::new();
    let handlers = signal(SignalKind::terminate()).and_then(|term| Ok((term, signal(SignalKind::interrupt())?)));
    match handlers {
        Ok((mut term, mut int)) => {
            let stop = token.clone();
            tokio::spawn(async move {
                for round in 0..2 {
                    let name = tokio::select! {
                        _ = term.recv() => "SIGTERM",
                        _ = int.recv() => "SIGINT",
                    };
                    if round == 0 {
                        tracing::info!(signal = name, "stopping");
                        stop.cancel();
                    }
                }
                tracing::warn!("second signal: ending without drain");
                std::process::exit(1);
            });
        }
        Err(error) => tracing::error!(%error, "cannot install signal handlers: stop this process with SIGKILL"),
    }
    token
}
