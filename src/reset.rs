//! `windlass reset`: containers, mounts, links, rules and data of this machine's Windlass are gone afterwards.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use crate::up;

pub fn command() -> Command {
    Command::new("reset")
        .about("Remove everything that Windlass made on this machine: containers, mounts, links, rules, data")
        .arg(
            Arg::new("data-dir")
                .long("data-dir")
                .value_name("DIR")
                .value_parser(value_parser!(PathBuf))
                .default_value(up::DEFAULT_DATA_DIR)
                .help("The data directory of the `up` or kubelet to remove"),
        )
        .arg(
            Arg::new("docker-endpoint")
                .long("docker-endpoint")
                .value_name("URL")
                .default_value(up::DEFAULT_DOCKER)
                .help("The Docker that ran its pods"),
        )
        .arg(Arg::new("yes").long("yes").action(ArgAction::SetTrue).help("Do not ask"))
}

pub async fn run(matches: &ArgMatches) -> Result<()> {
    let data_dir: &PathBuf = matches.get_one("data-dir").context("has a default")?;
    let docker: &String = matches.get_one("docker-endpoint").context("has a default")?;
    if !matches.get_flag("yes") && !confirmed(data_dir)? {
        bail!("nothing was removed");
    }
    let instance = up::instance(data_dir);
    let kubelet = windlass_kubelet::Config {
        instance: instance.clone(),
        root_dir: std::path::absolute(data_dir.join("kubelet"))?,
        docker_endpoint: docker.clone(),
        ..Default::default()
    };
    windlass_kubelet::reset(&kubelet).await.context("cannot remove the pods")?;
    windlass_proxy::reset(&instance).await.context("cannot remove the service rules")?;
    windlass_net::reset(&instance).await.context("cannot remove the pod network")?;
    match std::fs::remove_dir_all(data_dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot remove {}", data_dir.display()));
        }
        _ => println!("removed the pods, their network and {}", data_dir.display()),
    }
    Ok(())
}

fn confirmed(data_dir: &Path) -> Result<bool> {
    print!("Remove all pods and all data of the cluster in {}? [y/N] ", data_dir.display());
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(answer.trim().eq_ignore_ascii_case("y"))
}
