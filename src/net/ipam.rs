//! Addresses of the node's pods.
//!
//! One small file per pod, written before its addresses are used and removed after they are free: whatever moment we are
//! killed at, an address in use is on disk, and what is on disk without a living pod goes with the next reconcile.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cidr::{Cidr, Family};
use crate::error::{Error, Result};
use crate::hostport::HostPort;

/// What the node knows of a pod's network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    pub pod_uid: String,
    pub namespace: String,
    pub name: String,
    pub ips: Vec<IpAddr>,
    /// Where each address was taken from: the node's CIDRs may change while the pod lives.
    pub cidrs: Vec<Cidr>,
    #[serde(default)]
    pub host_ports: Vec<HostPort>,
}

/// The records, in memory and on disk. Bounded by the size of the pod CIDRs.
#[derive(Debug)]
pub struct Ipam {
    dir: PathBuf,
    cidrs: Vec<Cidr>,
    records: BTreeMap<String, Record>,
    used: HashSet<IpAddr>,
    /// Per family, the offset after the last one given out: an address rests as long as possible before it comes again.
    next: BTreeMap<Family, u128>,
}

fn file_error(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { path, action, source }
}

impl Record {
    /// The bridge's address for each of the pod's.
    pub fn gateways(&self) -> Vec<IpAddr> {
        self.cidrs.iter().filter_map(Ipam::gateway).collect()
    }
}

impl Ipam {
    /// Reads the records below `dir`, which is made if needed. A file that is no record (written while the machine went
    /// down) is removed: its address was never used.
    pub fn open(dir: &Path) -> Result<Ipam> {
        fs::create_dir_all(dir).map_err(file_error(dir, "create"))?;
        let mut ipam = Ipam { dir: dir.to_owned(), cidrs: Vec::new(), records: BTreeMap::new(), used: HashSet::new(), next: BTreeMap::new() };
        for entry in fs::read_dir(dir).map_err(file_error(dir, "list"))? {
            let path = entry.map_err(file_error(dir, "list"))?.path();
            let bytes = fs::read(&path).map_err(file_error(&path, "read"))?;
            match serde_json::from_slice::<Record>(&bytes) {
                Ok(record) if path.extension().is_some_and(|e| e == "json") => ipam.insert(record),
                _ => {
                    tracing::warn!(path = %path.display(), "removing an unfinished address record");
                    fs::remove_file(&path).map_err(file_error(&path, "remove"))?;
                }
            }
        }
        Ok(ipam)
    }

    fn insert(&mut self, record: Record) {
        self.used.extend(&record.ips);
        self.records.insert(record.pod_uid.clone(), record);
    }

    /// The CIDRs that addresses are taken from from now on.
    pub fn set_cidrs(&mut self, cidrs: &[Cidr]) {
        self.cidrs = cidrs.to_vec();
    }

    /// The CIDRs.
    pub fn cidrs(&self) -> &[Cidr] {
        &self.cidrs
    }

    /// The CIDRs, and those that pods still have addresses of.
    pub fn cidrs_in_use(&self) -> Vec<Cidr> {
        let mut all = self.cidrs.clone();
        for cidr in self.records.values().flat_map(|r| &r.cidrs) {
            if !all.contains(cidr) {
                all.push(*cidr);
            }
        }
        all
    }

    /// The gateway of a CIDR, which the bridge holds: its first address after the base.
    pub fn gateway(cidr: &Cidr) -> Option<IpAddr> {
        cidr.nth(1)
    }

    /// The record of a pod.
    pub fn get(&self, pod_uid: &str) -> Option<&Record> {
        self.records.get(pod_uid)
    }

    /// All records.
    pub fn records(&self) -> impl Iterator<Item = &Record> {
        self.records.values()
    }

    /// Whether somebody has this address.
    pub fn is_used(&self, ip: IpAddr) -> bool {
        self.used.contains(&ip)
    }

    /// One free address of each family for which the node has a CIDR, recorded on disk before it is returned.
    ///
    /// # Errors
    /// No CIDR, no free address, a host port that another pod has, or the file.
    pub fn allocate(&mut self, pod_uid: &str, namespace: &str, name: &str, host_ports: &[HostPort]) -> Result<Record> {
        self.check_ports(pod_uid, host_ports)?;
        if self.cidrs.is_empty() {
            return Err(Error::NoPodCidr);
        }
        let (mut ips, mut cidrs): (Vec<IpAddr>, Vec<Cidr>) = Default::default();
        for cidr in self.cidrs.clone() {
            if !cidrs.iter().any(|c| c.family() == cidr.family()) {
                ips.push(self.pick(&cidr)?);
                cidrs.push(cidr);
            }
        }
        self.write(Record { pod_uid: pod_uid.into(), namespace: namespace.into(), name: name.into(), ips, cidrs, host_ports: host_ports.to_vec() })
    }

    /// Records addresses that a pod already has (its link outlived our files).
    pub fn adopt(&mut self, record: Record) -> Result<Record> {
        self.check_ports(&record.pod_uid, &record.host_ports)?;
        self.write(record)
    }

