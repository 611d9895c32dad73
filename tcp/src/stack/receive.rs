//! Receive path from a burst of frames to connections: classification, lookup, and coalescing.
//!
//! A frame of the same connection as the previous frame is processed at once. Other frames wait in a
//! short pipeline, in which their flow table slots, then their connections, then their queues are
//! prefetched while earlier frames are processed:
//! ```text
//! flow, hash ─► slot ─► connection ─► queues ─► frames in order
//! ```
//!
//! Receive coalescing: consecutive segments of one connection in a burst that carry nothing but the
//! next bytes are checked as by header prediction, against the state that the connection expects; the
//! connection then processes all of them at once, like one long segment that a port coalesced. This
//! makes a burst of one flow fast: one comparison of header fields per segment, and one update of the
//! connection per run.

use siw_net::bytes::{read_u16, read_u32, read_u64};
use siw_net::checksum::OnesComplementSum;
use siw_net::frame::{self, FrameContent, FrameHead, FrameOrigin, LinkIdentity};
use siw_net::{FlowKey, FrameInfo, Instant, RecvBuf, RxChecksum};

use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::connection::Connection;
use crate::connection::context::{SharedState, TcpContext};
use crate::connection::input::SegmentVerdict;
use crate::connection::receiver::Delivery;
use crate::stack::Stack;
use crate::stack::syn_cookies::CookieAck;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::send_variables::SendFlags;
use crate::tcb::timer::Timer;
use crate::wire::segment::{ACK, CWR, ECE, FIN, PSH, RST, SYN, Segment, TS_ALIGNED};

/// Frames in the pipeline. A longer pipeline would evict the first frames from a small cache before
/// they are processed.
const PIPELINE_FRAMES: usize = 32;
/// Prefetch distances in frames, for connections and for their queues.
const PREFETCH_CONN_AHEAD: usize = 12;
const PREFETCH_QUEUES_AHEAD: usize = 6;

/// Metadata of a frame in the pipeline.
#[derive(Clone, Copy)]
pub(crate) struct StagedFrame {
    /// Its head; `None`: not TCP, or TCP after IP options or extension headers.
    head: Option<FrameHead>,
    /// Hash of the flow; `None`: no head, or the frame does not wait.
    hash: Option<u64>,
    /// Slot of its connection, guessed from the flow table by comparing hashes only.
    index: u32,
    checksum: RxChecksum,
    /// Belongs to the same flow as the previous frame.
    follows: bool,
    /// Longer than headers alone can be, so it carries data.
    data: bool,
}

impl StagedFrame {
    /// A frame that does not wait: its connection is not guessed.
    fn at_once(head: Option<FrameHead>, checksum: RxChecksum) -> StagedFrame {
        StagedFrame {
            head,
            hash: None,
            index: NO_CONNECTION,
            checksum,
            follows: false,
            data: false,
        }
    }
}

/// Frames waiting to be processed, with their metadata; empty between bursts.
pub(crate) struct RxPipeline<B> {
    frames: Vec<B>,
    staged: Vec<StagedFrame>,
}

impl<B> Default for RxPipeline<B> {
    fn default() -> Self {
        RxPipeline {
            frames: Vec::new(),
            staged: Vec::new(),
        }
    }
}

/// State during the processing of a burst.
struct BurstState {
    link_filter: LinkIdentity,
    seg: Segment,
    coalescer: RxCoalescer,
}

