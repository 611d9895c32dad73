//! Arenas and memory regions: requests of clients.

use std::sync::Arc;

use nix::libc;
use siw_memory::queue_allocator::QueueMemory;
use siw_memory::{DeregError, RegisteredMemory, Stag};
use siw_shm::Access;
use siw_shm::control::messages as m;
use siw_shm::shared_memory::{PageSize, SharedMemory};

use super::ControlThread;
use super::pending::{DeferredRequest, PendingReply};
use super::requests::*;
use super::resources::{Client, ClientArena, MemoryRegion};
use crate::ids::{ArenaId, ClientId, PdId};

impl ControlThread {
    pub(super) fn alloc_arena(
        &mut self,
        id: ClientId,
        seq: u32,
        request: &m::AllocArena,
    ) -> Outcome {
        let limit = self.config.limits.memory_per_client.0;
        let huge = request.huge != 0 && self.config.hugepages;
        let client = self.resources.client_mut(id)?;
        if request.len == 0 {
            return Err(Refusal::new(libc::EINVAL, "an arena needs a length"));
        }
        if client.memory.saturating_add(request.len) > limit {
            return Err(Refusal::over_limit("arena bytes", limit));
        }
        let pages = if huge {
            PageSize::TryHuge
        } else {
            PageSize::Normal
        };
        let region = Arc::new(
            SharedMemory::create_memfd("siwd-arena", request.len as usize, pages)
                .and_then(|memory| memory.guard_for(id.fault_owner()))
                .map_err(Refusal::no_shared_memory)?,
        );
        let external =
            (self.config.map_arena)(&region).map_err(|error| Refusal::new(libc::ENOMEM, error))?;
        let client = self.resources.client_mut(id)?;
        let arena = ArenaId(client.next_number());
        let reply = m::ArenaReply {
            arena: arena.0,
            huge: region.is_huge().into(),
            len: region.len() as u64,
        };
        client.memory += region.len() as u64;
        let fd = region
            .memfd()
            .ok_or_else(|| Refusal::new(libc::ENOMEM, "shared memory has no descriptor"))?;
        send_reply_with_fds::<m::AllocArena>(client, seq, &reply, &[fd])?;
        client.arenas.insert(
            arena,
            ClientArena {
                region,
                mrs: 0,
                external,
            },
        );
        Ok(Served::Replied)
    }

    pub(super) fn free_arena(&mut self, id: ClientId, seq: u32, arena: ArenaId) -> Outcome {
        let client = self.resources.client_mut(id)?;
        let found = client
            .arenas
            .get(&arena)
            .ok_or_else(|| Refusal::no_such("arena", arena.0))?;
        if found.mrs > 0 {
            return Err(Refusal::in_use("arena", found.mrs));
        }
        client.memory -= found.region.len() as u64;
        client.arenas.remove(&arena);
        send_reply::<m::FreeArena>(client, seq, &EMPTY)
    }

    pub(super) fn reg_mr(&mut self, id: ClientId, seq: u32, request: &m::RegMr) -> Outcome {
        self.check_key_limit(id)?;
        let keys = self.config.keys.clone();
        let client = self.resources.client_mut(id)?;
        let mr = check_registration(client, request)?;
        let stag = keys
            .insert(mr)
            .map_err(|error| Refusal::new(libc::ENOMEM, error.to_string()))?;
        add_region(client, stag, PdId(request.pd), ArenaId(request.arena), None);
        let reply = m::MrReply {
            lkey: stag.0,
            rkey: stag.0,
        };
        send_reply::<m::RegMr>(client, seq, &reply)
    }

    /// Regions and windows share the keys.
    pub(super) fn check_key_limit(&mut self, id: ClientId) -> Result<(), Refusal> {
        let limit = self.config.limits.memory_regions_per_client;
        let client = self.resources.client_mut(id)?;
        if client.mrs.len() + client.mws.len() >= limit as usize {
            return Err(Refusal::over_limit(
                "memory regions and windows",
                limit.into(),
            ));
        }
        Ok(())
    }

