//! Packing endpoints into slices with as few writes as possible.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use k8s_openapi::api::discovery::v1::{Endpoint, EndpointPort, EndpointSlice};

/// Endpoints that may share a slice.
#[derive(Debug)]
pub struct Group {
    pub address_type: String,
    pub ports: Vec<EndpointPort>,
    pub endpoints: Vec<Endpoint>,
}

/// One write. The metadata of what is created is the caller's.
#[derive(Debug)]
pub enum Step {
    Create(Box<EndpointSlice>),
    Update(Box<EndpointSlice>),
    Delete(Arc<EndpointSlice>),
}

/// A key that is equal for equal sets of ports.
pub fn ports_key(ports: &[EndpointPort]) -> String {
    let one = |port: &EndpointPort| {
        format!(
            "{}/{}/{}/{}",
            port.name.as_deref().unwrap_or_default(),
            port.protocol.as_deref().unwrap_or("TCP"),
            port.port.map_or(String::new(), |number| number.to_string()),
            port.app_protocol.as_deref().unwrap_or_default()
        )
    };
    let mut all: Vec<String> = ports.iter().map(one).collect();
    all.sort();
    all.join(",")
}

/// What makes an endpoint the same endpoint.
fn identity(endpoint: &Endpoint) -> (Option<String>, String) {
    let uid = endpoint.target_ref.as_ref().and_then(|target| target.uid.clone());
    (uid, endpoint.addresses.first().cloned().unwrap_or_default())
}

fn slice(group: &Group, endpoints: Vec<Endpoint>) -> EndpointSlice {
    EndpointSlice {
        address_type: group.address_type.clone(),
        endpoints: Some(endpoints),
        ports: (!group.ports.is_empty()).then(|| group.ports.clone()),
        ..EndpointSlice::default()
    }
}

/// The writes that turn the existing slices of a service into the wanted groups: endpoints stay in the slice where they are,
/// new ones fill slices that are written anyway, then those with room.
pub fn plan(existing: &[Arc<EndpointSlice>], wanted: Vec<Group>, labels: &BTreeMap<String, String>, per_slice: usize) -> Vec<Step> {
    let mut by_group: HashMap<(String, String), Vec<Arc<EndpointSlice>>> = HashMap::new();
    let mut steps = Vec::new();
    for slice in existing.iter().filter(|slice| slice.metadata.deletion_timestamp.is_none()) {
        let key = (slice.address_type.clone(), ports_key(slice.ports.as_deref().unwrap_or_default()));
        by_group.entry(key).or_default().push(slice.clone());
    }
    for group in wanted {
        let key = (group.address_type.clone(), ports_key(&group.ports));
        let had = by_group.remove(&key).unwrap_or_default();
        steps.extend(plan_group(had, &group, labels, per_slice));
    }
    steps.extend(by_group.into_values().flatten().map(Step::Delete));
    // Make before break: readers never see less than there is.
    steps.sort_by_key(|step| match step {
        Step::Create(_) => 0,
        Step::Update(_) => 1,
        Step::Delete(_) => 2,
    });
    steps
}