impl<B: RecvBuf, R> Stack<B, R> {
    /// Processes a burst of received frames. ARP, NDP and ICMP are answered too; the next `poll` sends
    /// the answers.
    pub fn receive_burst(
        &mut self,
        now: Instant,
        mut frames: impl Iterator<Item = (B, FrameInfo)>,
    ) {
        self.shared.now = now;
        let link = self.shared.net.link_identity();
        let mut pipeline = core::mem::take(&mut self.rx_pipeline);
        let mut burst = BurstState {
            coalescer: RxCoalescer::new(link.mac, link.vlan),
            link_filter: link,
            seg: Segment::default(),
        };
        while let Some((mut buffer, FrameInfo { checksum, .. })) = frames.next() {
            self.shared.net.stats.frames_in += 1;
            // If any frame waits, all later ones wait too, so that each connection gets its frames in order.
            let first = pipeline.frames.is_empty();
            if first {
                match self.try_coalesce(&mut burst.coalescer, buffer, checksum) {
                    Some(back) => buffer = back,
                    None => continue,
                }
            }
            let head = FrameHead::read(&burst.link_filter, &buffer, checksum);
            if first {
                let is_last = head
                    .as_ref()
                    .is_some_and(|head| self.is_last_connection(&head.key));
                if is_last || head.is_none() {
                    let staged = StagedFrame::at_once(head, checksum);
                    let more = is_last && frames.size_hint().1 != Some(0);
                    self.on_frame(buffer, &staged, more, &mut burst);
                    continue;
                }
            }
            let (mut hash, mut follows) = (None, false);
            if let Some(head) = &head {
                match pipeline.staged.last() {
                    Some(before) if before.head.is_some_and(|before| before.key == head.key) => {
                        (hash, follows) = (before.hash, true);
                    }
                    _ => {
                        let of_flow = self.shared.table_hasher.hash(&head.key);
                        B::prefetch(self.shared.flow_table.start(of_flow));
                        hash = Some(of_flow);
                    }
                }
            }
            pipeline.staged.push(StagedFrame {
                head,
                hash,
                index: NO_CONNECTION,
                checksum,
                follows,
                data: buffer.remaining() > 128,
            });
            pipeline.frames.push(buffer);
            if pipeline.frames.len() == PIPELINE_FRAMES {
                self.process_pipeline(&mut pipeline, &mut burst);
            }
        }
        if !pipeline.frames.is_empty() {
            self.process_pipeline(&mut pipeline, &mut burst);
        }
        self.finish_coalescing(&mut burst.coalescer);
        self.rx_pipeline = pipeline;
    }

    /// Takes the frame if it continues the run of coalesced segments; otherwise returns it.
    #[inline]
    fn try_coalesce(
        &mut self,
        coalescer: &mut RxCoalescer,
        mut buffer: B,
        checksum: RxChecksum,
    ) -> Option<B> {
        if checksum == RxChecksum::Bad {
            return Some(buffer);
        }
        let Some(segment) = coalescer.match_next(&buffer) else {
            return Some(buffer);
        };
        if checksum == RxChecksum::Unknown && !coalescer.is_checksum_valid(&segment, &buffer) {
            self.shared.net.stats.csum_errors += 1;
            return None;
        }
        coalescer.add_segment(&segment);
        let end = segment.headers + segment.len as usize;
        if buffer.remaining() > end {
            buffer.truncate(end);
        }
        buffer.advance(segment.headers);
        self.slots[coalescer.index]
            .receiver
            .receive_queue
            .push(buffer);
        None
    }

    #[inline]
    fn finish_coalescing(&mut self, coalescer: &mut RxCoalescer) {
        if let Some(conn) = self.slots.get_mut(coalescer.index) {
            coalescer.finish(conn, &mut self.shared.context_of(conn.id(coalescer.index)));
        }
    }

    fn process_pipeline(&mut self, pipeline: &mut RxPipeline<B>, burst: &mut BurstState) {
        let RxPipeline { frames, staged } = pipeline;
        if frames.len() > 1 {
            for staged in staged.iter_mut().take(PREFETCH_CONN_AHEAD) {
                self.prefetch_staged_connection(staged);
            }
            for staged in staged.iter().take(PREFETCH_QUEUES_AHEAD) {
                self.prefetch_staged_queues(staged);
            }
        }
        for (i, buffer) in frames.drain(..).enumerate() {
            if let Some(staged) = staged.get_mut(i + PREFETCH_CONN_AHEAD) {
                self.prefetch_staged_connection(staged);
            }
            if let Some(staged) = staged.get(i + PREFETCH_QUEUES_AHEAD) {
                self.prefetch_staged_queues(staged);
            }
            let current = staged[i];
            let more = staged.get(i + 1).is_none_or(|staged| staged.follows);
            if !current.follows {
                self.on_frame(buffer, &current, more, burst);
            } else if let Some(buffer) =
                self.try_coalesce(&mut burst.coalescer, buffer, current.checksum)
            {
                self.on_frame(buffer, &current, more, burst);
            }
        }
        staged.clear();
    }

