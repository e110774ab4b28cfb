//! The role alone against the API server of a kubeconfig: `cargo run --example proxy -- KUBECONFIG CONFIG-FILE`.

use windlass_client::{Role, connect};
use windlass_daemon::{config, health::Health, logging, shutdown};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<std::path::PathBuf> = std::env::args_os().skip(1).map(Into::into).collect();
    let [kubeconfig, file] = arguments.as_slice() else { return Err("usage: proxy KUBECONFIG CONFIG-FILE".into()) };
    let _ = rustls::crypto::ring::default_provider().install_default();
    logging::init(logging::Format::Text, "info")?;
    let client = connect::from_kubeconfig(Some(kubeconfig)).await?;
    let role = Role { client, shutdown: shutdown::on_signals(), health: Health::new() };
    Ok(windlass_proxy::run(config::check(file)?, role).await?)
}
