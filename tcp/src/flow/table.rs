//! The flow table, which maps a four-tuple to its connection. Open addressing with a tag next to
//! each index. The hash is keyed, so that peers cannot choose four-tuples that collide. The table
//! is allocated for the maximum number of connections and therefore never rehashes.

/// A slot has the tag (low half of the hash) in its upper half and index + 1 in its lower half. 0
/// is empty, so that the pages of a new table are zero and not yet resident.
pub(crate) struct FlowTable {
    slots: Vec<u64>,
    mask: usize,
}

impl FlowTable {
    /// Bytes per connection of a full table: two slots.
    pub(crate) const SHARE: usize = 2 * size_of::<u64>();

    pub(crate) fn new(max: usize) -> Self {
        let slots = (max.max(8) * 2).next_power_of_two();
        FlowTable {
            slots: vec![0; slots],
            mask: slots - 1,
        }
    }

    /// Returns the slot at which the search for a tag begins.
    #[inline]
    fn home(&self, tag: u32) -> usize {
        tag as usize & self.mask
    }

    /// Returns the address at which the search for this hash begins, to prefetch it.
    #[inline]
    pub(crate) fn start(&self, hash: u64) -> *const u64 {
        &raw const self.slots[self.home(hash as u32)]
    }

    /// Returns the first entry with this tag, without checking its connection.
    #[inline]
    pub(crate) fn guess(&self, hash: u64) -> Option<u32> {
        self.find(hash, |_| true)
    }

    /// Returns the entry with this hash for which `is` returns true.
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

    /// Adds an entry. The caller ensures that it is not in the table, and that the table has fewer
    /// than `max`.
    pub(crate) fn insert(&mut self, hash: u64, index: u32) {
        let tag = hash as u32;
        let mut position = self.home(tag);
        while self.slots[position] != 0 {
            position = (position + 1) & self.mask;
        }
        self.slots[position] = u64::from(tag) << 32 | u64::from(index + 1);
    }

    /// Removes an entry if it exists.
    pub(crate) fn remove(&mut self, hash: u64, index: u32) {
        let want = u64::from(hash as u32) << 32 | u64::from(index + 1);
        let mut position = self.home(hash as u32);
        while self.slots[position] != want {
            if self.slots[position] == 0 {
                return;
            }
            position = (position + 1) & self.mask;
        }
        // Backward-shift deletion: entries that may occupy the gap move into it, so no tombstones
        // are needed.
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
    fn colliding_entries_are_found_until_removed() {
        let mut table = FlowTable::new(256);
        // Hashes collide by construction: there are only 16 different home slots.
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
