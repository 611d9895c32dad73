//! A Read or an atomic that this side issued, until it is answered.

use crate::record::MessageSlot;

/// STag of messages that name no memory. Hardware refuses zero even at zero length (PROTOCOL.md
/// section 7.2).
pub(crate) const PLACEHOLDER_STAG: u32 = 1;

/// The STag of a data sink as the peer sees it: the local key, or something that is not zero where
/// there is none.
#[inline]
pub(crate) fn sink_stag(lkey: u32) -> u32 {
    if lkey == 0 { PLACEHOLDER_STAG } else { lkey }
}

/// One outstanding Read Request or Atomic Request. Responses come in the order of requests (RFC 5040
/// section 5.5), so these form a queue whose length ORD limits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OutstandingRead {
    /// Its work request; `None` for the ready-to-receive Read.
    pub slot: Option<MessageSlot>,
    pub sink_stag: u32,
    pub sink_to: u64,
    /// Bytes that were asked for.
    pub len: u32,
    /// Bytes of the response that are placed.
    pub placed: u32,
    /// The last Read Request of its work request: the response completes it.
    pub is_last: bool,
    /// It is an atomic with this request identifier.
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

    /// `len` bytes of a response from `to` on lie within what is asked for and not yet placed.
    pub fn wants(&self, stag: u32, to: u64, len: u32) -> bool {
        let offset = to.wrapping_sub(self.sink_to);
        self.atomic_id.is_none()
            && self.sink_stag == stag
            && offset >= u64::from(self.placed)
            && offset <= u64::from(self.len)
            && u64::from(len) <= u64::from(self.len) - offset
    }
}
