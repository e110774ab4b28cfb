//! `metrics.k8s.io`: what nodes and pods use, fetched from the kubelets when somebody asks.
//!
//! A kubelet's answer (`/stats/summary`) is kept for [`FRESH`], so that `kubectl top` and autoscalers together cost a node at most one
//! request in that time. Nothing runs while nobody asks.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::StreamExt;
use http_body_util::{BodyExt, Limited};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::OnceCell;
use windlass_api::registry::Resource;
use windlass_api::{ApiError, meta};

use crate::content;
use crate::kubelet::{self, Kubelets};
use crate::storage::Objects;
use crate::virtuals::VirtualStorage;

/// How long a kubelet's answer is good.
const FRESH: Duration = Duration::from_secs(10);
/// How long a kubelet may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest answer of a kubelet.
const MAX_ANSWER: usize = 16 << 20;
/// Kubelets asked at once.
const AT_ONCE: usize = 32;

type Summary = Arc<OnceCell<Arc<Value>>>;

/// The usage of nodes and pods.
pub struct Usage {
    objects: Objects,
    kubelets: Arc<Kubelets>,
    kept: Mutex<HashMap<String, (Instant, Summary)>>,
}

impl Usage {
    pub fn new(objects: Objects, kubelets: Arc<Kubelets>) -> Usage {
        Usage { objects, kubelets, kept: Mutex::default() }
    }

    fn resource(&self, plural: &str) -> Result<Arc<Resource>, ApiError> {
        self.objects.resource("", plural).ok_or_else(|| ApiError::internal(format!("{plural} are not registered")))
    }

    /// A node's summary, from the kept answer or from the kubelet; several who ask at once share one request.
    async fn summary(&self, node: &str) -> Result<Arc<Value>, ApiError> {
        let cell = {
            let mut kept = self.kept.lock();
            kept.retain(|_, (at, _)| at.elapsed() < FRESH);
            kept.entry(node.to_owned()).or_insert_with(|| (Instant::now(), Summary::default())).1.clone()
        };
        cell.get_or_try_init(|| self.fetch(node)).await.cloned()
    }

