//! The `kubernetes` service: how the cluster's members reach the API servers from inside.
//!
//! Each API server that shares its store holds a lease (a key with a time to live); the endpoints are the holders.
//! A server that has its store to itself needs none: it is the only endpoint.

use crate::allocate::Allocators;
use crate::cluster::{Change, Cluster, Gr};
use bytes::Bytes;
use futures::StreamExt;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use windlass_api::{ApiError, meta};
use windlass_store::{Expect, Op, Range, Store, Txn};

const SERVICES: Gr = Gr("", "services");
const ENDPOINTS: Gr = Gr("", "endpoints");
const SLICES: Gr = Gr("discovery.k8s.io", "endpointslices");
const NETWORKS: Gr = Gr("networking.k8s.io", "servicecidrs");
const NAME: &str = "kubernetes";
const NAMESPACE: &str = "default";
/// Below it lie the leases of API servers, by address.
pub const LEASES: &str = "/windlass/apiservers/";
/// How long a server counts after its last sign of life, and how often it gives one.
const LEASE: Duration = Duration::from_secs(15);
const RENEW: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_secs(1);

/// The service at the first address of the network, and the object that describes the network.
pub async fn ensure(cluster: &dyn Cluster, allocators: &Allocators, port: u16) -> Result<(), ApiError> {
    let network = allocators.network;
    if super::find(cluster, NETWORKS, "", NAME).await?.is_none() {
        let object = json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "ServiceCIDR",
            "metadata": {"name": NAME},
            "spec": {"cidrs": [network.to_string()]},
        });
        super::tolerate_existing(cluster.create(NETWORKS, object).await)?;
        let now = meta::now_rfc3339(jiff::Timestamp::now());
        let mut ready = |object: &mut Value| {
            object["status"]["conditions"] = json!([{
                "type": "Ready", "status": "True", "reason": "", "lastTransitionTime": now,
                "message": "Kubernetes default Service CIDR is ready",
            }]);
            Ok(true)
        };
        cluster.update_status(NETWORKS, "", NAME, &mut ready).await?;
    }
    if super::find(cluster, SERVICES, NAMESPACE, NAME).await?.is_some() {
        return Ok(());
    }
    let address = network.first().to_string();
    let mut service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": NAME,
            "namespace": NAMESPACE,
            "labels": {"component": "apiserver", "provider": "kubernetes"},
        },
        "spec": {
            "type": "ClusterIP",
            "clusterIP": address,
            "clusterIPs": [address],
            "ipFamilies": ["IPv4"],
            "ipFamilyPolicy": "SingleStack",
            "internalTrafficPolicy": "Cluster",
            "sessionAffinity": "None",
            "ports": [{"name": "https", "port": 443, "protocol": "TCP", "targetPort": port}],
        },
    });
    let taken = allocators.create(&mut service, false).await;
    // Another server may be making the same service at this moment; then its address is taken already.
    let allocation = match taken {
        Ok(allocation) => allocation,
        Err(_) if super::find(cluster, SERVICES, NAMESPACE, NAME).await?.is_some() => return Ok(()),
        Err(error) => {
            tracing::warn!(%error, "the first service address is taken; the repair will sort it out");
            return super::tolerate_existing(cluster.create(SERVICES, service).await);
        }
    };
    match cluster.create(SERVICES, service).await {
        Ok(_) => {
            allocators.commit(allocation).await;
            Ok(())
        }
        Err(error) if error.reason == "AlreadyExists" => Ok(()),
        Err(error) => {
            allocators.revert(allocation).await;
            Err(error)
        }
    }
}

fn endpoints(addresses: &BTreeSet<IpAddr>, port: u16) -> Value {
    let listed: Vec<Value> = addresses.iter().map(|address| json!({"ip": address.to_string()})).collect();
    json!({
        "apiVersion": "v1",
        "kind": "Endpoints",
        "metadata": {
            "name": NAME,
            "namespace": NAMESPACE,
            "labels": {"endpointslice.kubernetes.io/skip-mirror": "true"},
        },
        "subsets": [{"addresses": listed, "ports": [{"name": "https", "port": port, "protocol": "TCP"}]}],
    })
}

fn slice(addresses: &BTreeSet<IpAddr>, port: u16) -> Value {
    let listed: Vec<Value> = addresses
        .iter()
        .map(|address| json!({"addresses": [address.to_string()], "conditions": {"ready": true}}))
        .collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": NAME, "namespace": NAMESPACE, "labels": {"kubernetes.io/service-name": NAME}},
        "addressType": "IPv4",
        "endpoints": listed,
        "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
    })
}

