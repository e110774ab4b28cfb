//! Certificate signing requests: approving those of nodes, and cleaning up. Signing is the API server's.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::{
    api::{
        authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
        certificates::v1::{CertificateSigningRequest, CertificateSigningRequestCondition},
        core::v1::Node,
    },
    apimachinery::pkg::apis::meta::v1::Time,
};
use windlass_client::{
    informer::{Informer, Key},
    queue::{Action, Queue},
};
use x509_parser::{
    certification_request::X509CertificationRequest,
    extensions::{GeneralName, ParsedExtension},
    prelude::FromDer,
};

use crate::{
    Error,
    context::{Context, Worker, after},
    pod::until,
    write::{self, ApiErrorExt, Delete},
};

const KUBELET_CLIENT: &str = "kubernetes.io/kube-apiserver-client-kubelet";
const KUBELET_SERVING: &str = "kubernetes.io/kubelet-serving";
const CLIENT: &str = "kubernetes.io/kube-apiserver-client";
const PROXY_USER: &str = "system:kube-proxy";
const NODE_PREFIX: &str = "system:node:";

/// What a request asks to be certified.
#[derive(Debug, Default, PartialEq, Eq)]
struct Subject {
    common_name: String,
    organizations: Vec<String>,
    dns: Vec<String>,
    ips: Vec<IpAddr>,
    /// E-mail addresses, URIs, or other names: nothing that a node or a proxy may ask for.
    others: usize,
}

/// Reads the PEM request; what it is signed with is the signer's business.
fn parse(pem: &[u8]) -> Result<Subject, String> {
    let (_, block) = x509_parser::pem::parse_x509_pem(pem).map_err(|error| format!("not PEM: {error}"))?;
    let (_, request) = X509CertificationRequest::from_der(&block.contents).map_err(|error| format!("not a PKCS#10 request: {error}"))?;
    let text = |attribute: &x509_parser::x509::AttributeTypeAndValue<'_>| attribute.as_str().map(str::to_owned).unwrap_or_default();
    let name = &request.certification_request_info.subject;
    let mut subject = Subject {
        common_name: name.iter_common_name().last().map(text).unwrap_or_default(),
        organizations: name.iter_organization().map(text).collect(),
        ..Subject::default()
    };
    for extension in request.requested_extensions().into_iter().flatten() {
        let ParsedExtension::SubjectAlternativeName(names) = extension else { continue };
        for name in &names.general_names {
            match name {
                GeneralName::DNSName(dns) => subject.dns.push((*dns).to_owned()),
                GeneralName::IPAddress(bytes) => match (<[u8; 4]>::try_from(*bytes), <[u8; 16]>::try_from(*bytes)) {
                    (Ok(v4), _) => subject.ips.push(IpAddr::from(v4)),
                    (_, Ok(v6)) => subject.ips.push(IpAddr::from(v6)),
                    _ => subject.others += 1,
                },
                _ => subject.others += 1,
            }
        }
    }
    Ok(subject)
}

/// How a request that we know may come to be approved.
#[derive(Debug, PartialEq, Eq)]
enum Rule {
    /// If the requester may create this subresource of `certificatesigningrequests`.
    Access { subresource: &'static str, message: &'static str },
    /// If the names are this node's.
    Serving { node: String },
    /// At once.
    Proxy,
}

fn usages_are(csr: &CertificateSigningRequest, purpose: &str) -> bool {
    let usages: BTreeSet<&str> = csr.spec.usages.iter().flatten().map(String::as_str).collect();
    let without_rsa = BTreeSet::from(["digital signature", purpose]);
    usages == without_rsa || usages == &without_rsa | &BTreeSet::from(["key encipherment"])
}

/// The rules that fit a request, in the order in which they are tried.
fn rules(csr: &CertificateSigningRequest, subject: &Subject) -> Vec<Rule> {
    let names = subject.dns.len() + subject.ips.len();
    let of_node = subject.organizations == ["system:nodes"] && subject.common_name.starts_with(NODE_PREFIX) && subject.others == 0;
    let username = csr.spec.username.as_deref().unwrap_or_default();
    let groups = csr.spec.groups.as_deref().unwrap_or_default();
    match csr.spec.signer_name.as_str() {
        KUBELET_CLIENT if of_node && names == 0 && usages_are(csr, "client auth") => {
            let own = Rule::Access { subresource: "selfnodeclient", message: "Auto approving self kubelet client certificate after SubjectAccessReview." };
            let any = Rule::Access { subresource: "nodeclient", message: "Auto approving kubelet client certificate after SubjectAccessReview." };
            if username == subject.common_name { vec![own, any] } else { vec![any] }
        }
        KUBELET_SERVING if of_node && names > 0 && username == subject.common_name && usages_are(csr, "server auth") => {
            vec![Rule::Serving { node: subject.common_name[NODE_PREFIX.len()..].to_owned() }]
        }
        CLIENT if subject.common_name == PROXY_USER && subject.organizations.is_empty() && names + subject.others == 0 && usages_are(csr, "client auth") => {
            let may = ["system:bootstrappers", "system:nodes"].iter().any(|group| groups.iter().any(|have| have == group));
            if may { vec![Rule::Proxy] } else { Vec::new() }
        }
        _ => Vec::new(),
    }
}

