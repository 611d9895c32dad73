//! The machine that a result was measured on, and disturbances of the measurement, without which
//! figures cannot be compared.

mod cache_line;
mod conditions;
mod record;
mod threads;
mod wake_up;

pub use cache_line::{cache_line_round_trip_ns, pin_thread};
pub use conditions::{
    Conditions, ConditionsWatch, MAX_CACHE_LINE_DRIFT, MAX_INVOLUNTARY_RATE, MAX_RUN_DELAY_PERCENT,
    MAX_STEAL_PERCENT,
};
pub use record::MachineRecord;
pub use wake_up::wake_up_us;
