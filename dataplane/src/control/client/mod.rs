//! Clients of the control socket: arrival, credentials and events.

pub(super) mod acceptor;
pub(super) mod cm_events;
pub(super) mod outbox;
pub mod peers;
pub mod socket;
