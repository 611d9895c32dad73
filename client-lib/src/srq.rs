//! Shared receive queues: receive requests shared by several queue pairs, on any worker
//! (ibv_create_srq(3), ibv_modify_srq(3)).

use crate::pausable::Pausable;
use crate::{Error, Pd, PostError, RecvWr};
use siw_shm::control::{
    CreateSrq, DestroySrq, ModifySrq, QuerySrq, SRQ_LIMIT, SRQ_MAX_WR, SrqReply,
};
use siw_shm::{SharedMemory, SrqGeometry, SrqProducer};
use std::sync::Arc;

/// Parameters of a new shared receive queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SrqInit {
    /// Receive requests that no queue pair has taken yet.
    pub max_wr: u32,
    /// Scatter/gather elements of a request.
    pub max_sge: u32,
    /// Low-water mark: one SRQ_LIMIT_REACHED event when fewer requests are posted; 0 for none.
    pub limit: u32,
    /// Maximum number of requests that one queue pair may hold: being filled, or completed and not
    /// polled. A stream that needs more ends for lack of a buffer, so it cannot starve the others
    /// (RFC 5042 section 6.4.3.1). 0: no limit.
    pub share: u32,
}

impl Default for SrqInit {
    fn default() -> Self {
        SrqInit {
            max_wr: 64,
            max_sge: 1,
            limit: 0,
            share: 0,
        }
    }
}

/// State of a shared receive queue (ibv_query_srq(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SrqAttr {
    /// Maximum number of posted requests.
    pub max_wr: u32,
    /// Scatter/gather elements of a request.
    pub max_sge: u32,
    /// Low-water mark; 0 when the event is not armed. The event disarms it.
    pub limit: u32,
    /// Posted requests that no queue pair has taken.
    pub posted: u32,
    /// [`SrqInit::share`].
    pub share: u32,
}

/// Shared receive queue; clones are the same queue.
#[derive(Clone)]
pub struct Srq(pub(crate) Arc<SrqInner>);

pub(crate) struct SrqInner {
    pd: Pd,
    id: u32,
    pub max_sge: u32,
    pub ring: Pausable<SrqProducer>,
}

impl Drop for SrqInner {
    fn drop(&mut self) {
        self.pd.ctx().free_object(&DestroySrq {
            srq: self.id,
            reserved: 0,
        });
    }
}

impl Pd {
    /// Creates a shared receive queue of this protection domain.
    pub fn create_srq(&self, init: &SrqInit) -> Result<Srq, Error> {
        let create = CreateSrq {
            pd: self.id(),
            max_wr: init.max_wr,
            max_sge: init.max_sge,
            limit: init.limit,
            share: init.share,
            reserved: 0,
        };
        let destroy = |reply: &SrqReply| DestroySrq {
            srq: reply.srq,
            reserved: 0,
        };
        let (reply, ring) =
            self.ctx()
                .create_queue(&create, |reply| reply.mem, map_producer, destroy)?;
        Ok(Srq(Arc::new(SrqInner {
            pd: self.clone(),
            id: reply.srq,
            max_sge: reply.max_sge,
            ring: Pausable::new(ring),
        })))
    }
}

fn map_producer(reply: &SrqReply, region: Arc<SharedMemory>) -> Result<SrqProducer, Error> {
    let geometry = SrqGeometry::from_exact(reply.entries, reply.stride).ok_or(Error::Invalid(
        "siwd sent an impossible shared receive queue geometry",
    ))?;
    Ok(SrqProducer::new(
        region,
        reply.mem.offset as usize,
        geometry,
        reply.max_wr,
    )?)
}

impl Srq {
    /// Id in asynchronous events (SRQ_LIMIT_REACHED).
    pub fn srq_id(&self) -> u32 {
        self.0.id
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Pd {
        &self.0.pd
    }

    /// Posts receive requests in order (ibv_post_srq_recv(3)). After an error the requests before
    /// `index` are posted; [`Error::QueueFull`] when `max_wr` requests are already posted. No
    /// system call.
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

    /// Arms the low-water event: one SRQ_LIMIT_REACHED when fewer than `limit` requests are posted,
    /// immediately if that is already so. 0 disarms.
    pub fn arm_limit(&self, limit: u32) -> Result<(), Error> {
        self.0.pd.ctx().call_daemon(&ModifySrq {
            srq: self.0.id,
            mask: SRQ_LIMIT,
            max_wr: 0,
            limit,
        })?;
        Ok(())
    }

    /// Makes the queue larger or smaller; posted requests stay, in order. EINVAL when there are
    /// more of them than the new size. Posting waits meanwhile.
    pub fn resize(&self, max_wr: u32) -> Result<(), Error> {
        let resize = ModifySrq {
            srq: self.0.id,
            mask: SRQ_MAX_WR,
            max_wr,
            limit: 0,
        };
        // The posted requests move: none may be posted into the old ring once the daemon has begun.
        let mut pause = self.0.ring.pause()?;
        let ctx = self.0.pd.ctx();
        let (_, new) = ctx.replace_queue(&resize, |reply| reply.mem, map_producer)?;
        pause.with_value(|ring| *ring = new)?;
        Ok(())
    }

    /// Queries the state from the daemon.
    pub fn query(&self) -> Result<SrqAttr, Error> {
        let (reply, _) = self.0.pd.ctx().call_daemon(&QuerySrq {
            srq: self.0.id,
            reserved: 0,
        })?;
        Ok(SrqAttr {
            max_wr: reply.max_wr,
            max_sge: reply.max_sge,
            limit: reply.limit,
            posted: reply.posted,
            share: reply.share,
        })
    }
}
