//! Receive path from a burst of frames to connections: classification, lookup, and segments that match
//! no connection (for listeners, or from unknown peers).
//!
//! A frame of the same connection as the previous frame is processed at once. Other frames wait in a
//! short pipeline, in which their flow table slots, then their connections, then their queues are
//! prefetched while earlier frames are processed:
//! ```text
//! flow, hash ─► slot ─► connection ─► queues ─► frames in order
//! ```

use crate::base::buffer::RecvBuf;
use crate::base::frame_info::{FrameInfo, RxChecksum};
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::base::time::Instant;
use crate::connection::input::SegmentVerdict;
use crate::connection::rx_coalescer::RxCoalescer;
use crate::stack::Stack;
use crate::tcb::flags::ConnectionFlags;
use crate::wire::flow_key::FlowKey;
use crate::wire::frame::{self, FrameContent, FrameOrigin, LinkIdentity};
use crate::wire::segment::{self, Segment};

/// Frames in the pipeline. A longer pipeline would evict the first frames from a small cache before
/// they are processed.
const PIPELINE_FRAMES: usize = 32;
/// Prefetch distances in frames, for connections and for their queues.
const PREFETCH_CONN_AHEAD: usize = 12;
const PREFETCH_QUEUES_AHEAD: usize = 6;

/// Metadata of a frame in the pipeline.
#[derive(Clone, Copy)]
pub(crate) struct StagedFrame {
    hash: u64,
    /// Slot of its connection, guessed from the flow table by comparing hashes only.
    index: u32,
    checksum: RxChecksum,
    /// `hash` is valid.
    hashed: bool,
    /// Belongs to the same flow as the previous frame.
    follows: bool,
    /// Longer than headers alone can be, so it carries data.
    data: bool,
}

