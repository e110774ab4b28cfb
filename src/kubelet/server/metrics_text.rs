//! `/metrics/resource`, `/metrics/cadvisor` and `/metrics/probes`: Prometheus text, made on demand from control groups.

use std::fmt::Write as _;

use http::header;

use super::{Answer, text};
use crate::cgroup::{self, Usage};
use crate::pod::model;
use crate::runtime::Container;
use crate::shared::{Shared, View};

pub fn answer(body: String) -> Answer {
    let mut answer = text(http::StatusCode::OK, body);
    answer.headers_mut().insert(header::CONTENT_TYPE, http::HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"));
    answer
}

#[derive(Default)]
struct Page {
    text: String,
    last: &'static str,
}

impl Page {
    /// All samples of one metric must be written together.
    fn sample(&mut self, name: &'static str, kind: &str, help: &str, labels: &[(&str, &str)], value: f64) {
        if self.last != name {
            self.last = name;
            // Writing to a String cannot fail.
            let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        }
        let escape = |v: &str| v.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let list: Vec<String> = labels.iter().map(|(k, v)| format!("{k}=\"{}\"", escape(v))).collect();
        let braces = if list.is_empty() { String::new() } else { format!("{{{}}}", list.join(",")) };
        let _ = writeln!(self.text, "{name}{braces} {value}");
    }
}

struct Reading<'a> {
    view: &'a View,
    container: &'a Container,
    usage: Usage,
    cgroup: String,
}

fn readings(views: &[View]) -> Vec<Reading<'_>> {
    let mut list = Vec::new();
    for view in views {
        for container in view.containers.iter().filter(|c| c.running()) {
            if let Ok(paths) = cgroup::of_process(container.pid) {
                let cgroup = paths.get("").or(paths.get("memory")).map(|p| p.display().to_string()).unwrap_or_default();
                let cgroup = cgroup.trim_start_matches("/sys/fs/cgroup").trim_start_matches("/memory").to_owned();
                list.push(Reading { view, container, usage: cgroup::usage(&paths), cgroup });
            }
        }
    }
    list
}

fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

pub fn resource(shared: &Shared) -> String {
    let views = shared.table.views();
    let all = readings(&views);
    let mut page = Page::default();
    let containers: Vec<&Reading<'_>> = all.iter().filter(|r| !r.container.is_sandbox()).collect();
    let labels = |r: &Reading<'_>| [("container", r.container.name.clone()), ("namespace", model::namespace(&r.view.pod).to_owned()), ("pod", model::name(&r.view.pod).to_owned())];
    let mut each = |name: &'static str, kind: &str, help: &str, value: &dyn Fn(&Reading<'_>) -> f64| {
        for reading in &containers {
            let owned = labels(reading);
            let labels: Vec<(&str, &str)> = owned.iter().map(|(k, v)| (*k, v.as_str())).collect();
            page.sample(name, kind, help, &labels, value(reading));
        }
    };
    each("container_cpu_usage_seconds_total", "counter", "Cumulative cpu time consumed by the container in core-seconds", &|r| seconds(r.usage.cpu_nanos));
    each("container_memory_working_set_bytes", "gauge", "Current working set of the container in bytes", &|r| r.usage.working_set as f64);
    each("container_start_time_seconds", "gauge", "Start time of the container since unix epoch in seconds", &|r| r.container.started_at.map_or(0.0, |t| t.as_millisecond() as f64 / 1e3));
    each("container_swap_usage_bytes", "gauge", "Current amount of the container swap usage in bytes. Reported only on non-windows systems", &|r| r.usage.swap as f64);
    let root = cgroup::root_usage();
    page.sample("node_cpu_usage_seconds_total", "counter", "Cumulative cpu time consumed by the node in core-seconds", &[], seconds(root.cpu_nanos));
    page.sample("node_memory_working_set_bytes", "gauge", "Current working set of the node in bytes", &[], root.working_set as f64);
    let pods: Vec<&View> = views.iter().filter(|v| v.sandbox().is_some()).collect();
    let sum = |v: &View, f: &dyn Fn(&Usage) -> u64| all.iter().filter(|r| model::uid(&r.view.pod) == model::uid(&v.pod)).map(|r| f(&r.usage)).sum::<u64>();
    for view in &pods {
        let labels = [("namespace", model::namespace(&view.pod)), ("pod", model::name(&view.pod))];
        page.sample("pod_cpu_usage_seconds_total", "counter", "Cumulative cpu time consumed by the pod in core-seconds", &labels, seconds(sum(view, &|u| u.cpu_nanos)));
    }
    for view in &pods {
        let labels = [("namespace", model::namespace(&view.pod)), ("pod", model::name(&view.pod))];
        page.sample("pod_memory_working_set_bytes", "gauge", "Current working set of the pod in bytes", &labels, sum(view, &|u| u.working_set) as f64);
    }
    page.sample("resource_scrape_error", "gauge", "1 if there was an error while getting container metrics, 0 otherwise", &[], 0.0);
    page.text
}

