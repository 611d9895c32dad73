//! ibv_resize_cq(3) and ibv_modify_cq(3).
//!
//! ```text
//! RESIZE_CQ -> new rings, told to each worker -> fences -> reply: nobody writes to the old ones
//! the client empties the old rings -> FREE_CQ_RING -> their memory is free
//! ```

use nix::libc;
use siw_shm::control::messages as m;
use siw_shm::{CqGeometry, CqProducer};

use super::requests::*;
use super::{Control, Pending, Waiting};
use crate::ids::{ClientId, CqId};
use crate::worker::completion_queues::CqModeration;
use crate::worker::messages::Command;

impl Control {
    pub(super) fn cq_geometry(&self, cqe: u32) -> Result<CqGeometry, Refusal> {
        let workers = self.config.mailboxes.len() as u32;
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

    pub(super) fn resize_cq(&mut self, id: ClientId, r: &m::ResizeCq) -> Outcome {
        let geometry = self.cq_geometry(r.cqe)?;
        let c = self.client(id)?;
        let number = CqId(r.cq);
        let cq = c
            .cqs
            .get(&number)
            .ok_or_else(|| Refusal::unknown("completion queue", r.cq))?;
        if cq.old.is_some() {
            return Err(Refusal::new(
                libc::EBUSY,
                "the rings from before the last resize are not emptied yet",
            ));
        }
        let mem = c
            .queues
            .alloc(geometry.len)
            .map_err(|e| Refusal::new(libc::ENOMEM, e.to_string()))?;
        let producers = (0..geometry.workers_mask)
            .map(|w| CqProducer::new(mem.region.clone(), mem.offset, geometry, w))
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| Refusal::new(libc::EINVAL, e.to_string()))?;
        if let Some(cq) = c.cqs.get_mut(&number) {
            cq.old = Some(std::mem::replace(&mut cq.mem, mem));
        }
        for (w, producer) in producers.into_iter().enumerate() {
            let producer = Box::new(producer);
            let cq = number;
            self.command(w, Command::ResizeCq { cq, producer });
        }
        let (token, left) = self.fence();
        Ok(Done::Wait(Pending::ResizeCq {
            cq: number,
            geometry,
            token,
            left,
        }))
    }

    pub(super) fn finish_resize_cq(&mut self, id: ClientId) {
        let Some(c) = self.clients.get_mut(&id) else {
            return;
        };
        let waits = |w: &mut Waiting| matches!(w.what, Pending::ResizeCq { .. });
        let Some(Waiting {
            seq,
            what: Pending::ResizeCq { cq, geometry, .. },
        }) = c.waiting.take_if(waits)
        else {
            return;
        };
        if let Some(q) = c.cqs.get(&cq) {
            let fd = q.mem.region.memfd().filter(|_| q.mem.new_region);
            let reply = cq_reply(cq, geometry, &q.mem);
            let _ = c.conn.send_reply::<m::ResizeCq>(seq, &reply, fd.as_slice());
        }
        self.answered(id);
    }

    pub(super) fn free_cq_ring(&mut self, id: ClientId, seq: u32, r: &m::FreeCqRing) -> Outcome {
        let c = self.client(id)?;
        let cq = c
            .cqs
            .get_mut(&CqId(r.cq))
            .ok_or_else(|| Refusal::unknown("completion queue", r.cq))?;
        let old = cq
            .old
            .take()
            .ok_or_else(|| Refusal::new(libc::EINVAL, "the completion queue was not resized"))?;
        c.queues.free(old);
        if r.notify != 0 {
            self.command(0, Command::RaiseCq { cq: CqId(r.cq) });
        }
        send::<m::FreeCqRing>(self.client(id)?, seq, &EMPTY)
    }

    pub(super) fn moderate_cq(&mut self, id: ClientId, seq: u32, r: &m::ModerateCq) -> Outcome {
        if !self.client(id)?.cqs.contains_key(&CqId(r.cq)) {
            return Err(Refusal::unknown("completion queue", r.cq));
        }
        // One completion raises the event at once, and so does one that waits for no time.
        let moderation = (r.count > 1 && r.period > 0).then(|| CqModeration {
            count: r.count.into(),
            period: u64::from(r.period) * 1000,
        });
        for w in 0..self.config.mailboxes.len() {
            let cq = CqId(r.cq);
            self.command(w, Command::ModerateCq { cq, moderation });
        }
        send::<m::ModerateCq>(self.client(id)?, seq, &EMPTY)
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
        workers: geometry.workers_mask,
        reserved: 0,
        mem: mem.into(),
    }
}
