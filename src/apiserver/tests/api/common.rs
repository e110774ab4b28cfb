//! An API server in a temporary directory, driven through its in-process service.

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use serde_json::Value;
use tokio_util::sync::CancellationToken;
use tower::Service as _;
use windlass_apiserver::content::ReplyBody;
use windlass_apiserver::request::UserInfo;
use windlass_apiserver::{ApiServer, Config};

pub struct Server {
    pub api: ApiServer,
    /// Lives as long as the server.
    _dir: tempfile::TempDir,
    pub shutdown: CancellationToken,
}

pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", String::from_utf8_lossy(&self.body)))
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default()
    }

    pub fn warnings(&self) -> Vec<&str> {
        self.headers.get_all("warning").iter().filter_map(|v| v.to_str().ok()).collect()
    }
}

impl Server {
    pub async fn start() -> Server {
        Server::with(|_| ()).await
    }

    /// A server that was started elsewhere.
    pub fn of(api: ApiServer, shutdown: CancellationToken) -> Server {
        Server { api, _dir: tempfile::tempdir().expect("a temporary directory"), shutdown }
    }

    pub async fn with(change: impl FnOnce(&mut Config)) -> Server {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut config = Config { data_dir: dir.path().to_owned(), secure_port: 0, bind_address: [127, 0, 0, 1].into(), ..Config::default() };
        change(&mut config);
        let shutdown = CancellationToken::new();
        let api = ApiServer::start(config, shutdown.clone()).await.expect("the server starts");
        Server { api, _dir: dir, shutdown }
    }

    /// One request as the administrator.
    pub async fn call(&self, method: &str, path: &str, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Answer {
        self.call_as(UserInfo::named("admin", &["system:masters"]), method, path, headers, body).await
    }

    pub async fn call_as(&self, user: UserInfo, method: &str, path: &str, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Answer {
        let (status, headers, body) = self.open_as(user, method, path, headers, body).await;
        let body = body.collect().await.expect("a whole body").to_bytes();
        Answer { status, headers, body }
    }

    pub async fn open_as(&self, user: UserInfo, method: &str, path: &str, headers: &[(&str, &str)], body: impl Into<Bytes>) -> (StatusCode, HeaderMap, ReplyBody) {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body.into())).expect("a request");
        let reply = self.api.service_for(user).call(request).await.expect("an answer");
        let (parts, body) = reply.into_parts();
        (parts.status, parts.headers, body)
    }

    /// A request with a JSON body; checks the status and that the answer contains `want`.
    pub async fn check(&self, request: &str, body: Value, status: u16, want: Value) -> Value {
        let (method, path) = request.split_once(' ').expect("METHOD PATH");
        let kind = match (method, path.split_once("type=")) {
            ("PATCH", Some((_, "json"))) => "application/json-patch+json",
            ("PATCH", Some((_, "strategic"))) => "application/strategic-merge-patch+json",
            ("PATCH", Some((_, "apply"))) => "application/apply-patch+yaml",
            ("PATCH", _) => "application/merge-patch+json",
            _ => "application/json",
        };
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let answer = self.call(method, path, &[("content-type", kind)], body).await;
        let got = answer.json();
        assert_eq!(answer.status.as_u16(), status, "{request}: {got:#}");
        if let Err(why) = contains(&got, &want, "") {
            panic!("{request}: {why}\n{got:#}");
        }
        got
    }

    /// Opens a watch.
    pub async fn watch(&self, path: &str) -> Watch {
        let user = UserInfo::named("admin", &["system:masters"]);
        let (status, _, body) = self.open_as(user, "GET", path, &[], "").await;
        assert_eq!(status, 200, "{path}");
        Watch { body, buffer: Vec::new() }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

pub struct Watch {
    body: ReplyBody,
    buffer: Vec<u8>,
}

impl Watch {
    /// The next event; `None` when the watch has ended.
    pub async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.buffer.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                return Some(serde_json::from_slice(&line).expect("a line of JSON"));
            }
            let frame = tokio::time::timeout(std::time::Duration::from_secs(20), self.body.frame()).await.expect("an event in time")?;
            if let Ok(data) = frame.expect("a frame").into_data() {
                self.buffer.extend_from_slice(&data);
            }
        }
    }

    /// The next event in short: `ADDED name`.
    pub async fn short(&mut self) -> String {
        match self.next().await {
            Some(event) => format!("{} {}", event["type"].as_str().unwrap_or("?"), event["object"]["metadata"]["name"].as_str().unwrap_or("-")),
            None => "END".into(),
        }
    }
}

/// Whether `got` has everything that `want` names. Arrays must match item by item.
pub fn contains(got: &Value, want: &Value, path: &str) -> Result<(), String> {
    match (got, want) {
        (Value::Object(got), Value::Object(want)) => {
            want.iter().try_for_each(|(k, w)| contains(got.get(k).unwrap_or(&Value::Null), w, &format!("{path}.{k}")))
        }
        (Value::Array(got), Value::Array(want)) if got.len() == want.len() => {
            got.iter().zip(want).enumerate().try_for_each(|(i, (g, w))| contains(g, w, &format!("{path}[{i}]")))
        }
        (Value::String(got), Value::String(want)) if want.starts_with('~') && got.contains(&want[1..]) => Ok(()),
        _ if got == want => Ok(()),
        _ => Err(format!("at {path}: got {got}, want {want}")),
    }
}
