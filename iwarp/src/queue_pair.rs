//! The queue pair: RDMAP and DDP above a stream of records.
//!
//! One worker owns it and drives it:
//!
//! ```text
//! doorbell / room in TCP --> next_record() --> TxRecord --> TCP keeps it, calls build() to send or resend
//! ACK --------------------> acked()       --> completions of SEND and WRITE
//! bytes in order ---------> receive()     --> placement, receive completions, READ completions
//! FIN, RST, timers -------> peer_closed(), tcp_closed() --> flush
//! ```
//!
//! States (RFC 5040 section 5.1 and protocol.md section 4):
//!
//! ```text
//! IDLE --set_rts--> RTS --disconnect/FIN--> CLOSING --closed, nothing flushed--> IDLE
//!                    |                         '-----closed, something flushed--> ERROR
//!                    |--protocol error, Terminate received--> TERMINATE --closed--> ERROR
//!                    '--RST, modify_to_error--> ERROR
//! ```

use crate::env::{Fpdu, FrameBuilder, QpEnv, TxRecord};
use crate::mpa::Negotiated;
use crate::shm::Reader;
use crate::stream::RxStream;
use crate::terminate::TermCode;

/// State of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QpState {
    /// No stream.
    Idle,
    /// Ready to send and receive.
    Rts,
    /// Graceful close under way.
    Closing,
    /// A Terminate goes out or came in; nothing but the close follows.
    Terminate,
    /// Everything is flushed, and so is what comes later.
    Error,
}

/// What a queue pair is created with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpAttr {
    /// Queue pair number: STags bound to a stream name it.
    pub qpn: u32,
    /// Protection domain.
    pub pd: u32,
    /// Depth of the send queue.
    pub max_send_wr: u32,
    /// Depth of the receive queue.
    pub max_recv_wr: u32,
    /// Every send work request makes a completion (ibv_create_qp(3), sq_sig_all).
    pub sq_sig_all: bool,
}

/// How the stream shall end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseKind {
    /// FIN after everything that TCP has taken.
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

/// What [`QueuePair::receive`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// FPDUs consumed.
    pub fpdus: u32,
    /// Stream bytes consumed.
    pub bytes: usize,
    /// The very first FPDU was among them: a responder may send from now on.
    pub first_fpdu: bool,
    /// There is something for [`QueuePair::next_record`] to send.
    pub tx: bool,
}

/// A record cannot be built any more: its memory key was deregistered, or the queue pair was
/// flushed. Its place in the sequence space cannot be filled otherwise: abort the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// The local key no longer covers the message.
    #[error("memory of a message in flight was deregistered")]
    KeyGone,
    /// The message is no longer known.
    #[error("record belongs to a message that is already completed")]
    Gone,
}

/// A queue pair.
pub struct QueuePair {
    attr: QpAttr,
    state: QpState,
}

impl QueuePair {
    /// A queue pair in IDLE; allocates nothing.
    pub fn new(attr: QpAttr) -> Self {
        Self {
            attr,
            state: QpState::Idle,
        }
    }

    /// The stream is in FPDU mode. `emss`: payload bytes of a full TCP segment.
    pub fn set_rts(&mut self, _negotiated: Negotiated, _emss: u32) {
        todo!()
    }

    /// The effective MSS changed; FPDUs not yet handed to TCP follow it.
    pub fn set_emss(&mut self, _emss: u32) {
        todo!()
    }

    /// Creation attributes.
    pub fn attr(&self) -> &QpAttr {
        &self.attr
    }

    /// Current state.
    pub fn state(&self) -> QpState {
        self.state
    }

    /// Consumes every FPDU that is complete in `rx`: checks, places, completes, queues responses;
    /// stops at an incomplete one. On a protocol error it queues the Terminate and consumes no more.
    ///
    /// Call it before [`acked`](Self::acked) for the acknowledgement of the same segment: a
    /// Terminate then still finds the work request that it is about.
    pub fn receive<E: QpEnv>(&mut self, _env: &mut E, _rx: &mut impl RxStream) -> Progress {
        todo!()
    }

    /// The next FPDU that may leave: record, its length on the wire, and whether to push (end of a
    /// message). `room`: bytes that TCP takes now; an FPDU is never cut to fit. `None`: nothing to
    /// do, no room, or a stall (ORD, fence, ready-to-receive). Takes work requests out of the ring as
    /// it needs them.
    pub fn next_record<E: QpEnv>(
        &mut self,
        _env: &mut E,
        _room: usize,
    ) -> Option<(TxRecord, u32, bool)> {
        todo!()
    }

    /// [`next_record`](Self::next_record) has something beyond what may wait in the ring.
    pub fn has_work(&self) -> bool {
        todo!()
    }

    /// Makes the whole FPDU: header, payload, pad, CRC. Checks the memory key again.
    pub fn build(
        &self,
        _keys: &Reader,
        _rec: &Fpdu,
        _out: &mut impl FrameBuilder,
    ) -> Result<(), BuildError> {
        todo!()
    }

    /// [`build`](Self::build) failed: the queue pair goes to ERROR and wants an abort.
    pub fn build_failed<E: QpEnv>(&mut self, _env: &mut E, _rec: &Fpdu, _error: BuildError) {
        todo!()
    }

    /// TCP got every byte of this record acknowledged. Records come back in the order in which they
    /// were handed out.
    pub fn acked<E: QpEnv>(&mut self, _env: &mut E, _rec: &Fpdu) {
        todo!()
    }

    /// Completes what only waited for the port to release buffers. True: some still wait.
    pub fn poll_releases<E: QpEnv>(&mut self, _env: &mut E) -> bool {
        todo!()
    }

    /// The consumer disconnects: graceful close ([`wants_close`](Self::wants_close) says when).
    pub fn disconnect(&mut self) {
        todo!()
    }

    /// The peer sent FIN and [`receive`](Self::receive) has seen all bytes before it. `leftover`:
    /// bytes of an incomplete FPDU that stay in the stream.
    pub fn peer_closed<E: QpEnv>(&mut self, _env: &mut E, _leftover: usize) {
        todo!()
    }

    /// The stream is gone, no record comes back any more: flushes, and goes to IDLE or ERROR.
    pub fn tcp_closed<E: QpEnv>(&mut self, _env: &mut E, _reason: CloseReason) {
        todo!()
    }

    /// ibv_modify_qp(ERR), or the client is gone: flushes now, and wants an abort of the stream.
    pub fn modify_to_error<E: QpEnv>(&mut self, _env: &mut E) {
        todo!()
    }

    /// Sends a Terminate of the local user's choice, then closes.
    pub fn terminate(&mut self, _code: TermCode) {
        todo!()
    }

    /// How the stream shall be closed now, if at all. Repeats until the stream is closed.
    pub fn wants_close(&self) -> Option<CloseKind> {
        todo!()
    }

    /// Flushes what is (still, or anew) in the rings. Call it on a doorbell in ERROR.
    pub fn flush<E: QpEnv>(&mut self, _env: &mut E) {
        todo!()
    }

    /// The Terminate that the peer sent, if it did.
    pub fn terminate_received(&self) -> Option<TermCode> {
        todo!()
    }

    /// The error that this side found first, as it went (or would have gone) into a Terminate.
    pub fn terminate_sent(&self) -> Option<TermCode> {
        todo!()
    }
}
