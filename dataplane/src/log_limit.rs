//! A limit for each kind of message in the log: a client that makes the daemon log the same warning
//! without end fills neither the journal nor the daemon's time. A kind is a place in the code.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// Messages of one kind in one period; those at level debug and trace are not limited.
const MOST: u32 = 40;
/// Length of a period.
const PERIOD: Duration = Duration::from_secs(10);

/// Messages of one kind in the current period.
struct Period {
    start: Instant,
    count: u32,
    left_out: u64,
}

/// Decision about a message.
#[derive(Debug, PartialEq, Eq)]
enum LogDecision {
    Pass,
    /// The first message of a period, and the number left out in the last one.
    PassAfter(u64),
    /// The first message left out.
    FirstLeftOut,
    LeftOut,
}

impl Period {
    fn count_message(&mut self, now: Instant) -> LogDecision {
        if now.duration_since(self.start) >= PERIOD {
            let left_out = std::mem::take(&mut self.left_out);
            (self.start, self.count) = (now, 1);
            return match left_out {
                0 => LogDecision::Pass,
                left_out => LogDecision::PassAfter(left_out),
            };
        }
        if self.count < MOST {
            self.count += 1;
            return LogDecision::Pass;
        }
        self.left_out += 1;
        match self.left_out {
            1 => LogDecision::FirstLeftOut,
            _ => LogDecision::LeftOut,
        }
    }
}

/// Layer of the log that leaves out messages beyond the limit of their kind.
#[derive(Default)]
pub struct LogLimit {
    kinds: Mutex<HashMap<Identifier, Period>>,
}

impl LogLimit {
    fn count_message(&self, kind: Identifier) -> LogDecision {
        let now = Instant::now();
        let mut kinds = self.kinds.lock();
        let period = kinds.entry(kind).or_insert(Period {
            start: now,
            count: 0,
            left_out: 0,
        });
        period.count_message(now)
    }
}

impl<S: Subscriber> Layer<S> for LogLimit {
    fn event_enabled(&self, event: &Event<'_>, _context: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if *metadata.level() > Level::INFO {
            return true;
        }
        // The messages below come through here as well, after the lock is released.
        match self.count_message(metadata.callsite()) {
            LogDecision::Pass => true,
            LogDecision::PassAfter(left_out) => {
                let of = metadata.target();
                tracing::warn!(left_out, of, "messages like the next one were left out");
                true
            }
            LogDecision::FirstLeftOut => {
                let (of, line) = (metadata.target(), metadata.line().unwrap_or(0));
                let seconds = PERIOD.as_secs();
                tracing::warn!(
                    of,
                    line,
                    "more than {MOST} messages of one kind in {seconds} seconds: the rest is left out"
                );
                false
            }
            LogDecision::LeftOut => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_period_has_its_messages_and_says_how_many_are_missing() {
        let start = Instant::now();
        let mut period = Period {
            start,
            count: 0,
            left_out: 0,
        };
        let mut passed = 0;
        while period.count_message(start) == LogDecision::Pass {
            passed += 1;
        }
        assert_eq!(passed, MOST);
        assert_eq!(period.count_message(start), LogDecision::LeftOut);
        let next = start + PERIOD;
        assert_eq!(period.count_message(next), LogDecision::PassAfter(2));
        assert_eq!(period.count_message(next), LogDecision::Pass);
        assert_eq!(period.count_message(next + PERIOD), LogDecision::Pass);
    }
}
