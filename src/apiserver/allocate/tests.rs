use super::*;
use crate::cluster::Change;
use crate::cluster::testing::Fake;
use tokio_util::sync::CancellationToken;

struct Bench {
    cluster: Arc<Fake>,
    allocators: Arc<Allocators>,
    _dir: tempfile::TempDir,
}

async fn bench(network: &str, ports: &str) -> Bench {
    let dir = tempfile::tempdir().expect("a directory");
    let config = windlass_store::EmbeddedConfig::new(dir.path().join("store.redb"));
    let store = Arc::new(windlass_store::Embedded::open(config).await.expect("a store"));
    let cluster = Fake::new([]);
    let (network, ports) = (network.parse().expect("a network"), ports.parse().expect("ports"));
    Bench { allocators: Allocators::new(cluster.clone(), store, network, ports), cluster, _dir: dir }
}

fn service(name: &str, spec: Value) -> Value {
    json!({"metadata": {"name": name, "namespace": "ns"}, "spec": spec})
}

fn with(kind: &str, ports: &[(u16, u16)]) -> Value {
    let ports: Vec<Value> = ports
        .iter()
        .map(|(port, node)| if *node == 0 { json!({"port": port, "protocol": "TCP"}) } else { json!({"port": port, "protocol": "TCP", "nodePort": node}) })
        .collect();
    json!({"type": kind, "selector": {"a": "b"}, "ports": ports})
}

impl Bench {
    /// Creates and commits; the service as it would be stored, or the refusal.
    async fn create(&self, mut service: Value) -> Result<Value, String> {
        let allocation = self.allocators.create(&mut service, false).await.map_err(|error| error.message.clone())?;
        self.allocators.commit(allocation).await;
        Ok(service)
    }

    async fn update(&self, mut new: Value, old: &Value) -> Result<Value, String> {
        let allocation = self.allocators.update(&mut new, old, false).await.map_err(|error| error.message.clone())?;
        self.allocators.commit(allocation).await;
        Ok(new)
    }

    fn addresses(&self) -> usize {
        self.cluster.cached_list(ADDRESSES, None).len()
    }

    async fn port_taken(&self, port: u16) -> bool {
        self.allocators.store.get(&port_key(port)).await.expect("a store").is_some()
    }
}

#[tokio::test]
async fn created_services() {
    let bench = bench("10.96.0.0/24", "30000-30010").await;
    let plain = bench.create(service("a", with("ClusterIP", &[(80, 0)]))).await.expect("a service");
    let address: Ipv4Addr = plain["spec"]["clusterIP"].as_str().expect("one").parse().expect("an address");
    assert!(bench.allocators.network.contains(address));
    assert_eq!(plain["spec"]["clusterIPs"], json!([address.to_string()]));
    assert_eq!((&plain["spec"]["ipFamilies"], &plain["spec"]["ipFamilyPolicy"]), (&json!(["IPv4"]), &json!("SingleStack")));
    let object = bench.cluster.cached(ADDRESSES, "", &address.to_string()).expect("an object");
    assert_eq!(object["spec"]["parentRef"]["name"], "a");
    assert_eq!(meta::label(&object, MANAGED_BY), Some(MANAGER));

    let mut same = with("ClusterIP", &[(80, 0)]);
    same["clusterIP"] = address.to_string().into();
    let error = bench.create(service("b", same)).await.expect_err("taken");
    assert!(error.contains("provided IP is already allocated"), "{error}");
    let mut outside = with("ClusterIP", &[(80, 0)]);
    outside["clusterIP"] = "10.97.0.1".into();
    let error = bench.create(service("b", outside)).await.expect_err("outside");
    assert!(error.contains("the provided network does not match the current range"), "{error}");

    let mut headless = with("ClusterIP", &[(80, 0)]);
    headless["clusterIP"] = "None".into();
    let headless = bench.create(service("c", headless)).await.expect("a service");
    assert_eq!(headless["spec"]["clusterIPs"], json!(["None"]));
    let external = bench.create(service("d", json!({"type": "ExternalName", "externalName": "x.y"}))).await.expect("one");
    assert!(external["spec"]["clusterIP"].is_null());
    assert_eq!(bench.addresses(), 1);
    bench.allocators.delete(&plain).await;
    assert_eq!(bench.addresses(), 0);
}

#[tokio::test]
async fn families() {
    let bench = bench("10.96.0.0/24", "30000-30010").await;
    let cases = [
        (json!({"ipFamilyPolicy": "RequireDualStack"}), Err("this cluster is not configured for dual-stack services")),
        (json!({"ipFamilies": ["IPv6"]}), Err("not configured on this cluster")),
        (json!({"clusterIP": "fd00::1"}), Err("IPv6 is not configured on this cluster")),
        (json!({"ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv4", "IPv6"]}), Err("must be 'RequireDualStack' or 'PreferDualStack'")),
        (json!({"ipFamilyPolicy": "PreferDualStack"}), Ok(json!(["IPv4"]))),
        (json!({"clusterIP": "None", "selector": null}), Ok(json!(["IPv4", "IPv6"]))),
        (json!({"clusterIP": "None"}), Ok(json!(["IPv4"]))),
    ];
    for (change, expected) in cases {
        let mut spec = with("ClusterIP", &[(80, 0)]);
        for (key, value) in change.as_object().expect("an object") {
            spec[key] = value.clone();
        }
        match (bench.create(service("s", spec)).await, expected) {
            (Ok(service), Ok(families)) => assert_eq!(service["spec"]["ipFamilies"], families, "{change}"),
            (Err(error), Err(part)) => assert!(error.contains(part), "{error}"),
            (got, expected) => panic!("{change}: {got:?}, expected {expected:?}"),
        }
    }
}

