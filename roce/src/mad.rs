//! Management datagrams (MADs) of the communication management class: the service ID resolution (SIDR) by
//! which rdma_cm finds the queue pair of a datagram service (InfiniBand Architecture Specification 1.4, 12.11
//! and 16.7; the header of rdma_cm: annex A11.3).
//!
//! ```text
//!  header 24 | SIDR_REQ: request id 4 | P_Key 2 | 2 | service id 8 | private data 216
//!            | SIDR_REP: request id 4 | status 1 | 1 | 2 | QPN 3 | 1 | service id 8 | Q_Key 4 | 72 | private data 136
//! ```
//! MADs are sent between queue pairs number 1, whose Q_Key is well known.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Bytes of a MAD.
pub const MAD_LEN: usize = 256;
/// Number of the queue pair for MADs.
pub const MAD_QPN: u32 = 1;
/// Its Q_Key.
pub const MAD_QKEY: u32 = 0x8001_0000;
/// Private data of a program in a request: what the header of rdma_cm leaves.
pub const SIDR_REQUEST_DATA_MAX: usize = REQUEST_DATA - CMA_HEADER;
/// Private data in a reply.
pub const SIDR_REPLY_DATA_MAX: usize = 136;
/// Port space of datagram services (`RDMA_PS_UDP`), above the port in a service id.
const PORT_SPACE_UDP: u64 = 0x0111;

const BASE_VERSION: u8 = 1;
const CLASS_CM: u8 = 0x07;
const CLASS_VERSION: u8 = 2;
const METHOD_SEND: u8 = 0x03;
const SIDR_REQ: u16 = 0x0017;
const SIDR_REP: u16 = 0x0018;
const REQUEST_DATA: usize = 216;
/// Offset of private data, which is at the end.
const REQUEST_DATA_AT: usize = MAD_LEN - REQUEST_DATA;
const REPLY_DATA_AT: usize = MAD_LEN - SIDR_REPLY_DATA_MAX;
/// Bytes of the header of rdma_cm before the private data of a request, and its version.
const CMA_HEADER: usize = 36;
const CMA_VERSION: u8 = 0;

/// Outcome of a SIDR request (table 140).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SidrStatus(pub u8);

impl SidrStatus {
    /// The reply has a queue pair.
    pub const SUCCESS: SidrStatus = SidrStatus(0);
    /// Nothing serves this service id.
    pub const UNSUPPORTED: SidrStatus = SidrStatus(1);
    /// The service refused.
    pub const REJECTED: SidrStatus = SidrStatus(2);
}

/// Reason why bytes are no message of SIDR.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MadError {
    /// A MAD has 256 bytes.
    #[error("a MAD has {MAD_LEN} bytes, not {0}")]
    Length(usize),
    /// Another version, class, method or attribute.
    #[error(
        "class {class:#04x}, method {method:#04x}, attribute {attribute:#06x}: only SIDR is served"
    )]
    Unsupported {
        /// Management class.
        class: u8,
        /// Method.
        method: u8,
        /// Attribute.
        attribute: u16,
    },
}

/// SIDR_REQ of rdma_cm: asks for the queue pair of a datagram service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SidrRequest {
    /// Transaction of the MAD, repeated in the reply.
    pub transaction: u64,
    /// Chosen by the requester, repeated in the reply.
    pub request_id: u32,
    /// Partition key.
    pub pkey: u16,
    /// Port of the service.
    pub port: u16,
    /// Address and port of the requester, as rdma_cm names them.
    pub from: (IpAddr, u16),
    /// Address of the service, as rdma_cm names it.
    pub to: IpAddr,
    /// Private data of the program.
    pub private_data: [u8; SIDR_REQUEST_DATA_MAX],
}

/// SIDR_REP: the queue pair of a datagram service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SidrReply {
    /// As in the request.
    pub transaction: u64,
    /// As in the request.
    pub request_id: u32,
    /// Outcome.
    pub status: SidrStatus,
    /// Queue pair, 24 bits.
    pub qpn: u32,
    /// As in the request.
    pub service_id: u64,
    /// Q_Key of the queue pair.
    pub qkey: u32,
    /// Private data of the program.
    pub private_data: [u8; SIDR_REPLY_DATA_MAX],
}

