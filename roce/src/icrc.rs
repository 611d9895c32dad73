//! The invariant CRC: CRC-32 of Ethernet over the packet, with the fields that routers change replaced by
//! ones (InfiniBand Architecture Specification 1.4, 7.8.1; annex A17.3.3).

use crate::header::BTH_LEN;
use crc32fast::Hasher;

/// Bytes of the ICRC.
pub const ICRC_LEN: usize = 4;

const UDP_LEN: usize = 8;
const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;
/// CRC-32 of eight bytes of ones, which stand for the local route header.
const OF_ROUTE_HEADER: u32 = 0x2144_df1c;

/// An ICRC under computation.
pub struct Icrc(Hasher);

impl Icrc {
    /// Begins with the packet up to the BTH: `ip` is the IP header without options, `udp` follows, and
    /// `transport` begins with the BTH, whose first 12 bytes are taken. `None`: one of them is too short.
    pub fn new(ip: &[u8], udp: &[u8], transport: &[u8]) -> Option<Icrc> {
        let mut bytes = [0; IPV6_LEN + UDP_LEN + BTH_LEN];
        let len = ip.len();
        let masked = bytes.get_mut(..len + UDP_LEN + BTH_LEN)?;
        masked[..len].copy_from_slice(ip);
        masked[len..][..UDP_LEN].copy_from_slice(udp.get(..UDP_LEN)?);
        masked[len + UDP_LEN..].copy_from_slice(transport.get(..BTH_LEN)?);
        match len {
            IPV4_LEN => {
                // Type of service, time to live, header checksum.
                for at in [1, 8, 10, 11] {
                    masked[at] = 0xff;
                }
            }
            IPV6_LEN => {
                // Traffic class, flow label, hop limit.
                masked[0] |= 0x0f;
                for at in [1, 2, 3, 7] {
                    masked[at] = 0xff;
                }
            }
            _ => return None,
        }
        // The checksum of UDP, and the byte of the BTH with the congestion bits.
        for at in [len + 6, len + 7, len + UDP_LEN + 4] {
            masked[at] = 0xff;
        }
        let mut hasher = Hasher::new_with_initial(OF_ROUTE_HEADER);
        hasher.update(masked);
        Some(Icrc(hasher))
    }

    /// Adds bytes that follow.
    #[inline]
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The ICRC as it is sent.
    #[inline]
    pub fn finish(self) -> [u8; ICRC_LEN] {
        self.0.finalize().to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_route_header_is_eight_bytes_of_ones() {
        assert_eq!(crc32fast::hash(&[0xff; 8]), OF_ROUTE_HEADER);
    }

    /// A congestion notification packet as a ConnectX-4 Lx sends it.
    #[test]
    fn the_icrc_is_that_of_hardware() {
        let ip = [
            0x45, 0xc2, 0, 0x3c, 0x71, 0x8c, 0x40, 0, 0x40, 0x11, 0x91, 0x61, 10, 0, 17, 1, 10, 0,
            18, 1,
        ];
        let udp = [0, 0, 0x12, 0xb7, 0, 0x28, 0, 0];
        let mut transport = [0; 28];
        transport[..8].copy_from_slice(&[0x81, 0, 0xff, 0xff, 0x40, 0, 1, 0x18]);
        let mut icrc = Icrc::new(&ip, &udp, &transport).unwrap();
        icrc.update(&transport[12..]);
        assert_eq!(icrc.finish(), [0x82, 0xfd, 0, 0x2a]);
    }

    #[test]
    fn fields_that_routers_change_do_not_matter() {
        let of = |ip: &[u8], udp: &[u8]| Icrc::new(ip, udp, &[0; 12]).unwrap().finish();
        let (ip, udp) = ([0x60; 40], [1; 8]);
        let mut changed = ip;
        (changed[0], changed[7]) = (0x6a, 3);
        changed[1..4].copy_from_slice(&[7; 3]);
        assert_eq!(of(&ip, &udp), of(&changed, &[1, 1, 1, 1, 1, 1, 9, 9]));
        changed[20] = 0;
        assert_ne!(of(&ip, &udp), of(&changed, &udp));
        assert!(Icrc::new(&[0; 24], &udp, &[0; 12]).is_none());
        assert!(Icrc::new(&ip, &udp, &[0; 11]).is_none());
    }
}
