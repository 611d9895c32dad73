//! What may take long, on threads of its own: making large memory, freeing it, and closing what a
//! client decides how long it takes to close. The control thread serves the others meanwhile.
//!
//! ```text
//! control thread -- MemoryTask ---> siwd-memory    fills pages, a part of each order in turn;
//!       |      |                                    gives free pages of the heap back
//!       |      `--- dispose() ----> siwd-disposal  one thread for each queue that has something
//!       `<-- HelperReport (queue, then the wake-up that workers use, too)
//! ```

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::queue::SegQueue;
use siw_shm::SharedMemory;
use siw_shm::doorbell::SleepFlag;
use siw_shm::shared_memory::{MemoryInMaking, PageSize};

use super::MapArena;
use super::quotas::{Account, Quota};
use crate::ids::{ClientId, CommandToken};

/// Memory longer than this is made and freed by helpers.
pub(super) const LONG_MEMORY: u64 = 16 << 20;
/// Bytes that are filled for one order before the next one has its turn.
const BYTES_PER_TURN: usize = 64 << 20;
/// Disposals in users' queues, above which no further client is accepted.
pub(super) const MOST_SLOW_DISPOSALS: usize = 1024;
/// From the end of a client to the return of free pages: one return serves all that end meanwhile.
const TRIM_DELAY: Duration = Duration::from_millis(100);

/// An arena that a client waits for.
pub(super) struct MemoryOrder {
    pub client: ClientId,
    pub token: CommandToken,
    pub len: usize,
    pub pages: PageSize,
}

/// What the thread that makes memory has to do.
enum MemoryTask {
    Make(MemoryOrder),
    /// Return free pages of the heap to the operating system, after [`TRIM_DELAY`].
    TrimHeap,
}

/// A new arena, and what makes it known to NICs that read it.
pub(super) type MadeArena = (Arc<SharedMemory>, Option<dpdk::ExternalRegion>);

/// What a helper has done.
pub(super) enum HelperReport {
    /// An order is done, or cannot be.
    MemoryMade {
        client: ClientId,
        token: CommandToken,
        made: Result<MadeArena, String>,
    },
    /// All that a client had is gone.
    ClientGone { account: Account },
    /// Something of a client that goes on is gone.
    Released {
        client: ClientId,
        token: CommandToken,
        amounts: Vec<(Quota, u64)>,
    },
}

/// Who waits for whom: within a queue one thing is disposed of after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum DisposalQueue {
    /// What takes the time that the operating system needs.
    Memory,
    /// What takes as long as a user wants: nobody else waits for it.
    User(u32),
}

/// Wakes the control thread after a report.
#[derive(Clone)]
struct Reporter {
    reports: Arc<SegQueue<HelperReport>>,
    wake: Arc<OwnedFd>,
    asleep: Arc<SleepFlag>,
}

impl Reporter {
    fn send(&self, report: HelperReport) {
        self.reports.push(report);
        if self.asleep.must_wake() {
            let _ = nix::unistd::write(&*self.wake, &1u64.to_ne_bytes());
        }
    }
}

type Doomed = (Box<dyn Send>, Option<HelperReport>);

/// What waits in one queue.
#[derive(Default)]
struct Disposal {
    doomed: VecDeque<Doomed>,
    has_thread: bool,
}

type DisposalQueues = Arc<Mutex<HashMap<DisposalQueue, Disposal>>>;

/// The helpers' threads, and what they have to do.
pub(super) struct Helpers {
    reporter: Reporter,
    tasks: Option<mpsc::Sender<MemoryTask>>,
    /// Whether a trim was asked for and is not done.
    trim_pending: Arc<AtomicBool>,
    maker: Option<JoinHandle<()>>,
    queues: DisposalQueues,
    slow: Arc<AtomicUsize>,
}

