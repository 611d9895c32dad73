//! A link that loses, delays, reorders and duplicates frames, driven by a seed: a netem for kernels
//! without it. It lies between two veth pairs, in a namespace of its own.
//!
//! ```text
//!  siw-stream - veth0 ~ veth1 - forwarder - veth2 ~ veth3 - Linux
//! ```

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::socket::{LinkAddr, MsgFlags, recvfrom, send, setsockopt, sockopt};
use nix::sys::time::TimeSpec;

use super::net::Netns;
use super::raw::packet_socket;

/// Length in octets above which a frame carries data.
const LONG_FRAME: usize = 1000;

/// Impairments of the link, the same in both directions. Probabilities are in parts of 1000.
#[derive(Debug, Clone, Copy, Default)]
pub struct Impairment {
    pub seed: u64,
    pub delay: Duration,
    /// Probability of a loss, which takes the next `burst` frames too.
    pub loss: u32,
    pub burst: u32,
    pub duplicate: u32,
    /// Probability of a frame delayed by `lateness` more than `delay`.
    pub late: u32,
    pub lateness: Duration,
    /// Frames from Linux get this 802.1Q tag; the kernel removes the tag from siwd's frames.
    pub vlan: Option<u16>,
}

/// Counters of the link, both directions together.
#[derive(Debug, Default)]
pub struct Counts {
    pub passed: AtomicU64,
    pub lost: AtomicU64,
    pub late: AtomicU64,
    pub doubled: AtomicU64,
}

impl Counts {
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}

/// The forwarder, which ends when this is dropped.
pub struct ImpairedLink {
    /// Namespace of the endpoints: `veth0` for `siw-stream`, `veth3` with Linux's addresses.
    pub ns: Netns,
    pub counts: Arc<Counts>,
    /// Frames longer than [`LONG_FRAME`] that are still to be lost.
    to_lose: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
    _middle: Netns,
}

impl ImpairedLink {
    pub fn new(mtu: u32, how: Impairment) -> ImpairedLink {
        let (ns, middle) = (Netns::new(), Netns::new());
        for (a, b) in [("veth0", "veth1"), ("veth3", "veth2")] {
            ns.ip(&format!(
                "link add {a} mtu {mtu} type veth peer name {b} mtu {mtu}"
            ));
            for end in [a, b] {
                ns.command(
                    "ethtool",
                    &format!("-K {end} tso off gso off gro off rx off tx off"),
                );
                ns.ip(&format!("link set {end} addrgenmode none"));
            }
            ns.give(b, &middle);
        }
        ns.ip("link set veth0 up arp off");
        ns.ip("link set veth3 up");
        ns.address("veth3", "10.77.0.2/24");
        ns.address("veth3", "fd77::2/64");
        let (counts, to_lose, over) = (
            Arc::new(Counts::default()),
            Arc::new(AtomicU64::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let ends = ["veth1", "veth2"].map(|i| Arc::new(packet_socket(&middle, i)));
        for e in &ends {
            fcntl(&**e, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
            let _ = setsockopt(e, sockopt::RcvBufForce, &(16 << 20));
        }
        let threads = [(0, 1), (1, 0)]
            .map(|(from, to)| {
                let direction = Direction {
                    from: ends[from].clone(),
                    to: ends[to].clone(),
                    how,
                    tag: how.vlan.filter(|_| from == 1),
                    random: how.seed.wrapping_mul(2) + from as u64 + 0x9e37_79b9,
                    dropping: 0,
                    waiting: BinaryHeap::new(),
                    number: 0,
                    counts: counts.clone(),
                    to_lose: to_lose.clone(),
                };
                let over = over.clone();
                std::thread::spawn(move || direction.run(&over))
            })
            .into();
        ImpairedLink {
            ns,
            counts,
            to_lose,
            over,
            threads,
            _middle: middle,
        }
    }

    /// Loses the next `count` frames that are longer than [`LONG_FRAME`].
    pub fn lose_long_frames(&self, count: u64) {
        self.to_lose.store(count, Ordering::Relaxed);
    }
}

impl Drop for ImpairedLink {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for t in self.threads.drain(..) {
            let _ = t.join();
        }
    }
}

struct Direction {
    from: Arc<OwnedFd>,
    to: Arc<OwnedFd>,
    how: Impairment,
    tag: Option<u16>,
    random: u64,
    /// Frames of a loss burst that are still to be dropped.
    dropping: u32,
    waiting: BinaryHeap<Reverse<(Instant, u64, Vec<u8>)>>,
    number: u64,
    counts: Arc<Counts>,
    to_lose: Arc<AtomicU64>,
}

impl Direction {
    fn run(mut self, over: &AtomicBool) {
        let mut b = vec![0; 65_536];
        while !over.load(Ordering::Relaxed) {
            let now = Instant::now();
            while let Some(Reverse((due, ..))) = self.waiting.peek()
                && *due <= now
                && let Some(Reverse((_, _, frame))) = self.waiting.pop()
            {
                // A full queue loses the frame, like a real link.
                let _ = send(self.to.as_raw_fd(), &frame, MsgFlags::MSG_DONTWAIT);
            }
            let next = self.waiting.peek().map(|Reverse((due, ..))| *due);
            let wait = next.map_or(Duration::from_millis(50), |d| {
                d.saturating_duration_since(now)
            });
            let mut fd = [PollFd::new(self.from.as_fd(), PollFlags::POLLIN)];
            let _ = ppoll(&mut fd, Some(TimeSpec::from(wait)), None);
            for _ in 0..64 {
                let got = recvfrom::<LinkAddr>(self.from.as_raw_fd(), &mut b);
                let Ok((n, from)) = got else { break };
                // Skips frames that the other direction sent here.
                if from.is_some_and(|f| f.pkttype() != libc::PACKET_OUTGOING) {
                    self.take(&b[..n]);
                }
            }
        }
    }

    fn chance(&mut self, of_1000: u32) -> bool {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        of_1000 > 0 && (self.random >> 20) % 1000 < u64::from(of_1000)
    }

    fn take(&mut self, frame: &[u8]) {
        let count = |c: &AtomicU64| c.fetch_add(1, Ordering::Relaxed);
        let ordered = |left: u64| left.checked_sub(1).filter(|_| frame.len() > LONG_FRAME);
        let take_order = self
            .to_lose
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, ordered);
        if take_order.is_ok() {
            count(&self.counts.lost);
            return;
        }
        if self.dropping > 0 || self.chance(self.how.loss) {
            self.dropping = match self.dropping {
                0 => self.how.burst,
                n => n - 1,
            };
            count(&self.counts.lost);
            return;
        }
        let mut due = Instant::now() + self.how.delay;
        if self.chance(self.how.late) {
            due += self.how.lateness;
            count(&self.counts.late);
        }
        let mut frame = frame.to_vec();
        if let Some(vlan) = self.tag {
            let [high, low] = vlan.to_be_bytes();
            frame.splice(12..12, [0x81, 0, high, low]);
        }
        let copies = 1 + usize::from(self.chance(self.how.duplicate));
        for _ in 0..copies {
            self.number += 1;
            self.waiting
                .push(Reverse((due, self.number, frame.clone())));
        }
        count(&self.counts.passed);
        if copies > 1 {
            count(&self.counts.doubled);
        }
    }
}
