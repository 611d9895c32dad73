//! Requests of clients while they are served: deferral, replies and refusals.

pub(super) mod deferred;
pub(super) mod refusal;
pub(super) mod replies;
