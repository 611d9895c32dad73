//! The state of one connection. What every segment touches comes first, in two cache lines.

pub(crate) mod ack;
pub(crate) mod context;
pub(crate) mod control_segments;
pub(crate) mod ecn;
pub(crate) mod gso;
pub(crate) mod handshake;
pub(crate) mod input;
pub(crate) mod output;
pub(crate) mod rx_coalescer;
pub(crate) mod time_wait_list;
pub(crate) mod timers;

use crate::base::buffer::RecvBuf;
use crate::base::sequence::SeqNr;
use crate::base::state::TcpState;
use crate::congestion::controller::Controller;
use crate::congestion::window_validation::Validation;
use crate::loss::rack::Patience;
use crate::loss::recovery::Recovery;
use crate::loss::rtt::Rtt;
use crate::queues::out_of_order_queue::Reassembly;
use crate::queues::receive_queue::ReceiveQueue;
use crate::queues::send_queue::SendQueue;
use crate::wire::template::Template;

/// Bits of [`Hot::flags`].
pub(crate) mod flag {
    /// Owed: an ACK, our SYN or SYN-ACK, a window probe, a keepalive probe.
    pub const NEED_ACK: u32 = 1 << 0;
    pub const NEED_SYN: u32 = 1 << 1;
    pub const NEED_PROBE: u32 = 1 << 2;
    pub const NEED_KEEPALIVE: u32 = 1 << 3;
    pub const OWED: u32 = NEED_ACK | NEED_SYN | NEED_PROBE | NEED_KEEPALIVE | NEED_TLP;
    /// Is in the work list.
    pub const IN_WORK: u32 = 1 << 4;
    /// Counted in `SharedState::active`.
    pub const ACTIVE: u32 = 1 << 5;
    /// No owner: no events, freed when closed.
    pub const RELEASED: u32 = 1 << 6;
    pub const FIN_QUEUED: u32 = 1 << 7;
    pub const FIN_SENT: u32 = 1 << 8;
    pub const FIN_RECEIVED: u32 = 1 << 9;
    pub const TIMESTAMPS: u32 = 1 << 10;
    pub const SACK: u32 = 1 << 11;
    /// The other end is this very device.
    pub const SELF: u32 = 1 << 12;
    /// Passive open.
    pub const PASSIVE: u32 = 1 << 13;
    /// Counted in its listener's backlog.
    pub const BACKLOG: u32 = 1 << 14;
    /// SACKed or lost segments, or a recovery in progress: not the straight path.
    pub const RECOVERING: u32 = 1 << 15;
    /// `rto_at` is the persist timer.
    pub const PERSIST: u32 = 1 << 16;
    /// Is in the flow table.
    pub const HASHED: u32 = 1 << 17;
    /// The persist timer fired: a part of a record may leave.
    pub const CUT: u32 = 1 << 18;
    /// The peer's FIN arrived, perhaps before its data.
    pub const FIN_SEEN: u32 = 1 << 19;
    /// Owed: a tail loss probe.
    pub const NEED_TLP: u32 = 1 << 20;
    /// `rto_at` is the probe timeout, or the reordering timer (RFC 8985 section 8).
    pub const PTO: u32 = 1 << 21;
    pub const REO: u32 = 1 << 22;
    /// The path was seen to reorder (RACK.reordering_seen).
    pub const REORDERING: u32 = 1 << 23;
    /// ECN is agreed (RFC 3168 section 6.1.1).
    pub const ECN: u32 = 1 << 24;
    /// Our ACKs carry ECE; our next new segment carries CWR.
    pub const ECE_OWED: u32 = 1 << 25;
    pub const CWR_OWED: u32 = 1 << 26;
    /// DCTCP.CE (RFC 8257 section 3.2): the last data segment was marked.
    pub const MARKED: u32 = 1 << 27;
    /// `emss` is below what the ends agreed on.
    pub const NARROW: u32 = 1 << 28;
    /// Established, and counted in its listener's `ready`.
    pub const READY: u32 = 1 << 29;
    /// Frames of several segments may be among what was sent.
    pub const TRAINS: u32 = 1 << 30;
    /// New segments wait for `pace_at`.
    pub const PACED: u32 = 1 << 31;
}

