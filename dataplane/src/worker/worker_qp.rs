//! A queue pair in its worker: the iWARP state machine, its rings, its connection.

use std::collections::VecDeque;

use siw_iwarp::mpa::{MpaConfig, MpaInitiator};
use siw_iwarp::{ExtBufRef, QpEnv, QpEvent, QueuePair, RingFault};
use siw_memory::KeyReader;
use siw_shm::{
    Opcode, RecvWqe, RingError, RqConsumer, SendWqe, SqConsumer, Wc, WcFlags, WcOpcode, WcStatus,
};
use siw_tcp::{ConnId, Instant};

use super::completion_queues::{CqTable, CqeId};
use super::ext_bufs::ExtBufRefs;
use super::messages::ConnectParams;
use super::shared_receive_queues::SrqTable;
use crate::ids::{ClientId, CqId, Qpn, SrqId};

/// The rings of a queue pair, and what went wrong in them.
pub struct QpRings {
    pub qpn: Qpn,
    pub sq: SqConsumer,
    pub rq: RqConsumer,
    pub send_cq: CqId,
    pub recv_cq: CqId,
    /// Shared receive queue instead of `rq`.
    pub srq: Option<SrqId>,
    /// Requests of the shared receive queue that it may hold; 0: no bound.
    pub share: u32,
    /// Completions of such requests that the client may not have polled yet.
    pub held: VecDeque<CqeId>,
    /// The consumer was told that nothing more is taken from the shared receive queue.
    pub last_wqe_reported: bool,
    pub fault: Option<RingMisuse>,
    /// The queue pair is going: what a port still holds is the trackers' affair alone.
    pub abandoning: bool,
    /// Asynchronous events not posted yet.
    pub events: Vec<QpEvent>,
}

/// What a client did to its rings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RingMisuse {
    /// Indices that cannot be: the client is closed.
    InvalidIndex,
    /// A work request that cannot be executed: its queue pair ends.
    BadRequest(String),
}

/// How far a queue pair is in connecting.
pub enum Phase {
    /// No connection.
    Idle,
    /// TCP connects, or the MPA reply is awaited.
    Connecting(Box<Connecting>),
    /// MPA set-up is over.
    Running,
    /// The connection is closed; what comes to the rings is flushed.
    Over,
}

/// The initiator's set-up.
pub struct Connecting {
    pub initiator: MpaInitiator,
    pub params: ConnectParams,
    pub config: MpaConfig,
    pub request_sent: bool,
    pub deadline: Instant,
}

/// One queue pair of a worker.
pub struct WorkerQp {
    pub client: ClientId,
    pub port: usize,
    pub conn: Option<ConnId>,
    pub qp: QueuePair,
    pub rings: QpRings,
    pub phase: Phase,
    /// In the list of queue pairs that may have something to send.
    pub ready: bool,
    /// In the list of queue pairs that wait for the port to release buffers.
    pub releasing: bool,
    /// The consumer was told that the connection is over.
    pub disconnect_reported: bool,
    /// The control thread waits for its end.
    pub destroying: bool,
    /// A graceful close that takes longer is aborted.
    pub close_deadline: Option<Instant>,
}

/// Queue pairs by slot, and slots by queue pair number.
#[derive(Default)]
pub struct QpTable {
    slots: Vec<Option<Box<WorkerQp>>>,
    free: Vec<u32>,
    by_qpn: Vec<u32>,
}

impl QpTable {
    #[inline]
    pub fn get(&self, slot: u32) -> Option<&WorkerQp> {
        self.slots.get(slot as usize)?.as_deref()
    }

    #[inline]
    pub fn get_mut(&mut self, slot: u32) -> Option<&mut WorkerQp> {
        self.slots.get_mut(slot as usize)?.as_deref_mut()
    }

    /// The slot of a queue pair number.
    #[inline]
    pub fn find(&self, qpn: Qpn) -> Option<u32> {
        self.by_qpn.get(qpn.index()).copied()?.checked_sub(1)
    }

    pub fn insert(&mut self, qp: Box<WorkerQp>) -> u32 {
        let qpn = qp.rings.qpn.index();
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as u32
        });
        if self.by_qpn.len() <= qpn {
            self.by_qpn.resize(qpn + 1, 0);
        }
        self.by_qpn[qpn] = slot + 1;
        self.slots[slot as usize] = Some(qp);
        slot
    }

    pub fn remove(&mut self, slot: u32) -> Option<Box<WorkerQp>> {
        let qp = self.slots.get_mut(slot as usize)?.take()?;
        self.by_qpn[qp.rings.qpn.index()] = 0;
        self.free.push(slot);
        Some(qp)
    }

    /// Slots of all queue pairs that `f` picks. Control path only: it walks them all.
    pub fn select(&self, f: impl Fn(&WorkerQp) -> bool) -> Vec<u32> {
        (0..self.slots.len() as u32)
            .filter(|i| self.get(*i).is_some_and(&f))
            .collect()
    }

    pub fn count(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

/// What a queue pair reaches of its worker during one call.
pub struct Env<'a> {
    pub rings: &'a mut QpRings,
    pub keys: &'a KeyReader,
    pub cqs: &'a mut CqTable,
    pub srqs: &'a mut SrqTable,
    pub ext_bufs: &'a mut ExtBufRefs,
    pub scratch: &'a mut Scratch,
}

