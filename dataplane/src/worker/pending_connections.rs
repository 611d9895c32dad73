//! Connections that came to a listener, until an application accepts or rejects them. They have a
//! life cycle of their own:
//!
//! ```text
//!  ACCEPTED -> AwaitingRequest --MPA request--> AwaitingAnswer --accept--> a queue pair's, Running
//!                    |                               |
//!                    | request_timeout_ms            | accept_timeout, reject, reset
//!                    '------------> closed <---------'
//! ```
//! Connections in streaming mode (`streaming.rs`), of either side, come before that:
//!
//! ```text
//!  OpenStream -> Connecting --CONNECTED--> Streaming --turn, responder--> AwaitingRequest
//!                ACCEPTED ------------------> |  '-----turn, initiator--> a queue pair's, MpaNegotiation
//!                                             '-- time without bytes, reset, end --> closed
//! ```

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use siw_iwarp::mpa::MpaResponder;
use siw_net::{ConnId, Instant};

use super::messages::GENERATION_MASK;
use super::owned_objects::OwnedObjects;
use super::slots::PendingSlot;
use crate::ids::CmListenerId;

/// State of a pending connection. A state that awaits something has a deadline, at which the
/// connection is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PendingState {
    /// Awaits the TCP connection that this side opens in streaming mode.
    Connecting,
    /// In streaming mode: the application sends and receives bytes.
    Streaming(StreamState),
    /// Awaits the peer's MPA request.
    AwaitingRequest,
    /// Awaits the application's answer.
    AwaitingAnswer,
    /// The application rejected the connection; nothing is awaited.
    Rejected,
}

/// State of a connection in streaming mode.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct StreamState {
    /// The peer has closed its direction, or both are closed.
    pub(super) peer_closed: bool,
    /// The application has closed its direction.
    pub(super) is_closed: bool,
    /// The application has found no bytes, and gets a report when there are some.
    pub(super) awaits_bytes: bool,
    /// The application could send nothing, and gets a report when there is room.
    pub(super) awaits_room: bool,
}

/// A connection without a queue pair.
pub(super) struct PendingConnection {
    /// Index of its device's port in the worker.
    pub(super) port: usize,
    pub(super) conn: ConnId,
    pub(super) listener: CmListenerId,
    pub(super) responder: MpaResponder,
    pub(super) accept_timeout: Duration,
    pub(super) state: PendingState,
    pub(super) deadline: Instant,
    /// Distinguishes this request from earlier ones with the same slot.
    pub(super) generation: u32,
    /// The user (uid) whose listener it came to, or who opened it.
    pub(super) user: u32,
    /// For a connection that began in streaming mode: maximum time without bytes in either direction.
    pub(super) idle_timeout: Option<Duration>,
}

impl PendingConnection {
    /// True if the application knows its number.
    pub(super) fn is_reported(&self) -> bool {
        match self.state {
            PendingState::AwaitingAnswer => true,
            PendingState::Rejected => false,
            _ => self.idle_timeout.is_some(),
        }
    }

    /// True if it is in streaming mode and the application has closed its direction.
    pub(super) fn has_closed(&self) -> bool {
        matches!(self.state, PendingState::Streaming(state) if state.is_closed)
    }

    /// True if it outlives its listener in any case: the application sends and receives on it already.
    fn has_left_listener(&self) -> bool {
        self.idle_timeout.is_some() && self.state != PendingState::AwaitingAnswer
    }
}

/// Pending connections of one worker. The cost of finding a slot does not depend on their number.
pub(super) struct PendingConnections {
    slots: Vec<Option<PendingConnection>>,
    free: Vec<u32>,
    generation: u32,
    /// Number of pending connections by the user whose listeners they came to; users without any are
    /// absent.
    of_users: HashMap<u32, usize>,
    of_listeners: OwnedObjects<CmListenerId>,
    /// Listeners that have ended and may still have connections.
    ended: VecDeque<EndedListener>,
    max_per_user: usize,
}

