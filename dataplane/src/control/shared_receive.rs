//! Shared receive queues: requests of clients.

use std::sync::Arc;

use nix::libc;
use siw_memory::queue_allocator::QueueMemory;
use siw_shm::control::AsyncEventKind;
use siw_shm::control::messages as m;
use siw_shm::{LowWaterMark, SrqConsumer, SrqGeometry, SrqRing, wqe};

use super::requests::*;
use super::{Control, Pending, Waiting};
use crate::ids::{ClientId, PdId, SrqId};
use crate::worker::messages::Command;
use crate::worker::shared_receive_queues::WorkerSrq;

/// Most requests that one shared receive queue holds: ten work queues, as Linux siw has it.
pub const WORK_REQUESTS_FACTOR: u32 = 10;

/// A shared receive queue of a client.
pub struct Srq {
    pub pd: PdId,
    pub qps: u32,
    /// Requests that one queue pair may hold; 0: no bound.
    pub share: u32,
    max_wr: u32,
    max_sge: u32,
    low: Arc<LowWaterMark>,
    /// The ring in use last; before it those of earlier sizes that a worker may still hold.
    rings: Vec<(Arc<SrqRing>, QueueMemory)>,
}

impl Srq {
    fn posted(&self) -> u32 {
        self.rings.first().map_or(0, |(r, _)| r.count_posted())
    }

    fn reply(&self, srq: SrqId, g: SrqGeometry) -> Option<m::SrqReply> {
        let (_, mem) = self.rings.last()?;
        Some(m::SrqReply {
            srq: srq.0,
            entries: g.entries,
            stride: g.stride,
            max_wr: self.max_wr,
            max_sge: self.max_sge,
            share: self.share,
            mem: mem.into(),
        })
    }
}

fn unknown(srq: SrqId) -> Refusal {
    Refusal::unknown("shared receive queue", srq.0)
}

impl Control {
    fn srq_geometry(&self, max_wr: u32, max_sge: u32) -> Result<SrqGeometry, Refusal> {
        let deepest = srq_depth(&self.config.limits);
        if max_wr == 0 || max_wr > deepest {
            return Err(Refusal::new(
                libc::EINVAL,
                format!("{max_wr} work requests: 1 to {deepest} are allowed"),
            ));
        }
        if max_sge > wqe::MAX_SGE as u32 {
            return Err(Refusal::new(
                libc::EINVAL,
                format!(
                    "{max_sge} scatter elements: at most {} are allowed",
                    wqe::MAX_SGE
                ),
            ));
        }
        SrqGeometry::new(max_wr, max_sge)
            .ok_or_else(|| Refusal::new(libc::EINVAL, "the queue would be too long"))
    }

    pub(super) fn create_srq(&mut self, id: ClientId, seq: u32, r: &m::CreateSrq) -> Outcome {
        let geometry = self.srq_geometry(r.max_wr, r.max_sge.max(1))?;
        let most = self.config.limits.queue_pairs_per_client;
        check_limit(r.limit, r.max_wr)?;
        let c = self.client(id)?;
        if c.srqs.len() >= most as usize {
            return Err(Refusal::limit("shared receive queues", most.into()));
        }
        let pd = c
            .pds
            .get_mut(&PdId(r.pd))
            .ok_or_else(|| Refusal::unknown("protection domain", r.pd))?;
        let mem = c
            .queues
            .alloc(geometry.len)
            .map_err(|e| Refusal::new(libc::ENOMEM, e.to_string()))?;
        let ring = SrqRing::new(mem.region.clone(), mem.offset, geometry)
            .map_err(|e| Refusal::new(libc::EINVAL, e.to_string()))?;
        pd.users += 1;
        let number = SrqId(self.srqs.take());
        let low = Arc::new(LowWaterMark::default());
        for w in 0..self.config.mailboxes.len() {
            let end = WorkerSrq {
                id: number,
                client: id,
                consumer: SrqConsumer::new(ring.clone(), low.clone()),
            };
            self.command(w, Command::AddSrq(Box::new(end)));
        }
        let owed = r.limit > 0 && low.arm_event(r.limit, &ring);
        let fd = mem.region.memfd().filter(|_| mem.new_region);
        let srq = Srq {
            pd: PdId(r.pd),
            qps: 0,
            share: r.share,
            max_wr: r.max_wr,
            max_sge: r.max_sge.max(1),
            low,
            rings: vec![(ring, mem.clone())],
        };
        let c = self.client(id)?;
        if let Some(reply) = srq.reply(number, geometry) {
            send_fds::<m::CreateSrq>(c, seq, &reply, fd.as_slice())?;
        }
        c.srqs.insert(number, srq);
        if owed {
            self.srq_limit(id, number);
        }
        Ok(Done::Replied)
    }

