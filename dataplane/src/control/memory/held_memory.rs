//! Memory whose registration has ended while ports still hold frames that refer to it. The reply waits for
//! these frames, except for those in ports that are late: a driver may take any length of time to free sent
//! frames. The memory stays mapped for the NIC and charged to its user until the last of these frames is freed;
//! an arena that the client frees in the meantime is released then.

use std::sync::Arc;

use siw_shm::SharedMemory;

use super::client_memory::ClientArena;
use crate::control::account::quotas::Charged;
use crate::ids::CommandToken;

/// Memory of one request that frames in ports may refer to.
struct HeldRegions {
    /// Token of the workers' reports that the frames are freed.
    token: CommandToken,
    /// Number of workers whose report is missing.
    left: usize,
    /// Those of them whose ports do not free the frames in time.
    late: Vec<usize>,
    regions: Vec<Arc<SharedMemory>>,
}

/// An arena freed by its client.
pub(in crate::control) type FreedArena = Charged<ClientArena, 4>;

/// One client's memory that frames in ports refer to.
#[derive(Default)]
pub(in crate::control) struct HeldMemory {
    requests: Vec<HeldRegions>,
    freed: Vec<FreedArena>,
}

impl HeldMemory {
    fn is_held(&self, region: &Arc<SharedMemory>) -> bool {
        let mut regions = self.requests.iter().flat_map(|held| &held.regions);
        regions.any(|held| Arc::ptr_eq(held, region))
    }

    fn find(&mut self, token: CommandToken) -> Option<&mut HeldRegions> {
        self.requests.iter_mut().find(|held| held.token == token)
    }

    /// Holds the memory of a request until `left` workers have reported, with the token, that no frame in
    /// their ports refers to it.
    pub(in crate::control) fn hold(
        &mut self,
        token: CommandToken,
        left: usize,
        regions: Vec<Arc<SharedMemory>>,
    ) {
        self.requests.push(HeldRegions {
            token,
            left,
            late: Vec::new(),
            regions,
        });
    }

    /// Returns true if only late workers have not reported: the request may be answered.
    pub(in crate::control) fn may_answer(&self, token: CommandToken) -> bool {
        let mut requests = self.requests.iter();
        let held = requests.find(|held| held.token == token);
        held.is_none_or(|held| held.left == held.late.len())
    }

    /// A worker's ports have not freed the frames in time. Returns false if the token belongs to another wait.
    pub(in crate::control) fn on_late(&mut self, worker: usize, token: CommandToken) -> bool {
        let held = self.find(token);
        held.map(|held| held.late.push(worker)).is_some()
    }

    /// Keeps an arena freed by its client if frames refer to it; otherwise returns it.
    pub(in crate::control) fn keep(&mut self, arena: FreedArena) -> Option<FreedArena> {
        if self.is_held(&arena.region) {
            self.freed.push(arena);
            return None;
        }
        Some(arena)
    }

    /// Memory of the arenas that are kept.
    pub(in crate::control) fn kept_regions(&self) -> impl Iterator<Item = &Arc<SharedMemory>> {
        self.freed.iter().map(|arena| &arena.region)
    }

    /// A worker's ports have freed all frames of a request: returns the arenas to release now.
    pub(in crate::control) fn on_released(
        &mut self,
        worker: usize,
        token: CommandToken,
    ) -> Vec<FreedArena> {
        let Some(held) = self.find(token) else {
            return Vec::new();
        };
        held.left = held.left.saturating_sub(1);
        held.late.retain(|other| *other != worker);
        if held.left > 0 {
            return Vec::new();
        }
        self.requests.retain(|held| held.token != token);
        let freed = std::mem::take(&mut self.freed);
        let (kept, gone) = freed
            .into_iter()
            .partition(|arena| self.is_held(&arena.region));
        self.freed = kept;
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::account::quotas::tests::account;
    use crate::control::memory::client_memory::{ArenaOrigin, arena_amounts};

    fn new_token(number: u64) -> CommandToken {
        let client = None;
        CommandToken { client, number }
    }

    fn arena(region: &Arc<SharedMemory>) -> FreedArena {
        let arena = ClientArena {
            listed: None,
            region: region.clone(),
            mrs: 0,
            external: None,
            origin: ArenaOrigin::Allocated,
        };
        account().hold(arena_amounts(4096, 0)).of(arena)
    }

    #[test]
    fn an_arena_goes_with_the_last_frame_of_it() {
        let [memory, other] = [0, 1].map(|_| Arc::new(SharedMemory::new_anonymous(4096).unwrap()));
        let mut held = HeldMemory::default();
        // Two registrations of one arena, with frames in two workers and in one.
        held.hold(new_token(1), 2, vec![memory.clone()]);
        held.hold(new_token(2), 1, vec![memory.clone()]);
        assert!(held.keep(arena(&other)).is_some(), "nothing refers to it");
        assert!(held.keep(arena(&memory)).is_none());
        assert_eq!(held.kept_regions().count(), 1);
        assert!(held.on_released(0, new_token(7)).is_empty(), "another wait");
        for worker in [0, 1] {
            let gone = held.on_released(worker, new_token(1));
            assert!(gone.is_empty(), "frames of the other registration are out");
        }
        let gone = held.on_released(0, new_token(2));
        assert_eq!(gone.len(), 1);
        assert!(Arc::ptr_eq(&gone[0].region, &memory));
        assert!(held.on_released(0, new_token(2)).is_empty());
        drop(gone);
        assert_eq!(Arc::strong_count(&memory), 1);
    }

    #[test]
    fn all_regions_of_a_registration_go_together() {
        let [memory, other] = [0, 1].map(|_| Arc::new(SharedMemory::new_anonymous(4096).unwrap()));
        let mut held = HeldMemory::default();
        held.hold(new_token(1), 2, vec![memory.clone(), other.clone()]);
        for region in [&memory, &other] {
            assert!(held.keep(arena(region)).is_none());
        }
        assert!(held.on_released(0, new_token(1)).is_empty());
        assert_eq!(held.on_released(1, new_token(1)).len(), 2);
    }

    #[test]
    fn a_request_waits_for_all_workers_but_late_ones() {
        let memory = Arc::new(SharedMemory::new_anonymous(4096).unwrap());
        let mut held = HeldMemory::default();
        let token = new_token(1);
        held.hold(token, 3, vec![memory.clone()]);
        assert!(held.on_late(1, token));
        assert!(!held.on_late(1, new_token(2)));
        held.on_released(0, token);
        assert!(!held.may_answer(token), "worker 2 has not reported");
        held.on_released(2, token);
        assert!(held.may_answer(token));
        // The memory stays until the late worker reports, too.
        assert!(held.keep(arena(&memory)).is_none());
        assert_eq!(held.on_released(1, token).len(), 1);
        assert!(held.may_answer(token));
        // A worker that was late and reports in the end is not late any more.
        held.hold(token, 2, vec![memory.clone()]);
        assert!(held.on_late(0, token));
        held.on_released(0, token);
        assert!(!held.may_answer(token), "worker 1 has not reported");
    }
}
