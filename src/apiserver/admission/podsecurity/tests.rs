use super::*;
use crate::admission::testing::Request;
use crate::cluster::testing::Fake;
use serde_json::json;

fn labelled(labels: Value) -> Value {
    json!({"metadata": {"name": "ns", "labels": labels}})
}

/// A pod of one container that meets the restricted level, changed by a merge of `spec` and of the container.
fn pod(spec: Value, container: Value) -> Value {
    let mut own = json!({
        "name": "c",
        "securityContext": {
            "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": true,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    });
    merge(&mut own, &container);
    let mut all = json!({"containers": [own]});
    merge(&mut all, &spec);
    json!({"metadata": {"name": "p", "namespace": "ns"}, "spec": all})
}

fn merge(into: &mut Value, from: &Value) {
    match from {
        Value::Object(map) => {
            for (key, value) in map {
                if value.is_object() && into[key].is_object() {
                    merge(&mut into[key], value);
                } else {
                    into[key] = value.clone();
                }
            }
        }
        other => *into = other.clone(),
    }
}

/// What a pod violates at a level and version, as it is shown.
fn check(level: &str, pod: &Value, expected: &str) {
    let (level, version) = level.split_once(':').unwrap_or((level, "latest"));
    let at = LevelVersion {
        level: parse_level(level).expect("a level"),
        version: parse_version(version).expect("a version"),
    };
    let found = evaluate(at, &pod["metadata"], &pod["spec"]).map(|violations| detail(&violations)).unwrap_or_default();
    assert_eq!(found, expected, "{at} {pod}");
}

/// Wordings are those of upstream's checks (`pod-security-admission/policy`).
#[test]
fn baseline() {
    let none = json!({});
    let cases = [
        (json!({}), json!({}), ""),
        (json!({"hostNetwork": true, "hostPID": true}), none.clone(), "host namespaces (hostNetwork=true, hostPID=true)"),
        (none.clone(), json!({"securityContext": {"privileged": true}}), "privileged (container \"c\" must not set securityContext.privileged=true)"),
        (none.clone(), json!({"securityContext": {"capabilities": {"add": ["NET_RAW", "CHOWN", "SYS_ADMIN"]}}}), "non-default capabilities (container \"c\" must not include \"NET_RAW\", \"SYS_ADMIN\" in securityContext.capabilities.add)"),
        (json!({"volumes": [{"name": "v", "hostPath": {"path": "/"}}, {"name": "w", "hostPath": {"path": "/"}}]}), none.clone(), "hostPath volumes (volumes \"v\", \"w\")"),
        (none.clone(), json!({"ports": [{"hostPort": 80}, {"hostPort": 0}]}), "hostPort (container \"c\" uses hostPort 80)"),
        (none.clone(), json!({"livenessProbe": {"httpGet": {"host": "evil"}}}), "probe or lifecycle host (container \"c\" uses probe or lifecycle host \"evil\")"),
        (none.clone(), json!({"securityContext": {"procMount": "Unmasked"}}), "procMount (container \"c\" must not set securityContext.procMount to \"Unmasked\")"),
        (json!({"hostUsers": false}), json!({"securityContext": {"procMount": "Unmasked"}}), ""),
        (json!({"securityContext": {"seLinuxOptions": {"type": "spc_t", "user": "u"}}}), none.clone(), "seLinuxOptions (pod set forbidden securityContext.seLinuxOptions: type \"spc_t\"; user may not be set)"),
        (none.clone(), json!({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}), "seccompProfile (container \"c\" must not set securityContext.seccompProfile.type to \"Unconfined\")"),
        (json!({"securityContext": {"sysctls": [{"name": "kernel.msgmax"}, {"name": "net.ipv4.tcp_notsent_lowat"}]}}), none.clone(), "forbidden sysctls (kernel.msgmax)"),
        (json!({"securityContext": {"windowsOptions": {"hostProcess": true}}}), none.clone(), "hostProcess (pod must not set securityContext.windowsOptions.hostProcess=true)"),
        (json!({"securityContext": {"appArmorProfile": {"type": "Unconfined"}}}), none.clone(), "forbidden AppArmor profile (pod must not set AppArmor profile type to \"Unconfined\")"),
    ];
    for (spec, container, expected) in cases {
        let pod = pod(spec, container);
        check("baseline", &pod, expected);
        check("privileged", &pod, "");
    }
}

#[test]
fn restricted() {
    let none = json!({});
    let cases = [
        (none.clone(), none.clone(), ""),
        (none.clone(), json!({"securityContext": {"allowPrivilegeEscalation": null}}), "allowPrivilegeEscalation != false (container \"c\" must set securityContext.allowPrivilegeEscalation=false)"),
        (none.clone(), json!({"securityContext": {"capabilities": {"drop": [], "add": ["NET_BIND_SERVICE", "CHOWN"]}}}), "unrestricted capabilities (container \"c\" must set securityContext.capabilities.drop=[\"ALL\"]; container \"c\" must not include \"CHOWN\" in securityContext.capabilities.add)"),
        (json!({"volumes": [{"name": "v", "hostPath": {"path": "/"}}, {"name": "w", "nfs": {}}, {"name": "ok", "emptyDir": {}}]}), none.clone(), "restricted volume types (volumes \"v\", \"w\" use restricted volume types \"hostPath\", \"nfs\")"),
        (none.clone(), json!({"securityContext": {"runAsNonRoot": null}}), "runAsNonRoot != true (pod or container \"c\" must set securityContext.runAsNonRoot=true)"),
        (json!({"securityContext": {"runAsNonRoot": true}}), json!({"securityContext": {"runAsNonRoot": null}}), ""),
        (json!({"securityContext": {"runAsNonRoot": true}}), json!({"securityContext": {"runAsNonRoot": false}}), "runAsNonRoot != true (container \"c\" must not set securityContext.runAsNonRoot=false)"),
        (json!({"securityContext": {"runAsUser": 0}}), none.clone(), "runAsUser=0 (pod must not set runAsUser=0)"),
        (none.clone(), json!({"securityContext": {"seccompProfile": null}}), "seccompProfile (pod or container \"c\" must set securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\")"),
        (json!({"os": {"name": "windows"}}), json!({"securityContext": {"seccompProfile": null, "capabilities": null, "allowPrivilegeEscalation": null}}), ""),
        (json!({"hostUsers": false}), json!({"securityContext": {"runAsNonRoot": false, "procMount": "Unmasked"}}), "procMount (container \"c\" must not set securityContext.procMount to \"Unmasked\")"),
    ];
    for (spec, container, expected) in cases {
        check("restricted", &pod(spec, container), expected);
    }
}

/// A version of the standards holds as it was then.
#[test]
fn versions() {
    let probe = pod(json!({}), json!({"livenessProbe": {"tcpSocket": {"host": "evil"}}}));
    check("baseline:v1.33", &probe, "");
    check("baseline:v1.34", &probe, "probe or lifecycle host (container \"c\" uses probe or lifecycle host \"evil\")");
    let sysctl = pod(json!({"securityContext": {"sysctls": [{"name": "net.ipv4.tcp_rmem"}]}}), json!({}));
    check("baseline:v1.31", &sysctl, "forbidden sysctls (net.ipv4.tcp_rmem)");
    check("baseline:v1.32", &sysctl, "");
    let root = pod(json!({"securityContext": {"runAsUser": 0}}), json!({}));
    check("restricted:v1.22", &root, "");
    let engine = pod(json!({"securityContext": {"seLinuxOptions": {"type": "container_engine_t"}}}), json!({}));
    check("baseline:v1.30", &engine, "seLinuxOptions (pod set forbidden securityContext.seLinuxOptions: type \"container_engine_t\")");
    check("baseline:v1.31", &engine, "");
}

#[test]
fn policies_of_labels() {
    let cases = [
        (json!({}), "privileged:latest privileged:latest", 0),
        (json!({"pod-security.kubernetes.io/enforce": "baseline"}), "baseline:latest baseline:latest", 0),
        (json!({"pod-security.kubernetes.io/enforce": "baseline", "pod-security.kubernetes.io/enforce-version": "v1.30"}), "baseline:v1.30 baseline:v1.30", 0),
        (json!({"pod-security.kubernetes.io/enforce": "baseline", "pod-security.kubernetes.io/warn": "restricted"}), "baseline:latest restricted:latest", 0),
        (json!({"pod-security.kubernetes.io/enforce": "strict"}), "restricted:latest privileged:latest", 1),
        (json!({"pod-security.kubernetes.io/warn": "x", "pod-security.kubernetes.io/warn-version": "v2.0"}), "privileged:latest privileged:latest", 2),
        (json!({"pod-security.kubernetes.io/enforce-version": "v1.09"}), "privileged:latest privileged:latest", 1),
    ];
    for (labels, expected, errors) in cases {
        let (policy, found) = Policy::of(&labelled(labels.clone()));
        assert_eq!(format!("{} {}", policy.enforce, policy.warn), expected, "{labels}");
        assert_eq!(found.len(), errors, "{labels}: {found:?}");
    }
}

#[tokio::test]
async fn requests() {
    let labels = json!({"pod-security.kubernetes.io/enforce": "baseline", "pod-security.kubernetes.io/warn": "restricted"});
    let plugin = PodSecurity { cluster: Fake::new([(Gr("", "namespaces"), labelled(labels))]) };
    let bad = pod(json!({"hostNetwork": true}), json!({}));
    let create = |object: Value| Request::new(Operation::Create, "", "pods", object);
    let refused = create(bad.clone()).validated(&plugin).await;
    assert_eq!(
        refused,
        Err("pods \"p\" is forbidden: violates PodSecurity \"baseline:latest\": host namespaces (hostNetwork=true)".into())
    );
    let loose = pod(json!({"securityContext": {"runAsUser": 0}}), json!({}));
    let warned = create(loose.clone()).validated(&plugin).await.expect("allowed");
    assert_eq!(warned, ["would violate PodSecurity \"restricted:latest\": runAsUser=0 (pod must not set runAsUser=0)"]);
    // An update that changes no image is let through; one that does is looked at.
    let update = |object: Value| Request { old: Some(bad.clone()), ..Request::new(Operation::Update, "", "pods", object) };
    assert_eq!(update(bad.clone()).validated(&plugin).await, Ok(vec![]));
    let mut other = bad.clone();
    other["spec"]["containers"][0]["image"] = "new".into();
    assert!(update(other).validated(&plugin).await.is_err());
    // Controllers are only warned.
    let deployment = json!({"metadata": {"name": "d", "namespace": "ns"}, "spec": {"template": {"metadata": {}, "spec": loose["spec"]}}});
    let warned = Request::new(Operation::Create, "apps", "deployments", deployment).validated(&plugin).await;
    assert_eq!(warned.expect("allowed").len(), 1);
}

#[tokio::test]
async fn namespaces() {
    let mut running = pod(json!({"hostPID": true}), json!({}));
    running["metadata"]["name"] = "b".into();
    let mut second = running.clone();
    second["metadata"]["name"] = "a".into();
    let plugin = PodSecurity { cluster: Fake::new([(Gr("", "pods"), running), (Gr("", "pods"), second)]) };
    let enforce = |level: &str| labelled(json!({"pod-security.kubernetes.io/enforce": level}));
    let update = |to: Value, from: Value| Request { old: Some(from), ..Request::new(Operation::Update, "", "namespaces", to) };
    let raised = update(enforce("baseline"), labelled(json!({}))).validated(&plugin).await.expect("allowed");
    assert_eq!(raised, [
        "existing pods in namespace \"ns\" violate the new PodSecurity enforce level \"baseline:latest\"",
        "a (and 1 other pod): host namespaces",
    ]);
    assert_eq!(update(enforce("privileged"), enforce("baseline")).validated(&plugin).await, Ok(vec![]));
    let bad = Request::new(Operation::Create, "", "namespaces", enforce("x")).validated(&plugin).await;
    assert!(bad.expect_err("refused").contains("must be one of privileged, baseline, restricted"));
    // What was bad before may stay bad.
    assert_eq!(update(enforce("x"), enforce("x")).validated(&plugin).await, Ok(vec![]));
}