    /// Prefetches the frame's connection; its flow table slot was prefetched earlier.
    #[inline]
    fn prefetch_staged_connection(&self, staged: &mut StagedFrame) {
        if let Some(hash) = staged.hash
            && !staged.follows
        {
            let guess = self.shared.flow_table.guess(hash);
            staged.index = guess.unwrap_or(NO_CONNECTION);
            if let Some(conn) = self.slots.get(staged.index) {
                conn.prefetch_for(staged.data);
            }
        }
    }

    /// Prefetches the queues of the frame's connection, which was prefetched earlier.
    #[inline]
    fn prefetch_staged_queues(&self, staged: &StagedFrame) {
        if let Some(conn) = self.slots.get(staged.index) {
            conn.prefetch_queues_for(staged.data);
        }
    }

    /// Processes one frame. `more`: the next may belong to the same flow.
    #[inline]
    fn on_frame(
        &mut self,
        mut buffer: B,
        staged: &StagedFrame,
        more: bool,
        burst: &mut BurstState,
    ) {
        self.finish_coalescing(&mut burst.coalescer);
        let mut origin = FrameOrigin::default();
        let link = &burst.link_filter;
        if let Some(head) = &staged.head
            && head.is_plain()
        {
            head.strip(&mut buffer, &mut origin);
            return self.on_tcp_frame(buffer, (&head.key, head.ce), origin, (staged, more), burst);
        }
        let stats = &mut self.shared.net.stats;
        match frame::classify_frame(link, &mut buffer, staged.checksum, &mut origin, stats) {
            Some(FrameContent::Tcp { key, ce }) => {
                self.on_tcp_frame(buffer, (&key, ce), origin, (staged, more), burst);
            }
            Some(content) => {
                let (now, net) = (self.shared.now, &mut self.shared.net);
                let received = self.input.receive(net, now, content, buffer, origin);
                self.on_received(received);
            }
            None => {}
        }
    }

    /// Processes a frame stripped to its TCP segment.
    #[inline]
    fn on_tcp_frame(
        &mut self,
        buffer: B,
        (key, ce): (&FlowKey, bool),
        origin: FrameOrigin,
        (staged, more): (&StagedFrame, bool),
        burst: &mut BurstState,
    ) {
        let Some(buffer) = self.parse_segment(&mut burst.seg, buffer, ce) else {
            return;
        };
        let payload = buffer.remaining() > 0;
        let matched = self.on_tcp_segment(key, staged.hash, &burst.seg, buffer, origin);
        if matched && payload && more {
            let conn = &self.slots[self.last_connection];
            burst
                .coalescer
                .start_after(&self.shared, self.last_connection, conn);
        }
    }

    /// Parses the TCP header into `seg` and returns the payload; `None`: the header is malformed.
    #[inline(always)]
    pub(crate) fn parse_segment(
        &mut self,
        seg: &mut Segment,
        mut buffer: B,
        ce: bool,
    ) -> Option<B> {
        if !seg.parse(buffer.chunk(), &mut self.shared.stats.bad_options) {
            self.shared.net.stats.in_errs += 1;
            return None;
        }
        seg.ce = ce;
        self.shared.stats.in_segs += 1;
        buffer.advance(usize::from(seg.header_len));
        Some(buffer)
    }

    /// Returns whether the key is that of the last connection. It is tried first, since most frames of a
    /// burst belong to one flow: this saves hashing and the flow table lookup.
    #[inline]
    fn is_last_connection(&self, key: &FlowKey) -> bool {
        self.slots.get(self.last_connection).is_some_and(|conn| {
            conn.path.template.carries(key) && conn.tcb.has(ConnectionFlags::IN_FLOW_TABLE)
        })
    }

