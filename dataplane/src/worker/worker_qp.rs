//! A queue pair in its worker: the iWARP protocol machine, its rings, its connection; and the table of
//! all of them.

use std::mem::offset_of;

use siw_iwarp::{QueuePair, RdmapState};
use siw_net::{ConnId, Instant, QuotaOwner};
use siw_shm::control::FinalSend;
use siw_shm::prefetch::prefetch_lines;
use siw_tcp::Events;

use super::lifecycle_state::{LifecycleState, UnpolledCompletions};
use super::messages::QpSetup;
use super::owned_objects::OwnedObjects;
use super::qp_rings::QpRings;
use super::slots::{QpSlot, UserSlot};
use crate::ids::{ClientId, Qpn};

/// Time that a message waits for a receive work request if the consumer asks for the wait and the
/// device's settings give no time. Programs made for InfiniBand let the sender retry for seconds or
/// without limit.
const RECEIVE_WAIT_MS: u32 = 10_000;

/// One queue pair of a worker.
///
/// The order of the fields keeps those that every message accesses in few cache lines: the first
/// ones, up to the hot part of `rings`, and those of `protocol`. With more queue pairs than the
/// caches hold, each line of a message's queue pair is a miss.
#[repr(C, align(64))]
pub(super) struct WorkerQp {
    /// The client that owns it.
    pub(super) client: ClientId,
    /// Index of its device's port in the worker.
    pub(super) port: usize,
    /// User whose share of a batch it uses.
    pub(super) user: UserSlot,
    /// Its TCP connection, while there is one.
    pub(super) conn: Option<ConnId>,
    /// In the list of queue pairs that may have data to send.
    pub(super) is_ready: bool,
    /// Its send queue is polled.
    pub(super) is_polled: bool,
    /// The report of the end of its connection has a snapshot.
    pub(super) is_recorded: bool,
    /// The consumer wants no event at the end of the current drain.
    pub(super) drains_quietly: bool,
    pub(super) state: LifecycleState,
    pub(super) rings: QpRings,
    /// The iWARP protocol of its stream.
    pub(super) protocol: QueuePair,
    /// Client and user against whose quotas its connections count.
    pub(super) quota_owner: QuotaOwner,
    /// Number of connections of its port beyond which it gets none.
    pub(super) most_connections: usize,
    /// TCP events held back while a delivery is delayed or a message waits for a receive work request.
    pub(super) held_events: Events,
    /// Deadline of a message that waits for a receive work request, if one does.
    pub(super) receive_wait_end: Option<Instant>,
    /// The SEND that ends it if its client departs; present if it is a stream.
    pub(super) final_send: FinalSend,
    /// Completions whose polling the report of the end of its connection may wait for.
    pub(super) unpolled: Option<UnpolledCompletions>,
}

/// Bytes of a queue pair, besides those of its protocol, that a Write accesses.
const HOT_BYTES: usize = offset_of!(WorkerQp, rings) + QpRings::HOT_BYTES;
const _: () = assert!(HOT_BYTES <= 3 * 64, "three cache lines");

impl WorkerQp {
    /// Prefetches its cache lines, besides those of its protocol, that a message accesses.
    #[inline]
    fn prefetch_hot(&self) {
        prefetch_lines((&raw const *self).cast(), HOT_BYTES.div_ceil(64));
    }

    /// A queue pair without a connection.
    pub(super) fn new(setup: QpSetup, user: UserSlot, port: usize) -> WorkerQp {
        let mut protocol = QueuePair::new(setup.attr);
        let (is_recorded, final_send) = (setup.is_recorded, setup.final_send);
        protocol.set_paired(setup.is_paired);
        if setup.waits_for_receives {
            protocol.set_receive_wait(RECEIVE_WAIT_MS);
        }
        WorkerQp {
            client: setup.client,
            quota_owner: QuotaOwner {
                // Clients of one user whose numbers are equal modulo 2^32 share a limit.
                client: setup.client.0 as u32,
                user: setup.user,
            },
            user,
            most_connections: setup.most_connections,
            port,
            conn: None,
            protocol,
            rings: QpRings::new(setup),
            state: LifecycleState::Unconnected,
            held_events: Events::NONE,
            receive_wait_end: None,
            is_ready: false,
            is_polled: false,
            is_recorded,
            final_send,
            drains_quietly: false,
            unpolled: None,
        }
    }

    /// True if work requests posted now can be sent.
    #[inline]
    pub(super) fn is_streaming(&self) -> bool {
        self.state.has_stream() && self.protocol.state() == RdmapState::Rts
            || self.is_of_datagrams()
    }

    /// True if it sends and receives datagrams.
    #[inline]
    pub(super) fn is_of_datagrams(&self) -> bool {
        matches!(self.state, LifecycleState::Datagrams(_))
    }

