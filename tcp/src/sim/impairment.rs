//! What a link does to the frames that it carries.

use std::time::Duration;

/// What a link does to frames.
#[derive(Clone, Copy, Debug)]
pub struct Impairment {
    /// Time that each frame needs.
    pub delay: Duration,
    /// Uniform extra delay up to this, which reorders.
    pub jitter: Duration,
    /// Probability that a frame is lost.
    pub loss: f64,
    /// Probability to enter a burst in which every other frame is lost, and to leave it.
    pub burst: (f64, f64),
    /// Probability to be held back by four delays.
    pub reorder: f64,
    /// Probability that a frame arrives twice.
    pub duplicate: f64,
    /// Probability that bits flip behind the Ethernet header. ARP is spared: Ethernet's own CRC guards what
    /// has no other.
    pub corrupt: f64,
    /// Most bits that flip in a frame that is damaged, next to one another or anywhere. Damage that
    /// every checksum overlooks counts as loss: no receiver could know of it.
    pub corrupt_bits: u32,
    /// Bits per second, 0: infinite.
    pub rate: u64,
    /// Frames waiting for `rate` before the tail is dropped.
    pub queue: usize,
    /// Frames waiting before ECN-capable ones are marked (RFC 3168); 0: never.
    pub mark: usize,
    /// Longest IP packet, 0: any. Longer ones vanish.
    pub mtu: u16,
    /// Probability that the sender gets an ICMP error about one that vanished (ICMP).
    pub icmp_error: f64,
    /// Probability that a segment's window is made smaller on its way, down to nothing.
    pub shrink: f64,
}

impl Impairment {
    /// A link that only delays.
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
        }
    }
}
