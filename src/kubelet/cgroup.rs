//! Control groups of pods and containers: limits of a pod as a whole, and usage. cgroup v1 and v2.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::runtime::Resources;

const ROOT: &str = "/sys/fs/cgroup";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    V1,
    V2,
}

pub fn version() -> Version {
    if Path::new(ROOT).join("cgroup.controllers").exists() { Version::V2 } else { Version::V1 }
}

/// What a group of processes uses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usage {
    /// CPU time since the beginning, nanoseconds.
    pub cpu_nanos: u64,
    pub memory: u64,
    pub working_set: u64,
    pub rss: u64,
    pub page_faults: u64,
    pub major_faults: u64,
    /// 0 when unlimited.
    pub memory_limit: u64,
    pub swap: u64,
    pub processes: u64,
    pub oom_events: u64,
}

/// Where a process' groups are, by controller; with v2 under the name "".
pub fn of_process(pid: i32) -> io::Result<HashMap<String, PathBuf>> {
    Ok(parse(&fs::read_to_string(format!("/proc/{pid}/cgroup"))?, version()))
}

fn parse(text: &str, version: Version) -> HashMap<String, PathBuf> {
    let mut paths = HashMap::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let relative = path.trim_start_matches('/');
        match version {
            Version::V2 if controllers.is_empty() => {
                paths.insert(String::new(), Path::new(ROOT).join(relative));
            }
            Version::V1 => {
                for controller in controllers.split(',').filter(|c| !c.is_empty()) {
                    paths.insert(controller.to_owned(), Path::new(ROOT).join(controller).join(relative));
                }
            }
            Version::V2 => {}
        }
    }
    paths
}

/// The groups of a path such as a pod's parent, by controller.
pub fn of_path(path: &str) -> HashMap<String, PathBuf> {
    let relative = systemd_path(path);
    match version() {
        Version::V2 => HashMap::from([(String::new(), Path::new(ROOT).join(&relative))]),
        Version::V1 => ["cpu", "cpuacct", "memory", "pids"]
            .into_iter()
            .map(|c| (c.to_owned(), Path::new(ROOT).join(c).join(&relative)))
            .collect(),
    }
}

/// `a-b-c.slice` is the directory `a.slice/a-b.slice/a-b-c.slice`; other names are paths already.
fn systemd_path(path: &str) -> PathBuf {
    let Some(stem) = path.strip_suffix(".slice") else { return PathBuf::from(path.trim_start_matches('/')) };
    let mut out = PathBuf::new();
    let mut prefix = String::new();
    for part in stem.split('-') {
        if !prefix.is_empty() {
            prefix.push('-');
        }
        prefix.push_str(part);
        out.push(format!("{prefix}.slice"));
    }
    out
}

fn number(path: &Path) -> u64 {
    fs::read_to_string(path).ok().and_then(|t| t.trim().parse().ok()).unwrap_or(0)
}

fn stat(path: &Path) -> HashMap<String, u64> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|l| l.split_once(' ')).filter_map(|(k, v)| Some((k.to_owned(), v.trim().parse().ok()?))).collect()
}

/// The usage of the group at these paths; what cannot be read is 0.
pub fn usage(paths: &HashMap<String, PathBuf>) -> Usage {
    if let Some(dir) = paths.get("") { usage_v2(dir) } else { usage_v1(paths) }
}

/// The root group: the whole machine.
pub fn root_usage() -> Usage {
    usage(&of_path("/"))
}

fn usage_v2(dir: &Path) -> Usage {
    let cpu = stat(&dir.join("cpu.stat"));
    let memory = stat(&dir.join("memory.stat"));
    let get = |key: &str| memory.get(key).copied().unwrap_or(0);
    let used = number(&dir.join("memory.current"));
    Usage {
        cpu_nanos: cpu.get("usage_usec").copied().unwrap_or(0) * 1000,
        memory: used,
        working_set: used.saturating_sub(get("inactive_file")),
        rss: get("anon"),
        page_faults: get("pgfault"),
        major_faults: get("pgmajfault"),
        memory_limit: number(&dir.join("memory.max")),
        swap: number(&dir.join("memory.swap.current")),
        processes: number(&dir.join("pids.current")),
        oom_events: stat(&dir.join("memory.events")).get("oom_kill").copied().unwrap_or(0),
    }
}

