//! Questions and answers, after the Kubernetes DNS specification 1.1.0.

use std::collections::BTreeMap;

use hickory_server::proto::rr::RecordType as T;
use serde_json::json;

use super::*;
use crate::model::SliceView;

/// A cluster in memory.
#[derive(Default)]
pub(crate) struct Cluster {
    services: BTreeMap<(String, String), Arc<ServiceView>>,
    slices: Vec<Arc<SliceView>>,
}

impl Cluster {
    fn service(mut self, namespace: &str, name: &str, spec: serde_json::Value) -> Cluster {
        let view = serde_json::from_value(json!({"metadata": {"namespace": namespace, "name": name}, "spec": spec})).unwrap();
        self.services.insert((namespace.into(), name.into()), Arc::new(view));
        self
    }

    fn slice(mut self, namespace: &str, service: &str, endpoints: serde_json::Value, ports: serde_json::Value) -> Cluster {
        let view = json!({"metadata": {"namespace": namespace, "name": "x", "labels": {"kubernetes.io/service-name": service}},
                          "endpoints": endpoints, "ports": ports});
        self.slices.push(Arc::new(serde_json::from_value(view).unwrap()));
        self
    }
}

impl Source for Cluster {
    fn service(&self, namespace: &str, name: &str) -> Option<Arc<ServiceView>> {
        self.services.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }
    fn slices(&self, namespace: &str, service: &str) -> Vec<Arc<SliceView>> {
        let wanted = format!("{namespace}/{service}");
        self.slices.iter().filter(|s| crate::model::slice_by_service(s).contains(&wanted)).cloned().collect()
    }
    fn has_namespace(&self, name: &str) -> bool {
        ["default", "empty"].contains(&name)
    }
    fn services_at(&self, ip: IpAddr) -> Vec<Arc<ServiceView>> {
        self.services.values().filter(|s| s.cluster_ips().any(|a| a == ip)).cloned().collect()
    }
    fn slices_at(&self, ip: IpAddr) -> Vec<Arc<SliceView>> {
        self.slices.iter().filter(|s| crate::model::slice_by_address(s).contains(&ip.to_string())).cloned().collect()
    }
}

pub(crate) fn zone() -> Zone<Cluster> {
    let http = json!([{"name": "http", "protocol": "TCP", "port": 80}, {"name": "dns", "protocol": "UDP", "port": 53}]);
    let source = Cluster::default()
        .service("default", "web", json!({"clusterIP": "10.96.0.20", "clusterIPs": ["10.96.0.20", "fd00::20"], "ports": http}))
        .slice("default", "web", json!([{"addresses": ["10.244.1.9"], "hostname": "w"}]), http.clone())
        .service("default", "db", json!({"clusterIP": "None", "ports": [{"name": "sql", "protocol": "TCP", "port": 5432}]}))
        .slice(
            "default",
            "db",
            json!([
                {"addresses": ["10.244.1.5"], "hostname": "db-0", "conditions": {"ready": true}},
                {"addresses": ["10.244.2.6"], "conditions": {"ready": true}},
                {"addresses": ["10.244.2.7"], "hostname": "db-2", "conditions": {"ready": false}},
            ]),
            json!([{"name": "sql", "protocol": "TCP", "port": 5432}]),
        )
        .service("default", "portless", json!({"clusterIP": "None"}))
        .slice("default", "portless", json!([{"addresses": ["10.244.3.1"]}]), json!(null))
        .service("default", "idle", json!({"clusterIP": "None"}))
        .service("default", "alias", json!({"type": "ExternalName", "externalName": "Example.com"}));
    Zone { domain: Name::from_ascii("cluster.local.").unwrap(), ttl: 5, own_address: Some("10.96.0.10".parse().unwrap()), source }
}

/// Names without a dot at their end are below `cluster.local.`; an answer is the records' data, extras after ` +`.
fn check(rows: &[(&str, T, &str)]) {
    let zone = zone();
    for (name, kind, expected) in rows {
        let full = if name.ends_with('.') { (*name).to_owned() } else { format!("{name}.cluster.local.") };
        let asked = Name::from_ascii(&full).unwrap();
        let got = match zone.lookup(&asked, *kind) {
            Answer::Records(records, extra) => {
                assert!(records.iter().all(|r| r.name == asked && r.ttl == 5), "{full}: {records:?}");
                let mut text: Vec<String> = records.iter().map(|r| r.data.to_string()).collect();
                text.sort();
                let extra: Vec<String> = extra.iter().map(|r| format!(" +{} {}", r.name, r.data)).collect();
                text.join(" ") + &extra.concat()
            }
            Answer::Alias(record, target) => format!("{} -> {target}", record.data),
            other => format!("{other:?}"),
        };
        assert_eq!(got, *expected, "{full} {kind}");
    }
}

