//! The rings of one queue pair in its worker, and their misuse by the client.

use std::collections::VecDeque;

use siw_iwarp::QpEvent;
use siw_shm::{RqConsumer, SendWqe, SqConsumer};

use super::completion_queues::CqeId;
use super::messages::QpSetup;
use super::parked::WaitSet;
use crate::ids::{CqId, Qpn, SrqId};

/// The rings of a queue pair and their state. The fields before `rq` are those that a Write accesses.
#[repr(C)]
pub struct QpRings {
    /// Asynchronous events not posted yet.
    pub events: Vec<QpEvent>,
    /// Misuse by the client that the worker has not reported yet.
    pub misuse: Option<RingMisuse>,
    /// The worker's end of the send queue.
    pub sq: SqConsumer,
    /// The queue pair's number.
    pub qpn: Qpn,
    /// The send queue was empty at the end of the last turn: the client rings for the next request,
    /// or the scheduler's poll finds it.
    pub is_sq_drained: bool,
    /// The send queue is not read any more because of its invalid contents.
    pub is_sq_broken: bool,
    /// No receive work requests are taken any more because of invalid contents.
    pub is_rq_broken: bool,
    /// Lists of parked queue pairs that it is in.
    pub waits: WaitSet,
    /// Referenced memory may be read after the acknowledgement.
    pub awaits_releases: bool,
    /// Completion queue of send work requests.
    pub send_cq: CqId,
    /// Completion queue of receive work requests.
    pub recv_cq: CqId,
    /// The worker's end of the receive queue.
    pub rq: RqConsumer,
    /// Shared receive queue instead of `rq`.
    pub srq: Option<SrqId>,
    /// Requests of the shared receive queue that the queue pair may hold; 0 for no bound.
    pub srq_share: u32,
    /// Completions of shared requests that the client may not have polled yet.
    pub held: VecDeque<CqeId>,
    /// Request that follows the last one in the send queue: the final SEND of a lingering stream.
    pub final_send: Option<Box<SendWqe>>,
}

impl QpRings {
    /// Bytes at the start that a Write accesses.
    pub const HOT_BYTES: usize = std::mem::offset_of!(QpRings, rq);

    /// Takes over the rings that the control thread created.
    pub fn new(setup: QpSetup) -> QpRings {
        QpRings {
            qpn: Qpn(setup.attr.qpn),
            sq: setup.sq,
            rq: setup.rq,
            send_cq: setup.send_cq,
            recv_cq: setup.recv_cq,
            srq: setup.srq,
            srq_share: setup.srq_share,
            held: VecDeque::new(),
            final_send: None,
            is_sq_drained: false,
            is_sq_broken: false,
            is_rq_broken: false,
            waits: WaitSet::default(),
            misuse: None,
            awaits_releases: false,
            events: Vec::new(),
        }
    }

    /// True if the receive queue is surely empty, which costs one read.
    #[inline]
    pub(super) fn has_no_receive(&mut self) -> bool {
        self.srq.is_none() && !self.is_rq_broken && self.rq.is_empty().unwrap_or(false)
    }

    /// Suppresses all further completions of a queue pair that its consumer gives up, as after
    /// ibv_destroy_qp(3). Flushed requests could otherwise overflow a queue that others share, or be
    /// attributed to the next owner of the number.
    pub fn silence_completions(&mut self) {
        // Numbers of completion queues start at 1.
        const NO_QUEUE: CqId = CqId(0);
        (self.send_cq, self.recv_cq) = (NO_QUEUE, NO_QUEUE);
    }
}

/// Misuse of a ring by its client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RingMisuse {
    /// Invalid indices; the client is closed.
    InvalidIndex,
    /// A work request that cannot be executed; its queue pair ends.
    BadRequest(String),
}
