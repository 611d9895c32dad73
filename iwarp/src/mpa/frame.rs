//! The MPA request and reply frames (RFC 5044 section 7.1.1) and the enhanced data in front of the
//! private data (RFC 6581 sections 6 and 9; PROTOCOL.md section 2.1).

use super::{MpaError, RtrKinds};
use crate::stream::RxStream;
use serde::{Deserialize, Serialize};

/// Octets of key, flags, revision, PD_Length.
pub const MPA_HEADER_LEN: usize = 20;
/// Longest private data in octets (RFC 5044 section 7.1.1), enhanced data included.
pub const MAX_PRIVATE_DATA: usize = 512;

/// Octets of the key that a frame begins with.
const KEY_LEN: usize = 16;
const REQUEST_KEY: &[u8; KEY_LEN] = b"MPA ID Req Frame";
const REPLY_KEY: &[u8; KEY_LEN] = b"MPA ID Rep Frame";
/// The sender of the frame wants to receive markers.
const M_FLAG: u8 = 0x80;
/// The sender of the frame wants CRCs.
const C_FLAG: u8 = 0x40;
/// The connection is rejected.
const R_FLAG: u8 = 0x20;
/// The private data starts with enhanced data (RFC 6581 section 6).
const S_FLAG: u8 = 0x10;
/// The reserved bits. A peer that sets bits other than siwd's is not siwd, and its bits are ignored.
const RESERVED_MASK: u8 = 0x0f;
/// In a request: the initiator joins Immediate Data with the following Send (PROTOCOL.md section
/// 8.8).
const JOIN_REQUEST_FLAG: u8 = 0x08;
/// In a reply: the responder joins them too, so both sides do from now on. The bit differs from the
/// one in the request, because some peers echo the reserved bits of a request.
const JOIN_REPLY_FLAG: u8 = 0x04;
/// The highest supported revision.
const MAX_REVISION: u8 = 2;
/// Octets of the enhanced data.
const ENHANCED_LEN: usize = 4;
/// The 14 bits of IRD or ORD in its 16-bit word.
const DEPTH_MASK: u16 = 0x3fff;
/// The largest depth; the next one means "not negotiated".
const DEPTH_MAX: u16 = DEPTH_MASK - 1;
/// A flag in the word of IRD, C flag in the word of ORD.
const HIGH_FLAG: u16 = 0x8000;
/// B flag in the word of IRD, D flag in the word of ORD.
const LOW_FLAG: u16 = 0x4000;

/// Kind of MPA frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum MpaFrameKind {
    /// From the initiator.
    Request,
    /// From the responder.
    Reply,
}

/// IRD, ORD and the ready-to-receive kinds (RFC 6581 section 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct EnhancedData {
    /// A flag: the connection starts with a ready-to-receive message.
    pub peer_to_peer: bool,
    /// B, C, D flags.
    pub rtr: RtrKinds,
    /// Inbound Reads that the sender of the frame can hold, 14 bits.
    pub ird: u16,
    /// Outbound Reads that the sender of the frame issues, 14 bits.
    pub ord: u16,
}

impl EnhancedData {
    fn parse(octets: [u8; ENHANCED_LEN]) -> Self {
        let ird = u16::from_be_bytes([octets[0], octets[1]]);
        let ord = u16::from_be_bytes([octets[2], octets[3]]);
        Self {
            peer_to_peer: ird & HIGH_FLAG != 0,
            rtr: RtrKinds {
                send: ird & LOW_FLAG != 0,
                write: ord & HIGH_FLAG != 0,
                read: ord & LOW_FLAG != 0,
            },
            ird: ird & DEPTH_MASK,
            ord: ord & DEPTH_MASK,
        }
    }

    fn to_bytes(self) -> [u8; ENHANCED_LEN] {
        let flag = |is_set, bit| if is_set { bit } else { 0 };
        let ird = self.ird & DEPTH_MASK
            | flag(self.peer_to_peer, HIGH_FLAG)
            | flag(self.rtr.send, LOW_FLAG);
        let ord =
            self.ord & DEPTH_MASK | flag(self.rtr.write, HIGH_FLAG) | flag(self.rtr.read, LOW_FLAG);
        let (ird, ord) = (ird.to_be_bytes(), ord.to_be_bytes());
        [ird[0], ird[1], ord[0], ord[1]]
    }
}

/// IRD and ORD in front of the private data of a frame of revision 1, as Windows sends them ([MS-SMBD]
/// section 6.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PrivateDepths {
    /// Inbound Reads that the sender of the frame can hold.
    pub(super) ird: u16,
    /// Outbound Reads that the sender of the frame issues.
    pub(super) ord: u16,
}

impl PrivateDepths {
    /// Octets of the two words.
    const LEN: usize = 8;

