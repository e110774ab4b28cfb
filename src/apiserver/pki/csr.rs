//! A certificate signing request (PKCS #10), taken apart.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use std::net::IpAddr;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::FromDer;

/// What a request asks to have certified.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    pub common_name: String,
    pub organizations: Vec<String>,
    pub dns_names: Vec<String>,
    pub addresses: Vec<IpAddr>,
    pub emails: Vec<String>,
    pub uris: Vec<String>,
    /// DER of the subject, as it stands in the request.
    pub subject: Vec<u8>,
    /// DER of the public key.
    pub public_key: Vec<u8>,
    /// DER of the subject alternative names that were understood.
    pub alternative_names: Option<Vec<u8>>,
}

impl Request {
    /// From a CSR object's spec (`request` is base64 of PEM).
    pub fn from_spec(spec: &Value) -> Result<Request, String> {
        let encoded = spec["request"].as_str().unwrap_or_default();
        let pem = STANDARD.decode(encoded).map_err(|error| format!("spec.request is not base64: {error}"))?;
        Request::from_pem(&pem)
    }

    /// From PEM. The request's own signature is checked: it proves the possession of the key.
    pub fn from_pem(pem: &[u8]) -> Result<Request, String> {
        const WANTED: &str = "PEM block type must be CERTIFICATE REQUEST";
        let (_, block) = x509_parser::pem::parse_x509_pem(pem).map_err(|_| WANTED.to_owned())?;
        if block.label != "CERTIFICATE REQUEST" {
            return Err(WANTED.to_owned());
        }
        let (_, parsed) = X509CertificationRequest::from_der(&block.contents).map_err(|error| error.to_string())?;
        parsed.verify_signature().map_err(|error| format!("the request's signature is bad: {error}"))?;
        let info = &parsed.certification_request_info;
        let text = |attribute: &x509_parser::x509::AttributeTypeAndValue<'_>| {
            attribute.as_str().map(str::to_owned).map_err(|error| format!("a subject attribute is no text: {error}"))
        };
        let mut request = Request {
            subject: info.subject.as_raw().to_vec(),
            public_key: info.subject_pki.raw.to_vec(),
            ..Request::default()
        };
        // Of several common names Go keeps the last.
        for name in info.subject.iter_common_name() {
            request.common_name = text(name)?;
        }
        for organization in info.subject.iter_organization() {
            request.organizations.push(text(organization)?);
        }
        for extension in parsed.requested_extensions().into_iter().flatten() {
            if let ParsedExtension::SubjectAlternativeName(names) = extension {
                request.add_names(&names.general_names)?;
            }
        }
        request.keep_names();
        Ok(request)
    }

    fn add_names(&mut self, names: &[GeneralName<'_>]) -> Result<(), String> {
        for name in names {
            match name {
                GeneralName::DNSName(name) => self.dns_names.push((*name).to_owned()),
                GeneralName::RFC822Name(name) => self.emails.push((*name).to_owned()),
                GeneralName::URI(name) => self.uris.push((*name).to_owned()),
                GeneralName::IPAddress(bytes) => {
                    let address = match bytes.len() {
                        4 => <[u8; 4]>::try_from(*bytes).ok().map(IpAddr::from),
                        16 => <[u8; 16]>::try_from(*bytes).ok().map(IpAddr::from),
                        _ => None,
                    };
                    self.addresses.push(address.ok_or("an IP subjectAltName has a bad length")?);
                }
                other => return Err(format!("a subjectAltName is of a kind that is not signed here: {other}")),
            }
        }
        Ok(())
    }

    /// Writes the alternative names anew from what was understood of them, so that nothing else is certified.
    fn keep_names(&mut self) {
        let mut parts: Vec<Vec<u8>> = Vec::new();
        parts.extend(self.dns_names.iter().map(|name| super::der::tlv(0x82, name.as_bytes())));
        parts.extend(self.emails.iter().map(|name| super::der::tlv(0x81, name.as_bytes())));
        parts.extend(self.addresses.iter().map(|address| match address {
            IpAddr::V4(address) => super::der::tlv(0x87, &address.octets()),
            IpAddr::V6(address) => super::der::tlv(0x87, &address.octets()),
        }));
        parts.extend(self.uris.iter().map(|name| super::der::tlv(0x86, name.as_bytes())));
        self.alternative_names = (!parts.is_empty()).then(|| super::der::sequence(&parts));
    }
}