impl Helpers {
    /// Starts the thread that makes memory. Reports wake the control thread by `wake`.
    ///
    /// # Errors
    /// The operating system has no thread.
    pub fn start(
        wake: Arc<OwnedFd>,
        asleep: Arc<SleepFlag>,
        map_arena: Arc<MapArena>,
    ) -> std::io::Result<Helpers> {
        let reporter = Reporter {
            reports: Arc::default(),
            wake,
            asleep,
        };
        let (tasks, ordered) = mpsc::channel();
        let to_control = reporter.clone();
        let trim_pending = Arc::new(AtomicBool::new(false));
        let trim_done = trim_pending.clone();
        let maker = std::thread::Builder::new()
            .name("siwd-memory".into())
            .spawn(move || make_memory(&ordered, &trim_done, &to_control, &*map_arena))?;
        Ok(Helpers {
            reporter,
            tasks: Some(tasks),
            trim_pending,
            maker: Some(maker),
            queues: DisposalQueues::default(),
            slow: Arc::default(),
        })
    }

    /// Whether a helper has reported something.
    pub fn has_reports(&self) -> bool {
        !self.reporter.reports.is_empty()
    }

    /// Takes the next report.
    pub fn next_report(&self) -> Option<HelperReport> {
        self.reporter.reports.pop()
    }

    /// Has an arena made; the report names the order's token.
    pub fn order_memory(&self, order: MemoryOrder) {
        self.give(MemoryTask::Make(order));
    }

    /// Has free pages of the heap returned to the operating system soon: what clients leave between
    /// what others use would stay with the process otherwise.
    pub fn trim_heap_soon(&self) {
        if !self.trim_pending.swap(true, Ordering::Relaxed) {
            self.give(MemoryTask::TrimHeap);
        }
    }

    fn give(&self, task: MemoryTask) {
        if let Some(tasks) = &self.tasks {
            // The thread ends with this sender only.
            let _ = tasks.send(task);
        }
    }

    /// Drops something on another thread, and reports then.
    pub fn dispose(&self, queue: DisposalQueue, what: Box<dyn Send>, report: Option<HelperReport>) {
        if matches!(queue, DisposalQueue::User(_)) {
            self.slow.fetch_add(1, Ordering::Relaxed);
        }
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        let disposal = queues.entry(queue).or_default();
        disposal.doomed.push_back((what, report));
        if disposal.has_thread {
            return;
        }
        let (all, reporter, slow) = (
            self.queues.clone(),
            self.reporter.clone(),
            self.slow.clone(),
        );
        let started = std::thread::Builder::new()
            .name("siwd-disposal".into())
            .spawn(move || empty_queue(queue, &all, &reporter, &slow));
        disposal.has_thread = started.is_ok();
        if let Err(error) = started {
            // What comes next in this queue tries again.
            tracing::warn!("no thread to free what clients had: {error}");
        }
    }

    /// Closes a descriptor that a client sent.
    pub fn close_unknown(&self, queue: DisposalQueue, fd: OwnedFd) {
        if !SharedMemory::is_memory_file(fd.as_fd()) {
            self.dispose(queue, Box::new(fd), None);
        }
    }

    /// What waits in users' queues, or is being closed there.
    pub fn slow_disposals(&self) -> usize {
        self.slow.load(Ordering::Relaxed)
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        self.tasks = None;
        // Memory that it makes is known to DPDK, which ends after this. What is slow to close is
        // left to the end of the process.
        if let Some(maker) = self.maker.take() {
            let _ = maker.join();
        }
    }
}

/// Drops what is in a queue, until nothing is.
fn empty_queue(
    queue: DisposalQueue,
    queues: &DisposalQueues,
    reporter: &Reporter,
    slow: &AtomicUsize,
) {
    loop {
        let mut all = queues.lock().unwrap_or_else(PoisonError::into_inner);
        let next = all
            .get_mut(&queue)
            .and_then(|disposal| disposal.doomed.pop_front());
        let Some((what, report)) = next else {
            all.remove(&queue);
            return;
        };
        drop(all);
        drop(what);
        if matches!(queue, DisposalQueue::User(_)) {
            slow.fetch_sub(1, Ordering::Relaxed);
        }
        if let Some(report) = report {
            reporter.send(report);
        }
    }
}

