//! The state that all connections of a stack share. It is separate from the connections so that one
//! connection and this state can be borrowed at the same time.

use core::net::IpAddr;
use std::collections::VecDeque;

use siw_net::checksum::{self, OnesComplementSum};
use siw_net::constants::HEADER_MAX;
use siw_net::siphash::Key;
use siw_net::{ConnId, FlowKey, Instant, Network, RandomizedLimit, TableHasher, TokenBucket};

use crate::base::error::StackError;
use crate::base::events::Events;
use crate::base::retransmissions::RetransmissionCause;
use crate::base::sequence::SeqNr;
use crate::base::stats::TcpStats;
use crate::base::timer_wheel::TimerWheel;
use crate::config::{StackConfig, TcpConfig, TsoLimits, check_tcp_config, held_in};
use crate::congestion::window::initial_window;
use crate::connection::closing_list::ClosingLists;
use crate::connection::held_buffers::HeldBuffers;
use crate::connection::listeners::Listeners;
use crate::connection::side_table::{SideFlags, SideTable};
use crate::connection::stalled::StalledFlows;
use crate::connection::tso_watch::TsoWatch;
use crate::flow::table::FlowTable;
use crate::path_mtu::Paths;
use crate::tcb::Tcb;
use crate::tcb::flags::ConnectionFlags;
use crate::tcb::rtt::RtoLimits;
use crate::tcb::send_variables::SendVariables;
use crate::wire::segment::{ACK, FIN, RST, SYN, Segment};
use crate::wire::template::{SegmentFields, Template};

/// An ACK of DCTCP for the segments before a change of the mark, which leaves before any later ACK
/// of its connection.
pub(crate) struct EarlyAck {
    pub id: ConnId,
    pub ack: SeqNr,
    pub window: u16,
    pub flags: u8,
}

pub(crate) struct SharedState {
    /// The time passed to the last call of the stack.
    pub now: Instant,
    pub config: TcpConfig,
    pub net: Network,
    pub rto_limits: RtoLimits,
    /// The time of the last retransmission timeout of any connection, in ns.
    pub last_timeout: u64,
    pub delayed_ack: u64,
    /// [`TcpConfig::answer_wait`] in ns.
    pub answer_wait: u64,
    /// The initial receive window, and the largest that it may grow to.
    pub recv_window: u32,
    pub recv_window_max: u32,
    pub recv_wscale: u8,
    pub isn_key: Key,
    pub table_hasher: TableHasher,
    pub flow_table: FlowTable,
    pub timer_wheel: TimerWheel,
    /// Connections with pending output.
    pub output_list: VecDeque<u32>,
    /// The sink was full before all due output was sent: a connection with new data now takes its
    /// turn behind the others in the list.
    pub is_output_blocked: bool,
    /// Connections whose ACK waits for the owner's reply, with the time limit in ns, earliest
    /// first. Includes connections whose owner has replied since.
    pub awaited_answers: VecDeque<(u32, u64)>,
    /// Connections with events, at most once each.
    pub event_list: VecDeque<u32>,
    pub listeners: Listeners,
    /// ACKs that precede all other output of their connections.
    pub early_acks: VecDeque<EarlyAck>,
    pub tso_watch: TsoWatch,
    /// TSO of the configuration while it is paused.
    pub paused_tso: Option<TsoLimits>,
    /// Connections that may be evicted when the stack is full.
    pub closing: ClosingLists,
    pub side_table: SideTable,
    /// Connections whose timeouts expired, by next hop.
    pub stalled: StalledFlows,
    /// Connections with unacknowledged or unsent data.
    pub active: usize,
    pub resets: TokenBucket,
    pub challenges: RandomizedLimit,
    pub port_draws: u32,
    pub paths: Paths,
    /// Received buffers held by connections, as last counted.
    pub held: HeldBuffers,
    pub stats: TcpStats,
}

/// Returns the initial and the largest receive window of a connection: its buffers must hold what
/// either promises. Beyond the initial window, a connection offers only what the buffers that are free
/// in common hold.
fn window_bounds(config: &TcpConfig) -> (u32, u32) {
    let doublings = u32::from(config.recv_window_doublings.min(30));
    let largest = (u64::from(config.recv_window) << doublings).min(1 << 30);
    (
        config.initial_receive_window(),
        (largest as u32).min(held_in(config.max_recv_buffers)),
    )
}

/// The context of a method of a connection or one of its parts: the time, the connection's id, and
/// the state shared by all connections of the stack.
pub(crate) struct TcpContext<'a> {
    /// The time of this batch.
    pub now: Instant,
    /// The connection. The timer wheel and the output and event lists know it by the index of its
    /// slot.
    pub id: ConnId,
    pub shared: &'a mut SharedState,
}