    async fn fetch(&self, node: &str) -> Result<Arc<Value>, ApiError> {
        let target = self.kubelets.of_node(&self.objects, node)?;
        let body = content::request_body(http_body_util::Empty::<bytes::Bytes>::new());
        let mut headers = http::HeaderMap::new();
        if let Ok(host) = format!("{}:{}", target.host, target.port).parse() {
            headers.insert(http::header::HOST, host);
        }
        let request = kubelet::redirected(http::Method::GET, headers, http::Extensions::new(), "/stats/summary", body)?;
        let answer = async {
            let response = self.kubelets.send(&target, request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
            let body = body.map_err(|e| ApiError::service_unavailable(format!("usage of node {node}: {e}")))?.to_bytes();
            if !status.is_success() {
                return Err(ApiError::service_unavailable(format!("the kubelet of {node} answered {status} when asked for its usage")));
            }
            serde_json::from_slice(&body).map_err(|e| ApiError::service_unavailable(format!("usage of node {node}: {e}")))
        };
        let late = |_| ApiError::service_unavailable(format!("the kubelet of {node} did not tell its usage in time"));
        Ok(Arc::new(tokio::time::timeout(PATIENCE, answer).await.map_err(late)??))
    }

    /// The summaries of nodes that answer; the others are left out, as upstream's metrics server does.
    async fn summaries(&self, nodes: Vec<String>) -> Vec<(String, Arc<Value>)> {
        let fetch = |node: String| async move {
            match self.summary(&node).await {
                Ok(summary) => Some((node, summary)),
                Err(error) => {
                    tracing::debug!(node, error = error.message, "no usage");
                    None
                }
            }
        };
        futures::stream::iter(nodes).map(fetch).buffer_unordered(AT_ONCE).filter_map(|s| async { s }).collect().await
    }

    fn node_metrics(&self, node: &str, summary: &Value) -> Option<Value> {
        let resource = self.resource("nodes").ok()?;
        let labels = self.objects.cached(&resource, "", node)?.value()["metadata"]["labels"].clone();
        let (usage, time) = usage_of(&summary["node"])?;
        Some(document("NodeMetrics", "", node, labels, &time, json!({"usage": usage})))
    }

    fn pod_metrics(&self, summary: &Value, pod: &Value) -> Option<Value> {
        let found = summary["pods"].as_array()?.iter().find(|p| p["podRef"]["uid"] == pod["metadata"]["uid"])?;
        let mut time = String::new();
        let containers: Vec<Value> = found["containers"]
            .as_array()?
            .iter()
            .filter_map(|c| {
                let (usage, at) = usage_of(c)?;
                time = at;
                Some(json!({"name": c["name"], "usage": usage}))
            })
            .collect();
        if containers.is_empty() {
            return None;
        }
        let labels = pod["metadata"]["labels"].clone();
        Some(document("PodMetrics", meta::namespace(pod), meta::name(pod), labels, &time, json!({"containers": containers})))
    }
}

/// CPU and memory out of a part of a summary, and when it was measured.
fn usage_of(part: &Value) -> Option<(Value, String)> {
    let cpu = part["cpu"]["usageNanoCores"].as_u64()?;
    let memory = part["memory"]["workingSetBytes"].as_u64()?;
    let time = part["cpu"]["time"].as_str().unwrap_or_default().to_owned();
    Some((json!({"cpu": format!("{cpu}n"), "memory": format!("{}Ki", memory / 1024)}), time))
}

fn document(kind: &str, namespace: &str, name: &str, labels: Value, time: &str, content: Value) -> Value {
    let now = meta::now_rfc3339(jiff::Timestamp::now());
    let mut metadata = json!({"name": name, "creationTimestamp": now});
    if !namespace.is_empty() {
        metadata["namespace"] = namespace.into();
    }
    if labels.is_object() {
        metadata["labels"] = labels;
    }
    let time = if time.is_empty() { now } else { time.to_owned() };
    let mut document = json!({"kind": kind, "apiVersion": "metrics.k8s.io/v1beta1", "metadata": metadata, "timestamp": time, "window": "10s"});
    if let (Some(all), Value::Object(more)) = (document.as_object_mut(), content) {
        all.extend(more);
    }
    document
}

#[async_trait]
impl VirtualStorage for Usage {
    async fn get(&self, plural: &str, namespace: &str, name: &str) -> Result<Option<Value>, ApiError> {
        if plural == "nodes" {
            if self.objects.cached(&*self.resource("nodes")?, "", name).is_none() {
                return Ok(None);
            }
            let summary = self.summary(name).await?;
            return Ok(self.node_metrics(name, &summary));
        }
        let Some(pod) = self.objects.cached(&*self.resource("pods")?, namespace, name) else { return Ok(None) };
        let pod = pod.value();
        let Some(node) = pod["spec"]["nodeName"].as_str() else { return Ok(None) };
        let summary = self.summary(node).await?;
        Ok(self.pod_metrics(&summary, &pod))
    }

    async fn list(&self, plural: &str, namespace: &str) -> Result<Vec<Value>, ApiError> {
        if plural == "nodes" {
            let nodes = self.objects.cached_list(&*self.resource("nodes")?, None);
            let mut names = Vec::with_capacity(nodes.len());
            for node in &nodes {
                names.push(node.name().to_owned());
            }
            let summaries = self.summaries(names).await;
            let mut all: Vec<Value> = summaries.iter().filter_map(|(node, summary)| self.node_metrics(node, summary)).collect();
            all.sort_by(|a, b| meta::name(a).cmp(meta::name(b)));
            return Ok(all);
        }
        let only = Some(namespace).filter(|n| !n.is_empty());
        let pods: Vec<Arc<Value>> = self.objects.cached_list(&*self.resource("pods")?, only).iter().map(|p| p.value()).collect();
        let nodes: BTreeSet<String> = pods.iter().filter_map(|p| p["spec"]["nodeName"].as_str()).map(str::to_owned).collect();
        let summaries: HashMap<String, Arc<Value>> = self.summaries(nodes.into_iter().collect()).await.into_iter().collect();
        let metrics = |pod: &Arc<Value>| self.pod_metrics(summaries.get(pod["spec"]["nodeName"].as_str()?)?, pod);
        Ok(pods.iter().filter_map(metrics).collect())
    }
}
