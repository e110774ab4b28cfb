//! Paths and operations of a resource.

use serde_json::{Map, Value, json};

use super::schemas::Dialect;
use crate::registry::{Resource, Subresource, Version};

const STATUS: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.Status";
const OPTIONS: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions";
const RESOURCES: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.APIResourceList";
const PATCH: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.Patch";

const MEDIA: [&str; 3] = ["application/json", "application/vnd.kubernetes.protobuf", "application/yaml"];
const WATCH_MEDIA: [&str; 2] = ["application/json;stream=watch", "application/vnd.kubernetes.protobuf;stream=watch"];
const PATCH_MEDIA: [&str; 4] = [
    "application/apply-patch+yaml",
    "application/json-patch+json",
    "application/merge-patch+json",
    "application/strategic-merge-patch+json",
];

const WRITE: [(&str, &str); 3] = [("dryRun", "string"), ("fieldManager", "string"), ("fieldValidation", "string")];
const DELETE: [(&str, &str); 5] = [
    ("dryRun", "string"),
    ("gracePeriodSeconds", "integer"),
    ("ignoreStoreReadErrorWithClusterBreakingPotential", "boolean"),
    ("orphanDependents", "boolean"),
    ("propagationPolicy", "string"),
];
const LIST: [(&str, &str); 8] = [
    ("continue", "string"),
    ("fieldSelector", "string"),
    ("labelSelector", "string"),
    ("limit", "integer"),
    ("resourceVersion", "string"),
    ("resourceVersionMatch", "string"),
    ("sendInitialEvents", "boolean"),
    ("timeoutSeconds", "integer"),
];
const WATCH: [(&str, &str); 2] = [("allowWatchBookmarks", "boolean"), ("watch", "boolean")];

/// Writes one version of one resource.
pub(super) struct Builder<'r> {
    pub dialect: Dialect,
    pub row: &'r Resource,
    pub version: &'r Version,
    /// Definition of the objects.
    pub own: &'r str,
    /// Definition of their lists.
    pub list: Option<&'r str>,
}

/// One operation, before it takes a dialect's form.
struct Operation<'o> {
    /// `read`, `list`, ...: the head of the operation's id.
    id: &'o str,
    /// `x-kubernetes-action`.
    action: &'o str,
    description: String,
    query: Vec<(&'o str, &'o str)>,
    body: Option<&'o str>,
    answer: Option<&'o str>,
    codes: &'o [(&'o str, &'o str)],
    watches: bool,
}

