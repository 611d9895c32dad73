//! Client requests for completion channels, completion queues and queue pairs.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nix::libc;
use siw_iwarp::QpInitAttr;
use siw_shm::control::EVENT_STREAM_BYTES;
use siw_shm::control::codec::UNANSWERED;
use siw_shm::control::messages as m;
use siw_shm::work_queue::state_offset;
use siw_shm::{Access, CqProducer, QpGeometry, RqConsumer, SqConsumer, wqe};

use super::completion::cq_reply;
use super::pending::{DeferredRequest, PendingReply};
use super::quotas::Quota;
use super::requests::*;
use super::resources::{Client, ClientChannel, ClientQp, CompletionQueue, QpPhase};
use super::{ControlThread, outbox};
use crate::host_ports::PortClaim;
use crate::ids::{ClientId, CompletionChannelId, CqId, PdId, Qpn, SrqId};
use crate::worker::completion_queues::WorkerCq;
use crate::worker::messages::{Command, QpSetup};

/// Quota amounts of a channel whose socket buffers this number of bytes.
const fn channel_amounts(buffered: usize) -> [(Quota, u64); 3] {
    [
        (Quota::EventChannels, 1),
        (Quota::Descriptors, 1),
        (Quota::Memory, buffered as u64),
    ]
}

/// Quota amounts of a completion channel.
const COMPLETION_CHANNEL: [(Quota, u64); 3] = channel_amounts(EVENT_STREAM_BYTES);
/// Quota amounts of a channel of connection events.
pub(super) const CM_CHANNEL: [(Quota, u64); 3] = channel_amounts(outbox::SOCKET_BYTES);

impl ControlThread {
    pub(super) fn create_channel(&mut self, id: ClientId, seq: u32) -> Outcome {
        self.resources.charge(id, &COMPLETION_CHANNEL)?;
        let (write, read) = match siw_shm::control::event_stream() {
            Ok(ends) => ends,
            Err(error) => {
                self.resources.release(id, &COMPLETION_CHANNEL);
                return Err(Refusal::no_shared_memory(error));
            }
        };
        let client = self.resources.client_mut(id)?;
        let channel = CompletionChannelId(client.next_number());
        let reply = m::IdReply {
            id: channel.0,
            reserved: 0,
        };
        send_reply_with_fds::<m::CreateChannel>(client, seq, &reply, &[read.as_fd()])?;
        let writer: Arc<OwnedFd> = Arc::new(write);
        client
            .channels
            .insert(channel, ClientChannel { writer, cqs: 0 });
        Ok(Served::Replied)
    }

    pub(super) fn destroy_channel(
        &mut self,
        id: ClientId,
        seq: u32,
        channel: CompletionChannelId,
    ) -> Outcome {
        let client = self.resources.client_mut(id)?;
        let found = client
            .channels
            .get(&channel)
            .ok_or_else(|| Refusal::no_such("completion channel", channel.0))?;
        if found.cqs > 0 {
            return Err(Refusal::in_use("completion channel", found.cqs));
        }
        client.channels.remove(&channel);
        let outcome = send_reply::<m::DestroyChannel>(client, seq, &EMPTY);
        self.resources.release(id, &COMPLETION_CHANNEL);
        outcome
    }

