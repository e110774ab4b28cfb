//! Rules compared with what upstream's proxier makes of the same services (`pkg/proxy/iptables/proxier_test.go`,
//! `TestOverallIPTablesRules` and neighbours), without its nfacct counters.

use serde_json::{Value, json};

use super::*;
use crate::model::{ServiceView, SliceView, service_ports};

fn settings(prefix: &str) -> Settings {
    Settings {
        family: Family::V4,
        prefix: prefix.into(),
        node: "node1".into(),
        node_ip: Some("192.168.0.2".parse().unwrap()),
        zone: None,
        masquerade_all: false,
        masquerade_mark: "0x4000".into(),
        detector: LocalDetector::new("-s 10.0.0.0/8"),
        node_port_addresses: NodePortAddresses::All,
        localhost_node_ports: true,
        liberal: false,
        large: false,
    }
}

/// A service `namespace/name` with one TCP port 80 named p80, changed by a merge of `spec` and `status`.
fn service(namespace: &str, name: &str, spec: Value, status: Value) -> ServiceView {
    let mut base = json!({"type": "ClusterIP", "ports": [{"name": "p80", "port": 80, "protocol": "TCP"}]});
    merge(&mut base, spec);
    serde_json::from_value(json!({"metadata": {"namespace": namespace, "name": name}, "spec": base, "status": status})).unwrap()
}

fn merge(base: &mut Value, change: Value) {
    match (base, change) {
        (Value::Object(base), Value::Object(change)) => change.into_iter().for_each(|(k, v)| merge(base.entry(k).or_insert(Value::Null), v)),
        (base, change) => *base = change,
    }
}

