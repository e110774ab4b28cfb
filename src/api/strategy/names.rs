//! Syntax of names: `k8s.io/apimachinery/pkg/util/validation`, with its messages.
//!
//! Each rule returns what is wrong; nothing means valid. The checks are by hand: names are looked at on every write.

use crate::strategy::at::At;

const LABEL_FMT: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?";
const SUBDOMAIN_FMT: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*";
const KEY_FMT: &str = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]";
const LABEL_MSG: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character";
const SUBDOMAIN_MSG: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character";
const KEY_MSG: &str =
    "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character";

/// A syntax rule.
pub type Rule = fn(&str) -> Vec<String>;

fn regex_error(msg: &str, fmt: &str, examples: &[&str]) -> String {
    let mut s = msg.to_owned();
    if examples.is_empty() {
        return s + " (regex used for validation is '" + fmt + "')";
    }
    s.push_str(" (e.g. ");
    for (i, e) in examples.iter().enumerate() {
        if i > 0 {
            s.push_str(" or ");
        }
        s.push('\'');
        s.push_str(e);
        s.push_str("', ");
    }
    s + "regex used for validation is '" + fmt + "')"
}

fn max_len(n: usize) -> String {
    format!("must be no more than {n} characters")
}

fn max_bytes(n: usize) -> String {
    format!("must be no more than {n} bytes")
}

fn lower_alnum(b: u8) -> bool {
    b.is_ascii_lowercase() || b.is_ascii_digit()
}

fn is_label(s: &str) -> bool {
    let b = s.as_bytes();
    match (b.first(), b.last()) {
        (Some(&f), Some(&l)) => lower_alnum(f) && lower_alnum(l) && b.iter().all(|&c| lower_alnum(c) || c == b'-'),
        _ => false,
    }
}

fn is_subdomain(s: &str) -> bool {
    s.split('.').all(is_label)
}

