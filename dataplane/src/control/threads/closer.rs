//! Closes sockets of clients where nobody waits for it.
//!
//! A client can set SO_LINGER on a socket and send it to the daemon: the close of the last reference
//! then takes as long as the client likes, except in a thread that exits, for which the kernel does not
//! wait (PF_EXITING in `inet_release`). So such sockets go to a thread that has a table of descriptors
//! of its own since the start of the daemon. It copies this table for a short-lived thread, closes the
//! sockets itself, and the exit of the other thread closes the last references. No table has
//! descriptors of anything else: whatever a close does, it keeps no memory and no other socket.
//!
//! The daemon gives a reference, closes its own, and then lets the thread close: the other way round the
//! daemon's own close could be the last.

use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use nix::sched::{CloneFlags, unshare};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};

/// Sockets that share a short-lived thread.
const AT_ONCE: usize = 64;

/// The thread that closes sockets. Without it they are closed like other descriptors.
#[derive(Clone)]
pub struct Closer(Option<Arc<Channel>>);

/// The way to the thread. A message has the number of a reference, and a descriptor for a new one.
struct Channel {
    to: OwnedFd,
    next: AtomicU64,
}

/// A reference of a socket that the thread holds, and closes when this is dropped.
pub(in crate::control) struct HeldReference {
    channel: Arc<Channel>,
    number: u64,
}

impl Drop for HeldReference {
    fn drop(&mut self) {
        // If it fails, the thread has ended with the process.
        let _ = self.channel.send(self.number, &[]);
    }
}

impl Closer {
    /// Starts the thread. Its table has the descriptors that the process has now, and keeps their files
    /// open: call this first.
    pub fn start() -> Closer {
        let started = start_thread();
        if let Err(error) = &started {
            tracing::debug!("no thread with descriptors of its own: {error}");
        }
        Closer(started.ok().map(|to| {
            let next = AtomicU64::new(0);
            Arc::new(Channel { to, next })
        }))
    }

    /// Gives the thread a reference of a socket, so that no close of the caller is the last one until the
    /// result is dropped. Returns `None` if that is impossible.
    pub(in crate::control) fn hold(&self, socket: BorrowedFd<'_>) -> Option<HeldReference> {
        let channel = self.0.as_ref()?.clone();
        let number = channel.next.fetch_add(1, Ordering::Relaxed);
        // ETOOMANYREFS: it holds sockets that hold sockets.
        channel.send(number, &[socket]).ok()?;
        Some(HeldReference { channel, number })
    }
}

impl Channel {
    fn send(&self, number: u64, sockets: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut message = SendAncillaryBuffer::new(&mut space);
        if !sockets.is_empty() {
            message.push(SendAncillaryMessage::ScmRights(sockets));
        }
        let bytes = number.to_ne_bytes();
        rustix::io::retry_on_intr(|| {
            let bytes = [IoSlice::new(&bytes)];
            rustix::net::sendmsg(&self.to, &bytes, &mut message, SendFlags::NOSIGNAL).map(drop)
        })
    }
}

fn start_thread() -> std::io::Result<OwnedFd> {
    let (to, from) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let from = Arc::new(from);
    let (report, started) = mpsc::channel();
    let copied = from.clone();
    std::thread::Builder::new()
        .name("siwd-closer".into())
        .spawn(move || {
            let own = unshare(CloneFlags::CLONE_FILES)
                .map_err(std::io::Error::from)
                .and_then(|()| copied.try_clone());
            // The other thread has to drop the last one: only it closes the number in the first table.
            drop(copied);
            match own {
                Ok(from) => {
                    let _ = report.send(Ok(()));
                    close_all(&from);
                }
                Err(error) => {
                    let _ = report.send(Err(error));
                }
            }
        })?;
    let ended = || std::io::Error::other("the thread has ended");
    started.recv().map_err(|_| ended())??;
    drop(from);
    Ok(to)
}

/// Closes what it may, until the process ends.
fn close_all(from: &OwnedFd) {
    let (mut held, mut closing) = (HashMap::new(), Vec::new());
    while receive(from, RecvFlags::empty(), &mut held, &mut closing) {
        while closing.len() < AT_ONCE && receive(from, RecvFlags::DONTWAIT, &mut held, &mut closing)
        {
        }
        if closing.is_empty() {
            continue;
        }
        let exiting = loop {
            if let Some(exiting) = start_exiting_thread() {
                break exiting;
            }
            // The machine has no room for another thread. The sockets wait, because a close here could
            // take minutes for each.
            std::thread::sleep(Duration::from_millis(100));
        };
        closing.clear();
        drop(exiting);
    }
}

