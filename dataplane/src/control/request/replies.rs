//! Outcomes of requests, and replies to them.

use std::os::fd::BorrowedFd;

use siw_shm::control::Message;
use siw_shm::control::messages as m;

use super::deferred::Deferred;
use super::refusal::Refusal;
use crate::control::resources::Client;

/// Outcome of a served request.
pub(in crate::control) enum Served {
    Replied,
    /// Workers or helpers must report first.
    Deferred(Deferred),
}

/// Progress of a request.
#[derive(PartialEq, Eq)]
pub(in crate::control) enum RequestState {
    Finished,
    /// To be retried when none of the client's queue pairs is being destroyed.
    TryAgain,
}

pub(in crate::control) type Outcome = Result<Served, Refusal>;

pub(in crate::control) fn send_reply<M: Message>(
    client: &Client,
    seq: u32,
    reply: &M::Reply,
) -> Outcome {
    send_reply_with_fds::<M>(client, seq, reply, &[])
}

pub(in crate::control) fn send_reply_with_fds<M: Message>(
    client: &Client,
    seq: u32,
    reply: &M::Reply,
    fds: &[BorrowedFd<'_>],
) -> Outcome {
    // A client that does not read its replies loses them; its next call fails.
    if let Err(error) = client.conn.send_reply::<M>(seq, reply, fds) {
        tracing::debug!(client = client.id.0, "reply not sent: {error}");
    }
    Ok(Served::Replied)
}

pub(in crate::control) const EMPTY: m::Empty = m::Empty { reserved: 0 };
