//! Resource quantities: exact decimal amounts with an SI, binary or exponent suffix.
//!
//! Follows `k8s.io/apimachinery/pkg/api/resource.Quantity`: the same grammar, rounding (up, to nano)
//! and canonical form. An amount is an `i128` of nano-units; what lies beyond is capped, where
//! upstream goes on with big decimals (from about 1.7e29 on).

use std::cmp::Ordering;
use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Neg, Sub, SubAssign};
use std::str::FromStr;

const NANO: i128 = 1_000_000_000;
const MILLI: i128 = 1_000_000;

/// How a quantity is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Format {
    /// `12e6`
    DecimalExponent,
    /// `12Mi`
    BinarySi,
    /// `12M`
    #[default]
    DecimalSi,
}

/// An amount of a resource. Equality and order look at the amount only, not at the format.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quantity {
    nanos: i128,
    format: Format,
}

/// Why a string is no quantity; upstream's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// The string does not have the shape of a quantity.
    #[error("quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")]
    Format,
    /// The number before the suffix cannot be read.
    #[error("unable to parse numeric part of quantity")]
    Number,
    /// The suffix is none that exists.
    #[error("unable to parse quantity's suffix")]
    Suffix,
}

impl Quantity {
    /// Nothing, in decimal notation.
    pub const ZERO: Quantity = Quantity { nanos: 0, format: Format::DecimalSi };

    /// `value` whole units.
    pub fn from_value(value: i64, format: Format) -> Self {
        Quantity { nanos: i128::from(value) * NANO, format }
    }

    /// `milli` thousandths, in decimal notation.
    pub fn from_milli(milli: i64) -> Self {
        Quantity { nanos: i128::from(milli) * MILLI, format: Format::DecimalSi }
    }

    /// `nano` billionths, in decimal notation.
    pub fn from_nano(nano: i64) -> Self {
        Quantity { nanos: i128::from(nano), format: Format::DecimalSi }
    }

    /// Whole units, rounded up, capped at the bounds of `i64`.
    pub fn value(&self) -> i64 {
        self.scaled(NANO)
    }

    /// Thousandths, rounded up, capped at the bounds of `i64`.
    pub fn milli_value(&self) -> i64 {
        self.scaled(MILLI)
    }

    /// The amount as a float, with what precision that has.
    pub fn as_f64(&self) -> f64 {
        self.nanos as f64 / NANO as f64
    }

    /// The notation this quantity is written in.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The same amount in another notation.
    pub fn with_format(self, format: Format) -> Self {
        Quantity { format, ..self }
    }

    /// Whether the amount is zero.
    pub fn is_zero(&self) -> bool {
        self.nanos == 0
    }

    /// Whether the amount is below zero.
    pub fn is_negative(&self) -> bool {
        self.nanos < 0
    }

    /// The amount times `factor`, capped.
    pub fn times(self, factor: i64) -> Self {
        Quantity { nanos: self.nanos.saturating_mul(factor.into()), ..self }
    }

    fn scaled(&self, unit: i128) -> i64 {
        let up = self.nanos.div_euclid(unit) + i128::from(self.nanos.rem_euclid(unit) != 0);
        // Away from zero, as upstream's ScaledValue rounds.
        let rounded = if self.nanos < 0 && self.nanos % unit != 0 { up - 1 } else { up };
        rounded.clamp(i64::MIN.into(), i64::MAX.into()) as i64
    }
}

/// Parses `text` and writes it in canonical form: what upstream stores and answers for a quantity.
///
/// ```
/// assert_eq!(windlass_api::quantity::canonical("1000m").unwrap(), "1");
/// ```
pub fn canonical(text: &str) -> Result<String, QuantityError> {
    Ok(text.parse::<Quantity>()?.to_string())
}

/// A quantity out of a JSON value: a string, or a number as upstream also accepts.
pub fn from_json(value: &serde_json::Value) -> Result<Quantity, QuantityError> {
    match value {
        serde_json::Value::String(text) => text.trim().parse(),
        serde_json::Value::Number(number) => number.to_string().parse(),
        _ => Err(QuantityError::Format),
    }
}

struct Scanned<'a> {
    negative: bool,
    whole: &'a str,
    fraction: &'a str,
    suffix: &'a str,
}