/// Receives a reference to hold, or lets one be closed. Returns false if there is no message now, or the
/// other end is closed.
fn receive(
    from: &OwnedFd,
    flags: RecvFlags,
    held: &mut HashMap<u64, OwnedFd>,
    closing: &mut Vec<OwnedFd>,
) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = RecvAncillaryBuffer::new(&mut space);
    let mut number = [0; size_of::<u64>()];
    let received = rustix::io::retry_on_intr(|| {
        let bytes = &mut [IoSliceMut::new(&mut number)];
        rustix::net::recvmsg(from, bytes, &mut message, flags | RecvFlags::CMSG_CLOEXEC)
    });
    if !received.is_ok_and(|got| got.bytes > 0) {
        return false;
    }
    let number = u64::from_ne_bytes(number);
    let mut is_new = false;
    for part in message.drain() {
        if let RecvAncillaryMessage::ScmRights(sockets) = part {
            is_new = true;
            for socket in sockets {
                held.insert(number, socket);
            }
        }
    }
    if !is_new {
        closing.extend(held.remove(&number));
    }
    true
}

/// Starts a thread with copies of this thread's descriptors, which exits when the result is dropped.
fn start_exiting_thread() -> Option<mpsc::Sender<()>> {
    let (has_copies, copied) = mpsc::channel();
    let (exits, may_exit) = mpsc::channel::<()>();
    let started = std::thread::Builder::new()
        .name("siwd-closing".into())
        .spawn(move || {
            let copies = unshare(CloneFlags::CLONE_FILES);
            let _ = has_copies.send(copies.is_ok());
            // Ends when the other side is dropped.
            let _ = may_exit.recv();
        });
    started.ok()?;
    (copied.recv() == Ok(true)).then_some(exits)
}

/// True if a descriptor is a socket.
pub(in crate::control) fn is_socket(fd: impl AsFd) -> bool {
    rustix::net::sockopt::socket_type(fd).is_ok()
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::os::linux::fs::MetadataExt;

    use siw_shm::SharedMemory;
    use siw_shm::shared_memory::PageSize;

    use super::*;

    /// A connection that lingers for an hour at its close, because its peer reads nothing.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let lingering = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        rustix::net::sockopt::set_socket_linger(&lingering, Some(Duration::from_secs(3600)))
            .unwrap();
        lingering.set_nonblocking(true).unwrap();
        let data = vec![0; 1 << 20];
        while rustix::io::write(&lingering, &data).is_ok() {}
        (lingering, peer)
    }

    /// Runs the test below in a process of its own, whose other threads have no descriptors.
    #[test]
    fn sockets_close_where_they_delay_and_keep_nothing() {
        let name = "control::threads::closer::tests::helper_that_closes";
        let run = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--ignored", "--nocapture"])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&run.stdout);
        let failed = String::from_utf8_lossy(&run.stderr);
        assert!(said.contains("1 passed"), "{said}{failed}");
    }

    #[test]
    #[ignore = "the process of the test above"]
    fn helper_that_closes() {
        let closer = Closer::start();
        let memory = SharedMemory::create_memfd("kept", 4096, PageSize::Normal).unwrap();
        let pairs: Vec<_> = (0..AT_ONCE + 10).map(|_| lingering()).collect();
        let mut peers: Vec<_> = pairs
            .into_iter()
            .map(|(lingering, peer)| {
                assert!(is_socket(&lingering));
                let held = closer.hold(lingering.as_fd()).unwrap();
                // The thread may run first: it closes nothing yet.
                std::thread::yield_now();
                drop(lingering);
                drop(held);
                peer
            })
            .collect();
        check_other_tables(&memory);
        // Each peer reads to the end, the last one first: no close waits for another one.
        while let Some(mut peer) = peers.pop() {
            std::io::copy(&mut peer, &mut std::io::sink()).unwrap();
        }
        assert!(!is_socket(memory.memfd().unwrap()));
        check_other_tables(&memory);
    }

    /// Checks that no table of the closing threads has the file.
    fn check_other_tables(memory: &SharedMemory) {
        let fd = memory.memfd().unwrap();
        let inode = rustix::fs::fstat(fd).unwrap().st_ino;
        let own = format!("/proc/thread-self/fd/{}", fd.as_raw_fd());
        assert_eq!(std::fs::metadata(own).unwrap().st_ino(), inode);
        let mut seen = 0;
        for thread in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
            let name = std::fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
            // A thread that has exited meanwhile has no table.
            let Ok(table) = std::fs::read_dir(thread.path().join("fd")) else {
                continue;
            };
            if !name.starts_with("siwd-clos") {
                continue;
            }
            seen += 1;
            for entry in table.flatten() {
                let found = std::fs::metadata(entry.path()).map(|file| file.st_ino());
                assert_ne!(found.unwrap_or_default(), inode, "{}", name.trim());
            }
        }
        assert!(seen > 0, "the thread has another name");
    }
}
