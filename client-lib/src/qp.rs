//! Queue pairs: creation, states, connecting. Posting is in `posting.rs`.

use crate::cq::LostRequests;
use crate::credit::{Credit, ReceivePlaces, SendPlaces};
use crate::finished::{Finished, Progress, ReceiveCounts, SendCounts};
use crate::locking::Inherited;
use crate::pausable::Pausable;
use crate::{Cq, Error, Pd, PostError, RecvWr, SendWr, Srq, Wc, WcOpcode, WcStatus};
use siw_shm::control::{
    CreateQp, DISCONNECT_TO_ERROR, DestroyQp, Disconnect, FEATURE_FAILURE_MARKS,
    FEATURE_QUIET_DRAIN, FEATURE_STREAMS, FinalSend, MODIFY_QUIET_DRAIN, ModifyQp, QpReply,
    QpState, QueryQp,
};
use siw_shm::work_queue::{SqWatch, state_offset};
use siw_shm::{RqProducer, SharedMemory, SqProducer};
use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

/// Parameters of a new queue pair (ibv_create_qp(3)).
#[derive(Debug, Clone, Copy)]
pub struct QpInit {
    /// Send work requests that are posted and whose completion has not been polled.
    pub max_send_wr: u32,
    /// Receive work requests, likewise.
    pub max_recv_wr: u32,
    /// Scatter/gather elements of a send work request.
    pub max_send_sge: u32,
    /// Scatter/gather elements of a receive work request.
    pub max_recv_sge: u32,
    /// Maximum length of inline data in bytes.
    pub max_inline: u32,
    /// Every send work request completes visibly.
    pub sq_sig_all: bool,
}

impl Default for QpInit {
    fn default() -> Self {
        QpInit {
            max_send_wr: 64,
            max_recv_wr: 64,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 32,
            sq_sig_all: false,
        }
    }
}

/// Queue pair states of verbs (`enum ibv_qp_state`), mapped as in Linux siw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum VerbsQpState {
    /// No work request may be posted.
    Reset = 0,
    /// Receive requests may be posted.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to send.
    Rts = 3,
    /// The send queue drains, or is drained.
    Sqd = 4,
    /// The send queue has failed.
    Sqe = 5,
    /// All work requests are flushed.
    Err = 6,
}

impl From<QpState> for VerbsQpState {
    /// IDLE is INIT: receive requests may be posted. CLOSING sends no further requests, as SQD;
    /// TERMINATE is SQE.
    fn from(s: QpState) -> VerbsQpState {
        match s {
            QpState::Idle => VerbsQpState::Init,
            QpState::Rtr => VerbsQpState::Rtr,
            QpState::Rts => VerbsQpState::Rts,
            QpState::Closing | QpState::Sqd => VerbsQpState::Sqd,
            QpState::Terminate => VerbsQpState::Sqe,
            QpState::Error => VerbsQpState::Err,
        }
    }
}

/// State of a QP (ibv_query_qp(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpAttr {
    /// None for a state that only newer daemons know.
    pub state: Option<QpState>,
    /// In SQD: requests that were started have not all completed.
    pub draining: bool,
    /// Current MULPDU, the largest ULPDU of an FPDU; 0 without a connection.
    pub mulpdu: u32,
    /// Reads the peer may have outstanding.
    pub ird: u32,
    /// Reads this side may have outstanding.
    pub ord: u32,
    /// Address of this side, when connected.
    pub local: Option<SocketAddr>,
    /// The peer's address, when connected.
    pub peer: Option<SocketAddr>,
}

/// Queue pair; clones are the same QP.
#[derive(Clone)]
pub struct Qp(pub(crate) Arc<QpInner>);

/// One end of a ring, and the state of its slots.
pub(crate) struct Posting<P, T> {
    pub ring: P,
    pub places: T,
}

pub(crate) struct QpInner {
    pub sq: Pausable<Posting<SqProducer, SendPlaces>>,
    pub rq: Pausable<Posting<RqProducer, ReceivePlaces>>,
    pub credit: Arc<Credit>,
    pub watch: SqWatch,
    pub granted_limits: QpReply,
    region: Arc<SharedMemory>,
    pub sig_all: bool,
    /// Work requests may be posted before the connection is established; see
    /// [`Qp::allow_early_sends`].
    pub early_sends: AtomicBool,
    pub pd: Pd,
    send_cq: Cq,
    recv_cq: Cq,
    srq: Option<Srq>,
}

