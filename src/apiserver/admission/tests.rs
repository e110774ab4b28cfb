use super::certificates::{CertificateApproval, CertificateSigning, CertificateSubjectRestriction};
use super::defaults::*;
use super::limits::LimitRanger;
use super::namespaces::NamespaceLifecycle;
use super::noderestriction::NodeRestriction;
use super::priority::Priority;
use super::quota::ResourceQuota;
use super::runtimeclass::RuntimeClass;
use super::serviceaccount::ServiceAccount;
use super::testing::Request;
use super::*;
use crate::authz::{Attributes, Authorizer, Decision, Rules};
use crate::cluster::testing::Fake;
use crate::cluster::{Cluster, Gr};
use serde_json::json;

const PODS: Gr = Gr("", "pods");

fn create(plural: &'static str, object: Value) -> Request {
    Request::new(Operation::Create, "", plural, object)
}

fn update(plural: &'static str, old: Value, object: Value) -> Request {
    Request { old: Some(old), ..Request::new(Operation::Update, "", plural, object) }
}

fn pod(spec: Value) -> Value {
    json!({"metadata": {"name": "p", "namespace": "ns"}, "spec": spec})
}

fn refused<T: std::fmt::Debug>(result: Result<T, String>, part: &str) {
    let message = result.expect_err("refused");
    assert!(message.contains(part), "{message:?} does not contain {part:?}");
}

/// Allows what is named: `verb resource name`.
struct Only(&'static [&'static str]);

impl Authorizer for Only {
    fn authorize(&self, request: &Attributes<'_>) -> Decision {
        let text = format!("{} {} {}", request.verb, request.resource, request.name);
        match self.0.contains(&text.as_str()) {
            true => Decision::Allow(String::new()),
            false => Decision::NoOpinion(String::new()),
        }
    }
    fn rules_for(&self, _: &UserInfo, _: &str) -> Rules {
        Rules::default()
    }
}

#[tokio::test]
async fn namespace_lifecycle() {
    let cluster = Fake::new([
        (Gr("", "namespaces"), json!({"metadata": {"name": "ns"}, "status": {"phase": "Active"}})),
        (Gr("", "namespaces"), json!({"metadata": {"name": "dying"}, "status": {"phase": "Terminating"}})),
    ]);
    let plugin = NamespaceLifecycle::new(cluster);
    let in_namespace = |namespace: &str| create("configmaps", json!({"metadata": {"name": "c", "namespace": namespace}}));
    assert!(in_namespace("ns").mutated(&plugin).await.is_ok());
    refused(in_namespace("none").mutated(&plugin).await, "namespaces \"none\" not found");
    refused(
        in_namespace("dying").mutated(&plugin).await,
        "configmaps \"c\" is forbidden: unable to create new content in namespace dying because it is being terminated",
    );
    let cause = in_namespace("dying").run(async |request| plugin.mutate(request).await).await.expect_err("refused");
    assert_eq!(cause.details.as_ref().map(|details| details.causes[0].reason.as_str()), Some("NamespaceTerminating"));
    let delete = |name: &str| Request {
        old: Some(json!({"metadata": {"name": name}})),
        ..Request::new(Operation::Delete, "", "namespaces", Value::Null)
    };
    refused(delete("default").mutated(&plugin).await, "this namespace may not be deleted");
    assert!(delete("ns").mutated(&plugin).await.is_ok());
    let edit = update("configmaps", json!({}), json!({"metadata": {"name": "c", "namespace": "dying"}}));
    assert!(edit.mutated(&plugin).await.is_ok());
}

