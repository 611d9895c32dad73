//! Connections that came to a listener, until an application accepts or rejects them.

use siw_iwarp::mpa::MpaResponder;
use siw_tcp::{ConnId, Instant};

use crate::ids::CmListenerId;

/// Generations have so many bits in a [`super::messages::RequestId`].
const GENERATIONS: u32 = 0xFF_FFFF;

/// One such connection.
pub struct PendingConnection {
    pub port: usize,
    pub conn: ConnId,
    pub listener: CmListenerId,
    pub responder: MpaResponder,
    pub accept_timeout: std::time::Duration,
    /// The application was asked.
    pub asked: bool,
    pub deadline: Instant,
    /// Distinguishes this request from earlier ones with the same slot.
    pub generation: u32,
}

/// Those of one worker. Finding a slot costs the same however many are taken.
#[derive(Default)]
pub struct PendingConnections {
    slots: Vec<Option<PendingConnection>>,
    free: Vec<u32>,
    generation: u32,
}

impl PendingConnections {
    /// Gives the connection a slot and a generation.
    pub fn insert(&mut self, mut pending: PendingConnection) -> u32 {
        self.generation = self.generation.wrapping_add(1) & GENERATIONS;
        pending.generation = self.generation;
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as u32
        });
        self.slots[slot as usize] = Some(pending);
        slot
    }

    pub fn get_mut(&mut self, slot: u32) -> Option<&mut PendingConnection> {
        self.slots.get_mut(slot as usize)?.as_mut()
    }

    /// Takes the connection out.
    pub fn take(&mut self, slot: u32) -> Option<PendingConnection> {
        let pending = self.slots.get_mut(slot as usize)?.take()?;
        self.free.push(slot);
        Some(pending)
    }

    /// Slots of those that `f` picks. Control path only: it walks them all.
    pub fn select(&self, f: impl Fn(&PendingConnection) -> bool) -> Vec<u32> {
        (0..self.slots.len() as u32)
            .filter(|i| self.slots[*i as usize].as_ref().is_some_and(&f))
            .collect()
    }
}
