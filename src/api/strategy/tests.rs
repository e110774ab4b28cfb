//! Rules are checked as data: an object in, the errors or the changed object out.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::at::{get, set};
use super::*;
use crate::registry::Registry;

fn now() -> Timestamp {
    Timestamp::from_second(1_700_000_000).expect("in range")
}

fn yaml(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

fn resource(object: &Value) -> std::sync::Arc<Resource> {
    let (group, version) = crate::meta::split_api_version(crate::meta::api_version(object));
    let kind = crate::meta::kind(object);
    Registry::builtin().find_kind(group, version, kind).unwrap_or_else(|| panic!("no {group}/{version} {kind}"))
}

fn with_context<T>(object: &Value, subresource: Option<&str>, f: impl FnOnce(&Context<'_>) -> T) -> T {
    let r = resource(object);
    let (_, version) = crate::meta::split_api_version(crate::meta::api_version(object));
    f(&Context { resource: &r, version, subresource, now: now(), user: None })
}

/// What a create stores, and what is wrong with it.
pub(crate) fn create(mut object: Value) -> (Value, Vec<String>) {
    let errors = with_context(&object.clone(), None, |ctx| {
        let s = ctx.resource.strategy;
        s.defaults(ctx, &mut object);
        set(&mut object, "metadata.uid", "u-1".into());
        if ctx.resource.namespaced && get(&object, "metadata.namespace").is_null() {
            set(&mut object, "metadata.namespace", "default".into());
        }
        s.prepare_create(ctx, &mut object);
        s.validate(ctx, &object)
    });
    (object, errors.iter().map(ToString::to_string).collect())
}

/// What an update of `old` to `new` stores, and what is wrong with it.
fn update(old: &Value, mut new: Value, subresource: Option<&str>) -> (Value, Vec<String>) {
    let mut old = old.clone();
    set(&mut old, "metadata.resourceVersion", "1".into());
    set(&mut new, "metadata.resourceVersion", "1".into());
    let errors = with_context(&old, subresource, |ctx| {
        let s = ctx.resource.strategy;
        s.defaults(ctx, &mut new);
        s.prepare_update(ctx, &mut new, &old);
        s.validate_update(ctx, &new, &old)
    });
    (new, errors.iter().map(ToString::to_string).collect())
}

fn begin_with(got: &[String], want: &[&str]) -> bool {
    got.len() == want.len() && got.iter().zip(want).all(|(g, w)| g.starts_with(w))
}

/// Each object of the table is refused with errors that begin as listed, and no others.
fn check_refused(table: &[(&str, &[&str])]) {
    let mut failures = Vec::new();
    for (object, want) in table {
        let (_, got) = create(yaml(object));
        if !begin_with(&got, want) {
            failures.push(format!("{object}\n got {got:#?}\nwant {want:#?}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

const POD: &str = "{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: [{name: c, image: a}]}}";
const DEPLOYMENT: &str = "{apiVersion: apps/v1, kind: Deployment, metadata: {name: d}, spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: a}]}}}}";
const SERVICE: &str = "{apiVersion: v1, kind: Service, metadata: {name: s}, spec: {ports: [{port: 80}]}}";
const JOB: &str = "{apiVersion: batch/v1, kind: Job, metadata: {name: j}, spec: {template: {spec: {restartPolicy: Never, containers: [{name: c, image: a}]}}}}";
const CLAIM: &str = "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: c}, spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}";

#[test]
fn every_minimal_object_is_taken() {
    let table = [
        POD,
        DEPLOYMENT,
        SERVICE,
        JOB,
        CLAIM,
        "{apiVersion: v1, kind: Namespace, metadata: {name: nn}}",
        "{apiVersion: v1, kind: Node, metadata: {name: nn}}",
        "{apiVersion: v1, kind: ConfigMap, metadata: {name: c}, data: {a: b}}",
        "{apiVersion: v1, kind: Secret, metadata: {name: c}, stringData: {a: b}}",
        "{apiVersion: v1, kind: ServiceAccount, metadata: {name: s}}",
        "{apiVersion: v1, kind: Endpoints, metadata: {name: s}, subsets: [{addresses: [{ip: 10.0.0.1}], ports: [{port: 80}]}]}",
        "{apiVersion: v1, kind: LimitRange, metadata: {name: l}, spec: {limits: [{type: Container, max: {cpu: 1}}]}}",
        "{apiVersion: v1, kind: ResourceQuota, metadata: {name: q}, spec: {hard: {pods: 1, requests.cpu: 1, count/deployments.apps: 2}}}",
        "{apiVersion: v1, kind: PersistentVolume, metadata: {name: v}, spec: {capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce], hostPath: {path: /x}}}",
        "{apiVersion: v1, kind: ReplicationController, metadata: {name: r}, spec: {selector: {a: b}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: a}]}}}}",
        "{apiVersion: v1, kind: Event, metadata: {name: e, namespace: default}, involvedObject: {namespace: default}}",
        "{apiVersion: v1, kind: PodTemplate, metadata: {name: e}, template: {spec: {containers: [{name: c, image: a}]}}}",
        "{apiVersion: apps/v1, kind: ReplicaSet, metadata: {name: d}, spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: a}]}}}}",
        "{apiVersion: apps/v1, kind: DaemonSet, metadata: {name: d}, spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: a}]}}}}",
        "{apiVersion: apps/v1, kind: StatefulSet, metadata: {name: d}, spec: {serviceName: s, selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: a, volumeMounts: [{name: v, mountPath: /v}]}]}}, volumeClaimTemplates: [{metadata: {name: v}, spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}]}}",
        "{apiVersion: apps/v1, kind: ControllerRevision, metadata: {name: c}, revision: 1, data: {}}",
        "{apiVersion: batch/v1, kind: CronJob, metadata: {name: c}, spec: {schedule: '* * * * *', jobTemplate: {spec: {template: {spec: {restartPolicy: Never, containers: [{name: c, image: a}]}}}}}}",
        "{apiVersion: networking.k8s.io/v1, kind: Ingress, metadata: {name: i}, spec: {rules: [{host: a.b, http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: s, port: {number: 80}}}}]}}]}}",
        "{apiVersion: networking.k8s.io/v1, kind: IngressClass, metadata: {name: i}, spec: {controller: a.b/c}}",
        "{apiVersion: networking.k8s.io/v1, kind: NetworkPolicy, metadata: {name: nn}, spec: {podSelector: {}, ingress: [{from: [{podSelector: {}}]}]}}",
        "{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, metadata: {name: e}, addressType: IPv4, endpoints: [{addresses: [10.0.0.1]}], ports: [{port: 80}]}",
        "{apiVersion: autoscaling/v2, kind: HorizontalPodAutoscaler, metadata: {name: h}, spec: {maxReplicas: 3, scaleTargetRef: {kind: Deployment, name: d, apiVersion: apps/v1}}}",
        "{apiVersion: policy/v1, kind: PodDisruptionBudget, metadata: {name: p}, spec: {minAvailable: 1, selector: {matchLabels: {a: b}}}}",
        "{apiVersion: rbac.authorization.k8s.io/v1, kind: Role, metadata: {name: 'r:x'}, rules: [{apiGroups: [''], resources: [pods], verbs: [get]}]}",
        "{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, metadata: {name: r}, rules: [{nonResourceURLs: [/x], verbs: [get]}]}",
        "{apiVersion: rbac.authorization.k8s.io/v1, kind: RoleBinding, metadata: {name: r}, roleRef: {kind: Role, name: r}, subjects: [{kind: User, name: u}, {kind: ServiceAccount, name: s}]}",
        "{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding, metadata: {name: r}, roleRef: {kind: ClusterRole, name: r}, subjects: [{kind: ServiceAccount, name: s, namespace: nn}]}",
        "{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: s}, provisioner: a.b/c}",
        "{apiVersion: storage.k8s.io/v1, kind: CSIDriver, metadata: {name: s}, spec: {}}",
        "{apiVersion: storage.k8s.io/v1, kind: CSINode, metadata: {name: s}, spec: {drivers: [{name: a.b, nodeID: nn}]}}",
        "{apiVersion: storage.k8s.io/v1, kind: VolumeAttachment, metadata: {name: s}, spec: {attacher: a.b, nodeName: nn, source: {persistentVolumeName: v}}}",
        "{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: p}, value: 10}",
        "{apiVersion: node.k8s.io/v1, kind: RuntimeClass, metadata: {name: p}, handler: runc}",
        "{apiVersion: coordination.k8s.io/v1, kind: Lease, metadata: {name: l}, spec: {holderIdentity: h, leaseDurationSeconds: 15}}",
        "{apiVersion: admissionregistration.k8s.io/v1, kind: ValidatingWebhookConfiguration, metadata: {name: v}, webhooks: [{name: a.b.c, sideEffects: None, admissionReviewVersions: [v1], clientConfig: {url: 'https://x/y'}, rules: [{operations: [CREATE], apiGroups: [''], apiVersions: [v1], resources: [pods]}]}]}",
        "{apiVersion: admissionregistration.k8s.io/v1, kind: ValidatingAdmissionPolicy, metadata: {name: v}, spec: {matchConstraints: {resourceRules: [{operations: [CREATE], apiGroups: [''], apiVersions: [v1], resources: [pods]}]}, validations: [{expression: 'true'}]}}",
        "{apiVersion: admissionregistration.k8s.io/v1, kind: ValidatingAdmissionPolicyBinding, metadata: {name: v}, spec: {policyName: v, validationActions: [Deny]}}",
        "{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, metadata: {name: foos.a.b}, spec: {group: a.b, scope: Namespaced, names: {plural: foos, kind: Foo}, versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, properties: {spec: {type: object, properties: {x: {type: integer}}}}}}}]}}",
        "{apiVersion: apiregistration.k8s.io/v1, kind: APIService, metadata: {name: v1.a.b}, spec: {group: a.b, version: v1, groupPriorityMinimum: 100, versionPriority: 100, service: {name: s, namespace: nn}}}",
        "{apiVersion: flowcontrol.apiserver.k8s.io/v1, kind: FlowSchema, metadata: {name: f}, spec: {priorityLevelConfiguration: {name: p}, rules: [{subjects: [{kind: User, user: {name: u}}], nonResourceRules: [{verbs: ['*'], nonResourceURLs: ['*']}]}]}}",
        "{apiVersion: flowcontrol.apiserver.k8s.io/v1, kind: PriorityLevelConfiguration, metadata: {name: f}, spec: {type: Limited, limited: {limitResponse: {type: Reject}}}}",
        "{apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: d}, spec: {}}",
        "{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: d}, spec: {devices: {requests: [{name: r, exactly: {deviceClassName: d}}]}}}",
    ];
    let refused: Vec<_> = table
        .iter()
        .map(|object| (object, create(yaml(object)).1))
        .filter(|(_, errors)| !errors.is_empty())
        .collect();
    assert!(refused.is_empty(), "{refused:#?}");
}

/// `POD` with its one container or its spec changed.
fn pod(container: &str, spec: &str) -> Value {
    yaml(&format!(
        "{{apiVersion: v1, kind: Pod, metadata: {{name: p}}, spec: {{containers: [{{name: c, image: a{container}}}]{spec}}}}}"
    ))
}

fn check_pods(table: &[(&str, &str, &[&str])]) {
    let mut failures = Vec::new();
    for (container, spec, want) in table {
        let (_, got) = create(pod(container, spec));
        if !begin_with(&got, want) {
            failures.push(format!("{container} {spec}\n got {got:#?}\nwant {want:#?}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn pods_refused() {
    check_pods(&[
        ("", ", restartPolicy: Sometimes", &["spec.restartPolicy: Unsupported value: \"Sometimes\""]),
        ("", ", dnsPolicy: X", &["spec.dnsPolicy: Unsupported value: \"X\""]),
        ("", ", dnsPolicy: None", &["spec.dnsConfig: Required value: must provide `dnsConfig` when `dnsPolicy` is None"]),
        ("", ", terminationGracePeriodSeconds: -1", &[]),
        ("", ", activeDeadlineSeconds: 0", &["spec.activeDeadlineSeconds: Invalid value: 0: must be between 1 and 2147483647"]),
        ("", ", hostname: A", &["spec.hostname: Invalid value: \"A\": a lowercase RFC 1123 label"]),
        ("", ", nodeSelector: {'a b': c}", &["spec.nodeSelector: Invalid value: \"a b\""]),
        ("", ", initContainers: [{name: c, image: a}]", &["spec.initContainers[0].name: Duplicate value: \"c\""]),
        ("", ", ephemeralContainers: [{name: e, image: a}]", &["spec.ephemeralContainers: Forbidden: cannot be set on create"]),
        ("", ", tolerations: [{key: a, operator: Exists, value: b}]", &["spec.tolerations[0].operator: Invalid value: \"b\""]),
        ("", ", tolerations: [{operator: Equal, value: b}]", &["spec.tolerations[0].operator: Invalid value: \"Equal\""]),
        ("", ", volumes: [{name: v, emptyDir: {}}, {name: v, emptyDir: {}}]", &["spec.volumes[1].name: Duplicate value: \"v\""]),
        ("", ", volumes: [{name: v, hostPath: {path: ''}}]", &["spec.volumes[0].hostPath.path: Required value"]),
        ("", ", volumes: [{name: v, emptyDir: {}, configMap: {name: x}}]", &["spec.volumes[0].configMap: Forbidden: may not specify more than 1 volume type"]),
        (", volumeMounts: [{name: v, mountPath: /v}]", "", &["spec.containers[0].volumeMounts[0].name: Not found: \"v\""]),
        (", ports: [{containerPort: 0}]", "", &["spec.containers[0].ports[0].containerPort: Required value"]),
        (", ports: [{containerPort: 70000}]", "", &["spec.containers[0].ports[0].containerPort: Invalid value: 70000: must be between 1 and 65535, inclusive"]),
        (", ports: [{containerPort: 80, protocol: X}]", "", &["spec.containers[0].ports[0].protocol: Unsupported value: \"X\""]),
        (", ports: [{containerPort: 80, hostPort: 81}]", ", hostNetwork: true", &["spec.containers[0].ports[0].hostPort: Invalid value: 81: must match `containerPort` when `hostNetwork` is true"]),
        (", env: [{name: A, value: b, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]", "", &["spec.containers[0].env[0].valueFrom: Invalid value: \"\": may not be specified when `value` is not empty"]),
        (", env: [{name: A, valueFrom: {fieldRef: {fieldPath: spec.x}}}]", "", &["spec.containers[0].env[0].valueFrom.fieldRef.fieldPath: Invalid value: \"spec.x\": error converting fieldPath"]),
        (", imagePullPolicy: X", "", &["spec.containers[0].imagePullPolicy: Unsupported value: \"X\""]),
        (", resources: {requests: {cpu: '2'}, limits: {cpu: '1'}}", "", &["spec.containers[0].resources.requests: Invalid value: \"2\": must be less than or equal to cpu limit of 1"]),
        (", resources: {requests: {cpu: '-1'}}", "", &["spec.containers[0].resources.requests[cpu]: Invalid value: \"-1\": must be greater than or equal to 0"]),
        (", livenessProbe: {httpGet: {path: /}, tcpSocket: {port: 1}}", "", &["spec.containers[0].livenessProbe.httpGet.port: Invalid value: 0", "spec.containers[0].livenessProbe.tcpSocket: Forbidden: may not specify more than 1 handler type"]),
        (", livenessProbe: {exec: {command: [a]}, successThreshold: 2}", "", &["spec.containers[0].livenessProbe.successThreshold: Invalid value: 2: must be 1"]),
        (", securityContext: {privileged: true, allowPrivilegeEscalation: false}", "", &["spec.containers[0].securityContext: Invalid value"]),
        ("", ", securityContext: {runAsUser: -1}", &["spec.securityContext.runAsUser: Invalid value: -1"]),
        ("", ", topologySpreadConstraints: [{maxSkew: 0, topologyKey: z, whenUnsatisfiable: DoNotSchedule}]", &["spec.topologySpreadConstraints[0].maxSkew: Invalid value: 0: must be greater than zero"]),
        ("", ", affinity: {podAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{labelSelector: {}}]}}", &["spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey: Required value: can not be empty", "spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey: Invalid value: \"\": name part must be non-empty", "spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey: Invalid value: \"\": name part must consist"]),
    ]);
    check_refused(&[
        ("{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: []}}", &["spec.containers: Required value"]),
        ("{apiVersion: v1, kind: Pod, metadata: {name: P}, spec: {containers: [{name: c, image: a}]}}", &["metadata.name: Invalid value: \"P\": a lowercase RFC 1123 subdomain"]),
        ("{apiVersion: v1, kind: Pod, metadata: {}, spec: {containers: [{name: c, image: a}]}}", &["metadata.name: Required value: name or generateName is required"]),
        ("{apiVersion: v1, kind: Pod, metadata: {name: p, labels: {a: 'b c'}, annotations: {'a/b/c': d}}, spec: {containers: [{name: c, image: a}]}}", &["metadata.labels: Invalid value: \"b c\"", "metadata.annotations: Invalid value: \"a/b/c\""]),
    ]);
}

#[test]
fn pod_defaults() {
    let (got, errors) = create(pod(
        ", ports: [{containerPort: 80}], resources: {limits: {cpu: 1, memory: 1Gi}}, livenessProbe: {httpGet: {port: 80}}",
        ", hostNetwork: true, serviceAccount: x, initContainers: [{name: i, image: 'b:1'}]",
    ));
    assert_eq!(errors, [""; 0]);
    let table = [
        ("spec.restartPolicy", json!("Always")),
        ("spec.dnsPolicy", json!("ClusterFirst")),
        ("spec.schedulerName", json!("default-scheduler")),
        ("spec.terminationGracePeriodSeconds", json!(30)),
        ("spec.enableServiceLinks", json!(true)),
        ("spec.serviceAccountName", json!("x")),
        ("status.phase", json!("Pending")),
        ("status.qosClass", json!("Burstable")),
        ("metadata.generation", json!(1)),
    ];
    for (path, want) in table {
        assert_eq!(*get(&got, path), want, "{path}");
    }
    let c = &got["spec"]["containers"][0];
    assert_eq!(c["imagePullPolicy"], "Always");
    assert_eq!(c["ports"][0]["hostPort"], 80);
    assert_eq!(c["resources"]["requests"]["cpu"], c["resources"]["limits"]["cpu"]);
    assert_eq!(c["livenessProbe"]["httpGet"]["scheme"], "HTTP");
    assert_eq!(c["livenessProbe"]["periodSeconds"], 10);
    assert_eq!(got["spec"]["initContainers"][0]["imagePullPolicy"], "IfNotPresent");

    for (container, class) in [
        ("", "BestEffort"),
        (", resources: {limits: {cpu: 1, memory: 1Gi}}", "Guaranteed"),
        (", resources: {requests: {cpu: 1}}", "Burstable"),
    ] {
        assert_eq!(create(pod(container, "")).0["status"]["qosClass"], class);
    }
    // Twice is the same as once.
    let again = create(got.clone()).0;
    assert_eq!(again["spec"], got["spec"]);
}

/// Changes a created object at a path, updates, and hands back what is stored with the errors.
fn change(object: &str, path: &str, value: Value, subresource: Option<&str>) -> (Value, Vec<String>) {
    let (old, errors) = create(yaml(object));
    assert_eq!(errors, [""; 0]);
    let mut new = old.clone();
    match path.split_once("[0].") {
        Some((list, rest)) => {
            if let Some(first) = super::at::items_mut(&mut new, list).next() {
                set(first, rest, value);
            }
        }
        None => set(&mut new, path, value),
    }
    update(&old, new, subresource)
}

#[test]
fn changes_refused() {
    const SECRET: &str = "{apiVersion: v1, kind: Secret, metadata: {name: s}, immutable: true, data: {a: Yg==}}";
    const ROLES: &str = "{apiVersion: rbac.authorization.k8s.io/v1, kind: RoleBinding, metadata: {name: r}, roleRef: {kind: Role, name: r}, subjects: []}";
    const CLASS: &str = "{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {name: s}, provisioner: a.b/c}";
    const PRIORITY: &str = "{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: p}, value: 10}";
    let table: [(&str, &str, Value, &[&str]); 16] = [
        (POD, "spec.nodeName", json!("n"), &["spec: Forbidden: pod updates may not change fields other than"]),
        (POD, "spec.containers[0].image", json!("b"), &[]),
        (POD, "spec.containers[0].command", json!(["x"]), &["spec: Forbidden: pod updates may not change fields other than"]),
        (POD, "spec.activeDeadlineSeconds", json!(10), &[]),
        (POD, "spec.tolerations", json!([{"key": "a", "operator": "Exists"}]), &[]),
        (DEPLOYMENT, "spec.replicas", json!(3), &[]),
        (
            DEPLOYMENT,
            "spec.selector",
            json!({"matchLabels": {"a": "c"}}),
            &["spec.selector: Invalid value", "spec.template.metadata.labels: Invalid value"],
        ),
        (JOB, "spec.completions", json!(3), &["spec.completions: Invalid value: 3: field is immutable"]),
        (JOB, "spec.parallelism", json!(3), &[]),
        (CLAIM, "spec.accessModes", json!(["ReadWriteMany"]), &["spec: Forbidden: spec is immutable after creation"]),
        (SECRET, "data.a", json!("Yw=="), &["data: Forbidden: field is immutable when `immutable` is set"]),
        (SECRET, "immutable", json!(false), &["immutable: Forbidden: field is immutable when `immutable` is set"]),
        (ROLES, "roleRef.name", json!("q"), &["roleRef: Invalid value"]),
        (CLASS, "provisioner", json!("d.e/f"), &["provisioner: Invalid value: \"d.e/f\": field is immutable"]),
        (PRIORITY, "value", json!(11), &["value: Forbidden: may not be changed in an update."]),
        (POD, "metadata.uid", json!("u-2"), &["metadata.uid: Invalid value: \"u-2\": field is immutable"]),
    ];
    let mut failures = Vec::new();
    for (object, path, value, want) in table {
        let (_, got) = change(object, path, value.clone(), None);
        if !begin_with(&got, want) {
            failures.push(format!("{object} {path}={value}\n got {got:#?}\nwant {want:#?}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn generations_and_status() {
    // What counts as a change of what is wanted, and what does not.
    let table = [
        (DEPLOYMENT, "spec.replicas", json!(3), 2),
        (DEPLOYMENT, "metadata.labels", json!({"x": "y"}), 1),
        (DEPLOYMENT, "status.replicas", json!(3), 1),
        (JOB, "spec.parallelism", json!(3), 2),
    ];
    for (object, path, value, want) in table {
        let (got, errors) = change(object, path, value, None);
        assert_eq!(errors, [""; 0]);
        assert_eq!(get(&got, "metadata.generation"), want, "{path}");
        assert!(get(&got, "status.replicas").as_i64().unwrap_or(0) == 0, "the main resource does not write status");
    }
    let (old, _) = create(yaml(DEPLOYMENT));
    let mut new = old.clone();
    set(&mut new, "status", json!({"replicas": 3, "updatedReplicas": 1}));
    set(&mut new, "spec.replicas", json!(9));
    let (got, errors) = update(&old, new, Some("status"));
    assert_eq!(errors, [""; 0]);
    assert_eq!((get(&got, "status.replicas"), get(&got, "spec.replicas")), (&json!(3), &json!(1)));
}

#[test]
fn jobs_select_their_own_pods() {
    let (got, errors) = create(yaml(JOB));
    assert_eq!(errors, [""; 0]);
    let want = json!({"matchLabels": {"batch.kubernetes.io/controller-uid": "u-1"}});
    assert_eq!(*get(&got, "spec.selector"), want);
    let labels = get(&got, "spec.template.metadata.labels");
    assert_eq!(labels["batch.kubernetes.io/job-name"], "j");
    assert_eq!(labels["controller-uid"], "u-1");
    assert_eq!(*get(&got, "spec.completionMode"), "NonIndexed");
    assert_eq!(*get(&got, "spec.backoffLimit"), 6);
}

#[test]
fn computed_on_create() {
    let (secret, _) = create(yaml("{apiVersion: v1, kind: Secret, metadata: {name: s}, data: {a: YQ==}, stringData: {b: c}}"));
    assert_eq!(secret["data"], json!({"a": "YQ==", "b": "Yw=="}));
    assert_eq!((secret["type"].as_str(), secret.get("stringData")), (Some("Opaque"), None));

    let (namespace, _) = create(yaml("{apiVersion: v1, kind: Namespace, metadata: {name: nn}}"));
    assert_eq!(*get(&namespace, "spec.finalizers"), json!(["kubernetes"]));
    assert_eq!(*get(&namespace, "status.phase"), "Active");
    assert_eq!(namespace["metadata"]["labels"]["kubernetes.io/metadata.name"], "nn");

    let (service, _) = create(yaml("{apiVersion: v1, kind: Service, metadata: {name: s}, spec: {type: LoadBalancer, ports: [{port: 80}]}}"));
    assert_eq!(service["spec"]["ports"][0]["targetPort"], 80);
    assert_eq!(service["spec"]["externalTrafficPolicy"], "Cluster");
    assert_eq!(service["spec"]["allocateLoadBalancerNodePorts"], true);

    let claim = "{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: c}, spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}, dataSource: {kind: PersistentVolumeClaim, name: o}}}";
    let (claim, _) = create(yaml(claim));
    assert_eq!(claim["spec"]["dataSourceRef"], json!({"kind": "PersistentVolumeClaim", "name": "o"}));
}

#[test]
fn services_refused() {
    let service = |spec: &str| format!("{{apiVersion: v1, kind: Service, metadata: {{name: s}}, spec: {{{spec}}}}}");
    let table: [(&str, &[&str]); 8] = [
        ("ports: []", &["spec.ports: Required value"]),
        ("clusterIP: None", &[]),
        ("ports: [{port: 0, targetPort: 1}]", &["spec.ports[0].port: Invalid value: 0"]),
        ("ports: [{port: 80}, {port: 81}]", &["spec.ports[0].name: Required value", "spec.ports[1].name: Required value"]),
        ("ports: [{port: 80, nodePort: 30000}]", &["spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'"]),
        ("type: ExternalName", &["spec.externalName: Required value"]),
        ("type: X, ports: [{port: 80}]", &["spec.type: Unsupported value: \"X\""]),
        ("sessionAffinity: X, ports: [{port: 80}]", &["spec.sessionAffinity: Unsupported value: \"X\""]),
    ];
    for (spec, want) in table {
        check_refused(&[(&service(spec), want)]);
    }
}

#[test]
fn others_refused() {
    check_refused(&[
        ("{apiVersion: v1, kind: Namespace, metadata: {name: a.b}}", &["metadata.name: Invalid value: \"a.b\": must not contain dots"]),
        ("{apiVersion: v1, kind: ConfigMap, metadata: {name: c}, data: {a: b}, binaryData: {a: Yg==}}", &["data[a]: Invalid value: \"a\": duplicate of key present in binaryData"]),
        ("{apiVersion: v1, kind: ConfigMap, metadata: {name: c}, data: {'a b': b}}", &["data[a b]: Invalid value"]),
        ("{apiVersion: v1, kind: Secret, metadata: {name: c}, type: kubernetes.io/tls, data: {tls.crt: ''}}", &["data[tls.key]: Required value"]),
        ("{apiVersion: batch/v1, kind: CronJob, metadata: {name: c}, spec: {schedule: '* * *', jobTemplate: {spec: {template: {spec: {restartPolicy: Never, containers: [{name: c, image: a}]}}}}}}", &["spec.schedule: Invalid value: \"* * *\""]),
        ("{apiVersion: batch/v1, kind: Job, metadata: {name: j}, spec: {template: {spec: {containers: [{name: c, image: a}]}}}}", &["spec.template.spec.restartPolicy: Required value: valid values: \"OnFailure\", \"Never\""]),
        ("{apiVersion: policy/v1, kind: PodDisruptionBudget, metadata: {name: p}, spec: {minAvailable: 1, maxUnavailable: 1, selector: {matchLabels: {a: b}}}}", &["spec: Invalid value"]),
        ("{apiVersion: networking.k8s.io/v1, kind: Ingress, metadata: {name: i}, spec: {rules: [{host: '10.0.0.1', http: {paths: [{path: x, pathType: Prefix, backend: {service: {name: s, port: {number: 80}}}}]}}]}}", &["spec.rules[0].host: Invalid value: \"10.0.0.1\": must be a DNS name, not an IP address", "spec.rules[0].http.paths[0].path: Invalid value: \"x\": must be an absolute path"]),
        ("{apiVersion: rbac.authorization.k8s.io/v1, kind: Role, metadata: {name: r}, rules: [{verbs: [get]}]}", &["rules[0].apiGroups: Required value: resource rules must supply at least one api group", "rules[0].resources: Required value: resource rules must supply at least one resource"]),
        ("{apiVersion: autoscaling/v2, kind: HorizontalPodAutoscaler, metadata: {name: h}, spec: {maxReplicas: 1, minReplicas: 2, scaleTargetRef: {kind: Deployment, name: d, apiVersion: apps/v1}}}", &["spec.maxReplicas: Invalid value: 1: must be greater than or equal to `minReplicas`"]),
        ("{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, metadata: {name: foos.x}, spec: {group: a.b, scope: Namespaced, names: {plural: foos, kind: Foo}, versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}]}}", &["metadata.name: Invalid value: \"foos.x\": must be spec.names.plural+\".\"+spec.group"]),
        ("{apiVersion: coordination.k8s.io/v1, kind: Lease, metadata: {name: l}, spec: {leaseDurationSeconds: 0}}", &["spec.leaseDurationSeconds: Invalid value: 0: must be greater than 0"]),
    ]);
}
