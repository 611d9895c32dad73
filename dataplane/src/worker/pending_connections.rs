//! Connections that came to a listener, until an application accepts or rejects them. They have a
//! life cycle of their own:
//!
//! ```text
//!  ACCEPTED -> AwaitingRequest --MPA request--> AwaitingAnswer --accept--> a queue pair's, Running
//!                    |                               |
//!                    | request_timeout_ms            | accept_timeout, reject, reset
//!                    '------------> closed <---------'
//! ```

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use siw_iwarp::mpa::MpaResponder;
use siw_tcp::{ConnId, Instant};

use super::messages::GENERATION_MASK;
use super::slots::PendingSlot;
use crate::ids::CmListenerId;

/// State of a pending connection. A state that awaits something has a deadline, at which the
/// connection is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PendingState {
    /// Awaits the peer's MPA request.
    AwaitingRequest,
    /// Awaits the application's answer.
    AwaitingAnswer,
    /// The application rejected the connection; nothing is awaited.
    Rejected,
}

/// A connection without a queue pair.
pub(super) struct PendingConnection {
    /// Index of its device's port in the worker.
    pub(super) port: usize,
    pub(super) conn: ConnId,
    pub(super) listener: CmListenerId,
    pub(super) responder: MpaResponder,
    pub(super) accept_timeout: std::time::Duration,
    pub(super) state: PendingState,
    pub(super) deadline: Instant,
    /// Distinguishes this request from earlier ones with the same slot.
    pub(super) generation: u32,
    /// The user (uid) whose listener it came to.
    pub(super) user: u32,
}

/// Pending connections of one worker. The cost of finding a slot does not depend on their number.
pub(super) struct PendingConnections {
    slots: Vec<Option<PendingConnection>>,
    free: Vec<u32>,
    generation: u32,
    /// Number of pending connections by the user whose listeners they came to; users without any are
    /// absent.
    of_users: HashMap<u32, usize>,
    max_per_user: usize,
}

impl PendingConnections {
    /// Creates an empty table that admits at most `max_per_user` connections of each user.
    pub(super) fn new(max_per_user: usize) -> PendingConnections {
        PendingConnections {
            slots: Vec::new(),
            free: Vec::new(),
            generation: 0,
            of_users: HashMap::new(),
            max_per_user,
        }
    }

    /// Returns whether one more connection may come to a listener of this user. Each takes one of its
    /// device's connections, which all users share.
    pub(super) fn has_room_for(&self, user: u32) -> bool {
        self.of_users.get(&user).copied().unwrap_or(0) < self.max_per_user
    }

    /// Gives the connection a slot and a generation.
    pub(super) fn insert(&mut self, mut pending: PendingConnection) -> PendingSlot {
        *self.of_users.entry(pending.user).or_default() += 1;
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

    /// Removes the connection.
    pub(super) fn take(&mut self, slot: PendingSlot) -> Option<PendingConnection> {
        let pending = self.slots.get_mut(slot.0 as usize)?.take()?;
        self.free.push(slot.0);
        if let Entry::Occupied(mut count) = self.of_users.entry(pending.user) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        Some(pending)
    }

    /// Slots of the connections that `pick` selects. Control path only: scans all slots.
    pub(super) fn select(&self, pick: impl Fn(&PendingConnection) -> bool) -> Vec<PendingSlot> {
        let indices = 0..self.slots.len() as u32;
        indices
            .filter(|index| self.slots[*index as usize].as_ref().is_some_and(&pick))
            .map(PendingSlot)
            .collect()
    }
}
