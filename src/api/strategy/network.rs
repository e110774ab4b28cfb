//! Ingress, IngressClass, NetworkPolicy, EndpointSlice, ServiceCIDR, IPAddress.

use std::net::IpAddr;

use serde_json::{Value, json};

use crate::strategy::at::{At, default_at, get, items, items_mut, same, set, text};
use crate::strategy::pod::containers::port_number;
use crate::strategy::rules::Rules;
use crate::strategy::{Context, names, selectors, service};

const IP_MSG: &str = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";
const CIDR_MSG: &str = "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)";
const CLASS_ANNOTATION: &str = "kubernetes.io/ingress.class";

/// An address and its prefix length.
fn parse_cidr(text: &str) -> Option<(IpAddr, u8)> {
    let (ip, len) = text.split_once('/')?;
    let ip: IpAddr = ip.parse().ok()?;
    let len: u8 = len.parse().ok()?;
    (len <= if ip.is_ipv4() { 32 } else { 128 }).then_some((ip, len))
}

fn bits(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(v4) => u128::from(v4.to_bits()) << 96,
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

/// Whether the second is a strict part of the first.
fn strictly_inside(outer: (IpAddr, u8), inner: (IpAddr, u8)) -> bool {
    if outer.0.is_ipv4() != inner.0.is_ipv4() || outer.1 >= inner.1 {
        return false;
    }
    outer.1 == 0 || (bits(outer.0) ^ bits(inner.0)) >> (128 - u32::from(outer.1)) == 0
}

// === Ingress ===

/// Ingresses.
pub static INGRESS: Rules = Rules {
    validate: &[ingress],
    validate_status: &[|_, o, _| {
        for i in o.at("status.loadBalancer.ingress").items() {
            let (ip, host) = (i.at("ip"), i.at("hostname"));
            if !ip.is_empty() && ip.str().parse::<IpAddr>().is_err() {
                ip.invalid(IP_MSG);
            }
            if !host.is_empty() {
                host.syntax(names::dns1123_subdomain);
                if host.str().parse::<IpAddr>().is_ok() {
                    host.invalid("must be a DNS name, not an IP address");
                }
            }
        }
    }],
    warnings: &[|o, out| {
        if crate::meta::annotation(o, CLASS_ANNOTATION).is_some() {
            out.push(format!(
                "annotation {CLASS_ANNOTATION:?} is deprecated, please use 'spec.ingressClassName' instead"
            ));
        }
    }],
    ..Rules::SPEC_STATUS
};

fn ingress(_: &Context<'_>, o: &At<'_>) {
    let spec = o.at("spec");
    let (rules, backend) = (spec.at("rules"), spec.at("defaultBackend"));
    if rules.is_empty() && !backend.present() {
        spec.invalid_value(json!([]), "either `defaultBackend` or `rules` must be specified");
    }
    if backend.present() {
        ingress_backend(&backend);
    }
    for rule in rules.items() {
        let host = rule.at("host");
        if !host.is_empty() {
            if host.str().parse::<IpAddr>().is_ok() {
                host.invalid("must be a DNS name, not an IP address");
            }
            ingress_host(&host);
        }
        let http = rule.at("http");
        if http.present() {
            if http.at("paths").is_empty() {
                http.at("paths").required("");
            }
            for p in http.at("paths").items() {
                ingress_path(&p);
            }
        }
    }
    for tls in spec.at("tls").items() {
        tls.at("hosts").each(ingress_host);
        let secret = tls.at("secretName");
        if !secret.is_empty() {
            secret.syntax(names::dns1123_subdomain);
        }
    }
    let class = spec.at("ingressClassName");
    if class.present() {
        class.syntax(names::dns1123_subdomain);
        let annotation = crate::meta::annotation(o.value, CLASS_ANNOTATION);
        if let Some(a) = annotation.filter(|a| *a != class.str() && !o.has("metadata.resourceVersion")) {
            o.push(crate::field::FieldError::invalid(
                format!("annotations.{CLASS_ANNOTATION}"),
                a,
                "must match `ingressClassName` when both are specified",
            ));
        }
    }
}

fn ingress_host(at: &At<'_>) {
    if at.str().contains('*') {
        at.syntax(names::wildcard_subdomain);
    } else {
        at.syntax(names::dns1123_subdomain);
    }
}

fn ingress_path(p: &At<'_>) {
    let (kind, path) = (p.at("pathType"), p.at("path"));
    if !kind.present() {
        return kind.required("pathType must be specified");
    }
    match kind.str() {
        "Exact" | "Prefix" => {
            if !path.str().starts_with('/') {
                path.invalid_value(path.str(), "must be an absolute path");
            }
            for s in ["//", "/./", "/../", "%2f", "%2F"] {
                if path.str().contains(s) {
                    path.invalid(format!("must not contain '{s}'"));
                }
            }
            for s in ["/..", "/."] {
                if path.str().ends_with(s) {
                    path.invalid(format!("cannot end with '{s}'"));
                }
            }
        }
        "ImplementationSpecific" => {
            if !path.is_empty() && !path.str().starts_with('/') {
                path.invalid("must be an absolute path");
            }
        }
        _ => kind.not_supported(&["Exact", "ImplementationSpecific", "Prefix"]),
    }
    ingress_backend(&p.at("backend"));
}

fn ingress_backend(b: &At<'_>) {
    let (resource, svc) = (b.at("resource"), b.at("service"));
    match (resource.present(), svc.present()) {
        (true, true) => b.invalid_value("", "cannot set both resource and service backends"),
        (true, false) => typed_reference(&resource),
        (false, true) => {
            let name = svc.at("name");
            if name.require() {
                name.syntax(names::dns1123_label);
            }
            let (port_name, number) = (svc.at("port.name"), svc.at("port.number"));
            match (port_name.is_empty(), number.int().unwrap_or(0)) {
                (false, 0) => port_name.syntax(names::port_name),
                (false, _) => b.invalid_value("", "cannot set both port name & port number"),
                (true, 0) => b.required("port name or number is required"),
                (true, n) => port_number(&number, n),
            }
        }
        (false, false) => b.invalid_value("", "resource or service backend is required"),
    }
}

fn typed_reference(r: &At<'_>) {
    let group = r.at("apiGroup");
    if group.present() {
        group.syntax(names::dns1123_subdomain);
    }
    for f in ["kind", "name"] {
        if r.at(f).require() {
            r.at(f).syntax(names::path_segment);
        }
    }
}

// === IngressClass ===

/// IngressClasses.
pub static INGRESS_CLASS: Rules = Rules {
    defaults: &[|_, o| {
        if get(o, "spec.parameters").is_object() {
            default_at(o, "spec.parameters.scope", "Cluster");
        }
    }],
    validate: &[|_, o| {
        let controller = o.at("spec.controller");
        if controller.str().len() > 250 {
            controller.too_long(250);
        }
        domain_prefixed_path(&controller);
        let p = o.at("spec.parameters");
        if !p.present() {
            return;
        }
        typed_reference(&p);
        let ns = p.at("namespace");
        match p.text("scope") {
            "Namespace" => {
                if ns.present() {
                    ns.syntax(names::dns1123_label);
                } else {
                    ns.required("`parameters.scope` is set to 'Namespace'");
                }
            }
            "Cluster" => {
                if ns.present() {
                    ns.forbidden("`parameters.scope` is set to 'Cluster'");
                }
            }
            _ => p.at("scope").not_supported(&["Cluster", "Namespace"]),
        }
    }],
    validate_update: &[|_, o, old| o.at("spec.controller").immutable(get(old, "spec.controller"))],
    ..Rules::SPEC
};

/// `example.com/path`.
pub fn domain_prefixed_path(at: &At<'_>) {
    if at.is_empty() {
        return at.required("");
    }
    match at.str().split_once('/') {
        Some((host, path)) if !host.is_empty() && !path.is_empty() => {
            for msg in names::dns1123_subdomain(host) {
                at.invalid_value(host, msg);
            }
            let ok = path.bytes().all(|b| b.is_ascii_alphanumeric() || b"/-._~%!$&'()*+,;=:".contains(&b));
            if !ok {
                at.invalid_value(
                    path,
                    "Invalid path (regex used for validation is '[A-Za-z0-9/\\-._~%!$&'()*+,;=:]+')",
                );
            }
        }
        _ => at.invalid("must be a domain-prefixed path (such as \"acme.io/foo\")"),
    }
}

// === NetworkPolicy ===

/// NetworkPolicies.
pub static NETWORK_POLICY: Rules = Rules {
    defaults: &[|_, o| {
        for list in ["spec.ingress", "spec.egress"] {
            for rule in items_mut(o, list) {
                for p in items_mut(rule, "ports") {
                    default_at(p, "protocol", "TCP");
                }
            }
        }
        if o["spec"].is_object() && items(o, "spec.policyTypes").is_empty() {
            let types =
                if items(o, "spec.egress").is_empty() { json!(["Ingress"]) } else { json!(["Ingress", "Egress"]) };
            set(o, "spec.policyTypes", types);
        }
    }],
    validate: &[|_, o| {
        let spec = o.at("spec");
        selectors::label_selector(&spec.at("podSelector"));
        for (list, peers) in [("ingress", "from"), ("egress", "to")] {
            for rule in spec.at(list).items() {
                rule.at("ports").each(policy_port);
                rule.at(peers).each(policy_peer);
            }
        }
        let types = spec.at("policyTypes");
        if types.len() > 2 {
            types.invalid("may not specify more than two policyTypes");
        }
        types.each(|t| t.optional_one_of(&["Ingress", "Egress"]));
    }],
    ..Rules::SPEC
};

fn policy_port(p: &At<'_>) {
    p.at("protocol").optional_one_of(&["TCP", "UDP", "SCTP"]);
    let (port, end) = (p.at("port"), p.at("endPort"));
    match port.value {
        Value::Null => {
            if end.present() {
                end.invalid("may not be specified when `port` is not specified");
            }
        }
        Value::String(_) => {
            if end.present() {
                end.invalid("may not be specified when `port` is non-numeric");
            }
            port.syntax(names::port_name);
        }
        _ => {
            let n = port.int().unwrap_or(0);
            port_number(&port, n);
            if let Some(e) = end.int() {
                if e < n {
                    end.invalid("must be greater than or equal to `port`");
                }
                port_number(&end, e);
            }
        }
    }
}

fn policy_peer(p: &At<'_>) {
    let block = p.at("ipBlock");
    let mut count = 0;
    for s in ["podSelector", "namespaceSelector"] {
        if p.has(s) {
            count += 1;
            selectors::label_selector(&p.at(s));
        }
    }
    if block.present() {
        count += 1;
        ip_block(&block);
    }
    if count == 0 {
        p.required("must specify a peer");
    } else if count > 1 && block.present() {
        p.forbidden("may not specify both ipBlock and another peer");
    }
}

fn ip_block(b: &At<'_>) {
    let cidr = b.at("cidr");
    if cidr.is_empty() {
        return cidr.required("");
    }
    let Some(outer) = parse_cidr(cidr.str()) else { return cidr.invalid(CIDR_MSG) };
    b.at("except").each(|e| match parse_cidr(e.str()) {
        None => e.invalid(CIDR_MSG),
        Some(inner) if !strictly_inside(outer, inner) => e.invalid("must be a strict subset of `cidr`"),
        Some(_) => {}
    });
}

// === EndpointSlice ===

/// EndpointSlices.
pub static ENDPOINT_SLICE: Rules = Rules {
    generation: &["endpoints", "ports", "addressType", "metadata.labels", "metadata.annotations"],
    defaults: &[|_, o| {
        for p in items_mut(o, "ports") {
            default_at(p, "name", "");
            default_at(p, "protocol", "TCP");
        }
    }],
    validate: &[endpoint_slice],
    validate_update: &[|_, o, old| o.at("addressType").immutable(&old["addressType"])],
    ..Rules::PLAIN
};

fn endpoint_slice(_: &Context<'_>, o: &At<'_>) {
    let kind = o.at("addressType");
    kind.one_of(&["FQDN", "IPv4", "IPv6"]);
    let ports = o.at("ports");
    if ports.len() > 20_000 {
        ports.too_many(20_000);
    }
    let mut seen: Vec<String> = Vec::new();
    for p in ports.items() {
        let name = p.at("name");
        if !name.is_empty() {
            name.syntax(names::dns1123_label);
        }
        if seen.iter().any(|s| s == name.str()) {
            name.duplicate();
        }
        seen.push(name.str().to_owned());
        p.at("protocol").optional_one_of(&["SCTP", "TCP", "UDP"]);
        let app = p.at("appProtocol");
        if app.present() {
            app.syntax(names::qualified_name);
        }
    }
    let endpoints = o.at("endpoints");
    if endpoints.len() > 1000 {
        endpoints.too_many(1000);
    }
    for e in endpoints.items() {
        endpoint(&e, kind.str());
    }
}

fn endpoint(e: &At<'_>, kind: &str) {
    let addresses = e.at("addresses");
    match addresses.len() {
        0 => addresses.required(""),
        1..=100 => {}
        _ => addresses.too_many(100),
    }
    for a in addresses.items() {
        match (kind, a.str().parse::<IpAddr>()) {
            ("IPv4" | "IPv6", Err(_)) => a.invalid(IP_MSG),
            ("IPv4", Ok(ip)) => {
                if !ip.is_ipv4() {
                    addresses.invalid_value(a.str(), "must be an IPv4 address");
                }
                service::endpoint_ip(&a, ip);
            }
            ("IPv6", Ok(ip)) => {
                if !ip.is_ipv6() {
                    addresses.invalid_value(a.str(), "must be an IPv6 address");
                }
                service::endpoint_ip(&a, ip);
            }
            ("FQDN", _) => a.syntax(|s| names::dns1123_subdomain(s.strip_suffix('.').unwrap_or(s))),
            _ => {}
        }
    }
    let (node, host) = (e.at("nodeName"), e.at("hostname"));
    if node.present() {
        node.syntax(names::dns1123_subdomain);
    }
    if host.present() {
        host.syntax(names::dns1123_label);
    }
    for list in ["hints.forZones", "hints.forNodes"] {
        let at = e.at(list);
        if at.len() > 8 {
            at.too_many(8);
        }
        let mut seen: Vec<String> = Vec::new();
        for h in at.items() {
            let name = h.at("name");
            if seen.iter().any(|s| s == name.str()) {
                name.duplicate();
            }
            seen.push(name.str().to_owned());
            if list == "hints.forZones" {
                name.syntax(names::label_value);
            } else {
                name.syntax(names::dns1123_subdomain);
            }
        }
    }
}

// === ServiceCIDR, IPAddress ===

/// ServiceCIDRs.
pub static SERVICE_CIDR: Rules = Rules {
    validate: &[|_, o| {
        let cidrs = o.at("spec.cidrs");
        if cidrs.is_empty() {
            cidrs.required("at least one CIDR required");
        }
        if cidrs.len() > 2 {
            cidrs.invalid_value(o.value["spec"].clone(), "may only hold up to 2 values");
        }
        cidrs.each(|c| {
            if parse_cidr(c.str()).is_none() {
                c.invalid(CIDR_MSG);
            }
        });
        let families: Vec<bool> =
            items(o.value, "spec.cidrs").iter().filter_map(Value::as_str).map(|c| c.contains(':')).collect();
        if let [a, b] = families.as_slice()
            && a == b
        {
            cidrs.invalid(
                "may specify no more than one IP for each IP family, i.e 192.168.0.0/24 and 2001:db8::/64",
            );
        }
    }],
    validate_update: &[|_, o, old| {
        let cidrs = o.at("spec.cidrs");
        let was = items(old, "spec.cidrs");
        let grown = was.len() == 1 && cidrs.len() == 2;
        if cidrs.len() != was.len() && !grown {
            return cidrs.invalid("field is immutable");
        }
        for (c, w) in cidrs.items().zip(was) {
            if !same(c.value, w) {
                c.invalid("field is immutable");
            }
        }
    }],
    ..Rules::STATUS
};

/// IPAddresses.
pub static IP_ADDRESS: Rules = Rules {
    name: |s| if s.parse::<IpAddr>().is_ok() { Vec::new() } else { vec![IP_MSG.to_owned()] },
    validate: &[|_, o| {
        let p = o.at("spec.parentRef");
        if !p.present() {
            return p.required("");
        }
        if !p.text("group").is_empty() {
            p.at("group").syntax(names::dns1123_subdomain);
        }
        for f in ["resource", "name"] {
            if p.at(f).require() {
                p.at(f).syntax(names::path_segment);
            }
        }
        if !text(p.value, "namespace").is_empty() {
            p.at("namespace").syntax(names::path_segment);
        }
    }],
    validate_update: &[|_, o, old| o.at("spec.parentRef").immutable(get(old, "spec.parentRef"))],
    ..Rules::PLAIN
};
