//! Completion channels, completion queues and queue pairs: requests of clients.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nix::libc;
use siw_iwarp::QpInitAttr;
use siw_shm::control::codec::UNANSWERED;
use siw_shm::control::messages as m;
use siw_shm::{CqProducer, QpGeometry, RqConsumer, SqConsumer, wqe};

use super::completion::cq_reply;
use super::requests::*;
use super::resources::{Channel, Client, Cq, Qp, QpPhase};
use super::{Control, Pending, Waiting};
use crate::ids::{ClientId, CompletionChannelId, CqId, PdId, Qpn, SrqId};
use crate::worker::completion_queues::WorkerCq;
use crate::worker::messages::{Command, QpSetup};

impl Control {
    pub(super) fn create_channel(&mut self, id: ClientId, seq: u32) -> Outcome {
        let (write, read) = siw_shm::control::event_pipe().map_err(Refusal::memory)?;
        let c = self.client(id)?;
        let channel = CompletionChannelId(c.number());
        let reply = m::IdReply {
            id: channel.0,
            reserved: 0,
        };
        send_fds::<m::CreateChannel>(c, seq, &reply, &[read.as_fd()])?;
        let writer: Arc<OwnedFd> = Arc::new(write);
        c.channels.insert(channel, Channel { writer, cqs: 0 });
        Ok(Done::Replied)
    }

    pub(super) fn create_cq(&mut self, id: ClientId, seq: u32, r: &m::CreateCq) -> Outcome {
        let workers = self.config.mailboxes.len() as u32;
        let most = self.config.limits.completion_queues_per_client;
        let geometry = self.cq_geometry(r.cqe)?;
        let number = CqId(self.cqs.take());
        let channel_id = (r.channel != 0).then_some(CompletionChannelId(r.channel));
        let made = (|| {
            let c = self.client(id)?;
            if c.cqs.len() >= most as usize {
                return Err(Refusal::limit("completion queues", most.into()));
            }
            let channel = match channel_id {
                None => None,
                Some(channel) => Some(
                    c.channels
                        .get_mut(&channel)
                        .map(|ch| {
                            ch.cqs += 1;
                            ch.writer.clone()
                        })
                        .ok_or_else(|| Refusal::unknown("completion channel", channel.0))?,
                ),
            };
            let mem = c
                .queues
                .alloc(geometry.len)
                .map_err(|e| Refusal::new(libc::ENOMEM, e.to_string()))?;
            Ok((channel, mem))
        })();
        let (channel, mem) = match made {
            Ok(x) => x,
            Err(e) => {
                self.cqs.give(number.0);
                return Err(e);
            }
        };
        for w in 0..workers {
            let producer = CqProducer::new(mem.region.clone(), mem.offset, geometry, w)
                .map_err(|e| Refusal::new(libc::EINVAL, e.to_string()))?;
            self.command(
                w as usize,
                Command::AddCq(Box::new(WorkerCq {
                    id: number,
                    client: id,
                    producer,
                    channel: channel.clone(),
                    cookie: r.cookie,
                })),
            );
        }
        let c = self.client(id)?;
        let reply = cq_reply(number, geometry, &mem);
        let fd = mem.region.memfd().filter(|_| mem.new_region);
        send_fds::<m::CreateCq>(c, seq, &reply, fd.as_slice())?;
        c.cqs.insert(
            number,
            Cq {
                mem,
                old: None,
                channel: channel_id,
                qps: 0,
            },
        );
        Ok(Done::Replied)
    }

    pub(super) fn finish_free_cq(&mut self, id: ClientId) {
        let Some(c) = self.clients.get_mut(&id) else {
            return;
        };
        let Some(Waiting {
            seq,
            what: Pending::FreeCq { cq, .. },
        }) = c
            .waiting
            .take_if(|w| matches!(w.what, Pending::FreeCq { .. }))
        else {
            return;
        };
        if let Some(q) = c.cqs.remove(&cq) {
            if let Some(ch) = q.channel.and_then(|channel| c.channels.get_mut(&channel)) {
                ch.cqs -= 1;
            }
            c.queues.free(q.mem);
            if let Some(old) = q.old {
                c.queues.free(old);
            }
        }
        let _ = c.conn.send_reply::<m::DestroyCq>(seq, &EMPTY, &[]);
        self.cqs.give(cq.0);
        self.answered(id);
    }

