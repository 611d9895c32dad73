//! rpoll(3) and rselect(3): lists that mix rsockets and other descriptors.

use super::epoll::{Instance, find_instance};
use super::socket::{CALLS_BEFORE_YIELD, Rsocket};
use super::table;
use crate::waiting::{Call, Held};
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Time spent polling the rsockets before sleeping.
const SPIN: Duration = Duration::from_micros(10);

/// Events that are reported without being requested.
const UNASKED: i16 = libc::POLLERR | libc::POLLHUP;

/// Yields the core at times, as [`RsocketState::try_later`](super::socket::RsocketState::try_later)
/// does, for programs that poll repeatedly with a timeout of 0.
fn yield_at_times() {
    static EMPTY_CALLS: AtomicU32 = AtomicU32::new(0);
    let calls = EMPTY_CALLS.fetch_add(1, Ordering::Relaxed);
    if calls.is_multiple_of(CALLS_BEFORE_YIELD) {
        std::thread::yield_now();
    }
}

/// The errno of a failed system call.
fn last_errno() -> c_int {
    let error = std::io::Error::last_os_error();
    error.raw_os_error().unwrap_or(libc::EINVAL)
}

/// ppoll(2) without waiting, by system call number: a preloaded library may define a function of that name.
fn poll_kernel(fds: &mut [libc::pollfd], mask: *const libc::sigset_t) -> Result<usize, c_int> {
    let mut zero = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a list with its length; a time; a mask or NULL, with the kernel's mask size.
    let ready = unsafe {
        let (list, count, zero) = (fds.as_mut_ptr(), fds.len(), &raw mut zero);
        libc::syscall(libc::SYS_ppoll, list, count, zero, mask, size_of::<u64>())
    };
    usize::try_from(ready).map_err(|_| last_errno())
}

/// A descriptor whose events the kernel does not know.
enum Polled {
    Socket(Arc<Rsocket>),
    /// An epoll instance with rsockets.
    Instance(Arc<Instance>),
}

impl Polled {
    fn find(descriptor: c_int) -> Option<Polled> {
        let socket = table::find_checked(descriptor).map(Polled::Socket);
        socket.or_else(|| find_instance(descriptor).map(Polled::Instance))
    }

    fn readiness(&self, descriptor: c_int) -> i16 {
        match self {
            Polled::Socket(socket) => socket.readiness(),
            Polled::Instance(instance) if instance.has_events(descriptor, 0) => {
                libc::POLLIN | libc::POLLRDNORM
            }
            Polled::Instance(_) => 0,
        }
    }
}

/// A list of descriptors, with the rsockets among them.
struct PollList<'a> {
    fds: &'a mut [libc::pollfd],
    sockets: Vec<Option<Polled>>,
    mask: *const libc::sigset_t,
}

/// A thread that waits for a list, until it is dropped.
struct ListWait {
    sockets: Vec<Option<Polled>>,
    /// The list as the kernel sees it.
    kernel: Vec<libc::pollfd>,
}

impl Drop for ListWait {
    fn drop(&mut self) {
        for socket in rsockets_of(&self.sockets) {
            socket.end_polling();
        }
    }
}

/// The rsockets of a list. Instances arm theirs when they are checked.
fn rsockets_of(sockets: &[Option<Polled>]) -> impl Iterator<Item = &Arc<Rsocket>> {
    sockets.iter().filter_map(|polled| match polled {
        Some(Polled::Socket(socket)) => Some(socket),
        _ => None,
    })
}

impl PollList<'_> {
    /// Checks the rsockets and returns the number of ready ones.
    fn check_sockets(&mut self) -> usize {
        let mut ready = 0;
        for (fd, socket) in self.fds.iter_mut().zip(&self.sockets) {
            let Some(socket) = socket else {
                continue;
            };
            fd.revents = socket.readiness(fd.fd) & (fd.events | UNASKED);
            ready += usize::from(fd.revents != 0);
        }
        ready
    }

    /// The list as the kernel has to see it: the descriptors of rsockets are readable after events.
    fn kernel_list(&self) -> Vec<libc::pollfd> {
        let mut list: Vec<libc::pollfd> = self.fds.to_vec();
        for (fd, socket) in list.iter_mut().zip(&self.sockets) {
            if socket.is_some() {
                fd.events = libc::POLLIN;
            }
        }
        list
    }

    /// Takes the events of the kernel's descriptors; returns the number of ready ones.
    fn take_events(&mut self, kernel: &[libc::pollfd]) -> usize {
        let mut ready = 0;
        for ((to, from), socket) in self.fds.iter_mut().zip(kernel).zip(&self.sockets) {
            if socket.is_none() {
                to.revents = from.revents;
                ready += usize::from(from.revents != 0);
            }
        }
        ready
    }

    /// Checks the kernel's descriptors and returns the number of ready ones.
    fn check_others(&mut self) -> Result<usize, c_int> {
        let mut kernel = self.kernel_list();
        poll_kernel(&mut kernel, self.mask)?;
        Ok(self.take_events(&kernel))
    }

    /// Arms the rsockets and waits.
    fn wait_for_events(self, call: &mut Call, timeout: Option<Duration>) {
        let mut is_quiet = true;
        for socket in rsockets_of(&self.sockets) {
            is_quiet &= socket.start_polling();
        }
        let mut list = self;
        // Events from before the arming do not wake the thread.
        let timeout = if is_quiet || list.check_sockets() == 0 {
            timeout
        } else {
            Some(Duration::ZERO)
        };
        let mut wait = Box::new(ListWait {
            kernel: list.kernel_list(),
            sockets: list.sockets,
        });
        let kernel = std::ptr::from_mut(&mut *wait.kernel);
        call.wait_for_list(kernel, timeout, list.mask, Held::Other(wait));
    }
}

