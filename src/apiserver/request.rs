//! What a request asks for, read once from its path and method, and who asks.
//!
//! The rules are upstream's (`apiserver/pkg/endpoints/request/requestinfo.go`): authorization and
//! routing must read a path in the same way, so there is one parser and both use its result.

use std::collections::BTreeMap;

use http::Method;
use serde::{Deserialize, Serialize};

/// The user behind a request, as authentication established it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserInfo {
    #[serde(rename = "username", default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub uid: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub extra: BTreeMap<String, Vec<String>>,
}

impl UserInfo {
    /// The superuser that Windlass' own loops act as when they write through [`crate::storage::Objects`].
    pub fn system_apiserver() -> Self {
        UserInfo {
            name: "system:apiserver".into(),
            groups: vec!["system:masters".into(), "system:authenticated".into()],
            ..Self::default()
        }
    }

    /// A user with a name and groups; `system:authenticated` is added.
    pub fn named(name: impl Into<String>, groups: &[&str]) -> Self {
        let mut groups: Vec<String> = groups.iter().map(|g| (*g).to_owned()).collect();
        groups.push("system:authenticated".into());
        UserInfo { name: name.into(), groups, ..Self::default() }
    }

    pub fn in_group(&self, group: &str) -> bool {
        self.groups.iter().any(|g| g == group)
    }
}

/// A request's path and method, taken apart. Strings are empty where the request has no such part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestInfo {
    /// `get list watch create update patch delete deletecollection`, or for a non-resource request the method in lower case.
    pub verb: String,
    pub is_resource: bool,
    /// The whole path, undecoded.
    pub path: String,
    /// `api` or `apis`.
    pub api_prefix: String,
    pub api_group: String,
    pub api_version: String,
    pub namespace: String,
    pub resource: String,
    pub subresource: String,
    pub name: String,
    /// The path after the version and namespace: resource, name, subresource and whatever follows.
    pub parts: Vec<String>,
    /// The path used the old `/watch/` prefix, so that a watch is asked for whatever the query says.
    pub deprecated_watch: bool,
}

/// Subresources of a namespace; any third part but these is a resource in that namespace.
const NAMESPACE_SUBRESOURCES: [&str; 2] = ["status", "finalize"];

impl RequestInfo {
    /// Takes a request apart. `query` is the raw query string; only `watch` and a `fieldSelector` that
    /// names one object are looked at.
    pub fn parse(method: &Method, path: &str, query: &str) -> RequestInfo {
        let mut info = RequestInfo {
            verb: method.as_str().to_ascii_lowercase(),
            path: path.to_owned(),
            ..Self::default()
        };
        let mut parts = split(path);
        if parts.len() < 3 || (parts[0] != "api" && parts[0] != "apis") {
            return info;
        }
        info.api_prefix = parts.remove(0);
        if info.api_prefix == "apis" {
            if parts.len() < 3 {
                return info;
            }
            info.api_group = parts.remove(0);
        }
        info.is_resource = true;
        info.api_version = parts.remove(0);
        info.verb = match *method {
            Method::POST => "create",
            Method::GET | Method::HEAD => "get",
            Method::PUT => "update",
            Method::PATCH => "patch",
            Method::DELETE => "delete",
            _ => "",
        }
        .to_owned();

        if parts[0] == "watch" {
            if parts.len() < 2 {
                info.is_resource = false;
                info.verb = method.as_str().to_ascii_lowercase();
                return info;
            }
            info.verb = "watch".into();
            info.deprecated_watch = true;
            parts.remove(0);
        }

        if parts[0] == "namespaces" {
            if parts.len() > 1 {
                info.namespace.clone_from(&parts[1]);
                if parts.len() > 2 && !NAMESPACE_SUBRESOURCES.contains(&parts[2].as_str()) {
                    parts.drain(..2);
                }
            }
        }
        info.resource.clone_from(&parts[0]);
        if parts.len() >= 2 {
            info.name.clone_from(&parts[1]);
        }
        if parts.len() >= 3 {
            info.subresource.clone_from(&parts[2]);
        }
        info.parts = parts;

        if info.name.is_empty() {
            match info.verb.as_str() {
                "get" => info.collection_verb(query),
                "watch" => info.name = selected_name(query).unwrap_or_default(),
                "delete" => info.verb = "deletecollection".into(),
                _ => {}
            }
        }
        info
    }

    /// `get` on a collection is a list or a watch, and perhaps of one named object.
    fn collection_verb(&mut self, query: &str) {
        let watch = form_urlencoded(query).any(|(k, v)| k == "watch" && truthy(&v));
        self.verb = if watch { "watch" } else { "list" }.into();
        self.name = selected_name(query).unwrap_or_default();
    }

    /// Whether the request has no natural end (metrics count it apart, no timeout applies).
    pub fn is_long_running(&self) -> bool {
        self.is_resource
            && (self.verb == "watch"
                || matches!(self.subresource.as_str(), "attach" | "exec" | "proxy" | "log" | "portforward"))
    }
}

/// Upstream reads a boolean parameter as true unless it is `false`, `0`, or empty-but-named is true.
pub(crate) fn truthy(value: &str) -> bool {
    !matches!(value.to_ascii_lowercase().as_str(), "false" | "0")
}

fn selected_name(query: &str) -> Option<String> {
    let selector = form_urlencoded(query).find(|(k, _)| k == "fieldSelector")?.1;
    let name = selector.split(',').find_map(|term| {
        let rest = term.strip_prefix("metadata.name=")?;
        Some(rest.strip_prefix('=').unwrap_or(rest))
    })?;
    let ok = !name.is_empty() && name != "." && name != ".." && !name.contains('/') && !name.contains('%');
    ok.then(|| name.to_owned())
}

