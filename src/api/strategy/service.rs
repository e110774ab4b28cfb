//! Services: ports, addresses, what each type may set. Addresses and node ports are allocated elsewhere.

use std::net::IpAddr;

use serde_json::{Value, json};

use crate::field::ErrorKind;
use crate::meta;
use crate::strategy::at::{At, default_at, default_text, get, items, items_mut, remove, same, set, text};
use crate::strategy::pod::containers::port_or_name;
use crate::strategy::rules::Rules;
use crate::strategy::{Context, names, objectmeta};

const TYPES: [&str; 4] = ["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"];
const IP_MSG: &str = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";
/// Longest session affinity, one day in seconds.
const MAX_AFFINITY: i64 = 86_400;
const DEFAULT_AFFINITY: i64 = 10_800;

/// Services.
pub static RULES: Rules = Rules {
    name: names::dns1123_label,
    create_on_update: true,
    defaults: &[|_, o| defaults(o)],
    create: &[|_, o| set(o, "status", json!({"loadBalancer": {}}))],
    update: &[|_, new, old| drop_type_dependent(new, old)],
    validate: &[validate],
    validate_update: &[validate_update],
    validate_status: &[|_, o, _| load_balancer_status(o)],
    ..Rules::STATUS
};

/// A service that can be reached from outside: its traffic policy counts.
pub fn externally_accessible(o: &Value) -> bool {
    match text(o, "spec.type") {
        "LoadBalancer" | "NodePort" => true,
        "ClusterIP" => !items(o, "spec.externalIPs").is_empty(),
        _ => false,
    }
}

/// A load balancer asks a port of its own whether a node has endpoints.
pub fn needs_health_check(o: &Value) -> bool {
    text(o, "spec.type") == "LoadBalancer" && text(o, "spec.externalTrafficPolicy") == "Local"
}

/// `clusterIP: None`.
pub fn is_headless(o: &Value) -> bool {
    let ips = items(o, "spec.clusterIPs");
    ips.len() == 1 && ips[0] == "None"
}

fn defaults(o: &mut Value) {
    let external = |o: &Value| externally_accessible(o);
    let Some(spec) = o.get_mut("spec").filter(|s| s.is_object()) else { return };
    default_text(spec, "sessionAffinity", "None");
    match text(spec, "sessionAffinity") {
        "None" => {
            remove(spec, "sessionAffinityConfig");
        }
        "ClientIP" => default_at(spec, "sessionAffinityConfig.clientIP.timeoutSeconds", DEFAULT_AFFINITY),
        _ => {}
    }
    default_text(spec, "type", "ClusterIP");
    for p in items_mut(spec, "ports") {
        default_text(p, "protocol", "TCP");
        let target = &p["targetPort"];
        if target.is_null() || target == 0 || target == "" {
            let port = p["port"].clone();
            set(p, "targetPort", port);
        }
    }
    // `clusterIP` and the first of `clusterIPs` are one.
    let ip = text(spec, "clusterIP").to_owned();
    if !ip.is_empty() && items(spec, "clusterIPs").is_empty() {
        set(spec, "clusterIPs", json!([ip]));
    } else if ip.is_empty() && text(spec, "type") != "ExternalName" {
        let first = items(spec, "clusterIPs").first().cloned().unwrap_or_default();
        set(spec, "clusterIP", first);
    }
    let kind = text(spec, "type").to_owned();
    if kind != "ExternalName" {
        default_at(spec, "internalTrafficPolicy", "Cluster");
    }
    if kind == "LoadBalancer" {
        default_at(spec, "allocateLoadBalancerNodePorts", true);
    }
    if external(o) {
        default_text(o, "spec.externalTrafficPolicy", "Cluster");
    }
    if kind == "LoadBalancer" {
        for i in items_mut(o, "status.loadBalancer.ingress") {
            if !text(i, "ip").is_empty() {
                default_at(i, "ipMode", "VIP");
            }
        }
    }
}

