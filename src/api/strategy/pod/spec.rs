//! Pod specs, in pods and in templates.

use std::net::IpAddr;

use crate::field::quote;
use crate::strategy::at::{At, text};
use crate::strategy::pod::containers::{self, Shared};
use crate::strategy::pod::{scheduling, security, volumes};
use crate::strategy::{names, objectmeta, resources};

/// Whose spec it is.
#[derive(Clone, Copy)]
pub enum Owner<'a> {
    /// A pod of this name.
    Pod(&'a str),
    /// A template.
    Template,
}

/// A pod template: labels and annotations, and the spec.
pub fn template(at: &At<'_>) {
    let meta = at.at("metadata");
    objectmeta::labels(&meta.at("labels"));
    objectmeta::annotations(&meta.at("annotations"));
    validate(&at.at("spec"), Owner::Template);
    for c in at.at("spec.ephemeralContainers").items().take(1) {
        let list = at.at("spec.ephemeralContainers");
        let _ = c;
        list.forbidden("ephemeral containers not allowed in pod template");
    }
}

/// A pod's spec.
pub fn validate(spec: &At<'_>, owner: Owner<'_>) {
    let grace = spec.at("terminationGracePeriodSeconds");
    if !grace.present() {
        grace.required("");
    }
    let (is_pod, name) = match owner {
        Owner::Pod(name) => (true, name),
        Owner::Template => (false, ""),
    };
    let volume_list = spec.at("volumes");
    let good_volumes = volumes::validate(&volume_list, name);
    let claims = claims(&spec.at("resourceClaims"));
    let claim_names: Vec<&str> = claims.iter().map(String::as_str).collect();
    let shared = Shared {
        volumes: &good_volumes,
        claims: &claim_names,
        grace: grace.int(),
        restart_policy: spec.text("restartPolicy"),
        host_users: spec.at("hostUsers").value != false,
        os: spec.text("os.name"),
        is_pod,
    };
    all_containers(spec, &shared);
    if is_pod {
        grace.non_negative();
        for list in ["containers", "initContainers"] {
            spec.at(list).each(containers::image_padding);
        }
    }
    host_network(spec, is_pod);
    spec.at("restartPolicy").one_of(&["Always", "OnFailure", "Never"]);
    spec.at("dnsPolicy").one_of(&["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"]);
    objectmeta::labels(&spec.at("nodeSelector"));
    security::pod(&spec.at("securityContext"), spec);
    if spec.flag("shareProcessNamespace") && spec.flag("hostPID") {
        spec.at("shareProcessNamespace").invalid("ShareProcessNamespace and HostPID cannot both be enabled");
    }
    scheduling::affinity(&spec.at("affinity"));
    dns_config(spec);
    for g in spec.at("readinessGates").items() {
        g.at("conditionType").syntax(names::qualified_name);
    }
    scheduling_gates(&spec.at("schedulingGates"));
    scheduling::spread(&spec.at("topologySpreadConstraints"));
    host_users(spec);
    identity(spec);
    scheduling::tolerations(&spec.at("tolerations"));
    os(spec);
    pod_resources(spec, &shared);
}

fn all_containers(spec: &At<'_>, shared: &Shared<'_>) {
    let names = |list: &str| -> Vec<&str> {
        spec.value[list].as_array().into_iter().flatten().map(|c| text(c, "name")).collect()
    };
    let (regular, init) = (names("containers"), names("initContainers"));
    containers::regular(&spec.at("containers"), shared);
    containers::init(&spec.at("initContainers"), &regular, shared);
    let others: Vec<&str> = regular.iter().chain(&init).copied().collect();
    containers::ephemeral(&spec.at("ephemeralContainers"), &others, shared);
}

fn claims(at: &At<'_>) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    for c in at.items() {
        let name = c.at("name");
        if name.is_empty() {
            name.required("");
        } else if out.iter().any(|n| n == name.str()) {
            name.duplicate();
        } else {
            name.syntax(names::dns1123_label);
            out.push(name.str().to_owned());
        }
        let (by_name, by_template) = (c.at("resourceClaimName"), c.at("resourceClaimTemplateName"));
        match (by_name.present(), by_template.present()) {
            (true, true) => c.invalid("at most one of `resourceClaimName` or `resourceClaimTemplateName` may be specified"),
            (false, false) => c.invalid("must specify one of: `resourceClaimName`, `resourceClaimTemplateName`"),
            (true, false) => by_name.syntax(names::dns1123_subdomain),
            (false, true) => by_template.syntax(names::dns1123_subdomain),
        }
    }
    out
}

