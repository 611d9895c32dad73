//! Protection domains, arenas, memory regions and keys of clients. Deregistration is answered when no
//! worker can use the key any more.

pub(super) mod arena_files;
pub(super) mod extents;
pub(super) mod held_memory;
pub(super) mod regions;
pub(super) mod windows;

use std::collections::VecDeque;
use std::sync::Arc;

use nix::libc;
use siw_memory::{DeregError, KeyTable, RegisteredMemory, Retired, Stag};
use siw_shm::Access;
use siw_shm::control::messages as m;
use siw_shm::shared_memory::{PAGE, PageSize, SharedMemory};

use self::regions::{ArenaOrigin, ClientArena, MemoryRegion};
use crate::config::ProcessMemoryPolicy;
use crate::control::account::quotas::{Charge, Charged, Quota};
use crate::control::context::Context;
use crate::control::request::deferred::{Deferred, DeferredRequest, EndedKey, KeyReply, Then};
use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{EMPTY, Outcome, Served, send_reply, send_reply_with_fds};
use crate::control::resources::{Client, ProtectionDomain, Resources};
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

/// Quota amounts of an arena of `len` bytes, `huge_len` of them in the daemon's hugepages.
pub(in crate::control) fn arena_amounts(len: u64, huge_len: u64) -> [(Quota, u64); 4] {
    [
        (Quota::Memory, len),
        (Quota::Descriptors, 1),
        (Quota::NicArenas, 1),
        (Quota::HugeMemory, huge_len),
    ]
}

/// Quota amounts of a memory key, with the heap that it needs in addition to that of every key.
/// Regions and windows share this quota.
pub(in crate::control) fn key_amounts(heap: u64) -> [(Quota, u64); 2] {
    [(Quota::Heap, heap), (Quota::MemoryKeys, 1)]
}