#[test]
fn services() {
    check(&[
        ("web.default.svc", T::A, "10.96.0.20"),
        ("WEB.Default.Svc", T::A, "10.96.0.20"),
        ("web.default.svc", T::AAAA, "fd00::20"),
        ("web.default.svc", T::TXT, "NoData"),
        ("_http._tcp.web.default.svc", T::SRV, "0 100 80 web.default.svc.cluster.local. +web.default.svc.cluster.local. 10.96.0.20 +web.default.svc.cluster.local. fd00::20"),
        ("_http._udp.web.default.svc", T::SRV, "NoName"),
        ("_dns._udp.web.default.svc", T::A, "10.96.0.20"),
        ("w.web.default.svc", T::A, "10.244.1.9"),
        ("alias.default.svc", T::A, "Example.com. -> Example.com."),
        ("nobody.default.svc", T::A, "NoName"),
        ("web.elsewhere.svc", T::A, "NoName"),
        ("x.y.z.web.default.svc", T::A, "NoName"),
    ]);
}

#[test]
fn headless_services() {
    let srv = "0 50 5432 10-244-2-6.db.default.svc.cluster.local. 0 50 5432 db-0.db.default.svc.cluster.local. \
               +db-0.db.default.svc.cluster.local. 10.244.1.5 +10-244-2-6.db.default.svc.cluster.local. 10.244.2.6";
    check(&[
        ("db.default.svc", T::A, "10.244.1.5 10.244.2.6"),
        ("db.default.svc", T::AAAA, "NoData"),
        ("db-0.db.default.svc", T::A, "10.244.1.5"),
        ("10-244-2-6.db.default.svc", T::A, "10.244.2.6"),
        ("db-2.db.default.svc", T::A, "NoName"),
        ("_sql._tcp.db.default.svc", T::SRV, srv),
        ("portless.default.svc", T::A, "10.244.3.1"),
        ("idle.default.svc", T::A, "NoName"),
    ]);
}

#[test]
fn pods_namespaces_and_the_zone_itself() {
    check(&[
        ("10-244-1-5.default.pod", T::A, "10.244.1.5"),
        ("10-244-1-5.default.pod", T::AAAA, "NoData"),
        ("fd00--5.default.pod", T::AAAA, "fd00::5"),
        ("10-244-1-5.elsewhere.pod", T::A, "NoName"),
        ("not-an-ip.default.pod", T::A, "NoName"),
        ("default.svc", T::A, "NoData"),
        ("empty.svc", T::A, "NoData"),
        ("elsewhere.svc", T::A, "NoName"),
        ("svc", T::A, "NoData"),
        ("other", T::A, "NoName"),
        ("dns-version", T::TXT, "1.1.0"),
        ("dns-version", T::A, "NoData"),
        ("ns.dns", T::A, "10.96.0.10"),
        ("cluster.local.", T::SOA, "ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 5"),
        ("cluster.local.", T::NS, "ns.dns.cluster.local. +ns.dns.cluster.local. 10.96.0.10"),
        ("cluster.local.", T::A, "NoData"),
        ("example.com.", T::A, "NotOurs"),
        ("local.", T::A, "NotOurs"),
        (".", T::NS, "NotOurs"),
    ]);
}

#[test]
fn reverse() {
    check(&[
        ("20.0.96.10.in-addr.arpa.", T::PTR, "web.default.svc.cluster.local."),
        ("5.1.244.10.in-addr.arpa.", T::PTR, "db-0.db.default.svc.cluster.local."),
        ("6.2.244.10.in-addr.arpa.", T::PTR, "10-244-2-6.db.default.svc.cluster.local."),
        ("5.1.244.10.in-addr.arpa.", T::A, "NoData"),
        // An endpoint of a service with an address of its own, one that is not ready, one of nobody, a whole network.
        ("9.1.244.10.in-addr.arpa.", T::PTR, "NotOurs"),
        ("7.2.244.10.in-addr.arpa.", T::PTR, "NotOurs"),
        ("1.1.1.1.in-addr.arpa.", T::PTR, "NotOurs"),
        ("96.10.in-addr.arpa.", T::PTR, "NotOurs"),
        ("0.2.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.d.f.ip6.arpa.", T::PTR, "web.default.svc.cluster.local."),
    ]);
}
