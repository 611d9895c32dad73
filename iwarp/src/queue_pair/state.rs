//! Small public types of a queue pair: states, attributes, reasons.

use crate::queue_pair::error_mapping::vendor_error;
use crate::rdmap::terminate::TerminateCode;
use serde::{Deserialize, Serialize};
use siw_memory::key_table::{LastKey, Stag};
use siw_memory::{KeyError, KeyReader, RegisteredMemory};
use siw_shm::{Access, WcStatus};

/// State of a queue pair's RDMAP stream (PROTOCOL.md section 4.1). Clients see
/// `siw_shm::control::QpState`, which also shows the drain of a send queue and the wait for the first
/// FPDU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RdmapState {
    /// No stream.
    Idle,
    /// Ready to send and receive.
    Rts,
    /// A graceful close is in progress.
    Closing,
    /// A Terminate is being sent or was received; only the close follows.
    Terminate,
    /// Everything is flushed, including work requests posted later.
    Error,
}

impl RdmapState {
    /// Name of the state in RFC 5040.
    pub fn name(self) -> &'static str {
        match self {
            RdmapState::Idle => "IDLE",
            RdmapState::Rts => "RTS",
            RdmapState::Closing => "CLOSING",
            RdmapState::Terminate => "TERMINATE",
            RdmapState::Error => "ERROR",
        }
    }
}

/// Snapshot of a queue pair's stream, for status output.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct QueuePairInfo {
    /// State of the queue pair.
    pub state: RdmapState,
    /// Reads that the peer may have outstanding.
    pub ird: u16,
    /// Reads that this side may have outstanding.
    pub ord: u16,
    /// FPDUs carry a CRC.
    pub crc: bool,
    /// Maximum ULPDU size of an FPDU, in octets.
    pub mulpdu: u16,
    /// The peer sends markers.
    pub markers_in: bool,
    /// This side sends markers.
    pub markers_out: bool,
    /// First error that this side found, as sent in a Terminate.
    pub terminate_sent: Option<TerminateCode>,
    /// Terminate that the peer sent.
    pub terminate_received: Option<TerminateCode>,
}

/// State of the send queue's drain (ibv_modify_qp(3), IBV_QPS_SQD).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum DrainState {
    /// Work requests start normally.
    #[default]
    Inactive,
    /// No work request starts; some started ones are not completed.
    Draining,
    /// No work request starts, and all started ones are completed:
    /// [`QpEvent::SqDrained`](crate::QpEvent::SqDrained) was posted.
    Drained,
}

/// Work requests of one ring that are flushed before other queue pairs get their turn.
pub(crate) const FLUSHES_PER_TURN: u32 = 64;

/// Attributes for creating a queue pair (ibv_create_qp(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpInitAttr {
    /// Queue pair number, which memory windows bound to one stream refer to.
    pub qpn: u32,
    /// Protection domain.
    pub pd: u32,
    /// Depth of the send queue, in work requests.
    pub max_send_wr: u32,
    /// Depth of the receive queue, in work requests.
    pub max_recv_wr: u32,
    /// Every send work request generates a completion.
    pub sq_sig_all: bool,
    /// Rights that the peer is denied, whatever a key allows (the inverse of `qp_access_flags` in
    /// ibv_modify_qp(3)).
    pub denied_access: Access,
}

impl QpInitAttr {
    /// Resolves a key for an access to `len` bytes at `address`, if this queue pair may access them
    /// in this way: returns the region and the offset in it. Zero-length accesses are not checked
    /// (RFC 5041 section 5.2): callers skip the call.
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

    /// Variant of [`check_key`](Self::check_key) for a sequence of accesses of the same kind.
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

/// Way to close the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CloseKind {
    /// FIN after everything that TCP has taken.
    Graceful,
    /// RST now.
    Abort,
}

/// Reason why the stream has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CloseReason {
    /// Both FINs were exchanged, or the time limit of the close expired.
    Closed,
    /// The peer sent RST.
    Reset,
    /// TCP gave up.
    TimedOut,
}

/// Result of [`QueuePair::receive_in_order`](crate::QueuePair::receive_in_order).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReceiveProgress {
    /// FPDUs consumed.
    pub fpdus: u32,
    /// Bytes of the stream consumed.
    pub bytes: usize,
    /// The very first FPDU was among them: a responder may now send.
    pub first_fpdu: bool,
    /// [`QueuePair::next_record`](crate::QueuePair::next_record) has something to send.
    pub has_output: bool,
}

/// A record cannot be built any more: its memory key was deregistered, or the queue pair was flushed.
/// Nothing else can fill its sequence space, so the stream is aborted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// The local key no longer covers the message.
    #[error("memory of a message in flight was deregistered")]
    KeyDeregistered,
    /// The message is no longer known.
    #[error("record belongs to a message that has already completed")]
    MessageCompleted,
}

/// Errors that end a stream, by the side that found them. The first of each counts.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct StreamErrors {
    /// Found by this side, as it was (or would have been) sent in a Terminate.
    pub found: Option<TerminateCode>,
    /// Reported by the peer's Terminate.
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
