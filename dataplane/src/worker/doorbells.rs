//! Doorbells: clients name the queue pairs that they have posted to, so that no worker scans all of
//! them.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use siw_shm::DoorbellConsumer;

use super::Worker;
use super::slots::UserSlot;
use crate::ids::{ClientId, Qpn};

/// Doorbells taken from one client in one batch; the rest wait, so that no client delays the others.
/// All clients of a user together have a share, too: see [`super::user_shares`].
const DOORBELLS_PER_BATCH: usize = 64;
/// Number of a user's ready queue pairs that keeps a batch busy. The state of further ones would be
/// read now and evicted from the cache before their turn.
const ENOUGH_READY: usize = 128;
/// Doorbells taken from one client while its user has [`ENOUGH_READY`] ready queue pairs. Not zero,
/// because those may have so much to send that they stay ready.
const DOORBELLS_WHEN_ENOUGH: usize = 8;

/// Clients at whose doorbells a worker looks in each batch: those that rang last.
const ACTIVE_CLIENTS: usize = 32;
/// Further clients looked at in one batch, in turn. A client that rings after a pause is found within
/// a few batches, and then joins the active ones.
const OTHERS_PER_BATCH: usize = 32;

/// Which clients a batch looks at. The active clients are the first in the worker's list.
#[derive(Default)]
pub(super) struct ClientTurns {
    /// The next one of the others.
    next_other: usize,
    /// The active client that gives way to the next one found ringing.
    next_to_leave: usize,
}

impl ClientTurns {
    /// Number of clients to look at, of `count`.
    #[inline]
    fn looks(count: usize) -> usize {
        count.min(ACTIVE_CLIENTS + OTHERS_PER_BATCH)
    }

    /// Index of the client at place `look` of a batch.
    #[inline]
    fn client_at(&mut self, look: usize, start: usize, count: usize) -> usize {
        let active = count.min(ACTIVE_CLIENTS);
        if look < active {
            // Clients that had no turn in the last batch come first.
            return match start + look {
                index if index < active => index,
                index => index % active,
            };
        }
        if !(ACTIVE_CLIENTS..count).contains(&self.next_other) {
            self.next_other = ACTIVE_CLIENTS;
        }
        self.next_other += 1;
        self.next_other - 1
    }

    /// Returns the active client whose place one of the others takes.
    #[cold]
    fn next_to_leave(&mut self) -> usize {
        self.next_to_leave = (self.next_to_leave + 1) % ACTIVE_CLIENTS;
        self.next_to_leave
    }
}

/// A client as one worker sees it.
pub(super) struct WorkerClient {
    pub(super) client: ClientId,
    /// User whose share of a batch the client uses.
    pub(super) user: UserSlot,
    pub(super) doorbells: DoorbellConsumer,
    /// Written by the client when the worker sleeps.
    pub(super) wake_fd: Arc<OwnedFd>,
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
    let most = match ready {
        0..ENOUGH_READY => DOORBELLS_PER_BATCH,
        _ => DOORBELLS_WHEN_ENOUGH,
    };
    most.min(of_user)
}

