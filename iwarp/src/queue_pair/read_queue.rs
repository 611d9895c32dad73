//! Outstanding reads of both directions.
//!
//! [`Outbound`] (bounded by ORD) is what this side asked for; responses come back in request order
//! (RFC 5040 section 5.5). [`Inbound`] (bounded by IRD) is what the peer asked for; the sender turns
//! it into Read Responses, and keeps each until it is acknowledged, for retransmission.

use crate::ddp::{ControlOctets, Msn, QN_READ_REQUEST, UNTAGGED_HDR_LEN, UntaggedHeader};
use crate::environment::ExtBufRef;
use crate::rdmap::atomic_header::{ATOMIC_REQUEST_LEN, AtomicRequestHeader};
use crate::rdmap::terminate::OffendingSegment;
use crate::rdmap::{READ_REQUEST_LEN, RdmapOpcode, ReadRequestHeader};
use std::collections::VecDeque;

/// A read that this side issued.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outbound {
    /// Work request; `None` for the ready-to-receive Read.
    pub slot: Option<u32>,
    pub sink_stag: u32,
    pub sink_to: u64,
    pub len: u32,
    pub placed: u32,
    /// The last Read Request of its work request: the answer completes it.
    pub last: bool,
    /// It is an atomic with this request identifier.
    pub atomic: Option<u32>,
}

/// An atomic that the peer issued.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InboundAtomic {
    pub req: AtomicRequestHeader,
    /// MSN of the response.
    pub msn: Msn,
    /// Once it is done.
    pub original: u64,
}

/// A read or an atomic that the peer issued.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inbound {
    /// All zero for an atomic.
    pub req: ReadRequestHeader,
    pub atomic: Option<InboundAtomic>,
    pub msn: Msn,
    /// Bytes handed to TCP.
    pub sent: u32,
    pub owner: ExtBufRef,
    pub acked: bool,
}

impl Inbound {
    /// The request as a Terminate quotes it: the header updated to the current position (RFC 5040
    /// section 4.8, conformance 82).
    pub fn offender(&self) -> OffendingSegment {
        if self.atomic.is_some() {
            return OffendingSegment {
                ulpdu_len: (UNTAGGED_HDR_LEN + ATOMIC_REQUEST_LEN) as u16,
                hdr: self.header(RdmapOpcode::AtomicRequest),
                read: None,
            };
        }
        let done = u64::from(self.sent);
        OffendingSegment {
            ulpdu_len: (UNTAGGED_HDR_LEN + READ_REQUEST_LEN) as u16,
            hdr: self.header(RdmapOpcode::ReadRequest),
            read: Some(ReadRequestHeader {
                sink_to: self.req.sink_to.wrapping_add(done),
                src_to: self.req.src_to.wrapping_add(done),
                size: self.req.size - self.sent,
                ..self.req
            }),
        }
    }

    fn header(&self, op: RdmapOpcode) -> [u8; UNTAGGED_HDR_LEN] {
        UntaggedHeader {
            control: ControlOctets::new(op, true),
            inv_stag: 0,
            qn: QN_READ_REQUEST,
            msn: self.msn,
            mo: 0,
        }
        .to_bytes()
    }
}

/// Inbound reads, numbered (wrapping): first those that wait for their acknowledgement, then those
/// that wait to be sent.
#[derive(Debug, Default)]
pub(crate) struct InboundQueue {
    base: u32,
    entries: VecDeque<Inbound>,
    /// How many at the front are sent completely.
    sent: usize,
}

impl InboundQueue {
    /// Reads that are not answered completely: these count against IRD.
    #[inline]
    pub fn unsent(&self) -> usize {
        self.entries.len() - self.sent
    }

    pub fn push(&mut self, e: Inbound) {
        self.entries.push_back(e);
    }

    /// The read that is being answered, and its number.
    #[inline]
    pub fn current(&mut self) -> Option<(u32, &mut Inbound)> {
        let slot = self.base.wrapping_add(self.sent as u32);
        self.entries.get_mut(self.sent).map(|e| (slot, e))
    }

    /// The current one is handed to TCP completely.
    #[inline]
    pub fn finish_current(&mut self) {
        self.sent = (self.sent + 1).min(self.entries.len());
    }

    #[inline]
    pub fn get(&self, slot: u32) -> Option<&Inbound> {
        self.entries.get(slot.wrapping_sub(self.base) as usize)
    }

    #[inline]
    pub fn get_mut(&mut self, slot: u32) -> Option<&mut Inbound> {
        let i = slot.wrapping_sub(self.base) as usize;
        self.entries.get_mut(i)
    }

    /// The oldest, if it is acknowledged.
    #[inline]
    pub fn acked_front(&self) -> Option<&Inbound> {
        self.entries.front().filter(|e| e.acked)
    }

    #[inline]
    pub fn pop_front(&mut self) -> Option<Inbound> {
        let e = self.entries.pop_front()?;
        self.base = self.base.wrapping_add(1);
        self.sent = self.sent.saturating_sub(1);
        Some(e)
    }
}
