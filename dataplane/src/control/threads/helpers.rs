//! Threads for slow operations: allocating and freeing large memory, closing descriptors whose close a
//! client can delay, and returning free heap to the operating system. The control thread serves other clients meanwhile.
//!
//! ```text
//! control thread -- MemoryOrder --> siwd-memory    fills pages, a part of each order in turn
//!       |      |
//!       |      |--- dispose() ----> siwd-disposal  one thread for each nonempty queue, one a user
//!       |      |                      `--> siwd-closer  sockets (closer.rs)
//!       |      `--- return_heap() -> siwd-heap      one thread at a time, for one call
//!       `<-- HelperReport (queue, then the wake-up that workers use as well)
//! ```

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use nix::libc;
use parking_lot::Mutex;
use siw_shm::SharedMemory;
use siw_shm::doorbell::SleepFlag;
use siw_shm::shared_memory::{MemoryInMaking, PageSize};

use super::closer::{Closer, is_socket};
use super::reports::{HelperReport, MadeArena, Reporter};
use crate::control::request::refusal::Refusal;
use crate::ids::{ClientId, CommandToken};

/// Maps an arena in DPDK and for its NICs, which may read it while the result lives. `None` if no
/// NIC reads memory by DMA.
pub type MapArena =
    dyn Fn(&Arc<SharedMemory>) -> Result<Option<dpdk::ExternalRegion>, String> + Send + Sync;

/// Memory above this size is allocated and freed by helpers: freeing its pages takes a good part of a
/// millisecond.
pub(in crate::control) const LONG_MEMORY: u64 = 4 << 20;
/// Bytes populated for one order before the next order's turn.
const BYTES_PER_TURN: usize = 64 << 20;
/// Number of a user's disposals of descriptors above which no further descriptor of that user is
/// received until half of them are done.
const MOST_OF_USER: usize = 256;

/// A client's order for an arena.
pub(in crate::control) struct MemoryOrder {
    pub client: ClientId,
    pub token: CommandToken,
    pub source: MemorySource,
}

/// Memory of an ordered arena.
pub(in crate::control) enum MemorySource {
    New {
        len: usize,
        pages: PageSize,
    },
    /// Part of a client's file, which NICs will read.
    File(FilePart),
}

/// Owner of a file in memory.
pub(in crate::control) enum FileSource {
    /// A client has sent it.
    Client(OwnedFd),
    /// The daemon made it; this is its mapping.
    Arena(Arc<SharedMemory>),
}

/// Part of a client's file in memory.
pub(in crate::control) struct FilePart {
    pub source: FileSource,
    pub offset: u64,
    pub len: u64,
    pub is_writable: bool,
}

impl FilePart {
    /// Maps the part for workers, and for the NICs that read it.
    pub fn map(self, client: ClientId, map_arena: &MapArena) -> Result<MadeArena, Refusal> {
        let FilePart {
            source,
            offset,
            len,
            is_writable,
        } = self;
        let refuse = |errno: i32, reason: &dyn std::fmt::Display| {
            Refusal::new(errno, format!("the file cannot be mapped: {reason}"))
        };
        let mapped = match source {
            FileSource::Arena(arena) => arena.duplicate_part(offset, len, is_writable),
            FileSource::Client(file) => SharedMemory::map_part(file, offset, len, is_writable),
        };
        let mapped = mapped.and_then(|memory| memory.guard_for(client.fault_owner()));
        let memory =
            mapped.map_err(|error| refuse(error.raw_os_error().unwrap_or(libc::EINVAL), &error))?;
        map_memory(memory, map_arena).map_err(|reason| refuse(libc::ENOMEM, &reason))
    }
}

/// Disposal queues of a user (uid), each first in, first out: only the same user's disposals wait for
/// those in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::control) enum DisposalQueue {
    /// Disposals that take only as long as the operating system needs.
    Memory(u32),
    /// Descriptors whose close this user could delay.
    Descriptors(u32),
}

/// An object to drop.
struct Doomed {
    what: Box<dyn Send>,
    /// A socket whose last reference it may have.
    socket: Option<OwnedFd>,
    /// Sent afterwards.
    report: Option<HelperReport>,
}

/// One disposal queue.
#[derive(Default)]
struct Disposal {
    doomed: VecDeque<Doomed>,
    has_thread: bool,
    /// Clients wait until the queue is shorter.
    is_awaited: bool,
}

type DisposalQueues = Arc<Mutex<HashMap<DisposalQueue, Disposal>>>;

