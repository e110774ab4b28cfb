//! One step of a pod's actor: compute the status, decide, start tasks.

use super::*;

impl Actor {
    /// Returns true when nothing is left to do for the pod, ever.
    pub(super) fn step(&mut self) -> bool {
        if !self.listed {
            return false;
        }
        let begun = std::time::Instant::now();
        self.wake = self.wake.filter(|w| *w > Instant::now());
        let now = Timestamp::now();
        if self.life == Life::Running && self.active_deadline().is_some_and(|d| now >= d) {
            let message = "Pod was active on the node longer than the specified deadline";
            self.facts.failed = Some(Why::new("DeadlineExceeded", message));
            self.shared.event(&self.pod, None, EventType::Normal, "DeadlineExceeded", message);
        }
        let observed = self.observed();
        self.update_status(&observed, now);
        if self.life == Life::Running && self.must_end() {
            self.begin_ending();
        }
        if self.life == Life::Running {
            self.drive(&observed, now);
            // What was decided shows in the status: back-offs are known only now.
            self.update_status(&observed, now);
        }
        self.follow_probes(&observed);
        let finished = match self.life {
            Life::Ended => self.after_end(),
            Life::Clean => self.gone,
            _ => false,
        };
        self.write_status();
        let operation = if self.first_running { "sync" } else { "create" };
        metrics::POD_WORKER.with_label_values(&[operation]).observe(begun.elapsed().as_secs_f64());
        finished
    }

    /// The kubelet's end of the pod, whatever the reason.
    fn must_end(&self) -> bool {
        let over = model::is_terminal_phase(self.status.phase.as_deref().unwrap_or(""));
        over || self.gone || self.pod.metadata.deletion_timestamp.is_some() || self.facts.failed.is_some()
    }

    fn update_status(&mut self, observed: &Observed, now: Timestamp) {
        if self.rejected || self.frozen {
            return;
        }
        self.facts.host_ips = self.shared.host_ips.read().clone();
        self.facts.terminal = self.life != Life::Running;
        self.facts.sandbox_problem = plan::sandbox_problem(&self.pod, observed).unwrap_or("");
        let mut previous = self.status.clone();
        // Conditions that others own are the API's.
        if previous.start_time.is_none() {
            previous.start_time = self.reported.start_time.clone();
        }
        let mut next = status::compute(&self.pod, &previous, observed, &self.facts, now);
        // Between the end of containers and their being counted, a phase must not look final too early.
        if self.life == Life::Ending && model::is_terminal_phase(next.phase.as_deref().unwrap_or("")) && observed.running().next().is_some() {
            next.phase = previous.phase.clone().or(next.phase);
            next.reason = previous.reason.clone();
            next.message = previous.message.clone();
        }
        if matches!(self.life, Life::Ended | Life::Clean) {
            status::finalize(&self.pod, &mut next);
        }
        self.status = next;
        if !self.first_running && self.status.phase.as_deref() == Some("Running") {
            self.first_running = true;
            if !self.adopted
                && let Some(start) = self.facts.start_time
            {
                metrics::POD_START.observe(now.duration_since(start).as_secs_f64().max(0.0));
            }
        }
    }

    pub(super) fn publish(&mut self) {
        let mut containers: Vec<Container> = self.containers.values().cloned().collect();
        containers.sort_by(|a, b| b.created_at.cmp(&a.created_at).then(b.attempt.cmp(&a.attempt)));
        let view = View {
            pod: self.pod.clone(),
            status: self.status.clone(),
            containers,
            terminated: matches!(self.life, Life::Ended | Life::Clean),
            rejected: self.rejected,
        };
        self.view.send_replace(view);
    }

    /// Carries out the plan for a pod that is to run.
    fn drive(&mut self, observed: &Observed, now: Timestamp) {
        if self.sandbox.is_some() {
            return;
        }
        let plan = plan::plan(&self.pod, observed, &self.facts.verdicts);
        for kill in &plan.kill {
            if !self.kills.contains_key(&kill.id) {
                self.kill(kill);
            }
        }
        if !plan.sandbox_problem.is_empty() {
            self.replace_sandbox(&plan, observed);
            return;
        }
        if plan.kill_pod {
            // Nothing is left to run: the phase says so once the last container has ended.
            self.begin_ending();
            return;
        }
        self.remove_old(observed);
        self.resize(observed);
        self.renew_volumes(now);
        self.start(plan.start, observed, now);
    }

