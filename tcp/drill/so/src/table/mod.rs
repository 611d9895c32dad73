//! The function table, with the layout of packetdrill's `struct packetdrill_interface`.
//!
//! Each function gets the `userdata` that `init` set, an [`Adapter`]; packetdrill calls no function after
//! `free`. Pointers and lengths are those of the system calls of the same names. The functions are
//! grouped by purpose in the files of this folder.

mod netdev;
mod readiness;
mod sockets;
mod transfer;
mod user_data;

use std::ffi::{CStr, c_char, c_int, c_longlong, c_uint, c_ulong, c_void};

use libc::{
    epoll_event, iovec, loff_t, msghdr, nfds_t, pollfd, size_t, sockaddr, socklen_t, ssize_t,
    timeval, useconds_t,
};
use siw_drill::{Setup, apply_engine_flags};

use self::user_data::UserData;
use crate::adapter::Adapter;

/// `struct packetdrill_interface`. The two variadic members take at most one argument, of register
/// size; the supported machines pass variadic arguments like others.
#[repr(C)]
pub struct Interface {
    /// First argument of every function.
    pub userdata: UserData,
    /// Frees `userdata`; the last call.
    pub free: unsafe extern "C" fn(UserData),
    /// socket(2).
    pub socket: unsafe extern "C" fn(UserData, c_int, c_int, c_int) -> c_int,
    /// bind(2).
    pub bind: unsafe extern "C" fn(UserData, c_int, *const sockaddr, socklen_t) -> c_int,
    /// listen(2).
    pub listen: unsafe extern "C" fn(UserData, c_int, c_int) -> c_int,
    /// accept(2).
    pub accept: unsafe extern "C" fn(UserData, c_int, *mut sockaddr, *mut socklen_t) -> c_int,
    /// connect(2).
    pub connect: unsafe extern "C" fn(UserData, c_int, *const sockaddr, socklen_t) -> c_int,
    /// read(2).
    pub read: unsafe extern "C" fn(UserData, c_int, *mut c_void, size_t) -> ssize_t,
    /// readv(2).
    pub readv: unsafe extern "C" fn(UserData, c_int, *const iovec, c_int) -> ssize_t,
    /// recv(2).
    pub recv: unsafe extern "C" fn(UserData, c_int, *mut c_void, size_t, c_int) -> ssize_t,
    /// recvfrom(2). The address is not written.
    #[allow(clippy::type_complexity)]
    pub recvfrom: unsafe extern "C" fn(
        UserData,
        c_int,
        *mut c_void,
        size_t,
        c_int,
        *mut sockaddr,
        *mut socklen_t,
    ) -> ssize_t,
    /// recvmsg(2), without control messages.
    pub recvmsg: unsafe extern "C" fn(UserData, c_int, *mut msghdr, c_int) -> ssize_t,
    /// write(2).
    pub write: unsafe extern "C" fn(UserData, c_int, *const c_void, size_t) -> ssize_t,
    /// writev(2).
    pub writev: unsafe extern "C" fn(UserData, c_int, *const iovec, c_int) -> ssize_t,
    /// send(2).
    pub send: unsafe extern "C" fn(UserData, c_int, *const c_void, size_t, c_int) -> ssize_t,
    /// sendto(2). The address is ignored.
    #[allow(clippy::type_complexity)]
    pub sendto: unsafe extern "C" fn(
        UserData,
        c_int,
        *const c_void,
        size_t,
        c_int,
        *const sockaddr,
        socklen_t,
    ) -> ssize_t,
    /// sendmsg(2), without control messages.
    pub sendmsg: unsafe extern "C" fn(UserData, c_int, *const msghdr, c_int) -> ssize_t,
    /// fcntl(2): F_GETFL and F_SETFL with O_NONBLOCK.
    pub fcntl: unsafe extern "C" fn(UserData, c_int, c_int, c_ulong) -> c_int,
    /// ioctl(2): SIOCINQ.
    pub ioctl: unsafe extern "C" fn(UserData, c_int, c_ulong, c_ulong) -> c_int,
    /// close(2).
    pub close: unsafe extern "C" fn(UserData, c_int) -> c_int,
    /// shutdown(2).
    pub shutdown: unsafe extern "C" fn(UserData, c_int, c_int) -> c_int,
    /// getsockopt(2): SO_ERROR, SO_SNDBUF, TCP_MAXSEG.
    pub getsockopt:
        unsafe extern "C" fn(UserData, c_int, c_int, c_int, *mut c_void, *mut socklen_t) -> c_int,
    /// setsockopt(2): the options of [`siw_drill::SockOpt`].
    pub setsockopt:
        unsafe extern "C" fn(UserData, c_int, c_int, c_int, *const c_void, socklen_t) -> c_int,
    /// poll(2).
    pub poll: unsafe extern "C" fn(UserData, *mut pollfd, nfds_t, c_int) -> c_int,
    /// Passes an IP packet to the stack.
    pub netdev_send: unsafe extern "C" fn(UserData, *const c_void, size_t) -> c_int,
    /// Receives an IP packet of the stack and its send time in microseconds. Length 0: no packet was sent
    /// for five seconds.
    pub netdev_receive:
        unsafe extern "C" fn(UserData, *mut c_void, *mut size_t, *mut c_longlong) -> c_int,
    /// usleep(3).
    pub usleep: unsafe extern "C" fn(UserData, useconds_t) -> c_int,
    /// gettimeofday(2): the time since `init`.
    pub gettimeofday: unsafe extern "C" fn(UserData, *mut timeval, *mut c_void) -> c_int,
    /// epoll_create(2).
    pub epoll_create: unsafe extern "C" fn(UserData, c_int) -> c_int,
    /// epoll_ctl(2).
    pub epoll_ctl: unsafe extern "C" fn(UserData, c_int, c_int, c_int, *mut epoll_event) -> c_int,
    /// epoll_wait(2), level-triggered.
    pub epoll_wait: unsafe extern "C" fn(UserData, c_int, *mut epoll_event, c_int, c_int) -> c_int,
    /// pipe(2): not supported.
    pub pipe: unsafe extern "C" fn(UserData, *mut c_int) -> c_int,
    /// splice(2): not supported.
    #[allow(clippy::type_complexity)]
    pub splice: unsafe extern "C" fn(
        UserData,
        c_int,
        *mut loff_t,
        c_int,
        *mut loff_t,
        size_t,
        c_uint,
    ) -> c_int,
}