/// Values that the old type needed, the new one may not have, and that the writer left as they were.
fn drop_type_dependent(new: &mut Value, old: &Value) {
    let kind = |o: &Value| text(o, "spec.type").to_owned();
    let (now, was) = (kind(new), kind(old));
    let unchanged = |new: &Value, field: &str| same(get(new, field), get(old, field));
    if was != "ExternalName" && now == "ExternalName" {
        if unchanged(new, "spec.clusterIP") && unchanged(new, "spec.clusterIPs") {
            remove(new, "spec.clusterIP");
            remove(new, "spec.clusterIPs");
        }
        for field in ["spec.ipFamilies", "spec.ipFamilyPolicy"] {
            if unchanged(new, field) {
                remove(new, field);
            }
        }
    }
    if was != "ExternalName" && now == "ExternalName" && unchanged(new, "spec.internalTrafficPolicy") {
        remove(new, "spec.internalTrafficPolicy");
    }
    // Clients that know one address only change that.
    if !unchanged(new, "spec.clusterIP") && unchanged(new, "spec.clusterIPs") && !items(new, "spec.clusterIPs").is_empty() {
        match get(new, "spec.clusterIP").clone() {
            ip if super::at::is_empty(&ip) => drop(remove(new, "spec.clusterIPs")),
            ip => set(new, "spec.clusterIPs", json!([ip])),
        }
    }
    // An update that names no address keeps the one it has.
    if was != "ExternalName" && now != "ExternalName" {
        for field in ["spec.clusterIP", "spec.clusterIPs", "spec.ipFamilies", "spec.ipFamilyPolicy"] {
            if super::at::is_empty(get(new, field)) && !super::at::is_empty(get(old, field)) {
                set(new, field, get(old, field).clone());
            }
        }
    }
    let needs_port = |k: &str| matches!(k, "NodePort" | "LoadBalancer");
    if needs_port(&was) && !needs_port(&now) {
        let ports = |o: &Value| -> Vec<i64> {
            items(o, "spec.ports").iter().filter_map(|p| p["nodePort"].as_i64()).filter(|p| *p != 0).collect()
        };
        let had = ports(old);
        if ports(new).iter().all(|p| had.contains(p)) {
            for p in items_mut(new, "spec.ports") {
                remove(p, "nodePort");
            }
        }
    }
    if needs_port(&was) && needs_port(&now) {
        keep_node_ports(new, old);
    }
    if needs_health_check(old) && !needs_health_check(new) && unchanged(new, "spec.healthCheckNodePort") {
        remove(new, "spec.healthCheckNodePort");
    }
    if needs_health_check(old) && needs_health_check(new) && get(new, "spec.healthCheckNodePort").as_i64().unwrap_or(0) == 0
    {
        set(new, "spec.healthCheckNodePort", get(old, "spec.healthCheckNodePort").clone());
    }
    if was == "LoadBalancer" && now != "LoadBalancer" {
        for field in ["spec.allocateLoadBalancerNodePorts", "spec.loadBalancerClass"] {
            if unchanged(new, field) {
                remove(new, field);
            }
        }
    }
    if externally_accessible(old) && !externally_accessible(new) && unchanged(new, "spec.externalTrafficPolicy") {
        remove(new, "spec.externalTrafficPolicy");
    }
    if now != "LoadBalancer" && !get(new, "status").is_null() {
        set(new, "status.loadBalancer", json!({}));
    }
}

/// Ports without a node port take the one that the same port had.
fn keep_node_ports(new: &mut Value, old: &Value) {
    let used: Vec<i64> = items(new, "spec.ports").iter().filter_map(|p| p["nodePort"].as_i64()).collect();
    for p in items_mut(new, "spec.ports") {
        if p["nodePort"].as_i64().unwrap_or(0) != 0 {
            continue;
        }
        let had = items(old, "spec.ports")
            .iter()
            .find(|o| o["port"] == p["port"] && text(o, "protocol") == text(p, "protocol"))
            .and_then(|o| o["nodePort"].as_i64());
        if let Some(port) = had.filter(|port| *port != 0 && !used.contains(port)) {
            set(p, "nodePort", port.into());
        }
    }
}

fn validate(_: &Context<'_>, o: &At<'_>) {
    let spec = o.at("spec");
    let kind = spec.text("type");
    let headless = is_headless(o.value);
    let ports = spec.at("ports");
    if ports.is_empty() && !headless && kind != "ExternalName" {
        ports.required("");
    }
    by_type(&spec, kind, headless);
    ports_list(&ports, kind);
    objectmeta::labels(&spec.at("selector"));
    affinity(&spec);
    addresses(&spec, kind, headless);
    spec.at("externalIPs").each(|ip| match ip.str().parse::<IpAddr>() {
        Err(_) => ip.invalid(IP_MSG),
        Ok(addr) => endpoint_ip(ip, addr),
    });
    spec.at("type").one_of(&TYPES);
    load_balancer(o, &spec, kind);
    traffic(o.value, &spec, kind);
}

