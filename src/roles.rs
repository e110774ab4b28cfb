//! The table of roles that run alone, one row each.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{ArgMatches, Args, Command};
use tokio_util::sync::CancellationToken;
use windlass_apiserver::ApiServer;
use windlass_client::identity::Wanted;
use windlass_daemon::{config, notify};

use crate::command::{self, Access, run_role, serve_endpoints, start, with_flags};
use crate::up;

/// A role: its subcommand, its start, and the check of its configuration file.
pub struct Row {
    pub name: &'static str,
    pub command: fn() -> Command,
    pub run: fn(&ArgMatches) -> Result<()>,
    pub check: fn(&Path) -> Result<()>,
}

pub static ALL: &[Row] = &[
    Row {
        name: "up",
        command: || with_flags::<up::Config, None>("up", "Run everything: a cluster of one node in one process"),
        run: |matches| start(matches, |config, _: None, shutdown| up::run(config, shutdown)),
        check: check::<up::Config>,
    },
    Row {
        name: "apiserver",
        command: || with_flags::<windlass_apiserver::Config, Kubeconfig>("apiserver", "Serve the Kubernetes API"),
        run: |matches| start(matches, apiserver),
        check: check::<windlass_apiserver::Config>,
    },
    Row {
        name: "scheduler",
        command: || with_flags::<windlass_scheduler::Config, Endpoints>("scheduler", "Decide on which node each pod runs"),
        run: |matches| {
            start(matches, |config: windlass_scheduler::Config, endpoints: Endpoints, shutdown| async move {
                let configz = serde_json::to_value(&config)?;
                endpoints.run("scheduler", 10259, None, configz, shutdown, |role| windlass_scheduler::run(config, role)).await
            })
        },
        check: check::<windlass_scheduler::Config>,
    },
    Row {
        name: "controller-manager",
        command: || with_flags::<windlass_controllers::Config, Endpoints>("controller-manager", "Move the cluster towards what its objects say"),
        run: |matches| {
            start(matches, |config: windlass_controllers::Config, endpoints: Endpoints, shutdown| async move {
                let configz = serde_json::to_value(&config)?;
                endpoints.run("controller-manager", 10257, None, configz, shutdown, |role| windlass_controllers::run(config, role)).await
            })
        },
        check: check::<windlass_controllers::Config>,
    },
    Row {
        name: "kubelet",
        command: || with_flags::<windlass_kubelet::Config, Access>("kubelet", "Run the pods of this node"),
        run: |matches| start(matches, kubelet),
        check: check::<windlass_kubelet::Config>,
    },
    Row {
        name: "proxy",
        command: || with_flags::<windlass_proxy::Config, Endpoints>("proxy", "Make services reachable on this node"),
        run: |matches| {
            start(matches, |config: windlass_proxy::Config, endpoints: Endpoints, shutdown| async move {
                let wanted = client_certificate("system:kube-proxy", &[], "kubernetes.io/kube-apiserver-client");
                let configz = serde_json::to_value(&config)?;
                endpoints.run("proxy", 10249, Some(wanted), configz, shutdown, |role| windlass_proxy::run(config, role)).await
            })
        },
        check: check::<windlass_proxy::Config>,
    },
    Row {
        name: "dns",
        command: || with_flags::<windlass_dns::Config, Endpoints>("dns", "Answer the names of the cluster"),
        run: |matches| {
            start(matches, |config: windlass_dns::Config, endpoints: Endpoints, shutdown| async move {
                let configz = serde_json::to_value(&config)?;
                endpoints.run("dns", 9153, None, configz, shutdown, |role| windlass_dns::run(config, role)).await
            })
        },
        check: check::<windlass_dns::Config>,
    },
];

pub fn names() -> Vec<&'static str> {
    ALL.iter().map(|row| row.name).collect()
}

pub fn find(name: &str) -> Option<&'static Row> {
    ALL.iter().find(|row| row.name == name)
}

fn check<C>(file: &Path) -> Result<()>
where
    C: Default + serde::de::DeserializeOwned,
{
    config::check::<C>(file).map(drop).map_err(Into::into)
}

/// No flags beyond the role's own.
#[derive(Args, Debug)]
pub struct None {}

/// Where the API server leaves a way in for its administrator.
#[derive(Args, Debug)]
struct Kubeconfig {
    /// Write an administrator's kubeconfig here
    #[arg(long, value_name = "FILE")]
    write_kubeconfig: Option<PathBuf>,
}

async fn apiserver(config: windlass_apiserver::Config, kubeconfig: Kubeconfig, shutdown: CancellationToken) -> Result<()> {
    let server = ApiServer::start(config, shutdown.clone()).await?;
    if let Some(path) = &kubeconfig.write_kubeconfig {
        command::write_private(path, &server.admin_kubeconfig())?;
    }
    let told = tokio::spawn(notify::run(server.health(), shutdown.clone()));
    let result = server.serve().await;
    shutdown.cancel();
    let _ = told.await;
    Ok(result?)
}

async fn kubelet(config: windlass_kubelet::Config, access: Access, shutdown: CancellationToken) -> Result<()> {
    let node = if config.hostname_override.is_empty() { command::hostname()? } else { config.hostname_override.to_lowercase() };
    let wanted = client_certificate(&format!("system:node:{node}"), &["system:nodes"], "kubernetes.io/kube-apiserver-client-kubelet");
    let client = access.client("kubelet", Some(wanted), &shutdown).await?;
    run_role(client, shutdown, |role| windlass_kubelet::run(config, role)).await
}

fn client_certificate(name: &str, groups: &[&str], signer: &str) -> Wanted {
    Wanted {
        common_name: name.to_owned(),
        organizations: groups.iter().map(|group| (*group).to_owned()).collect(),
        signer: signer.to_owned(),
        usages: vec!["digital signature".to_owned(), "client auth".to_owned()],
        names: Vec::new(),
        addresses: Vec::new(),
    }
}

/// Access to the API, and where health, metrics and profiles are served.
#[derive(Args, Debug)]
struct Endpoints {
    #[command(flatten)]
    access: Access,
    /// Address on which health, metrics and profiles are served
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    metrics_address: IpAddr,
    /// Port for the same [default: upstream's for the role]
    #[arg(long, value_name = "PORT")]
    secure_port: Option<u16>,
}

impl Endpoints {
    async fn run<Fut, E>(
        self,
        name: &'static str,
        port: u16,
        wanted: Option<Wanted>,
        configz: serde_json::Value,
        shutdown: CancellationToken,
        work: impl FnOnce(windlass_client::Role) -> Fut,
    ) -> Result<()>
    where
        Fut: Future<Output = std::result::Result<(), E>>,
        E: Into<anyhow::Error>,
    {
        let client = self.access.client(name, wanted, &shutdown).await?;
        let address = SocketAddr::new(self.metrics_address, self.secure_port.unwrap_or(port));
        run_role(client, shutdown, |role| async move {
            serve_endpoints(address, name, configz, &role).await?;
            work(role).await.map_err(Into::into).with_context(|| format!("{name} ended"))
        })
        .await
    }
}
