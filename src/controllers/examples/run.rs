//! Runs the controllers alone against the cluster of a kubeconfig, for development.
use std::path::PathBuf;

use clap::Parser as _;

#[derive(clap::Parser)]
struct Args {
    #[arg(long)]
    kubeconfig: Option<PathBuf>,
    #[command(flatten)]
    config: windlass_controllers::Config,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    tracing_subscriber::fmt().with_env_filter(tracing_subscriber::EnvFilter::from_default_env()).init();
    let client = windlass_client::connect::from_kubeconfig(args.kubeconfig.as_deref()).await?;
    let role = windlass_client::Role {
        client,
        shutdown: windlass_daemon::shutdown::on_signals(),
        health: windlass_daemon::health::Health::new(),
    };
    windlass_controllers::run(args.config, role).await?;
    Ok(())
}
