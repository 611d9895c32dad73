//! repoll_create(3), repoll_ctl(3), repoll_wait(3): epoll(7) with rsockets.
//!
//! The program's kernel instance holds the kernel's descriptors and one more: an inner instance of
//! this library, with the descriptors of the rsockets. An rsocket whose descriptor is readable
//! becomes a candidate. A candidate is checked; if it is ready it is reported, otherwise it is
//! armed and not checked again until its descriptor is readable.

use super::socket::Rsocket;
use super::table;
use super::watchers::Watcher;
use crate::mark::Mark;
use crate::per_process::PerProcess;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fd::{AsRawFd, OwnedFd};
use siw::{KeptDescriptor, ProcessMutex};
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Arc, MutexGuard, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

/// Event data of the eventfd; no rsocket descriptor has this number.
const WAKE: u64 = u64::MAX;
/// Events taken from the kernel at once.
const BATCH: usize = 64;

/// An epoll instance with rsockets.
pub struct Instance {
    /// Mark of the program's kernel instance.
    mark: Mark,
    /// Kernel instance with the descriptors of the rsockets.
    inner: KeptDescriptor,
    /// Wakes a waiting thread for a new candidate.
    wake: KeptDescriptor,
    watches: ProcessMutex<Watches>,
}

#[derive(Default)]
struct Watches {
    all: HashMap<c_int, Watch>,
    /// Rsockets that may be ready, each once. The number of a descriptor that was removed, and of one
    /// that was closed, may belong to another watch.
    candidates: Vec<Candidate>,
    last_id: u64,
}

/// A descriptor, and the watch that is meant.
#[derive(Clone, Copy)]
struct Candidate {
    descriptor: c_int,
    watch: u64,
}

#[derive(Clone)]
struct Watch {
    /// Never reused.
    id: u64,
    socket: Arc<Rsocket>,
    events: u32,
    data: u64,
    is_candidate: bool,
}

type Instances = HashMap<c_int, Arc<Instance>>;

static INSTANCES: PerProcess<RwLock<Instances>> = PerProcess::new();

fn errno_of(error: rustix::io::Errno) -> c_int {
    error.raw_os_error()
}

/// Keeps a descriptor at a number that the program does not use.
fn keep(descriptor: OwnedFd) -> Result<KeptDescriptor, c_int> {
    let kept = KeptDescriptor::at_high_number(descriptor);
    kept.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
}

impl Watches {
    /// The watch that a candidate means, unless it was removed.
    fn find(&mut self, candidate: Candidate) -> Option<&mut Watch> {
        let watch = self.all.get_mut(&candidate.descriptor)?;
        (watch.id == candidate.watch).then_some(watch)
    }
}

impl Watcher for Instance {
    fn wake_for(&self, descriptor: c_int) {
        self.add_candidate(descriptor);
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn forget(&self, descriptor: c_int) {
        self.lock().all.remove(&descriptor);
    }
}

impl Instance {
    fn lock(&self) -> MutexGuard<'_, Watches> {
        self.watches.lock_or_end_call()
    }

    /// Creates the inner instance and adds it to the kernel's instance `outer`.
    fn new(outer: c_int) -> Result<Arc<Instance>, c_int> {
        let inner = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(errno_of)?;
        let inner = keep(inner)?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = keep(eventfd(0, flags).map_err(errno_of)?)?;
        let data = epoll::EventData::new_u64(WAKE);
        epoll::add(&inner, &wake, data, epoll::EventFlags::IN).map_err(errno_of)?;
        // A duplicate of the descriptor may have an instance of its own.
        let mark = Mark::of(outer).unwrap_or_else(Mark::next);
        mark.set(outer);
        let instance = Arc::new(Instance {
            mark,
            inner,
            wake,
            watches: ProcessMutex::default(),
        });
        let data = epoll::EventData::new_u64(instance.token());
        let outer = table::borrow(outer);
        epoll::add(outer, &instance.inner, data, epoll::EventFlags::IN).map_err(errno_of)?;
        Ok(instance)
    }

    /// Event data of the inner instance: an address that event data of the program cannot equal.
    fn token(self: &Arc<Self>) -> u64 {
        Arc::as_ptr(self) as u64
    }

    fn as_watcher(self: &Arc<Self>) -> Weak<dyn Watcher> {
        let watcher: Weak<Instance> = Arc::downgrade(self);
        watcher
    }

    fn add_candidate(&self, descriptor: c_int) {
        let mut watches = self.lock();
        let Some(watch) = watches.all.get_mut(&descriptor) else {
            return;
        };
        if !watch.is_candidate {
            watch.is_candidate = true;
            let candidate = Candidate {
                descriptor,
                watch: watch.id,
            };
            watches.candidates.push(candidate);
        }
    }

