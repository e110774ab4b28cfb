//! What every namespace gets: the `default` service account and the CA by which pods know the API server.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{ConfigMap, Namespace, ServiceAccount};
use serde_json::{Value, json};
use windlass_client::{
    informer::{Informer, Key},
    queue::{Action, Queue},
};

use crate::{
    Error,
    config::Config,
    context::{Context, Worker},
    write::{self, ApiErrorExt},
};

const ACCOUNT: &str = "default";
const CA_MAP: &str = "kube-root-ca.crt";

fn is_active(namespace: &Namespace) -> bool {
    let phase = namespace.status.as_ref().and_then(|status| status.phase.as_deref());
    namespace.metadata.deletion_timestamp.is_none() && phase != Some("Terminating")
}

struct Accounts {
    client: kube::Client,
    namespaces: Informer<Namespace>,
    accounts: Informer<ServiceAccount>,
}

impl Accounts {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let wanted = self.namespaces.get(&key).is_some_and(|namespace| is_active(&namespace));
        if !wanted || self.accounts.get_in(&key.name, ACCOUNT).is_some() {
            return Ok(Action::Done);
        }
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT, "namespace": key.name}});
        let created: Result<Value, Error> = write::create(&self.client, &write::collection_path::<ServiceAccount>(&key.name), &account).await;
        match created {
            Ok(_) => {}
            Err(error) if error.is_already_exists() || error.is_namespace_terminating() || error.is_not_found() => {}
            Err(error) => return Err(error),
        }
        Ok(Action::Done)
    }
}

/// The `serviceaccount-controller`.
pub fn start_accounts(context: &Context) -> Worker {
    let queue = Queue::new("serviceaccount");
    let (namespaces, accounts) = (context.namespaces(), context.service_accounts());
    {
        let queue = queue.clone();
        namespaces.on_change(move |change| queue.add(Key::of(&**change.object())));
    }
    {
        let queue = queue.clone();
        accounts.on_change(move |change| {
            let key = Key::of(&**change.object());
            if change.is_delete() && key.name == ACCOUNT {
                queue.add(Key::cluster(key.ns()));
            }
        });
    }
    let state = Arc::new(Accounts { client: context.client.clone(), namespaces, accounts });
    context.worker(queue, 1, state, Accounts::sync)
}

struct RootCa {
    client: kube::Client,
    pem: String,
    namespaces: Informer<Namespace>,
    maps: Informer<ConfigMap>,
}

impl RootCa {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        if !self.namespaces.get(&key).is_some_and(|namespace| is_active(&namespace)) {
            return Ok(Action::Done);
        }
        let data = json!({"ca.crt": self.pem});
        let current = self.maps.get_in(&key.name, CA_MAP);
        let result: Result<Value, Error> = match current {
            Some(map) if serde_json::to_value(&map.data).unwrap_or_default() == data => return Ok(Action::Done),
            Some(map) => {
                let mut map = (*map).clone();
                map.data = Some([("ca.crt".to_owned(), self.pem.clone())].into());
                map.binary_data = None;
                write::replace(&self.client, &write::path(&map), &write::wire(&map)).await
            }
            None => {
                let description = "The CA by which pods verify the API server at its address inside the cluster.";
                let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "data": data,
                    "metadata": {"name": CA_MAP, "namespace": key.name, "annotations": {"kubernetes.io/description": description}}});
                write::create(&self.client, &write::collection_path::<ConfigMap>(&key.name), &map).await
            }
        };
        match result {
            Ok(_) => {}
            Err(error) if error.is_already_exists() || error.is_namespace_terminating() || error.is_not_found() => {}
            Err(error) => return Err(error),
        }
        Ok(Action::Done)
    }
}

/// The CA by which pods know the API server, as PEM; empty if none is configured.
pub fn root_ca(config: &Config) -> String {
    match (&config.root_ca_pem, config.root_ca_file.as_str()) {
        (Some(pem), _) => pem.clone(),
        (None, "") => String::new(),
        (None, file) => std::fs::read_to_string(file).unwrap_or_else(|error| {
            tracing::error!(file, %error, "cannot read --root-ca-file");
            String::new()
        }),
    }
}

/// The `root-ca-certificate-publisher-controller`.
pub fn start_root_ca(context: &Context) -> Worker {
    let pem = root_ca(&context.config);
    if pem.is_empty() {
        tracing::warn!("no --root-ca-file: kube-root-ca.crt is not published, and pods cannot verify the API server");
        return Box::pin(std::future::ready(()));
    }
    let queue = Queue::new("root_ca_cert_publisher");
    let (namespaces, maps) = (context.namespaces(), context.root_ca_maps());
    {
        let queue = queue.clone();
        namespaces.on_change(move |change| queue.add(Key::of(&**change.object())));
    }
    {
        let queue = queue.clone();
        // Only what somebody else did to a map is of interest: deletion and change.
        maps.on_change(move |change| {
            if change.old.is_some() {
                queue.add(Key::cluster(Key::of(&**change.object()).ns()));
            }
        });
    }
    let state = Arc::new(RootCa { client: context.client.clone(), pem, namespaces, maps });
    context.worker(queue, 1, state, RootCa::sync)
}
