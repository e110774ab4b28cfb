//! `serviceaccounts/token`: a bound token for an account.

use super::Issuer;
use crate::admission::serviceaccount::TOKEN_SECONDS;
use crate::cluster::{Cluster, Gr};
use jiff::Timestamp;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use windlass_api::field::FieldError;
use windlass_api::{ApiError, meta};

const GROUP: &str = "authentication.k8s.io";
const SHORTEST: i64 = 600;
const LONGEST: i64 = 1 << 32;
const DEFAULT: i64 = 3600;
/// What a pod's injected token is extended to, while the API server warns after [`TOKEN_SECONDS`].
const EXTENDED: i64 = 24 * 365 * 60 * 60;

/// Serves the subresource.
pub struct TokenRequests {
    pub issuer: Arc<Issuer>,
    pub cluster: Arc<dyn Cluster>,
    /// `--service-account-max-token-expiration` in seconds.
    pub max_expiration: Option<i64>,
    /// `--service-account-extend-token-expiration`.
    pub extend: bool,
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}

impl TokenRequests {
    /// Checks a request and fills it in; what comes out goes through admission and then to [`TokenRequests::issue`].
    pub async fn prepare(
        &self,
        namespace: &str,
        name: &str,
        mut body: Value,
        now: Timestamp,
    ) -> Result<Value, ApiError> {
        let wrong = |field: &str, value: &str, detail: &str| {
            ApiError::invalid(GROUP, "TokenRequest", name, vec![FieldError::invalid(field, value, detail)])
        };
        let (given_name, given_namespace) = (meta::name(&body), meta::namespace(&body));
        if !given_name.is_empty() && given_name != name {
            return Err(wrong("metadata.name", given_name, "must match the service account name if specified"));
        }
        if !given_namespace.is_empty() && given_namespace != namespace {
            let detail = "must match the service account namespace if specified";
            return Err(wrong("metadata.namespace", given_namespace, detail));
        }
        let account = self.account(namespace, name).await?;
        let uid = meta::uid(&account);
        if !meta::uid(&body).is_empty() && meta::uid(&body) != uid {
            let given = meta::uid(&body);
            let why = format!(
                "the UID in the token request ({given}) does not match the UID of the service account ({uid})"
            );
            return Err(ApiError::conflict(GROUP, "TokenRequest", name, &why));
        }
        meta::set_name(&mut body, name);
        meta::set_namespace(&mut body, namespace);
        meta::set_uid(&mut body, uid);
        meta::set(&mut body, "creationTimestamp", meta::now_rfc3339(now));
        body["status"] = json!({});
        if !body["spec"].is_object() {
            body["spec"] = json!({});
        }
        let spec = &mut body["spec"];
        if spec["audiences"].as_array().is_none_or(Vec::is_empty) {
            spec["audiences"] = json!(self.issuer.audiences);
        }
        if spec["expirationSeconds"].is_null() {
            spec["expirationSeconds"] = DEFAULT.into();
        }
        let seconds = spec["expirationSeconds"].as_i64().unwrap_or_default();
        let bound = match seconds {
            ..SHORTEST => Some("may not specify a duration less than 10 minutes"),
            SHORTEST..=LONGEST => None,
            _ => Some("may not specify a duration larger than 2^32 seconds"),
        };
        if let Some(detail) = bound {
            let error = FieldError::invalid("spec.expirationSeconds", seconds, detail);
            return Err(ApiError::invalid(GROUP, "TokenRequest", "", vec![error]));
        }
        if spec["attestations"].as_object().is_some_and(|map| !map.is_empty()) {
            let detail = "attestations may only be specified with a webhook bound object reference";
            let error = FieldError::invalid("spec.attestations", spec["attestations"].clone(), detail);
            return Err(ApiError::invalid(GROUP, "TokenRequest", "", vec![error]));
        }
        Ok(body)
    }

    async fn account(&self, namespace: &str, name: &str) -> Result<Arc<Value>, ApiError> {
        self.live(Gr("", "serviceaccounts"), namespace, name).await
    }

    async fn live(&self, kind: Gr, namespace: &str, name: &str) -> Result<Arc<Value>, ApiError> {
        let found = match self.cluster.cached(kind, namespace, name) {
            Some(found) => Some(found),
            None => self.cluster.get(kind, namespace, name).await?,
        };
        found.ok_or_else(|| ApiError::not_found(kind.0, kind.1, name))
    }

