//! Counters, named as TCP-MIB (RFC 4022) and Linux's TcpExt name them where they have a name.

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident = $mib:literal),* $(,)?) => {
        /// Counters of one stack since its start.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct StackStats { $($(#[$doc])* pub $name: u64),* }

        impl StackStats {
            /// Adds another worker's counters.
            pub fn merge(&mut self, other: &StackStats) { $(self.$name += other.$name;)* }
            /// Name and value of each counter.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
            fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$(($mib, self.$name)),*].into_iter()
            }
        }
    };
}

impl StackStats {
    /// A fast recovery begins.
    #[cold]
    pub(crate) fn count_recovery(&mut self, sack: bool) {
        self.fast_recovery += 1;
        if sack {
            self.sack_recovery += 1;
        } else {
            self.reno_recovery += 1;
        }
    }

    /// A lost segment was sent again, in the slow start after a timeout or in fast recovery.
    #[cold]
    pub(crate) fn count_retransmission(&mut self, after_timeout: bool) {
        self.retrans_segs += 1;
        if after_timeout {
            self.slow_start_retrans += 1;
        } else {
            self.fast_retrans += 1;
        }
    }

    /// Each counter by the name that Linux's nstat shows, which is TCP-MIB's with its group before
    /// it (`TcpRetransSegs`, `TcpExtTCPTimeouts`); what has no name there begins with `Siw`. As
    /// RFC 4022 has it, `TcpOutSegs` leaves repetitions out, and `TcpRetransSegs` counts SYNs too.
    pub fn mib_counters(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let again = self.retrans_segs + self.syn_retrans;
        let out = self.out_segs.saturating_sub(again);
        self.named().map(move |(name, value)| match name {
            "TcpOutSegs" => (name, out),
            "TcpRetransSegs" => (name, again),
            _ => (name, value),
        })
    }
}

