//! Puts the parts together.

use std::collections::HashSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use parking_lot::RwLock;
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;
use windlass_client::Role;
use windlass_client::events::Recorder;
use windlass_client::informer::Informer;
use windlass_net::pod::PodNetwork;
use windlass_net::{Cidr, routes};

use crate::config::Config;
use crate::error::Error;
use crate::images::Images;
use crate::manager::{self, INBOX, Input, Table};
use crate::node::{self, machine};
use crate::objects::Objects;
use crate::runtime::Runtime;
use crate::runtime::docker::Docker;
use crate::shared::{self, ServiceView, Shared};
use crate::sources::{directory, url};
use crate::tokens::Tokens;
use crate::volumes::{Volumes, local};
use crate::{metrics, server};

const RETRY: Duration = Duration::from_secs(1);
/// How often to look whether another firewall flushed the pods' rules: it tells nobody.
const RULES_CHECK: Duration = Duration::from_secs(60);

windlass_client::projection! {
    /// What routes need of a node.
    struct PeerView: k8s_openapi::api::core::v1::Node {
        spec: PeerSpec,
        status: PeerStatus,
    }
}

#[derive(Clone, Debug, Default, serde::Deserialize)]
struct PeerSpec {
    #[serde(default, rename = "podCIDR")]
    pod_cidr: Option<String>,
    #[serde(default, rename = "podCIDRs")]
    pod_cidrs: Vec<String>,
}

#[derive(Clone, Debug, Default, serde::Deserialize)]
struct PeerStatus {
    #[serde(default)]
    addresses: Vec<k8s_openapi::api::core::v1::NodeAddress>,
}

/// Runs the kubelet until `role.shutdown`. Containers stay as they are when it ends.
///
/// # Errors
/// A configuration that cannot be used, a directory that cannot be made, a port that cannot be opened. A runtime or an
/// API server that is away is waited for.
pub async fn run(config: Config, role: Role) -> Result<(), Error> {
    let runtime_check = role.health.check("container-runtime");
    let node_check = role.health.check("node-registered");
    let pods_check = role.health.check("pods-synced");
    std::fs::create_dir_all(config.root_dir.join("pods")).map_err(Error::file("create", &config.root_dir))?;
    let manifest = (!config.manifest_url.is_empty()).then(|| url::Source::parse(&config.manifest_url, &config.manifest_url_header)).transpose()?;
    node::taints(&config.register_with_taints)?;
    let Some(docker) = connect(&config, &role).await else { return Ok(()) };
    runtime_check.ok();
    let docker: Arc<dyn Runtime> = Arc::new(docker);
    let network = Arc::new(network(&config, &*docker).await?);
    let shared = Arc::new(assemble(&config, &role, docker, network.clone()).await?);
    let (inbox, inputs) = mpsc::channel(INBOX);
    let tasks = TaskTracker::new();
    let (guarded, stop) = (network.clone(), role.shutdown.clone());
    tasks.spawn(async move {
        tokio::select! { () = guarded.guard(RULES_CHECK) => {}, () = stop.cancelled() => {} }
    });
    let mut expected = HashSet::new();
    if let Some(dir) = &config.pod_manifest_path {
        expected.insert(directory::SOURCE);
        tasks.spawn(directory::run(dir.clone(), shared.node_name.clone(), inbox.clone(), role.shutdown.clone()));
    }
    if let Some(source) = manifest {
        expected.insert(url::SOURCE);
        tasks.spawn(url::run(source, shared.node_name.clone(), inbox.clone(), role.shutdown.clone()));
    }
    let serving = server::start(&shared, &role).await?;
    tasks.spawn(serving);
    tasks.spawn(manager::run(shared.clone(), inbox.clone(), inputs, expected));
    tasks.spawn(local::run(shared.client.clone(), shared.node.clone(), shared.node_name.clone(), role.shutdown.clone()));
    follow_cidrs(&shared, &network);
    follow_peers(&shared, &tasks);
    tasks.spawn(join_node(shared.clone(), node_check));
    let (pods, told) = follow_pods(&shared, &inbox);
    tasks.spawn(async move {
        tokio::select! {
            () = pods.synced() => {
                // Behind the pods, in the same queue: whoever hears it has heard of every pod, and may look for orphans.
                let _ = told.send(Input::ApiSynced);
                pods_check.ok();
                shared.shutdown.cancelled().await;
            }
            () = shared.shutdown.cancelled() => {}
        }
    });
    role.shutdown.cancelled().await;
    tasks.close();
    if tokio::time::timeout(Duration::from_secs(10), tasks.wait()).await.is_err() {
        tracing::warn!("some of the kubelet's tasks did not end within 10 s");
    }
    Ok(())
}

