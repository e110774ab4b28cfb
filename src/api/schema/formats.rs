//! OpenAPI formats and Kubernetes' own (`k8s-short-name`, ...), and Go's durations.

use std::net::{Ipv4Addr, Ipv6Addr};

use base64::Engine as _;
use regex::{Regex, RegexBuilder};

use crate::content;

/// Bound of a compiled regular expression, in bytes.
pub const REGEX_SIZE: usize = 1 << 20;

/// Compiles a pattern of a CRD, which is in Go's syntax.
pub fn compile(source: &str) -> Result<Regex, String> {
    RegexBuilder::new(&from_go(source)).size_limit(REGEX_SIZE).dfa_size_limit(REGEX_SIZE).build().map_err(|error| error.to_string())
}

/// Go's regular expressions (RE2) in our engine's syntax. They agree but for this: Go's `\d`, `\w`, `\s` and
/// `\b` are ASCII; in a class `[`, `&` and `~` stand for themselves; `\Q...\E` quotes; `\z` is the end.
fn from_go(source: &str) -> String {
    let mut out = String::with_capacity(source.len() + 16);
    let mut characters = source.chars().peekable();
    // Inside a class; and whether the next character is its first (where `]` is literal).
    let (mut class, mut first) = (false, false);
    while let Some(character) = characters.next() {
        let at_start = std::mem::take(&mut first);
        match character {
            '\\' => match characters.next() {
                Some('d') => out.push_str("[0-9]"),
                Some('D') => out.push_str("[^0-9]"),
                Some('w') => out.push_str("[0-9A-Za-z_]"),
                Some('W') => out.push_str("[^0-9A-Za-z_]"),
                Some('s') => out.push_str("[\\t\\n\\f\\r ]"),
                Some('S') => out.push_str("[^\\t\\n\\f\\r ]"),
                Some('b') if !class => out.push_str("(?-u:\\b)"),
                Some('B') if !class => out.push_str("(?-u:\\B)"),
                Some('Q') => {
                    let rest: String = characters.by_ref().collect();
                    let (quoted, rest) = rest.split_once("\\E").unwrap_or((&rest, ""));
                    return out + &regex::escape(quoted) + &from_go(rest);
                }
                Some(escaped) => out.extend(['\\', escaped]),
                None => out.push('\\'),
            },
            '[' if !class => {
                (class, first) = (true, true);
                out.push('[');
                if characters.next_if_eq(&'^').is_some() {
                    out.push('^');
                }
            }
            '[' if characters.peek() == Some(&':') => {
                // A named class, `[:alpha:]`: up to its end.
                out.push('[');
                for character in characters.by_ref() {
                    out.push(character);
                    if character == ']' {
                        break;
                    }
                }
            }
            ']' if class && at_start => out.push_str("\\]"),
            ']' if class => {
                class = false;
                out.push(']');
            }
            '[' | '&' | '~' if class => out.extend(['\\', character]),
            character => out.push(character),
        }
    }
    out
}

/// Go's `time.ParseDuration`, in nanoseconds.
pub fn parse_go_duration(text: &str) -> Option<i64> {
    let (negative, mut rest) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    if rest == "0" {
        return Some(0);
    }
    let mut total = 0_i128;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = |text: &str| text.bytes().take_while(u8::is_ascii_digit).count();
        let (whole, tail) = rest.split_at(digits(rest));
        let (fraction, tail) = match tail.strip_prefix('.') {
            Some(tail) => tail.split_at(digits(tail)),
            None => ("", tail),
        };
        if (whole.is_empty() && fraction.is_empty()) || whole.len() > 19 {
            return None;
        }
        let letters = tail.find(|c: char| c == '.' || c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(letters);
        let unit: i128 = match unit {
            "ns" => 1,
            "us" | "µs" | "μs" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            _ => return None,
        };
        total += whole.parse::<i128>().unwrap_or(0) * unit;
        let mut scale = unit;
        for digit in fraction.bytes().take(18) {
            scale /= 10;
            total += i128::from(digit - b'0') * scale;
        }
        rest = tail;
        if total > i128::from(i64::MAX) {
            return None;
        }
    }
    i64::try_from(if negative { -total } else { total }).ok()
}

/// Go's `Duration.String`: `1h2m3.5s`, `1.5ms`, `0s`.
pub fn go_duration(nanos: i64) -> String {
    let sign = if nanos < 0 { "-" } else { "" };
    let total = nanos.unsigned_abs();
    let fraction = |value: u64, unit: u64| {
        let rest = value % unit;
        if rest == 0 {
            return (value / unit).to_string();
        }
        let width = unit.ilog10() as usize;
        format!("{}.{}", value / unit, format!("{rest:0width$}").trim_end_matches('0'))
    };
    match total {
        0 => "0s".to_owned(),
        1..1_000 => format!("{sign}{total}ns"),
        1_000..1_000_000 => format!("{sign}{}µs", fraction(total, 1_000)),
        1_000_000..1_000_000_000 => format!("{sign}{}ms", fraction(total, 1_000_000)),
        _ => {
            let seconds = fraction(total % 60_000_000_000, 1_000_000_000);
            let minutes = total / 60_000_000_000;
            match (minutes / 60, minutes % 60) {
                (0, 0) => format!("{sign}{seconds}s"),
                (0, minutes) => format!("{sign}{minutes}m{seconds}s"),
                (hours, minutes) => format!("{sign}{hours}h{minutes}m{seconds}s"),
            }
        }
    }
}