/// Whether every name in the request is one of the node's: its name or an address in its status.
fn names_belong_to(subject: &Subject, node: &Node) -> bool {
    let addresses: BTreeSet<&str> = node.status.iter().flat_map(|status| status.addresses.iter().flatten()).map(|a| a.address.as_str()).collect();
    let name = node.metadata.name.as_deref().unwrap_or_default();
    subject.dns.iter().all(|dns| dns == name || addresses.contains(dns.as_str()))
        && subject.ips.iter().all(|ip| addresses.contains(ip.to_string().as_str()))
}

fn condition<'a>(csr: &'a CertificateSigningRequest, kind: &str) -> Option<&'a CertificateSigningRequestCondition> {
    csr.status.iter().flat_map(|status| status.conditions.iter().flatten()).find(|condition| condition.type_ == kind)
}

fn certificate(csr: &CertificateSigningRequest) -> Option<&[u8]> {
    csr.status.as_ref()?.certificate.as_ref().map(|bytes| bytes.0.as_slice()).filter(|bytes| !bytes.is_empty())
}

struct Approver {
    client: kube::Client,
    requests: Informer<CertificateSigningRequest>,
    nodes: Informer<Node>,
}

impl Approver {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(csr) = self.requests.get(&key) else { return Ok(Action::Done) };
        let decided = condition(&csr, "Approved").is_some() || condition(&csr, "Denied").is_some();
        if decided || certificate(&csr).is_some() {
            return Ok(Action::Done);
        }
        let subject = match parse(&csr.spec.request.0) {
            Ok(subject) => subject,
            Err(reason) => {
                tracing::info!(csr = key.name, reason, "cannot read the request; left to a human");
                return Ok(Action::Done);
            }
        };
        let rules = rules(&csr, &subject);
        for rule in &rules {
            let message = match rule {
                Rule::Access { subresource, message } if self.may_create(&csr, subresource).await? => message,
                Rule::Serving { node } => match self.nodes.get(&Key::cluster(node)) {
                    Some(node) if names_belong_to(&subject, &node) => "Auto approving kubelet serving certificate: every name is the node's.",
                    _ => continue,
                },
                Rule::Proxy => "Auto approving client certificate of kube-proxy for a node.",
                Rule::Access { .. } => continue,
            };
            return self.approve(&csr, message).await;
        }
        if rules.iter().any(|rule| matches!(rule, Rule::Access { .. })) {
            // A binding that allows it may come later, and nothing would wake us then.
            return Err(Error::Invalid(format!("recognized csr {:?} as {rules:?} but the requester may not create that subresource", key.name)));
        }
        Ok(Action::Done)
    }

    async fn may_create(&self, csr: &CertificateSigningRequest, subresource: &str) -> Result<bool, Error> {
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: csr.spec.username.clone(),
                uid: csr.spec.uid.clone(),
                groups: csr.spec.groups.clone(),
                extra: csr.spec.extra.clone(),
                resource_attributes: Some(ResourceAttributes {
                    group: Some("certificates.k8s.io".into()),
                    resource: Some("certificatesigningrequests".into()),
                    subresource: Some(subresource.into()),
                    verb: Some("create".into()),
                    version: Some("*".into()),
                    ..ResourceAttributes::default()
                }),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let path = write::collection_path::<SubjectAccessReview>("");
        let answer: SubjectAccessReview = write::create(&self.client, &path, &write::wire(&review)).await?;
        Ok(answer.status.is_some_and(|status| status.allowed))
    }

    async fn approve(&self, csr: &CertificateSigningRequest, message: &str) -> Result<Action, Error> {
        let mut csr = csr.clone();
        csr.status.get_or_insert_default().conditions.get_or_insert_default().push(CertificateSigningRequestCondition {
            type_: "Approved".into(),
            status: "True".into(),
            reason: Some("AutoApproved".into()),
            message: Some(message.into()),
            last_update_time: Some(Time(Timestamp::now())),
            ..CertificateSigningRequestCondition::default()
        });
        let path = format!("{}/approval", write::path(&csr));
        let written: Result<serde_json::Value, Error> = write::replace(&self.client, &path, &write::wire(&csr)).await;
        match written {
            Ok(_) => Ok(Action::Done),
            Err(error) if error.is_not_found() => Ok(Action::Done),
            Err(error) => Err(error),
        }
    }
}

