//! Requests about memory: protection domains, arenas, regions, windows. Deregistration is answered when no
//! worker can use the key any more.
//!
//! [`ClientMemory`](client_memory::ClientMemory) has the memory of one client, [`Memory`] what all clients
//! share.

pub(super) mod arena_files;
pub(super) mod client_memory;
mod held_memory;
pub(super) mod imports;

use std::collections::VecDeque;
use std::sync::Arc;

use nix::libc;
use siw_memory::{KeyTable, RegisteredMemory, Stag};
use siw_shm::control::messages as m;
use siw_shm::local_wqe::MAX_FAST_PAGES;
use siw_shm::shared_memory::{PAGE, PageSize, SharedMemory};

use self::arena_files::ArenaFiles;
use self::client_memory::{
    ArenaOrigin, ClientArena, MemoryRegion, ProtectionDomain, RetiredKey, arena_amounts,
    key_amounts,
};
use crate::config::ProcessMemoryPolicy;
use crate::control::account::quotas::{Charge, Quota};
use crate::control::context::Context;
use crate::control::request::deferred::{Deferred, KeyReply, Then};
use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{EMPTY, Outcome, Served, send_reply, send_reply_with_fds};
use crate::control::resources::Resources;
use crate::control::threads::helpers::{
    self, DisposalQueue, LONG_MEMORY, MapArena, MemoryOrder, MemorySource,
};
use crate::control::threads::reports::{HelperReport, MadeArena};
use crate::control::threads::turn_times::TurnBudget;
use crate::ids::{ArenaId, ClientId, CommandToken, PdId};

/// Regions freed at once: each may have thousands of extents.
const REGIONS_AT_ONCE: usize = 8;
/// Requests of a turn that are looked at and found still waiting.
pub(in crate::control) const REQUESTS_IN_VAIN: usize = 64;
/// Heap of one page of a fast registration.
const FAST_PAGE_HEAP: usize = 8;

/// Memory of all clients: the keys, the files, and the rules for memory on this host.
pub(in crate::control) struct Memory {
    /// The memory keys, which workers read.
    pub keys: Arc<KeyTable>,
    /// Files of the arenas that the daemon made.
    pub files: ArenaFiles,
    /// Maps registered memory for the ports that read it by DMA.
    pub map_arena: Arc<MapArena>,
    /// Some ports read memory by DMA; mapping memory for them is slow.
    pub ports_use_dma: bool,
    /// Frames may refer to registered memory instead of a copy.
    pub sends_by_reference: bool,
    /// Users whose memory workers may copy with system calls.
    pub process_memory: ProcessMemoryPolicy,
    /// Tokens of the requests that wait until no worker uses a memory key.
    pub awaiting: VecDeque<CommandToken>,
}

impl Memory {
    pub(in crate::control) fn alloc_arena(
        &self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        request: &m::AllocArena,
    ) -> Outcome {
        let len = usize::try_from(request.len)
            .ok()
            .and_then(|len| len.checked_next_multiple_of(PAGE))
            .filter(|len| *len > 0)
            .ok_or_else(|| Refusal::new(libc::EINVAL, "the length of the arena is invalid"))?;
        let huge = request.huge != 0 && context.resources.hugepages;
        let charge = context.resources.charge(id, arena_amounts(len as u64, 0))?;
        let pages = context.resources.choose_pages(id, len as u64, huge);
        let takes_long = pages == PageSize::TryHuge && len as u64 > LONG_MEMORY;
        if takes_long || self.ports_use_dma {
            let token = context.workers.next_token(Some(id));
            context.helpers.order_memory(MemoryOrder {
                client: id,
                token,
                source: MemorySource::New { len, pages },
            });
            let origin = ArenaOrigin::Allocated;
            let then = Then::AddArena { charge, origin };
            return Ok(Served::Deferred(Deferred::new(token, then)));
        }
        let made = SharedMemory::create_memfd("siwd-arena", len, pages)
            .and_then(|memory| memory.guard_for(id.fault_owner()))
            .map_err(|error| format!("no shared memory: {error}"))
            .and_then(|memory| helpers::map_memory(memory, &*self.map_arena))
            .map_err(|reason| Refusal::new(libc::ENOMEM, reason));
        let charged = (charge, ArenaOrigin::Allocated);
        self.add_arena(&mut context.resources, id, seq, charged, made)
    }

