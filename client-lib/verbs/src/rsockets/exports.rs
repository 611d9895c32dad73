//! The C interface of rsockets (rsocket(7)): results of -1 with errno, addresses, lists of buffers.

use super::socket::Rsocket;
use super::{connect, epoll, poll, preload, table, transfer};
use crate::export::{export_symbols, export_waiting_symbols};
use crate::rdmacm::sockaddr::{length_of, read_address, write_address};
use crate::status::fail_errno;
use crate::waiting::Call;
use rustix::fd::IntoRawFd;
use std::borrow::Cow;
use std::ffi::{c_int, c_void};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Returns the result, or -1 with errno set.
pub(super) fn to_c<T>(result: Result<T, c_int>, convert: impl FnOnce(T) -> isize) -> isize {
    match result {
        Ok(value) => convert(value),
        Err(errno) => {
            fail_errno(errno);
            -1
        }
    }
}

pub(super) fn to_status(result: Result<(), c_int>) -> c_int {
    to_c(result, |()| 0) as c_int
}

fn to_length(result: Result<usize, c_int>) -> isize {
    to_c(result, |length| length as isize)
}

pub(super) fn find_socket(descriptor: c_int) -> Result<Arc<Rsocket>, c_int> {
    table::find(descriptor).ok_or(libc::EBADF)
}

/// # Safety
/// NULL, or an address.
pub(super) unsafe fn to_address(
    addr: *const libc::sockaddr,
    length: libc::socklen_t,
) -> Result<SocketAddr, c_int> {
    if (length as usize) < size_of::<libc::sockaddr_in>() {
        return Err(libc::EINVAL);
    }
    if addr.is_null() {
        return Err(libc::EAFNOSUPPORT);
    }
    // SAFETY: as the caller promised.
    let family = unsafe { addr.cast::<libc::sa_family_t>().read_unaligned() };
    let is_ipv6 = i32::from(family) == libc::AF_INET6;
    if is_ipv6 && (length as usize) < size_of::<libc::sockaddr_in6>() {
        return Err(libc::EINVAL);
    }
    // SAFETY: as the caller promised; the length is that of the family.
    unsafe { read_address(addr) }.ok_or(libc::EAFNOSUPPORT)
}

/// The address as a socket of the family shows it.
fn address_for(family: c_int, addr: SocketAddr) -> SocketAddr {
    match addr.ip() {
        IpAddr::V4(v4) if family == libc::AF_INET6 => {
            SocketAddr::new(v4.to_ipv6_mapped().into(), addr.port())
        }
        _ => addr,
    }
}

/// Writes as much of an address as fits, and its full length.
///
/// # Safety
/// NULL, or room for `length` bytes.
unsafe fn store_address(
    addr: Option<SocketAddr>,
    to: *mut libc::sockaddr,
    length: *mut libc::socklen_t,
) {
    if to.is_null() || length.is_null() {
        return;
    }
    // SAFETY: the struct is made of numbers.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let addr = addr.unwrap_or_else(|| SocketAddr::from(([0, 0, 0, 0], 0)));
    // SAFETY: there is room for every address; the copy is within both.
    unsafe {
        write_address(addr, &raw mut storage);
        let count = (length.read_unaligned() as usize).min(length_of(addr));
        std::ptr::copy_nonoverlapping((&raw const storage).cast::<u8>(), to.cast(), count);
        length.write_unaligned(length_of(addr) as libc::socklen_t);
    }
}

/// A list of the program, which is copied if it is not aligned: the kernel takes such lists, too.
///
/// # Safety
/// NULL with a length of 0, or a list.
unsafe fn read_list<'a, T: Copy>(list: *const T, count: usize) -> Cow<'a, [T]> {
    if list.is_null() || count == 0 {
        return Cow::Borrowed(&[]);
    }
    // SAFETY: as the caller promised.
    unsafe {
        if list.is_aligned() {
            return Cow::Borrowed(std::slice::from_raw_parts(list, count));
        }
        Cow::Owned((0..count).map(|at| list.add(at).read_unaligned()).collect())
    }
}

/// Maximum number of buffers of a call (UIO_MAXIOV).
const MOST_BUFFERS: usize = 1024;