/// Endpoints as `address[@node][!][~]`: `!` not ready, `~` terminating but serving.
fn slice(namespace: &str, service: &str, endpoints: &[&str]) -> SliceView {
    let list: Vec<Value> = endpoints
        .iter()
        .map(|text| {
            let (ready, terminating) = (!text.contains(['!', '~']), text.contains('~'));
            let text = text.trim_end_matches(['!', '~']);
            let (address, node) = text.split_once('@').map_or((text, None), |(a, n)| (a, Some(n)));
            json!({"addresses": [address], "nodeName": node, "conditions": {"ready": ready, "serving": ready || terminating, "terminating": terminating}})
        })
        .collect();
    serde_json::from_value(json!({
        "metadata": {"namespace": namespace, "name": format!("{service}-1"), "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "endpoints": list,
        "ports": [{"name": "p80", "port": 80, "protocol": "TCP"}],
    }))
    .unwrap()
}

fn chains(settings: &Settings, services: &[(ServiceView, Option<SliceView>)]) -> Chains {
    let ports: Vec<_> = services.iter().flat_map(|(s, e)| service_ports(settings.family, &settings.node, s, e)).collect();
    let parts: Vec<Part> = ports.iter().map(|p| super::service(settings, p)).collect();
    assemble(settings, &parts)
}

/// The rules as lines of `table -A CHAIN rule`, those of a chain in their order.
fn lines(chains: &Chains) -> Vec<String> {
    let mut lines = Vec::new();
    for (table, by_name) in &chains.tables {
        for (name, rules) in by_name {
            lines.extend(rules.iter().map(|r| format!("{table} -A {name} {r}")));
        }
    }
    lines
}

fn overall() -> Vec<(ServiceView, Option<SliceView>)> {
    let none = || json!({});
    vec![
        (service("ns1", "svc1", json!({"clusterIP": "172.30.0.41"}), none()), Some(slice("ns1", "svc1", &["10.180.0.1"]))),
        (
            service(
                "ns2",
                "svc2",
                json!({"type": "LoadBalancer", "externalTrafficPolicy": "Local", "clusterIP": "172.30.0.42",
                       "ports": [{"name": "p80", "port": 80, "protocol": "TCP", "nodePort": 3001}],
                       "externalIPs": ["192.168.99.22"], "healthCheckNodePort": 30000}),
                json!({"loadBalancer": {"ingress": [{"ip": "1.2.3.4"}]}}),
            ),
            Some(slice("ns2", "svc2", &["10.180.0.2"])),
        ),
        (
            service("ns3", "svc3", json!({"type": "NodePort", "clusterIP": "172.30.0.43", "ports": [{"name": "p80", "port": 80, "nodePort": 3003}]}), none()),
            Some(slice("ns3", "svc3", &["10.180.0.3"])),
        ),
        (
            service("ns4", "svc4", json!({"type": "NodePort", "clusterIP": "172.30.0.44", "externalIPs": ["192.168.99.33"]}), none()),
            Some(slice("ns4", "svc4", &["10.180.0.4", "10.180.0.5@node1"])),
        ),
        (
            service(
                "ns5",
                "svc5",
                json!({"type": "LoadBalancer", "externalTrafficPolicy": "Cluster", "clusterIP": "172.30.0.45",
                       "ports": [{"name": "p80", "port": 80, "protocol": "TCP", "nodePort": 3002}], "healthCheckNodePort": 30000,
                       "loadBalancerSourceRanges": [" 203.0.113.0/25"], "sessionAffinity": "ClientIP",
                       "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 10800}}}),
                json!({"loadBalancer": {"ingress": [{"ip": "5.6.7.8"}]}}),
            ),
            Some(slice("ns5", "svc5", &["10.180.0.3"])),
        ),
        (service("ns6", "svc6", json!({"clusterIP": "172.30.0.46"}), none()), None),
    ]
}

#[test]
fn overall_rules_are_upstreams() {
    let mut got = lines(&chains(&settings("KUBE-"), &overall()));
    let mut expected: Vec<String> = OVERALL.lines().map(str::to_owned).collect();
    // Chains come in another order there; the order within a chain is kept by a stable sort on table and chain.
    let key = |l: &String| l.split(' ').take(3).map(str::to_owned).collect::<Vec<_>>();
    got.sort_by_key(key);
    expected.sort_by_key(key);
    assert_eq!(got, expected);
}

const OVERALL: &str = r#"filter -A KUBE-NODEPORTS -m comment --comment "ns2/svc2:p80 health check node port" -m tcp -p tcp --dport 30000 -j ACCEPT
filter -A KUBE-SERVICES -m comment --comment "ns6/svc6:p80 has no endpoints" -m tcp -p tcp -d 172.30.0.46 --dport 80 -j REJECT
filter -A KUBE-EXTERNAL-SERVICES -m comment --comment "ns2/svc2:p80 has no local endpoints" -m tcp -p tcp -d 192.168.99.22 --dport 80 -j DROP
filter -A KUBE-EXTERNAL-SERVICES -m comment --comment "ns2/svc2:p80 has no local endpoints" -m tcp -p tcp -d 1.2.3.4 --dport 80 -j DROP
filter -A KUBE-EXTERNAL-SERVICES -m comment --comment "ns2/svc2:p80 has no local endpoints" -m addrtype --dst-type LOCAL -m tcp -p tcp --dport 3001 -j DROP
filter -A KUBE-FIREWALL -m comment --comment "block incoming localnet connections" -d 127.0.0.0/8 ! -s 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
filter -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
filter -A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
filter -A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
filter -A KUBE-PROXY-FIREWALL -m comment --comment "ns5/svc5:p80 traffic not accepted by KUBE-FW-NUKIZ6OKUXPJNT4C" -m tcp -p tcp -d 5.6.7.8 --dport 80 -j DROP
nat -A KUBE-NODEPORTS -m comment --comment ns2/svc2:p80 -m tcp -p tcp --dport 3001 -j KUBE-EXT-GNZBNJ2PO5MGZ6GT
nat -A KUBE-NODEPORTS -m comment --comment ns3/svc3:p80 -m tcp -p tcp --dport 3003 -j KUBE-EXT-X27LE4BHSL4DOUIK
nat -A KUBE-NODEPORTS -m comment --comment ns5/svc5:p80 -m tcp -p tcp --dport 3002 -j KUBE-EXT-NUKIZ6OKUXPJNT4C
nat -A KUBE-SERVICES -m comment --comment "ns1/svc1:p80 cluster IP" -m tcp -p tcp -d 172.30.0.41 --dport 80 -j KUBE-SVC-XPGD46QRK7WJZT7O
nat -A KUBE-SERVICES -m comment --comment "ns2/svc2:p80 cluster IP" -m tcp -p tcp -d 172.30.0.42 --dport 80 -j KUBE-SVC-GNZBNJ2PO5MGZ6GT
nat -A KUBE-SERVICES -m comment --comment "ns2/svc2:p80 external IP" -m tcp -p tcp -d 192.168.99.22 --dport 80 -j KUBE-EXT-GNZBNJ2PO5MGZ6GT
nat -A KUBE-SERVICES -m comment --comment "ns2/svc2:p80 loadbalancer IP" -m tcp -p tcp -d 1.2.3.4 --dport 80 -j KUBE-EXT-GNZBNJ2PO5MGZ6GT
nat -A KUBE-SERVICES -m comment --comment "ns3/svc3:p80 cluster IP" -m tcp -p tcp -d 172.30.0.43 --dport 80 -j KUBE-SVC-X27LE4BHSL4DOUIK
nat -A KUBE-SERVICES -m comment --comment "ns4/svc4:p80 cluster IP" -m tcp -p tcp -d 172.30.0.44 --dport 80 -j KUBE-SVC-4SW47YFZTEDKD3PK
nat -A KUBE-SERVICES -m comment --comment "ns4/svc4:p80 external IP" -m tcp -p tcp -d 192.168.99.33 --dport 80 -j KUBE-EXT-4SW47YFZTEDKD3PK
nat -A KUBE-SERVICES -m comment --comment "ns5/svc5:p80 cluster IP" -m tcp -p tcp -d 172.30.0.45 --dport 80 -j KUBE-SVC-NUKIZ6OKUXPJNT4C
nat -A KUBE-SERVICES -m comment --comment "ns5/svc5:p80 loadbalancer IP" -m tcp -p tcp -d 5.6.7.8 --dport 80 -j KUBE-FW-NUKIZ6OKUXPJNT4C
nat -A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
nat -A KUBE-EXT-4SW47YFZTEDKD3PK -m comment --comment "masquerade traffic for ns4/svc4:p80 external destinations" -j KUBE-MARK-MASQ
nat -A KUBE-EXT-4SW47YFZTEDKD3PK -j KUBE-SVC-4SW47YFZTEDKD3PK
nat -A KUBE-EXT-GNZBNJ2PO5MGZ6GT -m comment --comment "pod traffic for ns2/svc2:p80 external destinations" -s 10.0.0.0/8 -j KUBE-SVC-GNZBNJ2PO5MGZ6GT
nat -A KUBE-EXT-GNZBNJ2PO5MGZ6GT -m comment --comment "masquerade LOCAL traffic for ns2/svc2:p80 external destinations" -m addrtype --src-type LOCAL -j KUBE-MARK-MASQ
nat -A KUBE-EXT-GNZBNJ2PO5MGZ6GT -m comment --comment "route LOCAL traffic for ns2/svc2:p80 external destinations" -m addrtype --src-type LOCAL -j KUBE-SVC-GNZBNJ2PO5MGZ6GT
nat -A KUBE-EXT-NUKIZ6OKUXPJNT4C -m comment --comment "masquerade traffic for ns5/svc5:p80 external destinations" -j KUBE-MARK-MASQ
nat -A KUBE-EXT-NUKIZ6OKUXPJNT4C -j KUBE-SVC-NUKIZ6OKUXPJNT4C
nat -A KUBE-EXT-X27LE4BHSL4DOUIK -m comment --comment "masquerade traffic for ns3/svc3:p80 external destinations" -j KUBE-MARK-MASQ
nat -A KUBE-EXT-X27LE4BHSL4DOUIK -j KUBE-SVC-X27LE4BHSL4DOUIK
nat -A KUBE-FW-NUKIZ6OKUXPJNT4C -m comment --comment "ns5/svc5:p80 loadbalancer IP" -s 203.0.113.0/25 -j KUBE-EXT-NUKIZ6OKUXPJNT4C
nat -A KUBE-FW-NUKIZ6OKUXPJNT4C -m comment --comment "other traffic to ns5/svc5:p80 will be dropped by KUBE-PROXY-FIREWALL"
nat -A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
nat -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
nat -A KUBE-POSTROUTING -j MARK --xor-mark 0x4000
nat -A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
nat -A KUBE-SEP-C6EBXVWJJZMIWKLZ -m comment --comment ns4/svc4:p80 -s 10.180.0.5 -j KUBE-MARK-MASQ
nat -A KUBE-SEP-C6EBXVWJJZMIWKLZ -m comment --comment ns4/svc4:p80 -m tcp -p tcp -j DNAT --to-destination 10.180.0.5:80
nat -A KUBE-SEP-I77PXRDZVX7PMWMN -m comment --comment ns5/svc5:p80 -s 10.180.0.3 -j KUBE-MARK-MASQ
nat -A KUBE-SEP-I77PXRDZVX7PMWMN -m comment --comment ns5/svc5:p80 -m recent --name KUBE-SEP-I77PXRDZVX7PMWMN --set -m tcp -p tcp -j DNAT --to-destination 10.180.0.3:80
nat -A KUBE-SEP-OYPFS5VJICHGATKP -m comment --comment ns3/svc3:p80 -s 10.180.0.3 -j KUBE-MARK-MASQ
nat -A KUBE-SEP-OYPFS5VJICHGATKP -m comment --comment ns3/svc3:p80 -m tcp -p tcp -j DNAT --to-destination 10.180.0.3:80
nat -A KUBE-SEP-RS4RBKLTHTF2IUXJ -m comment --comment ns2/svc2:p80 -s 10.180.0.2 -j KUBE-MARK-MASQ
nat -A KUBE-SEP-RS4RBKLTHTF2IUXJ -m comment --comment ns2/svc2:p80 -m tcp -p tcp -j DNAT --to-destination 10.180.0.2:80
nat -A KUBE-SEP-SXIVWICOYRO3J4NJ -m comment --comment ns1/svc1:p80 -s 10.180.0.1 -j KUBE-MARK-MASQ
nat -A KUBE-SEP-SXIVWICOYRO3J4NJ -m comment --comment ns1/svc1:p80 -m tcp -p tcp -j DNAT --to-destination 10.180.0.1:80
nat -A KUBE-SEP-UKSFD7AGPMPPLUHC -m comment --comment ns4/svc4:p80 -s 10.180.0.4 -j KUBE-MARK-MASQ
nat -A KUBE-SEP-UKSFD7AGPMPPLUHC -m comment --comment ns4/svc4:p80 -m tcp -p tcp -j DNAT --to-destination 10.180.0.4:80
nat -A KUBE-SVC-4SW47YFZTEDKD3PK -m comment --comment "ns4/svc4:p80 cluster IP" -m tcp -p tcp -d 172.30.0.44 --dport 80 ! -s 10.0.0.0/8 -j KUBE-MARK-MASQ
nat -A KUBE-SVC-4SW47YFZTEDKD3PK -m comment --comment "ns4/svc4:p80 -> 10.180.0.4:80" -m statistic --mode random --probability 0.5000000000 -j KUBE-SEP-UKSFD7AGPMPPLUHC
nat -A KUBE-SVC-4SW47YFZTEDKD3PK -m comment --comment "ns4/svc4:p80 -> 10.180.0.5:80" -j KUBE-SEP-C6EBXVWJJZMIWKLZ
nat -A KUBE-SVC-GNZBNJ2PO5MGZ6GT -m comment --comment "ns2/svc2:p80 cluster IP" -m tcp -p tcp -d 172.30.0.42 --dport 80 ! -s 10.0.0.0/8 -j KUBE-MARK-MASQ
nat -A KUBE-SVC-GNZBNJ2PO5MGZ6GT -m comment --comment "ns2/svc2:p80 -> 10.180.0.2:80" -j KUBE-SEP-RS4RBKLTHTF2IUXJ
nat -A KUBE-SVC-NUKIZ6OKUXPJNT4C -m comment --comment "ns5/svc5:p80 cluster IP" -m tcp -p tcp -d 172.30.0.45 --dport 80 ! -s 10.0.0.0/8 -j KUBE-MARK-MASQ
nat -A KUBE-SVC-NUKIZ6OKUXPJNT4C -m comment --comment "ns5/svc5:p80 -> 10.180.0.3:80" -m recent --name KUBE-SEP-I77PXRDZVX7PMWMN --rcheck --seconds 10800 --reap -j KUBE-SEP-I77PXRDZVX7PMWMN
nat -A KUBE-SVC-NUKIZ6OKUXPJNT4C -m comment --comment "ns5/svc5:p80 -> 10.180.0.3:80" -j KUBE-SEP-I77PXRDZVX7PMWMN
nat -A KUBE-SVC-X27LE4BHSL4DOUIK -m comment --comment "ns3/svc3:p80 cluster IP" -m tcp -p tcp -d 172.30.0.43 --dport 80 ! -s 10.0.0.0/8 -j KUBE-MARK-MASQ
nat -A KUBE-SVC-X27LE4BHSL4DOUIK -m comment --comment "ns3/svc3:p80 -> 10.180.0.3:80" -j KUBE-SEP-OYPFS5VJICHGATKP
nat -A KUBE-SVC-XPGD46QRK7WJZT7O -m comment --comment "ns1/svc1:p80 cluster IP" -m tcp -p tcp -d 172.30.0.41 --dport 80 ! -s 10.0.0.0/8 -j KUBE-MARK-MASQ
nat -A KUBE-SVC-XPGD46QRK7WJZT7O -m comment --comment "ns1/svc1:p80 -> 10.180.0.1:80" -j KUBE-SEP-SXIVWICOYRO3J4NJ"#;

#[test]
fn another_instance_has_the_same_rules_under_other_names() {
    let ours = lines(&chains(&settings("KUBE-"), &overall()));
    let other = lines(&chains(&settings("WL12ab-"), &overall()));
    let renamed: Vec<String> = ours.iter().map(|l| l.replace("KUBE-", "WL12ab-")).collect();
    assert_eq!(other, renamed);
}

/// Where the cluster IP and a node port lead, for a service with these policies and endpoints.
#[test]
fn policies_and_terminating_endpoints() {
    let check = |internal: &str, external: &str, endpoints: &[&str], expected: [&str; 4]| {
        let spec = json!({"type": "NodePort", "clusterIP": "172.30.0.1", "internalTrafficPolicy": internal, "externalTrafficPolicy": external,
                          "ports": [{"name": "p80", "port": 80, "nodePort": 3001}]});
        let got = chains(&settings("KUBE-"), &[(service("n", "s", spec, json!({})), Some(slice("n", "s", endpoints)))]);
        let all = lines(&got);
        let target = |part: &str| {
            all.iter().filter(|l| l.contains(part)).filter_map(|l| l.rsplit_once(" -j ")).map(|(_, t)| t.split('-').nth(1).unwrap_or(t).to_owned()).collect::<Vec<_>>().join(",")
        };
        let balanced = |kind: &str| {
            all.iter().filter(|l| l.contains(&format!("-A KUBE-{kind}-")) && l.contains(" -> ")).map(|l| l.split("> ").nth(1).unwrap().split(':').next().unwrap().to_owned()).collect::<Vec<_>>().join(",")
        };
        let services = target("SERVICES -m comment --comment \"n/s:p80 cluster IP\"") + &target("filter -A KUBE-SERVICES");
        let dropped = target("filter -A KUBE-EXTERNAL-SERVICES");
        assert_eq!([services, balanced("SVC"), balanced("SVL"), dropped], expected, "{internal} {external} {endpoints:?}");
    };
    check("Cluster", "Cluster", &["10.0.0.1@node1", "10.0.0.2@node2"], ["SVC", "10.0.0.1,10.0.0.2", "", ""]);
    check("Cluster", "Local", &["10.0.0.1@node1", "10.0.0.2@node2"], ["SVC", "10.0.0.1,10.0.0.2", "10.0.0.1", ""]);
    check("Local", "Local", &["10.0.0.2@node2"], ["DROP", "10.0.0.2", "", "DROP"]);
    check("Cluster", "Cluster", &["10.0.0.1!"], ["REJECT", "", "", "REJECT"]);
    // Only terminating endpoints left: they serve on.
    check("Cluster", "Local", &["10.0.0.1@node1~", "10.0.0.2@node2"], ["SVC", "10.0.0.2", "10.0.0.1", ""]);
    check("Cluster", "Cluster", &["10.0.0.1~", "10.0.0.2!"], ["SVC", "10.0.0.1", "", ""]);
}

#[test]
fn topology_hints() {
    let check = |zone: Option<&str>, hints: &[(&str, &[&str], &[&str])], expected: &[&str]| {
        let endpoints: Vec<Value> = hints
            .iter()
            .map(|(address, zones, nodes)| {
                let named = |l: &[&str]| l.iter().map(|n| json!({"name": n})).collect::<Vec<_>>();
                json!({"addresses": [address], "hints": {"forZones": named(zones), "forNodes": named(nodes)}})
            })
            .collect();
        let mut view = slice("n", "s", &[]);
        view.endpoints = serde_json::from_value(Value::Array(endpoints)).unwrap();
        let ports = service_ports(Family::V4, "node1", &service("n", "s", json!({"clusterIP": "172.30.0.1"}), json!({})), [&view]);
        let usable = categorize(&ports[0], "node1", zone);
        assert_eq!(usable.cluster.iter().map(|e| e.address.ip().to_string()).collect::<Vec<_>>(), expected);
    };
    let zones: &[(&str, &[&str], &[&str])] = &[("10.0.0.1", &["a"], &[]), ("10.0.0.2", &["b"], &[])];
    check(Some("a"), zones, &["10.0.0.1"]);
    check(Some("c"), zones, &["10.0.0.1", "10.0.0.2"]);
    check(None, zones, &["10.0.0.1", "10.0.0.2"]);
    check(Some("a"), &[("10.0.0.1", &["a"], &[]), ("10.0.0.2", &[], &[])], &["10.0.0.1", "10.0.0.2"]);
    check(Some("b"), &[("10.0.0.1", &["a"], &["node1"]), ("10.0.0.2", &["b"], &["node2"])], &["10.0.0.1"]);
}

#[test]
fn settings_show_in_the_rules() {
    let check = |change: fn(&mut Settings), present: &str, absent: &str| {
        let mut settings = settings("KUBE-");
        change(&mut settings);
        let all = lines(&chains(&settings, &overall())).join("\n");
        assert!(all.contains(present), "{present} is missing in:\n{all}");
        assert!(absent.is_empty() || !all.contains(absent), "{absent} is in:\n{all}");
    };
    check(|s| s.masquerade_all = true, "-d 172.30.0.41 --dport 80 -j KUBE-MARK-MASQ", "! -s 10.0.0.0/8");
    check(|s| s.detector = LocalDetector::default(), "cluster IP", "pod traffic for");
    check(|s| s.liberal = true, "RELATED,ESTABLISHED -j ACCEPT", "INVALID");
    check(|s| s.localhost_node_ports = false, "--dst-type LOCAL ! -d 127.0.0.0/8 -j KUBE-NODEPORTS", "block incoming localnet");
    check(|s| s.large = true, "KUBE-SEP-SXIVWICOYRO3J4NJ -s 10.180.0.1 -j KUBE-MARK-MASQ", " -> ");
    check(
        |s| s.node_port_addresses = NodePortAddresses::Only(vec!["192.168.0.2".parse().unwrap(), "fd00::2".parse().unwrap()]),
        "-d 192.168.0.2 -j KUBE-NODEPORTS",
        "fd00",
    );
    check(|s| s.node_ip = Some("203.0.113.9".parse().unwrap()), "loadbalancer IP\" -s 5.6.7.8 -j KUBE-EXT-", "");
}

#[test]
fn services_that_are_not_proxied() {
    for spec in [
        json!({"clusterIP": "None"}),
        json!({"type": "ExternalName", "externalName": "example.com"}),
        json!({"clusterIP": ""}),
        json!({"clusterIP": "fd00::1", "clusterIPs": ["fd00::1"]}),
    ] {
        assert_eq!(service_ports(Family::V4, "n", &service("n", "s", spec.clone(), json!({})), []), [], "{spec}");
    }
}