impl Worker {
    /// Marks the queue pairs whose doorbell was rung as ready. Returns true if there were any.
    #[inline]
    pub(super) fn take_doorbells(&mut self) -> bool {
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
            if index >= ACTIVE_CLIENTS {
                let place = self.client_turns.next_to_leave();
                self.clients.swap(index, place);
                index = place;
            }
            let WorkerClient { client, user, .. } = self.clients[index];
            let of_user = self.users.doorbells_left(user).map_or(0, |left| *left);
            let share = doorbell_share(of_user, self.users.total_ready(user));
            if share == 0 && self.first_client == 0 {
                self.first_client = index;
            }
            let (mut left, mut taken) = (share, 0);
            while let Some(qpn) = self.clients[index].next_doorbell(&mut left) {
                taken += 1;
                let Some(slot) = self.queue_pairs.find(qpn) else {
                    continue;
                };
                // A client can ring only for its own queue pairs, whatever number it writes.
                let queue_pair = self.queue_pairs.get_mut(slot);
                let Some(queue_pair) = queue_pair.filter(|found| found.client == client) else {
                    continue;
                };
                self.polled_queues.on_doorbell(slot, queue_pair);
                self.mark_ready(slot);
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
}

#[cfg(test)]
mod tests {
    use nix::sys::eventfd::EventFd;
    use siw_shm::doorbell::ring_len;
    use siw_shm::shared_memory::PageSize;
    use siw_shm::{DoorbellProducer, SharedMemory};

    use super::super::user_shares::UserShares;
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
        let mut left = DOORBELLS_PER_BATCH;
        let mut taken = 0;
        while client.next_doorbell(&mut left).is_some() {
            taken += 1;
            assert!(taken <= DOORBELLS_PER_BATCH, "the batch does not end");
            meanwhile();
        }
        taken
    }

    #[test]
    fn a_client_that_rings_without_end_has_its_share_of_a_batch_and_no_more() {
        let (mut greedy, ring) = new_client(1);
        for number in 0..CAPACITY / 2 {
            ring.ring_doorbell(number);
        }
        for _ in 0..100 {
            // Rings as fast as the worker takes doorbells.
            let taken = take_batch(&mut greedy, || ring.ring_doorbell(u32::MAX - 1));
            assert_eq!(taken, DOORBELLS_PER_BATCH);
        }
        // When it rings no more, the rest is taken and nothing is lost.
        let mut rest = 0;
        loop {
            let taken = take_batch(&mut greedy, || {});
            rest += taken;
            if taken < DOORBELLS_PER_BATCH {
                break;
            }
        }
        assert_eq!(rest, CAPACITY as usize / 2);
    }

    #[test]
    fn a_batch_looks_at_the_active_clients_and_in_turn_at_the_others() {
        for count in [1, 2, ACTIVE_CLIENTS, 2000] {
            let mut turns = ClientTurns::default();
            let mut looks = vec![0; count];
            let batches = 1 + count
                .saturating_sub(ACTIVE_CLIENTS)
                .div_ceil(OTHERS_PER_BATCH);
            for batch in 0..batches {
                let start = batch % count.min(ACTIVE_CLIENTS);
                let most = ClientTurns::looks(count);
                assert!(most <= ACTIVE_CLIENTS + OTHERS_PER_BATCH);
                for look in 0..most {
                    looks[turns.client_at(look, start, count)] += 1;
                }
            }
            assert!(
                looks
                    .iter()
                    .take(ACTIVE_CLIENTS)
                    .all(|looks| *looks == batches)
            );
            assert!(looks.iter().all(|looks| *looks > 0), "of {count} clients");
        }
    }

    #[test]
    fn doorbells_wait_while_enough_queue_pairs_do_and_never_for_ever() {
        assert_eq!(doorbell_share(512, 0), DOORBELLS_PER_BATCH);
        assert_eq!(doorbell_share(512, ENOUGH_READY - 1), DOORBELLS_PER_BATCH);
        for ready in [ENOUGH_READY, 100_000] {
            assert_eq!(doorbell_share(512, ready), DOORBELLS_WHEN_ENOUGH);
            assert_eq!(doorbell_share(3, ready), 3);
        }
    }

    #[test]
    fn a_client_beside_one_that_rings_without_end_has_all_of_its_doorbells_taken() {
        let clients = [new_client(1), new_client(2)];
        let [(mut greedy, rung), (mut honest, ring)] = clients;
        for number in 0..CAPACITY {
            rung.ring_doorbell(number);
        }
        for number in 1..20 {
            for _ in 0..number {
                ring.ring_doorbell(number);
            }
            // One batch looks at both.
            let taken = (
                take_batch(&mut greedy, || rung.ring_doorbell(0)),
                take_batch(&mut honest, || {}),
            );
            assert_eq!(taken, (DOORBELLS_PER_BATCH, number as usize));
        }
    }
}
