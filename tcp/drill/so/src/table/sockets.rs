//! Functions of the table that create, connect, configure and close sockets.

use std::ffi::{c_int, c_ulong, c_void};
use std::time::Duration;

use libc::{sockaddr, socklen_t};
use siw_drill::{Errno, Shutdown, SockOpt};

use super::user_data::{UserData, adapter_of, fail_with, zero_or_error};
use crate::adapter::Adapter;
use crate::address;

pub(super) unsafe extern "C" fn sys_free(userdata: UserData) {
    // SAFETY: `userdata` came from Box::into_raw, and this is the last call with it.
    drop(unsafe { Box::from_raw(userdata.cast::<Adapter>()) });
}

pub(super) unsafe extern "C" fn sys_socket(
    userdata: UserData,
    domain: c_int,
    kind: c_int,
    _protocol: c_int,
) -> c_int {
    let plain = kind & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
    if plain != libc::SOCK_STREAM || (domain != libc::AF_INET && domain != libc::AF_INET6) {
        return fail_with(Errno::EAFNOSUPPORT);
    }
    // SAFETY: packetdrill passes our userdata.
    let mut state = unsafe { adapter_of(userdata) }.lock();
    let fd = state.host.socket(domain == libc::AF_INET6);
    state.flags.insert(fd, kind & libc::SOCK_NONBLOCK);
    fd
}

pub(super) unsafe extern "C" fn sys_bind(
    userdata: UserData,
    fd: c_int,
    addr: *const sockaddr,
    len: socklen_t,
) -> c_int {
    // SAFETY: our userdata; an address as for bind(2).
    let (adapter, to) = unsafe { (adapter_of(userdata), address::read_sockaddr(addr, len)) };
    zero_or_error(to.and_then(|to| adapter.lock().bind(fd, to)))
}

pub(super) unsafe extern "C" fn sys_listen(userdata: UserData, fd: c_int, backlog: c_int) -> c_int {
    // SAFETY: our userdata.
    zero_or_error(
        unsafe { adapter_of(userdata) }
            .lock()
            .host
            .listen(fd, backlog),
    )
}

pub(super) unsafe extern "C" fn sys_accept(
    userdata: UserData,
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: our userdata.
    match unsafe { adapter_of(userdata) }.retry_until_done(fd, |state| state.host.accept(fd)) {
        Ok((new, remote)) => {
            // SAFETY: an address as for accept(2).
            unsafe { address::write_sockaddr(remote, addr, len) };
            new
        }
        Err(errno) => fail_with(errno),
    }
}

pub(super) unsafe extern "C" fn sys_connect(
    userdata: UserData,
    fd: c_int,
    addr: *const sockaddr,
    len: socklen_t,
) -> c_int {
    // SAFETY: our userdata; an address as for connect(2).
    let (adapter, to) = unsafe { (adapter_of(userdata), address::read_sockaddr(addr, len)) };
    zero_or_error(
        to.and_then(|to| adapter.retry_until_done(fd, |state| state.host.connect(fd, to))),
    )
}

pub(super) unsafe extern "C" fn sys_fcntl(
    userdata: UserData,
    fd: c_int,
    command: c_int,
    arg: c_ulong,
) -> c_int {
    // SAFETY: our userdata.
    let mut state = unsafe { adapter_of(userdata) }.lock();
    match command {
        libc::F_GETFL => state
            .flags
            .get(&fd)
            .map_or(libc::O_RDWR, |f| f | libc::O_RDWR),
        libc::F_SETFL => {
            state.flags.insert(fd, arg as c_int & libc::O_NONBLOCK);
            0
        }
        _ => fail_with(Errno::EINVAL),
    }
}

pub(super) unsafe extern "C" fn sys_ioctl(
    userdata: UserData,
    fd: c_int,
    request: c_ulong,
    arg: c_ulong,
) -> c_int {
    // SIOCINQ has the same number.
    if request != libc::FIONREAD {
        return fail_with(Errno::EINVAL);
    }
    // SAFETY: our userdata.
    let unread = unsafe { adapter_of(userdata) }.lock().host.unread_bytes(fd);
    zero_or_error(unread.map(|n| {
        // SAFETY: FIONREAD's argument points to an int that is written.
        unsafe { (arg as *mut c_int).write_unaligned(n as c_int) };
    }))
}

pub(super) unsafe extern "C" fn sys_close(userdata: UserData, fd: c_int) -> c_int {
    // SAFETY: our userdata.
    let mut state = unsafe { adapter_of(userdata) }.lock();
    state.flags.remove(&fd);
    if state.epolls.remove(&fd).is_some() {
        return 0;
    }
    state.epolls.values_mut().for_each(|errno| {
        errno.remove(&fd);
    });
    zero_or_error(state.host.close(fd))
}

