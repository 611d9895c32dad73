//! Memory windows, and regions for fast registration: allocated by the control thread, bound or
//! filled by workers through work requests (ibv_alloc_mw(3), ib_alloc_mr).

use nix::libc;
use siw_memory::{RegisteredMemory, Stag};
use siw_shm::WindowType;
use siw_shm::control::messages as m;
use siw_shm::local_wqe::MAX_FAST_PAGES;

use super::regions::MemoryRegion;
use super::{Memory, add_region, key_amounts, own_arena};
use crate::control::account::heap;
use crate::control::context::Context;
use crate::control::request::deferred::KeyReply;
use crate::control::request::refusal::Refusal;
use crate::control::request::replies::{Outcome, Served, send_reply, send_reply_with_fds};
use crate::control::resources::{MemoryWindow, Resources};
use crate::ids::{ArenaId, ClientId, PdId};

impl Memory {
    pub(in crate::control) fn alloc_mw(
        &self,
        resources: &mut Resources,
        id: ClientId,
        seq: u32,
        request: &m::AllocMw,
    ) -> Outcome {
        let kind = match request.kind {
            1 => WindowType::One,
            2 => WindowType::Two,
            other => {
                return Err(Refusal::new(
                    libc::EINVAL,
                    format!("memory window type {other}: 1 and 2 are allowed"),
                ));
            }
        };
        let no_pd = || Refusal::no_such("protection domain", request.pd);
        let client = resources.client_mut(id)?;
        if !client.pds.contains_key(&PdId(request.pd)) {
            return Err(no_pd());
        }
        let window = RegisteredMemory::new_window(request.pd, kind);
        let charge = resources.charge(id, key_amounts(0))?;
        let stag = self.insert_key(window)?;
        let client = resources.client_mut(id)?;
        let pd = client.pds.get_mut(&PdId(request.pd)).ok_or_else(no_pd)?;
        pd.users += 1;
        client.mws.insert(
            stag,
            charge.of(MemoryWindow {
                pd: PdId(request.pd),
            }),
        );
        let reply = m::MwReply {
            rkey: stag.0,
            reserved: 0,
        };
        send_reply::<m::AllocMw>(client, seq, &reply)
    }

    pub(in crate::control) fn dealloc_mw(
        &mut self,
        context: &mut Context,
        id: ClientId,
        rkey: Stag,
    ) -> Outcome {
        let client = context.resources.client_mut(id)?;
        let unknown = || Refusal::no_such("memory window with rkey", rkey.0);
        let mw = client.mws.remove(&rkey).ok_or_else(unknown)?;
        let (mw, charge) = mw.split();
        if let Some(pd) = client.pds.get_mut(&mw.pd) {
            pd.users -= 1;
        }
        let ticket = self.keys.remove(rkey).ok_or_else(unknown)?;
        let reply = KeyReply::DeallocMw(charge);
        // No memory to wait for: the deregistration of the window's region waits for frames.
        Ok(self.await_quiescent_key(context, id, ticket, Vec::new(), reply))
    }

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
        if !client.pds.contains_key(&PdId(request.pd)) {
            return Err(Refusal::no_such("protection domain", request.pd));
        }
        let arena = client
            .arenas
            .get(&ArenaId(request.arena))
            .ok_or_else(|| Refusal::no_such("arena", request.arena))?
            .region
            .clone();
        own_arena(client, ArenaId(request.arena))?;
        let pages = request.max_pages as usize;
        let page_heap = (pages * heap::FAST_PAGE) as u64;
        let charge = resources.charge(id, key_amounts(page_heap))?;
        let (list, stag) = resources.alloc_queue(id, pages * 8, |_, list| {
            let memory = list.region.clone();
            RegisteredMemory::new_fast(arena, pages, memory, list.offset, request.pd)
                .map_err(Refusal::outside_memory)
                .and_then(|region| self.insert_key(region))
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
        add_region(client, stag, charge.of(region));
        Ok(Served::Replied)
    }
}