impl QpInner {
    /// Progress of the send queue.
    pub fn send_progress(&self) -> Progress {
        // The number before the failure is read after the count: see `SqWatch`.
        let done = self.watch.wr_done();
        Progress {
            done,
            before_failure: self.watch.sends_before_failure(),
        }
    }

    /// Progress of the receive queue, whose ring is `queue`.
    pub fn receive_progress(&self, queue: &RqProducer) -> Progress {
        let done = queue.wr_done();
        Progress {
            done,
            before_failure: self.watch.receives_before_failure(),
        }
    }
}

impl LostRequests for QpInner {
    fn flush_into(&self, cq: u32, flushed: &mut Vec<Wc>) {
        let mut push = |wr_id, opcode| {
            flushed.push(Wc {
                wr_id,
                opcode,
                status: WcStatus::WR_FLUSH_ERR,
                qp_num: self.granted_limits.qp_num,
                ..Wc::default()
            });
        };
        if self.send_cq.id() == cq {
            let (credit, done) = (&self.credit, self.watch.wr_done());
            let Ok(mut sends) = self.sq.lock() else {
                return;
            };
            sends
                .places
                .flush(credit, done, |wr_id| push(wr_id, WcOpcode::SEND));
        }
        // Requests of a shared receive queue are not assigned to a queue pair yet.
        if self.recv_cq.id() == cq && self.srq.is_none() {
            let Ok(mut receives) = self.rq.lock() else {
                return;
            };
            receives
                .places
                .flush(&self.credit, |wr_id| push(wr_id, WcOpcode::RECV));
        }
    }
}

impl QpInner {
    /// Checks whether every completion is polled, so that no more can come. (Requests that the worker
    /// counts as finished may still complete.)
    fn is_idle(&self) -> Result<bool, Inherited> {
        let done = self.watch.wr_done();
        Ok(self.srq.is_none()
            && self.sq.lock()?.places.is_idle(&self.credit, done)
            && self.rq.lock()?.places.is_idle(&self.credit))
    }
}

impl Drop for QpInner {
    fn drop(&mut self) {
        // In a child of fork(2) the queue pair is that of the parent.
        let Ok(is_idle) = self.is_idle() else {
            return;
        };
        let qp_num = self.granted_limits.qp_num;
        let destroy = DestroyQp {
            qp_num,
            reserved: 0,
        };
        let ctx = self.pd.ctx();
        // The number is reused by a later queue pair, for which no old state may remain. It cannot
        // have the number before the request is sent.
        let queues = [&self.send_cq, &self.recv_cq];
        for cq in queues {
            let Ok(mut polling) = cq.polling_state().lock() else {
                return;
            };
            polling.credits.detach_qp(qp_num);
            polling.queue_pairs.remove(&qp_num);
            if !is_idle {
                polling.purge_qp(qp_num);
            }
        }
        if !is_idle {
            ctx.note_stale_completions(qp_num, queues.into_iter().map(Cq::stale_completions));
        }
        if is_idle {
            ctx.free_without_waiting(&destroy);
        } else {
            ctx.free_object(&destroy);
        }
    }
}

impl Pd {
    /// Creates a queue pair that completes sends into one queue and receives into another (or the
    /// same).
    pub fn create_qp(&self, send_cq: &Cq, recv_cq: &Cq, init: &QpInit) -> Result<Qp, Error> {
        self.create_with(send_cq, recv_cq, None, init, FinalSend::default())
    }

    /// Creates a queue pair for a stream. If the process ends or executes another program while the
    /// stream is connected, the daemon sends the requests posted to it, then a SEND of `final_send`
    /// (at most 12 bytes), and closes the connection. The connection of any other queue pair is reset,
    /// and so is that of a stream if the daemon is older than this library.
    pub fn create_stream_qp(
        &self,
        send_cq: &Cq,
        recv_cq: &Cq,
        init: &QpInit,
        final_send: &[u8],
    ) -> Result<Qp, Error> {
        let message = FinalSend::new(final_send);
        let message = message.ok_or(Error::Invalid("more than 12 bytes of the final SEND"))?;
        let is_known = self.ctx().has_feature(FEATURE_STREAMS);
        let final_send = if is_known {
            message
        } else {
            FinalSend::default()
        };
        self.create_with(send_cq, recv_cq, None, init, final_send)
    }

    /// Creates a queue pair that takes receive requests from a shared receive queue of this
    /// protection domain; `max_recv_wr` and `max_recv_sge` are ignored.
    pub fn create_qp_with_srq(
        &self,
        send_cq: &Cq,
        recv_cq: &Cq,
        srq: &Srq,
        init: &QpInit,
    ) -> Result<Qp, Error> {
        self.ctx()
            .check_same(srq.pd().ctx(), "shared receive queue")?;
        let init = QpInit {
            max_recv_wr: 0,
            max_recv_sge: 0,
            ..*init
        };
        self.create_with(send_cq, recv_cq, Some(srq), &init, FinalSend::default())
    }

