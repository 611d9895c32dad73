//! Devices: selection for an address, link state, and routes of the kernel.

pub(super) mod devices;
pub(super) mod host_routes;
pub(super) mod links;
