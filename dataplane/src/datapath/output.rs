//! Transmit paths: the port's queue, another worker that has one, or loopback.

use dpdk::{Mbuf, MbufCache, TxBatch, TxOffload, TxQueue};
use siw_tcp::{FrameInfo, FrameMeta, RxChecksum, TxChecksum, checksum};

use super::inbox::ProxyTx;
use super::rx_frame::RxFrame;
use crate::capture::{CaptureHandle, Direction};
use crate::link_traits::LinkTraits;

/// Transmit path of a port.
pub(crate) enum TxPath {
    /// The worker's own queue of the port.
    Queue(TxQueue),
    /// The port has no queue for this worker: another one sends.
    Proxy(ProxyTx),
    /// The port was removed: frames are dropped.
    Closed,
}

/// The sending half of a worker's port.
pub(crate) struct PortOutput {
    path: TxPath,
    pub(crate) batch: TxBatch,
    /// Frames to this device's own address; they never reach the port.
    loopback: Vec<Mbuf>,
    pub(crate) link: LinkTraits,
    pub(crate) tap: Option<CaptureHandle>,
    /// The device's number in captures.
    pub(crate) interface: u32,
    /// Frames that left through the port or the proxy.
    pub(crate) frames_sent: u64,
    /// Frames copied into one segment because they had more segments than the port supports.
    pub(crate) frames_linearized: u64,
    /// Frames dropped because they do not fit into one buffer either.
    frames_too_long: u64,
    /// Frames that the kernel sent through the port.
    pub(crate) host_frames_sent: u64,
    /// Frames between port and kernel, in either direction, dropped for lack of room.
    pub(crate) host_frames_dropped: u64,
}

impl PortOutput {
    pub(crate) fn new(path: TxPath, interface: u32, link: LinkTraits) -> PortOutput {
        PortOutput {
            path,
            batch: TxBatch::new(),
            loopback: Vec::new(),
            link,
            tap: None,
            interface,
            frames_sent: 0,
            frames_linearized: 0,
            frames_too_long: 0,
            host_frames_sent: 0,
            host_frames_dropped: 0,
        }
    }

    /// True if frames wait for the next burst or for loopback.
    #[inline]
    pub(crate) fn has_frames(&self) -> bool {
        !self.batch.is_empty() || self.has_loopback()
    }

    #[inline]
    pub(crate) fn has_loopback(&self) -> bool {
        !self.loopback.is_empty()
    }

    /// True if the kernel has not taken all frames of earlier bursts.
    #[inline]
    pub(crate) fn has_backlog(&self) -> bool {
        matches!(&self.path, TxPath::Queue(queue) if queue.has_backlog())
    }

    /// Hands the batch to the port; frames that do not fit stay in it.
    #[inline]
    pub(crate) fn transmit_batch(&mut self) {
        if !self.batch.is_empty() {
            self.transmit_frames();
        } else if let TxPath::Queue(queue) = &mut self.path {
            queue.retry_backlog();
        }
    }

    #[inline(never)]
    fn transmit_frames(&mut self) {
        let sent = match &mut self.path {
            TxPath::Queue(queue) => queue.tx_burst(&mut self.batch),
            TxPath::Proxy(proxy) => proxy.transmit_batch(&mut self.batch),
            TxPath::Closed => {
                self.drop_batch();
                0
            }
        };
        self.frames_sent += sent as u64;
    }

    #[cold]
    fn drop_batch(&mut self) {
        while self.batch.pop().is_some() {}
    }

    /// Closes the path to a removed port: drops the waiting frames and all later ones.
    pub(super) fn close(&mut self) {
        self.path = TxPath::Closed;
        self.drop_batch();
    }

    /// Takes the loopback frames as received frames. Their checksums are ours and count as good.
    pub(crate) fn take_loopback(&mut self) -> impl Iterator<Item = (RxFrame, FrameInfo)> + use<> {
        let info = FrameInfo {
            checksum: RxChecksum::Good,
            rss_hash: 0,
        };
        let frames = std::mem::take(&mut self.loopback);
        frames
            .into_iter()
            .map(move |mbuf| (RxFrame::new(mbuf), info))
    }

