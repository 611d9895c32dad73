//! The table of functions, laid out as packetdrill's `struct packetdrill_interface` is.
//!
//! Each function gets the `userdata` that `init` set, an [`Adapter`]; packetdrill calls none after
//! `free`. Pointers and lengths are as the system calls of the same names have them.

use std::ffi::{CStr, c_char, c_int, c_longlong, c_uint, c_ulong, c_void};
use std::time::Duration;

use libc::{
    epoll_event, iovec, loff_t, msghdr, nfds_t, pollfd, size_t, sockaddr, socklen_t, ssize_t,
    timeval, useconds_t,
};
use siw_drill::{Errno, Setup, Shutdown, SockOpt, engine_flags};

use crate::adapter::Adapter;
use crate::address;

type Data = *mut c_void;

/// `struct packetdrill_interface`. The two variadic members take one argument of a register's
/// size at most; variadic arguments are passed as others are on the machines of this project.
#[repr(C)]
pub struct Interface {
    pub userdata: Data,
    pub free: unsafe extern "C" fn(Data),
    pub socket: unsafe extern "C" fn(Data, c_int, c_int, c_int) -> c_int,
    pub bind: unsafe extern "C" fn(Data, c_int, *const sockaddr, socklen_t) -> c_int,
    pub listen: unsafe extern "C" fn(Data, c_int, c_int) -> c_int,
    pub accept: unsafe extern "C" fn(Data, c_int, *mut sockaddr, *mut socklen_t) -> c_int,
    pub connect: unsafe extern "C" fn(Data, c_int, *const sockaddr, socklen_t) -> c_int,
    pub read: unsafe extern "C" fn(Data, c_int, *mut c_void, size_t) -> ssize_t,
    pub readv: unsafe extern "C" fn(Data, c_int, *const iovec, c_int) -> ssize_t,
    pub recv: unsafe extern "C" fn(Data, c_int, *mut c_void, size_t, c_int) -> ssize_t,
    #[allow(clippy::type_complexity)]
    pub recvfrom: unsafe extern "C" fn(
        Data,
        c_int,
        *mut c_void,
        size_t,
        c_int,
        *mut sockaddr,
        *mut socklen_t,
    ) -> ssize_t,
    pub recvmsg: unsafe extern "C" fn(Data, c_int, *mut msghdr, c_int) -> ssize_t,
    pub write: unsafe extern "C" fn(Data, c_int, *const c_void, size_t) -> ssize_t,
    pub writev: unsafe extern "C" fn(Data, c_int, *const iovec, c_int) -> ssize_t,
    pub send: unsafe extern "C" fn(Data, c_int, *const c_void, size_t, c_int) -> ssize_t,
    #[allow(clippy::type_complexity)]
    pub sendto: unsafe extern "C" fn(
        Data,
        c_int,
        *const c_void,
        size_t,
        c_int,
        *const sockaddr,
        socklen_t,
    ) -> ssize_t,
    pub sendmsg: unsafe extern "C" fn(Data, c_int, *const msghdr, c_int) -> ssize_t,
    pub fcntl: unsafe extern "C" fn(Data, c_int, c_int, c_ulong) -> c_int,
    pub ioctl: unsafe extern "C" fn(Data, c_int, c_ulong, c_ulong) -> c_int,
    pub close: unsafe extern "C" fn(Data, c_int) -> c_int,
    pub shutdown: unsafe extern "C" fn(Data, c_int, c_int) -> c_int,
    pub getsockopt:
        unsafe extern "C" fn(Data, c_int, c_int, c_int, *mut c_void, *mut socklen_t) -> c_int,
    pub setsockopt:
        unsafe extern "C" fn(Data, c_int, c_int, c_int, *const c_void, socklen_t) -> c_int,
    pub poll: unsafe extern "C" fn(Data, *mut pollfd, nfds_t, c_int) -> c_int,
    pub netdev_send: unsafe extern "C" fn(Data, *const c_void, size_t) -> c_int,
    pub netdev_receive:
        unsafe extern "C" fn(Data, *mut c_void, *mut size_t, *mut c_longlong) -> c_int,
    pub usleep: unsafe extern "C" fn(Data, useconds_t) -> c_int,
    pub gettimeofday: unsafe extern "C" fn(Data, *mut timeval, *mut c_void) -> c_int,
    pub epoll_create: unsafe extern "C" fn(Data, c_int) -> c_int,
    pub epoll_ctl: unsafe extern "C" fn(Data, c_int, c_int, c_int, *mut epoll_event) -> c_int,
    pub epoll_wait: unsafe extern "C" fn(Data, c_int, *mut epoll_event, c_int, c_int) -> c_int,
    pub pipe: unsafe extern "C" fn(Data, *mut c_int) -> c_int,
    #[allow(clippy::type_complexity)]
    pub splice:
        unsafe extern "C" fn(Data, c_int, *mut loff_t, c_int, *mut loff_t, size_t, c_uint) -> c_int,
}

