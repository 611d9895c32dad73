//! Converts a kernel socket to an rsocket: creates one with the same options, and moves it to the
//! number of the descriptor.

use crate::cancel::CancelGuard;
use crate::fork_lock::ForkLock;
use crate::next::{libc_calls, rsockets};
use libc::socklen_t;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, MutexGuard};

/// Descriptors of TCP sockets of the kernel that may become rsockets.
static CANDIDATES: LazyLock<ForkLock<HashMap<c_int, Candidate>>> =
    LazyLock::new(|| ForkLock::new(hold_candidates, release_candidates));

/// Called when the library is loaded, before the program has threads that fork.
extern "C" fn on_load() {
    LazyLock::force(&CANDIDATES);
}

#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;

unsafe extern "C" fn hold_candidates() {
    CANDIDATES.hold();
}

unsafe extern "C" fn release_candidates() {
    CANDIDATES.release();
}

/// Numbers that are not in [`CANDIDATES`] are found here, without its lock: an allocator, which may be
/// adding memory to the table, opens and closes files.
static MARKS: [AtomicU64; 1024] = [const { AtomicU64::new(0) }; 1024];

/// The word and the bit of a number; None for one that is too large.
fn mark_of(fd: c_int) -> Option<(&'static AtomicU64, u64)> {
    let number = usize::try_from(fd).ok()?;
    Some((MARKS.get(number / 64)?, 1 << (number % 64)))
}

fn may_be_candidate(fd: c_int) -> bool {
    mark_of(fd).is_none_or(|(word, bit)| word.load(Ordering::Acquire) & bit != 0)
}

/// The table, with the marks.
struct Candidates(MutexGuard<'static, HashMap<c_int, Candidate>>);

impl Candidates {
    fn insert(&mut self, fd: c_int, candidate: Candidate) {
        self.0.insert(fd, candidate);
        if let Some((word, bit)) = mark_of(fd) {
            word.fetch_or(bit, Ordering::Release);
        }
    }

    fn remove(&mut self, fd: c_int) -> Option<Candidate> {
        if let Some((word, bit)) = mark_of(fd) {
            word.fetch_and(!bit, Ordering::Release);
        }
        self.0.remove(&fd)
    }
}

/// A descriptor of such a socket.
#[derive(Default)]
struct Candidate {
    /// Epoll instances to which it was added by this number.
    memberships: Vec<EpollMembership>,
    /// There may be other descriptors of the socket, made by dup(2).
    has_duplicates: bool,
}

/// A socket in an epoll instance.
#[derive(Clone, Copy)]
struct EpollMembership {
    instance: c_int,
    event: libc::epoll_event,
}

fn lock_candidates() -> Candidates {
    Candidates(CANDIDATES.lock())
}

/// Checks whether the descriptor is an rsocket.
pub fn is_rsocket(fd: c_int) -> bool {
    // SAFETY: any number is allowed.
    unsafe { rsockets::is_rsocket(fd) != 0 }
}

/// Checks whether the descriptor is an rsocket, for a call that closes it.
pub fn is_open_rsocket(fd: c_int) -> bool {
    // SAFETY: any number is allowed.
    unsafe { rsockets::is_open(fd) != 0 }
}

/// Adds a new socket.
pub fn add_candidate(fd: c_int, domain: c_int, kind: c_int) {
    let is_stream = kind & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) == libc::SOCK_STREAM;
    if fd >= 0 && is_stream && matches!(domain, libc::AF_INET | libc::AF_INET6) {
        lock_candidates().insert(fd, Candidate::default());
    }
}

/// Adds a duplicate of a candidate.
pub fn add_duplicate_candidate(fd: c_int, number: c_int) {
    if !may_be_candidate(fd) {
        return;
    }
    let mut all = lock_candidates();
    if let Some(candidate) = all.0.get_mut(&fd) {
        candidate.has_duplicates = true;
        let has_duplicates = true;
        let memberships = Vec::new();
        all.insert(
            number,
            Candidate {
                memberships,
                has_duplicates,
            },
        );
    }
}

/// Removes a descriptor that was closed.
pub fn remove_candidate(fd: c_int) {
    if may_be_candidate(fd) {
        lock_candidates().remove(fd);
    }
}

/// Removes a socket that stays one of the kernel, at all its descriptors.
pub fn remove_socket(fd: c_int) {
    take_descriptors(fd);
}

/// Checks for a socket whose kind is not decided. The number may belong to another file by now, if
/// the socket was closed by the C library itself or by a system call.
pub fn is_candidate(fd: c_int) -> bool {
    let is_known = || lock_candidates().0.contains_key(&fd);
    may_be_candidate(fd) && is_known() && is_tcp_socket(fd)
}

fn is_tcp_socket(fd: c_int) -> bool {
    option_number(fd, libc::SO_PROTOCOL) == Some(libc::IPPROTO_TCP)
}

/// An option of SOL_SOCKET of a kernel socket.
fn option_number(fd: c_int, name: c_int) -> Option<c_int> {
    let mut number: c_int = 0;
    let mut length = size_of_val(&number) as socklen_t;
    let place = (&raw mut number).cast();
    // SAFETY: a number with its length.
    let found =
        unsafe { libc_calls::getsockopt(fd, libc::SOL_SOCKET, name, place, &raw mut length) };
    (found == 0).then_some(number)
}

/// Records that a candidate was added to an epoll instance, modified or removed.
pub fn note_epoll(instance: c_int, operation: c_int, fd: c_int, event: Option<libc::epoll_event>) {
    if !may_be_candidate(fd) {
        return;
    }
    let mut all = lock_candidates();
    let Some(candidate) = all.0.get_mut(&fd) else {
        return;
    };
    let memberships = &mut candidate.memberships;
    memberships.retain(|membership| membership.instance != instance);
    if operation != libc::EPOLL_CTL_DEL
        && let Some(event) = event
    {
        memberships.push(EpollMembership { instance, event });
    }
}

