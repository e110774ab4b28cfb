//! What a pod calls itself and whom it asks: hostname, `/etc/hosts`, `/etc/resolv.conf`. Pure.

use k8s_openapi::api::core::v1::{HostAlias, Pod, PodDNSConfig};

use super::model;

/// The pod's hostname and domain.
///
/// # Errors
/// When `setHostnameAsFQDN` asks for a name longer than the kernel's 64 bytes.
pub fn hostname(pod: &Pod, cluster_domain: &str, node: &str) -> Result<(String, String), String> {
    let spec = model::spec(pod);
    if model::host_network(pod) && spec.hostname_override.is_none() {
        return Ok((node.to_owned(), String::new()));
    }
    if let Some(name) = spec.hostname_override.as_deref().filter(|n| !n.is_empty()) {
        return Ok((name.to_owned(), String::new()));
    }
    let name = spec.hostname.as_deref().filter(|h| !h.is_empty()).unwrap_or(model::name(pod));
    // The kernel's limit is 64 bytes; DNS labels end at 63.
    let mut end = name.len().min(63);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    let name = name[..end].trim_end_matches(['-', '.']);
    let domain = match spec.subdomain.as_deref().filter(|s| !s.is_empty()) {
        Some(subdomain) => format!("{subdomain}.{}.svc.{cluster_domain}", model::namespace(pod)),
        None => String::new(),
    };
    if spec.set_hostname_as_fqdn == Some(true) && !domain.is_empty() {
        let fqdn = format!("{name}.{domain}");
        if fqdn.len() > 64 {
            return Err(format!("Failed to construct FQDN from pod hostname and cluster domain, FQDN {fqdn} is too long (64 characters is the max, {} characters requested)", fqdn.len()));
        }
        return Ok((fqdn, domain));
    }
    Ok((name.to_owned(), domain))
}

/// The content of the pod's `/etc/hosts`. `node` is the node's own file, for pods on the host network.
pub fn hosts(pod: &Pod, addresses: &[String], hostname: &str, domain: &str, node: &str) -> String {
    let aliases = model::spec(pod).host_aliases.as_deref().unwrap_or_default();
    if model::host_network(pod) {
        let mut text = String::from("# Kubernetes-managed hosts file (host network).\n");
        text.push_str(node);
        text.push_str(&alias_lines(aliases));
        return text;
    }
    let mut text = String::from("# Kubernetes-managed hosts file.\n");
    text.push_str("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\nfe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n");
    // With setHostnameAsFQDN the hostname already ends in the domain.
    let short = hostname.strip_suffix(&format!(".{domain}")).filter(|_| !domain.is_empty()).unwrap_or(hostname);
    for address in addresses {
        if domain.is_empty() {
            text.push_str(&format!("{address}\t{short}\n"));
        } else {
            text.push_str(&format!("{address}\t{short}.{domain}\t{short}\n"));
        }
    }
    text.push_str(&alias_lines(aliases));
    text
}

