//! siwd: a software RNIC in user space.
//!
//! ```text
//!  applications == shared memory ==> worker (pinned thread per core)
//!       |                              iWARP -> TCP -> DPDK port
//!       '== control socket ==> control thread: resources, connections, configuration
//! ```
//!
//! [`daemon::run_daemon`] runs the process from start to stop; `main.rs` is its command line.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod capture;
pub mod config;
pub mod control;
pub mod daemon;
pub mod datapath;
pub mod device;
pub mod device_list;
pub mod device_view;
pub mod frame_taps;
pub mod host;
pub mod ids;
pub mod link_traits;
mod log_limit;
pub mod offloads;
pub mod prepared;
pub mod resume_latency;
pub mod start_error;
pub mod trace;
mod vhost_socket;
pub mod worker;
mod xdp_device;
