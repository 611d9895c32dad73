//! The four-tuple of a connection.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ahash::RandomState;

use crate::siphash::Key;
use crate::wire::bytes::{read_u16, read_u32};

/// A connection's four-tuple as seen from here. IPv4 addresses are in the second word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowKey {
    local: [u64; 2],
    remote: [u64; 2],
    /// The local port in the upper half, the remote port in the lower.
    ports: u32,
    v6: bool,
}

/// An IPv6 address as two words, the first bytes in the upper.
#[inline]
fn halves(address: Ipv6Addr) -> [u64; 2] {
    let bits = address.to_bits();
    [(bits >> 64) as u64, bits as u64]
}

impl FlowKey {
    /// Returns the key of IPv4 addresses in host order.
    #[inline]
    pub fn v4(local: u32, remote: u32, local_port: u16, remote_port: u16) -> Self {
        FlowKey {
            local: [0, u64::from(local)],
            remote: [0, u64::from(remote)],
            ports: u32::from(local_port) << 16 | u32::from(remote_port),
            v6: false,
        }
    }

    /// Returns the key of IPv6 addresses, each as two words in host order, the first bytes in the first word.
    #[inline]
    pub fn v6(local: [u64; 2], remote: [u64; 2], local_port: u16, remote_port: u16) -> Self {
        FlowKey {
            local,
            remote,
            ports: u32::from(local_port) << 16 | u32::from(remote_port),
            v6: true,
        }
    }

    /// Returns the key of two addresses; `None`: they are of different families.
    pub fn new(local: IpAddr, local_port: u16, remote: IpAddr, remote_port: u16) -> Option<Self> {
        match (local, remote) {
            (IpAddr::V4(local), IpAddr::V4(remote)) => Some(Self::v4(
                local.to_bits(),
                remote.to_bits(),
                local_port,
                remote_port,
            )),
            (IpAddr::V6(local), IpAddr::V6(remote)) => Some(Self::v6(
                halves(local),
                halves(remote),
                local_port,
                remote_port,
            )),
            _ => None,
        }
    }

    fn addr(&self, halves: [u64; 2]) -> IpAddr {
        if self.v6 {
            Ipv6Addr::from_bits(u128::from(halves[0]) << 64 | u128::from(halves[1])).into()
        } else {
            Ipv4Addr::from_bits(halves[1] as u32).into()
        }
    }

    /// Returns our address and port.
    pub fn local(&self) -> SocketAddr {
        SocketAddr::new(self.addr(self.local), self.local_port())
    }

    /// Returns the peer's address and port.
    pub fn remote(&self) -> SocketAddr {
        SocketAddr::new(self.addr(self.remote), self.ports as u16)
    }

    /// Returns our port.
    #[inline]
    pub fn local_port(&self) -> u16 {
        (self.ports >> 16) as u16
    }

    /// Returns whether the addresses are IPv6.
    #[inline]
    pub fn is_v6(&self) -> bool {
        self.v6
    }

    /// Returns whether this is the flow of an IPv4 header that we send, with these addresses (local, then
    /// remote) and ports.
    #[inline(always)]
    pub fn is_v4(&self, addresses: u64, ports: u32) -> bool {
        !self.v6 && addresses == self.local[1] << 32 | self.remote[1] && ports == self.ports
    }

    /// Returns addresses and ports as in headers that the peer sends: the peer's first, both IPv4 addresses
    /// in one word.
    pub fn in_peer_headers(&self) -> ([u64; 4], u32) {
        let ([local_high, local_low], [remote_high, remote_low]) = (self.local, self.remote);
        let addresses = if self.v6 {
            [remote_high, remote_low, local_high, local_low]
        } else {
            [remote_low << 32 | local_low, 0, 0, 0]
        };
        (addresses, self.ports.rotate_left(16))
    }

    /// Reads addresses and ports as in a header that we send: 12 bytes (IPv4) or 36 (IPv6).
    #[inline]
    pub fn read(bytes: &[u8]) -> Self {
        if bytes.len() == 12 {
            FlowKey::v4(
                read_u32(bytes, 0),
                read_u32(bytes, 4),
                read_u16(bytes, 8),
                read_u16(bytes, 10),
            )
        } else {
            let half =
                |at| u64::from(read_u32(bytes, at)) << 32 | u64::from(read_u32(bytes, at + 4));
            let (local, remote) = ([half(0), half(8)], [half(16), half(24)]);
            FlowKey::v6(local, remote, read_u16(bytes, 32), read_u16(bytes, 34))
        }
    }

