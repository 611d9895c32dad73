//! Netlink sockets of programs (netlink(7)), so that siwd's devices are where programs look for RDMA devices,
//! interfaces, addresses and routes: rdma(8), ip(8), and libraries that ask for the route to a GID.
//!
//! A socket of NETLINK_RDMA becomes one of NETLINK_USERSOCK, to which any process may send: requests are
//! answered by messages that the socket sends to itself (`netlink_rdma.rs`). A socket of NETLINK_ROUTE stays
//! the kernel's: the part of siwd is put in front of the first message of a dump (`netlink_dumps.rs`).

use crate::cancel::CancelGuard;
use crate::netlink_dumps::Dump;
use crate::netlink_messages::{Messages, Request};
use crate::netlink_rdma;
use crate::next::libc_calls;
use libc::{iovec, msghdr, sockaddr, sockaddr_nl, socklen_t};
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The program has opened a netlink socket: before that, no call looks at a socket.
static IS_USED: AtomicBool = AtomicBool::new(false);

/// A number of the level SOL_SOCKET; `None` if `fd` is no socket.
pub fn socket_option(fd: c_int, option: c_int) -> Option<c_int> {
    let mut value: c_int = 0;
    let mut length = size_of::<c_int>() as socklen_t;
    let place = (&raw mut value).cast();
    // SAFETY: a number, with its length.
    let status = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, option, place, &raw mut length) };
    (status == 0).then_some(value)
}

/// The protocol of a netlink socket.
fn netlink_protocol(fd: c_int) -> Option<c_int> {
    if !IS_USED.load(Ordering::Relaxed) {
        return None;
    }
    (socket_option(fd, libc::SO_DOMAIN)? == libc::AF_NETLINK)
        .then(|| socket_option(fd, libc::SO_PROTOCOL))?
}

/// Dumps that the kernel answers and whose answer has not been read, by descriptor. An entry has the
/// descriptor plus one, and is 0 if it is free; a descriptor that takes the place of another's makes siwd's
/// part of that one's answer missing.
struct Pending {
    descriptor: AtomicU64,
    dump: AtomicU64,
}

static PENDING: [Pending; 64] = [const { Pending::free() }; 64];

impl Pending {
    const fn free() -> Pending {
        Pending {
            descriptor: AtomicU64::new(0),
            dump: AtomicU64::new(0),
        }
    }

    fn of(fd: c_int) -> &'static Pending {
        &PENDING[fd as usize % PENDING.len()]
    }

    fn key(fd: c_int) -> u64 {
        u64::from(fd as u32) + 1
    }

    fn note(fd: c_int, dump: Dump) {
        let entry = Pending::of(fd);
        entry.dump.store(dump.to_bits(), Ordering::Relaxed);
        entry.descriptor.store(Pending::key(fd), Ordering::Release);
    }

    fn find(fd: c_int) -> Option<Dump> {
        let entry = Pending::of(fd);
        let is_noted = entry.descriptor.load(Ordering::Acquire) == Pending::key(fd);
        is_noted.then(|| Dump::from_bits(entry.dump.load(Ordering::Relaxed)))
    }

    fn forget(fd: c_int) {
        let entry = Pending::of(fd);
        let _ = entry.descriptor.compare_exchange(
            Pending::key(fd),
            0,
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
    }
}

/// Number that the kernel gave a netlink socket.
fn port_of(fd: c_int) -> u32 {
    // SAFETY: the struct is made of numbers.
    let mut own: sockaddr_nl = unsafe { std::mem::zeroed() };
    let mut length = size_of::<sockaddr_nl>() as socklen_t;
    // SAFETY: an address, with its length.
    unsafe { libc::getsockname(fd, (&raw mut own).cast(), &raw mut length) };
    own.nl_pid
}

fn kernel_address() -> sockaddr_nl {
    // SAFETY: the struct is made of numbers.
    let mut address: sockaddr_nl = unsafe { std::mem::zeroed() };
    address.nl_family = libc::AF_NETLINK as libc::sa_family_t;
    address
}

/// Checks for a message to the kernel: to no address, or to its own.
///
/// # Safety
/// NULL, or valid for `length` octets.
unsafe fn goes_to_kernel(address: *const sockaddr, length: socklen_t) -> bool {
    if address.is_null() || (length as usize) < size_of::<sockaddr_nl>() {
        return address.is_null();
    }
    // SAFETY: as the caller promised.
    let address = unsafe { address.cast::<sockaddr_nl>().read_unaligned() };
    (address.nl_pid, address.nl_groups) == (0, 0)
}

/// The buffers of a message of the program. Their list may be at any address.
#[derive(Clone, Copy)]
pub struct Parts {
    list: *const iovec,
    count: usize,
}

impl Parts {
    /// Those of a message.
    pub fn of_message(message: &msghdr) -> Parts {
        Parts {
            list: message.msg_iov,
            count: if message.msg_iov.is_null() {
                0
            } else {
                message.msg_iovlen
            },
        }
    }