/// Fills the table. Flags that are not understood end the program with a message: packetdrill has
/// no way to be told.
///
/// # Safety
/// `flags` is null or a string; `table` points to a `struct packetdrill_interface`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn packetdrill_interface_init(flags: *const c_char, table: *mut Interface) {
    let text = if flags.is_null() {
        String::new()
    } else {
        // SAFETY: the caller vouches for a string.
        unsafe { CStr::from_ptr(flags) }
            .to_string_lossy()
            .into_owned()
    };
    let v6 = text
        .split_whitespace()
        .any(|f| f.starts_with("local_ip=") && f.contains("::"));
    let mut setup = Setup::new(v6);
    if let Err(e) = engine_flags(&mut setup, &text) {
        eprintln!("--so_flags: {e}");
        std::process::exit(1);
    }
    let adapter = Box::into_raw(Box::new(Adapter::new(setup)));
    let filled = Interface {
        userdata: adapter.cast(),
        free,
        socket,
        bind,
        listen,
        accept,
        connect,
        read,
        readv,
        recv,
        recvfrom,
        recvmsg,
        write,
        writev,
        send,
        sendto,
        sendmsg,
        fcntl,
        ioctl,
        close,
        shutdown,
        getsockopt,
        setsockopt,
        poll,
        netdev_send,
        netdev_receive,
        usleep,
        gettimeofday,
        epoll_create,
        epoll_ctl,
        epoll_wait,
        pipe,
        splice,
    };
    // SAFETY: the caller vouches for room for the table.
    unsafe { table.write(filled) };
}

/// The adapter behind `userdata`.
///
/// # Safety
/// `d` is what `packetdrill_interface_init` set, and `free` has not been called.
unsafe fn of<'a>(d: Data) -> &'a Adapter {
    // SAFETY: the caller vouches for it; only shared references to the adapter exist.
    unsafe { &*d.cast::<Adapter>() }
}

fn fail(e: Errno) -> c_int {
    // SAFETY: the location of this thread's errno is always writable.
    unsafe { *libc::__errno_location() = e.0 };
    -1
}

fn unit(r: Result<(), Errno>) -> c_int {
    r.map_or_else(fail, |()| 0)
}

fn size(r: Result<usize, Errno>) -> ssize_t {
    r.map_or_else(|e| fail(e) as ssize_t, |n| n as ssize_t)
}

unsafe extern "C" fn free(d: Data) {
    // SAFETY: `d` came from Box::into_raw, and this is the last call with it.
    drop(unsafe { Box::from_raw(d.cast::<Adapter>()) });
}

unsafe extern "C" fn socket(d: Data, domain: c_int, kind: c_int, _protocol: c_int) -> c_int {
    let plain = kind & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
    if plain != libc::SOCK_STREAM || (domain != libc::AF_INET && domain != libc::AF_INET6) {
        return fail(Errno::EAFNOSUPPORT);
    }
    // SAFETY: packetdrill passes our userdata.
    let mut s = unsafe { of(d) }.lock();
    let fd = s.host.socket(domain == libc::AF_INET6);
    s.flags.insert(fd, kind & libc::SOCK_NONBLOCK);
    fd
}

