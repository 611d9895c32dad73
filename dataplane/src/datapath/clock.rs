//! The worker's clock: the TSC in nanoseconds, read once a batch.

use std::time::{SystemTime, UNIX_EPOCH};

use siw_tcp::Instant;

/// Turns TSC ticks into nanoseconds since the clock was made.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    base: u64,
    /// Nanoseconds per tick, 32.32 fixed point.
    scale: u64,
    /// Wall clock at the base, nanoseconds since the epoch: for captures only.
    wall_base: u64,
}

impl Clock {
    /// Calibrated by the EAL; `Eal::init` must have run.
    pub fn new() -> Clock {
        let hz = dpdk::tsc_hz().max(1);
        let wall = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_nanos() as u64);
        Clock {
            base: dpdk::tsc_now(),
            scale: ((1_000_000_000u128 << 32) / u128::from(hz)) as u64,
            wall_base: wall,
        }
    }

    /// Now.
    #[inline]
    pub fn now(&self) -> Instant {
        let ticks = dpdk::tsc_now().wrapping_sub(self.base);
        Instant::from_nanos(((u128::from(ticks) * u128::from(self.scale)) >> 32) as u64)
    }

    /// Nanoseconds since the epoch at `t`.
    pub fn wall(&self, t: Instant) -> u64 {
        self.wall_base + t.0
    }
}
