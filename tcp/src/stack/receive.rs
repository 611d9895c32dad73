//! From a burst of frames to connections: classification, lookup, and segments for none of them
//! (listeners, strangers).
//!
//! A frame of the connection that came last is worked at once. Others wait in a short row, so
//! that the CPU fetches their table slots, then their connections, then their queues, while it
//! works those before them:
//! ```text
//! flow, hash ─► slot ─► connection ─► queues ─► each frame in its turn
//! ```

use crate::base::buffer::RecvBuf;
use crate::base::frame_info::{FrameInfo, RxChecksum};
use crate::base::ids::ConnId;
use crate::base::state::TcpState;
use crate::base::time::Instant;
use crate::connection::input::Verdict;
use crate::connection::rx_coalescer::Train;
use crate::stack::Stack;
use crate::tcb::flags::ConnectionFlags;
use crate::wire::flow_key::FlowKey;
use crate::wire::frame::{self, FrameContent, LinkIdentity};
use crate::wire::segment::{self, Segment};

/// Frames in the row. More would push the first out of a small cache before its turn.
const ROW: usize = 32;
/// So many frames before its own is a connection asked for, and its queues.
const FAR: usize = 12;
const NEAR: usize = 6;

/// What is known of a frame in the row.
#[derive(Clone, Copy)]
pub(crate) struct Staged {
    hash: u64,
    /// Where its connection probably is.
    index: u32,
    checksum: RxChecksum,
    /// `hash` is its flow's.
    hashed: bool,
    /// Its flow is that of the frame before.
    follows: bool,
    /// More than any headers.
    data: bool,
}

impl Staged {
    const NONE: Staged = Staged {
        hash: 0,
        index: u32::MAX,
        checksum: RxChecksum::Bad,
        hashed: false,
        follows: false,
        data: false,
    };
}

/// Frames that wait, and what is known of them; empty between bursts.
pub(crate) struct Row<B> {
    frames: Vec<B>,
    staged: Vec<Staged>,
}

impl<B> Default for Row<B> {
    fn default() -> Self {
        Row {
            frames: Vec::new(),
            staged: Vec::new(),
        }
    }
}

/// A burst in work.
struct Burst {
    link: LinkIdentity,
    seg: Segment,
    train: Train,
}

impl<B: RecvBuf, R> Stack<B, R> {
    /// Takes a whole burst of received frames. ARP, NDP, ICMP are answered inside; the answers
    /// leave with the next `poll`.
    pub fn receive_burst(
        &mut self,
        now: Instant,
        mut frames: impl Iterator<Item = (B, FrameInfo)>,
    ) {
        self.shared.now = now;
        let link = self.link();
        let tagged = link.vlan.is_some();
        let mut row = core::mem::take(&mut self.row);
        let mut burst = Burst {
            train: Train::new(link.mac, link.vlan),
            link,
            seg: Segment::default(),
        };
        let mut flow = FlowKey::default();
        while let Some((mut b, FrameInfo { checksum, .. })) = frames.next() {
            self.shared.stats.frames_in += 1;
            // Behind a waiting frame all wait: connections see theirs in order.
            let first = row.frames.is_empty();
            if first {
                match self.ride(&mut burst.train, b, checksum) {
                    Some(back) => b = back,
                    None => continue,
                }
            }
            let key = frame::peek_flow(b.chunk(), tagged);
            let mut s = Staged {
                checksum,
                data: b.remaining() > 128,
                ..Staged::NONE
            };
            if let Some(key) = key {
                s.follows = !first && key == flow;
                s.hashed = true;
                if s.follows {
                    s.hash = row.staged.last().map_or(0, |l| l.hash);
                } else if first && self.is_last(&key) {
                    let more = frames.size_hint().1 != Some(0);
                    self.frame(now, b, &s, more, &mut burst);
                    continue;
                } else {
                    s.hash = key.hash::<1, 3>(self.shared.hash_key);
                    B::prefetch(self.shared.table.start(s.hash));
                    flow = key;
                }
            } else if first {
                self.frame(now, b, &s, false, &mut burst);
                continue;
            } else {
                flow = FlowKey::default();
            }
            row.staged.push(s);
            row.frames.push(b);
            if row.frames.len() == ROW {
                self.work_row(now, &mut row, &mut burst);
            }
        }
        if !row.frames.is_empty() {
            self.work_row(now, &mut row, &mut burst);
        }
        self.end_train(&mut burst.train);
        self.row = row;
    }

