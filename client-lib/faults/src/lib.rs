//! Fault plans: TOML files that list faults of RDMA devices, so that a program can be tested for them. Faults of
//! verbs and rdma_cm happen in a program, those of the wire and of threads in siwd ([`Place`]).
//!
//! [`Plan`] is a plan that was read and checked; every error names file, line and column. [`Decider`] has the
//! faults of one object of the program and decides for each of its calls which of them happen. It draws from a
//! generator of its own, derived from the seed of the plan, the fault and the ordinal number of the object, so
//! that neither time nor the order of threads changes its decisions. [`Timetable`] has the faults that happen at a
//! time instead of a call, and [`FrameDecider`] one fault of the frames of a device.
//!
//! This crate decides; `client-lib/verbs` and siwd let the faults happen.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod built_in;
mod decision;
mod kind;
mod numbers;
mod plan;
mod random;
mod random_plan;

pub use built_in::{BuiltIn, built_in_plans};
pub use decision::{Decider, Draws, FrameDecider, Hit, Timetable};
pub use kind::{
    AsyncEvent, CmEvent, DaemonEnd, Direction, Kind, Object, Operation, Place, Scope, Side, Site,
};
pub use numbers::{errno_name, errno_of, status_name, status_of};
pub use plan::{Aim, Fault, Plan, PlanError, Trigger};
pub use random_plan::{random_plan, simpler_plans};

/// Environment variable with the plan of a program: the path of a file, or the name of a built-in plan.
pub const PLAN_VARIABLE: &str = "SIW_FAULTS";
/// Environment variable with a seed in place of that of the plan.
pub const SEED_VARIABLE: &str = "SIW_FAULTS_SEED";
/// Environment variable with the path of a file of one `u64` in native order for each fault of the plan, which
/// counts how often it happened. The processes of a program share it.
pub const COUNTS_VARIABLE: &str = "SIW_FAULTS_COUNTS";
