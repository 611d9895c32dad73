//! The clock of a thread: the TSC in nanoseconds, read once per batch.

use std::time::{SystemTime, UNIX_EPOCH};

use siw_tcp::Instant;

/// Converts TSC ticks to nanoseconds since the clock was created.
#[derive(Debug, Clone, Copy)]
pub struct TscClock {
    /// The TSC when the clock was created.
    base: u64,
    /// Nanoseconds per tick, 32.32 fixed point.
    scale: u64,
    /// Wall clock at the base, nanoseconds since the epoch: for captures only.
    wall_base: u64,
}

impl TscClock {
    /// Uses the TSC rate that the EAL measured; `Eal::init` must have run.
    pub fn new() -> TscClock {
        let ticks_per_second = dpdk::tsc_hz().max(1);
        let wall = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since_epoch| since_epoch.as_nanos() as u64);
        TscClock {
            base: dpdk::tsc_now(),
            scale: ((1_000_000_000u128 << 32) / u128::from(ticks_per_second)) as u64,
            wall_base: wall,
        }
    }

    /// Now.
    #[inline]
    pub fn now(&self) -> Instant {
        let ticks = dpdk::tsc_now().wrapping_sub(self.base);
        Instant::from_nanos(((u128::from(ticks) * u128::from(self.scale)) >> 32) as u64)
    }

    /// Nanoseconds since the epoch at `time`, for captures.
    #[inline]
    pub fn wall_time(&self, time: Instant) -> u64 {
        self.wall_base + time.0
    }
}
