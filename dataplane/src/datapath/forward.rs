//! Frames from worker to worker. A port delivers frames to workers that do not own the connection if
//! it spreads flows by another rule than ours (a tap, a vhost-user peer, AF_PACKET's fanout), or has
//! fewer queues than the device has workers; those workers forward them. Frames that concern all
//! workers (ARP, NDP, ICMP errors) are copied to every worker. A worker without a queue sends through
//! one that has one.
//!
//! Each worker has one bounded queue of forwarded frames, and no sender waits for room in it. A
//! received frame that does not fit is dropped and counted, as by a NIC whose ring is full, and TCP
//! retransmits; a frame to send stays with its sender.

use std::sync::Arc;

use dpdk::{BURST, Mbuf, MbufCache};
use siw_net::{Destination, FrameInfo, Instant, RxChecksum, Steering};

use super::clock::TscClock;
use super::inbox::{ForwardPurpose, ForwardedFrame, WorkerInbox};
use super::port::WorkerPort;
use super::rx_frame::RxFrame;

/// Frames between workers, counted per worker.
#[derive(Debug, Default, Clone, Copy)]
pub struct ForwardStats {
    /// Received by this worker for a connection of another one.
    pub forwarded: u64,
    /// Received by another worker for a connection of this one.
    pub taken: u64,
    /// Copies made for other workers.
    pub copied: u64,
    /// Sent on behalf of workers without a queue.
    pub sent_for_others: u64,
    /// Dropped because the owner's queue was full, or no buffer was left for a copy.
    pub dropped: u64,
}

/// Forwards frames from one worker to the others.
pub(crate) struct FrameForwarder {
    /// Index of this worker in `inboxes`.
    own_index: usize,
    inboxes: Arc<[Arc<WorkerInbox>]>,
    /// Workers with frames forwarded since [`Self::wake_receivers`], one bit each.
    to_wake: u64,
    /// Time at which another worker last forwarded a frame to this one.
    pub(crate) last_forwarded: Instant,
    pub(crate) stats: ForwardStats,
}

impl FrameForwarder {
    /// `inboxes` holds the inboxes of all workers of the daemon.
    pub(crate) fn new(own_index: usize, inboxes: Arc<[Arc<WorkerInbox>]>) -> FrameForwarder {
        FrameForwarder {
            own_index,
            inboxes,
            to_wake: 0,
            last_forwarded: Instant::ZERO,
            stats: ForwardStats::default(),
        }
    }

    /// Determines which worker processes a received frame, and forwards it. Returns the frame if it is
    /// this worker.
    #[inline]
    pub(crate) fn keep_or_forward(
        &mut self,
        steering: &Steering,
        device: usize,
        mbuf: Mbuf,
        checksum: RxChecksum,
        cache: &mut MbufCache,
    ) -> Option<Mbuf> {
        match steering.classify_frame(mbuf.data()) {
            Destination::Worker(worker) if worker != self.own_index => {
                self.forward_received(worker, device, (mbuf, checksum), cache);
                None
            }
            Destination::Worker(_) | Destination::AnyWorker => Some(mbuf),
            Destination::AllWorkers => {
                self.copy_to_all(steering.worker_count(), device, &mbuf, checksum, cache);
                Some(mbuf)
            }
        }
    }

    /// Forwards a received frame to the worker that processes it.
    #[inline]
    pub(crate) fn forward_received(
        &mut self,
        worker: usize,
        device: usize,
        (mbuf, checksum): (Mbuf, RxChecksum),
        cache: &mut MbufCache,
    ) {
        let frame = ForwardedFrame {
            device,
            purpose: ForwardPurpose::Receive(checksum),
            mbuf,
        };
        match self.push_frame(worker, frame) {
            Ok(()) => self.stats.forwarded += 1,
            Err(frame) => {
                self.stats.dropped += 1;
                cache.free(frame.mbuf);
            }
        }
    }

    /// Copies a received frame to the other workers of the device.
    #[cold]
    pub(crate) fn copy_to_all(
        &mut self,
        workers: usize,
        device: usize,
        mbuf: &Mbuf,
        checksum: RxChecksum,
        cache: &mut MbufCache,
    ) {
        let own_index = self.own_index;
        for worker in (0..workers).filter(|worker| *worker != own_index) {
            let Some(mut copy) = cache.alloc() else {
                self.stats.dropped += 1;
                return;
            };
            if !mbuf.segments().all(|segment| copy.append_slice(segment)) {
                self.stats.dropped += 1;
                cache.free(copy);
                return;
            }
            let frame = ForwardedFrame {
                device,
                purpose: ForwardPurpose::Overhear(checksum),
                mbuf: copy,
            };
            match self.push_frame(worker, frame) {
                Ok(()) => self.stats.copied += 1,
                Err(frame) => {
                    self.stats.dropped += 1;
                    cache.free(frame.mbuf);
                }
            }
        }
    }

    #[inline]
    fn push_frame(&mut self, worker: usize, frame: ForwardedFrame) -> Result<(), ForwardedFrame> {
        let Some(inbox) = self.inboxes.get(worker) else {
            return Err(frame);
        };
        inbox.frames.push(frame)?;
        self.to_wake |= 1 << worker;
        Ok(())
    }

    /// Wakes the workers with forwarded frames, if they sleep. Called once per batch.
    #[inline]
    pub(crate) fn wake_receivers(&mut self) {
        let mut to_wake = std::mem::take(&mut self.to_wake);
        while to_wake != 0 {
            if let Some(inbox) = self.inboxes.get(to_wake.trailing_zeros() as usize) {
                inbox.wake_if_asleep();
            }
            to_wake &= to_wake - 1;
        }
    }

    /// Takes frames that other workers forwarded: received frames wait for [`WorkerPort::receive`],
    /// frames to send join the port's batch. Returns true if there were any.
    #[inline]
    pub(crate) fn take_frames<R>(
        &mut self,
        now: Instant,
        clock: &TscClock,
        ports: &mut [WorkerPort<R>],
        cache: &mut MbufCache,
    ) -> bool {
        // As with commands, popping from an empty queue costs a fence.
        if self.inboxes[self.own_index].frames.is_empty() {
            return false;
        }
        let mut any = false;
        for _ in 0..BURST {
            let Some(frame) = self.inboxes[self.own_index].frames.pop() else {
                break;
            };
            any = true;
            let port = ports.iter_mut().find(|port| port.device == frame.device);
            let Some(port) = port else { continue };
            match frame.purpose {
                ForwardPurpose::Receive(checksum) => {
                    self.stats.taken += 1;
                    let info = FrameInfo {
                        checksum,
                        rss_hash: 0,
                    };
                    port.arrived.push((RxFrame::new(frame.mbuf), info));
                }
                ForwardPurpose::Overhear(checksum) => {
                    port.stack
                        .receive_copy(now, RxFrame::new(frame.mbuf), checksum);
                }
                ForwardPurpose::Send => {
                    self.stats.sent_for_others += 1;
                    port.output.send_for_other(frame.mbuf, cache);
                }
                ForwardPurpose::SendForHost => {
                    port.output
                        .send_for_host(frame.mbuf, cache, clock.wall_time(now));
                }
            }
        }
        if any {
            self.last_forwarded = now;
        }
        any
    }
}
