//! State of the outgoing stream that requests and responses share: maximum FPDU size, position of the
//! next FPDU between the markers, and the message in progress.

use crate::mpa::fpdu;
use crate::mpa::marker::{self, MarkerPosition};
use crate::record::{FpduKind, FpduRecord, MessageSlot, OutgoingFpdu};
use serde::{Deserialize, Serialize};

/// The message whose segments are being sent. Messages of one stream are never interleaved (Linux siw
/// treats a Write between two segments of a Read Response as an error).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum OpenMessage {
    /// None: the next FPDU starts a message.
    None,
    /// A message of the requester.
    Request,
    /// A message of the responder.
    Response,
}

/// Octets that a message counts in addition to its payload when requests and responses share the
/// stream: about the headers of a segment. A Read Request or an empty message counts only these.
const MESSAGE_OVERHEAD: u32 = 64;
/// Maximum lead of requests over responses or vice versa, in octets. The side that catches up
/// therefore never delays the next message longer than one message of this length would.
const MAX_LEAD: i32 = 256 << 10;

/// Turns segments into records, and shares the stream between requests and responses: while both have
/// messages to send, both get the same number of octets, message by message.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Transmitter {
    /// Largest ULPDU of an FPDU (RFC 5044 section 4.1).
    pub mulpdu: u16,
    marker_position: MarkerPosition,
    pub open_message: OpenMessage,
    /// Octets by which responses are ahead of requests since both had something to send; negative:
    /// requests are ahead.
    responses_ahead: i32,
    /// The last call sent nothing because its budget was used up, not because nothing was left to do.
    pub has_yielded: bool,
    /// Octets of payload in the message that was ended last; [`NO_MESSAGE`] if the caller was told.
    ended_len: u32,
}

/// No message has ended.
const NO_MESSAGE: u32 = u32::MAX;

impl Transmitter {
    /// The start of a stream; call [`set_emss`](Self::set_emss) next.
    pub fn new(marker_position: MarkerPosition) -> Self {
        Self {
            mulpdu: 0,
            marker_position,
            open_message: OpenMessage::None,
            responses_ahead: 0,
            has_yielded: false,
            ended_len: NO_MESSAGE,
        }
    }

    /// Returns whether a restored transmitter is one that a stream can have; `is_sending`: it has an FPDU size.
    pub fn is_consistent(&self, is_sending: bool) -> bool {
        (-MAX_LEAD..=MAX_LEAD).contains(&self.responses_ahead)
            && ((marker::MIN_MULPDU..=marker::MAX_MULPDU).contains(&self.mulpdu.into())
                || self.mulpdu == 0 && !is_sending)
    }

    /// Sets the FPDU size. `emss`: payload bytes of a full TCP segment.
    pub fn set_emss(&mut self, emss: u32) {
        self.mulpdu = if self.marker_position.has_markers() {
            marker::mulpdu_for_emss(emss)
        } else {
            fpdu::mulpdu_for_emss(emss)
        };
    }

    /// Octets of the stream that an FPDU of this size would take now; `None`: more than `room`.
    #[inline(always)]
    pub fn fit(&self, ulpdu_len: u16, room: usize) -> Option<usize> {
        let wire_len = self.marker_position.marked_len(fpdu::wire_len(ulpdu_len));
        (wire_len <= room).then_some(wire_len)
    }

    /// Returns whether the stream has markers.
    #[inline]
    pub fn has_markers(&self) -> bool {
        self.marker_position.has_markers()
    }

    /// Creates the record of an FPDU that takes `wire_len` octets of the stream, as returned by
    /// [`fit`](Self::fit).
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

    /// Creates the record of a single-FPDU message, if there is room for it.
    pub fn push_message(
        &mut self,
        kind: FpduKind,
        ulpdu_len: u16,
        room: usize,
    ) -> Option<OutgoingFpdu> {
        let wire_len = self.fit(ulpdu_len, room)?;
        let segment = FpduSegment::whole_message(kind, MessageSlot(0), ulpdu_len);
        Some(self.push_fpdu(segment, wire_len))
    }

    /// Returns whether it is the turn of a response, when both have something to send.
    #[inline]
    pub fn is_responses_turn(&self) -> bool {
        self.responses_ahead < 0
    }

    /// Resets the lead, when only one of them has something to send.
    #[inline]
    pub fn forget_lead(&mut self) {
        self.responses_ahead = 0;
    }

    /// The last segment of a request with `len` octets of payload was handed to TCP.
    #[inline]
    pub fn end_request(&mut self, len: u32) {
        self.ended_len = len;
        self.end_bare_request(len);
    }

    /// The last segment of a request without payload of its own was handed to TCP: of a Read Request or an
    /// atomic.
    #[inline]
    pub fn end_bare_request(&mut self, len: u32) {
        self.open_message = OpenMessage::None;
        self.responses_ahead = (self.responses_ahead - charge(len)).max(-MAX_LEAD);
    }

    /// The last segment of a response with `len` octets of payload was handed to TCP.
    #[inline]
    pub fn end_response(&mut self, len: u32) {
        self.ended_len = len;
        self.open_message = OpenMessage::None;
        self.responses_ahead = (self.responses_ahead + charge(len)).min(MAX_LEAD);
    }

    /// Octets of payload in the message that has ended since the last call.
    #[inline]
    pub fn take_ended(&mut self) -> Option<u32> {
        let len = std::mem::replace(&mut self.ended_len, NO_MESSAGE);
        (len != NO_MESSAGE).then_some(len)
    }
}

/// Octets that a message of `len` octets counts.
#[inline]
fn charge(len: u32) -> i32 {
    len.saturating_add(MESSAGE_OVERHEAD)
        .min(2 * MAX_LEAD as u32) as i32
}

/// An [`FpduRecord`] without its position in the stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FpduSegment {
    pub kind: FpduKind,
    pub is_last: bool,
    pub ulpdu_len: u16,
    pub slot: MessageSlot,
    pub offset: u32,
}

impl FpduSegment {
    /// The only segment of its message.
    #[inline]
    pub fn whole_message(kind: FpduKind, slot: MessageSlot, ulpdu_len: u16) -> Self {
        Self {
            kind,
            is_last: true,
            ulpdu_len,
            slot,
            offset: 0,
        }
    }
}
