//! Serves the common endpoints without a gate on 127.0.0.1, for trying them out: `cargo run -p windlass-daemon --example
//! endpoints -- 25080`, then `go tool pprof http://127.0.0.1:25080/debug/pprof/profile?seconds=5`.

use std::sync::Arc;

use async_trait::async_trait;
use windlass_daemon::endpoints::{Denied, Gate, routes};
use windlass_daemon::health::Health;
use windlass_daemon::server::{Limits, serve};
use windlass_daemon::{logging, shutdown};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

struct Open;

#[async_trait]
impl Gate for Open {
    async fn admit(&self, _request: &http::request::Parts) -> Result<(), Denied> {
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    logging::init(logging::Format::Text, "info")?;
    let port: u16 = std::env::args().nth(1).map_or(Ok(0), |p| p.parse())?;
    let health = Health::new();
    health.check("example").ok();
    // Something to see in the profiles.
    std::thread::spawn(|| {
        let mut kept = std::collections::VecDeque::new();
        for n in 0_u64.. {
            kept.push_back(std::hint::black_box(n.to_string().repeat(100)));
            if kept.len() > 10_000 {
                kept.pop_front();
            }
        }
    });
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    let routes = routes(health, serde_json::json!({}), "example", Arc::new(Open));
    serve(listener, None, routes, Limits::default(), shutdown::on_signals()).await?;
    Ok(())
}