impl TcpContext<'_> {
    /// Returns true if data segments of a connection with ECN may be ECN-capable.
    pub(crate) fn may_send_ect(&mut self) -> bool {
        self.shared
            .side_table
            .fields_of(self.id.index)
            .flags
            .has(SideFlags::MAY_SEND_ECT)
    }

    /// The user that the connection is charged to; `u32::MAX` if its owner named none.
    pub(crate) fn user(&self) -> u32 {
        let owner = self.shared.side_table.quota_owner(self.id.index);
        owner.map_or(u32::MAX, |owner| owner.user)
    }

    /// Counts a retransmission of data.
    #[cold]
    pub(crate) fn count_retransmission(&mut self, cause: RetransmissionCause) {
        self.shared.stats.count_retransmission(cause);
        let counts = self.shared.side_table.repeats_mut(self.id.index);
        counts.retransmissions.count(cause);
    }

    /// Counts a retransmission of our SYN or SYN-ACK.
    #[cold]
    pub(crate) fn count_repeated_syn(&mut self) {
        let counts = self.shared.side_table.repeats_mut(self.id.index);
        counts.retransmissions.count_handshake();
    }

    /// Counts a zero-window probe.
    #[cold]
    pub(crate) fn count_window_probe(&mut self) {
        self.shared.stats.zero_window_probes += 1;
        let counts = self.shared.side_table.repeats_mut(self.id.index);
        counts.window_probes = counts.window_probes.saturating_add(1);
    }

    /// Records that a timeout of the connection to `remote` expired, or that no route leads there.
    /// `una`: SND.UNA.
    #[cold]
    pub(crate) fn note_stalled(&mut self, una: SeqNr, remote: IpAddr) {
        let hop = self.shared.net.next_hop(remote);
        self.shared.stalled.insert(self.id.index, hop, una);
    }

    /// Reports `events` to the owner through `next_event`.
    #[inline]
    pub(crate) fn raise_event(&mut self, tcb: &mut Tcb, events: Events) {
        self.shared.raise_event(self.id.index, tcb, events);
    }

    /// Puts the connection on the output list, which `poll` processes. `what`: `NEED_` flags of the
    /// output other than data.
    #[inline]
    pub(crate) fn schedule_output(&mut self, tcb: &mut Tcb, what: ConnectionFlags) {
        self.shared.schedule_output(self.id.index, tcb, what);
    }

    /// Updates the count of connections with unacknowledged or unsent data.
    #[inline]
    pub(crate) fn update_active_count(&mut self, tcb: &mut Tcb, snd: &SendVariables) {
        let busy = snd.is_busy(tcb);
        if busy != tcb.has(ConnectionFlags::COUNTED_ACTIVE) {
            tcb.flags ^= ConnectionFlags::COUNTED_ACTIVE;
            if busy {
                self.shared.active += 1;
            } else {
                self.shared.active -= 1;
            }
        }
    }

    /// Ensures that the timer wheel calls the connection by `at`, in ns.
    #[inline]
    pub(crate) fn schedule_timer(&mut self, tcb: &mut Tcb, at: u64) {
        if at < tcb.wheel_at {
            tcb.wheel_at = at;
            self.shared
                .timer_wheel
                .schedule_entry(self.id.index, Instant(at));
        }
    }
}

impl SharedState {
    /// Returns the initial congestion window in bytes (RFC 6928), of segments of `emss` bytes.
    #[inline]
    pub(crate) fn initial_window(&self, emss: u16) -> u32 {
        initial_window(self.config.initial_window, u32::from(emss))
    }

    /// Returns the state of a stack without connections.
    ///
    /// # Errors
    /// The configuration is invalid.
    pub(crate) fn new(config: StackConfig, now: Instant) -> Result<Self, StackError> {
        let StackConfig { net, tcp: config } = config;
        let (rate, secret) = (net.control_rate, Key::new(&config.isn_key));
        let net = Network::new(net, secret, now)?;
        check_tcp_config(&config)?;
        let mut recv_wscale = config.window_scale;
        let (recv_window, recv_window_max) = window_bounds(&config);
        while recv_wscale < 14 && recv_window_max >> recv_wscale > 0xffff {
            recv_wscale += 1;
        }
        Ok(SharedState {
            now,
            rto_limits: RtoLimits::new(&config),
            last_timeout: 0,
            delayed_ack: siw_net::to_nanos(config.delayed_ack),
            answer_wait: siw_net::to_nanos(config.answer_wait),
            recv_window,
            recv_window_max,
            recv_wscale,
            isn_key: secret,
            table_hasher: TableHasher::new(&config.hash_key),
            flow_table: FlowTable::new(config.max_connections),
            timer_wheel: TimerWheel::new(now),
            output_list: VecDeque::new(),
            is_output_blocked: false,
            awaited_answers: VecDeque::new(),
            event_list: VecDeque::new(),
            listeners: Listeners::default(),
            early_acks: VecDeque::new(),
            tso_watch: TsoWatch::default(),
            paused_tso: None,
            closing: ClosingLists::new(),
            side_table: SideTable::default(),
            stalled: StalledFlows::default(),
            active: 0,
            resets: TokenBucket::new(rate),
            challenges: RandomizedLimit::new(rate, now, secret),
            port_draws: 0,
            paths: Paths::default(),
            held: HeldBuffers::new(config.max_held_buffers, config.max_recv_buffers),
            stats: TcpStats::default(),
            net,
            config,
        })
    }

