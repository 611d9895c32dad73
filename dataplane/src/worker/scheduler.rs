//! Which queue pairs have their turn in a batch.
//!
//! Clients name the queue pairs that they have posted to in doorbells, so that no worker scans all of
//! them. The worker polls recently used send queues by itself, as Linux polls a network device whose
//! interrupt it has turned off (NAPI), and their clients ring no doorbells meanwhile. The pending word
//! shows this to the client: it stays set while its queue is polled, as if the doorbell had not been
//! taken yet. To stop, the worker clears the word and then checks the queue once more; a client that
//! posts after that check rings.
//!
//! Queue pairs found this way, and those that TCP's events or the protocol make ready, are queued by
//! user and port: see [`UserShares`]. `send.rs` gives them their turns.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use siw_iwarp::TxRecord;
use siw_shm::DoorbellConsumer;

use super::slots::{QpSlot, UserSlot};
use super::thresholds::THRESHOLDS;
use super::user_shares::UserShares;
use super::worker_qp::{QpTable, WorkerQp};
use crate::datapath::port::WorkerPort;
use crate::ids::{ClientId, Qpn};

/// Which clients a batch looks at. The active clients are the first in the worker's list.
#[derive(Default)]
struct ClientTurns {
    /// The next one of the others.
    next_other: usize,
    /// The active client that gives way to the next one found ringing.
    next_to_leave: usize,
}

impl ClientTurns {
    /// Number of clients to look at, of `count`.
    #[inline]
    fn looks(count: usize) -> usize {
        count.min(THRESHOLDS.active_clients + THRESHOLDS.other_clients)
    }

    /// Index of the client at place `look` of a batch.
    #[inline]
    fn client_at(&mut self, look: usize, start: usize, count: usize) -> usize {
        let active = count.min(THRESHOLDS.active_clients);
        if look < active {
            // Clients that had no turn in the last batch come first.
            return match start + look {
                index if index < active => index,
                index => index % active,
            };
        }
        if !(THRESHOLDS.active_clients..count).contains(&self.next_other) {
            self.next_other = THRESHOLDS.active_clients;
        }
        self.next_other += 1;
        self.next_other - 1
    }

    /// Returns the active client whose place one of the others takes.
    #[cold]
    fn next_to_leave(&mut self) -> usize {
        self.next_to_leave = (self.next_to_leave + 1) % THRESHOLDS.active_clients;
        self.next_to_leave
    }
}

/// A client as one worker sees it.
struct WorkerClient {
    client: ClientId,
    /// User whose share of a batch the client uses.
    user: UserSlot,
    doorbells: DoorbellConsumer,
    /// Written by the client when the worker sleeps.
    wake_fd: Arc<OwnedFd>,
}

impl WorkerClient {
    /// Takes the next queue pair number that the client has rung for. `left` is the rest of its share
    /// of this batch; at zero, nothing more is taken, however fast the client rings.
    #[inline]
    fn next_doorbell(&mut self, left: &mut usize) -> Option<Qpn> {
        *left = left.checked_sub(1)?;
        self.doorbells.pop().map(Qpn)
    }
}

/// Number of doorbells to take from a client whose user has `of_user` left in this batch and `ready`
/// ready queue pairs.
#[inline]
fn doorbell_share(of_user: usize, ready: usize) -> usize {
    let most = if ready < THRESHOLDS.enough_ready {
        THRESHOLDS.doorbells_per_client
    } else {
        THRESHOLDS.doorbells_when_enough
    };
    most.min(of_user)
}

/// One polled send queue.
#[derive(Debug, Clone, Copy)]
struct PolledQueue {
    slot: QpSlot,
    /// Producer index at the last poll.
    seen: u32,
    /// Polls since the index changed.
    in_vain: u32,
}

/// The polled queues of a worker.
#[derive(Debug, Default)]
struct PolledQueues(Vec<PolledQueue>);

