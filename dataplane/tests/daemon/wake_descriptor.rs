//! Descriptors that the daemon shares with a client: no thread of the daemon blocks, whatever the
//! client does with its end.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::*;
use nix::libc;
use siw::{CompletionChannel, Cq, QpInit, SendData, SendWr, Wc, WcStatus};
use siw_shm::control::ControlSocket;
use siw_shm::control::messages as m;

/// A client that has sent HELLO, and its wake descriptor of the only worker.
fn client_with_wake_descriptor(daemon: &Daemon) -> (ControlSocket, OwnedFd) {
    let conn = ControlSocket::connect_to(&daemon.socket).unwrap();
    let hello = m::ClientHello::new("wake");
    let (_, mut fds) = conn.call_and_wait(1, &hello, &[]).unwrap();
    (conn, fds.remove(3))
}

fn count_sleeps(end: &End) -> u64 {
    let stats: serde_json::Value = serde_json::from_str(&end.ctx.read_stats().unwrap()).unwrap();
    stats["workers"][0]["sleeps"].as_u64().unwrap()
}

/// Sends a message from one end to the other.
fn send_one(from: &End, to: &End, number: u64) {
    let sink = [to.mr.sge(0, 64)];
    let receive = siw::RecvWr {
        wr_id: number,
        sges: &sink,
    };
    to.qp.post_recv(&[receive]).unwrap();
    from.qp
        .post_send(&[SendWr::send(number, SendData::Inline(b"beside"))])
        .unwrap();
    for end in [to, from] {
        // Polls without the completion channel, which a test may have blocked.
        let mut completion = [Wc::default()];
        assert_eq!(end.cq.poll_spin(&mut completion, PATIENCE).unwrap(), 1);
        let [Wc { wr_id, status, .. }] = completion;
        assert_eq!((wr_id, status), (number, WcStatus::SUCCESS));
    }
}

#[test]
fn the_daemon_never_reads_what_a_client_holds() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let (_conn, wake) = client_with_wake_descriptor(&daemon);
    // One worker: its descriptor follows the three that belong to the client.
    nix::unistd::write(&wake, &5u64.to_ne_bytes()).unwrap();
    let until = Instant::now() + PATIENCE;
    let before = count_sleeps(&a);
    let mut number = 0;
    while count_sleeps(&a) < before + 3 {
        assert!(Instant::now() < until, "the worker does not sleep");
        number += 1;
        send_one(&a, &b, number);
    }
    let mut value = [0; 8];
    assert_eq!(nix::unistd::read(&wake, &mut value), Ok(8), "taken away");
    assert_eq!(u64::from_ne_bytes(value), 5);
    // The counter is full: this client's wake-ups are lost, but the daemon does not block.
    nix::unistd::write(&wake, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    send_one(&a, &b, 0);
    assert!(daemon.stop().success());
}

#[test]
fn a_client_that_races_for_its_wake_ups_blocks_nobody() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let (_conn, wake) = client_with_wake_descriptor(&daemon);
    let blocking = nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::empty());
    nix::fcntl::fcntl(&wake, blocking).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                nix::unistd::write(&wake, &1u64.to_ne_bytes()).unwrap();
                std::hint::spin_loop();
                nix::unistd::read(&wake, &mut [0; 8]).unwrap();
            }
        });
        let until = Instant::now() + Duration::from_millis(500);
        for number in 1.. {
            send_one(&a, &b, number);
            if Instant::now() > until {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(daemon.stop().success());
}

/// Memory whose first access blocks until this is dropped (userfaultfd(2)).
struct PendingPage {
    descriptor: OwnedFd,
    page: *mut libc::c_void,
}

const PAGE: usize = 4096;

impl PendingPage {
    /// Returns `None` where the system refuses it.
    fn new() -> Option<PendingPage> {
        const UFFD_API: libc::c_ulong = 0xc018_aa3f;
        const UFFD_REGISTER: libc::c_ulong = 0xc020_aa00;
        // SAFETY: plain system calls; each structure has the length encoded in its ioctl number and
        // outlives the call, and the page is a fresh mapping.
        unsafe {
            let descriptor = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) as i32;
            if descriptor < 0 {
                return None;
            }
            let descriptor = OwnedFd::from_raw_fd(descriptor);
            let mut api = [0xaau64, 0, 0];
            if libc::ioctl(descriptor.as_raw_fd(), UFFD_API, api.as_mut_ptr()) != 0 {
                return None;
            }
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let page = libc::mmap(std::ptr::null_mut(), PAGE, access, kind, -1, 0);
            let mut range = [page as u64, PAGE as u64, 1, 0];
            let registered =
                libc::ioctl(descriptor.as_raw_fd(), UFFD_REGISTER, range.as_mut_ptr()) == 0;
            registered.then_some(PendingPage { descriptor, page })
        }
    }

    /// Returns when a thread is blocked on the page.
    fn await_access(&self) {
        assert_eq!(nix::unistd::read(&self.descriptor, &mut [0; 32]), Ok(32));
    }
}

#[test]
fn a_client_that_stalls_in_a_read_of_its_channel_blocks_nobody() {
    let daemon = Daemon::loopback();
    let (a, b) = pair(&daemon, 4096);
    let pending = PendingPage::new();
    let refused = pending.is_none().then_some("userfaultfd is not permitted");
    skip_if!(refused);
    let pending = pending.unwrap();
    let (mut near, far) = (
        End::new(&daemon.context(), 4096),
        End::new(&daemon.context(), 4096),
    );
    let channel: Arc<CompletionChannel> = CompletionChannel::new(&near.ctx).unwrap();
    near.cq = Cq::new(&near.ctx, 64, Some((&channel, 7))).unwrap();
    near.qp = near
        .pd
        .create_qp(&near.cq, &near.cq, &QpInit::default())
        .unwrap();
    connect(&near, &far, "siw0", "10.77.0.2:0".parse().unwrap());
    near.cq.req_notify(false).unwrap();
    send_one(&near, &far, 1);
    std::thread::scope(|scope| {
        let (descriptor, page) = (channel.as_fd().as_raw_fd(), pending.page as usize);
        let await_event = nix::poll::PollFd::new(channel.as_fd(), nix::poll::PollFlags::POLLIN);
        nix::poll::poll(&mut [await_event], nix::poll::PollTimeout::NONE).unwrap();
        let reader = scope.spawn(move || {
            // SAFETY: the page has room for the eight bytes and stays until the scope ends.
            unsafe { libc::read(descriptor, page as *mut libc::c_void, 8) }
        });
        pending.await_access();
        near.cq.req_notify(false).unwrap();
        send_one(&near, &far, 2);
        // The worker has by now written the next event, or tried to.
        send_one(&a, &b, 1);
        drop(pending.descriptor);
        assert_eq!(reader.join().unwrap(), 8);
    });
    assert_eq!(channel.get_event(Some(PATIENCE)).unwrap(), 7);
    assert!(daemon.stop().success());
}
