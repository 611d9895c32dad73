//! Memory of one client: protection domains, arenas, address spaces, regions and windows.
//!
//! [`ClientMemory`] checks registrations against these objects, charges them, enters their keys into the key
//! table, and counts the users of each object. It knows neither the client's socket nor the other clients: the
//! handlers in [`super`] read requests and reply.

use std::collections::{BTreeMap, HashMap, btree_map};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nix::libc;
use siw_memory::queue_allocator::QueueMemory;
use siw_memory::{Extent, ExtentMemory, KeyTable, ProcessMemory, RegisteredMemory, Retired, Stag};
use siw_shm::control::messages as m;
use siw_shm::{Access, SharedMemory, WindowType};

use super::arena_files::ListedFile;
use super::held_memory::{FreedArena, HeldMemory};
use crate::control::account::quotas::{Account, Charge, Charged, Ledger, Quota};
use crate::control::request::refusal::Refusal;
use crate::ids::{ArenaId, ClientId, CommandToken, PdId};

/// Maximum number of extents of one region: 8 GiB in pieces of 2 MiB.
const MOST_EXTENTS: usize = 4096;
/// Heap of one extent of a region: the extent, its end in the region, its arena, and a reference to
/// its memory during deregistration.
const EXTENT_HEAP: usize = 80;

/// Quota amounts of an arena of `len` bytes, `huge_len` of them in the daemon's hugepages.
pub(in crate::control) fn arena_amounts(len: u64, huge_len: u64) -> [(Quota, u64); 4] {
    [
        (Quota::Memory, len),
        (Quota::Descriptors, 1),
        (Quota::NicArenas, 1),
        (Quota::HugeMemory, huge_len),
    ]
}

/// Quota amounts of a memory key, with the heap that it needs in addition to that of every key.
/// Regions and windows share this quota.
pub(in crate::control) fn key_amounts(heap: u64) -> [(Quota, u64); 2] {
    [(Quota::Heap, heap), (Quota::MemoryKeys, 1)]
}

/// A protection domain, with the number of objects in it.
pub struct ProtectionDomain {
    pub users: u32,
}

/// A memory window of a client.
pub struct MemoryWindow {
    pd: PdId,
}

/// Request that an arena was made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArenaOrigin {
    /// [`AllocArena`](siw_shm::control::AllocArena)
    Allocated,
    /// [`ImportMemory`](siw_shm::control::ImportMemory): the client's own file.
    Imported,
    /// [`ImportOwnFile`](siw_shm::control::ImportOwnFile): a file of another connection.
    OwnFile,
}

impl ArenaOrigin {
    /// Its memory does not come from the daemon's hugepages, and stays its owner's.
    pub fn is_imported(self) -> bool {
        self != ArenaOrigin::Allocated
    }
}

/// An arena: memory that the client may register.
pub struct ClientArena {
    /// Its entry in [`ArenaFiles`](super::arena_files::ArenaFiles), dropped before the memory.
    #[allow(dead_code, reason = "held for its entry")]
    pub listed: Option<ListedFile>,
    pub region: Arc<SharedMemory>,
    pub origin: ArenaOrigin,
    /// DMA mapping for NICs; `None` if no port needs one.
    #[allow(dead_code, reason = "held for its registration")]
    pub external: Option<dpdk::ExternalRegion>,
    /// Number of regions registered in it.
    pub mrs: u32,
}

impl ClientArena {
    /// Keeps the client from freeing pages of the arena, which it has mapped, before workers access it. Pages
    /// of an imported file remain its owner's.
    fn own_pages(&self) -> Result<(), Refusal> {
        if self.origin.is_imported() {
            return Ok(());
        }
        self.region.own_pages().map_err(|error| {
            Refusal::new(
                libc::EPERM,
                format!("the arena cannot be registered: {error}"),
            )
        })
    }
}

/// A memory region of a client.
pub struct MemoryRegion {
    pub pd: PdId,
    /// Arena of the region. With `extents`: that of the first extent.
    pub arena: ArenaId,
    /// Extents, for a region of the application's existing memory.
    pub extents: Option<Box<RegionExtents>>,
    /// Page lists written by the client, for a fast registration.
    pub list: Option<QueueMemory>,
}

impl MemoryRegion {
    /// Creates a region in one piece of an arena.
    pub fn in_arena(pd: PdId, arena: ArenaId) -> MemoryRegion {
        MemoryRegion {
            pd,
            arena,
            extents: None,
            list: None,
        }
    }

    /// Arenas of the region, each once.
    pub fn arenas(&self) -> &[ArenaId] {
        match &self.extents {
            Some(extents) => &extents.arenas,
            None => std::slice::from_ref(&self.arena),
        }
    }
}