fn plan_group(mut had: Vec<Arc<EndpointSlice>>, group: &Group, labels: &BTreeMap<String, String>, per_slice: usize) -> Vec<Step> {
    had.sort_by_key(|slice| slice.metadata.name.clone());
    let mut left: BTreeMap<_, Endpoint> = group.endpoints.iter().map(|endpoint| (identity(endpoint), endpoint.clone())).collect();
    let placeholder = left.is_empty();
    // What stays where it is.
    let mut kept: Vec<(Arc<EndpointSlice>, Vec<Endpoint>, bool)> = Vec::new();
    for slice in had {
        let had = slice.endpoints.as_deref().unwrap_or_default();
        let mut endpoints: Vec<Endpoint> = Vec::with_capacity(had.len());
        for endpoint in had {
            if endpoints.len() < per_slice
                && let Some(wanted) = left.remove(&identity(endpoint))
            {
                endpoints.push(wanted);
            }
        }
        let changed = endpoints != had || slice.metadata.labels.as_ref() != Some(labels);
        kept.push((slice, endpoints, changed));
    }
    // Fill those that are written anyway, then the fullest of the others.
    kept.sort_by_key(|(_, endpoints, changed)| (!*changed, std::cmp::Reverse(endpoints.len())));
    let mut rest = left.into_values();
    for (_, endpoints, changed) in &mut kept {
        let room = per_slice.saturating_sub(endpoints.len());
        let before = endpoints.len();
        endpoints.extend(rest.by_ref().take(room));
        *changed |= endpoints.len() != before;
    }
    let mut steps = Vec::new();
    let mut alive = 0;
    let total = kept.len();
    for (index, (slice, endpoints, changed)) in kept.into_iter().enumerate() {
        // One empty slice stays as the sign that nothing is there.
        let needed_as_sign = placeholder && alive == 0 && index + 1 == total;
        if endpoints.is_empty() && !needed_as_sign {
            steps.push(Step::Delete(slice));
            continue;
        }
        alive += 1;
        if changed {
            steps.push(Step::Update(Box::new(EndpointSlice { endpoints: Some(endpoints), ..(*slice).clone() })));
        }
    }
    let rest: Vec<Endpoint> = rest.collect();
    for chunk in rest.chunks(per_slice) {
        steps.push(Step::Create(Box::new(slice(group, chunk.to_vec()))));
        alive += 1;
    }
    if alive == 0 {
        steps.push(Step::Create(Box::new(slice(group, Vec::new()))));
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn endpoints(ips: &[&str]) -> Vec<Endpoint> {
        ips.iter().map(|ip| serde_json::from_value(json!({"addresses": [ip], "targetRef": {"uid": ip}})).expect("an endpoint")).collect()
    }

    fn existing(name: &str, port: i32, ips: &[&str]) -> Arc<EndpointSlice> {
        let mut slice: EndpointSlice = serde_json::from_value(json!({"metadata": {"name": name, "labels": {}}, "addressType": "IPv4", "endpoints": [], "ports": [{"port": port}]})).expect("a slice");
        slice.endpoints = Some(endpoints(ips));
        Arc::new(slice)
    }

    fn check(had: &[Arc<EndpointSlice>], wanted: &[(i32, &[&str])], expected: &[&str]) {
        let group = |(port, ips): &(i32, &[&str])| Group {
            address_type: "IPv4".into(),
            ports: vec![serde_json::from_value(json!({"port": port})).expect("a port")],
            endpoints: endpoints(ips),
        };
        let steps = plan(had, wanted.iter().map(group).collect(), &BTreeMap::new(), 3);
        let ips = |slice: &EndpointSlice| slice.endpoints.iter().flatten().map(|e| e.addresses[0].clone()).collect::<Vec<_>>().join(" ");
        let shown: Vec<String> = steps.iter().map(|step| match step {
            Step::Create(slice) => format!("+ {}", ips(slice)),
            Step::Update(slice) => format!("{}: {}", slice.metadata.name.as_deref().unwrap_or_default(), ips(slice)),
            Step::Delete(slice) => format!("- {}", slice.metadata.name.as_deref().unwrap_or_default()),
        }).collect();
        assert_eq!(shown, expected);
    }

    #[test]
    fn packing() {
        check(&[], &[(80, &["a", "b", "c", "d"])], &["+ a b c", "+ d"]);
        check(&[existing("s", 80, &["a", "b"])], &[(80, &["a", "b"])], &[]);
        check(&[existing("s", 80, &["a", "b"])], &[(80, &["a", "c"])], &["s: a c"]);
        // the new endpoint goes where a write happens anyway
        check(&[existing("s", 80, &["a", "b"]), existing("t", 80, &["c", "d"])], &[(80, &["a", "b", "c", "e"])], &["t: c e"]);
        check(&[existing("s", 80, &["a"]), existing("t", 80, &["b"])], &[(80, &["a"])], &["- t"]);
        check(&[existing("s", 80, &["a"])], &[(81, &["a"])], &["+ a", "- s"]);
        check(&[existing("s", 80, &["a"])], &[(80, &[])], &["s: "]);
        check(&[], &[(80, &[])], &["+ "]);
        check(&[existing("s", 80, &[])], &[(80, &[])], &[]);
        check(&[existing("s", 80, &[]), existing("t", 80, &[])], &[(80, &[])], &["- s"]);
    }
}
