use super::*;
use crate::cluster::testing::Fake;
use std::collections::BTreeSet;

fn count(kind: Gr, of: &[(Gr, Value)]) -> usize {
    of.iter().filter(|(known, _)| *known == kind).count()
}

fn named<'a>(kind: Gr, name: &str, of: &'a [(Gr, Value)]) -> &'a Value {
    let found = of.iter().find(|(known, object)| *known == kind && meta::name(object) == name);
    found.map(|(_, object)| object).expect("the object is there")
}

/// Numbers and samples of upstream's test data (`bootstrappolicy/testdata`, v1.37.2).
#[test]
fn upstream() {
    let objects = parse(UPSTREAM).expect("a policy");
    assert_eq!(count(CLUSTER_ROLE_BINDINGS, &objects), 13 + 41);
    let admin = named(CLUSTER_ROLES, "admin", &objects);
    assert_eq!(
        admin["aggregationRule"]["clusterRoleSelectors"],
        json!([{"matchLabels": {"rbac.authorization.k8s.io/aggregate-to-admin": "true"}}])
    );
    let edit = named(CLUSTER_ROLES, "edit", &objects);
    assert_eq!(meta::label(edit, "rbac.authorization.k8s.io/aggregate-to-admin"), Some("true"));
    let masters = named(CLUSTER_ROLE_BINDINGS, "cluster-admin", &objects);
    assert_eq!(masters["subjects"], json!([{"apiGroup": GROUP, "kind": "Group", "name": "system:masters"}]));
    let viewer = named(CLUSTER_ROLES, "system:public-info-viewer", &objects);
    let urls: BTreeSet<&str> =
        viewer["rules"][0]["nonResourceURLs"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    assert_eq!(urls, BTreeSet::from(["/healthz", "/livez", "/readyz", "/version", "/version/"]));
}

/// Every binding's role exists, and names are unique: a slip in a text would show here.
#[test]
fn references() {
    let objects = objects().expect("a policy");
    let key = |kind: Gr, object: &Value| (kind, meta::namespace(object).to_owned(), meta::name(object).to_owned());
    let all: BTreeSet<_> = objects.iter().map(|(kind, object)| key(*kind, object)).collect();
    assert_eq!(all.len(), objects.len());
    for (kind, object) in objects.iter().filter(|(kind, _)| [ROLE_BINDINGS, CLUSTER_ROLE_BINDINGS].contains(kind)) {
        let reference = &object["roleRef"];
        let name = reference["name"].as_str().unwrap_or_default().to_owned();
        let (role, namespace) = match reference["kind"] == "Role" {
            true => (ROLES, meta::namespace(object).to_owned()),
            false => (CLUSTER_ROLES, String::new()),
        };
        assert!(all.contains(&(role, namespace, name)), "{kind:?} {}", meta::name(object));
    }
}

#[test]
fn bad_lines() {
    for (text, line, what) in [
        ("nonsense\n", 1, "neither"),
        ("clusterrole a\n  get pods\n", 2, "not a rule"),
        ("  get : pods @ core\n", 1, "without a role"),
        ("clusterrolebinding a -> clusterrole:b robot:x\n", 1, "neither"),
    ] {
        let error = parse(text).expect_err("refused").to_string();
        assert!(error.contains(&format!("line {line}")) && error.contains(what), "{error}");
    }
}

/// Completing at start: stored object before, and whether and how it changes.
#[test]
fn completing() {
    let wanted = || parse("clusterrole r\n  get list : pods @ core\n").expect("a policy").remove(0).1;
    let rule = |verbs: Value| json!({"apiGroups": [""], "resources": ["pods"], "verbs": verbs});
    let mut stored = wanted();
    assert!(!extend(&mut stored, &wanted()));
    // What people added stays, what is missing comes back.
    stored["rules"] = json!([rule(json!(["get"])), rule(json!(["delete"]))]);
    assert!(extend(&mut stored, &wanted()));
    assert_eq!(stored["rules"], json!([rule(json!(["get"])), rule(json!(["delete"])), rule(json!(["list"]))]));
    // An object that opted out stays as it is.
    stored["rules"] = json!([]);
    stored["metadata"]["annotations"][AUTO_UPDATE] = "false".into();
    assert!(!extend(&mut stored, &wanted()));
    // A star covers.
    let mut stored = wanted();
    stored["rules"] = json!([rule(json!(["*"]))]);
    assert!(!extend(&mut stored, &wanted()));
    let text = "clusterrolebinding b -> clusterrole:r user:ann group:devs\n";
    let binding = || parse(text).expect("a policy").remove(0).1;
    let mut stored = binding();
    stored["subjects"] = json!([{"apiGroup": GROUP, "kind": "User", "name": "bob"}]);
    assert!(extend(&mut stored, &binding()));
    assert_eq!(stored["subjects"].as_array().map(Vec::len), Some(3));
}

#[tokio::test]
async fn ensure_creates_once() {
    let cluster = Fake::new([]);
    ensure(cluster.as_ref()).await.expect("created");
    let total = |cluster: &Fake| {
        [ROLES, CLUSTER_ROLES, ROLE_BINDINGS, CLUSTER_ROLE_BINDINGS].map(|kind| cluster.cached_list(kind, None).len())
    };
    let first = total(&cluster);
    assert_eq!(first.iter().sum::<usize>(), objects().expect("a policy").len());
    let writes = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    for kind in [ROLES, CLUSTER_ROLES, ROLE_BINDINGS, CLUSTER_ROLE_BINDINGS] {
        let writes = writes.clone();
        let existing = cluster.cached_list(kind, None).len();
        let seen = std::sync::atomic::AtomicUsize::new(0);
        cluster.on_change(kind, std::sync::Arc::new(move |_| {
            if seen.fetch_add(1, std::sync::atomic::Ordering::SeqCst) >= existing {
                writes.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            }
        }));
    }
    ensure(cluster.as_ref()).await.expect("nothing to do");
    assert_eq!(writes.load(std::sync::atomic::Ordering::SeqCst), 0);
    // A binding to another role is made anew.
    let mut binding = cluster.cached(CLUSTER_ROLE_BINDINGS, "", "cluster-admin").expect("it").as_ref().clone();
    binding["roleRef"]["name"] = "view".into();
    cluster.put(CLUSTER_ROLE_BINDINGS, binding);
    ensure(cluster.as_ref()).await.expect("repaired");
    let binding = cluster.cached(CLUSTER_ROLE_BINDINGS, "", "cluster-admin").expect("it");
    assert_eq!(binding["roleRef"]["name"], "cluster-admin");
}