fn by_type(spec: &At<'_>, kind: &str, headless: bool) {
    match kind {
        "LoadBalancer" | "NodePort" if headless => {
            let ips = spec.at("clusterIPs");
            if let Some(first) = ips.items().next() {
                first.invalid(format!("may not be set to 'None' for {kind} services"));
            }
        }
        "ExternalName" => {
            for field in ["clusterIPs", "ipFamilies", "ipFamilyPolicy"] {
                if !spec.at(field).is_empty() {
                    spec.at(field).forbidden("may not be set for ExternalName services");
                }
            }
            let name = spec.at("externalName");
            let cname = name.str().strip_suffix('.').unwrap_or(name.str());
            if cname.is_empty() {
                name.required("");
            } else {
                for msg in names::dns1123_subdomain(cname) {
                    name.invalid_value(cname, msg);
                }
            }
        }
        _ => {}
    }
}

fn ports_list(ports: &At<'_>, kind: &str) {
    let many = ports.len() > 1;
    let mut seen: Vec<String> = Vec::new();
    let mut node_ports: Vec<(String, i64)> = Vec::new();
    let mut pairs: Vec<(String, i64)> = Vec::new();
    for p in ports.items() {
        let name = p.at("name");
        if name.is_empty() {
            if many {
                name.required("");
            }
        } else {
            name.syntax(names::dns1123_label);
            if seen.iter().any(|s| s == name.str()) {
                name.duplicate();
            }
            seen.push(name.str().to_owned());
        }
        let port = p.at("port");
        let number = port.int().unwrap_or(0);
        if let Some(msg) = names::port_number(number) {
            port.invalid_value(number, msg);
        }
        p.at("protocol").one_of(&["SCTP", "TCP", "UDP"]);
        if p.has("targetPort") {
            port_or_name(&p.at("targetPort"));
        }
        let app = p.at("appProtocol");
        if app.present() {
            app.syntax(names::qualified_name);
        }
        let protocol = p.text("protocol").to_owned();
        let node = p.at("nodePort");
        if let Some(n) = node.int().filter(|n| *n != 0) {
            if kind == "ClusterIP" {
                node.forbidden("may not be used when `type` is 'ClusterIP'");
            }
            if node_ports.contains(&(protocol.clone(), n)) {
                node.duplicate();
            }
            node_ports.push((protocol.clone(), n));
        }
        if pairs.contains(&(protocol.clone(), number)) {
            p.error(ErrorKind::Duplicate, Some(json!({"protocol": protocol, "port": number})), "");
        }
        pairs.push((protocol, number));
    }
}

fn affinity(spec: &At<'_>) {
    let (mode, config) = (spec.at("sessionAffinity"), spec.at("sessionAffinityConfig"));
    mode.one_of(&["ClientIP", "None"]);
    match mode.str() {
        "ClientIP" => {
            let timeout = config.at("clientIP.timeoutSeconds");
            match timeout.int() {
                None => timeout.required("when session affinity type is ClientIP"),
                Some(n) if n <= 0 || n > MAX_AFFINITY => {
                    timeout.invalid(format!("must be greater than 0 and less than {MAX_AFFINITY}"));
                }
                Some(_) => {}
            }
        }
        "None" if config.present() => config.forbidden("must not be set when session affinity is None"),
        _ => {}
    }
}

