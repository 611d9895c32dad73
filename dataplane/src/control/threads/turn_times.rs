//! Processor time of the control thread by kind of work. A client waits at most for the longest piece
//! of work of each other client, so each piece has to be short: `dataplane/tests/daemon/turn_times.rs`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nix::time::ClockId;

/// The processor time is read again after this time.
const LONGEST_UNREAD: Duration = Duration::from_micros(100);

/// Longest processor time of each kind of work since the start.
#[derive(Debug)]
pub(in crate::control) struct TurnTimes {
    /// End of the last piece of work.
    last: Instant,
    /// Processor time, and when it was read.
    processor_time: Duration,
    read_at: Instant,
    longest: BTreeMap<&'static str, Duration>,
}

impl Default for TurnTimes {
    fn default() -> TurnTimes {
        let now = Instant::now();
        TurnTimes {
            last: now,
            processor_time: thread_time(),
            read_at: now,
            longest: BTreeMap::new(),
        }
    }
}

impl TurnTimes {
    /// Begins a turn: time before is not counted.
    pub fn begin_turn(&mut self) {
        self.last = Instant::now();
        if self.last - self.read_at > LONGEST_UNREAD {
            self.read_processor_time();
        }
    }

    /// Ends a piece of work of this kind, and begins the next one.
    ///
    /// Reading the processor time is a system call (a quarter of the time of a connection's set-up when
    /// each piece did it); a piece that was shorter than the longest of its kind by the clock does
    /// without until [`LONGEST_UNREAD`]. So where the thread lost its core during a piece, up to this time
    /// before it counts as well.
    pub fn end_work(&mut self, kind: &'static str) {
        let now = Instant::now();
        let elapsed = now - self.last;
        self.last = now;
        if self
            .longest
            .get(kind)
            .is_some_and(|longest| elapsed <= *longest)
        {
            if now - self.read_at > LONGEST_UNREAD {
                self.read_processor_time();
            }
            return;
        }
        let spent = self.read_processor_time().min(elapsed);
        let longest = self.longest.entry(kind).or_default();
        *longest = spent.max(*longest);
    }

    /// Returns the processor time since it was last read.
    fn read_processor_time(&mut self) -> Duration {
        let time = thread_time();
        let spent = time.saturating_sub(self.processor_time);
        self.processor_time = time;
        self.read_at = self.last;
        spent
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
pub(in crate::control) struct TurnBudget {
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
