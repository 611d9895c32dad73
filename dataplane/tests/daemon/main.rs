//! The daemon itself: configuration, control socket, limits, statistics, workers and supervision.

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod address_changes;
mod addresses;
mod bad_input;
mod capture;
mod check;
mod client_faults;
mod control_fuzz;
mod device_changes;
mod drops;
mod exhausted_pool;
mod fault_plans;
mod flight_recorder;
mod heap_accounts;
mod host;
mod limits;
mod live_capture;
mod local_clients;
mod operate;
mod polled_queues;
mod prometheus;
mod quotas;
mod reload;
mod ring_budgets;
mod runtime_changes;
mod schema;
mod siwctl;
mod slow_requests;
mod statistics;
mod supervision;
mod sysfs_files;
mod telemetry;
mod trace;
mod turn_times;
mod user_shares;
mod wake_descriptor;
mod worker_filter;
mod workers;