    fn check_ports(&self, pod_uid: &str, ports: &[HostPort]) -> Result<()> {
        for (other, theirs) in self.records.values().filter(|r| r.pod_uid != pod_uid).flat_map(|r| r.host_ports.iter().map(move |p| (r, p))) {
            if let Some(ours) = ports.iter().find(|p| p.conflicts(theirs)) {
                return Err(Error::HostPortConflict { protocol: ours.protocol, port: ours.host_port, owner: format!("{}/{}", other.namespace, other.name) });
            }
        }
        Ok(())
    }

    fn pick(&mut self, cidr: &Cidr) -> Result<IpAddr> {
        // Base and gateway are taken; so is IPv4's broadcast address, if the prefix is long enough to have one.
        let last = if cidr.family() == Family::V4 && cidr.size() > 2 { cidr.size() - 1 } else { cidr.size() };
        let span = last.saturating_sub(2);
        let start = self.next.get(&cidr.family()).copied().unwrap_or(2).clamp(2, last.max(2));
        // One more try than there are used addresses is enough, whatever the CIDR's size.
        for step in 0..span.min(self.used.len() as u128 + 1) {
            let offset = 2 + (start - 2 + step) % span;
            if let Some(ip) = cidr.nth(offset).filter(|ip| !self.used.contains(ip)) {
                self.next.insert(cidr.family(), offset + 1);
                return Ok(ip);
            }
        }
        Err(Error::Exhausted { cidr: *cidr, used: self.used.len() })
    }

    fn write(&mut self, record: Record) -> Result<Record> {
        let path = self.file(&record.pod_uid);
        let unfinished = path.with_extension("new");
        let bytes = serde_json::to_vec(&record).map_err(|e| file_error(&path, "encode")(e.into()))?;
        fs::write(&unfinished, bytes).map_err(file_error(&unfinished, "write"))?;
        fs::rename(&unfinished, &path).map_err(file_error(&path, "rename"))?;
        self.insert(record.clone());
        Ok(record)
    }

    /// Forgets a pod; its addresses are free afterwards.
    pub fn release(&mut self, pod_uid: &str) -> Result<()> {
        let path = self.file(pod_uid);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(file_error(&path, "remove")(e)),
            _ => {}
        }
        if let Some(record) = self.records.remove(pod_uid) {
            for ip in &record.ips {
                self.used.remove(ip);
            }
        }
        Ok(())
    }

    fn file(&self, pod_uid: &str) -> PathBuf {
        // A UID comes from the API or a manifest; it names a file, so nothing but these characters gets through.
        let safe: String = pod_uid.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' || c == '_' { c } else { '_' }).take(200).collect();
        self.dir.join(format!("{safe}.json"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostport::Protocol;

    fn ipam(dir: &Path, cidrs: &[&str]) -> Ipam {
        let mut ipam = Ipam::open(dir).expect("open");
        ipam.set_cidrs(&cidrs.iter().map(|c| c.parse().unwrap()).collect::<Vec<_>>());
        ipam
    }

    #[test]
    fn gives_each_address_once_and_says_when_there_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let mut a = ipam(dir.path(), &["10.0.0.0/29"]);
        let mut got = Vec::new();
        for n in 0..5 {
            got.push(a.allocate(&format!("p{n}"), "ns", "n", &[]).unwrap().ips[0].to_string());
        }
        assert_eq!(got, ["10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6"]);
        assert!(matches!(a.allocate("p5", "ns", "n", &[]), Err(Error::Exhausted { .. })));
        a.release("p1").unwrap();
        assert_eq!(a.allocate("p6", "ns", "n", &[]).unwrap().ips[0].to_string(), "10.0.0.3");
    }

    #[test]
    fn a_new_process_knows_what_is_used_and_drops_what_is_half_written() {
        let dir = tempfile::tempdir().unwrap();
        let first = ipam(dir.path(), &["10.0.0.0/24", "fd00::/64"]).allocate("u", "ns", "n", &[]).unwrap();
        assert_eq!(first.ips.len(), 2);
        fs::write(dir.path().join("half.json"), b"{\"podUid\":").unwrap();
        fs::write(dir.path().join("other.new"), b"").unwrap();
        let again = ipam(dir.path(), &["10.0.0.0/24"]);
        assert_eq!(again.get("u"), Some(&first));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn host_ports_are_exclusive() {
        let dir = tempfile::tempdir().unwrap();
        let mut a = ipam(dir.path(), &["10.0.0.0/24"]);
        let port = HostPort { protocol: Protocol::Tcp, host_port: 80, container_port: 8080, host_ip: None };
        a.allocate("u", "ns", "web", std::slice::from_ref(&port)).unwrap();
        let error = a.allocate("v", "ns", "n", &[port]).unwrap_err().to_string();
        assert_eq!(error, "host port TCP/80 is already used by pod ns/web");
    }

    #[test]
    fn an_uid_cannot_leave_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let a = ipam(dir.path(), &["10.0.0.0/24"]);
        assert_eq!(a.file("../../etc/x").parent(), Some(dir.path()));
    }
}
