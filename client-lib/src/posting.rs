//! Posting of work requests (ibv_post_send(3), ibv_post_recv(3)): thread-safe, and without a system
//! call unless the worker sleeps.
//!
//! [`SendPosting`] and [`ReceivePosting`] hold the queue while a list is pushed request by request,
//! and publish the requests to the worker when dropped: one doorbell per list.

use crate::credit::{ReceivePlaces, SendPlaces};
use crate::pausable::Slot;
use crate::qp::Posting;
use crate::{Error, Qp, RecvWr, SendData, SendWr, Srq, WrFlags};
use siw_shm::control::QpState;
use siw_shm::spin::SpinGuard;
use siw_shm::{RqProducer, SqProducer, SrqProducer, WqeError};
use std::sync::atomic::Ordering;

/// A send queue to which a list of work requests is being posted.
pub struct SendPosting<'a> {
    qp: &'a Qp,
    sq: Option<SpinGuard<'a, Slot<Posting<SqProducer, SendPlaces>>>>,
    pushed: bool,
}

impl Qp {
    /// Begins a list of send work requests, for the drop-in libraries. It holds the queue's lock
    /// until dropped: the thread must not use the queue pair otherwise meanwhile. Programs use
    /// [`Qp::post_send`]. Refused before the QP is connected.
    #[doc(hidden)]
    #[inline]
    pub fn start_sending(&self) -> Result<SendPosting<'_>, Error> {
        if self.0.watch.qp_state() == QpState::Idle as u32
            && !self.0.early_sends.load(Ordering::Acquire)
        {
            return Err(Error::Invalid("the QP is not connected"));
        }
        Ok(SendPosting {
            qp: self,
            sq: Some(self.0.sq.lock()?),
            pushed: false,
        })
    }

    /// Begins a list of receive work requests; otherwise as [`Self::start_sending`].
    #[doc(hidden)]
    #[inline]
    pub fn start_receiving(&self) -> Result<ReceivePosting<'_>, Error> {
        if self.srq().is_some() {
            return Err(Error::Invalid(
                "the QP receives through its shared receive queue",
            ));
        }
        Ok(ReceivePosting {
            qp: self,
            rq: Some(self.0.rq.lock()?),
        })
    }

    /// Sets whether work requests may be posted while the connection is being set up: they are sent
    /// when it is established, and flushed when it fails and the QP is moved to the error state.
    pub fn allow_early_sends(&self, allow: bool) {
        self.0.early_sends.store(allow, Ordering::Release);
    }
}

impl SendPosting<'_> {
    pub(crate) fn qp_num(&self) -> u32 {
        self.qp.qp_num()
    }

    /// Adds one request. An error leaves the queue unchanged.
    #[inline]
    pub fn push(&mut self, wr: &SendWr<'_>) -> Result<(), Error> {
        let inner = &*self.qp.0;
        let limits = &inner.granted_limits;
        match wr.data {
            SendData::Sges(sges) if sges.len() > limits.max_send_sge as usize => {
                return Err(WqeError::TooManySge(sges.len()).into());
            }
            SendData::Inline(bytes) if bytes.len() > limits.max_inline as usize => {
                return Err(Error::Invalid("more inline data than max_inline"));
            }
            _ => {}
        }
        let mut wr = *wr;
        if inner.sig_all {
            wr.flags = wr.flags | WrFlags::SIGNALED;
        }
        let Some(sq) = &mut self.sq else {
            return Err(Error::Invalid("the list is posted"));
        };
        if sq.places.is_full(&inner.credit, || inner.watch.wr_done()) {
            return Err(Error::QueueFull);
        }
        sq.ring.push(&wr)?;
        let is_signaled = wr.flags.contains(WrFlags::SIGNALED);
        sq.places.take_place(is_signaled, wr.wr_id);
        if let Some(counts) = &mut sq.places.counts {
            let progress = || inner.send_progress();
            counts.push(wr.opcode, limits.max_send_wr, progress);
        }
        self.pushed = true;
        Ok(())
    }

    /// Adds all requests that `push_all` pushes; none of them if it fails.
    pub fn push_all_or_none(
        &mut self,
        push_all: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let before = (self.sq.as_ref().map(|sq| sq.ring.mark()), self.pushed);
        let pushed = push_all(self);
        if pushed.is_err()
            && let (Some(mark), had_pushed) = before
            && let Some(sq) = &mut self.sq
        {
            let requests = sq.ring.withdraw_since(mark);
            sq.places.withdraw(requests);
            self.pushed = had_pushed;
        }
        pushed
    }
}

