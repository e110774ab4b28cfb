use super::escalation::Escalation;
use super::node::Node;
use super::rbac::{Kind, Rbac};
use super::union::Union;
use super::*;
use crate::admission::testing::Request;
use crate::admission::{Operation, Plugin};
use crate::cluster::testing::Fake;
use crate::cluster::{Cluster, Gr};
use serde_json::{Value, json};
use std::sync::Arc;

fn user(name: &str, groups: &[&str]) -> UserInfo {
    UserInfo { name: name.into(), groups: groups.iter().map(|&group| group.into()).collect(), ..UserInfo::default() }
}

fn role(namespace: &str, name: &str, rules: Value) -> Value {
    json!({"metadata": {"namespace": namespace, "name": name}, "rules": rules})
}

fn binding(namespace: &str, name: &str, kind: &str, role: &str, subjects: Value) -> Value {
    json!({
        "metadata": {"namespace": namespace, "name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
        "subjects": subjects,
    })
}

fn rbac() -> Arc<Rbac> {
    let rbac = Rbac::new();
    let rule = |verbs: Value, groups: Value, resources: Value| json!({"verbs": verbs, "apiGroups": groups, "resources": resources});
    let add = |kind, object: Value| rbac.apply(kind, None, Some(&object));
    add(Kind::ClusterRole, role("", "all", json!([
        rule(json!(["*"]), json!(["*"]), json!(["*"])), {"verbs": ["*"], "nonResourceURLs": ["*"]},
    ])));
    add(Kind::ClusterRole, role("", "reader", json!([
        rule(json!(["get", "list"]), json!(["", "apps"]), json!(["pods", "pods/log", "*/scale"])),
        {"verbs": ["get"], "nonResourceURLs": ["/healthz", "/metrics/*"]},
    ])));
    add(Kind::Role, role("ns", "one", json!([
        {"verbs": ["get"], "apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["cm"]},
    ])));
    add(Kind::ClusterRoleBinding, binding("", "admins", "ClusterRole", "all", json!([{"kind": "Group", "name": "admins"}])));
    add(Kind::ClusterRoleBinding, binding("", "readers", "ClusterRole", "reader", json!([{"kind": "User", "name": "ann"}])));
    add(Kind::RoleBinding, binding("ns", "local", "ClusterRole", "reader", json!([
        {"kind": "ServiceAccount", "name": "app"}, {"kind": "User", "name": "bob"},
    ])));
    add(Kind::RoleBinding, binding("ns", "named", "Role", "one", json!([{"kind": "User", "name": "bob"}])));
    add(Kind::RoleBinding, binding("ns", "dangling", "Role", "gone", json!([{"kind": "User", "name": "cat"}])));
    rbac
}

/// `verb resource[/sub][.group][ name][ in namespace]` or `verb /path`.
fn attributes<'a>(user: &'a UserInfo, text: &'a str) -> Attributes<'a> {
    let (verb, rest) = text.split_once(' ').expect("a verb");
    if rest.starts_with('/') {
        return Attributes { is_resource: false, path: rest, ..Attributes::resource(user, verb, "", "") };
    }
    let (rest, namespace) = rest.split_once(" in ").unwrap_or((rest, ""));
    let (rest, name) = rest.split_once(' ').unwrap_or((rest, ""));
    let (rest, group) = rest.split_once('.').unwrap_or((rest, ""));
    let (resource, subresource) = rest.split_once('/').unwrap_or((rest, ""));
    Attributes { namespace, name, subresource, ..Attributes::resource(user, verb, group, resource) }
}

#[test]
fn rules_and_requests() {
    let rbac = rbac();
    let admin = user("root", &["admins"]);
    let ann = user("ann", &[]);
    let bob = user("bob", &[]);
    let app = user("system:serviceaccount:ns:app", &[]);
    let other = user("system:serviceaccount:other:app", &[]);
    let cases = [
        (&admin, "delete nodes n1", true),
        (&admin, "get /debug/pprof/heap", true),
        (&ann, "list pods", true),
        (&ann, "list pods in ns", true),
        (&ann, "list deployments.apps in ns", false),
        (&ann, "get pods/log p in ns", true),
        (&ann, "get pods/exec p in ns", false),
        (&ann, "get deployments/scale.apps d in ns", true),
        (&ann, "get jobs/scale.batch d in ns", false),
        (&ann, "create pods in ns", false),
        (&ann, "get /healthz", true),
        (&ann, "get /healthz/etcd", false),
        (&ann, "get /metrics/slis", true),
        (&ann, "post /healthz", false),
        (&bob, "list pods in ns", true),
        (&bob, "list pods", false),
        (&bob, "get configmaps cm in ns", true),
        (&bob, "get configmaps other in ns", false),
        (&bob, "list configmaps in ns", false),
        // Non-resource rules of a role binding do not count.
        (&bob, "get /healthz", false),
        (&app, "list pods in ns", true),
        (&app, "list pods in other", false),
        (&other, "list pods in ns", false),
    ];
    for (user, text, allowed) in cases {
        let decision = rbac.authorize(&attributes(user, text));
        assert_eq!(decision.is_allowed(), allowed, "{} {text}: {decision:?}", user.name);
    }
}

#[test]
fn reasons() {
    let rbac = rbac();
    let reason = |user: &UserInfo, text| rbac.authorize(&attributes(user, text)).reason().to_owned();
    assert_eq!(
        reason(&user("ann", &[]), "list pods"),
        "RBAC: allowed by ClusterRoleBinding \"readers\" of ClusterRole \"reader\" to User \"ann\""
    );
    assert_eq!(
        reason(&user("system:serviceaccount:ns:app", &[]), "list pods in ns"),
        "RBAC: allowed by RoleBinding \"local/ns\" of ClusterRole \"reader\" to ServiceAccount \"app/ns\""
    );
    assert_eq!(
        reason(&user("cat", &[]), "list pods in ns"),
        "RBAC: role.rbac.authorization.k8s.io \"gone\" not found"
    );
    let ann = user("ann", &[]);
    let refusal = |text| attributes(&ann, text).forbidden("").message.clone();
    assert_eq!(
        refusal("list pods in y"),
        "pods is forbidden: User \"ann\" cannot list resource \"pods\" in API group \"\" in the namespace \"y\""
    );
    assert_eq!(
        refusal("get deployments/scale.apps d in y"),
        "deployments.apps \"d\" is forbidden: User \"ann\" cannot get resource \"deployments/scale\" in API group \"apps\" in the namespace \"y\""
    );
    assert_eq!(
        refusal("list nodes"),
        "nodes is forbidden: User \"ann\" cannot list resource \"nodes\" in API group \"\" at the cluster scope"
    );
}

/// Changes and removals of roles and bindings take effect.
#[test]
fn index_follows_changes() {
    let rbac = rbac();
    let ann = user("ann", &[]);
    let allowed = |text| rbac.authorize(&attributes(&ann, text)).is_allowed();
    let readers = |who| binding("", "readers", "ClusterRole", "reader", json!([{"kind": "User", "name": who}]));
    rbac.apply(Kind::ClusterRoleBinding, Some(&readers("ann")), Some(&readers("bob")));
    assert!(!allowed("list pods"));
    rbac.apply(Kind::ClusterRoleBinding, Some(&readers("bob")), Some(&readers("ann")));
    assert!(allowed("list pods"));
    let empty = role("", "reader", json!([]));
    rbac.apply(Kind::ClusterRole, None, Some(&empty));
    assert!(!allowed("list pods"));
    rbac.apply(Kind::ClusterRole, Some(&empty), None);
    assert!(rbac.authorize(&attributes(&ann, "list pods")).reason().contains("not found"));
    rbac.apply(Kind::ClusterRoleBinding, Some(&readers("ann")), None);
    assert_eq!(rbac.authorize(&attributes(&ann, "list pods")), Decision::NoOpinion(String::new()));
}

#[test]
fn modes() {
    let make = |modes: &[&str]| {
        let modes: Vec<String> = modes.iter().map(|&mode| mode.into()).collect();
        Union::new(&modes, Node::start(Fake::new([]).as_ref(), Vec::new()), rbac())
    };
    assert!(make(&[]).is_err());
    assert!(make(&["RBAC", "RBAC"]).is_err());
    assert!(make(&["ABAC"]).is_err());
    let (ann, root) = (user("ann", &[]), user("x", &["system:masters"]));
    let cases = [
        (&["RBAC"][..], &ann, "list pods", true),
        (&["RBAC"], &ann, "list nodes", false),
        (&["AlwaysDeny"], &ann, "list pods", false),
        (&["AlwaysDeny"], &root, "delete nodes", true),
        (&["Node", "RBAC", "AlwaysAllow"], &ann, "list nodes", true),
        (&["AlwaysDeny", "RBAC"], &ann, "list pods", true),
    ];
    for (modes, user, text, allowed) in cases {
        let union = make(modes).expect("good modes");
        assert_eq!(union.authorize(&attributes(user, text)).is_allowed(), allowed, "{modes:?} {text}");
    }
}

fn node_cluster() -> Arc<Fake> {
    let pod = |name: &str, node: &str, secret: &str| {
        json!({
            "metadata": {"namespace": "ns", "name": name},
            "spec": {
                "nodeName": node,
                "serviceAccountName": format!("sa-{name}"),
                "containers": [{"env": [{"valueFrom": {"secretKeyRef": {"name": secret}}}],
                                "envFrom": [{"configMapRef": {"name": format!("cm-{name}")}}]}],
                "volumes": [{"persistentVolumeClaim": {"claimName": format!("pvc-{name}")}}],
            },
        })
    };
    Fake::new([
        (Gr("", "pods"), pod("a", "n1", "shared")),
        (Gr("", "pods"), pod("b", "n2", "shared")),
        (Gr("", "pods"), pod("c", "n2", "own")),
        (Gr("", "pods"), pod("d", "", "unscheduled")),
        (Gr("", "persistentvolumes"), json!({
            "metadata": {"name": "pv-a"},
            "spec": {"claimRef": {"namespace": "ns", "name": "pvc-a"}, "csi": {"nodePublishSecretRef": {"name": "csi", "namespace": "ns"}}},
        })),
        (Gr("storage.k8s.io", "volumeattachments"), json!({"metadata": {"name": "va"}, "spec": {"nodeName": "n1"}})),
    ])
}

#[test]
fn what_a_node_may() {
    let cluster = node_cluster();
    let rules = crate::bootstrap::policy::node_rules().expect("rules");
    let node = Node::start(cluster.as_ref(), rules);
    let n1 = user("system:node:n1", &["system:nodes"]);
    let n2 = user("system:node:n2", &["system:nodes"]);
    let other = user("system:node:n1", &[]);
    let cases = [
        (&n1, "get secrets shared in ns", true),
        (&n1, "list secrets shared in ns", true),
        (&n1, "get secrets own in ns", false),
        (&n1, "get secrets shared in other", false),
        (&n1, "update secrets shared in ns", false),
        (&n1, "list secrets in ns", false),
        (&n1, "get secrets unscheduled in ns", false),
        (&n2, "get secrets own in ns", true),
        (&n1, "get secrets csi in ns", true),
        (&n2, "get secrets csi in ns", false),
        (&n1, "get configmaps cm-a in ns", true),
        (&n1, "get configmaps cm-b in ns", false),
        (&n1, "get persistentvolumeclaims pvc-a in ns", true),
        (&n1, "patch persistentvolumeclaims/status pvc-a in ns", true),
        (&n1, "patch persistentvolumeclaims/status pvc-b in ns", false),
        (&n1, "get persistentvolumes pv-a", true),
        (&n2, "get persistentvolumes pv-a", false),
        (&n1, "get volumeattachments.storage.k8s.io va", true),
        (&n2, "get volumeattachments.storage.k8s.io va", false),
        (&n1, "create serviceaccounts/token sa-a in ns", true),
        (&n1, "create serviceaccounts/token sa-b in ns", false),
        (&n1, "get pods a in ns", true),
        (&n1, "get pods b in ns", false),
        (&n1, "list pods", false),
        (&n1, "create pods in ns", true),
        (&n1, "update pods/status a in ns", true),
        (&n1, "update pods a in ns", false),
        (&n1, "get nodes n1", true),
        (&n1, "get nodes n2", false),
        (&n1, "list nodes", false),
        (&n1, "patch nodes/status n1", true),
        (&n1, "update leases.coordination.k8s.io n1 in kube-node-lease", true),
        (&n1, "update leases.coordination.k8s.io n2 in kube-node-lease", false),
        (&n1, "update leases.coordination.k8s.io n1 in ns", false),
        (&n1, "list services", true),
        (&n1, "list deployments.apps", false),
        (&n1, "create events in ns", true),
        (&other, "get secrets shared in ns", false),
    ];
    for (user, text, allowed) in cases {
        let decision = node.authorize(&attributes(user, text));
        assert_eq!(decision.is_allowed(), allowed, "{} {text}: {decision:?}", user.name);
    }
    let own = [("spec.nodeName".to_owned(), "n1".to_owned())];
    assert!(node.authorize(&attributes(&n1, "watch pods").with_fields(&own)).is_allowed());
    assert!(!node.authorize(&attributes(&n2, "watch pods").with_fields(&own)).is_allowed());
}

#[tokio::test]
async fn node_graph_forgets() {
    let cluster = node_cluster();
    let node = Node::start(cluster.as_ref(), Vec::new());
    let (n1, n2) = (user("system:node:n1", &["system:nodes"]), user("system:node:n2", &["system:nodes"]));
    let sees = |user: &UserInfo, text| node.authorize(&attributes(user, text)).is_allowed();
    cluster.delete(Gr("", "pods"), "ns", "b").await.expect("deleted");
    // Pod c of the same node refers to another secret.
    assert!(!sees(&n2, "get secrets shared in ns"));
    assert!(sees(&n1, "get secrets shared in ns"));
    cluster.delete(Gr("", "pods"), "ns", "a").await.expect("deleted");
    assert!(!sees(&n1, "get secrets shared in ns"));
    assert!(!sees(&n1, "get persistentvolumes pv-a"));
}

/// Writes of roles and bindings by users with some rights; `None` means allowed.
#[tokio::test]
async fn escalation() {
    let rbac = rbac();
    let rule = |verbs: Value, resources: Value| json!({"verbs": verbs, "apiGroups": ["", "apps"], "resources": resources});
    let grants = json!([
        {"verbs": ["bind"], "apiGroups": ["rbac.authorization.k8s.io"], "resources": ["clusterroles"], "resourceNames": ["all"]},
    ]);
    rbac.apply(Kind::ClusterRole, None, Some(&role("", "binder", grants)));
    let bob = json!([{"kind": "User", "name": "bob"}]);
    rbac.apply(Kind::RoleBinding, None, Some(&binding("ns", "binder", "ClusterRole", "binder", bob)));
    let plugin = Escalation { rbac: rbac.clone(), authorizer: rbac, cluster: Fake::new([]) };
    let group = "rbac.authorization.k8s.io";
    let held = role("ns", "r", json!([rule(json!(["get"]), json!(["pods"]))]));
    let more = role("ns", "r", json!([rule(json!(["get", "delete"]), json!(["pods"]))]));
    let to = |kind: &str, role: &str| binding("ns", "b", kind, role, json!([]));
    let cases = [
        ("ann", "roles", held.clone(), None),
        ("ann", "roles", more.clone(), Some("user \"ann\" (groups=[]) is attempting to grant RBAC permissions not currently held:\n{APIGroups:[\"\"], Resources:[\"pods\"], Verbs:[\"delete\"]}")),
        ("root", "roles", more.clone(), None),
        ("ann", "rolebindings", to("ClusterRole", "reader"), None),
        ("ann", "rolebindings", to("ClusterRole", "all"), Some("is attempting to grant RBAC permissions not currently held")),
        ("bob", "rolebindings", to("ClusterRole", "all"), None),
        ("ann", "rolebindings", to("Role", "nowhere"), Some("roles.rbac.authorization.k8s.io \"nowhere\" not found")),
    ];
    for (name, plural, object, expected) in cases {
        let groups: &[&str] = if name == "root" { &["system:masters"] } else { &[] };
        let user = user(name, groups);
        let request = Request { user: user.clone(), ..Request::new(Operation::Create, group, plural, object.clone()) };
        let result = request.run(async |admission| plugin.validate(admission).await).await;
        match (result, expected) {
            (Ok(()), None) => {}
            (Err(error), Some(part)) => assert!(error.message.contains(part), "{}", error.message),
            (got, expected) => panic!("{name} {object}: {got:?}, expected {expected:?}"),
        }
    }
}

/// Bodies of reviews and their answers.
#[test]
fn access_reviews() {
    let rbac = rbac();
    let ann = user("ann", &[]);
    let ask = |resource, namespace, body| reviews::review(rbac.as_ref(), resource, namespace, &ann, body);
    let pods = json!({"verb": "list", "resource": "pods", "namespace": "ns"});
    let own = ask("selfsubjectaccessreviews", "", json!({"spec": {"resourceAttributes": pods}})).expect("an answer");
    assert_eq!(own["status"]["allowed"], true);
    let body = json!({"spec": {"user": "dan", "resourceAttributes": pods}});
    assert_eq!(ask("subjectaccessreviews", "", body).expect("an answer")["status"], json!({"allowed": false}));
    let body = json!({"spec": {"groups": ["admins"], "nonResourceAttributes": {"verb": "get", "path": "/x"}}});
    assert_eq!(ask("subjectaccessreviews", "", body).expect("an answer")["status"]["allowed"], true);
    let bad = [
        ("selfsubjectaccessreviews", "", json!({"spec": {}}), "exactly one of nonResourceAttributes or resourceAttributes"),
        ("subjectaccessreviews", "", json!({"spec": {"resourceAttributes": pods}}), "at least one of user or group"),
        ("localsubjectaccessreviews", "ns", json!({"metadata": {"namespace": "ns"}, "spec": {"user": "x", "resourceAttributes": {"namespace": "other"}}}), "must match metadata.namespace"),
        ("selfsubjectrulesreviews", "", json!({"spec": {}}), "no namespace on request"),
    ];
    for (resource, namespace, body, part) in bad {
        let error = ask(resource, namespace, body).expect_err("refused");
        assert!(error.message.contains(part), "{}", error.message);
    }
    let rules = ask("selfsubjectrulesreviews", "", json!({"spec": {"namespace": "ns"}})).expect("an answer");
    assert_eq!(
        rules["status"]["resourceRules"],
        json!([{"verbs": ["get", "list"], "apiGroups": ["", "apps"], "resources": ["pods", "pods/log", "*/scale"]}])
    );
    assert_eq!(rules["status"]["nonResourceRules"], json!([{"verbs": ["get"], "nonResourceURLs": ["/healthz", "/metrics/*"]}]));
}
