//! Client requests for shared receive queues.

use std::sync::Arc;

use nix::libc;
use siw_memory::queue_allocator::QueueMemory;
use siw_shm::control::AsyncEventKind;
use siw_shm::control::messages as m;
use siw_shm::{LowWaterMark, SrqConsumer, SrqGeometry, SrqRing, wqe};

use crate::config::LimitsConfig;
use crate::control::account::quotas::{Charged, Quota};
use crate::control::context::Context;
use crate::control::request::deferred::Then;
use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{EMPTY, Outcome, Served, send_reply, send_reply_with_fds};
use crate::control::resources::{ClientSrq, Resources};
use crate::ids::{ClientId, PdId, SrqId};
use crate::worker::messages::Command;
use crate::worker::shared_receive_queues::WorkerSrq;

/// Maximum size of a shared receive queue in work queues: ten, as in Linux siw.
pub const WORK_REQUESTS_FACTOR: u32 = 10;

/// Maximum number of rings of one queue: a worker that takes a request may have to look at all of them.
/// A resize adds one, and earlier ones go when their requests are taken.
const MOST_RINGS: usize = 32;

fn no_such_srq(srq: SrqId) -> Refusal {
    Refusal::no_such("shared receive queue", srq.0)
}

fn srq_geometry(limits: &LimitsConfig, max_wr: u32, max_sge: u32) -> Result<SrqGeometry, Refusal> {
    let deepest = srq_depth(limits);
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
        .ok_or_else(|| Refusal::new(libc::EINVAL, "the queue is too long"))
}

pub(in crate::control) fn create_srq(
    context: &mut Context,
    id: ClientId,
    seq: u32,
    request: &m::CreateSrq,
) -> Outcome {
    let geometry = srq_geometry(
        &context.resources.limits,
        request.max_wr,
        request.max_sge.max(1),
    )?;
    check_limit(request.limit, request.max_wr)?;
    let client = context.resources.client_mut(id)?;
    client.memory.check_pd(PdId(request.pd))?;
    let resources = &mut context.resources;
    let charge = resources.charge(id, [(Quota::SharedReceiveQueues, 1)])?;
    let (mem, (number, ring)) = resources.alloc_queue(id, geometry.len, |all, mem| {
        let ring = new_ring(mem, geometry)?;
        Ok((SrqId(all.srqs.allocate_number()?), ring))
    })?;
    let client = resources.client_mut(id)?;
    client.memory.add_pd_user(PdId(request.pd));
    let low = Arc::new(LowWaterMark::default());
    for worker in 0..context.workers.worker_count() {
        let end = WorkerSrq {
            id: number,
            client: id,
            consumer: SrqConsumer::new(ring.clone(), low.clone()),
        };
        context
            .workers
            .post_command(worker, Command::AddSrq(Box::new(end)));
    }
    let owed = request.limit > 0 && low.arm_event(request.limit, &ring);
    let srq = ClientSrq {
        pd: PdId(request.pd),
        qps: 0,
        share: request.share,
        max_wr: request.max_wr,
        max_sge: request.max_sge.max(1),
        low,
        rings: vec![(ring, mem.clone())],
    };
    let client = context.resources.client_mut(id)?;
    let (place, fd) = client.queues.give(&mem);
    let reply = srq.to_reply(number, geometry, place);
    send_reply_with_fds::<m::CreateSrq>(client, seq, &reply, fd.as_slice())?;
    client.srqs.insert(number, charge.of(srq));
    if owed {
        srq_limit(&mut context.resources, id, number);
    }
    Ok(Served::Replied)
}