/// A client's address space, which workers copy from and to with system calls.
pub struct ClientProcess {
    memory: Arc<ProcessMemory>,
    /// Number of regions with extents in it.
    mrs: u32,
}

impl ClientProcess {
    /// The address space of `/proc/PID/mem`.
    pub fn new(mem: OwnedFd) -> ClientProcess {
        let memory = Arc::new(ProcessMemory::new(mem));
        ClientProcess { memory, mrs: 0 }
    }
}

/// A memory key that is not valid any more, or has other access rights. Workers may use the old entry until
/// the grace period ends.
pub struct RetiredKey {
    /// Grace period of the old entry.
    pub ticket: Retired,
    /// Memory that frames in ports may refer to.
    pub regions: Vec<Arc<SharedMemory>>,
}

/// All memory of one client. Arenas are few (`descriptors_per_client`), and a registration looks up thousands.
pub struct ClientMemory {
    owner: ClientId,
    pds: BTreeMap<PdId, Charged<ProtectionDomain>>,
    arenas: HashMap<ArenaId, Charged<ClientArena, 4>>,
    /// Address spaces, numbered in the same space as arenas.
    processes: HashMap<ArenaId, Charged<ClientProcess>>,
    /// By registration key.
    regions: BTreeMap<Stag, Charged<MemoryRegion, 2>>,
    /// By allocation key.
    windows: BTreeMap<Stag, Charged<MemoryWindow, 2>>,
    /// First extents of the next region to register.
    next_extents: Vec<m::MemoryExtent>,
    /// Sums over the regions with extents.
    registered: RegisteredSums,
    /// Memory that ports still refer to after the end of its registration.
    held: HeldMemory,
}

impl ClientMemory {
    /// Memory of a client that has none.
    pub fn new(owner: ClientId) -> ClientMemory {
        ClientMemory {
            owner,
            pds: BTreeMap::new(),
            arenas: HashMap::new(),
            processes: HashMap::new(),
            regions: BTreeMap::new(),
            windows: BTreeMap::new(),
            next_extents: Vec::new(),
            registered: RegisteredSums::default(),
            held: HeldMemory::default(),
        }
    }

    /// Adds a new protection domain.
    pub fn add_pd(&mut self, number: PdId, pd: Charged<ProtectionDomain>) {
        self.pds.insert(number, pd);
    }

    /// Removes a protection domain.
    ///
    /// # Errors
    /// There is none of this number, or it has users.
    pub fn remove_pd(&mut self, number: PdId) -> Result<(), Refusal> {
        let pd = self.find_pd(number)?;
        if pd.users > 0 {
            return Err(Refusal::in_use("protection domain", pd.users));
        }
        self.pds.remove(&number);
        Ok(())
    }

    /// Checks that the client has a protection domain.
    pub fn check_pd(&self, number: PdId) -> Result<(), Refusal> {
        self.find_pd(number).map(|_| ())
    }

    fn find_pd(&self, number: PdId) -> Result<&ProtectionDomain, Refusal> {
        let pd = self.pds.get(&number);
        pd.map(|pd| &**pd)
            .ok_or_else(|| Refusal::no_such("protection domain", number.0))
    }

    /// Counts a new user of a protection domain.
    pub fn add_pd_user(&mut self, number: PdId) {
        if let Some(pd) = self.pds.get_mut(&number) {
            pd.users += 1;
        }
    }

    /// Counts the end of a user of a protection domain.
    pub fn remove_pd_user(&mut self, number: PdId) {
        if let Some(pd) = self.pds.get_mut(&number) {
            pd.users -= 1;
        }
    }

    /// The protection domains, by number.
    pub fn pds(&self) -> &BTreeMap<PdId, Charged<ProtectionDomain>> {
        &self.pds
    }

    /// The regions, by registration key.
    pub fn regions(&self) -> &BTreeMap<Stag, Charged<MemoryRegion, 2>> {
        &self.regions
    }

    /// Sums over the regions with extents.
    pub fn registered_sums(&self) -> &RegisteredSums {
        &self.registered
    }

    /// Heap of what varies in length without a charge of its own, in bytes.
    pub fn heap_bytes(&self) -> usize {
        self.next_extents.capacity() * size_of::<m::MemoryExtent>()
    }

    /// Returns true if an arena or an address space has this number.
    pub fn has_arena(&self, number: u32) -> bool {
        let number = ArenaId(number);
        self.arenas.contains_key(&number) || self.processes.contains_key(&number)
    }

    /// Adds a new arena, or an imported file.
    pub fn add_arena(&mut self, number: ArenaId, arena: Charged<ClientArena, 4>) {
        self.arenas.insert(number, arena);
    }