    pub(in crate::control) fn free_arena(
        &self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        arena: ArenaId,
    ) -> Outcome {
        let client = context.resources.client_mut(id)?;
        let Some(removed) = client.memory.remove_arena(arena)? else {
            return send_reply::<m::FreeArena>(client, seq, &EMPTY);
        };
        let len = removed.region.len() as u64;
        // The last descriptor of an imported file frees all its pages, however little of it was mapped.
        if len <= LONG_MEMORY && !self.ports_use_dma && !removed.origin.is_imported() {
            drop(removed);
            return send_reply::<m::FreeArena>(client, seq, &EMPTY);
        }
        let queue = DisposalQueue::Memory(client.account.uid());
        let token = context.workers.next_token(Some(id));
        let report = HelperReport::ArenaFreed { client: id, token };
        context
            .helpers
            .dispose(queue, Box::new(removed), Some(report));
        Ok(Served::Deferred(Deferred::new(
            token,
            Then::ReplyArenaFreed,
        )))
    }

    /// Adds a new arena, or an imported file, to its client and replies.
    pub(in crate::control) fn add_arena(
        &self,
        resources: &mut Resources,
        id: ClientId,
        seq: u32,
        (mut charge, origin): (Charge<4>, ArenaOrigin),
        made: Result<MadeArena, Refusal>,
    ) -> Outcome {
        let (region, external) = made?;
        let client = resources.client_mut(id)?;
        let listed = (!origin.is_imported()).then(|| self.files.list(&region, client.peer));
        let arena = ArenaId(client.next_number());
        let entry = ClientArena {
            listed: listed.flatten(),
            region: region.clone(),
            origin,
            external,
            mrs: 0,
        };
        if origin.is_imported() {
            client.memory.add_arena(arena, charge.of(entry));
            let (id, reserved) = (arena.0, 0);
            let reply = m::IdReply { id, reserved };
            return match origin {
                ArenaOrigin::OwnFile => send_reply::<m::ImportOwnFile>(client, seq, &reply),
                _ => send_reply::<m::ImportMemory>(client, seq, &reply),
            };
        }
        let (real_len, huge) = (region.len() as u64, region.is_huge());
        let reply = m::ArenaReply {
            arena: arena.0,
            huge: huge.into(),
            len: real_len,
        };
        let fd = region
            .memfd()
            .ok_or_else(|| Refusal::new(libc::ENOMEM, "shared memory has no descriptor"))?;
        send_reply_with_fds::<m::AllocArena>(client, seq, &reply, &[fd])?;
        // Hugepages are allocated whole, so the arena may be larger than charged.
        charge.set(arena_amounts(real_len, if huge { real_len } else { 0 }));
        client.memory.add_arena(arena, charge.of(entry));
        Ok(Served::Replied)
    }

    pub(in crate::control) fn reg_mr(
        &self,
        resources: &mut Resources,
        id: ClientId,
        seq: u32,
        request: &m::RegMr,
    ) -> Outcome {
        let (client, ledger) = resources.client_and_ledger(id)?;
        let limits = (ledger, &client.account);
        let stag = client.memory.register(limits, &self.keys, request)?;
        send_reply::<m::RegMr>(client, seq, &to_reply(stag))
    }

    pub(in crate::control) fn reg_memory(
        &self,
        resources: &mut Resources,
        id: ClientId,
        seq: u32,
        request: &m::RegMemory,
    ) -> Outcome {
        let (client, ledger) = resources.client_and_ledger(id)?;
        let limits = (ledger, &client.account);
        let stag = client
            .memory
            .register_extents(limits, &self.keys, request)?;
        send_reply::<m::RegMemory>(client, seq, &to_reply(stag))
    }

    pub(in crate::control) fn rereg_mr(
        &mut self,
        context: &mut Context,
        id: ClientId,
        request: &m::ReregMr,
    ) -> Outcome {
        let client = context.resources.client_mut(id)?;
        let (lkey, old) = client.memory.reregister(&self.keys, request)?;
        let reply = KeyReply::Rereg { lkey };
        self.await_quiescent_key(context, id, old, reply)
    }

