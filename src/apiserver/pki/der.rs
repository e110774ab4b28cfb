//! Just enough DER to write certificates: values in, bytes out.
//!
//! Certificates for other people's requests must carry their subject and key as they were asked for, byte by byte
//! (several organizations, in order), which `rcgen` cannot express; so all certificates are written here.

/// One element with its tag and length.
pub fn tlv(tag: u8, content: &[u8]) -> Vec<u8> {
    let mut out = vec![tag];
    let length = content.len();
    if length < 0x80 {
        out.push(length as u8);
    } else {
        let bytes = length.to_be_bytes();
        let significant: Vec<u8> = bytes.into_iter().skip_while(|byte| *byte == 0).collect();
        out.push(0x80 | significant.len() as u8);
        out.extend(significant);
    }
    out.extend_from_slice(content);
    out
}

pub fn sequence(parts: &[Vec<u8>]) -> Vec<u8> {
    tlv(0x30, &parts.concat())
}

pub fn set(parts: &[Vec<u8>]) -> Vec<u8> {
    tlv(0x31, &parts.concat())
}

/// A non-negative integer from its big-endian bytes.
pub fn integer(bytes: &[u8]) -> Vec<u8> {
    let mut value: Vec<u8> = bytes.iter().copied().skip_while(|byte| *byte == 0).collect();
    if value.first().is_none_or(|first| *first >= 0x80) {
        value.insert(0, 0);
    }
    tlv(0x02, &value)
}

pub fn oid(components: &[u64]) -> Vec<u8> {
    let mut content = Vec::new();
    let first = components.first().copied().unwrap_or_default() * 40 + components.get(1).copied().unwrap_or_default();
    for value in std::iter::once(first).chain(components.iter().skip(2).copied()) {
        let mut groups = vec![(value & 0x7f) as u8];
        let mut rest = value >> 7;
        while rest > 0 {
            groups.push((rest & 0x7f) as u8 | 0x80);
            rest >>= 7;
        }
        content.extend(groups.into_iter().rev());
    }
    tlv(0x06, &content)
}

pub fn utf8(text: &str) -> Vec<u8> {
    tlv(0x0c, text.as_bytes())
}

pub fn octets(content: &[u8]) -> Vec<u8> {
    tlv(0x04, content)
}

pub fn boolean(value: bool) -> Vec<u8> {
    tlv(0x01, &[if value { 0xff } else { 0 }])
}

/// A bit string of whole bytes.
pub fn bits(content: &[u8]) -> Vec<u8> {
    tlv(0x03, &[&[0], content].concat())
}

/// A bit string of named bits (bit 0 is the first), without trailing zeros.
pub fn named_bits(set: &[u8]) -> Vec<u8> {
    let mut bytes = [0u8; 2];
    for bit in set.iter().filter(|bit| **bit < 16) {
        bytes[usize::from(*bit / 8)] |= 0x80 >> (bit % 8);
    }
    let used = if bytes[1] != 0 { 2 } else { 1 };
    let unused = if bytes[used - 1] == 0 { 0 } else { bytes[used - 1].trailing_zeros() as u8 };
    let mut content = vec![unused];
    content.extend_from_slice(&bytes[..used]);
    tlv(0x03, &content)
}

/// UTCTime to 2049, GeneralizedTime after (RFC 5280, 4.1.2.5).
pub fn time(at: jiff::Timestamp) -> Vec<u8> {
    let utc = at.to_zoned(jiff::tz::TimeZone::UTC);
    let rest = format!(
        "{:02}{:02}{:02}{:02}{:02}Z",
        utc.month(),
        utc.day(),
        utc.hour(),
        utc.minute(),
        utc.second()
    );
    match utc.year() {
        year @ 1950..2050 => tlv(0x17, format!("{:02}{rest}", year % 100).as_bytes()),
        year => tlv(0x18, format!("{year:04}{rest}").as_bytes()),
    }
}
