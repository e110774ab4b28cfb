//! ConfigMaps and Secrets that pods of this node refer to, each watched on its own.
//!
//! A node may read only what its pods name, so there is one watch per object, shared by the pods that use it and ended
//! with the last of them. A change pokes those pods.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{Api, Client};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use windlass_client::informer::{Cached, Informer};

/// How long a first read may take before the pod's sync fails and is tried again.
const SYNC_TIMEOUT: Duration = Duration::from_secs(10);

type Key = (String, String);
type Poke = Arc<dyn Fn(&str) + Send + Sync>;

struct Watched<K: Cached> {
    informer: Informer<K>,
    stop: CancellationToken,
    users: Arc<Mutex<HashSet<String>>>,
}

struct Kind<K: Cached> {
    name: &'static str,
    watched: Mutex<HashMap<Key, Watched<K>>>,
}

/// The watches.
pub struct Objects {
    client: Client,
    shutdown: CancellationToken,
    poke: Poke,
    config_maps: Kind<ConfigMap>,
    secrets: Kind<Secret>,
}

impl Objects {
    /// `poke` is called with the uid of each pod that uses a changed object.
    pub fn new(client: Client, shutdown: CancellationToken, poke: Poke) -> Self {
        Self {
            client,
            shutdown,
            poke,
            config_maps: Kind { name: "configmap", watched: Mutex::default() },
            secrets: Kind { name: "secret", watched: Mutex::default() },
        }
    }

    /// The ConfigMap, on behalf of a pod; `None` when it does not exist.
    pub async fn config_map(&self, pod_uid: &str, namespace: &str, name: &str) -> Result<Option<Arc<ConfigMap>>, String> {
        self.get(&self.config_maps, pod_uid, namespace, name).await
    }

    pub async fn secret(&self, pod_uid: &str, namespace: &str, name: &str) -> Result<Option<Arc<Secret>>, String> {
        self.get(&self.secrets, pod_uid, namespace, name).await
    }

    async fn get<K>(&self, kind: &Kind<K>, pod_uid: &str, namespace: &str, name: &str) -> Result<Option<Arc<K>>, String>
    where
        K: Cached + kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        let informer = self.informer(kind, pod_uid, namespace, name);
        if tokio::time::timeout(SYNC_TIMEOUT, informer.synced()).await.is_err() {
            return Err(format!("failed to sync {} cache: timed out waiting for the condition", kind.name));
        }
        Ok(informer.get_in(namespace, name))
    }

    fn informer<K>(&self, kind: &Kind<K>, pod_uid: &str, namespace: &str, name: &str) -> Informer<K>
    where
        K: Cached + kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        let mut watched = kind.watched.lock();
        let entry = watched.entry((namespace.to_owned(), name.to_owned())).or_insert_with(|| {
            let users: Arc<Mutex<HashSet<String>>> = Arc::default();
            let stop = self.shutdown.child_token();
            let (poke, told) = (self.poke.clone(), users.clone());
            let api: Api<K> = Api::namespaced(self.client.clone(), namespace);
            let informer = Informer::builder(api)
                .fields(&format!("metadata.name={name}"))
                .on_change(move |_| {
                    let users: Vec<String> = told.lock().iter().cloned().collect();
                    users.iter().for_each(|uid| poke(uid));
                })
                .start(stop.clone());
            Watched { informer, stop, users }
        });
        entry.users.lock().insert(pod_uid.to_owned());
        entry.informer.clone()
    }

    /// The pod needs nothing any more.
    pub fn release(&self, pod_uid: &str) {
        release(&self.config_maps, pod_uid);
        release(&self.secrets, pod_uid);
    }
}

fn release<K: Cached>(kind: &Kind<K>, pod_uid: &str) {
    kind.watched.lock().retain(|_, watched| {
        let mut users = watched.users.lock();
        if users.remove(pod_uid) && users.is_empty() {
            watched.stop.cancel();
            return false;
        }
        true
    });
}
