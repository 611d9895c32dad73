//! Connections that came to a listener, until an application accepts or rejects them. They have a
//! life cycle of their own:
//!
//! ```text
//!  ACCEPTED -> AwaitingRequest --MPA request--> AwaitingAnswer --accept--> a queue pair's, Running
//!                    |                               |
//!                    | request_timeout_ms            | accept_timeout, reject, reset
//!                    '------------> closed <---------'
//! ```

use siw_iwarp::mpa::MpaResponder;
use siw_tcp::{ConnId, Instant};

use super::messages::GENERATION_MASK;
use crate::ids::CmListenerId;

/// The place of a connection in [`PendingConnections`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PendingSlot(pub(super) u32);

/// What a pending connection awaits. Either has a deadline, at which the connection is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PendingState {
    /// The peer's MPA request.
    AwaitingRequest,
    /// The application was asked: its answer.
    AwaitingAnswer,
    /// The application said no; nothing is awaited.
    Rejected,
}

/// One such connection.
pub(super) struct PendingConnection {
    /// The place of its device's port in the worker.
    pub(super) port: usize,
    pub(super) conn: ConnId,
    pub(super) listener: CmListenerId,
    pub(super) responder: MpaResponder,
    pub(super) accept_timeout: std::time::Duration,
    pub(super) state: PendingState,
    pub(super) deadline: Instant,
    /// Distinguishes this request from earlier ones with the same slot.
    pub(super) generation: u32,
}

/// Those of one worker. Finding a slot costs the same however many are taken.
#[derive(Default)]
pub(super) struct PendingConnections {
    slots: Vec<Option<PendingConnection>>,
    free: Vec<u32>,
    generation: u32,
}

impl PendingConnections {
    /// Gives the connection a slot and a generation.
    pub(super) fn insert(&mut self, mut pending: PendingConnection) -> PendingSlot {
        self.generation = self.generation.wrapping_add(1) & GENERATION_MASK;
        pending.generation = self.generation;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as u32
        });
        self.slots[slot as usize] = Some(pending);
        PendingSlot(slot)
    }

    pub(super) fn get_mut(&mut self, slot: PendingSlot) -> Option<&mut PendingConnection> {
        self.slots.get_mut(slot.0 as usize)?.as_mut()
    }

    /// Takes the connection out.
    pub(super) fn take(&mut self, slot: PendingSlot) -> Option<PendingConnection> {
        let pending = self.slots.get_mut(slot.0 as usize)?.take()?;
        self.free.push(slot.0);
        Some(pending)
    }

    /// Slots of those that `pick` picks. Control path only: it walks them all.
    pub(super) fn select(&self, pick: impl Fn(&PendingConnection) -> bool) -> Vec<PendingSlot> {
        let indices = 0..self.slots.len() as u32;
        indices
            .filter(|index| self.slots[*index as usize].as_ref().is_some_and(&pick))
            .map(PendingSlot)
            .collect()
    }
}
