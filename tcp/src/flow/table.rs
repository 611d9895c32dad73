//! From a segment's four-tuple to its connection: open addressing, a tag beside each index, keyed
//! so that peers cannot aim at one bucket. Sized for all connections at the start: never rehashes.

/// Slot: tag (low half of the hash) above, index + 1 below; 0 is empty, so that a fresh table is
/// untouched zero pages.
pub(crate) struct FlowTable {
    slots: Vec<u64>,
    mask: usize,
}

impl FlowTable {
    /// Bytes for each connection of a full table: two slots.
    pub(crate) const SHARE: usize = 2 * size_of::<u64>();

    pub(crate) fn new(max: usize) -> Self {
        let slots = (max.max(8) * 2).next_power_of_two();
        FlowTable {
            slots: vec![0; slots],
            mask: slots - 1,
        }
    }

    #[inline]
    fn home(&self, tag: u32) -> usize {
        tag as usize & self.mask
    }

    /// Where the search for this hash begins: to prefetch.
    #[inline]
    pub(crate) fn start(&self, hash: u64) -> *const u64 {
        &raw const self.slots[self.home(hash as u32)]
    }

    /// The first entry that may be meant, without a look at its connection.
    #[inline]
    pub(crate) fn guess(&self, hash: u64) -> Option<u32> {
        self.find(hash, |_| true)
    }

    #[inline]
    pub(crate) fn find(&self, hash: u64, mut is: impl FnMut(u32) -> bool) -> Option<u32> {
        let tag = hash as u32;
        let mut position = self.home(tag);
        loop {
            let slot = self.slots[position];
            if slot == 0 {
                return None;
            }
            if (slot >> 32) as u32 == tag {
                let index = slot as u32 - 1;
                if is(index) {
                    return Some(index);
                }
            }
            position = (position + 1) & self.mask;
        }
    }

    /// The caller knows that the key is not here and that at most `max` entries are.
    pub(crate) fn insert(&mut self, hash: u64, index: u32) {
        let tag = hash as u32;
        let mut position = self.home(tag);
        while self.slots[position] != 0 {
            position = (position + 1) & self.mask;
        }
        self.slots[position] = u64::from(tag) << 32 | u64::from(index + 1);
    }

    pub(crate) fn remove(&mut self, hash: u64, index: u32) {
        let want = u64::from(hash as u32) << 32 | u64::from(index + 1);
        let mut position = self.home(hash as u32);
        while self.slots[position] != want {
            if self.slots[position] == 0 {
                return;
            }
            position = (position + 1) & self.mask;
        }
        // Backward shift: close the gap with entries that may live there; leaves no tombstones.
        let mut hole = position;
        loop {
            position = (position + 1) & self.mask;
            let slot = self.slots[position];
            if slot == 0 {
                break;
            }
            let home = self.home((slot >> 32) as u32);
            if (position.wrapping_sub(home) & self.mask)
                >= (position.wrapping_sub(hole) & self.mask)
            {
                self.slots[hole] = slot;
                hole = position;
            }
        }
        self.slots[hole] = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_found_until_removed_under_heavy_collision() {
        let mut table = FlowTable::new(256);
        // Hashes collide by construction: only 16 different homes.
        let hash = |index: u32| u64::from(index % 16) | u64::from(index) << 32;
        let mut alive = std::collections::HashSet::new();
        let mut random = 1u32;
        for _ in 0..20_000 {
            random = random.wrapping_mul(1664525).wrapping_add(1013904223);
            let index = (random >> 8) % 256;
            if alive.remove(&index) {
                table.remove(hash(index), index);
            } else {
                alive.insert(index);
                table.insert(hash(index), index);
            }
            let probe = (random >> 20) % 256;
            assert_eq!(
                table.find(hash(probe), |found| found == probe).is_some(),
                alive.contains(&probe)
            );
        }
    }
}