    /// Adds the address space of the client's process.
    pub fn add_process(&mut self, number: ArenaId, process: Charged<ClientProcess>) {
        self.processes.insert(number, process);
    }

    /// Removes an arena or an address space. Returns the arena, unless frames in ports refer to it: it is kept
    /// until [`Self::on_frames_released`] then.
    ///
    /// # Errors
    /// There is none of this number, or regions are registered in it.
    pub fn remove_arena(&mut self, number: ArenaId) -> Result<Option<FreedArena>, Refusal> {
        if let Some(process) = self.processes.get(&number) {
            if process.mrs > 0 {
                return Err(Refusal::in_use("address space", process.mrs));
            }
            self.processes.remove(&number);
            return Ok(None);
        }
        let arena = self.find_arena(number)?;
        if arena.mrs > 0 {
            return Err(Refusal::in_use("arena", arena.mrs));
        }
        let removed = self.arenas.remove(&number);
        Ok(removed.and_then(|arena| self.held.keep(arena)))
    }

    /// The memory of an arena, whose pages are the daemon's from now on.
    ///
    /// # Errors
    /// There is none of this number, or its file cannot be sealed.
    pub fn own_arena(&self, number: ArenaId) -> Result<Arc<SharedMemory>, Refusal> {
        let arena = self.find_arena(number)?;
        arena.own_pages()?;
        Ok(arena.region.clone())
    }

    fn find_arena(&self, number: ArenaId) -> Result<&ClientArena, Refusal> {
        let arena = self.arenas.get(&number);
        arena
            .map(|arena| &**arena)
            .ok_or_else(|| Refusal::no_such("arena", number.0))
    }

    /// Registers a piece of an arena; returns its key.
    ///
    /// # Errors
    /// The request is invalid, or exceeds a limit.
    pub fn register(
        &mut self,
        (ledger, account): (&Ledger, &Account),
        keys: &KeyTable,
        request: &m::RegMr,
    ) -> Result<Stag, Refusal> {
        let memory = self.check_registration(request)?;
        let charge = ledger.charge(account, key_amounts(0))?;
        let stag = keys.insert(memory)?;
        let region = MemoryRegion::in_arena(PdId(request.pd), ArenaId(request.arena));
        self.add_region(stag, charge.of(region));
        Ok(stag)
    }