/// The `certificatesigningrequest-approving-controller`.
pub fn start_approver(context: &Context) -> Worker {
    let queue = Queue::new("certificatesigningrequest_approving");
    let (requests, nodes) = (context.signing_requests(), context.nodes());
    {
        let queue = queue.clone();
        requests.on_change(move |change| queue.add(Key::of(&**change.object())));
    }
    {
        // A serving certificate waits for the node's addresses.
        let (queue, requests) = (queue.clone(), requests.clone());
        nodes.on_change(move |change| {
            let addresses = |node: &Option<Arc<Node>>| node.as_ref().and_then(|node| node.status.as_ref()?.addresses.clone());
            if change.new.is_some() && addresses(&change.old) != addresses(&change.new) {
                let user = format!("{NODE_PREFIX}{}", change.object().metadata.name.as_deref().unwrap_or_default());
                let waiting = requests.list().into_iter().filter(|csr| csr.spec.username.as_ref() == Some(&user) && csr.spec.signer_name == KUBELET_SERVING);
                waiting.for_each(|csr| queue.add(Key::of(&*csr)));
            }
        });
    }
    let state = Arc::new(Approver { client: context.client.clone(), requests, nodes });
    context.worker(queue, 2, state, Approver::sync)
}

/// Seconds that a decided and an undecided request are kept.
const DECIDED: i64 = 3600;
const PENDING: i64 = 24 * 3600;

/// How long a request is still of use; zero when it is to go.
fn lifetime(csr: &CertificateSigningRequest, now: Timestamp) -> Duration {
    let at = |condition: &CertificateSigningRequestCondition| condition.last_update_time.as_ref().or(csr.metadata.creation_timestamp.as_ref()).map(|t| t.0);
    let created = csr.metadata.creation_timestamp.as_ref().map_or(now, |time| time.0);
    let left = |from: Timestamp, seconds: i64| until(from, seconds, now).unwrap_or_default();
    let expires = certificate(csr).and_then(|pem| x509_parser::pem::parse_x509_pem(pem).ok()).and_then(|(_, block)| {
        let expires = block.parse_x509().ok()?.validity().not_after.timestamp();
        Timestamp::from_second(expires).ok()
    });
    let by_certificate = expires.map(|expires| left(expires, 0));
    let by_decision = ["Approved", "Denied", "Failed"].iter().filter_map(|kind| condition(csr, kind)).find_map(|condition| {
        // Approved without a certificate: the signer has not come to it, so it counts as pending.
        let open = condition.type_ == "Approved" && certificate(csr).is_none();
        (!open).then(|| left(at(condition).unwrap_or(created), DECIDED))
    });
    by_decision.into_iter().chain(by_certificate).min().unwrap_or_else(|| left(created, PENDING))
}

struct Cleaner {
    client: kube::Client,
    requests: Informer<CertificateSigningRequest>,
}

impl Cleaner {
    async fn sync(self: Arc<Self>, key: Key) -> Result<Action, Error> {
        let Some(csr) = self.requests.get(&key) else { return Ok(Action::Done) };
        let left = lifetime(&csr, Timestamp::now());
        if !left.is_zero() {
            return Ok(after(Some(left)));
        }
        write::delete(&self.client, &write::path(&*csr), Delete { uid: csr.metadata.uid.as_deref(), ..Delete::default() }).await?;
        Ok(Action::Done)
    }
}

