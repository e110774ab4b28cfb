//! What every controller is given: the API, the shared caches, events, configuration.

use std::{
    future::Future,
    hash::Hash,
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures::future::BoxFuture;
use k8s_openapi::api::{
    apps::v1::{ControllerRevision, DaemonSet, Deployment, ReplicaSet, StatefulSet},
    autoscaling::v2::HorizontalPodAutoscaler,
    batch::v1::{CronJob, Job},
    certificates::v1::CertificateSigningRequest,
    coordination::v1::Lease,
    core::v1::{
        ConfigMap, Endpoints, Namespace, Node, PersistentVolume, PersistentVolumeClaim, ReplicationController, ResourceQuota,
        Secret, Service, ServiceAccount,
    },
    discovery::v1::EndpointSlice,
    policy::v1::PodDisruptionBudget,
    rbac::v1::ClusterRole,
    storage::v1::StorageClass,
};
use kube::{Api, Client};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use windlass_client::{
    events::Recorder,
    informer::{Builder, Cached, Informer},
    queue::{self, Action, Queue},
};

use crate::{Error, config::Config, pod::PodView, write::ApiErrorExt};

/// How long a lost race is given to reach the cache.
const AFTER_CONFLICT: Duration = Duration::from_millis(30);

/// A controller's whole life, from the first sync of its caches to shutdown.
pub type Worker = BoxFuture<'static, ()>;

/// One row of the table of controllers.
#[derive(Clone, Copy, Debug)]
pub struct Controller {
    /// Upstream's name, as `--controllers` takes it.
    pub name: &'static str,
    /// Builds the controller: subscribes to its caches and returns its work, which starts once they are filled.
    pub start: fn(&Context) -> Worker,
    pub on_by_default: bool,
}

struct Cell<K: Cached>(OnceLock<Informer<K>>);

impl<K: Cached> Default for Cell<K> {
    fn default() -> Self {
        Cell(OnceLock::new())
    }
}

macro_rules! factory {
    ($($field:ident: $kind:ty $(, namespace $ns:literal)? $(, fields $fields:literal)? $(, index $index:literal $values:expr)*;)*) => {
        /// One cache per resource, started when the first controller asks and shared by all.
        #[derive(Default)]
        pub struct Informers { $($field: Cell<$kind>,)* }

        impl Context {
            $(
                #[doc = concat!("The shared cache of `", stringify!($kind), "`; this controller's work waits until it is filled.")]
                pub fn $field(&self) -> Informer<$kind> {
                    self.shared(&self.informers.$field, |client| {
                        let api: Option<Api<$kind>> = None$(.or(Some(Api::namespaced(client.clone(), $ns))))?;
                        Informer::builder(api.unwrap_or_else(|| Api::all(client)))$(.fields($fields))?$(.index($index, $values))*
                    })
                }
            )*
        }
    };
}

factory! {
    pods: PodView,
        index "node" |pod: &PodView| pod.spec.node_name.iter().filter(|name| !name.is_empty()).cloned().collect(),
        index "owner" |pod: &PodView| vec![crate::owner::controller(&pod.metadata).map(|owner| owner.uid.clone()).unwrap_or_default()],
        index "claim" |pod: &PodView| crate::pod::claims(pod);
    nodes: Node;
    namespaces: Namespace;
    services: Service;
    endpoints: Endpoints;
    endpoint_slices: EndpointSlice,
        index "service" |slice: &EndpointSlice| crate::endpointslice::service_of(slice).into_iter().collect();
    replica_sets: ReplicaSet,
        index "owner" |set: &ReplicaSet| crate::owner::controller(&set.metadata).map(|owner| owner.uid.clone()).into_iter().collect();
    deployments: Deployment;
    replication_controllers: ReplicationController;
    stateful_sets: StatefulSet;
    daemon_sets: DaemonSet;
    controller_revisions: ControllerRevision,
        index "owner" |revision: &ControllerRevision| crate::owner::controller(&revision.metadata).map(|owner| owner.uid.clone()).into_iter().collect();
    jobs: Job,
        index "owner" |job: &Job| crate::owner::controller(&job.metadata).map(|owner| owner.uid.clone()).into_iter().collect();
    cron_jobs: CronJob;
    service_accounts: ServiceAccount;
    cluster_info: ConfigMap, namespace "kube-public", fields "metadata.name=cluster-info";
    root_ca_maps: ConfigMap, fields "metadata.name=kube-root-ca.crt";
    bootstrap_tokens: Secret, namespace "kube-system", fields "type=bootstrap.kubernetes.io/token";
    token_secrets: Secret, fields "type=kubernetes.io/service-account-token";
    leases: Lease, namespace "kube-node-lease";
    resource_quotas: ResourceQuota;
    disruption_budgets: PodDisruptionBudget;
    volumes: PersistentVolume;
    claims: PersistentVolumeClaim;
    storage_classes: StorageClass;
    signing_requests: CertificateSigningRequest;
    cluster_roles: ClusterRole;
    autoscalers: HorizontalPodAutoscaler;
}

type Listener = Box<dyn Fn(&str) + Send + Sync>;
type Synced = Box<dyn FnOnce() -> BoxFuture<'static, ()> + Send>;

/// What a controller is given. Each has its own, so that it waits for its own caches only.
pub struct Context {
    pub client: Client,
    pub config: Arc<Config>,
    pub shutdown: CancellationToken,
    informers: Arc<Informers>,
    /// Called with the namespace of every object of any kind that comes or goes, as the garbage collector's watches see it.
    listeners: Arc<Mutex<Vec<Listener>>>,
    needs: Mutex<Vec<Synced>>,
}

impl Context {
    /// A context for the first controller; `fork` it for each further one.
    pub fn new(client: Client, config: Arc<Config>, shutdown: CancellationToken) -> Self {
        Context { client, config, shutdown, informers: Arc::default(), listeners: Arc::default(), needs: Mutex::default() }
    }

    /// A context that shares the caches and has no needs yet.
    pub fn fork(&self) -> Self {
        Context {
            client: self.client.clone(),
            config: self.config.clone(),
            shutdown: self.shutdown.clone(),
            informers: self.informers.clone(),
            listeners: self.listeners.clone(),
            needs: Mutex::default(),
        }
    }

    fn shared<K: Cached>(&self, cell: &Cell<K>, build: impl FnOnce(Client) -> Builder<K>) -> Informer<K> {
        let informer = cell.0.get_or_init(|| build(self.client.clone()).start(self.shutdown.clone())).clone();
        let waited = informer.clone();
        self.needs.lock().push(Box::new(move || Box::pin(async move { waited.synced().await })));
        informer
    }

    /// Calls `listener` with the namespace of whatever comes or goes ("" for cluster-scoped objects). It must not block.
    pub fn on_objects(&self, listener: impl Fn(&str) + Send + Sync + 'static) {
        self.listeners.lock().push(Box::new(listener));
    }

    /// How the garbage collector tells the listeners.
    pub fn announcer(&self) -> impl Fn(&str) + Send + Sync + 'static {
        let listeners = self.listeners.clone();
        move |namespace| listeners.lock().iter().for_each(|listener| listener(namespace))
    }

    /// Returns once every cache that was asked for through this context is filled; false at shutdown.
    pub async fn synced(&self) -> bool {
        let needs = std::mem::take(&mut *self.needs.lock());
        let all = async {
            for need in needs {
                need().await;
            }
        };
        tokio::select! { () = all => true, () = self.shutdown.cancelled() => false }
    }

    /// An event recorder under upstream's component name.
    pub fn recorder(&self, component: &'static str) -> Recorder {
        Recorder::new(self.client.clone(), component, None, self.shutdown.clone())
    }

    /// The usual worker: `state.work(key)` for each key of the queue.
    pub fn worker<S, T, F, Fut>(&self, queue: Queue<T>, workers: usize, state: Arc<S>, work: F) -> Worker
    where
        S: Send + Sync + 'static,
        T: Clone + Eq + Hash + std::fmt::Display + Send + Sync + 'static,
        F: Fn(Arc<S>, T) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Action, Error>> + Send + 'static,
    {
        Box::pin(queue::run(queue, workers, self.shutdown.clone(), move |key| {
            let work = work(state.clone(), key);
            async move {
                match work.await {
                    // Somebody else wrote first. That is no fault: the cache will show it in a moment.
                    Err(error) if error.is_conflict() => {
                        tracing::debug!(%error, "lost a race; once more");
                        Ok(Action::RequeueAfter(AFTER_CONFLICT))
                    }
                    result => result,
                }
            }
        }))
    }
}

/// The next step of a key: at once when nothing is left to wait for, else at the deadline.
pub fn after(delay: Option<Duration>) -> Action {
    delay.map_or(Action::Done, Action::RequeueAfter)
}
