use super::request::TokenRequests;
use super::*;
use crate::authn::bearer::{Token, TokenAuthenticator};
use crate::authn::serviceaccount::ServiceAccounts;
use crate::cluster::testing::Fake;
use crate::cluster::{Cluster, Gr};
use jiff::Timestamp;
use std::sync::Arc;

fn issuer() -> Arc<Issuer> {
    let key = crate::pki::authority::generate_key().expect("a key");
    Arc::new(Issuer::new(&key, &[], &[]).expect("an issuer"))
}

fn account() -> Value {
    json!({"metadata": {"name": "app", "namespace": "ns", "uid": "sa-1"}})
}

fn pod() -> Value {
    json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "pod-1"},
        "spec": {"serviceAccountName": "app", "nodeName": "n1"},
    })
}

fn cluster() -> Arc<Fake> {
    Fake::new([
        (Gr("", "serviceaccounts"), account()),
        (Gr("", "pods"), pod()),
        (Gr("", "nodes"), json!({"metadata": {"name": "n1", "uid": "node-1"}})),
    ])
}

fn requests(cluster: Arc<Fake>, issuer: Arc<Issuer>) -> TokenRequests {
    TokenRequests { issuer, cluster, max_expiration: None, extend: true }
}

#[test]
fn signed_and_verified() {
    let (ours, theirs) = (issuer(), issuer());
    let token = ours.sign(&json!({"sub": "x"})).expect("a token");
    assert_eq!(ours.verify(&token).expect("claims")["sub"], "x");
    assert!(theirs.verify(&token).is_err());
    let mut parts: Vec<&str> = token.split('.').collect();
    let forged = URL_SAFE_NO_PAD.encode(r#"{"sub":"y"}"#);
    parts[1] = &forged;
    assert!(ours.verify(&parts.join(".")).is_err());
    assert_eq!(ours.jwks()["keys"][0]["alg"], "ES256");
    let document = ours.discovery("https://10.0.0.1:6443/openid/v1/jwks");
    assert_eq!(document["issuer"], DEFAULT_ISSUER);
    assert_eq!(document["id_token_signing_alg_values_supported"], json!(["ES256"]));
}

async fn issue(requests: &TokenRequests, spec: Value) -> Result<Value, String> {
    let now = Timestamp::now();
    let body = requests.prepare("ns", "app", json!({"spec": spec}), now).await.map_err(|e| e.message.clone())?;
    requests.issue(body, now, &mut Vec::new()).await.map_err(|e| e.message.clone())
}

/// Requests with what their claims are, or why they are refused.
#[tokio::test]
async fn claims_of_requests() {
    let issuer = issuer();
    let requests = requests(cluster(), issuer.clone());
    let pod_ref = json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "pod-1"});
    let good = [
        (json!({}), json!({"namespace": "ns", "serviceaccount": {"name": "app", "uid": "sa-1"}}), 3600),
        (
            json!({"boundObjectRef": pod_ref, "expirationSeconds": 900}),
            json!({
                "namespace": "ns", "serviceaccount": {"name": "app", "uid": "sa-1"},
                "pod": {"name": "p", "uid": "pod-1"}, "node": {"name": "n1", "uid": "node-1"},
            }),
            900,
        ),
        (
            json!({"boundObjectRef": {"apiVersion": "v1", "kind": "Node", "name": "n1"}}),
            json!({
                "namespace": "ns", "serviceaccount": {"name": "app", "uid": "sa-1"},
                "node": {"name": "n1", "uid": "node-1"},
            }),
            3600,
        ),
    ];
    for (spec, private, lifetime) in good {
        let answer = issue(&requests, spec.clone()).await.expect("a token");
        let claims = issuer.verify(answer["status"]["token"].as_str().unwrap_or_default()).expect("claims");
        assert_eq!(claims["kubernetes.io"], private, "{spec}");
        assert_eq!(claims["sub"], "system:serviceaccount:ns:app");
        assert_eq!(claims["aud"], json!([DEFAULT_ISSUER]));
        let span = claims["exp"].as_i64().unwrap_or_default() - claims["iat"].as_i64().unwrap_or_default();
        assert_eq!(span, lifetime, "{spec}");
    }
    let bad = [
        (json!({"expirationSeconds": 599}), "may not specify a duration less than 10 minutes"),
        (json!({"expirationSeconds": 1_i64 << 33}), "larger than 2^32 seconds"),
        (json!({"boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": "gone"}}), "\"gone\" not found"),
        (json!({"boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "x"}}), "does not match the UID in record"),
        (json!({"boundObjectRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"}}), "cannot bind token to object of type"),
    ];
    for (spec, part) in bad {
        let error = issue(&requests, spec.clone()).await.expect_err("refused");
        assert!(error.contains(part), "{spec}: {error}");
    }
}