    pub(super) fn create_cq(&mut self, id: ClientId, seq: u32, request: &m::CreateCq) -> Outcome {
        let workers = self.workers.worker_count() as u32;
        let geometry = self.cq_geometry(request.cqe)?;
        let channel_id = (request.channel != 0).then_some(CompletionChannelId(request.channel));
        let client = self.resources.client_mut(id)?;
        let channel = match channel_id {
            None => None,
            Some(channel) => Some(
                client
                    .channels
                    .get(&channel)
                    .map(|found| found.writer.clone())
                    .ok_or_else(|| Refusal::no_such("completion channel", channel.0))?,
            ),
        };
        let huge = self.config.hugepages;
        let resources = &mut self.resources;
        resources.charge(id, &[(Quota::CompletionQueues, 1)])?;
        let made = resources
            .alloc_queue(id, geometry.len, huge)
            .and_then(|mem| Ok((mem, CqId(resources.cqs.allocate_number()?))));
        let (mem, number) = made.inspect_err(|_| {
            resources.release(id, &[(Quota::CompletionQueues, 1)]);
        })?;
        for worker in 0..workers {
            let producer = CqProducer::new(mem.region.clone(), mem.offset, geometry, worker)
                .map_err(|error| Refusal::new(libc::EINVAL, error.to_string()))?;
            self.workers.post_command(
                worker as usize,
                Command::AddCq(Box::new(WorkerCq {
                    id: number,
                    client: id,
                    producer,
                    channel: channel.clone(),
                    cookie: request.cookie,
                })),
            );
        }
        let client = self.resources.client_mut(id)?;
        if let Some(found) = channel_id.and_then(|channel| client.channels.get_mut(&channel)) {
            found.cqs += 1;
        }
        let reply = cq_reply(number, geometry, &mem);
        let fd = mem.region.memfd().filter(|_| mem.new_region);
        send_reply_with_fds::<m::CreateCq>(client, seq, &reply, fd.as_slice())?;
        client.cqs.insert(
            number,
            CompletionQueue {
                mem,
                old: None,
                channel: channel_id,
                qps: 0,
            },
        );
        Ok(Served::Replied)
    }

    /// Removes the queue from the workers first; [`Self::finish_free_cq`] replies.
    pub(super) fn destroy_cq(&mut self, id: ClientId, cq: CqId) -> Outcome {
        let client = self.resources.client_mut(id)?;
        let found = client
            .cqs
            .get(&cq)
            .ok_or_else(|| Refusal::no_such("completion queue", cq.0))?;
        if found.qps > 0 {
            return Err(Refusal::in_use("completion queue", found.qps));
        }
        self.workers.post_to_all(|| Command::RemoveCq { cq });
        let (token, left) = self.workers.post_barrier(Some(id));
        Ok(Served::Deferred(PendingReply::FreeCq { cq, token, left }))
    }

    pub(super) fn finish_free_cq(&mut self, id: ClientId) {
        let Some(client) = self.resources.clients.get_mut(&id) else {
            return;
        };
        let Some(DeferredRequest {
            seq,
            what: PendingReply::FreeCq { cq, .. },
        }) = client
            .waiting
            .take_if(|waiting| matches!(waiting.what, PendingReply::FreeCq { .. }))
        else {
            return;
        };
        if let Some(queue) = client.cqs.remove(&cq) {
            if let Some(ch) = queue
                .channel
                .and_then(|channel| client.channels.get_mut(&channel))
            {
                ch.cqs -= 1;
            }
            client.queues.free(queue.mem);
            if let Some(old) = queue.old {
                client.queues.free(old);
            }
        }
        let _ = client.conn.send_reply::<m::DestroyCq>(seq, &EMPTY, &[]);
        self.resources.cqs.release_number(cq.0);
        self.resources.release(id, &[(Quota::CompletionQueues, 1)]);
        self.on_answered(id);
    }

    /// Computes the rings of a queue pair, or refuses sizes beyond the limits or the ABI.
    fn qp_geometry(&self, request: &m::CreateQp) -> Result<QpGeometry, Refusal> {
        let deepest = self.config.limits.work_requests;
        for (what, depth) in [
            ("send", request.max_send_wr),
            ("receive", request.max_recv_wr),
        ] {
            if depth > deepest {
                return Err(Refusal::new(
                    libc::EINVAL,
                    format!("{depth} {what} work requests: at most {deepest} are allowed"),
                ));
            }
        }
        if request.max_send_sge.max(request.max_recv_sge) > wqe::MAX_SGE as u32
            || request.max_inline > wqe::MAX_INLINE as u32
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
        QpGeometry::new(
            request.max_send_wr,
            request.max_recv_wr,
            request.max_send_sge,
            request.max_recv_sge,
            request.max_inline,
        )
        .ok_or_else(|| Refusal::new(libc::EINVAL, "the queues are too long"))
    }