/// Converts the number of buffers of readv(2).
fn to_count(count: c_int) -> Result<usize, c_int> {
    let count = usize::try_from(count).ok();
    count
        .filter(|count| *count <= MOST_BUFFERS)
        .ok_or(libc::EINVAL)
}

/// # Safety
/// The list of the message has the length that it says.
unsafe fn buffers_of(message: &libc::msghdr) -> Result<Cow<'_, [libc::iovec]>, c_int> {
    if message.msg_iovlen > MOST_BUFFERS {
        return Err(libc::EMSGSIZE);
    }
    // SAFETY: as the caller promised.
    Ok(unsafe { read_list(message.msg_iov, message.msg_iovlen) })
}

fn one_buffer(start: *mut c_void, length: usize) -> [libc::iovec; 1] {
    [libc::iovec {
        iov_base: start,
        iov_len: length,
    }]
}

unsafe fn create_socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    to_c(connect::create_rsocket(domain, kind, protocol), |fd| {
        fd as isize
    }) as c_int
}

unsafe fn bind_socket(fd: c_int, addr: *const libc::sockaddr, length: libc::socklen_t) -> c_int {
    // SAFETY: by the contract of the manual page.
    let addr = unsafe { to_address(addr, length) };
    to_status(addr.and_then(|addr| find_socket(fd)?.lock().bind(addr)))
}

unsafe fn listen_socket(fd: c_int, backlog: c_int) -> c_int {
    to_status(find_socket(fd).and_then(|socket| socket.lock().listen(fd, backlog)))
}

unsafe fn accept_connection(
    call: &mut Call,
    fd: c_int,
    addr: *mut libc::sockaddr,
    length: *mut libc::socklen_t,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe { accept_with(call, fd, addr, length, 0) }
}

/// raccept(3) with the flags of accept4(2): those of the listener are not inherited.
pub(super) unsafe fn accept_with(
    call: &mut Call,
    fd: c_int,
    addr: *mut libc::sockaddr,
    length: *mut libc::socklen_t,
    flags: c_int,
) -> c_int {
    let accepted = find_socket(fd).and_then(|socket| {
        let (accepted, peer) = socket.accept(call, flags)?;
        let family = socket.lock().family;
        Ok((accepted, peer.map(|peer| address_for(family, peer))))
    });
    to_c(accepted, |(accepted, peer)| {
        match peer {
            // SAFETY: by the contract of the manual page.
            Some(_) => unsafe { store_address(peer, addr, length) },
            // SAFETY: a descriptor of the kernel; as above.
            None if !addr.is_null() => unsafe {
                libc::syscall(libc::SYS_getpeername, accepted, addr, length);
            },
            None => {}
        }
        accepted as isize
    }) as c_int
}

unsafe fn connect_to(
    call: &mut Call,
    fd: c_int,
    addr: *const libc::sockaddr,
    length: libc::socklen_t,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    let addr = unsafe { to_address(addr, length) };
    to_status(addr.and_then(|addr| find_socket(fd)?.connect(call, fd, addr)))
}

unsafe fn shut_down_socket(fd: c_int, how: c_int) -> c_int {
    to_status(find_socket(fd).and_then(|socket| socket.shut_down(how)))
}

unsafe fn close_descriptor(fd: c_int) -> c_int {
    if epoll::forget_instance(fd) {
        // SAFETY: the program closes it.
        return unsafe { libc::syscall(libc::SYS_close, fd) } as c_int;
    }
    to_status(transfer::close_rsocket(fd))
}

/// Maximum number of bytes that a call with MSG_TRUNC discards.
const DISCARDED: usize = 1 << 16;

unsafe fn receive_bytes(
    call: &mut Call,
    fd: c_int,
    to: *mut c_void,
    length: usize,
    flags: c_int,
) -> isize {
    if flags & libc::MSG_TRUNC != 0 {
        // The bytes are discarded (tcp(7)); the buffer may be NULL.
        let mut scratch = vec![0u8; length.min(DISCARDED)];
        let list = one_buffer(scratch.as_mut_ptr().cast(), scratch.len());
        // SAFETY: a buffer with its length.
        let received =
            find_socket(fd).and_then(|socket| unsafe { socket.receive(call, &list, flags) });
        return to_length(received);
    }
    let list = one_buffer(to, length);
    // SAFETY: by the contract of the manual page.
    to_length(find_socket(fd).and_then(|socket| unsafe { socket.receive(call, &list, flags) }))
}

