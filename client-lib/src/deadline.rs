//! Deadlines of calls with a timeout.

use rustix::event::Timespec;
use std::time::{Duration, Instant};

/// End of a wait; without one it is unbounded, as with a timeout that exceeds the clock's range.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    pub fn after(timeout: Option<Duration>) -> Deadline {
        Deadline(timeout.and_then(|timeout| Instant::now().checked_add(timeout)))
    }

    /// Time left; None if unbounded.
    pub fn left(self) -> Option<Duration> {
        let deadline = self.0?;
        Some(deadline.saturating_duration_since(Instant::now()))
    }

    /// Time left as ppoll(2) takes it; None if unbounded.
    pub fn to_timespec(self) -> Option<Timespec> {
        // A time that is too long for the kernel is unbounded too.
        Timespec::try_from(self.left()?).ok()
    }

    pub fn has_passed(self) -> bool {
        self.left().is_some_and(|left| left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_timeout_is_unbounded() {
        assert_eq!(Deadline::after(Some(Duration::MAX)).left(), None);
        assert_eq!(Deadline::after(None).left(), None);
        assert!(Deadline::after(Some(Duration::ZERO)).has_passed());
        assert!(!Deadline::after(Some(Duration::from_secs(3600))).has_passed());
    }
}