/// Work requests on their way from a ring into a queue pair; one for the whole worker.
#[derive(Default)]
pub struct Scratch {
    send: SendWqe,
    recv: RecvWqe,
}

impl Env<'_> {
    /// Whether the stream may take one more of the shared requests (RFC 5042 section 6.4.3.1).
    fn is_within_share(&mut self) -> bool {
        let QpRings { held, recv_cq, .. } = &mut *self.rings;
        while let Some(oldest) = held.front()
            && self.cqs.is_polled(*recv_cq, *oldest)
        {
            held.pop_front();
        }
        held.len() < self.rings.share as usize
    }

    #[cold]
    fn fault(&mut self, e: RingError, wr_id_cq: (CqId, WcOpcode)) -> RingFault {
        match e {
            RingError::InvalidIndex => self.rings.fault = Some(RingMisuse::InvalidIndex),
            RingError::Wqe { wr_id, error } => {
                let cqe = Wc {
                    wr_id,
                    qp_num: self.rings.qpn.0,
                    status: WcStatus::LOC_QP_OP_ERR,
                    opcode: wr_id_cq.1,
                    flags: WcFlags::NONE,
                    ..Wc::default()
                };
                self.cqs.push(wr_id_cq.0, &cqe);
                self.rings.fault = Some(RingMisuse::BadRequest(error.to_string()));
            }
        }
        RingFault
    }
}

impl QpEnv for Env<'_> {
    #[inline]
    fn keys(&self) -> &KeyReader {
        self.keys
    }

    #[inline]
    fn next_send(&mut self) -> Result<Option<&SendWqe>, RingFault> {
        if self.rings.fault.is_some() {
            return Ok(None);
        }
        match self.rings.sq.pop(&mut self.scratch.send) {
            Ok(Some(())) => {
                // Copied: the client may have the slots back.
                self.rings.sq.release_popped();
                Ok(Some(&self.scratch.send))
            }
            Ok(None) => Ok(None),
            Err(e) => {
                self.rings.sq.complete_requests(1);
                let cq = self.rings.send_cq;
                Err(self.fault(e, (cq, WcOpcode::from(Opcode::Send))))
            }
        }
    }

    #[inline]
    fn next_recv(&mut self) -> Result<Option<&RecvWqe>, RingFault> {
        if self.rings.fault.is_some() {
            return Ok(None);
        }
        let shared = self.rings.srq;
        if self.rings.share != 0 && !self.is_within_share() {
            return Ok(None);
        }
        let popped = match shared {
            Some(srq) => self.srqs.pop(srq, &mut self.scratch.recv),
            None => self.rings.rq.pop(&mut self.scratch.recv),
        };
        match popped {
            Ok(Some(())) => {
                if shared.is_none() {
                    self.rings.rq.release_popped();
                }
                Ok(Some(&self.scratch.recv))
            }
            Ok(None) => Ok(None),
            Err(e) => {
                self.rings.rq.complete_requests(1);
                let cq = self.rings.recv_cq;
                Err(self.fault(e, (cq, WcOpcode::RECV)))
            }
        }
    }

    fn next_flushed_recv(&mut self) -> Result<Option<&RecvWqe>, RingFault> {
        if self.rings.srq.is_some() {
            return Ok(None);
        }
        self.next_recv()
    }

    #[inline]
    fn complete_send(&mut self, cqe: Option<&Wc>) {
        // Before the completion can be seen: who polls it may post at once.
        self.rings.sq.complete_requests(1);
        if let Some(cqe) = cqe {
            self.cqs.push(self.rings.send_cq, cqe);
        }
    }

    #[inline]
    fn complete_recv(&mut self, cqe: &Wc) {
        self.rings.rq.complete_requests(1);
        self.cqs.push(self.rings.recv_cq, cqe);
        if self.rings.share != 0 {
            self.rings.held.extend(self.cqs.last(self.rings.recv_cq));
        }
    }

    #[inline]
    fn is_released(&self, owner: ExtBufRef) -> bool {
        self.rings.abandoning || self.ext_bufs.released(owner)
    }

    #[inline]
    fn alloc_ext_buf_ref(&mut self, len: u32) -> ExtBufRef {
        if len <= super::sink::COPY_MAX {
            return ExtBufRef::NONE;
        }
        self.ext_bufs.alloc()
    }

    #[inline]
    fn free_ext_buf_ref(&mut self, owner: ExtBufRef) {
        self.ext_bufs.free(owner);
    }

    fn post_event(&mut self, event: QpEvent) {
        self.rings.events.push(event);
    }
}