/// 128 bytes: what every segment touches.
#[repr(C, align(64))]
pub(crate) struct Hot {
    pub rcv_nxt: SeqNr,
    pub snd_una: SeqNr,
    pub snd_nxt: SeqNr,
    pub snd_wnd: u32,
    pub snd_wl1: SeqNr,
    pub snd_wl2: SeqNr,
    /// Right edge of the window we advertised; never moves left.
    pub rcv_adv: SeqNr,
    pub last_ack_sent: SeqNr,
    pub ts_recent: u32,
    pub cwnd: u32,
    /// Payload bytes deemed on the wire (RFC 6675).
    pub pipe: u32,
    /// Payload bytes queued and never sent.
    pub unsent: u32,
    pub ssthresh: u32,
    pub flags: u32,
    pub state: TcpState,
    pub snd_wscale: u8,
    pub rcv_wscale: u8,
    /// Segments received since our last ACK.
    pub unacked_segs: u8,
    pub emss: u16,
    pub events: u16,
    // Second line.
    /// Retransmission, persist, SYN or TIME-WAIT deadline in ns; 0: none.
    pub rto_at: u64,
    pub ack_at: u64,
    /// Where the wheel entry is, u64::MAX: nowhere.
    pub wheel_at: u64,
    pub user: u64,
    pub last_rx: u64,
    pub rtt: Rtt,
    /// The largest window the peer ever offered.
    pub max_snd_wnd: u32,
    pub backoff: u8,
    pub dup_acks: u8,
    pub probes: u8,
    pub phase: Phase,
}

/// Loss recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Phase {
    Open,
    /// Fast recovery (RFC 6675, 6937).
    Recovery,
    /// After a retransmission timeout.
    Loss,
}

impl Hot {
    #[inline]
    pub(crate) fn has(&self, f: u32) -> bool {
        self.flags & f != 0
    }
    /// Sequence space in flight, SYN and FIN included.
    #[inline]
    pub(crate) fn flight(&self) -> u32 {
        self.snd_nxt - self.snd_una
    }
    /// Bytes that the windows allow beyond what is queued; see `Stack::send_room`.
    #[inline]
    pub(crate) fn room(&self) -> u32 {
        let c = self.cwnd.saturating_sub(self.pipe);
        let w = self.snd_wnd.saturating_sub(self.flight());
        c.min(w).saturating_sub(self.unsent)
    }
    pub(crate) fn can_send_data(&self) -> bool {
        matches!(
            self.state,
            TcpState::Established
                | TcpState::CloseWait
                | TcpState::FinWait1
                | TcpState::Closing
                | TcpState::LastAck
        )
    }
}

/// No listener has this id.
pub(crate) const NO_LISTENER: u32 = u32::MAX;

#[repr(C, align(64))]
pub(crate) struct Connection<B, R> {
    pub hot: Hot,
    pub tx: SendQueue<R>,
    pub rx: ReceiveQueue<B>,
    pub ooo: Option<Box<Reassembly<B>>>,
    pub recovery: Option<Box<Recovery>>,
    pub template: Template,
    /// The template's destination was looked up in this generation of the neighbour table; 0: never.
    pub neighbour_generation: u32,
    pub ts_offset: u32,
    /// The low half of its hash: what the flow table keeps.
    pub hash: u32,
    /// Sequence number of the peer's FIN, once `FIN_SEEN`, in order or not.
    pub fin_at: SeqNr,
    pub cc: Controller,
    pub cwv: Validation,
    /// Marks before this were answered (RFC 3168 section 6.1.2: once a window).
    pub ecn_mark: SeqNr,
    /// When the current series of timeouts began, in ticks; 0: none.
    pub stalled_since: u32,
    pub generation: u32,
    pub retransmits: u32,
    pub timeouts: u32,
    /// Of a passive open, else `NO_LISTENER`.
    pub listener: u32,
    /// What the ends agreed on.
    pub emss_agreed: u16,
    /// What RACK learnt, while there is no `recovery`.
    pub patience: Patience,
    /// When (in 2^20 ns) the connection looks after the search for its narrow path's MTU.
    pub search_at: u32,
}

impl<B: RecvBuf, R> Connection<B, R> {
    /// Asks for every line that a segment of the straight path touches.
    #[inline]
    pub(crate) fn prefetch(&self) {
        B::prefetch(&raw const self.hot);
        B::prefetch(&raw const self.hot.rto_at);
        B::prefetch(&raw const self.tx);
        B::prefetch(&raw const self.rx);
        B::prefetch(&raw const self.template);
        B::prefetch(&raw const self.neighbour_generation);
        B::prefetch(&raw const self.cwv);
    }

    /// The second stage: what the lines of the first say where it is.
    #[inline]
    pub(crate) fn prefetch_queues(&self) {
        self.tx.prefetch::<B>();
        self.rx.prefetch();
    }

    /// As `prefetch`, for a segment that carries data, or else an ACK: the other's lines would
    /// only push out what is needed.
    #[inline]
    pub(crate) fn prefetch_for(&self, data: bool) {
        B::prefetch(&raw const self.hot);
        B::prefetch(&raw const self.hot.rto_at);
        B::prefetch(&raw const self.rx);
        B::prefetch(&raw const self.template);
        B::prefetch(&raw const self.neighbour_generation);
        if !data {
            B::prefetch(&raw const self.tx);
            B::prefetch(&raw const self.cwv);
        }
    }