impl PolledQueues {
    /// Handles a doorbell: polls the queue from now on, or lets the client ring again.
    #[inline]
    fn on_doorbell(&mut self, slot: QpSlot, queue_pair: &mut WorkerQp) {
        queue_pair.rings.sq.prefetch_next();
        // A client may ring for a polled queue, though it need not.
        if queue_pair.is_polled {
            return;
        }
        if self.0.len() < THRESHOLDS.polled_queues && queue_pair.is_streaming() {
            queue_pair.is_polled = true;
            self.0.push(PolledQueue {
                slot,
                seen: queue_pair.rings.sq.producer_index(),
                in_vain: 0,
            });
        } else {
            queue_pair.rings.sq.clear_pending();
        }
    }

    /// Removes a queue pair that is removed from its worker.
    fn remove(&mut self, slot: QpSlot) {
        self.0.retain(|polled| polled.slot != slot);
    }
}

/// The clients of a worker, and its queue pairs that may have data to send.
pub(super) struct Scheduler {
    /// Share of each user in this batch: its doorbells, and its ready queue pairs.
    pub(super) users: UserShares,
    clients: Vec<WorkerClient>,
    /// Place of each client in `clients`.
    places: HashMap<ClientId, usize>,
    /// Client at which the next batch starts to look for doorbells.
    first_client: usize,
    client_turns: ClientTurns,
    polled: PolledQueues,
    /// Doorbells taken from all clients.
    pub(super) doorbells_taken: u64,
}

impl Scheduler {
    /// A scheduler for `ports` ports.
    pub(super) fn new(ports: usize) -> Scheduler {
        Scheduler {
            users: UserShares::new(ports),
            clients: Vec::new(),
            places: HashMap::new(),
            first_client: 0,
            client_turns: ClientTurns::default(),
            polled: PolledQueues::default(),
            doorbells_taken: 0,
        }
    }

    /// Adds a client of a user (uid).
    pub(super) fn add_client(
        &mut self,
        client: ClientId,
        uid: u32,
        doorbells: DoorbellConsumer,
        wake_fd: Arc<OwnedFd>,
    ) {
        let user = self.users.add_client(uid);
        self.places.insert(client, self.clients.len());
        self.clients.push(WorkerClient {
            client,
            user,
            doorbells,
            wake_fd,
        });
    }

    /// Removes a client, whose queue pairs were removed before. Returns its wake-up descriptor.
    pub(super) fn remove_client(&mut self, client: ClientId) -> Option<Arc<OwnedFd>> {
        let place = self.places.remove(&client)?;
        let removed = self.clients.swap_remove(place);
        if let Some(moved) = self.clients.get(place) {
            self.places.insert(moved.client, place);
        }
        self.users.remove_client(removed.user);
        Some(removed.wake_fd)
    }

    /// User of a client, which was added before its queue pairs.
    pub(super) fn user_of(&self, client: ClientId) -> UserSlot {
        let place = self.places.get(&client);
        place.map_or(UserSlot::FIRST, |place| self.clients[*place].user)
    }

    /// Exchanges the places of two clients.
    #[cold]
    fn exchange_clients(&mut self, places: [usize; 2]) {
        self.clients.swap(places[0], places[1]);
        for place in places {
            self.places.insert(self.clients[place].client, place);
        }
    }

    /// Removes a queue pair that is removed from its worker.
    pub(super) fn remove_queue_pair(&mut self, slot: QpSlot) {
        self.polled.remove(slot);
    }

    /// True if a queue pair is ready or a doorbell was rung.
    pub(super) fn has_work(&self) -> bool {
        let mut clients = self.clients.iter();
        !self.users.is_idle() || clients.any(|client| client.doorbells.has_work())
    }

