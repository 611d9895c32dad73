//! Timers that make a descriptor of events readable at a time.

use rustix::fd::{AsFd, BorrowedFd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use siw::{KeptDescriptor, ProcessMutex};
use std::time::{Duration, Instant};

/// A timer whose descriptor is readable from a time on, until it is set again.
pub struct Alarm {
    timer: KeptDescriptor,
    /// Time that is set.
    next: ProcessMutex<Option<Instant>>,
}

impl Alarm {
    /// Creates it without a time.
    pub fn new() -> std::io::Result<Alarm> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Ok(Alarm {
            timer: KeptDescriptor::at_high_number(timer)?,
            next: ProcessMutex::default(),
        })
    }

    /// Sets the time, or none.
    pub fn set(&self, time: Option<Instant>) {
        let mut next = self.next.lock_or_end_call();
        *next = time;
        self.start(time);
    }

    /// Sets the time unless an earlier one is set.
    pub fn set_no_later(&self, time: Instant) {
        let mut next = self.next.lock_or_end_call();
        if next.is_none_or(|next| time < next) {
            *next = Some(time);
            self.start(Some(time));
        }
    }

    /// Whether the time has come.
    pub fn is_due(&self, now: Instant) -> bool {
        let next = self.next.lock_or_end_call();
        next.is_some_and(|next| next <= now)
    }

    fn start(&self, time: Option<Instant>) {
        // A time of zero disarms the timer.
        let left = time.map_or(Duration::ZERO, |time| {
            let left = time.saturating_duration_since(Instant::now());
            left.max(Duration::from_nanos(1))
        });
        let none = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let spec = Itimerspec {
            it_interval: none,
            it_value: Timespec {
                tv_sec: left.as_secs().cast_signed(),
                tv_nsec: left.subsec_nanos().into(),
            },
        };
        let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec);
    }
}

impl AsFd for Alarm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}