unsafe fn receive_from(
    call: &mut Call,
    fd: c_int,
    to: *mut c_void,
    length: usize,
    flags: c_int,
    addr: *mut libc::sockaddr,
    addr_length: *mut libc::socklen_t,
) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe {
        let received = receive_bytes(call, fd, to, length, flags);
        if received >= 0 && !addr.is_null() {
            peer_name(fd, addr, addr_length);
        }
        received
    }
}

unsafe fn receive_message(
    call: &mut Call,
    fd: c_int,
    message: *mut libc::msghdr,
    flags: c_int,
) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe {
        let mut given = message.read_unaligned();
        let received =
            find_socket(fd).and_then(|socket| socket.receive(call, &buffers_of(&given)?, flags));
        if received.is_ok() {
            given.msg_namelen = 0;
            given.msg_controllen = 0;
            given.msg_flags = 0;
            message.write_unaligned(given);
        }
        to_length(received)
    }
}

unsafe fn send_bytes(
    call: &mut Call,
    fd: c_int,
    from: *const c_void,
    length: usize,
    flags: c_int,
) -> isize {
    let list = one_buffer(from.cast_mut(), length);
    // SAFETY: by the contract of the manual page.
    to_length(find_socket(fd).and_then(|socket| unsafe { socket.send(call, &list, flags) }))
}

/// The address is ignored: a stream has one peer.
unsafe fn send_to(
    call: &mut Call,
    fd: c_int,
    from: *const c_void,
    length: usize,
    flags: c_int,
    _addr: *const libc::sockaddr,
    _addr_length: libc::socklen_t,
) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe { send_bytes(call, fd, from, length, flags) }
}

unsafe fn send_message(
    call: &mut Call,
    fd: c_int,
    message: *const libc::msghdr,
    flags: c_int,
) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe {
        let given = message.read_unaligned();
        to_length(find_socket(fd).and_then(|socket| socket.send(call, &buffers_of(&given)?, flags)))
    }
}

unsafe fn read_bytes(call: &mut Call, fd: c_int, to: *mut c_void, length: usize) -> isize {
    if length == 0 {
        // Unlike recv(2), read(2) of nothing does not wait.
        return to_length(find_socket(fd).map(|_| 0));
    }
    // SAFETY: by the contract of the manual page.
    unsafe { receive_bytes(call, fd, to, length, 0) }
}

unsafe fn read_vector(call: &mut Call, fd: c_int, list: *const libc::iovec, count: c_int) -> isize {
    // SAFETY: by the contract of the manual page.
    to_length(
        find_socket(fd).and_then(|socket| unsafe {
            socket.receive(call, &read_list(list, to_count(count)?), 0)
        }),
    )
}

unsafe fn write_bytes(call: &mut Call, fd: c_int, from: *const c_void, length: usize) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe { send_bytes(call, fd, from, length, 0) }
}

unsafe fn write_vector(
    call: &mut Call,
    fd: c_int,
    list: *const libc::iovec,
    count: c_int,
) -> isize {
    // SAFETY: by the contract of the manual page.
    to_length(
        find_socket(fd)
            .and_then(|socket| unsafe { socket.send(call, &read_list(list, to_count(count)?), 0) }),
    )
}

unsafe fn poll_descriptors(
    call: &mut Call,
    fds: *mut libc::pollfd,
    count: libc::nfds_t,
    timeout_ms: c_int,
) -> c_int {
    let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
    // SAFETY: by the contract of the manual page.
    unsafe { poll_program_list(call, fds, count, timeout, std::ptr::null()) }
}

