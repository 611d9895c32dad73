//! MPA markers (RFC 5044 sections 4.2 and 4.3): four octets at every multiple of 512 octets of the
//! stream, counted from the first octet after the MPA frames. Each marker holds the distance back to
//! the start of its FPDU.
//!
//! The receiver reads through `UnmarkedStream`, which hides them; the sender inserts them while it
//! builds frames. A marker belongs to the FPDU whose next octet follows it. A marker between two
//! FPDUs therefore has pointer zero and is covered by the CRC of the second FPDU; a marker after the
//! pad is covered by the CRC of the first.

use crate::stream::RxStream;
use serde::{Deserialize, Serialize};
use siw_memory::gap_copy::{GAP_LEN, Gaps};

/// Octets from the start of a marker to the start of the next.
pub const INTERVAL: usize = 512;
/// Octets of a marker: 16 reserved bits, 16 bits FPDUPTR.
pub const MARKER_LEN: usize = GAP_LEN;
/// Octets between two markers.
pub const DATA_LEN: usize = INTERVAL - MARKER_LEN;

/// Smallest MULPDU, in octets (RFC 5044 section 4.5).
pub(crate) const MIN_MULPDU: u32 = 128;
/// Largest MULPDU, in octets.
pub(crate) const MAX_MULPDU: u32 = 64768;

/// FPDUPTR is a multiple of four: its two lowest bits are ignored (RFC 5044 section 4.2).
const POINTER_MASK: u16 = !3;

/// The markers of a piece of stream, in the form that the memory's copy routines take.
pub(crate) type MarkerGaps = Gaps<INTERVAL>;

/// Octets of stream that `len` octets take, including the markers before and between them, when the
/// first marker comes after `until_marker` octets.
#[inline]
pub(crate) fn marked_len(until_marker: usize, len: usize) -> usize {
    if len <= until_marker {
        len
    } else {
        len + MARKER_LEN * (1 + (len - until_marker - 1) / DATA_LEN)
    }
}

/// Number of non-marker octets among `marked_len` octets of stream: the largest length whose
/// [`marked_len`] does not exceed `marked_len`.
#[inline]
pub(crate) fn unmarked_len(until_marker: usize, marked_len: usize) -> usize {
    match marked_len.checked_sub(until_marker) {
        None => marked_len,
        Some(rest) => {
            let last = (rest % INTERVAL).saturating_sub(MARKER_LEN);
            until_marker + rest / INTERVAL * DATA_LEN + last
        }
    }
}

/// Positions and contents of the markers of a piece of payload.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MarkerLayout {
    /// Octets of payload before the first marker, at most [`DATA_LEN`].
    pub until_marker: usize,
    /// Octets from the start of the FPDU to the start of this piece: the FPDUPTR that a marker there
    /// would have.
    pub fpdu_offset: usize,
}

impl MarkerLayout {
    /// Octets that `len` octets of payload take, including the markers before and between them.
    #[inline]
    pub fn marked_len(self, len: usize) -> usize {
        marked_len(self.until_marker, len)
    }

    /// Octets of payload that fit into `marked_len` octets together with their markers.
    #[inline]
    pub fn payload_len(self, marked_len: usize) -> usize {
        unmarked_len(self.until_marker, marked_len)
    }

    /// Octets of payload from the end of the first `len` octets, which take `marked_len` octets with
    /// their markers, to the next marker.
    #[inline]
    pub fn until_marker_after(self, len: usize, marked_len: usize) -> usize {
        let markers = (marked_len - len) / MARKER_LEN;
        self.until_marker + markers * DATA_LEN - len
    }

    /// The marker positions in the form that the memory's copy routines take.
    #[inline]
    pub fn gaps(self) -> MarkerGaps {
        MarkerGaps {
            first: self.until_marker,
        }
    }

    /// The marker `offset` octets after the start of this piece.
    #[inline]
    pub fn marker_at(self, offset: usize) -> [u8; MARKER_LEN] {
        encode_marker(self.fpdu_offset + offset)
    }
}

/// Position of the next octet of a stream relative to the markers, or "no markers".
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "u16", try_from = "u16")]
pub struct MarkerPosition(u16);

/// No stream has such a position: markers and FPDUs are whole words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} is no position between two markers")]
pub struct InvalidPosition(u16);

impl From<MarkerPosition> for u16 {
    fn from(position: MarkerPosition) -> u16 {
        position.0
    }
}

impl TryFrom<u16> for MarkerPosition {
    type Error = InvalidPosition;