    /// Returns the context of a connection.
    #[inline]
    pub(crate) fn context_of(&mut self, id: ConnId) -> TcpContext<'_> {
        TcpContext {
            now: self.now,
            id,
            shared: self,
        }
    }

    #[inline]
    pub(crate) fn raise_event(&mut self, index: u32, tcb: &mut Tcb, events: Events) {
        if tcb.has(ConnectionFlags::RELEASED) {
            return;
        }
        if tcb.events == 0 {
            self.event_list.push_back(index);
        }
        tcb.events |= events.0;
    }

    #[inline]
    pub(crate) fn schedule_output(&mut self, index: u32, tcb: &mut Tcb, what: ConnectionFlags) {
        tcb.flags |= what;
        if !tcb.has(ConnectionFlags::IN_OUTPUT_LIST) {
            tcb.flags |= ConnectionFlags::IN_OUTPUT_LIST;
            self.output_list.push_back(index);
        }
    }

    /// Returns whether a connection that holds `counted` buffers copies small segments into buffers
    /// that it already holds: its window was derived from that.
    #[inline]
    pub(crate) fn shares_buffers(&self, counted: u32) -> bool {
        counted as usize >= self.config.buffers_of_one() / 4
    }

    /// Returns whether a segment that matches no connection has a source address that a peer can have
    /// and that is not ours (LAND attack).
    pub(crate) fn is_plausible_peer(&self, key: &FlowKey, src_mac: [u8; 6]) -> bool {
        let remote = key.remote();
        self.net.can_be_peer(remote.ip(), src_mac) && remote.port() != 0
    }

    /// Queues a segment without payload that belongs to no connection.
    pub(crate) fn push_segment(&mut self, template: &Template, fields: &SegmentFields<'_>) {
        let mut out = [0; HEADER_MAX];
        let (len, meta) = template.meta(fields);
        template.build(&mut out[..len], fields);
        let at = checksum::tcp_checksum_offset(&meta);
        let sum = checksum::complete_tcp_checksum(&out[..len], &meta, OnesComplementSum::new());
        out[at..at + 2].copy_from_slice(&sum);
        self.stats.out_segs += 1;
        self.net.push_headers(&out[..len], meta.l3_len, meta.ipv6);
    }

    /// Answers a segment that matches no connection with a reset (RFC 9293 section 3.10.7.1), within the
    /// rate limit.
    pub(crate) fn reset_unmatched_segment(
        &mut self,
        key: &FlowKey,
        seg: &Segment,
        payload: u32,
        src_mac: [u8; 6],
    ) {
        if seg.flags & RST != 0 {
            return;
        }
        if !self.resets.try_take(self.now) {
            self.stats.resets_skipped += 1;
            return;
        }
        let config = &self.net.config;
        let template = Template::new(config.mac, src_mac, config.vlan, key);
        let len = payload + u32::from(seg.flags & SYN != 0) + u32::from(seg.flags & FIN != 0);
        let (seq, ack, flags) = if seg.flags & ACK != 0 {
            (seg.ack, SeqNr(0), RST)
        } else {
            (SeqNr(0), seg.seq + len, RST | ACK)
        };
        self.stats.out_rsts += 1;
        let fields = SegmentFields {
            seq,
            ack,
            flags,
            window: 0,
            ts: None,
            options: &[],
            payload: 0,
            ect: false,
            tso: false,
        };
        self.push_segment(&template, &fields);
    }

    /// Handles the retransmission of a segment that was first sent in a super-segment. `is_again`:
    /// it was sent again before.
    #[cold]
    pub(crate) fn on_super_segment_lost(&mut self, is_again: bool, now: Instant) {
        if self.config.tso.is_some() && self.tso_watch.on_lost(is_again, now) {
            self.tso_watch.unreported = self.stop_tso();
        }
    }

    /// Sends single segments from now on. Returns false if it did so before.
    pub(crate) fn stop_tso(&mut self) -> bool {
        let paused = self.paused_tso.take();
        let was_on = self.config.tso.take().or(paused).is_some();
        self.stats.tso_stopped += u64::from(was_on);
        was_on
    }

    /// Sends single segments while `is_paused`.
    pub(crate) fn pause_tso(&mut self, is_paused: bool) {
        if is_paused {
            self.paused_tso = self.config.tso.take().or(self.paused_tso.take());
        } else if let Some(limits) = self.paused_tso.take() {
            self.config.tso = Some(limits);
        }
    }

    /// Returns the initial sequence number of RFC 6528: M + F(four-tuple, secret), where M is a
    /// clock with a tick of about 4 us.
    pub(crate) fn initial_sequence(&self, key: &FlowKey, now: Instant) -> SeqNr {
        SeqNr((now.0 >> 12) as u32) + key.hash(self.isn_key) as u32
    }

    /// Returns the offset of the timestamp clock for a peer, which hides our uptime from peers (RFC
    /// 7323 section 5.4).
    pub(crate) fn timestamp_offset(&self, key: &FlowKey) -> u32 {
        (key.hash(self.isn_key) >> 32) as u32
    }
}
