//! Values written as text in the configuration. Each parse error shows an example of the format.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize, Serializer};

/// Reads and writes a value as text. The pattern is for editors; `FromStr` decides.
macro_rules! from_text {
    ($t:ty, $pattern:literal) => {
        impl JsonSchema for $t {
            fn schema_name() -> Cow<'static, str> {
                stringify!($t).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": "string", "pattern": $pattern })
            }
        }

        impl<'de> Deserialize<'de> for $t {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                let s = String::deserialize(d)?;
                s.parse().map_err(de::Error::custom)
            }
        }

        impl Serialize for $t {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.collect_str(self)
            }
        }
    };
}

/// Displays names as they are.
macro_rules! display_text {
    ($($t:ty),*) => {
        $(impl fmt::Display for $t {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        })*
    };
}
display_text!(DeviceName, PciAddress, InterfaceName);

/// Text that is not a value of its kind: the text, and an example of the format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// Not a [`DeviceName`].
    #[error("device name {0:?}: use 1 to 63 letters, digits, '_' or '-', for example \"siw0\"")]
    DeviceName(String),
    /// Not a [`PciAddress`].
    #[error("PCI address {0:?}: write domain:bus:device.function, for example \"0000:03:00.0\"")]
    PciAddress(String),
    /// Not an [`InterfaceName`].
    #[error("interface {0:?}: write a name as ip link shows it, for example \"eth0\"")]
    InterfaceName(String),
    /// Not a [`MacAddress`].
    #[error(
        "Ethernet address {0:?}: write six hex octets of a unicast address, for example \"02:00:00:00:00:01\""
    )]
    MacAddress(String),
    /// Not a [`Cidr`], with the reason.
    #[error(
        "address {0:?}: {1}; write address/prefix, for example \"10.77.0.1/24\" or \"fd77::1/64\""
    )]
    Cidr(String, &'static str),
    /// Not a [`PortRange`].
    #[error("ports {0:?}: write the first and the last of 1 to 65535, for example \"61000-65535\"")]
    PortRange(String),
    /// Not a [`ByteSize`].
    #[error(
        "size {0:?}: write bytes, or a number with KiB, MiB, GiB or TiB, for example \"64MiB\""
    )]
    ByteSize(String),
    /// Not a [`FileMode`].
    #[error("mode {0:?}: write octal permission bits, for example \"0660\"")]
    FileMode(String),
}

/// A verbs device name: 1 to 63 letters, digits, `_` or `-`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DeviceName(pub String);
from_text!(DeviceName, "^[A-Za-z0-9_-]{1,63}$");

impl FromStr for DeviceName {
    type Err = ValueError;
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let plain = text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-');
        if text.is_empty() || text.len() > 63 || !plain {
            return Err(ValueError::DeviceName(text.to_owned()));
        }
        Ok(DeviceName(text.to_owned()))
    }
}

/// A PCI address, including the domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PciAddress(pub String);
from_text!(
    PciAddress,
    r"^([0-9A-Fa-f]{4}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]$"
);

impl FromStr for PciAddress {
    type Err = ValueError;
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let shape = |address: &str| -> Option<()> {
            let (head, func) = address.rsplit_once('.')?;
            let mut parts = head.rsplit(':');
            let (dev, bus) = (parts.next()?, parts.next()?);
            let domain = parts.next().unwrap_or("0000");
            let hex = |part: &str, digits: usize| {
                part.len() == digits && part.bytes().all(|byte| byte.is_ascii_hexdigit())
            };
            (parts.next().is_none() && hex(domain, 4) && hex(bus, 2) && hex(dev, 2) && hex(func, 1))
                .then_some(())
        };
        match shape(text) {
            Some(()) => Ok(PciAddress(text.to_owned())),
            None => Err(ValueError::PciAddress(text.to_owned())),
        }
    }
}

/// Name of a network interface: 1 to 15 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceName(pub String);
from_text!(InterfaceName, r"^[^/:\s]{1,15}$");

impl FromStr for InterfaceName {
    type Err = ValueError;
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let has_bad_byte = text
            .bytes()
            .any(|byte| byte == b'/' || byte == b':' || byte <= b' ' || byte == 0x7f);
        if text.is_empty() || text.len() > 15 || has_bad_byte {
            return Err(ValueError::InterfaceName(text.to_owned()));
        }
        Ok(InterfaceName(text.to_owned()))
    }
}

/// A unicast Ethernet address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MacAddress(pub [u8; 6]);
from_text!(MacAddress, "^[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}$");