    /// Marks a queue pair that may have data to send.
    #[inline]
    pub(super) fn mark_ready(&mut self, slot: QpSlot, queue_pair: &mut WorkerQp) {
        if !queue_pair.is_ready {
            queue_pair.is_ready = true;
            let (user, port) = (queue_pair.user, queue_pair.port);
            self.users.push_ready(user, port, slot);
        }
    }

    /// Marks the queue pairs whose doorbell was rung as ready. Returns true if there were any.
    #[inline]
    pub(super) fn take_doorbells(&mut self, queue_pairs: &mut QpTable) -> bool {
        let mut any = false;
        let count = self.clients.len();
        let start = std::mem::take(&mut self.first_client);
        self.users.begin_batch();
        for look in 0..ClientTurns::looks(count) {
            let mut index = self.client_turns.client_at(look, start, count);
            // Checked first, because most clients have none.
            if !self.clients[index].doorbells.has_work() {
                continue;
            }
            if index >= THRESHOLDS.active_clients {
                let place = self.client_turns.next_to_leave();
                self.exchange_clients([index, place]);
                index = place;
            }
            let WorkerClient { client, user, .. } = self.clients[index];
            let of_user = self.users.doorbells_left(user).map_or(0, |left| *left);
            let share = doorbell_share(of_user, self.users.total_ready(user));
            if share == 0 && self.first_client == 0 {
                self.first_client = index;
            }
            let (mut left, mut taken) = (share, 0);
            // All are taken before the first is handled, so that the cache misses overlap.
            let mut rung = [QpSlot::FIRST; THRESHOLDS.doorbells_per_client];
            let mut found = 0;
            while let Some(qpn) = self.clients[index].next_doorbell(&mut left) {
                taken += 1;
                if let Some(slot) = queue_pairs.find(qpn) {
                    queue_pairs.prefetch_for_doorbell(slot);
                    rung[found] = slot;
                    found += 1;
                }
            }
            for &slot in &rung[..found] {
                // A client can ring only for its own queue pairs, whatever number it writes.
                let queue_pair = queue_pairs.get_mut(slot);
                let Some(queue_pair) = queue_pair.filter(|found| found.client == client) else {
                    continue;
                };
                self.polled.on_doorbell(slot, queue_pair);
                self.mark_ready(slot, queue_pair);
            }
            if taken > 0
                && let Some(of_user) = self.users.doorbells_left(user)
            {
                *of_user -= taken;
                self.doorbells_taken += taken as u64;
                any = true;
            }
        }
        any
    }

    /// Polls the queues. Returns true if a request was posted to one.
    #[inline]
    pub(super) fn poll_send_queues(&mut self, queue_pairs: &mut QpTable) -> bool {
        let mut any = false;
        let mut place = 0;
        while let Some(polled) = self.polled.0.get_mut(place) {
            let slot = polled.slot;
            let Some(queue_pair) = queue_pairs.get_mut(slot) else {
                self.polled.0.swap_remove(place);
                continue;
            };
            let posted = queue_pair.rings.sq.producer_index();
            if !queue_pair.is_streaming() || polled.in_vain == THRESHOLDS.empty_polls {
                stop_polling(queue_pair);
                self.polled.0.swap_remove(place);
            } else if posted == polled.seen {
                polled.in_vain += 1;
                place += 1;
                continue;
            } else {
                queue_pair.rings.sq.prefetch_next();
                (polled.seen, polled.in_vain) = (posted, 0);
                any = true;
                place += 1;
            }
            self.mark_ready(slot, queue_pair);
        }
        any
    }

    /// Stops polling before the worker sleeps: clients have to ring from now on. Marks the queue pairs
    /// with requests posted before as ready.
    pub(super) fn stop_polling(&mut self, queue_pairs: &mut QpTable) {
        for polled in std::mem::take(&mut self.polled).0 {
            if let Some(queue_pair) = queue_pairs.get_mut(polled.slot) {
                stop_polling(queue_pair);
                // A failed queue pair is marked, too, to have its receive queue flushed.
                let is_streaming = queue_pair.is_streaming();
                if queue_pair.rings.sq.producer_index() != polled.seen || !is_streaming {
                    self.mark_ready(polled.slot, queue_pair);
                }
            }
        }
    }

