//! Serves the API alone: `serve DIR PORT`, with the embedded store in DIR. Writes DIR/kubeconfig. No other role runs.

use tokio_util::sync::CancellationToken;
use windlass_apiserver::{ApiServer, Config};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    windlass_daemon::logging::init(Default::default(), "info")?;
    let mut args = std::env::args().skip(1);
    let dir = std::path::PathBuf::from(args.next().ok_or("usage: serve DIR PORT")?);
    let port = args.next().ok_or("usage: serve DIR PORT")?.parse()?;
    let config = Config { data_dir: dir.clone(), secure_port: port, bind_address: [127, 0, 0, 1].into(), ..Config::default() };
    let shutdown = CancellationToken::new();
    let begun = std::time::Instant::now();
    let server = ApiServer::start(config, shutdown.clone()).await?;
    std::fs::write(dir.join("kubeconfig"), server.admin_kubeconfig())?;
    println!("serving {} after {:?}", server.url(), begun.elapsed());
    let stop = shutdown.clone();
    tokio::spawn(async move {
        let _ = tokio::signal::ctrl_c().await;
        stop.cancel();
    });
    server.serve().await?;
    Ok(())
}
