//! One port of one worker: its queues of the port, the TCP stack above them, and the processing of
//! received frames.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use dpdk::{BURST, Mbuf, MbufCache, RxBatch};
use siw_host::HostQueue;
use siw_iwarp::mpa::MpaConfig;
use siw_net::{AddressConflict, ConnId, FrameInfo, Instant, RxChecksum, Steering, WorkerSteering};
use siw_ports::{ReceiveQueue, RxQueue, TxQueue};
use siw_tcp::Stack;

use super::clock::TscClock;
use super::inbox::ProxyTx;
use super::output::{PortOutput, PortSink, RecordWriter, TxPath};
use super::rx_frame::{self, RxFrame};
use super::timer_hold::TimerHold;
use super::wire_faults::{ActiveFault, FaultMark, FaultyPort, WireFaults, copy_frame};
use crate::capture::{Direction, FrameRecord};
use crate::frame_taps::FrameTaps;
use crate::link_traits::LinkTraits;
use crate::trace::TraceTap;

/// Received frames whose headers are prefetched before the first is parsed.
const PREFETCH_FRAMES: usize = 4;

/// A worker's part of one device.
pub struct WorkerPortConfig {
    /// The device's place in the configuration.
    pub device: usize,
    /// The worker's queues of the port, or, if the port has too few, the worker that receives and
    /// sends for this one.
    pub queues: Result<(RxQueue, TxQueue), usize>,
    /// Settings of the TCP stack.
    pub stack: siw_tcp::StackConfig,
    /// MPA settings of connections.
    pub mpa: MpaConfig,
    /// Time for an application to accept or reject a connection.
    pub accept_timeout: std::time::Duration,
    /// Capabilities of the link below the port.
    pub link: LinkTraits,
    /// Share of frames that are lost on purpose.
    pub loss: f64,
    /// Captures and trace in which frames are recorded.
    pub taps: Option<FrameTaps>,
    /// Queue for frames to the kernel, if it shares the device.
    pub host: Option<Arc<HostQueue>>,
}

/// A port of one worker. `R`: the records that connections send.
pub struct WorkerPort<R> {
    /// The device's place in the configuration.
    pub device: usize,
    /// `None` if another worker receives for this one.
    rx_queue: Option<RxQueue>,
    /// Determines which worker processes a received frame; `None` if all are for this one.
    home: Option<WorkerSteering>,
    /// Frames for [`Self::receive`] that did not come from the port: those that other workers received
    /// for this one, and loopback frames.
    pub arrived: Vec<(RxFrame, FrameInfo)>,
    /// Its sending half.
    pub output: PortOutput,
    /// TCP of the device for the connections of this worker.
    pub stack: Stack<RxFrame, R>,
    link: LinkTraits,
    host: Option<Arc<HostQueue>>,
    /// Frames received through the port.
    pub frames_received: u64,
    /// Frames were dropped because of offloads of their sender, and this was logged.
    has_logged_offloads: bool,
}

impl<R> WorkerPort<R> {
    /// `proxy` creates the transmit path through the worker with the given index.
    ///
    /// # Errors
    /// The stack refuses its configuration, or the worker to send through does not exist.
    pub fn new(
        config: WorkerPortConfig,
        now: Instant,
        proxy: impl FnOnce(usize) -> Option<ProxyTx>,
    ) -> Result<WorkerPort<R>, String> {
        let (rx_queue, tx_path) = match config.queues {
            Ok((rx_queue, tx_queue)) => (Some(rx_queue), TxPath::Queue(tx_queue)),
            Err(worker) => {
                let proxy = proxy(worker).ok_or("the port has no queue for this worker")?;
                (None, TxPath::Proxy(proxy))
            }
        };
        let mut output = PortOutput::new(tx_path, config.device as u32, config.link);
        output.taps = config.taps;
        output.faults = WireFaults::of_loss(config.loss);
        Ok(WorkerPort {
            device: config.device,
            rx_queue,
            home: config
                .stack
                .net
                .steering
                .clone()
                .filter(|_| config.link.needs_steering()),
            arrived: Vec::with_capacity(BURST),
            output,
            stack: Stack::new(config.stack, now).map_err(|error| error.to_string())?,
            link: config.link,
            host: config.host,
            frames_received: 0,
            has_logged_offloads: false,
        })
    }

