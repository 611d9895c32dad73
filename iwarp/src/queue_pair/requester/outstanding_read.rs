//! A Read or an atomic of this side that is not answered yet.

use crate::record::MessageSlot;
use serde::{Deserialize, Serialize};

/// STag of messages that refer to no memory. Hardware rejects zero even at zero length (PROTOCOL.md
/// section 7.2).
pub(crate) const PLACEHOLDER_STAG: u32 = 1;

/// STag of a data sink as sent to the peer: the local key, or a nonzero placeholder if there is none.
#[inline]
pub(crate) fn sink_stag(lkey: u32) -> u32 {
    if lkey == 0 { PLACEHOLDER_STAG } else { lkey }
}

/// One outstanding Read Request or Atomic Request. Responses come in the order of requests (RFC 5040
/// section 5.5), so these form a queue whose length ORD limits.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct OutstandingRead {
    /// The work request; `None` for the ready-to-receive Read.
    pub slot: Option<MessageSlot>,
    pub sink_stag: u32,
    pub sink_to: u64,
    /// Bytes requested.
    pub len: u32,
    /// Bytes of the response placed so far.
    pub placed: u32,
    /// The last Read Request of its work request, which its response completes.
    pub is_last: bool,
    /// Request identifier, if it is an atomic.
    pub atomic_id: Option<u32>,
}

impl OutstandingRead {
    /// The zero-length Read that starts a stream (RFC 6581 section 9.2).
    pub fn ready_to_receive() -> Self {
        Self {
            slot: None,
            sink_stag: PLACEHOLDER_STAG,
            sink_to: 0,
            len: 0,
            placed: 0,
            is_last: false,
            atomic_id: None,
        }
    }

    /// Returns whether `len` bytes of a response at `to` lie within the requested bytes that are not
    /// yet placed.
    pub fn wants(&self, stag: u32, to: u64, len: u32) -> bool {
        let offset = to.wrapping_sub(self.sink_to);
        self.atomic_id.is_none()
            && self.sink_stag == stag
            && offset >= u64::from(self.placed)
            && offset <= u64::from(self.len)
            && u64::from(len) <= u64::from(self.len) - offset
    }
}