    /// Computes a hash that includes `extra`, for purposes other than the flow table.
    pub fn hash_with(&self, key: Key, extra: u64) -> u64 {
        let [local_high, local_low] = self.local;
        let [remote_high, remote_low] = self.remote;
        key.hash::<2, 4>(&[
            local_high,
            local_low,
            remote_high,
            remote_low,
            u64::from(self.ports),
            extra,
        ])
    }

    /// Computes a keyed hash that peers may observe.
    #[inline]
    pub fn hash(&self, key: Key) -> u64 {
        if self.v6 {
            let [local_high, local_low] = self.local;
            let [remote_high, remote_low] = self.remote;
            key.hash::<2, 4>(&[
                local_high,
                local_low,
                remote_high,
                remote_low,
                u64::from(self.ports),
            ])
        } else {
            key.hash_twelve_bytes(self.local[1] | self.remote[1] << 32, self.ports)
        }
    }
}

/// The hash of the flow table, with a secret key.
///
/// Why not [SipHash](crate::siphash), as elsewhere: this runs for each received frame, and takes a
/// sixth of the instructions. The hash is never visible outside; all it affects is the search length.
pub struct TableHasher(RandomState);

impl TableHasher {
    /// Returns the hasher with this secret.
    pub fn new(key: &[u8; 16]) -> Self {
        let key = Key::new(key);
        let seed = |number| key.hash::<2, 4>(&[number]);
        TableHasher(RandomState::with_seeds(seed(0), seed(1), seed(2), seed(3)))
    }

    /// Returns the hash of the key, whose low half the flow table uses.
    #[inline]
    pub fn hash(&self, key: &FlowKey) -> u64 {
        if key.v6 {
            self.0.hash_one((key.local, key.remote, key.ports))
        } else {
            let addresses = key.local[1] | key.remote[1] << 32;
            self.0.hash_one((addresses, key.ports))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_returns_its_addresses() {
        let key =
            FlowKey::new("fd00::1".parse().unwrap(), 1, "fd00::2".parse().unwrap(), 2).unwrap();
        assert_eq!(key.local(), "[fd00::1]:1".parse().unwrap());
        assert_eq!(key.remote(), "[fd00::2]:2".parse().unwrap());
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

    #[test]
    fn the_table_hash_depends_on_all_of_the_key_and_on_the_secret() {
        let hasher = TableHasher::new(&[7; 16]);
        let keys = [
            ("10.0.0.1", 1, "10.0.0.2", 2),
            ("10.0.0.2", 1, "10.0.0.1", 2),
            ("10.0.0.1", 2, "10.0.0.2", 1),
            ("10.0.0.3", 1, "10.0.0.2", 2),
            ("fd00::1", 1, "fd00::2", 2),
            ("fd00::2", 1, "fd00::1", 2),
            ("fd00::1", 2, "fd00::2", 1),
            ("fd00:1::1", 1, "fd00::2", 2),
        ];
        let keys = keys.map(|(local, local_port, remote, remote_port)| {
            let (local, remote) = (local.parse().unwrap(), remote.parse().unwrap());
            FlowKey::new(local, local_port, remote, remote_port).unwrap()
        });
        // The table uses the low half.
        let hashes = keys.map(|key| hasher.hash(&key) as u32);
        for (index, hash) in hashes.iter().enumerate() {
            assert!(!hashes[index + 1..].contains(hash), "{:?}", keys[index]);
        }
        let other = TableHasher::new(&[8; 16]);
        assert!(
            keys.iter()
                .all(|key| other.hash(key) as u32 != hasher.hash(key) as u32)
        );
        assert_eq!(
            TableHasher::new(&[7; 16]).hash(&keys[0]),
            hasher.hash(&keys[0])
        );
    }

    /// Ports are chosen one after the other: their hashes occupy as many slots of the table as random
    /// numbers would.
    #[test]
    fn consecutive_ports_spread_over_the_table() {
        let hasher = TableHasher::new(&[9; 16]);
        let mut used = vec![false; 4096];
        for port in 1..=4096 {
            let key = FlowKey::v4(0x0a00_0001, 0x0a00_0002, 7471, port);
            used[hasher.hash(&key) as usize % 4096] = true;
        }
        // The same number of random values fills 1 - 1/e of the slots, 2589, with a deviation of 25.
        let count = used.iter().filter(|used| **used).count();
        assert!((2400..2800).contains(&count), "{count}");
    }
}
