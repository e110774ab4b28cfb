//! The `windlass` binary: one subcommand per role, and `up`, which runs them all in one process.
//!
//! It alone may combine roles. It parses the command line, loads a role's configuration, gives the role its identity at
//! the API server, serves the endpoints that every role has, and ends the process in order.

mod command;
mod reset;
mod roles;
mod token;
mod up;

use std::process::ExitCode;

use clap::{Arg, Command, value_parser};

/// Heap profiles need jemalloc's; beyond that it keeps a long-lived daemon's memory from fragmenting.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let matches = cli().get_matches();
    // Every TLS stack in the process uses the same cryptography.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match dispatch(&matches) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("windlass: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn cli() -> Command {
    let config = Command::new("config").about("Check configuration files").subcommand_required(true).subcommand(
        Command::new("check")
            .about("Say whether a role would accept a configuration file, without starting it")
            .arg(Arg::new("role").required(true).value_parser(roles::names()))
            .arg(Arg::new("file").required(true).value_parser(value_parser!(std::path::PathBuf))),
    );
    Command::new("windlass")
        .about("Kubernetes v1.37 as an appliance: one binary, one subcommand per role")
        .version(windlass_daemon::version::GIT_VERSION)
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommands(roles::ALL.iter().map(|role| (role.command)()))
        .subcommand(config)
        .subcommand(token::command())
        .subcommand(reset::command())
        .subcommand(Command::new("version").about("Print the version"))
}

fn dispatch(matches: &clap::ArgMatches) -> anyhow::Result<()> {
    let (name, matches) = matches.subcommand().expect("clap requires a subcommand");
    match name {
        "config" => check_config(matches),
        "token" => command::runtime()?.block_on(token::run(matches)),
        "reset" => command::runtime()?.block_on(reset::run(matches)),
        "version" => {
            println!("windlass {}", windlass_daemon::version::GIT_VERSION);
            Ok(())
        }
        role => (roles::find(role).expect("clap knows only the roles of the table").run)(matches),
    }
}

fn check_config(matches: &clap::ArgMatches) -> anyhow::Result<()> {
    let (_, matches) = matches.subcommand().expect("clap requires a subcommand");
    let role: &String = matches.get_one("role").expect("required");
    let file: &std::path::PathBuf = matches.get_one("file").expect("required");
    (roles::find(role).expect("a role of the table").check)(file)?;
    println!("{}: a valid configuration of {role}", file.display());
    Ok(())
}