    pub(in crate::control) fn dereg_mr(
        &mut self,
        context: &mut Context,
        id: ClientId,
        request: &m::DeregMr,
    ) -> Outcome {
        let client = context.resources.client_mut(id)?;
        let old = client.memory.retire_region(&self.keys, request)?;
        let lkey = Stag(request.lkey);
        self.await_quiescent_key(context, id, old, KeyReply::Dereg { lkey })
    }

    pub(in crate::control) fn alloc_mw(
        &self,
        resources: &mut Resources,
        id: ClientId,
        seq: u32,
        request: &m::AllocMw,
    ) -> Outcome {
        let (client, ledger) = resources.client_and_ledger(id)?;
        let limits = (ledger, &client.account);
        let stag = client.memory.add_window(limits, &self.keys, request)?;
        let (rkey, reserved) = (stag.0, 0);
        send_reply::<m::AllocMw>(client, seq, &m::MwReply { rkey, reserved })
    }

    pub(in crate::control) fn dealloc_mw(
        &mut self,
        context: &mut Context,
        id: ClientId,
        rkey: Stag,
    ) -> Outcome {
        let client = context.resources.client_mut(id)?;
        let (old, charge) = client.memory.remove_window(&self.keys, rkey)?;
        self.await_quiescent_key(context, id, old, KeyReply::DeallocMw(charge))
    }

    /// Makes a region for fast registration, which workers fill by work requests (ib_alloc_mr).
    pub(in crate::control) fn alloc_fast_mr(
        &self,
        resources: &mut Resources,
        id: ClientId,
        seq: u32,
        request: &m::AllocFastMr,
    ) -> Outcome {
        if request.max_pages == 0 || request.max_pages > MAX_FAST_PAGES {
            return Err(Refusal::new(
                libc::EINVAL,
                format!(
                    "{} pages: 1 to {MAX_FAST_PAGES} are allowed",
                    request.max_pages
                ),
            ));
        }
        let client = resources.client_mut(id)?;
        client.memory.check_pd(PdId(request.pd))?;
        let arena = client.memory.own_arena(ArenaId(request.arena))?;
        let pages = request.max_pages as usize;
        let page_heap = (pages * FAST_PAGE_HEAP) as u64;
        let charge = resources.charge(id, key_amounts(page_heap))?;
        let (list, stag) = resources.alloc_queue(id, pages * 8, |_, list| {
            let memory = list.region.clone();
            RegisteredMemory::new_fast(arena, pages, memory, list.offset, request.pd)
                .map_err(Refusal::outside_memory)
                .and_then(|region| self.keys.insert(region).map_err(Refusal::from))
        })?;
        let client = resources.client_mut(id)?;
        let (place, fd) = client.queues.give(&list);
        let reply = m::FastMrReply {
            lkey: stag.0,
            rkey: stag.0,
            max_pages: request.max_pages,
            reserved: 0,
            list: place,
        };
        send_reply_with_fds::<m::AllocFastMr>(client, seq, &reply, fd.as_slice())?;
        let mut region = MemoryRegion::in_arena(PdId(request.pd), ArenaId(request.arena));
        region.list = Some(list);
        client.memory.add_region(stag, charge.of(region));
        Ok(Served::Replied)
    }

    /// Defers the reply until no worker uses the key and no port holds a frame of this memory,
    /// which must not change under the NIC. No new reference to the key may be made after this
    /// call.
    fn await_quiescent_key(
        &mut self,
        context: &mut Context,
        id: ClientId,
        RetiredKey { ticket, regions }: RetiredKey,
        reply: KeyReply,
    ) -> Outcome {
        let token = if regions.is_empty() || !self.sends_by_reference {
            context.workers.next_token(Some(id))
        } else {
            let (token, left) = context.workers.await_frames(id, regions.clone());
            let client = context.resources.client_mut(id)?;
            client.memory.hold(token, left, regions);
            token
        };
        self.awaiting.push_back(token);
        let (left, then) = (0, Then::EndKey { ticket, reply });
        Ok(Served::Deferred(Deferred { token, left, then }))
    }

