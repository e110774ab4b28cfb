//! Which resources the API has, in its preferred versions: two requests for aggregated discovery (KEP-3352).

use std::collections::BTreeSet;

use http::{Request, header::ACCEPT};
use serde::{Deserialize, Deserializer};

use crate::Error;

const AGGREGATED: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

/// One resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Resource {
    pub group: String,
    pub version: String,
    pub plural: String,
    pub kind: String,
    pub namespaced: bool,
    pub verbs: BTreeSet<String>,
}

impl Resource {
    /// `group/version`, or `version` of the core group.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.clone() } else { format!("{}/{}", self.group, self.version) }
    }

    /// The path of the collection; `namespace` "" for all namespaces or cluster-scoped resources.
    pub fn path(&self, namespace: &str) -> String {
        let root = if self.group.is_empty() { "/api" } else { "/apis" };
        let scope = if namespace.is_empty() { String::new() } else { format!("namespaces/{namespace}/") };
        format!("{root}/{}/{scope}{}", self.api_version(), self.plural)
    }

    /// `plural.group`, as messages name it.
    pub fn name(&self) -> String {
        if self.group.is_empty() { self.plural.clone() } else { format!("{}.{}", self.plural, self.group) }
    }

    pub fn has(&self, verbs: &[&str]) -> bool {
        verbs.iter().all(|verb| self.verbs.contains(*verb))
    }
}

/// What was found.
#[derive(Clone, Debug, Default)]
pub struct Found {
    pub resources: Vec<Resource>,
    /// Group versions that should be there and could not be read, as `group/version`: nothing may be concluded about them.
    pub missing: Vec<String>,
}

/// Reads null as the empty value, which is how Go writes an empty slice.
pub fn null_as_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[derive(Deserialize)]
struct List {
    #[serde(default, deserialize_with = "null_as_default")]
    items: Vec<Group>,
}

#[derive(Deserialize)]
struct Group {
    #[serde(default)]
    metadata: Named,
    #[serde(default)]
    versions: Vec<Version>,
}

#[derive(Default, Deserialize)]
struct Named {
    #[serde(default)]
    name: String,
}

#[derive(Deserialize)]
struct Version {
    version: String,
    #[serde(default, deserialize_with = "null_as_default")]
    resources: Vec<Listed>,
    #[serde(default)]
    freshness: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Listed {
    resource: String,
    #[serde(default)]
    response_kind: Option<Kind>,
    #[serde(default)]
    scope: String,
    #[serde(default)]
    verbs: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Kind {
    kind: String,
}

/// Each resource of a group once, in the first version that has it.
fn collect(list: List, found: &mut Found) {
    for group in list.items {
        let mut seen = BTreeSet::new();
        for version in group.versions {
            let api_version = if group.metadata.name.is_empty() { version.version.clone() } else { format!("{}/{}", group.metadata.name, version.version) };
            if version.freshness == "Stale" {
                found.missing.push(api_version);
                continue;
            }
            for listed in version.resources {
                let Some(kind) = listed.response_kind.filter(|_| seen.insert(listed.resource.clone())) else { continue };
                found.resources.push(Resource {
                    group: group.metadata.name.clone(),
                    version: version.version.clone(),
                    plural: listed.resource,
                    kind: kind.kind,
                    namespaced: listed.scope == "Namespaced",
                    verbs: listed.verbs,
                });
            }
        }
    }
}

/// Asks the API what it has.
pub async fn discover(client: &kube::Client) -> Result<Found, Error> {
    let mut found = Found::default();
    for path in ["/api", "/apis"] {
        let request = Request::get(path).header(ACCEPT, AGGREGATED).body(Vec::new());
        let request = request.map_err(|error| Error::Request { path: path.into(), reason: error.to_string() })?;
        let list = client.request::<List>(request).await.map_err(|source| Error::Api { what: format!("discovery of {path}"), source: Box::new(source) })?;
        collect(list, &mut found);
    }
    if found.resources.is_empty() {
        return Err(Error::Invalid("the API server does not answer aggregated discovery (apidiscovery.k8s.io/v2)".into()));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_first_version_of_a_resource_counts() {
        let listed = |name: &str, kind: &str| json!({"resource": name, "responseKind": {"kind": kind}, "scope": "Namespaced", "verbs": ["list"]});
        let list: List = serde_json::from_value(json!({"items": [{"metadata": {"name": "g.io"}, "versions": [
            {"version": "v2", "resources": [listed("as", "A")], "freshness": "Current"},
            {"version": "v1", "resources": [listed("as", "A"), listed("bs", "B")], "freshness": "Current"},
            {"version": "v0", "resources": [], "freshness": "Stale"}]}]})).expect("a list");
        let mut found = Found::default();
        collect(list, &mut found);
        let shown: Vec<_> = found.resources.iter().map(|r| r.path("ns")).collect();
        assert_eq!(shown, ["/apis/g.io/v2/namespaces/ns/as", "/apis/g.io/v1/namespaces/ns/bs"]);
        assert_eq!(found.missing, ["g.io/v0"]);
    }
}
