//! The rings of one queue pair in its worker, and what the client did wrong in them.

use std::collections::VecDeque;

use siw_iwarp::QpEvent;
use siw_shm::{RqConsumer, SqConsumer};

use super::completion_queues::CqeId;
use super::messages::QpSetup;
use crate::ids::{CqId, Qpn, SrqId};

/// The rings of a queue pair, and what went wrong in them.
pub struct QpRings {
    /// The queue pair's number.
    pub qpn: Qpn,
    /// The worker's end of the send queue.
    pub sq: SqConsumer,
    /// The worker's end of the receive queue.
    pub rq: RqConsumer,
    /// Where send work requests complete.
    pub send_cq: CqId,
    /// Where receive work requests complete.
    pub recv_cq: CqId,
    /// Shared receive queue instead of `rq`.
    pub srq: Option<SrqId>,
    /// Requests of the shared receive queue that it may hold; 0: no bound.
    pub srq_share: u32,
    /// Completions of such requests that the client may not have polled yet.
    pub held: VecDeque<CqeId>,
    /// Nothing more is read from the send queue, because of what it held.
    pub is_sq_broken: bool,
    /// Nothing more is taken for the receiving side, likewise.
    pub is_rq_broken: bool,
    /// In the list of queue pairs that wait for other workers to let go of a key.
    pub is_quiescing: bool,
    /// In the list of queue pairs of which a message waits for a receive work request.
    pub awaits_receive: bool,
    /// What the client did wrong, until the worker has reported it.
    pub misuse: Option<RingMisuse>,
    /// Longest message whose payload is copied into frames, in bytes: longer ones are sent by reference;
    /// set when it has a stream.
    pub copied_up_to: u32,
    /// Referenced memory may be read after the acknowledgement.
    pub awaits_releases: bool,
    /// A message waits for its release by the port: see [`QpEnv::is_released`].
    ///
    /// [`QpEnv::is_released`]: siw_iwarp::QpEnv::is_released
    pub is_awaiting_release: bool,
    /// Asynchronous events not posted yet.
    pub events: Vec<QpEvent>,
}

impl QpRings {
    /// The rings that the control thread made.
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
            is_sq_broken: false,
            is_rq_broken: false,
            is_quiescing: false,
            awaits_receive: false,
            misuse: None,
            copied_up_to: u32::MAX,
            awaits_releases: false,
            is_awaiting_release: false,
            events: Vec::new(),
        }
    }

    /// The consumer gives the queue pair up: nothing completes visibly any more, as after
    /// ibv_destroy_qp(3). Flushed requests could otherwise overflow a queue that others share, and
    /// reach the next owner of the number.
    pub fn silence_completions(&mut self) {
        // Numbers of completion queues start at 1.
        const NO_QUEUE: CqId = CqId(0);
        (self.send_cq, self.recv_cq) = (NO_QUEUE, NO_QUEUE);
    }
}

/// What a client did to its rings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RingMisuse {
    /// Indices that cannot be: the client is closed.
    InvalidIndex,
    /// A work request that cannot be executed: its queue pair ends.
    BadRequest(String),
}