    fn add(
        self: &Arc<Self>,
        descriptor: c_int,
        socket: Arc<Rsocket>,
        event: AskedEvent,
    ) -> Result<(), c_int> {
        if self.lock().all.contains_key(&descriptor) {
            return Err(libc::EEXIST);
        }
        let data = epoll::EventData::new_u64(descriptor as u64);
        let fd = table::borrow(descriptor);
        epoll::add(&self.inner, fd, data, epoll::EventFlags::IN).map_err(errno_of)?;
        socket.watchers.add(descriptor, self.as_watcher());
        let mut watches = self.lock();
        watches.last_id += 1;
        let watch = Watch {
            id: watches.last_id,
            socket,
            events: event.events,
            data: event.data,
            is_candidate: false,
        };
        watches.all.insert(descriptor, watch);
        drop(watches);
        self.wake_for(descriptor);
        Ok(())
    }

    fn modify(&self, descriptor: c_int, event: AskedEvent) -> Result<(), c_int> {
        let mut watches = self.lock();
        let watch = watches.all.get_mut(&descriptor).ok_or(libc::ENOENT)?;
        (watch.events, watch.data) = (event.events, event.data);
        drop(watches);
        self.wake_for(descriptor);
        Ok(())
    }

    fn remove(self: &Arc<Self>, descriptor: c_int) -> Result<(), c_int> {
        let watch = self.lock().all.remove(&descriptor).ok_or(libc::ENOENT)?;
        let watchers = &watch.socket.watchers;
        watchers.remove(descriptor, &self.as_watcher());
        epoll::delete(&self.inner, table::borrow(descriptor)).map_err(errno_of)
    }

    /// Makes rsockets with readable descriptors candidates.
    fn take_inner_events(&self) {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; BATCH];
        let count = wait_kernel(self.inner.as_raw_fd(), &mut events, 0, std::ptr::null());
        for event in &events[..count.unwrap_or(0)] {
            let number = event.u64;
            if number == WAKE {
                let mut buffer = [0; 8];
                let _ = rustix::io::read(&self.wake, &mut buffer);
                continue;
            }
            let descriptor = number as c_int;
            let socket = {
                let watches = self.lock();
                watches
                    .all
                    .get(&descriptor)
                    .map(|watch| watch.socket.clone())
            };
            if let Some(socket) = socket {
                socket.take_events_of_watcher();
                self.add_candidate(descriptor);
            }
        }
    }

    /// Reports the ready candidates and returns their number.
    fn report_ready(&self, events: &mut [libc::epoll_event]) -> usize {
        let mut candidates = std::mem::take(&mut self.lock().candidates);
        let mut count = 0;
        candidates.retain(|candidate| {
            if count == events.len() {
                return true;
            }
            let Some(watch) = self.begin_check(*candidate) else {
                return false;
            };
            let ready = watch.check_readiness();
            if ready != 0 {
                events[count] = libc::epoll_event {
                    events: ready,
                    u64: watch.data,
                };
                count += 1;
            }
            self.end_check(*candidate, &watch, ready)
        });
        // Checked candidates move to the end, so that every candidate gets its turn.
        let kept = candidates.len().min(count);
        candidates.rotate_left(kept);
        self.lock().candidates.append(&mut candidates);
        count
    }

    /// Returns the watch to check. The check itself runs without the lock, because threads that
    /// hold the lock of an rsocket may wait for this one.
    fn begin_check(&self, candidate: Candidate) -> Option<Watch> {
        let mut watches = self.lock();
        let watch = watches.find(candidate)?;
        watch.is_candidate = false;
        Some(watch.clone())
    }

    /// Ends a check; returns whether the rsocket stays a candidate in the caller's list.
    fn end_check(&self, candidate: Candidate, checked: &Watch, ready: u32) -> bool {
        if ready == 0 {
            return false;
        }
        let mut watches = self.lock();
        let Some(watch) = watches.find(candidate) else {
            return false;
        };
        if checked.events & libc::EPOLLONESHOT as u32 != 0 {
            watch.events = 0;
            return false;
        }
        // It may have become a candidate again meanwhile, in the other list.
        let stays = checked.events & libc::EPOLLET as u32 == 0 && !watch.is_candidate;
        watch.is_candidate |= stays;
        stays
    }
}

impl Watch {
    /// Returns the events to report. If there are none, or with EPOLLET, it arms the next event.
    fn check_readiness(&self) -> u32 {
        let asked = self.events | (libc::EPOLLERR | libc::EPOLLHUP) as u32;
        if self.events & !(libc::EPOLLET | libc::EPOLLONESHOT) as u32 == 0 {
            return 0;
        }
        // The event bits of epoll(7) are those of poll(2).
        let is_edge = self.events & libc::EPOLLET as u32 != 0;
        let mut ready = 0;
        if !is_edge {
            ready = self.socket.readiness() as u16 as u32 & asked;
        }
        if ready == 0 {
            ready = self.socket.armed_readiness() as u16 as u32 & asked;
        }
        ready
    }
}

/// epoll_pwait(2) by system call number: a preloaded library may define a function of that name.
fn wait_kernel(
    instance: c_int,
    events: &mut [libc::epoll_event],
    timeout_ms: c_int,
    mask: *const libc::sigset_t,
) -> Result<usize, c_int> {
    // SAFETY: a list with its length; a mask or NULL, with the kernel's mask size.
    let count = unsafe {
        let (list, count) = (events.as_mut_ptr(), events.len());
        let number = libc::SYS_epoll_pwait;
        libc::syscall(
            number,
            instance,
            list,
            count,
            timeout_ms,
            mask,
            size_of::<u64>(),
        )
    };
    usize::try_from(count).map_err(|_| {
        let error = std::io::Error::last_os_error();
        error.raw_os_error().unwrap_or(libc::EINVAL)
    })
}