/// Options copied from the socket to the rsocket.
const OPTIONS: [(c_int, c_int); 8] = [
    (libc::SOL_SOCKET, libc::SO_REUSEADDR),
    (libc::SOL_SOCKET, libc::SO_REUSEPORT),
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::SOL_SOCKET, libc::SO_RCVTIMEO),
    (libc::SOL_SOCKET, libc::SO_SNDTIMEO),
    (libc::SOL_SOCKET, libc::SO_LINGER),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
];

/// # Safety
/// A socket and an rsocket.
unsafe fn copy_options(from: c_int, to: c_int) {
    for (level, name) in OPTIONS {
        let mut value = [0u64; 4];
        let mut length = size_of_val(&value) as socklen_t;
        let place: *mut c_void = value.as_mut_ptr().cast();
        // SAFETY: a buffer with its length. Options that either of them lacks are skipped.
        unsafe {
            if libc_calls::getsockopt(from, level, name, place, &raw mut length) == 0 {
                rsockets::setsockopt(to, level, name, place, length);
            }
        }
    }
    // SAFETY: commands with a number as their argument.
    unsafe {
        let flags = libc_calls::fcntl(from, libc::F_GETFL, 0);
        rsockets::fcntl(to, libc::F_SETFL, flags as usize);
    }
}

/// Replaces the socket by an rsocket of its family that is not bound, at all its descriptors. Returns
/// false if it stays unchanged.
pub fn convert_socket(fd: c_int) -> bool {
    let _guard = CancelGuard::new();
    // SAFETY: the descriptors belong to this function, or were passed by the program.
    unsafe {
        let domain = option_number(fd, libc::SO_DOMAIN).unwrap_or(libc::AF_INET);
        let made = rsockets::socket(domain, libc::SOCK_STREAM, 0);
        if made < 0 {
            return false;
        }
        copy_options(fd, made);
        let is_done = take_descriptors(fd)
            .into_iter()
            .all(|(number, candidate)| replace_descriptor(made, number, candidate));
        rsockets::close(made);
        is_done
    }
}

/// Removes a candidate and its duplicates, and returns them with their numbers.
fn take_descriptors(fd: c_int) -> Vec<(c_int, Candidate)> {
    let mut all = lock_candidates();
    let first = all.remove(fd).unwrap_or_default();
    let mut numbers = Vec::new();
    if first.has_duplicates {
        let cookie = socket_cookie(fd);
        let duplicates = all
            .0
            .iter()
            .filter(|(_, candidate)| candidate.has_duplicates);
        let of_socket = duplicates.filter(|(number, _)| socket_cookie(**number) == cookie);
        numbers.extend(of_socket.map(|(number, _)| *number));
    }
    let others = numbers.into_iter().map(|number| {
        let candidate = all.remove(number).unwrap_or_default();
        (number, candidate)
    });
    std::iter::once((fd, first)).chain(others).collect()
}

/// Identity of a kernel socket.
fn socket_cookie(fd: c_int) -> Option<u64> {
    let mut cookie = 0u64;
    let mut length = size_of_val(&cookie) as socklen_t;
    let (name, place) = (libc::SO_COOKIE, (&raw mut cookie).cast());
    // SAFETY: a number with its length.
    let found =
        unsafe { libc_calls::getsockopt(fd, libc::SOL_SOCKET, name, place, &raw mut length) };
    (found == 0).then_some(cookie)
}

/// Replaces a descriptor of the kernel's socket by one of the rsocket, also in epoll instances.
///
/// # Safety
/// An rsocket, and a descriptor that the program gives up.
unsafe fn replace_descriptor(rsocket: c_int, number: c_int, candidate: Candidate) -> bool {
    // SAFETY: as the caller promised.
    unsafe {
        let close_on_exec = libc_calls::fcntl(number, libc::F_GETFD, 0) & libc::FD_CLOEXEC != 0;
        let flags = if close_on_exec { libc::O_CLOEXEC } else { 0 };
        let is_done = libc_calls::dup3(rsocket, number, flags) >= 0
            && rsockets::add_duplicate(rsocket, number) == 0;
        if is_done {
            for mut membership in candidate.memberships {
                let event = &raw mut membership.event;
                rsockets::epoll_ctl(membership.instance, libc::EPOLL_CTL_ADD, number, event);
            }
        }
        is_done
    }
}

/// Address of a kernel socket, if it is the wildcard address with a port.
pub fn wildcard_address(fd: c_int) -> Option<(libc::sockaddr_storage, socklen_t)> {
    // SAFETY: the struct is made of numbers.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let mut length = size_of_val(&storage) as socklen_t;
    // SAFETY: a buffer with its length.
    if unsafe { libc_calls::getsockname(fd, (&raw mut storage).cast(), &raw mut length) } != 0 {
        return None;
    }
    let is_wildcard = match c_int::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family is that of this struct.
            let v4: libc::sockaddr_in = unsafe { std::mem::transmute_copy(&storage) };
            v4.sin_addr.s_addr == 0 && v4.sin_port != 0
        }
        libc::AF_INET6 => {
            // SAFETY: the family is that of this struct.
            let v6: libc::sockaddr_in6 = unsafe { std::mem::transmute_copy(&storage) };
            v6.sin6_addr.s6_addr == [0; 16] && v6.sin6_port != 0
        }
        _ => false,
    };
    is_wildcard.then_some((storage, length))
}