#[tokio::test]
async fn node_ports_of_services() {
    let bench = bench("10.96.0.0/24", "30000-30003").await;
    let a = bench.create(service("a", with("NodePort", &[(80, 30001), (443, 0)]))).await.expect("a service");
    let ports = node_ports(&a);
    assert_eq!(ports[0], 30001);
    assert!(bench.allocators.ports.contains(ports[1]) && ports[1] != 30001);
    let taken = bench.create(service("b", with("NodePort", &[(80, 30001)]))).await.expect_err("taken");
    assert!(taken.contains("spec.ports[0].nodePort") && taken.contains("provided port is already allocated"), "{taken}");
    let outside = bench.create(service("b", with("NodePort", &[(80, 31000)]))).await.expect_err("outside");
    assert!(outside.contains("The range of valid ports is 30000-30003"), "{outside}");
    // What a refused service took is given back.
    assert_eq!(bench.addresses(), 1);
    // One number in two protocols shares a port.
    let mut both = with("NodePort", &[(53, 0), (53, 0)]);
    both["ports"][1]["protocol"] = "UDP".into();
    let both = bench.create(service("dns", both)).await.expect("a service");
    assert_eq!(node_ports(&both)[0], node_ports(&both)[1]);
    let mut local = with("LoadBalancer", &[]);
    local["externalTrafficPolicy"] = "Local".into();
    let local = bench.create(service("lb", local)).await.expect("a service");
    assert!(health_port(&local).is_some());
    let full = bench.create(service("more", with("NodePort", &[(80, 0)]))).await.expect_err("full");
    assert!(full.contains("range is full"), "{full}");
    bench.allocators.delete(&a).await;
    assert!(!bench.port_taken(30001).await);
}

#[tokio::test]
async fn updated_services() {
    let bench = bench("10.96.0.0/24", "30000-30010").await;
    let old = bench.create(service("a", with("NodePort", &[(80, 30001), (443, 30002)]))).await.expect("a service");
    // Values that an update leaves out stay.
    let kept = bench.update(service("a", with("NodePort", &[(80, 0), (443, 0)])), &old).await.expect("a service");
    assert_eq!(kept["spec"]["clusterIP"], old["spec"]["clusterIP"]);
    assert_eq!(node_ports(&kept), [30001, 30002]);
    // A port that goes is released, another is taken.
    let changed = bench.update(service("a", with("NodePort", &[(80, 30005)])), &kept).await.expect("a service");
    assert_eq!(node_ports(&changed), [30005]);
    assert!(bench.port_taken(30005).await && !bench.port_taken(30001).await && !bench.port_taken(30002).await);
    // To an external name everything is released, and back again taken.
    let external = service("a", json!({"type": "ExternalName", "externalName": "x.y"}));
    let external = bench.update(external, &changed).await.expect("a service");
    assert_eq!(bench.addresses(), 0);
    let back = bench.update(service("a", with("ClusterIP", &[(80, 0)])), &external).await.expect("a service");
    assert!(back["spec"]["clusterIP"].is_string());
    assert_eq!(bench.addresses(), 1);
}

#[tokio::test]
async fn dry_run_takes_nothing() {
    let bench = bench("10.96.0.0/24", "30000-30010").await;
    let mut wanted = service("a", with("NodePort", &[(80, 0)]));
    let allocation = bench.allocators.create(&mut wanted, true).await.expect("allowed");
    bench.allocators.commit(allocation).await;
    assert_eq!(bench.addresses(), 0);
    assert_eq!(wanted["spec"]["clusterIP"], "10.96.0.0");
}

/// Leaks in both directions are mended.
#[tokio::test]
async fn repair_mends() {
    let bench = bench("10.96.0.0/24", "30000-30010").await;
    let lost = bench.create(service("lost", with("NodePort", &[(80, 30001)]))).await.expect("a service");
    let mut kept = bench.create(service("kept", with("NodePort", &[(80, 30002)]))).await.expect("a service");
    kept["metadata"]["uid"] = "u".into();
    // The service `lost` was never stored; `kept` lost its values.
    bench.cluster.put(SERVICES, kept.clone());
    bench.allocators.delete(&kept).await;
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let shutdown = CancellationToken::new();
    let none = std::time::Duration::ZERO;
    let delays = repair::Delays { grace: none, soon: none };
    let task = tokio::spawn(repair::run(bench.allocators.clone(), delays, shutdown.clone()));
    bench.cluster.on_change(ADDRESSES, Arc::new(move |change: &Change<'_>| {
        let object: Value = serde_json::from_slice(change.new.or(change.old).unwrap_or_default()).expect("an object");
        tell.send((meta::name(&object).to_owned(), change.new.is_some())).expect("the test listens");
    }));
    let (lost_address, kept_address) = (text(&lost["spec"], "clusterIP"), text(&kept["spec"], "clusterIP"));
    let mut seen = Vec::new();
    while !(seen.contains(&(lost_address.to_owned(), false)) && seen.contains(&(kept_address.to_owned(), true))) {
        seen.push(told.recv().await.expect("an event"));
    }
    shutdown.cancel();
    task.await.expect("the loop ends");
}
