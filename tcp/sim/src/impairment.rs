//! Impairments of a simulated link.

use std::time::Duration;

/// Impairments of a link. Probabilities are per frame unless stated otherwise.
#[derive(Clone, Copy, Debug)]
pub struct Impairment {
    /// Propagation delay of each frame.
    pub delay: Duration,
    /// Upper bound of a uniform extra delay per frame, which reorders frames.
    pub jitter: Duration,
    /// Probability that a frame is lost.
    pub loss: f64,
    /// Probabilities per frame of entering and of leaving a burst, in which a frame is lost with
    /// probability 0.5.
    pub burst: (f64, f64),
    /// Probability that a frame is held back by four times `delay`.
    pub reorder: f64,
    /// Probability that a frame arrives twice.
    pub duplicate: f64,
    /// Probability that bits flip behind the Ethernet header. ARP frames are exempt: only the
    /// Ethernet CRC protects them.
    pub corrupt: f64,
    /// Maximum number of bits that flip in a damaged frame, either adjacent or anywhere. Above 1,
    /// damage that every checksum misses counts as loss: no receiver could detect it.
    pub corrupt_bits: u32,
    /// Bits per second; 0: unlimited.
    pub rate: u64,
    /// Frames that may wait for `rate`; further frames are dropped.
    pub queue: usize,
    /// Queue length in frames above which ECN-capable packets are marked (RFC 3168); 0: never.
    pub mark: usize,
    /// Longest IP packet in bytes; 0: unlimited. Longer packets are dropped.
    pub mtu: u16,
    /// Probability that the sender of a packet longer than `mtu` gets an ICMP error.
    pub icmp_error: f64,
    /// Probability that the window of a segment is reduced in transit, possibly to zero.
    pub shrink: f64,
    /// Arrivals wait for a multiple of this time, and consecutive segments then arrive as one, as from
    /// a port that moderates interrupts and coalesces received frames; zero: never.
    pub coalesce: Duration,
    /// ACKs lose their D-SACK blocks, as if their sender knew only RFC 2018.
    pub strips_dsack: bool,
}

impl Impairment {
    /// A link that only delays frames.
    pub fn perfect(delay: Duration) -> Self {
        Impairment {
            delay,
            jitter: Duration::ZERO,
            loss: 0.0,
            burst: (0.0, 1.0),
            reorder: 0.0,
            duplicate: 0.0,
            corrupt: 0.0,
            corrupt_bits: 1,
            rate: 0,
            queue: 1000,
            mark: 0,
            mtu: 0,
            icmp_error: 0.0,
            shrink: 0.0,
            coalesce: Duration::ZERO,
            strips_dsack: false,
        }
    }
}
