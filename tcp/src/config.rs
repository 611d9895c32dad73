//! Configuration of one device's stack. Validated by `Stack::new`.

use core::time::Duration;
use std::hash::{BuildHasher, RandomState};

use siw_net::{IpCidr, NetConfig};

use crate::base::error::StackError;

/// Limits of one super-segment for TCP segmentation offload by the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TsoLimits {
    /// Wire segments, at least 2.
    pub max_segments: u16,
    /// Payload bytes, at most 65000.
    pub max_bytes: u32,
}

/// The congestion controller of new connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CongestionControl {
    /// RFC 9438.
    #[default]
    Cubic,
    /// RFC 5681, 6582. The drill's scripts and the public suites expect its windows, and DCTCP is the same
    /// but for marks (RFC 8257 section 3.5).
    NewReno,
    /// RFC 8257: for fabrics whose switches mark packets and whose hosts all use DCTCP. Requests
    /// ECN.
    Dctcp,
}

/// Keepalive (RFC 9293 section 3.8.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keepalive {
    /// Idle time before the first probe.
    pub idle: Duration,
    /// Time between probes.
    pub interval: Duration,
    /// Unanswered probes before the connection is dropped.
    pub probes: u8,
}

/// The configuration of a [`crate::Stack`]. `StackConfig::new` fills in defaults for a fabric.
#[derive(Clone, Debug)]
pub struct StackConfig {
    /// The link, addresses and routes.
    pub net: NetConfig,
    /// Connections.
    pub tcp: TcpConfig,
}

/// Settings of the connections of a stack. The default is for a fabric.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// Lower bound of the retransmission timeout (RFC 6298 (2.4)): 5 ms for a fabric, 200 ms for
    /// wide areas.
    pub rto_min: Duration,
    /// Upper bound of the retransmission timeout (RFC 6298 (2.5)).
    pub rto_max: Duration,
    /// Retransmission timeout before the first RTT sample (RFC 6298 (2.1)).
    pub rto_initial: Duration,
    /// Maximum delay of an ACK (RFC 9293 section 3.8.6.3: < 500 ms).
    pub delayed_ack: Duration,
    /// Maximum time that the ACK of a message waits for the owner's reply to carry it, on
    /// connections whose owner replies so fast that a pure ACK would be superfluous. Below 1 ms;
    /// zero disables the wait.
    pub answer_wait: Duration,
    /// Initial receive window of each connection in bytes, up to 1 GiB; scaled as RFC 7323 says. A
    /// connection offers no more than its `max_recv_buffers` hold, and at first no more than
    /// `max_held_buffers`.
    pub recv_window: u32,
    /// Maximum number of times that a connection doubles its receive window, while its peer fills
    /// the window in each round trip and buffers are free (autotuning for long paths). 0: never.
    pub recv_window_doublings: u8,
    /// Minimum window scale to offer (RFC 7323 section 2.2), up to 14; the receive window may need
    /// a larger one.
    pub window_scale: u8,
    /// Maximum number of received buffers that a connection holds, in order and out of order
    /// together, so that tiny segments cannot pin the whole buffer pool. Segments that fill holes
    /// may use an eighth more. Beyond a quarter of it, small segments in order share buffers.
    pub max_recv_buffers: usize,
    /// Maximum number of received buffers that all connections hold together. Connections that hold
    /// few buffers may exceed it by an eighth, and each connection may hold one beyond that. Choose
    /// it so that the port keeps enough buffers to go on receiving.
    pub max_held_buffers: usize,
    /// Raise [`crate::Events::OUT_OF_ORDER`].
    pub show_out_of_order: bool,
    /// How the congestion window grows and shrinks.
    pub congestion: CongestionControl,
    /// Initial window in segments; RFC 6928 says 10, a fabric may start with more.
    pub initial_window: u32,
    /// Secret of the initial sequence numbers (RFC 6528) and port choice (RFC 6056). Drawn at
    /// random for each configuration; all stacks of a device share it.
    pub isn_key: [u8; 16],
    /// Secret of the flow table, drawn and shared in the same way.
    pub hash_key: [u8; 16],
    /// Maximum number of connections, including TIME-WAIT (the oldest of those are evicted).
    pub max_connections: usize,
    /// Leave checksums to the sink, which completes them in software
    /// ([`siw_net::TxChecksum::Partial`]).
    pub tx_checksum: bool,
    /// TSO limits if the port segments super-segments ([`siw_net::FrameMeta::tso_segsz`]). Needs
    /// `tx_checksum` off, because only the port can then compute checksums.
    pub tso: Option<TsoLimits>,
    /// Keepalive probes (RFC 9293 section 3.8.4) of every connection; `None`: none are sent.
    pub keepalive: Option<Keepalive>,
    /// Unacknowledged data older than this ends the connection (RFC 9293 section 3.8.3).
    pub user_timeout: Duration,
    /// A connection released by its owner is aborted after this time, whatever the peer answers,
    /// unless all its data is acknowledged.
    pub orphan_timeout: Duration,
    /// Maximum number of retransmissions of a SYN or SYN-ACK.
    pub syn_retries: u8,
    /// Duration of TIME-WAIT (2 MSL in RFC 9293).
    pub time_wait: Duration,
    /// Offer timestamps (RFC 7323) and SACK (RFC 2018).
    pub timestamps: bool,
    /// Offer and accept SACK (RFC 2018).
    pub sack: bool,
    /// Offer and accept ECN (RFC 3168). [`CongestionControl::Dctcp`] implies it.
    pub ecn: bool,
    /// Answer SYNs beyond a listener's backlog with SYN cookies, without state (RFC 4987 section
    /// 3.6).
    pub syn_cookies: bool,
}