/// The helper threads and their work.
pub(in crate::control) struct Helpers {
    reporter: Reporter,
    orders: Option<mpsc::Sender<MemoryOrder>>,
    maker: Option<JoinHandle<()>>,
    queues: DisposalQueues,
    closer: Closer,
}

impl Helpers {
    /// Starts the allocation thread. Reports wake the control thread through `wake`.
    ///
    /// # Errors
    /// The operating system cannot create a thread.
    pub fn start(
        wake: Arc<OwnedFd>,
        asleep: Arc<SleepFlag>,
        map_arena: Arc<MapArena>,
        closer: Closer,
    ) -> std::io::Result<Helpers> {
        let reporter = Reporter::new(wake, asleep);
        let (orders, ordered) = mpsc::channel();
        let to_control = reporter.clone();
        let maker = std::thread::Builder::new()
            .name("siwd-memory".into())
            .spawn(move || make_memory(&ordered, &to_control, &*map_arena))?;
        Ok(Helpers {
            reporter,
            orders: Some(orders),
            maker: Some(maker),
            queues: DisposalQueues::default(),
            closer,
        })
    }

    /// Sends reports of further threads.
    pub fn reporter(&self) -> &Reporter {
        &self.reporter
    }

    /// Returns true if a report is queued.
    pub fn has_reports(&self) -> bool {
        self.reporter.has_reports()
    }

    /// Takes the next report.
    pub fn next_report(&self) -> Option<HelperReport> {
        self.reporter.next_report()
    }

    /// Orders an arena; the report carries the order's token.
    pub fn order_memory(&self, order: MemoryOrder) {
        if let Some(orders) = &self.orders {
            // The thread ends only when this sender is dropped, so the send succeeds.
            let _ = orders.send(order);
        }
    }

    /// Drops an object on another thread, then sends the report.
    pub fn dispose(&self, queue: DisposalQueue, what: Box<dyn Send>, report: Option<HelperReport>) {
        self.dispose_with_socket(queue, None, what, report);
    }

    /// As [`Self::dispose`], for an object with a socket whose close a client could delay: a duplicate.
    /// Without it, this user's disposals wait for the close.
    pub fn dispose_with_socket(
        &self,
        queue: DisposalQueue,
        socket: Option<OwnedFd>,
        what: Box<dyn Send>,
        report: Option<HelperReport>,
    ) {
        let mut queues = self.queues.lock();
        let disposal = queues.entry(queue).or_default();
        disposal.doomed.push_back(Doomed {
            what,
            socket,
            report,
        });
        if disposal.has_thread {
            return;
        }
        let (all, reporter) = (self.queues.clone(), self.reporter.clone());
        let closer = self.closer.clone();
        let started = std::thread::Builder::new()
            .name("siwd-disposal".into())
            .spawn(move || empty_queue(queue, &all, &reporter, &closer));
        disposal.has_thread = started.is_ok();
        if let Err(error) = started {
            // The next disposal in this queue tries again.
            tracing::warn!("cannot start a thread that frees client memory: {error}");
        }
    }

    /// Closes a descriptor of a user's client, which may be the last one of its file: freeing the pages
    /// of a large file in memory takes long, and the close of others as long as the client likes.
    pub fn close(&self, uid: u32, fd: OwnedFd) {
        let queue = match SharedMemory::is_memory_file(fd.as_fd()) {
            true => DisposalQueue::Memory(uid),
            false => DisposalQueue::Descriptors(uid),
        };
        match is_socket(&fd) {
            true => self.dispose_with_socket(queue, Some(fd), Box::new(()), None),
            false => self.dispose(queue, Box::new(fd), None),
        }
    }

    /// Closes a duplicate of a descriptor that a client sent. Duplicates of files in memory close at
    /// once.
    pub fn close_duplicate(&self, uid: u32, fd: OwnedFd) {
        if !SharedMemory::is_memory_file(fd.as_fd()) {
            self.close(uid, fd);
        }
    }

    /// Returns free heap to the operating system; [`HelperReport::HeapReturned`] follows. Returns false
    /// if there is no thread for it.
    pub fn return_heap(&self) -> bool {
        let reporter = self.reporter.clone();
        let started = std::thread::Builder::new()
            .name("siwd-heap".into())
            .spawn(move || {
                siw_heap::return_free_memory();
                reporter.send(HelperReport::HeapReturned);
            });
        started.is_ok()
    }

