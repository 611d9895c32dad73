//! Arenas and memory regions: requests of clients.

use std::sync::Arc;

use nix::libc;
use siw_shm::control::messages as m;
use siw_shm::region::{Pages, Region};
use siw_shm::{Access, Mr, Stag};

use super::requests::*;
use super::resources::{Arena, MemoryRegion};
use super::{Control, Pending, Waiting};

impl Control {
    pub(super) fn alloc_arena(&mut self, id: u32, seq: u32, r: &m::AllocArena) -> Outcome {
        let limit = self.config.limits.memory_per_client.0;
        let huge = r.huge != 0 && self.config.hugepages;
        let c = self.client(id)?;
        if r.len == 0 {
            return Err(Refusal::new(libc::EINVAL, "an arena needs a length"));
        }
        if c.memory.saturating_add(r.len) > limit {
            return Err(Refusal::limit("arena bytes", limit));
        }
        let pages = if huge { Pages::TryHuge } else { Pages::Normal };
        let region =
            Arc::new(Region::create("siwd-arena", r.len as usize, pages).map_err(Refusal::memory)?);
        let external =
            (self.config.map_arena)(&region).map_err(|e| Refusal::new(libc::ENOMEM, e))?;
        let c = self.client(id)?;
        let arena = c.number();
        let reply = m::ArenaReply {
            arena,
            huge: region.is_huge().into(),
            len: region.len() as u64,
        };
        c.memory += region.len() as u64;
        let fd = region
            .fd()
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

    pub(super) fn reg_mr(&mut self, id: u32, seq: u32, r: &m::RegMr) -> Outcome {
        let limit = self.config.limits.memory_regions_per_client;
        let keys = self.config.keys.clone();
        let c = self.client(id)?;
        if c.mrs.len() >= limit as usize {
            return Err(Refusal::limit("memory regions", limit.into()));
        }
        let access = Access(r.access);
        if !Access::ALL.contains(access) {
            return Err(Refusal::new(
                libc::EINVAL,
                format!("unknown access bits {:#x}", r.access),
            ));
        }
        let writes = access.0 & (Access::REMOTE_WRITE.0 | Access::REMOTE_ATOMIC.0) != 0;
        if writes && !access.contains(Access::LOCAL_WRITE) {
            return Err(Refusal::new(
                libc::EINVAL,
                "remote write and remote atomic need local write too (ibv_reg_mr(3))",
            ));
        }
        let arena = c
            .arenas
            .get_mut(&r.arena)
            .ok_or_else(|| Refusal::unknown("arena", r.arena))?;
        let pd = c
            .pds
            .get_mut(&r.pd)
            .ok_or_else(|| Refusal::unknown("protection domain", r.pd))?;
        let mr = Mr::new(
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
        })?;
        let stag = keys
            .insert(mr)
            .map_err(|e| Refusal::new(libc::ENOMEM, e.to_string()))?;
        arena.mrs += 1;
        pd.users += 1;
        c.mrs.insert(
            stag.0,
            MemoryRegion {
                pd: r.pd,
                arena: r.arena,
            },
        );
        let reply = m::MrReply {
            lkey: stag.0,
            rkey: stag.0,
        };
        send::<m::RegMr>(c, seq, &reply)
    }

    pub(super) fn dereg_mr(&mut self, id: u32, lkey: u32) -> Outcome {
        let keys = self.config.keys.clone();
        let c = self.client(id)?;
        if !c.mrs.contains_key(&lkey) {
            return Err(Refusal::unknown("memory region with lkey", lkey));
        }
        let ticket = keys
            .remove(Stag(lkey))
            .ok_or_else(|| Refusal::unknown("memory region with lkey", lkey))?;
        Ok(Done::Wait(Pending::Dereg { lkey, ticket }))
    }

    pub(super) fn finish_dereg(&mut self, id: u32) {
        let Some(c) = self.clients.get_mut(&id) else {
            return;
        };
        let Some(Waiting {
            seq,
            what: Pending::Dereg { lkey, .. },
        }) = c.waiting.take()
        else {
            return;
        };
        if let Some(mr) = c.mrs.remove(&lkey) {
            if let Some(a) = c.arenas.get_mut(&mr.arena) {
                a.mrs -= 1;
            }
            if let Some(pd) = c.pds.get_mut(&mr.pd) {
                pd.users -= 1;
            }
        }
        let _ = c.conn.reply::<m::DeregMr>(seq, &EMPTY, &[]);
        self.answered(id);
    }
}