impl Drop for SendPosting<'_> {
    #[inline]
    fn drop(&mut self) {
        let Some(mut sq) = self.sq.take() else {
            return;
        };
        let ring = self.pushed && sq.ring.publish_posted();
        drop(sq);
        if ring {
            let (qp, watch) = (self.qp, &self.qp.0.watch);
            qp.pd()
                .ctx()
                .ring_doorbell(watch.worker_index(), qp.qp_num());
        }
    }
}

/// A receive queue to which a list of work requests is being posted.
pub struct ReceivePosting<'a> {
    qp: &'a Qp,
    rq: Option<SpinGuard<'a, Slot<Posting<RqProducer, ReceivePlaces>>>>,
}

impl ReceivePosting<'_> {
    pub(crate) fn qp_num(&self) -> u32 {
        self.qp.qp_num()
    }

    /// Adds one request. An error leaves the queue unchanged.
    #[inline]
    pub fn push(&mut self, wr: &RecvWr<'_>) -> Result<(), Error> {
        let inner = &*self.qp.0;
        if wr.sges.len() > inner.granted_limits.max_recv_sge as usize {
            return Err(WqeError::TooManySge(wr.sges.len()).into());
        }
        let Some(rq) = &mut self.rq else {
            return Err(Error::Invalid("the list is posted"));
        };
        if rq.places.is_full(&inner.credit) {
            return Err(Error::QueueFull);
        }
        rq.ring.push(wr)?;
        rq.places.take_place(wr.wr_id);
        Ok(())
    }
}

impl Drop for ReceivePosting<'_> {
    #[inline]
    fn drop(&mut self) {
        let Some(mut rq) = self.rq.take() else {
            return;
        };
        rq.ring.publish_posted();
        drop(rq);
        // In the error state the worker looks at the queue only after a doorbell.
        let (qp, watch) = (self.qp, &self.qp.0.watch);
        if watch.qp_state() >= QpState::Terminate as u32 && watch.mark_pending() {
            qp.pd()
                .ctx()
                .ring_doorbell(watch.worker_index(), qp.qp_num());
        }
    }
}

/// A shared receive queue to which a list of work requests is being posted.
pub struct SharedReceivePosting<'a> {
    max_sge: u32,
    ring: SpinGuard<'a, Slot<SrqProducer>>,
}

impl Srq {
    /// Begins a list of receive work requests; otherwise as [`Qp::start_sending`].
    #[doc(hidden)]
    #[inline]
    pub fn start_receiving(&self) -> Result<SharedReceivePosting<'_>, Error> {
        Ok(SharedReceivePosting {
            max_sge: self.0.max_sge,
            ring: self.0.ring.lock()?,
        })
    }
}

impl SharedReceivePosting<'_> {
    /// Adds one request. An error leaves the queue unchanged.
    #[inline]
    pub fn push(&mut self, wr: &RecvWr<'_>) -> Result<(), Error> {
        if wr.sges.len() > self.max_sge as usize {
            return Err(WqeError::TooManySge(wr.sges.len()).into());
        }
        Ok(self.ring.push(wr)?)
    }
}

impl Drop for SharedReceivePosting<'_> {
    #[inline]
    fn drop(&mut self) {
        self.ring.publish_posted();
    }
}
