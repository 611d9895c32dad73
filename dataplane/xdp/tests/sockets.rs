//! AF_XDP sockets on a veth pair in a network namespace of the test's thread.

use std::alloc::Layout;
use std::process::Command;
use std::ptr::NonNull;

use siw_xdp::{
    CopyMode, Error, Result, SocketConfig, SocketCounters, Umem, XdpInterface, XdpSocket,
};

fn ip(words: &str) {
    let status = Command::new("ip").args(words.split(' ')).status().unwrap();
    assert!(status.success(), "ip {words}");
}

/// Opens a socket on the only queue of an interface.
fn open_socket(interface: &str) -> Result<XdpSocket> {
    const BYTES: usize = 1 << 20;
    let layout = Layout::from_size_align(BYTES, 4096).unwrap();
    // SAFETY: the layout has a size. The memory is never freed, and only the kernel uses it.
    let umem = unsafe {
        let base = NonNull::new(std::alloc::alloc_zeroed(layout)).unwrap();
        Umem::new(base, BYTES, 4096)
    };
    let config = SocketConfig {
        rx_entries: 64,
        tx_entries: 64,
        copy_mode: CopyMode::Copy,
    };
    let interface = XdpInterface::find_by_name(interface)?;
    XdpSocket::open(&interface, 0, &umem, &config, None)
}

/// The owner of both halves frees the socket's memory after them, so that no handle may keep the socket
/// open: the kernel would write into memory that has another use.
#[test]
fn a_socket_is_closed_with_its_two_halves() {
    // SAFETY: changes the namespace of the calling thread alone.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        return println!("\nskipped: a network namespace needs CAP_SYS_ADMIN");
    }
    ip("link add veth0 type veth peer name veth1");
    ip("link set veth0 up");
    let socket = match open_socket("veth0") {
        Err(Error::Permission { what }) => return println!("\nskipped: no permission: {what}"),
        opened => opened.unwrap(),
    };
    let (receiver, sender, handle) = socket.split();
    drop(receiver);
    handle.read_counters().unwrap();
    drop(sender);
    drop(open_socket("veth0").unwrap());
    assert_eq!(handle.read_counters().unwrap(), SocketCounters::default());
}