/// ppoll(2) with a list of the program.
///
/// # Safety
/// The contract of the manual page.
pub(super) unsafe fn poll_program_list(
    call: &mut Call,
    fds: *mut libc::pollfd,
    count: libc::nfds_t,
    timeout: Option<Duration>,
    mask: *const libc::sigset_t,
) -> c_int {
    // SAFETY: as the caller promised.
    let polled = unsafe {
        if fds.is_aligned() {
            poll::poll_list(call, list_of(fds, count as usize), timeout, mask)
        } else {
            let mut copied = read_list(fds, count as usize).into_owned();
            let polled = poll::poll_list(call, &mut copied, timeout, mask);
            for (at, fd) in copied.into_iter().enumerate() {
                fds.add(at).write_unaligned(fd);
            }
            polled
        }
    };
    to_c(polled, |ready| ready as isize) as c_int
}

/// # Safety
/// NULL with a length of 0, or a list.
pub(super) unsafe fn list_of<'a, T>(list: *mut T, count: usize) -> &'a mut [T] {
    if list.is_null() || count == 0 {
        return &mut [];
    }
    // SAFETY: as the caller promised.
    unsafe { std::slice::from_raw_parts_mut(list, count) }
}

unsafe fn select_descriptors(
    call: &mut Call,
    count: c_int,
    read: *mut libc::fd_set,
    write: *mut libc::fd_set,
    except: *mut libc::fd_set,
    timeout: *mut libc::timeval,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe {
        let timeout = (!timeout.is_null()).then(|| {
            let timeout = timeout.read_unaligned();
            let seconds = u64::try_from(timeout.tv_sec).unwrap_or(0);
            let micros = u64::try_from(timeout.tv_usec).unwrap_or(0);
            Duration::from_secs(seconds) + Duration::from_micros(micros)
        });
        let selected =
            poll::select_sets(call, count, read, write, except, timeout, std::ptr::null());
        to_c(selected, |ready| ready as isize) as c_int
    }
}

unsafe fn peer_name(fd: c_int, addr: *mut libc::sockaddr, length: *mut libc::socklen_t) -> c_int {
    let peer = find_socket(fd).and_then(|socket| {
        let mut state = socket.lock();
        state.progress();
        let peer = state.peer.ok_or(libc::ENOTCONN)?;
        Ok(address_for(state.family, peer))
    });
    // SAFETY: by the contract of the manual page.
    to_status(peer.map(|peer| unsafe { store_address(Some(peer), addr, length) }))
}

unsafe fn socket_name(fd: c_int, addr: *mut libc::sockaddr, length: *mut libc::socklen_t) -> c_int {
    let local = find_socket(fd).map(|socket| {
        let mut state = socket.lock();
        state.progress();
        let local = state.local.unwrap_or(connect::any_address(state.family));
        address_for(state.family, local)
    });
    // SAFETY: by the contract of the manual page.
    to_status(local.map(|local| unsafe { store_address(Some(local), addr, length) }))
}

unsafe fn set_option(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: libc::socklen_t,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    to_status(
        find_socket(fd).and_then(|socket| unsafe { socket.set_option(level, name, value, length) }),
    )
}

unsafe fn get_option(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: *mut libc::socklen_t,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    to_status(
        find_socket(fd).and_then(|socket| unsafe { socket.get_option(level, name, value, length) }),
    )
}

/// fcntl(2). O_NONBLOCK is kept by the rsocket; the descriptor's own has no effect.
unsafe fn control_descriptor(fd: c_int, command: c_int, argument: usize) -> c_int {
    let socket = match find_socket(fd) {
        Ok(socket) => socket,
        Err(errno) => return to_status(Err(errno)),
    };
    match command {
        libc::F_GETFL if socket.nonblocking.load(Ordering::Relaxed) => {
            libc::O_RDWR | libc::O_NONBLOCK
        }
        libc::F_GETFL => libc::O_RDWR,
        libc::F_SETFL => {
            let nonblocking = argument as c_int & libc::O_NONBLOCK != 0;
            socket.nonblocking.store(nonblocking, Ordering::Relaxed);
            0
        }
        // SAFETY: these commands affect only the descriptor.
        libc::F_GETFD | libc::F_SETFD => unsafe {
            libc::syscall(libc::SYS_fcntl, fd, command, argument) as c_int
        },
        _ => to_status(Err(libc::ENOTSUP)),
    }
}

