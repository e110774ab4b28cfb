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

/// Each object of the table is refused with errors that begin as listed, and no others.
fn check_refused(table: &[(&str, &[&str])]) {
    for (object, want) in table {
        let (_, got) = create(yaml(object));
        let ok = got.len() == want.len() && got.iter().zip(*want).all(|(g, w)| g.starts_with(w));
        assert!(ok, "{object}\n got {got:#?}\nwant {want:#?}");
    }
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
