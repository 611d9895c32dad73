//! Memory windows, and regions for fast registration: what the control thread allocates and
//! workers bind and fill by work requests (ibv_alloc_mw(3), ib_alloc_mr).

use nix::libc;
use siw_memory::{RegisteredMemory, Stag};
use siw_shm::WindowType;
use siw_shm::control::messages as m;
use siw_shm::local_wqe::MAX_FAST_PAGES;

use super::memory::{Then, hold};
use super::requests::*;
use super::resources::MemoryWindow;
use super::{Control, Pending};
use crate::ids::{ArenaId, ClientId, PdId};

impl Control {
    pub(super) fn alloc_mw(&mut self, id: ClientId, seq: u32, r: &m::AllocMw) -> Outcome {
        self.room_for_key(id)?;
        let kind = match r.kind {
            1 => WindowType::One,
            2 => WindowType::Two,
            k => {
                return Err(Refusal::new(
                    libc::EINVAL,
                    format!("memory window type {k}: there are 1 and 2"),
                ));
            }
        };
        let keys = self.config.keys.clone();
        let c = self.client(id)?;
        let pd = c
            .pds
            .get_mut(&PdId(r.pd))
            .ok_or_else(|| Refusal::unknown("protection domain", r.pd))?;
        let stag = keys
            .insert(RegisteredMemory::new_window(r.pd, kind))
            .map_err(|e| Refusal::new(libc::ENOMEM, e.to_string()))?;
        pd.users += 1;
        c.mws.insert(stag, MemoryWindow { pd: PdId(r.pd) });
        let reply = m::MwReply {
            rkey: stag.0,
            reserved: 0,
        };
        send::<m::AllocMw>(c, seq, &reply)
    }

    pub(super) fn dealloc_mw(&mut self, id: ClientId, rkey: Stag) -> Outcome {
        let keys = self.config.keys.clone();
        let c = self.client(id)?;
        let unknown = || Refusal::unknown("memory window with rkey", rkey.0);
        let mw = c.mws.remove(&rkey).ok_or_else(unknown)?;
        if let Some(pd) = c.pds.get_mut(&mw.pd) {
            pd.users -= 1;
        }
        let ticket = keys.remove(rkey).ok_or_else(unknown)?;
        let then = Then::DeallocMw;
        Ok(Done::Wait(Pending::Quiet { ticket, then }))
    }

    pub(super) fn alloc_fast_mr(&mut self, id: ClientId, seq: u32, r: &m::AllocFastMr) -> Outcome {
        self.room_for_key(id)?;
        if r.max_pages == 0 || r.max_pages > MAX_FAST_PAGES {
            return Err(Refusal::new(
                libc::EINVAL,
                format!("{} pages: 1 to {MAX_FAST_PAGES} are allowed", r.max_pages),
            ));
        }
        let keys = self.config.keys.clone();
        let c = self.client(id)?;
        if !c.pds.contains_key(&PdId(r.pd)) {
            return Err(Refusal::unknown("protection domain", r.pd));
        }
        let arena = c
            .arenas
            .get(&ArenaId(r.arena))
            .ok_or_else(|| Refusal::unknown("arena", r.arena))?
            .region
            .clone();
        let list = c
            .queues
            .alloc(r.max_pages as usize * 8)
            .map_err(|e| Refusal::new(libc::ENOMEM, e.to_string()))?;
        let made = RegisteredMemory::new_fast(
            arena,
            r.max_pages as usize,
            list.region.clone(),
            list.offset,
            r.pd,
        )
        .map_err(|e| Refusal::new(libc::EINVAL, e.to_string()))
        .and_then(|mr| {
            keys.insert(mr)
                .map_err(|e| Refusal::new(libc::ENOMEM, e.to_string()))
        });
        let stag = match made {
            Ok(stag) => stag,
            Err(e) => {
                c.queues.free(list);
                return Err(e);
            }
        };
        let reply = m::FastMrReply {
            lkey: stag.0,
            rkey: stag.0,
            max_pages: r.max_pages,
            reserved: 0,
            list: (&list).into(),
        };
        let fd = list.region.memfd().filter(|_| list.new_region);
        send_fds::<m::AllocFastMr>(c, seq, &reply, fd.as_slice())?;
        hold(c, stag, PdId(r.pd), ArenaId(r.arena), Some(list));
        Ok(Done::Replied)
    }
}