/// Changes the size or the limit of a queue. If `may_wait`, a resize may wait until the workers have
/// left rings of earlier ones.
pub(in crate::control) fn modify_srq(
    context: &mut Context,
    id: ClientId,
    seq: u32,
    request: &m::ModifySrq,
    may_wait: bool,
) -> Outcome {
    if request.mask & !(m::SRQ_MAX_WR | m::SRQ_LIMIT) != 0 {
        return Err(Refusal::new(
            libc::EINVAL,
            format!(
                "attribute mask {:#x}: MAX_WR and LIMIT can be modified",
                request.mask
            ),
        ));
    }
    let max_sge = {
        let srq = context
            .resources
            .client_mut(id)?
            .srqs
            .get(&SrqId(request.srq))
            .ok_or_else(|| no_such_srq(SrqId(request.srq)))?;
        srq.max_sge
    };
    let resize = request.mask & m::SRQ_MAX_WR != 0;
    let geometry = match resize {
        true => Some(srq_geometry(
            &context.resources.limits,
            request.max_wr,
            max_sge,
        )?),
        false => None,
    };
    let client = context.resources.client_mut(id)?;
    let srq = client
        .srqs
        .get_mut(&SrqId(request.srq))
        .ok_or_else(|| no_such_srq(SrqId(request.srq)))?;
    for mem in srq.take_left_rings() {
        client.queues.free(mem);
    }
    let max_wr = if resize { request.max_wr } else { srq.max_wr };
    if request.mask & m::SRQ_LIMIT != 0 {
        check_limit(request.limit, max_wr)?;
    }
    if let Some(resized) = geometry {
        let posted = srq.posted_requests();
        if posted > request.max_wr {
            return Err(Refusal::new(
                libc::EINVAL,
                format!(
                    "{posted} receive requests are posted: the queue cannot shrink to {}",
                    request.max_wr
                ),
            ));
        }
        if srq.rings.len() >= MOST_RINGS && may_wait {
            let then = Then::ResizeSrq(*request);
            return Ok(Served::Deferred(context.workers.await_barrier(id, then)));
        }
        if srq.rings.len() >= MOST_RINGS {
            return Err(Refusal::new(
                libc::EBUSY,
                format!(
                    "requests posted before the last {} resizes are still in the queue",
                    MOST_RINGS - 1
                ),
            ));
        }
        let resources = &mut context.resources;
        let (mem, ring) =
            resources.alloc_queue(id, resized.len, |_, mem| new_ring(mem, resized))?;
        let client = resources.client_mut(id)?;
        let srq = client
            .srqs
            .get_mut(&SrqId(request.srq))
            .ok_or_else(|| no_such_srq(SrqId(request.srq)))?;
        if let Some((last, _)) = srq.rings.last() {
            last.append_ring(ring.clone());
        }
        srq.rings.push((ring, mem));
        srq.max_wr = request.max_wr;
    }
    let client = context.resources.client_mut(id)?;
    let srq = client
        .srqs
        .get_mut(&SrqId(request.srq))
        .ok_or_else(|| no_such_srq(SrqId(request.srq)))?;
    let limit = if request.mask & m::SRQ_LIMIT != 0 {
        Some(request.limit)
    } else {
        // The new ring does not have the low-water mark yet.
        Some(srq.low.armed_limit()).filter(|limit| resize && *limit > 0)
    };
    let oldest = srq.rings.first().map(|(ring, _)| ring.clone());
    let owed = match (limit, &oldest) {
        (Some(limit), Some(ring)) => srq.low.arm_event(limit, ring),
        _ => false,
    };
    drop(oldest);
    if resize {
        context.workers.post_to_all(|| Command::SettleSrq {
            srq: SrqId(request.srq),
        });
    }
    let client = context.resources.client_mut(id)?;
    let srq = client
        .srqs
        .get_mut(&SrqId(request.srq))
        .ok_or_else(|| no_such_srq(SrqId(request.srq)))?;
    for mem in srq.take_left_rings() {
        client.queues.free(mem);
    }
    let srq = client
        .srqs
        .get(&SrqId(request.srq))
        .ok_or_else(|| no_such_srq(SrqId(request.srq)))?;
    let current = geometry.or_else(|| SrqGeometry::new(srq.max_wr, srq.max_sge));
    if let (Some(current), Some((_, mem))) = (current, srq.rings.last()) {
        let (place, fd) = match resize {
            true => client.queues.give(mem),
            false => (mem.place(), None),
        };
        let reply = srq.to_reply(SrqId(request.srq), current, place);
        send_reply_with_fds::<m::ModifySrq>(client, seq, &reply, fd.as_slice())?;
    }
    if owed {
        srq_limit(&mut context.resources, id, SrqId(request.srq));
    }
    Ok(Served::Replied)
}

pub(in crate::control) fn query_srq(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
    srq: SrqId,
) -> Outcome {
    let client = resources.client_mut(id)?;
    let queue = client.srqs.get(&srq).ok_or_else(|| no_such_srq(srq))?;
    let reply = m::SrqStateReply {
        max_wr: queue.max_wr,
        max_sge: queue.max_sge,
        limit: queue.low.armed_limit(),
        posted: queue.posted_requests(),
        share: queue.share,
        reserved: 0,
    };
    send_reply::<m::QuerySrq>(client, seq, &reply)
}

pub(in crate::control) fn destroy_srq(context: &mut Context, id: ClientId, srq: SrqId) -> Outcome {
    let client = context.resources.client_mut(id)?;
    let queue = client.srqs.get(&srq).ok_or_else(|| no_such_srq(srq))?;
    if queue.qps > 0 {
        return Err(Refusal::in_use("shared receive queue", queue.qps));
    }
    context.workers.post_to_all(|| Command::RemoveSrq { srq });
    let then = Then::FreeSrq(srq);
    Ok(Served::Deferred(context.workers.await_barrier(id, then)))
}

/// Frees a shared receive queue that all workers have removed, and replies.
pub(in crate::control) fn free_srq(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
    srq: SrqId,
) -> Outcome {
    let client = resources.client_mut(id)?;
    if let Some((queue, _charge)) = client.srqs.remove(&srq).map(Charged::split) {
        client.memory.remove_pd_user(queue.pd);
        for (_, mem) in queue.rings {
            client.queues.free(mem);
        }
    }
    let outcome = send_reply::<m::DestroySrq>(client, seq, &EMPTY);
    resources.srqs.release_number(srq.0);
    outcome
}

pub(in crate::control) fn srq_limit(resources: &mut Resources, client: ClientId, srq: SrqId) {
    let why = "fewer receive requests are posted than the limit";
    resources.post_async_event(client, AsyncEventKind::SrqLimitReached, srq.0, why);
}

fn new_ring(mem: &QueueMemory, geometry: SrqGeometry) -> Result<Arc<SrqRing>, Refusal> {
    SrqRing::new(mem.region.clone(), mem.offset, geometry).map_err(Refusal::outside_memory)
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

/// Maximum number of work requests of one shared receive queue.
pub fn srq_depth(limits: &LimitsConfig) -> u32 {
    limits
        .work_requests
        .saturating_mul(WORK_REQUESTS_FACTOR)
        .min(siw_shm::shared_receive_queue::MAX_ENTRIES)
}
