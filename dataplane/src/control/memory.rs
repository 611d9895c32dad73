//! Client requests for arenas and memory regions.

use std::sync::Arc;

use nix::libc;
use siw_memory::{DeregError, KeyTable, RegisteredMemory, Retired, Stag};
use siw_shm::Access;
use siw_shm::control::messages as m;
use siw_shm::shared_memory::{PAGE, PageSize, SharedMemory};

use super::ControlThread;
use super::helpers::{self, DisposalQueue, LONG_MEMORY, MemoryOrder, MemorySource};
use super::pending::{DeferredRequest, PendingReply, QuiescentReply};
use super::quotas::Quota;
use super::regions::{ClientArena, MemoryRegion};
use super::reports::{HelperReport, MadeArena};
use super::requests::*;
use super::resources::Client;
use crate::ids::{ArenaId, ClientId, CommandToken, PdId};

/// Quota amounts of an arena.
pub(super) fn arena_amounts(len: u64) -> [(Quota, u64); 3] {
    [
        (Quota::Memory, len),
        (Quota::Descriptors, 1),
        (Quota::NicArenas, 1),
    ]
}

impl ControlThread {
    pub(super) fn alloc_arena(
        &mut self,
        id: ClientId,
        seq: u32,
        request: &m::AllocArena,
    ) -> Outcome {
        let len = usize::try_from(request.len)
            .ok()
            .and_then(|len| len.checked_next_multiple_of(PAGE))
            .filter(|len| *len > 0)
            .ok_or_else(|| Refusal::new(libc::EINVAL, "the length of the arena is invalid"))?;
        let huge = request.huge != 0 && self.config.hugepages;
        self.resources.charge(id, &arena_amounts(len as u64))?;
        let pages = self.resources.choose_pages(id, len as u64, huge);
        let takes_long = pages == PageSize::TryHuge && len as u64 > LONG_MEMORY;
        if takes_long || self.config.ports_use_dma {
            let token = self.workers.next_token(Some(id));
            self.helpers.order_memory(MemoryOrder {
                client: id,
                token,
                source: MemorySource::New { len, pages },
            });
            return Ok(Served::Deferred(PendingReply::MakeArena {
                token,
                len: len as u64,
                imported: false,
            }));
        }
        let made = SharedMemory::create_memfd("siwd-arena", len, pages)
            .and_then(|memory| memory.guard_for(id.fault_owner()))
            .map_err(|error| format!("no shared memory: {error}"))
            .and_then(|memory| helpers::map_memory(memory, &*self.config.map_arena))
            .map_err(|reason| Refusal::new(libc::ENOMEM, reason));
        self.add_arena(id, seq, len as u64, false, made)
    }

