//! The default objects of API priority and fairness, as upstream makes them (`flowcontrol/bootstrap`).

use crate::cluster::{Cluster, Gr};
use serde_json::{Value, json};
use windlass_api::{ApiError, meta};

const LEVELS: Gr = Gr("flowcontrol.apiserver.k8s.io", "prioritylevelconfigurations");
const SCHEMAS: Gr = Gr("flowcontrol.apiserver.k8s.io", "flowschemas");
const API_VERSION: &str = "flowcontrol.apiserver.k8s.io/v1";
const AUTO_UPDATE: &str = "apf.kubernetes.io/autoupdate-spec";

/// Name, nominal shares, lendable percent, queues, hand size.
const QUEUED: [(&str, u32, u32, u32, u32); 6] = [
    ("system", 30, 33, 64, 6),
    ("node-high", 40, 25, 64, 6),
    ("leader-election", 10, 0, 16, 4),
    ("workload-high", 40, 50, 128, 6),
    ("workload-low", 100, 90, 128, 6),
    ("global-default", 20, 50, 128, 6),
];

fn object(kind: &str, name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": {"name": name, "annotations": {AUTO_UPDATE: "true"}},
        "spec": spec,
    })
}

fn levels() -> Vec<Value> {
    let mut levels = vec![
        object(
            "PriorityLevelConfiguration",
            "exempt",
            json!({"type": "Exempt", "exempt": {"nominalConcurrencyShares": 0, "lendablePercent": 0}}),
        ),
        object(
            "PriorityLevelConfiguration",
            "catch-all",
            json!({"type": "Limited", "limited": {
                "nominalConcurrencyShares": 5, "lendablePercent": 0, "limitResponse": {"type": "Reject"},
            }}),
        ),
    ];
    for (name, shares, lendable, queues, hand) in QUEUED {
        let queuing = json!({"queues": queues, "handSize": hand, "queueLengthLimit": 50});
        let spec = json!({"type": "Limited", "limited": {
            "nominalConcurrencyShares": shares,
            "lendablePercent": lendable,
            "limitResponse": {"type": "Queue", "queuing": queuing},
        }});
        levels.push(object("PriorityLevelConfiguration", name, spec));
    }
    levels
}

fn users(names: &[&str]) -> Vec<Value> {
    names.iter().map(|name| json!({"kind": "User", "user": {"name": name}})).collect()
}

fn groups(names: &[&str]) -> Vec<Value> {
    names.iter().map(|name| json!({"kind": "Group", "group": {"name": name}})).collect()
}

fn system_accounts() -> Vec<Value> {
    vec![json!({"kind": "ServiceAccount", "serviceAccount": {"namespace": "kube-system", "name": "*"}})]
}

fn resources(verbs: &[&str], group: &str, resources: &[&str], cluster: bool) -> Value {
    let mut rule = json!({"verbs": verbs, "apiGroups": [group], "resources": resources, "namespaces": ["*"]});
    if cluster {
        rule["clusterScope"] = true.into();
    }
    rule
}

/// Everything, for these subjects.
fn everything(subjects: Vec<Value>) -> Value {
    json!([{
        "subjects": subjects,
        "resourceRules": [resources(&["*"], "*", &["*"], true)],
        "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
    }])
}

fn schema(name: &str, level: &str, precedence: u32, by: &str, rules: Value) -> Value {
    let mut spec = json!({
        "priorityLevelConfiguration": {"name": level},
        "matchingPrecedence": precedence,
        "rules": rules,
    });
    if !by.is_empty() {
        spec["distinguisherMethod"] = json!({"type": by});
    }
    object("FlowSchema", name, spec)
}

fn schemas() -> Vec<Value> {
    const ALL: [&str; 2] = ["system:unauthenticated", "system:authenticated"];
    const MANAGER: &str = "system:kube-controller-manager";
    const SCHEDULER: &str = "system:kube-scheduler";
    let nodes = || groups(&["system:nodes"]);
    let probes = json!([{
        "subjects": groups(&ALL),
        "nonResourceRules": [{"verbs": ["get"], "nonResourceURLs": ["/healthz", "/readyz", "/livez"]}],
    }]);
    let mut leaders = users(&[MANAGER, SCHEDULER]);
    leaders.extend(system_accounts());
    let leases = |verbs: &[&str]| resources(verbs, "coordination.k8s.io", &["leases"], false);
    let leader_rules = json!([{"subjects": leaders, "resourceRules": [leases(&["get", "create", "update"])]}]);
    let node_rules = json!([{
        "subjects": nodes(),
        "resourceRules": [resources(&["*"], "", &["nodes", "nodes/status"], true), leases(&["*"])],
    }]);
    vec![
        schema("exempt", "exempt", 1, "", everything(groups(&["system:masters"]))),
        schema("probes", "exempt", 2, "", probes),
        schema("system-leader-election", "leader-election", 100, "ByUser", leader_rules),
        schema("system-node-high", "node-high", 400, "ByUser", node_rules),
        schema("system-nodes", "system", 500, "ByUser", everything(nodes())),
        schema("kube-controller-manager", "workload-high", 800, "ByNamespace", everything(users(&[MANAGER]))),
        schema("kube-scheduler", "workload-high", 800, "ByNamespace", everything(users(&[SCHEDULER]))),
        schema("kube-system-service-accounts", "workload-high", 900, "ByNamespace", everything(system_accounts())),
        schema("service-accounts", "workload-low", 9000, "ByUser", everything(groups(&["system:serviceaccounts"]))),
        schema("global-default", "global-default", 9900, "ByUser", everything(groups(&ALL))),
        schema("catch-all", "catch-all", 10000, "ByUser", everything(groups(&ALL))),
    ]
}

async fn ensure_one(cluster: &dyn Cluster, kind: Gr, wanted: Value) -> Result<(), ApiError> {
    let name = meta::name(&wanted).to_owned();
    let Some(stored) = super::find(cluster, kind, "", &name).await? else {
        return super::tolerate_existing(cluster.create(kind, wanted).await);
    };
    let mut restore = |stored: &mut Value| {
        let automatic = meta::annotation(stored, AUTO_UPDATE) == Some("true");
        if !automatic || stored["spec"] == wanted["spec"] {
            return Ok(false);
        }
        stored["spec"] = wanted["spec"].clone();
        Ok(true)
    };
    if restore(&mut stored.as_ref().clone())? {
        cluster.update(kind, "", &name, &mut restore).await?;
    }
    Ok(())
}

/// Creates the default objects; those still marked for it get their spec back.
pub async fn ensure(cluster: &dyn Cluster) -> Result<(), ApiError> {
    let levels = levels().into_iter().map(|level| (LEVELS, level));
    let all = levels.chain(schemas().into_iter().map(|schema| (SCHEMAS, schema)));
    // At once, so that the writes share their way to the disk.
    let work = all.map(|(kind, wanted)| ensure_one(cluster, kind, wanted));
    futures::future::try_join_all(work).await.map(drop)
}
