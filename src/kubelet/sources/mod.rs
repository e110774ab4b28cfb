//! Static pods: manifests from a directory or a URL, made into pods of this node.

pub mod directory;
pub mod url;

use k8s_openapi::api::core::v1::Pod;
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::pod::model::{HASH_ANNOTATION, SEEN_ANNOTATION, SOURCE_ANNOTATION};

/// The pods in a manifest: YAML (several documents) or JSON, single pods or lists.
///
/// # Errors
/// What is wrong with the text.
pub fn parse(text: &str) -> Result<Vec<Pod>, String> {
    let documents: Vec<Value> = if text.trim_start().starts_with('{') {
        vec![serde_json::from_str(text).map_err(|e| e.to_string())?]
    } else {
        serde_saphyr::from_multiple::<Value>(text).map_err(|e| e.to_string())?
    };
    let mut pods = Vec::new();
    for document in documents.into_iter().filter(|d| !d.is_null()) {
        match document["kind"].as_str() {
            Some("Pod") => pods.push(pod(document)?),
            Some("PodList" | "List") => {
                for item in document["items"].as_array().into_iter().flatten() {
                    pods.push(pod(item.clone())?);
                }
            }
            other => return Err(format!("a static pod manifest holds Pods, this one a {}", other.unwrap_or("document without a kind"))),
        }
    }
    Ok(pods)
}

fn pod(value: Value) -> Result<Pod, String> {
    let pod = Pod::deserialize(value).map_err(|e| e.to_string())?;
    let name = pod.metadata.name.clone().unwrap_or_default();
    if name.is_empty() {
        return Err("a static pod needs metadata.name".into());
    }
    let Some(spec) = &pod.spec else { return Err(format!("static pod {name} has no spec")) };
    if spec.containers.is_empty() {
        return Err(format!("static pod {name} has no containers"));
    }
    if spec.containers.iter().chain(spec.init_containers.iter().flatten()).any(|c| c.image.as_deref().unwrap_or("").is_empty() || c.name.is_empty()) {
        return Err(format!("static pod {name}: every container needs a name and an image"));
    }
    let refers = spec.service_account_name.as_deref().is_some_and(|s| !s.is_empty())
        || spec.volumes.iter().flatten().any(|v| v.secret.is_some() || v.config_map.is_some() || v.persistent_volume_claim.is_some());
    if refers {
        return Err(format!("static pod {name} may not refer to API objects (service accounts, secrets, configmaps, claims)"));
    }
    Ok(pod)
}

/// Gives a static pod what the API server would have given it: a name of this node, a uid from its content, defaults.
pub fn complete(mut pod: Pod, source: &str, origin: &str, node: &str) -> Pod {
    let text = serde_json::to_string(&pod).unwrap_or_default();
    let mut hash = Sha256::new();
    for part in [text.as_str(), node, source, origin] {
        hash.update(part.as_bytes());
        hash.update([0]);
    }
    let hash: String = hash.finalize()[..16].iter().map(|b| format!("{b:02x}")).collect();
    let meta = &mut pod.metadata;
    meta.name = Some(format!("{}-{node}", meta.name.clone().unwrap_or_default().to_lowercase()));
    meta.namespace.get_or_insert_with(|| "default".into());
    meta.uid.get_or_insert_with(|| hash.clone());
    meta.generation = None;
    let annotations = meta.annotations.get_or_insert_default();
    annotations.insert(HASH_ANNOTATION.into(), hash);
    annotations.insert(SOURCE_ANNOTATION.into(), source.into());
    annotations.insert(SEEN_ANNOTATION.into(), jiff::Timestamp::now().to_string());
    if let Some(spec) = &mut pod.spec {
        spec.node_name = Some(node.to_owned());
        spec.restart_policy.get_or_insert_with(|| "Always".into());
        spec.dns_policy.get_or_insert_with(|| "ClusterFirst".into());
        spec.termination_grace_period_seconds.get_or_insert(30);
        spec.enable_service_links.get_or_insert(true);
        spec.scheduler_name.get_or_insert_with(|| "default-scheduler".into());
        spec.security_context.get_or_insert_default();
        let tolerations = spec.tolerations.get_or_insert_default();
        if !tolerations.iter().any(|t| t.operator.as_deref() == Some("Exists") && t.key.is_none()) {
            tolerations.push(k8s_openapi::api::core::v1::Toleration { operator: Some("Exists".into()), effect: Some("NoExecute".into()), ..Default::default() });
        }
    }
    pod.status = None;
    pod
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifests() {
        let check = |text: &str, expected: Result<&[&str], &str>| match (parse(text), expected) {
            (Ok(pods), Ok(names)) => {
                let got: Vec<String> = pods.iter().filter_map(|p| p.metadata.name.clone()).collect();
                assert_eq!(got, names);
            }
            (Err(e), Err(part)) => assert!(e.contains(part), "{e}"),
            (got, expected) => panic!("{got:?} {expected:?}"),
        };
        let pod = "kind: Pod\nmetadata: {name: NAME}\nspec: {containers: [{name: c, image: i}]}\n";
        check(&pod.replace("NAME", "a"), Ok(&["a"]));
        check(&format!("{}---\n{}", pod.replace("NAME", "a"), pod.replace("NAME", "b")), Ok(&["a", "b"]));
        check("{\"kind\":\"PodList\",\"items\":[{\"kind\":\"Pod\",\"metadata\":{\"name\":\"x\"},\"spec\":{\"containers\":[{\"name\":\"c\",\"image\":\"i\"}]}}]}", Ok(&["x"]));
        check("kind: Service\n", Err("a Service"));
        check("kind: Pod\nspec: {containers: [{name: c, image: i}]}\n", Err("metadata.name"));
        check("kind: Pod\nmetadata: {name: a}\nspec: {containers: []}\n", Err("no containers"));
        check("kind: Pod\nmetadata: {name: a}\nspec: {serviceAccountName: s, containers: [{name: c, image: i}]}\n", Err("may not refer"));
    }

    #[test]
    fn a_changed_manifest_is_another_pod() {
        let pod = |image: &str| parse(&format!("kind: Pod\nmetadata: {{name: A}}\nspec: {{containers: [{{name: c, image: {image}}}]}}\n")).expect("parses").remove(0);
        let one = complete(pod("one"), "file", "/f", "n1");
        let again = complete(pod("one"), "file", "/f", "n1");
        let other = complete(pod("two"), "file", "/f", "n1");
        assert_eq!(one.metadata.name.as_deref(), Some("a-n1"));
        assert_eq!(one.metadata.uid, again.metadata.uid);
        assert_ne!(one.metadata.uid, other.metadata.uid);
    }
}
