//! The peer's Reads and atomics, until their responses are acknowledged.

use crate::ddp::{ControlOctets, Msn, QN_READ_REQUEST, UNTAGGED_HDR_LEN, UntaggedHeader};
use crate::rdmap::atomic_header::{ATOMIC_REQUEST_LEN, AtomicRequestHeader};
use crate::rdmap::terminate::OffendingSegment;
use crate::rdmap::{READ_REQUEST_LEN, RdmapOpcode, ReadRequestHeader};
use crate::record::MessageSlot;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// An atomic requested by the peer.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct PendingAtomic {
    pub request: AtomicRequestHeader,
    /// MSN of the response; valid once the operation is executed.
    pub response_msn: Msn,
    /// The operand before the operation; valid once it is executed.
    pub original: u64,
}

/// A Read or an atomic requested by the peer.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct PendingResponse {
    /// All zero for an atomic.
    pub read: ReadRequestHeader,
    pub atomic: Option<PendingAtomic>,
    pub request_msn: Msn,
    /// Bytes handed to TCP.
    pub sent: u32,
    pub is_acked: bool,
}

impl PendingResponse {
    /// The response to a Read, with nothing sent yet.
    pub fn for_read(read: ReadRequestHeader, request_msn: Msn) -> Self {
        Self {
            read,
            atomic: None,
            request_msn,
            sent: 0,
            is_acked: false,
        }
    }

    /// The response to an atomic that has not been executed yet.
    pub fn for_atomic(request: AtomicRequestHeader, request_msn: Msn) -> Self {
        let atomic = PendingAtomic {
            request,
            response_msn: Msn::FIRST,
            original: 0,
        };
        Self {
            atomic: Some(atomic),
            ..Self::for_read(ReadRequestHeader::default(), request_msn)
        }
    }

    /// The request as a Terminate quotes it: a Read Request Header is updated to the current position
    /// (RFC 5040 section 4.8, conformance 82).
    pub fn quote_request(&self) -> OffendingSegment {
        if self.atomic.is_some() {
            return OffendingSegment {
                ulpdu_len: (UNTAGGED_HDR_LEN + ATOMIC_REQUEST_LEN) as u16,
                hdr: self.request_header(RdmapOpcode::AtomicRequest),
                read: None,
            };
        }
        let sent = u64::from(self.sent);
        OffendingSegment {
            ulpdu_len: (UNTAGGED_HDR_LEN + READ_REQUEST_LEN) as u16,
            hdr: self.request_header(RdmapOpcode::ReadRequest),
            read: Some(ReadRequestHeader {
                sink_to: self.read.sink_to.wrapping_add(sent),
                src_to: self.read.src_to.wrapping_add(sent),
                size: self.read.size - self.sent,
                ..self.read
            }),
        }
    }

    fn request_header(&self, opcode: RdmapOpcode) -> [u8; UNTAGGED_HDR_LEN] {
        UntaggedHeader {
            control: ControlOctets::new(opcode, true),
            inv_stag: 0,
            qn: QN_READ_REQUEST,
            msn: self.request_msn,
            mo: 0,
        }
        .to_bytes()
    }
}

/// Pending responses by slot: first those that are sent and wait for their acknowledgement, kept for
/// retransmissions, then those that wait to be sent.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct ResponseQueue {
    base: MessageSlot,
    responses: VecDeque<PendingResponse>,
    /// Number of completely sent responses at the front.
    sent: u32,
}

impl ResponseQueue {
    /// Number of responses that are not completely sent: these count against IRD.
    #[inline]
    pub fn unsent_len(&self) -> usize {
        self.responses.len() - self.sent as usize
    }

    /// Returns whether no more was sent than there is.
    pub fn is_consistent(&self) -> bool {
        let mut responses = self.responses.iter();
        self.sent as usize <= responses.len()
            && responses.all(|response| response.sent <= response.read.size)
    }

    /// Appends the response to the newest request.
    pub fn push(&mut self, response: PendingResponse) {
        self.responses.push_back(response);
    }

    /// The response being sent.
    #[inline]
    pub fn current_mut(&mut self) -> Option<(MessageSlot, &mut PendingResponse)> {
        let slot = self.base.advanced_by(self.sent as usize);
        let response = self.responses.get_mut(self.sent as usize)?;
        Some((slot, response))
    }

    /// Marks the current response as completely handed to TCP.
    #[inline]
    pub fn finish_current(&mut self) {
        self.sent = (self.sent + 1).min(self.responses.len() as u32);
    }

    /// Returns the response in this slot, unless it has been removed.
    #[inline]
    pub fn get(&self, slot: MessageSlot) -> Option<&PendingResponse> {
        self.responses.get(slot.index_from(self.base))
    }

    /// Mutable variant of [`get`](Self::get).
    #[inline]
    pub fn get_mut(&mut self, slot: MessageSlot) -> Option<&mut PendingResponse> {
        self.responses.get_mut(slot.index_from(self.base))
    }

    /// Removes the oldest responses while they are acknowledged.
    #[inline]
    pub fn retire_acked(&mut self) {
        while self
            .responses
            .front()
            .is_some_and(|response| response.is_acked)
        {
            self.pop_front();
        }
    }

    /// Removes the oldest response.
    #[inline]
    pub fn pop_front(&mut self) -> Option<PendingResponse> {
        let response = self.responses.pop_front()?;
        self.base = self.base.advanced_by(1);
        self.sent = self.sent.saturating_sub(1);
        Some(response)
    }
}