    pub(super) fn create_qp(&mut self, id: ClientId, seq: u32, request: &m::CreateQp) -> Outcome {
        let geometry = self.qp_geometry(request)?;
        let client = self.resources.client_mut(id)?;
        let pd_id = PdId(request.pd);
        let srq_id = (request.srq != 0).then_some(SrqId(request.srq));
        let (send_cq, recv_cq) = (CqId(request.send_cq), CqId(request.recv_cq));
        for cq in [send_cq, recv_cq] {
            if !client.cqs.contains_key(&cq) {
                return Err(Refusal::no_such("completion queue", cq.0));
            }
        }
        if !client.pds.contains_key(&pd_id) {
            return Err(Refusal::no_such("protection domain", request.pd));
        }
        if let Some(number) = srq_id {
            let srq = client
                .srqs
                .get(&number)
                .ok_or_else(|| Refusal::no_such("shared receive queue", request.srq))?;
            if srq.pd != pd_id {
                return Err(Refusal::new(
                    libc::EINVAL,
                    "the shared receive queue belongs to another protection domain",
                ));
            }
        }
        let huge = self.config.hugepages;
        let resources = &mut self.resources;
        resources.charge(id, &[(Quota::QueuePairs, 1)])?;
        let made = resources
            .alloc_queue(id, geometry.len, huge)
            .and_then(|mem| Ok((mem, Qpn(resources.qpns.allocate_number()?))));
        let (mem, qpn) = made.inspect_err(|_| {
            resources.release(id, &[(Quota::QueuePairs, 1)]);
        })?;
        resources.qp_owners.insert(qpn, id);
        let client = self.resources.client_mut(id)?;
        if let Some(srq) = srq_id.and_then(|srq| client.srqs.get_mut(&srq)) {
            srq.qps += 1;
        }
        for cq in [send_cq, recv_cq] {
            if let Some(cq) = client.cqs.get_mut(&cq) {
                cq.qps += 1;
            }
        }
        if let Some(pd) = client.pds.get_mut(&pd_id) {
            pd.users += 1;
        }
        let reply = m::QpReply {
            qp_num: qpn.0,
            worker: 0,
            sq_slots: geometry.sq_slots,
            rq_slots: geometry.rq_slots,
            rq_offset: geometry.rq_offset as u32,
            max_send_wr: request.max_send_wr,
            max_recv_wr: request.max_recv_wr,
            max_send_sge: request.max_send_sge.max(1),
            max_recv_sge: request.max_recv_sge.max(1),
            max_inline: request.max_inline.max(wqe::INLINE_IN_HEADER as u32),
            mem: (&mem).into(),
        };
        let fd = mem.region.memfd().filter(|_| mem.new_region);
        send_reply_with_fds::<m::CreateQp>(client, seq, &reply, fd.as_slice())?;
        client.qps.insert(
            qpn,
            ClientQp {
                attr: QpInitAttr {
                    qpn: qpn.0,
                    pd: request.pd,
                    max_send_wr: request.max_send_wr.max(1),
                    max_recv_wr: request.max_recv_wr.max(1),
                    sq_sig_all: request.sq_sig_all != 0,
                    denied_access: Access::NONE,
                },
                counts_as_connection: false,
                geometry,
                mem,
                send_cq,
                recv_cq,
                srq: srq_id,
                phase: QpPhase::Detached,
                worker: 0,
                cookie: 0,
                cm_channel: None,
                held_disconnect: None,
                device: 0,
                state: m::QpState::Idle,
                ird: 0,
                ord: 0,
                local: m::Addr::NONE,
                peer: m::Addr::NONE,
                pair: None,
                waits_for_receives: false,
                port_claim: PortClaim::default(),
                most_connections: 0,
            },
        );
        Ok(Served::Replied)
    }