/// Creates a host with the given flags and fills the table. A wrong flag ends the program with a message,
/// since the interface has no way to report an error.
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
        .any(|flag| flag.starts_with("local_ip=") && flag.contains("::"));
    let mut setup = Setup::new(v6);
    if let Err(message) = apply_engine_flags(&mut setup, &text) {
        eprintln!("--so_flags: {message}");
        std::process::exit(1);
    }
    let adapter = Box::into_raw(Box::new(Adapter::new(setup)));
    let filled = Interface {
        userdata: adapter.cast(),
        free: sockets::sys_free,
        socket: sockets::sys_socket,
        bind: sockets::sys_bind,
        listen: sockets::sys_listen,
        accept: sockets::sys_accept,
        connect: sockets::sys_connect,
        read: transfer::sys_read,
        readv: transfer::sys_readv,
        recv: transfer::sys_recv,
        recvfrom: transfer::sys_recvfrom,
        recvmsg: transfer::sys_recvmsg,
        write: transfer::sys_write,
        writev: transfer::sys_writev,
        send: transfer::sys_send,
        sendto: transfer::sys_sendto,
        sendmsg: transfer::sys_sendmsg,
        fcntl: sockets::sys_fcntl,
        ioctl: sockets::sys_ioctl,
        close: sockets::sys_close,
        shutdown: sockets::sys_shutdown,
        getsockopt: sockets::sys_getsockopt,
        setsockopt: sockets::sys_setsockopt,
        poll: readiness::sys_poll,
        netdev_send: netdev::sys_netdev_send,
        netdev_receive: netdev::sys_netdev_receive,
        usleep: netdev::sys_usleep,
        gettimeofday: netdev::sys_gettimeofday,
        epoll_create: readiness::sys_epoll_create,
        epoll_ctl: readiness::sys_epoll_ctl,
        epoll_wait: readiness::sys_epoll_wait,
        pipe: transfer::sys_pipe,
        splice: transfer::sys_splice,
    };
    // SAFETY: the caller vouches for room for the table.
    unsafe { table.write(filled) };
}
