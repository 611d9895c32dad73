//! Messages of the iWARP port mapper (iwpmd of rdma-core, UDP port 3935), built and read field by field.
//!
//! | octets | field |
//! |---|---|
//! | 0 | version (2 bits), kind (2 bits), IP version (4 bits) |
//! | 1 | time |
//! | 2, 3 | request: TCP port that the connecting peer will use |
//! | 4, 5 | port of the accepting peer |
//! | 6, 7 | port of the connecting peer |
//! | 8 to 15 | association handle |
//! | 16 to 31 | address of the connecting peer; IPv4 in the first four octets |
//! | 32 to 47 | address of the accepting peer |
//! | 48 to 63 | request: address that the connecting peer will use |

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use crate::link::{Datagram, Station};

/// UDP port of the mapper.
pub const PORT: u16 = 3935;

/// Kinds of messages.
pub mod kind {
    pub const REQUEST: u8 = 0;
    pub const ACCEPT: u8 = 1;
    pub const ACKNOWLEDGE: u8 = 2;
    pub const REJECT: u8 = 3;
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapperMessage {
    pub version: u8,
    pub kind: u8,
    pub ip_version: u8,
    pub time: u8,
    pub own_port: u16,
    pub accepting_port: u16,
    pub connecting_port: u16,
    pub handle: u64,
    pub connecting: IpAddr,
    pub accepting: IpAddr,
    /// Length of the datagram, for a received one.
    pub length: usize,
}

impl MapperMessage {
    pub fn encode(&self) -> Vec<u8> {
        let first = self.version << 6 | (self.kind & 3) << 4 | self.ip_version & 0xF;
        let mut octets = vec![first, self.time];
        octets.extend(self.own_port.to_be_bytes());
        octets.extend(self.accepting_port.to_be_bytes());
        octets.extend(self.connecting_port.to_be_bytes());
        octets.extend(self.handle.to_be_bytes());
        let mut address = |ip: IpAddr| match ip {
            IpAddr::V4(ip) => {
                octets.extend(ip.octets());
                octets.extend([0; 12]);
            }
            IpAddr::V6(ip) => octets.extend(ip.octets()),
        };
        address(self.connecting);
        address(self.accepting);
        if self.kind == kind::REQUEST {
            address(self.connecting);
        }
        octets
    }

    /// `None` if the datagram is shorter than a message.
    pub fn decode(octets: &[u8]) -> Option<MapperMessage> {
        let head: &[u8; 48] = octets.first_chunk()?;
        let port = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let address = |at: usize| -> Option<IpAddr> {
            let octets: [u8; 16] = head.get(at..at + 16)?.try_into().ok()?;
            let [a, b, c, d, ..] = octets;
            Some(if head[0] & 0xF == 6 {
                Ipv6Addr::from(octets).into()
            } else {
                Ipv4Addr::new(a, b, c, d).into()
            })
        };
        Some(MapperMessage {
            version: head[0] >> 6,
            kind: head[0] >> 4 & 3,
            ip_version: head[0] & 0xF,
            time: head[1],
            own_port: port(2),
            accepting_port: port(4),
            connecting_port: port(6),
            handle: head[8..16].iter().fold(0, |n, o| n << 8 | u64::from(*o)),
            connecting: address(16)?,
            accepting: address(32)?,
            length: octets.len(),
        })
    }

    pub fn describe(&self) -> String {
        let name = match self.kind {
            kind::REQUEST => "Request",
            kind::ACCEPT => "Accept",
            kind::ACKNOWLEDGE => "Acknowledge",
            _ => "Reject",
        };
        let mut text = format!(
            "port mapper {name} handle={:#x} accepting={}:{} connecting={}:{}",
            self.handle, self.accepting, self.accepting_port, self.connecting, self.connecting_port
        );
        if self.version != 0 || self.ip_version != 4 {
            text += &format!(" version={} IP version={}", self.version, self.ip_version);
        }
        text
    }
}

/// Port of the lab that asks the target's mapper.
pub struct MapperPort {
    station: Arc<Station>,
    pub port: u16,
    pub inbox: Receiver<Datagram>,
}

impl MapperPort {
    pub fn open(station: &Arc<Station>) -> MapperPort {
        let port = station.port();
        MapperPort {
            station: station.clone(),
            port,
            inbox: station.receive_datagrams(port),
        }
    }
}

impl Drop for MapperPort {
    fn drop(&mut self) {
        self.station.ignore_datagrams(self.port);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_survives_encoding() {
        let message = MapperMessage {
            version: 0,
            kind: kind::REQUEST,
            ip_version: 4,
            time: 0,
            own_port: 40_000,
            accepting_port: 7471,
            connecting_port: 40_000,
            handle: 0x0102_0304_0506_0708,
            connecting: Ipv4Addr::new(10, 1, 2, 9).into(),
            accepting: Ipv4Addr::new(10, 1, 2, 3).into(),
            length: 64,
        };
        let octets = message.encode();
        assert_eq!(
            octets[..16],
            [
                4, 0, 0x9C, 0x40, 0x1D, 0x2F, 0x9C, 0x40, 1, 2, 3, 4, 5, 6, 7, 8
            ]
        );
        assert_eq!(octets[48..52], [10, 1, 2, 9]);
        assert_eq!(MapperMessage::decode(&octets), Some(message));
        assert_eq!(MapperMessage::decode(&octets[..47]), None);
    }
}
