//! Tokens of service accounts: issuing, checking, and the documents by which others check them.
//!
//! Claims are upstream's (`pkg/serviceaccount/claims.go`). Keys are P-256, hence ES256.
//!
//! Code map: [`Issuer`] signs and verifies; [`request`] the TokenRequest subresource; [`legacy`] fills secrets of type
//! `kubernetes.io/service-account-token`; [`join`] bootstrap tokens for nodes.

pub mod join;
pub mod legacy;
pub mod request;

use crate::pki::authority::{parse_key, public_key_info};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation};
use rand::Rng;
use ring::signature::KeyPair;
use serde::Serialize;
use serde_json::{Value, json};

/// The issuer of upstream's defaults.
pub const DEFAULT_ISSUER: &str = "https://kubernetes.default.svc.cluster.local";

/// Signs and verifies tokens with the cluster's service account key.
pub struct Issuer {
    /// `iss`: the first of `--service-account-issuer`.
    pub url: String,
    /// Issuers that are accepted, the first included.
    pub accepted: Vec<String>,
    /// Audiences of this API server: tokens must name one of them.
    pub audiences: Vec<String>,
    signing: EncodingKey,
    verifying: DecodingKey,
    key_id: String,
    jwk: Value,
}

impl std::fmt::Debug for Issuer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Issuer({})", self.url)
    }
}

impl Issuer {
    /// `issuers` may be empty (then [`DEFAULT_ISSUER`]); so may `audiences` (then the issuers).
    pub fn new(pkcs8: &[u8], issuers: &[String], audiences: &[String]) -> Result<Issuer, crate::pki::Error> {
        let key = parse_key(pkcs8)?;
        let point = key.public_key().as_ref();
        // An uncompressed P-256 point: 0x04, 32 bytes x, 32 bytes y.
        let (x, y) = match point {
            [4, rest @ ..] if rest.len() == 64 => rest.split_at(32),
            _ => return Err(crate::pki::Error::Damaged("the service account key is not P-256".to_owned())),
        };
        let (x, y) = (URL_SAFE_NO_PAD.encode(x), URL_SAFE_NO_PAD.encode(y));
        let verifying = DecodingKey::from_ec_components(&x, &y)
            .map_err(|error| crate::pki::Error::Damaged(format!("the service account key: {error}")))?;
        let digest = ring::digest::digest(&ring::digest::SHA256, &public_key_info(&key));
        let key_id = URL_SAFE_NO_PAD.encode(digest.as_ref());
        let jwk =
            json!({"use": "sig", "kty": "EC", "kid": key_id, "crv": "P-256", "alg": "ES256", "x": x, "y": y});
        let accepted = match issuers {
            [] => vec![DEFAULT_ISSUER.to_owned()],
            some => some.to_vec(),
        };
        let audiences = if audiences.is_empty() { accepted.clone() } else { audiences.to_vec() };
        let signing = EncodingKey::from_ec_der(pkcs8);
        Ok(Issuer { url: accepted[0].clone(), accepted, audiences, signing, verifying, key_id, jwk })
    }

    /// A signed token of these claims.
    pub fn sign<T: Serialize>(&self, claims: &T) -> Result<String, jsonwebtoken::errors::Error> {
        let mut header = Header::new(Algorithm::ES256);
        header.typ = None;
        header.kid = Some(self.key_id.clone());
        jsonwebtoken::encode(&header, claims, &self.signing)
    }

    /// The claims of a token that this key signed. Times and audiences are the caller's to check.
    pub fn verify(&self, token: &str) -> Result<Value, jsonwebtoken::errors::Error> {
        let mut validation = Validation::new(Algorithm::ES256);
        validation.required_spec_claims.clear();
        validation.validate_exp = false;
        validation.validate_aud = false;
        Ok(jsonwebtoken::decode::<Value>(token, &self.verifying, &validation)?.claims)
    }

    /// `/openid/v1/jwks`.
    pub fn jwks(&self) -> Value {
        json!({"keys": [self.jwk]})
    }

    /// `/.well-known/openid-configuration`; `jwks_uri` is where [`Issuer::jwks`] is served to others.
    pub fn discovery(&self, jwks_uri: &str) -> Value {
        json!({
            "issuer": self.url,
            "jwks_uri": jwks_uri,
            "response_types_supported": ["id_token"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": ["ES256"],
        })
    }
}

/// Lower-case letters and digits that are hard to misread (upstream's alphabet of generated names).
const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";

/// A random suffix for a generated name.
pub fn random_suffix(length: usize) -> String {
    let mut random = rand::rng();
    (0..length).map(|_| char::from(ALPHABET[random.random_range(0..ALPHABET.len())])).collect()
}

#[cfg(test)]
mod tests;
