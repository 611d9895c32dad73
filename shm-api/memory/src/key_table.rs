//! Memory keys (STags): one table that all workers read lock-free on every access (RFC 5042 section
//! 6). The control thread inserts and removes keys.
//!
//! Workers also bind memory windows and fast-register regions, which changes the meaning of a key in
//! place: see [`crate::registered_memory`] and [`crate::binding`].
//!
//! An STag is a 24-bit table index and an 8-bit key (RFC 5040 section 2.1). Indices are drawn at
//! random among the longest unused ones, and the keys of an index follow a secret permutation of all
//! 256 values: STags are unpredictable and slowly reused. Zero is never an STag.

use crate::registered_memory::{KeyError, RegisteredMemory};
use serde::{Deserialize, Serialize, Serializer};
use siphasher::sip::SipHasher13;
use siw_lockfree::epoch::{EpochTable, GracePeriod, TableReader};
use siw_shm::Access;
use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Steering tag, which is also lkey and rkey in iWARP.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub struct Stag(pub u32);

impl Stag {
    #[inline]
    pub(crate) fn table_index(self) -> usize {
        (self.0 >> 8) as usize
    }
}

/// Maximum number of keys: all indices but 0.
const MAX_CAPACITY: usize = (1 << 24) - 1;

/// No STag is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the memory key table is full")]
pub struct KeyTableFull;

/// Reason why a key cannot be removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DeregError {
    /// The key is not in the table.
    #[error("no such memory region")]
    Unknown,
    /// Memory windows (this many) are bound to the region.
    #[error("{0} memory windows are bound to the region: unbind or free them first")]
    Bound(u32),
}

/// Returned by [`KeyTable::remove`]; argument of [`KeyTable::has_elapsed`].
pub type Retired = GracePeriod;

struct StagPool {
    /// Unused indices, longest unused first.
    free: VecDeque<u32>,
    /// Number of uses of each index, modulo 256.
    uses: Vec<u8>,
    /// Key of the hash that gives each index its permutation.
    secret: (u64, u64),
}

impl StagPool {
    fn draw_stag(&mut self) -> Option<Stag> {
        let among = (self.free.len() / 2).max(1) as u64;
        let pick = (random_u64() % among) as usize;
        if pick < self.free.len() {
            self.free.swap(0, pick);
        }
        let index = self.free.pop_front()?;
        let uses = self.uses[index as usize];
        self.uses[index as usize] = uses.wrapping_add(1);
        // An odd factor and any start cycle through all 256 keys.
        let (first, second) = self.secret;
        let hash = SipHasher13::new_with_keys(first, second).hash(&index.to_le_bytes());
        let key = uses
            .wrapping_mul((hash as u8) | 1)
            .wrapping_add((hash >> 8) as u8);
        Some(Stag(index << 8 | u32::from(key)))
    }
}

fn random_u64() -> u64 {
    let mut bytes = [0; 8];
    if rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) == Ok(8) {
        return u64::from_ne_bytes(bytes);
    }
    RandomState::new().hash_one(0u8)
}

/// The key table. The control thread inserts and removes keys; workers look them up.
pub struct KeyTable {
    table: Arc<EpochTable<RegisteredMemory>>,
    keys: Mutex<StagPool>,
}

impl KeyTable {
    /// A table for `capacity` keys (at most 2^24 - 1) and `max_readers` workers.
    pub fn new(capacity: usize, max_readers: usize) -> Arc<KeyTable> {
        let capacity = capacity.clamp(1, MAX_CAPACITY);
        Arc::new(KeyTable {
            table: EpochTable::new(capacity + 1, max_readers),
            keys: Mutex::new(StagPool {
                // Index 0 would yield STag 0, which hardware refuses.
                free: (1..=capacity as u32).collect(),
                // Nonzero, so that its pages exist from the start, like those of the rest of the
                // table: keys are drawn at random, and for a long time each new key could take a page
                // fault.
                uses: vec![1; capacity + 1],
                secret: (random_u64(), random_u64()),
            }),
        })
    }