/// Waits for Docker; `None` when shut down before it came.
async fn connect(config: &Config, role: &Role) -> Option<Docker> {
    let mut told = false;
    loop {
        match Docker::connect(&config.docker_endpoint, &config.instance).await {
            Ok(docker) => return Some(docker),
            Err(error) if !told => {
                told = true;
                tracing::warn!(%error, "waiting for the container runtime");
            }
            Err(_) => {}
        }
        tokio::select! {
            () = tokio::time::sleep(RETRY) => {}
            () = role.shutdown.cancelled() => return None,
        }
    }
}

fn cidrs(field: &'static str, text: &str) -> Result<Vec<Cidr>, Error> {
    let parse = |t: &str| t.trim().parse().map_err(|e: windlass_net::Error| Error::Config { field, value: t.to_owned(), reason: e.to_string() });
    text.split(',').filter(|t| !t.trim().is_empty()).map(parse).collect()
}

async fn network(config: &Config, runtime: &dyn Runtime) -> Result<PodNetwork, Error> {
    let network = PodNetwork::new(windlass_net::pod::Config {
        instance: config.instance.clone(),
        pod_cidrs: cidrs("pod-cidr", &config.pod_cidr)?,
        cluster_cidrs: cidrs("cluster-cidr", &config.cluster_cidr)?,
        mtu: None,
        state_dir: config.root_dir.join("network"),
    })
    .await?;
    let live: HashSet<String> = runtime.list().await?.into_iter().filter(|c| c.is_sandbox() && c.running()).map(|c| c.pod_uid).collect();
    network.reconcile(&live).await?;
    Ok(network)
}

async fn assemble(config: &Config, role: &Role, runtime: Arc<dyn Runtime>, network: Arc<PodNetwork>) -> Result<Shared, Error> {
    let node_name = config.node_name();
    let client = role.client.clone();
    let info = runtime.info().await?;
    let table: Arc<Table> = Arc::default();
    let poke = {
        let table = table.clone();
        Arc::new(move |uid: &str| table.poke(uid))
    };
    let objects = Arc::new(Objects::new(client.clone(), role.shutdown.clone(), poke));
    let services = Informer::builder(Api::<ServiceView>::all(client.clone())).start(role.shutdown.clone());
    let node = Informer::builder(Api::<Node>::all(client.clone())).fields(&format!("metadata.name={node_name}")).start(role.shutdown.clone());
    let pods_dir: PathBuf = std::fs::canonicalize(config.root_dir.join("pods")).map_err(Error::file("resolve", config.root_dir.join("pods")))?;
    let volumes = Volumes { client: client.clone(), objects: objects.clone(), tokens: Arc::new(Tokens::new(client.clone())), pods_dir };
    metrics::NODE_NAME.with_label_values(&[&node_name]).set(1);
    metrics::CGROUP_VERSION.set(if crate::cgroup::version() == crate::cgroup::Version::V2 { 2 } else { 1 });
    let shared = Shared {
        recorder: Recorder::new(client.clone(), "kubelet", Some(node_name.clone()), role.shutdown.clone()),
        images: Images::new(runtime.clone(), config.max_parallel_image_pulls),
        machine: machine::detect(config)?,
        host_ips: RwLock::new(machine::addresses(config)?),
        pressure: RwLock::default(),
        host_dns: shared::host_dns(&config.resolv_conf),
        started: Timestamp::now(),
        shutdown: role.shutdown.clone(),
        pause: tokio::sync::OnceCell::new(),
        troubles: RwLock::default(),
        node_changed: tokio::sync::Notify::new(),
        config: config.clone(),
        node_name,
        client,
        runtime,
        info,
        network,
        services,
        node,
        objects,
        volumes,
        table,
    };
    Ok(shared)
}

async fn join_node(shared: Arc<Shared>, check: windlass_daemon::health::Check) {
    if shared.config.register_node && !registered(&shared).await {
        return;
    }
    check.ok();
    node::run(shared).await;
}

/// Registers the node, however often it takes; false if shut down before that.
async fn registered(shared: &Shared) -> bool {
    loop {
        match node::register(shared).await {
            Ok(()) => return true,
            Err(error) => tracing::warn!(%error, node = shared.node_name, "cannot register the node, will try again"),
        }
        tokio::select! {
            () = tokio::time::sleep(RETRY) => {}
            () = shared.shutdown.cancelled() => return false,
        }
    }
}

/// The informer of this node's pods, and the queue by which it tells of them.
fn follow_pods(shared: &Arc<Shared>, inbox: &mpsc::Sender<Input>) -> (Informer<Pod>, mpsc::UnboundedSender<Input>) {
    // The handler may not block, and nothing may be lost: the order is kept by one channel without a bound, whose
    // content is bounded by the pods of one node.
    let (sender, mut receiver) = mpsc::unbounded_channel();
    let forward = inbox.clone();
    tokio::spawn(async move {
        while let Some(input) = receiver.recv().await {
            if forward.send(input).await.is_err() {
                return;
            }
        }
    });
    let tell = sender.clone();
    let pods = Informer::builder(Api::<Pod>::all(shared.client.clone()))
        .fields(&format!("spec.nodeName={}", shared.node_name))
        .on_change(move |change| {
            let _ = tell.send(Input::Api(change.clone()));
        })
        .start(shared.shutdown.clone());
    (pods, sender)
}

