use super::*;
use crate::pod::model::tests::pod;
use serde_json::{Value, json};
use std::sync::Arc;

#[test]
fn expansion() {
    let check = |text: &str, expected: &str| {
        let lookup = |name: &str| match name {
            "A" => Some("1".to_owned()),
            "B" => Some("$(A)".to_owned()),
            "" => Some("empty".to_owned()),
            _ => None,
        };
        assert_eq!(expand(text, &lookup), expected, "{text}");
    };
    // Cases of upstream's expansion tests: no recursion, unknown names stay, `$$` escapes.
    check("$(A)", "1");
    check("x-$(A)-y", "x-1-y");
    check("$(B)", "$(A)");
    check("$(NONE)", "$(NONE)");
    check("$$(A)", "$(A)");
    check("$$$(A)", "$1");
    check("$A", "$A");
    check("$(A", "$(A");
    check("$", "$");
    check("a$", "a$");
    check("$()", "empty");
    check("$(A)$(A)", "11");
    check("ü$ü(A)", "ü$ü(A)");
}

#[test]
fn services() {
    let services = [ServiceFacts {
        name: "my-svc".into(),
        cluster_ip: "10.0.0.7".into(),
        ports: vec![("http".into(), 80, "TCP".into()), ("dns-udp".into(), 53, "UDP".into())],
    }];
    let vars = service_variables(&services);
    for (name, expected) in [
        ("MY_SVC_SERVICE_HOST", "10.0.0.7"),
        ("MY_SVC_SERVICE_PORT", "80"),
        ("MY_SVC_SERVICE_PORT_HTTP", "80"),
        ("MY_SVC_SERVICE_PORT_DNS_UDP", "53"),
        ("MY_SVC_PORT", "tcp://10.0.0.7:80"),
        ("MY_SVC_PORT_80_TCP", "tcp://10.0.0.7:80"),
        ("MY_SVC_PORT_80_TCP_PROTO", "tcp"),
        ("MY_SVC_PORT_53_UDP", "udp://10.0.0.7:53"),
        ("MY_SVC_PORT_53_UDP_ADDR", "10.0.0.7"),
    ] {
        assert_eq!(vars.get(name).map(String::as_str), Some(expected), "{name}");
    }
}

struct Fake;

impl Objects for Fake {
    fn config_map(&self, name: &str) -> Result<Option<Arc<ConfigMap>>, String> {
        let data = Some([("k".to_owned(), "v".to_owned())].into());
        Ok((name == "cm").then(|| Arc::new(ConfigMap { data, ..Default::default() })))
    }
    fn secret(&self, _: &str) -> Result<Option<Arc<Secret>>, String> {
        Ok(None)
    }
    fn file_key(&self, _: &str, _: &str, _: &str) -> Result<Option<String>, String> {
        Ok(None)
    }
}

fn check(container: Value, expected: Result<&[&str], &str>) {
    let pod = pod(json!({"containers": [container], "nodeName": "n1"}));
    let services = [("S".to_owned(), "svc".to_owned()), ("A".to_owned(), "from-service".to_owned())].into();
    let runtime = Runtime { pod_ips: vec!["10.0.0.1".into(), "fd::1".into()], allocatable: (4000, 8 << 30, 1), ..Default::default() };
    let got = environment(&pod, &model::containers(&pod)[0], &services, &Fake, &runtime);
    let got = got.map(|list| list.into_iter().filter(|(k, _)| k != "S").map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>());
    let expected = expected.map(|l| l.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>()).map_err(str::to_owned);
    assert_eq!(got, expected);
}

#[test]
fn sources() {
    check(json!({"name": "c", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)-$(S)-$(C)"}, {"name": "C", "value": "2"}]}), Ok(&["A=1", "B=1-svc-$(C)", "C=2"]));
    check(json!({"name": "c", "envFrom": [{"prefix": "p_", "configMapRef": {"name": "cm"}}], "env": [{"name": "B", "value": "$(p_k)"}]}), Ok(&["A=from-service", "B=v", "p_k=v"]));
    check(json!({"name": "c", "envFrom": [{"configMapRef": {"name": "none"}}]}), Err("configmap \"none\" not found"));
    check(json!({"name": "c", "envFrom": [{"secretRef": {"name": "none", "optional": true}}]}), Ok(&["A=from-service"]));
    check(json!({"name": "c", "env": [{"name": "B", "valueFrom": {"configMapKeyRef": {"name": "cm", "key": "x"}}}]}), Err("couldn't find key x in ConfigMap ns/cm"));
    check(
        json!({"name": "c", "env": [
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIPs"}}},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
            {"name": "MEM", "valueFrom": {"resourceFieldRef": {"resource": "requests.memory", "divisor": "1Mi"}}}],
            "resources": {"requests": {"memory": "3000Ki"}}}),
        Ok(&["A=from-service", "CPU=4", "IP=10.0.0.1,fd::1", "MEM=3", "NODE=n1"]),
    );
}

#[test]
fn quoting() {
    let map = [("a".to_owned(), "x\"y\n".to_owned()), ("b".to_owned(), String::new())].into();
    assert_eq!(format_map(Some(&map)), "a=\"x\\\"y\\n\"\nb=\"\"");
}

#[test]
fn env_files() {
    let text = "# note\nA='one'\n B = two\nC=\n";
    let get = |key: &str| parse_env_file(text, key);
    assert_eq!((get("A"), get("B"), get("C"), get("D")), (Some("one".into()), Some("two".into()), Some(String::new()), None));
}
