//! Horizontal pod autoscaling on the resource metrics API.
//!
//! Metrics cannot be watched, so each autoscaler has a deadline of one sync period: the one place in the role that looks
//! again without having been told to.

mod behavior;
mod calculate;

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::{
    api::autoscaling::v2::{
        ContainerResourceMetricStatus, HorizontalPodAutoscaler, HorizontalPodAutoscalerCondition, HorizontalPodAutoscalerStatus, MetricSpec, MetricStatus, MetricTarget,
        MetricValueStatus, ResourceMetricStatus,
    },
    apimachinery::pkg::{api::resource::Quantity as Text, apis::meta::v1::Time},
};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Value, json};
use windlass_api::{
    quantity::{Format, Quantity},
    selector::LabelSelector,
};
use windlass_client::{
    events::{self, EventType, Recorder},
    informer::{Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    config::Config,
    context::{Context, Worker},
    discovery::{self, Resource},
    pod::PodView,
    write::{self, ApiErrorExt},
};
use behavior::{Change, History, decide};
use calculate::{Proposal, Rules, Sample, Target, propose};

struct Controller {
    client: kube::Client,
    recorder: Recorder,
    config: Arc<Config>,
    autoscalers: Informer<HorizontalPodAutoscaler>,
    pods: Informer<PodView>,
    histories: Mutex<HashMap<Key, History>>,
    kinds: tokio::sync::Mutex<HashMap<(String, String), Resource>>,
}

/// A failure that goes into a condition and an event.
#[derive(Debug)]
struct Failure {
    reason: &'static str,
    message: String,
}

fn failure(reason: &'static str, message: impl Into<String>) -> Failure {
    Failure { reason, message: message.into() }
}

#[derive(Deserialize)]
struct PodMetricsList {
    #[serde(default, deserialize_with = "discovery::null_as_default")]
    items: Vec<PodMetrics>,
}

#[derive(Deserialize)]
struct PodMetrics {
    metadata: k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
    timestamp: Option<Time>,
    #[serde(default)]
    window: String,
    #[serde(default, deserialize_with = "discovery::null_as_default")]
    containers: Vec<ContainerMetrics>,
}

#[derive(Deserialize)]
struct ContainerMetrics {
    name: String,
    #[serde(default)]
    usage: BTreeMap<String, Text>,
}

/// The samples of one resource, of one container or of whole pods. A pod that lacks one of its containers' has none.
fn samples(list: &PodMetricsList, resource: &str, container: Option<&str>) -> BTreeMap<String, Sample> {
    let mut samples = BTreeMap::new();
    for pod in &list.items {
        let chosen: Vec<_> = pod.containers.iter().filter(|one| container.is_none_or(|name| one.name == name)).collect();
        let parts: Option<Vec<i64>> = chosen.iter().map(|one| one.usage.get(resource)?.0.parse::<Quantity>().ok().map(|amount| amount.milli_value())).collect();
        let (Some(parts), Some(name)) = (parts.filter(|parts| !parts.is_empty()), pod.metadata.name.clone()) else { continue };
        let window = pod.window.parse::<jiff::SignedDuration>().ok().and_then(|window| Duration::try_from(window).ok());
        let at = pod.timestamp.as_ref().map_or(Timestamp::now(), |time| time.0);
        samples.insert(name, Sample { milli: parts.iter().sum(), at, window: window.unwrap_or(Duration::from_secs(60)) });
    }
    samples
}

fn milli(text: &Text) -> i64 {
    text.0.parse::<Quantity>().map(|amount| amount.milli_value()).unwrap_or(0)
}

fn target(target: &MetricTarget) -> Option<Target> {
    match (target.average_value.as_ref(), target.average_utilization) {
        (Some(value), _) => Some(Target::Average(milli(value))),
        (None, Some(percent)) => Some(Target::Utilization(percent)),
        (None, None) => None,
    }
}

fn value_status(proposal: &Proposal, resource: &str) -> MetricValueStatus {
    let average = if resource == "cpu" { Quantity::from_milli(proposal.average) } else { Quantity::from_value(proposal.average / 1000, Format::DecimalSi) };
    MetricValueStatus { average_utilization: proposal.utilization, average_value: Some(Text(average.to_string())), value: None }
}

/// The reason of the condition when a kind of metric cannot be had.
fn unavailable(metric: &MetricSpec) -> Failure {
    match metric.type_.as_str() {
        "Object" => failure("FailedGetObjectMetric", "unable to get metric: no custom metrics API (custom.metrics.k8s.io) is registered"),
        "Pods" => failure("FailedGetPodsMetric", "unable to get metric: no custom metrics API (custom.metrics.k8s.io) is registered"),
        "External" => failure("FailedGetExternalMetric", "unable to get external metric: no external metrics API (external.metrics.k8s.io) is registered"),
        other => failure("InvalidMetricSourceType", format!("unknown metric source type {other:?}")),
    }
}

fn set_condition(status: &mut HorizontalPodAutoscalerStatus, kind: &str, value: &str, reason: &str, message: impl Into<String>, generation: Option<i64>) {
    let conditions = status.conditions.get_or_insert_default();
    let fresh = |since: Option<Time>| HorizontalPodAutoscalerCondition {
        type_: kind.into(),
        status: value.into(),
        reason: Some(reason.into()),
        message: Some(message.into()),
        observed_generation: generation,
        last_transition_time: since.or_else(|| Some(Time(Timestamp::now()))),
    };
    match conditions.iter_mut().find(|condition| condition.type_ == kind) {
        Some(known) => {
            let since = known.last_transition_time.clone().filter(|_| known.status == value);
            *known = fresh(since);
        }
        None => conditions.push(fresh(None)),
    }
}

impl Controller {
    async fn resource(&self, autoscaler: &HorizontalPodAutoscaler) -> Result<Option<Resource>, Error> {
        let target = &autoscaler.spec.scale_target_ref;
        let group = target.api_version.as_deref().and_then(|version| version.rsplit_once('/')).map_or("", |(group, _)| group);
        let kind = (group.to_owned(), target.kind.clone());
        let mut kinds = self.kinds.lock().await;
        if !kinds.contains_key(&kind) {
            let found = discovery::discover(&self.client).await?;
            *kinds = found.resources.into_iter().map(|resource| ((resource.group.clone(), resource.kind.clone()), resource)).collect();
        }
        Ok(kinds.get(&kind).cloned())
    }

    fn rules(&self, autoscaler: &HorizontalPodAutoscaler, now: Timestamp) -> Rules {
        let default = self.config.horizontal_pod_autoscaler_tolerance;
        let behavior = autoscaler.spec.behavior.as_ref();
        let tolerance = |text: Option<&Text>| text.and_then(|text| text.0.parse::<Quantity>().ok()).map_or(default, |amount| amount.as_f64());
        Rules {
            now,
            tolerance_up: tolerance(behavior.and_then(|behavior| behavior.scale_up.as_ref()?.tolerance.as_ref())),
            tolerance_down: tolerance(behavior.and_then(|behavior| behavior.scale_down.as_ref()?.tolerance.as_ref())),
            cpu_initialization: self.config.horizontal_pod_autoscaler_cpu_initialization_period.0,
            initial_readiness_delay: self.config.horizontal_pod_autoscaler_initial_readiness_delay.0,
        }
    }

    /// Asks one metric. The status is what is shown in `currentMetrics`.
    async fn ask(&self, namespace: &str, metric: &MetricSpec, selector: &str, pods: &[Arc<PodView>], current: i32, rules: &Rules) -> Result<(Proposal, MetricStatus), Failure> {
        let (resource, container, wanted) = match (&metric.resource, &metric.container_resource) {
            (Some(source), _) if metric.type_ == "Resource" => (source.name.as_str(), None, target(&source.target)),
            (_, Some(source)) if metric.type_ == "ContainerResource" => (source.name.as_str(), Some(source.container.as_str()), target(&source.target)),
            _ => return Err(unavailable(metric)),
        };
        let reason = if container.is_some() { "FailedGetContainerResourceMetric" } else { "FailedGetResourceMetric" };
        let wanted = wanted.ok_or_else(|| failure(reason, "invalid resource metric source: neither an average utilization target nor an average value (usage) target was set"))?;
        let query: String = form_urlencode(selector);
        let path = format!("/apis/metrics.k8s.io/v1beta1/namespaces/{namespace}/pods?labelSelector={query}");
        let list: Option<PodMetricsList> = write::get(&self.client, &path).await.map_err(|error| failure(reason, format!("failed to get {resource} utilization: unable to get metrics for resource {resource}: unable to fetch metrics from resource metrics API: {}", write::message(&error))))?;
        let list = list.ok_or_else(|| failure(reason, format!("failed to get {resource} utilization: unable to get metrics for resource {resource}: unable to fetch metrics from resource metrics API: the server could not find the requested resource (get pods.metrics.k8s.io)")))?;
        let samples = samples(&list, resource, container);
        if samples.is_empty() {
            return Err(failure(reason, format!("failed to get {resource} utilization: unable to get metrics for resource {resource}: no metrics returned from resource metrics API")));
        }
        let proposal = propose(pods, samples, resource, container, wanted, current, rules).map_err(|message| failure(reason, format!("failed to get {resource} utilization: {message}")))?;
        let value = value_status(&proposal, resource);
        let mut status = MetricStatus { type_: metric.type_.clone(), ..MetricStatus::default() };
        match container {
            Some(container) => status.container_resource = Some(ContainerResourceMetricStatus { container: container.into(), current: value, name: resource.into() }),
            None => status.resource = Some(ResourceMetricStatus { current: value, name: resource.into() }),
        }
        Ok((proposal, status))
    }

    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(autoscaler) = self.autoscalers.get(&key) else {
            self.histories.lock().remove(&key);
            return Ok(Action::Done);
        };
        let known = autoscaler.status.clone().unwrap_or_default();
        let mut status = HorizontalPodAutoscalerStatus { observed_generation: autoscaler.metadata.generation, ..known.clone() };
        let outcome = self.reconcile(&key, &autoscaler, &mut status).await;
        if let Err(failure) = &outcome {
            self.recorder.event(&events::reference(&*autoscaler), EventType::Warning, failure.reason, failure.message.clone());
        }
        if status != known {
            let wanted = HorizontalPodAutoscaler { status: Some(status), ..(*autoscaler).clone() };
            let written: Result<HorizontalPodAutoscaler, Error> = write::update_status(&self.client, &wanted).await;
            match written {
                Err(error) if !error.is_not_found() => return Err(error),
                _ => {}
            }
        }
        Ok(Action::RequeueAfter(self.config.horizontal_pod_autoscaler_sync_period.0))
    }

    async fn reconcile(&self, key: &Key, autoscaler: &HorizontalPodAutoscaler, status: &mut HorizontalPodAutoscalerStatus) -> Result<(), Failure> {
        let generation = autoscaler.metadata.generation;
        let target = &autoscaler.spec.scale_target_ref;
        let get_failed = |status: &mut HorizontalPodAutoscalerStatus, message: String| {
            set_condition(status, "AbleToScale", "False", "FailedGetScale", format!("the HPA controller was unable to get the target's current scale: {message}"), generation);
            failure("FailedGetScale", message)
        };
        let resource = match self.resource(autoscaler).await {
            Ok(Some(resource)) => resource,
            Ok(None) => return Err(get_failed(status, format!("no matches for kind {:?} in version {:?}", target.kind, target.api_version.as_deref().unwrap_or_default()))),
            Err(error) => return Err(get_failed(status, write::message(&error))),
        };
        let path = format!("{}/{}/scale", resource.path(key.ns()), target.name);
        let scale: Value = match write::get(&self.client, &path).await {
            Ok(Some(scale)) => scale,
            Ok(None) => return Err(get_failed(status, format!("{} {:?} not found", resource.name(), target.name))),
            Err(error) => return Err(get_failed(status, write::message(&error))),
        };
        set_condition(status, "AbleToScale", "True", "SucceededGetScale", "the HPA controller was able to get the target's current scale", generation);
        let current = scale["spec"]["replicas"].as_i64().and_then(|number| i32::try_from(number).ok()).unwrap_or(0);
        let actual = scale["status"]["replicas"].as_i64().and_then(|number| i32::try_from(number).ok()).unwrap_or(0);
        let selector = scale["status"]["selector"].as_str().unwrap_or_default().to_owned();
        status.current_replicas = Some(actual);
        let min = autoscaler.spec.min_replicas.unwrap_or(1);
        let now = Timestamp::now();
        self.histories.lock().entry(key.clone()).or_default().begin(now, current);
        let wanted = if current == 0 && min != 0 {
            set_condition(status, "ScalingActive", "False", "ScalingDisabled", "scaling is disabled since the replica count of the target is zero", generation);
            status.desired_replicas = 0;
            return Ok(());
        } else if current > autoscaler.spec.max_replicas {
            (autoscaler.spec.max_replicas, "Current number of replicas above Spec.MaxReplicas".to_owned())
        } else if current < min {
            (min, "Current number of replicas below Spec.MinReplicas".to_owned())
        } else {
            let (recommended, why) = self.recommend(key, autoscaler, status, &selector, current, now).await?;
            self.limit(key, autoscaler, status, current, recommended, now, why)
        };
        self.rescale(key, autoscaler, status, &path, scale, current, wanted, now).await
    }

    /// The highest of what the metrics propose.
    async fn recommend(&self, key: &Key, autoscaler: &HorizontalPodAutoscaler, status: &mut HorizontalPodAutoscalerStatus, selector: &str, current: i32, now: Timestamp) -> Result<(i32, String), Failure> {
        let generation = autoscaler.metadata.generation;
        let parsed = if selector.is_empty() { Err("selector is required".to_owned()) } else { LabelSelector::parse(selector).map_err(|error| error.to_string()) };
        let parsed = parsed.map_err(|error| {
            set_condition(status, "ScalingActive", "False", "InvalidSelector", format!("the HPA target's scale is missing a selector or has a bad one: {error}"), generation);
            failure("SelectorRequired", error)
        })?;
        let pods: Vec<_> = self.pods.namespace(key.ns()).into_iter().filter(|pod| parsed.matches(|label| pod.label(label))).collect();
        let rules = self.rules(autoscaler, now);
        let mut best: Option<(i32, String)> = None;
        let mut statuses = Vec::new();
        let mut failed: Option<Failure> = None;
        for metric in autoscaler.spec.metrics.iter().flatten() {
            match self.ask(key.ns(), metric, selector, &pods, current, &rules).await {
                Ok((proposal, shown)) => {
                    let name = shown.resource.as_ref().map(|resource| resource.name.clone()).or_else(|| shown.container_resource.as_ref().map(|one| one.name.clone())).unwrap_or_default();
                    let what = if proposal.utilization.is_some() { format!("{name} resource utilization (percentage of request)") } else { format!("{name} resource") };
                    if best.as_ref().is_none_or(|(most, _)| proposal.replicas > *most) {
                        best = Some((proposal.replicas, what));
                    }
                    statuses.push(shown);
                }
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        status.current_metrics = (!statuses.is_empty()).then_some(statuses);
        match (best, failed) {
            // With a metric missing, only growth is certain.
            (Some((replicas, _)), Some(error)) if replicas < current => Err(self.inactive(status, error, generation)),
            (Some((replicas, what)), _) => {
                set_condition(status, "ScalingActive", "True", "ValidMetricFound", format!("the HPA was able to successfully calculate a replica count from {what}"), generation);
                let direction = if replicas > current { format!("{what} above target") } else { "All metrics below target".to_owned() };
                Ok((replicas, direction))
            }
            (None, Some(error)) => Err(self.inactive(status, error, generation)),
            (None, None) => Err(self.inactive(status, failure("InvalidMetricSourceType", "no metric is given"), generation)),
        }
    }

    fn inactive(&self, status: &mut HorizontalPodAutoscalerStatus, error: Failure, generation: Option<i64>) -> Failure {
        set_condition(status, "ScalingActive", "False", error.reason, format!("the HPA was unable to compute the replica count: {}", error.message), generation);
        error
    }

    #[allow(clippy::too_many_arguments)]
    fn limit(&self, key: &Key, autoscaler: &HorizontalPodAutoscaler, status: &mut HorizontalPodAutoscalerStatus, current: i32, recommended: i32, now: Timestamp, why: String) -> (i32, String) {
        let generation = autoscaler.metadata.generation;
        let window = self.config.horizontal_pod_autoscaler_downscale_stabilization.0.as_secs() as i64;
        let mut histories = self.histories.lock();
        let history = histories.entry(key.clone()).or_default();
        let decision = decide(autoscaler, history, current, recommended, window, now);
        history.recommendations.push((now, recommended));
        history.prune(now);
        match decision.stabilized {
            Some((reason, message)) => set_condition(status, "AbleToScale", "True", reason, message, generation),
            None => set_condition(status, "AbleToScale", "True", "ReadyForNewScale", "recommended size matches current size", generation),
        }
        match decision.limited {
            Some((reason, message)) => set_condition(status, "ScalingLimited", "True", reason, message, generation),
            None => set_condition(status, "ScalingLimited", "False", "DesiredWithinRange", "the desired count is within the acceptable range", generation),
        }
        (decision.replicas, why)
    }

    #[allow(clippy::too_many_arguments)]
    async fn rescale(&self, key: &Key, autoscaler: &HorizontalPodAutoscaler, status: &mut HorizontalPodAutoscalerStatus, path: &str, mut scale: Value, current: i32, wanted: (i32, String), now: Timestamp) -> Result<(), Failure> {
        let (replicas, why) = wanted;
        status.desired_replicas = replicas;
        if replicas == current {
            return Ok(());
        }
        let generation = autoscaler.metadata.generation;
        scale["spec"]["replicas"] = json!(replicas);
        if let Err(error) = write::replace::<Value>(&self.client, path, &scale).await {
            let message = write::message(&error);
            set_condition(status, "AbleToScale", "False", "FailedUpdateScale", format!("the HPA controller was unable to update the target scale: {message}"), generation);
            status.desired_replicas = current;
            return Err(failure("FailedRescale", format!("New size: {replicas}; reason: {why}; error: {message}")));
        }
        set_condition(status, "AbleToScale", "True", "SucceededRescale", format!("the HPA controller was able to update the target scale to {replicas}"), generation);
        self.recorder.event(&events::reference(autoscaler), EventType::Normal, "SuccessfulRescale", format!("New size: {replicas}; reason: {why}"));
        self.histories.lock().entry(key.clone()).or_default().changes.push(Change { at: now, by: replicas - current });
        status.last_scale_time = Some(Time(now));
        Ok(())
    }
}

/// Percent-encodes a query value.
fn form_urlencode(text: &str) -> String {
    text.bytes().map(|byte| if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) { (byte as char).to_string() } else { format!("%{byte:02X}") }).collect()
}

/// The `horizontal-pod-autoscaler-controller`.
pub fn start(context: &Context) -> Worker {
    let queue = Queue::new("horizontalpodautoscaler");
    let (autoscalers, pods) = (context.autoscalers(), context.pods());
    {
        let queue = queue.clone();
        autoscalers.on_change(move |change| {
            // Its own status is no reason to look again before time.
            let spec = |autoscaler: &Option<Arc<HorizontalPodAutoscaler>>| autoscaler.as_ref().map(|autoscaler| autoscaler.spec.clone());
            if spec(&change.old) != spec(&change.new) {
                queue.add(Key::of(&**change.object()));
            }
        });
    }
    let controller = Arc::new(Controller {
        client: context.client.clone(),
        recorder: context.recorder("horizontal-pod-autoscaler"),
        config: context.config.clone(),
        autoscalers,
        pods,
        histories: Mutex::default(),
        kinds: tokio::sync::Mutex::default(),
    });
    context.worker(queue, context.config.concurrent_horizontal_pod_autoscaler_syncs, controller, Controller::sync)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_summed_per_pod() {
        let list: PodMetricsList = serde_json::from_value(json!({"items": [
            {"metadata": {"name": "a"}, "timestamp": "2026-01-01T00:00:00Z", "window": "15s", "containers": [{"name": "x", "usage": {"cpu": "100m"}}, {"name": "y", "usage": {"cpu": "50m"}}]},
            {"metadata": {"name": "b"}, "timestamp": "2026-01-01T00:00:00Z", "window": "15s", "containers": [{"name": "x", "usage": {"cpu": "7m"}}, {"name": "y", "usage": {}}]}]})).expect("a list");
        let shown = |container| samples(&list, "cpu", container).into_iter().map(|(name, sample)| (name, sample.milli)).collect::<Vec<_>>();
        assert_eq!(shown(None), [("a".to_owned(), 150)]);
        assert_eq!(shown(Some("x")), [("a".to_owned(), 100), ("b".to_owned(), 7)]);
        assert_eq!(form_urlencode("a=b,c in (d)"), "a%3Db%2Cc%20in%20%28d%29");
    }

    #[test]
    fn metrics_without_an_api_say_so() {
        for (kind, reason) in [("Object", "FailedGetObjectMetric"), ("Pods", "FailedGetPodsMetric"), ("External", "FailedGetExternalMetric"), ("Odd", "InvalidMetricSourceType")] {
            let metric = MetricSpec { type_: kind.into(), ..MetricSpec::default() };
            assert_eq!(unavailable(&metric).reason, reason);
        }
    }
}
