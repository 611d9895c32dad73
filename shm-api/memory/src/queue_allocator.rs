//! Queue memory of one client: QPs and CQs share region chunks of 2 MiB, so that
//! ten thousand idle QPs need few fds and mappings. Used by the daemon.
//!
//! It uses size classes with four steps per doubling (at most a quarter is wasted) and free lists per
//! class, in constant time. A queue larger than a quarter of a chunk gets its own region, which is
//! unmapped when the queue is freed; unmapping a large region takes long and is left to the caller.

use siw_shm::SharedMemory;
use siw_shm::control::messages::QueueRef;
use siw_shm::shared_memory::PageSize;
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Weak};

/// Size of a shared chunk in bytes.
pub const CHUNK: usize = 2 << 20;
/// Larger queues get their own region, so that the unused end of a chunk stays short.
const DEDICATED: usize = CHUNK / 4;
const MIN: usize = 512;
/// Larger regions have normal pages: zeroing hugepages, or unmapping them, would block the caller for
/// long.
const LONG: usize = 16 << 20;
/// Bytes of a freed queue's entry, in a vector that doubles.
const FREED_QUEUE: usize = 64;

/// Memory of one queue.
#[derive(Debug, Clone)]
pub struct QueueMemory {
    /// Identifies the region to the client; unique per client, never reused, starting at 1.
    pub region_id: u32,
    /// The shared memory that contains the queue.
    pub region: Arc<SharedMemory>,
    /// Offset of the first byte of the queue.
    pub offset: usize,
    /// Usable bytes, zeroed.
    pub len: usize,
    /// The client has not seen this region: send its fd with the reply.
    pub new_region: bool,
    /// The region contains only this queue: the client unmaps it with the queue.
    pub dedicated: bool,
}

impl From<&QueueMemory> for QueueRef {
    fn from(memory: &QueueMemory) -> QueueRef {
        QueueRef {
            region: memory.region_id,
            fd: memory.new_region.into(),
            dedicated: memory.dedicated.into(),
            region_len: memory.region.len() as u64,
            offset: memory.offset as u64,
        }
    }
}

/// Reason why no memory for a queue is available.
#[derive(Debug, thiserror::Error)]
pub enum AllocError {
    /// The client's limit would be exceeded.
    #[error(
        "this client's queues would exceed {0} bytes; raise [limits] or create fewer or smaller queues"
    )]
    Limit(usize),
    /// The operating system has no memory.
    #[error("cannot create shared memory: {0}")]
    Os(#[from] io::Error),
}

/// The allocator of one client.
pub struct QueueAllocator {
    pages: PageSize,
    limit: usize,
    /// The client that faults on the memory are charged to.
    owner: u64,
    mapped_bytes: usize,
    huge_bytes: usize,
    regions: usize,
    /// Number of queues in `free`.
    freed: usize,
    next_id: u32,
    chunk: Option<(u32, Arc<SharedMemory>, usize)>,
    free: HashMap<usize, Vec<(u32, Arc<SharedMemory>, usize)>>,
    /// Freed regions that take long to unmap.
    long: Vec<Arc<SharedMemory>>,
    /// Regions allocated since the last [`QueueAllocator::own_regions`]; a freed one is not kept.
    unowned: Vec<Weak<SharedMemory>>,
}

impl QueueAllocator {
    /// An allocator of at most `limit` bytes of shared memory, for the client that faults on it are
    /// charged to ([`SharedMemory::guard_for`]).
    pub fn new(pages: PageSize, limit: usize, owner: u64) -> Self {
        QueueAllocator {
            pages,
            limit,
            owner,
            mapped_bytes: 0,
            huge_bytes: 0,
            regions: 0,
            freed: 0,
            next_id: 1,
            chunk: None,
            free: HashMap::new(),
            long: Vec::new(),
            unowned: Vec::new(),
        }
    }

    fn size_class(len: usize) -> usize {
        let len = len.max(MIN);
        let step = (len.next_power_of_two() / 8).max(64);
        len.next_multiple_of(step)
    }

    fn new_region(&mut self, len: usize) -> Result<(u32, Arc<SharedMemory>), AllocError> {
        if self.mapped_bytes.saturating_add(len) > self.limit {
            return Err(AllocError::Limit(self.limit));
        }
        let pages = if len > LONG {
            PageSize::Normal
        } else {
            self.pages
        };
        let region = SharedMemory::create_memfd("siwd-queues", len, pages)?;
        let region = Arc::new(region.guard_for(self.owner)?);
        self.mapped_bytes += region.len();
        self.huge_bytes += huge_len(&region);
        self.regions += 1;
        self.unowned.push(Arc::downgrade(&region));
        let id = self.next_id;
        // The number wraps after four thousand million regions: the client may then confuse its own
        // regions.
        self.next_id = self.next_id.wrapping_add(1).max(1);
        Ok((id, region))
    }