unsafe fn map_memory(
    fd: c_int,
    start: *mut c_void,
    length: usize,
    protection: c_int,
    _flags: c_int,
    offset: libc::off_t,
) -> libc::off_t {
    let mapped = find_socket(fd).and_then(|socket| socket.map(start, length, protection, offset));
    to_c(mapped, |offset| offset as isize) as libc::off_t
}

unsafe fn unmap_memory(fd: c_int, start: *mut c_void, length: usize) -> c_int {
    to_status(find_socket(fd).and_then(|socket| socket.unmap(start, length)))
}

unsafe fn write_mapped(
    call: &mut Call,
    fd: c_int,
    from: *const c_void,
    length: usize,
    offset: libc::off_t,
    flags: c_int,
) -> usize {
    let part = one_buffer(from.cast_mut(), length);
    // SAFETY: by the contract of the manual page.
    let written = find_socket(fd)
        .and_then(|socket| unsafe { socket.write_mapped(call, &part, offset, flags) });
    to_length(written) as usize
}

unsafe fn epoll_create(flags: c_int) -> c_int {
    to_c(epoll::create_instance(flags), |fd| {
        fd.into_raw_fd() as isize
    }) as c_int
}

unsafe fn epoll_control(
    number: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut libc::epoll_event,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    let asked = (!event.is_null()).then(|| unsafe {
        let event = event.read_unaligned();
        epoll::AskedEvent {
            events: event.events,
            data: event.u64,
        }
    });
    match epoll::control_instance(number, operation, fd, asked) {
        Some(done) => to_status(done),
        // SAFETY: as above.
        None => unsafe {
            libc::syscall(libc::SYS_epoll_ctl, number, operation, fd, event) as c_int
        },
    }
}

unsafe fn epoll_wait(
    call: &mut Call,
    number: c_int,
    events: *mut libc::epoll_event,
    most: c_int,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: by the contract of the manual page.
    let events = unsafe { list_of(events, usize::try_from(most).unwrap_or(0)) };
    if events.is_empty() {
        return to_status(Err(libc::EINVAL));
    }
    let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
    let waited = epoll::wait_for_events(call, number, events, timeout, std::ptr::null());
    to_c(waited, |count| count as isize) as c_int
}

export_symbols! { "RDMACM_1.0":
    fn rsocket(domain: c_int, kind: c_int, protocol: c_int) -> c_int = create_socket;
    fn rbind(fd: c_int, addr: *const libc::sockaddr, length: libc::socklen_t) -> c_int = bind_socket;
    fn rlisten(fd: c_int, backlog: c_int) -> c_int = listen_socket;
    fn rshutdown(fd: c_int, how: c_int) -> c_int = shut_down_socket;
    fn rclose(fd: c_int) -> c_int = close_descriptor;
    fn rgetpeername(fd: c_int, addr: *mut libc::sockaddr, length: *mut libc::socklen_t) -> c_int
        = peer_name;
    fn rgetsockname(fd: c_int, addr: *mut libc::sockaddr, length: *mut libc::socklen_t) -> c_int
        = socket_name;
    fn rsetsockopt(
        fd: c_int, level: c_int, name: c_int, value: *const c_void, length: libc::socklen_t,
    ) -> c_int = set_option;
    fn rgetsockopt(
        fd: c_int, level: c_int, name: c_int, value: *mut c_void, length: *mut libc::socklen_t,
    ) -> c_int = get_option;
    fn rfcntl(fd: c_int, command: c_int, argument: usize) -> c_int = control_descriptor;
    fn riomap(
        fd: c_int, start: *mut c_void, length: usize, protection: c_int, flags: c_int,
        offset: libc::off_t,
    ) -> libc::off_t = map_memory;
    fn riounmap(fd: c_int, start: *mut c_void, length: usize) -> c_int = unmap_memory;
}