    /// Processes a TCP segment. `hash`: hash of the key, if already computed. Returns `false` if the
    /// segment matched no connection.
    #[inline]
    pub(crate) fn on_tcp_segment(
        &mut self,
        key: &FlowKey,
        hash: Option<u64>,
        seg: &Segment,
        buffer: B,
        origin: FrameOrigin,
    ) -> bool {
        if !self.is_last_connection(key) {
            let hash = hash.unwrap_or_else(|| self.shared.table_hasher.hash(key));
            let found = self.slots.find(&self.shared, key, hash);
            let may_prove = found.is_none() && seg.flags & (SYN | RST | ACK) == ACK;
            let cookie = if may_prove {
                let has_data = buffer.remaining() > 0;
                self.shared.check_cookie(key, seg, has_data, origin.src_mac)
            } else {
                None
            };
            match (found, cookie) {
                (Some(i), _) => self.last_connection = i,
                (None, Some(CookieAck::Proof(cookie))) => {
                    let Some(i) = self.open_from_cookie(key, seg, &cookie, origin.src_mac) else {
                        return false;
                    };
                    self.last_connection = i;
                }
                (None, Some(_)) => return false,
                (None, None) if self.shared.is_host_segment(key) => {
                    // A reassembled datagram is no longer a frame.
                    let headers = match origin.stripped {
                        0 => 0,
                        stripped => usize::from(stripped) + usize::from(seg.header_len),
                    };
                    self.input.hand_over(&mut self.shared.net, buffer, headers);
                    return false;
                }
                (None, None) => {
                    let payload = buffer.remaining() as u32;
                    self.on_unmatched_segment(key, seg, payload, origin.src_mac, None);
                    return false;
                }
            }
        }
        self.on_segment(self.last_connection, key, seg, buffer, origin.src_mac);
        true
    }

    #[inline]
    fn on_segment(
        &mut self,
        index: u32,
        key: &FlowKey,
        seg: &Segment,
        buffer: B,
        src_mac: [u8; 6],
    ) {
        let conn = &mut self.slots[index];
        if let Err(buffer) =
            conn.try_header_prediction(&mut self.shared.context_of(conn.id(index)), seg, buffer)
        {
            let payload = buffer.remaining() as u32;
            match conn.process_segment(&mut self.shared.context_of(conn.id(index)), seg, buffer) {
                SegmentVerdict::Done => self.slots.free_if_done(&mut self.shared, index),
                SegmentVerdict::Reset => {
                    self.slots.free_if_done(&mut self.shared, index);
                    self.shared
                        .reset_unmatched_segment(key, seg, payload, src_mac);
                }
                SegmentVerdict::Reopen => {
                    self.on_syn_in_time_wait(index, key, seg, payload, src_mac)
                }
            }
        }
    }
}

/// The index that means "no connection".
const NO_CONNECTION: u32 = u32::MAX;
/// Length of a TCP header with timestamps as its only option.
const TCP_WITH_TIMESTAMPS: usize = 32;

/// The expected header fields of the next segment, and the totals of the segments accepted so far.
struct RxCoalescer {
    index: u32,
    v6: bool,
    vlan: Option<u16>,
    /// Our MAC address, right-aligned.
    mac: u64,
    /// The peer's address, then ours; IPv4 fills the first word.
    addresses: [u64; 4],
    /// The peer's port in the high half, ours in the low half.
    ports: u32,
    match_next: SeqNr,
    ack: SeqNr,
    window: u16,
    ts_recent: u32,
    emss: u32,
    /// Payload bytes and buffers that the connection can still accept.
    space: u32,
    room: u32,
    /// Number of segments accepted, and the number that they count as for the ACK policy.
    segs: u32,
    counted: u32,
    buffers: u32,
    bytes: u32,
    push: bool,
}

/// A segment that continues the run.
struct CoalescedSegment {
    headers: usize,
    len: u32,
    /// Number of pool buffers that the frame occupies.
    buffers: u32,
    push: bool,
}

