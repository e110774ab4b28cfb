//! What all parts of the kubelet share.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, ObjectReference, Pod, PodStatus};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::Client;
use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;
use windlass_client::events::{EventType, Recorder, reference};
use windlass_client::informer::Informer;
use windlass_net::hostport::{HostPort, Protocol};

use crate::config::Config;
use crate::images::Images;
use crate::manager::Table;
use crate::objects::Objects;
use crate::pod::build::Settings;
use crate::pod::env::{self, ServiceFacts};
use crate::pod::model::{self, Kind};
use crate::pod::names::Dns;
use crate::pod::resources;
use crate::runtime::{Container, Runtime, RuntimeInfo};
use crate::volumes::Volumes;

windlass_client::projection! {
    /// What environment variables need of a service.
    pub struct ServiceView: k8s_openapi::api::core::v1::Service {
        pub spec: ServiceSpecView,
    }
}

#[derive(Clone, Debug, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceSpecView {
    #[serde(default, rename = "clusterIP")]
    pub cluster_ip: Option<String>,
    #[serde(default)]
    pub ports: Vec<ServicePortView>,
}

#[derive(Clone, Debug, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServicePortView {
    #[serde(default)]
    pub name: Option<String>,
    pub port: i32,
    #[serde(default)]
    pub protocol: Option<String>,
}

/// The pod network, as far as the kubelet needs it.
#[async_trait]
pub trait Network: Send + Sync {
    /// Wires a pod that has a namespace of its own; the addresses, the first is `status.podIP`.
    async fn attach(&self, pod: &Pod, netns: PathBuf) -> Result<Vec<String>, String>;
    async fn detach(&self, pod_uid: &str) -> Result<(), String>;
    /// The addresses that a wired pod has.
    fn addresses(&self, pod_uid: &str) -> Vec<String>;
}

#[async_trait]
impl Network for windlass_net::pod::PodNetwork {
    async fn attach(&self, pod: &Pod, netns: PathBuf) -> Result<Vec<String>, String> {
        let attach = windlass_net::pod::Attach {
            pod_uid: model::uid(pod).to_owned(),
            namespace: model::namespace(pod).to_owned(),
            name: model::name(pod).to_owned(),
            netns,
            host_ports: host_ports(pod)?,
        };
        let wired = Self::attach(self, &attach).await.map_err(|e| e.to_string())?;
        Ok(wired.ips.iter().map(IpAddr::to_string).collect())
    }
    async fn detach(&self, pod_uid: &str) -> Result<(), String> {
        Self::detach(self, pod_uid).await.map_err(|e| e.to_string())
    }
    fn addresses(&self, pod_uid: &str) -> Vec<String> {
        self.addresses_of(pod_uid).map(|a| a.ips.iter().map(IpAddr::to_string).collect()).unwrap_or_default()
    }
}

fn host_ports(pod: &Pod) -> Result<Vec<HostPort>, String> {
    let ports = model::init_containers(pod).iter().filter(|c| model::is_sidecar(c)).chain(model::containers(pod)).flat_map(|c| c.ports.iter().flatten());
    let mut list = Vec::new();
    for port in ports.filter(|p| p.host_port.is_some_and(|h| h > 0)) {
        let number = |n: i32| u16::try_from(n).map_err(|_| format!("port {n} is out of range"));
        let protocol = port.protocol.as_deref().unwrap_or("");
        list.push(HostPort {
            host_ip: match port.host_ip.as_deref().filter(|ip| !ip.is_empty()) {
                Some(ip) => Some(ip.parse().map_err(|_| format!("hostIP {ip:?} is not an address"))?),
                None => None,
            },
            host_port: number(port.host_port.unwrap_or(0))?,
            container_port: number(port.container_port)?,
            protocol: Protocol::parse(protocol).ok_or_else(|| format!("protocol {protocol:?} is not known"))?,
        });
    }
    Ok(list)
}

/// What others may see of a pod: written by its actor, read by the server and the node's accounting.
#[derive(Clone, Debug)]
pub struct View {
    pub pod: Arc<Pod>,
    pub status: PodStatus,
    /// All containers, sandboxes included, newest first.
    pub containers: Vec<Container>,
    /// Nothing of it runs any more and nothing will.
    pub terminated: bool,
    /// Rejected at admission: it takes no resources.
    pub rejected: bool,
}