    fn link(&self) -> LinkIdentity {
        LinkIdentity {
            mac: self.shared.config.mac,
            vlan: self.shared.config.vlan,
        }
    }

    /// Takes the frame when it is the train's next; else gives it back.
    #[inline]
    fn ride(&mut self, train: &mut Train, mut b: B, checksum: RxChecksum) -> Option<B> {
        if checksum == RxChecksum::Bad {
            return Some(b);
        }
        let Some(w) = train.next(&b) else {
            return Some(b);
        };
        if checksum == RxChecksum::Unknown && !train.verified(&w, &b) {
            self.shared.stats.csum_errors += 1;
            return None;
        }
        train.take(&w);
        let end = w.headers + w.len as usize;
        if b.remaining() > end {
            b.truncate(end);
        }
        b.advance(w.headers);
        self.conns[train.index as usize].rx.push(b);
        None
    }

    #[inline]
    fn end_train(&mut self, train: &mut Train) {
        if let Some(c) = self.conns.get_mut(train.index as usize) {
            c.train_ended(&mut self.shared.context(train.index), train);
        }
    }

    fn work_row(&mut self, now: Instant, row: &mut Row<B>, burst: &mut Burst) {
        let Row { frames, staged } = row;
        if frames.len() > 1 {
            for s in staged.iter_mut().take(FAR) {
                self.fetch(s);
            }
            for s in staged.iter().take(NEAR) {
                self.fetch_queues(s);
            }
        }
        for (i, b) in frames.drain(..).enumerate() {
            if let Some(s) = staged.get_mut(i + FAR) {
                self.fetch(s);
            }
            if let Some(s) = staged.get(i + NEAR) {
                self.fetch_queues(s);
            }
            let s = staged[i];
            let more = staged.get(i + 1).is_none_or(|s| s.follows);
            if !s.follows {
                self.frame(now, b, &s, more, burst);
            } else if let Some(b) = self.ride(&mut burst.train, b, s.checksum) {
                self.frame(now, b, &s, more, burst);
            }
        }
        staged.clear();
    }

    /// Asks for the connection, by what its slot says.
    #[inline]
    fn fetch(&self, s: &mut Staged) {
        if s.hashed && !s.follows {
            s.index = self.shared.table.guess(s.hash).unwrap_or(u32::MAX);
            if let Some(c) = self.conns.get(s.index as usize) {
                c.prefetch_for(s.data);
            }
        }
    }

    /// Asks for its queues, by what the connection says.
    #[inline]
    fn fetch_queues(&self, s: &Staged) {
        if let Some(c) = self.conns.get(s.index as usize) {
            c.prefetch_queues_for(s.data);
        }
    }

    /// A frame in its turn. `more`: the next may be of the same flow.
    #[inline]
    fn frame(&mut self, now: Instant, mut b: B, s: &Staged, more: bool, burst: &mut Burst) {
        self.end_train(&mut burst.train);
        let mut src_mac = [0; 6];
        let stats = &mut self.shared.stats;
        match frame::classify_frame(&burst.link, &mut b, s.checksum, &mut src_mac, stats) {
            Some(FrameContent::Tcp { key, ce }) => {
                let Some(b) = self.parsed(&mut burst.seg, b, ce) else {
                    return;
                };
                let payload = b.remaining() > 0;
                let hash = s.hashed.then_some(s.hash);
                let known = self.tcp(now, &key, hash, &burst.seg, b, src_mac);
                if known && payload && more {
                    let c = &self.conns[self.last as usize];
                    burst.train.begin(&self.shared, self.last, c);
                }
            }
            Some(other) => self.other(now, other, b, src_mac),
            None => {}
        }
    }

