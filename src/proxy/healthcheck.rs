//! Health check node ports: a load balancer asks on a service's `healthCheckNodePort` whether this node has endpoints.
//!
//! Follows upstream's `pkg/proxy/healthcheck/service_health.go`.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use warp::Filter;
use windlass_daemon::server::{self, Limits};

use crate::model::ServiceName;

/// What is asked for on a health check port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub service: ServiceName,
    pub local_endpoints: usize,
}

/// The servers, by port.
#[derive(Debug)]
pub struct HealthServers {
    state: Arc<RwLock<HashMap<u16, Wanted>>>,
    running: BTreeMap<u16, CancellationToken>,
    shutdown: CancellationToken,
}

impl HealthServers {
    /// No servers yet; all of them end with `shutdown`.
    pub fn new(shutdown: CancellationToken) -> HealthServers {
        HealthServers { state: Arc::default(), running: BTreeMap::new(), shutdown }
    }

    /// Starts, updates and stops servers so that there is one per wanted port. A port that cannot be opened is logged and
    /// tried again with the next sync.
    pub async fn sync(&mut self, wanted: BTreeMap<u16, Wanted>) {
        self.running.retain(|port, token| {
            let keep = wanted.contains_key(port);
            if !keep {
                token.cancel();
            }
            keep
        });
        *self.state.write() = wanted.iter().map(|(p, w)| (*p, w.clone())).collect();
        for (port, wanted) in &wanted {
            if self.running.contains_key(port) {
                continue;
            }
            match listen(*port).await {
                Ok(listener) => {
                    let token = self.shutdown.child_token();
                    self.running.insert(*port, token.clone());
                    tokio::spawn(serve(listener, *port, self.state.clone(), token));
                }
                Err(error) => tracing::error!(service = %wanted.service, port, %error, "cannot open a service's health check port"),
            }
        }
    }
}

async fn listen(port: u16) -> std::io::Result<TcpListener> {
    match TcpListener::bind(SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port)).await {
        Ok(listener) => Ok(listener),
        // A kernel without IPv6.
        Err(e) if e.raw_os_error() == Some(97) => TcpListener::bind(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port)).await,
        Err(e) => Err(e),
    }
}

async fn serve(listener: TcpListener, port: u16, state: Arc<RwLock<HashMap<u16, Wanted>>>, shutdown: CancellationToken) {
    let routes = warp::any().map(move || answer(state.read().get(&port)));
    let limits = Limits { connections: 128, header_read: Duration::from_secs(10), drain: Duration::from_secs(1), ..Limits::default() };
    if let Err(error) = server::serve(listener, None, routes, limits, shutdown).await {
        tracing::error!(port, %error, "a service's health check port ended");
    }
}

fn answer(wanted: Option<&Wanted>) -> warp::reply::Response {
    use warp::http::{Response, StatusCode};
    let (namespace, name, count) = wanted.map_or(("", "", 0), |w| (w.service.namespace.as_str(), w.service.name.as_str(), w.local_endpoints));
    let status = if count > 0 { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let body = serde_json::json!({
        "service": {"namespace": namespace, "name": name},
        "localEndpoints": count,
        // The answer comes from a process that synced: before the first sync there are no servers.
        "serviceProxyHealthy": true,
    });
    let mut response = Response::new(body.to_string().into());
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert("content-type", warp::http::HeaderValue::from_static("application/json"));
    headers.insert("x-content-type-options", warp::http::HeaderValue::from_static("nosniff"));
    headers.insert("x-load-balancing-endpoint-weight", warp::http::HeaderValue::from(count));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_how_many_endpoints_are_here() {
        let wanted = |count| Wanted { service: ServiceName { namespace: "n".into(), name: "s".into() }, local_endpoints: count };
        for (count, status) in [(0, 503), (2, 200)] {
            let response = answer(Some(&wanted(count)));
            assert_eq!(response.status(), status);
            assert_eq!(response.headers()["x-load-balancing-endpoint-weight"], count.to_string().as_str());
        }
        assert_eq!(answer(None).status(), 503);
    }

    #[test]
    fn servers_come_and_go_with_what_is_wanted() {
        use std::io::{Read, Write};
        let ns = windlass_net::netns::Namespace::new().expect("root");
        let get = |port: u16| -> std::io::Result<String> {
            let mut stream = std::net::TcpStream::connect(("127.0.0.1", port))?;
            stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text).map(|_| text.lines().next().unwrap_or_default().to_owned())
        };
        let wanted = |port: u16, local_endpoints: usize| {
            BTreeMap::from([(port, Wanted { service: ServiceName { namespace: "n".into(), name: "s".into() }, local_endpoints })])
        };
        let outcome = windlass_net::netns::block_on(&ns.path(), || async {
            let netlink = windlass_net::link::Netlink::open()?;
            netlink.set_up(netlink.need("lo").await?.index).await?;
            let stop = CancellationToken::new();
            let mut servers = HealthServers::new(stop.clone());
            // The blocking client has a thread of its own (with this namespace), so that the server can answer.
            let ask = |port| async move { tokio::task::spawn_blocking(move || get(port)).await.expect("no panic") };
            servers.sync(wanted(30000, 1)).await;
            assert_eq!(ask(30000).await.expect("open"), "HTTP/1.1 200 OK");
            servers.sync(wanted(30000, 0)).await;
            assert_eq!(ask(30000).await.expect("open"), "HTTP/1.1 503 Service Unavailable");
            servers.sync(wanted(30001, 2)).await;
            assert_eq!(ask(30001).await.expect("open"), "HTTP/1.1 200 OK");
            stop.cancel();
            Ok::<_, windlass_net::Error>(())
        });
        outcome.expect("enter").expect("network");
    }
}
