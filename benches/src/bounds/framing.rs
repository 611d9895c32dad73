//! The frames into which siwd segments a message (RFC 5044 section 4.5).

use crate::plan::{MeasurementPlan, Operation};
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

/// Payload bytes of the largest segment that a link with TSO takes at once.
const SUPER_SEGMENT: usize = 60 << 10;

/// CRC field of an FPDU (RFC 5044 section 4.4).
pub(super) const CRC_BYTES: usize = 4;
/// ULPDU_Length field of an FPDU (RFC 5044 section 4.1).
const MPA_LENGTH_BYTES: usize = 2;

impl Framing {
    /// Framing of WRITEs and READ responses (tagged), or of SENDs, at an MTU.
    pub fn new(mtu: u32, ipv6: bool, op: Operation) -> Framing {
        let ip = if ipv6 { 40 } else { 20 };
        let tcp = 20 + 12;
        // Untagged DDP segments have a longer header.
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

    /// FPDUs of `size` bytes at most that one segment carries; `tso`: the link cuts segments itself.
    pub(super) fn fpdus_per_segment(self, size: usize, tso: bool) -> usize {
        let room = if tso {
            SUPER_SEGMENT.max(self.payload)
        } else {
            self.payload
        };
        room / self.payload.min(size)
    }

    /// Offset and length of each FPDU's payload in a message.
    pub(super) fn payload_ranges(self, size: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..size)
            .step_by(self.payload)
            .map(move |at| (at, self.payload.min(size - at)))
    }
}

/// Location of one FPDU's payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// Offset in the source.
    pub(super) from: usize,
    /// Offset in the destination.
    pub(super) to: usize,
    /// Offset in a buffer of [`SCRATCH_BYTES`], which stays in a core's cache.
    pub(super) scratch: usize,
    pub(super) length: usize,
}

/// Size of the buffer through which copied payload passes.
pub(super) const SCRATCH_BYTES: usize = 256 << 10;

/// The FPDUs of a transfer, message after message, without end.
#[derive(Debug, Clone)]
pub(super) struct PieceWalk {
    payload: usize,
    size: usize,
    stride: usize,
    /// Bytes of the message slots of source and destination.
    sets: [usize; 2],
    /// Current slots of source and destination.
    slots: [usize; 2],
    /// Offset in the current message.
    at: usize,
    scratch: usize,
}

impl PieceWalk {
    pub(super) fn new(plan: &MeasurementPlan, framing: Framing) -> PieceWalk {
        PieceWalk {
            payload: framing.payload,
            size: plan.size as usize,
            stride: plan.slot_stride(),
            sets: [plan.initiator_bytes(), plan.target_bytes()],
            slots: [0, 0],
            at: 0,
            scratch: 0,
        }
    }

    /// The next FPDU.
    #[inline]
    pub(super) fn next_piece(&mut self) -> Piece {
        let length = self.payload.min(self.size - self.at);
        if self.scratch + length > SCRATCH_BYTES {
            self.scratch = 0;
        }
        let piece = Piece {
            from: self.slots[0] + self.at,
            to: self.slots[1] + self.at,
            scratch: self.scratch,
            length,
        };
        self.scratch += length;
        self.at += length;
        if self.at == self.size {
            self.at = 0;
            for (slot, set) in self.slots.iter_mut().zip(self.sets) {
                *slot += self.stride;
                if *slot == set {
                    *slot = 0;
                }
            }
        }
        piece
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
    fn a_walk_passes_all_messages_again_and_again() {
        let plan = MeasurementPlan::for_bandwidth(Operation::Send, 3000, 2, 1);
        let framing = Framing::new(1500, false, plan.op);
        let mut walk = PieceWalk::new(&plan, framing);
        let pieces: Vec<Piece> = (0..13).map(|_| walk.next_piece()).collect();
        let places = |index: usize| (pieces[index].from, pieces[index].to, pieces[index].length);
        assert_eq!(places(2), (2848, 2848, 152));
        assert_eq!(places(3), (3008, 3008, 1424));
        // Two slots at the source and four at the destination.
        assert_eq!(places(6), (0, 6016, 1424));
        assert_eq!(places(12), (0, 0, 1424));
        assert_eq!(pieces[1].scratch, 1424);
    }

    #[test]
    fn a_link_that_cuts_segments_takes_many_fpdus_at_once() {
        let framing = Framing::new(1500, false, Operation::Write);
        assert_eq!(framing.fpdus_per_segment(65536, true), 43);
        assert_eq!(framing.fpdus_per_segment(65536, false), 1);
        assert_eq!(framing.fpdus_per_segment(64, false), 22);
        let large = Framing::new(65000, false, Operation::Write);
        assert_eq!(large.fpdus_per_segment(1 << 20, true), 1);
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
