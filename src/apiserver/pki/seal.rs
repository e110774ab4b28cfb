//! Sealing: AES-256-GCM under a key derived from the server token.

use super::Error;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use ring::{hkdf, pbkdf2};
use serde::{Deserialize, Serialize};
use std::num::NonZeroU32;
use std::path::Path;

/// Tokens that we made begin with this; 64 hex digits (256 bits) follow.
const GENERATED: &str = "WS1.";
/// Rounds for tokens that people chose (OWASP 2023 for PBKDF2-HMAC-SHA256).
const ROUNDS: NonZeroU32 = NonZeroU32::new(600_000).expect("600,000 is not zero");
/// Bound into the seal, so that it cannot be taken for another purpose.
const PURPOSE: &[u8] = b"windlass pki v1";

/// The secret that servers of one cluster share.
pub struct ServerToken(String);

impl std::fmt::Debug for ServerToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ServerToken(..)")
    }
}

impl ServerToken {
    /// The token in the file, which is made (mode 0600) if it is not there.
    pub fn load_or_create(path: &Path) -> Result<ServerToken, Error> {
        let failed = |source| Error::TokenFile { path: path.to_owned(), source };
        match std::fs::read_to_string(path) {
            Ok(text) => ServerToken::parse(&text, path),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let token = ServerToken::generate()?;
                write_secret(path, &format!("{}\n", token.0)).map_err(failed)?;
                Ok(token)
            }
            Err(error) => Err(failed(error)),
        }
    }

    fn parse(text: &str, path: &Path) -> Result<ServerToken, Error> {
        let text = text.trim();
        match text.len() < 16 {
            true => Err(Error::WeakToken { path: path.to_owned() }),
            false => Ok(ServerToken(text.to_owned())),
        }
    }

    fn generate() -> Result<ServerToken, Error> {
        let mut bytes = [0u8; 32];
        SystemRandom::new().fill(&mut bytes).map_err(|_| Error::Random)?;
        Ok(ServerToken(format!("{GENERATED}{}", super::hex(&bytes))))
    }

    fn key(&self, salt: &[u8]) -> Result<LessSafeKey, Error> {
        let mut key = [0u8; 32];
        if self.0.len() == GENERATED.len() + 64 && self.0.starts_with(GENERATED) {
            let derived = hkdf::Salt::new(hkdf::HKDF_SHA256, salt).extract(self.0.as_bytes());
            let info = [PURPOSE];
            let output = derived.expand(&info, hkdf::HKDF_SHA256).map_err(|_| Error::Random)?;
            output.fill(&mut key).map_err(|_| Error::Random)?;
        } else {
            pbkdf2::derive(pbkdf2::PBKDF2_HMAC_SHA256, ROUNDS, salt, self.0.as_bytes(), &mut key);
        }
        let key = UnboundKey::new(&AES_256_GCM, &key).map_err(|_| Error::Random)?;
        Ok(LessSafeKey::new(key))
    }
}

/// Writes a file that only its owner reads, in one step.
pub fn write_secret(path: &Path, content: &str) -> std::io::Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    let mut staged = path.as_os_str().to_owned();
    staged.push(".new");
    let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&staged)?;
    file.write_all(content.as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&staged, path)
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope {
    version: u32,
    salt: String,
    nonce: String,
    sealed: String,
}

/// Seals bytes; the result is JSON text.
pub fn seal(token: &ServerToken, plain: &[u8]) -> Result<Vec<u8>, Error> {
    let random = SystemRandom::new();
    let (mut salt, mut nonce) = ([0u8; 32], [0u8; 12]);
    random.fill(&mut salt).map_err(|_| Error::Random)?;
    random.fill(&mut nonce).map_err(|_| Error::Random)?;
    let mut sealed = plain.to_vec();
    let unique = Nonce::assume_unique_for_key(nonce);
    token.key(&salt)?.seal_in_place_append_tag(unique, Aad::from(PURPOSE), &mut sealed).map_err(|_| Error::Random)?;
    let envelope =
        Envelope { version: 1, salt: STANDARD.encode(salt), nonce: STANDARD.encode(nonce), sealed: STANDARD.encode(sealed) };
    serde_json::to_vec(&envelope).map_err(|error| Error::Damaged(error.to_string()))
}

/// Opens what [`seal`] made. [`Error::WrongToken`] if it was sealed under another token (or changed).
pub fn open(token: &ServerToken, envelope: &[u8]) -> Result<Vec<u8>, Error> {
    let damaged = |what: &str| Error::Damaged(format!("the sealed keys have a bad {what}"));
    let envelope: Envelope = serde_json::from_slice(envelope).map_err(|error| Error::Damaged(error.to_string()))?;
    if envelope.version != 1 {
        return Err(Error::Damaged(format!("the sealed keys have version {}, known is 1", envelope.version)));
    }
    let salt = STANDARD.decode(&envelope.salt).map_err(|_| damaged("salt"))?;
    let nonce = STANDARD.decode(&envelope.nonce).map_err(|_| damaged("nonce"))?;
    let nonce = Nonce::try_assume_unique_for_key(&nonce).map_err(|_| damaged("nonce"))?;
    let mut sealed = STANDARD.decode(&envelope.sealed).map_err(|_| damaged("body"))?;
    let key = token.key(&salt)?;
    let plain = key.open_in_place(nonce, Aad::from(PURPOSE), &mut sealed).map_err(|_| Error::WrongToken)?;
    Ok(plain.to_vec())
}
