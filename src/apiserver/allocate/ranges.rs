//! Ranges of addresses and ports, each split into a band for chosen values and one for assigned values (KEP-3070, KEP-3668).

use rand::Rng;
use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

/// Why a range is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    #[error("{0:?} is no IPv4 network: write it like 10.96.0.0/16")]
    NotACidr(String),
    #[error("{0}: a service network has between 2 (/30) and 1048574 (/12) addresses")]
    Size(String),
    #[error("{0:?} is no port range: write it like 30000-32767")]
    NotPorts(String),
}

/// An IPv4 network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cidr {
    network: u32,
    prefix: u32,
}

impl FromStr for Cidr {
    type Err = RangeError;
    fn from_str(text: &str) -> Result<Cidr, RangeError> {
        let bad = || RangeError::NotACidr(text.to_owned());
        let (address, prefix) = text.split_once('/').ok_or_else(bad)?;
        let address: Ipv4Addr = address.parse().map_err(|_| bad())?;
        let prefix: u32 = prefix.parse().map_err(|_| bad())?;
        if prefix > 32 {
            return Err(bad());
        }
        if !(12..=30).contains(&prefix) {
            return Err(RangeError::Size(text.to_owned()));
        }
        Ok(Cidr { network: u32::from(address) & (u32::MAX << (32 - prefix)), prefix })
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", Ipv4Addr::from(self.network), self.prefix)
    }
}

impl Cidr {
    fn size(self) -> u32 {
        1 << (32 - self.prefix)
    }

    pub fn network(self) -> Ipv4Addr {
        self.network.into()
    }

    /// The first address that is given to a service: the one after the network's own.
    pub fn first(self) -> Ipv4Addr {
        (self.network + 1).into()
    }

    /// Whether a service can have this address (not the network's own, nor broadcast).
    pub fn contains(self, address: Ipv4Addr) -> bool {
        let offset = u32::from(address).wrapping_sub(self.network);
        (1..self.size() - 1).contains(&offset)
    }

    pub fn usable(self) -> u32 {
        self.size() - 2
    }

    /// All addresses in the order in which they are assigned: the upper band from a random one on, then the lower.
    pub fn order(self) -> impl Iterator<Item = Ipv4Addr> {
        let band = band(self.size(), 16, 256, 16);
        order(self.usable(), band).map(move |offset| Ipv4Addr::from(self.network + 1 + offset))
    }
}

/// A range of ports, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    pub first: u16,
    pub last: u16,
}

impl FromStr for Ports {
    type Err = RangeError;
    fn from_str(text: &str) -> Result<Ports, RangeError> {
        let bad = || RangeError::NotPorts(text.to_owned());
        let (first, last) = text.split_once('-').ok_or_else(bad)?;
        let parse = |text: &str| text.trim().parse::<u16>().map_err(|_| bad());
        let (first, last) = (parse(first)?, parse(last)?);
        if first == 0 || first > last {
            return Err(bad());
        }
        Ok(Ports { first, last })
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl Ports {
    pub fn contains(self, port: u16) -> bool {
        (self.first..=self.last).contains(&port)
    }

    pub fn size(self) -> u32 {
        u32::from(self.last - self.first) + 1
    }

    /// All ports in the order in which they are assigned.
    pub fn order(self) -> impl Iterator<Item = u16> {
        let band = band(self.size(), 16, 128, 32);
        // The offset is below the size, which fits.
        order(self.size(), band).map(move |offset| self.first + offset as u16)
    }
}

/// How many values at the bottom are left to those who choose: upstream's `min(max(min, size/step), max)`.
fn band(size: u32, min: u32, max: u32, step: u32) -> u32 {
    if size <= min { 0 } else { (size / step).clamp(min, max) }
}

/// Offsets `0..usable`: from a random one of the upper band around it, then so in the lower band.
fn order(usable: u32, band: u32) -> impl Iterator<Item = u32> {
    let band = band.min(usable);
    let around = |from: u32, to: u32| {
        let length = to - from;
        let start = if length == 0 { 0 } else { rand::rng().random_range(0..length) };
        (0..length).map(move |step| from + (start + step) % length)
    };
    around(band, usable).chain(around(0, band))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn check(cidr: &str, expected: Result<(&str, &str, u32, u32), &str>) {
        match (cidr.parse::<Cidr>(), expected) {
            (Ok(cidr), Ok((shown, first, usable, lower))) => {
                assert_eq!(cidr.to_string(), shown);
                assert_eq!(cidr.first().to_string(), first);
                let all: Vec<Ipv4Addr> = cidr.order().collect();
                let different: BTreeSet<_> = all.iter().collect();
                assert_eq!((all.len(), different.len()), (usable as usize, usable as usize), "{shown}");
                assert!(all.iter().all(|address| cidr.contains(*address)), "{shown}");
                // The lower band comes last.
                let tail = &all[all.len() - lower as usize..];
                let lowest = u32::from(cidr.first());
                assert!(tail.iter().all(|address| u32::from(*address) - lowest < lower), "{shown}");
            }
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (got, expected) => panic!("{cidr}: {got:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn networks() {
        check("10.96.0.0/16", Ok(("10.96.0.0/16", "10.96.0.1", 65534, 256)));
        check("10.43.7.9/24", Ok(("10.43.7.0/24", "10.43.7.1", 254, 16)));
        check("10.0.0.0/28", Ok(("10.0.0.0/28", "10.0.0.1", 14, 0)));
        check("10.0.0.0/8", Err("between"));
        check("10.0.0.0", Err("no IPv4 network"));
        check("fd00::/108", Err("no IPv4 network"));
    }

    #[test]
    fn ports() {
        let ports: Ports = "30000-32767".parse().expect("a range");
        assert_eq!(ports.size(), 2768);
        let all: Vec<u16> = ports.order().collect();
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), 2768);
        assert!(all[2768 - 86..].iter().all(|port| *port < 30086));
        assert!("32767-30000".parse::<Ports>().is_err());
        assert!("0-10".parse::<Ports>().is_err());
    }
}
