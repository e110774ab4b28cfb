use http::Request;
use http_body_util::BodyExt;
use tower::ServiceExt;

use super::*;

/// Lets pass who says `Authorization: open`; nobody else.
struct Sesame;

#[async_trait]
impl Gate for Sesame {
    async fn admit(&self, request: &Parts) -> Result<(), Denied> {
        match request.headers.get(header::AUTHORIZATION) {
            Some(word) if word == "open" => Ok(()),
            Some(_) => Err(Denied { status: StatusCode::FORBIDDEN, message: format!("no {} for you", request.uri) }),
            None => Err(Denied { status: StatusCode::UNAUTHORIZED, message: "Unauthorized".into() }),
        }
    }
}

fn health() -> Health {
    let health = Health::new();
    health.check("store").ok();
    health.check("informers").fail("3 informers not started yet");
    health
}

async fn ask(path: &str, word: Option<&str>) -> (u16, String, Bytes) {
    let mut request = Request::builder().uri(path);
    if let Some(word) = word {
        request = request.header(header::AUTHORIZATION, word);
    }
    let request = request.body(http_body_util::Empty::<Bytes>::new()).expect("request");
    let routes = routes(health(), json!({"maxPods": 110}), "kubeletconfig", Arc::new(Sesame));
    let reply = warp::service(routes).oneshot(request).await.expect("infallible");
    let content_type = reply.headers().get(header::CONTENT_TYPE).map(|v| v.to_str().unwrap_or("").to_owned());
    let status = reply.status().as_u16();
    let body = reply.into_body().collect().await.expect("body").to_bytes();
    (status, content_type.unwrap_or_default(), body)
}

async fn check(path: &str, word: Option<&str>, status: u16, want: &str) {
    let (got, _, body) = ask(path, word).await;
    assert_eq!((got, String::from_utf8_lossy(&body).as_ref()), (status, want), "{path}");
}

#[tokio::test]
async fn health_in_upstreams_words() {
    check("/livez", None, 200, "ok").await;
    check("/livez?verbose", None, 200, "[+]ping ok\nlivez check passed\n").await;
    let failed = "[+]ping ok\n[+]store ok\n[-]informers failed: reason withheld\nreadyz check failed\n";
    check("/readyz", None, 500, failed).await;
    check("/readyz?exclude=informers", None, 200, "ok").await;
    let excluded = "[+]ping ok\n[+]store excluded: ok\n[+]informers excluded: ok\n\
                    warn: some health checks cannot be excluded: no matches for \"nobody\"\nreadyz check passed\n";
    check("/readyz?verbose&exclude=informers&exclude=store&exclude=nobody", None, 200, excluded).await;
    check("/healthz?exclude=informers", None, 200, "ok").await;
    check("/readyz/store", Some("open"), 200, "ok").await;
    check("/readyz/informers", Some("open"), 500, "internal server error: 3 informers not started yet\n").await;
    check("/readyz/nobody", Some("open"), 404, "404 page not found\n").await;
}

#[tokio::test]
async fn everything_else_passes_the_gate() {
    for path in [
        "/readyz/store", "/healthz/ping", "/metrics", "/configz", "/version", "/debug/pprof", "/debug/pprof/profile",
        "/debug/pprof/heap", "/debug/pprof/cmdline", "/debug/pprof/symbol",
    ] {
        let (status, content_type, body) = ask(path, None).await;
        assert_eq!((status, content_type.as_str()), (401, "application/json"), "{path}");
        assert!(String::from_utf8_lossy(&body).contains("\"reason\":\"Unauthorized\""), "{path}");
        let (status, _, body) = ask(&format!("{path}?a=b"), Some("guess")).await;
        assert_eq!(status, 403, "{path}");
        let message = format!("\"message\":\"no {path}?a=b for you\"");
        assert!(String::from_utf8_lossy(&body).contains(&message), "{path}: {body:?}");
    }
}

#[tokio::test]
async fn documents() {
    check("/configz", Some("open"), 200, r#"{"kubeletconfig":{"maxPods":110}}"#).await;
    let (status, content_type, body) = ask("/version", Some("open")).await;
    assert_eq!((status, content_type.as_str()), (200, "application/json"));
    let version: Value = serde_json::from_slice(&body).expect("JSON");
    assert_eq!(version["gitVersion"], "v1.37.2+windlass");
    assert_eq!((version["major"].as_str(), version["minor"].as_str()), (Some("1"), Some("37")));
    let (status, content_type, body) = ask("/metrics", Some("open")).await;
    assert_eq!(status, 200);
    assert!(content_type.starts_with("text/plain; version=0.0.4"), "{content_type}");
    assert!(String::from_utf8_lossy(&body).contains("process_cpu_seconds_total"));
    let (status, _, _) = ask("/debug/pprof/cmdline", Some("open")).await;
    assert_eq!(status, 200);
    check("/debug/pprof/profile?seconds=0", Some("open"), 400, "seconds must be 1 to 600 and hz 1 to 1000\n").await;
    check("/debug/pprof/profile?seconds=x", Some("open"), 400, "seconds=x: not a number in range\n").await;
    check("/nowhere", Some("open"), 404, "").await;
}

#[tokio::test]
async fn symbol_names_this_function() {
    let address = symbol_names_here as fn() as usize;
    let (status, _, body) = ask(&format!("/debug/pprof/symbol?{address:#x}+0x1"), Some("open")).await;
    let body = String::from_utf8_lossy(&body).into_owned();
    assert_eq!(status, 200);
    assert!(body.starts_with("num_symbols: 1\n") && body.contains("symbol_names_here"), "{body}");
}

#[inline(never)]
fn symbol_names_here() {
    std::hint::black_box(());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cpu_profile_is_gzipped_protobuf_with_symbols() {
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let burn = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || burn_for_profile(&stop)
    });
    let (status, content_type, body) = ask("/debug/pprof/profile?seconds=1&hz=250", Some("open")).await;
    stop.store(true, std::sync::atomic::Ordering::SeqCst);
    burn.join().expect("burner");
    assert_eq!((status, content_type.as_str()), (200, "application/octet-stream"));
    let mut raw = Vec::new();
    std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(&body[..]), &mut raw).expect("gzip");
    let profile = <pprof::protos::Profile as pprof::protos::Message>::decode(&raw[..]).expect("protobuf");
    assert!(!profile.sample.is_empty());
    assert!(profile.string_table.iter().any(|s| s.contains("burn_for_profile")), "{:?}", profile.string_table);
}

#[inline(never)]
fn burn_for_profile(stop: &std::sync::atomic::AtomicBool) {
    let mut x = 1_u64;
    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
        for _ in 0..1000 {
            x = std::hint::black_box(x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        }
    }
}