/// A message of SIDR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SidrMessage {
    /// Asks for a queue pair.
    Request(SidrRequest),
    /// Asks for something other than a datagram service of rdma_cm: the answer to it.
    Unserved(SidrReply),
    /// The answer.
    Reply(SidrReply),
}

impl SidrRequest {
    /// The answer without a queue pair.
    pub fn refusal(&self, status: SidrStatus) -> SidrReply {
        SidrReply {
            transaction: self.transaction,
            request_id: self.request_id,
            status,
            qpn: 0,
            service_id: service_id(self.port),
            qkey: 0,
            private_data: [0; SIDR_REPLY_DATA_MAX],
        }
    }

    /// The MAD.
    pub fn build(&self) -> [u8; MAD_LEN] {
        let mut mad = header(SIDR_REQ, self.transaction);
        mad[24..28].copy_from_slice(&self.request_id.to_be_bytes());
        mad[28..30].copy_from_slice(&self.pkey.to_be_bytes());
        mad[32..40].copy_from_slice(&service_id(self.port).to_be_bytes());
        let data = &mut mad[REQUEST_DATA_AT..];
        let (from, port) = self.from;
        data[1] = if from.is_ipv4() { 4 } else { 6 } << 4;
        data[2..4].copy_from_slice(&port.to_be_bytes());
        data[4..20].copy_from_slice(&to_cma_address(from));
        data[20..36].copy_from_slice(&to_cma_address(self.to));
        data[CMA_HEADER..].copy_from_slice(&self.private_data);
        mad
    }

    /// The request, if it is one of rdma_cm for a datagram service.
    fn parse(mad: &[u8; MAD_LEN]) -> Option<SidrRequest> {
        let service_id = u64::from_be_bytes(read(mad, 32));
        let data = &mad[REQUEST_DATA_AT..];
        if service_id >> 16 != PORT_SPACE_UDP || data[0] != CMA_VERSION {
            return None;
        }
        let address = |at| of_cma_address(data[1] >> 4, read(data, at));
        let (from, to) = (address(4)?, address(20)?);
        let mut private_data = [0; SIDR_REQUEST_DATA_MAX];
        private_data.copy_from_slice(&data[CMA_HEADER..]);
        Some(SidrRequest {
            transaction: u64::from_be_bytes(read(mad, 8)),
            request_id: u32::from_be_bytes(read(mad, 24)),
            pkey: u16::from_be_bytes(read(mad, 28)),
            port: service_id as u16,
            from: (from, u16::from_be_bytes(read(data, 2))),
            to,
            private_data,
        })
    }
}

impl SidrReply {
    /// The MAD.
    pub fn build(&self) -> [u8; MAD_LEN] {
        let mut mad = header(SIDR_REP, self.transaction);
        mad[24..28].copy_from_slice(&self.request_id.to_be_bytes());
        mad[28] = self.status.0;
        mad[32..36].copy_from_slice(&(self.qpn << 8).to_be_bytes());
        mad[36..44].copy_from_slice(&self.service_id.to_be_bytes());
        mad[44..48].copy_from_slice(&self.qkey.to_be_bytes());
        mad[REPLY_DATA_AT..].copy_from_slice(&self.private_data);
        mad
    }

    fn parse(mad: &[u8; MAD_LEN]) -> SidrReply {
        let mut private_data = [0; SIDR_REPLY_DATA_MAX];
        private_data.copy_from_slice(&mad[REPLY_DATA_AT..]);
        SidrReply {
            transaction: u64::from_be_bytes(read(mad, 8)),
            request_id: u32::from_be_bytes(read(mad, 24)),
            status: SidrStatus(mad[28]),
            qpn: u32::from_be_bytes(read(mad, 32)) >> 8,
            service_id: u64::from_be_bytes(read(mad, 36)),
            qkey: u32::from_be_bytes(read(mad, 44)),
            private_data,
        }
    }