    /// The segment's header, and the buffer behind it; `None`: malformed.
    #[inline]
    pub(crate) fn parsed(&mut self, seg: &mut Segment, mut b: B, ce: bool) -> Option<B> {
        if !seg.parse(b.chunk(), &mut self.shared.stats.bad_options) {
            self.shared.stats.in_errs += 1;
            return None;
        }
        seg.ce = ce;
        self.shared.stats.in_segs += 1;
        b.advance(usize::from(seg.header_len));
        Some(b)
    }

    /// A burst is mostly of one flow: the last connection is tried before hashing.
    #[inline]
    fn is_last(&self, key: &FlowKey) -> bool {
        self.conns
            .get(self.last as usize)
            .is_some_and(|c| c.template.carries(key) && c.tcb.has(ConnectionFlags::IN_FLOW_TABLE))
    }

    /// Asks the CPU for a connection that the caller is about to use, and does nothing else:
    /// worth it some connections ahead, when many have their turn one after another.
    #[inline]
    pub fn prefetch_connection(&self, id: ConnId) {
        if let Some(c) = self.conns.get(id.index as usize) {
            c.prefetch();
        }
    }

    /// As [`Stack::prefetch_connection`], for the queues of a connection that should have arrived.
    #[inline]
    pub fn prefetch_queues(&self, id: ConnId) {
        if let Some(c) = self.conns.get(id.index as usize) {
            c.prefetch_queues();
        }
    }

    /// Takes a copy of a frame that another worker received and answers: what every worker of
    /// a device has to know (neighbours, ICMP errors), see [`crate::Destination::AllWorkers`].
    pub fn receive_copy(&mut self, now: Instant, mut frame: B, checksum: RxChecksum) {
        self.shared.now = now;
        let mut src_mac = [0; 6];
        let what = frame::classify_frame(
            &self.link(),
            &mut frame,
            checksum,
            &mut src_mac,
            &mut self.shared.stats,
        );
        if let Some(what) = what {
            self.shared.control.silent = true;
            self.other(now, what, frame, src_mac);
            self.shared.control.silent = false;
        }
    }

    /// `hash`: the key's, if somebody took it. `false`: it has no connection.
    #[inline]
    pub(crate) fn tcp(
        &mut self,
        now: Instant,
        key: &FlowKey,
        hash: Option<u64>,
        seg: &Segment,
        b: B,
        src_mac: [u8; 6],
    ) -> bool {
        if !self.is_last(key) {
            let hash = hash.unwrap_or_else(|| key.hash::<1, 3>(self.shared.hash_key));
            match self
                .shared
                .table
                .find(hash, |i| self.conns[i as usize].template.carries(key))
            {
                Some(i) => self.last = i,
                None if seg.flags & (segment::SYN | segment::RST | segment::ACK)
                    == segment::ACK
                    && let Some(opened) = self.cookie_returned(now, key, seg, src_mac) =>
                {
                    let Some(i) = opened else { return false };
                    self.last = i;
                }
                None => {
                    self.stranger(now, key, seg, b.remaining() as u32, src_mac);
                    return false;
                }
            }
        }
        self.known(now, self.last, key, seg, b, src_mac);
        true
    }

    #[inline]
    fn known(
        &mut self,
        now: Instant,
        index: u32,
        key: &FlowKey,
        seg: &Segment,
        b: B,
        src_mac: [u8; 6],
    ) {
        let c = &mut self.conns[index as usize];
        if let Err(b) = c.predicted(&mut self.shared.context(index), seg, b) {
            let payload = b.remaining() as u32;
            match c.segment(&mut self.shared.context(index), seg, b) {
                Verdict::Done => self.reap(index),
                Verdict::Reset => {
                    self.reap(index);
                    self.refuse(now, key, seg, payload, src_mac);
                }
                Verdict::Reopen => {
                    self.shared.stats.time_wait_recycled += 1;
                    c.closed(&mut self.shared.context(index));
                    self.reap(index);
                    self.stranger(now, key, seg, payload, src_mac);
                }
            }
        }
    }

