//! Frames from worker to worker. A port that spreads flows by another rule than ours (a tap, a
//! vhost-user peer, AF_PACKET's fanout), or has fewer queues than the device has workers,
//! delivers frames to workers that do not own the connection: those hand them on. What all have
//! to know (ARP, NDP, ICMP errors) is copied to everyone, and workers without a queue send
//! through one that has one.
//!
//! Each worker has one bounded queue of such frames. Nobody waits for room in it: a frame that
//! was received and finds none is dropped and counted, as a NIC does when its ring is full, and
//! TCP repeats it; a frame to send stays with its sender.

use std::sync::Arc;

use dpdk::{BURST, Mbuf, MbufCache};
use siw_tcp::{Destination, FrameInfo, RxChecksum, Steering};

use super::sink::PortOutput;
use super::{Mailbox, Worker};
use crate::datapath::rx_frame::RxFrame;

/// Frames that wait for one worker.
pub const FORWARD_QUEUE_DEPTH: usize = 2048;

/// What to do with a frame that another worker handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ForwardPurpose {
    /// It was received for a connection of this worker.
    Receive(RxChecksum),
    /// A copy, to learn from.
    Overhear(RxChecksum),
    /// It is ready to leave by this worker's queue.
    Send,
}

/// A frame on its way between workers.
pub struct ForwardedFrame {
    device: usize,
    purpose: ForwardPurpose,
    mbuf: Mbuf,
}

/// Frames handed between workers, counted by the worker that did it.
#[derive(Debug, Default, Clone, Copy)]
pub struct ForwardStats {
    /// Received here for a connection of another worker.
    pub forwarded: u64,
    /// Received by another worker for a connection of this one.
    pub taken: u64,
    /// Copies that were made for other workers.
    pub copied: u64,
    /// Sent on behalf of workers without a queue.
    pub sent_for_others: u64,
    /// Dropped: the owner's queue was full, or no buffer was left for a copy.
    pub dropped: u64,
}

/// One worker's way to the others.
pub struct Forwarder {
    me: usize,
    all: Arc<[Arc<Mailbox>]>,
    /// Workers that were handed something since [`Self::wake`], a bit each.
    fed: u64,
    pub stats: ForwardStats,
}

impl Forwarder {
    /// `all` holds every worker of the daemon, `me` is this one's place.
    pub fn new(me: usize, all: Arc<[Arc<Mailbox>]>) -> Forwarder {
        Forwarder {
            me,
            all,
            fed: 0,
            stats: ForwardStats::default(),
        }
    }

    /// Looks for whom a received frame is; gives it back when it is for this worker.
    #[inline]
    pub fn sort(
        &mut self,
        steering: &Steering,
        device: usize,
        mbuf: Mbuf,
        checksum: RxChecksum,
        cache: &mut MbufCache,
    ) -> Option<Mbuf> {
        match steering.classify_frame(mbuf.data()) {
            Destination::Worker(w) if w != self.me => {
                let forwarded = ForwardedFrame {
                    device,
                    purpose: ForwardPurpose::Receive(checksum),
                    mbuf,
                };
                match self.push(w, forwarded) {
                    Ok(()) => self.stats.forwarded += 1,
                    Err(p) => {
                        self.stats.dropped += 1;
                        cache.free(p.mbuf);
                    }
                }
                None
            }
            Destination::Worker(_) | Destination::AnyWorker => Some(mbuf),
            Destination::AllWorkers => {
                self.copy_to_all(steering.worker_count(), device, &mbuf, checksum, cache);
                Some(mbuf)
            }
        }
    }

    #[cold]
    fn copy_to_all(
        &mut self,
        workers: usize,
        device: usize,
        mbuf: &Mbuf,
        checksum: RxChecksum,
        cache: &mut MbufCache,
    ) {
        let me = self.me;
        for w in (0..workers).filter(|w| *w != me) {
            let Some(mut copy) = cache.alloc() else {
                self.stats.dropped += 1;
                return;
            };
            if !mbuf.segments().all(|s| copy.append_slice(s)) {
                self.stats.dropped += 1;
                cache.free(copy);
                return;
            }
            let forwarded = ForwardedFrame {
                device,
                purpose: ForwardPurpose::Overhear(checksum),
                mbuf: copy,
            };
            match self.push(w, forwarded) {
                Ok(()) => self.stats.copied += 1,
                Err(p) => {
                    self.stats.dropped += 1;
                    cache.free(p.mbuf);
                }
            }
        }
    }

    #[inline]
    fn push(&mut self, worker: usize, forwarded: ForwardedFrame) -> Result<(), ForwardedFrame> {
        let Some(to) = self.all.get(worker) else {
            return Err(forwarded);
        };
        to.frames.push(forwarded)?;
        self.fed |= 1 << worker;
        Ok(())
    }

    /// Wakes the workers that were handed something, if they sleep. Once a batch.
    #[inline]
    pub fn wake(&mut self) {
        let mut fed = std::mem::take(&mut self.fed);
        while fed != 0 {
            if let Some(to) = self.all.get(fed.trailing_zeros() as usize) {
                to.wake_worker();
            }
            fed &= fed - 1;
        }
    }
}

/// The sending side of a worker that has no queue of a port.
pub struct ProxyTx {
    device: usize,
    to: Arc<Mailbox>,
}

impl ProxyTx {
    /// `to` is the worker that sends instead.
    pub fn new(device: usize, to: Arc<Mailbox>) -> ProxyTx {
        ProxyTx { device, to }
    }

    /// Hands over from the front of `batch`; returns how many frames went. The rest stays.
    pub fn burst(&self, batch: &mut dpdk::TxBatch) -> usize {
        let mut n = 0;
        while !self.to.frames.is_full() {
            let Some(mbuf) = batch.pop() else { break };
            let forwarded = ForwardedFrame {
                device: self.device,
                purpose: ForwardPurpose::Send,
                mbuf,
            };
            // Another worker may have been faster: then the frame is lost, and TCP repeats it.
            let _ = self.to.frames.push(forwarded);
            n += 1;
        }
        if n > 0 {
            self.to.wake_worker();
        }
        n
    }
}

impl Worker {
    /// What other workers handed over: received frames wait in their port for
    /// [`Worker::receive`], frames to send go to the port.
    #[inline]
    pub(super) fn take_forwarded_frames(&mut self, now: siw_tcp::Instant) -> bool {
        let mut any = false;
        for _ in 0..BURST {
            let Some(forwarded) = self.mailbox.frames.pop() else {
                break;
            };
            any = true;
            let port = self.ports.iter_mut().find(|l| l.device == forwarded.device);
            let Some(port) = port else { continue };
            match forwarded.purpose {
                ForwardPurpose::Receive(checksum) => {
                    self.forward.stats.taken += 1;
                    let info = FrameInfo {
                        checksum,
                        rss_hash: 0,
                    };
                    port.handed.push((RxFrame::new(forwarded.mbuf), info));
                }
                ForwardPurpose::Overhear(checksum) => {
                    port.stack
                        .receive_copy(now, RxFrame::new(forwarded.mbuf), checksum);
                }
                ForwardPurpose::Send => {
                    self.forward.stats.sent_for_others += 1;
                    send(&mut port.out, forwarded.mbuf, &mut self.cache);
                }
            }
        }
        if any {
            self.handed_at = now;
        }
        any
    }
}

/// A full port drops, as a full NIC ring does.
fn send(out: &mut PortOutput, mbuf: Mbuf, cache: &mut MbufCache) {
    if out.batch.is_full() {
        out.burst();
    }
    if let Err(back) = out.batch.push(mbuf) {
        cache.free(back);
    }
}
