//! Amounts of resources as flat numbers.

use std::collections::{BTreeMap, HashMap};
use std::sync::LazyLock;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use parking_lot::RwLock;
use smallvec::SmallVec;

use crate::object::{PodSpecView, ResourcesView};

/// What a container without a request counts as when nodes are scored, so that such pods are spread too.
pub const DEFAULT_CPU_MILLI: i64 = 100;
pub const DEFAULT_MEMORY: i64 = 200 << 20;

/// A resource beyond the common ones (`nvidia.com/gpu`, `hugepages-2Mi`), as a number: names are compared once, when an
/// object is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ScalarId(u32);

#[derive(Default)]
struct Names {
    by_name: HashMap<String, ScalarId>,
    names: Vec<String>,
}

static NAMES: LazyLock<RwLock<Names>> = LazyLock::new(RwLock::default);

impl ScalarId {
    /// Names are kept for the life of the process; they come from nodes and admitted pods, and are few.
    pub fn of(name: &str) -> Self {
        if let Some(id) = NAMES.read().by_name.get(name) {
            return *id;
        }
        let mut names = NAMES.write();
        let next = ScalarId(u32::try_from(names.names.len()).unwrap_or(u32::MAX));
        let id = *names.by_name.entry(name.to_owned()).or_insert(next);
        if id == next {
            names.names.push(name.to_owned());
        }
        id
    }

    pub fn name(self) -> String {
        NAMES.read().names.get(self.0 as usize).cloned().unwrap_or_default()
    }
}

/// Amounts: CPU in thousandths of a core, memory and storage in bytes, others in units. `pods` counts pods.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    pub cpu: i64,
    pub memory: i64,
    pub storage: i64,
    pub pods: i64,
    /// Sorted by id.
    pub scalars: SmallVec<[(ScalarId, i64); 2]>,
}

impl Resources {
    /// Unreadable quantities count as nothing: the API server admits none.
    pub fn parse(list: &BTreeMap<String, Quantity>) -> Self {
        let mut resources = Self::default();
        for (name, Quantity(text)) in list {
            let Ok(quantity) = text.parse::<windlass_api::quantity::Quantity>() else { continue };
            match name.as_str() {
                "cpu" => resources.cpu = quantity.milli_value(),
                "memory" => resources.memory = quantity.value(),
                "ephemeral-storage" => resources.storage = quantity.value(),
                "pods" => resources.pods = quantity.value(),
                other => resources.set_scalar(ScalarId::of(other), quantity.value()),
            }
        }
        resources
    }

    pub fn scalar(&self, id: ScalarId) -> i64 {
        self.scalars.iter().find(|(other, _)| *other == id).map_or(0, |(_, amount)| *amount)
    }

    fn set_scalar(&mut self, id: ScalarId, amount: i64) {
        match self.scalars.binary_search_by_key(&id, |(id, _)| *id) {
            Ok(at) => self.scalars[at].1 = amount,
            Err(at) => self.scalars.insert(at, (id, amount)),
        }
    }

    /// Adds `other` `sign` times (1 or -1).
    pub fn add(&mut self, other: &Self, sign: i64) {
        self.cpu += sign * other.cpu;
        self.memory += sign * other.memory;
        self.storage += sign * other.storage;
        self.pods += sign * other.pods;
        for (id, amount) in &other.scalars {
            self.set_scalar(*id, self.scalar(*id) + sign * amount);
        }
    }

    fn max(&mut self, other: &Self) {
        self.cpu = self.cpu.max(other.cpu);
        self.memory = self.memory.max(other.memory);
        self.storage = self.storage.max(other.storage);
        for (id, amount) in &other.scalars {
            self.set_scalar(*id, self.scalar(*id).max(*amount));
        }
    }
}

/// What a pod asks for, and the same with the defaults for containers that ask for no CPU or memory.
///
/// The larger of what runs together and of what each init step needs, sidecars included, plus overhead; pod-level
/// requests win over the containers' (KEP-753, KEP-2837).
pub fn pod_requests(spec: &PodSpecView) -> (Resources, Resources) {
    let requests = total(spec, &|view| Resources::parse(&view.requests));
    let non_zero = total(spec, &|view| {
        let mut resources = Resources::parse(&view.requests);
        if !view.requests.contains_key("cpu") {
            resources.cpu = DEFAULT_CPU_MILLI;
        }
        if !view.requests.contains_key("memory") {
            resources.memory = DEFAULT_MEMORY;
        }
        resources
    });
    (requests, non_zero)
}

fn total(spec: &PodSpecView, of: &dyn Fn(&ResourcesView) -> Resources) -> Resources {
    let mut sum = Resources::default();
    for container in &spec.containers {
        sum.add(&of(&container.resources), 1);
    }
    let (mut sidecars, mut peak) = (Resources::default(), Resources::default());
    for container in &spec.init_containers {
        let mut needs = of(&container.resources);
        if container.restart_policy.as_deref() == Some("Always") {
            sum.add(&needs, 1);
            sidecars.add(&needs, 1);
            needs = sidecars.clone();
        } else {
            needs.add(&sidecars, 1);
        }
        peak.max(&needs);
    }
    sum.max(&peak);
    if let Some(pod) = &spec.resources {
        let given = Resources::parse(&pod.requests);
        sum.cpu = if pod.requests.contains_key("cpu") { given.cpu } else { sum.cpu };
        sum.memory = if pod.requests.contains_key("memory") { given.memory } else { sum.memory };
        for (id, amount) in &given.scalars {
            sum.set_scalar(*id, *amount);
        }
    }
    sum.add(&Resources::parse(&spec.overhead), 1);
    sum.pods = 1;
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(spec: serde_json::Value, cpu: i64, memory: i64, non_zero: (i64, i64)) {
        let spec: PodSpecView = serde_json::from_value(spec).unwrap();
        let (requests, with_defaults) = pod_requests(&spec);
        assert_eq!((requests.cpu, requests.memory, requests.pods), (cpu, memory, 1));
        assert_eq!((with_defaults.cpu, with_defaults.memory), non_zero);
    }

    fn container(cpu: &str, memory: &str) -> serde_json::Value {
        serde_json::json!({ "resources": { "requests": { "cpu": cpu, "memory": memory } } })
    }

    fn sidecar(cpu: &str, memory: &str) -> serde_json::Value {
        let mut sidecar = container(cpu, memory);
        sidecar["restartPolicy"] = "Always".into();
        sidecar
    }

    #[test]
    fn requests_of_pods() {
        use serde_json::json;
        let two = json!([container("100m", "1Ki"), container("1", "1Ki")]);
        check(json!({ "containers": two }), 1100, 2048, (1100, 2048));
        check(json!({ "containers": [{}] }), 0, 0, (100, 200 << 20));
        check(json!({ "containers": two, "initContainers": [container("3", "1")] }), 3000, 2048, (3000, 2048));
        // The sidecar runs beside the later init container, and beside the containers.
        check(json!({ "containers": two, "initContainers": [sidecar("500m", "1"), container("3", "1")] }), 3500, 2049, (3500, 2049));
        check(json!({ "containers": two, "initContainers": [container("3", "1"), sidecar("500m", "1")] }), 3000, 2049, (3000, 2049));
        check(json!({ "containers": two, "overhead": { "cpu": "50m" } }), 1150, 2048, (1150, 2048));
        check(json!({ "containers": two, "resources": { "requests": { "cpu": "2" } } }), 2000, 2048, (2000, 2048));
    }
}