fn addresses(spec: &At<'_>, kind: &str, headless: bool) {
    if kind == "ExternalName" {
        return;
    }
    let ips = spec.at("clusterIPs");
    let first = spec.text("clusterIP");
    let listed: Vec<&str> = ips.value.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    match (first.is_empty(), listed.first()) {
        (false, None) => ips.required(""),
        (false, Some(l)) if *l != first => ips.invalid("first value must match `clusterIP`"),
        (true, Some(_)) => ips.invalid("must be empty when `clusterIP` is not specified"),
        _ => {}
    }
    let families = spec.at("ipFamilies");
    let mut seen: Vec<String> = Vec::new();
    for f in families.items() {
        f.optional_one_of(&["IPv4", "IPv6"]);
        if seen.iter().any(|s| s == f.str()) {
            f.duplicate();
        }
        seen.push(f.str().to_owned());
    }
    spec.at("ipFamilyPolicy").optional_one_of(&["PreferDualStack", "RequireDualStack", "SingleStack"]);
    let mut parsed = Vec::new();
    for (i, ip) in ips.items().enumerate() {
        if i == 0 && ip.str() == "None" {
            if listed.len() > 1 {
                ips.invalid("'None' must be the first and only value");
            }
            return;
        }
        match ip.str().parse::<IpAddr>() {
            Err(_) => ip.invalid(IP_MSG),
            Ok(addr) => parsed.push(addr),
        }
    }
    if listed.len() > 2 {
        ips.invalid("may only hold up to 2 values");
    }
    if let [a, b] = parsed.as_slice()
        && a.is_ipv4() == b.is_ipv4()
    {
        ips.invalid("may specify no more than one IP for each IP family");
    }
    if headless {
        return;
    }
    for (i, (ip, family)) in ips.items().zip(families.items()).enumerate() {
        let v4 = !ip.str().contains(':');
        match family.str() {
            "IPv4" if !v4 => ip.invalid(format!("expected an IPv4 value as indicated by `ipFamilies[{i}]`")),
            "IPv6" if v4 => ip.invalid(format!("expected an IPv6 value as indicated by `ipFamilies[{i}]`")),
            _ => {}
        }
    }
}

/// An address traffic can be sent to.
pub fn endpoint_ip(at: &At<'_>, ip: IpAddr) {
    let link_local = match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    let link_local_multicast = match ip {
        IpAddr::V4(v4) => v4.octets()[..3] == [224, 0, 0],
        IpAddr::V6(v6) => v6.segments()[0] & 0xff0f == 0xff02,
    };
    if ip.is_unspecified() {
        at.invalid(format!("may not be unspecified ({ip})"));
    }
    if ip.is_loopback() {
        at.invalid("may not be in the loopback range (127.0.0.0/8, ::1/128)");
    }
    if link_local {
        at.invalid("may not be in the link-local range (169.254.0.0/16, fe80::/10)");
    }
    if link_local_multicast {
        at.invalid("may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)");
    }
}

fn cidr(text: &str) -> bool {
    let Some((ip, len)) = text.trim().split_once('/') else { return false };
    let max = match ip.parse::<IpAddr>() {
        Ok(IpAddr::V4(_)) => 32,
        Ok(IpAddr::V6(_)) => 128,
        Err(_) => return false,
    };
    len.parse::<u8>().is_ok_and(|n| n <= max)
}

fn load_balancer(o: &At<'_>, spec: &At<'_>, kind: &str) {
    const ONLY: &str = "may only be used when `type` is 'LoadBalancer'";
    const RANGES: &str = "service.beta.kubernetes.io/load-balancer-source-ranges";
    let ranges = spec.at("loadBalancerSourceRanges");
    if !ranges.is_empty() {
        let shown = spec.at("LoadBalancerSourceRanges");
        let shown = shown.with(ranges.value);
        if kind != "LoadBalancer" {
            shown.forbidden(ONLY);
        }
        for r in shown.items() {
            if !cidr(r.str()) {
                r.invalid("must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)");
            }
        }
    } else if let Some(list) = meta::annotation(o.value, RANGES) {
        let at = o.at("metadata.annotations");
        let at = at.key(RANGES);
        if kind != "LoadBalancer" {
            at.forbidden(ONLY);
        }
        for r in list.split(',').filter(|r| !r.trim().is_empty()) {
            if !cidr(r) {
                at.invalid_value(r.trim(), "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)");
            }
        }
    }
    let allocate = spec.at("allocateLoadBalancerNodePorts");
    if allocate.present() && kind != "LoadBalancer" {
        allocate.forbidden(ONLY);
    }
    let class = spec.at("loadBalancerClass");
    if class.present() {
        if kind == "LoadBalancer" {
            class.syntax(names::qualified_name);
        } else {
            class.forbidden(ONLY);
        }
    }
}