/// The token that is injected into pods lives on for a year, but warns after an hour.
#[tokio::test]
async fn injected_tokens_are_extended() {
    let issuer = issuer();
    let requests = requests(cluster(), issuer.clone());
    let spec = json!({
        "boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": "p"}, "expirationSeconds": 3607,
    });
    let answer = issue(&requests, spec).await.expect("a token");
    let claims = issuer.verify(answer["status"]["token"].as_str().unwrap_or_default()).expect("claims");
    let at = |field: &Value| field.as_i64().unwrap_or_default();
    let start = at(&claims["iat"]);
    assert_eq!(at(&claims["exp"]) - start, 365 * 24 * 3600);
    assert_eq!(at(&claims["kubernetes.io"]["warnafter"]) - start, 3607);
}

async fn check(accounts: &ServiceAccounts, token: &str, expected: Result<&str, &str>) {
    let audiences = [DEFAULT_ISSUER.to_owned()];
    match (accounts.authenticate_token(token, &audiences).await, expected) {
        (Token::Good(result), Ok(name)) => assert_eq!(result.user.name, name),
        (Token::Bad(why), Err(part)) => assert!(why.contains(part), "{why}"),
        (Token::Unknown, Err("")) => {}
        (got, expected) => panic!("{got:?}, expected {expected:?}"),
    }
}

/// A bound token is good as long as what it is bound to is there.
#[tokio::test]
async fn liveness_of_bound_objects() {
    let (cluster, issuer) = (cluster(), issuer());
    let requests = requests(cluster.clone(), issuer.clone());
    let accounts = ServiceAccounts::new(issuer.clone(), cluster.clone());
    let user = "system:serviceaccount:ns:app";
    let spec = json!({"boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": "p"}});
    let token = issue(&requests, spec).await.expect("a token")["status"]["token"].as_str().unwrap_or_default().to_owned();
    check(&accounts, &token, Ok(user)).await;
    let mut again = pod();
    again["metadata"]["uid"] = "pod-2".into();
    cluster.put(Gr("", "pods"), again);
    check(&accounts, &token, Err("pod UID (pod-2) does not match")).await;
    cluster.delete(Gr("", "pods"), "ns", "p").await.expect("deleted");
    check(&accounts, &token, Err("service account token has been invalidated")).await;
    let mut dying = pod();
    dying["metadata"]["deletionTimestamp"] = "2020-01-01T00:00:00Z".into();
    cluster.put(Gr("", "pods"), dying);
    check(&accounts, &token, Err("service account token has been invalidated")).await;
    cluster.put(Gr("", "pods"), pod());
    check(&accounts, &token, Ok(user)).await;
    cluster.delete(Gr("", "serviceaccounts"), "ns", "app").await.expect("deleted");
    check(&accounts, &token, Err("not found")).await;
}