    pub(super) fn create_qp(&mut self, id: ClientId, seq: u32, r: &m::CreateQp) -> Outcome {
        let l = &self.config.limits;
        let (most, deepest) = (l.queue_pairs_per_client, l.work_requests);
        for (what, n) in [("send", r.max_send_wr), ("receive", r.max_recv_wr)] {
            if n > deepest {
                return Err(Refusal::new(
                    libc::EINVAL,
                    format!("{n} {what} work requests: at most {deepest} are allowed"),
                ));
            }
        }
        if r.max_send_sge.max(r.max_recv_sge) > wqe::MAX_SGE as u32
            || r.max_inline > wqe::MAX_INLINE as u32
        {
            return Err(Refusal::new(
                libc::EINVAL,
                format!(
                    "at most {} scatter/gather elements and {} inline bytes are allowed",
                    wqe::MAX_SGE,
                    wqe::MAX_INLINE
                ),
            ));
        }
        let geometry = QpGeometry::new(
            r.max_send_wr,
            r.max_recv_wr,
            r.max_send_sge,
            r.max_recv_sge,
            r.max_inline,
        )
        .ok_or_else(|| Refusal::new(libc::EINVAL, "the queues would be too long"))?;
        let c = self.client(id)?;
        if c.qps.len() + c.dying_qps.len() >= most as usize {
            return Err(Refusal::limit("queue pairs", most.into()));
        }
        let pd_id = PdId(r.pd);
        let srq_id = (r.srq != 0).then_some(SrqId(r.srq));
        let (send_cq, recv_cq) = (CqId(r.send_cq), CqId(r.recv_cq));
        for cq in [send_cq, recv_cq] {
            if !c.cqs.contains_key(&cq) {
                return Err(Refusal::unknown("completion queue", cq.0));
            }
        }
        if !c.pds.contains_key(&pd_id) {
            return Err(Refusal::unknown("protection domain", r.pd));
        }
        if let Some(number) = srq_id {
            let srq = c
                .srqs
                .get(&number)
                .ok_or_else(|| Refusal::unknown("shared receive queue", r.srq))?;
            if srq.pd != pd_id {
                return Err(Refusal::new(
                    libc::EINVAL,
                    "the shared receive queue belongs to another protection domain",
                ));
            }
        }
        let mem = c
            .queues
            .alloc(geometry.len)
            .map_err(|e| Refusal::new(libc::ENOMEM, e.to_string()))?;
        if let Some(srq) = srq_id.and_then(|srq| c.srqs.get_mut(&srq)) {
            srq.qps += 1;
        }
        let qpn = Qpn(self.qpns.take());
        let c = self.client(id)?;
        for cq in [send_cq, recv_cq] {
            if let Some(cq) = c.cqs.get_mut(&cq) {
                cq.qps += 1;
            }
        }
        if let Some(pd) = c.pds.get_mut(&pd_id) {
            pd.users += 1;
        }
        let reply = m::QpReply {
            qp_num: qpn.0,
            worker: 0,
            sq_slots: geometry.sq_slots,
            rq_slots: geometry.rq_slots,
            rq_offset: geometry.rq_offset as u32,
            max_send_wr: r.max_send_wr,
            max_recv_wr: r.max_recv_wr,
            max_send_sge: r.max_send_sge.max(1),
            max_recv_sge: r.max_recv_sge.max(1),
            max_inline: r.max_inline.max(wqe::INLINE_IN_HEADER as u32),
            mem: (&mem).into(),
        };
        let fd = mem.region.memfd().filter(|_| mem.new_region);
        send_fds::<m::CreateQp>(c, seq, &reply, fd.as_slice())?;
        c.qps.insert(
            qpn,
            Qp {
                attr: QpInitAttr {
                    qpn: qpn.0,
                    pd: r.pd,
                    max_send_wr: r.max_send_wr.max(1),
                    max_recv_wr: r.max_recv_wr.max(1),
                    sq_sig_all: r.sq_sig_all != 0,
                },
                geometry,
                mem,
                send_cq,
                recv_cq,
                srq: srq_id,
                phase: QpPhase::Detached,
                worker: 0,
                cookie: 0,
                cm_channel: None,
                device: 0,
                state: m::QpState::Idle,
                ird: 0,
                ord: 0,
                local: m::Addr::NONE,
                peer: m::Addr::NONE,
            },
        );
        Ok(Done::Replied)
    }