    fn lock_pool(&self) -> MutexGuard<'_, StagPool> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Assigns a key to the region; workers find it at once.
    pub fn insert(&self, mut mr: RegisteredMemory) -> Result<Stag, KeyTableFull> {
        let stag = self.lock_pool().draw_stag().ok_or(KeyTableFull)?;
        mr.set_home(stag);
        self.table
            .set_slot(stag.table_index(), Box::new(mr))
            .map_err(|_| KeyTableFull)?;
        Ok(stag)
    }

    /// Deregisters a key unless windows are bound to its region. The request may be answered when
    /// [`Self::has_elapsed`]; [`Self::try_reclaim`] frees the memory. `stag`: the key that
    /// [`Self::insert`] returned, even if another one has been used since.
    pub fn deregister(&self, stag: Stag) -> Result<Retired, DeregError> {
        let bound = self
            .with_entry(stag, RegisteredMemory::lock_windows)
            .ok_or(DeregError::Unknown)?;
        if bound > 0 {
            return Err(DeregError::Bound(bound));
        }
        self.remove(stag).ok_or(DeregError::Unknown)
    }

    /// Changes the access rights of a region under the same key, unless windows are bound to it.
    /// After the grace period, no worker uses the old rights any more.
    pub fn change_access(&self, stag: Stag, access: Access) -> Result<Retired, DeregError> {
        let bound = self
            .with_entry(stag, |mr| mr.change_access(access))
            .ok_or(DeregError::Unknown)?;
        if bound > 0 {
            return Err(DeregError::Bound(bound));
        }
        Ok(self.table.begin_grace_period())
    }

    /// Removes a key, even if windows are bound to it; no lookup finds it any more. A window also
    /// leaves its region. `None` for an unknown key.
    pub fn remove(&self, stag: Stag) -> Option<Retired> {
        self.release_window(self.with_entry(stag, RegisteredMemory::retire_key)?);
        let grace_period = self
            .table
            .clear_slot(stag.table_index(), |mr| mr.home_key() == stag)?;
        let mut pool = self.lock_pool();
        pool.free.push_back(stag.table_index() as u32);
        Some(grace_period)
    }

    /// Unbinds a window that was bound through a queue pair which is being destroyed.
    pub fn unbind_stream(&self, window: Stag, qp: u32) {
        if let Some(parent) = self.with_entry(window, |mr| mr.unbind_stream(qp)) {
            self.release_window(parent);
        }
    }

    /// Unbinds those of the windows that are bound to a region, which is to be deregistered. Accesses
    /// that have begun end with the grace period of the deregistration. A window that a worker is
    /// binding at this moment may stay bound.
    pub fn unbind_region(&self, region: Stag, windows: impl IntoIterator<Item = Stag>) {
        let is_bound = |mr: &RegisteredMemory| mr.count_windows() > 0;
        for window in windows {
            if !self.with_entry(region, is_bound).unwrap_or(false) {
                return;
            }
            if self.with_entry(window, |mr| mr.unbind_from(region)) == Some(true) {
                self.release_window(Some(region));
            }
        }
    }

    /// Removes a window from its region's count.
    fn release_window(&self, parent: Option<Stag>) {
        if let Some(parent) = parent {
            self.with_entry(parent, RegisteredMemory::release_window);
        }
    }

    /// Control side: calls `look` with the region that got this key from [`Self::insert`].
    pub fn with_entry<R>(
        &self,
        stag: Stag,
        look: impl FnOnce(&RegisteredMemory) -> R,
    ) -> Option<R> {
        self.table.with_entry(stag.table_index(), |mr| {
            (mr.home_key() == stag).then(|| look(mr))
        })?
    }

    /// Registers a worker's reader, which is online. `None` when `max_readers` exist.
    pub fn register_reader(&self) -> Option<KeyReader> {
        self.table.register_reader().map(KeyReader)
    }

    /// Returns whether no worker can access the memory removed in this grace period any more.
    pub fn has_elapsed(&self, grace_period: Retired) -> bool {
        self.table.has_elapsed(grace_period)
    }

    /// Returns whether no worker can access the memory removed in this grace period any more, and
    /// everything removed until its end is freed.
    pub fn is_reclaimed(&self, grace_period: Retired) -> bool {
        self.table.is_reclaimed(grace_period)
    }