fn alias_lines(aliases: &[HostAlias]) -> String {
    if aliases.is_empty() {
        return String::new();
    }
    let mut text = String::from("\n# Entries added by HostAliases.\n");
    for alias in aliases {
        text.push_str(&format!("{}\t{}\n", alias.ip, alias.hostnames.as_deref().unwrap_or_default().join("\t")));
    }
    text
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dns {
    pub servers: Vec<String>,
    pub searches: Vec<String>,
    pub options: Vec<String>,
}

/// Limits of what resolvers take, as upstream.
const MAX_SERVERS: usize = 3;
const MAX_SEARCHES: usize = 32;
const MAX_SEARCH_CHARS: usize = 2048;

impl Dns {
    /// Reads a resolv.conf.
    pub fn parse(text: &str) -> Self {
        let mut dns = Dns::default();
        for line in text.lines().map(str::trim).filter(|l| !l.starts_with('#') && !l.starts_with(';')) {
            let mut fields = line.split_whitespace();
            match fields.next() {
                Some("nameserver") => dns.servers.extend(fields.next().map(str::to_owned)),
                Some("search") => dns.searches = fields.filter(|s| *s != ".").map(|s| s.trim_end_matches('.').to_owned()).collect(),
                Some("options") => {
                    for option in fields {
                        set_option(&mut dns.options, option);
                    }
                }
                _ => {}
            }
        }
        dns
    }

    /// The file's text.
    pub fn render(&self) -> String {
        let mut text = String::new();
        if !self.searches.is_empty() {
            text.push_str(&format!("search {}\n", self.searches.join(" ")));
        }
        for server in &self.servers {
            text.push_str(&format!("nameserver {server}\n"));
        }
        if !self.options.is_empty() {
            text.push_str(&format!("options {}\n", self.options.join(" ")));
        }
        text
    }
}

fn set_option(options: &mut Vec<String>, option: &str) {
    let name = option.split(':').next().unwrap_or(option);
    options.retain(|o| o.split(':').next() != Some(name));
    options.push(option.to_owned());
}

/// The pod's resolver configuration, and warnings about what did not fit.
pub fn dns(pod: &Pod, host: &Dns, cluster_dns: &[String], cluster_domain: &str) -> (Dns, Vec<String>) {
    let spec = model::spec(pod);
    let mut warnings = Vec::new();
    let policy = spec.dns_policy.as_deref().unwrap_or("ClusterFirst");
    let cluster = match policy {
        "ClusterFirstWithHostNet" => true,
        "ClusterFirst" => !model::host_network(pod),
        _ => false,
    };
    let mut dns = if policy == "None" {
        Dns::default()
    } else if cluster && !cluster_dns.is_empty() {
        let ns = model::namespace(pod);
        let mut searches = Vec::new();
        if !cluster_domain.is_empty() {
            searches.extend([format!("{ns}.svc.{cluster_domain}"), format!("svc.{cluster_domain}"), cluster_domain.to_owned()]);
        }
        searches.extend(host.searches.iter().cloned());
        Dns { servers: cluster_dns.to_vec(), searches: unique(searches), options: vec!["ndots:5".into()] }
    } else {
        if cluster {
            warnings.push("kubelet does not have ClusterDNS IP configured and cannot create Pod using \"ClusterFirst\" policy. Falling back to \"Default\" policy.".to_owned());
        }
        let mut dns = host.clone();
        if dns.servers.is_empty() {
            dns.servers.push("127.0.0.1".into());
        }
        dns
    };
    if let Some(config) = &spec.dns_config {
        extend(&mut dns, config);
    }
    fit(&mut dns, &mut warnings);
    (dns, warnings)
}

fn extend(dns: &mut Dns, config: &PodDNSConfig) {
    dns.servers.extend(config.nameservers.iter().flatten().cloned());
    dns.searches.extend(config.searches.iter().flatten().cloned());
    dns.servers = unique(std::mem::take(&mut dns.servers));
    dns.searches = unique(std::mem::take(&mut dns.searches));
    for option in config.options.iter().flatten() {
        let name = option.name.as_deref().unwrap_or("");
        match option.value.as_deref().filter(|v| !v.is_empty()) {
            Some(value) => set_option(&mut dns.options, &format!("{name}:{value}")),
            None => set_option(&mut dns.options, name),
        }
    }
}

fn unique(list: Vec<String>) -> Vec<String> {
    let mut seen = std::collections::HashSet::new();
    list.into_iter().filter(|item| seen.insert(item.clone())).collect()
}

fn fit(dns: &mut Dns, warnings: &mut Vec<String>) {
    if dns.servers.len() > MAX_SERVERS {
        dns.servers.truncate(MAX_SERVERS);
        warnings.push(format!("Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: {}", dns.servers.join(" ")));
    }
    let before = dns.searches.len();
    dns.searches.truncate(MAX_SEARCHES);
    dns.searches.retain(|s| s.len() <= 253);
    while dns.searches.join(" ").len() > MAX_SEARCH_CHARS {
        dns.searches.pop();
    }
    if dns.searches.len() != before {
        warnings.push(format!("Search Line limits were exceeded, some search paths have been omitted, the applied search line is: {}", dns.searches.join(" ")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::model::tests::pod;
    use serde_json::{Value, json};

    fn check_dns(spec: Value, cluster: &[&str], expected: &str) {
        let host = Dns::parse("# x\nnameserver 1.1.1.1\nsearch example.com.\noptions rotate timeout:1\n");
        let cluster: Vec<String> = cluster.iter().map(|s| (*s).to_owned()).collect();
        assert_eq!(dns(&pod(spec.clone()), &host, &cluster, "cluster.local").0.render(), expected, "{spec}");
    }

    #[test]
    fn dns_policies() {
        let host = "search example.com\nnameserver 1.1.1.1\noptions rotate timeout:1\n";
        let cluster = "search ns.svc.cluster.local svc.cluster.local cluster.local example.com\nnameserver 10.96.0.10\noptions ndots:5\n";
        check_dns(json!({"containers": []}), &["10.96.0.10"], cluster);
        check_dns(json!({"containers": [], "dnsPolicy": "Default"}), &["10.96.0.10"], host);
        check_dns(json!({"containers": [], "hostNetwork": true}), &["10.96.0.10"], host);
        check_dns(json!({"containers": [], "hostNetwork": true, "dnsPolicy": "ClusterFirstWithHostNet"}), &["10.96.0.10"], cluster);
        check_dns(json!({"containers": []}), &[], host);
        check_dns(
            json!({"containers": [], "dnsPolicy": "None", "dnsConfig": {"nameservers": ["9.9.9.9"], "searches": ["a.b"], "options": [{"name": "ndots", "value": "2"}, {"name": "edns0"}]}}),
            &["10.96.0.10"],
            "search a.b\nnameserver 9.9.9.9\noptions ndots:2 edns0\n",
        );
        check_dns(
            json!({"containers": [], "dnsConfig": {"options": [{"name": "ndots", "value": "2"}]}}),
            &["10.96.0.10"],
            "search ns.svc.cluster.local svc.cluster.local cluster.local example.com\nnameserver 10.96.0.10\noptions ndots:2\n",
        );
    }

    #[test]
    fn hostnames() {
        let check = |spec: Value, expected: Result<(&str, &str), ()>| {
            let got = hostname(&pod(spec.clone()), "cluster.local", "node1").map_err(|_| ());
            assert_eq!(got, expected.map(|(a, b)| (a.to_owned(), b.to_owned())), "{spec}");
        };
        check(json!({"containers": []}), Ok(("p", "")));
        check(json!({"containers": [], "hostname": "h", "subdomain": "s"}), Ok(("h", "s.ns.svc.cluster.local")));
        check(json!({"containers": [], "hostname": "h", "subdomain": "s", "setHostnameAsFQDN": true}), Ok(("h.s.ns.svc.cluster.local", "s.ns.svc.cluster.local")));
        check(json!({"containers": [], "hostname": "h", "subdomain": "s".repeat(60), "setHostnameAsFQDN": true}), Err(()));
        check(json!({"containers": [], "hostNetwork": true}), Ok(("node1", "")));
    }

    #[test]
    fn hosts_files() {
        let spec = json!({"containers": [], "hostAliases": [{"ip": "1.2.3.4", "hostnames": ["a", "b"]}]});
        let text = hosts(&pod(spec), &["10.0.0.1".into()], "h", "s.ns.svc.x", "");
        assert!(text.starts_with("# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n"), "{text}");
        assert!(text.contains("10.0.0.1\th.s.ns.svc.x\th\n") && text.ends_with("\n# Entries added by HostAliases.\n1.2.3.4\ta\tb\n"), "{text}");
        let host = hosts(&pod(json!({"containers": [], "hostNetwork": true})), &[], "n", "", "127.0.0.1 localhost\n");
        assert_eq!(host, "# Kubernetes-managed hosts file (host network).\n127.0.0.1 localhost\n");
    }
}
