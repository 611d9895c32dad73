//! The four-tuple of a connection.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::base::siphash::Key;
use crate::wire::bytes::{be16, be32};

/// A connection's four-tuple as seen from here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FlowKey {
    local: [u64; 2],
    remote: [u64; 2],
    /// Local port above, remote port below.
    ports: u32,
    v6: bool,
}

fn halves(a: Ipv6Addr) -> [u64; 2] {
    let b = a.to_bits();
    [(b >> 64) as u64, b as u64]
}

impl FlowKey {
    #[inline]
    pub(crate) fn v4(local: u32, remote: u32, local_port: u16, remote_port: u16) -> Self {
        FlowKey {
            local: [0, u64::from(local)],
            remote: [0, u64::from(remote)],
            ports: u32::from(local_port) << 16 | u32::from(remote_port),
            v6: false,
        }
    }

    #[inline]
    pub(crate) fn v6(local: [u64; 2], remote: [u64; 2], local_port: u16, remote_port: u16) -> Self {
        FlowKey {
            local,
            remote,
            ports: u32::from(local_port) << 16 | u32::from(remote_port),
            v6: true,
        }
    }

    pub(crate) fn new(
        local: IpAddr,
        local_port: u16,
        remote: IpAddr,
        remote_port: u16,
    ) -> Option<Self> {
        match (local, remote) {
            (IpAddr::V4(l), IpAddr::V4(r)) => {
                Some(Self::v4(l.to_bits(), r.to_bits(), local_port, remote_port))
            }
            (IpAddr::V6(l), IpAddr::V6(r)) => {
                Some(Self::v6(halves(l), halves(r), local_port, remote_port))
            }
            _ => None,
        }
    }

    fn addr(&self, a: [u64; 2]) -> IpAddr {
        if self.v6 {
            Ipv6Addr::from_bits(u128::from(a[0]) << 64 | u128::from(a[1])).into()
        } else {
            Ipv4Addr::from_bits(a[1] as u32).into()
        }
    }

    pub(crate) fn local(&self) -> SocketAddr {
        SocketAddr::new(self.addr(self.local), self.local_port())
    }
    pub(crate) fn remote(&self) -> SocketAddr {
        SocketAddr::new(self.addr(self.remote), self.ports as u16)
    }
    pub(crate) fn local_port(&self) -> u16 {
        (self.ports >> 16) as u16
    }
    pub(crate) fn is_v6(&self) -> bool {
        self.v6
    }

    /// Local and remote address, and the ports, as they stand in an IPv4 header of ours.
    #[inline(always)]
    pub(crate) fn is_v4(&self, addresses: u64, ports: u32) -> bool {
        !self.v6 && addresses == self.local[1] << 32 | self.remote[1] && ports == self.ports
    }

    /// Addresses and ports as they stand in the peer's headers: its own first, IPv4 in one word.
    pub(crate) fn in_peer_headers(&self) -> ([u64; 4], u32) {
        let ([a, b], [c, d]) = (self.local, self.remote);
        let addresses = if self.v6 {
            [c, d, a, b]
        } else {
            [d << 32 | b, 0, 0, 0]
        };
        (addresses, self.ports.rotate_left(16))
    }

    /// From 12 bytes (IPv4) or 36 (IPv6).
    #[inline]
    pub(crate) fn read(b: &[u8]) -> Self {
        if b.len() == 12 {
            FlowKey::v4(be32(b, 0), be32(b, 4), be16(b, 8), be16(b, 10))
        } else {
            let half = |at| u64::from(be32(b, at)) << 32 | u64::from(be32(b, at + 4));
            let (local, remote) = ([half(0), half(8)], [half(16), half(24)]);
            FlowKey::v6(local, remote, be16(b, 32), be16(b, 34))
        }
    }

    /// A hash for another purpose, over `extra` too.
    pub(crate) fn hash_with(&self, key: Key, extra: u64) -> u64 {
        let [a, b] = self.local;
        let [c, d] = self.remote;
        key.hash::<2, 4>(&[a, b, c, d, u64::from(self.ports), extra])
    }

    #[inline]
    pub(crate) fn hash<const C: usize, const D: usize>(&self, key: Key) -> u64 {
        if self.v6 {
            let [a, b] = self.local;
            let [c, d] = self.remote;
            key.hash::<C, D>(&[a, b, c, d, u64::from(self.ports)])
        } else {
            key.hash_12_bytes::<C, D>(self.local[1] | self.remote[1] << 32, self.ports)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_keeps_its_addresses() {
        let k = FlowKey::new("fd00::1".parse().unwrap(), 1, "fd00::2".parse().unwrap(), 2).unwrap();
        assert_eq!(k.local(), "[fd00::1]:1".parse().unwrap());
        assert_eq!(k.remote(), "[fd00::2]:2".parse().unwrap());
        assert!(
            FlowKey::new(
                "10.0.0.1".parse().unwrap(),
                1,
                "fd00::2".parse().unwrap(),
                2
            )
            .is_none()
        );
    }
}