/// Splits a path at `/`, dropping empty ends, and decodes each part.
fn split(path: &str) -> Vec<String> {
    let path = path.trim_matches('/');
    if path.is_empty() {
        return Vec::new();
    }
    path.split('/').map(|p| percent_decode(p, false)).collect()
}

/// The pairs of a query string, decoded (`+` is a space).
pub fn form_urlencoded(query: &str) -> impl Iterator<Item = (String, String)> + '_ {
    query.split('&').filter(|p| !p.is_empty()).map(|pair| {
        let (k, v) = pair.split_once('=').unwrap_or((pair, ""));
        (percent_decode(k, true), percent_decode(v, true))
    })
}

/// Decodes `%XX`; bytes that are then not UTF-8 become U+FFFD, which no name and no selector accepts.
pub fn percent_decode(s: &str, plus: bool) -> String {
    if !s.contains('%') && !(plus && s.contains('+')) {
        return s.to_owned();
    }
    let mut out = Vec::with_capacity(s.len());
    let mut bytes = s.bytes();
    while let Some(b) = bytes.next() {
        match b {
            b'+' if plus => out.push(b' '),
            b'%' => {
                let mut ahead = bytes.clone();
                let hex = |b: Option<u8>| b.and_then(|b| (b as char).to_digit(16));
                match (hex(ahead.next()), hex(ahead.next())) {
                    (Some(hi), Some(lo)) => {
                        out.push((hi * 16 + lo) as u8);
                        bytes = ahead;
                    }
                    _ => out.push(b'%'),
                }
            }
            b => out.push(b),
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(method: &str, target: &str, want: &str) {
        let method: Method = method.parse().expect("a test's method");
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let i = RequestInfo::parse(&method, path, query);
        let got = format!(
            "{} res={} g={} v={} ns={} r={} sub={} n={} parts={}",
            i.verb,
            i.is_resource,
            i.api_group,
            i.api_version,
            i.namespace,
            i.resource,
            i.subresource,
            i.name,
            i.parts.join("/")
        );
        assert_eq!(got, want, "{method} {target}");
    }

    /// Cases after `TestGetAPIRequestInfo` and `TestFieldSelectorParsing` upstream.
    #[test]
    fn paths() {
        check("GET", "/api", "get res=false g= v= ns= r= sub= n= parts=");
        check("GET", "/api/v1", "get res=false g= v= ns= r= sub= n= parts=");
        check("GET", "/apis/apps/v1", "get res=false g= v= ns= r= sub= n= parts=");
        check("GET", "/healthz", "get res=false g= v= ns= r= sub= n= parts=");
        check("GET", "/api/v1/namespaces", "list res=true g= v=v1 ns= r=namespaces sub= n= parts=namespaces");
        check("GET", "/api/v1/namespaces/other", "get res=true g= v=v1 ns=other r=namespaces sub= n=other parts=namespaces/other");
        check("GET", "/api/v1/namespaces/other/pods", "list res=true g= v=v1 ns=other r=pods sub= n= parts=pods");
        check("GET", "/api/v1/namespaces/other/pods?watch=true", "watch res=true g= v=v1 ns=other r=pods sub= n= parts=pods");
        check("GET", "/api/v1/namespaces/other/pods?watch=0", "list res=true g= v=v1 ns=other r=pods sub= n= parts=pods");
        check("GET", "/api/v1/watch/namespaces/other/pods", "watch res=true g= v=v1 ns=other r=pods sub= n= parts=pods");
        check("GET", "/api/v1/namespaces/other/pods/foo", "get res=true g= v=v1 ns=other r=pods sub= n=foo parts=pods/foo");
        check("HEAD", "/api/v1/pods", "list res=true g= v=v1 ns= r=pods sub= n= parts=pods");
        check("PUT", "/api/v1/namespaces/other/finalize", "update res=true g= v=v1 ns=other r=namespaces sub=finalize n=other parts=namespaces/other/finalize");
        check("PUT", "/api/v1/namespaces/other/status", "update res=true g= v=v1 ns=other r=namespaces sub=status n=other parts=namespaces/other/status");
        check("GET", "/api/v1/namespaces/ns/pods/p/proxy/a/b", "get res=true g= v=v1 ns=ns r=pods sub=proxy n=p parts=pods/p/proxy/a/b");
        check("DELETE", "/apis/apps/v1/namespaces/ns/deployments", "deletecollection res=true g=apps v=v1 ns=ns r=deployments sub= n= parts=deployments");
        check("POST", "/api/v1/namespaces/ns/pods", "create res=true g= v=v1 ns=ns r=pods sub= n= parts=pods");
        check("GET", "/api/v1/nodes?fieldSelector=metadata.name%3Dn1", "list res=true g= v=v1 ns= r=nodes sub= n=n1 parts=nodes");
        check("GET", "/api/v1/nodes?fieldSelector=metadata.name==n1,x=y&watch", "watch res=true g= v=v1 ns= r=nodes sub= n=n1 parts=nodes");
        check("GET", "/api/v1/nodes?fieldSelector=metadata.name%3D..", "list res=true g= v=v1 ns= r=nodes sub= n= parts=nodes");
    }

    #[test]
    fn decoding() {
        for (raw, plus, want) in [("a%2Fb", false, "a/b"), ("a+b", true, "a b"), ("a+b", false, "a+b"), ("100%", true, "100%"), ("%ff", true, "\u{fffd}"), ("%zz", true, "%zz")] {
            assert_eq!(percent_decode(raw, plus), want, "{raw}");
        }
    }
}
