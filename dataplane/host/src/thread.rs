//! The host thread of a device: passes frames from workers to the TAP, and frames from the TAP to
//! the worker that sends for the kernel. It sleeps while there are neither.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use dpdk::{ChecksumStatus, Eal, Mbuf, Mempool};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use crate::frame_bytes::{VLAN_ROOM, complete_l4_checksum, insert_vlan_tag, remove_vlan_tag};
use crate::{HostQueue, TapInterface};

/// Frames passed in one direction before the other direction's turn.
const FRAMES_PER_TURN: usize = 64;
/// Longest sleep; no function depends on it.
const LONGEST_SLEEP: Duration = Duration::from_secs(10);
/// Sleep time while the worker or the pool has no room for the kernel's frames.
const BLOCKED_PAUSE: Duration = Duration::from_micros(200);
/// Ethernet header and a VLAN tag, which kernel interfaces on top of the TAP may add.
const ETHERNET_BYTES: usize = 18;

/// The queue of the worker that sends the kernel's frames.
pub trait WorkerQueue: Send + Sync {
    /// Returns true if the worker takes a frame now. If not, the kernel waits.
    fn has_room_for_host(&self) -> bool;

    /// Queues a frame for a device's port, or returns it if the queue is full.
    /// [`Self::wake_if_asleep`] must follow.
    ///
    /// # Errors
    /// The queue is full.
    fn push_for_host(&self, device: usize, frame: Mbuf) -> Result<(), Mbuf>;

    /// Wakes the worker if it sleeps.
    fn wake_if_asleep(&self);
}

/// Parameters of the host thread of a device.
pub struct HostThreadParts {
    /// Device index in the configuration.
    pub device: usize,
    /// The kernel's interface.
    pub tap: TapInterface,
    /// Frames from workers.
    pub queue: Arc<HostQueue>,
    /// The worker that sends for the kernel.
    pub worker: Arc<dyn WorkerQueue>,
    /// Packet buffers.
    pub pool: Mempool,
    /// The device's VLAN.
    pub vlan: Option<u16>,
    /// The device's MTU.
    pub mtu: u16,
}

/// The running thread of one device; dropping it ends the thread and removes the interface.
pub struct HostThread {
    queue: Arc<HostQueue>,
    thread: Option<JoinHandle<()>>,
}

impl HostThread {
    /// Starts the thread. `on_start` runs in it first, to keep it off the workers' cores.
    ///
    /// # Errors
    /// The operating system cannot create a thread.
    pub fn start(
        eal: &Eal,
        parts: HostThreadParts,
        on_start: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<HostThread> {
        let queue = parts.queue.clone();
        let eal = eal.clone();
        let thread = std::thread::Builder::new()
            .name(format!("siwd-host-{}", parts.device))
            .spawn(move || {
                on_start();
                let registered = eal.register_thread();
                if let Err(error) = &registered {
                    // The thread works unregistered; it only lacks a cache for the pool.
                    tracing::debug!("the host thread cannot be registered with DPDK: {error}");
                }
                HostLoop::new(parts).run();
            })?;
        Ok(HostThread {
            queue,
            thread: Some(thread),
        })
    }
}

impl Drop for HostThread {
    fn drop(&mut self) {
        self.queue.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the host thread failed");
        }
    }
}

/// State of reading from the kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
enum KernelSide {
    Open,
    /// The worker's queue or the pool is full: frames stay in the kernel's own queue, and its TCP
    /// slows down.
    Blocked,
    /// The interface was deleted.
    Gone,
}

/// The state of a host thread.
struct HostLoop {
    parts: HostThreadParts,
    kernel_side: KernelSide,
    /// Buffer for a frame to the kernel in one piece.
    flat: Vec<u8>,
}

impl HostLoop {
    fn new(parts: HostThreadParts) -> HostLoop {
        HostLoop {
            kernel_side: KernelSide::Open,
            flat: Vec::with_capacity(usize::from(parts.mtu) + 64),
            parts,
        }
    }