/// Bytes that a buffer holds on average, whatever the length of segments. From a quarter of the limit
/// on, small segments share buffers, and two consecutive buffers hold more than one has room for, which
/// is at least 1900 bytes.
const BYTES_PER_BUFFER: usize = 1900 / 2 * 3 / 4;

/// Returns the bytes that this number of buffers holds at least, whatever the length of segments.
pub(crate) fn held_in(buffers: usize) -> u32 {
    let held = buffers.saturating_mul(BYTES_PER_BUFFER);
    u32::try_from(held).unwrap_or(u32::MAX)
}

impl TcpConfig {
    /// Returns the maximum number of received buffers of a connection that is the only one.
    pub(crate) fn buffers_of_one(&self) -> usize {
        self.max_recv_buffers.min(self.max_held_buffers)
    }

    /// Returns the initial receive window of a connection in bytes: `recv_window`, as far as the buffers
    /// that one connection may hold suffice for segments of any length.
    pub fn initial_receive_window(&self) -> u32 {
        self.recv_window.min(held_in(self.buffers_of_one()))
    }

    pub(crate) fn wants_ecn(&self) -> bool {
        self.ecn || self.congestion == CongestionControl::Dctcp
    }
}

impl StackConfig {
    /// Returns the defaults for a fabric, for a device with this Ethernet address and these
    /// addresses.
    pub fn new(mac: [u8; 6], addrs: Vec<IpCidr>) -> Self {
        StackConfig {
            net: NetConfig::new(mac, addrs),
            tcp: TcpConfig::default(),
        }
    }
}

impl Default for TcpConfig {
    /// Returns the defaults for a fabric, with secrets drawn at random.
    fn default() -> Self {
        TcpConfig {
            rto_min: Duration::from_millis(5),
            rto_max: Duration::from_secs(60),
            rto_initial: Duration::from_secs(1),
            delayed_ack: Duration::from_millis(1),
            answer_wait: Duration::from_micros(3),
            recv_window: 4 << 20,
            recv_window_doublings: 0,
            window_scale: 0,
            max_recv_buffers: 32_768,
            max_held_buffers: usize::MAX,
            show_out_of_order: false,
            congestion: CongestionControl::Cubic,
            initial_window: 10,
            isn_key: random_key(),
            hash_key: random_key(),
            max_connections: 65536,
            tx_checksum: true,
            tso: None,
            keepalive: None,
            user_timeout: Duration::from_secs(120),
            orphan_timeout: Duration::from_secs(120),
            syn_retries: 6,
            time_wait: Duration::from_secs(60),
            timestamps: true,
            sack: true,
            ecn: false,
            syn_cookies: true,
        }
    }
}

/// A secret seeded by the operating system: the standard library seeds each `RandomState` from its
/// source of randomness.
fn random_key() -> [u8; 16] {
    let mut key = [0; 16];
    for half in key.chunks_exact_mut(8) {
        half.copy_from_slice(&RandomState::new().hash_one(0u8).to_ne_bytes());
    }
    key
}

/// Validates the settings of connections.
pub(crate) fn check_tcp_config(config: &TcpConfig) -> Result<(), StackError> {
    let bad = |text: String| Err(StackError::Config(text));
    if let Some(text) = config.tso {
        if config.tx_checksum {
            return bad("TSO needs checksum offload: set tx_checksum to false".into());
        }
        if text.max_segments < 2 || text.max_bytes > 65000 {
            return bad("TSO limits must be at least 2 segments and at most 65000 bytes".into());
        }
    }
    if config.recv_window < 4096 || config.recv_window > 1 << 30 {
        return bad(format!(
            "receive window {} is not in 4096..=1073741824",
            config.recv_window
        ));
    }
    if config.window_scale > 14 {
        return bad(format!(
            "window scale {} is not in 0..=14 (RFC 7323 section 2.3)",
            config.window_scale
        ));
    }
    if config.rto_min.is_zero() || config.rto_max < config.rto_min || config.rto_initial.is_zero() {
        return bad(
            "retransmission timeouts must satisfy 0 < rto_min <= rto_max, 0 < rto_initial".into(),
        );
    }
    if let Some(keepalive) = &config.keepalive
        && (keepalive.idle.is_zero() || keepalive.interval.is_zero())
    {
        return bad("keepalive: idle and interval must be greater than 0".into());
    }
    if config.max_connections == 0 || config.max_connections > 1 << 24 {
        return bad("max_connections must be in 1..=16777216".into());
    }
    if config.max_recv_buffers < 64 || config.max_held_buffers < 64 {
        return bad("max_recv_buffers and max_held_buffers must be at least 64".into());
    }
    if config.delayed_ack.as_millis() >= 500 {
        return bad("delayed_ack must be below 500 ms (RFC 9293 section 3.8.6.3)".into());
    }
    if config.answer_wait.as_millis() >= 1 {
        return bad("answer_wait must be below 1 ms".into());
    }
    Ok(())
}
