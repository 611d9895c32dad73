//! Counters, named as TCP-MIB (RFC 4022) and Linux's TcpExt name them where they have a name.

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of one stack since its start.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct Stats { $($(#[$doc])* pub $name: u64),* }

        impl Stats {
            /// Adds another worker's counters.
            pub fn merge(&mut self, other: &Stats) { $(self.$name += other.$name;)* }
            /// Name and value of each counter.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }
    };
}

counters! {
    /// Frames handed to `receive`.
    frames_in,
    /// Frames the sink took.
    frames_out,
    in_segs,
    out_segs,
    /// Frames that carried several segments for the port to cut.
    tso_frames,
    in_bytes,
    out_bytes,
    /// Established segments that took the straight path.
    hp_hits,
    active_opens,
    passive_opens,
    attempt_fails,
    estab_resets,
    curr_estab,
    retrans_segs,
    /// Retransmission timeouts.
    timeouts,
    fast_recovery,
    /// Tail loss probes sent, and those that repaired a loss (RFC 8985).
    tlp_probes,
    tlp_recoveries,
    /// Reductions taken back since nothing was lost (RFC 3522, 3708).
    spurious,
    /// Data segments marked on their way here, and reductions since the peer echoed marks
    /// (RFC 3168).
    ce_received,
    ecn_reductions,
    /// Windows reduced after a pause (RFC 2861).
    idle_restarts,
    /// D-SACK blocks (RFC 2883).
    dsacks_in,
    dsacks_out,
    /// Retransmissions found lost by later deliveries, without a timeout.
    lost_retransmit,
    /// Segments that SACK blocks newly covered.
    sacked_segs,
    dup_acks_in,
    pure_acks_in,
    pure_acks_out,
    delayed_acks,
    out_rsts,
    in_rsts,
    challenge_acks,
    /// Segments queued out of order.
    ofo_queue,
    /// Out-of-order or in-order data dropped since a cap was reached.
    rcv_q_drop,
    /// Buffers held out of order that gave way to what fills a hole.
    rcv_pruned,
    /// Bytes that had been received before.
    dup_bytes_in,
    paws_drops,
    out_of_window,
    zero_window_probes,
    keepalive_probes,
    abort_on_timeout,
    listen_drops,
    listen_overflows,
    /// SYN cookies (RFC 4987): sent, come back right, come back wrong or late.
    cookies_sent,
    cookies_recv,
    cookies_failed,
    syn_retrans,
    time_wait_recycled,
    time_wait_evicted,
    /// ACKs of bytes never sent.
    bad_acks,
    csum_errors,
    in_errs,
    ip_fragments,
    martians,
    /// Not for this device, VLAN or a protocol known here.
    not_for_us,
    no_ports,
    arp_in,
    arp_out,
    ndp_in,
    ndp_out,
    icmp_in,
    icmp_out,
    icmp_errors_in,
    /// EMSS reductions: told by ICMP (RFC 1191, 8201), and guessed from silence (RFC 4821).
    pmtu_reductions,
    black_holes,
    neighbour_failures,
    neighbour_overflows,
    control_drops,
}