impl FromStr for MacAddress {
    type Err = ValueError;
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let bad = || ValueError::MacAddress(text.to_owned());
        let mut mac = [0u8; 6];
        let mut parts = text.split(':');
        for octet in &mut mac {
            let part = parts
                .next()
                .filter(|part| part.len() == 2)
                .ok_or_else(bad)?;
            *octet = u8::from_str_radix(part, 16).map_err(|_| bad())?;
        }
        if parts.next().is_some() || mac[0] & 1 != 0 || mac == [0; 6] {
            return Err(bad());
        }
        Ok(MacAddress(mac))
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let octets = self.0;
        write!(
            f,
            "{:02x}:{:02x}:{:02x}:{:02x}:{:02x}:{:02x}",
            octets[0], octets[1], octets[2], octets[3], octets[4], octets[5]
        )
    }
}

/// An IP address with its prefix length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cidr {
    /// The device's own address.
    pub addr: IpAddr,
    /// Bits of the network part.
    pub prefix: u8,
}
from_text!(Cidr, "^[0-9A-Fa-f:.]+/[0-9]+$");

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.addr, self.prefix)
    }
}

impl FromStr for Cidr {
    type Err = ValueError;
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let bad = |why| ValueError::Cidr(text.to_owned(), why);
        let (addr, prefix) = text
            .split_once('/')
            .ok_or_else(|| bad("the prefix length is missing"))?;
        let addr: IpAddr = addr.parse().map_err(|_| bad("not an IP address"))?;
        let max = if addr.is_ipv4() { 32 } else { 128 };
        let prefix: u8 = prefix
            .parse()
            .ok()
            .filter(|prefix| *prefix >= 1 && *prefix <= max)
            .ok_or_else(|| bad("the prefix length is out of range"))?;
        if addr.is_unspecified() || addr.is_multicast() || addr.is_loopback() {
            return Err(bad("a device needs a unicast address of its own"));
        }
        Ok(Cidr { addr, prefix })
    }
}

/// Inclusive range of TCP ports: "61000-65535".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortRange(pub RangeInclusive<u16>);
from_text!(PortRange, "^ *[0-9]+ *- *[0-9]+ *$");

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.0.start(), self.0.end())
    }
}

impl PortRange {
    /// Ports above Linux's ephemeral range (`net.ipv4.ip_local_port_range`).
    pub const BEYOND_LINUX: PortRange = PortRange(61_000..=65_535);
}

impl FromStr for PortRange {
    type Err = ValueError;
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let ports = text.split_once('-').and_then(|(first, last)| {
            let first: u16 = first.trim().parse().ok()?;
            let last: u16 = last.trim().parse().ok()?;
            (first > 0 && first <= last).then_some(first..=last)
        });
        ports
            .map(PortRange)
            .ok_or_else(|| ValueError::PortRange(text.to_owned()))
    }
}

/// A count of bytes: 4096, "64KiB", "1 GiB".
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ByteSize(pub u64);

impl JsonSchema for ByteSize {
    fn schema_name() -> Cow<'static, str> {
        "ByteSize".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": ["integer", "string"],
            "minimum": 0,
            "pattern": "^[0-9]+ *(B|KiB|MiB|GiB|TiB)?$",
        })
    }
}

impl FromStr for ByteSize {
    type Err = ValueError;
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let bad = || ValueError::ByteSize(text.to_owned());
        let digits = text
            .find(|character: char| !character.is_ascii_digit())
            .unwrap_or(text.len());
        let number: u64 = text[..digits].parse().map_err(|_| bad())?;
        let shift = match text[digits..].trim() {
            "" | "B" => 0,
            "KiB" => 10,
            "MiB" => 20,
            "GiB" => 30,
            "TiB" => 40,
            _ => return Err(bad()),
        };
        number
            .checked_shl(shift)
            .filter(|bytes| bytes >> shift == number)
            .map(ByteSize)
            .ok_or_else(bad)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct V;
        impl de::Visitor<'_> for V {
            type Value = ByteSize;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes or text such as \"64MiB\"")
            }
            fn visit_i64<E: de::Error>(self, value: i64) -> Result<ByteSize, E> {
                u64::try_from(value)
                    .map(ByteSize)
                    .map_err(|_| E::custom("a size cannot be negative"))
            }
            fn visit_u64<E: de::Error>(self, value: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(value))
            }
            fn visit_str<E: de::Error>(self, value: &str) -> Result<ByteSize, E> {
                value.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(V)
    }
}

/// Permission bits as octal text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileMode(pub u32);
from_text!(FileMode, "^[0-7]+$");

impl fmt::Display for FileMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl FromStr for FileMode {
    type Err = ValueError;
    fn from_str(text: &str) -> Result<Self, ValueError> {
        u32::from_str_radix(text, 8)
            .ok()
            .filter(|mode| *mode <= 0o777)
            .map(FileMode)
            .ok_or_else(|| ValueError::FileMode(text.to_owned()))
    }
}
