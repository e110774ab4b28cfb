//! A certificate authority: one P-256 key, one self-signed certificate, and what it issues.

use super::{Error, der, pem};
use jiff::{SignedDuration, Timestamp};
use ring::rand::{SecureRandom, SystemRandom};
use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use std::net::IpAddr;

const ECDSA_SHA256: [u64; 7] = [1, 2, 840, 10045, 4, 3, 2];
const SERVER_AUTH: [u64; 9] = [1, 3, 6, 1, 5, 5, 7, 3, 1];
const CLIENT_AUTH: [u64; 9] = [1, 3, 6, 1, 5, 5, 7, 3, 2];

/// How long an authority is valid.
const AUTHORITY_YEARS: i64 = 10;
/// A certificate begins this long ago, for clocks that are behind.
pub const BACKDATE: SignedDuration = SignedDuration::from_mins(5);

/// A fresh P-256 key: PKCS #8 bytes.
pub fn generate_key() -> Result<Vec<u8>, Error> {
    let key = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &SystemRandom::new());
    Ok(key.map_err(|_| Error::Random)?.as_ref().to_vec())
}

/// Reads a P-256 key.
pub fn parse_key(pkcs8: &[u8]) -> Result<EcdsaKeyPair, Error> {
    EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, pkcs8, &SystemRandom::new())
        .map_err(|error| Error::Damaged(format!("a private key does not parse: {error}")))
}

/// The `SubjectPublicKeyInfo` of a P-256 key.
pub fn public_key_info(key: &EcdsaKeyPair) -> Vec<u8> {
    let algorithm = der::sequence(&[der::oid(&[1, 2, 840, 10045, 2, 1]), der::oid(&[1, 2, 840, 10045, 3, 1, 7])]);
    der::sequence(&[algorithm, der::bits(key.public_key().as_ref())])
}

/// A subject of organizations and a common name, in the order that Go writes them.
pub fn subject(common_name: &str, organizations: &[&str]) -> Vec<u8> {
    let attribute = |kind: u64, value: &str| {
        der::set(&[der::sequence(&[der::oid(&[2, 5, 4, kind]), der::utf8(value)])])
    };
    let mut parts: Vec<Vec<u8>> = organizations.iter().map(|organization| attribute(10, organization)).collect();
    parts.push(attribute(3, common_name));
    der::sequence(&parts)
}

/// The content of a subject alternative name extension.
pub fn alternative_names(names: &[String], addresses: &[IpAddr]) -> Vec<u8> {
    let mut parts: Vec<Vec<u8>> = names.iter().map(|name| der::tlv(0x82, name.as_bytes())).collect();
    parts.extend(addresses.iter().map(|address| match address {
        IpAddr::V4(address) => der::tlv(0x87, &address.octets()),
        IpAddr::V6(address) => der::tlv(0x87, &address.octets()),
    }));
    der::sequence(&parts)
}

/// What goes into one certificate. DER parts are complete elements.
#[derive(Clone, Debug)]
pub struct Template {
    pub subject: Vec<u8>,
    pub public_key: Vec<u8>,
    pub not_before: Timestamp,
    pub not_after: Timestamp,
    /// Bits of the key usage extension (RFC 5280, 4.2.1.3); no extension if empty.
    pub key_usage: Vec<u8>,
    /// Object identifiers of the extended key usage extension; no extension if empty.
    pub extended_usage: Vec<Vec<u64>>,
    /// Content of the subject alternative name extension.
    pub alternative_names: Option<Vec<u8>>,
    pub authority: bool,
}

fn extension(id: &[u64], critical: bool, content: &[u8]) -> Vec<u8> {
    let mut parts = vec![der::oid(id)];
    if critical {
        parts.push(der::boolean(true));
    }
    parts.push(der::octets(content));
    der::sequence(&parts)
}

fn key_id(public_key: &[u8]) -> Vec<u8> {
    ring::digest::digest(&ring::digest::SHA256, public_key).as_ref()[..20].to_vec()
}

/// Signs a template; the issuer is given by its subject and its key identifier.
fn sign(template: &Template, issuer: &[u8], issuer_key_id: &[u8], key: &EcdsaKeyPair) -> Result<Vec<u8>, Error> {
    let random = SystemRandom::new();
    let mut serial = [0u8; 16];
    random.fill(&mut serial).map_err(|_| Error::Random)?;
    serial[0] &= 0x7f;
    let algorithm = der::sequence(&[der::oid(&ECDSA_SHA256)]);
    let mut extensions = Vec::new();
    if !template.key_usage.is_empty() {
        extensions.push(extension(&[2, 5, 29, 15], true, &der::named_bits(&template.key_usage)));
    }
    if !template.extended_usage.is_empty() {
        let usages: Vec<Vec<u8>> = template.extended_usage.iter().map(|id| der::oid(id)).collect();
        extensions.push(extension(&[2, 5, 29, 37], false, &der::sequence(&usages)));
    }
    let basic = if template.authority { der::sequence(&[der::boolean(true)]) } else { der::sequence(&[]) };
    extensions.push(extension(&[2, 5, 29, 19], true, &basic));
    if template.authority {
        extensions.push(extension(&[2, 5, 29, 14], false, &der::octets(&key_id(&template.public_key))));
    } else {
        extensions.push(extension(&[2, 5, 29, 35], false, &der::sequence(&[der::tlv(0x80, issuer_key_id)])));
    }
    if let Some(names) = &template.alternative_names {
        extensions.push(extension(&[2, 5, 29, 17], false, names));
    }
    let body = der::sequence(&[
        der::tlv(0xa0, &der::integer(&[2])),
        der::integer(&serial),
        algorithm.clone(),
        issuer.to_vec(),
        der::sequence(&[der::time(template.not_before), der::time(template.not_after)]),
        template.subject.clone(),
        template.public_key.clone(),
        der::tlv(0xa3, &der::sequence(&extensions)),
    ]);
    let signature = key.sign(&random, &body).map_err(|_| Error::Random)?;
    Ok(der::sequence(&[body, algorithm, der::bits(signature.as_ref())]))
}