unsafe extern "C" fn bind(d: Data, fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: our userdata; an address as for bind(2).
    let (a, to) = unsafe { (of(d), address::read(addr, len)) };
    unit(to.and_then(|to| a.lock().bind(fd, to)))
}

unsafe extern "C" fn listen(d: Data, fd: c_int, backlog: c_int) -> c_int {
    // SAFETY: our userdata.
    unit(unsafe { of(d) }.lock().host.listen(fd, backlog))
}

unsafe extern "C" fn accept(d: Data, fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: our userdata.
    match unsafe { of(d) }.wait(fd, |s| s.host.accept(fd)) {
        Ok((new, remote)) => {
            // SAFETY: an address as for accept(2).
            unsafe { address::write(remote, addr, len) };
            new
        }
        Err(e) => fail(e),
    }
}

unsafe extern "C" fn connect(d: Data, fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: our userdata; an address as for connect(2).
    let (a, to) = unsafe { (of(d), address::read(addr, len)) };
    unit(to.and_then(|to| a.wait(fd, |s| s.host.connect(fd, to))))
}

/// A buffer that should hold something is nowhere.
fn lacks_memory(iov: &[iovec]) -> bool {
    iov.iter().any(|v| v.iov_base.is_null() && v.iov_len > 0)
}

/// # Safety
/// `iov` points to `n` buffers as for readv(2).
unsafe fn receive(d: Data, fd: c_int, iov: &[iovec], flags: c_int) -> ssize_t {
    // SAFETY: our userdata.
    let a = unsafe { of(d) };
    if lacks_memory(iov) {
        return fail(Errno::EFAULT) as ssize_t;
    }
    let room = iov.iter().map(|v| v.iov_len).sum();
    let read = |s: &mut crate::adapter::State| s.host.read(fd, room);
    let got = if flags & libc::MSG_DONTWAIT != 0 {
        read(&mut a.lock())
    } else {
        a.wait(fd, read)
    };
    size(got.map(|data| {
        let mut left = &data[..];
        for v in iov {
            let n = left.len().min(v.iov_len);
            // SAFETY: the caller vouches for `iov_len` writable bytes, of which `n` are written.
            unsafe { std::ptr::copy_nonoverlapping(left.as_ptr(), v.iov_base.cast(), n) };
            left = &left[n..];
        }
        data.len()
    }))
}

/// # Safety
/// `iov` has buffers as for writev(2).
unsafe fn transmit(d: Data, fd: c_int, iov: &[iovec], flags: c_int) -> ssize_t {
    // SAFETY: our userdata.
    let a = unsafe { of(d) };
    if lacks_memory(iov) {
        return fail(Errno::EFAULT) as ssize_t;
    }
    let mut data = vec![];
    for v in iov.iter().filter(|v| v.iov_len > 0) {
        // SAFETY: the caller vouches for `iov_len` readable bytes.
        data.extend_from_slice(unsafe { std::slice::from_raw_parts(v.iov_base.cast(), v.iov_len) });
    }
    // A call that may wait returns when all is taken, others with what there is room for now.
    let mut taken = 0;
    loop {
        let write = |s: &mut crate::adapter::State| s.host.write(fd, &data[taken..]);
        let more = if flags & libc::MSG_DONTWAIT != 0 {
            write(&mut a.lock())
        } else {
            a.wait(fd, write)
        };
        match more {
            Err(_) if taken > 0 => return taken as ssize_t,
            Err(e) => return fail(e) as ssize_t,
            Ok(n) => taken += n,
        }
        if taken == data.len() {
            return taken as ssize_t;
        }
    }
}

/// # Safety
/// `iov` points to `n` entries, or `n` is 0.
unsafe fn vector<'a>(iov: *const iovec, n: usize) -> &'a [iovec] {
    if n == 0 {
        return &[];
    }
    // SAFETY: the caller vouches for `n` entries.
    unsafe { std::slice::from_raw_parts(iov, n) }
}