impl RxCoalescer {
    fn new(mac: [u8; 6], vlan: Option<u16>) -> Self {
        let mut padded_mac = [0; 8];
        padded_mac[2..].copy_from_slice(&mac);
        RxCoalescer {
            index: NO_CONNECTION,
            v6: false,
            vlan,
            mac: u64::from_be_bytes(padded_mac),
            addresses: [0; 4],
            ports: 0,
            match_next: SeqNr(0),
            ack: SeqNr(0),
            window: 0,
            ts_recent: 0,
            emss: 0,
            space: 0,
            room: 0,
            segs: 0,
            buffers: 0,
            counted: 0,
            bytes: 0,
            push: false,
        }
    }

    /// Prepares to match the segments that follow one of this connection, which was processed.
    #[inline]
    fn start_after<B: RecvBuf, R>(
        &mut self,
        sh: &SharedState,
        index: u32,
        conn: &Connection<B, R>,
    ) {
        const NEVER: ConnectionFlags = ConnectionFlags::RELEASED
            .union(ConnectionFlags::FIN_SEEN)
            .union(ConnectionFlags::LAST_WAS_MARKED)
            .union(ConnectionFlags::UNREAD)
            .union(ConnectionFlags::TIMESTAMPS);
        let (tcb, snd, rcv) = (&conn.tcb, &conn.sender.snd, &conn.receiver.rcv);
        let window = snd.wnd >> tcb.scales.send();
        if tcb.state != TcpState::Established
            || tcb.is_timer(Timer::Persist)
            || tcb.flags & NEVER != ConnectionFlags::TIMESTAMPS
            || snd.has(SendFlags::RECOVERING)
            || conn.receiver.out_of_order.is_some()
            || window > 0xffff
            || window << tcb.scales.send() != snd.wnd
        {
            return;
        }
        let own = conn.receiver.counted_buffers as usize;
        // Beyond a quarter, segments share buffers.
        let room = (sh.config.buffers_of_one() / 4).saturating_sub(own);
        let all = sh.held.free();
        self.index = index;
        self.v6 = conn.path.template.is_v6();
        (self.addresses, self.ports) = conn.path.template.key().in_peer_headers();
        self.match_next = rcv.nxt;
        self.ack = snd.una;
        self.window = window as u16;
        self.ts_recent = rcv.ts_recent;
        self.emss = u32::from(tcb.emss);
        self.space = rcv.window();
        self.room = u32::try_from(room.min(all)).unwrap_or(u32::MAX);
        (self.segs, self.counted, self.buffers, self.bytes) = (0, 0, 0, 0);
        self.push = false;
    }

    /// Matches the frame against the next segment, without its checksums. `None`: no match.
    #[inline]
    fn match_next<B: RecvBuf>(&self, buffer: &B) -> Option<CoalescedSegment> {
        if self.index == NO_CONNECTION {
            return None;
        }
        let (bytes, buffers) = (buffer.chunk(), buffer.buffer_count() as u32);
        if buffers > self.room {
            return None;
        }
        let size = (buffer.remaining(), buffers);
        match (self.vlan, self.v6) {
            (None, false) => self.match_headers::<14, 20>(bytes, size),
            (None, true) => self.match_headers::<14, 40>(bytes, size),
            (Some(_), false) => self.match_headers::<18, 20>(bytes, size),
            (Some(_), true) => self.match_headers::<18, 40>(bytes, size),
        }
    }

