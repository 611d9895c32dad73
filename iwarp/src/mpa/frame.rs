//! The MPA request and reply frames (RFC 5044 section 7.1.1) and the enhanced data in front of the
//! private data (RFC 6581 section 9).

use super::{MpaError, RtrKinds};
use crate::stream::RxStream;

/// Key, flags, revision, PD_Length.
pub const MPA_HEADER_LEN: usize = 20;
/// Longest private data (RFC 5044 section 7.1.1), enhanced data included.
pub const MAX_PRIVATE_DATA: usize = 512;

const REQ_KEY: &[u8; 16] = b"MPA ID Req Frame";
const REP_KEY: &[u8; 16] = b"MPA ID Rep Frame";
const M: u8 = 0x80;
const C: u8 = 0x40;
const R: u8 = 0x20;
const S: u8 = 0x10;
const ENHANCED_LEN: usize = 4;
const DEPTH_MASK: u16 = 0x3fff;

/// Which of the two frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MpaFrameKind {
    /// From the initiator.
    Request,
    /// From the responder.
    Reply,
}

/// IRD, ORD and RTR options (RFC 6581 section 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EnhancedData {
    /// A flag: the connection starts with a ready-to-receive message.
    pub peer_to_peer: bool,
    /// B, C, D flags.
    pub rtr: RtrKinds,
    /// 14 bits.
    pub ird: u16,
    /// 14 bits.
    pub ord: u16,
}

impl EnhancedData {
    fn parse(b: [u8; ENHANCED_LEN]) -> Self {
        let i = u16::from_be_bytes([b[0], b[1]]);
        let o = u16::from_be_bytes([b[2], b[3]]);
        Self {
            peer_to_peer: i & 0x8000 != 0,
            rtr: RtrKinds {
                send: i & 0x4000 != 0,
                write: o & 0x8000 != 0,
                read: o & 0x4000 != 0,
            },
            ird: i & DEPTH_MASK,
            ord: o & DEPTH_MASK,
        }
    }

    fn to_bytes(self) -> [u8; ENHANCED_LEN] {
        let i = self.ird & DEPTH_MASK
            | u16::from(self.peer_to_peer) << 15
            | u16::from(self.rtr.send) << 14;
        let o = self.ord & DEPTH_MASK
            | u16::from(self.rtr.write) << 15
            | u16::from(self.rtr.read) << 14;
        let (i, o) = (i.to_be_bytes(), o.to_be_bytes());
        [i[0], i[1], o[0], o[1]]
    }
}

/// A request or reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpaFrame {
    /// Request or reply.
    pub kind: MpaFrameKind,
    /// M flag: the sender of the frame wants to receive markers.
    pub markers: bool,
    /// C flag: the sender of the frame wants CRCs.
    pub crc: bool,
    /// R flag, of meaning in a reply.
    pub reject: bool,
    /// Revision.
    pub revision: u8,
    /// S flag and its data.
    pub enhanced: Option<EnhancedData>,
    /// What the consumer sent along.
    pub private_data: Vec<u8>,
}

impl MpaFrame {
    /// The frame as it goes on the wire. It must go in one TCP segment: hardware does not
    /// reassemble it.
    pub fn encode(&self) -> Result<Box<[u8]>, MpaError> {
        let extra = if self.enhanced.is_some() {
            ENHANCED_LEN
        } else {
            0
        };
        let pd = extra + self.private_data.len();
        if pd > MAX_PRIVATE_DATA {
            return Err(MpaError::OwnPrivateDataTooLong(self.private_data.len()));
        }
        let mut b = Vec::with_capacity(MPA_HEADER_LEN + pd);
        b.extend_from_slice(match self.kind {
            MpaFrameKind::Request => REQ_KEY,
            MpaFrameKind::Reply => REP_KEY,
        });
        let flag = |on, bit| if on { bit } else { 0 };
        b.push(
            flag(self.markers, M)
                | flag(self.crc, C)
                | flag(self.reject, R)
                | flag(self.enhanced.is_some(), S),
        );
        b.push(self.revision);
        b.extend_from_slice(&(pd as u16).to_be_bytes());
        if let Some(e) = self.enhanced {
            b.extend_from_slice(&e.to_bytes());
        }
        b.extend_from_slice(&self.private_data);
        Ok(b.into_boxed_slice())
    }