    /// True if an acknowledgement may let it send more. After a turn that emptied the send queue it
    /// does not: the doorbell, or the scheduler's poll, announces the next request.
    #[inline]
    pub(super) fn may_send_after_ack(&self) -> bool {
        !self.rings.is_sq_drained || self.protocol.state() != RdmapState::Rts
    }

    /// True if it has a connection of its port or is about to open one.
    pub(super) fn uses_port(&self) -> bool {
        self.conn.is_some() || self.state.is_connecting()
    }

    /// True if work requests posted now can only be flushed.
    #[inline]
    pub(super) fn only_flushes(&self) -> bool {
        matches!(
            self.state,
            LifecycleState::Disconnected | LifecycleState::AwaitingRetries { .. }
        ) || self.protocol.state() == RdmapState::Error
    }

    /// True if the send queue has work requests that are posted or not completed. A ring with invalid
    /// indices counts as non-empty: taking from it ends its client.
    pub(super) fn has_sends(&mut self) -> bool {
        self.protocol.has_outstanding_sends()
            || self.rings.final_send.is_some()
            || !self.rings.sq.is_empty().unwrap_or(false)
    }
}

/// Queue pairs by slot, and slots by queue pair number.
#[derive(Default)]
pub(super) struct QpTable {
    slots: Vec<Option<Box<WorkerQp>>>,
    free: Vec<u32>,
    /// Slot plus one by queue pair number; 0 if the worker does not have the queue pair.
    by_qpn: Vec<u32>,
    pub(super) of_clients: OwnedObjects<ClientId>,
}

impl QpTable {
    /// The queue pair in this slot.
    #[inline]
    pub(super) fn get(&self, slot: QpSlot) -> Option<&WorkerQp> {
        self.slots.get(slot.0 as usize)?.as_deref()
    }

    /// The queue pair in this slot.
    #[inline]
    pub(super) fn get_mut(&mut self, slot: QpSlot) -> Option<&mut WorkerQp> {
        self.slots.get_mut(slot.0 as usize)?.as_deref_mut()
    }

    /// Prefetches the state of the queue pair in this slot that its doorbell accesses.
    #[inline]
    pub(super) fn prefetch_for_doorbell(&self, slot: QpSlot) {
        if let Some(queue_pair) = self.get(slot) {
            queue_pair.prefetch_hot();
        }
    }

    /// Prefetches the state of the queue pair in this slot that sending a message accesses, or its
    /// acknowledgement.
    #[inline]
    pub(super) fn prefetch_send_state(&self, slot: QpSlot) {
        if let Some(queue_pair) = self.get(slot) {
            queue_pair.prefetch_hot();
            queue_pair.protocol.prefetch_send_state();
        }
    }

    /// Prefetches the state of the queue pair in this slot that receiving a Write accesses.
    #[inline]
    pub(super) fn prefetch_receive_state(&self, slot: QpSlot) {
        if let Some(queue_pair) = self.get(slot) {
            queue_pair.prefetch_hot();
            queue_pair.protocol.prefetch_receive_state();
        }
    }

    /// The slot of a queue pair number.
    #[inline]
    pub(super) fn find(&self, qpn: Qpn) -> Option<QpSlot> {
        let entry = self.by_qpn.get(qpn.index()).copied()?;
        entry.checked_sub(1).map(QpSlot)
    }

    /// Gives the queue pair a slot.
    pub(super) fn insert(&mut self, queue_pair: Box<WorkerQp>) -> QpSlot {
        let qpn = queue_pair.rings.qpn.index();
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as u32
        });
        if self.by_qpn.len() <= qpn {
            self.by_qpn.resize(qpn + 1, 0);
        }
        self.by_qpn[qpn] = slot + 1;
        self.of_clients.insert(queue_pair.client, slot);
        self.slots[slot as usize] = Some(queue_pair);
        QpSlot(slot)
    }

    /// Removes the queue pair.
    pub(super) fn remove(&mut self, slot: QpSlot) -> Option<Box<WorkerQp>> {
        let queue_pair = self.slots.get_mut(slot.0 as usize)?.take()?;
        self.by_qpn[queue_pair.rings.qpn.index()] = 0;
        self.of_clients.remove(queue_pair.client, slot.0);
        self.free.push(slot.0);
        Some(queue_pair)
    }

    /// First slot of a queue pair of this client, from `from` on.
    pub(super) fn next_of_client(&self, client: ClientId, from: QpSlot) -> Option<QpSlot> {
        self.of_clients.next(client, from.0).map(QpSlot)
    }

    /// Slots of all queue pairs that `pick` selects. Control path only: scans all slots.
    pub(super) fn select(&self, pick: impl Fn(&WorkerQp) -> bool) -> Vec<QpSlot> {
        (0..self.slots.len() as u32)
            .map(QpSlot)
            .filter(|slot| self.get(*slot).is_some_and(&pick))
            .collect()
    }

    /// Number of slots, free ones included.
    pub(super) fn slots(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Number of queue pairs.
    pub(super) fn count(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}
