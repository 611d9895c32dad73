//! Queue memory of one client: QPs and CQs share region chunks of 2 MiB, so that
//! ten thousand idle QPs need few fds and mappings. Used by the daemon.
//!
//! It uses size classes with four steps per doubling (at most a quarter is wasted) and free lists per
//! class, in constant time. A queue larger than a quarter of a chunk gets its own region, which is
//! unmapped when the queue is freed; unmapping a large region takes long and is left to the caller.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use siw_shm::SharedMemory;
use siw_shm::control::messages::QueueRef;
use siw_shm::shared_memory::PageSize;
use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

/// Size of a shared chunk in bytes.
pub const CHUNK: usize = 2 << 20;
/// Larger queues get their own region, so that the unused end of a chunk stays short.
const DEDICATED: usize = CHUNK / 4;
const MIN: usize = 512;
/// Larger regions have normal pages: zeroing hugepages, or unmapping them, would block the caller for
/// long. Zeroing 16 MiB takes a millisecond or more.
const LONG: usize = 4 << 20;
/// Bytes of a freed queue's entry, in a vector that doubles.
const FREED_QUEUE: usize = 64;

/// Memory of one queue.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct QueueMemory {
    /// Identifies the region to the client; unique per client, never reused, starting at 1.
    pub region_id: u32,
    /// The shared memory that contains the queue.
    #[serde(with = "siw_shm::saved")]
    pub region: Arc<SharedMemory>,
    /// Offset of the first byte of the queue.
    pub offset: usize,
    /// Usable bytes, zeroed.
    pub len: usize,
    /// The region contains only this queue: the client unmaps it with the queue.
    pub dedicated: bool,
}

impl QueueMemory {
    /// Where the queue is, for a client that has its region's descriptor.
    pub fn place(&self) -> QueueRef {
        QueueRef {
            region: self.region_id,
            fd: 0,
            dedicated: self.dedicated.into(),
            region_len: self.region.len() as u64,
            offset: self.offset as u64,
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

/// A part of a shared chunk.
#[derive(Serialize, Deserialize)]
struct ChunkPart {
    region_id: u32,
    #[serde(with = "siw_shm::saved")]
    region: Arc<SharedMemory>,
    offset: usize,
}

/// The allocator of one client.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Self")]
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
    /// The unused rest of the newest chunk.
    chunk: Option<ChunkPart>,
    /// Freed queues, by length.
    free: HashMap<usize, Vec<ChunkPart>>,
    /// Freed regions that take long to unmap.
    #[serde(with = "siw_shm::saved")]
    long: Vec<Arc<SharedMemory>>,
    /// Regions whose descriptor the client does not have.
    not_given: HashSet<u32>,
    /// Regions given since the last [`QueueAllocator::own_regions`]; a freed one is not kept.
    #[serde(with = "siw_shm::saved")]
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
            not_given: HashSet::new(),
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
        let id = self.next_id;
        // The number wraps after four thousand million regions: the client may then confuse its own
        // regions.
        self.next_id = self.next_id.wrapping_add(1).max(1);
        self.not_given.insert(id);
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
                dedicated: true,
            });
        }
        let (region_id, region, offset) = match self.free.get_mut(&len).and_then(Vec::pop) {
            Some(part) => {
                self.freed -= 1;
                // Consumers interpret the zeros of a new queue as "nothing yet".
                let _ = part.region.fill_zero(part.offset, len);
                (part.region_id, part.region, part.offset)
            }
            None => {
                if self
                    .chunk
                    .as_ref()
                    .is_none_or(|rest| rest.offset + len > CHUNK)
                {
                    let (region_id, region) = self.new_region(CHUNK)?;
                    self.chunk = Some(ChunkPart {
                        region_id,
                        region,
                        offset: 0,
                    });
                }
                match &mut self.chunk {
                    Some(rest) => {
                        let at = rest.offset;
                        rest.offset += len;
                        (rest.region_id, rest.region.clone(), at)
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
            dedicated: false,
        })
    }

    /// Where a queue is, for its client, and the descriptor of its region if the client does not have it
    /// yet: both go with the reply.
    pub fn give<'a>(&mut self, memory: &'a QueueMemory) -> (QueueRef, Option<BorrowedFd<'a>>) {
        let is_new = self.not_given.remove(&memory.region_id);
        if is_new {
            self.unowned.push(Arc::downgrade(&memory.region));
        }
        let fd = memory.region.memfd().filter(|_| is_new);
        let place = QueueRef {
            fd: is_new.into(),
            ..memory.place()
        };
        (place, fd)
    }

    /// Frees a queue's memory, which the worker no longer uses.
    pub fn free(&mut self, memory: QueueMemory) {
        if memory.dedicated {
            self.not_given.remove(&memory.region_id);
            let region = &memory.region;
            self.mapped_bytes -= region.len().min(self.mapped_bytes);
            self.huge_bytes -= huge_len(region).min(self.huge_bytes);
            self.regions = self.regions.saturating_sub(1);
            if region.len() > LONG {
                self.long.push(memory.region);
            }
        } else {
            self.freed += 1;
            self.free.entry(memory.len).or_default().push(ChunkPart {
                region_id: memory.region_id,
                region: memory.region,
                offset: memory.offset,
            });
        }
    }

    /// Takes the right to free pages of the regions given so far
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
        if has_free || chunk.is_some_and(|rest| rest.offset + len <= CHUNK) {
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

impl Serialize for QueueAllocator {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        QueueAllocator::serialize(self, serializer)
    }
}

/// Refuses a rest beyond its chunk, and a wrong number of freed queues.
impl<'de> Deserialize<'de> for QueueAllocator {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let queues = QueueAllocator::deserialize(deserializer)?;
        let freed: usize = queues.free.values().map(Vec::len).sum();
        let chunk = queues.chunk.as_ref();
        if queues.freed != freed || chunk.is_some_and(|rest| rest.offset > CHUNK) {
            return Err(de::Error::custom("the freed queues contradict each other"));
        }
        Ok(queues)
    }
}

fn huge_len(region: &SharedMemory) -> usize {
    if region.is_huge() { region.len() } else { 0 }
}
