//! What the subcommands share: common flags, the runtime, and the way a role of its own runs from start to stop.

use std::future::Future;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::{ArgMatches, Args, Command, FromArgMatches, ValueEnum};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;
use windlass_client::gate::Delegated;
use windlass_client::identity::{Join, Wanted};
use windlass_client::{Client, Role, connect};
use windlass_daemon::health::Health;
use windlass_daemon::server::{Limits, Tls};
use windlass_daemon::{config, endpoints, logging, notify, server, shutdown};

/// Flags of every role that runs alone.
#[derive(Args, Debug)]
pub struct Common {
    /// Configuration file, YAML or JSON; flags win over it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub logging: Logging,
}

#[derive(Args, Debug)]
pub struct Logging {
    /// How log lines are written
    #[arg(long, value_enum, default_value = "text")]
    pub logging_format: LogFormat,
    /// What is logged: error, warn, info, debug, trace, or per module (`info,windlass_kubelet=debug`)
    #[arg(long, env = "WINDLASS_LOG", default_value = "info")]
    pub log_level: String,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

impl Logging {
    pub fn init(&self) -> Result<()> {
        let format = match self.logging_format {
            LogFormat::Text => logging::Format::Text,
            LogFormat::Json => logging::Format::Json,
        };
        Ok(logging::init(format, &self.log_level)?)
    }
}

/// How a role that is no API server reaches one.
#[derive(Args, Debug)]
pub struct Access {
    /// Kubeconfig with this role's identity
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// API server to join, e.g. https://10.0.0.1:6443; needs --join-token-file the first time
    #[arg(long, value_name = "URL", conflicts_with = "kubeconfig")]
    pub server: Option<String>,
    /// File that holds a join token, as `windlass token create` prints it
    #[arg(long, value_name = "FILE", requires = "server")]
    pub join_token_file: Option<PathBuf>,
    /// Where the identity that joining gave is kept
    #[arg(long, value_name = "DIR", default_value = "/var/lib/windlass/identity")]
    pub identity_dir: PathBuf,
}

impl Access {
    /// The role's client; `wanted` is the identity that it joins with, for roles of nodes.
    pub async fn client(&self, name: &'static str, wanted: Option<Wanted>, shutdown: &CancellationToken) -> Result<Client> {
        let (Some(server), Some(wanted)) = (&self.server, wanted) else {
            return Ok(connect::from_kubeconfig(self.kubeconfig.as_deref()).await?);
        };
        let read = |path: &PathBuf| std::fs::read_to_string(path).with_context(|| format!("cannot read the join token file {}", path.display()));
        let token = self.join_token_file.as_ref().map(read).transpose()?;
        let join = Join { server: server.clone(), token, dir: self.identity_dir.clone(), name, wanted };
        Ok(join.run(shutdown.clone()).await?.client)
    }
}

pub fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start the async runtime")
}

/// A subcommand with the flags of `C`, the common ones, and those of `Extra`.
pub fn with_flags<C: Args, Extra: Args>(name: &'static str, about: &'static str) -> Command {
    config::augment::<C>(Extra::augment_args(Common::augment_args(Command::new(name).about(about))))
}

/// Loads a role's configuration, starts logging, and runs `work` until the process is told to stop.
pub fn start<C, Extra, Fut>(matches: &ArgMatches, work: impl FnOnce(C, Extra, CancellationToken) -> Fut) -> Result<()>
where
    C: Default + Serialize + DeserializeOwned + Args,
    Extra: FromArgMatches,
    Fut: Future<Output = Result<()>>,
{
    let common = Common::from_arg_matches(matches)?;
    let config: C = config::load(common.config.as_deref(), matches)?;
    let extra = Extra::from_arg_matches(matches)?;
    common.logging.init()?;
    let runtime = runtime()?;
    let result = runtime.block_on(async { work(config, extra, shutdown::on_signals()).await });
    // What still runs on blocking threads has nothing left to say.
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    result
}

/// Serves the endpoints of a role that has no server of its own, over TLS with a certificate made at each start, as
/// upstream's roles do when they are given none.
pub async fn serve_endpoints(address: SocketAddr, name: &'static str, configz: serde_json::Value, role: &Role) -> Result<SocketAddr> {
    let host = if address.ip().is_unspecified() { "localhost".to_owned() } else { address.ip().to_string() };
    let made = rcgen::generate_simple_self_signed(vec![host, "localhost".to_owned()])?;
    let tls = Tls::from_pem(made.cert.pem().as_bytes(), made.signing_key.serialize_pem().as_bytes())?;
    let gate = Arc::new(Delegated::new(role.client.clone()));
    let routes = endpoints::routes(role.health.clone(), configz, name, gate);
    let listener = tokio::net::TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address} for the {name} endpoints"))?;
    let bound = listener.local_addr()?;
    let shutdown = role.shutdown.clone();
    tokio::spawn(async move {
        if let Err(error) = server::serve(listener, Some(tls), routes, Limits::default(), shutdown).await {
            tracing::error!(name, %error, "endpoints ended");
        }
    });
    Ok(bound)
}

/// Runs one role with its health, readiness for the service manager, and stop.
pub async fn run_role<Fut, E>(client: Client, shutdown: CancellationToken, work: impl FnOnce(Role) -> Fut) -> Result<()>
where
    Fut: Future<Output = std::result::Result<(), E>>,
    E: Into<anyhow::Error>,
{
    let role = Role { client, shutdown: shutdown.clone(), health: Health::new() };
    let notify = tokio::spawn(notify::run(role.health.clone(), shutdown.clone()));
    let result = work(role).await.map_err(Into::into);
    shutdown.cancel();
    let _ = notify.await;
    result
}

/// Writes a file that only its owner may read; a crash leaves the old one or the new one.
pub fn write_private(path: &Path, text: &str) -> Result<()> {
    let wrap = || format!("cannot write {}", path.display());
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent).with_context(wrap)?;
    }
    let beside = path.with_extension("new");
    let _ = std::fs::remove_file(&beside);
    let mut options = std::fs::OpenOptions::new();
    std::os::unix::fs::OpenOptionsExt::mode(options.write(true).create_new(true), 0o600);
    let mut file = options.open(&beside).with_context(wrap)?;
    std::io::Write::write_all(&mut file, text.as_bytes()).with_context(wrap)?;
    std::fs::rename(&beside, path).with_context(wrap)
}

pub fn hostname() -> Result<String> {
    windlass_daemon::host::name().context("cannot read the host's name; pass a node name")
}