    /// Frees at most `most` regions that no worker can access, the oldest first. Returns the numbers of
    /// freed regions and of those that still wait.
    pub fn reclaim_some(&self, most: usize) -> (usize, usize) {
        self.table.reclaim_some(most)
    }

    /// Frees regions that no worker can access; returns the number of regions that still wait.
    pub fn try_reclaim(&self) -> usize {
        self.table.try_reclaim()
    }

    /// Waits until everything removed so far is freed. Not for workers.
    pub fn wait_for_reclaim(&self) {
        while self.table.try_reclaim() > 0 {
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

/// The entries and the pool of STags. Saved while no worker runs: entries that were removed and wait for
/// workers end with it.
impl Serialize for KeyTable {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let pool = self.lock_pool().save();
        let table = &self.table;
        table.with_entries(|entries| (pool, entries).serialize(serializer))
    }
}

/// A [`KeyTable`] as data, in the form in which the table is serialised.
#[derive(Deserialize)]
pub struct SavedKeyTable(SavedPool, Vec<RegisteredMemory>);

/// A saved key table contradicts itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the saved memory keys contradict each other")]
pub struct InvalidKeyTable;

impl SavedKeyTable {
    /// The table with the same keys, for `capacity` keys or the saved capacity if that is larger, and
    /// `max_readers` workers.
    ///
    /// # Errors
    /// An index is used twice, or beyond the capacity.
    pub fn restore(
        self,
        capacity: usize,
        max_readers: usize,
    ) -> Result<Arc<KeyTable>, InvalidKeyTable> {
        let SavedKeyTable(pool, entries) = self;
        let pool = pool.restore(capacity.min(MAX_CAPACITY))?;
        let mut is_free = vec![false; pool.uses.len()];
        for index in &pool.free {
            let seen = is_free.get_mut(*index as usize).ok_or(InvalidKeyTable)?;
            if *index == 0 || std::mem::replace(seen, true) {
                return Err(InvalidKeyTable);
            }
        }
        let table = EpochTable::new(pool.uses.len(), max_readers);
        for entry in entries {
            let index = entry.home_key().table_index();
            if index == 0 || is_free.get(index) != Some(&false) {
                return Err(InvalidKeyTable);
            }
            let set = table.set_slot(index, Box::new(entry));
            set.map_err(|_| InvalidKeyTable)?;
        }
        Ok(Arc::new(KeyTable {
            table,
            keys: Mutex::new(pool),
        }))
    }
}

/// [`StagPool`] as data, in runs of numbers: a large table with few keys takes few octets.
#[derive(Serialize, Deserialize)]
struct SavedPool {
    /// Runs of consecutive unused indices, each as the first index less its position in the list, and the
    /// length of the run.
    free: Vec<(u32, u32)>,
    /// Runs of equal numbers of uses: number and length of the run.
    uses: Vec<(u32, u32)>,
    secret: (u64, u64),
}

impl StagPool {
    fn save(&self) -> SavedPool {
        let free = self.free.iter().zip(0..);
        SavedPool {
            free: find_runs(free.map(|(index, position)| index.wrapping_sub(position))),
            uses: find_runs(self.uses.iter().map(|uses| u32::from(*uses))),
            secret: self.secret,
        }
    }
}

impl SavedPool {
    /// The pool, with further indices up to `capacity` behind the free ones.
    fn restore(self, capacity: usize) -> Result<StagPool, InvalidKeyTable> {
        let uses = expand_runs(&self.uses)?;
        let uses = uses.into_iter().map(|uses| uses as u8);
        let mut uses: Vec<u8> = uses.collect();
        let free = expand_runs(&self.free)?.into_iter().zip(0..);
        let free = free.map(|(difference, position): (u32, u32)| difference.wrapping_add(position));
        let mut free: VecDeque<u32> = free.collect();
        if uses.is_empty() {
            return Err(InvalidKeyTable);
        }
        free.extend(uses.len() as u32..=capacity as u32);
        uses.resize(uses.len().max(capacity + 1), 1);
        Ok(StagPool {
            free,
            uses,
            secret: self.secret,
        })
    }
}

/// Runs of equal numbers, each with its length.
fn find_runs(numbers: impl Iterator<Item = u32>) -> Vec<(u32, u32)> {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some((last, count)) if *last == number => *count += 1,
            _ => runs.push((number, 1)),
        }
    }
    runs
}

