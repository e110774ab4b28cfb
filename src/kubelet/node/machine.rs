//! What the machine is and has.

use std::fs;
use std::net::{IpAddr, UdpSocket};
use std::path::Path;

use nix::sys::statvfs::statvfs;
use windlass_api::quantity::Quantity;

use crate::config::Config;
use crate::error::Error;
use crate::shared::Machine;

/// Space and inodes of a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Disk {
    pub capacity: u64,
    pub available: u64,
    pub inodes: u64,
    pub inodes_free: u64,
}

pub fn disk(path: &Path) -> std::io::Result<Disk> {
    let stat = statvfs(path)?;
    let block = stat.fragment_size();
    Ok(Disk { capacity: stat.blocks() * block, available: stat.blocks_available() * block, inodes: stat.files(), inodes_free: stat.files_available() })
}

/// A field of /proc/meminfo, in bytes.
pub fn meminfo(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(':'))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

pub fn go_arch() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// Sums `resource=quantity` settings for one resource: milli-units for CPU.
fn reserved(lists: [&[String]; 2], resource: &str) -> Result<i64, Error> {
    let mut sum = 0;
    for text in lists.into_iter().flatten().filter(|t| !t.is_empty()) {
        let fail = |reason: &str| Error::Config { field: "reserved resources", value: text.clone(), reason: reason.to_owned() };
        let (name, quantity) = text.split_once('=').ok_or_else(|| fail("write it as resource=quantity"))?;
        if name == resource {
            let quantity: Quantity = quantity.parse().map_err(|_| fail("the quantity cannot be read"))?;
            sum += if resource == "cpu" { quantity.milli_value() } else { quantity.value() };
        }
    }
    Ok(sum)
}

pub fn detect(config: &Config) -> Result<Machine, Error> {
    let read = |path: &str| fs::read_to_string(path).map(|t| t.trim().to_owned()).unwrap_or_default();
    let memory = meminfo(&read("/proc/meminfo"), "MemTotal").unwrap_or(0);
    let disk = disk(&config.root_dir).map_err(Error::file("read the size of", &config.root_dir))?;
    let cpus = read("/proc/cpuinfo").lines().filter(|l| l.starts_with("processor")).count().max(1);
    let lists = [config.kube_reserved.as_slice(), config.system_reserved.as_slice()];
    let hard = crate::node::eviction::parse(&config.eviction_hard)?;
    let kept = |signal: &str, capacity: u64| hard.iter().find(|t| t.signal == signal).map_or(0, |t| i64::try_from(t.value.of(capacity)).unwrap_or(0));
    let os = read("/etc/os-release");
    let pretty = os.lines().find_map(|l| l.strip_prefix("PRETTY_NAME=")).map(|n| n.trim_matches('"').to_owned());
    let big = |v: u64| i64::try_from(v).unwrap_or(i64::MAX);
    Ok(Machine {
        milli_cpu: i64::try_from(cpus).unwrap_or(1) * 1000,
        memory: big(memory),
        ephemeral_storage: big(disk.capacity),
        reserved: (
            reserved(lists, "cpu")?,
            reserved(lists, "memory")? + kept("memory.available", memory),
            reserved(lists, "ephemeral-storage")? + kept("nodefs.available", disk.capacity),
        ),
        machine_id: read("/etc/machine-id"),
        system_uuid: Some(read("/sys/class/dmi/id/product_uuid")).filter(|u| !u.is_empty()).unwrap_or_else(|| read("/etc/machine-id")),
        boot_id: read("/proc/sys/kernel/random/boot_id"),
        os_image: pretty.unwrap_or_else(|| "Linux".into()),
        kernel: read("/proc/sys/kernel/osrelease"),
        oom_floor: oom_floor(Path::new("/proc/self/oom_score_adj")),
    })
}

/// Lowering a score takes a capability that a container or a locked-in unit may lack; the runtime then cannot either.
fn oom_floor(file: &Path) -> i64 {
    let own: i64 = fs::read_to_string(file).ok().and_then(|t| t.trim().parse().ok()).unwrap_or(0);
    if own <= -1000 || fs::write(file, (own - 1).to_string()).is_ok() {
        // Raising it again is always allowed.
        if let Err(error) = fs::write(file, own.to_string()) {
            tracing::warn!(%error, "cannot restore our own OOM score adjustment");
        }
        return -1000;
    }
    tracing::warn!(floor = own, "OOM scores cannot be lowered on this machine: guaranteed and critical pods are no safer than others");
    own
}

/// The node's addresses: as configured, or the one that a packet to elsewhere would carry.
pub fn addresses(config: &Config) -> Result<Vec<String>, Error> {
    if !config.node_ip.is_empty() {
        let parse = |text: &str| {
            let ip: Result<IpAddr, _> = text.trim().parse();
            ip.map(|ip| ip.to_string()).map_err(|e| Error::Config { field: "node-ip", value: text.to_owned(), reason: e.to_string() })
        };
        return config.node_ip.split(',').map(parse).collect();
    }
    // Connecting a datagram socket sends nothing: the kernel only picks a route.
    let probe = |bind: &str, to: &str| {
        let socket = UdpSocket::bind(bind).ok()?;
        socket.connect(to).ok()?;
        socket.local_addr().ok().map(|a| a.ip()).filter(|ip| !ip.is_unspecified())
    };
    let found = probe("0.0.0.0:0", "192.0.2.1:9").or_else(|| probe("[::]:0", "[2001:db8::1]:9"));
    Ok(vec![found.map_or_else(|| "127.0.0.1".to_owned(), |ip| ip.to_string())])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_fields() {
        let text = "MemTotal:        1024 kB\nMemFree: 1 kB\n";
        assert_eq!((meminfo(text, "MemTotal"), meminfo(text, "Mem"), meminfo(text, "X")), (Some(1 << 20), None, None));
    }

    #[test]
    fn reservations() {
        let list = ["cpu=100m".to_owned(), "memory=1Gi".to_owned()];
        assert_eq!(reserved([&list, &list], "cpu").ok(), Some(200));
        assert_eq!(reserved([&list, &[]], "memory").ok(), Some(1 << 30));
        assert!(reserved([&["cpu".to_owned()], &[]], "cpu").is_err());
    }
}