fn host_network(spec: &At<'_>, is_pod: bool) {
    if !spec.flag("hostNetwork") {
        return;
    }
    for c in spec.at("containers").items() {
        for p in c.at("ports").items() {
            let host = p.num("hostPort").unwrap_or(0);
            if (is_pod || host != 0) && host != p.num("containerPort").unwrap_or(0) {
                p.at("hostPort").invalid_value(host, "must match `containerPort` when `hostNetwork` is true");
            }
        }
    }
}

fn dns_config(spec: &At<'_>) {
    let config = spec.at("dnsConfig");
    let servers = config.at("nameservers");
    if spec.text("dnsPolicy") == "None" {
        if !config.present() {
            return config.required("must provide `dnsConfig` when `dnsPolicy` is None");
        }
        if servers.is_empty() {
            return servers.required("must provide at least one DNS nameserver when `dnsPolicy` is None");
        }
    }
    if servers.len() > 3 {
        servers.invalid("must not have more than 3 nameservers");
    }
    servers.each(|s| {
        if s.str().parse::<IpAddr>().is_err() {
            s.invalid("must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)");
        }
    });
    let searches = config.at("searches");
    if searches.len() > 32 {
        searches.invalid("must not have more than 32 search paths");
    }
    let total: usize = searches.items().map(|s| s.str().len() + 1).sum();
    if total > 2049 {
        searches.invalid("must not have more than 2048 characters (including spaces) in the search list");
    }
    searches.each(|s| {
        let name = s.str().strip_suffix('.').unwrap_or(s.str());
        if s.str() != "." && !names::dns1123_subdomain(&name.replace('_', "a")).is_empty() {
            for msg in names::dns1123_subdomain(name) {
                s.invalid_value(name, msg);
            }
        }
    });
    for o in config.at("options").items() {
        if o.text("name").is_empty() {
            o.required("must not be empty");
        }
    }
}

fn scheduling_gates(at: &At<'_>) {
    let mut seen: Vec<String> = Vec::new();
    for g in at.items() {
        let name = g.text("name");
        for msg in names::qualified_name(name) {
            g.invalid_value(name, msg);
        }
        if seen.iter().any(|s| s == name) {
            g.error(crate::field::ErrorKind::Duplicate, Some(name.into()), "");
        }
        seen.push(name.to_owned());
    }
}

fn host_users(spec: &At<'_>) {
    if spec.at("hostUsers").value != false {
        return;
    }
    for (field, shown) in [("hostPID", "HostPID"), ("hostIPC", "HostIPC")] {
        if spec.flag(field) {
            spec.at(shown).forbidden("when `hostUsers` is false");
        }
    }
}

fn identity(spec: &At<'_>) {
    let account = spec.at("serviceAccountName");
    if !account.is_empty() {
        account.syntax(names::dns1123_subdomain);
    }
    if spec.text("serviceAccount") != account.str() {
        spec.at("deprecatedServiceAccount").invalid_value(
            spec.text("serviceAccount"),
            format!("must be the same as serviceAccountName: {}", quote(account.str())),
        );
    }
    for field in ["nodeName", "priorityClassName", "runtimeClassName"] {
        let at = spec.at(field);
        if !at.is_empty() || (field == "runtimeClassName" && at.present()) {
            at.syntax(names::dns1123_subdomain);
        }
    }
    for field in ["hostname", "subdomain"] {
        let at = spec.at(field);
        if !at.is_empty() {
            at.syntax(names::dns1123_label);
        }
    }
    let hostname = spec.at("hostnameOverride");
    if hostname.present() {
        if spec.flag("setHostnameAsFQDN") {
            hostname.forbidden("may not be specified when setHostnameAsFQDN is true");
        }
        if spec.flag("hostNetwork") {
            hostname.forbidden("may not be specified when hostNetwork is true");
        }
        if hostname.str().len() > 64 {
            hostname.too_long(64);
        }
        hostname.syntax(names::dns1123_subdomain);
    }
    spec.at("activeDeadlineSeconds").in_range(1, i64::from(i32::MAX));
    for alias in spec.at("hostAliases").items() {
        let ip = alias.at("ip");
        if ip.str().parse::<IpAddr>().is_err() {
            ip.invalid_value(ip.str(), "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)");
        }
        alias.at("hostnames").each(|h| h.syntax(names::dns1123_subdomain));
    }
    spec.at("preemptionPolicy").optional_one_of(&["PreemptLowerPriority", "Never"]);
    for (name, amount) in spec.at("overhead").entries() {
        resources::any_name(&amount, name);
        resources::value(&amount, name);
    }
}

