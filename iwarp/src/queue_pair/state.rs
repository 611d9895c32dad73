//! The small public types of a queue pair: states, attributes, reasons.

use crate::queue_pair::error_mapping::vendor_error;
use crate::rdmap::terminate::TerminateCode;
use siw_memory::key_table::{LastKey, Stag};
use siw_memory::{KeyError, KeyReader, RegisteredMemory};
use siw_shm::{Access, WcStatus};

/// State of the RDMAP stream of a queue pair (PROTOCOL.md section 4.1). Clients see
/// `siw_shm::control::QpState`, which also tells the drain of a send queue and the wait for the first
/// FPDU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RdmapState {
    /// No stream.
    Idle,
    /// Ready to send and receive.
    Rts,
    /// A graceful close is under way.
    Closing,
    /// A Terminate leaves or has arrived; nothing but the close follows.
    Terminate,
    /// Everything is flushed, and so is whatever is posted later.
    Error,
}

/// How far the drain of the send queue is (ibv_modify_qp(3), IBV_QPS_SQD).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DrainState {
    /// Work requests start as they come.
    #[default]
    Inactive,
    /// No work request starts; some that did are not completed.
    Draining,
    /// No work request starts, and all that did are completed: [`QpEvent::SqDrained`](crate::QpEvent::SqDrained) was posted.
    Drained,
}

/// Work requests of one ring that are flushed before others have their turn.
pub(crate) const FLUSHES_PER_TURN: u32 = 64;

/// What a queue pair is created with (ibv_create_qp(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpInitAttr {
    /// Queue pair number: memory windows that are bound to one stream name it.
    pub qpn: u32,
    /// Protection domain.
    pub pd: u32,
    /// Depth of the send queue, in work requests.
    pub max_send_wr: u32,
    /// Depth of the receive queue, in work requests.
    pub max_recv_wr: u32,
    /// Every send work request makes a completion.
    pub sq_sig_all: bool,
    /// What the peer may not do, whatever a key allows (`qp_access_flags` of ibv_modify_qp(3) has it the
    /// other way round).
    pub denied_access: Access,
}

impl QpInitAttr {
    /// The memory behind a key, if this queue pair may access `len` bytes from `address` on in this
    /// way: the region, and the offset in it. Zero-length accesses are not checked (RFC 5041 section
    /// 5.2): callers leave the call out.
    #[inline(always)]
    pub(crate) fn check_key<'k>(
        &self,
        keys: &'k KeyReader,
        stag: u32,
        address: u64,
        len: u32,
        access: Access,
    ) -> Result<(&'k RegisteredMemory, u64), KeyError> {
        if access.intersects(self.denied_access) {
            return Err(KeyError::Access);
        }
        keys.check_access(Stag(stag), address, len, access, self.pd, self.qpn)
    }

    /// [`check_key`](Self::check_key) for one access after the other of the same kind.
    #[inline(always)]
    pub(crate) fn check_key_with<'k>(
        &self,
        keys: &'k KeyReader,
        last: &mut LastKey<'k>,
        (stag, address, len): (u32, u64, u32),
        access: Access,
    ) -> Result<(&'k RegisteredMemory, u64), KeyError> {
        if access.intersects(self.denied_access) {
            return Err(KeyError::Access);
        }
        let range = (Stag(stag), address, len);
        keys.check_access_with(last, range, access, self.pd, self.qpn)
    }
}

/// How the stream shall be closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseKind {
    /// FIN behind everything that TCP has taken.
    Graceful,
    /// RST now.
    Abort,
}

/// Why the stream is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseReason {
    /// Both FINs are exchanged, or the close was given enough time.
    Closed,
    /// The peer sent RST.
    Reset,
    /// TCP gave up.
    TimedOut,
}

/// What [`QueuePair::receive_in_order`](crate::QueuePair::receive_in_order) did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReceiveProgress {
    /// FPDUs consumed.
    pub fpdus: u32,
    /// Bytes of the stream consumed.
    pub bytes: usize,
    /// The very first FPDU was among them: a responder may send from now on.
    pub first_fpdu: bool,
    /// There is something for [`QueuePair::next_record`](crate::QueuePair::next_record) to send.
    pub has_output: bool,
}

/// A record cannot be built any more: its memory key was deregistered, or the queue pair was
/// flushed. Its place in the sequence space cannot be filled otherwise, so the stream is aborted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// The local key no longer covers the message.
    #[error("memory of a message in flight was deregistered")]
    KeyDeregistered,
    /// The message is no longer known.
    #[error("record belongs to a message that is already completed")]
    MessageCompleted,
}

/// The errors that end a stream, by who found them. The first of each counts.
#[derive(Debug, Default)]
pub(crate) struct StreamErrors {
    /// Found by this side, as it went (or would have gone) into a Terminate.
    pub found: Option<TerminateCode>,
    /// Reported by a Terminate of the peer.
    pub received: Option<TerminateCode>,
}

impl StreamErrors {
    /// The vendor error of a completion with this status.
    pub fn vendor_error(&self, status: WcStatus) -> u32 {
        if status == WcStatus::SUCCESS {
            return 0;
        }
        self.received.or(self.found).map_or(0, vendor_error)
    }
}