    /// Takes the depths from the start of private data. Depths beyond those of revision 2 are reduced to
    /// them.
    pub(super) fn take_from(private_data: &mut Vec<u8>) -> Result<Self, MpaError> {
        let octets: [u8; Self::LEN] = *private_data.first_chunk().ok_or(MpaError::DepthsMissing)?;
        let [ird, ord] = [0, 4].map(|at| {
            let word = [octets[at], octets[at + 1], octets[at + 2], octets[at + 3]];
            u32::from_be_bytes(word).min(u32::from(DEPTH_MAX)) as u16
        });
        if ird == 0 || ord == 0 {
            return Err(MpaError::DepthsMissing);
        }
        private_data.drain(..Self::LEN);
        Ok(Self { ird, ord })
    }

    /// Puts the depths, at least 1, in front of private data.
    pub(super) fn prepend_to(self, private_data: &[u8]) -> Vec<u8> {
        let mut octets = Vec::with_capacity(Self::LEN + private_data.len());
        for depth in [self.ird, self.ord] {
            octets.extend_from_slice(&u32::from(depth.max(1)).to_be_bytes());
        }
        octets.extend_from_slice(private_data);
        octets
    }
}

/// A request or reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MpaFrame {
    /// Request or reply.
    pub kind: MpaFrameKind,
    /// M flag: the sender of the frame wants to receive markers.
    pub markers: bool,
    /// C flag: the sender of the frame wants CRCs.
    pub crc: bool,
    /// R flag; meaningful only in a reply.
    pub reject: bool,
    /// One of siwd's two bits of revision 2: Immediate Data and the following Send may be joined.
    pub joins_immediate: bool,
    /// Revision.
    pub revision: u8,
    /// S flag and its data.
    pub enhanced: Option<EnhancedData>,
    /// Private data of the consumer.
    pub private_data: Vec<u8>,
}

impl MpaFrame {
    /// Encodes the frame. It must be sent in one TCP segment: hardware does not reassemble it.
    pub fn encode(&self) -> Result<Box<[u8]>, MpaError> {
        let enhanced_len = self.enhanced.map_or(0, |_| ENHANCED_LEN);
        let pd_len = enhanced_len + self.private_data.len();
        if pd_len > MAX_PRIVATE_DATA {
            return Err(MpaError::OwnPrivateDataTooLong(self.private_data.len()));
        }
        let mut octets = Vec::with_capacity(MPA_HEADER_LEN + pd_len);
        octets.extend_from_slice(match self.kind {
            MpaFrameKind::Request => REQUEST_KEY,
            MpaFrameKind::Reply => REPLY_KEY,
        });
        let flag = |is_set, bit| if is_set { bit } else { 0 };
        octets.push(
            flag(self.joins_immediate, join_flag(self.kind))
                | flag(self.markers, M_FLAG)
                | flag(self.crc, C_FLAG)
                | flag(self.reject, R_FLAG)
                | flag(self.enhanced.is_some(), S_FLAG),
        );
        octets.push(self.revision);
        octets.extend_from_slice(&(pd_len as u16).to_be_bytes());
        if let Some(enhanced) = self.enhanced {
            octets.extend_from_slice(&enhanced.to_bytes());
        }
        octets.extend_from_slice(&self.private_data);
        Ok(octets.into_boxed_slice())
    }

    /// Reads the frame at the start of the stream and consumes it. `Ok(None)`: it is not complete
    /// yet; a wrong key or a bad length is reported as soon as it is visible. `max_private_data`:
    /// limit of private data in bytes.
    pub fn read_from(
        rx: &mut impl RxStream,
        max_private_data: u16,
    ) -> Result<Option<Self>, MpaError> {
        let header_len = rx.available().min(MPA_HEADER_LEN);
        let mut header = [0; MPA_HEADER_LEN];
        rx.peek(0, &mut header[..header_len]);
        let key_len = header_len.min(KEY_LEN);
        let kind = if header[..key_len] == REQUEST_KEY[..key_len] {
            MpaFrameKind::Request
        } else if header[..key_len] == REPLY_KEY[..key_len] {
            MpaFrameKind::Reply
        } else {
            return Err(MpaError::BadKey);
        };
        if header_len < MPA_HEADER_LEN {
            return Ok(None);
        }
        let (flags, revision) = (header[16], header[17]);
        let pd_len = u16::from_be_bytes([header[18], header[19]]);
        // Revision 0 goes with version 0 of RDMAP and DDP (RFC 5044 appendix C), which siwd does not
        // speak.
        if revision == 0 || revision > MAX_REVISION {
            return Err(MpaError::BadRevision(revision));
        }
        if usize::from(pd_len) > MAX_PRIVATE_DATA || pd_len > max_private_data {
            return Err(MpaError::PrivateDataTooLong(pd_len));
        }
        // The S bit was reserved before revision 2 (RFC 6581 section 10).
        let is_enhanced = flags & S_FLAG != 0 && revision >= 2;
        if is_enhanced && usize::from(pd_len) < ENHANCED_LEN {
            return Err(MpaError::EnhancedTooShort);
        }
        let frame_len = MPA_HEADER_LEN + usize::from(pd_len);
        if rx.available() < frame_len {
            return Ok(None);
        }
        let mut private_data = vec![0; usize::from(pd_len)];
        rx.peek(MPA_HEADER_LEN, &mut private_data);
        rx.consume(frame_len);
        let mut enhanced = None;
        if is_enhanced && let Some(octets) = private_data.first_chunk() {
            enhanced = Some(EnhancedData::parse(*octets));
            private_data.drain(..ENHANCED_LEN);
        }
        Ok(Some(Self {
            kind,
            markers: flags & M_FLAG != 0,
            crc: flags & C_FLAG != 0,
            reject: flags & R_FLAG != 0,
            joins_immediate: flags & RESERVED_MASK == join_flag(kind) && revision >= 2,
            revision,
            enhanced,
            private_data,
        }))
    }
}

