//! Processor time of the control thread by kind of work. A client waits at most for the longest piece
//! of work of each other client, so each piece has to be short: `dataplane/tests/daemon/turn_times.rs`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nix::time::ClockId;

/// Longest processor time of each kind of work since the start.
#[derive(Debug, Default)]
pub(super) struct TurnTimes {
    /// End of the last piece of work.
    last: Duration,
    longest: BTreeMap<&'static str, Duration>,
}

impl TurnTimes {
    /// Begins a turn: time before is not counted.
    pub fn begin_turn(&mut self) {
        self.last = thread_time();
    }

    /// Ends a piece of work of this kind, and begins the next one.
    pub fn end_work(&mut self, kind: &'static str) {
        let now = thread_time();
        let spent = now.saturating_sub(self.last);
        self.last = now;
        let longest = self.longest.entry(kind).or_default();
        *longest = spent.max(*longest);
    }

    /// Nanoseconds by kind.
    pub fn to_json(&self) -> serde_json::Value {
        let rows = self.longest.iter().map(|(kind, time)| {
            let nanoseconds = time.as_nanos() as u64;
            ((*kind).to_owned(), nanoseconds.into())
        });
        serde_json::Value::Object(rows.collect())
    }
}

/// Processor time of this thread; zero if the operating system does not report it.
fn thread_time() -> Duration {
    let time = ClockId::CLOCK_THREAD_CPUTIME_ID.now();
    time.map_or(Duration::ZERO, Duration::from)
}

/// Time spent in one turn on departed clients. Without it, one turn would end all clients that left
/// together, and all objects of a client.
const DEPARTURES_PER_TURN: Duration = Duration::from_micros(200);

/// Bounds work on departed clients.
pub(super) struct TurnBudget {
    end: Instant,
}

impl TurnBudget {
    /// Begins the budget of a turn.
    pub fn new() -> TurnBudget {
        TurnBudget {
            end: Instant::now() + DEPARTURES_PER_TURN,
        }
    }

    /// Returns true if more work may be done in this turn.
    pub fn has_time(&self) -> bool {
        Instant::now() < self.end
    }
}