fn scan(text: &str) -> Result<Scanned<'_>, QuantityError> {
    let (negative, rest) = match text.as_bytes().first() {
        Some(b'-') => (true, &text[1..]),
        Some(b'+') => (false, &text[1..]),
        Some(_) => (false, text),
        None => return Err(QuantityError::Format),
    };
    let digits = |text: &str| text.bytes().take_while(u8::is_ascii_digit).count();
    let (whole, rest) = rest.split_at(digits(rest));
    let (fraction, suffix) = match rest.strip_prefix('.') {
        Some(rest) => rest.split_at(digits(rest)),
        None => ("", rest),
    };
    let letters = suffix.bytes().take_while(|byte| b"eEinumkKMGTP".contains(byte)).count();
    let exponent = suffix[letters..].strip_prefix(['-', '+']).unwrap_or(&suffix[letters..]);
    if !exponent.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(QuantityError::Format);
    }
    if whole.is_empty() && fraction.is_empty() && !suffix.is_empty() {
        // Upstream fails on these as numbers: "Mi", "." and the like.
        return Err(QuantityError::Number);
    }
    Ok(Scanned { negative, whole: whole.trim_start_matches('0'), fraction, suffix })
}

enum Scale {
    Ten(i32),
    Two(u32),
}

fn suffix(text: &str) -> Option<(Scale, Format)> {
    let decimal = |exponent| Some((Scale::Ten(exponent), Format::DecimalSi));
    let binary = |exponent| Some((Scale::Two(exponent), Format::BinarySi));
    match text {
        "" => decimal(0),
        "n" => decimal(-9),
        "u" => decimal(-6),
        "m" => decimal(-3),
        "k" => decimal(3),
        "M" => decimal(6),
        "G" => decimal(9),
        "T" => decimal(12),
        "P" => decimal(15),
        "E" => decimal(18),
        "Ki" => binary(10),
        "Mi" => binary(20),
        "Gi" => binary(30),
        "Ti" => binary(40),
        "Pi" => binary(50),
        "Ei" => binary(60),
        _ => {
            let exponent: i64 = text.strip_prefix(['e', 'E'])?.parse().ok()?;
            Some((Scale::Ten(exponent.clamp(-1000, 1000) as i32), Format::DecimalExponent))
        }
    }
}

/// `digits` (no sign) times ten to the power of `exponent`, rounded up to an integer, capped.
fn decimal(digits: impl Iterator<Item = u8> + Clone, exponent: i32) -> i128 {
    let count = digits.clone().count() as i32;
    let keep = count + exponent.min(0);
    let (mut amount, mut rest) = (0_i128, false);
    for (index, digit) in digits.enumerate() {
        let digit = i128::from(digit - b'0');
        if (index as i32) < keep {
            amount = amount.saturating_mul(10).saturating_add(digit);
        } else {
            rest |= digit != 0;
        }
    }
    for _ in 0..exponent.max(0) {
        if amount == 0 || amount == i128::MAX {
            break;
        }
        amount = amount.saturating_mul(10);
    }
    amount.saturating_add(i128::from(rest))
}

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let scanned = scan(text)?;
        let (scale, mut format) = suffix(scanned.suffix).ok_or(QuantityError::Suffix)?;
        let digits = scanned.whole.bytes().chain(scanned.fraction.bytes());
        let fraction = scanned.fraction.len() as i32;
        let nanos = match scale {
            Scale::Ten(exponent) => decimal(digits, 9 + exponent - fraction),
            Scale::Two(shift) => {
                // Exact: digits * 2^shift, then the decimal point. 19 digits and 60 bits fit.
                let unscaled = decimal(digits, 0).saturating_mul(1_i128 << shift);
                let amount = if fraction <= 9 {
                    unscaled.saturating_mul(10_i128.pow((9 - fraction) as u32))
                } else {
                    let divisor = 10_i128.saturating_pow((fraction - 9) as u32);
                    unscaled / divisor + i128::from(unscaled % divisor != 0)
                };
                if amount > 0 && amount < NANO {
                    format = Format::DecimalSi;
                }
                amount.min(i128::from(i64::MAX) * NANO)
            }
        };
        Ok(Quantity { nanos: if scanned.negative { -nanos } else { nanos }, format })
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nanos == 0 {
            return f.write_str("0");
        }
        let whole = self.nanos / NANO;
        if self.format == Format::BinarySi && self.nanos % NANO == 0 && whole.unsigned_abs() >= 1024 {
            let (mut amount, mut exponent) = (whole, 0_usize);
            while amount % 1024 == 0 && exponent < 6 {
                amount /= 1024;
                exponent += 1;
            }
            return write!(f, "{amount}{}", ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"][exponent]);
        }
        let (mut amount, mut exponent) = (self.nanos, -9_i32);
        while amount % 1000 == 0 && (exponent < 18 || self.format == Format::DecimalExponent) {
            amount /= 1000;
            exponent += 3;
        }
        write!(f, "{amount}")?;
        match (self.format, exponent) {
            (_, 0) => Ok(()),
            (Format::DecimalExponent, exponent) => write!(f, "e{exponent}"),
            (_, exponent) => f.write_str(["n", "u", "m", "", "k", "M", "G", "T", "P", "E"][(exponent / 3 + 3) as usize]),
        }
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nanos == other.nanos
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> Ordering {
        self.nanos.cmp(&other.nanos)
    }
}