    /// A single one, which has to outlive the result.
    pub fn of_buffer(part: &iovec) -> Parts {
        Parts {
            list: part,
            count: 1,
        }
    }

    /// # Safety
    /// The list is valid.
    unsafe fn read(self) -> impl Iterator<Item = iovec> {
        // SAFETY: as the caller promised.
        (0..self.count).map(move |index| unsafe { self.list.add(index).read_unaligned() })
    }
}

/// Copies what a program sends.
///
/// # Safety
/// Parts of a message that may be read.
unsafe fn gather(parts: Parts) -> Vec<u8> {
    let mut octets = Vec::new();
    // SAFETY: as the caller promised.
    for part in unsafe { parts.read() }.filter(|part| part.iov_len > 0) {
        // SAFETY: as the caller promised.
        octets.extend_from_slice(unsafe {
            std::slice::from_raw_parts(part.iov_base.cast::<u8>(), part.iov_len)
        });
    }
    octets
}

/// Sends answers to the socket itself.
fn deliver(fd: c_int, answers: &Messages) {
    let mut own = kernel_address();
    own.nl_pid = port_of(fd);
    for datagram in answers.datagrams() {
        let length = size_of::<sockaddr_nl>() as socklen_t;
        // SAFETY: octets and an address, with their lengths. What does not fit is missing, as it is where
        // the kernel cannot queue a message.
        unsafe {
            libc_calls::sendto(
                fd,
                datagram.as_ptr().cast(),
                datagram.len(),
                libc::MSG_DONTWAIT,
                (&raw const own).cast(),
                length,
            )
        };
    }
}

/// Looks at what a program sends. Returns the result of the call if this library has answered it.
///
/// # Safety
/// The contract of sendmsg(2).
pub unsafe fn on_send(
    fd: c_int,
    parts: Parts,
    address: *const sockaddr,
    length: socklen_t,
) -> Option<isize> {
    let protocol = netlink_protocol(fd)?;
    // SAFETY: as the caller promised.
    if !unsafe { goes_to_kernel(address, length) } {
        return None;
    }
    let _guard = CancelGuard::new();
    // SAFETY: as the caller promised.
    let octets = unsafe { gather(parts) };
    let mut rest = &octets[..];
    match protocol {
        libc::NETLINK_USERSOCK => {
            if port_of(fd) == 0 {
                let any = kernel_address();
                let length = size_of::<sockaddr_nl>() as socklen_t;
                // SAFETY: an address, with its length: the kernel chooses the number.
                unsafe { libc_calls::bind(fd, (&raw const any).cast(), length) };
            }
            let mut answers = Messages::to_port(port_of(fd));
            while let Some(request) = Request::split_off(&mut rest) {
                netlink_rdma::answer(&request, &mut answers);
            }
            deliver(fd, &answers);
            Some(octets.len() as isize)
        }
        libc::NETLINK_ROUTE => {
            let request = Request::split_off(&mut rest)?;
            match Dump::of_request(&request) {
                Some(dump) => Pending::note(fd, dump),
                None => Pending::forget(fd),
            }
            None
        }
        _ => None,
    }
}

/// Writes octets into the parts of a message; returns the number written.
///
/// # Safety
/// Parts that may be written.
unsafe fn scatter(mut octets: &[u8], parts: Parts) -> usize {
    let mut written = 0;
    // SAFETY: as the caller promised.
    for part in unsafe { parts.read() } {
        let (now, later) = octets.split_at(octets.len().min(part.iov_len));
        if !now.is_empty() {
            // SAFETY: as the caller promised, and the part is not shorter.
            unsafe {
                part.iov_base
                    .cast::<u8>()
                    .copy_from_nonoverlapping(now.as_ptr(), now.len());
            }
        }
        written += now.len();
        octets = later;
    }
    written
}