impl StagedFrame {
    const NONE: StagedFrame = StagedFrame {
        hash: 0,
        index: u32::MAX,
        checksum: RxChecksum::Bad,
        hashed: false,
        follows: false,
        data: false,
    };
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
        let link = self.link_filter();
        let tagged = link.vlan.is_some();
        let mut pipeline = core::mem::take(&mut self.rx_pipeline);
        let mut burst = BurstState {
            coalescer: RxCoalescer::new(link.mac, link.vlan),
            link_filter: link,
            seg: Segment::default(),
        };
        let mut flow = FlowKey::default();
        while let Some((mut buffer, FrameInfo { checksum, .. })) = frames.next() {
            self.shared.stats.frames_in += 1;
            // If any frame waits, all later ones wait too, so that each connection gets its frames in order.
            let first = pipeline.frames.is_empty();
            if first {
                match self.try_coalesce(&mut burst.coalescer, buffer, checksum) {
                    Some(back) => buffer = back,
                    None => continue,
                }
            }
            let key = frame::peek_flow(buffer.chunk(), tagged);
            let is_last = first && key.is_some_and(|key| self.is_last_connection(&key));
            if is_last || first && key.is_none() {
                let staged = StagedFrame {
                    checksum,
                    ..StagedFrame::NONE
                };
                let more = is_last && frames.size_hint().1 != Some(0);
                self.on_frame(now, buffer, &staged, more, &mut burst);
                continue;
            }
            let follows = key.is_some_and(|key| !first && key == flow);
            let hash = match key {
                Some(_) if follows => pipeline.staged.last().map_or(0, |entry| entry.hash),
                Some(key) => self.shared.table_hasher.hash(&key),
                None => 0,
            };
            if !follows && key.is_some() {
                B::prefetch(self.shared.flow_table.start(hash));
            }
            flow = key.unwrap_or_default();
            pipeline.staged.push(StagedFrame {
                hash,
                index: u32::MAX,
                checksum,
                hashed: key.is_some(),
                follows,
                data: buffer.remaining() > 128,
            });
            pipeline.frames.push(buffer);
            if pipeline.frames.len() == PIPELINE_FRAMES {
                self.process_pipeline(now, &mut pipeline, &mut burst);
            }
        }
        if !pipeline.frames.is_empty() {
            self.process_pipeline(now, &mut pipeline, &mut burst);
        }
        self.finish_coalescing(&mut burst.coalescer);
        self.rx_pipeline = pipeline;
    }

    fn link_filter(&self) -> LinkIdentity {
        LinkIdentity {
            mac: self.shared.config.mac,
            vlan: self.shared.config.vlan,
        }
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
            self.shared.stats.csum_errors += 1;
            return None;
        }
        coalescer.add_segment(&segment);
        let end = segment.headers + segment.len as usize;
        if buffer.remaining() > end {
            buffer.truncate(end);
        }
        buffer.advance(segment.headers);
        self.connections[coalescer.index as usize]
            .receive_queue
            .push(buffer);
        None
    }

    #[inline]
    fn finish_coalescing(&mut self, coalescer: &mut RxCoalescer) {
        if let Some(conn) = self.connections.get_mut(coalescer.index as usize) {
            conn.on_coalesced_segments(&mut self.shared.context_of(coalescer.index), coalescer);
        }
    }

    fn process_pipeline(
        &mut self,
        now: Instant,
        pipeline: &mut RxPipeline<B>,
        burst: &mut BurstState,
    ) {
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
                self.on_frame(now, buffer, &current, more, burst);
            } else if let Some(buffer) =
                self.try_coalesce(&mut burst.coalescer, buffer, current.checksum)
            {
                self.on_frame(now, buffer, &current, more, burst);
            }
        }
        staged.clear();
    }

    /// Prefetches the frame's connection; its flow table slot was prefetched earlier.
    #[inline]
    fn prefetch_staged_connection(&self, staged: &mut StagedFrame) {
        if staged.hashed && !staged.follows {
            staged.index = self
                .shared
                .flow_table
                .guess(staged.hash)
                .unwrap_or(u32::MAX);
            if let Some(conn) = self.connections.get(staged.index as usize) {
                conn.prefetch_for(staged.data);
            }
        }
    }

    /// Prefetches the queues of the frame's connection, which was prefetched earlier.
    #[inline]
    fn prefetch_staged_queues(&self, staged: &StagedFrame) {
        if let Some(conn) = self.connections.get(staged.index as usize) {
            conn.prefetch_queues_for(staged.data);
        }
    }

    /// Processes one frame. `more`: the next may belong to the same flow.
    #[inline]
    fn on_frame(
        &mut self,
        now: Instant,
        mut buffer: B,
        staged: &StagedFrame,
        more: bool,
        burst: &mut BurstState,
    ) {
        self.finish_coalescing(&mut burst.coalescer);
        let mut origin = FrameOrigin::default();
        let link = &burst.link_filter;
        if let Some(end) = frame::plain_frame_end(link, &buffer, staged.checksum) {
            let (key, ce) = frame::strip_plain_frame(&mut buffer, end, &mut origin);
            return self.on_tcp_frame(now, buffer, (&key, ce), origin, (staged, more), burst);
        }
        let stats = &mut self.shared.stats;
        match frame::classify_frame(link, &mut buffer, staged.checksum, &mut origin, stats) {
            Some(FrameContent::Tcp { key, ce }) => {
                self.on_tcp_frame(now, buffer, (&key, ce), origin, (staged, more), burst);
            }
            Some(other) => self.on_other_frame(now, other, buffer, origin),
            None => {}
        }
    }

    /// Processes a frame stripped to its TCP segment.
    #[inline]
    fn on_tcp_frame(
        &mut self,
        now: Instant,
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
        let hash = staged.hashed.then_some(staged.hash);
        let matched = self.on_tcp_segment(now, key, hash, &burst.seg, buffer, origin);
        if matched && payload && more {
            let conn = &self.connections[self.last_connection as usize];
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
            self.shared.stats.in_errs += 1;
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
        self.connections
            .get(self.last_connection as usize)
            .is_some_and(|conn| {
                conn.template.carries(key) && conn.tcb.has(ConnectionFlags::IN_FLOW_TABLE)
            })
    }

    /// Processes a copy of a frame that another worker received and answers. Every worker of a device
    /// needs its information (neighbours, ICMP errors), see [`crate::Destination::AllWorkers`].
    pub fn receive_copy(&mut self, now: Instant, mut frame: B, checksum: RxChecksum) {
        self.shared.now = now;
        let mut origin = FrameOrigin::default();
        let what = frame::classify_frame(
            &self.link_filter(),
            &mut frame,
            checksum,
            &mut origin,
            &mut self.shared.stats,
        );
        if let Some(what) = what {
            self.shared.control_queue.silent = true;
            self.on_other_frame(now, what, frame, origin);
            self.shared.control_queue.silent = false;
        }
    }

    /// Processes a TCP segment. `hash`: hash of the key, if already computed. Returns `false` if the
    /// segment matched no connection.
    #[inline]
    pub(crate) fn on_tcp_segment(
        &mut self,
        now: Instant,
        key: &FlowKey,
        hash: Option<u64>,
        seg: &Segment,
        buffer: B,
        origin: FrameOrigin,
    ) -> bool {
        if !self.is_last_connection(key) {
            let hash = hash.unwrap_or_else(|| self.shared.table_hasher.hash(key));
            match self
                .shared
                .flow_table
                .find(hash, |i| self.connections[i as usize].template.carries(key))
            {
                Some(i) => self.last_connection = i,
                None if seg.flags & (segment::SYN | segment::RST | segment::ACK)
                    == segment::ACK
                    && let Some(opened) = self.cookie_returned(now, key, seg, origin.src_mac) =>
                {
                    let Some(i) = opened else { return false };
                    self.last_connection = i;
                }
                None if self.is_host_segment(key) => {
                    // A reassembled datagram is no longer a frame.
                    let headers = match origin.stripped {
                        0 => 0,
                        stripped => usize::from(stripped) + usize::from(seg.header_len),
                    };
                    self.hand_to_host(buffer, headers);
                    return false;
                }
                None => {
                    let payload = buffer.remaining() as u32;
                    self.on_unmatched_segment(now, key, seg, payload, origin.src_mac, None);
                    return false;
                }
            }
        }
        self.on_segment(now, self.last_connection, key, seg, buffer, origin.src_mac);
        true
    }

    #[inline]
    fn on_segment(
        &mut self,
        now: Instant,
        index: u32,
        key: &FlowKey,
        seg: &Segment,
        buffer: B,
        src_mac: [u8; 6],
    ) {
        let conn = &mut self.connections[index as usize];
        if let Err(buffer) =
            conn.try_header_prediction(&mut self.shared.context_of(index), seg, buffer)
        {
            let payload = buffer.remaining() as u32;
            match conn.process_segment(&mut self.shared.context_of(index), seg, buffer) {
                SegmentVerdict::Done => self.free_if_done(index),
                SegmentVerdict::Reset => {
                    self.free_if_done(index);
                    self.reset_unmatched_segment(now, key, seg, payload, src_mac);
                }
                SegmentVerdict::Reopen => {
                    self.on_syn_in_time_wait(now, index, key, seg, payload, src_mac)
                }
            }
        }
    }

    /// Returns the listener for the key's local address and port; one on the address itself takes
    /// precedence over one on all addresses.
    pub(crate) fn find_listener(&self, key: &FlowKey) -> Option<u32> {
        let local = key.local();
        let ports = &self.shared.ports;
        let one = ports.get(&(local.port(), Some(local.ip())));
        one.or_else(|| ports.get(&(local.port(), None))).copied()
    }

    /// Processes a SYN that is acceptable for a new connection in place of one in TIME-WAIT. The old one is
    /// closed only if the new one can be opened, which needs a listener with room; otherwise it stays, since
    /// the peer may still retransmit its FIN (RFC 9293 section 3.6.1).
    #[cold]
    fn on_syn_in_time_wait(
        &mut self,
        now: Instant,
        index: u32,
        key: &FlowKey,
        seg: &Segment,
        payload: u32,
        src_mac: [u8; 6],
    ) {
        let listener = self
            .find_listener(key)
            .filter(|_| self.is_plausible_peer(key, src_mac) && seg.flags & segment::FIN == 0);
        let Some(entry) = listener.and_then(|id| self.shared.listeners.get(&id)) else {
            let conn = &mut self.connections[index as usize];
            conn.on_unexpected_syn(&mut self.shared.context_of(index));
            return;
        };
        // No cookie: its sequence number is not above those of the old connection.
        let room = entry.pending < entry.backlog && !self.shared.neighbours.crowded();
        if !room || !self.make_slot(index) {
            self.shared.stats.listen_overflows += u64::from(!room);
            self.shared.stats.listen_drops += 1;
            return;
        }
        self.shared.stats.time_wait_recycled += 1;
        let conn = &mut self.connections[index as usize];
        let previous = Some(conn.tcb.snd_nxt);
        conn.enter_closed(&mut self.shared.context_of(index));
        self.free_if_done(index);
        self.on_unmatched_segment(now, key, seg, payload, src_mac, previous);
    }

    /// Returns whether a segment that matches no connection has a source address that a peer can have and
    /// that is not ours (LAND attack).
    pub(crate) fn is_plausible_peer(&self, key: &FlowKey, src_mac: [u8; 6]) -> bool {
        let remote = key.remote();
        self.shared.can_be_peer(remote.ip(), src_mac) && remote.port() != 0
    }

    /// Processes a segment that matches no connection (RFC 9293 sections 3.10.7.1 and 3.10.7.2).
    /// `previous`: SND.NXT of the connection that a SYN replaces.
    #[cold]
    fn on_unmatched_segment(
        &mut self,
        now: Instant,
        key: &FlowKey,
        seg: &Segment,
        payload: u32,
        src_mac: [u8; 6],
        previous: Option<SeqNr>,
    ) {
        let own = self.shared.is_own_address(key.local().ip());
        if !own || !self.is_plausible_peer(key, src_mac) {
            self.shared.stats.not_for_us += u64::from(!own);
            self.shared.stats.martians += u64::from(own);
            return;
        }
        self.shared.stats.no_connection += u64::from(seg.flags & segment::SYN == 0);
        if seg.flags & segment::RST != 0 {
            return;
        }
        let listener = self.find_listener(key);
        if listener.is_some() && seg.flags & (segment::SYN | segment::ACK) == 0 {
            // LISTEN ignores segments with neither SYN nor ACK (section 3.10.7.2, fourth).
            return;
        }
        if listener.is_some()
            && seg.flags & (segment::SYN | segment::ACK | segment::FIN)
                == segment::SYN | segment::FIN
        {
            // SYN with FIN opens and closes at once; no legitimate peer sends it.
            self.shared.stats.martians += 1;
            return;
        }
        let listener =
            listener.filter(|_| seg.flags & (segment::SYN | segment::ACK) == segment::SYN);
        let Some(listener) = listener else {
            self.shared.stats.no_ports += u64::from(seg.flags & segment::SYN != 0);
            return self.reset_unmatched_segment(now, key, seg, payload, src_mac);
        };
        let Some(entry) = self.shared.listeners.get_mut(&listener) else {
            return;
        };
        // A cookie needs neither a slot nor a neighbour entry: it is sent to the source MAC address of the
        // SYN.
        let pressed = entry.pending >= entry.backlog || self.shared.neighbours.crowded();
        if pressed && entry.ready < entry.backlog && self.shared.config.syn_cookies {
            return self.send_cookie(now, key, seg, listener, src_mac);
        }
        if entry.pending >= entry.backlog {
            self.shared.stats.listen_overflows += 1;
            self.shared.stats.listen_drops += 1;
            return;
        }
        let user = entry.user;
        let Some(index) = self.allocate_slot(*key) else {
            self.shared.stats.listen_drops += 1;
            return;
        };
        if let Some(entry) = self.shared.listeners.get_mut(&listener) {
            entry.pending += 1;
        }
        let conn = &mut self.connections[index as usize];
        conn.listener = listener;
        conn.tcb.user = user;
        conn.tcb.state = TcpState::SynReceived;
        conn.tcb.flags |=
            ConnectionFlags::PASSIVE | ConnectionFlags::IN_BACKLOG | ConnectionFlags::RELEASED;
        conn.apply_peer_syn(&mut self.shared.context_of(index), seg);
        self.start_handshake(index, previous);
    }

    fn reset_unmatched_segment(
        &mut self,
        now: Instant,
        key: &FlowKey,
        seg: &Segment,
        payload: u32,
        src_mac: [u8; 6],
    ) {
        if seg.flags & segment::RST != 0 {
            return;
        }
        if self.shared.resets.try_take(now) {
            self.shared.control_queue.push_reset(
                src_mac,
                key,
                seg,
                payload,
                &mut self.shared.stats,
            );
        } else {
            self.shared.stats.resets_skipped += 1;
        }
    }
}
