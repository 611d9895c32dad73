//! siw-tcp over DPDK links with both ends in one thread: the harness of `siw-tcp-perf`.
//!
//! ```text
//!  pair (two stacks) ──► sink ──► link (ring pair, virtio_user and vhost) ──► the other stack
//!                                   └──► forward (loss and delay) ──┘
//! ```

pub mod forward;
pub mod link;
pub mod pair;
pub mod raw;
mod sink;

use siw_net::Instant;

/// Payload of a full segment at an MTU of 1500 with timestamps.
pub const MSS: usize = 1448;
/// Ethernet, IPv4, and TCP with timestamps.
pub const HEADER: usize = 66;

/// The TSC as the stacks' clock.
#[derive(Debug, Clone, Copy)]
pub struct BenchClock {
    base: u64,
    /// Nanoseconds per tick, 32.32 fixed point.
    scale: u64,
}

impl BenchClock {
    /// Creates the clock. The EAL must have started, since it calibrates the TSC.
    pub fn new() -> BenchClock {
        let hz = dpdk::tsc_hz().max(1);
        BenchClock {
            base: dpdk::tsc_now(),
            scale: ((1_000_000_000u128 << 32) / u128::from(hz)) as u64,
        }
    }

    /// Time since the clock was created.
    #[inline]
    pub fn read_clock(&self) -> Instant {
        let ticks = dpdk::tsc_now().wrapping_sub(self.base);
        // Instants start at 1, because the stacks use 0 for "none".
        Instant::from_nanos(1 + ((u128::from(ticks) * u128::from(self.scale)) >> 32) as u64)
    }
}

impl Default for BenchClock {
    fn default() -> Self {
        Self::new()
    }
}