    fn run(&mut self) {
        while !self.parts.queue.is_stopped() {
            let mut is_busy = self.write_frames();
            is_busy |= self.read_frames();
            if !is_busy {
                self.sleep();
            }
        }
    }

    /// Passes queued frames to the kernel. Returns true if there were any.
    fn write_frames(&mut self) -> bool {
        let mut any = false;
        for _ in 0..FRAMES_PER_TURN {
            let Some(mbuf) = self.parts.queue.pop() else {
                break;
            };
            any = true;
            self.flat.clear();
            for segment in mbuf.segments() {
                self.flat.extend_from_slice(segment);
            }
            if self.parts.vlan.is_some() {
                remove_vlan_tag(&mut self.flat);
            }
            if mbuf.rx_l4_checksum() == ChecksumStatus::NotNeeded {
                complete_l4_checksum(&mut self.flat);
            }
            drop(mbuf);
            // Frames are lost while an administrator has the interface down, as on an unplugged
            // cable.
            self.parts.tap.write_frame(&self.flat);
        }
        any
    }

    /// Passes frames from the kernel to the worker. Returns true if there were any.
    fn read_frames(&mut self) -> bool {
        let mut sent = 0;
        if self.kernel_side == KernelSide::Blocked {
            self.kernel_side = KernelSide::Open;
        }
        while sent < FRAMES_PER_TURN && self.kernel_side == KernelSide::Open {
            match self.read_frame() {
                Ok(Some(mbuf)) => {
                    sent += 1;
                    // The frame is lost if other workers have filled the queue meanwhile.
                    let _ = self.parts.worker.push_for_host(self.parts.device, mbuf);
                }
                Ok(None) => break,
                Err(state) => self.kernel_side = state,
            }
        }
        if sent > 0 {
            self.parts.worker.wake_if_asleep();
        }
        sent > 0
    }

    /// Reads one frame from the kernel; `None` if there is none.
    fn read_frame(&mut self) -> Result<Option<Mbuf>, KernelSide> {
        let parts = &self.parts;
        if !parts.worker.has_room_for_host() {
            return Err(KernelSide::Blocked);
        }
        let mut mbuf = Mbuf::alloc(&parts.pool).ok_or(KernelSide::Blocked)?;
        let front = parts.vlan.map_or(0, |_| VLAN_ROOM);
        let longest = front + usize::from(parts.mtu) + ETHERNET_BYTES;
        let longest = longest.min(usize::from(mbuf.tailroom()));
        let room = mbuf.append(longest as u16).ok_or(KernelSide::Blocked)?;
        let len = match parts.tap.read_frame(&mut room[front..]) {
            Ok(Some(len)) => len,
            Ok(None) => return Ok(None),
            Err(error) => {
                tracing::error!(
                    "interface {} was removed ({error}): the kernel no longer shares the device; restart siwd to create the interface again",
                    parts.tap.name()
                );
                return Err(KernelSide::Gone);
            }
        };
        if let Some(vlan) = parts.vlan {
            insert_vlan_tag(&mut room[..front + len], vlan);
        }
        mbuf.truncate((front + len) as u32);
        Ok(Some(mbuf))
    }

    /// Sleeps until a worker queues a frame or the kernel sends one.
    fn sleep(&self) {
        let queue = &self.parts.queue;
        if queue.announce_sleep() {
            let limit = match self.kernel_side {
                KernelSide::Blocked => BLOCKED_PAUSE,
                KernelSide::Open | KernelSide::Gone => LONGEST_SLEEP,
            };
            let mut fds = [
                PollFd::new(queue.wake_fd(), PollFlags::POLLIN),
                PollFd::new(self.parts.tap.as_fd(), PollFlags::POLLIN),
            ];
            // A descriptor that is not read must not wake the thread.
            let used = if self.kernel_side == KernelSide::Open {
                2
            } else {
                1
            };
            let _ = ppoll(&mut fds[..used], Some(TimeSpec::from(limit)), None);
        }
        queue.announce_awake();
    }
}
