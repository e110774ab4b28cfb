//! Address prefixes: parsing, membership, the n-th address.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// IPv4 or IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    /// The family of an address.
    pub fn of(address: IpAddr) -> Family {
        if address.is_ipv4() { Family::V4 } else { Family::V6 }
    }

    /// Bits of an address: 32 or 128.
    pub fn bits(self) -> u8 {
        match self {
            Family::V4 => 32,
            Family::V6 => 128,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Family::V4 => "IPv4",
            Family::V6 => "IPv6",
        })
    }
}

/// An address prefix, host bits cleared.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cidr {
    base: IpAddr,
    len: u8,
}

impl Cidr {
    /// The prefix of `len` bits that holds `address`; `None` if `len` is longer than the address.
    pub fn new(address: IpAddr, len: u8) -> Option<Cidr> {
        let family = Family::of(address);
        if len > family.bits() {
            return None;
        }
        Some(Cidr { base: from_number(family, to_number(address) & mask(family, len)), len })
    }

    /// The prefix that holds this address only.
    pub fn host(address: IpAddr) -> Cidr {
        Cidr { base: address, len: Family::of(address).bits() }
    }

    /// The first address, host bits zero.
    pub fn base(&self) -> IpAddr {
        self.base
    }

    /// Bits of the prefix.
    pub fn prefix_len(&self) -> u8 {
        self.len
    }

    /// IPv4 or IPv6.
    pub fn family(&self) -> Family {
        Family::of(self.base)
    }

    /// Whether `address` is in the prefix.
    pub fn contains(&self, address: IpAddr) -> bool {
        Family::of(address) == self.family() && to_number(address) & mask(self.family(), self.len) == to_number(self.base)
    }

    /// Whether all of `other` is in the prefix.
    pub fn covers(&self, other: &Cidr) -> bool {
        self.len <= other.len && self.contains(other.base)
    }

    /// How many addresses the prefix has; saturates at `u128::MAX`.
    pub fn size(&self) -> u128 {
        1u128.checked_shl(u32::from(self.family().bits() - self.len)).unwrap_or(u128::MAX)
    }

    /// The address at `offset` from the base; `None` past the end.
    pub fn nth(&self, offset: u128) -> Option<IpAddr> {
        (offset < self.size()).then(|| from_number(self.family(), to_number(self.base) + offset))
    }

    /// The offset of an address of this prefix from its base.
    pub fn offset(&self, address: IpAddr) -> Option<u128> {
        self.contains(address).then(|| to_number(address) - to_number(self.base))
    }
}

fn mask(family: Family, len: u8) -> u128 {
    let host = u32::from(family.bits() - len);
    let all = if family == Family::V4 { u128::from(u32::MAX) } else { u128::MAX };
    all & u128::MAX.checked_shl(host).unwrap_or(0)
}

fn to_number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(a) => u128::from(u32::from(a)),
        IpAddr::V6(a) => u128::from(a),
    }
}

fn from_number(family: Family, n: u128) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::from(n as u32)),
        Family::V6 => IpAddr::V6(Ipv6Addr::from(n)),
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base, self.len)
    }
}

impl fmt::Debug for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Cidr {
    type Err = Error;
    fn from_str(text: &str) -> Result<Cidr, Error> {
        let bad = || Error::BadCidr { text: text.to_owned() };
        let (address, len) = text.trim().split_once('/').ok_or_else(bad)?;
        let address: IpAddr = address.parse().map_err(|_| bad())?;
        let len: u8 = len.parse().map_err(|_| bad())?;
        Cidr::new(address, len).ok_or_else(bad)
    }
}

impl Serialize for Cidr {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Cidr {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Cidr, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cidr(text: &str) -> Cidr {
        text.parse().expect(text)
    }

    #[test]
    fn parses_and_masks() {
        for (text, shown, size) in [
            ("10.244.3.7/24", "10.244.3.0/24", 256u128),
            ("10.0.0.1/32", "10.0.0.1/32", 1),
            ("0.0.0.0/0", "0.0.0.0/0", 1 << 32),
            ("fd00::1:5/112", "fd00::1:0/112", 65536),
            ("::/0", "::/0", u128::MAX),
        ] {
            assert_eq!(cidr(text).to_string(), shown);
            assert_eq!(cidr(text).size(), size, "{text}");
        }
        for bad in ["", "10.0.0.0", "10.0.0.0/33", "fd00::/129", "x/8", "10.0.0.0/-1"] {
            assert!(bad.parse::<Cidr>().is_err(), "{bad}");
        }
    }

    #[test]
    fn membership() {
        for (prefix, address, offset) in [
            ("10.244.3.0/24", "10.244.3.9", Some(9)),
            ("10.244.3.0/24", "10.244.4.9", None),
            ("0.0.0.0/0", "1.2.3.4", Some(0x0102_0304)),
            ("10.0.0.0/8", "::1", None),
            ("fd00::/64", "fd00::ff", Some(255)),
        ] {
            let address: IpAddr = address.parse().unwrap();
            assert_eq!(cidr(prefix).offset(address), offset, "{prefix} {address}");
            if let Some(n) = offset {
                assert_eq!(cidr(prefix).nth(n), Some(address));
            }
        }
        assert!(cidr("10.0.0.0/8").covers(&cidr("10.3.0.0/16")));
        assert!(!cidr("10.3.0.0/16").covers(&cidr("10.0.0.0/8")));
    }
}
