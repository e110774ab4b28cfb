use super::*;
use crate::cluster::testing::Fake;
use rcgen::{CertificateParams, DnType, KeyPair, SanType};
use x509_parser::prelude::{FromDer, X509Certificate};

fn now() -> Timestamp {
    "2026-05-01T12:00:00Z".parse().expect("a time")
}

/// A request: common name, organizations (at most one: `rcgen` cannot do more), alternative names, usages.
struct Case {
    signer: &'static str,
    common_name: &'static str,
    organization: &'static str,
    names: Vec<SanType>,
    usages: &'static [&'static str],
    seconds: Option<i64>,
}

impl Case {
    fn node(signer: &'static str, usages: &'static [&'static str]) -> Case {
        let (common_name, organization) = ("system:node:n1", "system:nodes");
        Case { signer, common_name, organization, names: Vec::new(), usages, seconds: None }
    }

    fn object(&self) -> Value {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, self.organization);
        params.distinguished_name.push(DnType::CommonName, self.common_name);
        params.subject_alt_names = self.names.clone();
        let key = KeyPair::generate().expect("a key");
        let request = params.serialize_request(&key).expect("a request").pem().expect("PEM");
        let mut csr = json!({
            "metadata": {"name": "csr-1"},
            "spec": {"signerName": self.signer, "request": STANDARD.encode(request), "usages": self.usages},
            "status": {"conditions": [{"type": "Approved", "status": "True"}]},
        });
        if let Some(seconds) = self.seconds {
            csr["spec"]["expirationSeconds"] = seconds.into();
        }
        csr
    }
}

fn authority() -> Authority {
    Authority::create("kubernetes", now()).expect("an authority")
}

/// Completes the case and checks subject and lifetime, or the failure's message.
fn check(case: &Case, expected: Result<(&str, i64), &str>) {
    let authority = authority();
    let mut csr = case.object();
    assert!(complete(&authority, &mut csr, now()).expect("completed"));
    let certificate = csr["status"]["certificate"].as_str();
    match (certificate, expected) {
        (Some(encoded), Ok((subject, lifetime))) => {
            let text = STANDARD.decode(encoded).expect("base64");
            let (_, block) = x509_parser::pem::parse_x509_pem(&text).expect("PEM");
            let (_, certificate) = X509Certificate::from_der(&block.contents).expect("DER");
            assert_eq!(certificate.subject().to_string(), subject);
            let (_, ca) = X509Certificate::from_der(authority.certificate()).expect("DER");
            certificate.verify_signature(Some(ca.public_key())).expect("signed by the authority");
            let validity = certificate.validity();
            assert_eq!(validity.not_before.timestamp(), now().as_second() - 300);
            assert_eq!(validity.not_after.timestamp() - now().as_second(), lifetime);
            assert!(!certificate.is_ca());
            // What is signed is done: another look changes nothing.
            assert!(!complete(&authority, &mut csr, now()).expect("completed"));
        }
        (None, Err(part)) => {
            let failed = condition(&csr, "Failed").expect("a failure");
            assert_eq!(failed["reason"], "SignerValidationFailure");
            let message = failed["message"].as_str().unwrap_or_default();
            assert!(message.contains(part), "{message}");
            assert!(!complete(&authority, &mut csr, now()).expect("completed"));
        }
        (got, expected) => panic!("{:?} gave {got:?}, expected {expected:?}: {csr}", case.signer),
    }
}

const YEAR: i64 = 365 * 24 * 3600;
const CLIENT_USAGES: &[&str] = &["digital signature", "client auth"];
const SERVER_USAGES: &[&str] = &["digital signature", "key encipherment", "server auth"];

#[test]
fn signers() {
    let subject = "O=system:nodes, CN=system:node:n1";
    let dns = || vec![SanType::DnsName("n1".try_into().expect("a name"))];
    check(&Case::node(KUBELET_CLIENT, CLIENT_USAGES), Ok((subject, YEAR - 300)));
    check(&Case { names: dns(), ..Case::node(KUBELET_CLIENT, CLIENT_USAGES) }, Err("DNS subjectAltNames are not allowed"));
    check(&Case::node(KUBELET_CLIENT, SERVER_USAGES), Err("usages did not match [client auth digital signature"));
    check(&Case { common_name: "n1", ..Case::node(KUBELET_CLIENT, CLIENT_USAGES) }, Err("does not begin with system:node:"));
    let other = Case { organization: "devs", ..Case::node(KUBELET_CLIENT, CLIENT_USAGES) };
    check(&other, Err("subject organization is not system:nodes"));
    check(&Case { names: dns(), ..Case::node(KUBELET_SERVING, SERVER_USAGES) }, Ok((subject, YEAR - 300)));
    check(&Case::node(KUBELET_SERVING, SERVER_USAGES), Err("DNS or IP subjectAltName is required"));
    let user = |usages| Case { common_name: "ann", organization: "devs", ..Case::node(CLIENT, usages) };
    check(&user(CLIENT_USAGES), Ok(("O=devs, CN=ann", YEAR - 300)));
    check(&user(SERVER_USAGES), Err("invalid usage for client certificate: server auth"));
    check(&user(&["digital signature"]), Err("missing required usage"));
    check(&user(&["client auth", "no such usage"]), Err("invalid usage"));
    let legacy = Case { usages: &["any", "cert sign"], ..Case::node(LEGACY, &[]) };
    check(&legacy, Ok((subject, YEAR - 300)));
}

#[test]
fn lifetimes() {
    let at = |seconds| Case { seconds: Some(seconds), ..Case::node(KUBELET_CLIENT, CLIENT_USAGES) };
    let subject = "O=system:nodes, CN=system:node:n1";
    check(&at(60), Ok((subject, 600)));
    check(&at(3600), Ok((subject, 3600)));
    check(&at(24 * 3600), Ok((subject, 24 * 3600 - 300)));
    check(&at(10 * YEAR), Ok((subject, YEAR - 300)));
}

#[test]
fn what_waits() {
    let case = Case::node(KUBELET_CLIENT, CLIENT_USAGES);
    let base = case.object();
    let with = |change: &dyn Fn(&mut Value)| {
        let mut csr = base.clone();
        change(&mut csr);
        waits(&csr)
    };
    assert!(waits(&base));
    assert!(!with(&|csr| csr["status"]["conditions"] = json!([])));
    assert!(!with(&|csr| csr["spec"]["signerName"] = "example.com/x".into()));
    assert!(!with(&|csr| csr["status"]["certificate"] = "eA==".into()));
    assert!(!with(&|csr| csr["status"]["conditions"] = json!([{"type": "Approved"}, {"type": "Denied"}])));
}

#[tokio::test]
async fn loop_signs_what_is_approved() {
    let mut pending = Case::node(KUBELET_CLIENT, CLIENT_USAGES).object();
    pending["status"] = json!({});
    let cluster = Fake::new([(CSRS, pending.clone())]);
    let shutdown = CancellationToken::new();
    let task = tokio::spawn(run(cluster.clone(), Arc::new(authority()), shutdown.clone()));
    let signed = Arc::new(Notify::new());
    let seen = signed.clone();
    cluster.on_change(CSRS, Arc::new(move |change: &Change<'_>| {
        let csr: Value = serde_json::from_slice(change.new.unwrap_or_default()).unwrap_or_default();
        if csr["status"]["certificate"].is_string() {
            seen.notify_one();
        }
    }));
    pending["status"] = json!({"conditions": [{"type": "Approved", "status": "True"}]});
    cluster.put(CSRS, pending);
    signed.notified().await;
    shutdown.cancel();
    task.await.expect("the loop ends");
}