    /// The worker's ends of a queue pair's rings.
    pub(super) fn setup(c: &Client, qpn: Qpn) -> Result<QpSetup, Refusal> {
        let qp = c
            .qps
            .get(&qpn)
            .ok_or_else(|| Refusal::unknown("queue pair", qpn.0))?;
        let (region, at) = (&qp.mem.region, qp.mem.offset);
        let bad = |e: siw_shm::OutOfBounds| Refusal::new(libc::EINVAL, e.to_string());
        let sq = SqConsumer::new(region.clone(), at, qp.geometry.sq_slots).map_err(bad)?;
        let rq = RqConsumer::new(
            region.clone(),
            at + qp.geometry.rq_offset,
            qp.geometry.rq_slots,
        )
        .map_err(bad)?;
        Ok(QpSetup {
            client: c.id,
            attr: qp.attr,
            sq,
            rq,
            send_cq: qp.send_cq,
            recv_cq: qp.recv_cq,
            srq: qp.srq,
            share: qp
                .srq
                .and_then(|srq| c.srqs.get(&srq))
                .map_or(0, |srq| srq.share),
        })
    }

    pub(super) fn destroy_qp(&mut self, id: ClientId, seq: u32, qpn: Qpn) -> Outcome {
        let c = self.client(id)?;
        let qp = c
            .qps
            .get(&qpn)
            .ok_or_else(|| Refusal::unknown("queue pair", qpn.0))?;
        if qp.phase == QpPhase::Detached {
            self.free_qp(id, qpn);
            return send::<m::DestroyQp>(self.client(id)?, seq, &EMPTY);
        }
        let worker = qp.worker;
        self.command(worker, Command::DestroyQp { qpn });
        if seq != UNANSWERED {
            return Ok(Done::Wait(Pending::DestroyQp { qpn }));
        }
        // Nobody waits: gone for its client, here until its worker has let it go.
        let c = self.client(id)?;
        if let Some(qp) = c.qps.remove(&qpn) {
            c.dying_qps.insert(qpn, qp);
        }
        Ok(Done::Replied)
    }

    pub(super) fn free_qp(&mut self, id: ClientId, qpn: Qpn) {
        let Some(c) = self.clients.get_mut(&id) else {
            return;
        };
        if let Some(qp) = c.qps.remove(&qpn).or_else(|| c.dying_qps.remove(&qpn)) {
            // The number comes back: no window may be its next owner's.
            for mw in c.mws.keys() {
                self.config.keys.unbind_stream(*mw, qpn.0);
            }
            for cq in [qp.send_cq, qp.recv_cq] {
                if let Some(cq) = c.cqs.get_mut(&cq) {
                    cq.qps -= 1;
                }
            }
            if let Some(pd) = c.pds.get_mut(&PdId(qp.attr.pd)) {
                pd.users -= 1;
            }
            if let Some(srq) = qp.srq.and_then(|srq| c.srqs.get_mut(&srq)) {
                srq.qps -= 1;
            }
            c.queues.free(qp.mem);
            self.qpns.give(qpn.0);
        }
    }

    pub(super) fn finish_destroy_qp(&mut self, qpn: Qpn) {
        let Some(id) = self.owner(qpn) else { return };
        if self.finish_reset(id, qpn) {
            return;
        }
        let Some(c) = self.clients.get_mut(&id) else {
            return;
        };
        if c.dying_qps.contains_key(&qpn) {
            self.free_qp(id, qpn);
            if self
                .clients
                .get(&id)
                .is_some_and(|c| c.dying_qps.is_empty())
            {
                self.answered(id);
            }
            return;
        }
        let waits = matches!(&c.waiting, Some(Waiting { what: Pending::DestroyQp { qpn: q }, .. }) if *q == qpn);
        if !waits {
            return;
        }
        if let Some(w) = c.waiting.take() {
            let _ = c.conn.send_reply::<m::DestroyQp>(w.seq, &EMPTY, &[]);
        }
        self.free_qp(id, qpn);
        self.answered(id);
    }
}