impl View {
    pub fn sandbox(&self) -> Option<&Container> {
        self.containers.iter().find(|c| c.is_sandbox() && c.running())
    }
}

/// Pressure on the node, as its conditions and admission show it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    pub memory: bool,
    pub disk: bool,
    pub pid: bool,
}

/// What the machine has.
#[derive(Clone, Debug, Default)]
pub struct Machine {
    pub milli_cpu: i64,
    pub memory: i64,
    pub ephemeral_storage: i64,
    /// Reserved for what is not a pod: milli-CPU, bytes, bytes.
    pub reserved: (i64, i64, i64),
    pub machine_id: String,
    pub system_uuid: String,
    pub boot_id: String,
    pub os_image: String,
    pub kernel: String,
    /// The lowest OOM score adjustment that processes here may have: where the kernel lets us not go below our own, we do not ask.
    pub oom_floor: i64,
}

impl Machine {
    pub fn allocatable(&self) -> (i64, i64, i64) {
        let rest = |all: i64, reserved: i64| (all - reserved).max(0);
        (rest(self.milli_cpu, self.reserved.0), rest(self.memory, self.reserved.1), rest(self.ephemeral_storage, self.reserved.2))
    }
}

pub struct Shared {
    pub config: Config,
    pub node_name: String,
    pub client: Client,
    pub runtime: Arc<dyn Runtime>,
    pub info: RuntimeInfo,
    pub network: Arc<dyn Network>,
    pub recorder: Recorder,
    pub services: Informer<ServiceView>,
    pub node: Informer<Node>,
    pub objects: Arc<Objects>,
    pub images: Images,
    pub volumes: Volumes,
    pub table: Arc<Table>,
    pub machine: Machine,
    pub host_ips: RwLock<Vec<String>>,
    pub pressure: RwLock<Pressure>,
    pub host_dns: Dns,
    pub started: Timestamp,
    pub shutdown: CancellationToken,
    /// Name of the infra image, loaded on first use.
    pub pause: tokio::sync::OnceCell<String>,
    /// Why the node cannot run pods, by part (`runtime`, `network`); empty when it can.
    pub troubles: RwLock<BTreeMap<&'static str, String>>,
    /// Wakes the node's status loop.
    pub node_changed: tokio::sync::Notify,
}

impl Shared {
    /// Container settings for this pod.
    pub fn settings(&self, pod: &Pod) -> Settings {
        Settings {
            cgroup_parent: self.cgroup_parent(pod),
            node_memory: self.machine.memory,
            oom_floor: self.machine.oom_floor,
            pids_limit: self.config.pod_pids_limit,
            seccomp_default: self.config.seccomp_default,
            seccomp_dir: self.config.root_dir.join("seccomp"),
            log_max_size: self.config.container_log_max_size,
            log_max_files: self.config.container_log_max_files,
            apparmor: self.info.apparmor,
            selinux: self.info.selinux,
            handler: None,
        }
    }

    /// As [`Self::settings`], with the OCI runtime that the pod's RuntimeClass names.
    ///
    /// # Errors
    /// When the class does not exist or the runtime has no such handler.
    pub async fn settings_with_handler(&self, pod: &Pod) -> Result<Settings, String> {
        let mut settings = self.settings(pod);
        if let Some(name) = model::spec(pod).runtime_class_name.as_deref().filter(|n| !n.is_empty()) {
            let classes: kube::Api<RuntimeClass> = kube::Api::all(self.client.clone());
            let class = classes.get_opt(name).await.map_err(|e| e.to_string())?;
            let class = class.ok_or_else(|| format!("failed to get sandbox runtime: RuntimeClass \"{name}\" not found"))?;
            if !class.handler.is_empty() {
                if !self.info.handlers.contains(&class.handler) {
                    return Err(format!("failed to get sandbox runtime: no runtime for \"{}\" is configured", class.handler));
                }
                settings.handler = Some(class.handler);
            }
        }
        Ok(settings)
    }

    pub fn cgroup_parent(&self, pod: &Pod) -> String {
        resources::cgroup_parent(&self.info.cgroup_driver, &self.config.instance, model::qos_class(pod), model::uid(pod))
    }

    pub fn env_runtime(&self, pod_ips: &[String]) -> env::Runtime {
        env::Runtime {
            node_name: self.node_name.clone(),
            host_ips: self.host_ips.read().clone(),
            pod_ips: pod_ips.to_vec(),
            allocatable: self.machine.allocatable(),
        }
    }