    /// Checks a registration in an arena, whose pages are the daemon's from now on.
    fn check_registration(&self, request: &m::RegMr) -> Result<RegisteredMemory, Refusal> {
        let access = check_access(request.access)?;
        let arena = self.find_arena(ArenaId(request.arena))?;
        self.check_pd(PdId(request.pd))?;
        let memory = RegisteredMemory::new(
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
                    "{} bytes at {} are outside the arena of {} bytes, or their address wraps",
                    request.len,
                    request.offset,
                    arena.region.len()
                ),
            )
        })?;
        arena.own_pages()?;
        Ok(memory)
    }

    /// Keeps the first extents of the next region to register.
    ///
    /// # Errors
    /// They are too many for a message or the client's memory. If they are too many for a region, or the file of
    /// an arena cannot be sealed, the earlier ones are forgotten, too.
    pub fn add_extents(
        &mut self,
        (ledger, account): (&Ledger, &Account),
        request: &m::AddExtents,
    ) -> Result<(), Refusal> {
        let more = used_extents(&request.extents, request.count)?;
        ledger.check(account, Quota::Heap, size_of_val(more) as u64)?;
        let before = std::mem::take(&mut self.next_extents);
        if before.len() + more.len() > MOST_EXTENTS {
            return Err(too_many_extents());
        }
        // System calls for each arena: those of all extents together would take milliseconds.
        for extent in more {
            if let Some(arena) = self.arenas.get(&ArenaId(extent.arena)) {
                arena.own_pages()?;
            }
        }
        self.next_extents = before;
        self.next_extents.extend_from_slice(more);
        Ok(())
    }

    /// Registers memory of the application: the extents of [`Self::add_extents`], and those of the request.
    /// Returns its key.
    ///
    /// # Errors
    /// The request is invalid, or exceeds a limit. The extents are forgotten in any case.
    pub fn register_extents(
        &mut self,
        (ledger, account): (&Ledger, &Account),
        keys: &KeyTable,
        request: &m::RegMemory,
    ) -> Result<Stag, Refusal> {
        let mut extents = std::mem::take(&mut self.next_extents);
        extents.extend_from_slice(used_extents(&request.extents, request.count)?);
        if extents.len() > MOST_EXTENTS {
            return Err(too_many_extents());
        }
        let heap = (extents.len() * EXTENT_HEAP + request.reason.to_text().len()) as u64;
        let charge = ledger.charge(account, key_amounts(heap))?;
        let (memory, parts) = self.check_extents(request, &extents)?;
        let stag = keys.insert(memory)?;
        tracing::debug!(
            client = self.owner.0,
            lkey = stag.0,
            len = request.len,
            arena_bytes = parts.bytes[0],
            remapped_bytes = parts.bytes[1],
            shared_bytes = parts.bytes[2],
            copied_bytes = parts.bytes[3],
            reason = parts.reason,
            "memory of the application registered"
        );
        let mut region = MemoryRegion::in_arena(PdId(request.pd), ArenaId(extents[0].arena));
        region.extents = Some(Box::new(parts));
        self.add_region(stag, charge.of(region));
        Ok(stag)
    }

    /// Checks a registration; returns the region and its extents.
    fn check_extents(
        &self,
        request: &m::RegMemory,
        extents: &[m::MemoryExtent],
    ) -> Result<(RegisteredMemory, RegionExtents), Refusal> {
        let access = check_access(request.access)?;
        let needs_shared_memory = Access(request.access).needs_shared_memory();
        self.check_pd(PdId(request.pd))?;
        if extents.is_empty() {
            return Err(Refusal::new(
                libc::EINVAL,
                "a region needs at least one extent",
            ));
        }
        let mut parts = RegionExtents {
            arenas: Vec::new(),
            bytes: [0; 4],
            reason: request.reason.to_text(),
            has_named_reason: false,
        };
        let mut list: Vec<Extent> = Vec::with_capacity(extents.len());
        for extent in extents {
            let number = ArenaId(extent.arena);
            // Most extents are in the arena of the one before.
            let memory = match list.last() {
                Some(before) if parts.arenas.last() == Some(&number) => before.memory.clone(),
                _ => {
                    parts.arenas.push(number);
                    let memory = self.find_memory(number, access)?;
                    if needs_shared_memory && matches!(memory, ExtentMemory::Process(_)) {
                        return Err(Refusal::new(
                            libc::EOPNOTSUPP,
                            "memory copied by system calls does not support remote atomics",
                        ));
                    }
                    memory
                }
            };
            let method = match memory {
                ExtentMemory::Process(_) => m::ExtentMethod::Copy as usize,
                ExtentMemory::Shared(_) => {
                    (extent.method as usize).min(m::ExtentMethod::Shared as usize)
                }
            };
            parts.bytes[method] = parts.bytes[method].saturating_add(extent.len);
            list.push(Extent {
                memory,
                offset: extent.offset,
                len: extent.len,
            });
        }
        parts.arenas.sort_unstable();
        parts.arenas.dedup();
        parts.arenas.shrink_to_fit();
        let (len, va) = (request.len, request.va);
        RegisteredMemory::new_scattered(list, len, va, request.pd, access)
            .map(|memory| (memory, parts))
            .map_err(|_| {
                let count = extents.len();
                Refusal::new(
                    libc::EINVAL,
                    format!("{count} extents are outside their arenas, do not add up to {len} bytes, or wrap"),
                )
            })
    }

    /// Returns the memory that contains an extent, if it permits the requested access. Its pages are the
    /// daemon's then.
    fn find_memory(&self, number: ArenaId, access: Access) -> Result<ExtentMemory, Refusal> {
        if let Some(arena) = self.arenas.get(&number) {
            arena.own_pages()?;
            if access.contains(Access::LOCAL_WRITE) && !arena.region.is_writable() {
                return Err(Refusal::new(libc::EFAULT, "the memory is read-only"));
            }
            return Ok(ExtentMemory::Shared(arena.region.clone()));
        }
        let process = self
            .processes
            .get(&number)
            .ok_or_else(|| Refusal::no_such("arena", number.0))?;
        Ok(ExtentMemory::Process(Arc::clone(&process.memory)))
    }

    /// Deregisters and registers anew, as ibv_rereg_mr(3) specifies: the old key becomes invalid for
    /// ever. Returns the new key and the old one. Memory of the application keeps its key.
    ///
    /// # Errors
    /// The request is invalid; the region is unchanged. [`libc::ENOMEM`]: no key is free, and the region is gone.
    pub fn reregister(
        &mut self,
        keys: &KeyTable,
        request: &m::ReregMr,
    ) -> Result<(Stag, RetiredKey), Refusal> {
        let lkey = Stag(request.lkey);
        let unknown = || Refusal::no_such("memory region with lkey", lkey.0);
        let old = self.regions.get(&lkey).ok_or_else(unknown)?;
        if old.list.is_some() {
            return Err(Refusal::new(
                libc::EINVAL,
                "a region for fast registration can be changed only by REG_MR work requests",
            ));
        }
        if old.extents.is_some() {
            return Ok((lkey, self.change_access(keys, request)?));
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
            .with_entry(lkey, |mr| (mr.start_offset(), mr.len(), mr.access_rights()))
            .ok_or_else(unknown)?;
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
        let memory = self.check_registration(&new)?;
        let regions = self.memory_of(lkey);
        let ticket = keys.deregister(lkey)?;
        let removed = self.remove_region(lkey);
        let stag = keys.insert(memory)?;
        if let Some((_, charge)) = removed {
            let region = MemoryRegion::in_arena(PdId(new.pd), ArenaId(new.arena));
            self.add_region(stag, charge.of(region));
        }
        Ok((stag, RetiredKey { ticket, regions }))
    }

    /// Changes the access rights of a region of the application's own memory. The keys stay the
    /// same, so peers that know them are not affected.
    fn change_access(&self, keys: &KeyTable, request: &m::ReregMr) -> Result<RetiredKey, Refusal> {
        let lkey = Stag(request.lkey);
        let new = check_access(request.access)?;
        let old = keys
            .with_entry(lkey, RegisteredMemory::access_rights)
            .ok_or_else(|| Refusal::no_such("memory region with lkey", lkey.0))?;
        let added = new.without(old);
        let is_rebased = (old.0 ^ new.0) & Access::ZERO_BASED.0 != 0;
        if request.flags != m::REREG_ACCESS || is_rebased || !self.permits(lkey, added) {
            return Err(Refusal::new(
                libc::EINVAL,
                "this change needs deregistration and a new registration of the region",
            ));
        }
        let ticket = keys.change_access(lkey, new)?;
        tracing::debug!(
            client = self.owner.0,
            lkey = lkey.0,
            access = new.0,
            "access rights changed"
        );
        // Frames that still refer to the memory are only read, for retransmission.
        let regions = Vec::new();
        Ok(RetiredKey { ticket, regions })
    }

    /// Returns whether the memory of a region permits rights beyond those that it was registered with. Memory
    /// copied by system calls was checked by its process, for these rights only.
    fn permits(&self, lkey: Stag, added: Access) -> bool {
        if !added.intersects(Access::LOCAL_WRITE | Access::REMOTE_ATOMIC) {
            return true;
        }
        let is_writable = |number| {
            let arena = self.arenas.get(number);
            arena.is_some_and(|arena| arena.region.is_writable())
        };
        let parts = self.regions.get(&lkey).and_then(|mr| mr.extents.as_ref());
        parts.is_some_and(|parts| parts.arenas.iter().all(is_writable))
    }

    /// Ends the validity of a region's key. The region stays until [`Self::remove_region`].
    ///
    /// # Errors
    /// There is no such region, or windows are bound to it.
    pub fn retire_region(
        &mut self,
        keys: &KeyTable,
        request: &m::DeregMr,
    ) -> Result<RetiredKey, Refusal> {
        let lkey = Stag(request.lkey);
        if !self.regions.contains_key(&lkey) {
            return Err(Refusal::no_such("memory region with lkey", lkey.0));
        }
        let regions = self.memory_of(lkey);
        if request.flags & m::DEREG_UNBIND_WINDOWS != 0 {
            keys.unbind_region(lkey, self.windows.keys().copied());
        }
        let ticket = keys.deregister(lkey)?;
        Ok(RetiredKey { ticket, regions })
    }

    /// Shared memory behind a registration, which NICs may read.
    fn memory_of(&self, lkey: Stag) -> Vec<Arc<SharedMemory>> {
        let arenas = self.regions.get(&lkey).map(|region| region.arenas());
        let arenas = arenas.unwrap_or_default().iter();
        arenas
            .filter_map(|arena| self.arenas.get(arena))
            .map(|arena| arena.region.clone())
            .collect()
    }

    /// Adds a region whose key is in the key table.
    pub fn add_region(&mut self, key: Stag, mut region: Charged<MemoryRegion, 2>) {
        if let Some(extents) = &mut region.extents {
            self.registered.add(extents);
        }
        self.count_users(&region, |count| *count += 1);
        self.regions.insert(key, region);
    }

    /// Removes a region that no worker can access; returns it with its charge.
    pub fn remove_region(&mut self, lkey: Stag) -> Option<(MemoryRegion, Charge<2>)> {
        let (region, charge) = self.regions.remove(&lkey)?.split();
        if let Some(extents) = &region.extents {
            self.registered.remove(extents);
        }
        self.count_users(&region, |count| *count -= 1);
        Some((region, charge))
    }

    /// Changes the user counts of a region's arenas, address spaces and protection domain.
    fn count_users(&mut self, region: &MemoryRegion, mut change: impl FnMut(&mut u32)) {
        for arena in region.arenas() {
            if let Some(entry) = self.arenas.get_mut(arena) {
                change(&mut entry.mrs);
            } else if let Some(process) = self.processes.get_mut(arena) {
                change(&mut process.mrs);
            }
        }
        if let Some(pd) = self.pds.get_mut(&region.pd) {
            change(&mut pd.users);
        }
    }

    /// Allocates a memory window, which workers bind; returns its key.
    ///
    /// # Errors
    /// The request is invalid, or exceeds a limit.
    pub fn add_window(
        &mut self,
        (ledger, account): (&Ledger, &Account),
        keys: &KeyTable,
        request: &m::AllocMw,
    ) -> Result<Stag, Refusal> {
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
        let pd = PdId(request.pd);
        self.check_pd(pd)?;
        let charge = ledger.charge(account, key_amounts(0))?;
        let stag = keys.insert(RegisteredMemory::new_window(request.pd, kind))?;
        self.add_pd_user(pd);
        self.windows.insert(stag, charge.of(MemoryWindow { pd }));
        Ok(stag)
    }

    /// Frees a window; returns its key, and its charge, which lasts until no worker can use the key.
    ///
    /// # Errors
    /// There is no such window.
    pub fn remove_window(
        &mut self,
        keys: &KeyTable,
        rkey: Stag,
    ) -> Result<(RetiredKey, Charge<2>), Refusal> {
        let unknown = || Refusal::no_such("memory window with rkey", rkey.0);
        let (window, charge) = self.windows.remove(&rkey).ok_or_else(unknown)?.split();
        self.remove_pd_user(window.pd);
        let ticket = keys.remove(rkey).ok_or_else(unknown)?;
        // No memory to wait for: the deregistration of the window's region waits for frames.
        let regions = Vec::new();
        Ok((RetiredKey { ticket, regions }, charge))
    }

    /// Holds the memory of a request while frames may refer to it: `left` workers report the release of these
    /// frames with the token.
    pub fn hold(&mut self, token: CommandToken, left: usize, regions: Vec<Arc<SharedMemory>>) {
        self.held.hold(token, left, regions);
    }

    /// Returns true if only late workers have not reported: the request with the token may be answered.
    pub fn may_answer(&self, token: CommandToken) -> bool {
        self.held.may_answer(token)
    }

    /// A worker's ports have not freed the frames in time. Returns false if the token belongs to another wait.
    pub fn on_frames_late(&mut self, worker: usize, token: CommandToken) -> bool {
        self.held.on_late(worker, token)
    }

    /// A worker's ports have freed all frames of a request: returns the arenas to release now.
    pub fn on_frames_released(&mut self, worker: usize, token: CommandToken) -> Vec<FreedArena> {
        self.held.on_released(worker, token)
    }

    /// Memory of all arenas, including freed ones that frames refer to.
    pub fn shared_memory(&self) -> Vec<Arc<SharedMemory>> {
        let arenas = self.arenas.values().map(|arena| &arena.region);
        arenas.chain(self.held.kept_regions()).cloned().collect()
    }

    /// Returns true if the operating system frees the arenas in a time that depends on their length alone.
    pub fn is_freed_fast(&self) -> bool {
        // The last descriptor of a file frees all its pages, however little of it was mapped.
        let mut arenas = self.arenas.values();
        arenas.all(|arena| !arena.origin.is_imported() && arena.external.is_none())
    }

    /// Takes the keys and protection domains of a client that departs.
    pub fn take_entries(&mut self) -> MemoryEntries {
        MemoryEntries {
            windows: std::mem::take(&mut self.windows).into_iter(),
            regions: std::mem::take(&mut self.regions).into_iter(),
            pds: std::mem::take(&mut self.pds).into_iter(),
        }
    }
}

