//! Who may ask the kubelet: callers are known by client certificate or token, and need access to `nodes/...`.

use std::sync::Arc;

use async_trait::async_trait;
use http::Method;
use http::request::Parts;
use k8s_openapi::api::authorization::v1::ResourceAttributes;
use windlass_client::gate::{Delegated, Wish};
use windlass_daemon::endpoints::{Denied, Gate};

use crate::shared::Shared;

#[derive(Clone)]
pub struct Auth {
    delegated: Arc<Delegated>,
    node: String,
}

/// The subresources of `nodes`, any of which opens the path: the fine-grained one, then the coarse one. Pure.
pub fn subresources(path: &str) -> Vec<&'static str> {
    let first = path.trim_start_matches('/').split('/').next().unwrap_or("");
    match first {
        "stats" => vec!["stats"],
        "metrics" => vec!["metrics"],
        "logs" => vec!["log"],
        "checkpoint" => vec!["checkpoint"],
        "pods" | "runningpods" => vec!["pods", "proxy"],
        "healthz" | "livez" | "readyz" => vec!["healthz", "proxy"],
        "configz" => vec!["configz", "proxy"],
        _ => vec!["proxy"],
    }
}

pub fn verb(method: &Method) -> &'static str {
    match *method {
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "get",
    }
}

impl Auth {
    pub fn new(shared: &Shared) -> Self {
        Self { delegated: Arc::new(Delegated::new(shared.client.clone())), node: shared.node_name.clone() }
    }
}

#[async_trait]
impl Gate for Auth {
    async fn admit(&self, request: &Parts) -> Result<(), Denied> {
        let user = self.delegated.user(request).await?;
        let mut denied = None;
        for subresource in subresources(request.uri.path()) {
            let wish = Wish::Resource(ResourceAttributes {
                verb: Some(verb(&request.method).into()),
                group: Some(String::new()),
                version: Some("v1".into()),
                resource: Some("nodes".into()),
                subresource: Some(subresource.into()),
                name: Some(self.node.clone()),
                ..Default::default()
            });
            match self.delegated.allow(&user, &wish).await {
                Ok(()) => return Ok(()),
                Err(e) => denied = Some(e),
            }
        }
        Err(denied.unwrap_or_else(|| Denied { status: http::StatusCode::FORBIDDEN, message: "forbidden".into() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths() {
        for (path, expected) in [("/metrics/cadvisor", &["metrics"][..]), ("/stats/summary", &["stats"]), ("/exec/a/b/c", &["proxy"]), ("/pods", &["pods", "proxy"]), ("/containerLogs/x", &["proxy"])] {
            assert_eq!(subresources(path), expected, "{path}");
        }
    }
}
