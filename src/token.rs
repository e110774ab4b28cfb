//! `windlass token create`: a token with which machines join the cluster.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Arg, ArgMatches, Command, value_parser};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Api;
use kube::api::PostParams;
use windlass_client::{connect, identity};

pub fn command() -> Command {
    let create = Command::new("create")
        .about("Print a token with which machines may join the cluster")
        .arg(
            Arg::new("kubeconfig")
                .long("kubeconfig")
                .value_name("FILE")
                .value_parser(value_parser!(PathBuf))
                .help("Kubeconfig of an administrator [default: $KUBECONFIG]"),
        )
        .arg(Arg::new("ttl-hours").long("ttl-hours").value_parser(value_parser!(u32)).default_value("24").help("Hours for which it can be used; 0 for ever"));
    Command::new("token").about("Manage join tokens").subcommand_required(true).subcommand(create)
}

pub async fn run(matches: &ArgMatches) -> Result<()> {
    let (_, matches) = matches.subcommand().context("a subcommand is required")?;
    let client = connect::from_kubeconfig(matches.get_one::<PathBuf>("kubeconfig").map(PathBuf::as_path)).await?;
    let roots: Api<ConfigMap> = Api::namespaced(client.clone(), "kube-system");
    let root = roots.get("kube-root-ca.crt").await.context("cannot read the cluster's CA from kube-system/kube-root-ca.crt")?;
    let pem = root.data.unwrap_or_default().remove("ca.crt").unwrap_or_default();
    let Some(ca) = identity::parse_certificates(&pem).into_iter().next() else {
        bail!("kube-system/kube-root-ca.crt holds no certificate");
    };
    let (id, secret) = (random_text(6), random_text(16));
    let ttl: u32 = *matches.get_one("ttl-hours").context("has a default")?;
    let mut data = serde_json::json!({
        "token-id": id,
        "token-secret": secret,
        "usage-bootstrap-authentication": "true",
        "usage-bootstrap-signing": "true",
        "description": "made by `windlass token create`",
    });
    if ttl > 0 {
        let expires = jiff::Timestamp::now() + jiff::SignedDuration::from_hours(i64::from(ttl));
        data["expiration"] = serde_json::json!(expires.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
    }
    let object: Secret = serde_json::from_value(serde_json::json!({
        "metadata": { "name": format!("bootstrap-token-{id}"), "namespace": "kube-system" },
        "type": "bootstrap.kubernetes.io/token",
        "stringData": data,
    }))?;
    Api::<Secret>::namespaced(client, "kube-system").create(&PostParams::default(), &object).await?;
    println!("WL1.{}.{id}.{secret}", identity::ca_hash(&ca));
    Ok(())
}

/// Lower-case letters and digits, as bootstrap tokens are made of.
fn random_text(length: usize) -> String {
    const ALPHABET: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    (0..length).map(|_| char::from(ALPHABET[rand::random_range(0..ALPHABET.len())])).collect()
}