/// Keys and protection domains of a departed client, which are removed from the tables of all clients one by
/// one.
pub struct MemoryEntries {
    windows: btree_map::IntoIter<Stag, Charged<MemoryWindow, 2>>,
    regions: btree_map::IntoIter<Stag, Charged<MemoryRegion, 2>>,
    pds: btree_map::IntoIter<PdId, Charged<ProtectionDomain>>,
}

impl MemoryEntries {
    /// The next key, with its charge. Windows are first: they are bound to regions.
    pub fn next_key(&mut self) -> Option<(Stag, Charge<2>)> {
        if let Some((key, window)) = self.windows.next() {
            return Some((key, window.split().1));
        }
        let (key, region) = self.regions.next()?;
        Some((key, region.split().1))
    }

    /// The next protection domain.
    pub fn next_pd(&mut self) -> Option<PdId> {
        self.pds.next().map(|(number, _)| number)
    }

    /// Returns true if keys are left.
    pub fn has_keys(&self) -> bool {
        self.windows.len() + self.regions.len() > 0
    }

    /// Returns true if protection domains are left.
    pub fn has_pds(&self) -> bool {
        self.pds.len() > 0
    }
}

/// Access rights requested by a registration.
fn check_access(bits: u32) -> Result<Access, Refusal> {
    let access = Access(bits).without(Access::OPTIONAL);
    if !Access::ALL.contains(access) {
        return Err(Refusal::new(
            libc::EINVAL,
            format!("unknown access bits {bits:#x}"),
        ));
    }
    if access.allows_remote_changes() && !access.contains(Access::LOCAL_WRITE) {
        return Err(Refusal::new(
            libc::EINVAL,
            "remote write and remote atomic require local write (ibv_reg_mr(3))",
        ));
    }
    Ok(access)
}