    fn create_with(
        &self,
        send_cq: &Cq,
        recv_cq: &Cq,
        srq: Option<&Srq>,
        init: &QpInit,
        final_send: FinalSend,
    ) -> Result<Qp, Error> {
        for cq in [send_cq, recv_cq] {
            self.ctx().check_same(cq.client(), "completion queue")?;
        }
        let create = CreateQp {
            pd: self.id(),
            send_cq: send_cq.id(),
            recv_cq: recv_cq.id(),
            max_send_wr: init.max_send_wr,
            max_recv_wr: init.max_recv_wr,
            max_send_sge: init.max_send_sge,
            max_recv_sge: init.max_recv_sge,
            max_inline: init.max_inline,
            sq_sig_all: init.sq_sig_all.into(),
            srq: srq.map_or(0, Srq::id),
            final_send,
        };
        let credit = Arc::new(Credit::default());
        let install = |reply: &QpReply, region: Arc<SharedMemory>| {
            let (sq, rq) = map_rings(&region, reply)?;
            let offset = state_offset(reply.rq_offset as usize, reply.rq_slots);
            let at = (reply.mem.offset as usize).saturating_add(offset);
            let watch = sq.new_watch(region.clone(), at)?;
            self.ctx().discard_stale_completions(reply.qp_num);
            for cq in [send_cq, recv_cq] {
                let mut polling = cq.polling_state().lock()?;
                polling.credits.attach_qp(reply.qp_num, &credit);
            }
            Ok((region, sq, rq, watch))
        };
        let destroy = |reply: &QpReply| DestroyQp {
            qp_num: reply.qp_num,
            reserved: 0,
        };
        let (reply, (region, sq, rq, watch)) =
            self.ctx()
                .create_queue(&create, |reply| reply.mem, install, destroy)?;
        let queue_pair = Arc::new(QpInner {
            watch,
            sq: Pausable::new(Posting {
                ring: sq,
                places: SendPlaces::new(reply.max_send_wr, &credit),
            }),
            rq: Pausable::new(Posting {
                ring: rq,
                places: ReceivePlaces::new(reply.max_recv_wr, &credit),
            }),
            credit,
            granted_limits: reply,
            region,
            sig_all: init.sq_sig_all,
            early_sends: AtomicBool::new(false),
            pd: self.clone(),
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            srq: srq.cloned(),
        });
        for cq in [send_cq, recv_cq] {
            let weak: Weak<QpInner> = Arc::downgrade(&queue_pair);
            let mut polling = cq.polling_state().lock()?;
            polling.queue_pairs.insert(reply.qp_num, weak);
        }
        Ok(Qp(queue_pair))
    }
}

/// Maps the application's ends of both rings, at their beginning.
fn map_rings(
    region: &Arc<SharedMemory>,
    reply: &QpReply,
) -> Result<(SqProducer, RqProducer), Error> {
    let sq_at = reply.mem.offset as usize;
    let rq_at = sq_at.saturating_add(reply.rq_offset as usize);
    let sq = SqProducer::new(region.clone(), sq_at, reply.sq_slots, reply.max_send_wr)?;
    let rq = RqProducer::new(region.clone(), rq_at, reply.rq_slots, reply.max_recv_wr)?;
    Ok((sq, rq))
}

impl Qp {
    /// QP number, unique in the daemon; completions and events carry it.
    pub fn qp_num(&self) -> u32 {
        self.0.granted_limits.qp_num
    }

    /// Granted limits, at least those requested.
    pub fn granted_limits(&self) -> QpInit {
        let granted = &self.0.granted_limits;
        QpInit {
            max_send_wr: granted.max_send_wr,
            max_recv_wr: granted.max_recv_wr,
            max_send_sge: granted.max_send_sge,
            max_recv_sge: granted.max_recv_sge,
            max_inline: granted.max_inline,
            sq_sig_all: self.0.sig_all,
        }
    }

    pub(crate) fn send_cq(&self) -> &Cq {
        &self.0.send_cq
    }

    pub(crate) fn recv_cq(&self) -> &Cq {
        &self.0.recv_cq
    }