    /// The answer to a request for an unknown service.
    fn to_unserved(mad: &[u8; MAD_LEN]) -> SidrReply {
        SidrReply {
            transaction: u64::from_be_bytes(read(mad, 8)),
            request_id: u32::from_be_bytes(read(mad, 24)),
            status: SidrStatus::UNSUPPORTED,
            qpn: 0,
            service_id: u64::from_be_bytes(read(mad, 32)),
            qkey: 0,
            private_data: [0; SIDR_REPLY_DATA_MAX],
        }
    }
}

impl SidrMessage {
    /// Parses the payload of a datagram to queue pair 1.
    ///
    /// # Errors
    /// It is another MAD, or none.
    pub fn parse(payload: &[u8]) -> Result<SidrMessage, MadError> {
        let mad: &[u8; MAD_LEN] = payload
            .try_into()
            .map_err(|_| MadError::Length(payload.len()))?;
        let attribute = u16::from_be_bytes(read(mad, 16));
        match (&mad[..4], attribute) {
            ([BASE_VERSION, CLASS_CM, CLASS_VERSION, METHOD_SEND], SIDR_REQ) => {
                let unserved = || SidrMessage::Unserved(SidrReply::to_unserved(mad));
                Ok(SidrRequest::parse(mad).map_or_else(unserved, SidrMessage::Request))
            }
            ([BASE_VERSION, CLASS_CM, CLASS_VERSION, METHOD_SEND], SIDR_REP) => {
                Ok(SidrMessage::Reply(SidrReply::parse(mad)))
            }
            _ => Err(MadError::Unsupported {
                class: mad[1],
                method: mad[3],
                attribute,
            }),
        }
    }
}

fn header(attribute: u16, transaction: u64) -> [u8; MAD_LEN] {
    let mut mad = [0; MAD_LEN];
    mad[..4].copy_from_slice(&[BASE_VERSION, CLASS_CM, CLASS_VERSION, METHOD_SEND]);
    mad[8..16].copy_from_slice(&transaction.to_be_bytes());
    mad[16..18].copy_from_slice(&attribute.to_be_bytes());
    mad
}

fn service_id(port: u16) -> u64 {
    PORT_SPACE_UDP << 16 | u64::from(port)
}

/// An address in the header of rdma_cm: IPv4 in the last four bytes.
fn to_cma_address(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => {
            let mut octets = [0; 16];
            octets[12..].copy_from_slice(&ip.octets());
            octets
        }
        IpAddr::V6(ip) => ip.octets(),
    }
}

fn of_cma_address(version: u8, octets: [u8; 16]) -> Option<IpAddr> {
    match version {
        4 => Some(Ipv4Addr::from(read(&octets, 12)).into()),
        6 => Some(Ipv6Addr::from(octets).into()),
        _ => None,
    }
}