fn too_many_extents() -> Refusal {
    Refusal::new(
        libc::ENOMEM,
        format!("a region has at most {MOST_EXTENTS} extents"),
    )
}

/// The extents in use of a message.
fn used_extents(
    extents: &[m::MemoryExtent; m::MAX_EXTENTS],
    count: u32,
) -> Result<&[m::MemoryExtent], Refusal> {
    extents.get(..count as usize).ok_or_else(|| {
        let most = m::MAX_EXTENTS;
        Refusal::new(
            libc::EINVAL,
            format!("{count} extents: at most {most} fit in a message"),
        )
    })
}

/// Extents of a region of the application's existing memory.
pub struct RegionExtents {
    /// Arenas, each once.
    pub arenas: Vec<ArenaId>,
    /// Bytes by [`siw_shm::control::ExtentMethod`].
    pub bytes: [u64; 4],
    /// Reason given by the client for extents that are not remapped.
    pub reason: String,
    /// The reason is counted by its text in [`RegisteredSums`].
    pub has_named_reason: bool,
}

/// Number of different reasons that are counted by their text; further ones are counted together.
const NAMED_REASONS: usize = 32;

/// Sums over a client's regions with extents, so that statistics need not visit each region.
#[derive(Default)]
pub struct RegisteredSums {
    /// Bytes by [`siw_shm::control::ExtentMethod`].
    pub bytes: [u64; 4],
    /// Number of regions by reason.
    pub reasons: BTreeMap<String, u64>,
    /// Number of regions with other reasons.
    pub other_reasons: u64,
}