/// Creates the object, or sets those of its fields that matter here.
async fn put(cluster: &dyn Cluster, kind: Gr, wanted: &Value, fields: &[&str]) -> Result<(), ApiError> {
    let Some(stored) = super::find(cluster, kind, NAMESPACE, NAME).await? else {
        return super::tolerate_existing(cluster.create(kind, wanted.clone()).await);
    };
    let apply = |stored: &mut Value| {
        let mut changed = false;
        for field in fields.iter().filter(|field| stored[**field] != wanted[**field]).collect::<Vec<_>>() {
            stored[*field] = wanted[*field].clone();
            changed = true;
        }
        for (key, value) in wanted["metadata"]["labels"].as_object().into_iter().flatten() {
            if meta::label(stored, key) != value.as_str() {
                meta::set_label(stored, key, value.as_str().unwrap_or_default());
                changed = true;
            }
        }
        Ok(changed)
    };
    if apply(&mut stored.as_ref().clone())? {
        let mut change = apply;
        cluster.update(kind, NAMESPACE, NAME, &mut change).await?;
    }
    Ok(())
}

/// Keeps the endpoints of the `kubernetes` service.
pub struct Endpoints {
    pub cluster: Arc<dyn Cluster>,
    pub store: Arc<dyn Store>,
    /// This server's address, which is not a loopback address if others shall reach it.
    pub address: IpAddr,
    pub port: u16,
    /// No other server shares the store.
    pub alone: bool,
}

impl Endpoints {
    async fn servers(&self) -> Result<BTreeSet<IpAddr>, ApiError> {
        if self.alone {
            return Ok(BTreeSet::from([self.address]));
        }
        let range = Range { prefix: LEASES.to_owned(), start_after: None, limit: None, revision: None };
        let listed = self.store.range(range).await.map_err(ApiError::internal)?;
        let addresses = listed.entries.iter().filter_map(|entry| entry.key.strip_prefix(LEASES)?.parse().ok());
        Ok(addresses.chain([self.address]).collect())
    }

    /// Writes endpoints and slice as they should be now.
    pub async fn reconcile(&self) -> Result<(), ApiError> {
        let servers = self.servers().await?;
        let cluster = self.cluster.as_ref();
        put(cluster, ENDPOINTS, &endpoints(&servers, self.port), &["subsets"]).await?;
        put(cluster, SLICES, &slice(&servers, self.port), &["addressType", "endpoints", "ports"]).await
    }

    fn lease(&self, op: Op) -> Txn {
        Txn { key: format!("{LEASES}{}", self.address), expect: Expect::Any, op }
    }

    async fn renew(&self) {
        let op = Op::Put { value: Bytes::from_static(b"{}"), ttl: Some(LEASE) };
        if let Err(error) = self.store.txn(self.lease(op)).await {
            tracing::warn!(%error, "could not renew this API server's lease");
        }
    }

    /// Tells when leases come or go. Ends with an error that is worth a new attempt.
    async fn follow(&self, changed: &Notify) -> Result<(), windlass_store::Error> {
        let range = Range { prefix: LEASES.to_owned(), start_after: None, limit: Some(1), revision: None };
        let revision = self.store.range(range).await?.revision;
        let mut watch = self.store.watch(LEASES, revision).await?;
        changed.notify_one();
        while let Some(batch) = watch.next().await {
            if !batch?.events.is_empty() {
                changed.notify_one();
            }
        }
        Ok(())
    }

    async fn follow_for_ever(&self, changed: &Notify) {
        if self.alone {
            return std::future::pending().await;
        }
        loop {
            if let Err(error) = self.follow(changed).await {
                tracing::warn!(%error, "following the API servers' leases; starting again");
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn renew_for_ever(&self) {
        if self.alone {
            return std::future::pending().await;
        }
        loop {
            self.renew().await;
            tokio::time::sleep(RENEW).await;
        }
    }

    async fn reconcile_for_ever(&self, changed: &Notify) {
        loop {
            changed.notified().await;
            if let Err(error) = self.reconcile().await {
                tracing::warn!(%error, "endpoints of the kubernetes service; trying again");
                tokio::time::sleep(RETRY).await;
                changed.notify_one();
            }
        }
    }

    /// Keeps the endpoints until shut down, then takes this server out of them (if others remain).
    pub async fn run(self, shutdown: CancellationToken) {
        let changed = Arc::new(Notify::new());
        for kind in [ENDPOINTS, SLICES] {
            let changed = changed.clone();
            // Only the object's name is read.
            let on_change = move |change: &Change<'_>| {
                let bytes = change.new.or(change.old).unwrap_or_default();
                let ours = serde_json::from_slice::<Named>(bytes).is_ok_and(|named| {
                    named.metadata.name == NAME && named.metadata.namespace == NAMESPACE
                });
                if ours {
                    changed.notify_one();
                }
            };
            self.cluster.on_change(kind, Arc::new(on_change));
        }
        changed.notify_one();
        tokio::select! {
            () = self.renew_for_ever() => {}
            () = self.follow_for_ever(&changed) => {}
            () = self.reconcile_for_ever(&changed) => {}
            () = shutdown.cancelled() => {}
        }
        if !self.alone {
            if let Err(error) = self.store.txn(self.lease(Op::Delete)).await {
                tracing::warn!(%error, "could not give up this API server's lease; it ends by itself");
            }
        }
    }
}

#[derive(serde::Deserialize)]
struct Named {
    metadata: NamedMeta,
}

#[derive(serde::Deserialize)]
struct NamedMeta {
    name: String,
    #[serde(default)]
    namespace: String,
}