    #[inline(always)]
    fn match_headers<const L2: usize, const L3: usize>(
        &self,
        bytes: &[u8],
        (frame, buffers): (usize, u32),
    ) -> Option<CoalescedSegment> {
        let headers = L2 + L3 + TCP_WITH_TIMESTAMPS;
        let bytes = bytes.get(..headers)?;
        let mut good = read_u64(bytes, 0) >> 16 == self.mac;
        if L2 == 18 {
            good &= read_u16(bytes, 12) == 0x8100 && Some(read_u16(bytes, 14) & 0xfff) == self.vlan;
        }
        let len = if L3 == 20 {
            // No options, not a fragment, TCP; no CE mark.
            good &= read_u32(bytes, L2 - 2) >> 8 == 0x080045 && bytes[L2 + 1] & 3 != 3;
            good &= read_u32(bytes, L2 + 6) & 0x3fff_00ff == 6;
            good &= read_u64(bytes, L2 + 12) == self.addresses[0];
            usize::from(read_u16(bytes, L2 + 2)).wrapping_sub(L3 + TCP_WITH_TIMESTAMPS)
        } else {
            good &= read_u32(bytes, L2 - 2) >> 12 == 0x86dd6
                && bytes[L2 + 1] >> 4 & 3 != 3
                && bytes[L2 + 6] == 6;
            for (i, a) in self.addresses.iter().enumerate() {
                good &= read_u64(bytes, L2 + 8 + 8 * i) == *a;
            }
            usize::from(read_u16(bytes, L2 + 4)).wrapping_sub(TCP_WITH_TIMESTAMPS)
        };
        let tcp = &bytes[L2 + L3..];
        let flags = tcp[13];
        let ts = read_u32(tcp, 24);
        good &= read_u32(tcp, 0) == self.ports
            && read_u32(tcp, 4) == self.match_next.0
            && read_u32(tcp, 8) == self.ack.0
            && tcp[12] == (TCP_WITH_TIMESTAMPS as u8 / 4) << 4
            && flags & (FIN | SYN | RST | ACK | ECE | CWR) == ACK
            && read_u16(tcp, 14) == self.window
            && read_u32(tcp, 20) == TS_ALIGNED
            && (ts.wrapping_sub(self.ts_recent) as i32) >= 0;
        // A length below that of the headers wraps around.
        if !good || len == 0 || len > self.space as usize || headers + len > frame {
            return None;
        }
        Some(CoalescedSegment {
            headers,
            len: len as u32,
            buffers,
            push: flags & PSH != 0,
        })
    }

    /// Returns whether the checksums of the frame are correct, for ports that do not verify them.
    fn is_checksum_valid<B: RecvBuf>(&self, segment: &CoalescedSegment, buffer: &B) -> bool {
        let bytes = buffer.chunk();
        let (l2, l4) = (
            if self.vlan.is_some() { 18 } else { 14 },
            segment.headers - TCP_WITH_TIMESTAMPS,
        );
        let mut ip = OnesComplementSum::new();
        ip.add(&bytes[l2..l4]);
        if !self.v6 && ip.value() != 0xffff {
            return false;
        }
        let end = segment.headers + segment.len as usize;
        let mut sum = OnesComplementSum::new();
        let addresses = if self.v6 { 32 } else { 8 };
        sum.add(&bytes[l4 - addresses..l4]);
        sum.add_word(6);
        sum.add_word((end - l4) as u16);
        let mut at = 0;
        for chunk in buffer.chunks() {
            let (from, to) = (l4.saturating_sub(at), (end - at).min(chunk.len()));
            sum.add(&chunk[from.min(to)..to]);
            at += to;
        }
        sum.value() == 0xffff
    }

    #[inline]
    fn add_segment(&mut self, segment: &CoalescedSegment) {
        self.match_next += segment.len;
        self.space -= segment.len;
        self.room -= segment.buffers;
        self.segs += 1;
        self.buffers += segment.buffers;
        self.counted += 1 + u32::from(segment.len > self.emss);
        self.bytes += segment.len;
        self.push |= segment.push;
    }