impl RegisteredSums {
    /// Adds a region.
    pub fn add(&mut self, region: &mut RegionExtents) {
        for (sum, part) in self.bytes.iter_mut().zip(region.bytes) {
            *sum = sum.saturating_add(part);
        }
        if region.reason.is_empty() {
            return;
        }
        let is_named = self.reasons.contains_key(&region.reason);
        region.has_named_reason = is_named || self.reasons.len() < NAMED_REASONS;
        let count = if region.has_named_reason {
            self.reasons.entry(region.reason.clone()).or_insert(0)
        } else {
            &mut self.other_reasons
        };
        *count += 1;
    }

    /// Removes a region.
    pub fn remove(&mut self, region: &RegionExtents) {
        for (sum, part) in self.bytes.iter_mut().zip(region.bytes) {
            *sum = sum.saturating_sub(part);
        }
        if region.reason.is_empty() {
            return;
        }
        if !region.has_named_reason {
            self.other_reasons = self.other_reasons.saturating_sub(1);
        } else if let Some(count) = self.reasons.get_mut(&region.reason) {
            *count -= 1;
            if *count == 0 {
                self.reasons.remove(&region.reason);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable;

    use super::*;
    use crate::control::context::tests::{new_client, resources};

    const PD: PdId = PdId(1);
    const ARENA: ArenaId = ArenaId(2);
    const ARENA_BYTES: u64 = 8192;

    /// Memory of a new client with a protection domain and an arena.
    fn with_arena(account: &Account, owner: ClientId) -> ClientMemory {
        let mut memory = ClientMemory::new(owner);
        let pd = ProtectionDomain { users: 0 };
        memory.add_pd(PD, account.hold([(Quota::ProtectionDomains, 1)]).of(pd));
        let region = SharedMemory::new_anonymous(ARENA_BYTES as usize).unwrap();
        let arena = ClientArena {
            listed: None,
            region: Arc::new(region),
            // Without a file to seal.
            origin: ArenaOrigin::Imported,
            external: None,
            mrs: 0,
        };
        let charge = account.hold(arena_amounts(ARENA_BYTES, 0));
        memory.add_arena(ARENA, charge.of(arena));
        memory
    }

    fn extent(offset: u64, len: u64) -> m::MemoryExtent {
        m::MemoryExtent {
            arena: ARENA.0,
            method: m::ExtentMethod::Remap as u32,
            offset,
            len,
        }
    }

    /// Registration of these extents, up to the length of a message.
    fn registration(extents: &[m::MemoryExtent], len: u64) -> m::RegMemory {
        let mut request = m::RegMemory::zeroed();
        request.pd = PD.0;
        request.access = Access::LOCAL_WRITE.0;
        request.len = len;
        request.count = extents.len() as u32;
        request.extents[..extents.len()].copy_from_slice(extents);
        request
    }

    #[test]
    fn a_registration_uses_its_arena_and_its_protection_domain_until_its_removal() {
        let mut all = resources();
        let (client, _other) = new_client(&mut all);
        let limits = (&all.ledger, &client.account);
        let keys = KeyTable::new(16, 1);
        let mut memory = with_arena(&client.account, client.id);
        let request = registration(&[extent(4096, 4096), extent(0, 4096)], ARENA_BYTES);
        let lkey = memory.register_extents(limits, &keys, &request).unwrap();
        assert_eq!(client.account.amount(Quota::MemoryKeys), 1);
        let method = m::ExtentMethod::Remap as usize;
        assert_eq!(memory.registered_sums().bytes[method], ARENA_BYTES);
        let request = m::DeregMr {
            lkey: lkey.0,
            flags: 0,
        };
        memory.retire_region(&keys, &request).unwrap();
        assert!(keys.with_entry(lkey, |_| ()).is_none());
        // Workers may still use the region.
        assert!(memory.remove_arena(ARENA).is_err());
        assert!(memory.remove_pd(PD).is_err());
        let (_, charge) = memory.remove_region(lkey).unwrap();
        assert_eq!(client.account.amount(Quota::MemoryKeys), 1);
        drop(charge);
        assert_eq!(client.account.amount(Quota::MemoryKeys), 0);
        assert_eq!(memory.registered_sums().bytes, [0; 4]);
        assert!(memory.remove_arena(ARENA).unwrap().is_some());
        memory.remove_pd(PD).unwrap();
    }

    #[test]
    fn a_refused_registration_forgets_its_extents_and_charges_nothing() {
        let mut all = resources();
        let (client, _other) = new_client(&mut all);
        let limits = (&all.ledger, &client.account);
        let keys = KeyTable::new(16, 1);
        let mut memory = with_arena(&client.account, client.id);
        let mut more = m::AddExtents::zeroed();
        more.count = 1;
        more.extents[0] = extent(0, 4096);
        memory.add_extents(limits, &more).unwrap();
        assert!(memory.heap_bytes() > 0);
        // One extent outside of the arena.
        let request = registration(&[extent(ARENA_BYTES, 4096)], ARENA_BYTES);
        assert!(memory.register_extents(limits, &keys, &request).is_err());
        assert_eq!(client.account.amount(Quota::MemoryKeys), 0);
        assert_eq!(memory.heap_bytes(), 0);
        let request = registration(&[extent(4096, 4096)], ARENA_BYTES);
        let refused = memory.register_extents(limits, &keys, &request);
        let why = refused.unwrap_err();
        assert!(why.reason().contains("do not add up"), "{}", why.reason());
        memory.add_extents(limits, &more).unwrap();
        memory.register_extents(limits, &keys, &request).unwrap();
        assert!(memory.remove_arena(ARENA).is_err());
    }

    #[test]
    fn sums_follow_the_regions_and_have_a_bounded_number_of_reasons() {
        let region = |number: usize| RegionExtents {
            arenas: Vec::new(),
            bytes: [1, 0, 0, number as u64],
            reason: format!("reason {}", number / 2),
            has_named_reason: false,
        };
        let mut sums = RegisteredSums::default();
        let mut regions: Vec<_> = (0..200).map(region).collect();
        for region in &mut regions {
            sums.add(region);
        }
        assert_eq!(sums.reasons.len(), NAMED_REASONS);
        let named: u64 = sums.reasons.values().sum();
        assert_eq!((named, sums.other_reasons), (64, 136));
        assert_eq!(sums.bytes, [200, 0, 0, 199 * 100]);
        // A reason that was counted with others may be named for a later region.
        sums.remove(&regions.remove(0));
        sums.remove(&regions.remove(0));
        let mut late = region(199);
        sums.add(&mut late);
        assert_eq!(sums.reasons["reason 99"], 1);
        for region in regions.iter().chain([&late]) {
            sums.remove(region);
        }
        assert_eq!((sums.bytes, sums.other_reasons), ([0; 4], 0));
        assert!(sums.reasons.is_empty());
    }
}