    /// Service variables for a pod: `kubernetes` always, those of its own namespace if it wants them.
    pub fn service_variables(&self, pod: &Pod) -> BTreeMap<String, String> {
        let all = model::spec(pod).enable_service_links != Some(false);
        let facts = |s: &ServiceView| ServiceFacts {
            name: s.metadata.name.clone().unwrap_or_default(),
            cluster_ip: s.spec.cluster_ip.clone().unwrap_or_default(),
            ports: s.spec.ports.iter().map(|p| (p.name.clone().unwrap_or_default(), p.port, p.protocol.clone().unwrap_or_default())).collect(),
        };
        let has_address = |s: &ServiceFacts| !matches!(s.cluster_ip.as_str(), "" | "None");
        let mut services: HashMap<String, ServiceFacts> = HashMap::new();
        if let Some(service) = self.services.get_in("default", "kubernetes") {
            services.insert("kubernetes".into(), facts(&service));
        }
        if all {
            let own = self.services.namespace(model::namespace(pod));
            services.extend(own.iter().map(|s| facts(s)).map(|s| (s.name.clone(), s)));
        }
        let list: Vec<ServiceFacts> = services.into_values().filter(has_address).collect();
        env::service_variables(&list)
    }

    /// Records an event about a pod, or about one of its containers.
    pub fn event(&self, pod: &Pod, container: Option<&str>, event_type: EventType, reason: &str, message: impl Into<String>) {
        self.recorder.event(&self.reference(pod, container), event_type, reason, message.into());
    }

    pub fn node_event(&self, event_type: EventType, reason: &str, message: impl Into<String>) {
        let about = ObjectReference { kind: Some("Node".into()), name: Some(self.node_name.clone()), uid: Some(self.node_name.clone()), ..Default::default() };
        self.recorder.event(&about, event_type, reason, message.into());
    }

    fn reference(&self, pod: &Pod, container: Option<&str>) -> ObjectReference {
        let mut about = reference(pod);
        if let Some(name) = container {
            let list = match model::find(pod, name).map(|(kind, _)| kind) {
                Some(Kind::Init | Kind::Sidecar) => "spec.initContainers",
                Some(Kind::Ephemeral) => "spec.ephemeralContainers",
                _ => "spec.containers",
            };
            about.field_path = Some(format!("{list}{{{name}}}"));
        }
        about
    }

    /// Notes that a part of the node works (`None`) or why it does not; the node's Ready condition follows.
    pub fn trouble(&self, part: &'static str, why: Option<String>) {
        let mut troubles = self.troubles.write();
        let before = troubles.get(part).cloned();
        if before != why {
            match why {
                Some(why) => troubles.insert(part, why),
                None => troubles.remove(part),
            };
            self.node_changed.notify_one();
        }
    }

    pub fn pod_dir(&self, uid: &str) -> PathBuf {
        self.volumes.pod_dir(uid)
    }

    /// The infra image's name, after making sure that the runtime has it.
    pub async fn pause_image(&self) -> Result<String, crate::runtime::Error> {
        let name = windlass_net::pause::image_name();
        let loaded = self
            .pause
            .get_or_try_init(|| async {
                if self.runtime.image(&name).await?.is_none() {
                    self.runtime.load_image(windlass_net::pause::image_tar().into()).await?;
                }
                Ok::<_, crate::runtime::Error>(name.clone())
            })
            .await?;
        Ok(loaded.clone())
    }

    /// Loads the infra image again, after somebody removed it.
    pub async fn reload_pause_image(&self) -> Result<(), crate::runtime::Error> {
        self.runtime.load_image(windlass_net::pause::image_tar().into()).await
    }
}

/// Reads the host's resolver configuration.
pub fn host_dns(path: &str) -> Dns {
    if path.is_empty() {
        return Dns::default();
    }
    // systemd-resolved's stub is of no use inside a pod: its upstreams are listed beside it.
    let real = Path::new("/run/systemd/resolve/resolv.conf");
    let stub = std::fs::read_link(path).is_ok_and(|to| to.ends_with("stub-resolv.conf"));
    let text = if stub && real.exists() { std::fs::read_to_string(real) } else { std::fs::read_to_string(path) };
    match text {
        Ok(text) => Dns::parse(&text),
        Err(error) => {
            tracing::warn!(path, %error, "cannot read the resolver configuration; pods that use the node's get none");
            Dns::default()
        }
    }
}
