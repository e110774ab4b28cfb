//! The role: sockets, informers, and the objects by which pods find us.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hickory_server::Server;
use hickory_server::proto::rr::{Name, RecordType};
use tokio::net::{TcpListener, UdpSocket};
use tokio_util::sync::CancellationToken;
use windlass_client::informer::{Change, Informer};
use windlass_client::{Api, Role};

use crate::cache::Question;
use crate::config::{Checked, Config};
use crate::forward::Forwarder;
use crate::handler::{Handler, Shared};
use crate::model::{self, Caches, NamespaceView, ServiceView, SliceView};
use crate::zone::Zone;
use crate::{Error, publish};

/// A TCP connection without a question is closed after this.
const TCP_IDLE: Duration = Duration::from_secs(10);
/// Responses that may wait for a slow TCP client.
const TCP_BUFFER: usize = 32;
/// After a failed write to the API.
const RETRY: Duration = Duration::from_secs(2);
const RETRY_MOST: Duration = Duration::from_secs(60);

/// Runs the cluster DNS until `role.shutdown`.
pub async fn run(config: Config, role: Role) -> Result<(), Error> {
    let checked = config.check()?;
    let ready = role.health.check("dns");
    let address = match checked.bind_address {
        Some(address) => address,
        None => own_address().await?,
    };
    let (udp, tcp) = bind(SocketAddr::new(address, config.port)).await?;
    let listen = udp.local_addr().map_err(|source| Error::Listen { address: SocketAddr::new(address, config.port), source })?;

    let changed = Arc::new(tokio::sync::Notify::new());
    let caches = informers(&role, &checked, &changed);
    tokio::select! {
        () = async { tokio::join!(caches.services.synced(), caches.slices.synced(), caches.namespaces.synced()); } => {}
        () = role.shutdown.cancelled() => return Ok(()),
    }

    let mut own = vec![listen];
    own.extend(checked.cluster_dns.map(|ip| SocketAddr::new(ip, 53)));
    let probe = Name::from_ascii(format!("{:016x}.windlass-loop-probe.", rand::random::<u64>())).map_err(|e| Error::Config { field: "clusterDomain", reason: e.to_string() })?;
    let shared = Arc::new(Shared {
        zone: Zone { domain: checked.domain.clone(), ttl: config.ttl, own_address: checked.cluster_dns.or(Some(address)), source: caches },
        forwarder: Forwarder::new(&checked.upstreams, &own, config.cache_capacity),
        probe: probe.clone(),
    });
    let mut server = Server::new(Handler { shared: shared.clone() });
    server.register_socket(udp);
    server.register_listener(tcp, TCP_IDLE, TCP_BUFFER);
    tracing::info!(%listen, domain = %checked.domain, resolvers = ?shared.forwarder.upstreams(), "cluster DNS answers");
    ready.ok();

    // Who forwards back to us shows at once.
    let prober = shared.clone();
    tokio::spawn(async move {
        let question = Question { name: probe, kind: RecordType::A, class: hickory_server::proto::rr::DNSClass::IN, dnssec: false };
        let _ = prober.forwarder.ask(question).await;
    });

    let keeper = tokio::spawn(keep(role.client.clone(), checked.clone(), listen, changed, role.shutdown.clone()));
    tokio::select! {
        () = role.shutdown.cancelled() => {}
        ended = server.block_until_done() => if let Err(source) = ended {
            return Err(Error::Server { listen, reason: source.to_string() });
        },
    }
    let _ = keeper.await;
    server.shutdown_gracefully().await.map_err(|e| Error::Server { listen, reason: e.to_string() })
}