    /// Returns true if a request waits only until no worker uses its key.
    pub fn waits_for_keys(&self, resources: &Resources) -> bool {
        self.awaiting.iter().any(|token| {
            let client = token.client.and_then(|id| resources.clients.get(&id));
            client.is_some_and(|client| {
                let waiting = client.waiting.as_ref();
                waiting.is_some_and(|waiting| waiting.what.token == *token)
                    && client.memory.may_answer(*token)
            })
        })
    }

    /// Frees memory regions that no worker can access. Returns the number of those that wait.
    pub fn reclaim_keys(&self, budget: &TurnBudget) -> usize {
        loop {
            let (freed, left) = self.keys.reclaim_some(REGIONS_AT_ONCE);
            if freed == 0 || !budget.has_time() {
                return left;
            }
        }
    }
}

pub(in crate::control) fn alloc_pd(resources: &mut Resources, id: ClientId, seq: u32) -> Outcome {
    let charge = resources.charge(id, [(Quota::ProtectionDomains, 1)])?;
    // Unique among all clients, because keys are checked against it.
    let pd = PdId(resources.pds.allocate_number()?);
    let client = resources.client_mut(id)?;
    let entry = charge.of(ProtectionDomain { users: 0 });
    client.memory.add_pd(pd, entry);
    let reply = m::IdReply {
        id: pd.0,
        reserved: 0,
    };
    send_reply::<m::AllocPd>(client, seq, &reply)
}

pub(in crate::control) fn dealloc_pd(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
    pd: PdId,
) -> Outcome {
    let client = resources.client_mut(id)?;
    client.memory.remove_pd(pd)?;
    let outcome = send_reply::<m::DeallocPd>(client, seq, &EMPTY);
    resources.pds.release_number(pd.0);
    outcome
}

/// Keeps extents for the client's next REG_MEMORY.
pub(in crate::control) fn add_extents(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
    request: &m::AddExtents,
) -> Outcome {
    let (client, ledger) = resources.client_and_ledger(id)?;
    let limits = (ledger, &client.account);
    client.memory.add_extents(limits, request)?;
    send_reply::<m::AddExtents>(client, seq, &EMPTY)
}

fn to_reply(stag: Stag) -> m::MrReply {
    let (lkey, rkey) = (stag.0, stag.0);
    m::MrReply { lkey, rkey }
}

/// Answers FREE_ARENA.
pub(in crate::control) fn reply_freed(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
) -> Outcome {
    send_reply::<m::FreeArena>(resources.client_mut(id)?, seq, &EMPTY)
}

/// Answers the request that ended a key, after its last use. Late workers may still hold frames of its
/// memory.
pub(in crate::control) fn end_key(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
    reply: KeyReply,
) -> Outcome {
    let client = resources.client_mut(id)?;
    match reply {
        KeyReply::Dereg { lkey } => {
            // The charge is given back after the memory.
            if let Some((region, _charge)) = client.memory.remove_region(lkey)
                && let Some(list) = region.list
            {
                client.queues.free(list);
            }
            send_reply::<m::DeregMr>(client, seq, &EMPTY)
        }
        KeyReply::Rereg { lkey } => send_reply::<m::ReregMr>(client, seq, &to_reply(lkey)),
        KeyReply::DeallocMw(_charge) => send_reply::<m::DeallocMw>(client, seq, &EMPTY),
    }
}

/// A worker's ports have not freed in time the frames that a request waits for.
pub(in crate::control) fn on_frames_late(
    resources: &mut Resources,
    worker: usize,
    token: CommandToken,
) {
    let client = token.client.and_then(|id| resources.clients.get_mut(&id));
    if let Some(client) = client
        && client.memory.on_frames_late(worker, token)
    {
        tracing::warn!(
            client = client.id.0,
            worker,
            "a port still holds frames of deregistered memory: the memory is kept until they are freed"
        );
    }
}

/// A worker's ports have freed the frames of a request, which may have been answered.
pub(in crate::control) fn on_frames_released(
    context: &mut Context,
    worker: usize,
    token: CommandToken,
) {
    let id = token.client;
    let Some(client) = id.and_then(|id| context.resources.clients.get_mut(&id)) else {
        return;
    };
    let queue = DisposalQueue::Memory(client.account.uid());
    for arena in client.memory.on_frames_released(worker, token) {
        context.helpers.dispose(queue, Box::new(arena), None);
    }
}