    /// Takes a burst from the port into `batch`, and the loopback frames. Returns true if
    /// [`Self::receive`] has work: these frames, frames that other workers forwarded, or frames for the
    /// kernel.
    #[inline]
    pub fn take_burst(&mut self, batch: &mut RxBatch) -> bool {
        if let Some(rx_queue) = &mut self.rx_queue {
            rx_queue.rx_burst(batch);
        }
        if self.output.has_loopback() {
            self.arrived.extend(self.output.take_loopback());
        }
        !batch.is_empty() || !self.arrived.is_empty() || self.stack.has_host_frames()
    }

    /// Passes to TCP the burst in `batch` and [`Self::arrived`]. Returns true if there were any frames.
    /// On a port that does not deliver by worker, `keep` gets each frame of the burst and returns it if
    /// this worker keeps it.
    ///
    /// The frames go through one iterator from burst to stack, so that nothing is stored in between.
    #[inline]
    pub fn receive(
        &mut self,
        now: Instant,
        batch: &mut RxBatch,
        clock: &TscClock,
        timer_hold: &mut TimerHold,
        mut keep: impl FnMut(&Steering, usize, Mbuf, RxChecksum) -> Option<Mbuf>,
    ) -> bool {
        let mut any = !batch.is_empty();
        if any {
            if batch.is_full() {
                timer_hold.hold_timers(now);
            }
            self.frames_received += batch.len() as u64;
            let is_captured = !self.link.in_process && self.output.faults.is_none();
            if self.output.taps.is_some() && is_captured {
                self.capture_received(batch, clock.wall_time(now));
            }
            let link = self.link;
            let (home, device) = (self.home.as_ref(), self.device);
            batch.prefetch_packet(PREFETCH_FRAMES);
            let frames = batch.drain().filter_map(|mut mbuf| {
                let checksum = rx_frame::known_checksum(&mbuf, link.no_checksums, link.rx_checksum);
                let rss_hash = mbuf.rss_hash().unwrap_or(0);
                mbuf.clear_offload();
                if let Some(home) = home {
                    mbuf = keep(&home.steering, device, mbuf, checksum)?;
                }
                Some((RxFrame::new(mbuf), FrameInfo { checksum, rss_hash }))
            });
            self.stack.receive_burst(now, frames);
        }
        if !self.arrived.is_empty() {
            any = true;
            self.stack.receive_burst(now, self.arrived.drain(..));
        }
        if self.stack.has_host_frames() {
            self.leave_host_frames();
        }
        if !self.has_logged_offloads && self.stack.net_stats().offload_drops() > 0 {
            self.log_offloads();
        }
        any
    }

    /// The trace, if one is running and takes more records.
    #[inline]
    pub fn trace(&self) -> Option<&TraceTap> {
        self.output.taps.as_ref()?.trace()
    }

    /// Hands frames to the host thread; frames that do not fit into its queue are dropped.
    #[cold]
    fn leave_host_frames(&mut self) {
        let mut dropped = 0;
        for frame in self.stack.take_host_frames() {
            let pushed = match (&self.host, frame.into_mbuf()) {
                (Some(queue), Some(mbuf)) => queue.push(mbuf),
                (None, Some(mbuf)) => Err(mbuf),
                (_, None) => Ok(()),
            };
            if let Err(mbuf) = pushed {
                dropped += 1;
                drop(RxFrame::new(mbuf));
            }
        }
        self.output.host_frames_dropped += dropped;
        if let Some(queue) = &self.host {
            queue.wake_if_asleep();
        }
    }

    /// Returns whether [`Self::poll_stack`] has work.
    #[inline]
    pub fn needs_poll(&mut self, now: Instant) -> bool {
        self.stack.needs_poll(now)
            || self.output.has_frames()
            || self.output.has_backlog()
            || self.has_fault_work()
    }

    /// Runs acknowledgements, timers and retransmissions of the stack, then sends the burst. Without
    /// `run_timers`, timers are held. `wall_time`: nanoseconds since the epoch, for captures. Returns
    /// true if there were frames to send.
    #[inline(never)]
    pub fn poll_stack(
        &mut self,
        now: Instant,
        run_timers: bool,
        cache: &mut MbufCache,
        writer: impl RecordWriter<R>,
        wall_time: u64,
    ) -> bool {
        let mut sink = PortSink::new(&mut self.output, cache, writer, wall_time);
        if run_timers {
            self.stack.poll(now, &mut sink);
        } else {
            self.stack.poll_output(now, &mut sink);
        }
        if let Some(conflict) = self.stack.take_address_conflict() {
            self.log_conflict(&conflict);
        }
        if self.stack.take_tso_failure() {
            self.log_tso_failure();
        }
        if self.output.faults.is_some() {
            self.output.send_due(std::time::Instant::now());
        }
        let any = self.output.has_frames();
        self.output.transmit_batch();
        if !self.output.batch.is_empty() && self.output.drop_stalled(now) {
            self.log_stall();
        }
        any
    }