/// Makes arenas, a part of each in turn, and trims the heap, until nobody can order any more.
fn make_memory(
    ordered: &mpsc::Receiver<MemoryTask>,
    trim_pending: &AtomicBool,
    reporter: &Reporter,
    map_arena: &MapArena,
) {
    let mut under_way: VecDeque<(MemoryOrder, std::io::Result<MemoryInMaking>)> = VecDeque::new();
    let mut trim_at: Option<Instant> = None;
    loop {
        let next = match (under_way.is_empty(), trim_at) {
            (true, None) => match ordered.recv() {
                Ok(task) => Some(task),
                Err(mpsc::RecvError) => return,
            },
            (is_idle, trim_at) => {
                let until_trim = trim_at.filter(|_| is_idle).map_or(Duration::ZERO, |at| {
                    at.saturating_duration_since(Instant::now())
                });
                match ordered.recv_timeout(until_trim) {
                    Ok(task) => Some(task),
                    Err(mpsc::RecvTimeoutError::Timeout) => None,
                    Err(mpsc::RecvTimeoutError::Disconnected) => return,
                }
            }
        };
        match next {
            Some(MemoryTask::Make(order)) => {
                let begun = begin_arena(order.len, order.pages);
                under_way.push_back((order, begun));
            }
            Some(MemoryTask::TrimHeap) => trim_at = Some(Instant::now() + TRIM_DELAY),
            None => {}
        }
        if trim_at.is_some_and(|at| at <= Instant::now()) {
            trim_at = None;
            // Before the trim: what ends during it asks again.
            trim_pending.store(false, Ordering::Relaxed);
            dpdk::trim_heap();
        }
        let Some((order, begun)) = under_way.pop_front() else {
            continue;
        };
        let made = begun.and_then(|mut memory| match memory.populate(BYTES_PER_TURN) {
            Ok(false) => Ok(Err(memory)),
            Ok(true) => memory.finish().map(Ok),
            // The hugepages are used up.
            Err(_) if memory.is_huge() => Ok(Err(begin_arena(order.len, PageSize::Normal)?)),
            Err(error) => Err(error),
        });
        let made = match made {
            Ok(Err(memory)) => {
                under_way.push_back((order, Ok(memory)));
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
            made,
        });
    }
}

fn begin_arena(len: usize, pages: PageSize) -> std::io::Result<MemoryInMaking> {
    SharedMemory::begin_memfd("siwd-arena", len, pages)
}

/// Makes memory known to the NICs that read it.
pub(super) fn map_memory(memory: SharedMemory, map_arena: &MapArena) -> Result<MadeArena, String> {
    let region = Arc::new(memory);
    let external = map_arena(&region)?;
    Ok((region, external))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::fd::OwnedFd;

    fn anonymous_kib() -> u64 {
        let rollup = fs::read_to_string("/proc/self/smaps_rollup").expect("smaps_rollup");
        let line = rollup
            .lines()
            .find_map(|line| line.strip_prefix("Anonymous:"));
        let number = line.and_then(|line| line.split_whitespace().next());
        number.expect("Anonymous").parse().expect("a number")
    }

    #[test]
    fn free_pages_in_the_middle_of_the_heap_are_returned() {
        if !cfg!(target_env = "gnu") || std::env::var_os("ASAN_OPTIONS").is_some() {
            println!("skipped: only glibc's own heap is trimmed");
            return;
        }
        let wake: OwnedFd = fs::File::open("/dev/null").expect("/dev/null").into();
        let map_arena: Arc<MapArena> = Arc::new(|_| Ok(None));
        let asleep = siw_shm::doorbell::WorkerPage::create_sealed(1)
            .map(|page| page.sleep_flag(0).expect("a worker"))
            .expect("shared memory");
        let helpers =
            Helpers::start(Arc::new(wake), Arc::new(asleep), map_arena).expect("a thread");
        // Blocks too short for mappings of their own; one of each MiB stays, between the free ones.
        let mut blocks: Vec<Vec<u8>> = (0..1024).map(|_| vec![1; 64 << 10]).collect();
        let mut place = 0;
        blocks.retain(|_| {
            place += 1;
            place % 16 == 0
        });
        let before = anonymous_kib();
        helpers.trim_heap_soon();
        let deadline = Instant::now() + Duration::from_secs(20);
        while anonymous_kib() + (32 << 10) > before {
            assert!(
                Instant::now() < deadline,
                "{before} KiB before, {} KiB after",
                anonymous_kib()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(blocks.len(), 64);
    }
}