fn informers(role: &Role, checked: &Checked, changed: &Arc<tokio::sync::Notify>) -> Caches {
    let slice_name = publish::slice_name(&checked.node);
    let (on_service, on_slice) = (changed.clone(), changed.clone());
    // Our own objects, changed or deleted by somebody, are brought back.
    let services = Informer::builder(Api::<ServiceView>::all(role.client.clone()))
        .index(model::BY_ADDRESS, model::service_by_address)
        .on_change(move |change: &Change<ServiceView>| {
            let meta = &change.object().metadata;
            if meta.name.as_deref() == Some(publish::SERVICE) && meta.namespace.as_deref() == Some(publish::NAMESPACE) {
                on_service.notify_one();
            }
        })
        .start(role.shutdown.clone());
    let slices = Informer::builder(Api::<SliceView>::all(role.client.clone()))
        .index(model::BY_SERVICE, model::slice_by_service)
        .index(model::BY_ADDRESS, model::slice_by_address)
        .on_change(move |change: &Change<SliceView>| {
            let meta = &change.object().metadata;
            if meta.name.as_ref() == Some(&slice_name) && meta.namespace.as_deref() == Some(publish::NAMESPACE) {
                on_slice.notify_one();
            }
        })
        .start(role.shutdown.clone());
    let namespaces = Informer::builder(Api::<NamespaceView>::all(role.client.clone())).start(role.shutdown.clone());
    Caches { services, slices, namespaces }
}

/// Keeps the service and our slice as they should be; on shutdown the slice says that we are not ready.
async fn keep(client: windlass_client::Client, checked: Checked, listen: SocketAddr, changed: Arc<tokio::sync::Notify>, shutdown: CancellationToken) {
    let Some(address) = checked.cluster_dns else { return };
    let mut pause = RETRY;
    loop {
        let applied = async {
            publish::apply_service(&client, address).await?;
            publish::apply_slice(&client, &checked.node, listen, true).await
        };
        let outcome = tokio::select! {
            outcome = applied => outcome,
            () = shutdown.cancelled() => break,
        };
        let wait = async {
            match &outcome {
                Ok(()) => {
                    pause = RETRY;
                    // Several changes in a row (our own among them) are answered once.
                    changed.notified().await;
                    tokio::time::sleep(RETRY).await;
                }
                Err(error) => {
                    tracing::warn!(%error, "the DNS service cannot be kept yet, trying again");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(RETRY_MOST);
                }
            }
        };
        tokio::select! {
            () = wait => {}
            () = shutdown.cancelled() => break,
        }
    }
    let goodbye = publish::apply_slice(&client, &checked.node, listen, false);
    if !matches!(tokio::time::timeout(RETRY, goodbye).await, Ok(Ok(()))) {
        tracing::debug!("the DNS endpoint could not be marked as not ready");
    }
}

/// UDP and TCP on the same port.
pub(crate) async fn bind(wanted: SocketAddr) -> Result<(UdpSocket, TcpListener), Error> {
    let fail = |source| Error::Listen { address: wanted, source };
    // With port 0 the port that UDP got may be taken for TCP: try again with another.
    for _ in 0..16 {
        let udp = UdpSocket::bind(wanted).await.map_err(fail)?;
        let address = udp.local_addr().map_err(fail)?;
        match TcpListener::bind(address).await {
            Ok(tcp) => return Ok((udp, tcp)),
            Err(e) if wanted.port() == 0 && e.kind() == std::io::ErrorKind::AddrInUse => {}
            Err(e) => return Err(fail(e)),
        }
    }
    Err(fail(std::io::ErrorKind::AddrInUse.into()))
}

/// The address that this node has towards others: the source of its default route. No packet is sent.
async fn own_address() -> Result<IpAddr, Error> {
    for (any, far) in [("0.0.0.0:0", "192.0.2.1:9"), ("[::]:0", "[2001:db8::1]:9")] {
        let Ok(socket) = UdpSocket::bind(any).await else { continue };
        if socket.connect(far).await.is_ok()
            && let Ok(address) = socket.local_addr()
            && !address.ip().is_unspecified()
            && !address.ip().is_loopback()
        {
            return Ok(address.ip());
        }
    }
    Err(Error::Config { field: "bindAddress", reason: "this node has no default route to tell its address by; set it".into() })
}
