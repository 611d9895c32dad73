//! repoll_create(3), repoll_ctl(3), repoll_wait(3): epoll(7) with rsockets.
//!
//! The program's kernel instance holds the kernel's descriptors and one more: an inner instance of
//! this library, with the descriptors of the rsockets. An rsocket whose descriptor is readable
//! becomes a candidate. A candidate is checked; if it is ready it is reported, otherwise it is
//! armed and not checked again until its descriptor is readable.
//!
//! The kernel shows the descriptor of an instance as readable while it has candidates that are not
//! ready, and as quiet while it has ready ones. Calls that watch such a descriptor therefore ask
//! [`Instance::has_events`]: poll(2) and select(2) directly, and an instance that it was added to for
//! its [`NestedInstance`].

use super::socket::{Rsocket, to_timespec};
use super::table;
use super::watchers::Watcher;
use crate::mark::Mark;
use crate::per_process::PerProcess;
use crate::waiting::{Call, Held};
use rustix::event::{EventfdFlags, PollFd, PollFlags, epoll, eventfd};
use rustix::fd::{AsRawFd, OwnedFd};
use siw::{KeptDescriptor, ProcessMutex};
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError, RwLock, Weak};
use std::time::Duration;

/// Event data of the eventfd; no rsocket descriptor has this number.
const WAKE: u64 = u64::MAX;
/// Events taken from the kernel at once.
const BATCH: usize = 64;

/// Looks at the events of an instance before it counts as quiet.
const LOOKS: u32 = 2;

/// An epoll instance with rsockets.
pub struct Instance {
    /// Mark of the program's kernel instance.
    mark: Mark,
    /// Kernel instance with the descriptors of the rsockets.
    inner: KeptDescriptor,
    /// Wakes a waiting thread for a new candidate.
    wake: KeptDescriptor,
    /// `wake` has been written and not been read since; programs change what they watch many times between
    /// two waits.
    is_woken: AtomicBool,
    watches: ProcessMutex<Watches>,
    /// There are some in `nested`.
    is_outer: AtomicBool,
    nested: ProcessMutex<Vec<NestedInstance>>,
}

/// An epoll instance that was added to another one. The kernel's instance holds it with `token` as its
/// event data.
struct NestedInstance {
    descriptor: c_int,
    events: u32,
    data: u64,
    /// Its address is event data that the program cannot use.
    token: Box<u8>,
}

impl NestedInstance {
    fn token(&self) -> u64 {
        &raw const *self.token as u64
    }

    /// The event for the program. With EPOLLONESHOT there is no other before EPOLL_CTL_MOD.
    fn report(&mut self, number: c_int) -> libc::epoll_event {
        if self.events & libc::EPOLLONESHOT as u32 != 0 {
            self.events = 0;
            let _ = control_kernel(
                number,
                libc::EPOLL_CTL_MOD,
                self.descriptor,
                0,
                self.token(),
            );
        }
        let events = libc::EPOLLIN as u32;
        libc::epoll_event {
            events,
            u64: self.data,
        }
    }

    /// Checks for events of the nested instance.
    fn is_ready(&self, own: usize) -> bool {
        match find_instance(self.descriptor) {
            Some(instance) => instance.has_events(self.descriptor, own),
            None => is_readable(self.descriptor),
        }
    }
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
        self.wake();
    }

    fn forget(&self, descriptor: c_int) {
        self.lock().all.remove(&descriptor);
    }
}