fn is_key_part(s: &str) -> bool {
    let b = s.as_bytes();
    match (b.first(), b.last()) {
        (Some(f), Some(l)) => {
            f.is_ascii_alphanumeric()
                && l.is_ascii_alphanumeric()
                && b.iter().all(|c| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.'))
        }
        _ => false,
    }
}

/// A DNS label of at most 63 bytes.
pub fn dns1123_label(s: &str) -> Vec<String> {
    let mut e = Vec::new();
    if s.len() > 63 {
        e.push(max_len(63));
    }
    if !is_label(s) {
        if is_subdomain(s) {
            e.push("must not contain dots".into());
        } else {
            e.push(regex_error(LABEL_MSG, LABEL_FMT, &["my-name", "123-abc"]));
        }
    }
    e
}

/// A DNS subdomain of at most 253 bytes.
pub fn dns1123_subdomain(s: &str) -> Vec<String> {
    let mut e = Vec::new();
    if s.len() > 253 {
        e.push(max_len(253));
    }
    if !is_subdomain(s) {
        e.push(regex_error(SUBDOMAIN_MSG, SUBDOMAIN_FMT, &["example.com"]));
    }
    e
}

/// A DNS label that starts with a letter.
pub fn dns1035_label(s: &str) -> Vec<String> {
    let mut e = Vec::new();
    if s.len() > 63 {
        e.push(max_len(63));
    }
    if !is_label(s) || !s.starts_with(|c: char| c.is_ascii_lowercase()) {
        e.push(regex_error(
            "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, and end with an alphanumeric character",
            "[a-z]([-a-z0-9]*[a-z0-9])?",
            &["my-name", "abc-123"],
        ));
    }
    e
}

/// `*.` and a DNS subdomain.
pub fn wildcard_subdomain(s: &str) -> Vec<String> {
    let mut e = Vec::new();
    if s.len() > 253 {
        e.push(max_len(253));
    }
    if !s.strip_prefix("*.").is_some_and(is_subdomain) {
        e.push(regex_error(
            "a wildcard DNS-1123 subdomain must start with '*.', followed by a valid DNS subdomain, which must consist of lower case alphanumeric characters, '-' or '.' and end with an alphanumeric character",
            "\\*\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*",
            &["*.example.com"],
        ));
    }
    e
}

/// A label key: `[prefix/]name`.
pub fn qualified_name(s: &str) -> Vec<String> {
    let mut e = Vec::new();
    let name = match s.split_once('/') {
        None => s,
        Some((prefix, name)) if !name.contains('/') => {
            if prefix.is_empty() {
                e.push("prefix part must be non-empty".into());
            } else {
                if prefix.len() > 253 {
                    e.push(format!("prefix part {}", max_bytes(253)));
                }
                if !is_subdomain(prefix) {
                    e.push(format!("prefix part {}", regex_error(SUBDOMAIN_MSG, SUBDOMAIN_FMT, &["example.com"])));
                }
            }
            name
        }
        _ => {
            let m = regex_error(KEY_MSG, KEY_FMT, &["MyName", "my.name", "123-abc"]);
            e.push(format!("a valid label key {m} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"));
            return e;
        }
    };
    if name.is_empty() {
        e.push("name part must be non-empty".into());
    } else if name.len() > 63 {
        e.push(format!("name part {}", max_bytes(63)));
    }
    if !is_key_part(name) {
        e.push(format!("name part {}", regex_error(KEY_MSG, KEY_FMT, &["MyName", "my.name", "123-abc"])));
    }
    e
}

/// A label value.
pub fn label_value(s: &str) -> Vec<String> {
    let mut e = Vec::new();
    if s.len() > 63 {
        e.push(max_bytes(63));
    }
    if !s.is_empty() && !is_key_part(s) {
        e.push(regex_error(
            "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character",
            "(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?",
            &["MyValue", "my_value", "12345"],
        ));
    }
    e
}

/// What may be one segment of a URL path.
pub fn path_segment(s: &str) -> Vec<String> {
    if s == "." || s == ".." {
        return vec![format!("may not be '{s}'")];
    }
    path_segment_prefix(s)
}

/// The beginning of a [`path_segment`].
pub fn path_segment_prefix(s: &str) -> Vec<String> {
    ['/', '%'].iter().filter(|c| s.contains(**c)).map(|c| format!("may not contain '{c}'")).collect()
}

/// A port's IANA service name.
pub fn port_name(s: &str) -> Vec<String> {
    let mut e = Vec::new();
    if s.len() > 15 {
        e.push(max_len(15));
    }
    if s.is_empty() || !s.bytes().all(|b| lower_alnum(b) || b == b'-') {
        e.push("must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)".into());
    }
    if !s.bytes().any(|b| b.is_ascii_lowercase()) {
        e.push("must contain at least one letter (a-z)".into());
    }
    if s.contains("--") {
        e.push("must not contain consecutive hyphens".into());
    }
    if s.starts_with('-') || s.ends_with('-') {
        e.push("must not begin or end with a hyphen".into());
    }
    e
}

fn dir_prefix(s: &str) -> Option<String> {
    match s {
        "." => Some("must not be '.'".into()),
        ".." => Some("must not be '..'".into()),
        _ if s.starts_with("..") => Some("must not start with '..'".into()),
        _ => None,
    }
}

/// A key of a ConfigMap or Secret.
pub fn config_key(s: &str) -> Vec<String> {
    let mut e = Vec::new();
    if s.len() > 253 {
        e.push(max_len(253));
    }
    if s.is_empty() || !s.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.')) {
        e.push(regex_error(
            "a valid config key must consist of alphanumeric characters, '-', '_' or '.'",
            "[-._a-zA-Z0-9]+",
            &["key.name", "KEY_NAME", "key-name"],
        ));
    }
    e.extend(dir_prefix(s));
    e
}

/// A name of an environment variable, as relaxed by KEP-4369: printable ASCII without `=`.
pub fn env_name(s: &str) -> Vec<String> {
    if s.is_empty() {
        return vec!["environment variable name must be non-empty".into()];
    }
    if s.bytes().any(|b| !(0x20..0x7f).contains(&b) || b == b'=') {
        return vec!["a valid environment variable name must consist only of printable ASCII characters other than '='".into()];
    }
    Vec::new()
}