    fn try_from(position: u16) -> Result<Self, InvalidPosition> {
        let is_between = usize::from(position) < INTERVAL && position.is_multiple_of(4);
        if is_between || position == Self::NO_MARKERS.0 {
            Ok(MarkerPosition(position))
        } else {
            Err(InvalidPosition(position))
        }
    }
}

impl MarkerPosition {
    /// The stream carries no markers.
    pub const NO_MARKERS: MarkerPosition = MarkerPosition(u16::MAX);
    /// A marker comes next: the start of every stream that has markers.
    pub const START: MarkerPosition = MarkerPosition(0);

    /// The start of a stream with or without markers.
    #[inline]
    pub fn stream_start(markers: bool) -> Self {
        if markers {
            Self::START
        } else {
            Self::NO_MARKERS
        }
    }

    /// Returns whether the stream carries markers.
    #[inline]
    pub fn has_markers(self) -> bool {
        self != Self::NO_MARKERS
    }

    /// Octets from here to the next marker.
    #[inline]
    pub fn until_marker(self) -> usize {
        (INTERVAL - usize::from(self.0) % INTERVAL) % INTERVAL
    }

    /// The position `len` octets of stream further on, markers included.
    #[inline]
    pub fn advanced_by(self, len: usize) -> Self {
        if self.has_markers() {
            MarkerPosition(((usize::from(self.0) + len) % INTERVAL) as u16)
        } else {
            self
        }
    }

    /// Octets of stream that `len` octets take, including the markers before and between them.
    #[inline]
    pub fn marked_len(self, len: usize) -> usize {
        if self.has_markers() {
            marked_len(self.until_marker(), len)
        } else {
            len
        }
    }

    /// Number of non-marker octets among the next `len` octets of a stream with markers.
    #[inline]
    pub(crate) fn unmarked_len(self, len: usize) -> usize {
        unmarked_len(self.until_marker(), len)
    }

    /// Offset in the stream of the non-marker octet number `nth`, for a stream with markers.
    #[inline]
    pub(crate) fn stream_offset(self, nth: usize) -> usize {
        // No division: headers and the data after them seldom lie behind the second marker.
        let until_marker = self.until_marker();
        if nth < until_marker {
            nth
        } else if nth - until_marker < DATA_LEN {
            nth + MARKER_LEN
        } else {
            self.marked_len(nth + 1) - 1
        }
    }
}

/// MULPDU of a stream with markers, in octets: leaves room for the maximum number of markers that a
/// segment of `emss` bytes can contain (RFC 5044 section 4.5).
#[inline]
pub fn mulpdu_for_emss(emss: u32) -> u16 {
    let markers = MARKER_LEN as u32 * emss.div_ceil(INTERVAL as u32);
    emss.saturating_sub(6 + markers + emss % 4)
        .clamp(MIN_MULPDU, MAX_MULPDU) as u16
}

/// Encodes the marker that stands `back` octets after the start of its FPDU's length field.
#[inline]
pub fn encode_marker(back: usize) -> [u8; MARKER_LEN] {
    let pointer = (back as u16).to_be_bytes();
    [0, 0, pointer[0], pointer[1]]
}

/// Decodes the FPDUPTR of a marker. Reserved bits and the two lowest bits of the pointer are ignored
/// (conformance 32, 33).
#[inline]
pub(crate) fn decode_marker(marker: [u8; MARKER_LEN]) -> usize {
    usize::from(u16::from_be_bytes([marker[2], marker[3]]) & POINTER_MASK)
}

/// Finds the start of the first FPDU that a marker of the segment points to. The segment begins at
/// `position`.
pub(crate) fn find_first_fpdu(segment: &impl RxStream, position: MarkerPosition) -> Option<usize> {
    let mut at = position.until_marker();
    while at + MARKER_LEN <= segment.available() {
        let mut marker = [0; MARKER_LEN];
        segment.peek(at, &mut marker);
        // The start lies in this segment unless the marker points to before the segment.
        if let Some(start) = at.checked_sub(decode_marker(marker)) {
            return Some(start);
        }
        at += INTERVAL;
    }
    None
}

