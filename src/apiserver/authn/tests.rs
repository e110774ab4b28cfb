use super::impersonate::impersonate;
use super::*;
use crate::authz::{Attributes, Authorizer, Decision, Rules};
use crate::cluster::testing::Fake;
use crate::pki::Pki;
use http::Request;
use windlass_daemon::server::PeerCertificates;

fn parts(path: &str, headers: &[(&str, &str)]) -> Parts {
    let mut request = Request::builder().uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(()).expect("a request").into_parts().0
}

struct Bench {
    authn: Authn,
    pki: Pki,
    issuer: Arc<Issuer>,
    _dir: tempfile::TempDir,
}

fn bench() -> Bench {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("tokens.csv");
    std::fs::write(&file, "static,stan,7,\"devs\"\n").expect("written");
    let pki = Pki::create(jiff::Timestamp::now()).expect("keys");
    let issuer = Arc::new(Issuer::new(&pki.service_account_key, &[], &[]).expect("an issuer"));
    let cluster: Arc<dyn Cluster> = Fake::new([(
        crate::cluster::Gr("", "serviceaccounts"),
        serde_json::json!({"metadata": {"name": "app", "namespace": "ns", "uid": "u"}}),
    )]);
    let options = Options { token_file: Some(file), request_header_names: vec!["front-proxy-client".into()], anonymous: true };
    Bench { authn: build(&options, &cluster, &pki, &issuer).expect("authenticators"), pki, issuer, _dir: dir }
}

fn with_peer(mut parts: Parts, identity: &crate::pki::authority::Identity) -> Parts {
    parts.extensions.insert(PeerCertificates(vec![identity.certificate.clone()].into()));
    parts
}

async fn check(bench: &Bench, parts: &Parts, expected: Result<(&str, &[&str]), ()>) {
    let result = bench.authn.authenticate(parts).await;
    match (result, expected) {
        (Ok(found), Ok((name, groups))) => {
            assert_eq!(found.user.name, name);
            assert_eq!(found.user.groups, groups);
        }
        (Err(error), Err(())) => assert_eq!((error.code, error.message.as_str()), (401, "Unauthorized")),
        (got, expected) => panic!("{:?}: {got:?}, expected {expected:?}", parts.uri),
    }
}

#[tokio::test]
async fn credentials() {
    let bench = bench();
    let ann = bench.pki.client("ann", &["devs", "ops"]).expect("an identity");
    let stranger = Pki::create(jiff::Timestamp::now()).expect("keys").client("ann", &["system:masters"]).expect("one");
    let everyone = "system:authenticated";
    check(&bench, &with_peer(parts("/api/v1/pods", &[]), &ann), Ok(("ann", &["devs", "ops", everyone]))).await;
    // A second look comes from memory and says the same.
    check(&bench, &with_peer(parts("/api/v1/pods", &[]), &ann), Ok(("ann", &["devs", "ops", everyone]))).await;
    check(&bench, &with_peer(parts("/api/v1/pods", &[]), &stranger), Err(())).await;
    let bearer = |token: &str| parts("/api/v1/pods", &[("authorization", &format!("Bearer {token}"))]);
    check(&bench, &bearer("static"), Ok(("stan", &["devs", everyone]))).await;
    check(&bench, &bearer("wrong"), Err(())).await;
    // A bad token on a public path is still a bad token.
    check(&bench, &parts("/healthz", &[("authorization", "Bearer wrong")]), Err(())).await;
    let now = jiff::Timestamp::now().as_second();
    let claims = serde_json::json!({
        "iss": bench.issuer.url, "aud": bench.issuer.audiences, "exp": now + 600, "iat": now, "nbf": now, "jti": "j",
        "kubernetes.io": {"namespace": "ns", "serviceaccount": {"name": "app", "uid": "u"}},
    });
    let token = bench.issuer.sign(&claims).expect("a token");
    let account = ["system:serviceaccounts", "system:serviceaccounts:ns", everyone];
    check(&bench, &bearer(&token), Ok(("system:serviceaccount:ns:app", &account))).await;
    use base64::Engine;
    let encoded = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(&token);
    let protocol = format!("v4.channel.k8s.io, base64url.bearer.authorization.k8s.io.{encoded}");
    check(&bench, &parts("/x", &[("sec-websocket-protocol", &protocol)]), Ok(("system:serviceaccount:ns:app", &account))).await;
}

#[tokio::test]
async fn anonymous_paths() {
    let bench = bench();
    let public = ["/healthz", "/livez", "/readyz/etcd", "/version", "/openid/v1/jwks", "/.well-known/openid-configuration"];
    for path in public {
        check(&bench, &parts(path, &[]), Ok(("system:anonymous", &["system:unauthenticated"]))).await;
    }
    for path in ["/", "/api", "/apis", "/metrics", "/healthzz", "/debug/pprof/heap", "/openapi/v2"] {
        check(&bench, &parts(path, &[]), Err(())).await;
    }
}

