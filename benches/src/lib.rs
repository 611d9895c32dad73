//! What `siw-perf` and `./benches/figures` measure with.
//!
//! ```text
//!  args ─► plan ─► session (connects) ─► bandwidth │ latency ─► measurement ─► report
//!                                  bounds (raw frames, copy, CRC32c) ───────────┘
//! ```
//! One thread drives both ends of a transfer when they are in one process: the
//! daemon's worker then has the other core to itself.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod args;
pub mod bandwidth;
pub mod bounds;
pub mod churn;
mod control_line;
pub mod daemon;
pub mod end;
pub mod figure;
pub mod latency;
pub mod measurement;
pub mod pattern;
pub mod plan;
pub mod progress;
pub mod registration;
pub mod report;
pub mod session;
pub mod tcp;
pub mod trust;