#[tokio::test]
async fn service_account() {
    let cluster = Fake::new([
        (Gr("", "serviceaccounts"), json!({
            "metadata": {"name": "default", "namespace": "ns"}, "imagePullSecrets": [{"name": "registry"}],
        })),
        (Gr("", "serviceaccounts"), json!({
            "metadata": {"name": "quiet", "namespace": "ns"}, "automountServiceAccountToken": false,
        })),
        (Gr("", "serviceaccounts"), json!({
            "metadata": {"name": "strict", "namespace": "ns", "annotations": {"kubernetes.io/enforce-mountable-secrets": "true"}},
            "secrets": [{"name": "ok"}],
        })),
    ]);
    let plugin = ServiceAccount { cluster };
    let plain = create("pods", pod(json!({"containers": [{"name": "c"}]}))).mutated(&plugin).await.expect("a pod");
    let spec = &plain["spec"];
    assert_eq!((&spec["serviceAccountName"], &spec["serviceAccount"]), (&json!("default"), &json!("default")));
    assert_eq!(spec["imagePullSecrets"], json!([{"name": "registry"}]));
    let volume = spec["volumes"][0]["name"].as_str().expect("a volume");
    assert!(volume.starts_with("kube-api-access-") && volume.len() == "kube-api-access-".len() + 5);
    assert_eq!(
        spec["containers"][0]["volumeMounts"],
        json!([{"name": volume, "readOnly": true, "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}])
    );
    assert_eq!(spec["volumes"][0]["projected"]["sources"][0]["serviceAccountToken"], json!({"path": "token", "expirationSeconds": 3607}));
    let unmounted = [
        json!({"serviceAccountName": "quiet", "containers": [{"name": "c"}]}),
        json!({"automountServiceAccountToken": false, "containers": [{"name": "c"}]}),
        json!({"containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}]}]}),
    ];
    for spec in unmounted {
        let pod = create("pods", pod(spec.clone())).mutated(&plugin).await.expect("a pod");
        assert!(pod["spec"]["volumes"].is_null(), "{spec}");
    }
    let own = json!({"imagePullSecrets": [{"name": "mine"}], "containers": [{"name": "c"}]});
    let own = create("pods", pod(own)).mutated(&plugin).await.expect("a pod");
    assert_eq!(own["spec"]["imagePullSecrets"], json!([{"name": "mine"}]));
    let gone = create("pods", pod(json!({"serviceAccountName": "gone"})));
    refused(gone.mutated(&plugin).await, "error looking up service account ns/gone: serviceaccount \"gone\" not found");
    let secret = |name: &str| json!({"serviceAccountName": "strict", "volumes": [{"name": "v", "secret": {"secretName": name}}]});
    assert!(create("pods", pod(secret("ok"))).validated(&plugin).await.is_ok());
    refused(
        create("pods", pod(secret("other"))).validated(&plugin).await,
        "volume with secret.secretName=\"other\" is not allowed because service account strict does not reference that secret",
    );
    let mut mirror = pod(json!({"serviceAccountName": "default"}));
    mirror["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
    refused(create("pods", mirror).mutated(&plugin).await, "a mirror pod may not reference service accounts");
}

fn node_request(request: Request) -> Request {
    let user = UserInfo { name: "system:node:n1".into(), groups: vec!["system:nodes".into()], ..UserInfo::default() };
    Request { user, ..request }
}

#[tokio::test]
async fn node_restriction() {
    let mine = json!({
        "metadata": {"name": "mine", "namespace": "ns", "uid": "u1"},
        "spec": {"nodeName": "n1", "volumes": [{"projected": {"sources": [{"serviceAccountToken": {"audience": "vault"}}]}},
                                               {"projected": {"sources": [{"serviceAccountToken": {}}]}}]},
    });
    let theirs = json!({"metadata": {"name": "theirs", "namespace": "ns", "uid": "u2"}, "spec": {"nodeName": "n2"}});
    let cluster = Fake::new([
        (PODS, mine.clone()),
        (PODS, theirs.clone()),
        (Gr("", "nodes"), json!({"metadata": {"name": "n1", "uid": "node-uid"}})),
    ]);
    let plugin = NodeRestriction { cluster, authorizer: Arc::new(Only(&[])) };
    let mirror = |change: &dyn Fn(&mut Value)| {
        let mut pod = json!({
            "metadata": {
                "name": "m", "namespace": "ns", "annotations": {"kubernetes.io/config.mirror": "x"},
                "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "node-uid", "controller": true}],
            },
            "spec": {"nodeName": "n1"},
        });
        change(&mut pod);
        node_request(create("pods", pod))
    };
    let node = |labels: Value| json!({"metadata": {"name": "n1", "labels": labels}, "spec": {}});
    let subresource = |request: Request, subresource| node_request(Request { subresource, ..request });
    let token = |pod: &str, uid: &str, audiences: Value| {
        let bound = json!({"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid});
        let body = json!({"metadata": {"name": "sa", "namespace": "ns"}, "spec": {"boundObjectRef": bound, "audiences": audiences}});
        subresource(create("serviceaccounts", body), "token")
    };
    let delete = |pod: &Value| node_request(Request { old: Some(pod.clone()), ..Request::new(Operation::Delete, "", "pods", Value::Null) });
    let status = |pod: &Value, change: &dyn Fn(&mut Value)| {
        let mut new = pod.clone();
        change(&mut new);
        subresource(update("pods", pod.clone(), new), "status")
    };
    let lease = |name: &str| node_request(Request::new(
        Operation::Create, "coordination.k8s.io", "leases", json!({"metadata": {"name": name, "namespace": "kube-node-lease"}}),
    ));
    let volume = |node: &str, change: &dyn Fn(&mut Value)| {
        let old = json!({
            "metadata": {
                "name": "v", "deletionTimestamp": "2024-01-01T00:00:00Z", "annotations": {"windlass.dev/node": node},
                "finalizers": ["windlass.dev/local-path", "other"],
            },
            "spec": {},
        });
        let mut new = old.clone();
        change(&mut new);
        node_request(update("persistentvolumes", old, new))
    };
    let cases = [
        (mirror(&|_| {}), ""),
        (mirror(&|pod| pod["metadata"]["annotations"] = json!({})), "can only create mirror pods"),
        (mirror(&|pod| pod["spec"]["nodeName"] = "n2".into()), "can only create pods with spec.nodeName set to itself"),
        (mirror(&|pod| pod["metadata"]["ownerReferences"] = json!([])), "can only create pods with an owner reference set to itself"),
        (mirror(&|pod| pod["metadata"]["ownerReferences"][0]["uid"] = "x".into()), "node n1 UID mismatch: expected x got node-uid"),
        (mirror(&|pod| pod["spec"]["serviceAccountName"] = "x".into()), "can not create pods that reference serviceaccounts"),
        (mirror(&|pod| pod["spec"]["volumes"] = json!([{"persistentVolumeClaim": {"claimName": "c"}}])), "can not create pods that reference persistentvolumeclaims"),
        (delete(&mine), ""),
        (delete(&theirs), "can only delete pods with spec.nodeName set to itself"),
        (status(&mine, &|pod| pod["status"] = json!({"phase": "Running"})), ""),
        (status(&theirs, &|_| {}), "can only update pod status for pods with spec.nodeName set to itself"),
        (status(&mine, &|pod| pod["metadata"]["labels"] = json!({"a": "b"})), "cannot update labels through pod status"),
        (node_request(update("pods", mine.clone(), mine.clone())), "can only create and delete mirror pods"),
        (node_request(create("nodes", node(json!({"kubernetes.io/os": "linux", "mine": "x", "node.kubernetes.io/x": "y"})))), ""),
        (node_request(create("nodes", node(json!({"node-restriction.kubernetes.io/x": "y"})))), "is not allowed to set the following labels: node-restriction.kubernetes.io/x"),
        (node_request(create("nodes", json!({"metadata": {"name": "n2"}}))), "node \"n1\" is not allowed to modify node \"n2\""),
        (node_request(update("nodes", node(json!({})), json!({"metadata": {"name": "n1"}, "spec": {"taints": [{"key": "x"}]}}))), "is not allowed to modify taints"),
        (node_request(update("nodes", node(json!({"k8s.io/a": "1"})), node(json!({})))), "is not allowed to modify labels: k8s.io/a"),
        (token("mine", "u1", json!(["vault"])), ""),
        (token("mine", "u1", json!([])), ""),
        (token("mine", "u1", json!(["other"])), "is not authorized to request tokens for audience \"other\""),
        (token("mine", "u1", json!(["a", "b"])), "node may only request 0 or 1 audiences"),
        (token("mine", "", json!([])), "pod binding without a uid"),
        (token("mine", "u9", json!([])), "does not match the UID in record"),
        (token("theirs", "u2", json!([])), "bound to a pod scheduled on a different node"),
        (lease("n1"), ""),
        (lease("n2"), "can only access node lease with the same name as the requesting node"),
        (volume("n1", &|pv| pv["metadata"]["finalizers"] = json!(["other"])), ""),
        (volume("n2", &|pv| pv["metadata"]["finalizers"] = json!(["other"])), "may only take the finalizer"),
        (volume("n1", &|pv| pv["metadata"]["finalizers"] = json!([])), "may only take the finalizer"),
        (volume("n1", &|pv| pv["spec"]["claimRef"] = json!({"name": "c", "namespace": "ns"})), "may only take the finalizer"),
        (volume("n1", &|pv| pv["metadata"]["deletionTimestamp"] = Value::Null), "may only take the finalizer"),
        (node_request(create("configmaps", json!({"metadata": {"name": "c", "namespace": "ns"}}))), ""),
        (create("nodes", json!({"metadata": {"name": "n2"}})), ""),
    ];
    for (request, expected) in cases {
        let result = request.mutated(&plugin).await;
        match expected {
            "" => assert!(result.is_ok(), "{:?}: {result:?}", request.object),
            part => refused(result, part),
        }
    }
}

#[tokio::test]
async fn limit_ranger() {
    let range = json!({
        "metadata": {"name": "r", "namespace": "ns"},
        "spec": {"limits": [
            {"type": "Container", "default": {"cpu": "1", "memory": "1Gi"}, "defaultRequest": {"cpu": "100m"},
             "min": {"cpu": "50m"}, "max": {"cpu": "2"}, "maxLimitRequestRatio": {"cpu": "10"}},
            {"type": "Pod", "max": {"memory": "2Gi"}},
            {"type": "PersistentVolumeClaim", "min": {"storage": "1Gi"}, "max": {"storage": "10Gi"}},
        ]},
    });
    let plugin = LimitRanger { cluster: Fake::new([(Gr("", "limitranges"), range)]) };
    let container = |resources: Value| pod(json!({"containers": [{"name": "c", "resources": resources}]}));
    let defaulted = create("pods", container(json!({}))).mutated(&plugin).await.expect("a pod");
    assert_eq!(
        defaulted["spec"]["containers"][0]["resources"],
        json!({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "100m"}})
    );
    assert_eq!(
        defaulted["metadata"]["annotations"]["kubernetes.io/limit-ranger"],
        "LimitRanger plugin set: cpu request for container c; cpu, memory limit for container c"
    );
    // A given limit is its own request before the default request counts.
    let given = create("pods", container(json!({"limits": {"cpu": "2"}}))).mutated(&plugin).await.expect("a pod");
    assert_eq!(given["spec"]["containers"][0]["resources"]["requests"], json!({"cpu": "2"}));
    let bounds = [
        (json!({"requests": {"cpu": "100m"}, "limits": {"cpu": "1", "memory": "1Gi"}}), ""),
        (json!({"requests": {"cpu": "10m"}, "limits": {"cpu": "50m", "memory": "1Gi"}}), "minimum cpu usage per Container is 50m, but request is 10m"),
        (json!({"requests": {"cpu": "1"}, "limits": {"cpu": "3", "memory": "1Gi"}}), "maximum cpu usage per Container is 2, but limit is 3"),
        (json!({"limits": {"cpu": "1", "memory": "1Gi"}}), "minimum cpu usage per Container is 50m.  No request is specified"),
        (json!({"requests": {"cpu": "100m"}, "limits": {"cpu": "2", "memory": "1Gi"}}), "cpu max limit to request ratio per Container is 10, but provided ratio is 20.000000"),
        (json!({"requests": {"cpu": "1"}, "limits": {"cpu": "1", "memory": "3Gi"}}), "maximum memory usage per Pod is 2Gi, but limit is 3Gi"),
    ];
    for (resources, expected) in bounds {
        let result = create("pods", container(resources)).validated(&plugin).await;
        match expected {
            "" => assert!(result.is_ok(), "{result:?}"),
            part => refused(result, part),
        }
    }
    let claim = |size: &str| create("persistentvolumeclaims", json!({
        "metadata": {"name": "c", "namespace": "ns"}, "spec": {"resources": {"requests": {"storage": size}}},
    }));
    assert!(claim("5Gi").validated(&plugin).await.is_ok());
    refused(claim("20Gi").validated(&plugin).await, "maximum storage usage per PersistentVolumeClaim is 10Gi, but request is 20Gi");
}

#[tokio::test]
async fn quota() {
    let quota = json!({
        "metadata": {"name": "q", "namespace": "ns"},
        "spec": {},
        "status": {
            "hard": {"pods": "2", "requests.cpu": "1", "count/deployments.apps": "1", "services.nodeports": "1"},
            "used": {"pods": "1", "requests.cpu": "800m", "count/deployments.apps": "0", "services.nodeports": "0"},
        },
    });
    let best_effort = json!({
        "metadata": {"name": "be", "namespace": "ns"},
        "spec": {"scopes": ["BestEffort"]},
        "status": {"hard": {"pods": "0"}, "used": {"pods": "0"}},
    });
    let quotas = Gr("", "resourcequotas");
    let cluster = Fake::new([(quotas, quota), (quotas, best_effort)]);
    let plugin = ResourceQuota { cluster: cluster.clone() };
    let used = |name: &str| cluster.cached(quotas, "ns", "q").map(|quota| quota["status"]["used"][name].clone());
    let cpu = |amount: &str| create("pods", pod(json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": amount}}}]})));
    refused(
        cpu("300m").validated(&plugin).await,
        "pods \"p\" is forbidden: exceeded quota: q, requested: requests.cpu=300m, used: requests.cpu=800m, limited: requests.cpu=1",
    );
    refused(
        create("pods", pod(json!({"containers": [{"name": "c"}]}))).validated(&plugin).await,
        "exceeded quota: be, requested: pods=1, used: pods=0, limited: pods=0",
    );
    assert_eq!(used("pods"), Some("1".into()));
    let dry = Request { dry_run: true, ..cpu("200m") };
    assert!(dry.validated(&plugin).await.is_ok());
    assert_eq!(used("requests.cpu"), Some("800m".into()));
    assert!(cpu("200m").validated(&plugin).await.is_ok());
    assert_eq!((used("pods"), used("requests.cpu")), (Some("2".into()), Some("1".into())));
    refused(cpu("0").validated(&plugin).await, "exceeded quota: ");
    // Counts of any kind.
    let deployment = || Request::new(Operation::Create, "apps", "deployments", json!({"metadata": {"name": "d", "namespace": "ns"}}));
    assert!(deployment().validated(&plugin).await.is_ok());
    refused(deployment().validated(&plugin).await, "requested: count/deployments.apps=1, used: count/deployments.apps=1, limited: count/deployments.apps=1");
    // An update is charged by its growth.
    let service = |kind: &str| json!({"metadata": {"name": "s", "namespace": "ns"}, "spec": {"type": kind, "ports": [{"port": 80}]}});
    assert!(update("services", service("ClusterIP"), service("NodePort")).validated(&plugin).await.is_ok());
    assert_eq!(used("services.nodeports"), Some("1".into()));
    assert!(update("services", service("NodePort"), service("NodePort")).validated(&plugin).await.is_ok());
    refused(create("services", service("NodePort")).validated(&plugin).await, "requested: services.nodeports=1");
}

#[tokio::test]
async fn quota_demands_and_unknown_usage() {
    let quotas = Gr("", "resourcequotas");
    let quota = |used: Value| json!({
        "metadata": {"name": "q", "namespace": "ns"}, "status": {"hard": {"limits.memory": "1Gi", "cpu": "1"}, "used": used},
    });
    let known = ResourceQuota { cluster: Fake::new([(quotas, quota(json!({"limits.memory": "0", "cpu": "0"})))]) };
    let bare = create("pods", pod(json!({"containers": [{"name": "a"}, {"name": "b"}]})));
    refused(bare.validated(&known).await, "failed quota: q: must specify cpu for: a,b; limits.memory for: a,b");
    let unknown = ResourceQuota { cluster: Fake::new([(quotas, quota(json!({})))]) };
    let full = json!({"requests": {"cpu": "1"}, "limits": {"memory": "1Mi"}});
    let full = create("pods", pod(json!({"containers": [{"name": "a", "resources": full}]})));
    refused(full.validated(&unknown).await, "status unknown for quota: q, resources: cpu,limits.memory");
}

#[tokio::test]
async fn priority() {
    let classes = Gr("scheduling.k8s.io", "priorityclasses");
    let class = |name: &str, value: i64, default: bool| (classes, json!({
        "metadata": {"name": name}, "value": value, "globalDefault": default, "preemptionPolicy": "PreemptLowerPriority",
    }));
    let plugin = Priority { cluster: Fake::new([class("high", 100, false), class("normal", 10, true)]) };
    let none = Priority { cluster: Fake::new([]) };
    let result = |spec: Value| create("pods", pod(spec));
    let high = result(json!({"priorityClassName": "high"})).mutated(&plugin).await.expect("a pod");
    assert_eq!((&high["spec"]["priority"], &high["spec"]["preemptionPolicy"]), (&json!(100), &json!("PreemptLowerPriority")));
    let default = result(json!({})).mutated(&plugin).await.expect("a pod");
    assert_eq!((&default["spec"]["priority"], &default["spec"]["priorityClassName"]), (&json!(10), &json!("normal")));
    let zero = result(json!({})).mutated(&none).await.expect("a pod");
    assert_eq!((&zero["spec"]["priority"], &zero["spec"]["priorityClassName"]), (&json!(0), &Value::Null));
    refused(result(json!({"priorityClassName": "gone"})).mutated(&plugin).await, "no PriorityClass with name gone was found");
    refused(
        result(json!({"priorityClassName": "high", "priority": 5})).mutated(&plugin).await,
        "the integer value of priority (5) must not be provided in pod spec; priority admission controller computed 100",
    );
    let kept = update("pods", high, pod(json!({}))).mutated(&plugin).await.expect("a pod");
    assert_eq!(kept["spec"]["priority"], 100);
    let second = json!({"metadata": {"name": "other"}, "value": 1, "globalDefault": true});
    let second = Request::new(Operation::Create, classes.0, classes.1, second);
    refused(second.validated(&plugin).await, "PriorityClass normal is already marked as default. Only one default can exist");
}

#[tokio::test]
async fn small_defaults() {
    let tainted = create("nodes", json!({"metadata": {"name": "n"}})).mutated(&TaintNodesByCondition).await.expect("a node");
    assert_eq!(tainted["spec"]["taints"], json!([{"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}]));
    assert_eq!(create("nodes", tainted.clone()).mutated(&TaintNodesByCondition).await, Ok(tainted));

    let own = json!([{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}]);
    let pod_with = |tolerations: Value| create("pods", pod(json!({"tolerations": tolerations})));
    let count = |pod: Value| pod["spec"]["tolerations"].as_array().map(Vec::len);
    assert_eq!(pod_with(Value::Null).mutated(&DefaultTolerationSeconds).await.map(count), Ok(Some(2)));
    assert_eq!(pod_with(own).mutated(&DefaultTolerationSeconds).await.map(count), Ok(Some(2)));
    assert_eq!(pod_with(json!([{"operator": "Exists"}])).mutated(&DefaultTolerationSeconds).await.map(count), Ok(Some(1)));

    let kind = Gr("storage.k8s.io", "storageclasses");
    let class = |name: &str, created: &str, expands: bool| (kind, json!({
        "metadata": {"name": name, "creationTimestamp": created, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
        "allowVolumeExpansion": expands,
    }));
    let cluster = Fake::new([
        class("old", "2020-01-01T00:00:00Z", false), class("new", "2024-01-01T00:00:00Z", true), class("a", "2024-01-01T00:00:00Z", true),
    ]);
    let claim = |class: Value, size: &str, phase: &str| json!({
        "metadata": {"name": "c", "namespace": "ns"}, "status": {"phase": phase},
        "spec": {"storageClassName": class, "resources": {"requests": {"storage": size}}},
    });
    let plugin = DefaultStorageClass { cluster: cluster.clone() };
    for (given, expected) in [(Value::Null, "a"), (json!("x"), "x"), (json!(""), "")] {
        let claim = create("persistentvolumeclaims", claim(given, "1", "")).mutated(&plugin).await.expect("a claim");
        assert_eq!(claim["spec"]["storageClassName"], expected);
    }
    let resize = PersistentVolumeClaimResize { cluster };
    let grow = |class: &str, phase: &str| update("persistentvolumeclaims", claim(json!(class), "1Gi", phase), claim(json!(class), "2Gi", phase));
    assert!(grow("new", "Bound").validated(&resize).await.is_ok());
    refused(grow("new", "Pending").validated(&resize).await, "Only bound persistent volume claims can be expanded");
    refused(grow("old", "Bound").validated(&resize).await, "only dynamically provisioned pvc can be resized");

    let protected = create("persistentvolumeclaims", claim(json!(""), "1", "")).mutated(&StorageObjectInUseProtection).await;
    assert_eq!(protected.expect("a claim")["metadata"]["finalizers"], json!(["kubernetes.io/pvc-protection"]));

    let zones = json!({"metadata": {"name": "n1", "labels": {"topology.kubernetes.io/zone": "z", "other": "x"}}});
    let topology = PodTopologyLabels { cluster: Fake::new([(Gr("", "nodes"), zones)]) };
    let binding = json!({"metadata": {"name": "p", "namespace": "ns"}, "target": {"kind": "Node", "name": "n1"}});
    let binding = Request { subresource: "binding", ..create("pods", binding) };
    assert_eq!(binding.mutated(&topology).await.expect("a binding")["metadata"]["labels"], json!({"topology.kubernetes.io/zone": "z"}));
}

#[tokio::test]
async fn runtime_class() {
    let class = json!({
        "metadata": {"name": "vm"},
        "overhead": {"podFixed": {"cpu": "100m"}},
        "scheduling": {"nodeSelector": {"vm": "yes"}, "tolerations": [{"key": "vm", "operator": "Exists"}]},
    });
    let plugin = RuntimeClass { cluster: Fake::new([(Gr("node.k8s.io", "runtimeclasses"), class)]) };
    let vm = json!({"runtimeClassName": "vm", "tolerations": [{"key": "vm", "operator": "Equal", "value": "x"}, {"key": "a", "operator": "Exists"}]});
    let set = create("pods", pod(vm)).mutated(&plugin).await.expect("a pod");
    assert_eq!(set["spec"]["overhead"], json!({"cpu": "100m"}));
    assert_eq!(set["spec"]["nodeSelector"], json!({"vm": "yes"}));
    assert_eq!(set["spec"]["tolerations"], json!([{"key": "a", "operator": "Exists"}, {"key": "vm", "operator": "Exists"}]));
    assert!(create("pods", set).validated(&plugin).await.is_ok());
    refused(create("pods", pod(json!({"runtimeClassName": "x"}))).mutated(&plugin).await, "pod rejected: RuntimeClass \"x\" not found");
    refused(
        create("pods", pod(json!({"runtimeClassName": "vm", "nodeSelector": {"vm": "no"}}))).mutated(&plugin).await,
        "conflict: runtimeClass.scheduling.nodeSelector[vm] = yes; pod.spec.nodeSelector[vm] = no",
    );
    refused(
        create("pods", pod(json!({"overhead": {"cpu": "1"}}))).validated(&plugin).await,
        "Pod Overhead set without corresponding RuntimeClass defined Overhead",
    );
}

#[tokio::test]
async fn certificates() {
    let csr = |signer: &str| json!({"metadata": {"name": "c"}, "spec": {"signerName": signer}});
    let request = |subresource, signer: &str, status: Value| {
        let mut new = csr(signer);
        new["status"] = status;
        Request {
            subresource,
            old: Some(csr(signer)),
            ..Request::new(Operation::Update, "certificates.k8s.io", "certificatesigningrequests", new)
        }
    };
    let approval = CertificateApproval { authorizer: Arc::new(Only(&["approve signers a.io/x", "approve signers b.io/*"])) };
    for (signer, good) in [("a.io/x", true), ("a.io/y", false), ("b.io/y", true)] {
        let result = request("approval", signer, json!({})).validated(&approval).await;
        assert_eq!(result.is_ok(), good, "{signer}");
    }
    refused(
        request("approval", "a.io/y", json!({})).validated(&approval).await,
        "user not permitted to approve requests with signerName \"a.io/y\"",
    );
    let signing = CertificateSigning { authorizer: Arc::new(Only(&["sign signers a.io/x"])) };
    assert!(request("status", "a.io/x", json!({"certificate": "eA=="})).validated(&signing).await.is_ok());
    assert!(request("status", "a.io/y", json!({})).validated(&signing).await.is_ok());
    refused(request("status", "a.io/y", json!({"certificate": "eA=="})).validated(&signing).await, "user not permitted to sign");
    let masters = {
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::OrganizationName, "system:masters");
        let key = rcgen::KeyPair::generate().expect("a key");
        params.serialize_request(&key).expect("a request").pem().expect("PEM")
    };
    use base64::Engine;
    let body = json!({
        "metadata": {"name": "c"},
        "spec": {"signerName": "kubernetes.io/kube-apiserver-client",
                 "request": base64::engine::general_purpose::STANDARD.encode(masters)},
    });
    let ask = Request::new(Operation::Create, "certificates.k8s.io", "certificatesigningrequests", body);
    refused(
        ask.validated(&CertificateSubjectRestriction).await,
        "use of kubernetes.io/kube-apiserver-client signer with system:masters group is not allowed",
    );
}