    #[inline]
    pub(crate) fn prefetch_queues_for(&self, data: bool) {
        if data {
            self.rx.prefetch();
        } else {
            self.tx.prefetch::<B>();
        }
    }

    /// Asks for what a timer looks at.
    #[inline]
    pub(crate) fn prefetch_timers(&self) {
        B::prefetch(&raw const self.hot.flags);
        B::prefetch(&raw const self.hot.rto_at);
        B::prefetch(&raw const self.tx);
        B::prefetch(&raw const self.rx);
    }

    /// SACK or D-SACK blocks wait for a pure ACK.
    pub(crate) fn has_blocks(&self) -> bool {
        self.ooo.as_ref().is_some_and(|o| !o.is_idle())
    }

    /// The recovery state, made when it is first needed, and the segments ready to be marked.
    #[cold]
    pub(crate) fn start_recovery(&mut self) {
        self.split_trains();
        self.recovery_state();
    }

    /// The recovery state alone.
    pub(crate) fn recovery_state(&mut self) -> &mut Recovery {
        let (una, patience) = (self.hot.snd_una, self.patience);
        self.recovery.get_or_insert_with(|| {
            let mut r = Box::new(Recovery::new(una));
            r.rack.patience = patience;
            r
        })
    }

    /// Segments are about to be marked.
    pub(crate) fn split_trains(&mut self) {
        if self.hot.has(flag::TRAINS) {
            self.hot.flags &= !flag::TRAINS;
            self.tx.split(0);
        }
    }

    /// The peer hears of what it sent twice (RFC 2883).
    #[cold]
    pub(crate) fn duplicate(&mut self, lo: SeqNr, hi: SeqNr) {
        if self.hot.has(flag::SACK) && lo.lt(hi) {
            self.ooo
                .get_or_insert_with(|| Box::new(Reassembly::new()))
                .duplicate(lo, hi);
        }
    }

    /// Something of ours is unacknowledged or waits to be sent.
    #[inline]
    pub(crate) fn busy(&self) -> bool {
        let h = &self.hot;
        h.state != TcpState::Closed
            && (h.snd_una != h.snd_nxt
                || h.unsent > 0
                || h.flags & (flag::FIN_QUEUED | flag::FIN_SENT) == flag::FIN_QUEUED)
    }

    /// The receive window to advertise: the field's value and the right edge it means. The edge
    /// never moves left (RFC 9293 section 3.8.6.2.1), and moves right only by useful amounts
    /// (silly window avoidance, section 3.8.6.2.2).
    #[inline]
    pub(crate) fn window(&self, limit: u32) -> (u16, SeqNr) {
        let h = &self.hot;
        let free = limit.saturating_sub(self.rx.len_bytes() as u32);
        let now = h.rcv_adv.distance_from(h.rcv_nxt).max(0) as u32;
        let step = (limit / 2).min(u32::from(h.emss));
        let want = if free >= now.saturating_add(step) {
            free
        } else {
            now
        };
        let shift = h.rcv_wscale;
        let mut field = want >> shift;
        if field << shift < now {
            field += 1; // rounding must not shrink the window
        }
        let field = field.min(0xffff);
        (field as u16, h.rcv_nxt + (field << shift))
    }

    /// A pure ACK is worth sending for the window alone.
    pub(crate) fn window_update_due(&self, limit: u32) -> bool {
        let h = &self.hot;
        let left = h.rcv_adv.distance_from(h.rcv_nxt).max(0) as u32;
        if left >= limit / 2 {
            return false;
        }
        let gain = (self.window(limit).1 - h.rcv_nxt).saturating_sub(left);
        gain >= limit / 4 || (left < 2 * u32::from(h.emss) && gain > 0)
    }

    /// `shrink` would give something back.
    pub(crate) fn holds_memory(&self) -> bool {
        self.tx.holds_memory()
            || self.rx.holds_memory()
            || self.ooo.is_some()
            || self.recovery.is_some()
    }

    /// Idle connections keep no buffers.
    pub(crate) fn shrink(&mut self) {
        self.tx.shrink();
        self.rx.shrink();
        if !self.has_blocks() {
            self.ooo = None;
        }
        if !self.hot.has(flag::RECOVERING)
            && let Some(r) = self.recovery.take()
        {
            self.patience = r.rack.patience;
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::base::buffer::VecBuf;

    #[test]
    fn an_idle_connection_costs_at_most_512_bytes_and_its_hot_part_128() {
        type S = crate::stack::Stack<VecBuf, [u64; 4]>;
        assert_eq!(S::HOT_BYTES, 128);
        let all = S::CONNECTION_BYTES;
        assert!(all <= 512, "{all}");
    }
}