fn one(buf: *const c_void, len: size_t) -> [iovec; 1] {
    [iovec {
        iov_base: buf.cast_mut(),
        iov_len: len,
    }]
}

unsafe extern "C" fn read(d: Data, fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t {
    // SAFETY: our userdata; a buffer as for read(2).
    unsafe { receive(d, fd, &one(buf, len), 0) }
}

unsafe extern "C" fn readv(d: Data, fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
    // SAFETY: our userdata; buffers as for readv(2).
    unsafe { receive(d, fd, vector(iov, n.max(0) as usize), 0) }
}

unsafe extern "C" fn recv(
    d: Data,
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: our userdata; a buffer as for recv(2).
    unsafe { receive(d, fd, &one(buf, len), flags) }
}

unsafe extern "C" fn recvfrom(
    d: Data,
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    flags: c_int,
    _addr: *mut sockaddr,
    _addr_len: *mut socklen_t,
) -> ssize_t {
    // SAFETY: our userdata; a buffer as for recvfrom(2).
    unsafe { receive(d, fd, &one(buf, len), flags) }
}

unsafe extern "C" fn recvmsg(d: Data, fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: our userdata; a message as for recvmsg(2).
    unsafe { receive(d, fd, vector((*msg).msg_iov, (*msg).msg_iovlen), flags) }
}

unsafe extern "C" fn write(d: Data, fd: c_int, buf: *const c_void, len: size_t) -> ssize_t {
    // SAFETY: our userdata; a buffer as for write(2).
    unsafe { transmit(d, fd, &one(buf, len), 0) }
}

unsafe extern "C" fn writev(d: Data, fd: c_int, iov: *const iovec, n: c_int) -> ssize_t {
    // SAFETY: our userdata; buffers as for writev(2).
    unsafe { transmit(d, fd, vector(iov, n.max(0) as usize), 0) }
}

unsafe extern "C" fn send(
    d: Data,
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: our userdata; a buffer as for send(2).
    unsafe { transmit(d, fd, &one(buf, len), flags) }
}

unsafe extern "C" fn sendto(
    d: Data,
    fd: c_int,
    buf: *const c_void,
    len: size_t,
    flags: c_int,
    _addr: *const sockaddr,
    _addr_len: socklen_t,
) -> ssize_t {
    // SAFETY: our userdata; a buffer as for sendto(2).
    unsafe { transmit(d, fd, &one(buf, len), flags) }
}

unsafe extern "C" fn sendmsg(d: Data, fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: our userdata; a message as for sendmsg(2).
    unsafe { transmit(d, fd, vector((*msg).msg_iov, (*msg).msg_iovlen), flags) }
}

unsafe extern "C" fn fcntl(d: Data, fd: c_int, command: c_int, arg: c_ulong) -> c_int {
    // SAFETY: our userdata.
    let mut s = unsafe { of(d) }.lock();
    match command {
        libc::F_GETFL => s.flags.get(&fd).map_or(libc::O_RDWR, |f| f | libc::O_RDWR),
        libc::F_SETFL => {
            s.flags.insert(fd, arg as c_int & libc::O_NONBLOCK);
            0
        }
        _ => fail(Errno::EINVAL),
    }
}

unsafe extern "C" fn ioctl(d: Data, fd: c_int, request: c_ulong, arg: c_ulong) -> c_int {
    // SIOCINQ has this number, too.
    if request != libc::FIONREAD {
        return fail(Errno::EINVAL);
    }
    // SAFETY: our userdata.
    let unread = unsafe { of(d) }.lock().host.unread(fd);
    unit(unread.map(|n| {
        // SAFETY: FIONREAD's argument points to an int that is written.
        unsafe { (arg as *mut c_int).write_unaligned(n as c_int) };
    }))
}

unsafe extern "C" fn close(d: Data, fd: c_int) -> c_int {
    // SAFETY: our userdata.
    let mut s = unsafe { of(d) }.lock();
    s.flags.remove(&fd);
    if s.epolls.remove(&fd).is_some() {
        return 0;
    }
    s.epolls.values_mut().for_each(|e| {
        e.remove(&fd);
    });
    unit(s.host.close(fd))
}

unsafe extern "C" fn shutdown(d: Data, fd: c_int, how: c_int) -> c_int {
    let how = match how {
        libc::SHUT_RD => Shutdown::Read,
        libc::SHUT_WR => Shutdown::Write,
        libc::SHUT_RDWR => Shutdown::Both,
        _ => return fail(Errno::EINVAL),
    };
    // SAFETY: our userdata.
    unit(unsafe { of(d) }.lock().host.shutdown(fd, how))
}

unsafe extern "C" fn getsockopt(
    d: Data,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    // SAFETY: our userdata.
    let mut s = unsafe { of(d) }.lock();
    let answer = match (level, name) {
        (libc::SOL_SOCKET, libc::SO_ERROR) => s.host.take_error(fd).map(|e| e.map_or(0, |e| e.0)),
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => Ok(s.host.send_buffer() as c_int),
        (libc::SOL_TCP, libc::TCP_MAXSEG) => s.host.mss(fd).map(c_int::from),
        _ => Err(Errno::ENOPROTOOPT),
    };
    unit(answer.map(|n| {
        // SAFETY: a value and length as for getsockopt(2).
        unsafe {
            if *len as usize >= size_of::<c_int>() {
                value.cast::<c_int>().write_unaligned(n);
                *len = size_of::<c_int>() as socklen_t;
            }
        }
    }))
}

fn option(level: c_int, name: c_int, value: &[u8]) -> Option<SockOpt> {
    let int = |at: usize| {
        value
            .get(at..at + 4)
            .and_then(|b| b.try_into().ok())
            .map(i32::from_ne_bytes)
    };
    let unsigned = || int(0).and_then(|v| u32::try_from(v).ok());
    let seconds = || unsigned().map(|v| Duration::from_secs(v.into()));
    let count = || unsigned().map(|v| v.min(255) as u8);
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => Some(SockOpt::KeepAlive(int(0)? != 0)),
        (libc::SOL_SOCKET, libc::SO_RCVBUF) => Some(SockOpt::ReceiveBuffer(unsigned()?)),
        // Twice what is asked for, as on Linux.
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => {
            Some(SockOpt::SendBuffer(unsigned()?.saturating_mul(2)))
        }
        (libc::SOL_SOCKET, libc::SO_LINGER) => Some(SockOpt::Linger(int(0)? != 0 && int(4)? == 0)),
        (libc::SOL_SOCKET, libc::SO_REUSEADDR | libc::SO_REUSEPORT)
        | (libc::SOL_TCP, libc::TCP_NODELAY) => Some(SockOpt::Harmless),
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

unsafe extern "C" fn setsockopt(
    d: Data,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    if value.is_null() {
        return fail(Errno::EINVAL);
    }
    // SAFETY: a value as for setsockopt(2).
    let value = unsafe { std::slice::from_raw_parts(value.cast::<u8>(), len as usize) };
    let Some(o) = option(level, name, value) else {
        return fail(Errno::ENOPROTOOPT);
    };
    // SAFETY: our userdata.
    unit(unsafe { of(d) }.lock().host.set_option(fd, o))
}

unsafe extern "C" fn poll(d: Data, fds: *mut pollfd, n: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: our userdata; entries as for poll(2), used by nobody else during the call.
    let (a, fds) = unsafe { (of(d), std::slice::from_raw_parts_mut(fds, n as usize)) };
    let always = libc::POLLERR | libc::POLLHUP;
    let found = a.wait_for(timeout, |s| {
        let mut count = 0;
        for f in fds.iter_mut() {
            f.revents = match s.events(f.fd) {
                Ok(e) => e as i16 & (f.events | always),
                Err(_) => libc::POLLNVAL,
            };
            count += c_int::from(f.revents != 0);
        }
        Ok((count > 0).then_some(count))
    });
    found.map_or_else(fail, |n| n.unwrap_or(0))
}

unsafe extern "C" fn netdev_send(d: Data, buf: *const c_void, len: size_t) -> c_int {
    // SAFETY: our userdata; `len` readable bytes.
    let (a, packet) = unsafe { (of(d), std::slice::from_raw_parts(buf.cast::<u8>(), len)) };
    a.lock().host.receive(packet);
    0
}

unsafe extern "C" fn netdev_receive(
    d: Data,
    buf: *mut c_void,
    len: *mut size_t,
    micros: *mut c_longlong,
) -> c_int {
    // SAFETY: our userdata.
    let got = unsafe { of(d) }.receive();
    // SAFETY: `*len` writable bytes at `buf`, and places for the length and the time.
    unsafe {
        let Some((at, packet)) = got else {
            *len = 0;
            return 0;
        };
        let n = packet.len().min(*len);
        std::ptr::copy_nonoverlapping(packet.as_ptr(), buf.cast(), n);
        *len = n;
        *micros = at;
    }
    0
}

unsafe extern "C" fn usleep(_d: Data, micros: useconds_t) -> c_int {
    std::thread::sleep(Duration::from_micros(micros.into()));
    0
}

unsafe extern "C" fn gettimeofday(d: Data, tv: *mut timeval, _zone: *mut c_void) -> c_int {
    // SAFETY: our userdata; room for the time.
    unsafe {
        let now = of(d).micros();
        (*tv).tv_sec = now / 1_000_000;
        (*tv).tv_usec = now % 1_000_000;
    }
    0
}

unsafe extern "C" fn epoll_create(d: Data, _size: c_int) -> c_int {
    // SAFETY: our userdata.
    unsafe { of(d) }.epoll_create()
}

unsafe extern "C" fn epoll_ctl(
    d: Data,
    epoll: c_int,
    op: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    // SAFETY: our userdata.
    let mut s = unsafe { of(d) }.lock();
    let Some(interest) = s.epolls.get_mut(&epoll) else {
        return fail(Errno::EBADF);
    };
    if op == libc::EPOLL_CTL_DEL {
        interest.remove(&fd);
    } else {
        // SAFETY: an event as for epoll_ctl(2).
        let e = unsafe { event.read_unaligned() };
        interest.insert(fd, (e.events, e.u64));
    }
    0
}

unsafe extern "C" fn epoll_wait(
    d: Data,
    epoll: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: c_int,
) -> c_int {
    // SAFETY: our userdata.
    let found = unsafe { of(d) }.wait_for(timeout, |s| {
        let interest = s.epolls.get(&epoll).cloned().ok_or(Errno::EBADF)?;
        let always = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
        let mut all = vec![];
        for (fd, (wanted, data)) in interest {
            // The bits of poll and epoll are the same.
            let got = s.events(fd)? as u32 & (wanted | always);
            if got != 0 {
                all.push(epoll_event {
                    events: got,
                    u64: data,
                });
            }
        }
        Ok((!all.is_empty()).then_some(all))
    });
    match found {
        Ok(all) => {
            let all = all.unwrap_or_default();
            let n = all.len().min(max.max(0) as usize);
            for (i, e) in all.into_iter().take(n).enumerate() {
                // SAFETY: room for `max` events, of which `n` are written.
                unsafe { events.add(i).write_unaligned(e) };
            }
            n as c_int
        }
        Err(e) => fail(e),
    }
}

unsafe extern "C" fn pipe(_d: Data, _fds: *mut c_int) -> c_int {
    fail(Errno::EOPNOTSUPP)
}

unsafe extern "C" fn splice(
    _d: Data,
    _from: c_int,
    _from_at: *mut loff_t,
    _to: c_int,
    _to_at: *mut loff_t,
    _len: size_t,
    _flags: c_uint,
) -> c_int {
    fail(Errno::EOPNOTSUPP)
}