pub fn cadvisor(shared: &Shared) -> String {
    let views = shared.table.views();
    let all = readings(&views);
    let mut page = Page::default();
    let scheme = shared.runtime.scheme();
    let labels = |r: &Reading<'_>| {
        let name = if r.container.is_sandbox() { "" } else { r.container.name.as_str() };
        [
            ("container", name.to_owned()),
            ("id", r.cgroup.clone()),
            ("image", r.container.image.clone()),
            ("name", format!("{scheme}://{}", r.container.id)),
            ("namespace", model::namespace(&r.view.pod).to_owned()),
            ("pod", model::name(&r.view.pod).to_owned()),
        ]
    };
    let mut each = |name: &'static str, kind: &str, help: &str, value: &dyn Fn(&Reading<'_>) -> f64| {
        for reading in &all {
            let owned = labels(reading);
            let mut labels: Vec<(&str, &str)> = owned.iter().map(|(k, v)| (*k, v.as_str())).collect();
            if name == "container_cpu_usage_seconds_total" {
                labels.insert(1, ("cpu", "total"));
            }
            page.sample(name, kind, help, &labels, value(reading));
        }
    };
    each("container_cpu_usage_seconds_total", "counter", "Cumulative cpu time consumed in seconds.", &|r| seconds(r.usage.cpu_nanos));
    each("container_memory_usage_bytes", "gauge", "Current memory usage in bytes, including all memory regardless of when it was accessed", &|r| r.usage.memory as f64);
    each("container_memory_working_set_bytes", "gauge", "Current working set in bytes.", &|r| r.usage.working_set as f64);
    each("container_memory_rss", "gauge", "Size of RSS in bytes.", &|r| r.usage.rss as f64);
    each("container_memory_swap", "gauge", "Container swap usage in bytes.", &|r| r.usage.swap as f64);
    each("container_spec_memory_limit_bytes", "gauge", "Memory limit for the container.", &|r| r.usage.memory_limit as f64);
    each("container_processes", "gauge", "Number of processes running inside the container.", &|r| r.usage.processes as f64);
    each("container_oom_events_total", "counter", "Count of out of memory events observed for the container", &|r| r.usage.oom_events as f64);
    each("container_start_time_seconds", "gauge", "Start time of the container since unix epoch in seconds.", &|r| r.container.started_at.map_or(0.0, |t| t.as_second() as f64));
    let now = jiff::Timestamp::now().as_second() as f64;
    each("container_last_seen", "gauge", "Last time a container was seen by the exporter", &|_| now);
    network(&mut page, &views);
    page.sample("machine_cpu_cores", "gauge", "Number of logical CPU cores.", &[("boot_id", &shared.machine.boot_id), ("machine_id", &shared.machine.machine_id), ("system_uuid", &shared.machine.system_uuid)], (shared.machine.milli_cpu / 1000) as f64);
    page.sample("machine_memory_bytes", "gauge", "Amount of memory installed on the machine.", &[("boot_id", &shared.machine.boot_id), ("machine_id", &shared.machine.machine_id), ("system_uuid", &shared.machine.system_uuid)], shared.machine.memory as f64);
    page.text
}

fn network(page: &mut Page, views: &[View]) {
    let series: [(&'static str, &str, usize); 4] = [
        ("container_network_receive_bytes_total", "Cumulative count of bytes received", 0),
        ("container_network_receive_errors_total", "Cumulative count of errors encountered while receiving", 1),
        ("container_network_transmit_bytes_total", "Cumulative count of bytes transmitted", 2),
        ("container_network_transmit_errors_total", "Cumulative count of errors encountered while transmitting", 3),
    ];
    for (name, help, index) in series {
        for view in views.iter().filter(|v| !model::host_network(&v.pod)) {
            let Some(sandbox) = view.sandbox() else { continue };
            for (interface, counters) in super::stats::sandbox_interfaces(sandbox) {
                let labels = [("interface", interface.as_str()), ("namespace", model::namespace(&view.pod)), ("pod", model::name(&view.pod))];
                page.sample(name, "counter", help, &labels, counters[index] as f64);
            }
        }
    }
}

/// The probe counters alone.
pub fn probes() -> String {
    let (_, text) = windlass_daemon::metrics::encode();
    let all = String::from_utf8_lossy(&text);
    let mut out = String::new();
    for line in all.lines() {
        let name = line.trim_start_matches("# HELP ").trim_start_matches("# TYPE ");
        if name.starts_with("prober_") {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_format() {
        let mut page = Page::default();
        page.sample("a_total", "counter", "A.", &[("x", "q\"\\")], 1.0);
        page.sample("a_total", "counter", "A.", &[("x", "z")], 2.5);
        page.sample("b", "gauge", "B.", &[], 0.0);
        assert_eq!(page.text, "# HELP a_total A.\n# TYPE a_total counter\na_total{x=\"q\\\"\\\\\"} 1\na_total{x=\"z\"} 2.5\n# HELP b B.\n# TYPE b gauge\nb 0\n");
    }
}
