//! Requests of operators: lists, statistics, captures, fault plans, changes of a running daemon, its devices and its configuration.

pub(super) mod addresses;
pub mod captures;
pub(super) mod counter_files;
pub mod device_changes;
pub(super) mod faults;
pub(super) mod flight_recorder;
pub(super) mod lists;
pub(super) mod loaded_configuration;
pub(super) mod operate;
pub mod operators;
pub(in crate::control) mod pieced_text;
pub mod reload;
pub(super) mod routes;
pub mod runtime_changes;
pub(super) mod statistics;
pub(super) mod viewer;