    /// As the manual says, deregistration followed by registration: the old keys never work
    /// again. A request that makes no sense leaves the region as it is.
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
                "a region for fast registration changes by REG_MR work requests alone",
            ));
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
        let ticket = keys.deregister(Stag(request.lkey)).map_err(dereg_refusal)?;
        remove_region(client, Stag(request.lkey));
        let stag = keys
            .insert(mr)
            .map_err(|error| Refusal::new(libc::ENOMEM, error.to_string()))?;
        add_region(client, stag, PdId(new.pd), ArenaId(new.arena), None);
        let then = QuiescentReply::Rereg { lkey: stag };
        Ok(Served::Deferred(PendingReply::QuiescentKey {
            ticket,
            then,
        }))
    }

    pub(super) fn dereg_mr(&mut self, id: ClientId, lkey: Stag) -> Outcome {
        let keys = self.config.keys.clone();
        if !self.resources.client_mut(id)?.mrs.contains_key(&lkey) {
            return Err(Refusal::no_such("memory region with lkey", lkey.0));
        }
        let ticket = keys.deregister(lkey).map_err(dereg_refusal)?;
        let then = QuiescentReply::Dereg { lkey };
        Ok(Served::Deferred(PendingReply::QuiescentKey {
            ticket,
            then,
        }))
    }

    /// No worker uses the key any more: what waited for that is answered.
    pub(super) fn finish_quiescent_key(&mut self, id: ClientId) {
        let Some(client) = self.resources.clients.get_mut(&id) else {
            return;
        };
        let waits = |waiting: &mut DeferredRequest| {
            matches!(waiting.what, PendingReply::QuiescentKey { .. })
        };
        let Some(DeferredRequest {
            seq,
            what: PendingReply::QuiescentKey { then, .. },
        }) = client.waiting.take_if(waits)
        else {
            return;
        };
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

/// What is answered when a key is quiet.
pub(super) enum QuiescentReply {
    Dereg {
        lkey: Stag,
    },
    /// With the new key.
    Rereg {
        lkey: Stag,
    },
    DeallocMw,
}

fn dereg_refusal(error: DeregError) -> Refusal {
    let errno = match error {
        DeregError::Unknown => libc::ENOENT,
        DeregError::Bound(_) => libc::EBUSY,
    };
    Refusal::new(errno, error.to_string())
}

/// Checks a registration.
fn check_registration(client: &Client, request: &m::RegMr) -> Result<RegisteredMemory, Refusal> {
    let access = Access(request.access).without(Access::OPTIONAL);
    if !Access::ALL.contains(access) {
        return Err(Refusal::new(
            libc::EINVAL,
            format!("unknown access bits {:#x}", request.access),
        ));
    }
    if access.allows_remote_changes() && !access.contains(Access::LOCAL_WRITE) {
        return Err(Refusal::new(
            libc::EINVAL,
            "remote write and remote atomic need local write too (ibv_reg_mr(3))",
        ));
    }
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
                "{} bytes at {} do not lie in the arena of {} bytes, or their address wraps",
                request.len,
                request.offset,
                arena.region.len()
            ),
        )
    })
}

/// Enters a region among what the client holds.
pub(super) fn add_region(
    client: &mut Client,
    key: Stag,
    pd: PdId,
    arena: ArenaId,
    list: Option<QueueMemory>,
) {
    if let Some(arena_entry) = client.arenas.get_mut(&arena) {
        arena_entry.mrs += 1;
    }
    if let Some(pd) = client.pds.get_mut(&pd) {
        pd.users += 1;
    }
    client.mrs.insert(key, MemoryRegion { pd, arena, list });
}

fn remove_region(client: &mut Client, lkey: Stag) {
    if let Some(mr) = client.mrs.remove(&lkey) {
        if let Some(arena_entry) = client.arenas.get_mut(&mr.arena) {
            arena_entry.mrs -= 1;
        }
        if let Some(pd) = client.pds.get_mut(&mr.pd) {
            pd.users -= 1;
        }
        if let Some(list) = mr.list {
            client.queues.free(list);
        }
    }
}