/// Inserts markers into an encoded FPDU without its CRC. Only for FPDUs in one piece: the builder
/// inserts the markers of FPDUs that are built from records.
pub fn insert_markers(fpdu_without_crc: &[u8], position: MarkerPosition) -> Vec<u8> {
    let mut out = Vec::with_capacity(position.marked_len(fpdu_without_crc.len()) + MARKER_LEN);
    let mut start = 0;
    let mut rest = fpdu_without_crc;
    loop {
        if position.has_markers() && position.advanced_by(out.len()).until_marker() == 0 {
            out.extend_from_slice(&encode_marker(out.len() - start));
            if start == 0 && rest.len() == fpdu_without_crc.len() {
                start = MARKER_LEN;
            }
        }
        if rest.is_empty() {
            return out;
        }
        let piece_len = if position.has_markers() {
            let until_marker = position.advanced_by(out.len()).until_marker();
            until_marker.min(rest.len())
        } else {
            rest.len()
        };
        out.extend_from_slice(&rest[..piece_len]);
        rest = &rest[piece_len..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mpa::fpdu;

    #[test]
    fn positions_agree_with_a_count_octet_by_octet() {
        for start in (0..512).step_by(4) {
            let position = MarkerPosition(start);
            let marker = |at: usize| (usize::from(start) + at) % 512 < 4;
            // A stream never begins inside a marker.
            let mut data = 0;
            for at in 0..2000 {
                assert_eq!(
                    position.unmarked_len(at),
                    data,
                    "marker_position {start} at {at}"
                );
                if !marker(at) {
                    assert_eq!(position.stream_offset(data), at);
                    data += 1;
                    assert_eq!(position.marked_len(data), at + 1);
                }
            }
        }
        assert_eq!(MarkerPosition::NO_MARKERS.marked_len(5000), 5000);
    }

    #[test]
    fn layout_gives_the_most_payload_that_fits() {
        for until_marker in [0, 1, 2, 3, 60, 100, 200, 444, 507, 508] {
            let layout = MarkerLayout {
                until_marker,
                fpdu_offset: 16,
            };
            for room in 0..2600 {
                let len = layout.payload_len(room);
                assert!(layout.marked_len(len) <= room && layout.marked_len(len + 1) > room);
            }
            let (mut marked_len, mut until) = (0, until_marker);
            for len in 1..3000 {
                if until == 0 {
                    marked_len += MARKER_LEN;
                    until = DATA_LEN;
                }
                marked_len += 1;
                until -= 1;
                assert_eq!(layout.marked_len(len), marked_len);
                assert_eq!(layout.payload_len(marked_len), len);
                assert_eq!(layout.until_marker_after(len, marked_len), until);
            }
        }
    }

    /// RFC 5044 section 4.5.
    #[test]
    fn mulpdu_leaves_room_for_all_markers_of_a_segment() {
        assert_eq!(mulpdu_for_emss(1448), 1448 - (6 + 12));
        for emss in 160..9100 {
            let mulpdu = mulpdu_for_emss(emss);
            for start in (0..512).step_by(4) {
                let len = MarkerPosition(start).marked_len(fpdu::wire_len(mulpdu));
                assert!(len <= emss as usize, "{emss} at {start}: {len}");
            }
        }
    }

    /// RFC 5044 figures 5 and 6: the first FPDU of a stream after its marker, and the second one, of
    /// the next message, with a marker at octet 20.
    #[test]
    fn crc_covers_markers_as_in_the_examples_of_the_rfc() {
        let mut fpdu = vec![0; 44];
        fpdu[1] = 0x2a;
        fpdu[2..4].copy_from_slice(&[0x41, 0x43]);
        fpdu[15] = 1;
        let crc = |octets: &[u8]| siw_memory::crc::crc32c(octets).to_le_bytes();
        let marked = insert_markers(&fpdu, MarkerPosition::START);
        assert_eq!((marked.len(), &marked[..4]), (48, &[0; 4][..]));
        assert_eq!(crc(&marked), [0x52, 0x23, 0x99, 0x83]);
        fpdu[15] = 2;
        let marked = insert_markers(&fpdu, MarkerPosition(512 - 20));
        assert_eq!((marked.len(), &marked[20..24]), (48, &[0, 0, 0, 20][..]));
        assert_eq!(crc(&marked), [0x84, 0x92, 0x58, 0x98]);
    }

    #[test]
    fn marker_between_fpdus_has_pointer_zero() {
        let fpdu = [7; 44];
        let front = insert_markers(&fpdu, MarkerPosition::START);
        assert_eq!((front.len(), &front[..4]), (48, &[0; 4][..]));
        let behind = insert_markers(&fpdu, MarkerPosition(512 - 44));
        assert_eq!((behind.len(), &behind[44..]), (48, &[0, 0, 0, 44][..]));
        let after = insert_markers(&fpdu, MarkerPosition(512 - 48));
        assert_eq!(
            after.len(),
            44,
            "a marker behind the CRC is of the next FPDU"
        );
    }
}