    /// Queues a complete frame for the next burst or for loopback. It has its checksum, or gets the
    /// metadata that the port needs to compute it. `wall_time` is for captures, in nanoseconds since
    /// the epoch.
    #[inline]
    pub(crate) fn send_frame(
        &mut self,
        mut mbuf: Mbuf,
        meta: &FrameMeta,
        cache: &mut MbufCache,
        wall_time: u64,
    ) {
        if meta.checksum == TxChecksum::Partial {
            complete_checksum(&mut mbuf, meta);
        }
        self.capture_sent(&mbuf, meta.checksum == TxChecksum::Offload, wall_time);
        if meta.self_addressed {
            self.loopback.push(mbuf);
            return;
        }
        if meta.checksum == TxChecksum::Offload && self.link.tx_checksum {
            mbuf.set_tx_offload(TxOffload {
                l2_len: meta.l2_len,
                l3_len: u16::from(meta.l3_len),
                l4_len: meta.l4_len,
                ipv6: meta.ipv6,
                ip_checksum: meta.tso_segsz > 0 && self.link.tx_ip_checksum,
                tcp_checksum: true,
                tso_segsz: meta.tso_segsz,
            });
        }
        let max_segments = match meta.tso_segsz {
            0 => self.link.max_segments,
            _ => self.link.max_tso_segments,
        };
        if mbuf.nb_segs() > max_segments {
            match self.linearize(mbuf, cache) {
                Some(flat) => mbuf = flat,
                None => return,
            }
        }
        if let Err(rejected) = self.batch.push(mbuf) {
            cache.free(rejected);
        }
    }

    #[inline]
    fn capture_sent(&self, mbuf: &Mbuf, lacks_checksum: bool, wall_time: u64) {
        if let Some(capture) = &self.tap {
            capture.record_frame(
                self.interface,
                Direction::Outbound,
                wall_time,
                lacks_checksum,
                |bytes| {
                    for segment in mbuf.segments() {
                        bytes.extend_from_slice(segment);
                    }
                },
            );
        }
    }

    /// Copies a frame with more segments than the port supports into one buffer. Returns `None` if
    /// there is no buffer or the frame does not fit; it is dropped, and TCP sends its segments again
    /// one by one.
    #[cold]
    fn linearize(&mut self, mbuf: Mbuf, cache: &mut MbufCache) -> Option<Mbuf> {
        let flat = mbuf.linearize(cache);
        cache.free(mbuf);
        match flat {
            Some(_) => self.frames_linearized += 1,
            None => self.frames_too_long += 1,
        }
        flat
    }

    /// Frames dropped because the port can never send them.
    pub(crate) fn frames_refused(&self) -> u64 {
        let by_driver = match &self.path {
            TxPath::Queue(queue) => queue.refused_packets(),
            TxPath::Proxy(_) | TxPath::Closed => 0,
        };
        by_driver + self.frames_too_long
    }

    /// Queues a frame that another worker prepared. A full port drops it, as a full NIC ring does.
    pub(super) fn send_for_other(&mut self, mbuf: Mbuf, cache: &mut MbufCache) {
        if self.batch.is_full() {
            self.transmit_batch();
        }
        if let Err(rejected) = self.batch.push(mbuf) {
            cache.free(rejected);
        }
    }

    /// Queues a frame that the kernel sends, with its checksums. If the port is full, drops and counts
    /// it.
    pub(super) fn send_for_host(&mut self, mbuf: Mbuf, cache: &mut MbufCache, wall_time: u64) {
        self.capture_sent(&mbuf, false, wall_time);
        if self.batch.is_full() {
            self.transmit_batch();
        }
        match self.batch.push(mbuf) {
            Ok(()) => self.host_frames_sent += 1,
            Err(rejected) => {
                self.host_frames_dropped += 1;
                cache.free(rejected);
            }
        }
    }

    /// Has the port free the buffers of sent frames.
    pub(crate) fn release_sent_buffers(&mut self) {
        if let TxPath::Queue(queue) = &mut self.path {
            queue.done_cleanup(0);
        }
    }
}

/// Computes the TCP checksum of a frame whose pseudo-header sum is in the field already.
fn complete_checksum(mbuf: &mut Mbuf, meta: &FrameMeta) {
    let headers = usize::from(meta.l2_len) + usize::from(meta.l3_len) + usize::from(meta.l4_len);
    let mut sum = checksum::OnesComplementSum::new();
    let mut skip = headers;
    for segment in mbuf.segments() {
        let skipped = skip.min(segment.len());
        sum.add(&segment[skipped..]);
        skip -= skipped;
    }
    let data = mbuf.data_mut();
    let Some(head) = data.get(..headers) else {
        return;
    };
    let value = checksum::complete_tcp_checksum(head, meta, sum);
    let offset = checksum::tcp_checksum_offset(meta);
    if let Some(field) = data.get_mut(offset..offset + 2) {
        field.copy_from_slice(&value);
    }
}