#[tokio::test]
async fn times_and_audiences() {
    let (cluster, issuer) = (cluster(), issuer());
    let accounts = ServiceAccounts::new(issuer.clone(), cluster);
    let now = Timestamp::now().as_second();
    let token = |change: Value| {
        let mut claims = json!({
            "iss": DEFAULT_ISSUER, "sub": "system:serviceaccount:ns:app", "aud": [DEFAULT_ISSUER],
            "iat": now, "nbf": now, "exp": now + 600,
            "kubernetes.io": {"namespace": "ns", "serviceaccount": {"name": "app", "uid": "sa-1"}},
        });
        for (key, value) in change.as_object().expect("an object") {
            claims[key] = value.clone();
        }
        issuer.sign(&claims).expect("a token")
    };
    check(&accounts, &token(json!({})), Ok("system:serviceaccount:ns:app")).await;
    check(&accounts, &token(json!({"exp": now - 61})), Err("has expired")).await;
    check(&accounts, &token(json!({"nbf": now + 120})), Err("not valid yet")).await;
    check(&accounts, &token(json!({"aud": ["vault"]})), Err("token audiences [\"vault\"] is invalid for the target audiences")).await;
    check(&accounts, &token(json!({"iss": "https://other"})), Err("")).await;
    check(&accounts, "abc.def", Err("")).await;
    let wrong = json!({"kubernetes.io": {"namespace": "ns", "serviceaccount": {"name": "app", "uid": "old"}}});
    check(&accounts, &token(wrong), Err("service account UID (sa-1) does not match claim (old)")).await;
}

/// A secret of the token type is filled, its token works, and it goes with its account.
#[tokio::test]
async fn secret_tokens() {
    let (cluster, issuer) = (cluster(), issuer());
    let accounts = ServiceAccounts::new(issuer.clone(), cluster.clone());
    let shutdown = tokio_util::sync::CancellationToken::new();
    let secrets = Gr("", "secrets");
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let task = tokio::spawn(legacy::run(cluster.clone(), issuer.clone(), "CA".into(), shutdown.clone()));
    cluster.on_change(secrets, Arc::new(move |change| {
        let new: Option<Value> = change.new.and_then(|bytes| serde_json::from_slice(bytes).ok());
        tell.send(new).expect("the test listens");
    }));
    tokio::task::yield_now().await;
    cluster.put(secrets, json!({
        "metadata": {"name": "t", "namespace": "ns", "annotations": {"kubernetes.io/service-account.name": "app"}},
        "type": "kubernetes.io/service-account-token",
    }));
    let filled = loop {
        if let Some(secret) = told.recv().await.flatten().filter(|secret| secret["data"]["token"].is_string()) {
            break secret;
        }
    };
    use base64::engine::general_purpose::STANDARD;
    let token = STANDARD.decode(filled["data"]["token"].as_str().unwrap_or_default()).expect("base64");
    let token = String::from_utf8(token).expect("text");
    check(&accounts, &token, Ok("system:serviceaccount:ns:app")).await;
    let forged = issuer.sign(&legacy::claims("ns", "gone", &account())).expect("a token");
    check(&accounts, &forged, Err("Token has been invalidated")).await;
    cluster.delete(Gr("", "serviceaccounts"), "ns", "app").await.expect("deleted");
    while told.recv().await.flatten().is_some() {}
    check(&accounts, &token, Err("Token has been invalidated")).await;
    shutdown.cancel();
    task.await.expect("the loop ends");
}

#[tokio::test]
async fn join_tokens_authenticate() {
    let cluster = cluster();
    let hash = "ab".repeat(32);
    let lifetime = jiff::SignedDuration::from_hours(1);
    let join = join::create(cluster.as_ref(), &hash, lifetime).await.expect("a token");
    let bootstrap = join.strip_prefix(&format!("WL1.{hash}.")).expect("the hash").to_owned();
    let tokens = crate::authn::bootstrap_token::BootstrapTokens { cluster: cluster.clone() };
    match tokens.authenticate_token(&bootstrap, &[]).await {
        Token::Good(result) => {
            assert!(result.user.name.starts_with("system:bootstrap:"));
            assert_eq!(result.user.groups, ["system:bootstrappers", join::BOOTSTRAPPERS]);
        }
        other => panic!("{other:?}"),
    }
    let expired = join::create(cluster.as_ref(), &hash, -lifetime).await.expect("a token");
    let expired = expired.rsplitn(3, '.').take(2).collect::<Vec<_>>();
    let expired = format!("{}.{}", expired[1], expired[0]);
    assert!(matches!(tokens.authenticate_token(&expired, &[]).await, Token::Unknown));
    let wrong = format!("{}.0000000000000000", &bootstrap[..6]);
    assert!(matches!(tokens.authenticate_token(&wrong, &[]).await, Token::Unknown));
}