impl Add for Quantity {
    type Output = Quantity;

    fn add(self, other: Quantity) -> Quantity {
        // Upstream: a zero takes the other's notation.
        let format = if self.nanos == 0 { other.format } else { self.format };
        Quantity { nanos: self.nanos.saturating_add(other.nanos), format }
    }
}

impl Sub for Quantity {
    type Output = Quantity;

    fn sub(self, other: Quantity) -> Quantity {
        let format = if self.nanos == 0 { other.format } else { self.format };
        Quantity { nanos: self.nanos.saturating_sub(other.nanos), format }
    }
}

impl Neg for Quantity {
    type Output = Quantity;

    fn neg(self) -> Quantity {
        Quantity { nanos: self.nanos.saturating_neg(), ..self }
    }
}

impl AddAssign for Quantity {
    fn add_assign(&mut self, other: Quantity) {
        *self = *self + other;
    }
}

impl SubAssign for Quantity {
    fn sub_assign(&mut self, other: Quantity) {
        *self = *self - other;
    }
}

impl Sum for Quantity {
    fn sum<I: Iterator<Item = Quantity>>(all: I) -> Quantity {
        all.fold(Quantity::ZERO, Add::add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(cases: &[(&str, &str)]) {
        for (text, expected) in cases {
            let actual = canonical(text).unwrap_or_else(|error| format!("error: {error}"));
            let expected = match *expected {
                "format" => format!("error: {}", QuantityError::Format),
                "number" => format!("error: {}", QuantityError::Number),
                "suffix" => format!("error: {}", QuantityError::Suffix),
                text => text.to_owned(),
            };
            assert_eq!(actual, expected, "{text:?}");
        }
    }

    #[test]
    fn canonical_form() {
        check(&[
            ("0", "0"), ("0n", "0"), ("0Ki", "0"), ("-0", "0"), ("00.10", "100m"), ("1000m", "1"), ("1500m", "1500m"),
            ("0.5", "500m"), ("1.5", "1500m"), ("100", "100"), ("1000", "1k"), ("1024", "1024"), ("1024Ki", "1Mi"),
            ("1Ki", "1Ki"), ("1536Mi", "1536Mi"), ("1.5Gi", "1536Mi"), ("0.5Ki", "512"), ("0.1Ki", "102400m"),
            ("1e3", "1e3"), ("1E3", "1e3"), ("12e-3", "12e-3"), ("1e2", "100"), ("1E", "1E"), ("+1", "1"), ("-1500m", "-1500m"),
            ("0.0000000001", "1n"), ("1.1n", "2n"), ("9223372036854775807", "9223372036854775807"), ("10Ei", "9223372036854775807"),
            ("1.", "1"), (".5", "500m"), ("1025Ki", "1025Ki"), ("1023", "1023"), ("5n", "5n"), ("3u", "3u"), ("1.5Mi", "1536Ki"),
        ]);
    }

    #[test]
    fn refused() {
        check(&[
            ("", "format"), ("1.1.1", "format"), ("1+1.0", "format"), ("0.1mi", "suffix"), ("0.1am", "format"),
            ("aoeu", "format"), (".5i", "suffix"), ("1i", "suffix"), ("-3.01i", "suffix"), ("1e", "suffix"), ("Mi", "number"),
            ("1 ", "format"), ("1k1", "suffix"), ("1ee3", "suffix"),
        ]);
    }

    #[test]
    fn arithmetic_and_rounding() {
        let quantity = |text: &str| text.parse::<Quantity>().unwrap();
        assert_eq!((quantity("1") + quantity("500m")).to_string(), "1500m");
        assert_eq!((quantity("0") + quantity("1Gi")).to_string(), "1Gi");
        assert_eq!((quantity("1Gi") - quantity("1Mi")).to_string(), "1023Mi");
        assert_eq!(quantity("1.2").value(), 2);
        assert_eq!(quantity("100u").milli_value(), 1);
        assert_eq!(quantity("-1.2").value(), -2);
        assert_eq!(quantity("1Ki").value(), 1024);
        assert!(quantity("1Ki") > quantity("1k"));
        assert_eq!(quantity("1024"), quantity("1Ki"));
        assert_eq!(quantity("9e999").value(), i64::MAX);
    }
}