/// The numbers of [`find_runs`]; more than a table has are refused.
fn expand_runs(runs: &[(u32, u32)]) -> Result<Vec<u32>, InvalidKeyTable> {
    let len: u64 = runs.iter().map(|(_, count)| u64::from(*count)).sum();
    if len > MAX_CAPACITY as u64 + 1 {
        return Err(InvalidKeyTable);
    }
    let runs = runs.iter();
    Ok(runs
        .flat_map(|(number, count)| std::iter::repeat_n(*number, *count as usize))
        .collect())
}

/// The last key that [`KeyReader::check_access_with`] found, and its memory. A deregistration takes
/// effect in the next batch, as for any other holder of the memory.
#[derive(Debug, Default)]
pub struct LastKey<'k>(Option<(Stag, &'k RegisteredMemory)>);

/// A worker's view of the table.
pub struct KeyReader(TableReader<RegisteredMemory>);

impl KeyReader {
    /// The region or bound window with this key, valid until the next [`Self::report_quiescent`].
    #[inline]
    pub fn lookup(&self, stag: Stag) -> Option<&RegisteredMemory> {
        self.entry_at(stag).filter(|mr| mr.is_valid(stag))
    }

    /// The entry with this index, valid or not.
    #[inline]
    pub(crate) fn entry_at(&self, stag: Stag) -> Option<&RegisteredMemory> {
        self.0.get(stag.table_index())
    }

    /// Looks up a key and checks the access ([`RegisteredMemory::check_access`]). Returns the memory
    /// and the offset of the bytes in it; for a window, the memory is the region that it is bound to.
    #[inline(always)]
    pub fn check_access(
        &self,
        stag: Stag,
        addr: u64,
        len: u32,
        need: Access,
        pd: u32,
        qp: u32,
    ) -> Result<(&RegisteredMemory, u64), KeyError> {
        let mr = self.entry_at(stag).ok_or(KeyError::Stag)?;
        let word = mr.key_word();
        if !word.is_valid_for(stag.0) {
            return Err(KeyError::Stag);
        }
        let off = mr.check_access(addr, len, need, pd, qp)?;
        if mr.is_fixed() {
            return Ok((mr, off));
        }
        self.check_changeable(mr, word, off, len, need)
    }

    /// Variant of [`Self::check_access`] for repeated accesses with the same rights, PD and stream:
    /// caches the memory of the last key.
    #[inline(always)]
    pub fn check_access_with<'k>(
        &'k self,
        last: &mut LastKey<'k>,
        (stag, addr, len): (Stag, u64, u32),
        need: Access,
        pd: u32,
        qp: u32,
    ) -> Result<(&'k RegisteredMemory, u64), KeyError> {
        if let Some((key, mr)) = last.0
            && key == stag
        {
            return Ok((mr, mr.check_range(addr, u64::from(len))?));
        }
        let (mr, off) = self.check_access(stag, addr, len, need, pd, qp)?;
        // Keys whose memory can change are looked up each time.
        last.0 = mr
            .is_fixed()
            .then_some((stag, mr))
            .filter(|_| mr.home_key() == stag);
        Ok((mr, off))
    }

    /// Starts a grace period after a key was invalidated or a window bound again; see
    /// [`Self::has_elapsed_for_others`].
    pub fn begin_grace_period(&self) -> Retired {
        self.0.begin_grace_period()
    }

    /// Returns whether no other worker uses rights that a key granted before the grace period (RFC
    /// 5040 section 8.1.1): the invalidation may then complete.
    pub fn has_elapsed_for_others(&self, grace_period: Retired) -> bool {
        self.0.has_elapsed_for_others(grace_period)
    }

    /// Reports a batch boundary. The borrow rules guarantee that no reference into the table is held.
    #[inline]
    pub fn report_quiescent(&mut self) {
        self.0.report_quiescent();
    }

    /// Goes offline; call it before the worker blocks, so that reclamation does not wait for it.
    pub fn go_offline(&mut self) {
        self.0.go_offline();
    }

    /// Goes online; call it after the worker blocked.
    pub fn go_online(&mut self) {
        self.0.go_online();
    }
}