    /// Updates the connection for all segments of the run, whose payload is already in the receive
    /// queue.
    #[inline]
    fn finish<B: RecvBuf, R>(&mut self, conn: &mut Connection<B, R>, cx: &mut TcpContext<'_>) {
        self.index = NO_CONNECTION;
        if self.segs == 0 {
            return;
        }
        cx.shared.stats.in_segs += u64::from(self.segs);
        cx.shared.stats.hp_hits += u64::from(self.segs);
        let tcb = &mut conn.tcb;
        tcb.last_rx = cx.now.0;
        tcb.probes = 0;
        // TS.Recent stays: only the segment that begins where the last ACK ended updates it (RFC
        // 7323 section 4.3), and that can only be the one before this run.
        conn.sender.snd.wl1 = self.match_next - 1;
        conn.sender.snd.wl2 = self.ack;
        let run = Delivery {
            bytes: self.bytes,
            buffers: self.buffers,
            segments: self.counted,
            push: self.push,
        };
        conn.receiver.on_delivered(tcb, cx, run);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::template::{SegmentFields, Template};
    use siw_net::constants::HEADER_MAX;
    use siw_net::{FlowKey, VecBuf};

    #[test]
    fn the_next_segment_is_matched_and_no_damaged_one() {
        for (local, remote) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")] {
            for vlan in [None, Some(7)] {
                let key = |from: &str, from_port, to: &str, to_port| {
                    let (from, to) = (from.parse().unwrap(), to.parse().unwrap());
                    FlowKey::new(from, from_port, to, to_port).unwrap()
                };
                let mut coalescer = RxCoalescer::new([2, 0, 0, 0, 0, 1], vlan);
                let flow = key(local, 80, remote, 4000);
                (coalescer.addresses, coalescer.ports) = flow.in_peer_headers();
                coalescer.v6 = flow.is_v6();
                (
                    coalescer.index,
                    coalescer.space,
                    coalescer.room,
                    coalescer.emss,
                ) = (0, 5000, 9, 1000);
                (
                    coalescer.match_next,
                    coalescer.ack,
                    coalescer.window,
                    coalescer.ts_recent,
                ) = (SeqNr(u32::MAX - 3), SeqNr(9), 77, 100);
                let fields = SegmentFields {
                    seq: coalescer.match_next,
                    ack: coalescer.ack,
                    flags: ACK,
                    window: coalescer.window,
                    ts: Some((101, 5)),
                    options: &[],
                    payload: 10,
                    ect: true,
                    tso: false,
                };
                let t = Template::new(
                    [4; 6],
                    [2, 0, 0, 0, 0, 1],
                    vlan,
                    &key(remote, 4000, local, 80),
                );
                let (n, meta) = t.meta(&fields);
                let mut out = [0; HEADER_MAX];
                t.build(&mut out[..n], &fields);
                let mut frame = out[..n].to_vec();
                let payload = *b"0123456789";
                let mut sum = OnesComplementSum::new();
                sum.add(&payload);
                let at = siw_net::checksum::tcp_checksum_offset(&meta);
                let done = siw_net::checksum::complete_tcp_checksum(&frame, &meta, sum);
                frame[at..at + 2].copy_from_slice(&done);
                frame.extend(payload);
                let good = VecBuf::from(frame.clone());
                let segment = coalescer.match_next(&good).expect("it is the next");
                assert_eq!((segment.headers, segment.len, segment.push), (n, 10, false));
                assert!(coalescer.is_checksum_valid(&segment, &good));
                for bit in 0..frame.len() * 8 {
                    let mut f = frame.clone();
                    f[bit / 8] ^= 1 << (bit % 8);
                    let f = VecBuf::from(f);
                    let Some(segment) = coalescer.match_next(&f) else {
                        continue;
                    };
                    // Bits that are not compared: the source MAC, the priority of the tag, IPv6
                    // fields for routers.
                    let unread = (6..12).contains(&(bit / 8))
                        || (vlan.is_some() && bit / 8 == 14 && bit % 8 >= 4)
                        || (coalescer.v6 && (n - 72..n - 68).contains(&(bit / 8)))
                        || (coalescer.v6 && bit / 8 == n - 72 + 7);
                    assert!(
                        unread || !coalescer.is_checksum_valid(&segment, &f),
                        "bit {bit} of {n}"
                    );
                }
                coalescer.add_segment(&segment);
                assert!(coalescer.match_next(&good).is_none(), "it came already");
                (coalescer.match_next, coalescer.space) = (SeqNr(u32::MAX - 3), 9);
                assert!(coalescer.match_next(&good).is_none(), "no window");
            }
        }
    }
}
