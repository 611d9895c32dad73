//! Counters, with the names of TCP-MIB (RFC 4022) and Linux's TcpExt where these have one.

use siw_net::{NetStats, counters};

use crate::base::retransmissions::RetransmissionCause;

/// Counters of one stack since its start, as of one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StackStats {
    /// Frames, IP, neighbours and ICMP.
    pub net: NetStats,
    /// Segments and connections.
    pub tcp: TcpStats,
}

impl StackStats {
    /// Adds another worker's counters.
    pub fn merge(&mut self, other: &StackStats) {
        self.net.merge(&other.net);
        self.tcp.merge(&other.tcp);
    }

    /// Name and value of each counter.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.net.iter().chain(self.tcp.iter())
    }

    /// Meaning of a counter of [`Self::mib_counters`].
    pub fn meaning_of(name: &str) -> &'static str {
        let meaning = NetStats::meaning_of(name).or_else(|| TcpStats::meaning_of(name));
        meaning.unwrap_or("")
    }

    /// Counters of discarded and refused frames, with their names in [`Self::mib_counters`].
    pub fn drops(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let all = self.net.named().chain(self.tcp.named());
        all.filter(|(name, _)| Self::is_drop(name))
    }

    /// Returns true for the name of a counter of [`Self::drops`].
    pub fn is_drop(name: &str) -> bool {
        NetStats::is_drop(name) || TcpStats::is_drop(name)
    }

    /// Returns each counter with its name in Linux's nstat, which is the name of TCP-MIB prefixed
    /// by its group (`TcpRetransSegs`, `TcpExtTCPTimeouts`); counters without a name there begin
    /// with `Siw`. As in RFC 4022, `TcpOutSegs` excludes retransmissions, and `TcpRetransSegs`
    /// includes SYNs.
    pub fn mib_counters(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let again = self.tcp.retrans_segs + self.tcp.syn_retrans;
        let out = self.tcp.out_segs.saturating_sub(again);
        let tcp = self.tcp.named().map(move |(name, value)| match name {
            "TcpOutSegs" => (name, out),
            "TcpRetransSegs" => (name, again),
            _ => (name, value),
        });
        self.net.named().chain(tcp)
    }
}

impl TcpStats {
    /// Counts the beginning of a fast recovery.
    #[cold]
    pub(crate) fn count_recovery(&mut self, sack: bool) {
        self.fast_recovery += 1;
        if sack {
            self.sack_recovery += 1;
        } else {
            self.reno_recovery += 1;
        }
    }

    /// Counts a retransmitted segment.
    #[cold]
    pub(crate) fn count_retransmission(&mut self, cause: RetransmissionCause) {
        self.retrans_segs += 1;
        match cause {
            RetransmissionCause::Timeout => self.slow_start_retrans += 1,
            RetransmissionCause::Fast => self.fast_retrans += 1,
            RetransmissionCause::TailProbe => self.tail_retrans += 1,
        }
    }
}

