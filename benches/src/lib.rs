//! Building blocks of `siw-perf` and `./benches/figures`.
//!
//! ```text
//!  args ─► transfer ─► plan ─► session (connects) ─► bandwidth │ latency ─► report ─► summary
//!              ├─ bounds (raw frames, copy, CRC32c) ──────────────────────────┘
//!              └─ machine (which one, and whether others disturbed it)
//! ```
//! If both ends of a transfer are in one process, one thread drives both, so that the daemon's
//! worker has the other core to itself.
#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod args;
pub mod bandwidth;
pub mod bounds;
pub mod churn;
pub mod compare;
mod control_line;
pub mod daemon;
pub mod drop_in;
pub mod end;
pub mod figure;
pub mod html;
pub mod latency;
pub mod limits;
pub mod live;
pub mod machine;
pub mod measurement;
pub mod one_side;
mod option_values;
pub mod output;
mod own_daemon;
pub mod pattern;
pub mod peers;
pub mod plan;
pub mod progress;
pub mod raw;
#[allow(unsafe_code)]
pub mod registration;
pub mod report;
pub mod results;
pub mod results_document;
mod running_program;
pub mod scale;
pub mod session;
pub mod summary;
pub mod tcp;
pub mod transfer;
pub mod trust;