    /// Allocates zeroed, 64-aligned memory for a queue.
    pub fn alloc(&mut self, len: usize) -> Result<QueueMemory, AllocError> {
        let len = Self::size_class(len);
        if len > DEDICATED {
            let (region_id, region) = self.new_region(len)?;
            return Ok(QueueMemory {
                region_id,
                region,
                offset: 0,
                len,
                new_region: true,
                dedicated: true,
            });
        }
        let mut new_region = false;
        let (region_id, region, offset) = match self.free.get_mut(&len).and_then(Vec::pop) {
            Some((id, region, offset)) => {
                self.freed -= 1;
                // Consumers interpret the zeros of a new queue as "nothing yet".
                let _ = region.fill_zero(offset, len);
                (id, region, offset)
            }
            None => {
                if self
                    .chunk
                    .as_ref()
                    .is_none_or(|(_, _, used)| used + len > CHUNK)
                {
                    let (id, region) = self.new_region(CHUNK)?;
                    self.chunk = Some((id, region, 0));
                    new_region = true;
                }
                match &mut self.chunk {
                    Some((id, region, used)) => {
                        let at = *used;
                        *used += len;
                        (*id, region.clone(), at)
                    }
                    None => return Err(AllocError::Limit(self.limit)),
                }
            }
        };
        Ok(QueueMemory {
            region_id,
            region,
            offset,
            len,
            new_region,
            dedicated: false,
        })
    }

    /// Frees a queue's memory, which the worker no longer uses.
    pub fn free(&mut self, memory: QueueMemory) {
        if memory.dedicated {
            let region = &memory.region;
            self.mapped_bytes -= region.len().min(self.mapped_bytes);
            self.huge_bytes -= huge_len(region).min(self.huge_bytes);
            self.regions = self.regions.saturating_sub(1);
            if region.len() > LONG {
                self.long.push(memory.region);
            }
        } else {
            self.freed += 1;
            self.free.entry(memory.len).or_default().push((
                memory.region_id,
                memory.region,
                memory.offset,
            ));
        }
    }

    /// Takes the right to free pages of the regions allocated so far
    /// ([`SharedMemory::own_pages`]), which the client has mapped.
    ///
    /// # Errors
    /// The client has changed the seals of a region, or freed hugepages.
    pub fn own_regions(&mut self) -> io::Result<()> {
        self.unowned
            .drain(..)
            .filter_map(|region| region.upgrade())
            .try_for_each(|region| region.own_pages())
    }

    /// Takes the freed regions that take long to unmap: dropping them blocks meanwhile. They no
    /// longer count as mapped.
    pub fn take_long_regions(&mut self) -> Vec<Arc<SharedMemory>> {
        std::mem::take(&mut self.long)
    }

    /// Sets the page size of further regions.
    pub fn set_pages(&mut self, pages: PageSize) {
        self.pages = pages;
    }

    /// Number of bytes that allocating a queue of `len` bytes would map in addition; 0 when there is
    /// room already.
    pub fn bytes_needed(&self, len: usize) -> usize {
        let len = Self::size_class(len);
        if len > DEDICATED {
            return len;
        }
        let has_free = self.free.get(&len).is_some_and(|free| !free.is_empty());
        let chunk = self.chunk.as_ref();
        if has_free || chunk.is_some_and(|(_, _, used)| used + len <= CHUNK) {
            0
        } else {
            CHUNK
        }
    }

    /// Number of bytes mapped for this client's queues.
    pub fn mapped_bytes(&self) -> usize {
        self.mapped_bytes
    }

    /// The part of [`Self::mapped_bytes`] in hugepages.
    pub fn huge_bytes(&self) -> usize {
        self.huge_bytes
    }

    /// Bytes of the caller's own memory for the list of freed queues.
    pub fn heap_bytes(&self) -> usize {
        self.freed * FREED_QUEUE
    }

    /// Number of mapped regions.
    pub fn region_count(&self) -> usize {
        self.regions
    }
}

fn huge_len(region: &SharedMemory) -> usize {
    if region.is_huge() { region.len() } else { 0 }
}
