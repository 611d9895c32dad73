//! Values used in messages: text, addresses, private data, locations of queues.

use super::MAX_PRIVATE_DATA;
use bytemuck::{Pod, Zeroable};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// Zero-padded UTF-8.
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct Text<const N: usize>(pub [u8; N])
where
    [u8; N]: Pod;

impl<const N: usize> Text<N> {
    /// Creates a text; longer texts are cut at a character boundary.
    pub fn new(text: &str) -> Self {
        let mut end = text.len().min(N);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let mut bytes = [0; N];
        bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
        Text(bytes)
    }

    /// The text before the first zero; invalid UTF-8 becomes replacement characters.
    pub fn to_text(self) -> String {
        let end = self.0.iter().position(|b| *b == 0).unwrap_or(N);
        String::from_utf8_lossy(&self.0[..end]).into_owned()
    }
}

impl<const N: usize> std::fmt::Debug for Text<N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.to_text())
    }
}

/// An IP address and port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Addr {
    /// 0 (none), 4 or 6.
    pub family: u16,
    /// Host order.
    pub port: u16,
    pub scope_id: u32,
    /// Network order; IPv4 in the first four bytes.
    pub ip: [u8; 16],
}

impl Addr {
    /// No address.
    pub const NONE: Addr = Addr {
        family: 0,
        port: 0,
        scope_id: 0,
        ip: [0; 16],
    };

    /// Converts the address; `None` for family 0 and unknown families.
    pub fn to_socket_addr(self) -> Option<SocketAddr> {
        match self.family {
            4 => {
                let (octets, _) = self.ip.split_first_chunk::<4>()?;
                Some(SocketAddrV4::new(Ipv4Addr::from(*octets), self.port).into())
            }
            6 => {
                let ip = Ipv6Addr::from(self.ip);
                Some(SocketAddrV6::new(ip, self.port, 0, self.scope_id).into())
            }
            _ => None,
        }
    }
}

impl From<SocketAddr> for Addr {
    fn from(address: SocketAddr) -> Addr {
        let mut message = Addr {
            port: address.port(),
            ..Addr::from(address.ip())
        };
        if let SocketAddr::V6(v6) = address {
            message.scope_id = v6.scope_id();
        }
        message
    }
}

impl From<IpAddr> for Addr {
    fn from(address: IpAddr) -> Addr {
        let mut ip = [0; 16];
        let family = match address {
            IpAddr::V4(v4) => {
                ip[..4].copy_from_slice(&v4.octets());
                4
            }
            IpAddr::V6(v6) => {
                ip = v6.octets();
                6
            }
        };
        Addr {
            family,
            port: 0,
            scope_id: 0,
            ip,
        }
    }
}

/// Private data of a connection request or answer.
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PrivateData {
    pub len: u32,
    pub data: [u8; MAX_PRIVATE_DATA],
}

impl PrivateData {
    /// Creates the data; `None` when it is longer than [`MAX_PRIVATE_DATA`].
    pub fn new(data: &[u8]) -> Option<PrivateData> {
        let mut private_data = PrivateData {
            len: data.len() as u32,
            data: [0; MAX_PRIVATE_DATA],
        };
        private_data
            .data
            .get_mut(..data.len())?
            .copy_from_slice(data);
        Some(private_data)
    }

    /// The bytes; a length out of range counts as the maximum.
    pub fn as_bytes(&self) -> &[u8] {
        &self.data[..(self.len as usize).min(MAX_PRIVATE_DATA)]
    }
}

impl std::fmt::Debug for PrivateData {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PrivateData({:02x?})", self.as_bytes())
    }
}

/// Location of queue memory. An fd comes with the reply when `fd` is 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct QueueRef {
    pub region: u32,
    /// 1: the fd of this region is in the reply; the client keeps it mapped.
    pub fd: u16,
    /// 1: the region contains only this queue.
    pub dedicated: u16,
    pub region_len: u64,
    pub offset: u64,
}