/// A listener that has ended, whose connections are closed a bounded number at a time.
struct EndedListener {
    listener: CmListenerId,
    /// Requests that an application may still answer stay.
    keep_requests: bool,
    /// First slot to look at.
    next: u32,
}

impl PendingConnections {
    /// Creates an empty table that admits at most `max_per_user` connections of each user.
    pub(super) fn new(max_per_user: usize) -> PendingConnections {
        PendingConnections {
            slots: Vec::new(),
            free: Vec::new(),
            generation: 0,
            of_users: HashMap::new(),
            of_listeners: OwnedObjects::default(),
            ended: VecDeque::new(),
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
        self.of_listeners.insert(pending.listener, slot);
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
        self.of_listeners.remove(pending.listener, slot.0);
        if let Entry::Occupied(mut count) = self.of_users.entry(pending.user) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        Some(pending)
    }

    /// Ends a listener, to which no connection can come any more.
    pub(super) fn end_listener(&mut self, listener: CmListenerId, keep_requests: bool) {
        self.ended.push_back(EndedListener {
            listener,
            keep_requests,
            next: 0,
        });
    }

    /// True if [`Self::next_ended`] is to be called.
    #[inline]
    pub(super) fn has_ended_listeners(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Next connection to close because its listener has ended. Each look at a connection or listener
    /// takes one of `looks`; returns `None` when none is left.
    pub(super) fn next_ended(&mut self, looks: &mut usize) -> Option<PendingSlot> {
        while *looks > 0 {
            *looks -= 1;
            let ended = self.ended.front_mut()?;
            let Some(slot) = self.of_listeners.next(ended.listener, ended.next) else {
                self.ended.pop_front();
                continue;
            };
            ended.next = slot + 1;
            let pending = self.slots.get(slot as usize).and_then(Option::as_ref);
            let keep_requests = ended.keep_requests;
            let stays = pending.is_some_and(|pending| {
                let awaits_answer = pending.state == PendingState::AwaitingAnswer;
                pending.has_left_listener() || (keep_requests && awaits_answer)
            });
            if !stays {
                return Some(PendingSlot(slot));
            }
        }
        None
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

#[cfg(test)]
mod tests {
    use siw_iwarp::mpa::MpaConfig;

    use super::*;

    fn insert(
        pending: &mut PendingConnections,
        listener: CmListenerId,
        state: PendingState,
    ) -> PendingSlot {
        pending.insert(PendingConnection {
            port: 0,
            conn: ConnId::default(),
            listener,
            responder: MpaResponder::new(&MpaConfig::default()),
            accept_timeout: Duration::from_secs(1),
            state,
            deadline: Instant::ZERO,
            generation: 0,
            user: 0,
            idle_timeout: None,
        })
    }

    #[test]
    fn the_end_of_a_listener_takes_bounded_steps_and_only_its_own_connections() {
        let mut pending = PendingConnections::new(1000);
        let [ended, kept, other] = [1, 2, 3].map(CmListenerId);
        let mut expected = Vec::new();
        for _ in 0..50 {
            expected.push(insert(&mut pending, ended, PendingState::AwaitingAnswer));
            insert(&mut pending, other, PendingState::AwaitingAnswer);
            insert(&mut pending, kept, PendingState::AwaitingAnswer);
        }
        let awaits_request = insert(&mut pending, kept, PendingState::AwaitingRequest);
        expected.push(awaits_request);
        pending.end_listener(ended, false);
        pending.end_listener(kept, true);
        let mut closed = Vec::new();
        let mut batches = 0;
        while pending.has_ended_listeners() {
            let mut looks = 16;
            while let Some(slot) = pending.next_ended(&mut looks) {
                closed.push(slot);
                assert!(pending.take(slot).is_some());
            }
            batches += 1;
        }
        assert_eq!(closed, expected);
        // 101 connections and two listeners.
        assert_eq!(batches, 103_usize.div_ceil(16));
    }
}