/// A key and the certificate for it.
#[derive(Debug)]
pub struct Identity {
    pub certificate: CertificateDer<'static>,
    /// PKCS #8.
    pub key: Vec<u8>,
    pub not_after: Timestamp,
}

impl Identity {
    pub fn certificate_pem(&self) -> String {
        pem("CERTIFICATE", &self.certificate)
    }

    pub fn key_pem(&self) -> String {
        pem("PRIVATE KEY", &self.key)
    }

    pub fn private_key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.key.clone()))
    }
}

/// What an identity is for.
#[derive(Clone, Debug)]
pub enum Purpose {
    Client { common_name: String, organizations: Vec<String> },
    Server { common_name: String, names: Vec<String>, addresses: Vec<IpAddr> },
}

/// A certificate authority that can sign.
pub struct Authority {
    key: EcdsaKeyPair,
    pkcs8: Vec<u8>,
    certificate: CertificateDer<'static>,
    subject: Vec<u8>,
    key_id: Vec<u8>,
    not_after: Timestamp,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Authority({})", self.hash())
    }
}

impl Authority {
    /// A new authority, valid for ten years.
    pub fn create(common_name: &str, now: Timestamp) -> Result<Authority, Error> {
        let pkcs8 = generate_key()?;
        let key = parse_key(&pkcs8)?;
        let public_key = public_key_info(&key);
        let subject = subject(common_name, &[]);
        let lifetime = SignedDuration::from_hours(24 * 365 * AUTHORITY_YEARS);
        let template = Template {
            subject: subject.clone(),
            public_key: public_key.clone(),
            not_before: now - BACKDATE,
            not_after: now + lifetime,
            // digitalSignature, keyEncipherment, keyCertSign
            key_usage: vec![0, 2, 5],
            extended_usage: Vec::new(),
            alternative_names: None,
            authority: true,
        };
        let certificate = sign(&template, &subject, &key_id(&public_key), &key)?;
        Authority::load(certificate, pkcs8)
    }

    /// From the bytes of certificate and key.
    pub fn load(certificate: Vec<u8>, pkcs8: Vec<u8>) -> Result<Authority, Error> {
        let key = parse_key(&pkcs8)?;
        let public_key = public_key_info(&key);
        let (_, parsed) = x509_parser::parse_x509_certificate(&certificate)
            .map_err(|error| Error::Damaged(format!("an authority's certificate does not parse: {error}")))?;
        if parsed.public_key().raw != public_key.as_slice() {
            return Err(Error::Damaged("an authority's certificate is for another key".to_owned()));
        }
        let not_after = Timestamp::from_second(parsed.validity().not_after.timestamp())
            .map_err(|error| Error::Damaged(format!("an authority's expiry is out of range: {error}")))?;
        let subject = parsed.subject().as_raw().to_vec();
        let key_id = key_id(&public_key);
        Ok(Authority { key, pkcs8, certificate: certificate.into(), subject, key_id, not_after })
    }

    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    pub fn certificate_pem(&self) -> String {
        pem("CERTIFICATE", &self.certificate)
    }

    pub(super) fn pkcs8(&self) -> &[u8] {
        &self.pkcs8
    }

    pub fn not_after(&self) -> Timestamp {
        self.not_after
    }

    /// The subject as it stands in certificates issued here.
    pub fn subject(&self) -> &[u8] {
        &self.subject
    }

    /// SHA-256 of the certificate in hex: what join tokens carry.
    pub fn hash(&self) -> String {
        super::hex(ring::digest::digest(&ring::digest::SHA256, &self.certificate).as_ref())
    }

    /// Signs a template; its end is cut to this authority's.
    pub fn issue(&self, mut template: Template) -> Result<CertificateDer<'static>, Error> {
        template.not_after = template.not_after.min(self.not_after);
        Ok(sign(&template, &self.subject, &self.key_id, &self.key)?.into())
    }

    /// A new key with a certificate.
    pub fn identity(&self, purpose: &Purpose, lifetime: SignedDuration, now: Timestamp) -> Result<Identity, Error> {
        let pkcs8 = generate_key()?;
        let public_key = public_key_info(&parse_key(&pkcs8)?);
        let (subject, usage, alternative_names) = match purpose {
            Purpose::Client { common_name, organizations } => {
                let organizations: Vec<&str> = organizations.iter().map(String::as_str).collect();
                (subject(common_name, &organizations), CLIENT_AUTH.to_vec(), None)
            }
            Purpose::Server { common_name, names, addresses } => {
                (subject(common_name, &[]), SERVER_AUTH.to_vec(), Some(alternative_names(names, addresses)))
            }
        };
        let not_after = (now + lifetime).min(self.not_after);
        let certificate = self.issue(Template {
            subject,
            public_key,
            not_before: now - BACKDATE,
            not_after,
            // digitalSignature, keyEncipherment
            key_usage: vec![0, 2],
            extended_usage: vec![usage],
            alternative_names,
            authority: false,
        })?;
        Ok(Identity { certificate, key: pkcs8, not_after })
    }
}