    /// Signs the token that a prepared request asks for. `warnings` are for the caller.
    pub async fn issue(&self, mut body: Value, now: Timestamp, warnings: &mut Vec<String>) -> Result<Value, ApiError> {
        let (namespace, name) = (meta::namespace(&body).to_owned(), meta::name(&body).to_owned());
        let account = self.account(&namespace, &name).await?;
        let mut private = Map::new();
        private.insert("namespace".to_owned(), namespace.clone().into());
        private.insert("serviceaccount".to_owned(), json!({"name": name, "uid": meta::uid(&account)}));
        let pod_bound = self.bind(&namespace, &name, &body["spec"]["boundObjectRef"], &mut private).await?;
        let mut seconds = body["spec"]["expirationSeconds"].as_i64().unwrap_or(DEFAULT);
        if let Some(most) = self.max_expiration.filter(|most| *most > 0 && seconds > *most) {
            warnings.push(format!("requested expiration of {seconds} seconds shortened to {most} seconds"));
            seconds = most;
            body["spec"]["expirationSeconds"] = most.into();
        }
        let audiences: Vec<&str> =
            body["spec"]["audiences"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let own = audiences.iter().all(|audience| self.issuer.audiences.iter().any(|known| known == audience));
        let start = now.as_second();
        let mut lifetime = seconds;
        if self.extend && pod_bound && own && seconds == TOKEN_SECONDS {
            private.insert("warnafter".to_owned(), (start + seconds).into());
            lifetime = EXTENDED;
        }
        let claims = json!({
            "iss": self.issuer.url,
            "sub": format!("system:serviceaccount:{namespace}:{name}"),
            "aud": audiences,
            "iat": start,
            "nbf": start,
            "exp": start + lifetime,
            "jti": crate::storage::uuid(),
            "kubernetes.io": private,
        });
        let token = self.issuer.sign(&claims);
        let token = token.map_err(|error| ApiError::internal(format!("failed to generate token: {error}")))?;
        let expiry = Timestamp::from_second(start + seconds).map_err(ApiError::internal)?;
        body["status"] = json!({"token": token, "expirationTimestamp": meta::now_rfc3339(expiry)});
        Ok(body)
    }

    /// Resolves the bound object into claims; true if it is a pod.
    async fn bind(
        &self,
        namespace: &str,
        account: &str,
        reference: &Value,
        claims: &mut Map<String, Value>,
    ) -> Result<bool, ApiError> {
        if reference.is_null() {
            return Ok(false);
        }
        let name = text(reference, "name");
        let (group, _) = meta::split_api_version(text(reference, "apiVersion"));
        let claim = |object: &Value| json!({"name": meta::name(object), "uid": meta::uid(object)});
        let object = match (group, text(reference, "kind")) {
            ("", "Pod") => {
                let pod = self.live(Gr("", "pods"), namespace, name).await?;
                if text(&pod["spec"], "serviceAccountName") != account {
                    return Err(ApiError::bad_request(format!(
                        "cannot bind token for serviceaccount {account:?} to pod running with different serviceaccount name."
                    )));
                }
                let node = text(&pod["spec"], "nodeName");
                if !node.is_empty() {
                    let known = match self.live(Gr("", "nodes"), "", node).await {
                        Ok(node) => claim(&node),
                        Err(error) if error.code == 404 => json!({"name": node}),
                        Err(error) => return Err(error),
                    };
                    claims.insert("node".to_owned(), known);
                }
                claims.insert("pod".to_owned(), claim(&pod));
                pod
            }
            ("", "Node") => {
                let node = self.live(Gr("", "nodes"), "", name).await?;
                claims.insert("node".to_owned(), claim(&node));
                node
            }
            ("", "Secret") => {
                let secret = self.live(Gr("", "secrets"), namespace, name).await?;
                claims.insert("secret".to_owned(), claim(&secret));
                secret
            }
            (_, kind) => {
                let version = text(reference, "apiVersion");
                let shown = format!("{version}, Kind={kind}");
                return Err(ApiError::bad_request(format!("cannot bind token to object of type {shown}")));
            }
        };
        let (given, uid) = (text(reference, "uid"), meta::uid(&object));
        if !given.is_empty() && given != uid {
            let why = format!(
                "the UID in the bound object reference ({given}) does not match the UID in record. The object might have been deleted and then recreated"
            );
            return Err(ApiError::conflict(group, text(reference, "kind"), name, &why));
        }
        Ok(text(reference, "kind") == "Pod")
    }
}