impl Builder<'_> {
    pub(super) fn write(&self, paths: &mut Map<String, Value>) {
        let (row, version) = (self.row, self.version);
        let root = if row.group.is_empty() { format!("/api/{}", version.name) } else { format!("/apis/{}/{}", row.group, version.name) };
        let scope = if row.namespaced { format!("{root}/namespaces/{{namespace}}") } else { root.clone() };
        let collection = format!("{scope}/{}", row.plural);
        let item = format!("{collection}/{{name}}");
        let namespaced = if row.namespaced { "Namespaced" } else { "" };
        let mut root_path = Map::new();
        root_path.insert("get".to_owned(), self.resources());
        paths.insert(format!("{root}/"), root_path.into());
        let mut many = Map::new();
        for (verb, method) in [("list", "get"), ("create", "post"), ("deletecollection", "delete")] {
            if version.has_verb(verb) {
                many.insert(method.to_owned(), self.operation(verb, namespaced));
            }
        }
        self.put(paths, &collection, many, false);
        if row.namespaced && version.has_verb("list") {
            let mut everywhere = Map::new();
            everywhere.insert("get".to_owned(), self.everywhere());
            self.put(paths, &format!("{root}/{}", row.plural), everywhere, false);
        }
        let mut one = Map::new();
        for (verb, method) in [("get", "get"), ("update", "put"), ("patch", "patch"), ("delete", "delete")] {
            if version.has_verb(verb) {
                one.insert(method.to_owned(), self.operation(verb, namespaced));
            }
        }
        self.put(paths, &item, one, true);
        for sub in &version.subresources {
            self.subresource(paths, &item, namespaced, sub);
        }
    }

    fn put(&self, paths: &mut Map<String, Value>, path: &str, mut operations: Map<String, Value>, named: bool) {
        if operations.is_empty() {
            return;
        }
        let mut parameters = Vec::new();
        if named {
            parameters.push(self.parameter("name", "string", "path"));
        }
        if path.contains("{namespace}") {
            parameters.push(self.parameter("namespace", "string", "path"));
        }
        parameters.push(self.parameter("pretty", "string", "query"));
        operations.insert("parameters".to_owned(), parameters.into());
        paths.insert(path.to_owned(), operations.into());
    }

    fn parameter(&self, name: &str, kind: &str, place: &str) -> Value {
        let mut parameter = match self.dialect {
            Dialect::V2 => json!({"name": name, "in": place, "type": kind, "uniqueItems": true}),
            Dialect::V3 => json!({"name": name, "in": place, "schema": {"type": kind, "uniqueItems": true}}),
        };
        if place == "path" {
            parameter["required"] = true.into();
        }
        parameter
    }

    fn operation(&self, verb: &str, namespaced: &str) -> Value {
        let kind = &self.row.kind;
        let ok: &[(&str, &str)] = &[("200", "OK")];
        let created: &[(&str, &str)] = &[("200", "OK"), ("201", "Created")];
        let own = Some(self.own);
        let plain = |id, action, description: String| Operation {
            id,
            action,
            description,
            query: Vec::new(),
            body: None,
            answer: own,
            codes: ok,
            watches: false,
        };
        let operation = match verb {
            "list" => Operation {
                query: LIST.into_iter().chain(WATCH).collect(),
                answer: self.list,
                watches: self.version.has_verb("watch"),
                ..plain("list", "list", format!("list or watch objects of kind {kind}"))
            },
            "create" => Operation {
                query: WRITE.to_vec(),
                body: own,
                codes: &[("200", "OK"), ("201", "Created"), ("202", "Accepted")],
                ..plain("create", "post", format!("create a {kind}"))
            },
            "deletecollection" => Operation {
                query: LIST.into_iter().chain(DELETE).collect(),
                body: Some(OPTIONS),
                answer: Some(STATUS),
                ..plain("deleteCollection", "deletecollection", format!("delete collection of {kind}"))
            },
            "update" => Operation {
                query: WRITE.to_vec(),
                body: own,
                codes: created,
                ..plain("replace", "put", format!("replace the specified {kind}"))
            },
            "patch" => Operation {
                query: WRITE.into_iter().chain([("force", "boolean")]).collect(),
                body: Some(PATCH),
                codes: created,
                ..plain("patch", "patch", format!("partially update the specified {kind}"))
            },
            "delete" => Operation {
                query: DELETE.to_vec(),
                body: Some(OPTIONS),
                answer: Some(STATUS),
                codes: &[("200", "OK"), ("202", "Accepted")],
                ..plain("delete", "delete", format!("delete a {kind}"))
            },
            _ => plain("read", "get", format!("read the specified {kind}")),
        };
        let (head, tail) = match verb {
            "deletecollection" => ("delete", "Collection"),
            _ => (operation.id, ""),
        };
        let id = format!("{head}{}{tail}{namespaced}{kind}", self.camel());
        self.render(&operation, id, [&self.row.group, &self.version.name, kind])
    }

    /// The group version's own discovery document.
    fn resources(&self) -> Value {
        let operation = Operation {
            id: "get",
            action: "",
            description: "get available resources".to_owned(),
            query: Vec::new(),
            body: None,
            answer: Some(RESOURCES),
            codes: &[("200", "OK")],
            watches: false,
        };
        let mut document = self.render(&operation, format!("get{}APIResources", self.camel()), ["", "", ""]);
        if let Some(map) = document.as_object_mut() {
            map.retain(|key, _| !key.starts_with("x-kubernetes-"));
        }
        document
    }

    fn everywhere(&self) -> Value {
        let operation = Operation {
            id: "list",
            action: "list",
            description: format!("list or watch objects of kind {}", self.row.kind),
            query: LIST.into_iter().chain(WATCH).collect(),
            body: None,
            answer: self.list,
            codes: &[("200", "OK")],
            watches: self.version.has_verb("watch"),
        };
        let id = format!("list{}{}ForAllNamespaces", self.camel(), self.row.kind);
        self.render(&operation, id, [&self.row.group, &self.version.name, &self.row.kind])
    }

    fn subresource(&self, paths: &mut Map<String, Value>, item: &str, namespaced: &str, sub: &Subresource) {
        let definition = sub.schema.and_then(|ty| self.row.schemas.ty(ty).name.clone());
        let mut operations = Map::new();
        let connects = sub.kind.ends_with("Options");
        for verb in &sub.verbs {
            let (method, id, action) = match verb.as_str() {
                "create" => ("post", "create", "post"),
                "update" => ("put", "replace", "put"),
                "patch" => ("patch", "patch", "patch"),
                "delete" => ("delete", "delete", "delete"),
                _ => ("get", "read", "get"),
            };
            let patches = method == "patch" && !connects;
            let writes = method == "post" || method == "put";
            let operation = Operation {
                id,
                action: if connects { "connect" } else { action },
                description: format!("{verb} {} of the specified {}", sub.name, self.row.kind),
                query: if patches {
                    WRITE.into_iter().chain([("force", "boolean")]).collect()
                } else if writes && !connects {
                    WRITE.to_vec()
                } else {
                    Vec::new()
                },
                body: if patches { Some(PATCH) } else { definition.as_deref().filter(|_| writes) },
                answer: definition.as_deref(),
                codes: &[("200", "OK"), ("201", "Created")],
                watches: false,
            };
            let name: String = sub.name.chars().take(1).flat_map(char::to_uppercase).chain(sub.name.chars().skip(1)).collect();
            let method_id = if connects { format!("connect{}", capital(method)) } else { id.to_owned() };
            let id = format!("{method_id}{}{namespaced}{}{name}", self.camel(), self.row.kind);
            operations.insert(method.to_owned(), self.render(&operation, id, [&sub.group, &sub.version, &sub.kind]));
        }
        self.put(paths, &format!("{item}/{}", sub.name), operations, true);
    }

    /// `AppsV1`, `CoreV1`, `RbacAuthorizationV1`.
    fn camel(&self) -> String {
        let group = match self.row.group.as_str() {
            "" => "core",
            group => group.strip_suffix(".k8s.io").unwrap_or(group),
        };
        let mut name: String = group.split(['.', '-']).map(capital).collect();
        name.push_str(&capital(&self.version.name));
        name
    }

    fn render(&self, operation: &Operation<'_>, id: String, [group, version, kind]: [&str; 3]) -> Value {
        let tag = if self.row.group.is_empty() { "core" } else { self.row.group.strip_suffix(".k8s.io").unwrap_or(&self.row.group) };
        let mut out = json!({
            "description": operation.description,
            "operationId": id,
            "tags": [format!("{}_{}", tag.replace(['.', '-'], "_"), self.version.name)],
            "x-kubernetes-action": operation.action,
            "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": kind},
        });
        let mut parameters: Vec<Value> = operation.query.iter().map(|(name, kind)| self.parameter(name, kind, "query")).collect();
        let pointer = |name: &str| match name {
            // Any document: what it may be depends on its media type.
            PATCH => json!({"type": "object"}),
            name => json!({"$ref": format!("{}{name}", self.dialect.definitions())}),
        };
        let body_media: &[&str] = if operation.body == Some(PATCH) { &PATCH_MEDIA } else { &["*/*"] };
        let mut media: Vec<&str> = MEDIA.to_vec();
        if operation.watches {
            media.extend(WATCH_MEDIA);
        }
        let mut responses = Map::new();
        for (code, text) in operation.codes {
            let mut response = json!({"description": text});
            match (self.dialect, operation.answer) {
                (Dialect::V2, Some(answer)) => response["schema"] = pointer(answer),
                (Dialect::V2, None) => response["schema"] = json!({"type": "string"}),
                (Dialect::V3, Some(answer)) => {
                    let content: Map<String, Value> =
                        media.iter().map(|media| ((*media).to_owned(), json!({"schema": pointer(answer)}))).collect();
                    response["content"] = content.into();
                }
                (Dialect::V3, None) => response["content"] = json!({"*/*": {"schema": {"type": "string"}}}),
            }
            responses.insert((*code).to_owned(), response);
        }
        responses.insert("401".to_owned(), json!({"description": "Unauthorized"}));
        out["responses"] = responses.into();
        match (self.dialect, operation.body) {
            (_, None) => {}
            (Dialect::V2, Some(body)) => {
                parameters.push(json!({"name": "body", "in": "body", "required": body != OPTIONS, "schema": pointer(body)}));
            }
            (Dialect::V3, Some(body)) => {
                let content: Map<String, Value> =
                    body_media.iter().map(|media| ((*media).to_owned(), json!({"schema": pointer(body)}))).collect();
                out["requestBody"] = json!({"content": content, "required": body != OPTIONS});
            }
        }
        if self.dialect == Dialect::V2 {
            out["consumes"] = body_media.to_vec().into();
            out["produces"] = media.into();
            out["schemes"] = json!(["https"]);
        }
        if !parameters.is_empty() {
            out["parameters"] = parameters.into();
        }
        out
    }
}

fn capital(text: &str) -> String {
    text.chars().take(1).flat_map(char::to_uppercase).chain(text.chars().skip(1)).collect()
}