    /// Names what a port refuses that accepts no frame at all, and stops giving it that.
    #[cold]
    fn log_stall(&mut self) {
        let cure = if self.stack.stop_tso() {
            "it may refuse frames that it has to cut into segments (TSO), so this worker sends single \
             segments from now on"
        } else {
            "TCP sends them again"
        };
        tracing::warn!(
            device = self.device,
            "the port has accepted no frame for a second: the frames that wait are dropped; {cure}"
        );
    }

    /// Reports that two hosts have one address; the stack limits how often.
    #[cold]
    fn log_conflict(&self, conflict: &AddressConflict) {
        let mac = conflict.mac.map(|byte| format!("{byte:02x}")).join(":");
        tracing::warn!(
            device = self.device,
            address = %conflict.address,
            "another host on the link has this address: its Ethernet address is {mac}; connections of \
             both fail until one of them gets another address"
        );
    }

    /// Names the cure for frames of a sender on this machine, once.
    #[cold]
    fn log_offloads(&mut self) {
        self.has_logged_offloads = true;
        tracing::warn!(
            device = self.device,
            "frames of a sender on this machine are dropped, because it leaves their checksums or their \
             segmentation to an offload that does not take place. Switch the offloads of its interface \
             off, which is the other end of a veth pair: ethtool -K PEER tx off tso off gso off gro off \
             (siwctl show drops counts these frames)"
        );
    }

    #[cold]
    fn log_tso_failure(&self) {
        tracing::warn!(
            device = self.device,
            "frames that the port had to cut into segments (TSO) did not arrive, although single \
             segments did: this worker sends single segments from now on"
        );
    }

    /// Sends the queued data of one connection, as far as the windows allow; the frames leave with
    /// the next burst.
    ///
    /// Why it is inlined: the arguments do not all fit into registers. The last two would be stored
    /// one by one and loaded together, which waits for these stores and for all earlier ones that miss
    /// the cache.
    #[inline(always)]
    pub fn flush_connection(
        &mut self,
        now: Instant,
        conn: ConnId,
        cache: &mut MbufCache,
        writer: impl RecordWriter<R>,
        wall_time: u64,
    ) {
        let mut sink = PortSink::new(&mut self.output, cache, writer, wall_time);
        self.stack.flush(now, conn, &mut sink);
    }

    #[cold]
    fn capture_received(&self, batch: &RxBatch, wall_time: u64) {
        let Some(taps) = &self.output.taps else {
            return;
        };
        let (interface, received) = (self.output.interface, Direction::Inbound);
        for i in 0..batch.len() {
            let Some(mbuf) = batch.peek(i) else { break };
            let frame = FrameRecord {
                interface,
                direction: received,
                time: wall_time,
                lacks_checksum: false,
                comment: None,
            };
            taps.record_frame(&frame, mbuf);
        }
    }

    /// Replaces the faults of plans at this port. `worker`: index of the worker.
    #[cold]
    pub fn set_faults(&mut self, active: &[ActiveFault], worker: usize) {
        if self.is_removed() {
            return;
        }
        let port = FaultyPort {
            device: self.device,
            worker,
            in_process: self.link.in_process,
        };
        let faults = self.output.faults.get_or_insert_default();
        faults.set(active, port);
        // Faults concern the segments of the wire.
        let has_faults = faults.has_faults();
        self.stack.pause_tso(has_faults);
        if faults.is_over() {
            self.output.end_faults();
        }
    }

    /// Takes the faults since the last report; `None` if there were none.
    pub fn take_fault_marks(&mut self) -> Option<Vec<FaultMark>> {
        self.output.faults.as_mut()?.take_all_marks()
    }

    /// Returns true if frames wait because of faults, or a report of faults does.
    #[inline]
    pub fn has_fault_work(&self) -> bool {
        let faults = self.output.faults.as_ref();
        faults.is_some_and(|faults| faults.has_work())
    }

