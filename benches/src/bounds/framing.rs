//! The frames into which siwd segments a message (RFC 5044 section 4.5).

use crate::plan::Operation;
use std::time::Duration;

/// Duration of each bound's measurement.
pub(super) const BOUND_TIME: Duration = Duration::from_millis(150);

/// Sizes of the frames of one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Framing {
    /// Ethernet, IP, TCP with timestamps, MPA length, DDP and RDMAP.
    pub header: usize,
    /// Maximum payload bytes of an FPDU.
    pub payload: usize,
}

/// CRC field of an FPDU (RFC 5044 section 4.4).
pub(super) const CRC_BYTES: usize = 4;
/// ULPDU_Length field of an FPDU (RFC 5044 section 4.1).
const MPA_LENGTH_BYTES: usize = 2;

impl Framing {
    /// Framing of WRITEs and READ responses (tagged), or of SENDs, at an MTU.
    pub fn new(mtu: u32, ipv6: bool, op: Operation) -> Framing {
        let ip = if ipv6 { 40 } else { 20 };
        let tcp = 20 + 12;
        let ddp = if op == Operation::Send { 18 } else { 14 };
        let segment = (mtu as usize).saturating_sub(ip + tcp).max(136);
        let ulpdu = segment - CRC_BYTES - MPA_LENGTH_BYTES - segment % 4;
        Framing {
            header: 14 + ip + tcp + MPA_LENGTH_BYTES + ddp,
            payload: ulpdu - ddp,
        }
    }

    /// Bytes of the longest frame of a message.
    pub(super) fn longest_frame(self, size: usize) -> usize {
        self.header + self.payload.min(size) + CRC_BYTES
    }

    /// Offset and length of each FPDU's payload in a message.
    pub(super) fn payload_ranges(self, size: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..size)
            .step_by(self.payload)
            .map(move |at| (at, self.payload.min(size - at)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_full_at_the_mtu() {
        let f = Framing::new(1500, false, Operation::Write);
        assert_eq!((f.header, f.payload), (14 + 20 + 32 + 16, 1428));
        assert_eq!(f.header + f.payload + CRC_BYTES, 1514);
        let f = Framing::new(1500, false, Operation::Send);
        assert_eq!(f.payload, 1424);
        let f = Framing::new(9000, true, Operation::Read);
        assert_eq!(f.header + f.payload + CRC_BYTES, 9014);
    }

    #[test]
    fn the_pieces_of_a_message_cover_it_once() {
        let f = Framing::new(1500, false, Operation::Write);
        for size in [1, 1428, 1429, 65536] {
            let mut next = 0;
            for (at, n) in f.payload_ranges(size) {
                assert_eq!(at, next);
                assert!(n > 0 && n <= f.payload);
                next += n;
            }
            assert_eq!(next, size);
        }
    }
}