/// The `certificatesigningrequest-cleaner-controller`.
pub fn start_cleaner(context: &Context) -> Worker {
    let queue = Queue::new("certificatesigningrequest_cleaner");
    let requests = context.signing_requests();
    {
        let queue = queue.clone();
        requests.on_change(move |change| queue.add(Key::of(&**change.object())));
    }
    let state = Arc::new(Cleaner { client: context.client.clone(), requests });
    context.worker(queue, 1, state, Cleaner::sync)
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::ByteString;
    use serde_json::json;

    fn conditions(kind: &str, at: Timestamp) -> serde_json::Value {
        json!({"conditions": [{"type": kind, "status": "True", "lastUpdateTime": at.to_string()}]})
    }

    fn subject(cn: &str, org: &[&str], dns: &[&str], ips: &[&str]) -> Subject {
        Subject {
            common_name: cn.into(),
            organizations: org.iter().map(|o| o.to_string()).collect(),
            dns: dns.iter().map(|d| d.to_string()).collect(),
            ips: ips.iter().map(|ip| ip.parse().expect("an address")).collect(),
            others: 0,
        }
    }

    fn csr(signer: &str, user: &str, groups: &[&str], usages: &[&str]) -> CertificateSigningRequest {
        serde_json::from_value(json!({"metadata": {"name": "c"}, "spec": {"request": "", "signerName": signer, "username": user, "groups": groups, "usages": usages}})).expect("a csr")
    }

    #[test]
    fn requests_are_read_from_pem() {
        let mut params = rcgen::CertificateParams::new(vec!["node-1".to_owned(), "10.0.0.1".to_owned()]).expect("params");
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(rcgen::DnType::OrganizationName, "system:nodes");
        params.distinguished_name.push(rcgen::DnType::CommonName, "system:node:node-1");
        let key = rcgen::KeyPair::generate().expect("a key");
        let pem = params.serialize_request(&key).expect("a request").pem().expect("pem");
        assert_eq!(parse(pem.as_bytes()), Ok(subject("system:node:node-1", &["system:nodes"], &["node-1"], &["10.0.0.1"])));
        assert!(parse(b"nonsense").is_err());
    }

    #[test]
    fn recognized_requests() {
        let client = ["digital signature", "client auth"];
        let server = ["digital signature", "key encipherment", "server auth"];
        let node = subject("system:node:a", &["system:nodes"], &[], &[]);
        let serving = subject("system:node:a", &["system:nodes"], &["a"], &["10.0.0.1"]);
        let names = |rules: Vec<Rule>| -> Vec<String> {
            rules.into_iter().map(|rule| match rule {
                Rule::Access { subresource, .. } => subresource.to_owned(),
                Rule::Serving { node } => node,
                Rule::Proxy => "proxy".to_owned(),
            }).collect()
        };
        for (csr, subject, expected) in [
            (csr(KUBELET_CLIENT, "system:bootstrap:x", &[], &client), &node, &["nodeclient"][..]),
            (csr(KUBELET_CLIENT, "system:node:a", &[], &client), &node, &["selfnodeclient", "nodeclient"]),
            (csr(KUBELET_CLIENT, "system:node:a", &[], &client), &serving, &[]),
            (csr(KUBELET_CLIENT, "system:node:a", &[], &server), &node, &[]),
            (csr(KUBELET_SERVING, "system:node:a", &[], &server), &serving, &["a"]),
            (csr(KUBELET_SERVING, "system:node:b", &[], &server), &serving, &[]),
            (csr(KUBELET_SERVING, "system:node:a", &[], &server), &node, &[]),
            (csr(CLIENT, "u", &["system:nodes"], &client), &subject(PROXY_USER, &[], &[], &[]), &["proxy"]),
            (csr(CLIENT, "u", &["people"], &client), &subject(PROXY_USER, &[], &[], &[]), &[]),
            (csr(CLIENT, "u", &["system:nodes"], &client), &subject("admin", &["system:masters"], &[], &[]), &[]),
        ] {
            assert_eq!(names(rules(&csr, subject)), expected, "{} {subject:?}", csr.spec.signer_name);
        }
    }

    #[test]
    fn serving_names_must_be_the_nodes() {
        let node: Node = serde_json::from_value(json!({"metadata": {"name": "a"}, "status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "Hostname", "address": "a.local"}]}})).expect("a node");
        for (dns, ips, expected) in [(&["a"][..], &["10.0.0.1"][..], true), (&["a.local"], &[], true), (&["b"], &[], false), (&["a"], &["10.0.0.2"], false)] {
            assert_eq!(names_belong_to(&subject("", &[], dns, ips), &node), expected, "{dns:?} {ips:?}");
        }
    }

    #[test]
    fn old_requests_go() {
        let now = Timestamp::from_second(1_000_000).expect("a time");
        let ago = |seconds: i64| Timestamp::from_second(1_000_000 - seconds).expect("a time");
        let mut pending = csr(CLIENT, "u", &[], &[]);
        pending.metadata.creation_timestamp = Some(Time(ago(23 * 3600)));
        assert_eq!(lifetime(&pending, now), Duration::from_secs(3600));
        pending.status = serde_json::from_value(conditions("Denied", ago(3601))).expect("a status");
        assert_eq!(lifetime(&pending, now), Duration::ZERO);
        pending.status = serde_json::from_value(conditions("Approved", ago(3601))).expect("a status");
        assert_eq!(lifetime(&pending, now), Duration::from_secs(3600), "approved and not signed is pending");
        pending.status.as_mut().expect("a status").certificate = Some(ByteString(b"x".to_vec()));
        assert_eq!(lifetime(&pending, now), Duration::ZERO);
    }
}