fn find_instance(number: c_int) -> Option<Arc<Instance>> {
    let found = {
        let instances = INSTANCES.get().read();
        let instances = instances.unwrap_or_else(PoisonError::into_inner);
        instances.get(&number)?.clone()
    };
    if !table::checks_marks() || Mark::of(number) == Some(found.mark) {
        return Some(found);
    }
    // The program has closed the instance without this library.
    let mut instances = INSTANCES
        .get()
        .write()
        .unwrap_or_else(PoisonError::into_inner);
    let is_same = |kept: &Arc<Instance>| Arc::ptr_eq(kept, &found);
    if instances.get(&number).is_some_and(is_same) {
        instances.remove(&number);
    }
    drop(instances);
    None
}

fn find_or_add_instance(number: c_int) -> Result<Arc<Instance>, c_int> {
    if let Some(found) = find_instance(number) {
        return Ok(found);
    }
    // Without the lock: a preloaded close(2) calls back into this table.
    let instance = Instance::new(number)?;
    let mut instances = INSTANCES
        .get()
        .write()
        .unwrap_or_else(PoisonError::into_inner);
    let stale = instances.insert(number, instance.clone());
    drop(instances);
    drop(stale);
    Ok(instance)
}

/// Called when the program closes an instance.
pub fn forget_instance(number: c_int) -> bool {
    if find_instance(number).is_none() {
        return false;
    }
    let mut instances = INSTANCES
        .get()
        .write()
        .unwrap_or_else(PoisonError::into_inner);
    let removed = instances.remove(&number);
    drop(instances);
    // Dropped without the lock: a preloaded close(2) calls back into this table.
    removed.is_some()
}

/// Events that a program requests for a descriptor.
#[derive(Clone, Copy)]
pub struct AskedEvent {
    pub events: u32,
    pub data: u64,
}

/// epoll_ctl(2) for rsockets; None if the descriptor is not an rsocket.
pub fn control_instance(
    number: c_int,
    operation: c_int,
    descriptor: c_int,
    event: Option<AskedEvent>,
) -> Option<Result<(), c_int>> {
    let socket = table::find(descriptor)?;
    let event = event.ok_or(libc::EFAULT);
    Some(match operation {
        libc::EPOLL_CTL_ADD => {
            event.and_then(|event| find_or_add_instance(number)?.add(descriptor, socket, event))
        }
        libc::EPOLL_CTL_MOD => event.and_then(|event| {
            let instance = find_instance(number).ok_or(libc::ENOENT)?;
            instance.modify(descriptor, event)
        }),
        libc::EPOLL_CTL_DEL => find_instance(number)
            .ok_or(libc::ENOENT)
            .and_then(|instance| instance.remove(descriptor)),
        _ => Err(libc::EINVAL),
    })
}

/// epoll_wait(2) of an instance that may have rsockets.
pub fn wait_for_events(
    number: c_int,
    events: &mut [libc::epoll_event],
    timeout: Option<Duration>,
    mask: *const libc::sigset_t,
) -> Result<usize, c_int> {
    let Some(instance) = find_instance(number) else {
        return wait_kernel(number, events, to_milliseconds(timeout), mask);
    };
    let start = Instant::now();
    loop {
        let mut count = instance.report_ready(events);
        let left = timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
        let is_last = count > 0 || left.is_some_and(|left| left.is_zero());
        let room = &mut events[count..];
        if !room.is_empty() {
            let patience = if is_last { 0 } else { to_milliseconds(left) };
            let more = wait_kernel(number, room, patience, mask)?;
            count += keep_own(&instance, &mut room[..more]);
        }
        if count > 0 {
            return Ok(count);
        }
        if is_last {
            return Ok(instance.report_ready(events));
        }
    }
}

/// Removes the report of the inner instance from the kernel's events and returns the number left.
fn keep_own(instance: &Arc<Instance>, events: &mut [libc::epoll_event]) -> usize {
    let token = instance.token();
    let Some(at) = events.iter().position(|event| event.u64 == token) else {
        return events.len();
    };
    instance.take_inner_events();
    events.copy_within(at + 1.., at);
    events.len() - 1
}

/// Rounds up, so that callers do not spin through the last millisecond.
fn to_milliseconds(timeout: Option<Duration>) -> c_int {
    timeout.map_or(-1, |timeout| {
        c_int::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX)
    })
}

/// repoll_create(3)
pub fn create_instance(flags: c_int) -> Result<OwnedFd, c_int> {
    let mut wanted = epoll::CreateFlags::empty();
    if flags & libc::EPOLL_CLOEXEC != 0 {
        wanted |= epoll::CreateFlags::CLOEXEC;
    }
    epoll::create(wanted).map_err(errno_of)
}
