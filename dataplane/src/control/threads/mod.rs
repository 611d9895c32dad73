//! The other threads as the control thread sees them: workers, helpers and their reports, and the time that its own turns take.

pub(super) mod closer;
pub(super) mod helpers;
pub(super) mod reports;
pub(super) mod turn_times;
pub(super) mod watchdog;
pub(super) mod workers;