    /// Adds a new arena, or an imported file, to its client and replies. It was charged as `len` bytes.
    pub(super) fn add_arena(
        &mut self,
        id: ClientId,
        seq: u32,
        len: u64,
        imported: bool,
        made: Result<MadeArena, Refusal>,
    ) -> Outcome {
        let made = made.inspect_err(|_| self.resources.release(id, &arena_amounts(len)));
        let (region, external) = made?;
        let client = self.resources.client_mut(id)?;
        let arena = ArenaId(client.next_number());
        let entry = ClientArena {
            region: region.clone(),
            mrs: 0,
            imported,
            external,
        };
        if imported {
            client.arenas.insert(arena, entry);
            let (id, reserved) = (arena.0, 0);
            let reply = m::IdReply { id, reserved };
            return send_reply::<m::ImportMemory>(client, seq, &reply);
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
        client.arenas.insert(arena, entry);
        // Hugepages are allocated whole, so the arena may be larger than charged.
        let resources = &mut self.resources;
        if let Some(client) = resources.clients.get_mut(&id) {
            let (account, ledger) = (&mut client.account, &mut resources.ledger);
            ledger.add(account, Quota::Memory, real_len.saturating_sub(len));
            ledger.add(account, Quota::HugeMemory, if huge { real_len } else { 0 });
        }
        Ok(Served::Replied)
    }

    /// A helper has made an arena, or failed to. The client may have left.
    pub(super) fn finish_arena(
        &mut self,
        id: ClientId,
        token: CommandToken,
        made: Result<MadeArena, Refusal>,
    ) {
        let waits = |waiting: &mut DeferredRequest| matches!(waiting.what, PendingReply::MakeArena { token: of, .. } if of == token);
        let client = self.resources.clients.get_mut(&id);
        let Some(DeferredRequest {
            seq,
            what: PendingReply::MakeArena { len, imported, .. },
        }) = client.and_then(|client| client.waiting.take_if(waits))
        else {
            self.resources.forget_helper(id, token);
            // The user is unknown: the client has left. Its memory is fresh, and freed as fast as any.
            let queue = DisposalQueue::Memory(u32::MAX);
            self.helpers.dispose(queue, Box::new(made), None);
            return;
        };
        let kind = match imported {
            true => <m::ImportMemory as m::Message>::KIND,
            false => <m::AllocArena as m::Message>::KIND,
        };
        let added = self.add_arena(id, seq, len, imported, made);
        if let (Err(refusal), Some(client)) = (added, self.resources.clients.get(&id)) {
            refusal.send(&client.conn, kind, seq);
        }
        self.on_answered(id);
    }

    pub(super) fn free_arena(&mut self, id: ClientId, seq: u32, arena: ArenaId) -> Outcome {
        let client = self.resources.client_mut(id)?;
        if client.processes.contains_key(&arena) {
            return self.free_process(id, seq, arena);
        }
        let found = client
            .arenas
            .get(&arena)
            .ok_or_else(|| Refusal::no_such("arena", arena.0))?;
        if found.mrs > 0 {
            return Err(Refusal::in_use("arena", found.mrs));
        }
        let len = found.region.len() as u64;
        let mut amounts = arena_amounts(len).to_vec();
        if found.region.is_huge() && !found.imported {
            amounts.push((Quota::HugeMemory, len));
        }
        let removed = client.arenas.remove(&arena);
        let removed = removed.map(|arena| (arena, amounts));
        let Some((removed, amounts)) = removed.and_then(|arena| client.held_memory.keep(arena))
        else {
            return send_reply::<m::FreeArena>(client, seq, &EMPTY);
        };
        // The last descriptor of an imported file frees all its pages, however little of it was mapped.
        if len <= LONG_MEMORY && !self.config.ports_use_dma && !removed.imported {
            drop(removed);
            self.resources.release(id, &amounts);
            let client = self.resources.client_mut(id)?;
            return send_reply::<m::FreeArena>(client, seq, &EMPTY);
        }
        let token = self.workers.next_token(Some(id));
        let report = HelperReport::Released {
            client: id,
            token,
            amounts,
        };
        let queue = DisposalQueue::Memory(self.resources.client_mut(id)?.account.uid());
        self.helpers.dispose(queue, Box::new(removed), Some(report));
        Ok(Served::Deferred(PendingReply::FreeArena { token }))
    }

    /// A helper has freed an arena.
    pub(super) fn finish_free_arena(&mut self, id: ClientId, token: CommandToken) {
        let Some(client) = self.resources.clients.get_mut(&id) else {
            return;
        };
        let waits = |waiting: &mut DeferredRequest| matches!(waiting.what, PendingReply::FreeArena { token: of } if of == token);
        if let Some(waiting) = client.waiting.take_if(waits) {
            let _ = client
                .conn
                .send_reply::<m::FreeArena>(waiting.seq, &EMPTY, &[]);
            self.on_answered(id);
        }
    }

    pub(super) fn reg_mr(&mut self, id: ClientId, seq: u32, request: &m::RegMr) -> Outcome {
        let keys = self.config.keys.clone();
        let client = self.resources.client_mut(id)?;
        let mr = check_registration(client, request)?;
        own_arena(client, ArenaId(request.arena))?;
        let stag = self.insert_key(id, mr, &keys)?;
        let client = self.resources.client_mut(id)?;
        add_region(
            client,
            stag,
            MemoryRegion::in_arena(PdId(request.pd), ArenaId(request.arena)),
        );
        let reply = m::MrReply {
            lkey: stag.0,
            rkey: stag.0,
        };
        send_reply::<m::RegMr>(client, seq, &reply)
    }

    /// Inserts a key and charges it to its client: regions and windows share this quota.
    pub(super) fn insert_key(
        &mut self,
        id: ClientId,
        memory: RegisteredMemory,
        keys: &KeyTable,
    ) -> Result<Stag, Refusal> {
        self.resources.charge(id, &[(Quota::MemoryKeys, 1)])?;
        keys.insert(memory).map_err(|error| {
            self.resources.release(id, &[(Quota::MemoryKeys, 1)]);
            Refusal::new(libc::ENOMEM, error.to_string())
        })
    }

    /// Deregisters and registers anew, as ibv_rereg_mr(3) specifies: the old keys become invalid
    /// for ever. An invalid request leaves the region unchanged.
    pub(super) fn rereg_mr(&mut self, id: ClientId, request: &m::ReregMr) -> Outcome {
        let keys = self.config.keys.clone();
        let client = self.resources.client_mut(id)?;
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
            return self.change_access(id, request);
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
        let (offset, len, access) = keys
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
        let ticket = keys.deregister(Stag(request.lkey)).map_err(dereg_refusal)?;
        remove_region(client, Stag(request.lkey));
        self.resources.release(id, &[(Quota::MemoryKeys, 1)]);
        let stag = self.insert_key(id, mr, &keys)?;
        let client = self.resources.client_mut(id)?;
        let region = MemoryRegion::in_arena(PdId(new.pd), ArenaId(new.arena));
        add_region(client, stag, region);
        let then = QuiescentReply::Rereg { lkey: stag };
        Ok(self.await_quiescent_key(id, ticket, regions, then))
    }

    /// Changes the access rights of a region of the application's own memory. The keys stay the
    /// same, so peers that know them are not affected.
    fn change_access(&mut self, id: ClientId, request: &m::ReregMr) -> Outcome {
        let keys = self.config.keys.clone();
        let lkey = Stag(request.lkey);
        let new = check_access(request.access)?;
        let old = keys
            .with_entry(lkey, RegisteredMemory::access_rights)
            .ok_or_else(|| Refusal::no_such("memory region with lkey", request.lkey))?;
        // The memory was checked for the old rights only, so rights that need another check are
        // refused.
        let added = new.without(old);
        let is_rebased = (old.0 ^ new.0) & Access::ZERO_BASED.0 != 0;
        if request.flags != m::REREG_ACCESS
            || is_rebased
            || added.intersects(Access::LOCAL_WRITE | Access::REMOTE_ATOMIC)
        {
            return Err(Refusal::new(
                libc::EINVAL,
                "this change needs deregistration and a new registration of the region",
            ));
        }
        let ticket = keys.change_access(lkey, new).map_err(dereg_refusal)?;
        // Frames that still refer to the memory are only read, for retransmission.
        let then = QuiescentReply::Rereg { lkey };
        tracing::debug!(
            client = id.0,
            lkey = lkey.0,
            access = new.0,
            "access rights changed"
        );
        Ok(self.await_quiescent_key(id, ticket, Vec::new(), then))
    }

    pub(super) fn dereg_mr(&mut self, id: ClientId, request: &m::DeregMr) -> Outcome {
        let keys = self.config.keys.clone();
        let lkey = Stag(request.lkey);
        let client = self.resources.client_mut(id)?;
        if !client.mrs.contains_key(&lkey) {
            return Err(Refusal::no_such("memory region with lkey", lkey.0));
        }
        let regions = regions_of(client, lkey);
        if request.flags & m::DEREG_UNBIND_WINDOWS != 0 {
            keys.unbind_region(lkey, client.mws.keys().copied());
        }
        let ticket = keys.deregister(lkey).map_err(dereg_refusal)?;
        let then = QuiescentReply::Dereg { lkey };
        Ok(self.await_quiescent_key(id, ticket, regions, then))
    }

    /// Defers the reply until no worker uses the key and no port holds a frame of this memory,
    /// which must not change under the NIC. No new reference to the key may be made after this
    /// call.
    pub(super) fn await_quiescent_key(
        &mut self,
        id: ClientId,
        ticket: Retired,
        regions: Vec<Arc<SharedMemory>>,
        then: QuiescentReply,
    ) -> Served {
        let (token, left) = if regions.is_empty() || !self.config.sends_by_reference {
            (self.workers.next_token(Some(id)), 0)
        } else {
            self.workers.await_frames(id, regions.clone().into())
        };
        self.resources.awaiting_keys.push(id);
        Served::Deferred(PendingReply::QuiescentKey {
            ticket,
            token,
            left,
            late: Vec::new(),
            regions,
            then,
        })
    }

    /// Answers the deferred request: no worker uses the key any more.
    pub(super) fn finish_quiescent_key(&mut self, id: ClientId) {
        let Some(client) = self.resources.clients.get_mut(&id) else {
            return;
        };
        let waits = |waiting: &mut DeferredRequest| {
            matches!(waiting.what, PendingReply::QuiescentKey { .. })
        };
        let Some(DeferredRequest {
            seq,
            what:
                PendingReply::QuiescentKey {
                    then,
                    token,
                    left,
                    regions,
                    ..
                },
        }) = client.waiting.take_if(waits)
        else {
            return;
        };
        Self::hold_memory(client, token, left, regions);
        if !matches!(then, QuiescentReply::Rereg { .. }) {
            let account = &mut client.account;
            self.resources.ledger.release(account, Quota::MemoryKeys, 1);
        }
        if let QuiescentReply::Dereg { lkey } = then {
            let heap = client.mrs.get(&lkey).map_or(0, |region| region.heap);
            let account = &mut client.account;
            self.resources.ledger.release(account, Quota::Heap, heap);
        }
        let _ = match then {
            QuiescentReply::Dereg { lkey } => {
                remove_region(client, lkey);
                client.conn.send_reply::<m::DeregMr>(seq, &EMPTY, &[])
            }
            QuiescentReply::Rereg { lkey } => {
                let reply = m::MrReply {
                    lkey: lkey.0,
                    rkey: lkey.0,
                };
                client.conn.send_reply::<m::ReregMr>(seq, &reply, &[])
            }
            QuiescentReply::DeallocMw => client.conn.send_reply::<m::DeallocMw>(seq, &EMPTY, &[]),
        };
        self.on_answered(id);
    }
}

/// Shared memory behind a registration, which NICs may read.
fn regions_of(client: &Client, lkey: Stag) -> Vec<Arc<SharedMemory>> {
    let arenas = client.mrs.get(&lkey).map(MemoryRegion::arenas);
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
pub(super) fn check_access(bits: u32) -> Result<Access, Refusal> {
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

/// Keeps a client from freeing pages of an arena, which it has mapped, before workers access it. Pages
/// of an imported file remain its owner's.
pub(super) fn own_arena(client: &Client, arena: ArenaId) -> Result<(), Refusal> {
    let Some(arena) = client.arenas.get(&arena).filter(|arena| !arena.imported) else {
        return Ok(());
    };
    arena.region.own_pages().map_err(|error| {
        Refusal::new(
            libc::EPERM,
            format!("the arena cannot be registered: {error}"),
        )
    })
}

/// Adds a region to the client's objects.
pub(super) fn add_region(client: &mut Client, key: Stag, mut region: MemoryRegion) {
    if let Some(extents) = &mut region.extents {
        client.registered.add(extents);
    }
    client.count_users(&region, |count| *count += 1);
    client.mrs.insert(key, region);
}

fn remove_region(client: &mut Client, lkey: Stag) {
    if let Some(region) = client.mrs.remove(&lkey) {
        if let Some(extents) = &region.extents {
            client.registered.remove(extents);
        }
        client.count_users(&region, |count| *count -= 1);
        if let Some(list) = region.list {
            client.queues.free(list);
        }
    }
}