/// poll(2) for lists with rsockets.
///
/// # Errors
/// EAGAIN if the call has to wait.
pub fn poll_list(
    call: &mut Call,
    fds: &mut [libc::pollfd],
    timeout: Option<Duration>,
    mask: *const libc::sigset_t,
) -> Result<usize, c_int> {
    let waited = call.take_other::<ListWait>();
    let kernel = waited.map(|mut wait| std::mem::take(&mut wait.kernel));
    let outcome = call.take_outcome();
    let sockets: Vec<_> = fds.iter().map(|fd| Polled::find(fd.fd)).collect();
    let has_others = sockets.iter().any(Option::is_none);
    let has_sockets = sockets.iter().any(Option::is_some);
    let mut list = PollList { fds, sockets, mask };
    if let (Some(kernel), Some(Ok(_))) = (kernel, outcome) {
        let ready = list.take_events(&kernel);
        if ready > 0 {
            return Ok(ready + list.check_sockets());
        }
    }
    let start = call.start();
    loop {
        let mut ready = list.check_sockets();
        let elapsed = start.elapsed();
        let left = timeout.map(|timeout| timeout.saturating_sub(elapsed));
        if ready > 0 || left.is_some_and(|left| left.is_zero()) {
            if ready == 0 && has_sockets {
                yield_at_times();
            }
            if has_others {
                ready += list.check_others()?;
            }
            return Ok(ready);
        }
        if let Some(Err(errno)) = outcome {
            return Err(errno);
        }
        if elapsed >= SPIN || !has_sockets {
            list.wait_for_events(call, left);
            return Err(libc::EAGAIN);
        }
        std::thread::yield_now();
    }
}

/// The octet of a descriptor in a set: words of any size have it at the same place in little-endian order,
/// and a set of a program may be unaligned.
///
/// # Safety
/// A set with a place for the descriptor.
unsafe fn octet_of(fd: c_int, set: *mut libc::fd_set) -> *mut u8 {
    // SAFETY: as the caller promised.
    unsafe { set.cast::<u8>().add(fd as usize / 8) }
}

fn bit_of(fd: c_int) -> u8 {
    1 << (fd % 8)
}

/// The `fd_set`s of select(2).
struct Sets {
    read: *mut libc::fd_set,
    write: *mut libc::fd_set,
    except: *mut libc::fd_set,
}

impl Sets {
    /// # Safety
    /// The pointers are NULL or sets.
    unsafe fn events_of(&self, fd: c_int) -> i16 {
        let mut events = 0;
        for (set, event) in [
            (self.read, libc::POLLIN),
            (self.write, libc::POLLOUT),
            (self.except, libc::POLLPRI),
        ] {
            // SAFETY: as the caller promised.
            if !set.is_null() && unsafe { octet_of(fd, set).read() } & bit_of(fd) != 0 {
                events |= event;
            }
        }
        events
    }

    /// # Safety
    /// The pointers are NULL or sets.
    unsafe fn store(&self, fds: &[libc::pollfd]) -> c_int {
        let mut count = 0;
        // For select(2), ended and failed sockets are readable too.
        let readable = libc::POLLIN | libc::POLLHUP | libc::POLLERR | libc::POLLRDHUP;
        let writable = libc::POLLOUT | libc::POLLERR;
        for (set, asked, meant) in [
            (self.read, libc::POLLIN, readable),
            (self.write, libc::POLLOUT, writable),
            (self.except, libc::POLLPRI, libc::POLLPRI),
        ] {
            if set.is_null() {
                continue;
            }
            for fd in fds.iter().filter(|fd| fd.events & asked != 0) {
                // SAFETY: as the caller promised; the descriptor was in the set.
                unsafe {
                    let octet = octet_of(fd.fd, set);
                    if fd.revents & meant != 0 {
                        octet.write(octet.read() | bit_of(fd.fd));
                        count += 1;
                    } else {
                        octet.write(octet.read() & !bit_of(fd.fd));
                    }
                }
            }
        }
        count
    }
}

/// select(2) for sets with rsockets.
///
/// # Safety
/// The pointers are NULL or sets.
pub unsafe fn select_sets(
    call: &mut Call,
    count: c_int,
    read: *mut libc::fd_set,
    write: *mut libc::fd_set,
    except: *mut libc::fd_set,
    timeout: Option<Duration>,
    mask: *const libc::sigset_t,
) -> Result<c_int, c_int> {
    if !(0..=libc::FD_SETSIZE as c_int).contains(&count) {
        return Err(libc::EINVAL);
    }
    let sets = Sets {
        read,
        write,
        except,
    };
    let fds = (0..count).map(|fd| libc::pollfd {
        fd,
        // SAFETY: as the caller promised.
        events: unsafe { sets.events_of(fd) },
        revents: 0,
    });
    let mut fds: Vec<_> = fds.filter(|fd| fd.events != 0).collect();
    poll_list(call, &mut fds, timeout, mask)?;
    if fds.iter().any(|fd| fd.revents & libc::POLLNVAL != 0) {
        return Err(libc::EBADF);
    }
    // SAFETY: as the caller promised.
    Ok(unsafe { sets.store(&fds) })
}