    /// Prefetches for coming turns of a user and port with at least `prefetch_from` ready queue pairs. The
    /// current queue pair has been taken out of the list.
    #[inline]
    pub(super) fn prefetch_ready(
        &self,
        queue_pairs: &mut QpTable,
        port: &mut WorkerPort<TxRecord>,
        user: UserSlot,
        port_index: usize,
    ) {
        if let Some(slot) = self
            .users
            .peek_ready(user, port_index, THRESHOLDS.queue_pair_ahead)
        {
            queue_pairs.prefetch_send_state(slot);
        }
        let stack = &mut port.stack;
        if let Some(slot) = self
            .users
            .peek_ready(user, port_index, THRESHOLDS.connection_ahead)
            && let Some(queue_pair) = queue_pairs.get_mut(slot)
        {
            queue_pair.rings.sq.prefetch_next();
            queue_pair.protocol.prefetch_for_sending();
            if let Some(conn) = queue_pair.conn {
                stack.prefetch_for_sending(conn);
            }
        }
        if let Some(slot) = self.users.peek_ready(user, port_index, 0)
            && let Some(queue_pair) = queue_pairs.get(slot)
            && let Some(conn) = queue_pair.conn
        {
            stack.prefetch_queues_for_sending(conn);
        }
    }
}

/// Makes the client ring from now on. The caller has to check afterwards for requests posted since the
/// last poll.
#[inline]
fn stop_polling(queue_pair: &mut WorkerQp) {
    queue_pair.is_polled = false;
    queue_pair.rings.sq.clear_pending();
}

#[cfg(test)]
mod tests {
    use nix::sys::eventfd::EventFd;
    use siw_shm::doorbell::ring_len;
    use siw_shm::shared_memory::PageSize;
    use siw_shm::{DoorbellProducer, SharedMemory};

    use super::*;

    const CAPACITY: u32 = 1024;

    fn new_client(number: u64) -> (WorkerClient, DoorbellProducer) {
        let memory = SharedMemory::create_memfd("doorbells", ring_len(CAPACITY), PageSize::Normal);
        let memory = Arc::new(memory.unwrap());
        let client = WorkerClient {
            client: ClientId(number),
            user: UserShares::new(1).add_client(0),
            doorbells: DoorbellConsumer::new(memory.clone(), 0, CAPACITY).unwrap(),
            wake_fd: Arc::new(EventFd::new().unwrap().into()),
        };
        (client, DoorbellProducer::new(memory, 0, CAPACITY).unwrap())
    }

    /// Takes one batch of doorbells from a client and returns their number; `meanwhile` runs after
    /// each.
    fn take_batch(client: &mut WorkerClient, mut meanwhile: impl FnMut()) -> usize {
        let mut left = THRESHOLDS.doorbells_per_client;
        let mut taken = 0;
        while client.next_doorbell(&mut left).is_some() {
            taken += 1;
            assert!(
                taken <= THRESHOLDS.doorbells_per_client,
                "the batch does not end"
            );
            meanwhile();
        }
        taken
    }

    #[test]
    fn a_client_that_rings_without_end_has_its_share_of_a_batch_and_no_more() {
        let (mut greedy, ring) = new_client(1);
        for number in 0..CAPACITY / 2 {
            ring.ring_doorbell(number, || false);
        }
        for _ in 0..100 {
            // Rings as fast as the worker takes doorbells.
            let taken = take_batch(&mut greedy, || ring.ring_doorbell(u32::MAX - 1, || false));
            assert_eq!(taken, THRESHOLDS.doorbells_per_client);
        }
        // When it rings no more, the rest is taken and nothing is lost.
        let mut rest = 0;
        loop {
            let taken = take_batch(&mut greedy, || {});
            rest += taken;
            if taken < THRESHOLDS.doorbells_per_client {
                break;
            }
        }
        assert_eq!(rest, CAPACITY as usize / 2);
    }

