//! The state of the outgoing stream that requests and responses share: how large FPDUs may be, where
//! the next one lies between the markers, and whose message is under way.

use crate::mpa::fpdu;
use crate::mpa::marker::{self, MarkerPosition};
use crate::record::{FpduKind, FpduRecord, MessageSlot, OutgoingFpdu};

/// The message whose segments are under way. Messages of one stream are never interleaved (Linux siw
/// takes a Write between two segments of a Read Response for an error).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OpenMessage {
    /// None: the next FPDU starts a message.
    None,
    /// One of the requester.
    Request,
    /// One of the responder.
    Response,
}

/// Turns segments into records, and has requests and responses take turns.
#[derive(Debug)]
pub(crate) struct Transmitter {
    /// Largest ULPDU of an FPDU (RFC 5044 section 4.1).
    pub mulpdu: u16,
    marker_position: MarkerPosition,
    pub open_message: OpenMessage,
    /// A request was sent last: if both wait, it is the turn of a response.
    pub is_responses_turn: bool,
    /// The last call sent nothing because its budget was used up, not because there was nothing to do.
    pub has_yielded: bool,
}

impl Transmitter {
    /// The start of a stream; [`set_emss`](Self::set_emss) comes next.
    pub fn new(marker_position: MarkerPosition) -> Self {
        Self {
            mulpdu: 0,
            marker_position,
            open_message: OpenMessage::None,
            is_responses_turn: false,
            has_yielded: false,
        }
    }

    /// `emss`: payload bytes of a full TCP segment.
    pub fn set_emss(&mut self, emss: u32) {
        self.mulpdu = if self.marker_position.has_markers() {
            marker::mulpdu_for_emss(emss)
        } else {
            fpdu::mulpdu_for_emss(emss)
        };
    }

    /// Octets of the stream that an FPDU of this size takes now; `None`: more than there is room for.
    #[inline]
    pub fn fit(&self, ulpdu_len: u16, room: usize) -> Option<usize> {
        let wire_len = self.marker_position.marked_len(fpdu::wire_len(ulpdu_len));
        (wire_len <= room).then_some(wire_len)
    }

    /// The record of an FPDU that takes `wire_len` octets of the stream, as [`fit`](Self::fit) said.
    #[inline]
    pub fn push_fpdu(&mut self, fpdu: FpduSegment, wire_len: usize) -> OutgoingFpdu {
        let marker_position = self.marker_position;
        self.marker_position = marker_position.advanced_by(wire_len);
        let record = FpduRecord {
            kind: fpdu.kind,
            is_last: fpdu.is_last,
            ulpdu_len: fpdu.ulpdu_len,
            slot: fpdu.slot,
            offset: fpdu.offset,
            marker_position,
        };
        OutgoingFpdu {
            record,
            wire_len: wire_len as u32,
        }
    }

    /// The record of a message that is one FPDU, if there is room for it.
    pub fn push_message(
        &mut self,
        kind: FpduKind,
        ulpdu_len: u16,
        room: usize,
    ) -> Option<OutgoingFpdu> {
        let wire_len = self.fit(ulpdu_len, room)?;
        let segment = FpduSegment {
            kind,
            is_last: true,
            ulpdu_len,
            slot: MessageSlot(0),
            offset: 0,
        };
        Some(self.push_fpdu(segment, wire_len))
    }

    /// The last segment of a request is handed to TCP.
    #[inline]
    pub fn end_request(&mut self) {
        self.open_message = OpenMessage::None;
        self.is_responses_turn = true;
    }

    /// The last segment of a response is handed to TCP.
    #[inline]
    pub fn end_response(&mut self) {
        self.open_message = OpenMessage::None;
        self.is_responses_turn = false;
    }
}

/// A [`FpduRecord`] less its place in the stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FpduSegment {
    pub kind: FpduKind,
    pub is_last: bool,
    pub ulpdu_len: u16,
    pub slot: MessageSlot,
    pub offset: u32,
}
