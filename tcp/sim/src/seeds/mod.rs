//! Random runs drawn from a seed: two stacks, several connections whose owners follow scripts, and a
//! network that loses, delays and damages frames and whose hosts may die. Checks every frame and how
//! every connection ends.
//!
//! The seed determines everything: the clocks (so that initial sequence numbers wrap within the first
//! message and ticks wrap during a run), ports, round trips up to 300 ms, configurations, actions of
//! the owners (`OwnerStep`), and events of the network and the hosts (`NetEvent`). These must hold:
//!
//! - [`WireOracle`](crate::wire_oracle::WireOracle) accepts every frame;
//! - an owner reads what the peer's owner pushed, and all of it if the peer closed;
//! - a reduction of the congestion window is undone only if its retransmissions were needless;
//! - data in flight is retransmitted in time; a connection whose peer is silent ends, and so does
//!   every orphan;
//! - a stack does not wake needlessly; every timeout has a cause; a clean path sees no
//!   retransmission;
//! - at the end no slot, timer or buffer is in use.
//!
//! From [`FIRST_VARIED_SEED`] on, seeds also draw peers and paths of other kinds: super-segments at the
//! receiver, SYN cookies, receivers that renege, delayed ACKs of 40 and 200 ms, ACKs without D-SACK, and
//! slow links, on which a peer that closes must not reset.
//!
//! [`run_seed`] runs one seed; `tests/stack/seeds.rs` runs many, `examples/soak.rs` any number.

mod judge;
mod owner;
mod plan;
mod run;

use std::cell::RefCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

pub use crate::seeds::plan::FIRST_VARIED_SEED;
use crate::seeds::run::SeedRun;
use crate::wire_view::FrameLine;

/// Counters of a successful run.
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
    /// Times that the sequence numbers of a connection wrapped.
    pub wraps: u64,
    /// Segments sent again.
    pub retransmits: u64,
    /// Retransmission timeouts.
    pub timeouts: u64,
    /// Window reductions that were undone.
    pub undone: u64,
    /// Connections that the peer reset.
    pub resets: u64,
    /// Connections that timed out.
    pub timed_out: u64,
    /// Connections that were refused or whose peer was unreachable.
    pub unopened: u64,
    /// Hosts that died, for good or until a restart.
    pub deaths: u64,
    /// Virtual seconds.
    pub seconds: u64,
    /// Segments that arrived as part of a super-segment.
    pub coalesced: u64,
    /// Connections that a SYN cookie opened.
    pub cookies: u64,
    /// Buffers with reported data that a receiver dropped.
    pub reneged: u64,
    /// D-SACK blocks that did not reach the sender.
    pub dsacks_stripped: u64,
    /// ACKs that hosts delayed by 40 ms or more.
    pub late_acks: u64,
    /// Connections that an owner released on a slow path before all data was acknowledged, and whose peer
    /// received everything.
    pub slow_closes: u64,
}

impl SeedOutcome {
    /// Name and value of each counter that seeds of both kinds have.
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

    /// Name and value of each counter that only seeds from [`FIRST_VARIED_SEED`] on have.
    pub fn varied_rows(&self) -> [(&'static str, u64); 6] {
        [
            ("coalesced", self.coalesced),
            ("cookies", self.cookies),
            ("reneged", self.reneged),
            ("dsacks_stripped", self.dsacks_stripped),
            ("late_acks", self.late_acks),
            ("slow_closes", self.slow_closes),
        ]
    }

    /// Adds the counters of another run.
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
        self.coalesced += other.coalesced;
        self.cookies += other.cookies;
        self.reneged += other.reneged;
        self.dsacks_stripped += other.dsacks_stripped;
        self.late_acks += other.late_acks;
        self.slow_closes += other.slow_closes;
    }
}

/// A seed whose run broke a rule.
#[derive(Clone, Debug)]
pub struct SeedFailure {
    /// The seed.
    pub seed: u64,
    /// The rule, and where it was broken.
    pub why: String,
    /// The last frames before the violation, in readable form.
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

/// Default number of frames shown for a failure.
pub const FRAMES_SHOWN: usize = 60;

/// The frames of a run, one line each.
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

/// Runs a seed; a failing seed runs once more to record its last `frames` frames.
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

/// Describes the plan of a seed, to help analyse a failure.
pub fn describe_seed(seed: u64) -> String {
    format!("{:#?}", plan::SeedPlan::draw(seed))
}