    /// The pod with the resources that it is granted: changed ones only if the node has them.
    pub(super) fn allocate(&mut self, pod: Arc<Pod>) -> Arc<Pod> {
        self.facts.resize_pending = None;
        let changed = model::all(&pod).into_iter().any(|(_, c)| model::find(&self.pod, &c.name).is_some_and(|(_, old)| old.resources != c.resources));
        if !changed || pod.metadata.deletion_timestamp.is_some() {
            return pod;
        }
        let uid = model::uid(&pod);
        let others: Vec<Arc<Pod>> = self.shared.table.active().into_iter().filter(|p| model::uid(p) != uid).collect();
        let (cpu, memory, _) = self.shared.machine.allocatable();
        for (resource, capacity) in [("cpu", cpu), ("memory", memory)] {
            let wanted = model::pod_request(&pod, resource);
            let used: i64 = others.iter().map(|p| model::pod_request(p, resource)).sum();
            if wanted > capacity {
                self.facts.resize_pending = Some(Why::new("Infeasible", format!("Node didn't have enough capacity: {resource}, requested: {wanted}, capacity: {capacity}")));
            } else if wanted + used > capacity {
                self.facts.resize_pending = Some(Why::new("Deferred", format!("Node didn't have enough resource: {resource}, requested: {wanted}, used: {used}, capacity: {capacity}")));
                self.wake_in(RETRY);
            }
        }
        if self.facts.resize_pending.is_none() {
            return pod;
        }
        let mut kept = (*pod).clone();
        if let Some(spec) = &mut kept.spec {
            for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
                if let Some((_, old)) = model::find(&self.pod, &container.name) {
                    container.resources = old.resources;
                }
            }
        }
        Arc::new(kept)
    }

    /// Brings running containers' resources to what their specification says.
    fn resize(&mut self, observed: &Observed) {
        let mut pending = false;
        let due = self.resize_retry.is_none_or(|at| at <= Instant::now());
        for container in observed.running() {
            let Some((_, spec)) = model::find(&self.pod, &container.name) else { continue };
            let needed = crate::pod::resources::resize(&spec, &container.resources);
            if needed != Some(crate::pod::resources::Resize::InPlace) {
                continue;
            }
            pending = true;
            if !due || !self.resizes.insert(container.id.clone()) {
                continue;
            }
            let wanted = crate::pod::resources::of_container(&spec, container.resources.pids);
            let (shared, pod, id, tell) = (self.shared.clone(), self.pod.clone(), container.id.clone(), self.mailbox.clone());
            tokio::spawn(async move {
                let limits = crate::pod::resources::of_pod(&pod, shared.config.pod_pids_limit);
                if let Err(error) = crate::cgroup::apply(&shared.cgroup_parent(&pod), &limits) {
                    tracing::warn!(pod = model::describe(&pod), %error, "cannot resize the pod as a whole");
                }
                let result = shared.runtime.update(&id, &wanted).await.map_err(|e| e.to_string());
                let _ = tell.send(Msg::Resized { id, result }).await;
            });
        }
        if !pending {
            self.facts.resizing = None;
            self.resize_retry = None;
        } else if self.facts.resizing.is_none() {
            self.facts.resizing = Some(Why::default());
        }
    }

    fn kill(&mut self, kill: &plan::Kill) {
        let Some(container) = self.containers.get(&kill.id).cloned() else { return };
        let probe_grace = model::find(&self.pod, &kill.name).and_then(|(_, c)| {
            let probe = match kill.reason {
                KillReason::LivenessProbe => c.liveness_probe,
                KillReason::StartupProbe => c.startup_probe,
                KillReason::Other => None,
            };
            probe?.termination_grace_period_seconds
        });
        let (sender, grace) = watch::channel(probe_grace.unwrap_or_else(|| model::grace(&self.pod)));
        self.kills.insert(kill.id.clone(), (kill.name.clone(), sender));
        self.stop_probes(&kill.id);
        let (shared, pod, tell) = (self.shared.clone(), self.pod.clone(), self.mailbox.clone());
        let ip = self.addresses.first().cloned().unwrap_or_default();
        let order = Order { container, message: kill.message.clone(), grace };
        let id = kill.id.clone();
        tokio::spawn(async move {
            let result = stop::stop(&shared, Some(&pod), order, &ip).await.map_err(|e| e.to_string());
            let _ = tell.send(Msg::Killed { id, result }).await;
        });
    }

    fn replace_sandbox(&mut self, plan: &plan::Plan, observed: &Observed) {
        if self.sandbox_retry.is_some_and(|at| at > Instant::now()) || self.batch.is_some() {
            return;
        }
        if !plan.create_sandbox {
            self.begin_ending();
            return;
        }
        let attempt = observed.sandboxes.iter().map(|s| s.attempt + 1).max().unwrap_or(0);
        let (shared, pod, tell, stale) = (self.shared.clone(), self.pod.clone(), self.mailbox.clone(), plan.kill_pod);
        let addresses = self.addresses.clone();
        if attempt == 0 {
            metrics::STARTED_PODS.inc();
        } else {
            self.shared.event(&self.pod, None, EventType::Normal, "SandboxChanged", "Pod sandbox changed, it will be killed and re-created.");
        }
        self.sandbox = Some(tokio::spawn(async move {
            let result = async {
                if stale {
                    let (_keep, grace) = watch::channel(model::grace(&pod));
                    let ending = Ending { uid: model::uid(&pod).to_owned(), pod: Some(pod.clone()), reason: String::new(), grace, pod_ip: addresses.first().cloned().unwrap_or_default() };
                    stop::stop_pod(&shared, &ending).await.map_err(|e| SandboxFailure::Sandbox(e.to_string()))?;
                }
                start::sandbox(&shared, &pod, attempt).await
            };
            let result = result.await;
            if result.is_err() {
                metrics::STARTED_PODS_ERRORS.inc();
            }
            let _ = tell.send(Msg::Sandbox(result)).await;
        }));
    }

    /// Removes dead containers beyond those kept for `--previous`, and replaced sandboxes.
    fn remove_old(&mut self, observed: &Observed) {
        if self.batch.is_some() {
            return;
        }
        let keep = self.shared.config.maximum_dead_containers_per_container.max(1);
        let mut seen: HashMap<&str, usize> = HashMap::new();
        let mut old: Vec<String> = Vec::new();
        for container in &observed.containers {
            let nth = seen.entry(container.name.as_str()).or_default();
            *nth += 1;
            // The newest is the container itself; `keep` more may stay.
            if *nth > keep + 1 && !container.running() {
                old.push(container.id.clone());
            }
        }
        if observed.sandbox().is_some() {
            old.extend(observed.sandboxes.iter().skip(1).filter(|s| !s.running()).map(|s| s.id.clone()));
        }
        for id in old {
            self.containers.remove(&id);
            let shared = self.shared.clone();
            tokio::spawn(async move {
                if let Err(error) = shared.runtime.remove(&id).await {
                    tracing::warn!(container = id, %error, "cannot remove a dead container");
                }
            });
        }
    }

    fn renew_volumes(&mut self, now: Timestamp) {
        let due = self.refresh.is_some_and(|r| now >= r) || (self.adopted && self.refresh.is_none() && !self.first_refresh());
        if !due || self.refreshing || self.batch.is_some() {
            return;
        }
        self.refreshing = true;
        self.refresh = None;
        let (shared, pod, tell, addresses) = (self.shared.clone(), self.pod.clone(), self.mailbox.clone(), self.addresses.clone());
        tokio::spawn(async move {
            let result = shared.volumes.setup(&pod, &shared.env_runtime(&addresses)).await;
            let _ = tell.send(Msg::Volumes(result)).await;
        });
    }

    /// An adopted pod's volumes are looked at once, to learn when its tokens are due.
    fn first_refresh(&mut self) -> bool {
        !std::mem::replace(&mut self.adopted, false)
    }

    fn start(&mut self, names: Vec<String>, observed: &Observed, now: Timestamp) {
        if names.is_empty() || self.batch.is_some() {
            return;
        }
        let killing: HashSet<String> = self.kills.values().map(|(name, _)| name.clone()).collect();
        let mut ready = Vec::new();
        let over: HashSet<String> = self
            .status
            .ephemeral_container_statuses
            .iter()
            .flatten()
            .filter(|s| s.state.as_ref().is_some_and(|s| s.terminated.is_some()))
            .map(|s| s.name.clone())
            .collect();
        for name in names {
            if over.contains(&name) {
                continue;
            }
            if killing.contains(&name) || self.not_before.get(&name).is_some_and(|at| *at > Instant::now()) {
                continue;
            }
            self.not_before.remove(&name);
            if !self.in_backoff(&name, observed, now) {
                ready.push(name);
            }
        }
        let Some(sandbox) = observed.sandbox().filter(|_| !ready.is_empty()) else { return };
        let known = self.status.container_statuses.iter().flatten().chain(self.status.init_container_statuses.iter().flatten());
        let counted: HashMap<&str, u32> = known
            .filter(|s| s.last_state.as_ref().is_some_and(|l| l.terminated.is_some()) || s.state.as_ref().is_some_and(|l| l.terminated.is_some()))
            .filter_map(|s| Some((s.name.as_str(), u32::try_from(s.restart_count).ok()?)))
            .collect();
        let attempts = ready
            .iter()
            .map(|name| {
                let by_runtime = observed.next_attempt(name);
                let by_status = counted.get(name.as_str()).copied().unwrap_or(0);
                (name.clone(), by_runtime.max(by_status))
            })
            .collect();
        let batch = start::Batch {
            pod: self.pod.clone(),
            names: ready.clone(),
            sandbox: sandbox.id.clone(),
            addresses: self.addresses.clone(),
            attempts,
            running: observed.running().map(|c| (c.name.clone(), c.id.clone())).collect(),
        };
        let task = tokio::spawn(start::run(self.shared.clone(), batch, self.mailbox.clone()));
        self.batch = Some((task, ready.into_iter().collect()));
    }

    fn in_backoff(&mut self, name: &str, observed: &Observed, now: Timestamp) -> bool {
        let Some(last) = observed.latest(name).filter(|c| c.state == State::Exited) else { return false };
        let ended = last.finished_at.unwrap_or(now);
        let key = format!("{name}_{}", last.hash);
        match self.backoff.until(&key, ended, now) {
            Some((until, delay)) => {
                let described = model::describe(&self.pod);
                let message = format!("back-off {} restarting failed container={name} pod={described}", go_duration(delay));
                self.shared.event(&self.pod, Some(name), EventType::Warning, "BackOff", format!("Back-off restarting failed container {name} in pod {described}"));
                self.facts.errors.insert(name.to_owned(), Why::new("CrashLoopBackOff", message));
                let left = Duration::try_from(until.duration_since(now)).unwrap_or_default();
                self.not_before.insert(name.to_owned(), Instant::now() + left);
                true
            }
            None => {
                self.backoff.next(&key, ended, now);
                false
            }
        }
    }

    /// Probes run for running containers, and readiness goes on while a pod ends.
    fn follow_probes(&mut self, observed: &Observed) {
        let live: HashSet<&str> = match self.life {
            Life::Running => observed.running().map(|c| c.id.as_str()).collect(),
            _ => HashSet::new(),
        };
        let over: Vec<String> = self.probes.keys().filter(|id| !live.contains(id.as_str())).cloned().collect();
        over.iter().for_each(|id| self.stop_probes(id));
        if self.life != Life::Running {
            return;
        }
        for container in observed.running() {
            if self.probes.contains_key(&container.id) || self.facts.starting.contains(&container.id) || self.kills.contains_key(&container.id) {
                continue;
            }
            let Some((kind, spec)) = model::find(&self.pod, &container.name) else { continue };
            let any = model::probes(&spec).iter().any(|(_, p)| p.is_some());
            if !any || matches!(kind, Kind::Init | Kind::Ephemeral) {
                continue;
            }
            self.start_probes(container, spec);
        }
    }

    fn start_probes(&mut self, container: &Container, spec: k8s_openapi::api::core::v1::Container) {
        let pod_ip = if model::host_network(&self.pod) { self.shared.host_ips.read().first().cloned() } else { self.addresses.first().cloned() };
        let checker = crate::pod::check::Checker {
            runtime: self.shared.runtime.clone(),
            id: container.id.clone(),
            pod_ip: pod_ip.unwrap_or_default(),
            pod: model::name(&self.pod).to_owned(),
            namespace: model::namespace(&self.pod).to_owned(),
            uid: model::uid(&self.pod).to_owned(),
        };
        let started_at = container.started_at.unwrap_or_else(Timestamp::now);
        let (shared, pod, name) = (self.shared.clone(), self.pod.clone(), spec.name.clone());
        let unhealthy: probe::Unhealthy = Arc::new(move |kind, outcome| {
            use crate::pod::check::Outcome;
            let (reason, message) = match outcome {
                Outcome::Success => return,
                Outcome::Warning(text) => ("ProbeWarning", format!("{} probe warning: {text}", kind.title())),
                Outcome::Failure(text) => ("Unhealthy", format!("{} probe failed: {text}", kind.title())),
                Outcome::Error(text) => ("Unhealthy", format!("{} probe errored and resulted in unknown state: {text}", kind.title())),
            };
            shared.event(&pod, Some(&name), EventType::Warning, reason, message);
        });
        let already_started = self.facts.verdicts.get(&container.id).is_some_and(|v| v.startup == Some(true));
        let subject = probe::Subject { id: container.id.clone(), container: spec, started_at, adopted: started_at < self.shared.started, already_started, checker, unhealthy };
        let stop = CancellationToken::new();
        self.probes.insert(container.id.clone(), stop.clone());
        let (reports, mut heard) = mpsc::channel(4);
        tokio::spawn(probe::run(subject, reports, stop));
        let tell = self.mailbox.clone();
        tokio::spawn(async move {
            while let Some(report) = heard.recv().await {
                if tell.send(Msg::Probe(report)).await.is_err() {
                    return;
                }
            }
        });
    }

    fn stop_probes(&mut self, id: &str) {
        if let Some(stop) = self.probes.remove(id) {
            stop.cancel();
            if let Some(container) = self.containers.get(id) {
                metrics::forget_probes((model::name(&self.pod), model::namespace(&self.pod), model::uid(&self.pod)), &container.name);
            }
        }
    }

    fn begin_ending(&mut self) {
        if let Some((task, _)) = self.batch.take() {
            task.abort();
        }
        if let Some(task) = self.sandbox.take() {
            task.abort();
        }
        self.facts.starting.clear();
        let grace = self.grace_override.unwrap_or_else(|| model::grace(&self.pod));
        for (_, sender) in self.kills.values() {
            sender.send_if_modified(|g| if grace < *g { *g = grace; true } else { false });
        }
        let (sender, receiver) = watch::channel(grace);
        self.ending = Some(sender);
        self.life = Life::Ending;
        let ending = Ending {
            uid: model::uid(&self.pod).to_owned(),
            pod: Some(self.pod.clone()),
            reason: String::new(),
            grace: receiver,
            pod_ip: self.addresses.first().cloned().unwrap_or_default(),
        };
        let (shared, tell) = (self.shared.clone(), self.mailbox.clone());
        tokio::spawn(async move {
            let result = stop::stop_pod(&shared, &ending).await.map_err(|e| e.to_string());
            let _ = tell.send(Msg::Ended(result)).await;
        });
    }

    /// The pod's containers have ended: its volumes go; its containers stay for their logs until it is deleted.
    fn after_end(&mut self) -> bool {
        let leaving = self.gone || self.pod.metadata.deletion_timestamp.is_some();
        if !leaving {
            self.tidy();
            return false;
        }
        // The last status must be in the API before the object goes.
        let told = self.gone || model::is_static(&self.pod) || self.write.settled(&self.reported, &self.status);
        if told && !self.cleaning {
            self.cleaning = true;
            let (shared, pod, tell, api) = (self.shared.clone(), self.pod.clone(), self.mailbox.clone(), !self.gone);
            tokio::spawn(async move {
                let result = crate::pod::cleanup::pod(&shared, &pod, api).await;
                let _ = tell.send(Msg::CleanedUp(result)).await;
            });
        }
        false
    }
}

impl Actor {
    /// A pod that has ended gives its volumes back at once.
    fn tidy(&mut self) {
        if self.tidied || self.rejected {
            return;
        }
        self.tidied = true;
        let (shared, pod) = (self.shared.clone(), self.pod.clone());
        tokio::spawn(async move {
            if let Err(error) = shared.volumes.teardown(model::uid(&pod)).await {
                tracing::warn!(pod = model::describe(&pod), %error, "cannot take the volumes of an ended pod away");
            }
            crate::cgroup::remove(&shared.cgroup_parent(&pod));
        });
    }
}

/// A duration as Go prints it: `10s`, `1m20s`, `5m0s`.
fn go_duration(duration: SignedDuration) -> String {
    let seconds = duration.as_secs();
    match (seconds / 60, seconds % 60) {
        (0, s) => format!("{s}s"),
        (m, s) => format!("{m}m{s}s"),
    }
}
