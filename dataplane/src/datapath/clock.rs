//! The clock of a thread: the TSC in nanoseconds, read once per batch.

use std::cell::Cell;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use siw_net::Instant;

/// Converts TSC ticks to nanoseconds since the clock was created.
#[derive(Debug, Clone)]
pub struct TscClock {
    /// The TSC at time 0.
    base: Cell<u64>,
    /// The TSC at the last reading.
    last: Cell<u64>,
    /// Nanoseconds per tick, 32.32 fixed point.
    scale: u64,
    /// Wall clock at time 0 by the last reading, nanoseconds since the epoch: for captures only.
    wall_base: Cell<u64>,
    /// Time of the last reading of the wall clock.
    wall_read: Cell<Instant>,
}

/// Interval of reading the wall clock. The rate of the TSC is rounded, by as much as 1.5 per mille.
const WALL_CLOCK_INTERVAL: Duration = Duration::from_secs(1);

/// Nanoseconds since the epoch.
fn read_wall_clock() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since_epoch| since_epoch.as_nanos() as u64)
}

impl TscClock {
    /// Uses the TSC rate that the EAL measured; `Eal::init` must have run.
    pub fn start() -> TscClock {
        let ticks_per_second = dpdk::tsc_hz().max(1);
        let wall = read_wall_clock();
        let base = dpdk::tsc_now();
        TscClock {
            base: Cell::new(base),
            last: Cell::new(base),
            scale: ((1_000_000_000u128 << 32) / u128::from(ticks_per_second)) as u64,
            wall_base: Cell::new(wall),
            wall_read: Cell::new(Instant::ZERO),
        }
    }

    /// Now; never earlier than the time before.
    #[inline]
    pub fn now(&self) -> Instant {
        self.time_at(dpdk::tsc_now())
    }

    #[inline]
    fn time_at(&self, tsc: u64) -> Instant {
        if tsc < self.last.get() {
            self.follow_reset(tsc);
        }
        self.last.set(tsc);
        let ticks = tsc.wrapping_sub(self.base.get());
        Instant::from_nanos(((u128::from(ticks) * u128::from(self.scale)) >> 32) as u64)
    }

    /// Continues from the last reading after the TSC has gone back, as when a virtual machine is
    /// restored from a snapshot on another machine.
    #[cold]
    fn follow_reset(&self, tsc: u64) {
        let since_base = self.last.get().wrapping_sub(self.base.get());
        self.base.set(tsc.wrapping_sub(since_base));
    }

    /// Nanoseconds since the epoch at `time`, for captures.
    #[inline]
    pub fn wall_time(&self, time: Instant) -> u64 {
        if time >= self.wall_read.get() + WALL_CLOCK_INTERVAL {
            self.follow_wall_clock(self.now(), read_wall_clock());
        }
        self.wall_base.get() + time.0
    }

    /// Notes that the wall clock showed `wall` at `now`.
    #[cold]
    fn follow_wall_clock(&self, now: Instant, wall: u64) {
        self.wall_base.set(wall.saturating_sub(now.0));
        self.wall_read.set(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_continues_when_the_tsc_goes_back() {
        let clock = TscClock {
            base: Cell::new(5_000_000),
            last: Cell::new(5_000_000),
            // One tick is a nanosecond.
            scale: 1 << 32,
            wall_base: Cell::new(0),
            wall_read: Cell::new(Instant::ZERO),
        };
        assert_eq!(clock.time_at(5_001_000), Instant(1000));
        // Below the base, and further than any time so far.
        assert_eq!(clock.time_at(100), Instant(1000));
        assert_eq!(clock.time_at(600), Instant(1500));
        assert_eq!(clock.time_at(0), Instant(1500));
        // Above the base, but back.
        assert_eq!(clock.time_at(9_000_000), Instant(9_001_500));
        assert_eq!(clock.time_at(8_000_000), Instant(9_001_500));
        assert_eq!(clock.time_at(8_000_001), Instant(9_001_501));
    }

    #[test]
    fn the_wall_clock_is_read_again_after_a_second() {
        let clock = TscClock {
            base: Cell::new(0),
            last: Cell::new(0),
            scale: 1 << 32,
            wall_base: Cell::new(1_000),
            wall_read: Cell::new(Instant::ZERO),
        };
        let second = WALL_CLOCK_INTERVAL.as_nanos() as u64;
        assert_eq!(clock.wall_time(Instant(second - 1)), 1_000 + second - 1);
        // The TSC was slow by 500 ns.
        clock.follow_wall_clock(Instant(second), 1_500 + second);
        assert_eq!(clock.wall_time(Instant(second + 7)), 1_507 + second);
        assert_eq!(clock.wall_time(Instant(2 * second - 1)), 1_499 + 2 * second);
    }
}