fn usage_v1(paths: &HashMap<String, PathBuf>) -> Usage {
    let file = |controller: &str, name: &str| paths.get(controller).map(|p| p.join(name)).unwrap_or_default();
    let memory = stat(&file("memory", "memory.stat"));
    let get = |key: &str| memory.get(key).copied().unwrap_or(0);
    let used = number(&file("memory", "memory.usage_in_bytes"));
    let limit = number(&file("memory", "memory.limit_in_bytes"));
    Usage {
        cpu_nanos: number(&file("cpuacct", "cpuacct.usage")),
        memory: used,
        working_set: used.saturating_sub(get("total_inactive_file")),
        rss: get("total_rss"),
        page_faults: get("total_pgfault"),
        major_faults: get("total_pgmajfault"),
        // The kernel writes "no limit" as a number near 2^63.
        memory_limit: if limit > 1 << 60 { 0 } else { limit },
        swap: get("total_swap"),
        processes: number(&file("pids", "pids.current")),
        oom_events: stat(&file("memory", "memory.oom_control")).get("oom_kill").copied().unwrap_or(0),
    }
}

/// Sets the limits of a pod's group, made on demand by the runtime. Errors name the file.
pub fn apply(parent: &str, resources: &Resources) -> io::Result<()> {
    let paths = of_path(parent);
    let write = |path: PathBuf, value: String| {
        if path.parent().is_some_and(Path::exists) {
            fs::write(&path, &value).map_err(|e| io::Error::new(e.kind(), format!("{}: {value}: {e}", path.display())))
        } else {
            Ok(())
        }
    };
    let pids = if resources.pids > 0 { resources.pids.to_string() } else { "max".to_owned() };
    if let Some(dir) = paths.get("") {
        let weight = 1 + ((resources.cpu_shares.max(2) - 2) * 9999) / 262_142;
        write(dir.join("cpu.weight"), weight.to_string())?;
        let quota = if resources.cpu_quota > 0 { resources.cpu_quota.to_string() } else { "max".to_owned() };
        write(dir.join("cpu.max"), format!("{quota} {}", resources.cpu_period))?;
        let memory = if resources.memory > 0 { resources.memory.to_string() } else { "max".to_owned() };
        write(dir.join("memory.max"), memory)?;
        return write(dir.join("pids.max"), pids);
    }
    let file = |controller: &str, name: &str| paths.get(controller).map(|p| p.join(name)).unwrap_or_default();
    write(file("cpu", "cpu.shares"), resources.cpu_shares.to_string())?;
    if resources.cpu_quota > 0 {
        write(file("cpu", "cpu.cfs_period_us"), resources.cpu_period.to_string())?;
    }
    write(file("cpu", "cpu.cfs_quota_us"), if resources.cpu_quota > 0 { resources.cpu_quota } else { -1 }.to_string())?;
    write(file("memory", "memory.limit_in_bytes"), if resources.memory > 0 { resources.memory } else { -1 }.to_string())?;
    write(file("pids", "pids.max"), pids)
}

/// Removes an empty group and those below it; groups with processes stay.
pub fn remove(parent: &str) {
    let relative = systemd_path(parent);
    let roots: Vec<PathBuf> = match version() {
        Version::V2 => vec![PathBuf::from(ROOT)],
        Version::V1 => fs::read_dir(ROOT).map(|d| d.flatten().map(|e| e.path()).filter(|p| p.is_dir()).collect()).unwrap_or_default(),
    };
    for root in roots {
        remove_tree(&root.join(&relative));
    }
}

fn remove_tree(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())) {
        remove_tree(&entry.path());
    }
    // In use: it stays until its processes are gone.
    let _ = fs::remove_dir(dir);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_groups() {
        let v1 = parse("5:cpu,cpuacct:/kubepods/x\n4:memory:/kubepods/x\n0::/\n", Version::V1);
        assert_eq!(v1.get("cpuacct"), Some(&PathBuf::from("/sys/fs/cgroup/cpuacct/kubepods/x")));
        assert_eq!(v1.len(), 3);
        let v2 = parse("0::/kubepods.slice/x.scope\n", Version::V2);
        assert_eq!(v2.get(""), Some(&PathBuf::from("/sys/fs/cgroup/kubepods.slice/x.scope")));
    }

    #[test]
    fn slices() {
        let check = |path: &str, expected: &str| assert_eq!(systemd_path(path), PathBuf::from(expected));
        check("kubepods-burstable-podu_1.slice", "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podu_1.slice");
        check("/kubepods/podu", "kubepods/podu");
    }
}