    #[test]
    fn clients_are_found_wherever_their_place_is() {
        const CLIENTS: u64 = 100;
        let mut scheduler = Scheduler::new(1);
        let mut rings = Vec::new();
        for number in 0..CLIENTS {
            let (client, ring) = new_client(number);
            let WorkerClient {
                doorbells, wake_fd, ..
            } = client;
            scheduler.add_client(ClientId(number), number as u32 % 7, doorbells, wake_fd);
            rings.push(ring);
        }
        let users: Vec<_> = (0..7)
            .map(|user| scheduler.user_of(ClientId(user)))
            .collect();
        // Clients that were not active take the places of active ones.
        for ring in rings.iter().rev() {
            ring.ring_doorbell(1, || false);
            scheduler.take_doorbells(&mut QpTable::default());
        }
        for number in (0..CLIENTS).step_by(3) {
            assert!(scheduler.remove_client(ClientId(number)).is_some());
            assert!(scheduler.remove_client(ClientId(number)).is_none());
        }
        for number in (0..CLIENTS).filter(|number| number % 3 != 0) {
            let user = users[(number % 7) as usize];
            assert_eq!(scheduler.user_of(ClientId(number)), user);
            let place = scheduler.places[&ClientId(number)];
            assert_eq!(scheduler.clients[place].client, ClientId(number));
        }
        assert_eq!(scheduler.places.len(), scheduler.clients.len());
    }

    #[test]
    fn a_batch_looks_at_the_active_clients_and_in_turn_at_the_others() {
        for count in [1, 2, THRESHOLDS.active_clients, 2000] {
            let mut turns = ClientTurns::default();
            let mut looks = vec![0; count];
            let batches = 1 + count
                .saturating_sub(THRESHOLDS.active_clients)
                .div_ceil(THRESHOLDS.other_clients);
            for batch in 0..batches {
                let start = batch % count.min(THRESHOLDS.active_clients);
                let most = ClientTurns::looks(count);
                assert!(most <= THRESHOLDS.active_clients + THRESHOLDS.other_clients);
                for look in 0..most {
                    looks[turns.client_at(look, start, count)] += 1;
                }
            }
            assert!(
                looks
                    .iter()
                    .take(THRESHOLDS.active_clients)
                    .all(|looks| *looks == batches)
            );
            assert!(looks.iter().all(|looks| *looks > 0), "of {count} clients");
        }
    }

    #[test]
    fn doorbells_wait_while_enough_queue_pairs_do_and_never_for_ever() {
        assert_eq!(doorbell_share(512, 0), THRESHOLDS.doorbells_per_client);
        assert_eq!(
            doorbell_share(512, THRESHOLDS.enough_ready - 1),
            THRESHOLDS.doorbells_per_client
        );
        for ready in [THRESHOLDS.enough_ready, 100_000] {
            assert_eq!(doorbell_share(512, ready), THRESHOLDS.doorbells_when_enough);
            assert_eq!(doorbell_share(3, ready), 3);
        }
    }

    #[test]
    fn a_client_beside_one_that_rings_without_end_has_all_of_its_doorbells_taken() {
        let clients = [new_client(1), new_client(2)];
        let [(mut greedy, rung), (mut honest, ring)] = clients;
        for number in 0..CAPACITY {
            rung.ring_doorbell(number, || false);
        }
        for number in 1..20 {
            for _ in 0..number {
                ring.ring_doorbell(number, || false);
            }
            // One batch looks at both.
            let taken = (
                take_batch(&mut greedy, || rung.ring_doorbell(0, || false)),
                take_batch(&mut honest, || {}),
            );
            assert_eq!(taken, (THRESHOLDS.doorbells_per_client, number as usize));
        }
    }
}