    /// Lets the faults of this port happen to the burst in `batch`, and adds received frames that have waited
    /// long enough. Returns the faults to report, if it is time for that.
    #[cold]
    #[inline(never)]
    pub fn impair_received(
        &mut self,
        batch: &mut RxBatch,
        cache: &mut MbufCache,
        wall_time: u64,
    ) -> Option<Vec<FaultMark>> {
        let now = std::time::Instant::now();
        for _ in 0..batch.len() {
            let Some(mbuf) = batch.pop() else { break };
            if let Some(mbuf) = self.impair_frame(mbuf, now, cache, wall_time) {
                // There is room: the place of the frame that was taken.
                let _ = batch.push(mbuf);
            }
        }
        let faults = self.output.faults.as_mut()?;
        while !batch.is_full()
            && let Some(mbuf) = faults.held_in.take_due(now)
        {
            let _ = batch.push(mbuf);
        }
        let marks = faults.take_marks(now);
        if faults.is_over() {
            self.output.end_faults();
        }
        marks
    }

    /// Lets faults happen to a received frame. Returns it if it is neither lost nor waits.
    fn impair_frame(
        &mut self,
        mut mbuf: Mbuf,
        now: std::time::Instant,
        cache: &mut MbufCache,
        wall_time: u64,
    ) -> Option<Mbuf> {
        let faults = self.output.faults.as_mut()?;
        let verdict = faults.judge_received(now, &mbuf);
        // A frame of another device of this daemon was captured where it was sent.
        if let Some(taps) = &self.output.taps
            && (!self.link.in_process || verdict.text.is_some())
        {
            let frame = FrameRecord {
                interface: self.output.interface,
                direction: Direction::Inbound,
                time: wall_time,
                lacks_checksum: self.link.in_process && self.link.no_checksums,
                comment: verdict.text.as_ref(),
            };
            taps.record_frame(&frame, &mbuf);
        }
        if verdict.is_lost {
            cache.free(mbuf);
            return None;
        }
        let payload = verdict.payload.as_ref();
        if let Some(copy) = verdict.copy {
            let due = now + verdict.hold + copy.late;
            let change = copy.altered.zip(payload);
            if let Some(second) = copy_frame(&mbuf, change, true, cache)
                && let Err(rejected) = faults.held_in.hold(due, second, cache)
            {
                faults.note_overflow();
                cache.free(rejected);
            }
        }
        let must_copy = verdict.altered.is_some() || !verdict.hold.is_zero();
        if must_copy
            && let Some(copy) = copy_frame(&mbuf, verdict.altered.zip(payload), true, cache)
        {
            cache.free(std::mem::replace(&mut mbuf, copy));
        }
        if verdict.hold.is_zero() {
            return Some(mbuf);
        }
        if let Err(rejected) = faults.held_in.hold(now + verdict.hold, mbuf, cache) {
            faults.note_overflow();
            cache.free(rejected);
        }
        None
    }

    /// Gives the queues back to a port that is being removed, and drops the frames that wait for them.
    #[cold]
    pub fn drop_queues(&mut self) {
        self.rx_queue = None;
        self.output.close();
    }

    /// True after [`Self::drop_queues`].
    pub fn is_removed(&self) -> bool {
        self.output.is_closed()
    }

    /// True if the port has no reliable interrupt, so that it must be polled.
    pub(super) fn must_be_polled(&self) -> bool {
        let wakes = self.link.rx_interrupt && !self.link.rx_interrupt_unproven;
        !self.link.in_process && !wakes && self.rx_queue.is_some()
    }

    /// Returns true if the port cannot receive until the pool has buffers again.
    pub(super) fn is_out_of_buffers(&self) -> bool {
        let queue = self.rx_queue.as_ref();
        queue.is_some_and(RxQueue::is_out_of_buffers)
    }

    /// Records that an interrupt of the port woke the thread.
    pub(super) fn note_interrupt(&mut self) {
        self.link.rx_interrupt_unproven = false;
    }

    /// Arms the port's interrupt. Returns true if the port has one that is armed now.
    pub(super) fn arm_interrupt(&mut self) -> bool {
        let Some(rx_queue) = self.rx_queue.as_mut().filter(|_| self.link.rx_interrupt) else {
            return false;
        };
        match rx_queue.arm_interrupt() {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(
                    device = self.device,
                    "no receive interrupts: {error}; polling at intervals instead"
                );
                self.link.rx_interrupt = false;
                false
            }
        }
    }

    pub(super) fn disarm_interrupt(&mut self) {
        if let Some(rx_queue) = self.rx_queue.as_mut().filter(|_| self.link.rx_interrupt) {
            let _ = rx_queue.disarm_interrupt();
        }
    }

    /// Descriptor that becomes readable with the port's interrupt.
    pub(super) fn interrupt_fd(&self) -> Option<BorrowedFd<'_>> {
        self.rx_queue
            .as_ref()
            .filter(|_| self.link.rx_interrupt)?
            .interrupt_source()
    }
}
