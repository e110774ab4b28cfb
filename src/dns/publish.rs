//! The service by which pods reach this DNS: `kube-system/kube-dns`, and this instance's EndpointSlice behind it.
//!
//! The role listens on the node at any port; pods ask the service's address at port 53. Both objects are applied with
//! server-side apply, so that a second DNS adds its own slice and labels of others stay.

use std::net::SocketAddr;

use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use windlass_client::{Api, Client};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;

/// The namespace and the name that the rest of the world expects.
pub const NAMESPACE: &str = "kube-system";
pub const SERVICE: &str = "kube-dns";
const MANAGER: &str = "windlass-dns";

/// The service, with the cluster's DNS address and no selector.
pub fn service(address: std::net::IpAddr) -> Value {
    let family = if address.is_ipv4() { "IPv4" } else { "IPv6" };
    let port = |name: &str, protocol: &str| json!({"name": name, "port": 53, "targetPort": 53, "protocol": protocol});
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": SERVICE,
            "namespace": NAMESPACE,
            "labels": {"k8s-app": "kube-dns", "kubernetes.io/cluster-service": "true", "kubernetes.io/name": "CoreDNS"},
        },
        "spec": {
            "type": "ClusterIP",
            "clusterIP": address,
            "clusterIPs": [address],
            "ipFamilies": [family],
            "ipFamilyPolicy": "SingleStack",
            "ports": [port("dns", "UDP"), port("dns-tcp", "TCP")],
        },
    })
}

/// The slice of the instance that listens at `listen` on `node`.
pub fn slice(node: &str, listen: SocketAddr, ready: bool) -> Value {
    let kind = if listen.is_ipv4() { "IPv4" } else { "IPv6" };
    let port = |name: &str, protocol: &str| json!({"name": name, "port": listen.port(), "protocol": protocol});
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": slice_name(node),
            "namespace": NAMESPACE,
            "labels": {
                "kubernetes.io/service-name": SERVICE,
                "endpointslice.kubernetes.io/managed-by": "dns.windlass.dev",
            },
        },
        "addressType": kind,
        "endpoints": [{
            "addresses": [listen.ip()],
            "conditions": {"ready": ready, "serving": ready, "terminating": false},
            "nodeName": node,
        }],
        "ports": [port("dns", "UDP"), port("dns-tcp", "TCP")],
    })
}

/// One slice per node: a restart takes it over, whatever the port.
pub fn slice_name(node: &str) -> String {
    let mut name: String = format!("kube-dns-{}", node.to_lowercase());
    name.truncate(200);
    name.trim_end_matches(['-', '.']).to_owned()
}

/// Applies the service; its address is what the cluster was configured with.
pub async fn apply_service(client: &Client, address: std::net::IpAddr) -> kube::Result<()> {
    let api: Api<Service> = Api::namespaced(client.clone(), NAMESPACE);
    api.patch(SERVICE, &PatchParams::apply(MANAGER).force(), &Patch::Apply(service(address))).await.map(drop)
}

/// Applies the slice.
pub async fn apply_slice(client: &Client, node: &str, listen: SocketAddr, ready: bool) -> kube::Result<()> {
    let api: Api<EndpointSlice> = Api::namespaced(client.clone(), NAMESPACE);
    let wanted = slice(node, listen, ready);
    let outcome = api.patch(&slice_name(node), &PatchParams::apply(MANAGER).force(), &Patch::Apply(&wanted)).await;
    match outcome {
        // The address type cannot be changed: the node's address is of another family now.
        Err(kube::Error::Api(status)) if status.code == 422 => {
            api.delete(&slice_name(node), &Default::default()).await.map(drop)?;
            api.patch(&slice_name(node), &PatchParams::apply(MANAGER).force(), &Patch::Apply(&wanted)).await.map(drop)
        }
        other => other.map(drop),
    }
}