#[tokio::test]
async fn front_proxy() {
    let bench = bench();
    let headers = [
        ("x-remote-user", "ann"),
        ("x-remote-group", "devs"),
        ("x-remote-group", "ops"),
        ("x-remote-uid", "7"),
        ("x-remote-extra-example.org%2fteam", "blue"),
    ];
    let proxy = bench.pki.proxy_client().expect("an identity");
    let found = bench.authn.authenticate(&with_peer(parts("/api", &headers), &proxy)).await.expect("a user");
    assert_eq!((found.user.name.as_str(), found.user.uid.as_str()), ("ann", "7"));
    assert_eq!(found.user.groups, ["devs", "ops", "system:authenticated"]);
    assert_eq!(found.user.extra["example.org/team"], ["blue"]);
    // The cluster's authority does not speak for others: the headers are not believed.
    let ann = bench.pki.client("bob", &[]).expect("an identity");
    check(&bench, &with_peer(parts("/api", &headers), &ann), Ok(("bob", &["system:authenticated"]))).await;
    // Without its headers the proxy is nobody.
    check(&bench, &with_peer(parts("/api", &[]), &proxy), Err(())).await;
}

#[tokio::test]
async fn token_reviews() {
    let bench = bench();
    let review = |token: &str| reviews::token_review(&bench.authn.bearer, serde_json::json!({"spec": {"token": token}}));
    let good = review("static").await.expect("an answer");
    assert_eq!(good["status"]["authenticated"], true);
    assert_eq!(good["status"]["user"]["username"], "stan");
    assert_eq!(review("nope").await.expect("an answer")["status"], serde_json::json!({"authenticated": false, "user": {}}));
    assert_eq!(review("").await.expect_err("refused").code, 400);
}

struct Impersonators;

impl Authorizer for Impersonators {
    fn authorize(&self, request: &Attributes<'_>) -> Decision {
        let allowed = request.verb == "impersonate"
            && (matches!((request.resource, request.name), ("users", "ann" | "system:anonymous") | ("groups", "devs" | "system:unauthenticated"))
                || (request.resource, request.namespace, request.name) == ("serviceaccounts", "ns", "app")
                || (request.group, request.resource, request.subresource) == ("authentication.k8s.io", "userextras", "scopes"));
        if allowed { Decision::Allow(String::new()) } else { Decision::NoOpinion(String::new()) }
    }
    fn rules_for(&self, _: &UserInfo, _: &str) -> Rules {
        Rules::default()
    }
}

#[test]
fn impersonation() {
    let run = |headers: &[(&str, &str)]| {
        let mut parts = parts("/api", headers);
        let caller = UserInfo { name: "root".into(), ..UserInfo::default() };
        let result = impersonate(&Impersonators, caller, &mut parts);
        if result.is_ok() {
            assert!(parts.headers.keys().all(|name| !name.as_str().starts_with("impersonate-")));
        }
        result.map(|user| format!("{} {:?} {:?}", user.name, user.groups, user.extra)).map_err(|error| error.message.clone())
    };
    let good: [(&[(&str, &str)], &str); 5] = [
        (&[], "root [] {}"),
        (&[("impersonate-user", "ann")], "ann [\"system:authenticated\"] {}"),
        (&[("impersonate-user", "ann"), ("impersonate-group", "devs"), ("impersonate-extra-Scopes", "x")], "ann [\"devs\", \"system:authenticated\"] {\"scopes\": [\"x\"]}"),
        (&[("impersonate-user", "system:serviceaccount:ns:app")], "system:serviceaccount:ns:app [\"system:serviceaccounts\", \"system:serviceaccounts:ns\", \"system:authenticated\"] {}"),
        (&[("impersonate-user", "system:anonymous")], "system:anonymous [\"system:unauthenticated\"] {}"),
    ];
    for (headers, expected) in good {
        assert_eq!(run(headers).as_deref(), Ok(expected), "{headers:?}");
    }
    let bad: [(&[(&str, &str)], &str); 4] = [
        (&[("impersonate-user", "bob")], "users \"bob\" is forbidden: User \"root\" cannot impersonate resource \"users\" in API group \"\" at the cluster scope"),
        (&[("impersonate-user", "ann"), ("impersonate-group", "admins")], "cannot impersonate resource \"groups\""),
        (&[("impersonate-user", "ann"), ("impersonate-uid", "1")], "cannot impersonate resource \"uids\" in API group \"authentication.k8s.io\""),
        (&[("impersonate-group", "devs")], "without impersonating a user"),
    ];
    for (headers, part) in bad {
        let error = run(headers).expect_err("refused");
        assert!(error.contains(part), "{error}");
    }
}
