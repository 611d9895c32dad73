//! Memory whose registration has ended while ports still hold frames that refer to it. The client
//! has its reply, because a driver may take any length of time to free sent frames. The memory
//! stays mapped for the NIC and charged to its user until the last of these frames is freed; an
//! arena that the client frees in the meantime is released then.

use std::sync::Arc;

use siw_shm::SharedMemory;

use super::client_memory::ClientArena;
use crate::control::account::quotas::Charged;
use crate::ids::CommandToken;

/// Memory that frames in ports refer to.
struct HeldRegion {
    /// Token of the workers' reports that the frames are freed.
    token: CommandToken,
    /// Number of workers whose report is missing.
    left: usize,
    region: Arc<SharedMemory>,
}

/// An arena freed by its client.
pub(in crate::control) type FreedArena = Charged<ClientArena, 4>;

/// One client's memory that frames in ports refer to.
#[derive(Default)]
pub(in crate::control) struct HeldMemory {
    regions: Vec<HeldRegion>,
    freed: Vec<FreedArena>,
}

impl HeldMemory {
    fn is_held(&self, region: &Arc<SharedMemory>) -> bool {
        let mut regions = self.regions.iter();
        regions.any(|held| Arc::ptr_eq(&held.region, region))
    }

    /// Holds the memory of a request that is answered while frames still refer to it.
    pub(in crate::control) fn hold(
        &mut self,
        token: CommandToken,
        left: usize,
        regions: Vec<Arc<SharedMemory>>,
    ) {
        if left > 0 {
            for region in regions {
                self.add(token, left, region);
            }
        }
    }

    fn add(&mut self, token: CommandToken, left: usize, region: Arc<SharedMemory>) {
        self.regions.push(HeldRegion {
            token,
            left,
            region,
        });
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

    /// A worker's ports have freed all frames: returns the arenas to release now, or `None` if the
    /// token belongs to another wait.
    pub(in crate::control) fn on_released(
        &mut self,
        token: CommandToken,
    ) -> Option<Vec<FreedArena>> {
        // A registration may span several regions, which share one token.
        let mut left = None;
        for held in self.regions.iter_mut().filter(|held| held.token == token) {
            held.left = held.left.saturating_sub(1);
            left = Some(held.left);
        }
        if left? > 0 {
            return Some(Vec::new());
        }
        self.regions.retain(|held| held.token != token);
        let freed = std::mem::take(&mut self.freed);
        let (kept, gone) = freed
            .into_iter()
            .partition(|arena| self.is_held(&arena.region));
        self.freed = kept;
        Some(gone)
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
        held.add(new_token(1), 2, memory.clone());
        held.add(new_token(2), 1, memory.clone());
        assert!(held.keep(arena(&other)).is_some(), "nothing refers to it");
        assert!(held.keep(arena(&memory)).is_none());
        assert_eq!(held.kept_regions().count(), 1);
        assert!(held.on_released(new_token(7)).is_none());
        for token in [1, 1] {
            let gone = held.on_released(new_token(token)).unwrap();
            assert!(gone.is_empty(), "frames of the other registration are out");
        }
        let gone = held.on_released(new_token(2)).unwrap();
        assert_eq!(gone.len(), 1);
        assert!(Arc::ptr_eq(&gone[0].region, &memory));
        assert!(held.on_released(new_token(2)).is_none());
        drop(gone);
        assert_eq!(Arc::strong_count(&memory), 1);
    }

    #[test]
    fn all_regions_of_a_registration_go_together() {
        let [memory, other] = [0, 1].map(|_| Arc::new(SharedMemory::new_anonymous(4096).unwrap()));
        let mut held = HeldMemory::default();
        for region in [&memory, &other] {
            held.add(new_token(1), 2, region.clone());
            assert!(held.keep(arena(region)).is_none());
        }
        assert!(held.on_released(new_token(1)).unwrap().is_empty());
        assert_eq!(held.on_released(new_token(1)).unwrap().len(), 2);
        assert!(held.on_released(new_token(1)).is_none());
    }
}