fn os(spec: &At<'_>) {
    let os = spec.at("os");
    if !os.present() {
        return;
    }
    let name = os.at("name");
    match name.str() {
        "" => name.required(""),
        "linux" => {
            const MSG: &str = "windows options cannot be set for a linux pod";
            if spec.has("securityContext.windowsOptions") {
                spec.at("securityContext.windowsOptions").forbidden(MSG);
            }
            for list in ["initContainers", "containers", "ephemeralContainers"] {
                spec.at(list).each(|c| {
                    if c.has("securityContext.windowsOptions") {
                        c.at("securityContext.windowsOptions").forbidden(MSG);
                    }
                });
            }
        }
        "windows" => windows(spec),
        _ => os.error(
            crate::field::ErrorKind::NotSupported,
            Some(name.value.clone()),
            "supported values: \"linux\", \"windows\"",
        ),
    }
}

fn windows(spec: &At<'_>) {
    const MSG: &str = "cannot be set for a windows pod";
    const POD: [&str; 15] = [
        "securityContext.appArmorProfile",
        "securityContext.seLinuxOptions",
        "securityContext.seccompProfile",
        "securityContext.fsGroup",
        "securityContext.fsGroupChangePolicy",
        "securityContext.sysctls",
        "securityContext.runAsUser",
        "securityContext.runAsGroup",
        "securityContext.supplementalGroups",
        "securityContext.supplementalGroupsPolicy",
        "securityContext.seLinuxChangePolicy",
        "hostUsers",
        "hostPID",
        "hostIPC",
        "shareProcessNamespace",
    ];
    const CONTAINER: [&str; 10] = [
        "appArmorProfile",
        "seLinuxOptions",
        "seccompProfile",
        "capabilities",
        "readOnlyRootFilesystem",
        "privileged",
        "allowPrivilegeEscalation",
        "procMount",
        "runAsUser",
        "runAsGroup",
    ];
    for field in POD {
        let set = match field {
            "hostPID" | "hostIPC" => spec.flag(field),
            _ => spec.has(field),
        };
        if set {
            spec.at(field).forbidden(MSG);
        }
    }
    for list in ["initContainers", "containers", "ephemeralContainers"] {
        spec.at(list).each(|c| {
            let sc = c.at("securityContext");
            for field in CONTAINER {
                if sc.has(field) {
                    sc.at(field).forbidden(MSG);
                }
            }
        });
    }
}

/// Pod-level resources (KEP-2837).
fn pod_resources(spec: &At<'_>, shared: &Shared<'_>) {
    let at = spec.at("resources");
    if !at.present() {
        return;
    }
    if shared.os == "windows" {
        return at.forbidden("may not be set for a windows pod");
    }
    if at.has("claims") {
        at.at("claims").forbidden("claims may not be set for Resources at pod-level");
    }
    for part in ["limits", "requests"] {
        for (name, amount) in at.at(part).entries() {
            if !matches!(name, "cpu" | "memory") && !resources::is_huge_pages(name) {
                amount.error(
                    crate::field::ErrorKind::NotSupported,
                    Some(name.into()),
                    "supported values: \"cpu\", \"hugepages-\", \"memory\"",
                );
            }
            resources::value(&amount, name);
        }
    }
    for (name, amount) in at.at("requests").entries() {
        let limit = resources::quantity(at.at("limits").key(name).value);
        if let (Some(q), Some(l)) = (resources::quantity(amount.value), limit)
            && q > l
        {
            at.at("requests").invalid_value(
                amount.value.clone(),
                format!("must be less than or equal to {name} limit of {l}"),
            );
        }
    }
}