fn node_cidrs(node: &Node) -> Vec<Cidr> {
    let spec = node.spec.clone().unwrap_or_default();
    let list = spec.pod_cidrs.filter(|l| !l.is_empty()).unwrap_or_else(|| spec.pod_cidr.into_iter().collect());
    list.iter().filter_map(|c| c.parse().ok()).collect()
}

/// The node object's pod CIDRs are the network's.
fn follow_cidrs(shared: &Arc<Shared>, network: &Arc<PodNetwork>) {
    if shared.config.pod_cidr.is_empty() {
        shared.trouble("network", Some("pod network is not ready: the node has no pod CIDR yet".into()));
    }
    let (sender, mut receiver) = tokio::sync::watch::channel(Vec::new());
    shared.node.on_change(move |change| {
        if let Some(node) = &change.new {
            sender.send_replace(node_cidrs(node));
        }
    });
    let (shared, network) = (shared.clone(), network.clone());
    tokio::spawn(async move {
        let mut known: Vec<Cidr> = Vec::new();
        while receiver.changed().await.is_ok() {
            let cidrs = receiver.borrow_and_update().clone();
            if cidrs.is_empty() || cidrs == known {
                continue;
            }
            match network.set_pod_cidrs(&cidrs).await {
                Ok(()) => {
                    known = cidrs;
                    shared.trouble("network", None);
                    shared.table.uids().iter().for_each(|uid| shared.table.poke(uid));
                }
                Err(error) => shared.trouble("network", Some(format!("pod network is not ready: {error}"))),
            }
        }
    });
}

/// Routes to the pods of other nodes follow the node objects.
fn follow_peers(shared: &Arc<Shared>, tasks: &TaskTracker) {
    let changed = Arc::new(tokio::sync::Notify::new());
    let notify = changed.clone();
    let peers = Informer::builder(Api::<PeerView>::all(shared.client.clone())).on_change(move |_| notify.notify_one()).start(shared.shutdown.clone());
    let shared = shared.clone();
    tasks.spawn(async move {
        let mut last: Vec<routes::Peer> = Vec::new();
        loop {
            tokio::select! {
                () = changed.notified() => {}
                () = shared.shutdown.cancelled() => return,
            }
            if !peers.has_synced() {
                peers.synced().await;
            }
            let wanted = peer_list(&shared, &peers.list());
            if wanted == last {
                continue;
            }
            match reconcile_routes(&shared, &wanted).await {
                Ok(()) => last = wanted,
                Err(error) => {
                    tracing::warn!(%error, "cannot set up the routes to other nodes, will try again");
                    tokio::time::sleep(RETRY).await;
                    changed.notify_one();
                }
            }
        }
    });
}

fn peer_list(shared: &Shared, nodes: &[Arc<PeerView>]) -> Vec<routes::Peer> {
    let mut list = Vec::new();
    for node in nodes {
        let name = node.metadata.name.clone().unwrap_or_default();
        let address = node.status.addresses.iter().find(|a| a.type_ == "InternalIP").and_then(|a| a.address.parse::<IpAddr>().ok());
        let spec = &node.spec;
        let texts: Vec<&String> = if spec.pod_cidrs.is_empty() { spec.pod_cidr.iter().collect() } else { spec.pod_cidrs.iter().collect() };
        let pod_cidrs: Vec<Cidr> = texts.iter().filter_map(|c| c.parse().ok()).collect();
        if let Some(address) = address.filter(|_| name != shared.node_name && !pod_cidrs.is_empty()) {
            list.push(routes::Peer { node: name, address, pod_cidrs });
        }
    }
    list
}

async fn reconcile_routes(shared: &Shared, peers: &[routes::Peer]) -> Result<(), Error> {
    let own = shared.node.get_in("", &shared.node_name).map(|n| node_cidrs(&n)).unwrap_or_default();
    let Some(address) = shared.host_ips.read().first().and_then(|ip| ip.parse().ok()) else { return Ok(()) };
    let config = routes::Config {
        instance: shared.config.instance.clone(),
        mode: shared.config.pod_routing,
        address,
        pod_cidrs: own,
        cluster_cidrs: cidrs("cluster-cidr", &shared.config.cluster_cidr)?,
        // The same on all nodes of a cluster, whatever their instances are called.
        vni: Some(routes::vni_of(&shared.config.cluster_cidr)),
        port: 8472,
    };
    Ok(routes::Routes::new(config)?.reconcile(peers).await?)
}
