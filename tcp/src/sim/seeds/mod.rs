//! Runs drawn from a seed: two stacks, several connections with owners of their own, a network that
//! loses, delays, damages and dies, and judges of every frame and of every end.
//!
//! A seed decides everything: the clocks (so that initial sequence numbers wrap in the first
//! message and ticks in the middle of a run), ports, round trips up to 300 ms, configurations, what
//! owners do (`OwnerStep`), what happens to network and hosts (`NetEvent`). What must hold:
//!
//! - every frame is one that [`WireOracle`] accepts;
//! - what an owner reads is what the peer's owner pushed, all of it when the peer closed;
//! - no reduction of the congestion window is undone whose retransmissions were needed;
//! - data in flight is sent again in time; a connection whose peer is silent ends, an orphan always;
//! - a stack does not wake for nothing; timeouts have causes; on a clean path nothing is sent twice;
//! - in the end no slot, timer or buffer is left.
//!
//! [`run_seed`] runs one; `tests/seeds.rs` runs many, `examples/soak.rs` as many as one likes.

mod judge;
mod owner;
mod plan;
mod run;

use std::cell::RefCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use crate::sim::seeds::run::SeedRun;
use crate::sim::wire_view::FrameLine;

/// Counters of runs in which all held.
#[derive(Clone, Copy, Debug, Default)]
pub struct SeedOutcome {
    /// Connections that were opened.
    pub connections: u64,
    /// Bytes that owners received.
    pub bytes: u64,
    /// Frames that were sent.
    pub frames: u64,
    /// Frames that were lost.
    pub lost: u64,
    /// Frames that were damaged in transit.
    pub damaged: u64,
    /// Times that a connection's sequence numbers went through zero.
    pub wraps: u64,
    /// Segments sent again.
    pub retransmits: u64,
    /// Retransmission timeouts.
    pub timeouts: u64,
    /// Reductions that were undone.
    pub undone: u64,
    /// Connections that ended by a reset of the peer.
    pub resets: u64,
    /// Connections that were given up.
    pub timed_out: u64,
    /// Connections that were refused or found nobody.
    pub unopened: u64,
    /// Hosts that died or started anew.
    pub deaths: u64,
    /// Virtual seconds.
    pub seconds: u64,
}

impl SeedOutcome {
    /// Name and value of each counter.
    pub fn rows(&self) -> [(&'static str, u64); 14] {
        [
            ("connections", self.connections),
            ("bytes", self.bytes),
            ("frames", self.frames),
            ("lost", self.lost),
            ("damaged", self.damaged),
            ("wraps", self.wraps),
            ("retransmits", self.retransmits),
            ("timeouts", self.timeouts),
            ("undone", self.undone),
            ("resets", self.resets),
            ("timed_out", self.timed_out),
            ("unopened", self.unopened),
            ("deaths", self.deaths),
            ("virtual_seconds", self.seconds),
        ]
    }

    /// Adds another run's.
    pub fn add(&mut self, other: &SeedOutcome) {
        self.connections += other.connections;
        self.bytes += other.bytes;
        self.frames += other.frames;
        self.lost += other.lost;
        self.damaged += other.damaged;
        self.wraps += other.wraps;
        self.retransmits += other.retransmits;
        self.timeouts += other.timeouts;
        self.undone += other.undone;
        self.resets += other.resets;
        self.timed_out += other.timed_out;
        self.unopened += other.unopened;
        self.deaths += other.deaths;
        self.seconds += other.seconds;
    }
}

/// A seed whose run broke a rule.
#[derive(Clone, Debug)]
pub struct SeedFailure {
    /// The seed.
    pub seed: u64,
    /// The rule, and where it was broken.
    pub why: String,
    /// The last frames before that, in a readable form.
    pub frames: Vec<String>,
}

impl fmt::Display for SeedFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {} failed: {}", self.seed, self.why)?;
        for frame in &self.frames {
            writeln!(f, "  {frame}")?;
        }
        let command = "cargo run -p siw-tcp --release --example soak --";
        write!(
            f,
            "run it again: {command} --seeds 1 --from {} --frames 10000",
            self.seed
        )
    }
}

/// Frames that a failure shows unless more are asked for.
pub const FRAMES_SHOWN: usize = 60;

/// The frames of a run in one line each.
type FrameLines = Rc<RefCell<Vec<String>>>;

fn run_once(seed: u64, lines: Option<FrameLines>) -> Result<SeedOutcome, String> {
    let result = catch_unwind(AssertUnwindSafe(|| {
        let mut run = SeedRun::new(seed);
        if let Some(lines) = lines {
            run.record_frames(move |at, host, sent, frame| {
                let what = if sent { "sends" } else { "gets" };
                let line = FrameLine(frame);
                lines
                    .borrow_mut()
                    .push(format!("{at:>12.6} host {host} {what:<5} {line}"));
            });
        }
        run.finish()
    }));
    result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("panicked: {}", text.unwrap_or_default()))
    })
}

/// Runs a seed; one that fails is run once more to show its last `frames` frames.
pub fn run_seed(seed: u64, frames: usize) -> Result<SeedOutcome, SeedFailure> {
    let why = match run_once(seed, None) {
        Ok(outcome) => return Ok(outcome),
        Err(why) => why,
    };
    let lines = FrameLines::default();
    let _ = run_once(seed, Some(lines.clone()));
    let lines = lines.take();
    let first = lines.len().saturating_sub(frames);
    Err(SeedFailure {
        seed,
        why,
        frames: lines[first..].to_vec(),
    })
}

/// What a seed draws, for a reader of its failure.
pub fn describe_seed(seed: u64) -> String {
    format!("{:#?}", plan::SeedPlan::draw(seed))
}
