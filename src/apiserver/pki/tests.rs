use super::authority::{Authority, Purpose, alternative_names};
use super::seal::{self, ServerToken};
use super::*;
use rustls_pki_types::{ServerName, UnixTime};
use std::sync::Arc;
use x509_parser::prelude::{FromDer, X509Certificate};

fn now() -> Timestamp {
    "2026-05-01T12:00:00Z".parse().expect("a time")
}

fn token(dir: &tempfile::TempDir, name: &str) -> ServerToken {
    ServerToken::load_or_create(&dir.path().join(name)).expect("a token")
}

#[test]
fn certificates_parse_and_verify() {
    let authority = Authority::create("kubernetes", now()).expect("an authority");
    let purpose = Purpose::Client { common_name: "ann".into(), organizations: vec!["devs".into(), "ops".into()] };
    let client = authority.identity(&purpose, SignedDuration::from_hours(24), now()).expect("a client");
    let (rest, parsed) = X509Certificate::from_der(&client.certificate).expect("DER");
    assert!(rest.is_empty());
    assert_eq!(parsed.subject().to_string(), "O=devs, O=ops, CN=ann");
    assert_eq!(parsed.issuer().to_string(), "CN=kubernetes");
    assert!(!parsed.is_ca());
    assert_eq!(parsed.validity().not_before.timestamp(), (now() - authority::BACKDATE).as_second());
    assert_eq!(parsed.validity().not_after.timestamp(), now().as_second() + 24 * 3600);
    let (_, ca) = X509Certificate::from_der(authority.certificate()).expect("DER");
    assert!(ca.is_ca());
    parsed.verify_signature(Some(ca.public_key())).expect("signed by the authority");
    ca.verify_signature(None).expect("signed by itself");
}

/// What webpki accepts is what clients in Rust and Go accept.
#[test]
fn webpki_accepts_server_and_client() {
    let authority = Authority::create("kubernetes", now()).expect("an authority");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = rustls::RootCertStore::empty();
    roots.add(authority.certificate().clone()).expect("a root");
    let roots = Arc::new(roots);
    let at = UnixTime::since_unix_epoch(std::time::Duration::from_secs(now().as_second() as u64));
    let purpose = Purpose::Server {
        common_name: "kube-apiserver".into(),
        names: vec!["kubernetes.default.svc".into()],
        addresses: vec!["10.96.0.1".parse().expect("an address")],
    };
    let server = authority.identity(&purpose, SignedDuration::from_hours(24), now()).expect("a server");
    let verifier = rustls::client::WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone())
        .build()
        .expect("a verifier");
    use rustls::client::danger::ServerCertVerifier;
    for (name, good) in [("kubernetes.default.svc", true), ("10.96.0.1", true), ("example.com", false)] {
        let name = ServerName::try_from(name).expect("a name");
        let result = verifier.verify_server_cert(&server.certificate, &[], &name, &[], at);
        assert_eq!(result.is_ok(), good, "{name:?}: {result:?}");
    }
    let purpose = Purpose::Client { common_name: "ann".into(), organizations: vec![] };
    let client = authority.identity(&purpose, SignedDuration::from_hours(24), now()).expect("a client");
    let verifier = rustls::server::WebPkiClientVerifier::builder_with_provider(roots, provider).build().expect("one");
    verifier.verify_client_cert(&client.certificate, &[], at).expect("a good client");
    assert!(verifier.verify_client_cert(&server.certificate, &[], at).is_err(), "a server is no client");
}

#[test]
fn sealing() {
    let dir = tempfile::tempdir().expect("a directory");
    let (ours, theirs) = (token(&dir, "ours"), token(&dir, "theirs"));
    let sealed = seal::seal(&ours, b"secret").expect("sealed");
    assert_eq!(seal::open(&ours, &sealed).expect("opened"), b"secret");
    assert!(matches!(seal::open(&theirs, &sealed), Err(Error::WrongToken)));
    assert!(!String::from_utf8_lossy(&sealed).contains("secret"));
    let text = String::from_utf8(sealed).expect("JSON");
    let flipped = text.replace("\"sealed\":\"", "\"sealed\":\"AAAA");
    assert!(seal::open(&ours, flipped.as_bytes()).is_err());
    assert!(matches!(seal::open(&ours, b"{}"), Err(Error::Damaged(_))));
    // The same file gives the same token, and only its owner reads it.
    assert_eq!(seal::open(&token(&dir, "ours"), text.as_bytes()).expect("opened"), b"secret");
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(dir.path().join("ours")).expect("a file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    std::fs::write(dir.path().join("weak"), "short\n").expect("written");
    assert!(matches!(ServerToken::load_or_create(&dir.path().join("weak")), Err(Error::WeakToken { .. })));
}

#[tokio::test]
async fn second_server_loads_what_the_first_made() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = windlass_store::EmbeddedConfig::new(dir.path().join("store.redb"));
    let store = windlass_store::Embedded::open(config).await.expect("a store");
    let shared = token(&dir, "token");
    let (first, second) = tokio::join!(Pki::load_or_create(&store, &shared), Pki::load_or_create(&store, &shared));
    let (first, second) = (first.expect("keys"), second.expect("keys"));
    assert_eq!(first.cluster.hash(), second.cluster.hash());
    assert_eq!(first.service_account_key, second.service_account_key);
    assert_eq!(first.front_proxy.hash(), second.front_proxy.hash());
    let wrong = Pki::load_or_create(&store, &token(&dir, "other")).await;
    let message = wrong.expect_err("another token").to_string();
    assert!(message.contains("copy the server token file"), "{message}");
}

#[test]
fn der_of_lengths_and_times() {
    assert_eq!(der::tlv(4, &[0; 127])[..2], [4, 127]);
    assert_eq!(der::tlv(4, &[0; 128])[..3], [4, 0x81, 128]);
    assert_eq!(der::tlv(4, &[0; 300])[..4], [4, 0x82, 1, 44]);
    assert_eq!(der::integer(&[0, 0x80]), [2, 2, 0, 0x80]);
    assert_eq!(der::integer(&[0]), [2, 1, 0]);
    assert_eq!(der::oid(&[1, 2, 840, 10045, 4, 3, 2]), [6, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2]);
    assert_eq!(der::named_bits(&[0, 2]), [3, 2, 5, 0xa0]);
    assert_eq!(der::named_bits(&[8]), [3, 3, 7, 0, 0x80]);
    let time = |text: &str| String::from_utf8(der::time(text.parse().expect("a time"))[2..].to_vec()).expect("ASCII");
    assert_eq!(time("2049-12-31T23:59:59Z"), "491231235959Z");
    assert_eq!(time("2050-01-01T00:00:00Z"), "20500101000000Z");
    assert_eq!(alternative_names(&["a".into()], &[]), [0x30, 3, 0x82, 1, b'a']);
}

#[test]
fn pem_lines() {
    let text = pem("X", &[0; 60]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!((lines[0], lines[1].len(), lines[2].len(), lines[3]), ("-----BEGIN X-----", 64, 16, "-----END X-----"));
}
