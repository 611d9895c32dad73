//! Arenas and memory regions: requests of clients.

use std::sync::Arc;

use nix::libc;
use siw_memory::queue_allocator::QueueMemory;
use siw_memory::{DeregError, RegisteredMemory, Stag};
use siw_shm::Access;
use siw_shm::control::messages as m;
use siw_shm::shared_memory::{PageSize, SharedMemory};

use super::requests::*;
use super::resources::{Arena, Client, MemoryRegion};
use super::{Control, Pending, Waiting};
use crate::ids::{ArenaId, ClientId, PdId};

impl Control {
    pub(super) fn alloc_arena(&mut self, id: ClientId, seq: u32, r: &m::AllocArena) -> Outcome {
        let limit = self.config.limits.memory_per_client.0;
        let huge = r.huge != 0 && self.config.hugepages;
        let c = self.client(id)?;
        if r.len == 0 {
            return Err(Refusal::new(libc::EINVAL, "an arena needs a length"));
        }
        if c.memory.saturating_add(r.len) > limit {
            return Err(Refusal::limit("arena bytes", limit));
        }
        let pages = if huge {
            PageSize::TryHuge
        } else {
            PageSize::Normal
        };
        let region = Arc::new(
            SharedMemory::create_memfd("siwd-arena", r.len as usize, pages)
                .map_err(Refusal::memory)?,
        );
        let external =
            (self.config.map_arena)(&region).map_err(|e| Refusal::new(libc::ENOMEM, e))?;
        let c = self.client(id)?;
        let arena = ArenaId(c.number());
        let reply = m::ArenaReply {
            arena: arena.0,
            huge: region.is_huge().into(),
            len: region.len() as u64,
        };
        c.memory += region.len() as u64;
        let fd = region
            .memfd()
            .ok_or_else(|| Refusal::new(libc::ENOMEM, "shared memory has no descriptor"))?;
        send_fds::<m::AllocArena>(c, seq, &reply, &[fd])?;
        c.arenas.insert(
            arena,
            Arena {
                region,
                mrs: 0,
                external,
            },
        );
        Ok(Done::Replied)
    }

    pub(super) fn reg_mr(&mut self, id: ClientId, seq: u32, r: &m::RegMr) -> Outcome {
        self.room_for_key(id)?;
        let keys = self.config.keys.clone();
        let c = self.client(id)?;
        let mr = new_mr(c, r)?;
        let stag = keys
            .insert(mr)
            .map_err(|e| Refusal::new(libc::ENOMEM, e.to_string()))?;
        hold(c, stag, PdId(r.pd), ArenaId(r.arena), None);
        let reply = m::MrReply {
            lkey: stag.0,
            rkey: stag.0,
        };
        send::<m::RegMr>(c, seq, &reply)
    }

    /// Regions and windows share the keys.
    pub(super) fn room_for_key(&mut self, id: ClientId) -> Result<(), Refusal> {
        let limit = self.config.limits.memory_regions_per_client;
        let c = self.client(id)?;
        if c.mrs.len() + c.mws.len() >= limit as usize {
            return Err(Refusal::limit("memory regions and windows", limit.into()));
        }
        Ok(())
    }

    /// As the manual says, deregistration followed by registration: the old keys never work
    /// again. A request that makes no sense leaves the region as it is.
    pub(super) fn rereg_mr(&mut self, id: ClientId, r: &m::ReregMr) -> Outcome {
        let keys = self.config.keys.clone();
        let c = self.client(id)?;
        let old = c
            .mrs
            .get(&Stag(r.lkey))
            .ok_or_else(|| Refusal::unknown("memory region with lkey", r.lkey))?;
        if old.list.is_some() {
            return Err(Refusal::new(
                libc::EINVAL,
                "a region for fast registration changes by REG_MR work requests alone",
            ));
        }
        const ALL: u32 = m::REREG_TRANSLATION | m::REREG_PD | m::REREG_ACCESS;
        if r.flags == 0 || r.flags & !ALL != 0 {
            return Err(Refusal::new(
                libc::EINVAL,
                format!("flags {:#x}: 1 to 7 are allowed (ibv_rereg_mr(3))", r.flags),
            ));
        }
        let has = |f| r.flags & f != 0;
        let (offset, len, access) = keys
            .with_entry(Stag(r.lkey), |mr| {
                (mr.start_offset(), mr.len(), mr.access_rights())
            })
            .ok_or_else(|| Refusal::unknown("memory region with lkey", r.lkey))?;
        let moved = has(m::REREG_TRANSLATION);
        let new = m::RegMr {
            pd: if has(m::REREG_PD) { r.pd } else { old.pd.0 },
            arena: if moved { r.arena } else { old.arena.0 },
            offset: if moved { r.offset } else { offset },
            len: if moved { r.len } else { len },
            va: r.va,
            access: if has(m::REREG_ACCESS) {
                r.access
            } else {
                access.0
            },
            reserved: 0,
        };
        let mr = new_mr(c, &new)?;
        let ticket = keys.deregister(Stag(r.lkey)).map_err(refusal)?;
        let_go(c, Stag(r.lkey));
        let stag = keys
            .insert(mr)
            .map_err(|e| Refusal::new(libc::ENOMEM, e.to_string()))?;
        hold(c, stag, PdId(new.pd), ArenaId(new.arena), None);
        let then = Then::Rereg { lkey: stag };
        Ok(Done::Wait(Pending::Quiet { ticket, then }))
    }