    /// The worker's ends of a queue pair's rings.
    pub(super) fn worker_qp_setup(client: &Client, qpn: Qpn) -> Result<QpSetup, Refusal> {
        let qp = client
            .qps
            .get(&qpn)
            .ok_or_else(|| Refusal::no_such("queue pair", qpn.0))?;
        let (region, at) = (&qp.mem.region, qp.mem.offset);
        let bad = |error: siw_shm::OutOfBounds| Refusal::new(libc::EINVAL, error.to_string());
        let state_at = at + state_offset(qp.geometry.rq_offset, qp.geometry.rq_slots);
        let sq = SqConsumer::new(region.clone(), at, qp.geometry.sq_slots)
            .and_then(|sq| sq.with_state_line(region.clone(), state_at))
            .map_err(bad)?;
        let rq = RqConsumer::new(
            region.clone(),
            at + qp.geometry.rq_offset,
            qp.geometry.rq_slots,
        )
        .map_err(bad)?;
        Ok(QpSetup {
            client: client.id,
            user: client.account.uid(),
            attr: qp.attr,
            sq,
            rq,
            send_cq: qp.send_cq,
            recv_cq: qp.recv_cq,
            srq: qp.srq,
            is_paired: qp.pair.is_some(),
            most_connections: qp.most_connections,
            waits_for_receives: qp.waits_for_receives || qp.pair.is_some(),
            srq_share: qp
                .srq
                .and_then(|srq| client.srqs.get(&srq))
                .map_or(0, |srq| srq.share),
        })
    }

    pub(super) fn destroy_qp(&mut self, id: ClientId, seq: u32, qpn: Qpn) -> Outcome {
        let client = self.resources.client_mut(id)?;
        let qp = client
            .qps
            .get(&qpn)
            .ok_or_else(|| Refusal::no_such("queue pair", qpn.0))?;
        if qp.phase == QpPhase::Detached {
            self.free_qp(id, qpn);
            return send_reply::<m::DestroyQp>(self.resources.client_mut(id)?, seq, &EMPTY);
        }
        let worker = qp.worker;
        self.workers
            .post_command(worker, Command::DestroyQp { qpn });
        if seq != UNANSWERED {
            return Ok(Served::Deferred(PendingReply::DestroyQp { qpn }));
        }
        // No reply is wanted: the client has forgotten the queue pair, but it stays here until its
        // worker has released it.
        let client = self.resources.client_mut(id)?;
        if let Some(qp) = client.qps.remove(&qpn) {
            client.departing_qps.insert(qpn, qp);
        }
        Ok(Served::Replied)
    }

    pub(super) fn free_qp(&mut self, id: ClientId, qpn: Qpn) {
        let Some(client) = self.resources.clients.get_mut(&id) else {
            return;
        };
        if let Some(qp) = client
            .qps
            .remove(&qpn)
            .or_else(|| client.departing_qps.remove(&qpn))
        {
            for cq in [qp.send_cq, qp.recv_cq] {
                if let Some(cq) = client.cqs.get_mut(&cq) {
                    cq.qps -= 1;
                }
            }
            if let Some(pd) = client.pds.get_mut(&PdId(qp.attr.pd)) {
                pd.users -= 1;
            }
            if let Some(srq) = qp.srq.and_then(|srq| client.srqs.get_mut(&srq)) {
                srq.qps -= 1;
            }
            let amounts = qp.connection_amounts();
            client.queues.free(qp.mem);
            self.pairing.forget_attempt(qpn);
            self.resources.qpns.release_number(qpn.0);
            self.resources.qp_owners.remove(&qpn);
            self.resources.release(id, &[(Quota::QueuePairs, 1)]);
            self.resources.release(id, &amounts);
        }
    }

    pub(super) fn finish_destroy_qp(&mut self, qpn: Qpn) {
        let Some(id) = self.resources.owner_of_qp(qpn) else {
            return;
        };
        if self.finish_reset(id, qpn) {
            return;
        }
        let Some(client) = self.resources.clients.get_mut(&id) else {
            return;
        };
        if client.departing_qps.contains_key(&qpn) {
            self.free_qp(id, qpn);
            if self
                .resources
                .clients
                .get(&id)
                .is_some_and(|client| client.departing_qps.is_empty())
            {
                self.on_answered(id);
            }
            return;
        }
        let waits = matches!(&client.waiting, Some(DeferredRequest { what: PendingReply::DestroyQp { qpn: q }, .. }) if *q == qpn);
        if !waits {
            return;
        }
        if let Some(waiting) = client.waiting.take() {
            let _ = client
                .conn
                .send_reply::<m::DestroyQp>(waiting.seq, &EMPTY, &[]);
        }
        self.free_qp(id, qpn);
        self.on_answered(id);
    }
}