impl Instance {
    fn lock(&self) -> MutexGuard<'_, Watches> {
        self.watches.lock_or_end_call()
    }

    fn lock_nested(&self) -> MutexGuard<'_, Vec<NestedInstance>> {
        self.nested.lock_or_end_call()
    }

    /// Has a waiting thread check the candidates, to which the caller has added its own.
    fn wake(&self) {
        if self.is_woken.swap(true, Ordering::AcqRel) {
            return;
        }
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
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
            is_woken: AtomicBool::new(false),
            watches: ProcessMutex::default(),
            is_outer: AtomicBool::new(false),
            nested: ProcessMutex::default(),
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
        let count = check_kernel(self.inner.as_raw_fd(), &mut events, std::ptr::null());
        for event in &events[..count.unwrap_or(0)] {
            let number = event.u64;
            if number == WAKE {
                let mut buffer = [0; 8];
                let _ = rustix::io::read(&self.wake, &mut buffer);
                // After the read, so that `wake` holds what it says; before this thread, or its next call,
                // looks at the candidates.
                self.is_woken.swap(false, Ordering::AcqRel);
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

    /// Checks whether epoll_wait(2) would report an event, and leaves it for that call. If there is
    /// none, every later one makes the descriptor readable. `own`: [`SLEEPERS`] of this thread.
    pub fn has_events(&self, number: c_int, own: usize) -> bool {
        IS_WATCHED.store(true, Ordering::Relaxed);
        // An rsocket may have had an event since the check. One that is not asked for stays.
        for _ in 0..LOOKS {
            self.take_inner_events();
            if self.has_ready_candidate(own) || self.has_ready_nested(own) {
                return true;
            }
            if !is_readable(number) {
                return false;
            }
            if !is_readable(self.inner.as_raw_fd()) {
                // By one of the kernel's descriptors.
                return true;
            }
        }
        false
    }

    fn has_ready_nested(&self, own: usize) -> bool {
        let nested = self.lock_nested();
        nested.iter().any(|nested| nested.is_ready(own))
    }

    /// Checks candidates until one is ready, which stays a candidate.
    fn has_ready_candidate(&self, own: usize) -> bool {
        let mut candidates = std::mem::take(&mut self.lock().candidates);
        let mut is_ready = false;
        candidates.retain(|candidate| {
            if is_ready {
                return true;
            }
            let Some(watch) = self.begin_check(*candidate) else {
                return false;
            };
            is_ready = watch.check_readiness() != 0;
            is_ready && self.keep_candidate(*candidate)
        });
        self.lock().candidates.append(&mut candidates);
        if is_ready && has_sleepers(own) {
            // One may have looked for the candidates meanwhile. Without one there is no new edge for an
            // instance that watches this one with EPOLLET.
            self.wake();
        }
        is_ready
    }

    /// Keeps a checked rsocket in the caller's list, unless it is in the other one already.
    fn keep_candidate(&self, candidate: Candidate) -> bool {
        let mut watches = self.lock();
        let Some(watch) = watches.find(candidate) else {
            return false;
        };
        !std::mem::replace(&mut watch.is_candidate, true)
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

/// epoll_pwait(2) without waiting, by system call number: a preloaded library may define a function of that
/// name.
fn check_kernel(
    instance: c_int,
    events: &mut [libc::epoll_event],
    mask: *const libc::sigset_t,
) -> Result<usize, c_int> {
    // SAFETY: a list with its length; a mask or NULL, with the kernel's mask size.
    let count = unsafe {
        let (list, count) = (events.as_mut_ptr(), events.len());
        let number = libc::SYS_epoll_pwait;
        libc::syscall(number, instance, list, count, 0, mask, size_of::<u64>())
    };
    usize::try_from(count).map_err(|_| last_errno())
}

/// The errno of a failed system call.
fn last_errno() -> c_int {
    let error = std::io::Error::last_os_error();
    error.raw_os_error().unwrap_or(libc::EINVAL)
}

/// A call has asked for the events of an instance without taking them.
static IS_WATCHED: AtomicBool = AtomicBool::new(false);
/// Threads that wait for instances, once one is watched.
static SLEEPERS: AtomicUsize = AtomicUsize::new(0);

/// A thread that waits, counted in [`SLEEPERS`] until it is dropped.
struct Sleeper;

impl Sleeper {
    /// Counts this thread before it looks for candidates: another one that has them meanwhile puts them
    /// back before it looks for sleepers.
    fn new() -> Option<Sleeper> {
        IS_WATCHED.load(Ordering::Relaxed).then(|| {
            SLEEPERS.fetch_add(1, Ordering::SeqCst);
            Sleeper
        })
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        SLEEPERS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Checks for sleepers besides `own` of this thread.
fn has_sleepers(own: usize) -> bool {
    SLEEPERS.load(Ordering::SeqCst) > own
}

/// Checks whether the kernel shows a descriptor as readable.
fn is_readable(descriptor: c_int) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(
        table::borrow(descriptor),
        PollFlags::IN,
    )];
    rustix::event::poll(&mut fds, Some(&to_timespec(Duration::ZERO))).is_ok_and(|ready| ready > 0)
}

/// Checks whether a descriptor is an epoll instance.
fn is_epoll(descriptor: c_int) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{descriptor}"));
    link.is_ok_and(|link| link.as_os_str() == "anon_inode:[eventpoll]")
}

/// Finds the instance with rsockets of a descriptor.
pub fn find_instance(number: c_int) -> Option<Arc<Instance>> {
    let found = {
        let instances = INSTANCES.find()?.read();
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
    let Some(socket) = table::find(descriptor) else {
        return control_nested(number, operation, descriptor, event);
    };
    // The descriptor of an rsocket is an epoll instance of this library.
    if table::find(number).is_some() {
        return Some(Err(libc::EINVAL));
    }
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

/// epoll_ctl(2) for an epoll instance in another one; None if the descriptor is not one, or was added
/// to the kernel's instance only.
fn control_nested(
    number: c_int,
    operation: c_int,
    descriptor: c_int,
    event: Option<AskedEvent>,
) -> Option<Result<(), c_int>> {
    let outer = if operation == libc::EPOLL_CTL_ADD {
        if !is_epoll(descriptor) || !is_epoll(number) {
            return None;
        }
        match find_or_add_instance(number) {
            Ok(outer) => outer,
            Err(errno) => return Some(Err(errno)),
        }
    } else {
        find_instance(number).filter(|outer| outer.is_outer.load(Ordering::Acquire))?
    };
    outer.control_nested(number, operation, descriptor, event)
}

/// epoll_ctl(2) of the kernel, by system call number.
fn control_kernel(
    number: c_int,
    operation: c_int,
    descriptor: c_int,
    events: u32,
    token: u64,
) -> Result<(), c_int> {
    let mut event = libc::epoll_event { events, u64: token };
    let event = &raw mut event;
    // SAFETY: an event.
    let done = unsafe { libc::syscall(libc::SYS_epoll_ctl, number, operation, descriptor, event) };
    if done == 0 { Ok(()) } else { Err(last_errno()) }
}

impl Instance {
    /// None if it has no such instance.
    fn control_nested(
        &self,
        number: c_int,
        operation: c_int,
        descriptor: c_int,
        event: Option<AskedEvent>,
    ) -> Option<Result<(), c_int>> {
        let mut nested = self.lock_nested();
        let found = nested
            .iter()
            .position(|nested| nested.descriptor == descriptor);
        if operation == libc::EPOLL_CTL_DEL {
            let removed = nested.swap_remove(found?);
            let token = removed.token();
            return Some(control_kernel(number, operation, descriptor, 0, token));
        }
        let is_new = operation == libc::EPOLL_CTL_ADD;
        if found.is_none() && !is_new {
            return None;
        }
        let Some(event) = event else {
            return Some(Err(libc::EFAULT));
        };
        let mut wanted = NestedInstance {
            descriptor,
            events: event.events,
            data: event.data,
            token: Box::new(0),
        };
        if let Some(found) = found.filter(|_| !is_new) {
            std::mem::swap(&mut wanted.token, &mut nested[found].token);
        }
        let done = control_kernel(number, operation, descriptor, event.events, wanted.token());
        match (done, found) {
            (Ok(()), Some(found)) => nested[found] = wanted,
            (Ok(()), None) => nested.push(wanted),
            (Err(errno), Some(found)) if !is_new => {
                std::mem::swap(&mut wanted.token, &mut nested[found].token);
                return Some(Err(errno));
            }
            (Err(errno), _) => return Some(Err(errno)),
        }
        self.is_outer.store(true, Ordering::Release);
        Some(Ok(()))
    }

    /// Reports the ready instances among the nested ones that are not edge-triggered, and returns their
    /// number.
    fn report_nested(&self, number: c_int, events: &mut [libc::epoll_event], own: usize) -> usize {
        if !self.is_outer.load(Ordering::Acquire) {
            return 0;
        }
        let mut count = 0;
        for nested in self.lock_nested().iter_mut() {
            let is_asked = nested.events & libc::EPOLLIN as u32 != 0;
            let is_edge = nested.events & libc::EPOLLET as u32 != 0;
            if count < events.len() && is_asked && !is_edge && nested.is_ready(own) {
                events[count] = nested.report(number);
                count += 1;
            }
        }
        count
    }

    /// Replaces the kernel's reports of nested instances by those for the program; returns the number
    /// of events left. With `is_first`, level-triggered ones are reported too.
    fn keep_nested(
        &self,
        number: c_int,
        events: &mut [libc::epoll_event],
        is_first: bool,
        own: usize,
    ) -> usize {
        if !self.is_outer.load(Ordering::Acquire) {
            return events.len();
        }
        let mut nested = self.lock_nested();
        let mut kept = 0;
        for at in 0..events.len() {
            let mut event = events[at];
            if let Some(nested) = nested.iter_mut().find(|nested| nested.token() == event.u64) {
                let is_edge = nested.events & libc::EPOLLET as u32 != 0;
                if !(is_first || is_edge) || !nested.is_ready(own) {
                    continue;
                }
                event = nested.report(number);
            }
            events[kept] = event;
            kept += 1;
        }
        kept
    }
}

/// Objects of a thread that waits for an instance.
struct EpollWait {
    instance: Arc<Instance>,
    sleeper: Option<Sleeper>,
}

/// epoll_wait(2) of an instance that may have rsockets.
///
/// # Errors
/// EAGAIN if the call has to wait.
pub fn wait_for_events(
    call: &mut Call,
    number: c_int,
    events: &mut [libc::epoll_event],
    timeout: Option<Duration>,
    mask: *const libc::sigset_t,
) -> Result<usize, c_int> {
    let start = call.start();
    let outcome = call.take_outcome();
    if let Some(EpollWait { instance, sleeper }) = call.take_other() {
        let own = usize::from(sleeper.is_some());
        let more = outcome.unwrap_or(Ok(0))?;
        let more = keep_own(&instance, &mut events[..more]);
        let count = instance.keep_nested(number, &mut events[..more], true, own);
        if count > 0 {
            return Ok(count);
        }
    } else if let Some(outcome) = outcome {
        return outcome;
    }
    let Some(instance) = find_instance(number) else {
        let timeout = to_milliseconds(timeout);
        call.wait_for_epoll(number, events, timeout, mask, Held::Other(Box::new(())));
        return Err(libc::EAGAIN);
    };
    let may_block = timeout.is_none_or(|timeout| !timeout.is_zero());
    let sleeper = may_block.then(Sleeper::new).flatten();
    let own = usize::from(sleeper.is_some());
    let mut count = instance.report_ready(events);
    count += instance.report_nested(number, &mut events[count..], own);
    let left = timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
    let is_last = left.is_some_and(|left| left.is_zero());
    if count == 0 && !is_last {
        let held = Held::Other(Box::new(EpollWait { instance, sleeper }));
        call.wait_for_epoll(number, events, to_milliseconds(left), mask, held);
        return Err(libc::EAGAIN);
    }
    let is_first = count == 0;
    let room = &mut events[count..];
    if !room.is_empty() {
        let more = check_kernel(number, room, mask)?;
        let more = keep_own(&instance, &mut room[..more]);
        count += instance.keep_nested(number, &mut room[..more], is_first, own);
    }
    if count > 0 {
        return Ok(count);
    }
    Ok(instance.report_ready(events))
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
