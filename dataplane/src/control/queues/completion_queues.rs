//! Completion channels and completion queues: requests of clients, and the ends of deferred ones.
//!
//! ```text
//! RESIZE_CQ -> new rings to each worker -> barriers -> reply: no worker writes to the old rings
//! the client empties the old rings -> FREE_CQ_RING -> their memory is freed
//! ```

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nix::libc;
use siw_memory::queue_allocator::QueueMemory;
use siw_shm::control::EVENT_STREAM_BYTES;
use siw_shm::control::messages as m;
use siw_shm::{CqGeometry, CqProducer};

use crate::control::account::quotas::{Charged, Quota, channel_amounts};
use crate::control::context::Context;
use crate::control::request::deferred::Then;
use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{EMPTY, Outcome, Served, send_reply, send_reply_with_fds};
use crate::control::resources::{ClientChannel, CompletionQueue, Resources};
use crate::ids::{ClientId, CompletionChannelId, CqId};
use crate::worker::completion_queues::{CqModeration, WorkerCq};
use crate::worker::messages::Command;

/// Quota amounts of a completion channel.
const COMPLETION_CHANNEL: [(Quota, u64); 3] = channel_amounts(EVENT_STREAM_BYTES);

pub(in crate::control) fn create_channel(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
) -> Outcome {
    let charge = resources.charge(id, COMPLETION_CHANNEL)?;
    let (write, read) = siw_shm::control::event_stream().map_err(Refusal::no_shared_memory)?;
    let client = resources.client_mut(id)?;
    let channel = CompletionChannelId(client.next_number());
    let reply = m::IdReply {
        id: channel.0,
        reserved: 0,
    };
    send_reply_with_fds::<m::CreateChannel>(client, seq, &reply, &[read.as_fd()])?;
    let writer: Arc<OwnedFd> = Arc::new(write);
    let made = charge.of(ClientChannel { writer, cqs: 0 });
    client.channels.insert(channel, made);
    Ok(Served::Replied)
}

pub(in crate::control) fn destroy_channel(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
    channel: CompletionChannelId,
) -> Outcome {
    let client = resources.client_mut(id)?;
    let found = client
        .channels
        .get(&channel)
        .ok_or_else(|| Refusal::no_such("completion channel", channel.0))?;
    if found.cqs > 0 {
        return Err(Refusal::in_use("completion channel", found.cqs));
    }
    client.channels.remove(&channel);
    send_reply::<m::DestroyChannel>(client, seq, &EMPTY)
}

pub(in crate::control) fn cq_geometry(context: &Context, cqe: u32) -> Result<CqGeometry, Refusal> {
    let workers = context.workers.worker_count() as u32;
    let deepest = context.resources.limits.completions;
    if cqe == 0 || cqe > deepest {
        return Err(Refusal::new(
            libc::EINVAL,
            format!("{cqe} entries: 1 to {deepest} are allowed"),
        ));
    }
    CqGeometry::new(cqe, workers)
        .ok_or_else(|| Refusal::new(libc::EINVAL, format!("{cqe} entries are too many")))
}

pub(in crate::control) fn create_cq(
    context: &mut Context,
    id: ClientId,
    seq: u32,
    request: &m::CreateCq,
) -> Outcome {
    let geometry = cq_geometry(context, request.cqe)?;
    let channel_id = (request.channel != 0).then_some(CompletionChannelId(request.channel));
    let client = context.resources.client_mut(id)?;
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
    let resources = &mut context.resources;
    let charge = resources.charge(id, [(Quota::CompletionQueues, 1)])?;
    let (mem, (number, producers)) = resources.alloc_queue(id, geometry.len, |all, mem| {
        let producers = producers_of(mem, geometry)?;
        Ok((CqId(all.cqs.allocate_number()?), producers))
    })?;
    for (worker, producer) in producers.into_iter().enumerate() {
        context.workers.post_command(
            worker,
            Command::AddCq(Box::new(WorkerCq {
                id: number,
                client: id,
                producer,
                channel: channel.clone(),
                cookie: request.cookie,
            })),
        );
    }
    let client = context.resources.client_mut(id)?;
    if let Some(found) = channel_id.and_then(|channel| client.channels.get_mut(&channel)) {
        found.cqs += 1;
    }
    let (place, fd) = client.queues.give(&mem);
    let reply = cq_reply(number, geometry, place);
    send_reply_with_fds::<m::CreateCq>(client, seq, &reply, fd.as_slice())?;
    client.cqs.insert(
        number,
        charge.of(CompletionQueue {
            mem,
            entries: geometry.entries,
            old: None,
            channel: channel_id,
            qps: 0,
        }),
    );
    Ok(Served::Replied)
}

