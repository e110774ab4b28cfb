//! `authentication.k8s.io` reviews: TokenReview and SelfSubjectReview.

use super::bearer::{Bearer, Token};
use crate::request::UserInfo;
use serde_json::{Map, Value, json};
use windlass_api::ApiError;

/// A user as these reviews show it.
fn shown(user: &UserInfo) -> Value {
    let mut map = Map::new();
    map.insert("username".into(), user.name.clone().into());
    if !user.uid.is_empty() {
        map.insert("uid".into(), user.uid.clone().into());
    }
    if !user.groups.is_empty() {
        map.insert("groups".into(), json!(user.groups));
    }
    if !user.extra.is_empty() {
        map.insert("extra".into(), json!(user.extra));
    }
    Value::Object(map)
}

/// `tokenreviews`: whether a token is good, and whose it is.
pub async fn token_review(bearer: &Bearer, mut body: Value) -> Result<Value, ApiError> {
    let token = body["spec"]["token"].as_str().unwrap_or_default().to_owned();
    if token.is_empty() {
        return Err(ApiError::bad_request("token is required for TokenReview in authentication"));
    }
    let audiences = body["spec"]["audiences"].as_array();
    let audiences: Option<Vec<String>> =
        audiences.map(|list| list.iter().filter_map(Value::as_str).map(str::to_owned).collect());
    body["status"] = match bearer.check(&token, audiences.as_deref()).await {
        Token::Good(mut result) => {
            super::add_authenticated(&mut result.user);
            json!({"authenticated": true, "user": shown(&result.user), "audiences": result.audiences})
        }
        Token::Bad(why) => json!({"authenticated": false, "user": {}, "error": why}),
        Token::Unknown => json!({"authenticated": false, "user": {}}),
    };
    Ok(body)
}

/// `selfsubjectreviews`: who the caller is (`kubectl auth whoami`).
pub fn self_subject_review(user: &UserInfo, mut body: Value) -> Value {
    body["status"] = json!({"userInfo": shown(user)});
    body
}