    pub(super) fn modify_srq(&mut self, id: ClientId, seq: u32, r: &m::ModifySrq) -> Outcome {
        if r.mask & !(m::SRQ_MAX_WR | m::SRQ_LIMIT) != 0 {
            return Err(Refusal::new(
                libc::EINVAL,
                format!(
                    "attribute mask {:#x}: MAX_WR and LIMIT can be modified",
                    r.mask
                ),
            ));
        }
        let max_sge = {
            let srq = self
                .client(id)?
                .srqs
                .get(&SrqId(r.srq))
                .ok_or_else(|| unknown(SrqId(r.srq)))?;
            srq.max_sge
        };
        let resize = r.mask & m::SRQ_MAX_WR != 0;
        let geometry = match resize {
            true => Some(self.srq_geometry(r.max_wr, max_sge)?),
            false => None,
        };
        let c = self.client(id)?;
        let srq = c
            .srqs
            .get_mut(&SrqId(r.srq))
            .ok_or_else(|| unknown(SrqId(r.srq)))?;
        let max_wr = if resize { r.max_wr } else { srq.max_wr };
        if r.mask & m::SRQ_LIMIT != 0 {
            check_limit(r.limit, max_wr)?;
        }
        if let Some(g) = geometry {
            let posted = srq.posted();
            if posted > r.max_wr {
                return Err(Refusal::new(
                    libc::EINVAL,
                    format!(
                        "{posted} receive requests are posted: the queue cannot shrink to {}",
                        r.max_wr
                    ),
                ));
            }
            let mem = c
                .queues
                .alloc(g.len)
                .map_err(|e| Refusal::new(libc::ENOMEM, e.to_string()))?;
            let ring = SrqRing::new(mem.region.clone(), mem.offset, g)
                .map_err(|e| Refusal::new(libc::EINVAL, e.to_string()))?;
            if let Some((last, _)) = srq.rings.last() {
                last.append_ring(ring.clone());
            }
            srq.rings.push((ring, mem));
            srq.max_wr = r.max_wr;
        }
        let limit = if r.mask & m::SRQ_LIMIT != 0 {
            Some(r.limit)
        } else {
            // A new ring does not know of the mark yet.
            Some(srq.low.armed_limit()).filter(|l| resize && *l > 0)
        };
        let oldest = srq.rings.first().map(|(r, _)| r.clone());
        let owed = match (limit, &oldest) {
            (Some(l), Some(ring)) => srq.low.arm_event(l, ring),
            _ => false,
        };
        drop(oldest);
        if resize {
            for w in 0..self.config.mailboxes.len() {
                self.command(w, Command::SettleSrq { srq: SrqId(r.srq) });
            }
        }
        let c = self.client(id)?;
        let srq = c
            .srqs
            .get_mut(&SrqId(r.srq))
            .ok_or_else(|| unknown(SrqId(r.srq)))?;
        // The oldest first: each ring holds its successor.
        while srq.rings.len() > 1 && Arc::strong_count(&srq.rings[0].0) == 1 {
            let (ring, mem) = srq.rings.remove(0);
            drop(ring);
            c.queues.free(mem);
        }
        let srq = c
            .srqs
            .get(&SrqId(r.srq))
            .ok_or_else(|| unknown(SrqId(r.srq)))?;
        let g = geometry.or_else(|| SrqGeometry::new(srq.max_wr, srq.max_sge));
        let reply = g.and_then(|g| srq.reply(SrqId(r.srq), g));
        if let (Some(reply), Some((_, mem))) = (reply, srq.rings.last()) {
            let fd = mem.region.memfd().filter(|_| resize && mem.new_region);
            let reply = m::SrqReply {
                mem: m::QueueRef {
                    fd: u16::from(resize) & reply.mem.fd,
                    ..reply.mem
                },
                ..reply
            };
            send_fds::<m::ModifySrq>(c, seq, &reply, fd.as_slice())?;
        }
        if owed {
            self.srq_limit(id, SrqId(r.srq));
        }
        Ok(Done::Replied)
    }

    pub(super) fn query_srq(&mut self, id: ClientId, seq: u32, srq: SrqId) -> Outcome {
        let c = self.client(id)?;
        let s = c.srqs.get(&srq).ok_or_else(|| unknown(srq))?;
        let reply = m::SrqStateReply {
            max_wr: s.max_wr,
            max_sge: s.max_sge,
            limit: s.low.armed_limit(),
            posted: s.posted(),
            share: s.share,
            reserved: 0,
        };
        send::<m::QuerySrq>(c, seq, &reply)
    }

    pub(super) fn destroy_srq(&mut self, id: ClientId, srq: SrqId) -> Outcome {
        let c = self.client(id)?;
        let s = c.srqs.get(&srq).ok_or_else(|| unknown(srq))?;
        if s.qps > 0 {
            return Err(Refusal::busy("shared receive queue", s.qps));
        }
        for w in 0..self.config.mailboxes.len() {
            self.command(w, Command::RemoveSrq { srq });
        }
        let (token, left) = self.fence();
        Ok(Done::Wait(Pending::FreeSrq { srq, token, left }))
    }

    pub(super) fn finish_free_srq(&mut self, id: ClientId) {
        let Some(c) = self.clients.get_mut(&id) else {
            return;
        };
        let waits = |w: &mut Waiting| matches!(w.what, Pending::FreeSrq { .. });
        let Some(Waiting {
            seq,
            what: Pending::FreeSrq { srq, .. },
        }) = c.waiting.take_if(waits)
        else {
            return;
        };
        if let Some(s) = c.srqs.remove(&srq) {
            if let Some(pd) = c.pds.get_mut(&s.pd) {
                pd.users -= 1;
            }
            for (_, mem) in s.rings {
                c.queues.free(mem);
            }
        }
        let _ = c.conn.send_reply::<m::DestroySrq>(seq, &EMPTY, &[]);
        self.srqs.give(srq.0);
        self.answered(id);
    }

    pub(super) fn srq_limit(&mut self, client: ClientId, srq: SrqId) {
        let why = "fewer receive requests are posted than the limit";
        self.async_event(client, AsyncEventKind::SrqLimitReached, srq.0, why);
    }
}

fn check_limit(limit: u32, max_wr: u32) -> Result<(), Refusal> {
    if limit > max_wr {
        return Err(Refusal::new(
            libc::EINVAL,
            format!("limit {limit}: the queue holds {max_wr} work requests"),
        ));
    }
    Ok(())
}

/// Most work requests of one shared receive queue.
pub fn srq_depth(l: &crate::config::LimitsConfig) -> u32 {
    l.work_requests
        .saturating_mul(WORK_REQUESTS_FACTOR)
        .min(siw_shm::shared_receive_queue::MAX_ENTRIES)
}
