//! Named health checks: what `/healthz`, `/livez` and `/readyz` tell.
//!
//! Follows upstream's `k8s.io/apiserver/pkg/server/healthz` in meaning: `/livez` holds what a restart would cure, `/readyz`
//! and `/healthz` hold everything. A check is pushed by its owner ([`Check`]) or asked for when somebody looks (a probe).

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

/// Asked at each look; must answer at once, without blocking.
pub type Probe = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// How soon a failing probe is asked again by [`Health::wait_ready`]: a probe has no event of its own.
const PROBE_AGAIN: Duration = Duration::from_millis(50);

/// The checks of one process. Clones share them.
#[derive(Clone)]
pub struct Health {
    inner: Arc<Inner>,
}

struct Inner {
    rows: RwLock<Vec<Row>>,
    changed: watch::Sender<()>,
}

#[derive(Clone)]
struct Row {
    name: &'static str,
    live: bool,
    source: Source,
}

#[derive(Clone)]
enum Source {
    Pushed(Arc<Mutex<Result<(), String>>>),
    Asked(Probe),
}

/// One pushed readiness check. Starts as not ready; the owner says when it is, and when it is no longer.
#[derive(Clone)]
pub struct Check {
    state: Arc<Mutex<Result<(), String>>>,
    health: Health,
}

/// Which of the three endpoints is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `/healthz`: all checks.
    Healthz,
    /// `/livez`: the liveness probes only.
    Livez,
    /// `/readyz`: all checks.
    Readyz,
}

/// A check's name and how it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub name: &'static str,
    pub result: Result<(), String>,
}

// === impl Kind ===

impl Kind {
    /// The endpoint's name, without a slash.
    pub fn name(self) -> &'static str {
        match self {
            Self::Healthz => "healthz",
            Self::Livez => "livez",
            Self::Readyz => "readyz",
        }
    }
}

// === impl Check ===

impl Check {
    /// It holds.
    pub fn ok(&self) {
        self.set(Ok(()));
    }

    /// It does not, and why.
    pub fn fail(&self, message: impl Into<String>) {
        self.set(Err(message.into()));
    }

    fn set(&self, result: Result<(), String>) {
        let mut state = self.state.lock();
        if *state != result {
            *state = result;
            drop(state);
            self.health.inner.changed.send_replace(());
        }
    }
}

// === impl Health ===

impl Default for Health {
    fn default() -> Self {
        Self::new()
    }
}

impl Health {
    /// Only `ping`, which always holds.
    pub fn new() -> Self {
        let ping: Probe = Arc::new(|| Ok(()));
        let rows = vec![Row { name: "ping", live: true, source: Source::Asked(ping) }];
        Self { inner: Arc::new(Inner { rows: RwLock::new(rows), changed: watch::Sender::new(()) }) }
    }

    /// Registers a readiness check that its owner pushes. Not ready until [`Check::ok`]. A name that is taken already is
    /// taken over: the last to register owns it.
    pub fn check(&self, name: &'static str) -> Check {
        let state = Arc::new(Mutex::new(Err("not ready yet".to_owned())));
        self.register(Row { name, live: false, source: Source::Pushed(Arc::clone(&state)) });
        Check { state, health: self.clone() }
    }

    /// Registers a readiness check that is asked at each look.
    pub fn probe(&self, name: &'static str, probe: Probe) {
        self.register(Row { name, live: false, source: Source::Asked(probe) });
    }

    /// Registers a check of `/livez` (and of the other two): one that a restart would cure.
    pub fn live_probe(&self, name: &'static str, probe: Probe) {
        self.register(Row { name, live: true, source: Source::Asked(probe) });
    }

    /// Makes `/readyz` fail from now on, so that balancers send no new work during the drain.
    pub fn stopping(&self) {
        self.check("shutdown").fail("process is shutting down");
    }

    fn register(&self, row: Row) {
        let mut rows = self.inner.rows.write();
        match rows.iter_mut().find(|known| known.name == row.name) {
            Some(known) => *known = row,
            None => rows.push(row),
        }
        drop(rows);
        self.inner.changed.send_replace(());
    }

    /// Every check behind an endpoint and how it stands, in the order of registration.
    pub fn verdicts(&self, kind: Kind) -> Vec<Verdict> {
        let rows = self.inner.rows.read().clone();
        rows.into_iter()
            .filter(|row| kind != Kind::Livez || row.live)
            .map(|row| Verdict {
                name: row.name,
                result: match &row.source {
                    Source::Pushed(state) => state.lock().clone(),
                    Source::Asked(probe) => probe(),
                },
            })
            .collect()
    }

    /// Whether `/readyz` would say `ok`.
    pub fn is_ready(&self) -> bool {
        self.verdicts(Kind::Readyz).iter().all(|v| v.result.is_ok())
    }

    /// Whether `/livez` would say `ok`.
    pub fn is_live(&self) -> bool {
        self.verdicts(Kind::Livez).iter().all(|v| v.result.is_ok())
    }

    /// Waits until every check holds. Pushed checks wake it; a failing probe is asked again after 50 ms.
    pub async fn wait_ready(&self) {
        let mut changed = self.inner.changed.subscribe();
        loop {
            changed.borrow_and_update();
            let pushed_fails = self.pushed_fails();
            if !pushed_fails && self.is_ready() {
                return;
            }
            // The sender lives in `self.inner`, so `changed()` cannot fail while we wait.
            if pushed_fails {
                let _ = changed.changed().await;
            } else {
                let _ = tokio::time::timeout(PROBE_AGAIN, changed.changed()).await;
            }
        }
    }

    fn pushed_fails(&self) -> bool {
        self.inner.rows.read().iter().any(|row| match &row.source {
            Source::Pushed(state) => state.lock().is_err(),
            Source::Asked(_) => false,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn check(health: &Health, kind: Kind) -> String {
        let one = |v: Verdict| format!("{}{}", if v.result.is_ok() { '+' } else { '-' }, v.name);
        health.verdicts(kind).into_iter().map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn livez_holds_less_than_readyz() {
        let health = Health::new();
        let store = health.check("store");
        health.live_probe("loop", Arc::new(|| Err("stuck".into())));
        assert_eq!(check(&health, Kind::Readyz), "+ping -store -loop");
        assert_eq!(check(&health, Kind::Livez), "+ping -loop");
        store.ok();
        assert_eq!(check(&health, Kind::Healthz), "+ping +store -loop");
        health.live_probe("loop", Arc::new(|| Ok(())));
        assert!(health.is_ready() && health.is_live());
        health.stopping();
        assert_eq!(check(&health, Kind::Readyz), "+ping +store +loop -shutdown");
        assert!(health.is_live());
    }

    #[tokio::test]
    async fn wait_ready_wakes_on_the_last_check() {
        let health = Health::new();
        let (a, b) = (health.check("a"), health.check("b"));
        let flag = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&flag);
        health.probe("flag", Arc::new(move || if seen.load(Ordering::SeqCst) { Ok(()) } else { Err("no".into()) }));
        let waiter = tokio::spawn({
            let health = health.clone();
            async move { health.wait_ready().await }
        });
        a.ok();
        b.ok();
        tokio::task::yield_now().await;
        assert!(!waiter.is_finished());
        flag.store(true, Ordering::SeqCst);
        tokio::time::timeout(Duration::from_secs(5), waiter).await.expect("ready within 5 s").expect("no panic");
    }
}