    /// Who listens there: on the address first, then on all.
    pub(crate) fn listener_of(&self, key: &FlowKey) -> Option<u32> {
        let local = key.local();
        let ports = &self.shared.ports;
        let one = ports.get(&(local.port(), Some(local.ip())));
        one.or_else(|| ports.get(&(local.port(), None))).copied()
    }

    /// A stranger's segment that can be meant: from an address that a peer can have and that is
    /// not ours (LAND), and no SYN with FIN.
    pub(crate) fn sound(&self, key: &FlowKey, seg: &Segment, src_mac: [u8; 6]) -> bool {
        let remote = key.remote();
        self.shared.can_be_peer(remote.ip(), src_mac)
            && remote.port() != 0
            && seg.flags & (segment::SYN | segment::FIN) != segment::SYN | segment::FIN
    }

    /// A segment for no connection (RFC 9293 section 3.10.7.1 and .2).
    #[cold]
    fn stranger(
        &mut self,
        now: Instant,
        key: &FlowKey,
        seg: &Segment,
        payload: u32,
        src_mac: [u8; 6],
    ) {
        let own = self.shared.own(key.local().ip());
        if !own || !self.sound(key, seg, src_mac) {
            self.shared.stats.not_for_us += u64::from(!own);
            self.shared.stats.martians += u64::from(own);
            return;
        }
        self.shared.stats.no_connection += u64::from(seg.flags & segment::SYN == 0);
        if seg.flags & segment::RST != 0 {
            return;
        }
        let listener = self.listener_of(key);
        if listener.is_some() && seg.flags & (segment::SYN | segment::ACK) == 0 {
            // Nothing for LISTEN (section 3.10.7.2, fourth).
            return;
        }
        let listener =
            listener.filter(|_| seg.flags & (segment::SYN | segment::ACK) == segment::SYN);
        let Some(listener) = listener else {
            self.shared.stats.no_ports += u64::from(seg.flags & segment::SYN != 0);
            return self.refuse(now, key, seg, payload, src_mac);
        };
        let Some(l) = self.shared.listeners.get_mut(&listener) else {
            return;
        };
        // A cookie needs neither a slot nor a neighbour: it goes where the SYN came from.
        let pressed = l.pending >= l.backlog || self.shared.neighbours.crowded();
        if pressed && l.ready < l.backlog && self.shared.config.syn_cookies {
            return self.send_cookie(now, key, seg, listener, src_mac);
        }
        if l.pending >= l.backlog {
            self.shared.stats.listen_overflows += 1;
            self.shared.stats.listen_drops += 1;
            return;
        }
        let user = l.user;
        let Some(index) = self.alloc(*key) else {
            self.shared.stats.listen_drops += 1;
            return;
        };
        if let Some(l) = self.shared.listeners.get_mut(&listener) {
            l.pending += 1;
        }
        let c = &mut self.conns[index as usize];
        c.listener = listener;
        c.tcb.user = user;
        c.tcb.state = TcpState::SynReceived;
        c.tcb.flags |=
            ConnectionFlags::PASSIVE | ConnectionFlags::IN_BACKLOG | ConnectionFlags::RELEASED;
        c.negotiate(seg, &self.shared.config, self.shared.recv_wscale);
        self.open(index, now);
    }

    fn refuse(
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
        if self.shared.resets.take(now) {
            self.shared
                .control
                .push_reset(src_mac, key, seg, payload, &mut self.shared.stats);
        } else {
            self.shared.stats.resets_skipped += 1;
        }
    }
}