export_waiting_symbols! { "RDMACM_1.0":
    fn raccept(fd: c_int, addr: *mut libc::sockaddr, length: *mut libc::socklen_t) -> c_int
        = accept_connection;
    fn rconnect(fd: c_int, addr: *const libc::sockaddr, length: libc::socklen_t) -> c_int
        = connect_to;
    fn rrecv(fd: c_int, to: *mut c_void, length: usize, flags: c_int) -> isize = receive_bytes;
    fn rrecvfrom(
        fd: c_int, to: *mut c_void, length: usize, flags: c_int,
        addr: *mut libc::sockaddr, addr_length: *mut libc::socklen_t,
    ) -> isize = receive_from;
    fn rrecvmsg(fd: c_int, message: *mut libc::msghdr, flags: c_int) -> isize = receive_message;
    fn rsend(fd: c_int, from: *const c_void, length: usize, flags: c_int) -> isize = send_bytes;
    fn rsendto(
        fd: c_int, from: *const c_void, length: usize, flags: c_int,
        addr: *const libc::sockaddr, addr_length: libc::socklen_t,
    ) -> isize = send_to;
    fn rsendmsg(fd: c_int, message: *const libc::msghdr, flags: c_int) -> isize = send_message;
    fn rread(fd: c_int, to: *mut c_void, length: usize) -> isize = read_bytes;
    fn rreadv(fd: c_int, list: *const libc::iovec, count: c_int) -> isize = read_vector;
    fn rwrite(fd: c_int, from: *const c_void, length: usize) -> isize = write_bytes;
    fn rwritev(fd: c_int, list: *const libc::iovec, count: c_int) -> isize = write_vector;
    fn rpoll(fds: *mut libc::pollfd, count: libc::nfds_t, timeout_ms: c_int) -> c_int = poll_descriptors;
    fn rselect(
        count: c_int, read: *mut libc::fd_set, write: *mut libc::fd_set,
        except: *mut libc::fd_set, timeout: *mut libc::timeval,
    ) -> c_int = select_descriptors;
    fn riowrite(
        fd: c_int, from: *const c_void, length: usize, offset: libc::off_t, flags: c_int,
    ) -> usize = write_mapped;
}

export_symbols! { "RDMACM_1.5":
    fn repoll_create(flags: c_int) -> c_int = epoll_create;
    fn repoll_ctl(
        number: c_int, operation: c_int, fd: c_int, event: *mut libc::epoll_event,
    ) -> c_int = epoll_control;
}

export_waiting_symbols! { "RDMACM_1.5":
    fn repoll_wait(
        number: c_int, events: *mut libc::epoll_event, most: c_int, timeout_ms: c_int,
    ) -> c_int = epoll_wait;
}

export_symbols! { "SIWD_PRIVATE":
    fn siw_is_rsocket(fd: c_int) -> c_int = preload::is_rsocket;
    fn siw_rsocket_is_open(fd: c_int) -> c_int = preload::is_open;
    fn siw_is_reachable(
        addr: *const libc::sockaddr, length: libc::socklen_t, own: c_int,
    ) -> c_int = preload::is_reachable;
    fn siw_rsocket_duplicate(fd: c_int, number: c_int) -> c_int = preload::duplicate;
    fn siw_rsocket_close_stale() -> c_int = preload::close_stale;
    fn siw_rsocket_ioctl(fd: c_int, request: libc::c_ulong, argument: *mut c_int) -> c_int
        = preload::control_socket;
    fn siw_rsocket_join(fd: c_int, kernel: c_int) -> c_int = preload::join;
    fn siw_repoll_is_instance(number: c_int) -> c_int = preload::is_epoll;
    fn siw_repoll_forget(number: c_int) -> c_int = preload::forget_epoll;
}

export_waiting_symbols! { "SIWD_PRIVATE":
    fn siw_raccept4(
        fd: c_int, addr: *mut libc::sockaddr, length: *mut libc::socklen_t, flags: c_int,
    ) -> c_int = preload::accept4;
    fn siw_rppoll(
        fds: *mut libc::pollfd, count: libc::nfds_t, timeout: *const libc::timespec,
        mask: *const libc::sigset_t,
    ) -> c_int = preload::ppoll;
    fn siw_rpselect(
        count: c_int, read: *mut libc::fd_set, write: *mut libc::fd_set,
        except: *mut libc::fd_set, timeout: *const libc::timespec, mask: *const libc::sigset_t,
    ) -> c_int = preload::pselect;
    fn siw_repoll_pwait(
        number: c_int, events: *mut libc::epoll_event, most: c_int, timeout_ms: c_int,
        mask: *const libc::sigset_t,
    ) -> c_int = preload::epoll_pwait;
}
