//! ibv_resize_cq(3) and ibv_modify_cq(3).
//!
//! ```text
//! RESIZE_CQ -> new rings to each worker -> barriers -> reply: no worker writes to the old rings
//! the client empties the old rings -> FREE_CQ_RING -> their memory is freed
//! ```

use nix::libc;
use siw_shm::control::messages as m;
use siw_shm::{CqGeometry, CqProducer};

use super::ControlThread;
use super::pending::{DeferredRequest, PendingReply};
use super::requests::*;
use crate::ids::{ClientId, CqId};
use crate::worker::completion_queues::CqModeration;
use crate::worker::messages::Command;

impl ControlThread {
    pub(super) fn cq_geometry(&self, cqe: u32) -> Result<CqGeometry, Refusal> {
        let workers = self.workers.worker_count() as u32;
        let deepest = self.config.limits.completions;
        if cqe == 0 || cqe > deepest {
            return Err(Refusal::new(
                libc::EINVAL,
                format!("{cqe} entries: 1 to {deepest} are allowed"),
            ));
        }
        CqGeometry::new(cqe, workers)
            .ok_or_else(|| Refusal::new(libc::EINVAL, format!("{cqe} entries are too many")))
    }

    pub(super) fn resize_cq(&mut self, id: ClientId, request: &m::ResizeCq) -> Outcome {
        let geometry = self.cq_geometry(request.cqe)?;
        let client = self.resources.client_mut(id)?;
        let number = CqId(request.cq);
        let cq = client
            .cqs
            .get(&number)
            .ok_or_else(|| Refusal::no_such("completion queue", request.cq))?;
        if cq.old.is_some() {
            return Err(Refusal::new(
                libc::EBUSY,
                "the rings from before the last resize are not empty yet",
            ));
        }
        let huge = self.config.hugepages;
        let mem = self.resources.alloc_queue(id, geometry.len, huge)?;
        let client = self.resources.client_mut(id)?;
        let producers = (0..geometry.workers)
            .map(|worker| CqProducer::new(mem.region.clone(), mem.offset, geometry, worker))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| Refusal::new(libc::EINVAL, error.to_string()))?;
        if let Some(cq) = client.cqs.get_mut(&number) {
            cq.old = Some(std::mem::replace(&mut cq.mem, mem));
        }
        for (worker, producer) in producers.into_iter().enumerate() {
            let producer = Box::new(producer);
            let cq = number;
            self.workers
                .post_command(worker, Command::ResizeCq { cq, producer });
        }
        let (token, left) = self.workers.post_barrier(Some(id));
        Ok(Served::Deferred(PendingReply::ResizeCq {
            cq: number,
            geometry,
            token,
            left,
        }))
    }

    pub(super) fn finish_resize_cq(&mut self, id: ClientId) {
        let Some(client) = self.resources.clients.get_mut(&id) else {
            return;
        };
        let waits =
            |waiting: &mut DeferredRequest| matches!(waiting.what, PendingReply::ResizeCq { .. });
        let Some(DeferredRequest {
            seq,
            what: PendingReply::ResizeCq { cq, geometry, .. },
        }) = client.waiting.take_if(waits)
        else {
            return;
        };
        if let Some(queue) = client.cqs.get(&cq) {
            let fd = queue.mem.region.memfd().filter(|_| queue.mem.new_region);
            let reply = cq_reply(cq, geometry, &queue.mem);
            let _ = client
                .conn
                .send_reply::<m::ResizeCq>(seq, &reply, fd.as_slice());
        }
        self.on_answered(id);
    }

    pub(super) fn free_cq_ring(
        &mut self,
        id: ClientId,
        seq: u32,
        request: &m::FreeCqRing,
    ) -> Outcome {
        let client = self.resources.client_mut(id)?;
        let cq = client
            .cqs
            .get_mut(&CqId(request.cq))
            .ok_or_else(|| Refusal::no_such("completion queue", request.cq))?;
        let old = cq
            .old
            .take()
            .ok_or_else(|| Refusal::new(libc::EINVAL, "the completion queue was not resized"))?;
        client.queues.free(old);
        if request.notify != 0 {
            self.workers.post_command(
                0,
                Command::RaiseCq {
                    cq: CqId(request.cq),
                },
            );
        }
        send_reply::<m::FreeCqRing>(self.resources.client_mut(id)?, seq, &EMPTY)
    }

    pub(super) fn moderate_cq(
        &mut self,
        id: ClientId,
        seq: u32,
        request: &m::ModerateCq,
    ) -> Outcome {
        if !self
            .resources
            .client_mut(id)?
            .cqs
            .contains_key(&CqId(request.cq))
        {
            return Err(Refusal::no_such("completion queue", request.cq));
        }
        // A count of 1 or a period of 0 means an event for every completion: no moderation.
        let moderation = (request.count > 1 && request.period > 0).then(|| CqModeration {
            count: request.count.into(),
            period: u64::from(request.period) * 1000,
        });
        for worker in 0..self.workers.worker_count() {
            let cq = CqId(request.cq);
            self.workers
                .post_command(worker, Command::ModerateCq { cq, moderation });
        }
        send_reply::<m::ModerateCq>(self.resources.client_mut(id)?, seq, &EMPTY)
    }
}

pub(super) fn cq_reply(
    cq: CqId,
    geometry: CqGeometry,
    mem: &siw_memory::queue_allocator::QueueMemory,
) -> m::CqReply {
    m::CqReply {
        cq: cq.0,
        entries: geometry.entries,
        workers: geometry.workers,
        reserved: 0,
        mem: mem.into(),
    }
}