    /// Takes the frame at the start of the stream. `Ok(None)`: it is not complete yet; a wrong key
    /// and a bad length are told as early as they show.
    pub fn read_from(rx: &mut impl RxStream, max_private: u16) -> Result<Option<Self>, MpaError> {
        let n = rx.available().min(MPA_HEADER_LEN);
        let mut h = [0; MPA_HEADER_LEN];
        rx.peek(0, &mut h[..n]);
        let k = n.min(16);
        let kind = if h[..k] == REQ_KEY[..k] {
            MpaFrameKind::Request
        } else if h[..k] == REP_KEY[..k] {
            MpaFrameKind::Reply
        } else {
            return Err(MpaError::BadKey);
        };
        if n < MPA_HEADER_LEN {
            return Ok(None);
        }
        let (flags, revision) = (h[16], h[17]);
        let pd_len = u16::from_be_bytes([h[18], h[19]]);
        if revision > 2 {
            return Err(MpaError::BadRevision(revision));
        }
        if usize::from(pd_len) > MAX_PRIVATE_DATA || pd_len > max_private {
            return Err(MpaError::PrivateDataTooLong(pd_len));
        }
        // The S bit was reserved before revision 2 (RFC 6581 section 9).
        let s = flags & S != 0 && revision >= 2;
        if s && usize::from(pd_len) < ENHANCED_LEN {
            return Err(MpaError::EnhancedTooShort);
        }
        let total = MPA_HEADER_LEN + usize::from(pd_len);
        if rx.available() < total {
            return Ok(None);
        }
        let mut private_data = vec![0; usize::from(pd_len)];
        rx.peek(MPA_HEADER_LEN, &mut private_data);
        rx.consume(total);
        let mut enhanced = None;
        if s {
            let e = [
                private_data[0],
                private_data[1],
                private_data[2],
                private_data[3],
            ];
            enhanced = Some(EnhancedData::parse(e));
            private_data.drain(..ENHANCED_LEN);
        }
        Ok(Some(Self {
            kind,
            markers: flags & M != 0,
            crc: flags & C != 0,
            reject: flags & R != 0,
            revision,
            enhanced,
            private_data,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::ByteStream;

    fn request() -> MpaFrame {
        MpaFrame {
            kind: MpaFrameKind::Request,
            markers: false,
            crc: true,
            reject: false,
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
    fn a_request_has_the_octets_of_the_rfc() {
        let b = request().encode().expect("fits");
        assert_eq!(&b[..16], b"MPA ID Req Frame");
        assert_eq!(b[16..24], [0x50, 2, 0, 9, 0x80, 0x80, 0xc0, 0x01]);
        assert_eq!(&b[24..], b"hello");
    }

    /// Conformance 11.
    #[test]
    fn a_frame_is_read_from_one_byte_fragments() {
        let b = request().encode().expect("fits");
        let mut s = ByteStream::new();
        for x in &b[..b.len() - 1] {
            assert_eq!(MpaFrame::read_from(&mut s, 512), Ok(None));
            s.push(&[*x]);
        }
        s.push(&b[b.len() - 1..]);
        assert_eq!(MpaFrame::read_from(&mut s, 512), Ok(Some(request())));
        assert_eq!(s.available(), 0);
    }

    /// Conformance 1.
    #[test]
    fn a_wrong_key_is_refused_at_its_first_wrong_byte() {
        let mut s = ByteStream::from(&b"MPA ID Rex"[..]);
        assert_eq!(MpaFrame::read_from(&mut s, 512), Err(MpaError::BadKey));
        let mut s = ByteStream::from(&b"G"[..]);
        assert_eq!(MpaFrame::read_from(&mut s, 512), Err(MpaError::BadKey));
        let mut s = ByteStream::from(&b"MPA ID Re"[..]);
        assert_eq!(MpaFrame::read_from(&mut s, 512), Ok(None));
    }

    /// Conformance 7, 8, 9, 14.
    #[test]
    fn lengths_of_private_data_are_checked() {
        let raw = |flags: u8, revision: u8, pd: u16| {
            let mut b = b"MPA ID Rep Frame".to_vec();
            b.extend([flags, revision]);
            b.extend(pd.to_be_bytes());
            b.resize(MPA_HEADER_LEN + usize::from(pd), 0xaa);
            ByteStream::from(&b[..])
        };
        let f = MpaFrame::read_from(&mut raw(0x0f, 1, 0), 512)
            .expect("valid")
            .expect("complete");
        assert!(f.private_data.is_empty() && !f.crc && f.enhanced.is_none());
        let f = MpaFrame::read_from(&mut raw(0, 1, 512), 512)
            .expect("valid")
            .expect("complete");
        assert_eq!(f.private_data.len(), 512);
        assert_eq!(
            MpaFrame::read_from(&mut raw(0, 1, 513), 512),
            Err(MpaError::PrivateDataTooLong(513))
        );
        assert_eq!(
            MpaFrame::read_from(&mut raw(0, 1, 300), 256),
            Err(MpaError::PrivateDataTooLong(300))
        );
        assert_eq!(
            MpaFrame::read_from(&mut raw(S, 2, 3), 512),
            Err(MpaError::EnhancedTooShort)
        );
        assert_eq!(
            MpaFrame::read_from(&mut raw(0, 3, 0), 512),
            Err(MpaError::BadRevision(3))
        );
    }

    #[test]
    fn own_private_data_beyond_the_limit_is_refused() {
        let mut f = request();
        f.private_data = vec![0; 508];
        assert!(f.encode().is_ok());
        f.private_data = vec![0; 509];
        assert_eq!(f.encode(), Err(MpaError::OwnPrivateDataTooLong(509)));
    }
}