fn traffic(o: &Value, spec: &At<'_>, kind: &str) {
    let external = spec.at("externalTrafficPolicy");
    if externally_accessible(o) {
        external.one_of(&["Cluster", "Local"]);
    } else if !external.is_empty() {
        external.invalid("may only be set for externally-accessible services");
    }
    let health = spec.at("healthCheckNodePort");
    match (needs_health_check(o), health.int().unwrap_or(0)) {
        (false, n) if n != 0 => health
            .invalid("may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'"),
        (true, 0) => health.required(""),
        (true, n) => {
            if let Some(msg) = names::port_number(n) {
                health.invalid(msg);
            }
        }
        _ => {}
    }
    let internal = spec.at("internalTrafficPolicy");
    if internal.present() {
        internal.one_of(&["Cluster", "Local"]);
    } else if matches!(kind, "NodePort" | "LoadBalancer" | "ClusterIP") {
        internal.required("");
    }
    spec.at("trafficDistribution").optional_one_of(&["PreferClose", "PreferSameZone", "PreferSameNode"]);
}

fn validate_update(_: &Context<'_>, o: &At<'_>, old: &Value) {
    let spec = o.at("spec");
    let (now, was) = (spec.text("type"), text(old, "spec.type"));
    if now != "ExternalName" && was != "ExternalName" {
        let (new_headless, old_headless) = (is_headless(o.value), is_headless(old));
        if !(new_headless && old_headless) {
            list_update(&spec, "clusterIPs", items(old, "spec.clusterIPs"), "primary clusterIP can not be unset", "secondary clusterIP");
        }
        if !new_headless && !old_headless {
            list_update(&spec, "ipFamilies", items(old, "spec.ipFamilies"), "primary ipFamily can not be unset", "secondary ipFamily");
        }
    }
    if now == "LoadBalancer" && was == "LoadBalancer" {
        let class = spec.at("loadBalancerClass");
        if !same(class.value, get(old, "spec.loadBalancerClass")) {
            class.invalid("may not change once set");
        }
    }
    if needs_health_check(old)
        && needs_health_check(o.value)
        && !same(spec.at("healthCheckNodePort").value, get(old, "spec.healthCheckNodePort"))
    {
        spec.at("healthCheckNodePort").forbidden("field is immutable");
    }
}

/// The first of the list stays; a second may come, and go with an explicit policy.
fn list_update(spec: &At<'_>, field: &str, old: &[Value], unset: &str, second: &str) {
    let at = spec.at(field);
    let new = items(spec.value, field);
    let index = |i: usize, msg: &str| {
        let path = format!("{}[{i}]", at.path());
        at.push(crate::field::FieldError::invalid(path, at.value.clone(), msg));
    };
    if new.is_empty() && !old.is_empty() {
        return index(0, unset);
    }
    let common = new.len().min(old.len());
    let checked = if new.len() == old.len() { common } else { common.min(1) };
    for i in 0..checked {
        if new[i] != old[i] {
            index(i, "may not change once set");
        }
    }
    if old.len() > new.len() && new.len() == 1 && spec.text("ipFamilyPolicy") != "SingleStack" {
        spec.at("ipFamilyPolicy").invalid(format!("must be set to 'SingleStack' when releasing the {second}"));
    }
}

fn load_balancer_status(o: &At<'_>) {
    let ingress = o.at("status.loadBalancer.ingress");
    if o.text("spec.type") != "LoadBalancer" {
        if !ingress.is_empty() {
            ingress.forbidden("may only be used when `spec.type` is 'LoadBalancer'");
        }
        return;
    }
    for i in ingress.items() {
        let (ip, mode, host) = (i.at("ip"), i.at("ipMode"), i.at("hostname"));
        if !ip.is_empty() && ip.str().parse::<IpAddr>().is_err() {
            ip.invalid(IP_MSG);
        }
        match (mode.present(), ip.is_empty()) {
            (false, false) => mode.required("must be specified when `ip` is set"),
            (true, true) => mode.forbidden("may not be specified when `ip` is not set"),
            (true, false) => mode.one_of(&["Proxy", "VIP"]),
            (false, true) => {}
        }
        if !host.is_empty() {
            host.syntax(names::dns1123_subdomain);
            if host.str().parse::<IpAddr>().is_ok() {
                host.invalid("must be a DNS name, not an IP address");
            }
        }
    }
}