/// Registration of memory: the keys, and the rules for memory on this host.
pub(in crate::control) struct Memory {
    /// The memory keys, which workers read.
    pub keys: Arc<KeyTable>,
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
        add_arena(
            &mut context.resources,
            id,
            seq,
            charge,
            ArenaOrigin::Allocated,
            made,
        )
    }

    pub(in crate::control) fn free_arena(
        &self,
        context: &mut Context,
        id: ClientId,
        seq: u32,
        arena: ArenaId,
    ) -> Outcome {
        let client = context.resources.client_mut(id)?;
        if client.processes.contains_key(&arena) {
            return free_process(&mut context.resources, id, seq, arena);
        }
        let found = client
            .arenas
            .get(&arena)
            .ok_or_else(|| Refusal::no_such("arena", arena.0))?;
        if found.mrs > 0 {
            return Err(Refusal::in_use("arena", found.mrs));
        }
        let len = found.region.len() as u64;
        let removed = client.arenas.remove(&arena);
        let Some(removed) = removed.and_then(|arena| client.held_memory.keep(arena)) else {
            return send_reply::<m::FreeArena>(client, seq, &EMPTY);
        };
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

    pub(in crate::control) fn reg_mr(
        &self,
        resources: &mut Resources,
        id: ClientId,
        seq: u32,
        request: &m::RegMr,
    ) -> Outcome {
        let client = resources.client_mut(id)?;
        let mr = check_registration(client, request)?;
        own_arena(client, ArenaId(request.arena))?;
        let charge = resources.charge(id, key_amounts(0))?;
        let stag = self.insert_key(mr)?;
        let client = resources.client_mut(id)?;
        let region = MemoryRegion::in_arena(PdId(request.pd), ArenaId(request.arena));
        add_region(client, stag, charge.of(region));
        let reply = m::MrReply {
            lkey: stag.0,
            rkey: stag.0,
        };
        send_reply::<m::RegMr>(client, seq, &reply)
    }

    /// Deregisters and registers anew, as ibv_rereg_mr(3) specifies: the old keys become invalid for
    /// ever. An invalid request leaves the region unchanged.
    pub(in crate::control) fn rereg_mr(
        &mut self,
        context: &mut Context,
        id: ClientId,
        request: &m::ReregMr,
    ) -> Outcome {
        let client = context.resources.client_mut(id)?;
        let old = client
            .mrs
            .get(&Stag(request.lkey))
            .ok_or_else(|| Refusal::no_such("memory region with lkey", request.lkey))?;
        if old.list.is_some() {
            return Err(Refusal::new(
                libc::EINVAL,
                "a region for fast registration can be changed only by REG_MR work requests",
            ));
        }
        if old.extents.is_some() {
            return self.change_access(context, id, request);
        }
        const ALL: u32 = m::REREG_TRANSLATION | m::REREG_PD | m::REREG_ACCESS;
        if request.flags == 0 || request.flags & !ALL != 0 {
            return Err(Refusal::new(
                libc::EINVAL,
                format!(
                    "flags {:#x}: 1 to 7 are allowed (ibv_rereg_mr(3))",
                    request.flags
                ),
            ));
        }
        let has = |flag| request.flags & flag != 0;
        let (offset, len, access) = self
            .keys
            .with_entry(Stag(request.lkey), |mr| {
                (mr.start_offset(), mr.len(), mr.access_rights())
            })
            .ok_or_else(|| Refusal::no_such("memory region with lkey", request.lkey))?;
        let moved = has(m::REREG_TRANSLATION);
        let new = m::RegMr {
            pd: if has(m::REREG_PD) {
                request.pd
            } else {
                old.pd.0
            },
            arena: if moved { request.arena } else { old.arena.0 },
            offset: if moved { request.offset } else { offset },
            len: if moved { request.len } else { len },
            va: request.va,
            access: if has(m::REREG_ACCESS) {
                request.access
            } else {
                access.0
            },
            reserved: 0,
        };
        let mr = check_registration(client, &new)?;
        own_arena(client, ArenaId(new.arena))?;
        let regions = regions_of(client, Stag(request.lkey));
        let ticket = self
            .keys
            .deregister(Stag(request.lkey))
            .map_err(dereg_refusal)?;
        let charge = remove_region(client, Stag(request.lkey));
        let stag = self.insert_key(mr)?;
        let region = MemoryRegion::in_arena(PdId(new.pd), ArenaId(new.arena));
        if let Some(charge) = charge {
            add_region(client, stag, charge.of(region));
        }
        let reply = KeyReply::Rereg { lkey: stag };
        Ok(self.await_quiescent_key(context, id, ticket, regions, reply))
    }

    /// Changes the access rights of a region of the application's own memory. The keys stay the
    /// same, so peers that know them are not affected.
    fn change_access(
        &mut self,
        context: &mut Context,
        id: ClientId,
        request: &m::ReregMr,
    ) -> Outcome {
        let lkey = Stag(request.lkey);
        let new = check_access(request.access)?;
        let old = self
            .keys
            .with_entry(lkey, RegisteredMemory::access_rights)
            .ok_or_else(|| Refusal::no_such("memory region with lkey", request.lkey))?;
        let added = new.without(old);
        let is_rebased = (old.0 ^ new.0) & Access::ZERO_BASED.0 != 0;
        let client = context.resources.client_mut(id)?;
        if request.flags != m::REREG_ACCESS || is_rebased || !permits(client, lkey, added) {
            return Err(Refusal::new(
                libc::EINVAL,
                "this change needs deregistration and a new registration of the region",
            ));
        }
        let ticket = self.keys.change_access(lkey, new).map_err(dereg_refusal)?;
        // Frames that still refer to the memory are only read, for retransmission.
        let reply = KeyReply::Rereg { lkey };
        tracing::debug!(
            client = id.0,
            lkey = lkey.0,
            access = new.0,
            "access rights changed"
        );
        Ok(self.await_quiescent_key(context, id, ticket, Vec::new(), reply))
    }

    pub(in crate::control) fn dereg_mr(
        &mut self,
        context: &mut Context,
        id: ClientId,
        request: &m::DeregMr,
    ) -> Outcome {
        let lkey = Stag(request.lkey);
        let client = context.resources.client_mut(id)?;
        if !client.mrs.contains_key(&lkey) {
            return Err(Refusal::no_such("memory region with lkey", lkey.0));
        }
        let regions = regions_of(client, lkey);
        if request.flags & m::DEREG_UNBIND_WINDOWS != 0 {
            self.keys.unbind_region(lkey, client.mws.keys().copied());
        }
        let ticket = self.keys.deregister(lkey).map_err(dereg_refusal)?;
        let reply = KeyReply::Dereg { lkey };
        Ok(self.await_quiescent_key(context, id, ticket, regions, reply))
    }

    /// Defers the reply until no worker uses the key and no port holds a frame of this memory,
    /// which must not change under the NIC. No new reference to the key may be made after this
    /// call.
    pub(in crate::control) fn await_quiescent_key(
        &mut self,
        context: &mut Context,
        id: ClientId,
        ticket: Retired,
        regions: Vec<Arc<SharedMemory>>,
        reply: KeyReply,
    ) -> Served {
        let (token, left) = if regions.is_empty() || !self.sends_by_reference {
            (context.workers.next_token(Some(id)), 0)
        } else {
            context.workers.await_frames(id, regions.clone())
        };
        self.awaiting.push_back(token);
        let then = Then::EndKey(EndedKey {
            ticket,
            late: Vec::new(),
            regions,
            reply,
        });
        Served::Deferred(Deferred { token, left, then })
    }

    /// Inserts a key, which is charged already.
    pub(in crate::control) fn insert_key(&self, memory: RegisteredMemory) -> Result<Stag, Refusal> {
        let inserted = self.keys.insert(memory);
        inserted.map_err(|error| Refusal::new(libc::ENOMEM, error.to_string()))
    }

    /// Returns true if a request waits only until no worker uses its key.
    pub fn waits_for_keys(&self, resources: &Resources) -> bool {
        self.awaiting.iter().any(|token| {
            let client = token.client.and_then(|id| resources.clients.get(&id));
            let waiting = client.and_then(|client| client.waiting.as_ref());
            waiting.is_some_and(|DeferredRequest { what, .. }| match &what.then {
                Then::EndKey(key) => what.token == *token && what.left == key.late.len(),
                _ => false,
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
    client
        .pds
        .insert(pd, charge.of(ProtectionDomain { users: 0 }));
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
    let found = client
        .pds
        .get(&pd)
        .ok_or_else(|| Refusal::no_such("protection domain", pd.0))?;
    if found.users > 0 {
        return Err(Refusal::in_use("protection domain", found.users));
    }
    client.pds.remove(&pd);
    let outcome = send_reply::<m::DeallocPd>(client, seq, &EMPTY);
    resources.pds.release_number(pd.0);
    outcome
}

/// Adds a new arena, or an imported file, to its client and replies.
pub(in crate::control) fn add_arena(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
    mut charge: Charge<4>,
    origin: ArenaOrigin,
    made: Result<MadeArena, Refusal>,
) -> Outcome {
    let (region, external) = made?;
    let peer = resources.client_mut(id)?.peer;
    let listed = (!origin.is_imported()).then(|| resources.arena_files.list(&region, peer));
    let client = resources.client_mut(id)?;
    let arena = ArenaId(client.next_number());
    let entry = ClientArena {
        listed: listed.flatten(),
        region: region.clone(),
        mrs: 0,
        origin,
        external,
    };
    if origin.is_imported() {
        client.arenas.insert(arena, charge.of(entry));
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
    client.arenas.insert(arena, charge.of(entry));
    Ok(Served::Replied)
}

/// Answers FREE_ARENA.
pub(in crate::control) fn reply_freed(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
) -> Outcome {
    send_reply::<m::FreeArena>(resources.client_mut(id)?, seq, &EMPTY)
}

/// Answers the request that ended a key, after its last use. `left` workers still hold frames
/// of its memory, and report their release with the token.
pub(in crate::control) fn end_key(
    resources: &mut Resources,
    id: ClientId,
    seq: u32,
    key: EndedKey,
    (token, left): (CommandToken, usize),
) -> Outcome {
    let client = resources.client_mut(id)?;
    client.held_memory.hold(token, left, key.regions);
    match key.reply {
        KeyReply::Dereg { lkey } => {
            drop(remove_region(client, lkey));
            send_reply::<m::DeregMr>(client, seq, &EMPTY)
        }
        KeyReply::Rereg { lkey } => {
            let (lkey, rkey) = (lkey.0, lkey.0);
            send_reply::<m::ReregMr>(client, seq, &m::MrReply { lkey, rkey })
        }
        KeyReply::DeallocMw(_charge) => send_reply::<m::DeallocMw>(client, seq, &EMPTY),
    }
}

/// Ends the use of a client's address space.
fn free_process(resources: &mut Resources, id: ClientId, seq: u32, arena: ArenaId) -> Outcome {
    let client = resources.client_mut(id)?;
    let users = client.processes.get(&arena).map_or(0, |entry| entry.mrs);
    if users > 0 {
        return Err(Refusal::in_use("address space", users));
    }
    client.processes.remove(&arena);
    send_reply::<m::FreeArena>(client, seq, &EMPTY)
}

/// A worker's ports have not freed in time the frames that a request waits for.
pub(in crate::control) fn on_frames_held(
    resources: &mut Resources,
    worker: usize,
    token: CommandToken,
) {
    if let Some(late) = late_workers(resources, token) {
        late.push(worker);
        tracing::warn!(
            client = token.client.map(|id| id.0),
            worker,
            "a port still holds frames of deregistered memory: the memory is kept until they are freed"
        );
    }
}

/// A late worker's ports have freed the frames before the request was answered.
pub(in crate::control) fn forget_late_worker(
    resources: &mut Resources,
    worker: usize,
    token: CommandToken,
) {
    if let Some(late) = late_workers(resources, token) {
        late.retain(|other| *other != worker);
    }
}

/// List of late workers of the request that waits for frames with this token.
fn late_workers(resources: &mut Resources, token: CommandToken) -> Option<&mut Vec<usize>> {
    match &mut resources.deferred_mut(token)?.then {
        Then::EndKey(key) => Some(&mut key.late),
        _ => None,
    }
}

/// Handles a worker's report of freed frames after the request was answered. Returns false if
/// the token belongs to another wait.
pub(in crate::control) fn on_held_released(context: &mut Context, token: CommandToken) -> bool {
    let id = token.client;
    let Some(client) = id.and_then(|id| context.resources.clients.get_mut(&id)) else {
        return false;
    };
    let Some(gone) = client.held_memory.on_released(token) else {
        return false;
    };
    let queue = DisposalQueue::Memory(client.account.uid());
    for arena in gone {
        context.helpers.dispose(queue, Box::new(arena), None);
    }
    true
}

/// Shared memory behind a registration, which NICs may read.
fn regions_of(client: &Client, lkey: Stag) -> Vec<Arc<SharedMemory>> {
    let arenas = client.mrs.get(&lkey).map(|region| region.arenas());
    let arenas = arenas.unwrap_or_default().iter();
    arenas
        .filter_map(|arena| client.arenas.get(arena))
        .map(|arena| arena.region.clone())
        .collect()
}

fn dereg_refusal(error: DeregError) -> Refusal {
    let errno = match error {
        DeregError::Unknown => libc::ENOENT,
        DeregError::Bound(_) => libc::EBUSY,
    };
    Refusal::new(errno, error.to_string())
}

/// Access rights requested by a registration.
pub(in crate::control) fn check_access(bits: u32) -> Result<Access, Refusal> {
    let access = Access(bits).without(Access::OPTIONAL);
    if !Access::ALL.contains(access) {
        return Err(Refusal::new(
            libc::EINVAL,
            format!("unknown access bits {bits:#x}"),
        ));
    }
    if access.allows_remote_changes() && !access.contains(Access::LOCAL_WRITE) {
        return Err(Refusal::new(
            libc::EINVAL,
            "remote write and remote atomic require local write (ibv_reg_mr(3))",
        ));
    }
    Ok(access)
}

/// Checks a registration.
fn check_registration(client: &Client, request: &m::RegMr) -> Result<RegisteredMemory, Refusal> {
    let access = check_access(request.access)?;
    let arena = client
        .arenas
        .get(&ArenaId(request.arena))
        .ok_or_else(|| Refusal::no_such("arena", request.arena))?;
    if !client.pds.contains_key(&PdId(request.pd)) {
        return Err(Refusal::no_such("protection domain", request.pd));
    }
    RegisteredMemory::new(
        arena.region.clone(),
        request.offset,
        request.len,
        request.va,
        request.pd,
        None,
        access,
    )
    .map_err(|_| {
        Refusal::new(
            libc::EINVAL,
            format!(
                "{} bytes at {} are outside the arena of {} bytes, or their address wraps",
                request.len,
                request.offset,
                arena.region.len()
            ),
        )
    })
}

/// [`own_pages`] of an arena by its number, if there is one.
pub(in crate::control) fn own_arena(client: &Client, arena: ArenaId) -> Result<(), Refusal> {
    client
        .arenas
        .get(&arena)
        .map_or(Ok(()), |arena| own_pages(arena))
}

/// Keeps a client from freeing pages of an arena, which it has mapped, before workers access it. Pages
/// of an imported file remain its owner's.
pub(in crate::control) fn own_pages(arena: &ClientArena) -> Result<(), Refusal> {
    if arena.origin.is_imported() {
        return Ok(());
    }
    arena.region.own_pages().map_err(|error| {
        Refusal::new(
            libc::EPERM,
            format!("the arena cannot be registered: {error}"),
        )
    })
}

/// Returns whether the memory of a region permits rights beyond those that it was registered with. Memory
/// copied by system calls was checked by its process, for these rights only.
fn permits(client: &Client, lkey: Stag, added: Access) -> bool {
    if !added.intersects(Access::LOCAL_WRITE | Access::REMOTE_ATOMIC) {
        return true;
    }
    let is_writable = |number| {
        let arena = client.arenas.get(number);
        arena.is_some_and(|arena| arena.region.is_writable())
    };
    let parts = client.mrs.get(&lkey).and_then(|mr| mr.extents.as_ref());
    parts.is_some_and(|parts| parts.arenas.iter().all(is_writable))
}

/// Adds a region to the client's objects.
pub(in crate::control) fn add_region(
    client: &mut Client,
    key: Stag,
    mut region: Charged<MemoryRegion, 2>,
) {
    if let Some(extents) = &mut region.extents {
        client.registered.add(extents);
    }
    client.count_users(&region, |count| *count += 1);
    client.mrs.insert(key, region);
}

/// Removes a region from the client's objects; returns its charge.
fn remove_region(client: &mut Client, lkey: Stag) -> Option<Charge<2>> {
    let (region, charge) = client.mrs.remove(&lkey)?.split();
    if let Some(extents) = &region.extents {
        client.registered.remove(extents);
    }
    client.count_users(&region, |count| *count -= 1);
    if let Some(list) = region.list {
        client.queues.free(list);
    }
    Some(charge)
}