/// What is wrong with `text` in this format; empty when nothing is or the format is not one that is checked.
pub fn broken(format: &str, text: &str) -> Vec<String> {
    match format {
        "k8s-short-name" => content::dns_label(text),
        "k8s-long-name" => content::dns_subdomain(text),
        "k8s-long-name-caseless" => content::dns_subdomain(&text.to_ascii_lowercase()),
        "k8s-label-key" => content::qualified_name(text),
        "k8s-prefixed-label-key" => {
            let mut errors = content::qualified_name(text);
            if errors.is_empty() && !text.contains('/') {
                errors.push("must include a prefix (e.g. 'example.com/key')".to_owned());
            }
            errors
        }
        "k8s-label-value" => content::label_value(text),
        "k8s-path-segment-name" => content::path_segment(text),
        "k8s-ip" => content::ip(text),
        "k8s-uuid" => only(is_uuid(text), "must be a lowercase UUID in 8-4-4-4-12 format"),
        "k8s-resource-fully-qualified-name" => qualified(text),
        "k8s-extended-resource-name" => qualified(text),
        "k8s-resource-pool-name" => pool_name(text),
        _ if custom_format(format, text) => Vec::new(),
        _ => vec![format!("must be of type {format}: {}", crate::field::quote(text))],
    }
}

fn only(good: bool, message: &str) -> Vec<String> {
    if good { Vec::new() } else { vec![message.to_owned()] }
}

fn qualified(text: &str) -> Vec<String> {
    match text.split_once('/') {
        None => vec!["a fully qualified name must be a domain and a name separated by a slash".to_owned()],
        Some((domain, name)) => {
            let mut errors = content::dns_subdomain(domain);
            errors.extend(content::c_identifier(name));
            errors
        }
    }
}

fn pool_name(text: &str) -> Vec<String> {
    text.split('/').flat_map(content::dns_subdomain).collect()
}

/// The formats of OpenAPI that upstream checks in custom resources (`kube-openapi`'s strfmt); others are ignored.
fn custom_format(format: &str, text: &str) -> bool {
    match format {
        "date-time" | "datetime" => crate::meta::parse_time(text).is_some() && text.contains(['T', 't']),
        "date" => text.len() == 10 && text.parse::<jiff::civil::Date>().is_ok(),
        "duration" => parse_go_duration(text).is_some() || is_worded_duration(text),
        "ipv4" => text.parse::<Ipv4Addr>().is_ok(),
        "ipv6" => text.parse::<Ipv6Addr>().is_ok(),
        "cidr" => content::cidr(text).is_empty(),
        "mac" => is_mac(text),
        "byte" => base64::engine::general_purpose::STANDARD.decode(text).is_ok(),
        "uuid" | "uuid3" | "uuid4" | "uuid5" => is_uuid(&text.to_ascii_lowercase()) || is_bare_uuid(text),
        "email" => text.split_once('@').is_some_and(|(user, host)| !user.is_empty() && !host.is_empty() && !host.contains('@')),
        "hostname" => !text.is_empty() && text.len() <= 255 && text.split('.').all(is_host_part),
        "uri" | "url" => is_uri(text),
        "hexcolor" => {
            let digits = text.strip_prefix('#').unwrap_or(text);
            matches!(digits.len(), 3 | 6) && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
        }
        _ => true,
    }
}

fn is_worded_duration(text: &str) -> bool {
    // "3 days", "1 week": numbers with unit words.
    let mut words = text.split_whitespace();
    let (Some(number), Some(unit), None) = (words.next(), words.next(), words.next()) else {
        return false;
    };
    let unit = unit.trim_end_matches('s');
    number.parse::<f64>().is_ok()
        && ["nano", "micro", "milli", "second", "sec", "minute", "min", "hour", "hr", "day", "week", "wk"].contains(&unit)
}

fn is_host_part(part: &str) -> bool {
    !part.is_empty()
        && part.len() <= 63
        && !part.starts_with('-')
        && !part.ends_with('-')
        && part.chars().all(|c| c.is_alphanumeric() || c == '-' || c == '_')
}

fn is_uri(text: &str) -> bool {
    let absolute = text.split_once(':').is_some_and(|(scheme, rest)| {
        scheme.bytes().next().is_some_and(|byte| byte.is_ascii_alphabetic())
            && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
            && !rest.is_empty()
    });
    (absolute || text.starts_with('/')) && !text.contains(|c: char| c.is_whitespace() || c.is_control())
}

fn is_mac(text: &str) -> bool {
    let groups = |separator: char, size: usize| {
        let parts: Vec<&str> = text.split(separator).collect();
        let total = parts.len() * size / 2;
        parts.iter().all(|part| part.len() == size && part.bytes().all(|byte| byte.is_ascii_hexdigit()))
            && matches!(total, 6 | 8 | 20)
    };
    groups(':', 2) || groups('-', 2) || groups('.', 4)
}

fn is_uuid(text: &str) -> bool {
    text.len() == 36
        && text.bytes().enumerate().all(|(index, byte)| match index {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte),
        })
}

fn is_bare_uuid(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}