pub(super) unsafe extern "C" fn sys_shutdown(userdata: UserData, fd: c_int, how: c_int) -> c_int {
    let how = match how {
        libc::SHUT_RD => Shutdown::Read,
        libc::SHUT_WR => Shutdown::Write,
        libc::SHUT_RDWR => Shutdown::Both,
        _ => return fail_with(Errno::EINVAL),
    };
    // SAFETY: our userdata.
    zero_or_error(
        unsafe { adapter_of(userdata) }
            .lock()
            .host
            .shutdown(fd, how),
    )
}

pub(super) unsafe extern "C" fn sys_getsockopt(
    userdata: UserData,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: our userdata.
    let mut state = unsafe { adapter_of(userdata) }.lock();
    let answer = match (level, name) {
        (libc::SOL_SOCKET, libc::SO_ERROR) => state
            .host
            .take_error(fd)
            .map(|errno| errno.map_or(0, |errno| errno.0)),
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => Ok(state.host.send_buffer() as c_int),
        (libc::SOL_TCP, libc::TCP_MAXSEG) => state.host.segment_payload(fd).map(c_int::from),
        _ => Err(Errno::ENOPROTOOPT),
    };
    zero_or_error(answer.map(|n| {
        // SAFETY: a value and length as for getsockopt(2).
        unsafe {
            if *len as usize >= size_of::<c_int>() {
                value.cast::<c_int>().write_unaligned(n);
                *len = size_of::<c_int>() as socklen_t;
            }
        }
    }))
}

/// Parses an option of setsockopt(2); `None` if it is not supported.
fn parse_socket_option(level: c_int, name: c_int, value: &[u8]) -> Option<SockOpt> {
    let int = |at: usize| {
        value
            .get(at..at + 4)
            .and_then(|b| b.try_into().ok())
            .map(i32::from_ne_bytes)
    };
    let unsigned = || int(0).and_then(|buffer| u32::try_from(buffer).ok());
    let seconds = || unsigned().map(|buffer| Duration::from_secs(buffer.into()));
    let count = || unsigned().map(|buffer| buffer.min(255) as u8);
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => Some(SockOpt::KeepAlive(int(0)? != 0)),
        (libc::SOL_SOCKET, libc::SO_RCVBUF) => Some(SockOpt::ReceiveBuffer(unsigned()?)),
        // Twice the requested size, as on Linux.
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => {
            Some(SockOpt::SendBuffer(unsigned()?.saturating_mul(2)))
        }
        (libc::SOL_SOCKET, libc::SO_LINGER) => Some(SockOpt::Linger(int(0)? != 0 && int(4)? == 0)),
        (libc::SOL_SOCKET, libc::SO_REUSEADDR | libc::SO_REUSEPORT)
        | (libc::SOL_TCP, libc::TCP_NODELAY) => Some(SockOpt::NoEffect),
        (libc::SOL_TCP, libc::TCP_KEEPIDLE) => Some(SockOpt::KeepIdle(seconds()?)),
        (libc::SOL_TCP, libc::TCP_KEEPINTVL) => Some(SockOpt::KeepInterval(seconds()?)),
        (libc::SOL_TCP, libc::TCP_KEEPCNT) => Some(SockOpt::KeepCount(count()?)),
        (libc::SOL_TCP, libc::TCP_SYNCNT) => Some(SockOpt::SynCount(count()?)),
        (libc::SOL_TCP, libc::TCP_USER_TIMEOUT) => {
            let millis = unsigned()?;
            Some(SockOpt::UserTimeout(Duration::from_millis(millis.into())))
        }
        (libc::SOL_TCP, libc::TCP_CONGESTION) => {
            let name = String::from_utf8_lossy(value);
            Some(SockOpt::Congestion(name.trim_end_matches('\0').into()))
        }
        _ => None,
    }
}

pub(super) unsafe extern "C" fn sys_setsockopt(
    userdata: UserData,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    if value.is_null() {
        return fail_with(Errno::EINVAL);
    }
    // SAFETY: a value as for setsockopt(2).
    let value = unsafe { std::slice::from_raw_parts(value.cast::<u8>(), len as usize) };
    let Some(o) = parse_socket_option(level, name, value) else {
        return fail_with(Errno::ENOPROTOOPT);
    };
    // SAFETY: our userdata.
    zero_or_error(
        unsafe { adapter_of(userdata) }
            .lock()
            .host
            .set_option(fd, o),
    )
}