/// Removes the queue from the workers first; [`free_cq`] replies.
pub(in crate::control) fn destroy_cq(context: &mut Context, id: ClientId, cq: CqId) -> Outcome {
    let client = context.resources.client_mut(id)?;
    let found = client
        .cqs
        .get(&cq)
        .ok_or_else(|| Refusal::no_such("completion queue", cq.0))?;
    if found.qps > 0 {
        return Err(Refusal::in_use("completion queue", found.qps));
    }
    context.workers.post_to_all(|| Command::RemoveCq { cq });
    let then = Then::FreeCq(cq);
    Ok(Served::Deferred(context.workers.await_barrier(id, then)))
}

/// Frees a completion queue that all workers have removed, and replies.
pub(in crate::control) fn free_cq(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
    cq: CqId,
) -> Outcome {
    let client = resources.client_mut(id)?;
    if let Some((queue, _charge)) = client.cqs.remove(&cq).map(Charged::split) {
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
    let outcome = send_reply::<m::DestroyCq>(client, seq, &EMPTY);
    resources.cqs.release_number(cq.0);
    outcome
}

pub(in crate::control) fn resize_cq(
    context: &mut Context,
    id: ClientId,
    request: &m::ResizeCq,
) -> Outcome {
    let geometry = cq_geometry(context, request.cqe)?;
    let client = context.resources.client_mut(id)?;
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
    let resources = &mut context.resources;
    let (mem, producers) =
        resources.alloc_queue(id, geometry.len, |_, mem| producers_of(mem, geometry))?;
    let client = resources.client_mut(id)?;
    if let Some(cq) = client.cqs.get_mut(&number) {
        cq.old = Some(std::mem::replace(&mut cq.mem, mem));
    }
    for (worker, producer) in producers.into_iter().enumerate() {
        let producer = Box::new(producer);
        let cq = number;
        context
            .workers
            .post_command(worker, Command::ResizeCq { cq, producer });
    }
    let cq = number;
    let then = Then::ResizeCq { cq, geometry };
    Ok(Served::Deferred(context.workers.await_barrier(id, then)))
}

/// Tells the client where the new rings are, to which all workers write.
pub(in crate::control) fn reply_resized(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
    cq: CqId,
    geometry: CqGeometry,
) -> Outcome {
    let client = resources.client_mut(id)?;
    let no_such = || Refusal::no_such("completion queue", cq.0);
    client.cqs.get_mut(&cq).ok_or_else(no_such)?.entries = geometry.entries;
    let queue = client.cqs.get(&cq).ok_or_else(no_such)?;
    let (place, fd) = client.queues.give(&queue.mem);
    let reply = cq_reply(cq, geometry, place);
    send_reply_with_fds::<m::ResizeCq>(client, seq, &reply, fd.as_slice())
}

pub(in crate::control) fn free_cq_ring(
    context: &mut Context,
    id: ClientId,
    seq: u32,
    request: &m::FreeCqRing,
) -> Outcome {
    let client = context.resources.client_mut(id)?;
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
        context.workers.post_command(
            0,
            Command::RaiseCq {
                cq: CqId(request.cq),
            },
        );
    }
    send_reply::<m::FreeCqRing>(context.resources.client_mut(id)?, seq, &EMPTY)
}

pub(in crate::control) fn moderate_cq(
    context: &mut Context,
    id: ClientId,
    seq: u32,
    request: &m::ModerateCq,
) -> Outcome {
    if !context
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
    for worker in 0..context.workers.worker_count() {
        let cq = CqId(request.cq);
        context
            .workers
            .post_command(worker, Command::ModerateCq { cq, moderation });
    }
    send_reply::<m::ModerateCq>(context.resources.client_mut(id)?, seq, &EMPTY)
}

/// The workers' ends of new rings, one for each worker.
fn producers_of(mem: &QueueMemory, geometry: CqGeometry) -> Result<Vec<CqProducer>, Refusal> {
    let producer = |worker| CqProducer::new(mem.region.clone(), mem.offset, geometry, worker);
    let producers: Result<_, _> = (0..geometry.workers).map(producer).collect();
    producers.map_err(Refusal::outside_memory)
}

fn cq_reply(cq: CqId, geometry: CqGeometry, mem: m::QueueRef) -> m::CqReply {
    m::CqReply {
        cq: cq.0,
        entries: geometry.entries,
        workers: geometry.workers,
        reserved: 0,
        mem,
    }
}