    /// Its shared receive queue, if it has one.
    pub fn srq(&self) -> Option<&Srq> {
        self.0.srq.as_ref()
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Pd {
        &self.0.pd
    }

    /// Posts work requests in order (ibv_post_send(3)). After an error the requests before `index`
    /// are posted. A signaled request occupies its slot in the queue until its completion is
    /// polled: on [`Error::QueueFull`] polling may be due. Requests posted in the error state
    /// complete as flushed; before the QP is connected posting is refused.
    #[inline]
    pub fn post_send(&self, list: &[SendWr<'_>]) -> Result<(), PostError> {
        let mut posting = self
            .start_sending()
            .map_err(|error| PostError { index: 0, error })?;
        for (index, wr) in list.iter().enumerate() {
            posting
                .push(wr)
                .map_err(|error| PostError { index, error })?;
        }
        Ok(())
    }

    /// Posts receive requests in order (ibv_post_recv(3)). Each occupies its slot in the queue
    /// until its completion is polled.
    #[inline]
    pub fn post_recv(&self, list: &[RecvWr<'_>]) -> Result<(), PostError> {
        let mut posting = self
            .start_receiving()
            .map_err(|error| PostError { index: 0, error })?;
        for (index, wr) in list.iter().enumerate() {
            posting
                .push(wr)
                .map_err(|error| PostError { index, error })?;
        }
        Ok(())
    }

    /// State as last written by the daemon, without a system call. RTR and SQD show as RTS: see
    /// [`Self::query`].
    pub fn state(&self) -> Option<QpState> {
        QpState::from_u32(self.0.watch.qp_state())
    }

    /// Number of unfinished send work requests.
    pub fn outstanding_sends(&self) -> u32 {
        let sends = self.0.sq.lock();
        sends.map_or(0, |sends| sends.ring.count_outstanding())
    }

    /// Moves the QP to the error state: outstanding work requests are flushed.
    pub fn set_error(&self) -> Result<(), Error> {
        self.modify(QpState::Error)
    }

    /// Stops sending (verbs' SQD): started work requests complete, those posted later wait.
    /// SQ_DRAINED follows when all have completed. Only in RTS.
    pub fn drain_start(&self) -> Result<(), Error> {
        self.modify(QpState::Sqd)
    }

    /// As [`Self::drain_start`], but SQ_DRAINED does not follow ([`QpAttr::draining`] tells the end of the
    /// drain). An older daemon sends it all the same.
    pub fn drain_start_quietly(&self) -> Result<(), Error> {
        let ctx = self.0.pd.ctx();
        let is_known = ctx.has_feature(FEATURE_QUIET_DRAIN);
        self.request_state(QpState::Sqd, if is_known { MODIFY_QUIET_DRAIN } else { 0 })
    }

    /// Resumes sending after [`Self::drain_start`].
    pub fn drain_end(&self) -> Result<(), Error> {
        self.modify(QpState::Rts)
    }

    /// Changes the state (ibv_modify_qp(3)). CLOSING disconnects, SQD and RTS stop and resume
    /// sending, TERMINATE sends a Terminate to the peer, ERROR flushes, IDLE is [`Self::reset`].
    pub fn modify(&self, to: QpState) -> Result<(), Error> {
        if to == QpState::Idle {
            return self.reset();
        }
        self.request_state(to, 0)
    }

    fn request_state(&self, to: QpState, flags: u32) -> Result<(), Error> {
        self.0.pd.ctx().call_daemon(&ModifyQp {
            qp_num: self.qp_num(),
            state: to as u32,
            flags,
            denied_access: 0,
        })?;
        Ok(())
    }

    /// Returns to IDLE from any state (verbs' RESET): the connection is reset, both queues are
    /// emptied, unpolled completions are removed, and the QP can be connected again. Posting waits
    /// meanwhile.
    pub fn reset(&self) -> Result<(), Error> {
        let mut send = self.0.sq.pause()?;
        let mut receive = self.0.rq.pause()?;
        send.with_value(|posting| {
            if let Some(counts) = &mut posting.places.counts {
                counts.advance(self.0.send_progress());
            }
        })?;
        receive.with_value(|posting| {
            let progress = self.0.receive_progress(&posting.ring);
            if let Some(counts) = &mut posting.places.counts {
                counts.advance(progress);
            }
        })?;
        self.0.pd.ctx().call_daemon(&ModifyQp {
            qp_num: self.qp_num(),
            state: QpState::Idle as u32,
            flags: 0,
            denied_access: 0,
        })?;
        let (sends, receives) = map_rings(&self.0.region, &self.0.granted_limits)?;
        for cq in [&self.0.send_cq, &self.0.recv_cq] {
            cq.polling_state().lock()?.purge_qp(self.qp_num());
        }
        self.allow_early_sends(false);
        let (granted, credit) = (&self.0.granted_limits, &self.0.credit);
        send.with_value(|posting| {
            posting.ring = sends;
            let counts = posting.places.counts.take();
            posting.places = SendPlaces::new(granted.max_send_wr, credit);
            posting.places.counts = counts.map(SendCounts::restart);
        })?;
        receive.with_value(|posting| {
            posting.ring = receives;
            let counts = posting.places.counts.take();
            posting.places = ReceivePlaces::new(granted.max_recv_wr, credit);
            posting.places.counts = counts.map(ReceiveCounts::restart);
        })?;
        Ok(())
    }

    /// Queries the state from the daemon.
    pub fn query(&self) -> Result<QpAttr, Error> {
        let (reply, _) = self.0.pd.ctx().call_daemon(&QueryQp {
            qp_num: self.qp_num(),
            reserved: 0,
        })?;
        Ok(QpAttr {
            state: QpState::from_u32(reply.state),
            draining: reply.draining != 0,
            mulpdu: reply.mulpdu,
            ird: reply.ird,
            ord: reply.ord,
            local: reply.local.to_socket_addr(),
            peer: reply.peer.to_socket_addr(),
        })
    }

    /// Called when a request was accepted with this QP: work requests posted from now on are sent
    /// once the worker has it.
    pub(crate) fn allow_posting(&self) {
        self.allow_early_sends(true);
    }

    /// Closes gracefully; DISCONNECTED follows.
    pub fn disconnect(&self) -> Result<(), Error> {
        self.request_disconnect(0)
    }

    /// As [`Self::disconnect`], but the QP is not for another connection: it ends in ERROR, and receives posted
    /// later are flushed, too.
    pub fn disconnect_for_good(&self) -> Result<(), Error> {
        self.request_disconnect(DISCONNECT_TO_ERROR)
    }

    fn request_disconnect(&self, flags: u32) -> Result<(), Error> {
        let disconnect = Disconnect {
            qp_num: self.qp_num(),
            flags,
        };
        if self.0.watch.qp_state() == QpState::Idle as u32 {
            // Only the daemon knows whether a connection is being set up.
            self.0.pd.ctx().call_daemon(&disconnect)?;
        } else {
            // It was connected, so the daemon cannot refuse: no need to wait.
            self.0.pd.ctx().post_unanswered(&disconnect);
            if !self.0.pd.ctx().known_alive() {
                return Err(Error::DaemonGone);
            }
        }
        Ok(())
    }
}

impl Qp {
    /// Starts counting finished work requests; [`Self::finished`] returns the counts. Has no effect if
    /// they are counted already. Fails with EOPNOTSUPP if the daemon is older than this library, and
    /// with EINVAL while send requests are outstanding, whose kinds are not known.
    pub fn start_counting(&self) -> Result<(), Error> {
        let ctx = self.pd().ctx();
        if !ctx.has_feature(FEATURE_FAILURE_MARKS) {
            return Err(Error::Refused {
                errno: libc::EOPNOTSUPP,
                reason: "this siwd does not count finished work requests: update it".into(),
            });
        }
        let mut sends = self.0.sq.lock()?;
        if sends.places.counts.is_none() {
            if sends.ring.count_outstanding() != 0 {
                return Err(Error::Invalid(
                    "counting must start before send requests are posted",
                ));
            }
            sends.places.counts = Some(SendCounts::new(self.0.watch.wr_done()));
        }
        drop(sends);
        let mut receives = self.0.rq.lock()?;
        if receives.places.counts.is_none() {
            let done = receives.ring.wr_done();
            receives.places.counts = Some(ReceiveCounts::new(done));
        }
        Ok(())
    }

    /// Work requests that have finished since [`Self::start_counting`]; all zero before it. Makes no
    /// system call. Receives are counted modulo 2^32 between two calls.
    pub fn finished(&self) -> Finished {
        let mut finished = Finished::default();
        let Ok(mut sends) = self.0.sq.lock() else {
            return finished;
        };
        if let Some(counts) = &mut sends.places.counts {
            counts.advance(self.0.send_progress());
            finished = counts.totals;
        }
        drop(sends);
        let Ok(mut receives) = self.0.rq.lock() else {
            return finished;
        };
        let progress = self.0.receive_progress(&receives.ring);
        if let Some(counts) = &mut receives.places.counts {
            counts.advance(progress);
            finished.receives = counts.totals;
        }
        finished
    }
}