counters! {
    /// Frames handed to `receive_burst`.
    frames_in = "SiwFramesIn",
    /// Frames the sink took.
    frames_out = "SiwFramesOut",
    in_segs = "TcpInSegs",
    out_segs = "TcpOutSegs",
    /// Frames that carried several segments for the port to cut.
    tso_frames = "SiwTsoFrames",
    in_bytes = "SiwTcpInBytes",
    out_bytes = "SiwTcpOutBytes",
    /// Established segments that took the straight path.
    hp_hits = "TcpExtTCPHPHits",
    active_opens = "TcpActiveOpens",
    passive_opens = "TcpPassiveOpens",
    attempt_fails = "TcpAttemptFails",
    estab_resets = "TcpEstabResets",
    curr_estab = "TcpCurrEstab",
    retrans_segs = "TcpRetransSegs",
    /// Retransmission timeouts.
    timeouts = "TcpExtTCPTimeouts",
    fast_recovery = "SiwFastRecovery",
    /// Those with SACK, and those without.
    sack_recovery = "TcpExtTCPSackRecovery",
    reno_recovery = "TcpExtTCPRenoRecovery",
    /// Repetitions in fast recovery, and after a timeout.
    fast_retrans = "TcpExtTCPFastRetrans",
    slow_start_retrans = "TcpExtTCPSlowStartRetrans",
    /// Tail loss probes sent, and those that repaired a loss (RFC 8985).
    tlp_probes = "TcpExtTCPLossProbes",
    tlp_recoveries = "TcpExtTCPLossProbeRecovery",
    /// Reductions taken back since nothing was lost (RFC 3522, 3708).
    spurious = "TcpExtTCPFullUndo",
    /// Data segments marked on their way here, and reductions since the peer echoed marks
    /// (RFC 3168).
    ce_received = "IpExtInCEPkts",
    ecn_reductions = "SiwEcnReductions",
    /// Windows reduced after a pause (RFC 2861).
    idle_restarts = "SiwIdleRestarts",
    /// Times that pacing held new segments back.
    paced = "SiwPaced",
    /// D-SACK blocks (RFC 2883).
    dsacks_in = "TcpExtTCPDSACKRecv",
    dsacks_out = "TcpExtTCPDSACKOldSent",
    /// Retransmissions found lost by later deliveries, without a timeout.
    lost_retransmit = "TcpExtTCPLostRetransmit",
    /// Segments that SACK blocks newly covered.
    sacked_segs = "SiwSackedSegs",
    dup_acks_in = "SiwDupAcksIn",
    pure_acks_in = "TcpExtTCPPureAcks",
    pure_acks_out = "SiwPureAcksOut",
    delayed_acks = "TcpExtDelayedACKs",
    out_rsts = "TcpOutRsts",
    in_rsts = "SiwInRsts",
    challenge_acks = "TcpExtTCPChallengeACK",
    /// SYNs on open connections (RFC 5961 section 4).
    syn_challenges = "TcpExtTCPSYNChallenge",
    /// Challenge ACKs and resets that the limit of their rate kept back.
    challenges_skipped = "TcpExtTCPACKSkippedChallenge",
    resets_skipped = "SiwResetsSkipped",
    /// Segments queued out of order.
    ofo_queue = "TcpExtTCPOFOQueue",
    /// Out-of-order or in-order data dropped since a cap was reached.
    rcv_q_drop = "TcpExtTCPRcvQDrop",
    /// Buffers held out of order that gave way to what fills a hole.
    rcv_pruned = "TcpExtOfoPruned",
    /// Bytes that had been received before.
    dup_bytes_in = "SiwDupBytesIn",
    paws_drops = "TcpExtPAWSEstab",
    out_of_window = "SiwOutOfWindow",
    zero_window_probes = "TcpExtTCPWinProbe",
    keepalive_probes = "TcpExtTCPKeepAlive",
    abort_on_timeout = "TcpExtTCPAbortOnTimeout",
    listen_drops = "TcpExtListenDrops",
    listen_overflows = "TcpExtListenOverflows",
    /// SYN cookies (RFC 4987): sent, come back right, come back wrong or late.
    cookies_sent = "TcpExtSyncookiesSent",
    cookies_recv = "TcpExtSyncookiesRecv",
    cookies_failed = "TcpExtSyncookiesFailed",
    syn_retrans = "TcpExtTCPSynRetrans",
    time_wait_recycled = "TcpExtTWRecycled",
    time_wait_evicted = "TcpExtTCPTimeWaitOverflow",
    /// ACKs of bytes never sent.
    bad_acks = "SiwBadAcks",
    csum_errors = "TcpInCsumErrors",
    in_errs = "TcpInErrs",
    /// Segments with options of impossible length.
    bad_options = "SiwBadOptions",
    /// Of IPv4 and IPv6: fragments received, datagrams put together from them, fragments and
    /// datagrams that could not be, and of the latter those whose time was out.
    reassembly_required = "IpReasmReqds",
    reassembly_oks = "IpReasmOKs",
    reassembly_fails = "IpReasmFails",
    reassembly_timeouts = "IpReasmTimeout",
    martians = "IpInAddrErrors",
    /// Not for this device or VLAN, or no IP.
    not_for_us = "SiwNotForUs",
    /// IPv6 packets with extension headers that are malformed or ask for what is refused.
    header_errors = "IpInHdrErrors",
    /// IP that is neither TCP nor ICMP.
    unknown_protocols = "IpInUnknownProtos",
    /// SYNs to ports where nobody listens, and other segments of no connection.
    no_ports = "SiwNoPorts",
    no_connection = "SiwNoConnection",
    arp_in = "ArpIn",
    arp_out = "ArpOut",
    ndp_in = "NdpIn",
    ndp_out = "NdpOut",
    icmp_in = "IcmpInMsgs",
    icmp_out = "IcmpOutMsgs",
    icmp_errors_in = "SiwIcmpErrorsIn",
    /// Of those sent: errors that tell of an unknown protocol in IPv4; of that or of a header that
    /// cannot be in IPv6; and of fragments whose rest did not come.
    icmp_unreachables_out = "IcmpOutDestUnreachs",
    icmp_parameter_problems_out = "IcmpOutParmProbs",
    icmp_time_exceeded_out = "IcmpOutTimeExcds",
    /// EMSS reductions: told by ICMP (RFC 1191, 8201), and guessed from silence (RFC 4821).
    pmtu_reductions = "SiwPmtuReductions",
    black_holes = "SiwBlackHoles",
    /// MTU probes that arrived, and that were lost alone or unanswered (RFC 8899).
    mtu_probes_passed = "TcpExtTCPMTUPSuccess",
    mtu_probes_lost = "TcpExtTCPMTUPFail",
    neighbour_failures = "ArpFailures",
    neighbour_overflows = "ArpTableFull",
    /// Answers of ARP, NDP and ICMP, resets and cookies that found no room or were too many.
    control_drops = "SiwControlDrops",
}