/// Receives the first message of a dump with siwd's part in front. Returns `None` if there is none to add:
/// the call goes on as it is.
///
/// # Safety
/// The contract of recvmsg(2).
unsafe fn receive_dump(fd: c_int, message: &mut msghdr, flags: c_int) -> Option<isize> {
    let dump = Pending::find(fd)?;
    if netlink_protocol(fd) != Some(libc::NETLINK_ROUTE) {
        Pending::forget(fd);
        return None;
    }
    let look = flags | libc::MSG_PEEK | libc::MSG_TRUNC;
    // SAFETY: no buffer. A cancellation point, where nothing has to be dropped.
    let length = unsafe { libc_calls::recv(fd, null_mut(), 0, look) };
    let Ok(length) = usize::try_from(length) else {
        return Some(-1);
    };
    let _guard = CancelGuard::new();
    let added = dump.additions(port_of(fd));
    let added = added.as_octets();
    let is_peek = flags & libc::MSG_PEEK != 0;
    if added.is_empty() {
        Pending::forget(fd);
        return None;
    }
    let parts = Parts::of_message(message);
    // SAFETY: as the caller promised.
    let room: usize = unsafe { parts.read() }.map(|part| part.iov_len).sum();
    let has_room = is_peek || room >= added.len() + length;
    if !is_peek {
        Pending::forget(fd);
    }
    if !has_room && room < added.len() {
        return None;
    }
    let mut octets = added.to_vec();
    if has_room {
        let mut rest = vec![0_u8; length];
        let mut part = iovec {
            iov_base: rest.as_mut_ptr().cast(),
            iov_len: length,
        };
        let (program_iov, program_count) = (message.msg_iov, message.msg_iovlen);
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        // SAFETY: the program's message with a buffer of this function.
        let received = unsafe { libc_calls::recvmsg(fd, message, flags & !libc::MSG_TRUNC) };
        (message.msg_iov, message.msg_iovlen) = (program_iov, program_count);
        let Ok(received) = usize::try_from(received) else {
            return Some(-1);
        };
        rest.truncate(received);
        octets.append(&mut rest);
    } else {
        // The kernel's message is received next.
        if !message.msg_name.is_null() {
            let length = (message.msg_namelen as usize).min(size_of::<sockaddr_nl>());
            let kernel = kernel_address();
            // SAFETY: the program's buffer has this length.
            unsafe {
                message
                    .msg_name
                    .cast::<u8>()
                    .copy_from_nonoverlapping((&raw const kernel).cast(), length);
            }
            message.msg_namelen = size_of::<sockaddr_nl>() as socklen_t;
        }
        (message.msg_controllen, message.msg_flags) = (0, 0);
    }
    // SAFETY: as the caller promised.
    let written = unsafe { scatter(&octets, parts) };
    if written < octets.len() {
        message.msg_flags |= libc::MSG_TRUNC;
    }
    let returned = if flags & libc::MSG_TRUNC != 0 {
        octets.len()
    } else {
        written
    };
    Some(returned as isize)
}

#[unsafe(export_name = "socket")]
unsafe extern "C-unwind" fn open_socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: by the contract of the manual page.
    unsafe {
        if domain != libc::AF_NETLINK {
            return libc_calls::socket(domain, kind, protocol);
        }
        let protocol = match protocol {
            libc::NETLINK_RDMA => libc::NETLINK_USERSOCK,
            other => other,
        };
        let fd = libc_calls::socket(domain, kind, protocol);
        if fd >= 0 {
            Pending::forget(fd);
            IS_USED.store(true, Ordering::Relaxed);
        }
        fd
    }
}

#[unsafe(export_name = "send")]
unsafe extern "C-unwind" fn send(
    fd: c_int,
    from: *const c_void,
    length: usize,
    flags: c_int,
) -> isize {
    let part = iovec {
        iov_base: from.cast_mut(),
        iov_len: length,
    };
    // SAFETY: by the contract of the manual page.
    unsafe {
        match on_send(fd, Parts::of_buffer(&part), std::ptr::null(), 0) {
            Some(result) => result,
            None => libc_calls::send(fd, from, length, flags),
        }
    }
}

#[unsafe(export_name = "recvmsg")]
unsafe extern "C-unwind" fn receive_message(
    fd: c_int,
    message: *mut msghdr,
    flags: c_int,
) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe {
        if IS_USED.load(Ordering::Relaxed) && !message.is_null() {
            let mut copy = message.read_unaligned();
            if let Some(result) = receive_dump(fd, &mut copy, flags) {
                message.write_unaligned(copy);
                return result;
            }
        }
        libc_calls::recvmsg(fd, message, flags)
    }
}

#[unsafe(export_name = "recvfrom")]
unsafe extern "C-unwind" fn receive_from(
    fd: c_int,
    to: *mut c_void,
    length: usize,
    flags: c_int,
    address: *mut sockaddr,
    address_length: *mut socklen_t,
) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe {
        if IS_USED.load(Ordering::Relaxed) {
            let mut part = iovec {
                iov_base: to,
                iov_len: length,
            };
            let mut message: msghdr = std::mem::zeroed();
            (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
            if !address.is_null() && !address_length.is_null() {
                message.msg_name = address.cast();
                message.msg_namelen = address_length.read_unaligned();
            }
            if let Some(result) = receive_dump(fd, &mut message, flags) {
                if !message.msg_name.is_null() {
                    address_length.write_unaligned(message.msg_namelen);
                }
                return result;
            }
        }
        libc_calls::recvfrom(fd, to, length, flags, address, address_length)
    }
}

#[unsafe(export_name = "recv")]
unsafe extern "C-unwind" fn receive(
    fd: c_int,
    to: *mut c_void,
    length: usize,
    flags: c_int,
) -> isize {
    // SAFETY: by the contract of the manual page.
    unsafe { receive_from(fd, to, length, flags, null_mut(), null_mut()) }
}
