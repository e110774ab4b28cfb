//! What field selectors can name: labels out of the conversion functions upstream, with where their values are.

use std::fs;

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};

use crate::modules::Modules;

/// A resource, the package with its conversion function, and its labels.
/// A label is `name`, `name=default` or `name<path|path` (first path that holds something).
const SELECTORS: &[(&str, &str, &[&str])] = &[
    (
        "pods",
        "core/v1",
        &[
            "spec.nodeName",
            "spec.host<spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "spec.hostNetwork=false",
            "status.phase",
            "status.podIP<status.podIPs.0.ip",
            "status.podIPs",
            "status.nominatedNodeName",
        ],
    ),
    ("nodes", "core/v1", &["spec.unschedulable=false"]),
    ("replicationcontrollers", "core/v1", &["status.replicas=0"]),
    (
        "events",
        "core/v1",
        &[
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "involvedObject.apiVersion",
            "involvedObject.resourceVersion",
            "involvedObject.fieldPath",
            "reason",
            "reportingComponent",
            "source<source.component|reportingComponent",
            "type",
        ],
    ),
    (
        "events.events.k8s.io",
        "events/v1",
        &[
            "reason",
            "regarding.kind<regarding.kind|involvedObject.kind",
            "regarding.namespace<regarding.namespace|involvedObject.namespace",
            "regarding.name<regarding.name|involvedObject.name",
            "regarding.uid<regarding.uid|involvedObject.uid",
            "regarding.apiVersion<regarding.apiVersion|involvedObject.apiVersion",
            "regarding.resourceVersion<regarding.resourceVersion|involvedObject.resourceVersion",
            "regarding.fieldPath<regarding.fieldPath|involvedObject.fieldPath",
            "reportingController<reportingController|reportingComponent",
            "type",
        ],
    ),
    ("namespaces", "core/v1", &["status.phase"]),
    ("secrets", "core/v1", &["type"]),
    ("services", "core/v1", &["spec.clusterIP", "spec.type"]),
    ("jobs.batch", "batch/v1", &["status.successful<status.succeeded=0"]),
    ("certificatesigningrequests.certificates.k8s.io", "certificates/v1", &["spec.signerName"]),
    ("podcertificaterequests.certificates.k8s.io", "certificates/v1", &["spec.signerName", "spec.podName", "spec.nodeName"]),
    ("clustertrustbundles.certificates.k8s.io", "certificates/v1", &["spec.signerName"]),
    ("resourceslices.resource.k8s.io", "", &["spec.nodeName", "spec.driver", "spec.pool.name"]),
];

/// `selectors.json`; fails when upstream no longer knows one of the labels.
pub fn selectors(modules: &Modules) -> Result<Value> {
    let mut document = Map::new();
    for (resource, package, labels) in SELECTORS {
        let source = match *package {
            // Its labels are constants of the API.
            "" => fs::read_to_string(modules.path("api", "resource/v1/types.go")),
            package => fs::read_to_string(modules.path("kubernetes", &format!("pkg/apis/{package}/conversion.go"))),
        };
        let source = source.with_context(|| format!("reading the conversions of {resource}"))?;
        let mut list = Vec::new();
        for label in *labels {
            let (label, default) = label.split_once('=').unwrap_or((label, ""));
            let (path, from) = label.split_once('<').unwrap_or((label, ""));
            if !source.contains(&format!("\"{path}\"")) {
                bail!("{resource}: upstream does not select by {path}");
            }
            let mut entry = json!({"path": path});
            if !from.is_empty() {
                entry["from"] = from.split('|').collect();
            }
            if !default.is_empty() {
                entry["default"] = default.into();
            }
            list.push(entry);
        }
        document.insert((*resource).to_owned(), list.into());
    }
    Ok(document.into())
}