    /// Returns true if too many of the user's descriptors are still being closed:
    /// [`HelperReport::HasRoom`] follows.
    pub fn must_await_room(&self, uid: u32) -> bool {
        let mut queues = self.queues.lock();
        let queue = queues.get_mut(&DisposalQueue::Descriptors(uid));
        let crowded = queue.filter(|queue| queue.doomed.len() >= MOST_OF_USER);
        crowded.is_some_and(|queue| {
            // Without a thread the queue does not change.
            queue.is_awaited = queue.has_thread;
            queue.has_thread
        })
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        self.orders = None;
        // Wait for this thread: it maps memory in DPDK, which shuts down afterwards. Slow disposals
        // are left to the process exit.
        if let Some(maker) = self.maker.take() {
            let _ = maker.join();
        }
    }
}

/// Drops the objects of a queue until it is empty.
fn empty_queue(
    queue: DisposalQueue,
    queues: &DisposalQueues,
    reporter: &Reporter,
    closer: &Closer,
) {
    loop {
        let mut all = queues.lock();
        let Some(disposal) = all.get_mut(&queue) else {
            return;
        };
        let next = disposal.doomed.pop_front();
        let has_room = disposal.doomed.len() <= MOST_OF_USER / 2;
        let has_room = has_room && std::mem::take(&mut disposal.is_awaited);
        if next.is_none() {
            all.remove(&queue);
        }
        drop(all);
        if let DisposalQueue::Descriptors(uid) = queue
            && has_room
        {
            reporter.send(HelperReport::HasRoom { uid });
        }
        let Some(doomed) = next else {
            return;
        };
        let socket = doomed.socket.as_ref();
        let held = socket.and_then(|socket| closer.hold(socket.as_fd()));
        drop((doomed.what, doomed.socket));
        drop(held);
        if let Some(report) = doomed.report {
            reporter.send(report);
        }
    }
}

/// Allocates arenas, a part of each in turn, until the order channel is closed.
fn make_memory(ordered: &mpsc::Receiver<MemoryOrder>, reporter: &Reporter, map_arena: &MapArena) {
    struct NewArena {
        client: ClientId,
        token: CommandToken,
        len: usize,
        begun: std::io::Result<MemoryInMaking>,
    }
    let mut under_way: VecDeque<NewArena> = VecDeque::new();
    loop {
        let next = if under_way.is_empty() {
            ordered.recv().map_err(|_| mpsc::TryRecvError::Disconnected)
        } else {
            ordered.try_recv()
        };
        match next {
            Ok(order) => {
                let (client, token) = (order.client, order.token);
                match order.source {
                    MemorySource::New { len, pages } => under_way.push_back(NewArena {
                        client,
                        token,
                        len,
                        begun: begin_arena(len, pages),
                    }),
                    MemorySource::File(part) => reporter.send(HelperReport::MemoryMade {
                        client,
                        token,
                        made: part.map(client, map_arena),
                    }),
                }
            }
            Err(mpsc::TryRecvError::Empty) => {}
            Err(mpsc::TryRecvError::Disconnected) => return,
        }
        let Some(order) = under_way.pop_front() else {
            continue;
        };
        let made = order
            .begun
            .and_then(|mut memory| match memory.populate(BYTES_PER_TURN) {
                Ok(false) => Ok(Err(memory)),
                Ok(true) => memory.finish().map(Ok),
                // No hugepages are left.
                Err(_) if memory.is_huge() => Ok(Err(begin_arena(order.len, PageSize::Normal)?)),
                Err(error) => Err(error),
            });
        let made = match made {
            Ok(Err(memory)) => {
                under_way.push_back(NewArena {
                    begun: Ok(memory),
                    ..order
                });
                continue;
            }
            Ok(Ok(memory)) => memory
                .guard_for(order.client.fault_owner())
                .map_err(|error| format!("no shared memory: {error}"))
                .and_then(|memory| map_memory(memory, map_arena)),
            Err(error) => Err(format!("no shared memory: {error}")),
        };
        reporter.send(HelperReport::MemoryMade {
            client: order.client,
            token: order.token,
            made: made.map_err(|reason| Refusal::new(libc::ENOMEM, reason)),
        });
    }
}

fn begin_arena(len: usize, pages: PageSize) -> std::io::Result<MemoryInMaking> {
    SharedMemory::begin_memfd("siwd-arena", len, pages)
}

/// Maps memory for the NICs that read it.
pub(in crate::control) fn map_memory(
    memory: SharedMemory,
    map_arena: &MapArena,
) -> Result<MadeArena, String> {
    let region = Arc::new(memory);
    let external = map_arena(&region)?;
    Ok((region, external))
}