/// A C identifier.
pub fn c_identifier(s: &str) -> Vec<String> {
    let ok = s.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && s.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    if ok {
        return Vec::new();
    }
    vec![regex_error(
        "a valid C identifier must start with alphabetic character or '_', followed by a string of alphanumeric characters or '_'",
        "[A-Za-z_][A-Za-z0-9_]*",
        &["my_name", "MY_NAME", "MyName"],
    )]
}

/// An HTTP header's name.
pub fn http_header(s: &str) -> Vec<String> {
    if !s.is_empty() && s.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') {
        return Vec::new();
    }
    vec![regex_error(
        "a valid HTTP header must consist of alphanumeric characters or '-'",
        "[-A-Za-z0-9]+",
        &["X-Header-Name"],
    )]
}

/// `50%`.
pub fn percent(s: &str) -> Vec<String> {
    if s.strip_suffix('%').is_some_and(|d| !d.is_empty() && d.bytes().all(|b| b.is_ascii_digit())) {
        return Vec::new();
    }
    vec![regex_error("a valid percent string must be a numeric string followed by an ending '%'", "[0-9]+%", &["1%", "93%"])]
}

/// Whether `port` is 1 to 65535.
pub fn port_number(port: i64) -> Option<&'static str> {
    (!(1..=65535).contains(&port)).then_some("must be between 1 and 65535, inclusive")
}

/// Reports a fully qualified name: a subdomain of three parts at least.
pub fn fully_qualified(at: &At<'_>) {
    let s = at.str();
    if s.is_empty() {
        return at.required("");
    }
    let e = dns1123_subdomain(s);
    if !e.is_empty() {
        at.invalid(e.join(","));
    } else if s.split('.').count() < 3 {
        at.invalid("should be a domain with at least three segments separated by dots");
    }
}

/// The name's length limit does not hold for the random tail: `generateName` is checked with an `a` behind it.
pub fn mask_trailing_dash(s: &str) -> String {
    match s.strip_suffix('-') {
        Some(head) if s.len() > 1 => format!("{head}a"),
        _ => s.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rule: Rule, good: &[&str], bad: &[&str]) {
        for s in good {
            assert!(rule(s).is_empty(), "{s:?} should be valid: {:?}", rule(s));
        }
        for s in bad {
            assert!(!rule(s).is_empty(), "{s:?} should be invalid");
        }
    }

    #[test]
    fn syntax() {
        let long = "a".repeat(64);
        check(dns1123_label, &["a", "0", "a-1", "1-a"], &["", "-a", "a-", "A", "a.b", "a_b", &long]);
        check(dns1123_subdomain, &["a", "a.b", "1.a-b"], &["", ".a", "a.", "a..b", "A.b", "a_b"]);
        check(dns1035_label, &["a", "a1"], &["1a", "", "a."]);
        check(qualified_name, &["a", "A_b.c", "x.y/Z", "1"], &["", "/a", "a/", "a/b/c", "-a", "X_/a", &long]);
        check(label_value, &["", "a", "A_b.c"], &["-", "a b", &long]);
        check(port_name, &["http", "a1"], &["", "1", "-a", "a--b", "HTTP", "sixteen-letters-"]);
        check(config_key, &["a.b_c-D", ".a"], &["", ".", "..", "..a", "a/b"]);
        check(env_name, &["A", "my.env", "1A", "a b"], &["", "a=b", "ä"]);
        check(percent, &["1%", "100%"], &["%", "1", "-1%"]);
        check(wildcard_subdomain, &["*.a.b"], &["*", "a.*", "*.*.a"]);
    }

    #[test]
    fn messages_are_upstreams() {
        assert_eq!(
            dns1123_subdomain("A"),
            [
                "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
            ]
        );
        assert_eq!(dns1123_label("a.b"), ["must not contain dots"]);
    }
}