/// Copies `N` bytes, which are within the fixed lengths of this file.
fn read<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request() -> SidrRequest {
        let mut private_data = [0; SIDR_REQUEST_DATA_MAX];
        private_data[..5].copy_from_slice(b"hello");
        SidrRequest {
            transaction: 0x0102_0304_0506_0708,
            request_id: 0x1122_3344,
            pkey: 0xffff,
            port: 7174,
            from: ([10, 77, 0, 1].into(), 0x8000),
            to: [10, 77, 0, 2].into(),
            private_data,
        }
    }

    #[test]
    fn a_request_has_the_layout_of_the_specification_and_of_rdma_cm() {
        let mad = request().build();
        assert_eq!(mad[..8], [1, 7, 2, 3, 0, 0, 0, 0]);
        assert_eq!(mad[8..16], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(mad[16..24], [0, 0x17, 0, 0, 0, 0, 0, 0]);
        assert_eq!(mad[24..32], [0x11, 0x22, 0x33, 0x44, 0xff, 0xff, 0, 0]);
        assert_eq!(mad[32..40], [0, 0, 0, 0, 0x01, 0x11, 0x1c, 0x06]);
        assert_eq!(mad[40..44], [0, 0x40, 0x80, 0]);
        assert_eq!(mad[56..60], [10, 77, 0, 1]);
        assert_eq!(mad[72..81], *b"\x0a\x4d\x00\x02hello");
        assert_eq!(
            SidrMessage::parse(&mad),
            Ok(SidrMessage::Request(request()))
        );
    }

    #[test]
    fn a_reply_has_the_layout_of_the_specification() {
        let reply = SidrReply {
            status: SidrStatus::SUCCESS,
            qpn: 0x12_3456,
            qkey: 0x0123_4567,
            private_data: [7; SIDR_REPLY_DATA_MAX],
            ..request().refusal(SidrStatus::SUCCESS)
        };
        let mad = reply.build();
        assert_eq!(mad[16..18], [0, 0x18]);
        assert_eq!(
            mad[24..36],
            [0x11, 0x22, 0x33, 0x44, 0, 0, 0, 0, 0x12, 0x34, 0x56, 0]
        );
        assert_eq!(
            mad[36..48],
            [0, 0, 0, 0, 1, 0x11, 0x1c, 6, 1, 0x23, 0x45, 0x67]
        );
        assert!(mad[48..120].iter().all(|byte| *byte == 0));
        assert!(mad[120..].iter().all(|byte| *byte == 7));
        assert_eq!(SidrMessage::parse(&mad), Ok(SidrMessage::Reply(reply)));
    }

    #[test]
    fn addresses_of_ipv6_fill_their_fields() {
        let request = SidrRequest {
            from: (IpAddr::from([0xfd77, 0, 0, 0, 0, 0, 0, 1]), 9),
            to: IpAddr::from([0xfd77, 0, 0, 0, 0, 0, 0, 2]),
            ..request()
        };
        let mad = request.build();
        assert_eq!(mad[41], 0x60);
        assert_eq!(SidrMessage::parse(&mad), Ok(SidrMessage::Request(request)));
    }

    #[test]
    fn other_mads_are_refused_with_their_reason() {
        let mad = request().build();
        assert_eq!(SidrMessage::parse(&mad[..255]), Err(MadError::Length(255)));
        let changed = |at: usize, to: u8| {
            let mut mad = mad;
            mad[at] = to;
            SidrMessage::parse(&mad).unwrap_err()
        };
        // Version, class, method, attribute.
        for (at, to) in [(0, 2), (1, 3), (2, 1), (3, 1), (17, 0x10)] {
            assert!(
                matches!(changed(at, to), MadError::Unsupported { .. }),
                "{at}"
            );
        }
    }

    #[test]
    fn requests_for_other_services_have_their_answer() {
        let request = request();
        // Port space, version of the header of rdma_cm, version of IP.
        for (at, to) in [(37, 6), (40, 1), (41, 0x50)] {
            let mut mad = request.build();
            mad[at] = to;
            let Ok(SidrMessage::Unserved(reply)) = SidrMessage::parse(&mad) else {
                panic!("{at}");
            };
            let service_id = u64::from_be_bytes(read(&mad, 32));
            let expected = request.refusal(SidrStatus::UNSUPPORTED);
            assert_eq!(
                reply,
                SidrReply {
                    service_id,
                    ..expected
                }
            );
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_refused(mut mad in proptest::collection::vec(any::<u8>(), 256), reply: bool) {
            let _ = SidrMessage::parse(&mad);
            mad[..4].copy_from_slice(&[1, 7, 2, 3]);
            mad[16..18].copy_from_slice(&[0, if reply { 0x18 } else { 0x17 }]);
            let at = if reply { 36 } else { 32 };
            mad[at..at + 6].copy_from_slice(&[0, 0, 0, 0, 1, 0x11]);
            if let Ok(message) = SidrMessage::parse(&mad) {
                let built = match message {
                    SidrMessage::Request(request) => request.build(),
                    SidrMessage::Unserved(_) => return Ok(()),
                    SidrMessage::Reply(reply) => reply.build(),
                };
                prop_assert_eq!(SidrMessage::parse(&built), Ok(message));
            }
        }
    }
}