counters! {
    /// Counters of TCP in one stack, since its start.
    TcpStats;
    drops: [
        "SiwResetsSkipped",
        "TcpExtTCPRcvQDrop",
        "TcpExtOfoPruned",
        "TcpExtPAWSEstab",
        "SiwOutOfWindow",
        "TcpExtTCPAbortOnTimeout",
        "TcpExtListenDrops",
        "TcpExtListenOverflows",
        "TcpExtSyncookiesFailed",
        "TcpExtTCPAbortOnMemory",
        "SiwBadAcks",
        "SiwBadOptions",
        "SiwNoPorts",
        "SiwNoConnection",
    ];
    /// TCP segments received.
    in_segs = "TcpInSegs",
    /// TCP segments sent, retransmissions included.
    out_segs = "TcpOutSegs",
    /// Super-segments sent, which the port cuts into segments (TSO).
    tso_frames = "SiwTsoFrames",
    /// Ports on which TSO was stopped, because super-segments were lost and single segments were not.
    tso_stopped = "SiwTsoStopped",
    /// Payload bytes received in order.
    in_bytes = "SiwTcpInBytes",
    /// Payload bytes sent, retransmissions included.
    out_bytes = "SiwTcpOutBytes",
    /// Segments that header prediction processed.
    hp_hits = "TcpExtTCPHPHits",
    /// Connections opened by `connect`.
    active_opens = "TcpActiveOpens",
    /// Connections opened by a SYN of a peer.
    passive_opens = "TcpPassiveOpens",
    /// Connection attempts that failed.
    attempt_fails = "TcpAttemptFails",
    /// Established connections that ended with a reset.
    estab_resets = "TcpEstabResets",
    /// Connections that are established now.
    curr_estab = "TcpCurrEstab",
    /// Data segments retransmitted.
    retrans_segs = "TcpRetransSegs",
    /// Retransmission timeouts.
    timeouts = "TcpExtTCPTimeouts",
    /// Fast recoveries (RFC 6675, RFC 6582).
    fast_recovery = "SiwFastRecovery",
    /// Fast recoveries with SACK (RFC 6675).
    sack_recovery = "TcpExtTCPSackRecovery",
    /// Fast recoveries without SACK (RFC 6582).
    reno_recovery = "TcpExtTCPRenoRecovery",
    /// Segments retransmitted in fast recovery, or because the path MTU was reduced.
    fast_retrans = "TcpExtTCPFastRetrans",
    /// Segments retransmitted after a timeout.
    slow_start_retrans = "TcpExtTCPSlowStartRetrans",
    /// Segments retransmitted as tail loss probes; other probes carry new data (RFC 8985 section 7.3).
    tail_retrans = "SiwTailRetrans",
    /// Tail loss probes sent (RFC 8985 section 7.3).
    tlp_probes = "TcpExtTCPLossProbes",
    /// Tail loss probes that repaired a loss (RFC 8985 section 7.4).
    tlp_recoveries = "TcpExtTCPLossProbeRecovery",
    /// Congestion window reductions undone as spurious (RFC 3522, 3708).
    spurious = "TcpExtTCPFullUndo",
    /// Data segments received with Congestion Experienced (RFC 3168).
    ce_received = "IpExtInCEPkts",
    /// Congestion window reductions in response to echoed marks (RFC 3168 section 6.1.2).
    ecn_reductions = "SiwEcnReductions",
    /// Congestion window reductions after a period in which the window was not used (RFC 7661).
    idle_restarts = "SiwIdleRestarts",
    /// Times that pacing delayed new segments.
    paced = "SiwPaced",
    /// D-SACK blocks received (RFC 2883).
    dsacks_in = "TcpExtTCPDSACKRecv",
    /// D-SACK blocks sent (RFC 2883).
    dsacks_out = "TcpExtTCPDSACKOldSent",
    /// Retransmissions detected as lost by later deliveries, without a timeout.
    lost_retransmit = "TcpExtTCPLostRetransmit",
    /// Segments that SACK blocks newly covered.
    sacked_segs = "SiwSackedSegs",
    /// Duplicate ACKs received (RFC 5681 section 2).
    dup_acks_in = "SiwDupAcksIn",
    /// ACKs without data received.
    pure_acks_in = "TcpExtTCPPureAcks",
    /// ACKs without data sent.
    pure_acks_out = "SiwPureAcksOut",
    /// ACKs that the delayed-ACK timer sent (RFC 9293 section 3.8.6.3).
    delayed_acks = "TcpExtDelayedACKs",
    /// Resets sent.
    out_rsts = "TcpOutRsts",
    /// Resets received and obeyed.
    in_rsts = "SiwInRsts",
    /// Challenge ACKs sent (RFC 5961).
    challenge_acks = "TcpExtTCPChallengeACK",
    /// SYNs on open connections (RFC 5961 section 4).
    syn_challenges = "TcpExtTCPSYNChallenge",
    /// Challenge ACKs suppressed by the rate limit (RFC 5961 section 7).
    challenges_skipped = "TcpExtTCPACKSkippedChallenge",
    /// Resets suppressed by the rate limit.
    resets_skipped = "SiwResetsSkipped",
    /// Segments queued out of order.
    ofo_queue = "TcpExtTCPOFOQueue",
    /// Received data, in order or out of order, dropped because a buffer limit was reached.
    rcv_q_drop = "TcpExtTCPRcvQDrop",
    /// Out-of-order buffers dropped to make room for a segment that fills a hole.
    rcv_pruned = "TcpExtOfoPruned",
    /// Received bytes that were duplicates.
    dup_bytes_in = "SiwDupBytesIn",
    /// Segments dropped by PAWS (RFC 7323 section 5).
    paws_drops = "TcpExtPAWSEstab",
    /// Segments that were not acceptable (RFC 9293 section 3.10.7.4).
    out_of_window = "SiwOutOfWindow",
    /// Zero-window probes sent (RFC 9293 section 3.8.6.1).
    zero_window_probes = "TcpExtTCPWinProbe",
    /// Keepalive probes sent (RFC 9293 section 3.8.4).
    keepalive_probes = "TcpExtTCPKeepAlive",
    /// Connections aborted because data or probes were not acknowledged in time.
    abort_on_timeout = "TcpExtTCPAbortOnTimeout",
    /// SYNs that were dropped.
    listen_drops = "TcpExtListenDrops",
    /// SYNs that found the backlog full.
    listen_overflows = "TcpExtListenOverflows",
    /// SYN cookies sent (RFC 4987 section 3.6).
    cookies_sent = "TcpExtSyncookiesSent",
    /// ACKs with a right SYN cookie.
    cookies_recv = "TcpExtSyncookiesRecv",
    /// ACKs with a wrong or late SYN cookie.
    cookies_failed = "TcpExtSyncookiesFailed",
    /// SYNs and SYN-ACKs retransmitted.
    syn_retrans = "TcpExtTCPSynRetrans",
    /// Connections in TIME-WAIT that a new SYN reopened (RFC 6191).
    time_wait_recycled = "TcpExtTWRecycled",
    /// Connections in TIME-WAIT evicted in favour of new ones.
    time_wait_evicted = "TcpExtTCPTimeWaitOverflow",
    /// Connections without an owner that were reset before their peers had acknowledged all data,
    /// because a new connection needed the slot.
    orphans_evicted = "TcpExtTCPAbortOnMemory",
    /// ACKs of data that was never sent.
    bad_acks = "SiwBadAcks",
    /// Segments with options of impossible length.
    bad_options = "SiwBadOptions",
    /// SYNs to ports without a listener.
    no_ports = "SiwNoPorts",
    /// Segments other than SYNs that belong to no connection.
    no_connection = "SiwNoConnection",
    /// Path MTUs reduced by an ICMP error (RFC 1191, 8201).
    pmtu_reductions = "SiwPmtuReductions",
    /// Path MTUs reduced because full segments vanished without an ICMP error (RFC 8899 section
    /// 4.3).
    black_holes = "SiwBlackHoles",
}