    pub(super) fn dereg_mr(&mut self, id: ClientId, lkey: Stag) -> Outcome {
        let keys = self.config.keys.clone();
        if !self.client(id)?.mrs.contains_key(&lkey) {
            return Err(Refusal::unknown("memory region with lkey", lkey.0));
        }
        let ticket = keys.deregister(lkey).map_err(refusal)?;
        let then = Then::Dereg { lkey };
        Ok(Done::Wait(Pending::Quiet { ticket, then }))
    }

    /// No worker uses the key any more: what waited for that is answered.
    pub(super) fn finish_quiet(&mut self, id: ClientId) {
        let Some(c) = self.clients.get_mut(&id) else {
            return;
        };
        let waits = |w: &mut Waiting| matches!(w.what, Pending::Quiet { .. });
        let Some(Waiting {
            seq,
            what: Pending::Quiet { then, .. },
        }) = c.waiting.take_if(waits)
        else {
            return;
        };
        let _ = match then {
            Then::Dereg { lkey } => {
                let_go(c, lkey);
                c.conn.send_reply::<m::DeregMr>(seq, &EMPTY, &[])
            }
            Then::Rereg { lkey } => {
                let reply = m::MrReply {
                    lkey: lkey.0,
                    rkey: lkey.0,
                };
                c.conn.send_reply::<m::ReregMr>(seq, &reply, &[])
            }
            Then::DeallocMw => c.conn.send_reply::<m::DeallocMw>(seq, &EMPTY, &[]),
        };
        self.answered(id);
    }
}

/// What is answered when a key is quiet.
pub(super) enum Then {
    Dereg {
        lkey: Stag,
    },
    /// With the new key.
    Rereg {
        lkey: Stag,
    },
    DeallocMw,
}

fn refusal(e: DeregError) -> Refusal {
    let errno = match e {
        DeregError::Unknown => libc::ENOENT,
        DeregError::Bound(_) => libc::EBUSY,
    };
    Refusal::new(errno, e.to_string())
}

/// Checks a registration.
fn new_mr(c: &Client, r: &m::RegMr) -> Result<RegisteredMemory, Refusal> {
    let access = Access(r.access).without(Access::OPTIONAL);
    if !Access::ALL.contains(access) {
        return Err(Refusal::new(
            libc::EINVAL,
            format!("unknown access bits {:#x}", r.access),
        ));
    }
    if access.allows_remote_changes() && !access.contains(Access::LOCAL_WRITE) {
        return Err(Refusal::new(
            libc::EINVAL,
            "remote write and remote atomic need local write too (ibv_reg_mr(3))",
        ));
    }
    let arena = c
        .arenas
        .get(&ArenaId(r.arena))
        .ok_or_else(|| Refusal::unknown("arena", r.arena))?;
    if !c.pds.contains_key(&PdId(r.pd)) {
        return Err(Refusal::unknown("protection domain", r.pd));
    }
    RegisteredMemory::new(
        arena.region.clone(),
        r.offset,
        r.len,
        r.va,
        r.pd,
        None,
        access,
    )
    .map_err(|_| {
        Refusal::new(
            libc::EINVAL,
            format!(
                "{} bytes at {} do not lie in the arena of {} bytes, or their address wraps",
                r.len,
                r.offset,
                arena.region.len()
            ),
        )
    })
}

/// Enters a region among what the client holds.
pub(super) fn hold(c: &mut Client, key: Stag, pd: PdId, arena: ArenaId, list: Option<QueueMemory>) {
    if let Some(a) = c.arenas.get_mut(&arena) {
        a.mrs += 1;
    }
    if let Some(pd) = c.pds.get_mut(&pd) {
        pd.users += 1;
    }
    c.mrs.insert(key, MemoryRegion { pd, arena, list });
}

fn let_go(c: &mut Client, lkey: Stag) {
    if let Some(mr) = c.mrs.remove(&lkey) {
        if let Some(a) = c.arenas.get_mut(&mr.arena) {
            a.mrs -= 1;
        }
        if let Some(pd) = c.pds.get_mut(&mr.pd) {
            pd.users -= 1;
        }
        if let Some(list) = mr.list {
            c.queues.free(list);
        }
    }
}