fn join_flag(kind: MpaFrameKind) -> u8 {
    match kind {
        MpaFrameKind::Request => JOIN_REQUEST_FLAG,
        MpaFrameKind::Reply => JOIN_REPLY_FLAG,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::ByteStream;

    fn sample_request() -> MpaFrame {
        MpaFrame {
            kind: MpaFrameKind::Request,
            markers: false,
            crc: true,
            reject: false,
            joins_immediate: false,
            revision: 2,
            enhanced: Some(EnhancedData {
                peer_to_peer: true,
                rtr: RtrKinds::WRITE_READ,
                ird: 128,
                ord: 1,
            }),
            private_data: b"hello".to_vec(),
        }
    }

    /// RFC 5044 section 7.1.1, RFC 6581 section 9.
    #[test]
    fn request_has_the_octets_of_the_rfc() {
        let octets = sample_request().encode().expect("fits");
        assert_eq!(&octets[..16], b"MPA ID Req Frame");
        assert_eq!(octets[16..24], [0x50, 2, 0, 9, 0x80, 0x80, 0xc0, 0x01]);
        assert_eq!(&octets[24..], b"hello");
    }

    /// Conformance 11.
    #[test]
    fn c11_frame_is_read_from_one_byte_fragments() {
        let octets = sample_request().encode().expect("fits");
        let mut stream = ByteStream::new();
        for octet in &octets[..octets.len() - 1] {
            assert_eq!(MpaFrame::read_from(&mut stream, 512), Ok(None));
            stream.push(&[*octet]);
        }
        stream.push(&octets[octets.len() - 1..]);
        assert_eq!(
            MpaFrame::read_from(&mut stream, 512),
            Ok(Some(sample_request()))
        );
        assert_eq!(stream.available(), 0);
    }

    /// Conformance 1.
    #[test]
    fn c1_wrong_key_is_refused_at_its_first_wrong_byte() {
        let mut stream = ByteStream::from(&b"MPA ID Rex"[..]);
        assert_eq!(MpaFrame::read_from(&mut stream, 512), Err(MpaError::BadKey));
        let mut stream = ByteStream::from(&b"G"[..]);
        assert_eq!(MpaFrame::read_from(&mut stream, 512), Err(MpaError::BadKey));
        let mut stream = ByteStream::from(&b"MPA ID Re"[..]);
        assert_eq!(MpaFrame::read_from(&mut stream, 512), Ok(None));
    }

    /// Conformance 7, 8, 9, 14.
    #[test]
    fn c7_c8_c9_c14_lengths_of_private_data_are_checked() {
        let raw = |flags: u8, revision: u8, pd_len: u16| {
            let mut octets = b"MPA ID Rep Frame".to_vec();
            octets.extend([flags, revision]);
            octets.extend(pd_len.to_be_bytes());
            octets.resize(MPA_HEADER_LEN + usize::from(pd_len), 0xaa);
            ByteStream::from(&octets[..])
        };
        let frame = MpaFrame::read_from(&mut raw(0x0f, 1, 0), 512)
            .expect("valid")
            .expect("complete");
        assert!(frame.private_data.is_empty() && !frame.crc && frame.enhanced.is_none());
        let frame = MpaFrame::read_from(&mut raw(0, 1, 512), 512)
            .expect("valid")
            .expect("complete");
        assert_eq!(frame.private_data.len(), 512);
        assert_eq!(
            MpaFrame::read_from(&mut raw(0, 1, 513), 512),
            Err(MpaError::PrivateDataTooLong(513))
        );
        assert_eq!(
            MpaFrame::read_from(&mut raw(0, 1, 300), 256),
            Err(MpaError::PrivateDataTooLong(300))
        );
        assert_eq!(
            MpaFrame::read_from(&mut raw(S_FLAG, 2, 3), 512),
            Err(MpaError::EnhancedTooShort)
        );
        assert_eq!(
            MpaFrame::read_from(&mut raw(0, 3, 0), 512),
            Err(MpaError::BadRevision(3))
        );
    }

    #[test]
    fn own_private_data_beyond_the_limit_is_refused() {
        let mut frame = sample_request();
        frame.private_data = vec![0; 508];
        assert!(frame.encode().is_ok());
        frame.private_data = vec![0; 509];
        assert_eq!(frame.encode(), Err(MpaError::OwnPrivateDataTooLong(509)));
    }
}
