//! What the API tells the scheduler: an informer per kind, each changing the picture of the cluster.

use std::sync::Arc;

use kube::Api;
use windlass_api::selector::LabelSelector;
use windlass_client::Role;
use windlass_client::informer::{Cached, Change, Informer, Key};

use crate::cluster::{Cluster, SelectorKind};
use crate::event::Events;
use crate::object::{
    BudgetView, ClaimView, CsiNodeView, NamespaceView, NodeView, PodView, ReplicaSetView, ReplicationControllerView, ServiceView, StatefulSetView,
    StorageClassView, VolumeObjectView,
};
use crate::pod::compile_selector;
use crate::state::Scheduler;

/// Starts all informers and returns when each has its initial list: before that, nothing may be decided.
pub async fn start(role: &Role, scheduler: &Arc<Scheduler>) {
    let node = scheduler.clone();
    let claim = scheduler.clone();
    let others = (
        watch(role, move |change: &Change<NodeView>| node.node_changed(change)),
        watch(role, move |change: &Change<ClaimView>| claim.claim_changed(change)),
        keep(role, scheduler, Events::NAMESPACE, |cluster, key, new: Option<&Arc<NamespaceView>>| match new {
            Some(namespace) => _ = cluster.namespaces.insert(key.name.clone(), namespace.metadata.labels.clone().unwrap_or_default()),
            None => _ = cluster.namespaces.remove(&key.name),
        }),
        keep(role, scheduler, Events::NONE, |cluster, key, new: Option<&Arc<BudgetView>>| set(&mut cluster.budgets, key.clone(), new)),
        keep(role, scheduler, Events::VOLUME, |cluster, key, new: Option<&Arc<VolumeObjectView>>| set(&mut cluster.volumes, key.name.clone(), new)),
        keep(role, scheduler, Events::STORAGE_CLASS, |cluster, key, new: Option<&Arc<StorageClassView>>| set(&mut cluster.classes, key.name.clone(), new)),
        keep(role, scheduler, Events::CSI_NODE, |cluster, key, new: Option<&Arc<CsiNodeView>>| set(&mut cluster.csi_nodes, key.name.clone(), new)),
    );
    let selectors = (
        keep(role, scheduler, Events::NONE, |cluster, key, new: Option<&Arc<ServiceView>>| {
            let selector = new.map(|service| LabelSelector::from_map(&serde_json::json!(service.spec.selector)));
            cluster.set_selector(SelectorKind::Service, key, selector);
        }),
        keep(role, scheduler, Events::NONE, |cluster, key, new: Option<&Arc<ReplicationControllerView>>| {
            let selector = new.map(|controller| LabelSelector::from_map(&serde_json::json!(controller.spec.selector)));
            cluster.set_selector(SelectorKind::ReplicationController, key, selector);
        }),
        keep(role, scheduler, Events::NONE, |cluster, key, new: Option<&Arc<ReplicaSetView>>| {
            let selector = new.and_then(|set| compile_selector(&set.spec.selector).ok());
            cluster.set_selector(SelectorKind::ReplicaSet, key, selector);
        }),
        keep(role, scheduler, Events::NONE, |cluster, key, new: Option<&Arc<StatefulSetView>>| {
            let selector = new.and_then(|set| compile_selector(&set.spec.selector).ok());
            cluster.set_selector(SelectorKind::StatefulSet, key, selector);
        }),
    );
    others.0.synced().await;
    others.1.synced().await;
    others.2.synced().await;
    others.3.synced().await;
    others.4.synced().await;
    others.5.synced().await;
    others.6.synced().await;
    selectors.0.synced().await;
    selectors.1.synced().await;
    selectors.2.synced().await;
    selectors.3.synced().await;
    // Pods come last: until all else is known, a pod that waits must not be decided about.
    let pod = scheduler.clone();
    watch(role, move |change: &Change<PodView>| pod.pod_changed(change)).synced().await;
}

fn watch<K>(role: &Role, handler: impl Fn(&Change<K>) + Send + Sync + 'static) -> Informer<K>
where
    K: Cached + kube::Resource<DynamicType = ()>,
{
    Informer::builder(Api::all(role.client.clone())).on_change(handler).start(role.shutdown.clone())
}

/// Keeps a part of the cluster's picture in step with a kind of object.
fn keep<K>(role: &Role, scheduler: &Arc<Scheduler>, event: Events, apply: fn(&mut Cluster, &Key, Option<&Arc<K>>)) -> Informer<K>
where
    K: Cached + kube::Resource<DynamicType = ()>,
{
    let scheduler = scheduler.clone();
    watch(role, move |change: &Change<K>| {
        let key = Key::of(&**change.object());
        scheduler.update(event, |cluster| apply(cluster, &key, change.new.as_ref()));
    })
}

fn set<K: std::hash::Hash + Eq, V>(map: &mut std::collections::HashMap<K, Arc<V>>, key: K, new: Option<&Arc<V>>) {
    match new {
        Some(value) => _ = map.insert(key, value.clone()),
        None => _ = map.remove(&key),
    }
}
